# SPDX-License-Identifier: Apache-2.0
"""The HIP runtime of a real ROCm: which one is used, what it takes, what copies.

Not run on AMD hardware so far.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from functools import cache
from typing import Any, NamedTuple

import kv_copy_interference as benchmark
import pytest
import torch
from vllm.platforms import hip_runtime
from vllm.v1.simple_kv_offload import cuda_mem_ops

from .contract_runs import mapped_library

# By release of HIP: how many attributes a batch takes, and the flags that go with them.
GATES = (((7, 16), 1, 0x100), ((7, 13), 1, 0), ((0, 0), 0, 0))
# From here on the runtime itself takes attributes.
TAKES_ATTRIBUTES = 7, 12
SUCCESS, NOT_SUPPORTED = 0, 801
BYTES = 4096
COUNT = 64


def never() -> ctypes.CDLL:
    raise AssertionError("PyTorch has a HIP runtime, and another one was to be opened")


@pytest.fixture(scope="module")
def runtime() -> ctypes.CDLL:
    torch.cuda.init()
    return hip_runtime.get_runtime(never)


@pytest.fixture(scope="module")
def version(runtime: ctypes.CDLL) -> int:
    return hip_runtime.runtime_version(runtime)


class Gates(NamedTuple):
    """What a release is called with."""

    num_attrs: int
    flags: int


@pytest.fixture(scope="module")
def gates(version: int) -> Gates:
    release = hip_runtime.major_minor(version)
    return next(
        Gates(attrs, flags) for since, attrs, flags in GATES if release >= since
    )


# --- which one -----------------------------------------------------------------------


def test_there_is_one_runtime_and_it_is_pytorchs(runtime):
    """`mapped_library` refuses several."""
    library = mapped_library(r"libamdhip64[^/]*\.so[.\d]*")
    opened = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    assert opened._handle == runtime._handle


def test_it_knows_pytorchs_streams(runtime):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.ones(8, device="cuda")
    stream.synchronize()
    assert runtime.hipStreamQuery(ctypes.c_void_p(stream.cuda_stream)) == SUCCESS


def test_its_version_is_not_older_than_pytorchs(version):
    """An image may bring a newer runtime than PyTorch was built with."""
    assert torch.version.hip is not None
    major, minor = map(int, re.findall(r"\d+", torch.version.hip)[:2])
    assert hip_runtime.major_minor(version) >= (major, minor)
    assert hip_runtime.major_minor(version)[0] == major


# --- what it takes -------------------------------------------------------------------


def batch(runtime: ctypes.CDLL, num_attrs: int, flags: int) -> tuple[int, bool]:
    """Copy to the device; the error, and whether every byte has arrived."""
    host = torch.randint(0, 256, (COUNT, BYTES), dtype=torch.uint8).pin_memory()
    device = torch.zeros_like(host, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    addresses = ctypes.c_void_p * COUNT
    dst = addresses(*(row.data_ptr() for row in device))
    src = addresses(*(row.data_ptr() for row in host))
    sizes = (ctypes.c_size_t * COUNT)(*[BYTES] * COUNT)
    attrs = cuda_mem_ops._CUmemcpyAttributes(
        srcAccessOrder=cuda_mem_ops.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, flags=flags
    )
    first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
    error = runtime.hipMemcpyBatchAsync(
        *(dst, src, sizes, COUNT),
        *(ctypes.addressof(attrs), ctypes.addressof(first), num_attrs),
        *(ctypes.addressof(failed), stream.cuda_stream),
    )
    stream.synchronize()
    runtime.hipGetLastError()
    return int(error), torch.equal(device.cpu(), host)


def test_the_gates_are_those_of_the_release(version, gates):
    assert cuda_mem_ops._num_attrs_for_hip_version(version) == gates.num_attrs
    assert cuda_mem_ops._copy_flags() == gates.flags


def test_a_batch_is_taken_with_what_the_series_gives_it(runtime, gates):
    assert batch(runtime, *gates) == (SUCCESS, True)


def test_attributes_are_refused_before_they_are_taken(runtime, version):
    """With 801, which the series would take as word to leave them out."""
    takes = hip_runtime.major_minor(version) >= TAKES_ATTRIBUTES
    expected = (SUCCESS, True) if takes else (NOT_SUPPORTED, False)
    assert batch(runtime, 1, 0) == expected


def test_what_is_in_effect_is_said(gates):
    cuda_mem_ops._batch_memcpy = cuda_mem_ops._resolve_batch_memcpy()
    said = cuda_mem_ops.describe_batch_copies()
    assert f"flags {gates.flags:#x}" in said
    assert f"numAttrs {gates.num_attrs}" in said
    assert ("copy engines preferred" in said) == bool(gates.flags)


# --- what copies ---------------------------------------------------------------------


def leave_out(reason: str) -> None:
    """Skip, but for CI, where nobody reads why a step has shown nothing."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@cache
def profile(engine: str) -> dict[str, Any]:
    """What rocprofv3 saw, in a process of its own."""
    told: dict[str, Any] = benchmark.profile_engine(engine, benchmark.QUICK)
    return told


def profiled(engine: str) -> dict[str, Any]:
    told = profile(engine)
    if told["ran"] == "unknown" and "copy_kernels" not in told:
        leave_out(f"nothing shows what copies: {told['reason']}")
    return told


def require_blit_kernels_are_seen() -> None:
    """The control: without the flag, a batch of small pages takes a kernel of HIP's."""
    kernels = profiled("batch")["copy_kernels"]
    if not any(name.startswith(benchmark.BLIT_KERNEL) for name in kernels):
        leave_out(
            f"rocprofv3 does not show blit kernels here ({benchmark.BLIT_KERNEL}*), so "
            "that none of them would say nothing"
        )


def test_rectangles_are_made_by_copy_engines():
    assert profiled("rect")["ran"] == "copy engine"


def test_batches_take_no_kernel_where_copy_engines_are_asked_for(gates):
    """Before, pages of up to 16 KiB may take one, and the log says so."""
    if gates.flags:
        require_blit_kernels_are_seen()
        # Some releases of the profiler do not record the copies of a batch.
        told = profiled("batch-flag")
        assert told["copy_kernels"] == {}, told
    else:
        cuda_mem_ops._batch_memcpy = cuda_mem_ops._resolve_batch_memcpy()
        said = cuda_mem_ops.describe_batch_copies()
        assert "copy engines are asked for from HIP 7.16" in said


def test_a_copy_that_a_kernel_makes_is_seen_as_one():
    """The control for rectangles."""
    assert profiled("kernel")["ran"] == "kernel"


# --- AITER ---------------------------------------------------------------------------


def test_what_is_fenced_is_there():
    if importlib.util.find_spec("aiter") is None:
        leave_out("AITER is not installed")
    from aiter.dist.device_communicators import custom_all_reduce
    from vllm.distributed.device_communicators.aiter_capture_fence import fence

    kind = custom_all_reduce.CustomAllreduce
    fenced: Any = fence(kind)
    assert issubclass(fenced, kind)
    assert "all_reduce" in fenced.fenced_methods
    for name in fenced.fenced_methods:
        assert callable(getattr(kind, name)), name
        assert getattr(fenced, name) is not getattr(kind, name), name
