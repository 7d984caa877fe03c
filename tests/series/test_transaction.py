# SPDX-License-Identifier: Apache-2.0
"""Whatever interrupts a change, the next run ends at one side of it or the other."""

import errno
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm_rocm_memory.series import SeriesError, operations
from vllm_rocm_memory.series.target import Target

pytestmark = pytest.mark.usefixtures("unverified")


REPOSITORY = Path(__file__).parents[2]
# What the fault injection must have seen for a matrix over it to mean anything.
WRITING = {"open", "fchmod", "write", "fsync", "replace", "unlink"}


class Killed(BaseException):
    """Stands for a kill: nothing catches it, and nothing is written after it."""


# What the target has before, and what is asked of it.
CHANGES = {
    "apply": ((), lambda small: small.apply()),
    "revert": (("first", "second"), lambda small: small.revert()),
    "apply another": (("first",), lambda small: small.apply("second")),
    "revert one": (("first", "second"), lambda small: small.revert("second")),
}


@pytest.fixture(params=CHANGES)
def change(request, small):
    """A target before a change, and the change."""
    before, run = CHANGES[request.param]
    if before:
        small.apply(*before)
    return small, run


@dataclass
class Rehearsal:
    """An undisturbed run: its operations, and the target on both sides of it."""

    count: int
    before: dict[str, bytes]
    after: dict[str, bytes]
    pristine: Path

    def restore(self, root: Path) -> None:
        shutil.rmtree(root)
        shutil.copytree(self.pristine, root)


@pytest.fixture
def rehearsal(change, computed_once, faults, snapshot) -> Rehearsal:
    small, run = change
    pristine = small.root.with_name("pristine")
    shutil.copytree(small.root, pristine)
    before = snapshot(small.root)
    faults.seen.clear()
    run(small)
    assert set(faults.seen) >= WRITING
    return Rehearsal(len(faults.seen), before, snapshot(small.root), pristine)


@pytest.fixture
def wanted(change, rehearsal, snapshot) -> dict[str, dict[str, bytes]]:
    """The target without the series, and with all of it."""
    small, _ = change
    small.revert()
    original = snapshot(small.root)
    small.apply()
    return {"revert": original, "apply": snapshot(small.root)}


@pytest.mark.parametrize("then", ["apply", "revert"])
def test_killed_at_every_operation(change, rehearsal, wanted, then, faults, snapshot):
    small, run = change
    for number in range(1, rehearsal.count + 1):
        rehearsal.restore(small.root)
        faults.seen.clear()
        faults.at, faults.error, faults.dead = number, Killed, True
        with pytest.raises(Killed):
            run(small)
        faults.at = 0
        left = snapshot(small.root)
        for path in rehearsal.before.keys() | rehearsal.after.keys():
            sides = rehearsal.before.get(path), rehearsal.after.get(path)
            assert left.get(path) in sides, f"{path} is torn at {number}"
        (small.apply if then == "apply" else small.revert)()
        assert snapshot(small.root) == wanted[then], number
        assert set(small.states().values()) == {
            "applied" if then == "apply" else "not applied"
        }
    assert (small.root / "vllm" / ".rocm_memory_series").exists() == (then == "apply")


def test_one_failing_operation_leaves_the_target_as_it_was(
    change, rehearsal, faults, snapshot
):
    small, run = change
    raised = 0
    for number in range(1, rehearsal.count + 1):
        rehearsal.restore(small.root)
        faults.seen.clear()
        faults.at, faults.dead = number, False
        code = (errno.ENOSPC, errno.EROFS, errno.EACCES)[number % 3]
        faults.error = lambda code=code: OSError(code, "the disk said no", "here")
        try:
            run(small)
        except SeriesError as error:
            raised += 1
            sentence = "here cannot be changed (the disk said no): the target is left"
            assert sentence in str(error)
            assert snapshot(small.root) == rehearsal.before, number
        else:
            # The change was final: only rubbish could not be cleared.
            faults.at = 0
            run(small)
            assert snapshot(small.root) == rehearsal.after, number
    assert raised > rehearsal.count * 3 / 4


_KILL = """
import os, signal, sys
from pathlib import Path
from vllm_rocm_memory.series import operations, verification
from vllm_rocm_memory.series.definition import load
from vllm_rocm_memory.series.target import Target

verification.import_failures = lambda target, modules: {}
left = int(sys.argv[4])
def fatal(real):
    def call(*arguments, **options):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    return call
for name in ("write", "fsync", "replace", "unlink", "mkdir", "rmdir"):
    setattr(os, name, fatal(getattr(os, name)))
definition = Path(sys.argv[3])
series = load(definition, definition.with_name("files"))
getattr(operations, sys.argv[1])(Target.find(Path(sys.argv[2])), series)
"""


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_sigkill(small, command, snapshot):
    original = snapshot(small.root)
    small.apply()
    applied = snapshot(small.root)
    if command == "apply":
        small.revert()
    for number in (1, 8, 20, 33, 47, 60):
        process = subprocess.run(
            [
                *(sys.executable, "-c", _KILL, command),
                *(str(small.root), str(small.definition), str(number)),
            ],
            cwd=REPOSITORY,
            timeout=60,
        )
        assert process.returncode == -signal.SIGKILL
        if number % 2:
            small.apply()
            assert snapshot(small.root) == applied
            small.revert()
            assert snapshot(small.root) == original
        else:
            small.revert()
            assert snapshot(small.root) == original
            small.apply()
            assert snapshot(small.root) == applied
        (small.revert if command == "apply" else small.apply)()


