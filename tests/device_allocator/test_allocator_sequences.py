# SPDX-License-Identifier: Apache-2.0
"""Random allocations, writes, frees, sleeps, wakes and discards, in two threads.

Host memory that holds no backup stays or goes, as the policy says, in pieces of some
size.
"""

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.device_allocator.host_backups import HostMemoryPolicy

from .simulated_gpu import (
    CHUNK,
    GRANULARITY,
    IS_HIP,
    PROFILES,
    STRICT,
    logged,
    name_of,
    simulator,
)
from .world import Expectation, World

DEADLINE = 30  # seconds
MAX_ALLOCATIONS = 8
TAGS = ("weights", "kv_cache", "runtime")
SIZES = (1, GRANULARITY, CHUNK, CHUNK + 2 * GRANULARITY)
CALLS = (
    name_of("hipMemCreate", "cuMemCreate"),
    name_of("hipMemMap", "cuMemMap"),
    name_of("hipMemUnmap", "cuMemUnmap"),
    name_of("hipMemRelease", "cuMemRelease"),
    name_of("hipMemSetAccess", "cuMemSetAccess"),
    name_of("hipMemcpyAsync", "cuMemcpyHtoDAsync_v2"),
    name_of("hipStreamSynchronize", "cuStreamSynchronize"),
    name_of("hipDeviceSynchronize", "cuCtxSynchronize"),
    name_of("hipMemAddressFree", "cuMemAddressFree"),
    name_of("hipHostUnregister", "cuMemHostUnregister"),
)


class Transition(NamedTuple):
    """Something that changes states: how it is asked for, and what comes of it."""

    run: Callable[[World], None]
    after: Callable[[World], Expectation]


some_tags = st.sets(st.sampled_from(TAGS)).map(lambda tags: tuple(sorted(tags)))


def sleep(tags: tuple[str, ...]) -> Transition:
    return Transition(lambda w: w.sleep(tags), lambda w: w.after_sleep(tags))


def wake(tags: list[str] | None) -> Transition:
    return Transition(lambda w: w.wake(tags), lambda w: w.after_wake(tags))


def discard(tags: tuple[str, ...]) -> Transition:
    return Transition(lambda w: w.cumem.discard(tags), lambda w: w.after_discard(tags))


transitions = st.one_of(
    some_tags.map(sleep),
    st.none().map(wake),
    st.lists(st.sampled_from(TAGS[:2]), unique=True).map(wake),
    some_tags.map(discard),
)
threads = st.integers(0, 1)
places = st.integers(0, MAX_ALLOCATIONS - 1)
allocations = st.tuples(st.sampled_from(TAGS), st.sampled_from(SIZES))


