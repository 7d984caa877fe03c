# SPDX-License-Identifier: Apache-2.0
"""Memory that the ranks of a node read of each other, over hipsim's IPC.

What the compiled side of a custom all-reduce does, as far as it matters where its
inputs lie: buffers of its own that every rank has opened, registration of others, and
kernels that read the other ranks' memory between two barriers.

Note [Slots]
A kernel gets no addresses but the number of a slot, which holds one address for each
rank. A launch on a capturing stream may take a slot that is still empty: what fills it
is the exchange after the capture, and a replay finds the peers' addresses there. Inputs
that were registered before have a slot already and are not exchanged again.
"""

import ctypes
import itertools
import os
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from vllm_rocm_memory.sim import hipsim, torch_stream
from vllm_rocm_memory.sim.torch_memory_pool import host_memory
from vllm_rocm_memory.sim.torch_stream import call

BARRIER_TIMEOUT = 20.0
"""Seconds that a kernel waits for the other ranks."""

_LAZY_PEER_ACCESS = 1  # hipIpcMemLazyEnablePeerAccess
_YIELDS = 200  # before a kernel that waits begins to sleep
_NAP = 20e-6  # seconds

# Of one launch: the rank, the input on each rank, what else is read; what is computed.
Compute = Callable[
    [int, list[torch.Tensor], Sequence[torch.Tensor]], list[torch.Tensor]
]

# A number is never another's: graphs may outlive what they were captured with.
_numbers = itertools.count(1)
_nodes: "weakref.WeakValueDictionary[int, PeerMemory]" = weakref.WeakValueDictionary()


