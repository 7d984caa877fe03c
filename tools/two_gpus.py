# SPDX-License-Identifier: Apache-2.0
"""Run in one go what two GPUs are needed for, and keep a log of it.

    make two-gpus
    make two-gpus ARGS="--output out --upstream DIR -- --cycles 5 --pause 0.5"

First the tests of the partition gpu-2, then `benchmarks/sleep_wake.py` with two ranks,
on vLLM as it was released and on the patched one. NVLink multicast is off in the tests,
and nothing uses it in the benchmark.

With one GPU it is the single-GPU half: both ranks of the tests share that GPU, which
rehearses them, and the benchmark has one rank.

The folder of --output has two_gpus.txt, which says what was run on what and what came
of it, and the parts' own files. It is written anew after each part, so one who has to
stop keeps what there is. What follows `--` goes to the benchmark. The exit status is 0
when both parts passed and the two trees were what they are named.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from gpu_tests import (
    NARROWEST,
    REPORT,
    GpuTestsError,
    Surroundings,
    Tee,
    told_to_end,
    write_at_once,
)
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2
LOG = "two_gpus.txt"
BENCHMARK = "benchmarks/sleep_wake.py"
# For a part that is told to end: pytest writes what it has, engines let go of the GPU.
GRACE_S = 60.0
TEE_S = 5.0
TOPOLOGY_S = 30.0
# Those of the benchmark that are decided here.
DECIDED = ("--ranks", "--trees", "--output", "--simulate", "--from-json")


class TwoGpusError(Exception):
    """Something that the user can mend; the text says what and how."""


@dataclass
class Part:
    """A command, and what came of it.

    Attributes:
        title: What it shows.
        shown: The command for people: what to type in a checkout.
        command: The command.
        report: The file that it writes for people.
        others: More files that it writes, so that an earlier run's are removed.
        words: What stands in the log for the folders of this machine.
        check: What is wrong although it ended well, or nothing.
        status: Its exit status, None before its end.
        seconds: That it took.
        wrong: Why it has not passed, or nothing.
    """

    title: str
    shown: str
    command: list[str]
    report: Path
    others: tuple[Path, ...] = ()
    words: dict[Path, str] = field(default_factory=dict)
    check: Callable[[], str] = str
    status: int | None = None
    seconds: float = 0.0
    wrong: str = "not run"

    def clear(self) -> None:
        """Remove what an earlier run has left."""
        for path in (self.report, *self.others):
            path.unlink(missing_ok=True)

    def run(self, log: Path) -> None:
        """Run it; what it says is shown and written to the log.

        Raises:
            KeyboardInterrupt: This process was told to end, and the part has ended.
        """
        started = time.monotonic()
        try:
            lost = self._run(log.open("wb", buffering=0))
            if self.status is not None and self.status < 0:
                self.wrong = f"killed by {signal.Signals(-self.status).name}"
            elif self.status:
                self.wrong = f"exit status {self.status}"
            else:
                self.wrong = f"{log} is not whole: {lost}" if lost else self.check()
        except OSError as error:
            self.wrong = str(error)
        finally:
            self.seconds = time.monotonic() - started

    def _run(self, out: BinaryIO) -> str:
        """Run it to its end; why what it said is not all in the log, or nothing."""
        process = subprocess.Popen(
            self.command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            # A terminal's Ctrl-C comes from here alone, since a second one kills.
            process_group=0,
        )
        tee = Tee(process, out, is_shown=True)
        try:
            self.status = process.wait()
        except KeyboardInterrupt:
            self.wrong = "interrupted"
            _end(process)
            raise
        finally:
            tee.join(TEE_S)
        return tee.lost

    def __str__(self) -> str:
        ended = self.wrong or "passed"
        took = f" in {self.seconds:.0f} s" if self.seconds else ""
        text = f"{self.title}\n   {self.shown}\n   {ended}{took}\n"
        if self.report.is_file():
            said = self.report.read_text().strip()
            for folder in sorted(self.words, key=lambda folder: -len(str(folder))):
                said = said.replace(str(folder), self.words[folder])
            text += f"\n{_indented(said)}\n"
        return text


def _end(process: subprocess.Popen[bytes]) -> None:
    """Tell a part to end, and again whenever this process is told so again."""
    deadline = time.monotonic() + GRACE_S
    while True:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
            return
        except KeyboardInterrupt:
            continue
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return


def _indented(text: str) -> str:
    return "\n".join(f"   {line}".rstrip() for line in text.splitlines())


@dataclass
class Trip:
    """All parts, and the log.

    Attributes:
        surroundings: Where they run.
        output: The folder of logs.
        parts: In the order in which they run.
        topology: How the GPUs are linked, in the words of the driver's tool.
        began: When.
    """

    surroundings: Surroundings
    output: Path
    parts: list[Part]
    topology: str = ""
    began: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def is_half(self) -> bool:
        """There is one GPU."""
        return self.surroundings.machine.gpus < RANKS

    def run(self) -> None:
        """Run each part, whatever came of the one before.

        Raises:
            KeyboardInterrupt: This process was told to end; the log is written.
        """
        logs = [self.output / f"part-{n}.log" for n, _ in enumerate(self.parts, 1)]
        for part, log in zip(self.parts, logs, strict=True):
            part.clear()
            log.unlink(missing_ok=True)
        for part, log in zip(self.parts, logs, strict=True):
            part.wrong = "did not end"  # for who reads the log of one that was killed
            self.write()
            try:
                part.run(log)
            finally:
                self.write()

    def write(self) -> None:
        write_at_once(self.output / LOG, str(self))

    def __str__(self) -> str:
        what = (
            "The single-GPU half of the run on two GPUs: the ranks of the tests share "
            "a GPU, and the benchmark has one rank"
            if self.is_half
            else f"Sleep, wake and KV offload with {RANKS} ranks, one a GPU"
        )
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
        lines = [
            f"{what}.",
            f"{self.surroundings}; {len(os.sched_getaffinity(0))} CPU cores, "
            f"{memory:.0f} GiB of host memory. {self.began:%Y-%m-%d}.",
        ]
        if self.surroundings.machine.hip is None:
            lines.append("Not run on AMD hardware.")
        if self.topology:
            lines += ["", "How the GPUs are linked:", "", _indented(self.topology)]
        for number, part in enumerate(self.parts, 1):
            lines += ["", f"{number}. {part}".rstrip()]
        return "\n".join(lines) + "\n"

    def show(self, console: Console) -> None:
        table = Table()
        for heading in ("part", "outcome"):
            table.add_column(heading, overflow="fold")
        table.add_column("seconds", justify="right")
        for part in self.parts:
            table.add_row(part.title, part.wrong or "passed", f"{part.seconds:.0f}")
        console.print(table)
        half = ". With two GPUs visible this is the whole" if self.is_half else ""
        text = f"{self.output / LOG} has all of it{half}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    @property
    def status(self) -> int:
        return int(any(part.wrong for part in self.parts))


def make_parts(
    gpus: int, output: Path, upstream: Path, patched: Path, extra: Sequence[str]
) -> list[Part]:
    """What is run on a machine with so many GPUs.

    Args:
        gpus: At least one.
        output: The folder of logs.
        upstream, patched: The folders that vLLM is imported from.
        extra: More options of the benchmark.
    """
    share = [] if gpus >= RANKS else ["--share-gpu"]
    ranks = "1" if share else str(RANKS)
    tests, measured = output / "tests", output / "sleep_wake"
    words = {upstream: "DIR", patched: "DIR", output: "OUT"}
    of_tests = ["--partition", "gpu-2", *share, "--output"]
    decided = [*extra, "--ranks", ranks, "--output", str(measured), "--trees"]
    trees = {"upstream": upstream, "patched": patched}
    shown = [*extra, "--ranks", ranks, "--trees", *(f"{name}=DIR" for name in trees)]
    return [
        Part(
            f"the tests of gpu-2{', whose ranks share a GPU' if share else ''}",
            f'make test-gpu ARGS="{shlex.join(of_tests)} OUT/tests"',
            [sys.executable, "tools/gpu_tests.py", *of_tests, str(tests)],
            tests / REPORT,
            words=words,
        ),
        Part(
            f"sleep and wake, upstream and patched, with --ranks {ranks}",
            shlex.join(["python", BENCHMARK, *shown]),
            [
                *(sys.executable, BENCHMARK, *decided),
                *(f"{name}={folder}" for name, folder in trees.items()),
            ],
            measured / "sleep_wake.txt",
            (measured / "sleep_wake.json", measured / "sleep_wake.png"),
            words,
            lambda: check_trees(measured / "sleep_wake.json"),
        ),
    ]


def check_benchmark(command: Sequence[str]) -> None:
    """Have the benchmark read its options now, and not when the tests have run.

    Raises:
        TwoGpusError: It cannot use them.
        SystemExit: They are none, and it has said so.
    """
    folder = str(ROOT / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    import reporting
    import sleep_wake

    parser = sleep_wake.make_parser()
    parser.prog = f"make two-gpus: {BENCHMARK}"
    try:
        sleep_wake.settings_from(parser.parse_args(command), parser)
    except reporting.BenchmarkError as error:
        raise TwoGpusError(f"{BENCHMARK}: {error}") from error


def check_trees(path: Path) -> str:
    """Say which tree of the benchmark's result is not what it is named."""
    try:
        runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"]
        has_series = {run["tree"]: run.get("has_series") for run in runs}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path.name} cannot be read: {type(error).__name__}: {error}"
    for name in ("upstream", "patched"):
        if has_series.get(name) is None:
            return f"the tree named {name} was not measured"
    if has_series["upstream"]:
        return "the tree named upstream has the series: name another with --upstream"
    if not has_series["patched"]:
        return "the tree named patched has no series: `make setup-test-gpu` mends .venv"
    return ""


