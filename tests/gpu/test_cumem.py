# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake on a real GPU, HIP or CUDA: exactness, roll-back, running work."""

from __future__ import annotations

import gc
import subprocess
import sys

import psutil
import pytest
import torch
import vllm.device_allocator.cumem as cumem
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.device_allocator.host_backups import HostMemoryPolicy
from vllm.device_allocator.sleep_report import DeviceMemory
from vllm.platforms import current_platform

from .device_memory import MIB, after_each_mapping, free_bytes, spin_cycles

# What vLLM's linear layers of an 8B model come to, and no power of two.
BLOCK = 72 * MIB
BLOCKS = 340
ROUNDS = 200
# Bytes by which a process may be larger after a wake that gives host memory back.
RELEASED = 512 * MIB
# Of the device, that the driver may take for host memory which a first sleep registers.
TAKEN = 32 * MIB
# Longer than a whole wake of the small allocations here.
LATE_SECONDS = 0.06


def _allocate(
    allocator: CuMemAllocator, tag: str, count: int, nbytes: int
) -> list[torch.Tensor]:
    with allocator.use_memory_pool(tag):
        return [
            torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device="cuda")
            for _ in range(count)
        ]


def _sums(tensors: list[torch.Tensor]) -> list[int]:
    return [int(tensor.sum(dtype=torch.int64)) for tensor in tensors]


def test_host_memory_is_what_the_backup_needs(allocator: CuMemAllocator) -> None:
    blocks = _allocate(allocator, "weights", BLOCKS, BLOCK)
    backup = sum(data.handle[1] for data in allocator.pointer_to_data.values())
    # Of the runtime itself, which the first copies and registrations cost once.
    warm = _allocate(allocator, "kv_cache", 1, BLOCK)
    allocator.sleep(offload_tags="kv_cache")
    allocator.wake_up()
    allocator.trim_host_memory()
    del warm
    gc.collect()

    process = psutil.Process()
    before = process.memory_info().rss
    for _ in range(2):
        blocks[0].add_(1)
        sums = _sums(blocks)
        allocator.sleep(offload_tags="weights")
        held = process.memory_info().rss - before
        backups = [
            data.cpu_backup_tensor
            for data in allocator.pointer_to_data.values()
            if data.cpu_backup_tensor is not None
        ]
        assert sum(tensor.nbytes for tensor in backups) >= backup
        del backups
        assert backup <= held <= 1.02 * backup
        allocator.wake_up()
        assert _sums(blocks) == sums


