# SPDX-License-Identifier: Apache-2.0
"""What the tests of the simulated device share."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

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
    if any(before):  # of a test before, and not to go during this one
        gc.collect()
        before = live()
    yield
    hipsim.reset()
    if live() != before:
        gc.collect()
    assert live() == before


class Started(Protocol):
    """What a module needs and what takes long to start."""

    def kill(self) -> None: ...


AHEAD = 2
"""How many servers start while a module runs: the tests leave a core idle at times."""


class StartedBeside:
    """Starts what the next modules need as soon as one has its own.

    A module has a SERVER, which says how its server differs from others, and may be a
    function of a folder that is the server's own; or it has a function `begin`.

    Args:
        modules: In the order of their tests.
        begin: Starts what a module needs.
    """

    def __init__(
        self, modules: list[ModuleType], begin: Callable[[ModuleType], Started]
    ) -> None:
        self._left = modules
        self._begin = begin
        self._begun: dict[ModuleType, Started] = {}

    def begin_next(self) -> None:
        if self._left:
            module = self._left.pop(0)
            self._begun[module] = self._begin(module)

    def take(self, module: ModuleType) -> Any:
        """What was started for it, which is the taker's to end."""
        while module not in self._begun:
            self.begin_next()
        taken = self._begun.pop(module)
        while self._left and len(self._begun) < AHEAD:
            self.begin_next()
        return taken

    def kill(self) -> None:
        """Ends what nobody took."""
        for started in self._begun.values():
            started.kill()


@pytest.fixture(scope="session", autouse=True)
def started_beside(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartedBeside]:
    def begin(module: ModuleType) -> Started:
        folder = tmp_path_factory.mktemp("started")
        model = request.getfixturevalue("demo_model")
        if hasattr(module, "begin"):
            return module.begin(model, folder)
        options = module.SERVER
        options = options(folder) if callable(options) else options
        return ServedEngine(model, folder / "server.log", **options)

    needed = {"served", "begun"}
    modules = [
        item.module
        for item in request.session.items
        if isinstance(item, pytest.Function) and needed & {*item.fixturenames}
    ]
    beside = StartedBeside([*dict.fromkeys(modules)], begin)
    if serve.is_cpu_build():
        beside.begin_next()
    yield beside
    beside.kill()


@pytest.fixture(scope="module")
def begun(
    request: pytest.FixtureRequest, cpu_build: None, started_beside: StartedBeside
) -> Iterator[Any]:
    """What the module's function `begin` has started."""
    begun = started_beside.take(request.module)
    yield begun
    begun.kill()


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, cpu_build: None, started_beside: StartedBeside
) -> Iterator[KnownPrompts]:
    """One server for the module."""
    with started_beside.take(request.module) as engine:
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
