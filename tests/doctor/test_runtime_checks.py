# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of the GPU runtime: each outcome of a check, and the probe."""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_rocm_memory import serve
from vllm_rocm_memory.doctor import activity, probe_copies, runtime_probe
from vllm_rocm_memory.doctor import machine as machine_module
from vllm_rocm_memory.doctor.checks import CHECKS
from vllm_rocm_memory.doctor.facts import (
    COPY_ENGINE,
    CUDA,
    HIP,
    KERNEL,
    BatchCopies,
    ProbeCopy,
    RuntimeFacts,
    ServingFacts,
)
from vllm_rocm_memory.doctor.finding import Finding, State
from vllm_rocm_memory.doctor.machine import Machine
from vllm_rocm_memory.doctor.probe_copies import BATCHES, PLAIN, RECTANGLES
from vllm_rocm_memory.doctor.runtime_probe import NO_END, NO_TORCH
from vllm_rocm_memory.sim import hipsim

from .conftest import Answer, MakeMachine, SmallVllm, Write

LIBRARY = "/opt/rocm/lib/libamdhip64.so.7"
SUCCESS, PARTIAL = State.SUCCESS, State.PARTIAL
MISSING, NOT_AVAILABLE = State.MISSING, State.NOT_AVAILABLE


def copies(plain: str | None, rect: str | None, batch: str | None) -> Any:
    named = {PLAIN: plain, RECTANGLES: rect, BATCHES: batch}
    return tuple(ProbeCopy(name, engine, "seen") for name, engine in named.items())


ALL_ON_ENGINES = copies(COPY_ENGINE, COPY_ENGINE, COPY_ENGINE)
AMD = RuntimeFacts(
    vendor=HIP,
    libraries=(LIBRARY,),
    torch="2.13.0+rocm10.0.0",
    torch_vendor=HIP,
    loaded_by_torch=True,
    version=71626361,
    devices=8,
    device_name="AMD Instinct MI300X",
    virtual_memory=True,
    large_bar=True,
    batches=BatchCopies(0x100, 1, False, "hipMemcpyBatchAsync, flags 0x100"),
    copies=ALL_ON_ENGINES,
)
NVIDIA = replace(
    AMD,
    vendor=CUDA,
    libraries=("/usr/lib/libcuda.so.1",),
    torch="2.13.0+cu130",
    torch_vendor=CUDA,
    version=13000,
    devices=1,
    device_name="NVIDIA H200",
    large_bar=None,
    batches=BatchCopies(0, 1, False, "cuMemcpyBatchAsync, flags 0x0"),
)
LAPTOP = RuntimeFacts(
    torch="2.13.0+cpu",
    problem="PyTorch was built for no GPU, and no GPU runtime is installed",
)
SIMULATED = replace(
    AMD, torch="2.13.0+cpu", torch_vendor=None, loaded_by_torch=False, simulated="7.16"
)
NO_DEVICE = "it finds no device (hipErrorNoDevice, 100)"


def hip(major: int, minor: int, **changes: Any) -> RuntimeFacts:
    return replace(AMD, version=major * 10_000_000 + minor * 100_000, **changes)


def look(name: str, machine: Machine) -> Finding:
    [check] = (check for check in CHECKS if check.name == name)
    return check.run(machine)


# Check, what is known of the runtime, the environment; the state, words of the summary
# or details, words of the remedy.
Row = tuple[str, RuntimeFacts | str, dict[str, str], State, list[str], list[str]]

