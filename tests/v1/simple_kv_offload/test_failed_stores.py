# SPDX-License-Identifier: Apache-2.0
"""A failed store costs no request anything, and its blocks are never served."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored

from .modelled_engine import (
    ANSWER,
    Copy,
    Engine,
    Options,
    after,
    fail_stores,
    hold,
    prompt,
    succeed,
    write_model,
)

BLOCKS = 3
PROMPT = prompt(0, BLOCKS)
Build = Callable[..., Engine]

# The lazy mode saves the GPU's free blocks before they are given to others, so it
# wants few of them.
LAZY = {"lazy": True, "gpu_blocks": 16, "batched_tokens": 64}
MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "eager-async": {"async_scheduling": True},
    "eager-groups": {"groups": 2},
    "eager-groups-async": {"groups": 3, "async_scheduling": True},
    "lazy": LAZY,
    "lazy-async": {**LAZY, "async_scheduling": True},
    "lazy-groups": {**LAZY, "groups": 2},
    "multi": {"nesting": 1},
    "multi-nested": {"nesting": 2, "async_scheduling": True},
}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Build]:
    """Engines; nothing of what was asked of them may be left after the test."""
    model = write_model(tmp_path_factory.mktemp("model"))
    yield lambda **options: Engine(Options(model, **options))


def all_blocks(engine: Engine, blocks: int = BLOCKS) -> list[list[int]]:
    return [list(range(blocks))] * engine.options.groups


def nothing(engine: Engine) -> list[list[int]]:
    return [[]] * engine.options.groups


def answered(engine: Engine, name: str, tokens: int = 1) -> None:
    assert engine.answers[name] == ((ANSWER,) * tokens, "length")


def store_again(engine: Engine) -> None:
    """What failed once is stored by the next request that has it, and served."""
    if engine.options.lazy:
        # Until the walk over the free blocks has come round.
        for number in range(90, 94):
            engine.ask(prompt(number))
    assert engine.ask(PROMPT) == ((ANSWER,), "length")
    engine.check_idle()
    assert engine.offloaded(PROMPT) == all_blocks(engine)
    engine.forget_gpu()
    loads = engine.num_loads
    assert engine.ask(PROMPT) == ((ANSWER,), "length")
    assert engine.num_loads == loads + 1
    engine.check_idle()


def store(engine: Engine, name: str | None = None) -> str:
    """Ask, and step until the store of the prompt is under way."""
    name = engine.submit(PROMPT, name)
    engine.step_until(engine.stores)
    return name


# ----- the blocks of a failed store


@modes
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_failed_store_is_not_cached_and_may_be_tried_again(build, mode, ranks):
    engine = build(ranks=ranks, **mode)
    name = engine.submit(PROMPT)
    engine.run(fail_stores)
    answered(engine, name)
    assert engine.launched
    assert engine.offloaded(PROMPT) == nothing(engine)
    engine.check_idle()
    store_again(engine)


@modes
def test_a_failed_store_is_computed_and_not_loaded_by_the_next_request(build, mode):
    engine = build(**mode)
    engine.ask(PROMPT, fail_stores)
    engine.forget_gpu()
    before = len(engine.launched)
    assert engine.ask(PROMPT, fail_stores) == ((ANSWER,), "length")
    assert all(copy.is_store for copy in engine.launched[before:])
    engine.check_idle()


def test_the_manager_finds_no_tokens_of_a_failed_store(build):
    engine = build()
    engine.ask(PROMPT, fail_stores)
    request = engine.request(PROMPT, "asks")
    assert engine.manager.get_num_new_matched_tokens(request, 0) == (0, False)
    store_again(engine)
    assert engine.manager.get_num_new_matched_tokens(request, 0) == (48, True)
    engine.manager.request_finished(request, [])
    engine.check_idle()


def test_fifty_failures_cost_the_pool_no_block(build):
    engine = build(cpu_blocks=BLOCKS + 1)
    for _ in range(50):
        engine.ask(PROMPT, fail_stores)
        assert engine.used() == (0, 0)
    store_again(engine)


# ----- ranks


REPORTS = [
    (ranks, order, failing)
    for ranks, orders in (
        (2, list(itertools.permutations(range(2)))),
        (4, [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)]),
    )
    for order in orders
    for count in (1, 2, ranks)
    for failing in itertools.combinations(range(ranks), count)
]


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize(("ranks", "order", "failing"), REPORTS)
def test_blocks_are_released_when_the_last_rank_has_ended(
    build, ranks, order, failing, lazy
):
    engine = build(ranks=ranks, **(LAZY if lazy else {}))
    name = store(engine)
    used = len(engine.stores(0)[0].dst)
    event = engine.stores(0)[0].event
    for rank in order[:-1]:
        one_store(engine, rank, event).end(failed=rank in failing)
        engine.step()
        assert engine.used()[1] >= used
        assert engine.offloaded(PROMPT) == nothing(engine)
        assert engine.busy
    one_store(engine, order[-1], event).end(failed=order[-1] in failing)
    engine.run(fail_stores)
    answered(engine, name)
    assert engine.offloaded(PROMPT) == nothing(engine)
    engine.check_idle()
    store_again(engine)


@pytest.mark.parametrize(("ranks", "order", "failing"), REPORTS)
def test_ranks_that_end_in_one_step_are_one_failure(build, ranks, order, failing):
    engine = build(ranks=ranks)
    name = store(engine)
    event = engine.stores(0)[0].event
    for rank in order:
        one_store(engine, rank, event).end(failed=rank in failing)
    engine.run(hold)
    answered(engine, name)
    assert engine.offloaded(PROMPT) == nothing(engine)
    engine.check_idle()
    store_again(engine)


def one_store(engine: Engine, rank: int, event: int) -> Copy:
    (copy,) = [copy for copy in engine.stores(rank) if copy.event == event]
    return copy


# ----- other stores


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_stores_of_other_steps_are_cached(build, ranks, failing, order):
    """A step is one store, however many requests it has."""
    engine = build(ranks=ranks)
    prompts = [prompt(number, blocks=2) for number in range(3)]
    events = []
    for each in prompts:
        engine.submit(each, max_tokens=9)
        before = len(engine.stores(0))
        engine.step_until(lambda before=before: len(engine.stores(0)) > before)
        events.append(engine.stores(0)[-1].event)
    for event in order:
        for rank in range(ranks):
            one_store(engine, rank, events[event]).end(failed=event == failing)
            engine.step()
    expected = [[0, 1] if number != failing else [] for number in range(3)]
    assert [engine.offloaded(each)[0] for each in prompts] == expected
    engine.run(hold)
    assert [reason for _, reason in engine.answers.values()] == ["length"] * 3
    engine.check_idle()


def test_requests_of_one_step_lose_their_store_together(build):
    engine = build(ranks=2)
    prompts = [prompt(number) for number in range(3)]
    names = [engine.submit(each) for each in prompts]
    engine.step_until(lambda: engine.stores(0) and engine.stores(1))
    (first,), (second,) = engine.stores(0), engine.stores(1)
    assert len(first.src) == 3 * BLOCKS
    second.end(failed=True)
    first.end()
    engine.run(hold)
    for name in names:
        answered(engine, name)
    assert [engine.offloaded(each) for each in prompts] == [[[]]] * 3
    engine.check_idle()


def test_later_blocks_of_the_same_request_are_cached(build):
    engine = build(batched_tokens=16)
    engine.submit(PROMPT, max_tokens=20)
    engine.step_until(engine.stores)
    (first,) = engine.stores()
    engine.step_until(lambda: len(engine.stores()) > 1)
    first.end(failed=True)
    engine.run(succeed)
    assert engine.offloaded(PROMPT) == [[1, 2]]
    engine.check_idle()
    # A prefix without its first block is none.
    engine.forget_gpu()
    engine.ask(PROMPT)
    assert engine.num_loads == 0
    assert engine.offloaded(PROMPT) == all_blocks(engine)


# ----- requests


@modes
@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_that_finished_meanwhile_are_forgotten(build, mode, ranks):
    engine = build(ranks=ranks, **mode)
    names = [engine.submit(prompt(number), max_tokens=2) for number in range(2)]
    engine.step_until(lambda: len(engine.answers) == 2)
    assert engine.stores()
    assert engine.busy
    engine.run(fail_stores)
    for name in names:
        answered(engine, name, tokens=2)
    engine.check_idle()


def test_a_running_request_is_forgotten_when_it_finishes(build):
    engine = build(ranks=2)
    name = engine.submit(PROMPT, max_tokens=40)
    engine.step_until(engine.stores)
    engine.end_copies(fail_stores)
    engine.step()
    assert name in engine.manager._reqs_to_store
    assert not engine.manager._store_event_to_reqs
    assert not engine.manager._in_flight_store_gpu_blocks
    engine.run(succeed)
    answered(engine, name, tokens=40)
    engine.check_idle()


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_an_aborted_request_is_forgotten(build, when):
    engine = build(ranks=2)
    name = engine.submit(PROMPT, max_tokens=40)
    engine.step_until(engine.stores)
    if when == "before":
        engine.abort(name)
    engine.stores(1)[0].end(failed=True)
    engine.step()
    if when == "between":
        engine.abort(name)
    engine.stores(0)[0].end()
    engine.step()
    if when == "after":
        engine.abort(name)
    engine.run(hold)
    assert name not in engine.answers
    assert engine.offloaded(PROMPT) == nothing(engine)
    engine.check_idle()
    store_again(engine)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("runner_v2", [False, True])
def test_a_flush_for_a_preemption_may_fail(build, policy, async_scheduling, runner_v2):
    """The GPU has room for one and a half of them."""
    engine = build(
        gpu_blocks=11,
        ranks=2,
        policy=policy,
        async_scheduling=async_scheduling,
        runner_v2=runner_v2,
    )
    engine.flush = fail_stores
    names = [
        engine.submit(prompt(number, blocks=2), max_tokens=80) for number in range(2)
    ]
    engine.run(lambda copy: copy.is_store if copy.rank else False)
    for name in names:
        answered(engine, name, tokens=80)
    assert sum(request.num_preemptions for request in engine.requests.values())
    engine.check_idle()


# ----- resets


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("first_fails", [False, True])
@pytest.mark.parametrize("resets", [{0}, {1}, {2}, {0, 1}, {1, 2}, {0, 1, 2}])
def test_a_reset_waits_for_a_failed_store(build, lazy, first_fails, resets):
    """Before the first rank's report, between the two, and after both."""
    engine = build(ranks=2, **(LAZY if lazy else {}))
    name = store(engine)
    event = engine.stores(0)[0].event
    engine.step_until(lambda: name in engine.answers)
    assert len(engine.stores(0)) == 1
    for rank in range(2):
        if rank in resets:
            assert not engine.reset()
        one_store(engine, rank, event).end(failed=(rank == 0) == first_fails)
        engine.step()
    assert engine.used() == (0, 0)
    assert engine.offloaded(PROMPT) == nothing(engine)
    if 2 in resets:
        assert engine.reset()
    engine.run(fail_stores)
    assert engine.reset()
    engine.check_idle()
    store_again(engine)


