# SPDX-License-Identifier: Apache-2.0
"""Every switch of `configure`: what it changes, for how long, and what it refuses."""

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import numpy as np
import pytest

from vllm_rocm_memory.sim import hipsim

PAGE = 4096
LONG_US = 30_000_000  # what waits this long does not pass for what does not wait
SHORT_US = 80_000
HOST, DEVICE = hipsim.LOCATION_HOST, hipsim.LOCATION_DEVICE
NONE, READ, READ_WRITE = 0, 1, 3
CAN_USE_HOST_POINTER = 4


def offset_of(address: int) -> int:
    return address % PAGE


# --- values ------------------------------------------------------------------------

SWITCHES: dict[str, tuple[list[Any], list[Any]]] = {
    # good values, bad ones
    "corrupt_loads": ([True, False], []),
    "copy_latency_us": ([0, 1], [-1]),
    "fill_latency_us": ([0, 1], [-1]),
    "host_device_pointers": ([True, False], []),
    "one_mapping_copies": ([True, False], []),
    "ignore_address_hints": ([True, False], []),
    "no_virtual_memory": ([True, False], []),
    "small_bar": ([True, False], []),
    "max_registration_bytes": ([0, 1, 2**63 - 1], [-1, 2**63]),
    "max_locked_bytes": ([0, 1, 2**63 - 1], [-1, 2**63]),
    "locked_memory": (["rlimit", "unlimited"], ["limited", "", 1]),
    "host_reads": (["fault", "allow"], ["deny", "", 1]),
    "stale_memory": (["clean", "as_left", "poisoned"], ["dirty", "", 2]),
}


def test_every_switch_has_a_row() -> None:
    assert list(signature(hipsim.configure).parameters) == list(SWITCHES)


@pytest.mark.parametrize("name", SWITCHES)
def test_values_are_taken_or_refused(gpu: Any, name: str) -> None:
    good, bad = SWITCHES[name]
    for value in good:
        hipsim.configure(**{name: value})
    for value in bad:
        with pytest.raises(ValueError, match=f"{name} is {value!r}; it must"):
            hipsim.configure(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"nothing", 1),
        (b"", 1),
        (b"copy_latency_us ", 1),
        (None, 1),
        (b"copy_latency_us", -1),
        (b"fill_latency_us", -(2**63)),
        (b"max_registration_bytes", -1),
        (b"max_locked_bytes", -1),
        (b"locked_memory", 2),
        (b"locked_memory", -1),
        (b"stale_memory", 3),
        (b"stale_memory", -1),
    ],
)
def test_the_library_refuses_what_it_does_not_know(
    gpu: Any, name: bytes | None, value: int
) -> None:
    assert gpu.lib.hipsim_set_switch(name, value) == 1


# --- each switch on and off --------------------------------------------------------


