# SPDX-License-Identifier: Apache-2.0
"""A wheel carries the series as data, and works without the checkout."""

import csv
import hashlib
import json
import os
import subprocess
import sys
import venv
import zipfile
from base64 import urlsafe_b64encode
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from vllm_rocm_memory.series.definition import load

ROOT = Path(__file__).resolve().parents[2]


def test_built_package_brings_the_series(tmp_path):
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, timeout=120)
    carried = tmp_path / "vllm_rocm_memory" / "series" / "files" / "vllm"
    ours = {path.relative_to(ROOT) for path in (ROOT / "vllm").rglob("*.py")}
    assert ours
    assert {path.relative_to(carried.parent) for path in carried.rglob("*.py")} == ours
    present = {path.relative_to(carried) for path in carried.rglob("*")}
    assert not [path for path in present if path.suffix in (".so", ".pyc")]

    # the built package alone: neither the checkout nor the editable install
    target = tmp_path / "target"
    (target / "vllm").mkdir(parents=True)
    (target / "vllm" / "__init__.py").write_text("")
    (target / "vllm" / "envs.py").write_text("")
    script = (
        "import sys; from vllm_rocm_memory import cli, series; "
        "print(series.__file__, file=sys.stderr); cli.main(sys.argv[1:])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, "status", "--json", "--target", str(target)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stderr.startswith(str(tmp_path)), result.stderr
    patches = json.loads(result.stdout)["patches"]
    assert [patch["name"] for patch in patches] == [p.name for p in load().patches]
    for patch in patches:
        assert patch["state"] == "unknown base"
        assert "0.33.0" in patch["reason"]  # the known bases travel too


def test_a_build_without_torch_leaves_out_what_needs_it(tmp_path):
    """As the isolated build of `pip install .`, whose environment has no torch."""
    venv.create(tmp_path / "bare", with_pip=False)
    cmake = Path(sys.executable).with_name("cmake")
    configure = [cmake, "-S", ROOT / "csrc" / "sim", "-B", tmp_path / "build"]
    python = f"-DPython_EXECUTABLE={tmp_path / 'bare' / 'bin' / 'python'}"
    result = subprocess.run(
        [*configure, python], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "device_memory is left out" in " ".join(result.stderr.split())


def test_compiled_modules_need_no_torch_and_travel_in_the_wheel(bare_build, tmp_path):
    """Built as `pip install .` does, with pybind11 and nothing else."""
    bare, built = bare_build / "bare", bare_build / "lib"
    native = built / "vllm_rocm_memory" / "_native"
    modules = sorted(path.name for path in native.iterdir())
    names = ("cumem_allocator", "pitched_copies")
    assert modules == [f"{name}{EXTENSION_SUFFIXES[0]}" for name in names]
    load_it = f"import sys; sys.path[0] = sys.argv[1]; import {', '.join(names)}"
    command = [bare / "bin" / "python", "-c", load_it, native]
    subprocess.run(command, check=True, timeout=60)

    # the rest of the wheel's build would compile the simulator too
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(built)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    settings = tmp_path / "settings.cfg"
    settings.write_text(f"[build]\nbuild_lib = {built}\n")
    subprocess.run(
        [
            *(sys.executable, "setup.py", "-q", "egg_info", f"--egg-base={tmp_path}"),
            *("bdist_wheel", "--skip-build", f"--dist-dir={tmp_path}"),
            f"--bdist-dir={tmp_path / 'bdist'}",
        ],
        cwd=ROOT,
        env={**os.environ, "DIST_EXTRA_CONFIG": str(settings)},
        check=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("*.whl")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{tag}-{tag}-linux" in wheel.name, "it is for one Python and machine"

    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        (record,) = (n for n in archive.namelist() if n.endswith("/RECORD"))
        rows = csv.reader(archive.read(record).decode().splitlines())
        listed = {path: digest for path, digest, _ in rows}
        for module in modules:
            name = f"vllm_rocm_memory/_native/{module}"
            digest = hashlib.sha256(archive.read(name)).digest()
            spelled = urlsafe_b64encode(digest).rstrip(b"=").decode()
            assert listed[name] == f"sha256={spelled}"
        archive.extractall(site)

    script = (
        "from vllm_rocm_memory.series.definition import load; series = load()\n"
        "steps = [step for patch in series.patches for step in patch.built]\n"
        f"files = [series.native.joinpath(name).read_bytes() for name in {modules}]\n"
        "print(sorted(map(series.content, steps)) == sorted(files), series.native)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stdout == f"True {site / 'vllm_rocm_memory' / '_native'}\n"
