# SPDX-License-Identifier: Apache-2.0
"""Whether the host, or its container, can hold what is going to lie on it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_rocm_memory.doctor.facts import ServingFacts
from vllm_rocm_memory.doctor.finding import Finding, State
from vllm_rocm_memory.doctor.machine import NO_ARGUMENTS, Machine
from vllm_rocm_memory.sizes import readable

_CAPACITY = "vllm/device_allocator/host_capacity.py"
_SYS_NICE = 23  # CAP_SYS_NICE, capabilities(7)
_FILTERED = "2"  # SECCOMP_MODE_FILTER, seccomp(2)


@dataclass(frozen=True)
class HostNeed:
    """Host memory of a server in bytes, of all its ranks on this host together.

    Attributes:
        backup_bytes: at most, of the weights that a sleep at level 1 keeps.
        shared_bytes: how much of that other hosts' or engines' ranks may have instead,
            as each has a part of the experts only.
        pool_bytes: of the KV connector.
        ranks: the processes that share both.
        unknown: why the weights are not among them, None where they are or are not
            kept at all.
    """

    backup_bytes: int
    shared_bytes: int
    pool_bytes: int
    ranks: int
    unknown: str | None = None

    @property
    def total_bytes(self) -> int:
        return self.backup_bytes + self.pool_bytes

    @property
    def least_bytes(self) -> int:
        return self.total_bytes - self.shared_bytes

    @property
    def rank_bytes(self) -> int:
        return -(-self.total_bytes // self.ranks)

    def __str__(self) -> str:
        weights = f"about {readable(self.backup_bytes)}"
        if self.shared_bytes:
            least = readable(self.backup_bytes - self.shared_bytes)
            weights = f"{least} to {readable(self.backup_bytes)}"
        parts = (
            (self.backup_bytes, f"{weights} of weights (asleep)"),
            (self.pool_bytes, f"{readable(self.pool_bytes)} of KV pool"),
        )
        return " and ".join(words for size, words in parts if size) or "nothing"


def host_need(facts: ServingFacts) -> HostNeed:
    """What a server with these facts holds on this host; each engine has its own."""
    weights = facts.weights_bytes if facts.enable_sleep_mode else 0
    backup = _here(facts, weights or 0)
    shared = 0
    if facts.shares_experts:
        shared = backup - -(-backup // facts.data_parallel_size)
    ranks = facts.tensor_parallel_size * facts.pipeline_parallel_size
    return HostNeed(
        backup_bytes=backup,
        shared_bytes=shared,
        pool_bytes=_here(facts, facts.cpu_bytes_to_use or 0),
        ranks=max(1, _here(facts, ranks)),
        unknown=facts.weights_unknown or "no reason" if weights is None else None,
    )


def _here(facts: ServingFacts, of_an_engine: int) -> int:
    return -(-facts.local_engines * of_an_engine // facts.hosts_per_engine)


def run(machine: Machine) -> Finding:
    try:
        limit = machine.series_module(_CAPACITY).host_capacity(machine.root)
    except ModuleNotFoundError as error:
        return Finding(
            State.NOT_AVAILABLE,
            f"the package {error.name}, which vLLM brings, is not installed",
        )
    room = f"{readable(limit.available)} are available: {limit.source}"
    details = tuple(_memory_policy(machine))
    facts = machine.serving
    if isinstance(facts, str) or facts.refusal:
        why = facts if isinstance(facts, str) else "vLLM refuses these arguments"
        return Finding(
            State.NOT_AVAILABLE,
            f"{room}; how much is needed is not known: {why}",
            details,
            "Give the arguments of `vllm serve` after `doctor`"
            if facts == NO_ARGUMENTS
            else None,
        )
    need = host_need(facts)
    details = (*_of_weights(need), *details)
    if need.total_bytes > limit.available:
        too_much = need.least_bytes > limit.available
        return Finding(
            State.MISSING if too_much else State.PARTIAL,
            f"{need} {'do' if too_much else 'may'} not fit: {room}",
            ("A server that runs already has taken its share of that.", *details),
            " or ".join((limit.remedy, *_less(facts, need))),
        )
    if need.unknown:
        return Finding(
            State.PARTIAL,
            f"{room}; the size of the weights is not known: {need.unknown}",
            details,
            facts.download or "Compare the size of the model's weights with that",
        )
    return Finding(State.SUCCESS, f"{need} to be held; {room}", details)


def _of_weights(need: HostNeed) -> Iterator[str]:
    if need.backup_bytes:
        yield (
            "The weights are counted by their files; what sleeps is more or less with "
            "another --dtype, --quantization or --cpu-offload-gb."
        )
    if need.shared_bytes:
        yield "Data parallel engines share a model's experts, and nothing else of it."


def _less(facts: ServingFacts, need: HostNeed) -> Iterator[str]:
    """What makes the need smaller."""
    if need.pool_bytes:
        yield f"lower {facts.pool_option or 'cpu_bytes_to_use'}"
    if need.backup_bytes:
        yield "sleep at level 2, which keeps no weights"


def _memory_policy(machine: Machine) -> Iterator[str]:
    """Say where backups may lie on the wrong NUMA node, as far as it can be seen."""
    nodes = [*(machine.root / "sys/devices/system/node").glob("node[0-9]*")]
    status = machine.read("proc/self/status") or ""
    filtered = re.search(rf"^Seccomp:\s*{_FILTERED}$", status, re.M)
    bounding = re.search(r"^CapBnd:\s*([0-9a-f]+)$", status, re.M)
    nice = bounding is None or int(bounding[1], 16) >> _SYS_NICE & 1
    if len(nodes) > 1 and filtered and not nice:
        yield (
            f"{len(nodes)} NUMA nodes, and a seccomp filter without CAP_SYS_NICE: "
            "Docker's refuses mbind then, and backups may lie far from their GPU. "
            "--cap-add SYS_NICE allows it."
        )