def test_host_memory_comes_back_after_a_wake(
    allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = _allocate(allocator, "weights", 57, BLOCK)
    sums = _sums(blocks)
    backup = sum(data.handle[1] for data in allocator.pointer_to_data.values())
    monkeypatch.setattr(allocator, "host_memory_policy", HostMemoryPolicy.RELEASE)
    process = psutil.Process()
    for _ in range(2):
        before = process.memory_info().rss
        allocator.sleep(offload_tags="weights")
        assert process.memory_info().rss - before >= 0.95 * backup
        allocator.wake_up()
        assert process.memory_info().rss - before <= RELEASED
        assert _sums(blocks) == sums


def test_backups_are_registered(allocator: CuMemAllocator) -> None:
    blocks = _allocate(allocator, "weights", 4, BLOCK)
    sums = _sums(blocks)
    allocator.sleep(offload_tags="weights")
    arenas = allocator._host_backups.arenas
    assert sum(arena.prepared for arena in arenas) >= 4 * BLOCK
    for arena in arenas:
        assert arena.registration_error is None
        assert arena.registered == arena.prepared
    allocator.wake_up()
    assert _sums(blocks) == sums


def test_what_the_driver_does_not_register_takes_the_ring(
    allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of each piece but the first is registered already, so it is refused.

    The first may be left out as well: a transfer that is refused twice asks no more.
    """
    runtime = torch.cuda.cudart()
    pages: list[int] = []
    make = cumem._module.HostArena

    def with_registered_pages(size: int, **options: int) -> object:
        arena = make(size, **options)
        for offset in range(arena.piece_size, size, arena.piece_size):
            assert int(runtime.cudaHostRegister(arena.address + offset, 4096, 0)) == 0
            pages.append(arena.address + offset)
        return arena

    monkeypatch.setattr(cumem._module, "HostArena", with_registered_pages)
    blocks = _allocate(allocator, "weights", 8, BLOCK)
    sums = _sums(blocks)
    try:
        for _ in range(2):
            allocator.sleep(offload_tags="weights")
            (arena,) = allocator._host_backups.arenas
            assert arena.registered <= arena.piece_size < arena.prepared
            assert arena.registration_error
            allocator.wake_up()
            assert _sums(blocks) == sums
    finally:
        for page in pages:
            runtime.cudaHostUnregister(page)
    allocator.sleep(offload_tags="weights")
    assert arena.registered == arena.prepared
    allocator.wake_up()
    assert _sums(blocks) == sums


FREE_UNDER_KERNELS = f"""
import sys
import torch
from vllm.device_allocator.cumem import CuMemAllocator

allocator = CuMemAllocator.get_instance()
total = torch.zeros((), dtype=torch.int64, device="cuda")
stream = torch.cuda.Stream()
expected = 0
for number in range({ROUNDS}):
    with allocator.use_memory_pool("runtime"):
        tensor = torch.full(({4 * MIB},), number % 7, dtype=torch.uint8, device="cuda")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            total += tensor.sum(dtype=torch.int64)
        # Without record_stream the pool believes that nobody uses it.
        if sys.argv[1] == "trim":
            del tensor
    if sys.argv[1] == "pool":
        del tensor
        allocator.release_pools()
    assert allocator.get_current_usage() == 0
    expected += {4 * MIB} * (number % 7)
torch.accelerator.synchronize()
assert int(total) == expected, (int(total), expected)
print("right")
"""


@pytest.mark.parametrize("frees", ["trim", "pool"])
def test_freed_memory_is_not_unmapped_under_running_kernels(frees: str) -> None:
    """Freed by the trimming of a pool, or with its pool by the free callback.

    In a process of its own, since pools are released at the end of one.
    """
    process = subprocess.run(
        [sys.executable, "-c", FREE_UNDER_KERNELS, frees],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.endswith("right\n")


def test_work_queued_while_mapping_does_not_overwrite_the_restore(
    allocator: CuMemAllocator,
) -> None:
    [weights] = _allocate(allocator, "weights", 1, 32 * MIB)
    with allocator.use_memory_pool("kv_cache"):
        cache = torch.full((32 * MIB,), 3, dtype=torch.uint8, device="cuda")
    [expected] = _sums([weights])
    late = spin_cycles(LATE_SECONDS)

    def poison_late(address: int, nbytes: int) -> None:
        torch.cuda._sleep(late)
        assert cumem.libcudart is not None
        cumem.libcudart.cudaMemset(address, 0xA5, nbytes)

    wrong = 0
    for _ in range(ROUNDS):
        allocator.sleep(offload_tags="weights")
        with after_each_mapping(poison_late):
            allocator.wake_up()
        torch.accelerator.synchronize()
        wrong += _sums([weights]) != [expected]
        if current_platform.is_rocm():
            wrong += bool(cache.any())
    assert wrong == 0


def test_a_wake_that_runs_out_of_memory_changes_nothing(
    allocator: CuMemAllocator,
) -> None:
    third = int(free_bytes() * 0.25) // MIB * MIB
    blocks = _allocate(allocator, "weights", 1, 64 * MIB)
    sums = _sums(blocks)
    with allocator.use_memory_pool("kv_cache"):
        caches = [
            torch.empty(third, dtype=torch.uint8, device="cuda") for _ in range(3)
        ]
    allocator.sleep(offload_tags="weights")
    asleep = free_bytes()
    # Two of the three caches fit beside it.
    squatter = torch.empty(third, dtype=torch.uint8, device="cuda")
    squatter_2 = torch.empty(third // 2, dtype=torch.uint8, device="cuda")
    beside = free_bytes()
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOf"):
        allocator.wake_up()
    assert free_bytes() == beside
    assert all(data.is_asleep for data in allocator.pointer_to_data.values())
    del squatter, squatter_2
    torch.accelerator.empty_cache()
    assert free_bytes() == asleep
    allocator.wake_up()
    assert _sums(blocks) == sums
    assert all(cache.numel() == third for cache in caches)


@pytest.mark.parametrize("offload", [("weights", "cudagraph"), ("cudagraph",)])
def test_a_graph_replays_after_its_pool_slept(
    allocator: CuMemAllocator, offload: tuple[str, ...]
) -> None:
    [weights] = _allocate(allocator, "weights", 1, 4 * MIB)
    weights.fill_(2)
    inputs = torch.ones(4 * MIB, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with (
        allocator.cudagraph_pool() as pool,
        torch.cuda.graph(graph, pool=pool),
    ):
        constant = torch.empty_like(inputs)
        outputs = inputs * weights + constant
    constant.fill_(3)
    for _ in range(10):
        allocator.sleep(offload_tags=offload)
        allocator.wake_up(["kv_cache"])
        allocator.wake_up(["weights"])
        if "weights" not in offload:
            weights.fill_(2)
        outputs.zero_()
        graph.replay()
        assert bool((outputs == 5).all())
    del graph, outputs, constant


def _unlisted(device: DeviceMemory) -> int:
    """Bytes that neither the allocator nor PyTorch has."""
    return device.rest_bytes + (device.others_bytes or 0)


def test_what_holds_the_device_s_memory(allocator: CuMemAllocator) -> None:
    blocks = _allocate(allocator, "weights", 4, BLOCK)
    torch.accelerator.empty_cache()
    before, _ = allocator.memory()
    outside = [torch.empty(BLOCK, dtype=torch.uint8, device="cuda") for _ in range(3)]
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        private = torch.empty(BLOCK, dtype=torch.uint8, device="cuda")
    outside.pop()
    now, _ = allocator.memory()
    assert now.tags == allocator.mapped_bytes()
    assert now.torch_bytes - before.torch_bytes == 3 * BLOCK
    assert now.torch_cached_bytes - before.torch_cached_bytes == BLOCK
    assert now.other_pools_bytes - before.other_pools_bytes == BLOCK
    assert now.rest_bytes > 0, "a context at least"
    assert (now.others_bytes is None) == (now.others_unknown is not None)
    sums = _sums(blocks)
    torch.accelerator.empty_cache()
    outside.pop()
    report = allocator.sleep(offload_tags="weights")
    assert report is not None
    assert report.freed["weights"].device_bytes == now.tags["weights"]
    assert report.torch_cache_freed_bytes >= BLOCK
    held = report.held
    assert held.tags == {} and held.asleep == now.tags
    # What nobody lists does not sleep, so tags that it hid would show.
    assert abs(_unlisted(held) - _unlisted(now)) <= TAKEN
    allocator.wake_up()
    assert _sums(blocks) == sums
    del private
