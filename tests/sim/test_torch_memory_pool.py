# SPDX-License-Identifier: Apache-2.0
"""Pools of device memory, by the rules of PyTorch's caching allocator."""

import ctypes
import faulthandler
import gc
import itertools
import mmap
import queue
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from vllm_rocm_memory.sim import hipsim, torch_device, torch_memory_pool
from vllm_rocm_memory.sim.torch_memory_pool import MemPool, empty_cache, use_mem_pool

KIB = 1 << 10
MIB = 1 << 20
DEADLINE = 30  # seconds, for whatever is waited for


_functions: list[object] = []  # a pool that a failed test leaves may call them


class Memory:
    """Two functions for a pool, as a pluggable allocator has them, in Python.

    They need the GIL, as `my_malloc` and `my_free` do.
    """

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.asked: list[int] = []
        self.refused = 0
        self.on_malloc: Callable[[], object] = lambda: None
        self.on_free: Callable[[], object] = lambda: None
        self._maps: dict[int, mmap.mmap] = {}
        malloc = ctypes.CFUNCTYPE(
            ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p
        )
        free = ctypes.CFUNCTYPE(
            None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p
        )
        self._functions = malloc(self._malloc), free(self._free)
        _functions.append(self._functions)
        self.source = torch_memory_pool.native().Pluggable(
            *map(torch_memory_pool.address_of, self._functions)
        )

    def _malloc(self, size: int, device: int, stream: int | None) -> int | None:
        assert (device, stream) == (0, None)
        self.asked.append(size)
        self.on_malloc()
        if self.refused:
            self.refused -= 1
            return None
        block = mmap.mmap(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(block))
        self._maps[address] = block
        self.live[address] = size
        return address

    def _free(self, address: int, size: int, device: int, stream: int | None) -> None:
        assert self.live.pop(address) == size and (device, stream) == (0, None)
        self.on_free()


@pytest.fixture(autouse=True)
def base_bytes() -> Iterator[int]:
    """Device memory in use before the test, and after it; no pool outlives a test."""
    hipsim.reset()
    before = hipsim.stats().device_bytes
    yield before
    hipsim.reset()
    empty_cache()
    if torch_memory_pool.memory_snapshot():
        gc.collect()
        empty_cache()
    assert torch_memory_pool.memory_snapshot() == []
    assert hipsim.stats().device_bytes == before


@pytest.fixture
def memory(base_bytes: int) -> Iterator[Memory]:
    memory = Memory()
    yield memory
    empty_cache()
    assert memory.live == {}


@pytest.fixture(params=["hipMalloc", "pluggable"])
def make_pool(request: pytest.FixtureRequest) -> Callable[[], MemPool]:
    """Makes a pool of each kind; pytest would hold on to the pool itself."""
    if request.param == "hipMalloc":
        return MemPool
    return partial(MemPool, request.getfixturevalue("memory").source)


def make(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def make_in(pool: MemPool, *sizes: int) -> list[torch.Tensor]:
    with use_mem_pool(pool):
        return [make(size) for size in sizes]


def segments(pool: MemPool) -> list[tuple[int, int]]:
    """Bytes of each segment, and bytes of it that tensors have."""
    return [
        (each["total_size"], each["allocated_size"])
        for each in sorted(pool.snapshot(), key=lambda each: each["total_size"])
    ]


# --- sizes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size, block, segment, kind",
    [
        (1, 512, 2 * MIB, "small"),
        (512, 512, 2 * MIB, "small"),
        (513, 1024, 2 * MIB, "small"),
        (MIB, MIB, 2 * MIB, "small"),
        (MIB + 1, MIB + 512, 20 * MIB, "large"),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB, "large"),
        (10 * MIB, 10 * MIB, 10 * MIB, "large"),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB, "large"),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB, "large"),
        (11 * MIB, 12 * MIB, 12 * MIB, "large"),  # a rest of 1 MiB is none
    ],
)
def test_sizes_are_pytorchs(make_pool, size, block, segment, kind):
    pool = make_pool()
    tensor = make_in(pool, size)
    (found,) = pool.snapshot()
    taken, *rest = found["blocks"]
    assert (found["total_size"], found["segment_type"]) == (segment, kind)
    assert found["allocated_size"] == found["active_size"] == block
    assert found["requested_size"] == taken["requested_size"] == size
    assert (taken["address"], taken["size"]) == (tensor[0].data_ptr(), block)
    assert taken["state"] == "active_allocated"
    assert [(each["size"], each["state"]) for each in rest] == (
        [(segment - block, "inactive")] if segment > block else []
    )
    assert found["segment_pool_id"] == pool.id
    tensor.clear()


