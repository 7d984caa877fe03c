# SPDX-License-Identifier: Apache-2.0
"""A wheel carries the series as data, and works without the checkout."""

import json
import os
import subprocess
import sys
import venv
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
