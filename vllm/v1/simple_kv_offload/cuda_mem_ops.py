# SPDX-License-Identifier: Apache-2.0
"""Host memory registration and copies of KV blocks, through HIP or CUDA.

Note [Rectangles]
Where the regions of a block lie at one distance on both sides, one pitched copy
moves them all: ``hipMemcpy2DAsync`` or ``cuMemcpy2DAsync``, which a copy engine
makes whatever the release (see Note [Copy plans] for what is one, and Note
[Choosing the copy engine]). A compiled module queues all of a transfer in one
call, without Python's lock. Pages that are in no rectangle follow on the same
stream as batches.

Note [Batch copies]
``hipMemcpyBatchAsync`` and ``cuMemcpyBatchAsync`` take the same nine arguments,
the same attributes and the same access orders, so one path serves both. What
differs between runtimes is decided once, by the HIP runtime's version:

- numAttrs: HIP before 7.13 refuses attributes. Should a runtime refuse them
  against its version, the call is repeated without, and so are all later ones.
- flags: from HIP 7.16 a batch may ask for the copy engines. Otherwise a batch
  can run as a kernel and slows down whatever computes beside it.
- copies a call: HIP faults on more than 8192 (descriptors overrun the kernel's
  argument buffer in HIP 7.14 and 7.15), so larger batches go in several calls.

Copies come from the plan that ``build_params`` attaches; parameters without a
plan give one copy a page.
"""

import ctypes
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.device_allocator.alloc_conf import expandable_segments_enabled
from vllm.logger import init_logger
from vllm.platforms import current_platform, hip_runtime
from vllm.utils.system_utils import find_loaded_library
from vllm.v1.simple_kv_offload.copy_choice import CopyChoice, Mappings, choose_copies
from vllm.v1.simple_kv_offload.copy_engine import CopyEngine, chosen_max_copies
from vllm.v1.simple_kv_offload.copy_errors import (
    BatchCopyError,
    name_regions,
    page_copy_at,
    rectangle_at,
    refused,
)
from vllm.v1.simple_kv_offload.copy_plan import (
    CUDA_LIMITS,
    SDMA_LIMITS,
    Addresses,
    CopyPlan,
    PageCopies,
    PlanSample,
    RectangleCopies,
    Region,
)
from vllm.v1.simple_kv_offload.host_cache import (
    block_layout,
    page_bytes,
    registration_ends,
)

logger = init_logger(__name__)

# CUmemcpySrcAccessOrder and hipMemcpySrcAccessOrder: whether the source is read
# in stream order, or at any time, which only suits one that nobody writes.
CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1
CU_MEMCPY_SRC_ACCESS_ORDER_ANY = 3

# hip_runtime_api.h: run the batch on the copy engines where possible.
HIP_MEMCPY_FLAG_EXT_PREFER_CE = 0x100

_HIP_LIBRARY_NAMES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")
_HIP_MAX_COPIES_PER_CALL = 8192
_FAIL_INDEX_UNKNOWN = ctypes.c_size_t(-1).value
_NO_RECTANGLES = np.empty((0, 8), dtype=np.uint64)

# No process has memory here: for a layout without an address.
_NOWHERE = 1 << 62


class _CUmemLocation(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint), ("id", ctypes.c_int)]


class _CUmemcpyAttributes(ctypes.Structure):
    """CUmemcpyAttributes and hipMemcpyAttributes: 24 bytes, flags at 20."""

    _fields_ = [
        ("srcAccessOrder", ctypes.c_uint),
        ("srcLocHint", _CUmemLocation),
        ("dstLocHint", _CUmemLocation),
        ("flags", ctypes.c_uint),
    ]


# The entry point and the most attributes it takes; set by build_params.
_batch_memcpy: tuple[Any, int] | None = None

# The most copies in one call, 0 for any number; set on first use.
_max_batch_descriptors: int | None = None


