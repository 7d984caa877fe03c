# SPDX-License-Identifier: Apache-2.0
"""What a sleep has freed, and what still holds memory of the device and the host.

Note [Whose memory it is]
The driver says how much of a device is used, by everybody. The allocator knows its own
part by tag, and PyTorch's snapshot the segments of its pools; those at addresses of the
allocator are the allocator's. What the rest of the process has nobody can list: graph
executables and their kernel arguments, contexts, communicators. It is what is left, and
so is what other processes have, where the driver tells how much this one has.

The figures come from three places, one after the other. Where the driver's has changed
meanwhile they are taken again, a few times; what moved during the last time is in the
remainder, which may then be below zero. On ROCm memory that was given back can count as
used for a little longer. It is in the remainder then or, where the driver no longer
counts it for this process, with the others; an account that is made later has it right.

Memory that another process has made, and this one has opened, counts for the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.device_allocator import process_memory
from vllm.device_allocator.host_capacity import readable
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ATTEMPTS = 3
"""How often the figures are taken while the driver's changes between two of them."""

_DEFAULT_POOL = (0, 0)


class _Account:
    def to_dict(self: DataclassInstance) -> dict[str, Any]:
        """Ready for JSON, with the attributes' names as keys."""
        return asdict(self)


@dataclass(frozen=True)
class FreedMemory:
    """What a sleep took from the allocations of one tag.

    Attributes:
        device_bytes: Given back to the device.
        backup_bytes: How many of them are kept on the host.

    """

    device_bytes: int
    backup_bytes: int


@dataclass(frozen=True)
class HostMemory(_Account):
    """Host memory of an allocator's backups.

    Attributes:
        held_bytes: Taken from the host: ``backup_bytes`` and ``spare_bytes``.
        backup_bytes: Of pieces in which backups lie.
        spare_bytes: Of pieces that wait for the next sleep.
        registered_bytes: Of those held, registered with the driver.
        huge_page_bytes: Of those held, in huge pages.

    """

    held_bytes: int
    backup_bytes: int
    spare_bytes: int
    registered_bytes: int
    huge_page_bytes: int


@dataclass(frozen=True)
class DeviceMemory(_Account):
    """What a device's memory is used for; see Note [Whose memory it is].

    ``tags``, ``torch_bytes``, ``graph_pool_bytes``, ``other_pools_bytes``,
    ``rest_bytes`` and ``others_bytes`` add up to ``used_bytes``. ``torch_cached_bytes``
    and ``asleep`` are not part of the sum.

    Attributes:
        device: Its index in this process.
        total_bytes: Of the device.
        used_bytes: What the driver does not have to give, because of any process.
        tags: Mapped allocations of the allocator, by tag. Captured graphs are
            ``cudagraph``, where their pool sleeps.
        torch_bytes: PyTorch's default pool, in use and cached.
        graph_pool_bytes: The pool that vLLM's captures share, and those that captures
            made for themselves, where they are not the allocator's.
        other_pools_bytes: PyTorch's other private pools that are not the allocator's,
            those among them that vLLM captures into by a handle of their own, as it
            does multimodal encoders.
        rest_bytes: The rest of the process.
        others_bytes: Other processes and the driver. None where they are not told
            apart from the rest of the process: ``rest_bytes`` then has both.
        others_unknown: Why they are not.
        torch_cached_bytes: Of ``torch_bytes``, in no tensor.
        asleep: What a wake would map again, by tag.

    """

    device: int
    total_bytes: int
    used_bytes: int
    tags: Mapping[str, int]
    torch_bytes: int
    graph_pool_bytes: int
    other_pools_bytes: int
    rest_bytes: int
    others_bytes: int | None
    others_unknown: str | None
    torch_cached_bytes: int
    asleep: Mapping[str, int] = field(default_factory=dict)

    @property
    def all_torch_bytes(self) -> int:
        """Bytes of PyTorch's pools that are not the allocator's."""
        return self.torch_bytes + self.graph_pool_bytes + self.other_pools_bytes


@dataclass(frozen=True)
class SleepReport(_Account):
    """What one sleep did, and what held memory when it was done.

    Attributes:
        started_at: When it began, in seconds since the epoch.
        seconds: What the allocator took for it, to the last byte that it gave back.
        freed: What was taken from allocations on the device of ``held``, by tag.
        torch_cache_freed_bytes: What PyTorch gave back of its cache.
        held: The device's memory afterwards.
        host: The host's memory afterwards.

    """

    started_at: float
    seconds: float
    freed: Mapping[str, FreedMemory]
    torch_cache_freed_bytes: int
    held: DeviceMemory
    host: HostMemory

    def table(self) -> str:
        """For people, a line for each figure that is not 0."""
        held = self.held
        cut = f"{readable(held.used_bytes)} of {readable(held.total_bytes)}"
        sections = (
            ("freed", _freed_rows(self)),
            (f"held: {cut} are used", _held_rows(held)),
            ("not in that sum", _aside_rows(held)),
            (f"host: {readable(self.host.held_bytes)} are held", _host_rows(self.host)),
        )
        lines = [f"Device {held.device} after a sleep of {self.seconds:.2f} s"]
        for title, rows in sections:
            shown = [row for row in rows if row.num_bytes]
            if shown:
                lines.append(f"  {title}")
                lines += [f"    {row}" for row in shown]
        return "\n".join(lines)


