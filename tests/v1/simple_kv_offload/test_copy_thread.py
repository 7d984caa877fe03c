# SPDX-License-Identifier: Apache-2.0
"""Tickets and the thread that runs copies, on the simulator's asynchronous streams."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.simple_kv_offload import copy_thread
from vllm.v1.simple_kv_offload.copy_thread import CopyThread, CopyTicket, drain

from vllm_rocm_memory.sim import hipsim, torch_device

from .tickets import PATIENCE, let_go, logged, logged_error, until

CPU = torch.device("cpu")
SIZE = 256
ILLEGAL_ADDRESS = 700


@pytest.fixture
def profile() -> str:
    """One release: what differs between them is below the thread."""
    return "7.16"


def nothing() -> None:
    """A copy of no blocks."""


class Copies:
    """A thread, a stream, and device memory that copies fill with a value."""

    def __init__(self, device) -> None:
        self.memory = device.device_tensor(SIZE)
        self.stream = torch_device.Stream()
        self.thread = CopyThread("copies", CPU)
        self.tickets: list[CopyTicket] = []

    def fill(self, value: int) -> None:
        address, stream = self.memory.data_ptr(), self.stream.cuda_stream
        assert hipsim.load().hipMemsetAsync(address, value, SIZE, stream) == 0

    def submit(self, what: object, run: Callable[[], None] = nothing) -> CopyTicket:
        self.tickets.append(self.thread.submit(what, self.stream, run))
        return self.tickets[-1]

    def end(self, seconds: float = PATIENCE) -> bool:
        self.thread.close()
        return self.thread.join(time.monotonic() + seconds)


@pytest.fixture
def unstarted(device) -> Iterator[Copies]:
    copies = Copies(device)
    yield copies
    assert copies.end()
    for ticket in copies.tickets:
        let_go(ticket)
    vars(copies).clear()  # the stream goes with the last reference


@pytest.fixture
def copies(unstarted) -> Copies:
    unstarted.thread.start()
    return unstarted


class Gate:
    """A copy that stops the thread until ``release`` is set."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.release = threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.release.wait(PATIENCE)


@pytest.fixture
def gate(copies) -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.release.set()


# ----- tickets


def test_a_ticket_without_a_thread_ends_in_an_error():
    ticket = CopyTicket(None, "a copy")
    assert ticket.query() is True
    ticket.wait()
    with pytest.raises(RuntimeError, match="KV copy thread is not running"):
        ticket.synchronize()


@pytest.mark.parametrize("wait", [CopyTicket.wait, CopyTicket.synchronize])
def test_a_wait_notices_that_the_thread_died_meanwhile(wait):
    thread = threading.Thread(target=time.sleep, args=(0.3,), daemon=True)
    thread.start()
    ticket, start = CopyTicket(thread, "a copy"), time.monotonic()
    assert not ticket.query()
    try:
        wait(ticket)
    except RuntimeError as error:
        assert error is ticket.error
    assert time.monotonic() - start < PATIENCE
    assert "KV copy thread is not running" in str(ticket.error)


def test_a_tickets_first_end_is_its_only_one(device, vllm_log):
    failed, first = CopyTicket(threading.current_thread(), "a copy"), RuntimeError("1")
    failed.fail(first)
    failed.fail(RuntimeError("2"))
    failed.cancel()
    failed.queued(torch_device.Stream(), torch_device.Event())
    assert failed.error is first
    assert logged(vllm_log, "ERROR") == ["a copy failed: 1"]

    done = CopyTicket(threading.current_thread(), "a copy")
    done.queued(torch_device.Stream(), torch_device.Event())
    done.synchronize()
    done.fail(first)
    done.cancel()
    assert done.query() is True
    assert done.error is None
    assert logged(vllm_log, "WARNING") == []


def test_a_copy_that_cannot_be_submitted_has_a_ticket_too(vllm_log):
    error = RuntimeError("no event")
    ticket = CopyTicket.failed("The copy", error)
    assert ticket.query() is True
    ticket.wait()
    with pytest.raises(RuntimeError) as raised:
        ticket.synchronize()
    assert raised.value is ticket.error is error
    assert logged(vllm_log, "ERROR") == ["The copy failed: no event"]


def fail_late(ticket: CopyTicket, call: str) -> None:
    """Let the event of a copy on its stream report an error to whoever asks."""
    until(ticket._settled.is_set)
    hipsim.fail(call, 1, ILLEGAL_ADDRESS)
    if call == "hipEventQuery":
        until(ticket.query)
    else:
        ticket.wait()


