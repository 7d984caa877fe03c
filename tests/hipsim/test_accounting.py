# SPDX-License-Identifier: Apache-2.0
"""What the simulator counts: what is live, what was done, and what did it."""

import ctypes
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import pytest

from vllm_rocm_memory.sim import hipsim
from vllm_rocm_memory.sim.simulator import Stats

PAGE = 4096
MIB = 1 << 20

DONE = {
    "batch_calls",
    "batch_copies",
    "staged_copies",
    "staged_bytes",
    "pitched_copies",
    "pitched_bytes",
    "pitched_packets",
    "fills",
    "filled_bytes",
    "memory_faults",
    "pending_faults",
    "ipc_exports",
    "ipc_virtual_exports",
    "ipc_failed_imports",
    "calls",
    "copies",
    "host_copies",
}
"""Counters that only go up."""

LIVE = {field.name for field in fields(Stats)} - DONE


def counters(names: set[str]) -> dict[str, Any]:
    """The ones that are not 0."""
    stats = hipsim.stats()
    return {name: getattr(stats, name) for name in names if getattr(stats, name)}


def live() -> dict[str, int]:
    return counters(LIVE)


def done() -> dict[str, int]:
    return counters(DONE - {"calls", "copies", "host_copies"})


# --- what is live ------------------------------------------------------------------


class Thing(NamedTuple):
    """Something that a program can forget to end.

    Attributes:
        make: Returns it, and leaves nothing else behind.
        end: What ends it: functions, with arguments after the first.
        counts: What it adds to the counters.
        text: What `assert_clean` says of it.
    """

    make: Callable[[Any], int]
    end: list[tuple[Any, ...]]
    counts: dict[str, int]
    text: str


def host_allocation(gpu: Any) -> int:
    pointer: int = gpu.make("hipHostMalloc", 100, 0)
    gpu.defer("hipHostFree", pointer)
    return pointer


def mapping(gpu: Any) -> int:
    address, handle = gpu.reserve(3 * PAGE), gpu.create(2 * PAGE)
    gpu.map(address, 2 * PAGE, handle)
    gpu.call("hipMemRelease", handle)
    return int(address)


def capture(gpu: Any) -> int:
    stream: int = gpu.stream()
    gpu.call("hipStreamBeginCapture", stream, 0)
    return stream


def executable(gpu: Any) -> int:
    graph = gpu.graph()
    made: int = gpu.executable(graph)
    gpu.call("hipGraphDestroy", graph)
    return made


THINGS = {
    "stream": Thing(
        lambda gpu: gpu.stream(),
        [("hipStreamDestroy",)],
        {"streams": 1},
        "1 streams",
    ),
    "event": Thing(
        lambda gpu: gpu.event(),
        [("hipEventDestroy",)],
        {"events": 1},
        "1 events",
    ),
    "device allocation": Thing(
        lambda gpu: gpu.malloc(100),
        [("hipFree",)],
        {"device_allocations": 1, "device_bytes": 100},
        "1 device allocations (100 bytes)",
    ),
    "registered range": Thing(
        lambda gpu: gpu.pinned(50).ctypes.data,
        [("hipHostUnregister",)],
        {"registered_ranges": 1, "registered_bytes": 50},
        "1 registered host ranges (50 bytes)",
    ),
    "host allocation": Thing(
        host_allocation,
        [("hipHostFree",)],
        {"host_allocations": 1, "host_allocation_bytes": 100},
        "1 host allocations (100 bytes)",
    ),
    "reservation": Thing(
        lambda gpu: gpu.reserve(2 * PAGE),
        [("hipMemAddressFree", 2 * PAGE)],
        {"reservations": 1, "reserved_bytes": 2 * PAGE},
        "1 reservations (8192 bytes)",
    ),
    "handle": Thing(
        lambda gpu: gpu.create(PAGE),
        [("hipMemRelease",)],
        {"handles": 1, "handle_bytes": PAGE},
        "1 handles (4096 bytes)",
    ),
    "mapping": Thing(
        mapping,
        [("hipMemUnmap", 2 * PAGE), ("hipMemAddressFree", 3 * PAGE)],
        {
            "reservations": 1,
            "reserved_bytes": 3 * PAGE,
            "mappings": 1,
            "mapped_bytes": 2 * PAGE,
        },
        "1 reservations (12288 bytes), 1 mappings (8192 bytes)",
    ),
    "capture": Thing(
        capture,
        [("hipStreamDestroy",)],
        {"streams": 1, "captures": 1},
        "1 streams, 1 captures",
    ),
    "graph": Thing(
        lambda gpu: gpu.graph(),
        [("hipGraphDestroy",)],
        {"graphs": 1},
        "1 graphs",
    ),
    "executable graph": Thing(
        executable,
        [("hipGraphExecDestroy",)],
        {"executables": 1},
        "1 executable graphs",
    ),
}
IMPORT = {"imports": 1, "imported_bytes": 3 * PAGE}


