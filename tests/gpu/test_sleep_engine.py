# SPDX-License-Identifier: Apache-2.0
"""The real engine on a real GPU sleeps with its graphs, and answers as before.

Its model is made on the spot. One engine has a KV cache that every prompt fits into,
the other one of a few blocks, so that prompts come back from the host.
"""

from __future__ import annotations

import pytest

from vllm_rocm_memory.sim.demo_model import write_demo_model

from .engine_reports import (
    BLOCK_BYTES,
    Report,
    assert_answers_are_the_same,
    assert_graphs_sleep,
    assert_memory_goes_and_comes,
    report_of,
)

# For an engine, which the first test of each kind waits for.
pytestmark = pytest.mark.timeout(600)

GIB = 1 << 30
ENGINES = {
    "in memory": {"kv_cache_memory_bytes": GIB},
    "with KV offload": {
        "kv_cache_memory_bytes": 40 * BLOCK_BYTES,
        "kv_transfer_config": {
            "kv_connector": "SimpleCPUOffloadConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": 64 << 20,
                "copy_engine": "rect",
            },
        },
    },
}


@pytest.fixture(scope="module", params=ENGINES)
def report(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Report:
    folder = tmp_path_factory.mktemp("engine")
    model = write_demo_model(folder / "demo")
    return report_of(folder, model, ENGINES[request.param])


@pytest.fixture
def offloads(report: Report, request: pytest.FixtureRequest) -> bool:
    return bool(request.node.callspec.params["report"] == "with KV offload")


def test_graphs_are_in_the_pool_and_are_replayed(report):
    assert_graphs_sleep(report)


def test_memory_goes_and_comes(report):
    assert_memory_goes_and_comes(report)


def test_answers_are_the_same_after_each_cycle(report):
    assert_answers_are_the_same(report)


def test_blocks_come_back_from_the_host_after_each_cycle(report, offloads):
    """And from nowhere where there is no KV offload."""
    for answers in (report["answers"], *(each["answers"] for each in report["cycles"])):
        assert [loads > 0 for loads in answers["loads"]] == [offloads]
