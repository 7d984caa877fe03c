# SPDX-License-Identifier: Apache-2.0
"""Prometheus is told what sleep mode's memory is, of every rank of every engine."""

import asyncio
import functools
import gc
import json
import logging
import os
import subprocess
import sys
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, multiprocess
from prometheus_client.parser import text_string_to_metric_families
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.sleep_memory import SleepMemoryMetrics, recorded, recorded_call

from .served_engine import SLEEPING, ServedEngine, fresh_prompts
from .test_sleep import LONG, check_awake, decoding, good

RANKS = 2
SERVER: dict[str, Any] = {**SLEEPING, "ranks": RANKS}
PREFIX = "vllm:sleep_mode_"
COPIED = "copied_bytes_total"
ASLEEP = "asleep_bytes"
HOST = "host_bytes"
LABELS = ["model_name", "engine", "rank", "tag", "direction", "backup", "state"]

Values = dict[tuple[str, ...], float]
_T = TypeVar("_T")
fresh = fresh_prompts()

# ---- a served engine ----


def scraped(engine: ServedEngine, name: str) -> Values:
    """Values of a metric of sleep mode by its labels, without those of the engine."""
    values: Values = {}
    for family in text_string_to_metric_families(engine.call("/metrics")[1]):
        for sample in family.samples:
            if sample.name == PREFIX + name:
                labels = [sample.labels[key] for key in LABELS if key in sample.labels]
                assert labels[:2] == ["demo", "0"]
                values[tuple(labels[2:])] = sample.value
    return values


def moved(engine: ServedEngine, before: Values) -> Values:
    """What has been copied since."""
    now = scraped(engine, COPIED)
    return {key: now[key] - before[key] for key in now if now[key] != before[key]}


def copies(memory: list[dict[str, int]], direction: str, *tags: str) -> Values:
    """That every rank has copied all it has of the tags."""
    return {
        (str(rank), tag, direction): bytes_of[tag]
        for rank, bytes_of in enumerate(memory)
        for tag in tags
    }


def soon(check: Callable[[], _T]) -> _T:
    """What a check returns that holds a moment after a call."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return check()
        except AssertionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def check_moved(engine: ServedEngine, before: Values, expected: Values) -> None:
    """That has been copied since, or soon has, and no more."""

    def check() -> None:
        assert moved(engine, before) == expected

    soon(check)


def check_agrees(engine: ServedEngine) -> list[dict[str, Any]]:
    """What Prometheus is told is soon what the ranks report."""
    return soon(lambda: _check_agrees(engine))


def check_nothing_asleep(engine: ServedEngine) -> None:
    def check() -> None:
        assert not any(scraped(engine, ASLEEP).values())

    soon(check)


def _check_agrees(engine: ServedEngine) -> list[dict[str, Any]]:
    ranks = engine.rpc("sleep_report")
    assert [rank["rank"] for rank in ranks] == [*range(RANKS)]
    asleep, host = scraped(engine, ASLEEP), scraped(engine, HOST)
    for rank, memory in enumerate(engine.device_memory()):
        sums: Counts[str] = Counts()
        for (whose, tag, _), value in asleep.items():
            sums[tag] += int(value) if whose == str(rank) else 0
        assert +sums == memory["asleep"]
    for report in ranks:
        now, name = report["now"], str(report["rank"])
        assert sum(v for k, v in asleep.items() if k[0] == name) == sum(
            now["device"]["asleep"].values()
        )
        for state in ("backup", "spare"):
            assert host[name, state] == now["host"][f"{state}_bytes"]
    assert len(host) == 2 * RANKS
    return ranks


def test_bytes_are_told_of_each_sleep_and_wake(engine):
    start = scraped(engine, COPIED)
    ranks, tags = map(str, range(RANKS)), ("weights", "kv_cache", "cudagraph")
    directions = ("offload", "restore")
    assert {(r, t, d) for r in ranks for t in tags for d in directions} <= set(start)
    operations = {each: operation_count(engine, each) for each in ("sleep", "wake")}
    mapped = [memory["mapped"] for memory in engine.device_memory()]

    good(engine.sleep(1))
    gone = copies(mapped, "offload", "weights", "cudagraph")
    assert all(gone.values())
    check_moved(engine, start, gone)
    for rank in check_agrees(engine):
        freed = rank["last_sleep"]["freed"]
        kept = sum(each["backup_bytes"] for each in freed.values())
        assert scraped(engine, HOST)[str(rank["rank"]), "backup"] >= kept > 0
    asleep = scraped(engine, ASLEEP)
    for rank, bytes_of in enumerate(mapped):
        for tag in tags:
            kept = bytes_of[tag] if tag != "kv_cache" else 0
            assert asleep[str(rank), tag, "host"] == kept
            assert asleep[str(rank), tag, "none"] == bytes_of[tag] - kept

    good(engine.wake("weights"))
    back = copies(mapped, "restore", "weights")
    # A wake of any tag brings the graphs back.
    graphs = copies(mapped, "restore", "cudagraph")
    check_moved(engine, start, gone | back | graphs)
    check_agrees(engine)
    good(engine.wake("kv_cache"))
    check_nothing_asleep(engine)
    assert moved(engine, start) == gone | back | graphs
    check_agrees(engine)

    good(engine.sleep(1))
    good(engine.wake())
    twice = {key: 2 * value for key, value in (gone | back | graphs).items()}
    check_moved(engine, start, twice)
    check_agrees(engine)
    for operation, count in (("sleep", 2), ("wake", 3)):
        now = operation_count(engine, operation)
        assert now == operations[operation] + count


def operation_count(engine: ServedEngine, operation: str) -> float:
    """How often the engine did it, by vLLM's own metric."""
    labels = frozenset({("operation", operation)})
    name = f"{PREFIX}operation_duration_seconds_count"
    return engine.metrics().get((name, labels), 0)


