#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What copying KV blocks costs the decode beside it, for each way of copying them.

    python benchmarks/kv_copy_interference.py --json result.json --png result.png
    python benchmarks/kv_copy_interference.py --from-json result.json --png result.png

Measures the vLLM that ``import vllm`` finds, with the series applied, on any GPU that
torch can use. Blocks move as SimpleCPUOffloadConnector moves them: random blocks
between a KV cache and a registered host cache, ``build_params`` and ``copy_blocks``, a
stream of low priority, and a thread that queues the next transfer while one is under
way (two in flight). The engines:

- ``rect``: one pitched copy per block and page size;
- ``batch``: hipMemcpyBatchAsync or cuMemcpyBatchAsync, with flags 0;
- ``batch-flag``: the same with hipMemcpyFlagExtPreferCE (0x100), on CUDA with
  CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE (1);
- ``kernel``: a Triton kernel that reads and writes host memory itself, with a bounded
  number of programs (``--kernel-programs``), as HIP bounds its own copy kernels. More
  of them cost decode more.

Layers of one page size lie one after the other in one allocation, each with all its
blocks. The host cache is laid out block after block, for the batches region after
region, as the connector does.

Decode is a CUDA or HIP graph of 32 bf16 GEMMs with distinct weights, M x 6144 x 4096
and back, which is bound by memory as decoding is. Its slowdown is the time of a replay
next to the copies, against replays alone: the mean of two medians, just before and just
after. How far these two are apart is the drift. A slowdown below it says nothing. A
case has as many replays as were asked for and at least ten whole transfers, or ends
after a time limit and is marked.

On AMD, where ``rocprofv3`` is on the path, each engine also runs a short loop of copies
under it (not with ``--quick``), and the result says whether copy engines or kernels
moved the blocks. Not run on AMD hardware.
"""

import argparse
import contextlib
import csv
import functools
import gc
import hashlib
import importlib
import importlib.metadata
import itertools
import math
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Protocol, Self

import reporting
from reporting import INK, BenchmarkError, Report, Result, Table, positive, progress

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

BENCHMARK = "kv_copy_interference"
SCHEMA_VERSION = 2

ENGINES = ("rect", "batch", "batch-flag", "kernel")
DIRECTIONS = ("load", "store")

# CUmemcpyFlags in cuda.h; HIP's flag comes from cuda_mem_ops.
CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE = 1

KIB = 1024
GEMMS, HIDDEN, PROJECTED = 32, 6144, 4096
WARMUP_REPLAYS = 100
# Replays that are queued ahead of the GPU: 17 ms of them on an H200.
REPLAYS_AHEAD = 32
ROUND_TRIP_BLOCKS = 64
# So many different sets of blocks are copied in turn.
TRANSFERS = 32
# A replay that takes longer than this times the median alone counts as slow.
SLOW = 1.2
# Seconds to wait for one transfer or replay: the slowest takes some 60 ms.
PATIENCE_S = 60.0
POLL_S = 1e-4

PROFILE_BLOCKS, PROFILE_ROUNDS = 32, 4
PROFILE_TIMEOUT_S = 180.0
# The copy kernels of HIP: copyBuffer, -Aligned, -Rect, -RectAligned, -Batch (ROCclr).
BLIT_KERNEL = "__amd_rocclr_copyBuffer"
OWN_KERNEL = "copy_pages"


class EngineUnavailable(Exception):
    """This engine cannot be measured here; the text says why."""


class Hang(Exception):
    """The GPU or a copy does not end; nothing more can be measured."""

    # Set for good: what ends the process must not wait for the GPU then.
    happened = threading.Event()

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} within {PATIENCE_S:g} s")
        self.happened.set()


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        layers: Layers of each page size.
        page_kib: Those page sizes in KiB.
        gpu_blocks, cpu_blocks: Blocks of the KV cache and of the host cache.
        blocks: Blocks of a transfer, one case each.
        batch_sizes: M of the GEMMs, one case each.
        replays: Replays of the decode graph in a case, at least.
        transfers: Whole transfers in a case, at least.
        case_s: Seconds after which a case ends with less than that.
        depth: Transfers in flight.
        kernel_programs: Programs of the copy kernel, at most.
        submissions: Transfers whose submission is timed in a case.

    """

    engines: tuple[str, ...] = ENGINES
    layers: tuple[int, ...] = (71, 60)
    page_kib: tuple[int, ...] = (16, 32)
    gpu_blocks: int = 1024
    cpu_blocks: int = 2048
    blocks: tuple[int, ...] = (32, 128)
    batch_sizes: tuple[int, ...] = (16, 64)
    replays: int = 400
    transfers: int = 10
    case_s: float = 5.0
    depth: int = 2
    kernel_programs: int = 32
    submissions: int = 20

    @property
    def block_bytes(self) -> int:
        pages = zip(self.layers, self.page_kib, strict=True)
        return sum(layers * kib * KIB for layers, kib in pages)

    def shortfall(self, replays: int, transfers: int) -> str:
        """Say what a case lacks to be one, if anything."""
        lacks = []
        if replays < self.replays:
            lacks.append(f"{replays} of {self.replays} replays")
        if transfers < self.transfers:
            lacks.append(f"{transfers} of {self.transfers} transfers")
        return f"{', '.join(lacks)} in {self.case_s:g} s" if lacks else ""

    @property
    def layout(self) -> str:
        pages = zip(self.layers, self.page_kib, strict=True)
        return " + ".join(f"{layers} x {kib} KiB" for layers, kib in pages)


QUICK = Settings(
    gpu_blocks=512,
    cpu_blocks=512,
    batch_sizes=(16,),
    replays=100,
    case_s=3.0,
    submissions=5,
)

LAYOUT = (
    "GPU: an allocation per page size, layer after layer, each with all its blocks; "
    "host: block after block, for batches region after region"
)


