# SPDX-License-Identifier: Apache-2.0
"""How the ends of transfers get from the workers to the scheduler, piece by piece."""

import pickle
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.simple_kv_offload.manager import LoadRequestState, TransferMeta
from vllm.v1.simple_kv_offload.metadata import (
    INVALID_JOB_ID,
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
)
from vllm.v1.simple_kv_offload.transfer_results import (
    RequestLoadsMetadata,
    StoreResultsMetadata,
    drain_kv_copies,
    request_loads,
    with_request_loads,
)

from vllm_rocm_memory.sim import torch_device

from .modelled_engine import (
    Copy,
    Engine,
    Options,
    Rank,
    fail_loads,
    kv_cache_config,
    prompt,
    succeed,
    vllm_config,
    write_model,
)

PATIENCE = 20.0
# Long enough for a call that does not wait to have returned.
MOMENT = 0.05

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
nestings = pytest.mark.parametrize("nesting", [0, 1, 2])


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Options]:
    model = write_model(tmp_path_factory.mktemp("model"))
    return lambda **more: Options(model, **more)


# ----- which blocks are whose


BLOCKS = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=6)
LOADS = st.dictionaries(st.sampled_from("abcdef"), BLOCKS)


def step(
    loads: dict[str, list[tuple[int, int]]], issue: list[str], event: int = 3
) -> SimpleCPUOffloadMetadata:
    """The metadata of a step that issues some of the loads, as workers get it."""
    states = {
        name: LoadRequestState(
            None, TransferMeta([gpu for _, gpu in blocks], [cpu for cpu, _ in blocks])
        )
        for name, blocks in loads.items()
    }
    metadata = SimpleCPUOffloadMetadata(
        load_event=event if issue else INVALID_JOB_ID,
        load_gpu_blocks=[gpu for name in issue for _, gpu in loads[name]],
        load_cpu_blocks=[cpu for name in issue for cpu, _ in loads[name]],
        load_event_to_reqs={event: list(issue), 1: ["earlier"]},
        store_event=5,
        store_gpu_blocks=[1, 2],
        store_cpu_blocks=[3, 4],
        need_flush=True,
    )
    return pickle.loads(pickle.dumps(with_request_loads(metadata, issue, states)))


@unhurried
@given(loads=LOADS, data=st.data())
def test_each_request_gets_its_own_blocks(loads, data):
    issue = data.draw(
        st.lists(st.sampled_from(sorted(loads)), unique=True) if loads else st.just([])
    )
    metadata = step(loads, issue)
    assert list(request_loads(metadata)) == [
        (
            (name,),
            [cpu for cpu, _ in loads[name]],
            [gpu for _, gpu in loads[name]],
        )
        for name in issue
    ]


@unhurried
@given(loads=LOADS)
def test_the_rest_of_the_step_is_what_it_was(loads):
    issue = list(loads)
    metadata = step(loads, issue)
    assert isinstance(metadata, RequestLoadsMetadata) == bool(loads)
    assert (metadata.store_event, metadata.need_flush) == (5, True)
    assert (metadata.store_gpu_blocks, metadata.store_cpu_blocks) == ([1, 2], [3, 4])
    assert metadata.load_event == (3 if issue else INVALID_JOB_ID)
    assert metadata.load_event_to_reqs == {3: issue, 1: ["earlier"]}
    parts = list(request_loads(metadata))
    assert [block for _, cpu, _ in parts for block in cpu] == metadata.load_cpu_blocks
    assert [block for _, _, gpu in parts for block in gpu] == metadata.load_gpu_blocks


def test_a_step_without_loads_keeps_its_metadata():
    metadata = SimpleCPUOffloadMetadata()
    assert with_request_loads(metadata, [], {}) is metadata
    assert list(request_loads(metadata)) == []


def test_without_counts_the_requests_share_one_load():
    metadata = SimpleCPUOffloadMetadata(
        load_event=2,
        load_gpu_blocks=[1, 2, 3],
        load_cpu_blocks=[4, 5, 6],
        load_event_to_reqs={2: ["a", "b"], 1: ["earlier"]},
    )
    assert list(request_loads(metadata)) == [(("a", "b"), [4, 5, 6], [1, 2, 3])]


