# SPDX-License-Identifier: Apache-2.0
"""Runs an engine with CUDA graphs that sleeps and wakes; writes what happened as JSON.

    python sleep_engine.py MODEL RESULT OPTIONS ROUNDS

OPTIONS are those of `vllm.LLM` as JSON, beside what every engine here has. A round has
a cycle of each kind. With several ranks, wakes and KV copies of one of them fail then.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

WORDS = ("amber", "Cedar and", "drift", "Where is", "nine grey", "zinc")
BODY = " The keeper counts twice and writes down where each crate went." * 21
PATIENCE_S = 60.0


def memory(worker: Any) -> tuple[dict[str, int], int]:
    """On a worker: what is mapped by tag, and the bytes that its device has free."""
    import torch
    from vllm.device_allocator import get_mem_allocator_instance

    torch.accelerator.synchronize()
    allocator: Any = get_mem_allocator_instance()
    return allocator.mapped_bytes(), int(torch.accelerator.get_memory_info()[0])


def count_calls(worker: Any) -> None:
    """On a worker: count replays of graphs, and transfers of KV blocks, from now on."""
    import torch
    from spoiled_copies import Spoiler

    replay = torch.cuda.CUDAGraph.replay
    worker.replays, worker.spoiler = 0, Spoiler()

    def counted_replay(graph: Any) -> None:
        worker.replays += 1
        replay(graph)

    torch.cuda.CUDAGraph.replay = counted_replay


def calls(worker: Any) -> dict[str, int]:
    """On a worker: what `count_calls` has counted."""
    seen, spoiled = worker.spoiler.seen, worker.spoiler.spoiled
    return {
        "replay": worker.replays,
        "load": seen["load"],
        "store": seen["store"],
        "spoiled": spoiled["load"] + spoiled["store"],
    }


def spoil(worker: Any, rank: int, direction: str, times: int) -> None:
    """On a worker: the next copies of a rank fail, so many of them."""
    if worker.rank == rank:
        worker.spoiler.spoil(direction, times)


def fill_device(worker: Any, rank: int) -> None:
    """On a worker: a rank's GPU has no room for what sleeps."""
    if worker.rank != rank:
        return
    import torch

    size = int(torch.accelerator.get_memory_info()[0])
    while True:
        try:
            worker.filling = torch.empty(
                size, dtype=torch.uint8, device=torch.accelerator.current_accelerator()
            )
            return
        except torch.OutOfMemoryError:
            size -= 2 << 20


def empty_device(worker: Any, rank: int) -> None:
    """On a worker: what `fill_device` took is free again."""
    if worker.rank != rank:
        return
    import torch

    del worker.filling
    torch.accelerator.empty_cache()


def spoil_handle(worker: Any, rank: int) -> None:
    """On a worker: an allocation of a rank cannot be mapped."""
    if worker.rank != rank:
        return
    from vllm.device_allocator import get_mem_allocator_instance

    allocator: Any = get_mem_allocator_instance()
    # The last of its tag, so that others are mapped by then.
    *_, worker.spoiled = (
        data for data in allocator.pointer_to_data.values() if data.tag == "kv_cache"
    )
    worker.right_handle = worker.spoiled.handle
    device, _, *rest = worker.right_handle
    worker.spoiled.handle = (device, 1 << 50, *rest)


def mend_handle(worker: Any, rank: int) -> None:
    """On a worker: undo `spoil_handle`."""
    if worker.rank == rank:
        worker.spoiled.handle = worker.right_handle


def clear_weights(worker: Any) -> None:
    """On a worker: what a wake without a reload leaves of them is not specified."""
    import torch

    with torch.no_grad():
        for parameter in worker.model_runner.model.parameters():
            parameter.zero_()


def all_reduce(worker: Any) -> dict[str, Any]:
    """On a worker: who reduces among the ranks, and whether it registers captures."""
    from ranks import reducers, register_captures, should_reduce
    from vllm.distributed.parallel_state import get_tp_group

    active = reducers(get_tp_group().device_communicator)
    return {
        "active": [type(each).__name__ for each in active],
        "should be": should_reduce(),
        "registers": register_captures(active),
    }


def multicast(worker: Any) -> dict[str, str]:
    """On a worker: what its environment says of NVLink's multicast."""
    return {
        name: value
        for name, value in os.environ.items()
        if "NVLS" in name or "MULTICAST" in name
    }


