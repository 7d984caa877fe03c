# SPDX-License-Identifier: Apache-2.0
"""Hosts that have little memory, let little of it be locked, or have few addresses.

A sleep that cannot have its backup is refused before it takes anything, and one that
can have it in some other way has it in that way.
"""

import ctypes
import errno
import gc
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from vllm.device_allocator import cumem, host_capacity
from vllm.device_allocator.host_backups import HostMemoryPolicy
from vllm.device_allocator.host_capacity import HostMemoryError

from .native.program import DEADLINE, ROOT
from .simulated_gpu import PIECE, Torch, logged, name_of, new_calls, simulator
from .world import LEVEL_1, LEVEL_2, World

REGISTER = name_of("hipHostRegister", "cuMemHostRegister(_v2)?")
ASKS_FOR_THE_NODE = {"hipDeviceGetPCIBusId", "cuDeviceGetPCIBusId", "cuDeviceGet"}
MIB = 1 << 20
BLOCK = 16 * MIB
BACKUP = 4 * BLOCK
# What Python may take meanwhile, for a traceback or a line of the log.
LITTLE = BACKUP // 8


def fill(world: World) -> None:
    """Allocations of which `BACKUP` bytes are backed up."""
    for _ in range(BACKUP // BLOCK):
        world.allocate("weights", BLOCK)
    world.allocate("kv_cache", BLOCK)


class ProcessMemory(NamedTuple):
    """Bytes of a process: addresses that are mapped, memory of its own, locked."""

    mapped: int
    anonymous: int
    locked: int

    @classmethod
    def now(cls) -> "ProcessMemory":
        text = Path("/proc/self/smaps").read_text()
        return cls(
            *(
                sum(map(int, re.findall(rf"^{name}: +(\d+) kB$", text, re.MULTILINE)))
                * 1024
                for name in ("Size", "Anonymous", "Locked")
            )
        )


@contextmanager
def takes_nothing(world: World, but: Collection[str] = ()) -> Iterator[None]:
    """Of the host, and calls no driver; every allocation stays as it is.

    Args:
        world: Where nothing happens.
        but: Functions that may be called.
    """
    before, calls = ProcessMemory.now(), simulator.stats()
    yield
    after = ProcessMemory.now()
    assert new_calls(calls, simulator.stats()).keys() <= set(but)
    assert after.mapped - before.mapped < LITTLE
    assert after.anonymous - before.anonymous < LITTLE
    assert after.locked == before.locked
    assert world.held_bytes() == 0
    world.check(world.expected)


def sleep_and_wake(world: World) -> None:
    world.sleep(LEVEL_1)
    world.check(world.after_sleep(LEVEL_1))
    world.wake()
    world.check(world.after_wake())


# --- A control group's limit ----------------------------------------------------------

SetLimit = Callable[[int], None]
USED, CACHE = 48 * MIB, 16 * MIB


@pytest.fixture(params=["version 1", "version 2"])
def set_limit(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> SetLimit:
    """Sets the limit of a group that is this process's; `USED` - `CACHE` is in use."""
    proc = tmp_path / "proc" / "self"
    proc.mkdir(parents=True)
    if request.param == "version 1":
        group = tmp_path / "sys/fs/cgroup/memory/job"
        limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        files = {"cgroup": "4:memory:/job"}
        mount = "/ /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
        cache = "total_inactive_file"
    else:
        group = tmp_path / "sys/fs/cgroup/job"
        limit, usage = "memory.max", "memory.current"
        files = {"cgroup": "0::/job"}
        mount = "/ /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
        cache = "inactive_file"
    group.mkdir(parents=True)
    for name, text in {**files, "mountinfo": f"30 23 0:26 {mount}"}.items():
        (proc / name).write_text(f"{text}\n")
    (group / usage).write_text(f"{USED}\n")
    (group / "memory.stat").write_text(f"{cache} {CACHE}\n")
    monkeypatch.setattr(
        host_capacity,
        "host_capacity",
        partial(host_capacity.host_capacity, tmp_path),
    )

    def set_limit(num_bytes: int) -> None:
        (group / limit).write_text(f"{num_bytes}\n")

    return set_limit


def test_a_backup_beyond_the_limit_takes_nothing(
    world: World, set_limit: SetLimit
) -> None:
    fill(world)
    enough = BACKUP + USED - CACHE
    set_limit(enough - 1)
    with takes_nothing(world), pytest.raises(HostMemoryError) as caught:
        world.sleep(LEVEL_1)
    assert (caught.value.needed, caught.value.available) == (BACKUP, BACKUP - 1)
    text = str(caught.value)
    for number in (BACKUP, BACKUP - 1, enough - 1, USED - CACHE):
        assert re.search(rf"\b{number}\b", text), text
    assert "/job/memory." in text and "nothing has changed" in text

    before = ProcessMemory.now()
    set_limit(enough)
    world.sleep(LEVEL_1)
    world.check(world.after_sleep(LEVEL_1))
    after = ProcessMemory.now()
    assert after.anonymous - before.anonymous > BACKUP // 2, "the control"
    assert world.held_bytes() == simulator.stats().registered_bytes == BACKUP
    world.wake()
    world.check(world.after_wake())


def test_memory_that_is_kept_is_not_asked_for_again(
    world: World, set_limit: SetLimit
) -> None:
    fill(world)
    set_limit(1 << 40)
    sleep_and_wake(world)
    set_limit(0)
    sleep_and_wake(world)
    # a level 2 sleep takes none, and leaves it to the next one
    world.sleep(LEVEL_2)
    world.check(world.after_sleep(LEVEL_2))
    world.wake()
    world.check(world.after_wake())
    sleep_and_wake(world)

    world.cumem.trim_host_memory()
    with takes_nothing(world), pytest.raises(HostMemoryError):
        world.sleep(LEVEL_1)


def test_memory_that_is_given_back_is_asked_for_again(
    world: World, set_limit: SetLimit
) -> None:
    world.cumem.host_memory_policy = HostMemoryPolicy.RELEASE
    fill(world)
    set_limit(1 << 40)
    before = ProcessMemory.now()
    sleep_and_wake(world)
    assert ProcessMemory.now().anonymous - before.anonymous < BACKUP // 2
    assert world.held_bytes() == 0
    set_limit(0)
    with takes_nothing(world), pytest.raises(HostMemoryError):
        world.sleep(LEVEL_1)


# --- The same in a group of the kernel's ----------------------------------------------


class Group(NamedTuple):
    """A new control group, and the files that set its limit and count its use."""

    folder: Path
    limit: Path
    usage: Path


def _made_in(parent: Path, version: host_capacity._Version) -> Group | None:
    folder = parent / f"sleep-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        return None
    group = Group(folder, folder / version.limits[0], folder / version.usage)
    if os.access(group.limit, os.W_OK) and group.usage.exists():
        return group
    folder.rmdir()
    return None


@pytest.fixture
def kernel_group() -> Iterator[Group]:
    for version in host_capacity._VERSIONS:
        own = next(host_capacity._groups(version, Path("/")), None)
        # In version 2 no group with processes has others with limits inside it.
        for parent in (own, own and own.parent):
            group = _made_in(parent, version) if parent else None
            if group is not None:
                yield group
                _remove(group.folder)
                return
    pytest.skip("no control group with a limit of memory can be made here")


def _remove(folder: Path) -> None:
    # The processes in it have ended, which the kernel may not know yet.
    deadline = time.monotonic() + 10
    while folder.exists():
        with suppress(OSError):
            folder.rmdir()
        assert time.monotonic() < deadline, f"{folder} stays"
        time.sleep(0.01)


@contextmanager
def in_a_process() -> Iterator[World]:
    """An allocator in a process that has nothing yet; TRAMPOLINE names the library."""
    simulator.load()
    torch_side = Torch(cumem._module, Path(os.environ["TRAMPOLINE"]))
    torch.accelerator.synchronize = torch_side.synchronize
    torch.accelerator.empty_cache = torch_side.empty_cache
    world = World(cumem._module, torch_side)
    yield world
    world.free_all()
    gc.collect()
    world.check_nothing_left()


def run(name: str, trampoline: Path, **environment: str) -> str:
    """What a function of this file prints in a process of its own."""
    unwanted = ("HIPSIM_", "CUDASIM_", "VLLM_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import {name}; {name}()"],
        env={**kept, "TRAMPOLINE": os.fspath(trampoline), **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sleep_in_a_group() -> None:
    with in_a_process() as world:
        fill(world)
        group = Group(*map(Path, os.environ["GROUP"].split(":")))
        group.limit.write_text(str(BACKUP // 2))
        # What the process has does not go with it into the group.
        (group.folder / "cgroup.procs").write_text("0")
        with takes_nothing(world):
            try:
                world.sleep(LEVEL_1)
            except HostMemoryError as error:
                print(error.needed, error.available, error)
            used = int(group.usage.read_text())
            # To look at the contents takes memory too.
            group.limit.write_text(str(64 * BACKUP))
        world.sleep(LEVEL_1)
        print(used < BACKUP // 2 < BACKUP < int(group.usage.read_text()))
        world.check(world.after_sleep(LEVEL_1))
        world.wake()
        world.check(world.after_wake())


def test_the_limit_of_a_group_of_the_kernel_s(
    kernel_group: Group, module: ModuleType, trampoline: Path
) -> None:
    group = ":".join(map(str, kernel_group))
    refused, taken = run("sleep_in_a_group", trampoline, GROUP=group).splitlines()
    needed, available, text = refused.split(" ", 2)
    assert int(needed) == BACKUP
    assert 0 <= int(available) < BACKUP // 2
    assert f"{kernel_group.limit} is {BACKUP // 2} bytes" in text
    assert "nothing has changed" in text
    assert taken == "True"


# --- Memory that must not be locked ---------------------------------------------------


@contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    """A soft limit of this process, which is raised again."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def copied(way: str, run: Callable[[], object]) -> dict[str, int]:
    """Bytes that crossed the link that way, by what their host memory is."""
    before = simulator.stats().host_copies
    run()
    after = simulator.stats().host_copies
    moved = {
        kind: after[kind, way].bytes - before[kind, way].bytes
        for kind in ("allocated", "registered", "pageable")
    }
    return {kind: count for kind, count in moved.items() if count}


@pytest.mark.parametrize(
    ("most", "kind"),
    [(64 << 10, "allocated"), (0, "pageable")],
    ids=["64 KiB, as a distribution's default", "none"],
)
def test_host_memory_that_is_not_registered(world: World, most: int, kind: str) -> None:
    """It is copied through buffers that may be locked, or through the driver's."""
    fill(world)
    simulator.configure(locked_memory="rlimit")
    with limited(resource.RLIMIT_MEMLOCK, most):
        for nth in (1, 2):
            with logged() as lines:
                out = copied("d2h", lambda: world.sleep(LEVEL_1))
            assert out == {kind: BACKUP}
            assert simulator.stats().registered_bytes == 0
            assert simulator.stats().host_allocations == 0, "the buffers are gone"
            world.check(world.after_sleep(LEVEL_1))
            assert world.held_bytes() == BACKUP
            if nth == 1:
                (line,) = lines
                assert f"{BACKUP // MIB}.0 MiB" in line and "not registered" in line
                assert re.search(rf"\b{REGISTER} failed: \w+ \(2\)", line), line
            else:
                assert lines == [], "it has been said"
            assert copied("h2d", world.wake) == {kind: BACKUP}
            world.check(world.after_wake())

    # The next transfer out registers what was not.
    simulator.configure(locked_memory="unlimited")
    assert copied("d2h", lambda: world.sleep(LEVEL_1)) == {"registered": BACKUP}
    assert simulator.stats().registered_bytes == BACKUP
    world.check(world.after_sleep(LEVEL_1))
    assert copied("h2d", world.wake) == {"registered": BACKUP}
    world.check(world.after_wake())


def test_some_of_the_host_memory_is_registered(world: World) -> None:
    """Up to the limit, and the rest goes through buffers of what is left of it."""
    fill(world)
    half = BACKUP // 2
    simulator.configure(max_locked_bytes=half + PIECE // 2)
    with logged() as lines:
        out = copied("d2h", lambda: world.sleep(LEVEL_1))
    assert out == {"registered": half, "allocated": half}
    (line,) = lines
    assert f"{half // MIB}.0 MiB" in line and "not registered" in line
    assert simulator.stats().registered_bytes == half
    world.check(world.after_sleep(LEVEL_1))
    assert copied("h2d", world.wake) == {"registered": half, "allocated": half}
    world.check(world.after_wake())


# --- Addresses, memory and threads that cannot be had ---------------------------------


def test_too_few_addresses(world: World) -> None:
    fill(world)
    most = ProcessMemory.now().mapped + BACKUP // 2
    with (
        takes_nothing(world, but=ASKS_FOR_THE_NODE),
        limited(resource.RLIMIT_AS, most),
        pytest.raises(MemoryError) as caught,
    ):
        world.sleep(LEVEL_1)
    text = str(caught.value)
    assert str(BACKUP) in text and "nothing has changed" in text, text
    sleep_and_wake(world)


def sleep_without_memory_and_threads() -> None:
    libc = ctypes.CDLL(os.environ["LD_PRELOAD"])
    with in_a_process() as world:
        # Too small for a huge page, which is not asked for but touched.
        piece = MIB
        arena = cumem._module.HostArena
        cumem._module.HostArena = partial(arena, piece_size=piece)
        fill(world)
        for nth in (2, BACKUP // piece):
            libc.refuse_populate(errno.ENOMEM, nth, 1)
            try:
                world.sleep(LEVEL_1)
            except MemoryError as error:
                print(error)
            world.check(world.expected)
            assert world.held_bytes() == simulator.stats().registered_bytes == 0
            assert world.cumem.host_bytes_needed(LEVEL_1) == BACKUP
            sleep_and_wake(world)
            assert world.cumem.trim_host_memory() == BACKUP
        for threads in (0, 1):
            libc.allow_threads(threads)
            sleep_and_wake(world)
            simulator.configure(max_locked_bytes=piece // 2)
            assert world.cumem.trim_host_memory() == BACKUP
            sleep_and_wake(world)
            simulator.configure(max_locked_bytes=0)
            assert world.cumem.trim_host_memory() == BACKUP


def test_a_machine_without_memory_or_threads(
    module: ModuleType, trampoline: Path, libc_double: str
) -> None:
    """A sleep that the host has no memory for gives back what it has taken."""
    said = run("sleep_without_memory_and_threads", trampoline, LD_PRELOAD=libc_double)
    lines = [line for line in said.splitlines() if "has no memory left" in line]
    assert len(lines) == 2
    assert all("nothing has changed" in line for line in lines)
