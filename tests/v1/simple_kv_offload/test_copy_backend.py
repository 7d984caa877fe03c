# SPDX-License-Identifier: Apache-2.0
"""Copies to the CPU tier and back, on the simulator's asynchronous streams."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.simple_kv_offload import copy_backend, copy_thread
from vllm.v1.simple_kv_offload.copy_backend import DmaCopyBackend
from vllm.v1.simple_kv_offload.copy_engine import CopyEngine
from vllm.v1.simple_kv_offload.copy_errors import BatchCopyError
from vllm.v1.simple_kv_offload.copy_thread import CopyTicket
from vllm.v1.simple_kv_offload.cuda_mem_ops import (
    CU_MEMCPY_SRC_ACCESS_ORDER_ANY,
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
)

from vllm_rocm_memory.sim import hipsim, torch_device

from .tickets import PATIENCE, let_go, logged_error, until

BLOCKS, PAGE = 16, 256
CPU = torch.device("cpu")
ILLEGAL_ADDRESS = 700


@pytest.fixture
def profile(request: pytest.FixtureRequest) -> str:
    """One release: what differs between them is below the backend."""
    return getattr(request, "param", "7.16")


class Offload:
    """A backend between one region of the device and one of the host."""

    def __init__(self, device) -> None:
        self.gpu = device.device_tensor(BLOCKS * PAGE).view(BLOCKS, PAGE)
        self.cpu = device.host_tensor(BLOCKS * PAGE).view(BLOCKS, PAGE)
        self.gpu.copy_(torch.arange(1, BLOCKS + 1, dtype=torch.uint8)[:, None])
        self.load_stream, self.store_stream = (torch_device.Stream() for _ in "ab")
        self.backend = DmaCopyBackend()
        self.events: list[tuple[int, CopyTicket]] = []

    def start(self, cpu_blocks: int = BLOCKS) -> Offload:
        self.backend.init(
            {"kv": self.gpu},
            {"kv": self.cpu[:cpu_blocks]},
            CPU,
            self.load_stream,
            self.store_stream,
        )
        return self

    def close(self) -> None:
        self.backend.shutdown()
        thread = self.backend._thread
        assert thread is not None
        assert thread.join(time.monotonic() + PATIENCE)
        for _, ticket in self.events:
            let_go(ticket)
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


def test_blocks_go_to_the_host_and_come_back(offload):
    stored = offload.store([1, 2, 5], [9, 10, 0])
    stored.synchronize()
    assert torch.equal(offload.cpu[[9, 10, 0]], offload.gpu[[1, 2, 5]])
    loaded = offload.load([9, 0], [3, 4])
    until(loaded.query)
    assert torch.equal(offload.gpu[[3, 4]], offload.cpu[[9, 0]])
    assert stored.query()
    assert stored.error is loaded.error is None


def test_stores_read_in_stream_order_and_loads_at_any_time(offload):
    store, load = offload.backend._store, offload.backend._load
    assert store.params.attrs.srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    assert load.params.attrs.srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_ANY
    assert store.params.stream_handle == store.stream.cuda_stream
    assert load.params.stream_handle == load.stream.cuda_stream
    assert store.stream is offload.store_stream
    assert load.stream is offload.load_stream


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


def test_the_backend_names_its_engine_for_the_metrics():
    assert DmaCopyBackend().copy_engine == "batch"


def test_both_directions_have_the_engine_that_the_log_names(device, monkeypatch):
    asked = []
    build_params = copy_backend.build_params

    def noted(*args, engine, **kwargs):
        asked.append(engine)
        return build_params(*args, engine=engine, **kwargs)

    monkeypatch.setattr(copy_backend, "build_params", noted)
    offload = Offload(device).start()
    assert asked == [CopyEngine.AUTO, CopyEngine.BATCH]
    assert offload.backend.copy_engine == "batch"
    offload.close()


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

    logged = logged_error(vllm_log).getMessage()
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
    where = "copy 0 of 1, region 'kv', blocks 3-4 to 6-7"
    assert where in logged_error(vllm_log).getMessage()


def test_an_error_that_shows_up_later_names_the_blocks(offload, vllm_log):
    ticket = offload.store([0, 1], [4, 5])
    until(ticket._settled.is_set)
    hipsim.fail("hipEventQuery", 1, ILLEGAL_ADDRESS)
    until(ticket.query)
    assert f"KV store of blocks 0-1 to 4-5 failed: {ticket.error}" in vllm_log.text


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
    offload.close()


CPU_BLOCKS = 12


@pytest.mark.parametrize(
    ("is_store", "src", "dst", "words"),
    [
        (True, [BLOCKS], [0], "block 16 is outside the source cache.* 16 blocks"),
        (True, [0, -1], [0, 1], "block -1 is outside the source cache"),
        (True, [3], [CPU_BLOCKS], "block 12 is outside the destination cache.* 12"),
        (False, [CPU_BLOCKS], [0], "block 12 is outside the source cache.* 12 blocks"),
        (False, [0, 1], [2, BLOCKS], "block 16 is outside the destination cache"),
    ],
)
def test_a_block_outside_its_cache_is_an_error_of_its_copy(
    device, is_store, src, dst, words
):
    offload = Offload(device).start(CPU_BLOCKS)
    before = offload.gpu.clone()
    ticket = (offload.store if is_store else offload.load)(src, dst)
    with pytest.raises(IndexError, match=words):
        ticket.synchronize()
    assert not offload.cpu.any()
    assert torch.equal(offload.gpu, before)
    offload.store([BLOCKS - 1], [CPU_BLOCKS - 1]).synchronize()
    offload.load([CPU_BLOCKS - 1], [0]).synchronize()
    assert torch.equal(offload.gpu[0], offload.gpu[BLOCKS - 1])
    offload.close()


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
    assert offload.backend.shutdown()


def test_a_device_that_cannot_be_set_is_an_error_of_init(device, monkeypatch):
    def set_device(device: torch.device) -> None:
        raise RuntimeError("invalid device ordinal")

    platform = SimpleNamespace(set_device=set_device)
    monkeypatch.setattr(copy_thread, "current_platform", platform)
    offload = Offload(device)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        offload.start()
    assert offload.backend.shutdown()


# ----- shutdown


def test_shutdown_finishes_what_is_queued(offload):
    hipsim.configure(copy_latency_us=20_000)
    tickets = [offload.store([i], [i]) for i in range(10)]
    assert offload.backend.shutdown()
    for ticket in tickets:
        assert ticket.query()
        assert ticket.error is None
    assert torch.equal(offload.cpu[:10], offload.gpu[:10])


def test_shutdown_cancels_what_it_cannot_finish(
    offload, blocked, monkeypatch, vllm_log
):
    monkeypatch.setattr(copy_backend, "SHUTDOWN_SECONDS", 0.2)
    running, queued = offload.store([1], [2]), offload.load([3], [4])
    assert blocked.entered.wait(PATIENCE)
    start = time.monotonic()
    assert not offload.backend.shutdown()
    assert time.monotonic() - start < 2
    for ticket in (running, queued):
        assert ticket.query() is True
        with pytest.raises(RuntimeError, match="was cancelled by a shutdown"):
            ticket.synchronize()
    logged = "\n".join(r.getMessage() for r in vllm_log.records)
    assert "KV store of blocks 1 to 2 was cancelled" in logged
    assert "KV load of blocks 3 to 4 was cancelled" in logged
    blocked.release.set()
    until(offload.backend.shutdown)


def test_shutdown_twice_is_once(offload):
    offload.store([0], [0])
    assert offload.backend.shutdown()
    assert offload.backend.shutdown()


def test_a_copy_after_the_shutdown_fails_at_once(offload, vllm_log):
    offload.backend.shutdown()
    late = offload.store([0], [1])
    assert late.query() is True
    with pytest.raises(RuntimeError, match="came after the shutdown"):
        late.synchronize()
    assert f"KV store of blocks 0 to 1 failed: {late.error}" in vllm_log.text


def test_shutdown_before_init_does_nothing():
    assert DmaCopyBackend().shutdown()


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
