#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a sleep and a wake of vLLM's CuMemAllocator take: seconds and host memory.

    python benchmarks/sleep_wake.py --output out
    python benchmarks/sleep_wake.py --trees upstream=DIR patched=DIR --output out
    python benchmarks/sleep_wake.py --model DIR --kv-cache 64GiB --ranks 2
    python benchmarks/sleep_wake.py --from-json out/sleep_wake.json --output out

Measures the allocator alone, without an engine, of the vLLM that ``import vllm`` finds
or of each tree that is named, with or without the series. A tree is a folder that has
``vllm/__init__.py``, as an entry of PYTHONPATH would be. Trees run one after the other
in the order given, each in processes of its own. One that fails costs only itself.

What is allocated is a mix of sizes and tags (``--sizes``), or the tensors of a model
(``--model``) as its safetensors headers have them. The sizes of ``--sizes`` and
``--kv-cache`` are each rank's; the tensors of a model are divided by the ranks, as
tensor parallelism divides nearly all of them.

A cycle is a sleep, a wake of the weights, a wake of the KV cache, another sleep, and a
wake of everything. Level 1 keeps what vLLM keeps then: weights, runtime and cudagraph;
level 2 keeps runtime and cudagraph. A time is that of the whole call, with a wait for
the device; several ranks start each step together and the slowest counts. A rate is
what was copied to or from the host against that time, in 10^9 bytes a second. The first
sleep of a process is told apart, since it has no host memory yet.

Copies to an H200 were seen to be slower for some 0.2 s after 64 GiB were released,
which its driver seems to clear meanwhile. ``--pause 0.5`` has each wake come later.

The link is measured in each process beforehand: one registered buffer, one copy by the
driver at a time. It is what a rate is read against.

After each wake every allocation that was kept is compared with what it was, by a sum
over all of its words on the device. What woke without a backup is read, and must be
zero on ROCm.

Host memory is the resident set of the process. A driver may map memory that does not
count there, so the fall of the machine's MemAvailable is told beside it.

The figures of a simulated GPU (``--simulate``) show behaviour, never speed. Not run on
AMD hardware.
"""

import argparse
import contextlib
import ctypes
import functools
import gc
import json
import math
import mmap
import multiprocessing
import os
import platform
import re
import resource
import signal
import statistics
import sys
import textwrap
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import reporting
from reporting import INK, BenchmarkError, Report, Result, Table, positive, progress

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BENCHMARK = "sleep_wake"
SCHEMA_VERSION = 1

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}

# What CuMemBackend.suspend has the allocator keep at each level.
KEPT_TAGS = {
    1: ("weights", "runtime", "cudagraph"),
    2: ("runtime", "cudagraph"),
}
TAGS = ("weights", "kv_cache", "runtime", "cudagraph")
# Those that a wake may leave asleep: vllm.device_allocator.DEFERRABLE_TAGS.
DEFERRABLE_TAGS = ("weights", "kv_cache")
KV_CACHE_TENSORS = 32

# 24 GiB of weights in pieces like a transformer's, and 64 GiB of KV cache.
DEFAULT_SIZES = "340x72MiB,32x2GiB:kv_cache"

LINK_BYTES, SIMULATED_LINK_BYTES, LINK_COPIES = GIB, MIB, 5
# 32 MiB of words are summed at a time.
CHUNK_WORDS = 32 * MIB // 8
# Seconds for one step of a rank. Upstream's first sleep copies 0.8 GB/s on an H200.
PATIENCE_S = 600.0
END_PATIENCE_S = 60.0
MOST_PAUSE_S = PATIENCE_S / 10
MOST_HEADER_BYTES = 100_000_000  # as the safetensors library has it

HOST_MEMORY_VARIABLE = "VLLM_SLEEP_HOST_MEMORY"
SIMULATED = "a simulated GPU: this shows behaviour, never speed"

# --- What is allocated --------------------------------------------------------------


class Entry(NamedTuple):
    """So many allocations of so many bytes each, with one tag."""

    pieces: int
    num_bytes: int
    tag: str

    def __str__(self) -> str:
        return f"{self.pieces} x {readable(self.num_bytes)} {self.tag}"


Mix = tuple[Entry, ...]


def readable(num_bytes: float) -> str:
    """``72 MiB``, ``2 GiB``, ``23.9 GiB``."""
    for unit in ("GiB", "MiB", "KiB"):
        if abs(num_bytes) >= UNITS[unit]:
            return f"{round(num_bytes / UNITS[unit], 2):g} {unit}"
    return f"{num_bytes:g} B"


def parse_size(text: str) -> int:
    """Read a size such as ``72MiB``.

    Raises:
        argparse.ArgumentTypeError: It is none, or is not a whole number of bytes.

    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]+)", text)
    if found is None or found[2] not in UNITS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: a number and one of {', '.join(UNITS)}, as in 72MiB"
        )
    size = float(found[1]) * UNITS[found[2]]
    if size < 1 or size != int(size):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of bytes")
    return int(size)


def parse_mix(text: str) -> Mix:
    """Read a mix such as ``340x72MiB,32x2GiB:kv_cache``; a tag left out is weights.

    Raises:
        argparse.ArgumentTypeError: Says what is wrong with which entry.

    """
    return tuple(map(_parse_entry, text.split(",")))


def _parse_entry(text: str) -> Entry:
    found = re.fullmatch(r"(?:(?P<count>\d+)x)?(?P<size>[\w.]+)(?::(?P<tag>.*))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no entry of a mix: COUNTxSIZE or COUNTxSIZE:TAG, as in "
            "340x72MiB or 32x2GiB:kv_cache"
        )
    count = 1 if found["count"] is None else int(found["count"])
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} has no allocation")
    tag = "weights" if found["tag"] is None else found["tag"]
    if tag not in TAGS:
        raise argparse.ArgumentTypeError(
            f"{text!r} has the tag {tag!r}; vLLM's are {', '.join(TAGS)}"
        )
    return Entry(count, parse_size(found["size"]), tag)


def kv_cache_mix(size: int) -> Mix:
    """Divide a KV cache into as many tensors as a model of 32 layers has."""
    whole = math.ceil(size / KV_CACHE_TENSORS)
    return (Entry(min(size, KV_CACHE_TENSORS), whole, "kv_cache"),)


def of_rank(mix: Mix, ranks: int) -> Mix:
    """Return what one of several ranks has of these allocations."""
    return tuple(
        entry._replace(num_bytes=math.ceil(entry.num_bytes / ranks)) for entry in mix
    )


def model_mix(path: Path) -> Mix:
    """Return the tensors of a checkpoint in safetensors files.

    Only the headers are read, so files that were cut off behind them serve too. The
    format is that of https://github.com/huggingface/safetensors: 8 bytes of header
    size, and JSON that has the place of each tensor.

    Args:
        path: A folder, a ``*.safetensors`` file or a ``*.safetensors.index.json``.

    Raises:
        BenchmarkError: Says which file is missing or damaged.

    """
    sizes = [
        size for shard in _shards(path) for size in tensor_bytes(shard).values() if size
    ]
    if not sizes:
        raise BenchmarkError(f"{path} has no tensors")
    counts = Counter(sizes)
    return tuple(Entry(counts[size], size, "weights") for size in counts)


