# SPDX-License-Identifier: Apache-2.0
"""Order and time: streams, events and the null stream."""

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from vllm_rocm_memory.sim import hipsim

SLOW_US = 400_000
BLOCKING, NON_BLOCKING = 0, 1


def slow_copy(gpu: Any, destination: int, source: int, size: int, stream: Any) -> None:
    hipsim.configure(copy_latency_us=SLOW_US)
    gpu.call("hipMemcpyAsync", destination, source, size, 4, stream)
    hipsim.configure(copy_latency_us=0)


def test_an_event_after_a_slow_copy_is_not_ready_until_it_is_made(gpu: Any) -> None:
    host, device, stream = gpu.pinned(100, seed=1), gpu.malloc(100), gpu.stream()
    event, never = gpu.event(), gpu.event()
    began = time.monotonic()
    slow_copy(gpu, device, host.ctypes.data, 100, stream)
    gpu.call("hipEventRecord", event, stream)
    assert gpu.lib.hipEventQuery(event) == hipsim.NOT_READY
    assert gpu.lib.hipStreamQuery(stream) == hipsim.NOT_READY
    assert bytes((ctypes.c_char * 100).from_address(device)) == bytes(100)
    gpu.call("hipEventSynchronize", event)
    assert time.monotonic() - began >= SLOW_US / 1e6
    assert gpu.lib.hipEventQuery(event) == 0
    assert gpu.lib.hipStreamQuery(stream) == 0
    assert (gpu.read(device, 100) == host).all()
    assert gpu.lib.hipEventQuery(never) == 0
    assert gpu.lib.hipEventSynchronize(never) == 0


@pytest.mark.parametrize("wait", [True, False], ids=["with wait", "without: control"])
def test_a_wait_orders_two_streams(gpu: Any, wait: bool) -> None:
    host, device = gpu.pinned(100, seed=1), gpu.malloc(100)
    target = gpu.malloc(100)
    writer, reader, written = gpu.stream(), gpu.stream(), gpu.event()
    slow_copy(gpu, device, host.ctypes.data, 100, writer)
    gpu.call("hipEventRecord", written, writer)
    if wait:
        gpu.call("hipStreamWaitEvent", reader, written, 0)
    gpu.call("hipMemcpyAsync", target, device, 100, 4, reader)
    gpu.call("hipDeviceSynchronize")
    assert (gpu.read(target, 100) == (host if wait else 0)).all()


def test_a_wait_is_for_the_recording_of_its_moment(gpu: Any) -> None:
    host, slow, event = gpu.pinned(100), gpu.stream(), gpu.event()
    device, waiting = gpu.malloc(100), gpu.stream()
    gpu.call("hipEventRecord", event, slow)
    gpu.call("hipStreamWaitEvent", waiting, event, 0)
    slow_copy(gpu, device, host.ctypes.data, 100, slow)
    gpu.call("hipEventRecord", event, slow)
    gpu.call("hipStreamSynchronize", waiting)
    assert gpu.lib.hipEventQuery(event) == hipsim.NOT_READY
    gpu.call("hipEventDestroy", event)
    gpu.call("hipStreamSynchronize", slow)


def test_waiting_for_an_event_nobody_recorded_is_nothing(gpu: Any) -> None:
    stream = gpu.stream()
    gpu.call("hipStreamWaitEvent", stream, gpu.event(), 0)
    gpu.call("hipStreamSynchronize", stream)


@pytest.mark.parametrize(
    ("flags", "ordered"), [(BLOCKING, True), (NON_BLOCKING, False)]
)
@pytest.mark.parametrize("null_first", [True, False])
def test_the_null_stream_orders_blocking_streams(
    gpu: Any, flags: int, ordered: bool, null_first: bool
) -> None:
    host, device, target = gpu.pinned(100, seed=1), gpu.malloc(100), gpu.malloc(100)
    stream = gpu.stream(flags)
    first, second = (None, stream) if null_first else (stream, None)
    slow_copy(gpu, device, host.ctypes.data, 100, first)
    gpu.call("hipMemcpyAsync", target, device, 100, 4, second)
    gpu.call("hipDeviceSynchronize")
    assert (gpu.read(target, 100) == (host if ordered else 0)).all()


