# SPDX-License-Identifier: Apache-2.0
"""The allocator's module where there is no GPU, or no compiled module."""

import importlib.util
import subprocess
import sys
from types import ModuleType

import pytest
from vllm.device_allocator import cumem

from vllm_rocm_memory import serve

CHILD = """
from vllm.device_allocator import cumem, get_mem_allocator_instance

assert not cumem.cumem_available
assert "libcudart" not in vars(cumem)
try:
    cumem.CuMemAllocator.get_instance()
except RuntimeError as error:
    print(error)
assert cumem.CuMemAllocator.instance is None
try:
    cumem.no_such_name
except AttributeError as error:
    assert "no_such_name" in str(error)

# a driver that comes later counts
from vllm_rocm_memory.sim import hipsim
hipsim.load()
assert cumem.cumem_available
assert cumem.unavailable_reason() is None
assert cumem.CuMemAllocator.get_instance() is cumem.CuMemAllocator.get_instance()
cumem.CuMemAllocator.instance.close()
"""


def test_without_a_driver() -> None:
    if not serve.is_cpu_build():
        pytest.skip("here is a driver")
    command = [sys.executable, "-c", CHILD]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr
    message = child.stdout.strip().splitlines()[-1]
    assert "sleep mode is not available" in message
    assert "driver" in message
    assert "ROCm or CUDA build of PyTorch" in message


def imported_with(
    module: ModuleType | None, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    """The allocator's module anew, in a process with this compiled module."""
    monkeypatch.setitem(sys.modules, "vllm.cumem_allocator", module)
    spec = importlib.util.spec_from_file_location("another_cumem", cumem.__file__)
    assert spec is not None and spec.loader is not None
    another = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(another)
    return another


def test_without_the_compiled_module(monkeypatch: pytest.MonkeyPatch) -> None:
    another = imported_with(None, monkeypatch)
    assert not another.cumem_available
    with pytest.raises(RuntimeError, match="vllm-rocm-memory apply"):
        another.CuMemAllocator.get_instance()


def test_with_another_compiled_module(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = ModuleType("vllm.cumem_allocator")
    theirs.__file__ = "/site-packages/vllm/cumem_allocator.abi3.so"
    theirs.init_module = theirs.python_create_and_map = print  # type: ignore[attr-defined]
    another = imported_with(theirs, monkeypatch)
    assert not another.cumem_available
    with pytest.raises(RuntimeError, match=r"abi3\.so.*vllm-rocm-memory apply"):
        another.CuMemAllocator.get_instance()
