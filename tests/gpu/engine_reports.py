# SPDX-License-Identifier: Apache-2.0
"""What every engine of `sleep_engine.py` has to have done, on each of its ranks."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .children import ENGINE, environment, python, run

PROGRAM = Path(__file__).with_name("sleep_engine.py")
SECONDS = 540
# Of the device, that the driver may take for host memory which a first sleep registers.
TAKEN = 32 << 20

BLOCK = 32  # tokens
# Keys and values of 4 layers, 2 heads, 64 elements each, in bfloat16.
BLOCK_BYTES = 2 * 4 * 2 * 64 * 2 * BLOCK

OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "block_size": BLOCK,
    "attention_config": {"backend": "TRITON_ATTN"},
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL",
        "cudagraph_capture_sizes": [1, 2, 4],
    },
}
"""For `vllm.LLM`: kernels that compile where they run, and graphs of whole steps."""

Report = dict[str, Any]


def report_of(
    folder: Path,
    model: Path,
    options: Mapping[str, Any],
    seconds: float = SECONDS,
    **variables: str,
) -> Report:
    """Run an engine in a process of its own, and return what it says."""
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "report.json"
    run(
        python(PROGRAM, model, result, json.dumps(OPTIONS | dict(options))),
        env=environment(ENGINE, variables),
        seconds=seconds,
    )
    report: Report = json.loads(result.read_text())
    return report


def assert_graphs_sleep(report: Report) -> None:
    """Graphs are in the pool, are replayed, and go and come with it."""
    assert report["register"] == "0", "NCCL would pin captured memory"
    replays = report["answers"]["replays"]
    assert all(count > 0 for count in replays)
    for cycle in report["cycles"]:
        after = cycle["answers"]["replays"]
        assert all(b > a for a, b in zip(replays, after, strict=True)), cycle["name"]
        replays = after


def assert_memory_goes_and_comes(report: Report) -> None:
    """A sleep takes all of it on every rank, and each wake what it is asked for."""
    whole = report["mapped"]
    for mapped in whole:
        assert {"weights", "kv_cache", "cudagraph"} <= set(mapped)
        assert all(mapped.values())
    for cycle in report["cycles"]:
        name = cycle["name"]
        assert cycle["asleep"] == [{} for _ in whole], name
        for given_back, mapped in zip(cycle["given back"], whole, strict=True):
            assert given_back >= sum(mapped.values()) - TAKEN, name
        for part in cycle["partly"]:
            (woken,) = part["tags"]
            waits = {"weights": "kv_cache", "kv_cache": "weights"}[woken]
            for partly, mapped in zip(part["mapped"], whole, strict=True):
                expected = {tag: size for tag, size in mapped.items() if tag != waits}
                assert partly == expected, (name, woken)
        assert cycle["mapped"] == whole, name
        for told, before, mapped in zip(
            cycle["reports"], cycle["reports before"], whole, strict=True
        ):
            assert_report_is_right(told, before, mapped)


def assert_report_is_right(
    told: Report, before: Report, mapped: Mapping[str, int]
) -> None:
    """What a rank says while it is asleep with all that was mapped, and before."""
    assert "unavailable" not in told, told
    freed = told["last_sleep"]["freed"]
    assert {tag: each["device_bytes"] for tag, each in freed.items()} == mapped
    held = told["now"]["device"]
    assert (held["tags"], held["asleep"]) == ({}, mapped)
    awake = before["now"]["device"]
    assert (awake["tags"], awake["asleep"]) == (mapped, {})
    # What nobody lists does not sleep, so tags that it hid would show.
    assert abs(unlisted(held) - unlisted(awake)) <= TAKEN
    assert held["rest_bytes"] > 0, "a context at least"
    assert held["graph_pool_bytes"] == 0, "the graphs sleep"
    assert (held["others_bytes"] is None) == (held["others_unknown"] is not None)


def unlisted(device: Mapping[str, Any]) -> int:
    """Bytes that neither the allocator nor PyTorch has."""
    return int(device["rest_bytes"]) + int(device["others_bytes"] or 0)


def assert_answers_are_the_same(report: Report) -> None:
    """After each cycle, and not without the weights, which is the control.

    Random weights need not answer each prompt differently: that depends on the GPU's
    rounding. Not run on AMD hardware so far.
    """
    first = report["answers"]
    assert len(set(map(tuple, first["cached"]))) > 1
    for cycle in report["cycles"]:
        for kind in ("computed", "cached", "again"):
            assert cycle["answers"][kind] == first[kind], (cycle["name"], kind)
    assert report["without weights"]["cached"] != first["cached"]
