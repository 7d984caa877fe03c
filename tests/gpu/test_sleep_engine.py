# SPDX-License-Identifier: Apache-2.0
"""The real engine on a real GPU sleeps with its graphs, and answers as before.

Its model is made on the spot. `test_sleep_of_ranks.py` has the same with two GPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .engine_reports import (
    ENGINES,
    Report,
    assert_answers_are_the_same,
    assert_blocks_come_back,
    assert_device_gives_back,
    assert_graphs_sleep,
    assert_memory_goes_and_comes,
    report_of,
)

# For an engine, which the first test of each kind waits for.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=ENGINES)
def report(
    request: pytest.FixtureRequest,
    demo_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Report:
    folder = tmp_path_factory.mktemp("engine")
    return report_of(folder, demo_model, ENGINES[request.param]())


@pytest.fixture
def offloads(report: Report, request: pytest.FixtureRequest) -> bool:
    return bool(request.node.callspec.params["report"] == "with KV offload")


def test_graphs_are_in_the_pool_and_are_replayed(report):
    assert_graphs_sleep(report)


def test_memory_goes_and_comes(report, offloads):
    assert_memory_goes_and_comes(report)
    # A cache of a few blocks is less than the driver may take meanwhile.
    if not offloads:
        assert_device_gives_back(report)


def test_answers_are_the_same_after_each_cycle(report):
    assert_answers_are_the_same(report)


def test_blocks_come_back_from_the_host_after_each_cycle(report, offloads):
    """And from nowhere where there is no KV offload."""
    assert_blocks_come_back(report, offloads)
