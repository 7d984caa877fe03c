# SPDX-License-Identifier: Apache-2.0
"""Captured graphs and the memory that sleeps under them."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import vllm.distributed.device_communicators.pynccl_allocator as nccl_allocator
from vllm.compilation.cudagraph_pool import capture_outside_cumem_pool, capture_pool
from vllm.device_allocator.sleep_mode_backend import CuMemBackend
from vllm.v1.worker.workspace import WorkspaceManager

COUNT = 1 << 20
ON = SimpleNamespace(use_cumem_cudagraph_pool=True)
OFF = SimpleNamespace(use_cumem_cudagraph_pool=False)


def graph_memory(allocator) -> dict[int, int]:
    """Mapped bytes of the graph pool by address."""
    return {
        address: data.handle[1]
        for address, data in allocator.pointer_to_data.items()
        if data.tag == "cudagraph" and not data.is_asleep
    }


def test_a_graph_reads_what_the_wake_restored(allocator, device):
    with allocator.use_memory_pool("weights"):
        weight = torch.full((COUNT,), 2.0, device=device.type)
    with allocator.use_memory_pool("kv_cache"):
        cache = torch.zeros(COUNT, device=device.type)
    x = torch.ones(COUNT, device=device.type)
    x * weight
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * weight
        cache.copy_(y)
    for value in (3.0, 5.0):
        allocator.sleep("weights")
        allocator.wake_up()
        x.fill_(value)
        graph.replay()
        torch.accelerator.synchronize()
        assert torch.all(y == 2 * value) and torch.all(cache == 2 * value)


@pytest.mark.parametrize(
    ("config", "context"),
    [(OFF, nullcontext), (ON, capture_outside_cumem_pool)],
    ids=["off by default", "throw-away graphs"],
)
def test_other_captures_keep_their_own_pool(allocator, device, config, context):
    handle = torch.cuda.graph_pool_handle()
    with context(), capture_pool(handle, config) as pool:
        assert pool == handle == nccl_allocator._graph_pool_id
        graph = torch.cuda.CUDAGraph()
        x = torch.ones(COUNT, device=device.type)
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.Stream()):
            x + 1
    assert graph_memory(allocator) == {}


@pytest.mark.parametrize("level", [1, 2])
def test_cudagraph_pool_sleep(allocator, device, level):
    """The graphs' memory is kept at both levels, and any wake brings it back."""
    own_pool = torch.cuda.graph_pool_handle()
    with allocator.use_memory_pool("weights"):
        matrix = torch.eye(512, device=device.type) * 2
    steps = torch.ones(8, 512, device=device.type)
    steps @ matrix  # makes cuBLAS's handle, which a capture cannot
    graph = torch.cuda.CUDAGraph()
    with capture_pool(own_pool, ON) as shared:
        assert shared == nccl_allocator._graph_pool_id != own_pool
        with torch.cuda.graph(graph, pool=shared, stream=torch.cuda.Stream()):
            bias = torch.empty(512, device=device.type)
            result = torch.addmm(bias, steps, matrix)
    # After the capture, so that only a backup has what replays add.
    bias.copy_(torch.arange(512))
    memory = graph_memory(allocator)
    assert memory
    for factor in (1.0, 4.0):
        CuMemBackend().suspend(level=level)
        assert graph_memory(allocator) == {}
        CuMemBackend().resume(tags=["kv_cache"])
        assert graph_memory(allocator) == memory
        CuMemBackend().resume(tags=["weights"])
        if level == 2:
            matrix.copy_(torch.eye(512) * 2)  # as a reload does
        steps.fill_(factor)
        graph.replay()
        torch.accelerator.synchronize()
        right = torch.arange(512) + 2 * factor
        assert torch.equal(result.cpu(), right.expand(8, 512).to(result.dtype))


def test_workspaces_are_discarded_and_stay_where_graphs_know_them(allocator, device):
    manager = WorkspaceManager(
        torch.device(device.type),
        alloc_context=lambda: allocator.use_memory_pool("workspace"),
    )
    size = 32 << 20
    (scratch,) = manager.get_simultaneous(((size,), torch.uint8))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scratch.add_(1)
    address = scratch.data_ptr()
    CuMemBackend().suspend(level=1)
    assert all(
        data.cpu_backup_tensor is None for data in allocator.pointer_to_data.values()
    )
    CuMemBackend().resume(tags=["kv_cache"])
    scratch.zero_()
    graph.replay()
    torch.accelerator.synchronize()
    assert scratch.data_ptr() == address and torch.all(scratch == 1)
    (bigger,) = manager.get_simultaneous(((2 * size,), torch.uint8))
    graph.reset()
    del scratch
    (biggest,) = manager.get_simultaneous(((4 * size,), torch.uint8))
    usage = sum(data.handle[1] for data in allocator.pointer_to_data.values())
    assert usage == bigger.nbytes + biggest.nbytes, "what was outgrown is given back"
