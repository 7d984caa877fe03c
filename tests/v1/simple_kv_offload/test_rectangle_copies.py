# SPDX-License-Identifier: Apache-2.0
"""Blocks as rectangles: what is chosen, what arrives, by which calls, and what fails.

Everything that moves bytes does so through ``build_params`` and ``copy_blocks``,
between memory of the simulated device, laid out as vLLM does it, and the real host
cache.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.simple_kv_offload import cuda_mem_ops, host_cache
from vllm.v1.simple_kv_offload.copy_backend import DmaCopyBackend
from vllm.v1.simple_kv_offload.copy_engine import CopyEngine
from vllm.v1.simple_kv_offload.copy_errors import BatchCopyError
from vllm.v1.simple_kv_offload.cuda_mem_ops import (
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
    build_params,
    copy_blocks,
    describe_copies,
)

from vllm_rocm_memory.sim import hipsim, torch_device

from .tickets import let_go, logged, logged_error

PROFILES = ("7.1", "7.2.3", "7.13", "7.16")
GPU_BLOCKS, CPU_BLOCKS = 12, 9
# Layers and bytes of a page; the second kind is too large for HIP's copy kernels.
KINDS = ((5, 256), (3, 1024))
ILLEGAL_ADDRESS = 700
CPU = torch.device("cpu")


@pytest.fixture
def profile(request: pytest.FixtureRequest) -> str:
    """One release, where a test does not ask for more."""
    return getattr(request, "param", "7.2.3")


each_release = pytest.mark.parametrize("profile", PROFILES, indirect=True)


def _random(size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (size,), dtype=torch.uint8, generator=generator)


class Tiers:
    """A device's KV cache, layer after layer of each kind, and its host cache.

    Args:
        gaps: Bytes of other memory before each layer, 0 for those not named.
    """

    def __init__(
        self,
        device,
        kinds: Sequence[tuple[int, int]] = KINDS,
        gaps: Sequence[int] = (),
    ) -> None:
        starts, end = [], 0
        for kind, (layers, page) in enumerate(kinds):
            for layer in range(layers):
                end += gaps[len(starts)] if len(starts) < len(gaps) else 0
                starts.append((f"kind{kind}.{layer}", page, end))
                end += GPU_BLOCKS * page
        self.memory = device.device_tensor(end)
        self.gpu = {
            name: torch.as_strided(self.memory, (GPU_BLOCKS, page), (page, 1), start)
            for name, page, start in starts
        }
        self.cpu = host_cache.allocate_host_cache(self.gpu, CPU_BLOCKS)
        self.stream = torch_device.Stream()
        self.memory.copy_(_random(end))

    def params(self, direction: str, engine: CopyEngine = CopyEngine.AUTO):
        way = (self.gpu, self.cpu, self.stream, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM)
        if direction == "load":
            way = (self.cpu, self.gpu, self.stream)
        return build_params(*way, direction=direction, engine=engine)

    def move(self, params, src: list[int], dst: list[int]) -> None:
        copy_blocks(src, dst, params)
        self.stream.synchronize()

    def block(self, tier: dict[str, torch.Tensor], number: int) -> bytes:
        return b"".join(bytes(cache[number].numpy()) for cache in tier.values())

    def round_trip(self, engine: CopyEngine = CopyEngine.AUTO) -> None:
        """All blocks that fit to the host, and back to other places."""
        store, load = self.params("store", engine), self.params("load", engine)
        src = [11, 0, 7, 3, 4, 5, 10, 1, 2]
        dst = [4, 8, 0, 1, 2, 3, 7, 6, 5]
        before = [self.block(self.gpu, block) for block in src]
        untouched = self.memory.clone()
        self.move(store, src, dst)
        assert [self.block(self.cpu, block) for block in dst] == before
        assert torch.equal(self.memory, untouched)
        back = [(block + 5) % GPU_BLOCKS for block in src]
        for cache in self.gpu.values():
            cache.zero_()
        between = self.memory.clone()
        self.move(load, dst, back)
        assert [self.block(self.gpu, block) for block in back] == before
        for cache in self.gpu.values():
            for block in set(range(GPU_BLOCKS)) - set(back):
                assert not cache[block].any()
            cache.zero_()
        assert torch.equal(self.memory, between), "written between pages"

    def close(self) -> None:
        # Before the device goes, whoever else knows the dictionaries.
        self.gpu.clear()
        self.cpu.clear()
        vars(self).clear()


@pytest.fixture
def tiers(device) -> Iterator[Tiers]:
    tiers = Tiers(device)
    yield tiers
    tiers.close()


def _pitched(stats) -> dict[str, int]:
    """How many copies each engine made."""
    made: dict[str, int] = {}
    for (engine, _), count in stats.copies.items():
        if count.copies:
            made[engine] = made.get(engine, 0) + count.copies
    return made


# ----- what arrives, and by which calls


@each_release
def test_a_block_is_one_copy_a_page_size_on_every_release(tiers):
    tiers.round_trip()
    stats = hipsim.stats()
    copies = 2 * 9 * len(KINDS)
    assert stats.calls["hipMemcpy2DAsync"] == stats.pitched_copies == copies
    assert stats.pitched_bytes == 2 * 9 * sum(n * page for n, page in KINDS)
    assert _pitched(stats) == {"sdma": copies}
    assert stats.calls["hipMemcpyBatchAsync"] == stats.staged_copies == 0
    assert stats.memory_faults == 0


@each_release
def test_a_batch_is_there_for_who_asks_for_it(tiers):
    assert tiers.params("store", CopyEngine.BATCH).engine is CopyEngine.BATCH
    tiers.round_trip(CopyEngine.BATCH)
    stats = hipsim.stats()
    assert stats.calls["hipMemcpy2DAsync"] == 0
    assert stats.calls["hipMemcpyBatchAsync"] == 2


def test_no_blocks_are_no_call(tiers):
    params = tiers.params("load")
    before = hipsim.stats().calls
    copy_blocks([], [], params)
    assert hipsim.stats().calls == before


def test_lists_of_different_lengths_are_refused(tiers):
    with pytest.raises(ValueError, match="2 source blocks cannot go to 1"):
        copy_blocks([1, 2], [3], tiers.params("load"))


def test_a_block_that_is_named_twice_gets_the_last_source(tiers):
    tiers.move(tiers.params("store"), [3, 5, 6], [1, 1, 0])
    assert tiers.block(tiers.cpu, 1) == tiers.block(tiers.gpu, 5)
    assert tiers.block(tiers.cpu, 0) == tiers.block(tiers.gpu, 6)


def test_pages_that_are_in_no_rectangle_follow_as_a_batch(device):
    tiers = Tiers(device, ((5, 256), (1, 768)))
    tiers.round_trip()
    stats = hipsim.stats()
    assert stats.calls["hipMemcpy2DAsync"] == 2 * 9
    assert stats.calls["hipMemcpyBatchAsync"] == 2
    assert stats.batch_copies == 2 * 9
    tiers.close()


def test_distances_beyond_the_largest_pitch_go_as_boxes(device, monkeypatch):
    limits = replace(cuda_mem_ops.SDMA_LIMITS, max_pitch=1024)
    monkeypatch.setattr(cuda_mem_ops, "SDMA_LIMITS", limits)
    tiers = Tiers(device)
    tiers.round_trip()
    stats = hipsim.stats()
    assert stats.calls["hipMemcpy3DAsync"] == stats.pitched_copies == 2 * 9 * 2
    assert _pitched(stats) == {"sdma": 2 * 9 * 2}
    tiers.close()


def test_the_limits_are_those_of_the_vendor(monkeypatch, tiers):
    """No packet holds pages that are no multiples of 4 bytes; CUDA does not care."""
    memory = torch.zeros(4, 5, 6, dtype=torch.uint8)
    host = torch.zeros(5, 4, 6, dtype=torch.uint8)
    gpu = {str(i): memory[i] for i in range(4)}
    cpu = {str(i): host[:, i] for i in range(4)}
    assert build_params(gpu, cpu, tiers.stream).engine is CopyEngine.BATCH
    resolved = cuda_mem_ops._batch_memcpy
    platform = SimpleNamespace(is_rocm=lambda: False)
    monkeypatch.setattr(cuda_mem_ops, "current_platform", platform)
    monkeypatch.setattr(cuda_mem_ops, "_batch_memcpy", resolved)
    assert build_params(gpu, cpu, tiers.stream).engine is CopyEngine.RECT


# ----- which engine, and what is said of it


def _engine_lines(vllm_log) -> list[tuple[int, str]]:
    return [
        (record.levelno, record.getMessage())
        for record in vllm_log.records
        if "KV copy engine" in record.getMessage()
    ]


def _start(tiers: Tiers, engine: str | None = None) -> str:
    """The label of the metrics, of a backend that has started and ended."""
    transfer = SimpleNamespace(
        kv_connector_extra_config={"copy_engine": engine} if engine else {}
    )
    backend = DmaCopyBackend(SimpleNamespace(kv_transfer_config=transfer))
    streams = torch_device.Stream(), torch_device.Stream()
    backend.init(tiers.gpu, tiers.cpu, CPU, *streams)
    assert backend.shutdown()
    for way, ids in ((backend._store, [0, 5]), (backend._load, [5, 0])):
        copy_blocks(ids, ids[::-1], way.params)
        way.stream.synchronize()
    return backend.copy_engine


REGULAR = (KINDS, ())
# Layers of the first kind lie at odd addresses, which no packet of SDMA's takes.
MOSTLY = (((5, 256), (4, 1024)), (1, 0, 0, 0, 0, 3))
HARDLY = (((3, 1024), (2, 256)), (1, 0, 0, 3))
NOT_HALF = (((4, 512), (4, 400)), (1, 0, 0, 0, 3))
IRREGULAR = (((4, 256),), (1,))
CROSS_LAYER = (((1, 4096),), ())
# Four pages to a rectangle on average, and fewer.
FOUR = (((5, 256), (3, 1024)), ())
FEW = (((4, 256), (3, 1024)), ())


@pytest.mark.parametrize(
    ("asked", "layout", "engine", "words", "warns"),
    [
        (None, REGULAR, "rect", "2 rectangles and 0 pages a block; for", False),
        ("rect", REGULAR, "rect", "2 rectangles and 0 pages a block; for", False),
        ("batch", REGULAR, "batch", "at most 8192 copies a call", False),
        (None, FOUR, "rect", "2 rectangles and 0 pages a block; for", False),
        (None, FEW, "batch", "rectangles of 3.5 pages on average, and fewer", False),
        ("rect", FEW, "rect", "2 rectangles and 0 pages a block; for", False),
        (None, MOSTLY, "rect", "76 % of a block's bytes lie in rectangles", False),
        ("rect", MOSTLY, "rect", "that a packet of the SDMA engines holds", True),
        (None, NOT_HALF, "batch", "43 % of a block's bytes lie in rectangles", False),
        (None, HARDLY, "batch", "14 % of a block's bytes lie in rectangles", False),
        ("rect", HARDLY, "rect", "1 rectangle and 3 pages a block; 14 %", True),
        (None, IRREGULAR, "batch", "0 % of a block's bytes lie in rect", False),
        ("rect", IRREGULAR, "batch", "it wants multiples of 4 bytes", True),
        ("batch", IRREGULAR, "batch", "at most 8192 copies a call", False),
        (None, CROSS_LAYER, "batch", "a block is one contiguous page", False),
        ("rect", CROSS_LAYER, "batch", "a block is one contiguous page", True),
    ],
)
def test_what_copies_a_layout_is_said_once(
    device, vllm_log, asked, layout, engine, words, warns
):
    tiers = Tiers(device, *layout)
    assert _start(tiers, asked) == engine
    ((level, line),) = _engine_lines(vllm_log)
    assert level == (logging.WARNING if warns else logging.INFO)
    who = "kv_connector_extra_config.copy_engine" if asked else "default"
    begin = f"KV copy engine: {engine} (asked for: {asked or 'auto'}, by {who}): "
    assert line.startswith(begin)
    assert words in line
    assert "hipMemcpyBatchAsync, flags 0x0 (copy engines are asked for from" in line
    assert ("hipMemcpy2DAsync" in line) == (engine == "rect")
    pitched = hipsim.stats().pitched_copies
    assert pitched == (4 * line.count("1 rectangle ") + 8 * line.count("2 rectangles"))
    tiers.close()


MODULE = "vllm.v1.simple_kv_offload.pitched_copies"


def _without_the_module(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)


def _without_a_driver(monkeypatch) -> None:
    def submit(table, stream):
        raise RuntimeError("this process has no GPU driver")

    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(submit=submit))


def _in_expandable_segments(monkeypatch) -> None:
    monkeypatch.setattr(cuda_mem_ops, "expandable_segments_enabled", lambda: True)


@pytest.mark.parametrize(
    ("obstacle", "words"),
    [
        (_without_the_module, ["cannot be loaded (", "run `vllm-rocm-memory apply`"]),
        (_without_a_driver, ["find no driver that has them: this process has no GPU"]),
        (
            _in_expandable_segments,
            ["expandable segments are on", "leave expandable_segments out of PYTORCH_"],
        ),
    ],
)
@pytest.mark.parametrize("asked", [None, "rect"])
def test_an_obstacle_is_said_once_with_its_remedy(
    device, monkeypatch, vllm_log, obstacle, words, asked
):
    tiers = Tiers(device)
    obstacle(monkeypatch)
    assert _start(tiers, asked) == "batch"
    ((level, line),) = _engine_lines(vllm_log)
    assert level == (logging.WARNING if asked else logging.INFO)
    for part in words:
        assert part in line
    assert hipsim.stats().pitched_copies == 0
    tiers.round_trip()
    tiers.close()


# ----- where memory ends


def _sleep_mode(monkeypatch, memory: torch.Tensor, chunks: list[int]) -> None:
    """vLLM's allocator of sleep mode, with this memory in chunks of so many bytes."""
    assert sum(chunks) == memory.nbytes
    handle = (0, memory.nbytes, memory.data_ptr(), list(enumerate(chunks)))
    module = ModuleType("vllm.device_allocator.cumem")
    module.CuMemAllocator = SimpleNamespace(
        instance=SimpleNamespace(pointer_to_data={0: SimpleNamespace(handle=handle)})
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)