def test_every_counter_of_the_live_is_checked() -> None:
    assert set().union(IMPORT, *(each.counts for each in THINGS.values())) == LIVE


@pytest.mark.parametrize("name", THINGS)
def test_what_is_live_is_counted_and_named(gpu: Any, name: str) -> None:
    thing = THINGS[name]

    def end(made: int) -> None:
        for call, *arguments in thing.end:
            gpu.call(call, made, *arguments)

    hipsim.assert_clean()
    assert live() == {}
    first = thing.make(gpu)
    assert live() == thing.counts
    with pytest.raises(AssertionError) as info:
        hipsim.assert_clean()
    assert str(info.value) == f"still live: {thing.text}"
    second = thing.make(gpu)
    assert live() == {key: 2 * count for key, count in thing.counts.items()}
    hipsim.reset()
    end(first)
    assert live() == thing.counts
    end(second)
    assert live() == {}
    hipsim.assert_clean()


def test_an_import_is_counted_and_named(gpu: Any, export: Any) -> None:
    _, handle = export('export(make("hipMalloc", 3 * PAGE)); sys.stdin.readline()')
    pointer = gpu.open(handle)
    assert live() == IMPORT
    with pytest.raises(AssertionError, match=r"still live: 1 imports \(12288 bytes\)"):
        hipsim.assert_clean()
    assert gpu.open(handle) == pointer
    assert live() == IMPORT
    for expected in (IMPORT, {}):
        gpu.call("hipIpcCloseMemHandle", pointer)
        assert live() == expected


def test_everything_that_is_live_is_named(gpu: Any) -> None:
    for thing in THINGS.values():
        thing.make(gpu)
    with pytest.raises(AssertionError) as info:
        hipsim.assert_clean()
    assert str(info.value) == (
        "still live: 2 streams, 1 events, 1 device allocations (100 bytes), "
        "1 registered host ranges (50 bytes), 1 host allocations (100 bytes), "
        "2 reservations (20480 bytes), 1 handles (4096 bytes), "
        "1 mappings (8192 bytes), 1 captures, 1 graphs, 1 executable graphs"
    )


def test_the_devices_are_counted_together(gpu: Any) -> None:
    for device in (0, 3):
        gpu.call("hipSetDevice", device)
        gpu.malloc(100)
        gpu.create(PAGE)
    counts = {"device_allocations": 2, "device_bytes": 200}
    assert live() == {**counts, "handles": 2, "handle_bytes": 2 * PAGE}


def test_a_handle_lives_until_its_last_release(gpu: Any) -> None:
    one = {"handles": 1, "handle_bytes": PAGE}
    address, handle = gpu.reserve(PAGE), gpu.create(PAGE)
    reserved = {"reservations": 1, "reserved_bytes": PAGE}
    mapped = {"mappings": 1, "mapped_bytes": PAGE, **reserved}
    gpu.map(address, PAGE, handle)
    assert gpu.make("hipMemRetainAllocationHandle", address) == handle
    for expected in ({**one, **mapped}, mapped):
        gpu.call("hipMemRelease", handle)
        assert live() == expected
    assert gpu.lib.hipMemRelease(handle) == 1
    # The memory has a handle again for who asks.
    again = gpu.make("hipMemRetainAllocationHandle", address)
    assert live() == {**one, **mapped}
    gpu.call("hipMemUnmap", address, PAGE)
    assert live() == {**one, **reserved}
    gpu.call("hipMemRelease", again)
    assert live() == reserved


def test_an_invalidated_capture_lives_until_its_end(gpu: Any) -> None:
    stream = capture(gpu)
    hipsim.reset()
    assert live() == {"streams": 1, "captures": 1}
    graph = ctypes.c_void_p()
    assert gpu.lib.hipStreamEndCapture(stream, ctypes.byref(graph)) == 901
    assert live() == {"streams": 1}


