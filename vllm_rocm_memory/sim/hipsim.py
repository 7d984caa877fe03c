# SPDX-License-Identifier: Apache-2.0
"""The HIP runtime simulator of this process.

The simulator is a shared library with HIP's own name and functions. This module
loads it, tells ctypes about its functions and gives a test the controls beside them:
profiles, faults, switches and statistics (`csrc/hipsim/bridge/hipsim_control.h` says
what each one means).
"""

import atexit
import ctypes
import os
import threading
from collections.abc import Callable, Mapping
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

PROFILES: tuple[str, ...]
"""The HIP releases that can be simulated, oldest first."""

CALLS: tuple[str, ...]
"""The HIP functions that `fail` can make fail."""

# Numbers of hipError_t, hipMemcpyKind and hipMemcpyFlags.
SUCCESS = 0
NOT_READY = 600
HOST_TO_DEVICE = 1
DEVICE_TO_HOST = 2
DEVICE_TO_DEVICE = 3
DEFAULT_KIND = 4
FLAG_PREFER_COPY_ENGINE = 0x100
STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2


class HipError(RuntimeError):
    """A HIP call returned an error; `name` and `number` are hipError_t's."""

    def __init__(self, call: str, number: int) -> None:
        lib = load()
        self.call = call
        self.number = number
        self.name: str = lib.hipGetErrorName(number).decode()
        text = lib.hipGetErrorString(number).decode()
        super().__init__(f"{call} failed: {self.name} ({number}): {text}")


class MemLocation(ctypes.Structure):
    """hipMemLocation."""

    _fields_ = (("type", c_uint), ("id", c_int))


class MemcpyAttributes(ctypes.Structure):
    """hipMemcpyAttributes."""

    _fields_ = (
        ("srcAccessOrder", c_uint),
        ("srcLocHint", MemLocation),
        ("dstLocHint", MemLocation),
        ("flags", c_uint),
    )


class _Stat(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char * 64), ("value", ctypes.c_uint64))


_OUT_INT = POINTER(c_int)
_OUT_SIZE = POINTER(c_size_t)
_OUT_HANDLE = POINTER(c_void_p)

# Every function that the library exports: its result and its arguments. Arrays are
# plain addresses, so that numpy's and ctypes' can both be passed.
PROTOTYPES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "hipInit": (c_int, c_uint),
        "hipRuntimeGetVersion": (c_int, _OUT_INT),
        "hipDriverGetVersion": (c_int, _OUT_INT),
        "hipGetErrorName": (c_char_p, c_int),
        "hipGetErrorString": (c_char_p, c_int),
        "hipGetLastError": (c_int,),
        "hipPeekAtLastError": (c_int,),
        "hipGetDeviceCount": (c_int, _OUT_INT),
        "hipSetDevice": (c_int, c_int),
        "hipGetDevice": (c_int, _OUT_INT),
        "hipDeviceSynchronize": (c_int,),
        "hipDeviceGetStreamPriorityRange": (c_int, _OUT_INT, _OUT_INT),
        "hipStreamCreate": (c_int, _OUT_HANDLE),
        "hipStreamCreateWithFlags": (c_int, _OUT_HANDLE, c_uint),
        "hipStreamCreateWithPriority": (c_int, _OUT_HANDLE, c_uint, c_int),
        "hipStreamDestroy": (c_int, c_void_p),
        "hipStreamQuery": (c_int, c_void_p),
        "hipStreamSynchronize": (c_int, c_void_p),
        "hipStreamWaitEvent": (c_int, c_void_p, c_void_p, c_uint),
        "hipEventCreate": (c_int, _OUT_HANDLE),
        "hipEventCreateWithFlags": (c_int, _OUT_HANDLE, c_uint),
        "hipEventDestroy": (c_int, c_void_p),
        "hipEventRecord": (c_int, c_void_p, c_void_p),
        "hipEventQuery": (c_int, c_void_p),
        "hipEventSynchronize": (c_int, c_void_p),
        "hipEventElapsedTime": (c_int, POINTER(c_float), c_void_p, c_void_p),
        "hipMalloc": (c_int, _OUT_HANDLE, c_size_t),
        "hipFree": (c_int, c_void_p),
        "hipMemGetInfo": (c_int, _OUT_SIZE, _OUT_SIZE),
        "hipHostMalloc": (c_int, _OUT_HANDLE, c_size_t, c_uint),
        "hipHostFree": (c_int, c_void_p),
        "hipHostRegister": (c_int, c_void_p, c_size_t, c_uint),
        "hipHostUnregister": (c_int, c_void_p),
        "hipMemset": (c_int, c_void_p, c_int, c_size_t),
        "hipMemsetAsync": (c_int, c_void_p, c_int, c_size_t, c_void_p),
        "hipMemcpy": (c_int, c_void_p, c_void_p, c_size_t, c_uint),
        "hipMemcpyAsync": (c_int, c_void_p, c_void_p, c_size_t, c_uint, c_void_p),
        "hipMemcpyBatchAsync": (
            c_int,
            c_void_p,  # dsts
            c_void_p,  # srcs
            c_void_p,  # sizes
            c_size_t,  # count
            c_void_p,  # attrs
            c_void_p,  # attrsIdxs
            c_size_t,  # numAttrs
            c_void_p,  # failIdx
            c_void_p,  # stream
        ),
        "hipsim_environment_error": (c_char_p,),
        "hipsim_profile_name": (c_char_p, c_size_t),
        "hipsim_profile": (c_char_p,),
        "hipsim_reset": (c_int, c_char_p),
        "hipsim_call_name": (c_char_p, c_size_t),
        "hipsim_fail": (c_int, c_char_p, ctypes.c_uint64, c_int),
        "hipsim_set_switch": (c_int, c_char_p, ctypes.c_int64),
        "hipsim_stats": (c_size_t, POINTER(_Stat), c_size_t),
        "hipsim_abandon": (None,),
    }
)

