# SPDX-License-Identifier: Apache-2.0
"""Regions of KV caches, against the bytes that each block of each layer has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
from vllm.v1.simple_kv_offload.kv_regions import block_regions


def config(num_blocks: int, *placements: KVCacheTensor) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=list(placements), kv_cache_groups=[]
    )


def bytes_of(region: torch.Tensor, block: int, base: torch.Tensor) -> range:
    start = region[block].data_ptr() - base.data_ptr()
    return range(start, start + region.shape[1])


@st.composite
def layers_one_after_the_other(draw):
    num_blocks = draw(st.integers(1, 6))
    page = draw(st.integers(1, 40))
    groups = draw(st.integers(1, 3))
    count = draw(st.integers(1, 4))
    offset = draw(st.integers(0, 100))
    trailing = draw(st.integers(0, 50))
    return num_blocks, page, groups, count, offset, trailing


@given(layers_one_after_the_other())
def test_each_layer_and_head_group_is_a_region(layout):
    num_blocks, page, groups, count, offset, trailing = layout
    stride = groups * num_blocks * page
    size = offset + count * stride + trailing
    storage = torch.zeros(size, dtype=torch.int8)
    names = [f"layer.{i}" for i in range(count)]
    placement = KVCacheTensor(
        size=size,
        layers=names,
        layer_stride=stride,
        block_stride=page,
        offset=offset,
    )
    # Any tensor over the storage tells it, wherever it begins.
    regions = block_regions(
        {names[-1]: storage[offset:]}, config(num_blocks, placement)
    )
    expected = {
        (f"layer.{i}" if groups == 1 else f"layer.{i}.{g}"): offset
        + i * stride
        + g * num_blocks * page
        for i in range(count)
        for g in range(groups)
    }
    assert list(regions) == list(expected)
    covered: list[int] = []
    for name, start in expected.items():
        assert regions[name].shape == (num_blocks, page)
        assert regions[name].dtype == torch.int8
        for block in range(num_blocks):
            part = bytes_of(regions[name], block, storage)
            assert part == range(start + block * page, start + block * page + page)
            covered += part
    assert covered == list(range(offset, offset + count * stride))


@given(
    st.integers(1, 6),
    st.lists(st.integers(1, 30), min_size=2, max_size=4),
)
def test_layers_that_share_a_blocks_memory_are_one_region(num_blocks, pages):
    block = sum(pages)
    storage = torch.zeros(num_blocks * block, dtype=torch.int8)
    offsets = [sum(pages[:i]) for i in range(len(pages))]
    placements = [
        KVCacheTensor(
            size=storage.nbytes,
            layers=[f"layer.{i}"],
            layer_stride=page,
            block_stride=block,
            offset=offset,
        )
        for i, (page, offset) in enumerate(zip(pages, offsets, strict=True))
        if page < num_blocks * block
    ]
    caches = {f"layer.{i}": storage for i in range(len(pages))}
    regions = block_regions(caches, config(num_blocks, *placements))
    ((name, region),) = regions.items()
    assert name == "layer.0"
    covered = [b for i in range(num_blocks) for b in bytes_of(region, i, storage)]
    assert covered == list(range(storage.nbytes))


def test_layers_of_other_ranks_are_left_out():
    storage = torch.zeros(64, dtype=torch.int8)
    here, elsewhere = (
        KVCacheTensor(size=64, layers=[name], layer_stride=64, block_stride=16)
        for name in ("layer.0", "layer.1")
    )
    regions = block_regions({"layer.0": storage}, config(4, here, elsewhere))
    assert list(regions) == ["layer.0"]


def test_a_layer_with_several_tensors_is_known_by_its_first():
    storage = torch.zeros(64, dtype=torch.int8)
    placement = KVCacheTensor(
        size=64, layers=["mamba"], layer_stride=64, block_stride=16
    )
    state = [storage[:32].view(torch.float32), storage[32:]]
    (region,) = block_regions({"mamba": state}, config(4, placement)).values()
    assert region.data_ptr() == storage.data_ptr()
    assert region.shape == (4, 16)


def test_a_storage_that_is_too_small_is_named():
    placement = KVCacheTensor(
        size=64, layers=["layer.0"], layer_stride=64, block_stride=16
    )
    cache = torch.zeros(63, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"'layer\.0'.*end at byte 64.*has 63"):
        block_regions({"layer.0": cache}, config(4, placement))


def test_a_layer_stride_that_no_region_fits_is_named():
    placement = KVCacheTensor(
        size=200, layers=["layer.0"], layer_stride=100, block_stride=16
    )
    cache = torch.zeros(200, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"'layer\.0'.*100 bytes between layers"):
        block_regions({"layer.0": cache}, config(4, placement))