@pytest.mark.parametrize("call", ["hipEventQuery", "hipEventSynchronize"])
def test_an_error_that_shows_up_later_is_the_tickets_too(copies, call, vllm_log):
    ticket = copies.submit("The copy")
    fail_late(ticket, call)
    words = r"^its stream reports .*hipErrorIllegalAddress \(700\)"
    with pytest.raises(RuntimeError, match=words):
        ticket.synchronize()
    assert ticket.query() is True
    assert logged(vllm_log, "ERROR") == [f"The copy failed: {ticket.error}"]
    copies.submit("The next").synchronize()


@pytest.mark.parametrize("call", ["hipEventQuery", "hipEventSynchronize"])
def test_a_ticket_that_fails_late_ends_when_its_stream_is_idle(copies, call):
    hipsim.configure(fill_latency_us=300_000)
    ticket = copies.submit("The copy", lambda: copies.fill(5))
    fail_late(ticket, call)
    assert ticket.error is not None
    assert copies.stream.query()
    assert bool((copies.memory == 5).all())


def test_a_query_never_waits(copies):
    """It is asked in the engine's step; the thread waits for the stream instead."""
    hipsim.configure(fill_latency_us=500_000)
    ticket = copies.submit("The copy", lambda: copies.fill(5))
    until(ticket._settled.is_set)
    hipsim.fail("hipEventQuery", 1, ILLEGAL_ADDRESS)
    start = time.monotonic()
    assert ticket.query() is False
    assert time.monotonic() - start < 0.3
    until(ticket.query)
    assert time.monotonic() - start >= 0.3
    assert ticket.error is not None


def test_an_error_on_the_stream_after_the_shutdown_ends_the_ticket(copies, vllm_log):
    hipsim.configure(fill_latency_us=300_000)
    ticket = copies.submit("The copy", lambda: copies.fill(5))
    until(ticket._settled.is_set)
    copies.thread.close()
    hipsim.fail("hipEventQuery", 1, ILLEGAL_ADDRESS)
    assert ticket.query() is True
    assert logged(vllm_log, "ERROR") == [f"The copy failed: {ticket.error}"]


