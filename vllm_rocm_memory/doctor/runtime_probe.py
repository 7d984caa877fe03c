# SPDX-License-Identifier: Apache-2.0
"""Prints what this process finds of a GPU runtime, as one line of JSON.

    python -m vllm_rocm_memory.doctor.runtime_probe

A program of its own, because a driver may hang, or end the process that loads it.
PyTorch is imported first, so that the runtime is the one that PyTorch uses; where
HIPSIM_PROFILE is set and PyTorch is its CPU build, it is the simulator's.
"""

import ctypes
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from vllm_rocm_memory.doctor import probe, probe_copies
from vllm_rocm_memory.doctor.facts import CUDA, HIP, BatchCopies, RuntimeFacts
from vllm_rocm_memory.sim.platform import PROFILE_VARIABLE

NO_TORCH = "PyTorch is not installed"
NO_END = "making copies crashed or hung, or took longer than the probe may"

# For HIP those of hip_runtime.py, which needs a vLLM that can be imported.
_NAMES = {
    HIP: ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"),
    CUDA: ("libcuda.so.1", "libcuda.so"),
}
_FILES = {
    HIP: re.compile(r"libamdhip64[^/]*\.so[.\d]*"),
    CUDA: re.compile(r"libcuda\.so[.\d]*"),
}
# hipDeviceAttribute_t and CUdevice_attribute.
_HIP_VIRTUAL_MEMORY, _HIP_LARGE_BAR = 89, 10011
_CUDA_VIRTUAL_MEMORY = 102
# Of the patch kv-copy-engine.
_SERIES_MODULE = "vllm.v1.simple_kv_offload.copy_choice"


def find() -> Iterator[RuntimeFacts]:
    """What this process finds out, and then that with the copies that it makes.

    The first counts if the process does not live to find the other.
    """
    facts = look()
    if facts.copies_unknown is None:
        yield replace(facts, batches=NO_END, copies_unknown=NO_END)
        facts = _ask_vllm(facts)
    yield facts


def look() -> RuntimeFacts:
    """What it finds without a copy; `copies_unknown` says why there can be none."""
    torch, problem = _import_torch()
    facts = RuntimeFacts(problem=problem)
    if torch is not None:
        facts = replace(facts, torch=torch.__version__, torch_vendor=_vendor_of(torch))
    profile = os.environ.get(PROFILE_VARIABLE)
    simulated = bool(profile) and torch is not None and facts.torch_vendor is None
    if simulated:
        facts = _load_simulator(facts, profile or "")
        if facts.problem is not None:
            return replace(facts, copies_unknown=facts.problem)
    elif torch is not None and facts.torch_vendor:
        facts = replace(facts, problem=_start_gpu(torch))
    facts = _ask_library(facts)
    if torch is not None and facts.torch_vendor and facts.problem is None:
        facts = replace(facts, device_name=torch.cuda.get_device_name(0))
    if facts.vendor is None or (facts.torch_vendor is None and not simulated):
        why = facts.problem or "PyTorch here was built for no GPU"
        return replace(facts, copies_unknown=why)
    if facts.problem is None and facts.simulated and facts.vendor == CUDA:
        why = "PyTorch's CPU build copies nothing through the simulated CUDA driver"
        return replace(facts, copies_unknown=why)
    return replace(facts, copies_unknown=facts.problem)


def _import_torch() -> tuple[Any, str | None]:
    """PyTorch, or why it cannot be imported."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name == "torch":
            return None, NO_TORCH
        return None, f"PyTorch cannot be imported: {error}"
    except Exception as error:
        return None, f"PyTorch cannot be imported: {type(error).__name__}: {error}"
    return torch, None


def _vendor_of(torch: ModuleType) -> str | None:
    if torch.version.hip:
        return HIP
    return CUDA if torch.version.cuda else None


def _start_gpu(torch: ModuleType) -> str | None:
    """Have PyTorch load its driver; why that fails, if it does."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return None


def _load_simulator(facts: RuntimeFacts, profile: str) -> RuntimeFacts:
    from vllm_rocm_memory.sim import cudasim, hipsim

    simulator = cudasim if profile.startswith(CUDA) else hipsim
    try:
        simulator.load()
    except (OSError, ValueError) as error:
        return replace(facts, problem=str(error))
    return replace(facts, simulated=simulator.profile())


# --- the library ----------------------------------------------------------------------


def _ask_library(facts: RuntimeFacts) -> RuntimeFacts:
    wanted = facts.torch_vendor
    for vendor in (wanted,) if wanted else (HIP, CUDA):
        libraries = _mapped(vendor)
        loaded = bool(libraries)
        opened = _open_first(vendor, libraries)
        if opened is None:
            continue
        library, path = opened
        ask = _ask_hip if vendor == HIP else _ask_cuda
        ordered = (path, *(other for other in libraries if other != path))
        return ask(
            replace(
                facts,
                vendor=vendor,
                libraries=ordered,
                loaded_by_torch=loaded and vendor == wanted,
            ),
            library,
        )
    missing = "PyTorch was built for no GPU, and no GPU runtime is installed"
    if wanted:
        missing = f"the runtime of PyTorch's {wanted.upper()} build cannot be loaded"
    return replace(facts, problem=facts.problem or missing)