class Allocations(RuleBasedStateMachine):
    """A world; after each step every allocation is where and what it should be.

    Attributes:
        may_be_left: Host memory without a backup may wait for the next call, since an
            allocation was freed asleep or the driver did not let go.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.threads = [ThreadPoolExecutor(1) for _ in range(2)]
        self.arena_type = world.module.HostArena
        self.may_be_left = False

    @initialize(
        policy=st.sampled_from(HostMemoryPolicy),
        piece=st.sampled_from([16 * GRANULARITY, CHUNK, 64 << 20]),
    )
    def choose(self, policy: HostMemoryPolicy, piece: int) -> None:
        self.world.cumem.host_memory_policy = policy
        self.world.module.HostArena = functools.partial(
            self.arena_type, piece_size=piece
        )

    def start(self, thread: int, work: Callable[..., Any], *args: Any) -> Future:
        return self.threads[thread].submit(work, *args)

    def run(self, thread: int, work: Callable[..., Any], *args: Any) -> Any:
        return self.start(thread, work, *args).result(DEADLINE)

    def chosen(self, place: int) -> int:
        known = list(self.world.expected)
        return known[place % len(known)]

    def in_order(self, *order: Transition) -> Expectation:
        """What comes of transitions one after the other."""
        before = self.world.expected
        for transition in order:
            self.world.expected = dict(transition.after(self.world))
        after, self.world.expected = self.world.expected, before
        return after

    has_some = precondition(lambda self: self.world.expected)
    has_room = precondition(lambda self: len(self.world.expected) < MAX_ALLOCATIONS)

    @has_room
    @rule(thread=threads, allocation=allocations)
    def allocate(self, thread: int, allocation: tuple[str, int]) -> None:
        self.run(thread, self.world.allocate, *allocation)

    @has_some
    @rule(place=places)
    def write(self, place: int) -> None:
        ptr = self.chosen(place)
        if self.world.expected[ptr].state == "mapped":
            self.world.write(ptr)

    @has_some
    @rule(thread=threads, place=places)
    def free(self, thread: int, place: int) -> None:
        ptr = self.chosen(place)
        del self.world.expected[ptr]
        self.may_be_left = True
        self.run(thread, self.world.free, ptr)

    @rule(thread=threads, transition=transitions)
    def change(self, thread: int, transition: Transition) -> None:
        after = transition.after(self.world)
        self.run(thread, transition.run, self.world)
        self.may_be_left = False
        self.world.check(after)

    @rule(tags=some_tags)
    def sleep_as_foretold(self, tags: tuple[str, ...]) -> None:
        """In host memory, which is what a host is checked for."""
        world = self.world
        held, needed = world.held_bytes(), world.cumem.host_bytes_needed(tags)
        after = world.after_sleep(tags)
        world.sleep(tags)
        self.may_be_left = False
        world.check(after)
        holds = world.held_bytes()
        assert holds == held + needed if needed else holds <= held

    @rule(thread=threads)
    def trim(self, thread: int) -> None:
        held = self.world.held_bytes()
        given = self.run(thread, self.world.cumem.trim_host_memory)
        self.may_be_left = False
        assert self.world.held_bytes() == self.world.held_for_backups() == held - given

    @rule(first=transitions, second=transitions)
    def change_in_both(self, first: Transition, second: Transition) -> None:
        """One comes after the other, and nobody knows which."""
        allowed = self.in_order(first, second), self.in_order(second, first)
        pending = [
            self.start(0, first.run, self.world),
            self.start(1, second.run, self.world),
        ]
        for future in pending:
            future.result(DEADLINE)
        self.world.check(*allowed)

    @has_some
    @rule(
        transition=transitions,
        freed=st.lists(places, max_size=3),
        made=st.lists(allocations, max_size=2),
    )
    def change_beside_others(
        self, transition: Transition, freed: list[int], made: list[tuple[str, int]]
    ) -> None:
        """What is allocated meanwhile is part of the change or is not."""
        world = self.world
        after = dict(transition.after(world))
        gone = {self.chosen(place) for place in freed}

        def others() -> list[int]:
            for ptr in gone:
                world.free(ptr)
            return [world.allocate(*allocation, fill=False) for allocation in made]

        changing = self.start(0, transition.run, world)
        new = self.run(1, others)
        changing.result(DEADLINE)
        self.may_be_left = True
        after = {ptr: block for ptr, block in after.items() if ptr not in gone}
        unchanged = {ptr: world.expected[ptr] for ptr in new}
        world.expected = dict(unchanged)
        changed = transition.after(world)
        states = world.states()
        for ptr in new:
            assert states[ptr] in (unchanged[ptr].state, changed[ptr].state)
            after[ptr] = unchanged[ptr]._replace(state=states[ptr])
        world.check(after)

    @rule(
        transition=transitions,
        call=st.sampled_from(CALLS),
        nth=st.integers(1, 4),
        thread=threads,
    )
    def fail(self, transition: Transition, call: str, nth: int, thread: int) -> None:
        """One driver call fails, or would have."""
        before, after = dict(self.world.expected), transition.after(self.world)
        simulator.fail(call, nth, 999)
        self.may_be_left = True
        try:
            self.run(thread, transition.run, self.world)
        except RuntimeError:
            self.world.check(before, after)
        else:
            self.world.check(after)
        simulator.reset()
        prepare()

    @invariant()
    def everything_is_where_it_should_be(self) -> None:
        self.world.check(self.world.expected)
        assert sorted(self.world.module.ranges()) == sorted(self.world.expected)
        held = self.world.held_bytes()
        assert simulator.stats().registered_bytes == held
        releases = self.world.cumem.host_memory_policy is HostMemoryPolicy.RELEASE
        if releases and not self.may_be_left:
            assert held == self.world.held_for_backups()

    def teardown(self) -> None:
        self.world.module.HostArena = self.arena_type
        for thread in self.threads:
            thread.shutdown()
        self.world.free_all()
        self.world.check_nothing_left()


def prepare() -> None:
    simulator.configure(**STRICT, copy_latency_us=200)


@pytest.mark.parametrize(
    "profile", [PROFILES[1], PROFILES[-1]] if IS_HIP else PROFILES, indirect=True
)
def test_any_sequence_keeps_contents(world: World) -> None:
    prepare()
    with logged():
        run_state_machine_as_test(
            lambda: Allocations(world),
            settings=settings(
                max_examples=50 if IS_HIP else 20,
                stateful_step_count=25,
                deadline=None,
                print_blob=True,
                suppress_health_check=list(HealthCheck),
            ),
        )
