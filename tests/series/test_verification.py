# SPDX-License-Identifier: Apache-2.0
"""The result is imported in a fresh process, and blamed only for what it broke."""

import json
import subprocess

import pytest

from vllm_rocm_memory.series import SeriesError, verification
from vllm_rocm_memory.series.target import Journal
from vllm_rocm_memory.series.verification import blame, import_failures


def extra(small, text: str) -> None:
    (small.series.files / "vllm" / "pkg" / "extra.py").write_text(text)


def broken(small, path: str) -> None:
    """The target itself does not import here, with or without the series."""
    file = small.root / path
    file.write_text(f"import a_library_for_another_machine\n{file.read_text()}")


def test_what_imports_is_verified(small):
    assert small.apply().not_verified is None
    assert small.reason("first") == "base 1.0"
    assert not list(small.root.rglob("*.pyc"))


@pytest.mark.parametrize(
    "text",
    [
        "import a_library_that_is_not_there\n",
        "def check(:\n",
        "raise SystemExit(3)\n",
        "import os; os._exit(3)\n",
        "import os; os._exit(0)\n",
        "import os; os.kill(os.getpid(), 9)\n",
        "check = 1\nimport vllm.pkg.owned.nothing\n",
    ],
)
def test_a_result_that_does_not_import_is_rolled_back(small, snapshot, text):
    extra(small, text)
    before = snapshot(small.root)
    with pytest.raises(SeriesError) as error:
        small.apply()
    assert "the result does not import (vllm.pkg" in str(error.value)
    assert snapshot(small.root) == before
    assert small.states()["first"] == "not applied"


def test_it_is_rolled_back_to_what_was_before(small, snapshot):
    small.apply("second")
    before = snapshot(small.root)
    extra(small, "nothing = 1\n")
    with pytest.raises(SeriesError, match="cannot import name 'check'"):
        small.apply()
    assert snapshot(small.root) == before
    assert small.states("second") == {"second": "applied"}


def test_a_target_that_does_not_import_here_is_applied_unverified(small, snapshot):
    broken(small, "vllm/__init__.py")
    before = snapshot(small.root)
    reason = "ModuleNotFoundError: No module named 'a_library_for_another_machine'"
    outcome = small.apply()
    assert outcome.not_verified == reason
    assert small.states() == {"first": "applied", "second": "applied"}
    assert small.reason("first") == f"base 1.0; not verified by import: {reason}"
    assert small.apply().not_verified == reason
    assert small.revert().not_verified is None
    assert snapshot(small.root) == before


def test_what_else_breaks_does_not_hide_behind_it(small, snapshot):
    broken(small, "vllm/envs.py")
    small.apply("first")
    small.revert()
    extra(small, "import a_library_that_is_not_there\n")
    before = snapshot(small.root)
    with pytest.raises(SeriesError, match="a_library_that_is_not_there"):
        small.apply("first")
    assert snapshot(small.root) == before


def test_what_does_not_import_here_is_left_out_of_the_verification(small, snapshot):
    """One edited module needs a library that few have; the others do not."""
    broken(small, "vllm/envs.py")
    before = snapshot(small.root)
    error = "ModuleNotFoundError: No module named 'a_library_for_another_machine'"
    outcome = small.apply(allow_unknown_base=True)
    assert outcome.not_verified is None
    assert outcome.not_importable == {"vllm.envs": error}
    assert small.states() == {"first": "applied", "second": "applied"}
    assert small.reason("first") == "base 1.0"
    sentence = f"unknown base, allowed; vllm.envs does not import here: {error}"
    assert small.reason("second") == sentence
    again = small.apply()
    assert again.changed == ()
    assert again.not_importable == outcome.not_importable
    assert small.revert("second").not_importable == {}
    assert small.reason("first") == "base 1.0"
    small.revert()
    assert snapshot(small.root) == before


def test_a_new_module_that_shares_the_failure_of_another_is_left_out(small):
    user = small.root / "vllm" / "pkg" / "user.py"
    user.write_text(f"import no_torch\n{user.read_text()}")
    extra(small, "import no_torch\ncheck = str\n")
    outcome = small.apply("first", allow_unknown_base=True)
    assert set(outcome.not_importable) == {"vllm.pkg.extra", "vllm.pkg.user"}
    assert small.reason("first").count("does not import here: ModuleNotFound") == 2


def test_a_journal_of_the_first_release_is_read(small):
    small.apply()
    path = small.root / "vllm/.rocm_memory_series/journal.json"
    journal = json.loads(path.read_text())
    assert journal.pop("not_importable") == {}
    path.write_text(json.dumps(journal))
    assert Journal.from_bytes(path.read_bytes()).not_importable == {}


@pytest.mark.parametrize(
    ("after", "before", "ours"),
    [
        ({"m": "no torch"}, {}, {"m"}),
        ({"m": "no torch"}, {"m": "no torch"}, set()),
        ({"m": "no libcuda"}, {"m": "no torch"}, set()),
        ({"new": "no torch"}, {"m": "no torch"}, set()),
        ({"new": "no name"}, {"m": "no torch"}, {"new"}),
        ({"k": "no torch"}, {"m": "no torch"}, {"k"}),
        ({}, {"m": "no torch"}, set()),
    ],
)
def test_blame(after, before, ours):
    assert set(blame(after, before, ["m", "k"])) == ours


def test_an_interrupted_verification_is_undone(small, snapshot, monkeypatch):
    def stop(target, modules):
        raise KeyboardInterrupt

    monkeypatch.setattr(verification, "import_failures", stop)
    before = snapshot(small.root)
    with pytest.raises(KeyboardInterrupt):
        small.apply()
    assert snapshot(small.root) == before


def test_an_import_that_hangs_ends(small, monkeypatch):
    monkeypatch.setattr(verification, "TIMEOUT_S", 1)
    (small.root / "vllm" / "__init__.py").write_text("import time; time.sleep(30)\n")
    failures = import_failures(small.target, ["vllm.envs"])
    assert failures == {"vllm.envs": "no import within 1 s"}


def test_another_vllm_does_not_count(small, monkeypatch, write_tree):
    # A finder that comes first, as an editable installation's may.
    site = write_tree(
        small.root.parent / "elsewhere",
        {
            "vllm/__init__.py": "",
            "vllm/envs.py": "",
            "sitecustomize.py": "import vllm.envs\n",
        },
    )
    monkeypatch.setenv("PYTHONPATH", str(site))
    failures = import_failures(small.target, ["vllm.envs"])
    assert "vllm was imported from" in failures["vllm.envs"]


def test_the_log_of_vllm_does_not_matter(small):
    (small.root / "vllm" / "__init__.py").write_text("print('{}', end='')\n")
    assert import_failures(small.target, ["vllm.envs"]) == {}


def test_the_interpreter_of_the_target_is_used(small, tmp_path, monkeypatch):
    prefix = tmp_path / "venv"
    site = prefix / "lib" / "python3.11" / "site-packages"
    site.parent.mkdir(parents=True)
    small.root.rename(site)
    small.root = site
    python = prefix / "bin" / "python3.11"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 'not this one' >&2; exit 7\n")
    python.chmod(0o755)
    failures = import_failures(small.target, ["vllm.envs"])
    assert failures["vllm.envs"].endswith("ended with code 7: not this one")
    assert subprocess.run([python]).returncode == 7
