# SPDX-License-Identifier: Apache-2.0
"""Two GPUs: all-reduces in graphs whose memory sleeps, alone and in the engine.

Memory of the pool that sleeps has no IPC handle, so a capture must not register it.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_rocm_memory.sim.demo_model import write_demo_model

from .captured_all_reduce import CYCLES, RANKS
from .children import ENGINE, LOOPBACK, environment, free_port, python, run
from .engine_reports import (
    Report,
    assert_answers_are_the_same,
    assert_graphs_sleep,
    assert_memory_goes_and_comes,
    report_of,
)

pytestmark = pytest.mark.timeout(600)

PROGRAM = Path(__file__).with_name("captured_all_reduce.py")
SECONDS = 300

# By who reduces: AITER takes the place of vLLM's own where it is enabled.
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "vLLM": {"VLLM_ROCM_USE_AITER": "0"},
    "AITER": {"VLLM_ROCM_USE_AITER": "1", "VLLM_ROCM_USE_AITER_CUSTOM_AR": "1"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("model") / "demo")


@pytest.fixture(scope="module", params=SETTINGS)
def setting(request: pytest.FixtureRequest) -> str:
    if request.param == "AITER":
        if torch.version.hip is None:
            pytest.skip("AITER runs on AMD GPUs alone")
        if importlib.util.find_spec("aiter") is None:
            pytest.skip("AITER is not installed")
    return str(request.param)


@pytest.fixture(scope="module")
def ranks(
    setting: str, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each rank says."""
    folder = tmp_path_factory.mktemp("ranks")
    results = [folder / f"{rank}.json" for rank in range(RANKS)]
    port = free_port()
    run(
        *(
            python(PROGRAM, rank, port, model, result)
            for rank, result in enumerate(results)
        ),
        env=environment(ENGINE, LOOPBACK, SETTINGS[setting]),
        seconds=SECONDS,
    )
    return [json.loads(result.read_text()) for result in results]


@pytest.fixture(scope="module")
def engine(
    setting: str, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Report:
    options = {
        "kv_cache_memory_bytes": 1 << 30,
        "tensor_parallel_size": RANKS,
        "distributed_executor_backend": "mp",
    }
    folder = tmp_path_factory.mktemp("engine")
    return report_of(folder, model, options, **LOOPBACK, **SETTINGS[setting])


def reduced(ranks: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """What each rank says of a kind of all-reduce."""
    reasons = {rank["missing"].get(kind) for rank in ranks}
    if reasons != {None}:
        pytest.skip("; ".join(sorted(filter(None, reasons))))
    return [rank["kinds"][kind] for rank in ranks]


@pytest.mark.parametrize("kind", ["custom", "nccl", "aiter"])
def test_a_captured_all_reduce_is_exact_after_each_wake(ranks, kind):
    """Levels 1 and 2 in turn, with wakes of everything and in two parts."""
    for told in reduced(ranks, kind):
        assert told["in pool"], "input and result sleep"
        assert told["right"] == [True] * (1 + CYCLES)
    assert all(rank["asleep"] == [True] * CYCLES for rank in ranks)


def test_captures_register_nothing(ranks):
    for rank in ranks:
        assert rank["register"] == "0", "NCCL's own registration"
        assert not rank["registers captures"]
        assert rank["registered"] == 0


def test_a_capture_that_registers_is_noticed(ranks):
    """The control for the test above, in a pool whose memory can be registered."""
    reduced(ranks, "custom")
    for rank in ranks:
        assert rank["buffered"] > 0, "captures were looked at"
        assert rank["control"] > 0


def test_ranks_of_an_engine_reduce_by_themselves(engine, setting):
    own = "AiterCustomAllreduce" if setting == "AITER" else "CustomAllreduce"
    active = [rank["active"] for rank in engine["all reduce"]]
    if not any(active):
        pytest.skip("no custom all-reduce works between these GPUs")
    assert active == [[own]] * RANKS
    assert not any(rank["registers"] for rank in engine["all reduce"])


def test_graphs_of_an_engine_sleep_on_both_ranks(engine):
    assert_graphs_sleep(engine)


def test_memory_of_an_engine_goes_and_comes_on_both_ranks(engine):
    assert_memory_goes_and_comes(engine)


def test_answers_of_an_engine_are_the_same_after_each_cycle(engine):
    assert_answers_are_the_same(engine)
