# SPDX-License-Identifier: Apache-2.0
"""Every collective of an AITER release, captured and replayed by one rank.

Note [What is called]
Each method that launches a kernel is called as AITER's own `custom_` methods call it
and, where it can be told so, by a caller that says "registered". The input is computed
within the capture, so that it lies in the pool that the graph allocates from. Beside
them a producer writes into AITER's own buffer and has it reduced from there, as a MoE's
epilogue does.
"""

import functools
import gc
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from tests.distributed import aiter_double, rocm_machine
from tests.distributed.aiter_double import Method, Surface
from tests.distributed.ranks import Rank
from vllm_rocm_memory.sim import hipsim

CYCLES = 10
_PROFILE = rocm_machine.ENVIRONMENT["HIPSIM_PROFILE"]
ROWS, WIDTH = 4, 128
BUFFER_BYTES = 1 << 16

# Arguments by the names that any release has for them. Of queries, keys and values
# each is a third.
_THIRD = WIDTH // 4
_VALUES: dict[str, Any] = {
    "weight": torch.linspace(0.5, 1.5, WIDTH, dtype=torch.bfloat16),
    "eps": 1e-5,
    "use_1stage": True,
    "group_size": 32,
    "q_w": torch.linspace(0.5, 1.5, _THIRD, dtype=torch.bfloat16),
    "k_w": torch.linspace(1.5, 0.5, _THIRD, dtype=torch.bfloat16),
    "cos_sin_cache": torch.linspace(-1, 1, 8 * ROWS).view(ROWS, 8).bfloat16(),
    "position_ids": torch.arange(ROWS).flip(0),
    "head_dim": 16,
    "rotary_dim": 8,
}
_VALUES["w"] = _VALUES["weight"]

# Options that change what a kernel writes.
_VARIANTS = ("emit_bf16", "post_per_token_quant", "gemma_norm")


