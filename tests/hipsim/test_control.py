# SPDX-License-Identifier: Apache-2.0
"""Profiles, faults, switches and accounts."""

import ctypes
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vllm_rocm_memory.sim import hipsim

PAGE = 4096

VERSIONS = {
    "7.1": 70_125_424,
    "7.2.3": 70_200_000,  # of these three the patch number is not established
    "7.12": 71_200_000,
    "7.13": 71_300_000,
    "7.15": 71_526_333,
    "7.16": 71_626_361,
}


def test_profiles_have_their_versions(gpu: Any, profile: str) -> None:
    assert hipsim.profile() == profile
    for name in ("hipRuntimeGetVersion", "hipDriverGetVersion"):
        version = ctypes.c_int()
        gpu.call(name, ctypes.byref(version))
        assert version.value == VERSIONS[profile]
        assert getattr(gpu.lib, name)(None) == 1


def test_profiles_are_all_covered() -> None:
    assert tuple(VERSIONS) == hipsim.PROFILES


def test_reset_keeps_the_profile_and_the_live(gpu: Any) -> None:
    hipsim.reset("7.15")
    pointer = gpu.malloc(100)
    hipsim.fail("hipFree", 1, 719)
    hipsim.reset()
    assert hipsim.profile() == "7.15"
    assert hipsim.stats().device_allocations == 1
    assert hipsim.stats().calls["hipMalloc"] == 0
    assert gpu.lib.hipFree(pointer) == 0


def test_unknown_names_are_answered_with_the_known(gpu: Any) -> None:
    known = re.escape(", ".join(hipsim.PROFILES))
    with pytest.raises(ValueError, match=rf"'7\.14'.*{known}"):
        hipsim.reset("7.14")
    with pytest.raises(ValueError, match=r"no profile 'cuda-13\.0'"):
        hipsim.reset("cuda-13.0")
    assert hipsim.profile() == hipsim.PROFILES[-1]
    with pytest.raises(ValueError, match=r"'hipMallocc'.*hipMalloc,"):
        hipsim.fail("hipMallocc", 1, 2)
    for nth, error in ((0, 2), (1, 0)):
        with pytest.raises(ValueError, match="counts from 1"):
            hipsim.fail("hipMalloc", nth, error)
    assert gpu.lib.hipsim_fail(None, 1, 2) == 1
    with pytest.raises(AttributeError, match="nothing_such"):
        getattr(hipsim, "nothing" + "_such")


