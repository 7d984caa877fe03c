# SPDX-License-Identifier: Apache-2.0
"""The links of the documents lead somewhere."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCED = re.compile(r"^( *)(```|~~~).*?^ *\2", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"\]\(\s*<?([^()\s<>]+)>?[^()]*\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def documents() -> list[str]:
    """Those that git has; without a repository, those outside hidden folders."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0:
        return [n for n in listed.stdout.split("\0") if n and (ROOT / n).exists()]
    folders = [path for path in ROOT.iterdir() if path.is_dir()]
    found = [*ROOT.glob("*.md")]
    for folder in folders:
        if not folder.name.startswith(".") and folder.name not in ("build", "dist"):
            found += folder.rglob("*.md")
    return [path.relative_to(ROOT).as_posix() for path in found]


def prose(document: Path) -> str:
    return FENCED.sub("", document.read_text())


def links(document: Path) -> set[str]:
    text = CODE.sub("``", prose(document))
    return {first or second for first, second in LINK.findall(text)}


def anchors(document: Path) -> set[str]:
    """Its headings, as GitHub makes anchors of them."""
    found: set[str] = set()
    for heading in HEADING.findall(prose(document)):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
        again = 0
        while (name := f"{anchor}-{again}" if again else anchor) in found:
            again += 1
        found.add(name)
    return found


def broken(document: Path) -> list[str]:
    """Its relative links to files and to headings that are not there."""
    wrong = []
    for link in sorted(links(document)):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        is_there = target.exists() and (
            not anchor or (target.suffix == ".md" and anchor in anchors(target))
        )
        if not is_there:
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("name", documents())
def test_relative_links_lead_somewhere(name):
    assert broken(ROOT / name) == []


def test_the_documents_are_found():
    assert {"README.md", "docs/ci.md", "docs/gpu_tests.md"} <= {*documents()}
    assert "docs/hipsim.md" in links(ROOT / "README.md")


def test_broken_links_are_found(tmp_path):
    (tmp_path / "other.md").write_text("# One `two`, three\n## Again\n## Again\n")
    (tmp_path / "a.txt").touch()
    (tmp_path / "page.md").write_text(
        "[a](a.txt) ![b](nowhere.png) [over\nlines](other.md#one-two-three)\n"
        "[c](other.md#again-1) [d](other.md#again-2) [e](#here) [f](#there)\n"
        "[g](https://example.org/x) [h](a.txt#line) `[i](code.md)` [`j`](gone.md)\n"
        '[k](gone.txt "title")\n'
        "# Here\n"
        "```\n[l](fenced.md)\n# there\n```\n"
        "[m]: gone.rst\n"
    )
    assert broken(tmp_path / "page.md") == [
        *("#there", "a.txt#line", "gone.md", "gone.rst", "gone.txt", "nowhere.png"),
        "other.md#again-2",
    ]
