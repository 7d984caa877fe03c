# SPDX-License-Identifier: Apache-2.0
"""A worker extension of vLLM that makes chosen KV copies fail, inside the worker.

The failure is the HIP call's own: the simulator is told that the next call fails, and
then the call is made. What a copy that failed was to write is filled with garbage, so
that whoever uses it gives a wrong answer.
"""

import ctypes
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import vllm.logger
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.platforms import hip_runtime
from vllm.v1.simple_kv_offload import copy_backend, cuda_mem_ops, disk_backend
from vllm.v1.simple_kv_offload.copy_backend import DmaCopyBackend
from vllm.v1.simple_kv_offload.cuda_mem_ops import pin_tensor

from vllm_rocm_memory.sim import hipsim, torch_stream

BATCH_COPY = "hipMemcpyBatchAsync"
RECTANGLE_COPY = "hipMemcpy2DAsync"
# Whichever of them the engine in use calls.
COPY = "copy"
# About 0.75 in float32, so that an answer made of it is wrong and not NaN.
GARBAGE = 0x3F


@dataclass
class Fault:
    """What is to fail, and how.

    Attributes:
        way: "load", "store", or "compute": what orders a store after the compute.
        call: The HIP function that fails, or COPY.
        skip: How many of them succeed before.
        times: How many fail then.
        errors: hipError_t of each in turn, and from the first again.
        part: Of the calls that one copy takes, the one that fails, from 0.
        hidden: The worker is not told. It then takes garbage for blocks, which is the
            control: were it not told of a failure, the test would notice.
    """

    way: str
    call: str
    skip: int
    times: int
    errors: list[int]
    part: int
    hidden: bool

    def comes_now(self) -> bool:
        """One more of its kind: is it to fail?"""
        if self.skip > 0:
            self.skip -= 1
            return False
        self.times -= 1
        return True

    def next_error(self) -> int:
        self.errors = [*self.errors[1:], self.errors[0]]
        return self.errors[-1]


