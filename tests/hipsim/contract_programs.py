# SPDX-License-Identifier: Apache-2.0
"""Builds the contracts with HIP and with CUDA's driver, against their simulators."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

from vllm_rocm_memory.sim import cudasim, hipsim

SOURCES = Path(__file__).with_name("contract")
BUILD = Path(__file__).parents[2] / "build" / "contract"
DEADLINE_S = 240


def build() -> None:
    """Two at a time take turns, so that the second finds what the first has made.

    Raises:
        AssertionError: Something does not compile; the compiler's words.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    configure = [
        *("cmake", "-S", SOURCES, "-B", BUILD, "-G", "Ninja"),
        f"-DHIP_LIBRARY={hipsim.library_path()}",
        f"-DCUDA_LIBRARY={cudasim.library_path()}",
    ]
    make = ["cmake", "--build", BUILD, "-j2"]
    with (BUILD / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (configure, make):
            done = subprocess.run(
                command,
                env={**os.environ, "PATH": tools},
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
            )
            assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    build()
