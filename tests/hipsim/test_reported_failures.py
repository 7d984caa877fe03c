# SPDX-License-Identifier: Apache-2.0
"""What was reported of ROCm fails here in the same way, and its cure works.

Each report is a piece of code in two versions: the one that fails on a machine, and the
one that does not. The reports are those of vLLM's pull requests that put KV batches on
the copy engines and the CUDA graph pool into cuMem memory on ROCm.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vllm_rocm_memory.sim import hipsim

from .conftest import PAGE, Gpu, Program

ROUNDS = 200
MANY = 8193
ATTRIBUTES_SINCE = 71_200_000
PREFER_CE_SINCE = 71_600_000


# --- a blocking memset inside a capture ----------------------------------------------


def zero_when_mapped(gpu: Gpu) -> int:
    address = gpu.virtual(PAGE)
    return gpu.lib.hipMemset(address, 0, PAGE)


def leave_as_mapped(gpu: Gpu) -> int:
    gpu.virtual(PAGE)
    return 0


@pytest.mark.parametrize(
    ("create_and_map", "errors"),
    [(zero_when_mapped, (906, 901, 901)), (leave_as_mapped, (0, 0, 0))],
)
def test_memory_is_mapped_while_a_graph_is_captured(
    gpu: Gpu, profile: str, create_and_map: Callable[[Gpu], int], errors: Any
) -> None:
    stream, target, source = gpu.stream(), gpu.malloc(PAGE), gpu.malloc(PAGE)
    gpu.call("hipStreamBeginCapture", stream, 0)
    mapped = create_and_map(gpu)
    captured = gpu.lib.hipMemcpyAsync(target, source, PAGE, 3, stream)
    graph = ctypes.c_void_p()
    ended = gpu.lib.hipStreamEndCapture(stream, ctypes.byref(graph))
    gpu.defer("hipGraphDestroy", graph.value)
    assert (mapped, captured, ended) == errors
    assert bool(graph.value) == (ended == 0)


# --- a memset that comes after what it should come before ----------------------------


def do_not_wait(gpu: Gpu) -> None:
    pass


def wait_for_the_fill(gpu: Gpu) -> None:
    gpu.call("hipStreamSynchronize", None)


@pytest.mark.parametrize(
    ("after_the_fill", "lost"), [(do_not_wait, ROUNDS), (wait_for_the_fill, 0)]
)
def test_woken_memory_is_zeroed_and_then_restored(
    gpu: Gpu, profile: str, after_the_fill: Callable[[Gpu], None], lost: int
) -> None:
    """hipMemset returns before it has run; non-blocking streams do not wait for it."""
    stream, backup = gpu.stream(), gpu.pinned(PAGE, seed=1)
    first = gpu.virtual(*[PAGE] * ROUNDS)
    addresses = range(first, first + ROUNDS * PAGE, PAGE)
    # The first fill is late, and the others queue behind it.
    for address, latency in zip(addresses, [500_000] + [0] * (ROUNDS - 1), strict=True):
        hipsim.configure(fill_latency_us=latency)
        gpu.call("hipMemset", address, 0, PAGE)
        after_the_fill(gpu)
        gpu.call("hipMemcpyAsync", address, backup.ctypes.data, PAGE, 1, stream)
    gpu.call("hipStreamSynchronize", stream)
    gpu.call("hipDeviceSynchronize")
    restored = [np.array_equal(gpu.read(each, PAGE), backup) for each in addresses]
    assert restored.count(False) == lost


# --- IPC of virtual memory -----------------------------------------------------------


def export_the_input(gpu: Gpu, graph_input: int) -> int:
    return graph_input


def export_a_buffer_for_copies(gpu: Gpu, graph_input: int) -> int:
    buffer = gpu.malloc(PAGE)
    gpu.call("hipMemcpy", buffer, graph_input, PAGE, hipsim.DEVICE_TO_DEVICE)
    gpu.call("hipDeviceSynchronize")
    return buffer


OPEN = """
handle = hipsim.IpcMemHandle.from_buffer_copy(bytes.fromhex(sys.stdin.readline()))
pointer = ctypes.c_void_p()
error = hipsim.load().hipIpcOpenMemHandle(ctypes.byref(pointer), handle, 1)
print(error, flush=True)
"""


@pytest.mark.parametrize(
    ("exported", "works"),
    [(export_the_input, False), (export_a_buffer_for_copies, True)],
)
def test_an_all_reduce_exports_what_it_captured(
    gpu: Gpu, profile: str, exported: Callable[[Gpu, int], int], works: bool
) -> None:
    handle = hipsim.IpcMemHandle()
    pointer = exported(gpu, gpu.virtual(PAGE))
    error = gpu.lib.hipIpcGetMemHandle(ctypes.byref(handle), pointer)
    refused = not works and profile in ("7.13", "7.15", "7.16")
    assert error == (1 if refused else 0)
    if not refused:
        peer = Program(OPEN, HIPSIM_PROFILE=profile)
        peer.send(bytes(handle).hex())
        assert (peer.receive() == "0") == works
        peer.finish()
    assert hipsim.stats().ipc_virtual_exports == (not works)


# --- attributes of a batch -----------------------------------------------------------


def always_with_attributes(version: int) -> int:
    return 1


def with_attributes_where_they_are_known(version: int) -> int:
    return int(version >= ATTRIBUTES_SINCE)


@pytest.mark.parametrize(
    ("count_for", "fails_in"),
    [
        (always_with_attributes, ("7.1", "7.2.3")),
        (with_attributes_where_they_are_known, ()),
    ],
)
def test_a_batch_has_attributes(
    gpu: Gpu, profile: str, count_for: Callable[[int], int], fails_in: tuple[str, ...]
) -> None:
    error = submit(gpu, copies=1, attributes=count_for(version(gpu)))
    assert error == (801 if profile in fails_in else 0)


# --- more copies than the kernel has room for ----------------------------------------


def all_in_one_call(count: int) -> list[int]:
    return [count]


def at_most_8192_a_call(count: int) -> list[int]:
    return [8192] * (count // 8192) + [count % 8192]


@pytest.mark.parametrize(
    ("calls", "faults_in"),
    [(all_in_one_call, ("7.15", "7.16")), (at_most_8192_a_call, ())],
)
def test_a_batch_is_large(
    gpu: Gpu,
    profile: str,
    calls: Callable[[int], list[int]],
    faults_in: tuple[str, ...],
) -> None:
    for count in calls(MANY):
        assert submit(gpu, copies=count, attributes=0) == 0
    error = gpu.lib.hipDeviceSynchronize()
    faulted = profile in faults_in
    assert error == (700 if faulted else 0)
    assert hipsim.stats().memory_faults == faulted
    made = sum(count.copies for count in hipsim.stats().copies.values())
    assert made == (0 if faulted else MANY)


# --- small copies beside decode ------------------------------------------------------


def without_flags(version: int) -> int:
    return 0


def prefer_copy_engines(version: int) -> int:
    known = version >= PREFER_CE_SINCE
    return hipsim.FLAG_PREFER_COPY_ENGINE if known else 0


@pytest.mark.parametrize("profile", ["7.13", "7.15", "7.16"], indirect=True)
@pytest.mark.parametrize(
    ("flags_for", "kernel_in"),
    [
        (without_flags, ("7.13", "7.15", "7.16")),
        (prefer_copy_engines, ("7.13", "7.15")),
    ],
)
def test_small_copies_leave_the_compute_units_alone(
    gpu: Gpu, profile: str, flags_for: Callable[[int], int], kernel_in: tuple[str, ...]
) -> None:
    assert submit(gpu, 1, attributes=1, flags=flags_for(version(gpu))) == 0
    gpu.call("hipDeviceSynchronize")
    engine = "blit" if profile in kernel_in else "sdma"
    assert hipsim.stats().copies[engine, "d2h"].copies == 1


def version(gpu: Gpu) -> int:
    number = ctypes.c_int()
    gpu.call("hipRuntimeGetVersion", ctypes.byref(number))
    return number.value


def submit(gpu: Gpu, copies: int, attributes: int, flags: int = 0) -> int:
    """hipMemcpyBatchAsync of copies of 64 bytes each to page-locked memory."""
    device, host = gpu.malloc(64 * copies), gpu.pinned(64 * copies)
    offsets = np.arange(copies, dtype=np.uint64) * 64
    sizes = np.full(copies, 64, np.uint64)
    targets = np.uint64(host.ctypes.data) + offsets
    sources = np.uint64(device) + offsets
    order = 1
    entry = hipsim.MemcpyAttributes(order, flags=flags)
    first, failed = ctypes.c_size_t(0), ctypes.c_size_t()
    error: int = gpu.lib.hipMemcpyBatchAsync(
        targets.ctypes.data,
        sources.ctypes.data,
        sizes.ctypes.data,
        copies,
        ctypes.addressof(entry) if attributes else None,
        ctypes.addressof(first) if attributes else None,
        attributes,
        ctypes.addressof(failed),
        None,
    )
    return error
