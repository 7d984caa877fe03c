# SPDX-License-Identifier: Apache-2.0
"""What memory without a backup holds after a wake, where free pages were dirty.

    python zero_on_wake.py

Prints a line of JSON.
"""

import json
from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch

# Imported as a module by what runs it on another device, and as a program's neighbour.
if __package__:
    from .device_memory import (
        GIB,
        MARGIN,
        MIB,
        dirty_free_memory,
        poisoned,
    )
else:
    from device_memory import (
        GIB,
        MARGIN,
        MIB,
        dirty_free_memory,
        poisoned,
    )

OLD, KEPT = 0x5A, 7
# Of the ranges that a wake maps, as soon as they are mapped, where it is poisoned.
POISON = 0xA5
# Mapped by PyTorch, which clears nothing, to see what the driver hands out: more than
# what is not made dirty.
PROBE = 2 * MARGIN
SIZES = (2 * MIB, 12 * MIB, 72 * MIB + 4096, 300 * MIB, 3 * GIB)
WAYS: dict[str, tuple[list[str] | None, ...]] = {
    "at once": (None,),
    "weights first": (["weights"], ["kv_cache"]),
    "KV cache first": (["kv_cache"], ["weights"]),
    "discarded": (None,),
    # As a sleep at level 2 does, where weights come back empty as well.
    "nothing backed up": (None,),
}
PAGES = ("old", "poisoned")


def held(tensor: torch.Tensor) -> dict[int, int]:
    """How often each byte is in a tensor, of those that are not zero; not of all."""
    found: Counter[int] = Counter()
    # PyTorch has no index for what has more than 2**31 elements.
    for piece in tensor.split(256 * MIB):
        if piece.any():
            found.update(piece[piece != 0][: 1 << 16].tolist())
    return dict(found)


def driver_cleans(device: str, num_bytes: int) -> bool:
    """Whether memory that was made dirty and freed comes back without a trace of it."""
    probe = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    clean = not any(bool((piece == OLD).any()) for piece in probe.split(256 * MIB))
    del probe
    torch.accelerator.empty_cache()
    return clean


def main(
    device: str = "cuda",
    sizes: tuple[int, ...] = SIZES,
    margin: int = MARGIN,
    probe: int = PROBE,
) -> dict[str, Any]:
    """Sleep and wake in each way, with what free pages hold and with poisoned ones.

    Args:
        device: Where tensors are made.
        sizes: Of the tensors of each tag.
        margin: Bytes that are left free where the rest is made dirty.
        probe: Bytes of what is mapped to see whether the driver cleans.

    Returns:
        The bytes of a chunk, how many ranges have several, and by the pages ("old",
        "poisoned") and ways: bytes made dirty (old) or how many ranges were poisoned,
        how many bytes and ranges slept, whether the driver had cleaned what was made
        dirty, what else than zero was in what had no backup, and whether what had one
        was as before.
    """
    from vllm.device_allocator import cumem

    allocator = cumem.CuMemAllocator.get_instance()
    tensors: dict[str, list[torch.Tensor]] = {}
    for tag in ("weights", "kv_cache"):
        with allocator.use_memory_pool(tag):
            tensors[tag] = [
                torch.full((size,), KEPT, dtype=torch.uint8, device=device)
                for size in sizes
            ]
    module: Any = cumem._module
    chunks = [module.chunks(address) for address in allocator.pointer_to_data]
    report: dict[str, Any] = {
        "chunk": module.chunk_setting()[0],
        "largest": max(max(each) for each in chunks),
        "in several": sum(len(each) > 1 for each in chunks),
    }

    def wake(way: str, pages: str) -> dict[str, Any]:
        if way == "discarded":
            allocator.discard("kv_cache")
        kept = () if way == "nothing backed up" else ("weights",)
        allocator.sleep(offload_tags=kept)
        told: dict[str, Any] = {}
        if pages == "old":
            told["dirty"] = dirty_free_memory(OLD, device, margin)
            told["driver cleans"] = driver_cleans(device, probe)
        with poisoned(POISON) if pages == "poisoned" else nullcontext() as ranges:
            for tags in WAYS[way]:
                allocator.wake_up(tags)
        torch.accelerator.synchronize()
        empty = tensors["kv_cache"] + ([] if kept else tensors["weights"])
        told |= {
            "asleep": allocator.get_current_usage(),
            "ranges": len(allocator.pointer_to_data),
            "poisoned": len(ranges or ()),
            "wrong": [found for each in empty if (found := held(each))],
            "kept": all(bool((each == KEPT).all()) for each in tensors["weights"])
            if kept
            else True,
        }
        for each in (*tensors["kv_cache"], *tensors["weights"]):
            each.fill_(KEPT)
        return told

    for pages in PAGES:
        report[pages] = {way: wake(way, pages) for way in WAYS}
    return report


if __name__ == "__main__":
    print(json.dumps(main()))
