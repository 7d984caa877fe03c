# SPDX-License-Identifier: Apache-2.0
"""vLLM's compiled all-reduces, `torch.ops._C_custom_ar`, over the simulator's IPC.

vLLM's CPU build has the Python of CustomAllreduce and QuickAllReduce and none of the
operators below them. What those do with memory is here, with their schemas: buffers
of `hipMalloc` that are exported when they are made, peers' handles that are opened, and
at the end of a capture the export of every address that a captured kernel reads. The
sums are PyTorch's.

Two things are kept as they are in csrc/custom_all_reduce.cuh, since they decide what
is exported: a captured launch notes the address that its kernel reads whatever that is,
so the operator's own buffer too where it copies; and it is the whole allocation that is
exported. A captured launch does nothing until it is replayed. Where a HIP call fails,
the compiled operators end the process, and these raise.

The operators exist from `install` on, which has to come before vLLM asks for them, and
that is when it imports its two classes.
"""

import ctypes
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from vllm_rocm_memory.sim import hipsim, torch_device
from vllm_rocm_memory.sim.torch_stream import call

from .peer_memory import (
    Barrier,
    allocate,
    bytes_at,
    export_memory,
    open_memory,
)

META_BYTES = 4096
QUICK_MAX_BYTES = 1 << 31  # csrc/rocm/quickreduce/custom_quickreduce.cu
HANDLE_BYTES = ctypes.sizeof(hipsim.IpcMemHandle)


class Launch(NamedTuple):
    """One launch of a kernel.

    Attributes:
        operator: `all_reduce` or `qr_all_reduce`.
        registered: The kernel reads the caller's input where it lies, and so do the
            peers' kernels.
        captured: It was recorded and not run.
    """

    operator: str
    registered: bool
    captured: bool


launches: list[Launch] = []
"""All launches of this process, those of replays too."""

captured_exports: list[int] = []
"""Addresses that captured kernels read, whose allocations were asked a handle for."""


def _launch(operator: str, registered: bool) -> bool:
    """Counts a launch; whether it is to be recorded and not run."""
    captured = torch.cuda.is_current_stream_capturing()
    launches.append(Launch(operator, registered, captured))
    return captured


def _allocate_zeros(size: int) -> int:
    pointer = allocate(size)
    call("hipMemset", pointer, 0, size)
    call("hipDeviceSynchronize")
    return pointer


def _as_tensor(handle: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(handle), dtype=torch.uint8)


def _add(addresses: Sequence[int], out: torch.Tensor, barrier: Barrier) -> None:
    """A kernel: the sum of what lies at each rank's address, in their order."""
    what = f"the sum of {out.numel()} {out.dtype}"
    with torch_device.host_memory():
        barrier.meet(what)
        terms = [bytes_at(each, out.nbytes).view(out.dtype) for each in addresses]
        total = functools.reduce(torch.add, (term.float() for term in terms))
        # Not before everybody has read: an input may be written to next.
        barrier.meet(what)
        out.copy_(total.view(out.shape))


_numbers = itertools.count(1)
_objects: dict[int, Any] = {}


def _known(made: object) -> int:
    number = next(_numbers)
    _objects[number] = made
    return number


# --- CustomAllreduce ------------------------------------------------------------------


class _Custom:
    """What `init_custom_ar` makes."""

    def __init__(self, signals: Sequence[int], rank: int) -> None:
        self.rank = rank
        self.barrier = Barrier(signals, rank)
        self.peers: dict[int, list[int]] = {}  # of a registered address
        self.captured: list[int] = []
        self.opened: list[int] = []


def _meta_size() -> int:
    return META_BYTES


def _init_custom_ar(
    ipc_tensors: list[int], rank_data: torch.Tensor, rank: int, fully_connected: bool
) -> int:
    return _known(_Custom(ipc_tensors, rank))


def _all_reduce(
    fa: int,
    inp: torch.Tensor,
    out: torch.Tensor,
    reg_buffer: int,
    reg_buffer_sz_bytes: int,
) -> None:
    custom: _Custom = _objects[fa]
    captured = _launch("all_reduce", registered=not reg_buffer)
    if reg_buffer and inp.nbytes > reg_buffer_sz_bytes:
        raise RuntimeError(f"{inp.nbytes} bytes do not fit {reg_buffer_sz_bytes}")
    address = reg_buffer or inp.data_ptr()
    if captured:
        custom.captured.append(address)
        return
    if reg_buffer:
        ctypes.memmove(reg_buffer, inp.data_ptr(), inp.nbytes)
    if address not in custom.peers:
        raise RuntimeError(f"no peer knows what lies at {address:#x}")
    _add(custom.peers[address], out, custom.barrier)


def _register_buffer(fa: int, ipc_tensors: list[int]) -> None:
    custom: _Custom = _objects[fa]
    custom.peers[ipc_tensors[custom.rank]] = list(ipc_tensors)


def _get_graph_buffer_ipc_meta(fa: int) -> tuple[list[int], list[int]]:
    captured = _objects[fa].captured
    captured_exports.extend(captured)
    exported = [export_memory(address) for address in captured]
    handles = b"".join(handle for handle, _ in exported)
    return list(handles), [offset for _, offset in exported]


