# SPDX-License-Identifier: Apache-2.0
"""Run the tests that this machine's GPUs can run, and say why others are left out.

The files of `tests/partitions.toml` that use a GPU run each in a process of its own:
one process has one allocator of sleep mode, and one that dies or hangs costs its file
alone. They run one after another, or with --jobs some of them side by side, while those
that measure the GPU's memory or time have it to themselves. The end is a table of the
files, the reason of each skip, the machine, and one line of counts. The exit status is
0 when something has passed and nothing has failed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import bootstrap
import pytest
from partitions import SHARE_GPU_VARIABLE, Machine, Partitions, PartitionsError
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
ON_GPUS = ("gpu", "gpu-2", "rocm-only")
TIMEOUT_S = 1800
COLLECTION_S = 300
LOOK_S = 180
# for pytest to write what it has when it is asked to end, and for engines to let go
GRACE_S = 10.0
NARROWEST = 120
POLL_S = 0.05
# A file's processes have it in their environment, whatever session they are in.
MARK = "GPU_TESTS_FILE"
REPORT = "report.txt"
NOT_SET_UP = 3

# In a process of its own: a context on the GPU would stay for as long as this one.
LOOK = f"""
import sys, traceback
sys.path[:0] = [{str(ROOT / "tools")!r}, {str(ROOT / "benchmarks")!r}]
try:
    import dataclasses, importlib.metadata, json, platform, torch
    import partitions, reporting

    vllm = importlib.metadata.version("vllm")
except Exception:
    traceback.print_exc()
    sys.exit({NOT_SET_UP})

machine = partitions.Machine.seen_by_torch()
driver = ""
if machine.hip is not None:
    driver = reporting.amdgpu_driver()
elif machine.cuda is not None:
    driver = reporting.nvidia_driver()
