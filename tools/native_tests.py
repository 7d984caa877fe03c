# SPDX-License-Identifier: Apache-2.0
"""Build the simulator with sanitizers, and run its C++ tests and its fuzzer.

The engine's unit tests, the contracts with HIP and CUDA on every release, some of the
fuzzer's inputs, and the host memory of sleep mode on both simulators run twice: under
the thread sanitizer, and under the address and undefined-behaviour sanitizers. The
builds stay in `build/native`, so that the next call compiles only what has changed.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "csrc" / "hipsim"
BUILDS = ROOT / "build" / "native"
FUZZING = ROOT / "build" / "fuzz"

SANITIZERS: Mapping[str, str] = {
    "thread": "thread",
    "address": "address,undefined",
}
"""The folders of `build/native`, and what -fsanitize= says there."""

HOST_MEMORY = "host_memory_test"
PROGRAMS = (
    "hipsim_engine_test",
    "contract",
    "cuda_contract",
    "hipsim_fuzz_replay",
    HOST_MEMORY,
)
VENDORS: Mapping[str, str] = {
    "HIP": "hipsim/libamdhip64.so.7",
    "CUDA": "hipsim-cuda/libcuda.so.1",
}
"""Whose drivers are simulated, and where the libraries are in a build."""

FUZZ_INPUTS = 500
BUILD_DEADLINE_S = 600
RUN_DEADLINE_S = 300

NO_CLANG = """\
the fuzzer needs clang++ with its libFuzzer, and there is none: install clang
(Debian and Ubuntu: apt-get install clang; Fedora: dnf install clang compiler-rt), or
name one with CLANG=/path/to/clang++. Without it, make test-native runs a number of
the fuzzer's inputs.
"""


class BuildError(RuntimeError):
    """The compiler's words are the message."""


class Run(NamedTuple):
    """One program with its arguments, and the part of the tests that it belongs to."""

    part: str
    name: str
    command: tuple[str | Path, ...]


class Outcome(NamedTuple):
    """What came of a run; `report` is what it said when it failed, else empty."""

    run: Run
    seconds: float
    report: str


def environment() -> dict[str, str]:
    """What the programs run with: a finding of a sanitizer ends the process."""
    return {
        **os.environ,
        # A child of fork() may start threads; and a process with a thread left at its
        # exit would wait a second for a report.
        "TSAN_OPTIONS": "halt_on_error=1:die_after_fork=0:atexit_sleep_ms=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def _call(*command: str | Path) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command,
        env={**environment(), "PATH": path},
        capture_output=True,
        text=True,
        timeout=BUILD_DEADLINE_S,
    )
    if done.returncode != 0:
        raise BuildError(done.stdout + done.stderr)
    return done.stdout


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two builds of one folder take turns."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(folder: Path, targets: Sequence[str], *options: str) -> None:
    defined = [f"-D{option}" for option in (*options, f"NATIVE_DIR={folder}")]
    with _alone(folder):
        _call("cmake", "-S", SOURCES, "-B", folder, "-G", "Ninja", *defined)
        _call("cmake", "--build", folder, "-j2", "--target", *targets, "--", "--quiet")


def build(sanitizer: str, programs: Sequence[str] = PROGRAMS) -> dict[str, Path]:
    """Builds with one of `SANITIZERS`.

    Args:
        sanitizer: Its name.
        programs: Some of `PROGRAMS`.

    Returns:
        The path of each program.

    Raises:
        BuildError: Something does not compile.
    """
    folder = BUILDS / sanitizer
    sanitize = f"HIPSIM_SANITIZE={SANITIZERS[sanitizer]}"
    _compile(folder, programs, "HIPSIM_TESTS=ON", sanitize)
    return {name: folder / name for name in programs}


def host_memory_run(program: Path, vendor: str, case: str) -> Run:
    """A case of `HOST_MEMORY` on the simulator of one of `VENDORS`."""
    library = program.parent / VENDORS[vendor]
    return Run("host memory", f"{vendor}, {case}", (program, library, case))


