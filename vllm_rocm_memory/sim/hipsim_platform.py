# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU platform with a simulated ROCm device for its memory.

Note [Half a ROCm platform]
Kernels, dtypes, attention and communication are those of vLLM's CPU build, and the
platform says so: were `is_rocm()` true everywhere, vLLM would import the platform of
AMD GPUs and put tensors on `cuda:N`. Only the modules that talk to device memory see
ROCm, through a `RocmView` in place of their own `current_platform`.

Note [What a simulated graph can hold]
A graph of `torch_graph` holds the operators that PyTorch's dispatcher saw, and runs
them again. Attention is one such operator, which takes its metadata from the forward
context: a replay reads those of the step it is part of, where a GPU's graph reads
buffers that the step has filled. So all three capture modes work, FULL too, although
CPU attention plans each step in a tensor whose size depends on the batch and which no
real graph could read again. What a compiler makes of a model calls no operators, and
a graph of it would be empty: with inductor there are no graphs.
"""

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class HipsimPlatform(CpuPlatform):
    """CPU kernels, device memory in hipsim."""

    device_name = "the HIP simulator"

    def is_sleep_mode_available(self) -> bool:
        return True

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return True

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        return "vllm.compilation.cuda_graph.CUDAGraphWrapper"

    @classmethod
    def graph_pool_handle(cls) -> tuple[int, int]:
        handle: tuple[int, int] = torch.cuda.graph_pool_handle()
        return handle

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        parallel_config = vllm_config.parallel_config
        if parallel_config.worker_cls == "auto":
            parallel_config.worker_cls = "vllm_rocm_memory.sim.worker.HipsimWorker"
        ranks = parallel_config.world_size_across_dp
        if ranks > 1:
            # By itself vLLM gives each rank a NUMA node, and few machines have two.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", share_cpus(ranks))
        model_config = vllm_config.model_config
        if model_config is not None and model_config.enable_sleep_mode:
            # As vLLM does by itself on a GPU.
            model_config.enable_cumem_allocator = True
        # A GPU's engine loop and graphs, which vLLM's CPU platform turns off.
        scheduler_config = vllm_config.scheduler_config
        is_async = scheduler_config.async_scheduling
        graphs = _Graphs(vllm_config)
        super().check_and_update_config(vllm_config)
        scheduler_config.async_scheduling = is_async
        graphs.restore()


class _Graphs:
    """What the configuration says of graphs before the CPU platform changes it."""

    def __init__(self, vllm_config: "VllmConfig") -> None:
        self._config = config = vllm_config.compilation_config
        self._sizes = config.cudagraph_capture_sizes
        self._compiles = (config.mode, config.backend)

    def restore(self) -> None:
        """See Note [What a simulated graph can hold]."""
        from vllm.config import CompilationMode, CUDAGraphMode

        config = self._config
        mode, backend = self._compiles
        if mode == CompilationMode.VLLM_COMPILE and backend == "eager":
            config.mode, config.backend = mode, backend
        # Passes of GPU builds, which come with graphs.
        for field in dataclasses.fields(config.pass_config):
            if field.name.startswith(("fuse_", "enable_")):
                setattr(config.pass_config, field.name, False)
        if config.mode == CompilationMode.NONE or config.backend == "eager":
            config.cudagraph_capture_sizes = self._sizes
            return
        config.cudagraph_mode = CUDAGraphMode.NONE
        config.max_cudagraph_capture_size = 0


def share_cpus(ranks: int) -> str:
    """A share of this process's CPUs for each rank, as vLLM reads it: `0,2|1,3`."""
    cpus = sorted(os.sched_getaffinity(0))
    shares = [cpus[rank::ranks] or [cpus[rank % len(cpus)]] for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)


class RocmView:
    """A platform as the modules that talk to device memory see it: ROCm."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform

    def is_rocm(self) -> bool:
        return True

    def is_cuda_alike(self) -> bool:
        return True

    def is_cpu(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)
