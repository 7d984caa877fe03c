# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler and the connector of every rank, over a model of what blocks hold.

Real are the scheduler, its KV cache manager, the connector in both roles and what joins
the ranks' outputs. Modelled are the forward pass and the copies: a block holds the
tokens that its KV was computed from, and the test says when a copy ends and how. A
forward pass that reads anything else than its own tokens' KV fails the test, and so
does a block that changes while it is copied, or one whose hash in a prefix cache says
something else than what it holds.
"""

import json
import pickle
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import KVCacheEvent, KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.simple_kv_offload.copy_thread import CopyTicket
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler
from vllm.v1.structured_output import StructuredOutputManager

from vllm_rocm_memory.sim import torch_device

BLOCK = 16  # tokens
WINDOW = 2 * BLOCK  # of every group but the first
ANSWER = 7  # every token that is ever sampled
MAX_STEPS = 300

_CONTEXT = 512
_SPEC: dict[str, Any] = {
    "block_size": BLOCK,
    "num_kv_heads": 1,
    "head_size": 8,
    "dtype": torch.float16,
}
_BLOCK_BYTES = FullAttentionSpec(**_SPEC).page_size_bytes

# What a block holds: its group, and all tokens up to the last that is in it. None is
# what a copy leaves behind that is under way or has failed.
Content = tuple[int, tuple[int, ...]]
Memory = dict[int, Content | None]


def write_model(folder: Path) -> Path:
    """A model's configuration; no weights, since nothing runs it."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "vocab_size": 1000,
        "max_position_embeddings": _CONTEXT,
        "torch_dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True)
class Options:
    """How an engine differs from the smallest one.

    Attributes:
        model: The folder of ``write_model``.
        groups: KV cache groups: one of full attention, the others of sliding windows.
        ranks: Of tensor parallelism.
        gpu_blocks: Of the GPU's pool, its null block among them.
        cpu_blocks: Of each offload pool, its null block among them.
        lazy: Whether blocks are stored late.
        policy: What becomes of a request whose load failed.
        async_scheduling: Whether steps are scheduled before the last one's output.
        events: Whether KV cache events are published.
        batched_tokens: At most, in a step.
        nesting: How many MultiConnectors are around the connector.
        children: How many of the connector there are in the innermost of them.
        runner_v2: Whether resumed requests are scheduled as new ones are.
    """

    model: Path
    groups: int = 1
    ranks: int = 1
    gpu_blocks: int = 32
    cpu_blocks: int = 64
    lazy: bool = False
    policy: str = "fail"
    async_scheduling: bool = False
    events: bool = False
    batched_tokens: int = 256
    nesting: int = 0
    children: int = 1
    runner_v2: bool = False

    def transfer(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "kv_connector": "SimpleCPUOffloadConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": self.cpu_blocks * _BLOCK_BYTES * self.ranks,
                "lazy_offload": self.lazy,
            },
        }
        children = [config] * self.children
        for _ in range(self.nesting):
            config = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"connectors": children},
            }
            children = [config]
        return config


@cache
def vllm_config(options: Options) -> VllmConfig:
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(options.model),
            dtype="float16",
            skip_tokenizer_init=True,
            max_model_len=_CONTEXT,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=options.batched_tokens,
            max_model_len=_CONTEXT,
            is_encoder_decoder=False,
            watermark=0.0,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        parallel_config=ParallelConfig(tensor_parallel_size=options.ranks),
        kv_transfer_config=KVTransferConfig(
            **options.transfer(), kv_load_failure_policy=options.policy
        ),
        kv_events_config=KVEventsConfig(
            enable_kv_cache_events=options.events, publisher="null"
        ),
        device_config=DeviceConfig("cpu"),
    )
    # vLLM turns it off where there is no GPU.
    config.scheduler_config.async_scheduling = options.async_scheduling
    config.cache_config.num_gpu_blocks = options.gpu_blocks
    return config


