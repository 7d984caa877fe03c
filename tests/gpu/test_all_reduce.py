# SPDX-License-Identifier: Apache-2.0
"""Two GPUs: all-reduces in graphs whose memory sleeps.

Memory of the pool that sleeps has no IPC handle, so a capture must not register it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .captured_all_reduce import CYCLES
from .children import ENGINE, LOOPBACK, environment, free_port, python, run, share_gpu
from .ranks import RANKS

pytestmark = pytest.mark.timeout(600)

PROGRAM = Path(__file__).with_name("captured_all_reduce.py")
SECONDS = 300


@pytest.fixture(scope="module")
def ranks(
    reducer_variables: dict[str, str],
    demo_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Any]]:
    """What each rank says."""
    folder = tmp_path_factory.mktemp("ranks")
    results = [folder / f"{rank}.json" for rank in range(RANKS)]
    gpus, port = 1 if share_gpu() else RANKS, free_port()
    run(
        *(
            python(PROGRAM, rank, gpus, port, demo_model, result)
            for rank, result in enumerate(results)
        ),
        env=environment(ENGINE, LOOPBACK, reducer_variables),
        seconds=SECONDS,
    )
    return [json.loads(result.read_text()) for result in results]


def reduced(ranks: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """What each rank says of a kind of all-reduce."""
    reasons = {rank["missing"].get(kind) for rank in ranks}
    if reasons != {None}:
        # AITER's takes the place of vLLM's, which is then missing for a reason.
        replaced = any("aiter" in rank["kinds"] for rank in ranks)
        if kind == "custom" and not replaced:
            assert not any(rank["should reduce"] for rank in ranks), reasons
        pytest.skip("; ".join(sorted(filter(None, reasons))))
    return [rank["kinds"][kind] for rank in ranks]


@pytest.mark.parametrize("kind", ["custom", "nccl", "aiter"])
def test_a_captured_all_reduce_is_exact_after_each_wake(ranks, kind):
    """Levels 1 and 2 in turn, with wakes of everything and in two parts."""
    for told in reduced(ranks, kind):
        assert told["in pool"], "input and result sleep"
        assert told["right"] == [True] * (1 + CYCLES)
    assert all(rank["asleep"] == [True] * CYCLES for rank in ranks)


def test_captures_register_nothing(ranks):
    for rank in ranks:
        assert rank["register"] == "0", "NCCL's own registration"
        assert not rank["registers captures"]
        assert rank["registered"] == 0


def test_a_capture_that_registers_is_noticed(ranks):
    """The control for the test above, in a pool whose memory can be registered."""
    reduced(ranks, "custom")
    for rank in ranks:
        assert rank["buffered"] > 0, "captures were looked at"
        assert rank["control"] > 0