def _crossed(copies, cuts: Sequence[int]) -> list[int]:
    """Cuts that lie within a copy, between its first byte and its last."""
    table, pages = copies.rectangles.table.astype(np.int64), copies.pages
    spans = []
    for start, pitch, lines in ((0, 4, 6), (1, 5, 7)):
        length = (table[:, 3] - 1) * table[:, pitch] * table[:, lines] + table[:, 2]
        spans += zip(table[:, start], table[:, start] + length, strict=True)
    for start in (pages.dst, pages.src):
        spans += zip(start, start + pages.size, strict=True)
    return [cut for cut in cuts for first, last in spans if first < cut < last]


LAYER = GPU_BLOCKS * 1024


@pytest.mark.parametrize(
    ("layers_per_chunk", "share", "chosen"),
    [
        # Every chunk has four layers whole, or more.
        (4, "", {"rect": 3}),
        (6, "", {"rect": 2}),
        (12, "", {"rect": 1}),
        # Each layer is in a chunk of its own, or in several.
        (1, "0 %", {}),
        (0.5, "0 %", {}),
        # Some pages span two chunks.
        (1.7, "?", None),
    ],
)
@pytest.mark.parametrize("asked", [CopyEngine.AUTO, CopyEngine.RECT])
def test_no_copy_crosses_a_chunk_of_sleep_mode(
    device, monkeypatch, layers_per_chunk, share, chosen, asked
):
    tiers = Tiers(device, ((12, 1024),))
    chunk = int(layers_per_chunk * LAYER)
    whole, rest = divmod(tiers.memory.nbytes, chunk)
    _sleep_mode(monkeypatch, tiers.memory, [chunk] * whole + [rest] * bool(rest))
    ends = tiers.memory.data_ptr() + chunk * np.arange(1, whole + 1)
    params = tiers.params("load", asked)
    remedy = "VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE (MiB, 256 by default)"
    assert (remedy in params.note) == bool(share)
    assert f"chunks have {chunk / 2**20:g} MiB" in params.note or not share
    tiers.round_trip(asked)
    copies = params.plan.copies(range(CPU_BLOCKS), range(CPU_BLOCKS))
    assert not _crossed(copies, ends)
    if chosen is not None:
        assert params.note.startswith(share)
        assert params.engine is (CopyEngine.RECT if chosen else CopyEngine.BATCH)
        assert hipsim.stats().pitched_copies == 2 * 9 * chosen.get("rect", 0)
    tiers.close()


