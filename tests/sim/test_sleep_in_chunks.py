# SPDX-License-Identifier: Apache-2.0
"""Sleep mode's chunks end inside the KV cache, and no copy may cross an end.

There are 42 blocks of 96 tokens, so that the layers lie 3.94 MiB apart, and chunks have
5 MiB. They end inside a page of the second layer, inside one of the third, and between
two of the fourth. Which layers share a chunk depends on the block: two that lie beside
each other, or none.
"""

import re
from typing import Any

import pytest

from .served_engine import BLOCK, BLOCK_BYTES, HOST_BYTES, ServedEngine, fresh_prompts
from .test_sleep import good

CHUNK_MIB = 5
TIMES = 3  # as large as the blocks of the other servers
CACHE_BYTES = 42 * TIMES * BLOCK_BYTES
SERVER: dict[str, Any] = {
    "arguments": [
        "--enable-sleep-mode",
        f"--block-size={TIMES * BLOCK}",
        f"--kv-cache-memory-bytes={CACHE_BYTES}",
    ],
    "extension": "sleep_faults.SleepFaults",
    "transfer": {
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": HOST_BYTES,
            "copy_engine": "rect",
        }
    },
    "variables": {
        "HIPSIM_SWITCHES": "stale_memory=poisoned,one_mapping_copies=1",
        "VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE": str(CHUNK_MIB),
    },
}
WHOLE_BLOCKS = 3
CACHED = WHOLE_BLOCKS * TIMES * BLOCK
# Three blocks and a part of one.
prompts = (each + " A wrong crate is worse." * 18 for each in fresh_prompts())


def check_bytes(engine: ServedEngine, way: str) -> None:
    """What the last copy that way has moved is the same on both sides."""
    (last,) = engine.rpc("compare_last", way=way)
    assert last == {"bytes": WHOLE_BLOCKS * TIMES * BLOCK_BYTES, "different": 0}


def test_the_start_says_how_much_is_left_and_what_to_do(engine):
    (line,) = [each for each in engine.said().splitlines() if "KV copy engine" in each]
    assert "WARNING" in line
    assert "rect (asked for: rect, by kv_connector_extra_config.copy_engine)" in line
    # Most blocks have half of their bytes in one; it is told by a sample.
    assert re.search(r"(3\d|4[0-4]) % of a block's bytes lie in rectangles", line)
    assert f"chunks have {CHUNK_MIB} MiB" in line
    assert "VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE" in line


@pytest.mark.parametrize("name", ["rect", "batch"])
def test_every_block_is_the_same_before_and_after_a_sleep(engine, name):
    engine.rpc("use_release", profile="7.16", engine=name)
    before = engine.copy_counters()
    asked = {}
    # Blocks are handed out in turn, so that all of the cache has been used.
    for _ in range(42 // WHOLE_BLOCKS):
        each = next(prompts)
        asked[each] = engine.ask(each)
        assert asked[each].ok and asked[each].cached == 0
        check_bytes(engine, "store")
    assert {(answer.prompt - 1) // (TIMES * BLOCK) for answer in asked.values()} == {3}

    def check_loaded(each: str) -> None:
        answer = engine.ask(each)
        assert (answer.tokens, answer.cached) == (asked[each].tokens, CACHED)
        check_bytes(engine, "load")

    engine.forget_device()
    for each in asked:
        check_loaded(each)

    good(engine.sleep())
    good(engine.wake())
    # Sleep keeps no block: what is asked now is computed, stored and loaded anew.
    again = list(asked)[-5:]
    for each in again:
        answer = engine.ask(each)
        assert (answer.tokens, answer.cached) == (asked[each].tokens, 0)
        check_bytes(engine, "store")
    engine.forget_device()
    for each in again:
        check_loaded(each)

    (state,) = engine.copy_states()
    assert (state["engine"], state["memory faults"]) == (name, 0)
    assert ("packets" in state["moved"]) == (name == "rect")
    failures = [key for key in engine.wait_for_counters(before) if "failures" in key[0]]
    assert not failures


def test_by_default_batches_are_taken_where_little_is_left(engine):
    said = len(engine.said())
    engine.rpc("use_release", profile="7.16")
    each = next(prompts)
    right = engine.ask(each)
    engine.forget_device()
    assert engine.ask(each).tokens == right.tokens
    lines = engine.said()[said:].splitlines()
    (line,) = [each for each in lines if "KV copy engine" in each]
    assert "INFO" in line and "batch (asked for: auto, by default)" in line
    assert f"chunks have {CHUNK_MIB} MiB" in line