print(json.dumps({{
    "machine": dataclasses.asdict(machine),
    "names": [torch.cuda.get_device_name(gpu) for gpu in range(machine.gpus)],
    "driver": driver,
    "vllm": vllm,
    "python": platform.python_version(),
}}))
"""


class GpuTestsError(Exception):
    """Something that the user can mend; the text says what and how."""


@dataclass(frozen=True)
class Surroundings:
    """Where the tests run, for the end of the report.

    Attributes:
        machine: What PyTorch sees.
        names: The visible GPUs' names.
        driver: Its name and version, or nothing on a CPU build.
        vllm: vLLM's version.
        python: Python's.
        series: Whether the series is applied, in words.
    """

    machine: Machine
    names: tuple[str, ...]
    driver: str
    vllm: str
    python: str
    series: str

    @classmethod
    def look(cls) -> Surroundings:
        """Ask PyTorch in another process, and the series.

        Raises:
            GpuTestsError: PyTorch cannot be imported, there is no vLLM, or a GPU
                does not answer.
        """
        try:
            looked = _ask([sys.executable, "-c", LOOK], LOOK_S)
        except subprocess.TimeoutExpired:
            raise GpuTestsError(
                f"PyTorch has not said within {LOOK_S} s which GPUs there are: a GPU "
                "or its driver hangs"
            ) from None
        if looked.returncode != 0:
            remedy = (
                "`make setup-test-gpu` repairs .venv"
                if looked.returncode == NOT_SET_UP
                else "PyTorch is whole, and a GPU or its driver fails"
            )
            raise GpuTestsError(
                f"{sys.executable} cannot say which GPUs there are; {remedy}:\n"
                f"{looked.stderr.strip()}"
            )
        said: dict[str, Any] = json.loads(looked.stdout.splitlines()[-1])
        return cls(
            Machine(**said["machine"]),
            tuple(said["names"]),
            said["driver"],
            said["vllm"],
            said["python"],
            _state_of_series(),
        )

    def __str__(self) -> str:
        gpus = ", ".join(
            f"{self.names.count(name)} x {name}" for name in dict.fromkeys(self.names)
        )
        parts = (
            gpus or "no GPU",
            "shared by the ranks of gpu-2" if self.machine.ranks_share_gpu else "",
            self.driver,
            f"torch {self.machine.torch} for {self.machine.build}",
            f"vLLM {self.vllm}",
            f"Python {self.python}",
            self.series,
        )
        return ", ".join(part for part in parts if part)

    def without_gpu(self) -> str:
        """Why PyTorch may see no GPU here, and what to do."""
        present = bootstrap.gpus_of_machine()
        built = self.machine.build.partition(" ")[0].replace("HIP", "ROCm")
        text = f"no GPU: PyTorch {self.machine.torch} sees none"
        if not present:
            return (
                f"{text}, and there is neither /dev/kfd (ROCm) nor /dev/nvidia0 or "
                "/dev/nvidiactl (CUDA). `make test` runs what needs no GPU, on the "
                "simulator"
            )
        if built not in present:
            return (
                f"{text}: there is a {' and a '.join(present)} GPU, and this PyTorch "
                f"is built for {self.machine.build}. Name an interpreter that has vLLM "
                f"on a {' or '.join(present)} torch: make test-gpu "
                "PYTHON=/path/to/python"
            )
        hidden = [
            f"{name}={os.environ[name]!r}"
            for name in (
                *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
                "ROCR_VISIBLE_DEVICES",
            )
            if name in os.environ
        ]
        if hidden:
            return f"{text}: unset what hides it, {', '.join(hidden)}"
        return (
            f"{text}: there is a {built} GPU, whose driver ({self.driver}) is too "
            f"old for {self.machine.build}, or whose device files this user may not "
            "open (groups video and render)"
        )


def _state_of_series() -> str:
    command = Path(sys.executable).with_name("vllm-rocm-memory")
    if not command.exists():
        return "series not installed"
    try:
        asked = _ask([str(command), "status", "--json"], LOOK_S)
    except subprocess.TimeoutExpired:
        return f"series: no answer within {LOOK_S} s"
    try:
        status = json.loads(asked.stdout)
        patches = status["patches"]
        others = [
            f"{p['name']} {p['state']}" for p in patches if p["state"] != "applied"
        ]
    except (ValueError, KeyError):
        return f"series: {(asked.stderr.strip() or 'no answer').splitlines()[-1]}"
    applied = f"series: {len(patches) - len(others)} of {len(patches)} patches applied"
    return f"{applied} ({', '.join(others)})" if others else applied


def _pytest(tests: Path) -> list[str]:
    """The command; names in its output start at the folder of tests."""
    settings = ("-c", str(ROOT / "pyproject.toml"))
    root = f"--rootdir={tests.resolve().parent}"
    return [sys.executable, "-m", "pytest", *settings, root]


def _ask(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


# --- One file -----------------------------------------------------------------------


class Selected(NamedTuple):
    """A file of the folder of tests, and where it stands in `partitions.toml`.

    Attributes:
        path: Relative to the folder.
        partition: Which machine it needs.
        is_also_cpu: It is in `cpu`, and uses a GPU where there is one.
        turn: Its place among those that may share a GPU, or None.
    """

    path: str
    partition: str
    is_also_cpu: bool = False
    turn: int | None = None

    @property
    def label(self) -> str:
        return "gpu (also cpu)" if self.is_also_cpu else self.partition

    def __str__(self) -> str:
        return f"{self.path} ({self.label})"


class Failure(NamedTuple):
    """A test, or nothing for the file itself; the first line of what was wrong."""

    test: str
    why: str


@dataclass
class Outcome:
    """What came of a file."""

    file: Selected
    passed: int = 0
    failures: list[Failure] = field(default_factory=list)
    skips: list[str] = field(default_factory=list)
    seconds: float = 0.0
    was_interrupted: bool = False

    def read(self, junit: Path, is_whole: bool) -> bool:
        """Take the counts from pytest's file; whether there is one.

        Args:
            junit: The file.
            is_whole: False if pytest was interrupted.
        """
        try:
            suites = list(ElementTree.parse(junit).iter("testsuite"))
        except (OSError, ElementTree.ParseError):
            return False
        cases = [case for suite in suites for case in suite.iter("testcase")]
        clean = 0
        for case in cases:
            wrong = next(
                (part for part in case if part.tag in ("failure", "error")), None
            )
            skipped = case.find("skipped")
            if wrong is not None:
                self.failures.append(_failure(case.get("name", "?"), wrong))
            elif skipped is not None:
                self.skips.append(_reason(skipped))
            else:
                clean += 1
        # the test that was interrupted has a case as well, and no count
        counted = sum(
            int(suite.get("tests", 0))
            - sum(int(suite.get(kind, 0)) for kind in ("failures", "errors", "skipped"))
            for suite in suites
        )
        self.passed = clean if is_whole else min(clean, counted)
        return True


def _failure(test: str, wrong: ElementTree.Element) -> Failure:
    message = (wrong.get("message") or wrong.tag).strip()
    if message == "collection failure":
        # the cause is in the traceback, and there is no test
        causes = re.findall(r"^E\s+(.*)", wrong.text or "", re.MULTILINE)
        return Failure("", f"{message}: {causes[-1]}" if causes else message)
    return Failure(test, message.partition("\n")[0])


def _reason(skipped: ElementTree.Element) -> str:
    message = skipped.get("message") or "no reason given"
    if message == "collection skipped":
        # the file, the line and the reason, as Python writes a tuple
        with contextlib.suppress(ValueError, SyntaxError):
            message = str(ast.literal_eval(skipped.text or "")[2])
    return message.removeprefix("Skipped: ")


@dataclass
class Interruption:
    """How often the run was told to end: once asks its processes, twice kills them.

    Attributes:
        times: Written by the handler of signals, and so without a lock.
        is_raised: True while the main thread waits for a process itself.
    """

    times: int = 0
    is_raised: bool = False

    def again(self) -> None:
        self.times += 1
        if self.is_raised:
            raise KeyboardInterrupt


def _log_of(file: Selected, output: Path) -> Path:
    return output / f"{file.path.removesuffix('.py').replace('/', '-')}.log"


class Tee(threading.Thread):
    """Writes what a process says to a log, and may show it as it comes.

    It reads to the end whatever becomes of that, or the process would wait for ever.

    Attributes:
        lost: Why the log is not whole, or nothing.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], out: BinaryIO, is_shown: bool
    ) -> None:
        super().__init__(daemon=True)
        assert process.stdout is not None
        self._pipe, self._out, self._is_shown = process.stdout, out, is_shown
        self.lost = ""
        self.start()

    def run(self) -> None:
        with self._out, self._pipe:
            while said := os.read(self._pipe.fileno(), 1 << 16):
                try:
                    self._out.write(said)
                except OSError as error:
                    self.lost = self.lost or str(error)
                if self._is_shown:
                    with contextlib.suppress(OSError):
                        sys.stdout.write(said.decode(errors="replace"))
                        sys.stdout.flush()


