# SPDX-License-Identifier: Apache-2.0
"""Memory of the whole device: how much is free, and pages that nobody cleaned."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

MIB = 1 << 20
GIB = 1 << 30
# What is left to others while the rest is written to.
MARGIN = GIB
_PIECE = 4 * GIB


def free_bytes() -> int:
    """Bytes that the driver has to give, once all queued work is done."""
    torch.accelerator.synchronize()
    return int(torch.accelerator.get_memory_info()[0])


def spin_cycles(seconds: float) -> int:
    """What `torch.cuda._sleep` has to be given to take so long.

    Its unit is a clock that differs between vendors by a factor of twenty.
    """
    probe = 1_000_000
    torch.cuda._sleep(probe)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(probe)
    end.record()
    end.synchronize()
    return int(probe * seconds * 1000 / begin.elapsed_time(end))


def dirty_free_memory(byte: int, device: str = "cuda", margin: int = MARGIN) -> int:
    """Write a byte over all memory that is free, and free it again.

    The next one to map memory gets pages that hold it, unless somebody cleans them.

    Returns:
        How many bytes were written.
    """
    torch.accelerator.empty_cache()
    left = free_bytes() - margin
    pieces: list[torch.Tensor] = []
    while (size := min(_PIECE, left)) >= 2 * MIB:
        pieces.append(torch.full((size,), byte, dtype=torch.uint8, device=device))
        left -= size
    torch.accelerator.synchronize()
    written = sum(piece.nbytes for piece in pieces)
    pieces.clear()
    torch.accelerator.empty_cache()
    return written


@contextmanager
def after_each_mapping(act: Callable[[int, int], object]) -> Iterator[list[int]]:
    """Call a function with address and bytes of each range that a wake maps.

    Yields:
        The addresses, as they come.
    """
    from vllm.device_allocator import cumem

    create_and_map = cumem.create_and_map
    mapped: list[int] = []

    def hooked(handle: Any) -> None:
        create_and_map(handle)
        _, num_bytes, address, _ = handle
        mapped.append(address)
        act(address, num_bytes)

    with mock.patch.object(cumem, "create_and_map", hooked):
        yield mapped


@contextmanager
def poisoned(byte: int) -> Iterator[list[int]]:
    """Fill each range as soon as a wake has mapped it, as old pages would.

    Yields:
        The addresses, as they come.
    """
    from vllm.device_allocator import cumem

    def poison(address: int, num_bytes: int) -> None:
        assert cumem.libcudart is not None
        cumem.libcudart.cudaMemset(address, byte, num_bytes)
        torch.accelerator.synchronize()

    with after_each_mapping(poison) as ranges:
        yield ranges
