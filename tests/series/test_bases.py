# SPDX-License-Identifier: Apache-2.0
"""The series of the project on the two vLLMs that it is for."""

import ast
import csv
import hashlib
import json
import re
import shutil
import subprocess
import sys
from base64 import urlsafe_b64encode
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from vllm_rocm_memory.series import SeriesError, operations, verification
from vllm_rocm_memory.series.bases import measure
from vllm_rocm_memory.series.compatibility import missing_names
from vllm_rocm_memory.series.definition import (
    Add,
    AddBuilt,
    Replace,
    Series,
    Step,
    load,
)
from vllm_rocm_memory.series.edits import LINE_LENGTH
from vllm_rocm_memory.series.export import export
from vllm_rocm_memory.series.steps import results
from vllm_rocm_memory.series.target import Target
from vllm_rocm_memory.serve import is_cpu_build

REPOSITORY = Path(__file__).parents[2]
KV_PATCHES = ("kv-copy-engine", "kv-transfer-failures")

pytestmark = pytest.mark.usefixtures("edited_once")


@pytest.fixture
def ours():
    return load()


def is_whole(step: Step) -> bool:
    """Whether the file that it makes is ours."""
    return isinstance(step, Add | AddBuilt | Replace)


def touched_part(whole: Target, series: Series, folder: Path) -> Path:
    """A copy of what the tool reads and writes; the rest of the tree costs time."""
    touched = {f for patch in series.patches for f in series.upstream_files(patch)}
    for path in ("vllm/__init__.py", *sorted(touched), *whole.records):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(whole.root / path, folder / path)
    (folder / "vllm" / "platforms").mkdir(exist_ok=True)
    return folder


def test_the_installed_tree_is_pristine(installed_tree, ours):
    """By the sums that the wheel itself came with.

    Of a GPU machine's own vLLM only where the series touches it: the rest is its own.
    """
    looked_at = {file for patch in ours.patches for file in patch.files}
    (record,) = Target.find(installed_tree).records
    wrong, checked = [], 0
    for name, digest, _ in csv.reader((installed_tree / record).open()):
        path = installed_tree / name
        if name.startswith("vllm/") and name.endswith(".py"):
            found = hashlib.sha256(path.read_bytes()).digest()
            spelled = urlsafe_b64encode(found).rstrip(b"=").decode()
            if name in looked_at or is_cpu_build():
                wrong += [name] * (digest != f"sha256={spelled}")
            checked += 1
    assert wrong == []
    assert checked > 2000


def test_the_sums_of_the_bases(upstream_tree, ours):
    for version in ("0.32.0", "0.33.0"):
        target = Target.find(upstream_tree(version))
        assert measure(ours, target) == ours.bases[version]
    assert set(ours.bases) == {"0.32.0", "0.33.0"}


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_the_scheduler_has_what_ours_reaches_for(version, upstream_tree):
    """No import names these, so that nothing else notices when one goes."""
    folder = "vllm/v1/simple_kv_offload"
    ours = (REPOSITORY / folder / "transfer_results.py").read_text()
    reached = set(re.findall(r"(?<!\.)\bscheduler\.(\w+)", ours))
    assert len(reached) >= 10
    manager = (upstream_tree(version) / folder / "manager.py").read_text()
    (scheduler,) = (
        node
        for node in ast.parse(manager).body
        if isinstance(node, ast.ClassDef) and node.name == "SimpleCPUOffloadScheduler"
    )
    here = {
        node.attr for node in ast.walk(scheduler) if isinstance(node, ast.Attribute)
    } | {node.name for node in scheduler.body if isinstance(node, ast.FunctionDef)}
    assert reached <= here


def test_the_installed_tree_is_its_base(installed_tree, installed_version, ours):
    """Also where it is the CPU build, a distribution of another name."""
    measured = measure(ours, Target.find(installed_tree))
    assert measured == ours.bases[installed_version]


def test_bases_are_entered_by_the_module(tmp_path, upstream_tree, ours):
    package = tmp_path / "vllm_rocm_memory"
    ignore = shutil.ignore_patterns("__pycache__", "_native", "files")
    shutil.copytree(REPOSITORY / "vllm_rocm_memory", package, ignore=ignore)
    shutil.copytree(REPOSITORY / "vllm", package / "series" / "files" / "vllm")
    data = package / "series" / "bases.json"
    wanted = json.loads(data.read_text())
    data.write_text(json.dumps({"0.32.0": wanted["0.32.0"]}))
    tree = str(upstream_tree("0.33.0"))
    command = [sys.executable, "-m", "vllm_rocm_memory.series.bases"]
    run = {"cwd": tmp_path, "timeout": 60, "capture_output": True, "text": True}
    assert subprocess.run([*command, tree, "0.33.0"], **run).returncode == 0
    assert json.loads(data.read_text()) == wanted
    refused = subprocess.run([*command, str(tmp_path), "1"], **run)
    assert refused.returncode == 2
    assert "is not vLLM" in refused.stderr


