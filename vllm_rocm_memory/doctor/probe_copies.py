# SPDX-License-Identifier: Apache-2.0
"""Copies between registered host memory and a device, and what made them.

Note [What tells a copy engine from a kernel]
The simulator accounts each copy to an engine. On CUDA PyTorch's profiler has copies
and kernels. On AMD it records a copy that a kernel made as a copy, so `rocprofv3` is
asked instead, where it is on the path: it runs this module as a program that does
nothing but copy. With HSA_ENABLE_SDMA=0 it too calls kernels copies.
"""

import csv
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vllm_rocm_memory.doctor.facts import (
    COPY_ENGINE,
    CUDA,
    KERNEL,
    BatchCopies,
    ProbeCopy,
    RuntimeFacts,
)

PLAIN, RECTANGLES, BATCHES = (
    "plain copies of 1 MiB",
    "rectangles of KV pages",
    "batches of 16 KiB pages",
)
BLIT_KERNEL = "__amd_rocclr_copyBuffer"

_BYTES = 1 << 20
_LAYERS, _BLOCKS, _PAGE_BYTES = 8, 4, 16 << 10
_PROFILE_TIMEOUT_S = 30.0

Verdict = tuple[str | None, str]
"""An engine, None where it is not known, and what tells so."""


class Copier:
    """Makes each kind of copy that this process can make.

    Args:
        facts: what is known so far; there is a device.
    """

    def __init__(self, facts: RuntimeFacts) -> None:
        self._facts = facts
        self._gpu: _Gpu = _Simulated() if facts.simulated else _Real()
        self._work: dict[str, Callable[[], None]] = {PLAIN: self._gpu.copy_plainly}

    def batches(self) -> BatchCopies:
        """How the series batches copies here, found by making some.

        Raises:
            RuntimeError: it cannot; the text says why, and what to do.
        """
        from vllm.v1.simple_kv_offload import cuda_mem_ops
        from vllm.v1.simple_kv_offload.copy_engine import CopyEngine

        self._gpu.show_to(cuda_mem_ops)
        caches = self._gpu.caches()
        batch = _Transfers(caches, CopyEngine.BATCH, self._gpu)
        batch.run()
        params = batch.there
        taken = cuda_mem_ops._batch_memcpy
        assert taken is not None
        self._work[RECTANGLES] = _Transfers(caches, CopyEngine.RECT, self._gpu).run
        self._work[BATCHES] = batch.run
        return BatchCopies(
            flags=params.attrs.flags,
            num_attrs=taken[1],
            refused=taken[1] < params.num_attrs,
            description=cuda_mem_ops.describe_batch_copies(),
        )

    def copies(self) -> tuple[ProbeCopy, ...]:
        """What made each kind of copy."""
        if self._facts.simulated:
            watch: Callable[[Callable[[], None]], Verdict] = _watch_simulator
        elif self._facts.vendor == CUDA:
            watch = _watch_cuda
        else:
            return (ProbeCopy(PLAIN, *_watch_amd()),)
        return tuple(ProbeCopy(name, *watch(work)) for name, work in self._work.items())


# --- the devices ----------------------------------------------------------------------


class _Gpu:
    """What a device and a simulated one have in common."""

    def copy_plainly(self) -> None:
        """Copy to the device and back, from and to page-locked memory."""
        raise NotImplementedError

    def caches(self) -> dict[str, Any]:
        """A small KV cache on the device: tensors by layer."""
        memory = self.empty(_LAYERS * _BLOCKS * _PAGE_BYTES)
        layers = memory.view(_LAYERS, _BLOCKS, _PAGE_BYTES)
        return {f"layer.{index}": layer for index, layer in enumerate(layers)}

    def empty(self, num_bytes: int) -> Any:
        raise NotImplementedError

    def show_to(self, module: Any) -> None:
        """Make vLLM's module see the device."""


class _Real(_Gpu):
    def copy_plainly(self) -> None:
        import torch

        host = torch.zeros(_BYTES, dtype=torch.uint8).pin_memory()
        device = host.to("cuda", non_blocking=True)
        host.copy_(device, non_blocking=True)
        torch.cuda.synchronize()

    def empty(self, num_bytes: int) -> Any:
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")


class _Simulated(_Gpu):
    def copy_plainly(self) -> None:
        import torch

        from vllm_rocm_memory.sim import hipsim
        from vllm_rocm_memory.sim.torch_stream import call

        host = torch.zeros(_BYTES, dtype=torch.uint8)
        device = ctypes.c_void_p()
        call("hipMalloc", ctypes.byref(device), _BYTES)
        call("hipHostRegister", host.data_ptr(), _BYTES, 0)
        try:
            to, back = hipsim.HOST_TO_DEVICE, hipsim.DEVICE_TO_HOST
            call("hipMemcpyAsync", device, host.data_ptr(), _BYTES, to, None)
            call("hipMemcpyAsync", host.data_ptr(), device, _BYTES, back, None)
            call("hipDeviceSynchronize")
        finally:
            call("hipHostUnregister", host.data_ptr())
            call("hipFree", device)

    def empty(self, num_bytes: int) -> Any:
        import torch

        from vllm_rocm_memory.sim import torch_device

        with torch_device.device_memory():
            return torch.empty(num_bytes, dtype=torch.uint8)

    def show_to(self, module: Any) -> None:
        from vllm.platforms import current_platform

        from vllm_rocm_memory.sim import torch_device
        from vllm_rocm_memory.sim.hipsim_platform import RocmView

        torch_device.install()
        vars(module)["current_platform"] = RocmView(current_platform)