_lock = threading.Lock()
_library: ctypes.CDLL | None = None


def library_path() -> Path:
    """The built library.

    Raises:
        FileNotFoundError: It is not built.
    """
    package = Path(__file__).resolve().parent.parent
    path = package / "_native" / "hipsim" / "libamdhip64.so.7"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not built: run `make setup`")
    return path


def load() -> ctypes.CDLL:
    """The process's one instance, with the types of every function set.

    It is loaded for all to see, so that who asks the dynamic loader for
    `libamdhip64.so.7` afterwards gets the same instance. The environment variables
    HIPSIM_PROFILE and HIPSIM_VRAM_BYTES count at the first call.

    Raises:
        FileNotFoundError: The library is not built.
        ValueError: One of the variables has a value that is not allowed.
    """
    global _library
    with _lock:
        if _library is None:
            lib = ctypes.CDLL(os.fspath(library_path()), mode=ctypes.RTLD_GLOBAL)
            for name, (result, *arguments) in PROTOTYPES.items():
                function = getattr(lib, name)
                function.restype = result
                function.argtypes = arguments
            if error := lib.hipsim_environment_error():
                raise ValueError(error.decode())
            # Host memory goes while streams may still be copying it.
            atexit.register(lib.hipsim_abandon)
            _library = lib
        return _library


