# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker with its memory in a simulated device."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

# Before anything else of vLLM's worker: it puts placeholders over torch.cuda.
from vllm.v1.worker import cpu_worker  # isort: skip

import torch
import vllm.device_allocator
from vllm import _custom_ops
from vllm.device_allocator import process_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.distributed.kv_transfer.kv_connector.v1 import simple_cpu_offload_connector
from vllm.platforms import current_platform
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.simple_kv_offload import cuda_mem_ops
from vllm.v1.simple_kv_offload import worker as offload_worker
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.worker_base import CompilationTimes
from vllm.v1.worker.workspace import init_workspace_manager

from vllm_rocm_memory.sim import torch_device
from vllm_rocm_memory.sim.hipsim_platform import RocmView
from vllm_rocm_memory.sim.model_runner import HipsimModelRunner, allow_graphs

_DEVICE_MEMORY_MODULES = (vllm.device_allocator, cuda_mem_ops, gpu_worker)


class OffloadWorker(offload_worker.SimpleCPUOffloadWorker):
    """Its host tier is made inside the pool of runtime state, and is host memory.

    On a GPU that pool takes no CPU tensors.
    """

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        with torch_device.host_memory():
            super().register_kv_caches(kv_caches)


class HipsimWorker(cpu_worker.CPUWorker):
    """Each worker process has a simulated device of its own.

    With sleep mode weights, KV cache, workspace, runtime state and graphs lie in the
    device's memory as on a GPU. Without it only the KV cache does.
    """

    def init_device(self) -> None:
        vars(cpu_worker)["CPUModelRunner"] = HipsimModelRunner
        super().init_device()  # type: ignore[no-untyped-call]
        # After the model runner was made: that puts no-ops over torch.accelerator.
        torch_device.install()
        allow_graphs()
        for module in _DEVICE_MEMORY_MODULES:
            vars(module)["current_platform"] = RocmView(current_platform)
        vars(process_memory)["process_bytes"] = torch_device.process_bytes
        # oneDNN packs weights into memory of its own, which never sleeps, and vLLM
        # keeps its address in a tensor that sleep discards.
        vars(_custom_ops)["_supports_onednn"] = False
        # Pinned memory for the host tier alone. The rest of vLLM would take it from
        # PyTorch's pinned allocator, which the CPU build does not have.
        vars(offload_worker)["PIN_MEMORY"] = True
        vars(simple_cpu_offload_connector)["SimpleCPUOffloadWorker"] = OffloadWorker
        self._use_asynchronous_outputs()
        init_workspace_manager(
            torch.device("cpu"),
            num_ubatches=1,
            alloc_context=lambda: self._maybe_get_memory_pool_context("workspace"),
        )

    def _use_asynchronous_outputs(self) -> None:
        # The runner was made while placeholders stood over torch.cuda.
        runner = self.model_runner
        if runner.use_async_scheduling:
            runner.async_output_copy_stream = None  # made when first needed
            runner.prepare_inputs_event = torch.cuda.Event()

    def compile_or_warm_up_model(self) -> CompilationTimes:
        times = super().compile_or_warm_up_model()
        if not self.model_config.enforce_eager:
            self.model_runner.capture_model()
        # As vLLM's GPU worker does: sleep and wake collect garbage.
        freeze_gc_heap()
        return times

    sleep = gpu_worker.Worker.sleep
    wake_up = gpu_worker.Worker.wake_up
    discard = gpu_worker.Worker.discard

    def synchronize_device(self) -> None:
        torch.accelerator.synchronize()

    def shutdown(self) -> None:
        # As vLLM's GPU worker does, and its CPU worker does not.
        ensure_kv_transfer_shutdown()
        super().shutdown()

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        if self.model_config.enable_sleep_mode:
            return super()._maybe_get_memory_pool_context(tag)
        return torch_device.device_memory() if tag == "kv_cache" else nullcontext()

    @contextmanager
    def _scoped_allocator_max_split(self, max_split_size_mb: int) -> Iterator[None]:
        # An option of PyTorch's GPU allocator, which is not there.
        yield
