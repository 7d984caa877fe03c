# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU model runner that captures graphs as its GPU model runner does."""

import contextlib
from collections.abc import Iterator

# Before anything else of vLLM's worker: it puts placeholders over torch.cuda.
from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # isort: skip

import torch
from vllm.compilation import breakable_cudagraph, cuda_graph
from vllm.distributed.parallel_state import GraphCaptureContext
from vllm.utils import torch_utils
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.worker import gpu_model_runner

from vllm_rocm_memory.sim import torch_device, torch_graph


class HipsimModelRunner(CPUModelRunner):
    """Wraps the model for graphs, and captures and replays them.

    See Note [What a simulated graph can hold].
    """

    load_model = gpu_model_runner.GPUModelRunner.load_model
    get_model = gpu_model_runner.GPUModelRunner.get_model


def allow_graphs() -> None:
    """Puts this process's parts of vLLM that capture graphs onto the simulator."""
    cpu_attn.CPUAttentionMetadataBuilder._cudagraph_support = AttentionCGSupport.ALWAYS
    # vLLM's own takes the CPU's placeholder for the current stream.
    vars(cuda_graph)["current_stream"] = torch_device.current_stream
    # vLLM's own wants the communicator of a GPU, and asks it for its own captures.
    vars(gpu_model_runner)["graph_capture"] = _graph_capture
    # vLLM's own calls an operator that only its GPU builds have.
    for module in (torch_utils, breakable_cudagraph):
        vars(module)["weak_ref_tensor"] = _weak_ref_tensor


@contextlib.contextmanager
def _graph_capture(device: torch.device) -> Iterator[GraphCaptureContext]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield GraphCaptureContext(stream)


def _weak_ref_tensor(value: object) -> object:
    if isinstance(value, torch.Tensor) and value.numel() > 0:
        return torch_graph.weak_ref_tensor(value)
    return value
