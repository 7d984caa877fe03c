# SPDX-License-Identifier: Apache-2.0
"""hipMemcpyBatchAsync, release by release."""

import time
from typing import Any, NamedTuple

import numpy as np
import pytest

from vllm_rocm_memory.sim import hipsim

SIZE_MAX = 2**64 - 1
LIMIT = 8192
PREFER_CE, SWAP, INDIRECT_SRC, INDIRECT_DST = 0x100, 0x200, 0x400, 0x800
SMALL, LARGE = 16 * 1024, 16 * 1024 + 1


class Release(NamedTuple):
    """What a release makes of a batch.

    Attributes:
        loop: One copy after the other; attributes are refused.
        flags: Those of the attributes count.
        limit: The most copies that the blit kernel takes.
    """

    loop: bool = False
    flags: bool = True
    limit: int | None = None


RELEASES = {
    "7.1": Release(loop=True),
    "7.2.3": Release(loop=True),
    "7.12": Release(flags=False),
    "7.13": Release(),
    "7.15": Release(limit=LIMIT),
    "7.16": Release(limit=LIMIT),
}
CHECKED = tuple(name for name, release in RELEASES.items() if not release.loop)
FLAGGED = tuple(name for name in CHECKED if RELEASES[name].flags)


class Set(NamedTuple):
    first_copy: int = 0
    order: int = 1
    flags: int = 0


@pytest.fixture
def release(profile: str) -> Release:
    return RELEASES[profile]


@pytest.fixture
def pages(gpu: Any) -> "Pages":
    return Pages(gpu, count=8, size=64)


class Pages:
    """Equal pages of a registered host buffer and of a device buffer."""

    def __init__(self, gpu: Any, count: int, size: int) -> None:
        self.gpu = gpu
        self.host = gpu.pinned(count * size, seed=count)
        self.device = gpu.malloc(count * size)
        self.sizes = np.full(count, size, np.uint64)
        offsets = np.arange(count, dtype=np.uint64) * np.uint64(size)
        self.sources = offsets + np.uint64(self.host.ctypes.data)
        self.destinations = offsets + np.uint64(self.device)

    def load(self, **options: Any) -> tuple[int, int]:
        result: tuple[int, int] = self.gpu.batch(
            self.destinations, self.sources, self.sizes, **options
        )
        return result

    def loaded(self) -> np.ndarray:
        """For each page: is it on the device?"""
        self.gpu.call("hipDeviceSynchronize")
        on_device = self.gpu.read(self.device, self.host.size)
        shape = (len(self.sizes), -1)
        equal: np.ndarray = (on_device.reshape(shape) == self.host.reshape(shape)).all(
            axis=1
        )
        return equal


def test_every_release_has_a_row() -> None:
    assert tuple(RELEASES) == hipsim.PROFILES