@dataclass(frozen=True)
class Case:
    """A call to capture.

    Attributes:
        name: For people.
        method: Of CustomAllreduce.
        options: Beside what each method gets.
        flag: Of the method, which the caller sets; None if AITER decides.
        reads_own_buffer: The input is in AITER's own buffer,
        offset: so many bytes behind its start.
    """

    name: str
    method: Method
    options: dict[str, Any] = field(default_factory=dict)
    flag: str | None = None
    reads_own_buffer: bool = False
    offset: int = 0

    @property
    def by_name(self) -> bool:
        """Whether it is a registered method that has an unregistered twin."""
        return self.method.registered is True

    @property
    def warms_up(self) -> bool:
        """Whether vLLM calls it within `capture()` before it captures."""
        return self.method.name.startswith("custom_")

    def place(self, ca: Any, data: torch.Tensor) -> torch.Tensor:
        """The input, where this case has it."""
        if not self.reads_own_buffer:
            return data
        if "moe" in self.method.name:
            own = ca.moe_out_registered_buffer(*data.shape, data.dtype)
        else:
            place = _own_buffer(ca)[self.offset :][: data.nbytes]
            own = place.view(data.dtype).view(data.shape)
        return own.copy_(data)

    def call(
        self, ca: Any, data: torch.Tensor, rank: int, registered: bool
    ) -> list[torch.Tensor]:
        """The results, of a caller that says "registered" where there is a word."""
        name = self.method.name
        if not registered:
            if "moe" in name:
                return [ca.all_reduce(data)]
            if self.by_name:
                name = f"{name.removesuffix('reg')}unreg"
        function: Callable[..., Any] = getattr(ca, name)
        parameters = inspect.signature(function).parameters
        residual = _data(rank, 1)
        known = {**_VALUES, "res_inp": residual, "residual_inp": residual}
        given = {key: value for key, value in known.items() if key in parameters}
        given |= self.options
        if self.flag is not None:
            given[self.flag] = registered
        output = None
        for key in ("out", "output"):
            if key in parameters and parameters[key].default is inspect.Parameter.empty:
                given[key] = output = data.new_empty((ROWS // 2, WIDTH))
        first, *_ = parameters
        results = function(**{first: data}, **given)
        return tree_leaves(results if output is None else output)


@dataclass(frozen=True)
class Operation:
    """An operation of vLLM's, which calls AITER.

    Attributes:
        function: Its implementation.
        arguments: After the input.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    warms_up: bool = False

    def place(self, ca: Any, data: torch.Tensor) -> torch.Tensor:
        return data

    def call(
        self, ca: Any, data: torch.Tensor, rank: int, registered: bool
    ) -> list[torch.Tensor]:
        return tree_leaves(self.function(data, *self.arguments))


@dataclass
class Outcome:
    """What became of a case on this rank.

    Attributes:
        error: Of the capture; empty if it succeeded.
        input_sleeps: Whether the input lay in the cuMem graph pool.
        registered: What its launches in the capture were.
        exported: How many addresses the end of the capture exported.
        right: Whether each replay gave bit by bit what the eager call gave.
    """

    error: str = ""
    input_sleeps: bool = False
    registered: list[bool] = field(default_factory=list)
    exported: int = 0
    right: list[bool] = field(default_factory=list)


def cases_of(surface: Surface) -> list[Case]:
    """Every call of a surface that could register the input of a capture."""
    found = []
    for method in surface.methods.values():
        if not (method.kernel or method.calls) or method.registered is False:
            continue
        if "moe" in method.name:
            found.append(Case(method.name, method, reads_own_buffer=True))
            continue
        flag = method.flag or None
        found.append(Case(method.name, method, flag=flag))
        for option in _VARIANTS:
            if f"{option}=" in method.signature:
                name = f"{method.name}({option})"
                found.append(Case(name, method, {option: True}, flag))
        if method.kernel:
            name = f"{method.name}(own buffer)"
            found.append(Case(name, method, {}, flag, reads_own_buffer=True))
            # Less than its size, so that a copy to the start would overlap.
            name = f"{method.name}(within own buffer)"
            found.append(Case(name, method, {}, flag, True, ROWS * WIDTH))
    return found


@dataclass(frozen=True)
class Seen:
    """What a rank saw.

    Attributes:
        outcomes: By case.
        virtual_exports: How often memory without an IPC handle was to be exported.
    """

    outcomes: dict[str, Outcome]
    virtual_exports: int


def capture_all(
    rank: Rank, release: str, profile: str, up: bool, without_fence: bool, sleeps: bool
) -> Seen:
    """Captures each case of a release, and replays it over cycles of sleep and wake.

    Args:
        rank: Who asks.
        release: Of AITER.
        profile: Of HIP.
        up: Whether vLLM wants the fence.
        without_fence: The fence is taken out; AITER's option is all that is left.
        sleeps: Whether captures allocate from the cuMem graph pool.
    """
    surface = aiter_double.surface_of(release)
    cases = {case.name: case for case in cases_of(surface)}
    with _machine(profile):
        return _capture(rank, surface, cases, up, without_fence, sleeps)


def capture_vllms_operations(rank: Rank, release: str, without_fence: bool) -> Seen:
    """The same with the operations that vLLM's fusion passes put into a model."""
    with _machine():
        from vllm import _aiter_ops

        norm = (_data(rank.rank, 1), _VALUES["weight"], _VALUES["eps"])
        fused = "_rocm_aiter_fused_allreduce_rmsnorm"
        operations = {
            name: Operation(getattr(_aiter_ops, f"{fused}{name}_impl"), arguments)
            for name, arguments in (
                ("", norm),
                ("_quant_per_group", (*norm, 32)),
                ("_quant_per_group_with_bf16_norm", (*norm, 32)),
            )
        }
        surface = aiter_double.surface_of(release)
        return _capture(rank, surface, operations, True, without_fence, True)


def _capture(
    rank: Rank,
    surface: Surface,
    cases: Mapping[str, Case | Operation],
    up: bool,
    without_fence: bool,
    sleeps: bool,
) -> Seen:
    from vllm._aiter_ops import rocm_aiter_ops

    config = SimpleNamespace(use_cumem_cudagraph_pool=sleeps)
    outcomes, graphs = {}, {}
    with (
        aiter_double.install(surface),
        _fence_taken_out(without_fence),
        _communicator(rank, up) as allreduce,
        mock.patch.object(rocm_aiter_ops, "get_aiter_allreduce", lambda: allreduce),
    ):
        for name, case in cases.items():
            outcomes[name] = outcome = Outcome()
            rank.barrier()
            graphs[name] = _Captured(rank, allreduce.aiter_ca, case, config, outcome)
        for cycle in range(CYCLES):
            for name, captured in graphs.items():
                if not outcomes[name].error:
                    outcomes[name].right.append(captured.replays_right(cycle))
            if sleeps:
                rocm_machine.sleep_and_wake()
        stats = hipsim.stats()
        assert stats.memory_faults == 0
        for captured in graphs.values():
            captured.graph.reset()
    return Seen(outcomes, stats.ipc_virtual_exports)


def refusal(rank: Rank, release: str) -> str:
    """What the constructor says with the fence wanted; empty if it succeeds."""
    with _machine(), aiter_double.install(aiter_double.surface_of(release)):
        try:
            with _communicator(rank, up=True):
                return ""
        except RuntimeError as error:
            return str(error)


@contextmanager
def _machine(
    profile: str = rocm_machine.ENVIRONMENT["HIPSIM_PROFILE"],
) -> Iterator[None]:
    """The rank's machine with another release of HIP, for a while.

    Nothing may be left of it afterwards.
    """
    rocm_machine.boot()
    _use(profile)
    try:
        yield
        _leave_nothing()
    finally:
        _use(_PROFILE)


def _use(profile: str) -> None:
    hipsim.reset(profile)
    hipsim.configure(host_reads="allow", stale_memory="poisoned")


@contextmanager
def _fence_taken_out(taken_out: bool) -> Iterator[None]:
    from vllm.distributed.device_communicators import aiter_custom_all_reduce

    if not taken_out:
        yield
        return
    with mock.patch.object(aiter_custom_all_reduce, "fence", lambda kind: kind):
        yield


@contextmanager
def _communicator(rank: Rank, up: bool) -> Iterator[Any]:
    from vllm.distributed.device_communicators.aiter_custom_all_reduce import (
        AiterCustomAllreduce,
    )

    allreduce = AiterCustomAllreduce(
        rank.group, "cpu", BUFFER_BYTES, register_graph_buffers=not up
    )
    try:
        yield allreduce
        rank.barrier()
    finally:
        allreduce.close()


def _leave_nothing() -> None:
    from vllm.device_allocator import get_mem_allocator_instance

    gc.collect()
    allocator: Any = get_mem_allocator_instance()
    allocator.release_pools()
    gc.collect()
    torch.accelerator.empty_cache()
    assert allocator.get_current_usage() == 0
    assert hipsim.stats().device_bytes == 0


class _Captured:
    """The graph of a case, and the eager call to compare it with."""

    def __init__(
        self, rank: Rank, ca: Any, case: "Case | Operation", config: Any, told: Outcome
    ) -> None:
        from vllm.compilation.cudagraph_pool import capture_pool

        self.ca, self.case, self.rank = ca, case, rank.rank
        self.source = _data(rank.rank, 0).clone()
        _data(rank.rank, 1)  # made now, and not within the capture
        self.graph = torch.cuda.CUDAGraph()
        self.results: list[torch.Tensor] = []
        exported, launched = len(ca.memory.exported), len(ca.launches)
        try:
            with ca.capture():
                if case.warms_up:
                    case.call(ca, self._input(), rank.rank, registered=True)
                    launched = len(ca.launches)
                with (
                    capture_pool(None, config) as pool,
                    torch.cuda.graph(self.graph, pool=pool, stream=torch.cuda.Stream()),
                ):
                    data = self._input()
                    self.results = case.call(ca, data, rank.rank, registered=True)
                    told.input_sleeps = rocm_machine.lies_in_graph_pool(data)
                    del data
        except Exception as error:
            told.error = "\n".join((str(error), *getattr(error, "__notes__", ())))
            self.results = []
        told.registered = [each.registered for each in ca.launches[launched:]]
        told.exported = len(ca.memory.exported) - exported

    def replays_right(self, cycle: int) -> bool:
        self.source.copy_(_data(self.rank, cycle + 2))
        self.graph.replay()
        replayed = [result.clone() for result in self.results]
        eager = self.case.call(self.ca, self._input(), self.rank, registered=False)
        return len(replayed) == len(eager) > 0 and all(
            map(_same_bytes, replayed, eager)
        )

    def _input(self) -> torch.Tensor:
        return self.case.place(self.ca, self.source + 1)


def _own_buffer(ca: Any) -> torch.Tensor:
    buffer: torch.Tensor = (
        ca._pool["input"].tensor if hasattr(ca, "_pool") else ca.input_buffer
    )
    return buffer


@functools.cache
def _data(rank: int, number: int) -> torch.Tensor:
    """The same each time, so that a capture records nothing of making it."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(ROWS, WIDTH, generator=generator).bfloat16()


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )
