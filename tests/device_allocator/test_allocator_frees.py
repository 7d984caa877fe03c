# SPDX-License-Identifier: Apache-2.0
"""PyTorch frees from any thread, at any moment, and nobody ever waits for another."""

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from vllm.device_allocator import cumem
from vllm.device_allocator.host_backups import HostMemoryPolicy
from vllm.device_allocator.host_capacity import HostLimit, HostMemoryError

from .simulated_gpu import (
    CHUNK,
    GRANULARITY,
    IS_HIP,
    logged,
    name_of,
    number_of,
    simulator,
)
from .world import LEVEL_1, LEVEL_2, World

DEADLINE = 30  # seconds
REGISTER = name_of("hipHostRegister", "cuMemHostRegister_v2")


def in_thread(work: Callable[[], object]) -> None:
    """Runs in another thread, and fails when that does not come back."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(DEADLINE)
    assert not thread.is_alive(), "waits for a lock"


@contextmanager
def during_sleep(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]
) -> Iterator[None]:
    """Runs something in the middle of the next sleep, which has the lock then."""
    ran = []

    def check(needed: int) -> None:
        work()
        ran.append(needed)

    monkeypatch.setattr(cumem, "check_host_capacity", check)
    yield
    assert len(ran) == 1


@pytest.mark.parametrize("runs", [in_thread, lambda work: work()], ids=["other", "own"])
def test_a_free_during_a_sleep(
    world: World, monkeypatch: pytest.MonkeyPatch, runs: Callable
) -> None:
    """In another thread, or in the sleeping one as garbage is collected there."""
    ptr = world.allocate("weights", CHUNK + GRANULARITY)
    world.allocate("weights", GRANULARITY)
    size = world.cumem.get_current_usage()

    def free() -> None:
        world.free(ptr)
        assert ptr in world.cumem.pointer_to_data
        assert world.module.is_mapped(ptr)

    with during_sleep(monkeypatch, lambda: runs(free)):
        world.sleep(LEVEL_1)
    assert ptr not in world.cumem.pointer_to_data
    assert ptr not in world.module.ranges()
    assert world.cumem.get_current_usage() < size
    after = world.after_sleep(LEVEL_1)
    world.check({other: block for other, block in after.items() if other != ptr})
    world.wake()
    world.check(world.after_wake())


def test_a_free_beside_copies(world: World) -> None:
    """The sleep copies for a while, and the free does not wait for that."""
    ptr = world.allocate("kv_cache", GRANULARITY)
    world.allocate("weights", GRANULARITY)
    simulator.configure(copy_latency_us=1_000_000)
    copy = name_of("hipMemcpyAsync", "cuMemcpyDtoHAsync_v2")
    before = number_of(copy)
    sleeper = threading.Thread(target=world.sleep, args=(LEVEL_1,), daemon=True)
    sleeper.start()
    for _ in range(DEADLINE * 1000):
        if number_of(copy) > before:
            break
        threading.Event().wait(0.001)
    in_thread(lambda: world.free(ptr))
    assert sleeper.is_alive(), "the free waited for the copy"
    sleeper.join(DEADLINE)
    assert not sleeper.is_alive()
    assert ptr not in world.cumem.pointer_to_data
    assert ptr not in world.module.ranges()


CUDA_NAMES = {"hipMemUnmap": "cuMemUnmap", "hipMemcpyAsync": "cuMemcpyDtoHAsync_v2"}


def out_of_memory(size: int, **options: object) -> object:
    raise MemoryError(f"no address space for {size} bytes")


class LateLock:
    """A lock at whose release something happens just before it is free."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._lock = threading.Lock()
        self._work: Callable[[], object] | None = work

    def acquire(self, blocking: bool = True) -> bool:
        return self._lock.acquire(blocking)

    def release(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()
        self._lock.release()


@pytest.mark.parametrize("ends", ["well", "with an error"])
def test_a_free_at_the_last_moment(
    world: World, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    ptr = world.allocate("weights", CHUNK)
    lock = LateLock(lambda: in_thread(lambda: world.free(ptr)))
    monkeypatch.setattr(world.cumem, "_lock", lock)
    if ends == "well":
        world.sleep(LEVEL_1)
    else:
        simulator.fail(name_of("hipMemUnmap", "cuMemUnmap"), 1, 999)
        with pytest.raises(RuntimeError):
            world.sleep(LEVEL_1)
    assert world.module.ranges() == []
    assert world.cumem.pointer_to_data == {}


def test_pytorch_may_hold_its_mutex(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread has the mutex and frees, while the sleeping one wants the mutex."""
    ptr = world.allocate("weights", CHUNK)
    has_mutex, sleeps = threading.Event(), threading.Event()

    def free_later() -> None:
        with world.torch.mutex:
            has_mutex.set()
            assert sleeps.wait(DEADLINE)
            world.free(ptr)

    other = threading.Thread(target=free_later, daemon=True)
    other.start()
    assert has_mutex.wait(DEADLINE)
    with during_sleep(monkeypatch, sleeps.set):
        in_thread(lambda: world.sleep(LEVEL_1))
    other.join(DEADLINE)
    assert not other.is_alive()
    assert world.module.ranges() == []


def test_an_allocation_during_a_sleep_stays_awake(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = world.allocate("weights", CHUNK)
    new = []

    def allocate() -> None:
        new.append(world.allocate("weights", CHUNK))

    with during_sleep(monkeypatch, lambda: in_thread(allocate)):
        world.sleep(LEVEL_1)
    assert world.states() == {old: "backed up", new[0]: "mapped"}
    world.wake()
    world.check(world.expected)


def test_a_free_waits_for_the_device(world: World) -> None:
    ptr = world.allocate("weights", CHUNK)
    asleep = world.allocate("kv_cache", CHUNK)
    world.cumem.discard("kv_cache")
    world.torch.synchronized.clear()
    world.free(asleep)
    assert world.torch.synchronized == []
    world.free(ptr)
    assert world.torch.synchronized == [0]


def test_a_device_that_cannot_be_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while a capture goes on: the memory is freed later, not under running work."""
    ptr = world.allocate("weights", CHUNK)

    def refuse(device: int) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with monkeypatch.context() as capturing, logged() as lines:
        capturing.setattr(torch.accelerator, "synchronize", refuse)
        world.free(ptr)
    assert any(f"{ptr:#x}" in line and "capturing" in line for line in lines)
    assert world.module.is_mapped(ptr)
    world.wake()
    assert world.module.ranges() == []


def test_other_threads_allocate_all_the_time(world: World) -> None:
    """Nobody waits for whoever is looking at the allocations, or trips him up."""
    ptrs = range(GRANULARITY, 5000 * GRANULARITY, GRANULARITY)
    done = threading.Event()
    live = world.cumem.pointer_to_data

    def allocate() -> None:
        while not done.is_set():
            for ptr in ptrs:
                world.cumem._python_malloc_callback((0, GRANULARITY, ptr, []))
            for ptr in ptrs:
                del live[ptr]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=allocate, daemon=True)
    thread.start()
    try:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            world.cumem.get_current_usage()
            world.cumem.host_bytes_needed(LEVEL_1)
            world.cumem.discard(("kv_cache",))
            world.wake()
    finally:
        done.set()
        thread.join(DEADLINE)
        sys.setswitchinterval(interval)
    assert live == {}


# --- Pools ---------------------------------------------------------------------------


@pytest.fixture
def pools(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(cumem, "use_memory_pool_with_allocator", world.use_pool)
    return world


def test_what_a_scope_leaves_unused_is_given_back(pools: World) -> None:
    with pools.cumem.use_memory_pool("weights"):
        kept, unused = pools.new_segment(CHUNK), pools.new_segment(CHUNK)
        pools.pools[-1].segments[unused] = 0
    (entry,) = pools.cumem.allocator_and_pools["weights"]
    assert pools.states() == {kept: "mapped"}
    assert not pools.module.is_mapped(unused)
    assert pools.torch.synchronized[-1] == 0

    # the address is not anybody else's until PyTorch gives it back
    assert unused in pools.module.ranges()
    assert pools.cumem.get_current_usage() == CHUNK
    pools.sleep(LEVEL_1)
    pools.wake()
    assert not pools.module.is_mapped(unused)
    pools.free(unused)
    assert unused not in pools.module.ranges()

    entry[0].segments[kept] = 0
    with pools.cumem.use_memory_pool("other"):
        pass
    assert pools.module.is_mapped(kept)
    with pools.cumem.use_memory_pool("weights"):
        assert not pools.module.is_mapped(kept)


def test_unused_memory_that_sleeps_does_not_wake(pools: World) -> None:
    with pools.cumem.use_memory_pool("weights"):
        ptr = pools.new_segment(CHUNK)
    pools.sleep(LEVEL_1)
    pools.cumem.allocator_and_pools["weights"][0][0].segments[ptr] = 0
    with pools.cumem.use_memory_pool("weights"):
        pass
    pools.wake()
    assert not pools.module.is_mapped(ptr)
    assert pools.cumem.pointer_to_data == {}


def test_a_pool_in_use_is_left_alone(pools: World) -> None:
    """Its free segments may be handed out again, and are where they are expected."""
    with pools.cumem.use_memory_pool("weights"):
        ptr = pools.new_segment(CHUNK)
        pools.pools[-1].segments[ptr] = 0
        with (
            pools.cumem.use_memory_pool("runtime"),
            pools.cumem.use_memory_pool("weights"),
        ):
            assert pools.module.is_mapped(ptr)
        pools.pools[-1].segments[ptr] = CHUNK
    pools.check(pools.expected)


def test_an_error_in_a_scope_closes_its_pool(pools: World) -> None:
    with pytest.raises(KeyError), pools.cumem.use_memory_pool("weights"):
        ptr = pools.new_segment(CHUNK)
        pools.pools[-1].segments[ptr] = 0
        raise KeyError
    assert pools.cumem.current_tag == "default"
    with pools.cumem.use_memory_pool("weights"):
        assert not pools.module.is_mapped(ptr)


def test_tags_nest_and_threads_have_their_own(pools: World) -> None:
    tag = pools.cumem.use_memory_pool
    seen, entered, leave = {}, threading.Event(), threading.Event()

    def other() -> None:
        seen["no scope"] = pools.cumem.current_tag
        with pools.cumem._tagged("kv_cache"):
            seen["own scope"] = pools.cumem.current_tag
            entered.set()
            assert leave.wait(DEADLINE)

    assert pools.cumem.current_tag == "default"
    with tag("weights"):
        with tag():
            assert pools.cumem.current_tag == "default"
        assert pools.cumem.current_tag == "weights"
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        assert entered.wait(DEADLINE)
        assert pools.cumem.current_tag == "weights"
    # a thread in no scope allocates for the one whose capture it takes part in
    assert pools.cumem.current_tag == "kv_cache"
    leave.set()
    thread.join(DEADLINE)
    assert pools.cumem.current_tag == "default"
    assert seen == {"no scope": "weights", "own scope": "kv_cache"}


# --- What sleep refuses and says ------------------------------------------------------


def test_a_backup_that_the_host_cannot_hold(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.allocate("weights", CHUNK)
    world.allocate("kv_cache", CHUNK)
    backup = CHUNK
    limit = HostLimit(backup - 1, "memory.max of /pod is 1 MiB", "Raise that limit")
    monkeypatch.setattr(
        "vllm.device_allocator.host_capacity.host_capacity", lambda: limit
    )
    before = simulator.stats()
    with pytest.raises(HostMemoryError, match=r"memory\.max of /pod") as caught:
        world.sleep(LEVEL_1)
    assert caught.value.needed == backup
    assert simulator.stats().calls == before.calls
    world.check(world.expected)

    # what needs no backup is not refused
    world.sleep(())
    world.check(world.after_sleep(()))


@pytest.mark.parametrize("policy", HostMemoryPolicy)
@pytest.mark.parametrize("call", ["hipMemUnmap", "hipMemcpyAsync", "no memory"])
def test_a_failed_sleep_leaves_its_host_memory_to_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch, call: str, policy: HostMemoryPolicy
) -> None:
    """Or gives it back at once; garbage may be collected much later."""
    world.cumem.host_memory_policy = policy
    world.allocate("weights", CHUNK)
    kind: type[Exception] = RuntimeError
    with monkeypatch.context() as patched:
        if call == "no memory":
            kind = MemoryError
            patched.setattr(world.module, "HostArena", out_of_memory)
        elif IS_HIP:
            simulator.fail(call, 1, 999)
        else:
            simulator.fail(CUDA_NAMES[call], 1, 999)
        gc.disable()
        try:
            world.sleep(LEVEL_1)
        except kind as error:
            text = str(error)
        finally:
            gc.enable()
    assert "nothing has changed" in text
    world.check(world.expected)
    kept = call != "no memory" and policy is HostMemoryPolicy.KEEP
    assert simulator.stats().registered_bytes == (CHUNK if kept else 0)
    assert world.cumem.host_bytes_needed(LEVEL_1) == (0 if kept else CHUNK)

    registrations = number_of(REGISTER)
    world.sleep(LEVEL_1)
    world.check(world.after_sleep(LEVEL_1))
    assert number_of(REGISTER) - registrations == (0 if kept else 1)


def test_host_bytes_are_known_beforehand(world: World) -> None:
    needed = world.cumem.host_bytes_needed
    for tag, blocks in (("weights", 3), ("kv_cache", 2), ("default", 1)):
        world.allocate(tag, blocks * GRANULARITY)
    assert needed(LEVEL_1) == 3 * GRANULARITY
    assert needed("kv_cache") == 2 * GRANULARITY
    assert needed(None) == GRANULARITY
    assert needed(()) == 0
    world.sleep(LEVEL_1)
    assert simulator.stats().registered_bytes == 3 * GRANULARITY
    world.wake(["kv_cache"])
    # the weights are asleep, with a backup
    assert needed((*LEVEL_1, "kv_cache")) == 2 * GRANULARITY


def test_the_cache_is_emptied_once_a_sleep(world: World) -> None:
    world.allocate("default", CHUNK)
    emptied = world.torch.emptied
    world.cumem.sleep()
    assert world.torch.emptied == emptied + 1
    world.check(world.after_sleep(("default",)))
    world.wake()
    assert world.torch.emptied == emptied + 1, "a wake leaves PyTorch its cache"
    world.check(world.after_wake())


def test_a_second_sleep_keeps_the_first_ones_policy(world: World) -> None:
    for tag in ("weights", "kv_cache"):
        world.allocate(tag, CHUNK)
    world.sleep(LEVEL_1)
    world.check(world.after_sleep(LEVEL_1))
    with logged() as lines:
        world.sleep(())
        world.cumem.discard(("weights", "kv_cache"))
    assert len(lines) == 2 and all("asleep" in line for line in lines)
    world.check(world.expected)
    with logged() as lines:
        world.sleep(LEVEL_1)
        world.cumem.discard("kv_cache")
    assert lines == []
    world.wake()
    world.check(world.after_wake())


@pytest.mark.parametrize("policy", HostMemoryPolicy)
def test_a_backup_lives_as_long_as_its_allocation(
    world: World, policy: HostMemoryPolicy
) -> None:
    """Its memory stays for the next one, or goes with the next call."""
    world.cumem.host_memory_policy = policy
    ptr = world.allocate("weights", CHUNK)
    world.sleep(LEVEL_1)
    data = world.cumem.pointer_to_data[ptr]
    assert data.cpu_backup_tensor is not None
    assert data.cpu_backup_tensor.dtype is torch.uint8
    assert data.cpu_backup_tensor.shape == (CHUNK,)
    world.free(ptr)
    assert data.cpu_backup_tensor is None
    # PyTorch waits for the callback, so none gives memory back.
    assert simulator.stats().registered_bytes == CHUNK
    world.cumem.discard(())
    if policy is HostMemoryPolicy.KEEP:
        assert simulator.stats().registered_bytes == CHUNK
        assert world.cumem.trim_host_memory() == CHUNK
    assert simulator.stats().registered_ranges == 0
    assert world.cumem.trim_host_memory() == 0


def test_host_memory_serves_the_next_sleep(world: World) -> None:
    world.allocate("weights", 3 * CHUNK)
    registered = []
    for _ in range(3):
        world.sleep(LEVEL_1)
        world.check(world.after_sleep(LEVEL_1))
        registered.append(number_of(REGISTER))
        assert simulator.stats().registered_bytes == 3 * CHUNK
        world.wake()
        world.check(world.after_wake())
        assert world.cumem.host_bytes_needed(LEVEL_1) == 0
    assert len(set(registered)) == 1
    world.cumem.trim_host_memory()
    assert simulator.stats().registered_ranges == 0
    assert world.cumem.host_bytes_needed(LEVEL_1) == 3 * CHUNK


def test_a_smaller_backup_leaves_the_host_as_it_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at level 2, after which one of level 1 finds its memory again."""

    def check(num_bytes: int) -> None:
        raise AssertionError(f"{num_bytes} bytes are asked for")

    world.allocate("weights", 3 * CHUNK)
    world.allocate("runtime", CHUNK)
    world.sleep(LEVEL_1)
    world.wake()
    world.check(world.after_wake())
    held = world.held_bytes()
    assert held == simulator.stats().registered_bytes == 4 * CHUNK
    monkeypatch.setattr(cumem, "check_host_capacity", check)
    registrations = number_of(REGISTER)
    for level in (LEVEL_2, LEVEL_1):
        assert world.cumem.host_bytes_needed(level) == 0
        world.sleep(level)
        world.check(world.after_sleep(level))
        world.wake()
        world.check(world.after_wake())
        assert world.held_bytes() == held
    assert number_of(REGISTER) == registrations


def test_memory_that_does_not_serve_is_given_back_before_more_is_taken(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ptr = world.allocate("weights", 2 * CHUNK)
    world.sleep(LEVEL_1)
    world.check(world.after_sleep(LEVEL_1))
    world.wake()
    world.check(world.after_wake())
    world.free(ptr)
    del world.expected[ptr]
    world.allocate("weights", 4 * CHUNK)
    checked = []

    def check(num_bytes: int) -> None:
        checked.append((num_bytes, simulator.stats().registered_bytes))

    monkeypatch.setattr(cumem, "check_host_capacity", check)
    assert world.cumem.host_bytes_needed(LEVEL_1) == 2 * CHUNK, "beyond what is held"
    world.sleep(LEVEL_1)
    world.check(world.after_sleep(LEVEL_1))
    assert checked == [(2 * CHUNK, 2 * CHUNK)]
    assert simulator.stats().registered_bytes == 4 * CHUNK
    world.wake()
    world.check(world.after_wake())


def test_host_memory_with_a_backup_is_left_alone(world: World) -> None:
    world.allocate("weights", CHUNK)
    world.allocate("runtime", CHUNK)
    world.sleep(LEVEL_1)
    world.check(world.after_sleep(LEVEL_1))
    world.wake(["kv_cache"])  # and the runtime state
    world.check(world.after_wake(["kv_cache"]))
    assert world.cumem.trim_host_memory() == CHUNK
    assert simulator.stats().registered_bytes == CHUNK
    world.check(world.expected)
    world.sleep(LEVEL_1)
    world.check(world.after_sleep(LEVEL_1))
    assert simulator.stats().registered_bytes == 2 * CHUNK
    world.wake()
    world.check(world.after_wake())
