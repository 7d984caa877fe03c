# SPDX-License-Identifier: Apache-2.0
"""Ranks that run the real vLLM of one base, with the series applied."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fetch_sdist
import pytest
import requests

from vllm_rocm_memory import serve
from vllm_rocm_memory.series import operations, verification
from vllm_rocm_memory.series.definition import load
from vllm_rocm_memory.series.target import Target
from vllm_rocm_memory.sim.demo_model import write_demo_model

from .ranks import Ranks
from .rocm_machine import ENVIRONMENT

# Of this checkout, and kept.
CACHE = fetch_sdist.CACHE.parent
BASES = ("0.32.0", "0.33.0")
_SECONDS = 120  # for the first function, which imports vLLM


@dataclass(frozen=True)
class Base:
    """Two ranks of vLLM, each with a GPU that vLLM takes for an MI300X.

    Attributes:
        version: Of vLLM.
        package: The `vllm` that the ranks import, with the series applied.
        model: The demo model.
        ranks: The processes.
    """

    version: str
    package: Path
    model: Path
    ranks: Ranks

    def run(self, function: str, *arguments: object) -> list[Any]:
        """Runs `module:function` of these tests, with the model as first argument."""
        return self.ranks.run(
            f"tests.distributed.{function}", self.model, *arguments, timeout=_SECONDS
        )


@pytest.fixture(scope="session")
def released_tree() -> Callable[[str], Path]:
    """A version's package as released; not to be changed."""

    def unpack(version: str) -> Path:
        try:
            return fetch_sdist.unpack(version) / "vllm"
        except requests.ConnectionError:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"vllm {version} is not in .cache, and no index is in reach")

    return unpack


@pytest.fixture(scope="session", autouse=True)
def begun_bases(
    request: pytest.FixtureRequest, released_tree: Callable[[str], Path]
) -> Iterator[dict[str, Future[Base]]]:
    """What is asked for starts side by side, and beside tests that ask for none."""
    wanted = {
        item.callspec.params["base"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path.parent == Path(__file__).parent
        and "base" in item.fixturenames
    }
    if not serve.is_cpu_build():
        wanted = set()
    # A rank ends with the thread that has started it: these stay to the end.
    with ThreadPoolExecutor(len(BASES)) as pool:
        begun = {each: pool.submit(_begin, each, released_tree) for each in wanted}
        yield begun
        for future in begun.values():
            if future.exception() is None:
                future.result().ranks.stop()


def _begin(version: str, released_tree: Callable[[str], Path]) -> Base:
    is_installed = version == importlib.metadata.version("vllm").partition("+")[0]
    tree = None if is_installed else _lay_out(version, released_tree(version))
    package = _installed() if tree is None else tree / "vllm"
    model = write_demo_model(CACHE / "demo-model")
    ranks = Ranks(tree=tree, environment=ENVIRONMENT)
    ranks.run("tests.distributed.rocm_machine:start", timeout=_SECONDS)
    return Base(version, package, model, ranks)


@pytest.fixture(scope="session", params=BASES)
def base(
    request: pytest.FixtureRequest, begun_bases: dict[str, Future[Base]]
) -> Iterator[Base]:
    if not serve.is_cpu_build():
        pytest.skip("the simulator runs with vLLM's CPU build")
    base = begun_bases[request.param].result()
    yield base
    base.ranks.stop()


def _installed() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _lay_out(version: str, released: Path) -> Path:
    """A folder to import `vllm` from, which is kept and brought up to date."""
    tree = CACHE / "patched" / f"vllm-{version}"
    if not tree.exists():
        draft = tree.with_name(f"{tree.name}-{os.getpid()}")
        shutil.copytree(released, draft / "vllm")
        try:
            draft.rename(tree)
        except OSError:  # another process was first
            shutil.rmtree(draft)
    target, series = Target.find(tree), load()
    if not all(row.settled for row in operations.status(target, series)):
        with pytest.MonkeyPatch.context() as patch:
            # The ranks import what it would import, and say so if they cannot.
            patch.setattr(verification, "import_failures", lambda target, modules: {})
            operations.apply(target, series)
    return tree
