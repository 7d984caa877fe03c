# SPDX-License-Identifier: Apache-2.0
"""Rectangles or pages: how the blocks of given regions are copied, and why.

Note [Choosing the copy engine]
A rectangle moves a whole block in every layer of one page size, so it pays
wherever the layers lie at one distance. AUTO takes rectangles where at least
half of a block's bytes lie in some and each joins four pages or more on average:
any two pages of one size are a rectangle, and pitched copies are submitted one by
one, which on MI355X takes 9 to 13 us each (rocm-systems#11614), where a batch is
submitted once. RECT takes whatever rectangles there are. What is left over are
pages. Rectangles that are impossible are no error: every layout can be copied
as pages, and the log says at start what stands in the way.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from vllm.v1.simple_kv_offload.copy_engine import CopyEngine
from vllm.v1.simple_kv_offload.copy_plan import (
    CUDA_LIMITS,
    NO_CUTS,
    Addresses,
    CopyPlan,
    PitchedLimits,
    PlanSample,
    Region,
)

# The least of a block's bytes in rectangles, and of pages that one of them joins, that
# make them worth their calls by default.
_MOSTLY = 0.5
_LEAST_PAGES = 4

_UNKNOWN_MAPPINGS = (
    "torch's expandable segments are on and do not tell where mappings of device "
    "memory end, so nothing is joined: leave expandable_segments out of "
    "PYTORCH_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF and PYTORCH_HIP_ALLOC_CONF"
)


class Mappings(NamedTuple):
    """Where memory begins and ends that one copy may not reach beyond.

    Attributes:
        chunk_ends: Addresses at which a chunk of sleep mode's memory ends.
        chunk_bytes: Of the largest chunk; 0 without any.
        edges: Addresses at which an allocation begins or ends, or a registration of
            host memory ends.
        are_known: Whether these are all.

    """

    chunk_ends: Addresses = NO_CUTS
    chunk_bytes: int = 0
    edges: Addresses = NO_CUTS
    are_known: bool = True


class CopyChoice(NamedTuple):
    """How blocks are copied; ``note`` says why not, or not only, as rectangles.

    ``sample`` is what a block takes where the engine is RECT.
    """

    engine: CopyEngine
    plan: CopyPlan
    note: str = ""
    sample: PlanSample | None = None


def choose_copies(
    asked_for: CopyEngine,
    regions: Sequence[Region],
    num_src_blocks: int,
    num_dst_blocks: int,
    limits: PitchedLimits,
    mappings: Mappings,
    obstacle: str = "",
) -> CopyChoice:
    """Choose between rectangles and pages.

    Args:
        asked_for: The user's word.
        regions: What a block consists of.
        num_src_blocks: Of each region at the source.
        num_dst_blocks: Of each region at the destination.
        limits: What a pitched copy may look like.
        mappings: What no copy may cross.
        obstacle: Why this process cannot make pitched copies; empty if it can.

    """
    cuts = np.concatenate([mappings.chunk_ends, mappings.edges])

    def plan(cuts: Addresses, limits: PitchedLimits | None) -> CopyPlan:
        return CopyPlan(regions, cuts, merge=mappings.are_known, limits=limits)

    def sample(plan: CopyPlan) -> PlanSample:
        return plan.sample(num_src_blocks, num_dst_blocks)

    pages = plan(cuts, None)
    if asked_for is CopyEngine.BATCH or not regions:
        return CopyChoice(CopyEngine.BATCH, pages)
    if not mappings.are_known:
        obstacle = _UNKNOWN_MAPPINGS
    if obstacle:
        return CopyChoice(CopyEngine.BATCH, pages, obstacle)

    rectangles = plan(cuts, limits)
    found = sample(rectangles)
    pays = found.share >= _MOSTLY and found.joined >= _LEAST_PAGES * found.rectangles
    wanted = asked_for is CopyEngine.RECT and found.share > 0
    note = ""
    if found.share < 1 or not (pays or wanted):
        uncut = sample(plan(mappings.edges, limits))
        if len(regions) == 1:
            note = "a block is one contiguous page, so there is nothing to join"
        elif mappings.chunk_bytes and _is_better(uncut, found):
            note = _cut_by_chunks(found, mappings.chunk_bytes)
        elif _is_better(sample(plan(mappings.edges, CUDA_LIMITS)), uncut):
            note = _beyond_packets(found)
        else:
            note = _irregular(found)
    if pays or wanted:
        return CopyChoice(CopyEngine.RECT, rectangles, note, found)
    return CopyChoice(CopyEngine.BATCH, pages, note)


def _is_better(some: PlanSample, others: PlanSample) -> bool:
    return some.share > others.share or (
        some.share == others.share > 0 and some.rectangles < others.rectangles
    )


def _found(sample: PlanSample) -> str:
    text = f"{_percent(sample.share)} of a block's bytes lie in rectangles"
    if sample.share:
        text += f" of {sample.joined / sample.rectangles:.3g} pages on average"
    return text


def _cut_by_chunks(found: PlanSample, chunk_bytes: int) -> str:
    return (
        f"{_found(found)} that stay within a chunk of sleep mode's memory, and chunks "
        f"have {chunk_bytes / 2**20:g} MiB: set VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE (MiB, "
        "256 by default) to more than the KV cache has, which makes it one piece"
    )


def _beyond_packets(found: PlanSample) -> str:
    return (
        f"{_found(found)} that a packet of the SDMA engines holds: it wants multiples "
        "of 4 bytes, rows of up to 256 KiB, and layers at most 4 GiB apart, for which "
        "a rank's KV cache may have to be smaller (kv_cache_memory_bytes, tensor "
        "parallelism)"
    )


def _irregular(found: PlanSample) -> str:
    if found.share == 1:
        return f"{_found(found)}, and fewer than {_LEAST_PAGES} do not pay"
    without = (
        f"the other {found.pages:.3g} pages have no neighbour of their size"
        if found.share
        else f"none of its {found.pages:.3g} pages has a neighbour of its size"
    )
    return (
        f"{_found(found)}: {without} in the same allocation at a distance that one "
        "pitched copy takes"
    )


def _percent(share: float) -> str:
    # Rounded down: 100 % is said of nothing less.
    return f"{int(100 * share)} %"
