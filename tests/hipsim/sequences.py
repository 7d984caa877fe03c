# SPDX-License-Identifier: Apache-2.0
"""Random sequences of calls, on the simulator and on a model of HIP.

A sequence is made of its seed: it picks the release, then one call after the other,
among what there is at that moment and some that is not. Error numbers, results, bytes
and free memory must be what the model says.
"""

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_rocm_memory.sim import hipsim

from .model import (
    DEVICES,
    MOST_BYTES,
    NO_INDEX,
    PAGE,
    RELEASES,
    Answer,
    Error,
    Hip,
    Release,
    Unspecified,
)

CALLS = 80
ARENA = 16 * PAGE
REGISTERED_AT = 512
MOST_PAGES = 8


MakeModel = Callable[[Release, int, int, bytes], Hip]
"""What Hip's constructor takes and makes, and those of its subclasses."""


class Name(NamedTuple):
    """What the call of that number made, plus an offset."""

    number: int
    offset: int = 0

    def __repr__(self) -> str:
        return f"made{self.number}" + (f"+{self.offset}" if self.offset else "")


class Host(NamedTuple):
    """An address in the sequence's host memory."""

    offset: int

    def __repr__(self) -> str:
        return f"host+{self.offset}"


class Call(NamedTuple):
    """A function of HIP, or a word to the test, and arguments that may be names."""

    number: int
    function: str
    arguments: tuple[Any, ...]

    def __repr__(self) -> str:
        listed = ", ".join(map(repr, self.arguments))
        return f"made{self.number} = {self.function}({listed})"


class Disagreement(AssertionError):
    """The simulator and the model differ."""


class NotMade(Exception):
    """A name of something that no call has made."""


