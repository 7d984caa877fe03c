# SPDX-License-Identifier: Apache-2.0
"""Counters of KV copies, on their way from a worker to Prometheus.

A copy is the load of one request's blocks, or the store of one step's. Workers
count what has ended since they last told; vLLM adds up the ranks.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # That module imports this one.
    from vllm.v1.simple_kv_offload.metrics import (
        SimpleCPUOffloadPromMetrics,
        SimpleCPUOffloadStats,
    )

COPIES = "vllm:simple_kv_offload_copies_total"
COPIED_BYTES = "vllm:simple_kv_offload_copied_bytes_total"
COPY_FAILURES = "vllm:simple_kv_offload_copy_failures_total"

# "engine" is vLLM's own label, the number of the engine core.
LABELS = ["direction", "copy_engine"]
DIRECTIONS = ("load", "store")

_DOCUMENTATION = {
    COPIES: (
        "KV copies between the GPU and the offload pool that succeeded, on all "
        "ranks: one for each request that loads, one for each step that stores."
    ),
    COPIED_BYTES: "Bytes that those copies moved.",
    COPY_FAILURES: (
        "KV copies that failed. A failed load fails its request, or has it "
        "recomputed, by kv_load_failure_policy; a failed store fails nothing, and "
        "its blocks are not offloaded."
    ),
}


class CopyCounters:
    """What has ended in one worker since they were last moved on.

    Args:
        copy_engine: What copies, a label.

    """

    def __init__(self, copy_engine: str) -> None:
        self._copy_engine = copy_engine
        # Zeros first: a series that begins with its first failure shows no increase.
        self._counts: Counter[tuple[str, str]] = Counter(
            {(name, way): 0 for name in _DOCUMENTATION for way in DIRECTIONS}
        )

    def count(self, direction: str, num_bytes: int, *, failed: bool) -> None:
        """Count a copy of ``num_bytes`` that has ended."""
        if failed:
            self._counts[COPY_FAILURES, direction] += 1
        else:
            self._counts[COPIES, direction] += 1
            self._counts[COPIED_BYTES, direction] += num_bytes

    @property
    def is_empty(self) -> bool:
        """Is there nothing to move? Asked in each step of the engine."""
        return not self._counts

    def move_to(self, stats: SimpleCPUOffloadStats) -> None:
        """Add what has been counted to ``stats``, and begin anew."""
        for (name, direction), value in self._counts.items():
            stats.increase_counter(name, value, (direction, self._copy_engine))
        self._counts.clear()


def add_copy_counters(metrics: SimpleCPUOffloadPromMetrics) -> None:
    """Let ``metrics`` record what ``CopyCounters`` counts."""
    counters: dict[str, Any] = metrics._defs
    for name, documentation in _DOCUMENTATION.items():
        counters[name] = metrics._counter_cls(
            name=name,
            documentation=documentation,
            labelnames=[*metrics._labelnames, *LABELS],
        )
        metrics._num_label_values[name] = len(LABELS)
