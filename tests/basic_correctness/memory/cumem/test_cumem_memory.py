# SPDX-License-Identifier: Apache-2.0
"""What a device has free while memory sleeps, and after a wake that failed."""

import pytest
import torch
from vllm.device_allocator import cumem

from .tagged import BLOCK, block, holds


def test_sleep_gives_memory_back_and_wake_restores_what_was_kept(allocator, device):
    outside = torch.ones(1024, device=device.type)
    with allocator.use_memory_pool():
        kept = torch.arange(BLOCK // 4, dtype=torch.int32, device=device.type)
        small = [torch.full((1000,), n, device=device.type) for n in range(20)]
    before, right = allocator.mapped_bytes(), kept.to("cpu", copy=True)
    # A driver takes some memory of its own for the first copies and registrations.
    allocator.sleep()
    allocator.wake_up()
    free = torch.accelerator.get_memory_info()[0]
    for _ in range(3):
        allocator.sleep()
        assert allocator.mapped_bytes() == {}
        given_back = torch.accelerator.get_memory_info()[0] - free
        assert given_back == pytest.approx(sum(before.values()), rel=0.1)
        allocator.wake_up()
        assert allocator.mapped_bytes() == before
        assert torch.equal(kept.cpu(), right)
        assert all(holds(tensor, n) for n, tensor in enumerate(small))
        assert holds(outside, 1)


@pytest.mark.parametrize("failing", range(3))
def test_a_wake_that_fails_half_way_can_be_repeated(
    allocator, device, monkeypatch, failing
):
    tensors = [block(allocator, device, "weights", n) for n in range(1, 4)]
    allocator.sleep("weights")
    free, calls = torch.accelerator.get_memory_info()[0], []
    create_and_map = cumem.create_and_map

    def create_or_fail(handle) -> None:
        calls.append(handle)
        if len(calls) == failing + 1:
            raise RuntimeError("no memory for the test")
        create_and_map(handle)

    monkeypatch.setattr(cumem, "create_and_map", create_or_fail)
    with pytest.raises(RuntimeError, match="no memory for the test"):
        allocator.wake_up()
    assert allocator.mapped_bytes() == {}
    assert abs(torch.accelerator.get_memory_info()[0] - free) < BLOCK // 2
    allocator.wake_up()
    assert len(calls) == failing + 1 + 3, "once an allocation"
    for byte, tensor in enumerate(tensors, start=1):
        assert holds(tensor, byte)
