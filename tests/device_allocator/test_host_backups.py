# SPDX-License-Identifier: Apache-2.0
"""Where backups lie on the host, over arenas that only count."""

import logging
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.device_allocator import copy_progress, host_backups
from vllm.device_allocator.host_backups import (
    MAX_HELD,
    POLICY_VARIABLE,
    HostBackups,
    HostMemoryPolicy,
    Place,
    Span,
    host_memory_policy,
)

from .simulated_gpu import logged

BEGIN = 1 << 20


class CountedArena:
    """An arena without memory, whose pieces are ready or not.

    Attributes:
        ready: The numbers of those that are.
        sticks: Nothing is let go of, as by a driver that refuses to unregister.
        released: What `release` was asked for.
    """

    def __init__(self, address: int, size: int, piece_size: int) -> None:
        self.address = address
        self.size = size
        self.piece_size = piece_size
        self.node: int | None = None
        self.registration_error: str | None = None
        self.ready: set[int] = set()
        self.sticks: Callable[[], bool] = lambda: False
        self.released: list[tuple[int, int]] = []
        self.guarded: Callable[[], list[Span]] = list

    def span_of(self, piece: int) -> Span:
        begin = piece * self.piece_size
        end = min(begin + self.piece_size, self.size)
        return Span(self.address + begin, end - begin)

    def touched(self, offset: int, size: int) -> set[int]:
        assert size > 0 and offset >= 0 and offset + size <= self.size
        last = (offset + size - 1) // self.piece_size
        return set(range(offset // self.piece_size, last + 1))

    def bytes_of(self, pieces: set[int]) -> int:
        return sum(self.span_of(piece).size for piece in pieces)

    @property
    def prepared(self) -> int:
        return self.bytes_of(self.ready)

    @property
    def registered(self) -> int:
        return 0 if self.registration_error else self.prepared

    @property
    def huge(self) -> int:
        return 0

    def missing(self, offset: int, size: int) -> int:
        return self.bytes_of(self.touched(offset, size) - self.ready)

    def prepare(self, offset: int, size: int) -> int:
        """What a backup there does; the bytes that were not ready before."""
        new = self.missing(offset, size)
        self.ready |= self.touched(offset, size)
        return new

    def release(self, offset: int, size: int) -> int:
        self.released.append((offset, size))
        if self.sticks():
            return 0
        begin, end = self.address + offset, self.address + offset + size
        whole = {
            piece
            for piece in self.ready
            if begin <= self.span_of(piece).address and self.span_of(piece).end <= end
        }
        for piece in whole:
            for span in self.guarded():
                assert not overlap(self.span_of(piece), span), "a backup is given back"
        self.ready -= whole
        return self.bytes_of(whole)


def overlap(one: Span, other: Span) -> bool:
    return one.address < other.end and other.address < one.end


class Host:
    """Makes arenas, one directly behind the other, and keeps the books.

    Attributes:
        in_use: The backups that there are.
        asked: The bytes that were asked for before they were taken.
        held_when_asked: What was held at those moments.
        refuses: What is refused now.
    """

    def __init__(self, piece_size: int) -> None:
        self.piece_size = piece_size
        self.in_use: list[Span] = []
        self.asked: list[int] = []
        self.held_when_asked: list[int] = []
        self.refuses: str | None = None
        self.backups = HostBackups(self.check, self.new_arena)
        self._end = BEGIN

    def check(self, needed: int) -> None:
        self.asked.append(needed)
        self.held_when_asked.append(self.held)
        if self.refuses == "bytes":
            raise RuntimeError("no room")

    def new_arena(self, size: int) -> CountedArena:
        if self.refuses == "addresses":
            raise MemoryError("no addresses")
        arena = CountedArena(self._end, size, self.piece_size)
        arena.guarded = lambda: self.in_use
        arena.sticks = lambda: self.refuses == "to let go"
        self._end += size
        return arena

    @property
    def held(self) -> int:
        return sum(arena.prepared for arena in self.backups.arenas)

    def sleep(self, *sizes: int) -> tuple[list[Place], int]:
        """The places, and the bytes that were new."""
        places, told = self.backups.take(sizes, self.in_use)
        new = 0
        for place in places:
            assert isinstance(place.arena, CountedArena)
            new += place.arena.prepare(place.offset, place.size)
        assert told == new
        self.in_use += [place.span for place in places]
        return places, new

    def wake(self, *backups: Span) -> None:
        for each in backups or list(self.in_use):
            self.in_use.remove(each)


class Sleeps(RuleBasedStateMachine):
    """Sleeps, partial wakes and trims, in any order."""

    @initialize(piece_size=st.integers(1, 8))
    def start(self, piece_size: int) -> None:
        self.host = Host(piece_size)

    sizes = st.lists(st.integers(1, 20), min_size=1, max_size=6)

    @rule(sizes=sizes)
    def sleep(self, sizes: list[int]) -> None:
        host = self.host
        before, in_use = host.held, list(host.in_use)
        host.asked.clear()
        host.held_when_asked.clear()
        expected = host.backups.needed(sizes, host.in_use)
        places, new = host.sleep(*sizes)

        assert [place.size for place in places] == sizes
        for place in places:
            arena = place.arena
            assert arena in host.backups.arenas
            assert place.offset >= 0 and place.offset + place.size <= arena.size
        assert host.asked == ([expected] if expected else [])
        assert host.held_when_asked == ([before] if expected else [])
        assert expected == (max(0, host.held - before) if new else 0)
        if not new:
            assert host.held == before
            return
        for arena in host.backups.arenas:
            assert isinstance(arena, CountedArena)
            for piece in arena.ready:
                span = arena.span_of(piece)
                assert any(overlap(span, used) for used in host.in_use)
        if not in_use:
            assert host.held <= MAX_HELD * sum(sizes)

    @rule(sizes=sizes)
    def sleep_twice(self, sizes: list[int]) -> None:
        """What one sleep has left is enough for the same sleep."""
        host = self.host
        host.wake()
        host.sleep(*sizes)
        host.wake()
        assert host.backups.needed(sizes, host.in_use) == 0
        assert host.sleep(*sizes)[1] == 0

    @rule(sizes=sizes, what=st.sampled_from(["bytes", "addresses"]))
    def fail(self, sizes: list[int], what: str) -> None:
        host = self.host
        host.refuses = what
        held, in_use = host.held, list(host.in_use)
        arenas = host.backups.arenas
        try:
            host.sleep(*sizes)
        except (RuntimeError, MemoryError):
            assert host.held == held
            assert host.backups.arenas == arenas
            assert host.in_use == in_use
        host.refuses = None

    @rule(sizes=sizes, pieces=st.integers(0, 6))
    def break_off(self, sizes: list[int], pieces: int) -> None:
        """A backup that fails when some pieces are ready, which are not lost."""
        host = self.host
        held_by_backups = host.held - host.backups.spare(host.in_use)
        places, new = host.backups.take(sizes, host.in_use)
        for arena, offset, size in places:
            assert isinstance(arena, CountedArena)
            ready = sorted(arena.touched(offset, size) - arena.ready)[:pieces]
            arena.ready.update(ready)
            pieces -= len(ready)
        host.backups.forget_empty(host.in_use)
        spans = [place.span for place in places]
        for arena in host.backups.arenas:
            assert isinstance(arena, CountedArena)
            assert arena.ready
            if new:
                for piece in arena.ready:
                    ready_span = arena.span_of(piece)
                    wanted = [*spans, *host.in_use]
                    assert any(overlap(ready_span, span) for span in wanted)
        assert host.held == held_by_backups + host.backups.spare(host.in_use)

    @rule(sizes=sizes)
    def stick(self, sizes: list[int]) -> None:
        """What the driver does not let go of serves a later sleep, or goes later."""
        host = self.host
        host.refuses = "to let go"
        held, spare = host.held, host.backups.spare(host.in_use)
        assert host.backups.give_back(host.in_use) == 0
        assert (host.held, host.backups.spare(host.in_use)) == (held, spare)
        _, new = host.sleep(*sizes)
        assert host.held == held + new
        host.refuses = None

    @precondition(lambda self: self.host.in_use)
    @rule(data=st.data(), release=st.booleans())
    def wake(self, data: st.DataObject, release: bool) -> None:
        host = self.host
        some = st.sets(st.sampled_from(host.in_use), min_size=1)
        host.wake(*data.draw(some))
        if release:
            self.trim()

    @rule()
    def trim(self) -> None:
        host = self.host
        held, spare = host.held, host.backups.spare(host.in_use)
        given = host.backups.give_back(host.in_use)
        assert given == spare == held - host.held
        assert host.backups.give_back(host.in_use) == 0
        for arena in host.backups.arenas:
            assert isinstance(arena, CountedArena)
            spans = [arena.span_of(piece) for piece in arena.ready]
            assert spans
            for span in spans:
                assert any(overlap(span, used) for used in host.in_use)

    @invariant()
    def backups_lie_apart_in_memory_that_is_there(self) -> None:
        if not hasattr(self, "host"):
            return
        backups = sorted(self.host.in_use)
        for one, other in pairwise(backups):
            assert one.end <= other.address
        for span in backups:
            (arena,) = (
                arena
                for arena in self.host.backups.arenas
                if arena.address <= span.address < arena.address + arena.size
            )
            assert arena.missing(span.address - arena.address, span.size) == 0


def test_any_sequence_of_sleeps() -> None:
    run_state_machine_as_test(
        Sleeps,
        settings=settings(max_examples=100, stateful_step_count=20, deadline=None),
    )


def test_the_first_backups_are_neighbours_and_exact() -> None:
    host = Host(piece_size=4)
    places, new = host.sleep(3, 8, 2)
    assert [place.span for place in places] == [
        (BEGIN, 3),
        (BEGIN + 3, 8),
        (BEGIN + 11, 2),
    ]
    (arena,) = host.backups.arenas
    assert arena.size == new == host.held == 13


def test_kept_memory_serves_a_smaller_sleep_and_the_next_larger_one() -> None:
    host = Host(piece_size=4)
    host.sleep(24)
    host.wake()
    assert host.sleep(1)[1] == 0
    host.wake()
    assert host.sleep(24)[1] == 0
    assert host.held == 24


def test_only_what_does_not_fit_is_taken() -> None:
    host = Host(piece_size=4)
    host.sleep(100)
    host.wake()
    assert host.sleep(60, 40, 10)[1] == 10
    assert [arena.size for arena in host.backups.arenas] == [100, 10]
    assert host.asked == [100, 10]


def test_memory_that_no_backup_fits_into_is_given_back_before() -> None:
    host = Host(piece_size=4)
    host.sleep(30)
    host.wake()
    host.asked.clear()
    places, new_bytes = host.backups.take([40], host.in_use)
    assert (host.asked, new_bytes) == ([10], 40)
    assert host.held == 0
    assert [arena.size for arena in host.backups.arenas] == [40]
    assert [place.size for place in places] == [40]


@pytest.mark.parametrize("what", ["bytes", "addresses"])
def test_a_refused_sleep_loses_nothing(what: str) -> None:
    host = Host(piece_size=4)
    host.sleep(30)
    host.wake()
    host.refuses = what
    with pytest.raises((RuntimeError, MemoryError)):
        host.sleep(40)
    assert host.held == 30
    host.refuses = None
    assert host.sleep(30)[1] == 0


def test_memory_is_given_back_in_steps_of_whole_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_backups, "STEP_BYTES", 8)
    host = Host(piece_size=4)
    places, _ = host.sleep(6, 5, 18)  # to 6, 11 and 29
    (arena,) = host.backups.arenas
    assert isinstance(arena, CountedArena)
    host.wake(places[0].span, places[2].span)
    assert host.backups.give_back(host.in_use) == 29 - 8
    assert arena.released == [(0, 4), (12, 8), (20, 8), (28, 1)]
    arena.released.clear()
    host.wake()
    assert host.backups.give_back([]) == 8
    assert arena.released == [(0, 8), (8, 8), (16, 8), (24, 5)]


def test_what_takes_long_to_give_back_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_backups, "STEP_BYTES", 1 << 20)
    monkeypatch.setattr(copy_progress, "INTERVAL", 0.05)
    host = Host(piece_size=1 << 20)
    host.sleep(4 << 20)
    host.wake()
    (arena,) = host.backups.arenas
    release = arena.release

    def slow(offset: int, size: int) -> int:
        time.sleep(0.07)
        return release(offset, size)

    monkeypatch.setattr(arena, "release", slow)
    with logged("vllm.device_allocator.copy_progress", logging.INFO) as lines:
        assert host.backups.give_back([]) == 4 << 20
    assert any(
        line.startswith("Giving host memory back: 2.0 MiB of 4.0 MiB") for line in lines
    )