def test_an_executable_graph_takes_memory(gpu: Any) -> None:
    free, _ = gpu.memory_info()
    made = executable(gpu)
    assert gpu.memory_info()[0] == free - 128 * 1024
    gpu.call("hipGraphExecDestroy", made)
    assert gpu.memory_info()[0] == free


# --- what was done -----------------------------------------------------------------


def test_fills_count_when_they_are_made(gpu: Any) -> None:
    device, host = gpu.malloc(100), gpu.pinned(100)
    graph = gpu.graph(["hipMemsetAsync", device, 1, 30])
    assert done() == {}
    gpu.call("hipMemset", device, 1, 10)
    gpu.call("hipMemset", host.ctypes.data, 1, 20)
    assert gpu.lib.hipMemset(device, 1, 101) == 1
    assert gpu.lib.hipMemset(gpu.pageable(1).ctypes.data, 1, 1) == 1
    gpu.call("hipMemset", None, 1, 0)
    gpu.call("hipDeviceSynchronize")
    assert done() == {"fills": 2, "filled_bytes": 30}
    run = gpu.executable(graph)
    for _ in range(2):
        gpu.call("hipGraphLaunch", run, None)
    gpu.call("hipDeviceSynchronize")
    assert done() == {"fills": 4, "filled_bytes": 90}
    assert moved() == {}
    hipsim.reset()
    assert done() == {}


def test_exports_and_failed_imports_are_counted(gpu: Any, profile: str) -> None:
    handle, out = hipsim.IpcMemHandle(), ctypes.c_void_p()
    device, virtual = gpu.malloc(100), gpu.virtual(PAGE)
    export, open_handle = gpu.lib.hipIpcGetMemHandle, gpu.lib.hipIpcOpenMemHandle
    refuses = hipsim.PROFILES.index(profile) >= hipsim.PROFILES.index("7.13")
    assert export(ctypes.byref(handle), virtual) == (1 if refuses else 0)
    assert done() == {"ipc_virtual_exports": 1}
    for wrong in (gpu.pinned(8).ctypes.data, gpu.pageable(8).ctypes.data, None):
        assert export(ctypes.byref(handle), wrong) == 1
    assert export(None, device) == 1
    for address in (device, device + 99):
        gpu.call("hipIpcGetMemHandle", ctypes.byref(handle), address)
    assert done() == {"ipc_virtual_exports": 1, "ipc_exports": 2}
    assert open_handle(ctypes.byref(out), handle, 1) == 201
    garbage = hipsim.IpcMemHandle.from_buffer_copy(bytes(range(64)))
    assert open_handle(ctypes.byref(out), garbage, 1) == 17
    assert done()["ipc_failed_imports"] == 2
    assert done()["ipc_exports"] == 2


UNMAP_WAITS_FOR_DEVICES = ("7.15", "7.16")


def test_memory_that_goes_before_its_copy_is_a_fault(gpu: Any, profile: str) -> None:
    lib, host, stream = gpu.lib, gpu.pinned(PAGE, seed=1), gpu.stream()
    address, device = gpu.virtual(PAGE), gpu.malloc(PAGE)
    hipsim.configure(copy_latency_us=300_000)
    gpu.call("hipMemcpyAsync", address, host.ctypes.data, PAGE, 1, stream)
    hipsim.configure(copy_latency_us=0)
    waits = profile in UNMAP_WAITS_FOR_DEVICES
    gpu.call("hipMemUnmap", address, PAGE)
    assert lib.hipStreamSynchronize(stream) == (0 if waits else 700)
    assert hipsim.stats().memory_faults == (0 if waits else 1)
    assert moved() == ({("blit", "h2d"): (1, PAGE)} if waits else {})
    if waits:
        return
    # It stays, whatever is called, and what is queued later does not run.
    assert lib.hipMemcpyAsync(device, host.ctypes.data, PAGE, 1, stream) == 700
    assert lib.hipMemGetInfo(None, None) == 700
    assert lib.hipDeviceSynchronize() == 700
    assert hipsim.stats().memory_faults == 1
    hipsim.reset()
    assert hipsim.stats().memory_faults == 0
    assert (gpu.read(device, PAGE) == 0).all()


# --- which engine ------------------------------------------------------------------


