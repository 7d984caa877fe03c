# SPDX-License-Identifier: Apache-2.0
"""The amdgpu driver, and who clears the memory that it hands out."""

import re

from vllm_rocm_memory.doctor.facts import HIP
from vllm_rocm_memory.doctor.finding import Finding, State
from vllm_rocm_memory.doctor.machine import Machine
from vllm_rocm_memory.series import SeriesError, operations
from vllm_rocm_memory.series.bases import recognise
from vllm_rocm_memory.series.definition import Patch
from vllm_rocm_memory.series.target import Target

# Older drivers hand out memory with what its last owner left there.
_CLEARS = (6, 14)
_PATCH = "cumem-sleep"


def run(machine: Machine) -> Finding:
    module = machine.root / "sys/module/amdgpu"
    facts = machine.runtime
    if not module.exists():
        simulated = not isinstance(facts, str) and facts.simulated
        why = "the device is simulated" if simulated else "amdgpu is not loaded"
        return Finding(State.NOT_AVAILABLE, f"{why}, so there is no driver to look at")
    if not isinstance(facts, str) and facts.vendor not in (HIP, None):
        return Finding(
            State.NOT_AVAILABLE, "amdgpu is not the driver of CUDA's devices"
        )
    version = (machine.read("sys/module/amdgpu/version") or "").strip()
    who = _who_clears(machine)
    if version and _numbers(version) >= _CLEARS:
        details = (f"On wake memory is cleared all the same, {who}.",) if who else ()
        return Finding(State.SUCCESS, f"amdgpu {version}", details)
    kernel = (machine.read("proc/sys/kernel/osrelease") or "unknown").strip()
    named = f"amdgpu {version}" if version else f"the amdgpu of kernel {kernel}"
    may = "hands out" if version else "may hand out"
    summary = f"{named} {may} memory with old contents"
    if who:
        return Finding(State.SUCCESS, f"{summary}; it is cleared on wake, {who}")
    return Finding(
        State.MISSING,
        f"{summary}, and nothing is known to clear it on wake: a KV cache may wake up "
        "with garbage",
        remedy=f"Run `{machine.command('apply')}`, or install amdgpu 6.14 (ROCm 7.0) "
        "or later",
    )


def _who_clears(machine: Machine) -> str | None:
    """Who does; None where that is not known, as of a vLLM that was changed."""
    if machine.target is None:
        return None
    try:
        [patch] = machine.series.select([_PATCH])
        [row] = operations.status(machine.target, machine.series, [_PATCH])
        if row.state is operations.State.APPLIED:
            return "by the series"
        return _by_base(machine, patch, machine.target)
    except (SeriesError, OSError):
        return None


def _by_base(machine: Machine, patch: Patch, target: Target) -> str | None:
    """Every base that is known does it (vllm#59523)."""
    if _PATCH in target.journal.patches:
        return None
    base = recognise(machine.series, patch, target)
    return f"by vLLM {base} itself, one allocation at a time"


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
