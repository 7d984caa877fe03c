# SPDX-License-Identifier: Apache-2.0
"""Batch copies through HIP: what each release is asked for, and what arrives.

The gates and the bookkeeping need no runtime. Everything that moves bytes does so
through ``build_params`` and ``copy_blocks`` on the simulator, in every release that
it knows.
"""

from __future__ import annotations

import ctypes
import logging
import math
import pickle
import sys
from enum import IntEnum
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.platforms import hip_runtime
from vllm.v1.simple_kv_offload import cuda_mem_ops
from vllm.v1.simple_kv_offload.copy_errors import BatchCopyError, format_blocks
from vllm.v1.simple_kv_offload.copy_plan import CopyPlan, Region
from vllm.v1.simple_kv_offload.cuda_mem_ops import (
    CU_MEMCPY_SRC_ACCESS_ORDER_ANY,
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
    BatchMemcpyParams,
    _copy_flags_for_hip_version,
    _CUmemcpyAttributes,
    _load_hip_runtime,
    _num_attrs_for_hip_version,
    build_params,
    copy_blocks,
    describe_batch_copies,
    pin_tensor,
)

from vllm_rocm_memory.sim import hipsim, torch_device
from vllm_rocm_memory.sim.simulator import Stats

PAGE = 64
UNKNOWN = ctypes.c_size_t(-1).value
INVALID_VALUE = 1
NOT_SUPPORTED = 801


# ----- gates by version


@pytest.mark.parametrize(
    ("version", "flags"),
    [
        (0, 0),  # unknown
        (60_342_134, 0),  # HIP 6.3
        (70_125_424, 0),  # HIP 7.1
        (70_200_000, 0),  # HIP 7.2
        (70_299_999, 0),  # the patch number says nothing about the minor one
        (71_300_000, 0),  # HIP 7.13
        (71_526_333, 0),  # HIP 7.15, which is ROCm 10.0
        (71_599_999, 0),  # the last number that is still 7.15
        (71_600_000, 0x100),  # the first of 7.16, which is ROCm 10.1
        (71_626_361, 0x100),  # HIP 7.16 in vLLM's ROCm image
        (71_700_000, 0x100),  # HIP 7.17, which is ROCm 10.2
        (80_000_000, 0x100),  # HIP 8.0
        # ROCm release numbers are not HIP versions. Written the way HIP writes
        # versions, ROCm 10.0 and 10.1 are HIP 10.0 and 10.1, releases of the future;
        # a bare "7.16" or "10.1" as 716 or 1001 is no version at all.
        (100_000_000, 0x100),
        (100_100_000, 0x100),
        (716, 0),
        (1001, 0),
        (7_160_000, 0),
    ],
)
def test_copy_flags_for_hip_version(version: int, flags: int):
    assert _copy_flags_for_hip_version(version) == flags


@pytest.mark.parametrize(
    ("version", "attributes"),
    [
        (0, 0),  # unknown: every release takes a call without
        (70_125_424, 0),  # 7.1
        (70_200_000, 0),  # 7.2.x answers 801 to attributes
        (70_299_999, 0),
        (71_299_999, 0),  # 7.12 would take them; 7.13 is the agreed gate
        (71_300_000, 1),
        (71_526_333, 1),  # 7.15
        (71_626_361, 1),  # 7.16
        (80_000_000, 1),
    ],
)
def test_number_of_attributes_for_hip_version(version: int, attributes: int):
    assert _num_attrs_for_hip_version(version) == attributes


def test_attributes_have_the_layout_of_both_headers():
    assert ctypes.sizeof(_CUmemcpyAttributes) == 24
    assert ctypes.alignment(_CUmemcpyAttributes) == 4
    offsets = [
        getattr(_CUmemcpyAttributes, n).offset for n, _ in _CUmemcpyAttributes._fields_
    ]
    assert offsets == [0, 4, 12, 20]


# ----- opening the runtime by name


def _loader(monkeypatch: pytest.MonkeyPatch, installed: set[str]) -> list[tuple]:
    calls: list[tuple] = []

    def cdll(name: str, mode: int = ctypes.DEFAULT_MODE) -> str:
        calls.append((name, mode))
        if name not in installed:
            raise OSError(f"no file {name}")
        return f"opened {name}"

    monkeypatch.setattr(cuda_mem_ops.ctypes, "CDLL", cdll)
    return calls


