# SPDX-License-Identifier: Apache-2.0
"""The C++ tests of the simulator under sanitizers: the engine's, and the fuzzer's.

`make test-native` runs the same programs from the same builds, and the contract
besides.
"""

import re
import subprocess
from pathlib import Path

import native_tests
import pytest

from vllm_rocm_memory.sim import hipsim

ENGINE, REPLAY = "hipsim_engine_test", "hipsim_fuzz_replay"
INPUTS = 100
FUZZ = Path(__file__).with_name("fuzz")
CASES = [
    name
    for path in sorted(Path(__file__).with_name("native").glob("*_test.cpp"))
    for name in re.findall(r"^TEST\((\w+)\)", path.read_text(), re.MULTILINE)
]


@pytest.fixture(scope="module", params=native_tests.SANITIZERS)
def programs(request: pytest.FixtureRequest) -> dict[str, Path]:
    """The programs, built with a sanitizer."""
    return native_tests.build(request.param, (ENGINE, REPLAY))


def run(*command: str | Path) -> str:
    """What is wrong with a program's run; empty when nothing is."""
    return native_tests.execute(native_tests.Run("", "", command)).report


@pytest.mark.parametrize("case", CASES)
def test_engine(programs: dict[str, Path], case: str) -> None:
    report = run(programs[ENGINE], case)
    assert not report, report


def test_no_case_is_forgotten(programs: dict[str, Path]) -> None:
    listed = subprocess.run(
        [programs[ENGINE], "--list"], capture_output=True, text=True, timeout=30
    )
    assert sorted(listed.stdout.split()) == sorted(CASES)
    assert len(set(CASES)) == len(CASES)


def test_an_unknown_case_fails(programs: dict[str, Path]) -> None:
    assert run(programs[ENGINE], "no_such_case")


@pytest.mark.parametrize(
    ("sanitizer", "case", "complaint"),
    [
        ("thread", "data_race", "ThreadSanitizer: data race"),
        ("address", "use_after_free", "AddressSanitizer: heap-use-after-free"),
        ("address", "memory_leak", "LeakSanitizer: detected memory leaks"),
        ("address", "signed_overflow", "runtime error: signed integer overflow"),
        ("thread", "failed_check", "not so: zero == 1"),
        ("address", "wrong_error", "number is 0, not 1"),
    ],
)
def test_what_is_wrong_is_found(sanitizer: str, case: str, complaint: str) -> None:
    programs = native_tests.build(sanitizer, (ENGINE,))
    assert complaint in run(programs[ENGINE], case)


@pytest.mark.parametrize("first", range(0, native_tests.FUZZ_INPUTS, INPUTS))
def test_inputs_of_the_fuzzer(programs: dict[str, Path], first: int) -> None:
    report = run(programs[REPLAY], str(INPUTS), str(first))
    assert not report, report


def test_the_fuzzer_calls_every_function() -> None:
    source = (FUZZ / "fuzz_calls.cpp").read_text()
    called = set(re.findall(r"\b(hip[A-Z]\w+)\(", source))
    assert set(hipsim.PROTOTYPES) - called == set()
