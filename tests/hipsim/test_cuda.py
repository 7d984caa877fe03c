# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver's simulator: what it shows to the world, and that it works at all.

What each function does is a case of the contract (`contract/cuda`).
"""

import ctypes
import re
import resource
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_rocm_memory.sim import cudasim, hipsim
from vllm_rocm_memory.sim.simulator import CONTROLS

BRIDGE = Path(__file__).parents[2] / "csrc" / "hipsim" / "bridge"
DESCRIPTIONS = {"cuGetErrorName", "cuGetErrorString"}
PIECE = 2 << 20


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


# --- the library -------------------------------------------------------------------


def test_exported_symbols_are_the_declared_ones() -> None:
    lines = output_of("nm", "-D", "--defined-only", str(cudasim.library_path()))
    exported = {line.split()[-1] for line in lines.splitlines()}
    assert exported == set(cudasim.PROTOTYPES) | set(CONTROLS)


def test_library_has_the_drivers_name_and_needs_only_the_compilers_libraries() -> None:
    dynamic = output_of("readelf", "-dW", str(cudasim.library_path()))
    assert re.findall(r"SONAME.*\[(.*)\]", dynamic) == ["libcuda.so.1"]
    needed = re.findall(r"NEEDED.*\[(.*?)\.so", dynamic)
    assert set(needed) <= {
        "libstdc++",
        "libgcc_s",
        "libc",
        "libm",
        "ld-linux-x86-64",
        "ld-linux-aarch64",
    }


STRUCTS = {
    "CUmemLocation": cudasim.MemLocation,
    "CUmemAllocationProp": cudasim.MemAllocationProp,
    "CUmemAccessDesc": cudasim.MemAccessDesc,
    "CUmemcpyAttributes": cudasim.MemcpyAttributes,
    "CUDA_MEMCPY2D": cudasim.Memcpy2D,
    "CUipcMemHandle": cudasim.IpcMemHandle,
}


def offsets(struct: type[ctypes.Structure], base: int = 0) -> dict[str, int]:
    """Of its fields, and of those of structs that have no name in C."""
    found = {}
    for field, kind, *_ in struct._fields_:
        found[field] = base + getattr(struct, field).offset
        if kind is cudasim.MemAllocationFlags:
            inner = offsets(kind, found[field])
            found |= {f"{field}.{name}": at for name, at in inner.items()}
    return found


@pytest.mark.parametrize("name", STRUCTS)
def test_structs_have_the_drivers_layout(name: str) -> None:
    data = tomllib.loads(
        Path(__file__).with_name("abi").joinpath("cuda.toml").read_text()
    )
    struct, told = STRUCTS[name], data["structs"][name]
    assert ctypes.sizeof(struct) == told["size"]
    assert ctypes.alignment(struct) == told["align"]
    assert offsets(struct) == told["offsets"]


def test_every_struct_is_compared() -> None:
    structs = {
        each
        for each in vars(cudasim).values()
        if isinstance(each, type) and issubclass(each, ctypes.Structure)
    }
    assert structs == {*STRUCTS.values(), cudasim.MemAllocationFlags}


BYTES = {
    "int": 4,
    "unsigned": 4,
    "unsigned char": 1,
    "CUresult": 4,
    "CUdevice": 4,
    "CUdevice_attribute": 4,
    "CUmemAllocationGranularity_flags": 4,
    "CUstreamCaptureMode": 4,
    "CUipcMemHandle": 64,
}
"""Sizes of the C types; what is not here is a pointer or as large as one."""


def declared_sizes() -> dict[str, list[int]]:
    """Of the arguments of each function in the header."""
    text = re.sub(r"//.*", "", (BRIDGE / "cuda_api.h").read_text())
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
        for name, (_, *arguments) in cudasim.PROTOTYPES.items()
    }
    assert told == declared_sizes()


def test_nobody_else_gets_its_symbols(run: Any) -> None:
    printed = run("""
