# SPDX-License-Identifier: Apache-2.0
"""A failed load costs its own request, or a recomputation of it, and nothing else."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus
from vllm.v1.simple_kv_offload.manager import LoadRequestState, TransferMeta
from vllm.v1.simple_kv_offload.transfer_results import request_loads

from .modelled_engine import (
    ANSWER,
    BLOCK,
    Copy,
    Engine,
    Options,
    after,
    fail_loads,
    prompt,
    succeed,
    write_model,
)

BLOCKS = 6
PROMPT = prompt(0, BLOCKS)
GOOD = ((ANSWER,), "length")
ERROR = ((), "error")
Build = Callable[..., Engine]

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "async": {"async_scheduling": True},
    "groups": {"groups": 2, "gpu_blocks": 64},
    "groups-async": {"groups": 3, "gpu_blocks": 64, "async_scheduling": True},
    "lazy": {"lazy": True, "gpu_blocks": 10, "batched_tokens": 48},
    "multi": {"nesting": 1},
    "multi-nested-async": {"nesting": 2, "async_scheduling": True},
}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
policies = pytest.mark.parametrize("policy", ["fail", "recompute"])


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Engines that have offloaded some prompts and forgotten them on the GPU."""
    model = write_model(tmp_path_factory.mktemp("model"))

    def build(*prompts: list[int], **options: Any) -> Engine:
        engine = Engine(Options(model, **options))
        for each in prompts or (PROMPT,):
            engine.ask(each)
            assert engine.offloaded(each)[0] == list(range(len(each) // BLOCK))
        engine.forget_gpu()
        engine.check_idle()
        assert not engine.num_loads
        return engine

    return build


def load(engine: Engine, each: list[int] = PROMPT, **more: Any) -> str:
    """Ask, and step until the load is under way on all ranks."""
    name = engine.submit(each, **more)
    engine.step_until(engine.loads)
    assert waits(engine, name)
    return name


def waits(engine: Engine, name: str) -> bool:
    return engine.requests[name].status is RequestStatus.WAITING_FOR_REMOTE_KVS


def expected(policy: str, tokens: int = 1) -> tuple[tuple[int, ...], str]:
    return ERROR if policy == "fail" else ((ANSWER,) * tokens, "length")


def served_from_host(engine: Engine, each: list[int] = PROMPT) -> None:
    """The content of the host's blocks is as good as it was before."""
    engine.forget_gpu()
    before = engine.num_loads
    assert engine.ask(each) == GOOD
    assert engine.num_loads == before + 1
    engine.check_idle()


# ----- one load


@modes
@policies
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_failed_load_costs_its_request_by_the_policy(build, mode, policy, ranks):
    engine = build(policy=policy, ranks=ranks, **mode)
    assert engine.ask(PROMPT, fail_loads, max_tokens=20) == expected(policy, 20)
    assert engine.num_loads == 1
    engine.check_idle()
    served_from_host(engine)


@modes
@policies
def test_a_failed_load_is_not_counted_as_one(build, mode, policy):
    engine = build(policy=policy, **mode)
    engine.ask(PROMPT, fail_loads)
    assert engine.metrics["load_blocks_total"] == 0
    assert engine.metrics["copy_failures_total,load,batch"] == 1
    assert engine.metrics["copies_total,load,batch"] == 0
    served_from_host(engine)
    (_, good) = [copy for copy in engine.launched if not copy.is_store]
    assert engine.metrics["load_blocks_total"] == len(good.src)
    assert engine.metrics["copies_total,load,batch"] == 1


@modes
@policies
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_failure_may_come_late(build, mode, policy, steps):
    engine = build(policy=policy, **mode)
    name = engine.submit(PROMPT, max_tokens=3)
    engine.run(after(steps, fail_loads))
    assert engine.answers[name] == expected(policy, 3)
    engine.check_idle()
    served_from_host(engine)


def test_windows_are_loaded_in_part(build):
    """What is tested with groups is more than one load of equal parts."""
    engine = build(groups=2, gpu_blocks=64)
    load(engine)
    (only,) = engine.loads()
    assert BLOCKS < len(only.src) < 2 * BLOCKS
    engine.run(succeed)


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


@policies
@pytest.mark.parametrize(("ranks", "order", "failing"), REPORTS)
def test_blocks_are_kept_until_the_last_rank_has_ended(
    build, policy, ranks, order, failing
):
    engine = build(policy=policy, ranks=ranks, groups=2, gpu_blocks=64)
    name = load(engine)
    used = engine.used()
    assert min(used) >= BLOCKS
    for rank in order[:-1]:
        (copy,) = engine.loads(rank)
        copy.end(failed=rank in failing)
        engine.step()
        engine.step()
        assert waits(engine, name)
        assert engine.used() == used
    (copy,) = engine.loads(order[-1])
    copy.end(failed=order[-1] in failing)
    engine.run(succeed)
    assert engine.answers[name] == expected(policy)
    assert engine.num_loads == 1
    engine.check_idle()
    served_from_host(engine)


@policies
@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}])
def test_ranks_that_end_in_one_step(build, policy, failing):
    engine = build(policy=policy, ranks=2)
    name = load(engine)
    for copy in engine.loads():
        copy.end(failed=copy.rank in failing)
    engine.run(succeed)
    assert engine.answers[name] == expected(policy)
    engine.check_idle()


