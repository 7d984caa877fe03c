# SPDX-License-Identifier: Apache-2.0
"""From KV blocks to the copies that move them.

Note [Copy plans]
A *region* is one block-strided range of memory that exists on both sides, a
layer's pages as a rule. A *page* is a block's part of one region, and moving n
blocks means moving n pages in every region. Each copy handed to the runtime
has a price whatever its size, so a plan looks for two shapes that make one copy
of many pages:

- A *rectangle* is one block in several regions, a row a region. It takes pages
  of one size at one distance from each other, which may differ between the
  sides, and becomes one pitched copy. Which regions are rows of which rectangle
  is the same for all blocks, so it is found when the plan is made.
- A *run* is one region in several blocks that follow one another on both sides,
  where its pages lie back to back. Runs are found on the block ids, once for
  all regions that no rectangle takes.

What a copy never crosses:
- the end of its region, because nothing says what lies between two regions. A
  rectangle steps over it and touches nothing there;
- a *cut*, an address at which an allocation, a mapping or a host registration
  ends. HIP checks a copy against one memory object, and what looks like one
  range may be several. A page that spans a cut is copied in pieces, and a
  rectangle whose extent does, from its first row's first byte to its last row's
  last, falls apart into rectangles and pages that do not. Where a cut is the
  start of a region, none of its blocks would be whole, so no rectangle is made.

Runtimes order copies of one batch as they like. Should a destination block be
named twice, a plan that merges therefore copies its last source only, which is
what copies made one after the other would have left there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.intp]

NO_CUTS: Addresses = np.empty(0, dtype=np.uint64)

# Blocks that a sample has: enough for a figure in a log line.
_SAMPLE_BLOCKS = 256

_DST, _SRC, _WIDTH, _ROWS = range(4)


@dataclass(frozen=True)
class PitchedLimits:
    """What one pitched copy may look like; in bytes unless a name says otherwise.

    Attributes:
        max_pitch: The largest row distance of the 2-D call.
        alignment: What addresses, block strides, row distances and widths are
            multiples of.
        max_element: The largest unit that a packet counts in, a power of two and
            a multiple of ``alignment``; 0 where packets have no limits.
        pitch_elements: The largest pitch in a packet.
        slice_elements: The largest slice in a packet, no less than the pitch. The
            rows of a plane that is too wide for lines are slices.
        row_elements: The widest row in a packet.
        max_rows: The most rows in a packet, as lines or as slices.

    """

    max_pitch: int
    alignment: int = 1
    max_element: int = 0
    pitch_elements: int = 0
    slice_elements: int = 0
    row_elements: int = 0
    max_rows: int = 0


# CU_DEVICE_ATTRIBUTE_MAX_PITCH and hipDeviceAttributeMaxPitch.
_MAX_PITCH = 2**31 - 1

CUDA_LIMITS = PitchedLimits(max_pitch=_MAX_PITCH)

# ROCr, SDMA_PKT_COPY_LINEAR_RECT before gfx12: 19 bits of pitch, 28 of slice, 14 of
# x and y, 11 of z, in elements of 1 to 16 bytes; bases, pitches and slices are
# multiples of 4. ROCr makes tiles of what is larger, which are packets of their own.
SDMA_LIMITS = PitchedLimits(
    max_pitch=_MAX_PITCH,
    alignment=4,
    max_element=16,
    pitch_elements=2**19,
    slice_elements=2**28,
    row_elements=2**14,
    max_rows=2**11,
)


@dataclass(frozen=True)
class Region:
    """Pages that are copied together; addresses, strides and sizes in bytes."""

    name: str
    src_base: int
    dst_base: int
    src_stride: int
    dst_stride: int
    page_bytes: int

    def __post_init__(self) -> None:
        if not 0 < self.page_bytes <= min(self.src_stride, self.dst_stride):
            raise ValueError(
                f"KV cache region {self.name!r} has pages of {self.page_bytes} bytes "
                f"at strides of {self.src_stride} (source) and {self.dst_stride} "
                "(destination): pages must not be empty and must not overlap."
            )

    @property
    def is_dense(self) -> bool:
        """Do pages of successive blocks touch on both sides?"""
        return self.page_bytes == self.src_stride == self.dst_stride


class _Runs(NamedTuple):
    """Successive blocks: ``src[i] + k`` goes to ``dst[i] + k``, k < blocks[i]."""

    src: Addresses
    dst: Addresses
    blocks: Addresses


class CopySite(NamedTuple):
    """Where in the caches one copy lies."""

    regions: tuple[Region, ...]
    src_blocks: range
    dst_blocks: range


@dataclass(frozen=True)
class RectangleCopies:
    """Copies of rows at a fixed distance, each one block of several regions.

    ``table`` is C-contiguous uint64 of shape [copies, 8], all in bytes but rows
    and lines: dst, src, width, rows, dst_pitch, src_pitch, dst_lines, src_lines.
    From row to row it is pitch times lines; both lines are 1 where a 2-D copy
    will do, and else the copy is a 3-D one of one line a slice.
    """

    table: Addresses
    _stacks: tuple[_Stack, ...]
    _rows: _RowsOfBlocks

    def __len__(self) -> int:
        return len(self.table)

    @property
    def num_bytes(self) -> int:
        """Bytes that all of these copies move together."""
        return int(np.sum(self.table[:, _WIDTH] * self.table[:, _ROWS]))

    def locate(self, index: int) -> CopySite:
        """Return the regions and the block of copy ``index``."""
        if not 0 <= index < len(self):
            raise IndexError(f"rectangle {index} of {len(self)}")
        return self._rows.site(index, self._stacks)


@dataclass(frozen=True)
class PageCopies:
    """Copies of contiguous bytes: ``size[i]`` bytes from ``src[i]`` to ``dst[i]``.

    The three arrays are contiguous uint64 of the same length, ready to be
    passed to a batch copy.
    """

    dst: Addresses
    src: Addresses
    size: Addresses
    _groups: tuple[tuple[_RegionGroup, _Runs], ...]
    _stacks: tuple[_Stack, ...]
    # Rows that a cut took out of their rectangles; they follow the groups.
    _loose: _RowsOfBlocks
    # Which copy before cutting each copy is a part of; None where none was cut.
    _part_of: Indices | None

    def __len__(self) -> int:
        return len(self.size)

    @property
    def num_bytes(self) -> int:
        """Bytes that all of these copies move together."""
        return int(np.sum(self.size))

    def locate(self, index: int) -> CopySite:
        """Return the region and blocks of copy ``index``."""
        if not 0 <= index < len(self):
            raise IndexError(f"copy {index} of {len(self)}")
        at = index if self._part_of is None else int(self._part_of[index])
        for group, runs in self._groups:
            copies = len(group.regions) * len(runs.blocks)
            if at < copies:
                region, run = divmod(at, len(runs.blocks))
                src, dst, blocks = (int(column[run]) for column in runs)
                return CopySite(
                    (group.regions[region],),
                    range(src, src + blocks),
                    range(dst, dst + blocks),
                )
            at -= copies
        return self._loose.site(at, self._stacks)


class BlockCopies(NamedTuple):
    """All that moves some blocks: no byte is in two copies."""

    rectangles: RectangleCopies
    pages: PageCopies


class PlanSample(NamedTuple):
    """What a block takes, on average of some blocks.

    Attributes:
        share: Of its bytes that lie in rectangles, from 0.0 to 1.0.
        rectangles: Pitched copies.
        pages: Pages that are in none of them, before any are joined to runs.
        joined: Pages that are.
        three_dimensional: Whether some of the pitched copies are 3-D ones.

    """

    share: float
    rectangles: float
    pages: float
    joined: float
    three_dimensional: bool


class CopyPlan:
    """Few copies for any blocks of a fixed set of regions.

    Args:
        regions: What a block consists of.
        cuts: Addresses of either side at which an allocation, a mapping or a
            registration begins or ends, in any order.
        merge: Whether adjacent pages become one copy. Without it and without
            ``limits`` there is one copy a page, in the order of the regions and
            then of the ids, as they were given.
        limits: What a pitched copy may look like; None makes no rectangles.

    Attributes:
        regions: What it was made of.
        rectangles_per_block: Rectangles that a block takes where no cut is.
        pages_per_block: Regions whose pages are in none.

    """

    def __init__(
        self,
        regions: Sequence[Region],
        cuts: Addresses = NO_CUTS,
        merge: bool = True,
        limits: PitchedLimits | None = None,
    ) -> None:
        self.regions = tuple(regions)
        self._cuts = np.unique(cuts)
        self._last_source_only = merge or limits is not None
        stacks = tuple(_stacks(self.regions, self._cuts, limits) if limits else ())
        self._stacks = _StackGroup(stacks)
        stacked = {id(region) for stack in stacks for region in stack.regions}
        single = [r for r in self.regions if id(r) not in stacked]
        self._dense = _RegionGroup([r for r in single if merge and r.is_dense])
        self._strided = _RegionGroup([r for r in single if not (merge and r.is_dense)])
        self.rectangles_per_block = self._stacks.rectangles_per_block
        self.pages_per_block = len(single)

    def copies(
        self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int]
    ) -> BlockCopies:
        """Plan block ``src_block_ids[i]`` to ``dst_block_ids[i]`` for each i.

        Raises:
            ValueError: The two differ in length.

        """
        if len(src_block_ids) != len(dst_block_ids):
            raise ValueError(
                f"{len(src_block_ids)} source blocks cannot go to "
                f"{len(dst_block_ids)} destination blocks"
            )
        pages = _pages(src_block_ids, dst_block_ids)
        if self._last_source_only:
            pages = _last_source_of_each_destination(pages)
        rectangles, loose = self._stacks.copies(pages, self._cuts)
        return BlockCopies(rectangles, self._page_copies(pages, loose))

    def sample(self, num_src_blocks: int, num_dst_blocks: int) -> PlanSample:
        """Return what a block takes on average of a sample, the same in each call.

        Cuts make it depend on the block.

        Args:
            num_src_blocks: Of each region at the source.
            num_dst_blocks: Of each region at the destination.

        """
        choose = np.random.default_rng(0)
        num_src_blocks, num_dst_blocks = max(1, num_src_blocks), max(1, num_dst_blocks)
        blocks = min(num_dst_blocks, _SAMPLE_BLOCKS)
        rectangles, loose = self._stacks.copies(
            _pages(
                choose.integers(num_src_blocks, size=blocks).tolist(),
                choose.choice(num_dst_blocks, blocks, replace=False).tolist(),
            ),
            self._cuts,
        )
        block_bytes = sum(region.page_bytes for region in self.regions)
        loose_pages = self.pages_per_block + len(loose.stack) / blocks
        return PlanSample(
            share=rectangles.num_bytes / (blocks * block_bytes) if block_bytes else 0.0,
            rectangles=len(rectangles) / blocks,
            pages=loose_pages,
            joined=len(self.regions) - loose_pages,
            three_dimensional=self._stacks.three_dimensional,
        )

    def _page_copies(self, pages: _Runs, loose: _RowsOfBlocks) -> PageCopies:
        groups = []
        if self._dense.regions:
            groups.append((self._dense, _merged(pages)))
        if self._strided.regions:
            groups.append((self._strided, pages))
        parts = [group.copies(runs) for group, runs in groups]
        parts += [self._stacks.pages(loose)] * bool(len(loose.stack))
        dst, src, size = (
            np.concatenate([part[i] for part in parts] or [NO_CUTS]) for i in range(3)
        )
        part_of = None
        if len(loose.stack) or any(
            group.reaches_across(self._cuts, runs) for group, runs in groups
        ):
            dst, src, size, part_of = _cut(dst, src, size, self._cuts)
        return PageCopies(
            dst, src, size, tuple(groups), self._stacks.stacks, loose, part_of
        )


class _Shape(NamedTuple):
    """How rows at a distance of pitch times lines are put to the runtime."""

    dst_pitch: int
    src_pitch: int
    dst_lines: int
    src_lines: int


class _Stack(NamedTuple):
    """Regions, in address order, whose pages of a block are one rectangle.

    It is copied in strips of ``strip_bytes`` where its rows are too wide for one.
    """

    regions: tuple[Region, ...]
    shape: _Shape
    strip_bytes: int


class _RowsOfBlocks(NamedTuple):
    """Rows from ``first`` on, ``rows`` of them, of a stack and a pair of blocks."""

    stack: Indices
    first: Addresses
    rows: Addresses
    src_block: Addresses
    dst_block: Addresses

    def at(self, index: Indices) -> _RowsOfBlocks:
        return _RowsOfBlocks(
            self.stack[index],
            self.first[index],
            self.rows[index],
            self.src_block[index],
            self.dst_block[index],
        )

    def site(self, index: int, stacks: Sequence[_Stack]) -> CopySite:
        stack, first, rows, src, dst = (int(column[index]) for column in self)
        return CopySite(
            stacks[stack].regions[first : first + rows],
            range(src, src + 1),
            range(dst, dst + 1),
        )


class _StackGroup:
    """Stacks that are copied block by block."""

    def __init__(self, stacks: tuple[_Stack, ...]) -> None:
        self.stacks = stacks
        strips = [
            (at, offset, min(stack.strip_bytes, page - offset))
            for at, stack in enumerate(stacks)
            for page in [stack.regions[0].page_bytes]
            for offset in range(0, page, stack.strip_bytes)
        ]
        self.rectangles_per_block = len(strips)
        self.three_dimensional = any(
            (stack.shape.dst_lines, stack.shape.src_lines) != (1, 1) for stack in stacks
        )
        # The table of a block 0 that goes to a block 0.
        self._strips = np.array(
            [
                (
                    stacks[at].regions[0].dst_base + offset,
                    stacks[at].regions[0].src_base + offset,
                    width,
                    len(stacks[at].regions),
                    *stacks[at].shape,
                )
                for at, offset, width in strips
            ],
            dtype=np.uint64,
        ).reshape(-1, 8)
        stack_of = np.array([at for at, _, _ in strips], dtype=np.intp)
        self._num_strips = np.bincount(stack_of, minlength=len(stacks))
        self._first_strip = np.cumsum(self._num_strips) - self._num_strips

        firsts = [stack.regions[0] for stack in stacks]
        shapes = [stack.shape for stack in stacks]
        self._rows = _row([len(stack.regions) for stack in stacks])
        self._width = _row([r.page_bytes for r in firsts])
        self._src_base = _row([r.src_base for r in firsts])
        self._dst_base = _row([r.dst_base for r in firsts])
        self._src_stride = _row([r.src_stride for r in firsts])
        self._dst_stride = _row([r.dst_stride for r in firsts])
        self._src_distance = _row([s.src_pitch * s.src_lines for s in shapes])
        self._dst_distance = _row([s.dst_pitch * s.dst_lines for s in shapes])

    def copies(
        self, pages: _Runs, cuts: Addresses
    ) -> tuple[RectangleCopies, _RowsOfBlocks]:
        """Return the rectangles of these blocks, and the rows that are in none."""
        rows = self._whole(pages)
        loose = rows.at(np.empty(0, dtype=np.intp))
        if len(cuts) and (crossing := self._crossing(rows, cuts)).any():
            pieces = self._between_cuts(rows.at(np.flatnonzero(crossing)), cuts)
            several = pieces.rows > 1
            loose = pieces.at(np.flatnonzero(~several))
            rows = _joined(
                rows.at(np.flatnonzero(~crossing)),
                pieces.at(np.flatnonzero(several)),
            )
        return self._rectangles(rows), loose

    def pages(self, rows: _RowsOfBlocks) -> tuple[Addresses, Addresses, Addresses]:
        """Return dst, src and size of rows that are copied one by one."""
        src, dst = self._starts(rows)
        return dst, src, self._width[rows.stack]

    def _whole(self, pages: _Runs) -> _RowsOfBlocks:
        stack = np.tile(np.arange(len(self.stacks)), len(pages.dst))
        return _RowsOfBlocks(
            stack,
            np.zeros(len(stack), dtype=np.uint64),
            self._rows[stack],
            np.repeat(pages.src, len(self.stacks)),
            np.repeat(pages.dst, len(self.stacks)),
        )

    def _starts(self, rows: _RowsOfBlocks) -> tuple[Addresses, Addresses]:
        """Where the first of the rows starts at the source and the destination."""
        at = rows.stack
        return (
            self._src_base[at]
            + rows.src_block * self._src_stride[at]
            + rows.first * self._src_distance[at],
            self._dst_base[at]
            + rows.dst_block * self._dst_stride[at]
            + rows.first * self._dst_distance[at],
        )

    def _crossing(self, rows: _RowsOfBlocks, cuts: Addresses) -> npt.NDArray[np.bool_]:
        """Which extents have a cut inside, on one side or the other?"""
        src, dst = self._starts(rows)
        below = rows.rows - np.uint64(1)
        width = self._width[rows.stack]
        return _spans_cut(
            src, src + below * self._src_distance[rows.stack] + width, cuts
        ) | _spans_cut(dst, dst + below * self._dst_distance[rows.stack] + width, cuts)

    def _between_cuts(self, rows: _RowsOfBlocks, cuts: Addresses) -> _RowsOfBlocks:
        """Part rows wherever a cut lies between two of them or within one."""
        owner, nth = _counted(rows.rows)
        one = np.ones(len(owner), dtype=np.uint64)
        each = rows.at(owner)._replace(first=rows.first[owner] + nth, rows=one)
        # Rows go together while both sides have the same cuts behind them. One that
        # spans a cut has fewer than the next, and is parted from those before here.
        apart = np.append(True, owner[1:] != owner[:-1])
        for start in self._starts(each):
            cuts_before = np.searchsorted(cuts, start, side="right")
            spans = _spans_cut(start, start + self._width[each.stack], cuts)
            apart[1:] |= (cuts_before[1:] != cuts_before[:-1]) | spans[1:]
        begin = np.flatnonzero(apart)
        length = np.diff(begin, append=len(owner)).astype(np.uint64)
        return each.at(begin)._replace(rows=length)

    def _rectangles(self, rows: _RowsOfBlocks) -> RectangleCopies:
        src, dst = self._starts(rows)
        if self.rectangles_per_block == len(self.stacks):
            strip = rows.stack
        else:
            owner, nth = _counted(self._num_strips[rows.stack])
            rows, src, dst = rows.at(owner), src[owner], dst[owner]
            strip = self._first_strip[rows.stack] + nth.astype(np.intp)
        table = self._strips[strip]
        table[:, _DST] += dst - self._dst_base[rows.stack]
        table[:, _SRC] += src - self._src_base[rows.stack]
        table[:, _ROWS] = rows.rows
        return RectangleCopies(table, self.stacks, rows)


class _RegionGroup:
    """Regions that are copied by the same runs of blocks."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = tuple(regions)
        self._src_base = _row([r.src_base for r in regions])[:, None]
        self._dst_base = _row([r.dst_base for r in regions])[:, None]
        self._src_stride = _row([r.src_stride for r in regions])[:, None]
        self._dst_stride = _row([r.dst_stride for r in regions])[:, None]
        self._page_bytes = _row([r.page_bytes for r in regions])[:, None]

    def copies(self, runs: _Runs) -> tuple[Addresses, Addresses, Addresses]:
        """Return dst, src and size of one copy for each region and run."""
        return (
            (self._dst_base + runs.dst * self._dst_stride).ravel(),
            (self._src_base + runs.src * self._src_stride).ravel(),
            (runs.blocks * self._page_bytes).ravel(),
        )

    def reaches_across(self, cuts: Addresses, runs: _Runs) -> bool:
        """Could any of these runs cross a cut? Looks at each region's extent."""
        if not len(cuts) or not len(runs.blocks):
            return False
        for base, stride, first in (
            (self._src_base, self._src_stride, runs.src),
            (self._dst_base, self._dst_stride, runs.dst),
        ):
            lowest = base + first.min() * stride
            highest = base + (first + runs.blocks).max() * stride
            if np.any(np.searchsorted(cuts, highest) > np.searchsorted(cuts, lowest)):
                return True
        return False