def kv_cache_config(options: Options) -> KVCacheConfig:
    register_all_kvcache_specs(None)
    windows = [
        SlidingWindowSpec(**_SPEC, sliding_window=WINDOW)
        for _ in range(options.groups - 1)
    ]
    size = _BLOCK_BYTES * options.gpu_blocks
    return KVCacheConfig(
        num_blocks=options.gpu_blocks,
        # The groups share the memory: a block belongs to one of them at a time.
        kv_cache_tensors=[
            KVCacheTensor(
                size=size,
                layers=[f"layer.{group}"],
                layer_stride=size,
                block_stride=_BLOCK_BYTES,
            )
            for group in range(options.groups)
        ],
        kv_cache_groups=[
            KVCacheGroupSpec([f"layer.{group}"], spec)
            for group, spec in enumerate([FullAttentionSpec(**_SPEC), *windows])
        ],
    )


def innermost(connector: Any) -> list[Any]:
    """The connector itself, or what is inside of its MultiConnectors."""
    children = getattr(connector, "_connectors", None)
    if children is None:
        return [connector]
    return [inner for child in children for inner in innermost(child)]


class Copy:
    """A copy that is under way on one rank, until the test ends it."""

    def __init__(
        self,
        pool: "Pool",
        is_store: bool,
        src: Sequence[int],
        dst: Sequence[int],
        event: int,
    ) -> None:
        assert len(src) == len(dst)
        self.rank = pool.rank.number
        self.pool = pool
        self.is_store = is_store
        self.src, self.dst = list(src), list(dst)
        self.event = event
        self.ticket = CopyTicket(threading.main_thread(), self)
        gpu, cpu = pool.rank.gpu, pool.memory
        self._source, self._target = (gpu, cpu) if is_store else (cpu, gpu)
        self._held = self._now()
        self._target.update(dict.fromkeys(self.dst))

    def end(self, *, failed: bool = False) -> None:
        """Move the blocks; all but the last of them when it fails."""
        assert self._now() == self._held, f"{self} lost its source"
        assert not any(self._target[block] for block in self.dst), self
        moved = list(zip(self.dst, self._held, strict=True))
        self._target.update(moved[:-1] if failed else moved)
        self.pool.under_way.remove(self)
        if failed:
            self.ticket.fail(RuntimeError("hipErrorIllegalAddress (700)"))
        else:
            self.ticket.queued(None, None)

    def _now(self) -> list[Content | None]:
        return [self._source.get(block) for block in self.src]

    def __repr__(self) -> str:
        what = "store" if self.is_store else "load"
        return f"{what} of {self.src} to {self.dst} on rank {self.rank}"


class Pool:
    """The offload pool of a connector on one rank, in place of its copy backend."""

    copy_engine = "batch"

    def __init__(self, rank: "Rank", connector: Any) -> None:
        self.rank = rank
        self.memory: Memory = {}
        self.under_way: list[Copy] = []
        self.launched: list[Copy] = []
        self.shutdowns = 0
        worker = connector.worker_handler
        worker._backend = self
        worker._block_bytes = _BLOCK_BYTES

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, CopyTicket]],
        wait_event: object = None,
    ) -> None:
        copy = Copy(self, is_store, src_blocks, dst_blocks, event_idx)
        self.under_way.append(copy)
        self.launched.append(copy)
        events_list.append((event_idx, copy.ticket))

    def shutdown(self) -> bool:
        self.shutdowns += 1
        return not self.under_way