def make_calls(gpu: Any) -> dict[str, Callable[[], int]]:
    """For each function a call that succeeds, as often as one likes.

    No other call of the function is made on the way, so that they can be counted.
    """
    lib = gpu.lib
    device = gpu.malloc(64)
    host = gpu.pinned(64)
    address = host.ctypes.data
    stream = gpu.stream()
    started, stopped = gpu.event(), gpu.event()
    for event in (started, stopped):
        gpu.call("hipEventRecord", event, stream)
    gpu.call("hipStreamSynchronize", stream)
    memory = gpu.virtual(PAGE)
    handle = gpu.create(PAGE)
    location = hipsim.MemLocation(hipsim.LOCATION_DEVICE, 0)
    properties = hipsim.MemAllocationProp(hipsim.ALLOCATION_PINNED, 0, location)
    access = hipsim.MemAccessDesc(location, hipsim.ACCESS_READ_WRITE)
    box = gpu.box((device, 8, 2), (address, 8, 2), (8, 2, 2))
    graph = gpu.graph(["hipMemsetAsync", device, 1, 64])
    executable = gpu.executable(graph)

    def out(ctype: Any) -> Any:
        return ctypes.byref(ctype())

    def plain(name: str, *arguments: Any) -> Callable[[], int]:
        return lambda: getattr(lib, name)(*arguments)

    def make(name: str, drop: str, *arguments: Any) -> Callable[[], int]:
        def call() -> int:
            made = ctypes.c_void_p()
            error: int = getattr(lib, name)(ctypes.byref(made), *arguments)
            if made.value:
                gpu.defer(drop, made.value)
            return error

        return call

    def host_free() -> int:
        pointer = gpu.make("hipHostMalloc", 64, 0)
        gpu.defer("hipHostFree", pointer)
        error: int = lib.hipHostFree(pointer)
        return error

    def register() -> int:
        array = gpu.pageable(64)
        gpu.defer("hipHostUnregister", array.ctypes.data)
        error: int = lib.hipHostRegister(array.ctypes.data, 64, 0)
        return error

    def reserve() -> int:
        made = ctypes.c_void_p()
        error: int = lib.hipMemAddressReserve(ctypes.byref(made), PAGE, 0, None, 0)
        gpu.defer("hipMemAddressFree", made.value, PAGE)
        return error

    def map() -> int:
        reserved = gpu.reserve(PAGE)
        gpu.defer("hipMemUnmap", reserved, PAGE)
        error: int = lib.hipMemMap(reserved, PAGE, 0, handle, 0)
        return error

    def begin_capture() -> int:
        other = gpu.stream()
        error: int = lib.hipStreamBeginCapture(other, 0)
        gpu.call("hipStreamDestroy", other)
        return error

    def end_capture() -> int:
        other, captured = gpu.stream(), ctypes.c_void_p()
        gpu.call("hipStreamBeginCapture", other, 0)
        error: int = lib.hipStreamEndCapture(other, ctypes.byref(captured))
        gpu.defer("hipGraphDestroy", captured.value)
        gpu.call("hipStreamDestroy", other)
        return error

    return {
        "hipInit": plain("hipInit", 0),
        "hipRuntimeGetVersion": plain("hipRuntimeGetVersion", out(ctypes.c_int)),
        "hipDriverGetVersion": plain("hipDriverGetVersion", out(ctypes.c_int)),
        "hipGetDeviceCount": plain("hipGetDeviceCount", out(ctypes.c_int)),
        "hipSetDevice": plain("hipSetDevice", 0),
        "hipGetDevice": plain("hipGetDevice", out(ctypes.c_int)),
        "hipDeviceSynchronize": plain("hipDeviceSynchronize"),
        "hipDeviceGetAttribute": plain(
            "hipDeviceGetAttribute", out(ctypes.c_int), 2, 0
        ),
        "hipDeviceGetPCIBusId": plain(
            "hipDeviceGetPCIBusId", ctypes.create_string_buffer(13), 13, 0
        ),
        "hipDeviceGetStreamPriorityRange": plain(
            "hipDeviceGetStreamPriorityRange", out(ctypes.c_int), None
        ),
        "hipStreamCreate": make("hipStreamCreate", "hipStreamDestroy"),
        "hipStreamCreateWithFlags": make(
            "hipStreamCreateWithFlags", "hipStreamDestroy", 1
        ),
        "hipStreamCreateWithPriority": make(
            "hipStreamCreateWithPriority", "hipStreamDestroy", 0, -1
        ),
        "hipStreamDestroy": lambda: lib.hipStreamDestroy(gpu.stream()),
        "hipStreamQuery": plain("hipStreamQuery", stream),
        "hipStreamSynchronize": plain("hipStreamSynchronize", stream),
        "hipStreamWaitEvent": plain("hipStreamWaitEvent", stream, started, 0),
        "hipEventCreate": make("hipEventCreate", "hipEventDestroy"),
        "hipEventCreateWithFlags": make(
            "hipEventCreateWithFlags", "hipEventDestroy", 2
        ),
        "hipEventDestroy": lambda: lib.hipEventDestroy(gpu.event()),
        "hipEventRecord": lambda: lib.hipEventRecord(gpu.event(), stream),
        "hipEventQuery": plain("hipEventQuery", started),
        "hipEventSynchronize": plain("hipEventSynchronize", started),
        "hipEventElapsedTime": plain(
            "hipEventElapsedTime", out(ctypes.c_float), started, stopped
        ),
        "hipMalloc": make("hipMalloc", "hipFree", 64),
        "hipFree": lambda: lib.hipFree(gpu.malloc(64)),
        "hipMemGetInfo": plain("hipMemGetInfo", out(ctypes.c_size_t), None),
        "hipMemGetAddressRange": plain("hipMemGetAddressRange", None, None, device),
        "hipHostMalloc": make("hipHostMalloc", "hipHostFree", 64, 0),
        "hipHostFree": host_free,
        "hipHostRegister": register,
        "hipHostUnregister": lambda: lib.hipHostUnregister(gpu.pinned(64).ctypes.data),
        "hipHostGetDevicePointer": plain(
            "hipHostGetDevicePointer", out(ctypes.c_void_p), address, 0
        ),
        "hipMemGetAllocationGranularity": plain(
            "hipMemGetAllocationGranularity",
            out(ctypes.c_size_t),
            ctypes.byref(properties),
            0,
        ),
        "hipMemAddressReserve": reserve,
        "hipMemAddressFree": lambda: lib.hipMemAddressFree(gpu.reserve(PAGE), PAGE),
        "hipMemCreate": make(
            "hipMemCreate", "hipMemRelease", PAGE, ctypes.byref(properties), 0
        ),
        "hipMemRelease": lambda: lib.hipMemRelease(gpu.create(PAGE)),
        "hipMemMap": map,
        "hipMemUnmap": lambda: lib.hipMemUnmap(gpu.virtual(PAGE), PAGE),
        "hipMemSetAccess": plain(
            "hipMemSetAccess", memory, PAGE, ctypes.byref(access), 1
        ),
        "hipMemGetAccess": plain(
            "hipMemGetAccess",
            out(ctypes.c_ulonglong),
            ctypes.byref(location),
            memory,
        ),
        "hipMemRetainAllocationHandle": make(
            "hipMemRetainAllocationHandle", "hipMemRelease", memory
        ),
        "hipMemGetAllocationPropertiesFromHandle": plain(
            "hipMemGetAllocationPropertiesFromHandle",
            out(hipsim.MemAllocationProp),
            handle,
        ),
        "hipMemset": plain("hipMemset", device, 1, 64),
        "hipMemsetAsync": plain("hipMemsetAsync", device, 1, 64, stream),
        "hipMemcpy": plain("hipMemcpy", device, address, 64, 1),
        "hipMemcpyAsync": plain("hipMemcpyAsync", device, address, 64, 4, stream),
        "hipMemcpy2D": plain("hipMemcpy2D", device, 16, address, 8, 8, 4, 1),
        "hipMemcpy2DAsync": plain(
            "hipMemcpy2DAsync", device, 16, address, 8, 8, 4, 1, stream
        ),
        "hipMemcpy3D": plain("hipMemcpy3D", box),
        "hipMemcpy3DAsync": plain("hipMemcpy3DAsync", box, stream),
        "hipMemcpyBatchAsync": lambda: gpu.batch([device], [address], [64], stream)[0],
        "hipStreamBeginCapture": begin_capture,
        "hipStreamEndCapture": end_capture,
        "hipStreamIsCapturing": plain(
            "hipStreamIsCapturing", stream, out(ctypes.c_uint)
        ),
        "hipStreamGetCaptureInfo": plain(
            "hipStreamGetCaptureInfo", stream, out(ctypes.c_uint), None
        ),
        "hipThreadExchangeStreamCaptureMode": plain(
            "hipThreadExchangeStreamCaptureMode", out(ctypes.c_uint)
        ),
        "hipGraphGetNodes": plain(
            "hipGraphGetNodes", graph, None, out(ctypes.c_size_t)
        ),
        "hipGraphDestroy": lambda: lib.hipGraphDestroy(gpu.graph()),
        "hipGraphInstantiate": make(
            "hipGraphInstantiate", "hipGraphExecDestroy", graph, None, None, 0
        ),
        "hipGraphInstantiateWithFlags": make(
            "hipGraphInstantiateWithFlags", "hipGraphExecDestroy", graph, 0
        ),
        "hipGraphLaunch": plain("hipGraphLaunch", executable, stream),
        "hipGraphExecDestroy": lambda: lib.hipGraphExecDestroy(gpu.executable(graph)),
        "hipIpcGetMemHandle": plain(
            "hipIpcGetMemHandle", out(hipsim.IpcMemHandle), device
        ),
    }


