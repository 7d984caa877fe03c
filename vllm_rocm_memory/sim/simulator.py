# SPDX-License-Identifier: Apache-2.0
"""A simulated GPU driver of this process, and what a test can do with it.

There is one library a vendor: `hipsim` has HIP's, `cudasim` has the CUDA driver's.
Both are made of the same engine and have the same controls beside their functions
(`csrc/hipsim/bridge/hipsim_control.h`).
"""

import atexit
import ctypes
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint64
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

_NATIVE = Path(__file__).resolve().parent.parent / "_native"


class _Stat(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char * 64), ("value", c_uint64))


CONTROLS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "hipsim_environment_error": (c_char_p,),
        "hipsim_profile_name": (c_char_p, c_size_t),
        "hipsim_profile": (c_char_p,),
        "hipsim_reset": (c_int, c_char_p),
        "hipsim_call_name": (c_char_p, c_size_t),
        "hipsim_fail": (c_int, c_char_p, c_uint64, c_int),
        "hipsim_set_switch": (c_int, c_char_p, c_int64),
        "hipsim_stats": (c_size_t, POINTER(_Stat), c_size_t),
        "hipsim_abandon": (None,),
    }
)
"""What each library exports beside its vendor's functions: results and arguments."""

_MAX_LATENCY_US = 3600 * 10**6
_MAX_SWITCH = 2**63 - 1
_STALE_MEMORY = ("clean", "as_left", "poisoned")
_LOCKED_MEMORY = ("unlimited", "rlimit")


class CopyCount(NamedTuple):
    """What an engine moved in one direction."""

    copies: int
    bytes: int


@dataclass(frozen=True)
class Stats:
    """The simulator's accounts at one moment.

    Attributes:
        streams: Live ones; null streams do not count.
        events: Live ones.
        device_allocations: Live ones of all devices, with `device_bytes`.
        registered_ranges: Of registered host memory, with `registered_bytes`.
        host_allocations: Of page-locked memory, with `host_allocation_bytes`.
        reservations: Of address space, with `reserved_bytes`.
        handles: Of physical memory that nobody has released, with `handle_bytes`.
        mappings: Of physical memory to addresses, with `mapped_bytes`.
        captures: Begun and not ended.
        graphs: Live ones; `executables` are the instantiated ones.
        imports: Of other processes' memory, with `imported_bytes`.
        batch_calls: Batches that were accepted, with `batch_copies` in all.
        staged_copies: Made from or to pageable host memory, with `staged_bytes`.
        pitched_copies: Made of rectangles and boxes, with `pitched_bytes`.
        pitched_packets: That copy engines took for them: one for a rectangle within the
            limits of a packet.
        fills: Made of device and page-locked memory, with `filled_bytes`.
        pending_faults: Asked for with `fail`, and not come yet.
        memory_faults: Each would have ended the process on a GPU.
        ipc_exports: Handles given for device memory.
        ipc_virtual_exports: Handles asked for virtual memory, given or not.
        ipc_failed_imports: Handles that could not be opened.
        calls: How often each function of `calls()` was called.
        copies: By engine ("sdma", "blit", or "host" for the CPU between two pageable
            addresses) and direction ("h2d", "d2h", "d2d", "h2h"). A copy counts once
            it is made.
        host_copies: Those over the link once more, by what the host's side is
            ("pageable"; "registered"; "allocated" by the driver) and direction ("h2d",
            "d2h").
    """

    streams: int
    events: int
    device_allocations: int
    device_bytes: int
    registered_ranges: int
    registered_bytes: int
    host_allocations: int
    host_allocation_bytes: int
    reservations: int
    reserved_bytes: int
    handles: int
    handle_bytes: int
    mappings: int
    mapped_bytes: int
    captures: int
    graphs: int
    executables: int
    imports: int
    imported_bytes: int
    batch_calls: int
    batch_copies: int
    staged_copies: int
    staged_bytes: int
    pitched_copies: int
    pitched_bytes: int
    pitched_packets: int
    fills: int
    filled_bytes: int
    pending_faults: int
    memory_faults: int
    ipc_exports: int
    ipc_virtual_exports: int
    ipc_failed_imports: int
    calls: Mapping[str, int]
    copies: Mapping[tuple[str, str], CopyCount]
    host_copies: Mapping[tuple[str, str], CopyCount]


def _names(name_at: Callable[[int], bytes | None]) -> tuple[str, ...]:
    names: list[str] = []
    while (name := name_at(len(names))) is not None:
        names.append(name.decode())
    return tuple(names)


