# SPDX-License-Identifier: Apache-2.0
"""A release wheel installs without a compiler, and works without the checkout."""

import csv
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from base64 import urlsafe_b64encode
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import fetch_sdist
import pytest
import release_wheel
import requests
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
NATIVE = "vllm_rocm_memory/_native/"
MODULES = ("cumem_allocator", "pitched_copies")
SIMULATORS = ("hipsim/libamdhip64.so.7", "hipsim-cuda/libcuda.so.1")


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        names = (name for name in archive.namelist() if not name.endswith("/"))
        return {name: archive.read(name) for name in names}


def test_what_is_in_it(wheel):
    """The series, and what is compiled without torch; nothing is brought along."""
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    release = r"[\d.]+(\.dev0\+g[0-9a-f]{10}(\.dirty)?)?"
    tags = rf"{version}-{version}-manylinux_2_\d+_\w+"
    assert re.fullmatch(rf"vllm_rocm_memory-{release}-{tags}\.whl", wheel.name)
    files = content(wheel)
    data = "vllm_rocm_memory/series/files/"
    ours = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("vllm/**/*.py")}
    assert ours
    assert {file[len(data) :] for file in files if file.startswith(data)} == ours
    compiled = (*(f"{name}{EXTENSION_SUFFIXES[0]}" for name in MODULES), *SIMULATORS)
    assert {name for name, data in files.items() if data[:4] == b"\x7fELF"} == {
        f"{NATIVE}{name}" for name in compiled
    }
    (info,) = {name.partition("/")[0] for name in files if ".dist-info/" in name}
    outside = {name.partition("/")[0] for name in files} - {info}
    assert outside == {"vllm_rocm_memory"}
    assert not [name for name in files if name.endswith((".pyc", ".cpp", ".h"))]
    licenses = [name for name in files if name.endswith("/LICENSE")]
    assert [files[name] for name in licenses] == [(ROOT / "LICENSE").read_bytes()]
    text = files[f"{info}/METADATA"].decode()
    assert "\nLicense-Expression: Apache-2.0\n" in text
    assert "\nRequires-Python: >=3.11\n" in text
    rows = csv.reader(files[f"{info}/RECORD"].decode().splitlines())
    listed = {path: digest for path, digest, _ in rows}
    assert {*listed} == {*files}
    for name in {*files} - {f"{info}/RECORD"}:
        digest = urlsafe_b64encode(hashlib.sha256(files[name]).digest())
        assert listed[name] == f"sha256={digest.rstrip(b'=').decode()}"


def test_its_build_says_what_is_left_out(wheel):
    """No torch is there, and who sees that build alone should know."""
    said = wheel.with_name("build.log").read_text()
    assert "device_memory is left out" in " ".join(said.split())


