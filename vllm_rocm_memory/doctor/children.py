# SPDX-License-Identifier: Apache-2.0
"""Processes that answer one question, and that end whatever they do."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

_STARTER = "vllm_rocm_memory.doctor.probe"
_REASON_LINES = 3
# Within it a killed process is gone, unless a driver holds it.
_KILLED_WITHIN_S = 5.0


class Child:
    """A probe in a process and a session of its own.

    Its output goes to memory rather than to pipes, which whatever it has started could
    hold open for as long as it likes.

    Args:
        module: the probe, a program that prints a JSON object.
        arguments: its words.
        environment: its variables.
        timeout_s: how long it may take, from now on.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        self._module = module
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._ended = False
        self._output, self._errors = _memory("output"), _memory("errors")
        # -P: whatever lies in the current folder is no module of ours.
        start = [sys.executable, "-P", "-m", _STARTER, str(os.getpid())]
        self._process = subprocess.Popen(
            [*start, module, *arguments],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._errors,
            start_new_session=True,
        )

    def answer(self) -> dict[str, Any] | str:
        """Wait for it; the JSON object that it printed last, or why there is none.

        May be called once.
        """
        try:
            code = self._process.wait(max(0.0, self._deadline - time.monotonic()))
            end = _end(code)
        except subprocess.TimeoutExpired:
            end = f"gave no answer in {self._timeout_s:g} s"
        finally:
            self.end()
        with self._output, self._errors:
            answer = _last_object(_text(self._output))
            why = f"{self._module} {end}: {_last_words(_text(self._errors))}"
        return answer or why

    def end(self) -> None:
        """Kill it, with what it has started in its session."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # A process that waits in a driver is left behind.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_WITHIN_S)


def _memory(name: str) -> IO[bytes]:
    return os.fdopen(os.memfd_create(f"probe-{name}"), "w+b")


def _text(memory: IO[bytes]) -> str:
    memory.seek(0)
    return memory.read().decode(errors="replace")


def _end(code: int) -> str:
    if code < 0:
        return f"was ended by {_signal_name(-code)}"
    return f"ended with exit code {code} and no answer"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _last_object(output: str) -> dict[str, Any] | None:
    for line in reversed(output.splitlines()):
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if isinstance(answer, dict):
            return answer
    return None


def _last_words(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return " | ".join(lines[-_REASON_LINES:]) or "it printed no error"
