# SPDX-License-Identifier: Apache-2.0
"""On ROCm, memory that a wake does not restore is zero, whatever its pages held.

Before a wake all free memory of the device is written to and freed, which drivers
before amdgpu 6.14 hand out again as it is. Newer ones clean it: there, only ranges that
are filled once they are mapped show who clears. Not run on AMD hardware so far.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from reporting import amdgpu_driver

from .children import environment, python, run
from .zero_on_wake import WAYS

pytestmark = pytest.mark.timeout(600)

PROGRAM = Path(__file__).with_name("zero_on_wake.py")
CHUNK_VARIABLE = "VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE"
MIB = 1 << 20


@pytest.fixture(scope="module", params=[2, 64, 256, 4096], ids=lambda n: f"{n} MiB")
def chunk(request: pytest.FixtureRequest) -> int:
    """MiB of a chunk; 256 is vLLM's default."""
    return int(request.param)


@pytest.fixture(scope="module")
def report(chunk: int) -> dict[str, Any]:
    (said,) = run(
        python(PROGRAM), env=environment({CHUNK_VARIABLE: str(chunk)}), seconds=240
    )
    told: dict[str, Any] = json.loads(said.splitlines()[-1])
    return told


def test_the_chunks_are_of_that_size(report, chunk):
    assert report["chunk"] == chunk * MIB
    assert report["largest"] <= chunk * MIB
    assert (report["in several"] > 0) == (chunk < 3072), "3 GiB are in one of 4 GiB"


@pytest.mark.parametrize("way", WAYS)
def test_what_has_no_backup_comes_back_zero_from_dirty_pages(report, way):
    told = report["old"][way]
    assert told["dirty"] >= told["asleep"], "the wake may get dirty pages"
    assert told["wrong"] == []
    assert told["kept"], "what has a backup is as it was"
    if told["driver cleans"]:
        pytest.skip(
            f"{amdgpu_driver()} hands pages out clean, so that this shows nothing"
        )


@pytest.mark.parametrize("way", WAYS)
def test_what_has_no_backup_comes_back_zero_from_poisoned_pages(report, way):
    told = report["poisoned"][way]
    assert told["poisoned"] == told["ranges"] > 0, "once a range"
    assert told["wrong"] == []
    assert told["kept"], "what has a backup is as it was"