def test_an_error_of_many_waiters_is_one(copies, vllm_log):
    hipsim.configure(fill_latency_us=100_000)
    ticket = copies.submit("The copy", lambda: copies.fill(5))
    hipsim.fail("hipEventSynchronize", 1, ILLEGAL_ADDRESS)
    hipsim.fail("hipEventSynchronize", 2, ILLEGAL_ADDRESS)
    threads = [threading.Thread(target=ticket.wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert ticket.query() is True
    assert logged(vllm_log, "ERROR") == [f"The copy failed: {ticket.error}"]


def test_tickets_may_be_asked_from_many_threads(copies):
    hipsim.configure(fill_latency_us=1000)
    tickets = [copies.submit(i, lambda: copies.fill(1)) for i in range(100)]
    ended: list[bool] = []

    def ask() -> None:
        for ticket in tickets:
            until(ticket.query)
            ticket.synchronize()
            ended.append(ticket.error is None)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert ended == [True] * 400


# ----- the thread


def test_copies_run_in_order_on_a_thread_of_their_own(copies):
    ran: list[tuple[int, str]] = []

    def note(number: int) -> None:
        ran.append((number, threading.current_thread().name))

    tickets = [copies.submit(i, lambda i=i: note(i)) for i in range(50)]
    tickets[-1].synchronize()
    assert ran == [(i, "copies") for i in range(50)]
    assert all(ticket.query() and ticket.error is None for ticket in tickets)


def test_a_copy_is_done_when_the_stream_says_so(copies):
    hipsim.configure(fill_latency_us=500_000)
    start = time.monotonic()
    ticket = copies.submit("The copy", lambda: copies.fill(7))
    assert not ticket.query()
    until(ticket.query)
    assert time.monotonic() - start >= 0.5
    assert bool((copies.memory == 7).all())


def test_a_ticket_waits_for_a_copy_that_the_thread_has_not_reached(copies, gate):
    """A flush that looked only at copies on their stream would miss this one."""
    first = copies.submit("The first", gate)
    second = copies.submit("The second", lambda: copies.fill(7))
    assert gate.entered.wait(PATIENCE)
    assert not first.query()
    assert not second.query()
    threading.Timer(0.2, gate.release.set).start()
    second.wait()
    assert bool((copies.memory == 7).all())
    assert first.query() is True


def test_a_failed_copy_fails_alone(copies, vllm_log):
    class Odd(BaseException):
        pass

    def fail() -> None:
        raise Odd("neither an Exception nor a HIP error")

    failed = copies.submit("The copy", fail)
    failed.wait()
    with pytest.raises(Odd):
        failed.synchronize()
    record = logged_error(vllm_log)
    assert record.getMessage() == f"The copy failed: {failed.error}"
    assert record.exc_info is not None and record.exc_info[1] is failed.error
    copies.submit("The next").synchronize()


@pytest.mark.parametrize("kind", [RuntimeError, OSError, IndexError, ValueError])
def test_errors_of_the_device_and_the_disk_are_one_line(copies, vllm_log, kind):
    """What a programming error needs, a traceback, would only bury these."""

    def fail() -> None:
        raise kind("why")

    copies.submit("The copy", fail).wait()
    copies.submit("The next").wait()
    record = logged_error(vllm_log)
    assert record.getMessage() == "The copy failed: why"
    assert bool(record.exc_info) == (kind is ValueError)


def test_a_failed_copy_ends_only_when_its_stream_is_idle(copies):
    hipsim.configure(fill_latency_us=300_000)

    def fail_half_way() -> None:
        copies.fill(7)
        raise RuntimeError("half way")

    ticket = copies.submit("The copy", fail_half_way)
    until(ticket.query)
    assert copies.stream.query()
    assert bool((copies.memory == 7).all())


@pytest.mark.parametrize("call", ["hipEventCreateWithFlags", "hipEventRecord"])
def test_an_end_that_cannot_be_marked_is_the_copys_error(copies, call):
    hipsim.configure(fill_latency_us=100_000)
    hipsim.fail(call, 1, ILLEGAL_ADDRESS)
    ticket = copies.submit("The copy", lambda: copies.fill(7))
    ticket.wait()
    assert f"{call} failed: hipErrorIllegalAddress (700)" in str(ticket.error)
    assert bool((copies.memory == 7).all())


def test_a_stream_that_cannot_be_waited_for_is_logged(copies, vllm_log):
    hipsim.fail("hipStreamSynchronize", 1, ILLEGAL_ADDRESS)
    drain(copies.stream)
    (line,) = logged(vllm_log, "ERROR")
    assert "may still be under way: hipStreamSynchronize failed" in line


def test_the_thread_sets_its_device(unstarted, monkeypatch):
    devices: list[tuple[torch.device, str]] = []

    def set_device(device: torch.device) -> None:
        devices.append((device, threading.current_thread().name))

    monkeypatch.setattr(
        copy_thread, "current_platform", SimpleNamespace(set_device=set_device)
    )
    unstarted.thread.start()
    assert devices == [(CPU, "copies")]


def test_a_device_that_cannot_be_set_is_an_error_of_the_start(unstarted, monkeypatch):
    def set_device(device: torch.device) -> None:
        raise RuntimeError("invalid device ordinal")

    monkeypatch.setattr(
        copy_thread, "current_platform", SimpleNamespace(set_device=set_device)
    )
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        unstarted.thread.start()
    until(lambda: not unstarted.thread._thread.is_alive())
    lost = unstarted.submit("The copy")
    assert lost.query() is True
    assert "KV copy thread is not running" in str(lost.error)


def test_a_thread_that_cannot_start_is_an_error_of_the_start(unstarted, monkeypatch):
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            unstarted.thread.start()
    lost = unstarted.submit("The copy")
    assert lost.query() is True
    assert "KV copy thread is not running" in str(lost.error)


# ----- the end


def test_closing_lets_the_thread_finish(copies):
    hipsim.configure(fill_latency_us=20_000)
    tickets = [copies.submit(i, lambda i=i: copies.fill(i)) for i in range(10)]
    assert copies.end()
    assert all(ticket.query() and ticket.error is None for ticket in tickets)
    assert bool((copies.memory == 9).all())


def test_a_thread_that_has_ended_has_nothing_on_its_stream(copies):
    """Whoever waits for the thread may free the caches at once."""
    hipsim.configure(fill_latency_us=300_000)
    copies.submit("The copy", lambda: copies.fill(3))
    assert copies.end()
    assert copies.stream.query()
    assert bool((copies.memory == 3).all())


def test_closing_twice_is_once(copies):
    copies.thread.close()
    assert copies.end()
    assert copies.thread._queue.empty()


def test_a_copy_after_the_close_fails_at_once(copies, vllm_log):
    copies.thread.close()
    late = copies.submit("The copy")
    assert late.query() is True
    with pytest.raises(RuntimeError, match="came after the shutdown"):
        late.synchronize()
    assert logged(vllm_log, "ERROR") == [f"The copy failed: {late.error}"]


def test_what_is_late_is_cancelled(copies, gate, vllm_log):
    running, queued = copies.submit("Running", gate), copies.submit("Queued")
    assert gate.entered.wait(PATIENCE)
    copies.thread.close()
    start = time.monotonic()
    assert not copies.thread.join(start + 0.2)
    assert 0.2 <= time.monotonic() - start < 2
    for ticket, what in ((running, "Running"), (queued, "Queued")):
        assert ticket.query() is True
        with pytest.raises(RuntimeError, match=f"^{what} was cancelled by a shutdown"):
            ticket.synchronize()
    warnings = logged(vllm_log, "WARNING")
    assert warnings == [
        "Running was cancelled by a shutdown.",
        "Queued was cancelled by a shutdown.",
    ]
    gate.release.set()
    assert copies.end()
    assert "was cancelled" in str(running.error)


def test_what_is_late_on_its_stream_is_cancelled_too(copies, vllm_log):
    """Most of a stream that hangs; what has ended before is not among it."""
    copies.submit("Done").synchronize()
    hipsim.configure(fill_latency_us=1_500_000)
    tickets = [copies.submit(f"Copy {i}", lambda: copies.fill(5)) for i in range(3)]
    for ticket in tickets:
        until(ticket._settled.is_set)
    assert not copies.end(seconds=0.1)
    for ticket in tickets:
        assert ticket.query() is True
        ticket.wait()
        assert "was cancelled by a shutdown" in str(ticket.error)
    assert logged(vllm_log, "WARNING") == [
        f"Copy {i} was cancelled by a shutdown." for i in range(3)
    ]


def test_what_copies_use_lives_as_long_as_the_thread(device, vllm_log):
    """A shutdown that gives up leaves a thread, or a stream, that goes on."""
    thread = CopyThread("copies", CPU, keeps=[cache := torch.zeros(8)])
    alive, ended = weakref.ref(cache), threading.Event()
    thread.start()
    entered, release = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        assert release.wait(PATIENCE)

    stream = torch_device.Stream()
    ticket = thread.submit("The copy", stream, hang)
    thread.at_end(ended.set)
    assert entered.wait(PATIENCE)
    thread.close()
    assert not thread.join(0)
    worker = thread._thread
    del cache, thread, ticket, stream
    gc.collect()
    assert alive() is not None
    assert not ended.is_set()
    release.set()
    worker.join(PATIENCE)
    assert ended.is_set()
    assert alive() is None, "without a collection"


def test_what_comes_at_the_end_comes_at_once_after_it(copies):
    assert copies.end()
    called: list[int] = []
    copies.thread.at_end(lambda: called.append(1))
    assert called == [1]


def test_a_cancelled_copy_that_fails_later_is_no_second_error(copies, vllm_log):
    entered, release = threading.Event(), threading.Event()

    def fail_late() -> None:
        entered.set()
        assert release.wait(PATIENCE)
        raise RuntimeError("late")

    ticket = copies.submit("The copy", fail_late)
    assert entered.wait(PATIENCE)
    assert not copies.end(seconds=0)
    release.set()
    assert copies.end()
    assert "was cancelled by a shutdown" in str(ticket.error)
    assert logged(vllm_log, "ERROR") == []


def test_a_deadline_that_has_passed_is_no_wait(copies, gate):
    copies.submit("Running", gate)
    assert gate.entered.wait(PATIENCE)
    start = time.monotonic()
    assert not copies.end(seconds=-1)
    assert time.monotonic() - start < 1


def test_what_the_thread_takes_while_the_queue_is_emptied_is_cancelled(copies, gate):
    running, queued = copies.submit("Running", gate), copies.submit("Queued")
    assert gate.entered.wait(PATIENCE)

    class Racing:
        """Its first reader loses what is queued to the thread."""

        def __init__(self, inner):
            self.inner = inner

        def get_nowait(self):
            if not gate.release.is_set():
                gate.release.set()
                until(queued.query)
            return self.inner.get_nowait()

        def __getattr__(self, name):
            return getattr(self.inner, name)

    copies.thread._queue = Racing(copies.thread._queue)
    copies.end(seconds=0.2)
    until(running.query)
    assert queued.query() is True
    assert "Queued was cancelled by a shutdown" in str(queued.error)


def test_the_time_for_a_shutdown_is_five_seconds():
    assert copy_thread.SHUTDOWN_SECONDS == 5.0