class BatchMemcpyParams(NamedTuple):
    """What every transfer between the same two sets of caches has in common.

    ``attrs`` is used where both ``num_attrs`` and the runtime allow it. With a
    plan, the plan alone says what is copied; without one, ``bpb`` is both the
    stride and the size of a page. ``engine`` is the one in use, RECT or BATCH, and
    ``note`` says why not RECT, or how much of a block RECT leaves over; ``sample`` is
    what a block takes with RECT.
    """

    src_bases: Addresses  # [num_layers]
    dst_bases: Addresses  # [num_layers]
    bpb: Addresses  # [num_layers], bytes of a block's page
    num_layers: int
    attrs: _CUmemcpyAttributes
    attrs_idx: ctypes.c_size_t
    num_attrs: int
    fail_idx: ctypes.c_size_t
    stream_handle: int
    plan: CopyPlan | None = None
    direction: str = "copy"
    engine: CopyEngine = CopyEngine.BATCH
    note: str = ""
    sample: PlanSample | None = None


def pin_tensor(tensor: torch.Tensor) -> None:
    """Register a CPU tensor's memory with the device, in one registration.

    Unlike torch's pinned allocator this takes no more memory than the tensor
    has. Unregister with the tensor's base address.

    Raises:
        RuntimeError: The memory could not be registered.

    """
    error = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    if error.value != 0:
        _forget_last_error()
        raise RuntimeError(
            f"cudaHostRegister failed: {error} ({error.value}) for {tensor.nbytes} "
            "bytes of host memory. Give the CPU cache less (cpu_bytes_to_use), or "
            "let this process lock more memory (ulimit -l, the container's limit)."
        )


def unpin_tensor(tensor: torch.Tensor) -> bool:
    """Undo ``pin_tensor``. Nothing may be copying from or to the tensor.

    Returns:
        Whether it is undone; if not, the memory must not be freed.

    """
    error = torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
    if error.value != 0:
        _forget_last_error()
        logger.warning(
            "cudaHostUnregister failed: %s (%d) for %d bytes of host memory.",
            error,
            error.value,
            tensor.nbytes,
        )
    return bool(error.value == 0)


def suits_rectangles(
    gpu_caches: dict[str, torch.Tensor],
    num_host_blocks: int,
    engine: CopyEngine = CopyEngine.AUTO,
) -> bool:
    """Would blocks go as rectangles to a host tier that has them one after another?

    Args:
        gpu_caches: Tensors of shape [blocks, ...] by region name.
        num_host_blocks: Of the host tier, which need not exist yet.
        engine: What to copy with.

    """
    offsets, block_bytes = block_layout(gpu_caches)
    regions = [
        Region(
            name,
            cache.data_ptr(),
            _NOWHERE + offsets[name],
            cache.stride(0) * cache.element_size(),
            block_bytes,
            page_bytes(cache),
        )
        for name, cache in gpu_caches.items()
    ]
    blocks = num_blocks(gpu_caches), num_host_blocks
    choice = _choose(engine, regions, blocks, gpu_caches.values())
    return choice.engine is CopyEngine.RECT


