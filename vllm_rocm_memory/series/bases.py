# SPDX-License-Identifier: Apache-2.0
"""Bases: upstream versions that the series knows by the sums of the touched files.

``python -m vllm_rocm_memory.series.bases TREE VERSION`` enters the vLLM in TREE, an
unpacked source distribution or an installation, in ``bases.json``. Run it whenever a
step begins to touch another file of upstream's, and for each new base.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from vllm_rocm_memory.series import SeriesError
from vllm_rocm_memory.series.definition import (
    DEFINITION,
    Add,
    AddBuilt,
    Patch,
    Series,
    load,
)
from vllm_rocm_memory.series.target import Target
from vllm_rocm_memory.series.transaction import digest


class UnknownBaseError(SeriesError):
    """The target's files are not those of a base we know."""


def recognise(series: Series, patch: Patch, target: Target) -> str:
    """The version whose files `patch` would touch in `target`.

    Raises:
        UnknownBaseError: naming the files that fit no base, with both sums.
    """
    for step in patch.steps:
        if not isinstance(step, Add | AddBuilt):
            continue
        found = digest(target.original(step.file))
        if found is not None:
            raise UnknownBaseError(
                f"{step.file} has sha256 {found}, expected no such file"
            )
    files = series.upstream_files(patch)
    sums = {file: digest(target.original(file)) for file in files}
    fitting = [
        version
        for version, base in series.bases.items()
        if all(sums[file] == base.get(file) for file in files)
    ]
    if fitting:
        # Files that bases have in common do not tell them apart; others may.
        return max(fitting, key=lambda version: _alike(series, version, target))
    # Where each file fits some base, but not all the same one, every file is named.
    strange = [f for f in files if sums[f] not in _known(series, f).values()] or files
    raise UnknownBaseError("; ".join(_mismatch(series, f, sums[f]) for f in strange))


def _alike(series: Series, version: str, target: Target) -> int:
    base = series.bases[version]
    return sum(digest(target.original(file)) == base[file] for file in base)


def _known(series: Series, file: str) -> dict[str, str]:
    return {v: base[file] for v, base in series.bases.items() if file in base}


def _mismatch(series: Series, file: str, found: str | None) -> str:
    expected = " or ".join(f"{s} ({v})" for v, s in _known(series, file).items())
    return f"{file} has sha256 {found or 'of no file'}, expected {expected or 'none'}"


def measure(series: Series, target: Target) -> dict[str, str]:
    """The sums that make `target` a base of `series`.

    Raises:
        SeriesError: a file that the series touches is not there.
    """
    files: Iterable[str] = {
        file for patch in series.patches for file in series.upstream_files(patch)
    }
    sums = {}
    for file in sorted(files):
        found = digest(target.original(file))
        if found is None:
            raise SeriesError(f"{target.root} has no {file}")
        sums[file] = found
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_rocm_memory.series.bases",
        description="Enter a vLLM tree in bases.json.",
    )
    parser.add_argument("tree", type=Path, help="a folder that holds vllm/")
    parser.add_argument("version", help="the version that the tree is")
    arguments = parser.parse_args()
    try:
        series = load()
        sums = measure(series, Target.find(arguments.tree))
    except SeriesError as error:
        parser.error(str(error))
    bases = dict(sorted({**series.bases, arguments.version: sums}.items()))
    text = json.dumps(bases, indent=2)
    DEFINITION.with_name("bases.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
