# SPDX-License-Identifier: Apache-2.0
"""Every driver call of every operation fails in turn.

An operation is run once to see which calls it makes. Then it is run anew for each of
them, with that one call failing, and afterwards

* each allocation has the state and the bytes that it had before, or those that it was
  to have, and it is the same for all of them;
* the error, raised or logged, names the call;
* the operation succeeds when it is repeated;
* nothing is left once everything is freed.
"""

import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import NamedTuple

import pytest

from .simulated_gpu import (
    CHUNK,
    GRANULARITY,
    IS_HIP,
    PROFILES,
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


class Harmless(NamedTuple):
    """A failure that an operation gets over, and whether anybody is told."""

    reason: str
    is_told: bool = True


NOT_LOCKED = Harmless("the backup is not page-locked, or stays so until the next call")
LEFT = Harmless("destroyed by a later call")
HARMLESS = {
    "hipHostRegister": NOT_LOCKED,
    "hipHostUnregister": NOT_LOCKED,
    "cuMemHostRegister_v2": NOT_LOCKED,
    "cuMemHostUnregister": NOT_LOCKED,
    "hipGetDevice": NOT_LOCKED,
    "cuCtxGetCurrent": NOT_LOCKED,
    "hipStreamDestroy": LEFT,
    "cuStreamDestroy_v2": LEFT,
    "hipMemAddressReserve": Harmless("asked for again without an alignment", False),
    "cuDeviceGetAttribute": Harmless("memory without RDMA or fabric handles", False),
    "hipRuntimeGetVersion": Harmless("not needed, or taken for an old one", False),
}


def populate(world: World) -> None:
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


@pytest.mark.parametrize("profile", PROFILES, indirect=True)
@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_state(
    world: World, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    operation = CHANGES[name]
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
        simulator.fail(call, nth, error)
        raised = None
        with logged() as lines:
            try:
                operation.run(world)
            except RuntimeError as caught:
                raised = str(caught)
        text = "\n".join([*lines, capfd.readouterr().err])
        case = f"{name}: {call} number {nth} returns {error}: {raised} / {text}"
        try:
            assert simulator.stats().pending_faults == 0
            if raised is None:
                assert not HARMLESS[call].is_told or names(text, call)
                world.check(after)
            else:
                assert names(raised, call)
                says_before = re.search("nothing has changed|still asleep", raised)
                world.check(*([before] if says_before else [before, after]))
            operation.run(world)
            world.check(after)
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
        simulator.configure(stale_memory="poisoned", one_mapping_copies=True)
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
