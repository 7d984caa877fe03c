# SPDX-License-Identifier: Apache-2.0
"""How much of its host this process may use: bytes of memory, and CPUs.

A container's limit is often far below what the machine has, and a process that goes
past it is killed rather than told. A backup of device memory is therefore held against
the limits of every control group above the process and against MemAvailable before
anything else happens. The same groups say for how many CPUs' time threads get to run,
which the CPUs that the process sees do not tell.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import psutil


class HostLimit(NamedTuple):
    """One limit and what it leaves.

    Attributes:
        available: Bytes that fit below the limit; file cache that the kernel would
            give up for them is among them.
        source: The limit, with its bytes and those in use.
        remedy: What raises the limit.

    """

    available: int
    source: str
    remedy: str


class HostMemoryError(RuntimeError):
    """The host cannot hold a backup.

    Attributes:
        needed: Bytes that the backup takes beside those that are held already.
        available: Bytes that the tightest limit leaves.
        limit: That limit, in words.

    """

    def __init__(self, needed: int, limit: HostLimit) -> None:
        self.needed = needed
        self.available = limit.available
        self.limit = limit.source
        super().__init__(
            f"the backup takes {needed} more bytes ({readable(needed)}) of host memory "
            f"and {limit.available} ({readable(limit.available)}) are available: "
            f"{limit.source}. {limit.remedy}, free host memory, or sleep at level 2, "
            "which backs up no weights. Another engine on this host may keep memory of "
            "its last sleep while it is awake: VLLM_SLEEP_HOST_MEMORY=release in its "
            "environment, or its allocator's trim_host_memory(), frees that"
        )


class _Hierarchy(Protocol):
    """Control groups, by what mounts them; version 2 has no controller's name."""

    @property
    def file_system(self) -> str: ...
    @property
    def controller(self) -> str: ...


class _Version(NamedTuple):
    """What the two versions of control groups call the same things.

    The names are those of Documentation/admin-guide in Linux, cgroup-v2.rst and
    cgroup-v1/memory.rst.
    """

    file_system: str
    controller: str
    limits: tuple[str, ...]
    usage: str
    reclaimable: tuple[str, ...]


_VERSIONS = (
    _Version(
        file_system="cgroup2",
        controller="",
        # past memory.high nobody is killed, but every allocation is stalled
        limits=("memory.max", "memory.high"),
        usage="memory.current",
        reclaimable=("active_file", "inactive_file", "slab_reclaimable"),
    ),
    _Version(
        file_system="cgroup",
        controller="memory",
        limits=("memory.limit_in_bytes",),
        usage="memory.usage_in_bytes",
        reclaimable=("total_active_file", "total_inactive_file"),
    ),
)


class _CpuVersion(NamedTuple):
    """The same for CPUs; the names are in scheduler/sched-bwc.rst for version 1."""

    file_system: str
    controller: str
    files: tuple[str, ...]


_CPU_VERSIONS = (
    _CpuVersion("cgroup2", "", ("cpu.max",)),
    _CpuVersion("cgroup", "cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us")),
)


def readable(num_bytes: int) -> str:
    """The number in the largest unit that fits, as in ``1.5 GiB``."""
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >> bits:
            return f"{num_bytes / (1 << bits):.1f} {unit}"
    return f"{num_bytes} bytes"


def host_capacity(root: Path = Path("/")) -> HostLimit:
    """The tightest of the limits that hold for this process.

    Args:
        root: Where ``proc`` and the mounted control groups are.

    """
    machine = psutil.virtual_memory()
    limits = [
        HostLimit(
            machine.available,
            f"MemAvailable of a machine that has {readable(machine.total)}",
            "Use a machine with more memory",
        )
    ]
    for version in _VERSIONS:
        for group in _groups(version, root):
            limits += _group_limits(version, group, root)
    return min(limits, key=lambda limit: limit.available)


def check_host_capacity(needed: int) -> None:
    """Refuse a backup of ``needed`` bytes that the host cannot hold.

    Raises:
        HostMemoryError: Fewer bytes are available.

    """
    limit = host_capacity()
    if needed > limit.available:
        raise HostMemoryError(needed, limit)


def usable_cpus(root: Path = Path("/")) -> int:
    """How many CPUs' worth of threads can run at a time: 1 at least.

    The least of the process's affinity mask and of the quotas of every control group
    above it, rounded up.

    Args:
        root: Where ``proc`` and the mounted control groups are.

    """
    cpus = len(os.sched_getaffinity(0))
    for version in _CPU_VERSIONS:
        for group in _groups(version, root):
            texts = [text for name in version.files for text in _lines(group / name)]
            match " ".join(texts).split():
                # "max" in version 2 and -1 in version 1 are no quota
                case [quota, period] if quota.isdigit() and period.isdigit():
                    cpus = min(cpus, -(-int(quota) // max(1, int(period))))
    return max(1, cpus)


def _groups(version: _Hierarchy, root: Path) -> Iterator[Path]:
    """The folders of the process's own control group and of those around it."""
    own = _own_group(version, root)
    mount = _mount(version, root)
    if own is None or mount is None:
        return
    mounted, top = mount
    # A container may see its own group mounted as if it were the topmost one, or be
    # in a group that its mount does not show: its limits are then those of the mount.
    visible = own == mounted or own.startswith(f"{mounted.rstrip('/')}/")
    inner = own[len(mounted) :].strip("/") if visible else ""
    group = top / inner
    if ".." in group.parts or not group.is_dir():
        group = top
    while group != top:
        yield group
        group = group.parent
    yield top


def _own_group(version: _Hierarchy, root: Path) -> str | None:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if version.controller in controllers.split(","):
            return path
    return None


def _mount(version: _Hierarchy, root: Path) -> tuple[str, Path] | None:
    """What is mounted, and where; proc_pid_mountinfo(5) has the format."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        file_system, _, options = after.split(" ", 2)
        if file_system != version.file_system:
            continue
        if version.controller and version.controller not in options.split(","):
            continue
        mounted, point = (_unescaped(field) for field in before.split(" ")[3:5])
        return mounted, root / point.lstrip("/")
    return None


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _group_limits(version: _Version, group: Path, root: Path) -> Iterator[HostLimit]:
    usage = _number(group / version.usage)
    if usage is None:
        return
    stat = _statistics(group / "memory.stat")
    used = max(0, usage - sum(stat.get(name, 0) for name in version.reclaimable))
    for name in version.limits:
        limit = _number(group / name)
        if limit is not None:
            path = Path("/") / group.relative_to(root) / name
            yield HostLimit(
                max(0, limit - used),
                f"{path} is {limit} bytes ({readable(limit)}), of which {used} "
                f"({readable(used)}) are in use",
                "Raise that limit (the container's or the service's memory limit)",
            )


def _statistics(path: Path) -> Mapping[str, int]:
    pairs = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


def _number(path: Path) -> int | None:
    """The file's number, or None: no such file, or no limit (``max``)."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _lines(path: Path) -> list[str]:
    # A file that cannot be read says nothing about a limit.
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
