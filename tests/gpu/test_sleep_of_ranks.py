# SPDX-License-Identifier: Apache-2.0
"""Two GPUs: the engine's ranks sleep and wake as one, and fail as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import engine_reports
from .children import LOOPBACK, MULTICAST_OFF, share_gpu
from .engine_reports import ENGINES, Report, report_of
from .ranks import RANKS

# For an engine, which the first test of each kind waits for.
pytestmark = pytest.mark.timeout(480)

ROUNDS = 10
# Ranks that share a GPU take turns on it, and so take seconds for one prompt.
ROUNDS_OF_A_REHEARSAL = 2
SECONDS = 420


def rounds() -> int:
    return ROUNDS_OF_A_REHEARSAL if share_gpu() else ROUNDS


@pytest.fixture(scope="module", params=ENGINES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def report(
    kind: str,
    reduced_by: str,
    reducer_variables: dict[str, str],
    demo_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Report:
    options = ENGINES[kind](RANKS) | {
        "tensor_parallel_size": RANKS,
        "distributed_executor_backend": "mp",
    }
    if share_gpu():
        options |= {
            "worker_cls": "sharing_worker.SharingWorker",
            "gpu_memory_utilization": 0.4,
        }
    folder = tmp_path_factory.mktemp("engine")
    variables = LOOPBACK | reducer_variables
    return report_of(folder, demo_model, options, rounds(), SECONDS, **variables)


def test_ranks_reduce_by_themselves(report, reduced_by):
    own = "AiterCustomAllreduce" if reduced_by == "AITER" else "CustomAllreduce"
    active = [rank["active"] for rank in report["all reduce"]]
    if not any(active):
        assert not any(rank["should be"] for rank in report["all reduce"])
        pytest.skip("no custom all-reduce works between these GPUs")
    assert active == [[own]] * RANKS
    assert not any(rank["registers"] for rank in report["all reduce"])


def test_both_ranks_are_told_to_leave_multicast_off(report):
    for variables in report["multicast"]:
        assert variables.items() >= MULTICAST_OFF.items()


def test_graphs_sleep_on_both_ranks(report):
    engine_reports.assert_graphs_sleep(report)


def test_memory_goes_and_comes_on_both_ranks(report, kind):
    engine_reports.assert_memory_goes_and_comes(report)
    # A cache of a few blocks is less than the driver may take meanwhile.
    if kind == "in memory":
        engine_reports.assert_device_gives_back(report, ranks_share=share_gpu())


def test_answers_are_the_same_after_each_cycle(report):
    """Level 1, selective wakes, and level 2 with a reload, as often each."""
    assert len(report["cycles"]) == 4 * rounds() + 1
    engine_reports.assert_answers_are_the_same(report)


def test_blocks_come_back_from_the_host_after_each_cycle(report, kind):
    engine_reports.assert_blocks_come_back(report, kind == "with KV offload")


def test_a_wake_that_fails_on_one_rank_is_the_engines(report):
    engine_reports.assert_ranks_agree_on_failed_wakes(report, share_gpu())


def test_a_copy_that_fails_on_one_rank_is_the_engines(report, kind):
    if kind == "with KV offload":
        engine_reports.assert_failed_copies_cost_one_prompt(report)
    else:
        assert report["failed copies"] == [], "nothing is copied"
