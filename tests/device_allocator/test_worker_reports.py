# SPDX-License-Identifier: Apache-2.0
"""What a worker answers when its memory is asked for."""

import json
import logging
import socket
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import vllm.platforms
from vllm.device_allocator import cumem, process_memory
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.device_allocator.sleep_report import SleepReport
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.sleep_reports import SleepReports, settle_sleep_report
from vllm.v1.worker.worker_base import WorkerBase

from .accounts import used_bytes
from .simulated_gpu import CHUNK, logged, memory_of_the_driver
from .world import LEVEL_1, World

LOGGER = "vllm.v1.worker.sleep_reports"
AWAY = "the device is away"
COMMON = {
    "schema_version": 1,
    "rank": 3,
    "data_parallel_rank": 1,
    "data_parallel_size": 2,
    "hostname": socket.gethostname(),
}


class Rank(WorkerBase):
    """A worker without a model."""

    def __init__(self) -> None:
        self.rank = 3
        self.parallel_config = SimpleNamespace(
            data_parallel_index=1, data_parallel_size=2
        )


@pytest.fixture
def allocator(world: World, monkeypatch: pytest.MonkeyPatch) -> CuMemAllocator:
    """The one of this process."""
    monkeypatch.setattr(CuMemAllocator, "instance", world.cumem)
    monkeypatch.setattr(process_memory, "process_bytes", used_bytes)
    return world.cumem


def fail(*args: Any) -> NoReturn:
    raise OSError(AWAY)


def asked(method: str, rank: type[WorkerBase] = Rank) -> Any:
    """As an executor does; what it answers survives the way to the API server."""
    answer = run_method(rank(), method, (), {})
    assert json.loads(json.dumps(answer)) == answer
    return answer


def test_every_worker_has_the_methods() -> None:
    """The series gives them to vLLM's base class of workers."""
    assert issubclass(WorkerBase, SleepReports)


def test_before_and_after_a_sleep(world: World, allocator: CuMemAllocator) -> None:
    world.allocate("weights", 2 * CHUNK)
    world.allocate("kv_cache", CHUNK)
    awake = asked("sleep_report")
    assert {key: awake[key] for key in COMMON} == COMMON
    assert set(awake) == {*COMMON, "sleeps", "last_sleep", "now"}
    assert (awake["sleeps"], awake["last_sleep"]) == (0, None)
    assert awake["now"]["device"]["tags"] == {"weights": 2 * CHUNK, "kv_cache": CHUNK}
    assert awake["now"]["device"]["others_bytes"] == 0
    report = allocator.sleep(LEVEL_1)
    assert report is not None
    world.wake(["kv_cache"])
    told = asked("sleep_report")
    assert told["last_sleep"] == report.to_dict(), "of the sleep, and not of now"
    assert told["sleeps"] == 1
    device, host = allocator.memory()
    assert told["now"] == {"device": device.to_dict(), "host": host.to_dict()}
    assert told["now"]["device"]["tags"] == {"kv_cache": CHUNK}
    world.wake()
    allocator.forget_last_sleep()
    taken_back = asked("sleep_report")
    assert (taken_back["sleeps"], taken_back["last_sleep"]) == (1, None)


class Sleeper:
    """What the sleep of vLLM's GPU worker needs of its worker.

    Attributes:
        report: What the allocator reported before the worker went on.
    """

    def __init__(self, allocator: CuMemAllocator) -> None:
        self._allocator = allocator
        model = SimpleNamespace(enable_nccl_comm_suspend=True)
        self.vllm_config = SimpleNamespace(model_config=model)
        self.sleep_mode_backend = self
        self.report: SleepReport | None = None

    def suspend(self, level: int) -> None:
        self.report = self._allocator.sleep(LEVEL_1)


@pytest.mark.parametrize("frees", [True, False], ids=["some", "nothing"])
def test_the_worker_frees_more_than_the_allocator(
    world: World,
    allocator: CuMemAllocator,
    monkeypatch: pytest.MonkeyPatch,
    frees: bool,
) -> None:
    """The report is of the end of its sleep, when communicators are suspended."""
    from vllm.v1.worker import gpu_worker

    world.allocate("weights", 2 * CHUNK)
    worker = Sleeper(allocator)
    with ExitStack() as communicators, logged(level=logging.INFO) as lines:
        communicators.enter_context(memory_of_the_driver(5 * CHUNK))
        suspend = communicators.close if frees else lambda: None
        monkeypatch.setattr(gpu_worker, "suspend_device_comms", suspend)
        gpu_worker.Worker.sleep(worker)
        last = allocator.last_sleep
    assert worker.report is not None and worker.report.held.rest_bytes == 5 * CHUNK
    assert last is not None
    assert last.held.rest_bytes == (0 if frees else 5 * CHUNK)
    assert (last.freed, last.seconds) == (worker.report.freed, worker.report.seconds)
    said = [line for line in lines if "less than the allocator left" in line]
    assert len(said) == frees
    world.wake()


