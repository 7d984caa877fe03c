# SPDX-License-Identifier: Apache-2.0
"""What the tests on two GPUs run and assert, on the simulator with two ranks.

The program and the assertions are those of `tests/gpu`, which need machines that few
have.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ..gpu import engine_reports
from ..gpu.children import LOOPBACK
from ..gpu.engine_reports import FAULTS, Report
from ..gpu.ranks import RANKS
from .served_engine import SLEEPING

# For the engine, which the first test waits for.
pytestmark = pytest.mark.timeout(300)

ROUNDS = 1
SECONDS = 240
# PyTorch's own memory is the host's there, so nothing but sleep's fills the device.
SIMULATED_FAULTS = [name for name in FAULTS if name != "no room"]


@pytest.fixture(scope="module")
def report(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    options = engine_reports.with_kv_offload(RANKS)
    options["kv_cache_memory_bytes"] *= 2  # in float32
    options |= {
        "dtype": "float32",
        "attention_config": {},
        "compilation_config": {},
        "tensor_parallel_size": RANKS,
        "distributed_executor_backend": "mp",
    }
    variables = {
        "HIPSIM_PROFILE": "7.16",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",
    }
    return engine_reports.report_of(
        tmp_path_factory.mktemp("engine"),
        demo_model,
        options,
        ROUNDS,
        SECONDS,
        **(variables | SLEEPING["variables"] | LOOPBACK),
    )


def test_memory_of_both_ranks_goes_and_comes(report):
    engine_reports.assert_graphs_sleep(report)
    engine_reports.assert_memory_goes_and_comes(report)
    engine_reports.assert_device_gives_back(report, taken=0)


def test_answers_are_the_same_after_each_cycle(report):
    assert len(report["cycles"]) == 4 * ROUNDS + 1
    engine_reports.assert_answers_are_the_same(report)
    engine_reports.assert_blocks_come_back(report, from_host=True)


def test_a_wake_that_fails_on_one_rank_is_the_engines(report):
    engine_reports.assert_ranks_agree_on_failed_wakes(report, faults=SIMULATED_FAULTS)


def test_a_copy_that_fails_on_one_rank_is_the_engines(report):
    engine_reports.assert_failed_copies_cost_one_prompt(report)
