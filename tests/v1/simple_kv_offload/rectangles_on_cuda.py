# SPDX-License-Identifier: Apache-2.0
"""Rectangles through the CUDA driver's functions; run by ``test_rectangle_copies``."""

from __future__ import annotations

import ctypes
import sys
from enum import IntEnum
from types import ModuleType, SimpleNamespace

import torch
from vllm.v1.simple_kv_offload import cuda_mem_ops
from vllm.v1.simple_kv_offload.copy_engine import CopyEngine
from vllm.v1.simple_kv_offload.copy_errors import BatchCopyError

from vllm_rocm_memory.sim import cudasim

LAYERS, BLOCKS, PAGE = 6, 8, 300
INVALID_VALUE = 1


def use_driver() -> ctypes.CDLL:
    """The simulated driver, as ``cuda.bindings`` and torch would offer it."""
    lib, context = cudasim.load(), ctypes.c_void_p()
    cudasim.configure(host_reads="allow")
    cudasim.check(lib.cuInit(0), "cuInit")
    retained = lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    cudasim.check(retained, "cuDevicePrimaryCtxRetain")
    cudasim.check(lib.cuCtxSetCurrent(context), "cuCtxSetCurrent")

    class CUresult(IntEnum):
        CUDA_SUCCESS = 0
        CUDA_ERROR_INVALID_VALUE = 1

    def look_up(name: bytes, version: int, flags: int) -> tuple[CUresult, int, int]:
        address, found = ctypes.c_void_p(), ctypes.c_uint()
        out = ctypes.byref(address), version, flags, ctypes.byref(found)
        cudasim.check(lib.cuGetProcAddress_v2(name, *out), "cuGetProcAddress")
        return CUresult.CUDA_SUCCESS, address.value or 0, 0

    bindings = ModuleType("cuda.bindings")
    bindings.driver = SimpleNamespace(CUresult=CUresult, cuGetProcAddress=look_up)
    sys.modules |= {"cuda": ModuleType("cuda"), "cuda.bindings": bindings}
    cuda_mem_ops.current_platform = SimpleNamespace(is_rocm=lambda: False)
    return lib


def main() -> None:
    lib = use_driver()
    size, block = LAYERS * BLOCKS * PAGE, LAYERS * PAGE
    address = ctypes.c_ulonglong()
    cudasim.check(lib.cuMemAlloc_v2(ctypes.byref(address), size), "cuMemAlloc")
    memory = (ctypes.c_uint8 * size).from_address(address.value)
    device = torch.frombuffer(memory, dtype=torch.uint8)
    device.copy_(torch.randint(1, 256, (size,), dtype=torch.uint8))
    host = torch.zeros(size, dtype=torch.uint8)
    cudasim.check(lib.cuMemHostRegister_v2(host.data_ptr(), size, 0), "cuMemHostReg")
    layers, blocks = device.view(LAYERS, BLOCKS, PAGE), host.view(BLOCKS, LAYERS, PAGE)
    gpu = {f"layer.{i}": layers[i] for i in range(LAYERS)}
    cpu = {f"layer.{i}": blocks[:, i] for i in range(LAYERS)}
    handle = ctypes.c_void_p()
    cudasim.check(lib.cuStreamCreate(ctypes.byref(handle), 1), "cuStreamCreate")
    stream = SimpleNamespace(cuda_stream=handle.value)

    def move(params, src, dst) -> None:
        cuda_mem_ops.copy_blocks(src, dst, params)
        cudasim.check(lib.cuStreamSynchronize(handle), "cuStreamSynchronize")

    store = cuda_mem_ops.build_params(gpu, cpu, stream, 1, direction="store")
    load = cuda_mem_ops.build_params(cpu, gpu, stream, direction="load")
    assert store.engine is load.engine is CopyEngine.RECT
    assert cuda_mem_ops.describe_copies(load) == (
        "cuMemcpy2DAsync, 1 rectangle and 0 pages a block; for pages "
        "cuMemcpyBatchAsync, flags 0x0, numAttrs 1, any number of copies a call"
    )
    before = layers.clone()
    move(store, [0, 7, 3], [5, 2, 1])
    assert torch.equal(blocks[[5, 2, 1]].transpose(0, 1), before[:, [0, 7, 3]])
    assert not blocks[[0, 3, 4, 6, 7]].any()
    move(load, [5, 2, 1], [1, 2, 4])
    before[:, [1, 2, 4]] = before[:, [0, 7, 3]]
    assert torch.equal(layers, before)
    stats = cudasim.stats()
    assert stats.calls["cuMemcpy2DAsync_v2"] == stats.pitched_copies == 6
    assert stats.pitched_bytes == 6 * block
    assert stats.calls["cuMemcpyBatchAsync"] == stats.staged_copies == 0

    cudasim.fail("cuMemcpy2DAsync_v2", 2, INVALID_VALUE)
    try:
        move(load, [5, 2, 1], [0, 3, 6])
    except BatchCopyError as error:
        said = str(error)
    assert said == (
        "KV load: cuMemcpy2DAsync_v2 returned CUDA_ERROR_INVALID_VALUE (1) for "
        "rectangle 1 of 3, regions 'layer.0' to 'layer.5' (6), block 2 to 3"
    ), said
    cudasim.check(lib.cuStreamSynchronize(handle), "cuStreamSynchronize")

    irregular = {name: gpu[name] for name in ("layer.0", "layer.1", "layer.4")}
    pages = {name: cpu[name] for name in irregular}
    batch = cuda_mem_ops.build_params(irregular, pages, stream, direction="store")
    move(batch, [6, 2], [0, 7])
    assert torch.equal(blocks[[0, 7], 4], layers[4, [6, 2]])
    print("ok")


if __name__ == "__main__":
    main()
