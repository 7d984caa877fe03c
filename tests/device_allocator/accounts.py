# SPDX-License-Identifier: Apache-2.0
"""What an account of memory is held against."""

from vllm.device_allocator.sleep_report import DeviceMemory

from .simulated_gpu import memory_info


def used_bytes(device: int = 0) -> int:
    """Of the device's memory, as its driver has it."""
    free, total = memory_info(device)
    return total - free


def parts(memory: DeviceMemory) -> int:
    """The sum of what is said to add up."""
    return (
        sum(memory.tags.values())
        + memory.torch_bytes
        + memory.graph_pool_bytes
        + memory.other_pools_bytes
        + memory.rest_bytes
        + (memory.others_bytes or 0)
    )