@pytest.mark.parametrize(
    ("installed", "tried"),
    [
        ({"libamdhip64.so", "libamdhip64.so.7"}, ["libamdhip64.so"]),
        ({"libamdhip64.so.7"}, ["libamdhip64.so", "libamdhip64.so.7"]),
        (
            {"libamdhip64.so.6"},
            ["libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"],
        ),
    ],
)
def test_the_runtime_is_opened_by_the_first_name_that_works(
    monkeypatch, installed, tried
):
    calls = _loader(monkeypatch, installed)
    assert _load_hip_runtime() == f"opened {tried[-1]}"
    assert calls == [(name, ctypes.RTLD_GLOBAL) for name in tried]


def test_a_runtime_that_no_name_opens_is_an_error_with_every_reason(monkeypatch):
    calls = _loader(monkeypatch, set())
    with pytest.raises(OSError, match="could not load the HIP runtime") as failed:
        _load_hip_runtime()
    for name, _ in calls:
        assert f"{name}: no file {name}" in str(failed.value)
    assert len(calls) == 3


def test_a_rocm_without_the_batch_copy_is_refused_with_a_remedy(monkeypatch, rocm):
    monkeypatch.setattr(hip_runtime, "_runtime", SimpleNamespace())
    stream = SimpleNamespace(cuda_stream=0)
    with pytest.raises(RuntimeError, match=r"hipMemcpyBatchAsync.*ROCm 7\.1"):
        build_params({}, {}, stream)


# ----- descriptors without a plan


def _plain_params(regions: int, page: int = 512) -> BatchMemcpyParams:
    """Parameters as they are built without ``build_params``: no plan, no memory."""
    return BatchMemcpyParams(
        src_bases=np.zeros(regions, dtype=np.uint64),
        dst_bases=np.zeros(regions, dtype=np.uint64),
        bpb=np.full(regions, page, dtype=np.uint64),
        num_layers=regions,
        attrs=_CUmemcpyAttributes(),
        attrs_idx=ctypes.c_size_t(0),
        num_attrs=1,
        fail_idx=ctypes.c_size_t(0),
        stream_handle=0,
    )