# --- Statistics ---------------------------------------------------------------------


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the percentile of the samples, interpolated between neighbours."""
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summarize_ms(samples: Sequence[float]) -> dict[str, float]:
    """Return the statistics of durations in milliseconds."""
    return {
        "samples_count": len(samples),
        "min_ms": min(samples),
        "median_ms": statistics.median(samples),
        "mean_ms": statistics.fmean(samples),
        "p99_ms": percentile(samples, 99),
        "max_ms": max(samples),
    }


def slowdown(samples: Sequence[float], alone_ms: float) -> dict[str, float]:
    """Return how much longer replays take than ``alone_ms``, in percent.

    ``slow_replays_percent`` is the share that takes more than 1.2 times as long.
    """

    def against_alone(value: float) -> float:
        return (value / alone_ms - 1) * 100

    slow = sum(sample > SLOW * alone_ms for sample in samples)
    return {
        "median_percent": against_alone(statistics.median(samples)),
        "mean_percent": against_alone(statistics.fmean(samples)),
        "p99_percent": against_alone(percentile(samples, 99)),
        "slow_replays_percent": 100 * slow / len(samples),
    }


def transfers_within(
    spans: Iterable[tuple[float, float]], begin: float, end: float
) -> float:
    """Return how many transfers fall between two times, parts of them counted."""
    return sum(
        max(0.0, min(last, end) - max(first, begin)) / (last - first)
        for first, last in spans
        if first < last
    )


def whole_transfers(
    spans: Iterable[tuple[float, float]], begin: float, end: float
) -> int:
    """Return how many transfers begin and end between two times."""
    return sum(begin <= first and last <= end for first, last in spans)


# --- What copies --------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Transfer:
    """Blocks of one copy, in the order in which they are paired."""

    gpu: list[int]
    cpu: list[int]

    def __len__(self) -> int:
        return len(self.gpu)


def random_transfers(
    settings: Settings, blocks: int, seed: int, count: int = TRANSFERS
) -> list[Transfer]:
    """Return transfers of ``blocks`` random blocks, the same for each seed."""
    rng = random.Random(seed)
    return [
        Transfer(
            rng.sample(range(settings.gpu_blocks), blocks),
            rng.sample(range(settings.cpu_blocks), blocks),
        )
        for _ in range(count)
    ]


class Caches:
    """The KV cache, as the engine lays it out, and a registered host cache.

    Raises:
        BenchmarkError: One of the two does not fit.

    """

    def __init__(self, settings: Settings, fill: bool = True) -> None:
        import torch

        self._cpu_blocks = settings.cpu_blocks
        self._block_after_block: bool | None = None
        self.cpu: dict[str, torch.Tensor] = {}
        self.gpu: dict[str, torch.Tensor] = {}
        for layers, kib in zip(settings.layers, settings.page_kib, strict=True):
            shape = (layers, settings.gpu_blocks, kib * KIB)
            try:
                memory = torch.empty(shape, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError as error:
                raise BenchmarkError(
                    f"the KV cache does not fit: {error} (fewer: --gpu-blocks)"
                ) from error
            for layer in memory.random_(0, 256) if fill else memory:
                self.gpu[f"layer.{len(self.gpu)}"] = layer
        low_priority, _ = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
        self.stream = torch.cuda.Stream(priority=low_priority)

    def make_host(self, engine: str) -> None:
        """Have a host cache that is laid out as the connector does for this engine."""
        from vllm.v1.simple_kv_offload.host_cache import allocate_host_cache

        block_after_block = engine in ("rect", "kernel")
        if block_after_block == self._block_after_block:
            return
        # The one before is freed with its last view, ahead of the next.
        self.cpu, self._block_after_block = {}, None
        gc.collect()
        try:
            self.cpu = allocate_host_cache(
                self.gpu,
                self._cpu_blocks,
                pin_memory=True,
                block_after_block=block_after_block,
            )
        except RuntimeError as error:
            raise BenchmarkError(
                f"the host cache does not fit: {error} (fewer: --cpu-blocks)"
            ) from error
        self._block_after_block = block_after_block


class Copier(Protocol):
    @property
    def description(self) -> str:
        """How the copies are made."""

    def prepare(self, transfers: Iterable[Transfer]) -> None:
        """Do what a transfer needs before its first copy."""

    def copy(self, direction: str, transfer: Transfer) -> None:
        """Queue a transfer on the caches' stream, from any thread."""


class MemcpyCopier:
    """The series' own copies, with the engine and the flags that a case asks for."""

    def __init__(self, engine: str, caches: Caches) -> None:
        from vllm.platforms import current_platform
        from vllm.v1.simple_kv_offload import cuda_mem_ops
        from vllm.v1.simple_kv_offload.copy_engine import CopyEngine

        self._ops = cuda_mem_ops
        wanted = CopyEngine("rect" if engine == "rect" else "batch")
        self._params = {
            "load": cuda_mem_ops.build_params(
                caches.cpu, caches.gpu, caches.stream, direction="load", engine=wanted
            ),
            "store": cuda_mem_ops.build_params(
                caches.gpu,
                caches.cpu,
                caches.stream,
                cuda_mem_ops.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
                direction="store",
                engine=wanted,
            ),
        }
        params = self._params["load"]
        if params.engine != wanted:
            raise EngineUnavailable(params.note or f"{params.engine} is used instead")
        self._engine = engine
        self._flags = 0
        if engine == "rect":
            return

        self._function = "cuMemcpyBatchAsync"
        if current_platform.is_rocm():
            self._function = "hipMemcpyBatchAsync"
        if engine == "batch-flag":
            self._flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
            if current_platform.is_rocm():
                self._flags = cuda_mem_ops.HIP_MEMCPY_FLAG_EXT_PREFER_CE
            self._check_flags()
        for direction, params in self._params.items():
            attrs = type(params.attrs).from_buffer_copy(params.attrs)
            attrs.flags = self._flags
            self._params[direction] = params._replace(attrs=attrs)

    @property
    def description(self) -> str:
        if self._engine == "rect":
            note = self._params["load"].note
            how = "one pitched copy per block and page size"
            return f"{how} ({note})" if note else how
        return f"{self._function}, flags {self._flags:#x}, numAttrs {self._attributes}"

    @property
    def _attributes(self) -> int:
        # What a call really passes: a runtime may refuse attributes after all.
        entry = self._ops._batch_memcpy
        return min(self._params["load"].num_attrs, entry[1] if entry else 0)

    def _check_flags(self) -> None:
        if self._flags and self._attributes == 0:
            raise EngineUnavailable(
                "this runtime takes no attributes (numAttrs 0), so no flag reaches it"
            )

    def prepare(self, transfers: Iterable[Transfer]) -> None:
        """Block ids are all that these copies need."""

    def copy(self, direction: str, transfer: Transfer) -> None:
        source, target = transfer.cpu, transfer.gpu
        if direction == "store":
            source, target = target, source
        self._ops.copy_blocks(source, target, self._params[direction])
        self._check_flags()


# Triton finds the names that a kernel uses among the globals of its module.
tl: Any = None


def compile_copy_kernel() -> Any:
    """Return the kernel behind the engine ``kernel``.

    Raises:
        EngineUnavailable: There is no Triton.

    """
    global tl
    try:
        triton: Any = importlib.import_module("triton")
        tl = importlib.import_module("triton.language")
    except ImportError as error:
        raise EngineUnavailable(f"Triton cannot be imported ({error})") from error

    def copy_pages(  # type: ignore[no-untyped-def]
        sources,
        targets,
        source_strides,
        target_strides,
        page_words,
        source_ids,
        target_ids,
        regions,
        pages,
        STEP: tl.constexpr,
    ):
        for page in range(tl.program_id(0), pages, tl.num_programs(0)):
            region = page % regions
            pair = page // regions
            source_offset = tl.load(source_ids + pair) * tl.load(
                source_strides + region
            )
            target_offset = tl.load(target_ids + pair) * tl.load(
                target_strides + region
            )
            source = (tl.load(sources + region) + source_offset).to(
                tl.pointer_type(tl.int64)
            )
            target = (tl.load(targets + region) + target_offset).to(
                tl.pointer_type(tl.int64)
            )
            words = tl.load(page_words + region)
            for first in range(0, words, STEP):
                at = first + tl.arange(0, STEP)
                inside = at < words
                tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)

    return triton.jit(copy_pages)


