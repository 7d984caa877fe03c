# SPDX-License-Identifier: Apache-2.0
"""Profiles, faults, switches and accounts."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vllm_rocm_memory.sim import hipsim

VERSIONS = {
    "7.2.3": 70_200_000,  # patch number not established
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
    assert set(hipsim.PROFILES) == set(VERSIONS)


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
    with pytest.raises(ValueError, match=r"'7\.14'.*7\.2\.3, 7\.15, 7\.16"):
        hipsim.reset("7.14")
    with pytest.raises(ValueError, match=r"'hipMallocc'.*hipMalloc,"):
        hipsim.fail("hipMallocc", 1, 2)
    for nth, error in ((0, 2), (1, 0)):
        with pytest.raises(ValueError, match="counts from 1"):
            hipsim.fail("hipMalloc", nth, error)
    with pytest.raises(ValueError, match="copy_latency_us is -1"):
        hipsim.configure(copy_latency_us=-1)
    with pytest.raises(AttributeError, match="nothing_such"):
        getattr(hipsim, "nothing" + "_such")
    assert gpu.lib.hipsim_set_switch(b"nothing", 1) == 1


def test_assert_clean_names_what_is_live(gpu: Any) -> None:
    hipsim.assert_clean()
    gpu.malloc(100)
    gpu.stream()
    gpu.event()
    gpu.event()
    gpu.pinned(50)
    with pytest.raises(AssertionError) as info:
        hipsim.assert_clean()
    text = str(info.value)
    for part in (
        "1 streams",
        "2 events",
        "1 device allocations (100 bytes)",
        "1 registered host ranges (50 bytes)",
    ):
        assert part in text
    assert "host allocations" not in text


def make_calls(gpu: Any) -> dict[str, Callable[[], int]]:
    """For each function a call that succeeds, as often as one likes."""
    lib = gpu.lib
    integer = ctypes.byref(ctypes.c_int())
    size = ctypes.byref(ctypes.c_size_t())
    ms = ctypes.byref(ctypes.c_float())
    device = gpu.malloc(64)
    host = gpu.pinned(64)
    address = host.ctypes.data
    stream = gpu.stream()
    started, stopped = gpu.event(), gpu.event()
    for event in (started, stopped):
        gpu.call("hipEventRecord", event, stream)
    gpu.call("hipStreamSynchronize", stream)

    def make(name: str, drop: str, *arguments: Any) -> Callable[[], int]:
        def call() -> int:
            handle = ctypes.c_void_p()
            error: int = getattr(lib, name)(ctypes.byref(handle), *arguments)
            if handle.value:
                gpu.left.append((getattr(lib, drop), handle.value))
            return error

        return call

    def register() -> int:
        array = gpu.pageable(64)
        error: int = lib.hipHostRegister(array.ctypes.data, 64, 0)
        if error == 0:
            gpu.left.append((lib.hipHostUnregister, array.ctypes.data))
        return error

    def host_free() -> int:
        pointer = ctypes.c_void_p()
        lib.hipHostMalloc(ctypes.byref(pointer), 64, 0)
        gpu.left.append((lib.hipHostFree, pointer.value))
        error: int = lib.hipHostFree(pointer)
        return error

    return {
        "hipInit": lambda: lib.hipInit(0),
        "hipRuntimeGetVersion": lambda: lib.hipRuntimeGetVersion(integer),
        "hipDriverGetVersion": lambda: lib.hipDriverGetVersion(integer),
        "hipGetDeviceCount": lambda: lib.hipGetDeviceCount(integer),
        "hipSetDevice": lambda: lib.hipSetDevice(0),
        "hipGetDevice": lambda: lib.hipGetDevice(integer),
        "hipDeviceSynchronize": lib.hipDeviceSynchronize,
        "hipDeviceGetStreamPriorityRange": lambda: lib.hipDeviceGetStreamPriorityRange(
            integer, None
        ),
        "hipStreamCreate": make("hipStreamCreate", "hipStreamDestroy"),
        "hipStreamCreateWithFlags": make(
            "hipStreamCreateWithFlags", "hipStreamDestroy", 1
        ),
        "hipStreamCreateWithPriority": make(
            "hipStreamCreateWithPriority", "hipStreamDestroy", 0, -1
        ),
        "hipStreamDestroy": lambda: lib.hipStreamDestroy(gpu.stream()),
        "hipStreamQuery": lambda: lib.hipStreamQuery(stream),
        "hipStreamSynchronize": lambda: lib.hipStreamSynchronize(stream),
        "hipStreamWaitEvent": lambda: lib.hipStreamWaitEvent(stream, started, 0),
        "hipEventCreate": make("hipEventCreate", "hipEventDestroy"),
        "hipEventCreateWithFlags": make(
            "hipEventCreateWithFlags", "hipEventDestroy", 2
        ),
        "hipEventDestroy": lambda: lib.hipEventDestroy(gpu.event()),
        "hipEventRecord": lambda: lib.hipEventRecord(gpu.event(), stream),
        "hipEventQuery": lambda: lib.hipEventQuery(started),
        "hipEventSynchronize": lambda: lib.hipEventSynchronize(started),
        "hipEventElapsedTime": lambda: lib.hipEventElapsedTime(ms, started, stopped),
        "hipMalloc": make("hipMalloc", "hipFree", 64),
        "hipFree": lambda: lib.hipFree(gpu.malloc(64)),
        "hipMemGetInfo": lambda: lib.hipMemGetInfo(size, size),
        "hipHostMalloc": make("hipHostMalloc", "hipHostFree", 64, 0),
        "hipHostFree": host_free,
        "hipHostRegister": register,
        "hipHostUnregister": lambda: lib.hipHostUnregister(gpu.pinned(64).ctypes.data),
        "hipMemset": lambda: lib.hipMemset(device, 1, 64),
        "hipMemsetAsync": lambda: lib.hipMemsetAsync(device, 1, 64, stream),
        "hipMemcpy": lambda: lib.hipMemcpy(device, address, 64, 1),
        "hipMemcpyAsync": lambda: lib.hipMemcpyAsync(device, address, 64, 4, stream),
        "hipMemcpyBatchAsync": lambda: gpu.batch([device], [address], [64], stream)[0],
    }


@pytest.mark.parametrize("name", hipsim.CALLS)
def test_the_nth_call_fails_and_only_that(gpu: Any, name: str) -> None:
    call = make_calls(gpu)[name]
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


def test_a_fault_of_a_batch_blames_the_first_copy(gpu: Any, profile: str) -> None:
    device, host = gpu.malloc(64), gpu.pinned(64, seed=1)
    hipsim.fail("hipMemcpyBatchAsync", 1, 719)
    error, index = gpu.batch([device], [host.ctypes.data], [64])
    assert error == 719
    assert index == (0 if profile == "7.2.3" else 2**64 - 1)
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


def test_corrupt_loads_change_every_byte_on_its_way_in_only(gpu: Any) -> None:
    host, device, back = gpu.pinned(5000, seed=3), gpu.malloc(5000), gpu.pinned(5000)
    hipsim.configure(corrupt_loads=True)
    gpu.load(device, host)
    hipsim.configure(copy_latency_us=0)
    assert (gpu.read(device, 5000) == ~host).all()
    gpu.batch([device], [host.ctypes.data], [5000])
    gpu.batch([back.ctypes.data], [device], [5000])
    gpu.call("hipDeviceSynchronize")
    assert (back == ~host).all()
    hipsim.configure(corrupt_loads=False)
    gpu.load(device, host)
    assert (gpu.read(device, 5000) == host).all()


def test_accounts_are_by_call_engine_and_direction(gpu: Any) -> None:
    device, pinned = gpu.malloc(1 << 20), gpu.pinned(1 << 20)
    pageable = gpu.pageable(1 << 20)
    small, large = 16 * 1024, 16 * 1024 + 1
    rows = [
        ("blit", "h2d", device, pinned.ctypes.data, small),
        ("sdma", "h2d", device, pinned.ctypes.data, large),
        ("blit", "d2h", pinned.ctypes.data, device, small),
        ("sdma", "d2h", pinned.ctypes.data, device, large),
        ("blit", "d2d", device + large, device, large),
        ("blit", "h2h", pinned.ctypes.data + large, pinned.ctypes.data, large),
        ("host", "h2h", pageable.ctypes.data + large, pageable.ctypes.data, large),
    ]
    for engine, direction, destination, source, size in rows:
        hipsim.reset()
        gpu.call("hipMemcpy", destination, source, size, hipsim.DEFAULT_KIND)
        gpu.call("hipDeviceSynchronize")
        stats = hipsim.stats()
        moved = {key: count for key, count in stats.copies.items() if count.copies}
        assert moved == {(engine, direction): (1, size)}
        assert (stats.calls["hipMemcpy"], stats.staged_copies) == (1, 0)
    hipsim.reset()
    gpu.call("hipMemcpy", device, pageable.ctypes.data, large, 1)
    gpu.call("hipMemcpy", pageable.ctypes.data, device, small, 2)
    stats = hipsim.stats()
    assert stats.copies["sdma", "h2d"] == (1, large)
    assert stats.copies["blit", "d2h"] == (1, small)
    assert (stats.staged_copies, stats.staged_bytes) == (2, small + large)


def test_a_large_copy_is_exact(gpu: Any) -> None:
    data = gpu.pinned(3 << 20, seed=5)
    device = gpu.malloc(data.size)
    gpu.load(device, data)
    assert np.array_equal(gpu.read(device, data.size), data)
