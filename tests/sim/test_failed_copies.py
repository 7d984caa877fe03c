# SPDX-License-Identifier: Apache-2.0
"""A served engine whose KV copies fail: a load costs its request, a store nothing."""

import itertools
import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .served_engine import (
    ANSWER_SECONDS,
    BLOCK,
    BLOCK_BYTES,
    ServedEngine,
    fresh_prompts,
)

# Each release with the engine by default, and batches as two of them make them.
RELEASES_AND_ENGINES = [
    ("7.2.3", "rect"),
    ("7.12", "rect"),
    ("7.15", "rect"),
    ("7.16", "rect"),
    ("7.15", "batch"),
    ("7.16", "batch"),
]
CALLS = {"rect": "hipMemcpy2DAsync", "batch": "hipMemcpyBatchAsync"}
ERRORS = {
    700: "hipErrorIllegalAddress",
    719: "hipErrorLaunchFailure",
    2: "hipErrorOutOfMemory",
    1: "hipErrorInvalidValue",
}
SLOW_US = 30_000  # each rectangle or batch
DRAIN_SECONDS = 30
SERVER: dict[str, Any] = {"arguments": [f"--shutdown-timeout={DRAIN_SECONDS}"]}
LAYERS = 4
fresh = fresh_prompts()


def state(engine: ServedEngine) -> dict[str, Any]:
    (only,) = engine.copy_states()
    return only


def different_bytes(engine: ServedEngine, way: str) -> int:
    """Of what the last copy that way has moved."""
    (last,) = engine.rpc("compare_last", way=way)
    assert last["bytes"] >= BLOCK_BYTES
    return int(last["different"])


# ----- without a failure


def test_blocks_come_back_from_the_host(engine, known):
    before = engine.copy_counters()
    for _ in known:
        known.check()
    assert state(engine)["copies"] == {"load": len(known)}
    loaded = sum(answer.whole_blocks for answer in known.answers.values()) // BLOCK
    assert engine.wait_for_counters(before) == {
        ("copies", "load"): len(known),
        ("copied_bytes", "load"): loaded * BLOCK_BYTES,
    }


def test_a_new_prompt_is_stored_once(engine):
    before = engine.copy_counters()
    right = engine.ask(next(fresh))
    assert (right.ok, right.cached) == (True, 0)
    stored = {
        ("copies", "store"): 1,
        ("copied_bytes", "store"): right.whole_blocks // BLOCK * BLOCK_BYTES,
    }
    assert engine.wait_for_counters(before) == stored
    assert state(engine)["copies"] == {"store": 1}


@pytest.mark.parametrize(("release", "name"), RELEASES_AND_ENGINES)
def test_a_request_is_offloaded_and_reloaded_to_the_byte(engine, known, release, name):
    """A rectangle is one packet for a block, whose pages all have one size."""
    engine.rpc("use_release", profile=release, engine=name)
    before = engine.copy_counters()
    for _ in known:
        known.check()
        assert different_bytes(engine, "load") == 0
    each = next(fresh)
    right = engine.ask(each)
    assert different_bytes(engine, "store") == 0
    engine.forget_device()
    again = engine.ask(each)
    assert (again.tokens, again.cached) == (right.tokens, right.whole_blocks)
    assert different_bytes(engine, "load") == 0

    seen = state(engine)
    loads, stores = seen["blocks"]["load"], seen["blocks"]["store"]
    assert (loads, stores) == (
        sum(answer.whole_blocks for answer in [*known.answers.values(), right])
        // BLOCK,
        right.whole_blocks // BLOCK,
    )
    assert seen["engine"] == name
    if name == "rect":
        assert seen["moved"] == {
            "sdma h2d": loads,
            "sdma d2h": stores,
            "packets": loads + stores,
        }
    else:
        # Of some runs of blocks the pages are joined, and all are too large for the
        # blit kernel of a release that is not told to prefer the copy engines.
        assert seen["moved"].keys() == {"sdma h2d", "sdma d2h"}
        assert seen["moved"]["sdma d2h"] <= stores * LAYERS
    assert engine.wait_for_counters(before)["copies", "load"] == len(known) + 1
    labels = {("direction", "load"), ("copy_engine", name)}
    assert engine.metrics()["vllm:simple_kv_offload_copies_total", frozenset(labels)]


def test_an_irregular_layout_is_copied_in_batches_and_told_once(engine, known):
    said = len(engine.said())
    engine.rpc("use_release", profile="7.16", irregular=True)
    for _ in known:
        known.check()
        assert different_bytes(engine, "load") == 0
    engine.ask(next(fresh))
    assert different_bytes(engine, "store") == 0
    seen = state(engine)
    assert (seen["engine"], "packets" in seen["moved"]) == ("batch", False)
    assert {"blit h2d", "blit d2h"}.isdisjoint(seen["moved"])
    told = [line for line in engine.said()[said:].splitlines() if "copy engine" in line]
    assert len(told) == 1, told
    assert "batch (asked for: auto, by default)" in told[0] and "INFO" in told[0]
    assert "0 % of a block's bytes lie in rectangles" in told[0]

    # Whoever asked for rectangles by name is warned.
    said = len(engine.said())
    engine.rpc("use_release", profile="7.16", engine="rect", irregular=True)
    known.check()
    told = [line for line in engine.said()[said:].splitlines() if "copy engine" in line]
    assert len(told) == 1, told
    assert "WARNING" in told[0]
    assert "batch (asked for: rect, by kv_connector_extra_config" in told[0]
    engine.rpc("use_release", profile="7.16")