class Simulator:
    """One library, loaded when it is first asked for."""

    def __init__(
        self,
        file: str,
        prototypes: Mapping[str, tuple[Any, ...]],
        mode: int = ctypes.RTLD_GLOBAL,
    ) -> None:
        """Names a library and says what its vendor's functions look like.

        Args:
            file: Its path below the package's folder of built libraries.
            prototypes: The result and the arguments of each function, as ctypes has
                them, by name.
            mode: How it is loaded: RTLD_GLOBAL, for all to see, or RTLD_LOCAL.
        """
        self._file = file
        self._prototypes = prototypes
        self._mode = mode
        self._lock = threading.Lock()
        self._library: ctypes.CDLL | None = None

    def library_path(self) -> Path:
        """The built library.

        Raises:
            FileNotFoundError: It is not built.
        """
        path = _NATIVE / self._file
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not built: run `make setup`")
        return path

    def load(self) -> ctypes.CDLL:
        """The process's one instance, with the types of every function set.

        Who asks the dynamic loader for the driver's name afterwards gets the same
        instance, unless another one was there before. The environment variables
        HIPSIM_PROFILE, HIPSIM_VRAM_BYTES, HIPSIM_HOST_READS and HIPSIM_SWITCHES count
        at the first call.

        Raises:
            FileNotFoundError: The library is not built.
            ValueError: One of the variables has a value that is not allowed.
        """
        with self._lock:
            if self._library is None:
                path = os.fspath(self.library_path())
                lib = ctypes.CDLL(path, mode=self._mode)
                for name, (result, *arguments) in {
                    **self._prototypes,
                    **CONTROLS,
                }.items():
                    function = getattr(lib, name)
                    function.restype = result
                    function.argtypes = arguments
                if error := lib.hipsim_environment_error():
                    raise ValueError(error.decode())
                # Host memory goes while streams may still be copying it.
                atexit.register(lib.hipsim_abandon)
                self._library = lib
            return self._library

    def profiles(self) -> tuple[str, ...]:
        """The releases that can be simulated, oldest first."""
        return _names(self.load().hipsim_profile_name)

    def calls(self) -> tuple[str, ...]:
        """The functions that `fail` can make fail."""
        return _names(self.load().hipsim_call_name)

    def profile(self) -> str:
        """The name of the simulated release."""
        name: bytes = self.load().hipsim_profile()
        return name.decode()

    def reset(self, profile: str | None = None) -> None:
        """Sets the profile and takes everything a test may have set back to the start.

        Waits for the work in flight. Faults, switches, counters and a GPU memory
        fault go, and captures are invalidated; allocations, streams and events stay.

        Args:
            profile: One of `profiles()`; None keeps the present one.

        Raises:
            ValueError: There is no such profile.
        """
        chosen = None if profile is None else profile.encode()
        if self.load().hipsim_reset(chosen) != 0:
            allowed = ", ".join(self.profiles())
            raise ValueError(f"no profile {profile!r}; there are {allowed}")

    def fail(self, call: str, nth: int, error: int) -> None:
        """Makes the nth call of a function from now on (1: the next) return `error`.

        The failing call does nothing else.

        Raises:
            ValueError: There is no such function, `nth` is below 1 or `error` is 0.
        """
        if nth < 1 or error == 0:
            raise ValueError(f"nth ({nth}) counts from 1 and error ({error}) is not 0")
        if self.load().hipsim_fail(call.encode(), nth, error) != 0:
            raise ValueError(f"no call {call!r}; there are {', '.join(self.calls())}")

    def configure(
        self,
        *,
        corrupt_loads: bool | None = None,
        copy_latency_us: int | None = None,
        fill_latency_us: int | None = None,
        host_device_pointers: bool | None = None,
        one_mapping_copies: bool | None = None,
        ignore_address_hints: bool | None = None,
        no_virtual_memory: bool | None = None,
        small_bar: bool | None = None,
        max_registration_bytes: int | None = None,
        max_locked_bytes: int | None = None,
        locked_memory: Literal["unlimited", "rlimit"] | None = None,
        host_reads: Literal["fault", "allow"] | None = None,
        stale_memory: Literal["clean", "as_left", "poisoned"] | None = None,
    ) -> None:
        """Sets switches, for what is called from now on; None leaves one alone.

        Args:
            corrupt_loads: Copies from host to device write every byte inverted.
            copy_latency_us: Microseconds that each copy or batch, and each fill,
                waits in its stream before it moves a byte.
            fill_latency_us: The same for fills alone.
            host_device_pointers: A device knows host memory that is registered by
                another address than the host does.
            one_mapping_copies: A copy across the end of a mapping is refused.
            ignore_address_hints: A reservation never lies where the caller wished.
            no_virtual_memory: The devices say that they have none, and it can neither
                be reserved nor created.
            small_bar: The devices say that the host reaches a part of their memory
                only; it is reached as before.
            max_registration_bytes: Host memory of more bytes than this cannot be
                registered, for want of memory; 0 is no limit.
            max_locked_bytes: Host memory that would make all that is registered or
                allocated in this process more bytes than this cannot be had, for want
                of memory; 0 is no limit.
            locked_memory: With "rlimit" the process's RLIMIT_MEMLOCK, as it is at each
                call, is such a limit too, also for a user who may lock more.
            host_reads: What happens when the host touches virtual memory that has no
                access descriptor for it.
            stale_memory: What is in the pages of new memory: zeroes, what their last
                owner left, or 0xFF in every byte.

        Raises:
            ValueError: A value that is not allowed.
        """
        values = {
            "corrupt_loads": corrupt_loads,
            "copy_latency_us": copy_latency_us,
            "fill_latency_us": fill_latency_us,
            "host_device_pointers": host_device_pointers,
            "one_mapping_copies": one_mapping_copies,
            "ignore_address_hints": ignore_address_hints,
            "no_virtual_memory": no_virtual_memory,
            "small_bar": small_bar,
            "max_registration_bytes": max_registration_bytes,
            "max_locked_bytes": max_locked_bytes,
            "locked_memory": _choice("locked_memory", locked_memory, _LOCKED_MEMORY),
            "host_reads": _choice("host_reads", host_reads, ("fault", "allow")),
            "stale_memory": _choice("stale_memory", stale_memory, _STALE_MEMORY),
        }
        for name, most in (
            ("copy_latency_us", _MAX_LATENCY_US),
            ("fill_latency_us", _MAX_LATENCY_US),
            ("max_registration_bytes", _MAX_SWITCH),
            ("max_locked_bytes", _MAX_SWITCH),
        ):
            number = values[name]
            if number is not None and not 0 <= number <= most:
                raise ValueError(f"{name} is {number}; it must be from 0 to {most}")
        for name, value in values.items():
            if value is not None:
                self.load().hipsim_set_switch(name.encode(), value)

    def stats(self) -> Stats:
        """The accounts of this moment."""
        lib = self.load()
        entries = (_Stat * lib.hipsim_stats(None, 0))()
        lib.hipsim_stats(entries, len(entries))
        plain: dict[str, int] = {}
        grouped: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for entry in entries:
            group, dot, rest = entry.name.decode().partition(".")
            (grouped[group] if dot else plain)[rest or group] = entry.value
        return Stats(
            **plain,
            calls=MappingProxyType(grouped["calls"]),
            copies=_copy_counts(grouped["copies"], grouped["bytes"]),
            host_copies=_copy_counts(grouped["host_copies"], grouped["host_bytes"]),
        )

    def assert_clean(self) -> None:
        """Raises AssertionError that names what is still live."""
        now = self.stats()
        live = {
            "streams": now.streams,
            "events": now.events,
            f"device allocations ({now.device_bytes} bytes)": now.device_allocations,
            f"registered host ranges ({now.registered_bytes} bytes)": (
                now.registered_ranges
            ),
            f"host allocations ({now.host_allocation_bytes} bytes)": (
                now.host_allocations
            ),
            f"reservations ({now.reserved_bytes} bytes)": now.reservations,
            f"handles ({now.handle_bytes} bytes)": now.handles,
            f"mappings ({now.mapped_bytes} bytes)": now.mappings,
            "captures": now.captures,
            "graphs": now.graphs,
            "executable graphs": now.executables,
            f"imports ({now.imported_bytes} bytes)": now.imports,
        }
        left = [f"{count} {name}" for name, count in live.items() if count]
        if left:
            raise AssertionError(f"still live: {', '.join(left)}")


def _copy_counts(
    copies: Mapping[str, int], moved: Mapping[str, int]
) -> Mapping[tuple[str, str], CopyCount]:
    counts = {}
    for key, count in copies.items():
        what, direction = key.split(".")
        counts[what, direction] = CopyCount(count, moved[key])
    return MappingProxyType(counts)


def _choice(name: str, value: str | None, allowed: tuple[str, ...]) -> int | None:
    if value is None:
        return None
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be {' or '.join(allowed)}")
    return allowed.index(value)