def _stacks(
    regions: Sequence[Region], cuts: Addresses, limits: PitchedLimits
) -> Iterator[_Stack]:
    """Find the regions that lie at one distance, for each page size and stride."""
    alike: dict[tuple[int, int, int], list[Region]] = {}
    for r in regions:
        size = (r.page_bytes, r.src_stride, r.dst_stride)
        if not any(n % limits.alignment for n in (*size, r.src_base, r.dst_base)):
            alike.setdefault(size, []).append(r)
    walls = frozenset(cuts.tolist())
    for candidates in alike.values():
        candidates.sort(key=lambda r: r.src_base)
        first = 0
        while first < len(candidates):
            shape, rows = _longest_stack(candidates[first:], walls, limits)
            if shape is not None:
                yield from _in_packets(candidates[first : first + rows], shape, limits)
            first += rows


def _longest_stack(
    regions: Sequence[Region], walls: frozenset[int], limits: PitchedLimits
) -> tuple[_Shape | None, int]:
    """How many regions are one stack with the first, and of which shape?"""
    if len(regions) == 1 or _are_walled_off(regions[0], regions[1], walls):
        return None, 1
    distance = _distance(regions[0], regions[1])
    shape = _shape(regions[0], *distance, limits)
    if shape is None:
        return None, 1
    rows = 2
    for upper, lower in pairwise(regions[1:]):
        if _distance(upper, lower) != distance or _are_walled_off(upper, lower, walls):
            break
        rows += 1
    return shape, rows


