# SPDX-License-Identifier: Apache-2.0
"""KV copies of this process that the runtime refuses, and a count of all of them."""

import dataclasses
import math
from collections import Counter
from typing import Any


class Spoiler:
    """Counts transfers of KV blocks, and spoils those that it is told to.

    A spoiled one has rows so far apart that no memory has them.

    Attributes:
        seen: Transfers by direction, "load" and "store".
        spoiled: Of those.
    """

    def __init__(self) -> None:
        from vllm.v1.simple_kv_offload import cuda_mem_ops

        self._module: Any = cuda_mem_ops
        self._submit = cuda_mem_ops._submit_rectangles
        self._left: dict[str, float] = {"load": 0, "store": 0}
        self.seen: Counter[str] = Counter()
        self.spoiled: Counter[str] = Counter()
        self._module._submit_rectangles = self._rectangles

    def spoil(self, direction: str, times: float = math.inf) -> None:
        """Spoil as many of the next transfers; with 0 none any more."""
        self._left[direction] = times

    def close(self) -> None:
        self._module._submit_rectangles = self._submit

    def _rectangles(self, rectangles: Any, params: Any) -> Any:
        self.seen[params.direction] += 1
        if self._left[params.direction] > 0:
            self._left[params.direction] -= 1
            self.spoiled[params.direction] += 1
            table = rectangles.table.copy()
            table[:, 4:6] = 1 << 40
            rectangles = dataclasses.replace(rectangles, table=table)
        return self._submit(rectangles, params)
