# SPDX-License-Identifier: Apache-2.0
"""Runs a contract of the simulator against the real runtime of this machine."""

import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .children import ROOT, TAIL

# To compile it where that was not done before, and for a process a case.
SECONDS = 570
# Each process starts the runtime anew, which takes longer the more devices it sees.
DEVICES = 2
# Of make, which a test may run under, and the names that the target reads.
_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL")
_NAMES = ("HIP", "LIBCUDA", "CUDA", "ARGS", "LIBRARY")


@dataclass(frozen=True)
class Contract:
    """What the program said.

    Attributes:
        status: With which it ended.
        output: Its lines; the first is the release, the last one counts.
        listed: The names of all its cases.
        errors: What it wrote to its standard error.
    """

    status: int
    output: list[str]
    listed: list[str]
    errors: str

    @cached_property
    def outcomes(self) -> Mapping[str, tuple[str, str]]:
        """PASS, FAIL or SKIP of each case by its name, and what is said beside it."""
        found = {}
        for line in self.output:
            if match := re.fullmatch(r"(PASS|FAIL|SKIP) (\S+\.\S+)(?: (.*))?", line):
                outcome, name, why = match.groups(default="")
                found[name] = outcome, why.strip(" :")
        return found

    @property
    def skipped(self) -> list[str]:
        """Lines that say why a case was left out."""
        return [
            f"{name}: {why}"
            for name, (outcome, why) in self.outcomes.items()
            if outcome == "SKIP"
        ]

    def assert_kept(self) -> None:
        """No case failed or got lost, some passed, and the count agrees."""
        said = "\n".join([*self.output, self.errors])[-TAIL:]
        failed = [line for line in self.output if line.startswith("FAIL ")]
        assert not failed, "\n".join(failed)
        assert self.status == 0, said
        assert sorted(self.outcomes) == sorted(self.listed), said
        counts = Counter(outcome for outcome, _ in self.outcomes.values())
        assert counts["PASS"] > 0, said
        assert self.output[-1] == (
            f"{counts['PASS']} passed, 0 failed, {counts['SKIP']} skipped"
        )

    def tell(self) -> str:
        """The release, the count, and what was left out."""
        lines = [self.output[0], self.output[-1], *self.skipped]
        return "\n".join(f"  {line}" for line in lines)


def contract(variable: str, library: Path) -> Contract:
    """Build the program against a library, and run all cases.

    Args:
        variable: Of the make target: HIP or LIBCUDA.
        library: The runtime or driver.

    Raises:
        AssertionError: It could not be built, or took too long; the end of what was
            said.
    """
    deadline = time.monotonic() + SECONDS
    listed = _make(variable, library, deadline, "--list")
    assert listed.returncode == 0, (listed.stdout + listed.stderr)[-TAIL:]
    done = _make(variable, library, deadline)
    return Contract(
        done.returncode,
        done.stdout.splitlines(),
        [line.split("\t")[0] for line in listed.stdout.splitlines() if "\t" in line],
        done.stderr,
    )


def _make(
    variable: str, library: Path, deadline: float, arguments: str = ""
) -> "subprocess.CompletedProcess[str]":
    values = dict.fromkeys(_NAMES[:-1], "") | {
        variable: str(library),
        "ARGS": arguments,
    }
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in (*_MAKE, *_NAMES)
    } | _first_devices(os.environ)
    with subprocess.Popen(
        [
            *("make", "--no-print-directory", "contract"),
            *(f"{name}={value}" for name, value in values.items()),
        ],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as make:
        try:
            out, err = make.communicate(timeout=deadline - time.monotonic())
        except subprocess.TimeoutExpired:
            # With the case that it is at.
            with suppress(ProcessLookupError):
                os.killpg(make.pid, signal.SIGKILL)
            out, err = make.communicate()
            raise AssertionError(
                f"make contract took more than {SECONDS} s:\n{(out + err)[-TAIL:]}"
            ) from None
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(make.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(make.args, make.returncode, out, err)


def _first_devices(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that leave the contract the first devices of those visible here."""
    # HIP reads the second one where the first one is not set.
    cuda = environment.get("CUDA_VISIBLE_DEVICES")
    hip = environment.get("HIP_VISIBLE_DEVICES") or cuda
    every = ",".join(map(str, range(DEVICES)))
    return {
        name: ",".join((every if visible is None else visible).split(",")[:DEVICES])
        for name, visible in (
            ("CUDA_VISIBLE_DEVICES", cuda),
            ("HIP_VISIBLE_DEVICES", hip),
        )
    }


def mapped_library(pattern: str) -> Path:
    """The file of this name that the process has mapped.

    Args:
        pattern: For the whole name of the file.

    Raises:
        LookupError: There is none, or there are several.
    """
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if "/" in line}
    found = {path.resolve() for path in paths if re.fullmatch(pattern, path.name)}
    if len(found) != 1:
        raise LookupError(f"{pattern} is mapped {len(found)} times: {sorted(found)}")
    return found.pop()
