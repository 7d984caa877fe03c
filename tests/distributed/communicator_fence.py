# SPDX-License-Identifier: Apache-2.0
"""What a rank does to show whether a configuration puts AITER's capture fence up.

For rank processes; the tests are in test_communicator_fence.py. Configuration, groups
and CudaCommunicator are vLLM's, and AITER is the double of one release.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_rocm_memory.sim import hipsim

from . import aiter_double, rocm_machine
from .ranks import Rank


@dataclass(frozen=True)
class Chosen:
    """What CudaCommunicator made of a configuration in one group.

    Attributes:
        offloads: Whether captures go to the pool that sleeps.
        active: The attributes of CudaCommunicator that hold a communicator in use.
        scatters: Whether reduce-scatter and all-gather go through AITER.
        fenced_methods: As the wrapper says.
        is_aiters: Whether AITER's object is of AITER's class, and of no subclass.
        is_subclass: Whether it is of a subclass.
        registers: Its `enable_register_for_capturing`; None if it has none.
        registers_graph_buffers: As the wrapper says.
        graph_capture: The same as 0.33.0's `graph_capture` asks it; None in 0.32.0.
        fused_operators: Whether vLLM's fused operators are handed this wrapper, in a
            tensor-parallel group.
    """

    offloads: bool
    active: tuple[str, ...]
    scatters: bool
    fenced_methods: tuple[str, ...]
    is_aiters: bool
    is_subclass: bool
    registers: bool | None
    registers_graph_buffers: bool
    graph_capture: bool | None
    fused_operators: bool


def chosen(
    rank: Rank, model: Path, release: str, name: str, options: Mapping[str, bool]
) -> Chosen:
    """Makes a group.

    Args:
        rank: Who runs it.
        model: The demo model.
        release: Of AITER.
        name: "tp" or "dp".
        options: Of the engine.
    """
    rocm_machine.boot()
    from vllm._aiter_ops import rocm_aiter_ops
    from vllm.distributed import parallel_state

    operators: Any = rocm_aiter_ops
    config = rocm_machine.configuration(model, **options)
    with (
        aiter_double.install(aiter_double.surface_of(release)) as aiters,
        rocm_machine.group(rank, name, config) as made,
    ):
        comm = made.device_communicator
        wrapper = comm.aiter_ar_comm
        inner = wrapper.aiter_ca
        asks = getattr(parallel_state, "_aiter_registers_graph_buffers", None)
        parallel_state._TP = made if name == "tp" else None
        try:
            handed = name == "tp" and operators.get_aiter_allreduce() is wrapper
        finally:
            parallel_state._TP = None
        return Chosen(
            offloads=config.use_cumem_cudagraph_pool,
            active=tuple(
                attribute
                for attribute, each in vars(comm).items()
                if attribute.endswith("_comm") and not getattr(each, "disabled", True)
            ),
            scatters=comm.use_aiter_ag_rs,
            fenced_methods=wrapper.fenced_methods,
            is_aiters=type(inner) is aiters,
            is_subclass=type(inner) is not aiters and isinstance(inner, aiters),
            registers=getattr(inner, "enable_register_for_capturing", None),
            registers_graph_buffers=wrapper.registers_graph_buffers,
            graph_capture=asks and asks(made),
            fused_operators=handed,
        )


def refused(
    rank: Rank, model: Path, release: str, name: str, options: Mapping[str, bool]
) -> str | None:
    """Why there is no such group; the arguments are those of `chosen`."""
    rocm_machine.boot()
    config = rocm_machine.configuration(model, **options)
    with aiter_double.install(aiter_double.surface_of(release)):
        try:
            with rocm_machine.group(rank, name, config):
                return None
        except RuntimeError as error:
            return str(error)


@dataclass(frozen=True)
class Captured:
    """What a rank saw of one capture.

    Attributes:
        registered: Of each captured launch, whether its input was to be registered.
        in_cumem: Whether that input was in the pool that sleeps.
        exports: Handles that the capture asked for, its end included.
        virtual_exports: Those of virtual memory, of the replays too.
        replays: Whether each gave what the eager call gives, to the bit.
    """

    registered: list[bool]
    in_cumem: bool
    exports: int
    virtual_exports: int
    replays: list[bool]


def captured(
    rank: Rank, model: Path, release: str, options: Mapping[str, bool]
) -> Captured:
    """Captures an all-reduce, and replays it with sleep and wake before each replay.

    The arguments are those of `chosen`; the group is tensor-parallel.
    """
    rocm_machine.boot()
    config = rocm_machine.configuration(model, **options)
    with (
        aiter_double.install(aiter_double.surface_of(release)),
        rocm_machine.group(rank, "tp", config) as tp,
    ):
        comm = tp.device_communicator
        launches = comm.aiter_ar_comm.aiter_ca.launches
        given = torch.full((64, 128), rank.rank + 1.0, dtype=torch.float16)
        assert torch.all(comm.all_reduce(given * 2) == 6)
        before, first = hipsim.stats(), len(launches)
        graph = torch.cuda.CUDAGraph()
        hidden, result = rocm_machine.capture(graph, tp, config, given)
        after = hipsim.stats()
        registered = [launch.registered for launch in launches[first:]]
        in_cumem = rocm_machine.lies_in_graph_pool(hidden)
        replays = rocm_machine.replays(rank, graph, tp, given, result)
        end = hipsim.stats()
        graph.reset()
        del hidden, result
    return Captured(
        registered=registered,
        in_cumem=in_cumem,
        exports=after.ipc_exports - before.ipc_exports,
        virtual_exports=end.ipc_virtual_exports - before.ipc_virtual_exports,
        replays=replays,
    )
