# SPDX-License-Identifier: Apache-2.0
"""The table of AITER's surfaces, and what docs/aiter.md makes of it."""

import re
from collections.abc import Iterator
from pathlib import Path

from vllm.distributed.device_communicators.aiter_capture_fence import fence

from .aiter_double import make_class, surfaces
from .captured_collectives import cases_of

PAGE = Path(__file__).parents[2] / "docs" / "aiter.md"
KINDS = {
    "reduce-scatter": "custom_reduce_scatter",
    "all-gather": "custom_all_gather",
    "fused": "custom_fused",
}

FENCED = [surface for surface in surfaces() if "0.1.10" not in surface.releases]


def test_every_kind_of_collective_is_among_the_cases():
    """Each release from 0.1.11 to 0.1.26 has one surface, with what it had by then."""
    releases = [r for s in surfaces() if not s.made_up for r in s.releases]
    assert [r for r in releases if r != "0.1.10"] == [
        f"0.1.{number}" for number in range(11, 27)
    ]
    names = {case.name for surface in FENCED for case in cases_of(surface)}
    assert names >= {
        "custom_all_reduce",
        "custom_reduce_scatter",
        "custom_all_gather",
        "custom_fused_ar_rms",
        "custom_fused_ar_rms_quant",
        "custom_fused_ar_rms_per_group_quant",
        "custom_fused_ar_rms_per_group_quant(emit_bf16)",
        "fused_ar_rms_per_group_quant",
        "fused_ar_rms_per_group_quant(emit_bf16)",
        "custom_fused_qknorm_ar",
        "custom_fused_qknorm_ar_rope",
        "custom_fused_ar_rms_mxfp4_quant",
    }


def page_rows() -> Iterator[tuple[list[str], str]]:
    """The rows of docs/aiter.md that begin with releases, and what they say."""
    row = r"^\| (0\.1\.\d+)(?: to (0\.1\.\d+))? \| (.*) \|$"
    for first, last, cell in re.findall(row, PAGE.read_text(), re.M):
        numbers = range(int(first[4:]), int((last or first)[4:]) + 1)
        yield [f"0.1.{number}" for number in numbers], cell


def test_the_page_says_what_is_fenced():
    fenced: set[str] = set()
    told = {}
    for releases, cell in page_rows():
        if methods := set(re.findall(r"`(\w+)`", cell)):
            fenced |= methods
            told |= dict.fromkeys(releases, tuple(sorted(fenced)))
    assert told == {
        release: fence(make_class(surface)).fenced_methods
        for surface in FENCED
        if not surface.made_up
        for release in surface.releases
    }


def test_the_page_says_what_registers_against_its_option():
    told = {
        release: {word for word in KINDS if word in cell}
        for releases, cell in page_rows()
        if not re.search(r"`\w+`", cell)
        for release in releases
    }
    assert told == {
        release: {
            word
            for word, name in KINDS.items()
            for method in surface.methods.values()
            if method.name.startswith(name) and method.capturing == "true"
        }
        for surface in FENCED
        if not surface.made_up
        for release in surface.releases
    }
