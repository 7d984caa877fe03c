# SPDX-License-Identifier: Apache-2.0
"""What the library shows to the world."""

import ctypes
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from vllm_rocm_memory.sim import hipsim
from vllm_rocm_memory.sim.simulator import CONTROLS

BRIDGE = Path(__file__).parents[2] / "csrc" / "hipsim" / "bridge"

# Functions of HIP that cannot fail.
INFALLIBLE = {
    "hipGetErrorName",
    "hipGetErrorString",
    "hipGetLastError",
    "hipPeekAtLastError",
}


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_exported_symbols_are_the_declared_ones() -> None:
    lines = output_of("nm", "-D", "--defined-only", str(hipsim.library_path()))
    exported = {line.split()[-1] for line in lines.splitlines()}
    assert exported == set(hipsim.PROTOTYPES) | set(CONTROLS)


def test_every_function_that_can_fail_can_be_made_to() -> None:
    assert set(hipsim.CALLS) == set(hipsim.PROTOTYPES) - INFALLIBLE


def test_library_has_hips_name_and_needs_only_the_compilers_libraries() -> None:
    dynamic = output_of("readelf", "-dW", str(hipsim.library_path()))
    assert re.findall(r"SONAME.*\[(.*)\]", dynamic) == ["libamdhip64.so.7"]
    needed = re.findall(r"NEEDED.*\[(.*?)\.so", dynamic)
    assert set(needed) <= {
        "libstdc++",
        "libgcc_s",
        "libc",
        "libm",
        "ld-linux-x86-64",
        "ld-linux-aarch64",
    }


def test_loader_finds_the_loaded_instance_by_hips_name() -> None:
    ours = hipsim.load()
    found = ctypes.CDLL("libamdhip64.so.7")
    address = ctypes.cast(found.hipMalloc, ctypes.c_void_p).value
    assert address == ctypes.cast(ours.hipMalloc, ctypes.c_void_p).value


STRUCTS = {
    "hipMemLocation": hipsim.MemLocation,
    "hipMemcpyAttributes": hipsim.MemcpyAttributes,
    "hipMemAllocationProp": hipsim.MemAllocationProp,
    "hipMemAccessDesc": hipsim.MemAccessDesc,
    "hipIpcMemHandle_t": hipsim.IpcMemHandle,
}


@pytest.mark.parametrize("name", STRUCTS)
def test_structs_have_hips_layout(name: str) -> None:
    data = tomllib.loads(
        Path(__file__).with_name("abi").joinpath("hip.toml").read_text()
    )
    struct, told = STRUCTS[name], data["structs"][name]
    assert ctypes.sizeof(struct) == told["size"]
    assert ctypes.alignment(struct) == told["align"]
    for field, _ in struct._fields_:
        assert getattr(struct, field).offset == told["offsets"][field], field


def test_every_struct_is_compared() -> None:
    structs = {
        each
        for each in vars(hipsim).values()
        if isinstance(each, type) and issubclass(each, ctypes.Structure)
    }
    assert structs == set(STRUCTS.values())


# --- ctypes' prototypes ------------------------------------------------------------

BYTES = {
    "int": 4,
    "unsigned": 4,
    "size_t": 8,
    "unsigned long long": 8,
    "hipError_t": 4,
    "hipDeviceAttribute_t": 4,
    "hipMemAllocationGranularity_flags": 4,
    "hipMemcpyKind": 4,
    "hipStreamCaptureMode": 4,
    "hipIpcMemHandle_t": 64,
}
"""Sizes of the C types; what is not here is a pointer."""


def declared_sizes() -> dict[str, list[int]]:
    """Of the arguments of each function in the header."""
    text = (BRIDGE / "hip_api.h").read_text()
    functions = re.findall(r"HIPSIM_EXPORT\s[^;]*?(\w+)\(([^)]*)\);", text)
    return {
        name: [
            8 if "*" in each else BYTES.get(each.rsplit(maxsplit=1)[0].strip(), 8)
            for each in arguments.split(",")
            if each
        ]
        for name, arguments in functions
    }


def test_python_passes_what_the_functions_take() -> None:
    told = {
        name: [ctypes.sizeof(each) for each in arguments]
        for name, (_, *arguments) in hipsim.PROTOTYPES.items()
    }
    assert told == declared_sizes()


def test_control_header_is_c_and_declares_every_control() -> None:
    header = BRIDGE / "hipsim_control.h"
    output_of("g++", "-x", "c", "-std=c11", "-Werror", "-fsyntax-only", str(header))
    declared = set(re.findall(r"\b(hipsim_\w+)\(", header.read_text()))
    assert declared == set(CONTROLS)


@pytest.mark.parametrize(
    ("number", "name", "text"),
    [
        (0, "hipSuccess", "no error"),
        (1, "hipErrorInvalidValue", "invalid argument"),
        (2, "hipErrorOutOfMemory", "out of memory"),
        (100, "hipErrorNoDevice", "no ROCm-capable device is detected"),
        (801, "hipErrorNotSupported", "operation not supported"),
        (123456, "hipErrorUnknown", "unknown error"),
    ],
)
def test_errors_have_hips_names_and_texts(number: int, name: str, text: str) -> None:
    lib = hipsim.load()
    assert lib.hipGetErrorName(number).decode() == name
    assert lib.hipGetErrorString(number).decode() == text


def test_check_raises_with_name_and_number() -> None:
    hipsim.check(0, "hipMalloc")
    with pytest.raises(hipsim.HipError, match=r"hipMalloc .*OutOfMemory \(2\)") as info:
        hipsim.check(2, "hipMalloc")
    assert (info.value.name, info.value.number) == ("hipErrorOutOfMemory", 2)
