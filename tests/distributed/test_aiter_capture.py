# SPDX-License-Identifier: Apache-2.0
"""Captures of every collective of every AITER into memory that sleeps, on two ranks.

With the fence each succeeds and no such memory is exported; without it the very same
captures fail, each where its release registers.
"""

import re

import pytest

from . import captured_collectives
from .aiter_double import Surface, surface_of, surfaces
from .captured_collectives import CYCLES, Case, Seen, cases_of
from .conftest import Base
from .ranks import Ranks

RANK_SIDE = captured_collectives.__name__
NEWEST = surfaces()[-2].releases[-1]
REFUSED = "hipIpcGetMemHandle failed: hipErrorInvalidValue (1)"

FENCED = [surface for surface in surfaces() if "0.1.10" not in surface.releases]
every_surface = pytest.mark.parametrize("surface", FENCED, ids=str)

# AITER is the same in both bases, and so is what the series puts around it.
pytestmark = pytest.mark.parametrize("base", ["0.32.0"], indirect=True)


@pytest.fixture
def pair(base: Base) -> Ranks:
    return base.ranks


def capture(
    pair: Ranks,
    surface: Surface,
    profile: str = "7.16",
    *,
    up: bool = True,
    without_fence: bool = False,
    sleeps: bool = True,
) -> list[Seen]:
    return pair.run(
        f"{RANK_SIDE}:capture_all",
        surface.releases[-1],
        profile,
        up,
        without_fence,
        sleeps,
        timeout=120,
    )


def check_copied(results: list[Seen]) -> None:
    """Captured, no memory that sleeps exported, and replays like eager calls."""
    for seen in results:
        assert failures(seen) == {}
        assert seen.virtual_exports == 0
        for name, each in seen.outcomes.items():
            assert each.right == [True] * CYCLES, name


def failures(seen: Seen) -> dict[str, str]:
    return {name: each.error for name, each in seen.outcomes.items() if each.error}


def takes_output(surface: Surface, case: Case) -> bool:
    """Whether what a case calls may be given its result's memory."""
    method = case.method
    while method.calls:
        method = surface.methods[method.calls[0]]
    return re.search(r"\b(out|output)\b", method.signature) is not None


def registers(surface: Surface, case: Case, option: bool) -> bool:
    """Whether the capture of a case exports memory that sleeps, without a fence."""
    if case.reads_own_buffer:
        reduces = case.method.kernel == "all_reduce" or "moe" in case.method.name
        return reduces and surface.registers_output
    if case.flag is not None or case.by_name:
        return True
    return case.method.capturing == "true" or (
        option and case.method.capturing == "option"
    )


@every_surface
def test_with_the_fence_every_capture_copies_what_sleeps(pair, surface):
    results = capture(pair, surface)
    check_copied(results)
    for seen in results:
        for case in cases_of(surface):
            outcome = seen.outcomes[case.name]
            assert outcome.input_sleeps is not case.reads_own_buffer, case.name
            # A method that takes no output registers none: what is in the buffer stays.
            stays = case.reads_own_buffer and not takes_output(surface, case)
            assert outcome.registered == [stays], case.name
            # AITER knows no other address of its buffer than its start.
            assert outcome.exported == (stays and case.offset > 0), case.name


@every_surface
def test_without_the_fence_the_same_captures_fail(pair, surface):
    """AITER's option, which vLLM sets, is all that is left then."""
    results = capture(pair, surface, without_fence=True)
    with pytest.raises(AssertionError):
        check_copied(results)
    expected = {
        case.name for case in cases_of(surface) if registers(surface, case, False)
    }
    for seen in results:
        failed = failures(seen)
        assert failed.keys() == expected
        assert all(error.startswith(REFUSED) for error in failed.values())
    assert {"all_reduce", "reduce_scatter", "all_gather_reg"} <= expected


@every_surface
def test_without_fence_and_option_no_registering_capture_survives(pair, surface):
    results = capture(pair, surface, up=False)
    expected = {
        case.name for case in cases_of(surface) if registers(surface, case, True)
    }
    for seen in results:
        failed = failures(seen)
        assert failed.keys() == expected
        assert all(REFUSED in error for error in failed.values())


@pytest.mark.parametrize("surface", surfaces(), ids=str)
def test_with_the_fence_down_the_registered_path_is_as_before(pair, surface):
    """For graphs that do not sleep, also of an AITER that the fence would refuse."""
    exported = 0
    for seen in capture(pair, surface, up=False, sleeps=False):
        for case in cases_of(surface):
            outcome = seen.outcomes[case.name]
            assert outcome.error == "" and outcome.right == [True] * CYCLES, case.name
            never = case.method.capturing == "false"
            assert outcome.registered == [not never], case.name
            exports = registers(surface, case, True) or case.offset > 0
            assert bool(outcome.exported) is exports, case.name
            exported += outcome.exported
    assert exported > 0


@pytest.mark.parametrize("profile", ["7.1", "7.2.3", "7.13"])
def test_on_other_releases_of_hip(pair, profile):
    """Before 7.13 such memory has a handle, which no rank can open."""
    surface = surface_of(NEWEST)
    check_copied(capture(pair, surface, profile))
    seen, _ = capture(pair, surface, profile, without_fence=True)
    call = "hipIpcGetMemHandle" if profile == "7.13" else "hipIpcOpenMemHandle"
    errors = failures(seen).values()
    assert errors and all(f"{call} failed" in error for error in errors)


@pytest.mark.parametrize("release", ["0.1.16", "0.1.20", NEWEST])
def test_what_vllm_fuses_into_a_model(pair, release):
    run = f"{RANK_SIDE}:capture_vllms_operations"
    check_copied(pair.run(run, release, False))
    for seen in pair.run(run, release, True):
        # For the quantising ones vLLM asks AITER's option itself.
        assert list(failures(seen)) == ([] if release == NEWEST else [""])


def test_a_moes_epilogue_reduces_what_lies_in_aiters_buffer(pair):
    """Where the table has it; elsewhere a producer that writes there stands for it."""
    seen, _ = capture(pair, surfaces()[-1])
    moe = {name: each for name, each in seen.outcomes.items() if "moe" in name}
    assert len(moe) == 2
    for outcome in moe.values():
        assert outcome.error == "" and outcome.right == [True] * CYCLES


def test_an_aiter_that_cannot_copy_is_refused(pair):
    for said in pair.run(f"{RANK_SIDE}:refusal", "0.1.10"):
        assert "from 0.1.11 on, and the installed one is 0.1.10" in said
    assert pair.run(f"{RANK_SIDE}:refusal", "0.1.11") == ["", ""]
