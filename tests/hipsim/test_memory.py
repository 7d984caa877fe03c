# SPDX-License-Identifier: Apache-2.0
"""Devices, device memory and host memory."""

import ctypes
from typing import Any, NamedTuple

import numpy as np
import pytest

from vllm_rocm_memory.sim import hipsim

VRAM = 8 << 30
PAGE = 4096


def test_devices_are_counted_and_chosen_per_thread(gpu: Any) -> None:
    lib = gpu.lib
    count, device = ctypes.c_int(), ctypes.c_int()
    gpu.call("hipGetDeviceCount", ctypes.byref(count))
    assert count.value == 8
    for wrong in (-1, count.value):
        assert lib.hipSetDevice(wrong) == 101
    gpu.call("hipSetDevice", 7)
    gpu.call("hipGetDevice", ctypes.byref(device))
    assert device.value == 7
    for name in ("hipGetDevice", "hipGetDeviceCount"):
        assert getattr(lib, name)(None) == 1
    assert (lib.hipInit(0), lib.hipInit(1)) == (0, 1)


def test_memory_of_a_device_is_its_own(gpu: Any) -> None:
    assert gpu.memory_info() == (VRAM, VRAM)
    first = gpu.malloc(1 << 20)
    gpu.call("hipSetDevice", 1)
    assert gpu.memory_info() == (VRAM, VRAM)
    second = gpu.malloc(1)
    assert gpu.memory_info() == (VRAM - 4096, VRAM)
    gpu.call("hipSetDevice", 0)
    assert gpu.memory_info() == (VRAM - (1 << 20), VRAM)
    gpu.call("hipMemcpy", first, second, 1, hipsim.DEFAULT_KIND)
    assert gpu.lib.hipMemGetInfo(None, None) == 0