@dataclass
class Rig:
    """The wrappers around the worker's calls, and what they have seen."""

    faults: list[Fault] = field(default_factory=list)
    copies: Counter[str] = field(default_factory=Counter)
    blocks: Counter[str] = field(default_factory=Counter)
    # By way: the blocks of the last copy that was queued whole, from and to.
    last: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    failed: Counter[str] = field(default_factory=Counter)
    loads_by_step: list[int] = field(default_factory=list)
    # What the simulator had counted when the counts began.
    before: Counter[str] = field(default_factory=Counter)
    # A host tier that is not the worker's own, and the buffer that it lies in.
    scattered: tuple[dict[str, torch.Tensor], torch.Tensor] | None = None
    # Of the copy that this thread makes: the fault that is for it, and its next call.
    _copy: threading.local = field(default_factory=threading.local)
    # Between telling the simulator and the call that fails no other thread may call.
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ways: dict[int, str] = field(default_factory=dict)
    _events: dict[int, str] = field(default_factory=dict)
    _saving: threading.local = field(default_factory=threading.local)

    def install(self) -> None:
        handler = _handler()
        self._ways = {
            handler.load_stream.cuda_stream: "load",
            handler.store_stream.cuda_stream: "store",
        }
        self._wrap_copies()
        self._wrap_events()
        wait_for_save, start_load_kv = handler.wait_for_save, handler.start_load_kv

        def saving() -> None:
            self._saving.active = True
            try:
                wait_for_save()
            finally:
                self._saving.active = False

        handler.wait_for_save = saving

        def loading() -> None:
            self.loads_by_step.append(0)
            start_load_kv()

        handler.start_load_kv = loading
        self.watch_launches()

    def watch_launches(self) -> None:
        backend = _handler()._backend
        launch_copy = backend.launch_copy

        def launch(src: Any, dst: Any, is_store: bool, *rest: Any, **named: Any) -> Any:
            if not is_store:
                self.loads_by_step[-1] += 1
            return launch_copy(src, dst, is_store, *rest, **named)

        backend.launch_copy = launch

    def _take(self, way: str, call: str) -> Fault | None:
        for fault in self.faults:
            if (fault.way, fault.call) == (way, call):
                if not fault.comes_now():
                    return None
                if fault.times == 0:
                    self.faults.remove(fault)
                self.failed[way] += 1
                return fault
        return None

    def _wrap_copies(self) -> None:
        # Each has it by name.
        for module in (copy_backend, disk_backend):
            vars(module)["copy_blocks"] = self._counting(vars(module)["copy_blocks"])
        vars(cuda_mem_ops)["_submit_rectangles"] = self._failing_rectangles()
        vars(cuda_mem_ops)["_submit"] = self._failing_batch()

    def _counting(self, copy_blocks: Any) -> Any:
        def wrapped(src: Sequence[int], dst: Sequence[int], params: Any) -> None:
            way = params.direction
            self.copies[way] += 1
            self.blocks[way] += len(src)
            self._copy.fault, self._copy.part = self._take(way, COPY), 0
            copy_blocks(src, dst, params)
            self.last[way] = list(src), list(dst)

        return wrapped

    def _failing_rectangles(self) -> Any:
        submit = cuda_mem_ops._submit_rectangles

        def wrapped(rectangles: Any, params: Any) -> Any:
            fault: Fault | None = self._copy.fault
            self._copy.part = len(rectangles)
            if fault is None or fault.part >= len(rectangles):
                return submit(rectangles, params)
            with self._lock:
                hipsim.fail(RECTANGLE_COPY, fault.part + 1, fault.next_error())
                failed = submit(rectangles, params)
            assert failed is not None and failed[0] == fault.part
            spoil_rectangles(rectangles.table[fault.part :])
            return None if fault.hidden else failed

        return wrapped

    def _failing_batch(self) -> Any:
        submit = cuda_mem_ops._submit

        def wrapped(copies: Any, first: int, count: int, params: Any) -> int:
            fault, part = self._copy.fault, self._copy.part
            self._copy.part += 1
            if fault is None or part != fault.part:
                return submit(copies, first, count, params)
            with self._lock:
                hipsim.fail(BATCH_COPY, 1, fault.next_error())
                error = submit(copies, first, count, params)
            assert error != 0
            spoil(copies.dst[first : first + count], copies.size[first : first + count])
            return 0 if fault.hidden else error

        return wrapped

    def _wrap_events(self) -> None:
        calls = {
            "hipEventRecord": self._way_of_record,
            "hipEventQuery": self._way_of_event,
            "hipStreamWaitEvent": self._way_of_stream,
        }

        def wrap(original: Any) -> Any:
            def wrapped(function: str, *arguments: Any) -> Any:
                way_of = calls.get(function)
                if way_of is None:
                    return original(function, *arguments)
                with self._lock:
                    fault = self._take(way_of(*arguments), function)
                    if fault is not None:
                        hipsim.fail(function, 1, fault.next_error())
                    return original(function, *arguments)

            return wrapped

        for name in ("call", "_is_ready"):
            vars(torch_stream)[name] = wrap(vars(torch_stream)[name])

    def _way_of_stream(self, stream: ctypes.c_void_p, *_: object) -> str:
        return self._ways.get(stream.value or 0, "other")

    def _way_of_record(self, event: ctypes.c_void_p, stream: ctypes.c_void_p) -> str:
        way = self._way_of_stream(stream)
        if way == "other" and getattr(self._saving, "active", False):
            way = "compute"
        self._events[event.value or 0] = way
        return way

    def _way_of_event(self, event: ctypes.c_void_p) -> str:
        return self._events.get(event.value or 0, "other")


def moved() -> Counter[str]:
    """What the simulator has counted of copies between host and device."""
    now = hipsim.stats()
    counts = Counter({"packets": now.pitched_packets, "staged": now.staged_copies})
    for (engine, direction), count in now.copies.items():
        counts[f"{engine} {direction}"] = count.copies
    return counts


def spoil(addresses: np.ndarray, sizes: np.ndarray) -> None:
    for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
        ctypes.memset(address, GARBAGE, size)


def spoil_rectangles(table: np.ndarray) -> None:
    """Columns: dst, src, width, rows, dst_pitch, src_pitch, dst_lines, src_lines."""
    for dst, _, width, rows, pitch, _, lines, _ in table.tolist():
        for row in range(rows):
            ctypes.memset(dst + row * pitch * lines, GARBAGE, width)


