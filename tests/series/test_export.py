# SPDX-License-Identifier: Apache-2.0
"""`git am` takes what `export` writes, and ends at what `apply` leaves."""

import email
import os
import subprocess
from pathlib import Path

import pytest

from vllm_rocm_memory.series import SeriesError
from vllm_rocm_memory.series.definition import load
from vllm_rocm_memory.series.export import export

pytestmark = pytest.mark.usefixtures("unverified")


@pytest.fixture(autouse=True)
def _somebody(monkeypatch, tmp_path):
    """Git settings that must not leak into the files, and a name that must."""
    settings = tmp_path / "home" / ".gitconfig"
    settings.parent.mkdir()
    settings.write_text(
        "[user]\n\tname = A Dev\n\temail = dev@example.org\n"
        "[commit]\n\tgpgsign = true\n[core]\n\tautocrlf = true\n\thooksPath = /none\n"
        "[format]\n\tsignOff = true\n\tsubjectPrefix = MINE\n"
    )
    monkeypatch.setenv("HOME", str(settings.parent))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.delenv("GIT_CONFIG_GLOBAL", raising=False)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))


def git(folder: Path, *arguments: str) -> str:
    process = subprocess.run(
        [
            *("git", "-c", "commit.gpgsign=false", "-c", "core.autocrlf=false"),
            *("-c", "core.hooksPath=/dev/null", *arguments),
        ],
        cwd=folder,
        env={"HOME": str(folder), "PATH": os.environ["PATH"], **IDENTITY},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


IDENTITY = {
    f"GIT_{role}_{field}": "them@example.org"
    for role in ("AUTHOR", "COMMITTER")
    for field in ("NAME", "EMAIL")
}


def commit_all(folder: Path) -> None:
    git(folder, "init", "-q")
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "-q", "-m", "as released")


def test_git_am_ends_at_the_applied_tree(small, tmp_path, snapshot):
    commit_all(small.root)
    written = export(small.target, small.series, tmp_path / "out")
    assert [path.name for path in written] == [
        "0001-Shout-louder.patch",
        "0002-Say-goodbye-later.patch",
    ]
    git(small.root, "am", *map(str, written))
    there = snapshot(small.root / "vllm")
    log = git(small.root, "log", "--format=%an|%s", "-2")
    assert log == "A Dev|Say goodbye later\nA Dev|Shout louder\n"
    git(small.root, "reset", "-q", "--hard", "HEAD~2")
    small.apply()
    ours = snapshot(small.root / "vllm")
    assert {p: c for p, c in ours.items() if not p.startswith(".rocm")} == there


def test_a_patch_says_why_and_how(small, tmp_path):
    first, _ = export(small.target, small.series, tmp_path / "out")
    message = email.message_from_bytes(first.read_bytes())
    assert message["Subject"] == "[PATCH 1/2] Shout louder"
    assert message["From"] == "A Dev <dev@example.org>"
    assert message["Date"]
    body, _, changes = message.get_payload().partition("---\n")
    assert body == (
        "Nobody hears it.\n\nAn exclamation mark.\n\n"
        "Not needed any more when upstream shouts.\n\n"
        "Link: https://github.com/vllm-project/vllm\n"
    )
    assert (
        "diff --git a/vllm/pkg/extra.py b/vllm/pkg/extra.py\nnew file mode" in changes
    )


def test_an_applied_target_exports_the_same(small, tmp_path):
    def content(folder: str) -> list[str]:
        written = export(small.target, small.series, tmp_path / folder)
        return [path.read_text().partition("Subject")[2] for path in written]

    before = content("before")
    small.apply()
    assert content("after") == before


def test_a_patch_that_only_adds_files(small, tmp_path):
    """Git finds nothing to compare with, and takes it all the same."""
    text = small.definition.read_text()
    step = text.index('[[patch.step]]\nkind = "replace"')
    small.definition.write_text(text[:step] + text[text.rindex("[[patch]]") :])
    series = load(small.definition, small.series.files)
    (written,) = export(small.target, series, tmp_path / "out", ["first"])
    commit_all(small.root)
    git(small.root, "am", str(written))
    extra = small.root / "vllm" / "pkg" / "extra.py"
    assert extra.read_bytes() == series.content(series.patches[0].steps[0])


def test_a_sender_git_does_not_know(small, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (written,) = export(small.target, small.series, tmp_path / "out", ["first"])
    assert "\nFrom: vllm-rocm-memory <vllm-rocm-memory@localhost>\n" in (
        written.read_text()
    )


def test_old_patches_are_not_mixed_with_new_ones(small, tmp_path):
    export(small.target, small.series, tmp_path / "out")
    with pytest.raises(SeriesError, match="holds patch files already"):
        export(small.target, small.series, tmp_path / "out")


def test_no_git(small, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SeriesError, match="export needs git"):
        export(small.target, small.series, tmp_path / "out")


def test_a_folder_that_cannot_be_made(small, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SeriesError, match="git format-patch failed: "):
        export(small.target, small.series, tmp_path / "file" / "out")
