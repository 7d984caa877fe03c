# SPDX-License-Identifier: Apache-2.0
"""What batched copies of KV blocks are called with, and why."""

from vllm_rocm_memory.doctor.device import is_before, known_device, rocm
from vllm_rocm_memory.doctor.facts import BatchCopies, RuntimeFacts
from vllm_rocm_memory.doctor.finding import Finding, State
from vllm_rocm_memory.doctor.machine import Machine

_PREFERS_ENGINES = (7, 16)
_TAKES_ATTRIBUTES = (7, 13)
_RECTANGLES = (
    "Rectangles (copy_engine rect, or auto where the layout allows) need no flag."
)


def run(machine: Machine) -> Finding:
    facts = known_device(machine)
    if isinstance(facts, Finding):
        return facts
    batches = facts.batches
    if batches is None and facts.copies_unknown:
        return Finding(State.NOT_AVAILABLE, f"not known: {facts.copies_unknown}")
    if batches is None:
        return Finding(
            State.NOT_AVAILABLE,
            "this vLLM copies without the series, and is not asked",
            remedy=f"Run `{machine.command('apply')}`",
        )
    if isinstance(batches, str):
        return Finding(
            State.MISSING,
            f"KV blocks cannot be copied: {batches}",
            remedy="Repair what the sentence above names, or serve without "
            "SimpleCPUOffloadConnector",
        )
    if batches.refused:
        return _refused(facts, batches)
    if is_before(facts, _PREFERS_ENGINES):
        return _without_flag(facts, batches)
    return Finding(
        State.SUCCESS,
        f"flags {batches.flags:#x}, numAttrs {batches.num_attrs}",
        (batches.description,),
    )


def _refused(facts: RuntimeFacts, batches: BatchCopies) -> Finding:
    return Finding(
        State.PARTIAL,
        f"{facts.product} refuses attributes (801), so numAttrs is 0 and the flags "
        f"{batches.flags:#x} have no effect",
        (batches.description, _RECTANGLES),
        f"Install a runtime that takes them, {rocm(_PREFERS_ENGINES)} or later",
    )


def _without_flag(facts: RuntimeFacts, batches: BatchCopies) -> Finding:
    why = f"copy engines are asked for from {rocm(_PREFERS_ENGINES)} on"
    if is_before(facts, _TAKES_ATTRIBUTES):
        why += f", and attributes are passed from {rocm(_TAKES_ATTRIBUTES)} on"
    return Finding(
        State.PARTIAL,
        f"flags {batches.flags:#x}, numAttrs {batches.num_attrs} on {facts.product}: "
        f"{why}",
        (batches.description, _RECTANGLES),
        f"Install {rocm(_PREFERS_ENGINES)} or later; until then leave copy_engine at "
        "auto",
    )