def _shards(path: Path) -> list[Path]:
    if path.is_dir():
        index, single = (
            path / "model.safetensors.index.json",
            path / "model.safetensors",
        )
        if not index.exists() and not single.exists():
            raise BenchmarkError(f"{path} has neither {index.name} nor {single.name}")
        path = index if index.exists() else single
    if path.suffix == ".safetensors":
        return [path]
    if not path.name.endswith(".safetensors.index.json"):
        raise BenchmarkError(
            f"{path} is no model: a folder, a .safetensors file or a "
            ".safetensors.index.json is one"
        )
    try:
        names = sorted(set(json.loads(path.read_text())["weight_map"].values()))
        shards = [path.with_name(name) for name in names]
    except OSError as error:
        raise BenchmarkError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BenchmarkError(
            f"{path} is no safetensors index: {type(error).__name__}: {error}"
        ) from error
    if absent := [shard.name for shard in shards if not shard.is_file()]:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        raise BenchmarkError(
            f"{path} names {', '.join(absent[:3])}{more}, which {path.parent} does not "
            "have. The index has the total size and no tensor's: the shards are needed "
            "too, or as much of each as its header"
        )
    return shards


def tensor_bytes(path: Path) -> dict[str, int]:
    """Return the bytes of each tensor of a safetensors file, from its header.

    Raises:
        BenchmarkError: There is no such file, or it is damaged.

    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MOST_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            text = file.read(length)
        if len(text) < length:
            raise ValueError(f"{len(text)} of {length} bytes of the header")
        header = json.loads(text)
        header.pop("__metadata__", None)
        return {name: _stored_bytes(name, entry) for name, entry in header.items()}
    except OSError as error:
        raise BenchmarkError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BenchmarkError(
            f"{path} is no safetensors file: {type(error).__name__}: {error}"
        ) from error


def _stored_bytes(name: str, entry: Any) -> int:
    begin, end = map(int, entry["data_offsets"])
    if not 0 <= begin <= end:
        raise ValueError(f"{name} lies from {begin} to {end}")
    return end - begin


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        mix: The allocations of each rank.
        source: Where the mix comes from, for the record.
        level: Sleep level, 1 or 2.
        cycles: Cycles of two sleeps each.
        ranks: Processes at once, one a GPU.
        pause_s: Seconds between a sleep and the wake after it.
        host_memory: VLLM_SLEEP_HOST_MEMORY of the processes; None leaves it alone.
        simulate: On the HIP simulator.

    """

    mix: Mix
    source: str = "--sizes"
    level: int = 1
    cycles: int = 3
    ranks: int = 1
    pause_s: float = 0.0
    host_memory: str | None = None
    simulate: bool = False

    @property
    def tags(self) -> tuple[str, ...]:
        tags = {entry.tag for entry in self.mix}
        return tuple(tag for tag in TAGS if tag in tags)

    @property
    def wakes(self) -> tuple[str, ...]:
        """The tags that are woken one after the other."""
        return tuple(tag for tag in DEFERRABLE_TAGS if tag in self.tags)

    @property
    def num_bytes(self) -> int:
        return sum(entry.pieces * entry.num_bytes for entry in self.mix)

    def describe_mix(self, most: int = 6) -> str:
        """Return the mix in words, its largest entries if it has more than ``most``."""
        largest = sorted(self.mix, key=lambda each: -each.pieces * each.num_bytes)
        shown = self.mix if len(self.mix) <= most else largest[:most]
        more = len(self.mix) - len(shown)
        text = ", ".join(map(str, shown))
        return f"{text} and {more} more sizes" if more else text


# --- Host memory --------------------------------------------------------------------


def _field_bytes(path: str, name: str) -> int | None:
    with contextlib.suppress(OSError):
        if found := re.search(rf"^{name}:\s+(\d+) kB", Path(path).read_text(), re.M):
            return int(found[1]) * KIB
    return None


def resident_bytes() -> int:
    """Return the resident set of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def reset_peak() -> bool:
    """Let the peak begin anew; not every kernel can (proc_pid_clear_refs(5))."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes() -> int:
    """Return the most that was resident since ``reset_peak``."""
    peak = _field_bytes("/proc/self/status", "VmHWM")
    if peak is None:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
    return peak


def available_bytes() -> int | None:
    """Return the machine's MemAvailable, where the kernel says."""
    return _field_bytes("/proc/meminfo", "MemAvailable")


# --- One rank -----------------------------------------------------------------------


class Device(Protocol):
    """The GPU of a rank, real or simulated."""

    is_hip: bool

    @property
    def torch_device(self) -> "torch.device":
        """Where tensors are made."""

    def words(self, address: int, num_bytes: int) -> "torch.Tensor":
        """Return the device memory at an address as int64."""