def run_file(
    file: Selected,
    tests: Path,
    output: Path,
    timeout: float,
    extra: Sequence[str],
    interruption: Interruption,
    is_shown: bool,
) -> Outcome:
    """Run pytest on a file; what it says is written to the folder.

    Whatever the file has left running is ended with it.

    Args:
        file: The file.
        tests: The folder of tests.
        output: Where the results and the log go.
        timeout: In seconds.
        extra: Further options of pytest.
        interruption: Ends the file when the run is told to end.
        is_shown: True to show as well what pytest says, as it comes.
    """
    outcome = Outcome(file)
    log = _log_of(file, output)
    junit = log.with_suffix(".xml")
    junit.unlink(missing_ok=True)
    color = "yes" if sys.stdout.isatty() else "no"
    token = uuid.uuid4().hex
    started = time.monotonic()
    out = log.open("wb", buffering=0)
    process = subprocess.Popen(
        [
            *_pytest(tests),
            *("-v", f"--color={color}", f"--junitxml={junit.resolve()}"),
            *(str(tests.resolve() / file.path), *extra),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            MARK: token,
            # Or setproctitle, which vLLM's engines call, writes over the environment.
            "SPT_NOENV": "1",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    tee = Tee(process, out, is_shown)
    has_ended, left = False, set[int]()
    try:
        has_ended = _has_ended(process, timeout, lambda: interruption.times > 0)
        if not has_ended:
            outcome.was_interrupted = interruption.times > 0
            _signal(process, signal.SIGINT)
            _has_ended(process, GRACE_S, lambda: interruption.times > 1)
    finally:
        # Not waited for yet, so that the number is no other group's.
        _signal(process, signal.SIGKILL)
        status = process.wait()
        left = _kill_marked(token)
        tee.join(GRACE_S)
    outcome.seconds = time.monotonic() - started
    has_results = outcome.read(junit, is_whole=status != pytest.ExitCode.INTERRUPTED)
    if outcome.was_interrupted:
        wrong = "interrupted"
    elif not has_ended:
        wrong = f"did not end within {timeout:g} s (--timeout)"
    else:
        wrong = _wrong_with(status, outcome, has_results, bool(extra))
    if wrong:
        outcome.failures.append(Failure("", wrong))
    if tee.lost:
        outcome.failures.append(Failure("", f"{log} is not whole: {tee.lost}"))
    if left:
        outcome.failures.append(
            Failure(
                "",
                "SIGKILL does not end its processes "
                f"{', '.join(map(str, sorted(left)))}, which may keep their GPU",
            )
        )
    return outcome


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send it to the group that the process leads, which may be empty."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _marked(token: str) -> set[int]:
    """The processes that a file has started, by their numbers; zombies are none."""
    mark = f"{MARK}={token}".encode()
    found = set()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        # of another user, or ended meanwhile
        with contextlib.suppress(OSError):
            if mark in environment.read_bytes().split(b"\0"):
                found.add(int(environment.parent.name))
    return found


def _kill_marked(token: str) -> set[int]:
    """Kill what a file has left in any session, and what that starts meanwhile.

    Returns:
        What is still there after the grace.
    """
    deadline = time.monotonic() + GRACE_S
    while (left := _marked(token)) and time.monotonic() < deadline:
        for number in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(number, signal.SIGKILL)
        time.sleep(POLL_S)
    return left


def _has_ended(
    process: subprocess.Popen[bytes], timeout: float, is_enough: Callable[[], bool]
) -> bool:
    """Wait for the end of the process, and leave it to be waited for."""
    deadline = time.monotonic() + timeout
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while os.waitid(os.P_PID, process.pid, options) is None:
        if is_enough() or time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _wrong_with(
    status: int, outcome: Outcome, has_results: bool, is_chosen: bool
) -> str:
    """What is wrong beyond the tests that failed, or nothing."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    if status == pytest.ExitCode.NO_TESTS_COLLECTED and not outcome.skips:
        return "" if is_chosen else "no test was collected"
    if status in (0, 1, 5) and not has_results:
        return f"ended with exit status {status} and without pytest's results"
    if status not in (0, 5) and not outcome.failures:
        return f"pytest ended with exit status {status} and no failed test"
    return ""


# --- What is left out ---------------------------------------------------------------


def count_tests(files: Sequence[Selected], tests: Path) -> dict[str, int]:
    """How many tests each file has, by collecting them.

    Raises:
        GpuTestsError: One cannot be imported; that needs no GPU.
    """
    if not files:
        return {}
    command = [
        *(*_pytest(tests), "--collect-only", "-qq", "--disable-warnings"),
        *("--color=no", *(str(tests.resolve() / file.path) for file in files)),
    ]
    wrong = "files that are left out here cannot be collected, which needs no GPU: "
    try:
        collected = _ask(command, COLLECTION_S)
    except subprocess.TimeoutExpired:
        raise GpuTestsError(f"{wrong}no end within {COLLECTION_S} s") from None
    if collected.returncode not in (0, 5):
        said = collected.stdout + collected.stderr
        raise GpuTestsError(f"{wrong}\n{said.strip()}")
    counts = {}
    for line in collected.stdout.splitlines():
        if match := re.fullmatch(r"(\S+): (\d+)", line):
            path = Path(match[1]).relative_to(tests.resolve().name)
            counts[path.as_posix()] = int(match[2])
    return counts


# --- The report ---------------------------------------------------------------------


@dataclass
class Report:
    """What was run and what was left out, in words."""

    surroundings: Surroundings
    outcomes: list[Outcome] = field(default_factory=list)
    left_out: dict[Selected, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    not_run: list[Selected] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> int:
        return sum(outcome.passed for outcome in self.outcomes)

    @property
    def failed(self) -> int:
        return sum(len(outcome.failures) for outcome in self.outcomes) + len(self.wrong)

    @property
    def status(self) -> int:
        return 0 if self.passed and not self.failed and not self.not_run else 1

    def skips(self) -> dict[str, dict[str, int]]:
        """Reason -> file -> number of tests."""
        found: dict[str, dict[str, int]] = {}
        for outcome in self.outcomes:
            for reason in outcome.skips:
                files = found.setdefault(reason, {})
                files[outcome.file.path] = files.get(outcome.file.path, 0) + 1
        for file, reason in self.left_out.items():
            found.setdefault(reason, {})[file.path] = self.counts.get(file.path, 0)
        return found

    def show(self, console: Console) -> None:
        console.print(self._table())
        for title, lines in (
            ("failed", self._failures()),
            ("skipped", self._skips()),
            ("not run", [file.path for file in self.not_run]),
        ):
            if lines:
                _say(console, f"{title}:")
                for line in lines:
                    _say(console, f"  {line}")
                _say(console)
        _say(console, str(self.surroundings))
        skipped = sum(sum(files.values()) for files in self.skips().values())
        _say(
            console,
            f"{self.passed} passed, {self.failed} failed, {skipped} skipped "
            f"in {self.seconds:.0f} s",
        )
        if not self.passed and not self.failed:
            _say(console, "nothing has passed: see the reasons above")

    def _table(self) -> Table:
        table = Table()
        for heading in ("file", "partition"):
            table.add_column(heading, overflow="fold")
        for heading in ("passed", "failed", "skipped", "seconds"):
            table.add_column(heading, justify="right")
        for outcome in self.outcomes:
            numbers = (outcome.passed, len(outcome.failures), len(outcome.skips))
            table.add_row(
                *(outcome.file.path, outcome.file.label, *map(str, numbers)),
                f"{outcome.seconds:.0f}",
            )
        for file in self.left_out:
            count = str(self.counts.get(file.path, "?"))
            table.add_row(file.path, file.label, "0", "0", count, "-")
        return table

    def _failures(self) -> list[str]:
        rows = [
            f"{outcome.file.path}{f'::{test}' if test else ''}: {why}"
            for outcome in self.outcomes
            for test, why in outcome.failures
        ]
        return rows + self.wrong

    def _skips(self) -> list[str]:
        return [
            f"{sum(files.values())} x {reason} ({', '.join(files)})"
            for reason, files in self.skips().items()
        ]


def write_at_once(path: Path, text: str) -> None:
    """Write a file that is whole also for who reads it while this process is ended."""
    begun = path.with_name(f".{path.name}")
    begun.write_text(text)
    begun.replace(path)


def _say(console: Console, text: str = "") -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


# --- The command --------------------------------------------------------------------


def select(
    partitions: Partitions, tests: Path, names: Sequence[str], paths: Sequence[str]
) -> list[Selected]:
    """The files to run, in the order of `partitions.toml`.

    Raises:
        GpuTestsError: A path is in none of the partitions, or nothing is left.
    """
    turns = {path: turn for turn, path in enumerate(partitions.shared_gpu)}
    files = [
        Selected(path, "gpu", is_also_cpu, turns.get(path))
        for paths_of_gpu, is_also_cpu in (
            (partitions.files["gpu"], False),
            (partitions.also_gpu, True),
        )
        for path in paths_of_gpu
    ]
    for name in ("gpu-2", "rocm-only"):
        files += [Selected(path, name) for path in partitions.files[name]]
    wanted = {_relative(path, tests) for path in paths}
    for path in sorted(wanted - {file.path for file in files}):
        if partitions.of(path) is None:
            raise GpuTestsError(
                f"{path}: no such test file in {tests / 'partitions.toml'}; --list "
                "shows those that use a GPU"
            )
        raise GpuTestsError(
            f"{path} uses no GPU: make test ARGS={tests.name}/{path} runs it"
        )
    chosen = [
        file
        for file in files
        if (not names or file.partition in names)
        and (not wanted or file.path in wanted)
    ]
    if not chosen:
        raise GpuTestsError(
            f"no file is left by --partition {' --partition '.join(names)}"
            + (f" and {', '.join(sorted(wanted))}" if wanted else "")
            + "; --list shows the files of each"
        )
    return chosen


def _relative(path: str, tests: Path) -> str:
    """As the partitions have it, given from here or from the folder of tests."""
    from_here = Path(path).resolve()
    if from_here.exists() and from_here.is_relative_to(tests.resolve()):
        return from_here.relative_to(tests.resolve()).as_posix()
    return Path(path).as_posix()


def _clear(output: Path, partitions: Partitions, tests: Path) -> None:
    """Remove what an earlier run has left there, so that none of it passes for ours."""
    (output / REPORT).unlink(missing_ok=True)
    for file in select(partitions, tests, [], []):
        for suffix in (".log", ".xml"):
            _log_of(file, output).with_suffix(suffix).unlink(missing_ok=True)


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return value


def _jobs(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of files, which is 1 or more"
        )
    return int(text)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make test-gpu ARGS=...",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="What follows -- goes to pytest: make test-gpu ARGS='-- -k graph -x'",
    )
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="run these test files only"
    )
    parser.add_argument(
        "--partition",
        action="append",
        default=[],
        choices=ON_GPUS,
        help="run the files of this one only; may be given again",
    )
    parser.add_argument(
        "--list", action="store_true", help="say what would run, and run nothing"
    )
    parser.add_argument(
        "--share-gpu",
        action="store_true",
        help="on a machine with one GPU have all ranks of gpu-2's files use it, which "
        "rehearses them",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help=f"end a file after that time (default: {TIMEOUT_S})",
    )
    parser.add_argument(
        "--jobs",
        type=_jobs,
        default=1,
        metavar="N",
        help="run up to N of the files in shared.gpu of partitions.toml side by side, "
        "and then the others one by one (default: 1)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="keep each file's JUnit XML and log there, and the report",
    )
    parser.add_argument(
        "--tests",
        type=Path,
        default=ROOT / "tests",
        metavar="FOLDER",
        help="the folder of tests, with its partitions.toml (default: tests)",
    )
    return parser


@contextlib.contextmanager
def told_to_end(is_raised: bool = False) -> Iterator[Interruption]:
    """So that a run that is told to end takes its processes along."""
    interruption = Interruption(is_raised=is_raised)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}

    def interrupt(number: int, frame: object) -> None:
        # Ignored still where it was, but not by pytest: a function is not inherited.
        if before[signal.Signals(number)] is not signal.SIG_IGN:
            interruption.again()

    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Running:
    """Runs files, one after another or side by side, until it is told to end."""

    options: argparse.Namespace
    extra: Sequence[str]
    output: Path
    console: Console
    interruption: Interruption
    started: int = 0
    count: int = 0
    _speaks: threading.Lock = field(default_factory=threading.Lock)

    def run(self, files: Sequence[Selected]) -> list[Outcome]:
        """Run them, and return what came of those that were begun."""
        self.count = len(files)
        shared = [file for file in files if file.turn is not None]
        together = min(self.options.jobs, len(shared))
        if together < 2:
            return self._run(files, 1)
        shared.sort(key=lambda file: file.turn or 0)
        others = [file for file in files if file.turn is None]
        return self._run(shared, together) + self._run(others, 1)

    def _run(self, files: Sequence[Selected], together: int) -> list[Outcome]:
        with ThreadPoolExecutor(together) as pool:
            futures = [pool.submit(self._run_file, file, together) for file in files]
            running = {*futures}
            while running:
                # with a timeout, since a signal may wake another thread than this one
                ended, running = wait(running, POLL_S)
                if any(future.exception() for future in ended):
                    self.interruption.times += 1
        return [outcome for future in futures if (outcome := future.result())]

    def _run_file(self, file: Selected, together: int) -> Outcome | None:
        if self.interruption.times:
            return None
        with self._speaks:
            self.started += 1
            title = f"{self.started}/{self.count} {file}"
            if together == 1:
                self.console.rule(title)
            else:
                _say(self.console, f"{title} has started")
        options = self.options
        try:
            outcome = run_file(
                *(file, options.tests, self.output, options.timeout, self.extra),
                self.interruption,
                is_shown=together == 1,
            )
        except OSError as error:
            if options.output is not None:
                raise  # most likely for want of room there
            return Outcome(file, failures=[Failure("", f"was not run: {error}")])
        if together > 1:
            said = _log_of(file, self.output).read_text(errors="replace")
            with self._speaks:
                self.console.rule(f"{title} has ended")
                sys.stdout.write(said if said.endswith("\n") else f"{said}\n")
                sys.stdout.flush()
        return outcome


def run(
    chosen: Sequence[Selected],
    options: argparse.Namespace,
    extra: Sequence[str],
    surroundings: Surroundings,
    console: Console,
) -> Report:
    """Run what can run here of the chosen files."""
    machine, tests = surroundings.machine, options.tests
    report = Report(surroundings)
    report.left_out = {
        file: reason for file in chosen if (reason := machine.lacks(file.partition))
    }
    to_run = [file for file in chosen if file not in report.left_out]
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        interruption = stack.enter_context(told_to_end())
        output = options.output or Path(
            stack.enter_context(tempfile.TemporaryDirectory())
        )
        running = Running(options, extra, output, console, interruption)
        report.outcomes = running.run(to_run)
        report.outcomes.sort(key=lambda outcome: to_run.index(outcome.file))
        try:
            interruption.is_raised = True
            if not interruption.times:
                report.counts = count_tests([*report.left_out], tests)
        except KeyboardInterrupt:
            pass
        except GpuTestsError as error:
            report.wrong.append(str(error))
        interruption.is_raised = False
    if interruption.times and not any(o.was_interrupted for o in report.outcomes):
        report.wrong.append("interrupted")
    begun = {outcome.file for outcome in report.outcomes}
    report.not_run = [file for file in to_run if file not in begun]
    report.seconds = time.monotonic() - started
    return report


def show_list(
    chosen: Sequence[Selected], surroundings: Surroundings, console: Console
) -> None:
    """Each file, and whether it can run here."""
    table = Table()
    for heading in ("file", "partition", "here"):
        table.add_column(heading, overflow="fold")
    for file in chosen:
        lacking = surroundings.machine.lacks(file.partition)
        table.add_row(file.path, file.label, lacking or "runs")
    console.print(table)
    _say(console, str(surroundings))


def main(
    arguments: Sequence[str] | None = None, surroundings: Surroundings | None = None
) -> int:
    """Run the command; `surroundings` are looked at where none are given."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    at = words.index("--") if "--" in words else len(words)
    parser = make_parser()
    options = parser.parse_args(words[:at])
    console = Console(record=True)
    if not console.is_terminal:
        console.width = max(console.width, NARROWEST)
    try:
        partitions = Partitions.read(options.tests)
        chosen = select(partitions, options.tests, options.partition, options.files)
        if options.output is not None:
            options.output.mkdir(parents=True, exist_ok=True)
            if not options.list:
                _clear(options.output, partitions, options.tests)
        if options.share_gpu:
            os.environ[SHARE_GPU_VARIABLE] = "1"  # read there, and by the tests
        surroundings = surroundings or Surroundings.look()
        if options.share_gpu and surroundings.machine.gpus > 1:
            raise GpuTestsError(
                f"--share-gpu: {surroundings.machine.gpus} GPUs are visible, one for "
                "each rank. Leave it out"
            )
        if options.list:
            show_list(chosen, surroundings, console)
            return 0
        if not surroundings.machine.gpus:
            raise GpuTestsError(surroundings.without_gpu())
        report = run(chosen, options, words[at + 1 :], surroundings, console)
    except (GpuTestsError, PartitionsError) as error:
        print(f"make test-gpu: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        place = f"--output {options.output}: " if options.output is not None else ""
        print(f"make test-gpu: {place}{error}", file=sys.stderr)
        return 1
    console.export_text()  # the report alone is kept
    console.print()
    report.show(console)
    if options.output is not None:
        write_at_once(options.output / REPORT, console.export_text().lstrip())
    return report.status


if __name__ == "__main__":
    sys.exit(main())
