# SPDX-License-Identifier: Apache-2.0
"""Host memory of the compiled module, and transfers to and from it, without vLLM."""

import ctypes
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_rocm_memory.sim import hipsim

from .native.cumem import (
    BYTES,
    CHUNK,
    MIB,
    OUT_OF_MEMORY,
    PAGE,
    UNKNOWN,
    VARIABLE,
    Cumem,
    address_of,
    on_the_simulator,
    residency,
)
from .simulated_gpu import IS_HIP, pattern

pytestmark = pytest.mark.skipif(not IS_HIP, reason="this process simulates CUDA")

PIECE = 2 * PAGE
PIECES = 5
SIZE = PIECES * PIECE
DEADLINE = 30  # seconds


@pytest.fixture
def cumem(trampoline: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cumem]:
    monkeypatch.setenv(VARIABLE, str(CHUNK // MIB))
    with on_the_simulator(trampoline) as cumem:
        yield cumem


@pytest.fixture
def arena(cumem: Cumem) -> Iterator[Any]:
    """One of five pieces of two pages."""
    made = cumem.module.HostArena(SIZE, PIECE)
    yield made
    hipsim.reset()  # pytest refers to it for longer than `cumem` lasts
    made.release(0, SIZE)


def content(arena: Any) -> np.ndarray:
    return np.frombuffer(arena, np.uint8).copy()


def piece(arena: Any, number: int, ptr: int) -> tuple[int, int, int]:
    """The copy of a piece's bytes at the same place of a range."""
    return (ptr + number * PIECE, PIECE, arena.address + number * PIECE)


def calls_of(work: Callable[[], Any]) -> Counter[str]:
    """The driver calls that are made meanwhile."""
    before = hipsim.stats().calls
    work()
    return Counter(hipsim.stats().calls) - Counter(before)


def host_copies(work: Callable[[], Any]) -> dict[str, int]:
    """Bytes that are copied meanwhile, by what the host's side is."""
    before = hipsim.stats().host_copies
    work()
    moved: Counter[str] = Counter()
    for (kind, direction), count in hipsim.stats().host_copies.items():
        moved[kind] += count.bytes - before[kind, direction].bytes
    return dict(+moved)


class InThread:
    """A call of the module in a thread of its own, which must end soon."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, **named: Any):
        self.result: Any = None
        self.raised: list[BaseException] = []

        def run() -> None:
            try:
                self.result = function(*arguments, **named)
            except BaseException as error:
                self.raised.append(error)

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def is_running(self) -> bool:
        return self.thread.is_alive()

    def end(self) -> Any:
        self.thread.join(DEADLINE)
        assert not self.thread.is_alive()
        assert self.raised == []
        return self.result


def wait_for_call(call: str, count: int = 1) -> None:
    deadline = time.monotonic() + DEADLINE
    while hipsim.stats().calls[call] < count:
        assert time.monotonic() < deadline, f"{call} is not called"
        time.sleep(0.001)


# --- address space -----------------------------------------------------------------


@pytest.mark.parametrize("size", [1, PAGE - 1, PAGE, PAGE + 1, 5 * MIB + 3])
def test_arena_is_of_exact_size(cumem: Cumem, size: int) -> None:
    arena = cumem.module.HostArena(size)
    assert arena.size == size and arena.address % (2 * MIB) == 0
    whole = -(-size // PAGE) * PAGE
    view = memoryview(arena)
    assert (view.nbytes, view.format, view.readonly) == (size, "B", False)
    ptr = cumem.filled(1, size)
    cumem.module.back_up([(ptr, size, arena.address)])
    assert np.array_equal(content(arena), pattern(1, size))
    assert (arena.prepared, arena.registered) == (size, size)
    assert hipsim.stats().registered_bytes == whole
    view[-1] = 77
    assert ctypes.c_ubyte.from_address(arena.address + size - 1).value == 77
    view.release()
    address = arena.address
    assert residency(address, whole) == [True] * (whole // PAGE)
    del arena
    assert hipsim.stats().registered_ranges == 0
    assert residency(address, whole) is None


def test_arena_costs_nothing_until_it_is_used(cumem: Cumem) -> None:
    size = (130 << 30) + 5
    arena: Any = None

    def make() -> None:
        nonlocal arena
        arena = cumem.module.HostArena(size)

    assert calls_of(make) == Counter()
    assert residency(arena.address, 64 * PAGE) == [False] * 64
    assert (arena.prepared, arena.registered) == (0, 0)
    assert arena.missing(0, size) == size and arena.registration_error is None
    assert arena.piece_size == 64 * MIB


def test_arena_lives_as_long_as_a_view(cumem: Cumem) -> None:
    import torch

    arena = cumem.module.HostArena(2 * PAGE)
    ptr = cumem.malloc(PAGE)
    cumem.module.back_up([(ptr, PAGE, arena.address)])
    views = torch.frombuffer(arena, dtype=torch.uint8).split(PAGE)
    assert views[1].data_ptr() == arena.address + PAGE
    del arena
    assert hipsim.stats().registered_ranges == 1
    views[1].fill_(5)
    del views
    assert hipsim.stats().registered_ranges == 0


def test_arena_lives_as_long_as_a_transfer(cumem: Cumem) -> None:
    arena = cumem.module.HostArena(SIZE, PIECE)
    ptr = cumem.filled(1, SIZE)
    hipsim.configure(copy_latency_us=100_000)
    copy = InThread(cumem.module.back_up, [(ptr, SIZE, arena.address)])
    wait_for_call("hipStreamSynchronize")
    address = arena.address
    del arena
    assert copy.is_running() and residency(address, SIZE) is not None
    copy.end()
    assert residency(address, SIZE) is None
    assert hipsim.stats().registered_ranges == 0


def test_arena_sizes_that_make_no_sense(cumem: Cumem) -> None:
    make = cumem.module.HostArena
    for size in (0, -1):
        with pytest.raises(ValueError, match="at least one byte"):
            make(size)
    for wrong in ("1", 1.5, None, 2**63):
        with pytest.raises(TypeError):
            make(wrong)
    for size in (1 << 62, 2**63 - 1):
        with pytest.raises(MemoryError, match=rf"refuses .*{size} bytes.*RLIMIT_AS"):
            make(size)
    for pieces in (0, -PAGE, 1, PAGE + 1):
        with pytest.raises(ValueError, match="whole pages"):
            make(PAGE, pieces)
    with pytest.raises(ValueError, match="no NUMA node -1"):
        make(PAGE, PIECE, -1)


def test_arena_is_next_to_its_node(cumem: Cumem) -> None:
    arena = cumem.module.HostArena(SIZE, PIECE, 0)
    if arena.node is None:
        pytest.skip("this kernel has no NUMA policies")
    policies = Path("/proc/self/numa_maps").read_text()
    assert re.search(rf"^{arena.address:x} prefer\S*:0", policies, re.M)
    assert cumem.module.HostArena(SIZE, PIECE).node is None
    for absent in (1023, 1024, 2**31 - 1):
        assert cumem.module.HostArena(SIZE, PIECE, absent).node is None


# --- pieces ------------------------------------------------------------------------


def test_pieces_are_made_ready_where_they_are_needed(cumem: Cumem) -> None:
    size = SIZE - PAGE - 5  # the last piece has less than a page
    arena = cumem.module.HostArena(size, PIECE)
    last = size - 4 * PIECE
    ptr = cumem.filled(1, PIECE)
    assert arena.missing(PIECE, 1) == arena.missing(2 * PIECE - 1, 1) == PIECE
    assert arena.missing(2 * PIECE - 1, 2) == 2 * PIECE
    assert arena.missing(size - 1, 1) == last
    assert arena.missing(0, size) == size
    assert arena.missing(0, 0) == arena.missing(size, 0) == 0

    cumem.module.back_up([(ptr, 2, arena.address + 2 * PIECE - 1)])
    assert residency(arena.address, SIZE - PAGE) == (
        [False] * 2 + [True] * 4 + [False] * 3
    )
    assert (arena.prepared, arena.registered) == (2 * PIECE, 2 * PIECE)
    assert hipsim.stats().registered_ranges == 2
    assert arena.missing(PIECE, 2 * PIECE) == 0
    assert arena.missing(0, size) == size - 2 * PIECE

    cumem.module.back_up([(ptr, 1, arena.address + size - 1)])
    assert arena.prepared == 2 * PIECE + last
    assert hipsim.stats().registered_bytes == 2 * PIECE + PAGE
    for offset, length in ((0, size + 1), (size, 1), (size + 1, 0), (2**64 - 1, 2)):
        with pytest.raises(ValueError, match="not within a host arena"):
            arena.missing(offset, length)
        with pytest.raises(ValueError, match="not within a host arena"):
            arena.release(offset, length)


def test_ready_pieces_are_not_touched_again(cumem: Cumem, arena: Any) -> None:
    ptr = cumem.filled(1, SIZE)
    copies = [(ptr, SIZE, arena.address)]
    assert calls_of(lambda: cumem.module.back_up(copies))["hipHostRegister"] == PIECES
    assert calls_of(lambda: cumem.module.back_up(copies))["hipHostRegister"] == 0
    assert calls_of(lambda: cumem.module.restore(copies, []))["hipHostRegister"] == 0


def test_restoring_makes_nothing_ready(cumem: Cumem, arena: Any) -> None:
    memoryview(arena)[PIECE : 2 * PIECE] = pattern(3, PIECE).tobytes()
    ptr = cumem.malloc(PIECE)
    cumem.module.restore([(ptr, PIECE, arena.address + PIECE)], [])
    assert cumem.holds(ptr, 3, PIECE)
    assert (arena.prepared, hipsim.stats().registered_ranges) == (0, 0)


def test_no_copy_crosses_a_piece_or_a_chunk(cumem: Cumem) -> None:
    """Each piece was registered by itself, and HIP may check a copy by one object."""
    arena = cumem.module.HostArena(2 * CHUNK, CHUNK)
    ptr = cumem.filled(1)
    copies = [(ptr + PAGE, 2 * CHUNK - PAGE, arena.address)]
    # pieces end where no chunk does
    assert calls_of(lambda: cumem.module.back_up(copies))["hipMemcpyAsync"] == 3
    expected = pattern(1, BYTES)[PAGE : 2 * CHUNK]
    assert np.array_equal(content(arena)[: 2 * CHUNK - PAGE], expected)
    # what is side by side stays apart: the chunks of two ranges are two objects
    halves = [(ptr, PAGE, arena.address), (ptr + PAGE, PAGE, arena.address + PAGE)]
    assert calls_of(lambda: cumem.module.back_up(halves))["hipMemcpyAsync"] == 2


@pytest.mark.parametrize("threads", [0, 1, 2, 5, 9])
def test_threads_share_the_pieces(cumem: Cumem, arena: Any, threads: int) -> None:
    ptr = cumem.filled(1, SIZE)
    copies = [(ptr, SIZE, arena.address)]
    # each thread asks once where it is
    made = calls_of(lambda: cumem.module.back_up(copies, threads=threads))
    cumem.gpu.write(ptr, pattern(2, SIZE))
    later = calls_of(lambda: cumem.module.back_up(copies, threads=threads))
    expected = min(PIECES, threads) if threads else made["hipGetDevice"] - 1
    assert made["hipGetDevice"] - later["hipGetDevice"] == expected > 0
    assert made["hipHostRegister"] == PIECES
    assert np.array_equal(content(arena), pattern(2, SIZE))
    assert (arena.prepared, arena.registered) == (SIZE, SIZE)


def test_pieces_are_prepared_in_the_order_of_the_copies(
    cumem: Cumem, arena: Any
) -> None:
    ptr = cumem.filled(1, SIZE)
    order = [3, 0, 4, 1, 2]
    copies = [piece(arena, number, ptr) for number in order]
    for nth, number in enumerate(order, 1):
        hipsim.fail("hipHostRegister", nth, OUT_OF_MEMORY)
        cumem.module.back_up(copies, threads=1)
        registered = [False] * PIECES
        for index in range(PIECES):
            before = arena.registered
            registered[index] = is_registered(cumem, arena, index, ptr)
            assert arena.registered >= before
        assert registered.index(False) == number
        assert arena.release(0, SIZE) == SIZE


def is_registered(cumem: Cumem, arena: Any, number: int, ptr: int) -> bool:
    """Whether a copy from a piece needs no detour."""
    copy = [piece(arena, number, ptr)]
    return host_copies(lambda: cumem.module.restore(copy, [])) == {"registered": PIECE}


def test_two_transfers_share_an_arena(cumem: Cumem, arena: Any) -> None:
    """Each prepares what the other has not; a piece is registered once."""
    ptr = cumem.filled(1, SIZE)
    other = cumem.filled(1, SIZE)
    hipsim.configure(copy_latency_us=10_000)
    both = [
        InThread(cumem.module.back_up, [(each, SIZE, arena.address)], threads=2)
        for each in (ptr, other)
    ]
    for copy in both:
        copy.end()
    assert hipsim.stats().calls["hipHostRegister"] == PIECES
    assert np.array_equal(content(arena), pattern(1, SIZE))


def test_one_transfer_uses_several_arenas(cumem: Cumem) -> None:
    ptr = cumem.filled(1, SIZE)
    arenas = [cumem.module.HostArena(PIECE + PAGE, PIECE) for _ in range(2)]
    data = np.zeros(PAGE, np.uint8)
    copies = [
        (ptr, PIECE, arenas[1].address + PAGE),
        (ptr + PIECE, PAGE, address_of(data)),
        (ptr + 2 * PIECE, PIECE, arenas[0].address),
    ]
    moved = host_copies(lambda: cumem.module.back_up(copies))
    assert moved == {"registered": 2 * PIECE, "pageable": PAGE}
    expected = pattern(1, SIZE)
    assert np.array_equal(content(arenas[1])[PAGE:], expected[:PIECE])
    assert np.array_equal(data, expected[PIECE : PIECE + PAGE])
    assert np.array_equal(content(arenas[0])[:PIECE], expected[2 * PIECE : 3 * PIECE])
    assert (arenas[0].prepared, arenas[1].prepared) == (PIECE, PIECE + PAGE)


# --- refused registrations ---------------------------------------------------------


@pytest.mark.parametrize("failing", range(1, PIECES + 1))
def test_piece_that_is_refused_takes_a_detour(
    cumem: Cumem, arena: Any, failing: int
) -> None:
    ptr = cumem.filled(1, SIZE)
    copies = [(ptr, SIZE, arena.address)]
    hipsim.fail("hipHostRegister", failing, OUT_OF_MEMORY)
    moved = host_copies(lambda: cumem.module.back_up(copies, threads=1))
    assert moved == {"registered": SIZE - PIECE, "allocated": PIECE}
    assert (arena.prepared, arena.registered) == (SIZE, SIZE - PIECE)
    assert re.match(
        r"hipHostRegister failed: hipErrorOutOfMemory \(2\): out of memory; 8192 bytes",
        arena.registration_error,
    )
    assert np.array_equal(content(arena), pattern(1, SIZE))
    assert hipsim.stats().calls["hipHostRegister"] == PIECES  # a success in between
    assert hipsim.stats().host_allocations == 0

    cumem.gpu.write(ptr, pattern(2, SIZE))
    moved = host_copies(lambda: cumem.module.restore(copies, []))
    assert moved == {"registered": SIZE - PIECE, "allocated": PIECE}
    assert cumem.holds(ptr, 1, SIZE)

    # the next transfer out tries it again, and nothing else
    made = calls_of(lambda: cumem.module.back_up(copies))
    assert (made["hipHostRegister"], made["hipHostMalloc"]) == (1, 0)
    assert arena.registration_error is None and arena.registered == SIZE


@pytest.mark.parametrize("first", [1, 2, 4])
def test_two_refusals_in_a_row_are_enough(cumem: Cumem, arena: Any, first: int) -> None:
    """A limit on locked memory refuses every piece, and each refusal takes time."""
    ptr = cumem.filled(1, SIZE)
    copies = [(ptr, SIZE, arena.address)]
    for nth in range(first, first + 2):
        hipsim.fail("hipHostRegister", nth, OUT_OF_MEMORY)
    made = calls_of(lambda: cumem.module.back_up(copies, threads=1))
    assert made["hipHostRegister"] == first + 1
    assert (arena.prepared, arena.registered) == (SIZE, (first - 1) * PIECE)
    assert "hipErrorOutOfMemory" in arena.registration_error
    assert np.array_equal(content(arena), pattern(1, SIZE))
    made = calls_of(lambda: cumem.module.back_up(copies, threads=1))
    assert made["hipHostRegister"] == PIECES - first + 1
    assert arena.registration_error is None


def test_refusals_with_a_success_in_between_are_not(cumem: Cumem, arena: Any) -> None:
    ptr = cumem.filled(1, SIZE)
    for nth in (1, 3, 5):
        hipsim.fail("hipHostRegister", nth, OUT_OF_MEMORY)
    copies = [(ptr, SIZE, arena.address)]
    made = calls_of(lambda: cumem.module.back_up(copies, threads=1))
    assert made["hipHostRegister"] == PIECES
    assert arena.registered == 2 * PIECE


def test_refusal_counts_for_every_arena_of_a_transfer(cumem: Cumem) -> None:
    ptr = cumem.filled(1, SIZE)
    arenas = [cumem.module.HostArena(PIECE, PIECE) for _ in range(3)]
    copies = [(ptr, PIECE, arena.address) for arena in arenas]
    hipsim.configure(max_registration_bytes=1)
    made = calls_of(lambda: cumem.module.back_up(copies, threads=1))
    assert made["hipHostRegister"] == 2
    for arena in arenas:
        assert "hipErrorOutOfMemory" in arena.registration_error


# --- giving memory back ------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "size", "pieces"),
    [
        (0, SIZE - PAGE, [0, 1, 2, 3, 4]),
        (0, PIECE, [0]),
        (1, 2 * PIECE, [1]),
        (PIECE, 2 * PIECE - 1, [1]),
        (PAGE, PIECE, []),
        (3 * PIECE, 2 * PIECE - PAGE, [3, 4]),
        (3 * PIECE, 2 * PIECE - PAGE - 1, [3]),
        (4 * PIECE + 1, PAGE - 1, []),
        (0, 0, []),
        (SIZE - PAGE, 0, []),
    ],
)
def test_whole_pieces_are_given_back(
    cumem: Cumem, offset: int, size: int, pieces: list[int]
) -> None:
    whole = SIZE - PAGE  # the last piece is one page
    arena = cumem.module.HostArena(whole, PIECE)
    ptr = cumem.filled(1, whole)
    cumem.module.back_up([(ptr, whole, arena.address)])
    given = sum(PAGE if each == 4 else PIECE for each in pieces)
    assert arena.release(offset, size) == given
    assert arena.prepared == arena.registered == whole - given
    assert hipsim.stats().registered_bytes == whole - given
    expected = pattern(1, whole).copy()
    resident = residency(arena.address, whole)
    assert resident is not None
    for each in range(PIECES):
        pages = slice(2 * each, min(2 * each + 2, whole // PAGE))
        assert resident[pages] == [each not in pieces] * len(resident[pages])
        if each in pieces:
            expected[each * PIECE : (each + 1) * PIECE] = 0
    assert np.array_equal(content(arena), expected)
    assert arena.release(offset, size) == 0
    # and may be had again
    cumem.module.back_up([(ptr, whole, arena.address)])
    assert np.array_equal(content(arena), pattern(1, whole))
    assert arena.registered == whole


@pytest.mark.parametrize("failing", range(1, PIECES + 1))
def test_piece_that_is_not_unregistered_stays_usable(
    cumem: Cumem, arena: Any, failing: int, capfd: pytest.CaptureFixture[str]
) -> None:
    ptr = cumem.filled(1, SIZE)
    copies = [(ptr, SIZE, arena.address)]
    cumem.module.back_up(copies)
    hipsim.fail("hipHostUnregister", failing, UNKNOWN)
    assert arena.release(0, SIZE) == SIZE - PIECE
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("cumem: hipHostUnregister failed: hipErrorUnknown (999)")
    assert arena.prepared == arena.registered == PIECE
    kept = slice((failing - 1) * PIECE, failing * PIECE)
    assert np.array_equal(content(arena)[kept], pattern(1, SIZE)[kept])
    made = calls_of(lambda: cumem.module.back_up(copies))
    assert made["hipHostRegister"] == PIECES - 1
    assert np.array_equal(content(arena), pattern(1, SIZE))
    assert arena.release(0, SIZE) == SIZE
    assert hipsim.stats().registered_ranges == 0


def test_unregistered_pieces_are_given_back(cumem: Cumem, arena: Any) -> None:
    hipsim.configure(max_registration_bytes=1)
    ptr = cumem.filled(1, SIZE)
    cumem.module.back_up([(ptr, SIZE, arena.address)])
    made = calls_of(lambda: arena.release(0, SIZE))
    assert made == Counter()
    assert arena.prepared == 0 and arena.registration_error is None


def test_memory_is_not_given_back_under_a_transfer(cumem: Cumem, arena: Any) -> None:
    ptr = cumem.filled(1, SIZE)
    hipsim.configure(copy_latency_us=60_000_000)
    copy = InThread(cumem.module.back_up, [(ptr, SIZE, arena.address)])
    wait_for_call("hipStreamSynchronize")
    other = cumem.module.HostArena(PIECE, PIECE)
    assert other.release(0, PIECE) == 0  # which nobody uses
    release = InThread(arena.release, 0, SIZE)
    time.sleep(0.05)
    assert release.is_running()
    assert hipsim.stats().calls["hipHostUnregister"] == 0
    hipsim.reset()
    copy.end()
    assert release.end() == SIZE


@pytest.mark.parametrize("failing", [[1], [3], [2, 4], [PIECES]])
def test_what_stays_registered_of_an_arena_is_freed_later(
    cumem: Cumem, failing: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    """And the rest of it at once."""
    arena = cumem.module.HostArena(SIZE, PIECE)
    ptr = cumem.malloc(SIZE)
    cumem.module.back_up([(ptr, SIZE, arena.address)])
    for nth in failing:
        hipsim.fail("hipHostUnregister", nth, UNKNOWN)
    address = arena.address
    del arena
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("cumem: hipHostUnregister failed: hipErrorUnknown (999)")
    left = len(failing) * PIECE
    assert f" {left} bytes " in line and "stay registered" in line
    assert hipsim.stats().registered_bytes == left

    def mapped() -> list[int]:
        starts = range(address, address + SIZE, PIECE)
        pieces = [residency(start, PIECE) for start in starts]
        return [nth for nth, pages in enumerate(pieces, 1) if pages is not None]

    assert mapped() == failing
    hipsim.fail("hipHostUnregister", 1, UNKNOWN)
    assert cumem.module.release_pending() == 1
    assert mapped() == failing[:1] and hipsim.stats().registered_bytes == PIECE
    assert cumem.module.release_pending() == 0
    assert hipsim.stats().registered_ranges == 0 and mapped() == []


def registered_and_let_go(cumem: Cumem, ptr: int) -> None:
    """Leaves an arena that the driver does not unregister."""
    arena = cumem.module.HostArena(PAGE)
    cumem.module.back_up([(ptr, PAGE, arena.address)])
    hipsim.fail("hipHostUnregister", 1, UNKNOWN)


@pytest.mark.parametrize("retry", ["suspend", "back_up", "restore"])
def test_what_a_capture_does_not_bear_is_left_to_calls_that_wait(
    cumem: Cumem, retry: str
) -> None:
    """Unregistering is refused while a graph is captured, and spoils the capture."""
    ptr, other = cumem.malloc(), cumem.malloc()
    registered_and_let_go(cumem, ptr)
    unregistered = hipsim.stats().calls["hipHostUnregister"]
    assert unregistered == 1
    cumem.torch.free(cumem.malloc(), BYTES)
    cumem.module.free(other)
    assert hipsim.stats().calls["hipHostUnregister"] == unregistered
    assert hipsim.stats().registered_ranges == 1
    arguments = ([ptr],) if retry == "suspend" else ([],)
    getattr(cumem.module, retry)(*arguments, *([[]] if retry == "restore" else []))
    assert hipsim.stats().registered_ranges == 0


# --- the ring ----------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, PAGE, 3 * PAGE + 5, 3 * CHUNK])
def test_everything_may_take_the_detour(cumem: Cumem, size: int) -> None:
    hipsim.configure(max_registration_bytes=1)
    ptr = cumem.filled(1, size)
    arena = cumem.module.HostArena(size, CHUNK)
    copies = [(ptr, size, arena.address)]
    progress = cumem.module.Progress()
    moved = host_copies(lambda: cumem.module.back_up(copies, progress))
    assert moved == {"allocated": size} and progress.done == size
    assert np.array_equal(content(arena), pattern(1, size))
    cumem.gpu.write(ptr, pattern(2, size))
    progress = cumem.module.Progress()
    moved = host_copies(lambda: cumem.module.restore(copies, [], progress))
    assert moved == {"allocated": size} and progress.done == size
    assert np.array_equal(cumem.gpu.read(ptr)[:size], pattern(1, size))
    stats = hipsim.stats()
    assert (stats.host_allocations, stats.streams) == (0, 0)


def test_no_more_is_locked_than_the_ring(cumem: Cumem) -> None:
    """Eight slots of a piece's size while there is work for as many."""
    hipsim.configure(max_registration_bytes=1, copy_latency_us=2_000)
    size = 20 * PIECE
    ptr = cumem.filled(1, size)
    arena = cumem.module.HostArena(size, PIECE)
    copy = InThread(cumem.module.back_up, [(ptr, size, arena.address)])
    locked = [0]
    while copy.is_running():
        locked.append(hipsim.stats().host_allocation_bytes)
    copy.end()
    assert max(locked) == 8 * PIECE
    assert np.array_equal(content(arena), pattern(1, size))


def test_ring_is_no_larger_than_its_work(cumem: Cumem, arena: Any) -> None:
    hipsim.configure(max_registration_bytes=1)
    ptr = cumem.filled(1, SIZE)
    copies = [(ptr, 3, arena.address), (ptr + PAGE, PIECE, arena.address + PIECE)]
    made = calls_of(lambda: cumem.module.back_up(copies, threads=1))
    assert (made["hipHostMalloc"], made["hipHostFree"]) == (2, 2)
    assert made["hipStreamCreateWithFlags"] == 2  # none for direct copies


def test_slots_are_16_mib_at_most(
    cumem: Cumem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "64")
    hipsim.configure(max_registration_bytes=1, stale_memory="clean")
    size = 33 * MIB
    ptr = cumem.malloc(size)
    arena = cumem.module.HostArena(size)
    made = calls_of(lambda: cumem.module.back_up([(ptr, size, arena.address)]))
    assert (made["hipHostMalloc"], made["hipMemcpyAsync"]) == (3, 3)


@pytest.mark.parametrize(
    ("piece", "locked", "slots", "refused"),
    [
        (512, 640, [512, 128], [512, 256, 128, 64]),
        (512, 448, [256, 128, 64], [512, 256, 128, 64]),
        (512, 64, [64], [512, 256, 128, 64]),
        (96, 64, [64], [96, 64]),
        (512, 63, [], [512, 256, 128, 64]),
        (96, 63, [], [96, 64]),
        # for which there are no slots of 64
        (32, 64, [32, 32], [32]),
        (32, 31, [], [32]),
    ],
)
def test_slots_are_halved_where_little_can_be_locked(
    cumem: Cumem, piece: int, locked: int, slots: list[int], refused: list[int]
) -> None:
    """KiB, down to 64. Without a slot the driver copies by itself."""
    hipsim.configure(max_registration_bytes=1, max_locked_bytes=locked << 10)
    size = 1536 << 10
    ptr = cumem.filled(1, size)
    arena = cumem.module.HostArena(size, piece << 10)
    copies = [(ptr, size, arena.address)]
    made: Counter[str] = Counter()

    def back_up() -> None:
        nonlocal made
        made = calls_of(lambda: cumem.module.back_up(copies))

    kind = "allocated" if slots else "pageable"
    assert host_copies(back_up) == {kind: size}
    assert made["hipHostFree"] == len(slots)
    assert made["hipHostMalloc"] == len(slots) + len(refused)
    assert np.array_equal(content(arena), pattern(1, size))
    cumem.gpu.write(ptr, pattern(2, size))
    assert host_copies(lambda: cumem.module.restore(copies, [])) == {kind: size}
    assert cumem.holds(ptr, 1, size)


@pytest.mark.parametrize("nth", [2, 3, 5])
def test_stream_that_is_refused_ends_the_list_of_slots(
    cumem: Cumem, arena: Any, nth: int
) -> None:
    hipsim.configure(max_registration_bytes=1)
    ptr = cumem.filled(1, SIZE)
    copies = [(ptr, SIZE, arena.address)]
    hipsim.fail("hipStreamCreateWithFlags", nth, OUT_OF_MEMORY)
    made: Counter[str] = Counter()

    def back_up() -> None:
        nonlocal made
        made = calls_of(lambda: cumem.module.back_up(copies, threads=1))

    assert host_copies(back_up) == {"allocated": SIZE}
    assert made["hipStreamCreateWithFlags"] == made["hipHostMalloc"] == nth
    assert made["hipStreamDestroy"] == nth - 1 and made["hipHostFree"] == nth
    assert np.array_equal(content(arena), pattern(1, SIZE))


def test_first_stream_that_is_refused_is_told(cumem: Cumem, arena: Any) -> None:
    hipsim.configure(max_registration_bytes=1)
    ptr = cumem.filled(1, SIZE)
    hipsim.fail("hipStreamCreateWithFlags", 1, OUT_OF_MEMORY)
    with pytest.raises(cumem.module.OutOfMemoryError, match="hipStreamCreate"):
        cumem.module.back_up([(ptr, SIZE, arena.address)])
    assert hipsim.stats().host_allocations == 0


def test_two_devices_have_a_ring_each(cumem: Cumem, arena: Any) -> None:
    hipsim.configure(max_registration_bytes=1)
    ptrs = [cumem.malloc(PIECE, device) for device in (0, 1)]
    memoryview(arena)[: 2 * PIECE] = pattern(5, 2 * PIECE).tobytes()
    copies = [(p, PIECE, arena.address + i * PIECE) for i, p in enumerate(ptrs)]
    cumem.module.restore(copies, [])
    ctypes.memset(arena.address, 0, SIZE)
    made = calls_of(lambda: cumem.module.back_up(copies))
    assert made["hipHostMalloc"] == made["hipDeviceSynchronize"] == 2
    assert np.array_equal(content(arena)[: 2 * PIECE], pattern(5, 2 * PIECE))


def test_slot_that_is_not_freed_is_freed_later(
    cumem: Cumem, arena: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    hipsim.configure(max_registration_bytes=1)
    ptr = cumem.filled(1, SIZE)
    hipsim.fail("hipHostFree", 2, UNKNOWN)
    cumem.module.back_up([(ptr, SIZE, arena.address)])
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("cumem: hipHostFree failed with error 999: locked host")
    assert hipsim.stats().host_allocations == 1
    assert cumem.module.release_pending() == 0
    assert hipsim.stats().host_allocations == 0


# --- streams -----------------------------------------------------------------------


def test_transfer_waits_for_the_device_and_each_stream_once(cumem: Cumem) -> None:
    ptrs = [cumem.filled(number) for number in range(3)]
    arena = cumem.module.HostArena(3 * BYTES, CHUNK)
    copies = [(p, BYTES, arena.address + i * BYTES) for i, p in enumerate(ptrs)]
    backed_up = calls_of(lambda: cumem.module.back_up(copies))
    restored = calls_of(lambda: cumem.module.restore(copies[:2], [(ptrs[2], BYTES)]))
    for made, streams in ((backed_up, 2), (restored, 3)):
        assert made["hipDeviceSynchronize"] == 1
        assert made["hipStreamCreateWithFlags"] == streams
        assert made["hipStreamSynchronize"] == streams
        assert made["hipStreamDestroy"] == streams
        blocking = ("hipMemcpy", "hipMemset", "hipFree", "hipMalloc", "hipHostMalloc")
        assert not any(made[call] for call in blocking)
    assert restored["hipMemsetAsync"] == 3


def test_window_is_waited_for_stream_by_stream(cumem: Cumem, arena: Any) -> None:
    assert f" = {1 << 30})" in cumem.module.back_up.__doc__.splitlines()[0]
    ptr = cumem.filled(1, SIZE)
    copies = [(ptr, SIZE, arena.address)]
    cumem.module.back_up(copies)
    for window, waits in ((SIZE, 2), (2 * PIECE, 3), (PIECE, 5), (PAGE, 10)):
        made = calls_of(lambda w=window: cumem.module.back_up(copies, window=w))
        assert made["hipStreamSynchronize"] == waits, window
        assert made["hipMemcpyAsync"] == (10 if window == PAGE else PIECES)
    for function in (
        lambda: cumem.module.back_up(copies, window=0),
        lambda: cumem.module.restore(copies, [], window=0),
    ):
        with pytest.raises(ValueError, match="at least one byte"):
            function()


@pytest.mark.parametrize("function", ["back_up", "restore"])
def test_progress_is_told_meanwhile(cumem: Cumem, arena: Any, function: str) -> None:
    ptr = cumem.filled(1, SIZE)
    copies = [(ptr, SIZE, arena.address)]
    cumem.module.back_up(copies)
    progress = cumem.module.Progress()
    assert (progress.started, progress.done) == (False, 0)
    hipsim.configure(copy_latency_us=60_000)
    arguments = ([],) if function == "restore" else ()
    copy = InThread(
        getattr(cumem.module, function), copies, *arguments, progress, window=PIECE
    )
    seen = [0]
    while copy.is_running():
        seen.append(progress.done)
        time.sleep(0.001)
    copy.end()
    assert progress.done == SIZE
    assert seen == sorted(seen)
    assert any(0 < done < SIZE and done % PIECE == 0 for done in seen)
    # and goes on, for whoever counts several transfers
    cumem.module.back_up(copies, progress)
    assert progress.done == 2 * SIZE


def test_transfer_says_when_it_has_let_go_of_pythons_lock(
    cumem: Cumem, arena: Any
) -> None:
    """Also one that waits for another, and one of nothing."""
    ptr = cumem.malloc(PAGE)
    copies = [(ptr, PAGE, arena.address)]
    cumem.module.back_up(copies)
    waits = hipsim.stats().calls["hipStreamSynchronize"]
    hipsim.configure(copy_latency_us=60_000_000)
    first, second = cumem.module.Progress(), cumem.module.Progress()
    copying = [
        InThread(cumem.module.back_up, copies, first),
        InThread(cumem.module.restore, copies, [], second),
    ]
    deadline = time.monotonic() + DEADLINE
    while not (first.started and second.started):
        assert time.monotonic() < deadline
    wait_for_call("hipStreamSynchronize", waits + 1)
    assert all(copy.is_running() for copy in copying)
    hipsim.configure(copy_latency_us=0)  # also for the second, which begins in reset()
    hipsim.reset()
    for copy in copying:
        copy.end()
    for call in (
        lambda progress: cumem.module.back_up([], progress),
        lambda progress: cumem.module.restore([], [], progress),
    ):
        progress = cumem.module.Progress()
        call(progress)
        assert progress.started


def test_fills_run_beside_copies_and_count_for_nothing(
    cumem: Cumem, arena: Any
) -> None:
    ptr, other = cumem.filled(1, SIZE), cumem.filled(2, SIZE)
    copies = [(ptr, SIZE, arena.address)]
    cumem.module.back_up(copies)
    cumem.gpu.write(ptr, pattern(3, SIZE))
    progress = cumem.module.Progress()
    hipsim.configure(fill_latency_us=60_000_000)
    wake = InThread(cumem.module.restore, copies, [(other, SIZE)], progress)
    deadline = time.monotonic() + DEADLINE
    while progress.done < SIZE:  # no copy waits for a fill
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert wake.is_running()
    hipsim.reset()
    wake.end()
    assert progress.done == SIZE
    assert cumem.holds(ptr, 1, SIZE) and not cumem.gpu.read(other).any()


def test_wrong_arguments(cumem: Cumem) -> None:
    for arguments in (([], "progress"), ([], None, -1), ([], None, "1")):
        with pytest.raises(TypeError):
            cumem.module.back_up(*arguments)
    with pytest.raises(TypeError):
        cumem.module.restore([], [], 7)


# --- faults ------------------------------------------------------------------------


@pytest.mark.parametrize("detour", [False, True], ids=["direct", "ring"])
def test_every_call_of_a_transfer_fails_in_turn(cumem: Cumem, detour: bool) -> None:
    """Of a first backup, into pieces that threads prepare, and of what follows."""
    harmless = {
        # refused: the piece takes the detour, and the slot is one fewer
        "hipHostRegister",
        "hipHostMalloc",
        # tried again by the next call
        "hipStreamDestroy",
        "hipHostFree",
    }
    ptr, zeroed = cumem.malloc(SIZE), cumem.malloc(SIZE)
    state: dict[str, Any] = {}

    def copies() -> list[tuple[int, int, int]]:
        return [(ptr, SIZE, state["arena"].address)]

    def start(backed_up: bool) -> None:
        hipsim.reset()
        hipsim.configure(max_registration_bytes=1 if detour else 0)
        state["arena"] = cumem.module.HostArena(SIZE, PIECE)
        cumem.gpu.write(ptr, pattern(1, SIZE))
        if backed_up:
            cumem.module.back_up(copies(), threads=2)
            cumem.gpu.write(ptr, pattern(2, SIZE))

    def back_up() -> None:
        cumem.module.back_up(copies(), threads=2)

    def restore() -> None:
        cumem.module.restore(copies(), [(zeroed, SIZE)])

    def check(operation: Callable[[], None]) -> None:
        assert np.array_equal(content(state["arena"]), pattern(1, SIZE))
        if operation is restore:
            assert cumem.holds(ptr, 1, SIZE) and not cumem.gpu.read(zeroed).any()

    injected = 0
    for operation in (back_up, restore):
        start(operation is restore)
        for call, count in calls_of(operation).items():
            for nth in range(1, count + 1):
                start(operation is restore)
                hipsim.fail(call, nth, UNKNOWN)
                told = ""
                try:
                    operation()
                except cumem.module.DriverError as error:
                    told = error.call
                injected += hipsim.stats().pending_faults == 0
                # of another slot than the first, which is one fewer, too
                is_spare = detour and nth > 1 and call == "hipStreamCreateWithFlags"
                is_harmless = call in harmless or is_spare
                assert told == call or (not told and is_harmless), (call, nth)
                if not told:
                    check(operation)
                assert cumem.module.release_pending() == 0
                stats = hipsim.stats()
                assert (stats.streams, stats.host_allocations) == (0, 0), (call, nth)
                prepared = state["arena"].prepared
                operation()
                assert state["arena"].prepared >= prepared
                check(operation)
        del state["arena"]
    assert injected > 30


@pytest.mark.parametrize("call", ["hipMemcpyAsync", "hipMemsetAsync"])
def test_stream_whose_first_call_fails_is_waited_for(
    cumem: Cumem, arena: Any, call: str
) -> None:
    """What the driver has queued before it failed is not known."""
    ptr, other = cumem.filled(1, PIECE), cumem.malloc(PIECE)
    copies = [(ptr, PIECE, arena.address)]
    cumem.module.back_up(copies)
    operations: dict[str, Callable[[], None]] = {
        "hipMemcpyAsync": lambda: cumem.module.back_up(copies),
        "hipMemsetAsync": lambda: cumem.module.restore([], [(other, PIECE)]),
    }

    def fail() -> None:
        hipsim.fail(call, 1, UNKNOWN)
        with pytest.raises(cumem.module.DriverError, match=call):
            operations[call]()

    assert calls_of(fail)["hipStreamSynchronize"] == 1


def test_failing_backup_keeps_the_ready_pieces(cumem: Cumem, arena: Any) -> None:
    ptr = cumem.filled(1, SIZE)
    copies = [(ptr, SIZE, arena.address)]
    hipsim.fail("hipMemcpyAsync", PIECES, UNKNOWN)
    with pytest.raises(cumem.module.DriverError, match="hipMemcpyAsync"):
        cumem.module.back_up(copies)
    assert arena.registered == SIZE
    made = calls_of(lambda: cumem.module.back_up(copies))
    assert made["hipHostRegister"] == 0
    assert np.array_equal(content(arena), pattern(1, SIZE))