def test_the_source_is_asked_for_whole_segments(memory):
    pool = MemPool(memory.source)
    tensors = make_in(pool, 100, 200, 3 * MIB, 4 * MIB, 50 * MIB + 1)
    assert memory.asked == [2 * MIB, 20 * MIB, 52 * MIB]
    assert sorted(memory.live) == [each["address"] for each in pool.snapshot()]
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert addresses[1] - addresses[0] == 512
    assert addresses[3] - addresses[2] == 3 * MIB
    tensors.clear()


def test_memory_of_a_pool_without_an_allocator_is_device_memory(base_bytes):
    pool = MemPool()
    tensors = make_in(pool, 100, 30 * MIB)
    assert hipsim.stats().device_bytes - base_bytes == 32 * MIB
    free, total = torch_device.get_memory_info()
    assert total - free >= 32 * MIB
    tensors.clear()


# --- reuse ----------------------------------------------------------------------------


def test_the_smallest_block_that_fits_is_taken(make_pool):
    pool = make_pool()
    # Between each two there is one that stays, so that none are joined.
    sizes = [8 * KIB, 512, 2 * KIB, 512, 4 * KIB, 512]
    tensors = make_in(pool, *sizes)
    holes = {size: tensors[i].data_ptr() for i, size in enumerate(sizes) if i % 2 == 0}
    kept = tensors[1::2]
    tensors.clear()
    for size in (3 * KIB, 2 * KIB, 8 * KIB):
        (found,) = make_in(pool, size)
        kept.append(found)
        assert found.data_ptr() == holes[4 * KIB if size == 3 * KIB else size]
    kept.clear()


def test_free_neighbours_become_one_block(make_pool):
    pool = make_pool()
    for order in itertools.permutations(range(3)):
        tensors = dict(enumerate(make_in(pool, 600 * KIB, 600 * KIB, 600 * KIB)))
        first = tensors[0].data_ptr()
        for index in order:
            del tensors[index]
        (segment,) = pool.snapshot()
        (block,) = segment["blocks"]
        assert (block["address"], block["size"]) == (first, 2 * MIB)
        assert block["state"] == "inactive" and segment["allocated_size"] == 0


def test_a_block_that_is_used_again_has_its_old_bytes():
    hipsim.configure(stale_memory="poisoned")
    pool = MemPool()
    (tensor,) = make_in(pool, 4 * KIB)
    assert (tensor == 0xFF).all(), "new memory of the device"
    tensor.fill_(7)
    address = tensor.data_ptr()
    del tensor
    (tensor,) = make_in(pool, 4 * KIB)
    assert tensor.data_ptr() == address and (tensor == 7).all()
    del tensor


def test_nobody_touches_a_free_segment(memory):
    """Sleep mode unmaps free segments that a pool still lists."""
    pool = MemPool(memory.source)
    tensors = make_in(pool, KIB, 15 * MIB)
    tensors.pop()
    (trimmed,) = (each for each in pool.snapshot() if each["allocated_size"] == 0)
    libc = ctypes.CDLL(None, use_errno=True)
    nothing = 0  # PROT_NONE
    address = ctypes.c_void_p(trimmed["address"])
    assert libc.mprotect(address, ctypes.c_size_t(15 * MIB + MIB), nothing) == 0
    tensors += make_in(pool, KIB, KIB)
    assert len(pool.snapshot()) == 2
    tensors.clear()
    empty_cache()
    del pool
    assert memory.live == {}


# --- how long a segment lives ---------------------------------------------------------


def test_a_pool_keeps_its_free_segments(memory):
    pool = MemPool(memory.source)
    make_in(pool, KIB, 3 * MIB, 30 * MIB)
    empty_cache()
    assert segments(pool) == [(2 * MIB, 0), (20 * MIB, 0), (30 * MIB, 0)]
    assert len(memory.live) == 3