def test_a_wake_waits_for_no_step_of_what_it_wakes(engine):
    """Figures come between two steps, and nobody waits for them."""
    mapped = [memory["mapped"] for memory in engine.device_memory()]
    start = scraped(engine, COPIED)
    with ThreadPoolExecutor(1) as client:
        asked = decoding(engine, client, next(fresh))
        good(engine.sleep(1, mode="keep"))
        step = 1.5
        engine.rpc("slow_steps", seconds=step)
        begun = time.monotonic()
        good(engine.wake())
        assert time.monotonic() - begun < step
        assert not asked.done()
        engine.rpc("slow_steps", seconds=0)
        assert len(asked.result(30).tokens) == LONG
    kept = ("weights", "cudagraph")
    there, back = (copies(mapped, way, *kept) for way in ("offload", "restore"))
    check_moved(engine, start, there | back)
    check_nothing_asleep(engine)


def test_what_is_discarded_is_asleep_without_a_backup(engine):
    mapped = [memory["mapped"] for memory in engine.device_memory()]
    start = scraped(engine, COPIED)
    good(engine.sleep(2))
    check_moved(engine, start, copies(mapped, "offload", "cudagraph"))
    check_agrees(engine)
    asleep = scraped(engine, ASLEEP)
    for rank, bytes_of in enumerate(mapped):
        for tag in ("weights", "kv_cache"):
            assert asleep[str(rank), tag, "host"] == 0
            assert asleep[str(rank), tag, "none"] == bytes_of[tag]
    good(engine.wake("weights"))
    engine.rpc("reload_weights")
    good(engine.wake("kv_cache"))
    check_nothing_asleep(engine)


def test_a_released_kv_cache_is_asleep_without_a_backup(engine):
    mapped = [memory["mapped"] for memory in engine.device_memory()]
    start = scraped(engine, COPIED)
    good(engine.call("/pause?mode=abort", {}))
    good(engine.call("/release_kv_cache_memory", {}))
    check_agrees(engine)
    asleep = {key: value for key, value in scraped(engine, ASLEEP).items() if value}
    assert asleep == {
        (str(rank), "kv_cache", "none"): bytes_of["kv_cache"]
        for rank, bytes_of in enumerate(mapped)
    }
    good(engine.wake())
    good(engine.call("/resume", {}))
    check_nothing_asleep(engine)
    assert moved(engine, start) == {}
    check_awake(engine)


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_wake_that_fails_is_told_and_so_is_the_next(engine, rank):
    mapped = [memory["mapped"] for memory in engine.device_memory()]
    good(engine.sleep(1))
    check_agrees(engine)
    start = scraped(engine, COPIED)
    asleep = scraped(engine, ASLEEP)
    engine.rpc("fail_call", call="hipMemCreate", error=1, rank=rank)
    assert engine.wake()[0] == 500
    check_agrees(engine)
    for key, value in scraped(engine, ASLEEP).items():
        assert value == (asleep[key] if key[0] == str(rank) else 0)
    good(engine.wake())
    kept = ("weights", "cudagraph")
    check_moved(engine, start, copies(mapped, "restore", *kept))
    check_agrees(engine)
    check_awake(engine)


