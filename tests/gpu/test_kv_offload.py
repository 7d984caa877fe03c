# SPDX-License-Identifier: Apache-2.0
"""KV offload on a real GPU, HIP or CUDA: order, failures, drain and shutdown."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
from vllm.v1.simple_kv_offload import cuda_mem_ops
from vllm.v1.simple_kv_offload.copy_backend import DmaCopyBackend
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata
from vllm.v1.simple_kv_offload.transfer_results import RequestLoadsMetadata
from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

BLOCKS, PAGE, LAYERS = 64, 16 * 1024, 8
BLOCK_BYTES = LAYERS * PAGE
ROUNDS = 150
# Long enough that a store which does not wait reads the block before it is written.
LATE_CYCLES = 20_000_000
PATIENCE = 30.0


class Rank:
    def __init__(self) -> None:
        memory = torch.zeros(LAYERS * BLOCKS * PAGE, dtype=torch.uint8, device="cuda")
        names = [f"layer.{i}" for i in range(LAYERS)]
        placement = KVCacheTensor(
            size=memory.nbytes,
            layers=names,
            layer_stride=BLOCKS * PAGE,
            block_stride=PAGE,
        )
        config = KVCacheConfig(
            num_blocks=BLOCKS, kv_cache_tensors=[placement], kv_cache_groups=[]
        )
        self.gpu = memory.view(LAYERS, BLOCKS, PAGE)
        self.worker = SimpleCPUOffloadWorker(None, config, BLOCKS * BLOCK_BYTES)
        self.worker.register_kv_caches(dict(zip(names, self.gpu, strict=True)))

    def cpu(self, blocks: list[int]) -> torch.Tensor:
        """[layers, blocks, page]"""
        assert self.worker.cpu_kv_caches is not None
        pages = [cache[blocks] for cache in self.worker.cpu_kv_caches.values()]
        return torch.stack(pages).view(torch.uint8)

    def step(self, metadata: SimpleCPUOffloadMetadata) -> None:
        self.worker.handle_preemptions(metadata)
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv()
        self.worker.wait_for_save()
        self.worker.clear_connector_metadata()

    def store(self, gpu: list[int], cpu: list[int], event: int = 0) -> None:
        self.step(
            SimpleCPUOffloadMetadata(
                store_event=event, store_gpu_blocks=gpu, store_cpu_blocks=cpu
            )
        )

    def load(self, **blocks: tuple[list[int], list[int]]) -> None:
        """Load (CPU blocks, GPU blocks) of each request."""
        self.step(
            RequestLoadsMetadata(
                load_event=0,
                load_cpu_blocks=[b for cpu, _ in blocks.values() for b in cpu],
                load_gpu_blocks=[b for _, gpu in blocks.values() for b in gpu],
                load_event_to_reqs={0: list(blocks)},
                load_block_counts={name: len(gpu) for name, (_, gpu) in blocks.items()},
            )
        )

    def finished_loads(self, count: int) -> set[str]:
        finished: set[str] = set()
        deadline = time.monotonic() + PATIENCE
        while len(finished) < count:
            assert time.monotonic() < deadline, f"only {finished} finished"
            finished |= self.worker.get_finished(set())[1] or set()
        return finished

    def ended_stores(self, count: int) -> tuple[set[int], set[int]]:
        ended: set[int] = set()
        failed: set[int] = set()
        deadline = time.monotonic() + PATIENCE
        while len(ended) < count:
            assert time.monotonic() < deadline, f"only {ended} ended"
            self.worker.get_finished(set())
            if results := self.worker.build_connector_worker_meta():
                ended |= set(results.completed_store_events)
                failed |= results.failed_store_events
        return ended, failed


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.worker.shutdown()
    torch.cuda.synchronize()


def refuse(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """Spoil the nth call of the batch copy, so that the runtime refuses it."""
    function, num_attrs = cuda_mem_ops._batch_memcpy
    calls = 0

    def spoiled(dst, src, size, count, *rest):
        nonlocal calls
        calls += 1
        if calls == nth:
            dst = src = 0
        return function(dst, src, size, count, *rest)

    monkeypatch.setattr(cuda_mem_ops, "_batch_memcpy", (spoiled, num_attrs))


def corrupt_rounds(rank: Rank, rounds: int) -> int:
    compute = torch.cuda.Stream()
    corrupt = 0
    for i in range(rounds):
        block, value = i % BLOCKS, i % 200 + 1
        with torch.cuda.stream(compute):
            torch.cuda._sleep(LATE_CYCLES)
            rank.gpu[:, block] = value
            rank.store([block], [block], i)
        assert rank.ended_stores(1) == ({i}, set())
        corrupt += bool((rank.cpu([block]) != value).any())
        compute.synchronize()
    return corrupt


def test_a_store_comes_after_the_compute_that_writes_its_blocks(rank):
    assert corrupt_rounds(rank, ROUNDS) == 0


def test_without_the_event_a_store_comes_too_early(rank, monkeypatch):
    """The control for the test above."""
    launch = DmaCopyBackend.launch_copy

    def without_event(*args, wait_event=None, **kwargs):
        assert wait_event is not None
        launch(*args, **kwargs)

    monkeypatch.setattr(DmaCopyBackend, "launch_copy", without_event)
    assert corrupt_rounds(rank, 5) > 0


def test_a_finished_load_is_there_for_the_next_kernel(rank):
    rank.gpu.copy_(torch.randint(0, 256, rank.gpu.shape, dtype=torch.uint8))
    expected = rank.gpu.clone()
    everything = list(range(BLOCKS))
    rank.store(everything, everything)
    assert rank.ended_stores(1) == ({0}, set())
    for i in range(ROUNDS):
        rank.gpu.zero_()
        torch.cuda.synchronize()
        shift = i % BLOCKS
        moved = everything[shift:] + everything[:shift]
        half = BLOCKS // 2
        rank.load(
            a=(everything[:half], moved[:half]), b=(everything[half:], moved[half:])
        )
        assert rank.finished_loads(2) == {"a", "b"}
        assert torch.equal(rank.gpu[:, moved], expected)


def test_a_refused_copy_costs_its_own_request(rank, monkeypatch):
    rank.gpu[:, 0], rank.gpu[:, 1] = 7, 8
    rank.store([0, 1], [0, 1])
    rank.ended_stores(1)
    with monkeypatch.context() as patch:
        refuse(patch, nth=2)
        rank.load(a=([0], [2]), b=([1], [3]), c=([0], [4]))
        assert rank.finished_loads(3) == {"a", "b", "c"}
        assert rank.worker.take_failed_loads() == {"b"}
        refuse(patch, nth=1)
        rank.store([0], [5], 1)
        assert rank.ended_stores(1) == ({1}, {1})
    # The device is as well as before: torch sees no error of ours.
    assert int(torch.ones(8, device="cuda").sum()) == 8
    torch.cuda.synchronize()
    assert (rank.gpu[:, [2, 4]] == 7).all() and not rank.gpu[:, 3].any()
    rank.store([1], [5], 2)
    assert rank.ended_stores(1) == ({2}, set())
    assert (rank.cpu([5]) == 8).all()


def test_preemption_and_sleep_wait_for_stores_that_wait_for_compute(rank):
    compute = torch.cuda.Stream()
    for i, wait in enumerate(("preemption", "sleep") * 10):
        with torch.cuda.stream(compute):
            torch.cuda._sleep(LATE_CYCLES)
            rank.gpu[:, :8] = i + 1
            rank.store(list(range(8)), list(range(8)), i)
        if wait == "preemption":
            flush = SimpleCPUOffloadMetadata(need_flush=True)
            rank.worker.handle_preemptions(flush)
        else:
            rank.worker.drain()
        rank.gpu[:, :8] = 255
        assert rank.ended_stores(1) == ({i}, set())
        assert (rank.cpu(list(range(8))) == i + 1).all()


def test_shutdown_unregisters_the_host_memory():
    """Registered twice, an address would be refused."""
    for _ in range(3):
        rank = Rank()
        rank.store([1], [2])
        rank.worker.shutdown()
        assert rank.ended_stores(1) == ({0}, set())
        caches = rank.worker.cpu_kv_caches
        assert caches is not None
        for cache in caches.values():
            cuda_mem_ops.pin_tensor(cache)
            cuda_mem_ops.unpin_tensor(cache)