from vllm_rocm_memory.sim import cudasim
cudasim.load()
print(hasattr(ctypes.CDLL(None), "cuInit"))
""")
    assert printed.split() == ["False"]


# --- calls -------------------------------------------------------------------------


class Driver:
    """A device's primary context, and what a test makes in it."""

    def __init__(self) -> None:
        self.lib = cudasim.load()
        self.call("cuInit", 0)
        self.call("cuCtxSetCurrent", self.make("cuDevicePrimaryCtxRetain", 0))

    def call(self, name: str, *arguments: Any) -> None:
        cudasim.check(getattr(self.lib, name)(*arguments), name)

    def make(self, name: str, *arguments: Any) -> int:
        """Calls a function whose first argument takes what it makes."""
        out = cudasim.PROTOTYPES[name][1]._type_()
        self.call(name, ctypes.byref(out), *arguments)
        return out.value or 0

    def end_capture(self, stream: int) -> int:
        graph = ctypes.c_void_p()
        self.call("cuStreamEndCapture", stream, ctypes.byref(graph))
        return graph.value or 0

    def write(self, address: int, data: np.ndarray) -> None:
        self.call("cuMemcpyHtoD_v2", address, data.ctypes.data, data.size)

    def read(self, address: int, size: int) -> np.ndarray:
        data = np.empty(size, np.uint8)
        self.call("cuMemcpyDtoH_v2", data.ctypes.data, address, size)
        return data

    def close(self) -> None:
        cudasim.reset()
        self.lib.cuCtxSetCurrent(None)
        self.lib.cuDevicePrimaryCtxRelease_v2(0)


@pytest.fixture
def driver() -> Iterator[Driver]:
    """A simulator with nothing on it, and nothing left on it afterwards."""
    cudasim.reset(cudasim.PROFILES[-1])
    driver = Driver()
    yield driver
    driver.close()
    cudasim.assert_clean()


def nothing(kind: Any) -> Any:
    """An argument that asks for nothing."""
    return None if kind is ctypes.c_void_p or hasattr(kind, "contents") else kind()


def test_every_function_that_can_fail_is_listed() -> None:
    assert set(cudasim.CALLS) == set(cudasim.PROTOTYPES) - DESCRIPTIONS


@pytest.mark.parametrize("name", sorted(set(cudasim.PROTOTYPES) - DESCRIPTIONS))
def test_every_function_can_be_made_to_fail(driver: Driver, name: str) -> None:
    arguments = [nothing(kind) for kind in cudasim.PROTOTYPES[name][1:]]
    function = getattr(driver.lib, name)
    cudasim.fail(name, 2, 777)
    assert function(*arguments) != 777
    assert function(*arguments) == 777
    assert function(*arguments) != 777
    assert cudasim.stats().calls[name] >= 3


