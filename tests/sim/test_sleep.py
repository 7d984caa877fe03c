# SPDX-License-Identifier: Apache-2.0
"""A served engine sleeps and wakes, with graphs, over HTTP; new pages hold 0xFF."""

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from .served_engine import (
    HOST_BYTES,
    SLEEPING,
    Answer,
    ServedEngine,
    fresh_prompts,
)

SERVER = SLEEPING
CYCLES = 10
LONG = 150
fresh = fresh_prompts()


def good(answer: tuple[int, str]) -> str:
    status, body = answer
    assert status == 200, body
    return body


def sleep_1(engine: ServedEngine) -> None:
    good(engine.sleep(1))
    check_asleep(engine)
    good(engine.wake())


def sleep_1_wake_weights_first(engine: ServedEngine) -> None:
    good(engine.sleep(1))
    check_asleep(engine)
    good(engine.wake("weights"))
    assert engine.is_sleeping()
    for memory in engine.device_memory():
        assert set(memory["asleep"]) == {"kv_cache"}
    good(engine.wake("kv_cache"))


def sleep_1_wake_kv_cache_first(engine: ServedEngine) -> None:
    good(engine.sleep(1))
    check_asleep(engine)
    good(engine.wake("kv_cache"))
    for memory in engine.device_memory():
        assert set(memory["asleep"]) == {"weights"}
    good(engine.wake("weights"))


def sleep_2_and_reload(engine: ServedEngine) -> None:
    good(engine.sleep(2))
    check_asleep(engine)
    good(engine.wake("weights"))
    engine.rpc("reload_weights")
    good(engine.wake("kv_cache"))


KINDS: tuple[Callable[[ServedEngine], None], ...] = (
    sleep_1,
    sleep_1_wake_weights_first,
    sleep_2_and_reload,
    sleep_1_wake_kv_cache_first,
)


def check_asleep(engine: ServedEngine) -> None:
    """All is asleep, and at most 1 % of each device is still used."""
    assert engine.is_sleeping()
    for memory in engine.device_memory():
        assert not memory["mapped"]
        assert {"weights", "kv_cache", "cudagraph"} <= set(memory["asleep"])
        assert memory["handle bytes"] == 0
        assert memory["total"] - memory["free"] <= memory["total"] // 100


def check_awake(engine: ServedEngine) -> None:
    assert not engine.is_sleeping()
    for memory in engine.device_memory():
        assert not memory["asleep"]
        assert memory["total"] - memory["free"] > memory["total"] // 20
        assert memory["memory faults"] == 0


def test_answers_are_the_same_after_ten_cycles(engine, known):
    check_awake(engine)
    before = engine.device_memory()
    for memory in before:
        assert sum(memory["mapped"].values()) < HOST_BYTES, "that tier is on the host"
    prompts = itertools.cycle(known)
    for cycle, kind in zip(range(CYCLES), itertools.cycle(KINDS), strict=False):
        kind(engine)
        assert not engine.is_sleeping(), kind.__name__
        each = next(prompts)
        answer = engine.ask(each)
        assert answer.tokens == known.answers[each].tokens, (cycle, kind.__name__)
        assert answer.cached == 0, "sleep keeps no block"
    check_awake(engine)
    for old, new in zip(before, engine.device_memory(), strict=True):
        assert new["free"] == old["free"]
        assert new["mapped"] == old["mapped"]
        assert new["executable graphs"] == old["executable graphs"] > 0
        assert new["graph launches"] > old["graph launches"]


def test_what_is_discarded_and_not_reloaded_answers_wrong(engine, known):
    """The control: answers depend on the weights, and level 2 has none."""
    each = next(iter(known))
    good(engine.sleep(2))
    good(engine.wake())
    assert engine.ask(each).tokens != known.answers[each].tokens
    engine.rpc("reload_weights")
    engine.forget_device()
    assert engine.call("/reset_prefix_cache?reset_external=true", {})[0] == 200
    assert engine.ask(each).tokens == known.answers[each].tokens


