# SPDX-License-Identifier: Apache-2.0
"""Builds the native libraries with CMake and puts the series into the wheel."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PACKAGE = "vllm_rocm_memory"


class CMakeBuild(build_ext):
    """Fills `_native`: in the checkout for an editable install, else in the wheel."""

    def native(self) -> Path:
        in_place = self.editable_mode or self.inplace
        return (
            (ROOT if in_place else Path(self.build_lib).resolve()) / PACKAGE / "_native"
        )

    def run(self) -> None:
        build = ROOT / "build" / "cmake"
        if not (self.editable_mode or self.inplace):
            build = Path(self.build_temp).resolve()
        configure = [
            "--fresh",  # what an earlier run did not find may be there now
            *("-S", str(ROOT), "-B", str(build), "-G", "Ninja"),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DNATIVE_DIR={self.native()}",
        ]
        # cmake and ninja may be packages of the building environment
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        for arguments in (configure, ["--build", str(build)]):
            command = ["cmake", *arguments]
            result = subprocess.run(command, env={**os.environ, "PATH": path})
            if result.returncode != 0:
                raise SystemExit(f"`{' '.join(command)}` failed; its output is above")

    def get_outputs(self) -> list[str]:
        if self.editable_mode:
            return []
        return [str(path) for path in self.native().rglob("*") if path.is_file()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class BuildWithSeries(build_py):
    """A checkout uses `vllm/` in place; a wheel carries it as data."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, PACKAGE, "series", "files", "vllm")
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(
                ROOT / "vllm", target, ignore=shutil.ignore_patterns("__pycache__")
            )


setup(
    # Only says that the wheel is for one Python and machine; CMake knows the sources.
    ext_modules=[Extension(f"{PACKAGE}._native.cumem_allocator", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": BuildWithSeries},
)
