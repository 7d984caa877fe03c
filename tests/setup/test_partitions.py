# SPDX-License-Identifier: Apache-2.0
"""Each test file is in one partition, which says what it needs and what it gets."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import bootstrap
import pytest
from partitions import NAMES, Partitions, PartitionsError

ROOT = bootstrap.ROOT
TESTS = ROOT / "tests"
PYPROJECT = ROOT / "pyproject.toml"


@pytest.fixture(scope="module")
def partitions() -> Partitions:
    return Partitions.read(TESTS)


def test_every_test_file_is_in_one_partition(partitions):
    listed = [file for files in partitions.files.values() for file in files]
    there = [path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")]
    assert sorted(listed) == sorted(there)
    assert list(partitions.files["cpu"]) == sorted(partitions.files["cpu"])
    assert set(partitions.also_gpu) < set(partitions.files["cpu"])
    assert partitions.shared_gpu


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('cpu = ["a.py"]\ngpu = ["a.py"]', "a.py: listed twice"),
        ('cpu = ["a.py", "a.py"]', "a.py: listed twice"),
        ('gpu = ["a.py"]\n[also]\ngpu = ["a.py"]', "a.py: in also.gpu and not in cpu"),
        ('[shared]\ngpu = ["a.py"]', "a.py: in shared.gpu, and neither in gpu nor in"),
        (
            'gpu-2 = ["a.py"]\nrocm-only = ["b.py"]\n[shared]\ngpu = ["a.py", "b.py"]',
            "a.py, b.py: in shared.gpu, and neither",
        ),
        (
            'gpu = ["a.py"]\n[shared]\ngpu = ["a.py", "a.py"]',
            "a.py: listed twice",
        ),
        ("gpus = []", "gpus: no such partition; there are cpu, gpu, gpu-2, rocm-only"),
        ("[also]\ncpu = []", "also.cpu: no such partition"),
        ("[shared]\ngpu-2 = []", "shared.gpu-2: no such partition"),
        ("cpu = [", "is not TOML"),
    ],
)
def test_wrong_partitions_are_refused(tmp_path, text, message):
    (tmp_path / "partitions.toml").write_text(text)
    with pytest.raises(PartitionsError, match=re.escape(message)):
        Partitions.read(tmp_path)


def test_markers_are_the_partitions_and_are_given_by_nobody_else():
    settings = tomllib.loads(PYPROJECT.read_text())["tool"]["pytest"]["ini_options"]
    assert [marker.partition(":")[0] for marker in settings["markers"]] == [*NAMES]
    by_hand = re.compile(
        r"mark\.(cpu|gpu|rocm)|getattr\(pytest\.mark|reason=\W*needs (a|2) GPU"
    )
    others = {Path(__file__), TESTS / "conftest.py"}
    marked = {p for p in TESTS.rglob("*.py") if by_hand.search(p.read_text())}
    assert marked <= others, "tests/partitions.toml says what a file needs"


# --- What tests/conftest.py makes of it ---------------------------------------------

TORCH = """
from types import SimpleNamespace
__version__ = "{torch}"
version = SimpleNamespace(cuda={cuda!r}, hip={hip!r})
cuda = SimpleNamespace(is_available=lambda: {gpus} > 0)
_C = SimpleNamespace(_cuda_getDeviceCount=lambda: {gpus})
"""
PARTITIONS = """
cpu = ["test_any.py"]
gpu = ["test_one.py"]
gpu-2 = ["sub/test_two.py"]
rocm-only = ["test_amd.py"]
"""
BROKEN = "raise RuntimeError('torch was imported')\n"


@pytest.fixture
def tests(tmp_path) -> Path:
    folder = tmp_path / "tests"
    (folder / "sub").mkdir(parents=True)
    shutil.copy(TESTS / "conftest.py", folder)
    (folder / "partitions.toml").write_text(PARTITIONS)
    for name in ("test_any", "test_one", "sub/test_two", "test_amd"):
        (folder / f"{name}.py").write_text("def test_it():\n    pass\n")
    return folder


def run(tests: Path, torch: str, *words: str) -> str:
    """What pytest says there, where that module is PyTorch."""
    (tests.parent / "torch.py").write_text(torch)
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-c", str(PYPROJECT), "-v"),
            *(f"--rootdir={tests.parent}", str(tests), *words),
        ],
        cwd=tests.parent,
        env={
            **os.environ,
            "PYTHONPATH": str(tests.parent),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "COLUMNS": "200",
        },
        capture_output=True,
        text=True,
    ).stdout


def test_what_the_machine_lacks_is_skipped(tests):
    out = run(tests, TORCH.format(torch="2.11.0", cuda="13.0", hip=None, gpus=1))
    assert "test_any.py::test_it PASSED" in out and "test_one.py::test_it PASSED" in out
    assert re.search(r"test_two.py::test_it SKIPPED \(needs 2 GPUs: 1 is visible", out)
    assert "needs ROCm: PyTorch 2.11.0 is built for CUDA 13.0\n" in out
    assert "2 passed, 2 skipped" in out


def test_a_marker_chooses_a_partition(tests):
    out = run(
        tests, TORCH.format(torch="2.11", cuda=None, hip="7.2", gpus=2), "-m gpu-2"
    )
    assert "test_two.py::test_it PASSED" in out and "1 passed, 3 deselected" in out
    out = run(
        tests, TORCH.format(torch="2.13+cpu", cuda=None, hip=None, gpus=0), "-mgpu"
    )
    assert "needs a GPU: PyTorch 2.13+cpu sees none\n" in out
    assert "1 skipped, 3 deselected" in out


def test_pytorch_is_asked_only_for_a_test_that_needs_a_gpu(tests):
    assert "1 passed, 3 deselected" in run(tests, BROKEN, "-m", "cpu")
    assert "4 tests collected" in run(tests, BROKEN, "--collect-only")
    assert "torch was imported" in run(tests, BROKEN, "-m", "gpu")


# --- What make test-gpu imports -----------------------------------------------------


GPU_TOOLS = ("gpu_tests.py", "partitions.py", "two_gpus.py")


def imported(path: Path) -> set[str]:
    """Top names of what a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


def test_what_runs_on_a_gpu_needs_no_other_packages(partitions):
    """A GPU host may be without the network, and have vLLM and these files' pins."""
    files = [
        *(TESTS / "gpu").rglob("*.py"),
        *(TESTS / "basic_correctness").rglob("*.py"),
        *(TESTS / "conftest.py", *(ROOT / "vllm_rocm_memory").rglob("*.py")),
        *(ROOT / "tools" / name for name in GPU_TOOLS),
    ]
    run_there = [file for name in NAMES[1:] for file in partitions.files[name]]
    assert {TESTS / file for file in (*run_there, *partitions.also_gpu)} < {*files}
    ours = {"tests", "vllm", "vllm_rocm_memory", *sys.stdlib_module_names}
    ours.add("aiter")  # of the test of AITER, which is skipped where there is none
    for folder in (TESTS / "gpu", ROOT / "tools", ROOT / "benchmarks"):
        ours |= {path.stem for path in folder.glob("*.py")}
    there = {
        name
        for file in (*bootstrap.GROUPS["test-gpu"], "engine.txt", "engine-torch.txt")
        for name in bootstrap.pins(file)
    }
    packages = importlib.metadata.packages_distributions()
    for path in files:
        for name in imported(path) - ours:
            distributions = {bootstrap.canonical(d) for d in packages.get(name, ())}
            assert distributions & there, f"{path} imports {name}"