class Rank:
    """One worker: what the GPU's blocks hold, and the connector."""

    def __init__(self, number: int, options: Options) -> None:
        self.number = number
        self.gpu: Memory = {}
        self.connector: Any = KVConnectorFactory.create_connector(
            vllm_config(options), KVConnectorRole.WORKER, kv_cache_config(options)
        )
        self.pools = [Pool(self, inner) for inner in innermost(self.connector)]

    def execute(
        self, scheduled: SchedulerOutput, forward: Callable[["Rank"], None]
    ) -> ModelRunnerOutput:
        """What the model runner does in a step."""
        connector = self.connector
        # As between processes.
        metadata = pickle.loads(pickle.dumps(scheduled.kv_connector_metadata))
        if scheduled.preempted_req_ids:
            connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        forward(self)
        uninstall = torch_device.install()
        try:
            connector.start_load_kv(None)
            connector.wait_for_save()
        finally:
            uninstall()
        transfers = connector.get_transfer_results(scheduled.finished_req_ids)
        output = ModelRunnerOutput([], {})
        output.kv_connector_output = KVConnectorOutput(
            finished_sending=transfers.finished_sending,
            finished_recving=transfers.finished_recving,
            failed_recving=transfers.failed_recving,
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return pickle.loads(pickle.dumps(output))


class Answer(NamedTuple):
    tokens: tuple[int, ...]
    finish_reason: str


# Whether a copy fails; None leaves it under way.
Outcome = Callable[[Copy], bool | None]


def succeed(copy: Copy) -> bool | None:
    return False


def hold(copy: Copy) -> bool | None:
    return None


def fail_loads(copy: Copy) -> bool | None:
    return not copy.is_store


def fail_stores(copy: Copy) -> bool | None:
    return copy.is_store


def after(steps: int, outcome: Outcome) -> Outcome:
    """Each copy ends in its step of that number."""
    ages: Counter[Copy] = Counter()

    def aged(copy: Copy) -> bool | None:
        ages[copy] += 1
        return outcome(copy) if ages[copy] >= steps else None

    return aged


class Events:
    """Where KV cache events are published."""

    def __init__(self) -> None:
        self.published: list[KVCacheEvent] = []

    def publish(self, batch: KVEventBatch) -> None:
        self.published += batch.events

    def shutdown(self) -> None:
        pass


class Engine:
    """The engine's loop, step by step, with a look at every block after each."""

    def __init__(self, options: Options) -> None:
        init_none_hash(sha256)
        self.options = options
        config = vllm_config(options)
        scheduler = AsyncScheduler if options.async_scheduling else Scheduler
        self.scheduler = scheduler(
            config,
            kv_cache_config(options),
            StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
        self.scheduler.use_v2_model_runner = options.runner_v2
        self.events = self.scheduler.kv_event_publisher = Events()
        self.connector: Any = self.scheduler.connector
        self.managers: list[SimpleCPUOffloadScheduler] = [
            inner.scheduler_manager for inner in innermost(self.connector)
        ]
        assert all(each.num_cpu_blocks == options.cpu_blocks for each in self.managers)
        self.ranks = [Rank(number, options) for number in range(options.ranks)]
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, Answer] = {}
        self.metrics: Counter[str] = Counter()
        # Tokens by request.
        self.computed: Counter[str] = Counter()
        # What the ranks do when blocks must be free at once.
        self.flush: Outcome = succeed
        self._aggregator = KVOutputAggregator(options.ranks)
        self._batches: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._tokens: dict[str, tuple[int, ...]] = {}
        self._contents: dict[bytes, Content] = {}
        self._hasher = get_request_block_hasher(BLOCK, sha256)

    # ----- what a client does

    def submit(
        self, prompt: Sequence[int], name: str | None = None, max_tokens: int = 1
    ) -> str:
        """Ask for ``max_tokens`` tokens; returns the request's id."""
        name = name or f"request-{len(self.requests)}"
        self.requests[name] = request = self.request(prompt, name, max_tokens)
        self._tokens[name] = ()
        self.scheduler.add_request(request)
        return name

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def ask(
        self, prompt: Sequence[int], outcome: Outcome = succeed, **more: Any
    ) -> Answer:
        """Submit, and step until nothing is left to do."""
        name = self.submit(prompt, **more)
        self.run(outcome)
        return self.answers[name]

    def request(
        self, prompt: Sequence[int], name: str = "", max_tokens: int = 1
    ) -> Request:
        parameters = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return Request(name, list(prompt), parameters, None, block_hasher=self._hasher)

    # ----- the loop

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.has_requests() or self._batches)

    def step(self, outcome: Outcome = hold) -> None:
        """Schedule and execute if there is work, and take in the output that is due."""
        if self.scheduler.has_requests():
            self.schedule()
        self.end_copies(outcome)
        depth = 2 if self.options.async_scheduling else 1
        due = len(self._batches) >= depth or not self.scheduler.has_requests()
        if due and self._batches:
            self._update(*self._batches.popleft())
        self.check()

    def schedule(self) -> SchedulerOutput:
        """Schedule and execute; the output is taken in by a later step."""
        scheduled = self.scheduler.schedule()
        self._batches.append((scheduled, self._execute(scheduled)))
        return scheduled

    def run(self, outcome: Outcome = succeed) -> None:
        """Step until nothing is left to do."""
        for _ in range(MAX_STEPS):
            if not self.busy:
                return
            self.step(outcome)
        raise AssertionError(f"the engine is still busy after {MAX_STEPS} steps")

    def step_until(self, done: Callable[[], Any], outcome: Outcome = hold) -> None:
        for _ in range(MAX_STEPS):
            if done():
                return
            self.step(outcome)
        raise AssertionError(f"not after {MAX_STEPS} steps")

    def reset(self) -> bool:
        """Reset the offload pools; False if that has to wait for copies."""
        return bool(self.connector.reset_cache())

    def forget_gpu(self) -> None:
        """Leave nothing in the GPU's prefix cache, so that the host is asked."""
        assert self.scheduler.kv_cache_manager.reset_prefix_cache()

    # ----- copies

    def copies(self, rank: int | None = None) -> list[Copy]:
        """Those under way, the oldest of each pool first."""
        return [
            copy
            for each in self.ranks
            for pool in each.pools
            for copy in pool.under_way
            if rank in (None, each.number)
        ]

    def stores(self, rank: int | None = None) -> list[Copy]:
        return [copy for copy in self.copies(rank) if copy.is_store]

    def loads(self, rank: int | None = None) -> list[Copy]:
        return [copy for copy in self.copies(rank) if not copy.is_store]

    def end_copies(self, outcome: Outcome) -> None:
        for copy in self.copies():
            if (failed := outcome(copy)) is not None:
                copy.end(failed=failed)

    @property
    def launched(self) -> list[Copy]:
        """All copies that there ever were on the first rank."""
        return [copy for pool in self.ranks[0].pools for copy in pool.launched]

    @property
    def num_loads(self) -> int:
        return sum(not copy.is_store for copy in self.launched)

    # ----- what there is to see

    @property
    def manager(self) -> SimpleCPUOffloadScheduler:
        (only,) = self.managers
        return only

    @property
    def gpu_pool(self) -> BlockPool:
        return self.scheduler.kv_cache_manager.block_pool

    def used(self) -> tuple[int, ...]:
        """Blocks that something refers to, on the GPU and in each offload pool."""
        pools = [self.gpu_pool, *(each.cpu_block_pool for each in self.managers)]
        return tuple(
            len(pool.blocks) - 1 - pool.get_num_free_blocks() for pool in pools
        )

    def offloaded(self, prompt: Sequence[int], pool: int = 0) -> list[list[int]]:
        """By group, which blocks of the prompt are in the offload pool's cache."""
        cached = self.managers[pool].cpu_block_pool.cached_block_hash_to_block
        hashes = self.request(prompt).block_hashes
        return [
            [
                index
                for index, block_hash in enumerate(hashes)
                if cached.get_one_block(
                    make_block_hash_with_group_id(block_hash, group)
                )
            ]
            for group in range(self.options.groups)
        ]

    def check(self) -> None:
        """References add up, and cached blocks hold what their hashes say."""
        self._check_pool(self.gpu_pool, [rank.gpu for rank in self.ranks])
        for index, manager in enumerate(self.managers):
            memories = [rank.pools[index].memory for rank in self.ranks]
            self._check_pool(manager.cpu_block_pool, memories)

    def _check_pool(self, pool: BlockPool, memories: list[Memory]) -> None:
        blocks = [block for block in pool.blocks if not block.is_null]
        assert min(block.ref_cnt for block in blocks) >= 0
        free = sum(block.ref_cnt == 0 for block in blocks)
        assert pool.get_num_free_blocks() == free
        for block in blocks:
            if block.block_hash is not None:
                content = self._content(block.block_hash)
                for memory in memories:
                    assert memory.get(block.block_id) == content, block

    def check_idle(self) -> None:
        """Nothing but the prefix caches is left of what was asked for."""
        assert not self.copies()
        assert not any(self.used())
        assert not self.scheduler.requests
        assert not self.connector.has_pending_push_work()
        for manager in self.managers:
            assert not manager.has_pending_stores()
            assert not manager._reqs_to_store
            assert not manager._store_event_to_reqs
            assert not manager._store_event_pending_counts
            assert not manager._in_flight_store_gpu_blocks
            assert not manager._reqs_to_load
            assert not manager._load_event_to_reqs
            assert not manager._abandoned_reqs_to_load
            assert not manager._pending_cpu_hits
        self.check()

    # ----- the model

    def _content(self, block_hash: bytes) -> Content:
        if block_hash not in self._contents:
            for request in self.requests.values():
                tokens = _with_answer(request)
                for index, each in enumerate(request.block_hashes):
                    for group in range(self.options.groups):
                        key = make_block_hash_with_group_id(each, group)
                        self._contents[key] = group, tokens[: (index + 1) * BLOCK]
        return self._contents[block_hash]

    def _execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        self.computed.update(scheduled.num_scheduled_tokens)
        if scheduled.preempted_req_ids:
            self.end_copies(self.flush)
        outputs: list[ModelRunnerOutput | None] = [
            rank.execute(scheduled, lambda rank: self._forward(rank, scheduled))
            for rank in self.ranks
        ]
        output = self._aggregator.aggregate(outputs)
        assert output is not None
        output.req_ids = list(scheduled.num_scheduled_tokens)
        output.req_id_to_index = {
            name: index for index, name in enumerate(output.req_ids)
        }
        output.sampled_token_ids = [
            [] if self.requests[name].is_prefill_chunk else [ANSWER]
            for name in output.req_ids
        ]
        return output

    def _forward(self, rank: Rank, scheduled: SchedulerOutput) -> None:
        """Read the KV of all tokens before the step's, and write theirs."""
        writes = {block for copy in self.copies(rank.number) for block in _on_gpu(copy)}
        for name, start, end in _ranges(scheduled):
            tokens = _with_answer(self.requests[name])
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            for group, table in enumerate(tables):
                first = max(0, start - WINDOW + 1) if group else 0
                for index in range(first // BLOCK, _blocks(start)):
                    content = group, tokens[: min(start, (index + 1) * BLOCK)]
                    assert rank.gpu.get(table[index]) == content, (name, group, index)
                for index in range(start // BLOCK, _blocks(end)):
                    if block := table[index]:
                        assert block not in writes, "the forward pass meets a copy"
                        last = min(end, (index + 1) * BLOCK)
                        rank.gpu[block] = group, tokens[:last]

    def _update(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        clients = self.scheduler.update_from_output(scheduled, output)
        for client in clients.values():
            for answer in client.outputs:
                name = answer.request_id
                self._tokens[name] += tuple(answer.new_token_ids)
                if answer.finish_reason is not None:
                    assert name not in self.answers
                    reason = str(answer.finish_reason)
                    self.answers[name] = Answer(self._tokens[name], reason)
            if client.scheduler_stats is not None:
                self._measure(client.scheduler_stats.kv_connector_stats)

    def _measure(self, stats: dict[str, Any] | None) -> None:
        if stats and "types" not in stats:  # of a MultiConnector, by connector
            for inner in stats.values():
                self._measure(inner)
            return
        for name, values in (stats or {}).get("data", {}).items():
            for labels, value in values.items():
                key = ",".join((name.removeprefix("vllm:simple_kv_offload_"), *labels))
                if stats["types"][name] == "counter":
                    self.metrics[key] += value
                else:
                    self.metrics[key] = value


def _with_answer(request: Request) -> tuple[int, ...]:
    # Async scheduling computes with tokens that the scheduler does not know yet.
    prompt = tuple(request.prompt_token_ids or ())
    return prompt + (ANSWER,) * (_CONTEXT - len(prompt))


def _ranges(scheduled: SchedulerOutput) -> Iterator[tuple[str, int, int]]:
    """Request, first token and end of each part of the step."""
    cached = scheduled.scheduled_cached_reqs
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for new in scheduled.scheduled_new_reqs:
        starts[new.req_id] = new.num_computed_tokens
    for name, count in scheduled.num_scheduled_tokens.items():
        yield name, starts[name], starts[name] + count


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


def _on_gpu(copy: Copy) -> list[int]:
    return copy.src if copy.is_store else copy.dst


def prompt(number: int, blocks: int = 3, more: int = 1) -> list[int]:
    """Tokens that fill so many blocks and ``more``; no other number's has one of them.

    The first blocks of a number's prompts are the same for all lengths.
    """
    return [100 + number, *range(1, blocks * BLOCK + more)]
