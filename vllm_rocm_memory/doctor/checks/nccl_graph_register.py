# SPDX-License-Identifier: Apache-2.0
"""Whether NCCL or RCCL keeps what graphs captured from being given back."""

from vllm_rocm_memory.doctor.finding import Finding, State
from vllm_rocm_memory.doctor.machine import Machine

_VARIABLE = "NCCL_GRAPH_REGISTER"
_OPTION = "--sleep-mode-offload-cudagraph"


def run(machine: Machine) -> Finding:
    value = machine.environment.get(_VARIABLE)
    if value is None:
        return Finding(
            State.SUCCESS, f"not set: vLLM sets it to 0 where graphs sleep ({_OPTION})"
        )
    if value == "0":
        return Finding(State.SUCCESS, "0: what graphs captured can be given back")
    effect = f"{_VARIABLE}={value} stays as it is, and pins graph memory that sleeps"
    if not value:
        effect = (
            f"{_VARIABLE} is set to nothing, so vLLM leaves it, and NCCL's own default "
            "may pin graph memory that sleeps"
        )
    told = value or "set to nothing"
    remedy = f"`unset {_VARIABLE}`, or `export {_VARIABLE}=0`"
    facts = machine.serving
    if isinstance(facts, str) or facts.graph_pool is None:
        return Finding(State.PARTIAL, f"{effect} ({_OPTION})", remedy=remedy)
    if not facts.graph_pool.asked or facts.graph_pool.obstacle:
        return Finding(State.SUCCESS, f"{told}: graphs of these arguments do not sleep")
    if not facts.reduces:
        return Finding(State.SUCCESS, f"{told}: a single rank registers nothing")
    return Finding(State.PARTIAL, effect, remedy=remedy)
