# SPDX-License-Identifier: Apache-2.0
"""Bytes for people."""

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def readable(num_bytes: int) -> str:
    """The number in the largest unit of which there is one, as in ``1.5 GiB``."""
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    if power == 0:
        return f"{num_bytes} bytes"
    return f"{num_bytes / (1 << 10 * power):.1f} {_UNITS[power]}"
