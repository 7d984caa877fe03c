# SPDX-License-Identifier: Apache-2.0
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from vllm_rocm_memory.sim import hipsim


@dataclass
class Gpu:
    """Makes things on the simulated GPU; what is left of them goes with the test."""

    lib: ctypes.CDLL
    left: list[tuple[Callable[[Any], int], int]] = field(default_factory=list)
    arrays: list[np.ndarray] = field(default_factory=list)

    def call(self, name: str, *arguments: Any) -> None:
        hipsim.check(getattr(self.lib, name)(*arguments), name)

    def _make(self, name: str, drop: str, *arguments: Any) -> int:
        handle = ctypes.c_void_p()
        self.call(name, ctypes.byref(handle), *arguments)
        made = handle.value or 0
        self.left.append((getattr(self.lib, drop), made))
        return made

    def malloc(self, size: int) -> int:
        return self._make("hipMalloc", "hipFree", size)

    def stream(self, flags: int = hipsim.STREAM_NON_BLOCKING) -> int:
        return self._make("hipStreamCreateWithFlags", "hipStreamDestroy", flags)

    def event(self, flags: int = 0) -> int:
        return self._make("hipEventCreateWithFlags", "hipEventDestroy", flags)

    def pageable(self, size: int, seed: int | None = None) -> np.ndarray:
        random = np.random.default_rng(seed)
        array = (
            np.zeros(size, np.uint8)
            if seed is None
            else random.integers(0, 256, size, np.uint8)
        )
        self.arrays.append(array)
        return array

    def pinned(self, size: int, seed: int | None = None) -> np.ndarray:
        """A registered array: random bytes, or zeroes without a seed."""
        array = self.pageable(size, seed)
        self.call("hipHostRegister", array.ctypes.data, size, 0)
        self.left.append((self.lib.hipHostUnregister, array.ctypes.data))
        return array

    def load(self, pointer: int, data: np.ndarray) -> None:
        self.call(
            "hipMemcpy", pointer, data.ctypes.data, data.size, hipsim.HOST_TO_DEVICE
        )

    def read(self, pointer: int, size: int) -> np.ndarray:
        data = np.empty(size, np.uint8)
        kind = hipsim.DEVICE_TO_HOST
        self.call("hipMemcpy", data.ctypes.data, pointer, size, kind)
        return data

    def batch(
        self,
        destinations: Sequence[int] | np.ndarray,
        sources: Sequence[int] | np.ndarray,
        sizes: Sequence[int] | np.ndarray,
        stream: int | None = None,
        attributes: Sequence[Any] = (),
        fail_index: bool = True,
        count: int | None = None,
    ) -> tuple[int, int]:
        """hipMemcpyBatchAsync; its result, and the failing index it wrote.

        The index is -1 when it wrote none. Each of `attributes` has `first_copy`,
        `order` and `flags`.
        """
        arrays = [np.asarray(a, np.uint64) for a in (destinations, sources, sizes)]
        sets = (hipsim.MemcpyAttributes * len(attributes))()
        for entry, each in zip(sets, attributes, strict=True):
            entry.srcAccessOrder = each.order
            entry.flags = each.flags
        firsts = np.array([each.first_copy for each in attributes], np.uint64)
        index = ctypes.c_int64(-7)
        error = self.lib.hipMemcpyBatchAsync(
            *(array.ctypes.data for array in arrays),
            len(arrays[0]) if count is None else count,
            ctypes.addressof(sets) if attributes else None,
            firsts.ctypes.data if attributes else None,
            len(attributes),
            ctypes.byref(index) if fail_index else None,
            stream,
        )
        written = ctypes.c_uint64(index.value).value
        return error, -1 if index.value == -7 else written

    def close(self) -> None:
        hipsim.reset()
        for drop, handle in reversed(self.left):
            drop(handle)
        self.lib.hipSetDevice(0)
        self.lib.hipGetLastError()


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    """A simulator with nothing on it, and nothing left on it afterwards."""
    hipsim.reset(hipsim.PROFILES[-1])
    gpu = Gpu(hipsim.load())
    gpu.lib.hipGetLastError()
    yield gpu
    gpu.close()
    hipsim.assert_clean()


@pytest.fixture(params=hipsim.PROFILES)
def profile(gpu: Gpu, request: pytest.FixtureRequest) -> str:
    """Each profile in turn."""
    name: str = request.param
    hipsim.reset(name)
    return name
