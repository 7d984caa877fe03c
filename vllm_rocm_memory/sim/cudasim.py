# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver simulator of this process.

The same as `hipsim` for `libcuda.so.1`: the library is loaded, ctypes is told about its
functions, and a test has the controls beside them (`simulator` says what each one
means). Functions go by the names of their symbols, as with `dlsym`.
"""

import ctypes
from collections.abc import Mapping
from ctypes import (
    POINTER,
    c_char_p,
    c_float,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_ulonglong,
    c_ushort,
    c_void_p,
)
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm_rocm_memory.sim.simulator import Simulator

PROFILES: tuple[str, ...]
"""The driver releases that can be simulated, oldest first."""

CALLS: tuple[str, ...]
"""The driver's functions that `fail` can make fail."""

# Numbers of CUresult and of the driver's enums.
SUCCESS = 0
NOT_READY = 600
STREAM_NON_BLOCKING = 1
MEMORY_HOST = 1
MEMORY_DEVICE = 2
MEMORY_UNIFIED = 4
LOCATION_DEVICE = 1
ALLOCATION_PINNED = 1
ACCESS_READ_WRITE = 3
CAPTURE_RELAXED = 2
SOURCE_ACCESS_STREAM = 1


class CudaError(RuntimeError):
    """A driver call returned an error; `name` and `number` are CUresult's."""

    def __init__(self, call: str, number: int) -> None:
        self.call = call
        self.number = number
        self.name = _describe("cuGetErrorName", number)
        text = _describe("cuGetErrorString", number)
        super().__init__(f"{call} failed: {self.name} ({number}): {text}")


class MemLocation(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_uint), ("id", c_int))


class MemAllocationFlags(ctypes.Structure):
    """The struct without a name in CUmemAllocationProp."""

    _fields_ = (
        ("compressionType", c_ubyte),
        ("gpuDirectRDMACapable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class MemAllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_uint),
        ("requestedHandleTypes", c_uint),
        ("location", MemLocation),
        ("win32HandleMetaData", c_void_p),
        ("allocFlags", MemAllocationFlags),
    )


class MemAccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", MemLocation), ("flags", c_uint))


class MemcpyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("srcAccessOrder", c_uint),
        ("srcLocHint", MemLocation),
        ("dstLocHint", MemLocation),
        ("flags", c_uint),
    )


class Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("srcXInBytes", c_size_t),
        ("srcY", c_size_t),
        ("srcMemoryType", c_uint),
        ("srcHost", c_void_p),
        ("srcDevice", c_ulonglong),
        ("srcArray", c_void_p),
        ("srcPitch", c_size_t),
        ("dstXInBytes", c_size_t),
        ("dstY", c_size_t),
        ("dstMemoryType", c_uint),
        ("dstHost", c_void_p),
        ("dstDevice", c_ulonglong),
        ("dstArray", c_void_p),
        ("dstPitch", c_size_t),
        ("WidthInBytes", c_size_t),
        ("Height", c_size_t),
    )


class IpcMemHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


_OUT_INT = POINTER(c_int)
_OUT_SIZE = POINTER(c_size_t)
_OUT_HANDLE = POINTER(c_void_p)
_OUT_ADDRESS = POINTER(c_ulonglong)
_OUT_TEXT = POINTER(c_char_p)
_ADDRESS = c_ulonglong

# Of a batch: destinations, sources, sizes, count, attributes, the first copy that each
# is for, and their number.
_BATCH = (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t)