def runs(programs: Mapping[str, Path]) -> list[Run]:
    """What there is to run of a build, what takes longest first."""
    engine, contract, cuda_contract, replay, host_memory = (
        programs[name] for name in PROGRAMS
    )
    return [
        *(
            Run("contract", f"HIP {name}", (contract, "--profile", name))
            for name in _call(engine, "--releases").split()
        ),
        Run("contract", "CUDA's driver", (cuda_contract,)),
        Run("fuzzer's inputs", f"{FUZZ_INPUTS} seeds", (replay, str(FUZZ_INPUTS))),
        *(
            host_memory_run(host_memory, vendor, case)
            for vendor in VENDORS
            for case in _call(host_memory, "--list").split()
        ),
        *(
            Run("engine", case, (engine, case))
            for case in _call(engine, "--list").split()
        ),
    ]


def execute(run: Run) -> Outcome:
    """Runs a program; a deadline that passes is a failure like any other."""
    begin = time.monotonic()
    try:
        done = subprocess.run(
            run.command,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=RUN_DEADLINE_S,
        )
        report = "" if done.returncode == 0 else f"{done.stdout}exit {done.returncode}"
    except subprocess.TimeoutExpired:
        report = f"not over after {RUN_DEADLINE_S} s"
    return Outcome(run, time.monotonic() - begin, report)


def _print_table(outcomes: Mapping[str, Sequence[Outcome]]) -> None:
    parts = list(dict.fromkeys(each.run.part for each in outcomes["thread"]))
    print(f"{'':18}" + "".join(f"{name:22}" for name in SANITIZERS.values()))
    for part in parts:
        print(f"{part:18}", end="")
        for sanitizer in SANITIZERS:
            own = [each for each in outcomes[sanitizer] if each.run.part == part]
            failed = sum(bool(each.report) for each in own)
            verdict = f"{failed} of {len(own)} FAILED" if failed else f"{len(own)} ok"
            print(f"{verdict:22}", end="")
        print()


def check() -> int:
    """Builds and runs everything.

    Returns:
        The exit status: 0 only when no program failed and no sanitizer found anything.
    """
    begin = time.monotonic()
    outcomes: dict[str, list[Outcome]] = {}
    # Programs wait more than they compute: the first build's run during the second.
    with ThreadPoolExecutor(6) as pool:
        pending = {}
        for sanitizer in SANITIZERS:
            programs = build(sanitizer)
            pending[sanitizer] = [pool.submit(execute, run) for run in runs(programs)]
        for sanitizer, futures in pending.items():
            outcomes[sanitizer] = [future.result() for future in futures]
    for sanitizer, several in outcomes.items():
        for outcome in several:
            if outcome.report:
                run = outcome.run
                print(f"--- {sanitizer}: {run.part}, {run.name}")
                print(_shorten(outcome.report))
    _print_table(outcomes)
    print(f"{time.monotonic() - begin:.0f} s")
    return int(any(each.report for several in outcomes.values() for each in several))


def _shorten(report: str, lines: int = 60) -> str:
    """Without what passed, and not longer than a screen or two."""
    kept = (each for each in report.splitlines() if each[:4] not in ("PASS", "SKIP"))
    return "\n".join(list(kept)[-lines:])


def fuzz(seconds: int, clang: str) -> int:
    """Runs the fuzzer; what it learns stays in `build/fuzz/corpus`.

    Returns:
        The exit status: 0 when it found nothing. What it found is in `build/fuzz`.
    """
    if shutil.which(clang) is None:
        print(NO_CLANG, file=sys.stderr, end="")
        return 2
    folder = BUILDS / "fuzzer"
    sanitize = "HIPSIM_SANITIZE=fuzzer-no-link,address,undefined"
    compiler = f"CMAKE_CXX_COMPILER={clang}"
    _compile(folder, ["hipsim_fuzz"], "HIPSIM_FUZZER=ON", sanitize, compiler)
    corpus = FUZZING / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    # Programs may be long soon: those of a few bytes make no call.
    lengths = ["-max_len=2048", "-len_control=10"]
    limits = [f"-max_total_time={seconds}", "-timeout=30", *lengths]
    reports = [f"-artifact_prefix={FUZZING}/", "-print_final_stats=1"]
    command = [str(folder / "hipsim_fuzz"), *limits, *reports, str(corpus)]
    return subprocess.run(command, env=environment()).returncode


def main() -> int:
    """The command line: without arguments the tests, with --fuzz the fuzzer."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fuzz", type=int, metavar="SECONDS", help="run the fuzzer")
    parser.add_argument("--clang", default="clang++", help="the fuzzer's compiler")
    arguments = parser.parse_args()
    try:
        if arguments.fuzz is not None:
            return fuzz(arguments.fuzz, arguments.clang)
        return check()
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
