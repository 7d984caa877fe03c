# SPDX-License-Identifier: Apache-2.0
"""The contracts with HIP and with CUDA's driver, and that they leave nothing out.

The statements are C++ in `contract/`, so that the same programs run on a real runtime.
"""

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest

from vllm_rocm_memory.sim import cudasim, hipsim

from .contract_programs import BUILD, DEADLINE_S, SOURCES, build

ROOT = Path(__file__).parents[2]
BRIDGE = ROOT / "csrc" / "hipsim" / "bridge"

Done = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Vendor:
    """Whose contract it is."""

    name: str
    simulator: ModuleType
    program: str
    folder: Path
    function: str  # what its functions' names begin with
    cases: list[tuple[str, str]] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        cases = [
            match
            for path in sorted(self.folder.glob("*.cpp"))
            for match in re.findall(
                r"^CASE\(\s*(\w+),\s*(\w+),", path.read_text(), re.MULTILINE
            )
        ]
        object.__setattr__(self, "cases", cases)

    @property
    def profiles(self) -> tuple[str, ...]:
        profiles: tuple[str, ...] = self.simulator.PROFILES
        return profiles

    @property
    def groups(self) -> list[str]:
        return sorted({group for group, _ in self.cases} - {"selftest"})


HIP = Vendor("HIP", hipsim, "contract", SOURCES, "hip[A-Z]")
CUDA = Vendor("CUDA", cudasim, "cuda_contract", SOURCES / "cuda", "cu[A-Z]")
VENDORS = (HIP, CUDA)
SELF_TESTS = [name for group, name in HIP.cases if group == "selftest"]

each_vendor = pytest.mark.parametrize("vendor", VENDORS, ids=lambda each: each.name)
each_run = pytest.mark.parametrize(
    ("vendor", "profile"),
    [(vendor, profile) for vendor in VENDORS for profile in vendor.profiles],
    ids=lambda each: each if isinstance(each, str) else each.name,
)


def output_of(*command: str | Path) -> str:
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=DEADLINE_S
    ).stdout


@pytest.fixture(scope="session")
def programs() -> Mapping[Vendor, Path]:
    """Each vendor's, linked against its simulator."""
    build()
    return {vendor: BUILD / vendor.program for vendor in VENDORS}


@pytest.fixture(scope="session")
def contract(programs: Mapping[Vendor, Path]) -> Path:
    """HIP's program."""
    return programs[HIP]


def run(program: Path, *arguments: str) -> Done:
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=DEADLINE_S
    )


@pytest.fixture(scope="session")
def runs(programs: Mapping[Vendor, Path]) -> Mapping[tuple[Vendor, str], Done]:
    """All cases, once on each profile; they wait more than they compute."""
    wanted = [(vendor, profile) for vendor in VENDORS for profile in vendor.profiles]
    with ThreadPoolExecutor(len(wanted)) as pool:
        done = pool.map(
            lambda each: run(programs[each[0]], "--profile", each[1]), wanted
        )
        return dict(zip(wanted, done, strict=True))


@pytest.fixture(scope="session")
def listed(programs: Mapping[Vendor, Path]) -> Mapping[Vendor, list[list[str]]]:
    """Name, covered functions and source of every case."""
    return {
        vendor: [
            line.split("\t") for line in run(program, "--list").stdout.splitlines()
        ]
        for vendor, program in programs.items()
    }


@pytest.mark.parametrize(
    ("vendor", "profile", "group"),
    [
        pytest.param(vendor, profile, group, id=f"{vendor.name}-{profile}-{group}")
        for vendor in VENDORS
        for profile in vendor.profiles
        for group in vendor.groups
    ],
)
def test_contract(
    runs: Mapping[tuple[Vendor, str], Done], vendor: Vendor, profile: str, group: str
) -> None:
    done = runs[vendor, profile]
    words = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    outcome = {each[1]: each[0] for each in words if len(each) > 1}
    expected = {f"{group}.{name}" for of, name in vendor.cases if of == group}
    wrong = {name for name in expected if outcome.get(name) not in ("PASS", "SKIP")}
    failing = [
        line for line in done.stdout.splitlines() if line.startswith(f"FAIL {group}.")
    ]
    assert not wrong, "\n".join([*failing, f"wrong: {sorted(wrong)}", done.stderr])
    assert any(outcome[name] == "PASS" for name in expected)


@each_run
def test_exit_status_is_that_of_the_cases(
    runs: Mapping[tuple[Vendor, str], Done], vendor: Vendor, profile: str
) -> None:
    done = runs[vendor, profile]
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL ")]
    assert done.returncode == bool(failed), done.stdout + done.stderr
    passed, also_failed, skipped = map(
        int,
        re.fullmatch(
            r"(\d+) passed, (\d+) failed, (\d+) skipped", done.stdout.splitlines()[-1]
        ).groups(),  # type: ignore[union-attr]
    )
    real = [name for group, name in vendor.cases if group != "selftest"]
    assert also_failed == len(failed)
    assert passed + also_failed + skipped == len(real)


# --- nothing is left out -------------------------------------------------------------


def exported_by(library: Path) -> set[str]:
    lines = output_of("nm", "-D", "--defined-only", library).splitlines()
    return {line.split()[-1] for line in lines}


@each_vendor
def test_every_exported_function_has_a_case(
    listed: Mapping[Vendor, list[list[str]]], vendor: Vendor
) -> None:
    covered = {name for _, covers, _ in listed[vendor] for name in covers.split(", ")}
    exported = {
        name
        for name in exported_by(vendor.simulator.library_path())
        if re.match(vendor.function, name)
    }
    assert exported - covered == set()
    assert covered - exported == set()


