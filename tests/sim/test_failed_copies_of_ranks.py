# SPDX-License-Identifier: Apache-2.0
"""A served engine of two ranks: a copy that fails on one has failed."""

from typing import Any

import pytest

from .served_engine import BLOCK, BLOCK_BYTES, fresh_prompts

RANKS = 2
# Without the overlap of steps, which the other servers of these tests have.
SERVER: dict[str, Any] = {"ranks": RANKS, "arguments": ["--no-async-scheduling"]}
SLOW_US = 50_000  # each rectangle
fresh = fresh_prompts()


def failed(engine) -> list[dict[str, int]]:
    return [state["failed"] for state in engine.copy_states()]


def test_each_rank_copies_its_part(engine, known):
    before = engine.copy_counters()
    for _ in known:
        known.check()
    right = engine.ask(next(fresh))
    loaded = sum(answer.whole_blocks for answer in known.answers.values())
    compared = engine.rpc("compare_last", way="store")
    assert [each["different"] for each in compared] == [0] * RANKS
    for state in engine.copy_states():
        assert state["copies"] == {"load": len(known), "store": 1}
        assert not state["async scheduling"]
        assert state["moved"] == {
            "sdma h2d": loaded // BLOCK,
            "sdma d2h": right.whole_blocks // BLOCK,
            "packets": (loaded + right.whole_blocks) // BLOCK,
        }
    assert engine.wait_for_counters(before) == {
        ("copies", "load"): RANKS * len(known),
        ("copied_bytes", "load"): loaded // BLOCK * BLOCK_BYTES,
        ("copies", "store"): RANKS,
        ("copied_bytes", "store"): right.whole_blocks // BLOCK * BLOCK_BYTES,
    }


@pytest.mark.parametrize("way", ["load", "store"])
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_failure_that_nobody_tells_makes_a_wrong_answer(engine, known, way, rank):
    """The control: either rank's part counts."""
    engine.rpc("fail_copies", way=way, hidden=True, rank=rank)
    if way == "load":
        answer, right = known.ask()
    else:
        each = next(fresh)
        right = engine.ask(each)
        engine.forget_device()
        answer = engine.ask(each)
    assert answer.ok and answer.cached == right.whole_blocks
    assert answer.tokens != right.tokens
    engine.forget_device()


@pytest.mark.parametrize("slow", [None, 0, 1])
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_load_that_fails_on_one_rank_fails_its_request(engine, known, rank, slow):
    before = engine.copy_counters()
    if slow is not None:
        engine.rpc("slow_copies", microseconds=SLOW_US, rank=slow)
    engine.rpc("fail_copies", way="load", rank=rank)
    answer, right = known.ask()
    assert answer.status == 500
    assert failed(engine) == [{"load": 1} if n == rank else {} for n in range(RANKS)]
    # The other rank's copy has succeeded, though for nothing.
    assert engine.wait_for_counters(before) == {
        ("copy_failures", "load"): 1,
        ("copies", "load"): 1,
        ("copied_bytes", "load"): right.whole_blocks // BLOCK * BLOCK_BYTES // RANKS,
    }
    engine.rpc("slow_copies", microseconds=0)
    for _ in known:
        known.check()


@pytest.mark.parametrize("slow", [None, 0, 1])
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_store_that_fails_on_one_rank_is_not_served(engine, rank, slow):
    before = engine.copy_counters()
    if slow is not None:
        engine.rpc("slow_copies", microseconds=SLOW_US, rank=slow)
    engine.rpc("fail_copies", way="store", rank=rank)
    each = next(fresh)
    right = engine.ask(each)
    assert right.ok
    moved = engine.wait_for_counters(before)
    assert failed(engine) == [{"store": 1} if n == rank else {} for n in range(RANKS)]
    assert (moved["copies", "store"], moved["copy_failures", "store"]) == (1, 1)
    engine.rpc("slow_copies", microseconds=0)
    engine.check_recomputed_then_loaded(each, right)


@pytest.mark.parametrize("way", ["load", "store"])
def test_a_copy_that_fails_on_both_ranks(engine, known, way):
    before = engine.copy_counters()
    engine.rpc("fail_copies", way=way)
    if way == "load":
        assert known.ask()[0].status == 500
        known.check()
    else:
        each = next(fresh)
        right = engine.ask(each)
        engine.check_recomputed_then_loaded(each, right)
    assert failed(engine) == [{way: 1}] * RANKS
    assert engine.wait_for_counters(before)["copy_failures", way] == RANKS


def test_both_ranks_fail_again_and_again(engine, known):
    """On either rank or on both, loads and stores in turn."""
    before = engine.copy_counters()
    stored = {}
    for rank in (0, 1, None, 1, None, 0):
        for way in ("load", "store"):
            engine.rpc("fail_copies", way=way, rank=rank)
        assert known.ask()[0].status == 500
        each = next(fresh)
        stored[each] = engine.ask(each)
    moved = engine.wait_for_counters(before)
    assert moved["copy_failures", "load"] == moved["copy_failures", "store"] == 8
    for each, right in stored.items():
        engine.check_recomputed_then_loaded(each, right)
    for _ in known:
        known.check()
