# SPDX-License-Identifier: Apache-2.0
"""What goes on beside the copies of a sleep and a wake, and what interrupts them."""

import functools
import gc
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.device_allocator import copy_progress, cumem
from vllm.device_allocator.copy_progress import reported

from .simulated_gpu import CHUNK, name_of, simulator
from .world import LEVEL_1, World

LINE = re.compile(
    r"(?P<what>.+): (?P<done>.+) of (?P<total>.+) after (?P<after>[\d.]+) s "
    r"\((?P<rate>[\d.]+) GB/s\), about (?P<left>[\d.]+) s left"
)
DEADLINE = 30  # seconds
COPY_OUT = name_of("hipMemcpyAsync", "cuMemcpyDtoHAsync_v2")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The lines of progress, of which there is one every 50 ms."""
    monkeypatch.setattr(copy_progress, "INTERVAL", 0.05)
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert record.levelno == logging.INFO
            lines.append(record.getMessage())

    handler = Handler()
    monkeypatch.setattr(copy_progress.logger, "level", logging.INFO)
    copy_progress.logger.addHandler(handler)
    yield lines
    copy_progress.logger.removeHandler(handler)


# --- Beside any copy ------------------------------------------------------------------


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not what():
        assert time.monotonic() < end
        time.sleep(0.001)


def begun() -> SimpleNamespace:
    return SimpleNamespace(done=0, started=True)


def no_thread_is_left() -> bool:
    return not any(
        isinstance(thread, copy_progress._Beside) for thread in threading.enumerate()
    )


def test_a_long_copy_is_reported(lines: list[str]) -> None:
    progress = begun()
    with reported("Backing up memory", 4 << 30, progress):
        for progress.done in (0, 1 << 30, 3 << 30):
            seen = len(lines)
            wait_for(lambda seen=seen: len(lines) >= seen + 2)
    ended = len(lines)
    assert re.fullmatch(
        r"Backing up memory: nothing of 4\.0 GiB after \d\.\d s", lines[0]
    )
    assert lines[3].startswith("Backing up memory: 1.0 GiB of 4.0 GiB after")
    assert lines[5].startswith("Backing up memory: 3.0 GiB of 4.0 GiB after")
    time.sleep(0.12)
    assert len(lines) == ended


def test_rates_are_in_powers_of_ten(lines: list[str]) -> None:
    copy_progress._log("Restoring memory", 24 << 30, 6 << 30, 2.0)
    assert lines == [
        "Restoring memory: 6.0 GiB of 24.0 GiB after 2.0 s (3.2 GB/s), about 6.0 s left"
    ]


@pytest.mark.parametrize("total", [0, 1 << 30])
def test_what_is_short_or_nothing_has_no_line(total: int, lines: list[str]) -> None:
    with reported("Restoring memory", total, begun()):
        time.sleep(0.2 if total == 0 else 0)
    assert lines == []
    assert no_thread_is_left()


@pytest.mark.parametrize("total", [0, 1])
def test_what_goes_on_beside_is_waited_for(total: int, lines: list[str]) -> None:
    ran = []

    def beside() -> None:
        time.sleep(0.02)
        ran.append(threading.get_ident())

    with reported("Backing up memory", total, begun(), beside):
        pass
    assert len(ran) == 1 and ran[0] != threading.get_ident()
    with (
        pytest.raises(ValueError, match="refused"),
        reported("Backing up memory", total, begun(), beside),
    ):
        raise ValueError("refused")
    assert len(ran) == 2


def test_the_copy_does_not_wait_for_who_keeps_pythons_lock() -> None:
    """As the collection of garbage does."""
    progress = SimpleNamespace(done=0, started=False)
    began = []
    with reported("Backing up memory", 0, progress, lambda: began.append("beside")):
        time.sleep(0.05)
        began.append("copy")
        progress.started = True
    assert began == ["copy", "beside"]


def test_a_copy_that_never_starts() -> None:
    ran = []
    progress = SimpleNamespace(done=0, started=False)
    with (
        pytest.raises(TypeError),
        reported("Backing up memory", 1, progress, lambda: ran.append(1)),
    ):
        raise TypeError
    assert ran == [1]


def test_a_machine_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ran = []
    with reported("Backing up memory", 1, begun(), lambda: ran.append(1)):
        assert ran == [1]
    assert ran == [1]


# --- Beside those of an allocator -----------------------------------------------------

CHUNKS = 8


@pytest.fixture
def slow(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world with one allocation, each of whose copies takes 20 ms."""
    for call in ("back_up", "restore"):
        copy = functools.partial(getattr(world.module, call), window=CHUNK)
        monkeypatch.setattr(world.module, call, copy)
    world.allocate("weights", CHUNKS * CHUNK)
    simulator.configure(copy_latency_us=20_000)
    return world


