# SPDX-License-Identifier: Apache-2.0
"""Whether the vLLM has the series, as it was applied."""

from collections.abc import Sequence

from vllm_rocm_memory.doctor.finding import Finding, State
from vllm_rocm_memory.doctor.machine import Machine
from vllm_rocm_memory.series import SeriesError, operations
from vllm_rocm_memory.series.operations import PatchStatus
from vllm_rocm_memory.series.operations import State as Applied
from vllm_rocm_memory.series.target import Target

Rows = Sequence[PatchStatus]


def run(machine: Machine) -> Finding:
    if machine.target is None:
        return Finding(State.NOT_AVAILABLE, "there is no vLLM to apply it to")
    try:
        rows = operations.status(machine.target, machine.series)
    except (SeriesError, OSError) as error:
        return refused(error)
    by_state = {state: [row for row in rows if row.state is state] for state in Applied}
    if drifted := by_state[Applied.DRIFTED]:
        return _drifted(machine, machine.target, drifted)
    if unknown := by_state[Applied.UNKNOWN_BASE]:
        return _unknown_base(machine, unknown)
    if missing := by_state[Applied.NOT_APPLIED]:
        return _not_applied(machine, missing, by_state[Applied.APPLIED])
    if reason := machine.target.journal.not_verified:
        return _not_verified(machine, reason)
    return Finding(
        State.SUCCESS,
        f"applied and intact: {_names(by_state[Applied.APPLIED]) or 'none is needed'}",
        (
            *_reasons(by_state[Applied.UPSTREAM_HAS_IT]),
            *_not_importable(machine.target),
        ),
    )


def refused(error: SeriesError | OSError) -> Finding:
    """Why there is no telling, and what to do about that."""
    if isinstance(error, OSError):
        remedy = f"Let this user read {error.filename}"
        return Finding(State.MISSING, str(error), remedy=remedy)
    # They end in it: "what is wrong: what to do".
    summary, _, remedy = str(error).rpartition(": ")
    return Finding(State.MISSING, summary, remedy=remedy)


def _reasons(rows: Rows) -> tuple[str, ...]:
    return tuple(f"{row.name}: {row.state} ({row.reason})" for row in rows)


def _names(rows: Rows) -> str:
    return ", ".join(row.name for row in rows)


def _not_importable(target: Target) -> tuple[str, ...]:
    """What did not import when the series was applied, with or without it."""
    failures = target.journal.not_importable
    return tuple(
        operations.does_not_import(module, error) for module, error in failures.items()
    )


def _drifted(machine: Machine, target: Target, rows: Rows) -> Finding:
    drifts = target.drift()
    files = ", ".join(drift.path for drift in drifts)
    apply = machine.command("apply")
    if all(drift.found == drift.original for drift in drifts):
        remedy = f"Run `{apply}`"
    else:
        remedy = f"Undo that change or reinstall vLLM, then run `{apply}`"
    return Finding(
        State.MISSING,
        f"changed after the series was applied: {files} ({_names(rows)})",
        tuple(drift.sentence for drift in drifts),
        remedy,
    )


def _unknown_base(machine: Machine, rows: Rows) -> Finding:
    return Finding(
        State.MISSING,
        f"not applied, and this vLLM is an unknown base for {_names(rows)}",
        remedy=f"Install vLLM {' or '.join(machine.series.bases)} and run "
        f"`{machine.command('apply')}`, or run "
        f"`{machine.command('apply --allow-unknown-base')}`",
    )


def _not_applied(machine: Machine, missing: Rows, applied: Rows) -> Finding:
    return Finding(
        State.PARTIAL if applied else State.MISSING,
        f"not applied: {_names(missing)}",
        _reasons(missing),
        f"Run `{machine.command('apply')}`",
    )


def _not_verified(machine: Machine, reason: str) -> Finding:
    return Finding(
        State.PARTIAL,
        f"the series is applied, and no import could verify it: {reason}",
        remedy=f"Make `{machine.python('import vllm')}` work, then run "
        f"`{machine.command('revert')}` and `{machine.command('apply')}`",
    )