class TorchPools(NamedTuple):
    """Bytes of the segments that PyTorch has of one device, by pool.

    Attributes:
        default: Of the default pool.
        cached: Of those, in no tensor.
        graphs: Of the pool that vLLM's captures share, and those captures made.
        others: Of other private pools.

    """

    default: int = 0
    cached: int = 0
    graphs: int = 0
    others: int = 0

    @property
    def total(self) -> int:
        """Bytes of all pools."""
        return self.default + self.graphs + self.others


def torch_pools(device: int, cumem: Collection[int]) -> TorchPools:
    """What PyTorch has of a device, but for the allocator's memory.

    The snapshot takes about 0.2 ms for 340 tensors and 24 ms for 20,000 (measured on an
    H200's host), and waits for PyTorch's allocator.

    Args:
        device: Its index.
        cumem: Addresses of the allocator's ranges, which PyTorch lists also when they
            have lost their memory.

    """
    graph_pool = getattr(current_platform, "_global_graph_pool", None)
    pools = TorchPools()
    for segment in torch.cuda.memory_snapshot(include_traces=False):
        if segment["device"] != device or segment["address"] in cumem:
            continue
        size, pool = segment["total_size"], tuple(segment["segment_pool_id"])
        if pool == _DEFAULT_POOL:
            cached = size - segment["active_size"]
            pools = pools._replace(
                default=pools.default + size, cached=pools.cached + cached
            )
        elif pool == graph_pool or _is_of_one_capture(pool):
            pools = pools._replace(graphs=pools.graphs + size)
        else:
            pools = pools._replace(others=pools.others + size)
    return pools


def _is_of_one_capture(pool: tuple[int, int]) -> bool:
    # PyTorch names a pool (0, n) if somebody asked for it, and (n, 0) if a capture
    # made its own (MempoolId_t in ATen's CUDA graphs).
    return pool[1] == 0


def device_memory(
    device: int,
    tagged: Callable[[], tuple[Mapping[str, int], Mapping[str, int]]],
    ranges: Callable[[], Collection[int]],
) -> DeviceMemory:
    """The account of a device at this moment.

    Args:
        device: Its index.
        tagged: Returns the allocator's bytes on that device by tag, mapped and asleep.
        ranges: Returns the addresses of the allocator's ranges.

    Raises:
        RuntimeError: The driver or PyTorch does not tell.

    """
    info = torch.accelerator.get_memory_info(device)
    for _ in range(ATTEMPTS):
        (free, total), (tags, asleep) = info, tagged()
        pools = torch_pools(device, ranges())
        process, unknown = _process_bytes(device)
        info = torch.accelerator.get_memory_info(device)
        if info == (free, total):
            break
    used = total - free
    known = sum(tags.values()) + pools.total
    others = None if process is None else max(0, used - max(process, known))
    return DeviceMemory(
        device=device,
        total_bytes=total,
        used_bytes=used,
        tags=tags,
        torch_bytes=pools.default,
        graph_pool_bytes=pools.graphs,
        other_pools_bytes=pools.others,
        rest_bytes=used - known - (others or 0),
        others_bytes=others,
        others_unknown=unknown,
        torch_cached_bytes=pools.cached,
        asleep=asleep,
    )


def _process_bytes(device: int) -> tuple[int, None] | tuple[None, str]:
    try:
        return process_memory.process_bytes(device), None
    except process_memory.UnknownProcessMemory as reason:
        return None, str(reason)
    except Exception as error:
        # The rest of the account is right without.
        return None, f"{type(error).__name__}: {error}"


class _Row(NamedTuple):
    name: str
    num_bytes: int
    remark: str = ""

    def __str__(self) -> str:
        sign = "-" if self.num_bytes < 0 else ""
        amount = sign + readable(abs(self.num_bytes))
        return f"{self.name:<28}{amount:>11}  {self.remark}".rstrip()


def _freed_rows(report: SleepReport) -> Iterator[_Row]:
    for tag, freed in sorted(report.freed.items()):
        kept = freed.backup_bytes
        remark = f"{readable(kept)} backed up" if kept else ""
        yield _Row(tag, freed.device_bytes, remark)
    yield _Row("PyTorch's cache", report.torch_cache_freed_bytes)


def _held_rows(held: DeviceMemory) -> Iterable[_Row]:
    return (
        *(_Row(tag, size) for tag, size in sorted(held.tags.items())),
        _Row("PyTorch's default pool", held.torch_bytes),
        _Row("CUDA graphs' pool", held.graph_pool_bytes),
        _Row("PyTorch's other pools", held.other_pools_bytes),
        _rest_row(held),
        _Row("others and the driver", held.others_bytes or 0),
    )


def _rest_row(held: DeviceMemory) -> _Row:
    if held.others_bytes is not None:
        return _Row("rest of the process", held.rest_bytes)
    remark = f"not told apart: {held.others_unknown}"
    return _Row("rest of the process, others", held.rest_bytes, remark)


def _aside_rows(held: DeviceMemory) -> Iterable[_Row]:
    return (
        _Row("cached in the default pool", held.torch_cached_bytes),
        *(_Row(f"asleep: {tag}", size) for tag, size in sorted(held.asleep.items())),
    )


def _host_rows(host: HostMemory) -> Iterable[_Row]:
    return (
        _Row("backups", host.backup_bytes),
        _Row("spare, for the next sleep", host.spare_bytes),
        _Row("registered, of all", host.registered_bytes),
        _Row("in huge pages, of all", host.huge_page_bytes),
    )