def test_a_sleep_that_fails_is_told(engine):
    mapped = [memory["mapped"] for memory in engine.device_memory()]
    start = scraped(engine, COPIED)
    engine.rpc("fail_call", call="hipMemUnmap", error=1, rank=1)
    assert engine.sleep(1)[0] == 500
    kept = ("weights", "cudagraph")
    # All was copied before anything was unmapped, and rank 0 was woken again.
    there = copies(mapped, "offload", *kept)
    back = copies(mapped[:1], "restore", *kept)
    check_moved(engine, start, there | back)
    check_agrees(engine)
    assert not any(scraped(engine, ASLEEP).values())
    check_awake(engine)


# ---- without a server ----


def answer(rank: int, copied: int = 0, asleep: int = 0, host: int = 0) -> Any:
    return {
        "rank": rank,
        "copied": [{"tag": "weights", "direction": "offload", "bytes": copied}],
        "asleep": {"weights": {"host": asleep, "none": 0}},
        "host": {"backup": host, "spare": 1},
    }


class Told:
    """The metrics of engines, in a registry of their own."""

    def __init__(self, engines: int = 1, ranks: int = 1, sleeps: bool = True) -> None:
        self.registry = CollectorRegistry()
        model = SimpleNamespace(
            enable_sleep_mode=sleeps,
            enable_cumem_allocator=True,
            sleep_mode_offload_cudagraph=False,
        )
        stat_logger: Any = SimpleNamespace(
            _counter_cls=functools.partial(Counter, registry=self.registry),
            _gauge_cls=functools.partial(Gauge, registry=self.registry),
            per_engine_labelvalues={n: ["m", str(n)] for n in range(engines)},
            vllm_config=SimpleNamespace(
                model_config=model,
                parallel_config=SimpleNamespace(world_size=ranks),
            ),
        )
        self.metrics = SleepMemoryMetrics(stat_logger)
        self.model_config = model

    def __call__(self, name: str) -> Values:
        return {
            tuple(sample.labels[key] for key in LABELS[1:] if key in sample.labels): (
                sample.value
            )
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == PREFIX + name and sample.value
        }

    def count(self) -> int:
        """How many series there are, zeros too."""
        names = {PREFIX + name for name in (COPIED, ASLEEP, HOST)}
        families = self.registry.collect()
        return sum(each.name in names for family in families for each in family.samples)


class Client:
    """Engines that answer what they are told to, or fail.

    Args:
        answers: Of each engine, its ranks', or an exception.
    """

    def __init__(self, *answers: Any) -> None:
        self.answers = answers
        self.core_engines = [n.to_bytes(2, "little") for n in range(len(answers))]
        self.asked = 0
        self.slow = {n: asyncio.Event() for n in range(len(answers))}
        for each in self.slow.values():
            each.set()

    async def _call_utility_async(self, *call: Any, engine: bytes) -> Any:
        assert call == ("collective_rpc", "take_sleep_metrics", None, (), None)
        number = int.from_bytes(engine, "little")
        self.asked += 1
        await self.slow[number].wait()
        return self._answer(number)

    def collective_rpc(self, method: str) -> Any:
        assert method == "take_sleep_metrics"
        self.asked += 1
        return self._answer(0)

    async def sleep_async(self, level: int, mode: str) -> None:
        pass

    async def release_kv_cache_memory_async(self) -> None:
        pass

    async def wake_up_async(self, tags: list[str] | None) -> bool:
        return True

    def sleep(self, level: int, mode: str) -> None:
        pass

    def release_kv_cache_memory(self) -> None:
        pass

    def wake_up(self, tags: list[str] | None) -> bool:
        return True

    def _answer(self, engine: int) -> Any:
        found = self.answers[engine]
        if isinstance(found, Exception):
            raise found
        return found


def engine_of(told: Told, client: Client, stats: bool = True) -> Any:
    loggers = [SimpleNamespace(), SimpleNamespace(sleep_memory=told.metrics)]
    states: list[tuple[int, int]] = []

    async def clear() -> None:
        pass

    manager = SimpleNamespace(
        stat_loggers=loggers, record_sleep_state=lambda *state: states.append(state)
    )
    return SimpleNamespace(
        logger_manager=manager if stats else None,
        model_config=told.model_config,
        engine_core=client,
        renderer=SimpleNamespace(
            clear_mm_cache=lambda: None, clear_mm_cache_async=clear
        ),
        states=states,
    )


