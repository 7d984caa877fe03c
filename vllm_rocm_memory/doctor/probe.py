# SPDX-License-Identifier: Apache-2.0
"""Runs a probe in this process, which ends when the doctor does.

    python -m vllm_rocm_memory.doctor.probe PID MODULE [argument ...]

A probe may hang in a driver, and a doctor that is killed cannot end it any more.
"""

import ctypes
import json
import os
import runpy
import signal
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1


def tell(answer: Mapping[str, Any]) -> None:
    """Print an answer. The last one counts, so that a probe may have told by then."""
    print(f"\n{json.dumps(answer)}", flush=True)


def end() -> NoReturn:
    """End at once: threads of what was imported may not, and a driver may hang."""
    os._exit(0)


def main() -> None:
    doctor, module, *arguments = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(doctor):
        raise SystemExit("the doctor has ended")
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