class KernelCopier:
    """Pages moved by a kernel that reaches into host memory."""

    WORD = 8
    STEP = 1024

    def __init__(self, caches: Caches, programs: int) -> None:
        import torch

        self._programs = programs
        self._kernel = compile_copy_kernel()
        self._stream = caches.stream
        self._ids: dict[Transfer, tuple[torch.Tensor, torch.Tensor]] = {}
        gpu, cpu = list(caches.gpu.values()), list(caches.cpu.values())
        self._device = gpu[0].device
        columns = torch.tensor(
            [
                [cache.data_ptr() for cache in gpu],
                [device_address(cache) for cache in cpu],
                [cache.stride(0) for cache in gpu],
                [cache.stride(0) for cache in cpu],
                [cache.shape[1] for cache in gpu],
            ]
        )
        if (columns % self.WORD).any():
            raise EngineUnavailable("addresses, strides or pages are no multiples of 8")
        columns[4] //= self.WORD
        # One upload, so that a profile has no other copies than this one.
        self._gpu, self._cpu, self._gpu_strides, self._cpu_strides, self._words = (
            columns.to(self._device)
        )

    @property
    def description(self) -> str:
        return (
            f"Triton kernel, at most {self._programs} programs, "
            f"{self.STEP * self.WORD} bytes a step"
        )

    def prepare(self, transfers: Iterable[Transfer]) -> None:
        import torch

        transfers = list(transfers)
        ids = torch.tensor([[transfer.gpu, transfer.cpu] for transfer in transfers])
        for transfer, (gpu, cpu) in zip(transfers, ids.to(self._device), strict=True):
            self._ids[transfer] = gpu, cpu
        torch.cuda.synchronize()

    def copy(self, direction: str, transfer: Transfer) -> None:
        import torch

        gpu_ids, cpu_ids = self._ids[transfer]
        gpu = self._gpu, self._gpu_strides, gpu_ids
        cpu = self._cpu, self._cpu_strides, cpu_ids
        source, target = (cpu, gpu) if direction == "load" else (gpu, cpu)
        pages = len(self._words) * len(transfer)
        with torch.cuda.stream(self._stream):
            self._kernel[(min(self._programs, pages),)](
                source[0],
                target[0],
                source[1],
                target[1],
                self._words,
                source[2],
                target[2],
                len(self._words),
                pages,
                STEP=self.STEP,
            )


def device_address(cache: "torch.Tensor") -> int:
    """Return where kernels find registered host memory.

    On CUDA that is its own address; HIP may give it another.

    Raises:
        EngineUnavailable: The runtime does not say, or not one place for all of it.

    """
    import ctypes

    from vllm.platforms import current_platform, hip_runtime
    from vllm.v1.simple_kv_offload import cuda_mem_ops

    host = cache.data_ptr()
    if not current_platform.is_rocm():
        return host
    runtime = hip_runtime.get_runtime(cuda_mem_ops._load_hip_runtime)
    shifts = set()
    for address in (host, cache[-1].data_ptr()):
        found = ctypes.c_void_p()
        error = runtime.hipHostGetDevicePointer(
            ctypes.byref(found), ctypes.c_void_p(address), 0
        )
        if error != 0 or found.value is None:
            raise EngineUnavailable(f"hipHostGetDevicePointer returned {error}")
        shifts.add(found.value - address)
    if len(shifts) != 1:
        raise EngineUnavailable("the host cache has several places on the device")
    return host + shifts.pop()


def make_copier(engine: str, caches: Caches, settings: Settings) -> Copier:
    if engine == "kernel":
        return KernelCopier(caches, settings.kernel_programs)
    return MemcpyCopier(engine, caches)


# --- What is measured ---------------------------------------------------------------


def wait_for(event: "torch.Event") -> None:
    """Wait until the GPU has reached the event.

    Raises:
        Hang: It has not within a minute.

    """
    deadline = time.monotonic() + PATIENCE_S
    while not event.query():
        if time.monotonic() > deadline:
            raise Hang("the GPU did not get on")
        time.sleep(POLL_S)