ROWS: dict[str, Row] = {
    "AMD": (
        "hip-runtime",
        AMD,
        {},
        SUCCESS,
        ["HIP 7.16.26361, 8 devices (AMD Instinct MI300X)", LIBRARY, "that PyTorch 2"],
        [],
    ),
    "NVIDIA": (
        "hip-runtime",
        NVIDIA,
        {"CUDA_VISIBLE_DEVICES": "3"},
        SUCCESS,
        ["CUDA 13.0, 1 device (NVIDIA H200)", "CUDA_VISIBLE_DEVICES=3"],
        [],
    ),
    "simulated": (
        "hip-runtime",
        SIMULATED,
        {"HIPSIM_PROFILE": "7.16"},
        SUCCESS,
        ["HIP 7.16.26361, simulated", "the simulator's, by HIPSIM_PROFILE"],
        [],
    ),
    "no PyTorch": (
        "hip-runtime",
        RuntimeFacts(problem=NO_TORCH),
        {},
        NOT_AVAILABLE,
        ["PyTorch is not installed"],
        ["Install the build of PyTorch"],
    ),
    "broken PyTorch": (
        "hip-runtime",
        RuntimeFacts(problem="PyTorch cannot be imported: OSError: libhsa is missing"),
        {},
        MISSING,
        ["libhsa is missing"],
        [f"{sys.executable} -P -c 'import torch'"],
    ),
    "broken PyTorch beside ROCm": (
        "hip-runtime",
        replace(
            AMD, torch=None, torch_vendor=None, problem="PyTorch cannot be imported"
        ),
        {},
        MISSING,
        ["PyTorch cannot be imported", LIBRARY],
        ["import torch"],
    ),
    "profile of a GPU build": (
        "hip-runtime",
        AMD,
        {"HIPSIM_PROFILE": "7.2.3"},
        PARTIAL,
        ["HIP 7.16.26361, 8", "HIPSIM_PROFILE=7.2.3 simulates nothing", "HIP build"],
        ["unset HIPSIM_PROFILE", "CPU"],
    ),
    "no such switch": (
        "hip-runtime",
        replace(LAPTOP, problem="HIPSIM_SWITCHES is 'x'; it must be a=1"),
        {"HIPSIM_PROFILE": "7.16"},
        MISSING,
        ["HIPSIM_SWITCHES is 'x'"],
        ["Set HIPSIM_SWITCHES to", "unset HIPSIM_SWITCHES"],
    ),
    "no simulator": (
        "hip-runtime",
        replace(LAPTOP, problem="/x.so is not built: run `make setup`"),
        {"HIPSIM_PROFILE": "7.16"},
        MISSING,
        ["make setup"],
        ["unset HIPSIM_PROFILE"],
    ),
    "two runtimes": (
        "hip-runtime",
        replace(AMD, libraries=(LIBRARY, "/venv/libamdhip64.so")),
        {},
        PARTIAL,
        [f"2 runtimes are loaded; {LIBRARY} is in use", "/venv/libamdhip64.so: loaded"],
        ["LD_LIBRARY_PATH"],
    ),
    "unknown version": (
        "hip-runtime",
        replace(AMD, version=0),
        {},
        PARTIAL,
        [LIBRARY, "does not tell its version"],
        ["HIP 7.16 (ROCm 10.1)"],
    ),
    "unknown driver": (
        "hip-runtime",
        replace(NVIDIA, version=0),
        {},
        PARTIAL,
        ["does not tell its version"],
        ["NVIDIA driver"],
    ),
    "old runtime": (
        "hip-runtime",
        hip(7, 0),
        {},
        MISSING,
        ["HIP 7.0.0", LIBRARY, "too old"],
        ["HIP 7.1 (ROCm 7.1) or later"],
    ),
    "oldest runtime": ("hip-runtime", hip(7, 1), {}, SUCCESS, ["HIP 7.1.0"], []),
    "old driver": (
        "hip-runtime",
        replace(NVIDIA, version=12070),
        {},
        MISSING,
        ["CUDA 12.7", "too old"],
        ["CUDA 12.8"],
    ),
    "oldest driver": (
        "hip-runtime",
        replace(NVIDIA, version=12080),
        {},
        SUCCESS,
        ["CUDA 12.8"],
        [],
    ),
    "crashed runtime": (
        "hip-runtime",
        "the probe was ended by SIGSEGV: it printed nothing",
        {},
        MISSING,
        ["SIGSEGV"],
        ["vllm_rocm_memory.doctor.runtime_probe", "dmesg", "--probe-timeout 600"],
    ),
    "no AMD device": (
        "hip-runtime",
        replace(AMD, devices=0, problem=NO_DEVICE),
        {"ROCR_VISIBLE_DEVICES": "9"},
        MISSING,
        ["hipErrorNoDevice", "ROCR_VISIBLE_DEVICES=9"],
        ["--device /dev/kfd", "render"],
    ),
    "no NVIDIA device": (
        "hip-runtime",
        replace(NVIDIA, devices=0, problem="it finds no device (CUDA error 100)"),
        {},
        MISSING,
        ["CUDA error 100"],
        ["nvidia-smi", "--gpus all"],
    ),
    "PyTorch cannot use it": (
        "hip-runtime",
        replace(AMD, problem="HIP error: invalid device function"),
        {},
        MISSING,
        ["invalid device function"],
        ["rocminfo"],
    ),
    "no library of PyTorch's": (
        "hip-runtime",
        replace(LAPTOP, torch_vendor=HIP, problem="it cannot be loaded"),
        {},
        MISSING,
        ["it cannot be loaded"],
        ["ROCm's runtime"],
    ),
    "no driver for PyTorch": (
        "hip-runtime",
        replace(LAPTOP, torch_vendor=CUDA, problem="Found no NVIDIA driver"),
        {},
        MISSING,
        ["Found no NVIDIA driver"],
        ["NVIDIA driver"],
    ),
    "no such release": (
        "hip-runtime",
        replace(LAPTOP, problem="HIPSIM_PROFILE is '9.9'; it must be one of 7.1 7.16"),
        {"HIPSIM_PROFILE": "9.9"},
        MISSING,
        ["HIPSIM_PROFILE=9.9", "one of 7.1 7.16"],
        ["unset"],
    ),
    "laptop": (
        "hip-runtime",
        LAPTOP,
        {},
        NOT_AVAILABLE,
        ["no GPU runtime is installed"],
        ["HIPSIM_PROFILE=7.16"],
    ),
    "ROCm without a device or PyTorch for it": (
        "hip-runtime",
        replace(SIMULATED, simulated=None, devices=0, problem=NO_DEVICE),
        {},
        NOT_AVAILABLE,
        ["hipErrorNoDevice", "not PyTorch's"],
        [],
    ),
    "flag": ("copy-flags", AMD, {}, SUCCESS, ["flags 0x100, numAttrs 1"], []),
    "no flag on CUDA": (
        "copy-flags",
        NVIDIA,
        {},
        SUCCESS,
        ["flags 0x0, numAttrs 1"],
        [],
    ),
    "no flag yet": (
        "copy-flags",
        hip(7, 15, batches=BatchCopies(0, 1, False, "as the log has it")),
        {},
        PARTIAL,
        ["flags 0x0, numAttrs 1 on HIP 7.15.0", "from HIP 7.16", "as the log has it"],
        ["HIP 7.16 (ROCm 10.1)", "auto"],
    ),
    "no attributes yet": (
        "copy-flags",
        hip(7, 12, batches=BatchCopies(0, 0, False, "")),
        {},
        PARTIAL,
        ["numAttrs 0 on HIP 7.12.0", "attributes are passed from HIP 7.13"],
        ["HIP 7.16"],
    ),
    "attributes refused": (
        "copy-flags",
        replace(AMD, batches=BatchCopies(0x100, 0, True, "")),
        {},
        PARTIAL,
        ["refuses attributes (801)", "0x100"],
        ["HIP 7.16"],
    ),
    "no batches": (
        "copy-flags",
        replace(AMD, batches="no hipMemcpyBatchAsync: install ROCm 7.1"),
        {},
        MISSING,
        ["no hipMemcpyBatchAsync"],
        ["SimpleCPUOffloadConnector"],
    ),
    "no series": (
        "copy-flags",
        replace(AMD, batches=None),
        {},
        NOT_AVAILABLE,
        ["without the series"],
        ["vllm-rocm-memory apply"],
    ),
    "no batches of the simulated driver": (
        "copy-flags",
        replace(NVIDIA, batches=None, copies=(), copies_unknown="it copies nothing"),
        {},
        NOT_AVAILABLE,
        ["not known: it copies nothing"],
        [],
    ),
    "batches not watched": (
        "copy-engines",
        hip(7, 15, copies=(ProbeCopy(PLAIN, COPY_ENGINE, "by rocprofv3"),)),
        {},
        PARTIAL,
        ["copy engines make plain copies", "were not watched", "by rocprofv3"],
        ["HIP 7.16", "auto"],
    ),
    "batches not watched, of a release that asks for engines": (
        "copy-engines",
        replace(AMD, copies=(ProbeCopy(PLAIN, COPY_ENGINE, "by rocprofv3"),)),
        {},
        SUCCESS,
        [f"make {PLAIN}", f"{RECTANGLES}, {BATCHES}: not watched"],
        [],
    ),
    "full device": (
        "copy-engines",
        replace(AMD, copies=(), copies_unknown="the device is full"),
        {},
        PARTIAL,
        ["not known: the device is full"],
        ["while no server"],
    ),
    "copy engines": (
        "copy-engines",
        AMD,
        {"HSA_ENABLE_SDMA": "1"},
        SUCCESS,
        ["copy engines make plain copies", "HSA_ENABLE_SDMA=1"],
        [],
    ),
    "copy engines of NVIDIA": (
        "copy-engines",
        NVIDIA,
        {"HSA_ENABLE_SDMA": "0"},
        SUCCESS,
        ["copy engines make plain copies"],
        [],
    ),
    "SDMA off": (
        "copy-engines",
        replace(AMD, copies=(), copies_unknown="rocprofv3 is not on the path"),
        {"HSA_ENABLE_SDMA": "0"},
        MISSING,
        ["HSA_ENABLE_SDMA=0"],
        ["unset HSA_ENABLE_SDMA"],
    ),
    "kernels": (
        "copy-engines",
        replace(AMD, copies=copies(KERNEL, COPY_ENGINE, KERNEL)),
        {},
        MISSING,
        [f"kernels make {PLAIN} and {BATCHES}", "are not set"],
        ["atomics"],
    ),
    "kernels by size": (
        "copy-engines",
        replace(AMD, copies=copies(KERNEL, KERNEL, KERNEL)),
        {"GPU_FORCE_BLIT_COPY_SIZE": "2048"},
        MISSING,
        ["kernels make", "GPU_FORCE_BLIT_COPY_SIZE=2048"],
        ["unset GPU_FORCE_BLIT_COPY_SIZE"],
    ),
    "kernels on CUDA": (
        "copy-engines",
        replace(NVIDIA, copies=copies(KERNEL, None, None)),
        {},
        MISSING,
        ["kernels make"],
        ["NVIDIA driver"],
    ),
    "kernels for small pages": (
        "copy-engines",
        hip(7, 15, copies=copies(COPY_ENGINE, COPY_ENGINE, KERNEL)),
        {},
        PARTIAL,
        [f"kernels {BATCHES}"],
        ["HIP 7.16", "auto"],
    ),
    "kernels for small pages of CUDA": (
        "copy-engines",
        replace(NVIDIA, copies=copies(COPY_ENGINE, COPY_ENGINE, KERNEL)),
        {},
        PARTIAL,
        [f"kernels {BATCHES}"],
        ["copy_engine at auto, which"],
    ),
    "no profiler": (
        "copy-engines",
        replace(AMD, copies=(ProbeCopy(PLAIN, None, "rocprofv3 is not there"),)),
        {"HSA_ENABLE_PEER_SDMA": "0"},
        PARTIAL,
        ["not known: rocprofv3 is not there", "HSA_ENABLE_PEER_SDMA=0"],
        ["rocprofv3"],
    ),
    "no profile": (
        "copy-engines",
        replace(NVIDIA, copies=(), copies_unknown="RuntimeError: no memory"),
        {},
        PARTIAL,
        ["not known: RuntimeError: no memory"],
        ["nsys"],
    ),
    "simulated driver without copies": (
        "copy-engines",
        replace(NVIDIA, simulated="cuda-13.0", copies=(), copies_unknown="no copies"),
        {},
        NOT_AVAILABLE,
        ["not known: no copies"],
        [],
    ),
    "large BAR": (
        "large-bar",
        AMD,
        {},
        SUCCESS,
        ["large BAR, and HIP 7.16.26361 opens"],
        [],
    ),
    "large BAR, no host access": (
        "large-bar",
        hip(7, 1),
        {},
        PARTIAL,
        ["Tensor.item()", "HIP 7.1.0"],
        ["HIP 7.2 (ROCm 7.2)", "--enable-sleep-mode"],
    ),
    "small BAR": (
        "large-bar",
        replace(AMD, large_bar=False),
        {},
        PARTIAL,
        ["no large BAR"],
        ["Above 4G", "Resizable BAR"],
    ),
    "unknown BAR": (
        "large-bar",
        replace(AMD, large_bar=None),
        {},
        NOT_AVAILABLE,
        ["does not say"],
        [],
    ),
    "BAR of NVIDIA": (
        "large-bar",
        NVIDIA,
        {},
        NOT_AVAILABLE,
        ["CUDA"],
        [],
    ),
    "virtual memory": ("virtual-memory", AMD, {}, SUCCESS, ["supported"], []),
    "virtual memory of CUDA": (
        "virtual-memory",
        NVIDIA,
        {},
        SUCCESS,
        ["supported by CUDA 13.0"],
        [],
    ),
    "memory that stays with its address": (
        "virtual-memory",
        hip(7, 12),
        {},
        PARTIAL,
        ["HIP 7.12.0", "frees each address and reserves it again"],
        ["HIP 7.13"],
    ),
    "no virtual memory": (
        "virtual-memory",
        replace(AMD, virtual_memory=False),
        {},
        MISSING,
        ["has no virtual memory management", "sleep mode cannot work"],
        ["amdgpu", "without --enable-sleep-mode"],
    ),
    "unknown virtual memory": (
        "virtual-memory",
        replace(NVIDIA, virtual_memory=None),
        {},
        MISSING,
        ["does not say"],
        ["NVIDIA driver"],
    ),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_each_outcome_is_named_with_what_helps(row: Row, machine: MakeMachine) -> None:
    name, facts, environment, state, words, remedies = row
    made = machine(runtime=facts, environment=environment)
    finding = look(name, made)
    assert finding.state is state, finding
    text = "\n".join([finding.summary, *finding.details])
    for word in words:
        assert word in text
    for word in remedies:
        assert word in (finding.remedy or "")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ("the probe hung", "gave no answer"),
        (LAPTOP, "no GPU runtime is installed"),
        (replace(AMD, devices=0, problem=NO_DEVICE), "hipErrorNoDevice"),
    ],
)
@pytest.mark.parametrize(
    "name", ["copy-flags", "copy-engines", "large-bar", "virtual-memory"]
)
def test_without_a_device_there_is_nothing_to_check(
    name: str, facts: RuntimeFacts | str, words: str, machine: MakeMachine
) -> None:
    finding = look(name, machine(runtime=facts))
    assert finding.state is NOT_AVAILABLE
    assert words in finding.summary


