# SPDX-License-Identifier: Apache-2.0
"""A simulated HIP device for the copy path: real calls, streams and memory."""

from __future__ import annotations

import ctypes
import gc
import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.logger
from vllm.platforms import hip_runtime
from vllm.v1.simple_kv_offload import copy_backend, copy_thread, cuda_mem_ops

from vllm_rocm_memory.sim import hipsim, torch_device

from .tickets import PATIENCE


class Rocm:
    """What the copy path sees as the platform, on a machine of any kind."""

    @staticmethod
    def is_rocm() -> bool:
        return True

    @staticmethod
    def set_device(device: torch.device) -> None:
        """The simulated device is every thread's."""


class Device:
    """Memory of the simulated device, and host memory registered with it."""

    def __init__(self) -> None:
        self._hip = hipsim.load()
        self._allocations: list[int] = []
        self._registered: list[torch.Tensor] = []

    def device_tensor(self, size: int) -> torch.Tensor:
        """``size`` zero bytes of device memory."""
        address = ctypes.c_void_p()
        assert self._hip.hipMalloc(ctypes.byref(address), size) == 0
        assert address.value is not None
        self._allocations.append(address.value)
        memory = (ctypes.c_uint8 * size).from_address(address.value)
        return torch.frombuffer(memory, dtype=torch.uint8).zero_()

    def host_tensor(self, size: int) -> torch.Tensor:
        """``size`` zero bytes of registered host memory."""
        tensor = torch.zeros(size, dtype=torch.uint8)
        cuda_mem_ops.pin_tensor(tensor)
        self._registered.append(tensor)
        return tensor

    def close(self) -> None:
        torch_device.synchronize()
        for tensor in self._registered:
            assert self._hip.hipHostUnregister(tensor.data_ptr()) == 0
        for address in self._allocations:
            assert self._hip.hipFree(address) == 0


@pytest.fixture(autouse=True)
def fresh_mem_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process decides once, each test decides anew."""
    monkeypatch.setattr(cuda_mem_ops, "_batch_memcpy", None)
    monkeypatch.setattr(cuda_mem_ops, "_max_batch_descriptors", None)
    monkeypatch.setattr(hip_runtime, "_runtime", None)
    vllm.logger._print_warning_once.cache_clear()


@pytest.fixture
def vllm_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """``caplog`` for vLLM's loggers, which keep their records to themselves."""
    logger = logging.getLogger("vllm")
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, "vllm")
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.propagate = propagates


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm for the copy path, and for nothing else."""
    for module in (cuda_mem_ops, copy_thread):
        monkeypatch.setattr(module, "current_platform", Rocm)


@pytest.fixture(params=hipsim.PROFILES)
def profile(request: pytest.FixtureRequest) -> str:
    """Each HIP release that can be simulated, unless a test names its own."""
    return str(request.param)


@pytest.fixture
def device(
    profile: str, rocm: None, caplog: pytest.LogCaptureFixture
) -> Iterator[Device]:
    """The simulated device in ``profile``; nothing may be left of the test on it."""
    hipsim.load()
    hipsim.reset(profile)
    uninstall = torch_device.install()
    device = Device()
    yield device
    device.close()
    uninstall()
    live = hipsim.stats()
    if live.streams or live.events:
        # Log records hold tracebacks, and those hold streams. A collection takes too
        # long to do it every time.
        caplog.get_records("call").clear()
        gc.collect()
    hipsim.assert_clean()


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The copy thread stops inside its next copy until ``release`` is set."""
    gate = SimpleNamespace(entered=threading.Event(), release=threading.Event())
    copy_blocks = copy_backend.copy_blocks

    def held(*args: Any) -> None:
        gate.entered.set()
        assert gate.release.wait(PATIENCE)
        copy_blocks(*args)

    monkeypatch.setattr(copy_backend, "copy_blocks", held)
    yield gate
    gate.release.set()
