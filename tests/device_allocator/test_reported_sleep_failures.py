# SPDX-License-Identifier: Apache-2.0
"""What users of sleep mode reported, each with the right outcome."""

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch
from vllm.device_allocator import cumem

from .simulated_gpu import (
    CHUNK,
    GRANULARITY,
    IS_HIP,
    PIECE,
    PROFILES,
    free_bytes,
    name_of,
    number_of,
    simulator,
    use_device,
)
from .world import LEVEL_1, LEVEL_2, World

every_profile = pytest.mark.parametrize("profile", PROFILES, indirect=True)
only_hip = pytest.mark.skipif(not IS_HIP, reason="a trait of HIP")
CREATE = name_of("hipMemCreate", "cuMemCreate")
RELEASE = name_of("hipMemRelease", "cuMemRelease")


# --- vLLM #34600, #45565, #46054, #13941: a wake that runs out of memory -------------


@every_profile
def test_a_wake_that_fails_half_way_is_undone(world: World) -> None:
    for _ in range(3):
        world.allocate("weights", CHUNK)
    world.sleep(LEVEL_1)
    asleep = world.after_sleep(LEVEL_1)
    handles = simulator.stats().handles
    # in the wake, and again where it is tried once more
    simulator.fail(CREATE, 3, 2)
    simulator.fail(CREATE, 6, 2)
    with pytest.raises(world.module.OutOfMemoryError) as caught:
        world.wake()
    assert simulator.stats().handles == handles == 0
    world.check(asleep)
    text = str(caught.value)
    assert "3 allocations" in text and f"{3 * CHUNK >> 20}.0 MiB in all" in text
    assert "still asleep" in text
    assert "free" in text
    if IS_HIP:
        assert simulator.load().hipPeekAtLastError() == 0

    world.wake()
    world.check(world.after_wake())
    world.free_all()
    if IS_HIP:  # where CUDA refuses fabric handles, it is asked twice
        assert number_of(RELEASE) == number_of(CREATE) - 2


@contextmanager
def taken(size: int) -> Iterator[None]:
    """Somebody else's device memory."""
    lib = simulator.load()
    simulator.configure(stale_memory="clean")  # or the machine has to have it all
    address = ctypes.c_void_p() if IS_HIP else ctypes.c_ulonglong()
    use_device()
    allocate = getattr(lib, name_of("hipMalloc", "cuMemAlloc_v2"))
    assert allocate(ctypes.byref(address), size) == 0
    yield
    assert getattr(lib, name_of("hipFree", "cuMemFree_v2"))(address) == 0


@every_profile
def test_a_wake_works_once_memory_is_free(world: World) -> None:
    for _ in range(3):
        world.allocate("weights", CHUNK)
    world.sleep(LEVEL_1)
    asleep = world.after_sleep(LEVEL_1)
    free = free_bytes()
    with taken(free - 2 * CHUNK):
        left = free_bytes()
        assert left < 3 * CHUNK
        with pytest.raises(world.module.OutOfMemoryError):
            world.wake()
        world.check(asleep)
        assert free_bytes() == left
    world.wake()
    world.check(world.after_wake())


