# SPDX-License-Identifier: Apache-2.0
"""What a sleep says of the memory that it has freed and that is still held."""

import json
import logging
import time
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from vllm.device_allocator import process_memory, sleep_report
from vllm.device_allocator.host_backups import HostMemoryPolicy
from vllm.device_allocator.process_memory import UnknownProcessMemory
from vllm.device_allocator.sleep_report import (
    DeviceMemory,
    FreedMemory,
    HostMemory,
    SleepReport,
)
from vllm.v1.worker import sleep_reports

from .accounts import parts, used_bytes
from .simulated_gpu import (
    CHUNK,
    logged,
    memory_info,
    memory_of_the_driver,
    name_of,
    simulator,
)
from .world import LEVEL_1, LEVEL_2, World

COPY_IN = name_of("hipMemcpyAsync", "cuMemcpyHtoDAsync_v2")
REGISTER = name_of("hipHostRegister", "cuMemHostRegister_v2")
UNMAP = name_of("hipMemUnmap", "cuMemUnmap")
UNKNOWN = 999


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver tells of this process, and there is no other."""
    monkeypatch.setattr(process_memory, "process_bytes", used_bytes)


def slept(world: World, level: tuple[str, ...]) -> SleepReport:
    report = world.cumem.sleep(level)
    assert report is not None
    return report


def populate(world: World) -> None:
    world.allocate("weights", 3 * CHUNK)
    world.allocate("weights", CHUNK)
    world.allocate("kv_cache", 2 * CHUNK)
    world.allocate("runtime", CHUNK)


SIZES = {"weights": 4 * CHUNK, "kv_cache": 2 * CHUNK, "runtime": CHUNK}


# --- What is in it --------------------------------------------------------------------


@pytest.mark.parametrize("level", [LEVEL_1, LEVEL_2])
def test_what_a_sleep_took_and_left(world: World, level: tuple[str, ...]) -> None:
    populate(world)
    assert (world.cumem.last_sleep, world.cumem.sleeps) == (None, 0)
    before = time.time()
    report = slept(world, level)
    assert before <= report.started_at <= time.time() - report.seconds + 0.01
    assert (world.cumem.last_sleep, world.cumem.sleeps) == (report, 1)
    kept = {tag: SIZES[tag] if tag in level else 0 for tag in SIZES}
    assert report.freed == {tag: FreedMemory(SIZES[tag], kept[tag]) for tag in SIZES}
    assert report.torch_cache_freed_bytes == 0
    held, host = report.held, report.host
    assert (held.tags, held.asleep, held.device) == ({}, SIZES, 0)
    assert held.used_bytes == parts(held) == used_bytes() == 0
    assert held.total_bytes == memory_info()[1]
    assert host.held_bytes == world.held_bytes() == sum(kept.values())
    assert (host.backup_bytes, host.spare_bytes) == (world.held_for_backups(), 0)
    assert host.registered_bytes == simulator.stats().registered_bytes > 0


def test_the_time_that_the_allocator_took(world: World) -> None:
    world.allocate("weights", CHUNK)
    simulator.configure(copy_latency_us=40_000)
    begin = time.monotonic()
    report = slept(world, LEVEL_1)
    assert 0.04 <= report.seconds <= time.monotonic() - begin


def test_a_sleep_while_all_is_asleep(world: World) -> None:
    """It is the last one all the same, and says that it freed nothing."""
    populate(world)
    first = slept(world, LEVEL_1)
    again = slept(world, LEVEL_1)
    assert again.freed == {} and again.held == first.held
    assert (world.cumem.last_sleep, world.cumem.sleeps) == (again, 2)
    assert again.started_at > first.started_at


def test_a_sleep_that_was_taken_back(world: World) -> None:
    populate(world)
    slept(world, LEVEL_1)
    world.wake()
    world.cumem.forget_last_sleep()
    assert (world.cumem.last_sleep, world.cumem.sleeps) == (None, 1)


def test_host_memory_that_the_driver_did_not_register(world: World) -> None:
    populate(world)
    simulator.fail(REGISTER, 1, UNKNOWN)
    host = slept(world, LEVEL_1).host
    assert host.registered_bytes < host.held_bytes == 5 * CHUNK
    assert host.registered_bytes == sum(
        arena.registered for arena in world.cumem._host_backups.arenas
    )
    world.wake()


def test_host_memory_of_several_arenas(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    arenas = [
        SimpleNamespace(prepared=10, registered=6, huge=8),
        SimpleNamespace(prepared=4, registered=1, huge=0),
    ]
    backups = SimpleNamespace(arenas=arenas, spare=lambda backups: 3)
    with monkeypatch.context() as patch:
        patch.setattr(world.cumem, "_host_backups", backups)
        host = world.cumem.host_memory()
    assert host == HostMemory(
        held_bytes=14,
        backup_bytes=11,
        spare_bytes=3,
        registered_bytes=7,
        huge_page_bytes=8,
    )


def test_a_wake_of_some(world: World) -> None:
    populate(world)
    slept(world, LEVEL_1)
    world.wake(["kv_cache"])
    device, host = world.cumem.memory()
    awake = {"kv_cache": SIZES["kv_cache"], "runtime": SIZES["runtime"]}
    assert device.tags == world.cumem.mapped_bytes() == awake
    assert device.asleep == {"weights": SIZES["weights"]}
    assert device.used_bytes == parts(device) == sum(awake.values())
    assert host.backup_bytes == SIZES["weights"]
    assert host.spare_bytes == SIZES["runtime"]
    report = slept(world, LEVEL_1)
    assert set(report.freed) == {"kv_cache", "runtime"}, "the rest was asleep before"
    assert report.held.asleep == SIZES


@pytest.mark.parametrize("policy", HostMemoryPolicy)
def test_host_memory_after_a_wake(world: World, policy: HostMemoryPolicy) -> None:
    world.cumem.host_memory_policy = policy
    populate(world)
    slept(world, LEVEL_1)
    world.wake()
    host = world.cumem.memory()[1]
    assert host.held_bytes == host.spare_bytes == world.held_bytes()
    assert host.backup_bytes == 0
    assert (host.held_bytes > 0) == (policy is HostMemoryPolicy.KEEP)


def test_a_discard_is_no_sleep(world: World) -> None:
    populate(world)
    world.cumem.discard("kv_cache")
    assert world.cumem.last_sleep is None
    device, _ = world.cumem.memory()
    assert device.asleep == {"kv_cache": SIZES["kv_cache"]}
    assert device.used_bytes == SIZES["weights"] + SIZES["runtime"] == parts(device)
    assert set(slept(world, LEVEL_1).freed) == {"weights", "runtime"}


def test_nothing_to_sleep(world: World) -> None:
    report = slept(world, LEVEL_1)
    assert (report.freed, report.held.tags, report.held.used_bytes) == ({}, {}, 0)
    assert report.host.held_bytes == 0


def test_the_rest_of_the_process(world: World) -> None:
    populate(world)
    with memory_of_the_driver(5 * CHUNK):
        held = slept(world, LEVEL_1).held
        assert held.rest_bytes == held.used_bytes == 5 * CHUNK == used_bytes()
        world.wake()
        now = world.cumem.memory()[0]
        assert now.rest_bytes == 5 * CHUNK
        assert parts(now) == now.used_bytes == 5 * CHUNK + sum(SIZES.values())
    assert world.cumem.memory()[0].rest_bytes == 0


def test_memory_that_the_driver_did_not_take_back(world: World) -> None:
    """It is nobody's any more, and counts until the driver has it."""
    world.allocate("weights", CHUNK)
    simulator.fail(name_of("hipMemRelease", "cuMemRelease"), 1, UNKNOWN)
    with pytest.raises(RuntimeError, match="asleep all the same"):
        world.cumem.sleep(LEVEL_1)
    left = world.cumem.memory()[0]
    assert (left.tags, left.rest_bytes) == ({}, used_bytes())
    assert left.rest_bytes == CHUNK
    assert slept(world, LEVEL_1).held.rest_bytes == 0
    world.wake()


