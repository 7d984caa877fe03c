# SPDX-License-Identifier: Apache-2.0
"""What the tests of the simulated device share."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_rocm_memory import serve
from vllm_rocm_memory.sim import hipsim
from vllm_rocm_memory.sim.demo_model import write_demo_model

from .served_engine import KnownPrompts, ServedEngine


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


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest,
    cpu_build: None,
    demo_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[KnownPrompts]:
    """One server for the module, whose SERVER says how it differs from others.

    It may be a function of a folder that is the server's own.
    """
    folder = tmp_path_factory.mktemp("served")
    options = request.module.SERVER
    options = options(folder) if callable(options) else options
    with ServedEngine(demo_model, folder / "server.log", **options) as engine:
        yield KnownPrompts(engine)


@pytest.fixture
def engine(served: KnownPrompts) -> Iterator[ServedEngine]:
    """The module's server, without a fault before the test and at rest after it."""
    engine = served.engine
    engine.rpc("start_over")
    yield engine
    if engine.process.poll() is None:
        engine.rpc("start_over")
        engine.check_idle()


@pytest.fixture
def known(served: KnownPrompts, engine: ServedEngine) -> KnownPrompts:
    """What the module's server has on its host."""
    return served
