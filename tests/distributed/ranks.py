# SPDX-License-Identifier: Apache-2.0
"""Processes that are the ranks of one group, each with a simulated GPU of its own.

What the ranks of a node do to each other's memory shows only between processes:
hipsim's devices are a process's own, and nothing but IPC shares their memory.

    with Ranks(2) as ranks:
        first, second = ranks.run("tests.distributed.module:function", 1, "two")

runs `function(rank, 1, "two")` on both at the same time. The functions are named and
not passed on, so that a rank imports no more than it runs.
"""

import ctypes
import gc
import importlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from vllm_rocm_memory.sim import hipsim, torch_device

ROOT = Path(__file__).resolve().parents[2]

_START = 120  # seconds, to import torch and to find each other
_GRACE = 5  # seconds that a rank has to answer once another one has failed
_END = 20  # seconds, for the interpreter to go down
_LOG = 4000  # characters of a rank's output that an error shows
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# `tests` is taken from this checkout whatever lies on the path: a tree of vLLM's may
# bring a package of that name.
_BOOTSTRAP = """
import faulthandler, signal, sys, types
faulthandler.enable()
faulthandler.register(signal.SIGUSR1, all_threads=True)
sys.modules["tests"] = tests = types.ModuleType("tests")
tests.__path__ = [sys.argv[1]]
from tests.distributed import ranks
ranks.serve(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
"""

# Beside eight other processes a pool of threads a rank only gets into the way, and the
# group shall not look the machine's name up.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class Rank:
    """Who a function runs as.

    Attributes:
        rank: From 0 on.
        size: How many there are.
        group: All of them, over gloo; it is the default group, too.
    """

    rank: int
    size: int
    group: dist.ProcessGroup

    def gather(self, value: object) -> list[Any]:
        """Each rank's value, in their order; all ranks call it."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def barrier(self) -> None:
        dist.barrier(group=self.group)


@contextmanager
def simulated_device(profile: str | None = None, **switches: Any) -> Iterator[None]:
    """PyTorch's device is the simulator's, and nothing of it is left afterwards.

    For decorating a function of a rank, whose variables have gone when it is over.

    Args:
        profile: The release of HIP; None keeps the present one.
        switches: Of `hipsim.configure`; the host reads virtual memory unless they say
            otherwise, because kernels are host code.

    Raises:
        AssertionError: Something is left.
    """
    hipsim.reset(profile)
    hipsim.configure(**{"host_reads": "allow", **switches})
    uninstall = torch_device.install()
    try:
        yield
        gc.collect()
        torch.cuda.empty_cache()
        hipsim.assert_clean()
    finally:
        uninstall()
        hipsim.reset()


class RankFailed(AssertionError):
    """A function raised, hung or ended its process on at least one rank.

    Attributes:
        failures: By rank, what happened there: a traceback, or a sentence and the end
            of the process's output.
    """

    def __init__(self, target: str, failures: Mapping[int, str]) -> None:
        self.failures = dict(failures)
        parts = (f"--- rank {rank}:\n{text}" for rank, text in failures.items())
        super().__init__("\n".join((f"{target} failed", *parts)))


class _Process:
    """One rank, as the process that started it sees it."""

    def __init__(self, rank: int, size: int, environment: Mapping[str, str]) -> None:
        self.rank = rank
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.connection, theirs = Pipe()
        with theirs:
            numbers = (str(theirs.fileno()), str(rank), str(size))
            # -P: neither does the folder that the tests run in come first.
            command = [sys.executable, "-P", "-c", _BOOTSTRAP, str(ROOT / "tests")]
            self._process = subprocess.Popen(
                [*command, *numbers],
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )

    def send(self, message: object) -> None:
        # One that has ended is noticed by `receive`.
        with suppress(OSError):
            self.connection.send(message)

    def receive(self) -> tuple[bool, Any]:
        """Whether it went well, and the result or what happened instead."""
        try:
            succeeded, value = _unpacked(self.connection.recv_bytes())
        except (EOFError, OSError):
            self._process.wait(_END)
            code = self._process.returncode
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return False, f"The process ended ({how}). Its output:\n{self.output()}"
        except Exception:  # what was pickled there cannot be read here
            return False, traceback.format_exc()
        return succeeded, value

    def output(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-_LOG:]

    def where(self) -> str:
        """Where each of its threads is, which ends up in its output."""
        try:
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(0.5)
        finally:
            self.kill()
        return self.output()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Lets it end by itself, for a while."""
        self.connection.close()
        try:
            self._process.wait(_END)
        except subprocess.TimeoutExpired:
            self.kill()
        self._log.close()


