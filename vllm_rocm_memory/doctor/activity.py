# SPDX-License-Identifier: Apache-2.0
"""What a GPU did meanwhile, as PyTorch's profiler has it: copies and kernels."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

COPY, KERNEL, FILL = "gpu_memcpy", "kernel", "gpu_memset"


@dataclass(frozen=True)
class Activity:
    """One thing that the GPU did.

    Attributes:
        kind: `COPY`, `KERNEL` or `FILL`.
        name: Of the kernel, or such as "Memcpy HtoD (Pinned -> Device)".
        num_bytes: That a copy moved, 0 for a kernel.
    """

    kind: str
    name: str
    num_bytes: int


def activities(work: Callable[[], object]) -> list[Activity]:
    """Do the work, wait for the GPU, and say what it did."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return [
        Activity(
            event["cat"], event["name"], int(event.get("args", {}).get("bytes", 0))
        )
        for event in events
        if event.get("cat") in (COPY, KERNEL, FILL)
    ]


def copied_bytes(seen: list[Activity], direction: str) -> int:
    """Bytes that copy engines moved in a direction, "HtoD" or "DtoH"."""
    return sum(
        each.num_bytes for each in seen if each.kind == COPY and direction in each.name
    )


def names(seen: list[Activity], kind: str) -> set[str]:
    """Names of the activities of one kind."""
    return {each.name for each in seen if each.kind == kind}
