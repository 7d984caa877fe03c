# SPDX-License-Identifier: Apache-2.0
"""How the story is shown: plain lines, and on a terminal what goes on at the moment."""

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from vllm_rocm_memory import sizes
from vllm_rocm_memory.demo.engine import Memory
from vllm_rocm_memory.doctor.render import SIGNS

_PLAIN_WIDTH = 80
_BAR_WIDTH = 20
# On a terminal a step stays for that long, and a bar takes that long to move.
_SEEN_SECONDS = 0.6
_MOVE_SECONDS = 0.5
readable = functools.partial(sizes.readable, units=("B", "KiB", "MiB", "GiB"))
"""Bytes in the unit that suits them."""


def make_console(
    file: TextIO = sys.stdout, environment: Mapping[str, str] = os.environ
) -> Console:
    """One that writes no control characters, unless a person watches it live."""
    watched = file.isatty() and not environment.get("CI")
    watched &= environment.get("TERM", "dumb") not in ("dumb", "unknown")
    width = None if watched else _PLAIN_WIDTH
    return Console(file=file, force_terminal=watched, width=width, highlight=False)


@dataclass
class Step:
    """One step of the story, and what it has brought so far."""

    title: str
    started: float = field(default_factory=time.monotonic)
    details: list[RenderableType] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.details.append(Text(text))

    def say_start_of(self, text: str) -> None:
        """As much of it as one line holds."""
        self.details.append(_one_line(text))

    def show(self, detail: RenderableType) -> None:
        self.details.append(detail)

    def seconds(self) -> float:
        return time.monotonic() - self.started


class View:
    """Shows finished steps one after the other, and the one under way below them.

    Args:
        console: Where.
        last_line: The last thing that the server said.
    """

    def __init__(self, console: Console, last_line: Callable[[], str]) -> None:
        self.console = console
        self._last_line = last_line
        self._memory = self._before = Memory({}, 0, 0, 0)
        self._measured = 0.0
        self._peaks: dict[str, int] = {}

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """Runs a step, which has failed where it raises."""
        step = Step(title)
        live = Live(
            get_renderable=lambda: self._under_way(step),
            console=self.console,
            transient=True,
            refresh_per_second=12,
        )
        watched = self.console.is_terminal
        mark, style = "\u2717" if self.unicode else "failed", "red"
        try:
            with live if watched else contextlib.nullcontext():
                yield step
                seconds = step.seconds()
                if watched:
                    time.sleep(max(0.0, _SEEN_SECONDS - seconds))
            mark, style = "\u2713" if self.unicode else "done", "green"
        except BaseException:
            seconds = step.seconds()
            raise
        finally:
            took = Text(f" ({seconds:.1f} s)", "dim")
            title_line = Text.assemble((f"{mark} ", style), (title, "bold"), took)
            self._print(Group(title_line, *map(_indented, step.details)))

    @property
    def unicode(self) -> bool:
        """Whether more than ASCII can be shown."""
        return not self.console.options.ascii_only

    def _under_way(self, step: Step) -> RenderableType:
        title = Text(f"{step.title} ({step.seconds():.0f} s)", "bold")
        moved = (time.monotonic() - self._measured) / _MOVE_SECONDS
        said = _one_line(self._last_line(), "dim")
        return Group(
            Spinner("dots" if self.unicode else "line", title),
            *map(_indented, step.details),
            _indented(self.bars(min(1.0, moved))),
            _indented(said),
        )

    def _print(self, lines: RenderableType) -> None:
        """Prints without the spaces that fill tables up."""
        with self.console.capture() as captured:
            self.console.print(lines)
        for line in captured.get().splitlines():
            self.console.file.write(line.rstrip() + "\n")
        self.console.file.flush()

    def measured(self, memory: Memory) -> None:
        """From now on the bars show this."""
        self._before, self._memory = self._memory, memory
        self._measured = time.monotonic()
        for name, size in memory.parts.items():
            self._peaks[name] = max(size, self._peaks.get(name, 0))

    def bars(self, moved: float = 1.0) -> Table:
        """The memory measured last, each part beside the most it has been.

        Args:
            moved: How far the bars are on their way from what was measured before.
        """
        table = Table.grid(padding=(0, 1))
        table.add_column()
        table.add_column(width=_BAR_WIDTH)
        table.add_column(justify="right")
        largest = max(self._peaks.values(), default=0)
        for name, peak in self._peaks.items():
            if peak:
                now = self._memory.parts.get(name, 0)
                before = self._before.parts.get(name, 0)
                bar = ProgressBar(
                    total=peak,
                    completed=before + moved * (now - before),
                    width=max(1, round(_BAR_WIDTH * peak / largest)),
                )
                table.add_row(name, bar, f"{readable(now)} of {readable(peak)}")
        if self._peaks:
            table.add_row("in use, together", "", readable(self._memory.used))
        return table


def _one_line(text: str, style: str = "") -> Text:
    return Text.from_ansi(text, style=style, no_wrap=True, overflow="ellipsis")


def _indented(detail: RenderableType) -> Padding:
    return Padding(detail, (0, 0, 0, 4))


def findings(checks: list[dict[str, Any]], unicode: bool = True) -> Table:
    """The doctor's, a line each, and the remedies of what is missing."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for check in checks:
        sign, ascii_sign, style = SIGNS[check["state"]]
        state = Text(sign if unicode else ascii_sign, style)
        table.add_row(state, check["name"], _one_line(check["summary"]))
        if check["state"] == "missing":
            table.add_row("", "", Text(check["remedy"]))
    return table
