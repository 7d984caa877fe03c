# SPDX-License-Identifier: Apache-2.0
"""The HIP runtime simulator of this process.

The simulator is a shared library with HIP's own name and functions. This module
loads it, tells ctypes about its functions and gives a test the controls beside them:
profiles, faults, switches and statistics (`simulator` says what each one means).
"""

import ctypes
from collections.abc import Mapping
from ctypes import (
    POINTER,
    c_char_p,
    c_float,
    c_int,
    c_size_t,
    c_uint,
    c_ulonglong,
    c_void_p,
)
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm_rocm_memory.sim.simulator import Simulator

PROFILES: tuple[str, ...]
"""The HIP releases that can be simulated, oldest first."""

CALLS: tuple[str, ...]
"""The HIP functions that `fail` can make fail."""

# Numbers of hipError_t, hipMemcpyKind, hipMemcpyFlags and the enums of virtual memory.
SUCCESS = 0
NOT_READY = 600
HOST_TO_DEVICE = 1
DEVICE_TO_HOST = 2
DEVICE_TO_DEVICE = 3
DEFAULT_KIND = 4
FLAG_PREFER_COPY_ENGINE = 0x100
STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2
LOCATION_DEVICE = 1
LOCATION_HOST = 2
ALLOCATION_PINNED = 1
ACCESS_READ_WRITE = 3


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


class MemAllocationProp(ctypes.Structure):
    """hipMemAllocationProp."""

    _fields_ = (
        ("type", c_uint),
        ("requestedHandleTypes", c_uint),
        ("location", MemLocation),
        ("win32HandleMetaData", c_void_p),
        ("allocFlags", c_uint),
    )


class MemAccessDesc(ctypes.Structure):
    """hipMemAccessDesc."""

    _fields_ = (("location", MemLocation), ("flags", c_uint))


class IpcMemHandle(ctypes.Structure):
    """hipIpcMemHandle_t."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


_OUT_INT = POINTER(c_int)
_OUT_SIZE = POINTER(c_size_t)
_OUT_HANDLE = POINTER(c_void_p)

# Of a 2-D copy: destination and pitch, source and pitch, width, height, kind.
_PLANE = (c_void_p, c_size_t, c_void_p, c_size_t, c_size_t, c_size_t, c_uint)

# Every function of HIP that the library exports: its result and its arguments. Arrays
# and structs are plain addresses, so that numpy's and ctypes' can both be passed.
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
        "hipDeviceGetPCIBusId": (c_int, c_char_p, c_int, c_int),
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
        "hipDeviceGetAttribute": (c_int, _OUT_INT, c_uint, c_int),
        "hipMemGetAddressRange": (c_int, _OUT_HANDLE, _OUT_SIZE, c_void_p),
        "hipHostGetDevicePointer": (c_int, _OUT_HANDLE, c_void_p, c_uint),
        "hipMemGetAllocationGranularity": (c_int, _OUT_SIZE, c_void_p, c_uint),
        "hipMemAddressReserve": (
            c_int,
            _OUT_HANDLE,
            c_size_t,  # size
            c_size_t,  # alignment
            c_void_p,  # hint
            c_ulonglong,  # flags
        ),
        "hipMemAddressFree": (c_int, c_void_p, c_size_t),
        "hipMemCreate": (c_int, _OUT_HANDLE, c_size_t, c_void_p, c_ulonglong),
        "hipMemRelease": (c_int, c_void_p),
        "hipMemMap": (c_int, c_void_p, c_size_t, c_size_t, c_void_p, c_ulonglong),
        "hipMemUnmap": (c_int, c_void_p, c_size_t),
        "hipMemSetAccess": (c_int, c_void_p, c_size_t, c_void_p, c_size_t),
        "hipMemGetAccess": (c_int, POINTER(c_ulonglong), c_void_p, c_void_p),
        "hipMemRetainAllocationHandle": (c_int, _OUT_HANDLE, c_void_p),
        "hipMemGetAllocationPropertiesFromHandle": (c_int, c_void_p, c_void_p),
        "hipMemcpy2D": (c_int, *_PLANE),
        "hipMemcpy2DAsync": (c_int, *_PLANE, c_void_p),
        "hipMemcpy3D": (c_int, c_void_p),
        "hipMemcpy3DAsync": (c_int, c_void_p, c_void_p),
        "hipStreamBeginCapture": (c_int, c_void_p, c_uint),
        "hipStreamEndCapture": (c_int, c_void_p, _OUT_HANDLE),
        "hipStreamIsCapturing": (c_int, c_void_p, POINTER(c_uint)),
        "hipStreamGetCaptureInfo": (
            c_int,
            c_void_p,
            POINTER(c_uint),
            POINTER(c_ulonglong),
        ),
        "hipThreadExchangeStreamCaptureMode": (c_int, POINTER(c_uint)),
        "hipGraphGetNodes": (c_int, c_void_p, c_void_p, _OUT_SIZE),
        "hipGraphDestroy": (c_int, c_void_p),
        "hipGraphInstantiate": (
            c_int,
            _OUT_HANDLE,
            c_void_p,  # graph
            _OUT_HANDLE,  # error node
            c_char_p,  # log
            c_size_t,  # its bytes
        ),
        "hipGraphInstantiateWithFlags": (c_int, _OUT_HANDLE, c_void_p, c_ulonglong),
        "hipGraphLaunch": (c_int, c_void_p, c_void_p),
        "hipGraphExecDestroy": (c_int, c_void_p),
        "hipIpcGetMemHandle": (c_int, POINTER(IpcMemHandle), c_void_p),
        "hipIpcOpenMemHandle": (c_int, _OUT_HANDLE, IpcMemHandle, c_uint),
        "hipIpcCloseMemHandle": (c_int, c_void_p),
    }
)

_simulator = Simulator("hipsim/libamdhip64.so.7", PROTOTYPES)

library_path = _simulator.library_path
load = _simulator.load
profile = _simulator.profile
reset = _simulator.reset
fail = _simulator.fail
configure = _simulator.configure
stats = _simulator.stats
assert_clean = _simulator.assert_clean


if not TYPE_CHECKING:

    def __getattr__(name: str) -> tuple[str, ...]:
        # Asked of the library, and therefore not before somebody wants to know.
        if name == "PROFILES":
            return _simulator.profiles()
        if name == "CALLS":
            return _simulator.calls()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def check(error: int, call: str) -> None:
    """Raises HipError when `error`, which `call` returned, is not hipSuccess."""
    if error != SUCCESS:
        raise HipError(call, error)