def test_apply_and_revert(both_bases, ours, snapshot, record_faults, installed_version):
    """Side by side: most of the time vLLM is imported, in other processes."""

    def check(base: tuple[str, Path]) -> None:
        version, root = base
        before = snapshot(root)
        target = Target.find(root)
        # The CPU build imports anywhere; a GPU's vLLM needs its binaries, which are
        # not copied here.
        replaced = ["vllm.v1.simple_kv_offload.copy_backend"]
        importable = is_cpu_build() or not verification.import_failures(
            target, replaced
        )
        outcome = operations.apply(target, ours)
        # This also imports what the series touches, in a fresh process.
        assert (outcome.not_verified is None) == importable
        # It needs Ray, which vLLM itself does not require.
        trainer = "vllm.distributed.weight_transfer.sharded_rdt_trainer"
        if importable:
            without_ray = {trainer: "ModuleNotFoundError: No module named 'ray'"}
            assert outcome.not_importable in ({}, without_ray)
        for row in operations.status(target, ours):
            assert row.state == "applied", row
            known, _, more = row.reason.partition("; ")
            assert known == f"base {version}"
            if not importable:
                assert more == f"not verified by import: {outcome.not_verified}"
            elif more:
                assert row.name == "cumem-sleep"
                assert more.startswith(f"{trainer} does not import here: ")
        assert record_faults(root) == []
        assert bool(target.records) == (version == installed_version)
        operations.revert(target, ours)
        assert snapshot(root) == before

    failures = []
    with ThreadPoolExecutor(len(both_bases)) as pool:
        running = {base[0]: pool.submit(check, base) for base in both_bases}
        for version, checked in running.items():
            error = checked.exception()
            if error is not None:
                error.add_note(f"on vLLM {version}")
                failures.append(error)
    if failures:
        raise BaseExceptionGroup("the series does not fit", failures)


@pytest.mark.usefixtures("unverified", "computed_once")
def test_killed_at_any_operation(shared_base, ours, faults, snapshot, tmp_path):
    """At each twenty-ninth, with either way out; the small series tries each one."""
    _, root = shared_base
    # What is in the compiled module does not matter, and it is written each time.
    for patch in ours.patches:
        for step in patch.built:
            (tmp_path / Path(step.file).name).write_bytes(b"\x7fELF\0\xff")
    ours = replace(ours, native=tmp_path)
    small = touched_part(Target.find(root), ours, tmp_path / "small")
    original = snapshot(small)
    target = Target.find(small)
    faults.seen.clear()
    operations.apply(target, ours)
    count = len(faults.seen)
    applied = snapshot(small)
    assert count > 100
    faults.dead = True
    for number in range(1, count + 1, 29):
        operations.revert(target, ours)
        faults.seen.clear()
        faults.at = number
        with pytest.raises(KeyboardInterrupt):
            operations.apply(target, ours)
        faults.at = 0
        if number % 2:
            operations.apply(target, ours)
            assert snapshot(small) == applied, number
        else:
            operations.revert(target, ours)
            assert snapshot(small) == original, number


@pytest.mark.usefixtures("unverified")
def test_git_am_on_the_source_distribution(ours, upstream_tree, tmp_path, snapshot):
    whole = Target.find(upstream_tree("0.33.0"))
    tree = touched_part(whole, ours, tmp_path / "tree")
    target = Target.find(tree)
    written = export(target, ours, tmp_path / "out")
    operations.apply(target, ours)
    applied = snapshot(tree)
    operations.revert(target, ours)
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    git = ("git", "-C", str(tree), *who, "-c", "commit.gpgsign=false")
    for command in (
        ("init", "-q"),
        ("add", "--all", "--force"),
        ("commit", "-q", "-m", "as released"),
        ("am", "-q", *map(str, written)),
    ):
        subprocess.run([*git, *command], check=True, timeout=120)
    compiled = {step.file for patch in ours.patches for step in patch.built}
    assert compiled <= applied.keys()
    ours_alone = {
        path: content
        for path, content in applied.items()
        if not path.startswith("vllm/.rocm_memory_series/") and path not in compiled
    }
    assert snapshot(tree) == ours_alone


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("shared_base", ["0.33.0"], indirect=True)
def test_an_unknown_base(base, ours, snapshot):
    _, root = base
    worker = root / "vllm" / "v1" / "simple_kv_offload" / "worker.py"
    worker.write_text(f"{worker.read_text()}# a local change\n")
    before = snapshot(root)
    target = Target.find(root)
    with pytest.raises(SeriesError, match=r"worker\.py has sha256 \w+, expected"):
        operations.apply(target, ours)
    user = worker.with_name("another.py")
    user.write_text("from vllm.v1.simple_kv_offload.cuda_mem_ops import a_new_name\n")
    with pytest.raises(SeriesError, match=r"another\.py takes a_new_name from vllm\."):
        operations.apply(target, ours, KV_PATCHES, allow_unknown_base=True)
    user.unlink()
    assert snapshot(root) == before
    operations.apply(target, ours, allow_unknown_base=True)
    operations.revert(target, ours)
    assert snapshot(root) == before


