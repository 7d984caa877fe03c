# SPDX-License-Identifier: Apache-2.0
"""Copies of KV blocks between device and host, queued by a thread of their own.

Note [Copy tickets]
The worker polls pairs of an event index and something that answers ``query()``
and ``synchronize()``. An event cannot be that thing: it exists only once the
copy thread has queued its copy, so a flush would miss copies that still wait
for the thread, and a copy that failed would have no event at all and its
request would wait for ever. The worker gets a ticket instead, at once and on
its own thread. Every ticket ends: its copy is done, or failed, or was cancelled
by a shutdown, or lost its thread.

A failed copy may have been queued in part. Its ticket ends only when the stream
is idle, since the blocks may be given to someone else as soon as it has.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.simple_kv_offload.copy_engine import resolve_copy_engine
from vllm.v1.simple_kv_offload.cuda_mem_ops import (
    CU_MEMCPY_SRC_ACCESS_ORDER_ANY,
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
    BatchMemcpyParams,
    build_params,
    copy_blocks,
    describe_batch_copies,
    format_blocks,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

_SHUTDOWN_SECONDS = 5.0
_THREAD_CHECK_SECONDS = 0.1


class CopyTicket:
    """One copy's way from the queue to its end; safe to use from any thread.

    Args:
        thread: Who queues the copy on its stream.
        what: The copy, for the text of errors that show up later.

    """

    def __init__(self, thread: threading.Thread | None, what: object) -> None:
        self.error: BaseException | None = None
        self._thread = thread
        self._what = what
        self._event: torch.Event | None = None
        # Set when the copy is queued on its stream, or will never be.
        self._settled = threading.Event()
        self._lock = threading.Lock()

    def query(self) -> bool:
        """Has the copy ended? Look at ``error`` for how. Never raises."""
        if not self._settled.is_set():
            self._fail_if_thread_is_gone()
            if not self._settled.is_set():
                return False
        event = self._event
        if self.error is not None or event is None:
            return True
        try:
            return bool(event.query())
        except Exception as error:
            self._end_with(error)
            return True

    def synchronize(self) -> None:
        """Wait until the copy has ended; raise its error if it failed."""
        while not self._settled.wait(_THREAD_CHECK_SECONDS):
            self._fail_if_thread_is_gone()
        event = self._event
        if self.error is None and event is not None:
            try:
                event.synchronize()
            except Exception as error:
                self._end_with(error)
        if self.error is not None:
            raise self.error

    def queued(self, event: torch.Event | None) -> None:
        """Note that the copy is on its stream, and which event marks its end."""
        with self._lock:
            if not self._settled.is_set():
                self._event = event
                self._settled.set()

    def fail(self, error: BaseException) -> bool:
        """End a copy that is not queued; False if it was, or had ended."""
        with self._lock:
            if self._settled.is_set():
                return False
            self.error = error
            self._settled.set()
            return True

    def _end_with(self, cause: Exception) -> None:
        error = RuntimeError(f"{self._what} failed on its stream: {cause}")
        error.__cause__ = cause
        with self._lock:
            if self.error is not None:
                return
            self.error = error
        logger.error("%s", error)

    def _fail_if_thread_is_gone(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self.fail(RuntimeError("The KV copy thread is not running."))


def raise_failed_copy(event: torch.Event | CopyTicket) -> None:
    """Raise the error of a copy that failed; plain events have none."""
    if isinstance(event, CopyTicket) and event.error is not None:
        raise event.error


class _Blocks(NamedTuple):
    direction: str
    src: Sequence[int]
    dst: Sequence[int]

    def __str__(self) -> str:
        return (
            f"KV {self.direction} of blocks {format_blocks(self.src)} "
            f"to {format_blocks(self.dst)}"
        )


class _Copy(NamedTuple):
    blocks: _Blocks
    params: BatchMemcpyParams
    stream: torch.cuda.Stream
    wait_event: torch.Event | None
    ticket: CopyTicket

    def __str__(self) -> str:
        return str(self.blocks)

    def cancel(self) -> None:
        if self.ticket.fail(RuntimeError(f"{self} was cancelled by a shutdown.")):
            logger.warning("%s was cancelled by a shutdown.", self)


class DmaCopyBackend:
    """Loads and stores KV blocks on two streams, without the caller waiting.

    Args:
        vllm_config: Where the user may have chosen a copy engine.

    Raises:
        ValueError: The chosen engine does not exist.

    """

    def __init__(self, vllm_config: VllmConfig | None = None) -> None:
        self._engine, self._engine_source = resolve_copy_engine(vllm_config)
        self._store: tuple[BatchMemcpyParams, torch.cuda.Stream] | None = None
        self._load: tuple[BatchMemcpyParams, torch.cuda.Stream] | None = None
        self._queue: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._running: _Copy | None = None
        # Held while a copy enters the queue, so that none does after shutdown.
        self._lock = threading.Lock()
        self._closed = False
        self._cancelled = False

    def init(
        self,
        gpu_caches: dict[str, torch.Tensor],
        cpu_caches: dict[str, torch.Tensor],
        device: torch.device,
        load_stream: torch.cuda.Stream,
        store_stream: torch.cuda.Stream,
    ) -> None:
        """Prepare copies between the caches and start the copy thread.

        Raises:
            RuntimeError: There is no batch copy, or the thread cannot start.
            ValueError: The caches do not match.

        """
        # A store reads what the compute stream may have just written; a load
        # reads host memory that stays as it is until its blocks are freed.
        store = build_params(
            gpu_caches,
            cpu_caches,
            store_stream,
            CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            direction="store",
        )
        load = build_params(
            cpu_caches,
            gpu_caches,
            load_stream,
            CU_MEMCPY_SRC_ACCESS_ORDER_ANY,
            direction="load",
        )
        self._store, self._load = (store, store_stream), (load, load_stream)
        logger.info(
            "KV copy engine: batch (asked for: %s, by %s): %s",
            self._engine.value,
            self._engine_source,
            describe_batch_copies(),
        )
        thread = threading.Thread(
            target=lambda: self._run(device, started), name="kv-copy", daemon=True
        )
        started = CopyTicket(thread, "The start of the KV copy thread")
        thread.start()
        self._thread = thread
        started.synchronize()

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, torch.Event | CopyTicket]],
        wait_event: torch.Event | None = None,
    ) -> None:
        """Queue a copy and append its ticket to ``events_list`` at once.

        Errors of the copy are the ticket's. The copy waits for ``wait_event``
        on its own stream.
        """
        way = self._store if is_store else self._load
        assert way is not None, "init() must run before launch_copy()"
        params, stream = way
        blocks = _Blocks(params.direction, src_blocks, dst_blocks)
        ticket = CopyTicket(self._thread, blocks)
        copy = _Copy(blocks, params, stream, wait_event, ticket)
        with self._lock:
            if self._closed:
                ticket.fail(RuntimeError(f"{copy} came after the shutdown."))
            else:
                self._queue.put(copy)
        events_list.append((event_idx, ticket))

    def shutdown(self) -> None:
        """Finish what is queued, or cancel what five seconds do not suffice for."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
        if self._thread is None:
            return
        self._thread.join(_SHUTDOWN_SECONDS)
        if self._thread.is_alive():
            self._cancel()

    def _cancel(self) -> None:
        # From here on the thread cancels what it takes; the rest is here, or running.
        self._cancelled = True
        unfinished = []
        with contextlib.suppress(queue.Empty):
            while True:
                unfinished.append(self._queue.get_nowait())
        # The thread may yet come back and ask for what to do.
        self._queue.put(None)
        for copy in (self._running, *unfinished):
            if copy is not None:
                copy.cancel()
        logger.warning(
            "KV copies were still under way %.0f seconds after the shutdown.",
            _SHUTDOWN_SECONDS,
        )

    def _run(self, device: torch.device, started: CopyTicket) -> None:
        try:
            current_platform.set_device(device)
        except BaseException as error:
            started.fail(error)
            return
        started.queued(None)
        while (copy := self._queue.get()) is not None:
            self._running = copy
            if self._cancelled:
                copy.cancel()
            else:
                _queue_on_stream(copy)
            self._running = None
        # The caches may be freed after a shutdown.
        for way in (self._load, self._store):
            assert way is not None
            _drain(way[1])


def _queue_on_stream(copy: _Copy) -> None:
    try:
        if copy.wait_event is not None:
            copy.stream.wait_event(copy.wait_event)
        copy_blocks(copy.blocks.src, copy.blocks.dst, copy.params)
        event = torch.Event()
        event.record(copy.stream)
    except BaseException as error:
        _drain(copy.stream)
        if copy.ticket.fail(error):
            logger.error("%s failed: %s", copy, error, exc_info=error)
    else:
        copy.ticket.queued(event)


def _drain(stream: torch.cuda.Stream) -> None:
    try:
        stream.synchronize()
    except Exception as error:
        logger.error("KV copies on %s may still be under way: %s", stream, error)