def test_a_change_of_others_after_a_kill_is_kept(small, faults):
    faults.at, faults.error, faults.dead = 70, Killed, True
    with pytest.raises(Killed):
        small.apply()
    faults.at = 0
    assert small.target.transaction.interrupted
    assert small.states()["first"] == "not applied"
    assert "interrupted" in small.reason("first")
    user = small.root / "vllm" / "pkg" / "user.py"
    user.write_text("mine = 1\n")
    for run in (small.apply, small.revert):
        with pytest.raises(SeriesError) as refusal:
            run()
        assert "user.py was changed since (sha256" in str(refusal.value)
        # The way out after an upgrade, which leaves the pending folder behind.
        folder = small.root / "vllm" / ".rocm_memory_series"
        assert f"installed anew since, remove {folder}" in str(refusal.value)
    assert user.read_text() == "mine = 1\n"
    shutil.rmtree(folder)
    assert small.states()["first"] == "unknown base"


@pytest.mark.parametrize("ask", ["dry run", "diff"])
def test_nothing_is_said_of_an_interrupted_target(small, faults, ask):
    faults.at, faults.error, faults.dead = 70, Killed, True
    with pytest.raises(Killed):
        small.apply()
    faults.at = 0
    with pytest.raises(SeriesError, match="was interrupted: run vllm-rocm-memory"):
        if ask == "dry run":
            small.apply(dry_run=True)
        else:
            operations.diff(small.target, small.series)


def test_two_processes_at_once(small, monkeypatch):
    monkeypatch.setattr("vllm_rocm_memory.series.target.LOCK_WAIT_S", 0.2)
    with (
        Target.find(small.root).locked(exclusive=True),
        pytest.raises(SeriesError, match="another vllm-rocm-memory process"),
    ):
        small.apply()
    assert small.states() == {"first": "not applied", "second": "not applied"}


_APPLY = """
import sys
from pathlib import Path
from vllm_rocm_memory.series import operations
from vllm_rocm_memory.series.definition import load
from vllm_rocm_memory.series.target import Target

definition = Path(sys.argv[2])
series = load(definition, definition.with_name("files"))
operations.apply(Target.find(Path(sys.argv[1])), series)
"""


def test_two_processes_that_both_apply(small, snapshot):
    small.apply()
    applied = snapshot(small.root)
    small.revert()
    command = [sys.executable, "-c", _APPLY, str(small.root), str(small.definition)]
    processes = [subprocess.Popen(command, cwd=REPOSITORY) for _ in range(3)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    assert snapshot(small.root) == applied


def test_mode_is_kept(small):
    owned = small.root / "vllm" / "pkg" / "owned.py"
    owned.chmod(0o640)
    (small.root / "vllm" / "__init__.py").chmod(0o604)
    small.apply()
    assert owned.stat().st_mode & 0o777 == 0o640
    extra = small.root / "vllm" / "pkg" / "extra.py"
    assert extra.stat().st_mode & 0o777 == 0o604
    small.revert()
    assert owned.stat().st_mode & 0o777 == 0o640


def test_hard_links_elsewhere_keep_their_content(small):
    # uv installs by linking to its cache.
    cache = small.root.parent / "cache.py"
    owned = small.root / "vllm" / "pkg" / "owned.py"
    original = owned.read_bytes()
    cache.hardlink_to(owned)
    small.apply()
    assert owned.read_bytes() != original
    assert cache.read_bytes() == original


def test_symbolic_links_are_refused(small, snapshot):
    owned = small.root / "vllm" / "pkg" / "owned.py"
    owned.rename(small.root / "elsewhere.py")
    owned.symlink_to(small.root / "elsewhere.py")
    before = snapshot(small.root)
    with pytest.raises(SeriesError, match=r"owned\.py is a symbolic link"):
        small.apply()
    assert snapshot(small.root) == before


def _bytecode(root: Path, mode: str) -> None:
    command = [sys.executable, "-m", "compileall", "-q", f"--invalidation-mode={mode}"]
    subprocess.run([*command, str(root / "vllm")], check=True, timeout=60)


@pytest.mark.parametrize("mode", ["timestamp", "unchecked-hash"])
def test_old_bytecode_is_not_run(small, mode, run_python):
    ask = "from vllm.pkg.owned import shout; print(shout('a'))"
    _bytecode(small.root, mode)
    small.apply()
    assert run_python(small.root, ask) == "A!\n"
    _bytecode(small.root, mode)
    small.revert()
    assert run_python(small.root, ask) == "A\n"
    assert not list(small.root.rglob("extra.*.pyc"))
    assert not (small.root / "vllm" / "new").exists()