def find_trees(upstream: Path | None) -> tuple[Path, Path]:
    """The folders of vLLM as released and of the patched one.

    The patched one is what `import vllm` finds; behind it on the path is the machine's
    own, which that is a copy of.

    Raises:
        TwoGpusError: One is missing.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise TwoGpusError("there is no vLLM: `make setup-test-gpu` sets .venv up")
    patched = Path(found.origin).parents[1]
    if upstream is None:
        others = [
            Path(entry).resolve()
            for entry in sys.path
            if (Path(entry) / "vllm" / "__init__.py").is_file()
            and not Path(entry).samefile(patched)
        ]
        if not others:
            raise TwoGpusError(
                f"--upstream: {patched} has the only vLLM on the path; name a folder "
                "that has vllm/ as it was released"
            )
        upstream = others[0]
    elif not (upstream / "vllm" / "__init__.py").is_file():
        raise TwoGpusError(
            f"--upstream {upstream}: there is no vllm/__init__.py; name the folder "
            "that has vllm/, as an entry of PYTHONPATH would be"
        )
    return upstream.resolve(), patched


def topology() -> str:
    """How the GPUs are linked, as the driver's tool says it, or nothing."""
    for command in (["nvidia-smi", "topo", "-m"], ["rocm-smi", "--showtopo"]):
        if shutil.which(command[0]) is None:
            continue
        try:
            asked = subprocess.run(
                command, capture_output=True, text=True, timeout=TOPOLOGY_S
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if asked.returncode == 0:
            # The first row is underlined, also in a pipe.
            said = re.sub(r"\x1b\[[0-9;]*m", "", asked.stdout)
            return f"{shlex.join(command)}\n{said.strip()}"
    return ""


def make_parser() -> argparse.ArgumentParser:
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="make two-gpus",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "build" / "two_gpus",
        metavar="FOLDER",
        help="for the log and the parts' own files (build/two_gpus)",
    )
    parser.add_argument(
        "--upstream",
        type=Path,
        metavar="DIR",
        help="a folder that has vllm/ as it was released (the machine's own)",
    )
    return parser


