# SPDX-License-Identifier: Apache-2.0
"""The engine's own tests, in C++ and under sanitizers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "csrc" / "hipsim"
CASES = [
    line.strip()[5:-2]
    for line in Path(__file__).with_name("engine_test.cpp").read_text().splitlines()
    if line.strip().startswith("TEST(")
]


@pytest.fixture(scope="module", params=["thread", "address,undefined"])
def engine_test(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The test program, built with a sanitizer."""
    build = tmp_path_factory.mktemp("engine")
    flags = f"-fsanitize={request.param} -fno-sanitize-recover=all"
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    configure = ["cmake", "-S", str(SOURCES), "-B", str(build), "-G", "Ninja"]
    options = ["HIPSIM_ENGINE_TEST=ON", f"CMAKE_CXX_FLAGS={flags}"]
    options += [f"NATIVE_DIR={build}", "CMAKE_BUILD_TYPE=Debug"]
    make = ["cmake", "--build", str(build), "-j2", "--target", "hipsim_engine_test"]
    for command in (configure + [f"-D{option}" for option in options], make):
        done = subprocess.run(
            command,
            env={**os.environ, "PATH": tools},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "hipsim_engine_test"


@pytest.mark.parametrize("case", CASES)
def test_engine(engine_test: Path, case: str) -> None:
    done = subprocess.run(
        [engine_test, case], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_no_case_is_forgotten(engine_test: Path) -> None:
    listed = subprocess.run([engine_test], capture_output=True, text=True, timeout=30)
    assert listed.stdout.split() == CASES
