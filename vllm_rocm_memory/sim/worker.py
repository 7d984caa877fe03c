# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker with its KV cache in simulated device memory."""

from contextlib import AbstractContextManager, nullcontext

# Before anything else of vLLM's worker: it puts placeholders over torch.cuda.
from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip

import torch
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.platforms import current_platform
from vllm.v1.simple_kv_offload import cuda_mem_ops, worker

from vllm_rocm_memory.sim import torch_device
from vllm_rocm_memory.sim.hipsim_platform import RocmView


class HipsimWorker(CPUWorker):
    """Each worker process has a simulated device of its own.

    Device memory holds the KV cache. Weights and activations stay in host memory.
    """

    def init_device(self) -> None:
        super().init_device()  # type: ignore[no-untyped-call]
        # After the model runner was made: that puts no-ops over torch.accelerator.
        torch_device.install()
        vars(cuda_mem_ops)["current_platform"] = RocmView(current_platform)
        # Pinned memory for the host tier alone. The rest of vLLM would take it from
        # PyTorch's pinned allocator, which the CPU build does not have.
        vars(worker)["PIN_MEMORY"] = True
        self._use_asynchronous_outputs()

    def _use_asynchronous_outputs(self) -> None:
        # The runner was made while placeholders stood over torch.cuda.
        runner = self.model_runner
        if runner.use_async_scheduling:
            runner.async_output_copy_stream = None  # made when first needed
            runner.prepare_inputs_event = torch.cuda.Event()

    def shutdown(self) -> None:
        # As vLLM's GPU worker does, and its CPU worker does not.
        ensure_kv_transfer_shutdown()
        super().shutdown()

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        # Not "runtime": the connector allocates its host tier inside that one.
        return torch_device.device_memory() if tag == "kv_cache" else nullcontext()
