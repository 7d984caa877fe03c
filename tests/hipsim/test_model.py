# SPDX-License-Identifier: Apache-2.0
"""Random programs against a model that is a few byte strings."""

import ctypes

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, rule

from vllm_rocm_memory.sim import hipsim

ARENA = 1 << 20
PAGE = 4096
sizes = st.integers(1, 3 * PAGE)
offsets = st.integers(0, 3 * PAGE)
streams = st.booleans()


class Programs(RuleBasedStateMachine):
    """Work goes to the null stream and to one blocking stream in turn.

    The two are ordered against each other, so the model is sequential although
    nothing waits but the reads.
    """

    allocations = Bundle("allocations")

    def __init__(self) -> None:
        super().__init__()
        hipsim.reset()
        self.lib = hipsim.load()
        self.model: dict[int, np.ndarray] = {}
        handle = ctypes.c_void_p()
        assert self.lib.hipStreamCreate(ctypes.byref(handle)) == 0
        self.streams = (None, handle.value)
        # Each load reads from a part of its own: the ones before may still be queued.
        self.arena = np.random.default_rng(0).integers(0, 256, ARENA, np.uint8)
        self.used = 0
        address = self.arena.ctypes.data
        assert self.lib.hipHostRegister(address, ARENA, 0) == 0

    def bytes_at(self, address: int, size: int) -> np.ndarray | None:
        """What a copy of `size` bytes at `address` touches; None when it must fail.

        An offset may lead into a neighbour, and then it is the neighbour's size that
        counts.
        """
        for pointer, data in self.model.items():
            start = address - pointer
            if 0 <= start < len(data):
                return data[start : start + size] if start + size <= len(data) else None
        return None

    @rule(target=allocations, size=sizes)
    def allocate(self, size: int) -> int:
        pointer = ctypes.c_void_p()
        assert self.lib.hipMalloc(ctypes.byref(pointer), size) == 0
        assert pointer.value is not None
        self.model[pointer.value] = np.zeros(size, np.uint8)
        return pointer.value

    @rule(pointer=consumes(allocations))
    def free(self, pointer: int) -> None:
        assert self.lib.hipFree(pointer) == 0
        del self.model[pointer]
        assert self.lib.hipFree(pointer) == 1

    @rule(pointer=allocations, offset=offsets, size=sizes, on_null=streams)
    def load(self, pointer: int, offset: int, size: int, on_null: bool) -> None:
        if self.used + size > ARENA:
            return
        data = self.arena[self.used : self.used + size]
        self.used += size
        target = self.bytes_at(pointer + offset, size)
        error = self.lib.hipMemcpyAsync(
            pointer + offset, data.ctypes.data, size, 1, self.streams[on_null]
        )
        assert error == (1 if target is None else 0)
        if target is not None:
            target[:] = data

    @rule(
        pointer=allocations,
        offset=offsets,
        size=sizes,
        value=st.integers(0, 255),
        on_null=streams,
    )
    def fill(
        self, pointer: int, offset: int, size: int, value: int, on_null: bool
    ) -> None:
        target = self.bytes_at(pointer + offset, size)
        error = self.lib.hipMemsetAsync(
            pointer + offset, value, size, self.streams[on_null]
        )
        assert error == (1 if target is None else 0)
        if target is not None:
            target[:] = value

    @rule(
        to=allocations,
        to_offset=offsets,
        source=allocations,
        source_offset=offsets,
        size=sizes,
        on_null=streams,
        batch=st.booleans(),
    )
    def copy(
        self,
        to: int,
        to_offset: int,
        source: int,
        source_offset: int,
        size: int,
        on_null: bool,
        batch: bool,
    ) -> None:
        stream = self.streams[on_null]
        ends = (to + to_offset, source + source_offset)
        if batch:
            arrays = [np.array([value], np.uint64) for value in (*ends, size)]
            error = self.lib.hipMemcpyBatchAsync(
                *(a.ctypes.data for a in arrays), 1, None, None, 0, None, stream
            )
        else:
            error = self.lib.hipMemcpyAsync(*ends, size, 3, stream)
        target, data = (self.bytes_at(end, size) for end in ends)
        assert error == (1 if target is None or data is None else 0)
        if target is not None and data is not None:
            target[:] = data.copy()

    @rule(pointer=allocations)
    def read(self, pointer: int) -> None:
        data = np.empty_like(self.model[pointer])
        error = self.lib.hipMemcpy(data.ctypes.data, pointer, data.size, 2)
        assert error == 0
        assert np.array_equal(data, self.model[pointer])

    def teardown(self) -> None:
        try:
            for pointer in self.model:
                self.read(pointer)
        finally:
            for pointer in self.model:
                self.lib.hipFree(pointer)
            self.lib.hipHostUnregister(self.arena.ctypes.data)
            self.lib.hipStreamDestroy(self.streams[1])
        hipsim.assert_clean()


TestPrograms = Programs.TestCase
TestPrograms.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