async def settle() -> None:
    """All that can go on has gone on."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def vllm_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """``caplog`` for vLLM's loggers, whose records may or may not reach the root."""
    logger = logging.getLogger("vllm")
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.propagate = propagates


def call_async(engine: Any, error: BaseException | None = None) -> str:
    async def call() -> str:
        if error is not None:
            raise error
        return "done"

    async def story() -> str:
        try:
            return await recorded(engine, call())
        finally:
            await settle()

    return asyncio.run(story())


def call_now(engine: Any, error: BaseException | None = None) -> str:
    def call() -> str:
        if error is not None:
            raise error
        return "done"

    return recorded_call(engine, call)


Calling = Callable[..., str]
both = pytest.mark.parametrize("call", [call_async, call_now])


def test_series_begin_at_zero_where_something_can_sleep():
    told = Told(engines=2, ranks=3)
    # Two tags, each with two directions and two kinds of backup; two states.
    assert told.count() == 2 * 3 * (2 * 2 + 2 * 2 + 2)
    assert not told(COPIED) and not told(ASLEEP) and not told(HOST)
    # Not for who has the allocator for KV transfers alone.
    assert Told(sleeps=False).count() == 0


@both
def test_a_call_is_followed_by_figures(call: Calling):
    told = Told()
    client = Client([answer(0, 5, 6, 7), None, answer(1, 8, 9, 10)])
    engine = engine_of(told, client)
    assert call(engine) == "done"
    assert call(engine) == "done"
    assert client.asked == 2
    offload = ("weights", "offload")
    assert told(COPIED) == {("0", "0", *offload): 10, ("0", "1", *offload): 16}
    asleep = ("weights", "host")
    assert told(ASLEEP) == {("0", "0", *asleep): 6, ("0", "1", *asleep): 9}
    assert told(HOST) == {
        ("0", "0", "backup"): 7,
        ("0", "0", "spare"): 1,
        ("0", "1", "backup"): 10,
        ("0", "1", "spare"): 1,
    }


@both
def test_a_call_that_fails_is_followed_by_figures_and_fails(call: Calling):
    told = Told()
    with pytest.raises(RuntimeError, match="no memory"):
        call(engine_of(told, Client([answer(0, 5)])), RuntimeError("no memory"))
    assert told(COPIED) == {("0", "0", "weights", "offload"): 5}


@both
@pytest.mark.parametrize("error", [KeyboardInterrupt(), asyncio.CancelledError()])
def test_a_call_that_is_given_up_is_followed_by_nothing(call: Calling, error):
    client = Client([answer(0, 5)])
    with pytest.raises(type(error)):
        call(engine_of(Told(), client), error)
    assert client.asked == 0


@both
@pytest.mark.parametrize(("stats", "sleeps"), [(False, True), (True, False)])
def test_nobody_is_asked_without_statistics_or_sleep(call: Calling, stats, sleeps):
    client = Client([answer(0, 5)])
    assert call(engine_of(Told(sleeps=sleeps), client, stats)) == "done"
    assert client.asked == 0


@both
@pytest.mark.parametrize("wrong", [RuntimeError("it died"), [{"rank": 0}], 7])
def test_figures_that_fail_are_logged_and_fail_no_call(call: Calling, wrong, vllm_log):
    told = Told()
    assert call(engine_of(told, Client(wrong))) == "done"
    (record,) = vllm_log.records
    assert record.levelname == "WARNING"
    assert "metrics of sleep mode's memory are not up to date" in record.message
    assert not told(COPIED)


def test_each_engine_has_its_own_figures_and_its_own_failure(vllm_log):
    told = Told(engines=3)
    client = Client([answer(0, 5)], RuntimeError("it died"), [answer(0, 7)])
    assert call_async(engine_of(told, client)) == "done"
    offload = ("0", "weights", "offload")
    assert told(COPIED) == {("0", *offload): 5, ("2", *offload): 7}
    (record,) = vllm_log.records
    assert "for engine 1: RuntimeError: it died" in record.message


@both
def test_an_engine_that_is_dead_is_told_of_by_others(call: Calling, vllm_log):
    client = Client(EngineDeadError())
    with pytest.raises(EngineDeadError):
        call(engine_of(Told(), client), EngineDeadError())
    assert client.asked == 1 and not vllm_log.records


