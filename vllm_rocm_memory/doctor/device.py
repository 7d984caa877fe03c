# SPDX-License-Identifier: Apache-2.0
"""What the checks of a device have in common."""

from vllm_rocm_memory.doctor.facts import HIP, RuntimeFacts
from vllm_rocm_memory.doctor.finding import Finding, State
from vllm_rocm_memory.doctor.machine import Machine

# HIP counts apart from ROCm from ROCm 10.0 on, which has HIP 7.15.
_ROCM = {(7, 15): "10.0", (7, 16): "10.1", (7, 17): "10.2"}


def known_device(machine: Machine) -> RuntimeFacts | Finding:
    """The runtime's facts, or the finding of a check that needs a device."""
    facts = machine.runtime
    if isinstance(facts, str):
        return Finding(State.NOT_AVAILABLE, "the GPU runtime gave no answer")
    if facts.vendor is None or not facts.devices:
        return Finding(State.NOT_AVAILABLE, f"no device: {facts.problem}")
    return facts


def rocm(release: tuple[int, int]) -> str:
    """``HIP 7.16 (ROCm 10.1)``, for the release of HIP that something begins with."""
    major, minor = release
    named = _ROCM.get(release, f"{major}.{minor}")
    return f"HIP {major}.{minor} (ROCm {named})"


def is_before(facts: RuntimeFacts, release: tuple[int, int]) -> bool:
    """Is this a HIP before `release`? Of unknown version it is taken for an old one."""
    return facts.vendor == HIP and facts.release < release
