# SPDX-License-Identifier: Apache-2.0
"""PyTorch's device memory and its pools, over the HIP simulator.

A pool holds CPU tensors in segments, of `hipMalloc` or of a pluggable allocator, by
the rules of PyTorch's caching allocator (csrc/sim/caching_allocator.h). A scope
decides where the tensors lie that its thread allocates; scopes nest, and the innermost
one counts.
"""

import contextlib
import ctypes
import functools
import importlib
import itertools
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from vllm_rocm_memory.sim import hipsim

PoolId = tuple[int, int]
"""A pool's name: (0, n) if the user made it, (n, 0) if a capture did."""

_numbers = itertools.count(1)


@functools.cache
def native() -> Any:
    """The extension that holds the pools.

    Raises:
        RuntimeError: It is not built.
    """
    try:
        return importlib.import_module("vllm_rocm_memory._native.device_memory")
    except ImportError as error:
        raise RuntimeError(
            f"the extension device_memory cannot be loaded ({error}): run `make setup`"
        ) from error


def address_of(function: Any) -> int:
    """Where a function lies that ctypes found."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def _hip_malloc() -> Any:
    library = hipsim.load()
    return native().HipMalloc(
        address_of(library.hipMalloc), address_of(library.hipFree)
    )


# --- scopes ---------------------------------------------------------------------------


def device_memory() -> AbstractContextManager[None]:
    """Within it, each tensor that this thread allocates is a `hipMalloc` of its own.

    Raises:
        RuntimeError: The extension is not built.
        torch.OutOfMemoryError: By an allocation that the device has no room for.
    """
    scope: AbstractContextManager[None] = native().source_scope(_hip_malloc())
    return scope


def host_memory() -> AbstractContextManager[None]:
    """Within it, what this thread allocates lies in host memory after all."""
    scope: AbstractContextManager[None] = native().host_scope()
    return scope


class CapturePool:
    """What a capture allocates from: a pool that it uses until it is released.

    Args:
        pool: An existing pool, or the name of a new one in `hipMalloc` memory.
    """

    def __init__(self, pool: PoolId) -> None:
        self.id = pool
        exchange = hipsim.load().hipThreadExchangeStreamCaptureMode
        self._scope = native().CaptureScope(pool, address_of(exchange))

    def begin(self) -> None:
        """From here on this thread's tensors lie in the pool.

        Raises:
            RuntimeError: A scope or another capture has the pool open.
        """
        native().begin_pool(self.id, _hip_malloc())
        self._scope.begin()

    def end(self) -> None:
        """Ends what `begin` began, in the same thread; the pool stays in use."""
        self._scope.end()
        native().end_pool(self.id)

    def release(self) -> None:
        """Nothing that was captured is replayed any more."""
        native().release_pool(self.id)


# --- torch.cuda.memory ----------------------------------------------------------------


class CUDAPluggableAllocator:
    """`torch.cuda.memory.CUDAPluggableAllocator`: two functions of a library.

    Args:
        path_to_so_file: The library; it is never unloaded.
        alloc_fn_name: `void* (ssize_t size, int device, void* stream)`. Null means
            that there is no room; an exception of C++ is a RuntimeError.
        free_fn_name: `void (void* ptr, ssize_t size, int device, void* stream)`.

    Raises:
        OSError: There is no such library.
        AttributeError: It has no such function.
    """

    def __init__(
        self, path_to_so_file: str, alloc_fn_name: str, free_fn_name: str
    ) -> None:
        library = ctypes.CDLL(path_to_so_file)
        self._allocator = native().Pluggable(
            address_of(getattr(library, alloc_fn_name)),
            address_of(getattr(library, free_fn_name)),
        )

    def allocator(self) -> Any:
        return self._allocator


def _end_pool(pool: PoolId) -> None:
    native().release_pool(pool)
    native().empty_cache(pool)


class MemPool:
    """`torch.cuda.MemPool`: segments of one allocator, and who uses them.

    With the object go the pool's free segments, and the others as soon as they are
    free and somebody empties the cache; a graph that was captured into the pool keeps
    all of them.

    Args:
        allocator: `CUDAPluggableAllocator(...)._allocator`; None is `hipMalloc`.
        use_on_oom: Accepted and not looked at, as is `no_split`.
    """

    def __init__(
        self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False
    ) -> None:
        self._id: PoolId = (0, next(_numbers))
        self._source = _hip_malloc() if allocator is None else allocator
        native().create_pool(self._id, self._source)
        # Not at the exit of the interpreter: the functions may call Python.
        weakref.finalize(self, _end_pool, self._id).atexit = False

    @property
    def id(self) -> PoolId:
        return self._id

    @property
    def allocator(self) -> Any:
        return self._source

    def use_count(self) -> int:
        """The MemPool, scopes that are open, and graphs."""
        return int(native().pool_uses(self._id))

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        """The segments by address, each a dictionary with the keys of PyTorch's."""
        return memory_snapshot(self._id)


@contextlib.contextmanager
def use_mem_pool(pool: MemPool, device: object = None) -> Iterator[None]:
    """`torch.cuda.use_mem_pool`: what this thread allocates lies in the pool.

    Raises:
        RuntimeError: A scope or a capture has the pool open.
        torch.OutOfMemoryError: By an allocation that the device has no room for.
    """
    native().begin_pool(pool.id, pool.allocator)
    try:
        with native().pool_scope(pool.id):
            yield
    finally:
        native().end_pool(pool.id)
        native().release_pool(pool.id)


def empty_cache() -> None:
    """`torch.cuda.empty_cache`: gives back free segments of pools nobody uses."""
    native().empty_cache()


def accelerator_empty_cache() -> None:
    """`torch.accelerator.empty_cache`; a function of its own, as Dynamo wants."""
    native().empty_cache()


def memory_snapshot(
    mempool_id: PoolId | None = None, include_traces: bool = True
) -> list[dict[str, Any]]:
    """`torch.cuda.memory_snapshot`: the segments of one pool, or of all."""
    segments: list[dict[str, Any]] = native().snapshot(mempool_id)
    return segments


def graph_pool_handle() -> PoolId:
    """`torch.cuda.graph_pool_handle`: a name for a pool that captures may share."""
    return 0, next(_numbers)


def capture_pool_handle() -> PoolId:
    """A name for the pool of a capture that was given none."""
    return next(_numbers), 0


def pool_of(address: int) -> PoolId | None:
    """The pool whose segment an address lies in."""
    pool: PoolId | None = native().pool_of(address)
    return pool
