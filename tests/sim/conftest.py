# SPDX-License-Identifier: Apache-2.0
"""What the tests of the simulated device share."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_rocm_memory import serve
from vllm_rocm_memory.sim import hipsim
from vllm_rocm_memory.sim.demo_model import write_demo_model


@pytest.fixture(scope="session")
def cpu_build() -> None:
    """The test needs vLLM's CPU build; a GPU machine's own vLLM is another."""
    if not serve.is_cpu_build():
        pytest.skip("the simulator runs with vLLM's CPU build")


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("models") / "demo")


@pytest.fixture
def simulator() -> Iterator[None]:
    """Fresh switches and counters; fails when the test leaves a handle behind."""

    def live() -> tuple[int, ...]:
        gc.collect()
        now = hipsim.stats()
        return (
            now.streams,
            now.events,
            now.device_allocations,
            now.device_bytes,
            now.registered_ranges,
        )

    hipsim.reset()
    before = live()
    yield
    hipsim.reset()
    assert live() == before