def test_the_variable_is_known_to_vllm(
    shared_base, ours, run_python, monkeypatch, tmp_path
):
    monkeypatch.setattr(verification, "import_failures", lambda target, modules: {})
    _, whole = shared_base
    root = touched_part(Target.find(whole), ours, tmp_path)
    operations.apply(Target.find(root), ours, KV_PATCHES)
    code = (
        "import importlib.util, os, sys\n"
        # Without the package around it, which loads torch.
        "spec = importlib.util.spec_from_file_location('envs', 'vllm/envs.py')\n"
        "envs = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(envs)\n"
        "name = 'VLLM_KV_OFFLOAD_COPY_ENGINE'\n"
        "print(envs.environment_variables[name]())\n"
        "os.environ[name] = 'batch'\n"
        "print(envs.environment_variables[name]())\n"
        "os.environ[name] = 'fast'\n"
        "try:\n    envs.environment_variables[name]()\n"
        "except ValueError as error:\n    print(error)\n"
    )
    none, batch, error = run_python(root, code).splitlines()
    assert (none, batch) == ("None", "batch")
    assert "'fast' for VLLM_KV_OFFLOAD_COPY_ENGINE" in error
    assert "['auto', 'rect', 'batch']" in error


def test_compiled_modules_have_what_vllm_takes_from_them(shared_base, ours):
    """Upstream's own importer is replaced; on another base there may be more."""
    _, root = shared_base
    built = [step for patch in ours.patches for step in patch.built]
    texts = {
        each.file: ours.content(each)
        for patch in ours.patches
        for each in patch.steps
        if isinstance(each, Add | Replace)
    }
    empty = "vllm/cumem_allocator.py"
    taken = {lost.name for lost in missing_names(root, {empty: b""}, empty)}
    assert taken >= {
        *("init_module", "python_create_and_map", "python_unmap_and_release")
    }
    for step, files in product(built, ({}, texts)):
        found = {**files, step.file: ours.content(step)}
        assert missing_names(root, found, step.file) == []


def test_edits_are_as_wide_as_vllm_s_formatter_leaves_lines(shared_base, ours):
    _, root = shared_base
    target = Target.find(root)
    owned = {each.file for p in ours.patches for each in p.steps if is_whole(each)}
    wide = [
        f"{path}: {line.decode()}"
        for path, after in results(ours, ours.patches, target.original).items()
        if path not in owned
        for line in set(after.split(b"\n")) - set(target.original(path).split(b"\n"))
        if len(line.decode()) > LINE_LENGTH
    ]
    assert not wide


def test_sleep_drains_copies_once_whoever_calls_for_it(shared_base, ours):
    """vLLM 0.33.0 does so itself, where 0.32.0 needs our call."""
    version, root = shared_base
    path = "vllm/v1/worker/gpu_worker.py"
    target = Target.find(root)
    before = target.original(path)
    after = results(ours, ours.select(KV_PATCHES), target.original)[path]
    assert (after == before) == (version == "0.33.0")
    assert after.count(b"import drain_kv_copies\n") == (version == "0.32.0")
    calls = (b" drain_kv_copies()\n", b".unregister_kv_caches()\n")
    worker = next(
        node
        for node in ast.parse(after).body
        if isinstance(node, ast.ClassDef) and node.name == "Worker"
    )
    for node in worker.body:
        if isinstance(node, ast.FunctionDef) and node.name in ("sleep", "discard"):
            text = ast.get_source_segment(after.decode(), node).encode()
            assert sum(text.count(call) for call in calls) == 1, node.name
            last = max(text.find(call) for call in calls)
            assert 0 < last < text.find(b"self.sleep_mode_backend.")


def test_our_base_of_the_connector_comes_first(shared_base, ours):
    _, root = shared_base
    path = (
        "vllm/distributed/kv_transfer/kv_connector/v1/simple_cpu_offload_connector.py"
    )
    target = Target.find(root)
    after = results(ours, ours.select(KV_PATCHES), target.original)[path]

    def bases(content: bytes) -> list[str]:
        return next(
            [ast.unparse(each) for each in node.bases]
            for node in ast.parse(content).body
            if isinstance(node, ast.ClassDef)
            and node.name == "SimpleCPUOffloadConnector"
        )

    assert bases(after) == ["WorkerTransfers", *bases(target.original(path))]
    assert max(map(len, after.decode().splitlines())) <= 88
