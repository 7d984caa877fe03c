# SPDX-License-Identifier: Apache-2.0
"""Whether AITER's all-reduce can be kept from registering memory that sleeps."""

import contextlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from vllm_rocm_memory.doctor.finding import Finding, State
from vllm_rocm_memory.doctor.machine import Machine, ask

_DISTRIBUTION = "amd-aiter"
_SOURCE = "dist/device_communicators/custom_all_reduce.py"
_FENCE = "vllm/distributed/device_communicators/aiter_capture_fence.py"
_PROBE = "vllm_rocm_memory.doctor.aiter_probe"
_TIMEOUT_S = 60.0
# The first that can be told to copy; docs/aiter.md.
_FIRST = (0, 1, 11)
_OPTION = "--sleep-mode-offload-cudagraph"
_USE, _USE_ALL_REDUCE = "VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_CUSTOM_AR"
_REMEDY = (
    f"Install amd-aiter {'.'.join(map(str, _FIRST))} or newer, set {_USE_ALL_REDUCE}=0 "
    f"for vLLM's own all-reduce, or leave {_OPTION} out"
)


def run(machine: Machine) -> Finding:
    paths = [str(machine.target.root)] if machine.target else []
    version = _version([*paths, *sys.path])
    source = _source([*paths, *sys.path])
    if version is None and source is None:
        return Finding(State.NOT_AVAILABLE, f"{_DISTRIBUTION} is not installed")
    found = f"AITER {version or 'of unknown version'}"
    answer = _fence(machine, source)
    if isinstance(answer, str):
        if _is_too_old(version):
            return _not_fenced(machine, found)
        return _not_known(found, answer)
    if refusal := answer.get("refusal"):
        return _not_fenced(machine, found, refusal)
    return Finding(
        State.SUCCESS,
        f"{found}, {_usage(machine.environment)}",
        (f"Fenced where graphs sleep ({_OPTION}): {', '.join(answer['fenced'])}.",),
    )


def _fence(machine: Machine, source: Path | None) -> dict[str, Any] | str:
    """What the series' fence says to the source, or why it was not asked."""
    if source is None:
        return f"it has no {_SOURCE}"
    fence = str(machine.series.files / _FENCE)
    return ask(machine, _PROBE, (str(source), fence), _TIMEOUT_S)


def _version(paths: list[str]) -> str | None:
    for found in importlib.metadata.distributions(name=_DISTRIBUTION, path=paths):
        # A folder that lost its metadata has none.
        with contextlib.suppress(KeyError, TypeError):
            return found.version
    return None


def _source(paths: list[str]) -> Path | None:
    spec = PathFinder.find_spec("aiter", paths) or importlib.util.find_spec("aiter")
    for folder in (spec and spec.submodule_search_locations) or ():
        if (file := Path(folder, _SOURCE)).is_file():
            return file
    return None


def _is_too_old(version: str | None) -> bool:
    """By its number, which says nothing of a build between releases."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)(?!.*(dev|\+))", version or "")
    return match is not None and tuple(map(int, match.groups()[:3])) < _FIRST


def _not_fenced(machine: Machine, found: str, *details: str) -> Finding:
    return Finding(
        State.MISSING if _is_needed(machine) else State.PARTIAL,
        f"{found} is too old: it cannot be told to copy, as {_OPTION} needs it to; "
        f"{_usage(machine.environment)}",
        details,
        _REMEDY,
    )


def _not_known(found: str, why: str) -> Finding:
    return Finding(
        State.PARTIAL,
        f"{found}, of which cannot be told before the start what is fenced: {why}",
        remedy="The server's log has a line `registers no captured memory for IPC` at "
        f"start where it is; {_USE_ALL_REDUCE}=0 takes vLLM's own all-reduce",
    )


def _is_needed(machine: Machine) -> bool:
    """Whether a start would fail without the fence, as far as that is known."""
    if not _is_used(machine.environment):
        return False
    facts = machine.serving
    if isinstance(facts, str) or facts.graph_pool is None:
        return True
    sleeps = facts.graph_pool.asked and not facts.graph_pool.obstacle
    return sleeps and facts.reduces


def _is_used(environment: Mapping[str, Any]) -> bool:
    # As vllm.envs reads them.
    defaults = {_USE: "False", _USE_ALL_REDUCE: "True"}
    words = (environment.get(name, word) for name, word in defaults.items())
    return all(word.lower() in ("true", "1") for word in words)


def _usage(environment: Mapping[str, Any]) -> str:
    if _is_used(environment):
        return f"its all-reduce is in use ({_USE}={environment[_USE]})"
    name = _USE if environment.get(_USE) is None else _USE_ALL_REDUCE
    said = environment.get(name)
    return f"its all-reduce is not in use ({name} is {said or 'not set'})"
