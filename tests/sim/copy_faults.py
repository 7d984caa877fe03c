# SPDX-License-Identifier: Apache-2.0
"""A worker extension of vLLM that makes chosen KV copies fail, inside the worker.

The failure is the HIP call's own: the simulator is told that the next call fails, and
then the call is made. What a copy that failed was to write is filled with garbage, so
that whoever uses it gives a wrong answer.
"""

import ctypes
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import vllm.logger
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.platforms import hip_runtime
from vllm.v1.simple_kv_offload import cuda_mem_ops
from vllm.v1.simple_kv_offload.copy_backend import DmaCopyBackend

from vllm_rocm_memory.sim import hipsim, torch_stream

BATCH_COPY = "hipMemcpyBatchAsync"
# About 0.75 in float32, so that an answer made of it is wrong and not NaN.
GARBAGE = 0x3F


@dataclass
class Fault:
    """What is to fail, and how.

    Attributes:
        way: "load", "store", or "compute": what orders a store after the compute.
        call: The HIP function that fails.
        skip: How many of them succeed before.
        times: How many fail then.
        errors: hipError_t of each in turn, and from the first again.
        part: Of the calls that one batch takes, the one that fails, from 0.
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
    failed: Counter[str] = field(default_factory=Counter)
    loads_by_step: list[int] = field(default_factory=list)
    # Of one copy: the fault that is for it, and its next call.
    _fault: Fault | None = None
    _part: int = 0
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
        self._wrap_batches()
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

    def _wrap_batches(self) -> None:
        submit = cuda_mem_ops._submit

        def wrapped(copies: Any, first: int, count: int, params: Any) -> int:
            if first == 0:
                self.copies[params.direction] += 1
                self._fault = self._take(params.direction, BATCH_COPY)
                self._part = 0
            fault, part = self._fault, self._part
            self._part += 1
            if fault is None or part != fault.part:
                return submit(copies, first, count, params)
            with self._lock:
                hipsim.fail(BATCH_COPY, 1, fault.next_error())
                error = submit(copies, first, count, params)
            assert error != 0
            spoil(copies.dst[first : first + count], copies.size[first : first + count])
            return 0 if fault.hidden else error

        vars(cuda_mem_ops)["_submit"] = wrapped

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


def spoil(addresses: np.ndarray, sizes: np.ndarray) -> None:
    for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
        ctypes.memset(address, GARBAGE, size)


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
        rig.failed.clear()
        rig.loads_by_step.clear()
        hipsim.configure(copy_latency_us=0)

    def fail_copies(
        self,
        way: str,
        call: str = BATCH_COPY,
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

    def use_release(self, profile: str, max_copies: int | None = None) -> None:
        """Another release of HIP, and what the process decided by it decided anew.

        Args:
            profile: The release.
            max_copies: The most copies in a call, else the release's own limit.
        """
        rig = self._copy_rig()
        handler = _handler()
        handler._backend.shutdown()
        hipsim.reset(profile)
        vars(hip_runtime)["_runtime"] = None
        vars(cuda_mem_ops)["_batch_memcpy"] = None
        vars(cuda_mem_ops)["_max_batch_descriptors"] = max_copies
        vllm.logger._print_warning_once.cache_clear()
        handler._backend = DmaCopyBackend(handler.vllm_config)
        handler._backend.init(
            handler.gpu_kv_caches,
            handler.cpu_kv_caches,
            handler.device,
            handler.load_stream,
            handler.store_stream,
        )
        rig.watch_launches()
