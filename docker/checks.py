# SPDX-License-Identifier: Apache-2.0
"""What install.sh asks before and after it lays the series over vLLM.

    python checks.py runtime           # is the HIP runtime one that is known?
    python checks.py outcome < JSON    # has `vllm-rocm-memory apply --json` done it?

What is expected and what is allowed stands in the environment (see install.sh).

Note [Why the library is asked]
Files beside the runtime tell a version too (include/hip/hip_version.h and
share/hip/version), and in vLLM's ROCm image they tell the SDK's: its
Dockerfile.rocm_base builds libamdhip64 from a commit of its own and copies nothing but
the libraries, which it links onto the old names. .info/version has ROCm's number, not
HIP's. hipRuntimeGetVersion needs no GPU: it is a constant of the library, behind
HIP_INIT_API_NO_RETURN, which goes on where there is no device (ROCm/rocm-systems,
projects/clr/hipamd/src/hip_context.cpp). Not run on AMD hardware.
"""

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

KNOWN = Path(__file__).with_name("known_runtimes.toml")

# For a PyTorch that brings no runtime of its own.
NAMES = ("libamdhip64.so.7", "libamdhip64.so")

ALLOW_RUNTIME = "ALLOW_UNKNOWN_RUNTIME"


class Refusal(Exception):
    """The image would not be what it says it is."""


def known_runtimes(path: Path = KNOWN) -> list[tuple[int, int]]:
    """(major, minor) of every known HIP release, oldest first."""
    with path.open("rb") as file:
        entries = tomllib.load(file)["runtime"]
    numbers = [entry["hip"].split(".") for entry in entries]
    return sorted((int(major), int(minor)) for major, minor in numbers)


def require_known(
    found: tuple[int, int], said: str, environment: Mapping[str, str]
) -> None:
    """Refuse a runtime that is unknown, or not the one that the label names.

    Args:
        found: (major, minor); (0, 0) for a library that does not tell.
        said: the version and the library, for the reader.

    """
    known = known_runtimes()
    if found not in known:
        newest = ".".join(map(str, known[-1]))
        names = ", ".join(".".join(map(str, each)) for each in known)
        why = (
            f"does not tell its version; known are {names}"
            if found == (0, 0)
            else f"is newer than any known: the newest known is {newest}"
            if found > known[-1]
            else f"is none of the known: {names}"
        )
        if environment.get(ALLOW_RUNTIME) != "1":
            raise Refusal(
                f"the HIP runtime {said} {why}. Take a base with a known one, or a "
                f"newer vllm-rocm-memory; {ALLOW_RUNTIME}=1 installs it all the same"
            )
        print(f"warning: the HIP runtime {said} {why}", file=sys.stderr)
    release = "unknown" if found == (0, 0) else ".".join(map(str, found))
    expected = environment.get("EXPECTED_HIP_RUNTIME") or release
    if expected != release:
        raise Refusal(
            f"the HIP runtime is {said}, and EXPECTED_HIP_RUNTIME={expected} says that "
            f"the image is labelled with another: build with "
            f"--build-arg HIP_RUNTIME={release}"
        )


def check_runtime() -> None:
    try:
        hip_runtime = _hip_runtime()
    except ImportError as error:
        raise Refusal(
            f"{sys.executable} does not import PyTorch, vLLM and vllm-rocm-memory "
            f"({type(error).__name__}: {error}): PYTHON names the one that serves vLLM"
        ) from error
    try:
        library = hip_runtime.get_runtime(_open_by_name)
    except OSError as error:
        import torch

        raise Refusal(
            f"no HIP runtime: PyTorch {torch.__version__} has loaded none, and none "
            f"is found by name ({error}). Build on a ROCm image of vLLM, or add the "
            "folder of the runtime to LD_LIBRARY_PATH"
        ) from error
    version = hip_runtime.runtime_version(library)
    # A version alone does not say which library to look at.
    mapped = ", ".join(hip_runtime._mapped_paths(hip_runtime._MAPS))
    said = f"{hip_runtime.format_version(version)} ({mapped})"
    require_known(hip_runtime.major_minor(version), said, os.environ)
    print(f"HIP runtime {said}")


def _hip_runtime() -> ModuleType:
    """The series' own module, from its files: it is not applied yet."""
    import torch  # noqa: F401  (loads the runtime that it was linked with)

    from vllm_rocm_memory.series.definition import files_folder

    path = files_folder() / "vllm" / "platforms" / "hip_runtime.py"
    spec = importlib.util.spec_from_file_location("hip_runtime", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _open_by_name() -> ctypes.CDLL:
    attempts = []
    for name in NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            attempts.append(str(error))
    raise OSError("; ".join(attempts))


def check_outcome(outcome: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Refuse what `apply --json` reports where no import has verified it.

    Single modules that did not import before either (a missing ray, a GPU that AITER
    asks for) are only named.
    """
    if not outcome["verified"]:
        raise Refusal(
            f"no module of {outcome['target']} imports with {sys.executable}, with the "
            f"series or without it: {outcome['reason']}"
        )
    for module, error in outcome["not_importable"].items():
        print(f"warning: {module} does not import here: {error}", file=sys.stderr)
    patches = " ".join(outcome["patches"])
    _require_label(
        f"{outcome['target']} has the patches {patches}",
        patches,
        environment,
        "EXPECTED_PATCHES",
        f"SERIES_PATCHES='{patches}'",
    )
    version = importlib.metadata.version("vllm-rocm-memory")
    _require_label(
        f"vllm-rocm-memory {version} is installed",
        version,
        environment,
        "EXPECTED_VERSION",
        f"SERIES_VERSION={version}",
    )


def _require_label(
    what: str, found: str, environment: Mapping[str, str], variable: str, argument: str
) -> None:
    """Refuse what the image would be labelled wrongly with."""
    expected = environment.get(variable) or found
    if expected != found:
        raise Refusal(
            f"{what}, and {variable} says that the image is labelled with {expected}: "
            f"build with --build-arg {argument}"
        )


def main() -> None:
    try:
        match sys.argv[1:]:
            case ["runtime"]:
                check_runtime()
            case ["outcome"]:
                check_outcome(json.load(sys.stdin), os.environ)
            case _:
                sys.exit(f"usage: {sys.argv[0]} runtime | outcome")
    except Refusal as refusal:
        sys.exit(f"install.sh: error: {refusal}")


if __name__ == "__main__":
    main()