def _mapped(vendor: str) -> tuple[str, ...]:
    """Paths of the vendor's runtimes in this process, in the order of addresses."""
    lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    # The path is the sixth field, and may contain spaces.
    paths = dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if "/" in line)
    return tuple(path for path in paths if _FILES[vendor].fullmatch(Path(path).name))


def _open_first(vendor: str, mapped: tuple[str, ...]) -> tuple[ctypes.CDLL, str] | None:
    """The runtime in use, with its path: the one that was loaded first.

    The loader answers a bare name with the library of that name that it loaded first.
    A wheel's copy may have another name, and is found by its path.
    """
    handles = {}
    for path in mapped:
        if library := _open(path, os.RTLD_NOLOAD):
            handles[library._handle] = path
    for name in _NAMES[vendor]:
        library = _open(name, os.RTLD_NOLOAD if mapped else 0)
        if library is not None and not mapped:
            return library, next(iter(_mapped(vendor)), name)
        if library is not None and library._handle in handles:
            return library, handles[library._handle]
    for path in handles.values():
        return ctypes.CDLL(path), path
    return None


def _open(name: str, mode: int) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name, mode=mode or ctypes.DEFAULT_MODE)
    except OSError:
        return None


def _number(call: Callable[..., int], *arguments: int) -> tuple[int, int]:
    """The error of a call whose first argument is an int to fill in, and the int."""
    value = ctypes.c_int(0)
    return call(ctypes.byref(value), *arguments), value.value


def _ask_hip(facts: RuntimeFacts, library: ctypes.CDLL) -> RuntimeFacts:
    version = 0
    if hasattr(library, "hipRuntimeGetVersion"):
        error, version = _number(library.hipRuntimeGetVersion)
        version = 0 if error else version
    error, devices = _number(library.hipGetDeviceCount)
    facts = replace(facts, version=version, devices=0 if error else devices)
    if error or not devices:
        library.hipGetErrorName.restype = ctypes.c_char_p
        name = (library.hipGetErrorName(error) or b"unknown error").decode()
        why = f"it finds no device ({name}, {error})"
        return replace(facts, problem=facts.problem or why)
    attribute = library.hipDeviceGetAttribute
    return replace(
        facts,
        virtual_memory=_flag(attribute, _HIP_VIRTUAL_MEMORY, 0),
        large_bar=_flag(attribute, _HIP_LARGE_BAR, 0),
    )


def _ask_cuda(facts: RuntimeFacts, library: ctypes.CDLL) -> RuntimeFacts:
    error, version = _number(library.cuDriverGetVersion)
    facts = replace(facts, version=0 if error else version)
    error = library.cuInit(0)
    devices = 0
    if not error:
        error, devices = _number(library.cuDeviceGetCount)
    facts = replace(facts, devices=0 if error else devices)
    if error or not devices:
        why = f"it finds no device (CUDA error {error})"
        return replace(facts, problem=facts.problem or why)
    _, device = _number(library.cuDeviceGet, 0)
    attribute = library.cuDeviceGetAttribute
    return replace(facts, virtual_memory=_flag(attribute, _CUDA_VIRTUAL_MEMORY, device))


def _flag(attribute: Callable[..., int], name: int, device: int) -> bool | None:
    error, value = _number(attribute, name, device)
    return None if error else bool(value)


# --- vLLM -----------------------------------------------------------------------------


def _ask_vllm(facts: RuntimeFacts) -> RuntimeFacts:
    """How the series would copy here, and what makes its copies."""
    copier = probe_copies.Copier(facts)
    if _has_series():
        batches = _batches(copier)
        if isinstance(batches, str) and _is_out_of_memory(batches):
            return replace(facts, copies_unknown=f"the device is full: {batches}")
        return replace(facts, batches=batches, **_copied(copier))
    return replace(facts, **_copied(copier))


def _is_out_of_memory(reason: str) -> bool:
    """As PyTorch, HIP and CUDA put it; a server may be using the device."""
    return "out of memory" in reason.lower() or "OutOfMemory" in reason


def _has_series() -> bool:
    """Whether the vLLM of this process copies with the series' code."""
    try:
        vllm = importlib.util.find_spec("vllm")
        # Without a file it is a folder of that name, as a checkout of ours has one.
        if vllm is None or vllm.origin is None:
            return False
        return importlib.util.find_spec(_SERIES_MODULE) is not None
    except ImportError:
        return False


def _batches(copier: probe_copies.Copier) -> BatchCopies | str:
    try:
        return copier.batches()
    except RuntimeError as error:
        return str(error)
    # vLLM and its plugins may also end the process that imports them.
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"


def _copied(copier: probe_copies.Copier) -> dict[str, Any]:
    try:
        return {"copies": copier.copies()}
    except (Exception, SystemExit) as error:
        return {"copies_unknown": f"{type(error).__name__}: {error}"}


def main() -> None:
    for facts in find():
        probe.tell(facts.to_json())
    probe.end()


if __name__ == "__main__":
    main()