# ----- controls: what these tests would see if the worker did not tell


@pytest.mark.parametrize("way", ["load", "store"])
def test_a_failure_that_nobody_tells_makes_a_wrong_answer(engine, known, way):
    if way == "load":
        engine.rpc("fail_copies", way=way, hidden=True)
        answer, right = known.ask()
    else:
        each = next(fresh)
        engine.rpc("fail_copies", way=way, hidden=True)
        right = engine.ask(each)
        assert different_bytes(engine, "store")
        engine.forget_device()
        answer = engine.ask(each)
    assert answer.ok and answer.cached == right.whole_blocks
    assert answer.tokens != right.tokens
    # What was stored wrong is loaded as it is.
    assert bool(different_bytes(engine, "load")) == (way == "load")
    assert state(engine)["failed"] == {way: 1}
    engine.forget_device()


# ----- the 20th


@pytest.mark.parametrize(
    ("release", "name"), [("7.16", "rect"), ("7.16", "batch"), ("7.2.3", "batch")]
)
def test_the_20th_load_fails_its_own_request_alone(engine, known, release, name):
    engine.rpc("use_release", profile=release, engine=name)
    before = engine.copy_counters()
    said = len(engine.said())
    engine.rpc("fail_copies", way="load", skip=19)
    for _ in range(19):
        known.check()
    answer, _ = known.ask()
    assert answer.status == 500
    assert json.loads(answer.body)["error"]["code"] == 500
    assert engine.is_healthy()
    known.check()
    assert state(engine)["copies"] == {"load": 21}
    moved = engine.wait_for_counters(before)
    assert moved["copies", "load"] == 20
    assert moved["copy_failures", "load"] == 1
    assert ("copy_failures", "store") not in moved

    log = engine.said()[said:]
    where = r"one of the copies 0 to \d+ of \d+, .* \(the runtime did not say which\)"
    if name == "rect":
        where = (
            r"rectangle 0 of 5, regions 'model.layers.0.self_attn.attn', .*"
            r"'model.layers.3.self_attn.attn', block \d+ to \d+"
        )
    elif release == "7.2.3":
        where = r"copy 0 of \d+, region '[\w.]+', blocks [\d, -]+ to [\d, -]+"
    assert re.search(
        r"KV load of blocks [\d, -]+ to [\d, -]+ failed: KV load: "
        rf"{CALLS[name]} returned hipErrorIllegalAddress \(700\) for {where}",
        log,
    )
    assert re.search(r"Request cmpl-\S+ lost its KV load", log)


def test_the_20th_store_fails_nothing_and_is_not_served(engine, known):
    engine.rpc("use_release", profile="7.16")
    before = engine.copy_counters()
    said = len(engine.said())
    engine.rpc("fail_copies", way="store", skip=19)
    prompts = list(itertools.islice(fresh, 21))
    right = {each: engine.ask(each) for each in prompts}
    assert all(answer.ok for answer in right.values())
    assert state(engine)["failed"] == {"store": 1}
    moved = engine.wait_for_counters(before)
    assert moved["copies", "store"] == 20
    assert moved["copy_failures", "store"] == 1
    assert engine.is_healthy()

    engine.check_recomputed_then_loaded(prompts[19], right[prompts[19]])
    for each in (prompts[18], prompts[20]):
        engine.forget_device()
        again = engine.ask(each)
        assert (again.tokens, again.cached) == (
            right[each].tokens,
            right[each].whole_blocks,
        )
    assert re.search(
        r"KV store of blocks [\d, -]+ to [\d, -]+ failed: KV store: "
        r"hipMemcpy2DAsync returned hipErrorIllegalAddress \(700\)",
        engine.said()[said:],
    )


# ----- all others


@pytest.mark.parametrize(
    ("release", "name"),
    [("7.2.3", "rect"), ("7.12", "batch"), ("7.15", "batch"), ("7.16", "rect")],
)
def test_from_the_20th_on_each_load_and_each_store_fails_alone(
    engine, known, release, name
):
    """50 failures in each release, half of them loads, half stores, in turn."""
    engine.rpc("use_release", profile=release, engine=name)
    before = engine.copy_counters()
    for _ in range(19):
        known.check()
        assert engine.ask(next(fresh)).ok

    for way in ("load", "store"):
        engine.rpc("fail_copies", way=way, times=25, errors=list(ERRORS))
    stored = {}
    for each in itertools.islice(fresh, 25):
        answer, _ = known.ask()
        assert answer.status == 500
        stored[each] = engine.ask(each)
        assert (stored[each].ok, stored[each].cached) == (True, 0)
    seen = state(engine)
    assert seen.pop("blocks").keys() == {"load", "store"}
    # What came before the copies that failed, too.
    assert {key.partition(" ")[0] for key in seen.pop("moved")} <= {"sdma", "packets"}
    assert seen == {
        "profile": release,
        "engine": name,
        "copies": {"load": 44, "store": 44},
        "failed": {"load": 25, "store": 25},
        "most loads in a step": 1,
        "waiting faults": 0,
        "pending": 0,
        "memory faults": 0,
        "under way": [],
        "async scheduling": True,
    }
    moved = engine.wait_for_counters(before)
    for way in ("load", "store"):
        assert (moved["copies", way], moved["copy_failures", way]) == (19, 25)
    assert engine.is_healthy()

    engine.forget_device()
    for each, right in stored.items():
        again = engine.ask(each)
        assert (again.tokens, again.cached) == (right.tokens, 0)
    for _ in known:
        known.check()


