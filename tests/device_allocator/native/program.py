# SPDX-License-Identifier: Apache-2.0
"""Programs in processes of their own, each with the module and a simulator."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
DEADLINE = 60  # seconds, for whatever a process is waited for

_PRELUDE = """
import ctypes, os, sys
from pathlib import Path
from vllm_rocm_memory.sim import cudasim, hipsim
from tests.device_allocator.native.module import load_module
cumem = load_module()

handles = {}

def start(simulator):
    simulator.load()
    cumem.init_module(lambda handle: handles.update({handle[2]: handle}), handles.pop)

_library = ctypes.CDLL(cumem.__file__)
_library.my_malloc.restype = ctypes.c_void_p
_library.my_malloc.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_library.my_free.restype = None
_library.my_free.argtypes = (
    ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p
)

def malloc(size, device=0):
    return _library.my_malloc(size, device, None)

def free(ptr, size=0):
    _library.my_free(ptr, size, 0, None)
"""


def run_program(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `text` after the prelude, with variables of the environment as keywords."""
    unwanted = ("HIPSIM_", "LD_LIBRARY_PATH", "VLLM_ROCM_SLEEP_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
    return subprocess.run(
        [sys.executable, "-c", _PRELUDE + text],
        env={**kept, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )


def output_of(text: str, **environment: str) -> list[str]:
    """The lines that a program prints, which must end well and complain of nothing."""
    done = run_program(text, **environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout.splitlines()
