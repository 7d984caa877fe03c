# SPDX-License-Identifier: Apache-2.0
"""Where on the host the backups of an allocator lie.

Note [Host memory of backups]
A sleep's backups go into memory that earlier sleeps have left, where there is room, and
into one new arena of exactly the rest. They are laid out in the order in which they are
given, the device's addresses, so that neighbours there stay neighbours and their copies
join.

What is in use is not written down here: a backup is in use for as long as its
allocation is asleep with it, and callers say which are. So nothing that goes wrong
between here and there can lose memory or hand it out twice.

Touching and registering memory takes longer than copying to it, so a sleep that finds
room takes what it finds, however much more is there. One that has to take memory of the
host first gives back what it does not use, and begins anew where leftovers between the
backups would exceed `MAX_HELD`. A piece of an arena is the least that is given back.

A sleep that is refused has changed nothing, so what may refuse it comes first: the host
is asked for as much as more is held afterwards, and the arena is made. Memory that the
driver does not let go of stays in the books, and serves a later sleep.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple, Protocol

import vllm.envs as envs
from vllm.device_allocator.copy_progress import reported

POLICY_VARIABLE = "VLLM_SLEEP_HOST_MEMORY"

MAX_HELD = 1.02
"""What is held after a sleep that took memory, in times the bytes of the backups. Where
backups were in use before, the rest of their pieces comes on top."""

STEP_BYTES = 1 << 30
"""Bytes given back between two looks at the progress, in whole pieces and at least one.
Drivers unregister about 50 GB a second (measured on an H200's host)."""


class HostMemoryPolicy(StrEnum):
    """What becomes of host memory once its backups have been restored.

    KEEP leaves it to the next sleep, which then has nothing to do but to copy. RELEASE
    gives it back before the wake returns, for hosts that need it meanwhile. What backed
    up an allocation that is freed asleep goes with the next sleep, wake, discard, trim
    or scope of a pool, since PyTorch's allocator waits for whoever frees.
    """

    KEEP = "keep"
    RELEASE = "release"


def host_memory_policy() -> HostMemoryPolicy:
    """The user's choice, ``VLLM_SLEEP_HOST_MEMORY``; KEEP where it is unset or empty.

    Raises:
        ValueError: The word is neither.

    """
    word = envs.VLLM_SLEEP_HOST_MEMORY or HostMemoryPolicy.KEEP
    try:
        return HostMemoryPolicy(word)
    except ValueError:
        raise ValueError(
            f"{POLICY_VARIABLE} is {word!r}, which is neither 'keep' (host memory of "
            "a backup stays for the next sleep, the default) nor 'release' (it is "
            "given back after the wake); set it to one of them or unset it"
        ) from None


class Arena(Protocol):
    """The compiled module's ``HostArena``, which has the meanings of all of these."""

    @property
    def address(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def piece_size(self) -> int: ...
    @property
    def node(self) -> int | None: ...
    @property
    def prepared(self) -> int: ...
    @property
    def registered(self) -> int: ...
    @property
    def huge(self) -> int: ...
    @property
    def registration_error(self) -> str | None: ...
    def missing(self, offset: int, size: int) -> int: ...
    def release(self, offset: int, size: int) -> int: ...


class Span(NamedTuple):
    """Bytes of host memory from an address on."""

    address: int
    size: int

    @property
    def end(self) -> int:
        return self.address + self.size


class Place(NamedTuple):
    """Where a backup goes: bytes of an arena from an offset on."""

    arena: Arena
    offset: int
    size: int

    @property
    def span(self) -> Span:
        return Span(self.arena.address + self.offset, self.size)


class Taken(NamedTuple):
    """The places of a sleep's backups, and bytes that the host has to give for them."""

    places: list[Place]
    new_bytes: int


class _Plan(NamedTuple):
    """Where the backups of a sleep would go.

    Attributes:
        places: One for each; an arena of None is the one to be made.
        arena_size: Of that one, in bytes; 0 where none is needed.
        needed: Bytes that the host has to give, touched for the first time.
        held: Bytes that it has then given, for all backups.

    """

    places: list[tuple[Arena | None, int, int]]
    arena_size: int
    needed: int
    held: int

    def spans(self) -> list[Span]:
        return [
            Place(arena, offset, size).span
            for arena, offset, size in self.places
            if arena is not None
        ]


class HostBackups:
    """The host memory of one allocator's backups; see Note [Host memory of backups].

    One thread at a time may call `take` and `give_back`; the rest may be asked beside
    them.

    Args:
        check: Called with the bytes by which a sleep raises what is held, where it
            does, before anything changes. What it raises ends the sleep.
        new_arena: Makes an arena of so many bytes, with nothing in it touched.

    """

    def __init__(
        self, check: Callable[[int], None], new_arena: Callable[[int], Arena]
    ) -> None:
        self._check = check
        self._new_arena = new_arena
        # replaced as a whole, for those who read it beside a change
        self._arenas: tuple[Arena, ...] = ()
        self._told: set[str] = set()

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """All that are held, the oldest first."""
        return self._arenas

    def needed(self, sizes: Sequence[int], in_use: Iterable[Span]) -> int:
        """Bytes by which `take` would raise what is held; 0 where it would lower it."""
        return self._growth(self._plan(sizes, list(in_use)))

    def spare(self, in_use: Iterable[Span]) -> int:
        """Bytes that `give_back` would give back, if the driver lets go of them."""
        used = sorted(in_use)
        return sum(arena.prepared - _ready(arena, used) for arena in self._arenas)

    def take(self, sizes: Sequence[int], in_use: Iterable[Span]) -> Taken:
        """A place for a backup of each of these sizes, apart from those in use.

        Raises:
            MemoryError: The host refused the address space of a new arena. Nothing has
                changed, nor after an error of ``check``.

        """
        used = list(in_use)
        plan = self._plan(sizes, used)
        if growth := self._growth(plan):
            self._check(growth)
        made = self._new_arena(plan.arena_size) if plan.arena_size else None
        if plan.needed:
            # Before the new memory is touched: the host may not have room for both.
            self.give_back([*used, *plan.spans()])
        if made is not None:
            self._arenas = (*self._arenas, made)
        places = []
        for arena, offset, size in plan.places:
            where = arena or made
            assert where is not None
            places.append(Place(where, offset, size))
        return Taken(places, plan.needed)

    def give_back(self, in_use: Iterable[Span]) -> int:
        """Give back every piece that holds none of these, and return the bytes.

        Pieces of which the driver does not let go stay.
        """
        used = sorted(in_use)
        progress = _GivenBack()
        with reported("Giving host memory back", self.spare(used), progress):
            for arena in self._arenas:
                for begin, end in _free_runs(arena, used):
                    progress.done += arena.release(begin, end - begin)
        self.forget_empty(used)
        return progress.done

    def forget_empty(self, in_use: Iterable[Span]) -> None:
        """Let go of the arenas that have neither a ready piece nor any of these."""
        used = sorted(in_use)
        self._arenas = tuple(
            arena for arena in self._arenas if arena.prepared or _inside(arena, used)
        )

    def new_refusals(self) -> dict[str, int]:
        """Bytes that the driver does not register by the reason, if that was not told.

        A reason is told once, and again after everything was registered meanwhile.
        """
        refused: dict[str, int] = {}
        for arena in self._arenas:
            if (error := arena.registration_error) is not None:
                # Behind the error come bytes, which differ from piece to piece.
                reason = error.partition(";")[0]
                bytes_left = arena.prepared - arena.registered
                refused[reason] = refused.get(reason, 0) + bytes_left
        if not refused and any(arena.registered for arena in self._arenas):
            self._told.clear()
        new = {why: size for why, size in refused.items() if why not in self._told}
        self._told.update(new)
        return new

    def _growth(self, plan: _Plan) -> int:
        if not plan.needed:
            return 0
        return max(0, plan.held - sum(arena.prepared for arena in self._arenas))

    def _plan(self, sizes: Sequence[int], in_use: list[Span]) -> _Plan:
        plan = self._plan_in(self._arenas, sizes, in_use)
        backups = sum(sizes) + sum(span.size for span in in_use)
        if plan.needed and plan.held > MAX_HELD * backups:
            anew = self._plan_in((), sizes, in_use)
            return min(plan, anew, key=lambda each: each.held)
        return plan

    def _plan_in(
        self, arenas: Iterable[Arena], sizes: Sequence[int], in_use: list[Span]
    ) -> _Plan:
        """First fit, in the order of the arenas and of the addresses in them."""
        used = sorted(in_use)
        gaps = [
            _Gap(arena, gap)
            for arena in arenas
            for gap in _gaps(arena, _inside(arena, used))
        ]
        places: list[tuple[Arena | None, int, int]] = []
        arena_size = 0
        for size in sizes:
            gap = next((gap for gap in gaps if gap.room >= size), None)
            if gap is None:
                places.append((None, arena_size, size))
                arena_size += size
                continue
            places.append((gap.arena, gap.take(size), size))
            if not gap.room:
                gaps.remove(gap)
        reused = _Plan(places, arena_size, 0, 0).spans()
        held = needed = arena_size
        for arena in self._arenas:
            for index in _pieces(arena, [*used, *reused]):
                begin = index * arena.piece_size
                held += min(arena.piece_size, arena.size - begin)
                needed += arena.missing(begin, 1)
        return _Plan(places, arena_size, needed, held)


class _GivenBack:
    """How many bytes the host has again."""

    started = True

    def __init__(self) -> None:
        self.done = 0


class _Gap:
    """A run of free bytes in an arena, taken from its beginning."""

    def __init__(self, arena: Arena, span: Span) -> None:
        self.arena = arena
        self.room = span.size
        self._offset = span.address - arena.address

    def take(self, size: int) -> int:
        offset = self._offset
        self._offset += size
        self.room -= size
        return offset


def _inside(arena: Arena, spans: Sequence[Span]) -> list[Span]:
    """Those of the spans, sorted, that lie in an arena."""
    first = bisect.bisect_left(spans, (arena.address, 0))
    last = bisect.bisect_left(spans, (arena.address + arena.size, 0))
    return list(spans[first:last])


def _gaps(arena: Arena, used: Sequence[Span]) -> list[Span]:
    """What is left of an arena beside what is used of it, sorted."""
    end = arena.address + arena.size
    edges = [Span(arena.address, 0), *used, Span(end, 0)]
    return [
        Span(before.end, after.address - before.end)
        for before, after in pairwise(edges)
        if after.address > before.end
    ]


def _pieces(arena: Arena, spans: Iterable[Span]) -> set[int]:
    """The numbers of the pieces of an arena that any of the spans touches."""
    indices: set[int] = set()
    for span in _inside(arena, sorted(spans)):
        begin = (span.address - arena.address) // arena.piece_size
        last = (span.end - 1 - arena.address) // arena.piece_size
        indices.update(range(begin, last + 1))
    return indices


def _ready(arena: Arena, used: Iterable[Span]) -> int:
    """Bytes of the ready pieces of an arena that any of the spans touches."""
    total = 0
    for index in _pieces(arena, used):
        begin = index * arena.piece_size
        size = min(arena.piece_size, arena.size - begin)
        total += size - arena.missing(begin, 1)
    return total


def _free_runs(arena: Arena, used: Sequence[Span]) -> Iterator[tuple[int, int]]:
    """Where whole pieces begin and end that none of the spans touches, in steps."""
    step = max(1, STEP_BYTES // arena.piece_size)
    for gap in _gaps(arena, _inside(arena, used)):
        first = -(-(gap.address - arena.address) // arena.piece_size)
        end = gap.end - arena.address
        last = (
            -(-end // arena.piece_size)
            if end == arena.size
            else (end // arena.piece_size)
        )
        for index in range(first, last, step):
            stop = min(index + step, last) * arena.piece_size
            yield index * arena.piece_size, min(stop, arena.size)
