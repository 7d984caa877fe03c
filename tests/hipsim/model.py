# SPDX-License-Identifier: Apache-2.0
"""HIP in dictionaries and byte strings: what each call returns, and every byte.

The model knows no stream but those whose order is certain: work runs at once, which is
what the NULL stream and one blocking stream amount to. It makes no address and no
handle; the caller tells it what the runtime made. Where neither HIP's sources nor its
tests say what a call does, or its outcome depends on time, it raises `Unspecified`,
and the call should not be made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import combinations, pairwise, repeat

PAGE = 4096
DEVICES = 8
BIGGEST_BLIT = 16 * 1024
KERNEL_ARGUMENTS = 128 * 1024
NO_INDEX = 2**64 - 1

# Larger memory is accounted for, and its bytes are nobody's business.
MOST_BYTES = 1 << 20

HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT = range(5)
NO_CU = 1024
GLOBAL, THREAD_LOCAL, RELAXED = range(3)
NONE, ACTIVE, INVALIDATED = range(3)
AT_DEVICE, AT_HOST = 1, 2
PREFER_CE, SWAP, INDIRECT = 0x100, 0x200, 0x400 | 0x800
KNOWN_REGISTER_FLAGS = 1 | 2 | 4 | 8 | 0x8000_0000


class Error(IntEnum):
    """hipError_t."""

    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    INVALID_PITCH = 12
    INVALID_DIRECTION = 21
    INVALID_DEVICE = 101
    INVALID_HANDLE = 400
    ILLEGAL_STATE = 401
    NOT_FOUND = 500
    NOT_READY = 600
    ILLEGAL_ADDRESS = 700
    CONTEXT_IS_DESTROYED = 709
    ALREADY_REGISTERED = 712
    NOT_REGISTERED = 713
    NOT_SUPPORTED = 801
    CAPTURE_UNSUPPORTED = 900
    CAPTURE_INVALIDATED = 901
    CAPTURE_UNMATCHED = 903
    CAPTURE_UNJOINED = 904
    CAPTURE_ISOLATION = 905
    CAPTURE_IMPLICIT = 906
    CAPTURED_EVENT = 907
    UNKNOWN = 999


class Unspecified(Exception):
    """Nobody could say what the call does."""


class _Refused(Exception):
    """The call returns an error."""

    def __init__(self, *errors: Error) -> None:
        self.errors = errors


@dataclass(frozen=True)
class Release:
    """Where one release differs from the others; profile.h has the words."""

    batch_is_a_loop: bool = True
    attributes_are_refused: bool = True
    flags_count: bool = False
    blit_batch_limit: int = 2**64
    map_failure_is_silent: bool = True
    retain_takes_reference: bool = False
    host_access: bool = False
    unmap_keeps_memory: bool = False
    invalid_streams_stay: bool = True
    recommended_granularity: int = PAGE

    # None: not established.
    legacy_work_breaks_captures: bool | None = True
    map_error: Error | None = Error.OUT_OF_MEMORY


_7_1 = Release()
_7_2_3 = replace(
    _7_1,
    map_failure_is_silent=False,
    host_access=True,
    unmap_keeps_memory=True,
    legacy_work_breaks_captures=None,
)
_7_12 = replace(
    _7_2_3,
    batch_is_a_loop=False,
    attributes_are_refused=False,
    retain_takes_reference=True,
    recommended_granularity=2 << 20,
)
_7_13 = replace(
    _7_12,
    flags_count=True,
    unmap_keeps_memory=False,
    legacy_work_breaks_captures=False,
)
_7_15 = replace(
    _7_13, blit_batch_limit=8192, invalid_streams_stay=False, map_error=None
)
RELEASES = {
    "7.1": _7_1,
    "7.2.3": _7_2_3,
    "7.12": _7_12,
    "7.13": _7_13,
    "7.15": _7_15,
    "7.16": _7_15,
}


@dataclass(frozen=True)
class Answer:
    """What a call must return.

    Attributes:
        errors: One of these.
        outputs: What it writes, None where that is left open; on success only, but for
            a batch's failing index.
        adopt: Takes what a successful call made.
    """

    errors: tuple[Error, ...] = (Error.SUCCESS,)
    outputs: tuple[int | None, ...] = ()
    adopt: Callable[[int], None] | None = None


SUCCESS = Answer()


# --- what there is -------------------------------------------------------------------


@dataclass(eq=False)
class Physical:
    """Memory of a device; of a virtual allocation, with what was asked for."""

    device: int
    size: int
    data: bytearray
    named_device: int = 0
    handle_types: int = 0


@dataclass(eq=False)
class Range:
    """Addresses in a row: of an allocation, an import, or host memory."""

    base: int
    size: int
    data: bytearray
    start: int = 0
    device: int = -1
    aliased: bool = False
    alias: int | None = None

    def offset(self, address: int) -> int:
        """How far inside the address is; it is one of the host's or the device's."""
        inside = self.base <= address < self.base + self.size
        return address - (self.base if inside or self.alias is None else self.alias)


@dataclass(eq=False)
class Mapping:
    base: int
    memory: Physical
    access: dict[int, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.base + self.memory.size


@dataclass(eq=False)
class Reservation:
    base: int
    size: int
    mappings: dict[int, Mapping] = field(default_factory=dict)
    held: list[Physical] = field(default_factory=list)


@dataclass(eq=False)
class Capture:
    mode: int
    origin: int
    valid: bool = True
    nodes: list[Work] = field(default_factory=list)

    # For each stream of it, all nodes that its next one would come after.
    members: dict[int, set[int]] = field(default_factory=dict)


@dataclass(eq=False)
class Event:
    device: int
    timing: bool
    stream: int | None = None
    captured: tuple[Capture, frozenset[int]] | None = None


@dataclass(frozen=True)
class Side:
    """An end of a copy: an address in memory of a kind, of which it has an owner."""

    address: int
    kind: str
    owner: Range | None = None
    row: int = 0
    slice: int = 0


@dataclass(frozen=True)
class Work:
    """A copy, or a fill if there is no source."""

    to: Side
    source: Side | None
    value: int
    width: int
    height: int = 1
    depth: int = 1

    def reach(self, side: Side) -> int:
        return (self.depth - 1) * side.slice + (self.height - 1) * side.row + self.width

    def rows(self, side: Side) -> Iterator[int]:
        for z in range(self.depth):
            for y in range(self.height):
                yield side.address + z * side.slice + y * side.row


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _holder(ranges: Iterable[Range], address: int) -> Range | None:
    for each in ranges:
        if each.base <= address < each.base + each.size:
            return each
    return None


class Hip:
    """One process's runtime, with one thread calling it.

    A method is a function of HIP with its arguments, pointers and handles as numbers.
    """

    def __init__(self, release: Release, total: int, arena: int, host: bytes) -> None:
        """A runtime that has not been used.

        Args:
            release: How it differs from others.
            total: Bytes of each device.
            arena: The address of host memory that the program uses.
            host: What is in it.
        """
        self.release = release
        self.total = total
        self.arena = arena
        self.host = bytearray(host)
        self.aliases = False
        self.fault = False
        self.pending = False
        self.device = 0
        self.mode = GLOBAL
        self.charged = [0] * DEVICES
        self.allocations: dict[int, Range] = {}
        self.locked: dict[int, Range] = {}
        self.registered: dict[int, Range] = {}
        self.reservations: dict[int, Reservation] = {}
        self.handles: dict[int, tuple[Physical, int]] = {}
        self.streams: list[int] = []
        self.unusable: set[int] = set()
        self.events: dict[int, Event] = {}
        self.captures: list[Capture] = []
        self.graphs: dict[int, list[Work]] = {}
        self.executables: dict[int, tuple[list[Work], int]] = {}

    def call(self, name: str, *arguments: object) -> Answer:
        """What function `name` must return, and its effects.

        Raises:
            Unspecified: The call should not be made. The model has not changed.
        """
        try:
            answer: Answer = getattr(self, name)(*arguments)
        except _Refused as refused:
            return Answer(refused.errors)
        return answer

    def reset(self) -> None:
        """What the simulator's own reset() does to a program."""
        self.unusable.clear()
        for capture in self.captures:
            capture.valid = False
        self.unusable.clear()
        self.aliases = self.fault = self.pending = False

    # --- captures --------------------------------------------------------------------

    def _capture_of(self, stream: int) -> Capture | None:
        for capture in self.captures:
            if stream in capture.members:
                return capture
        return None

    def active(self) -> list[Capture]:
        return [capture for capture in self.captures if capture.valid]

    def _status(self, stream: int) -> int:
        capture = self._capture_of(stream)
        if capture is not None:
            return ACTIVE if capture.valid else INVALIDATED
        return INVALIDATED if stream in self.unusable else NONE

    def _spoil(self, captures: Sequence[Capture], error: Error) -> None:
        for capture in captures:
            capture.valid = False
        if captures:
            raise _Refused(error)

    def _unsafe(self) -> None:
        """A call that a capture of this thread forbids in most modes."""
        if self.mode != RELAXED:
            spoilt = [c for c in self.active() if c.mode != RELAXED]
            self._spoil(spoilt, Error.CAPTURE_UNSUPPORTED)

    def _synchronous(self) -> None:
        """A call that waits for the legacy stream."""
        self._spoil(self.active(), Error.CAPTURE_IMPLICIT)

    def _target(self, stream: int) -> Capture | None:
        """Where work on the stream goes: into a capture, or None, to run."""
        if stream == 0:
            if self.active() and self.release.legacy_work_breaks_captures is None:
                raise Unspecified
            if self.release.legacy_work_breaks_captures:
                self._synchronous()
        elif stream not in self.streams:
            raise _Refused(Error.INVALID_HANDLE)
        elif self._status(stream) == INVALIDATED:
            raise _Refused(Error.CAPTURE_INVALIDATED)
        elif (capture := self._capture_of(stream)) is not None:
            return capture
        self._ordered(stream)
        return None

    def _ordered(self, stream: int) -> None:
        """Work of other streams and devices has no certain order."""
        if self.device != 0 or (stream != 0 and stream != self.streams[0]):
            raise Unspecified

    def hipStreamBeginCapture(self, stream: int, mode: int) -> Answer:
        if stream == 0:
            raise _Refused(Error.CAPTURE_UNSUPPORTED)
        if stream not in self.streams:
            raise Unspecified
        if mode > RELAXED:
            raise _Refused(Error.INVALID_VALUE)
        capture = self._capture_of(stream)
        if capture is not None:
            if not capture.valid:
                raise Unspecified
            raise _Refused(Error.ILLEGAL_STATE)
        self.unusable.discard(stream)
        self.captures.append(Capture(mode, stream, members={stream: set()}))
        return SUCCESS

    def hipStreamEndCapture(self, stream: int) -> Answer:
        if stream == 0:
            raise _Refused(Error.ILLEGAL_STATE)
        if stream not in self.streams:
            raise _Refused(Error.CONTEXT_IS_DESTROYED)
        capture = self._capture_of(stream)
        if capture is None:
            if stream in self.unusable:
                raise _Refused(Error.CAPTURE_INVALIDATED)
            raise _Refused(Error.ILLEGAL_STATE)
        if capture.origin != stream:
            raise _Refused(Error.CAPTURE_UNMATCHED)
        self.captures.remove(capture)
        if not capture.valid:
            if self.release.invalid_streams_stay:
                self.unusable |= set(capture.members)
            raise _Refused(Error.CAPTURE_INVALIDATED)
        if len(capture.members[stream]) < len(capture.nodes):
            raise _Refused(Error.CAPTURE_UNJOINED)

        def adopt(graph: int) -> None:
            self.graphs[graph] = capture.nodes

        return Answer(adopt=adopt)

    def hipStreamIsCapturing(self, stream: int) -> Answer:
        if stream == 0:
            if self.active():
                raise _Refused(Error.CAPTURE_IMPLICIT)
            if self.captures:
                raise Unspecified
            return Answer(outputs=(NONE,))
        if stream not in self.streams:
            raise Unspecified
        return Answer(outputs=(self._status(stream),))

    def hipThreadExchangeStreamCaptureMode(self, mode: int) -> Answer:
        if mode > RELAXED:
            raise _Refused(Error.INVALID_VALUE)
        before, self.mode = self.mode, mode
        return Answer(outputs=(before,))

    # --- graphs ----------------------------------------------------------------------

    def hipGraphGetNodes(self, graph: int) -> Answer:
        if graph not in self.graphs:
            raise _Refused(Error.INVALID_VALUE)
        return Answer(outputs=(len(self.graphs[graph]),))

    def hipGraphDestroy(self, graph: int) -> Answer:
        if graph == 0:
            raise _Refused(Error.INVALID_VALUE)
        if self.graphs.pop(graph, None) is None:
            raise _Refused(Error.ILLEGAL_STATE)
        return SUCCESS

    def hipGraphInstantiateWithFlags(self, graph: int, flags: int) -> Answer:
        if graph not in self.graphs or flags not in (0, 1, 8):
            raise _Refused(Error.INVALID_VALUE)
        device = self.device
        self._need(device, KERNEL_ARGUMENTS)
        nodes = self.graphs[graph]

        def adopt(executable: int) -> None:
            self.executables[executable] = (nodes, device)
            self.charged[device] += KERNEL_ARGUMENTS

        return Answer(adopt=adopt)

    def hipGraphLaunch(self, executable: int, stream: int) -> Answer:
        if executable not in self.executables:
            raise _Refused(Error.INVALID_VALUE)
        if stream != 0 and stream not in self.streams:
            raise _Refused(Error.CONTEXT_IS_DESTROYED)
        self._ordered(stream)
        nodes, _ = self.executables[executable]
        for work in nodes:
            self._run(work)
        return SUCCESS

    def hipGraphExecDestroy(self, executable: int) -> Answer:
        if executable not in self.executables:
            raise _Refused(Error.INVALID_VALUE)
        _, device = self.executables.pop(executable)
        self.charged[device] -= KERNEL_ARGUMENTS
        return SUCCESS

    # --- devices ---------------------------------------------------------------------

    def hipSetDevice(self, device: int) -> Answer:
        if not 0 <= device < DEVICES:
            raise _Refused(Error.INVALID_DEVICE)
        self.device = device
        return SUCCESS

    def hipDeviceSynchronize(self) -> Answer:
        self._spoil(self.active(), Error.CAPTURE_UNSUPPORTED)
        return SUCCESS

    def free_bytes(self, device: int) -> int:
        """What a device has left."""
        memories = {id(memory): memory for memory in self._physical()}.values()
        held = sum(each.size for each in memories if each.device == device)
        allocated = sum(
            _whole_pages(each.size)
            for each in self.allocations.values()
            if each.device == device
        )
        return self.total - held - allocated - self.charged[device]

    def _physical(self) -> Iterator[Physical]:
        for memory, _ in self.handles.values():
            yield memory
        for reservation in self.reservations.values():
            yield from reservation.held
            for mapping in reservation.mappings.values():
                yield mapping.memory

    def _need(self, device: int, size: int) -> None:
        if size > self.free_bytes(device):
            raise _Refused(Error.OUT_OF_MEMORY)

    # --- streams and events ----------------------------------------------------------

    def hipStreamCreate(self) -> Answer:
        # All streams here are device 0's.
        if self.device != 0:
            raise Unspecified
        return Answer(adopt=self.streams.append)

    def hipStreamDestroy(self, stream: int) -> Answer:
        if stream not in self.streams:
            raise _Refused(Error.INVALID_HANDLE)
        self.streams.remove(stream)
        self.unusable.discard(stream)
        capture = self._capture_of(stream)
        if capture is not None and capture.origin == stream:
            self.captures.remove(capture)
        elif capture is not None:
            del capture.members[stream]
        return SUCCESS

    def _poll_stream(self, stream: int) -> None:
        if stream == 0:
            return
        if stream not in self.streams:
            raise _Refused(Error.INVALID_HANDLE)
        if self._status(stream) != NONE:
            capture = self._capture_of(stream)
            if capture is not None:
                capture.valid = False
            raise _Refused(Error.CAPTURE_UNSUPPORTED)
        self._unsafe()

    def hipStreamQuery(self, stream: int) -> Answer:
        self._poll_stream(stream)
        return self._answer_whether_done()

    def _answer_whether_done(self) -> Answer:
        done = (Error.SUCCESS,)
        return Answer((*done, Error.NOT_READY) if self.pending else done)

    def hipStreamSynchronize(self, stream: int) -> Answer:
        self._poll_stream(stream)
        # The NULL stream waits for the blocking ones; they do not wait for all of it.
        if stream == 0 and self.device == 0:
            self.pending = False
        return SUCCESS

    def hipEventCreateWithFlags(self, flags: int) -> Answer:
        device = self.device

        def adopt(event: int) -> None:
            self.events[event] = Event(device, timing=not flags)

        return Answer(adopt=adopt)

    def hipEventDestroy(self, event: int) -> Answer:
        if event == 0:
            raise _Refused(Error.INVALID_HANDLE)
        if self.events.pop(event, None) is None:
            raise _Refused(Error.CONTEXT_IS_DESTROYED)
        return SUCCESS

    def _event(self, event: int) -> Event:
        if event not in self.events:
            raise _Refused(Error.INVALID_HANDLE)
        return self.events[event]

    def hipEventRecord(self, event: int, stream: int) -> Answer:
        if stream != 0 and stream not in self.streams:
            raise _Refused(Error.INVALID_HANDLE)
        recorded = self._event(event)
        if stream == 0 and self.active():
            raise Unspecified
        if self._status(stream) == INVALIDATED:
            raise _Refused(Error.CAPTURE_INVALIDATED)
        capture = self._capture_of(stream)
        device = self.device if stream == 0 else 0
        if recorded.device != device:
            if capture is not None:
                raise Unspecified
            raise _Refused(Error.INVALID_HANDLE)
        recorded.stream = stream
        recorded.captured = None
        if capture is not None:
            recorded.captured = (capture, frozenset(capture.members[stream]))
        else:
            self.pending = True
        return SUCCESS

    def _poll_event(self, event: int) -> Event:
        polled = self._event(event)
        if polled.captured is not None:
            capture, _ = polled.captured
            if capture in self.active():
                self._spoil([capture], Error.CAPTURED_EVENT)
        elif polled.stream:
            self._unsafe()
        return polled

    def hipEventQuery(self, event: int) -> Answer:
        polled = self._poll_event(event)
        if polled.captured is not None or polled.stream is None:
            return SUCCESS
        return self._answer_whether_done()

    def hipEventSynchronize(self, event: int) -> Answer:
        self._poll_event(event)
        return SUCCESS

    def hipEventElapsedTime(self, start: int, stop: int) -> Answer:
        for each in (start, stop):
            event = self._event(each)
            if not event.timing or event.captured or event.stream is None:
                raise _Refused(Error.INVALID_HANDLE)
        if self.events[start].device != self.events[stop].device:
            raise _Refused(Error.INVALID_HANDLE)
        return self._answer_whether_done()

    def hipStreamWaitEvent(self, stream: int, event: int) -> Answer:
        if stream != 0 and stream not in self.streams:
            raise _Refused(Error.INVALID_HANDLE)
        awaited = self._event(event)
        if self._status(stream) == INVALIDATED:
            raise _Refused(Error.CAPTURE_INVALIDATED)
        own = self._capture_of(stream)
        if awaited.captured is not None:
            capture, before = awaited.captured
            if (
                stream == 0
                or capture not in self.active()
                or own
                not in (
                    None,
                    capture,
                )
            ):
                raise Unspecified
            capture.members.setdefault(stream, set()).update(before)
        elif awaited.stream and self._capture_of(awaited.stream) in self.active():
            raise _Refused(Error.CAPTURE_ISOLATION)
        elif stream == 0 and self.active():
            raise Unspecified
        elif awaited.stream is not None:
            self.pending = True
        return SUCCESS

    # --- memory ----------------------------------------------------------------------

    def hipMalloc(self, size: int) -> Answer:
        self._unsafe()
        if size == 0:
            return Answer(outputs=(0,))
        device = self.device
        self._need(device, _whole_pages(size))

        def adopt(base: int) -> None:
            data = bytearray(size if size <= MOST_BYTES else 0)
            self._check_new(base, size)
            self.allocations[base] = Range(base, size, data, device=device)

        return Answer(adopt=adopt)

    def _check_new(self, base: int, size: int) -> None:
        """Addresses are nobody else's."""
        for begin, end in self._taken():
            if base < end and begin < base + size:
                raise AssertionError(f"{base:#x} is in use already")

    def _taken(self) -> Iterator[tuple[int, int]]:
        yield self.arena, self.arena + len(self.host)
        for each in (*self.allocations.values(), *self.locked.values()):
            yield each.base, each.base + each.size
        for reservation in self.reservations.values():
            yield reservation.base, reservation.base + reservation.size
        for each in self.registered.values():
            if each.alias is not None:
                yield each.alias, each.alias + each.size

    def hipFree(self, pointer: int) -> Answer:
        self._unsafe()
        return self._drop(self.allocations, pointer, Error.INVALID_VALUE)

    def _drop(self, ranges: dict[int, Range], pointer: int, error: Error) -> Answer:
        if pointer != 0 and ranges.pop(pointer, None) is None:
            raise _Refused(error)
        return SUCCESS

    def hipMemGetInfo(self) -> Answer:
        return Answer(outputs=(self.free_bytes(self.device), self.total))

    def hipMemGetAddressRange(self, pointer: int) -> Answer:
        if (found := _holder(self.allocations.values(), pointer)) is not None:
            return Answer(outputs=(found.base, found.size))
        if (mapping := self._mapping(pointer)) is not None:
            return Answer(outputs=(mapping.base, mapping.memory.size))
        if self._host_range(pointer) is not None:
            raise Unspecified
        raise _Refused(Error.NOT_FOUND)

    def hipHostMalloc(self, size: int) -> Answer:
        self._unsafe()
        if size == 0:
            return Answer(outputs=(0,))

        def adopt(base: int) -> None:
            self._check_new(base, size)
            self.locked[base] = Range(base, size, bytearray(size))

        return Answer(adopt=adopt)

    def hipHostFree(self, pointer: int) -> Answer:
        self._unsafe()
        return self._drop(self.locked, pointer, Error.INVALID_VALUE)

    def hipHostRegister(self, pointer: int, size: int, flags: int) -> Answer:
        self._unsafe()
        if flags & ~KNOWN_REGISTER_FLAGS or pointer == 0 or size == 0:
            raise _Refused(Error.INVALID_VALUE)
        end = pointer + size
        if end > 2**64:
            raise _Refused(Error.INVALID_VALUE)
        for each in (*self.registered.values(), *self.locked.values()):
            if pointer < each.base + each.size and each.base < end:
                raise _Refused(Error.ALREADY_REGISTERED)
        if not (self.arena <= pointer and end <= self.arena + len(self.host)):
            raise _Refused(Error.INVALID_VALUE)
        start = pointer - self.arena
        self.registered[pointer] = Range(
            pointer, size, self.host, start, aliased=self.aliases
        )
        return SUCCESS

    def hipHostUnregister(self, pointer: int) -> Answer:
        self._unsafe()
        if pointer == 0:
            raise _Refused(Error.INVALID_VALUE)
        return self._drop(self.registered, pointer, Error.NOT_REGISTERED)

    def _host_range(self, address: int) -> Range | None:
        """Registered or page-locked memory, by either of its addresses."""
        for each in (*self.registered.values(), *self.locked.values()):
            for base in (each.base, each.alias):
                if base is not None and base <= address < base + each.size:
                    return each
        return None

    def hipHostGetDevicePointer(self, pointer: int, flags: int) -> Answer:
        found = _holder((*self.registered.values(), *self.locked.values()), pointer)
        if found is None or flags != 0:
            raise _Refused(Error.INVALID_VALUE)
        offset = pointer - found.base
        if not found.aliased:
            return Answer(outputs=(pointer,))
        if found.alias is not None:
            return Answer(outputs=(found.alias + offset,))

        def adopt(alias: int) -> None:
            self._check_new(alias - offset, found.size)
            found.alias = alias - offset

        return Answer(adopt=adopt)

    # --- virtual memory --------------------------------------------------------------

    def hipMemGetAllocationGranularity(
        self, kind: int, location: int, device: int, option: int
    ) -> Answer:
        if kind != 1 or location != AT_DEVICE or option > 1:
            raise _Refused(Error.INVALID_VALUE)
        if not 0 <= device < DEVICES:
            raise _Refused(Error.INVALID_VALUE)
        size = self.release.recommended_granularity if option else PAGE
        return Answer(outputs=(size,))

    def hipMemAddressReserve(
        self, size: int, alignment: int, hint: int, flags: int
    ) -> Answer:
        aligned = alignment & (alignment - 1) == 0
        if flags or size == 0 or size % PAGE or not aligned:
            raise _Refused(Error.INVALID_VALUE)
        if size >= 1 << 40:
            raise _Refused(Error.OUT_OF_MEMORY)

        def adopt(base: int) -> None:
            self._check_new(base, size)
            self.reservations[base] = Reservation(base, size)

        return Answer(adopt=adopt)

    def hipMemAddressFree(self, pointer: int, size: int) -> Answer:
        reservation = self.reservations.get(pointer)
        if size == 0 or reservation is None:
            raise _Refused(Error.INVALID_VALUE)
        if reservation.mappings:
            raise _Refused(Error.UNKNOWN)
        del self.reservations[pointer]
        return SUCCESS

    def hipMemCreate(
        self,
        size: int,
        kind: int,
        location: int,
        device: int,
        handle_types: int,
        flags: int,
    ) -> Answer:
        if location not in (0, AT_DEVICE) or handle_types & 8:
            raise Unspecified
        if kind != 1 or location != AT_DEVICE or flags or size == 0:
            raise _Refused(Error.INVALID_VALUE)
        if not 0 <= device < DEVICES:
            raise _Refused(Error.INVALID_DEVICE)
        if handle_types & ~1:
            raise _Refused(Error.NOT_SUPPORTED)
        if size > self.total:
            raise _Refused(Error.OUT_OF_MEMORY)
        if size % PAGE:
            raise _Refused(Error.INVALID_VALUE)
        owner = self.device
        self._need(owner, size)
        data = bytearray(size if size <= MOST_BYTES else 0)
        memory = Physical(owner, size, data, device, handle_types)

        def adopt(handle: int) -> None:
            self.handles[handle] = (memory, 1)

        return Answer(adopt=adopt)

    def hipMemRelease(self, handle: int) -> Answer:
        if handle not in self.handles:
            raise _Refused(Error.INVALID_VALUE)
        memory, count = self.handles.pop(handle)
        if count > 1:
            self.handles[handle] = (memory, count - 1)
        return SUCCESS

    def hipMemGetAllocationPropertiesFromHandle(self, handle: int) -> Answer:
        if handle not in self.handles:
            raise _Refused(Error.INVALID_VALUE)
        memory, _ = self.handles[handle]
        return Answer(outputs=(1, AT_DEVICE, memory.named_device, memory.handle_types))

    def _reservation(self, address: int) -> Reservation | None:
        for each in self.reservations.values():
            if each.base <= address < each.base + each.size:
                return each
        return None

    def _mapping(self, address: int) -> Mapping | None:
        reservation = self._reservation(address)
        if reservation is not None:
            for each in reservation.mappings.values():
                if each.base <= address < each.end:
                    return each
        return None

    def hipMemMap(
        self, pointer: int, size: int, offset: int, handle: int, flags: int
    ) -> Answer:
        if flags or offset or pointer == 0 or size == 0 or handle not in self.handles:
            raise _Refused(Error.INVALID_VALUE)
        memory, _ = self.handles[handle]
        if size != memory.size:
            raise _Refused(Error.INVALID_VALUE)
        reservation = self._reservation(pointer)
        fits = (
            reservation is not None
            and pointer % PAGE == 0
            and pointer + size <= reservation.base + reservation.size
            and all(
                pointer + size <= each.base or each.end <= pointer
                for each in reservation.mappings.values()
            )
        )
        if not fits or reservation is None:
            if self.release.map_failure_is_silent:
                return SUCCESS
            if self.release.map_error is None:
                raise _Refused(Error.INVALID_VALUE, Error.OUT_OF_MEMORY)
            raise _Refused(self.release.map_error)
        reservation.mappings[pointer] = Mapping(pointer, memory)
        return SUCCESS

    def _whole(self, pointer: int, size: int) -> tuple[Reservation, list[Mapping]]:
        """The mappings that fill the range, none of them in part."""
        reservation = self._reservation(pointer)
        if pointer == 0 or size == 0 or reservation is None:
            raise _Refused(Error.INVALID_VALUE)
        inside = sorted(
            (m for m in reservation.mappings.values() if m.end > pointer),
            key=lambda mapping: mapping.base,
        )
        chosen = [m for m in inside if m.base < pointer + size]
        gapless = all(one.end == other.base for one, other in pairwise(chosen))
        if (
            not chosen
            or not gapless
            or chosen[0].base != pointer
            or chosen[-1].end != pointer + size
        ):
            raise _Refused(Error.INVALID_VALUE)
        return reservation, chosen

    def hipMemUnmap(self, pointer: int, size: int) -> Answer:
        mapping = self._mapping(pointer)
        if mapping is not None and mapping.base != pointer:
            # HIP looks mappings up by range and the size must be that of whole ones.
            raise Unspecified
        if self.device != 0 and self.pending:
            raise Unspecified
        reservation, mappings = self._whole(pointer, size)
        for each in mappings:
            del reservation.mappings[each.base]
            if self.release.unmap_keeps_memory:
                reservation.held.append(each.memory)
        return SUCCESS

    def hipMemSetAccess(
        self, pointer: int, size: int, grants: Sequence[tuple[int, int, int]]
    ) -> Answer:
        if not grants:
            raise _Refused(Error.INVALID_VALUE)
        for location, device, flags in grants:
            if location not in (0, AT_DEVICE, AT_HOST):
                raise Unspecified
            if (
                location == 0
                or not 0 <= device < DEVICES
                or flags not in (0, 1, 3)
                or (location == AT_HOST and not self.release.host_access)
            ):
                raise _Refused(Error.INVALID_VALUE)
        if self.pending:
            raise Unspecified
        _, mappings = self._whole(pointer, size)
        for mapping in mappings:
            for location, device, flags in grants:
                mapping.access[-1 if location == AT_HOST else device] = flags
        return SUCCESS

    def hipMemGetAccess(self, pointer: int, location: int, device: int) -> Answer:
        mapping = self._mapping(pointer)
        if location != AT_DEVICE or not 0 <= device < DEVICES or mapping is None:
            raise _Refused(Error.INVALID_VALUE)
        return Answer(outputs=(mapping.access.get(device, 0),))

    def hipMemRetainAllocationHandle(self, pointer: int) -> Answer:
        if _holder(self.allocations.values(), pointer) is not None:
            raise Unspecified
        mapping = self._mapping(pointer)
        if mapping is None:
            raise _Refused(Error.INVALID_VALUE)
        counts = self.release.retain_takes_reference
        for handle, (memory, count) in self.handles.items():
            if memory is mapping.memory:
                self.handles[handle] = (memory, count + counts)
                return Answer(outputs=(handle,))
        if not counts:
            raise Unspecified

        def adopt(handle: int) -> None:
            self.handles[handle] = (mapping.memory, 1)

        return Answer(adopt=adopt)

    # --- bytes -----------------------------------------------------------------------

    def _side(
        self,
        address: int,
        reach: int,
        *,
        write: bool,
        one_mapping: bool = False,
        row: int = 0,
        slice_: int = 0,
    ) -> Side:
        """Where the end of a copy lies, if it may be one."""
        if address == 0:
            raise _Refused(Error.INVALID_VALUE)
        found = _holder(self.allocations.values(), address)
        kind = "device"
        if found is None:
            found, kind = self._host_range(address), "registered"
        if found is not None:
            if found.offset(address) + reach > found.size:
                raise _Refused(Error.INVALID_VALUE)
            if not found.data:
                raise Unspecified
            return Side(address, kind, found, row, slice_)
        if self.arena <= address < self.arena + len(self.host):
            if address + reach > self.arena + len(self.host):
                raise Unspecified
            return Side(address, "pageable", None, row, slice_)
        if self._is_near_host(address):
            raise Unspecified
        mapping = self._mapping(address)
        if mapping is None:
            raise _Refused(Error.INVALID_VALUE)
        inside = self._covered(address, reach)
        if inside is None or (one_mapping and len(inside) > 1):
            if not self._may(mapping, write):
                raise Unspecified  # which of the two errors comes first
            raise _Refused(Error.INVALID_VALUE)
        if not all(self._may(each, write) for each in inside):
            raise _Refused(Error.UNKNOWN)
        if not all(each.memory.data for each in inside):
            raise Unspecified
        return Side(address, "virtual", None, row, slice_)

    def _is_near_host(self, address: int) -> bool:
        """Beside host memory lies other host memory, which is nobody's to copy."""
        hosts = [(each.base, each.size) for each in self.locked.values()]
        hosts.append((self.arena, len(self.host)))
        return any(0 <= address - base < size + MOST_BYTES for base, size in hosts)

    def _may(self, mapping: Mapping, write: bool) -> bool:
        return mapping.access.get(self.device, 0) in ((3,) if write else (1, 3))

    def _covered(self, address: int, reach: int) -> list[Mapping] | None:
        """The mappings of a range, None if there is a hole or the reservation ends."""
        reservation = self._reservation(address)
        if reservation is None or address + reach > reservation.base + reservation.size:
            return None
        inside = []
        while reach > 0:
            mapping = self._mapping(address)
            if mapping is None:
                return None
            inside.append(mapping)
            reach -= mapping.end - address
            address = mapping.end
        return inside

    def _spans(
        self, side: Side, address: int, size: int
    ) -> Iterator[tuple[bytearray, int, int]]:
        """The pieces of memory behind the bytes: where each begins and ends."""
        if side.kind == "virtual":
            for mapping in self._covered(address, size) or []:
                begin = max(address, mapping.base)
                end = min(address + size, mapping.end)
                yield mapping.memory.data, begin - mapping.base, end - mapping.base
            return
        data, start = self.host, address - self.arena
        if side.owner is not None:
            data = side.owner.data
            start = side.owner.start + side.owner.offset(address)
        yield data, start, start + size

    def _is_still_there(self, work: Work, side: Side, write: bool) -> bool:
        if side.kind == "virtual":
            inside = self._covered(side.address, work.reach(side))
            return inside is not None and all(self._may(each, write) for each in inside)
        owners = (self.allocations, self.locked, self.registered)
        return side.owner is None or any(
            side.owner is each for ranges in owners for each in ranges.values()
        )

    def _run(self, work: Work) -> None:
        self.pending = True
        if self.fault:
            return
        sides = [(work.to, True)]
        if work.source is not None:
            sides.append((work.source, False))
        if not all(self._is_still_there(work, side, write) for side, write in sides):
            self.fault = True
            return
        # One row after the other, so that rows may overlap.
        sources = work.rows(work.source) if work.source else repeat(0)
        for to, address in zip(work.rows(work.to), sources, strict=False):
            row = bytes([work.value]) * work.width
            if work.source is not None:
                spans = self._spans(work.source, address, work.width)
                row = b"".join(data[begin:end] for data, begin, end in spans)
            done = 0
            for data, begin, end in self._spans(work.to, to, work.width):
                data[begin:end] = row[done : done + end - begin]
                done += end - begin

    def _check_aliases(self, work: Work) -> None:
        """Bytes that one copy reaches by two addresses have no certain value."""
        pieces = list(self._reached(work, work.to))
        if work.source is not None:
            pieces += self._reached(work, work.source)
        for (data, begin, end), (other, other_begin, other_end) in combinations(
            pieces, 2
        ):
            if data is other and begin < other_end and other_begin < end:
                raise Unspecified

    def _reached(self, work: Work, side: Side) -> Iterator[tuple[bytearray, int, int]]:
        if side.kind == "virtual":
            yield from self._spans(side, side.address, work.reach(side))

    def _submit(self, capture: Capture | None, stream: int, work: Work) -> Answer:
        self._check_aliases(work)
        if capture is None:
            self._run(work)
        else:
            before = capture.members[stream]
            capture.nodes.append(work)
            before.add(len(capture.nodes) - 1)
        return SUCCESS

    # --- copies ----------------------------------------------------------------------

    def _check_kind(self, kind: int) -> None:
        if kind not in (*range(5), NO_CU):
            raise _Refused(Error.INVALID_DIRECTION)

    def _check_direction(self, kind: int, to: Side, source: Side) -> None:
        ends = (to.kind == "pageable", source.kind == "pageable")
        if all(ends):
            if kind not in (HOST_TO_HOST, DEFAULT):
                raise _Refused(Error.INVALID_VALUE)
        elif any(ends):
            fits = (HOST_TO_DEVICE, DEFAULT) if ends[1] else (DEVICE_TO_HOST, DEFAULT)
            if kind not in fits:
                raise Unspecified

    def _copy(
        self,
        capture: Capture | None,
        to: int,
        source: int,
        size: int,
        kind: int,
        stream: int,
    ) -> Answer:
        if to == 0 or source == 0:
            raise _Refused(Error.INVALID_VALUE)
        target = self._side(to, size, write=True)
        origin = self._side(source, size, write=False)
        self._check_direction(kind, target, origin)
        return self._submit(capture, stream, Work(target, origin, 0, size))

    def hipMemcpy(self, to: int, source: int, size: int, kind: int) -> Answer:
        self._synchronous()
        self._ordered(0)
        if size == 0:
            return SUCCESS
        if to == 0 or source == 0:
            raise _Refused(Error.INVALID_VALUE)
        self._check_kind(kind)
        return self._copy(None, to, source, size, kind, 0)

    def hipMemcpyAsync(
        self, to: int, source: int, size: int, kind: int, stream: int
    ) -> Answer:
        capture = self._target(stream)
        self._check_kind(kind)
        if size == 0:
            return SUCCESS
        return self._copy(capture, to, source, size, kind, stream)

    def _fill(
        self, capture: Capture | None, to: int, value: int, size: int, stream: int
    ) -> Answer:
        if size == 0:
            return SUCCESS
        target = self._side(to, size, write=True)
        if target.kind == "pageable":
            raise _Refused(Error.INVALID_VALUE)
        return self._submit(capture, stream, Work(target, None, value, size))

    def hipMemset(self, to: int, value: int, size: int) -> Answer:
        self._synchronous()
        self._ordered(0)
        return self._fill(None, to, value, size, 0)

    def hipMemsetAsync(self, to: int, value: int, size: int, stream: int) -> Answer:
        return self._fill(self._target(stream), to, value, size, stream)

    def _plane(
        self, capture: Capture | None, plane: Sequence[int], kind: int, stream: int
    ) -> Answer:
        to, to_pitch, source, source_pitch, width, height = plane
        if capture is not None:
            # The kind of a captured copy is not established.
            if kind > DEFAULT:
                raise Unspecified
            if to == 0 or source == 0:
                raise _Refused(Error.INVALID_VALUE)
        self._check_kind(kind)
        if width == 0 or height == 0:
            return SUCCESS
        if width > min(to_pitch, source_pitch):
            raise _Refused(Error.INVALID_PITCH)
        box = ((to, to_pitch, 0), (source, source_pitch, 0))
        return self._box(capture, box, (width, height, 1), kind, stream)

    def _box(
        self,
        capture: Capture | None,
        ends: Sequence[tuple[int, int, int]],
        shape: tuple[int, int, int],
        kind: int,
        stream: int,
    ) -> Answer:
        width, height, depth = shape
        if any(address == 0 for address, _, _ in ends):
            raise _Refused(Error.INVALID_VALUE)
        sides = []
        for (address, row, slice_), write in zip(ends, (True, False), strict=True):
            reach = (depth - 1) * slice_ + (height - 1) * row + width
            side = self._side(
                address, reach, write=write, one_mapping=True, row=row, slice_=slice_
            )
            sides.append(side)
        to, source = sides
        pageable = (to.kind == "pageable", source.kind == "pageable")
        if any(pageable) and not all(pageable):
            named = {
                HOST_TO_DEVICE: pageable[0],
                DEVICE_TO_HOST: pageable[1],
                DEVICE_TO_DEVICE: True,
                NO_CU: True,
            }
            if named.get(kind, False):
                raise _Refused(Error.INVALID_VALUE)
        self._check_direction(kind, to, source)
        work = Work(to, source, 0, width, height, depth)
        return self._submit(capture, stream, work)

    def hipMemcpy2D(self, plane: Sequence[int], kind: int) -> Answer:
        self._synchronous()
        self._ordered(0)
        return self._plane(None, plane, kind, 0)

    def hipMemcpy2DAsync(self, plane: Sequence[int], kind: int, stream: int) -> Answer:
        return self._plane(self._target(stream), plane, kind, stream)

    def _parameters(
        self,
        capture: Capture | None,
        sides: Sequence[Sequence[int]],
        extent: tuple[int, int, int],
        kind: int,
        stream: int,
    ) -> Answer:
        """A side is a pointer, its pitch, its sizes and the position in it."""
        width, height, _ = extent
        empty = 0 in extent
        if capture is not None and empty:
            raise Unspecified
        if any(side[0] == 0 for side in sides):
            raise _Refused(Error.INVALID_VALUE)
        if any(pitch < xsize for _, pitch, xsize, *_ in sides):
            raise _Refused(Error.INVALID_PITCH)
        ends = []
        for pointer, pitch, _, ysize, x, y, z in sides:
            if pitch != 0 and width + x > pitch:
                raise _Refused(Error.INVALID_VALUE)
            if (ysize and y + height > ysize) or (pitch == 0 and (y or z)):
                raise Unspecified
            row = pitch or width
            slice_ = row * (ysize or height)
            # A position counts in what the pointer says of itself.
            ends.append((pointer + z * pitch * ysize + y * pitch + x, row, slice_))
        self._check_kind(kind)
        if empty:
            if kind not in (HOST_TO_HOST, DEFAULT):
                raise Unspecified
            return SUCCESS
        return self._box(capture, ends, extent, kind, stream)

    def hipMemcpy3D(
        self, sides: Sequence[Sequence[int]], extent: tuple[int, int, int], kind: int
    ) -> Answer:
        # Which of parameters and captures comes first is not established.
        if self.active():
            raise Unspecified
        self._ordered(0)
        return self._parameters(None, sides, extent, kind, 0)

    def hipMemcpy3DAsync(
        self,
        sides: Sequence[Sequence[int]],
        extent: tuple[int, int, int],
        kind: int,
        stream: int,
    ) -> Answer:
        if stream not in (0, *self.streams) or self._status(stream) == INVALIDATED:
            raise Unspecified
        if stream == 0 and self.active():
            raise Unspecified
        return self._parameters(self._target(stream), sides, extent, kind, stream)

    # --- batches ---------------------------------------------------------------------

    def hipMemcpyBatchAsync(
        self,
        copies: Sequence[tuple[int, int, int]],
        attributes: Sequence[tuple[int, int, int]],
        wants_index: bool,
        stream: int,
    ) -> Answer:
        """A copy is two addresses and a size; attributes a first copy, order, flags."""
        if stream != 0 and stream not in self.streams:
            raise _Refused(Error.INVALID_HANDLE)
        self._ordered(stream)
        release = self.release
        if not copies or (release.batch_is_a_loop and not wants_index):
            raise _Refused(Error.INVALID_VALUE)
        self._check_attributes(len(copies), attributes)
        sizes = [size for _, _, size in copies]
        if 0 in sizes:
            if release.batch_is_a_loop:
                raise Unspecified
            return Answer((Error.INVALID_VALUE,), (sizes.index(0),))
        planned: list[Work] = []
        for index, (to, source, size) in enumerate(copies):
            try:
                if to == 0 or source == 0:
                    raise _Refused(Error.INVALID_VALUE)
                target = self._side(to, size, write=True)
                origin = self._side(source, size, write=False)
            except _Refused as refused:
                if release.batch_is_a_loop:
                    self._run_all(planned)
                failing = index if release.batch_is_a_loop else NO_INDEX
                return Answer(refused.errors, (failing,))
            planned.append(Work(target, origin, 0, size))
            self._check_aliases(planned[-1])
        odd = any(flags & (SWAP | INDIRECT) for _, _, flags in attributes)
        if release.flags_count and odd:
            return Answer((Error.NOT_SUPPORTED,), (NO_INDEX,))
        if self._blits(planned, attributes) > release.blit_batch_limit:
            self.fault = self.pending = True
        else:
            self._run_all(planned)
        return Answer(outputs=(None if release.batch_is_a_loop else NO_INDEX,))

    def _run_all(self, planned: Sequence[Work]) -> None:
        for work in planned:
            self._run(work)

    def _check_attributes(
        self, count: int, attributes: Sequence[tuple[int, int, int]]
    ) -> None:
        if not attributes:
            return
        if self.release.attributes_are_refused:
            raise _Refused(Error.NOT_SUPPORTED)
        firsts = [first for first, _, _ in attributes]
        increasing = all(one < other for one, other in pairwise(firsts))
        if (
            len(firsts) > count
            or firsts[0] != 0
            or not increasing
            or firsts[-1] >= count
        ):
            raise _Refused(Error.INVALID_VALUE)
        for _, order, flags in attributes:
            both = flags & SWAP and flags & INDIRECT
            if not 1 <= order <= 3 or (self.release.flags_count and both):
                raise _Refused(Error.INVALID_VALUE)

    def _blits(
        self, planned: Sequence[Work], attributes: Sequence[tuple[int, int, int]]
    ) -> int:
        """How many of the copies the blit kernel makes."""
        preferred = self.release.flags_count and any(
            flags & PREFER_CE for _, _, flags in attributes
        )
        if preferred:
            if len(planned) > 100:
                raise Unspecified
            return 0
        blits = 0
        for work in planned:
            assert work.source is not None
            kinds = {work.to.kind, work.source.kind}
            on_device = [kind in ("device", "virtual") for kind in kinds]
            crosses = any(on_device) and not all(on_device)
            staged = "pageable" in kinds
            blits += not staged and not (crosses and work.width > BIGGEST_BLIT)
        return blits