def test_leftovers_between_backups_do_not_add_up() -> None:
    """Gaps of less than a piece cannot be given back, so the sleep begins anew."""
    host = Host(piece_size=64)
    host.sleep(60)
    host.wake()
    host.sleep(50, 50)
    assert [arena.size for arena in host.backups.arenas] == [100]


def test_a_refusal_is_told_once_while_it_lasts() -> None:
    host = Host(piece_size=4)
    host.sleep(8)
    (arena,) = host.backups.arenas
    assert isinstance(arena, CountedArena)
    assert host.backups.new_refusals() == {}
    for error in ("out of memory", "not permitted"):
        arena.registration_error = f"{error}; 8 bytes"
        assert host.backups.new_refusals() == {error: 8}
        arena.registration_error = f"{error}; 4 bytes"
        assert host.backups.new_refusals() == {}
    # in other memory it is no news
    host.wake()
    host.backups.give_back([])
    assert host.backups.new_refusals() == {}
    host.sleep(12)
    (arena,) = host.backups.arenas
    assert isinstance(arena, CountedArena)
    arena.registration_error = "not permitted; 4 bytes"
    assert host.backups.new_refusals() == {}
    arena.registration_error = None
    assert host.backups.new_refusals() == {}
    arena.registration_error = "not permitted; 4 bytes"
    assert host.backups.new_refusals() == {"not permitted": 12}


@pytest.mark.parametrize("word", [None, "", *HostMemoryPolicy])
def test_the_policy_is_the_users(
    monkeypatch: pytest.MonkeyPatch, word: str | None
) -> None:
    if word is None:
        monkeypatch.delenv(POLICY_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(POLICY_VARIABLE, word)
    assert host_memory_policy() == (word or "keep")


@pytest.mark.parametrize("word", ["kept", "KEEP", " "])
def test_a_word_that_is_no_policy_is_refused(
    monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setenv(POLICY_VARIABLE, word)
    with pytest.raises(ValueError) as refused:
        host_memory_policy()
    text = str(refused.value)
    assert text.startswith(f"{POLICY_VARIABLE} is {word!r},")
    assert "'keep'" in text and "'release'" in text and "unset it" in text
