# SPDX-License-Identifier: Apache-2.0
"""CPU tensors in device memory: by scope, by thread, until their last reference."""

import gc
import queue
import threading

import pytest
import torch

from vllm_rocm_memory.sim import hipsim, torch_device

pytestmark = pytest.mark.usefixtures("simulator")

SIZE = 1 << 20


@pytest.fixture(autouse=True)
def base() -> int:
    """Device memory in use before the test."""
    return device_bytes()


def device_bytes() -> int:
    return hipsim.stats().device_bytes


def test_only_what_a_scope_allocates_lies_in_device_memory(base):
    outside = torch.zeros(SIZE, dtype=torch.uint8)
    with torch_device.device_memory():
        inside = torch.zeros(SIZE, dtype=torch.uint8)
        empty = torch.empty(0)
    after = torch.zeros(SIZE, dtype=torch.uint8)
    assert device_bytes() - base == SIZE
    free, total = torch_device.get_memory_info()
    assert total - free >= SIZE
    assert not outside.any() and not inside.any() and not after.any()
    assert empty.numel() == 0


def test_memory_goes_back_where_it_came_from(base):
    with torch_device.device_memory():
        inside = torch.ones(SIZE, dtype=torch.uint8)
        host_view_outlives = torch.ones(SIZE, dtype=torch.uint8)[:7]
    host = torch.ones(SIZE, dtype=torch.uint8)
    with torch_device.device_memory():
        del host  # host memory, though freed inside
    assert device_bytes() - base == 2 * SIZE
    del inside
    assert device_bytes() - base == SIZE, "a view keeps its storage"
    assert host_view_outlives.sum() == 7
    del host_view_outlives
    assert device_bytes() == base


def test_another_thread_is_outside(base):
    made: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
    with torch_device.device_memory():
        thread = threading.Thread(
            target=lambda: made.put(torch.zeros(SIZE, dtype=torch.uint8))
        )
        thread.start()
        thread.join(10)
    assert device_bytes() == base
    assert made.get(timeout=10).numel() == SIZE


def test_any_thread_may_free(base):
    tensors: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()

    def consume() -> None:
        while tensors.get(timeout=30) is not None:
            pass

    threads = [threading.Thread(target=consume) for _ in range(4)]
    for thread in threads:
        thread.start()
    with torch_device.device_memory():
        for _ in range(200):
            tensors.put(torch.ones(4096, dtype=torch.uint8))
    for _ in threads:
        tensors.put(None)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    gc.collect()
    assert device_bytes() == base
    assert hipsim.stats().calls["hipFree"] == 200


def test_scopes_nest(base):
    with torch_device.device_memory():
        with torch_device.device_memory():
            pass
        inside = torch.zeros(SIZE, dtype=torch.uint8)
    assert device_bytes() - base == inside.nbytes


def test_host_memory_within_device_memory(base):
    with torch_device.device_memory():
        with torch_device.host_memory():
            host = torch.zeros(SIZE, dtype=torch.uint8)
            with torch_device.device_memory():
                inside = torch.zeros(SIZE, dtype=torch.uint8)
            host_again = torch.zeros(SIZE, dtype=torch.uint8)
        inside_again = torch.zeros(SIZE, dtype=torch.uint8)
    assert device_bytes() - base == inside.nbytes + inside_again.nbytes
    assert host.nbytes == host_again.nbytes == SIZE


def test_a_scope_ends_when_its_body_raises(base):
    with pytest.raises(KeyError), torch_device.device_memory():
        raise KeyError
    host = torch.zeros(SIZE, dtype=torch.uint8)
    assert device_bytes() == base and host.numel() == SIZE


def test_a_scope_is_entered_once_and_left_in_order():
    outer, inner = torch_device.device_memory(), torch_device.device_memory()
    with pytest.raises(RuntimeError, match="innermost first"):
        outer.__exit__(None, None, None)
    with outer:
        with pytest.raises(RuntimeError, match="entered already"):
            outer.__enter__()
        with inner, pytest.raises(RuntimeError, match="innermost first"):
            outer.__exit__(None, None, None)
        problems: list[str] = []

        def leave() -> None:
            try:
                outer.__exit__(None, None, None)
            except RuntimeError as error:
                problems.append(str(error))

        thread = threading.Thread(target=leave)
        thread.start()
        thread.join(10)
        assert len(problems) == 1


def test_no_room_is_out_of_memory_and_leaves_nothing(base):
    hipsim.fail("hipMalloc", 1, 2)
    with (
        torch_device.device_memory(),
        pytest.raises(torch.OutOfMemoryError, match=f"hipMalloc of {SIZE} bytes"),
    ):
        torch.zeros(SIZE, dtype=torch.uint8)
    assert device_bytes() == base
    with torch_device.device_memory():
        retry = torch.zeros(SIZE, dtype=torch.uint8)
    assert device_bytes() - base == retry.nbytes


def test_a_resized_tensor_stays_on_its_side(base):
    host = torch.zeros(16, dtype=torch.uint8)
    with torch_device.device_memory():
        device = torch.zeros(16, dtype=torch.uint8)
    host.resize_(SIZE)
    assert device_bytes() - base == device.nbytes