# --- Others ---------------------------------------------------------------------------


def test_other_processes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    populate(world)
    with memory_of_the_driver(5 * CHUNK):
        monkeypatch.setattr(
            process_memory, "process_bytes", lambda device: used_bytes() - 3 * CHUNK
        )
        held = slept(world, LEVEL_1).held
    assert (held.rest_bytes, held.others_bytes) == (2 * CHUNK, 3 * CHUNK)
    assert held.others_unknown is None
    assert parts(held) == held.used_bytes


def test_a_figure_that_is_too_small(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has at least what the allocator and PyTorch have."""
    populate(world)
    monkeypatch.setattr(process_memory, "process_bytes", lambda device: CHUNK)
    with memory_of_the_driver(CHUNK):
        now = world.cumem.memory()[0]
    assert (now.rest_bytes, now.others_bytes) == (0, CHUNK)
    assert parts(now) == now.used_bytes


def test_others_that_are_not_told_apart(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(device: int) -> NoReturn:
        raise UnknownProcessMemory("the driver is silent")

    monkeypatch.setattr(process_memory, "process_bytes", unknown)
    populate(world)
    with memory_of_the_driver(5 * CHUNK):
        report = slept(world, LEVEL_1)
    assert report.held.rest_bytes == 5 * CHUNK == parts(report.held)
    assert report.held.others_bytes is None
    assert report.held.others_unknown == "the driver is silent"
    (line,) = [line for line in report.table().splitlines() if "rest of" in line]
    assert "rest of the process, others" in line
    assert line.endswith("not told apart: the driver is silent")


# --- What is settled later ------------------------------------------------------------


def test_memory_that_comes_back_late(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose it is, the driver's two figures do not say; later ones are right."""
    populate(world)
    late = sum(SIZES.values())

    def still_used(device: int | None = None) -> tuple[int, int]:
        free, total = memory_info(device)
        return free - late, total

    with monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "get_memory_info", still_used)
        held = slept(world, LEVEL_1).held
    assert parts(held) == held.used_bytes == late
    assert (held.tags, held.rest_bytes + (held.others_bytes or 0)) == ({}, late)
    now, _ = world.cumem.memory()
    assert (now.used_bytes, now.rest_bytes, now.others_bytes) == (0, 0, 0)


