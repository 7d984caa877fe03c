# SPDX-License-Identifier: Apache-2.0
"""What the host can hold, for processes in many kinds of control groups."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from vllm.device_allocator import host_capacity
from vllm.device_allocator.host_capacity import HostLimit, HostMemoryError

GIB = 1 << 30
MACHINE = 100 * GIB
UNLIMITED_V1 = 0x7FFFFFFFFFFFF000  # PAGE_COUNTER_MAX in bytes

Write = Callable[[str, object], None]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(available=MACHINE, total=2 * MACHINE)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(path: str, text: object) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    return write


@pytest.fixture
def v2(write: Write) -> Write:
    """A process in /pod/app of a version 2 hierarchy; writes below /sys/fs/cgroup."""
    write("proc/self/cgroup", "0::/pod/app")
    mount = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
    write("proc/self/mountinfo", f"22 1 8:1 / / rw - ext4 /dev/vda rw\n{mount}")

    def group(path: str, text: object) -> None:
        write(f"sys/fs/cgroup/{path}", text)

    group("pod/app/memory.max", "max")
    group("pod/app/memory.current", 0)
    return group


def test_without_control_groups_the_machine_decides(tmp_path: Path) -> None:
    limit = host_capacity.host_capacity(tmp_path)
    assert limit.available == MACHINE
    assert "MemAvailable" in limit.source


def test_no_limit_is_none(v2: Write, tmp_path: Path) -> None:
    assert host_capacity.host_capacity(tmp_path).available == MACHINE


def test_a_limit_counts_what_is_in_use(v2: Write, tmp_path: Path) -> None:
    v2("pod/app/memory.max", 10 * GIB)
    v2("pod/app/memory.current", 4 * GIB)
    limit = host_capacity.host_capacity(tmp_path)
    assert limit.available == 6 * GIB
    assert "/sys/fs/cgroup/pod/app/memory.max" in limit.source
    assert str(10 * GIB) in limit.source and "4.0 GiB" in limit.source


def test_file_cache_counts_as_free(v2: Write, tmp_path: Path) -> None:
    v2("pod/app/memory.max", 10 * GIB)
    v2("pod/app/memory.current", 9 * GIB)
    v2(
        "pod/app/memory.stat",
        f"anon {GIB}\nfile {8 * GIB}\nshmem {GIB}\nactive_file {2 * GIB}\n"
        f"inactive_file {4 * GIB}\nslab_reclaimable {GIB}\nunevictable 5",
    )
    assert host_capacity.host_capacity(tmp_path).available == 8 * GIB


def test_cache_is_never_more_than_what_is_used(v2: Write, tmp_path: Path) -> None:
    v2("pod/app/memory.max", 10 * GIB)
    v2("pod/app/memory.current", GIB)
    v2("pod/app/memory.stat", f"inactive_file {2 * GIB}")
    assert host_capacity.host_capacity(tmp_path).available == 10 * GIB


def test_more_in_use_than_the_limit_leaves_nothing(v2: Write, tmp_path: Path) -> None:
    v2("pod/app/memory.max", GIB)
    v2("pod/app/memory.current", 2 * GIB)
    assert host_capacity.host_capacity(tmp_path).available == 0


@pytest.mark.parametrize("tightest", ["pod/app", "pod", "."])
def test_the_tightest_of_nested_groups_holds(
    v2: Write, tmp_path: Path, tightest: str
) -> None:
    for group in ("pod/app", "pod", "."):
        v2(f"{group}/memory.max", (5 if group == tightest else 50) * GIB)
        v2(f"{group}/memory.current", GIB)
    assert host_capacity.host_capacity(tmp_path).available == 4 * GIB


def test_throttling_counts_as_a_limit(v2: Write, tmp_path: Path) -> None:
    v2("pod/app/memory.max", 20 * GIB)
    v2("pod/app/memory.high", 10 * GIB)
    limit = host_capacity.host_capacity(tmp_path)
    assert limit.available == 10 * GIB
    assert "memory.high" in limit.source


@pytest.mark.parametrize(
    ("own", "mounted"),
    [
        ("/", "/"),  # a namespace of its own
        ("/docker/abc", "/docker/abc"),  # its group is mounted as the topmost
        ("/../other", "/"),  # moved out of its namespace's root
        ("/docker/abc", "/"),  # only the top is visible
        ("/docker/abcd", "/docker/abc"),
    ],
)
def test_in_a_container_the_mount_is_the_group(
    write: Write, tmp_path: Path, own: str, mounted: str
) -> None:
    write("proc/self/cgroup", f"0::{own}")
    write("proc/self/mountinfo", f"30 23 0:26 {mounted} /cg rw - cgroup2 none rw")
    write("cg/memory.max", 3 * GIB)
    write("cg/memory.current", GIB)
    write("other/memory.max", 1)
    write("other/memory.current", 0)
    assert host_capacity.host_capacity(tmp_path).available == 2 * GIB


def test_a_mount_point_may_have_a_space(write: Write, tmp_path: Path) -> None:
    write("proc/self/cgroup", "0::/")
    write("proc/self/mountinfo", r"30 23 0:26 / /my\040cg rw - cgroup2 none rw")
    write("my cg/memory.max", GIB)
    write("my cg/memory.current", 0)
    assert host_capacity.host_capacity(tmp_path).available == GIB


@pytest.fixture
def v1(write: Write) -> Write:
    """A process in /job of a version 1 hierarchy, beside a version 2 one."""
    write("proc/self/cgroup", "7:cpu,cpuacct:/cpus\n4:memory:/job\n0::/")
    base = "/sys/fs/cgroup"
    write(
        "proc/self/mountinfo",
        f"34 31 0:29 / {base}/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        f"35 31 0:32 / {base}/memory rw shared:9 - cgroup cgroup rw,memory\n"
        f"41 31 0:38 / {base}/unified rw - cgroup2 cgroup2 rw",
    )

    def group(path: str, text: object) -> None:
        write(f"{base}/memory/{path}".lstrip("/"), text)

    group("job/memory.limit_in_bytes", UNLIMITED_V1)
    group("job/memory.usage_in_bytes", GIB)
    return group


def test_version_1_without_a_limit(v1: Write, tmp_path: Path) -> None:
    limit = host_capacity.host_capacity(tmp_path)
    assert limit.available == MACHINE and "MemAvailable" in limit.source


def test_version_1(v1: Write, tmp_path: Path) -> None:
    v1("job/memory.limit_in_bytes", 8 * GIB)
    v1("job/memory.usage_in_bytes", 6 * GIB)
    v1(
        "job/memory.stat",
        f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}",
    )
    assert host_capacity.host_capacity(tmp_path).available == 4 * GIB


def test_version_1_nested(v1: Write, tmp_path: Path) -> None:
    v1("job/memory.limit_in_bytes", 8 * GIB)
    v1("memory.limit_in_bytes", 3 * GIB)
    v1("memory.usage_in_bytes", GIB)
    assert host_capacity.host_capacity(tmp_path).available == 2 * GIB


def test_a_refusal_has_numbers_and_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = HostLimit(2 * GIB, "memory.max is 3 GiB", "Raise it")
    monkeypatch.setattr(host_capacity, "host_capacity", lambda: limit)
    host_capacity.check_host_capacity(2 * GIB)
    with pytest.raises(HostMemoryError) as caught:
        host_capacity.check_host_capacity(2 * GIB + 1)
    error = caught.value
    assert isinstance(error, RuntimeError)
    assert (error.needed, error.available) == (2 * GIB + 1, 2 * GIB)
    assert error.limit == "memory.max is 3 GiB"
    for word in (str(2 * GIB + 1), str(2 * GIB), "memory.max is 3 GiB", "Raise it"):
        assert word in str(error)


def test_this_process_has_a_capacity() -> None:
    assert 0 < host_capacity.host_capacity().available <= MACHINE


# --- CPUs -----------------------------------------------------------------------------


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("250000 100000", 3),
        ("1000 100000", 1),
        ("1600000 100000", 8),
        ("200000", 8),
        ("", 8),
    ],
)
def test_a_quota_is_rounded_up(
    v2: Write, tmp_path: Path, eight_cpus: None, quota: str, cpus: int
) -> None:
    v2("pod/app/cpu.max", quota)
    assert host_capacity.usable_cpus(tmp_path) == cpus


def test_the_least_quota_of_nested_groups_holds(
    v2: Write, tmp_path: Path, eight_cpus: None
) -> None:
    v2("pod/app/cpu.max", "max 100000")
    v2("pod/cpu.max", "150000 50000")
    assert host_capacity.usable_cpus(tmp_path) == 3


@pytest.mark.parametrize(("quota", "cpus"), [(-1, 8), (300000, 3), (310000, 4)])
def test_a_quota_of_version_1(
    v1: Write, write: Write, tmp_path: Path, eight_cpus: None, quota: int, cpus: int
) -> None:
    write("sys/fs/cgroup/cpu/cpus/cpu.cfs_quota_us", quota)
    write("sys/fs/cgroup/cpu/cpus/cpu.cfs_period_us", 100000)
    assert host_capacity.usable_cpus(tmp_path) == cpus


def test_without_a_quota_the_affinity_mask_decides(
    tmp_path: Path, eight_cpus: None
) -> None:
    assert host_capacity.usable_cpus(tmp_path) == 8


def test_this_process_has_cpus() -> None:
    assert 1 <= host_capacity.usable_cpus() <= len(os.sched_getaffinity(0))
