# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake where one rank fails: one outcome, and no answer left behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.device_allocator.host_capacity import HostLimit
from vllm.device_allocator.sleep_mode_backend import CuMemBackend
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import sleep_ranks
from vllm.v1.executor.abstract import Executor

TAGS = frozenset({"weights", "kv_cache"})


class Rank:
    """A worker with an allocator of one allocation a tag, and faults to come.

    Attributes:
        has_report: Of a sleep of its allocator's.
        lets_go: What a worker does of a sleep beside its allocator, and undoes when it
            wakes: its connector has let go of the KV caches.
        needs: Bytes of host memory for a backup of each tag.
    """

    def __init__(self, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank = rank
        self.asleep: set[str] = set()
        self.has_report = False
        self.lets_go = False
        self.needs = {"weights": 4, "runtime": 2, "cudagraph": 1, "kv_cache": 100}
        self.calls: list[str] = []
        self.faults: dict[str, list[str]] = {}
        self._monkeypatch = monkeypatch

    def fail(self, method: str, *, after: bool = False) -> None:
        """Makes the next call of `method` fail, before or after it has acted."""
        self.faults.setdefault(method, []).append("after" if after else "before")

    def show_allocator(self) -> None:
        """The allocator is one a process, and here one process has every rank."""
        data = {
            n: SimpleNamespace(tag=tag, is_asleep=tag in self.asleep)
            for n, tag in enumerate(TAGS)
        }
        allocator = SimpleNamespace(
            pointer_to_data=data,
            host_bytes_needed=lambda tags: sum(self.needs[tag] for tag in tags),
            forget_last_sleep=partial(setattr, self, "has_report", False),
        )
        self._monkeypatch.setattr(CuMemAllocator, "instance", allocator)

    def _run(self, method: str, act: Callable[[], None]) -> None:
        self.calls.append(method)
        fault = self.faults.get(method) and self.faults[method].pop(0)
        if fault != "before":
            act()
        self.show_allocator()
        if fault:
            raise ValueError(f"{method} fault")

    def sleep(self, level: int) -> None:
        self.lets_go = True
        self._run("sleep", self._fall_asleep)

    def _fall_asleep(self) -> None:
        self.asleep.update(TAGS)
        self.has_report = True

    def wake_up(self, tags: list[str] | None) -> None:
        self._run("wake_up", lambda: self.asleep.difference_update(tags or TAGS))
        if tags is None or "kv_cache" in tags:
            self.lets_go = False

    def discard(self, tags: tuple[str, ...]) -> None:
        self._run("discard", lambda: self.asleep.update(tags))


class Ranks(Executor):
    """Workers whose answers come one by one, as over message queues."""

    def __init__(self, workers: list[Rank]) -> None:
        self.workers = workers
        self.sleeping_tags = set()

    def _init_executor(self) -> None: ...

    def check_health(self) -> None: ...

    def collective_rpc(  # type: ignore[override]
        self,
        method: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        answers = []
        for worker in self.workers:
            worker.show_allocator()
            answers.append(method(worker, *args, **(kwargs or {})))
        return answers


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks([Rank(rank, monkeypatch) for rank in range(3)])


def _reports(ranks: Ranks) -> list[bool]:
    return [worker.has_report for worker in ranks.workers]


def _asleep(ranks: Ranks) -> list[set[str]]:
    return [worker.asleep for worker in ranks.workers]


def test_every_rank_sleeps_and_wakes(ranks: Ranks) -> None:
    ranks.sleep(level=1)
    assert ranks.is_sleeping and _asleep(ranks) == [TAGS] * 3
    ranks.wake_up(["weights"])
    assert _asleep(ranks) == [{"kv_cache"}] * 3
    ranks.wake_up(["kv_cache"])
    assert all(_reports(ranks))
    assert not ranks.is_sleeping and _asleep(ranks) == [set()] * 3


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("after", [True, False])
def test_a_failed_sleep_at_level_1_leaves_every_rank_awake(
    ranks: Ranks, failing: int, after: bool
) -> None:
    ranks.workers[failing].fail("sleep", after=after)
    with pytest.raises(RuntimeError, match="woken again") as raised:
        ranks.sleep(level=1)
    assert f"rank {failing}: ValueError: sleep fault" in str(raised.value)
    assert all(worker.calls == ["sleep", "wake_up"] for worker in ranks.workers)
    assert not ranks.is_sleeping and _asleep(ranks) == [set()] * 3
    assert not any(_reports(ranks)), "of a sleep that was taken back"
    ranks.sleep(level=1)
    assert ranks.is_sleeping and _asleep(ranks) == [TAGS] * 3
    assert all(_reports(ranks))


@pytest.mark.parametrize("level", [1, 2])
def test_ranks_that_all_refuse_are_as_they_were(ranks: Ranks, level: int) -> None:
    ranks.sleep(level=1)
    ranks.wake_up()
    for worker in ranks.workers:
        worker.fail("sleep")
    with pytest.raises(RuntimeError, match="every rank is as it was"):
        ranks.sleep(level=level)
    assert not ranks.is_sleeping and _asleep(ranks) == [set()] * 3
    assert not any(worker.lets_go for worker in ranks.workers)
    assert all(_reports(ranks)), "of the sleep before, which was not taken back"


@pytest.mark.parametrize("after", [True, False])
def test_what_slept_before_a_failed_sleep_sleeps_on(ranks: Ranks, after: bool) -> None:
    ranks.sleep(level=1)
    ranks.wake_up(["weights"])
    ranks.workers[1].fail("sleep", after=after)
    with pytest.raises(RuntimeError, match="woken again"):
        ranks.sleep(level=1)
    assert ranks.sleeping_tags == {"kv_cache"}
    assert _asleep(ranks) == [{"kv_cache"}] * 3
    for worker in ranks.workers:
        worker.fail("sleep")
    with pytest.raises(RuntimeError, match="every rank is as it was"):
        ranks.sleep(level=2)
    assert ranks.sleeping_tags == {"kv_cache"}
    ranks.wake_up(["kv_cache"])
    assert not ranks.is_sleeping and _asleep(ranks) == [set()] * 3


@pytest.mark.parametrize(
    ("level", "limit", "fits"), [(1, 21, True), (1, 20, False), (2, 9, True)]
)
def test_the_ranks_of_a_host_share_what_it_has(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, level: int, limit: int, fits: bool
) -> None:
    there = HostLimit(limit, "MemAvailable", "Use another machine")
    monkeypatch.setattr(
        "vllm.device_allocator.host_capacity.host_capacity", lambda: there
    )
    if fits:
        ranks.sleep(level)
        assert ranks.is_sleeping
        return
    with pytest.raises(RuntimeError, match="sleep changed nothing") as raised:
        ranks.sleep(level)
    assert "21 bytes" in str(raised.value) and "Use another machine" in str(
        raised.value
    )
    assert not any(worker.calls for worker in ranks.workers)


def test_the_ranks_of_other_hosts_do_not_count(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = HostLimit(7, "MemAvailable", "Use another machine")
    monkeypatch.setattr(
        "vllm.device_allocator.host_capacity.host_capacity", lambda: there
    )
    names = itertools.cycle(["one", "two", "three"])
    monkeypatch.setattr(sleep_ranks.socket, "gethostname", lambda: next(names))
    ranks.sleep(level=1)
    assert ranks.is_sleeping


def test_a_rank_that_cannot_foretell_its_bytes_answers_all_the_same(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the answers of the others would be taken for those of the next call."""

    def unknown(tags: tuple[str, ...]) -> int:
        raise ValueError("not within a host arena")

    def show_allocator() -> None:
        allocator = SimpleNamespace(host_bytes_needed=unknown)
        monkeypatch.setattr(CuMemAllocator, "instance", allocator)

    told: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(ranks.workers[1], "show_allocator", show_allocator)
        patch.setattr(sleep_ranks.logger, "exception", told.append)
        there = HostLimit(13, "MemAvailable", "Use another machine")
        patch.setattr(
            "vllm.device_allocator.host_capacity.host_capacity", lambda: there
        )
        with pytest.raises(RuntimeError, match="takes 14 more bytes"):
            ranks.sleep(level=1)
    assert len(told) == 1


@pytest.mark.parametrize("level", [1, 2])
def test_the_tags_are_those_that_vllm_keeps(
    level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[str, ...]] = []
    allocator = SimpleNamespace(sleep=lambda offload_tags: kept.append(offload_tags))
    monkeypatch.setattr(
        "vllm.device_allocator.get_mem_allocator_instance", lambda: allocator
    )
    CuMemBackend().suspend(level)
    expected = {1: sleep_ranks.KEPT_TAGS_AT_LEVEL_1, 2: sleep_ranks.KEPT_TAGS}
    assert kept == [expected[level]]


def test_a_failed_sleep_at_level_2_counts_as_asleep(ranks: Ranks) -> None:
    ranks.workers[1].fail("sleep")
    with pytest.raises(RuntimeError, match="reload_weights"):
        ranks.sleep(level=2)
    assert ranks.is_sleeping
    ranks.wake_up()
    assert not ranks.is_sleeping and _asleep(ranks) == [set()] * 3


def test_a_failed_sleep_whose_wake_fails_too_counts_as_asleep(ranks: Ranks) -> None:
    ranks.workers[2].fail("sleep", after=True)
    ranks.workers[0].fail("wake_up")
    with pytest.raises(RuntimeError, match=r"on 1 of 3 ranks.*counts as asleep"):
        ranks.sleep(level=1)
    assert ranks.is_sleeping
    ranks.wake_up()
    assert not ranks.is_sleeping and _asleep(ranks) == [set()] * 3


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("tags", [None, ["weights"]])
def test_a_failed_wake_can_be_repeated(
    ranks: Ranks, failing: int, tags: list[str] | None
) -> None:
    ranks.sleep(level=1)
    ranks.workers[failing].fail("wake_up")
    with pytest.raises(RuntimeError, match=f"wake_up failed .* rank {failing}: "):
        ranks.wake_up(tags)
    assert ranks.sleeping_tags == TAGS
    ranks.wake_up(tags)
    left = TAGS - set(tags or TAGS)
    assert ranks.sleeping_tags == left and _asleep(ranks) == [left] * 3


def test_a_failed_discard_names_its_rank(ranks: Ranks) -> None:
    ranks.workers[0].fail("discard")
    with pytest.raises(RuntimeError, match="discard failed on 1 of 3 ranks: rank 0"):
        ranks.discard(("kv_cache",))
    assert ranks.sleeping_tags == {"kv_cache"}
    assert [worker.calls for worker in ranks.workers] == [["discard"]] * 3


class Engine(EngineCore):
    """An engine's pause and sleep over `Ranks`, and nothing else of it."""

    def __init__(self, executor: Ranks, data_parallel_size: int = 1) -> None:
        self.model_executor = executor
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=data_parallel_size)
        )
        self.scheduler = SimpleNamespace(pause_state=PauseState.UNPAUSED)
        self.scheduler.set_pause_state = partial(setattr, self.scheduler, "pause_state")
        self.pending: Future[None] | None = None

    def pause_scheduler(
        self, mode: str = "abort", clear_cache: bool = True
    ) -> Future[None] | None:
        self.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        return self.pending


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "at once"])
@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_goes_on_after_a_sleep_that_changed_nothing(
    ranks: Ranks, level: int, waits: bool
) -> None:
    engine = Engine(ranks)
    for worker in ranks.workers:
        worker.fail("sleep")
    engine.pending = Future() if waits else None
    with pytest.raises(RuntimeError, match="every rank is as it was"):
        answer = engine.sleep(level)
        assert engine.is_sleeping() and engine.pending is not None
        engine.pending.set_result(None)
        answer.result(timeout=0)
    assert not engine.is_sleeping()
    engine.pending = None
    engine.sleep(level)
    assert engine.is_sleeping()
    engine.wake_up()
    assert not engine.is_sleeping()