@pytest.fixture(params=["reset", "turn off"])
def back(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Takes a switch back to where it starts, whose value is the argument."""
    if request.param == "reset":
        return lambda **_: hipsim.reset()
    return lambda **start: hipsim.configure(**start)


def test_corrupt_loads_change_every_byte_on_its_way_in_only(
    gpu: Any, back: Callable[..., None]
) -> None:
    host, out = gpu.pinned(5000, seed=3), gpu.pinned(5000)
    device, copy = gpu.malloc(5000), gpu.malloc(5000)
    hipsim.configure(corrupt_loads=True)
    gpu.load(device, host)
    hipsim.configure(copy_latency_us=0)
    assert (gpu.read(device, 5000) == ~host).all()
    gpu.call("hipMemcpy", copy, device, 5000, 3)
    assert (gpu.read(copy, 5000) == ~host).all()
    gpu.call("hipMemset", device, 7, 5000)
    assert (gpu.read(device, 5000) == 7).all()
    gpu.batch([device], [host.ctypes.data], [5000])
    gpu.batch([out.ctypes.data], [device], [5000])
    gpu.call("hipDeviceSynchronize")
    assert (out == ~host).all()
    back(corrupt_loads=False)
    gpu.load(device, host)
    assert (gpu.read(device, 5000) == host).all()


@pytest.mark.parametrize("memory", ["hipMalloc", "virtual"])
def test_corrupt_loads_hold_for_rows_and_graphs(gpu: Any, memory: str) -> None:
    host = gpu.pinned(PAGE, seed=3)
    device = gpu.malloc(PAGE) if memory == "hipMalloc" else gpu.virtual(PAGE)
    plane = (device, 64, host.ctypes.data, 64, 32, 64, 4)
    graph = gpu.graph(["hipMemcpy2DAsync", *plane])
    hipsim.configure(corrupt_loads=True)
    for call, *arguments in (
        ["hipMemcpy2D", *plane],
        ["hipGraphLaunch", gpu.executable(graph), None],
    ):
        gpu.call("hipMemset", device, 0, PAGE)
        gpu.call(call, *arguments)
        gpu.call("hipDeviceSynchronize")
        rows = gpu.read(device, PAGE).reshape(64, 64)
        assert (rows[:, :32] == ~host.reshape(64, 64)[:, :32]).all()
        assert (rows[:, 32:] == 0).all()


def duration_us(gpu: Any, call: Callable[[], Any]) -> float:
    """Of the call and of all that it queues."""
    gpu.call("hipDeviceSynchronize")
    began = time.monotonic()
    call()
    gpu.call("hipDeviceSynchronize")
    return (time.monotonic() - began) * 1e6


@pytest.fixture
def work(gpu: Any) -> dict[str, Callable[[], Any]]:
    """Calls by what they are in the eyes of the two latencies."""
    device, host, stream = gpu.malloc(PAGE), gpu.pinned(PAGE), gpu.stream()
    address = host.ctypes.data
    box = gpu.box((device, 8, 2), (address, 8, 2), (8, 2, 2))
    count = 500
    many = [np.arange(count, dtype=np.uint64) + np.uint64(a) for a in (device, address)]
    sizes = np.ones(count, np.uint64)
    call = gpu.call
    return {
        "copy": lambda: call("hipMemcpyAsync", device, address, 8, 4, stream),
        "blocking copy": lambda: call("hipMemcpy", device, address, 8, 1),
        "plane": lambda: call(
            "hipMemcpy2DAsync", device, 16, address, 16, 8, 9, 4, stream
        ),
        "box": lambda: call("hipMemcpy3DAsync", box, stream),
        "batch": lambda: gpu.batch(*many, sizes, stream),
        "fill": lambda: call("hipMemsetAsync", device, 0, 8, stream),
        "blocking fill": lambda: call("hipMemset", device + 1, 0, 8),
    }


WORK = ("copy", "blocking copy", "plane", "box", "batch", "fill", "blocking fill")


@pytest.mark.parametrize("name", WORK)
def test_latency_is_once_for_each_copy_batch_and_fill(
    gpu: Any, work: dict[str, Callable[[], Any]], name: str
) -> None:
    hipsim.configure(copy_latency_us=SHORT_US)
    assert SHORT_US <= duration_us(gpu, work[name]) < 100 * SHORT_US


@pytest.mark.parametrize("name", WORK)
def test_fills_may_have_a_latency_of_their_own(
    gpu: Any, work: dict[str, Callable[[], Any]], name: str
) -> None:
    fill = "fill" in name
    latencies = {"copy_latency_us": 0, "fill_latency_us": 0}
    waits = "fill_latency_us" if fill else "copy_latency_us"
    passes = "copy_latency_us" if fill else "fill_latency_us"
    hipsim.configure(**{**latencies, waits: SHORT_US, passes: LONG_US})
    assert SHORT_US <= duration_us(gpu, work[name]) < LONG_US
    hipsim.configure(**{**latencies, passes: LONG_US})
    assert duration_us(gpu, work[name]) < LONG_US


def test_reset_ends_latencies(gpu: Any, work: dict[str, Callable[[], Any]]) -> None:
    hipsim.configure(copy_latency_us=LONG_US, fill_latency_us=LONG_US)
    hipsim.reset()
    for call in work.values():
        assert duration_us(gpu, call) < LONG_US
    # Fills take after copies again.
    hipsim.configure(copy_latency_us=SHORT_US)
    assert duration_us(gpu, work["fill"]) >= SHORT_US


def test_a_graph_has_the_latency_of_its_launch(gpu: Any) -> None:
    device = gpu.malloc(8)
    hipsim.configure(fill_latency_us=LONG_US)
    executable = gpu.executable(gpu.graph(["hipMemsetAsync", device, 0, 8]))
    for latency in (0, SHORT_US):
        hipsim.configure(fill_latency_us=latency)
        took = duration_us(gpu, lambda: gpu.call("hipGraphLaunch", executable, None))
        assert latency <= took < LONG_US


def device_pointer(gpu: Any, host: int) -> int:
    pointer: int = gpu.make("hipHostGetDevicePointer", host, 0)
    return pointer


def may_use_host_pointers(gpu: Any) -> bool:
    value = ctypes.c_int()
    gpu.call("hipDeviceGetAttribute", ctypes.byref(value), CAN_USE_HOST_POINTER, 0)
    return value.value == 1


def test_a_device_may_have_names_of_its_own_for_host_memory(
    gpu: Any, back: Callable[..., None]
) -> None:
    before = gpu.pinned(100).ctypes.data
    assert device_pointer(gpu, before) == before
    assert may_use_host_pointers(gpu)

    hipsim.configure(host_device_pointers=True)
    assert not may_use_host_pointers(gpu)
    assert device_pointer(gpu, before) == before
    host = gpu.pinned(3 * PAGE).ctypes.data
    alias = device_pointer(gpu, host)
    assert alias != host
    assert offset_of(alias) == offset_of(host)
    assert device_pointer(gpu, host + 5000) == alias + 5000
    assert gpu.lib.hipHostRegister(host + 3 * PAGE - 1, 1, 0) == 712
    pinned = gpu.make("hipHostMalloc", 100, 0)
    gpu.defer("hipHostFree", pinned)
    assert device_pointer(gpu, pinned) == pinned

    back(host_device_pointers=False)
    assert may_use_host_pointers(gpu)
    after = gpu.pinned(100).ctypes.data
    assert device_pointer(gpu, after) == after
    # What was registered in the meantime keeps its other name, as long as it lives.
    assert device_pointer(gpu, host) == alias
    assert gpu.lib.hipHostUnregister(alias) == 713
    gpu.call("hipHostUnregister", host)
    assert gpu.lib.hipMemcpy(gpu.malloc(1), alias, 1, 4) == 1


def test_both_names_of_host_memory_lead_to_it(gpu: Any) -> None:
    hipsim.configure(host_device_pointers=True)
    size = 5 * PAGE
    device, host = gpu.malloc(size), gpu.pinned(size, seed=1)
    data = host.copy()
    address = host.ctypes.data
    alias = device_pointer(gpu, address)
    for name in (alias, address):
        gpu.call("hipMemset", device, 0, size)
        gpu.call("hipMemcpy", device, name, size, 4)
        host[:] = 0
        gpu.call("hipMemcpy", name, device, size, 4)
        assert np.array_equal(host, data)
    stats = hipsim.stats()
    assert stats.staged_copies == 0
    assert stats.copies["sdma", "h2d"] == (2, 2 * size)
    assert stats.copies["sdma", "d2h"] == (2, 2 * size)
    gpu.call("hipMemset", alias + 10, 7, 10)
    assert (host[10:20] == 7).all()
    gpu.call("hipMemcpy2D", device, 16, alias + 4, 32, 16, 3, 4)
    gpu.batch([device + 48], [alias + size - 4], [4])
    gpu.call("hipDeviceSynchronize")
    rows = [host[4 + 32 * y :][:16] for y in range(3)]
    assert np.array_equal(gpu.read(device, 52), np.concatenate([*rows, host[-4:]]))
    for wrong in (alias - 1, alias + size, alias + 1):
        assert gpu.lib.hipMemcpy(device, wrong, size, 4) == 1


def test_copies_may_have_to_stay_in_one_mapping(
    gpu: Any, back: Callable[..., None]
) -> None:
    virtual, device = gpu.virtual(PAGE, 2 * PAGE, PAGE), gpu.malloc(4 * PAGE)
    host = gpu.pinned(4 * PAGE, seed=1)
    stream = gpu.stream()

    def errors(start: int, size: int) -> list[int]:
        there, here = virtual + start, host.ctypes.data
        many = [there], [here], [size]
        return [
            gpu.lib.hipMemcpy(there, here, size, 4),
            gpu.lib.hipMemcpyAsync(here, there, size, 4, stream),
            gpu.lib.hipMemcpyAsync(device, there, size, 4, stream),
            gpu.lib.hipMemset(there, 1, size),
            gpu.batch(*many)[0],
        ]

    def rows(start: int) -> int:
        error: int = gpu.lib.hipMemcpy2D(
            virtual + start, 64, host.ctypes.data, 64, 32, 64, 4
        )
        return error

    within = [(0, PAGE), (PAGE, 2 * PAGE), (PAGE + 5, PAGE), (3 * PAGE, PAGE)]
    across = [(0, PAGE + 1), (PAGE - 1, 2), (PAGE + 1, 2 * PAGE), (0, 4 * PAGE)]
    for start, size in within + across:
        assert errors(start, size) == [0] * 5
    hipsim.configure(one_mapping_copies=True)
    for start, size in within:
        assert errors(start, size) == [0] * 5
    for start, size in across:
        assert errors(start, size) == [1] * 5
    gpu.call("hipMemset", device, 1, 4 * PAGE)
    # What has rows may never cross a mapping.
    for _ in range(2):
        assert (rows(0), rows(PAGE), rows(2 * PAGE + 64)) == (0, 0, 1)
        back(one_mapping_copies=False)
    for start, size in across:
        assert errors(start, size) == [0] * 5


def test_registrations_may_have_a_limit(gpu: Any, back: Callable[..., None]) -> None:
    host = gpu.pageable(4 * PAGE).ctypes.data

    def register(size: int) -> int:
        error: int = gpu.lib.hipHostRegister(host, size, 0)
        if error == 0:
            gpu.call("hipHostUnregister", host)
        return error

    hipsim.configure(max_registration_bytes=2 * PAGE)
    assert register(2 * PAGE) == 0
    assert gpu.lib.hipGetLastError() == 0
    assert register(2 * PAGE + 1) == 2
    assert gpu.lib.hipGetLastError() == 2
    assert hipsim.stats().registered_ranges == 0
    # What is wrong with the range itself comes first.
    assert gpu.lib.hipHostRegister(None, 4 * PAGE, 0) == 1
    # Memory of the runtime's own is no registration.
    gpu.defer("hipHostFree", gpu.make("hipHostMalloc", 4 * PAGE, 0))
    back(max_registration_bytes=0)
    assert register(4 * PAGE) == 0


def locked(gpu: Any, host: int, size: int) -> tuple[int, int]:
    """What a registration of the size and an allocation of it return."""
    registered: int = gpu.lib.hipHostRegister(host, size, 0)
    if registered == 0:
        gpu.call("hipHostUnregister", host)
    pointer = ctypes.c_void_p()
    allocated: int = gpu.lib.hipHostMalloc(ctypes.byref(pointer), size, 0)
    if allocated == 0:
        gpu.call("hipHostFree", pointer)
    return registered, allocated


def test_locked_memory_may_have_a_limit(gpu: Any, back: Callable[..., None]) -> None:
    host = gpu.pageable(5 * PAGE).ctypes.data
    kept, registered = gpu.make("hipHostMalloc", PAGE, 0), host + 4 * PAGE
    gpu.call("hipHostRegister", registered, PAGE, 0)
    hipsim.configure(max_locked_bytes=4 * PAGE)
    assert locked(gpu, host, 2 * PAGE) == (0, 0)
    assert locked(gpu, host, 2 * PAGE + 1) == (2, 2)
    assert gpu.lib.hipGetLastError() == 2
    # Beside the limit of one registration, which holds for those alone.
    hipsim.configure(max_registration_bytes=PAGE)
    assert locked(gpu, host, 2 * PAGE) == (2, 0)
    hipsim.configure(max_registration_bytes=0)
    for drop, address in (("hipHostFree", kept), ("hipHostUnregister", registered)):
        gpu.call(drop, address)
    stats = hipsim.stats()
    assert stats.registered_ranges == stats.host_allocations == 0
    assert locked(gpu, host, 4 * PAGE) == (0, 0)
    assert locked(gpu, host, 4 * PAGE + 1) == (2, 2)
    back(max_locked_bytes=0)
    assert locked(gpu, host, 5 * PAGE) == (0, 0)


def test_the_process_may_have_a_limit_of_locked_memory(
    gpu: Any, back: Callable[..., None]
) -> None:
    host = gpu.pageable(4 * PAGE).ctypes.data
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (2 * PAGE, hard))
        assert locked(gpu, host, 3 * PAGE) == (0, 0)
        hipsim.configure(locked_memory="rlimit")
        assert locked(gpu, host, 2 * PAGE) == (0, 0)
        assert locked(gpu, host, 2 * PAGE + 1) == (2, 2)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (PAGE, hard))
        assert locked(gpu, host, 2 * PAGE) == (2, 2)
        back(locked_memory="unlimited")
        assert locked(gpu, host, 3 * PAGE) == (0, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def test_the_environment_limits_locked_memory(run: Callable[..., str]) -> None:
    program = """
import resource
hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
resource.setrlimit(resource.RLIMIT_MEMLOCK, (2 * PAGE, hard))
pointer = ctypes.c_void_p()
for _ in range(2):
    for size in (PAGE, PAGE + 1, 2 * PAGE + 1):
        error = hipsim.load().hipHostMalloc(ctypes.byref(pointer), size, 0)
        print(error, end=" ")
        if error == 0:
            call("hipHostFree", pointer)
    hipsim.reset()
"""
    for switches, answers in (
        ("", "0 0 0"),
        ("locked_memory=unlimited", "0 0 0"),
        ("locked_memory=rlimit", "0 0 2"),
        (f"locked_memory=rlimit,max_locked_bytes={PAGE}", "0 2 2"),
    ):
        assert run(program, HIPSIM_SWITCHES=switches).strip() == f"{answers} {answers}"


def test_hints_may_be_ignored(gpu: Any, back: Callable[..., None]) -> None:
    taken = gpu.reserve(4 * PAGE)
    wish = taken + (1 << 30)

    def reserve() -> int:
        address: int = gpu.make("hipMemAddressReserve", PAGE, 0, wish, 0)
        gpu.call("hipMemAddressFree", address, PAGE)
        return address

    assert reserve() == wish
    hipsim.configure(ignore_address_hints=True)
    assert reserve() != wish
    back(ignore_address_hints=False)
    assert reserve() == wish
    assert not taken <= gpu.reserve(PAGE, hint=taken + PAGE) < taken + 4 * PAGE


VIRTUAL_MEMORY, LARGE_BAR = 89, 10011


def has(gpu: Any, attribute: int) -> int:
    value = ctypes.c_int()
    gpu.call("hipDeviceGetAttribute", ctypes.byref(value), attribute, 0)
    return value.value


def test_a_device_may_have_no_virtual_memory(
    gpu: Any, back: Callable[..., None]
) -> None:
    kept = gpu.virtual(PAGE)
    granularity, made = ctypes.c_size_t(), ctypes.c_void_p()
    wanted = hipsim.MemAllocationProp(
        hipsim.ALLOCATION_PINNED, 0, hipsim.MemLocation(DEVICE, 0)
    )
    properties = ctypes.addressof(wanted)

    def errors() -> list[int]:
        lib = gpu.lib
        size, handle = ctypes.byref(granularity), ctypes.byref(made)
        asked = lib.hipMemGetAllocationGranularity(size, properties, 0)
        reserved = lib.hipMemAddressReserve(handle, PAGE, 0, None, 0)
        if reserved == 0:
            gpu.call("hipMemAddressFree", made, PAGE)
        created = lib.hipMemCreate(handle, PAGE, properties, 0)
        if created == 0:
            gpu.call("hipMemRelease", made)
        return [asked, reserved, created]

    assert has(gpu, VIRTUAL_MEMORY) == 1 and errors() == [0, 0, 0]
    hipsim.configure(no_virtual_memory=True)
    assert has(gpu, VIRTUAL_MEMORY) == 0 and errors() == [801, 801, 801]
    # What is there stays, and so does other memory.
    gpu.call("hipMemset", kept, 7, PAGE)
    gpu.malloc(PAGE)
    gpu.lib.hipGetLastError()
    back(no_virtual_memory=False)
    assert has(gpu, VIRTUAL_MEMORY) == 1 and errors() == [0, 0, 0]


def test_a_bar_may_be_small(gpu: Any, back: Callable[..., None]) -> None:
    assert has(gpu, LARGE_BAR) == 1
    hipsim.configure(small_bar=True)
    assert has(gpu, LARGE_BAR) == 0
    assert has(gpu, VIRTUAL_MEMORY) == 1
    back(small_bar=False)
    assert has(gpu, LARGE_BAR) == 1


def test_the_environment_takes_abilities_away(run: Callable[..., str]) -> None:
    program = """
value = ctypes.c_int()
for attribute in (89, 10011):
    call("hipDeviceGetAttribute", ctypes.byref(value), attribute, 0)
    print(value.value, end=" ")
"""
    switches = "no_virtual_memory=1,small_bar=1"
    assert run(program).split() == ["1", "1"]
    assert run(program, HIPSIM_SWITCHES=switches).split() == ["0", "0"]


# --- the host and virtual memory ---------------------------------------------------


class Host:
    """Touches memory through the kernel, which says so where a process would die."""

    def __init__(self) -> None:
        self._source, self._sink = os.pipe()
        self._libc = ctypes.CDLL(None, use_errno=True)

    def reads(self, address: int) -> bool:
        if self._libc.write(self._sink, ctypes.c_void_p(address), 1) < 0:
            return False
        os.read(self._source, 1)
        return True

    def writes(self, address: int) -> bool:
        os.write(self._sink, b"x")
        if self._libc.read(self._source, ctypes.c_void_p(address), 1) == 1:
            return True
        os.read(self._source, 1)
        return False

    def access(self, address: int) -> int:
        reads, writes = self.reads(address), self.writes(address)
        assert reads or not writes
        return READ_WRITE if writes else READ if reads else NONE

    def close(self) -> None:
        os.close(self._source)
        os.close(self._sink)


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()


def test_the_host_touches_other_memory_freely(gpu: Any, host: Host) -> None:
    array = gpu.pinned(8)
    pinned = gpu.make("hipHostMalloc", 8, 0)
    gpu.defer("hipHostFree", pinned)
    for address in (array.ctypes.data, pinned, gpu.malloc(8)):
        assert host.access(address) == READ_WRITE
    freed = gpu.malloc(8)
    gpu.call("hipFree", freed)
    assert host.access(freed) == NONE


@pytest.mark.parametrize("reads", ["fault", "allow"])
@pytest.mark.parametrize("device", [None, NONE, READ, READ_WRITE])
@pytest.mark.parametrize("descriptor", [None, NONE, READ, READ_WRITE])
def test_what_the_host_may_do_with_virtual_memory(
    gpu: Any, host: Host, reads: Any, device: int | None, descriptor: int | None
) -> None:
    hipsim.configure(host_reads=reads)
    address, size = gpu.reserve(2 * PAGE), PAGE
    gpu.map(address, size, gpu.create(size))
    assert host.access(address) == NONE
    for location, flags in ((DEVICE, device), (HOST, descriptor)):
        if flags is not None:
            gpu.set_access(address, size, flags, location)
    allowed = [descriptor or NONE, (device or NONE) if reads == "allow" else NONE]
    assert host.access(address) == max(allowed)
    assert host.access(address + PAGE) == NONE
    gpu.call("hipMemUnmap", address, size)
    assert host.access(address) == NONE
    # Access goes with the mapping.
    gpu.map(address, size, gpu.create(size))
    assert host.access(address) == NONE


def test_host_reads_hold_for_access_that_is_set_later(gpu: Any, host: Host) -> None:
    hipsim.configure(host_reads="fault")
    before = gpu.virtual(PAGE)
    hipsim.configure(host_reads="allow")
    after = gpu.virtual(PAGE)
    assert (host.access(before), host.access(after)) == (NONE, READ_WRITE)
    gpu.set_access(before, PAGE)
    assert host.access(before) == READ_WRITE
    hipsim.configure(host_reads="fault")
    assert host.access(after) == READ_WRITE
    gpu.set_access(after, PAGE)
    assert host.access(after) == NONE
    # Copies go on whatever the host may do.
    data = gpu.pinned(PAGE, seed=1)
    gpu.load(after, data)
    assert np.array_equal(gpu.read(after, PAGE), data)


@pytest.mark.parametrize("variable", ["fault", "allow"])
def test_reset_takes_host_reads_to_where_the_environment_has_them(
    run: Callable[..., str], variable: str
) -> None:
    program = """
def touches():
    source, sink = os.pipe()
    libc = ctypes.CDLL(None)
    return libc.write(sink, virtual(), 1) == 1
answers = [touches()]
for reads in ("allow", "fault"):
    hipsim.configure(host_reads=reads)
    answers.append(touches())
    hipsim.reset()
    answers.append(touches())
print(*answers)
"""
    first = str(variable == "allow")
    told = run(program, HIPSIM_HOST_READS=variable).split()
    assert told == [first, "True", first, "False", first]


def test_the_process_dies_where_the_host_may_not_read(
    start: Callable[..., Any],
) -> None:
    program = start("""
hipsim.configure(host_reads="allow")
first = virtual()
hipsim.configure(host_reads="fault")
second = virtual()
print(ctypes.string_at(first, PAGE) == bytes(PAGE), flush=True)
print(ctypes.string_at(second, PAGE) == bytes(PAGE), flush=True)
""")
    assert program.wait()[:2] == (-signal.SIGSEGV, "True\n")


# --- what is in new memory ---------------------------------------------------------


def fill(gpu: Any, address: int, size: int, value: int) -> None:
    gpu.call("hipMemset", address, value, size)
    gpu.call("hipDeviceSynchronize")


def fragment(gpu: Any) -> None:
    """Leaves the device with three holes of a page, which held 1, 3 and 5."""
    pages = [gpu.malloc(PAGE) for _ in range(6)]
    for number, page in enumerate(pages):
        fill(gpu, page, PAGE, number)
    for number in (5, 1, 3):
        gpu.call("hipFree", pages[number])


NEW_MEMORY: dict[str, Callable[[Any, int], int]] = {
    "hipMalloc": lambda gpu, size: gpu.malloc(size),
    "virtual": lambda gpu, size: gpu.virtual(size),
}

CONTENTS = {
    "clean": [0, 0, 0, 0],
    "as_left": [1, 3, 5, 0],
    "poisoned": [0xFF, 0xFF, 0xFF, 0xFF],
}


@pytest.mark.parametrize("kind", NEW_MEMORY)
@pytest.mark.parametrize("stale", CONTENTS)
def test_new_memory_is_made_of_stale_pages(gpu: Any, kind: str, stale: Any) -> None:
    hipsim.configure(stale_memory=stale)
    fragment(gpu)
    for expected in CONTENTS[stale]:
        assert (gpu.read(NEW_MEMORY[kind](gpu, PAGE), PAGE) == expected).all()


def leave_in_allocation(gpu: Any, size: int, value: int) -> None:
    device = gpu.malloc(size)
    fill(gpu, device, size, value)
    gpu.call("hipFree", device)


def leave_in_virtual_memory(gpu: Any, size: int, value: int) -> None:
    address, handle = gpu.reserve(size), gpu.create(size)
    gpu.map(address, size, handle)
    gpu.set_access(address, size)
    fill(gpu, address, size, value)
    gpu.call("hipMemUnmap", address, size)
    gpu.call("hipMemRelease", handle)


@pytest.mark.parametrize("leave", [leave_in_allocation, leave_in_virtual_memory])
@pytest.mark.parametrize("kind", NEW_MEMORY)
def test_pages_go_from_any_memory_to_any(
    gpu: Any, leave: Callable[..., None], kind: str
) -> None:
    hipsim.configure(stale_memory="as_left")
    leave(gpu, 2 * PAGE, 7)
    data = gpu.read(NEW_MEMORY[kind](gpu, 3 * PAGE), 3 * PAGE)
    assert (data[: 2 * PAGE] == 7).all()
    assert (data[2 * PAGE :] == 0).all()


def test_memory_of_another_device_is_not_left_to_this_one(gpu: Any) -> None:
    # What tests before have left there.
    gpu.call("hipSetDevice", 1)
    gpu.call("hipFree", gpu.malloc(PAGE))
    gpu.call("hipSetDevice", 0)
    hipsim.configure(stale_memory="as_left")
    page = gpu.malloc(PAGE)
    fill(gpu, page, PAGE, 7)
    gpu.call("hipFree", page)
    gpu.call("hipSetDevice", 1)
    assert (gpu.read(gpu.malloc(PAGE), PAGE) == 0).all()
    gpu.call("hipSetDevice", 0)
    assert (gpu.read(gpu.malloc(PAGE), PAGE) == 7).all()


def test_bytes_that_nobody_asked_for_are_stale_too(gpu: Any) -> None:
    hipsim.configure(stale_memory="poisoned")
    for size in (100, (3 << 20) + 100):
        whole = -(-size // PAGE) * PAGE
        assert ctypes.string_at(gpu.malloc(size), whole) == b"\xff" * whole


def test_what_was_freed_under_another_setting(gpu: Any) -> None:
    def new_page() -> int:
        page = gpu.malloc(PAGE)
        (value,) = set(gpu.read(page, PAGE))
        fill(gpu, page, PAGE, 7)
        gpu.call("hipFree", page)
        return int(value)

    assert new_page() == 0
    hipsim.configure(stale_memory="as_left")
    assert new_page() == 0  # freed while memory was clean
    assert new_page() == 7
    hipsim.configure(stale_memory="poisoned")
    assert new_page() == 0xFF
    hipsim.configure(stale_memory="as_left")
    assert new_page() == 7
    hipsim.configure(stale_memory="clean")
    assert new_page() == 0
    hipsim.configure(stale_memory="poisoned")
    hipsim.reset()
    assert new_page() == 0


def test_memory_that_waits_for_its_range_is_not_handed_out(gpu: Any) -> None:
    hipsim.reset("7.2.3")
    hipsim.configure(stale_memory="as_left")
    address, handle = gpu.reserve(PAGE), gpu.create(PAGE)
    gpu.map(address, PAGE, handle)
    gpu.set_access(address, PAGE)
    fill(gpu, address, PAGE, 7)
    gpu.call("hipMemUnmap", address, PAGE)
    gpu.call("hipMemRelease", handle)
    assert (gpu.read(gpu.malloc(PAGE), PAGE) == 0).all()
    gpu.call("hipMemAddressFree", address, PAGE)
    assert (gpu.read(gpu.malloc(PAGE), PAGE) == 7).all()


def test_the_environment_sets_switches(run: Callable[..., str]) -> None:
    """They are where reset() begins again, and configure() changes them."""
    program = """
import time

def first_byte():
    device = make("hipMalloc", 4096)
    byte = ctypes.cast(device, ctypes.POINTER(ctypes.c_ubyte))[0]
    hipsim.load().hipFree(device)
    return byte

def fill_seconds():
    device = make("hipMalloc", 4096)
    started = time.monotonic()
    hipsim.check(hipsim.load().hipMemset(device, 1, 4096), "hipMemset")
    hipsim.check(hipsim.load().hipDeviceSynchronize(), "hipDeviceSynchronize")
    hipsim.load().hipFree(device)
    return time.monotonic() - started

print(first_byte(), fill_seconds() > 0.2)
hipsim.configure(stale_memory="clean", fill_latency_us=0)
print(first_byte(), fill_seconds() > 0.2)
hipsim.reset()
print(first_byte(), fill_seconds() > 0.2)
"""
    switches = "stale_memory=poisoned,fill_latency_us=200000"
    assert run(program, HIPSIM_SWITCHES=switches).splitlines() == [
        "255 True",
        "0 False",
        "255 True",
    ]
    assert run(program, HIPSIM_SWITCHES="").splitlines() == ["0 False"] * 3
