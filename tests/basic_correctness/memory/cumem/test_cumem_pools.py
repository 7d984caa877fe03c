# SPDX-License-Identifier: Apache-2.0
"""Tagged memory sleeps, wakes and is discarded: tensors of PyTorch's own pools."""

import gc

import pytest
import torch
from vllm.device_allocator import cumem
from vllm.device_allocator.sleep_mode_backend import CuMemBackend

from .tagged import BLOCK, block, holds

POISON = 0xA5


def test_discard_takes_one_tag_and_leaves_the_others(allocator, device):
    weights = block(allocator, device, "weights", 1)
    cache = block(allocator, device, "kv_cache", 2)
    allocator.discard("kv_cache")
    assert allocator.mapped_bytes() == {"weights": BLOCK}
    assert holds(weights, 1)
    allocator.wake_up()
    assert allocator.mapped_bytes() == {"weights": BLOCK, "kv_cache": BLOCK}
    cache.fill_(3)
    allocator.sleep("weights")
    allocator.wake_up()
    assert holds(weights, 1)
    if device.zeroes:
        assert holds(cache, 0)


@pytest.mark.parametrize("tag", ["workspace", "runtime", None])
def test_every_wake_brings_what_cannot_be_deferred(allocator, device, tag):
    block(allocator, device, "weights", 1)
    internal = block(allocator, device, tag, 2)
    cache = block(allocator, device, "kv_cache", 3)
    name = tag or allocator.default_tag
    allocator.sleep(offload_tags=(name,))
    allocator.wake_up(tags=["kv_cache"])
    assert set(allocator.mapped_bytes()) == {name, "kv_cache"}
    assert holds(internal, 2)
    cache.fill_(4)
    allocator.wake_up(tags=["weights"])
    assert holds(cache, 4), "a wake leaves alone what is awake"


@pytest.mark.parametrize("level", [1, 2])
def test_levels_keep_what_they_say(allocator, device, level):
    """Level 1 keeps weights, level 2 does not; both keep runtime state."""
    with allocator.use_memory_pool("runtime"):
        state = torch.arange(BLOCK // 8, device=device.type)
        cache = block(allocator, device, "kv_cache", 2)
    weights = block(allocator, device, "weights", 1)
    assert set(allocator.mapped_bytes()) == {"runtime", "kv_cache", "weights"}
    backend = CuMemBackend()
    backend.suspend(level=level)
    assert allocator.mapped_bytes() == {}
    backups = {
        data.tag
        for data in allocator.pointer_to_data.values()
        if data.cpu_backup_tensor is not None
    }
    assert backups == ({"runtime", "weights"} if level == 1 else {"runtime"})
    backend.resume()
    assert torch.equal(state.cpu(), torch.arange(BLOCK // 8))
    if level == 1:
        assert holds(weights, 1)
    if device.zeroes:
        assert holds(cache, 0)


@pytest.mark.parametrize("level", [1, 2])
def test_pages_that_nobody_cleaned_are_not_seen(allocator, device, monkeypatch, level):
    """What a wake does not restore is zeroed on ROCm, after it was mapped."""
    weights = block(allocator, device, "weights", 1)
    cache = block(allocator, device, "kv_cache", 2)
    addresses = weights.data_ptr(), cache.data_ptr()
    create_and_map = cumem.create_and_map

    def create_poisoned(handle) -> None:
        create_and_map(handle)
        device.fill(handle[2], POISON, handle[1])

    monkeypatch.setattr(cumem, "create_and_map", create_poisoned)
    CuMemBackend().suspend(level=level)
    CuMemBackend().resume()
    torch.accelerator.synchronize()
    unkept = 0 if device.zeroes else POISON
    assert holds(weights, 1 if level == 1 else unkept)
    assert holds(cache, unkept)
    assert (weights.data_ptr(), cache.data_ptr()) == addresses


@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
def test_a_tag_that_is_entered_again_gives_back_what_is_free(allocator, device, early):
    first = [block(allocator, device, "workspace", 1)]
    if early:
        first.clear()
    second = block(allocator, device, "workspace", 2)
    first.clear()
    gc.collect()
    with allocator.use_memory_pool("workspace"):
        pass
    assert allocator.mapped_bytes() == {"workspace": BLOCK}
    allocator.sleep("workspace")
    allocator.wake_up()
    assert holds(second, 2)


def test_what_is_freed_asleep_does_not_wake(allocator, device):
    kept = block(allocator, device, "weights", 1)
    dropped = [block(allocator, device, "weights", 2)]
    allocator.sleep("weights")
    dropped.clear()
    gc.collect()
    with allocator.use_memory_pool("weights"):
        pass
    allocator.wake_up()
    assert allocator.mapped_bytes() == {"weights": BLOCK}
    assert holds(kept, 1)
