# SPDX-License-Identifier: Apache-2.0
"""A rank of vLLM that takes its simulated GPU for an MI300X with AITER.

For rank processes: the environment in which they start, what vLLM has to see beside it,
groups whose communicator is the real CudaCommunicator, and captures as vLLM's runners
make them.

Note [What makes vLLM see an MI300X]
As in the served engine (see Note [Half a ROCm platform] in hipsim_platform), the
platform is the simulator's, which knows nothing of ROCm, and the modules that choose
and make the communicators see ROCm in its place. Beside that PyTorch names the GPU's
architecture, from which vllm.platforms.rocm derives the rest, the platform names
CudaCommunicator to groups, and the operators of vLLM's own all-reduce are doubles.
Everything else is the user's configuration and environment.
"""

import contextlib
import functools
import gc
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vllm_rocm_memory.sim import torch_device

from . import aiter_double, custom_ar_double
from .ranks import Rank

ENVIRONMENT = {
    "HIPSIM_PROFILE": "7.16",
    "HIPSIM_HOST_READS": "allow",
    "HF_HUB_OFFLINE": "1",
    # The modules of a tree are many, and are compiled once.
    "PYTHONDONTWRITEBYTECODE": "",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    # Where this names the CPU, vLLM asks no platform plugin.
    "VLLM_TARGET_DEVICE": "cuda",
    "VLLM_ROCM_USE_AITER": "1",
    "VLLM_ROCM_USE_AITER_CUSTOM_AR": "1",
    # A CUDA build of PyTorch brings NCCL, and here is no GPU for it.
    "VLLM_DISABLE_PYNCCL": "1",
}

CYCLES = 3
"""Of sleep and wake, for `replays`."""

_COMMUNICATORS = "vllm.distributed.device_communicators"
_SEE_ROCM = (
    "vllm._aiter_ops",
    "vllm.compilation.cudagraph_pool",
    "vllm.device_allocator",
    f"{_COMMUNICATORS}.cuda_communicator",
    f"{_COMMUNICATORS}.custom_all_reduce",
    f"{_COMMUNICATORS}.quick_all_reduce",
)


@functools.cache
def boot() -> None:
    """Imports vLLM on that machine, once a process."""
    from vllm.platforms import current_platform

    from vllm_rocm_memory.sim.hipsim_platform import HipsimPlatform, RocmView

    assert isinstance(current_platform, HipsimPlatform)

    class Machine(RocmView):
        """GPUs that xGMI connects with each other."""

        def is_fully_connected(self, physical_device_ids: list[int]) -> bool:
            return True

        def visible_device_id_to_physical_device_id(self, index: int | None) -> int:
            # Tensors of the simulated GPU are on "cpu", which has no index.
            return index or 0

    torch_device.install()
    custom_ar_double.install()
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    vars(torch.cuda)["get_device_properties"] = lambda device=None: properties
    machine = Machine(current_platform)
    # vLLM looks for AITER when it is imported, and not again.
    with aiter_double.install(aiter_double.surfaces()[-1]):
        modules = [importlib.import_module(name) for name in _SEE_ROCM]
    for module in modules:
        vars(module)["current_platform"] = machine
    communicator = f"{_COMMUNICATORS}.cuda_communicator.CudaCommunicator"
    HipsimPlatform.get_device_communicator_cls = classmethod(  # type: ignore[assignment]
        lambda cls: communicator
    )
    # Sleep and wake collect garbage, and vLLM's modules are many.
    importlib.import_module("vllm.device_allocator.cumem")
    gc.collect()
    gc.freeze()


def start(rank: Rank) -> None:
    """`boot`, to be run by ranks that nobody waits for yet."""
    boot()


@functools.cache
def configuration(model: Path, **options: Any) -> Any:
    """A VllmConfig for two tensor-parallel ranks, as `vllm serve` makes it.

    Args:
        model: The demo model, a Llama.
        options: Of `EngineArgs`, beside sleep mode.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM

    # Otherwise vLLM looks at the class in a process of its own, which takes seconds.
    ModelRegistry.register_model(LlamaForCausalLM.__name__, LlamaForCausalLM)
    arguments = EngineArgs(
        model=str(model),
        dtype="float16",
        max_model_len=256,
        tensor_parallel_size=2,
        enable_sleep_mode=True,
        **options,
    )
    return arguments.create_engine_config()


@contextlib.contextmanager
def group(rank: Rank, name: str, config: Any) -> Iterator[Any]:
    """A GroupCoordinator of all ranks, made by vLLM under a configuration.

    Args:
        rank: Who asks.
        name: "tp" or "dp"; vLLM makes it unique with a number.
        config: The VllmConfig; it is the current one within the context.

    Raises:
        Exception: Whatever the communicators raise.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(config):
        made: Any = parallel_state.init_model_parallel_group(
            [list(range(rank.size))], rank.rank, "gloo", group_name=name
        )
        try:
            yield made
            # What the others have not opened yet shall be there until they have.
            rank.barrier()
        finally:
            made.destroy()


def capture(
    graph: Any, within: Any, config: Any, given: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Captures an all-reduce of twice a tensor, as vLLM's runners do.

    Args:
        graph: A `torch.cuda.CUDAGraph`.
        within: The group.
        config: Whose pool the capture allocates from.
        given: The tensor; what is reduced is computed within the capture.

    Returns:
        Input and result of the all-reduce.
    """
    from vllm.compilation.cudagraph_pool import capture_pool

    pool: Any
    with (
        within.graph_capture() as context,
        capture_pool(None, config) as pool,
        torch.cuda.graph(graph, pool=pool, stream=context.stream),
    ):
        hidden = given * 2
        result = within.device_communicator.all_reduce(hidden)
    return hidden, result


def replays(
    rank: Rank, graph: Any, within: Any, given: torch.Tensor, result: torch.Tensor
) -> list[bool]:
    """Whether each replay gives what the eager call gives, to the bit.

    Before each of `CYCLES` the worker sleeps and wakes, and the tensor that `capture`
    was given gets other values.
    """
    same = []
    for cycle in range(CYCLES):
        sleep_and_wake()
        given.copy_(torch.randn(given.shape) * (rank.rank + cycle + 1))
        graph.replay()
        eager = within.device_communicator.all_reduce(given * 2)
        same.append(torch.equal(result, eager))
    return same


def lies_in_graph_pool(tensor: torch.Tensor) -> bool:
    """Whether it is cuMem memory, tagged `cudagraph`."""
    from vllm.device_allocator import get_mem_allocator_instance

    allocator: Any = get_mem_allocator_instance()
    return any(
        data.tag == "cudagraph"
        and address <= tensor.data_ptr() < address + data.handle[1]
        for address, data in allocator.pointer_to_data.items()
    )


def sleep_and_wake() -> None:
    """As a worker does for `/sleep?level=1` and `/wake_up`."""
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend

    CuMemBackend().suspend(level=1)
    CuMemBackend().resume(tags=None)