def test_without_counts_and_blocks_the_requests_still_end():
    metadata = SimpleCPUOffloadMetadata(load_event=2, load_event_to_reqs={2: ["a"]})
    assert list(request_loads(metadata)) == [(("a",), [], [])]


def test_a_step_tells_only_of_the_loads_that_it_issues(options):
    """Others may have been under way for long."""
    engine = Engine(options())
    for number in range(2):
        engine.ask(prompt(number, 2 + number))
    engine.forget_gpu()
    engine.submit(prompt(0, 2), "first")
    engine.step_until(engine.loads)
    engine.submit(prompt(1, 3), "second")
    metadata = engine.schedule().kv_connector_metadata
    assert metadata.load_block_counts == {"second": 3}
    engine.run(succeed)
    engine.check_idle()


# ----- which stores have ended


RESULTS = st.builds(
    lambda counts, failed: StoreResultsMetadata(
        counts, {event for event in failed if event in counts}
    ),
    st.dictionaries(st.integers(0, 5), st.integers(1, 3), max_size=5),
    st.sets(st.integers(0, 5)),
)


@unhurried
@given(RESULTS, RESULTS, RESULTS)
def test_the_order_of_the_ranks_does_not_matter(a, b, c):
    assert a.aggregate(b) == b.aggregate(a)
    assert a.aggregate(b).aggregate(c) == a.aggregate(b.aggregate(c))
    assert a.aggregate(StoreResultsMetadata({})) == a


@unhurried
@given(st.lists(RESULTS, min_size=1))
def test_ranks_are_counted_and_failures_joined(ranks):
    before = pickle.dumps(ranks)
    joined, *others = ranks
    for other in others:
        joined = pickle.loads(pickle.dumps(joined.aggregate(other)))
    for event in range(6):
        count = sum(rank.completed_store_events.get(event, 0) for rank in ranks)
        assert joined.completed_store_events.get(event, 0) == count
        failed = any(event in rank.failed_store_events for rank in ranks)
        assert (event in joined.failed_store_events) == failed
    assert pickle.dumps(ranks) == before


def test_the_scheduler_takes_them_for_what_it_knows():
    assert isinstance(StoreResultsMetadata({}), SimpleCPUOffloadWorkerMetadata)


# ----- the connector in a worker


