# SPDX-License-Identifier: Apache-2.0
"""An allocator beside a model of what each of its allocations ought to hold."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Literal, NamedTuple

import numpy as np
from vllm.device_allocator import DEFERRABLE_TAGS
from vllm.device_allocator.cumem import CuMemAllocator

from .simulated_gpu import IS_HIP, Gpu, Torch, pattern, simulator

LEVEL_1 = ("weights", "runtime", "cudagraph")
LEVEL_2 = ("runtime", "cudagraph")
"""The tags that CuMemBackend has backed up when it sleeps at that level."""


class Expected(NamedTuple):
    """One allocation; `content` is None where nobody says what it is."""

    tag: str
    state: Literal["mapped", "backed up", "discarded"]
    content: np.ndarray | None


Expectation = Mapping[int, Expected]


class Pool:
    """A memory pool of PyTorch, each of whose segments is one tensor's.

    Attributes:
        segments: Their bytes in use, by address.
    """

    def __init__(self, mutex: AbstractContextManager) -> None:
        self.segments: dict[int, int] = {}
        self._mutex = mutex

    def snapshot(self) -> list[dict[str, int]]:
        with self._mutex:
            return [
                {"address": ptr, "allocated_size": used}
                for ptr, used in self.segments.items()
            ]


class World:
    """Allocations of one allocator.

    Attributes:
        cumem: The allocator.
        expected: What the model says of each allocation, by address.
        sizes: Of the segments that PyTorch has not given back, by address.
        pools: Those that PyTorch allocates from now, the innermost last.
    """

    def __init__(self, module: ModuleType, torch_side: Torch) -> None:
        self.module = module
        self.torch = torch_side
        self.gpu = Gpu(module)
        self.cumem = CuMemAllocator()
        module.init_module(
            self.cumem.python_malloc_callback, self.cumem.python_free_callback
        )
        self.expected: dict[int, Expected] = {}
        self.sizes: dict[int, int] = {}
        self.pools: list[Pool] = []
        self._written = 0

    # --- Operations -------------------------------------------------------------------

    @contextmanager
    def use_pool(self, malloc: object, free: object) -> Iterator[tuple[Pool, object]]:
        """In the place of `cumem.use_memory_pool_with_allocator`."""
        pool = Pool(self.torch.mutex)
        self.pools.append(pool)
        try:
            yield pool, object()
        finally:
            self.pools.remove(pool)

    def allocate(self, tag: str, size: int, fill: bool = True) -> int:
        with self.cumem._tagged(tag):
            return self.new_segment(size, fill)

    def new_segment(self, size: int, fill: bool = True) -> int:
        """An allocation with the tag that is the current one."""
        ptr = self.torch.malloc(size)
        self.sizes[ptr] = size
        if self.pools:
            self.pools[-1].segments[ptr] = size
        self.expected[ptr] = Expected(self.cumem.current_tag, "mapped", None)
        if fill:
            self.write(ptr)
        return ptr

    def write(self, ptr: int) -> None:
        """New bytes, that no other allocation has."""
        self._written += 1
        data = pattern(self._written, sum(self.module.chunks(ptr)))
        self.gpu.write(ptr, data)
        self.expected[ptr] = self.expected[ptr]._replace(content=data)

    def free(self, ptr: int) -> None:
        self.torch.free(ptr, self.sizes.pop(ptr))

    def trim(self, *ptrs: int) -> None:
        """As at the end of a pool in which these segments are free."""
        pool = Pool(self.torch.mutex)
        pool.segments = dict(self.sizes) | dict.fromkeys(ptrs, 0)
        self.cumem._trim(pool)

    def sleep(self, tags: tuple[str, ...]) -> None:
        report = self.cumem.sleep(offload_tags=tags)
        assert report is self.cumem.last_sleep
        # None where a call that tells of memory was made to fail.
        assert report is None or report.held.rest_bytes >= 0, report

    def wake(self, tags: list[str] | None = None) -> None:
        self.cumem.wake_up(tags)

    def free_all(self) -> None:
        for ptr in list(self.sizes):
            self.free(ptr)
        self.expected.clear()

    # --- The model --------------------------------------------------------------------

    def after_sleep(self, tags: Sequence[str]) -> Expectation:
        def slept(block: Expected) -> Expected:
            if block.state != "mapped":
                return block
            if block.tag in tags:
                return block._replace(state="backed up")
            return block._replace(state="discarded", content=None)

        return {ptr: slept(block) for ptr, block in self.expected.items()}

    def after_discard(self, tags: Sequence[str]) -> Expectation:
        gone = {"state": "discarded", "content": None}
        return {
            ptr: block._replace(**gone)
            if block.tag in tags and block.state == "mapped"
            else block
            for ptr, block in self.expected.items()
        }

    def after_wake(self, tags: list[str] | None = None) -> Expectation:
        def woken(ptr: int, block: Expected) -> Expected:
            wakes = tags is None or block.tag in tags
            if block.state == "mapped" or not (
                wakes or block.tag not in DEFERRABLE_TAGS
            ):
                return block
            content = block.content
            if block.state == "discarded" and IS_HIP:
                size = self.cumem.pointer_to_data[ptr].handle[1]
                content = np.zeros(size, np.uint8)
            return block._replace(state="mapped", content=content)

        return {ptr: woken(ptr, block) for ptr, block in self.expected.items()}

    # --- Host memory ------------------------------------------------------------------

    def held_bytes(self) -> int:
        """Of the host's memory, that the allocator has taken and not given back."""
        return sum(arena.prepared for arena in self.cumem._host_backups.arenas)

    def held_for_backups(self) -> int:
        """Bytes of the pieces in which there are backups."""
        backups = self.cumem._backups()
        return sum(
            min(arena.piece_size, arena.size - offset)
            for arena in self.cumem._host_backups.arenas
            for offset in range(0, arena.size, arena.piece_size)
            if any(
                backup.address < arena.address + offset + arena.piece_size
                and arena.address + offset < backup.end
                for backup in backups
            )
        )

    # --- Checks -----------------------------------------------------------------------

    def states(self) -> dict[int, str]:
        """What the allocator says of each allocation; the driver must agree."""
        states = {}
        for ptr, data in self.cumem.pointer_to_data.items():
            assert self.module.is_mapped(ptr) != data.is_asleep, hex(ptr)
            if data.is_asleep:
                has_backup = data.cpu_backup_tensor is not None
                states[ptr] = "backed up" if has_backup else "discarded"
            else:
                assert data.cpu_backup_tensor is None
                states[ptr] = "mapped"
        return states

    def check(self, *allowed: Expectation) -> None:
        """Every allocation is as one of the expectations says, all by the same one.

        The model takes that one for its own.
        """
        states = self.states()
        wanted = [{ptr: b.state for ptr, b in e.items()} for e in allowed]
        assert states in wanted
        *others, last = (e for e, w in zip(allowed, wanted, strict=True) if w == states)
        for expectation in others:
            try:
                self._check_contents(expectation)
            except AssertionError:
                continue
            self.expected = dict(expectation)
            return
        self._check_contents(last)
        self.expected = dict(last)

    def _check_contents(self, expectation: Expectation) -> None:
        for ptr, block in expectation.items():
            data = self.cumem.pointer_to_data[ptr]
            assert data.tag == block.tag
            if block.content is None:
                continue
            if data.cpu_backup_tensor is not None:
                has = data.cpu_backup_tensor.numpy()
            else:
                has = self.gpu.read(ptr)
            assert has.size == block.content.size
            if not np.array_equal(has, block.content):
                wrong = np.flatnonzero(has != block.content)
                raise AssertionError(
                    f"{block.tag} at {ptr:#x}, {block.state}: {wrong.size} bytes "
                    f"differ from {wrong[0]:#x} on"
                )

    def check_nothing_left(self) -> None:
        assert self.cumem.pointer_to_data == {}
        self.cumem.trim_host_memory()
        assert self.module.release_pending() == 0
        assert self.module.ranges() == []
        gc.collect()
        simulator.assert_clean()