def moved() -> dict[tuple[str, str], tuple[int, int]]:
    """Copies and bytes by engine and direction, where there are any."""
    return {key: each for key, each in hipsim.stats().copies.items() if each.copies}


def test_accounts_are_by_call_engine_and_direction(gpu: Any) -> None:
    device, pinned = gpu.malloc(MIB), gpu.pinned(MIB)
    pageable = gpu.pageable(MIB)
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
        assert moved() == {(engine, direction): (1, size)}
        assert hipsim.stats().calls["hipMemcpy"] == 1
        assert done() == {}
    hipsim.reset()
    gpu.call("hipMemcpy", device, pageable.ctypes.data, large, 1)
    gpu.call("hipMemcpy", pageable.ctypes.data, device, small, 2)
    assert moved() == {("sdma", "h2d"): (1, large), ("blit", "d2h"): (1, small)}
    assert done() == {"staged_copies": 2, "staged_bytes": small + large}


def test_copies_are_counted_by_the_hosts_memory(gpu: Any) -> None:
    """Which tells a ring of the driver's memory from what is registered."""
    device, pinned, pageable = gpu.malloc(PAGE), gpu.pinned(PAGE), gpu.pageable(PAGE)
    allocated = gpu.make("hipHostMalloc", PAGE, 0)
    gpu.defer("hipHostFree", allocated)
    memories = {
        "pageable": pageable.ctypes.data,
        "registered": pinned.ctypes.data,
        "allocated": allocated,
    }
    assert {name for name, _ in hipsim.stats().host_copies} == set(memories)
    assert {way for _, way in hipsim.stats().host_copies} == {"h2d", "d2h"}
    for copies, (name, address) in enumerate(memories.items(), 1):
        for _ in range(copies):
            gpu.call("hipMemcpyAsync", device, address, PAGE, 4, None)
        gpu.call("hipMemcpy2D", address, 128, device, 128, 64, 4, 4)
        gpu.call("hipDeviceSynchronize")
        found = hipsim.stats().host_copies
        assert found[name, "h2d"] == (copies, copies * PAGE)
        assert found[name, "d2h"] == (1, 256)
    # Within a side there is no host's memory to tell apart.
    before = dict(hipsim.stats().host_copies)
    gpu.call("hipMemcpy", pinned.ctypes.data, allocated, 64, 4)
    gpu.call("hipMemcpy", device, device + 64, 64, 4)
    gpu.call("hipDeviceSynchronize")
    assert hipsim.stats().host_copies == before


class Plane(NamedTuple):
    """One side is compact host memory; the other side's rows are `pitch` apart.

    Without packets the blit kernel makes the copy.
    """

    packets: int
    width: int
    height: int
    pitch: int
    device_offset: int = 0
    host_offset: int = 0


# Elements, slices and rows of a packet: ROCr, SDMA_PKT_COPY_LINEAR_RECT before gfx12.
ROW_LIMIT, SLICE_LIMIT, WIDTH, SLICES = 1 << 19, 1 << 28, 1 << 14, 1 << 11

PLANES = {
    "one packet": Plane(1, 64, 4, 128),
    "small is no kernel": Plane(1, 4, 2, 8),
    "compact": Plane(1, 64, 4, 64),
    "host rows of 2 units, one by one": Plane(4, 62, 4, 128),
    "odd host rows, one by one": Plane(4, 61, 4, 128),
    "pitch of 2 units, row by row": Plane(4, 64, 4, 130),
    "odd pitch, row by row": Plane(4, 64, 4, 131),
    "pitch of 4 units": Plane(1, 64, 4, 132),
    "pitch of one row": Plane(1, 64, 1, 131),
    "odd device address": Plane(0, 64, 4, 128, device_offset=1),
    "even device address": Plane(0, 64, 4, 128, device_offset=2),
    "device address of 4 units": Plane(1, 64, 4, 128, device_offset=4),
    "odd host address": Plane(0, 64, 4, 128, host_offset=3),
    "host address of 4 units": Plane(1, 64, 4, 128, host_offset=4),
    "widest pitch of rows": Plane(1, 4, 2 * SLICES, ROW_LIMIT),
    # A wider one goes as slices of one row.
    "most rows as slices": Plane(1, 4, SLICES, ROW_LIMIT + 4),
    "too many rows for slices": Plane(2, 4, SLICES + 1, ROW_LIMIT + 4),
    "16 bytes, rows as slices": Plane(1, 16, 9, ROW_LIMIT * 16),
    "from an address of 4": Plane(1, 16, 9, ROW_LIMIT * 16, 4),
    "widest slice, 4 bytes": Plane(1, 4, 2, SLICE_LIMIT * 4),
    "too wide a slice, 4 bytes": Plane(0, 4, 2, SLICE_LIMIT * 4 + 4),
    "the same of 8 bytes": Plane(1, 8, 2, SLICE_LIMIT * 4 + 8),
    "the same from an address of 4": Plane(1, 8, 2, SLICE_LIMIT * 4 + 8, 4),
    "widest row": Plane(1, WIDTH * 16, 2, WIDTH * 16),
    "too wide a row": Plane(2, WIDTH * 16 + 16, 2, WIDTH * 16 + 16),
}


