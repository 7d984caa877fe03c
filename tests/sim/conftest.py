# SPDX-License-Identifier: Apache-2.0
"""What the tests of the simulated device share."""

import gc
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Protocol

import pytest

from vllm_rocm_memory import serve
from vllm_rocm_memory.sim import hipsim

from .served_engine import KnownPrompts, ServedEngine


@pytest.fixture(scope="session")
def cpu_build() -> None:
    """The test needs vLLM's CPU build; a GPU machine's own vLLM is another."""
    if not serve.is_cpu_build():
        pytest.skip("the simulator runs with vLLM's CPU build")


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
    function of a folder that is the server's own; or it has a function `begin`. Modules
    whose SERVER is equal have one server, in turn.

    Args:
        modules: In the order of their tests.
        begin: Starts what a module needs.
    """

    def __init__(
        self, modules: list[ModuleType], begin: Callable[[ModuleType], Started]
    ) -> None:
        # Of each module that is not yet done, the one that what it needs is begun for.
        self._first: dict[ModuleType, ModuleType] = {}
        for module in modules:
            alike = (each for each in self._first if _need_the_same(each, module))
            self._first[module] = next(alike, module)
        self._left = [*dict.fromkeys(self._first.values())]
        self._begin = begin
        self._begun: dict[ModuleType, Started] = {}
        self._taken: set[ModuleType] = set()

    def begin_next(self) -> None:
        if self._left:
            module = self._left.pop(0)
            self._begun[module] = self._begin(module)

    def take(self, module: ModuleType) -> Any:
        """What was started for it, until it is given back."""
        first = self._first[module]
        while first not in self._begun:
            self.begin_next()
        self._taken.add(first)
        while self._left and len(self._begun.keys() - self._taken) < AHEAD:
            self.begin_next()
        return self._begun[first]

    def give_back(self, module: ModuleType) -> None:
        """Ends it, unless another module needs the same."""
        first = self._first.pop(module)
        if first not in self._first.values():
            self._begun.pop(first).kill()

    def kill(self) -> None:
        """Ends what nobody gave back."""
        for started in self._begun.values():
            started.kill()


def _need_the_same(one: ModuleType, other: ModuleType) -> bool:
    servers = [getattr(module, "SERVER", None) for module in (one, other)]
    return isinstance(servers[0], dict) and servers[0] == servers[1]


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
    """What the module's function `begin` has started, or the server of its SERVER."""
    yield started_beside.take(request.module)
    started_beside.give_back(request.module)


@pytest.fixture(scope="module")
def served(begun: ServedEngine) -> KnownPrompts:
    """One server for the module."""
    begun.wait_until_ready()
    return KnownPrompts(begun)


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