def main(
    arguments: Sequence[str] | None = None, surroundings: Surroundings | None = None
) -> int:
    """Run the command; `surroundings` are looked at where none are given."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    at = words.index("--") if "--" in words else len(words)
    options = make_parser().parse_args(words[:at])
    extra = words[at + 1 :]
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, NARROWEST)
    try:
        for word in extra:
            if word.partition("=")[0] in DECIDED:
                raise TwoGpusError(f"{word} behind -- is decided here; leave it out")
        surroundings = surroundings or Surroundings.look()
        if not surroundings.machine.gpus:
            raise TwoGpusError(surroundings.without_gpu())
        upstream, patched = find_trees(options.upstream)
        output: Path = options.output.resolve()
        gpus = surroundings.machine.gpus
        parts = make_parts(gpus, output, upstream, patched, extra)
        check_benchmark(parts[-1].command[2:])
        output.mkdir(parents=True, exist_ok=True)
        trip = Trip(surroundings, output, parts, topology() if gpus >= RANKS else "")
        try:
            with told_to_end(is_raised=True):
                trip.run()
        except KeyboardInterrupt:
            print("make two-gpus: interrupted", file=sys.stderr)
    except (TwoGpusError, GpuTestsError) as error:
        print(f"make two-gpus: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"make two-gpus: --output {options.output}: {error}", file=sys.stderr)
        return 1
    console.print()
    trip.show(console)
    return trip.status


if __name__ == "__main__":
    sys.exit(main())
