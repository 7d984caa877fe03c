# SPDX-License-Identifier: Apache-2.0
"""A device for the tests of sleep mode: this machine's GPU, or a simulated one."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from vllm_rocm_memory import serve

# Memory that comes back with its address alone, and memory that the host can read.
PROFILES = ("7.2.3", "7.16")
# Set for the process of one test.
_CHILD = "MEMORY_TEST_PROCESS"


@dataclass(frozen=True)
class Device:
    """Where tensors are made, and what is asked of the driver there.

    Attributes:
        type: As PyTorch has it.
        fill: Writes a byte into device memory, whatever the allocator thinks of it:
            address, byte, number of bytes.
        zeroes: Whether a wake zeroes what it does not restore.
    """

    type: str
    fill: Callable[[int, int, int], object]
    zeroes: bool


def _has_gpu() -> bool:
    return torch.version.cuda is not None or torch.version.hip is not None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        profiles = ("gpu",) if _has_gpu() else PROFILES
        metafunc.parametrize("device", profiles, indirect=True)


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """On a GPU each test has a process, for PyTorch cannot release pools within one."""
    if (
        not _has_gpu()
        or _CHILD in os.environ
        or "device" not in pyfuncitem.fixturenames
    ):
        return None
    # Its exit code without what the end of Python would do to the pools.
    run = (
        "import os, sys, pytest; code = pytest.main(sys.argv[1:]); "
        "sys.stdout.flush(); os._exit(code)"
    )
    process = subprocess.run(
        [sys.executable, "-c", run, "-p", "no:cacheprovider", pyfuncitem.nodeid],
        cwd=pyfuncitem.config.rootpath,
        env={**os.environ, _CHILD: "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    if process.returncode != 0:
        said = process.stdout
        why = [line for line in said.splitlines() if line.startswith("FAILED ")]
        first = why[-1] if why else f"its process ended with {process.returncode}"
        pytest.fail(f"{first}\n{said[-4000:]}{process.stderr[-2000:]}", pytrace=False)
    return True


@pytest.fixture(scope="session")
def little_garbage() -> Iterator[None]:
    """The allocator collects garbage in each call, and vLLM's modules are many."""
    import vllm.compilation.cudagraph_pool
    import vllm.device_allocator.cumem  # noqa: F401

    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def device(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    little_garbage: None,
) -> Iterator[Device]:
    if _has_gpu():
        if not torch.cuda.is_available():
            pytest.skip("PyTorch here is a GPU build, and there is no GPU")
        from vllm.device_allocator import cumem

        fill = cumem.libcudart.cudaMemset
        yield Device("cuda", fill, torch.version.hip is not None)
        return
    if not serve.is_cpu_build():
        pytest.skip("needs a GPU, or vLLM's CPU build for a simulated one")
    from vllm_rocm_memory.sim import hipsim, torch_device

    hipsim.load()
    hipsim.reset(request.param)
    hipsim.configure(host_reads="allow", stale_memory="poisoned")
    _show_rocm(monkeypatch)
    uninstall = torch_device.install()
    yield Device("cpu", hipsim.load().hipMemset, zeroes=True)
    uninstall()
    gc.collect()
    hipsim.reset()
    hipsim.assert_clean()


def _show_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.device_allocator
    from vllm.compilation import cudagraph_pool

    from vllm_rocm_memory.sim.hipsim_platform import HipsimPlatform, RocmView

    for module in (vllm.device_allocator, cudagraph_pool):
        monkeypatch.setattr(module, "current_platform", RocmView(HipsimPlatform()))


@pytest.fixture
def allocator(device: Device) -> Iterator[Any]:
    """The allocator, without anything of a test before, and emptied afterwards."""
    from vllm.device_allocator import get_mem_allocator_instance

    allocator: Any = get_mem_allocator_instance()
    assert allocator.get_current_usage() == 0
    yield allocator
    gc.collect()
    allocator.wake_up()
    if device.type == "cuda":
        return
    allocator.release_pools()
    gc.collect()
    torch.accelerator.empty_cache()
    assert allocator.get_current_usage() == 0