def _register_graph_buffers(
    fa: int, handles: list[list[int]], offsets: list[list[int]]
) -> None:
    custom: _Custom = _objects[fa]
    for index, address in enumerate(custom.captured):
        part = slice(index * HANDLE_BYTES, (index + 1) * HANDLE_BYTES)
        custom.peers[address] = peers = []
        for rank, (theirs, places) in enumerate(zip(handles, offsets, strict=True)):
            if rank == custom.rank:
                peers.append(address)
                continue
            custom.opened.append(open_memory(bytes(theirs[part])))
            peers.append(custom.opened[-1] + places[index])
    custom.captured.clear()


def _dispose(fa: int) -> None:
    for pointer in _objects.pop(fa).opened:
        call("hipIpcCloseMemHandle", pointer)


def _allocate_shared_buffer_and_handle(size: int) -> tuple[int, torch.Tensor]:
    pointer = _allocate_zeros(size)
    handle, _ = export_memory(pointer)
    return pointer, _as_tensor(handle)


def _open_mem_handle(mem_handle: torch.Tensor) -> int:
    return open_memory(bytes(mem_handle.tolist()))


def _free_shared_buffer(ptr: int) -> None:
    call("hipFree", ptr)


# --- QuickAllReduce -------------------------------------------------------------------


class _Quick:
    """What `init_custom_qr` makes: signals, and after them room for an input."""

    def __init__(self, rank: int, max_bytes: int) -> None:
        self.rank = rank
        self.max_bytes = max_bytes
        self.buffer = _allocate_zeros(META_BYTES + max_bytes)
        self.buffers: list[int] = []

    def open(self, handles: Sequence[bytes]) -> None:
        self.buffers = [
            self.buffer if rank == self.rank else open_memory(handle)
            for rank, handle in enumerate(handles)
        ]
        self.barrier = Barrier(self.buffers, self.rank)


def _qr_max_size() -> int:
    return QUICK_MAX_BYTES


def _init_custom_qr(rank: int, world_size: int, qr_max_size: int | None = None) -> int:
    return _known(_Quick(rank, qr_max_size or QUICK_MAX_BYTES))


def _qr_get_handle(fa: int) -> torch.Tensor:
    handle, _ = export_memory(_objects[fa].buffer)
    return _as_tensor(handle)


def _qr_open_handles(fa: int, handles: list[torch.Tensor]) -> None:
    _objects[fa].open([bytes(handle.tolist()) for handle in handles])


def _qr_all_reduce(
    fa: int,
    inp: torch.Tensor,
    out: torch.Tensor,
    quant_level: int,
    cast_bf2half: bool,
) -> None:
    quick: _Quick = _objects[fa]
    if quant_level or inp.dtype != torch.float16:
        raise NotImplementedError("the double reduces float16 without a codec, FP")
    if inp.nbytes > quick.max_bytes:
        raise RuntimeError(f"{inp.nbytes} bytes do not fit {quick.max_bytes}")
    if _launch("qr_all_reduce", registered=False):
        return
    ctypes.memmove(quick.buffer + META_BYTES, inp.data_ptr(), inp.nbytes)
    _add([buffer + META_BYTES for buffer in quick.buffers], out, quick.barrier)


def _qr_destroy(fa: int) -> None:
    quick: _Quick = _objects.pop(fa)
    for rank, pointer in enumerate(quick.buffers):
        call("hipFree" if rank == quick.rank else "hipIpcCloseMemHandle", pointer)


# --- the operators --------------------------------------------------------------------

# By schema, as in csrc/torch_bindings.cpp and csrc/rocm/quickreduce/torch_bindings.cpp.
_OPERATORS = {
    "init_custom_ar(int[] ipc_tensors, Tensor rank_data, int rank, "
    "bool fully_connected) -> int": _init_custom_ar,
    "all_reduce(int fa, Tensor inp, Tensor! out, int reg_buffer, "
    "int reg_buffer_sz_bytes) -> ()": _all_reduce,
    "dispose(int fa) -> ()": _dispose,
    "meta_size() -> int": _meta_size,
    "register_buffer(int fa, int[] ipc_tensors) -> ()": _register_buffer,
    "get_graph_buffer_ipc_meta(int fa) -> (int[], int[])": _get_graph_buffer_ipc_meta,
    "register_graph_buffers(int fa, int[][] handles, int[][] offsets) -> ()": (
        _register_graph_buffers
    ),
    "allocate_shared_buffer_and_handle(int size) -> (int, Tensor)": (
        _allocate_shared_buffer_and_handle
    ),
    "open_mem_handle(Tensor mem_handle) -> int": _open_mem_handle,
    "free_shared_buffer(int ptr) -> ()": _free_shared_buffer,
    "init_custom_qr(int rank, int world_size, int? qr_max_size=None) -> int": (
        _init_custom_qr
    ),
    "qr_destroy(int fa) -> ()": _qr_destroy,
    "qr_get_handle(int fa) -> Tensor": _qr_get_handle,
    "qr_open_handles(int _fa, Tensor[](b!) handles) -> ()": _qr_open_handles,
    "qr_all_reduce(int fa, Tensor inp, Tensor out, int quant_level, "
    "bool cast_bf2half) -> ()": _qr_all_reduce,
    "qr_max_size() -> int": _qr_max_size,
}


@functools.cache
def install() -> torch.library.Library:
    """Gives this process the operators, for as long as it lives."""
    library = torch.library.Library("_C_custom_ar", "FRAGMENT")
    for schema, function in _OPERATORS.items():
        library.impl(library.define(schema), function, "CompositeExplicitAutograd")
    return library