@pytest.fixture
def client() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def decoding(
    engine: ServedEngine, client: ThreadPoolExecutor, prompt: str
) -> Future[Answer]:
    """A long answer that is being made, in no less than three quarters of a second."""
    engine.rpc("slow_steps", seconds=0.005)
    asked = client.submit(engine.ask, prompt, LONG)
    deadline = time.monotonic() + 10
    while engine.total("vllm:num_requests_running") < 1:
        assert time.monotonic() < deadline and not asked.done()
    return asked


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_ends_a_running_request_and_the_engine_lives(engine, client, level):
    """By default; the client is told by the reason of its answer's end."""
    each = next(fresh)
    right = engine.ask(each, LONG)
    asked = decoding(engine, client, each)
    good(engine.sleep(level))
    check_asleep(engine)
    answer = asked.result(10)
    assert '"finish_reason":"abort"' in answer.body
    assert len(answer.tokens) < LONG
    good(engine.wake())
    if level == 2:
        engine.rpc("reload_weights")
    assert engine.ask(each, LONG).tokens == right.tokens


def test_sleep_can_wait_for_a_running_request(engine, client):
    each = next(fresh)
    right = engine.ask(each, LONG)
    asked = decoding(engine, client, each)
    good(engine.sleep(mode="wait"))
    check_asleep(engine)
    assert asked.result(1).tokens == right.tokens
    good(engine.wake())
    check_awake(engine)


def test_sleep_can_keep_a_running_request_for_the_wake(engine, client):
    each = next(fresh)
    right = engine.ask(each, LONG)
    asked = decoding(engine, client, each)
    good(engine.sleep(mode="keep"))
    check_asleep(engine)
    assert not asked.done()
    good(engine.wake())
    assert asked.result(20).tokens == right.tokens


def test_a_request_to_a_sleeping_engine_waits_for_the_wake(engine, known, client):
    each = next(iter(known))
    good(engine.sleep())
    asked = client.submit(engine.ask, each)
    time.sleep(0.5)
    assert not asked.done()
    good(engine.wake("weights"))
    assert not asked.done()
    good(engine.wake("kv_cache"))
    assert asked.result(10).tokens == known.answers[each].tokens


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_sleep_waits_for_stores(engine, mode):
    """They read device memory, which is about to go."""
    each = next(fresh)
    before = engine.copy_counters()
    engine.rpc("slow_copies", microseconds=100_000)
    right = engine.ask(each)
    assert engine.copy_states()[0]["under way"] == ["store"]
    good(engine.sleep(mode=mode))
    check_asleep(engine)
    (state,) = engine.copy_states()
    assert state["under way"] == [] and state["memory faults"] == 0
    engine.rpc("slow_copies", microseconds=0)
    good(engine.wake())
    again = engine.ask(each)
    assert (again.tokens, again.cached) == (right.tokens, 0)
    assert ("copy_failures", "store") not in engine.wait_for_counters(before)


def loading(
    engine: ServedEngine, client: ThreadPoolExecutor
) -> tuple[str, Answer, Future[Answer]]:
    """A prompt, its answer, and a request for it whose blocks are being loaded."""
    each = next(fresh)
    right = engine.ask(each)
    engine.check_idle()
    engine.forget_device()
    engine.rpc("slow_copies", microseconds=150_000)
    asked = client.submit(engine.ask, each)
    deadline = time.monotonic() + 10
    while engine.copy_states()[0]["under way"] != ["load"]:
        assert time.monotonic() < deadline and not asked.done()
    engine.rpc("slow_copies", microseconds=0)
    return each, right, asked


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_sleep_waits_for_loads(engine, client, mode):
    """They write device memory, which is about to go."""
    each, right, asked = loading(engine, client)
    good(engine.sleep(mode=mode))
    check_asleep(engine)
    (state,) = engine.copy_states()
    assert state["under way"] == [] and state["memory faults"] == 0
    answer = asked.result(10)
    if mode == "wait":
        assert answer.tokens == right.tokens
    else:
        assert '"finish_reason":"abort"' in answer.body
    good(engine.wake())
    assert engine.ask(each).tokens == right.tokens


