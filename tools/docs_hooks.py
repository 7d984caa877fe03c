# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs: links that leave docs/ work in the repository and on the site.

A page links to a log, a header or another folder's README by its path in the
repository. Each such file becomes a part of the site, below `repository/`, and the
links of the pages go there. Diagrams, which viewers of the repository draw from their
text, are pictures on the site, so that nothing is fetched to draw them. They are made
by tools/diagrams.py.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import File, Files
    from mkdocs.structure.pages import Page

FOLDER = "repository"
PICTURES = "diagrams"
# What a browser shows by itself; it would offer to save the others.
_SHOWN = (".md", ".png", ".svg", ".json", ".txt")
_CODE = re.compile(
    r"^(?P<indent> *)(?P<fence>```|~~~).*?^(?P=indent)(?P=fence) *$"
    r"|(?P<tick>`+)(?!`).+?(?<!`)(?P=tick)(?!`)",
    re.MULTILINE | re.DOTALL,
)
_DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r"^ *accTitle: (.+)$", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(?![a-z][a-z0-9+.-]*:|#)([^()\s#]+)(#[^()\s]*)?(?=[ )])")


def relative_links(markdown: str) -> list[re.Match[str]]:
    """Those to other files, outside of code; group 1 is the path, 2 the anchor."""
    code = [match.span() for match in _CODE.finditer(markdown)]
    return [
        link
        for link in _LINK.finditer(markdown)
        if not any(begin <= link.start() < end for begin, end in code)
    ]


def diagrams(markdown: str) -> list[re.Match[str]]:
    """Those of a page; group 1 is the text of one."""
    return [*_DIAGRAM.finditer(markdown)]


def picture(text: str) -> str:
    """The file name of a diagram's picture, which changes with its text."""
    return f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.svg"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add what the pages link to, and what is linked from there."""
    root = _root(config)
    pages = list(files.documentation_pages())
    while pages:
        page = pages.pop()
        for link in relative_links(page.content_string):
            path = _resolve(root, _path_in_repository(page.src_uri), link[1])
            if path is None or (uri := _uri(path)) in files.src_uris:
                continue
            added = _generated(config, uri, root / path)
            files.append(added)
            if added.is_documentation_page():
                pages.append(added)
    return files


def on_page_markdown(
    markdown: str, *, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Let links go to where the site has their files, and show pictures of diagrams."""
    root = _root(config)
    source = _path_in_repository(page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri) or "."
    for diagram in reversed(diagrams(markdown)):
        begin, end = diagram.span()
        markdown = markdown[:begin] + _shown(diagram[1], page, config) + markdown[end:]
    for link in reversed(relative_links(markdown)):
        path = _resolve(root, source, link[1])
        if path is not None:
            target = posixpath.relpath(_uri(path), folder)
            markdown = markdown[: link.start(1)] + target + markdown[link.end(1) :]
    return markdown


def _shown(text: str, page: Page, config: MkDocsConfig) -> str:
    """The line of a page that shows a diagram's picture."""
    from mkdocs.exceptions import PluginError

    title = _TITLE.search(text)
    name = f"{PICTURES}/{picture(text)}"
    if title is None or not Path(config.docs_dir, name).is_file():
        raise PluginError(
            f"{page.file.src_uri}: a diagram has no accTitle or is not drawn: run "
            "`python tools/diagrams.py`"
        )
    target = posixpath.relpath(name, posixpath.dirname(page.file.src_uri) or ".")
    return f"![{title[1]}]({target})"


def _root(config: MkDocsConfig) -> Path:
    return Path(config.docs_dir).parent


def _generated(config: MkDocsConfig, uri: str, path: Path) -> File:
    from mkdocs.structure.files import File, InclusionLevel

    # found by links alone, and so in no navigation
    return File.generated(
        config, uri, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV
    )


def _path_in_repository(uri: str) -> str:
    inside = uri.removeprefix(f"{FOLDER}/")
    return inside if inside != uri else f"docs/{uri}"


def _resolve(root: Path, source: str, link: str) -> str | None:
    """The linked file's path from the root; a folder stands for its README."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if (root / path).is_dir():
        path = f"{path}/README.md"
    return path if not path.startswith("..") and (root / path).is_file() else None


def _uri(path: str) -> str:
    """Where the site has a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    shown = "" if path.endswith(_SHOWN) else ".txt"
    return f"{FOLDER}/{path}{shown}"
