# SPDX-License-Identifier: Apache-2.0
"""Whether AITER's captures are fenced is decided by the configuration.

It is a VllmConfig of `--enable-sleep-mode` on the simulator, and reaches AITER through
the CudaCommunicator of both bases.
"""

import pytest

from . import aiter_double
from .conftest import Base
from .rocm_machine import CYCLES

OFFLOAD = {"sleep_mode_offload_cudagraph": True}
DOWN = {
    "not given": {},
    "without effect": {**OFFLOAD, "enforce_eager": True},
}
# Before the class had `_pool`; with `defers_capture_registration`; with more methods.
RELEASES = ("0.1.11", "0.1.26", "later")
TOO_OLD = "0.1.10"

groups = pytest.mark.parametrize("group", ["tp", "dp"])
releases = pytest.mark.parametrize("release", RELEASES)
down = pytest.mark.parametrize("options", DOWN.values(), ids=DOWN)


@groups
@releases
def test_the_option_puts_the_fence_up(base: Base, release: str, group: str) -> None:
    for made in base.run("communicator_fence:chosen", release, group, OFFLOAD):
        assert made.offloads
        assert made.active == ("aiter_ar_comm",)
        assert made.scatters == (group == "dp")
        assert "all_reduce" in made.fenced_methods
        assert made.is_subclass
        assert made.registers is False
        assert made.registers_graph_buffers is False
        assert made.graph_capture is (None if base.version == "0.32.0" else False)
        assert made.fused_operators == (group == "tp")


@groups
@releases
@down
def test_without_it_aiter_is_as_it_is(
    base: Base, release: str, group: str, options: dict[str, bool]
) -> None:
    attributes = aiter_double.surface_of(release).class_attributes
    registers = attributes.get("defers_capture_registration", False)
    for made in base.run("communicator_fence:chosen", release, group, options):
        assert not made.offloads
        assert made.active == ("aiter_ar_comm",)
        assert made.scatters == (group == "dp")
        assert made.fenced_methods == ()
        assert made.is_aiters
        assert made.registers is True
        assert made.registers_graph_buffers is registers
        assert made.graph_capture is (None if base.version == "0.32.0" else registers)
        assert made.fused_operators == (group == "tp")


@groups
def test_an_aiter_that_cannot_be_fenced_is_refused(base: Base, group: str) -> None:
    arguments = (TOO_OLD, group)
    for reason in base.run("communicator_fence:refused", *arguments, OFFLOAD):
        for word in (TOO_OLD, "0.1.11", "--sleep-mode-offload-cudagraph"):
            assert word in reason


@groups
@down
def test_an_aiter_that_cannot_be_fenced_serves_without_it(
    base: Base, group: str, options: dict[str, bool]
) -> None:
    for made in base.run("communicator_fence:chosen", TOO_OLD, group, options):
        assert made.active == ("aiter_ar_comm",)
        assert made.fenced_methods == ()
        assert made.is_aiters
        assert made.registers is None


@releases
def test_what_sleeps_is_captured_without_being_registered(
    base: Base, release: str
) -> None:
    for seen in base.run("communicator_fence:captured", release, OFFLOAD):
        assert seen.in_cumem
        assert seen.registered == [False]
        assert (seen.exports, seen.virtual_exports) == (0, 0)
        assert seen.replays == [True] * CYCLES


@releases
def test_what_does_not_sleep_is_captured_as_aiter_does(
    base: Base, release: str
) -> None:
    for seen in base.run("communicator_fence:captured", release, {}):
        assert not seen.in_cumem
        assert seen.registered == [True]
        assert seen.exports > 0 and seen.virtual_exports == 0
        assert seen.replays == [True] * CYCLES