def test_a_report_that_cannot_be_settled(
    world: World, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.allocate("weights", CHUNK)
    report = allocator.sleep(LEVEL_1)
    with logged(LOGGER) as lines, monkeypatch.context() as patch:
        patch.setattr(allocator, "memory", fail)
        settle_sleep_report()
    (line,) = lines
    assert "stays as the allocator made it" in line and AWAY in line
    assert allocator.last_sleep is report
    world.wake()


def test_nobody_settles_without_an_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CuMemAllocator, "instance", None)
    with logged(LOGGER) as lines:
        settle_sleep_report()
    assert lines == []


def test_metrics_are_taken_once(world: World, allocator: CuMemAllocator) -> None:
    world.allocate("weights", 2 * CHUNK)
    world.allocate("kv_cache", CHUNK)
    allocator.sleep(LEVEL_1)
    taken = asked("take_sleep_metrics")
    assert taken == {
        "rank": 3,
        "copied": [{"tag": "weights", "direction": "offload", "bytes": 2 * CHUNK}],
        "asleep": {
            "kv_cache": {"host": 0, "none": CHUNK},
            "weights": {"host": 2 * CHUNK, "none": 0},
        },
        "host": {"backup": 2 * CHUNK, "spare": 0},
    }
    asked("sleep_report")
    assert asked("take_sleep_metrics") == {**taken, "copied": []}
    world.wake()
    assert asked("take_sleep_metrics")["host"] == {"backup": 0, "spare": 2 * CHUNK}


# --- No answer is no failure ----------------------------------------------------------


def test_a_rank_whose_memory_does_not_sleep(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CuMemAllocator, "instance", None)
    answer = asked("sleep_report")
    assert set(answer) == {*COMMON, "unavailable"}
    assert "--enable-sleep-mode" in answer["unavailable"]
    assert asked("take_sleep_metrics") is None
    assert CuMemAllocator.instance is None, "none is made"


@pytest.mark.parametrize(
    ("is_cuda_alike", "reason"),
    [(True, "no driver; load it"), (False, "this platform is xpu")],
)
def test_a_rank_without_a_driver(
    monkeypatch: pytest.MonkeyPatch, is_cuda_alike: bool, reason: str
) -> None:
    """Which is no fault where sleep mode has another allocator."""
    platform = SimpleNamespace(is_cuda_alike=lambda: is_cuda_alike, device_name="xpu")
    monkeypatch.setattr(vllm.platforms, "current_platform", platform)
    monkeypatch.setattr(CuMemAllocator, "instance", None)
    monkeypatch.setattr(cumem, "unavailable_reason", lambda: "no driver; load it")
    assert asked("sleep_report")["unavailable"].endswith(reason)


class Unfinished(WorkerBase):
    """A worker of somebody's, which lacks what vLLM's have."""

    def __init__(self) -> None: ...


def test_a_worker_that_does_not_know_who_it_is(
    world: World, allocator: CuMemAllocator
) -> None:
    world.allocate("weights", CHUNK)
    answer = asked("sleep_report", Unfinished)
    names = ("rank", "data_parallel_rank", "data_parallel_size")
    assert [answer[name] for name in names] == [None] * 3
    assert answer["now"]["device"]["tags"] == {"weights": CHUNK}
    allocator.sleep(LEVEL_1)
    with logged(LOGGER) as lines:
        assert asked("take_sleep_metrics", Unfinished) is None
    assert len(lines) == 1
    assert asked("take_sleep_metrics")["copied"] != [], "nobody was told of them"
    world.wake()


@pytest.mark.parametrize(
    "place",
    [
        "socket.gethostname",
        "vllm.device_allocator.cumem.unavailable_reason",
        "vllm.v1.worker.sleep_reports._allocator",
        "vllm.v1.worker.sleep_reports._names",
    ],
)
def test_nothing_that_fails_is_raised(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(CuMemAllocator, "instance", None)
    monkeypatch.setattr(place, fail)
    with logged(LOGGER):
        answer = asked("sleep_report")
        assert asked("take_sleep_metrics") is None
    assert set(answer) == {*COMMON, "unavailable"}
    assert answer["unavailable"] == f"OSError: {AWAY}"
    assert answer["schema_version"] == 1


@pytest.mark.parametrize("method", ["sleep_report", "take_sleep_metrics"])
def test_an_account_that_fails(
    allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    for name in ("memory", "host_memory"):
        monkeypatch.setattr(allocator, name, fail)
    with logged(LOGGER) as lines:
        answer = asked(method)
    if method == "sleep_report":
        assert answer["unavailable"] == f"OSError: {AWAY}"
    else:
        assert answer is None
    (line,) = lines
    assert AWAY in line


def test_metrics_that_fail_lose_no_copies(
    world: World, allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.allocate("weights", CHUNK)
    allocator.sleep(LEVEL_1)
    for name in ("host_memory", "asleep_bytes"):
        with monkeypatch.context() as patch:
            patch.setattr(allocator, name, fail)
            assert asked("take_sleep_metrics") is None
    assert [each["bytes"] for each in asked("take_sleep_metrics")["copied"]] == [CHUNK]
    world.wake()