@pytest.mark.parametrize("count", [1, LIMIT, LIMIT + 1, 20000])
def test_round_trips_are_exact_in_calls_of_at_most_8192(
    gpu: Any, profile: str, count: int
) -> None:
    size = 48
    random = np.random.default_rng(count)
    host, back = gpu.pinned(count * size, seed=count), gpu.pinned(count * size)
    device = gpu.malloc(count * size)
    step = np.uint64(size)
    slots = random.permutation(count).astype(np.uint64) * step + np.uint64(device)
    sources = np.arange(count, dtype=np.uint64) * step + np.uint64(host.ctypes.data)
    targets = random.permutation(count)
    backs = targets.astype(np.uint64) * step + np.uint64(back.ctypes.data)
    sizes = np.full(count, size, np.uint64)
    stream = gpu.stream()
    for to, source in ((slots, sources), (backs, slots)):
        for start in range(0, count, LIMIT):
            part = slice(start, start + LIMIT)
            error, index = gpu.batch(to[part], source[part], sizes[part], stream)
            assert (error, index) == (0, SIZE_MAX)
    gpu.call("hipStreamSynchronize", stream)
    assert np.array_equal(back.reshape(count, size)[targets], host.reshape(count, size))
    stats = hipsim.stats()
    assert stats.batch_calls == stats.calls["hipMemcpyBatchAsync"]
    assert stats.batch_calls == 2 * -(-count // LIMIT)
    assert stats.batch_copies == 2 * count
    assert stats.copies["blit", "h2d"] == (count, count * size)
    assert stats.copies["blit", "d2h"] == (count, count * size)


def test_a_place_for_the_failing_index(pages: Pages, release: Release) -> None:
    error, _ = pages.load(fail_index=False)
    assert error == (1 if release.loop else 0)
    assert pages.loaded().all() == (error == 0)


def test_attributes_are_refused_or_taken(pages: Pages, release: Release) -> None:
    error, _ = pages.load(attributes=[Set()])
    assert error == (801 if release.loop else 0)
    assert pages.loaded().all() == (error == 0)


def test_the_missing_index_comes_before_the_attributes(
    pages: Pages, release: Release
) -> None:
    error, _ = pages.load(attributes=[Set()], fail_index=False)
    assert error == (1 if release.loop else 0)


@pytest.mark.parametrize("profile", CHECKED, indirect=True)
@pytest.mark.parametrize(
    ("sets", "error"),
    [
        ([Set(0, 1)], 0),
        ([Set(0, 2)], 0),
        ([Set(0, 3)], 0),
        ([Set(0), Set(7)], 0),
        ([Set(i) for i in range(8)], 0),
        ([Set(0, 0)], 1),
        ([Set(0, 4)], 1),
        ([Set(0), Set(1, 0)], 1),
        ([Set(1)], 1),
        ([Set(0), Set(0)], 1),
        ([Set(0), Set(5), Set(4)], 1),
        ([Set(0), Set(8)], 1),
        ([Set(i) for i in range(9)], 1),
        ([Set(flags=0xF0000002)], 0),
        ([Set(flags=1)], 0),
    ],
)
def test_attributes_are_checked(
    pages: Pages, profile: str, sets: list[Set], error: int
) -> None:
    assert pages.load(attributes=sets)[0] == error
    assert pages.loaded().all() == (error == 0)


@pytest.mark.parametrize("profile", CHECKED, indirect=True)
@pytest.mark.parametrize(
    ("sets", "error"),
    [
        ([Set(flags=SWAP | INDIRECT_SRC)], 1),
        ([Set(), Set(1, flags=SWAP | INDIRECT_DST)], 1),
        ([Set(), Set(1, flags=SWAP)], 801),
        ([Set(flags=INDIRECT_SRC)], 801),
        ([Set(flags=INDIRECT_DST | PREFER_CE)], 801),
    ],
)
def test_swapping_and_indirect_copies_are_refused_where_flags_count(
    pages: Pages, release: Release, sets: list[Set], error: int
) -> None:
    expected = error if release.flags else 0
    assert pages.load(attributes=sets) == (expected, SIZE_MAX)
    assert pages.loaded().all() == (not release.flags)


@pytest.mark.parametrize("profile", CHECKED, indirect=True)
@pytest.mark.parametrize("missing", ["attributes", "indices"])
def test_attributes_need_both_arrays(gpu: Any, profile: str, missing: str) -> None:
    host, device = gpu.pinned(64), gpu.malloc(64)
    pointers = [np.array([p], np.uint64) for p in (device, host.ctypes.data, 64)]
    sets, first = (hipsim.MemcpyAttributes * 1)(), np.zeros(1, np.uint64)
    sets[0].srcAccessOrder = 1
    error = gpu.lib.hipMemcpyBatchAsync(
        *(array.ctypes.data for array in pointers),
        1,
        None if missing == "attributes" else sets,
        None if missing == "indices" else first.ctypes.data,
        1,
        None,
        None,
    )
    assert error == 1


@pytest.mark.parametrize("profile", CHECKED, indirect=True)
def test_an_attribute_set_reaches_to_the_next_one(gpu: Any, release: Release) -> None:
    pages = Pages(gpu, count=10, size=64)
    sets = [Set(0), Set(3, flags=PREFER_CE), Set(7)]
    assert pages.load(attributes=sets)[0] == 0
    assert pages.loaded().all()
    copies = hipsim.stats().copies
    preferred = 4 if release.flags else 0
    assert copies["sdma", "h2d"].copies == preferred
    assert copies["blit", "h2d"].copies == 10 - preferred


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("prefer", [False, True])
def test_engines_by_release_size_and_flag(
    gpu: Any, release: Release, size: int, prefer: bool
) -> None:
    pages = Pages(gpu, count=3, size=size)
    sets = [] if release.loop else [Set(flags=PREFER_CE if prefer else 0)]
    assert pages.load(attributes=sets)[0] == 0
    assert pages.loaded().all()
    chosen = prefer and release.flags and not release.loop
    engine = "sdma" if chosen or size > SMALL else "blit"
    moved = {
        k: v for k, v in hipsim.stats().copies.items() if v.copies and k[1] == "h2d"
    }
    assert moved == {(engine, "h2d"): (3, 3 * size)}


@pytest.mark.parametrize("wrong", ["size", "address", "null"])
def test_a_wrong_copy_is_found(pages: Pages, release: Release, wrong: str) -> None:
    if wrong == "size":
        pages.sizes[5] = 0
    elif wrong == "address":
        pages.destinations[5] = pages.device + pages.host.size - 63
    else:
        pages.sources[5] = 0
    error, index = pages.load()
    assert error == 1
    if release.loop:
        assert index == 5
        assert pages.loaded().tolist() == [True] * 5 + [False] * 3
    else:
        assert index == (5 if wrong == "size" else SIZE_MAX)
        assert not pages.loaded().any()
    assert hipsim.stats().batch_calls == 0


@pytest.mark.parametrize("profile", CHECKED, indirect=True)
def test_an_empty_copy_is_found_without_a_place_for_its_index(
    pages: Pages, profile: str
) -> None:
    pages.sizes[0] = 0
    assert pages.load(fail_index=False)[0] == 1


def test_batches_of_nothing_and_from_nowhere(
    gpu: Any, pages: Pages, profile: str
) -> None:
    assert pages.load(count=0) == (1, -1)
    arrays = [pages.destinations, pages.sources, pages.sizes]
    for missing in range(3):
        pointers = [a.ctypes.data for a in arrays]
        pointers[missing] = 0
        index = np.zeros(1, np.uint64)
        error = gpu.lib.hipMemcpyBatchAsync(
            *pointers, 8, None, None, 0, index.ctypes.data, None
        )
        assert error == 1
    assert pages.load(stream=12345) == (400, -1)
    assert not pages.loaded().any()


def test_the_null_stream_is_a_stream(pages: Pages, profile: str) -> None:
    assert pages.load(stream=None) == (0, SIZE_MAX)
    assert pages.loaded().all()


def test_a_batch_runs_later_and_in_order(gpu: Any, pages: Pages, profile: str) -> None:
    stream, event = gpu.stream(), gpu.event()
    hipsim.configure(copy_latency_us=300_000)
    pages.load(stream=stream)
    gpu.call("hipEventRecord", event, stream)
    assert gpu.lib.hipEventQuery(event) == hipsim.NOT_READY
    gpu.call("hipEventSynchronize", event)
    hipsim.configure(copy_latency_us=0)
    assert pages.loaded().all()


@pytest.mark.parametrize("profile", CHECKED, indirect=True)
def test_a_source_read_during_the_call_is_free_afterwards(
    gpu: Any, profile: str
) -> None:
    pages = Pages(gpu, count=1, size=64)
    expected = pages.host.copy()
    hipsim.configure(copy_latency_us=100_000)
    assert pages.load(attributes=[Set(order=2)], stream=gpu.stream())[0] == 0
    pages.host[:] = 0
    hipsim.configure(copy_latency_us=0)
    assert np.array_equal(gpu.read(pages.device, 64), expected)


def test_pageable_memory_is_staged_and_waited_for(gpu: Any, release: Release) -> None:
    host, device = gpu.pageable(64, seed=1), gpu.malloc(64)
    sets = [] if release.loop else [Set()]
    hipsim.configure(copy_latency_us=100_000)
    began = time.monotonic()
    error, _ = gpu.batch([device], [host.ctypes.data], [64], gpu.stream(), sets)
    assert error == 0
    assert time.monotonic() - began >= 0.1
    assert hipsim.stats().staged_copies == 1
    assert hipsim.stats().staged_bytes == 64


def test_staged_copies_do_not_fill_the_kernels_batch(gpu: Any, profile: str) -> None:
    count = LIMIT + 1
    host, device = gpu.pageable(count, seed=1), gpu.malloc(count)
    offsets = np.arange(count, dtype=np.uint64)
    sources = offsets + np.uint64(host.ctypes.data)
    error, _ = gpu.batch(
        offsets + np.uint64(device), sources, np.ones(count, np.uint64)
    )
    assert error == 0
    assert hipsim.stats().staged_copies == count
    assert np.array_equal(gpu.read(device, count), host)


def test_device_and_host_copies_share_a_batch(gpu: Any, profile: str) -> None:
    device, pinned = gpu.malloc(256), gpu.pinned(256, seed=2)
    plain = gpu.pageable(128, seed=3)
    gpu.load(device, pinned)
    hipsim.reset()
    error, _ = gpu.batch(
        [device + 64, pinned.ctypes.data + 64, plain.ctypes.data + 64],
        [device, pinned.ctypes.data, plain.ctypes.data],
        [64, 64, 64],
    )
    assert error == 0
    gpu.call("hipDeviceSynchronize")
    for array in (gpu.read(device, 128), pinned[:128], plain):
        assert np.array_equal(array[64:], array[:64])
    copies = hipsim.stats().copies
    assert copies["blit", "d2d"].copies == 1
    assert copies["blit", "h2h"].copies == 1
    assert copies["host", "h2h"].copies == 1


def test_more_copies_than_the_kernel_has_room_for(gpu: Any, release: Release) -> None:
    pages = Pages(gpu, count=LIMIT + 1, size=4)
    stream, event = gpu.stream(), gpu.event()
    hipsim.configure(copy_latency_us=100_000)
    assert pages.load(stream=stream)[0] == 0
    gpu.call("hipEventRecord", event, stream)
    error = gpu.lib.hipStreamSynchronize(stream)
    hipsim.configure(copy_latency_us=0)
    if release.limit is None:
        assert error == 0
        assert pages.loaded().all()
        assert hipsim.stats().memory_faults == 0
        return
    # The process would be gone. Here nothing hangs, and every call says so.
    assert hipsim.stats().memory_faults == 1
    lib = gpu.lib
    assert lib.hipStreamSynchronize(stream) == 700
    assert lib.hipEventSynchronize(event) == 700
    assert lib.hipDeviceSynchronize() == 700
    assert lib.hipMemcpy(pages.device, pages.host.ctypes.data, 4, 1) == 700
    assert lib.hipGetLastError() == 700
    hipsim.reset()
    assert lib.hipDeviceSynchronize() == 0
    assert not pages.loaded().any()
    assert pages.load(attributes=[Set(flags=PREFER_CE)])[0] == 0
    assert pages.loaded().all()


@pytest.mark.parametrize("profile", FLAGGED, indirect=True)
def test_the_limit_is_on_kernel_copies_alone(gpu: Any, profile: str) -> None:
    pages = Pages(gpu, count=LIMIT + 1, size=4)
    assert pages.load(attributes=[Set(), Set(LIMIT, flags=PREFER_CE)])[0] == 0
    assert pages.loaded().all()
    assert hipsim.stats().memory_faults == 0
    copies = hipsim.stats().copies
    assert copies["blit", "h2d"].copies == LIMIT
    assert copies["sdma", "h2d"].copies == 1