class Ranks:
    """Processes of this Python that form a group on this machine.

    They start with the first `run`, and again with the one after a failure: nobody
    knows what a rank that failed half way owes to the others. They end with the
    context, and with the process that started them.

    Args:
        size: How many.
        tree: A folder with another `vllm` than the installed one.
        environment: Variables beside those of this process.
    """

    def __init__(
        self,
        size: int = 2,
        tree: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.size = size
        path = [] if tree is None else [os.fspath(tree)]
        if inherited := os.environ.get("PYTHONPATH"):
            path.append(inherited)
        self._environment = {**os.environ, **_ENVIRONMENT, **(environment or {})}
        self._environment["PYTHONPATH"] = os.pathsep.join(path)
        self._processes: list[_Process] = []

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.stop()

    def run(self, target: str, *arguments: object, timeout: float = 60) -> list[Any]:
        """Runs a function on all ranks at the same time.

        Args:
            target: `module:function`; it is called with its Rank and the arguments,
                which are pickled, as the results are.
            timeout: Seconds for all of it, after which the processes are killed.

        Returns:
            The results, by rank.

        Raises:
            RankFailed: On one rank or more there is no result.
        """
        try:
            if not self._processes:
                self._start()
            for process in self._processes:
                process.send((target, arguments))
            return self._collect(target, timeout)
        except BaseException:
            # Also of a test that is interrupted: what a rank answers late would be
            # taken for the answer to the next call.
            self._kill()
            raise

    def stop(self) -> None:
        """Ends the processes; the next `run` starts others."""
        processes, self._processes = self._processes, []
        with ExitStack() as last:
            for process in processes:
                last.callback(process.end)
            # All at once: none ends before it has heard that the others may.
            for process in processes:
                process.send(None)

    def _start(self) -> None:
        for rank in range(self.size):
            process = _Process(rank, self.size, self._environment)
            self._processes.append(process)
        # Where the others find the first, which chose a free port.
        succeeded, port = self._answer_of(self._processes[0], _START)
        if not succeeded:
            raise RankFailed("starting the ranks", {0: port})
        for process in self._processes[1:]:
            process.send(port)
        self._collect("starting the ranks", _START)

    def _answer_of(self, process: _Process, timeout: float) -> tuple[bool, Any]:
        if not process.connection.poll(timeout):
            return False, f"No answer within {timeout:g} s:\n{process.where()}"
        return process.receive()

    def _collect(self, target: str, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        end = time.monotonic() + timeout
        waiting = list(self._processes)
        while waiting:
            left = max(0, end - time.monotonic())
            ready = wait([process.connection for process in waiting], left)
            if not ready:
                break
            for process in [each for each in waiting if each.connection in ready]:
                waiting.remove(process)
                succeeded, value = process.receive()
                if succeeded:
                    results[process.rank] = value
                    continue
                failures[process.rank] = value
                end = min(end, time.monotonic() + _GRACE)
        for process in waiting:
            failures[process.rank] = f"It did not return:\n{process.where()}"
        if failures:
            raise RankFailed(target, dict(sorted(failures.items())))
        return [results[rank] for rank in range(self.size)]

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        self.stop()


# --- in the process of a rank ---------------------------------------------------------


def serve(file: int, rank: int, size: int) -> None:
    """What the process of a rank does: runs what it is asked for until it may end."""
    _end_with_parent()
    torch.set_num_threads(1)
    with Connection(file) as connection:
        me = Rank(rank, size, _join(connection, rank, size))
        hipsim.load()
        connection.send_bytes(_packed(True, None))
        while (request := _next(connection)) is not None:
            target, arguments = request
            connection.send_bytes(_perform(me, target, arguments))
        dist.destroy_process_group()


def _end_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that started this rank is gone")


def _join(connection: Connection, rank: int, size: int) -> dist.ProcessGroup:
    limit = timedelta(seconds=_START)
    # AITER and vLLM exchange what they export over this store.
    if rank == 0:
        store = TCPStore(
            "127.0.0.1", 0, size, is_master=True, timeout=limit, wait_for_workers=False
        )
        connection.send_bytes(_packed(True, store.port))
    else:
        port = connection.recv()
        store = TCPStore("127.0.0.1", port, size, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    group = dist.group.WORLD
    assert group is not None
    return group


def _next(connection: Connection) -> tuple[str, Sequence[object]] | None:
    try:
        request: tuple[str, Sequence[object]] | None = connection.recv()
    except EOFError:
        return None
    return request


def _perform(rank: Rank, target: str, arguments: Sequence[object]) -> bytes:
    """The answer; a result that cannot be pickled is a failure, too."""
    try:
        module, _, name = target.partition(":")
        function = getattr(importlib.import_module(module), name)
        return _packed(True, function(rank, *arguments))
    except Exception:
        return _packed(False, traceback.format_exc())


def _packed(succeeded: bool, value: object) -> bytes:
    # Plain pickle does not know tensors of every type.
    packed = io.BytesIO()
    torch.save((succeeded, value), packed)
    return packed.getvalue()


def _unpacked(packed: bytes) -> tuple[bool, Any]:
    unpacked: tuple[bool, Any] = torch.load(io.BytesIO(packed), weights_only=False)
    return unpacked
