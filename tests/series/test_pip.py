# SPDX-License-Identifier: Apache-2.0
"""pip takes away what it installed, and what we added to that."""

import shutil
import subprocess
import venv
import zipfile
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from vllm_rocm_memory import cli
from vllm_rocm_memory.series.definition import load

# Enough of vLLM to lay the series over, from the real trees, and some more.
PARTS = ("*.py", "platforms/*.py", "v1/worker/*.py")


def build_wheel(folder: Path, tree: Path, version: str) -> Path:
    info = f"vllm-{version}.dist-info"
    paths = {path for part in PARTS for path in (tree / "vllm").glob(part)}
    series = load()
    paths |= {tree / f for p in series.patches for f in series.upstream_files(p)}
    files = {
        path.relative_to(tree).as_posix(): path.read_bytes() for path in sorted(paths)
    }
    # A compiled module of ours wins over it, and goes without it.
    files["vllm/cumem_allocator.abi3.so"] = b"\x7fELF\0"
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    files[f"{info}/METADATA"] = metadata.encode()
    tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
    files[f"{info}/WHEEL"] = f"{tag}Tag: py3-none-any\n".encode()
    # pip works the sums out when it writes its own.
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in files).encode()
    path = folder / f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


class Environment:
    """A fresh virtual environment, without any network."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True)
        self.python = folder / "bin" / "python"
        (self.site,) = folder.glob("lib/python*/site-packages")
        self.without = self.content()

    def run(self, *arguments: object) -> str:
        process = subprocess.run(
            [str(self.python), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert process.returncode == 0, process.stderr
        return process.stdout

    def pip(self, *arguments: object) -> str:
        options = ("--disable-pip-version-check", "--no-input", *arguments)
        return self.run("-m", "pip", "--isolated", *options)

    def install(self, wheel: Path) -> None:
        self.pip("install", "--no-index", "--no-deps", "--no-compile", "-U", wheel)

    def compile(self) -> None:
        """What running vLLM leaves behind."""
        folders = [self.site / "vllm" / name for name in ("platforms", "v1", ".")]
        self.run("-m", "compileall", "-q", "-r", "1", *folders)

    def content(self) -> set[str]:
        return {
            path.relative_to(self.site).as_posix()
            for path in self.site.rglob("*")
            if path.relative_to(self.site).parts[0] != "pip"
        }


@pytest.fixture
def series(edited_once: None, capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """The command, as its own tests start it, but in this process."""

    def run(*arguments: object) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main([*map(str, arguments)])
        error = capsys.readouterr().err
        assert ended.value.code == 0, error
        return error

    return run


@pytest.fixture(scope="module")
def wheels(tmp_path_factory, upstream_tree) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("wheels")
    return {
        version: build_wheel(folder, upstream_tree(version), version)
        for version in ("0.32.0", "0.33.0")
    }


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Environment:
    return Environment(tmp_path_factory.mktemp("environment") / "venv")


def test_pip_leaves_nothing_of_ours(
    environment, wheels, series, record_faults, snapshot
):
    environment.install(wheels["0.33.0"])
    fresh = environment.content()
    environment.pip("uninstall", "-y", "vllm")
    assert environment.content() == environment.without

    environment.install(wheels["0.32.0"])
    original = snapshot(environment.site)
    # Its interpreter has no torch, so this vLLM does not import.
    assert "not verified by import: " in series("apply", "--target", environment.site)
    assert record_faults(environment.site) == []
    environment.compile()
    series("status", "--target", environment.site)
    environment.install(wheels["0.33.0"])
    assert environment.content() == fresh

    series("apply", "--only", "kv-copy-engine", "--target", environment.site)
    environment.compile()
    assert environment.content() > fresh
    environment.pip("uninstall", "-y", "vllm")
    assert environment.content() == environment.without

    environment.install(wheels["0.32.0"])
    series("apply", "--target", environment.site)
    series("revert", "--target", environment.site)
    assert snapshot(environment.site) == original
    environment.pip("uninstall", "-y", "vllm")
    assert environment.content() == environment.without


def test_without_the_lines_in_record_there_would_be_something_left(
    environment, wheels, series
):
    environment.install(wheels["0.32.0"])
    (record,) = environment.site.glob("vllm-*.dist-info/RECORD")
    before = record.read_bytes()
    series("apply", "--target", environment.site)
    record.write_bytes(before)
    environment.pip("uninstall", "-y", "vllm")
    left = environment.content() - environment.without
    assert "vllm/v1/simple_kv_offload/copy_engine.py" in left
    assert f"vllm/cumem_allocator{EXTENSION_SUFFIXES[0]}" in left
    assert "vllm/.rocm_memory_series/journal.json" in left
    shutil.rmtree(environment.site / "vllm")