@pytest.mark.parametrize(
    ("large_bar", "visible", "state"),
    [
        (None, 256 << 20, PARTIAL),
        (None, 192 << 30, NOT_AVAILABLE),
        (False, 256 << 20, PARTIAL),
        # Another card's, such as that of the processor's own graphics.
        (True, 256 << 20, SUCCESS),
    ],
)
def test_a_card_may_show_a_part_of_its_memory(
    large_bar: bool | None,
    visible: int,
    state: State,
    machine: MakeMachine,
    write: Write,
) -> None:
    card = "sys/class/drm/card1/device"
    write(f"{card}/mem_info_vram_total", f"{192 << 30}\n")
    write(f"{card}/mem_info_vis_vram_total", f"{visible}\n")
    write("sys/class/drm/card0/device/mem_info_vram_total", "none\n")
    finding = look("large-bar", machine(runtime=replace(AMD, large_bar=large_bar)))
    assert finding.state is state
    if state is PARTIAL:
        assert finding.details == ("card1: 256.0 MiB of 192.0 GiB are visible",)


@pytest.mark.parametrize(("asked", "state"), [(True, MISSING), (False, PARTIAL)])
def test_sleep_mode_needs_host_access(
    asked: bool, state: State, machine: MakeMachine
) -> None:
    serving = ServingFacts(enable_sleep_mode=asked)
    finding = look("large-bar", machine(serving, runtime=hip(7, 1)))
    assert finding.state is state
    assert "HIP 7.2 (ROCm 7.2)" in (finding.remedy or "")