def build_params(
    src_caches: dict[str, torch.Tensor],
    dst_caches: dict[str, torch.Tensor],
    stream: torch.cuda.Stream,
    src_access_order: int = CU_MEMCPY_SRC_ACCESS_ORDER_ANY,
    *,
    direction: str = "copy",
    engine: CopyEngine = CopyEngine.AUTO,
) -> BatchMemcpyParams:
    """Prepare transfers between caches of the same names.

    Args:
        src_caches: Tensors of shape [blocks, ...] by region name; blocks of a
            region have the same size in both tensors, strides may differ.
        dst_caches: The same regions, in the same order.
        stream: Where the copies are queued.
        src_access_order: When sources may be read, see the constants.
        direction: A word for error messages.
        engine: What to copy with, see ``CopyEngine``.

    Raises:
        RuntimeError: The runtime has no batch copy.
        ValueError: The caches do not match.

    """
    global _batch_memcpy
    if _batch_memcpy is None:
        _batch_memcpy = _resolve_batch_memcpy()

    regions = _regions(src_caches, dst_caches)
    choice = choose_copies(
        engine,
        regions,
        num_blocks(src_caches),
        num_blocks(dst_caches),
        SDMA_LIMITS if current_platform.is_rocm() else CUDA_LIMITS,
        _mappings([*src_caches.values(), *dst_caches.values()]),
        "" if engine is CopyEngine.BATCH else _obstacle_to_rectangles(),
    )
    return BatchMemcpyParams(
        src_bases=np.array([r.src_base for r in regions], dtype=np.uint64),
        dst_bases=np.array([r.dst_base for r in regions], dtype=np.uint64),
        bpb=np.array([r.page_bytes for r in regions], dtype=np.uint64),
        num_layers=len(regions),
        attrs=_CUmemcpyAttributes(srcAccessOrder=src_access_order, flags=_copy_flags()),
        attrs_idx=ctypes.c_size_t(0),
        num_attrs=_batch_memcpy[1],
        fail_idx=ctypes.c_size_t(_FAIL_INDEX_UNKNOWN),
        stream_handle=stream.cuda_stream,
        plan=choice.plan,
        direction=direction,
        engine=choice.engine,
        note=choice.note,
        sample=choice.sample,
    )


def _choose(
    engine: CopyEngine,
    regions: Sequence[Region],
    blocks: tuple[int, int],
    caches: Iterable[torch.Tensor],
) -> CopyChoice:
    return choose_copies(
        engine,
        regions,
        *blocks,
        SDMA_LIMITS if current_platform.is_rocm() else CUDA_LIMITS,
        _mappings(caches),
        obstacle=_obstacle_to_rectangles(),
    )


def copy_blocks(
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
    params: BatchMemcpyParams,
) -> None:
    """Queue the copy of block ``src_block_ids[i]`` to ``dst_block_ids[i]``.

    Returns when the copies are queued. After an error those that came before the
    failed one may still be under way: synchronize the stream before their memory
    is used for anything else.

    Raises:
        BatchCopyError: The runtime refused a copy.
        ValueError: The two lists differ in length.

    """
    plan = params.plan or _page_by_page(params)
    rectangles, pages = plan.copies(src_block_ids, dst_block_ids)
    _copy_rectangles(rectangles, params)
    _copy_pages(pages, params)


def _copy_rectangles(rectangles: RectangleCopies, params: BatchMemcpyParams) -> None:
    if not len(rectangles):
        return
    failed = _submit_rectangles(rectangles, params)
    if failed is not None:
        index, error, call = failed
        site = rectangles.locate(index)
        what = rectangle_at(index, len(rectangles), site)
        raise refused(
            params.direction, call, error, _error_name(error), what, index, site
        )


def _submit_rectangles(
    rectangles: RectangleCopies, params: BatchMemcpyParams
) -> tuple[int, int, str] | None:
    """Queue all; or return which one failed, its error and the call that said so."""
    from vllm.v1.simple_kv_offload.pitched_copies import submit

    failed: tuple[int, int, str] | None = submit(rectangles.table, params.stream_handle)
    return failed


def _copy_pages(copies: PageCopies, params: BatchMemcpyParams) -> None:
    total = len(copies)
    step = _resolve_max_batch_descriptors() or max(total, 1)
    for first in range(0, total, step):
        count = min(step, total - first)
        error = _submit(copies, first, count, params)
        if error != 0:
            _forget_last_error()
            raise _batch_copy_error(error, copies, first, count, params)


def describe_copies(params: BatchMemcpyParams) -> str:
    """Say how transfers with ``params`` are made, and why; for the log."""
    batches = describe_batch_copies()
    note = f"; {params.note}" if params.note else ""
    if params.sample is None:
        return f"{batches}{note}"
    vendor = "hip" if current_platform.is_rocm() else "cu"
    # A plan that has both is described by the less usual one.
    dimensions = 3 if params.sample.three_dimensional else 2
    return (
        f"{vendor}Memcpy{dimensions}DAsync, "
        f"{_count(params.sample.rectangles, 'rectangle')} and "
        f"{_count(params.sample.pages, 'page')} a block{note}; for pages {batches}"
    )


