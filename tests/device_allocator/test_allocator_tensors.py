# SPDX-License-Identifier: Apache-2.0
"""The allocator under PyTorch's pools and tensors, on the simulated device."""

import gc
import subprocess
import sys
import threading

import pytest
import torch
from vllm.device_allocator import cumem
from vllm.device_allocator.cumem import CuMemAllocator

from vllm_rocm_memory import serve
from vllm_rocm_memory.sim import hipsim

from .simulated_gpu import IS_HIP

DEADLINE = 30  # seconds

pytestmark = pytest.mark.skipif(not IS_HIP, reason="PyTorch's device is HIP's here")


def test_pools_that_go_during_a_sleep(
    allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with allocator.use_memory_pool("weights"):
        weights = [torch.ones(1 << 20) for _ in range(3)]
    with allocator.use_memory_pool("kv_cache"):
        cache = torch.ones(1 << 20)
    kept = allocator.get_current_usage()

    def let_go() -> None:
        weights.clear()
        del allocator.allocator_and_pools["weights"]
        gc.collect()

    def in_another_thread(needed: int) -> None:
        thread = threading.Thread(target=let_go, daemon=True)
        thread.start()
        thread.join(DEADLINE)
        assert not thread.is_alive()
        assert allocator.get_current_usage() == kept

    monkeypatch.setattr(cumem, "check_host_capacity", in_another_thread)
    allocator.sleep(("weights",))
    (left,) = allocator.pointer_to_data.values()
    assert left.tag == "kv_cache" and left.is_asleep
    assert hipsim.stats().mapped_bytes == hipsim.stats().handle_bytes == 0
    allocator.wake_up()
    assert not cache.any()


def test_a_pool_runs_out_of_memory(allocator: CuMemAllocator) -> None:
    with allocator.use_memory_pool("weights"):
        weights = torch.arange(1 << 20)
        before = dict(allocator.pointer_to_data)
        hipsim.fail("hipMemCreate", 1, 2)
        hipsim.fail("hipMemCreate", 2, 2)
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(8 << 20)
        assert allocator.pointer_to_data == before
        hipsim.fail("hipMemSetAccess", 1, 999)
        with pytest.raises(RuntimeError, match=r"hipMemSetAccess.*999"):
            torch.ones(8 << 20)
        assert allocator.pointer_to_data == before
        more = torch.ones(8 << 20)
    allocator.sleep("weights")
    allocator.wake_up()
    assert torch.equal(weights, torch.arange(1 << 20))
    assert more.sum() == 8 << 20


def test_a_loader_leaves_nothing_of_its_work(allocator: CuMemAllocator) -> None:
    with allocator.use_memory_pool("weights"):
        wide = torch.full((8 << 20,), 3.0)
        narrow = torch.empty(8 << 20, dtype=torch.uint8)
        narrow.copy_(wide)
        del wide
    mapped = hipsim.stats().mapped_bytes
    assert mapped == allocator.get_current_usage() < 4 * narrow.nbytes
    allocator.sleep("weights")
    allocator.wake_up()
    assert hipsim.stats().mapped_bytes == mapped
    assert narrow.eq(3).all()


EXIT = """
import torch
from vllm_rocm_memory.sim import hipsim, torch_device

hipsim.load()
torch_device.install()
hipsim.configure(host_reads="allow")
from vllm.device_allocator.cumem import CuMemAllocator

allocator = CuMemAllocator.get_instance()
with allocator.use_memory_pool("weights"):
    weights = torch.ones(1 << 20)
with allocator.use_memory_pool("kv_cache"):
    cache = torch.ones(1 << 20)
graph = torch.cuda.CUDAGraph()
stream = torch.cuda.Stream()
with allocator.cudagraph_pool() as pool:
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        result = weights + cache
allocator.sleep(("weights", "cudagraph"))
allocator.wake_up(["kv_cache"])
print(allocator.get_current_usage())
"""


def test_a_process_ends_with_everything_left() -> None:
    """Tensors, pools, a graph and a backup, partly asleep."""
    if not serve.is_cpu_build():
        pytest.skip("the simulator runs with vLLM's CPU build")
    child = subprocess.run(
        [sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr
    assert int(child.stdout.splitlines()[-1]) > 0
    for word in ("Traceback", "cumem:", "terminate", "ERROR"):
        assert word not in child.stderr
