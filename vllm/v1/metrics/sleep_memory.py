# SPDX-License-Identifier: Apache-2.0
"""Metrics of the memory that sleep mode moves and keeps.

Note [From a worker to Prometheus]
The figures are the workers', and Prometheus asks the API server. Scheduler statistics
travel with the outputs of a step, and a sleeping engine makes none, so the API server
asks instead: after each sleep, wake and release of the KV cache that moves memory,
every rank of every engine, by the same queue that the call itself took. An engine that
serves again answers between two steps of its model. No asynchronous call waits for
that: its figures are there a moment after it. One question at a time is under way to an
engine; the calls that end before its answer have one more together.

A rank tells what it has copied since it was last asked. So each copy is counted once,
by whichever of several API servers asks next, and the sum over their processes, which
is what Prometheus sees, is right. Gauges are those of the server that asked last.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.metrics.loggers import PrometheusStatLogger

logger = init_logger(__name__)

DIRECTIONS = ("offload", "restore")
BACKUPS = ("host", "none")
STATES = ("backup", "spare")

_METHOD = "take_sleep_metrics"

_T = TypeVar("_T")


class SleepMemoryMetrics:
    """The metrics of one PrometheusStatLogger.

    Args:
        stat_logger: Gives the classes of metrics, of which Ray has its own, the
            engines, and their first two labels.

    """

    def __init__(self, stat_logger: "PrometheusStatLogger") -> None:
        self._engines = list(stat_logger.per_engine_labelvalues)
        self._model_name = stat_logger.per_engine_labelvalues[self._engines[0]][0]
        labels = ["model_name", "engine", "rank"]
        self._copied = stat_logger._counter_cls(
            name="vllm:sleep_mode_copied_bytes",
            documentation=(
                "Bytes that sleep mode has copied, by tag: direction = offload is "
                "from the device to the host, by a sleep; direction = restore is "
                "back, by a wake."
            ),
            labelnames=[*labels, "tag", "direction"],
        )
        self._asleep = stat_logger._gauge_cls(
            name="vllm:sleep_mode_asleep_bytes",
            documentation=(
                "Bytes of device memory that are asleep, by tag, as of the last "
                "sleep or wake; backup = host is restored by a wake; backup = none "
                "has lost what was in it."
            ),
            labelnames=[*labels, "tag", "backup"],
            multiprocess_mode="mostrecent",
        )
        self._host = stat_logger._gauge_cls(
            name="vllm:sleep_mode_host_bytes",
            documentation=(
                "Bytes of host memory that sleep mode holds, as of the last sleep or "
                "wake; state = backup has a copy of device memory; state = spare is "
                "kept for the next sleep."
            ),
            labelnames=[*labels, "state"],
            multiprocess_mode="mostrecent",
        )
        config = stat_logger.vllm_config
        if config.model_config.enable_sleep_mode:
            self._begin_at_zero(config)

    def record(self, engine: int, ranks: Iterable[dict[str, Any] | None]) -> None:
        """Add what the ranks of an engine have answered.

        Args:
            engine: Its index, which may be of one that was added since.
            ranks: Answers of ``take_sleep_metrics``; None where a rank has no cuMem
                allocator.

        """
        for answer in ranks:
            if answer is None:
                continue
            labels = [self._model_name, str(engine), str(answer["rank"])]
            for copied in answer["copied"]:
                counter = self._copied.labels(
                    *labels, copied["tag"], copied["direction"]
                )
                counter.inc(copied["bytes"])
            for tag, by_backup in answer["asleep"].items():
                for backup in BACKUPS:
                    self._asleep.labels(*labels, tag, backup).set(by_backup[backup])
            for state in STATES:
                self._host.labels(*labels, state).set(answer["host"][state])

    def _begin_at_zero(self, config: "VllmConfig") -> None:
        # A counter that begins with its first sleep shows no increase by it. Ray's
        # counters drop an increase by nothing, and begin there all the same.
        from vllm.config.cumem_graph_pool import cumem_graph_pool

        tags = ["weights", "kv_cache"]
        if cumem_graph_pool(config).active:
            tags.append("cudagraph")
        ranks = range(config.parallel_config.world_size)
        nothing = [
            {
                "rank": rank,
                "copied": [
                    {"tag": tag, "direction": direction, "bytes": 0}
                    for tag in tags
                    for direction in DIRECTIONS
                ],
                "asleep": {tag: dict.fromkeys(BACKUPS, 0) for tag in tags},
                "host": dict.fromkeys(STATES, 0),
            }
            for rank in ranks
        ]
        for engine in self._engines:
            self.record(engine, nothing)


@dataclass(frozen=True)
class _Questions:
    """Those of one client to its engines, which are named as in ``core_engines``.

    Attributes:
        wanted: Engines that are to be asked, or to be asked again.
        under_way: Who asks; asyncio itself keeps no task alive.

    """

    wanted: set[bytes] = field(default_factory=set)
    under_way: dict[bytes, asyncio.Task[None]] = field(default_factory=dict)


_questions: "WeakKeyDictionary[AsyncMPClient, _Questions]" = WeakKeyDictionary()


async def recorded(
    engine: "AsyncLLM", call: Awaitable[_T], moves_memory: bool = True
) -> _T:
    """Await a call that changes what is asleep; what is then, is recorded soon after.

    Also where the call fails: some of it may have been done. Of a call that is
    cancelled, the next one's figures tell.

    Args:
        engine: Whose call it is.
        call: Its result is returned, and what it raises is raised, as if it were
            awaited directly.
        moves_memory: Whether it does more than to pause or to resume.

    """
    try:
        result = await call
    except Exception:
        _ask(engine, moves_memory)
        raise
    _ask(engine, moves_memory)
    return result


def recorded_call(
    engine: "LLMEngine", call: Callable[[], _T], moves_memory: bool = True
) -> _T:
    """The same for the engine that is not asynchronous.

    Who calls it has nowhere to wait but here, so figures are there when it returns.
    Where requests were kept for a wake, it returns after the step that these begin.
    """
    try:
        result = call()
    except Exception:
        _record_now(engine, moves_memory)
        raise
    _record_now(engine, moves_memory)
    return result


def _ask(engine: "AsyncLLM", moves_memory: bool) -> None:
    if not moves_memory or not _metrics(engine):
        return
    client = engine.engine_core
    questions = _questions.setdefault(client, _Questions())
    for identity in client.core_engines:
        questions.wanted.add(identity)
        if identity not in questions.under_way:
            asking = _record(engine, identity, questions)
            questions.under_way[identity] = asyncio.create_task(asking)


async def _record(engine: "AsyncLLM", identity: bytes, questions: _Questions) -> None:
    # Engines one by one, unlike call_utility_all_async: one that fails or hangs must
    # not lose what the others have told, nor a limit of time what it tells later.
    number = int.from_bytes(identity, "little")
    try:
        while identity in questions.wanted:
            questions.wanted.remove(identity)
            try:
                answer = await engine.engine_core._call_utility_async(
                    "collective_rpc", _METHOD, None, (), None, engine=identity
                )
            except Exception as error:
                _warn(error, number)
            else:
                _add(_metrics(engine), number, answer)
    finally:
        del questions.under_way[identity]


def _record_now(engine: "LLMEngine", moves_memory: bool) -> None:
    if not moves_memory or not (metrics := _metrics(engine)):
        return
    try:
        answer: list[Any] = engine.engine_core.collective_rpc(_METHOD)
    except Exception as error:
        _warn(error)
    else:
        # Of offline engines, each has a process, and in it the first label.
        _add(metrics, 0, answer)


def _metrics(engine: "AsyncLLM | LLMEngine") -> list[SleepMemoryMetrics]:
    """Where to record; nowhere without statistics or sleep mode."""
    manager = engine.logger_manager
    if manager is None or not engine.model_config.enable_sleep_mode:
        return []
    found = [getattr(each, "sleep_memory", None) for each in manager.stat_loggers]
    return [each for each in found if isinstance(each, SleepMemoryMetrics)]


def _add(metrics: list[SleepMemoryMetrics], engine: int, answer: Any) -> None:
    try:
        for each in metrics:
            each.record(engine, answer)
    except Exception as error:
        _warn(error, engine)


def _warn(error: Exception, engine: int | None = None) -> None:
    # Its package takes longer to load than all else here.
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(error, EngineDeadError):
        # Said already, and there is nothing left to count.
        return
    logger.warning(
        "The metrics of sleep mode's memory are not up to date%s: %s: %s",
        "" if engine is None else f" for engine {engine}",
        type(error).__name__,
        error,
    )