@each_vendor
def test_every_case_is_listed_with_its_source(
    listed: Mapping[Vendor, list[list[str]]], vendor: Vendor
) -> None:
    names = [name for name, _, _ in listed[vendor]]
    assert sorted(names) == sorted(
        f"{group}.{name}" for group, name in vendor.cases if group != "selftest"
    )
    for name, covers, source in listed[vendor]:
        assert len(source) > 5, name
        assert covers, name


def identifiers(paths: Iterator[Path]) -> dict[str, set[str]]:
    """Names of HIP's and CUDA's driver, each with the files that have it."""
    found: dict[str, set[str]] = {}
    for path in paths:
        for name in re.findall(r"\b(?:hip|cu)[A-Z]\w*", path.read_text()):
            found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return found


def our_sources() -> Iterator[Path]:
    for folder in ("csrc", "vllm", "vllm_rocm_memory"):
        for path in sorted((ROOT / folder).rglob("*")):
            simulator = ROOT / "csrc" / "hipsim" in path.parents
            if path.suffix in (".py", ".cpp", ".h") and not simulator:
                yield path


def test_every_function_that_we_use_is_exported() -> None:
    used = identifiers(our_sources())
    assert "hipMemcpyBatchAsync" in used
    no_functions = set(identifiers(iter(BRIDGE.glob("*_abi.h"))))
    no_functions.add("cuMem")  # vLLM's name for its allocator
    libraries = [vendor.simulator.library_path() for vendor in VENDORS]
    exported = set[str]().union(*map(exported_by, libraries))
    missing = {
        name: files
        for name, files in used.items()
        if name not in no_functions and not exported & {name, f"{name}_v2"}
    }
    assert missing == {}


@each_vendor
def test_the_program_needs_nothing_of_the_simulator(
    programs: Mapping[Vendor, Path], vendor: Vendor
) -> None:
    needed = output_of("nm", "-D", "--undefined-only", programs[vendor])
    assert re.search(r"\b(hip|cu)MemcpyBatchAsync", needed)
    assert "hipsim" not in needed


# --- the harness ---------------------------------------------------------------------

COMPLAINTS = {
    "wrong_expectation": r"device is 0, not 12345$",
    "wrong_requirement": r"\(nullptr\) is hipErrorInvalidValue \(1\), not hipSuccess",
    "wrong_bytes": r"byte 2 of 4 is 1, not 2$",
    "leaked_memory": r"leaves device_allocations: 1 live, 0 before;",
    "leaked_holder": r"leaves holders that own something$",
    "claimed_and_not_called": r"covers hipMemset and did not call it$",
    "claimed_and_not_called_infallible": r"covers hipGetErrorName and did not call it$",
    "function_that_is_not_there": r"there is no hipNoSuchFunction$",
    "switch_that_is_not_there": r"the simulator refuses the switch no_such_switch$",
    "child_with_a_wrong_expectation": r"is a child's status 99, not 0$",
    "child_that_takes_too_long": r"killed because it took too long, not 0$",
    "child_that_dies": r"is a child ended by signal 9, not 0$",
    "dies": r"ended by signal 11$",
    "hangs": r"not over in time$",
}


@pytest.mark.parametrize("how", [[], ["--alone"]], ids=["together", "alone"])
@pytest.mark.parametrize("name", SELF_TESTS)
def test_harness_notices(contract: Path, name: str, how: list[str]) -> None:
    done = run(contract, *how, "--patience", "3", f"selftest.{name}")
    assert done.returncode == 1
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("FAIL ")]
    assert line.startswith(f"FAIL selftest.{name} ")
    assert re.search(COMPLAINTS[name], line), line


@pytest.mark.parametrize("how", [[], ["--alone"]], ids=["together", "alone"])
@pytest.mark.parametrize("failing", ["leaked_memory", "dies", "hangs"])
def test_a_failure_does_not_stop_the_others(
    contract: Path, failing: str, how: list[str]
) -> None:
    names = ["devices.versions", f"selftest.{failing}", "streams.created_and_destroyed"]
    done = run(contract, *how, "--patience", "3", *names)
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert [line.split()[1] for line in lines[1:-1]] == names
    assert lines[-1] == "2 passed, 1 failed, 0 skipped"


def test_all_runs_in_one_process_where_that_is_wanted(contract: Path) -> None:
    names = ["devices.versions", "selftest.leaked_memory", "devices.count"]
    done = run(contract, "--here", *names)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "2 passed, 1 failed, 0 skipped"
    died = run(contract, "--here", "selftest.dies", "devices.count")
    assert died.returncode == -11


@pytest.mark.parametrize(
    "arguments",
    [
        ["--profile", "6.0"],
        ["--profile"],
        ["--wrong"],
        ["--group", "nothing"],
        ["devices.nothing"],
        ["--child", "nothing"],
        ["--patience", "long"],
    ],
)
def test_wrong_arguments_are_refused(contract: Path, arguments: list[str]) -> None:
    done = run(contract, *arguments)
    assert done.returncode == 2
    assert "usage: contract" in done.stderr


def test_groups_and_cases_are_chosen_by_name(contract: Path) -> None:
    done = run(
        contract, "--all-profiles", "--group", "devices", "errors.names_and_texts"
    )
    lines = done.stdout.splitlines()
    names = {line.split()[1] for line in lines if line.startswith(("PASS", "SKIP"))}
    assert {name.split(".")[0] for name in names} == {"devices", "errors"}
    releases = [line for line in lines if line.startswith("HIP ")]
    assert [line.rsplit(maxsplit=1)[1] for line in releases] == list(hipsim.PROFILES)


def test_it_runs_with_no_device(contract: Path) -> None:
    done = subprocess.run(
        [contract],
        env={**os.environ, "HIPSIM_PROFILE": "nothing"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2
    assert "contract: there is no device" in done.stderr
