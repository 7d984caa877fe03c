# SPDX-License-Identifier: Apache-2.0
"""The account of a device with PyTorch's pools, graphs and tensors on it."""

import ctypes
import gc
import random
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from vllm.device_allocator import process_memory
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.device_allocator.sleep_report import DeviceMemory
from vllm.platforms import current_platform

from vllm_rocm_memory.sim import hipsim, torch_device, torch_memory_pool

from .accounts import parts, used_bytes
from .simulated_gpu import IS_HIP

DEADLINE = 30  # seconds
MIB = 1 << 20
SEGMENT = 20 * MIB  # of tensors of 1 to 10 MiB
GRAPH = 128 << 10  # of an executable graph, as HIP has it
ALL_POOLS = {"weights": 1, "kv_cache": 1, "runtime": 0}  # beside the traffic's
LEVEL_1 = ("weights", "runtime", "cudagraph")

pytestmark = [
    pytest.mark.skipif(not IS_HIP, reason="PyTorch's device is HIP's here"),
    pytest.mark.usefixtures("little_garbage"),
]


@pytest.fixture(autouse=True)
def alone(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "process_bytes", used_bytes)


@pytest.fixture
def graph_pool(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """vLLM's, which its captures share, and which vLLM makes when it first needs it."""
    pool: tuple[int, int] = torch.cuda.graph_pool_handle()
    monkeypatch.setattr(type(current_platform), "_global_graph_pool", pool)
    return pool


def captured(
    x: torch.Tensor, pool: tuple[int, int] | None = None
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.Stream()):
        result = x + 1
    return graph, result


def account(allocator: CuMemAllocator) -> DeviceMemory:
    """What is held now, of which the parts are the driver's figure."""
    now, _ = allocator.memory()
    assert parts(now) == now.used_bytes == used_bytes()
    return now


# --- Pools ----------------------------------------------------------------------------


def test_a_private_pool(allocator: CuMemAllocator) -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = torch.ones(MIB)
    with allocator.use_memory_pool("weights"):
        weights = torch.ones(MIB)
    now = account(allocator)
    assert (now.other_pools_bytes, now.graph_pool_bytes) == (SEGMENT, 0)
    assert now.tags == allocator.mapped_bytes() == {"weights": SEGMENT}
    assert (now.torch_bytes, now.rest_bytes, now.others_bytes) == (0, 0, 0)
    del inside, weights


@pytest.mark.parametrize("shared", [True, False])
def test_graphs_outside_of_the_allocator(
    allocator: CuMemAllocator, graph_pool: tuple[int, int], shared: bool
) -> None:
    """In vLLM's pool, or in one that the capture made for itself."""
    graph, result = captured(torch.ones(MIB), graph_pool if shared else None)
    now = account(allocator)
    assert now.graph_pool_bytes == hipsim.stats().device_bytes >= SEGMENT
    assert (now.other_pools_bytes, now.rest_bytes) == (0, GRAPH)
    report = allocator.sleep(LEVEL_1)
    assert report is not None and report.held == now, "it does not sleep"
    graph.reset()
    del graph, result


def test_graphs_in_a_pool_of_their_own(
    allocator: CuMemAllocator, graph_pool: tuple[int, int]
) -> None:
    """Nothing tells its name, as vLLM has one for encoders, from other pools'."""
    graph, result = captured(torch.ones(MIB), torch.cuda.graph_pool_handle())
    now = account(allocator)
    assert now.other_pools_bytes == hipsim.stats().device_bytes >= SEGMENT
    assert (now.graph_pool_bytes, now.rest_bytes) == (0, GRAPH)
    graph.reset()
    del graph, result


def test_graphs_that_sleep(
    allocator: CuMemAllocator, graph_pool: tuple[int, int]
) -> None:
    with allocator.cudagraph_pool() as pool:
        graph, result = captured(torch.ones(MIB), pool)
    now = account(allocator)
    pool_bytes = hipsim.stats().handle_bytes
    assert now.tags == {"cudagraph": pool_bytes}
    assert pool_bytes >= SEGMENT
    assert (now.graph_pool_bytes, now.rest_bytes) == (0, GRAPH)
    report = allocator.sleep(LEVEL_1)
    assert report is not None
    assert (report.held.tags, report.held.used_bytes) == ({}, GRAPH)
    assert report.freed["cudagraph"].backup_bytes == pool_bytes
    allocator.wake_up()
    graph.reset()
    del graph, result


def test_no_pool_is_made_for_the_account(
    allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(current_platform), "_global_graph_pool", None)
    account(allocator)
    assert type(current_platform)._global_graph_pool is None


def test_what_a_pool_has_given_back(allocator: CuMemAllocator) -> None:
    """PyTorch lists the segments still; nobody has their memory."""
    with allocator.use_memory_pool("weights"):
        wide = torch.ones(8 * MIB)
        narrow = torch.ones(MIB)
        del wide
    (pool, _), *_ = allocator.allocator_and_pools["weights"]
    assert sum(each["total_size"] for each in pool.snapshot()) > SEGMENT
    now = account(allocator)
    assert now.tags == {"weights": SEGMENT}
    assert (now.other_pools_bytes, now.rest_bytes) == (0, 0)
    del narrow


def test_memory_that_pytorch_does_not_know(allocator: CuMemAllocator) -> None:
    with torch_device.device_memory():
        outside = torch.ones(MIB)
    assert account(allocator).rest_bytes == outside.nbytes
    del outside
    assert account(allocator).rest_bytes == 0


class Segment(NamedTuple):
    """One of `DefaultPool`, with the bytes in use."""

    ptr: ctypes.c_void_p
    size: int
    used: int


class DefaultPool:
    """PyTorch's, which the simulator lacks: segments beside those it has."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []

    def allocate(self, size: int, used: int) -> None:
        ptr = ctypes.c_void_p()
        error = hipsim.load().hipMalloc(ctypes.byref(ptr), size)
        hipsim.check(error, "hipMalloc")
        self._segments.append(Segment(ptr, size, used))

    @property
    def size(self) -> int:
        return sum(each.size for each in self._segments)

    @property
    def cached(self) -> int:
        return self.size - sum(each.used for each in self._segments)

    @property
    def unused(self) -> int:
        """Bytes that emptying the cache gives back."""
        return sum(each.size for each in self._segments if not each.used)

    def snapshot(self, mempool_id: object = None, **kwargs: Any) -> list[Any]:
        ours = [
            {
                "device": 0,
                "address": each.ptr.value,
                "total_size": each.size,
                "active_size": each.used,
                "segment_pool_id": (0, 0),
            }
            for each in self._segments
        ]
        elsewhere = [{**each, "device": 1, "address": 1} for each in ours]
        return [*ours, *elsewhere, *torch_memory_snapshot(mempool_id)]

    def empty_cache(self) -> None:
        torch_memory_pool.empty_cache()
        self._keep([each for each in self._segments if each.used])

    def clear(self) -> None:
        self._keep([])

    def _keep(self, kept: list[Segment]) -> None:
        for each in self._segments:
            if each not in kept:
                hipsim.check(hipsim.load().hipFree(each.ptr), "hipFree")
        self._segments = kept


def torch_memory_snapshot(mempool_id: object) -> list[Any]:
    return torch_memory_pool.memory_snapshot(mempool_id)  # type: ignore[arg-type]


@pytest.fixture
def default_pool(
    allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DefaultPool]:
    pool = DefaultPool()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "memory_snapshot", pool.snapshot)
        patch.setattr(torch.accelerator, "empty_cache", pool.empty_cache)
        yield pool
    pool.clear()


def test_the_default_pool(allocator: CuMemAllocator, default_pool: DefaultPool) -> None:
    default_pool.allocate(6 * MIB, 4 * MIB)
    default_pool.allocate(3 * MIB, 0)
    now = account(allocator)
    assert (now.torch_bytes, now.torch_cached_bytes) == (9 * MIB, 5 * MIB)
    assert (now.rest_bytes, now.others_bytes) == (0, 0)
    report = allocator.sleep(LEVEL_1)
    assert report is not None
    assert report.torch_cache_freed_bytes == 3 * MIB
    held = report.held
    assert (held.torch_bytes, held.torch_cached_bytes) == (6 * MIB, 2 * MIB)
    assert parts(held) == held.used_bytes == default_pool.size
    (line,) = [line for line in report.table().splitlines() if "cache" in line][:1]
    assert line.split()[-2:] == ["3.0", "MiB"]


# --- Over and over --------------------------------------------------------------------


class Traffic:
    """What lives beside the allocations that sleep, and comes and goes at random."""

    def __init__(
        self, allocator: CuMemAllocator, default_pool: DefaultPool, seed: int
    ) -> None:
        self._allocator = allocator
        self.default_pool = default_pool
        self._random = random.Random(seed)
        self.foreign: list[torch.Tensor] = []
        self.outside: list[torch.Tensor] = []
        self.private: list[torch.Tensor] = []
        self.tagged: list[torch.Tensor] = []
        self.graphs: list[tuple[torch.cuda.CUDAGraph, torch.Tensor]] = []
        self._pool = torch.cuda.MemPool()

    def go_on(self) -> None:
        for _ in range(self._random.randint(1, 3)):
            self._random.choice(
                (self._outside, self._private, self._tagged, self._graph)
            )()
        size = 2 * MIB
        self.default_pool.allocate(size, self._random.choice((0, 512, size)))
        self._of_another_process()

    def stop(self) -> None:
        for graph, _ in self.graphs:
            graph.reset()
        for kept in (
            self.outside,
            self.foreign,
            self.private,
            self.tagged,
            self.graphs,
        ):
            kept.clear()
        self.default_pool.clear()
        del self._pool
        # Segments stay for as long as their pool, and a tag's pools for good.
        for tag, kept_pools in ALL_POOLS.items():
            del self._allocator.allocator_and_pools.get(tag, [])[kept_pools:]
        torch.accelerator.empty_cache()

    def known_rest(self) -> int:
        """Bytes of the device that neither the allocator nor PyTorch knows."""
        return pages_of(self.outside) + GRAPH * len(self.graphs)

    def _size(self) -> int:
        # A segment of 2 MiB has room for several of the small ones.
        return self._random.choice((self._random.randint(1, MIB), 2 * MIB))

    def _outside(self) -> None:
        with torch_device.device_memory():
            self.outside.append(torch.ones(self._size(), dtype=torch.uint8))
        del self.outside[: -self._random.randint(1, 3)]

    def _of_another_process(self) -> None:
        """Which the driver does not count for this one."""
        with torch_device.device_memory():
            self.foreign.append(torch.ones(self._size(), dtype=torch.uint8))

    def _private(self) -> None:
        with torch.cuda.use_mem_pool(self._pool):
            self.private.append(torch.ones(self._size(), dtype=torch.uint8))
        del self.private[: -self._random.randint(1, 3)]

    def _tagged(self) -> None:
        tag = self._random.choice(("weights", "kv_cache", "runtime"))
        with self._allocator.use_memory_pool(tag):
            self.tagged.append(torch.ones(self._size(), dtype=torch.uint8))
        del self.tagged[: -self._random.randint(1, 3)]

    def _graph(self) -> None:
        self.graphs.append(captured(torch.ones(1000)))
        for graph, _ in self.graphs[: -self._random.randint(1, 2)]:
            graph.reset()
            self.graphs.pop(0)


def pages_of(tensors: list[torch.Tensor]) -> int:
    return sum(-(-each.nbytes // 4096) * 4096 for each in tensors)


def held_everywhere() -> dict[str, int]:
    now = hipsim.stats()
    return {
        "used": used_bytes(),
        "handles": now.handles,
        "mappings": now.mappings,
        "device allocations": now.device_allocations,
        "registered": now.registered_bytes,
        "on the host": now.host_allocation_bytes,
        "streams": now.streams,
        "events": now.events,
        "executables": now.executables,
    }


@pytest.mark.parametrize(("profile", "cycles"), [("7.2.3", 25), ("7.16", 100)])
def test_cycle_after_cycle(
    allocator: CuMemAllocator,
    default_pool: DefaultPool,
    monkeypatch: pytest.MonkeyPatch,
    profile: str,
    cycles: int,
) -> None:
    """The parts are what the driver says, the rest is known, and nothing grows."""
    hipsim.reset(profile)
    hipsim.configure(host_reads="allow", stale_memory="poisoned")
    with allocator.use_memory_pool("weights"):
        weights = torch.arange(100_000)
    with allocator.use_memory_pool("kv_cache"):
        cache = torch.ones(100_000)
    with allocator.cudagraph_pool() as pool:
        graph, result = captured(cache, pool)
    foreign: list[torch.Tensor] = []
    monkeypatch.setattr(
        process_memory,
        "process_bytes",
        lambda device: used_bytes(device) - pages_of(foreign),
    )
    ends: list[tuple[dict[str, int], DeviceMemory]] = []
    for cycle in range(cycles):
        traffic = Traffic(allocator, default_pool, cycle)
        foreign = traffic.foreign
        traffic.go_on()
        check_one(allocator, traffic, cycle)
        assert torch.equal(weights, torch.arange(100_000))
        traffic.stop()
        del traffic
        allocator.trim_host_memory()
        ends.append((held_everywhere(), account(allocator)))
    assert ends[-1] == ends[0]
    assert ends[-1][1].rest_bytes == GRAPH
    graph.reset()
    del graph, result


def check_one(allocator: CuMemAllocator, traffic: Traffic, cycle: int) -> None:
    known = GRAPH + traffic.known_rest()
    pool = traffic.default_pool
    check_parts(account(allocator), traffic, known)
    unused = pool.unused
    report = allocator.sleep(LEVEL_1 if cycle % 3 else (*LEVEL_1, "kv_cache"))
    assert report is not None
    assert parts(report.held) == used_bytes()
    assert report.held.tags == {}
    assert report.torch_cache_freed_bytes >= unused and pool.unused == 0
    check_parts(report.held, traffic, known)
    assert hipsim.stats().handle_bytes == 0
    if cycle % 4 == 0:
        allocator.wake_up(["kv_cache"])
        now = account(allocator)
        check_parts(now, traffic, known)
        assert "weights" not in now.tags
    if cycle % 2:
        traffic.foreign.clear()
    allocator.wake_up()
    if cycle % 5 == 0:
        allocator.discard("kv_cache")
        assert account(allocator).asleep.keys() == {"kv_cache"}
        allocator.wake_up()
    now = account(allocator)
    check_parts(now, traffic, known)
    assert now.asleep == {}
    assert sum(now.tags.values()) == hipsim.stats().handle_bytes


def check_parts(memory: DeviceMemory, traffic: Traffic, rest: int) -> None:
    """Each part by itself, since all together they are the driver's figure anyway."""
    pool = traffic.default_pool
    assert (memory.torch_bytes, memory.torch_cached_bytes) == (pool.size, pool.cached)
    assert memory.others_bytes == pages_of(traffic.foreign)
    assert memory.rest_bytes == rest


def test_a_second_thread_allocates_meanwhile(allocator: CuMemAllocator) -> None:
    """The simulator's snapshot lets go of Python's lock, which PyTorch 2.11's keeps."""
    with allocator.use_memory_pool("weights"):
        weights = torch.ones(MIB)
    end, errors = threading.Event(), []

    def allocate() -> None:
        try:
            pool = torch.cuda.MemPool()
            while not end.is_set():
                with torch.cuda.use_mem_pool(pool):
                    tensors = [torch.ones(MIB) for _ in range(3)]
                with torch_device.device_memory():
                    tensors.append(torch.ones(MIB))
                tensors.clear()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=allocate, daemon=True)
    thread.start()
    for _ in range(20):
        report = allocator.sleep(LEVEL_1)
        assert report is not None and parts(report.held) == report.held.used_bytes
        assert report.held.tags == {}
        allocator.wake_up()
        now, _ = allocator.memory()
        assert parts(now) == now.used_bytes and now.tags == {"weights": SEGMENT}
    end.set()
    thread.join(DEADLINE)
    assert not thread.is_alive() and errors == []
    gc.collect()
    torch.accelerator.empty_cache()
    assert account(allocator).rest_bytes == 0
    assert weights.eq(1).all()
