# SPDX-License-Identifier: Apache-2.0
"""The real engine sleeps with its graphs: every place that captures, both levels.

On a GPU, or on the simulator, whose pages hold 0xFF unless somebody cleans them.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_rocm_memory import serve
from vllm_rocm_memory.sim.demo_model import write_demo_model

from .graph_engine import CASES

ENGINE = Path(__file__).with_name("graph_engine.py")
SECONDS = 240


def run(case: str, model: Path, folder: Path, simulated: bool) -> dict[str, Any]:
    result = folder / f"{case}.json"
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_BREAKABLE_CUDAGRAPH": str(int(case == "breakable")),
    }
    environment.pop("NCCL_GRAPH_REGISTER", None)
    if simulated:
        environment |= {
            "HIPSIM_PROFILE": "7.16",
            "HIPSIM_SWITCHES": "stale_memory=poisoned",
        }
        environment.pop("VLLM_TARGET_DEVICE", None)
    dtype = "float32" if simulated else "bfloat16"
    engine = subprocess.run(
        [sys.executable, ENGINE, model, result, dtype, case],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    assert engine.returncode == 0, engine.stdout[-4000:]
    report: dict[str, Any] = json.loads(result.read_text())
    return report


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each engine did; two run at a time, which most machines have room for."""
    simulated = serve.is_cpu_build()
    if not simulated and not torch.cuda.is_available():
        pytest.skip("needs a GPU, or vLLM's CPU build for a simulated one")
    folder = tmp_path_factory.mktemp("graphs")
    model = write_demo_model(folder / "demo")
    with ThreadPoolExecutor(2) as pool:
        running = {
            case: pool.submit(run, case, model, folder, simulated) for case in CASES
        }
        return {case: each.result() for case, each in running.items()}


@pytest.fixture(params=CASES)
def report(request: pytest.FixtureRequest, reports: dict[str, Any]) -> dict[str, Any]:
    return reports[request.param]


def test_graphs_are_replayed(report):
    assert report["replays"] > 0
    for after in report["after"].values():
        assert after["replays"] > report["replays"]


def test_the_pool_is_used_where_it_was_asked_for(reports):
    """And NCCL does not pin its memory, unless the user says so."""
    for case, report in reports.items():
        asked = case != "off"
        assert ("cudagraph" in report["mapped"]) == asked
        assert report["register"] == ("0" if asked else None)
        assert {"weights", "kv_cache"} <= set(report["mapped"])


def test_sleep_takes_everything_and_any_wake_brings_the_graphs(report):
    for after in report["after"].values():
        assert after["asleep"] == {}
        assert after["mapped"] == report["mapped"]
        graphs = report["mapped"].get("cudagraph")
        assert after["weights"].get("cudagraph") == graphs
        assert "kv_cache" not in after["weights"]


def test_answers_are_the_same_after_both_levels(report):
    assert len(set(map(tuple, report["answers"]))) == len(report["answers"])
    for after in report["after"].values():
        assert after["answers"] == report["answers"]


def test_answers_depend_on_the_weights(report):
    """The control: level 2 without a reload."""
    assert report["without weights"] != report["answers"]


def test_every_capture_site_answers_the_same(reports):
    if not serve.is_cpu_build():
        pytest.skip("a GPU's kernels differ between the modes, and round differently")
    answers = [report["answers"] for report in reports.values()]
    assert all(each == answers[0] for each in answers)


def test_sleep_in_process_waits_for_stores(reports):
    """No server's loop has stepped until they have ended."""
    report = reports["off"]
    assert report["stores under way"] or not serve.is_cpu_build()
    assert report["beside stores"] == {}
    assert report["answers after stores"] == report["answers"]
