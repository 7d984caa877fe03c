# SPDX-License-Identifier: Apache-2.0
"""The compiled module's host memory under sanitizers, in C++ and without Python.

`make test-native` runs the same program from the same builds: all cases on both
vendors' simulators with each sanitizer.
"""

import re
import subprocess
from functools import cache
from pathlib import Path

import native_tests
import pytest

PROGRAM = native_tests.HOST_MEMORY
SOURCES = Path(__file__).with_name("native") / "host_memory"
CASES = {
    path.stem: re.findall(r"^TEST\((\w+)\)", path.read_text(), re.MULTILINE)
    for path in sorted(SOURCES.glob("*_test.cpp"))
}
ALL_CASES = sorted(case for cases in CASES.values() for case in cases)

# The code is the same for both vendors, and so are its threads.
RUNS = [
    (sanitizer, vendor, case)
    for sanitizer in native_tests.SANITIZERS
    for vendor in native_tests.VENDORS
    for case in ALL_CASES
    if vendor == "HIP" or sanitizer != "thread"
]


@cache
def program(sanitizer: str) -> Path:
    """Built with a sanitizer, as the simulators that it loads are."""
    return native_tests.build(sanitizer, (PROGRAM,))[PROGRAM]


def report_of(sanitizer: str, vendor: str, case: str) -> str:
    """What is wrong with a case on a vendor's simulator; empty when nothing is."""
    run = native_tests.host_memory_run(program(sanitizer), vendor, case)
    return native_tests.execute(run).report


@pytest.mark.parametrize(("sanitizer", "vendor", "case"), RUNS)
def test_host_memory(sanitizer: str, vendor: str, case: str) -> None:
    report = report_of(sanitizer, vendor, case)
    assert not report, report


@pytest.mark.parametrize("sanitizer", native_tests.SANITIZERS)
def test_no_case_is_forgotten(sanitizer: str) -> None:
    listed = subprocess.run(
        [program(sanitizer), "--list"], capture_output=True, text=True, timeout=30
    )
    assert sorted(listed.stdout.split()) == ALL_CASES
    assert len(set(ALL_CASES)) == len(ALL_CASES)


@pytest.mark.parametrize("vendor", native_tests.VENDORS)
@pytest.mark.parametrize(
    ("sanitizer", "case", "complaint"),
    [
        ("thread", "race_with_a_copy", "ThreadSanitizer: data race"),
        ("address", "copy_past_the_end", "AddressSanitizer: heap-buffer-overflow"),
        ("address", "host_memory_left_registered", "left: registered_ranges"),
        ("address", "wrong_byte", "not so: block.is_in(copies)"),
        ("address", "no_such_case", "exit 2"),
    ],
)
def test_what_is_wrong_is_found(
    vendor: str, sanitizer: str, case: str, complaint: str
) -> None:
    assert complaint in report_of(sanitizer, vendor, case)