def test_chunks_of_few_layers_are_not_worth_it_by_default(device, monkeypatch):
    tiers = Tiers(device, ((12, 1024),))
    _sleep_mode(monkeypatch, tiers.memory, [2 * LAYER] * 6)
    by_default, by_name = tiers.params("load"), tiers.params("load", CopyEngine.RECT)
    assert by_default.engine is CopyEngine.BATCH
    assert by_default.note.startswith("100 % of a block's bytes lie in rectangles of 2")
    assert "VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE" in by_default.note
    assert (by_name.engine, by_name.note) == (CopyEngine.RECT, "")
    assert "6 rectangles and 0 pages a block" in describe_copies(by_name)
    tiers.close()


def test_chunks_are_not_blamed_for_what_they_do_not_cut(device, monkeypatch):
    tiers = Tiers(device, *IRREGULAR)
    _sleep_mode(monkeypatch, tiers.memory, [tiers.memory.nbytes])
    note = tiers.params("load").note
    assert "it wants multiples of 4 bytes" in note
    assert "VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE" not in note
    tiers.close()


def test_no_copy_crosses_the_end_of_a_registration(device, monkeypatch):
    """Device and host allow only what lies in one of three registered pieces."""
    monkeypatch.setattr(host_cache, "MAX_REGISTRATION_BYTES", 3 * 16384)
    kinds = ((4, 4096),)
    tiers = Tiers(device, kinds)
    assert len(host_cache.registration_ends()) == 3
    params = tiers.params("store")
    assert params.engine is CopyEngine.RECT
    tiers.round_trip()
    assert hipsim.stats().pitched_copies == 2 * 9
    tiers.close()
    assert host_cache.registration_ends() == []