class _Transfers:
    """Copies of KV blocks with one engine, to the host and back."""

    def __init__(self, caches: dict[str, Any], engine: Any, gpu: _Gpu) -> None:
        import torch
        from vllm.v1.simple_kv_offload.copy_engine import CopyEngine
        from vllm.v1.simple_kv_offload.cuda_mem_ops import build_params
        from vllm.v1.simple_kv_offload.host_cache import allocate_host_cache

        by_block = engine is CopyEngine.RECT
        self._host = allocate_host_cache(caches, _BLOCKS, block_after_block=by_block)
        self._caches = caches
        self._stream = torch.cuda.Stream()
        self.there = build_params(caches, self._host, self._stream, engine=engine)
        self.back = build_params(self._host, caches, self._stream, engine=engine)

    def run(self) -> None:
        from vllm.v1.simple_kv_offload.cuda_mem_ops import copy_blocks

        blocks = list(range(0, _BLOCKS, 2))
        copy_blocks(blocks, blocks, self.there)
        copy_blocks(blocks, blocks, self.back)
        self._stream.synchronize()


# --- who copied -----------------------------------------------------------------------


def _watch_simulator(work: Callable[[], None]) -> Verdict:
    from vllm_rocm_memory.sim import hipsim

    before = hipsim.stats().copies
    work()
    moved = {
        key: count.copies - (before[key].copies if key in before else 0)
        for key, count in hipsim.stats().copies.items()
    }
    blits = sum(moved.get(("blit", way), 0) for way in ("h2d", "d2h"))
    engines = sum(moved.get(("sdma", way), 0) for way in ("h2d", "d2h"))
    seen = f"the simulator counted {engines} on SDMA engines and {blits} as kernels"
    return KERNEL if blits else COPY_ENGINE, seen


def _watch_cuda(work: Callable[[], None]) -> Verdict:
    from vllm_rocm_memory.doctor import activity

    done = activity.activities(work)
    kernels = activity.names(done, activity.KERNEL)
    copies = sum(each.kind == activity.COPY for each in done)
    if kernels:
        return KERNEL, f"PyTorch's profiler saw {', '.join(sorted(kernels))}"
    if not copies:
        return None, "PyTorch's profiler saw neither copies nor kernels"
    return COPY_ENGINE, f"PyTorch's profiler saw {copies} copies and no kernel"


class Traces(NamedTuple):
    """Records of a program that did nothing but copy, by direction and by kernel."""

    copies: Counter[str]
    kernels: Counter[str]


def _watch_amd() -> Verdict:
    profiler = shutil.which("rocprofv3")
    if profiler is None:
        return None, "rocprofv3, which would tell, is not on the path"
    # One that was given up may still write there.
    with tempfile.TemporaryDirectory(
        prefix="probe-copies-", ignore_cleanup_errors=True
    ) as folder:
        failure = _profile(profiler, folder)
        if failure is not None:
            return None, failure
        try:
            traces = read_traces(Path(folder))
        except (OSError, ValueError, csv.Error) as error:
            return None, str(error)
    return judge(traces, os.environ)


def _profile(profiler: str, folder: str) -> str | None:
    """Have this module's copies traced into `folder`; why not, if not."""
    command = [
        *(profiler, "--kernel-trace", "--memory-copy-trace"),
        *("--output-format", "csv", "-d", folder, "--"),
        *(sys.executable, "-m", __spec__.name),
    ]
    # In the probe's session, with which it is ended. Not to a pipe, which what it has
    # started may hold open.
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        try:
            code = process.wait(_PROFILE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return f"rocprofv3 took more than {_PROFILE_TIMEOUT_S:g} s"
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    if code:
        last = said.strip().rpartition("\n")[2]
        return f"rocprofv3 ended with exit code {code}: {last}"
    return None


def read_traces(folder: Path) -> Traces:
    """Read rocprofv3's CSV files, wherever below `folder` it put them.

    Raises:
        ValueError: there is none, or a column that should be there is not.
    """
    copies = _column(folder, "memory_copy_trace.csv", "Direction")
    kernels = _column(folder, "kernel_trace.csv", "Kernel_Name")
    if copies is None and kernels is None:
        raise ValueError("rocprofv3 wrote no trace")
    return Traces(copies or Counter(), kernels or Counter())


def _column(folder: Path, suffix: str, column: str) -> Counter[str] | None:
    files = sorted(folder.rglob(f"*{suffix}"))
    values: Counter[str] = Counter()
    for path in files:
        with path.open(newline="", errors="replace") as file:
            reader = csv.DictReader(file)
            if column not in (reader.fieldnames or ()):
                raise ValueError(f"rocprofv3's {suffix} has no column {column}")
            values.update(row[column] or "" for row in reader)
    return values if files else None


def judge(traces: Traces, environment: Mapping[str, str]) -> Verdict:
    """What made the copies of these traces."""
    blits = sorted(name for name in traces.kernels if name.startswith(BLIT_KERNEL))
    if blits:
        return KERNEL, f"rocprofv3 saw the kernel {', '.join(blits)}"
    if environment.get("HSA_ENABLE_SDMA") == "0":
        return None, "with HSA_ENABLE_SDMA=0 rocprofv3 records kernels as copies"
    if not traces.copies:
        return None, "rocprofv3 saw neither copies nor copy kernels"
    copies = traces.copies.total()
    return COPY_ENGINE, f"rocprofv3 saw {copies} copies and no copy kernel"


if __name__ == "__main__":
    _Real().copy_plainly()
