# SPDX-License-Identifier: Apache-2.0
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import bootstrap
import pytest

FILES = ("engine-torch.txt", "engine.txt", "build.txt", "gpu-tests.txt", "dev.txt")
NEWER = ("3.12", "3.13", "3.14")

Resolutions = dict[str, subprocess.Popen[str]]
RESOLUTIONS = pytest.StashKey[Resolutions]()
RELEASE = Path(__file__).with_name("quick_release.py")
RELEASED = pytest.StashKey[subprocess.Popen[str]]()


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
        release = [sys.executable, str(RELEASE), str(folder / "dist")]
        session.config.stash[RELEASED] = _start(
            session.config, "15", release, TMPDIR=str(folder)
        )


def _start(
    config: pytest.Config, niceness: str, command: list[str], **variables: str
) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        ["nice", "-n", niceness, *command],
        env=os.environ | variables,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def end() -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # a compiler of its own too
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


def output(process: subprocess.Popen[str], seconds: float) -> str:
    """What it says, at its end and where that is a good one."""
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        said += f"\nit began with the tests, and had {seconds} s more after the others"
    # by which pip begins each way of not coming through to an index
    no_index = "connection broken by" in said
    if process.returncode != 0 and no_index and not os.environ.get("CI"):
        pytest.skip("no package index is in reach")
    assert process.returncode == 0, f"{shlex.join(process.args)}:\n{said}"
    return said


@pytest.fixture
def resolutions(pytestconfig: pytest.Config) -> Resolutions:
    """pip on all pins, for each newer Python."""
    return pytestconfig.stash[RESOLUTIONS]


@pytest.fixture(scope="session")
def wheel(pytestconfig: pytest.Config) -> Path:
    """A release wheel of the checkout as it is, for the Python that runs this."""
    process = pytestconfig.stash[RELEASED]
    output(process, 280)
    (wheel,) = Path(process.args[-1]).glob("*.whl")  # type: ignore[index]
    return wheel
