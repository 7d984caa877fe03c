# SPDX-License-Identifier: Apache-2.0
"""What every engine of `sleep_engine.py` has to have done, on each of its ranks."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from .children import ENGINE, environment, python, run
from .ranks import RANKS
from .sleep_engine import WORDS

PROGRAM = Path(__file__).with_name("sleep_engine.py")
SECONDS = 540
# Of the device, that the driver may take for host memory which a first sleep registers.
TAKEN = 32 << 20

GIB = 1 << 30
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


def in_memory(ranks: int = 1) -> dict[str, Any]:
    """More of them: a KV cache that every prompt fits into."""
    return {"kv_cache_memory_bytes": GIB // ranks}


def with_kv_offload(ranks: int = 1) -> dict[str, Any]:
    """More of them: a KV cache of a few blocks, so prompts come back from the host."""
    return {
        "kv_cache_memory_bytes": 40 * BLOCK_BYTES // ranks,
        "kv_transfer_config": {
            "kv_connector": "SimpleCPUOffloadConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": 64 << 20,
                "copy_engine": "rect",
            },
        },
    }


ENGINES = {"in memory": in_memory, "with KV offload": with_kv_offload}

FAULTS = ("no room", "another handle", "in parts")
"""That make a wake fail on one rank, as `sleep_engine.py` names them."""

Report = dict[str, Any]


def report_of(
    folder: Path,
    model: Path,
    options: Mapping[str, Any],
    rounds: int = 2,
    seconds: float = SECONDS,
    **variables: str,
) -> Report:
    """Run an engine in a process of its own, and return what it says."""
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "report.json"
    run(
        python(PROGRAM, model, result, json.dumps(OPTIONS | dict(options)), rounds),
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
    assert held["rest_bytes"] > 0, "a context at least"
    assert held["graph_pool_bytes"] == 0, "the graphs sleep"
    assert (held["others_bytes"] is None) == (held["others_unknown"] is not None)


def assert_device_gives_back(
    report: Report, taken: int = TAKEN, ranks_share: bool = False
) -> None:
    """What sleeps goes from the device, and nothing else does.

    Args:
        report: Of an engine of which more sleeps than the driver may take meanwhile.
        taken: Bytes of the device that the driver may take for each rank.
        ranks_share: A device, so that each rank sees the others' memory go, too.
    """
    own = [sum(mapped.values()) for mapped in report["mapped"]]
    gone = [sum(own)] * len(own) if ranks_share else own
    taken *= len(own) if ranks_share else 1
    assert all(each > 2 * taken for each in gone), "or the next lines show nothing"
    for cycle in report["cycles"]:
        for given_back, expected in zip(cycle["given back"], gone, strict=True):
            assert given_back >= expected - taken, cycle["name"]
        for told, before, all_gone, of_rank in zip(
            cycle["reports"], cycle["reports before"], gone, own, strict=True
        ):
            awake, held = (each["now"]["device"] for each in (before, told))
            # What nobody lists does not sleep, so tags that it hid would show.
            others = unlisted(awake) - unlisted(held)
            assert abs(others - (all_gone - of_rank)) <= taken, cycle["name"]


def unlisted(device: Mapping[str, Any]) -> int:
    """Bytes that neither the allocator nor PyTorch of the rank has."""
    return int(device["rest_bytes"]) + int(device["others_bytes"] or 0)


def assert_answers_are_the_same(report: Report) -> None:
    """After each cycle, and not without the weights, which is the control.

    Random weights need not answer each prompt differently: that depends on the GPU's
    rounding. Not run on AMD hardware so far.
    """
    first = report["answers"]
    assert len(set(map(tuple, first["cached"]))) > 1
    for cycle in report["cycles"]:
        assert_same(cycle["answers"], first, cycle["name"])
    assert report["without weights"]["cached"] != first["cached"]


def assert_same(answers: Report, first: Report, what: object) -> None:
    """Answers to the same prompts, whichever way their blocks came."""
    for kind in ("computed", "cached", "again"):
        assert answers[kind] == first[kind], (what, kind)


def assert_blocks_come_back(report: Report, from_host: bool) -> None:
    """From the host to every rank, before any sleep and after each cycle, or never."""
    for answers in (report["answers"], *(each["answers"] for each in report["cycles"])):
        assert {loads > 0 for loads in answers["loads"]} == {from_host}


def assert_ranks_agree_on_failed_wakes(
    report: Report, ranks_share: bool = False, faults: Collection[str] = FAULTS
) -> None:
    """The engine sleeps on, says whose wake failed, and the next wake wakes all.

    Args:
        report: Of an engine of several ranks.
        ranks_share: A GPU: one that is full for one rank is so for all.
        faults: Those that are looked at.
    """
    whole, first = report["mapped"], report["answers"]
    found = [told for told in report["failed wakes"] if told["name"] in faults]
    assert {told["name"] for told in found} == {*faults}
    for told in found:
        what = told["name"], told["rank"]
        fail = {told["rank"]}
        if told["name"] == "no room" and ranks_share:
            fail = {*range(RANKS)}
        assert told["error"], what
        assert f"failed on {len(fail)} of {RANKS} ranks" in told["error"], what
        for rank, mapped in enumerate(told["mapped after the error"]):
            assert (f"rank {rank}: " in told["error"]) == (rank in fail), what
            assert (mapped == {}) == (rank in fail), what
        assert told["is asleep"], what
        assert not told["is asleep at the end"], what
        assert told["mapped"] == whole, what
        assert_same(told["answers"], first, what)


def assert_failed_copies_cost_one_prompt(report: Report) -> None:
    """A copy that failed on one rank has failed: its blocks are not used, on none."""
    known = dict(zip(WORDS, report["answers"]["again"], strict=True))
    told = report["failed copies"]
    assert [(each["direction"], each["rank"]) for each in told] == [
        (direction, rank) for rank in range(RANKS) for direction in ("load", "store")
    ]
    for each in told:
        what = each["direction"], each["rank"]
        others = [count for n, count in enumerate(each["spoiled"]) if n != each["rank"]]
        assert each["spoiled"][each["rank"]] > 0 and not any(others), what
        if each["direction"] == "load":
            assert each["reason"] == "error", what
            assert each["again"] == known[each["word"]], what
            assert each["loads"] == [2] * RANKS, "the next one loads"
        else:
            assert each["again"] == each["computed"], what
            assert each["loads"] == [0] * RANKS, "none of it was in the pool"