def host_memory(gpu: Any, size: int) -> int:
    """Page-locked, from the start of a page."""
    pointer: int = gpu.make("hipHostMalloc", size, 0)
    gpu.defer("hipHostFree", pointer)
    return pointer


@pytest.mark.parametrize("name", PLANES)
def test_a_plane_is_made_of_packets_or_a_kernel(gpu: Any, name: str) -> None:
    plane = PLANES[name]
    width, height, pitch = plane.width, plane.height, plane.pitch
    size = width * height
    device = gpu.malloc(pitch * height + PAGE) + plane.device_offset
    host = host_memory(gpu, size + PAGE) + plane.host_offset
    there, here = (device, pitch), (host, width)
    data = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    ctypes.memmove(host, data.ctypes.data, size)
    gpu.call("hipMemcpy2D", *there, *here, width, height, 1)
    ctypes.memset(host, 0, size)
    gpu.call("hipMemcpy2D", *here, *there, width, height, 2)
    assert ctypes.string_at(host, size) == data.tobytes()
    expect_pitched(plane.packets, size)


def expect_pitched(packets: int, size: int) -> None:
    """A pitched copy of so many bytes each way, and the packets that each took."""
    engine, each = "sdma" if packets else "blit", (1, size)
    assert moved() == {(engine, "h2d"): each, (engine, "d2h"): each}
    counts = {"pitched_copies": 2, "pitched_bytes": 2 * size}
    assert done() == counts | ({"pitched_packets": 2 * packets} if packets else {})


@pytest.mark.parametrize("height", [256, 257])
def test_many_rows_at_an_odd_pitch_are_a_kernel_in_newer_releases(
    gpu: Any, profile: str, height: int
) -> None:
    """clr's rocblit.cpp, kSdmaRectRowSerializeLimit."""
    device, host = gpu.malloc(130 * height), host_memory(gpu, 64 * height)
    there, here = (device, 130), (host, 64)
    gpu.call("hipMemcpy2D", *there, *here, 64, height, 1)
    gpu.call("hipMemcpy2D", *here, *there, 64, height, 2)
    is_kernel = profile == hipsim.PROFILES[-1] and height > 256
    expect_pitched(0 if is_kernel else height, 64 * height)


class Box(NamedTuple):
    """One side is compact host memory; the other side's pitches are in bytes, rows."""

    packets: int
    width: int
    height: int
    depth: int
    pitch: int
    rows: int