def _distance(upper: Region, lower: Region) -> tuple[int, int]:
    return lower.src_base - upper.src_base, lower.dst_base - upper.dst_base


def _are_walled_off(upper: Region, lower: Region, walls: frozenset[int]) -> bool:
    """Does a cut part two regions in every block, and not only in some?

    It does at the start of the lower one, unless their pages alternate.
    """
    src_distance, dst_distance = _distance(upper, lower)
    return (lower.src_base in walls and src_distance >= upper.src_stride) or (
        lower.dst_base in walls and dst_distance >= upper.dst_stride
    )


def _shape(
    region: Region, src_distance: int, dst_distance: int, limits: PitchedLimits
) -> _Shape | None:
    """Choose pitches and lines for rows at these distances, if any will do."""
    width = region.page_bytes
    if min(src_distance, dst_distance) < width:
        return None
    flat = _Shape(dst_distance, src_distance, 1, 1)
    if _fits(flat, width, limits):
        return flat
    for src_pitch in _pitches(src_distance, region.src_stride, width, limits):
        for dst_pitch in _pitches(dst_distance, region.dst_stride, width, limits):
            shape = _Shape(
                dst_pitch,
                src_pitch,
                dst_distance // dst_pitch,
                src_distance // src_pitch,
            )
            if _fits(shape, width, limits):
                return shape
    return None