@pytest.mark.parametrize("way", ["load", "store"])
@pytest.mark.parametrize(
    ("error", "name"),
    [(error, "batch" if error == 1 else "rect") for error in ERRORS],
)
def test_the_log_names_the_error(engine, known, way, error, name):
    engine.rpc("use_release", profile="7.16", engine=name)
    said = len(engine.said())
    engine.rpc("fail_copies", way=way, errors=[error])
    if way == "load":
        assert known.ask()[0].status == 500
        known.check()
    else:
        each = next(fresh)
        right = engine.ask(each)
        engine.check_recomputed_then_loaded(each, right)
    text = f"KV {way}: {CALLS[name]} returned {ERRORS[error]} ({error}) for "
    assert text in engine.said()[said:]


# A rectangle for each of five blocks; a page of joined blocks for each layer.
@pytest.mark.parametrize(
    ("name", "part"),
    [("rect", 0), ("rect", 2), ("rect", 4), ("batch", 0), ("batch", LAYERS - 1)],
)
def test_a_copy_that_fails_in_the_middle(engine, known, name, part):
    """What its earlier calls have queued ends before anybody else has the blocks."""
    engine.rpc("use_release", profile="7.16", engine=name, max_copies=1)
    known.check()
    engine.rpc("slow_copies", microseconds=SLOW_US)
    engine.rpc("fail_copies", way="load", part=part)
    answer, _ = known.ask()
    assert answer.status == 500
    assert state(engine)["under way"] == []
    engine.rpc("slow_copies", microseconds=0)
    for _ in known:
        known.check()

    engine.rpc("slow_copies", microseconds=SLOW_US)
    engine.rpc("fail_copies", way="store", part=part)
    each = next(fresh)
    right = engine.ask(each)
    engine.rpc("slow_copies", microseconds=0)
    engine.check_recomputed_then_loaded(each, right)
    engine.rpc("use_release", profile="7.16")


@pytest.mark.parametrize("call", ["hipEventRecord", "hipEventQuery"])
def test_a_call_after_a_load_fails(engine, known, call):
    """The load itself is on its stream, and ends before anybody else has the blocks."""
    before = engine.copy_counters()
    engine.rpc("slow_copies", microseconds=SLOW_US)
    engine.rpc("fail_copies", way="load", call=call)
    assert known.ask()[0].status == 500
    seen = state(engine)
    assert (seen["failed"], seen["under way"]) == ({"load": 1}, [])
    engine.rpc("slow_copies", microseconds=0)
    assert engine.wait_for_counters(before) == {("copy_failures", "load"): 1}
    for _ in known:
        known.check()


@pytest.mark.parametrize(
    ("way", "call"),
    [
        ("compute", "hipEventRecord"),
        ("store", "hipStreamWaitEvent"),
        ("store", "hipEventRecord"),
        ("store", "hipEventQuery"),
    ],
)
def test_a_call_around_a_store_fails(engine, way, call):
    before = engine.copy_counters()
    engine.rpc("fail_copies", way=way, call=call)
    each = next(fresh)
    right = engine.ask(each)
    assert right.ok, right.body
    assert state(engine)["failed"] == {way: 1}
    assert engine.wait_for_counters(before) == {("copy_failures", "store"): 1}
    engine.check_recomputed_then_loaded(each, right)


@pytest.mark.parametrize("failing", [0, 1])
def test_of_two_loads_in_one_step_the_one_that_fails(known, failing):
    answers = known.ask_two_in_one_step(failing)
    assert sorted(answer.status for answer, _ in answers) == [200, 500]
    for answer, right in answers:
        if answer.ok:
            assert (answer.tokens, answer.cached) == (right.tokens, right.whole_blocks)
    known.check()


# ----- the end: nothing can be asked after it


def test_an_answer_that_waits_for_its_load_comes_before_the_end(engine, known):
    engine.rpc("slow_copies", microseconds=200_000)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(known.ask)
        deadline = time.monotonic() + ANSWER_SECONDS
        while not state(engine)["copies"]:
            assert time.monotonic() < deadline
        assert engine.stop(signal.SIGINT, DRAIN_SECONDS + 10) == 0
        answer, right = asked.result(ANSWER_SECONDS)
    assert (answer.status, answer.tokens) == (200, right.tokens)
    assert not engine.left()