def test_registrations_cut_rectangles_wherever_they_end(device, monkeypatch):
    """Pieces end at blocks; should one end within, its block is copied in parts."""
    tiers = Tiers(device, ((4, 256),))
    inside = tiers.cpu["kind0.2"][3].data_ptr() + 100
    monkeypatch.setattr(cuda_mem_ops, "registration_ends", lambda: [inside])
    params = tiers.params("store", CopyEngine.RECT)
    copies = params.plan.copies(range(5), range(5))
    assert not _crossed(copies, [inside])
    # A page in two pieces, and what is left of its block.
    assert len(copies.pages) >= 2
    assert copies.rectangles.num_bytes + copies.pages.num_bytes == 5 * 4 * 256
    tiers.round_trip()
    tiers.close()


def test_caches_of_their_own_are_not_joined(device):
    """Allocations that lie at one distance by accident, on either side."""
    tiers = Tiers(device, ((4, 4096),))
    apart = {name: device.device_tensor(GPU_BLOCKS * 4096) for name in tiers.gpu}
    apart = {name: memory.view(-1, 4096) for name, memory in apart.items()}
    params = build_params(apart, tiers.cpu, tiers.stream, direction="store")
    assert params.engine is CopyEngine.BATCH
    assert params.note.startswith("0 % of a block's bytes lie in rectangles")
    assert "in the same allocation" in params.note
    tiers.gpu |= apart
    for cache in apart.values():
        cache.copy_(_random(cache.numel()).view_as(cache))
    tiers.round_trip()
    assert hipsim.stats().pitched_copies == 0
    tiers.close()


