# SPDX-License-Identifier: Apache-2.0
"""What the library shows to the world."""

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from vllm_rocm_memory.sim import hipsim

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
    assert exported == set(hipsim.PROTOTYPES)


def test_every_function_that_can_fail_can_be_made_to() -> None:
    hip = {name for name in hipsim.PROTOTYPES if not name.startswith("hipsim_")}
    assert set(hipsim.CALLS) == hip - INFALLIBLE


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


def test_attributes_have_hips_layout() -> None:
    layout = {
        name: getattr(hipsim.MemcpyAttributes, name).offset
        for name, _ in hipsim.MemcpyAttributes._fields_
    }
    assert layout == {
        "srcAccessOrder": 0,
        "srcLocHint": 4,
        "dstLocHint": 12,
        "flags": 20,
    }
    assert ctypes.sizeof(hipsim.MemcpyAttributes) == 24
    assert ctypes.alignment(hipsim.MemcpyAttributes) == 4


def test_control_header_is_c_and_declares_every_control() -> None:
    header = BRIDGE / "hipsim_control.h"
    output_of("g++", "-x", "c", "-std=c11", "-Werror", "-fsyntax-only", str(header))
    declared = set(re.findall(r"\b(hipsim_\w+)\(", header.read_text()))
    exported = {name for name in hipsim.PROTOTYPES if name.startswith("hipsim_")}
    assert declared == exported


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
