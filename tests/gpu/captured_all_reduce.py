# SPDX-License-Identifier: Apache-2.0
"""One of two ranks: captures all-reduces, sleeps, wakes and replays.

    python captured_all_reduce.py RANK GPUS PORT MODEL RESULT

GPUS is how many there are; with 1 both ranks share it. Groups, communicators, the pool
of the capture and sleep mode are vLLM's. What happened is written to RESULT as JSON.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

CYCLES = 10
# Rows and columns of bfloat16; custom all-reduces take up to 8 MiB.
SHAPE = 256, 1024

Reduce = Callable[[torch.Tensor], torch.Tensor | None]


class Reductions:
    """What vLLM's custom all-reduces read that were captured.

    One reads its caller's tensor, whose address the capture then registers, or the
    buffer that it is given, into which the tensor is copied.

    Attributes:
        registered: How many read the tensor.
        buffered: How many read a buffer.
    """

    def __init__(self) -> None:
        self.registered = self.buffered = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count them from now on."""
        from vllm.distributed.device_communicators import custom_all_reduce

        ops = custom_all_reduce.ops
        reduce = ops.all_reduce

        def counted(
            pointer: int, given: Any, result: Any, buffer: int, buffer_bytes: int
        ) -> None:
            if torch.cuda.is_current_stream_capturing():
                self.registered += buffer == 0
                self.buffered += buffer != 0
            reduce(pointer, given, result, buffer, buffer_bytes)

        with mock.patch.object(ops, "all_reduce", counted):
            yield


class Ranks:
    """This rank's group, under the configuration of an engine with sleep mode."""

    def __init__(self, rank: int, device: int, port: int, model: str) -> None:
        from ranks import RANKS
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.engine.arg_utils import EngineArgs

        torch.accelerator.set_device_index(device)
        self.rank, self.size = rank, RANKS
        self.device = torch.device("cuda", device)
        self.config = EngineArgs(
            model=model,
            dtype="bfloat16",
            max_model_len=256,
            tensor_parallel_size=RANKS,
            distributed_executor_backend="mp",
            enable_sleep_mode=True,
            sleep_mode_offload_cudagraph=True,
        ).create_engine_config()
        assert self.config.use_cumem_cudagraph_pool
        with set_current_vllm_config(self.config):
            parallel_state.init_distributed_environment(
                RANKS, rank, f"tcp://127.0.0.1:{port}", device, "nccl"
            )
            self.group: Any = parallel_state.init_model_parallel_group(
                [list(range(RANKS))], device, "nccl", group_name="tp"
            )

    @property
    def communicator(self) -> Any:
        return self.group.device_communicator

    def barrier(self) -> None:
        torch.distributed.barrier(group=self.group.cpu_group)

    def reduced_by_torch(self, given: torch.Tensor) -> torch.Tensor:
        """By PyTorch's NCCL or RCCL."""
        result = given.clone()
        torch.distributed.all_reduce(result, group=self.communicator.device_group)
        return result

    def values(self, number: int) -> torch.Tensor:
        """What this rank gives, small whole numbers whose sums are exact."""
        return self._values_of(self.rank, number)

    def sum(self, number: int) -> torch.Tensor:
        """Of what all ranks give."""
        given = [self._values_of(rank, number) for rank in range(self.size)]
        return torch.stack(given).sum(0)

    @staticmethod
    def _values_of(rank: int, number: int) -> torch.Tensor:
        rows, columns = SHAPE
        places = torch.arange(rows * columns, device="cuda").view(SHAPE)
        return ((places + 3 * number) % 7 + 5 * rank).to(torch.bfloat16)


def reductions(ranks: Ranks) -> tuple[dict[str, Reduce], dict[str, str]]:
    """The all-reduces that there are here, and why the others are not."""
    comm = ranks.communicator
    found: dict[str, Reduce] = {}
    missing: dict[str, str] = {}
    if comm.pynccl_comm is not None and not comm.pynccl_comm.disabled:
        found["nccl"] = comm.pynccl_comm.all_reduce
    else:
        # As the engine does where vLLM cannot use NCCL or RCCL by itself.
        found["nccl"] = ranks.reduced_by_torch
    if comm.ca_comm is not None and not comm.ca_comm.disabled:
        found["custom"] = comm.ca_comm.custom_all_reduce
    elif comm.aiter_ar_comm is not None:
        missing["custom"] = "AITER's is used in the place of vLLM's"
    else:
        missing["custom"] = "vLLM's CustomAllreduce is disabled between these GPUs"
    if comm.aiter_ar_comm is not None and not comm.aiter_ar_comm.disabled:
        found["aiter"] = comm.aiter_ar_comm.custom_all_reduce
    else:
        missing["aiter"] = "AITER's CustomAllreduce is not enabled here"
    return found, missing


