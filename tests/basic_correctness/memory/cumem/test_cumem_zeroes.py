# SPDX-License-Identifier: Apache-2.0
"""The program of gpu/test_zero_on_wake.py, on a simulated AMD GPU."""

from types import SimpleNamespace

import pytest
import torch
from vllm.device_allocator import cumem

from ....gpu import zero_on_wake

MIB = 1 << 20
SIZES = (2 * MIB, 5 * MIB + 4096)
FREE = 256 * MIB


@pytest.fixture
def run(allocator, device, monkeypatch):
    """The program, with a small part of the device for its free memory."""
    if device.type != "cpu":
        pytest.skip("needs a simulated GPU; gpu/test_zero_on_wake.py is for AMD GPUs")
    runtime = SimpleNamespace(cudaMemset=device.fill)
    monkeypatch.setitem(vars(cumem), "libcudart", runtime)
    margin = torch.accelerator.get_memory_info()[0] - FREE
    return lambda: zero_on_wake.main("cpu", SIZES, margin, probe=8 * MIB)


def test_it_finds_zeros_and_what_was_kept(run):
    report = run()
    for pages in zero_on_wake.PAGES:
        for way, told in report[pages].items():
            assert told["wrong"] == [], (pages, way)
            assert told["kept"], (pages, way)
    for told in report["old"].values():
        assert told["dirty"] >= told["asleep"]
    for told in report["poisoned"].values():
        assert told["poisoned"] == told["ranges"] > 0


def test_it_finds_what_a_wake_does_not_clear(run, monkeypatch):
    restore = cumem._module.restore
    monkeypatch.setattr(
        cumem._module,
        "restore",
        lambda copies, zeros, progress: restore(copies, [], progress),
    )
    for way, told in run()["poisoned"].items():
        empty = 2 * len(SIZES) if way == "nothing backed up" else len(SIZES)
        assert len(told["wrong"]) == empty, way
        assert all(set(found) == {zero_on_wake.POISON} for found in told["wrong"])
        assert told["kept"], way
