# SPDX-License-Identifier: Apache-2.0
"""Whether a limit of locked memory stands against registering host memory."""

import re

from vllm_rocm_memory.doctor.checks.host_memory import HostNeed, host_need
from vllm_rocm_memory.doctor.finding import Finding, State
from vllm_rocm_memory.doctor.machine import Machine
from vllm_rocm_memory.sizes import readable

_IPC_LOCK = 14  # CAP_IPC_LOCK, capabilities(7)
_UNLIMITED = "unlimited"
# uid_map of the first user namespace, the only one whose CAP_IPC_LOCK counts.
_FIRST_NAMESPACE = ["0", "0", "4294967295"]
_ELSEWHERE = (
    "for a service LimitMEMLOCK=infinity, for a container --ulimit memlock=-1 or "
    "--cap-add IPC_LOCK, for a login /etc/security/limits.conf"
)


def run(machine: Machine) -> Finding:
    limits = _limits(machine)
    if limits is None:
        return Finding(State.NOT_AVAILABLE, "the limit of locked memory is not known")
    soft, hard = limits
    if soft is None:
        return Finding(State.SUCCESS, "unlimited (RLIMIT_MEMLOCK)")
    told = f"RLIMIT_MEMLOCK is {readable(soft)}"
    if _may_exceed(machine):
        return Finding(State.SUCCESS, f"{told}, and CAP_IPC_LOCK lifts it")
    need = _need(machine)
    if need and need.rank_bytes <= soft and not need.unknown:
        what = readable(need.rank_bytes) if need.total_bytes else "nothing"
        return Finding(State.SUCCESS, f"{told}, and a rank registers {what}")
    if need and need.total_bytes:
        told += f", and a rank registers {readable(need.rank_bytes)} ({need} in all)"
    return Finding(
        State.PARTIAL,
        told,
        (
            "A driver that counts what it registers refuses a KV pool beyond the "
            "limit, and sleep and wake copy more slowly then. CUDA's drivers seen so "
            "far do not count it.",
        ),
        _remedy(hard, need),
    )


def _limits(machine: Machine) -> tuple[int | None, int | None] | None:
    """The soft and the hard limit in bytes, each None for no limit."""
    text = machine.read("proc/self/limits") or ""
    match = re.search(r"^Max locked memory\s+(\w+)\s+(\w+)", text, re.M)
    if match is None:
        return None
    soft, hard = (None if word == _UNLIMITED else int(word) for word in match.groups())
    return soft, hard


def _may_exceed(machine: Machine) -> bool:
    status = machine.read("proc/self/status") or ""
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.M)
    namespace = (machine.read("proc/self/uid_map") or "").split()
    return (
        effective is not None
        and bool(int(effective[1], 16) >> _IPC_LOCK & 1)
        and namespace == _FIRST_NAMESPACE
    )


def _need(machine: Machine) -> HostNeed | None:
    facts = machine.serving
    if isinstance(facts, str) or facts.refusal:
        return None
    return host_need(facts)


def _remedy(hard: int | None, need: HostNeed | None) -> str:
    if hard is None:
        return (
            f"`ulimit -l unlimited` in the shell that starts the server; {_ELSEWHERE}"
        )
    if need and not need.unknown and need.rank_bytes <= hard:
        return f"`ulimit -l {hard >> 10}` in the shell that starts the server"
    return f"Raise the hard limit, which is {readable(hard)}: {_ELSEWHERE}"
