# SPDX-License-Identifier: Apache-2.0
"""Runs an engine with CUDA graphs that sleeps and wakes; writes what happened as JSON.

    python sleep_engine.py MODEL RESULT OPTIONS

OPTIONS are those of `vllm.LLM` as JSON, beside what every engine here has.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = ("amber", "Cedar and", "drift", "Where is", "nine grey", "zinc")
BODY = " The keeper counts twice and writes down where each crate went." * 21
CYCLES = 3


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
    from vllm.v1.simple_kv_offload import cuda_mem_ops

    calls = {"replay": 0, "load": 0, "store": 0}
    replay, submit = torch.cuda.CUDAGraph.replay, cuda_mem_ops._submit_rectangles

    def counted_replay(graph: Any) -> None:
        calls["replay"] += 1
        replay(graph)

    def counted_submit(rectangles: Any, params: Any) -> Any:
        calls[params.direction] += 1
        return submit(rectangles, params)

    torch.cuda.CUDAGraph.replay = counted_replay
    cuda_mem_ops._submit_rectangles = counted_submit
    worker.counted_calls = calls


def calls(worker: Any) -> dict[str, int]:
    """On a worker: what `count_calls` has counted."""
    return dict(worker.counted_calls)


def clear_weights(worker: Any) -> None:
    """On a worker: what a wake without a reload leaves of them is not specified."""
    import torch

    with torch.no_grad():
        for parameter in worker.model_runner.model.parameters():
            parameter.zero_()


def all_reduce(worker: Any) -> dict[str, Any]:
    """On a worker: who reduces among the ranks, and whether it registers captures."""
    from vllm.distributed.parallel_state import get_tp_group

    comm: Any = get_tp_group().device_communicator
    if comm is None:  # there is one rank
        return {"active": [], "registers": False}
    own, aiter = comm.ca_comm, comm.aiter_ar_comm
    active = [each for each in (own, aiter) if each is not None and not each.disabled]
    return {
        "active": [type(each).__name__ for each in active],
        "registers": bool(
            (own is not None and own._capture_registered)
            or (aiter is not None and aiter.aiter_ca.enable_register_for_capturing)
        ),
    }


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
        self.greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        self.llm.collective_rpc(count_calls)

    def ask(self, word: str) -> list[int]:
        """One prompt at a time, so that each is computed in the same steps."""
        (output,) = self.llm.generate([word + BODY], self.greedy, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def answers(self) -> dict[str, Any]:
        """Each prompt's, computed, and again where its blocks are on the device.

        A KV cache that has no room for all prompts brings them back from the host then.
        """
        computed, cached = [], []
        for word in WORDS:
            computed.append(self.ask(word))
            cached.append(self.ask(word))
        before = self.llm.collective_rpc(calls)
        again = [self.ask(word) for word in WORDS]
        after = self.llm.collective_rpc(calls)
        return {
            "computed": computed,
            "cached": cached,
            "again": again,
            "loads": [
                b["load"] - a["load"] for a, b in zip(before, after, strict=True)
            ],
            "replays": [each["replay"] for each in after],
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

    def reload(self) -> None:
        self.llm.collective_rpc("reload_weights")

    def clear(self) -> None:
        self.llm.collective_rpc(clear_weights)


def main(model: str, result: str, options: str) -> None:
    run = Run(model, json.loads(options))
    first = run.answers()
    report: dict[str, Any] = {
        "register": os.environ.get("NCCL_GRAPH_REGISTER"),
        "all reduce": run.llm.collective_rpc(all_reduce),
        "mapped": run.memory()[0],
        "answers": first,
        "cycles": [
            *(run.cycle(f"level 1, {n + 1}", 1) for n in range(CYCLES)),
            run.cycle("weights first", 1, ["weights"], ["kv_cache"]),
            run.cycle("KV cache first", 1, ["kv_cache"], ["weights"]),
            *(
                run.cycle(
                    f"level 2, {n + 1}",
                    2,
                    ["weights"],
                    ["kv_cache"],
                    between=run.reload,
                )
                for n in range(2)
            ),
            run.cycle("level 1 after level 2", 1),
        ],
    }
    report["without weights"] = run.cycle(
        "level 2, no reload", 2, ["weights", "kv_cache"], between=run.clear
    )["answers"]
    Path(result).write_text(json.dumps(report))
    if len(report["mapped"]) > 1:
        run.llm.llm_engine.engine_core.shutdown()  # ends the ranks' processes
    sys.stdout.flush()
    sys.stderr.flush()
    # PyTorch ends the process otherwise where a graph has left memory in a pool.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
