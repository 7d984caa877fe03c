# SPDX-License-Identifier: Apache-2.0
"""Copies of KV blocks between device memory and the CPU tier."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.logger import init_logger
from vllm.v1.simple_kv_offload.copy_engine import CopyEngine, resolve_copy_engine
from vllm.v1.simple_kv_offload.copy_errors import format_blocks
from vllm.v1.simple_kv_offload.copy_thread import (
    SHUTDOWN_SECONDS,
    CopyThread,
    CopyTicket,
)
from vllm.v1.simple_kv_offload.cuda_mem_ops import (
    CU_MEMCPY_SRC_ACCESS_ORDER_ANY,
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
    BatchMemcpyParams,
    build_params,
    copy_blocks,
    describe_copies,
    num_blocks,
    suits_rectangles,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


class BlockCopy(NamedTuple):
    """Which blocks go where, as the subject of log lines and errors."""

    direction: str
    src: Sequence[int]
    dst: Sequence[int]

    def __str__(self) -> str:
        return (
            f"KV {self.direction} of blocks {format_blocks(self.src)} "
            f"to {format_blocks(self.dst)}"
        )


class _Way(NamedTuple):
    """One direction: from ``src_blocks`` blocks to ``dst_blocks`` on a stream."""

    params: BatchMemcpyParams
    stream: torch.cuda.Stream
    src_blocks: int
    dst_blocks: int

    def copy(self, blocks: BlockCopy, wait_event: torch.Event | None) -> None:
        check_block_ids("source", blocks.src, self.src_blocks)
        check_block_ids("destination", blocks.dst, self.dst_blocks)
        if wait_event is not None:
            self.stream.wait_event(wait_event)
        copy_blocks(blocks.src, blocks.dst, self.params)


class DmaCopyBackend:
    """Loads and stores KV blocks on two streams, without the caller waiting.

    Args:
        vllm_config: Where the user may have chosen a copy engine.

    Attributes:
        copy_engine: How blocks are copied, a label of the metrics: "rect" or
            "batch", known from ``init`` on.

    Raises:
        ValueError: The chosen engine does not exist.

    """

    def __init__(self, vllm_config: VllmConfig | None = None) -> None:
        self._asked_for = resolve_copy_engine(vllm_config)
        self.copy_engine = CopyEngine.BATCH.value
        self._store: _Way | None = None
        self._load: _Way | None = None
        self._thread: CopyThread | None = None

    def suits_rectangles(
        self, gpu_caches: dict[str, torch.Tensor], num_cpu_blocks: int
    ) -> bool:
        """Should the CPU tier of so many blocks have them one after the other?"""
        engine, _ = self._asked_for
        return suits_rectangles(gpu_caches, num_cpu_blocks, engine)

    def init(
        self,
        gpu_caches: dict[str, torch.Tensor],
        cpu_caches: dict[str, torch.Tensor],
        device: torch.device,
        load_stream: torch.cuda.Stream,
        store_stream: torch.cuda.Stream,
    ) -> None:
        """Prepare copies between the caches and start the copy thread.

        Args:
            gpu_caches: Tensors of shape [blocks, bytes] by region name.
            cpu_caches: The same regions, with blocks of their own number.
            device: Of the GPU caches.
            load_stream: Where copies to the GPU are queued.
            store_stream: Where copies to the CPU are queued.

        Raises:
            RuntimeError: There is no batch copy, or the thread cannot start.
            ValueError: The caches do not match.

        """
        gpu_blocks, cpu_blocks = num_blocks(gpu_caches), num_blocks(cpu_caches)
        engine, _ = self._asked_for
        store = params_for("store", gpu_caches, cpu_caches, store_stream, engine)
        # One choice for both directions: the log and the metrics name one engine.
        load = params_for("load", gpu_caches, cpu_caches, load_stream, store.engine)
        self._store = _Way(store, store_stream, gpu_blocks, cpu_blocks)
        self._load = _Way(load, load_stream, cpu_blocks, gpu_blocks)
        self.copy_engine = store.engine.value
        logger.log(
            level_for(store, self._asked_for),
            "KV copy engine: %s",
            describe_engine(store, self._asked_for),
        )
        self._thread = CopyThread("kv-copy", device, keeps=(gpu_caches, cpu_caches))
        self._thread.start()

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, CopyTicket]],
        wait_event: torch.Event | None = None,
    ) -> None:
        """Queue a copy and append its ticket to ``events_list`` at once.

        Errors of the copy are the ticket's. The copy waits for ``wait_event``
        on its own stream.
        """
        way = self._store if is_store else self._load
        assert way is not None and self._thread is not None, "init() comes first"
        blocks = BlockCopy(way.params.direction, src_blocks, dst_blocks)
        ticket = self._thread.submit(
            blocks, way.stream, lambda: way.copy(blocks, wait_event)
        )
        events_list.append((event_idx, ticket))

    def at_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when no copy uses the caches any more."""
        assert self._thread is not None, "init() comes first"
        self._thread.at_end(callback)

    def shutdown(self) -> bool:
        """Finish what is queued, or cancel what five seconds do not suffice for.

        Returns:
            Whether everything has ended, so that nothing uses the caches.

        """
        if self._thread is None:
            return True
        self._thread.close()
        ended = self._thread.join(time.monotonic() + SHUTDOWN_SECONDS)
        if not ended:
            logger.warning(
                "KV copies were still under way %.0f seconds after the shutdown.",
                SHUTDOWN_SECONDS,
            )
        return ended


def params_for(
    direction: str,
    gpu_caches: dict[str, torch.Tensor],
    host_caches: dict[str, torch.Tensor],
    stream: torch.cuda.Stream,
    engine: CopyEngine,
) -> BatchMemcpyParams:
    """Prepare the copies of one direction, "load" or "store"; see ``build_params``."""
    if direction == "store":
        # The compute stream may have just written what a store reads.
        order = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        return build_params(
            gpu_caches, host_caches, stream, order, direction=direction, engine=engine
        )
    # A load reads host memory that stays as it is until its blocks are freed.
    order = CU_MEMCPY_SRC_ACCESS_ORDER_ANY
    return build_params(
        host_caches, gpu_caches, stream, order, direction=direction, engine=engine
    )


def describe_engine(
    params: BatchMemcpyParams, asked_for: tuple[CopyEngine, str]
) -> str:
    """Say what copies, who asked for what, and why it is not that; for the log."""
    word, by = asked_for
    return (
        f"{params.engine.value} (asked for: {word.value}, by {by}): "
        f"{describe_copies(params)}"
    )


def level_for(params: BatchMemcpyParams, asked_for: tuple[CopyEngine, str]) -> int:
    """Return the log level for the engine in use: a warning where RECT falls short."""
    missed = bool(params.note) or params.engine is not CopyEngine.RECT
    by_name = asked_for[0] is CopyEngine.RECT
    return logging.WARNING if by_name and missed else logging.INFO


def check_block_ids(side: str, ids: Sequence[int], count: int) -> None:
    """Raise IndexError for a block outside its cache: it would hit what lies there."""
    if ids and not 0 <= min(ids) <= max(ids) < count:
        wrong = next(block for block in ids if not 0 <= block < count)
        raise IndexError(
            f"block {wrong} is outside the {side} cache, which has {count} blocks"
        )
