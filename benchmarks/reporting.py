# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks have in common: their results' files, tables and progress."""

import argparse
import contextlib
import itertools
import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Result = dict[str, Any]

# The text of the pictures.
INK = "#222222"


class BenchmarkError(Exception):
    """The benchmark cannot run, or a result cannot be read; the text says why."""


class Table(NamedTuple):
    """Rows of cells, of one line or several each."""

    title: str
    headers: list[str]
    rows: list[list[str]]


class Report(NamedTuple):
    """A result in words: the machine and what was measured, and the figures."""

    text: str
    tables: list[Table]

    def __str__(self) -> str:
        return "\n\n".join([self.text, *map(plain, self.tables)]) + "\n"


def progress(text: str) -> None:
    """Tell whoever waits, beside the tables."""
    print(text, file=sys.stderr, flush=True)


def positive(text: str) -> int:
    """Read a positive number.

    Raises:
        argparse.ArgumentTypeError: It is not positive.
        ValueError: It is no number.

    """
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def documented_parser(documentation: str | None) -> argparse.ArgumentParser:
    """Return a parser without options that shows a script's documentation."""
    description, details = (documentation or "").split("\n\n", 1)
    return argparse.ArgumentParser(
        description=description,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def command_line(script: str, arguments: Sequence[str] | None) -> str:
    """Return what to type for this run; None is what the process was started with."""
    words = sys.argv[1:] if arguments is None else arguments
    return shlex.join(["python", f"benchmarks/{Path(script).name}", *words])


def nvidia_driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return ``nvidia`` and the version of its driver, or ``nvidia unknown``."""
    # A container may have the file or the tool, or neither.
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    sources: tuple[Callable[[], str], ...] = (
        path.read_text,
        lambda: subprocess.check_output(
            query, text=True, stderr=subprocess.DEVNULL, timeout=20
        ),
    )
    for read in sources:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            if found := re.search(r"\d+\.\d+(\.\d+)*", read()):
                return f"nvidia {found[0]}"
    return "nvidia unknown"


def amdgpu_driver(path: Path = Path("/sys/module/amdgpu/version")) -> str:
    """Return ``amdgpu`` and its version, or that of the Linux whose own it is."""
    # The driver of Linux itself has no version but the kernel's.
    named = path.exists() and path.read_text().strip()
    return f"amdgpu {named or 'of Linux ' + platform.release()}"


def save(result: Result, path: Path) -> None:
    """Write the result; what is in the file stays until the new one is whole."""
    text = json.dumps(result, indent=1) + "\n"
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    path = path.resolve()
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)


def load(
    path: Path,
    benchmark: str,
    schema_version: int,
    report_of: Callable[[Result], Report],
) -> tuple[Result, Report]:
    """Read what ``save`` wrote.

    Args:
        path: The file.
        benchmark, schema_version: What wrote it.
        report_of: Makes the report, and so finds what the result lacks.

    Raises:
        BenchmarkError: The file is not such a result, of another version, or damaged.

    """
    try:
        result = json.loads(path.read_text())
    except OSError as error:
        raise BenchmarkError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise BenchmarkError(f"{path} is not JSON: {error}") from error
    if not isinstance(result, dict) or result.get("benchmark") != benchmark:
        raise BenchmarkError(f"{path} is not a result of this benchmark")
    version = result.get("schema_version")
    if version != schema_version:
        raise BenchmarkError(
            f"{path} has schema version {version}, and this benchmark reads "
            f"{schema_version}: use the benchmark that wrote it"
        )
    try:
        return result, report_of(result)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise BenchmarkError(
            f"{path} is damaged: {type(error).__name__}: {error}"
        ) from error


def show(report: Report) -> None:
    """Print the report: with rich, or plainly where there is none."""
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        print(report, end="")
        return
    print(report.text)
    # 120 columns where a file or a pipe has no width of its own.
    console = Console(width=None if sys.stdout.isatty() else 120)
    for table in report.tables:
        rendered = RichTable(title=table.title, show_lines=True)
        for header in table.headers:
            rendered.add_column(header, overflow="fold")
        for row in table.rows:
            rendered.add_row(*map(Text, row))
        console.print(rendered)


def plain(table: Table) -> str:
    """Return the table as text in columns."""
    rows = [[cell.split("\n") for cell in row] for row in [table.headers, *table.rows]]
    columns = zip(*rows, strict=True)
    widths = [max(map(len, itertools.chain(*column))) for column in columns]
    lines = [table.title]
    for row in rows:
        for parts in itertools.zip_longest(*row, fillvalue=""):
            cells = map(str.ljust, parts, widths)
            lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