def _names(name_at: Callable[[int], bytes | None]) -> tuple[str, ...]:
    names: list[str] = []
    while (name := name_at(len(names))) is not None:
        names.append(name.decode())
    return tuple(names)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> tuple[str, ...]:
        # Asked of the library, and therefore not before somebody wants to know.
        if name == "PROFILES":
            return _names(load().hipsim_profile_name)
        if name == "CALLS":
            return _names(load().hipsim_call_name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def check(error: int, call: str) -> None:
    """Raises HipError when `error`, which `call` returned, is not hipSuccess."""
    if error != SUCCESS:
        raise HipError(call, error)


def profile() -> str:
    """The name of the simulated release."""
    name: bytes = load().hipsim_profile()
    return name.decode()


def reset(profile: str | None = None) -> None:
    """Sets the profile and takes everything a test may have set back to the start.

    Waits for the work in flight. Faults, switches, counters and a GPU memory fault
    go; allocations, streams and events stay.

    Args:
        profile: One of PROFILES; None keeps the present one.

    Raises:
        ValueError: There is no such profile.
    """
    if load().hipsim_reset(None if profile is None else profile.encode()) != 0:
        allowed = _names(load().hipsim_profile_name)
        raise ValueError(f"no profile {profile!r}; there are {', '.join(allowed)}")


def fail(call: str, nth: int, error: int) -> None:
    """Makes the nth call of a HIP function from now on (1: the next) return `error`.

    The failing call does nothing else.

    Raises:
        ValueError: There is no such function, `nth` is below 1 or `error` is 0.
    """
    if nth < 1 or error == SUCCESS:
        raise ValueError(f"nth ({nth}) counts from 1 and error ({error}) is not 0")
    if load().hipsim_fail(call.encode(), nth, error) != 0:
        allowed = _names(load().hipsim_call_name)
        raise ValueError(f"no call {call!r}; there are {', '.join(allowed)}")


def configure(
    *, corrupt_loads: bool | None = None, copy_latency_us: int | None = None
) -> None:
    """Sets switches for the copies that are queued from now on; None leaves one alone.

    Args:
        corrupt_loads: Copies from host to device write every byte inverted.
        copy_latency_us: Microseconds that each copy, batch or fill waits in its
            stream before it moves a byte.

    Raises:
        ValueError: A negative latency.
    """
    lib = load()
    if corrupt_loads is not None:
        lib.hipsim_set_switch(b"corrupt_loads", corrupt_loads)
    if copy_latency_us is not None and lib.hipsim_set_switch(
        b"copy_latency_us", copy_latency_us
    ):
        raise ValueError(
            f"copy_latency_us is {copy_latency_us}; it must not be negative"
        )


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
        registered_ranges: Of hipHostRegister, with `registered_bytes`.
        host_allocations: Of hipHostMalloc, with `host_allocation_bytes`.
        batch_calls: Batches that were accepted, with `batch_copies` in all.
        staged_copies: Made from or to pageable host memory, with `staged_bytes`.
        memory_faults: Each would have ended the process on a GPU.
        calls: How often each function of CALLS was called.
        copies: By engine ("sdma", "blit", or "host" for the CPU between two pageable
            addresses) and direction ("h2d", "d2h", "d2d", "h2h"). A copy counts once
            it is made.
    """

    streams: int
    events: int
    device_allocations: int
    device_bytes: int
    registered_ranges: int
    registered_bytes: int
    host_allocations: int
    host_allocation_bytes: int
    batch_calls: int
    batch_copies: int
    staged_copies: int
    staged_bytes: int
    memory_faults: int
    calls: Mapping[str, int]
    copies: Mapping[tuple[str, str], CopyCount]


def stats() -> Stats:
    """The accounts of this moment."""
    lib = load()
    entries = (_Stat * lib.hipsim_stats(None, 0))()
    lib.hipsim_stats(entries, len(entries))
    plain: dict[str, int] = {}
    grouped: dict[str, dict[str, int]] = {"copies": {}, "bytes": {}, "calls": {}}
    for entry in entries:
        group, dot, rest = entry.name.decode().partition(".")
        (grouped[group] if dot else plain)[rest or group] = entry.value
    copies = {}
    for key, count in grouped["copies"].items():
        engine, direction = key.split(".")
        copies[engine, direction] = CopyCount(count, grouped["bytes"][key])
    return Stats(
        **plain,
        calls=MappingProxyType(grouped["calls"]),
        copies=MappingProxyType(copies),
    )


def assert_clean() -> None:
    """Raises AssertionError that names what is still live."""
    now = stats()
    live = {
        "streams": now.streams,
        "events": now.events,
        f"device allocations ({now.device_bytes} bytes)": now.device_allocations,
        f"registered host ranges ({now.registered_bytes} bytes)": now.registered_ranges,
        f"host allocations ({now.host_allocation_bytes} bytes)": now.host_allocations,
    }
    left = [f"{count} {name}" for name, count in live.items() if count]
    if left:
        raise AssertionError(f"still live: {', '.join(left)}")
