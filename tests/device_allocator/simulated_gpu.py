# SPDX-License-Identifier: Apache-2.0
"""What the tests of the allocator put around it: a simulated GPU and PyTorch's part.

CUMEM_TEST_VENDOR chooses the simulator for the process, since a process has one driver.
"""

import ctypes
import logging
import os
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from vllm_rocm_memory.sim import cudasim, hipsim

VENDOR = os.environ.get("CUMEM_TEST_VENDOR", "hip")
IS_HIP = VENDOR == "hip"
simulator: ModuleType = hipsim if IS_HIP else cudasim
PROFILES = ("7.1", "7.2.3", "7.13", "7.16") if IS_HIP else ("cuda-13.0",)

GRANULARITY = 4096 if IS_HIP else 2 << 20
CHUNK = 1 << 20 if IS_HIP else 2 << 20
"""Bytes, the smallest that VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE can ask for; CUDA has none,
and there it is a size."""
PIECE = CHUNK
"""Bytes of host memory that are touched and locked at a time."""

STRICT: dict[str, Any] = {"stale_memory": "poisoned", "one_mapping_copies": IS_HIP}
"""Switches: new memory has other data's bytes, and on HIP no copy may go past the end
of a mapping, which CUDA's driver allows."""


injected: Counter[str] = Counter()
"""How many driver calls were made to fail one by one, by release."""


def number_of(call: str) -> int:
    """How often a driver function was called."""
    calls: int = simulator.stats().calls[call]
    return calls


def name_of(hip: str, cuda: str) -> str:
    """The function of this process's driver."""
    return hip if IS_HIP else cuda


@cache
def _context() -> ctypes.c_void_p:
    lib, context = cudasim.load(), ctypes.c_void_p()
    cudasim.check(lib.cuInit(0), "cuInit")
    cudasim.check(
        lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
        "cuDevicePrimaryCtxRetain",
    )
    return context


def use_device() -> None:
    """Makes device 0 the calling thread's."""
    if not IS_HIP:
        cudasim.check(cudasim.load().cuCtxSetCurrent(_context()), "cuCtxSetCurrent")


def synchronize(device: int | None = None) -> None:
    """`torch.accelerator.synchronize`, which raises what it is told."""
    lib = simulator.load()
    if IS_HIP:
        hipsim.check(lib.hipDeviceSynchronize(), "hipDeviceSynchronize")
    else:
        use_device()
        cudasim.check(lib.cuCtxSynchronize(), "cuCtxSynchronize")


def memory_info(device: int | None = None) -> tuple[int, int]:
    """`torch.accelerator.get_memory_info`: bytes that are free, and all."""
    lib, free, total = simulator.load(), ctypes.c_size_t(), ctypes.c_size_t()
    out = ctypes.byref(free), ctypes.byref(total)
    if IS_HIP:
        hipsim.check(lib.hipMemGetInfo(*out), "hipMemGetInfo")
    else:
        use_device()
        cudasim.check(lib.cuMemGetInfo_v2(*out), "cuMemGetInfo_v2")
    return free.value, total.value


def free_bytes() -> int:
    """Of the device's memory."""
    return memory_info()[0]


@contextmanager
def memory_of_the_driver(size: int) -> Iterator[None]:
    """Device memory that neither the allocator nor PyTorch has."""
    lib = simulator.load()
    ptr = ctypes.c_void_p() if IS_HIP else ctypes.c_uint64()
    if IS_HIP:
        hipsim.check(lib.hipMalloc(ctypes.byref(ptr), size), "hipMalloc")
    else:
        cudasim.check(lib.cuMemAlloc_v2(ctypes.byref(ptr), size), "cuMemAlloc_v2")
    try:
        yield
    finally:
        (lib.hipFree if IS_HIP else lib.cuMemFree_v2)(ptr)


def _copy(to: int, source: int, size: int, kind: int) -> None:
    lib = simulator.load()
    if IS_HIP:
        hipsim.check(lib.hipMemcpy(to, source, size, kind), "hipMemcpy")
    else:
        use_device()
        call = "cuMemcpyHtoD_v2" if kind == hipsim.HOST_TO_DEVICE else "cuMemcpyDtoH_v2"
        cudasim.check(getattr(lib, call)(to, source, size), call)


class OutOfMemory(RuntimeError):
    """What PyTorch raises when an allocator returns no memory."""


