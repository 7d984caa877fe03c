# SPDX-License-Identifier: Apache-2.0
"""Device memory that can be given back and had again at the same addresses.

Note [Sleep and wake]
Tensors made inside `CuMemAllocator.use_memory_pool` lie in ranges of addresses that the
compiled module reserves. Sleep takes the physical memory from the ranges and keeps the
addresses, so that every tensor and every captured graph is right again after the wake.

An allocation is mapped, asleep with a backup, or asleep without one, and the compiled
module is asked which (`is_mapped`) whenever a call of it has failed. Sleep copies
everything out before it unmaps anything. Wake maps everything that it was asked for
before it restores anything, and takes its own mappings back when it cannot go on. A
call that raises has therefore left each allocation as it was or as it was asked to be,
and the same call may be made again.

Collecting garbage takes as long as a good part of the copy, so it goes on beside that.
Wake collects none, and leaves PyTorch its cache, unless the device has no memory.

Note [Locks]
PyTorch calls `_python_free_callback` with the mutex of its caching allocator held, from
any thread, and also from inside our own calls whenever Python collects garbage. So

* the callback never waits for the lock. What is freed goes onto a list, and whoever has
  the lock, or gets it, frees what is on it. The list is looked at again after each
  release of the lock, so nothing stays on it because of an unlucky moment.
* the callback leaves host memory alone, since giving it back takes time. The next call
  that has the lock applies the policy, once for all that was freed.
* nothing under the lock may need PyTorch's mutex: no allocation on the device, no
  `empty_cache`, no snapshot of a pool. Garbage is collected in a thread of its own
  there, and waited for: what it frees only goes onto the list.
* a finalizer may call more than a free, and in a thread that has the lock, or for which
  the one that has it waits, it would wait for ever. Such a call raises instead, which
  Python reports as it does any error of a finalizer.
* PyTorch's snapshot keeps Python's lock while it waits for that mutex (2.11 does), and
  both callbacks need it. A thread that makes or frees a segment of this allocator just
  then waits for ever. A worker has one thread that does either, and a snapshot is
  taken in the thread that called.
* the malloc callback does not take the lock at all; sleep, wake and discard work on the
  allocations that existed when they began.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from vllm.device_allocator import DEFERRABLE_TAGS, AllocationData, HandleType
from vllm.device_allocator.alloc_conf import (
    EXPANDABLE_SEGMENTS,
    conf_flag_enabled,
    current_alloc_conf,
    set_alloc_conf,
    with_conf_flag,
)
from vllm.device_allocator.copy_progress import is_beside, reported
from vllm.device_allocator.host_backups import (
    HostBackups,
    HostMemoryPolicy,
    Span,
    host_memory_policy,
)
from vllm.device_allocator.host_capacity import (
    check_host_capacity,
    readable,
    usable_cpus,
)
from vllm.device_allocator.sleep_report import (
    DeviceMemory,
    FreedMemory,
    HostMemory,
    SleepReport,
    device_memory,
    torch_pools,
)
from vllm.logger import init_logger

logger = init_logger(__name__)

if TYPE_CHECKING:
    from torch.cuda.memory import CUDAPluggableAllocator, MemPool
    from vllm.distributed.device_communicators.cuda_wrapper import CudaRTLibrary

    _PoolAndAllocator: TypeAlias = tuple[MemPool, CUDAPluggableAllocator]

    cumem_available: bool
    libcudart: CudaRTLibrary

_module: Any = None
_missing: str | None = None
try:
    _module = importlib.import_module("vllm.cumem_allocator")
except ImportError as error:
    _missing = (
        f"vllm.cumem_allocator cannot be imported ({error}); `vllm-rocm-memory apply`, "
        "run with this Python, puts it there"
    )
else:
    if not hasattr(_module, "suspend"):
        _missing = (
            f"{_module.__file__} is vLLM's own module and not the series'; "
            "`vllm-rocm-memory apply`, run with this Python, puts that there"
        )


def unavailable_reason() -> str | None:
    """Why there is no cuMem allocator in this process, and what to do, or None."""
    if _missing is not None:
        return _missing
    try:
        _module.driver()
    except RuntimeError as error:
        return (
            f"there is no GPU driver ({error}); a ROCm or CUDA build of PyTorch loads "
            "it, and in a container the GPU has to be passed through"
        )
    return None


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # A driver may be loaded after this module, by torch or by a platform.
        if name == "cumem_available":
            return unavailable_reason() is None
        if name == "libcudart":
            from vllm.distributed.device_communicators.cuda_wrapper import (
                CudaRTLibrary,
            )

            globals()[name] = CudaRTLibrary()
            return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def create_and_map(allocation_handle: HandleType) -> None:
    """Give an allocation new physical memory.

    Args:
        allocation_handle: Of a range without memory.

    Raises:
        RuntimeError: The driver refused, and nothing has changed. The module's
            ``OutOfMemoryError``, a subclass, if it was for want of memory.

    """
    _module.python_create_and_map(*allocation_handle)


def unmap_and_release(allocation_handle: HandleType) -> None:
    """Give an allocation's physical memory back; the address stays reserved.

    Args:
        allocation_handle: Of a range with memory.

    Raises:
        RuntimeError: The driver refused.

    """
    _module.python_unmap_and_release(*allocation_handle)


def get_pluggable_allocator(
    python_malloc_fn: Callable[[HandleType], None],
    python_free_func: Callable[[int], HandleType | None],
) -> CUDAPluggableAllocator:
    """PyTorch's view of the compiled module, which calls these two functions.

    Args:
        python_malloc_fn: Called with the handle of each new range.
        python_free_func: Called with the address of a range that PyTorch frees. The
            module frees it, unless the function returns None: it then has done so, or
            will, with the module's ``free``.

    """
    _module.init_module(python_malloc_fn, python_free_func)
    return _pluggable_allocator(torch.cuda.memory.CUDAPluggableAllocator)


@functools.cache
def _pluggable_allocator(kind: type[CUDAPluggableAllocator]) -> CUDAPluggableAllocator:
    # One for every pool, and for as long as Python lives: PyTorch has a bare pointer to
    # it in every block that outlives its pool (pytorch/pytorch#171962).
    return kind(_module.__file__, "my_malloc", "my_free")


@contextmanager
def use_memory_pool_with_allocator(
    python_malloc_fn: Callable[[HandleType], None],
    python_free_func: Callable[[int], HandleType | None],
) -> Iterator[tuple[MemPool, CUDAPluggableAllocator]]:
    """Allocate from a new pool of the compiled module in the calling thread."""
    allocator = get_pluggable_allocator(python_malloc_fn, python_free_func)
    pool = torch.cuda.memory.MemPool(allocator._allocator)
    with torch.cuda.memory.use_mem_pool(pool):
        yield pool, allocator


@contextmanager
def _without_expandable_segments() -> Iterator[None]:
    # PyTorch cannot serve a pool from expandable segments (pytorch/pytorch#147851).
    # A write replaces the whole configuration, so every other option is written too.
    conf = current_alloc_conf()
    if not conf_flag_enabled(conf, EXPANDABLE_SEGMENTS):
        yield
        return
    set_alloc_conf(with_conf_flag(conf, EXPANDABLE_SEGMENTS, False))
    try:
        yield
    finally:
        set_alloc_conf(conf)


_Copied: TypeAlias = tuple[str, str]
"""A tag, and "offload" (to the host, by a sleep) or "restore" (back, by a wake)."""

_MOVED = 1 << 20  # bytes; less is not worth a line

_UNCHANGED = "nothing has changed, and the call may be repeated"


MAX_THREADS = 12
"""Threads that make host memory ready, where the CPUs are enough. With pieces of 64 MiB
and 16 CPUs, 8, 12 and 16 of them took 0.90, 0.84 and 1.08 s for 24 GiB (measured on an
H200's host, the copies out included)."""


class _TagScopes(threading.local):
    """The tags that a thread is inside, innermost last."""

    def __init__(self) -> None:
        self.tags: list[str] = []


class CuMemAllocator:
    """Tagged device memory that can sleep; see Note [Sleep and wake].

    There is one a process, since the compiled module knows one pair of callbacks:
    `get_instance` has it.

    Attributes:
        pointer_to_data: The live allocations by address. One that is freed while
            another call has the lock stays here until that call ends.
        allocator_and_pools: The pools by tag, each with PyTorch's view of the module.
        current_tag: What the calling thread allocates has this tag. Only
            ``use_memory_pool`` and ``cudagraph_pool`` change it.
        host_memory_policy: What becomes of host memory after a wake.
        last_sleep: What the last sleep that did not fail has freed and left. None
            before the first, where the account of the last could not be made, and
            once the last was taken back.
        sleeps: How many have not failed.

    """

    instance: CuMemAllocator | None = None
    default_tag: str = "default"

    @classmethod
    def get_instance(cls) -> CuMemAllocator:
        """The allocator of this process, made when it is first asked for.

        Raises:
            RuntimeError: There is none here; the message says why and what to do.
            ValueError: ``VLLM_SLEEP_HOST_MEMORY`` is no policy.

        """
        if cls.instance is not None:
            return cls.instance
        reason = unavailable_reason()
        if reason is not None:
            raise RuntimeError(f"sleep mode is not available: {reason}")
        cls.instance = made = cls()
        atexit.register(made._release_at_exit)
        return made

    def __init__(self) -> None:
        self.pointer_to_data: dict[int, AllocationData] = {}
        self.allocator_and_pools: dict[str, list[_PoolAndAllocator]] = {}
        # bound methods are made anew at each access, and the module keeps these two
        self.python_malloc_callback = self._python_malloc_callback
        self.python_free_callback = self._python_free_callback

        # see Note [Locks]
        self._lock = threading.Lock()
        self._inside: set[int] = set()  # threads that have it or are about to
        self._freed: deque[int] = deque()
        self._not_freed: list[int] = []

        self.host_memory_policy = host_memory_policy()
        # looked up at each call, since tests replace what they stand for
        self._host_backups = HostBackups(
            lambda needed: check_host_capacity(needed), self._new_arena
        )

        self.last_sleep: SleepReport | None = None
        self.sleeps = 0
        # Replaced as a whole, by who has the lock.
        self._copied: Counter[_Copied] = Counter()
        # The same, but by the one thread that takes.
        self._taken: Counter[_Copied] = Counter()

        self._own_scopes = _TagScopes()
        self._all_scopes: dict[object, str] = {}
        # pools that may still be allocated from, so that no free segment is unused
        self._open_pools: list[MemPool] = []

    # --- Pools ------------------------------------------------------------------------

    @property
    def current_tag(self) -> str:
        """The tag of what the calling thread allocates now.

        A thread that is in no scope of its own has the tag of the process's latest:
        the threads of a capture allocate from the pool of the thread that captures.
        """
        scopes = self._own_scopes.tags or list(self._all_scopes.values())
        return scopes[-1] if scopes else CuMemAllocator.default_tag

    @contextmanager
    def _tagged(self, tag: str) -> Iterator[None]:
        scope = object()
        self._own_scopes.tags.append(tag)
        self._all_scopes[scope] = tag
        try:
            yield
        finally:
            self._own_scopes.tags.pop()
            del self._all_scopes[scope]

    @contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """Put what this thread allocates into a pool of its own.

        Args:
            tag: What sleep, wake and discard know it by; None is ``default_tag``.

        Raises:
            RuntimeError: Memory that a pool of this tag no longer needs could not be
                given back.

        """
        tag = CuMemAllocator.default_tag if tag is None else tag
        for pool, _ in self.allocator_and_pools.get(tag, []):
            if not any(pool is other for other in self._open_pools):
                self._trim(pool)
        with (
            _without_expandable_segments(),
            self._tagged(tag),
            use_memory_pool_with_allocator(
                self.python_malloc_callback, self.python_free_callback
            ) as (pool, allocator),
        ):
            # A pool has to outlive the tensors in it: pytorch/pytorch#146431.
            self.allocator_and_pools.setdefault(tag, []).append((pool, allocator))
            self._open_pools.append(pool)
            try:
                yield
            finally:
                self._close_pool(pool)
            # empty_cache leaves pools alone (pytorch/pytorch#145168), and loading and
            # quantizing a model leave a lot in them.
            self._trim(pool)

    def _close_pool(self, pool: MemPool) -> None:
        self._open_pools = [other for other in self._open_pools if other is not pool]

    def _trim(self, pool: MemPool) -> None:
        """Take the memory of a pool's free segments.

        PyTorch still lists them, so nothing may be allocated from the pool any more.
        Their addresses go when PyTorch frees them, with the pool.
        """
        unused = [
            segment["address"]
            for segment in pool.snapshot()
            if segment["allocated_size"] == 0
        ]
        if not any(ptr in self.pointer_to_data for ptr in unused):
            return
        with self._transition():
            live = self.pointer_to_data
            segments = [(ptr, live[ptr]) for ptr in unused if ptr in live]
            for device in sorted({data.handle[0] for _, data in segments}):
                torch.accelerator.synchronize(device)
            try:
                _module.suspend([ptr for ptr, _ in segments])
            finally:
                for ptr, _ in segments:
                    if not _module.is_mapped(ptr):
                        del live[ptr]

    @contextmanager
    def cudagraph_pool(self) -> Iterator[tuple[int, int]]:
        """Tag what a capture allocates from the pool that is yielded, as its id.

        It is the same pool each time, and the caller's capture chooses it.
        """
        if "cudagraph" not in self.allocator_and_pools:
            allocator = get_pluggable_allocator(
                self.python_malloc_callback, self.python_free_callback
            )
            pool = torch.cuda.memory.MemPool(allocator._allocator)
            self.allocator_and_pools["cudagraph"] = [(pool, allocator)]
            self._open_pools.append(pool)
        with self._tagged("cudagraph"):
            yield self.allocator_and_pools["cudagraph"][0][0].id

    def release_pools(self) -> None:
        """Let go of every pool. Memory that no tensor needs is given back at once.

        For the end of a process, before the interpreter takes objects apart in an
        order of its own (pytorch/pytorch#145168). PyTorch ends the process where a
        captured graph has left memory in a pool, as that of a matrix product does.
        """
        self.allocator_and_pools.clear()
        self._open_pools.clear()
        gc.collect()
        self.trim_host_memory()

    def _release_at_exit(self) -> None:
        # The interpreter takes modules apart in an order of its own.
        try:
            self.release_pools()
        except Exception:
            logger.exception("Memory pools could not be released at exit")

    def close(self) -> None:
        """The same as ``release_pools``."""
        self.release_pools()

    def _allocations(self) -> list[tuple[int, AllocationData]]:
        # A copy first, since other threads may allocate while this one iterates.
        return list(self.pointer_to_data.copy().items())

    # --- Callbacks of the compiled module ---------------------------------------------

    def _python_malloc_callback(self, allocation_handle: HandleType) -> None:
        self.pointer_to_data[allocation_handle[2]] = AllocationData(
            allocation_handle, self.current_tag
        )

    def _python_free_callback(self, ptr: int) -> None:
        """Free a range now or, if another call has the lock, at the end of that call.

        Returns None always, so that the module leaves the freeing to us.
        """
        self._freed.append(ptr)
        self._free_if_unlocked()

    @contextmanager
    def _transition(self) -> Iterator[None]:
        """The lock, and the frees of those who did not get it meanwhile.

        Raises:
            RuntimeError: The calling thread has the lock, or one waits for it that has.

        """
        self._enter()
        try:
            self._freed.extend(self._not_freed)
            self._not_freed.clear()
            self._free_freed()
            yield
        finally:
            try:
                self._free_freed()
                self._apply_policy()
            finally:
                self._lock.release()
                self._inside.discard(threading.get_ident())
                self._free_if_unlocked()

    def _enter(self) -> None:
        thread = threading.get_ident()
        if thread in self._inside or is_beside():
            raise RuntimeError(
                "the allocator was called in the middle of a call of its own that this "
                "one would wait for, as by a finalizer that sleeps, wakes, discards, "
                "trims or enters a memory pool; let it do so outside of the finalizer"
            )
        # First, since a finalizer may run between the two.
        self._inside.add(thread)
        try:
            self._lock.acquire()
        except BaseException:
            self._inside.discard(thread)
            raise

    def _free_if_unlocked(self) -> None:
        thread = threading.get_ident()
        was_inside = thread in self._inside
        self._inside.add(thread)
        try:
            while self._freed and self._lock.acquire(blocking=False):
                try:
                    self._free_freed()
                finally:
                    self._lock.release()
        finally:
            if not was_inside:
                self._inside.discard(thread)

    def _free_freed(self) -> None:
        while self._freed:
            ptr = self._freed.popleft()
            data = self.pointer_to_data.get(ptr)
            try:
                if data is not None and not data.is_asleep:
                    # PyTorch frees what kernels may still be using.
                    torch.accelerator.synchronize(data.handle[0])
            except Exception as error:
                logger.error(
                    "The memory at %#x is freed later, since its device cannot be "
                    "waited for now: %s",
                    ptr,
                    error,
                )
                self._not_freed.append(ptr)
                continue
            # First, since another thread may be given the address at once.
            self.pointer_to_data.pop(ptr, None)
            if data is not None:
                data.cpu_backup_tensor = None
            try:
                _module.free(ptr)
            except Exception as error:
                logger.error(
                    "The memory at %#x could not be freed, which the next call that "
                    "allocates or frees tries again: %s",
                    ptr,
                    error,
                )

    # --- Sleep and wake ---------------------------------------------------------------

    def host_bytes_needed(self, offload_tags: tuple[str, ...] | str | None) -> int:
        """Bytes of host memory that ``sleep`` with these tags would take now.

        What is asleep already has its backup, and memory that earlier sleeps have left
        serves again; what of that is given back first counts against the rest. Waits
        for no lock.
        """
        tags = _as_tags(offload_tags)
        sizes = [
            data.handle[1]
            for _, data in sorted(self._allocations())
            if data.tag in tags and not data.is_asleep
        ]
        return self._host_backups.needed(sizes, self._backups())

    def sleep(
        self, offload_tags: tuple[str, ...] | str | None = None
    ) -> SleepReport | None:
        """Take the physical memory of every mapped allocation.

        Args:
            offload_tags: The tags of which the contents are kept on the host; None is
                ``default_tag``. Other contents are lost.

        Returns:
            What it freed and what is still held, as ``last_sleep``; None if that could
            not be found out.

        Raises:
            HostMemoryError: The host cannot hold the backup. Nothing has changed.
            MemoryError: The host refused its address space, or had no pages for it.
                Every allocation is as it was.
            RuntimeError: The driver refused. Each allocation is as it was or asleep,
                and none of the contents to be kept are lost. Host memory that was made
                ready stays for the retry, where the policy is to keep it.

        """
        started_at, begin = time.time(), time.monotonic()
        tags = _as_tags(offload_tags)
        with self._transition():
            known = self._allocations()
            going = [(ptr, data) for ptr, data in known if not data.is_asleep]
            kept = [(ptr, data) for ptr, data in going if data.tag in tags]
            total, backup = _num_bytes(going), _num_bytes(kept)
            spare = self._spare()
            try:
                try:
                    backups = self._back_up(kept)
                except (RuntimeError, MemoryError) as error:
                    _explain(error, _UNCHANGED)
                    raise
                self._suspend(known, backups)
            except (RuntimeError, MemoryError) as error:
                self._explain_spare(error, spare)
                raise
            other_policy = any(
                (data.tag in tags) != (data.cpu_backup_tensor is not None)
                for _, data in known
                if data.is_asleep
            )
        if not kept:
            # Otherwise that went on beside the copy.
            gc.collect()
        logger.info(
            "Sleep took %s from %d allocations; %s of them are backed up on the host.",
            readable(total),
            len(going),
            readable(backup),
        )
        if other_policy:
            logger.warning(
                "Some allocations were asleep before with or without a backup, which "
                "this sleep would have decided otherwise; they stay as they are."
            )
        before = self._torch_bytes()
        torch.accelerator.empty_cache()
        seconds = time.monotonic() - begin
        self.sleeps += 1
        self.last_sleep = None
        if before is not None:
            try:
                device, host = self.memory()
                freed = _freed(going, kept, device.device)
                emptied = max(0, before - device.all_torch_bytes)
                report = SleepReport(started_at, seconds, freed, emptied, device, host)
                logger.info("%s", report.table())
                self.last_sleep = report
            except Exception as error:
                _warn_of_no_report(error)
        return self.last_sleep

    def _torch_bytes(self) -> int | None:
        """Bytes of PyTorch's other pools; a report may not fail a sleep."""
        try:
            return torch_pools(self._device(), _ranges()).total
        except Exception as error:
            _warn_of_no_report(error)
            return None

    def settle_last_sleep(self) -> None:
        """Take anew what the last sleep left, for a caller who has freed more since.

        Raises:
            RuntimeError: The driver or PyTorch does not tell. The report is as it was.

        """
        last = self.last_sleep
        if last is None:
            return
        device, host = self.memory()
        self.last_sleep = replace(last, held=device, host=host)
        more = device.used_bytes - last.held.used_bytes
        if abs(more) > _MOVED:
            logger.info(
                "At the end of the sleep %s of device %d are used, %s %s than the "
                "allocator left; its allocations and PyTorch have %s of them.",
                readable(device.used_bytes),
                device.device,
                readable(abs(more)),
                "more" if more > 0 else "less",
                readable(sum(device.tags.values()) + device.all_torch_bytes),
            )

    def forget_last_sleep(self) -> None:
        """The last sleep was taken back, and is reported no more."""
        self.last_sleep = None

    def _back_up(
        self, allocations: list[tuple[int, AllocationData]]
    ) -> dict[int, torch.Tensor]:
        """Copies of the contents by address; garbage is collected beside."""
        if not allocations:
            return {}
        ordered = sorted(allocations)
        sizes = [data.handle[1] for _, data in ordered]
        places, new_bytes = self._host_backups.take(sizes, self._backups())
        copies = [
            (ptr, place.size, place.span.address)
            for (ptr, _), place in zip(ordered, places, strict=True)
        ]
        progress = _module.Progress()
        # The rest of the CPUs are the driver's and the copying thread's.
        threads = max(1, min(MAX_THREADS, usable_cpus() * 3 // 4))
        try:
            with reported("Backing up memory", sum(sizes), progress, gc.collect):
                _module.back_up(copies, progress, threads=threads)
        except BaseException:
            self._host_backups.forget_empty(self._backups())
            raise
        self._count_copied("offload", ordered)
        self._tell_of_host_memory(new_bytes)
        return {
            ptr: torch.frombuffer(
                place.arena, dtype=torch.uint8, count=place.size, offset=place.offset
            )
            for (ptr, _), place in zip(ordered, places, strict=True)
        }

    # --- Host memory ------------------------------------------------------------------

    def _backups(self) -> list[Span]:
        tensors = [data.cpu_backup_tensor for _, data in self._allocations()]
        return [
            Span(tensor.data_ptr(), tensor.numel())
            for tensor in tensors
            if tensor is not None
        ]

    def _new_arena(self, size: int) -> Any:
        device = next(data.handle[0] for _, data in self._allocations())
        return _module.HostArena(size, node=_module.numa_node(device))

    def _apply_policy(self) -> None:
        if self.host_memory_policy is not HostMemoryPolicy.RELEASE:
            return
        try:
            self._give_back()
        except Exception:
            # The call has its own outcome; the next one tries this again.
            logger.exception("Host memory of backups could not be given back")

    def _give_back(self) -> int:
        if not self._host_backups.arenas:
            return 0
        return self._host_backups.give_back(self._backups())

    def _spare(self) -> int:
        return self._host_backups.spare(self._backups())

    def _explain_spare(self, error: BaseException, before: int) -> None:
        spare = self._spare()
        if spare > before and self.host_memory_policy is HostMemoryPolicy.KEEP:
            _explain(
                error,
                f"{readable(spare)} of host memory are ready for the next try, or "
                "given back by trim_host_memory()",
            )

    def trim_host_memory(self) -> int:
        """Give back host memory that holds no backup and waits for the next sleep.

        Returns:
            The bytes that the host has again.

        """
        with self._transition():
            return self._give_back()

    def _tell_of_host_memory(self, new_bytes: int) -> None:
        arenas = self._host_backups.arenas
        if new_bytes:
            nodes = sorted({each.node for each in arenas if each.node is not None})
            logger.info(
                "The backup took %s of host memory; %s are held now, %s of them in "
                "huge pages and %s registered%s.",
                readable(new_bytes),
                readable(sum(arena.prepared for arena in arenas)),
                readable(sum(arena.huge for arena in arenas)),
                readable(sum(arena.registered for arena in arenas)),
                f", preferring NUMA node {', '.join(map(str, nodes))}" if nodes else "",
            )
        for reason, refused in self._host_backups.new_refusals().items():
            logger.warning(
                "%s of the host memory of backups are not registered with the driver, "
                "so they are copied more slowly: %s. Where the driver counts what it "
                "registers as locked memory, a higher limit helps: ulimit -l, and for "
                "a container --ulimit memlock=-1 or --cap-add IPC_LOCK",
                readable(refused),
                reason,
            )

    # --- Unmapping and mapping --------------------------------------------------------

    def _suspend(
        self,
        allocations: list[tuple[int, AllocationData]],
        backups: dict[int, torch.Tensor],
    ) -> None:
        """Unmap allocations, all or none as far as that is in the driver's power.

        Those that were asleep before are among them: what the module still holds of
        them after an earlier failure is given back now.
        """
        going = [(ptr, data) for ptr, data in allocations if not data.is_asleep]
        try:
            try:
                _module.suspend([ptr for ptr, _ in allocations])
            finally:
                _note_asleep(going, backups)
        except BaseException as error:
            # Again, since an interrupt may have come in the middle of the first time.
            gone = _note_asleep(going, backups)
            # Else they would live for as long as the error's traceback.
            backups.clear()
            _explain(
                error,
                f"{gone} of {len(going)} allocations are asleep all the same, so wake "
                "up, or repeat the call"
                if gone
                else _UNCHANGED,
            )
            raise

    def discard(self, tags: tuple[str, ...] | str) -> None:
        """Take the physical memory of the mapped allocations with these tags.

        Their contents are lost.

        Raises:
            RuntimeError: The driver refused. Each allocation is as it was or asleep.

        """
        tags = _as_tags(tags)
        with self._transition():
            known = [each for each in self._allocations() if each[1].tag in tags]
            going = [(ptr, data) for ptr, data in known if not data.is_asleep]
            backed_up = any(data.cpu_backup_tensor is not None for _, data in known)
            self._suspend(known, {})
        logger.info(
            "Discarded %s of allocations tagged %s.",
            readable(_num_bytes(going)),
            ", ".join(tags),
        )
        if backed_up:
            logger.warning(
                "Some allocations tagged %s are asleep with a backup, which they keep.",
                ", ".join(tags),
            )

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Give sleeping allocations physical memory and their backups.

        Contents without a backup are undefined on CUDA. On ROCm they are zero, since
        the driver may hand out pages that hold other data (vllm-project/vllm#44972).

        Args:
            tags: Those of ``DEFERRABLE_TAGS`` to wake; what has another tag always
                wakes. None wakes everything.

        Raises:
            RuntimeError: The driver refused, for want of memory for example. Everything
                that was asleep is asleep still, with its backup.

        """
        try:
            self._wake(tags)
        except _module.OutOfMemoryError as error:
            logger.info("A wake collects garbage and is tried again: %s", error)
        else:
            return
        # Here the error is gone, whose frames keep things alive, and the lock is free.
        gc.collect()
        torch.accelerator.empty_cache()
        self._wake(tags)

    def _wake(self, tags: list[str] | None) -> None:
        with self._transition():
            waking = [
                (ptr, data)
                for ptr, data in self._allocations()
                if data.is_asleep
                and (
                    tags is None or data.tag in tags or data.tag not in DEFERRABLE_TAGS
                )
            ]
            try:
                self._map_and_restore(waking)
            except BaseException as error:
                self._undo_wake(waking)
                _explain(
                    error,
                    f"the {len(waking)} allocations to be woken need "
                    f"{readable(_num_bytes(waking))} in all; they are still asleep, "
                    "and may be woken again",
                )
                raise
            for _, data in waking:
                # In this order, since what is asleep without a backup is zeroed.
                data.is_asleep = False
                data.cpu_backup_tensor = None

    def _map_and_restore(self, waking: list[tuple[int, AllocationData]]) -> None:
        for ptr, data in waking:
            # mapped already only if an earlier wake could not take it back
            if not _module.is_mapped(ptr):
                create_and_map(data.handle)
        copies = sorted(
            (ptr, data.cpu_backup_tensor.numel(), data.cpu_backup_tensor.data_ptr())
            for ptr, data in waking
            if data.cpu_backup_tensor is not None
        )
        stale = _module.driver().vendor == "hip"
        zeros = [
            (ptr, data.handle[1])
            for ptr, data in waking
            if stale and data.cpu_backup_tensor is None
        ]
        progress = _module.Progress()
        with reported("Restoring memory", sum(size for _, size, _ in copies), progress):
            _module.restore(copies, zeros, progress)
        restored = [each for each in waking if each[1].cpu_backup_tensor is not None]
        self._count_copied("restore", restored)

    def _undo_wake(self, waking: list[tuple[int, AllocationData]]) -> None:
        try:
            _module.suspend([ptr for ptr, _ in waking])
        except RuntimeError:
            # The first error is the caller's. What is mapped now, the next call that
            # suspends takes back, or the next wake uses.
            logger.exception("A failed wake could not be undone")

    # --- Accounts ---------------------------------------------------------------------

    def get_current_usage(self) -> int:
        """Bytes of the live allocations, mapped or asleep."""
        return _num_bytes(self._allocations())

    def mapped_bytes(self) -> dict[str, int]:
        """Bytes of device memory that allocations have now, by tag."""
        return _bytes_by_tag(
            each for each in self._allocations() if not each[1].is_asleep
        )

    def asleep_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes of every tag that are asleep with a backup (``host``) and without.

        What is without one is ``none``. Tags of which nothing is asleep have zeros.
        """
        known = self._allocations()
        asleep = [each for each in known if each[1].is_asleep]
        kept = [each for each in asleep if each[1].cpu_backup_tensor is not None]
        total, on_host = _bytes_by_tag(asleep), _bytes_by_tag(kept)
        tags = self.allocator_and_pools.keys() | {data.tag for _, data in known}
        return {
            tag: {
                "host": on_host.get(tag, 0),
                "none": total.get(tag, 0) - on_host.get(tag, 0),
            }
            for tag in sorted(tags)
        }

    def take_copied_bytes(self) -> dict[_Copied, int]:
        """Bytes that sleeps and wakes have copied since this was last asked.

        Returns:
            By tag and direction: "offload" to the host, "restore" to the device. What a
            sleep has copied counts also where it failed later.

        """
        copied = self._copied
        new = copied - self._taken
        self._taken = copied
        return dict(new)

    def _count_copied(
        self, direction: str, allocations: Iterable[tuple[int, AllocationData]]
    ) -> None:
        new = _bytes_by_tag(allocations)
        self._copied = self._copied + Counter(
            {(tag, direction): num_bytes for tag, num_bytes in new.items()}
        )

    def memory(self) -> tuple[DeviceMemory, HostMemory]:
        """What holds memory of the device and of the host now.

        The device is that of the allocations. Waits for no lock of this allocator, but
        see Note [Locks] on PyTorch's snapshot.

        Raises:
            RuntimeError: The driver or PyTorch does not tell.

        """
        device = self._device()
        account = device_memory(device, lambda: self._tagged_bytes(device), _ranges)
        return account, self.host_memory()

    def host_memory(self) -> HostMemory:
        """What backups and earlier sleeps hold of the host's memory now."""
        arenas = self._host_backups.arenas
        held = sum(arena.prepared for arena in arenas)
        spare = min(held, self._spare())
        return HostMemory(
            held_bytes=held,
            backup_bytes=held - spare,
            spare_bytes=spare,
            registered_bytes=sum(arena.registered for arena in arenas),
            huge_page_bytes=sum(arena.huge for arena in arenas),
        )

    def _tagged_bytes(self, device: int) -> tuple[dict[str, int], dict[str, int]]:
        here = _on(device, self._allocations())
        mapped = _bytes_by_tag(each for each in here if not each[1].is_asleep)
        return mapped, _bytes_by_tag(each for each in here if each[1].is_asleep)

    def _device(self) -> int:
        devices = [data.handle[0] for _, data in self._allocations()]
        return min(devices) if devices else torch.accelerator.current_device_index()


def _as_tags(tags: tuple[str, ...] | str | None) -> tuple[str, ...]:
    if tags is None:
        return (CuMemAllocator.default_tag,)
    if isinstance(tags, str):
        return (tags,)
    return tuple(tags)


def _note_asleep(
    allocations: list[tuple[int, AllocationData]], backups: dict[int, torch.Tensor]
) -> int:
    """Enter which of these have lost their memory, and return how many."""
    gone = [(ptr, data) for ptr, data in allocations if not _module.is_mapped(ptr)]
    for ptr, data in gone:
        data.cpu_backup_tensor = backups.get(ptr)
        data.is_asleep = True
    return len(gone)


def _bytes_by_tag(
    allocations: Iterable[tuple[int, AllocationData]],
) -> dict[str, int]:
    total: Counter[str] = Counter()
    for _, data in allocations:
        total[data.tag] += data.handle[1]
    return dict(total)


def _freed(
    going: list[tuple[int, AllocationData]],
    kept: list[tuple[int, AllocationData]],
    device: int,
) -> dict[str, FreedMemory]:
    backed_up = _bytes_by_tag(_on(device, kept))
    return {
        tag: FreedMemory(num_bytes, backed_up.get(tag, 0))
        for tag, num_bytes in _bytes_by_tag(_on(device, going)).items()
    }


def _on(
    device: int, allocations: list[tuple[int, AllocationData]]
) -> list[tuple[int, AllocationData]]:
    return [each for each in allocations if each[1].handle[0] == device]


def _warn_of_no_report(error: Exception) -> None:
    logger.warning(
        "The sleep is done, but what still holds memory could not be found out: %s: %s",
        type(error).__name__,
        error,
    )


def _ranges() -> frozenset[int]:
    return frozenset(_module.ranges())


def _num_bytes(allocations: Iterable[tuple[int, AllocationData]]) -> int:
    return sum(data.handle[1] for _, data in allocations)


def _explain(error: BaseException, state: str) -> None:
    # In the error's own text, since an executor sends nothing else to the engine.
    if isinstance(error, (RuntimeError, MemoryError)) and error.args:
        error.args = (f"{error.args[0]}; {state}", *error.args[1:])