class _Runtime:
    """A batch copy that only notes its calls, and fails where it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int = 0) -> None:
        self.counts: list[int] = []
        self.attributes: list[int] = []
        self.sizes: list[int] = []
        self.dsts: list[int] = []
        self.answer = {}
        monkeypatch.setattr(cuda_mem_ops, "_batch_memcpy", (self, 1))
        monkeypatch.setattr(cuda_mem_ops, "_max_batch_descriptors", most)

    def __call__(self, dst, src, sizes, count, attrs, idxs, attributes, fail, stream):
        call = len(self.counts)
        self.counts.append(count)
        self.attributes.append(attributes)
        array = ctypes.c_uint64 * count
        self.sizes.extend(array.from_address(sizes))
        self.dsts.extend(array.from_address(dst))
        error, index = self.answer.get(call, (0, None))
        if index is not None:
            fail._obj.value = index
        return error


@pytest.mark.parametrize(
    ("most", "regions", "blocks", "counts"),
    [
        (8192, 2, 10_000, [8192, 8192, 3616]),
        (8192, 1, 8192, [8192]),
        (8192, 8193, 1, [8192, 1]),
        (100, 7, 30, [100, 100, 10]),
        (0, 61, 1000, [61_000]),
    ],
)
def test_pages_without_a_plan_are_one_copy_each(
    monkeypatch, most, regions, blocks, counts
):
    runtime = _Runtime(monkeypatch, most)
    ids = list(range(blocks))
    copy_blocks(ids, ids, _plain_params(regions))
    assert runtime.counts == counts
    assert set(runtime.sizes) == {512}
    assert runtime.dsts == [512 * block for block in ids] * regions


def test_no_blocks_are_no_call(monkeypatch):
    runtime = _Runtime(monkeypatch, 8192)
    copy_blocks([], [], _plain_params(4))
    assert runtime.counts == []


@pytest.mark.parametrize(
    ("variable", "is_rocm", "most"),
    [
        (None, True, 8192),
        (None, False, 0),
        ("0", True, 8192),
        ("-5", True, 8192),
        ("100", True, 100),
        ("100", False, 100),
        ("20000", True, 20_000),
    ],
)
def test_the_most_copies_of_a_call(monkeypatch, variable, is_rocm, most):
    platform = SimpleNamespace(is_rocm=lambda: is_rocm)
    monkeypatch.setattr(cuda_mem_ops, "current_platform", platform)
    monkeypatch.delenv("VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS", raising=False)
    if variable is not None:
        monkeypatch.setenv("VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS", variable)
    assert cuda_mem_ops._resolve_max_batch_descriptors() == most


def test_a_limit_that_is_no_number_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS", "many")
    with pytest.raises(ValueError, match=r"MAX_BATCH_DESCRIPTORS must be.*'many'"):
        cuda_mem_ops._resolve_max_batch_descriptors()


# ----- errors


def _planned(params: BatchMemcpyParams, regions: list[Region]) -> BatchMemcpyParams:
    return params._replace(plan=CopyPlan(regions), direction="load")


def test_a_failure_names_the_copy_among_all_of_the_batch(monkeypatch):
    runtime = _Runtime(monkeypatch, most=7)
    runtime.answer = {1: (INVALID_VALUE, 6)}
    regions = [Region(f"layers.{i}", 0, 0, PAGE, PAGE, PAGE) for i in range(3)]
    # Blocks 3 and 4 are one copy in each region, the others one each.
    src, dst = [9, 3, 4, 20, 30, 40], [50, 60, 61, 70, 80, 90]
    with pytest.raises(BatchCopyError) as failed:
        copy_blocks(src, dst, _planned(_plain_params(3), regions))
    error = failed.value
    assert error.direction == "load"
    assert (error.error, error.index) == (INVALID_VALUE, 13)
    assert [region.name for region in error.site.regions] == ["layers.2"]
    assert error.site.src_blocks == range(30, 31)
    assert error.site.dst_blocks == range(80, 81)
    for part in (
        "KV load: cuMemcpyBatchAsync",
        "(1)",
        "copy 13 of 15",
        "'layers.2'",
        "blocks 30 to 80",
    ):
        assert part in str(error)
    assert runtime.counts == [7, 7]
    sizes = [PAGE, 2 * PAGE, PAGE, PAGE, PAGE]
    assert runtime.sizes == (sizes * 3)[:14]
    dsts = [block * PAGE for block in (50, 60, 70, 80, 90)]
    assert runtime.dsts == (dsts * 3)[:14]


def test_a_failure_without_an_index_says_so(monkeypatch):
    runtime = _Runtime(monkeypatch, most=4)
    runtime.answer = {1: (700, None)}
    params = _plain_params(1)
    params.fail_idx.value = 1  # of an earlier batch
    with pytest.raises(BatchCopyError) as failed:
        copy_blocks(list(range(6)), list(range(6)), params)
    assert failed.value.index is None
    assert failed.value.site is None
    words = "copies 4 to 5 of 6, regions without names (the runtime did not say which)"
    assert words in str(failed.value)


def test_an_index_beyond_the_call_is_not_believed(monkeypatch):
    _Runtime(monkeypatch, most=4).answer = {0: (INVALID_VALUE, 4)}
    with pytest.raises(BatchCopyError) as failed:
        copy_blocks(list(range(6)), list(range(6)), _plain_params(1))
    assert failed.value.index is None


def test_an_error_survives_the_way_to_another_process(monkeypatch):
    _Runtime(monkeypatch).answer = {0: (INVALID_VALUE, 1)}
    with pytest.raises(BatchCopyError) as failed:
        copy_blocks([1, 2], [3, 4], _plain_params(1))
    copy = pickle.loads(pickle.dumps(failed.value))
    assert (str(copy), copy.index) == (str(failed.value), 1)


def test_attributes_are_given_up_for_good_when_a_runtime_refuses_them(
    monkeypatch, rocm, vllm_log
):
    runtime = _Runtime(monkeypatch, most=4)
    runtime.answer = {1: (NOT_SUPPORTED, None)}
    monkeypatch.setattr(hip_runtime, "_runtime", SimpleNamespace())
    ids = list(range(10))
    params = _plain_params(1)
    copy_blocks(ids, ids, params)
    copy_blocks(ids[:2], ids[:2], params)
    assert runtime.counts == [4, 4, 4, 2, 2]
    assert runtime.attributes == [1, 1, 0, 0, 0]
    warnings = [r.getMessage() for r in vllm_log.records]
    assert len(warnings) == 1
    assert "refuses attributes (801)" in warnings[0]
    assert "may run as a kernel" in warnings[0]


def test_not_supported_without_attributes_is_an_error(monkeypatch, rocm):
    runtime = _Runtime(monkeypatch)
    runtime.answer = dict.fromkeys(range(3), (NOT_SUPPORTED, None))
    monkeypatch.setattr(hip_runtime, "_runtime", SimpleNamespace())
    for attributes in ([1, 0], [1, 0, 0]):
        with pytest.raises(BatchCopyError) as failed:
            copy_blocks([1], [1], _plain_params(1))
        assert failed.value.error == NOT_SUPPORTED
        assert runtime.attributes == attributes


def test_cuda_keeps_its_attributes(monkeypatch):
    runtime = _Runtime(monkeypatch)
    runtime.answer = {0: (NOT_SUPPORTED, None)}
    with pytest.raises(BatchCopyError):
        copy_blocks([1], [1], _plain_params(1))
    assert runtime.attributes == [1]


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], ""),
        ([4], "4"),
        (range(3, 8), "3-7"),
        ([1, 2, 9, 5], "1-2, 9, 5"),
        (range(0, 40, 2), "0, 2, 4, 6, 8, 10, 12, 14, ... (20 blocks)"),
    ],
)
def test_block_ids_as_text(ids, text):
    assert format_blocks(ids) == text


# ----- bytes, on the simulator


def _pages(memory: torch.Tensor, blocks: int, page: int, stride: int, at: int = 0):
    """``blocks`` pages of a memory, from byte ``at`` on."""
    return torch.as_strided(memory, (blocks, page), (stride, 1), at)


def _random(size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randint(1, 256, (size,), dtype=torch.uint8, generator=generator)


def _copies(stats: Stats, engine: str) -> int:
    return sum(n.copies for (e, _), n in stats.copies.items() if e == engine)


class Tiers:
    """One region of separate pages on the device and on the host.

    The stride is twice the page, so that no two pages become one copy.
    """

    def __init__(self, device, blocks: int, page: int = PAGE) -> None:
        self.blocks, self.page = blocks, page
        self.gpu_memory = device.device_tensor(2 * blocks * page)
        self.cpu_memory = device.host_tensor(2 * blocks * page)
        self.stream = torch_device.Stream()
        self.gpu = {"kv": _pages(self.gpu_memory, blocks, page, 2 * page)}
        self.cpu = {"kv": _pages(self.cpu_memory, blocks, page, 2 * page)}
        self.store = build_params(
            self.gpu,
            self.cpu,
            self.stream,
            CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            direction="store",
        )
        self.load = build_params(self.cpu, self.gpu, self.stream, direction="load")

    def move(self, params, src, dst) -> None:
        copy_blocks(src, dst, params)
        self.stream.synchronize()


@pytest.mark.parametrize("blocks", [0, 1, 8192, 8193, 20_000])
def test_round_trips_return_every_byte(device, blocks):
    tiers = Tiers(device, max(blocks, 1))
    before = _random(tiers.gpu_memory.numel())
    tiers.gpu_memory.copy_(before)
    ids = list(range(blocks))
    shuffled = np.random.default_rng(blocks).permutation(blocks).tolist()

    tiers.move(tiers.store, ids, shuffled)
    stored = hipsim.stats()
    assert stored.calls["hipMemcpyBatchAsync"] == math.ceil(blocks / 8192)
    assert stored.batch_copies == blocks
    assert torch.equal(tiers.cpu["kv"][shuffled], tiers.gpu["kv"][ids])
    assert not tiers.cpu_memory.view(-1, 2, PAGE)[:, 1].any(), "written between pages"

    tiers.gpu_memory.zero_()
    tiers.move(tiers.load, shuffled, ids[::-1])
    pages = _pages(before, max(blocks, 1), PAGE, 2 * PAGE)
    assert torch.equal(tiers.gpu["kv"][ids[::-1]], pages[ids])
    assert not tiers.gpu_memory.view(-1, 2, PAGE)[:, 1].any(), "written between pages"

    loaded = hipsim.stats()
    assert loaded.calls["hipMemcpyBatchAsync"] == 2 * math.ceil(blocks / 8192)
    assert loaded.memory_faults == 0
    assert loaded.staged_copies == 0


@pytest.mark.parametrize("profile", ["7.15"], indirect=True)
def test_without_the_limit_a_large_batch_faults(device, monkeypatch):
    """The control: what the limit of 8192 copies is there for."""
    monkeypatch.setenv("VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS", "20000")
    tiers = Tiers(device, 8193)
    ids = list(range(8193))
    with pytest.raises(RuntimeError):
        tiers.move(tiers.store, ids, ids)
    assert hipsim.stats().memory_faults == 1
    hipsim.reset()


@pytest.mark.parametrize(
    ("profile", "page", "engine"),
    [
        ("7.2.3", 16 * 1024, "blit"),
        ("7.15", 16 * 1024, "blit"),
        ("7.15", 16 * 1024 + 4, "sdma"),
        ("7.16", 64, "sdma"),
        ("7.16", 16 * 1024, "sdma"),
    ],
    indirect=["profile"],
)
def test_which_engine_takes_the_copies(device, page, engine):
    tiers = Tiers(device, 6, page)
    tiers.move(tiers.store, [0, 2, 4], [1, 3, 5])
    tiers.move(tiers.load, [1, 3, 5], [0, 2, 4])
    stats = hipsim.stats()
    assert _copies(stats, engine) == 6
    assert sum(n.copies for n in stats.copies.values()) == 6


@pytest.mark.parametrize("profile", ["7.16"], indirect=True)
def test_without_the_flag_the_copies_are_a_kernel(device, monkeypatch):
    """The control: what the flag of HIP 7.16 is there for."""
    monkeypatch.setattr(cuda_mem_ops, "_copy_flags_for_hip_version", lambda _: 0)
    tiers = Tiers(device, 6)
    tiers.move(tiers.store, [0, 2, 4], [1, 3, 5])
    assert _copies(hipsim.stats(), "blit") == 3


def test_adjacent_blocks_are_one_copy_in_each_region(device):
    blocks = 100
    stream = torch_device.Stream()
    gpu_memory, cpu_memory = device.device_tensor(2 << 20), device.host_tensor(2 << 20)
    gpu_memory.copy_(_random(2 << 20))
    regions = {"a": (4096, 0), "b": (8192, 1 << 20)}
    gpu, cpu = (
        {n: _pages(m, blocks, page, page, at) for n, (page, at) in regions.items()}
        for m in (gpu_memory, cpu_memory)
    )
    copy_blocks(range(10, 90), range(5, 85), build_params(gpu, cpu, stream))
    stream.synchronize()
    assert hipsim.stats().batch_copies == 2
    for name in regions:
        assert torch.equal(cpu[name][5:85], gpu[name][10:90])
        assert not cpu[name][:5].any()
        assert not cpu[name][85:].any()


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_failing_call_of_many_names_its_place(device, profile, call):
    tiers = Tiers(device, 20_000)
    ids = list(range(20_000))
    hipsim.fail("hipMemcpyBatchAsync", call, 700)
    with pytest.raises(BatchCopyError) as failed:
        tiers.move(tiers.store, ids, ids)
    error = failed.value
    assert (error.direction, error.error) == ("store", 700)
    assert error.error_name == "hipErrorIllegalAddress"
    first = 8192 * (call - 1)
    if profile in ("7.1", "7.2.3"):
        # A loop over single copies knows which one failed.
        assert error.index == first
        assert error.site.src_blocks == range(first, first + 1)
        assert f"copy {first} of 20000, region 'kv', blocks {first}" in str(error)
    else:
        assert error.index is None
        assert f"copies {first} to" in str(error)
    assert hipsim.stats().calls["hipMemcpyBatchAsync"] == call
    tiers.stream.synchronize()


@pytest.mark.parametrize("profile", ["7.2.3"], indirect=True)
def test_the_runtimes_own_index_is_counted_over_all_calls(device, monkeypatch):
    """The eleventh copy has no memory behind it, in the third call of four each."""
    monkeypatch.setenv("VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS", "4")
    tiers = Tiers(device, 16)
    ids = [*range(10), 10_000, *range(11, 16)]
    with pytest.raises(BatchCopyError) as failed:
        tiers.move(tiers.load, list(range(16)), ids)
    assert failed.value.index == 15  # sorted by destination, it comes last
    assert failed.value.site.dst_blocks == range(10_000, 10_001)
    tiers.stream.synchronize()


@pytest.mark.parametrize("profile", ["7.2.3"], indirect=True)
def test_a_runtime_that_lies_about_its_version_is_used_without_attributes(
    device, monkeypatch, vllm_log
):
    monkeypatch.setattr(hip_runtime, "runtime_version", lambda lib: 71_626_361)
    tiers = Tiers(device, 8)
    assert tiers.store.num_attrs == 1
    tiers.gpu_memory.copy_(_random(tiers.gpu_memory.numel()))
    tiers.move(tiers.store, [0, 2, 4], [1, 3, 5])
    tiers.move(tiers.load, [1, 3, 5], [7, 0, 1])
    assert torch.equal(tiers.cpu["kv"][[1, 3, 5]], tiers.gpu["kv"][[7, 0, 1]])
    assert hipsim.stats().calls["hipMemcpyBatchAsync"] == 3
    warnings = [r for r in vllm_log.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "HIP 7.16.26361 refuses attributes" in warnings[0].getMessage()


@pytest.mark.parametrize(
    ("profile", "attributes", "flags"),
    [("7.2.3", 0, 0), ("7.15", 1, 0), ("7.16", 1, 0x100)],
    indirect=["profile"],
)
def test_parameters_follow_the_runtimes_version(device, attributes, flags):
    tiers = Tiers(device, 1)
    for params in (tiers.load, tiers.store):
        assert params.num_attrs == attributes
        assert params.attrs.flags == flags
        assert params.stream_handle == tiers.stream.cuda_stream
    assert tiers.load.attrs.srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_ANY
    assert tiers.store.attrs.srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


@pytest.mark.parametrize(
    ("profile", "parts"),
    [
        (
            "7.2.3",
            [
                "flags 0x0 (copy engines are asked for from HIP 7.16",
                "numAttrs 0",
                "HIP 7.2.",
            ],
        ),
        ("7.15", ["flags 0x0 (copy engines are", "numAttrs 1", "HIP 7.15.26333"]),
        (
            "7.16",
            ["flags 0x100 (copy engines preferred", "numAttrs 1", "HIP 7.16.26361"],
        ),
    ],
    indirect=["profile"],
)
def test_the_log_line_says_what_is_used_and_why(device, parts):
    Tiers(device, 1)
    line = describe_batch_copies()
    for part in [*parts, "hipMemcpyBatchAsync", "at most 8192 copies a call"]:
        assert part in line


def test_regions_must_be_the_same_on_both_sides(device):
    stream = torch_device.Stream()
    a, b = torch.zeros(4, 64), torch.zeros(4, 32)
    with pytest.raises(ValueError, match="differ in their regions"):
        build_params({"x": a}, {"y": a}, stream)
    with pytest.raises(ValueError, match=r"region 'x' has blocks of 256 bytes.*of 128"):
        build_params({"x": a}, {"x": b}, stream)


# ----- where mappings end


def _cumem(*handles: tuple) -> ModuleType:
    module = ModuleType("vllm.device_allocator.cumem")
    allocations = {h[2]: SimpleNamespace(handle=h, tag="kv_cache") for h in handles}
    module.CuMemAllocator = SimpleNamespace(
        instance=SimpleNamespace(pointer_to_data=allocations)
    )
    return module


def test_copies_end_where_a_chunk_of_sleep_mode_memory_ends(device, monkeypatch):
    """Three chunks of 1000, 1000 and 2096 bytes; pages of 256 bytes."""
    gpu_memory, cpu_memory = device.device_tensor(4096), device.host_tensor(4096)
    gpu_memory.copy_(_random(4096))
    base = gpu_memory.data_ptr()
    handle = (0, 4096, base, [(1, 1000), (2, 1000), (3, 2096)])
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", _cumem(handle))
    stream = torch_device.Stream()
    gpu = {"kv": _pages(gpu_memory, 16, 256, 256)}
    cpu = {"kv": _pages(cpu_memory, 16, 256, 256)}
    params = build_params(gpu, cpu, stream)
    copies = params.plan.copies(range(16), range(16)).pages
    assert sorted(
        zip((copies.src - np.uint64(base)).tolist(), copies.size.tolist(), strict=True)
    ) == [
        (0, 1000),
        (1000, 1000),
        (2000, 2096),
    ]
    copy_blocks(range(16), range(16), params)
    stream.synchronize()
    assert torch.equal(gpu_memory, cpu_memory)


@pytest.mark.parametrize("is_rocm", [True, False])
def test_chunks_are_looked_up_on_rocm_alone(monkeypatch, is_rocm):
    platform = SimpleNamespace(is_rocm=lambda: is_rocm)
    monkeypatch.setattr(cuda_mem_ops, "current_platform", platform)
    # On CUDA a handle is a number, not a list of chunks.
    handle = (0, 100, 4096, [(7, 100)] if is_rocm else 7)
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", _cumem(handle))
    mappings = cuda_mem_ops._mappings([])
    assert mappings.chunk_ends.tolist() == ([4196] if is_rocm else [])
    assert mappings.chunk_bytes == (100 if is_rocm else 0)


def test_without_sleep_mode_there_are_no_cuts(monkeypatch, rocm):
    name = "vllm.device_allocator.cumem"
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert cuda_mem_ops._mappings([]).chunk_ends.tolist() == []
    unused = ModuleType(name)
    unused.CuMemAllocator = SimpleNamespace(instance=None)
    monkeypatch.setitem(sys.modules, name, unused)
    assert cuda_mem_ops._mappings([]).chunk_ends.tolist() == []


def test_pages_are_not_joined_in_expandable_segments(device, monkeypatch):
    monkeypatch.setattr(cuda_mem_ops, "expandable_segments_enabled", lambda: True)
    gpu = {"kv": _pages(device.device_tensor(1024), 4, 256, 256)}
    cpu = {"kv": _pages(device.host_tensor(1024), 4, 256, 256)}
    params = build_params(gpu, cpu, torch_device.Stream())
    assert len(params.plan.copies(range(4), range(4)).pages) == 4


# ----- random layouts


@st.composite
def _layouts(draw: st.DrawFn):
    """(name, page, source stride and start, destination stride and start), blocks."""
    blocks = draw(st.integers(1, 24))
    regions, src, dst = [], 0, 0
    gap = st.sampled_from([0, 0, 0, 4, 60])
    for i in range(draw(st.integers(1, 5))):
        page = draw(st.sampled_from([4, 64, 100, 512]))
        src += draw(gap)
        dst += draw(gap)
        strides = page + draw(gap), page + draw(gap)
        regions.append((f"layers.{i}", page, strides[0], src, strides[1], dst))
        src += blocks * strides[0]
        dst += blocks * strides[1]
    return regions, blocks


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(layout=_layouts(), data=st.data())
def _check_random_layouts(memories, stream, layout, data):
    regions, blocks = layout
    block = st.integers(0, blocks - 1)
    pairs = data.draw(st.lists(st.tuples(block, block), max_size=blocks))
    start = data.draw(block)
    pairs += [(k, k) for k in range(start, data.draw(st.integers(start, blocks)))]
    src_memory, dst_memory = data.draw(st.sampled_from([memories, memories[::-1]]))
    dst_memory.zero_()
    expected = dst_memory.clone()
    for src_block, dst_block in pairs:
        for _, page, src_stride, src_at, dst_stride, dst_at in regions:
            src = src_at + src_block * src_stride
            dst = dst_at + dst_block * dst_stride
            expected[dst : dst + page] = src_memory[src : src + page]

    src_caches = {
        n: _pages(src_memory, blocks, p, s, at) for n, p, s, at, _, _ in regions
    }
    dst_caches = {
        n: _pages(dst_memory, blocks, p, s, at) for n, p, _, _, s, at in regions
    }
    params = build_params(src_caches, dst_caches, stream)
    copy_blocks([s for s, _ in pairs], [d for _, d in pairs], params)
    stream.synchronize()
    assert torch.equal(dst_memory, expected)
    src_memory.copy_(_random(src_memory.numel()))


def test_random_layouts_arrive_as_a_block_at_a_time_would(device):
    size = 1 << 17
    memories = device.device_tensor(size), device.host_tensor(size)
    for memory in memories:
        memory.copy_(_random(size))
    _check_random_layouts(memories, torch_device.Stream())


# ----- host memory


def test_pinned_memory_is_one_registration_of_its_exact_size(device):
    tensor = torch.zeros(3 * 4096 + 5, dtype=torch.uint8)
    pin_tensor(tensor)
    stats = hipsim.stats()
    assert (stats.registered_ranges, stats.registered_bytes) == (1, tensor.nbytes)
    assert torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr()).value == 0


def test_memory_that_cannot_be_registered_is_an_error_with_a_remedy(device):
    tensor = torch.zeros(4096, dtype=torch.uint8)
    hipsim.fail("hipHostRegister", 1, 2)
    with pytest.raises(RuntimeError) as failed:
        pin_tensor(tensor)
    for part in ("(2)", "4096 bytes", "cpu_bytes_to_use", "ulimit -l"):
        assert part in str(failed.value)


# ----- CUDA


class _CudaDriver:
    """``cuda.bindings.driver`` with a batch copy that moves host memory at once."""

    class CUresult(IntEnum):
        CUDA_SUCCESS = 0
        CUDA_ERROR_INVALID_VALUE = 1
        CUDA_ERROR_NOT_FOUND = 500

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.status = self.CUresult.CUDA_SUCCESS
        self.error = 0
        self.calls: list[tuple[int, int, int, int]] = []
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, *hip_runtime.BATCH_MEMCPY_ARGUMENTS)
        self._entry = prototype(self._batch)
        self.address = ctypes.cast(self._entry, ctypes.c_void_p).value
        bindings = ModuleType("cuda.bindings")
        bindings.driver = self
        monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        platform = SimpleNamespace(is_rocm=lambda: False)
        monkeypatch.setattr(cuda_mem_ops, "current_platform", platform)

    def cuGetProcAddress(self, name: bytes, version: int, flags: int):
        assert (name, version, flags) == (b"cuMemcpyBatchAsync", 12080, 0)
        return self.status, self.address, 0

    def _batch(self, dsts, srcs, sizes, count, attrs, idxs, num_attrs, fail, stream):
        flags = _CUmemcpyAttributes.from_address(attrs).flags
        self.calls.append((count, num_attrs, flags, stream))
        if self.error:
            ctypes.c_size_t.from_address(fail).value = 0
            return self.error
        arrays = (
            (ctypes.c_uint64 * count).from_address(a) for a in (dsts, srcs, sizes)
        )
        for dst, src, size in zip(*arrays, strict=True):
            ctypes.memmove(dst, src, size)
        return 0


def test_on_cuda_a_batch_is_one_call_and_hip_is_not_looked_for(monkeypatch):
    driver = _CudaDriver(monkeypatch)
    blocks = 20_000
    src = _random(2 * blocks * PAGE)
    src_pages = _pages(src, blocks, PAGE, 2 * PAGE)
    dst_pages = _pages(torch.zeros_like(src), blocks, PAGE, 2 * PAGE)
    stream = SimpleNamespace(cuda_stream=0x5EED)
    params = build_params({"kv": src_pages}, {"kv": dst_pages}, stream)
    ids = list(range(blocks))
    copy_blocks(ids, ids[::-1], params)
    assert driver.calls == [(blocks, 1, 0, 0x5EED)]
    assert torch.equal(dst_pages, src_pages.flip(0))

    driver.error = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(
        BatchCopyError,
        match=r"cuMemcpyBatchAsync returned CUDA_ERROR_INVALID_VALUE \(1\) for copy 0",
    ):
        copy_blocks([3], [4], params)
    line = describe_batch_copies()
    assert (
        line == "cuMemcpyBatchAsync, flags 0x0, numAttrs 1, any number of copies a call"
    )
    assert hip_runtime._runtime is None


def test_a_cuda_driver_without_the_batch_copy_is_refused_with_a_remedy(monkeypatch):
    driver = _CudaDriver(monkeypatch)
    driver.status = driver.CUresult.CUDA_ERROR_NOT_FOUND
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_NOT_FOUND.*CUDA 12\.8"):
        build_params({}, {}, SimpleNamespace(cuda_stream=0))


def test_a_cuda_driver_that_tells_no_address_is_refused(monkeypatch):
    """What a real one does for a release that is too old: success, and no address."""
    driver = _CudaDriver(monkeypatch)
    driver.address = 0
    with pytest.raises(RuntimeError, match=r"\(no address\).*CUDA 12\.8"):
        build_params({}, {}, SimpleNamespace(cuda_stream=0))