def test_no_call_waits_for_figures_and_one_engine_not_for_another():
    told = Told(engines=2)
    client = Client([answer(0, 5)], [answer(0, 7)])
    engine = engine_of(told, client)

    async def story() -> None:
        async def call() -> str:
            return "done"

        client.slow[1].clear()
        for calls in range(1, 4):
            task = asyncio.create_task(recorded(engine, call()))
            await settle()
            assert task.done() and task.result() == "done"
            # The second engine has one question, whatever comes meanwhile.
            assert client.asked == calls + 1
            assert told(COPIED) == {("0", "0", "weights", "offload"): 5 * calls}
        client.slow[1].set()
        await settle()
        # The calls that came meanwhile have one more together.
        assert client.asked == 3 + 2
        assert told(COPIED)["1", "0", "weights", "offload"] == 2 * 7
        await recorded(engine, call())
        await settle()
        assert client.asked == 3 + 2 + 2

    asyncio.run(story())


def test_a_question_at_the_end_of_the_program_ends_quietly(vllm_log, capfd):
    told, client = Told(), Client([answer(0, 5)])

    async def story() -> None:
        client.slow[0].clear()
        await AsyncLLM.sleep(engine_of(told, client))
        await settle()

    asyncio.run(story())
    gc.collect()
    assert client.asked == 1
    assert not vllm_log.records and capfd.readouterr().err == ""


def test_an_engine_that_was_added_has_figures():
    """Elastic expert parallelism adds some, before the metrics know of them."""
    told = Told(engines=1)
    assert call_async(engine_of(told, Client([answer(0, 5)], [answer(0, 7)]))) == "done"
    offload = ("0", "weights", "offload")
    assert told(COPIED) == {("0", *offload): 5, ("1", *offload): 7}


CALLS: list[tuple[str, tuple[Any, ...], bool]] = [
    ("sleep", (0, "keep"), False),
    ("sleep", (1, "abort"), True),
    ("sleep", (2,), True),
    ("sleep", (), True),
    ("release_kv_cache_memory", (), True),
    ("wake_up", (), True),
    ("wake_up", (["scheduling"],), False),
    ("wake_up", (["scheduling", "weights"],), True),
]


@pytest.mark.parametrize("kind", [AsyncLLM, LLMEngine])
@pytest.mark.parametrize(("name", "arguments", "moves_memory"), CALLS)
def test_an_engine_asks_after_calls_that_move_memory(
    kind, name, arguments, moves_memory
):
    told, client = Told(), Client([answer(0, 5)])
    engine = engine_of(told, client)

    async def story() -> None:
        result = getattr(kind, name)(engine, *arguments)
        if kind is AsyncLLM:
            # Nothing that the engine answers later delays vLLM's own record.
            client.slow[0].clear()
            task = asyncio.create_task(result)
            await settle()
            result = task.result()
        assert engine.states
        assert result in (None, True)
        client.slow[0].set()
        await settle()

    asyncio.run(story())
    assert client.asked == moves_memory
    assert bool(told(COPIED)) == moves_memory


# What each of several API servers is told in turn, in processes of their own.
API_SERVERS = """
import json, os, sys
from types import SimpleNamespace as Some
from prometheus_client import Counter, Gauge
from vllm.v1.metrics.sleep_memory import SleepMemoryMetrics

logger = Some(
    _counter_cls=Counter, _gauge_cls=Gauge, per_engine_labelvalues={0: ["m", "0"]},
    vllm_config=Some(model_config=Some(enable_sleep_mode=False)),
)
for answers in json.loads(sys.argv[1]):
    if (server := os.fork()) == 0:
        metrics = SleepMemoryMetrics(logger)
        for answer in answers:
            metrics.record(0, [answer])
        os._exit(0)
    assert os.waitpid(server, 0)[1] == 0
"""


def test_the_sum_over_api_servers_counts_each_copy_once(tmp_path):
    # The one that is asked to sleep, and then the one that is asked to wake.
    servers = [[answer(0, 5, 50, 60), answer(0, 2, 40, 60)], [answer(0, 8)]]
    subprocess.run(
        [sys.executable, "-c", API_SERVERS, json.dumps(servers)],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        check=True,
    )
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    labels = {"model_name": "m", "engine": "0", "rank": "0"}
    weights = {**labels, "tag": "weights"}
    value = registry.get_sample_value
    assert value(PREFIX + COPIED, {**weights, "direction": "offload"}) == 15
    assert value(PREFIX + ASLEEP, {**weights, "backup": "host"}) == 0
    assert value(PREFIX + HOST, {**labels, "state": "backup"}) == 0
    assert value(PREFIX + HOST, {**labels, "state": "spare"}) == 1