def _count(number: float, what: str) -> str:
    return f"{number:.3g} {what}{'s' * (number != 1)}"


def describe_batch_copies() -> str:
    """Say how batches are copied in this process, and why; for the log."""
    assert _batch_memcpy is not None, "build_params() decides how to copy"
    num_attrs = _batch_memcpy[1]
    most = _resolve_max_batch_descriptors()
    limit = f"at most {most} copies a call" if most else "any number of copies a call"
    if not current_platform.is_rocm():
        return f"cuMemcpyBatchAsync, flags 0x0, numAttrs {num_attrs}, {limit}"

    version = _hip_version()
    if _copy_flags():
        why = "copy engines preferred, as from HIP 7.16"
    elif version:
        why = "copy engines are asked for from HIP 7.16"
    else:
        why = "copy engines are not asked for while the version is unknown"
    driver = hip_runtime.driver_version()
    return (
        f"hipMemcpyBatchAsync, flags {_copy_flags():#x} ({why}), "
        f"numAttrs {num_attrs}, {limit}, HIP {hip_runtime.format_version(version)}, "
        f"amdgpu {'.'.join(map(str, driver)) if driver else 'unknown'}"
    )


def _submit(
    copies: PageCopies, first: int, count: int, params: BatchMemcpyParams
) -> int:
    """Queue ``count`` copies from ``first`` on in one call; return its error."""
    global _batch_memcpy
    assert _batch_memcpy is not None, "build_params() must run before copy_blocks()"
    function, most_attrs = _batch_memcpy

    def call(num_attrs: int) -> int:
        # Some errors leave it untouched.
        params.fail_idx.value = _FAIL_INDEX_UNKNOWN
        return int(
            function(
                copies.dst[first:].ctypes.data,
                copies.src[first:].ctypes.data,
                copies.size[first:].ctypes.data,
                count,
                ctypes.addressof(params.attrs),
                ctypes.byref(params.attrs_idx),
                num_attrs,
                ctypes.byref(params.fail_idx),
                params.stream_handle,
            )
        )

    num_attrs = min(params.num_attrs, most_attrs)
    error = call(num_attrs)
    if (
        error == hip_runtime.HIP_ERROR_NOT_SUPPORTED
        and num_attrs > 0
        and current_platform.is_rocm()
    ):
        _batch_memcpy = (function, 0)
        logger.warning_once(
            "hipMemcpyBatchAsync of HIP %s refuses attributes (801): KV blocks are "
            "copied without them from now on, so copies may run as a kernel and "
            "slow down decoding.",
            hip_runtime.format_version(_hip_version()),
        )
        error = call(0)
    return error


def _batch_copy_error(
    error: int, copies: PageCopies, first: int, count: int, params: BatchMemcpyParams
) -> BatchCopyError:
    call = "hipMemcpyBatchAsync" if current_platform.is_rocm() else "cuMemcpyBatchAsync"
    failed = params.fail_idx.value
    index = first + failed if failed < count else None
    site = None if index is None else copies.locate(index)
    if index is None or site is None:
        regions = params.plan.regions if params.plan else ()
        what = (
            f"one of the copies {first} to {first + count - 1} of {len(copies)}, "
            f"{name_regions([region.name for region in regions])} (the runtime did "
            "not say which)"
        )
    else:
        what = page_copy_at(index, len(copies), site)
    return refused(params.direction, call, error, _error_name(error), what, index, site)


def _error_name(code: int) -> str:
    if current_platform.is_rocm():
        lib = hip_runtime.get_runtime(_load_hip_runtime)
        return hip_runtime.error_name(lib, code)
    try:
        from cuda.bindings import driver

        return str(driver.CUresult(code).name)
    except (ImportError, ValueError):
        return "unknown error"


