# SPDX-License-Identifier: Apache-2.0
"""How the end of each transfer gets from the workers to the scheduler.

Note [Failed transfers]
A load belongs to a request. The scheduler tells the workers which blocks are
whose (``with_request_loads``), each request's blocks are one copy, and a copy
that fails takes that request alone with it: the connector reports the request
as received and as failed, and vLLM fails or recomputes it by
``kv_load_failure_policy``. Block ids could not say that: they are not unique
where there are several KV cache groups.

A store belongs to nobody. When it fails on any rank, the scheduler treats it as
one that was abandoned: once all ranks have ended theirs, its blocks are
released on both sides, and none of them is entered into the CPU prefix cache.
With lazy_offload the walk over the free blocks may come back to the same ones at
once. Stores in flight keep the engine stepping, so one that always fails would keep
it from ever being idle: after a failure the next try comes with the next step that
computes (``store_specs``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_transfer_state import (
    get_kv_transfer_group,
    has_kv_transfer_group,
)
from vllm.v1.simple_kv_offload.metadata import (
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
)

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request
    from vllm.v1.simple_kv_offload.manager import (
        LoadRequestState,
        SimpleCPUOffloadScheduler,
    )
    from vllm.v1.simple_kv_offload.metrics import SimpleCPUOffloadStats
    from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

_STORE_POLL_SECONDS = 0.001

# Requests that are computed because their load failed. No other pool of the process is
# asked for them: where several loads fail at once, vLLM's scheduler would let a request
# that is to load again wait for those behind it, and those for it.
_lost_their_load: WeakSet[Request] = WeakSet()
# Schedulers in lazy mode whose stores wait for a step that computes.
_resting: WeakSet[SimpleCPUOffloadScheduler] = WeakSet()


@dataclass
class RequestLoadsMetadata(SimpleCPUOffloadMetadata):
    """A step's transfers, with the number of blocks that each request loads.

    ``load_cpu_blocks`` and ``load_gpu_blocks`` hold the requests' blocks one
    request after the other, in this order.
    """

    load_block_counts: dict[str, int] = field(default_factory=dict)


def with_request_loads(
    metadata: SimpleCPUOffloadMetadata,
    req_ids: Sequence[str],
    loads: Mapping[str, LoadRequestState],
) -> SimpleCPUOffloadMetadata:
    """Return the step's metadata with each request's part of its load."""
    if not req_ids:
        return metadata
    counts = {
        req_id: len(loads[req_id].transfer_meta.gpu_block_ids) for req_id in req_ids
    }
    return RequestLoadsMetadata(**vars(metadata), load_block_counts=counts)


def request_loads(
    metadata: SimpleCPUOffloadMetadata,
) -> Iterator[tuple[tuple[str, ...], list[int], list[int]]]:
    """Yield request ids, CPU blocks and GPU blocks of each load of the step.

    Without ``load_block_counts`` all requests share one load.
    """
    cpu, gpu = metadata.load_cpu_blocks, metadata.load_gpu_blocks
    if not isinstance(metadata, RequestLoadsMetadata):
        req_ids = metadata.load_event_to_reqs.get(metadata.load_event, ())
        if cpu or req_ids:
            yield tuple(req_ids), cpu, gpu
        return
    start = 0
    for req_id, count in metadata.load_block_counts.items():
        yield (req_id,), cpu[start : start + count], gpu[start : start + count]
        start += count


@dataclass
class StoreResultsMetadata(SimpleCPUOffloadWorkerMetadata):
    """Store events that have ended on this rank, and which of them failed."""

    failed_store_events: set[int] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StoreResultsMetadata:
        """Join the results of another rank."""
        assert isinstance(other, StoreResultsMetadata)
        ended = dict(self.completed_store_events)
        for event, ranks in other.completed_store_events.items():
            ended[event] = ended.get(event, 0) + ranks
        return StoreResultsMetadata(
            ended, self.failed_store_events | other.failed_store_events
        )


def release_failed_transfers(
    scheduler: SimpleCPUOffloadScheduler, output: KVConnectorOutput
) -> None:
    """Release what failed loads hold, and let no failed store be cached.

    Comes before the scheduler looks at which transfers have ended.
    """
    for req_id in output.failed_recving:
        load = scheduler._reqs_to_load.get(
            req_id, scheduler._abandoned_reqs_to_load.get(req_id)
        )
        if load is not None:
            _lost_their_load.add(load.request)
        scheduler._cleanup_load_request(req_id)

    results = output.kv_connector_worker_meta
    if isinstance(results, StoreResultsMetadata):
        for event in results.failed_store_events:
            _abandon_store(scheduler, event)


def lost_its_load(request: Request) -> bool:
    """Has a load of this request failed? Then it is computed, and loads no more.

    It would ask for the same blocks again, and for ever if their copy always fails.
    """
    return request in _lost_their_load


def store_specs(
    scheduler: SimpleCPUOffloadScheduler, output: SchedulerOutput
) -> tuple[list[int], list[int], list[str], Any]:
    """Return what the step stores.

    In lazy mode nothing, in idle steps that follow a failed store.
    """
    if output.total_num_scheduled_tokens:
        _resting.discard(scheduler)
    if scheduler in _resting:
        return [], [], [], None
    return scheduler.prepare_store_specs(output)


def _abandon_store(scheduler: SimpleCPUOffloadScheduler, event: int) -> None:
    transfer = scheduler._store_event_to_blocks.pop(event, None)
    if transfer is None:
        return  # abandoned already, by another rank's failure or by a reset
    scheduler._abandoned_store_event_to_blocks[event] = transfer
    if scheduler._lazy_mode:
        _resting.add(scheduler)
    # The rest of its end, which the scheduler omits for an abandoned store. Other ranks
    # may be copying yet: the blocks stay pinned, and one more store of them is sound.
    scheduler._in_flight_store_gpu_blocks -= set(transfer.gpu_block_ids)
    for req_id in scheduler._store_event_to_reqs.pop(event, ()):
        if store := scheduler._reqs_to_store.get(req_id):
            store.store_events.discard(event)
            if store.finished and not store.store_events:
                scheduler._cleanup_store_request(req_id)


class WorkerTransfers(KVConnectorBase_V1):
    """The connector's part in its worker's transfers: results, drain, shutdown."""

    worker_handler: SimpleCPUOffloadWorker | None

    def get_transfer_results(
        self, finished_req_ids: set[str]
    ) -> KVConnectorTransferResults:
        """Return the requests whose loads have ended, and which of them failed."""
        results = super().get_transfer_results(finished_req_ids)
        if self.worker_handler is not None:
            results.failed_recving |= self.worker_handler.take_failed_loads()
        return results

    def unregister_kv_caches(self) -> None:
        """Wait until no copy uses the KV caches: they are about to be unmapped."""
        if self.worker_handler is not None:
            self.worker_handler.drain()

    def take_copy_stats(self) -> SimpleCPUOffloadStats | None:
        """Return what a worker has copied since the last call; None elsewhere."""
        worker = getattr(self, "worker_handler", None)
        return None if worker is None else worker.take_stats()

    def shutdown(self) -> None:
        """Finish or cancel copies, within five seconds, and unregister host memory."""
        if self.worker_handler is not None:
            self.worker_handler.shutdown()


def drain_kv_copies() -> None:
    """Wait until no copy of this process uses the KV caches.

    For a vLLM whose sleep mode does not ask its connectors for it.
    """
    if has_kv_transfer_group():
        for connector in _with_children(get_kv_transfer_group()):
            if isinstance(connector, WorkerTransfers):
                connector.unregister_kv_caches()


def finish_kv_stores(engine_core: EngineCore) -> None:
    """Step an engine until its stores are done, before its caches are reset.

    A server's loop has done so when a pause gets here. An engine that runs in its
    caller's process steps only when asked, and the reset would fail.
    """
    connector = engine_core.scheduler.get_kv_connector()
    ours = [
        each
        for each in (() if connector is None else _with_children(connector))
        if isinstance(each, WorkerTransfers)
    ]
    while any(each.has_pending_push_work() for each in ours):
        engine_core.step_fn()
        time.sleep(_STORE_POLL_SECONDS)


def _with_children(connector: KVConnectorBase_V1) -> Iterator[KVConnectorBase_V1]:
    yield connector
    for child in getattr(connector, "_connectors", ()):  # of MultiConnector
        yield from _with_children(child)