def test_a_pools_free_segments_go_with_it(memory):
    pool = MemPool(memory.source)
    tensors = make_in(pool, KIB, KIB, 30 * MIB)
    small, large = tensors[0], tensors.pop()
    tensors.clear()
    del large, pool
    assert list(memory.live.values()) == [2 * MIB]
    small.fill_(1)
    del small
    assert len(memory.live) == 1, "until somebody empties the cache"
    empty_cache()
    assert memory.live == {}


def test_an_open_scope_keeps_the_pool(memory):
    pool = MemPool(memory.source)
    assert pool.use_count() == 1
    scope = use_mem_pool(pool)
    with scope:
        assert pool.use_count() == 2
        make(KIB)
        pool_id = pool.id
        del pool
        empty_cache()
        assert len(memory.live) == 1
        assert make(KIB).numel() == KIB
    empty_cache()
    assert memory.live == {}
    assert torch_memory_pool.memory_snapshot(pool_id) == []


# --- scopes ---------------------------------------------------------------------------


def test_the_innermost_scope_counts(memory, base_bytes):
    outer, inner = MemPool(memory.source), MemPool()
    with use_mem_pool(outer):
        kept = [make(KIB)]
        with use_mem_pool(inner):
            kept.append(make(KIB))
            with torch_device.host_memory():
                kept.append(make(50 * MIB))
            with torch_device.device_memory():
                kept.append(make(3 * MIB))
        kept.append(make(KIB))
    kept.append(make(50 * MIB))
    assert segments(outer) == [(2 * MIB, 2 * KIB)]
    assert segments(inner) == [(2 * MIB, KIB)]
    assert hipsim.stats().device_bytes - base_bytes == 5 * MIB
    found = [torch_memory_pool.pool_of(tensor.data_ptr() + 100) for tensor in kept]
    assert found == [outer.id, inner.id, None, None, outer.id, None]
    kept.clear()


def test_a_pool_is_open_once(make_pool):
    pool = make_pool()
    with (
        use_mem_pool(pool),
        pytest.raises(RuntimeError, match="being allocated to already"),
        use_mem_pool(pool),
    ):
        pass
    assert pool.use_count() == 1
    with use_mem_pool(pool):
        assert pool.use_count() == 2


def test_a_scope_ends_when_its_body_raises(make_pool):
    pool = make_pool()
    with pytest.raises(KeyError), use_mem_pool(pool):
        raise KeyError
    assert torch_memory_pool.pool_of(make(KIB).data_ptr()) is None
    assert pool.use_count() == 1


def test_another_thread_is_outside(make_pool):
    pool = make_pool()
    made: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
    with use_mem_pool(pool):
        thread = threading.Thread(target=lambda: made.put(make(KIB)))
        thread.start()
        thread.join(DEADLINE)
    assert torch_memory_pool.pool_of(made.get(timeout=1).data_ptr()) is None
    assert segments(pool) == []


def test_snapshots_of_all_pools_say_whose_each_segment_is():
    first, second = MemPool(), MemPool()
    tensors = make_in(first, KIB) + make_in(second, KIB, 3 * MIB)
    owners = [each["segment_pool_id"] for each in torch_memory_pool.memory_snapshot()]
    assert sorted(owners) == [first.id, second.id, second.id]
    tensors.clear()


# --- threads --------------------------------------------------------------------------


def test_threads_share_pools_and_free_each_others_tensors():
    """Blocks never overlap, keep their bytes, and are all free in the end."""
    pools = [MemPool() for _ in range(2)]
    moved: queue.SimpleQueue[tuple[torch.Tensor, int]] = queue.SimpleQueue()
    problems: list[object] = []
    done = threading.Event()

    def allocate(pool: MemPool, seed: int) -> None:
        rng = random.Random(seed)
        for value in range(300):
            tensor = make_in(pool, rng.choice([1, 700, 5 * KIB, 900 * KIB, 3 * MIB]))[0]
            tensor[:64] = value % 251
            moved.put((tensor, value % 251))

    def free() -> None:
        held: list[tuple[torch.Tensor, int]] = []
        rng = random.Random(0)
        while not done.is_set() or not moved.empty():
            try:
                held.append(moved.get(timeout=0.01))
            except queue.Empty:
                continue
            if len(held) > 40:
                tensor, value = held.pop(rng.randrange(len(held)))
                if not (tensor[:64] == value).all():
                    problems.append((tensor.data_ptr(), value))

    makers = [
        threading.Thread(target=allocate, args=(pool, seed))
        for seed, pool in enumerate(pools)
    ]
    takers = [threading.Thread(target=free) for _ in range(2)]
    for thread in makers + takers:
        thread.start()
    for thread in makers:
        thread.join(DEADLINE)
    done.set()
    for thread in takers:
        thread.join(DEADLINE)
    assert not any(thread.is_alive() for thread in makers + takers)
    assert problems == []
    for pool in pools:
        assert pool.snapshot() and all(
            len(each["blocks"]) == 1 and each["allocated_size"] == 0
            for each in pool.snapshot()
        )


