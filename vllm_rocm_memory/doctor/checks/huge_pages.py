# SPDX-License-Identifier: Apache-2.0
"""Whether host memory for backups and the KV pool can lie in huge pages."""

import re

from vllm_rocm_memory.doctor.finding import Finding, State
from vllm_rocm_memory.doctor.machine import Machine

_FILE = "sys/kernel/mm/transparent_hugepage/enabled"
_SLOWER = "a first sleep takes its host memory page by page, which is slower"


def run(machine: Machine) -> Finding:
    text = machine.read(_FILE)
    match = re.search(r"\[(\w+)\]", text or "")
    if match is None:
        return Finding(
            State.NOT_AVAILABLE, f"this kernel does not say (/{_FILE} is not there)"
        )
    mode = match[1]
    if mode == "never":
        return Finding(
            State.PARTIAL,
            f"/{_FILE} is never: {_SLOWER}",
            remedy=f"`echo madvise | sudo tee /{_FILE}`",
        )
    # prctl(PR_SET_THP_DISABLE), which children inherit; proc_pid_status(5)
    if re.search(r"^THP_enabled:\s*0", machine.read("proc/self/status") or "", re.M):
        return Finding(
            State.PARTIAL,
            f"/{_FILE} is {mode}, and this process was denied them: {_SLOWER}",
            remedy="Start the server from a process that did not call "
            "prctl(PR_SET_THP_DISABLE), such as another shell or service",
        )
    return Finding(State.SUCCESS, f"/{_FILE} is {mode}")