class PitchedPtr(ctypes.Structure):
    """hipPitchedPtr."""

    _fields_ = (
        ("ptr", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
        ("xsize", ctypes.c_size_t),
        ("ysize", ctypes.c_size_t),
    )


class Memcpy3DParms(ctypes.Structure):
    """hipMemcpy3DParms."""

    _fields_ = (
        ("srcArray", ctypes.c_void_p),
        ("srcPos", ctypes.c_size_t * 3),
        ("srcPtr", PitchedPtr),
        ("dstArray", ctypes.c_void_p),
        ("dstPos", ctypes.c_size_t * 3),
        ("dstPtr", PitchedPtr),
        ("extent", ctypes.c_size_t * 3),
        ("kind", ctypes.c_uint),
    )


class Library:
    """The simulator, whose calls return an error and what was written or made."""

    def __init__(self) -> None:
        self.lib = hipsim.load()

    def call(self, function: str, arguments: Sequence[Any]) -> tuple[int, list[int]]:
        """The error, and the results in the order of the model's."""
        own = getattr(self, function, None)
        if own is not None:
            error, results = own(*arguments)
            return error, results
        if function in MAKERS:
            return self._make(function, *arguments)
        return getattr(self.lib, function)(*arguments), []

    def _make(self, function: str, *arguments: Any) -> tuple[int, list[int]]:
        made = ctypes.c_void_p()
        error = getattr(self.lib, function)(ctypes.byref(made), *arguments)
        return error, [made.value or 0]

    def hipHostMalloc(self, size: int) -> tuple[int, list[int]]:
        return self._make("hipHostMalloc", size, 0)

    def hipMemGetInfo(self) -> tuple[int, list[int]]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        error = self.lib.hipMemGetInfo(ctypes.byref(free), ctypes.byref(total))
        return error, [free.value, total.value]

    def hipMemGetAddressRange(self, pointer: int) -> tuple[int, list[int]]:
        base, size = ctypes.c_void_p(), ctypes.c_size_t()
        error = self.lib.hipMemGetAddressRange(
            ctypes.byref(base), ctypes.byref(size), pointer
        )
        return error, [base.value or 0, size.value]

    def hipMemGetAllocationGranularity(
        self, kind: int, location: int, device: int, option: int
    ) -> tuple[int, list[int]]:
        asked = self._properties(kind, location, device, 0)
        size = ctypes.c_size_t()
        error = self.lib.hipMemGetAllocationGranularity(
            ctypes.byref(size), ctypes.byref(asked), option
        )
        return error, [size.value]

    @staticmethod
    def _properties(
        kind: int, location: int, device: int, handle_types: int
    ) -> hipsim.MemAllocationProp:
        where = hipsim.MemLocation(location, device)
        return hipsim.MemAllocationProp(kind, handle_types, where)

    def hipMemCreate(
        self, size: int, kind: int, location: int, device: int, types: int, flags: int
    ) -> tuple[int, list[int]]:
        asked = self._properties(kind, location, device, types)
        return self._make("hipMemCreate", size, ctypes.byref(asked), flags)

    def hipMemGetAllocationPropertiesFromHandle(
        self, handle: int
    ) -> tuple[int, list[int]]:
        told = hipsim.MemAllocationProp()
        error = self.lib.hipMemGetAllocationPropertiesFromHandle(
            ctypes.byref(told), handle
        )
        where = told.location
        return error, [told.type, where.type, where.id, told.requestedHandleTypes]

    def hipMemSetAccess(
        self, pointer: int, size: int, grants: Sequence[tuple[int, int, int]]
    ) -> tuple[int, list[int]]:
        array = (hipsim.MemAccessDesc * len(grants))(
            *(
                hipsim.MemAccessDesc(hipsim.MemLocation(location, device), flags)
                for location, device, flags in grants
            )
        )
        return self.lib.hipMemSetAccess(pointer, size, array, len(grants)), []

    def hipMemGetAccess(
        self, pointer: int, location: int, device: int
    ) -> tuple[int, list[int]]:
        flags = ctypes.c_ulonglong()
        where = hipsim.MemLocation(location, device)
        error = self.lib.hipMemGetAccess(
            ctypes.byref(flags), ctypes.byref(where), pointer
        )
        return error, [flags.value]

    def hipStreamIsCapturing(self, stream: int) -> tuple[int, list[int]]:
        status = ctypes.c_uint()
        error = self.lib.hipStreamIsCapturing(stream, ctypes.byref(status))
        return error, [status.value]

    def hipStreamEndCapture(self, stream: int) -> tuple[int, list[int]]:
        graph = ctypes.c_void_p()
        error = self.lib.hipStreamEndCapture(stream, ctypes.byref(graph))
        return error, [graph.value or 0]

    def hipThreadExchangeStreamCaptureMode(self, mode: int) -> tuple[int, list[int]]:
        value = ctypes.c_uint(mode)
        error = self.lib.hipThreadExchangeStreamCaptureMode(ctypes.byref(value))
        return error, [value.value]

    def hipGraphGetNodes(self, graph: int) -> tuple[int, list[int]]:
        count = ctypes.c_size_t()
        error = self.lib.hipGraphGetNodes(graph, None, ctypes.byref(count))
        return error, [count.value]

    def hipEventElapsedTime(self, start: int, stop: int) -> tuple[int, list[int]]:
        time = ctypes.c_float()
        return self.lib.hipEventElapsedTime(ctypes.byref(time), start, stop), []

    def hipStreamWaitEvent(self, stream: int, event: int) -> tuple[int, list[int]]:
        return self.lib.hipStreamWaitEvent(stream, event, 0), []

    def hipMemcpy2D(self, plane: Sequence[int], kind: int) -> tuple[int, list[int]]:
        return self.lib.hipMemcpy2D(*plane, kind), []

    def hipMemcpy2DAsync(
        self, plane: Sequence[int], kind: int, stream: int
    ) -> tuple[int, list[int]]:
        return self.lib.hipMemcpy2DAsync(*plane, kind, stream), []

    @staticmethod
    def _parameters(
        sides: Sequence[Sequence[int]], extent: Sequence[int], kind: int
    ) -> Memcpy3DParms:
        parameters = Memcpy3DParms(kind=kind, extent=tuple(extent))
        for name, side in zip(("dst", "src"), sides, strict=True):
            setattr(parameters, f"{name}Ptr", PitchedPtr(*side[:4]))
            setattr(parameters, f"{name}Pos", tuple(side[4:]))
        return parameters

    def hipMemcpy3D(
        self, sides: Sequence[Sequence[int]], extent: Sequence[int], kind: int
    ) -> tuple[int, list[int]]:
        box = self._parameters(sides, extent, kind)
        return self.lib.hipMemcpy3D(ctypes.byref(box)), []

    def hipMemcpy3DAsync(
        self,
        sides: Sequence[Sequence[int]],
        extent: Sequence[int],
        kind: int,
        stream: int,
    ) -> tuple[int, list[int]]:
        box = self._parameters(sides, extent, kind)
        return self.lib.hipMemcpy3DAsync(ctypes.byref(box), stream), []

    def hipMemcpyBatchAsync(
        self,
        copies: Sequence[tuple[int, int, int]],
        attributes: Sequence[tuple[int, int, int]],
        wants_index: bool,
        stream: int,
    ) -> tuple[int, list[int]]:
        columns = [np.array([c[i] for c in copies], np.uint64) for i in range(3)]
        sets = (hipsim.MemcpyAttributes * len(attributes))()
        for entry, (_, order, flags) in zip(sets, attributes, strict=True):
            entry.srcAccessOrder, entry.flags = order, flags
        firsts = np.array([first for first, _, _ in attributes], np.uint64)
        index = ctypes.c_uint64(UNTOUCHED)
        error = self.lib.hipMemcpyBatchAsync(
            *(column.ctypes.data for column in columns),
            len(copies),
            ctypes.addressof(sets) if attributes else None,
            firsts.ctypes.data if attributes else None,
            len(attributes),
            ctypes.byref(index) if wants_index else None,
            stream,
        )
        return error, [index.value] if wants_index else []


UNTOUCHED = NO_INDEX - 7
MAKERS = {
    "hipMalloc",
    "hipStreamCreate",
    "hipEventCreateWithFlags",
    "hipHostGetDevicePointer",
    "hipMemAddressReserve",
    "hipMemRetainAllocationHandle",
    "hipGraphInstantiateWithFlags",
}


# --- one sequence --------------------------------------------------------------------


class Session:
    """Plays calls on both sides, and says where they differ."""

    def __init__(self, seed: int, make: MakeModel = Hip) -> None:
        """Begins the sequence of a seed, which also picks the release."""
        names = list(RELEASES)
        self.profile = names[seed % len(names)]
        hipsim.reset(self.profile)
        self.library = Library()
        self.lib = self.library.lib
        self.lib.hipSetDevice(0)
        self.host = np.random.default_rng(seed).integers(0, 256, ARENA, np.uint8)
        (_, (_, total)) = self.library.hipMemGetInfo()
        address = self.host.ctypes.data
        release = RELEASES[self.profile]
        self.model = make(release, total, address, self.host.tobytes())
        self.made: dict[int, int] = {}
        self.on_device: set[int] = set()
        self.returned: set[int] = set()
        self.played: list[Call] = []

    def _resolve(self, argument: Any) -> Any:
        if isinstance(argument, Name):
            if argument.number not in self.made:
                raise NotMade
            return self.made[argument.number] + argument.offset
        if isinstance(argument, Host):
            return self.model.arena + argument.offset
        if isinstance(argument, tuple):
            return tuple(map(self._resolve, argument))
        return argument

    def play(self, call: Call) -> bool:
        """Makes the call on both sides.

        Returns:
            False when nothing was done, because nobody could say what it does.
        """
        try:
            arguments = self._resolve(call.arguments)
        except NotMade:
            return False
        if call.function.startswith("test_"):
            getattr(self, call.function)(*arguments)
            self.played.append(call)
            return True
        if call.function == "hipMemSetAccess":
            self._settle()
        try:
            answer = self.model.call(call.function, *arguments)
        except Unspecified:
            return False
        self.played.append(call)
        error, results = self.library.call(call.function, arguments)
        if error == 0:
            self.returned.update(results)
            if call.function in ("hipMalloc", "hipMemAddressReserve"):
                self.on_device.update(results)
        self._compare(call, answer, error, results)
        if error == 0 and answer.adopt is not None:
            self.made[call.number] = results[-1]
            answer.adopt(results[-1])
        if self.model.fault:
            self._end_fault()
        return True

    def _compare(
        self, call: Call, answer: Answer, error: int, results: Sequence[int]
    ) -> None:
        # A fault may be over before the call is.
        allowed = answer.errors
        if self.model.fault:
            allowed = (*allowed, Error.ILLEGAL_ADDRESS)
        if error not in allowed:
            words = " or ".join(str(int(each)) for each in allowed)
            raise Disagreement(f"{call} returns {error}, not {words}")
        writes = error == 0 or call.function == "hipMemcpyBatchAsync"
        if answer.adopt is None and writes and results:
            for result, expected in zip(results, answer.outputs, strict=False):
                if expected is not None and result != expected:
                    told = [None if x is None else int(x) for x in answer.outputs]
                    raise Disagreement(f"{call} writes {list(results)}, not {told}")

    def _settle(self) -> None:
        """Waits for all work. Asking the NULL stream disturbs no capture."""
        if self.model.pending and self.model.device == 0:
            error = self.lib.hipStreamSynchronize(None)
            self.model.hipStreamSynchronize(0)
            if error != 0:
                raise Disagreement(f"work ends with error {error}")

    def _end_fault(self) -> None:
        if (error := self.lib.hipStreamSynchronize(None)) != Error.ILLEGAL_ADDRESS:
            raise Disagreement(f"{self.played[-1]} is no memory fault: {error}")
        if self.lib.hipMalloc(None, 1) != Error.ILLEGAL_ADDRESS:
            raise Disagreement("a memory fault does not stay")
        if (faults := hipsim.stats().memory_faults) != 1:
            raise Disagreement(f"{faults} memory faults, not one")
        self.test_reset()

    # --- words to the test -----------------------------------------------------------

    def test_reset(self) -> None:
        hipsim.reset()
        self.model.reset()

    def test_alias(self, aliases: bool) -> None:
        hipsim.configure(host_device_pointers=aliases)
        self.model.aliases = aliases

    def test_write(self, offset: int, size: int, seed: int) -> None:
        """The program writes to its own memory, when nothing runs."""
        self._settle()
        if self.model.pending:
            return
        data = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        self.host[offset : offset + size] = data
        self.model.host[offset : offset + size] = data.tobytes()

    def test_bytes(self) -> None:
        """All memory that can be read is as it should be."""
        if self.model.captures or self.model.device != 0:
            return
        self._settle()
        if self.host.tobytes() != self.model.host:
            raise Disagreement(
                self._first_difference("host", self.host, self.model.host)
            )
        for each in self.model.locked.values():
            found = ctypes.string_at(each.base, each.size)
            if found != each.data:
                raise Disagreement(self._first_difference("locked", found, each.data))
        for each in self.model.allocations.values():
            if each.data:
                self._check_device(each.base, each.data)
        for reservation in self.model.reservations.values():
            for mapping in reservation.mappings.values():
                if mapping.memory.data and mapping.access.get(0, 0):
                    self._check_device(mapping.base, mapping.memory.data)

    def _check_device(self, base: int, data: bytearray) -> None:
        back = np.empty(len(data), np.uint8)
        error = self.lib.hipMemcpy(back.ctypes.data, base, len(data), 2)
        if error != 0:
            raise Disagreement(f"reading {base:#x} fails with {error}")
        if back.tobytes() != data:
            raise Disagreement(self._first_difference(hex(base), back, data))

    @staticmethod
    def _first_difference(name: str, found: Any, expected: Any) -> str:
        one, other = (
            np.frombuffer(bytes(each), np.uint8) for each in (found, expected)
        )
        (where,) = np.nonzero(one != other)
        at = where[0]
        return (
            f"{len(where)} bytes of {name} differ, the first at {at}: "
            f"{one[at]}, not {other[at]}"
        )

    def close(self) -> None:
        """Ends all that the simulator made, whatever the model thinks of it."""
        lib = self.lib
        hipsim.reset()
        lib.hipThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_uint(0)))
        for handle in self.returned:
            for kind in ("GraphExec", "Graph", "Stream", "Event"):
                getattr(lib, f"hip{kind}Destroy")(handle)
        for base in self.on_device:
            for page in range(base, base + MOST_PAGES * PAGE, PAGE):
                error, (begin, size) = self.library.hipMemGetAddressRange(page)
                if error == 0:
                    lib.hipMemUnmap(begin, size)
            lib.hipMemAddressFree(base, PAGE)
        for made in self.returned:
            while lib.hipMemRelease(made) == 0:
                pass
            lib.hipFree(made)
            lib.hipHostFree(made)
        for offset in range(0, ARENA, REGISTERED_AT):
            lib.hipHostUnregister(self.model.arena + offset)
        lib.hipSetDevice(0)
        lib.hipGetLastError()

    def finish(self) -> None:
        """The last look at bytes and accounts, before and after the end of it all."""
        model = self.model
        self.test_reset()
        self.lib.hipSetDevice(0)
        model.device = 0
        for stream in list(model.streams):
            self.play(Call(-1, "hipStreamDestroy", (stream,)))
        for reservation in model.reservations.values():
            for mapping in reservation.mappings.values():
                grants = ((1, 0, 3),)
                arguments = (mapping.base, mapping.memory.size, grants)
                self.play(Call(-1, "hipMemSetAccess", arguments))
        self.test_bytes()
        self._compare_accounts()

    def _compare_accounts(self) -> None:
        model, stats = self.model, hipsim.stats()
        mappings = [m for r in model.reservations.values() for m in r.mappings.values()]
        expected = {
            "streams": len(model.streams),
            "events": len(model.events),
            "device_allocations": len(model.allocations),
            "device_bytes": sum(each.size for each in model.allocations.values()),
            "registered_ranges": len(model.registered),
            "registered_bytes": sum(each.size for each in model.registered.values()),
            "host_allocations": len(model.locked),
            "reservations": len(model.reservations),
            "reserved_bytes": sum(each.size for each in model.reservations.values()),
            "handles": len(model.handles),
            "mappings": len(mappings),
            "mapped_bytes": sum(each.memory.size for each in mappings),
            "captures": len(model.captures),
            "graphs": len(model.graphs),
            "executables": len(model.executables),
        }
        found = {name: getattr(stats, name) for name in expected}
        if found != expected:
            raise Disagreement(f"accounts are {found}, not {expected}")


