# SPDX-License-Identifier: Apache-2.0
"""The allocator on a simulated GPU."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from vllm.device_allocator.cumem import CuMemAllocator

from vllm_rocm_memory import serve

from .simulated_gpu import (
    IS_HIP,
    PIECE,
    PROFILES,
    STRICT,
    Torch,
    build_trampoline,
    injected,
    memory_info,
    simulator,
)
from .world import World

ON_CUDA_TOO = (
    "test_allocator_faults.py",
    "test_allocator_frees.py",
    "test_allocator_sequences.py",
    "test_host_memory.py",
    "test_memory_pressure.py",
    "test_reported_sleep_failures.py",
    "test_sleep_progress.py",
    "test_sleep_report.py",
    "test_worker_reports.py",
)


class CudaColumn(NamedTuple):
    """A run of `ON_CUDA_TOO` over the CUDA driver's functions, and what it says."""

    process: subprocess.Popen[bytes]
    output: Path


@pytest.fixture(scope="session", autouse=True)
def cuda_column(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CudaColumn | None]:
    """Runs beside the other tests of this folder where its result is asked for."""
    asked = any(item.name == "test_on_cuda" for item in request.session.items)
    if not (asked and IS_HIP and serve.is_cpu_build()):
        yield None
        return
    output = tmp_path_factory.mktemp("cuda") / "output"
    files = [Path(__file__).parent / file for file in ON_CUDA_TOO]
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", *files],
            env=os.environ | {"CUMEM_TEST_VENDOR": "cuda"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    yield CudaColumn(process, output)
    process.kill()
    process.wait()


@pytest.fixture(scope="session")
def module() -> ModuleType:
    """The compiled module, on the simulator that CUMEM_TEST_VENDOR names."""
    if not serve.is_cpu_build():
        pytest.skip("a process with a GPU's own driver does not use the simulator's")
    simulator.load()
    from vllm.device_allocator import cumem

    assert cumem.cumem_available, cumem.unavailable_reason()
    assert Path(cumem._module.driver().path).samefile(simulator.library_path())
    return cumem._module


@pytest.fixture(scope="module")
def little_garbage() -> Iterator[None]:
    """The allocator collects garbage in each call, and much is there by now."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def trampoline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `build_trampoline` has built."""
    return build_trampoline(tmp_path_factory.mktemp("allocator_calls"))


@pytest.fixture(scope="session")
def libc_double(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a library for LD_PRELOAD, `libc_double.cpp`."""
    library = tmp_path_factory.mktemp("double") / "libc_double.so"
    source = Path(__file__).parent / "native" / "libc_double.cpp"
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, "-std=c++17", "-shared", "-fPIC", source, "-ldl"]
    subprocess.run([*command, "-o", library], check=True, timeout=120)
    return os.fspath(library)


@pytest.fixture(scope="session")
def torch_side(module: ModuleType, trampoline: Path) -> Torch:
    return Torch(module, trampoline)


@pytest.fixture
def profile(request: pytest.FixtureRequest) -> str:
    """The release that is simulated; the newest unless a test asks for another."""
    return getattr(request, "param", PROFILES[-1])


@pytest.fixture
def world(
    module: ModuleType,
    torch_side: Torch,
    little_garbage: None,
    profile: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[World]:
    """An allocator without allocations, of which nothing may be left at the end."""
    monkeypatch.setenv("VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE", "1")
    monkeypatch.setattr(torch.accelerator, "synchronize", torch_side.synchronize)
    monkeypatch.setattr(torch.accelerator, "empty_cache", torch_side.empty_cache)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", memory_info)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", torch_side.memory_snapshot)
    # Backups of a few MiB in several pieces, which threads prepare.
    small = partial(module.HostArena, piece_size=PIECE)
    monkeypatch.setattr(module, "HostArena", small)
    simulator.reset(profile)
    simulator.configure(**STRICT)
    world = World(module, torch_side)
    yield world
    simulator.reset(PROFILES[-1])
    world.free_all()
    gc.collect()
    world.check_nothing_left()


@pytest.fixture
def allocator(
    module: ModuleType, simulated_allocator: CuMemAllocator
) -> CuMemAllocator:
    return simulated_allocator


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if injected:
        releases = ", ".join(f"{name}: {count}" for name, count in injected.items())
        terminalreporter.write_line(
            f"{injected.total()} driver calls of the allocator were made to fail, each "
            f"in a run of its own ({releases})"
        )