def test_the_null_stream_answers_for_blocking_streams(gpu: Any) -> None:
    host, device = gpu.pinned(100), gpu.malloc(200)
    free, blocking = gpu.stream(NON_BLOCKING), gpu.stream(BLOCKING)
    slow_copy(gpu, device, host.ctypes.data, 100, free)
    assert gpu.lib.hipStreamQuery(None) == 0
    assert gpu.lib.hipStreamQuery(free) == hipsim.NOT_READY
    slow_copy(gpu, device + 100, host.ctypes.data, 100, blocking)
    assert gpu.lib.hipStreamQuery(None) == hipsim.NOT_READY
    gpu.call("hipStreamSynchronize", None)
    assert gpu.lib.hipStreamQuery(blocking) == 0


def test_devices_are_not_ordered(gpu: Any) -> None:
    host, device = gpu.pinned(100), gpu.malloc(100)
    slow_copy(gpu, device, host.ctypes.data, 100, None)
    gpu.call("hipSetDevice", 1)
    gpu.call("hipDeviceSynchronize")
    gpu.call("hipSetDevice", 0)
    assert gpu.lib.hipStreamQuery(None) == hipsim.NOT_READY
    gpu.call("hipDeviceSynchronize")
    assert gpu.lib.hipStreamQuery(None) == 0