def make_ipc_calls(gpu: Any, export: Any) -> dict[str, Callable[[], int]]:
    """The two that need another process."""
    _, theirs = export('export(make("hipMalloc", PAGE)); sys.stdin.readline()')

    def open_memory() -> int:
        pointer = ctypes.c_void_p()
        error: int = gpu.lib.hipIpcOpenMemHandle(ctypes.byref(pointer), theirs, 1)
        gpu.defer("hipIpcCloseMemHandle", pointer.value)
        return error

    return {
        "hipIpcOpenMemHandle": open_memory,
        "hipIpcCloseMemHandle": lambda: gpu.lib.hipIpcCloseMemHandle(gpu.open(theirs)),
    }


@pytest.mark.parametrize("name", hipsim.CALLS)
def test_the_nth_call_fails_and_only_that(gpu: Any, name: str, export: Any) -> None:
    ipc = name in ("hipIpcOpenMemHandle", "hipIpcCloseMemHandle")
    call = (make_ipc_calls(gpu, export) if ipc else make_calls(gpu))[name]
    before = hipsim.stats()
    hipsim.fail(name, 2, 719)
    hipsim.fail(name, 4, 999)
    assert [call() for _ in range(5)] == [0, 719, 0, 999, 0]
    assert gpu.lib.hipGetLastError() == 999
    assert hipsim.stats().calls[name] == before.calls[name] + 5
    gpu.call("hipDeviceSynchronize")
    assert call() == 0


def test_a_failing_call_does_nothing(gpu: Any) -> None:
    device, host = gpu.malloc(64), gpu.pinned(64, seed=1)
    stream, event = gpu.stream(), gpu.event()
    gpu.call("hipMemset", device, 7, 64)
    gpu.call("hipDeviceSynchronize")
    before = hipsim.stats()
    for name in ("hipFree", "hipMemcpyAsync", "hipMemset", "hipStreamDestroy"):
        hipsim.fail(name, 1, 719)
    assert gpu.lib.hipFree(device) == 719
    assert gpu.lib.hipMemcpyAsync(device, host.ctypes.data, 64, 1, stream) == 719
    assert gpu.lib.hipMemset(device, 1, 64) == 719
    assert gpu.lib.hipStreamDestroy(stream) == 719
    hipsim.fail("hipEventRecord", 1, 719)
    assert gpu.lib.hipEventRecord(event, stream) == 719
    gpu.call("hipDeviceSynchronize")
    after = hipsim.stats()
    assert (after.copies, after.streams) == (before.copies, before.streams)
    assert after.device_bytes == before.device_bytes
    assert (gpu.read(device, 64) == 7).all()


