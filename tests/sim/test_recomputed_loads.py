# SPDX-License-Identifier: Apache-2.0
"""A served engine that computes what it cannot load, and how it is shut down."""

import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .served_engine import ANSWER_SECONDS, fresh_prompts, prompt

DRAIN_SECONDS = 2
SERVER: dict[str, Any] = {
    "transfer": {"kv_load_failure_policy": "recompute"},
    "arguments": [f"--shutdown-timeout={DRAIN_SECONDS}"],
}
fresh = fresh_prompts()


@pytest.mark.parametrize("error", [700, 2])
def test_a_load_that_fails_is_computed(engine, known, error):
    before = engine.copy_counters()
    engine.rpc("fail_copies", way="load", errors=[error])
    answer, right = known.ask()
    assert (answer.status, answer.tokens) == (200, right.tokens)
    (state,) = engine.copy_states()
    assert state["failed"] == {"load": 1}
    assert engine.wait_for_counters(before) == {("copy_failures", "load"): 1}
    for _ in known:
        known.check()


def test_without_a_working_load_all_answers_are_right(engine, known):
    engine.rpc("fail_copies", way="load", times=10**6)
    for _ in range(5 * len(known)):
        answer, right = known.ask()
        assert (answer.status, answer.tokens) == (200, right.tokens)
    (state,) = engine.copy_states()
    assert state["failed"] == {"load": 5 * len(known)}, "one attempt for each request"
    engine.rpc("start_over")
    for _ in known:
        known.check()


def test_a_failure_that_nobody_tells_makes_a_wrong_answer(engine, known):
    """The control: garbage is what a failed load leaves on the device."""
    engine.rpc("fail_copies", way="load", hidden=True)
    answer, right = known.ask()
    assert answer.ok and answer.tokens != right.tokens
    engine.forget_device()


def test_a_prompt_that_begins_on_the_device(engine):
    """Its end alone is loaded; all of it may be computed when that fails."""
    start = next(fresh)
    whole = start + " Where is the grain? A wrong crate is worse." * 8
    right, right_start = engine.ask(whole), engine.ask(start)
    assert right.whole_blocks > right_start.whole_blocks + 64
    for fails in (False, True):
        engine.forget_device()
        assert engine.ask(start).tokens == right_start.tokens
        if fails:
            engine.rpc("fail_copies", way="load")
        answer = engine.ask(whole)
        assert (answer.status, answer.tokens) == (200, right.tokens)
        (state,) = engine.copy_states()
        assert state["copies"]["load"] == 2 * (1 + fails)
    assert state["failed"] == {"load": 1}


@pytest.mark.parametrize("failing", [0, 1])
def test_of_two_loads_in_one_step_one_is_computed(known, failing):
    for answer, right in known.ask_two_in_one_step(failing):
        assert (answer.status, answer.tokens) == (200, right.tokens)


def test_preempted_requests_whose_copies_fail(engine):
    """Both grow until the device has no room, and one gives way."""
    pair = [prompt("Lamp and"), prompt("Rain on")]
    alone = [engine.ask(each, tokens=60) for each in pair]
    engine.forget_device()
    preempted = engine.total("vllm:num_preemptions_total")
    engine.rpc("slow_copies", microseconds=5_000)
    for way in ("load", "store"):
        engine.rpc("fail_copies", way=way, times=10**6)
    together = engine.ask_together(pair, tokens=60)
    assert [answer.tokens for answer in together] == [each.tokens for each in alone]
    assert engine.total("vllm:num_preemptions_total") > preempted


# ----- the end: nothing can be asked after it


def test_copies_that_hang_do_not_keep_ctrl_c_waiting(engine, known):
    """One load is on its stream for a minute, and one that failed waits for that."""
    engine.forget_device()
    waiting = tuple(known)[:2]
    engine.rpc("fail_copies", way="load", skip=1)
    engine.rpc("slow_copies", microseconds=60_000_000)
    with ThreadPoolExecutor(len(waiting)) as pool:
        # Clients that go away. vLLM may wait for others for ever.
        asked = [pool.submit(engine.ask, each, seconds=1) for each in waiting]
        for each in asked:
            assert isinstance(each.exception(ANSWER_SECONDS), TimeoutError)
    (state,) = engine.copy_states()
    assert (state["copies"], state["failed"]) == ({"load": 2}, {"load": 1})
    assert engine.stop(signal.SIGINT, DRAIN_SECONDS + 10) == 0
    assert not engine.left()
