# SPDX-License-Identifier: Apache-2.0
"""Whether PyTorch's expandable segments are on, beside what cannot have them."""

import shlex
from collections.abc import Mapping

from vllm_rocm_memory.doctor.finding import Finding, State
from vllm_rocm_memory.doctor.machine import Machine

# The first that is not empty counts, for PyTorch and for vLLM's alloc_conf.
VARIABLES = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
)
_OPTION = "expandable_segments"


def run(machine: Machine) -> Finding:
    given = {
        name: value for name in VARIABLES if (value := machine.environment.get(name))
    }
    if not given:
        return Finding(State.SUCCESS, f"off: {', '.join(VARIABLES)} are not set")
    name, value = next(iter(given.items()))
    others = _others(given, name)
    if not _is_on(value):
        return Finding(State.SUCCESS, f"off, by {name}={value}", others)
    remedy = _remedy(name, value)
    if reason := _refused(machine, name):
        return Finding(
            State.MISSING,
            f"on, by {name}={value}, and vLLM refuses to start with that",
            (reason, *others),
            f"{remedy}, or add --enable-cumem-allocator (--enable-sleep-mode does that "
            "by itself)",
        )
    return Finding(
        State.PARTIAL,
        f"on, by {name}={value}",
        (
            "Memory of sleep mode is allocated without them, all other memory with. A "
            "KV connector without the cuMem allocator is refused at start.",
            "AITER before 0.1.20 does not look out for them; later releases do.",
            *others,
        ),
        remedy,
    )


def _is_on(value: str) -> bool:
    for field in value.split(","):
        option, _, word = field.partition(":")
        if option.strip() == _OPTION:
            return word.strip().lower() in ("true", "1")
    return False


def _others(given: Mapping[str, str], first: str) -> tuple[str, ...]:
    return tuple(
        f"{name}={value} does not count beside {first}."
        for name, value in given.items()
        if name != first
    )


def _refused(machine: Machine, name: str) -> str | None:
    """Why vLLM would not start with the variable; None if it would, for all we know."""
    facts = machine.serving
    if isinstance(facts, str):
        return None
    if facts.refusal:
        told = name in facts.refusal or _OPTION in facts.refusal
        return facts.refusal if told else None
    if facts.kv_connector and not facts.cumem_allocator:
        return f"{facts.kv_connector} registers KV cache memory, which may move."
    return None


def _remedy(name: str, value: str) -> str:
    """The command that takes them out of the value, and keeps the rest."""
    fields = (field.strip() for field in value.split(","))
    kept = [field for field in fields if field.partition(":")[0].strip() != _OPTION]
    value = shlex.quote(",".join(kept))
    return f"`export {name}={value}`" if kept else f"`unset {name}`"