def test_it_says_nothing_of_when_and_where_it_was_built(wheel):
    """release_wheel refuses one that names its folder; this looks at the rest."""
    committed = int(release_wheel.git(ROOT, "log", "-1", "--format=%ct"))
    with zipfile.ZipFile(wheel) as archive:
        times = {entry.date_time for entry in archive.infolist()}
        modes = {
            entry.external_attr >> 16 & 0o777
            for entry in archive.infolist()
            if not entry.filename.endswith("/RECORD")  # 664 by setuptools' own word
        }
    # a zip file counts in steps of two seconds
    (when,) = {(*time[:5], time[5] // 2) for time in times}
    wanted = time.gmtime(committed)
    assert when == (*wanted[:5], wanted[5] // 2)
    assert modes <= {0o644, 0o755}, "not those of the checkout or of its umask"
    for name, data in release_wheel.libraries(wheel).items():
        assert str(ROOT).encode() not in data, name
        assert b"vllm-rocm-memory-wheel-" not in data, name
        assert b".debug_info" not in data, name


class Host:
    """A machine with Python and what the wheel needs, without compiler and network."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "venv", with_pip=True)
        (self.site,) = folder.glob("venv/lib/python3.*/site-packages")
        self.bin = folder / "venv" / "bin"
        self.folder = folder
        for name in sorted(self._needed("libcst", "rich")):
            self._share(importlib.metadata.distribution(name))

    def _needed(self, *names: str) -> set[str]:
        """These and what they need."""
        found = {*names}
        for name in names:
            for line in importlib.metadata.requires(name) or ():
                needed = Requirement(line)
                if not needed.marker or needed.marker.evaluate({"extra": ""}):
                    found |= self._needed(needed.name)
        return found

    def _share(self, distribution: importlib.metadata.Distribution) -> None:
        for file in distribution.files or ():
            top = file.parts[0]
            if top != ".." and not (self.site / top).exists():
                (self.site / top).symlink_to(str(distribution.locate_file(top)))

    def run(self, *command: str | Path, code: int = 0) -> str:
        process = subprocess.run(
            [self.bin / command[0], *command[1:]],
            # No compiler, and no other tool, is on the path.
            env={"PATH": str(self.bin), "HOME": str(self.folder)},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert process.returncode == code, process.stdout + process.stderr
        return process.stdout


@pytest.fixture(scope="module")
def host(tmp_path_factory, wheel) -> Host:
    host = Host(tmp_path_factory.mktemp("host"))
    pip = ("python", "-m", "pip", "--isolated", "install", "--no-index", "--no-compile")
    said = host.run(*pip, "--find-links", wheel.parent, "vllm-rocm-memory")
    assert "Successfully installed vllm-rocm-memory-" in said
    return host


def test_its_modules_need_no_torch(host):
    load_it = f"import sys; sys.path[0] = sys.argv[1]; import {', '.join(MODULES)}"
    host.run("python", "-c", load_it, host.site / NATIVE)
    script = (
        "from vllm_rocm_memory.sim import cudasim, hipsim\n"
        "for each in (hipsim, cudasim): each.load(); print(each.library_path())"
    )
    answer = host.run("python", "-c", script).splitlines()
    assert answer == [str(host.site / NATIVE / name) for name in SIMULATORS]


def test_it_knows_the_vllms_that_it_is_for(host, tmp_path):
    """Also from the wheel: this one is none of them."""
    package = tmp_path / "vllm"
    package.mkdir()
    for name in ("__init__.py", "envs.py"):
        (package / name).write_text("")
    command = ("vllm-rocm-memory", "status", "--json", "--target", tmp_path)
    patches = json.loads(host.run(*command, code=1))["patches"]
    assert {patch["state"] for patch in patches} == {"unknown base"}
    for patch in patches:
        assert "(0.32.0)" in patch["reason"] and "(0.33.0)" in patch["reason"]


def test_it_patches_a_vllm_and_takes_it_back(host, tmp_path_factory):
    """vLLM's own Python; what it needs is not there, so that it is not imported."""
    try:
        upstream = fetch_sdist.unpack("0.33.0") / "vllm"
    except requests.ConnectionError:
        if os.environ.get("CI"):
            raise
        pytest.skip("vllm 0.33.0 is not in .cache, and no index is in reach")
    ignore = shutil.ignore_patterns("__pycache__", "*.json", "*.so")
    shutil.copytree(upstream, host.site / "vllm", ignore=ignore)

    def snapshot() -> dict[str, bytes]:
        return {
            path.relative_to(host.site).as_posix(): path.read_bytes()
            for path in host.site.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }

    before = snapshot()
    command = "vllm-rocm-memory"
    assert "apply" in host.run(command, "--help")
    states = json.loads(host.run(command, "status", "--json", code=1))["patches"]
    assert {patch["state"] for patch in states} == {"not applied"}
    host.run(command, "apply")
    states = json.loads(host.run(command, "status", "--json"))["patches"]
    assert {patch["state"] for patch in states} == {"applied"}
    after = snapshot()
    changed = {name for name, data in after.items() if before.get(name) != data}
    assert changed and all(name.startswith("vllm/") for name in changed)
    for name in MODULES:
        (placed,) = (each for each in changed if Path(each).name.startswith(name))
        assert after[placed] == before[f"{NATIVE}{name}{EXTENSION_SUFFIXES[0]}"]
    host.run(command, "revert")
    assert snapshot() == before
    host.run(command, "status", code=1)
