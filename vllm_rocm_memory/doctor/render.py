# SPDX-License-Identifier: Apache-2.0
"""What the doctor shows to people: one check after the other, as they end."""

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from vllm_rocm_memory.doctor.checks import Check
from vllm_rocm_memory.doctor.finding import State
from vllm_rocm_memory.doctor.machine import Machine
from vllm_rocm_memory.doctor.run import Result, examine

SIGNS = {
    State.SUCCESS: ("✓", "ok", "green"),
    State.PARTIAL: ("!", "!", "yellow"),
    State.MISSING: ("✗", "X", "red"),
    State.NOT_AVAILABLE: ("-", "-", "dim"),
    State.CRASHED: ("☠", "crash", "bold red"),
}
"""By state: the sign, the same where only ASCII can be shown, and the colour."""

_SIGN_WIDTH = 3
# No line ends within a command, so that it can be copied.
_COMMAND, _UNBROKEN = re.compile(r"`[^`]+`"), "\N{NO-BREAK SPACE}"


class Output(Console):
    """rich's console, except that a reader who has gone is an error like any other."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, **options)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def show(
    machine: Machine, checks: Iterable[Check], console: Console | None = None
) -> list[Result]:
    """Run the checks and print what each finds; returns that too.

    On a terminal a line at the bottom says which one is running. Elsewhere each
    finding's lines are printed whole, however long they are.
    """
    console = console or Output()
    target = str(machine.target.package) if machine.target else "no vLLM"
    console.print(Text(target), soft_wrap=True)
    results = []
    for check in checks:
        spinner = "dots" if _has_utf8(console) else "line"
        with console.status(Text(f"{check.title} ..."), spinner=spinner):
            result = Result(check, examine(check, machine))
        _print(console, result)
        results.append(result)
    _print_summary(console, results)
    return results


def _has_utf8(console: Console) -> bool:
    return console.encoding.startswith("utf")


def _print(console: Console, result: Result) -> None:
    for sign, text in _rows(result, utf8=_has_utf8(console)):
        sign.pad_right(_SIGN_WIDTH - len(sign))
        for line in _lines(text, console):
            console.print(Text.assemble(sign, " ", line), soft_wrap=True)
            sign = Text(" " * _SIGN_WIDTH)


def _lines(text: Text, console: Console) -> list[Text]:
    """The text in lines that fit the terminal, but for a command that does not."""
    if not console.is_terminal:
        return [text]
    bound = _COMMAND.sub(lambda found: found[0].replace(" ", _UNBROKEN), text.plain)
    width = max(console.width - _SIGN_WIDTH - 1, 1)
    lines = textwrap.wrap(
        bound,
        width,
        expand_tabs=False,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )
    ends, at = [], 0
    for line in lines:
        at = bound.index(line, at) + len(line)
        ends.append(at)
    return [_stripped(part) for part in text.divide(ends[:-1])]


def _stripped(text: Text) -> Text:
    """Without spaces around it, of which `rstrip` only does the right ones."""
    text.rstrip()
    return text[len(text.plain) - len(text.plain.lstrip()) :]


def _rows(result: Result, *, utf8: bool) -> Iterator[tuple[Text, Text]]:
    """What stands at the left, and the text beside it."""
    finding = result.finding
    sign, ascii_sign, style = SIGNS[finding.state]
    title = (f"{result.check.title}: ", "bold")
    yield (
        Text(f"[{sign if utf8 else ascii_sign}]", style),
        Text.assemble(title, finding.summary),
    )
    for detail in finding.details:
        yield Text(), Text(detail, "dim")
    if finding.remedy:
        arrow = ("→ " if utf8 else "-> ", style)
        yield Text(), Text.assemble(arrow, finding.remedy)


def _print_summary(console: Console, results: Sequence[Result]) -> None:
    counts = Counter(result.finding.state for result in results)
    states = ", ".join(f"{counts[state]} {state}" for state in State if counts[state])
    checks = f"{len(results)} check{'s' * (len(results) != 1)}"
    console.print(Text(f"{checks}: {states}."), soft_wrap=True)
