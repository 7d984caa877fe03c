# SPDX-License-Identifier: Apache-2.0
"""Copy plans against a model that moves blocks one byte at a time."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.simple_kv_offload.copy_plan import CopyPlan, Region

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


def _as_copies(plan: CopyPlan, src_ids: list[int], dst_ids: list[int]) -> set:
    """Copies as (source, destination, bytes), addresses relative to each side."""
    copies = plan.copies(src_ids, dst_ids)
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
    assert len(plan.copies(src_ids, dst_ids)) == 2


def test_one_source_for_two_destinations_keeps_both_runs():
    plan = CopyPlan([_region(0, 0, 16)])
    copies = _as_copies(plan, [2, 2, 3, 3], [10, 20, 11, 21])
    assert copies == {(32, 160, 32), (32, 320, 32)}


def test_pages_with_a_gap_on_either_side_stay_apart():
    plan = CopyPlan(
        [_region(0, 0, 16, src_stride=24), _region(2000, 2000, 16, dst_stride=24)]
    )
    assert len(plan.copies([0, 1], [0, 1])) == 4


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
    copies = CopyPlan([_region(0, 0, 16)], cuts).copies([0, 1, 2, 3], [0, 1, 2, 3])
    by_address = np.argsort(copies.src)
    assert copies.size[by_address].tolist() == lengths


def test_a_cut_at_the_same_place_of_both_sides_splits_once():
    cuts = np.array([DST + 24, SRC + 24, SRC + 24], dtype=np.uint64)
    plan = CopyPlan([_region(0, 0, 16)], cuts)
    assert _as_copies(plan, [0, 1], [0, 1]) == {(0, 0, 24), (24, 24, 8)}


def test_no_blocks_are_no_copies():
    cuts = np.array([SRC + 8], dtype=np.uint64)
    assert len(CopyPlan([_region(0, 0, 16)], cuts).copies([], [])) == 0
    assert len(CopyPlan([]).copies([1], [2])) == 0


def test_without_merging_pages_come_in_the_order_of_regions_and_ids():
    plan = CopyPlan([_region(0, 0, 16), _region(500, 500, 8)], merge=False)
    copies = plan.copies([4, 5, 5], [1, 2, 2])
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


def test_locate_past_the_end():
    copies = CopyPlan([_region(0, 0, 16)]).copies([1], [1])
    with pytest.raises(IndexError, match="copy 1 of 1"):
        copies.locate(1)


def test_planning_a_large_model_takes_little_time():
    """131 regions and 128 scattered blocks were 34 ms of submission before.

    The bound is some hundred times what it takes, for busy machines; one Python
    call a page would break it.
    """
    pages = [16384, 32768]
    plan = CopyPlan(
        [_region(i << 30, i << 30, pages[i % 2]) for i in range(131)],
        np.arange(SRC, SRC + (131 << 30), 256 << 20, dtype=np.uint64),
    )
    ids = np.random.default_rng(0).permutation(4096)[:128].tolist()

    def once() -> float:
        start = time.perf_counter()
        assert len(plan.copies(ids, ids[::-1])) == 131 * 128
        return time.perf_counter() - start

    assert min(once() for _ in range(5)) < 0.02


@st.composite
def _layouts(draw: st.DrawFn) -> tuple[list[Region], int]:
    """Regions that overlap on neither side, and how many blocks they have."""
    blocks = draw(st.integers(1, 12))
    regions = []
    src = dst = 0
    for _ in range(draw(st.integers(1, 4))):
        page = draw(st.sampled_from([1, 4, 16, 24, 32]))
        gaps = st.sampled_from([0, 0, 0, 8])
        src += draw(gaps)
        dst += draw(gaps)
        src_stride, dst_stride = page + draw(gaps), page + draw(gaps)
        regions.append(_region(src, dst, page, src_stride, dst_stride))
        src += blocks * src_stride
        dst += blocks * dst_stride
    return regions, blocks


@given(layout=_layouts(), data=st.data())
def test_every_plan_moves_the_bytes_that_the_model_moves(layout, data):
    regions, blocks = layout
    block = st.integers(0, blocks - 1)
    pairs = data.draw(st.lists(st.tuples(block, block), max_size=2 * blocks))
    if data.draw(st.booleans()):
        first = data.draw(block)
        pairs += [(k, k) for k in range(first, blocks)]
    offsets = data.draw(st.sets(st.integers(0, 600), max_size=6))
    side = data.draw(st.sampled_from([SRC, DST]))
    cuts = np.array([side + offset for offset in offsets], dtype=np.uint64)

    source = np.random.default_rng(1).integers(1, 256, MEMORY_BYTES, dtype=np.uint8)
    expected = np.zeros(MEMORY_BYTES, dtype=np.uint8)
    for src_block, dst_block in pairs:
        for r in regions:
            src_page = r.src_base - SRC + src_block * r.src_stride
            dst_page = r.dst_base - DST + dst_block * r.dst_stride
            for k in range(r.page_bytes):
                expected[dst_page + k] = source[src_page + k]

    copies = CopyPlan(regions, cuts).copies(
        [s for s, _ in pairs], [d for _, d in pairs]
    )
    written = np.zeros(MEMORY_BYTES, dtype=np.uint8)
    for i in range(len(copies)):
        src, dst, size = (int(a[i]) for a in (copies.src, copies.dst, copies.size))
        start = src if side == SRC else dst
        assert not any(start < int(cut) < start + size for cut in cuts)
        written[dst - DST : dst - DST + size] = source[src - SRC : src - SRC + size]

        site = copies.locate(i)
        r = site.region
        assert len(site.src_blocks) == len(site.dst_blocks)
        for base, stride, ids, address in (
            (r.src_base, r.src_stride, site.src_blocks, src),
            (r.dst_base, r.dst_stride, site.dst_blocks, dst),
        ):
            assert base + ids[0] * stride <= address
            assert address + size <= base + ids[-1] * stride + r.page_bytes

    assert np.array_equal(written, expected)
    assert len(copies) == _fewest_copies(regions, pairs, cuts, side)


def _fewest_copies(regions, pairs, cuts, side) -> int:
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
            if side == SRC:
                start = r.src_base + src * r.src_stride
            else:
                start = r.dst_base + dst * r.dst_stride
            end = start + length * r.page_bytes
            count += 1 + sum(start < int(cut) < end for cut in cuts)
    return count
