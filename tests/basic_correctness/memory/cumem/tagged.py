# SPDX-License-Identifier: Apache-2.0
"""Tensors in the memory of a tag, for the tests of this folder."""

import torch

# PyTorch gives a block of this size a segment of its own.
BLOCK = 12 << 20


def block(allocator, device, tag, byte) -> torch.Tensor:
    with allocator.use_memory_pool(tag):
        return torch.full((BLOCK,), byte, dtype=torch.uint8, device=device.type)


def holds(tensor: torch.Tensor, byte: int) -> bool:
    return bool(torch.all(tensor == byte))
