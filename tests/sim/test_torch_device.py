# SPDX-License-Identifier: Apache-2.0
"""Streams, events and registration in place of PyTorch's, over the simulator."""

import subprocess
import sys
import threading
import time

import pytest
import torch

from vllm_rocm_memory.sim import hipsim, torch_device
from vllm_rocm_memory.sim.torch_device import Cudart, Event, Stream

pytestmark = pytest.mark.usefixtures("simulator")

SIZE = 1 << 16
LATENCY_US = 100_000


@pytest.fixture
def registered():
    """Host memory that the device can copy from without a detour."""
    host = torch.arange(SIZE, dtype=torch.uint8)
    assert Cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0).value == 0
    yield host
    assert Cudart().cudaHostUnregister(host.data_ptr()).value == 0


@pytest.fixture
def device():
    with torch_device.device_memory():
        tensor = torch.zeros(SIZE, dtype=torch.uint8)
    yield tensor
    tensor.set_()  # pytest holds on to the tensor itself


def copy(destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
    error = hipsim.load().hipMemcpyAsync(
        destination.data_ptr(),
        source.data_ptr(),
        source.nbytes,
        hipsim.DEFAULT_KIND,
        stream.cuda_stream,
    )
    assert error == hipsim.SUCCESS


def test_an_event_ends_with_the_copy_before_it(registered, device):
    hipsim.configure(copy_latency_us=LATENCY_US)
    stream, event = Stream(), Event()
    assert event.query(), "never recorded"

    copy(device, registered, stream)
    event.record(stream)
    assert not event.query() and not stream.query()
    assert not device.any()
    event.synchronize()

    assert event.query() and stream.query()
    assert torch.equal(device, registered)


def test_a_stream_waits_for_the_event_as_it_was_when_asked(registered, device):
    hipsim.configure(copy_latency_us=LATENCY_US)
    first, second, third = Stream(), Stream(), Stream()
    with torch_device.device_memory():
        copied = torch.zeros_like(device)
    copy(device, registered, first)
    event = first.record_event()
    second.wait_event(event)
    event.record(third)  # idle: a wait for this recording would be over at once
    hipsim.configure(copy_latency_us=0)
    copy(copied, device, second)
    second.synchronize()
    assert torch.equal(copied, registered)


def test_wait_stream_and_event_wait_order_streams(registered, device):
    hipsim.configure(copy_latency_us=LATENCY_US)
    first, second = Stream(), Stream()
    copy(device, registered, first)
    second.wait_stream(first)
    assert not second.query()
    second.synchronize()
    assert torch.equal(device, registered)

    device.zero_()
    copy(device, registered, first)
    first.record_event().wait(second)
    second.synchronize()
    assert torch.equal(device, registered)


def test_the_null_stream_is_current_and_idle():
    assert torch_device.current_stream().cuda_stream == 0
    event = Event()
    event.record()
    event.synchronize()
    assert torch_device.current_stream().query()


def test_entering_a_stream_waits_for_what_it_holds(registered, device):
    hipsim.configure(copy_latency_us=LATENCY_US)
    stream, inner = Stream(), Stream()
    copy(device, registered, stream)
    with torch_device.stream(stream):
        assert torch.equal(device, registered)
        assert torch_device.current_stream() is stream
        with torch_device.stream(None), torch_device.stream(inner):
            assert torch_device.current_stream() is inner
        assert torch_device.current_stream() is stream
        other: list[int] = []
        thread = threading.Thread(
            target=lambda: other.append(torch_device.current_stream().cuda_stream)
        )
        thread.start()
        thread.join(10)
        assert other == [0], "each thread has a current stream of its own"
    assert torch_device.current_stream().cuda_stream == 0


def test_a_stream_is_current_until_another_one_is_set(registered, device):
    hipsim.configure(copy_latency_us=LATENCY_US)
    first, second = Stream(), Stream()
    copy(device, registered, first)
    try:
        torch_device.set_stream(first)
        assert torch.equal(device, registered), "it was waited for"
        torch_device.set_stream(None)
        assert torch_device.current_stream() == first
        with torch_device.stream(second):
            assert torch_device.current_stream() == second
        assert torch_device.current_stream() == first
    finally:
        torch_device.set_stream(torch_device.default_stream())
    assert torch_device.current_stream() == torch_device.default_stream()


def test_objects_of_one_stream_are_equal():
    first, second = Stream(), Stream()
    assert Stream.null() == torch_device.current_stream() != first
    assert first != second and first != first.cuda_stream
    with torch_device.stream(first):
        assert {torch_device.current_stream(), first, second} == {first, second}
    assert len({Stream.null(), Stream.null()}) == 1


def test_an_error_is_nobody_elses():
    hipsim.fail("hipEventRecord", 1, 2)
    with pytest.raises(hipsim.HipError):
        Event().record()
    assert hipsim.load().hipGetLastError() == hipsim.SUCCESS


def test_synchronize_waits_for_every_stream(registered, device):
    hipsim.configure(copy_latency_us=LATENCY_US)
    copy(device, registered, Stream())
    torch_device.synchronize()
    assert torch.equal(device, registered)


def test_handles_end_with_their_objects():
    before = hipsim.stats()
    streams = [Stream(priority=p) for p in Stream.priority_range()]
    events = [stream.record_event() for stream in streams]
    now = hipsim.stats()
    assert (now.streams, now.events) == (before.streams + 2, before.events + 2)
    del streams, events
    now = hipsim.stats()
    assert (now.streams, now.events) == (before.streams, before.events)


def test_an_event_may_be_dropped_while_it_is_waited_for(registered, device):
    hipsim.configure(copy_latency_us=LATENCY_US)
    first, second = Stream(), Stream()
    copy(device, registered, first)
    second.wait_event(first.record_event())
    second.synchronize()
    assert torch.equal(device, registered)


def test_priorities_run_from_low_to_high():
    lowest, highest = Stream.priority_range()
    assert lowest > highest


def test_an_error_says_which_call_and_why():
    hipsim.fail("hipEventRecord", 1, 2)
    with pytest.raises(RuntimeError, match=r"hipEventRecord.*hipErrorOutOfMemory"):
        Event().record()
    event = Event()
    hipsim.fail("hipEventQuery", 1, 1)
    with pytest.raises(RuntimeError, match=r"hipEventQuery.*hipErrorInvalidValue"):
        event.query()


def test_registering_twice_is_an_error_with_a_name(registered):
    error = Cudart().cudaHostRegister(registered.data_ptr(), registered.nbytes, 0)
    assert error.value != 0
    assert str(error) == "hipErrorHostMemoryAlreadyRegistered"


def test_install_replaces_and_gives_back():
    pools = ("MemPool", "use_mem_pool", "empty_cache", "memory_snapshot")
    graphs = ("CUDAGraph", "graph", "graph_pool_handle", "is_current_stream_capturing")
    streams = ("Event", "Stream", "current_stream", "default_stream", "set_stream")
    names = [
        (torch, "Event"),
        *((torch.cuda, name) for name in (*pools, *graphs, *streams)),
        *((torch.cuda, name) for name in ("stream", "synchronize", "cudart")),
        *((torch.cuda.memory, name) for name in (*pools, "CUDAPluggableAllocator")),
        *((torch.cuda.graphs, name) for name in graphs),
        *((torch.accelerator, name) for name in ("synchronize", "empty_cache")),
        (torch.accelerator, "get_memory_info"),
    ]
    before = [getattr(owner, name) for owner, name in names]
    uninstall = torch_device.install()
    try:
        ours = [getattr(owner, name) for owner, name in names]
        assert all(each.__module__.startswith("vllm_rocm_memory.sim") for each in ours)
        assert torch.Event is Event and torch.cuda.Stream is Stream
        assert torch.cuda.cudart().cudaHostUnregister(0).value != 0
        free, total = torch.accelerator.get_memory_info()
        assert 0 < free <= total
        torch.cuda.synchronize()
        torch.accelerator.synchronize()
        # Dynamo keeps a table by function object, and refuses the same one twice.
        functions = [torch.cuda.synchronize, torch.accelerator.synchronize]
        functions += [torch.cuda.empty_cache, torch.accelerator.empty_cache]
        assert len(set(functions)) == 4
        x = torch.ones(4)
        captured = torch.cuda.CUDAGraph()
        pool = torch.cuda.MemPool()
        with torch.cuda.graph(captured, pool=pool.id):
            y = x + 1
        x.fill_(2)
        captured.replay()
        assert (y == 3).all() and torch.cuda.memory_snapshot(pool.id)
        del y
    finally:
        uninstall()
    assert [getattr(owner, name) for owner, name in names] == before


EXIT_SCRIPT = """
import threading, time, torch
from vllm_rocm_memory.sim import hipsim, torch_device

torch_device.install()
stream = torch.cuda.Stream()
with torch_device.device_memory():
    kept = torch.zeros(1 << 20, dtype=torch.uint8)
host = torch.ones(1 << 20, dtype=torch.uint8)
torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)
hipsim.configure(copy_latency_us=50_000)

def copy_for_ever():
    while True:
        hipsim.load().hipMemcpyAsync(
            kept.data_ptr(), host.data_ptr(), host.nbytes, 4, stream.cuda_stream)
        stream.record_event().synchronize()

threading.Thread(target=copy_for_ever, daemon=True).start()
time.sleep(0.2)
"""


def test_the_interpreter_may_exit_under_running_copies():
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", EXIT_SCRIPT], capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert time.monotonic() - started < 60
