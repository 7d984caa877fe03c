# SPDX-License-Identifier: Apache-2.0
"""The engines of test_sleep_graphs.py, which take longer than any test beside them."""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_rocm_memory import serve
from vllm_rocm_memory.sim.demo_model import write_demo_model

from .graph_engine import CASES

ENGINE = Path(__file__).with_name("graph_engine.py")
TESTS = "test_sleep_graphs.py"
SECONDS = 600  # of which a test waits no more than its own limit

Report = dict[str, Any]


class GraphEngines:
    """One for each of `CASES`; two run at a time, which most machines have room for.

    Args:
        folder: For their model and their reports.
        nice: Whether they give way to other processes.
    """

    def __init__(self, folder: Path, nice: bool) -> None:
        self._folder = folder
        self._command = [*(["nice"] if nice else []), sys.executable, str(ENGINE)]
        self._model = write_demo_model(folder / "demo")
        self._running: set[subprocess.Popen[str]] = set()
        self._pool = ThreadPoolExecutor(2)
        self._reports: dict[str, Future[Report]] = {
            case: self._pool.submit(self._run, case) for case in CASES
        }

    def reports(self) -> dict[str, Report]:
        """What each engine did."""
        return {case: each.result() for case, each in self._reports.items()}

    def end(self) -> None:
        """Ends those that nobody waits for any more."""
        for each in self._reports.values():
            each.cancel()
        for engine in [*self._running]:
            engine.kill()
        self._pool.shutdown()

    def _run(self, case: str) -> Report:
        result = self._folder / f"{case}.json"
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_BREAKABLE_CUDAGRAPH": str(int(case == "breakable")),
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }
        environment.pop("NCCL_GRAPH_REGISTER", None)
        simulated = serve.is_cpu_build()
        if simulated:
            environment |= {
                "HIPSIM_PROFILE": "7.16",
                "HIPSIM_SWITCHES": "stale_memory=poisoned",
            }
            environment.pop("VLLM_TARGET_DEVICE", None)
        dtype = "float32" if simulated else "bfloat16"
        with subprocess.Popen(
            [*self._command, str(self._model), str(result), dtype, case],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as engine:
            self._running.add(engine)
            try:
                said, _ = engine.communicate(timeout=SECONDS)
            finally:
                engine.kill()
                self._running.discard(engine)
        assert engine.returncode == 0, said[-4000:]
        report: Report = json.loads(result.read_text())
        return report


STARTED = pytest.StashKey[GraphEngines]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts these tests last, so that the engines run beside all others."""
    items.sort(key=lambda item: item.path.name == TESTS)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts the engines where they have the machine's cores to themselves.

    They are simulated there; on a GPU they would take its memory from other tests.
    """
    files = {item.path.name for item in session.items}
    if session.config.option.collectonly or TESTS not in files:
        return
    if not serve.is_cpu_build():
        return
    folder = tempfile.TemporaryDirectory()
    session.config.add_cleanup(folder.cleanup)
    engines = GraphEngines(Path(folder.name), nice=files != {TESTS})
    session.config.add_cleanup(engines.end)
    session.config.stash[STARTED] = engines


@pytest.fixture(scope="session")
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Report]:
    """What each engine did, by its case."""
    started = request.config.stash.get(STARTED, None)
    if started:
        return started.reports()
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, or vLLM's CPU build for a simulated one")
    engines = GraphEngines(tmp_path_factory.mktemp("graphs"), nice=False)
    request.addfinalizer(engines.end)
    return engines.reports()


@pytest.fixture(params=CASES)
def report(request: pytest.FixtureRequest, reports: dict[str, Report]) -> Report:
    return reports[request.param]
