# SPDX-License-Identifier: Apache-2.0
"""What a worker tells of its memory when it is asked."""

import socket
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.device_allocator.cumem import CuMemAllocator

logger = init_logger(__name__)

SCHEMA_VERSION = 1
"""Of a rank's answer: raised when a key goes or changes its meaning."""

_ENABLE = "start the server with --enable-sleep-mode and the sleep mode backend cumem"


class SleepReports:
    """Methods of every worker, for ``collective_rpc``.

    Neither of them raises: an executor over several processes would leave the answers
    of the other ranks in their queues.
    """

    def sleep_report(self) -> dict[str, Any]:
        """The last sleep of this rank, and what holds memory now.

        Returns:
            ``schema_version``, ``rank``, ``data_parallel_rank``,
            ``data_parallel_size`` and ``hostname``, and beside them ``sleeps``, how
            many have not failed, ``last_sleep``, a `SleepReport` as a dictionary or
            None, and ``now`` with a `DeviceMemory` (``device``) and a `HostMemory`
            (``host``); or ``unavailable``, why not and what to do. All in bytes. A
            worker that does not know who it is has None there.

        """
        answer: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **_NOBODY}
        try:
            answer |= _names(self)
            answer["hostname"] = socket.gethostname()
            answer |= _account()
        except Exception as error:
            logger.exception("The account of the device's memory could not be made.")
            answer["unavailable"] = f"{type(error).__name__}: {error}"
        return answer

    def take_sleep_metrics(self) -> dict[str, Any] | None:
        """What Prometheus is told of this rank.

        Returns:
            ``rank``; ``copied``, bytes by tag and direction since they were last taken;
            ``asleep``, bytes by tag, with a backup on the host and without; ``host``,
            bytes of the host by what they do. None where nothing of this rank can
            sleep.

        """
        try:
            allocator = _allocator()
            return None if allocator is None else _metrics(self, allocator)
        except Exception:
            logger.exception("The metrics of sleep mode's memory could not be taken.")
            return None


def settle_sleep_report() -> None:
    """Take anew what is held, at the end of a worker's sleep; it never raises.

    Communicators have given their memory back by then, and on ROCm the worker's own
    wait for the driver is over.
    """
    try:
        allocator = _allocator()
        if allocator is not None:
            allocator.settle_last_sleep()
    except Exception:
        logger.exception("The report of the sleep stays as the allocator made it.")


_NOBODY = dict.fromkeys(
    ("rank", "data_parallel_rank", "data_parallel_size", "hostname")
)


def _names(worker: Any) -> dict[str, Any]:
    parallel = getattr(worker, "parallel_config", None)
    return {
        "rank": getattr(worker, "rank", None),
        "data_parallel_rank": getattr(parallel, "data_parallel_index", None),
        "data_parallel_size": getattr(parallel, "data_parallel_size", None),
    }


def _allocator() -> "CuMemAllocator | None":
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.instance


def _account() -> dict[str, Any]:
    allocator = _allocator()
    if allocator is None:
        return {"unavailable": _no_allocator()}
    device, host = allocator.memory()
    last = allocator.last_sleep
    return {
        "sleeps": allocator.sleeps,
        "last_sleep": None if last is None else last.to_dict(),
        "now": {"device": device.to_dict(), "host": host.to_dict()},
    }


def _no_allocator() -> str:
    from vllm.device_allocator.cumem import unavailable_reason
    from vllm.platforms import current_platform

    reason = unavailable_reason()
    if reason is None:
        return f"this rank has no memory that can sleep; {_ENABLE}"
    if not current_platform.is_cuda_alike():
        return (
            "sleep mode keeps a report on ROCm and CUDA, and this platform is "
            f"{current_platform.device_name}"
        )
    return reason


def _metrics(worker: Any, allocator: "CuMemAllocator") -> dict[str, Any]:
    host, asleep = allocator.host_memory(), allocator.asleep_bytes()
    rank = worker.rank
    copied = allocator.take_copied_bytes()  # last, since it is told once
    return {
        "rank": rank,
        "copied": [
            {"tag": tag, "direction": direction, "bytes": num_bytes}
            for (tag, direction), num_bytes in copied.items()
        ],
        "asleep": asleep,
        "host": {"backup": host.backup_bytes, "spare": host.spare_bytes},
    }