class Gpu:
    """One that torch can use.

    Raises:
        BenchmarkError: There is none, or too few.

    """

    def __init__(self, rank: int, ranks: int) -> None:
        import torch

        if not torch.cuda.is_available():
            raise BenchmarkError(
                "this benchmark needs an AMD or NVIDIA GPU that torch can use, and "
                f"torch {torch.__version__} finds none. --simulate shows its behaviour "
                "on the HIP simulator, and a recorded result can be shown and drawn "
                "without a GPU: --from-json FILE [--output DIR]."
            )
        if (count := torch.cuda.device_count()) < ranks:
            raise BenchmarkError(
                f"{ranks} ranks need as many GPUs; torch finds {count}"
            )
        torch.cuda.set_device(rank)
        self.torch_device = torch.device("cuda", rank)
        self.is_hip = torch.version.hip is not None

    def words(self, address: int, num_bytes: int) -> "torch.Tensor":
        import torch

        class Memory:
            __cuda_array_interface__ = {  # noqa: RUF012
                "shape": (num_bytes // 8,),
                "typestr": "<i8",
                "data": (address, False),
                "version": 3,
            }

        words = torch.as_tensor(Memory(), device=self.torch_device)
        if words.data_ptr() != address:
            raise RuntimeError(f"torch copies what lies at {address:#x}")
        return words


class SimulatedGpu:
    """The HIP simulator under torch.

    Raises:
        BenchmarkError: It is not here, or torch has a GPU's own runtime.

    """

    is_hip = True

    def __init__(self, install: bool = True) -> None:
        import torch

        self.torch_device = torch.device("cpu")
        if not install:
            return
        if torch.version.cuda or torch.version.hip:
            raise BenchmarkError(
                f"the simulator needs torch's CPU build; this is {torch.__version__}"
            )
        try:
            from vllm_rocm_memory.sim import hipsim, torch_device

            hipsim.load()
            torch_device.install()
        except (ImportError, RuntimeError, FileNotFoundError) as error:
            raise BenchmarkError(
                f"the simulator, which vllm-rocm-memory has, cannot be used: {error}"
            ) from error
        # Kernels are host code there, and write the device's memory.
        hipsim.configure(host_reads="allow")

    def words(self, address: int, num_bytes: int) -> "torch.Tensor":
        import torch

        memory = (ctypes.c_uint8 * num_bytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.int64)


class Sums:
    """Sums over all words of an allocation, on the device.

    Each word is multiplied by an odd number of its place, so one word that changes
    changes the sum, and so do words that change places (but for a chance of 2^-60).
    """

    def __init__(self, device: Device) -> None:
        import torch

        generator = torch.Generator().manual_seed(1)
        shape, most = (CHUNK_WORDS,), 1 << 62
        factors = torch.randint(-most, most, shape, generator=generator)
        self._factors = factors.bitwise_or_(1).to(device.torch_device)
        self._products = torch.empty_like(self._factors)

    def of(self, words: "torch.Tensor") -> list[int]:
        """Return a sum of each 32 MiB."""
        import torch

        sums = []
        for part in words.split(CHUNK_WORDS):
            count = part.numel()
            products = self._products[:count]
            torch.mul(part, self._factors[:count], out=products)
            sums.append(products.sum())
        found: list[int] = torch.stack(sums).tolist()
        return found


def measure_link(
    device: Device, num_bytes: int, meet: Callable[[], object]
) -> dict[str, Any]:
    """Copy between the device and one registered buffer, all ranks at once.

    Args:
        device: This rank's.
        num_bytes: Of the buffer, which is given back.
        meet: Waits for the other ranks.

    Returns:
        The rate of the median copy in each direction, in 10^9 bytes a second; where the
        driver registers no such buffer, the reason.

    """
    import torch

    with mmap.mmap(
        -1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    ) as buffer:
        with contextlib.suppress(OSError):
            buffer.madvise(mmap.MADV_HUGEPAGE)
        host = torch.frombuffer(buffer, dtype=torch.uint8).zero_()
        there = torch.zeros(num_bytes, dtype=torch.uint8, device=device.torch_device)
        cudart = torch.cuda.cudart()
        error = cudart.cudaHostRegister(host.data_ptr(), num_bytes, 0)
        registered = error.value == 0
        link: dict[str, Any] = {"num_bytes": num_bytes, "reason": ""}
        if not registered:
            link["reason"] = (
                f"{readable(num_bytes)} of host memory cannot be registered: {error}"
            )
            # The runtime keeps the error for whoever launches a kernel next.
            with contextlib.suppress(RuntimeError):
                there.zero_()
        for name, target, source in (
            ("to_host_gb_per_s", host, there),
            ("to_device_gb_per_s", there, host),
        ):
            samples = []
            for _ in range(LINK_COPIES):
                torch.cuda.synchronize()
                # Each rank comes here as often, whatever its driver has said.
                meet()
                begin = time.perf_counter()
                target.copy_(source)
                torch.cuda.synchronize()
                samples.append(time.perf_counter() - begin)
            rate = num_bytes / statistics.median(samples) / 1e9
            link[name] = rate if registered else None
        if registered:
            cudart.cudaHostUnregister(host.data_ptr())
        del host, there, target, source
        torch.accelerator.empty_cache()
    return link


@dataclass
class Contents:
    """What a wake left in the allocations that are awake.

    Attributes:
        compared: Those that were kept.
        differing: Of those.
        read: Those that woke without a backup.
        not_zero: Of those, on ROCm.

    """

    compared: int = 0
    differing: int = 0
    read: int = 0
    not_zero: int = 0
    examples: list[str] = field(default_factory=list)

    def note(self, what: str, ptr: int, data: Any) -> None:
        if len(self.examples) < 3:
            size = readable(data.handle[1])
            self.examples.append(f"{what}: {size} {data.tag} at {ptr:#x}")


class RankBenchmark:
    """What one process measures of its allocator.

    Args:
        allocator: vLLM's CuMemAllocator, of any tree.
        device: Its GPU.
        settings: What is measured.
        meet: Waits for the other ranks.

    """

    def __init__(
        self,
        allocator: Any,
        device: Device,
        settings: Settings,
        meet: Callable[[], object],
    ) -> None:
        self._allocator, self._device = allocator, device
        self._settings, self._meet = settings, meet
        self._tensors: list[torch.Tensor] = []
        self._expected: dict[int, list[int]] = {}
        self._sums = Sums(device)

    def allocate(self) -> dict[str, Any]:
        """Make the mix with random contents; return bytes and allocations by tag.

        Raises:
            BenchmarkError: The device has too little memory.

        """
        import torch

        settings = self._settings
        free, total = torch.accelerator.get_memory_info()
        lacking = (
            f"the mix needs {readable(settings.num_bytes)} a GPU, and "
            f"{readable(free)} of {readable(total)} are free (fewer: --sizes, "
            "--kv-cache, or more --ranks for --model)"
        )
        if settings.num_bytes > free:
            raise BenchmarkError(lacking)
        try:
            for tag in settings.tags:
                with self._allocator.use_memory_pool(tag=tag):
                    self._tensors += [
                        torch.empty(
                            entry.num_bytes,
                            dtype=torch.uint8,
                            device=self._device.torch_device,
                        )
                        for entry in settings.mix
                        if entry.tag == tag
                        for _ in range(entry.pieces)
                    ]
        except torch.OutOfMemoryError as error:
            raise BenchmarkError(f"{lacking}: {error}") from error
        made: dict[str, Any] = {}
        kept = KEPT_TAGS[settings.level]
        for ptr, data in self._all():
            of_tag = made.setdefault(data.tag, {"count": 0, "num_bytes": 0})
            of_tag["count"] += 1
            of_tag["num_bytes"] += data.handle[1]
            words = self._words(ptr, data)
            words.random_()
            if data.tag in kept:
                self._expected[ptr] = self._sums.of(words)
        torch.cuda.synchronize()
        return made

    def free(self) -> None:
        """Let go of the tensors and of the allocator's pools."""
        self._tensors.clear()
        self._allocator.release_pools()
        gc.collect()

    def _all(self) -> list[tuple[int, Any]]:
        return list(self._allocator.pointer_to_data.items())

    def _words(self, ptr: int, data: Any) -> "torch.Tensor":
        return self._device.words(ptr, data.handle[1])

    def steps(self) -> Iterator[Result]:
        """Sleep and wake; each step is yielded as it ends."""
        allocator, settings = self._allocator, self._settings
        kept, everything = KEPT_TAGS[settings.level], allocator.wake_up

        def sleep() -> None:
            allocator.sleep(offload_tags=kept)

        for cycle in range(settings.cycles):
            yield self._step(cycle, "sleep", sleep, awake=())
            time.sleep(settings.pause_s)
            if not settings.wakes:
                yield self._step(cycle, "wake everything", everything, settings.tags)
                continue
            # The first wake brings back what no wake leaves asleep.
            awake = [tag for tag in settings.tags if tag not in DEFERRABLE_TAGS]
            for tag in settings.wakes:
                awake.append(tag)
                wake = functools.partial(allocator.wake_up, [tag])
                yield self._step(cycle, f"wake {tag}", wake, awake)
            yield self._step(cycle, "sleep", sleep, awake=())
            time.sleep(settings.pause_s)
            yield self._step(cycle, "wake everything", everything, settings.tags)

    def _step(
        self,
        cycle: int,
        name: str,
        call: Callable[[], object],
        awake: Sequence[str],
    ) -> Result:
        import torch

        before = {
            ptr: (data.is_asleep, data.cpu_backup_tensor is not None)
            for ptr, data in self._all()
        }
        torch.cuda.synchronize()
        peak_is_new = reset_peak()
        self._meet()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        peak, resident = peak_bytes(), resident_bytes()
        # Others may have copies under way until here.
        self._meet()
        changed = [
            (ptr, data) for ptr, data in self._all() if before[ptr][0] != data.is_asleep
        ]
        moved = [
            data.handle[1]
            for ptr, data in changed
            if before[ptr][1] or data.cpu_backup_tensor is not None
        ]
        step = {
            "cycle": cycle,
            "step": name,
            "duration_s": seconds,
            "moved_bytes": sum(moved),
            "changed_bytes": sum(data.handle[1] for _, data in changed),
            "resident_bytes": resident,
            "peak_bytes": peak,
            "peak_is_of_this_step": peak_is_new,
            "available_bytes": available_bytes(),
            "contents": None,
        }
        for ptr, data in self._all():
            if data.is_asleep == (data.tag in awake):
                state = "sleeps" if data.is_asleep else "is awake"
                raise RuntimeError(f"{data.tag} at {ptr:#x} {state} after {name}")
        if awake:
            step["contents"] = asdict(self.check_contents({ptr for ptr, _ in changed}))
        return step

    def check_contents(self, woken: set[int]) -> Contents:
        """Look at every allocation that is awake.

        Args:
            woken: Those that were asleep a moment ago.

        """
        contents = Contents()
        awake = [(ptr, data) for ptr, data in self._all() if not data.is_asleep]
        # The kept ones last: one that shares its memory with another differs then.
        for ptr, data in sorted(awake, key=lambda each: each[0] in self._expected):
            words = self._words(ptr, data)
            if ptr in self._expected:
                contents.compared += 1
                if self._sums.of(words) != self._expected[ptr]:
                    contents.differing += 1
                    contents.note("differs", ptr, data)
            elif ptr in woken:
                contents.read += 1
                if bool(words.any()) and self._device.is_hip:
                    contents.not_zero += 1
                    contents.note("not zero", ptr, data)
                # What is zero after the next wake is so because of that wake.
                words.fill_(-1)
        return contents

    def trim(self) -> Result | None:
        """Have the allocator give host memory back, where it has a function for it."""
        trim = getattr(self._allocator, "trim_host_memory", None)
        if trim is None:
            return None
        return {"given_back_bytes": trim(), "resident_bytes": resident_bytes()}


def find_vllm(folder: str | None) -> Result:
    """Import the vLLM of a tree; return what identifies it.

    Raises:
        RuntimeError: It is another tree's.

    """
    import vllm

    # A tree may have links in it, to files of another.
    place = Path(vllm.__file__ or "").absolute().parents[1]
    if folder is not None and not place.samefile(folder):
        raise RuntimeError(f"import vllm finds {place} rather than {folder}")
    return {
        "folder": str(place),
        "vllm": getattr(vllm, "__version__", "unknown"),
    }


def load_allocator(tree: Result) -> Any:
    """Return vLLM's CuMemAllocator, and add to its tree whether it is the series'.

    Raises:
        RuntimeError: There is none here.

    """
    from vllm.device_allocator import cumem

    try:
        allocator = cumem.CuMemAllocator.get_instance()
    except AssertionError as error:
        raise RuntimeError(
            f"{tree['folder']} has no cuMem allocator: {error}"
        ) from error
    tree["has_series"] = hasattr(allocator, "trim_host_memory")
    return allocator


def describe_machine(device: Device, simulated: bool) -> Result:
    import torch

    if simulated:
        from vllm_rocm_memory.sim import hipsim

        gpu, driver = "simulated", "none"
        runtime = f"simulator of HIP {hipsim.profile()}"
    else:
        gpu, hip = torch.cuda.get_device_name(0), torch.version.hip
        runtime = f"HIP {hip}" if hip else f"CUDA {torch.version.cuda}"
        driver = reporting.amdgpu_driver() if hip else reporting.nvidia_driver()
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    return {
        "gpu": gpu,
        "driver": driver,
        "runtime": runtime,
        "cpu_cores": len(os.sched_getaffinity(0)),
        "host_memory_bytes": _field_bytes("/proc/meminfo", "MemTotal"),
        "numa_nodes": max(1, len(nodes)),
        "huge_pages": _first_line("/sys/kernel/mm/transparent_hugepage/enabled"),
        "locked_memory_limit_bytes": _limit(resource.RLIMIT_MEMLOCK),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().split("\n")[0]
    except OSError:
        return "unknown"


def measure_rank(
    rank: int,
    folder: str | None,
    settings: Settings,
    meet: Callable[[], object],
    send: Callable[[str, Any], object],
) -> RankBenchmark:
    """Measure one tree in this process, as one of several ranks.

    Args:
        rank: The number of this one, and of its GPU.
        folder: The tree; None is the vLLM that is installed.
        settings: What is measured.
        meet: Waits for the other ranks.
        send: Takes each part of the result as it is there: its kind and itself.

    Returns:
        What is to be freed.

    Raises:
        BenchmarkError: Nothing can be measured on this machine.

    """
    if folder is not None:
        sys.path.insert(0, folder)
    if settings.host_memory is not None:
        os.environ[HOST_MEMORY_VARIABLE] = settings.host_memory
    tree = find_vllm(folder)
    import torch

    device: Device = SimulatedGpu() if settings.simulate else Gpu(rank, settings.ranks)
    allocator = load_allocator(tree)
    send("machine", describe_machine(device, settings.simulate))
    send("tree", tree)
    torch.manual_seed(rank)
    link_bytes = SIMULATED_LINK_BYTES if settings.simulate else LINK_BYTES
    send("link", measure_link(device, link_bytes, meet))
    bench = RankBenchmark(allocator, device, settings, meet)
    send("allocations", bench.allocate())
    begin = time.perf_counter()
    gc.collect()
    collecting = time.perf_counter() - begin
    meet()
    send(
        "before",
        {
            "resident_bytes": resident_bytes(),
            "available_bytes": available_bytes(),
            "garbage_collection_s": collecting,
        },
    )
    for step in bench.steps():
        send("step", step)
    send("trim", bench.trim())
    return bench


def rank_main(
    rank: int, folder: str | None, settings: Settings, barrier: Any, pipe: Connection
) -> None:
    """Be the process of a rank."""
    # What vLLM logs is no part of the tables, and an interrupt is the parent's.
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def send(kind: str, part: Any) -> None:
        pipe.send((kind, part))

    try:
        bench = measure_rank(
            rank, folder, settings, lambda: barrier.wait(PATIENCE_S), send
        )
        send("done", None)
    except BenchmarkError as error:
        send("refused", str(error))
    except BaseException as error:
        traceback.print_exc()
        send("failed", f"{type(error).__name__}: {error}")
    else:
        # All is measured: what fails now is told by the exit code alone.
        bench.free()


# --- The run ------------------------------------------------------------------------


class RunFailed(Exception):
    """A tree could not be measured to the end; the text says why."""


class TreeRun:
    """The processes that measure one tree, and what they have said so far."""

    def __init__(self, name: str, folder: str | None, settings: Settings) -> None:
        self._name, self._folder, self._settings = name, folder, settings
        self._parts: list[dict[str, list[Any]]] = [{} for _ in range(settings.ranks)]
        self._told = 0

    def measure(self) -> None:
        """Run all ranks to their end.

        Raises:
            BenchmarkError: Nothing can be measured on this machine.
            RunFailed: A rank failed, died, or did not go on.

        """
        context = multiprocessing.get_context("spawn")
        ranks = self._settings.ranks
        barrier = context.Barrier(ranks)
        pipes, processes = [], []
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=rank_main,
                    args=(rank, self._folder, self._settings, barrier, theirs),
                    daemon=True,
                )
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            self._listen(pipes, processes)
            for rank, process in enumerate(processes):
                process.join(END_PATIENCE_S)
                if process.exitcode != 0:
                    progress(
                        f"{self._name}: the process of rank {rank} did not end well: "
                        f"exit code {process.exitcode}"
                    )
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.join(END_PATIENCE_S)
                if process.is_alive():
                    process.kill()
            for pipe in pipes:
                pipe.close()

    def _listen(self, pipes: list[Connection], processes: list[Any]) -> None:
        running = dict(enumerate(pipes))
        while running:
            ready = wait(list(running.values()), PATIENCE_S)
            if not ready:
                raise RunFailed(f"no rank went on within {PATIENCE_S:g} s")
            for rank, pipe in list(running.items()):
                if pipe not in ready:
                    continue
                try:
                    kind, part = pipe.recv()
                except EOFError:
                    processes[rank].join(END_PATIENCE_S)
                    raise RunFailed(
                        f"the process of rank {rank} died, exit code "
                        f"{processes[rank].exitcode}"
                    ) from None
                if kind == "refused":
                    raise BenchmarkError(part)
                if kind == "failed":
                    where = f"rank {rank}: " if self._settings.ranks > 1 else ""
                    raise RunFailed(f"{where}{part}")
                if kind == "done":
                    del running[rank]
                    continue
                self._parts[rank].setdefault(kind, []).append(part)
                self._tell_steps()

    def _tell_steps(self) -> None:
        steps = self.steps()
        for step in steps[self._told :]:
            text = describe_step(step, self._settings.simulate)
            progress(f"{self._name}: {text}")
        self._told = len(steps)

    def _joined(self, kind: str) -> Result | None:
        """What the ranks have said together, or None where one has nothing."""
        parts = [next(iter(parts.get(kind, ())), None) for parts in self._parts]
        known = [part for part in parts if part is not None]
        return joined(known) if len(known) == len(parts) else None

    @property
    def machine(self) -> Result | None:
        machines: list[Result] = self._parts[0].get("machine", [])
        return next(iter(machines), None)

    def steps(self) -> list[Result]:
        """The steps that all ranks have made."""
        by_rank = [parts.get("step", []) for parts in self._parts]
        return [joined(parts) for parts in zip(*by_rank, strict=False)]

    def result(self) -> Result:
        """What is known of the tree, as far as its ranks came."""
        return {
            **(self._joined("tree") or {}),
            "link": self._joined("link"),
            "allocations": self._joined("allocations"),
            "before": self._joined("before"),
            "steps": self.steps(),
            "trim": self._joined("trim"),
        }


def _slowest(rates: list[float | None]) -> float | None:
    """Return the rate of ranks that each wait for the slowest."""
    known = [rate for rate in rates if rate is not None]
    return len(rates) * min(known) if len(known) == len(rates) else None


# What becomes of a field of several ranks; any other is the first rank's. Ranks have
# their host memory each, and the machine's MemAvailable and step names in common.
JOINED: dict[str, Callable[[list[Any]], Any]] = {
    "duration_s": max,
    "garbage_collection_s": max,
    "moved_bytes": sum,
    "changed_bytes": sum,
    "resident_bytes": sum,
    "peak_bytes": sum,
    "peak_is_of_this_step": all,
    "given_back_bytes": sum,
    "count": sum,
    "num_bytes": sum,
    "to_host_gb_per_s": _slowest,
    "to_device_gb_per_s": _slowest,
    "reason": lambda reasons: next(filter(None, reasons), ""),
    "compared": sum,
    "differing": sum,
    "read": sum,
    "not_zero": sum,
    "examples": lambda lists: [text for texts in lists for text in texts],
}


def joined(parts: Sequence[Result]) -> Result:
    """Return the record that several ranks make together, field by field."""

    def join(name: str) -> Any:
        values = [part[name] for part in parts]
        if all(isinstance(value, dict) for value in values):
            return joined(values)
        return JOINED[name](values) if name in JOINED else values[0]

    return {name: join(name) for name in parts[0]}


def measure(
    settings: Settings,
    trees: dict[str, str | None],
    command: str,
    keep: Callable[[Result], None],
) -> Result:
    """Measure all trees in turn; one that fails costs only itself.

    Args:
        settings: What is measured.
        trees: Folders by name; None is the vLLM that is installed.
        command: For the record.
        keep: Is called with the result so far after each run of a tree.

    Raises:
        BenchmarkError: The first tree says that nothing can be measured here.

    """
    variable = settings.host_memory or os.environ.get(HOST_MEMORY_VARIABLE)
    result: Result = {
        "benchmark": BENCHMARK,
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "simulated": settings.simulate,
        "machine": {},
        "settings": {
            "mix": [entry._asdict() for entry in settings.mix],
            "mix_in_words": settings.describe_mix(),
            "source": settings.source,
            "level": settings.level,
            "cycles": settings.cycles,
            "ranks": settings.ranks,
            "pause_s": settings.pause_s,
            "host_memory": variable or "not set",
        },
        "runs": [],
    }
    begin = time.perf_counter()
    progress(f"each of {settings.ranks} ranks: {settings.describe_mix()}")
    for name, folder in trees.items():
        run = TreeRun(name, folder, settings)
        status, reason = "measured", ""
        try:
            run.measure()
        except (RunFailed, BenchmarkError) as error:
            if isinstance(error, BenchmarkError) and not result["runs"]:
                raise
            status, reason = "failed", str(error)
            progress(f"{name}: failed: {error}")
        result["machine"] = result["machine"] or run.machine or {}
        result["runs"].append(
            {"tree": name, "status": status, "reason": reason} | run.result()
        )
        result["duration_s"] = time.perf_counter() - begin
        keep(result)
    return result


def describe_step(step: Result, simulated: bool) -> str:
    text = f"cycle {step['cycle'] + 1}: {step['step']}"
    if not simulated:
        text += f" {step['duration_s']:.3f} s"
    if step["moved_bytes"]:
        text += f", {readable(step['moved_bytes'])} copied"
    if wrong := wrong_contents(step["contents"]):
        text += f"; {wrong}"
    return text


def wrong_contents(contents: Result | None) -> str:
    """Say what a wake did not restore, if anything."""
    if contents is None:
        return ""
    wrong = {
        "differ after the wake": contents["differing"],
        "woke without zeroes": contents["not_zero"],
    }
    texts = [f"{count} allocations {what}" for what, count in wrong.items() if count]
    if not texts:
        return ""
    return f"{', '.join(texts)} ({'; '.join(contents['examples'])})"


# --- The result ---------------------------------------------------------------------


def report_of(result: Result) -> Report:
    return Report(machine_text(result), [speed_table(result), memory_table(result)])


def load(path: Path) -> tuple[Result, Report]:
    return reporting.load(path, BENCHMARK, SCHEMA_VERSION, report_of)


# The steps that are told apart, in the order of the tables.
FIGURES = (
    "first sleep",
    "later sleeps",
    "wake weights",
    "wake kv_cache",
    "wake everything",
)


class Timing(NamedTuple):
    """All times of one step of one tree.

    Attributes:
        seconds: Of each.
        moved_bytes, changed_bytes: Copied, and mapped or unmapped, each time.
        link: 10^9 bytes a second of the link in this step's direction, if known.

    """

    seconds: list[float]
    moved_bytes: int
    changed_bytes: int
    link: float | None

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def rate(self) -> float | None:
        """10^9 bytes a second; None where nothing was copied."""
        return self.moved_bytes / self.median_s / 1e9 if self.moved_bytes else None


def by_tree(result: Result) -> dict[str, Result]:
    return {run["tree"]: run for run in result["runs"]}


def wrong_wakes(run: Result) -> list[str]:
    """Say what each wake of a run did not restore."""
    return [text for step in run["steps"] if (text := wrong_contents(step["contents"]))]


def figures_of(result: Result) -> dict[str, dict[str, Timing]]:
    """Return the figures of each tree by step; none where contents were wrong."""
    return {
        name: {}
        if wrong_wakes(run)
        else {
            label: figure
            for label in FIGURES
            if (figure := _figure(run, label)) is not None
        }
        for name, run in by_tree(result).items()
    }


def _figure(run: Result, label: str) -> Timing | None:
    steps = _steps_of(run, label)
    if not steps:
        return None
    way = "to_host" if label.endswith(("sleep", "sleeps")) else "to_device"
    return Timing(
        [step["duration_s"] for step in steps],
        max(step["moved_bytes"] for step in steps),
        max(step["changed_bytes"] for step in steps),
        link_rate(run, way),
    )


def link_rate(run: Result, way: str) -> float | None:
    """Return the link's rate ``to_host`` or ``to_device``, if it is known."""
    rate: float | None = run["link"] and run["link"][f"{way}_gb_per_s"]
    return rate


def _steps_of(run: Result, label: str) -> list[Result]:
    sleeps = [step for step in run["steps"] if step["step"] == "sleep"]
    if label == "first sleep":
        return sleeps[:1]
    if label == "later sleeps":
        return sleeps[1:]
    return [step for step in run["steps"] if step["step"] == label]


class Memory(NamedTuple):
    """Host memory of one tree in bytes.

    All but ``backup``, ``before`` and ``given_back`` are what was resident beyond
    ``before``; ``unavailable`` is the fall of MemAvailable.
    """

    backup: int
    before: int
    asleep: int
    peak: int
    awake: int
    trimmed: int | None
    given_back: int | None
    unavailable: int | None
    peak_is_of_a_step: bool


def memory_of(run: Result) -> Memory | None:
    before, steps, trim = run["before"], run["steps"], run["trim"]
    if not (before and steps):
        return None
    resident, available = before["resident_bytes"], before["available_bytes"]
    sleeps = [step for step in steps if step["step"] == "sleep"]
    falls = [
        available - step["available_bytes"]
        for step in sleeps
        if None not in (available, step["available_bytes"])
    ]
    return Memory(
        backup=max(step["moved_bytes"] for step in sleeps),
        before=resident,
        asleep=max(step["resident_bytes"] for step in sleeps) - resident,
        peak=max(step["peak_bytes"] for step in steps) - resident,
        awake=steps[-1]["resident_bytes"] - resident,
        trimmed=trim and trim["resident_bytes"] - resident,
        given_back=trim and trim["given_back_bytes"],
        unavailable=max(falls, default=None),
        peak_is_of_a_step=all(step["peak_is_of_this_step"] for step in steps),
    )


def speed_table(result: Result) -> Table:
    """Seconds of each step, and how near to the link it comes."""
    figures, simulated = figures_of(result), result["simulated"]
    runs = by_tree(result)
    rows = [
        [
            label,
            *(_speed_cell(steps.get(label), simulated) for steps in figures.values()),
        ]
        for label in FIGURES
        if any(label in steps for steps in figures.values())
    ]
    if not simulated:
        links = map(_link_cell, runs.values())
        rows.insert(0, ["link, one registered buffer", *links])
    failures = [_failure_text(run) for run in runs.values()]
    if any(failures):
        rows.append(["failed", *failures])
    title = "Sleep and wake, whole calls: median (fastest to slowest), copied bytes"
    if pause_s := result["settings"]["pause_s"]:
        title += f"; {pause_s:g} s from each sleep to the wake after it"
    if simulated:
        title = f"Sleep and wake on {SIMULATED}"
    return Table(title, ["", *runs], rows)


def _failure_text(run: Result) -> str:
    """Say why not all of a tree's figures are there and right, if that is so."""
    reasons = [run["reason"]] if run["status"] != "measured" else []
    return "\n".join(reasons + ["wrong contents"] * bool(wrong_wakes(run)))


def _link_cell(run: Result) -> str:
    out, back = (link_rate(run, way) for way in ("to_host", "to_device"))
    if out is None or back is None:
        return f"unknown: {run['link']['reason']}" if run["link"] else "-"
    return f"out {out:.1f} GB/s, in {back:.1f} GB/s"


def _speed_cell(figure: Timing | None, simulated: bool) -> str:
    if figure is None:
        return "-"
    count = len(figure.seconds)
    moved = (
        f"{readable(figure.moved_bytes)} copied"
        if figure.moved_bytes
        else f"{readable(figure.changed_bytes)}, nothing copied"
    )
    if simulated:
        return f"{moved}, {'once' if count == 1 else f'{count} times'}"
    text = f"{figure.median_s:.3f} s"
    if count > 1:
        text += f" ({min(figure.seconds):.3f} to {max(figure.seconds):.3f})"
    if figure.rate is not None:
        text += f"\n{figure.rate:.1f} GB/s"
        if figure.link is not None:
            text += f", {100 * figure.rate / figure.link:.0f} % of the link"
    return f"{text}\n{moved}"


def memory_table(result: Result) -> Table:
    """Host memory beyond what the process had before, and what was compared."""
    runs = by_tree(result)
    columns = [_memory_column(run, result["simulated"]) for run in runs.values()]
    labels = dict.fromkeys(label for column in columns for label in column)
    title = "Host memory of the process, beyond that before the first sleep"
    return Table(
        "Backup and contents" if result["simulated"] else title,
        ["", *runs],
        [[label, *(column.get(label, "-") for column in columns)] for label in labels],
    )


def _memory_column(run: Result, simulated: bool) -> dict[str, str]:
    memory = memory_of(run)
    if memory is None:
        return {}

    def beyond(num_bytes: int | None) -> str:
        if num_bytes is None:
            return "-"
        sign = "-" if num_bytes < 0 else "+"
        ratio = f" ({num_bytes / memory.backup:.2f} x)" if memory.backup else ""
        return f"{sign}{readable(abs(num_bytes))}{ratio}"

    peak = "" if memory.peak_is_of_a_step else ", since the process began"
    column = {
        "allocated": "\n".join(
            f"{made['count']} of {tag}, {readable(made['num_bytes'])}"
            for tag, made in run["allocations"].items()
        ),
        "backup": readable(memory.backup),
        "contents": contents_text(run),
    }
    if simulated:
        # The simulated device's memory is the process's too.
        return column
    return column | {
        "before the first sleep": readable(memory.before),
        "asleep": beyond(memory.asleep),
        "peak": beyond(memory.peak) + peak,
        "after the last wake": beyond(memory.awake),
        "after trim_host_memory": (
            "-"
            if memory.given_back is None
            else f"{beyond(memory.trimmed)}, {readable(memory.given_back)} given back"
        ),
        "fall of MemAvailable, asleep": beyond(memory.unavailable),
        "gc.collect() alone": f"{run['before']['garbage_collection_s']:.3f} s",
    }


def contents_text(run: Result) -> str:
    """Say what was compared after the wakes, and what was not as it had been."""
    if wrong := wrong_wakes(run):
        return f"WRONG: {wrong[0]}"
    wakes = [step["contents"] for step in run["steps"] if step["contents"]]
    compared = max((contents["compared"] for contents in wakes), default=0)
    read = max((contents["read"] for contents in wakes), default=0)
    return (
        f"right in {len(wakes)} wakes: up to {compared} allocations compared, "
        f"{read} others read"
    )


def whole(result: Result) -> bool:
    """Was every tree measured, and was everything right after each wake?"""
    return bool(result["runs"]) and not any(map(_failure_text, result["runs"]))


def machine_text(result: Result) -> str:
    machine, settings = result["machine"], result["settings"]
    lines = []
    if result["simulated"]:
        lines.append(f"Measured on {SIMULATED}.")
    if machine:
        limit = machine["locked_memory_limit_bytes"]
        memory = machine["host_memory_bytes"]
        lines += [
            f"{settings['ranks']} x {machine['gpu']}, {machine['driver']}, "
            f"{machine['runtime']}, torch {machine['torch']}, "
            f"Python {machine['python']}",
            f"{machine['cpu_cores']} CPU cores, "
            f"{'unknown' if memory is None else readable(memory)} of host memory, "
            f"NUMA nodes: {machine['numa_nodes']}, huge pages {machine['huge_pages']}, "
            f"lockable memory {'unlimited' if limit is None else readable(limit)}",
        ]
    for name, run in by_tree(result).items():
        if "folder" in run:
            series = "with" if run["has_series"] else "without"
            lines.append(f"{name}: vLLM {run['vllm']} {series} the series")
    each = " each" if settings["ranks"] > 1 else ""
    pause_s = settings["pause_s"]
    paused = f", wakes {pause_s:g} s after the sleep" if pause_s else ""
    cycles = "1 cycle" if settings["cycles"] == 1 else f"{settings['cycles']} cycles"
    lines += [
        f"{settings['mix_in_words']}{each} ({settings['source']})",
        f"level {settings['level']}, {cycles}{paused}; "
        f"{HOST_MEMORY_VARIABLE} {settings['host_memory']}",
        result["command"],
    ]
    return "\n".join(lines)


# --- The picture --------------------------------------------------------------------

# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def picture_texts(result: Result) -> tuple[str, str]:
    """Return the title and the line below it."""
    machine, settings = result["machine"], result["settings"]
    gpus = machine.get("gpu", "no GPU")
    if settings["ranks"] > 1:
        gpus = f"{settings['ranks']} x {gpus}"
    each = " on each" if settings["ranks"] > 1 else ""
    text = f"{settings['mix_in_words']}{each}; level {settings['level']}. "
    if settings["pause_s"]:
        text += f"Wakes {settings['pause_s']:g} s after the sleep. "
    # Two lines have room.
    lines = textwrap.wrap(f"{text}Whole calls, medians.", 112, max_lines=2)
    return f"Sleep and wake, {gpus}", "\n".join(lines)


def draw(result: Result) -> "Figure":
    """Draw rates, the KV cache's wake and host memory, a bar per tree.

    Raises:
        BenchmarkError: There is no matplotlib, or nothing that may be drawn.

    """
    if result["simulated"]:
        raise BenchmarkError(f"there is no picture of {SIMULATED}")
    figures = figures_of(result)
    if not any(each.rate for steps in figures.values() for each in steps.values()):
        raise BenchmarkError("no step copied anything: there is nothing to draw")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchmarkError(
            f"the picture needs matplotlib ({error}). Install it, and draw the "
            "recorded result with --from-json FILE --output DIR."
        ) from error

    runs = by_tree(result)
    title, subtitle = picture_texts(result)
    picture = Figure(figsize=(9, 4.8), dpi=200, facecolor="white")
    FigureCanvasAgg(picture)
    panels = picture.subplots(1, 3, width_ratios=(3.2, 1.4, 2.2))
    picture.subplots_adjust(left=0.05, right=0.985, top=0.8, bottom=0.22, wspace=0.22)
    for text, place, size, weight in (
        (title, 0.98, 13, "bold"),
        (subtitle, 0.91, 9.5, "normal"),
    ):
        picture.text(
            0.012, place, text, va="top", fontsize=size, fontweight=weight, color=INK
        )
    link = _draw_rates(panels[0], figures, result["runs"])
    wakes = {name: steps.get("wake kv_cache") for name, steps in figures.items()}
    _draw_bars(
        panels[1],
        "KV cache wake, s",
        [""],
        {name: [wake and wake.median_s] for name, wake in wakes.items()},
        "{:.2f}",
    )
    _draw_memory(panels[2], {name: memory_of(run) for name, run in runs.items()})
    dashed = "dashed: the backup"
    if link is not None:
        dashed = f"dashed: the link ({link:.1f} GB/s), and the backup"
    handles, labels = panels[0].get_legend_handles_labels()
    picture.legend(
        handles,
        labels,
        loc="lower center",
        ncols=len(runs),
        fontsize=10,
        frameon=False,
        labelcolor=INK,
        bbox_to_anchor=(0.5, -0.01),
        title=dashed,
        title_fontsize=9,
    )
    return picture


def _draw_rates(
    panel: "Axes", figures: dict[str, dict[str, Timing]], runs: list[Result]
) -> float | None:
    """Draw the steps that copy, and the link, which is returned if it is known."""
    copying = [
        label
        for label in FIGURES
        if any(label in steps and steps[label].rate for steps in figures.values())
    ]
    rates = {
        name: [steps[label].rate if label in steps else None for label in copying]
        for name, steps in figures.items()
    }
    broken = [label.replace(" ", "\n", 1) for label in copying]
    _draw_bars(panel, "copied, GB/s", broken, rates, "{:.3g}")
    known = [
        rate
        for run in runs
        for way in ("to_host", "to_device")
        if (rate := link_rate(run, way)) is not None
    ]
    if not known:
        return None
    link = statistics.mean(known)
    panel.axhline(link, color=INK, linewidth=1, linestyle="--", gid="link")
    panel.set_ylim(0, max(link * 1.08, panel.get_ylim()[1]))
    return link


def _draw_memory(panel: "Axes", memories: dict[str, Memory | None]) -> None:
    ratios: dict[str, list[float | None]] = {
        name: [size / held.backup for size in (held.asleep, held.peak, held.awake)]
        if held is not None and held.backup
        else [None, None, None]
        for name, held in memories.items()
    }
    labels = ["asleep", "peak", "after\nthe wake"]
    _draw_bars(panel, "host memory / backup", labels, ratios, "{:.2f}")
    panel.axhline(1, color=INK, linewidth=1, linestyle="--", gid="backup")


def _draw_bars(
    panel: "Axes",
    title: str,
    labels: Sequence[str],
    values: dict[str, list[float | None]],
    text: str,
) -> None:
    """Draw a group of bars for each label, in it one for each name."""
    width = 0.8 / len(values)
    for number, (name, heights) in enumerate(values.items()):
        shift = (number - (len(values) - 1) / 2) * width
        known = [(place, y) for place, y in enumerate(heights) if y is not None]
        bars = panel.bar(
            [place + shift for place, _ in known],
            [y for _, y in known],
            width=width * 0.92,
            color=COLOURS[number % len(COLOURS)],
            label=name,
            zorder=2,
        )
        panel.bar_label(
            bars,
            [text.format(y) for _, y in known],
            padding=2.5,
            fontsize=8,
            color=INK,
            # A dashed line may pass here.
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )
    panel.set_title(title, fontsize=10.5, color=INK, loc="left")
    panel.set_xticks(range(len(labels)), labels)
    panel.set_xlim(-0.6, len(labels) - 0.4)
    panel.margins(y=0.12)
    panel.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(labelsize=9, colors=INK)
    panel.tick_params(axis="x", length=0)


# --- The command --------------------------------------------------------------------


def pause(text: str) -> float:
    value = float(text)
    if not 0 <= value <= MOST_PAUSE_S:
        raise argparse.ArgumentTypeError(
            f"{text} is not from 0 to {MOST_PAUSE_S:g} seconds"
        )
    return value


def tree(text: str) -> tuple[str, str]:
    """Read ``NAME=DIR``.

    Raises:
        argparse.ArgumentTypeError: It is not that, or vLLM is not in the folder.

    """
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=DIR")
    path = Path(folder).expanduser().absolute()
    if not (path / "vllm" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(
            f"{folder} has no vllm/__init__.py: a tree is what PYTHONPATH would name"
        )
    return name, str(path)


def make_parser() -> argparse.ArgumentParser:
    parser = reporting.documented_parser(__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--sizes",
        type=parse_mix,
        metavar="MIX",
        help="allocations of each rank, COUNTxSIZE[:TAG] with commas between; a tag is "
        f"one of {', '.join(TAGS)} (weights), a unit one of {', '.join(UNITS)} "
        f"({DEFAULT_SIZES})",
    )
    what.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="weights like those of a checkpoint: a folder, a .safetensors file or a "
        ".safetensors.index.json with its shards, of which the headers are enough",
    )
    parser.add_argument(
        "--kv-cache",
        type=parse_size,
        metavar="SIZE",
        help=f"that much KV cache a rank beside them, in {KV_CACHE_TENSORS} tensors",
    )
    parser.add_argument(
        "--level", type=int, choices=tuple(KEPT_TAGS), default=1, help="of sleep (1)"
    )
    for option, default, text in (
        ("--cycles", 3, "cycles of two sleeps and their wakes (3)"),
        ("--ranks", 1, "processes at once, one a GPU (1)"),
    ):
        parser.add_argument(
            option, type=positive, default=default, metavar="N", help=text
        )
    parser.add_argument(
        "--pause",
        type=pause,
        default=0.0,
        metavar="SECONDS",
        help="wait so long between a sleep and the wake after it; a driver may clear "
        "released memory meanwhile, beside which copies to the device are slower (0)",
    )
    parser.add_argument(
        "--trees",
        nargs="+",
        type=tree,
        metavar="NAME=DIR",
        help="folders to import vllm from (the one that is installed)",
    )
    parser.add_argument(
        "--host-memory",
        choices=("keep", "release"),
        help=f"set {HOST_MEMORY_VARIABLE}, which the series has, for all trees",
    )
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="run on the HIP simulator, which shows behaviour, never speed",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help=f"write {BENCHMARK}.json, .txt and .png there",
    )
    parser.add_argument(
        "--from-json",
        type=Path,
        metavar="FILE",
        help="show a result that --output wrote, and draw it; needs no GPU",
    )
    return parser