def scatter(
    caches: dict[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The same blocks in one registered buffer, where no packet reaches two regions.

    Each of four begins at another remainder of 4, which packets count in.
    """
    starts, end = {}, 0
    for number, (name, cache) in enumerate(caches.items(), 1):
        starts[name] = end
        end += cache.numel() + number * 4096 + number
    buffer = torch.zeros(end, dtype=torch.int8)
    pin_tensor(buffer)
    regions = {
        name: buffer[starts[name] :][: cache.numel()].view(cache.shape)
        for name, cache in caches.items()
    }
    for name, region in regions.items():
        region.copy_(caches[name])
    return regions, buffer


def _handler() -> Any:
    return get_kv_transfer_group().worker_handler


_rig: Rig | None = None


class CopyFaults:
    """What `/collective_rpc` reaches on each worker."""

    # The worker's own.
    rank: int
    model_runner: Any

    def _copy_rig(self) -> Rig:
        global _rig
        if _rig is None:
            _rig = Rig()
            _rig.install()
        return _rig

    def copy_state(self) -> dict[str, Any]:
        """What has been seen since `start_over`, and what is still to come."""
        rig = self._copy_rig()
        return {
            "copies": dict(rig.copies),
            "blocks": dict(rig.blocks),
            "moved": dict(moved() - rig.before),
            "engine": _handler()._backend.copy_engine,
            "failed": dict(rig.failed),
            "waiting faults": len(rig.faults),
            "most loads in a step": max(rig.loads_by_step, default=0),
            "under way": [
                way
                for way in ("load", "store")
                if not getattr(_handler(), f"{way}_stream").query()
            ],
            "async scheduling": self.model_runner.use_async_scheduling,
            "profile": hipsim.profile(),
            "pending": hipsim.stats().pending_faults,
            "memory faults": hipsim.stats().memory_faults,
        }

    def start_over(self) -> None:
        """No fault, no latency, and all counts from 0."""
        rig = self._copy_rig()
        rig.faults.clear()
        rig.copies.clear()
        rig.blocks.clear()
        rig.last.clear()
        rig.before = moved()
        rig.failed.clear()
        rig.loads_by_step.clear()
        hipsim.configure(copy_latency_us=0)

    def fail_copies(
        self,
        way: str,
        call: str = COPY,
        skip: int = 0,
        times: int = 1,
        errors: Sequence[int] = (700,),
        part: int = 0,
        hidden: bool = False,
        rank: int | None = None,
    ) -> None:
        """On one rank, or on all."""
        rig = self._copy_rig()
        if rank in (None, self.rank):
            rig.faults.append(Fault(way, call, skip, times, list(errors), part, hidden))

    def slow_copies(self, microseconds: int, rank: int | None = None) -> None:
        if rank in (None, self.rank):
            hipsim.configure(copy_latency_us=microseconds)

    def use_release(
        self,
        profile: str,
        engine: str | None = None,
        max_copies: int | None = None,
        irregular: bool = False,
    ) -> None:
        """Another release of HIP, and what the process decided by it decided anew.

        Args:
            profile: The release.
            engine: The copy engine that the user asks for; None is the default.
            max_copies: The most copies in a call, else the release's own limit.
            irregular: The host tier is a copy of the worker's own of which no
                rectangle can be made. What is stored there is lost with the next call.
        """
        rig = self._copy_rig()
        handler = _handler()
        handler._backend.shutdown()
        if rig.scattered is not None:
            _, buffer = rig.scattered
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
            rig.scattered = None
        hipsim.reset(profile)
        rig.before.clear()
        vars(hip_runtime)["_runtime"] = None
        vars(cuda_mem_ops)["_batch_memcpy"] = None
        vars(cuda_mem_ops)["_max_batch_descriptors"] = max_copies
        vllm.logger._print_warning_once.cache_clear()
        transfer = handler.vllm_config.kv_transfer_config
        options = transfer.kv_connector_extra_config
        options.pop("copy_engine", None)
        if engine is not None:
            options["copy_engine"] = engine
        if irregular:
            rig.scattered = scatter(handler.cpu_kv_caches)
        handler._backend = DmaCopyBackend(handler.vllm_config)
        handler._backend.init(
            handler.gpu_kv_caches,
            rig.scattered[0] if rig.scattered else handler.cpu_kv_caches,
            handler.device,
            handler.load_stream,
            handler.store_stream,
        )
        # They have the engine for a label.
        vars(handler).pop("_counters", None)
        rig.watch_launches()

    def compare_last(self, way: str) -> dict[str, int]:
        """Of the last copy that way: its bytes, and how many differ after it.

        Asked before its blocks are anybody else's.
        """
        rig, handler = self._copy_rig(), _handler()
        deadline = time.monotonic() + 5
        while way not in rig.last and time.monotonic() < deadline:
            time.sleep(0.001)
        getattr(handler, f"{way}_stream").synchronize()
        src, dst = rig.last[way]
        host = rig.scattered[0] if rig.scattered else handler.cpu_kv_caches
        sources, targets = handler.gpu_kv_caches, host
        if way == "load":
            sources, targets = targets, sources
        pages = [(sources[name][src], targets[name][dst]) for name in sources]
        return {
            "bytes": sum(here.numel() for here, _ in pages),
            "different": sum(int((here != there).sum()) for here, there in pages),
        }
