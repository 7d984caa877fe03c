# SPDX-License-Identifier: Apache-2.0
"""Which HIP runtime or CUDA driver PyTorch uses, and whether it is new enough."""

import re
import sys

from vllm_rocm_memory.doctor.device import rocm
from vllm_rocm_memory.doctor.facts import CUDA, HIP, RuntimeFacts
from vllm_rocm_memory.doctor.finding import Finding, State
from vllm_rocm_memory.doctor.machine import RUNTIME_PROBE, Machine
from vllm_rocm_memory.doctor.runtime_probe import NO_TORCH
from vllm_rocm_memory.sim.platform import PROFILE_VARIABLE

# hipMemcpyBatchAsync and cuMemcpyBatchAsync come with these.
_LEAST_HIP, _LEAST_CUDA = (7, 1), (12, 8)
_VISIBLE = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def run(machine: Machine) -> Finding:
    facts = machine.runtime
    if isinstance(facts, str):
        return Finding(
            State.MISSING,
            f"a process that loads the GPU runtime gives no answer: {facts}",
            remedy="Run vllm-rocm-memory with that Python"
            if machine.foreign
            else f"Read what `{sys.executable} -m {RUNTIME_PROBE}` and `dmesg` say; "
            "where it only takes long, give --probe-timeout 600",
        )
    if facts.torch is None:
        return _no_torch(machine, facts)
    if facts.vendor is None:
        return _no_runtime(machine, facts)
    details = _details(machine, facts)
    if facts.version and (too_old := _too_old(facts, details)):
        return too_old
    if not facts.devices or (facts.problem and facts.torch_vendor):
        return _no_device(facts, details)
    if len(facts.libraries) > 1:
        return Finding(
            State.PARTIAL,
            f"{len(facts.libraries)} runtimes are loaded; {facts.libraries[0]} is in "
            "use",
            details,
            "Leave one of them: take the other's folder out of LD_LIBRARY_PATH and "
            "LD_PRELOAD, or uninstall the package that brings it. Streams of one "
            "runtime mean nothing to another",
        )
    if not facts.version:
        return Finding(
            State.PARTIAL,
            f"{facts.libraries[0]} does not tell its version, and is taken for an old "
            "one",
            details,
            f"Install {rocm((7, 16))}, and PyTorch's build for it"
            if facts.vendor == HIP
            else "Install the NVIDIA driver again",
        )
    if ignored := _ignored_profile(machine, facts):
        return Finding(
            State.PARTIAL,
            f"{_found(facts)}; {ignored}",
            details,
            f"`unset {PROFILE_VARIABLE}`, or simulate in an environment with the CPU "
            "builds of PyTorch and vLLM",
        )
    return Finding(State.SUCCESS, _found(facts), details)


def _ignored_profile(machine: Machine, facts: RuntimeFacts) -> str | None:
    profile = machine.environment.get(PROFILE_VARIABLE)
    if not profile or facts.torch_vendor is None:
        return None
    return (
        f"{PROFILE_VARIABLE}={profile} simulates nothing with PyTorch's "
        f"{facts.torch_vendor.upper()} build"
    )


def _no_torch(machine: Machine, facts: RuntimeFacts) -> Finding:
    problem = facts.problem or NO_TORCH
    details = _details(machine, facts) if facts.libraries else ()
    if problem != NO_TORCH:
        remedy = f"Make `{machine.python('import torch')}` work"
        return Finding(State.MISSING, problem, details, remedy)
    remedy = "Install the build of PyTorch that vLLM asks for, for this GPU"
    missing = machine.target is not None
    state = State.MISSING if missing else State.NOT_AVAILABLE
    return Finding(state, problem, details, remedy)


def _no_runtime(machine: Machine, facts: RuntimeFacts) -> Finding:
    problem = facts.problem or "there is no GPU runtime"
    profile = machine.environment.get(PROFILE_VARIABLE)
    if profile and facts.torch_vendor is None:
        return Finding(
            State.MISSING,
            f"{PROFILE_VARIABLE}={profile}: {problem}",
            remedy=_simulator_remedy(problem),
        )
    if facts.torch_vendor:
        return Finding(
            State.MISSING,
            problem,
            remedy="Install ROCm's runtime, or PyTorch's wheels that bring it"
            if facts.torch_vendor == HIP
            else "Install the NVIDIA driver; in a container, start it with --gpus all",
        )
    return Finding(
        State.NOT_AVAILABLE,
        problem,
        remedy="Install the ROCm or CUDA build of PyTorch where there is a GPU. "
        f"{PROFILE_VARIABLE}=7.16 shows what a release would say",
    )


def _simulator_remedy(problem: str) -> str:
    """Of the simulator's refusal, which begins with the variable where it is one's."""
    named = re.match(r"HIPSIM_\w+", problem)
    if named is None:
        return f"Do what the line says, or `unset {PROFILE_VARIABLE}`"
    name = named[0]
    example = ", such as 7.16," if name == PROFILE_VARIABLE else ""
    return f"Set {name} to what the line allows{example} or `unset {name}`"


def _no_device(facts: RuntimeFacts, details: tuple[str, ...]) -> Finding:
    summary = f"{facts.product} at {facts.libraries[0]}: {facts.problem}"
    if facts.torch_vendor is None:
        return Finding(State.NOT_AVAILABLE, summary, details)
    remedy = (
        "Check the driver (`rocminfo`), the user's groups (video, render) and the "
        "variables above; in a container, start it with --device /dev/kfd --device "
        "/dev/dri"
        if facts.vendor == HIP
        else "Check the driver (`nvidia-smi`) and the variables above; in a container, "
        "start it with --gpus all"
    )
    return Finding(State.MISSING, summary, details, remedy)


def _too_old(facts: RuntimeFacts, details: tuple[str, ...]) -> Finding | None:
    needs = "too old: it cannot copy batches of KV blocks"
    if facts.vendor == HIP and facts.release < _LEAST_HIP:
        return Finding(
            State.MISSING,
            f"{facts.product} at {facts.libraries[0]} is {needs}",
            details,
            f"Install {rocm(_LEAST_HIP)} or later, and PyTorch's build for it",
        )
    if facts.vendor == CUDA and facts.release < _LEAST_CUDA:
        return Finding(
            State.MISSING,
            f"the driver of {facts.product} is {needs}",
            details,
            "Install an NVIDIA driver of CUDA 12.8 or later",
        )
    return None


def _found(facts: RuntimeFacts) -> str:
    devices = f"{facts.devices} device{'s' * (facts.devices != 1)}"
    name = f" ({facts.device_name})" if facts.device_name else ""
    simulated = ", simulated" if facts.simulated else ""
    return f"{facts.product}{simulated}, {devices}{name}"


def _details(machine: Machine, facts: RuntimeFacts) -> tuple[str, ...]:
    in_use, *others = facts.libraries or ("",)
    if facts.simulated:
        whose = f"the simulator's, by {PROFILE_VARIABLE}"
    elif facts.loaded_by_torch:
        whose = f"the one that PyTorch {facts.torch} uses"
    else:
        whose = "not PyTorch's"
    visible = [
        f"{name}={machine.environment[name]}"
        for name in _VISIBLE
        if name in machine.environment
    ]
    loaded = [f"{in_use}: {whose}", *(f"{path}: loaded too" for path in others)]
    return (*loaded, *visible)