def test_sleep_refuses_to_keep_a_request_that_is_loading(engine, client):
    """Its blocks are neither the device's nor the host's; nothing sleeps."""
    each, right, asked = loading(engine, client)
    status, body = engine.sleep(mode="keep")
    assert status == 500 and "waiting for remote KV transfer" in body
    for memory in engine.device_memory():
        assert not memory["asleep"]
    good(engine.wake())
    assert asked.result(10).tokens == right.tokens
    sleep_1(engine)
    assert engine.ask(each).tokens == right.tokens


def test_sleeping_and_waking_twice_changes_nothing(engine, known):
    each = next(iter(known))
    for _ in range(2):
        good(engine.sleep())
        check_asleep(engine)
    for _ in range(2):
        good(engine.wake())
        check_awake(engine)
    assert engine.ask(each).tokens == known.answers[each].tokens


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("call", ["hipMemcpyAsync", "hipMemUnmap"])
def test_a_sleep_that_fails_leaves_all_as_it_was(engine, known, level, call):
    each = next(iter(known))
    before = engine.device_memory()
    engine.rpc("fail_call", call=call, error=1)
    status, body = engine.sleep(level)
    assert status == 500
    assert f"{call} failed: hipErrorInvalidValue (1)" in body
    assert "every rank is as it was" in body
    for old, new in zip(before, engine.device_memory(), strict=True):
        assert (new["mapped"], new["asleep"]) == (old["mapped"], {})
    assert not engine.is_sleeping()
    assert engine.ask(each).tokens == known.answers[each].tokens
    (sleep_1 if level == 1 else sleep_2_and_reload)(engine)
    assert engine.ask(each).tokens == known.answers[each].tokens


def test_a_sleep_that_fails_leaves_asleep_what_was(engine, known):
    each = next(iter(known))
    good(engine.sleep(1))
    good(engine.wake("weights"))
    before = engine.device_memory()
    engine.rpc("fail_call", call="hipMemUnmap", error=1)
    status, body = engine.sleep(1)
    assert status == 500 and "hipMemUnmap failed" in body
    assert engine.is_sleeping()
    for old, new in zip(before, engine.device_memory(), strict=True):
        assert (new["mapped"], new["asleep"]) == (old["mapped"], old["asleep"])
        assert set(new["asleep"]) == {"kv_cache"}
    good(engine.wake("kv_cache"))
    check_awake(engine)
    assert engine.ask(each).tokens == known.answers[each].tokens


@pytest.mark.parametrize(
    ("call", "nth", "level", "tags"),
    [
        ("hipMemCreate", 1, 1, ("weights",)),
        ("hipMemCreate", 4, 2, ()),
        ("hipMemMap", 2, 1, ()),
        ("hipMemSetAccess", 3, 2, ("weights",)),
        ("hipMemcpyAsync", 1, 1, ("weights",)),
        ("hipMemcpyAsync", 1, 2, ()),
        ("hipMemsetAsync", 1, 1, ()),
    ],
)
def test_a_wake_that_fails_leaves_the_engine_asleep(
    engine, known, call, nth, level, tags
):
    each = next(iter(known))
    good(engine.sleep(level))
    before = engine.device_memory()
    # The wake is tried once more where there is no memory.
    engine.rpc("fail_call", call=call, nth=nth, times=2)
    status, body = engine.wake(*tags)
    assert status == 500
    assert f"{call} failed: hipErrorOutOfMemory (2)" in body
    assert "asleep" in body
    check_asleep(engine)
    for old, new in zip(before, engine.device_memory(), strict=True):
        assert (new["free"], new["asleep"]) == (old["free"], old["asleep"])
    good(engine.wake(*tags))
    if tags:
        good(engine.wake("kv_cache"))
    if level == 2:
        engine.rpc("reload_weights")
    assert engine.ask(each).tokens == known.answers[each].tokens
    check_awake(engine)


def test_a_wake_that_finds_no_memory_at_first_is_tried_once_more(engine, known):
    each = next(iter(known))
    good(engine.sleep())
    said = len(engine.said())
    engine.rpc("fail_call", call="hipMemCreate", nth=2)
    good(engine.wake())
    check_awake(engine)
    assert "hipMemCreate failed: hipErrorOutOfMemory (2)" in engine.said()[said:]
    assert engine.ask(each).tokens == known.answers[each].tokens