class Decode:
    """Graphs of GEMMs over one set of weights, a graph per batch size."""

    def __init__(self) -> None:
        import torch

        def weights(rows: int, columns: int) -> "torch.Tensor":
            shape = (GEMMS // 2, rows, columns)
            return torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.01

        self._up = weights(HIDDEN, PROJECTED)
        self._down = weights(PROJECTED, HIDDEN)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def _run(self, activations: "torch.Tensor") -> "torch.Tensor":
        for up, down in zip(self._up, self._down, strict=True):
            activations = (activations @ up) @ down
        return activations

    def _graph(self, batch_size: int) -> "torch.cuda.CUDAGraph":
        import torch

        if batch_size not in self._graphs:
            shape = (batch_size, HIDDEN)
            activations = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self._run(activations)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._run(activations)
            self._graphs[batch_size] = graph, activations
        return self._graphs[batch_size][0]

    def replays_ms(self, batch_size: int, enough: Callable[[int], bool]) -> list[float]:
        """Return how long each replay takes, of as many in a row as are enough.

        Args:
            batch_size: M of the GEMMs.
            enough: Is asked after each replay, with their number.

        """
        import torch

        graph = self._graph(batch_size)
        events = [torch.cuda.Event(enable_timing=True)]
        events[0].record()
        while True:
            graph.replay()
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()
            if enough(len(events) - 1):
                break
            if len(events) > REPLAYS_AHEAD:
                wait_for(events[-REPLAYS_AHEAD])
        wait_for(events[-1])
        return [first.elapsed_time(last) for first, last in itertools.pairwise(events)]


class CopyLoop:
    """Transfers in a thread, ``depth`` of them in flight, while the block runs.

    The block begins when the first transfer has ended. ``submit`` queues a transfer and
    returns what waits for its end. What either raises is raised at one end of the
    block.

    Attributes:
        spans: Begin and end of each transfer, one after the other: a transfer begins
            when it is submitted or, if that is later, when the one before it ends.

    """

    def __init__(
        self,
        submit: Callable[[Transfer], Callable[[], None]],
        transfers: Sequence[Transfer],
        depth: int,
    ) -> None:
        self.spans: list[tuple[float, float]] = []
        self._submit, self._transfers, self._depth = submit, transfers, depth
        self._started, self._stop = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kv-copies", daemon=True)

    @property
    def failed(self) -> bool:
        return self._error is not None

    def _run(self) -> None:
        in_flight: deque[tuple[float, Callable[[], None]]] = deque()
        ended = 0.0

        def end_oldest() -> None:
            nonlocal ended
            submitted, wait = in_flight.popleft()
            wait()
            begin, ended = max(submitted, ended), time.perf_counter()
            self.spans.append((begin, ended))
            self._started.set()

        try:
            for transfer in itertools.cycle(self._transfers):
                if self._stop.is_set():
                    break
                submitted = time.perf_counter()
                in_flight.append((submitted, self._submit(transfer)))
                if len(in_flight) == self._depth:
                    end_oldest()
            while in_flight:
                end_oldest()
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()

    def _end(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise Hang("a transfer did not end")

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._started.wait(PATIENCE_S):
            self._stop.set()
            raise Hang("a transfer did not end")
        if self.failed:
            self._end()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._end()


class EngineBenchmark:
    """All measurements of one engine."""

    def __init__(
        self, engine: str, settings: Settings, caches: Caches, copier: Copier
    ) -> None:
        self.settings, self._caches, self._copier = settings, caches, copier
        self._engine = engine
        self._transfers = {
            blocks: random_transfers(settings, blocks, seed=blocks)
            for blocks in settings.blocks
        }
        for transfers in self._transfers.values():
            copier.prepare(transfers)

    def _cases(self) -> Iterator[tuple[str, int, list[Transfer]]]:
        for direction in DIRECTIONS:
            for blocks, transfers in self._transfers.items():
                yield direction, blocks, transfers

    def _settle(self) -> None:
        wait_for(self._caches.stream.record_event())

    def round_trip(self) -> dict[str, int]:
        """Store blocks, load them into other blocks, and compare every byte.

        ``regions_overwritten`` counts the regions where a block changed, on either
        side, that was no destination.
        """
        import torch

        settings = self.settings
        blocks = min(ROUND_TRIP_BLOCKS, settings.gpu_blocks // 2, settings.cpu_blocks)
        rng = random.Random(0)
        gpu = rng.sample(range(settings.gpu_blocks), 2 * blocks)
        cpu = rng.sample(range(settings.cpu_blocks), blocks)
        there, back = Transfer(gpu[:blocks], cpu), Transfer(gpu[blocks:], cpu)
        self._copier.prepare([there, back])
        expected: dict[str, torch.Tensor] = {}
        for name, cache in self._caches.gpu.items():
            shape = (blocks, *cache.shape[1:])
            # New contents each time: what an engine before left must not pass.
            expected[name] = torch.randint(
                256, shape, dtype=torch.uint8, device=cache.device
            )
            cache[torch.tensor(there.gpu, device=cache.device)] = expected[name]
        torch.cuda.synchronize()
        before = self._sums(gpu=back.gpu, cpu=cpu)
        for direction, transfer in (("store", there), ("load", back)):
            self._copier.copy(direction, transfer)
            self._settle()
        after = self._sums(gpu=back.gpu, cpu=cpu)
        return {
            "blocks": blocks,
            "regions": len(expected),
            "regions_differing": sum(
                not torch.equal(
                    cache[torch.tensor(back.gpu, device=cache.device)], expected[name]
                )
                for name, cache in self._caches.gpu.items()
            ),
            "regions_overwritten": sum(before[name] != after[name] for name in before),
        }

    def _sums(self, gpu: list[int], cpu: list[int]) -> dict[str, list[list[int]]]:
        """Return a sum of each block of each region, 0 for those named."""
        import torch

        sums: dict[str, list[list[int]]] = {}
        for caches, targets in ((self._caches.gpu, gpu), (self._caches.cpu, cpu)):
            for name, cache in caches.items():
                words = cache.view(torch.int64).sum(dim=1)
                words[torch.tensor(targets, device=words.device)] = 0
                sums.setdefault(name, []).append(words.tolist())
        return sums

    def submission(self) -> list[Result]:
        """Time the host's side of a transfer, on a stream that is idle."""
        results: list[Result] = []
        for direction, blocks, transfers in self._cases():
            samples = []
            for transfer in itertools.islice(
                itertools.cycle(transfers), self.settings.submissions
            ):
                begin = time.perf_counter()
                self._copier.copy(direction, transfer)
                samples.append((time.perf_counter() - begin) * 1e3)
                self._settle()
            results.append(
                {"direction": direction, "blocks": blocks} | summarize_ms(samples)
            )
        return results

    def _copies(self, direction: str, transfers: list[Transfer]) -> CopyLoop:
        import torch

        device = torch.cuda.current_device()
        stream = self._caches.stream

        def submit(transfer: Transfer) -> Callable[[], None]:
            # A new thread's device is the first.
            torch.cuda.set_device(device)
            self._copier.copy(direction, transfer)
            return functools.partial(wait_for, stream.record_event())

        return CopyLoop(submit, transfers, self.settings.depth)

    def _bandwidth(
        self, loop: CopyLoop, blocks: int, begin: float, end: float
    ) -> Result:
        moved = transfers_within(loop.spans, begin, end) * blocks
        return {
            "bandwidth_gb_per_s": (
                moved * self.settings.block_bytes / (end - begin) / 1e9
            ),
            "transfers_count": whole_transfers(loop.spans, begin, end),
            "window_s": end - begin,
        }

    def alone(self) -> list[Result]:
        """Copy with nothing beside it, by the loop that runs beside decode."""
        settings = self.settings
        results: list[Result] = []
        for direction, blocks, transfers in self._cases():
            with self._copies(direction, transfers) as loop:
                begin, first = time.perf_counter(), len(loop.spans)
                # The transfer that is under way at the beginning is not a whole one.
                while (
                    len(loop.spans) <= first + settings.transfers
                    and time.perf_counter() < begin + settings.case_s
                    and not loop.failed
                ):
                    time.sleep(POLL_S)
                end = time.perf_counter()
            results.append(
                {"direction": direction, "blocks": blocks}
                | self._bandwidth(loop, blocks, begin, end)
            )
        return results

    def loaded(self, decode: Decode) -> Iterator[Result]:
        """Replay decode alone, beside the copies, and alone again, case by case."""
        settings = self.settings
        replays = settings.replays
        for batch_size in settings.batch_sizes:
            decode.replays_ms(batch_size, lambda count: count >= WARMUP_REPLAYS)
            for direction, blocks, transfers in self._cases():

                def alone(batch_size: int = batch_size) -> dict[str, float]:
                    return summarize_ms(
                        decode.replays_ms(batch_size, lambda count: count >= replays)
                    )

                before = alone()
                with self._copies(direction, transfers) as loop:
                    begin = time.perf_counter()
                    samples = decode.replays_ms(batch_size, self._enough(loop, begin))
                    end = time.perf_counter()
                after = alone()
                copies = self._bandwidth(loop, blocks, begin, end)
                alone_ms = (before["median_ms"] + after["median_ms"]) / 2
                yield {
                    "engine": self._engine,
                    "batch_size": batch_size,
                    "direction": direction,
                    "blocks": blocks,
                    **copies,
                    "short": settings.shortfall(
                        len(samples), copies["transfers_count"]
                    ),
                    "decode_alone_before": before,
                    "decode_alone_after": after,
                    "drift_percent": (after["median_ms"] / before["median_ms"] - 1)
                    * 100,
                    "decode": summarize_ms(samples),
                    "slowdown": slowdown(samples, alone_ms),
                }

    def _enough(self, loop: CopyLoop, begin: float) -> Callable[[int], bool]:
        settings, first = self.settings, len(loop.spans)

        def enough(replays: int) -> bool:
            if loop.failed or time.perf_counter() > begin + settings.case_s:
                return True
            whole = len(loop.spans) - first - 1
            return replays >= settings.replays and whole >= settings.transfers

        return enough


# --- Which engine ran: rocprofv3 ----------------------------------------------------


class Traces(NamedTuple):
    """What a profile of copies has: records by direction or by kernel."""

    copies: Counter[str]
    kernels: Counter[str]


def profiled(settings: Settings) -> Settings:
    """Return what a profile copies: a short loop, with the same rows on the GPU."""
    fewest = min(settings.gpu_blocks, settings.cpu_blocks)
    return replace(
        settings,
        blocks=(min(PROFILE_BLOCKS, fewest),),
        cpu_blocks=min(2 * PROFILE_BLOCKS, settings.cpu_blocks),
    )


def profile_command(
    profiler: str, directory: Path, engine: str, settings: Settings
) -> list[str]:
    small = profiled(settings)
    options = {
        "--layers": small.layers,
        "--pages": small.page_kib,
        "--gpu-blocks": (small.gpu_blocks,),
        "--cpu-blocks": (small.cpu_blocks,),
        "--blocks": small.blocks,
        "--kernel-programs": (small.kernel_programs,),
    }
    words = [
        word
        for option, values in options.items()
        for word in (option, *map(str, values))
    ]
    return [
        profiler,
        *("--kernel-trace", "--memory-copy-trace", "--output-format", "csv"),
        *("-d", str(directory), "--", sys.executable, str(Path(__file__).resolve())),
        *("--copy-only", engine, *words),
    ]


def copy_only(engine: str, settings: Settings) -> None:
    """Copy a few blocks both ways with one engine, and nothing else."""
    small = profiled(settings)
    caches = Caches(small, fill=False)
    caches.make_host(engine)
    copier = make_copier(engine, caches, small)
    (transfer,) = random_transfers(small, small.blocks[0], 0, 1)
    copier.prepare([transfer])
    for direction in DIRECTIONS * PROFILE_ROUNDS:
        copier.copy(direction, transfer)
        wait_for(caches.stream.record_event())


def profile_engine(engine: str, settings: Settings) -> Result:
    """Run ``copy_only`` under rocprofv3; say what ran, or why that is not known."""
    profiler = shutil.which("rocprofv3")
    if profiler is None:
        return {"ran": "unknown", "reason": "rocprofv3 is not on the path"}
    with tempfile.TemporaryDirectory(prefix="kv-copies-") as name:
        directory = Path(name)
        try:
            code, said = run_bounded(
                profile_command(profiler, directory, engine, settings),
                PROFILE_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            reason = f"rocprofv3 took more than {PROFILE_TIMEOUT_S:g} s"
            return {"ran": "unknown", "reason": reason}
        except OSError as error:
            reason = f"rocprofv3 cannot be run: {error}"
            return {"ran": "unknown", "reason": reason}
        if code != 0:
            reason = f"rocprofv3 ended with {code}: {said[-400:]}"
            return {"ran": "unknown", "reason": reason}
        try:
            traces = read_traces(directory)
        except (OSError, ValueError, csv.Error) as error:
            return {"ran": "unknown", "reason": str(error)}
    return judge(traces, engine, settings)


def run_bounded(command: list[str], seconds: float) -> tuple[int, str]:
    """Run a command, and all that it starts, for so long; return its code and words.

    Raises:
        subprocess.TimeoutExpired: It took longer, and was ended.

    """
    # A session of its own: what the profiler starts ends with it.
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, err.strip() or out.strip()


def read_traces(directory: Path) -> Traces:
    """Read rocprofv3's CSV files, wherever under the directory it put them.

    Raises:
        ValueError: There is none, or a column that should be there is not.

    """
    copies = _count(directory, "memory_copy_trace.csv", "Direction")
    kernels = _count(directory, "kernel_trace.csv", "Kernel_Name")
    if copies is None and kernels is None:
        raise ValueError("rocprofv3 wrote no trace")
    moved: Counter[str] = Counter()
    for direction, count in (copies or Counter()).items():
        moved[direction.removeprefix("MEMORY_COPY_")] += count
    return Traces(moved, kernels or Counter())


def _count(directory: Path, suffix: str, column: str) -> Counter[str] | None:
    # The process id or a name of the user's comes before the suffix.
    files = sorted(directory.rglob(f"*{suffix}"))
    if not files:
        return None
    values: Counter[str] = Counter()
    for path in files:
        with path.open(newline="", errors="replace") as file:
            reader = csv.DictReader(file)
            if column not in (reader.fieldnames or ()):
                found = ", ".join(reader.fieldnames or ()) or "nothing"
                raise ValueError(
                    f"rocprofv3's {suffix} has no column {column} (it has {found})"
                )
            values.update(row[column] or "" for row in reader)
    return values


def fewest_records(settings: Settings) -> int:
    """Return how many copies rectangles must be in each direction of a profile.

    A page size with several layers is at least one copy a block.
    """
    blocks = profiled(settings).blocks[0] * PROFILE_ROUNDS
    return blocks * max(1, sum(layers > 1 for layers in settings.layers))


def judge(traces: Traces, engine: str, settings: Settings) -> Result:
    """Say what moved the blocks.

    Args:
        traces: Of a run that did nothing but copy.
        engine: What the run was to copy with.
        settings: What was measured.

    """
    copying = {
        name: count
        for name, count in traces.kernels.items()
        if name.startswith((BLIT_KERNEL, OWN_KERNEL))
    }
    needed = fewest_records(settings)
    result: Result = {
        "memory_copies": dict(traces.copies),
        "memory_copies_needed_each_way": needed,
        "copy_kernels": copying,
        "other_kernels": traces.kernels.total() - sum(copying.values()),
        "blocks_copied_each_way": profiled(settings).blocks[0] * PROFILE_ROUNDS,
    }
    # The kernel engine uploads its addresses and the block ids.
    uploads = 2 if engine == "kernel" else 0
    loads = max(0, traces.copies["HOST_TO_DEVICE"] - uploads)
    stores = traces.copies["DEVICE_TO_HOST"]
    found = f"{loads} copies to the GPU and {stores} back, where {needed} each must be"
    if loads + stores == 0:
        if copying:
            return {"ran": "kernel"} | result
        reason = "the traces have neither memory copies nor copy kernels"
        return {"ran": "unknown", "reason": reason} | result
    if os.environ.get("HSA_ENABLE_SDMA") == "0":
        reason = "with HSA_ENABLE_SDMA=0, kernels are recorded as memory copies"
        return {"ran": "unknown", "reason": reason} | result
    if copying:
        return {"ran": "partly kernels", "reason": found} | result
    if min(loads, stores) < needed:
        return {"ran": "unknown", "reason": found} | result
    return {"ran": "copy engine"} | result


# --- The run ------------------------------------------------------------------------


def require_gpu() -> None:
    """Refuse where there is nothing to measure.

    Raises:
        BenchmarkError: Says what is missing, and what works without.

    """
    remedy = (
        "A recorded result can be shown and drawn without a GPU: "
        "--from-json FILE [--png FILE]."
    )
    try:
        import torch
    except ImportError as error:
        raise BenchmarkError(f"torch cannot be imported ({error}). {remedy}") from error
    if not torch.cuda.is_available():
        raise BenchmarkError(
            "this benchmark needs an AMD or NVIDIA GPU that torch can use, and torch "
            f"{torch.__version__} finds none. {remedy}"
        )
    try:
        importlib.import_module("vllm.v1.simple_kv_offload.host_cache")
        from vllm.v1.simple_kv_offload.copy_engine import CopyEngine

        CopyEngine("rect")
    except (ImportError, ValueError) as error:
        raise BenchmarkError(
            f"the vLLM here is not one with the series applied ({error}). Apply it: "
            f"vllm-rocm-memory apply. {remedy}"
        ) from error


def describe_machine() -> Result:
    import torch
    import vllm
    from vllm.platforms import hip_runtime

    properties = torch.cuda.get_device_properties(0)
    if torch.version.hip:
        from vllm.v1.simple_kv_offload import cuda_mem_ops

        library = hip_runtime.get_runtime(cuda_mem_ops._load_hip_runtime)
        version = hip_runtime.runtime_version(library)
        runtime = f"HIP {hip_runtime.format_version(version)}"
        driver = reporting.amdgpu_driver()
    else:
        runtime = f"CUDA {torch.version.cuda}"
        driver = reporting.nvidia_driver()
    return {
        "gpu": properties.name,
        "gpu_memory_bytes": properties.total_memory,
        "driver": driver,
        "runtime": runtime,
        "os_kernel": platform.release(),
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vllm": getattr(vllm, "__version__", "unknown"),
        "series": _series_version(),
        "series_files_sha256": _series_digest(),
    }


def _series_version() -> str:
    try:
        return importlib.metadata.version("vllm-rocm-memory")
    except importlib.metadata.PackageNotFoundError:
        return "not installed (a patched tree)"


def _series_digest() -> str:
    """Identify the copy path that was measured, wherever it came from."""
    from vllm.platforms import hip_runtime
    from vllm.v1.simple_kv_offload import cuda_mem_ops

    folder = Path(cuda_mem_ops.__file__).parent
    paths = [*folder.glob("*.py"), *folder.glob("*.so"), Path(hip_runtime.__file__)]
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        contents = path.read_bytes()
        digest.update(f"{path.name} {len(contents)}\n".encode())
        digest.update(contents)
    return digest.hexdigest()


def measure(
    settings: Settings, command: str, quick: bool, keep: Callable[[Result], None]
) -> Result:
    """Measure all engines; one that fails or cannot run costs only itself.

    Where the GPU does not recover from an engine, the run ends, and
    ``ended_early`` in the result says so.

    Args:
        settings: What is measured.
        command: For the record.
        quick: For the record; nothing is profiled then.
        keep: Is called with the result so far after each engine.

    Raises:
        BenchmarkError: The caches or the weights do not fit.

    """
    import torch

    result: Result = {
        "benchmark": BENCHMARK,
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "settings": asdict(settings)
        | {"block_bytes": settings.block_bytes, "layout": LAYOUT, "quick": quick},
        "engines": {},
        "loaded": [],
        "ended_early": "",
    }
    begin = time.perf_counter()
    progress(
        f"{result['machine']['gpu']}: {settings.layout} a block, "
        f"{settings.cpu_blocks} CPU blocks to allocate and register"
    )
    caches = Caches(settings)
    caches.make_host(settings.engines[0])
    try:
        decode = Decode()
    except torch.OutOfMemoryError as error:
        raise BenchmarkError(
            f"decode's weights do not fit: {error} (fewer: --gpu-blocks)"
        ) from error
    for engine in settings.engines:
        entry: Result = {"status": "measured", "description": "", "reason": ""}
        result["engines"][engine] = entry
        if result["ended_early"]:
            entry |= {"status": "skipped", "reason": "the run ended before"}
            continue
        try:
            measure_engine(engine, settings, caches, decode, result)
            if torch.version.hip:
                entry["profile"] = (
                    {"ran": "unknown", "reason": "not profiled with --quick"}
                    if quick
                    else profile_engine(engine, settings)
                )
        except EngineUnavailable as error:
            entry |= {"status": "skipped", "reason": str(error)}
            progress(f"{engine}: skipped: {error}")
        except Exception as error:
            # Triton's errors have no class in common with torch's and ours.
            entry |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
            progress(f"{engine}: failed:\n{traceback.format_exc()}")
            if isinstance(error, Hang):
                result["ended_early"] = f"{engine}: {error}"
        if not result["ended_early"]:
            try:
                wait_for(caches.stream.record_event())
            except Exception as error:
                result["ended_early"] = f"after {engine} the GPU is lost: {error}"
        result["duration_s"] = time.perf_counter() - begin
        keep(result)
    return result


def measure_engine(
    engine: str, settings: Settings, caches: Caches, decode: Decode, result: Result
) -> None:
    """Measure one engine into its entry and the list of cases."""
    entry = result["engines"][engine]
    caches.make_host(engine)
    copier = make_copier(engine, caches, settings)
    entry["description"] = copier.description
    bench = EngineBenchmark(engine, settings, caches, copier)
    trip = entry["round_trip"] = bench.round_trip()
    if wrong := wrong_bytes(trip):
        entry |= {"status": "failed", "reason": wrong}
        progress(f"{engine}: failed: {wrong}")
        return
    entry["submission"] = bench.submission()
    entry["alone"] = bench.alone()
    for case in bench.loaded(decode):
        result["loaded"].append(case)
        progress(f"{engine}: {describe_case(case)}")


def wrong_bytes(trip: Result) -> str:
    """Say what a round trip found wrong, if anything."""
    if trip["regions_differing"] or trip["regions_overwritten"]:
        return (
            f"wrong bytes: {trip['regions_differing']} of {trip['regions']} regions "
            f"differ after a round trip, and in {trip['regions_overwritten']} other "
            "blocks were written"
        )
    return ""


def why_invalid(entry: Result) -> str:
    """Say why an engine's figures are none, if that is so."""
    if entry["status"] != "measured":
        return f"{entry['status']}: {entry['reason']}"
    return wrong_bytes(entry["round_trip"])


def describe_case(case: Result) -> str:
    return (
        f"M {case['batch_size']}, {case['direction']} of {case['blocks']} blocks: "
        f"decode {slowdown_text(case['slowdown'])} %, "
        f"{case['bandwidth_gb_per_s']:.1f} GB/s, {case['transfers_count']} transfers, "
        f"drift {percent_text(case['drift_percent'])} %"
        + (f" (short: {case['short']})" if case["short"] else "")
    )


# --- The result ---------------------------------------------------------------------


def report_of(result: Result) -> Report:
    tables = [interference_table(result), engine_table(result)]
    return Report(machine_text(result), tables)


def load(path: Path) -> tuple[Result, Report]:
    def read(result: Result) -> Report:
        # What only the picture needs.
        if measured(result):
            _ = picture_texts(result), marks_of(result)
        return report_of(result)

    return reporting.load(path, BENCHMARK, SCHEMA_VERSION, read)


def percent_text(value: float) -> str:
    """``+3.6``; whole numbers from 100 on, where a decimal says nothing."""
    return f"{value:+.0f}" if abs(value) >= 99.95 else f"{value:+.1f}"


def slowdown_text(slower: dict[str, float]) -> str:
    """``+2.1 (+2.4, +3.6)``: median, mean and p99 in percent."""
    median, mean, p99 = (
        percent_text(slower[f"{name}_percent"]) for name in ("median", "mean", "p99")
    )
    return f"{median} ({mean}, {p99})"


def interference_table(result: Result) -> Table:
    """The slowdown of decode and the bandwidth of the copies beside it."""
    engines = result["engines"]
    cases: dict[tuple[int, str, int], dict[str, str]] = {}
    for case in result["loaded"]:
        key = case["batch_size"], case["direction"], case["blocks"]
        lines = [
            slowdown_text(case["slowdown"]),
            f"drift {percent_text(case['drift_percent'])}",
            f"{case['bandwidth_gb_per_s']:.1f} GB/s",
            f"{case['transfers_count']} transfers",
        ]
        if case["short"]:
            lines.append(f"short: {case['short']}")
        cases.setdefault(key, {})[case["engine"]] = "\n".join(lines)
    invalid = {
        name: "wrong bytes" if entry["status"] == "measured" else entry["status"]
        for name, entry in engines.items()
        if why_invalid(entry)
    }
    return Table(
        "Decode slowdown next to KV block copies in %: median (mean, p99), "
        "and drift of decode alone",
        ["M", "direction", "blocks", *engines],
        [
            [
                *map(str, key),
                *(invalid.get(name) or cells.get(name, "-") for name in engines),
            ]
            for key, cells in cases.items()
        ],
    )


def engine_table(result: Result) -> Table:
    """What an engine does alone, and whether its bytes are right."""
    rows = []
    for name, entry in result["engines"].items():
        if reason := why_invalid(entry):
            rows.append([name, reason, "-", "-", "-", "-"])
            continue
        alone = [
            f"{case['direction']} {case['blocks']}: {case['bandwidth_gb_per_s']:.1f}"
            for case in entry["alone"]
        ]
        submission = [
            f"{case['direction']} {case['blocks']}: {case['median_ms']:.2f}"
            for case in entry["submission"]
        ]
        trip = entry["round_trip"]
        differing = f"{trip['regions_differing']} of {trip['regions']}"
        profile = entry.get("profile", {})
        ran = profile.get("ran", "not asked (AMD only)")
        if profile.get("reason"):
            ran += f": {profile['reason']}"
        rows.append(
            [
                name,
                entry["description"],
                "\n".join(alone),
                "\n".join(submission),
                differing,
                ran,
            ]
        )
    return Table(
        "Engines",
        [
            "engine",
            "how",
            "alone, GB/s",
            "submission, ms (median)",
            "regions that differ after a round trip",
            "what ran",
        ],
        rows,
    )


def machine_text(result: Result) -> str:
    machine, settings = result["machine"], result["settings"]
    pages = zip(settings["layers"], settings["page_kib"], strict=True)
    layout = " + ".join(f"{layers} x {kib} KiB" for layers, kib in pages)
    return (
        f"{machine['gpu']}, {machine['driver']}, {machine['runtime']}, "
        f"torch {machine['torch']}, vLLM {machine['vllm']}, "
        f"series {machine['series']}\n"
        f"{layout} a block, {settings['gpu_blocks']} GPU blocks, "
        f"{settings['cpu_blocks']} CPU blocks\n"
        f"{settings['layout']}\n"
        f"a case: at least {settings['replays']} replays and {settings['transfers']} "
        f"transfers, or {settings['case_s']:g} s; {settings['depth']} transfers in "
        "flight, alone as beside decode\n"
        f"{result['command']}"
        + (f"\nENDED EARLY: {result['ended_early']}" if result["ended_early"] else "")
    )


# --- The picture --------------------------------------------------------------------

# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = {
    "rect": "#0072B2",
    "batch": "#D55E00",
    "batch-flag": "#009E73",
    "kernel": "#CC79A7",
}


def measured(result: Result) -> list[str]:
    """Return the engines whose figures count."""
    return [name for name, entry in result["engines"].items() if not why_invalid(entry)]


def plotted_cases(result: Result) -> list[Result]:
    """Return one case per engine and direction: the one with the highest p99."""
    valid = measured(result)
    worst: dict[tuple[str, str], Result] = {}
    for case in result["loaded"]:
        if case["engine"] not in valid:
            continue
        known = worst.setdefault((case["engine"], case["direction"]), case)
        p99, highest = (each["slowdown"]["p99_percent"] for each in (case, known))
        if p99 > highest:
            worst[case["engine"], case["direction"]] = case
    if not worst:
        raise BenchmarkError("no engine was measured: there is nothing to draw")
    return list(worst.values())


def picture_texts(result: Result) -> tuple[str, str]:
    """Return the picture's title and what is under it."""
    machine, settings = result["machine"], result["settings"]

    def listed(numbers: Sequence[int]) -> str:
        return " or ".join(map(str, numbers))

    return (
        f"Decode next to KV block copies, {machine['gpu']}",
        f"Worst case of each engine (M {listed(settings['batch_sizes'])}; "
        f"{listed(settings['blocks'])} blocks of "
        f"{settings['block_bytes'] / KIB**2:.1f} MiB), {machine['runtime']}, vLLM "
        f"{machine['vllm']}.",
    )


class Mark(NamedTuple):
    engine: str
    direction: str
    bandwidth: float
    mean: float
    p99: float
    short: bool


def marks_of(result: Result) -> list[Mark]:
    return [
        Mark(
            case["engine"],
            case["direction"],
            case["bandwidth_gb_per_s"],
            case["slowdown"]["mean_percent"],
            case["slowdown"]["p99_percent"],
            bool(case["short"]),
        )
        for case in plotted_cases(result)
    ]


def check_picture(path: Path) -> None:
    """Refuse a picture that cannot be drawn, ahead of measuring.

    Raises:
        BenchmarkError: There is no matplotlib, or it has no format of this name.

    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise BenchmarkError(
            f"the picture needs matplotlib ({error}). Install it, or measure without "
            "--png, and draw the recorded result with --from-json FILE --png FILE."
        ) from error
    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise BenchmarkError(
            f"{path}: no format has the suffix {path.suffix!r}; there are "
            f"{', '.join(sorted(known))}"
        )


def draw(result: Result) -> "Figure":
    """Draw decode's slowdown against copy bandwidth, a panel per direction.

    Raises:
        BenchmarkError: There is no matplotlib, or nothing to draw.

    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError as error:
        raise BenchmarkError(
            f"the picture needs matplotlib ({error}). Install it, and draw a recorded "
            "result with --from-json FILE --png FILE."
        ) from error

    title, subtitle = picture_texts(result)
    marks = marks_of(result)
    figure = Figure(figsize=(8, 4.6), dpi=200, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    figure.subplots_adjust(left=0.125, right=0.985, top=0.79, bottom=0.21, wspace=0.06)
    figure.text(
        0.015,
        0.985,
        title,
        va="top",
        fontsize=13,
        fontweight="bold",
        color=INK,
    )
    figure.text(
        0.015,
        0.915,
        subtitle,
        va="top",
        fontsize=10,
        color=INK,
    )
    widest = max(mark.bandwidth for mark in marks)
    highest = max(mark.p99 for mark in marks)
    lowest = min(mark.mean for mark in marks)
    for panel, direction in zip(axes, DIRECTIONS, strict=True):
        panel.set_title(
            {"load": "load: host to GPU", "store": "store: GPU to host"}[direction],
            fontsize=11,
            color=INK,
        )
        panel.set_xlim(0, widest * 1.4)
        # Linear up to 1 %, so that a slowdown of nothing, or less, has a place.
        panel.set_yscale("symlog", linthresh=1)
        panel.set_ylim(min(-0.5, lowest * 1.5), max(10.0, highest * 6))
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
        panel.yaxis.set_minor_locator(_no_ticks())
        panel.grid(color="#DDDDDD", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.tick_params(labelsize=10, colors=INK)
        panel.set_xlabel("copies beside decode, GB/s", fontsize=10, color=INK)
        _draw_points(panel, [mark for mark in marks if mark.direction == direction])
    axes[0].set_ylabel("decode slowdown", fontsize=10, labelpad=1, color=INK)

    def key(**style: Any) -> Line2D:
        return Line2D([], [], color=INK, linestyle="none", marker="o", **style)

    handles = [
        key(label="p99 (the number)", markersize=8),
        key(label="mean", markersize=8, markerfacecolor="white"),
    ]
    if any(mark.engine == "kernel" for mark in marks):
        programs = result["settings"]["kernel_programs"]
        handles.append(
            Line2D([], [], linestyle="none", label=f"kernel: {programs} programs")
        )
    if any(mark.short for mark in marks):
        handles.append(Line2D([], [], linestyle="none", label="*: ended early"))
    figure.legend(
        handles=handles,
        loc="lower center",
        ncols=len(handles),
        fontsize=10,
        frameon=False,
        labelcolor=INK,
        bbox_to_anchor=(0.54, -0.005),
    )
    return figure


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _draw_points(panel: "Axes", marks: list[Mark]) -> None:
    for mark in marks:
        x, colour = mark.bandwidth, COLOURS.get(mark.engine, INK)
        panel.plot([x, x], [mark.mean, mark.p99], color=colour, linewidth=1.5, zorder=2)
        for value, face, name in (
            (mark.mean, "white", "mean"),
            (mark.p99, colour, "p99"),
        ):
            panel.plot(
                [x],
                [value],
                marker="o",
                markersize=8,
                linestyle="none",
                markeredgewidth=1.5,
                color=colour,
                markerfacecolor=face,
                gid=f"{mark.engine} {name}",
                zorder=3,
            )
    _place_labels(panel, marks, _marker_boxes(panel))


def _marker_boxes(panel: "Axes") -> "list[Bbox]":
    from matplotlib.transforms import Bbox

    figure = panel.figure
    radius = 5 * figure.dpi / 72
    boxes = []
    for line in panel.lines:
        places = panel.transData.transform(line.get_xydata())
        low, high = places.min(axis=0) - radius, places.max(axis=0) + radius
        boxes.append(Bbox([low, high]))
    return boxes


def _place_labels(panel: "Axes", marks: list[Mark], taken: "list[Bbox]") -> None:
    """Write each engine beside its point, where nothing else is."""
    for mark in sorted(marks, key=lambda mark: -mark.p99):
        star = "*" if mark.short else ""
        label = panel.annotate(
            f"{mark.engine}{star} {percent_text(mark.p99)} %",
            (mark.bandwidth, mark.p99),
            xytext=(0, 0),
            textcoords="offset points",
            fontsize=10,
            color=COLOURS.get(mark.engine, INK),
            fontweight="bold",
            gid=f"{mark.engine} label",
        )
        box = _first_free(panel, label, taken)
        taken.append(box)


# Where a label starts from its point, in points: right of it, left of it, over it.
_SIDES: tuple[tuple[Literal["left", "right", "center"], int], ...] = (
    ("left", 9),
    ("right", -9),
    ("center", 0),
)


def _first_free(panel: "Axes", label: "Annotation", taken: "list[Bbox]") -> "Bbox":
    """Move the label to the nearest free place in the panel; return its box."""
    label.set_verticalalignment("center")
    box = label.get_window_extent()
    for height in sorted(range(-180, 181, 6), key=abs):
        for align, shift in _SIDES:
            label.set_horizontalalignment(align)
            label.set_position((shift, height))
            box = label.get_window_extent()
            if _holds(panel.bbox, box) and not box.count_overlaps(taken):
                return box
    return box


def _holds(outer: "Bbox", inner: "Bbox") -> bool:
    room = outer.padded(-8)
    wide = room.x0 <= inner.x0 and inner.x1 <= room.x1
    return bool(wide and room.y0 <= inner.y0 and inner.y1 <= room.y1)


# --- The command --------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    parser = reporting.documented_parser(__doc__)

    def several(option: str, text: str, metavar: str) -> None:
        parser.add_argument(
            option, nargs="+", type=positive, help=text, metavar=metavar
        )

    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer cases and replays, under a minute on an H200, and no profile; "
        "values that are given count all the same",
    )
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, help="which to measure (all)"
    )
    several("--blocks", "blocks of a transfer (32 128)", "N")
    several("--batch-sizes", "M of the GEMMs (16 64)", "M")
    several("--layers", "layers of each page size (71 60)", "N")
    several("--pages", "those page sizes in KiB (16 32)", "KIB")
    for option, text in (
        ("--gpu-blocks", "blocks of the KV cache (1024)"),
        ("--cpu-blocks", "blocks of the host cache (2048)"),
        ("--replays", "replays of the decode graph in a case, at least (400)"),
        ("--kernel-programs", "programs of the copy kernel, at most (32)"),
    ):
        parser.add_argument(option, type=positive, metavar="N", help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the result")
    parser.add_argument(
        "--from-json",
        type=Path,
        metavar="FILE",
        help="show and draw a result that --json wrote; needs no GPU",
    )
    parser.add_argument(
        "--copy-only",
        choices=ENGINES,
        metavar="ENGINE",
        help="copy a few blocks with this engine and measure nothing: what runs under "
        "rocprofv3, or another profiler",
    )
    return parser


def settings_from(
    args: argparse.Namespace, parser: argparse.ArgumentParser
) -> Settings:
    """Return the settings that were asked for; ends the process where they clash."""
    settings = QUICK if args.quick else Settings()
    given = {
        "engines": args.engines,
        "layers": args.layers,
        "page_kib": args.pages,
        "gpu_blocks": args.gpu_blocks,
        "cpu_blocks": args.cpu_blocks,
        "blocks": args.blocks,
        "batch_sizes": args.batch_sizes,
        "replays": args.replays,
        "kernel_programs": args.kernel_programs,
    }
    changes: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, list):
            # A case that is named twice is measured once; layers are no cases.
            once = name not in ("layers", "page_kib")
            changes[name] = tuple(dict.fromkeys(value) if once else value)
        elif value is not None:
            changes[name] = value
    settings = replace(settings, **changes)
    if len(settings.layers) != len(settings.page_kib):
        parser.error(
            f"--layers has {len(settings.layers)} numbers and --pages "
            f"{len(settings.page_kib)}: give one page size for each number of layers"
        )
    fewest = min(settings.gpu_blocks, settings.cpu_blocks)
    if max(settings.blocks) > fewest:
        parser.error(
            f"a transfer of {max(settings.blocks)} blocks does not fit: there are "
            f"{settings.gpu_blocks} GPU blocks and {settings.cpu_blocks} CPU blocks"
        )
    if settings.gpu_blocks < 2:
        parser.error("the round trip needs at least 2 GPU blocks")
    return settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0, or 1 where an engine failed or copied wrong bytes, the run ended early, or
        nothing was measured.

    """
    parser = make_parser()
    args = parser.parse_args(arguments)
    settings = settings_from(args, parser)
    if args.from_json and args.json:
        parser.error(
            "--json writes what was measured, and --from-json measures nothing"
        )
    for path in (args.json, args.png):
        if path is None:
            continue
        if not path.absolute().parent.is_dir():
            parser.error(f"{path}: there is no folder {path.absolute().parent}")
        if path.is_dir():
            parser.error(f"{path} is a folder")
        # A file is replaced by a new one beside it.
        places = [path] if path.exists() else []
        if path.is_file() or not places:
            places.append(path.absolute().parent)
        if not all(os.access(place, os.W_OK) for place in places):
            parser.error(f"{path} cannot be written")
    try:
        if args.copy_only:
            require_gpu()
            copy_only(args.copy_only, settings)
            return 0
        if args.from_json:
            result, report = load(args.from_json)
        else:
            require_gpu()
            if args.png:
                check_picture(args.png)

            def keep(result: Result) -> None:
                if args.json:
                    try:
                        reporting.save(result, args.json)
                    except OSError as error:
                        progress(f"{args.json}: {error.strerror}")

            command = reporting.command_line(__file__, arguments)
            result = measure(settings, command, args.quick, keep)
            report = report_of(result)
        reporting.show(report)
        if args.json:
            reporting.save(result, args.json)
        if args.png:
            check_picture(args.png)
            figure = draw(result)
            try:
                figure.savefig(args.png)
            except ValueError as error:
                raise BenchmarkError(f"{args.png}: {error}") from error
    except (BenchmarkError, EngineUnavailable, Hang, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return int(not succeeded(result))


def succeeded(result: Result) -> bool:
    """Was something measured, and did every engine that ran copy every byte?"""
    bad = any(
        why_invalid(entry)
        for entry in result["engines"].values()
        if entry["status"] != "skipped"
    )
    return bool(measured(result)) and not bad and not result["ended_early"]


def leave(code: int) -> NoReturn:
    """End the process, even where a copy never ends."""
    if Hang.happened.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    try:
        status = main()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 0
    leave(status)
