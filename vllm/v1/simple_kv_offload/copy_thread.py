# SPDX-License-Identifier: Apache-2.0
"""Copies of KV blocks on a thread of their own, and how each of them ended.

Note [Copy tickets]
The worker wants to know of each copy whether it has ended. An event cannot tell
it: an event exists only once the thread has queued the copy on its stream, so a
flush would miss copies that still wait for the thread, and a copy that failed
would have no event at all and its request would wait for ever. The worker gets
a ticket instead, at once. Every ticket ends: its copy is done, or failed, or was
cancelled by a shutdown, or lost its thread.

A failed copy may be under way in part. Its ticket ends only when the stream is
idle, since the blocks may be given to someone else as soon as it has. The thread
waits for that, never the caller of ``query``, which is the engine's step.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform

logger = init_logger(__name__)

SHUTDOWN_SECONDS = 5.0
_THREAD_CHECK_SECONDS = 0.1


class CopyTicket:
    """One copy's way from the queue to its end; safe to use from any thread.

    Args:
        thread: Who runs the copy; None for a copy that nobody runs.
        what: The copy, as the subject of log lines.

    Attributes:
        error: Why the copy failed; only its end makes it final.

    """

    def __init__(self, thread: CopyThread | None, what: object) -> None:
        self.error: BaseException | None = None
        self._thread = thread
        self._what = what
        self._stream: torch.cuda.Stream | None = None
        # Of a copy that is on its stream.
        self._event: torch.Event | None = None
        # Set while the copy is on its stream, and when it has ended.
        self._settled = threading.Event()
        self._lock = threading.Lock()

    @classmethod
    def failed(cls, what: object, error: BaseException) -> CopyTicket:
        """Return the ticket of a copy that could not even be submitted."""
        ticket = cls(None, what)
        ticket.fail(error)
        return ticket

    def query(self) -> bool:
        """Has the copy ended? Look at ``error`` for how. Never raises or waits."""
        if not self._settled.is_set():
            self._fail_if_thread_is_gone()
        ended, event = self._state()
        if event is None:
            return ended
        try:
            if not event.query():
                return False
        except Exception as error:
            self._fail_on_stream(event, error)
        else:
            self._forget(event)
        return self.seen_to_end

    @property
    def seen_to_end(self) -> bool:
        """Has somebody found that the copy has ended?"""
        return self._state()[0]

    def wait(self) -> None:
        """Wait until the copy has ended. Never raises."""
        while True:
            while not self._settled.wait(_THREAD_CHECK_SECONDS):
                self._fail_if_thread_is_gone()
            ended, event = self._state()
            if ended:
                return
            if event is None:
                continue  # it failed on its stream, which is not idle yet
            try:
                event.synchronize()
            except Exception as error:
                self._fail_on_stream(event, error)
            else:
                self._forget(event)

    def synchronize(self) -> None:
        """Wait until the copy has ended; raise its error if it failed."""
        self.wait()
        if self.error is not None:
            raise self.error

    def queued(self, stream: torch.cuda.Stream, event: torch.Event) -> None:
        """Note that the copy is on its stream, and which event marks its end."""
        with self._lock:
            if not self._settled.is_set():
                self._stream, self._event = stream, event
                self._settled.set()

    def fail(self, error: BaseException) -> None:
        """End a copy that is not on its stream, unless it has ended."""
        with self._lock:
            if not self._settled.is_set():
                # Before anyone can see that it failed and ask the log why.
                _log_failure(self._what, error)
                # Its frames hold streams and caches.
                self.error = error.with_traceback(None)
                self._settled.set()

    def cancel(self) -> None:
        """End a copy wherever it is; what is on the stream stays there."""
        if self.query():
            return
        with self._lock:
            if self._settled.is_set() and self._event is None:
                return
            logger.warning("%s was cancelled by a shutdown.", self._what)
            self.error = RuntimeError(f"{self._what} was cancelled by a shutdown.")
            self._stream = self._event = None
            self._settled.set()

    def _state(self) -> tuple[bool, torch.Event | None]:
        """Has the copy ended, and which event marks its end if it is on its stream?"""
        with self._lock:
            return self._settled.is_set() and self._event is None, self._event

    def _forget(self, event: torch.Event) -> None:
        with self._lock:
            if self._event is event:
                self._stream = self._event = None

    def _fail_on_stream(self, event: torch.Event, cause: Exception) -> None:
        with self._lock:
            if self._event is not event:
                return  # somebody else saw it first
            stream, self._stream, self._event = self._stream, None, None
            self._settled.clear()
        assert stream is not None
        error = RuntimeError(f"its stream reports {cause}")
        error.__cause__ = cause
        if self._thread is None or not self._thread.fail_when_idle(self, stream, error):
            self.fail(error)

    def _fail_if_thread_is_gone(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self.fail(RuntimeError("the KV copy thread is not running"))


class _Copy(NamedTuple):
    """A copy that is to be queued on its stream."""

    stream: torch.cuda.Stream
    queue_on_stream: Callable[[], None]
    ticket: CopyTicket

    def run(self) -> None:
        try:
            self.queue_on_stream()
            event = torch.Event()
            event.record(self.stream)
        except BaseException as error:
            drain(self.stream)
            self.ticket.fail(error)
        else:
            self.ticket.queued(self.stream, event)


class _Failed(NamedTuple):
    """A copy that failed on its stream."""

    stream: torch.cuda.Stream
    error: BaseException
    ticket: CopyTicket

    def run(self) -> None:
        drain(self.stream)
        self.ticket.fail(self.error)


class CopyThread:
    """Runs copies one after the other, in the order in which they were submitted.

    Args:
        name: Of the thread.
        device: Made current in it.
        keeps: What the copies use: it lives as long as the thread runs, whoever else
            has let go of it.

    """

    def __init__(
        self, name: str, device: torch.device, keeps: Sequence[object] = ()
    ) -> None:
        self._device = device
        self._keeps = keeps
        self._queue: queue.SimpleQueue[_Copy | _Failed | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._start_error: BaseException | None = None
        self._started = threading.Event()
        self._running: CopyTicket | None = None
        self._on_stream: deque[CopyTicket] = deque()
        self._streams: set[torch.cuda.Stream] = set()
        # Held while a copy enters the queue, so that none does after shutdown.
        self._lock = threading.Lock()
        self._closed = False
        self._cancelled = False
        self._at_end: list[Callable[[], None]] = []
        self._ended = False

    def start(self) -> None:
        """Start, and wait until the device is set.

        Raises:
            RuntimeError: The thread cannot start, or the device cannot be set.

        """
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error

    def is_alive(self) -> bool:
        """Is there anyone to run copies?"""
        return self._thread.is_alive()

    def submit(
        self,
        what: object,
        stream: torch.cuda.Stream,
        queue_on_stream: Callable[[], None],
    ) -> CopyTicket:
        """Let the thread call ``queue_on_stream``, and return the copy's ticket.

        Args:
            what: The copy, as the subject of log lines.
            stream: Where its work is queued.
            queue_on_stream: What it raises is the ticket's error.

        """
        ticket = CopyTicket(self, what)
        with self._lock:
            if not self._closed:
                self._streams.add(stream)
                self._queue.put(_Copy(stream, queue_on_stream, ticket))
                return ticket
        ticket.fail(RuntimeError("it came after the shutdown"))
        return ticket

    def fail_when_idle(
        self, ticket: CopyTicket, stream: torch.cuda.Stream, error: BaseException
    ) -> bool:
        """Fail a copy once nothing runs on its stream; False after a shutdown."""
        with self._lock:
            if self._closed or not self.is_alive():
                return False
            self._queue.put(_Failed(stream, error, ticket))
            return True

    def at_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the thread has ended its last copy."""
        with self._lock:
            if not self._ended:
                self._at_end.append(callback)
                return
        callback()

    def close(self) -> None:
        """Take no more copies, and let the thread end when it has done the rest."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)

    def join(self, deadline: float) -> bool:
        """Wait for the thread until ``deadline``, then cancel what is left.

        Args:
            deadline: By ``time.monotonic()``.

        Returns:
            Whether the thread has ended, so that nothing uses the caches.

        """
        if self._thread.ident is None:
            return True
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._cancel()
        return not self._thread.is_alive()

    def _cancel(self) -> None:
        # From here on the thread cancels what it takes; the rest is here, or running.
        self._cancelled = True
        # Looked at first: a copy is among those on a stream before it is not this one.
        running = self._running
        unfinished = [*self._on_stream]
        if running is not None and running not in unfinished:
            unfinished.append(running)
        with contextlib.suppress(queue.Empty):
            while True:
                copy = self._queue.get_nowait()
                if copy is not None:
                    unfinished.append(copy.ticket)
        # The thread may yet come back and ask for what to do.
        self._queue.put(None)
        for ticket in unfinished:
            ticket.cancel()

    def _run(self) -> None:
        try:
            current_platform.set_device(self._device)
        except BaseException as error:
            self._start_error = error
            return
        finally:
            self._started.set()
        while (copy := self._queue.get()) is not None:
            self._running = copy.ticket
            if self._cancelled:
                copy.ticket.cancel()
            else:
                copy.run()
                self._note_on_stream(copy.ticket)
            self._running = None
            # Nothing of a copy stays behind while the thread waits for the next.
            del copy
        for stream in self._streams:
            drain(stream)
        self._streams.clear()
        # The last ticket knows this thread, so only the collector would free them.
        self._keeps = ()
        with self._lock:
            self._ended = True
            callbacks = self._at_end
        for callback in callbacks:
            callback()

    def _note_on_stream(self, ticket: CopyTicket) -> None:
        # Only those who wait for a copy look at its event.
        while self._on_stream and self._on_stream[0].seen_to_end:
            self._on_stream.popleft()
        if not ticket.seen_to_end:
            self._on_stream.append(ticket)


def _log_failure(what: object, error: BaseException) -> None:
    # These say what happened; others are a fault of the code.
    known = isinstance(error, RuntimeError | OSError | IndexError)
    logger.error("%s failed: %s", what, error, exc_info=None if known else error)


def drain(stream: torch.cuda.Stream) -> None:
    """Wait until nothing of ours is under way on the stream. Never raises."""
    try:
        stream.synchronize()
    except Exception as error:
        logger.error("KV copies on %s may still be under way: %s", stream, error)