def test_what_the_caller_frees_after_the_allocator(world: World) -> None:
    populate(world)
    with memory_of_the_driver(5 * CHUNK):
        first = slept(world, LEVEL_1)
    with logged(level=logging.INFO) as lines:
        world.cumem.settle_last_sleep()
    settled = world.cumem.last_sleep
    assert settled is not None
    assert (first.held.rest_bytes, settled.held.rest_bytes) == (5 * CHUNK, 0)
    assert settled.held == world.cumem.memory()[0]
    assert vars(settled) == {**vars(first), "held": settled.held}
    (line,) = lines
    mib = CHUNK >> 20
    assert f"{5 * mib}.0 MiB less than the allocator left" in line
    with logged(level=logging.INFO) as lines, memory_of_the_driver(4096):
        world.cumem.settle_last_sleep()
    assert lines == [], "no line for less than a MiB"
    assert world.cumem.sleeps == 1


def test_nothing_to_settle(world: World) -> None:
    world.cumem.settle_last_sleep()
    assert world.cumem.last_sleep is None


# --- Figures that change --------------------------------------------------------------


@pytest.mark.parametrize("changes", [0, 1, 2, 100])
def test_memory_that_changes_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch, changes: int
) -> None:
    """Taken again, but not for ever, and what moved is in the remainder."""
    populate(world)
    asked: list[int] = []

    def changing(device: int | None = None) -> tuple[int, int]:
        free, total = memory_info(device)
        asked.append(min(len(asked), changes))
        return free + asked[-1], total

    monkeypatch.setattr(torch.accelerator, "get_memory_info", changing)
    monkeypatch.setattr(process_memory, "process_bytes", lambda device: 0)
    now = world.cumem.memory()[0]
    assert len(asked) == 1 + min(changes + 1, sleep_report.ATTEMPTS)
    assert parts(now) == now.used_bytes
    assert now.rest_bytes == -min(changes, sleep_report.ATTEMPTS - 1)