def test_a_failing_call_makes_and_ends_nothing(gpu: Any) -> None:
    lib, out = gpu.lib, ctypes.c_void_p()
    device, memory, handle = gpu.malloc(64), gpu.virtual(PAGE), gpu.create(PAGE)
    reserved, array, stream = gpu.reserve(PAGE), gpu.pinned(64), gpu.stream()
    graph = gpu.graph(["hipMemsetAsync", device, 1, 64])
    executable = gpu.executable(graph)
    access = hipsim.MemAccessDesc(hipsim.MemLocation(hipsim.LOCATION_DEVICE, 0), 0)
    rows: list[tuple[str, *tuple[Any, ...]]] = [
        ("hipMalloc", ctypes.byref(out), 64),
        ("hipHostMalloc", ctypes.byref(out), 64, 0),
        ("hipHostUnregister", array.ctypes.data),
        ("hipMemAddressReserve", ctypes.byref(out), PAGE, 0, None, 0),
        ("hipMemAddressFree", reserved, PAGE),
        ("hipMemRelease", handle),
        ("hipMemMap", reserved, PAGE, 0, handle, 0),
        ("hipMemUnmap", memory, PAGE),
        ("hipMemSetAccess", memory, PAGE, ctypes.byref(access), 1),
        ("hipMemRetainAllocationHandle", ctypes.byref(out), memory),
        ("hipStreamCreate", ctypes.byref(out)),
        ("hipEventCreate", ctypes.byref(out)),
        ("hipStreamBeginCapture", stream, 0),
        ("hipGraphInstantiate", ctypes.byref(out), graph, None, None, 0),
        ("hipGraphLaunch", executable, stream),
        ("hipGraphDestroy", graph),
        ("hipGraphExecDestroy", executable),
        ("hipIpcGetMemHandle", ctypes.byref(hipsim.IpcMemHandle()), device),
    ]
    gpu.load(memory, gpu.pinned(PAGE, seed=1))
    before = hipsim.stats()
    for name, *arguments in rows:
        hipsim.fail(name, 1, 719)
        assert getattr(lib, name)(*arguments) == 719, name
    gpu.call("hipDeviceSynchronize")
    after = hipsim.stats()
    assert replace(after, calls=before.calls) == before
    assert out.value is None
    gpu.read(memory, PAGE)  # which the access that failed would have taken away
    gpu.call("hipMemMap", reserved, PAGE, 0, handle, 0)
    gpu.call("hipMemUnmap", reserved, PAGE)


def test_a_fault_of_a_batch_blames_the_first_copy(gpu: Any, profile: str) -> None:
    device, host = gpu.malloc(64), gpu.pinned(64, seed=1)
    hipsim.fail("hipMemcpyBatchAsync", 1, 719)
    error, index = gpu.batch([device], [host.ctypes.data], [64])
    assert error == 719
    assert index == (0 if profile in ("7.1", "7.2.3") else 2**64 - 1)
    assert hipsim.stats().batch_calls == 0


def test_last_error_stays_until_it_is_taken(gpu: Any) -> None:
    lib = gpu.lib
    assert lib.hipGetLastError() == 0
    assert lib.hipSetDevice(99) == 101
    assert lib.hipSetDevice(0) == 0
    assert (lib.hipPeekAtLastError(), lib.hipPeekAtLastError()) == (101, 101)
    assert (lib.hipGetLastError(), lib.hipGetLastError()) == (101, 0)


def test_not_ready_is_no_last_error(gpu: Any) -> None:
    event, stream = gpu.event(), gpu.stream()
    host, device = gpu.pinned(8), gpu.malloc(8)
    hipsim.configure(copy_latency_us=300_000)
    gpu.call("hipMemcpyAsync", device, host.ctypes.data, 8, 1, stream)
    gpu.call("hipEventRecord", event, stream)
    assert gpu.lib.hipEventQuery(event) == hipsim.NOT_READY
    assert gpu.lib.hipStreamQuery(stream) == hipsim.NOT_READY
    assert gpu.lib.hipGetLastError() == 0


def test_a_large_copy_is_exact(gpu: Any) -> None:
    data = gpu.pinned(3 << 20, seed=5)
    device = gpu.malloc(data.size)
    gpu.load(device, data)
    assert np.array_equal(gpu.read(device, data.size), data)
