# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake on every rank, with an outcome that is the same for all.

Note [Failures are answers here]
An executor over several processes hands on the first failed answer and leaves the
other ranks' in their queues, where the next call takes them for its own. A failure of
sleep or wake is survivable, so no rank raises: each returns what went wrong, and the
exception is made here, once every rank has answered.

Note [A sleep is taken back by a wake]
A worker does more than the allocator when it sleeps: connectors let go of the KV
caches, buffers are saved. What a worker has done of it before it failed only its own
wake undoes, and that leaves alone what is awake. So after a failed sleep every rank is
woken, those that changed nothing too. Tags that were asleep before stay so. What the
ranks have to report is of different sleeps then, and they forget it.
"""

import socket
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.device_allocator import DEFERRABLE_TAGS
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

logger = init_logger(__name__)

# What CuMemBackend.suspend keeps, and what it keeps at level 1 beside that.
KEPT_TAGS = ("runtime", "cudagraph")
KEPT_TAGS_AT_LEVEL_1 = ("weights", *KEPT_TAGS)


@dataclass(frozen=True)
class RankFailure:
    """Why a rank could not do what it was asked.

    Attributes:
        rank: Which one.
        error: The exception's type and text.
        is_awake: All its memory is mapped, but for what was asleep before, with the
            contents it had.

    """

    rank: int
    error: str
    is_awake: bool

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.error}"


class ExecutorOfEngine:
    """An executor that is put to sleep, and an engine that goes on if it was not.

    Args:
        engine_core: Paused by now, for the sleep.
        was_paused: It was before, too, so that it stays so.

    """

    def __init__(self, engine_core: "EngineCore", was_paused: bool) -> None:
        self._engine_core = engine_core
        # Engines that compute together go on together, and another may be asleep.
        parallel_config = engine_core.vllm_config.parallel_config
        self._stays_paused = was_paused or parallel_config.data_parallel_size > 1

    def sleep(self, level: int) -> None:
        """Put the executor to sleep.

        Raises:
            RuntimeError: Of the executor. Where it is awake the engine schedules
                requests again, or the text says what makes it do so.

        """
        executor = self._engine_core.model_executor
        try:
            executor.sleep(level)
        except Exception as error:
            if executor.is_sleeping:
                raise
            if self._stays_paused:
                raise RuntimeError(
                    f"{error}. The engine is paused; wake_up lets it go on"
                ) from error
            self._engine_core.resume_scheduler()
            raise


def sleep_every_rank(executor: "Executor", level: int) -> None:
    """Put every rank to sleep, or leave the engine in a state it can leave.

    After a failure at level 1 every rank is awake again. At level 2 the weights
    of the ranks that did fall asleep are gone, so the engine counts as asleep.

    Raises:
        RuntimeError: A rank failed; the text says which, why, and what to do.

    """
    _check_hosts(executor, level)
    before = tuple(executor.sleeping_tags)
    answers = _ask_every_rank(executor, before, "sleep", level=level)
    failures = [answer for answer in answers if answer is not None]
    if not failures:
        return
    told = "; ".join(map(str, failures))
    is_unchanged = len(failures) == len(answers) and all(f.is_awake for f in failures)
    if is_unchanged or level == 1:
        # see Note [A sleep is taken back by a wake]
        tags = sorted(set(DEFERRABLE_TAGS).difference(before)) if before else None
        if not any(_ask_every_rank(executor, before, "wake_up", tags=tags)):
            outcome = "is as it was"
            if not is_unchanged:
                outcome = "was woken again"
                executor.collective_rpc(_forget_sleep)
            raise RuntimeError(
                f"sleep failed, and every rank {outcome}: {told}. It may be tried again"
            )
    executor.sleeping_tags.update(DEFERRABLE_TAGS)
    remedy = "wake_up" if level == 1 else "wake_up, then reload_weights"
    raise RuntimeError(
        f"sleep failed on {len(failures)} of {len(answers)} ranks, and the engine "
        f"counts as asleep: {told}. Call {remedy}, before it sleeps again"
    )


def wake_every_rank(executor: "Executor", tags: list[str] | None) -> None:
    """Wake every rank.

    A rank that fails stays asleep with its backup, the others are awake; the
    engine counts as asleep, and the same call wakes those that are left.

    Raises:
        RuntimeError: A rank failed; the text says which and why.

    """
    answers = _ask_every_rank(executor, (), "wake_up", tags=tags)
    _raise_failures("wake_up", answers, "The same call wakes the ranks that are left")


def discard_on_every_rank(executor: "Executor", tags: tuple[str, ...]) -> None:
    """Discard the memory of `tags` on every rank.

    Raises:
        RuntimeError: A rank failed; the text says which and why.

    """
    answers = _ask_every_rank(executor, (), "discard", tags=tags)
    _raise_failures(
        "discard",
        answers,
        f"{', '.join(tags)} count as asleep; wake_up gives every rank memory for them",
    )


def _check_hosts(executor: "Executor", level: int) -> None:
    """Hold the backups of all ranks of a host against what it has.

    Each rank checks its own, but all of them at the same moment.
    """
    tags = KEPT_TAGS_AT_LEVEL_1 if level == 1 else KEPT_TAGS
    ask: Callable[..., tuple[str, int]] = _host_bytes
    needed: defaultdict[str, int] = defaultdict(int)
    for host, num_bytes in executor.collective_rpc(ask, args=(tags,)):
        needed[host] += num_bytes
    check: Callable[..., str | None] = _host_shortage
    shortages = set(executor.collective_rpc(check, args=(dict(needed),))) - {None}
    if shortages:
        told = "; ".join(sorted(filter(None, shortages)))
        raise RuntimeError(f"sleep changed nothing: {told}")


def _raise_failures(
    method: str, answers: list[RankFailure | None], remedy: str
) -> None:
    failures = [answer for answer in answers if answer is not None]
    if failures:
        told = "; ".join(map(str, failures))
        raise RuntimeError(
            f"{method} failed on {len(failures)} of {len(answers)} ranks: {told}. "
            f"{remedy}"
        )


def _ask_every_rank(
    executor: "Executor", asleep: tuple[str, ...], method: str, **arguments: Any
) -> list[RankFailure | None]:
    answer: Callable[..., RankFailure | None] = _answer
    return executor.collective_rpc(answer, args=(method, arguments, asleep))


# --- What runs in the processes of the ranks ------------------------------------------


def _answer(
    worker: Any, method: str, arguments: dict[str, Any], asleep: tuple[str, ...]
) -> RankFailure | None:
    """Run a method of a worker whose memory of the tags `asleep` was asleep before."""
    try:
        getattr(worker, method)(**arguments)
    except Exception as error:
        logger.exception("%s failed on this rank.", method)
        text = f"{type(error).__name__}: {error}"
        return RankFailure(worker.rank, text, _is_awake(asleep))
    return None


def _forget_sleep(worker: Any) -> None:
    from vllm.device_allocator.cumem import CuMemAllocator

    if CuMemAllocator.instance is not None:
        CuMemAllocator.instance.forget_last_sleep()


def _is_awake(asleep: tuple[str, ...]) -> bool:
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.instance
    # A copy: another thread may allocate.
    return allocator is not None and not any(
        data.is_asleep and data.tag not in asleep
        for data in list(allocator.pointer_to_data.values())
    )


def _host_bytes(worker: Any, tags: tuple[str, ...]) -> tuple[str, int]:
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.instance
    needed = 0
    try:
        if allocator is not None:
            needed = allocator.host_bytes_needed(tags)
    except Exception:
        # As below: the rank's own check says so.
        logger.exception("What a sleep takes of the host could not be foretold.")
    return socket.gethostname(), needed


def _host_shortage(worker: Any, needed: dict[str, int]) -> str | None:
    from vllm.device_allocator.host_capacity import (
        HostMemoryError,
        check_host_capacity,
    )

    host = socket.gethostname()
    try:
        check_host_capacity(needed[host])
    except HostMemoryError as error:
        return f"on {host}, for all its ranks, {error}"
    except Exception:
        # The rank's own check says so in its answer; here nobody may raise.
        logger.exception("The host's memory could not be looked at.")
    return None