@every_profile
def test_a_wake_without_memory_empties_the_cache_and_is_tried_once_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before, because that takes time, and what is in the cache is used again."""
    for _ in range(3):
        world.allocate("weights", CHUNK)
    world.sleep(LEVEL_1)
    emptied = []
    with ExitStack() as cache:
        cache.enter_context(taken(free_bytes() - 2 * CHUNK))

        def empty_cache() -> None:
            with world.torch.mutex:
                emptied.append(sorted(world.states().values()))
                cache.close()

        monkeypatch.setattr(torch.accelerator, "empty_cache", empty_cache)
        world.wake()
    assert emptied == [3 * ["backed up"]]
    world.check(world.after_wake())


# --- legacy-rocm-build #6021, vLLM #37533, #43022: memory that stays used ------------


@every_profile
def test_sleep_gives_memory_back_and_keeps_addresses(world: World) -> None:
    free = free_bytes()
    ptrs = [
        world.allocate(tag, 2 * CHUNK + GRANULARITY) for tag in ("weights", "kv_cache")
    ]
    size = sum(world.cumem.pointer_to_data[ptr].handle[1] for ptr in ptrs)
    assert free - free_bytes() == size == world.cumem.get_current_usage()
    world.sleep(LEVEL_1)
    world.check(world.after_sleep(LEVEL_1))
    assert free_bytes() == free
    assert sorted(world.module.ranges()) == sorted(ptrs)
    world.wake()
    assert free - free_bytes() == size
    world.check(world.after_wake())


@only_hip
@pytest.mark.parametrize("profile", ["7.2.3"], indirect=True)
def test_an_address_that_is_lost_is_named(world: World) -> None:
    ptr = world.allocate("weights", CHUNK)
    simulator.configure(ignore_address_hints=True)
    with pytest.raises(RuntimeError, match=f"{ptr:#x}"):
        world.sleep(LEVEL_1)
    asleep = world.after_sleep(LEVEL_1)
    world.check(asleep)
    with pytest.raises(RuntimeError, match=f"{ptr:#x}"):
        world.wake()
    world.check(asleep)
    simulator.configure(ignore_address_hints=False)
    world.wake()
    world.check(world.after_wake())


# --- vLLM #44972: a state read from pages that nobody cleaned ------------------------


@every_profile
def test_woken_memory_is_restored_or_zero(world: World) -> None:
    weights = world.allocate("weights", 2 * CHUNK + GRANULARITY)
    cache = world.allocate("kv_cache", 2 * CHUNK + GRANULARITY)
    beside = world.allocate("other", CHUNK)
    world.sleep((*LEVEL_1, "other"))
    world.check(world.after_sleep((*LEVEL_1, "other")))

    world.wake(["weights"])
    world.check(world.after_wake(["weights"]))
    assert world.states() == {
        weights: "mapped",
        cache: "discarded",
        beside: "mapped",
    }
    world.wake(["kv_cache"])
    world.check(world.after_wake(["kv_cache"]))
    if not IS_HIP:
        # nothing is promised, and nothing is spent on it
        assert np.all(world.gpu.read(cache) == 0xFF)


@every_profile
@pytest.mark.parametrize("level", [LEVEL_1, LEVEL_2], ids=["level-1", "level-2"])
def test_a_late_fill_does_not_win(
    world: World, level: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    map_memory = cumem.create_and_map
    fill = getattr(simulator.load(), name_of("hipMemset", "cuMemsetD8_v2"))

    def create_and_map(handle: cumem.HandleType) -> None:
        map_memory(handle)
        ptr = handle[2]
        for size in world.module.chunks(ptr):
            assert fill(ptr, 0xA5, size) == 0
            ptr += size

    for tag in ("weights", "kv_cache", "runtime"):
        world.allocate(tag, CHUNK + GRANULARITY)
    world.sleep(level)
    world.check(world.after_sleep(level))
    monkeypatch.setattr(cumem, "create_and_map", create_and_map)
    simulator.configure(fill_latency_us=20_000)
    world.wake()
    world.check(world.after_wake())


def test_every_allocation_is_mapped_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ptrs = [world.allocate(tag, CHUNK) for tag in ("weights", "kv_cache", "weights")]
    mapped = []
    map_memory = cumem.create_and_map

    def create_and_map(handle: cumem.HandleType) -> None:
        mapped.append(handle[2])
        map_memory(handle)

    monkeypatch.setattr(cumem, "create_and_map", create_and_map)
    world.sleep(LEVEL_1)
    world.wake(["weights"])
    assert mapped == [ptrs[0], ptrs[2]]
    world.wake()
    assert mapped == [ptrs[0], ptrs[2], ptrs[1]]
    world.wake()
    assert len(mapped) == 3


# --- vLLM #51369: Tensor.item() on woken memory ---------------------------------------


@only_hip
@pytest.mark.parametrize("profile", ["7.2.3", "7.13", "7.16"], indirect=True)
def test_the_host_reads_woken_memory(world: World) -> None:
    ptr = world.allocate("weights", CHUNK + GRANULARITY)
    world.sleep(LEVEL_1)
    world.wake()
    simulator.configure(host_reads="fault")
    content = world.expected[ptr].content
    assert content is not None
    assert ctypes.string_at(ptr, content.size) == content.tobytes()


# --- vLLM #56410, #16663: host memory beyond the backup -------------------------------


@only_hip
@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_host_memory_is_the_backup(world: World, tag: str) -> None:
    for _ in range(340):
        world.allocate(tag, 9 * GRANULARITY, fill=False)
    backup = world.cumem.get_current_usage() if tag in LEVEL_1 else 0
    world.sleep(LEVEL_1)
    held = simulator.stats().registered_bytes
    assert backup <= held <= 1.02 * backup
    assert simulator.stats().registered_ranges == -(-backup // PIECE)
    world.wake()
    assert simulator.stats().registered_bytes == held
    world.cumem.trim_host_memory()
    assert simulator.stats().registered_bytes == 0
    assert simulator.stats().host_allocations == 0


# --- vLLM #14189, trl #5794: expandable segments --------------------------------------

SETTINGS = {
    "expandable_segments:True": "expandable_segments:False",
    "max_split_size_mb:512,expandable_segments:True,"
    "roundup_power2_divisions:[256:1,>:4]": (
        "max_split_size_mb:512,expandable_segments:False,"
        "roundup_power2_divisions:[256:1,>:4]"
    ),
    "expandable_segments:1,garbage_collection_threshold:0.8": (
        "expandable_segments:False,garbage_collection_threshold:0.8"
    ),
    "max_split_size_mb:64": None,
    "expandable_segments:False": None,
}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is written to PyTorch's configuration; no variable sets it."""
    for name in ("ALLOC_CONF", "CUDA_ALLOC_CONF", "HIP_ALLOC_CONF"):
        monkeypatch.delenv(f"PYTORCH_{name}", raising=False)
    written: list[str] = []
    monkeypatch.setattr(cumem, "set_alloc_conf", written.append)
    return written


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(
    "name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"]
)
def test_expandable_segments_are_off_in_a_pool(
    world: World,
    written: list[str],
    name: str,
    settings: str,
    fails: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(name, settings)
    monkeypatch.setattr(cumem, "use_memory_pool_with_allocator", world.use_pool)
    off = SETTINGS[settings]

    class Stop(Exception):
        pass

    try:
        with world.cumem.use_memory_pool("weights"):
            assert written == ([] if off is None else [off])
            if fails:
                raise Stop
    except Stop:
        assert fails
    assert written == ([] if off is None else [off, settings])
