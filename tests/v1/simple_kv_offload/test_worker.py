# SPDX-License-Identifier: Apache-2.0
"""The worker's transfers on the simulator: order, failures, drain, shutdown."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
from vllm.v1.simple_kv_offload import copy_backend, copy_thread, host_cache
from vllm.v1.simple_kv_offload import worker as worker_module
from vllm.v1.simple_kv_offload.copy_backend import DmaCopyBackend
from vllm.v1.simple_kv_offload.copy_metrics import (
    COPIED_BYTES,
    COPIES,
    COPY_FAILURES,
)
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata
from vllm.v1.simple_kv_offload.transfer_results import RequestLoadsMetadata
from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

from vllm_rocm_memory.sim import hipsim, torch_device

from .tickets import PATIENCE

GPU_BLOCKS, CPU_BLOCKS, PAGE, LAYERS = 12, 16, 256, 2
BLOCK_BYTES = LAYERS * PAGE
ILLEGAL_ADDRESS, OUT_OF_MEMORY = 700, 2


@pytest.fixture
def profile(request: pytest.FixtureRequest) -> str:
    """One release: what differs between them is below the worker."""
    return getattr(request, "param", "7.16")


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> str:
    """Which copies; rectangles are what "auto" makes of these caches."""
    return getattr(request, "param", "rect")


both_engines = pytest.mark.parametrize("engine", ["rect", "batch"], indirect=True)
COPY_CALLS = {"rect": "hipMemcpy2DAsync", "batch": "hipMemcpyBatchAsync"}


class Rank:
    """A worker over KV caches in simulated device memory, driven step by step."""

    def __init__(self, device, engine: str = "auto", **options) -> None:
        self.engine = engine
        self.memory = device.device_tensor(LAYERS * GPU_BLOCKS * PAGE)
        config = KVCacheConfig(
            num_blocks=GPU_BLOCKS,
            kv_cache_tensors=[
                KVCacheTensor(
                    size=self.memory.nbytes,
                    layers=["layer.0", "layer.1"],
                    layer_stride=GPU_BLOCKS * PAGE,
                    block_stride=PAGE,
                )
            ],
            kv_cache_groups=[],
        )
        self.gpu = self.memory.view(LAYERS, GPU_BLOCKS, PAGE)
        options = {"cpu_capacity_bytes": CPU_BLOCKS * BLOCK_BYTES, **options}
        extra = {"copy_engine": engine}
        transfer = SimpleNamespace(kv_connector_extra_config=extra)
        vllm_config = SimpleNamespace(kv_transfer_config=transfer)
        self.worker = SimpleCPUOffloadWorker(vllm_config, config, **options)
        self._loaded: set[str] = set()
        self._stored: dict[int, bool] = {}

    def register(self) -> Rank:
        caches = {f"layer.{i}": layer for i, layer in enumerate(self.gpu)}
        self.worker.register_kv_caches(caches)
        return self

    @property
    def cpu(self) -> torch.Tensor:
        """The pool, as [layers, blocks, page]."""
        assert self.worker.cpu_kv_caches is not None
        return torch.stack(list(self.worker.cpu_kv_caches.values())).view(torch.uint8)

    def fail_next_copy(self, error: int = ILLEGAL_ADDRESS, nth: int = 1) -> None:
        hipsim.fail(COPY_CALLS[self.engine], nth, error)

    def cpu_layer(self, layer: int) -> torch.Tensor:
        assert self.worker.cpu_kv_caches is not None
        return self.worker.cpu_kv_caches[f"layer.{layer}"].view(torch.uint8)

    def step(self, metadata: SimpleCPUOffloadMetadata) -> None:
        """What the model runner does around one forward."""
        self.worker.handle_preemptions(metadata)
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv()
        self.worker.wait_for_save()
        self.worker.clear_connector_metadata()

    def load(self, event: int = 0, **blocks: tuple[list[int], list[int]]) -> None:
        """Load (CPU blocks, GPU blocks) of each request."""
        self.step(
            RequestLoadsMetadata(
                load_event=event,
                load_cpu_blocks=[b for cpu, _ in blocks.values() for b in cpu],
                load_gpu_blocks=[b for _, gpu in blocks.values() for b in gpu],
                load_event_to_reqs={event: list(blocks)},
                load_block_counts={name: len(gpu) for name, (_, gpu) in blocks.items()},
            )
        )

    def store(self, gpu: list[int], cpu: list[int], event: int = 0) -> None:
        self.step(
            SimpleCPUOffloadMetadata(
                store_event=event, store_gpu_blocks=gpu, store_cpu_blocks=cpu
            )
        )

    def finished_loads(self, count: int) -> set[str]:
        """The next ``count`` requests whose loads have ended."""
        self._poll_until(lambda: len(self._loaded) >= count)
        loaded, self._loaded = self._loaded, set()
        return loaded

    def ended_stores(self, count: int) -> tuple[set[int], set[int]]:
        """The next ``count`` events that have ended, and which of them failed."""
        self._poll_until(lambda: len(self._stored) >= count)
        ended, self._stored = self._stored, {}
        return set(ended), {event for event, failed in ended.items() if failed}

    def _poll_until(self, enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not enough():
            assert time.monotonic() < deadline, (self._loaded, self._stored)
            self.poll()
            time.sleep(0.001)

    def poll(self) -> None:
        """What the model runner does at the end of a step."""
        _, loaded = self.worker.get_finished(set())
        self._loaded |= loaded or set()
        results = self.worker.build_connector_worker_meta()
        if results is not None:
            assert set(results.completed_store_events.values()) == {1}
            for event in results.completed_store_events:
                self._stored[event] = event in results.failed_store_events

    def counted(self) -> dict[tuple[str, str], int]:
        """What was counted since the last call, by metric and direction."""
        stats = self.worker.take_stats()
        if stats is None:
            return {}
        return {
            (name, direction): value
            for name, labelled in stats.data["data"].items()
            for (direction, engine), value in labelled.items()
            if engine == self.engine
        }


@pytest.fixture
def rank(device, engine, monkeypatch) -> Iterator[Rank]:
    monkeypatch.setattr(worker_module, "PIN_MEMORY", True)
    rank = Rank(device, engine).register()
    values = torch.arange(1, LAYERS * GPU_BLOCKS + 1, dtype=torch.uint8)
    rank.gpu.copy_(values.view(LAYERS, GPU_BLOCKS, 1))
    yield rank
    rank.worker.shutdown()
    vars(rank).clear()  # streams and events go with the last reference


# ----- what works


@both_engines
def test_blocks_go_to_the_pool_and_come_back(rank):
    rank.store([3, 4, 9], [0, 1, 7])
    assert rank.ended_stores(1) == ({0}, set())
    assert torch.equal(rank.cpu[:, [0, 1, 7]], rank.gpu[:, [3, 4, 9]])
    rank.load(a=([7, 0], [5, 6]))
    assert rank.finished_loads(1) == {"a"}
    assert rank.worker.take_failed_loads() == set()
    assert torch.equal(rank.gpu[:, [5, 6]], rank.gpu[:, [9, 3]])


def test_nothing_to_do_reports_nothing(rank):
    rank.step(SimpleCPUOffloadMetadata())
    assert rank.worker.get_finished(set()) == (None, None)
    assert rank.worker.build_connector_worker_meta() is None


def test_a_load_is_reported_once_and_not_before_it_has_ended(rank):
    hipsim.configure(copy_latency_us=200_000)
    rank.load(a=([0], [1]))
    assert rank.worker.get_finished(set()) == (None, None)
    assert rank.finished_loads(1) == {"a"}
    assert rank.worker.get_finished(set()) == (None, None)


def test_a_request_that_loads_no_blocks_is_not_waited_for(rank):
    """Upstream launches nothing for it, and no event ever reports it."""
    rank.load(a=([], []))
    assert rank.finished_loads(1) == {"a"}
    rank.load(b=([], []), c=([3], [4]))
    assert rank.finished_loads(2) == {"b", "c"}
    assert rank.counted()[COPIES, "load"] == 1


def test_a_slow_request_does_not_hold_up_another(rank, blocked):
    rank.load(a=([0], [1]), b=([2], [3]))
    assert blocked.entered.wait(PATIENCE)
    rank.load(event=1, c=([], []))
    assert rank.finished_loads(1) == {"c"}
    blocked.release.set()
    assert rank.finished_loads(2) == {"a", "b"}


@both_engines
def test_loads_without_counts_share_one_copy(rank):
    """Metadata of a scheduler that does not say whose blocks are whose."""
    rank.fail_next_copy()
    rank.step(
        SimpleCPUOffloadMetadata(
            load_event=0,
            load_cpu_blocks=[0, 1],
            load_gpu_blocks=[2, 3],
            load_event_to_reqs={0: ["a", "b"]},
        )
    )
    assert rank.finished_loads(2) == {"a", "b"}
    assert rank.worker.take_failed_loads() == {"a", "b"}


# ----- failures


@both_engines
def test_a_failed_load_costs_its_own_request(rank):
    rank.store([1, 2], [1, 2])
    rank.ended_stores(1)
    before = rank.gpu.clone()
    rank.fail_next_copy(nth=2)
    rank.load(a=([1], [4]), b=([2], [5]), c=([1], [6]))
    assert rank.finished_loads(3) == {"a", "b", "c"}
    assert rank.worker.take_failed_loads() == {"b"}
    assert rank.worker.take_failed_loads() == set(), "reported once"
    assert torch.equal(rank.gpu[:, [4, 6]], before[:, [1, 1]])
    assert torch.equal(rank.gpu[:, 5], before[:, 5])


def test_a_failed_load_stays_known_until_somebody_asks(rank):
    """Whoever looks at finished loads alone must not lose the failure."""
    rank.fail_next_copy()
    rank.load(a=([1], [4]))
    rank.finished_loads(1)
    rank.load(b=([1], [4]))
    rank.finished_loads(1)
    assert rank.worker.take_failed_loads() == {"a"}


@both_engines
def test_a_failed_store_is_told_from_one_that_worked(rank):
    rank.fail_next_copy(nth=2)
    for event in range(3):
        rank.store([event], [event], event)
    assert rank.ended_stores(3) == ({0, 1, 2}, {1})
    assert torch.equal(rank.cpu[:, [0, 2]], rank.gpu[:, [0, 2]])
    assert not rank.cpu[:, 1].any()


@both_engines
@pytest.mark.parametrize("profile", ["7.2.3", "7.16"], indirect=True)
def test_the_log_names_error_blocks_region_and_request(rank, vllm_log, profile):
    rank.fail_next_copy()
    rank.load(**{"cmpl-7": ([3, 4], [6, 7])})
    rank.finished_loads(1)
    rank.fail_next_copy(OUT_OF_MEMORY)
    rank.store([1], [2], 5)
    rank.ended_stores(1)
    lines = [r.getMessage() for r in vllm_log.records if r.levelno >= 30]
    load, request, store, blocks = lines
    for part in (
        "KV load of blocks 3-4 to 6-7 failed",
        "hipErrorIllegalAddress (700)",
        "'layer.0'",
    ):
        assert part in load
    assert "Request cmpl-7 lost its KV load" in request
    assert "hipErrorOutOfMemory (2)" in store
    assert "1 KV blocks are not offloaded" in blocks
    if rank.engine == "rect":
        assert "regions 'layer.0', 'layer.1', block 3 to 6" in load
    elif profile == "7.16":
        assert "regions 'layer.0', 'layer.1' (the runtime did not say which)" in load


@pytest.mark.parametrize("nth", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("engine", "call"),
    [
        ("rect", "hipMemcpy2DAsync"),
        ("batch", "hipMemcpyBatchAsync"),
        ("rect", "hipEventCreateWithFlags"),
        ("rect", "hipEventRecord"),
        ("rect", "hipEventQuery"),
        ("rect", "hipStreamWaitEvent"),
    ],
    indirect=["engine"],
)
def test_a_fault_in_any_call_ends_in_one_report(rank, call, nth):
    """Wherever it hits, the step goes on, every transfer ends, and one has failed."""
    hipsim.fail(call, nth, ILLEGAL_ADDRESS)
    for event in range(3):
        rank.store([event], [event], event)
    rank.load(a=([3], [7]), b=([4], [8]))
    stored, failed_stores = rank.ended_stores(3)
    assert stored == {0, 1, 2}
    assert rank.finished_loads(2) == {"a", "b"}
    failed = len(failed_stores) + len(rank.worker.take_failed_loads())
    # Each store waits for its event; loads wait for none.
    assert failed == (0 if call == "hipStreamWaitEvent" and nth > 3 else 1)
    for event in stored - failed_stores:
        assert torch.equal(rank.cpu[:, event], rank.gpu[:, event])
    hipsim.reset()
    rank.store([5], [5], 9)
    assert rank.ended_stores(1) == ({9}, set())


def test_a_launch_that_raises_is_a_failed_transfer(rank, monkeypatch, vllm_log):
    def launch_copy(*args, **kwargs):
        raise RuntimeError("no room")

    monkeypatch.setattr(DmaCopyBackend, "launch_copy", launch_copy)
    rank.store([1], [2], 0)
    rank.load(a=([3], [4]))
    assert rank.ended_stores(1) == ({0}, {0})
    assert rank.finished_loads(1) == rank.worker.take_failed_loads() == {"a"}
    assert "KV store of blocks 1 to 2 failed: no room" in vllm_log.text
    assert "KV load of blocks 3 to 4 failed: no room" in vllm_log.text


def test_hundreds_of_failures_hold_nothing(rank):
    for i in range(200):
        rank.fail_next_copy()
        if i % 2:
            rank.load(event=i, a=([i % CPU_BLOCKS], [i % GPU_BLOCKS]))
            assert rank.finished_loads(1) == rank.worker.take_failed_loads() == {"a"}
        else:
            rank.store([i % GPU_BLOCKS], [i % CPU_BLOCKS], i)
            assert rank.ended_stores(1) == ({i}, {i})
    assert not rank.worker._loads and not rank.worker._stores
    counted = rank.counted()
    assert counted[COPY_FAILURES, "load"] == counted[COPY_FAILURES, "store"] == 100
    rank.store([3], [3], 200)
    assert rank.ended_stores(1) == ({200}, set())


@both_engines
def test_a_block_outside_its_cache_is_an_error_and_no_write(rank):
    before = rank.gpu.clone()
    rank.store([GPU_BLOCKS], [0], 0)
    rank.store([0], [CPU_BLOCKS], 1)
    rank.load(a=([0], [GPU_BLOCKS]), b=([CPU_BLOCKS], [0]))
    assert rank.ended_stores(2) == ({0, 1}, {0, 1})
    assert rank.finished_loads(2) == rank.worker.take_failed_loads() == {"a", "b"}
    assert torch.equal(rank.gpu, before)
    assert not rank.cpu.any()


@both_engines
def test_a_failed_call_leaves_no_error_for_the_next_one(rank, monkeypatch):
    """The runtime remembers it for the thread; torch would blame its own next call."""
    hip, seen = hipsim.load(), []
    drain = copy_thread.drain
    monkeypatch.setattr(
        copy_thread,
        "drain",
        lambda stream: seen.append(hip.hipPeekAtLastError()) or drain(stream),
    )
    rank.fail_next_copy()
    rank.store([0], [0])
    rank.ended_stores(1)
    assert seen == [0]


# ----- order: compute, copies, preemption, sleep


def _rounds_corrupt(rank: Rank, rounds: int, late_us: int) -> int:
    """Write a block late on the compute stream, store it; count wrong copies."""
    hip, corrupt = hipsim.load(), 0
    compute = torch_device.Stream()
    for i in range(rounds):
        value = i % 200 + 1
        with torch.cuda.stream(compute):
            hipsim.configure(copy_latency_us=late_us)
            for layer in range(LAYERS):
                page = rank.gpu[layer, 4]
                args = (page.data_ptr(), value, PAGE, compute.cuda_stream)
                assert hip.hipMemsetAsync(*args) == 0
            hipsim.configure(copy_latency_us=0)
            rank.store([4], [i % CPU_BLOCKS], i)
        rank.ended_stores(1)
        corrupt += bool((rank.cpu[:, i % CPU_BLOCKS] != value).any())
        compute.synchronize()
    return corrupt


@both_engines
def test_a_store_comes_after_the_compute_that_writes_its_blocks(rank):
    assert _rounds_corrupt(rank, 150, late_us=1500) == 0


def test_without_the_event_a_store_comes_too_early(rank, monkeypatch):
    """The control for the test above."""
    launch = DmaCopyBackend.launch_copy

    def without_event(*args, wait_event=None, **kwargs):
        assert wait_event is not None
        launch(*args, **kwargs)

    monkeypatch.setattr(DmaCopyBackend, "launch_copy", without_event)
    assert _rounds_corrupt(rank, 3, late_us=100_000) > 0


def test_a_store_does_not_wait_for_the_compute_of_later_steps(rank, blocked):
    hip = hipsim.load()
    compute = torch_device.Stream()
    with torch.cuda.stream(compute):
        rank.store([1], [1], 0)
        assert blocked.entered.wait(PATIENCE)
        hipsim.configure(copy_latency_us=3_000_000)
        page = rank.gpu[0, 2]
        assert hip.hipMemsetAsync(page.data_ptr(), 9, PAGE, compute.cuda_stream) == 0
        hipsim.configure(copy_latency_us=0)
        rank.store([2], [2], 1)
        blocked.release.set()
        start = time.monotonic()
        assert rank.ended_stores(1) == ({0}, set())
        assert time.monotonic() - start < 2
    assert rank.ended_stores(1) == ({1}, set())
    assert (rank.cpu[0, 2] == 9).all()


def test_a_load_is_finished_only_when_compute_may_read_it(rank):
    """150 rounds: what a finished load brought is there at once."""
    for i in range(150):
        hipsim.configure(copy_latency_us=(i % 4) * 700)
        cpu, gpu, value = i % CPU_BLOCKS, i % GPU_BLOCKS, i % 200 + 1
        for layer in range(LAYERS):
            rank.cpu_layer(layer)[cpu] = value
        rank.load(event=i, a=([cpu], [gpu]))
        assert rank.finished_loads(1) == {"a"}
        assert (rank.gpu[:, gpu] == value).all()


def test_preemption_waits_for_stores_that_the_thread_has_not_reached(rank, blocked):
    """0 corrupt blocks: those of a preempted request are overwritten at once."""
    expected = rank.gpu.clone()
    for block in range(6):
        rank.store([block], [block], block)
    assert blocked.entered.wait(PATIENCE)
    threading.Timer(0.2, blocked.release.set).start()
    rank.worker.handle_preemptions(SimpleCPUOffloadMetadata(need_flush=True))
    rank.gpu.fill_(255)
    assert rank.ended_stores(6) == (set(range(6)), set())
    assert torch.equal(rank.cpu[:, :6], expected[:, :6])


def test_preemption_rounds_with_slow_stores(rank):
    corrupt = 0
    for i in range(60):
        hipsim.configure(copy_latency_us=(i % 5) * 1000)
        rank.gpu.fill_(i + 1)
        for block in range(4):
            rank.store([block], [block], 4 * i + block)
        rank.worker.handle_preemptions(SimpleCPUOffloadMetadata(need_flush=True))
        rank.gpu.fill_(255)
        rank.ended_stores(4)
        corrupt += int((rank.cpu[:, :4] != i + 1).any())
    assert corrupt == 0


def test_a_step_without_preemption_does_not_wait(rank, blocked):
    rank.store([0], [0])
    assert blocked.entered.wait(PATIENCE)
    start = time.monotonic()
    rank.worker.handle_preemptions(SimpleCPUOffloadMetadata(need_flush=False))
    assert time.monotonic() - start < 1
    blocked.release.set()
    rank.ended_stores(1)


def test_preemption_does_not_wait_for_the_disk(rank, blocked):
    """A queue of disk copies may take longer than vLLM lets a step take."""
    rank.worker.disk_mode = True
    rank.store([0], [0])
    assert blocked.entered.wait(PATIENCE)
    start = time.monotonic()
    rank.worker.handle_preemptions(SimpleCPUOffloadMetadata(need_flush=True))
    assert time.monotonic() - start < 1
    blocked.release.set()
    rank.ended_stores(1)


@both_engines
def test_a_flush_passes_over_copies_that_failed(rank):
    rank.fail_next_copy()
    rank.store([0], [0], 0)
    rank.load(a=([1], [1]))
    rank.worker.handle_preemptions(SimpleCPUOffloadMetadata(need_flush=True))
    assert rank.ended_stores(1) == ({0}, {0})
    assert rank.finished_loads(1) == {"a"}


@pytest.mark.parametrize("late", ["in the queue", "on the stream"])
def test_the_caches_are_unmapped_after_the_last_copy(rank, late, request):
    """Sleep drains, then unmaps: here the memory is overwritten instead."""
    expected = rank.gpu.clone()
    if late == "in the queue":
        gate = request.getfixturevalue("blocked")
        threading.Timer(0.3, gate.release.set).start()
    else:
        hipsim.configure(copy_latency_us=300_000)
    rank.store([1, 2], [3, 4], 0)
    rank.load(a=([9], [8]))
    start = time.monotonic()
    rank.worker.drain()
    assert time.monotonic() - start >= 0.25
    rank.gpu.fill_(255)
    torch_device.synchronize()
    assert torch.equal(rank.cpu[:, [3, 4]], expected[:, [1, 2]])
    assert (rank.gpu == 255).all()
    assert rank.ended_stores(1) == ({0}, set())
    assert rank.finished_loads(1) == {"a"}


# ----- counters


@both_engines
def test_copies_bytes_and_failures_are_counted_by_direction(rank):
    zeros = {
        (name, direction): 0
        for name in (COPIES, COPIED_BYTES, COPY_FAILURES)
        for direction in ("load", "store")
    }
    assert rank.counted() == zeros, "so that the first failure is an increase"
    assert rank.counted() == {}
    rank.store([0, 1, 2], [0, 1, 2], 0)
    rank.load(a=([5], [6]), b=([6, 7], [7, 8]))
    rank.ended_stores(1)
    rank.finished_loads(2)
    rank.fail_next_copy()
    rank.store([0, 1], [3, 4], 1)
    rank.ended_stores(1)
    assert rank.counted() == {
        (COPIES, "store"): 1,
        (COPIED_BYTES, "store"): 3 * BLOCK_BYTES,
        (COPY_FAILURES, "store"): 1,
        (COPIES, "load"): 2,
        (COPIED_BYTES, "load"): 3 * BLOCK_BYTES,
    }
    assert rank.counted() == {}


def test_a_worker_without_caches_counts_nothing(device):
    assert SimpleCPUOffloadWorker(None, None, 0).take_stats() is None


# ----- start and shutdown


def test_shutdown_finishes_the_copies_and_lets_go_of_the_host_memory(rank):
    hipsim.configure(copy_latency_us=20_000)
    for event in range(5):
        rank.store([event], [event], event)
    kept = [cache[:5] for cache in rank.worker.cpu_kv_caches.values()]
    assert hipsim.stats().registered_ranges == 1
    rank.worker.shutdown()
    assert rank.worker.cpu_kv_caches is None
    assert torch.equal(torch.stack(kept).view(torch.uint8), rank.gpu[:, :5])
    assert hipsim.stats().registered_ranges == 1, "somebody still has tensors of it"
    kept.clear()
    assert hipsim.stats().registered_ranges == 0
    rank.worker.shutdown()


def test_shutdown_cancels_in_time_and_keeps_memory_that_is_in_use(
    rank, blocked, monkeypatch, vllm_log
):
    monkeypatch.setattr(copy_backend, "SHUTDOWN_SECONDS", 0.2)
    rank.store([1], [2], 0)
    rank.load(a=([3], [4]))
    assert blocked.entered.wait(PATIENCE)
    start = time.monotonic()
    rank.worker.shutdown()
    assert time.monotonic() - start < 2
    logged = "\n".join(r.getMessage() for r in vllm_log.records)
    assert "KV store of blocks 1 to 2 was cancelled" in logged
    assert "KV load of blocks 3 to 4 was cancelled" in logged
    assert hipsim.stats().registered_ranges == 1
    assert rank.ended_stores(1) == ({0}, {0})
    assert rank.finished_loads(1) == rank.worker.take_failed_loads() == {"a"}


def test_memory_that_a_copy_uses_outlives_the_worker(
    rank, blocked, monkeypatch, vllm_log
):
    monkeypatch.setattr(copy_backend, "SHUTDOWN_SECONDS", 0.2)
    rank.store([1], [2], 0)
    assert blocked.entered.wait(PATIENCE)
    memory = [weakref.ref(cache) for cache in rank.worker.cpu_kv_caches.values()]
    rank.worker.shutdown()
    thread = rank.worker._backend._thread._thread
    rank.worker = SimpleNamespace(shutdown=lambda: None)
    gc.collect()
    assert all(cache() is not None for cache in memory)
    assert hipsim.stats().registered_ranges == 1
    blocked.release.set()
    thread.join(PATIENCE)
    gc.collect()
    assert all(cache() is None for cache in memory)
    assert hipsim.stats().registered_ranges == 0


def test_a_transfer_after_the_shutdown_fails_and_is_reported(rank):
    rank.worker.shutdown()
    rank.load(a=([0], [0]))
    assert rank.finished_loads(1) == rank.worker.take_failed_loads() == {"a"}


def test_host_memory_that_cannot_be_registered_is_given_back(device, monkeypatch):
    monkeypatch.setattr(worker_module, "PIN_MEMORY", True)
    rank = Rank(device)
    hipsim.fail("hipHostRegister", 1, OUT_OF_MEMORY)
    with pytest.raises(RuntimeError, match="cpu_bytes_to_use") as raised:
        rank.register()
    assert "hipErrorOutOfMemory (2)" in str(raised.value)
    assert "ulimit -l" in str(raised.value)
    assert hipsim.load().hipPeekAtLastError() == 0
    assert hipsim.stats().registered_ranges == 0
    assert rank.worker.cpu_kv_caches is None
    rank.worker.shutdown()


@pytest.mark.parametrize("failing", ["build_params", "CopyThread.start"])
def test_a_start_that_fails_leaves_nothing_registered(device, monkeypatch, failing):
    """While its error, whose traceback has every frame, is still there."""
    monkeypatch.setattr(worker_module, "PIN_MEMORY", True)
    registered = []

    def fail(*args, **kwargs):
        registered.append(hipsim.stats().registered_ranges)
        raise RuntimeError("not today")

    if failing == "build_params":
        monkeypatch.setattr(copy_backend, "build_params", fail)
    else:
        monkeypatch.setattr(copy_thread.CopyThread, "start", fail)
    rank = Rank(device)
    with pytest.raises(RuntimeError, match="not today") as raised:
        rank.register()
    assert registered == [1]
    assert hipsim.stats().registered_ranges == 0
    assert rank.worker.cpu_kv_caches is None
    assert raised.traceback


@pytest.mark.parametrize("engine", ["rect", "batch"])
def test_the_pool_is_laid_out_for_the_engine(device, engine):
    """Blocks one after another are rectangles; else adjacent blocks' pages join."""
    rank = Rank(device, engine).register()
    distance = BLOCK_BYTES if engine == "rect" else PAGE
    strides = {cache.stride(0) for cache in rank.worker.cpu_kv_caches.values()}
    assert strides == {distance}
    rank.store([2, 3, 4], [5, 6, 7], 0)
    assert rank.ended_stores(1) == ({0}, set())
    assert torch.equal(rank.cpu[:, 5:8], rank.gpu[:, 2:5])
    stats = hipsim.stats()
    made = (stats.pitched_copies, stats.batch_copies)
    assert made == ((3, 0) if engine == "rect" else (0, LAYERS))
    rank.worker.shutdown()