# ----- what others see


def stored_on_host(engine: Engine) -> list[tuple[int, ...]]:
    return [
        tuple(event.token_ids)
        for event in engine.events.published
        if isinstance(event, BlockStored) and event.medium == MEDIUM_CPU
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_event_says_that_a_failed_block_was_stored(build, ranks):
    engine = build(events=True, ranks=ranks)
    engine.ask(PROMPT, lambda copy: copy.rank == ranks - 1)
    assert stored_on_host(engine) == []
    assert any(isinstance(event, BlockStored) for event in engine.events.published)
    store_again(engine)
    assert stored_on_host(engine) == [
        tuple(PROMPT[first : first + 16]) for first in range(0, 48, 16)
    ]


@modes
def test_gauges_go_back(build, mode):
    engine = build(**mode)
    engine.submit(PROMPT)
    engine.step_until(engine.stores)
    engine.step()
    engine.step()
    count = BLOCKS * engine.options.groups
    assert engine.metrics["pending_store_blocks"] >= count
    assert engine.metrics["used_blocks"] >= count
    engine.run(fail_stores)
    assert engine.metrics["pending_store_blocks"] == 0
    # The pool's null block.
    assert engine.metrics["used_blocks"] == 1
    assert engine.metrics["copy_failures_total,store,batch"] == len(engine.launched)
    assert engine.metrics["copies_total,store,batch"] == 0


@modes
def test_there_is_no_work_left(build, mode):
    engine = build(**mode)
    engine.submit(PROMPT)
    engine.step_until(engine.stores)
    assert engine.connector.has_pending_push_work()
    engine.run(fail_stores)
    assert not engine.connector.has_pending_push_work()
    assert not engine.scheduler.has_requests()


@modes
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_an_engine_whose_stores_all_fail_comes_to_rest(build, mode, steps):
    engine = build(**mode)
    names = [
        engine.submit(prompt(number), max_tokens=3 + 2 * number) for number in range(2)
    ]
    engine.run(after(steps, fail_stores))
    assert len(engine.launched) < 20
    for number, name in enumerate(names):
        answered(engine, name, tokens=3 + 2 * number)
    engine.check_idle()


def test_one_connector_of_two_fails_and_the_other_serves(build):
    engine = build(nesting=1, children=2)
    failing = engine.ranks[0].pools[0]
    engine.ask(PROMPT, lambda copy: copy.is_store and copy.pool is failing)
    assert engine.offloaded(PROMPT, pool=0) == [[]]
    assert engine.offloaded(PROMPT, pool=1) == all_blocks(engine)
    engine.forget_gpu()
    assert engine.ask(PROMPT) == ((ANSWER,), "length")
    (load,) = [copy for copy in engine.launched if not copy.is_store]
    assert load.pool is not failing
    engine.check_idle()
