# SPDX-License-Identifier: Apache-2.0
"""The doctor on a machine that has a GPU: what it finds is what the GPU does."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch

from vllm_rocm_memory.sim.demo_model import write_demo_model

from .children import ENGINE, environment, run

# For PyTorch and vLLM, which the probes import in processes of their own.
pytestmark = pytest.mark.timeout(300)

SERVED = (
    "--enable-sleep-mode",
    "--sleep-mode-offload-cudagraph",
    "--dtype=bfloat16",
    "--kv-transfer-config="
    '{"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both", '
    '"kv_connector_extra_config": {"cpu_bytes_to_use": 67108864}}',
)


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = write_demo_model(tmp_path_factory.mktemp("doctor") / "demo")
    # Its exit code says what of the machine is wrong, which is not asked here.
    ask = (
        "import sys; from vllm_rocm_memory import cli\n"
        "try:\n    cli.main()\n"
        "except SystemExit as end:\n    assert end.code in (0, 1), end.code"
    )
    (said,) = run(
        [sys.executable, "-c", ask, "doctor", "--json", str(model), *SERVED],
        env=environment(ENGINE),
        seconds=280,
    )
    return {check["name"]: check for check in json.loads(said)["checks"]}


def test_no_check_crashes(checks):
    crashed = {n: c["summary"] for n, c in checks.items() if c["state"] == "crashed"}
    assert not crashed


def test_the_runtime_is_that_of_pytorch(checks):
    found = checks["hip-runtime"]
    assert found["state"] == "success", found
    assert ("HIP" if torch.version.hip else "CUDA") in found["summary"]
    assert any("lib" in line for line in found["details"])


def test_the_device_can_sleep(checks):
    # Partial on HIP before 7.13, where memory comes back with its address only.
    assert checks["virtual-memory"]["state"] in ("success", "partial")
    assert checks["graph-pool"]["state"] == "success", checks["graph-pool"]


def test_copies_were_tried(checks):
    """On AMD a tracer has to be there to tell engines from kernels."""
    found = checks["copy-engines"]
    expected = ("success", "partial") if torch.version.hip else ("success",)
    assert found["state"] in expected, found
    assert any("rectangles" in line for line in found["details"]), found
