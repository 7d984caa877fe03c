# SPDX-License-Identifier: Apache-2.0
"""The stretches of KV cache memory in which a block is one page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor


def block_regions(
    kv_caches: Mapping[str, torch.Tensor | list[torch.Tensor]],
    kv_cache_config: KVCacheConfig,
) -> dict[str, torch.Tensor]:
    """Return the memory of the KV caches by region, each byte once.

    A layer is a region of its own where its blocks follow one another; several
    (``layer.0``, ``layer.1``, ...) where its KV head groups do. Layers that share
    each block's memory are one region, under the first one's name.

    Args:
        kv_caches: By layer, tensors over the storage that the config describes.
        kv_cache_config: Where in that storage each layer's blocks are.

    Returns:
        int8 views of shape [num_blocks, bytes of a block].

    Raises:
        ValueError: The storage and the config do not fit together.

    """
    found: dict[str, torch.Tensor] = {}
    addresses: set[tuple[torch.device, int]] = set()
    for placement in kv_cache_config.kv_cache_tensors:
        layer = next((name for name in placement.layers if name in kv_caches), None)
        if layer is None:
            continue
        caches = kv_caches[layer]
        cache = caches[0] if isinstance(caches, list) else caches
        for name, region in _regions(cache, placement, kv_cache_config.num_blocks):
            address = (region.device, region.data_ptr())
            if address not in addresses:
                addresses.add(address)
                found[name] = region
    return found


def _regions(
    cache: torch.Tensor, placement: KVCacheTensor, num_blocks: int
) -> Iterator[tuple[str, torch.Tensor]]:
    layers, page = placement.layers, placement.block_stride
    region = num_blocks * page
    if placement.layer_stride < region:
        # Every layer's part of a block lies within the block's stride.
        yield layers[0], _view(cache, layers[0], 0, num_blocks, page)
        return
    groups, rest = divmod(placement.layer_stride, region)
    if rest:
        raise ValueError(
            f"KV cache {layers[0]!r}: {placement.layer_stride} bytes between layers "
            f"are no multiple of {num_blocks} blocks of {page} bytes"
        )
    for index in range(len(layers) * groups):
        layer, group = divmod(index, groups)
        name = layers[layer] if groups == 1 else f"{layers[layer]}.{group}"
        start = placement.offset + index * region
        yield name, _view(cache, name, start, num_blocks, page)


def _view(
    cache: torch.Tensor, name: str, start: int, num_blocks: int, page: int
) -> torch.Tensor:
    storage = cache.untyped_storage()
    end = start + num_blocks * page
    if storage.nbytes() < end:
        raise ValueError(
            f"KV cache {name!r}: its blocks end at byte {end} of a storage that has "
            f"{storage.nbytes()}"
        )
    region = torch.empty(0, dtype=torch.int8, device=cache.device)
    region.set_(storage, start, (num_blocks, page), (page, 1))
    return region
