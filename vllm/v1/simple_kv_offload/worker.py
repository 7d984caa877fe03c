# SPDX-License-Identifier: Apache-2.0
"""The worker's side of SimpleCPUOffloadConnector: its copies and their results."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.simple_kv_offload.copy_backend import BlockCopy, DmaCopyBackend
from vllm.v1.simple_kv_offload.copy_metrics import CopyCounters
from vllm.v1.simple_kv_offload.copy_thread import CopyTicket
from vllm.v1.simple_kv_offload.disk_backend import DiskBackend
from vllm.v1.simple_kv_offload.host_cache import allocate_host_cache
from vllm.v1.simple_kv_offload.kv_regions import block_regions
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata
from vllm.v1.simple_kv_offload.metrics import SimpleCPUOffloadStats
from vllm.v1.simple_kv_offload.transfer_results import (
    StoreResultsMetadata,
    request_loads,
)

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)


_Transfer = TypeVar("_Transfer")


class _Load(NamedTuple):
    req_ids: tuple[str, ...]
    num_blocks: int
    tickets: list[tuple[int, CopyTicket]]  # none for a load without blocks


class _Store(NamedTuple):
    event: int
    num_blocks: int
    ticket: CopyTicket


class SimpleCPUOffloadWorker:
    """Moves KV blocks between this rank's GPU and its part of the offload pool.

    Args:
        vllm_config: Names the copy engine; may be None.
        kv_cache_config: Where the blocks are; may be None if nothing is registered.
        cpu_capacity_bytes: Of the pool on this rank.
        kv_offload_backend: "cpu" or "disk".
        disk_path: Where the pool on disk is; each rank adds its number.
        disk_capacity_bytes: Of the pool on disk on this rank.
        disk_buffer_slots: Blocks of host memory in each direction, for the disk.
        use_page_cache: Whether the disk is read and written through the page cache.
        num_cpu_blocks: Blocks of the pool; as many as fit if None.

    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig | None,
        cpu_capacity_bytes: int,
        kv_offload_backend: str = "cpu",
        disk_path: str | None = None,
        disk_capacity_bytes: int = 0,
        disk_buffer_slots: int = 2,
        use_page_cache: bool = False,
        num_cpu_blocks: int | None = None,
    ) -> None:
        self.vllm_config = vllm_config
        self.kv_cache_config = kv_cache_config
        self.cpu_capacity_bytes = cpu_capacity_bytes
        self.disk_mode = kv_offload_backend == "disk"
        self.disk_path = disk_path
        self.disk_capacity_bytes = disk_capacity_bytes
        self.disk_buffer_slots = disk_buffer_slots
        self.use_page_cache = use_page_cache
        self._wanted_cpu_blocks = num_cpu_blocks

        self.gpu_kv_caches: dict[str, torch.Tensor] | None = None
        self.cpu_kv_caches: dict[str, torch.Tensor] | None = None
        self.device: torch.device | None = None
        self.num_cpu_blocks = 0
        self.load_stream: torch.cuda.Stream | None = None
        self.store_stream: torch.cuda.Stream | None = None
        self._backend: DmaCopyBackend | DiskBackend | None = None
        self._block_bytes = 0

        self._connector_metadata: SimpleCPUOffloadMetadata | None = None
        self._loads: list[_Load] = []
        self._stores: list[_Store] = []
        self._failed_loads: set[str] = set()
        self._results = StoreResultsMetadata({})

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Make the pool for these caches and start what copies.

        Args:
            kv_caches: By layer. A layer may have a list of tensors (Mamba).

        Raises:
            OSError: The pool's file cannot be made.
            RuntimeError: Host memory cannot be had or registered, nothing can copy,
                or caches are registered already.
            ValueError: The caches are not where the config says, or
                ``num_cpu_blocks`` does not fit.

        """
        if not kv_caches:
            logger.warning("No KV caches to offload.")
            return
        assert self.kv_cache_config is not None
        if self._backend is not None:
            # The scheduler counts on the blocks that the pool has.
            raise RuntimeError(
                "This worker's KV caches are registered already, with a pool of "
                f"{self.num_cpu_blocks} blocks: make another worker for others."
            )
        regions = block_regions(kv_caches, self.kv_cache_config)
        device = next(iter(regions.values())).device
        self._block_bytes = sum(region.shape[1] for region in regions.values())
        self.num_cpu_blocks = self._num_blocks_of_pool()
        self.gpu_kv_caches, self.device = regions, device

        # Compute comes first where both want the memory bus.
        lowest, _ = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
        self.load_stream = torch.cuda.Stream(priority=lowest)
        self.store_stream = torch.cuda.Stream(priority=lowest)
        logger.info(
            "KV offload to %s: %d regions, %d blocks of %d bytes (%.2f GiB)",
            "disk" if self.disk_mode else "CPU",
            len(regions),
            self.num_cpu_blocks,
            self._block_bytes,
            self.num_cpu_blocks * self._block_bytes / 2**30,
        )
        if self.disk_mode:
            self._backend = self._start_disk(regions, device)
        else:
            self._backend = self._start_cpu(regions, device)

    def _num_blocks_of_pool(self) -> int:
        capacity = (
            self.disk_capacity_bytes if self.disk_mode else self.cpu_capacity_bytes
        )
        fitting = capacity // self._block_bytes
        wanted = self._wanted_cpu_blocks
        if wanted is None:
            return _same_on_all_ranks(max(1, fitting))
        if isinstance(wanted, bool) or not 1 <= wanted <= fitting:
            option = "disk_capacity_bytes" if self.disk_mode else "cpu_bytes_to_use"
            raise ValueError(
                f"kv_connector_extra_config.num_cpu_blocks is {wanted!r}, which is not "
                f"within the local offload capacity {fitting}: this rank's share of "
                f"{option} is {capacity} bytes, and a block has {self._block_bytes}. "
                f"Raise {option}, or ask for at most {fitting} blocks."
            )
        return wanted

    def _start_cpu(
        self, regions: dict[str, torch.Tensor], device: torch.device
    ) -> DmaCopyBackend:
        assert self.load_stream is not None and self.store_stream is not None
        backend = DmaCopyBackend(self.vllm_config)
        if not PIN_MEMORY:
            logger.warning(
                "Host memory cannot be pinned here: KV offload will be slow."
            )
        caches = allocate_host_cache(
            regions,
            self.num_cpu_blocks,
            PIN_MEMORY,
            block_after_block=backend.suits_rectangles(regions, self.num_cpu_blocks),
        )
        try:
            backend.init(regions, caches, device, self.load_stream, self.store_stream)
        except BaseException:
            # The traceback holds the dictionary, but nothing of what was in it.
            caches.clear()
            raise
        self.cpu_kv_caches = caches
        return backend

    def _start_disk(
        self, regions: dict[str, torch.Tensor], device: torch.device
    ) -> DiskBackend:
        assert self.disk_path is not None
        assert self.load_stream is not None and self.store_stream is not None
        backend = DiskBackend(self.vllm_config)
        backend.init(
            regions,
            device,
            self.load_stream,
            self.store_stream,
            f"{self.disk_path}.rank_{device.index or 0}",
            self.num_cpu_blocks,
            self._block_bytes,
            self.disk_buffer_slots,
            self.use_page_cache,
        )
        return backend

    def bind_connector_metadata(self, metadata: SimpleCPUOffloadMetadata) -> None:
        """Take the step's transfers."""
        self._connector_metadata = metadata

    def clear_connector_metadata(self) -> None:
        """The step is over."""
        self._connector_metadata = None

    def start_load_kv(self) -> None:
        """Start the step's loads, one for each request."""
        metadata = self._connector_metadata
        if metadata is None:
            return
        for req_ids, cpu_blocks, gpu_blocks in request_loads(metadata):
            tickets = []
            if cpu_blocks:
                copy = BlockCopy("load", cpu_blocks, gpu_blocks)
                tickets = self._launch(copy, metadata.load_event)
            self._loads.append(_Load(req_ids, len(gpu_blocks), tickets))

    def wait_for_save(self) -> None:
        """Start the step's stores, behind the compute that writes their blocks."""
        metadata = self._connector_metadata
        if metadata is None or not metadata.store_gpu_blocks:
            return
        copy = BlockCopy("store", metadata.store_gpu_blocks, metadata.store_cpu_blocks)
        self._stores += [
            _Store(event, len(copy.src), ticket)
            for event, ticket in self._launch(copy, metadata.store_event)
        ]

    def _launch(self, copy: BlockCopy, event: int) -> list[tuple[int, CopyTicket]]:
        assert self._backend is not None
        is_store = copy.direction == "store"
        launched: list[tuple[int, CopyTicket]] = []
        try:
            self._backend.launch_copy(
                list(copy.src),
                list(copy.dst),
                is_store=is_store,
                event_idx=event,
                events_list=launched,
                wait_event=_compute_done() if is_store else None,
            )
        except Exception as error:
            # This is the engine's step: whoever raises here ends the server.
            launched.append((event, CopyTicket.failed(copy, error)))
        return launched

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads have ended, failed ones among them.

        Nothing is ever sent. Stores that have ended are for
        ``build_connector_worker_meta``, failed loads for ``take_failed_loads``.
        """
        self._collect_stores()
        return None, self._collect_loads() or None

    def take_failed_loads(self) -> set[str]:
        """Return the requests whose loads have failed since the last call."""
        failed, self._failed_loads = self._failed_loads, set()
        return failed

    def _collect_loads(self) -> set[str]:
        ended, self._loads = _split(self._loads, _load_has_ended)
        finished: set[str] = set()
        for load in ended:
            finished.update(load.req_ids)
            failed = any(ticket.error is not None for _, ticket in load.tickets)
            if load.tickets:
                self._count("load", load.num_blocks, failed=failed)
            if failed:
                self._failed_loads.update(load.req_ids)
                logger.error(
                    "Request %s lost its KV load: it fails, or is computed anew, by "
                    "kv_load_failure_policy.",
                    ", ".join(load.req_ids),
                )
        return finished

    def _collect_stores(self) -> None:
        ended, self._stores = _split(self._stores, _store_has_ended)
        for store in ended:
            failed = store.ticket.error is not None
            self._count("store", store.num_blocks, failed=failed)
            self._results.completed_store_events[store.event] = 1
            if failed:
                self._results.failed_store_events.add(store.event)
                logger.warning(
                    "%d KV blocks are not offloaded: their store failed.",
                    store.num_blocks,
                )

    def build_connector_worker_meta(self) -> StoreResultsMetadata | None:
        """Return the stores that have ended since the last call; None for none."""
        if not self._results.completed_store_events:
            return None
        results, self._results = self._results, StoreResultsMetadata({})
        return results

    def take_stats(self) -> SimpleCPUOffloadStats | None:
        """Return what was copied since the last call; None for nothing."""
        if self._backend is None or self._counters.is_empty:
            return None
        stats = SimpleCPUOffloadStats()
        self._counters.move_to(stats)
        return stats

    def _count(self, direction: str, num_blocks: int, *, failed: bool) -> None:
        self._counters.count(direction, num_blocks * self._block_bytes, failed=failed)

    @cached_property
    def _counters(self) -> CopyCounters:
        assert self._backend is not None
        return CopyCounters(self._backend.copy_engine)

    def handle_preemptions(
        self, kv_connector_metadata: SimpleCPUOffloadMetadata
    ) -> None:
        """Wait for all copies, before anyone else gets blocks of preempted requests.

        Not for the disk's: they may take longer than a step may, and the scheduler
        holds on to the blocks of every copy until it is told of its end.
        """
        if kv_connector_metadata.need_flush and not self.disk_mode:
            self.drain()

    def drain(self) -> None:
        """Wait until every copy that was started has ended, however it ended."""
        for load in self._loads:
            for _, ticket in load.tickets:
                ticket.wait()
        for store in self._stores:
            store.ticket.wait()

    def shutdown(self) -> None:
        """End all copies within five seconds, and let go of the host memory.

        It is unregistered and freed with its last tensor. What a copy that does not
        end is using stays as it is until it has ended.
        """
        if self._backend is None:
            return
        self._backend.shutdown()
        caches, self.cpu_kv_caches = self.cpu_kv_caches, None
        if caches is not None and isinstance(self._backend, DmaCopyBackend):
            # The backend's own references are to the same dictionary.
            self._backend.at_end(caches.clear)


def _compute_done() -> torch.Event:
    """Mark the end of what the compute stream has been given so far.

    It may still be writing, also the step before. An event of its own keeps a store
    from waiting for later steps.
    """
    event = torch.Event()
    event.record(torch.cuda.current_stream())
    return event


def _load_has_ended(load: _Load) -> bool:
    return all(ticket.query() for _, ticket in load.tickets)


def _store_has_ended(store: _Store) -> bool:
    return store.ticket.query()


def _split(
    transfers: list[_Transfer], has_ended: Callable[[_Transfer], bool]
) -> tuple[list[_Transfer], list[_Transfer]]:
    """Return those that have ended, and the others."""
    ended: list[_Transfer] = []
    others: list[_Transfer] = []
    for transfer in transfers:
        (ended if has_ended(transfer) else others).append(transfer)
    return ended, others


def _same_on_all_ranks(num_blocks: int) -> int:
    name = "vllm.v1.simple_kv_offload.sizing"
    try:
        sizing = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        # vLLM 0.32.0, whose scheduler computes the number by itself.
        return num_blocks
    return int(sizing.sync_num_offload_blocks_across_workers(num_blocks))
