# SPDX-License-Identifier: Apache-2.0
"""What is said of a copy of KV blocks that the runtime refused."""

from collections.abc import Sequence

from vllm.v1.simple_kv_offload.copy_plan import CopySite


class BatchCopyError(RuntimeError):
    """The runtime refused a copy of KV blocks.

    Attributes:
        direction: What ``build_params`` was told: "load", "store" or "copy".
        error: The number of the CUDA or HIP error.
        error_name: Its name.
        index: Which rectangle failed, or which page, counted over all calls that the
            pages took; None when the runtime did not name one.
        site: The regions and blocks of that copy; None without an index.

    """

    direction: str
    error: int
    error_name: str
    index: int | None
    site: CopySite | None


def refused(
    direction: str,
    call: str,
    error: int,
    error_name: str,
    what: str,
    index: int | None = None,
    site: CopySite | None = None,
) -> BatchCopyError:
    """Return the error of a ``call`` that said ``error`` for ``what``."""
    refusal = BatchCopyError(
        f"KV {direction}: {call} returned {error_name} ({error}) for {what}"
    )
    refusal.direction = direction
    refusal.error = error
    refusal.error_name = error_name
    refusal.index = index
    refusal.site = site
    return refusal


def rectangle_at(index: int, total: int, site: CopySite) -> str:
    """Say which rectangle one is: part of a block, in one or more regions."""
    return f"rectangle {index} of {total}, {_where(site, 'block')}"


def page_copy_at(index: int, total: int, site: CopySite) -> str:
    """Say which page copy one is: of one or more blocks, in one region."""
    return f"copy {index} of {total}, {_where(site, 'blocks')}"


def _where(site: CopySite, blocks: str) -> str:
    return (
        f"{name_regions([region.name for region in site.regions])}, "
        f"{blocks} {format_blocks(site.src_blocks)} to "
        f"{format_blocks(site.dst_blocks)}"
    )


def name_regions(names: Sequence[str]) -> str:
    """Name regions; of more than four only the first and the last one."""
    quoted = [repr(name) for name in names]
    if len(quoted) > 4:
        return f"regions {quoted[0]} to {quoted[-1]} ({len(quoted)})"
    plural = "s" * (len(quoted) != 1)
    return f"region{plural} {', '.join(quoted) or 'without names'}"


def format_blocks(ids: Sequence[int], most: int = 8) -> str:
    """Return block ids as text: runs as ``3-7``, and no more than ``most`` parts."""
    runs: list[list[int]] = []
    for block in ids:
        if runs and block == runs[-1][1] + 1:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:most]]
    if len(runs) > most:
        parts.append(f"... ({len(ids)} blocks)")
    return ", ".join(parts)
