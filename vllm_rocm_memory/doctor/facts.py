# SPDX-License-Identifier: Apache-2.0
"""What the two probes find out, as the checks read it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

HIP, CUDA = "hip", "cuda"

COPY_ENGINE, KERNEL = "copy engine", "kernel"


@dataclass(frozen=True)
class BatchCopies:
    """What a batched copy of KV blocks is called with.

    Attributes:
        flags: of its attributes.
        num_attrs: how many attributes are passed: 1, or 0 where the runtime takes none.
        refused: the release should take attributes, and this runtime refused them.
        description: what the server's log says of it at start, with the reason.
    """

    flags: int
    num_attrs: int
    refused: bool
    description: str


@dataclass(frozen=True)
class ProbeCopy:
    """Copies between registered host memory and a device, both ways.

    Attributes:
        name: what was copied, in the plural, for a sentence.
        engine: `COPY_ENGINE` or `KERNEL`, where either direction was a kernel's; None
            where it is not known.
        seen: what tells so, or why it is not known.
    """

    name: str
    engine: str | None
    seen: str


@dataclass(frozen=True)
class RuntimeFacts:
    """What a process sees of the GPU's runtime and its first device.

    Attributes:
        vendor: `HIP`, `CUDA`, or None where there is no runtime.
        libraries: paths of the runtimes that are loaded; the first is in use.
        torch: PyTorch's version, or None where it cannot be imported.
        torch_vendor: whose GPUs PyTorch was built for, None for none.
        loaded_by_torch: the runtime in use came with PyTorch.
        simulated: the simulated release, or None for a real one.
        version: ``hipRuntimeGetVersion`` or ``cuDriverGetVersion``; 0 is unknown.
        devices: how many there are.
        device_name: of the first, where it is known.
        problem: why there is no runtime or no device, or PyTorch cannot use it; None
            where it can.
        virtual_memory: the first device has virtual memory management.
        large_bar: the host reaches all of its memory, where the runtime tells.
        batches: how KV blocks are batched; why that is not possible; None where the
            vLLM has no such code, as without the series.
        copies: what was copied, and by what.
        copies_unknown: why nothing was, None where something was.
    """

    vendor: str | None = None
    libraries: tuple[str, ...] = ()
    torch: str | None = None
    torch_vendor: str | None = None
    loaded_by_torch: bool = False
    simulated: str | None = None
    version: int = 0
    devices: int = 0
    device_name: str | None = None
    problem: str | None = None
    virtual_memory: bool | None = None
    large_bar: bool | None = None
    batches: BatchCopies | str | None = None
    copies: tuple[ProbeCopy, ...] = ()
    copies_unknown: str | None = None

    @property
    def release(self) -> tuple[int, int]:
        """(major, minor) of the runtime; (0, 0) where it does not say."""
        if self.vendor == CUDA:
            return self.version // 1000, self.version % 1000 // 10
        return self.version // 10_000_000, self.version // 100_000 % 100

    @property
    def product(self) -> str:
        """Such as ``HIP 7.16.26361`` or ``CUDA 13.0``, for a sentence."""
        if self.vendor is None:
            return "no GPU runtime"
        vendor = "HIP" if self.vendor == HIP else "CUDA"
        if not self.version:
            return f"{vendor} of unknown version"
        major, minor = self.release
        if self.vendor == CUDA:
            return f"{vendor} {major}.{minor}"
        return f"{vendor} {major}.{minor}.{self.version % 100_000}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "RuntimeFacts":
        """Undo `to_json`, also after the JSON was text.

        Raises:
            TypeError: they are not the fields of these facts.
        """
        batches = fields.get("batches")
        if isinstance(batches, Mapping):
            batches = BatchCopies(**batches)
        copies = tuple(ProbeCopy(**copy) for copy in fields.get("copies", ()))
        libraries = tuple(fields.get("libraries", ()))
        return cls(
            **{**fields, "libraries": libraries, "batches": batches, "copies": copies}
        )


@dataclass(frozen=True)
class GraphPool:
    """Whether captured graphs lie in memory that sleeps.

    Attributes:
        asked: ``--sleep-mode-offload-cudagraph`` was given.
        obstacle: why it has no effect and what to do, None where it has one.
    """

    asked: bool
    obstacle: str | None = None


@dataclass(frozen=True)
class ServingFacts:
    """What vLLM makes of the arguments of ``vllm serve``.

    Where vLLM refuses them, all that only its configuration tells stays at its default.
    Where something is `missing` there is what the arguments alone tell.

    Attributes:
        refusal: vLLM's words, None where it would start.
        missing: the model, tokenizer or draft that is not on this machine, so that
            vLLM could not be asked.
        download: how what is missing, or the weights where they are, gets here; a
            sentence.
        model: a folder, or a name on the hub.
        weights_bytes: of the files that would be loaded, all ranks together; None
            where they are not on this machine.
        weights_unknown: why not.
        tensor_parallel_size: ranks that share one copy of the weights, with pipeline
            stages in `pipeline_parallel_size`.
        data_parallel_size: engines in all.
        local_engines: those of them that this host runs, or takes part in.
        hosts_per_engine: how many hosts share one engine.
        moe: a mixture of experts, whose experts the engines share; None where that is
            not known.
        kv_connector: its name, None for none.
        cpu_bytes_to_use: of the connector's host memory, all ranks of one engine (one
            of `data_parallel_size`) together.
        pool_option: what the user sets that with.
        enable_sleep_mode: ``--enable-sleep-mode``.
        sleep_mode_backend: ``--sleep-mode-backend``, where this vLLM has it.
        cumem_allocator: weights and KV cache lie in memory that vLLM maps itself.
        graph_pool: None where this vLLM does not say, as without the series.
        cudagraph_mode: such as ``FULL_AND_PIECEWISE``.
        graphs_off_by: the user's option or variable that turns CUDA graphs off.
        assumed: variables that the simulator needs, and that were taken to be set.
    """

    refusal: str | None = None
    missing: str | None = None
    download: str | None = None
    model: str | None = None
    weights_bytes: int | None = None
    weights_unknown: str | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    local_engines: int = 1
    hosts_per_engine: int = 1
    moe: bool | None = False
    kv_connector: str | None = None
    cpu_bytes_to_use: int | None = None
    pool_option: str | None = None
    enable_sleep_mode: bool = False
    sleep_mode_backend: str | None = None
    cumem_allocator: bool = False
    graph_pool: GraphPool | None = None
    cudagraph_mode: str | None = None
    graphs_off_by: str | None = None
    assumed: tuple[str, ...] = ()

    @property
    def shares_experts(self) -> bool:
        """Engines may share a mixture's experts, and have a group that reduces."""
        return self.moe is not False and self.data_parallel_size > 1

    @property
    def reduces(self) -> bool:
        """Graphs of these ranks may have all-reduces among several of them."""
        return self.tensor_parallel_size > 1 or self.shares_experts

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "ServingFacts":
        """Undo `to_json`, also after the JSON was text.

        Raises:
            TypeError: they are not the fields of these facts.
        """
        pool = fields.get("graph_pool")
        assumed = tuple(fields.get("assumed", ()))
        pool = GraphPool(**pool) if pool else None
        return cls(**{**fields, "graph_pool": pool, "assumed": assumed})
