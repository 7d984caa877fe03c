# SPDX-License-Identifier: Apache-2.0
"""Copy plans against a model that moves blocks one byte at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, pairwise
from math import gcd

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
from vllm.v1.simple_kv_offload.copy_plan import (
    CUDA_LIMITS,
    SDMA_LIMITS,
    CopyPlan,
    PageCopies,
    PitchedLimits,
    RectangleCopies,
    Region,
)
from vllm.v1.simple_kv_offload.host_cache import block_layout
from vllm.v1.simple_kv_offload.kv_regions import block_regions

# The two sides get address ranges of their own, as host and device have.
SRC, DST = 1 << 32, 1 << 40
MEMORY_BYTES = 1 << 14


def _region(
    src: int, dst: int, page: int, src_stride: int = 0, dst_stride: int = 0
) -> Region:
    return Region(
        f"at {src}",
        SRC + src,
        DST + dst,
        src_stride or page,
        dst_stride or page,
        page,
    )


def _pages(plan: CopyPlan, src_ids: list[int], dst_ids: list[int]) -> PageCopies:
    rectangles, pages = plan.copies(src_ids, dst_ids)
    assert len(rectangles) == rectangles.num_bytes == 0
    return pages


def _as_copies(plan: CopyPlan, src_ids: list[int], dst_ids: list[int]) -> set:
    """Copies as (source, destination, bytes), addresses relative to each side."""
    copies = _pages(plan, src_ids, dst_ids)
    assert len(copies) == len(copies.src) == len(copies.dst) == len(copies.size)
    triples = {
        (int(src) - SRC, int(dst) - DST, int(size))
        for src, dst, size in zip(copies.src, copies.dst, copies.size, strict=True)
    }
    assert len(triples) == len(copies)
    return triples


def test_blocks_adjacent_on_both_sides_are_one_copy_in_each_region():
    plan = CopyPlan([_region(0, 0, 16), _region(1000, 4000, 32)])
    assert _as_copies(plan, [3, 4, 5], [7, 8, 9]) == {
        (48, 112, 48),
        (1000 + 96, 4000 + 224, 96),
    }


def test_the_order_of_the_ids_does_not_hide_a_run():
    plan = CopyPlan([_region(0, 0, 16)])
    assert _as_copies(plan, [5, 3, 9, 4], [9, 7, 1, 8]) == {
        (48, 112, 48),
        (144, 16, 16),
    }


@pytest.mark.parametrize(
    ("src_ids", "dst_ids"),
    [
        ([0, 1], [5, 4]),  # adjacent, the other way round at the destination
        ([0, 1], [4, 6]),  # adjacent at the source alone
        ([0, 2], [4, 5]),  # adjacent at the destination alone
    ],
)
def test_adjacency_on_one_side_is_not_enough(src_ids, dst_ids):
    plan = CopyPlan([_region(0, 0, 16)])
    assert len(_pages(plan, src_ids, dst_ids)) == 2


def test_one_source_for_two_destinations_keeps_both_runs():
    plan = CopyPlan([_region(0, 0, 16)])
    copies = _as_copies(plan, [2, 2, 3, 3], [10, 20, 11, 21])
    assert copies == {(32, 160, 32), (32, 320, 32)}


def test_pages_with_a_gap_on_either_side_stay_apart():
    plan = CopyPlan(
        [_region(0, 0, 16, src_stride=24), _region(2000, 2000, 16, dst_stride=24)]
    )
    assert len(_pages(plan, [0, 1], [0, 1])) == 4


def test_regions_that_touch_are_not_joined():
    plan = CopyPlan([_region(0, 0, 16), _region(32, 32, 16)])
    assert _as_copies(plan, [0, 1], [0, 1]) == {(0, 0, 32), (32, 32, 32)}


def test_the_last_source_of_a_destination_wins():
    plan = CopyPlan([_region(0, 0, 16)])
    assert _as_copies(plan, [1, 2, 3], [7, 8, 7]) == {(48, 112, 16), (32, 128, 16)}


@pytest.mark.parametrize("side", [SRC, DST])
@pytest.mark.parametrize(
    ("cut", "lengths"),
    [
        (0, [64]),  # at the start: not inside
        (64, [64]),  # at the end: not inside
        (32, [32, 32]),  # between pages
        (40, [40, 24]),  # inside a page
    ],
)
def test_copies_end_at_a_cut(side, cut, lengths):
    cuts = np.array([side + cut], dtype=np.uint64)
    plan = CopyPlan([_region(0, 0, 16)], cuts)
    copies = _pages(plan, [0, 1, 2, 3], [0, 1, 2, 3])
    by_address = np.argsort(copies.src)
    assert copies.size[by_address].tolist() == lengths


def test_a_cut_at_the_same_place_of_both_sides_splits_once():
    cuts = np.array([DST + 24, SRC + 24, SRC + 24], dtype=np.uint64)
    plan = CopyPlan([_region(0, 0, 16)], cuts)
    assert _as_copies(plan, [0, 1], [0, 1]) == {(0, 0, 24), (24, 24, 8)}


def test_no_blocks_are_no_copies():
    cuts = np.array([SRC + 8], dtype=np.uint64)
    assert len(_pages(CopyPlan([_region(0, 0, 16)], cuts), [], [])) == 0
    assert len(_pages(CopyPlan([]), [1], [2])) == 0


def test_without_merging_pages_come_in_the_order_of_regions_and_ids():
    plan = CopyPlan([_region(0, 0, 16), _region(500, 500, 8)], merge=False)
    copies = _pages(plan, [4, 5, 5], [1, 2, 2])
    assert (copies.src - np.uint64(SRC)).tolist() == [64, 80, 80, 532, 540, 540]
    assert (copies.dst - np.uint64(DST)).tolist() == [16, 32, 32, 508, 516, 516]
    assert copies.size.tolist() == [16, 16, 16, 8, 8, 8]


@pytest.mark.parametrize(
    ("page", "src_stride", "dst_stride"), [(0, 16, 16), (32, 16, 32), (32, 32, 16)]
)
def test_empty_and_overlapping_pages_are_refused(page, src_stride, dst_stride):
    with pytest.raises(ValueError, match=r"region 'layers\.7' has pages of"):
        Region("layers.7", SRC, DST, src_stride, dst_stride, page)


def test_lists_of_different_length_are_refused():
    with pytest.raises(ValueError, match="3 source blocks cannot go to 2"):
        CopyPlan([_region(0, 0, 16)]).copies([1, 2, 3], [1, 2])


@pytest.mark.parametrize("index", [-1, 2])
def test_locate_past_the_end(index):
    rectangles, pages = _stacked_and_single().copies([1, 2], [1, 2])
    for copies, name in ((rectangles, "rectangle"), (pages, "copy")):
        with pytest.raises(IndexError, match=f"{name} {index} of 2"):
            copies.locate(index)


def _stacked_and_single() -> CopyPlan:
    """A plan with one rectangle a block and one page of a size of its own."""
    regions = [*_layers(3, 16), _region(5000, 5000, 40, src_stride=48)]
    return CopyPlan(regions, limits=CUDA_LIMITS)


def _layers(
    count: int,
    page: int,
    blocks: int = 10,
    *,
    src: int = 0,
    dst: int = 0,
    distance: int = 0,
    block_bytes: int = 0,
) -> list[Region]:
    """Layers one after the other at the source, blocks at the destination."""
    distance = distance or blocks * page
    block_bytes = block_bytes or count * page
    return [
        _region(src + i * distance, dst + i * page, page, dst_stride=block_bytes)
        for i in range(count)
    ]


def _back(regions: list[Region]) -> list[Region]:
    """The same memory, copied the other way."""
    return [
        Region(r.name, r.dst_base, r.src_base, r.dst_stride, r.src_stride, r.page_bytes)
        for r in regions
    ]


def _table(plan: CopyPlan, src_ids: list[int], dst_ids: list[int]) -> list[list[int]]:
    """Rectangles as rows of the table, addresses relative to each side."""
    table = plan.copies(src_ids, dst_ids).rectangles.table
    assert table.dtype == np.uint64
    assert table.flags.c_contiguous
    assert table.shape[1:] == (8,)
    return [[row[0] - DST, row[1] - SRC, *row[2:]] for row in table.tolist()]


def test_a_block_is_one_rectangle_for_each_page_size():
    regions = [*_layers(3, 16, block_bytes=112), *_layers(2, 32, src=1000, dst=48)]
    regions[3:] = [replace(r, dst_stride=112) for r in regions[3:]]
    plan = CopyPlan(regions[::-1], limits=CUDA_LIMITS)
    assert _table(plan, [4, 7], [1, 0]) == [
        [48, 1000 + 7 * 32, 32, 2, 32, 320, 1, 1],
        [0, 7 * 16, 16, 3, 16, 160, 1, 1],
        [112 + 48, 1000 + 4 * 32, 32, 2, 32, 320, 1, 1],
        [112, 4 * 16, 16, 3, 16, 160, 1, 1],
    ]
    assert (plan.rectangles_per_block, plan.pages_per_block) == (2, 0)
    assert plan.sample(10, 10).share == 1.0
    rectangles, pages = plan.copies([4, 7], [1, 0])
    assert (rectangles.num_bytes, pages.num_bytes) == (224, 0)
    assert [r.src_base - SRC for r in rectangles.locate(2).regions] == [1000, 1320]
    assert rectangles.locate(1)[1:] == (range(7, 8), range(0, 1))
    assert rectangles.locate(2)[1:] == (range(4, 5), range(1, 2))


def test_what_no_rectangle_takes_is_copied_as_pages():
    plan = _stacked_and_single()
    assert (plan.rectangles_per_block, plan.pages_per_block) == (1, 1)
    rectangles, pages = plan.copies([4, 5], [7, 8])
    assert (len(rectangles), rectangles.num_bytes) == (2, 96)
    assert (pages.src - np.uint64(SRC)).tolist() == [5000 + 4 * 48, 5000 + 5 * 48]
    assert pages.num_bytes == 80
    assert [r.page_bytes for r in pages.locate(1).regions] == [40]
    assert plan.sample(9, 9).share == 48 / 88


def test_without_limits_there_are_no_rectangles():
    plan = CopyPlan(_layers(3, 16))
    assert (plan.rectangles_per_block, plan.pages_per_block) == (0, 3)
    assert plan.sample(10, 10).share == 0.0
    assert CopyPlan([], limits=CUDA_LIMITS).sample(10, 10).share == 0.0


def test_rectangles_end_where_the_distance_changes():
    """On either side; a pair that has no like neighbour is one of its own."""
    bases = [(0, 0), (100, 20), (200, 40), (300, 70), (400, 100), (900, 900)]
    plan = CopyPlan([_region(s, d, 16) for s, d in bases], limits=CUDA_LIMITS)
    assert [row[:4] for row in _table(plan, [0], [0])] == [
        [0, 0, 16, 3],
        [70, 300, 16, 2],
    ]
    assert plan.pages_per_block == 1


@pytest.mark.parametrize(
    "other",
    [
        _region(1000, 100, 16, src_stride=32),
        _region(1000, 100, 16, dst_stride=32),
        _region(1000, 100, 8, src_stride=16, dst_stride=16),
        _region(8, 100, 16),  # overlaps at the source
        _region(1000, 8, 16),  # overlaps at the destination
    ],
)
def test_pages_that_differ_or_overlap_are_in_no_rectangle_together(other):
    plan = CopyPlan([_region(0, 0, 16), other], limits=CUDA_LIMITS)
    assert plan.rectangles_per_block == 0


def test_layers_in_the_opposite_order_on_both_sides_stay_pages():
    plan = CopyPlan([_region(0, 100, 16), _region(100, 0, 16)], limits=CUDA_LIMITS)
    assert plan.pages_per_block == 2


def test_the_last_source_of_a_destination_wins_in_rectangles_too():
    for merge in (True, False):
        regions = [*_layers(3, 16), _region(5000, 5000, 40, src_stride=48)]
        plan = CopyPlan(regions, merge=merge, limits=CUDA_LIMITS)
        assert [row[:2] for row in _table(plan, [1, 2, 3], [7, 8, 7])] == [
            [7 * 48, 3 * 16],
            [8 * 48, 2 * 16],
        ]
        assert len(plan.copies([1, 2, 3], [7, 8, 7]).pages) == 2


# 3 GiB: a layer of 196,608 blocks of 16 KiB, more than the 2-D call takes.
WIDE = 3 << 30


@pytest.mark.parametrize(
    ("limits", "page", "distance", "pitch"),
    [
        (CUDA_LIMITS, 16384, 2**31 - 16384, 2**31 - 16384),
        (SDMA_LIMITS, 16384, 2**31 - 16384, 2**31 - 16384),
        # Lines of a block each, where layers lie back to back.
        (CUDA_LIMITS, 16384, WIDE, 16384),
        (SDMA_LIMITS, 16384, WIDE, 16384),
        # Else the largest power of two that divides the distance ...
        (CUDA_LIMITS, 20480, WIDE + (32 << 20), 32 << 20),
        (CUDA_LIMITS, 20480, WIDE << 1, 1 << 30),
        # ... and fits a packet: 2**19 elements of 16 bytes.
        (SDMA_LIMITS, 20480, WIDE + (4 << 20), 4 << 20),
        (SDMA_LIMITS, 20480, WIDE + (32 << 20), 8 << 20),
        # Of 4 bytes, with 2**28 of them to the slice.
        (replace(SDMA_LIMITS, max_pitch=2**29), 20484, 3 << 28, 2 << 20),
    ],
)
def test_layers_too_far_apart_for_2d_go_as_lines(limits, page, distance, pitch):
    """The other side's distance is its pitch in any case."""
    towards = _layers(4, page, distance=distance)
    (table,) = _table(CopyPlan(towards, limits=limits), [0], [0])
    assert table[2:] == [page, 4, page, pitch, 1, distance // pitch]
    copies = CopyPlan(_back(towards), limits=limits).copies([0], [0])
    (table,) = copies.rectangles.table.tolist()
    assert table[2:] == [page, 4, pitch, page, distance // pitch, 1]


def test_lines_are_within_a_packet_on_both_sides():
    """At most 2**19 elements of 16 bytes, 8 MiB."""
    layers = [_region(i * WIDE, i * (16 << 20), 20480) for i in range(3)]
    for limits, dst_pitch in ((CUDA_LIMITS, 16 << 20), (SDMA_LIMITS, 8 << 20)):
        (table,) = _table(CopyPlan(layers, limits=limits), [0], [0])
        assert (table[4], table[6]) == (dst_pitch, (16 << 20) // dst_pitch)
    page = 12 << 20
    layers = _layers(3, page, distance=WIDE)
    assert CopyPlan(layers, limits=CUDA_LIMITS).rectangles_per_block == 1
    assert CopyPlan(layers, limits=SDMA_LIMITS).rectangles_per_block == 0


def test_a_distance_that_no_pitch_divides_leaves_pages():
    layers = _layers(3, 16384, distance=WIDE + 4096)
    assert CopyPlan(layers, limits=CUDA_LIMITS).pages_per_block == 3


def test_one_layer_too_far_away_does_not_cost_the_others_their_rectangle():
    layers = [_region(0, 0, 16384), _region(WIDE + 4, 16384, 16384)]
    layers += [_region(WIDE + 4 + i * 65536, 16384 * (i + 1), 16384) for i in (1, 2)]
    plan = CopyPlan(layers, limits=CUDA_LIMITS)
    assert [row[3] for row in _table(plan, [0], [0])] == [3]
    assert plan.pages_per_block == 1


@pytest.mark.parametrize("field", ["src_base", "dst_base", "src_stride", "dst_stride"])
def test_what_sdma_cannot_address_stays_pages(field):
    layers = _layers(3, 16, block_bytes=64)
    odd = [replace(r, **{field: getattr(r, field) + 2}) for r in layers]
    assert CopyPlan(layers, limits=SDMA_LIMITS).rectangles_per_block == 1
    assert CopyPlan(odd, limits=SDMA_LIMITS).rectangles_per_block == 0
    assert CopyPlan(odd, limits=CUDA_LIMITS).rectangles_per_block == 1


def test_rows_and_widths_beyond_a_packet_are_split():
    page = 600 << 10
    layers = _layers(4097, page, distance=1 << 20)
    table = _table(CopyPlan(layers, limits=SDMA_LIMITS), [0], [0])
    strip = 2**14 * 16
    assert [row[2] for row in table] == [strip, strip, page - 2 * strip] * 3
    assert [row[3] for row in table] == [1365] * 3 + [1366] * 6
    assert [row[0] for row in table[:3]] == [0, strip, 2 * strip]
    assert [row[1] - (1365 << 20) for row in table[3:6]] == [0, strip, 2 * strip]
    assert len(_table(CopyPlan(layers, limits=CUDA_LIMITS), [0], [0])) == 1


@pytest.mark.parametrize(
    ("page", "src_distance", "dst_distance", "rectangles"),
    [
        (20480, (1 << 30) + 16, 32768, 1),
        (20480, 1 << 32, 32768, 1),
        (20480, (1 << 30) + 4, 32768, 0),
        (20480, (1 << 30) + 16, 32772, 0),
        (20484, (1 << 30) + 16, 32768, 0),
        (20484, 1 << 30, 32768, 1),
    ],
)
def test_distances_in_a_packet_are_counted_in_elements(
    page, src_distance, dst_distance, rectangles
):
    """Of 16 bytes, or of 4 where any length is no multiple of more."""
    layers = [_region(i * src_distance, i * dst_distance, page) for i in range(3)]
    plan = CopyPlan(layers, limits=SDMA_LIMITS)
    assert plan.rectangles_per_block == rectangles


def test_lines_of_a_block_are_not_taken_where_they_make_elements_too_small():
    """A slice of 2.5 GiB in elements of 4 bytes is too wide, of 16 it is not."""
    block, blocks = 20484, 2**17
    layers = [
        _region(i * block * blocks, i * 32768, 20480, src_stride=block)
        for i in range(3)
    ]
    for limits, pitch in ((CUDA_LIMITS, block), (SDMA_LIMITS, 2**19)):
        (table,) = _table(CopyPlan(layers, limits=limits), [0], [0])
        assert (table[5], table[7]) == (pitch, block * blocks // pitch)


def test_a_row_that_is_left_over_joins_the_pages():
    limits = replace(SDMA_LIMITS, max_rows=2)
    plan = CopyPlan(_layers(3, 16), limits=limits)
    assert (plan.rectangles_per_block, plan.pages_per_block) == (1, 1)
    rectangles, pages = plan.copies([5], [2])
    assert rectangles.num_bytes + pages.num_bytes == 48


@pytest.mark.parametrize("side", [SRC, DST])
@pytest.mark.parametrize(
    ("cut", "rows", "pieces"),
    [
        (0, [4], []),  # where the first row starts: not inside
        (16, [3], [16]),  # where the first row ends
        (63, [3], [16]),  # between two rows
        (64, [3], [16]),  # where the second starts
        (70, [2], [16, 6, 10]),  # within the second
        (128, [2, 2], []),
        (200, [3], [8, 8]),  # within the last
        (208, [4], []),  # where the last one ends: not inside
    ],
)
def test_rectangles_fall_apart_at_a_cut(side, cut, rows, pieces):
    """Rows of 16 bytes, 64 from each other on both sides."""
    layers = [_region(64 * i, 64 * i, 16) for i in range(4)]
    cuts = np.array([side + cut], dtype=np.uint64)
    copies = CopyPlan(layers, cuts, limits=CUDA_LIMITS).copies([0], [0])
    assert copies.rectangles.table[:, 3].tolist() == rows
    in_order = np.argsort(copies.pages.src)
    assert copies.pages.size[in_order].tolist() == pieces
    for index in range(len(copies.pages)):
        (region,) = copies.pages.locate(index).regions
        assert 0 <= int(copies.pages.src[index]) - region.src_base < 16


def test_blocks_without_a_cut_keep_their_rectangle():
    """The cut is in block 5 of the first layer, so between its layers for 4."""
    cuts = np.array([SRC + 16 * 5 + 8], dtype=np.uint64)
    plan = CopyPlan(_layers(3, 16), cuts, limits=CUDA_LIMITS)
    rectangles, pages = plan.copies([4, 5, 6], [0, 1, 2])
    sites = [rectangles.locate(i) for i in range(3)]
    assert {(site.src_blocks[0], len(site.regions)) for site in sites} == {
        (6, 3),
        (5, 2),
        (4, 2),
    }
    assert sorted(pages.size.tolist()) == [8, 8, 16]
    assert {pages.locate(i).src_blocks for i in range(3)} == {range(4, 5), range(5, 6)}
    assert {pages.locate(i).dst_blocks for i in range(3)} == {range(1), range(1, 2)}


@pytest.mark.parametrize("back", [False, True])
def test_a_cut_where_a_region_starts_parts_it_from_those_before_it(back):
    """For every block: as regions in storages of their own that touch."""
    layers = _layers(4, 16, blocks=10)
    layers = _back(layers) if back else layers
    cuts = np.array([SRC + 320], dtype=np.uint64)
    plan = CopyPlan(layers, cuts, limits=CUDA_LIMITS)
    assert (plan.rectangles_per_block, plan.pages_per_block) == (2, 0)
    cuts = np.array([SRC, SRC + 160, SRC + 320, SRC + 480, SRC + 640], dtype=np.uint64)
    plan = CopyPlan(layers, cuts, limits=CUDA_LIMITS)
    assert (plan.rectangles_per_block, plan.pages_per_block) == (0, 4)


def test_regions_in_allocations_of_their_own_are_copied_in_runs():
    layers = [_region(160 * i, 160 * i, 16) for i in range(3)]
    cuts = np.array([SRC + 160, SRC + 320], dtype=np.uint64)
    plan = CopyPlan(layers, cuts, limits=CUDA_LIMITS)
    assert len(_pages(plan, [3, 4, 5], [7, 8, 9])) == 3


@pytest.mark.parametrize("back", [False, True])
def test_a_cut_at_a_row_of_one_block_costs_the_others_nothing(back):
    """Block after block, where a registration may end at a row."""
    layers = _layers(4, 16)
    layers = _back(layers) if back else layers
    cuts = np.array([DST + 16], dtype=np.uint64)
    rectangles = CopyPlan(layers, cuts, limits=CUDA_LIMITS).copies([1, 0], [1, 0])[0]
    assert rectangles.table[:, 3].tolist() == [4, 3]


def test_the_share_of_rectangles_counts_what_cuts_take():
    layers = _layers(4, 16, distance=1616)
    # Between the last block of each and the next, so that no block is free of it.
    ends = [SRC + 1616 * i + 1600 for i in range(3)]
    through_all = np.array(ends, dtype=np.uint64)
    plan = CopyPlan(layers, through_all, limits=CUDA_LIMITS)
    assert plan.sample(100, 100).share == 0.0
    assert plan.rectangles_per_block == 1

    def share(cuts_in_blocks: list[int], blocks: int) -> float:
        cuts = np.array([DST + at for at in cuts_in_blocks], dtype=np.uint64)
        plan = CopyPlan(layers, cuts, limits=CUDA_LIMITS)
        first = plan.sample(100, blocks).share
        assert plan.sample(100, blocks).share == first
        return first

    # Pages of 16 bytes, between the second and third of every fourth block, and
    # then within the second, so that half of the block is left.
    assert share([64 * i + 32 for i in range(0, 100, 4)], 100) == 1.0
    assert share([64 * i + 24 for i in range(0, 100, 4)], 100) == 1 - 0.25 * 0.5
    # More blocks than are looked at: those of the second half.
    assert 0.7 < share([64 * i + 24 for i in range(2000, 4000)], 4000) < 0.8


def _hybrid(num_blocks: int, attention: int, state: int) -> KVCacheConfig:
    """Attention and Mamba layers, one after the other in one storage.

    Layers of a pair of KV head groups are two regions each.
    """
    page, tensors, offset = 2 * 48, [], 0
    for names, layer_page in (
        ([f"attention.{i}" for i in range(attention)], page),
        ([f"mamba.{i}" for i in range(state)], 240),
    ):
        tensors.append(
            KVCacheTensor(
                size=0,
                layers=names,
                layer_stride=num_blocks * layer_page,
                block_stride=layer_page // 2 if layer_page == page else layer_page,
                offset=offset,
            )
        )
        offset += len(names) * num_blocks * layer_page
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=[]
    )


@pytest.mark.parametrize("padding", [0, 8])
@pytest.mark.parametrize("limits", [CUDA_LIMITS, SDMA_LIMITS])
def test_hybrid_models_are_one_rectangle_for_each_page_size(limits, padding):
    """Also where a state is shorter than its block, as Mamba's are padded."""
    config = _hybrid(num_blocks=7, attention=3, state=2)
    storage = torch.zeros(7 * (3 * 96 + 2 * 240), dtype=torch.int8)
    names = [n for t in config.kv_cache_tensors for n in t.layers]
    device = block_regions(dict.fromkeys(names, storage), config)
    if padding:
        device = {
            name: view[:, : view.shape[1] - padding * ("mamba" in name)]
            for name, view in device.items()
        }
    host = block_layout(device)
    regions = [
        Region(
            name,
            view.data_ptr() - storage.data_ptr(),
            DST + host.offsets[name],
            view.stride(0),
            host.block_bytes,
            view.shape[1],
        )
        for name, view in device.items()
    ]
    rectangles, pages = CopyPlan(regions, limits=limits).copies([6], [2])
    assert rectangles.table[:, 2:4].tolist() == [[48, 6], [240 - padding, 2]]
    assert len(pages) == 0


def _tiny(draw: st.DrawFn) -> PitchedLimits | None:
    """Limits that layouts of a few hundred bytes run into."""
    kind = draw(st.sampled_from(["none", "CUDA", "SDMA", "SDMA"]))
    if kind == "none":
        return None
    max_pitch = draw(st.sampled_from([40, 96, 2**31 - 1]))
    if kind == "CUDA":
        return PitchedLimits(max_pitch)
    return PitchedLimits(
        max_pitch,
        alignment=draw(st.sampled_from([1, 2, 4])),
        max_element=draw(st.sampled_from([4, 8, 16])),
        pitch_elements=draw(st.sampled_from([4, 12, 64])),
        slice_elements=draw(st.sampled_from([8, 40, 400])),
        row_elements=draw(st.sampled_from([1, 2, 4, 64])),
        max_rows=draw(st.sampled_from([1, 2, 3, 5, 64])),
    )


@st.composite
def _side(draw: st.DrawFn, pages: list[int], blocks: int) -> list[tuple[int, int]]:
    """Base and block stride of each region on one side, without overlap."""
    gap = st.sampled_from([0, 0, 0, 0, 4, 8, 20])
    order = list(range(len(pages)))
    if draw(st.integers(0, 4)) == 0:
        order = draw(st.permutations(order))
    placed: dict[int, tuple[int, int]] = {}
    at = draw(gap)
    if draw(st.booleans()):  # block after block
        for i in order:
            placed[i] = at, 0
            at += pages[i] + draw(gap)
        placed = {i: (base, at) for i, (base, _) in placed.items()}
    else:  # region after region
        for i in order:
            stride = pages[i] + draw(gap)
            placed[i] = at, stride
            at += blocks * stride + draw(gap)
    return [placed[i] for i in range(len(pages))]


@st.composite
def _layouts(draw: st.DrawFn) -> tuple[list[Region], int]:
    """Regions that overlap on neither side, and how many blocks they have."""
    blocks = draw(st.integers(1, 6))
    pages = [
        page
        for page in draw(
            st.lists(st.sampled_from([1, 4, 12, 16, 24, 32]), min_size=1, max_size=3)
        )
        for _ in range(draw(st.integers(1, 6)))
    ]
    src, dst = draw(_side(pages, blocks)), draw(_side(pages, blocks))
    regions = [
        Region(str(i), SRC + src[i][0], DST + dst[i][0], src[i][1], dst[i][1], page)
        for i, page in enumerate(pages)
    ]
    if draw(st.integers(0, 4)) == 0:
        regions = draw(st.permutations(regions))
    return regions, blocks


def _cuts_of(draw: st.DrawFn) -> np.ndarray:
    offsets = st.sets(st.integers(0, 1000), max_size=5)
    sides = [(side, draw(offsets)) for side in (SRC, DST)]
    return np.array([side + at for side, ats in sides for at in ats], dtype=np.uint64)


class _Memory:
    """Both sides, with a value of its own in every byte of the source."""

    def __init__(self, cuts: np.ndarray) -> None:
        self.cuts = sorted(cuts.tolist())
        self.source = np.arange(1, MEMORY_BYTES + 1)
        self.written = np.zeros(MEMORY_BYTES, dtype=np.int64)
        self.times = np.zeros(MEMORY_BYTES, dtype=np.int64)

    def copy(self, src: int, dst: int, size: int) -> None:
        at = slice(dst - DST, dst - DST + size)
        self.written[at] = self.source[src - SRC : src - SRC + size]
        self.times[at] += 1

    def is_cut(self, start: int, end: int) -> bool:
        return any(start < cut < end for cut in self.cuts)


def _page_at(r: Region, src_block: int, dst_block: int) -> tuple[int, int]:
    return (
        r.src_base + src_block * r.src_stride,
        r.dst_base + dst_block * r.dst_stride,
    )


def _copy_rectangles(
    memory: _Memory, copies: RectangleCopies, limits: PitchedLimits
) -> None:
    for index, row in enumerate(copies.table.tolist()):
        dst, src, width, rows, dst_pitch, src_pitch, dst_lines, src_lines = row
        site = copies.locate(index)
        assert len(site.regions) == rows >= 2
        assert len(site.src_blocks) == len(site.dst_blocks) == 1
        src_step, dst_step = src_pitch * src_lines, dst_pitch * dst_lines
        for k, region in enumerate(site.regions):
            src_page, dst_page = _page_at(
                region, site.src_blocks[0], site.dst_blocks[0]
            )
            into = src + k * src_step - src_page
            assert into == dst + k * dst_step - dst_page
            assert 0 <= into <= region.page_bytes - width
            memory.copy(src + k * src_step, dst + k * dst_step, width)
        for start, step in ((src, src_step), (dst, dst_step)):
            assert not memory.is_cut(start, start + (rows - 1) * step + width)
        _assert_within(limits, row)


def _assert_within(limits: PitchedLimits, row: list[int]) -> None:
    dst, src, width, rows, dst_pitch, src_pitch, dst_lines, src_lines = row
    pitches = [dst_pitch, src_pitch]
    slices = [dst_pitch * dst_lines, src_pitch * src_lines]
    assert width <= min(pitches)
    assert max(pitches) <= limits.max_pitch
    assert not any(n % limits.alignment for n in (dst, src, width, *slices))
    if not limits.max_element:
        return
    element = gcd(limits.max_element, width, *pitches, *slices)
    is_flat = (dst_lines, src_lines) == (1, 1)
    assert is_flat or max(pitches) <= limits.pitch_elements * element
    assert max(slices) <= limits.slice_elements * element
    assert width <= limits.row_elements * element
    assert rows <= limits.max_rows


def _copy_pages(memory: _Memory, copies: PageCopies) -> None:
    for index in range(len(copies)):
        src, dst, size = (int(a[index]) for a in (copies.src, copies.dst, copies.size))
        assert size > 0
        assert not memory.is_cut(src, src + size)
        assert not memory.is_cut(dst, dst + size)
        memory.copy(src, dst, size)

        site = copies.locate(index)
        (r,) = site.regions
        assert len(site.src_blocks) == len(site.dst_blocks)
        src_page, dst_page = _page_at(r, site.src_blocks[0], site.dst_blocks[0])
        assert 0 <= src - src_page == dst - dst_page
        src_last, dst_last = _page_at(r, site.src_blocks[-1], site.dst_blocks[-1])
        assert src + size <= src_last + r.page_bytes
        assert dst + size <= dst_last + r.page_bytes


@settings(max_examples=200, deadline=None)
@given(layout=_layouts(), data=st.data())
def test_every_plan_moves_the_bytes_that_the_model_moves(layout, data):
    regions, blocks = layout
    limits = _tiny(data.draw)
    merge = data.draw(st.booleans())
    block = st.integers(0, blocks - 1)
    pairs = data.draw(st.lists(st.tuples(block, block), max_size=2 * blocks))
    if not merge and limits is None:
        pairs = [(s, d) for d, s in {d: s for s, d in pairs}.items()]
    elif data.draw(st.booleans()):
        first = data.draw(block)
        pairs += [(k, k) for k in range(first, blocks)]

    memory = _Memory(_cuts_of(data.draw))
    expected = np.zeros(MEMORY_BYTES, dtype=np.int64)
    for src_block, dst_block in pairs:
        for r in regions:
            src, dst = _page_at(r, src_block, dst_block)
            bytes_of_page = memory.source[src - SRC : src - SRC + r.page_bytes]
            expected[dst - DST : dst - DST + r.page_bytes] = bytes_of_page

    cuts = np.array(memory.cuts[::-1], dtype=np.uint64)
    plan = CopyPlan(regions, cuts, merge, limits)
    rectangles, pages = plan.copies([s for s, _ in pairs], [d for _, d in pairs])
    if limits is None:
        assert len(rectangles) == 0
    else:
        _copy_rectangles(memory, rectangles, limits)
    _copy_pages(memory, pages)
    assert np.array_equal(memory.written, expected)
    assert np.array_equal(memory.times, expected != 0)
    assert rectangles.num_bytes + pages.num_bytes == np.count_nonzero(expected)
    if limits is None and merge:
        assert len(pages) == _fewest_copies(regions, pairs, memory)
    if not memory.cuts and pairs:
        copies_a_block = len(rectangles) / len({d for _, d in pairs})
        assert copies_a_block == plan.rectangles_per_block
        share = rectangles.num_bytes / np.count_nonzero(expected)
        assert plan.sample(blocks, blocks).share == pytest.approx(share)


def _fewest_copies(regions, pairs, memory) -> int:
    last = {dst: src for src, dst in pairs}
    kept = {(src, dst) for dst, src in last.items()}
    count = 0
    for r in regions:
        dense = r.page_bytes == r.src_stride == r.dst_stride
        for src, dst in kept:
            if dense and (src - 1, dst - 1) in kept:
                continue
            length = 1
            while dense and (src + length, dst + length) in kept:
                length += 1
            inside = {
                cut - start
                for start in _page_at(r, src, dst)
                for cut in memory.cuts
                if start < cut < start + length * r.page_bytes
            }
            count += 1 + len(inside)
    return count


@settings(deadline=None)
@given(layout=_layouts(), data=st.data())
def test_no_two_neighbours_are_left_apart_that_make_a_rectangle(layout, data):
    """With limits that do not matter here: those of CUDA."""
    regions, blocks = layout
    pair = data.draw(st.integers(0, blocks - 1)), data.draw(st.integers(0, blocks - 1))
    whole = CopyPlan(regions, limits=CUDA_LIMITS).copies(*([b] for b in pair))
    alike: dict[tuple[int, int, int], list[Region]] = {}
    for r in sorted(regions, key=lambda r: r.src_base):
        alike.setdefault((r.page_bytes, r.src_stride, r.dst_stride), []).append(r)
    single = _regions_of_pages(whole.pages)
    for upper, lower in chain.from_iterable(map(pairwise, alike.values())):
        if {upper, lower} <= single:
            steps = (
                lower.src_base - upper.src_base,
                lower.dst_base - upper.dst_base,
            )
            assert min(steps) < upper.page_bytes

    memory = _Memory(_cuts_of(data.draw))
    cuts = np.array(memory.cuts, dtype=np.uint64)
    parted = CopyPlan(regions, cuts, limits=CUDA_LIMITS).copies(*([b] for b in pair))
    single = _regions_of_pages(parted.pages)
    for index in range(len(whole.rectangles)):
        for upper, lower in pairwise(whole.rectangles.locate(index).regions):
            if {upper, lower} <= single:
                starts = zip(
                    _page_at(upper, *pair), _page_at(lower, *pair), strict=True
                )
                assert any(memory.is_cut(a, b + lower.page_bytes) for a, b in starts)


def _regions_of_pages(pages: PageCopies) -> set[Region]:
    return {pages.locate(i).regions[0] for i in range(len(pages))}
