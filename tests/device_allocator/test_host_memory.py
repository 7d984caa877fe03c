# SPDX-License-Identifier: Apache-2.0
"""Host memory of backups, from the first sleep until the host has it again."""

import gc
import logging
from types import ModuleType
from typing import NoReturn

import pytest
from vllm.device_allocator import cumem
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.device_allocator.host_backups import POLICY_VARIABLE, HostMemoryPolicy
from vllm.device_allocator.host_capacity import HostLimit, HostMemoryError

from .simulated_gpu import CHUNK, PIECE, logged, name_of, number_of, simulator
from .world import LEVEL_1, LEVEL_2, World

REGISTER = name_of("hipHostRegister", "cuMemHostRegister_v2")
UNREGISTER = name_of("hipHostUnregister", "cuMemHostUnregister")
COPY_OUT = name_of("hipMemcpyAsync", "cuMemcpyDtoHAsync_v2")
CREATE = name_of("hipMemCreate", "cuMemCreate")
OUT_OF_MEMORY, UNKNOWN = 2, 999


@pytest.fixture(params=HostMemoryPolicy)
def policy(request: pytest.FixtureRequest, world: World) -> HostMemoryPolicy:
    policy: HostMemoryPolicy = request.param
    world.cumem.host_memory_policy = policy
    return policy


def cycle(world: World, level: tuple[str, ...]) -> None:
    world.sleep(level)
    world.check(world.after_sleep(level))
    world.wake()
    world.check(world.after_wake())


# --- Kept or given back ---------------------------------------------------------------


@pytest.mark.parametrize("word", [None, *HostMemoryPolicy])
def test_the_allocator_has_the_users_policy(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, word: str | None
) -> None:
    if word is None:
        monkeypatch.delenv(POLICY_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(POLICY_VARIABLE, word)
    assert CuMemAllocator().host_memory_policy == (word or "keep")


def test_the_allocator_refuses_what_is_no_policy(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CuMemAllocator, "instance", None)
    monkeypatch.setenv(POLICY_VARIABLE, "drop")
    with pytest.raises(ValueError, match=f"{POLICY_VARIABLE} is 'drop'"):
        CuMemAllocator.get_instance()
    assert CuMemAllocator.instance is None


def test_after_a_wake(world: World, policy: HostMemoryPolicy) -> None:
    world.allocate("weights", 4 * CHUNK)
    for _ in range(2):
        cycle(world, LEVEL_1)
        kept = 4 * CHUNK if policy is HostMemoryPolicy.KEEP else 0
        assert world.held_bytes() == simulator.stats().registered_bytes == kept
        assert world.cumem.host_bytes_needed(LEVEL_1) == 4 * CHUNK - kept
    assert number_of(REGISTER) == (4 if kept else 8)
    assert world.cumem.trim_host_memory() == kept
    assert world.held_bytes() == simulator.stats().registered_bytes == 0
    assert world.cumem.trim_host_memory() == 0


def test_after_a_wake_of_some(world: World, policy: HostMemoryPolicy) -> None:
    world.allocate("weights", 3 * CHUNK)
    world.allocate("runtime", 2 * CHUNK)
    world.sleep(LEVEL_1)
    world.check(world.after_sleep(LEVEL_1))
    world.wake(["kv_cache"])  # and the runtime state
    asleep = world.after_wake(["kv_cache"])
    world.check(asleep)
    kept = 5 if policy is HostMemoryPolicy.KEEP else 3
    assert world.held_bytes() == simulator.stats().registered_bytes == kept * CHUNK
    assert world.cumem.trim_host_memory() == (kept - 3) * CHUNK
    world.check(asleep)
    world.sleep(LEVEL_1)
    assert world.held_bytes() == 5 * CHUNK
    world.check(world.after_sleep(LEVEL_1))


def test_after_the_free_of_what_sleeps(world: World, policy: HostMemoryPolicy) -> None:
    weights = world.allocate("weights", 3 * CHUNK)
    other = world.allocate("weights", CHUNK)
    world.sleep(LEVEL_1)
    world.check(world.after_sleep(LEVEL_1))
    for ptr, left in ((weights, 1), (other, 0)):
        held, unregistered = world.held_bytes(), number_of(UNREGISTER)
        world.free(ptr)
        del world.expected[ptr]
        # PyTorch waits for whoever frees
        assert (world.held_bytes(), number_of(UNREGISTER)) == (held, unregistered)
        world.cumem.discard(())
        kept = 4 if policy is HostMemoryPolicy.KEEP else left
        assert world.held_bytes() == simulator.stats().registered_bytes == kept * CHUNK
        world.check(world.expected)


@pytest.mark.parametrize("call", [COPY_OUT, name_of("hipMemUnmap", "cuMemUnmap")])
def test_after_a_failed_sleep(
    world: World, policy: HostMemoryPolicy, call: str
) -> None:
    """What was made ready serves the retry, or is the host's again."""
    world.allocate("weights", 4 * CHUNK)
    simulator.fail(call, 1, UNKNOWN)
    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="nothing has changed") as error:
            world.sleep(LEVEL_1)
    finally:
        gc.enable()
    world.check(world.expected)
    told = f"{world.held_bytes() >> 20}.0 MiB of host memory are ready for the next try"
    kept = policy is HostMemoryPolicy.KEEP
    assert (told in str(error.value)) == kept
    assert ("trim_host_memory()" in str(error.value)) == kept
    if policy is HostMemoryPolicy.RELEASE:
        assert world.held_bytes() == simulator.stats().registered_bytes == 0
    registered = number_of(REGISTER)
    ready = world.held_bytes() // PIECE
    world.sleep(LEVEL_1)
    world.check(world.after_sleep(LEVEL_1))
    assert number_of(REGISTER) == registered + 4 * CHUNK // PIECE - ready
    if policy is HostMemoryPolicy.KEEP:
        assert ready > 0