# ----- errors


@each_release
@pytest.mark.parametrize("direction", ["load", "store"])
def test_each_rectangle_that_fails_is_named(tiers, direction):
    params = tiers.params(direction)
    hip = hipsim.load()
    src, dst = [3, 0, 6], [5, 8, 2]
    blocks = sorted(zip(dst, src, strict=True))
    seen = set()
    for nth in range(1, 7):
        hipsim.fail("hipMemcpy2DAsync", nth, ILLEGAL_ADDRESS)
        with pytest.raises(BatchCopyError) as failed:
            tiers.move(params, src, dst)
        error = failed.value
        assert (error.direction, error.index) == (direction, nth - 1)
        assert (error.error, error.error_name) == (700, "hipErrorIllegalAddress")
        (from_block,), (to_block,) = error.site.src_blocks, error.site.dst_blocks
        assert (to_block, from_block) in blocks
        names = [region.name for region in error.site.regions]
        seen.add((to_block, *names))
        regions = ", ".join(repr(name) for name in names)
        if len(names) > 4:
            regions = f"{names[0]!r} to {names[-1]!r} (5)"
        assert str(error) == (
            f"KV {direction}: hipMemcpy2DAsync returned hipErrorIllegalAddress (700) "
            f"for rectangle {nth - 1} of 6, regions {regions}, "
            f"block {from_block} to {to_block}"
        )
        assert hip.hipGetLastError() == 0
        tiers.stream.synchronize()
    assert len(seen) == 6
    tiers.move(params, src, dst)


