# SPDX-License-Identifier: Apache-2.0
"""The CPU tier's memory.

Note [Block after block]
A device has the pages of one layer side by side, the CPU tier those of one block:
all pages of block 0, then all of block 1. Layers lie at one distance in device
memory, so what a block has of them is a rectangle on both sides, one pitched copy
instead of one copy a layer. Where blocks are copied as pages all the same, the CPU
tier has them region after region, as the device: pages of adjacent blocks then join.

Everything is in one buffer. It is registered in pieces, since a single call for
512 GiB fails (vLLM #51080), and pieces end where blocks do, since a copy must not
cross the end of a registration. Tensors over the buffer own it together: the last
of them unregisters it, in whichever thread that is, and frees it afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import resource
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from vllm.device_allocator.host_capacity import host_capacity, readable
from vllm.logger import init_logger

logger = init_logger(__name__)

# Well below the 512 GiB of vLLM #51080, and far above what a call costs.
MAX_REGISTRATION_BYTES = 64 << 30

# The largest unit in which an SDMA packet counts (ROCr, SDMA_PKT_COPY_LINEAR_RECT).
_ALIGNMENT = 16

# Where registered pieces of all host caches end.
_ends: set[int] = set()

# Pieces that the driver did not let go of: memory at their address could not be
# registered again, and might be written by a copy.
_stuck: list[torch.Tensor] = []


class BlockLayout(NamedTuple):
    """Where the pages of a block are.

    Attributes:
        offsets: Of each region's page from the start of its block, in bytes.
        block_bytes: From one block to the next.

    """

    offsets: dict[str, int]
    block_bytes: int


def page_bytes(region: torch.Tensor) -> int:
    """Bytes from a block's first element to its last one's end."""
    inner = zip(region.shape[1:], region.stride()[1:], strict=True)
    return (1 + sum((n - 1) * s for n, s in inner)) * region.element_size()


def block_layout(regions: Mapping[str, torch.Tensor]) -> BlockLayout:
    """Lay the pages of a block out so that they form the fewest rectangles.

    Regions whose pages have one size and one distance from block to block lie side
    by side, in order of address. Where pages are no multiples of 16 bytes, what
    follows them begins at the next one, and so does the next block.

    Args:
        regions: Tensors of shape [blocks, ...] by name.

    """
    groups: dict[tuple[int, int], list[str]] = {}
    for name in sorted(regions, key=lambda name: regions[name].data_ptr()):
        region = regions[name]
        stride = region.stride(0) * region.element_size()
        groups.setdefault((page_bytes(region), stride), []).append(name)
    offsets, end = {}, 0
    for (page, _), names in groups.items():
        for name in names:
            offsets[name] = end
            end += page
        end = _rounded_up(end, _ALIGNMENT)
    return BlockLayout({name: offsets[name] for name in regions}, end)


def allocate_host_cache(
    gpu_regions: Mapping[str, torch.Tensor],
    num_blocks: int,
    pin_memory: bool = True,
    *,
    block_after_block: bool = True,
) -> dict[str, torch.Tensor]:
    """Make the CPU tier for these regions: one zeroed buffer, block after block.

    The buffer is freed, and unregistered before, when the last tensor over it is
    gone: one of those returned, or anything made from them. Nothing may be copying
    to or from it by then. A process that ends leaves that to the kernel.

    Args:
        gpu_regions: Tensors of shape [blocks, ...] by name.
        num_blocks: Of the CPU tier.
        pin_memory: Whether the buffer is registered with the device.
        block_after_block: Else it is region after region, and a page may lie in two
            registered pieces.

    Returns:
        By the same names, in the same order: tensors of shape [num_blocks, ...] with
        the regions' types and the strides that they have within a block.

    Raises:
        RuntimeError: The host cannot hold the buffer, or it cannot be registered.
            Nothing is left of it.
        ValueError: There is not even one block.

    """
    if num_blocks < 1:
        raise ValueError(f"a host cache of {num_blocks} blocks: at least 1")
    if not gpu_regions:
        return {}
    if block_after_block:
        offsets, strides, size, step = _by_block(gpu_regions, num_blocks)
    else:
        offsets, strides, size, step = _by_region(gpu_regions, num_blocks)
    _check_capacity(size)
    mapping = _anonymous_memory(size)
    # Torch's tensors hold on to this object, and it to the mapping.
    owner = (ctypes.c_char * size).from_buffer(mapping)
    if pin_memory:
        device = next(iter(gpu_regions.values())).device
        refused = _register(mapping, owner, step, device)
        if refused:
            # With its owner the memory goes, and what is registered of it.
            del mapping, owner
            raise RuntimeError(refused + _what_is_missing(size))
    memory = torch.frombuffer(owner, dtype=torch.uint8)
    return {
        name: _strided(memory, region, num_blocks, strides[name], offsets[name])
        for name, region in gpu_regions.items()
    }


def registration_ends() -> list[int]:
    """Addresses at which a registered piece of a host cache ends, in order."""
    # Another thread may drop a cache meanwhile; a set's copy is made in one go.
    return sorted(_ends.copy())


class _Layout(NamedTuple):
    """Where the pages of each region are: ``offsets[r] + block * strides[r]``.

    The buffer has ``size`` bytes, and is registered in pieces of ``step``.
    """

    offsets: dict[str, int]
    strides: dict[str, int]
    size: int
    step: int


def _by_block(regions: Mapping[str, torch.Tensor], num_blocks: int) -> _Layout:
    offsets, block_bytes = block_layout(regions)
    step = MAX_REGISTRATION_BYTES
    if num_blocks * block_bytes > step:
        block_bytes, step = _split_at_block_ends(block_bytes)
    strides = dict.fromkeys(offsets, block_bytes)
    return _Layout(offsets, strides, num_blocks * block_bytes, step)


def _by_region(regions: Mapping[str, torch.Tensor], num_blocks: int) -> _Layout:
    strides = {name: page_bytes(region) for name, region in regions.items()}
    offsets, end = {}, 0
    for name, page in strides.items():
        offsets[name] = end
        end += _rounded_up(num_blocks * page, _ALIGNMENT)
    return _Layout(offsets, strides, end, MAX_REGISTRATION_BYTES)


def _split_at_block_ends(block_bytes: int) -> tuple[int, int]:
    """Return the bytes from block to block, and those of a piece.

    Registrations must not share a page of the host, so a piece ends where the end
    of a block is one of a page too. Blocks for which that comes too rarely are moved
    apart to whole pages.
    """
    granule = math.lcm(block_bytes, mmap.PAGESIZE)
    if granule > MAX_REGISTRATION_BYTES:
        granule = block_bytes = _rounded_up(block_bytes, mmap.PAGESIZE)
    return block_bytes, max(1, MAX_REGISTRATION_BYTES // granule) * granule


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _strided(
    memory: torch.Tensor,
    region: torch.Tensor,
    num_blocks: int,
    stride: int,
    offset: int,
) -> torch.Tensor:
    item = region.element_size()
    return memory.view(region.dtype).as_strided(
        (num_blocks, *region.shape[1:]),
        (stride // item, *region.stride()[1:]),
        offset // item,
    )


def _check_capacity(size: int) -> None:
    limit = host_capacity()
    if size > limit.available:
        missing = _both(size - limit.available)
        raise RuntimeError(
            f"The CPU tier of KV offload needs {_both(size)} of host memory and "
            f"{_both(limit.available)} are available, {missing} too few: "
            f"{limit.source}. {limit.remedy}, free host memory, or give the CPU tier "
            "less (cpu_bytes_to_use in kv_connector_extra_config)."
        )


def _anonymous_memory(size: int) -> mmap.mmap:
    try:
        mapping = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise RuntimeError(
            f"The CPU tier's {_both(size)} of host memory cannot be mapped: {error}. "
            "Give it less (cpu_bytes_to_use in kv_connector_extra_config), or let this "
            "process have a larger address space (ulimit -v, vm.overcommit_memory)."
        ) from error
    # A kernel without huge pages takes longer to register it, and that is all.
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _register(
    mapping: mmap.mmap, owner: object, step: int, device: torch.device
) -> str:
    """Register the mapping, or as much of it as is possible, while ``owner`` lives.

    Returns:
        Why it is not all of it; nothing if it is. (An exception's traceback would
        keep the owner.)

    """
    # cuda_mem_ops asks this module for the ends.
    from vllm.v1.simple_kv_offload.cuda_mem_ops import pin_tensor

    registered: list[torch.Tensor] = []
    unregister = weakref.finalize(owner, _unregister, registered, device, os.getpid())
    unregister.atexit = False
    # These own the mapping and not its owner, so that they can outlive it.
    pieces = torch.frombuffer(mapping, dtype=torch.uint8).split(step)
    for number, piece in enumerate(pieces, 1):
        try:
            with _current(device):
                pin_tensor(piece)
        except RuntimeError as error:
            return (
                f"The CPU tier's {_both(len(mapping))} cannot be registered, at piece "
                f"{number} of {len(pieces)}: {error}"
            )
        registered.append(piece)
        _ends.add(piece.data_ptr() + piece.nbytes)
    return ""


def _unregister(registered: list[torch.Tensor], device: torch.device, pid: int) -> None:
    from vllm.v1.simple_kv_offload.cuda_mem_ops import unpin_tensor

    while registered:
        piece = registered.pop()
        _ends.discard(piece.data_ptr() + piece.nbytes)
        # A forked process has a copy of the memory, and none of the registration.
        if os.getpid() != pid:
            continue
        try:
            with _current(device):
                unregistered = unpin_tensor(piece)
        except Exception as error:
            # Not the error, whose traceback has the memory.
            logger.warning("Host memory stays registered: %s", str(error))
            unregistered = False
        if not unregistered:
            _stuck.append(piece)


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Use the device's context: any thread may drop the last tensor.

    In a thread that has none the call would make one, on device 0.
    """
    if device.type == "cuda":
        return torch.cuda.device(device)
    return contextlib.nullcontext()


def _what_is_missing(size: int) -> str:
    """Say which limits the registration may have met, as the end of a message."""
    text = ""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = _locked_bytes()
    if limit != resource.RLIM_INFINITY and locked + size > limit:
        # Not every driver counts what it registers, so it is no reason to refuse.
        text += (
            f" RLIMIT_MEMLOCK is {_both(limit)}, of which {_both(locked)} are in use: "
            f"{_both(locked + size - limit)} are missing, if the driver counts what it "
            "registers."
        )
    host = host_capacity()
    if size > host.available:
        text += (
            f" {_both(host.available)} of host memory are available now, "
            f"{_both(size - host.available)} too few: {host.source}."
        )
    return text


def _locked_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmLck:"):
            return int(line.split()[1]) << 10
    return 0


def _both(num_bytes: int) -> str:
    rounded = f" ({readable(num_bytes)})" if num_bytes >> 10 else ""
    return f"{num_bytes} bytes{rounded}"
