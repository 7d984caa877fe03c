# SPDX-License-Identifier: Apache-2.0
"""A served engine of two ranks sleeps and wakes whole, or says why not."""

from typing import Any

import pytest

from .served_engine import SLEEPING, ServedEngine
from .test_sleep import (
    check_asleep,
    check_awake,
    good,
    sleep_1,
    sleep_1_wake_weights_first,
    sleep_2_and_reload,
)

RANKS = 2
SERVER: dict[str, Any] = {**SLEEPING, "ranks": RANKS}


def check_answers(engine: ServedEngine, known) -> None:
    check_awake(engine)
    for each, right in known.answers.items():
        answer = engine.ask(each)
        assert answer.tokens == right.tokens


@pytest.mark.parametrize(
    "kind", [sleep_1, sleep_1_wake_weights_first, sleep_2_and_reload]
)
def test_answers_are_the_same_after_a_sleep_of_both_ranks(engine, known, kind):
    before = engine.device_memory()
    assert len(before) == RANKS
    kind(engine)
    check_answers(engine, known)
    for old, new in zip(before, engine.device_memory(), strict=True):
        assert (new["free"], new["mapped"]) == (old["free"], old["mapped"])


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("call", ["hipMemcpyAsync", "hipMemUnmap"])
def test_a_rank_that_cannot_sleep_keeps_the_others_awake(engine, known, call, rank):
    engine.rpc("fail_call", call=call, error=1, rank=rank)
    status, body = engine.sleep(1)
    assert status == 500
    assert f"rank {rank}: " in body and f"rank {1 - rank}: " not in body
    assert f"{call} failed" in body and "every rank was woken again" in body
    check_answers(engine, known)
    sleep_1(engine)
    check_answers(engine, known)


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_that_cannot_sleep_at_level_2_leaves_the_engine_asleep(
    engine, known, rank
):
    """The other's weights are gone."""
    engine.rpc("fail_call", call="hipMemUnmap", error=1, rank=rank)
    status, body = engine.sleep(2)
    assert status == 500
    assert "counts as asleep" in body and "reload_weights" in body
    assert engine.is_sleeping()
    good(engine.wake())
    engine.rpc("reload_weights")
    check_answers(engine, known)


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("call", ["hipMemCreate", "hipMemcpyAsync"])
def test_a_rank_that_cannot_wake_leaves_the_engine_asleep(engine, known, call, rank):
    good(engine.sleep(1))
    check_asleep(engine)
    engine.rpc("fail_call", call=call, error=1, rank=rank)
    status, body = engine.wake()
    assert status == 500
    assert f"rank {rank}: " in body and f"rank {1 - rank}: " not in body
    assert f"{call} failed" in body
    assert engine.is_sleeping()
    assert bool(engine.device_memory()[rank]["asleep"])
    good(engine.wake())
    check_answers(engine, known)


def test_both_ranks_fail_in_turn(engine, known):
    """No answer of one failure is taken for the next call's."""
    for call, rank in (("hipMemCreate", 0), ("hipMemMap", 1), ("hipMemSetAccess", 0)):
        good(engine.sleep(1))
        engine.rpc("fail_call", call=call, error=1, rank=rank)
        status, body = engine.wake("weights")
        assert status == 500 and f"{call} failed" in body
        good(engine.wake())
    check_answers(engine, known)
