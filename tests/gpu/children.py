# SPDX-License-Identifier: Apache-2.0
"""Processes that the GPU tests start: bounded in time, and heard when they fail."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO

from partitions import Machine

ROOT = Path(__file__).resolve().parents[2]
# Characters of what a child said that a failure shows.
TAIL = 6000

ENGINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # The engine core in the program's own process, whose memory can be asked for.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # For `collective_rpc` with functions.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}
"""For engines: no hub, nothing that has to be downloaded or compiled for long."""

MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
"""NVLink's multicast is not what is tested, and not every machine lets it."""

LOOPBACK = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    # Their workspaces are what multicast is used for.
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    **MULTICAST_OFF,
}
"""For several ranks on one host."""


def environment(*parts: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with changes, and without vLLM's of an engine here."""
    made = dict(os.environ)
    made.pop("NCCL_GRAPH_REGISTER", None)
    for part in parts:
        made |= part
    return made


@cache
def share_gpu() -> bool:
    """Whether all ranks use the only GPU: a rehearsal of what needs one for each."""
    return Machine.seen_by_torch().ranks_share_gpu


def free_port() -> int:
    """A port of the loopback device that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def python(program: Path, *arguments: object) -> list[str]:
    """The command that runs a program of this folder with this Python."""
    return [sys.executable, str(program), *map(str, arguments)]


def run(
    *commands: Sequence[str], env: Mapping[str, str], seconds: float, cwd: Path = ROOT
) -> list[str]:
    """Run commands side by side; with the first failure all of them end.

    Args:
        commands: Each one and its arguments.
        env: Of all.
        seconds: For all together.
        cwd: Where they run.

    Returns:
        What each wrote to its standard output.

    Raises:
        AssertionError: One failed or they took too long; the end of what each said.
    """
    logs = [_Log() for _ in commands]
    children = [
        subprocess.Popen(
            command,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=log.out,
            stderr=log.err,
            start_new_session=True,
        )
        for command, log in zip(commands, logs, strict=True)
    ]
    try:
        complaint = _wait(children, seconds)
        assert not complaint, "\n".join(
            [complaint, *(log.tail(n) for n, log in enumerate(logs))]
        )
        return [log.text(log.out) for log in logs]
    finally:
        for child in children:
            # With what it has started, which may outlive it: ranks of an engine, say.
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        for log in logs:
            log.close()


class _Log:
    """What a child says, in files: a pipe that nobody reads would stop it."""

    def __init__(self) -> None:
        self.out = tempfile.TemporaryFile()  # noqa: SIM115
        self.err = tempfile.TemporaryFile()  # noqa: SIM115

    @staticmethod
    def text(file: IO[bytes]) -> str:
        file.seek(0)
        return file.read().decode(errors="replace")

    def tail(self, number: int) -> str:
        out, err = self.text(self.out), self.text(self.err)
        return (
            f"--- process {number}, output:\n{out[-TAIL:]}\n"
            f"--- process {number}, errors:\n{err[-TAIL:]}"
        )

    def close(self) -> None:
        self.out.close()
        self.err.close()


def _wait(children: list["subprocess.Popen[bytes]"], seconds: float) -> str:
    """What went wrong; nothing if all ended well.

    No child is reaped, so that its number still is that of its group.
    """
    deadline = time.monotonic() + seconds
    running = dict(enumerate(children))
    while running:
        for number, child in list(running.items()):
            ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                continue
            del running[number]
            if ended.si_code != os.CLD_EXITED:
                name = signal.Signals(ended.si_status).name
                return f"process {number} was ended by {name}"
            if ended.si_status != 0:
                return f"process {number} ended with {ended.si_status}"
        if running and time.monotonic() > deadline:
            return f"processes {sorted(running)} took more than {seconds:g} s"
        time.sleep(0.05)
    return ""