def _pitches(
    distance: int, stride: int, width: int, limits: PitchedLimits
) -> Iterator[int]:
    """Pitches of which a whole number is the distance, the best first.

    The block stride is one as a rule, where regions lie back to back. Where an
    allocator rounded them up, the rounding is a power of two.
    """
    yield distance
    if distance % stride == 0:
        yield stride
    widest = limits.max_pitch
    if limits.max_element:
        widest = min(
            widest, limits.pitch_elements * _element((distance, width), limits)
        )
    power = min(distance & -distance, 1 << (widest.bit_length() - 1))
    if power >= width:
        yield power


def _fits(shape: _Shape, width: int, limits: PitchedLimits) -> bool:
    pitches = shape.src_pitch, shape.dst_pitch
    if max(pitches) > limits.max_pitch:
        return False
    if not limits.max_element:
        return True
    slices = shape.src_pitch * shape.src_lines, shape.dst_pitch * shape.dst_lines
    element = _element((*pitches, width), limits)
    # A plane's rows may be slices, which take more than the lines of a packet do.
    is_flat = shape.src_lines == shape.dst_lines == 1
    return max(slices) <= limits.slice_elements * element and (
        is_flat or max(pitches) <= limits.pitch_elements * element
    )


def _element(lengths: Sequence[int], limits: PitchedLimits) -> int:
    """Bytes of the largest element in whole numbers of which all of these are."""
    return math.gcd(limits.max_element, *lengths)