BOXES = {
    "one packet": Box(1, 64, 2, 2, 128, 3),
    "odd width, row by row": Box(6, 63, 2, 3, 128, 3),
    "odd pitch, row by row": Box(6, 64, 2, 3, 129, 4),
    "most slices": Box(1, 4, 2, SLICES, 8, 2),
    "too many slices": Box(2, 4, 2, SLICES + 1, 8, 2),
    "widest pitch": Box(1, 4, 2, 2, ROW_LIMIT * 4, 2),
    "too wide a pitch": Box(0, 4, 2, 2, ROW_LIMIT * 4 + 4, 2),
    "the same of 8 bytes": Box(1, 8, 2, 2, ROW_LIMIT * 4 + 8, 2),
    "rows of one slice as slices": Box(1, 4, 2, 1, ROW_LIMIT * 4 + 4, 2),
    "widest slice": Box(1, 4, 2, 2, MIB, SLICE_LIMIT * 4 // MIB),
    "too wide a slice": Box(0, 4, 2, 2, MIB, SLICE_LIMIT * 4 // MIB + 1),
    "the same slice of 8 bytes": Box(1, 8, 2, 2, MIB, SLICE_LIMIT * 4 // MIB + 1),
    # The form of a plane whose rows are too far apart for a call of two dimensions.
    "one row in each slice": Box(1, 64, 1, 5, 128, 3),
}


@pytest.mark.parametrize("name", BOXES)
def test_a_box_is_made_of_packets_or_a_kernel(gpu: Any, name: str) -> None:
    packets, width, height, depth, pitch, rows = BOXES[name]
    size = width * height * depth
    there = (gpu.malloc(pitch * rows * depth), pitch, rows)
    here = (host_memory(gpu, size), width, height)
    extent = (width, height, depth)
    data = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    ctypes.memmove(here[0], data.ctypes.data, size)
    gpu.call("hipMemcpy3D", gpu.box(there, here, extent))
    ctypes.memset(here[0], 0, size)
    gpu.call("hipMemcpy3DAsync", gpu.box(here, there, extent), None)
    gpu.call("hipDeviceSynchronize")
    assert ctypes.string_at(here[0], size) == data.tobytes()
    expect_pitched(packets, size)


@pytest.mark.parametrize("memory", ["hipMalloc", "virtual"])
def test_rectangles_within_a_side_or_of_pageable_memory(gpu: Any, memory: str) -> None:
    size, no_cu = 64 * 1024, 1024
    device = gpu.malloc(size) if memory == "hipMalloc" else gpu.virtual(size)
    pinned, pageable = gpu.pinned(size).ctypes.data, gpu.pageable(size).ctypes.data
    half = size // 2
    for to, source, height, kind, expected in (
        (device + half, device, 64, 4, ("blit", "d2d")),
        (device + half, device, 64, no_cu, ("sdma", "d2d")),
        (pinned + half, pinned, 64, 4, ("blit", "h2h")),
        (pageable + half, pageable, 64, 4, ("host", "h2h")),
        # By way of a buffer the size decides, as without rows.
        (device, pageable, 256, 4, ("blit", "h2d")),
        (device, pageable, 257, 4, ("sdma", "h2d")),
        (pageable, device, 257, 4, ("sdma", "d2h")),
    ):
        hipsim.reset()
        gpu.call("hipMemcpy2D", to, 128, source, 128, 64, height, kind)
        gpu.call("hipDeviceSynchronize")
        assert moved() == {expected: (1, 64 * height)}
        staged = expected[1] in ("h2d", "d2h")
        assert hipsim.stats().staged_copies == (1 if staged else 0)
        assert hipsim.stats().pitched_copies == 1
        assert hipsim.stats().pitched_packets == (1 if kind == no_cu else 0)


ENGINES = """
size = 1 << 16
device, host = make("hipMalloc", size), make("hipHostMalloc", size, 0)
sets = (hipsim.MemcpyAttributes * 1)()
sets[0].srcAccessOrder, sets[0].flags = 1, hipsim.FLAG_PREFER_COPY_ENGINE
one = lambda value: ctypes.byref(ctypes.c_size_t(value))
for name, *arguments in (
    ["hipMemcpy", device, host, size, 1],
    ["hipMemcpy", device, host, 8, 1],
    ["hipMemcpy2D", device, 128, host, 128, 64, 4, 1],
    ["hipMemcpy2D", device, 128, host, 128, 63, 4, 1],
    ["hipMemcpy", device, device.value + 8, 8, 1024],
    ["hipMemcpyBatchAsync", ctypes.byref(device), ctypes.byref(host), one(8), 1,
     sets, one(0), 1, None, None],
):
    hipsim.reset()
    call(name, *arguments)
    call("hipDeviceSynchronize")
    print(*(key[0] for key, count in hipsim.stats().copies.items() if count.copies))
"""


@pytest.mark.parametrize(
    ("environment", "engines"),
    [
        ({}, "sdma blit sdma sdma sdma sdma"),
        ({"HSA_ENABLE_SDMA": "0"}, "blit blit blit blit blit blit"),
        ({"GPU_FORCE_BLIT_COPY_SIZE": "64"}, "blit blit sdma sdma sdma sdma"),
        ({"GPU_FORCE_BLIT_COPY_SIZE": "0"}, "sdma sdma sdma sdma sdma sdma"),
    ],
)
def test_rocms_variables_and_each_kind_of_copy(
    run: Callable[..., str], environment: dict[str, str], engines: str
) -> None:
    assert run(ENGINES, **environment).split() == engines.split()