def test_out_of_memory_is_2_and_changes_nothing(gpu: Any) -> None:
    pointer = ctypes.c_void_p(5)
    half = gpu.malloc(VRAM // 2)
    assert gpu.lib.hipMalloc(ctypes.byref(pointer), VRAM // 2 + 1) == 2
    assert pointer.value is None
    assert gpu.memory_info()[0] == VRAM // 2
    gpu.malloc(VRAM // 2)
    assert gpu.lib.hipMalloc(ctypes.byref(pointer), 1) == 2
    gpu.call("hipFree", half)
    gpu.malloc(VRAM // 2)


def test_empty_and_wrong_allocations(gpu: Any) -> None:
    lib = gpu.lib
    pointer = ctypes.c_void_p(5)
    assert lib.hipMalloc(ctypes.byref(pointer), 0) == 0
    assert pointer.value is None
    assert lib.hipMalloc(None, 10) == 1
    assert (lib.hipFree(None), lib.hipHostFree(None)) == (0, 0)
    device, host = gpu.malloc(100), gpu.pinned(100)
    for wrong in (device + 1, device + 4096, host.ctypes.data, 16):
        assert lib.hipFree(wrong) == 1
    for wrong in (device, host.ctypes.data):
        assert lib.hipHostFree(wrong) == 1
    assert (lib.hipFree(device), lib.hipFree(device)) == (0, 1)


def test_fresh_device_memory_is_the_hosts_to_read_and_write(gpu: Any) -> None:
    device = gpu.malloc(4096)
    view = (ctypes.c_char * 4096).from_address(device)
    assert bytes(view) == bytes(4096)
    view[10] = b"x"
    assert gpu.read(device, 11)[10] == ord("x")


@pytest.mark.parametrize("use", ["copy from", "copy to", "fill"])
def test_stale_and_overlong_device_addresses_are_refused(gpu: Any, use: str) -> None:
    host = gpu.pinned(8192)
    device, neighbour = gpu.malloc(4096), gpu.malloc(4096)
    assert neighbour == device + 4096

    def attempt(pointer: int, size: int) -> Any:
        if use == "copy from":
            return gpu.lib.hipMemcpy(host.ctypes.data, pointer, size, 4)
        if use == "copy to":
            return gpu.lib.hipMemcpy(pointer, host.ctypes.data, size, 4)
        return gpu.lib.hipMemset(pointer, 0, size)

    assert attempt(device, 4096) == 0
    assert attempt(device, 4097) == 1
    assert attempt(device + 1, 4096) == 1
    assert attempt(neighbour + 4096, 1) == 1
    gpu.call("hipFree", device)
    assert attempt(device, 1) == 1
    assert attempt(neighbour, 4096) == 0


def test_host_ranges_are_registered_once(gpu: Any) -> None:
    lib, host = gpu.lib, gpu.pageable(1000)
    base = host.ctypes.data
    assert lib.hipHostRegister(base, 500, 0) == 0
    for start, size in ((0, 500), (499, 1), (0, 1000)):
        assert lib.hipHostRegister(base + start, size, 0) == 712
    assert lib.hipHostRegister(base + 500, 500, 1) == 0
    stats = hipsim.stats()
    assert (stats.registered_ranges, stats.registered_bytes) == (2, 1000)
    for pointer, size, flags in ((None, 1, 0), (base, 0, 0), (base, 1, 0x40)):
        assert lib.hipHostRegister(pointer, size, flags) == 1
    assert lib.hipHostUnregister(None) == 1
    assert lib.hipHostUnregister(base + 1) == 713
    for start in (0, 500):
        assert lib.hipHostUnregister(base + start) == 0
        assert lib.hipHostUnregister(base + start) == 713


def test_a_copy_past_the_end_of_a_registered_range_is_refused(gpu: Any) -> None:
    host, device = gpu.pageable(1000, seed=1), gpu.malloc(1000)
    gpu.call("hipHostRegister", host.ctypes.data, 500, 0)
    gpu.defer("hipHostUnregister", host.ctypes.data)
    copy = gpu.lib.hipMemcpy
    assert copy(device, host.ctypes.data, 500, 1) == 0
    assert copy(device, host.ctypes.data, 501, 1) == 1
    assert copy(device, host.ctypes.data + 500, 500, 1) == 0


def test_host_allocations_are_registered_memory(gpu: Any) -> None:
    lib, device, pointer = gpu.lib, gpu.malloc(100), ctypes.c_void_p(5)
    assert lib.hipHostMalloc(None, 1, 0) == 1
    assert lib.hipHostMalloc(ctypes.byref(pointer), 0, 0) == 0
    assert pointer.value is None
    gpu.call("hipHostMalloc", ctypes.byref(pointer), 100, 0)
    gpu.call("hipMemcpy", device, pointer, 100, 1)
    stats = hipsim.stats()
    assert (stats.host_allocations, stats.host_allocation_bytes) == (1, 100)
    assert (stats.staged_copies, stats.registered_ranges) == (0, 0)
    assert lib.hipHostUnregister(pointer) == 713
    assert lib.hipFree(pointer) == 1
    gpu.call("hipHostFree", pointer)
    assert lib.hipHostFree(pointer) == 1


H2H, H2D, D2H, D2D, DEFAULT, NO_CU = 0, 1, 2, 3, 4, 1024


@pytest.mark.parametrize(
    ("to", "source", "right", "wrong"),
    [
        ("device", "pinned", {H2H, H2D, D2H, D2D, DEFAULT, NO_CU}, set()),
        ("device", "pageable", {H2H, H2D, D2D, DEFAULT, NO_CU}, {D2H}),
        ("pageable", "device", {H2H, D2H, D2D, DEFAULT, NO_CU}, {H2D}),
        ("pageable", "pageable", {H2H, DEFAULT}, {H2D, D2H, D2D, NO_CU}),
    ],
)
def test_a_kind_must_fit_unknown_addresses(
    gpu: Any, to: str, source: str, right: set[int], wrong: set[int]
) -> None:
    address = {
        "device": gpu.malloc(100),
        "pinned": gpu.pinned(100).ctypes.data,
        "pageable": gpu.pageable(100).ctypes.data,
    }
    other = {**address, "pageable": gpu.pageable(100).ctypes.data}
    for kind in (H2H, H2D, D2H, D2D, DEFAULT, NO_CU):
        error = gpu.lib.hipMemcpy(address[to], other[source], 100, kind)
        assert error == (1 if kind in wrong else 0)
        assert (kind in right) != (kind in wrong)
    for kind in (5, 1023):
        assert gpu.lib.hipMemcpy(address[to], other[source], 100, kind) == 21


def test_the_kind_without_compute_units_is_the_copy_engines(gpu: Any) -> None:
    device = gpu.malloc(200)
    gpu.call("hipMemcpy", device + 100, device, 100, NO_CU)
    gpu.call("hipDeviceSynchronize")
    assert hipsim.stats().copies["sdma", "d2d"] == (1, 100)


def test_copies_of_nothing_and_of_null(gpu: Any) -> None:
    device = gpu.malloc(100)
    copy, fill = gpu.lib.hipMemcpy, gpu.lib.hipMemset
    assert copy(None, None, 0, 4) == 0
    assert fill(None, 0, 0) == 0
    assert (copy(device, None, 1, 4), copy(None, device, 1, 4)) == (1, 1)
    assert (fill(None, 0, 1), fill(gpu.pageable(1).ctypes.data, 0, 1)) == (1, 1)


def test_fills_take_the_low_byte(gpu: Any) -> None:
    device, host = gpu.malloc(100), gpu.pinned(10)
    gpu.call("hipMemset", device, 0x1FE, 100)
    gpu.call("hipMemset", device + 50, 3, 10)
    gpu.call("hipMemset", host.ctypes.data, 9, 10)
    assert (host == 9).all()
    data = gpu.read(device, 100)
    assert (data[50:60] == 3).all()
    assert (data[:50] == 0xFE).all()
    assert (data[60:] == 0xFE).all()


# --- virtual memory ----------------------------------------------------------------


class Release(NamedTuple):
    """What a release makes of virtual memory.

    Attributes:
        recommended: Granularity in bytes.
        keeps: Memory comes back with the address range, not with the mapping.
        bad_map: The error of a mapping that cannot be made.
        host: The error of asking for host access.
    """

    recommended: int = 2 << 20
    keeps: bool = False
    bad_map: int = 2
    host: int = 0


RELEASES = {
    "7.1": Release(recommended=PAGE, bad_map=0, host=1),
    "7.2.3": Release(recommended=PAGE, keeps=True),
    "7.12": Release(keeps=True),
    "7.13": Release(),
    "7.15": Release(),
    "7.16": Release(),
}


@pytest.fixture
def release(profile: str) -> Release:
    return RELEASES[profile]


def test_every_release_has_a_row() -> None:
    assert tuple(RELEASES) == hipsim.PROFILES


def test_granularity_by_release(gpu: Any, release: Release) -> None:
    location = hipsim.MemLocation(hipsim.LOCATION_DEVICE, 0)
    properties = hipsim.MemAllocationProp(hipsim.ALLOCATION_PINNED, 0, location)
    size = ctypes.c_size_t()
    for option, expected in enumerate((PAGE, release.recommended)):
        gpu.call(
            "hipMemGetAllocationGranularity",
            ctypes.byref(size),
            ctypes.byref(properties),
            option,
        )
        assert size.value == expected


def test_memory_comes_back_by_release(gpu: Any, release: Release) -> None:
    def free() -> int:
        free_bytes: int = gpu.memory_info()[0]
        return free_bytes

    size = 4 * PAGE
    address, handle = gpu.reserve(size), gpu.create(size)
    assert free() == VRAM - size
    gpu.map(address, size, handle)
    gpu.call("hipMemRelease", handle)
    assert free() == VRAM - size
    gpu.call("hipMemUnmap", address, size)
    stats = hipsim.stats()
    assert (stats.handles, stats.mappings, stats.mapped_bytes) == (0, 0, 0)
    assert free() == (VRAM - size if release.keeps else VRAM)
    gpu.call("hipMemAddressFree", address, size)
    assert free() == VRAM


def test_a_wrong_mapping_by_release(gpu: Any, release: Release) -> None:
    address = gpu.virtual(PAGE, PAGE)
    data = gpu.pinned(2 * PAGE, seed=1)
    gpu.load(address, data)
    other, before = gpu.create(PAGE), hipsim.stats().mappings
    for wrong in (address + PAGE, address + 2 * PAGE, data.ctypes.data):
        assert gpu.lib.hipMemMap(wrong, PAGE, 0, other, 0) == release.bad_map
    assert hipsim.stats().mappings == before
    assert np.array_equal(gpu.read(address, 2 * PAGE), data)


def test_host_access_by_release(gpu: Any, release: Release) -> None:
    address = gpu.virtual(PAGE)
    location = hipsim.MemLocation(hipsim.LOCATION_HOST, 0)
    access = hipsim.MemAccessDesc(location, hipsim.ACCESS_READ_WRITE)
    error = gpu.lib.hipMemSetAccess(address, PAGE, ctypes.byref(access), 1)
    assert error == release.host
    if error == 0:
        gpu.load(address, gpu.pinned(PAGE, seed=1))
        assert ctypes.string_at(address, PAGE) == bytes(gpu.arrays[-1])


NONE, READ, READ_WRITE = 0, 1, 3


@pytest.mark.parametrize("access", [None, NONE, READ, READ_WRITE])
def test_a_device_needs_access(gpu: Any, profile: str, access: int | None) -> None:
    address, handle, host = gpu.reserve(PAGE), gpu.create(PAGE), gpu.pinned(PAGE)
    gpu.map(address, PAGE, handle)
    if access is not None:
        gpu.set_access(address, PAGE, access)
    copy, fill = gpu.lib.hipMemcpy, gpu.lib.hipMemset
    for call, *arguments in (
        [copy, address, host.ctypes.data, PAGE, 4],
        [fill, address, 1, PAGE],
    ):
        assert call(*arguments) == (0 if access == READ_WRITE else 999)
    readable = access in (READ, READ_WRITE)
    assert copy(host.ctypes.data, address, PAGE, 4) == (0 if readable else 999)
    gpu.call("hipSetDevice", 1)
    assert copy(host.ctypes.data, address, PAGE, 4) == 999


def test_one_memory_is_mapped_twice(gpu: Any, profile: str) -> None:
    handle, data = gpu.create(PAGE), gpu.pinned(PAGE, seed=1)
    first, second = gpu.reserve(PAGE), gpu.reserve(PAGE)
    for address in (first, second):
        gpu.map(address, PAGE, handle)
        gpu.set_access(address, PAGE)
    gpu.load(first, data)
    assert np.array_equal(gpu.read(second, PAGE), data)
    gpu.call("hipMemUnmap", first, PAGE)
    assert np.array_equal(gpu.read(second, PAGE), data)
    assert gpu.lib.hipMemset(first, 0, 1) == 1


# --- what addresses name -----------------------------------------------------------


def test_addresses_name_their_memory(gpu: Any) -> None:
    device, virtual, host = gpu.malloc(100), gpu.virtual(PAGE, PAGE), gpu.pinned(100)
    base, size = ctypes.c_void_p(), ctypes.c_size_t()
    for address, expected in (
        (device + 99, (device, 100)),
        (virtual + PAGE + 5, (virtual + PAGE, PAGE)),
        (host.ctypes.data + 1, (host.ctypes.data, 100)),
    ):
        gpu.call(
            "hipMemGetAddressRange", ctypes.byref(base), ctypes.byref(size), address
        )
        assert (base.value, size.value) == expected
    pageable = gpu.pageable(100).ctypes.data
    for wrong in (device + 100, virtual + 2 * PAGE, pageable, None):
        assert gpu.lib.hipMemGetAddressRange(None, None, wrong) == 500


def test_attributes_of_a_device(gpu: Any) -> None:
    value = ctypes.c_int()
    for attribute, expected in ((67, 0x65), (89, 1), (85, 1), (16, 0)):
        gpu.call("hipDeviceGetAttribute", ctypes.byref(value), attribute, 3)
        assert value.value == expected
    ask = gpu.lib.hipDeviceGetAttribute
    assert ask(ctypes.byref(value), 12345, 0) == 1
    assert ask(ctypes.byref(value), 89, 8) == 101
    assert ask(None, 89, 0) == 1
