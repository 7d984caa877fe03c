# SPDX-License-Identifier: Apache-2.0
"""A served engine whose pool is a file, and copies from and to it that fail."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .served_engine import BLOCK_BYTES, ServedEngine, fresh_prompts

SLOTS = 200
FILE = "kv.rank_0"
fresh = fresh_prompts()


def SERVER(folder: Path) -> dict[str, Any]:
    extra = {
        "kv_offload_backend": "disk",
        "disk_path": str(folder / "kv"),
        "disk_capacity_bytes": SLOTS * BLOCK_BYTES,
    }
    return {
        "transfer": {"kv_connector_extra_config": extra},
        # Without it vLLM kills its workers at once, and what they made stays.
        "arguments": ["--shutdown-timeout=30"],
    }


@contextmanager
def largest_file(engine: ServedEngine, size: int) -> Iterator[None]:
    """What a full disk is to the worker: no write beyond `size` bytes."""
    (worker,) = (
        process
        for process in engine.family()
        if any(file.path.endswith(FILE) for file in process.open_files())
    )
    limits = resource.prlimit(worker.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, limits)


def test_blocks_come_back_from_the_disk(engine, known):
    file = engine.log.with_name(FILE)
    assert (file.stat().st_mode & 0o777, file.stat().st_size) == (
        0o600,
        SLOTS * BLOCK_BYTES,
    )
    before = engine.copy_counters()
    for _ in known:
        known.check()
    moved = engine.wait_for_counters(before)
    assert moved["copies", "load"] == len(known)
    (state,) = engine.copy_states()
    # Its staging memory is block after block, as the host's tier is.
    assert state["moved"].keys() == {"sdma h2d", "packets"}
    assert state["moved"]["packets"] == state["blocks"]["load"]
    assert ("copy_failures", "load") not in moved


def test_a_failed_load_costs_its_own_request(engine, known):
    before = engine.copy_counters()
    for _ in range(5):
        engine.rpc("fail_copies", way="load")
        answer, _ = known.ask()
        assert answer.status == 500
        known.check()
    moved = engine.wait_for_counters(before)
    assert moved["copy_failures", "load"] == 5
    assert "hipErrorIllegalAddress (700)" in engine.said()


def test_a_failed_store_is_never_served(engine):
    each = next(fresh)
    before = engine.copy_counters()
    engine.rpc("fail_copies", way="store")
    right = engine.ask(each)
    assert right.status == 200
    assert engine.wait_for_counters(before)["copy_failures", "store"] == 1
    engine.check_recomputed_then_loaded(each, right)


def test_a_full_disk_costs_nothing_but_the_blocks(engine, known):
    before = engine.copy_counters()
    new = [next(fresh) for _ in range(3)]
    # Less than where new blocks go; more than the log, which the limit is for too.
    with largest_file(engine, 1 << 20):
        answers = [engine.ask(each) for each in new]
        assert all(answer.ok for answer in answers)
        known.check()
        moved = engine.wait_for_counters(before)
    assert moved["copy_failures", "store"] >= len(new)
    said = "\n".join(line for line in engine.said().splitlines() if "KV" in line)
    assert "EFBIG (27)" in said and "disk_capacity_bytes" in said
    for each, right in zip(new, answers, strict=True):
        engine.check_recomputed_then_loaded(each, right)


def test_the_file_goes_with_the_server(engine, known):
    known.check()
    engine.check_idle()
    assert engine.stop(signal.SIGTERM, 60) == 0
    assert engine.left() == []
    assert not engine.log.with_name(FILE).exists()
