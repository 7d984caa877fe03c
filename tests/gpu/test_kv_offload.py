# SPDX-License-Identifier: Apache-2.0
"""KV offload on a real GPU, HIP or CUDA: order, failures, drain and shutdown."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
from vllm.v1.simple_kv_offload import cuda_mem_ops, host_cache
from vllm.v1.simple_kv_offload.copy_backend import DmaCopyBackend
from vllm.v1.simple_kv_offload.copy_engine import CopyEngine
from vllm.v1.simple_kv_offload.copy_plan import BlockCopies
from vllm.v1.simple_kv_offload.cuda_mem_ops import build_params, copy_blocks
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata
from vllm.v1.simple_kv_offload.transfer_results import RequestLoadsMetadata
from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

BLOCKS, PAGE, LAYERS = 64, 16 * 1024, 8
BLOCK_BYTES = LAYERS * PAGE
ROUNDS = 150
# Long enough that a store which does not wait reads the block before it is written.
LATE_CYCLES = 20_000_000
PATIENCE = 30.0


class Rank:
    def __init__(self, engine: str = "auto") -> None:
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
        extra = {"copy_engine": engine}
        transfer = SimpleNamespace(kv_connector_extra_config=extra)
        vllm_config = SimpleNamespace(kv_transfer_config=transfer)
        self.worker = SimpleCPUOffloadWorker(vllm_config, config, BLOCKS * BLOCK_BYTES)
        self.worker.register_kv_caches(dict(zip(names, self.gpu, strict=True)))
        self.engine = self.worker._backend.copy_engine

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


@pytest.fixture(params=["rect", "batch"])
def rank(request: pytest.FixtureRequest) -> Iterator[Rank]:
    rank = Rank(request.param)
    assert rank.engine == request.param
    yield rank
    rank.worker.shutdown()
    torch.cuda.synchronize()


def refuse(monkeypatch: pytest.MonkeyPatch, engine: str, nth: int) -> None:
    """Spoil the nth transfer, so that the runtime refuses one of its copies."""
    function, num_attrs = cuda_mem_ops._batch_memcpy
    submit, calls = cuda_mem_ops._submit_rectangles, 0

    def is_the_one() -> bool:
        nonlocal calls
        calls += 1
        return calls == nth

    def spoiled_batch(dst, src, *rest):
        if is_the_one():
            dst = src = 0
        return function(dst, src, *rest)

    def spoiled_rectangles(rectangles, params):
        if is_the_one():
            table = rectangles.table.copy()
            # Rows so far apart that no memory has them.
            table[:, 4:6] = 1 << 40
            rectangles = dataclasses.replace(rectangles, table=table)
        return submit(rectangles, params)

    if engine == "rect":
        monkeypatch.setattr(cuda_mem_ops, "_submit_rectangles", spoiled_rectangles)
    else:
        monkeypatch.setattr(cuda_mem_ops, "_batch_memcpy", (spoiled_batch, num_attrs))


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
        refuse(patch, rank.engine, nth=2)
        rank.load(a=([0], [2]), b=([1], [3]), c=([0], [4]))
        assert rank.finished_loads(3) == {"a", "b", "c"}
        assert rank.worker.take_failed_loads() == {"b"}
        refuse(patch, rank.engine, nth=1)
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
    for _ in range(3):
        rank = Rank()
        assert rank.engine == "rect"
        assert host_cache.registration_ends()
        rank.store([1], [2])
        rank.worker.shutdown()
        assert rank.ended_stores(1) == ({0}, set())
        assert host_cache.registration_ends() == []


# ----- layouts


def round_trip(
    gpu: dict[str, torch.Tensor], num_cpu_blocks: int, engine: CopyEngine
) -> list[BlockCopies]:
    """Move blocks to the host and back to others; look at each region.

    Returns:
        What the store and the load were made of.

    """
    num_gpu_blocks = min(cache.shape[0] for cache in gpu.values())
    cpu = host_cache.allocate_host_cache(gpu, num_cpu_blocks)
    stream = torch.cuda.Stream()
    ways = (gpu, cpu, "store"), (cpu, gpu, "load")
    store, load = (
        build_params(src, dst, stream, direction=direction, engine=engine)
        for src, dst, direction in ways
    )
    assert store.engine is load.engine is engine
    chosen = np.random.default_rng(0).permutation(num_gpu_blocks).tolist()
    count = min(num_cpu_blocks, num_gpu_blocks // 2)
    src, back, dst = chosen[:count], chosen[-count:], list(range(count))
    for cache in gpu.values():
        shape = count, *cache.shape[1:]
        cache[src] = torch.randint(1, 256, shape, dtype=torch.uint8, device="cuda")
        cache[back] = 0
    torch.cuda.synchronize()
    copy_blocks(src, dst, store)
    copy_blocks(dst, back, load)
    stream.synchronize()
    for name, cache in gpu.items():
        assert torch.equal(cache[src], cache[back]), name
        assert torch.equal(cache[src].cpu(), cpu[name][dst]), name
    assert store.plan
    assert load.plan
    return [store.plan.copies(src, dst), load.plan.copies(dst, back)]


@pytest.mark.parametrize("engine", [CopyEngine.RECT, CopyEngine.BATCH])
def test_page_sizes_of_every_kind_arrive(engine):
    """Pages of two sizes, pages with padding behind them, and one of its own size."""
    kinds = ((7, 16 << 10, 16 << 10), (5, 4096, 6144), (4, 656, 656), (1, 8192, 8192))
    gpu: dict[str, torch.Tensor] = {}
    for layers, page, stride in kinds:
        shape = layers, BLOCKS, stride
        memory = torch.zeros(shape, dtype=torch.uint8, device="cuda")
        gpu |= {f"{page}.{i}": layer[:, :page] for i, layer in enumerate(memory)}
    round_trip(gpu, BLOCKS, engine)


@pytest.mark.parametrize("engine", [CopyEngine.RECT, CopyEngine.BATCH])
def test_layers_further_apart_than_the_largest_pitch_arrive(engine):
    """Rectangles whose rows are the slices of a box: the 3-D call."""
    layers, blocks = 3, (1 << 31) // PAGE + 1
    if torch.cuda.mem_get_info()[0] < layers * blocks * PAGE + (1 << 30):
        pytest.skip("needs 7 GiB of device memory")
    shape = layers, blocks, PAGE
    memory = torch.zeros(shape, dtype=torch.uint8, device="cuda")
    regions = {f"layer.{i}": memory[i] for i in range(layers)}
    for copies in round_trip(regions, 32, engine):
        if engine is CopyEngine.RECT:
            lines = copies.rectangles.table[:, -2:].max(axis=1)
            assert len(lines) == 32
            assert (lines > 1).all(), "the form whose rows are slices"
