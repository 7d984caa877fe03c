# SPDX-License-Identifier: Apache-2.0
"""The compiled module on the simulator of HIP, with PyTorch's part around it."""

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from vllm_rocm_memory.sim import hipsim

from ..simulated_gpu import Gpu, Torch, pattern
from .module import load_module

OUT_OF_MEMORY = 2
UNKNOWN = 999
PAGE = 4096
MIB = 1 << 20
CHUNK = 2 * MIB
BYTES = 2 * CHUNK + PAGE  # three chunks
VARIABLE = "VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE"


class Cumem:
    """The module with PyTorch's part around it."""

    def __init__(self, module: ModuleType, torch_side: Torch) -> None:
        self.module = module
        self.torch = torch_side
        self.gpu = Gpu(module)
        self.handles: dict[int, Any] = {}
        self.answer: Callable[[int], Any] = lambda ptr: "free it"
        module.init_module(self.announce, self.free_callback)

    def announce(self, handle: Any) -> None:
        self.handles[handle[2]] = handle

    def free_callback(self, ptr: int) -> Any:
        return self.answer(ptr)

    def malloc(self, size: int = BYTES, device: int = 0) -> int:
        return self.torch.malloc(size, device)

    def filled(self, number: int, size: int = BYTES, device: int = 0) -> int:
        ptr = self.malloc(size, device)
        self.gpu.write(ptr, pattern(number, size))
        return ptr

    def holds(self, ptr: int, number: int, size: int = BYTES) -> bool:
        return np.array_equal(self.gpu.read(ptr), pattern(number, size))

    def map(self, ptr: int) -> None:
        self.module.python_create_and_map(*self.handles[ptr])

    def slots(self, ptr: int) -> list[int]:
        addresses = [address for address, _ in self.handles[ptr][3]]
        return [ctypes.c_uint64.from_address(each).value for each in addresses]


@contextmanager
def on_the_simulator(trampoline: Path) -> Iterator[Cumem]:
    """Nothing is left at the end of what the module has made.

    Args:
        trampoline: What `build_trampoline` has built.
    """
    hipsim.load()
    hipsim.reset(hipsim.PROFILES[-1])
    hipsim.configure(stale_memory="poisoned", one_mapping_copies=True)
    hipsim.load().hipSetDevice(0)
    module = load_module()
    yield Cumem(module, Torch(module, trampoline))
    hipsim.reset()
    for ptr in module.ranges():
        module.free(ptr)
    assert module.release_pending() == 0
    hipsim.load().hipSetDevice(0)
    hipsim.assert_clean()


def address_of(data: np.ndarray) -> int:
    """Where its bytes are."""
    return int(data.ctypes.data)


def residency(address: int, size: int) -> list[bool] | None:
    """Which pages have memory, or zeroes; None when the addresses are nobody's."""
    pages = ctypes.create_string_buffer(size // PAGE)
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    if mincore(address, size, pages) != 0:
        return None
    return [byte & 1 == 1 for byte in pages.raw[: size // PAGE]]


def memory_of(address: int, kind: str = "Anonymous") -> int:
    """Bytes of the mapping around an address; what was only read has none.

    Args:
        address: Of the mapping's memory.
        kind: Anonymous or AnonHugePages, which is a part of it.
    """
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{address:#x} is not mapped")