def test_a_vllm_needs_pytorch(machine: MakeMachine, small: SmallVllm) -> None:
    made = machine(runtime=RuntimeFacts(problem=NO_TORCH), target=small.target)
    assert look("hip-runtime", made).state is MISSING


# --- the driver -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "state", "words"),
    [
        ("6.14.14\n", SUCCESS, "amdgpu 6.14.14"),
        ("6.14", SUCCESS, "amdgpu 6.14"),
        ("6.13.9", MISSING, "amdgpu 6.13.9 hands out memory with old contents"),
        ("6.19.14.31400000", SUCCESS, "amdgpu 6.19.14.31400000"),
        ("6.12.12", MISSING, "amdgpu 6.12.12 hands out memory with old contents"),
        ("", MISSING, "the amdgpu of kernel 6.8.0-31 may hand out"),
        (None, MISSING, "the amdgpu of kernel 6.8.0-31 may hand out"),
    ],
)
def test_old_drivers_want_memory_to_be_cleared(
    version: str | None,
    state: State,
    words: str,
    machine: MakeMachine,
    write: Write,
    small: SmallVllm,
) -> None:
    write("proc/sys/kernel/osrelease", "6.8.0-31\n")
    write("sys/module/amdgpu/refcnt", "1")
    if version is not None:
        write("sys/module/amdgpu/version", version)
    finding = look("driver", machine(runtime=AMD))
    assert finding.state is state
    assert words in finding.summary
    if state is MISSING:
        assert finding.remedy
        assert "vllm-rocm-memory apply" in finding.remedy and "6.14" in finding.remedy