def settle(llm: Any) -> None:
    """Step an engine in this process until no store is on its way."""
    engine = llm.llm_engine
    deadline = time.monotonic() + PATIENCE_S
    while engine.engine_core.engine_core.scheduler.has_requests():
        assert time.monotonic() < deadline, "stores do not end"
        engine.step()


class Run:
    """The engine, and what it has said so far."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        self.llm = LLM(
            model,
            max_model_len=1024,
            max_num_seqs=4,
            enable_sleep_mode=True,
            sleep_mode_offload_cudagraph=True,
            **options,
        )
        self.offloads = "kv_transfer_config" in options
        self.ranks = options.get("tensor_parallel_size", 1)
        self.greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        self.llm.collective_rpc(count_calls)

    def output(self, word: str) -> Any:
        """One prompt at a time, so that each is computed in the same steps."""
        (output,) = self.llm.generate([word + BODY], self.greedy, use_tqdm=False)
        return output.outputs[0]

    def ask(self, word: str) -> list[int]:
        return list(self.output(word).token_ids)

    def calls(self) -> list[dict[str, int]]:
        """Of each rank."""
        counted: list[dict[str, int]] = self.llm.collective_rpc(calls)
        return counted

    def calls_since(self, before: list[dict[str, int]], name: str) -> list[int]:
        """How many of a kind each rank has made."""
        return [b[name] - a[name] for a, b in zip(before, self.calls(), strict=True)]

    def answers(self) -> dict[str, Any]:
        """Each prompt's, computed, and again where its blocks are on the device.

        A KV cache that has no room for all prompts brings them back from the host then.
        """
        computed, cached = [], []
        for word in WORDS:
            computed.append(self.ask(word))
            cached.append(self.ask(word))
        before = self.calls()
        again = [self.ask(word) for word in WORDS]
        return {
            "computed": computed,
            "cached": cached,
            "again": again,
            "loads": self.calls_since(before, "load"),
            "replays": [each["replay"] for each in self.calls()],
        }

    def memory(self) -> tuple[list[dict[str, int]], list[int]]:
        """Of each rank."""
        mapped, free = zip(*self.llm.collective_rpc(memory), strict=True)
        return list(mapped), list(free)

    def cycle(
        self,
        name: str,
        level: int,
        *parts: list[str],
        between: Callable[[], object] = lambda: None,
    ) -> dict[str, Any]:
        """Sleep, wake in parts, and answer.

        Args:
            name: Of the cycle, for people.
            level: Of the sleep.
            parts: The tags of each wake; none for one wake of everything.
            between: Called after the first wake.
        """
        _, awake = self.memory()
        before = self.llm.collective_rpc("sleep_report")
        self.llm.sleep(level=level)
        asleep, free = self.memory()
        reports = self.llm.collective_rpc("sleep_report")
        told: dict[str, Any] = {
            "name": name,
            "level": level,
            "asleep": asleep,
            "reports": reports,
            "reports before": before,
            "given back": [b - a for a, b in zip(awake, free, strict=True)],
            "partly": [],
        }
        if not parts:
            self.llm.wake_up()
        for number, tags in enumerate(parts):
            self.llm.wake_up(tags=tags)
            if number == 0:
                between()
            if number + 1 < len(parts):
                told["partly"].append({"tags": tags, "mapped": self.memory()[0]})
        told["mapped"] = self.memory()[0]
        told["answers"] = self.answers()
        return told

    def cycles(self, rounds: int) -> Iterator[dict[str, Any]]:
        """Each kind of cycle in turn, so many times."""
        weights, kv_cache = ["weights"], ["kv_cache"]
        for n in range(1, rounds + 1):
            yield self.cycle(f"level 1, {n}", 1)
            yield self.cycle(f"weights first, {n}", 1, weights, kv_cache)
            yield self.cycle(f"KV cache first, {n}", 1, kv_cache, weights)
            yield self.cycle(f"level 2, {n}", 2, weights, kv_cache, between=self.reload)
        yield self.cycle("level 1 after level 2", 1)

    def failed_wakes(self) -> Iterator[dict[str, Any]]:
        """A wake of everything, and one in parts, fail on each rank in turn."""
        for rank in range(self.ranks):
            for name, fault, remedy in (
                ("no room", fill_device, empty_device),
                ("another handle", spoil_handle, mend_handle),
            ):
                yield self.failed_wake(name, rank, fault, remedy, [None])
        yield self.failed_wake(
            "in parts", 0, spoil_handle, mend_handle, [["kv_cache"], ["weights"]]
        )

    def failed_wake(
        self,
        name: str,
        rank: int,
        fault: Callable[[Any, int], None],
        remedy: Callable[[Any, int], None],
        parts: Sequence[list[str] | None],
    ) -> dict[str, Any]:
        """Sleep, wake in vain, wake, and answer.

        Args:
            name: Of the fault, for people.
            rank: That it is for.
            fault: On a worker; after it a wake fails.
            remedy: On a worker; after it a wake succeeds.
            parts: The tags of each wake, of which the first fails once.
        """
        self.llm.sleep(level=1)
        self.llm.collective_rpc(fault, args=(rank,))
        error = None
        try:
            self.llm.wake_up(tags=parts[0])
        except RuntimeError as raised:
            error = str(raised)
        told: dict[str, Any] = {
            "name": name,
            "rank": rank,
            "error": error,
            "is asleep": self.llm.llm_engine.is_sleeping(),
            "mapped after the error": self.memory()[0],
        }
        self.llm.collective_rpc(remedy, args=(rank,))
        for tags in parts:
            self.llm.wake_up(tags=tags)
        return told | {
            "is asleep at the end": self.llm.llm_engine.is_sleeping(),
            "mapped": self.memory()[0],
            "answers": self.answers(),
        }

    def failed_copies(self) -> Iterator[dict[str, Any]]:
        """A load and a store fail on each rank in turn, and are asked for again."""
        for rank in range(self.ranks):
            yield self.failed_load(rank, WORDS[rank])
            yield self.failed_store(rank, f"{rank + 1} crates,")

    def failed_load(self, rank: int, word: str) -> dict[str, Any]:
        before = self.calls()
        self.llm.collective_rpc(spoil, args=(rank, "load", 1))
        failed = self.output(word)
        return {
            "direction": "load",
            "rank": rank,
            "word": word,
            "reason": failed.finish_reason,
            "spoiled": self.calls_since(before, "spoiled"),
            "again": self.ask(word),
            "loads": self.calls_since(before, "load"),
        }

    def failed_store(self, rank: int, word: str) -> dict[str, Any]:
        before = self.calls()
        self.llm.collective_rpc(spoil, args=(rank, "store", 1 << 30))
        computed = self.ask(word)
        settle(self.llm)
        self.llm.collective_rpc(spoil, args=(rank, "store", 0))
        spoiled = self.calls_since(before, "spoiled")
        for other in WORDS:  # which takes the device's blocks
            self.ask(other)
        before = self.calls()
        return {
            "direction": "store",
            "rank": rank,
            "computed": computed,
            "spoiled": spoiled,
            "again": self.ask(word),
            "loads": self.calls_since(before, "load"),
        }

    def reload(self) -> None:
        self.llm.collective_rpc("reload_weights")

    def clear(self) -> None:
        self.llm.collective_rpc(clear_weights)


def main(model: str, result: str, options: str, rounds: str) -> None:
    run = Run(model, json.loads(options))
    first = run.answers()
    report: dict[str, Any] = {
        "register": os.environ.get("NCCL_GRAPH_REGISTER"),
        "all reduce": run.llm.collective_rpc(all_reduce),
        "multicast": run.llm.collective_rpc(multicast),
        "mapped": run.memory()[0],
        "answers": first,
        "cycles": list(run.cycles(int(rounds))),
    }
    if run.ranks > 1:
        report["failed wakes"] = list(run.failed_wakes())
        report["failed copies"] = list(run.failed_copies()) if run.offloads else []
    report["without weights"] = run.cycle(
        "level 2, no reload", 2, ["weights", "kv_cache"], between=run.clear
    )["answers"]
    Path(result).write_text(json.dumps(report))
    if run.ranks > 1:
        run.llm.llm_engine.engine_core.shutdown()  # ends the ranks' processes
    sys.stdout.flush()
    sys.stderr.flush()
    # PyTorch ends the process otherwise where a graph has left memory in a pool.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