def test_a_source_that_needs_the_gil_blocks_nobody(memory):
    """A thread that holds it frees tensors while another one is in the source."""
    pool = MemPool(memory.source)
    tensors = make_in(pool, *[100 * KIB] * 50)
    inside, freed = threading.Event(), threading.Event()

    def wait_inside() -> None:
        inside.set()
        assert freed.wait(DEADLINE)

    def allocate() -> None:
        tensors.extend(make_in(pool, 30 * MIB))

    # A thread that waits with the GIL stops the ones that watch over it, too.
    faulthandler.dump_traceback_later(4 * DEADLINE, exit=True)
    memory.on_malloc = wait_inside
    thread = threading.Thread(target=allocate)
    thread.start()
    assert inside.wait(DEADLINE)
    # The allocator's mutex is locked, so these wait, and must not hold the GIL.
    victims = [tensors.pop() for _ in range(5)]
    other = threading.Thread(target=lambda: (pool.snapshot(), victims.clear()))
    other.start()
    other.join(0.2)
    assert other.is_alive(), "PyTorch's allocator is locked while it calls the source"
    freed.set()
    other.join(DEADLINE)
    thread.join(DEADLINE)
    faulthandler.cancel_dump_traceback_later()
    assert not thread.is_alive() and not other.is_alive()
    tensors.clear()


def test_a_source_may_drop_tensors_of_its_pool(memory):
    pool, others = MemPool(memory.source), MemPool(memory.source)
    tensors = make_in(pool, KIB, 2 * KIB, KIB)
    memory.on_malloc = tensors.clear
    kept = make_in(pool, 30 * MIB)
    assert segments(pool) == [(2 * MIB, 0), (30 * MIB, 30 * MIB)]

    memory.on_malloc = lambda: None
    first, second = make_in(others, 12 * MIB, 13 * MIB)
    del first
    victims = [second]
    del second
    memory.on_free = victims.clear
    del others
    assert sorted(memory.live.values()) == [2 * MIB, 30 * MIB]
    kept.clear()


# --- failures -------------------------------------------------------------------------


def test_no_memory_is_tried_again_after_the_cache_is_emptied(memory):
    pool, dead = MemPool(memory.source), MemPool(memory.source)
    kept = make_in(dead, 10 * MIB)
    del dead
    kept.clear()
    assert list(memory.live.values()) == [10 * MIB], "nobody emptied the cache"
    memory.refused = 1
    tensors = make_in(pool, 30 * MIB)
    assert memory.asked == [10 * MIB, 30 * MIB, 30 * MIB]
    assert list(memory.live.values()) == [30 * MIB]
    tensors.clear()


def test_no_memory_at_all_is_out_of_memory_and_leaves_nothing(memory):
    pool = MemPool(memory.source)
    memory.refused = 2
    with pytest.raises(torch.OutOfMemoryError, match=str(30 * MIB)):
        make_in(pool, 30 * MIB)
    assert pool.use_count() == 1 and pool.snapshot() == [] and not memory.live
    tensors = make_in(pool, 30 * MIB)
    assert segments(pool) == [(30 * MIB, 30 * MIB)]
    tensors.clear()


def test_a_device_without_room_is_out_of_memory(base_bytes):
    pool = MemPool()
    for nth in (1, 2):
        hipsim.fail("hipMalloc", nth, 2)
    with pytest.raises(torch.OutOfMemoryError, match="hipMalloc of 31457280 bytes"):
        make_in(pool, 30 * MIB)
    assert hipsim.stats().device_bytes == base_bytes
    hipsim.fail("hipMalloc", 1, 2)
    tensors = make_in(pool, 30 * MIB)
    tensors.clear()


