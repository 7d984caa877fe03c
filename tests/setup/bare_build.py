# SPDX-License-Identifier: Apache-2.0
"""Builds the compiled modules with a Python that has pybind11 and nothing else.

    python bare_build.py FOLDER

It makes FOLDER/bare, a virtual environment, and FOLDER/lib, of which a wheel is made.
"""

import subprocess
import sys
import venv
from pathlib import Path

import pybind11

ROOT = Path(__file__).resolve().parents[2]


def main(folder: Path) -> None:
    bare = folder / "bare"
    venv.create(bare, with_pip=False)
    (site,) = bare.glob("lib/python3.*/site-packages")
    (site / "pybind11").symlink_to(Path(pybind11.__file__).parent)
    native = folder / "lib" / "vllm_rocm_memory" / "_native"
    tools = Path(sys.executable).parent
    configure = [
        *(tools / "cmake", "-S", ROOT / "csrc", "-B", folder / "build", "-G"),
        *("Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"),
        f"-DPython_EXECUTABLE={bare / 'bin' / 'python'}",
        # The quickest to compile, and what a wheel has is compiled from the same text.
        *(f"-DNATIVE_DIR={native}", "-DCMAKE_BUILD_TYPE=Debug"),
    ]
    for command in (configure, [tools / "cmake", "--build", folder / "build"]):
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