class Captured:
    """A graph in the pool that sleeps: twice what is given, reduced."""

    def __init__(self, ranks: Ranks, reduce: Reduce, weights: torch.Tensor) -> None:
        from vllm.compilation.cudagraph_pool import capture_pool

        self.ranks = ranks
        self.given = ranks.values(0)
        assert reduce(self.given * weights) is not None, "it takes this input"
        torch.accelerator.synchronize()
        ranks.barrier()
        self.graph = torch.cuda.CUDAGraph()
        with (
            ranks.group.graph_capture() as context,
            capture_pool(None, ranks.config) as pool,
            torch.cuda.graph(self.graph, pool=pool, stream=context.stream),
        ):
            hidden = self.given * weights
            result = reduce(hidden)
        assert result is not None
        self.hidden, self.result = hidden, result

    @property
    def sleeps(self) -> bool:
        """Whether input and result lie in the pool that sleeps."""
        return lies_in_graph_pool(self.hidden) and lies_in_graph_pool(self.result)

    def is_right(self, number: int) -> bool:
        """Whether a replay with other values gives their sum to the bit."""
        self.given.copy_(self.ranks.values(number))
        self.result.zero_()
        self.ranks.barrier()
        self.graph.replay()
        torch.accelerator.synchronize()
        return torch.equal(self.result, 2 * self.ranks.sum(number))


def lies_in_graph_pool(tensor: torch.Tensor) -> bool:
    return any(
        data.tag == "cudagraph"
        and address <= tensor.data_ptr() < address + data.handle[1]
        for address, data in allocator().pointer_to_data.items()
    )


def allocator() -> Any:
    from vllm.device_allocator import get_mem_allocator_instance

    return get_mem_allocator_instance()


def sleep_and_wake(ranks: Ranks, cycle: int, weights: torch.Tensor) -> bool:
    """Odd cycles are of level 2. Returns whether everything was asleep."""
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend

    level = 1 + cycle % 2
    ranks.barrier()
    CuMemBackend().suspend(level=level)
    asleep = all(data.is_asleep for data in allocator().pointer_to_data.values())
    # Nobody wakes before all are asleep.
    ranks.barrier()
    for tags in (["kv_cache"], ["weights"]) if cycle % 3 else (None,):
        CuMemBackend().resume(tags=tags)
    if level == 2:
        weights.fill_(2)  # as a reload does
    ranks.barrier()
    return asleep


def registers_elsewhere(ranks: Ranks, seen: Reductions) -> int:
    """The control: what a capture that may register its input does register.

    It allocates from PyTorch's own pool, whose memory has IPC handles.
    """
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

    reduce = CustomAllreduce(
        ranks.group.cpu_group,
        ranks.device,
        register_graph_buffers=True,
    )
    given = ranks.values(1)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    before = seen.registered
    with (
        torch.cuda.stream(stream),
        reduce.capture(),
        torch.cuda.graph(graph, stream=stream),
    ):
        result = reduce.custom_all_reduce(given * 2)
    assert result is not None
    ranks.barrier()
    graph.replay()
    torch.accelerator.synchronize()
    assert torch.equal(result, 2 * ranks.sum(1))
    ranks.barrier()
    return seen.registered - before


def captured(ranks: Ranks, seen: Reductions) -> dict[str, Any]:
    """Capture each kind of all-reduce, and replay them all in each cycle."""
    from ranks import reducers, register_captures, should_reduce

    found, missing = reductions(ranks)
    with allocator().use_memory_pool("weights"):
        weights = torch.full(SHAPE, 2, dtype=torch.bfloat16, device="cuda")
    graphs = {kind: Captured(ranks, reduce, weights) for kind, reduce in found.items()}
    registered, buffered = seen.registered, seen.buffered
    asleep = []
    right: dict[str, list[bool]] = {kind: [] for kind in graphs}
    for cycle in range(-1, CYCLES):
        if cycle >= 0:
            asleep.append(sleep_and_wake(ranks, cycle, weights))
        for kind, each in graphs.items():
            right[kind].append(each.is_right(cycle + 1))
    return {
        "register": os.environ.get("NCCL_GRAPH_REGISTER"),
        "registers captures": register_captures(reducers(ranks.communicator)),
        "missing": missing,
        "should reduce": should_reduce(),
        "kinds": {
            kind: {"in pool": each.sleeps, "right": right[kind]}
            for kind, each in graphs.items()
        },
        "asleep": asleep,
        "registered": registered,
        "buffered": buffered,
        "control": registers_elsewhere(ranks, seen) if "custom" in found else None,
    }


def main(rank: str, gpus: str, port: str, model: str, result: str) -> None:
    number, device = int(rank), int(rank) % int(gpus)
    if int(gpus) == 1:
        from sharing_worker import share_gpu

        share_gpu(number)
    seen = Reductions()
    with seen.watched():
        ranks = Ranks(number, device, int(port), model)
        report = captured(ranks, seen)
    Path(result).write_text(json.dumps(report))
    ranks.barrier()
    # Without what the end of Python would do to groups and pools that graphs still use.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
