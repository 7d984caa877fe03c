# SPDX-License-Identifier: Apache-2.0
"""Waiting for copies, and what they said, with a bound on every wait."""

import logging
import time
from collections.abc import Callable

import pytest
from vllm.v1.simple_kv_offload.copy_thread import CopyTicket

PATIENCE = 20.0


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def let_go(ticket: CopyTicket) -> None:
    """Drop what an error's tracebacks hold; log records keep the error itself."""
    error = ticket.error
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def logged(log: pytest.LogCaptureFixture, level: str) -> list[str]:
    return [r.getMessage() for r in log.records if r.levelname == level]


def logged_error(log: pytest.LogCaptureFixture) -> logging.LogRecord:
    """The only error in the log."""
    (record,) = [r for r in log.records if r.levelname == "ERROR"]
    return record