def bytes_at(address: int, size: int) -> torch.Tensor:
    """A tensor of uint8 on memory that it does not own."""
    return torch.frombuffer(
        (ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8
    )


def allocate(size: int) -> int:
    """hipMalloc.

    Raises:
        RuntimeError: As each of these functions, with the call's name and number.
    """
    pointer = ctypes.c_void_p()
    call("hipMalloc", ctypes.byref(pointer), size)
    assert pointer.value is not None
    return pointer.value


def export_memory(address: int) -> tuple[bytes, int]:
    """The handle of the allocation that an address lies in, and the place in it."""
    base, size = ctypes.c_void_p(), ctypes.c_size_t()
    handle = hipsim.IpcMemHandle()
    call("hipMemGetAddressRange", ctypes.byref(base), ctypes.byref(size), address)
    assert base.value is not None
    call("hipIpcGetMemHandle", ctypes.byref(handle), base)
    return bytes(handle), address - base.value


def open_memory(handle: bytes) -> int:
    """Where another rank's allocation is in this process."""
    pointer = ctypes.c_void_p()
    told = hipsim.IpcMemHandle.from_buffer_copy(handle)
    call("hipIpcOpenMemHandle", ctypes.byref(pointer), told, _LAZY_PEER_ACCESS)
    assert pointer.value is not None
    return pointer.value


class Barrier:
    """Where the kernels of all ranks meet.

    Args:
        signals: Where each rank's signals can be written here, `bytes(ranks)` that are
            zero before anybody meets.
        rank: Whose signals are waited for.
    """

    def __init__(self, signals: Sequence[int], rank: int) -> None:
        self._rank = rank
        # Two sides, with how often each rank has come and with which kernel.
        self._signals = [
            np.ctypeslib.as_array(_words(address, 4 * len(signals))).reshape(2, -1, 2)
            for address in signals
        ]
        self._turn = 0

    @staticmethod
    def bytes(ranks: int) -> int:
        """Of one rank's signals."""
        return 8 * 4 * ranks

    def meet(self, what: str) -> None:
        """Waits until each rank has come as often as this one, with that kernel.

        Raises:
            RuntimeError: A rank does not come within `BARRIER_TIMEOUT`, or launched
                another kernel.
        """
        self._turn += 1
        side = self._turn % 2  # the others may be one turn ahead
        mark = zlib.crc32(what.encode())
        for signals in self._signals:
            signals[side, self._rank, 1] = mark
            signals[side, self._rank, 0] = self._turn
        mine = self._signals[self._rank][side]
        for rank in range(len(self._signals)):
            self._wait(rank, mine, what)
            if mine[rank, 1] != mark:
                raise RuntimeError(
                    f"rank {rank} launched another kernel than rank {self._rank}, "
                    f"which launched {what}"
                )

    def _wait(self, rank: int, signals: npt.NDArray[np.uint64], what: str) -> None:
        for _ in range(_YIELDS):
            if signals[rank, 0] >= self._turn:
                return
            os.sched_yield()
        end = time.monotonic() + BARRIER_TIMEOUT
        while signals[rank, 0] < self._turn:
            if time.monotonic() > end:
                raise RuntimeError(
                    f"rank {rank} did not come to {what} of rank {self._rank} within "
                    f"{BARRIER_TIMEOUT:g} s"
                )
            time.sleep(_NAP)


def _words(address: int, count: int) -> "ctypes.Array[ctypes.c_uint64]":
    return (ctypes.c_uint64 * count).from_address(address)


def node(number: int) -> "PeerMemory":
    """The one of that number in this process.

    Raises:
        RuntimeError: It is gone, and a graph that is left is replayed.
    """
    found = _nodes.get(number)
    if found is None:
        raise RuntimeError(f"the all-reduce {number} of this kernel was closed")
    return found


class PeerMemory:
    """One rank's buffers, and those that it has opened of the others.

    All ranks of the group construct it together, and so do they call what says that it
    exchanges something.

    Args:
        group: Of gloo.
        input_bytes: Of the buffer that unregistered inputs are copied to.

    Attributes:
        number: What `node` finds it by.
        input_address: The buffer of `input_bytes`.
        exported: The address of each input or output that was exported, in order.
    """

    def __init__(self, group: dist.ProcessGroup, input_bytes: int) -> None:
        self.number = next(_numbers)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.input_bytes = input_bytes
        self.exported: list[int] = []
        self._group = group
        self._imports: dict[bytes, int] = {}
        self._slots: list[tuple[int, ...] | None] = []
        self._inputs: dict[int, int] = {}
        self._outputs: dict[int, int] = {}
        self._captured: list[tuple[int, int]] = []
        self._own: list[int] = []
        try:
            signals = self.new_buffer(Barrier.bytes(self.size))
            bytes_at(signals, Barrier.bytes(self.size)).zero_()
            self.input_address = self.new_buffer(input_bytes)
            (addresses,) = self._exchange([signals])
            self._barrier = Barrier(addresses, self.rank)
            self.register(self.input_address)
        except BaseException:
            self.close()
            raise
        _nodes[self.number] = self

    def new_buffer(self, size: int) -> int:
        """Another allocation that goes with this object."""
        self._own.append(allocate(size))
        return self._own[-1]

    def register(self, address: int) -> None:
        """Makes an address one that every kernel may read; exchanges it.

        Raises:
            RuntimeError: A rank cannot export its memory, or open another's.
        """
        self._inputs[address] = self._fill_slot(address)

    def register_output(self, address: int) -> None:
        """As `register`, for memory that the other ranks may write."""
        self._outputs[address] = self._fill_slot(address)

    def slot(self, address: int) -> int:
        """The slot that a launch with that input uses, on the current stream.

        Raises:
            RuntimeError: It is not registered, and the stream does not capture.
        """
        return self._slot_in(self._inputs, address)

    def output_slot(self, address: int) -> int:
        """As `slot`, for an output."""
        return self._slot_in(self._outputs, address)

    def register_captured(self) -> int:
        """Fills the slots of the captures since the last call; exchanges them.

        Returns:
            How many there were.

        Raises:
            RuntimeError: A rank cannot export its memory, or open another's.
        """
        captured, self._captured = self._captured, []
        if captured:
            peers = self._exchange([address for _, address in captured])
            for (slot, _), addresses in zip(captured, peers, strict=True):
                self._slots[slot] = addresses
        return len(captured)

    def run(
        self,
        what: str,
        slots: Sequence[int],
        like: torch.Tensor,
        operands: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        compute: Compute,
    ) -> None:
        """One kernel: nothing while the stream captures, else all of it.

        Args:
            what: The same on all ranks, or the kernel fails.
            slots: Of the input and, if that is registered too, of the result.
            like: Of the shape and type that the input has.
            operands: What else the kernel reads, of this rank.
            results: Where it writes what `compute` returns.

        Raises:
            RuntimeError: A slot is empty, or the other ranks do not come.
        """
        if torch_stream.current_stream().is_capturing():
            return
        with host_memory(), torch.inference_mode():
            addresses, *_ = (*map(self._filled, slots),)
            sources = [_view(address, like) for address in addresses]
            self._barrier.meet(what)
            computed = compute(self.rank, sources, operands)
            # Not before everybody has read: a result may lie where an input did.
            self._barrier.meet(what)
            for result, value in zip(results, computed, strict=True):
                result.copy_(value)

    def copy_in(self, data: torch.Tensor) -> None:
        """What an unregistered launch does first.

        Raises:
            RuntimeError: There is more than the buffer holds.
        """
        if data.nbytes > self.input_bytes:
            raise RuntimeError(
                f"the registered buffer of {self.input_bytes} bytes is too small for "
                f"an input of {data.nbytes}"
            )
        if not torch_stream.current_stream().is_capturing():
            with host_memory(), torch.inference_mode():
                _view(self.input_address, data).copy_(data)

    def close(self) -> None:
        """Gives everything back; the others may still use what they have opened."""
        _nodes.pop(self.number, None)
        library = hipsim.load()
        while self._imports:
            library.hipIpcCloseMemHandle(self._imports.popitem()[1])
        while self._own:
            library.hipFree(self._own.pop())

    def _fill_slot(self, address: int) -> int:
        (addresses,) = self._exchange([address])
        self._slots.append(addresses)
        return len(self._slots) - 1

    def _slot_in(self, registered: dict[int, int], address: int) -> int:
        if (known := registered.get(address)) is not None:
            return known
        if not torch_stream.current_stream().is_capturing():
            raise RuntimeError(f"memory at {address:#x} is not registered")
        self._slots.append(None)
        self._captured.append((len(self._slots) - 1, address))
        return len(self._slots) - 1

    def _filled(self, slot: int) -> tuple[int, ...]:
        addresses = self._slots[slot]
        if addresses is None:
            raise RuntimeError(
                f"rank {self.rank} replays a launch whose memory was captured and "
                "never exchanged"
            )
        return addresses

    def _exchange(self, addresses: Sequence[int]) -> list[tuple[int, ...]]:
        """Where each of the addresses' counterparts on each rank can be read here."""

        def export() -> list[tuple[bytes, int]]:
            return [self._export(address) for address in addresses]

        told = self._agree("export its memory", export)
        for rank, theirs in enumerate(told):
            if len(theirs) != len(addresses):
                raise RuntimeError(
                    f"rank {rank} exports {len(theirs)} addresses and rank {self.rank} "
                    f"{len(addresses)}"
                )
        opened = [list(addresses) for _ in told]

        def open_all() -> None:
            for rank, theirs in enumerate(told):
                if rank != self.rank:
                    opened[rank] = [self._open(*each) for each in theirs]

        # What a rank has exported stays until the others have opened it.
        self._agree("open what the others exported", open_all)
        return list(zip(*opened, strict=True))

    def _agree(self, what: str, step: Callable[[], Any]) -> list[Any]:
        """What a step returns on each rank; it fails on all or on none.

        A rank that fails says so, for else the others would wait for it.
        """
        mine: Any = None
        error: hipsim.HipError | None = None
        try:
            mine = step()
        except hipsim.HipError as failure:
            error = failure
        told: list[Any] = [None] * self.size
        with host_memory():
            answer = mine, "" if error is None else str(error)
            dist.all_gather_object(told, answer, group=self._group)
        if error is not None:
            raise error
        for rank, (_, failure_there) in enumerate(told):
            if failure_there:
                raise RuntimeError(f"rank {rank} could not {what}: {failure_there}")
        return [theirs for theirs, _ in told]

    def _export(self, address: int) -> tuple[bytes, int]:
        exported = export_memory(address)
        self.exported.append(address)
        return exported

    def _open(self, handle: bytes, offset: int) -> int:
        if handle not in self._imports:
            self._imports[handle] = open_memory(handle)
        return self._imports[handle] + offset


def _view(address: int, like: torch.Tensor) -> torch.Tensor:
    return bytes_at(address, like.nbytes).view(like.dtype).view(like.shape)