def settings_from(
    args: argparse.Namespace, parser: argparse.ArgumentParser
) -> Settings:
    """Return the settings that were asked for; ends the process where they clash.

    Raises:
        BenchmarkError: The model cannot be read.

    """
    mix: Mix = args.sizes or ()
    sources = ["--sizes"] if args.sizes else []
    if args.model is not None:
        mix = of_rank(model_mix(args.model), args.ranks)
        divided = f", divided by {args.ranks}" if args.ranks > 1 else ""
        sources.append(f"--model {args.model.absolute().name}{divided}")
    if args.kv_cache is not None:
        if any(entry.tag == "kv_cache" for entry in mix):
            parser.error("--kv-cache and --sizes both have a KV cache: give one")
        mix += kv_cache_mix(args.kv_cache)
        sources.append("--kv-cache")
    if not mix:
        mix, sources = parse_mix(DEFAULT_SIZES), ["the default"]
    return Settings(
        mix=mix,
        source=", ".join(sources),
        level=args.level,
        cycles=args.cycles,
        ranks=args.ranks,
        pause_s=args.pause,
        host_memory=args.host_memory,
        simulate=args.simulate,
    )


def trees_from(
    args: argparse.Namespace, parser: argparse.ArgumentParser
) -> dict[str, str | None]:
    """Return the folders by name; ends the process where a name comes twice."""
    if args.trees is None:
        return {"installed": None}
    trees: dict[str, str | None] = dict(args.trees)
    if len(trees) < len(args.trees):
        parser.error("two of --trees have the same name")
    return trees


