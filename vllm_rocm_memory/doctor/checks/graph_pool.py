# SPDX-License-Identifier: Apache-2.0
"""Whether the memory of captured graphs sleeps, with the given arguments."""

import re
from collections.abc import Iterator

from vllm_rocm_memory.doctor.facts import GraphPool, ServingFacts
from vllm_rocm_memory.doctor.finding import Finding, State
from vllm_rocm_memory.doctor.machine import NO_ARGUMENTS, Machine

_OPTION = "--sleep-mode-offload-cudagraph"


def run(machine: Machine) -> Finding:
    facts = machine.serving
    if facts == NO_ARGUMENTS:
        return Finding(
            State.NOT_AVAILABLE,
            facts,
            remedy="Give the arguments of `vllm serve` after `doctor`",
        )
    if isinstance(facts, str):
        return Finding(
            State.MISSING,
            f"vLLM did not read the arguments: {facts}",
            remedy=_to_make_it_start(facts),
        )
    if facts.refusal:
        return Finding(
            State.MISSING,
            f"vLLM refuses the arguments: {facts.refusal}",
            remedy="Change or leave out what the refusal names",
        )
    if facts.missing:
        return Finding(
            State.NOT_AVAILABLE,
            f"{facts.missing} is not on this machine, and nothing is downloaded to "
            "find out",
            remedy=facts.download,
        )
    if facts.graph_pool is None:
        return Finding(
            State.NOT_AVAILABLE,
            "this vLLM does not say whether it has a graph pool",
            remedy=f"Run `{machine.command('apply')}`",
        )
    return _decided(facts, facts.graph_pool)


def _decided(facts: ServingFacts, pool: GraphPool) -> Finding:
    if not pool.asked:
        return Finding(
            State.NOT_AVAILABLE,
            f"{_OPTION} was not given, so captured graphs stay in device memory",
            remedy=f"Add {_OPTION}"
            + ("" if facts.enable_sleep_mode else " --enable-sleep-mode"),
        )
    if pool.obstacle:
        cause, remedy = _obstacle(facts, pool.obstacle)
        return Finding(
            State.MISSING,
            f"{_OPTION} has no effect: {cause}",
            (_settings(facts), *_assumed(facts)),
            remedy or f"Leave out {_OPTION}",
        )
    return Finding(
        State.SUCCESS,
        f"active: graphs are captured into memory that sleeps ({_settings(facts)})",
        tuple(_assumed(facts)),
    )


def _to_make_it_start(why: str) -> str:
    variable = re.search(r"HIPSIM_[A-Z_]+", why)
    if variable:
        return f"Set {variable[0]} as the line says, or unset it"
    return "Make `vllm serve --help` work in this environment, and run again"


def _obstacle(facts: ServingFacts, obstacle: str) -> tuple[str, str]:
    """The cause and the remedy, where the probe knows more than vLLM's sentence."""
    if "cudagraph_mode is NONE" in obstacle:
        if option := facts.graphs_off_by:
            return f"{option} turns CUDA graphs off", f"Leave out {option}"
        return (
            "cudagraph_mode is NONE, and no argument says so: this platform, model or "
            "attention backend supports no other",
            "Read in the log of `vllm serve` why cudagraph_mode became NONE, or leave "
            f"out {_OPTION}",
        )
    cause, _, remedy = obstacle.rstrip(".").partition("; ")
    return cause, _alone(cause, remedy)


def _assumed(facts: ServingFacts) -> Iterator[str]:
    if facts.assumed:
        yield (
            f"On the simulator, with {' '.join(facts.assumed)} set, as `make serve` "
            "does; without, there may be no graphs."
        )


def _alone(cause: str, remedy: str) -> str:
    """The remedy as a sentence that names what the cause has named."""
    name = cause.split()[0]
    if "-" in name or "_" in name:
        remedy = remedy.replace("leave it out", f"leave out {name}")
    return remedy[:1].upper() + remedy[1:]


def _settings(facts: ServingFacts) -> str:
    return (
        f"cudagraph_mode {facts.cudagraph_mode}, sleep mode "
        f"{'on' if facts.enable_sleep_mode else 'off'}, sleep mode backend "
        f"{facts.sleep_mode_backend}"
    )
