# SPDX-License-Identifier: Apache-2.0
"""The allocator of sleep mode for the tests of this folder."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def allocator() -> Iterator[Any]:
    """The allocator, mapped, and without memory of an earlier test's tensors."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.get_instance()
    yield allocator
    allocator.wake_up()
    gc.collect()
    for tag in set(allocator.allocator_and_pools) - {"cudagraph"}:
        with allocator.use_memory_pool(tag):  # trims the pools of the tag
            pass
    allocator.trim_host_memory()
