# SPDX-License-Identifier: Apache-2.0
"""What a rank does to show how vLLM's own all-reduces capture.

For rank processes; the tests are in test_own_all_reduce.py. Groups, CudaCommunicator,
CustomAllreduce, QuickAllReduce, the pool of the capture and sleep mode are vLLM's.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from vllm_rocm_memory.sim import hipsim

from . import custom_ar_double, rocm_machine
from .ranks import Rank

QUICK = "QuickAllReduce"
CUSTOM = "CustomAllreduce"

# Of the input, by what reduces it: QuickReduce takes no less than 1 MiB of float16.
_SHAPES = {CUSTOM: (64, 128), QUICK: (1 << 10, 1 << 9)}

_OWN = {
    "VLLM_ROCM_USE_AITER_CUSTOM_AR": "0",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "FP",
    # By default it has room for 2 GiB, of which the simulator's device has few.
    "VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB": "4",
}


@contextlib.contextmanager
def _without_aiter() -> Iterator[None]:
    from vllm._aiter_ops import rocm_aiter_ops

    operators: Any = rocm_aiter_ops
    try:
        with mock.patch.dict(os.environ, _OWN):
            operators.refresh_env_variables()
            yield
    finally:
        operators.refresh_env_variables()


@dataclass(frozen=True)
class Captured:
    """What a rank saw of one capture.

    Attributes:
        own_class: Module of the class that reduced, as CudaCommunicator chose.
        in_cumem: Whether the input was in the pool that sleeps.
        launches: Of the capture.
        exported: What the captured kernels read and was exported: "input" or "buffer".
        made_exports: Handles that the construction of the group asked for.
        capture_exports: Handles that the capture asked for, its end included.
        replay_exports: Handles that were asked for afterwards.
        virtual_exports: Handles of virtual memory that were asked for at any time.
        replays: Whether each gave what the eager call gives, to the bit.
    """

    own_class: str
    in_cumem: bool
    launches: list[custom_ar_double.Launch]
    exported: list[str]
    made_exports: int
    capture_exports: int
    replay_exports: int
    virtual_exports: int
    replays: list[bool]


def captured(rank: Rank, model: Path, offload: bool, kind: str) -> Captured:
    """Captures an all-reduce, and replays it with sleep and wake before each replay.

    Args:
        rank: Who runs it.
        model: The demo model.
        offload: Whether `--sleep-mode-offload-cudagraph` is given.
        kind: `CUSTOM` or `QUICK`.
    """
    rocm_machine.boot()
    config = rocm_machine.configuration(model, sleep_mode_offload_cudagraph=offload)
    start = hipsim.stats()
    with _without_aiter(), rocm_machine.group(rank, "tp", config) as tp:
        made = hipsim.stats()
        comm = tp.device_communicator
        own = {CUSTOM: comm.ca_comm, QUICK: comm.qr_comm}[kind]
        given = torch.full(_SHAPES[kind], rank.rank + 1.0, dtype=torch.float16)
        assert torch.all(comm.all_reduce(given * 2) == 6)
        first = len(custom_ar_double.launches)
        custom_ar_double.captured_exports.clear()
        graph = torch.cuda.CUDAGraph()
        hidden, result = rocm_machine.capture(graph, tp, config, given)
        after = hipsim.stats()
        launches = custom_ar_double.launches[first:]
        places = {hidden.data_ptr(): "input"}
        if kind == CUSTOM:
            places[own.buffer_ptrs[rank.rank]] = "buffer"
        in_cumem = rocm_machine.lies_in_graph_pool(hidden)
        replays = rocm_machine.replays(rank, graph, tp, given, result)
        end = hipsim.stats()
        graph.reset()
        del hidden, result
    return Captured(
        own_class=type(own).__module__,
        in_cumem=in_cumem,
        launches=launches,
        exported=[places[each] for each in custom_ar_double.captured_exports],
        made_exports=made.ipc_exports - start.ipc_exports,
        capture_exports=after.ipc_exports - made.ipc_exports,
        replay_exports=end.ipc_exports - after.ipc_exports,
        virtual_exports=end.ipc_virtual_exports - start.ipc_virtual_exports,
        replays=replays,
    )


def registered_from_cumem(rank: Rank, model: Path) -> tuple[str, int]:
    """What becomes of a capture into the pool that sleeps, were it to register.

    Returns:
        The error, and how many handles of virtual memory were asked for.
    """
    rocm_machine.boot()
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

    config = rocm_machine.configuration(model, sleep_mode_offload_cudagraph=True)
    start = hipsim.stats()
    with _without_aiter(), rocm_machine.group(rank, "tp", config) as tp:
        comm = tp.device_communicator
        comm.ca_comm = CustomAllreduce(
            tp.cpu_group, torch.device("cpu"), register_graph_buffers=True
        )
        given = torch.ones(_SHAPES[CUSTOM], dtype=torch.float16)
        graph = torch.cuda.CUDAGraph()
        try:
            rocm_machine.capture(graph, tp, config, given)
        except hipsim.HipError as error:
            message = str(error)
        else:
            message = ""
        graph.reset()
    return message, hipsim.stats().ipc_virtual_exports - start.ipc_virtual_exports
