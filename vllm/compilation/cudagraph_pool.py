# SPDX-License-Identifier: Apache-2.0
"""Which memory pool a CUDA graph capture allocates from."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, cast

from vllm.config import VllmConfig
from vllm.device_allocator import get_mem_allocator_instance
from vllm.distributed.device_communicators.pynccl_allocator import set_graph_pool_id
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.device_allocator.cumem import CuMemAllocator

GraphPoolId = tuple[int, int]

_throwaway: ContextVar[bool] = ContextVar("throwaway_captures", default=False)


@contextmanager
def capture_outside_cumem_pool() -> Iterator[None]:
    """Keep the captures of this context out of the cuMem pool.

    For graphs that only measure memory: what they allocate goes back to PyTorch
    with them, which memory of the one long-lived cuMem pool would not.
    """
    token = _throwaway.set(True)
    try:
        yield
    finally:
        _throwaway.reset(token)


@contextmanager
def capture_pool(
    pool: GraphPoolId | None, vllm_config: VllmConfig
) -> Iterator[GraphPoolId | None]:
    """Choose the pool for a capture, and tell NCCL's allocator the same.

    Args:
        pool: The caller's own pool; None leaves the choice to PyTorch.
        vllm_config: Whose `use_cumem_cudagraph_pool` decides.

    Yields:
        The cuMem pool tagged ``cudagraph`` where sleep mode offloads graphs, else
        `pool`.

    """
    if not vllm_config.use_cumem_cudagraph_pool or _throwaway.get():
        set_graph_pool_id(pool or current_platform.graph_pool_handle())
        yield pool
        return
    allocator = cast("CuMemAllocator", get_mem_allocator_instance())
    with allocator.cudagraph_pool() as cumem_pool:
        set_graph_pool_id(cumem_pool)
        yield cumem_pool
