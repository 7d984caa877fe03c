# SPDX-License-Identifier: Apache-2.0
"""Tells one story on a served engine of the demo model, on a GPU or on the simulator.

    python -m vllm_rocm_memory.demo [argument of `vllm serve` ...]

Exit code: 0 when everything in it held, 1 when something did not, 130 after Ctrl-C.
"""

import io
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from vllm_rocm_memory.demo.engine import DemoError
from vllm_rocm_memory.demo.story import Story
from vllm_rocm_memory.demo.view import View, make_console
from vllm_rocm_memory.serve import Plan, ServeError, Server, is_cpu_build, make_plan

_FAILED = 1
# Another model has other sizes, and a key would have to be sent with each question.
_NOT_INHERITED = ("MODEL", "VLLM_API_KEY")


class Interrupted(BaseException):
    """Somebody wants the story to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def _on_signals(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers,
) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handler)


def _interrupt(number: int, _: FrameType | None) -> None:
    _on_signals(signal.SIG_IGN)  # the server is stopped, however impatient they are
    raise Interrupted(number)


def run(plan: Plan) -> int:
    """Starts the server, tells the story and stops the server, whatever happens.

    Returns:
        The exit code.
    """
    console = make_console()
    started = time.monotonic()
    console.print(f"The demo model, served on {plan.device}.")
    if is_cpu_build():
        console.print(
            "The simulator shows behaviour, not speed: times say nothing of a GPU."
        )
    console.print()
    early: list[int] = []
    _on_signals(lambda number, _: early.append(number))
    server = Server(plan)
    view = View(console, server.last_line)
    try:
        _on_signals(_interrupt)
        if early:
            raise Interrupted(early[0])
        Story(plan, server, view).tell()
        ended, code = "Everything held", 0
    except (DemoError, ServeError) as error:
        ended, code = f"demo: {error}", _FAILED
    except Interrupted as interruption:
        ended, code = f"demo: ended by {interruption}", interruption.exit_code
    finally:
        _on_signals(signal.SIG_IGN)
        with view.step("Stop the server"):
            server.stop()
    if not code:
        ended += f", after {time.monotonic() - started:.0f} s."
    console.print(f"\n{ended}", markup=False, soft_wrap=True)
    return code


def main() -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    extra = sys.argv[1:]
    environment = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
    try:
        plan = make_plan(environment, extra[1:] if extra[:1] == ["--"] else extra)
    except ServeError as error:
        print(f"demo: {error}", file=sys.stderr)
        return _FAILED
    try:
        return run(plan)
    except BrokenPipeError:
        # Nobody reads any more, and what is left to flush at exit has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED


if __name__ == "__main__":
    sys.exit(main())
