# SPDX-License-Identifier: Apache-2.0
"""Bytes for people."""

from collections.abc import Sequence

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def readable(num_bytes: int, units: Sequence[str] = _UNITS) -> str:
    """The number in the largest unit of which there is one, as in ``1.5 GiB``.

    Args:
        num_bytes: 0 or more.
        units: names of 1, 1024, 1024**2, ... bytes.
    """
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, len(units) - 1)
    if power == 0:
        return f"{num_bytes} {units[0]}"
    return f"{num_bytes / (1 << 10 * power):.1f} {units[power]}"