# ----- several loads


@modes
@policies
@pytest.mark.parametrize(
    "failing",
    [set(each) for n in range(4) for each in itertools.combinations("abc", n)],
)
def test_each_request_of_a_step_fails_by_itself(build, mode, policy, failing):
    prompts = {"a": prompt(1, 1), "b": prompt(2, 3), "c": prompt(3, 2)}
    engine = build(*prompts.values(), policy=policy, ranks=2, **mode)
    for name, each in prompts.items():
        engine.submit(each, name)
    engine.step_until(engine.loads)
    assert len(engine.loads(0)) == 3
    for rank in range(2):
        for name, copy in zip(prompts, engine.loads(rank), strict=True):
            copy.end(failed=name in failing and rank == 1)
    engine.run(succeed)
    for name in prompts:
        assert engine.answers[name] == (expected(policy) if name in failing else GOOD)
    engine.check_idle()


@policies
def test_requests_that_share_the_host_blocks(build, policy):
    engine = build(policy=policy)
    names = [engine.submit(PROMPT) for _ in range(3)]
    engine.step_until(engine.loads)
    first, second, third = engine.loads()
    assert first.src == second.src == third.src
    second.end(failed=True)
    engine.step()
    first.end()
    third.end()
    engine.run(succeed)
    answers = [engine.answers[name] for name in names]
    assert answers == [GOOD, expected(policy), GOOD]
    engine.check_idle()


@modes
def test_recomputation_ends_even_when_every_copy_fails(build, mode):
    engine = build(policy="recompute", **mode)
    for count in range(1, 11):
        assert engine.ask(PROMPT, lambda copy: True, max_tokens=2)[1] == "length"
        assert engine.num_loads == count
        engine.check_idle()
        engine.forget_gpu()
    engine.run(succeed)


def test_what_the_gpu_has_is_not_computed_again(build):
    engine = build(policy="recompute")
    assert engine.ask(prompt(0, 2)) == GOOD
    before = engine.num_loads
    name = load(engine)
    (only,) = engine.loads()
    assert len(only.src) == BLOCKS - 2
    only.end(failed=True)
    engine.run(succeed)
    assert engine.answers[name] == GOOD
    assert engine.num_loads == before + 1
    assert engine.computed[name] == len(PROMPT) - 2 * BLOCK
    engine.check_idle()


@policies
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("runner_v2", [False, True])
def test_a_preempted_request_may_fail_to_come_back(
    build, policy, async_scheduling, runner_v2
):
    """Its own KV has gone to the host, and others have taken its blocks."""
    prompts = [prompt(number, 2) for number in (1, 2)]
    engine = build(
        *prompts,
        gpu_blocks=11,
        policy=policy,
        async_scheduling=async_scheduling,
        runner_v2=runner_v2,
    )
    names = [engine.submit(each, max_tokens=80) for each in prompts]

    def fail_when_preempted(copy: Copy) -> bool:
        preempted = any(engine.requests[name].num_preemptions for name in names)
        return preempted and not copy.is_store

    engine.run(fail_when_preempted)
    assert engine.metrics["copy_failures_total,load,batch"] >= 1
    good = ((ANSWER,) * 80, "length")
    answers = [engine.answers[name] for name in names]
    assert good in answers
    for answer in answers:
        # It may have said something before it was preempted.
        assert answer == good or (policy, answer[1]) == ("fail", "error")
    assert (answers.count(good) == 2) == (policy == "recompute")
    engine.check_idle()


# ----- aborts and resets


@modes
@policies
@pytest.mark.parametrize("failed", [False, True])
def test_an_abort_while_the_load_is_under_way(build, mode, policy, failed):
    engine = build(policy=policy, ranks=2, **mode)
    name = load(engine)
    engine.loads(1)[0].end(failed=failed)
    engine.step()
    engine.abort(name)
    engine.step()
    # The other rank still writes to them.
    assert min(engine.used()) >= BLOCKS
    engine.loads(0)[0].end()
    engine.run(succeed)
    assert name not in engine.answers
    engine.check_idle()
    served_from_host(engine)


@policies
def test_an_abort_before_a_failure_that_is_due(build, policy):
    """The worker has reported it, and the scheduler has yet to see it."""
    engine = build(policy=policy, async_scheduling=True)
    name = load(engine)
    engine.end_copies(fail_loads)
    engine.schedule()
    engine.abort(name)
    engine.run(succeed)
    assert name not in engine.answers
    engine.check_idle()
    served_from_host(engine)


