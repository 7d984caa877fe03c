# SPDX-License-Identifier: Apache-2.0
"""The copy thread and its tickets, on the simulator's asynchronous streams."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.simple_kv_offload import copy_backend
from vllm.v1.simple_kv_offload.copy_backend import (
    CopyTicket,
    DmaCopyBackend,
    raise_failed_copy,
)
from vllm.v1.simple_kv_offload.cuda_mem_ops import (
    CU_MEMCPY_SRC_ACCESS_ORDER_ANY,
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
    BatchCopyError,
)
from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

from vllm_rocm_memory.sim import hipsim, torch_device

BLOCKS, PAGE = 16, 256
CPU = torch.device("cpu")
ILLEGAL_ADDRESS = 700
PATIENCE = 20.0


@pytest.fixture
def profile(request: pytest.FixtureRequest) -> str:
    """One release: what differs between them is below the backend."""
    return getattr(request, "param", "7.16")


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


class Offload:
    """A backend between one region of the device and one of the host."""

    def __init__(self, device) -> None:
        self.gpu = device.device_tensor(BLOCKS * PAGE).view(BLOCKS, PAGE)
        self.cpu = device.host_tensor(BLOCKS * PAGE).view(BLOCKS, PAGE)
        self.gpu.copy_(torch.arange(1, BLOCKS + 1, dtype=torch.uint8)[:, None])
        self.load_stream, self.store_stream = (torch_device.Stream() for _ in "ab")
        self.backend = DmaCopyBackend()
        self.events: list[tuple[int, CopyTicket]] = []

    def start(self) -> Offload:
        self.backend.init(
            {"kv": self.gpu}, {"kv": self.cpu}, CPU, self.load_stream, self.store_stream
        )
        return self

    def close(self) -> None:
        self.backend.shutdown()
        thread = self.backend._thread
        assert thread is not None
        thread.join(PATIENCE)
        assert not thread.is_alive()
        vars(self).clear()  # streams and events go with the last reference

    def store(self, src: list[int], dst: list[int], wait_event=None) -> CopyTicket:
        return self._launch(src, dst, True, wait_event)

    def load(self, src: list[int], dst: list[int]) -> CopyTicket:
        return self._launch(src, dst, False, None)

    def _launch(self, src, dst, is_store, wait_event) -> CopyTicket:
        index = len(self.events)
        self.backend.launch_copy(src, dst, is_store, index, self.events, wait_event)
        assert self.events[-1][0] == index, "the ticket must be there at once"
        return self.events[-1][1]


@pytest.fixture
def offload(device) -> Iterator[Offload]:
    offload = Offload(device).start()
    yield offload
    offload.close()


@pytest.fixture
def blocked(monkeypatch) -> Iterator[SimpleNamespace]:
    """The copy thread stops inside its next copy until ``release`` is set."""
    gate = SimpleNamespace(entered=threading.Event(), release=threading.Event())
    copy_blocks = copy_backend.copy_blocks

    def held(*args: object) -> None:
        gate.entered.set()
        assert gate.release.wait(PATIENCE)
        copy_blocks(*args)

    monkeypatch.setattr(copy_backend, "copy_blocks", held)
    yield gate
    gate.release.set()


def test_blocks_go_to_the_host_and_come_back(offload):
    stored = offload.store([1, 2, 5], [9, 10, 0])
    stored.synchronize()
    assert torch.equal(offload.cpu[[9, 10, 0]], offload.gpu[[1, 2, 5]])
    loaded = offload.load([9, 0], [3, 4])
    until(loaded.query)
    assert torch.equal(offload.gpu[[3, 4]], offload.cpu[[9, 0]])
    assert stored.query()
    assert stored.error is loaded.error is None
    for _, ticket in offload.events:
        raise_failed_copy(ticket)


def test_stores_read_in_stream_order_and_loads_at_any_time(offload):
    (store, store_stream), (load, load_stream) = (
        offload.backend._store,
        offload.backend._load,
    )
    assert store.attrs.srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    assert load.attrs.srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_ANY
    assert store.stream_handle == store_stream.cuda_stream
    assert load.stream_handle == load_stream.cuda_stream
    assert store_stream is offload.store_stream
    assert load_stream is offload.load_stream


def test_a_copy_is_done_when_the_stream_says_so(offload):
    hipsim.configure(copy_latency_us=500_000)
    start = time.monotonic()
    ticket = offload.store([0], [0])
    assert not ticket.query()
    until(ticket.query)
    assert time.monotonic() - start >= 0.5
    assert torch.equal(offload.cpu[0], offload.gpu[0])


def test_a_ticket_exists_while_the_copy_waits_for_the_thread(offload, blocked):
    first, second = offload.store([0], [0]), offload.store([1], [1])
    assert blocked.entered.wait(PATIENCE)
    assert not first.query()
    assert not second.query()
    blocked.release.set()
    second.synchronize()
    assert first.query()


def test_synchronize_waits_for_a_queued_copy(offload, blocked):
    """A flush that looked only at submitted copies would miss this one."""
    offload.store([0], [0])
    queued = offload.store([7], [3])
    assert blocked.entered.wait(PATIENCE)
    threading.Timer(0.2, blocked.release.set).start()
    queued.synchronize()
    assert torch.equal(offload.cpu[3], offload.gpu[7])


def test_a_store_waits_for_its_event(offload):
    assert _corrupt_rounds(offload, 150, late_us=2000, with_event=True) == 0


def test_a_store_without_the_event_comes_too_early(offload):
    """The control for the test above."""
    assert _corrupt_rounds(offload, 3, late_us=100_000, with_event=False) > 0


def _corrupt_rounds(
    offload: Offload, rounds: int, late_us: int, with_event: bool
) -> int:
    """Write a block late on another stream and store it; count wrong blocks."""
    hip = hipsim.load()
    compute, done = torch_device.Stream(), torch_device.Event()
    block, corrupt = offload.gpu[4], 0
    for i in range(rounds):
        value = i % 200 + 1
        hipsim.configure(copy_latency_us=late_us)
        stream = compute.cuda_stream
        assert hip.hipMemsetAsync(block.data_ptr(), value, PAGE, stream) == 0
        hipsim.configure(copy_latency_us=0)
        done.record(compute)
        offload.store([4], [4], done if with_event else None).synchronize()
        corrupt += bool((offload.cpu[4] != value).any())
        compute.synchronize()
    return corrupt


# ----- failures


@pytest.mark.parametrize(
    "call", ["hipMemcpyBatchAsync", "hipStreamWaitEvent", "hipEventRecord"]
)
@pytest.mark.parametrize("wait", ["query", "synchronize"])
def test_a_failing_call_fails_its_copy_alone(offload, vllm_log, call, wait):
    event = torch_device.Event()
    event.record(torch_device.Stream())
    hipsim.fail(call, 1, ILLEGAL_ADDRESS)
    failed = offload.store([3, 4, 5], [6, 7, 8], event)
    if wait == "query":
        until(failed.query)
    else:
        with pytest.raises(RuntimeError):
            failed.synchronize()
    assert failed.query()
    assert isinstance(failed.error, RuntimeError)
    assert "hipErrorIllegalAddress (700)" in str(failed.error)
    with pytest.raises(RuntimeError) as raised:
        raise_failed_copy(failed)
    assert raised.value is failed.error

    logged = "\n".join(r.getMessage() for r in vllm_log.records)
    assert "KV store of blocks 3-5 to 6-8 failed" in logged
    assert "hipErrorIllegalAddress (700)" in logged

    after = offload.store([1], [1], event)
    after.synchronize()
    assert torch.equal(offload.cpu[1], offload.gpu[1])


@pytest.mark.parametrize("profile", ["7.2.3"], indirect=True)
def test_the_log_names_the_region_where_the_runtime_names_the_copy(offload, vllm_log):
    hipsim.fail("hipMemcpyBatchAsync", 1, ILLEGAL_ADDRESS)
    failed = offload.load([3, 4], [6, 7])
    until(failed.query)
    assert isinstance(failed.error, BatchCopyError)
    assert failed.error.direction == "load"
    (record,) = [r for r in vllm_log.records if r.levelname == "ERROR"]
    assert "copy 0 of 1, region 'kv', blocks 3-4 to 6-7" in record.getMessage()


@pytest.mark.parametrize("call", ["hipEventQuery", "hipEventSynchronize"])
def test_an_error_that_shows_up_later_is_the_tickets_too(offload, call, vllm_log):
    ticket = offload.store([0, 1], [4, 5])
    until(ticket._settled.is_set)
    hipsim.fail(call, 1, ILLEGAL_ADDRESS)
    if call == "hipEventQuery":
        assert ticket.query() is True
    words = r"KV store of blocks 0-1 to 4-5 failed.*hipErrorIllegalAddress \(700\)"
    with pytest.raises(RuntimeError, match=words):
        ticket.synchronize()
    assert ticket.query() is True
    with pytest.raises(RuntimeError, match=words):
        raise_failed_copy(ticket)
    (record,) = [r for r in vllm_log.records if r.levelname == "ERROR"]
    assert re.search(words, record.getMessage())


def test_a_failed_copy_ends_only_when_its_stream_is_idle(device, monkeypatch):
    """The first call of the batch is under way when the second one fails."""
    monkeypatch.setenv("VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS", "1")
    offload = Offload(device).start()
    hipsim.configure(copy_latency_us=300_000)
    hipsim.fail("hipMemcpyBatchAsync", 2, ILLEGAL_ADDRESS)
    ticket = offload.store([0, 2], [1, 5])
    until(ticket.query)
    assert ticket.error is not None
    assert offload.store_stream.query()
    assert torch.equal(offload.cpu[1], offload.gpu[0])
    offload.backend.shutdown()


def test_any_error_leaves_the_thread_alive(offload, monkeypatch):
    class Odd(BaseException):
        pass

    def copy_blocks(*args: object) -> None:
        raise Odd("neither an Exception nor a HIP error")

    with monkeypatch.context() as patch:
        patch.setattr(copy_backend, "copy_blocks", copy_blocks)
        ticket = offload.load([0], [0])
        until(ticket.query)
    assert isinstance(ticket.error, Odd)
    offload.store([1], [1]).synchronize()


def test_plain_events_have_no_error(device):
    raise_failed_copy(torch_device.Event())


def test_a_thread_that_cannot_start_is_an_error_of_init(device, monkeypatch):
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    offload = Offload(device)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            offload.start()
    ticket = offload.store([0], [0])
    assert ticket.query()
    with pytest.raises(RuntimeError, match="KV copy thread is not running"):
        ticket.synchronize()
    offload.backend.shutdown()


def test_a_device_that_cannot_be_set_is_an_error_of_init(device, monkeypatch):
    def set_device(device: torch.device) -> None:
        raise RuntimeError("invalid device ordinal")

    platform = SimpleNamespace(set_device=set_device)
    monkeypatch.setattr(copy_backend, "current_platform", platform)
    offload = Offload(device)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        offload.start()
    offload.backend.shutdown()


def test_a_ticket_ends_when_its_thread_does(offload):
    offload.backend._queue.put(None)  # what ends the thread, without a shutdown
    offload.backend._thread.join(PATIENCE)
    lost = offload.store([0], [0])
    assert lost.query() is True
    with pytest.raises(RuntimeError, match="KV copy thread is not running"):
        lost.synchronize()


def test_synchronize_notices_that_the_thread_died_meanwhile(device):
    thread = threading.Thread(target=time.sleep, args=(0.3,), daemon=True)
    thread.start()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="KV copy thread is not running"):
        CopyTicket(thread, "a copy").synchronize()
    assert time.monotonic() - start < PATIENCE


def test_a_tickets_first_end_is_its_only_one(device):
    ticket = CopyTicket(None, "a copy")
    first = RuntimeError("first")
    assert ticket.fail(first)
    assert not ticket.fail(RuntimeError("second"))
    ticket.queued(torch_device.Event())
    assert ticket.error is first


def test_tickets_may_be_asked_from_many_threads(offload):
    hipsim.configure(copy_latency_us=1000)
    tickets = [offload.store([i % BLOCKS], [i % BLOCKS]) for i in range(100)]
    ended: list[bool] = []

    def ask() -> None:
        for ticket in tickets:
            until(ticket.query)
            ticket.synchronize()
            ended.append(ticket.error is None)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert ended == [True] * 400


# ----- shutdown


def test_shutdown_finishes_what_is_queued(offload):
    hipsim.configure(copy_latency_us=20_000)
    tickets = [offload.store([i], [i]) for i in range(10)]
    offload.backend.shutdown()
    for ticket in tickets:
        assert ticket.query()
        assert ticket.error is None
    assert torch.equal(offload.cpu[:10], offload.gpu[:10])


def test_shutdown_cancels_what_it_cannot_finish(
    offload, blocked, monkeypatch, vllm_log
):
    monkeypatch.setattr(copy_backend, "_SHUTDOWN_SECONDS", 0.2)
    running, queued = offload.store([1], [2]), offload.load([3], [4])
    assert blocked.entered.wait(PATIENCE)
    start = time.monotonic()
    offload.backend.shutdown()
    assert time.monotonic() - start < 2
    for ticket in (running, queued):
        assert ticket.query() is True
        with pytest.raises(RuntimeError, match="was cancelled by a shutdown"):
            ticket.synchronize()
    logged = "\n".join(r.getMessage() for r in vllm_log.records)
    assert "KV store of blocks 1 to 2 was cancelled" in logged
    assert "KV load of blocks 3 to 4 was cancelled" in logged


def test_shutdown_cancels_what_the_thread_takes_meanwhile(
    offload, blocked, monkeypatch
):
    """The thread comes back and takes a copy while the queue is being emptied."""
    monkeypatch.setattr(copy_backend, "_SHUTDOWN_SECONDS", 0.2)
    running, queued = offload.store([1], [2]), offload.load([3], [4])
    assert blocked.entered.wait(PATIENCE)
    backend = offload.backend

    class Racing:
        """Its first reader loses what is queued to the thread."""

        def __init__(self, inner):
            self.inner = inner

        def get_nowait(self):
            if not blocked.release.is_set():
                blocked.release.set()
                until(queued.query)
            return self.inner.get_nowait()

        def __getattr__(self, name):
            return getattr(self.inner, name)

    backend._queue = Racing(backend._queue)
    backend.shutdown()
    assert running.query() is True
    assert queued.query() is True
    assert "was cancelled by a shutdown" in str(queued.error)


def test_the_time_for_a_shutdown_is_five_seconds(device):
    assert copy_backend._SHUTDOWN_SECONDS == 5.0


def test_shutdown_twice_is_once(offload):
    offload.store([0], [0])
    offload.backend.shutdown()
    offload.backend.shutdown()
    assert offload.backend._queue.empty()


def test_a_copy_after_the_shutdown_fails_at_once(offload):
    offload.backend.shutdown()
    late = offload.store([0], [1])
    assert late.query() is True
    with pytest.raises(RuntimeError, match="KV store of blocks 0 to 1 came after"):
        late.synchronize()


def test_shutdown_before_init_does_nothing(device):
    DmaCopyBackend().shutdown()


# ----- what the worker makes of it


def _worker(offload: Offload) -> SimpleCPUOffloadWorker:
    worker = SimpleCPUOffloadWorker(None, None, 0)
    worker._backend = offload.backend
    worker._store_events = offload.events
    return worker


def test_the_workers_poll_moves_past_copies_that_worked(offload):
    worker = _worker(offload)
    offload.store([0], [0])
    offload.store([1], [1])
    until(lambda: worker._poll_stream_events(is_store=True) == 1)
    assert offload.events == []


def test_a_failed_copy_is_not_served(offload):
    """Until the worker reports it, a failed copy ends loudly."""
    worker = _worker(offload)
    hipsim.fail("hipMemcpyBatchAsync", 1, ILLEGAL_ADDRESS)
    offload.store([0], [0])
    with pytest.raises(BatchCopyError, match=r"hipErrorIllegalAddress \(700\)"):
        until(lambda: worker._poll_stream_events(is_store=True) >= 0)
    assert worker._store_hwm == -1


def test_a_flush_waits_for_copies_that_the_thread_has_not_reached(offload, blocked):
    worker = _worker(offload)
    for block in range(4):
        offload.store([block], [block])
    assert blocked.entered.wait(PATIENCE)
    threading.Timer(0.2, blocked.release.set).start()
    worker._flush_and_sync_all()
    assert torch.equal(offload.cpu[:4], offload.gpu[:4])


def test_the_worker_hands_its_configuration_to_the_backend(device, monkeypatch):
    monkeypatch.setattr("vllm.v1.simple_kv_offload.worker.PIN_MEMORY", False)
    transfer = SimpleNamespace(kv_connector_extra_config={"copy_engine": "blit"})
    config = SimpleNamespace(kv_transfer_config=transfer)
    worker = SimpleCPUOffloadWorker(config, None, 0)
    with pytest.raises(ValueError, match="copy_engine is 'blit'"):
        worker._init_cpu_mode({}, 0, CPU)


def test_the_start_is_logged_in_one_line(device, vllm_log):
    offload = Offload(device)
    offload.start()
    offload.backend.shutdown()
    (line,) = [
        r.getMessage() for r in vllm_log.records if "KV copy engine" in r.getMessage()
    ]
    for part in (
        "batch",
        "auto",
        "default",
        "flags 0x100",
        "numAttrs 1",
        "8192",
        "HIP 7.16.26361",
    ):
        assert part in line
