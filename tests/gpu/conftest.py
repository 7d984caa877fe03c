# SPDX-License-Identifier: Apache-2.0
"""The allocator of sleep mode, and what tests of several ranks have in common."""

import gc
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

# By who reduces: AITER takes the place of vLLM's own where it is enabled.
REDUCERS: Mapping[str, dict[str, str]] = {
    "vLLM": {"VLLM_ROCM_USE_AITER": "0"},
    "AITER": {"VLLM_ROCM_USE_AITER": "1", "VLLM_ROCM_USE_AITER_CUSTOM_AR": "1"},
}


@pytest.fixture(scope="module", params=REDUCERS)
def reduced_by(request: pytest.FixtureRequest) -> str:
    """Whose custom all-reduce ranks use."""
    if request.param == "AITER":
        if torch.version.hip is None:
            pytest.skip("AITER runs on AMD GPUs alone")
        if importlib.util.find_spec("aiter") is None:
            pytest.skip("AITER is not installed")
    return str(request.param)


@pytest.fixture(scope="module")
def reducer_variables(reduced_by: str) -> dict[str, str]:
    """What has ranks use it."""
    return REDUCERS[reduced_by]


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