# --- making sequences ----------------------------------------------------------------


class Author:
    """Thinks of the next call, from what a session has at that moment.

    Most of what it thinks of makes sense. The rest has a size, an offset or a handle
    that is wrong.
    """

    def __init__(self, session: Session, seed: int) -> None:
        self.session = session
        self.model = session.model
        self.random = random.Random(seed)
        self.number = 0
        self.script: list[tuple[str, tuple[Any, ...]]] = []

    def next(self) -> Call:
        self.number += 1
        if not self.script and self.model.active() and self._wrong(0.1):
            self.script = list(self._fork())
        if self.script:
            function, arguments = self.script.pop(0)
            return Call(self.number, function, arguments or self._arguments(function))
        if self.number <= len(PREFACE):
            function = PREFACE[self.number - 1]
        else:
            functions, weights = zip(*self._weights().items(), strict=True)
            (function,) = self.random.choices(functions, weights)
        return Call(self.number, function, self._arguments(function))

    def _arguments(self, function: str) -> tuple[Any, ...]:
        arguments: tuple[Any, ...] = getattr(self, f"_{function}")()
        return arguments

    def _fork(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """The other stream joins the capture, works, and is mostly waited for."""
        events = [n for n, each in self.model.events.items() if each.device == 0]
        if len(self.model.streams) < 2 or not events:
            return
        event = self._name(self.random.choice(events))
        origin, other = map(self._name, self.model.streams[:2])
        yield "hipEventRecord", (event, origin)
        yield "hipStreamWaitEvent", (other, event)
        for _ in range(self.random.randint(0, 2)):
            yield "hipMemsetAsync", (*self._hipMemset(), other)
            yield "hipMemcpyAsync", (*self._hipMemcpy(), origin)
        if not self._wrong(0.2):
            yield "hipEventRecord", (event, other)
            yield "hipStreamWaitEvent", (origin, event)
        yield "hipStreamEndCapture", (other if self._wrong() else origin,)

    def _weights(self) -> dict[str, float]:
        """Calls that have nothing to work on, or would end all captures, are rare."""
        model = self.model
        weights = dict(WEIGHTS)
        have = {
            "handle": model.handles,
            "reservation": model.reservations,
            "mapping": any(each.mappings for each in model.reservations.values()),
            "event": model.events,
            "graph": model.graphs,
            "executable": model.executables,
            "registered": model.registered,
            "locked": model.locked,
        }
        for function, thing in NEEDS.items():
            if not have[thing]:
                weights[function] *= 0.05
        if len(model.streams) < 2:
            weights["hipStreamCreate"] = 30
        if model.device != 0:
            weights["hipSetDevice"] = 30
        if model.captures:
            for function in SPOILERS:
                weights[function] *= 0.15
            for function in ("hipEventRecord", "hipStreamWaitEvent"):
                weights[function] *= 2
            valid = model.captures[0].valid
            weights["hipStreamEndCapture"] = 5 if valid else 30
            weights["hipStreamBeginCapture"] *= 0.2
        elif model.graphs and not model.executables:
            weights["hipGraphInstantiateWithFlags"] = 12
        if model.executables:
            weights["hipGraphLaunch"] = 8
        return weights

    # --- choices ---------------------------------------------------------------------

    def _wrong(self, chance: float = 0.1) -> bool:
        return self.random.random() < chance

    def _name(self, value: int, offset: int = 0) -> Any:
        """What made the value; plain numbers stay what they are."""
        for number, made in reversed(self.session.made.items()):
            if made == value:
                return Name(number, offset)
        if self.model.arena <= value < self.model.arena + ARENA:
            return Host(value + offset - self.model.arena)
        return value + offset

    def _any(self, values: Any, otherwise: int = 0) -> Any:
        """One of them by name, or rarely one that is no more, or null."""
        live = list(values)
        if live and not self._wrong(0.06):
            return self._name(self.random.choice(live))
        ended = list(self.session.made.values())
        if ended and self.random.random() < 0.7:
            return self._name(self.random.choice(ended))
        return otherwise

    def _gone(self) -> Any:
        """A device's address that was given back, or null."""
        live = {*self.model.allocations, *self.model.reservations}
        gone = self.session.on_device - live
        return self._name(self.random.choice(sorted(gone))) if gone else 0

    def _stream(self) -> Any:
        streams = self.model.streams
        if self._wrong(0.05):
            return self._any(())
        pool = [0, 0, *streams[:1] * 4, *streams[1:2]]
        if self.model.captures:
            pool += [self.model.captures[0].origin] * 12
        return self._name(self.random.choice(pool))

    def _size(self) -> int:
        return self.random.choice(
            (1, 100, PAGE, PAGE + 1, 3 * PAGE, 16384, 16385, 20000)
        )

    def _memory(self) -> list[tuple[int, int]]:
        """Where a copy may begin, and how much there is."""
        model = self.model
        ranges = [*model.allocations.values(), *model.locked.values()]
        found = [(each.base, each.size) for each in ranges if each.size <= MOST_BYTES]
        for each in model.registered.values():
            found.append((each.base, each.size))
            if each.alias is not None:
                found.append((each.alias, each.size))
        for reservation in model.reservations.values():
            for mapping in reservation.mappings.values():
                room = reservation.base + reservation.size - mapping.base
                whole = self.random.random() < 0.3
                found.append((mapping.base, room if whole else mapping.memory.size))
        return found

    def _end(self) -> tuple[Any, int]:
        """One end of a copy: an address, and what is left of its memory from there."""
        memory = self._memory()
        if self._wrong(0.05) or not memory or self.random.random() < 0.2:
            if self._wrong(0.3):
                return self._gone(), PAGE
            offset = self.random.randrange(ARENA // 256) * 256
            return Host(offset), ARENA - offset
        base, size = self.random.choice(memory)
        offset = self.random.choice((0, 0, 0, 1, 16, size // 2))
        if self._wrong(0.05) and base not in self.model.locked:
            offset = size
        named = self._named_inside(base, offset)
        return named, max(size - offset, 0)

    def _named_inside(self, base: int, offset: int) -> Any:
        for number, made in reversed(self.session.made.items()):
            if made <= base < made + self._extent(made):
                return Name(number, base - made + offset)
        return self._name(base, offset)

    def _extent(self, base: int) -> int:
        model = self.model
        if base in model.reservations:
            return model.reservations[base].size
        for ranges in (model.allocations, model.locked):
            if base in ranges:
                return ranges[base].size
        return 1

    def _length(self, *rooms: int) -> int:
        room = min(rooms)
        if self._wrong(0.08):
            return self.random.choice((0, max(rooms) + 1, room + 1, 2**63))
        return max(1, self.random.choice((room, room // 2, min(room, 100), 1)))

    def _kind(self) -> int:
        if self._wrong(0.04):
            return self.random.choice((5, 9, 1024))
        return self.random.choice((4, 4, 4, 3, 2, 1, 0))

    # --- devices ---------------------------------------------------------------------

    def _hipSetDevice(self) -> tuple[Any, ...]:
        if self._wrong():
            return (self.random.choice((-1, DEVICES)),)
        return (0 if self.model.device else self.random.choice((0, 1)),)

    def _nothing(self) -> tuple[Any, ...]:
        return ()

    _hipDeviceSynchronize = _hipMemGetInfo = _hipStreamCreate = _nothing

    # --- memory ----------------------------------------------------------------------

    def _hipMalloc(self) -> tuple[Any, ...]:
        if self._wrong():
            free = self.model.free_bytes(self.model.device)
            return (self.random.choice((0, free + 1, free, free // 2, 2**63)),)
        return (self._size(),)

    def _hipFree(self) -> tuple[Any, ...]:
        pointer = self._any(self.model.allocations)
        if isinstance(pointer, Name) and self._wrong():
            pointer = pointer._replace(offset=1)
        return (pointer,)

    def _hipHostMalloc(self) -> tuple[Any, ...]:
        return (0 if self._wrong() else self._size(),)

    def _hipHostFree(self) -> tuple[Any, ...]:
        return (self._any(self.model.locked),)

    def _hipHostRegister(self) -> tuple[Any, ...]:
        flags = self.random.choice((16, 2**31, 3)) if self._wrong() else 0
        if self._wrong(0.15):
            pointer = self._any((*self.model.allocations, *self.model.locked))
            return (pointer, self.random.choice((0, 1, PAGE, 2**64 - 1)), flags)
        offset = self.random.randrange(ARENA // REGISTERED_AT) * REGISTERED_AT
        return (Host(offset), min(self._size(), ARENA - offset), flags)

    def _hipHostUnregister(self) -> tuple[Any, ...]:
        pointer = self._any(self.model.registered)
        if isinstance(pointer, Host) and self._wrong():
            pointer = Host(pointer.offset + 1)
        return (pointer,)

    def _hipHostGetDevicePointer(self) -> tuple[Any, ...]:
        pointer = self._any((*self.model.registered, *self.model.locked))
        if isinstance(pointer, Host) and self.random.random() < 0.3:
            pointer = Host(pointer.offset + self.random.choice((1, 99, PAGE)))
        return (pointer, int(self._wrong(0.05)))

    def _hipMemGetAddressRange(self) -> tuple[Any, ...]:
        return (self._end()[0],)

    # --- virtual memory --------------------------------------------------------------

    def _pages(self) -> int:
        return self.random.randint(1, 4) * PAGE

    def _hipMemGetAllocationGranularity(self) -> tuple[Any, ...]:
        device = self.random.choice((-1, DEVICES)) if self._wrong() else 0
        kind = 0 if self._wrong() else 1
        location = 0 if self._wrong() else 1
        return (kind, location, device, self.random.choice((0, 1, 1, 2)))

    def _hipMemAddressReserve(self) -> tuple[Any, ...]:
        size = self.random.choice((4, 6, MOST_PAGES)) * PAGE
        alignment = self.random.choice((0, 0, PAGE, 2 << 20))
        hint: Any = 0
        if self._wrong(0.2):
            hint = self._any(self.session.made.values())
        if self._wrong():
            size = self.random.choice((0, 1, PAGE + 1, 1 << 50))
        if self._wrong(0.05):
            alignment = self.random.choice((3, PAGE + 1))
        return (size, alignment, hint, int(self._wrong(0.05)))

    def _hipMemAddressFree(self) -> tuple[Any, ...]:
        pointer = self._any(self.model.reservations)
        base = self.session.made[pointer.number] if isinstance(pointer, Name) else 0
        reservation = self.model.reservations.get(base)
        size = PAGE if reservation is None else reservation.size
        if isinstance(pointer, Name) and self._wrong():
            pointer = pointer._replace(offset=PAGE)
        return (pointer, self.random.choice((0, 1, PAGE)) if self._wrong() else size)

    def _hipMemCreate(self) -> tuple[Any, ...]:
        size = self._pages()
        if self._wrong():
            free = self.model.free_bytes(self.model.device) // PAGE * PAGE
            choices = (0, 1, PAGE - 1, free, free + PAGE, self.model.total + 1, 2**63)
            size = self.random.choice(choices)
        device = self.random.choice((-1, DEVICES)) if self._wrong(0.05) else 0
        types = self.random.choice((0, 0, 1))
        if self._wrong(0.05):
            types = self.random.choice((2, 4, 5))
        kind = 0 if self._wrong(0.03) else 1
        location = 0 if self._wrong(0.03) else 1
        device = device or self.random.choice((0, 0, 1))
        return (size, kind, location, device, types, int(self._wrong(0.03)))

    def _hipMemRelease(self) -> tuple[Any, ...]:
        return (self._any(self.model.handles),)

    def _hipMemGetAllocationPropertiesFromHandle(self) -> tuple[Any, ...]:
        return (self._any(self.model.handles),)

    def _hipMemMap(self) -> tuple[Any, ...]:
        handle = self._any(self.model.handles)
        value = self.session.made[handle.number] if isinstance(handle, Name) else 0
        memory, _ = self.model.handles.get(value, (None, 0))
        size = PAGE if memory is None else memory.size
        where = self._any(self.model.reservations)
        if isinstance(where, Name):
            free = self._free_pages(where, size)
            offset = self.random.choice(free or [0])
            if self._wrong():
                offset = self.random.choice((1, PAGE, 3 * PAGE, 8 * PAGE))
            where = where._replace(offset=offset)
        if self._wrong(0.05):
            size = self.random.choice((0, size - PAGE, size + PAGE))
        offset = PAGE if self._wrong(0.03) else 0
        return (where, size, offset, handle, int(self._wrong(0.03)))

    def _free_pages(self, where: Name, size: int) -> list[int]:
        base = self.session.made.get(where.number, 0)
        reservation = self.model.reservations.get(base)
        if reservation is None:
            return []
        taken = [(m.base - base, m.end - base) for m in reservation.mappings.values()]
        return [
            at
            for at in range(0, reservation.size - size + 1, PAGE)
            if all(end <= at or at + size <= begin for begin, end in taken)
        ]

    def _mapped(self) -> tuple[Any, int]:
        """Some mappings of a reservation in a row; rarely a little more or less."""
        candidates = [r for r in self.model.reservations.values() if r.mappings]
        if not candidates:
            return self._any(self.model.reservations), PAGE
        reservation = self.random.choice(candidates)
        mappings = sorted(reservation.mappings.values(), key=lambda m: m.base)
        first = self.random.randrange(len(mappings))
        last = first
        while (
            last + 1 < len(mappings)
            and mappings[last].end == mappings[last + 1].base
            and self.random.random() < 0.6
        ):
            last += 1
        begin = mappings[first].base - reservation.base
        end = mappings[last].end - reservation.base
        if self._wrong():
            end += self.random.choice((-PAGE, PAGE, 8 * PAGE, begin - end))
        if self._wrong(0.05):
            begin += self.random.choice((1, PAGE, -PAGE))
        return self._name(reservation.base, begin), max(end - begin, 0)

    def _hipMemUnmap(self) -> tuple[Any, ...]:
        return self._mapped()

    def _hipMemSetAccess(self) -> tuple[Any, ...]:
        pointer, size = self._mapped()
        flags = self.random.choice((3, 3, 3, 3, 1, 0))
        grants = [(1, 0, 2 if self._wrong(0.03) else flags)]
        if self._wrong(0.2):
            location = self.random.choice((0, 1, 2))
            device = self.random.choice((0, 1, 1, DEVICES, -1))
            grants.append((location, device, 3))
        return (pointer, size, () if self._wrong(0.03) else tuple(grants))

    def _hipMemGetAccess(self) -> tuple[Any, ...]:
        pointer, _ = self._mapped()
        location = self.random.choice((0, 2)) if self._wrong() else 1
        return (pointer, location, self.random.choice((0, 0, 1, DEVICES)))

    def _hipMemRetainAllocationHandle(self) -> tuple[Any, ...]:
        pointer, _ = self._mapped()
        if isinstance(pointer, Name) and self.random.random() < 0.3:
            pointer = pointer._replace(offset=pointer.offset + 5)
        return (pointer,)

    # --- streams and events ----------------------------------------------------------

    def _hipStreamDestroy(self) -> tuple[Any, ...]:
        return (self._any(self.model.streams),)

    def _one_stream(self) -> tuple[Any, ...]:
        return (self._stream(),)

    _hipStreamQuery = _hipStreamSynchronize = _hipStreamIsCapturing = _one_stream

    def _hipStreamBeginCapture(self) -> tuple[Any, ...]:
        mode = 3 if self._wrong(0.03) else self.random.choice((0, 1, 2, 2, 2))
        if self.model.streams and not self._wrong():
            return (self._name(self.model.streams[0]), mode)
        return (self._stream(), mode)

    def _hipStreamEndCapture(self) -> tuple[Any, ...]:
        if self.model.captures and not self._wrong(0.2):
            return (self._name(self.model.captures[0].origin),)
        return (self._stream(),)

    def _hipThreadExchangeStreamCaptureMode(self) -> tuple[Any, ...]:
        return (self.random.choice((0, 1, 2, 2, 3)),)

    def _hipEventCreateWithFlags(self) -> tuple[Any, ...]:
        return (self.random.choice((0, 2)),)

    def _one_event(self) -> tuple[Any, ...]:
        return (self._any(self.model.events),)

    _hipEventDestroy = _hipEventQuery = _hipEventSynchronize = _one_event

    def _hipEventRecord(self) -> tuple[Any, ...]:
        return (self._any(self.model.events), self._stream())

    def _hipStreamWaitEvent(self) -> tuple[Any, ...]:
        streams = self.model.streams
        stream = self._name(self.random.choice(streams)) if streams else self._stream()
        return (stream, self._any(self.model.events))

    def _hipEventElapsedTime(self) -> tuple[Any, ...]:
        return (self._any(self.model.events), self._any(self.model.events))

    # --- graphs ----------------------------------------------------------------------

    def _one_graph(self) -> tuple[Any, ...]:
        return (self._any(self.model.graphs),)

    _hipGraphGetNodes = _hipGraphDestroy = _one_graph

    def _hipGraphInstantiateWithFlags(self) -> tuple[Any, ...]:
        flags = self.random.choice((0, 0, 0, 1, 8, 2, 9))
        return (self._any(self.model.graphs), flags)

    def _hipGraphLaunch(self) -> tuple[Any, ...]:
        executables = self.model.executables
        longest = max(
            executables, key=lambda each: len(executables[each][0]), default=0
        )
        if longest and self.random.random() < 0.6:
            return (self._name(longest), self._stream())
        return (self._any(executables), self._stream())

    def _hipGraphExecDestroy(self) -> tuple[Any, ...]:
        return (self._any(self.model.executables),)

    # --- copies ----------------------------------------------------------------------

    def _hipMemset(self) -> tuple[Any, ...]:
        to, room = self._end()
        return (to, self.random.randrange(256), self._length(room))

    def _hipMemsetAsync(self) -> tuple[Any, ...]:
        return (*self._hipMemset(), self._stream())

    def _hipMemcpy(self) -> tuple[Any, ...]:
        (to, to_room), (source, source_room) = self._end(), self._end()
        return (to, source, self._length(to_room, source_room), self._kind())

    def _hipMemcpyAsync(self) -> tuple[Any, ...]:
        return (*self._hipMemcpy(), self._stream())

    def _hipMemcpy2D(self) -> tuple[Any, ...]:
        (to, to_room), (source, source_room) = self._end(), self._end()
        height = self.random.choice((1, 2, 3, 4))
        width = self.random.choice((1, 4, 16, 60))
        room = max(min(to_room, source_room) // height, 1)
        pitches = [
            self.random.choice((width, width + 4, max(room, width))) for _ in "ab"
        ]
        if self._wrong():
            pitches[self.random.randrange(2)] = self.random.choice(
                (0, width - 1, 4 * PAGE)
            )
        if self._wrong(0.05):
            width, height = self.random.choice(((0, 1), (1, 0), (width, 50)))
        plane = (to, pitches[0], source, pitches[1], width, height)
        return (plane, self._kind())

    def _hipMemcpy2DAsync(self) -> tuple[Any, ...]:
        return (*self._hipMemcpy2D(), self._stream())

    def _hipMemcpy3D(self) -> tuple[Any, ...]:
        extent = tuple(self.random.choice((1, 2, 3, 8)) for _ in "xyz")
        if self._wrong(0.05):
            extent = (extent[0], 0, extent[2])
        sides = []
        for _ in range(2):
            end, _ = self._end()
            position = tuple(self.random.choice((0, 0, 1, 2)) for _ in "xyz")
            xsize = extent[0] + position[0]
            pitch = xsize + self.random.choice((0, 0, 4, 50))
            ysize = self.random.choice((extent[1] + position[1], 16, 0))
            if ysize == 0:
                position = (position[0], 0, 0)
            if self._wrong(0.05):
                pitch = self.random.choice((0, xsize - 1))
                xsize = self.random.choice((0, xsize))
            sides.append((end, pitch, xsize, ysize, *position))
        return (tuple(sides), extent, self._kind())

    def _hipMemcpy3DAsync(self) -> tuple[Any, ...]:
        return (*self._hipMemcpy3D(), self._stream())

    def _hipMemcpyBatchAsync(self) -> tuple[Any, ...]:
        count = 0 if self._wrong(0.03) else self.random.randint(1, 4)
        copies = [self._hipMemcpy()[:3] for _ in range(count)]
        if copies and self._wrong(0.02):
            to, source, _ = copies[0]
            copies = [(to, source, 1)] * 8193
        attributes: list[tuple[int, int, int]] = []
        if self.random.random() < 0.5:
            for first in range(self.random.randint(1, 3)):
                order = self.random.choice((0, 4)) if self._wrong(0.05) else 1 + first
                flags = self.random.choice((0, 0, 0x100, 0x100, 1))
                if self._wrong(0.05):
                    flags = self.random.choice((0x200, 0x400, 0x600, 0x1000))
                first += self._wrong(0.05)
                attributes.append((first, order, flags))
        wants_index = self.random.random() < 0.8
        return (tuple(copies), tuple(attributes), wants_index, self._stream())

    # --- words to the test -----------------------------------------------------------

    _test_bytes = _nothing

    def _test_reset(self) -> tuple[Any, ...]:
        return ()

    def _test_alias(self) -> tuple[Any, ...]:
        return (self.random.random() < 0.5,)

    def _test_write(self) -> tuple[Any, ...]:
        offset = self.random.randrange(ARENA // PAGE) * PAGE
        return (offset, self.random.choice((64, PAGE)), self.random.randrange(2**30))


WEIGHTS = {
    "hipSetDevice": 0.6,
    "hipDeviceSynchronize": 0.4,
    "hipMemGetInfo": 2,
    "hipMalloc": 4,
    "hipFree": 1.5,
    "hipHostMalloc": 0.8,
    "hipHostFree": 0.4,
    "hipHostRegister": 2,
    "hipHostUnregister": 0.8,
    "hipHostGetDevicePointer": 1,
    "hipMemGetAddressRange": 0.5,
    "hipMemGetAllocationGranularity": 0.3,
    "hipMemAddressReserve": 2.5,
    "hipMemAddressFree": 0.8,
    "hipMemCreate": 4,
    "hipMemRelease": 1.2,
    "hipMemGetAllocationPropertiesFromHandle": 0.4,
    "hipMemMap": 5,
    "hipMemUnmap": 2,
    "hipMemSetAccess": 5,
    "hipMemGetAccess": 0.8,
    "hipMemRetainAllocationHandle": 0.8,
    "hipStreamCreate": 0.1,
    "hipStreamDestroy": 0.2,
    "hipStreamQuery": 0.4,
    "hipStreamSynchronize": 0.6,
    "hipStreamBeginCapture": 3,
    "hipStreamEndCapture": 0.5,
    "hipStreamIsCapturing": 0.6,
    "hipThreadExchangeStreamCaptureMode": 0.8,
    "hipEventCreateWithFlags": 1,
    "hipEventDestroy": 0.2,
    "hipEventRecord": 2.5,
    "hipEventQuery": 0.6,
    "hipEventSynchronize": 0.5,
    "hipStreamWaitEvent": 2.5,
    "hipEventElapsedTime": 0.3,
    "hipGraphGetNodes": 0.4,
    "hipGraphDestroy": 0.3,
    "hipGraphInstantiateWithFlags": 2,
    "hipGraphLaunch": 3,
    "hipGraphExecDestroy": 0.3,
    "hipMemset": 1.5,
    "hipMemsetAsync": 4,
    "hipMemcpy": 2,
    "hipMemcpyAsync": 6,
    "hipMemcpy2D": 1,
    "hipMemcpy2DAsync": 3,
    "hipMemcpy3D": 1,
    "hipMemcpy3DAsync": 2,
    "hipMemcpyBatchAsync": 4,
    "test_bytes": 1,
    "test_reset": 0.2,
    "test_alias": 0.5,
    "test_write": 1.5,
}


PREFACE = (
    "hipStreamCreate",
    "hipStreamCreate",
    "hipMalloc",
    "hipHostRegister",
    "hipMemAddressReserve",
    "hipMemCreate",
    "hipMemCreate",
    "hipMemMap",
    "hipMemMap",
    "hipMemSetAccess",
    "hipEventCreateWithFlags",
)

# What a call cannot do without, and do anything.
NEEDS = {
    "hipHostFree": "locked",
    "hipHostUnregister": "registered",
    "hipMemAddressFree": "reservation",
    "hipMemRelease": "handle",
    "hipMemGetAllocationPropertiesFromHandle": "handle",
    "hipMemMap": "handle",
    "hipMemUnmap": "mapping",
    "hipMemSetAccess": "mapping",
    "hipMemGetAccess": "mapping",
    "hipMemRetainAllocationHandle": "mapping",
    "hipEventDestroy": "event",
    "hipEventRecord": "event",
    "hipEventQuery": "event",
    "hipEventSynchronize": "event",
    "hipStreamWaitEvent": "event",
    "hipEventElapsedTime": "event",
    "hipGraphGetNodes": "graph",
    "hipGraphDestroy": "graph",
    "hipGraphInstantiateWithFlags": "graph",
    "hipGraphLaunch": "executable",
    "hipGraphExecDestroy": "executable",
}

# What spoils captures in some mode.
SPOILERS = (
    "hipDeviceSynchronize",
    "hipMalloc",
    "hipFree",
    "hipHostMalloc",
    "hipHostFree",
    "hipHostRegister",
    "hipHostUnregister",
    "hipStreamQuery",
    "hipStreamSynchronize",
    "hipEventQuery",
    "hipEventSynchronize",
    "hipMemset",
    "hipMemcpy",
    "hipMemcpy2D",
    "test_reset",
)


# --- playing them --------------------------------------------------------------------


def differ(seed: int, make: MakeModel = Hip) -> tuple[list[Call], str]:
    """Plays the sequence of a seed.

    Returns:
        The calls that were made, and what the two differ in, or nothing.
    """
    session = Session(seed, make)
    author = Author(session, seed)
    try:
        while len(session.played) < CALLS:
            session.play(author.next())
        session.finish()
    except Disagreement as disagreement:
        return session.played, str(disagreement)
    finally:
        session.close()
    return session.played, ""


def replay(seed: int, calls: Sequence[Call], make: MakeModel = Hip) -> str:
    """Plays calls that were made before; what the two differ in, or nothing."""
    session = Session(seed, make)
    try:
        for call in calls:
            session.play(call)
        session.finish()
    except Disagreement as disagreement:
        return str(disagreement)
    finally:
        session.close()
    return ""


def explain(
    seed: int, calls: Sequence[Call], difference: str, make: MakeModel = Hip
) -> str:
    """What was seen, and the calls that it takes to see something like it."""
    needed = [call for call in calls if call.number > 0]
    lines = [f"seed {seed}, HIP {Session(seed, make).profile}: {difference}"]
    if not replay(seed, needed, make):
        lines.append("It did not happen again. All calls:")
    else:
        for call in reversed(needed):
            without = [each for each in needed if each is not call]
            if replay(seed, without, make):
                needed = without
        lines.append(f"After these calls: {replay(seed, needed, make)}")
    return "\n".join([*lines, *(f"  {call}" for call in needed)])
