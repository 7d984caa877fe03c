# SPDX-License-Identifier: Apache-2.0
"""vLLM's worker on a GPU that it shares with the other ranks of its engine.

NCCL refuses two ranks of one host on one GPU. Here each rank is a host of its own to
it, which reaches the others through the loopback device. vLLM's custom all-reduce asks
whether the ranks' GPUs reach each other's memory: one GPU reaches its own.
"""

import os
from typing import Any

from vllm.distributed.device_communicators import custom_all_reduce
from vllm.v1.worker.gpu_worker import Worker


def share_gpu(rank: int) -> None:
    """Have this process be a rank on a GPU that other ranks use too."""
    os.environ["NCCL_HOSTID"] = f"rank-{rank}"
    assert hasattr(custom_all_reduce, "_can_p2p"), "vLLM asks otherwise"
    vars(custom_all_reduce)["_can_p2p"] = lambda rank, world_size: True


class SharingWorker(Worker):
    """Whatever its rank, on the first GPU."""

    def __init__(self, **options: Any) -> None:
        share_gpu(options["rank"])
        super().__init__(**{**options, "local_rank": 0})
