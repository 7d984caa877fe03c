# SPDX-License-Identifier: Apache-2.0
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import bootstrap
import pytest

FILES = ("engine-torch.txt", "engine.txt", "dev.txt")
NEWER = ("3.12", "3.13", "3.14")

Resolutions = dict[str, subprocess.Popen[str]]
RESOLUTIONS = pytest.StashKey[Resolutions]()
BUILD = Path(__file__).with_name("bare_build.py")
BARE_BUILD = pytest.StashKey[subprocess.Popen[str]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts beside the tests of other folders what takes long, and what waits."""
    if session.config.option.collectonly:
        return
    files = {item.path.name for item in session.items}
    folder = Path(tempfile.mkdtemp())
    session.config.add_cleanup(partial(shutil.rmtree, folder, ignore_errors=True))
    if "test_requirements.py" in files:
        session.config.stash[RESOLUTIONS] = {
            version: _start_resolution(session.config, version, folder / version)
            for version in NEWER
        }
    if "test_wheel.py" in files:
        session.config.stash[BARE_BUILD] = _start(
            session.config, "15", [sys.executable, str(BUILD), str(folder)]
        )


def _start(
    config: pytest.Config, niceness: str, command: list[str]
) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        ["nice", "-n", niceness, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def end() -> None:
        process.kill()
        process.wait()

    config.add_cleanup(end)
    return process


def _start_resolution(
    config: pytest.Config, version: str, target: Path
) -> subprocess.Popen[str]:
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    wheels = ["--no-deps", "--only-binary=:all:", "--target", str(target)]
    wanted = [f"--requirement={bootstrap.REQUIREMENTS / file}" for file in FILES]
    options = ["--quiet", "--python-version", version]
    return _start(config, "10", [*pip, *wheels, *options, *wanted])


@pytest.fixture
def resolutions(pytestconfig: pytest.Config) -> Resolutions:
    """pip on all pins, for each newer Python."""
    return pytestconfig.stash[RESOLUTIONS]


@pytest.fixture(scope="session")
def bare_build(pytestconfig: pytest.Config) -> Path:
    """The folder that bare_build.py has filled."""
    process = pytestconfig.stash[BARE_BUILD]
    said, _ = process.communicate(timeout=250)
    assert process.returncode == 0, said
    return Path(process.args[-1])  # type: ignore[index]
