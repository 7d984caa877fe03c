# SPDX-License-Identifier: Apache-2.0
"""Both benchmarks measure on a real GPU, HIP or CUDA."""

from __future__ import annotations

from pathlib import Path

import kv_copy_interference
import sleep_wake

from . import children

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STEPS = ["sleep", "wake weights", "wake kv_cache", "sleep", "wake everything"]


def run(script: str, *options: str) -> None:
    command = children.python(BENCHMARKS / script, *options)
    children.run(command, env=children.environment(), seconds=280)


def test_copies_beside_decode_are_measured(tmp_path) -> None:
    path = tmp_path / "result.json"
    run("kv_copy_interference.py", "--quick", "--json", str(path))
    result, _ = kv_copy_interference.load(path)
    assert set(result["engines"]) == set(kv_copy_interference.ENGINES)
    assert result["engines"]["rect"]["status"] == "measured"
    assert result["engines"]["batch"]["status"] == "measured"
    for name, entry in result["engines"].items():
        if entry["status"] == "skipped":
            assert entry["reason"]
            continue
        assert entry["status"] == "measured", entry["reason"]
        assert entry["round_trip"]["regions"] == 131
        assert entry["round_trip"]["regions_differing"] == 0
        assert entry["round_trip"]["regions_overwritten"] == 0
        cases = [case for case in result["loaded"] if case["engine"] == name]
        assert len(cases) == 4
        assert all(case["bandwidth_gb_per_s"] > 1 for case in cases)
        assert all(case["transfers_count"] >= 10 or case["short"] for case in cases)


def test_sleep_and_wake_are_measured(tmp_path) -> None:
    run(
        "sleep_wake.py",
        *("--sizes", "20x72MiB,300x10KiB,3x1MiB:cudagraph", "--kv-cache", "4GiB"),
        *("--output", str(tmp_path)),
    )
    result, _ = sleep_wake.load(tmp_path / "sleep_wake.json")
    (measured,) = result["runs"]
    assert measured["link"]["reason"] == ""
    steps = measured["steps"]
    assert [step["step"] for step in steps] == STEPS * 3
    for name, figure in sleep_wake.figures_of(result)["installed"].items():
        if name == "wake kv_cache":
            assert figure.rate is None
        else:
            assert 0 < figure.rate < 1.1 * figure.link
