# SPDX-License-Identifier: Apache-2.0
"""Copies of KV blocks on a real GPU: every byte arrives, and a copy engine moves it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.simple_kv_offload.copy_engine import CopyEngine
from vllm.v1.simple_kv_offload.cuda_mem_ops import (
    BatchMemcpyParams,
    build_params,
    copy_blocks,
)
from vllm.v1.simple_kv_offload.host_cache import allocate_host_cache

from vllm_rocm_memory.doctor.activity import (
    FILL,
    KERNEL,
    activities,
    copied_bytes,
    names,
)

KIB = 1024
GPU_BLOCKS, CPU_BLOCKS = 96, 64
# Layers and bytes of a page: of a plain model, of one whose layers have two sizes (131
# regions), of latent attention and its scales, of few large pages.
LAYOUTS = {
    "8 x 16 KiB": ((8, 16 * KIB),),
    "71 x 16 KiB + 60 x 32 KiB": ((71, 16 * KIB), (60, 32 * KIB)),
    "5 x 656 B + 3 x 1152 B + 1 x 132 B": ((5, 656), (3, 1152), (1, 132)),
    "4 x 1 MiB": ((4, 1024 * KIB),),
}
ROUNDS = 6

each_engine = pytest.mark.parametrize("engine", [CopyEngine.RECT, CopyEngine.BATCH])
each_direction = pytest.mark.parametrize("direction", ["store", "load"])
seen_by_torch = pytest.mark.skipif(
    torch.version.hip is not None,
    reason="PyTorch's profiler does not show HIP's copy kernels; test_hip_runtime.py "
    "asks rocprofv3",
)


class Caches:
    """A KV cache on the GPU and a registered one on the host, full of random bytes."""

    def __init__(self, layout: str, engine: CopyEngine) -> None:
        self.gpu: dict[str, torch.Tensor] = {}
        for layers, page in LAYOUTS[layout]:
            shape = layers, GPU_BLOCKS, page
            memory = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
            for layer in memory:
                self.gpu[f"layer.{len(self.gpu)}"] = layer
        self.cpu = allocate_host_cache(
            self.gpu, CPU_BLOCKS, block_after_block=engine is CopyEngine.RECT
        )
        for cache in self.cpu.values():
            cache.random_(0, 256)
        self.engine = engine
        self.stream = torch.cuda.Stream()

    @property
    def block_bytes(self) -> int:
        return sum(cache[0].nbytes for cache in self.gpu.values())

    def ways(self, direction: str) -> tuple[dict[str, torch.Tensor], ...]:
        """Source and destination."""
        return (self.gpu, self.cpu) if direction == "store" else (self.cpu, self.gpu)

    def params(self, direction: str) -> BatchMemcpyParams:
        params = build_params(
            *self.ways(direction), self.stream, direction=direction, engine=self.engine
        )
        assert params.engine is self.engine, params.note
        return params


def blocks_of(direction: str, number: int) -> tuple[list[int], list[int]]:
    """Source and destination blocks of a transfer: random ones, and whole runs."""
    rng = np.random.default_rng(number)
    count = (1, 7, 32, CPU_BLOCKS, 13, 2)[number % ROUNDS]
    gpu = rng.permutation(GPU_BLOCKS)[:count].tolist()
    cpu = rng.permutation(CPU_BLOCKS)[:count].tolist()
    if number % 2:
        gpu = list(range(GPU_BLOCKS - count, GPU_BLOCKS))
        cpu = list(range(count))
    return (gpu, cpu) if direction == "store" else (cpu, gpu)


@pytest.mark.parametrize("layout", LAYOUTS)
@each_engine
@each_direction
def test_every_byte_arrives_and_no_other_changes(layout, engine, direction):
    caches = Caches(layout, engine)
    params = caches.params(direction)
    source, target = caches.ways(direction)
    unchanged = {name: cache.cpu().clone() for name, cache in source.items()}
    expected = {name: cache.cpu().clone() for name, cache in target.items()}
    torch.cuda.synchronize()
    for number in range(ROUNDS):
        src, dst = blocks_of(direction, number)
        copy_blocks(src, dst, params)
        caches.stream.synchronize()
        for name, cache in target.items():
            expected[name][dst] = unchanged[name][src]
            assert torch.equal(cache.cpu(), expected[name]), (name, number)
    for name, cache in source.items():
        assert torch.equal(cache.cpu(), unchanged[name]), name


@seen_by_torch
@pytest.mark.parametrize("layout", LAYOUTS)
@each_engine
@each_direction
def test_copy_engines_move_every_byte(layout, engine, direction):
    caches = Caches(layout, engine)
    params = caches.params(direction)
    src, dst = blocks_of(direction, 2)
    copy_blocks(src, dst, params)
    seen = activities(lambda: copy_blocks(src, dst, params))
    there, back = ("DtoH", "HtoD") if direction == "store" else ("HtoD", "DtoH")
    assert names(seen, KERNEL) | names(seen, FILL) == set()
    assert copied_bytes(seen, there) == len(src) * caches.block_bytes
    assert copied_bytes(seen, back) == 0


@seen_by_torch
@each_direction
def test_a_copy_that_a_kernel_makes_is_seen_as_one(direction):
    """The control for the test above."""
    pytest.importorskip("triton", reason="needs Triton for a kernel that copies")
    from kv_copy_interference import KernelCopier, Transfer

    caches = Caches("8 x 16 KiB", CopyEngine.RECT)
    copier = KernelCopier(
        SimpleNamespace(gpu=caches.gpu, cpu=caches.cpu, stream=caches.stream), 32
    )
    src, dst = blocks_of(direction, 2)
    gpu, cpu = (src, dst) if direction == "store" else (dst, src)
    transfer = Transfer(gpu, cpu)
    copier.prepare([transfer])
    copier.copy(direction, transfer)
    source, target = caches.ways(direction)
    torch.cuda.synchronize()
    for name, cache in target.items():
        assert torch.equal(cache[dst].cpu(), source[name][src].cpu()), name
    seen = activities(lambda: copier.copy(direction, transfer))
    assert any("copy_pages" in name for name in names(seen, KERNEL))
    assert copied_bytes(seen, "HtoD") == copied_bytes(seen, "DtoH") == 0