def named(small: SmallVllm, patch: str) -> SmallVllm:
    """The same, and its first patch has the name of one that the check knows."""
    first, *others = small.series.patches
    patches = (replace(first, name=patch), *others)
    return replace(small, series=replace(small.series, patches=patches))


@pytest.mark.parametrize("applied", [True, False])
def test_who_clears_memory_is_told(
    applied: bool, machine: MakeMachine, write: Write, small: SmallVllm
) -> None:
    write("sys/module/amdgpu/version", "6.12.12")
    small = named(small, "cumem-sleep")
    if applied:
        small.apply()
    made = machine(runtime=AMD, target=small.target, series=small.series)
    finding = look("driver", made)
    assert finding.state is SUCCESS
    who = "by the series" if applied else "by vLLM 0.32.0 itself"
    assert f"it is cleared on wake, {who}" in finding.summary


@pytest.mark.parametrize(
    "damaged", ["vllm/owned.py", "vllm/.rocm_memory_series/journal.json"]
)
def test_nobody_knows_what_a_changed_vllm_does(
    damaged: str, machine: MakeMachine, write: Write, small: SmallVllm
) -> None:
    write("sys/module/amdgpu/version", "6.12.12")
    small = named(small, "cumem-sleep")
    small.apply()
    assert (small.root / damaged).is_file()
    small.write(damaged, "{ def")
    made = machine(runtime=AMD, target=small.target, series=small.series)
    finding = look("driver", made)
    assert finding.state is MISSING
    assert "nothing is known to clear it" in finding.summary


def test_nobody_knows_what_an_unknown_base_does(
    machine: MakeMachine, write: Write, small: SmallVllm
) -> None:
    write("sys/module/amdgpu/version", "6.12.12")
    small.write("vllm/owned.py", "def shout(word): ...\n")
    known = named(small, "cumem-sleep")
    for series in (known.series, small.series):
        made = machine(runtime=AMD, target=small.target, series=series)
        assert look("driver", made).state is MISSING


@pytest.mark.parametrize(
    ("facts", "loaded", "words"),
    [
        (SIMULATED, False, "the device is simulated"),
        (NVIDIA, False, "amdgpu is not loaded"),
        ("no answer", False, "amdgpu is not loaded"),
        (NVIDIA, True, "not the driver of CUDA's devices"),
    ],
)
def test_there_may_be_no_driver(
    facts: RuntimeFacts | str,
    loaded: bool,
    words: str,
    machine: MakeMachine,
    write: Write,
) -> None:
    if loaded:
        write("sys/module/amdgpu/version", "6.12.12")
    finding = look("driver", machine(runtime=facts))
    assert finding.state is NOT_AVAILABLE
    assert words in finding.summary


# --- as users call it -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "state"),
    [("old runtime", MISSING), ("SDMA off", MISSING), ("no virtual memory", MISSING)],
)
def test_a_wrong_set_up_is_named_by_the_command(
    row: str, state: State, doctor: Callable[..., Answer]
) -> None:
    name, facts, environment, *_, remedies = ROWS[row]
    answer = doctor("--json", runtime=facts, environment=environment)
    assert answer.code == 1
    check = answer.check(name)
    assert check["state"] == state
    assert all(word in check["remedy"] for word in remedies)


OLD_RUNTIME = """
int hipRuntimeGetVersion(int *version) { *version = 70000000; return 0; }
int hipGetDeviceCount(int *count) { *count = 2; return 0; }
int hipDeviceGetAttribute(int *value, int name, int device) { *value = 1; return 0; }
"""