def _forget_last_error() -> None:
    """Clear what the runtime remembers of a failed call in this thread.

    Whoever asks next for the last error, torch after a kernel launch, would take
    it for its own.
    """
    try:
        if current_platform.is_rocm():
            hip_runtime.get_runtime(_load_hip_runtime).hipGetLastError()
        elif (path := find_loaded_library("libcudart")) is not None:
            ctypes.CDLL(path).cudaGetLastError()
    except (OSError, AttributeError) as error:
        logger.debug("The last error could not be cleared: %s", error)


def _regions(
    src_caches: dict[str, torch.Tensor], dst_caches: dict[str, torch.Tensor]
) -> list[Region]:
    if list(src_caches) != list(dst_caches):
        raise ValueError(
            f"KV caches to copy between differ in their regions: {list(src_caches)} "
            f"and {list(dst_caches)}"
        )
    regions = []
    for name, src in src_caches.items():
        dst = dst_caches[name]
        if page_bytes(src) != page_bytes(dst):
            raise ValueError(
                f"KV cache region {name!r} has blocks of {page_bytes(src)} bytes at "
                f"the source and of {page_bytes(dst)} at the destination"
            )
        regions.append(
            Region(
                name,
                src.data_ptr(),
                dst.data_ptr(),
                src.stride(0) * src.element_size(),
                dst.stride(0) * dst.element_size(),
                page_bytes(src),
            )
        )
    return regions


def num_blocks(caches: dict[str, torch.Tensor]) -> int:
    """Return how many blocks all regions have."""
    return min((cache.shape[0] for cache in caches.values()), default=0)


def _page_by_page(params: BatchMemcpyParams) -> CopyPlan:
    columns = (params.src_bases, params.dst_bases, params.bpb)
    return CopyPlan(
        [
            Region(str(layer), int(src), int(dst), int(size), int(size), int(size))
            for layer, (src, dst, size) in enumerate(zip(*columns, strict=True))
        ],
        merge=False,
    )


def _cumem_handles() -> list[Any]:
    """Handles of vLLM's sleep mode allocator, if it is in use on ROCm."""
    cumem = sys.modules.get("vllm.device_allocator.cumem")
    if cumem is None or not current_platform.is_rocm():
        return []
    allocator = cumem.CuMemAllocator.instance
    if allocator is None:
        return []
    return [data.handle for data in allocator.pointer_to_data.values()]


def _mappings(caches: Iterable[torch.Tensor]) -> Mappings:
    """Where memory begins and ends in and around the caches.

    Caches of two allocations may lie at one distance by accident. HIP checks a copy
    against one of them, and CUDA refuses one that reaches from one registration of
    host memory into another.
    """
    edges = set(registration_ends())
    for storage in (cache.untyped_storage() for cache in caches):
        edges |= {storage.data_ptr(), storage.data_ptr() + storage.nbytes()}
    ends, sizes = [], [0]
    for _device, _size, address, chunks in _cumem_handles():
        for _handle, chunk_bytes in chunks:
            address += chunk_bytes
            ends.append(address)
            sizes.append(chunk_bytes)
    return Mappings(
        chunk_ends=np.array(ends, dtype=np.uint64),
        chunk_bytes=max(sizes),
        edges=np.array(sorted(edges), dtype=np.uint64),
        are_known=not _has_unknown_mappings(),
    )


def _has_unknown_mappings() -> bool:
    """Is device memory mapped in chunks whose ends nobody tells?

    Torch's expandable segments are. A page may cross such an end as ever, but
    joined pages would do so more often.
    """
    if not current_platform.is_rocm() or _cumem_handles():
        return False
    return bool(expandable_segments_enabled())


