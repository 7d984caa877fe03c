# SPDX-License-Identifier: Apache-2.0
"""Whether copies between host and device are made by copy engines or by kernels."""

from collections.abc import Mapping

from vllm_rocm_memory.doctor.device import is_before, known_device, rocm
from vllm_rocm_memory.doctor.facts import HIP, KERNEL, RuntimeFacts
from vllm_rocm_memory.doctor.finding import Finding, State
from vllm_rocm_memory.doctor.machine import Machine
from vllm_rocm_memory.doctor.probe_copies import BATCHES, RECTANGLES

# From this release on batches are asked of copy engines.
_BATCHES_ON_ENGINES = (7, 16)
_SDMA = "HSA_ENABLE_SDMA"
_NEWER = (
    f"Install {rocm(_BATCHES_ON_ENGINES)} or later; until then leave copy_engine at "
    "auto"
)
_VARIABLES = (_SDMA, "HSA_ENABLE_PEER_SDMA", "GPU_FORCE_BLIT_COPY_SIZE")


def run(machine: Machine) -> Finding:
    facts = known_device(machine)
    if isinstance(facts, Finding):
        return facts
    details = _details(facts, machine.environment)
    if facts.vendor == HIP and machine.environment.get(_SDMA) == "0":
        return Finding(
            State.MISSING,
            f"{_SDMA}=0 turns the SDMA engines off: copies run as kernels and slow "
            "down what computes beside them",
            details,
            f"unset {_SDMA}",
        )
    by_kernel = [copy.name for copy in facts.copies if copy.engine == KERNEL]
    if by_kernel == [BATCHES]:
        return _batches_only(facts, details)
    if by_kernel:
        return Finding(
            State.MISSING,
            f"kernels make {' and '.join(by_kernel)}, which slows down what computes "
            "beside them",
            details,
            _remedy(facts, machine.environment),
        )
    unknown = [copy.name for copy in facts.copies if copy.engine is None]
    if unknown or not facts.copies:
        return _not_known(facts, details)
    if _not_tried(facts) and is_before(facts, _BATCHES_ON_ENGINES):
        return _batches_not_tried(facts, details)
    names = ", ".join(copy.name for copy in facts.copies)
    return Finding(State.SUCCESS, f"copy engines make {names}", details)


def _batches_only(facts: RuntimeFacts, details: tuple[str, ...]) -> Finding:
    remedy = (
        _NEWER
        if is_before(facts, _BATCHES_ON_ENGINES)
        else "Leave copy_engine at auto, which takes rectangles where it can"
    )
    return Finding(
        State.PARTIAL,
        f"copy engines make other copies, and kernels {BATCHES}",
        details,
        remedy,
    )


def _not_tried(facts: RuntimeFacts) -> list[str]:
    """Copies of KV blocks that were not watched, as on AMD hardware."""
    tried = {copy.name for copy in facts.copies}
    return [name for name in (RECTANGLES, BATCHES) if name not in tried]


def _batches_not_tried(facts: RuntimeFacts, details: tuple[str, ...]) -> Finding:
    return Finding(
        State.PARTIAL,
        f"copy engines make plain copies; {BATCHES} were not watched, and nothing asks "
        f"{facts.product} to make them on copy engines",
        details,
        _NEWER,
    )


def _not_known(facts: RuntimeFacts, details: tuple[str, ...]) -> Finding:
    why = facts.copies_unknown or "; ".join(copy.seen for copy in facts.copies)
    if facts.simulated:
        return Finding(State.NOT_AVAILABLE, f"not known: {why}", details)
    if facts.copies_unknown and facts.vendor == HIP:
        remedy = "Do what the line says, or run again while no server fills the device"
        return Finding(State.PARTIAL, f"not known: {why}", details, remedy)
    remedy = (
        "Put rocprofv3 (package rocprofiler-sdk) on the path and run again, with "
        f"{_SDMA} not set"
        if facts.vendor == HIP
        else "Trace the server with `nsys profile`, and look for Memcpy HtoD and DtoH"
    )
    return Finding(State.PARTIAL, f"not known: {why}", details, remedy)


def _remedy(facts: RuntimeFacts, environment: Mapping[str, str]) -> str:
    if facts.vendor != HIP:
        return "Update the NVIDIA driver"
    blit_size = "GPU_FORCE_BLIT_COPY_SIZE"
    if blit_size in environment:
        return f"unset {blit_size}"
    return (
        "Look for SDMA in `dmesg`, and for AtomicOpsCap in `lspci -vv` of the GPU and "
        "the bridges above it: without PCIe atomics, as in some virtual machines, "
        "copies are kernels"
    )


def _details(facts: RuntimeFacts, environment: Mapping[str, str]) -> tuple[str, ...]:
    seen = [f"{copy.name}: {copy.seen}" for copy in facts.copies]
    if facts.copies and (not_tried := _not_tried(facts)):
        seen.append(f"{', '.join(not_tried)}: not watched")
    if facts.vendor != HIP:
        return tuple(seen)
    given = [
        f"{name}={environment[name]}" for name in _VARIABLES if name in environment
    ]
    return (*seen, ", ".join(given) or f"{', '.join(_VARIABLES)} are not set")