# Every function that the library exports: its result and its arguments. Arrays and
# structs are plain addresses, so that numpy's and ctypes' can both be passed.
PROTOTYPES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "cuInit": (c_int, c_uint),
        "cuDriverGetVersion": (c_int, _OUT_INT),
        "cuGetProcAddress_v2": (
            c_int,
            c_char_p,  # name
            _OUT_HANDLE,  # function
            c_int,  # version
            ctypes.c_uint64,  # flags
            POINTER(c_uint),  # what was found
        ),
        "cuGetErrorName": (c_int, c_int, _OUT_TEXT),
        "cuGetErrorString": (c_int, c_int, _OUT_TEXT),
        "cuDeviceGet": (c_int, _OUT_INT, c_int),
        "cuDeviceGetCount": (c_int, _OUT_INT),
        "cuDeviceGetAttribute": (c_int, _OUT_INT, c_uint, c_int),
        "cuDeviceGetPCIBusId": (c_int, c_char_p, c_int, c_int),
        "cuDevicePrimaryCtxRetain": (c_int, _OUT_HANDLE, c_int),
        "cuDevicePrimaryCtxRelease_v2": (c_int, c_int),
        "cuCtxGetCurrent": (c_int, _OUT_HANDLE),
        "cuCtxSetCurrent": (c_int, c_void_p),
        "cuCtxGetDevice": (c_int, _OUT_INT),
        "cuCtxSynchronize": (c_int,),
        "cuCtxGetStreamPriorityRange": (c_int, _OUT_INT, _OUT_INT),
        "cuStreamCreate": (c_int, _OUT_HANDLE, c_uint),
        "cuStreamCreateWithPriority": (c_int, _OUT_HANDLE, c_uint, c_int),
        "cuStreamDestroy_v2": (c_int, c_void_p),
        "cuStreamQuery": (c_int, c_void_p),
        "cuStreamSynchronize": (c_int, c_void_p),
        "cuStreamWaitEvent": (c_int, c_void_p, c_void_p, c_uint),
        "cuEventCreate": (c_int, _OUT_HANDLE, c_uint),
        "cuEventDestroy_v2": (c_int, c_void_p),
        "cuEventRecord": (c_int, c_void_p, c_void_p),
        "cuEventQuery": (c_int, c_void_p),
        "cuEventSynchronize": (c_int, c_void_p),
        "cuEventElapsedTime": (c_int, POINTER(c_float), c_void_p, c_void_p),
        "cuMemGetInfo_v2": (c_int, _OUT_SIZE, _OUT_SIZE),
        "cuMemAlloc_v2": (c_int, _OUT_ADDRESS, c_size_t),
        "cuMemFree_v2": (c_int, _ADDRESS),
        "cuMemGetAddressRange_v2": (c_int, _OUT_ADDRESS, _OUT_SIZE, _ADDRESS),
        "cuMemHostAlloc": (c_int, _OUT_HANDLE, c_size_t, c_uint),
        "cuMemFreeHost": (c_int, c_void_p),
        "cuMemHostRegister_v2": (c_int, c_void_p, c_size_t, c_uint),
        "cuMemHostUnregister": (c_int, c_void_p),
        "cuMemHostGetDevicePointer_v2": (c_int, _OUT_ADDRESS, c_void_p, c_uint),
        "cuMemGetAllocationGranularity": (c_int, _OUT_SIZE, c_void_p, c_uint),
        "cuMemAddressReserve": (
            c_int,
            _OUT_ADDRESS,
            c_size_t,  # size
            c_size_t,  # alignment
            _ADDRESS,  # hint
            c_ulonglong,  # flags
        ),
        "cuMemAddressFree": (c_int, _ADDRESS, c_size_t),
        "cuMemCreate": (c_int, _OUT_ADDRESS, c_size_t, c_void_p, c_ulonglong),
        "cuMemRelease": (c_int, c_ulonglong),
        "cuMemMap": (c_int, _ADDRESS, c_size_t, c_size_t, c_ulonglong, c_ulonglong),
        "cuMemUnmap": (c_int, _ADDRESS, c_size_t),
        "cuMemSetAccess": (c_int, _ADDRESS, c_size_t, c_void_p, c_size_t),
        "cuMemGetAccess": (c_int, _OUT_ADDRESS, c_void_p, _ADDRESS),
        "cuMemRetainAllocationHandle": (c_int, _OUT_ADDRESS, c_void_p),
        "cuMemGetAllocationPropertiesFromHandle": (c_int, c_void_p, c_ulonglong),
        "cuMemsetD8_v2": (c_int, _ADDRESS, c_ubyte, c_size_t),
        "cuMemsetD8Async": (c_int, _ADDRESS, c_ubyte, c_size_t, c_void_p),
        "cuMemcpy": (c_int, _ADDRESS, _ADDRESS, c_size_t),
        "cuMemcpyAsync": (c_int, _ADDRESS, _ADDRESS, c_size_t, c_void_p),
        "cuMemcpyHtoD_v2": (c_int, _ADDRESS, c_void_p, c_size_t),
        "cuMemcpyDtoH_v2": (c_int, c_void_p, _ADDRESS, c_size_t),
        "cuMemcpyHtoDAsync_v2": (c_int, _ADDRESS, c_void_p, c_size_t, c_void_p),
        "cuMemcpyDtoHAsync_v2": (c_int, c_void_p, _ADDRESS, c_size_t, c_void_p),
        "cuMemcpyDtoDAsync_v2": (c_int, _ADDRESS, _ADDRESS, c_size_t, c_void_p),
        "cuMemcpy2D_v2": (c_int, c_void_p),
        "cuMemcpy2DAsync_v2": (c_int, c_void_p, c_void_p),
        "cuMemcpy3DAsync_v2": (c_int, c_void_p, c_void_p),
        "cuMemcpyBatchAsync": (c_int, *_BATCH, c_void_p, c_void_p),
        "cuMemcpyBatchAsync_v2": (c_int, *_BATCH, c_void_p),
        "cuStreamBeginCapture_v2": (c_int, c_void_p, c_uint),
        "cuStreamEndCapture": (c_int, c_void_p, _OUT_HANDLE),
        "cuStreamIsCapturing": (c_int, c_void_p, POINTER(c_uint)),
        "cuThreadExchangeStreamCaptureMode": (c_int, POINTER(c_uint)),
        "cuGraphGetNodes": (c_int, c_void_p, c_void_p, _OUT_SIZE),
        "cuGraphDestroy": (c_int, c_void_p),
        "cuGraphInstantiateWithFlags": (c_int, _OUT_HANDLE, c_void_p, c_ulonglong),
        "cuGraphLaunch": (c_int, c_void_p, c_void_p),
        "cuGraphExecDestroy": (c_int, c_void_p),
        "cuIpcGetMemHandle": (c_int, POINTER(IpcMemHandle), _ADDRESS),
        "cuIpcOpenMemHandle_v2": (c_int, _OUT_ADDRESS, IpcMemHandle, c_uint),
        "cuIpcCloseMemHandle": (c_int, _ADDRESS),
    }
)

# For nobody else to see: a CUDA build of torch in the process has a driver of its own.
_simulator = Simulator("hipsim-cuda/libcuda.so.1", PROTOTYPES, mode=ctypes.RTLD_LOCAL)

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


def _describe(function: str, number: int) -> str:
    text = c_char_p()
    getattr(load(), function)(number, ctypes.byref(text))
    return text.value.decode() if text.value else "unknown"


def check(error: int, call: str) -> None:
    """Raises CudaError when `error`, which `call` returned, is not CUDA_SUCCESS."""
    if error != SUCCESS:
        raise CudaError(call, error)