def test_slow_sleeps_and_wakes_report_what_is_done(
    slow: World, lines: list[str]
) -> None:
    slow.sleep(LEVEL_1)
    slow.check(slow.after_sleep(LEVEL_1))
    slept = len(lines)
    slow.wake()
    slow.check(slow.after_wake())
    for what, some in (("Backing up", lines[:slept]), ("Restoring", lines[slept:])):
        found = [match for line in some if (match := LINE.fullmatch(line))]
        assert found
        done = [float(match["done"].removesuffix(" MiB")) for match in found]
        assert done == sorted(done) and 0 < done[0] <= done[-1] < CHUNKS * CHUNK >> 20
        assert {match["total"] for match in found} == {f"{CHUNKS * CHUNK >> 20}.0 MiB"}
        assert {match["what"] for match in found} == {f"{what} memory"}


def test_the_copy_goes_on_while_garbage_is_collected(
    slow: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, copies = simulator.stats().calls[COPY_OUT], []

    def collect() -> None:
        wait_for(lambda: simulator.stats().calls[COPY_OUT] >= before + CHUNKS)
        copies.append(simulator.stats().calls[COPY_OUT])

    with monkeypatch.context() as patch:
        patch.setattr(gc, "collect", collect)
        slow.sleep(LEVEL_1)
    assert copies == [before + CHUNKS]


def test_garbage_is_collected_beside_the_copy(
    slow: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only garbage refers to goes with that sleep."""
    ptr = slow.allocate("kv_cache", CHUNK)
    copy, copied, freed = slow.module.back_up, [], []

    def back_up(*args: object, **options: object) -> None:
        copy(*args, **options)
        copied.append(args)

    class Tensor:
        def __del__(self) -> None:
            slow.free(ptr)
            freed.append((len(copied), threading.get_ident()))
            assert slow.module.is_mapped(ptr)

    cycle: list[object] = [Tensor()]
    cycle.append(cycle)
    del cycle
    monkeypatch.setattr(slow.module, "back_up", back_up)
    slow.sleep(LEVEL_1)
    ((copied_then, thread),) = freed
    assert copied_then == 0 and thread != threading.get_ident()
    assert len(copied) == 1
    assert ptr not in slow.module.ranges()


@pytest.mark.parametrize(
    "tags", [(), ("kv_cache",)], ids=["no backup", "none so tagged"]
)
def test_garbage_is_collected_where_nothing_is_copied(
    world: World, tags: tuple[str, ...]
) -> None:
    world.allocate("weights", CHUNK)
    collected = gc.get_stats()[2]["collections"]
    world.sleep(tags)
    assert gc.get_stats()[2]["collections"] == collected + 1
    world.wake()
    assert gc.get_stats()[2]["collections"] == collected + 1


# --- Finalizers -----------------------------------------------------------------------


def within(work: Callable[[], object]) -> None:
    """In another thread, which does not wait for ever."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(DEADLINE)
    assert not thread.is_alive(), "waits for itself"


class Finalizer:
    """Garbage that calls the allocator, and what comes of that."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.outcomes: list[object] = []
        outcomes = self.outcomes

        class Garbage:
            def __del__(self) -> None:
                try:
                    outcomes.append(work())
                except Exception as error:
                    outcomes.append(error)

        cycle: list[object] = [Garbage()]
        cycle.append(cycle)


CALLS: dict[str, Callable[[World], object]] = {
    "sleep": lambda world: world.cumem.sleep(LEVEL_1),
    "wake_up": lambda world: world.cumem.wake_up(),
    "discard": lambda world: world.cumem.discard("kv_cache"),
    "trim": lambda world: world.cumem.trim_host_memory(),
    "pool": lambda world: world.trim(*world.sizes),
    "close": lambda world: world.cumem.close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_finalizer_beside_the_copy_does_not_wait_for_it(
    world: World, call: str
) -> None:
    world.allocate("weights", CHUNK)
    gc.disable()
    try:
        garbage = Finalizer(lambda: CALLS[call](world))
        within(lambda: world.sleep(LEVEL_1))
    finally:
        gc.enable()
    (error,) = garbage.outcomes
    assert isinstance(error, RuntimeError) and "finalizer" in str(error)
    world.check(world.after_sleep(LEVEL_1))
    assert world.cumem.trim_host_memory() == 0
    world.wake()
    world.check(world.after_wake())


@pytest.mark.parametrize("frees", [False, True])
def test_a_finalizer_in_the_thread_that_has_the_lock(
    world: World, monkeypatch: pytest.MonkeyPatch, frees: bool
) -> None:
    """Python may collect anywhere; here it does as a device is waited for."""
    ptr = world.allocate("weights", CHUNK)
    outcomes: list[object] = []
    synchronize = torch.accelerator.synchronize

    def collect(device: int) -> None:
        garbage = Finalizer(world.cumem.trim_host_memory)
        gc.collect()
        outcomes.extend(garbage.outcomes)
        synchronize(device)

    with monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "synchronize", collect)
        if frees:
            del world.expected[ptr]
            within(lambda: world.free(ptr))
        else:
            within(lambda: world.trim(ptr))
            world.expected.clear()
    (error,) = outcomes
    assert isinstance(error, RuntimeError) and "finalizer" in str(error)
    assert world.cumem.trim_host_memory() == 0


def test_a_finalizer_where_nothing_is_copied_has_its_way(world: World) -> None:
    world.allocate("weights", CHUNK)
    world.sleep(LEVEL_1)
    world.check(world.after_sleep(LEVEL_1))
    world.wake()
    world.check(world.after_wake())
    gc.disable()
    try:
        garbage = Finalizer(world.cumem.trim_host_memory)
        within(lambda: world.sleep(()))
    finally:
        gc.enable()
    assert garbage.outcomes == [CHUNK]


def test_a_finalizer_has_the_callers_device(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = threading.local()
    accelerator = torch.accelerator
    monkeypatch.setattr(accelerator, "is_available", lambda: True)
    monkeypatch.setattr(
        accelerator, "current_device_index", lambda: getattr(current, "device", 0)
    )
    monkeypatch.setattr(
        accelerator,
        "set_device_index",
        lambda device: setattr(current, "device", device),
    )
    accelerator.set_device_index(3)
    world.allocate("weights", CHUNK)
    gc.disable()
    try:
        garbage = Finalizer(accelerator.current_device_index)
        world.sleep(LEVEL_1)
    finally:
        gc.enable()
    assert garbage.outcomes == [3]


# --- Interrupts -----------------------------------------------------------------------


@contextmanager
def interrupted(call: str) -> Iterator[None]:
    """Ctrl-C is pressed as soon as a driver function has been called."""
    before = simulator.stats().calls[call]
    pressed = threading.Event()

    def press() -> None:
        wait_for(lambda: simulator.stats().calls[call] > before)
        os.kill(os.getpid(), signal.SIGINT)
        pressed.set()

    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        yield
        assert pressed.wait(DEADLINE)
        time.sleep(1)  # for the signal, if it is late
    assert no_thread_is_left()


def copied() -> int:
    """Copies that have been done."""
    counts = simulator.stats().copies
    return sum(count.copies for count in counts.values())


def test_an_interrupted_sleep_waits_for_its_copies(slow: World) -> None:
    before = copied()
    with interrupted(COPY_OUT):
        slow.sleep(LEVEL_1)
    done = copied()
    assert done - before == CHUNKS
    slow.check(slow.expected)
    slow.write(next(iter(slow.expected)))
    slow.sleep(LEVEL_1)
    slow.check(slow.after_sleep(LEVEL_1))


def test_an_interrupted_wake_sleeps_on(slow: World) -> None:
    slow.sleep(LEVEL_1)
    slow.check(slow.after_sleep(LEVEL_1))
    with interrupted(name_of("hipMemcpyAsync", "cuMemcpyHtoDAsync_v2")):
        slow.wake()
    assert simulator.stats().mapped_bytes == 0
    slow.check(slow.expected)
    slow.wake()
    slow.check(slow.after_wake())


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_as_it_is_noted_what_sleeps(
    world: World, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    world.allocate("weights", CHUNK)
    world.allocate("kv_cache", CHUNK)
    note, pressed = cumem._note_asleep, []

    def interrupted_note(*args: Any) -> int:
        if pressed:
            return note(*args)
        pressed.append(args)
        if when == "after":
            note(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(cumem, "_note_asleep", interrupted_note)
        world.sleep(LEVEL_1)
    world.check(world.after_sleep(LEVEL_1))
    world.wake()
    world.check(world.after_wake())


@pytest.mark.parametrize("done", [False, True])
def test_a_sleep_that_is_interrupted_as_it_unmaps(
    world: World, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    """The interrupt comes when Python has its say again, after all is unmapped."""
    world.allocate("weights", CHUNK)
    world.allocate("kv_cache", CHUNK)
    suspend = world.module.suspend

    def interrupted_suspend(ptrs: list[int]) -> None:
        if done:
            suspend(ptrs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(world.module, "suspend", interrupted_suspend)
        world.sleep(LEVEL_1)
    world.check(world.after_sleep(LEVEL_1) if done else world.expected)
    world.wake()
    world.check(world.after_wake())