class Waiting:
    """A call on a thread of its own."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.error = error

    def returns(self, within: float = PATIENCE) -> bool:
        self._thread.join(within)
        if self.error is not None:
            raise self.error
        return not self._thread.is_alive()


def drains(call: Callable[[], object], copies: list[Copy]) -> None:
    """The call waits for every copy, and for nothing else."""
    assert copies
    waiting = Waiting(call)
    for number, copy in enumerate(copies):
        assert not waiting.returns(MOMENT)
        copy.end(failed=bool(number % 2))
    assert waiting.returns()


@pytest.fixture
def busy(options: Callable[..., Options]) -> Callable[..., Engine]:
    """Engines with a load and a store under way."""

    def busy(**more: Any) -> Engine:
        engine = Engine(options(**more))
        engine.ask(prompt(0))
        engine.forget_gpu()
        engine.submit(prompt(0), "loads")
        engine.submit(prompt(1), "stores")
        engine.step_until(lambda: engine.loads() and engine.stores())
        return engine

    return busy


@nestings
def test_failed_loads_are_received_and_failed(busy, nesting):
    engine = busy(nesting=nesting)
    connector = engine.ranks[0].connector
    engine.end_copies(fail_loads)
    results = connector.get_transfer_results(set())
    assert results.finished_recving == {"loads"}
    assert results.failed_recving == {"loads"}
    assert results.finished_sending == set()
    again = connector.get_transfer_results(set())
    assert (again.finished_recving, again.failed_recving) == (set(), set())


@nestings
def test_loads_that_worked_are_received(busy, nesting):
    engine = busy(nesting=nesting)
    connector = engine.ranks[0].connector
    assert connector.get_transfer_results(set()).finished_recving == set()
    engine.end_copies(succeed)
    results = connector.get_transfer_results(set())
    assert results.finished_recving == {"loads"}
    assert results.failed_recving == set()


def test_the_scheduler_has_no_results(busy):
    connector = busy().connector
    results = connector.get_transfer_results(set())
    assert results.finished_recving == results.failed_recving == set()
    assert connector.take_copy_stats() is None


def test_unregistering_waits_for_every_copy(busy):
    engine = busy()
    drains(engine.ranks[0].connector.unregister_kv_caches, engine.copies())
    engine.run(succeed)
    assert engine.answers["stores"].finish_reason == "length"


def test_only_workers_have_copies_to_wait_for(busy):
    connector = busy().connector
    assert Waiting(connector.unregister_kv_caches).returns()
    assert Waiting(connector.shutdown).returns()


@nestings
def test_a_shutdown_ends_the_copies(busy, nesting):
    engine = busy(nesting=nesting)
    (rank,) = engine.ranks
    (pool,) = rank.pools
    rank.connector.shutdown()
    assert pool.shutdowns == 1


@pytest.mark.parametrize("role", KVConnectorRole)
def test_without_prefix_caching_there_is_nothing_to_do(options, monkeypatch, role):
    config = vllm_config(options())
    monkeypatch.setattr(config.cache_config, "enable_prefix_caching", False)
    connector = KVConnectorFactory.create_connector(
        config, role, kv_cache_config(options())
    )
    connector.unregister_kv_caches()
    results = connector.get_transfer_results({"request"})
    assert results.finished_recving == results.failed_recving == set()
    assert connector.get_kv_connector_stats() is None
    assert connector.take_copy_stats() is None
    connector.shutdown()


# ----- sleep


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """Makes a connector the process's own."""
    return lambda connector: monkeypatch.setattr(
        kv_transfer_state, "_KV_CONNECTOR_AGENT", connector
    )


def test_a_process_without_a_connector_has_nothing_to_drain(group):
    group(None)
    drain_kv_copies()


@pytest.mark.parametrize(
    ("nesting", "children"), [(0, 1), (1, 1), (1, 2), (2, 1), (2, 2), (3, 2)]
)
def test_all_connectors_of_the_process_are_drained(busy, group, nesting, children):
    engine = busy(nesting=nesting, children=children)
    group(engine.ranks[0].connector)
    drains(drain_kv_copies, engine.copies())


def test_other_connectors_are_not_asked(group):
    group(SimpleNamespace(_connectors=[SimpleNamespace()]))
    drain_kv_copies()


class SleepingBackend:
    """Notes which copies are under way when memory goes."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.calls: list[tuple[str, object, int]] = []

    def suspend(self, level: int) -> None:
        self._note("suspend", level)

    def discard(self, tags: tuple[str, ...]) -> None:
        self._note("discard", tags)

    def _note(self, name: str, argument: object) -> None:
        under_way = sum(len(pool.under_way) for pool in self.rank.pools)
        self.calls.append((name, argument, under_way))


@pytest.fixture
def accelerator() -> Iterator[None]:
    uninstall = torch_device.install()
    yield
    uninstall()


@nestings
@pytest.mark.parametrize(
    ("method", "argument", "call"),
    [
        ("sleep", 1, "suspend"),
        ("sleep", 2, "suspend"),
        ("discard", ("kv_cache",), "discard"),
    ],
)
def test_sleep_waits_before_memory_goes(
    busy, group, accelerator, nesting, method, argument, call
):
    from vllm.v1.worker.gpu_worker import Worker

    engine = busy(nesting=nesting)
    (rank,) = engine.ranks
    group(rank.connector)
    backend = SleepingBackend(rank)
    worker = SimpleNamespace(
        sleep_mode_backend=backend,
        vllm_config=vllm_config(engine.options),
        model_runner=SimpleNamespace(model=torch.nn.Module()),
        get_draft_model=lambda: None,
        _save_sleep_parameters=lambda model: None,
    )
    drains(lambda: getattr(Worker, method)(worker, argument), engine.copies())
    assert backend.calls == [(call, argument, 0)]
