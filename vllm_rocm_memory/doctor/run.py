# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm-rocm-memory doctor``."""

import argparse
import contextlib
import json
import os
import re
import signal
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from types import FrameType

from vllm_rocm_memory.doctor.checks import CHECKS, Check
from vllm_rocm_memory.doctor.finding import Finding, State
from vllm_rocm_memory.doctor.machine import RUNTIME_TIMEOUT_S, Machine
from vllm_rocm_memory.options import add_target
from vllm_rocm_memory.series import SeriesError
from vllm_rocm_memory.series.definition import Series
from vllm_rocm_memory.series.target import Target

DESCRIPTION = """\
Look at this machine, its vLLM, and at how it is going to be served, and say of each
thing that the series depends on whether it is there and what helps if not.

Everything that is none of the options below is an argument of `vllm serve`; the
command may be given as it is typed, variables included, and with `--` before it:

  vllm-rocm-memory doctor vllm serve MODEL --enable-sleep-mode

Nothing is changed, started or downloaded. Neither a GPU nor vLLM has to be there. With
the CPU builds of PyTorch and vLLM, HIPSIM_PROFILE=7.15 in the environment shows what a
simulated release of HIP says.
"""

EPILOG = """\
A check ends as one of these:

  success        nothing to do
  partial        it works, with less than there could be
  missing        something asked for, or needed, does not work
  not available  there is nothing to check here
  crashed        the check itself failed; the others go on

Each that is partial or missing has a line with the command, option or variable that
helps. Exit code: 0 where nothing is missing and nothing crashed, else 1; 2 where the
options are refused, or there is no vLLM at --target.
"""

_NOT_OK = (State.MISSING, State.CRASHED)
_MOST_SECONDS = 3600
_COMMANDS = (
    ["vllm", "serve"],
    ["python", "-m", "vllm.entrypoints.cli.main", "serve"],
    ["python", "-m", "vllm.entrypoints.openai.api_server"],
)
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
# What may stand before them.
_BEFORE = ("--", "env", "exec")


@dataclass(frozen=True)
class Result:
    """A check and what it found."""

    check: Check
    finding: Finding

    @property
    def ok(self) -> bool:
        return self.finding.state not in _NOT_OK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Enter the options that are ours; `run` gets the other words."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "%(prog)s [--json] [--target PATH] [--probe-timeout SECONDS] "
    parser.usage += "[ARGUMENT OF vllm serve ...]"
    parser.allow_abbrev = False
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_target(parser)
    parser.add_argument(
        "--probe-timeout",
        type=_seconds,
        metavar="SECONDS",
        help="how long PyTorch, vLLM and the GPU's driver may take to answer (default: "
        f"{RUNTIME_TIMEOUT_S:.0f})",
    )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= _MOST_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text} is not between 0 and {_MOST_SECONDS} seconds"
        )
    return seconds


def run(args: argparse.Namespace, words: Sequence[str], series: Series) -> int:
    """Print what the checks find; returns the exit code.

    Args:
        args: of the options.
        words: all others, in order.
        series: what the vLLM should have.

    Raises:
        SeriesError: there is no vLLM at ``--target``.
    """
    variables, arguments = served(words)
    machine = Machine(
        environment={**os.environ, **variables},
        target=find_target(args.target),
        series=series,
        serve_arguments=arguments,
        timeout_s=args.probe_timeout,
    )
    with _interrupted_by(signal.SIGTERM, signal.SIGHUP), machine:
        if args.json:
            results = list(diagnose(machine, CHECKS))
            print(json.dumps(to_json(machine, results), indent=2))
        else:
            from vllm_rocm_memory.doctor.render import show

            results = show(machine, CHECKS)
    return 0 if all(result.ok for result in results) else 1


@contextlib.contextmanager
def _interrupted_by(*signals: signal.Signals) -> Iterator[None]:
    """Have these signals do what Ctrl-C does, so that the probes are ended."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(number)

    # One that is ignored, as by nohup, stays so.
    taken = [each for each in signals if signal.getsignal(each) is signal.SIG_DFL]
    for each in taken:
        signal.signal(each, interrupt)
    try:
        yield
    finally:
        for each in taken:
            signal.signal(each, signal.SIG_DFL)


def find_target(path: Path | None) -> Target | None:
    """The vLLM; None where none was named and this Python has none."""
    try:
        return Target.find(path)
    except SeriesError:
        if path is not None:
            raise
        return None


def served(words: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The variables that a command sets, and the arguments that it gives vLLM.

    The command is ``vllm serve`` in one of its forms, or its arguments alone.
    """
    variables = {}
    rest = [*words]
    while rest and (rest[0] in _BEFORE or _VARIABLE.match(rest[0])):
        name, is_set, value = rest.pop(0).partition("=")
        if is_set:
            variables[name] = value
    if rest[:1] == ["serve"]:
        return variables, tuple(rest[1:])
    program = PurePath(rest[0]).name if rest else ""
    typed = ["python" if program.startswith("python") else program, *rest[1:]]
    for form in _COMMANDS:
        if typed[: len(form)] == form:
            return variables, tuple(rest[len(form) :])
    return variables, tuple(rest)


def diagnose(machine: Machine, checks: Iterable[Check]) -> Iterator[Result]:
    """Run one check after the other, whatever each of them does."""
    for check in checks:
        yield Result(check, examine(check, machine))


def examine(check: Check, machine: Machine) -> Finding:
    """What `check` finds; its crash is a finding too."""
    try:
        return check.run(machine)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an import may raise SystemExit
        return _crashed(error)


def _crashed(error: BaseException) -> Finding:
    text = " ".join(str(error).split()) or "without a message"
    frames = traceback.extract_tb(error.__traceback__)
    # The import system's own frames tell nothing.
    ours = [frame for frame in frames if not frame.filename.startswith("<frozen")]
    return Finding(
        State.CRASHED,
        f"{type(error).__name__}: {text}",
        tuple(f"{f.filename}:{f.lineno} in {f.name}" for f in ours[-1:]),
        "Report it with these lines, as a defect of the doctor; the other checks go on",
    )


def to_json(machine: Machine, results: Sequence[Result]) -> dict[str, object]:
    """The answer as JSON has it; the keys are documented in docs/operations.md."""
    return {
        "target": str(machine.target.package) if machine.target else None,
        "ok": all(result.ok for result in results),
        "checks": [
            {"name": r.check.name, "title": r.check.title, **asdict(r.finding)}
            for r in results
        ],
    }
