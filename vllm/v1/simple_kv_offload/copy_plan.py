# SPDX-License-Identifier: Apache-2.0
"""From KV blocks to the copies that move them.

Note [Copy plans]
A *region* is one block-strided range of memory that exists on both sides, a
layer's pages as a rule. A *page* is a block's part of one region, and moving n
blocks means moving n pages in every region. Each copy handed to the runtime
has a price whatever its size, so a plan looks for runs: blocks that follow one
another on both sides are one copy in every region whose pages lie back to
back. Runs are found once, on the block ids, and hold for all such regions.

What a copy never crosses:
- the end of its region, because nothing says what lies between two regions;
- a *cut*, a device address at which a mapping ends. HIP checks a copy against
  the memory object that holds its first byte, and virtual memory mapped in
  chunks may be several objects. A page that spans a cut is copied in pieces.

Runtimes order copies of one batch as they like. Should a destination block be
named twice, a plan that merges therefore copies its last source only, which is
what copies made one after the other would have left there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.uint64]

NO_CUTS: Addresses = np.empty(0, dtype=np.uint64)


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

    region: Region
    src_blocks: range
    dst_blocks: range


@dataclass(frozen=True)
class PageCopies:
    """Copies of contiguous bytes: ``size[i]`` bytes from ``src[i]`` to ``dst[i]``.

    The three arrays are contiguous uint64 of the same length, ready to be
    passed to a batch copy.
    """

    dst: Addresses
    src: Addresses
    size: Addresses
    _groups: tuple[tuple["_RegionGroup", _Runs], ...]
    # Which copy before cutting each copy is a part of; None where none was cut.
    _part_of: npt.NDArray[np.intp] | None

    def __len__(self) -> int:
        return len(self.size)

    def locate(self, index: int) -> CopySite:
        """Return the region and blocks of copy ``index``."""
        at = index if self._part_of is None else int(self._part_of[index])
        for group, runs in self._groups:
            copies = len(group.regions) * len(runs.blocks)
            if at < copies:
                region, run = divmod(at, len(runs.blocks))
                src, dst, blocks = (int(column[run]) for column in runs)
                return CopySite(
                    group.regions[region],
                    range(src, src + blocks),
                    range(dst, dst + blocks),
                )
            at -= copies
        raise IndexError(f"copy {index} of {len(self)}")


class CopyPlan:
    """The fewest page copies for any blocks of a fixed set of regions.

    Args:
        regions: What a block consists of.
        cuts: Device addresses at which a mapping ends, in any order.
        merge: Whether adjacent pages become one copy. Without it there is one
            copy a page, in the order of the regions and then of the ids, as
            they were given.

    """

    def __init__(
        self, regions: Sequence[Region], cuts: Addresses = NO_CUTS, merge: bool = True
    ) -> None:
        self.regions = tuple(regions)
        self._cuts = np.unique(cuts)
        self._merge = merge
        dense = [r for r in self.regions if merge and r.is_dense]
        strided = [r for r in self.regions if not (merge and r.is_dense)]
        self._dense = _RegionGroup(dense)
        self._strided = _RegionGroup(strided)

    def copies(
        self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int]
    ) -> PageCopies:
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
        if self._merge:
            pages = _last_source_of_each_destination(pages)
        groups = []
        if self._dense.regions:
            groups.append((self._dense, _merged(pages)))
        if self._strided.regions:
            groups.append((self._strided, pages))
        parts = [group.copies(runs) for group, runs in groups]
        dst, src, size = (
            np.concatenate([part[i] for part in parts] or [NO_CUTS]) for i in range(3)
        )
        part_of = None
        if any(group.reaches_across(self._cuts, runs) for group, runs in groups):
            dst, src, size, part_of = _cut(dst, src, size, self._cuts)
        return PageCopies(dst, src, size, tuple(groups), part_of)


class _RegionGroup:
    """Regions that are copied by the same runs of blocks."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = tuple(regions)
        self._src_base = _column([r.src_base for r in regions])
        self._dst_base = _column([r.dst_base for r in regions])
        self._src_stride = _column([r.src_stride for r in regions])
        self._dst_stride = _column([r.dst_stride for r in regions])
        self._page_bytes = _column([r.page_bytes for r in regions])

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


def _column(values: Sequence[int]) -> Addresses:
    return np.array(values, dtype=np.uint64)[:, None]


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


def _cut(
    dst: Addresses, src: Addresses, size: Addresses, cuts: Addresses
) -> tuple[Addresses, Addresses, Addresses, npt.NDArray[np.intp]]:
    """Split copies at each cut inside their source or destination.

    Returns dst, src and size, whole copies first, and which of the given copies
    each of the new ones is a part of.
    """
    crossed = np.zeros(len(size), dtype=bool)
    owners, offsets = [], []
    for start in (src, dst):
        first = np.searchsorted(cuts, start, side="right")
        inside = np.searchsorted(cuts, start + size, side="left") - first
        owner = np.repeat(np.arange(len(size)), inside)
        nth = np.arange(len(owner)) - np.repeat(np.cumsum(inside) - inside, inside)
        owners.append(owner)
        offsets.append(cuts[first[owner] + nth] - start[owner])
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
