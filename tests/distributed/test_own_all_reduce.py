# SPDX-License-Identifier: Apache-2.0
"""vLLM's own all-reduces export nothing that sleeps, and the series leaves them alone.

They are the classes of both bases, chosen and made by CudaCommunicator, over doubles of
their compiled operators.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_rocm_memory.series.definition import load

from .conftest import Base
from .custom_ar_double import Launch
from .own_all_reduce import CUSTOM, QUICK
from .rocm_machine import CYCLES

FOLDER = "distributed/device_communicators"
# CustomAllreduce has one for its signals and one for its inputs, QuickReduce has one.
BUFFERS = 3
FILES = (f"{FOLDER}/custom_all_reduce.py", f"{FOLDER}/quick_all_reduce.py")


@pytest.mark.parametrize("offload", [True, False], ids=["offloads", "does not"])
def test_custom_all_reduce_copies_what_sleeps(base: Base, offload: bool) -> None:
    for seen in base.run("own_all_reduce:captured", offload, CUSTOM):
        assert seen.own_class == f"vllm.{FOLDER.replace('/', '.')}.custom_all_reduce"
        assert seen.in_cumem == offload
        assert seen.launches == [Launch("all_reduce", not offload, captured=True)]
        assert seen.made_exports == BUFFERS
        # Where it copies, its kernel reads the buffer, which is exported once more.
        assert seen.exported == ["buffer" if offload else "input"]
        assert (seen.capture_exports, seen.replay_exports) == (1, 0)
        assert seen.virtual_exports == 0
        assert seen.replays == [True] * CYCLES


@pytest.mark.parametrize("offload", [True, False], ids=["offloads", "does not"])
def test_quick_reduce_exports_its_own_buffer_alone(base: Base, offload: bool) -> None:
    for seen in base.run("own_all_reduce:captured", offload, QUICK):
        assert seen.own_class == f"vllm.{FOLDER.replace('/', '.')}.quick_all_reduce"
        assert seen.in_cumem == offload
        assert seen.launches == [Launch("qr_all_reduce", False, captured=True)]
        assert seen.made_exports == BUFFERS
        assert seen.exported == []
        assert (seen.capture_exports, seen.replay_exports) == (0, 0)
        assert seen.virtual_exports == 0
        assert seen.replays == [True] * CYCLES


def test_a_registering_capture_of_what_sleeps_would_fail(base: Base) -> None:
    for message, virtual_exports in base.run("own_all_reduce:registered_from_cumem"):
        assert "hipIpcGetMemHandle" in message and "(1)" in message
        assert virtual_exports == 1


def test_the_series_leaves_them_alone(
    base: Base, released_tree: Callable[[str], Path]
) -> None:
    released = released_tree(base.version)
    touched = {step.file for patch in load().patches for step in patch.steps}
    for file in FILES:
        assert f"vllm/{file}" not in touched
        assert (base.package / file).read_bytes() == (released / file).read_bytes()
