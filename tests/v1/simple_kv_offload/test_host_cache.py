# SPDX-License-Identifier: Apache-2.0
"""The CPU tier's memory: where pages lie, and how long it is registered."""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import os
import resource
import signal
import threading
import time
import weakref
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.device_allocator.host_capacity import HostLimit
from vllm.v1.simple_kv_offload import cuda_mem_ops, host_cache
from vllm.v1.simple_kv_offload.host_cache import (
    allocate_host_cache,
    block_layout,
    page_bytes,
    registration_ends,
)

from vllm_rocm_memory.sim import hipsim

from .tickets import PATIENCE

HOST_PAGE = mmap.PAGESIZE
INVALID_VALUE, OUT_OF_MEMORY = 1, 2


@pytest.fixture
def profile() -> str:
    """One release: all of them register host memory in the same way."""
    return "7.16"


# ----- where pages lie


class _Group(NamedTuple):
    """Regions alike, as one allocation of a device has them."""

    dtype: torch.dtype
    page: tuple[int, ...]  # shape
    padding: int  # elements from the end of a page to the next block's
    layers: int
    gap: int  # blocks between two layers
    swapped: bool  # the page's dimensions, in memory


_DTYPES = [
    torch.int8,
    torch.float8_e4m3fn,
    torch.bool,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex128,
]
_GROUPS = st.lists(
    st.builds(
        _Group,
        dtype=st.sampled_from(_DTYPES),
        page=st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple),
        padding=st.sampled_from([0, 0, 1, 5]),
        layers=st.integers(1, 4),
        gap=st.integers(0, 2),
        swapped=st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


def _regions(groups: list[_Group], num_blocks: int = 3) -> dict[str, torch.Tensor]:
    """The groups one after the other, each at a multiple of 256 bytes."""
    regions: dict[str, torch.Tensor] = {}
    needed, placed = 0, []
    for number, group in enumerate(groups):
        block = math.prod(group.page) + group.padding
        for layer in range(group.layers):
            placed.append((f"{number}.{layer}", group, block, needed))
            needed += (num_blocks + group.gap) * block * group.dtype.itemsize
        needed = -(-needed // 256) * 256
    memory = torch.zeros(needed, dtype=torch.uint8)
    for name, group, block, start in placed:
        flat = memory[start : start + num_blocks * block * group.dtype.itemsize]
        blocks = flat.view(group.dtype).view(num_blocks, block)
        region = blocks[:, : math.prod(group.page)].unflatten(1, group.page)
        last = region.ndim - 1
        regions[name] = region.transpose(1, last) if group.swapped else region
    return regions


@given(groups=_GROUPS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_layout_has_each_page_once_and_like_ones_side_by_side(groups, data):
    regions = _regions(groups)
    names = data.draw(st.permutations(list(regions)))
    offsets, block_bytes = block_layout({name: regions[name] for name in names})
    assert list(offsets) == names
    assert offsets == block_layout(regions).offsets, "whatever the regions' order"

    pages = sorted((offsets[name], page_bytes(regions[name])) for name in names)
    assert pages[0][0] == 0
    for (start, size), (following, _) in pairwise(pages):
        assert start + size <= following
    assert sum(pages[-1]) <= block_bytes
    assert block_bytes % 16 == 0
    alike: dict[tuple[int, int], list[str]] = {}
    for name in sorted(names, key=lambda name: regions[name].data_ptr()):
        region = regions[name]
        stride = region.stride(0) * region.element_size()
        alike.setdefault((page_bytes(region), stride), []).append(name)
    for (page, _), like in alike.items():
        assert offsets[like[0]] % 16 == 0
        assert all(offsets[b] - offsets[a] == page for a, b in pairwise(like))
    assert block_bytes - sum(size for _, size in pages) < 16 * len(alike)


def test_pages_of_whole_packet_units_are_packed():
    backing = torch.zeros(131 * 4 * 32768 // 2, dtype=torch.int8)
    regions, start = {}, 0
    for number, page in enumerate([16384, 32768] * 10):
        regions[f"layer.{number}"] = backing[start : start + 4 * page].view(4, page)
        start += 4 * page
    layout = block_layout(regions)
    assert layout.block_bytes == 10 * (16384 + 32768)
    assert layout.offsets["layer.2"] == 16384, "after layer.0, which is like it"
    assert layout.offsets["layer.1"] == 10 * 16384


@given(groups=_GROUPS, data=st.data())
@settings(max_examples=40, deadline=None)
def test_the_tensors_are_the_regions_with_blocks_of_their_own(groups, data):
    regions = _regions(groups)
    names = data.draw(st.permutations(list(regions)))
    num_blocks = data.draw(st.integers(1, 5))
    regions = {name: regions[name] for name in names}
    cache = allocate_host_cache(regions, num_blocks, pin_memory=False)
    offsets, block_bytes = block_layout(regions)
    assert list(cache) == names
    base = min(tensor.data_ptr() for tensor in cache.values())
    for name, region in regions.items():
        tensor = cache[name]
        assert tensor.dtype == region.dtype
        assert tensor.shape == (num_blocks, *region.shape[1:])
        assert tensor.stride()[1:] == region.stride()[1:]
        assert page_bytes(tensor) == page_bytes(region)
        assert tensor.data_ptr() == base + offsets[name]
        assert tensor.stride(0) * tensor.element_size() == block_bytes
        assert not tensor.any()
    written = {}
    for index, (name, block) in enumerate(
        (name, block) for name in names for block in range(num_blocks)
    ):
        value = torch.full_like(cache[name][block], index % 100 + 1)
        written[name, block] = value
        cache[name][block] = value
    for (name, block), value in written.items():
        assert torch.equal(cache[name][block], value)


def test_no_regions_are_no_memory(monkeypatch):
    monkeypatch.setattr(host_cache, "_anonymous_memory", None)
    assert allocate_host_cache({}, 8) == {}
    assert block_layout({}) == ({}, 0)


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_cache_without_blocks_is_refused(num_blocks):
    with pytest.raises(ValueError, match=f"{num_blocks} blocks: at least 1"):
        allocate_host_cache(_pages(256), num_blocks)


# ----- registration


def _pages(*sizes: int) -> dict[str, torch.Tensor]:
    """A region for each page size."""
    return {f"of {n}": torch.zeros((2, n), dtype=torch.int8) for n in sizes}


def _registered() -> tuple[int, int]:
    now = hipsim.stats()
    return now.registered_ranges, now.registered_bytes


def _calls(name: str) -> int:
    return hipsim.stats().calls.get(name, 0)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of the largest piece."""
    monkeypatch.setattr(host_cache, "MAX_REGISTRATION_BYTES", 4 * HOST_PAGE)
    return 4 * HOST_PAGE


@pytest.fixture
def mappings(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[mmap.mmap]]:
    """What was mapped, as long as it is."""

    class Mapping(mmap.mmap):
        """One that can be watched."""

    made: list[weakref.ref[mmap.mmap]] = []
    anonymous = host_cache._anonymous_memory

    def mapping(size: int) -> mmap.mmap:
        mapped = anonymous(size)
        made.append(weakref.ref(mapped))
        return mapped

    monkeypatch.setattr(mmap, "mmap", Mapping)
    monkeypatch.setattr(host_cache, "_anonymous_memory", mapping)
    return made


def test_what_fits_is_one_registration(device):
    """Whatever its size: no piece has to end anywhere."""
    cache = allocate_host_cache(_pages(4096, 100), 5)
    start = min(tensor.data_ptr() for tensor in cache.values())
    size = 5 * (4096 + 112)
    assert _registered()[0] == 1
    assert registration_ends() == [start + size]
    assert host_cache.MAX_REGISTRATION_BYTES == 64 << 30


def test_memory_that_is_not_to_be_pinned_is_not_registered(device):
    cache = allocate_host_cache(_pages(4096), 5, pin_memory=False)
    assert cache["of 4096"].shape == (5, 4096)
    assert _registered() == (0, 0)
    assert registration_ends() == []


@given(
    page=st.one_of(
        st.integers(1, 5000),
        st.sampled_from([16, 48, 4096, 6144, 8192, 12288, 16384, 20480]),
    ),
    num_blocks=st.integers(1, 300),
    limit=st.integers(1, 20).map(lambda pages: pages * HOST_PAGE),
)
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_pieces_end_at_block_ends_and_share_no_page(device, page, num_blocks, limit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_cache, "MAX_REGISTRATION_BYTES", limit)
        before = _calls("hipHostRegister")
        cache = allocate_host_cache(_pages(page), num_blocks)
        pieces = _calls("hipHostRegister") - before
    tensor = cache[f"of {page}"]
    start, stride = tensor.data_ptr(), tensor.stride(0)
    ends = registration_ends()
    assert len(ends) == pieces == _registered()[0]
    assert ends[-1] == start + num_blocks * stride
    for first, end in pairwise([start, *ends]):
        assert (first - start) % stride == first % HOST_PAGE == 0
        assert 0 < end - first <= max(limit, stride)
    packed = -(-page // 16) * 16
    if num_blocks * packed <= limit:
        assert (pieces, stride) == (1, packed)
    elif math.lcm(packed, HOST_PAGE) <= limit:
        assert stride == packed
    else:
        assert stride == -(-packed // HOST_PAGE) * HOST_PAGE
    del cache, tensor
    assert _registered() == (0, 0)
    assert registration_ends() == []


def test_one_call_for_more_than_the_runtime_takes_fails_and_pieces_do_not(
    device, small_pieces
):
    """R9: a call for 512 GiB fails, here one for more than 4 pages of the host."""
    hipsim.configure(max_registration_bytes=small_pieces)
    whole = torch.zeros(small_pieces + 1, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="hipErrorOutOfMemory"):
        cuda_mem_ops.pin_tensor(whole)
    cache = allocate_host_cache(_pages(HOST_PAGE), 10)
    assert _registered()[0] == 3
    del cache


def test_pages_of_adjacent_blocks_are_joined_within_a_piece(device, small_pieces):
    """A copy across the end of a registration is refused here."""
    hipsim.configure(one_mapping_copies=True)
    gpu = {"layer": device.device_tensor(12 * HOST_PAGE).view(12, HOST_PAGE)}
    gpu["layer"].random_(1, 200)
    cache = allocate_host_cache(gpu, 12)
    stream = torch.cuda.Stream()
    params = cuda_mem_ops.build_params(gpu, cache, stream)
    blocks = list(range(12))
    assert params.plan.copies(blocks, blocks).pages.size.tolist() == [small_pieces] * 3
    cuda_mem_ops.copy_blocks(blocks, blocks, params)
    stream.synchronize()
    assert torch.equal(cache["layer"], gpu["layer"])
    del cache


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
@pytest.mark.parametrize("error", [OUT_OF_MEMORY, INVALID_VALUE])
def test_a_piece_that_cannot_be_registered_undoes_the_others(
    device, small_pieces, mappings, nth, error
):
    hipsim.fail("hipHostRegister", nth, error)
    with pytest.raises(RuntimeError, match=f"at piece {nth} of 4: ") as raised:
        allocate_host_cache(_pages(HOST_PAGE), 15)
    text = str(raised.value)
    assert f"The CPU tier's {15 * HOST_PAGE} bytes (60.0 KiB) cannot" in text
    piece = HOST_PAGE * (3 if nth == 4 else 4)
    assert f"({error}) for {piece} bytes of host memory" in text
    assert "cpu_bytes_to_use" in text
    assert _registered() == (0, 0)
    assert _calls("hipHostUnregister") == nth - 1
    assert registration_ends() == []
    assert hipsim.load().hipPeekAtLastError() == 0
    assert [mapping() for mapping in mappings] == [None], "freed, traceback or not"
    assert raised.traceback

    cache = allocate_host_cache(_pages(HOST_PAGE), 15)
    assert _registered() == (4, 15 * HOST_PAGE)
    del cache


def test_an_interrupt_undoes_the_pieces_too(device, small_pieces, monkeypatch):
    """Registering hundreds of GiB takes long enough for somebody to lose patience."""
    pin, pinned = cuda_mem_ops.pin_tensor, []

    def interrupted(tensor: torch.Tensor) -> None:
        if len(pinned) == 2:
            raise KeyboardInterrupt
        pin(tensor)
        pinned.append(tensor.data_ptr())

    monkeypatch.setattr(cuda_mem_ops, "pin_tensor", interrupted)
    with pytest.raises(KeyboardInterrupt):
        allocate_host_cache(_pages(HOST_PAGE), 15)
    assert len(pinned) == 2
    assert _registered() == (0, 0)
    assert registration_ends() == []


# ----- what the host can hold


def _limited(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    limit = HostLimit(available, "memory.max is 8 KiB", "Raise that limit")
    monkeypatch.setattr(host_cache, "host_capacity", lambda: limit)


@pytest.mark.parametrize("pin_memory", [True, False])
def test_more_than_the_host_can_hold_is_refused_before_it_is_taken(
    device, monkeypatch, mappings, pin_memory
):
    _limited(monkeypatch, 4096)
    with pytest.raises(RuntimeError, match="cpu_bytes_to_use") as raised:
        allocate_host_cache(_pages(2048), 3, pin_memory)
    text = str(raised.value)
    assert "needs 6144 bytes (6.0 KiB) of host memory and 4096 bytes" in text
    assert "2048 bytes (2.0 KiB) too few: memory.max is 8 KiB. Raise that limit" in text
    assert mappings == []
    assert _calls("hipHostRegister") == 0
    allocate_host_cache(_pages(2048), 2, pin_memory)


def test_address_space_that_is_too_small_is_an_error_with_a_remedy(monkeypatch):
    def refuse(*args: int) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(RuntimeError, match="cpu_bytes_to_use") as raised:
        allocate_host_cache(_pages(2048), 2, pin_memory=False)
    assert "4096 bytes (4.0 KiB) of host memory cannot be mapped" in str(raised.value)
    assert "ulimit -v" in str(raised.value)


def test_a_kernel_without_huge_pages_serves(monkeypatch):
    class Mapping(mmap.mmap):
        def madvise(self, *args: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Mapping)
    assert len(allocate_host_cache(_pages(2048), 2, pin_memory=False)) == 1


def test_huge_pages_are_asked_for():
    cache = allocate_host_cache(_pages(1 << 20), 4, pin_memory=False)
    start = cache[f"of {1 << 20}"].data_ptr()
    flags = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first:
            low, high = (int(end, 16) for end in first.split("-"))
            inside = low <= start < high
        elif first == "VmFlags:" and inside:
            flags = rest
    assert "hg" in flags.split()


@pytest.mark.parametrize(
    ("limit", "locked", "missing"),
    [
        (8192, 0, 2048),
        (8192, 4096, 6144),
        (12288, 4096, 2048),
        (10240, 0, None),
        (resource.RLIM_INFINITY, 4096, None),
    ],
)
def test_a_failed_registration_says_how_much_may_not_be_locked(
    device, monkeypatch, limit, locked, missing
):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limit, limit))
    monkeypatch.setattr(host_cache, "_locked_bytes", lambda: locked)
    hipsim.fail("hipHostRegister", 1, OUT_OF_MEMORY)
    with pytest.raises(RuntimeError) as raised:
        allocate_host_cache(_pages(2048), 5)
    text = str(raised.value)
    assert ("RLIMIT_MEMLOCK" in text) == (missing is not None)
    if missing is not None:
        assert f"RLIMIT_MEMLOCK is {limit} bytes (" in text
        assert f", of which {locked} bytes" in text
        assert f"{missing} bytes ({missing / 1024:.1f} KiB) are missing" in text
    assert "too few" not in text


def test_the_lock_limit_alone_refuses_nothing(device, monkeypatch):
    """A driver may pin memory without counting it."""
    monkeypatch.setattr(resource, "getrlimit", lambda what: (4096, 4096))
    allocate_host_cache(_pages(2048), 5)


def test_the_bytes_that_are_locked_are_those_of_the_kernel():
    """A page of the host: that much, any process may lock."""
    libc = ctypes.CDLL(None, use_errno=True)
    memory = mmap.mmap(-1, HOST_PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    before = host_cache._locked_bytes()
    where = ctypes.c_void_p(address), ctypes.c_size_t(HOST_PAGE)
    assert libc.mlock(*where) == 0, ctypes.get_errno()
    assert host_cache._locked_bytes() == before + HOST_PAGE
    assert libc.munlock(*where) == 0


def test_a_failed_registration_says_how_much_memory_is_gone_by_then(
    device, monkeypatch
):
    """Other processes took it after it was looked at."""
    limits = iter([1 << 40, 4096])
    monkeypatch.setattr(
        host_cache,
        "host_capacity",
        lambda: HostLimit(next(limits), "memory.max is 8 KiB", "Raise that limit"),
    )
    hipsim.fail("hipHostRegister", 1, INVALID_VALUE)
    with pytest.raises(RuntimeError, match="hipErrorInvalidValue") as raised:
        allocate_host_cache(_pages(2048), 5)
    text = str(raised.value)
    assert "4096 bytes (4.0 KiB) of host memory are available now" in text
    assert "6144 bytes (6.0 KiB) too few: memory.max is 8 KiB" in text


# ----- the last tensor

_KEPT = {
    "tensor": lambda tensor: tensor,
    "slice": lambda tensor: tensor[1:2, 7:9],
    "element": lambda tensor: tensor[2, 3],
    "other type": lambda tensor: tensor.view(torch.float32),
    "array": lambda tensor: tensor.numpy()[1:],
    "storage": lambda tensor: tensor.untyped_storage(),
    "detached": lambda tensor: tensor.detach().clone().set_(tensor),
}


@pytest.mark.parametrize("keep", _KEPT.values(), ids=_KEPT.keys())
def test_whatever_is_left_of_it_keeps_it_registered(
    device, small_pieces, mappings, keep
):
    cache = allocate_host_cache(_pages(HOST_PAGE, 2 * HOST_PAGE), 5)
    cache["of 4096"][:] = 7
    kept = keep(cache["of 4096"])
    del cache
    assert _registered() == (5, 15 * HOST_PAGE)
    assert len(registration_ends()) == 5
    assert mappings[0]() is not None
    if keep is not _KEPT["storage"]:
        assert (np.asarray(kept).view(np.int8) == 7).all()
    del kept
    assert _registered() == (0, 0), "at once, without a collection"
    assert registration_ends() == []
    assert mappings[0]() is None
    assert _calls("hipHostUnregister") == _calls("hipHostRegister") == 5


def test_it_is_unregistered_before_it_is_unmapped(
    device, small_pieces, mappings, monkeypatch
):
    """The driver must not find somebody else's memory there."""
    unpin, seen = cuda_mem_ops.unpin_tensor, []

    def watched(tensor: torch.Tensor) -> bool:
        assert mappings[0]() is not None
        seen.append(tensor.sum().item())
        return unpin(tensor)

    monkeypatch.setattr(cuda_mem_ops, "unpin_tensor", watched)
    cache = allocate_host_cache(_pages(HOST_PAGE), 8)
    cache["of 4096"][:] = 1
    del cache
    assert seen == [small_pieces] * 2
    assert mappings[0]() is None


@pytest.mark.parametrize("how", ["refuses", "raises"])
def test_memory_that_stays_registered_is_not_freed(
    device, small_pieces, mappings, monkeypatch, how
):
    """Else whatever gets the address next could not be registered."""
    unpin = cuda_mem_ops.unpin_tensor
    calls = []

    def first_fails(tensor: torch.Tensor) -> bool:
        calls.append(tensor)
        if len(calls) > 1:
            return unpin(tensor)
        if how == "raises":
            raise RuntimeError("no context")
        hipsim.fail("hipHostUnregister", 1, 1)
        return unpin(tensor)

    monkeypatch.setattr(cuda_mem_ops, "unpin_tensor", first_fails)
    cache = allocate_host_cache(_pages(HOST_PAGE), 8)
    del cache
    assert len(calls) == 2
    assert _registered()[0] == 1
    assert mappings[0]() is not None
    assert host_cache.registration_ends() == []
    (piece,) = host_cache._stuck
    assert unpin(piece)
    host_cache._stuck.clear()
    calls.clear()
    del piece
    assert mappings[0]() is None


def test_region_after_region(device, small_pieces):
    """Pages of adjacent blocks lie side by side, and pieces end where they may."""
    regions = _pages(HOST_PAGE, 100, 24)
    caches = allocate_host_cache(regions, 9, block_after_block=False)
    assert list(caches) == list(regions)
    end = 0
    for name, cache in caches.items():
        assert (cache.shape, cache.dtype) == ((9, *regions[name].shape[1:]), torch.int8)
        assert cache.stride(0) == page_bytes(regions[name])
        assert cache.data_ptr() >= end and cache.data_ptr() % 16 == 0
        end = cache.data_ptr() + cache.nbytes
        assert not cache.any()
    pieces, size = _registered()
    assert size >= 9 * (HOST_PAGE + 124)
    assert pieces == -(-size // small_pieces) > 1
    del cache, caches
    assert _registered() == (0, 0)


def test_a_cache_in_a_cycle_goes_with_a_collection(device):
    cache = allocate_host_cache(_pages(HOST_PAGE), 8)
    cycle: list[object] = [cache]
    cycle.append(cycle)
    del cache, cycle
    gc.collect()
    assert _registered() == (0, 0)


def test_two_caches_are_two(device, small_pieces):
    first = allocate_host_cache(_pages(HOST_PAGE), 5)
    ends = registration_ends()
    second = allocate_host_cache(_pages(HOST_PAGE), 3)
    assert len(ends) == 2
    assert len(registration_ends()) == 3
    assert registration_ends() == sorted(registration_ends())
    assert set(ends) < set(registration_ends())
    del second
    assert registration_ends() == ends
    del first


def test_threads_that_let_go_at_once_unregister_once(device, small_pieces):
    for _ in range(20):
        before = _calls("hipHostUnregister")
        cache = allocate_host_cache(_pages(*range(4096, 4104)), 2)
        pieces = _registered()[0]
        held = [[tensor] for tensor in cache.values()]
        del cache
        barrier = threading.Barrier(len(held))

        def let_go(mine: list[torch.Tensor], barrier=barrier) -> None:
            barrier.wait(PATIENCE)
            mine.clear()

        threads = [threading.Thread(target=let_go, args=(mine,)) for mine in held]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert _registered() == (0, 0)
        assert registration_ends() == []
        assert _calls("hipHostUnregister") - before == pieces


def test_the_device_is_current_for_both_calls(device, small_pieces, monkeypatch):
    """A thread without a context of its own would get one, on the first device."""
    current: list[torch.device] = []

    class Current:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            current.append(self.device)

        def __exit__(self, *error: object) -> None:
            current.pop()

    def watch(name: str) -> None:
        call = getattr(cuda_mem_ops, name)

        def watched(tensor: torch.Tensor) -> None:
            seen.append((name, *current))
            call(tensor)

        monkeypatch.setattr(cuda_mem_ops, name, watched)

    seen: list[tuple[object, ...]] = []
    watch("pin_tensor")
    watch("unpin_tensor")
    monkeypatch.setattr(host_cache, "_current", Current)
    cache = allocate_host_cache(_pages(HOST_PAGE), 8)
    del cache
    cpu = torch.device("cpu")
    assert seen == [("pin_tensor", cpu)] * 2 + [("unpin_tensor", cpu)] * 2


def test_the_device_made_current_is_that_of_the_caches():
    second = host_cache._current(torch.device("cuda", 1))
    assert isinstance(second, torch.cuda.device)
    assert second.idx == 1


def test_nothing_is_unregistered_at_exit(device, monkeypatch):
    """The runtime may be gone by then, and the kernel takes it all back."""
    made = []

    class Finalize(weakref.finalize):
        __slots__ = ()

        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(weakref, "finalize", Finalize)
    cache = allocate_host_cache(_pages(HOST_PAGE), 8)
    assert [finalizer.atexit for finalizer in made] == [False]
    del cache
    assert [finalizer.alive for finalizer in made] == [False]


def test_a_forked_process_leaves_its_parents_registration_alone(device, small_pieces):
    cache = allocate_host_cache(_pages(HOST_PAGE), 8)
    pieces = _registered()
    child = os.fork()
    if child == 0:
        # Whatever happens here must not get to pytest's own end of the test.
        try:
            cuda_mem_ops.unpin_tensor = lambda tensor: os._exit(3)
            cache["of 4096"][:] = 9
            cache.clear()
            os._exit(4 if registration_ends() else 0)
        finally:
            os._exit(5)
    assert _exit_status(child) == 0
    assert _registered() == pieces
    assert not cache["of 4096"].any()
    del cache
    assert _registered() == (0, 0)


def _exit_status(child: int) -> int:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child does not end")


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * HOST_PAGE


def test_a_hundred_rounds_leave_nothing(device, small_pieces):
    regions = _pages(16 * HOST_PAGE)
    allocate_host_cache(regions, 64)
    before = _mapped_bytes()
    for i in range(100):
        if i % 3 == 0:
            hipsim.fail("hipHostRegister", 1 + i % 64, OUT_OF_MEMORY)
            with pytest.raises(RuntimeError):
                allocate_host_cache(regions, 64)
        else:
            cache = allocate_host_cache(regions, 64)
            cache["of 65536"][i % 64] = 1
            del cache
    assert _registered() == (0, 0)
    assert registration_ends() == []
    assert _mapped_bytes() - before < 8 * 64 * 16 * HOST_PAGE, "each round has 4 MiB"
