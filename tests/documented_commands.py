# SPDX-License-Identifier: Apache-2.0
"""A command of the documents, run, and held against its entry in docs_commands.toml."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def run(
    command: str, folder: Path, environment: Mapping[str, str], seconds: float
) -> tuple[int, str]:
    """The exit code of a command for a shell, and all that it says."""
    process = subprocess.run(
        ["sh", "-c", command],
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    return process.returncode, process.stdout


def check(entry: Mapping[str, Any], code: int, output: str) -> None:
    """Hold what a command did against the entry's ``code`` and ``says``."""
    allowed = entry.get("code", 0)
    assert code in (allowed if isinstance(allowed, list) else [allowed]), output
    assert "Traceback" not in output
    for word in entry["says"]:
        assert word in output, f"{word!r} is not said by {entry['line']}:\n{output}"
