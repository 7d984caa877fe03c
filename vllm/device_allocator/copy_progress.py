# SPDX-License-Identifier: Apache-2.0
"""What goes on beside a long call that the calling thread waits for."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from vllm.device_allocator.host_capacity import readable
from vllm.logger import init_logger

logger = init_logger(__name__)

INTERVAL = 2.0
"""Seconds between two lines of progress, and before the first."""


class Progress(Protocol):
    """The compiled module's ``Progress``, or one like it."""

    @property
    def started(self) -> bool:
        """The call has let go of Python's lock."""
        ...

    @property
    def done(self) -> int:
        """Bytes dealt with so far."""
        ...


class _Beside(threading.Thread):
    """A thread for which a call waits that `reported` is around."""


def is_beside() -> bool:
    """Whether the calling thread is one for which a call waits, so that it may not wait
    for that call.
    """
    return isinstance(threading.current_thread(), _Beside)


@contextmanager
def reported(
    what: str,
    total: int,
    progress: Progress,
    beside: Callable[[], object] | None = None,
) -> Iterator[None]:
    """Do something beside a long call, the body, and log how far that is.

    The call has the calling thread, so that no interrupt parts the two. The other one
    has the same device current, since finalizers may run in it.

    Args:
        what: Begins the lines, as in ``Backing up memory``.
        total: Bytes to be dealt with. There are no lines for 0.
        progress: Of the call.
        beside: Called once, in another thread, and waited for. It may keep Python's
            lock for long, and begins when the call needs that no more.

    """
    if not total and beside is None:
        yield
        return
    ended = threading.Event()
    device = _current_device()

    def run() -> None:
        if device is not None:
            torch.accelerator.set_device_index(device)
        while not progress.started and not ended.wait(0.001):
            pass
        begin = time.monotonic()
        if beside is not None:
            beside()
        lines = 0
        while total:
            lines = max(lines + 1, int((time.monotonic() - begin) / INTERVAL))
            if ended.wait(begin + lines * INTERVAL - time.monotonic()):
                return
            _log(what, total, progress.done, time.monotonic() - begin)

    thread = _Beside(target=run, daemon=True)
    try:
        try:
            thread.start()
        except RuntimeError:
            # The system has no more threads; the call does without lines.
            if beside is not None:
                beside()
        yield
    finally:
        ended.set()
        if thread.is_alive():
            thread.join()


def _current_device() -> int | None:
    if not torch.accelerator.is_available():
        return None
    return torch.accelerator.current_device_index()


def _log(what: str, total: int, done: int, seconds: float) -> None:
    if not done:
        logger.info("%s: nothing of %s after %.1f s", what, readable(total), seconds)
        return
    rate = done / seconds
    logger.info(
        "%s: %s of %s after %.1f s (%.1f GB/s), about %.1f s left",
        what,
        readable(done),
        readable(total),
        seconds,
        rate / 1e9,
        (total - done) / rate,
    )