def test_device_memory_outside_of_pools_empties_the_cache_too(base_bytes):
    dead = MemPool()
    kept = make_in(dead, 10 * MIB)
    del dead
    kept.clear()
    hipsim.fail("hipMalloc", 1, 2)
    with torch_device.device_memory():
        tensor = make(3 * MIB)
    assert hipsim.stats().device_bytes - base_bytes == tensor.numel()
    del tensor


def test_another_error_of_the_device_is_none_of_memory():
    pool = MemPool()
    hipsim.fail("hipMalloc", 1, 1)
    with pytest.raises(RuntimeError, match=r"hipMalloc.*error 1") as caught:
        make_in(pool, 30 * MIB)
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    assert pool.snapshot() == [] and hipsim.stats().calls["hipMalloc"] == 1


# --- a library ------------------------------------------------------------------------

LIBRARY = """
#include <sys/types.h>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
extern "C" void* take(ssize_t size, int, void*) {
  if (size > (100 << 20)) throw std::runtime_error("the driver said no");
  return aligned_alloc(4096, size);
}
extern "C" void give(void* ptr, ssize_t, int, void*) { free(ptr); }
extern "C" void give_and_throw(void* ptr, ssize_t, int, void*) {
  free(ptr);
  throw std::runtime_error("the driver hung up");
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("pluggable")
    (folder / "pluggable.cpp").write_text(LIBRARY)
    built = folder / "pluggable.so"
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-o", built, folder / "pluggable.cpp"],
        check=True,
        timeout=120,
    )
    return str(built)


def test_a_pluggable_allocator_is_found_by_its_names(library):
    allocator = torch_memory_pool.CUDAPluggableAllocator(library, "take", "give")
    assert allocator.allocator() is allocator._allocator
    pool = MemPool(allocator._allocator)
    assert pool.allocator is allocator._allocator
    del allocator
    tensors = make_in(pool, KIB, 30 * MIB)
    assert segments(pool) == [(2 * MIB, KIB), (30 * MIB, 30 * MIB)]
    tensors.clear()


def test_what_a_pluggable_allocator_throws_is_a_runtime_error(library):
    allocator = torch_memory_pool.CUDAPluggableAllocator(library, "take", "give")
    pool = MemPool(allocator._allocator)
    with pytest.raises(RuntimeError, match="the driver said no"):
        make_in(pool, 101 * MIB)
    assert pool.snapshot() == [] and pool.use_count() == 1
    tensors = make_in(pool, 30 * MIB)
    tensors.clear()


def test_what_a_pluggable_free_throws_is_said_and_goes_no_further(library, capfd):
    allocator = torch_memory_pool.CUDAPluggableAllocator(
        library, "take", "give_and_throw"
    )
    pool = MemPool(allocator._allocator)
    make_in(pool, KIB)
    del pool
    assert "failed: the driver hung up" in capfd.readouterr().err


def test_a_library_without_the_function_is_refused(library):
    with pytest.raises(AttributeError, match="no_such"):
        torch_memory_pool.CUDAPluggableAllocator(library, "no_such", "give")
    with pytest.raises(OSError, match=r"no such file|cannot open"):
        torch_memory_pool.CUDAPluggableAllocator("/no/such.so", "take", "give")


# --- cuMem's own library --------------------------------------------------------------

CUMEM_SCRIPT = """
import atexit, importlib, torch
from vllm_rocm_memory.sim import hipsim, torch_device

module = importlib.import_module("vllm_rocm_memory._native.cumem_allocator")
uninstall = torch_device.install()
hipsim.reset("7.13")
hipsim.configure(host_reads="allow", stale_memory="poisoned")
handles = {}
module.init_module(lambda handle: handles.update({handle[2]: handle}), handles.pop)
allocator = torch.cuda.memory.CUDAPluggableAllocator(
    module.__file__, "my_malloc", "my_free")
pool = torch.cuda.MemPool(allocator._allocator)

def segments():
    return [(s["total_size"], s["allocated_size"]) for s in pool.snapshot()]

