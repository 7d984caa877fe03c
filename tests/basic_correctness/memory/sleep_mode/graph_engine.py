# SPDX-License-Identifier: Apache-2.0
"""Runs an engine that captures graphs, sleeps and wakes; writes what happened as JSON.

    python graph_engine.py MODEL RESULT DTYPE CASE

The engine is in this process, on a GPU or on the simulator.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

# The compilation's options. "off" alone does not ask for the pool, and stores KV blocks
# on the host.
CASES: dict[str, dict[str, Any]] = {
    "full": {"mode": 0, "cudagraph_mode": "FULL"},
    "piecewise": {"mode": 3, "backend": "eager", "cudagraph_mode": "PIECEWISE"},
    # With VLLM_USE_BREAKABLE_CUDAGRAPH, which vLLM reads when it is imported.
    "breakable": {"mode": 0, "cudagraph_mode": "PIECEWISE"},
    "off": {"mode": 0, "cudagraph_mode": "FULL"},
}
WORDS = ("amber", "drift", "zinc")
BODY = " The keeper counts twice and writes down where each crate went."


def mapped_bytes() -> dict[str, int]:
    """What is mapped, by tag."""
    from vllm.device_allocator import get_mem_allocator_instance

    allocator: Any = get_mem_allocator_instance()
    return dict(allocator.mapped_bytes())


class Replays:
    """Counts them, and so tells an engine that replays from one that does not."""

    def __init__(self) -> None:
        self.count = 0
        if simulated():
            from vllm_rocm_memory.sim.torch_graph import CUDAGraph
        else:
            from torch.cuda import CUDAGraph
        replay = CUDAGraph.replay

        def counted(graph: Any) -> None:
            self.count += 1
            replay(graph)

        CUDAGraph.replay = counted


def simulated() -> bool:
    return bool(os.environ.get("HIPSIM_PROFILE"))


def simulated_executables() -> int:
    """Executable graphs that the simulated device has."""
    from vllm_rocm_memory.sim import hipsim

    return hipsim.stats().executables


def sleep_beside_stores(llm: Any, params: Any) -> bool:
    """Sleeps while KV blocks are still being stored; whether they were."""
    if simulated():
        from vllm_rocm_memory.sim import hipsim

        hipsim.configure(copy_latency_us=2_000_000)
    llm.generate(["Cedar and" + 20 * BODY], params, use_tqdm=False)
    if simulated():
        # For what is queued from now on: the copies of the sleep need not wait.
        hipsim.configure(copy_latency_us=0)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    under_way = bool(scheduler.connector.has_pending_push_work())
    llm.sleep(level=1)
    return under_way


def main(model: str, result: str, dtype: str, case: str) -> None:
    from vllm import LLM, SamplingParams

    replays = Replays()
    transfer = {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20},
    }
    # Kernels that compile where they run: a GPU may lack those of another backend.
    attention = {} if simulated() else {"backend": "TRITON_ATTN"}
    llm = LLM(
        model,
        dtype=dtype,
        attention_config=attention,
        max_model_len=512,
        max_num_seqs=4,
        kv_cache_memory_bytes=16 << 20,
        gpu_memory_utilization=0.2,  # it starts where others have some of the memory
        enable_sleep_mode=True,
        sleep_mode_offload_cudagraph=case != "off",
        kv_transfer_config=transfer if case == "off" else None,
        compilation_config={**CASES[case], "cudagraph_capture_sizes": [1, 2, 4]},
    )
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def answers() -> list[list[int]]:
        outputs = llm.generate([w + BODY for w in WORDS], greedy, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    report: dict[str, Any] = {
        "register": os.environ.get("NCCL_GRAPH_REGISTER"),
        "mapped": mapped_bytes(),
        "answers": answers(),
        "replays": replays.count,
        "after": {},
    }
    for level in (1, 2):
        (told_awake,) = llm.collective_rpc("sleep_report")
        llm.sleep(level=level)
        asleep = mapped_bytes()
        (told,) = llm.collective_rpc("sleep_report")
        executables = simulated_executables() if simulated() else None
        llm.wake_up(tags=["weights"])
        if level == 2:
            llm.collective_rpc("reload_weights")
        partly = mapped_bytes()
        llm.wake_up(tags=["kv_cache"])
        report["after"][level] = {
            "asleep": asleep,
            "told": told,
            "told awake": told_awake,
            "executables": executables,
            "weights": partly,
            "mapped": mapped_bytes(),
            "answers": answers(),
            "replays": replays.count,
        }
    if case == "off":
        report["stores under way"] = sleep_beside_stores(
            llm, SamplingParams(temperature=0, max_tokens=1)
        )
        report["beside stores"] = mapped_bytes()
        llm.wake_up()
        report["answers after stores"] = answers()
    llm.sleep(level=2)
    llm.wake_up()
    report["without weights"] = answers()
    Path(result).write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