def test_an_old_runtime_is_found_by_the_command(
    doctor: Callable[..., Answer], tmp_path: Path
) -> None:
    source = tmp_path / "old.c"
    source.write_text(OLD_RUNTIME)
    library = tmp_path / "libamdhip64.so.7"
    build = ["cc", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(build, check=True)
    build_of_pytorch = pytorch(tmp_path, CPU_BUILD)
    answer = doctor(
        "--json",
        environment={**build_of_pytorch, "LD_LIBRARY_PATH": str(tmp_path)},
        probe_runtime=machine_module._probe_runtime,
    )
    check = answer.check("hip-runtime")
    assert (answer.code, check["state"]) == (1, MISSING)
    assert f"HIP 7.0.0 at {library} is too old" in check["summary"]
    assert "HIP 7.1 (ROCm 7.1) or later" in check["remedy"]


# --- facts ----------------------------------------------------------------------------


@pytest.mark.parametrize("facts", [AMD, LAPTOP, replace(AMD, batches="a reason")])
def test_facts_survive_json(facts: RuntimeFacts) -> None:
    assert RuntimeFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


@pytest.mark.parametrize(
    ("facts", "product"),
    [
        (AMD, "HIP 7.16.26361"),
        (NVIDIA, "CUDA 13.0"),
        (replace(NVIDIA, version=12080), "CUDA 12.8"),
        (replace(AMD, version=0), "HIP of unknown version"),
        (LAPTOP, "no GPU runtime"),
    ],
)
def test_a_runtime_is_named_with_its_version(facts: RuntimeFacts, product: str) -> None:
    assert facts.product == product


# --- the probe ------------------------------------------------------------------------


def probed(**environment: str) -> RuntimeFacts | str:
    """What the probe finds, run as the doctor runs it."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HIPSIM_", "HSA_", "GPU_", "LD_"))
    }
    return Machine(environment={**inherited, **environment}).runtime


def found(**environment: str) -> RuntimeFacts:
    facts = probed(**environment)
    assert isinstance(facts, RuntimeFacts), facts
    return facts


@pytest.fixture(scope="module")
def _needs_cpu_build() -> None:
    if not serve.is_cpu_build():
        pytest.skip("the simulator runs with vLLM's CPU build")


RELEASES = """
import json
from vllm.v1.simple_kv_offload import cuda_mem_ops
from vllm_rocm_memory.doctor import runtime_probe
from vllm_rocm_memory.sim import hipsim

answers = {}
for profile in hipsim.PROFILES:
    hipsim.reset(profile)
    cuda_mem_ops._batch_memcpy = None
    *_, found = runtime_probe.find()
    answers[profile] = found.to_json()
print("\\n" + json.dumps(answers))
"""

# version, flags, numAttrs, what makes batches of small pages, and the states of
# copy-flags, copy-engines, large-bar and virtual-memory
EXPECTED = {
    "7.1": ("7.1.25424", 0, 0, KERNEL, PARTIAL, PARTIAL, PARTIAL, PARTIAL),
    "7.2.3": ("7.2.0", 0, 0, KERNEL, PARTIAL, PARTIAL, SUCCESS, PARTIAL),
    "7.12": ("7.12.0", 0, 0, KERNEL, PARTIAL, PARTIAL, SUCCESS, PARTIAL),
    "7.13": ("7.13.0", 0, 1, KERNEL, PARTIAL, PARTIAL, SUCCESS, SUCCESS),
    "7.15": ("7.15.26333", 0, 1, KERNEL, PARTIAL, PARTIAL, SUCCESS, SUCCESS),
    "7.16": ("7.16.26361", 0x100, 1, COPY_ENGINE, *[SUCCESS] * 4),
}


@pytest.fixture(scope="module")
def releases(_needs_cpu_build: None) -> dict[str, RuntimeFacts]:
    """What the probe finds in each release, asked in one process."""
    environment = {**os.environ, "HIPSIM_PROFILE": "7.16"}
    output = subprocess.run(
        [sys.executable, "-c", RELEASES],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    answers = json.loads(output.splitlines()[-1])
    return {name: RuntimeFacts.from_json(facts) for name, facts in answers.items()}


def test_every_release_is_expected_to_say_something(
    releases: dict[str, RuntimeFacts],
) -> None:
    assert list(releases) == list(EXPECTED)


@pytest.mark.parametrize("profile", EXPECTED)
def test_what_a_release_says(
    profile: str, releases: dict[str, RuntimeFacts], machine: MakeMachine
) -> None:
    version, flags, num_attrs, batch, *states = EXPECTED[profile]
    facts = releases[profile]
    assert facts.product == f"HIP {version}"
    assert facts.simulated == profile
    assert facts.libraries == (str(hipsim.library_path()),)
    assert isinstance(facts.batches, BatchCopies)
    assert (facts.batches.flags, facts.batches.num_attrs) == (flags, num_attrs)
    assert f"HIP {version}" in facts.batches.description
    engines = {copy.name: copy.engine for copy in facts.copies}
    assert engines == {PLAIN: COPY_ENGINE, RECTANGLES: COPY_ENGINE, BATCHES: batch}
    made = machine(runtime=facts)
    names = ("copy-flags", "copy-engines", "large-bar", "virtual-memory")
    assert [look(name, made).state for name in names] == states
    assert look("hip-runtime", made).state is SUCCESS


def test_a_machine_with_much_wrong(_needs_cpu_build: None) -> None:
    environment = {
        "HIPSIM_PROFILE": "7.15",
        "HIPSIM_SWITCHES": "no_virtual_memory=1,small_bar=1",
        "HSA_ENABLE_SDMA": "0",
    }
    facts = found(**environment)
    assert facts.virtual_memory is False and facts.large_bar is False
    assert {copy.engine for copy in facts.copies} == {KERNEL}
    # Also where the variable is not in the environment that the check sees.
    machine = Machine(environment={}, probe_runtime=lambda _: lambda: facts)
    assert look("copy-engines", machine).state is MISSING
    assert look("virtual-memory", machine).state is MISSING
    assert look("large-bar", machine).state is PARTIAL


def test_the_simulated_driver_of_cuda(machine: MakeMachine, tmp_path: Path) -> None:
    build = pytorch(tmp_path, CPU_BUILD)
    facts = found(**build, HIPSIM_PROFILE="cuda-13.0")
    assert (facts.vendor, facts.product) == (CUDA, "CUDA 13.0")
    assert facts.virtual_memory and facts.devices == 8
    assert facts.copies == () and facts.copies_unknown
    build["HIPSIM_SWITCHES"] = "no_virtual_memory=1"
    switched = found(**build, HIPSIM_PROFILE="cuda-13.0")
    assert switched.virtual_memory is False
    made = machine(runtime=facts)
    assert look("copy-flags", made).state is NOT_AVAILABLE


def test_a_release_that_cannot_be_simulated(
    machine: MakeMachine, tmp_path: Path
) -> None:
    build = pytorch(tmp_path, CPU_BUILD)
    facts = found(**build, HIPSIM_PROFILE="9.9")
    assert facts.vendor is None
    made = machine(runtime=facts, environment={"HIPSIM_PROFILE": "9.9"})
    finding = look("hip-runtime", made)
    assert finding.state is MISSING
    assert "one of 7.1 7.2.3" in finding.summary
    build["HIPSIM_SWITCHES"] = "no_virtual_memory"
    facts = found(**build, HIPSIM_PROFILE="7.16")
    made = machine(runtime=facts, environment={"HIPSIM_PROFILE": "7.16"})
    finding = look("hip-runtime", made)
    assert finding.state is MISSING
    assert "Set HIPSIM_SWITCHES to" in (finding.remedy or "")


def test_the_runtime_that_was_loaded_first_is_in_use(tmp_path: Path) -> None:
    first = tmp_path / hipsim.library_path().name
    shutil.copy(hipsim.library_path(), first)
    build = pytorch(tmp_path, CPU_BUILD)
    facts = found(**build, HIPSIM_PROFILE="7.16", LD_PRELOAD=str(first))
    assert facts.libraries == (str(first), str(hipsim.library_path()))


def test_a_runtime_of_nobody_in_this_process_is_found(tmp_path: Path) -> None:
    """As ROCm is that was installed beside a CPU build of PyTorch."""
    folder = str(hipsim.library_path().parent)
    facts = found(LD_LIBRARY_PATH=folder, HIPSIM_VRAM_BYTES="nonsense")
    assert facts.libraries == (str(hipsim.library_path()),)
    assert not facts.loaded_by_torch and facts.devices == 0
    assert facts.problem == NO_DEVICE


def test_a_vllm_without_the_series_makes_plain_copies(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    facts = found(HIPSIM_PROFILE="7.16", PYTHONPATH=str(tmp_path))
    assert facts.batches is None
    assert [copy.name for copy in facts.copies] == [PLAIN]


def vllm_that_copies(folder: Path, copying: str) -> dict[str, str]:
    """An environment in which vLLM has the series, and its module of copies is this."""
    package = folder / "vllm/v1/simple_kv_offload"
    package.mkdir(parents=True)
    for path in (package.parents[1], package.parent, package):
        (path / "__init__.py").touch()
    (package / "copy_choice.py").touch()
    (package / "cuda_mem_ops.py").write_text(copying)
    return {"HIPSIM_PROFILE": "7.16", "PYTHONPATH": str(folder)}


def test_copies_that_end_the_process_cost_no_other_facts(
    tmp_path: Path, machine: MakeMachine
) -> None:
    crash = "import os; os.kill(os.getpid(), 11)"
    facts = found(**vllm_that_copies(tmp_path, crash))
    assert facts.product == "HIP 7.16.26361" and facts.virtual_memory
    assert facts.batches == facts.copies_unknown == NO_END
    made = machine(runtime=facts)
    assert look("hip-runtime", made).state is SUCCESS
    assert look("copy-flags", made).state is MISSING


def test_a_full_device_says_nothing_of_copies(
    tmp_path: Path, machine: MakeMachine
) -> None:
    full = "import torch; raise torch.OutOfMemoryError('HIP out of memory. Tried 2')"
    facts = found(**vllm_that_copies(tmp_path, full))
    assert facts.batches is None
    assert facts.copies_unknown == "the device is full: HIP out of memory. Tried 2"
    assert look("copy-flags", machine(runtime=facts)).state is NOT_AVAILABLE


def test_the_runtime_is_looked_for_as_the_series_does() -> None:
    """`hip_runtime.py` needs a vLLM that can be imported, so the probe has its own."""
    series = Machine().series.files / "vllm/platforms/hip_runtime.py"
    values = {
        target.id: node.value
        for node in ast.parse(series.read_text()).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    names, library = values["_SONAMES"], values["_LIBRARY"]
    assert ast.literal_eval(names) == runtime_probe._NAMES[HIP]
    assert isinstance(library, ast.Call)
    assert ast.literal_eval(library.args[0]) == runtime_probe._FILES[HIP].pattern


def pytorch(folder: Path, text: str) -> dict[str, str]:
    """An environment in which `import torch` runs this."""
    (folder / "torch.py").write_text(text)
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import os\nos.kill(os.getpid(), 11)", "SIGSEGV"),
        ("print('{[')\nraise SystemExit('the driver is gone')", "the driver is gone"),
        ("print('[1]')\nimport os\nos._exit(0)", "no answer"),
    ],
    ids=["crash", "garbage", "end"],
)
def test_a_probe_that_breaks_is_a_finding(
    text: str, words: str, tmp_path: Path, machine: MakeMachine
) -> None:
    answer = probed(**pytorch(tmp_path, text))
    assert isinstance(answer, str) and words in answer
    assert look("hip-runtime", machine(runtime=answer)).state is MISSING


def test_a_probe_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_module, "RUNTIME_TIMEOUT_S", 1.0)
    hanging = pytorch(tmp_path, "import time\ntime.sleep(60)")
    answer = probed(**hanging)
    assert isinstance(answer, str) and "no answer in 1 s" in answer
    made = Machine(environment={**os.environ, **hanging}, timeout_s=0.3)
    assert "no answer in 0.3 s" in str(made.runtime)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')",
            "PyTorch is not installed",
        ),
        ("import no_such_module", "PyTorch cannot be imported: No module"),
        ("raise OSError('libhsa is missing')", "OSError: libhsa is missing"),
    ],
)
def test_pytorch_may_not_be_there(text: str, words: str, tmp_path: Path) -> None:
    facts = found(**pytorch(tmp_path, text))
    assert facts.torch is None
    assert words in (facts.problem or "")


CPU_BUILD = """
__version__ = "2.13.0+cpu"
class version:
    hip = cuda = None
"""

GPU_BUILD = """
__version__ = "2.13.0"
class version:
    hip, cuda = {hip!r}, {cuda!r}
class cuda:
    def init():
        raise RuntimeError("no usable GPU\\nand many lines")
"""


@pytest.mark.parametrize("vendor", [HIP, CUDA])
def test_a_build_for_a_gpu_without_one(vendor: str, tmp_path: Path) -> None:
    text = GPU_BUILD.format(
        hip="10.0" if vendor == HIP else None, cuda="13.0" if vendor == CUDA else None
    )
    # The simulator is not what a GPU build uses.
    facts = found(HIPSIM_PROFILE="7.16", **pytorch(tmp_path, text))
    assert facts.torch_vendor == vendor and facts.simulated is None
    assert facts.problem == "no usable GPU"


# --- who copied -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("done", "engine", "words"),
    [
        ([(activity.COPY, "Memcpy HtoD")] * 2, COPY_ENGINE, "2 copies and no kernel"),
        ([(activity.COPY, "Memcpy"), (activity.KERNEL, "k")], KERNEL, "saw k"),
        ([], None, "neither"),
    ],
)
def test_pytorchs_profiler_tells_on_cuda(
    done: list[tuple[str, str]],
    engine: str | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = [activity.Activity(kind, name, 0) for kind, name in done]
    monkeypatch.setattr(activity, "activities", lambda work: seen)
    told, why = probe_copies._watch_cuda(lambda: None)
    assert told == engine
    assert words in why


COPIES = '"Kind","Direction"\n'
COPY = '"MEMORY_COPY","MEMORY_COPY_HOST_TO_DEVICE"\n'
KERNELS = '"Kind","Kernel_Name"\n'
BLIT = '"KERNEL_DISPATCH","__amd_rocclr_copyBufferRect.kd"\n'
OTHER = '"KERNEL_DISPATCH","fill<float>"\n'
PROFILER = """#!{python}
import os, sys, time
from pathlib import Path
words = sys.argv[1:]
Path(__file__).with_name("group").write_text(str(os.getpgrp()))
assert words[-2:] == ["-m", "vllm_rocm_memory.doctor.probe_copies"]
folder = Path(words[words.index("-d") + 1]) / "host"
folder.mkdir()
for name, text in {traces!r}.items():
    (folder / f"77_{{name}}").write_text(text)
time.sleep({seconds})
sys.exit({end!r})
"""


@pytest.fixture
def rocprof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a rocprofv3 on the path that writes these traces."""

    def install(traces: dict[str, str], end: str | int = 0, seconds: int = 0) -> None:
        script = tmp_path / "rocprofv3"
        text = PROFILER.format(
            python=sys.executable, traces=traces, end=end, seconds=seconds
        )
        script.write_text(text)
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return install


@pytest.mark.parametrize(
    ("traces", "variable", "engine", "words"),
    [
        ((COPIES + COPY * 2, KERNELS + OTHER), "1", COPY_ENGINE, "2 copies and no"),
        ((COPIES + COPY, KERNELS + BLIT), "1", KERNEL, "copyBufferRect"),
        ((COPIES, KERNELS + BLIT), "0", KERNEL, "copyBufferRect"),
        ((COPIES + COPY, KERNELS), "0", None, "HSA_ENABLE_SDMA=0"),
        ((COPIES, KERNELS + OTHER), "1", None, "neither"),
        (("", KERNELS), "1", None, "has no column Direction"),
        ((), "1", None, "no trace"),
    ],
    ids=["engine", "blit", "blit, off", "off", "neither", "column", "nothing"],
)
def test_rocprofv3_tells_on_amd(
    traces: tuple[str, ...],
    variable: str,
    engine: str | None,
    words: str,
    rocprof: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HSA_ENABLE_SDMA", variable)
    names = ("memory_copy_trace.csv", "kernel_trace.csv")
    rocprof(dict(zip(names, traces, strict=False)))
    told, why = probe_copies._watch_amd()
    assert told == engine
    assert words in why


def test_rocprofv3_may_fail(
    rocprof: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rocprof({}, end="no permission")
    assert "exit code 1: no permission" in probe_copies._watch_amd()[1]
    # What ends the probe's group ends it too.
    assert (tmp_path / "group").read_text() == str(os.getpgrp())
    monkeypatch.setattr(probe_copies, "_PROFILE_TIMEOUT_S", 0.3)
    rocprof({}, seconds=60)
    assert "took more than 0.3 s" in probe_copies._watch_amd()[1]
    monkeypatch.setenv("PATH", "/nowhere")
    assert "not on the path" in probe_copies._watch_amd()[1]
