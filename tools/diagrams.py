# SPDX-License-Identifier: Apache-2.0
"""Draw the mermaid diagrams of docs/ as the pictures that the site shows.

A picture is named after the sha256 of its text, so that a diagram that was changed has
none until it is drawn. Needs npm, a network and Chromium or Chrome.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import docs_hooks

DOCS = Path(__file__).parents[1] / "docs"
MERMAID = "@mermaid-js/mermaid-cli@11.17.0"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def browser() -> str:
    """Exits with what to do where there is none."""
    found = [path for name in BROWSERS if (path := shutil.which(name))]
    if not found or shutil.which("npx") is None:
        sys.exit(f"diagrams: npx and one of {', '.join(BROWSERS)} have to be on PATH")
    return found[0]


def draw(text: str, picture: Path, chromium: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.mmd").write_text(text)
        # A container's root has no sandbox, and the text is ours.
        options = {"executablePath": chromium, "args": ["--no-sandbox"]}
        (folder / "browser.json").write_text(json.dumps(options))
        (folder / "mermaid.json").write_text('{"deterministicIds": true}')
        subprocess.run(
            [
                *("npx", "--yes", MERMAID, "--quiet", "--backgroundColor", "white"),
                *("--puppeteerConfigFile", folder / "browser.json"),
                *("--configFile", folder / "mermaid.json"),
                *("--input", folder / "text.mmd", "--output", folder / "out.svg"),
            ],
            env={**os.environ, "PUPPETEER_SKIP_DOWNLOAD": "1"},
            check=True,
        )
        picture.write_text((folder / "out.svg").read_text().rstrip() + "\n")


def main() -> None:
    """Draw what has no picture, and remove pictures of what is no more."""
    texts = {
        docs_hooks.picture(diagram[1]): diagram[1]
        for page in sorted(DOCS.glob("*.md"))
        for diagram in docs_hooks.diagrams(page.read_text())
    }
    folder = DOCS / docs_hooks.PICTURES
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.name not in texts:
            path.unlink()
            print(f"removed {path.name}")
    for name, text in texts.items():
        if not (folder / name).exists():
            draw(text, folder / name, browser())
            print(f"drew {name}")


if __name__ == "__main__":
    main()