def write(result: Result, report: Report, folder: Path) -> None:
    reporting.save(result, folder / f"{BENCHMARK}.json")
    (folder / f"{BENCHMARK}.txt").write_text(str(report))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0, or 1 where a tree could not be measured or a wake restored wrong contents.

    """
    parser = make_parser()
    args = parser.parse_args(arguments)
    trees = trees_from(args, parser)
    folder: Path | None = args.output
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise BenchmarkError(f"{folder} cannot be written")
        if args.from_json is not None:
            result, report = load(args.from_json)
        else:
            settings = settings_from(args, parser)

            def keep(result: Result) -> None:
                if folder is None:
                    return
                try:
                    write(result, report_of(result), folder)
                except OSError as error:
                    progress(f"{folder}: {error.strerror}")

            command = reporting.command_line(__file__, arguments)
            result = measure(settings, trees, command, keep)
            report = report_of(result)
        reporting.show(report)
        if folder is not None:
            write(result, report, folder)
            _draw_into(result, folder / f"{BENCHMARK}.png", bool(args.from_json))
    except (BenchmarkError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return int(not whole(result))


def _draw_into(result: Result, path: Path, drawing_is_all: bool) -> None:
    try:
        draw(result).savefig(path)
    except BenchmarkError as error:
        if drawing_is_all:
            raise
        progress(f"no {path.name}: {error}")


if __name__ == "__main__":
    sys.exit(main())
