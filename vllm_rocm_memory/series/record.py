# SPDX-License-Identifier: Apache-2.0
"""A distribution's RECORD: the list by which pip removes and replaces its files."""

import base64
import csv
import hashlib
from collections.abc import Mapping


def lists(record: bytes, path: str) -> bool:
    """Whether `record` has a line for `path`."""
    # Cheap enough to ask of every distribution in a site-packages folder.
    return path.encode() in record and any(
        _path(line) == path for line in record.decode().splitlines()
    )


def entered(record: bytes, files: Mapping[str, bytes]) -> bytes:
    """`record` with the lines of `files` renewed, and added where there was none.

    Every other line stays as it is, to the byte.
    """
    lines = record.decode().splitlines(keepends=True)
    end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    if lines and not lines[-1].endswith(("\r", "\n")):
        lines[-1] += end
    new = {path: _line(path, content) + end for path, content in files.items()}
    kept = [new.pop(_path(line), line) for line in lines]
    return "".join([*kept, *(new[path] for path in sorted(new))]).encode()


def _path(line: str) -> str:
    row = next(csv.reader([line]), [])
    return row[0] if row else ""


def _line(path: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
    return f"{path},sha256={digest.rstrip(b'=').decode()},{len(content)}"
