# SPDX-License-Identifier: Apache-2.0
"""The real engine sleeps with its graphs: every place that captures, both levels.

On a GPU, or on the simulator, whose pages hold 0xFF unless somebody cleans them.
"""

import pytest

from vllm_rocm_memory import serve

# For the engines, where little runs before these tests.
pytestmark = pytest.mark.timeout(600)


def test_graphs_are_replayed(report):
    assert report["replays"] > 0
    for after in report["after"].values():
        assert after["replays"] > report["replays"]


def test_the_pool_is_used_where_it_was_asked_for(reports):
    """And NCCL does not pin its memory, unless the user says so."""
    for case, report in reports.items():
        asked = case != "off"
        assert ("cudagraph" in report["mapped"]) == asked
        assert report["register"] == ("0" if asked else None)
        assert {"weights", "kv_cache"} <= set(report["mapped"])


def test_sleep_takes_everything_and_any_wake_brings_the_graphs(report):
    for after in report["after"].values():
        assert after["asleep"] == {}
        assert after["mapped"] == report["mapped"]
        graphs = report["mapped"].get("cudagraph")
        assert after["weights"].get("cudagraph") == graphs
        assert "kv_cache" not in after["weights"]


def test_answers_are_the_same_after_both_levels(report):
    assert len(set(map(tuple, report["answers"]))) == len(report["answers"])
    for after in report["after"].values():
        assert after["answers"] == report["answers"]


def test_answers_depend_on_the_weights(report):
    """The control: level 2 without a reload."""
    assert report["without weights"] != report["answers"]


def test_every_capture_site_answers_the_same(reports):
    if not serve.is_cpu_build():
        pytest.skip("a GPU's kernels differ between the modes, and round differently")
    answers = [report["answers"] for report in reports.values()]
    assert all(each == answers[0] for each in answers)


def test_sleep_in_process_waits_for_stores(reports):
    """No server's loop has stepped until they have ended."""
    report = reports["off"]
    assert report["stores under way"] or not serve.is_cpu_build()
    assert report["beside stores"] == {}
    assert report["answers after stores"] == report["answers"]