def test_which_calls_wait_for_their_bytes(gpu: Any) -> None:
    pinned, pageable = gpu.pinned(100), gpu.pageable(100)
    device, stream = gpu.malloc(200), gpu.stream()
    other = gpu.pinned(100)
    hipsim.configure(copy_latency_us=SLOW_US // 2)
    lib = gpu.lib
    rows: list[tuple[bool, Callable[[], int]]] = [
        (False, lambda: lib.hipMemcpyAsync(device, pinned.ctypes.data, 9, 4, stream)),
        (False, lambda: lib.hipMemcpy(device, device + 100, 100, 3)),
        (False, lambda: lib.hipMemset(device, 1, 100)),
        (False, lambda: lib.hipMemsetAsync(device + 1, 1, 100, stream)),
        (True, lambda: lib.hipMemcpyAsync(device, pageable.ctypes.data, 9, 4, stream)),
        (True, lambda: lib.hipMemcpyAsync(pageable.ctypes.data, device, 9, 4, stream)),
        (
            True,
            lambda: lib.hipMemcpyAsync(
                other.ctypes.data, pinned.ctypes.data, 9, 4, stream
            ),
        ),
        (True, lambda: lib.hipMemcpy(device, pinned.ctypes.data, 9, 1)),
        (True, lambda: lib.hipMemset(device + 1, 1, 100)),
        (True, lambda: lib.hipMemset(pinned.ctypes.data, 1, 100)),
    ]
    for number, (waits, call) in enumerate(rows):
        gpu.call("hipDeviceSynchronize")
        began = time.monotonic()
        assert call() == 0
        idle = lib.hipStreamQuery(stream) == 0 and lib.hipStreamQuery(None) == 0
        assert idle == waits, f"row {number}"
        if waits:
            assert time.monotonic() - began >= SLOW_US / 2e6, f"row {number}"


@pytest.mark.parametrize("drop", ["hipFree", "hipHostUnregister", "hipStreamDestroy"])
def test_dropping_waits_for_work(gpu: Any, drop: str) -> None:
    host, device, stream = gpu.pinned(100, seed=1), gpu.malloc(100), gpu.stream()
    back, event = gpu.pinned(100), gpu.event()
    slow_copy(gpu, device, host.ctypes.data, 100, stream)
    gpu.call("hipMemcpyAsync", back.ctypes.data, device, 100, 4, stream)
    gpu.call("hipEventRecord", event, stream)
    victim = {
        "hipFree": device,
        "hipHostUnregister": host.ctypes.data,
        "hipStreamDestroy": stream,
    }[drop]
    gpu.call(drop, victim)
    assert gpu.lib.hipEventQuery(event) == 0
    assert (back == host).all()


def test_elapsed_time(gpu: Any) -> None:
    host, device, stream = gpu.pinned(100), gpu.malloc(100), gpu.stream()
    start, stop, unused = gpu.event(), gpu.event(), gpu.event()
    untimed = gpu.event(hipsim.EVENT_DISABLE_TIMING)
    for event in (start, untimed):
        gpu.call("hipEventRecord", event, stream)
    slow_copy(gpu, device, host.ctypes.data, 100, stream)
    gpu.call("hipEventRecord", stop, stream)
    ms = ctypes.c_float(-1)
    elapsed = gpu.lib.hipEventElapsedTime
    assert elapsed(ctypes.byref(ms), start, stop) == hipsim.NOT_READY
    gpu.call("hipEventSynchronize", stop)
    assert elapsed(ctypes.byref(ms), start, stop) == 0
    assert SLOW_US / 1000 <= ms.value < 60_000
    assert elapsed(ctypes.byref(ms), start, start) == 0
    assert ms.value == 0
    assert elapsed(None, start, stop) == 1
    for wrong in (None, unused, untimed, 12345):
        assert elapsed(ctypes.byref(ms), wrong, stop) == 400


def test_wrong_handles_and_flags(gpu: Any) -> None:
    lib, stream, event = gpu.lib, gpu.stream(), gpu.event()
    handle = ctypes.c_void_p()
    out = ctypes.byref(handle)
    for wrong in (event, 12345):
        assert lib.hipStreamQuery(wrong) == 400
        assert lib.hipStreamSynchronize(wrong) == 400
        assert lib.hipStreamDestroy(wrong) == 400
        assert lib.hipEventRecord(event, wrong) == 400
        assert lib.hipStreamWaitEvent(wrong, event, 0) == 400
        assert lib.hipMemsetAsync(gpu.malloc(1), 0, 1, wrong) == 400
    assert lib.hipStreamDestroy(None) == 400
    assert lib.hipEventDestroy(None) == 400
    assert lib.hipEventDestroy(stream) == 709
    for wrong in (None, stream, 12345):
        assert lib.hipEventQuery(wrong) == 400
        assert lib.hipEventSynchronize(wrong) == 400
        assert lib.hipEventRecord(wrong, stream) == 400
        assert lib.hipStreamWaitEvent(stream, wrong, 0) == 400
    assert lib.hipStreamWaitEvent(stream, event, 1) == 400
    assert lib.hipStreamWaitEvent(stream, event, 2) == 1
    assert lib.hipStreamCreateWithFlags(out, 2) == 1
    assert lib.hipStreamCreate(None) == 1
    assert lib.hipEventCreate(None) == 1
    for flags in (0x8, 0x4, 0x40000000 | 0x80000000):
        assert lib.hipEventCreateWithFlags(out, flags) == 1
    gpu.event(0x4 | 0x2)
    gpu.call("hipStreamDestroy", stream)
    assert lib.hipStreamQuery(stream) == 400
    assert gpu.stream() != stream


def test_priorities(gpu: Any) -> None:
    least, greatest = ctypes.c_int(), ctypes.c_int()
    gpu.call(
        "hipDeviceGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest)
    )
    assert (least.value, greatest.value) == (1, -1)
    for priority in (-100, -1, 0, 1, 100):
        stream = gpu.make("hipStreamCreateWithPriority", 1, priority)
        gpu.defer("hipStreamDestroy", stream)
    assert hipsim.stats().streams == 5


def test_threads_wait_without_the_interpreter_lock(gpu: Any) -> None:
    host, device, stream = gpu.pinned(100), gpu.malloc(100), gpu.stream()
    slow_copy(gpu, device, host.ctypes.data, 100, stream)
    waiter = threading.Thread(target=gpu.lib.hipStreamSynchronize, args=(stream,))
    waiter.start()
    assert gpu.lib.hipStreamQuery(stream) == hipsim.NOT_READY
    waiter.join(timeout=30)
    assert not waiter.is_alive()
    assert gpu.lib.hipStreamQuery(stream) == 0


@pytest.mark.parametrize("wait", [True, False], ids=["with wait", "without: control"])
def test_a_late_fill_wipes_out_what_another_stream_wrote(gpu: Any, wait: bool) -> None:
    host, device, stream = gpu.pinned(100, seed=1), gpu.malloc(100), gpu.stream()
    hipsim.configure(fill_latency_us=SLOW_US)
    gpu.call("hipMemset", device, 0, 100)
    if wait:
        gpu.call("hipStreamSynchronize", None)
    gpu.call("hipMemcpyAsync", device, host.ctypes.data, 100, 4, stream)
    gpu.call("hipDeviceSynchronize")
    assert (gpu.read(device, 100) == (host if wait else 0)).all()


# --- capture -----------------------------------------------------------------------

# The last release in which work on the null stream breaks captures.
NULL_BREAKS = ("7.1", "7.2.3", "7.12")
# The releases before the one in which a stream survives an invalidated capture.
STAYS_INVALID = ("7.1", "7.2.3", "7.12", "7.13")


def status_of(gpu: Any, stream: int) -> int:
    status = ctypes.c_uint()
    gpu.call("hipStreamIsCapturing", stream, ctypes.byref(status))
    return status.value


def end(gpu: Any, stream: int) -> int:
    graph = ctypes.c_void_p(5)
    error: int = gpu.lib.hipStreamEndCapture(stream, ctypes.byref(graph))
    assert (graph.value is None) == (error != 0)
    if error == 0:
        gpu.defer("hipGraphDestroy", graph.value)
    return error


def test_a_graph_replays_what_was_captured(gpu: Any, profile: str) -> None:
    host, device, back = gpu.pinned(100, seed=1), gpu.malloc(200), gpu.pinned(200)
    graph = gpu.graph(
        ["hipMemsetAsync", device, 3, 200],
        ["hipMemcpyAsync", device, host.ctypes.data, 100, 4],
        ["hipMemcpy2DAsync", device + 100, 20, device, 10, 10, 5, 4],
        ["hipMemcpyAsync", back.ctypes.data, device, 200, 4],
    )
    assert (back == 0).all()
    assert hipsim.stats().fills == 0
    nodes = ctypes.c_size_t()
    gpu.call("hipGraphGetNodes", graph, None, ctypes.byref(nodes))
    assert nodes.value == 4
    executable, stream = gpu.executable(graph), gpu.stream()
    gpu.call("hipGraphDestroy", graph)
    for seed in (1, 2):
        host[:] = gpu.pageable(100, seed=seed)
        gpu.call("hipGraphLaunch", executable, stream)
        gpu.call("hipStreamSynchronize", stream)
        assert (back[:100] == host).all()
        rows = back[100:].reshape(5, 20)
        assert (rows[:, :10] == host[:50].reshape(5, 10)).all()
        assert (rows[:, 10:] == 3).all()
    assert hipsim.stats().fills == 2


@pytest.mark.parametrize("call", ["hipMemset", "hipMemcpy"])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_a_synchronous_call_ends_every_capture(
    gpu: Any, profile: str, call: str, mode: int
) -> None:
    device, host = gpu.malloc(8), gpu.pinned(8)
    streams = [gpu.stream(BLOCKING), gpu.stream(NON_BLOCKING)]
    for stream in streams:
        gpu.call("hipStreamBeginCapture", stream, mode)
    arguments = (0, 8) if call == "hipMemset" else (host.ctypes.data, 8, 1)
    assert getattr(gpu.lib, call)(device, *arguments) == 906
    for stream in streams:
        assert status_of(gpu, stream) == 2
        assert gpu.lib.hipMemsetAsync(device, 0, 8, stream) == 901
        assert end(gpu, stream) == 901
        stuck = profile in STAYS_INVALID
        assert status_of(gpu, stream) == (2 if stuck else 0)
    assert getattr(gpu.lib, call)(device, *arguments) == 0


def test_the_null_stream_and_captures_by_release(gpu: Any, profile: str) -> None:
    device, stream = gpu.malloc(8), gpu.stream()
    gpu.call("hipStreamBeginCapture", stream, 0)
    breaks = profile in NULL_BREAKS
    assert gpu.lib.hipMemsetAsync(device, 1, 8, None) == (906 if breaks else 0)
    assert end(gpu, stream) == (901 if breaks else 0)
