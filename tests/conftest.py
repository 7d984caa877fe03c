# SPDX-License-Identifier: Apache-2.0
"""Gives each test the marker of its file's partition, and skips what cannot run here.

The partitions are in `partitions.toml`, and which machine each needs in
`tools/partitions.py`.
"""

import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from partitions import Machine, Partitions

TESTS = Path(__file__).parent
PARTITION = {
    file: name for name, files in Partitions.read(TESTS).files.items() for file in files
}

# asked only when a test that needs a GPU is about to run
machine = cache(Machine.seen_by_torch)


def _partition(item: pytest.Item) -> str:
    # a file in none is named by setup/test_partitions.py
    return PARTITION.get(item.path.relative_to(TESTS).as_posix(), "cpu")


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(_partition(item))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    partition = _partition(item)
    if partition != "cpu" and (reason := machine().lacks(partition)):
        pytest.skip(reason)


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a few MiB, which takes seconds to make."""
    from vllm_rocm_memory.sim.demo_model import write_demo_model

    return write_demo_model(tmp_path_factory.mktemp("models") / "demo")


@pytest.fixture
def simulated_allocator() -> Iterator[Any]:
    """One under PyTorch's pools on the simulated device of HIP, and emptied."""
    import torch
    from vllm.device_allocator.cumem import CuMemAllocator

    from vllm_rocm_memory.sim import hipsim, torch_device

    hipsim.load()
    hipsim.reset("7.2.3")
    hipsim.configure(host_reads="allow", stale_memory="poisoned")
    uninstall = torch_device.install()
    allocator = CuMemAllocator()
    yield allocator
    allocator.release_pools()
    gc.collect()
    torch.accelerator.empty_cache()
    assert allocator.pointer_to_data == {}
    uninstall()
    gc.collect()
    hipsim.reset(hipsim.PROFILES[-1])
    hipsim.assert_clean()