def _in_packets(
    regions: Sequence[Region], shape: _Shape, limits: PitchedLimits
) -> Iterator[_Stack]:
    """Split a stack into such as have no more rows than a packet, nor wider ones."""
    strip_bytes = regions[0].page_bytes
    parts = 1
    if limits.max_element:
        pitches = shape.src_pitch, shape.dst_pitch
        element = _element((*pitches, strip_bytes), limits)
        strip_bytes = min(strip_bytes, limits.row_elements * element)
        parts = -(-len(regions) // limits.max_rows)
    for part in range(parts):
        begin, end = (len(regions) * n // parts for n in (part, part + 1))
        if end - begin > 1:
            yield _Stack(tuple(regions[begin:end]), shape, strip_bytes)


def _row(values: Sequence[int]) -> Addresses:
    return np.array(values, dtype=np.uint64)


def _pages(src_block_ids: Sequence[int], dst_block_ids: Sequence[int]) -> _Runs:
    return _Runs(
        np.array(src_block_ids, dtype=np.uint64),
        np.array(dst_block_ids, dtype=np.uint64),
        np.ones(len(src_block_ids), dtype=np.uint64),
    )


def _last_source_of_each_destination(pages: _Runs) -> _Runs:
    """Sort pages by destination; of equal destinations keep the last."""
    dst, last = np.unique(pages.dst[::-1], return_index=True)
    return _Runs(pages.src[::-1][last], dst, pages.blocks[: len(dst)])


def _merged(pages: _Runs) -> _Runs:
    """Join pages, sorted by destination, that are adjacent on both sides.

    Destinations are unique, so two pages that are adjacent there are neighbours
    in the list, and no run is missed.
    """
    one = np.uint64(1)
    follows = (pages.src[1:] == pages.src[:-1] + one) & (
        pages.dst[1:] == pages.dst[:-1] + one
    )
    starts = np.flatnonzero(np.concatenate([[True], ~follows])[: len(pages.dst)])
    blocks = np.diff(starts, append=len(pages.dst)).astype(np.uint64)
    return _Runs(pages.src[starts], pages.dst[starts], blocks)


def _joined(some: _RowsOfBlocks, others: _RowsOfBlocks) -> _RowsOfBlocks:
    return _RowsOfBlocks(
        np.concatenate([some.stack, others.stack]),
        np.concatenate([some.first, others.first]),
        np.concatenate([some.rows, others.rows]),
        np.concatenate([some.src_block, others.src_block]),
        np.concatenate([some.dst_block, others.dst_block]),
    )


def _counted(counts: npt.NDArray[np.integer]) -> tuple[Indices, Addresses]:
    """Return, for ``counts[i]`` items of each i in turn, i and 0, 1, 2, ..."""
    counts = counts.astype(np.intp)
    owner = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, nth.astype(np.uint64)


def _spans_cut(
    start: Addresses, end: Addresses, cuts: Addresses
) -> npt.NDArray[np.bool_]:
    """Which of these ranges have a cut inside? One at an end is not."""
    return np.searchsorted(cuts, start, side="right") < np.searchsorted(cuts, end)


def _cut(
    dst: Addresses, src: Addresses, size: Addresses, cuts: Addresses
) -> tuple[Addresses, Addresses, Addresses, Indices]:
    """Split copies at each cut inside their source or destination.

    Returns dst, src and size, whole copies first, and which of the given copies
    each of the new ones is a part of.
    """
    crossed = np.zeros(len(size), dtype=bool)
    owners, offsets = [], []
    for start in (src, dst):
        first = np.searchsorted(cuts, start, side="right")
        inside = np.searchsorted(cuts, start + size, side="left") - first
        owner, nth = _counted(inside)
        owners.append(owner)
        offsets.append(cuts[first[owner] + nth.astype(np.intp)] - start[owner])
        crossed |= inside > 0
    split, whole = np.flatnonzero(crossed), np.flatnonzero(~crossed)

    owner = np.concatenate([split, *owners])
    offset = np.concatenate([np.zeros(len(split), dtype=np.uint64), *offsets])
    order = np.lexsort((offset, owner))
    owner, offset = owner[order], offset[order]
    until = np.append(offset[1:], np.uint64(0))
    ends_copy = np.append(owner[1:] != owner[:-1], True)[: len(owner)]
    length = np.where(ends_copy, size[owner], until[: len(owner)]) - offset
    # A place where both sides have a cut came up twice.
    real = length > 0
    owner, offset, length = owner[real], offset[real], length[real]

    part_of = np.concatenate([whole, owner])
    offset = np.concatenate([np.zeros(len(whole), dtype=np.uint64), offset])
    return (
        dst[part_of] + offset,
        src[part_of] + offset,
        np.concatenate([size[whole], length]),
        part_of,
    )