def refused(call, error, kind):
    for nth in (1, 2):
        hipsim.fail(call, nth, error)
    try:
        with torch.cuda.use_mem_pool(pool):
            torch.ones(8 << 20)
    except RuntimeError as caught:
        assert type(caught) is kind, caught
        assert call in str(caught) or kind is torch.OutOfMemoryError, caught
    else:
        raise AssertionError(call)
    hipsim.reset()
    hipsim.configure(host_reads="allow", stale_memory="poisoned")

with torch.cuda.use_mem_pool(pool):
    weights = [torch.randn(n) for n in (100, 1000, 1_000_000)]
    dropped = torch.ones(6 << 20)
del dropped
expected = [each.clone() for each in weights]
assert sorted(segments()) == [(2 << 20, 4608), (20 << 20, 4000256), (24 << 20, 0)]
assert hipsim.stats().mapped_bytes == 46 << 20
refused("hipMemCreate", 2, torch.OutOfMemoryError)
refused("hipMemSetAccess", 1, RuntimeError)
assert hipsim.stats().mapped_bytes == 46 << 20 and len(handles) == 3

x = torch.ones(1000)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, pool=pool.id):
    result = weights[1] * x

# A trimmed segment is unmapped while the pool still has it.
(trimmed,) = (s["address"] for s in pool.snapshot() if s["allocated_size"] == 0)
module.python_unmap_and_release(*handles[trimmed])
assert len(segments()) == 3

arena = module.HostArena(22 << 20)
kept = [p for p in handles if p != trimmed]
places = [(p, handles[p][1], arena.address + (2 << 20) * (handles[p][1] == 20 << 20))
          for p in kept]
for cycle in range(3):
    module.back_up(places)
    module.suspend(kept)
    assert hipsim.stats().mapped_bytes == 0
    for pointer in kept:
        module.python_create_and_map(*handles[pointer])
    assert not any(map(torch.equal, weights, expected)), "poisoned"
    module.restore(places, [])
    assert all(map(torch.equal, weights, expected))
    x.fill_(cycle)
    graph.replay()
    assert torch.equal(result, expected[1] * cycle)

@atexit.register
def release():
    global pool, graph, weights, result
    del pool, graph, weights, result
    torch.cuda.empty_cache()
    assert not handles and torch.cuda.memory_snapshot() == []
    now = hipsim.stats()
    assert (now.mappings, now.handles, now.reservations) == (0, 0, 0), now
"""


def test_pools_hold_cumem_memory_that_sleeps():
    result = subprocess.run(
        [sys.executable, "-c", CUMEM_SCRIPT],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr


# --- the end of the process -----------------------------------------------------------

EXIT_PRELUDE = """
import atexit, ctypes, threading, time, torch
from vllm_rocm_memory.sim import torch_device, torch_memory_pool
from vllm_rocm_memory.sim.torch_memory_pool import MemPool, use_mem_pool

torch_device.install()
hip = torch_memory_pool.hipsim.load()
calls = []

@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
def malloc(size, device, stream):
    calls.append(("malloc", size))
    pointer = ctypes.c_void_p()
    assert hip.hipMalloc(ctypes.byref(pointer), size) == 0
    return pointer.value

@ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
def free(pointer, size, device, stream):
    calls.append(("free", size))
    assert hip.hipFree(pointer) == 0

source = torch_memory_pool.native().Pluggable(
    *map(torch_memory_pool.address_of, (malloc, free)))
pool = MemPool(source)
"""

EXITS = {
    "with everything left": """
with use_mem_pool(pool):
    kept = [torch.ones(1 << 20) for _ in range(10)]
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, pool=pool.id):
    captured = kept[0] + 1
scope = use_mem_pool(pool)
scope.__enter__()
torch.ones(1 << 20)
""",
    "when the pool was dropped": """
with use_mem_pool(pool):
    kept = torch.ones(1 << 20)
    torch.ones(8 << 20)

@atexit.register
def drop():
    global pool
    del pool
    assert calls[-1] == ("free", 32 << 20), calls
""",
}


@pytest.mark.parametrize("what", EXITS)
def test_the_interpreter_may_exit(what):
    result = subprocess.run(
        [sys.executable, "-c", EXIT_PRELUDE + EXITS[what]],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, "")