def test_a_remainder_below_zero_is_shown(world: World) -> None:
    populate(world)
    report = slept(world, LEVEL_1)
    held = {**vars(report.held), "rest_bytes": -3 << 20}
    shown = SleepReport(**{**vars(report), "held": DeviceMemory(**held)}).table()
    assert "-3.0 MiB" in shown


# --- What may fail --------------------------------------------------------------------


def test_a_failed_sleep_keeps_the_last_report(world: World) -> None:
    populate(world)
    first = slept(world, LEVEL_1)
    world.wake()
    simulator.fail(UNMAP, 1, UNKNOWN)
    with pytest.raises(RuntimeError, match="nothing has changed"):
        world.cumem.sleep(LEVEL_1)
    assert world.cumem.last_sleep is first
    assert slept(world, LEVEL_1) is world.cumem.last_sleep is not first
    world.wake()


@pytest.mark.parametrize("nth", [1, 2])
def test_a_report_that_cannot_be_made(
    world: World, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    populate(world)
    slept(world, LEVEL_1)
    world.wake()
    calls = 0

    def silent(*args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise OSError("no segments today")
        return world.torch.memory_snapshot()

    monkeypatch.setattr(torch.cuda, "memory_snapshot", silent)
    emptied = world.torch.emptied
    with logged() as warnings:
        assert world.cumem.sleep(LEVEL_1) is None
    world.check(world.after_sleep(LEVEL_1))
    assert (world.cumem.last_sleep, world.cumem.sleeps) == (None, 2)
    assert world.torch.emptied == emptied + 1
    (warning,) = warnings
    assert "could not be found out: OSError: no segments today" in warning


# --- What was copied, and what is asleep ----------------------------------------------


def test_copied_bytes(world: World) -> None:
    populate(world)
    assert world.cumem.take_copied_bytes() == {}
    slept(world, LEVEL_1)
    world.wake(["kv_cache"])
    offloaded = {("weights", "offload"): 4 * CHUNK, ("runtime", "offload"): CHUNK}
    assert world.cumem.take_copied_bytes() == {
        **offloaded,
        ("runtime", "restore"): CHUNK,
    }
    assert world.cumem.take_copied_bytes() == {}
    world.wake()
    assert world.cumem.take_copied_bytes() == {("weights", "restore"): 4 * CHUNK}
    for _ in range(2):
        slept(world, LEVEL_1)
        world.wake()
    twice = {tag: 2 * size for (tag, _), size in offloaded.items()}
    assert world.cumem.take_copied_bytes() == {
        (tag, direction): size
        for tag, size in twice.items()
        for direction in ("offload", "restore")
    }


def test_copied_bytes_are_those_that_the_driver_moved(world: World) -> None:
    populate(world)
    before = moved()
    slept(world, LEVEL_1)
    world.wake()
    now = moved()
    taken = world.cumem.take_copied_bytes()
    for direction, over in (("offload", "d2h"), ("restore", "h2d")):
        told = sum(size for (_, way), size in taken.items() if way == direction)
        assert told == now[over] - before[over] == 5 * CHUNK


def moved() -> dict[str, int]:
    counts = simulator.stats().host_copies
    return {
        over: sum(count.bytes for (_, way), count in counts.items() if way == over)
        for over in ("d2h", "h2d")
    }


def test_copies_of_what_failed_later(world: World) -> None:
    world.allocate("weights", 2 * CHUNK)
    simulator.fail(UNMAP, 1, UNKNOWN)
    with pytest.raises(RuntimeError, match="nothing has changed"):
        world.cumem.sleep(LEVEL_1)
    copied = {("weights", "offload"): 2 * CHUNK}
    assert world.cumem.take_copied_bytes() == copied, "it was copied all the same"
    slept(world, LEVEL_1)
    assert world.cumem.take_copied_bytes() == copied
    simulator.fail(COPY_IN, 1, UNKNOWN)
    with pytest.raises(RuntimeError, match="still asleep"):
        world.wake()
    assert world.cumem.take_copied_bytes() == {}
    world.wake()
    assert world.cumem.take_copied_bytes() == {("weights", "restore"): 2 * CHUNK}


def test_asleep_bytes(world: World) -> None:
    populate(world)
    none = dict.fromkeys(("host", "none"), 0)
    assert world.cumem.asleep_bytes() == dict.fromkeys(SIZES, none)
    slept(world, LEVEL_2)
    asleep = {
        "weights": {"host": 0, "none": 4 * CHUNK},
        "kv_cache": {"host": 0, "none": 2 * CHUNK},
        "runtime": {"host": CHUNK, "none": 0},
    }
    assert world.cumem.asleep_bytes() == asleep
    world.wake(["kv_cache"])
    asleep |= {"kv_cache": none, "runtime": none}
    assert world.cumem.asleep_bytes() == asleep


def test_a_tag_is_known_while_it_has_a_pool(world: World) -> None:
    world.cumem.allocator_and_pools["workspace"] = []
    assert world.cumem.asleep_bytes() == {"workspace": {"host": 0, "none": 0}}


# --- For machines and for people ------------------------------------------------------

KEYS = {
    "": {"started_at", "seconds", "freed", "torch_cache_freed_bytes", "held", "host"},
    "held": {
        "device",
        "total_bytes",
        "used_bytes",
        "tags",
        "torch_bytes",
        "graph_pool_bytes",
        "other_pools_bytes",
        "rest_bytes",
        "others_bytes",
        "others_unknown",
        "torch_cached_bytes",
        "asleep",
    },
    "host": {
        "held_bytes",
        "backup_bytes",
        "spare_bytes",
        "registered_bytes",
        "huge_page_bytes",
    },
}


def test_the_keys_of_schema_version_1(world: World) -> None:
    """Who changes one of them raises the version."""
    populate(world)
    told = json.loads(json.dumps(slept(world, LEVEL_1).to_dict()))
    assert sleep_reports.SCHEMA_VERSION == 1
    assert set(told) == KEYS[""]
    assert set(told["held"]) == KEYS["held"]
    assert set(told["host"]) == KEYS["host"]
    assert told["freed"]["weights"] == {
        "device_bytes": 4 * CHUNK,
        "backup_bytes": 4 * CHUNK,
    }
    device, host = world.cumem.memory()
    assert told["held"] == device.to_dict()
    assert told["host"] == host.to_dict()


def test_the_table_is_logged_once(world: World) -> None:
    populate(world)
    with memory_of_the_driver(CHUNK), logged(level=logging.INFO) as lines:
        report = slept(world, LEVEL_1)
    (table,) = [line for line in lines if line.startswith("Device 0 after a sleep")]
    assert table.strip() == report.table()
    mib = CHUNK >> 20
    shown = {row(line) for line in table.splitlines()}
    assert ("weights", f"{4 * mib}.0 MiB  {4 * mib}.0 MiB backed up") in shown
    assert ("kv_cache", f"{2 * mib}.0 MiB") in shown
    assert ("asleep: kv_cache", f"{2 * mib}.0 MiB") in shown
    assert ("rest of the process", f"{mib}.0 MiB") in shown
    assert ("backups", f"{5 * mib}.0 MiB") in shown
    assert not any("PyTorch" in line for line in table.splitlines()), "no zeros"


def row(line: str) -> tuple[str, str]:
    name, _, amount = line.strip().partition("   ")
    return name, amount.strip()


# --- Without allocations --------------------------------------------------------------


def test_the_device_where_nothing_is_allocated(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    assert world.cumem.memory()[0].device == 3


def test_the_allocations_of_another_device(world: World, module: ModuleType) -> None:
    """An account is of one device, the first on which something is allocated."""
    world.allocate("weights", CHUNK)
    there = world.torch.malloc(2 * CHUNK, device=1)
    try:
        assert world.cumem.memory()[0].tags == {"weights": CHUNK}
        assert world.cumem.mapped_bytes() == {"weights": CHUNK, "default": 2 * CHUNK}
        report = slept(world, LEVEL_1)
        assert report.freed == {"weights": FreedMemory(CHUNK, CHUNK)}
        assert report.held.asleep == {"weights": CHUNK}
        world.wake()
    finally:
        world.torch.free(there, 2 * CHUNK, device=1)
