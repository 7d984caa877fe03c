# SPDX-License-Identifier: Apache-2.0
"""The real engine sleeps with its graphs: every place that captures, both levels.

On a GPU, or on the simulator, whose pages hold 0xFF unless somebody cleans them.
"""

import pytest

from vllm_rocm_memory import serve

TAKEN = 32 << 20  # of a GPU, for host memory that a first sleep registers
EXECUTABLE = 128 << 10  # of a simulated GPU, for an executable graph

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


def unlisted(device):
    """Bytes that neither the allocator nor PyTorch has."""
    return device["rest_bytes"] + (device["others_bytes"] or 0)


def test_the_worker_tells_what_was_freed_and_what_is_held(reports):
    """And captured graphs are a part of it where their pool does not sleep."""
    for case, report in reports.items():
        for level, after in report["after"].items():
            told, mapped = after["told"], report["mapped"]
            freed = told["last_sleep"]["freed"]
            assert {tag: each["device_bytes"] for tag, each in freed.items()} == mapped
            kept = freed["weights"]["backup_bytes"]
            assert kept == (mapped["weights"] if level == "1" else 0)
            held = told["now"]["device"]
            assert (held["tags"], held["asleep"]) == ({}, mapped)
            assert (held["graph_pool_bytes"] > 0) == (case == "off")
            before = after["told awake"]["now"]["device"]
            assert (before["tags"], before["asleep"]) == (mapped, {})
            # What nobody lists does not sleep, so tags that it hid would show.
            assert abs(unlisted(held) - unlisted(before)) <= TAKEN
            if after["executables"] is not None:
                assert unlisted(held) == unlisted(before)
                assert held["rest_bytes"] == after["executables"] * EXECUTABLE > 0
            assert told["now"]["host"]["backup_bytes"] >= kept


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