class Torch:
    """PyTorch's caching allocator as far as a pluggable allocator sees it.

    The mutex is PyTorch's: held while the allocator's functions run, while the cache is
    emptied and while segments are listed, by any thread, and recursive.

    Attributes:
        segments: Bytes of those that were not given back, by address.
    """

    def __init__(self, module: ModuleType, trampoline: Path) -> None:
        self.module = module
        self.mutex = threading.RLock()
        self.emptied = 0
        self.segments: dict[int, int] = {}
        self.synchronized: list[int | None] = []
        allocator = ctypes.CDLL(module.__file__)
        self._malloc = allocator.my_malloc
        self._free = allocator.my_free
        self._free.argtypes = (
            ctypes.c_void_p,
            ctypes.c_ssize_t,
            ctypes.c_int,
            ctypes.c_void_p,
        )
        self._free.restype = None
        self._call_malloc = ctypes.CDLL(os.fspath(trampoline)).call_malloc
        self._call_malloc.argtypes = (
            ctypes.c_void_p,
            ctypes.c_ssize_t,
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_size_t,
        )
        self._call_malloc.restype = ctypes.c_void_p

    def malloc(self, size: int, device: int = 0) -> int:
        """The address of a new segment.

        Raises:
            OutOfMemory: The allocator returned none.
            RuntimeError: It threw.
        """
        error = ctypes.create_string_buffer(4096)
        function = ctypes.cast(self._malloc, ctypes.c_void_p)
        with self.mutex:
            ptr = self._call_malloc(function, size, device, error, len(error))
        if error.value:
            raise RuntimeError(error.value.decode())
        if not ptr:
            raise OutOfMemory(f"no memory for {size} bytes")
        address: int = ptr
        self.segments[address] = size
        return address

    def free(self, ptr: int, size: int, device: int = 0) -> None:
        """Gives a segment back."""
        with self.mutex:
            self.segments.pop(ptr, None)
            self._free(ptr, size, device, None)

    def empty_cache(self) -> None:
        """`torch.accelerator.empty_cache`."""
        with self.mutex:
            self.emptied += 1

    def memory_snapshot(
        self, mempool_id: object = None, include_traces: bool = True
    ) -> list[dict[str, Any]]:
        """`torch.cuda.memory_snapshot`, of one pool in which all is in use."""
        with self.mutex:
            return [
                {
                    "device": 0,
                    "address": ptr,
                    "total_size": size,
                    "active_size": size,
                    "segment_pool_id": (0, 1),
                }
                for ptr, size in self.segments.items()
            ]

    def synchronize(self, device: int | None = None) -> None:
        """`torch.accelerator.synchronize`."""
        self.synchronized.append(device)
        synchronize(device)


def build_trampoline(folder: Path) -> Path:
    """Compiles `allocator_calls.cpp`."""
    source = Path(__file__).with_name("allocator_calls.cpp")
    library = folder / "liballocator_calls.so"
    compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
    command = [compiler, "-std=c++17", "-shared", "-fPIC", source, "-o", library]
    subprocess.run(command, check=True, timeout=120)
    return library


class Gpu:
    """Puts bytes into ranges of the module and takes them out, chunk by chunk."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def _chunks(self, ptr: int) -> Iterator[tuple[int, int]]:
        offset = 0
        for size in self.module.chunks(ptr):
            yield offset, size
            offset += size

    def write(self, ptr: int, data: np.ndarray) -> None:
        for offset, size in self._chunks(ptr):
            part = data.ctypes.data + offset
            _copy(ptr + offset, part, size, hipsim.HOST_TO_DEVICE)

    def read(self, ptr: int) -> np.ndarray:
        data = np.empty(sum(self.module.chunks(ptr)), np.uint8)
        for offset, size in self._chunks(ptr):
            part = data.ctypes.data + offset
            _copy(part, ptr + offset, size, hipsim.DEVICE_TO_HOST)
        return data


_PATTERN = np.random.default_rng(7).integers(1, 255, 24 << 20, np.uint8)


def pattern(number: int, size: int) -> np.ndarray:
    """Bytes that differ from those of another number, none of them 0 or 0xFF."""
    start = number * 1031 % (_PATTERN.size - size)
    return _PATTERN[start : start + size]


@contextmanager
def logged(
    logger: str = "vllm.device_allocator.cumem", level: int = logging.WARNING
) -> Iterator[list[str]]:
    """What a module logs from a level on, with the texts of exceptions."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            error = record.exc_info[1] if record.exc_info else None
            lines.append(f"{record.getMessage()} {error or ''}")

    source, handler = logging.getLogger(logger), Handler(level)
    before = source.level
    source.addHandler(handler)
    source.setLevel(level)
    try:
        yield lines
    finally:
        source.setLevel(before)
        source.removeHandler(handler)


def new_calls(before: Any, after: Any) -> Counter[str]:
    """Driver functions that were called between two moments of `stats`."""
    return Counter(after.calls) - Counter(before.calls)


def addresses(data: Sequence[Any]) -> list[int]:
    return [entry.handle[2] for entry in data]