def test_an_engine_goes_on_after_a_sleep_that_was_taken_back(ranks: Ranks) -> None:
    engine = Engine(ranks)
    ranks.workers[1].fail("sleep")
    with pytest.raises(RuntimeError, match="woken again"):
        engine.sleep(1)
    assert not engine.is_sleeping() and _asleep(ranks) == [set()] * 3


def test_an_engine_that_lost_memory_waits_to_be_woken(ranks: Ranks) -> None:
    engine = Engine(ranks)
    ranks.workers[1].fail("sleep")
    with pytest.raises(RuntimeError, match="reload_weights"):
        engine.sleep(2)
    assert engine.is_sleeping() and engine.is_scheduler_paused()
    engine.wake_up()
    assert not engine.is_sleeping()


def test_an_engine_that_was_paused_before_stays_so(ranks: Ranks) -> None:
    engine = Engine(ranks)
    engine.pause_scheduler()
    ranks.workers[0].fail("sleep")
    with pytest.raises(RuntimeError, match="woken again"):
        engine.sleep(1)
    assert engine.is_scheduler_paused() and not ranks.is_sleeping


def test_one_of_several_engines_waits_for_the_others(ranks: Ranks) -> None:
    engine = Engine(ranks, data_parallel_size=2)
    ranks.workers[0].fail("sleep")
    with pytest.raises(RuntimeError, match=r"woken again.*wake_up lets it go on"):
        engine.sleep(1)
    assert engine.is_scheduler_paused()