def test_a_second_registration_is_refused(rank):
    """The scheduler would go on to load blocks that a new pool does not have."""
    rank.store([3], [1], 0)
    with pytest.raises(RuntimeError, match="registered already, with a pool of"):
        rank.register()
    assert rank.ended_stores(1) == ({0}, set())
    assert torch.equal(rank.cpu[:, 1], rank.gpu[:, 3])


def test_the_worker_hands_its_configuration_to_the_backend(device, monkeypatch):
    monkeypatch.setattr(worker_module, "PIN_MEMORY", False)
    with pytest.raises(ValueError, match="copy_engine is 'blit'"):
        Rank(device, "blit").register()


def test_the_disk_backend_has_the_configuration_too(device, tmp_path):
    options = {"kv_offload_backend": "disk", "disk_path": str(tmp_path / "kv")}
    rank = Rank(device, "blit", disk_capacity_bytes=1 << 20, **options)
    with pytest.raises(ValueError, match="copy_engine is 'blit'"):
        rank.register()
    assert rank.worker.cpu_kv_caches is None


@both_engines
def test_a_block_is_one_copy_a_layer_or_one_in_all(rank):
    """One rectangle; or pages, which are adjacent on one side only."""
    before = hipsim.stats().calls
    rank.store([3, 4, 9], [0, 1, 7])
    rank.ended_stores(1)
    made = {
        call: hipsim.stats().calls.get(call, 0) - before.get(call, 0)
        for call in COPY_CALLS.values()
    }
    rectangles = rank.engine == "rect"
    assert made == {
        "hipMemcpy2DAsync": 3 if rectangles else 0,
        "hipMemcpyBatchAsync": 0 if rectangles else 1,
    }


