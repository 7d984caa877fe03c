# SPDX-License-Identifier: Apache-2.0
"""Every driver call of every operation fails in turn.

An operation is run once to see which calls it makes. Then it is run anew for each of
them, with that one call failing, and afterwards

* each allocation has the state and the bytes that it had before, or those that it was
  to have, and it is the same for all of them;
* the error, raised or logged, names the call;
* the operation succeeds when it is repeated;
* nothing is left once everything is freed, and where host memory is given back after a
  wake, none is held that has no backup.

A backup has several pieces of host memory, so each of them is refused in turn.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import NamedTuple

import pytest
from vllm.device_allocator.host_backups import HostMemoryPolicy

from .simulated_gpu import (
    CHUNK,
    GRANULARITY,
    IS_HIP,
    PIECE,
    PROFILES,
    STRICT,
    OutOfMemory,
    injected,
    logged,
    name_of,
    new_calls,
    simulator,
)
from .world import LEVEL_1, LEVEL_2, Expectation, World

OUT_OF_MEMORY = 2
UNKNOWN = 999
ERRORS = (OUT_OF_MEMORY, UNKNOWN)

# Three chunks, two, and one; CUDA has no more than one.
LARGE = 2 * CHUNK + GRANULARITY if IS_HIP else GRANULARITY
MIDDLE = CHUNK + GRANULARITY if IS_HIP else GRANULARITY

# tags and bytes of what each operation finds
ALLOCATIONS = (
    ("weights", LARGE),
    ("kv_cache", MIDDLE),
    ("weights", GRANULARITY),
    ("runtime", GRANULARITY),
    ("cudagraph", GRANULARITY),
)


class Operation(NamedTuple):
    """What is run, and what comes of it when nothing fails."""

    run: Callable[[World], object]
    after: Callable[[World], Expectation]
    prepare: Callable[[World], object] = lambda world: None


def sleeping(level: tuple[str, ...], woken: list[str] | None = None) -> Callable:
    def prepare(world: World) -> None:
        world.sleep(level)
        world.check(world.after_sleep(level))
        if woken is not None:
            world.wake(woken)
            world.check(world.after_wake(woken))

    return prepare


def sleep(level: tuple[str, ...], **options: Callable) -> Operation:
    return Operation(
        lambda world: world.sleep(level),
        lambda world: world.after_sleep(level),
        **options,
    )


def wake(level: tuple[str, ...], tags: list[str] | None) -> Operation:
    return Operation(
        lambda world: world.wake(tags),
        lambda world: world.after_wake(tags),
        sleeping(level),
    )


def with_memory_kept(level: tuple[str, ...]) -> Callable:
    """An earlier sleep at this level has left its host memory."""

    def prepare(world: World) -> None:
        sleeping(level)(world)
        world.wake()
        world.check(world.after_wake())
        assert world.held_bytes() > 0

    return prepare


def giving_back(prepare: Callable) -> Callable:
    def with_policy(world: World) -> None:
        world.cumem.host_memory_policy = HostMemoryPolicy.RELEASE
        prepare(world)

    return with_policy


def locking_little(prepare: Callable) -> Callable:
    """No whole piece can be page-locked, and half of one for a buffer."""

    def with_limit(world: World) -> None:
        simulator.configure(max_locked_bytes=PIECE // 2)
        prepare(world)

    return with_limit


def discard(*tags: str) -> Operation:
    return Operation(
        lambda world: world.cumem.discard(tags),
        lambda world: world.after_discard(tags),
    )


def unused(world: World) -> list[int]:
    return list(world.sizes)[:2]


CHANGES = {
    "sleep at level 1": sleep(LEVEL_1),
    "sleep at level 2": sleep(LEVEL_2),
    "sleep with the weights asleep": sleep(
        LEVEL_1, prepare=sleeping(LEVEL_1, woken=["kv_cache"])
    ),
    "wake of all after level 1": wake(LEVEL_1, None),
    "wake of all after level 2": wake(LEVEL_2, None),
    "wake of the weights": wake(LEVEL_1, ["weights"]),
    "wake of the KV cache": wake(LEVEL_1, ["kv_cache"]),
    "discard of the KV cache": discard("kv_cache"),
    "discard of two tags": discard("kv_cache", "weights"),
    "trim of a pool": Operation(
        lambda world: world.trim(*unused(world)),
        lambda world: {
            ptr: block
            for ptr, block in world.expected.items()
            if ptr not in unused(world)
        },
    ),
}


# What the release of HIP makes no difference to.
HOST_MEMORY = {
    "later sleep at level 1": sleep(LEVEL_1, prepare=with_memory_kept(LEVEL_1)),
    "later sleep that takes more": sleep(LEVEL_1, prepare=with_memory_kept(LEVEL_2)),
    "sleep where memory is given back": sleep(
        LEVEL_1, prepare=giving_back(lambda world: None)
    ),
    "wake where memory is given back": Operation(
        lambda world: world.wake(),
        lambda world: world.after_wake(),
        giving_back(sleeping(LEVEL_1)),
    ),
    "sleep that locks little": sleep(
        LEVEL_1, prepare=locking_little(lambda world: None)
    ),
    "wake that locks little": Operation(
        lambda world: world.wake(),
        lambda world: world.after_wake(),
        locking_little(sleeping(LEVEL_1)),
    ),
    "trim of host memory": Operation(
        lambda world: world.cumem.trim_host_memory(),
        lambda world: dict(world.expected),
        with_memory_kept(LEVEL_1),
    ),
}
RUNS = [
    *((name, profile) for name in CHANGES for profile in PROFILES),
    *((name, PROFILES[-1]) for name in HOST_MEMORY),
]
OPERATIONS = {**CHANGES, **HOST_MEMORY}


class Harmless(NamedTuple):
    """A failure that an operation gets over, and whether anybody is told."""

    reason: str
    is_told: bool = True


NOT_LOCKED = Harmless("the backup is not page-locked, or stays so until the next call")
LEFT = Harmless("destroyed by a later call")
NO_NODE = Harmless("host memory is then on any NUMA node", False)
NO_BUFFER = Harmless("copied through fewer or smaller buffers, or none", False)
NO_REPORT = Harmless("a sleep that is done goes without its report")
TRIED_AGAIN = Harmless("a wake without memory collects garbage and is tried once more")
HARMLESS = {
    "hipHostRegister": NOT_LOCKED,
    "hipHostUnregister": NOT_LOCKED,
    "cuMemHostRegister_v2": NOT_LOCKED,
    "cuMemHostUnregister": NOT_LOCKED,
    "hipGetDevice": NOT_LOCKED,
    "cuCtxGetCurrent": NOT_LOCKED,
    "hipDeviceGetPCIBusId": NO_NODE,
    "cuDeviceGetPCIBusId": NO_NODE,
    "cuDeviceGet": NO_NODE,
    "cuCtxSetCurrent": Harmless("a thread that ends leaves its context twice", False),
    "hipHostMalloc": NO_BUFFER,
    "cuMemHostAlloc": NO_BUFFER,
    "hipHostFree": LEFT,
    "cuMemFreeHost": LEFT,
    "hipStreamDestroy": LEFT,
    "cuStreamDestroy_v2": LEFT,
    "hipMemAddressReserve": Harmless("asked for again without an alignment", False),
    "cuDeviceGetAttribute": Harmless("memory without RDMA or fabric handles", False),
    "hipMemGetInfo": NO_REPORT,
    "cuMemGetInfo_v2": NO_REPORT,
    "hipRuntimeGetVersion": Harmless("not needed, or taken for an old one", False),
}


def harmless(name: str, call: str, error: int) -> Harmless:
    """Why nothing was raised.

    Raises:
        KeyError: There is no reason.
    """
    if call in HARMLESS:
        return HARMLESS[call]
    if name.startswith("wake") and error == OUT_OF_MEMORY:
        return TRIED_AGAIN
    raise KeyError(call)


def populate(world: World) -> None:
    world.cumem._host_backups._told.clear()  # a refusal is told once a process
    for tag, size in ALLOCATIONS:
        world.allocate(tag, size)


def empty(world: World) -> None:
    world.free_all()
    world.check_nothing_left()


def calls_of(world: World, run: Callable[[World], object]) -> Counter[str]:
    before = simulator.stats()
    run(world)
    return new_calls(before, simulator.stats())


def names(text: str, call: str) -> bool:
    return (
        re.search(rf"\b{re.escape(call.removesuffix('_v2'))}(_v2)?\b", text) is not None
    )


def faults_of(calls: Counter[str]) -> list[tuple[str, int, int]]:
    return [
        (call, nth, error)
        for call, count in calls.items()
        for nth in range(1, count + 1)
        for error in ERRORS
    ]


@pytest.mark.parametrize(("name", "profile"), RUNS, indirect=["profile"])
def test_changes_of_state(
    world: World, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    operation = OPERATIONS[name]
    populate(world)
    operation.prepare(world)
    calls = calls_of(world, operation.run)
    empty(world)
    assert calls.total() > 3
    for call, nth, error in faults_of(calls):
        populate(world)
        operation.prepare(world)
        before, after = dict(world.expected), operation.after(world)
        capfd.readouterr()
        emptied = world.torch.emptied
        simulator.fail(call, nth, error)
        raised = None
        with logged(level=logging.INFO) as lines:
            try:
                operation.run(world)
            except RuntimeError as caught:
                raised = str(caught)
        text = "\n".join([*lines, capfd.readouterr().err])
        case = f"{name}: {call} number {nth} returns {error}: {raised} / {text}"
        try:
            assert simulator.stats().pending_faults == 0
            if raised is None:
                reason = harmless(name, call, error)
                assert not reason.is_told or names(text, call)
                assert reason is not TRIED_AGAIN or world.torch.emptied > emptied
                world.check(after)
            else:
                assert names(raised, call)
                says_before = re.search("nothing has changed|still asleep", raised)
                world.check(*([before] if says_before else [before, after]))
            operation.run(world)
            world.check(after)
            if world.cumem.host_memory_policy is HostMemoryPolicy.RELEASE:
                assert world.held_bytes() <= world.held_for_backups()
            empty(world)
        except (AssertionError, KeyError, RuntimeError) as problem:
            raise AssertionError(f"{case}: {problem}") from problem
        injected[simulator.profile()] += 1


# --- Roll-backs that fail too ---------------------------------------------------------

ROLL_BACK = (
    name_of("hipDeviceSynchronize", "cuCtxSynchronize"),
    name_of("hipMemUnmap", "cuMemUnmap"),
    name_of("hipMemMap", "cuMemMap"),
    name_of("hipMemSetAccess", "cuMemSetAccess"),
    name_of("hipMemRelease", "cuMemRelease"),
    name_of("hipMemAddressFree", "cuMemAddressFree"),
    name_of("hipMemAddressReserve", "cuMemAddressReserve"),
)
OFTEN = 30


@pytest.mark.parametrize("profile", ["7.2.3"] if IS_HIP else PROFILES, indirect=True)
@pytest.mark.parametrize("name", CHANGES)
def test_nothing_is_lost_when_a_roll_back_fails(world: World, name: str) -> None:
    """One call fails, and from then on every call of some function.

    States may be neither those before nor those after. Once the driver works again, the
    operation does, with every backup intact.
    """
    operation = CHANGES[name]
    populate(world)
    operation.prepare(world)
    calls = calls_of(world, operation.run)
    empty(world)
    for call, second in product(calls, ROLL_BACK):
        populate(world)
        operation.prepare(world)
        after = operation.after(world)
        simulator.fail(call, calls[call], UNKNOWN)
        for nth in range(1, OFTEN):
            if (call, nth) != (second, calls[call]):
                simulator.fail(second, nth, UNKNOWN)
        with logged(), suppress(RuntimeError):
            operation.run(world)
        simulator.reset()
        simulator.configure(**STRICT)
        try:
            operation.run(world)
            world.check(after)
            empty(world)
        except (AssertionError, RuntimeError) as problem:
            case = f"{name}: {call} number {calls[call]}, every {second}"
            raise AssertionError(f"{case}: {problem}") from problem


@pytest.mark.parametrize("then", ["sleep", "discard", "free"])
def test_what_a_failed_wake_left_mapped_goes(world: World, then: str) -> None:
    ptr = world.allocate("weights", LARGE)
    world.sleep(LEVEL_1)
    asleep = world.after_sleep(LEVEL_1)
    simulator.fail(name_of("hipMemUnmap", "cuMemUnmap"), 1, UNKNOWN)
    simulator.fail(name_of("hipStreamSynchronize", "cuStreamSynchronize"), 1, UNKNOWN)
    with logged() as lines, pytest.raises(RuntimeError, match="StreamSynchronize"):
        world.wake()
    assert any("MemUnmap" in line for line in lines)
    assert world.module.is_mapped(ptr)
    assert world.cumem.pointer_to_data[ptr].is_asleep
    if then == "free":
        world.free(ptr)
        asleep = {}
    elif then == "sleep":
        world.sleep(LEVEL_1)
    else:
        world.cumem.discard("weights")
    assert simulator.stats().mapped_bytes == 0
    world.check(asleep)


# --- Allocation, which returns nothing or throws -------------------------------------


@pytest.mark.parametrize("profile", PROFILES, indirect=True)
def test_malloc(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    def allocate(world: World) -> int:
        return world.allocate("weights", LARGE, fill=False)

    populate(world)
    calls = calls_of(world, allocate)
    empty(world)
    for call, nth, error in faults_of(calls):
        populate(world)
        before, ranges = dict(world.expected), world.module.ranges()
        capfd.readouterr()
        simulator.fail(call, nth, error)
        raised = None
        try:
            allocate(world)
        except OutOfMemory as caught:
            raised = f"{caught}: {capfd.readouterr().err}"
        except RuntimeError as caught:
            raised = str(caught)
        case = f"{call} number {nth} returns {error}: raised {raised}"
        assert simulator.stats().pending_faults == 0, case
        if raised is None:
            assert not HARMLESS[call].is_told, case
        else:
            assert names(raised, call), case
            assert world.module.ranges() == ranges, case
            world.check(before)
            world.write(allocate(world))
        world.check(world.expected)
        empty(world)
        injected[simulator.profile()] += 1


# --- Frees, which nobody can be told about -------------------------------------------


@pytest.mark.parametrize("profile", PROFILES, indirect=True)
@pytest.mark.parametrize("asleep", [False, True], ids=["mapped", "asleep"])
def test_free(world: World, asleep: bool, capfd: pytest.CaptureFixture[str]) -> None:
    def prepare() -> int:
        populate(world)
        if asleep:
            sleeping(LEVEL_1)(world)
        return next(iter(world.expected))

    ptr = prepare()
    calls = calls_of(world, lambda world: world.free(ptr))
    del world.expected[ptr]
    empty(world)
    for call, nth, error in faults_of(calls):
        ptr = prepare()
        before = dict(world.expected)
        after = {other: block for other, block in before.items() if other != ptr}
        capfd.readouterr()
        simulator.fail(call, nth, error)
        with logged() as lines:
            world.free(ptr)
        text = "\n".join([*lines, capfd.readouterr().err])
        case = f"{call} number {nth} returns {error}: {text}"
        assert simulator.stats().pending_faults == 0, case
        assert names(text, call) or not HARMLESS[call].is_told, case
        world.check(before, after)
        world.cumem.discard(())
        assert world.module.release_pending() == 0, case
        world.check(after)
        assert ptr not in world.module.ranges(), case
        empty(world)
        injected[simulator.profile()] += 1
