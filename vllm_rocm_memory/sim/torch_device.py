# SPDX-License-Identifier: Apache-2.0
"""PyTorch's device, over the HIP simulator.

Note [A device whose kernels are host code]
PyTorch's CPU build has the classes of `torch.cuda` but nothing behind them. What is
here stands in for them on hipsim: streams and events are the simulator's, and what is
queued on a stream runs on the stream's own thread, later than the call. Kernels are
different: they are PyTorch's CPU kernels, they run in the calling thread and are done
when they return. The current stream is therefore the NULL stream unless
`torch.cuda.stream` says otherwise, and an event recorded on it waits for nothing
unless something else was queued there. Entering `torch.cuda.stream` waits for the
stream, since a kernel called inside it comes after what the stream already holds.

Streams and events are in `torch_stream`, device memory and its pools are in
`torch_memory_pool`, graphs in `torch_graph`. Nothing in them needs vLLM.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from vllm_rocm_memory.sim import hipsim, torch_graph, torch_memory_pool
from vllm_rocm_memory.sim.torch_memory_pool import device_memory, host_memory
from vllm_rocm_memory.sim.torch_stream import (
    Event,
    Stream,
    call,
    current_stream,
    default_stream,
    set_stream,
    stream,
)

__all__ = [
    "Cudart",
    "CudartError",
    "Event",
    "Stream",
    "current_device_index",
    "current_stream",
    "default_stream",
    "device_memory",
    "get_memory_info",
    "host_memory",
    "install",
    "process_bytes",
    "set_stream",
    "stream",
    "synchronize",
]


def synchronize(device: object = None) -> None:
    """Waits for everything that is queued on the device."""
    call("hipDeviceSynchronize")


def _accelerator_synchronize(device: object = None) -> None:
    # Dynamo has a table of functions, in which torch.cuda.synchronize and this one
    # need an entry each.
    synchronize(device)


def get_memory_info(device: object = None) -> tuple[int, int]:
    """Free and total bytes of the simulated device."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("hipMemGetInfo", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def current_device_index() -> int:
    """The simulated device's, which is the only one."""
    return 0


def process_bytes(device: object = None) -> int:
    """Bytes of the simulated device that this process has; no other has any."""
    free, total = get_memory_info(device)
    return total - free


class CudartError:
    """What a call of `torch.cuda.cudart()` returns; 0 is success."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __str__(self) -> str:
        return str(hipsim.load().hipGetErrorName(self.value).decode())


class Cudart:
    """`torch.cuda.cudart()`: the calls that register host memory."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> CudartError:
        return CudartError(hipsim.load().hipHostRegister(address, size, flags))

    def cudaHostUnregister(self, address: int) -> CudartError:
        return CudartError(hipsim.load().hipHostUnregister(address))


def install() -> Callable[[], None]:
    """Puts the simulated device in place of PyTorch's; returns what takes it back."""
    memory = {
        "MemPool": torch_memory_pool.MemPool,
        "use_mem_pool": torch_memory_pool.use_mem_pool,
        "empty_cache": torch_memory_pool.empty_cache,
        "memory_snapshot": torch_memory_pool.memory_snapshot,
    }
    graphs = {
        "CUDAGraph": torch_graph.CUDAGraph,
        "graph": torch_graph.graph,
        "graph_pool_handle": torch_memory_pool.graph_pool_handle,
        "is_current_stream_capturing": torch_graph.is_current_stream_capturing,
    }
    cuda = {
        "Event": Event,
        "Stream": Stream,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "stream": stream,
        "synchronize": synchronize,
        "cudart": Cudart,
    }
    accelerator = {
        "synchronize": _accelerator_synchronize,
        "empty_cache": torch_memory_pool.accelerator_empty_cache,
        "get_memory_info": get_memory_info,
        "current_device_index": current_device_index,
    }
    pluggable = torch_memory_pool.CUDAPluggableAllocator
    places: list[tuple[Any, dict[str, Any]]] = [
        (torch, {"Event": Event}),
        (torch.cuda, cuda | memory | graphs),
        (torch.cuda.memory, memory | {"CUDAPluggableAllocator": pluggable}),
        # torch.cuda.graph is a class there, and not the module that it is in.
        (torch.cuda.graphs, graphs),
        (torch.accelerator, accelerator),
    ]
    originals = [
        (owner, name, getattr(owner, name)) for owner, names in places for name in names
    ]
    for owner, names in places:
        for name, replacement in names.items():
            setattr(owner, name, replacement)

    def uninstall() -> None:
        for owner, name, original in originals:
            setattr(owner, name, original)

    return uninstall