@pytest.mark.parametrize(
    ("number", "name", "text"),
    [
        (0, "CUDA_SUCCESS", "no error"),
        (2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"),
        (719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"),
        (123456, "unknown", "unknown"),
    ],
)
def test_errors_have_the_drivers_names_and_texts(
    number: int, name: str, text: str
) -> None:
    error = cudasim.CudaError("cuMemAlloc", number)
    assert str(error) == f"cuMemAlloc failed: {name} ({number}): {text}"
    assert (error.call, error.name, error.number) == ("cuMemAlloc", name, number)


def test_check_raises_with_name_and_number() -> None:
    cudasim.check(0, "cuMemAlloc")
    with pytest.raises(cudasim.CudaError, match=r"cuMemAlloc .*OUT_OF_MEMORY \(2\)"):
        cudasim.check(2, "cuMemAlloc")


# --- all of it together ------------------------------------------------------------


def test_virtual_memory_copies_capture_and_batch(driver: Driver) -> None:
    location = cudasim.MemLocation(cudasim.LOCATION_DEVICE, 0)
    properties = cudasim.MemAllocationProp(cudasim.ALLOCATION_PINNED, 0, location)
    access = cudasim.MemAccessDesc(location, cudasim.ACCESS_READ_WRITE)
    random = np.random.default_rng(1)
    data = random.integers(0, 256, 4096, np.uint8)
    host = np.zeros(4096, np.uint8)

    address = driver.make("cuMemAddressReserve", 2 * PIECE, 0, 0, 0)
    handles = [
        driver.make("cuMemCreate", PIECE, ctypes.byref(properties), 0) for _ in "ab"
    ]
    for i, handle in enumerate(handles):
        driver.call("cuMemMap", address + i * PIECE, PIECE, 0, handle, 0)
    driver.call("cuMemSetAccess", address, 2 * PIECE, ctypes.byref(access), 1)

    # across the mappings
    middle = address + PIECE - 2048
    driver.write(middle, data)
    assert np.array_equal(driver.read(middle, 4096), data)

    # captured, and replayed with what the host has then
    driver.call("cuMemHostRegister_v2", host.ctypes.data, host.size, 0)
    stream = driver.make("cuStreamCreate", cudasim.STREAM_NON_BLOCKING)
    driver.call("cuStreamBeginCapture_v2", stream, cudasim.CAPTURE_RELAXED)
    driver.call("cuMemcpyHtoDAsync_v2", address, host.ctypes.data, host.size, stream)
    graph = driver.end_capture(stream)
    executable = driver.make("cuGraphInstantiateWithFlags", graph, 0)
    host[:] = data[::-1]
    driver.call("cuGraphLaunch", executable, stream)
    driver.call("cuStreamSynchronize", stream)
    assert np.array_equal(driver.read(address, 4096), data[::-1])

    # a plane: every other 64 bytes
    plane = cudasim.Memcpy2D(
        srcMemoryType=cudasim.MEMORY_HOST,
        srcHost=host.ctypes.data,
        srcPitch=64,
        dstMemoryType=cudasim.MEMORY_DEVICE,
        dstDevice=address + PIECE,
        dstPitch=128,
        WidthInBytes=64,
        Height=32,
    )
    driver.call("cuMemcpy2DAsync_v2", ctypes.byref(plane), stream)
    driver.call("cuStreamSynchronize", stream)
    rows = driver.read(address + PIECE, 4096).reshape(32, 128)
    assert np.array_equal(rows[:, :64].ravel(), host[:2048])

    # a batch, last piece first
    order = [3, 2, 1, 0]
    batch = [
        np.array([address + 1024 * i for i in range(4)], np.uint64),
        np.array([host.ctypes.data + 1024 * i for i in order], np.uint64),
        np.full(4, 1024, np.uint64),
    ]
    attributes = cudasim.MemcpyAttributes(cudasim.SOURCE_ACCESS_STREAM)
    first, failed = ctypes.c_size_t(), ctypes.c_size_t()
    driver.call(
        "cuMemcpyBatchAsync",
        *(array.ctypes.data for array in batch),
        4,
        ctypes.byref(attributes),
        ctypes.byref(first),
        1,
        ctypes.byref(failed),
        stream,
    )
    driver.call("cuStreamSynchronize", stream)
    expected = host.reshape(4, 1024)[order].ravel()
    assert np.array_equal(driver.read(address, 4096), expected)
    stats = cudasim.stats()
    assert (stats.batch_calls, stats.batch_copies) == (1, 4)
    assert stats.mapped_bytes == 2 * PIECE

    driver.call("cuGraphExecDestroy", executable)
    driver.call("cuGraphDestroy", graph)
    driver.call("cuStreamDestroy_v2", stream)
    driver.call("cuMemHostUnregister", host.ctypes.data)
    driver.call("cuMemUnmap", address, 2 * PIECE)
    for handle in handles:
        driver.call("cuMemRelease", handle)
    driver.call("cuMemAddressFree", address, 2 * PIECE)


def test_registrations_may_have_a_limit_and_copies_stay_in_one(driver: Driver) -> None:
    host = np.zeros(3 * 4096, np.uint8)
    begin = -(-host.ctypes.data // 4096) * 4096
    cudasim.configure(max_registration_bytes=4096)
    assert driver.lib.cuMemHostRegister_v2(begin, 4097, 0) == 2
    for address in (begin, begin + 4096):
        driver.call("cuMemHostRegister_v2", address, 4096, 0)
    device = driver.make("cuMemAlloc_v2", 8192)
    assert driver.lib.cuMemcpyHtoD_v2(device, begin, 4096) == 0
    assert driver.lib.cuMemcpyHtoD_v2(device, begin, 4097) == 1
    plane = cudasim.Memcpy2D(
        srcMemoryType=cudasim.MEMORY_UNIFIED,
        srcDevice=begin,
        srcPitch=2048,
        dstMemoryType=cudasim.MEMORY_UNIFIED,
        dstDevice=device,
        dstPitch=2048,
        WidthInBytes=1024,
    )
    for rows, error in ((2, 0), (3, 1)):
        plane.Height = rows
        assert driver.lib.cuMemcpy2D_v2(ctypes.byref(plane)) == error
    for address in (begin, begin + 4096):
        driver.call("cuMemHostUnregister", address)
    driver.call("cuMemFree_v2", device)


def test_a_device_may_have_no_virtual_memory(driver: Driver) -> None:
    value, address = ctypes.c_int(), ctypes.c_ulonglong()

    def answers() -> tuple[int, int]:
        attribute = 102
        driver.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, 0)
        reserved = driver.lib.cuMemAddressReserve(
            ctypes.byref(address), 2 << 20, 0, 0, 0
        )
        if reserved == 0:
            driver.call("cuMemAddressFree", address, 2 << 20)
        return value.value, reserved

    assert answers() == (1, 0)
    cudasim.configure(no_virtual_memory=True)
    assert answers() == (0, 801)
    cudasim.reset()
    assert answers() == (1, 0)


def test_locked_memory_may_have_a_limit(driver: Driver) -> None:
    size = 2 * 4096
    host = np.zeros(size, np.uint8)

    def locked() -> tuple[int, int]:
        registered = driver.lib.cuMemHostRegister_v2(host.ctypes.data, size, 1)
        pointer = ctypes.c_void_p()
        allocated = driver.lib.cuMemHostAlloc(ctypes.byref(pointer), size, 1)
        live = cudasim.stats()
        assert live.registered_bytes == (0 if registered else size)
        assert live.host_allocation_bytes == (0 if allocated else size)
        if registered == 0:
            driver.call("cuMemHostUnregister", host.ctypes.data)
        if allocated == 0:
            driver.call("cuMemFreeHost", pointer)
        return registered, allocated

    assert locked() == (0, 0)
    cudasim.configure(max_locked_bytes=2 * size)
    assert locked() == (0, 0)
    cudasim.configure(max_locked_bytes=2 * size - 1)
    assert locked() == (0, 2)
    cudasim.configure(max_locked_bytes=size - 1)
    assert locked() == (2, 2)
    cudasim.configure(max_locked_bytes=0, locked_memory="rlimit")
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (size, hard))
        assert locked() == (0, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def test_copies_run_over_reservations_unless_they_may_not(driver: Driver) -> None:
    location = cudasim.MemLocation(cudasim.LOCATION_DEVICE, 0)
    properties = cudasim.MemAllocationProp(cudasim.ALLOCATION_PINNED, 0, location)
    access = cudasim.MemAccessDesc(location, cudasim.ACCESS_READ_WRITE)
    first = driver.make("cuMemAddressReserve", PIECE, 0, 0, 0)
    second = driver.make("cuMemAddressReserve", PIECE, 0, first + PIECE, 0)
    assert second == first + PIECE
    handles = []
    for address in (first, second):
        handles.append(driver.make("cuMemCreate", PIECE, ctypes.byref(properties), 0))
        driver.call("cuMemMap", address, PIECE, 0, handles[-1], 0)
        driver.call("cuMemSetAccess", address, PIECE, ctypes.byref(access), 1)
    data = np.random.default_rng(1).integers(0, 256, 4096, np.uint8)
    middle = second - data.size // 2
    driver.write(middle, data)
    assert np.array_equal(driver.read(middle, data.size), data)
    cudasim.configure(one_mapping_copies=True)
    with pytest.raises(cudasim.CudaError, match="INVALID_VALUE"):
        driver.write(middle, data)
    with pytest.raises(cudasim.CudaError, match="INVALID_VALUE"):
        driver.read(middle, data.size)
    cudasim.configure(one_mapping_copies=False)
    assert np.array_equal(driver.read(middle, data.size), data)
    for address, handle in zip((first, second), handles, strict=True):
        driver.call("cuMemUnmap", address, PIECE)
        driver.call("cuMemRelease", handle)
        driver.call("cuMemAddressFree", address, PIECE)


IPC = """
from vllm_rocm_memory.sim import cudasim
lib = cudasim.load()
context, pointer = ctypes.c_void_p(), ctypes.c_ulonglong()
cudasim.check(lib.cuInit(0), "cuInit")
cudasim.check(lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), "retain")
cudasim.check(lib.cuCtxSetCurrent(context), "set")
cudasim.check(lib.cuMemAlloc_v2(ctypes.byref(pointer), 1 << 20), "allocate")
cudasim.check(lib.cuMemsetD8_v2(pointer, 7, 1 << 20), "fill")
cudasim.check(lib.cuCtxSynchronize(), "synchronize")
handle = cudasim.IpcMemHandle()
cudasim.check(lib.cuIpcGetMemHandle(ctypes.byref(handle), pointer), "export")
print(bytes(handle).hex(), flush=True)
sys.stdin.readline()
back = ctypes.c_ubyte()
cudasim.check(lib.cuMemcpyDtoH_v2(ctypes.byref(back), pointer, 1), "read")
print(back.value)
"""


def test_two_processes_share_memory(driver: Driver, start: Any) -> None:
    program = start(IPC)
    handle = cudasim.IpcMemHandle.from_buffer_copy(bytes.fromhex(program.receive()))
    pointer = driver.make("cuIpcOpenMemHandle_v2", handle, 1)
    assert set(driver.read(pointer, 1 << 20)) == {7}
    driver.write(pointer, np.full(1, 9, np.uint8))
    driver.call("cuIpcCloseMemHandle", pointer)
    program.send("go")
    assert program.finish().split() == ["9"]


# --- beside HIP's ------------------------------------------------------------------


def test_each_library_has_accounts_of_its_own(driver: Driver, gpu: Any) -> None:
    ours = driver.make("cuMemAlloc_v2", 1 << 20)
    theirs = gpu.malloc(1 << 21)
    assert cudasim.stats().device_bytes == 1 << 20
    assert hipsim.stats().device_bytes == 1 << 21
    assert gpu.lib.hipFree(ours) == 1
    hipsim.fail("hipMalloc", 1, 2)
    assert driver.lib.cuMemFree_v2(theirs) == 1
    driver.call("cuMemFree_v2", ours)
    cudasim.reset()
    assert gpu.lib.hipMalloc(ctypes.byref(ctypes.c_void_p()), 64) == 2
    assert cudasim.stats().device_bytes == 0
    assert hipsim.stats().device_bytes == 1 << 21


@pytest.mark.parametrize("name", hipsim.PROFILES)
def test_a_release_of_hip_is_passed_over(run: Any, name: str) -> None:
    text = """
from vllm_rocm_memory.sim import cudasim
print(hipsim.profile(), cudasim.profile())
"""
    assert run(text, HIPSIM_PROFILE=name).split() == [name, cudasim.PROFILES[-1]]


def test_a_profile_that_there_is_not_is_refused(start: Any) -> None:
    text = "from vllm_rocm_memory.sim import cudasim; cudasim.load()"
    status, _, errors = start(text, HIPSIM_PROFILE="11.8").wait()
    assert status != 0
    assert "HIPSIM_PROFILE is '11.8'; it must be one of cuda-13.0" in errors


def test_profiles_are_the_drivers_own() -> None:
    assert all(name.startswith("cuda-") for name in cudasim.PROFILES)
    assert not set(cudasim.PROFILES) & set(hipsim.PROFILES)
    with pytest.raises(ValueError, match=r"no profile '7.16'; there are cuda-"):
        cudasim.reset("7.16")
