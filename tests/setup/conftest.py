# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
import tempfile

import bootstrap
import pytest

FILES = ("engine-torch.txt", "engine.txt", "dev.txt")
NEWER = ("3.12", "3.13", "3.14")

Resolutions = dict[str, subprocess.Popen[str]]
RESOLUTIONS = pytest.StashKey[Resolutions]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Asks pip beside the tests of other folders: it mostly waits for the index."""
    files = {item.path.name for item in session.items}
    if session.config.option.collectonly or "test_requirements.py" not in files:
        return
    target = tempfile.TemporaryDirectory()
    session.config.add_cleanup(target.cleanup)
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    wheels = ["--no-deps", "--only-binary=:all:", "--target", target.name]
    wanted = [f"--requirement={bootstrap.REQUIREMENTS / file}" for file in FILES]
    running = {
        version: subprocess.Popen(
            ["nice", *pip, *wheels, "--quiet", "--python-version", version, *wanted],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for version in NEWER
    }
    session.config.stash[RESOLUTIONS] = running

    def end() -> None:
        for process in running.values():
            process.kill()
            process.wait()

    session.config.add_cleanup(end)


@pytest.fixture
def resolutions(pytestconfig: pytest.Config) -> Resolutions:
    """pip on all pins, for each newer Python."""
    return pytestconfig.stash[RESOLUTIONS]
