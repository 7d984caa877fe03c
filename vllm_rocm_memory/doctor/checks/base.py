# SPDX-License-Identifier: Apache-2.0
"""Which vLLM it is, and whether the series knows it."""

import email
import re
from collections.abc import Iterable, Mapping

from vllm_rocm_memory.doctor.checks.series import refused
from vllm_rocm_memory.doctor.finding import Finding, State
from vllm_rocm_memory.doctor.machine import Machine
from vllm_rocm_memory.series import SeriesError, operations
from vllm_rocm_memory.series.bases import UnknownBaseError, recognise
from vllm_rocm_memory.series.target import Target

_VERSION_FILE = "vllm/_version.py"
_MOST_FILES = 5


def run(machine: Machine) -> Finding:
    target = machine.target
    known = " or ".join(machine.series.bases)
    if target is None:
        return Finding(
            State.MISSING,
            "this Python has no vLLM",
            remedy=f"Install vLLM {known}, or name one with --target PATH",
        )
    try:
        bases, strange = _bases(machine, target)
    except (SeriesError, OSError) as error:
        return refused(error)
    found = f"vLLM {version(target) or 'of unknown version'} in {target.root}"
    if target.transaction.interrupted:
        return Finding(
            State.PARTIAL,
            f"{found}, of which a change was interrupted",
            remedy=f"Run `{machine.command('apply')}`, which completes it",
        )
    if problem := machine.import_problem:
        return _not_importable(machine, found, problem)
    if not strange:
        return Finding(State.SUCCESS, f"{found}, known as {' and '.join(bases)}")
    if all(_was_allowed(target, name) for name in strange):
        return _allowed(found, strange, known)
    return Finding(
        State.MISSING,
        f"{found}, an unknown base",
        _files(strange.values()),
        f"Install vLLM {known}, or run "
        f"`{machine.command('apply --allow-unknown-base')}`, which applies the series "
        "if every edit and every import still fits",
    )


def _allowed(found: str, strange: Mapping[str, str], known: str) -> Finding:
    return Finding(
        State.PARTIAL,
        f"{found}, an unknown base on which the series was allowed: nobody has tested "
        "them together",
        _files(strange.values()),
        f"Install vLLM {known} to have a tested one",
    )


def _not_importable(machine: Machine, found: str, problem: str) -> Finding:
    return Finding(
        State.MISSING,
        f"{found} cannot be imported: {problem}",
        remedy=f"Make `{machine.python('import vllm')}` work: install what it lacks, "
        "or reinstall vLLM",
    )


def _files(sentences: Iterable[str]) -> tuple[str, ...]:
    """What is strange to some files, a line each, and how many more there are."""
    files = [*dict.fromkeys(file for text in sentences for file in text.split("; "))]
    more = len(files) - _MOST_FILES
    rest = (f"and {more} more",) if more > 0 else ()
    return (*files[:_MOST_FILES], *rest)


def version(target: Target) -> str | None:
    """The version that the distribution or the checkout says it is."""
    for record in target.records:
        metadata = target.read(record.replace("RECORD", "METADATA")) or b""
        if found := email.message_from_bytes(metadata)["Version"]:
            return str(found)
    text = (target.read(_VERSION_FILE) or b"").decode(errors="replace")
    match = re.search(r"^(?:__version__ = )?version = ['\"]([^'\"]+)", text, re.M)
    return match[1] if match else None


def _bases(machine: Machine, target: Target) -> tuple[list[str], dict[str, str]]:
    """The bases that patches are for, and what is strange to each of the others."""
    bases, strange = set(), {}
    with target.locked(exclusive=False):
        for patch in machine.series.patches:
            try:
                if not operations.skip_reason(target, patch):
                    bases.add(recognise(machine.series, patch, target))
            except UnknownBaseError as error:
                strange[patch.name] = str(error)
    return sorted(bases), strange


def _was_allowed(target: Target, name: str) -> bool:
    applied = target.journal.patches.get(name)
    return applied is not None and applied.base is None
