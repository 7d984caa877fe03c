# SPDX-License-Identifier: Apache-2.0
"""Asks one engine the same prompts four times; writes what happened as JSON.

    python offload_engine.py MODEL RESULT DTYPE TENSOR_PARALLEL_SIZE COPY_ENGINE

The device has room for about three of the prompts. A prompt is first computed, then
asked again at once, so that its blocks are still in device memory. When all prompts
have been through that, each is asked again: by now its blocks have been evicted and
come back from the host. The last time they come back corrupted. Each rectangle and each
batch takes a while to begin, so that whoever does not wait for it is found out.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

BLOCK = 32
DEVICE_BLOCKS = 40
HOST_BYTES = 64 << 20
FIRST_WORDS = ("amber", "Cedar and", "drift", "Where is", "nine grey", "zinc")
BODY = " The keeper counts twice and writes down where each crate went." * 21


def simulator_state(worker: Any) -> dict[str, Any]:
    from vllm_rocm_memory.sim import hipsim

    now = hipsim.stats()
    return {
        "profile": hipsim.profile(),
        "copies": {
            f"{engine} {direction}": list(count)
            for (engine, direction), count in now.copies.items()
        },
        "device bytes": now.device_bytes,
        "registered bytes": now.registered_bytes,
        "staged": now.staged_copies,
        "faults": now.memory_faults,
        "batches": now.calls["hipMemcpyBatchAsync"],
        "packets": now.pitched_packets,
    }


def slow_copies(worker: Any) -> None:
    from vllm_rocm_memory.sim import hipsim

    hipsim.configure(copy_latency_us=3_000)


def corrupt_loads(worker: Any) -> None:
    from vllm_rocm_memory.sim import hipsim

    hipsim.configure(corrupt_loads=True)


def main(
    model: str, result: str, dtype: str, tensor_parallel_size: str, copy_engine: str
) -> None:
    from vllm import LLM, SamplingParams

    # Keys and values of 4 layers, 2 heads, 64 elements each.
    block_bytes = 2 * 4 * 2 * 64 * BLOCK * {"float32": 4, "bfloat16": 2}[dtype]
    ranks = int(tensor_parallel_size)
    llm = LLM(
        model,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=2,
        block_size=BLOCK,
        kv_cache_memory_bytes=DEVICE_BLOCKS * block_bytes // ranks,
        tensor_parallel_size=ranks,
        disable_log_stats=False,
        kv_transfer_config={
            "kv_connector": "SimpleCPUOffloadConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": HOST_BYTES,
                "copy_engine": copy_engine,
            },
        },
    )
    greedy = SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True)

    def ask(word: str) -> dict[str, Any]:
        (output,) = llm.generate([word + BODY], greedy, use_tqdm=False)
        answer = output.outputs[0]
        return {
            "tokens": list(answer.token_ids),
            "logprobs": [
                sorted((token, entry.logprob) for token, entry in position.items())
                for position in answer.logprobs
            ],
            "cached": output.num_cached_tokens,
            "prompt": len(output.prompt_token_ids),
        }

    def state() -> dict[str, Any]:
        counters = Counter()
        for metric in llm.get_metrics():
            if metric.name in (
                "vllm:external_prefix_cache_hits",
                "vllm:prefix_cache_hits",
            ):
                counters[metric.name] += metric.value
        return {"ranks": llm.collective_rpc(simulator_state), "hits": counters}

    report: dict[str, Any] = {"block bytes": block_bytes // ranks, "start": state()}
    llm.collective_rpc(slow_copies)
    twice = [(ask(word), ask(word)) for word in FIRST_WORDS]
    report["computed"] = [first for first, _ in twice]
    report["on device"] = [again for _, again in twice]
    report["before loads"] = state()
    report["loaded"] = [ask(word) for word in FIRST_WORDS]
    report["after loads"] = state()
    llm.collective_rpc(corrupt_loads)
    report["corrupted"] = [ask(word) for word in FIRST_WORDS]
    report["end"] = state()
    Path(result).write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