@both_engines
def test_blocks_of_every_registered_piece_come_and_go(device, engine, monkeypatch):
    """A copy across the end of a registration is refused here."""
    monkeypatch.setattr(worker_module, "PIN_MEMORY", True)
    monkeypatch.setattr(host_cache, "MAX_REGISTRATION_BYTES", 4096)
    hipsim.configure(one_mapping_copies=True)
    rank = Rank(device, engine).register()
    assert hipsim.stats().registered_ranges == CPU_BLOCKS * BLOCK_BYTES // 4096 == 2
    rank.gpu.random_(1, 200)
    expected = rank.gpu.clone()
    blocks = list(range(GPU_BLOCKS))
    rank.store(blocks, [block + 2 for block in blocks])
    assert rank.ended_stores(1) == ({0}, set())
    rank.gpu.zero_()
    rank.load(a=([block + 2 for block in blocks], blocks))
    assert rank.finished_loads(1) == {"a"}
    assert rank.worker.take_failed_loads() == set()
    assert torch.equal(rank.gpu, expected)
    rank.worker.shutdown()
    assert hipsim.stats().registered_ranges == 0


def test_the_pool_is_block_after_block(rank):
    first, second = rank.worker.cpu_kv_caches.values()
    assert second.data_ptr() - first.data_ptr() == PAGE
    assert first.stride(0) == second.stride(0) == BLOCK_BYTES