@modes
@policies
@pytest.mark.parametrize("resets", [{0}, {1}, {2}, {0, 1}, {0, 1, 2}])
def test_a_reset_while_the_load_is_under_way(build, mode, policy, resets):
    """Before the first rank's report, between the two, and after both."""
    engine = build(policy=policy, ranks=2, **mode)
    name = load(engine)
    for rank in range(2):
        if rank in resets:
            assert not engine.reset()
        engine.loads(rank)[0].end(failed=rank == 0)
        engine.step()
    if 2 in resets:
        engine.reset()
    engine.run(succeed)
    assert engine.answers[name] == expected(policy)
    assert engine.num_loads == 1
    engine.check_idle()
    assert engine.reset()
    engine.check_idle()


@policies
def test_a_reset_and_an_abort(build, policy):
    engine = build(policy=policy)
    name = load(engine)
    assert not engine.reset()
    engine.abort(name)
    engine.run(fail_loads)
    assert engine.reset()
    engine.check_idle()


# ----- what is not ours


def report(engine: Engine, *names: str) -> None:
    """As another connector of a MultiConnector would."""
    engine.connector.update_connector_output(
        KVConnectorOutput(finished_recving=set(names), failed_recving=set(names))
    )


@pytest.mark.parametrize("nesting", [0, 1])
def test_loads_of_another_connector_are_left_alone(build, nesting):
    engine = build(nesting=nesting)
    load(engine, name="ours")
    theirs = engine.submit(prompt(9), "theirs", max_tokens=30)
    engine.step()
    engine.step()
    used, request = engine.used(), engine.requests[theirs]
    before = dict(vars(request))
    report(engine, theirs, "unknown")
    assert engine.used() == used
    assert vars(request) == before
    assert theirs in engine.managers[0]._reqs_to_store
    engine.run(succeed)
    assert engine.answers["ours"] == GOOD
    assert engine.answers[theirs] == ((ANSWER,) * 30, "length")
    engine.check_idle()


@policies
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_only_the_connector_that_loads_lets_go(build, policy, async_scheduling):
    engine = build(
        nesting=1, children=2, policy=policy, async_scheduling=async_scheduling
    )
    assert engine.offloaded(PROMPT, pool=1) == engine.offloaded(PROMPT, pool=0)
    name = load(engine)
    (only,) = engine.loads()
    assert only.pool is engine.ranks[0].pools[0]
    assert engine.used() == (6, 6, 0)
    only.end(failed=True)
    engine.run(succeed)
    assert engine.answers[name] == expected(policy)
    assert engine.num_loads == 1
    engine.check_idle()
    served_from_host(engine)


def test_a_load_without_blocks_may_fail(build):
    engine = build()
    name = engine.submit(prompt(1))
    engine.manager._reqs_to_load[name] = LoadRequestState(
        engine.requests[name], TransferMeta([], [])
    )
    metadata = engine.manager.build_connector_meta(SchedulerOutput.make_empty())
    assert list(request_loads(metadata)) == [((name,), [], [])]
    before = engine.used()
    report(engine, name)
    assert engine.used() == before
    assert name not in engine.manager._reqs_to_load
    engine.run(succeed)
    engine.check_idle()


def test_a_worker_ends_a_load_without_blocks_at_once(build):
    engine = build()
    (rank,) = engine.ranks
    engine.manager._reqs_to_load["empty"] = LoadRequestState(
        engine.requests["request-0"], TransferMeta([], [])
    )
    scheduled = SchedulerOutput.make_empty()
    scheduled.kv_connector_metadata = engine.connector.build_connector_meta(scheduled)
    output = rank.execute(scheduled, lambda rank: None).kv_connector_output
    assert output.finished_recving == {"empty"}
    assert output.failed_recving == set()
    engine.connector.update_connector_output(output)
    engine.check_idle()


# ----- stores of requests that load


@modes
@policies
def test_what_a_request_computes_after_a_failed_load_is_stored(build, mode, policy):
    engine = build(policy=policy, **mode)
    longer = prompt(0, BLOCKS + 2)
    answer = engine.ask(longer, fail_loads)
    assert answer == expected(policy)
    # The load's blocks on the GPU, full of garbage, are not.
    engine.check_idle()
    if policy == "recompute" and not mode.get("lazy"):
        assert engine.offloaded(longer)[0] == list(range(BLOCKS + 2))
        served_from_host(engine, longer)


@modes
def test_loads_and_stores_that_all_fail(build, mode):
    engine = build(policy="recompute", **mode)
    for number in range(4):
        engine.submit(prompt(number % 2, BLOCKS), max_tokens=4)
    engine.run(after(2, lambda copy: True))
    assert {reason for _, reason in engine.answers.values()} == {"length"}
    engine.check_idle()