def test_what_came_before_a_failed_rectangle_is_copied(tiers):
    hipsim.fail("hipMemcpy2DAsync", 2, ILLEGAL_ADDRESS)
    with pytest.raises(BatchCopyError) as failed:
        copy_blocks([3, 4], [5, 6], tiers.params("store"))
    tiers.stream.synchronize()
    table = tiers.params("store").plan.copies([3, 4], [5, 6]).rectangles
    copied = [bool(tiers.cpu[r.name][5:7].any()) for r in table.locate(0).regions]
    assert copied == [True] * len(copied)
    missing = failed.value.site
    for region in missing.regions:
        assert not tiers.cpu[region.name][missing.dst_blocks[0]].any()
    assert hipsim.stats().pitched_copies == 1


@each_release
def test_a_batch_that_fails_after_the_rectangles_is_named(device, profile):
    tiers = Tiers(device, ((5, 256), (1, 768)))
    params = tiers.params("store")
    hipsim.fail("hipMemcpyBatchAsync", 1, ILLEGAL_ADDRESS)
    with pytest.raises(BatchCopyError) as failed:
        tiers.move(params, [2, 4], [6, 3])
    error = failed.value
    tiers.stream.synchronize()
    assert "KV store: hipMemcpyBatchAsync returned hipErrorIllegalAddr" in str(error)
    if profile in ("7.1", "7.2.3"):
        assert [region.name for region in error.site.regions] == ["kind1.0"]
        assert "copy 0 of 2, region 'kind1.0', blocks 4 to 3" in str(error)
    assert hipsim.stats().pitched_copies == 2
    assert torch.equal(tiers.cpu["kind0.4"][3], tiers.gpu["kind0.4"][4])
    assert not tiers.cpu["kind1.0"].any()
    tiers.close()


def test_a_failed_rectangle_costs_its_own_transfer(tiers, vllm_log):
    backend = DmaCopyBackend()
    streams = torch_device.Stream(), torch_device.Stream()
    backend.init(tiers.gpu, tiers.cpu, CPU, *streams)
    tickets: list = []
    hipsim.fail("hipMemcpy2DAsync", 3, ILLEGAL_ADDRESS)
    for index, blocks in enumerate(([1, 2], [3, 4])):
        backend.launch_copy(blocks, blocks, True, index, tickets)
        tickets[-1][1].wait()
    assert isinstance(tickets[0][1].error, BatchCopyError)
    assert tickets[1][1].error is None
    assert torch.equal(tiers.cpu["kind1.2"][4], tiers.gpu["kind1.2"][4])
    assert "KV store of blocks 1-2 to 1-2 failed: KV store: hipMemcpy2DAsync" in (
        logged_error(vllm_log).getMessage()
    )
    assert len(logged(vllm_log, "ERROR")) == 1
    assert backend.shutdown()
    for _, ticket in tickets:
        let_go(ticket)


# ----- CUDA

ON_CUDA = Path(__file__).with_name("rectangles_on_cuda.py")


def test_on_the_cuda_driver():
    """In a process of its own: a process has one driver."""
    done = subprocess.run(
        [sys.executable, str(ON_CUDA)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "ok"


def test_the_description_says_what_is_called(tiers):
    line = describe_copies(tiers.params("load"))
    assert line.startswith("hipMemcpy2DAsync, 2 rectangles and 0 pages a block; for ")