def _obstacle_to_rectangles() -> str:
    """Say why this process cannot make pitched copies; nothing if it can."""
    try:
        from vllm.v1.simple_kv_offload.pitched_copies import submit

        # Looks the driver up, and what it needs of it, and makes no copy.
        submit(_NO_RECTANGLES, 0)
    except ImportError as error:
        return (
            f"the compiled module of pitched copies cannot be loaded ({error}): run "
            "`vllm-rocm-memory apply` in this environment"
        )
    except RuntimeError as error:
        return f"pitched copies find no driver that has them: {error}"
    return ""


def _resolve_max_batch_descriptors() -> int:
    """Return the most copies for one call; 0 means any number."""
    global _max_batch_descriptors
    if _max_batch_descriptors is None:
        default = _HIP_MAX_COPIES_PER_CALL if current_platform.is_rocm() else 0
        _max_batch_descriptors = chosen_max_copies() or default
    return _max_batch_descriptors


def _resolve_batch_memcpy() -> tuple[Any, int]:
    """Return the batch copy's entry point and how many attributes it takes."""
    if not current_platform.is_rocm():
        return _cuda_batch_memcpy(), 1
    try:
        lib = hip_runtime.get_runtime(_load_hip_runtime)
        function = lib.hipMemcpyBatchAsync
    except (OSError, AttributeError) as error:
        raise RuntimeError(
            "This process has no HIP runtime with hipMemcpyBatchAsync, which "
            f"SimpleCPUOffloadConnector needs ({error}). It comes with ROCm 7.1: "
            "install that or later, or run without the connector."
        ) from error
    return function, _num_attrs_for_hip_version(_hip_version())


def _cuda_batch_memcpy() -> Any:
    from cuda.bindings import driver

    # 12.8 names the interface with failIdx; CUDA 13's own has none. A driver that is
    # too old answers with success and no address.
    status, address, _ = driver.cuGetProcAddress(b"cuMemcpyBatchAsync", 12080, 0)
    if status != driver.CUresult.CUDA_SUCCESS or not address:
        said = "no address" if not status else status.name
        raise RuntimeError(
            f"The CUDA driver has no cuMemcpyBatchAsync ({said}), which "
            "SimpleCPUOffloadConnector needs. It comes with CUDA 12.8: update the "
            "driver, or run without the connector."
        )
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, *hip_runtime.BATCH_MEMCPY_ARGUMENTS)
    return prototype(address)


def _load_hip_runtime() -> ctypes.CDLL:
    """Open the HIP runtime by name, for a process that has none mapped.

    The versioned names are tried too: the unversioned one is a symbolic link
    that only the devel package installs.

    Raises:
        OSError: Says of each name why it could not be opened.

    """
    attempts: list[str] = []
    for name in _HIP_LIBRARY_NAMES:
        try:
            return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            attempts.append(f"{name}: {error}")
    raise OSError(f"could not load the HIP runtime ({'; '.join(attempts)})")


def _hip_version() -> int:
    return hip_runtime.runtime_version(hip_runtime.get_runtime(_load_hip_runtime))


def _copy_flags() -> int:
    if not current_platform.is_rocm():
        return 0
    return _copy_flags_for_hip_version(_hip_version())


def _num_attrs_for_hip_version(version: int) -> int:
    """How many attributes to pass, given hipRuntimeGetVersion's number.

    1 from HIP 7.13; 0 before, where any are refused with hipErrorNotSupported
    (rocm-7.2.1, hipamd/src/hip_memory.cpp), and for 0, an unknown version.
    """
    return int(hip_runtime.at_least(version, 7, 13))


def _copy_flags_for_hip_version(version: int) -> int:
    """Flags for the attributes, given hipRuntimeGetVersion's number.

    hipMemcpyFlagExtPreferCE from HIP 7.16, the release with which vLLM's ROCm image
    was measured; 0 before, so that nothing changes there, and for 0, an unknown
    version. Releases that do not know the flag ignore it without an error.
    """
    if hip_runtime.at_least(version, 7, 16):
        return HIP_MEMCPY_FLAG_EXT_PREFER_CE
    return 0
