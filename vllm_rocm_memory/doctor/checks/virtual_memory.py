# SPDX-License-Identifier: Apache-2.0
"""Whether the device has the virtual memory that sleep mode is made of."""

from vllm_rocm_memory.doctor.device import is_before, known_device, rocm
from vllm_rocm_memory.doctor.facts import HIP, RuntimeFacts
from vllm_rocm_memory.doctor.finding import Finding, State
from vllm_rocm_memory.doctor.machine import Machine

# rocm-systems#4363: memory comes back when it is unmapped.
_GIVES_BACK = (7, 13)


def run(machine: Machine) -> Finding:
    facts = known_device(machine)
    if isinstance(facts, Finding):
        return facts
    if not facts.virtual_memory:
        return _none(facts)
    if is_before(facts, _GIVES_BACK):
        return Finding(
            State.PARTIAL,
            f"supported; {facts.product} may give memory back only when its address is "
            "freed",
            (
                "A sleep frees each address and reserves it again at once. Where "
                "something else takes it in between, that sleep fails and says so.",
            ),
            f"Install {rocm(_GIVES_BACK)} or later, which needs no such detour",
        )
    return Finding(State.SUCCESS, f"supported by {facts.product}")


def _none(facts: RuntimeFacts) -> Finding:
    said = "has no" if facts.virtual_memory is False else "does not say that it has"
    update = (
        "Update amdgpu and ROCm; a container or guest needs the whole GPU"
        if facts.vendor == HIP
        else "Update the NVIDIA driver; a guest needs the whole GPU"
    )
    return Finding(
        State.MISSING,
        f"the device {said} virtual memory management, so sleep mode cannot work",
        remedy=f"{update}; until then serve without --enable-sleep-mode",
    )