def test_a_small_sleep_leaves_a_large_ones_memory(world: World) -> None:
    world.allocate("weights", 4 * CHUNK)
    world.allocate("runtime", CHUNK)
    cycle(world, LEVEL_1)
    registered = number_of(REGISTER)
    cycle(world, LEVEL_2)
    cycle(world, LEVEL_1)
    assert number_of(REGISTER) == registered
    assert world.held_bytes() == 5 * CHUNK


def test_a_pool_that_goes_gives_its_backup_back(world: World) -> None:
    world.cumem.host_memory_policy = HostMemoryPolicy.RELEASE
    ptr = world.allocate("weights", 2 * CHUNK)
    world.sleep(LEVEL_1)
    world.trim(ptr)
    assert world.held_bytes() == 0
    assert world.cumem.pointer_to_data == {}
    world.expected.clear()


@pytest.mark.parametrize("what", ["bytes", "addresses"])
def test_a_refused_sleep_leaves_what_is_kept(
    world: World, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    small = world.allocate("weights", 4 * CHUNK)
    cycle(world, LEVEL_1)
    world.free(small)
    del world.expected[small]
    world.allocate("weights", 5 * CHUNK)  # of which the arena holds none

    def refuse(*args: object, **options: object) -> NoReturn:
        raise MemoryError("refused")

    unregistered = number_of(UNREGISTER)
    with monkeypatch.context() as patch, pytest.raises(MemoryError) as error:
        if what == "bytes":
            patch.setattr(cumem, "check_host_capacity", refuse)
        else:
            patch.setattr(world.module, "HostArena", refuse)
        world.sleep(LEVEL_1)
    assert "trim_host_memory" not in str(error.value)
    assert number_of(UNREGISTER) == unregistered
    assert world.held_bytes() == simulator.stats().registered_bytes == 4 * CHUNK
    world.check(world.expected)
    cycle(world, LEVEL_1)
    assert world.held_bytes() == 5 * CHUNK


def test_a_backup_that_never_began_leaves_no_arena(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> NoReturn:
        raise world.module.DriverError("refused")

    world.allocate("weights", CHUNK)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="refused"):
        patch.setattr(world.module, "back_up", refuse)
        world.sleep(LEVEL_1)
    assert world.cumem._host_backups.arenas == ()


def test_memory_that_the_driver_does_not_let_go_of(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    world.cumem.host_memory_policy = HostMemoryPolicy.RELEASE
    world.allocate("weights", 4 * CHUNK)
    world.sleep(LEVEL_1)
    world.check(world.after_sleep(LEVEL_1))
    for nth in range(1, 5):
        simulator.fail(UNREGISTER, nth, UNKNOWN)
    world.wake()
    simulator.reset()
    world.check(world.after_wake())
    assert world.held_bytes() == simulator.stats().registered_bytes == 4 * CHUNK
    registered = number_of(REGISTER)
    cycle(world, LEVEL_1)
    assert number_of(REGISTER) == registered
    assert world.held_bytes() == simulator.stats().registered_bytes == 0


def test_a_policy_that_fails_costs_no_call_its_outcome(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> NoReturn:
        raise RuntimeError("the driver is gone")

    world.cumem.host_memory_policy = HostMemoryPolicy.RELEASE
    world.allocate("weights", CHUNK)
    with monkeypatch.context() as patch, logged() as lines:
        patch.setattr(world.cumem, "_give_back", fail)
        world.sleep(LEVEL_1)
        world.check(world.after_sleep(LEVEL_1))
        simulator.fail(CREATE, 1, UNKNOWN)
        with pytest.raises(RuntimeError, match="MemCreate"):
            world.wake()
        with pytest.raises(RuntimeError, match="driver is gone"):
            world.cumem.trim_host_memory()
    assert len([line for line in lines if "the driver is gone" in line]) == 3
    simulator.reset()
    world.wake()
    world.check(world.after_wake())
    assert world.held_bytes() == 0


# --- How much, and of what kind -------------------------------------------------------


@pytest.mark.parametrize("missing", [0, 1])
def test_only_what_is_missing_is_held_against_the_host(
    world: World, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    world.allocate("weights", 4 * CHUNK)
    cycle(world, LEVEL_1)
    world.allocate("weights", CHUNK)
    before = dict(world.expected)
    limit = HostLimit(CHUNK - missing, "memory.max of /pod", "Raise that limit")
    monkeypatch.setattr(
        "vllm.device_allocator.host_capacity.host_capacity", lambda: limit
    )
    assert world.cumem.host_bytes_needed(LEVEL_1) == CHUNK
    if not missing:
        world.sleep(LEVEL_1)
        world.check(world.after_sleep(LEVEL_1))
        assert world.held_bytes() == 5 * CHUNK
        return
    calls = simulator.stats().calls
    with pytest.raises(HostMemoryError, match=f"takes {CHUNK} more bytes") as caught:
        world.sleep(LEVEL_1)
    assert (caught.value.needed, caught.value.available) == (CHUNK, CHUNK - 1)
    assert simulator.stats().calls == calls
    assert world.held_bytes() == 4 * CHUNK
    world.check(before)


def test_neighbours_are_neighbours_on_the_host(world: World) -> None:
    ptrs = sorted(world.allocate("weights", CHUNK) for _ in range(5))
    world.sleep(LEVEL_1)
    tensors = [world.cumem.pointer_to_data[ptr].cpu_backup_tensor for ptr in ptrs]
    first = tensors[0]
    assert first is not None
    for index, tensor in enumerate(tensors):
        assert tensor is not None
        assert tensor.data_ptr() == first.data_ptr() + index * CHUNK


def test_the_log_says_what_was_taken(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[int] = []

    def numa_node(device: int) -> int:
        devices.append(device)
        return 0

    monkeypatch.setattr(world.module, "numa_node", numa_node)
    world.allocate("weights", 3 * CHUNK)
    with logged(level=logging.INFO) as lines:
        cycle(world, LEVEL_1)
        cycle(world, LEVEL_1)
    size = f"{3 * CHUNK >> 20}.0 MiB"
    (line,) = (line for line in lines if "host memory" in line)
    assert f"took {size} of host memory; {size} are held now" in line
    assert f"in huge pages and {size} registered" in line
    (arena,) = world.cumem._host_backups.arenas
    assert devices == [0]
    assert ("preferring NUMA node 0." in line) == (arena.node == 0)


@pytest.mark.parametrize(
    ("cpus", "threads"), [(1, 1), (2, 1), (4, 3), (16, 12), (64, 12)]
)
def test_the_cpus_leave_room_for_the_copy(
    world: World, monkeypatch: pytest.MonkeyPatch, cpus: int, threads: int
) -> None:
    asked = []
    back_up = world.module.back_up

    def counted(*args: object, threads: int) -> None:
        asked.append(threads)
        back_up(*args, threads=threads)

    monkeypatch.setattr(world.module, "back_up", counted)
    monkeypatch.setattr(cumem, "usable_cpus", lambda: cpus)
    world.allocate("weights", CHUNK)
    cycle(world, LEVEL_1)
    assert asked == [threads]


def test_what_is_not_registered_is_told_once(
    world: World, policy: HostMemoryPolicy
) -> None:
    world.allocate("weights", 3 * CHUNK)
    simulator.configure(max_locked_bytes=PIECE // 2)
    with logged() as lines:
        cycle(world, LEVEL_1)
        cycle(world, LEVEL_1)
    (line,) = lines
    assert f"{3 * CHUNK >> 20}.0 MiB" in line
    assert REGISTER.removesuffix("_v2") in line
    assert "ulimit -l" in line and "memlock=-1" in line and "IPC_LOCK" in line
    assert simulator.stats().registered_bytes == 0
    simulator.configure(max_locked_bytes=1 << 40)
    with logged() as lines:
        cycle(world, LEVEL_1)
        world.sleep(LEVEL_1)
        assert simulator.stats().registered_bytes == 3 * CHUNK
        world.cumem.trim_host_memory()
        world.check(world.after_sleep(LEVEL_1))
        world.wake()
        world.check(world.after_wake())
    assert lines == []
    world.cumem.trim_host_memory()
    simulator.configure(max_locked_bytes=PIECE // 2)
    with logged() as lines:
        cycle(world, LEVEL_1)
    assert len(lines) == 1


# --- A wake without memory ------------------------------------------------------------


def test_a_wake_takes_the_memory_of_garbage(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.allocate("weights", 3 * CHUNK)
    world.sleep(LEVEL_1)
    world.check(world.after_sleep(LEVEL_1))
    beside = world.allocate("kv_cache", CHUNK)
    emptied = world.torch.emptied
    seen = []

    class Garbage:
        def __del__(self) -> None:
            assert not world.cumem._lock.locked()
            seen.append((world.torch.emptied, simulator.stats().mapped_bytes))
            world.free(beside)

    waste: list[object] = [Garbage()]
    waste.append(waste)
    del waste
    size = world.cumem.pointer_to_data[beside].handle[1]
    simulator.fail(CREATE, 1, OUT_OF_MEMORY)
    with logged(level=logging.INFO) as lines:
        world.wake()
    del world.expected[beside]
    world.check(world.after_wake())
    assert seen == [(emptied, size)]
    assert world.torch.emptied == emptied + 1
    assert any("collects garbage" in line and "MemCreate" in line for line in lines)


def test_a_wake_is_tried_twice_and_no_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.allocate("weights", CHUNK)
    world.sleep(LEVEL_1)
    asleep = world.after_sleep(LEVEL_1)
    collected = []
    create = number_of(CREATE)
    for nth in range(1, 9):
        simulator.fail(CREATE, nth, OUT_OF_MEMORY)
    with monkeypatch.context() as patch:
        patch.setattr(gc, "collect", lambda: collected.append(number_of(CREATE)))
        with pytest.raises(
            world.module.OutOfMemoryError, match="still asleep"
        ) as error:
            world.wake()
    assert error.value.__context__ is None
    tries = number_of(CREATE) - create
    assert collected == [create + tries // 2]
    simulator.reset()
    world.check(asleep)
    world.wake()
    world.check(world.after_wake())


@pytest.mark.parametrize("tags", [None, ["weights"]])
def test_a_wake_with_memory_leaves_the_cache_and_garbage_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, tags: list[str] | None
) -> None:
    world.allocate("weights", CHUNK)
    world.sleep(LEVEL_1)
    emptied, collections = world.torch.emptied, gc.get_stats()[2]["collections"]
    world.wake(tags)
    assert world.torch.emptied == emptied
    assert gc.get_stats()[2]["collections"] == collections
