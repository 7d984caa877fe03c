# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU platform with a simulated ROCm device for its memory.

Note [Half a ROCm platform]
Kernels, dtypes, attention and communication are those of vLLM's CPU build, and the
platform says so: were `is_rocm()` true everywhere, vLLM would import the platform of
AMD GPUs and put tensors on `cuda:N`. Only the modules that talk to device memory see
ROCm, through a `RocmView` in place of their own `current_platform`.
"""

import os
from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class HipsimPlatform(CpuPlatform):
    """CPU kernels, device memory in hipsim."""

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        parallel_config = vllm_config.parallel_config
        if parallel_config.worker_cls == "auto":
            parallel_config.worker_cls = "vllm_rocm_memory.sim.worker.HipsimWorker"
        ranks = parallel_config.world_size_across_dp
        if ranks > 1:
            # By itself vLLM gives each rank a NUMA node, and few machines have two.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", share_cpus(ranks))
        # A GPU's engine loop, which vLLM's CPU platform turns off.
        scheduler_config = vllm_config.scheduler_config
        is_async = scheduler_config.async_scheduling
        super().check_and_update_config(vllm_config)
        scheduler_config.async_scheduling = is_async


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