def test_the_pool_has_as_many_blocks_as_fit(rank):
    assert rank.worker.num_cpu_blocks == CPU_BLOCKS
    assert rank.cpu.shape == (LAYERS, CPU_BLOCKS, PAGE)


def test_a_pool_smaller_than_a_block_has_one(device, monkeypatch):
    """As the scheduler counts."""
    monkeypatch.setattr(worker_module, "PIN_MEMORY", False)
    rank = Rank(device, cpu_capacity_bytes=1).register()
    assert rank.worker.num_cpu_blocks == 1
    rank.worker.shutdown()


@pytest.mark.parametrize("wanted", [0, -1, CPU_BLOCKS + 1, True])
def test_a_wrong_number_of_blocks_is_refused_before_memory_is_taken(device, wanted):
    rank = Rank(device, num_cpu_blocks=wanted)
    with pytest.raises(ValueError, match="num_cpu_blocks") as raised:
        rank.register()
    for part in (repr(wanted), f"capacity {CPU_BLOCKS}:", "Raise cpu_bytes_to_use"):
        assert part in str(raised.value)
    assert rank.worker.cpu_kv_caches is None


def test_an_explicit_number_of_blocks_is_used(device, monkeypatch):
    monkeypatch.setattr(worker_module, "PIN_MEMORY", False)
    rank = Rank(device, num_cpu_blocks=3).register()
    assert rank.cpu.shape == (LAYERS, 3, PAGE)
    rank.worker.shutdown()


def test_no_caches_are_no_offload(device, vllm_log):
    worker = SimpleCPUOffloadWorker(None, None, 1 << 20)
    worker.register_kv_caches({})
    assert worker.num_cpu_blocks == 0
    assert "No KV caches to offload" in vllm_log.text
    worker.drain()
    worker.shutdown()
