# SPDX-License-Identifier: Apache-2.0
"""What is released, for which Pythons, and what is refused."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import bootstrap
import psutil
import pytest
import release_wheel
from release_wheel import Interpreter, ReleaseError

GOOD = {
    "version": [3, 12],
    "implementation": "CPython",
    "free_threaded": False,
    "header": __file__,
    "has_pip": True,
}
"""What a Python answers that a wheel can be built for."""


def fake_python(folder: Path, name: str, **differs: object) -> Path:
    """A command that answers as a Python would."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    answer = json.dumps({**GOOD, "executable": str(path), **differs})
    path.write_text(f"#!/bin/sh\necho '{answer}'\n")
    path.chmod(0o755)
    return path


# --- which Pythons ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("differs", "reason"),
    [
        ({"version": [3, 10]}, r"it is 3\.10, older than 3\.11"),
        ({"implementation": "PyPy"}, "it is PyPy, and vLLM runs on CPython"),
        ({"free_threaded": True}, "a free-threaded build"),
        ({"header": "/no/Python.h"}, r"/no/Python\.h is missing.*python3\.12-dev"),
        ({"has_pip": False}, r"no ensurepip.*python3\.12-venv"),
    ],
)
def test_what_no_wheel_is_built_for(tmp_path, differs, reason):
    path = fake_python(tmp_path, "python", **differs)
    with pytest.raises(release_wheel.Unusable, match=reason):
        release_wheel.examine(str(path))


def test_what_is_no_python(tmp_path):
    """Such as a version manager's stand-in for one that is not installed."""
    stub = tmp_path / "stub"
    stub.write_text("#!/bin/sh\necho 'no such version' >&2\nexit 127\n")
    stub.chmod(0o755)
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\n")
    silent.chmod(0o755)
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho 1\n")
    other.chmod(0o755)
    poor = fake_python(tmp_path, "poor", version=[])
    for path, reason in (
        (stub, "it does not run: no such version"),
        (broken, "it does not run: No such file"),
        (silent, "it does not run: it does not answer as a Python does"),
        (other, "it does not answer as"),
        (poor, "it does not answer as"),
    ):
        with pytest.raises(release_wheel.Unusable, match=reason):
            release_wheel.examine(str(path))


def test_this_python_does(monkeypatch):
    found = release_wheel.examine(sys.executable)
    assert found == Interpreter(sys.executable, sys.version_info[:2])


def test_one_of_each_version_is_taken_and_the_others_are_explained(
    tmp_path, monkeypatch
):
    here = tmp_path / "bin"
    monkeypatch.setenv("PATH", str(here))
    monkeypatch.setattr(release_wheel.sys, "executable", str(here / "python3"))
    fake_python(here, "python3.11", version=[3, 11])
    fake_python(here, "python3.13", version=[3, 13], header="/no/Python.h")
    fake_python(here, "python3.14", version=[3, 14])
    fake_python(here, "python3", version=[3, 11])  # which is there by its own name
    found, passed_over = release_wheel.find_interpreters([])
    assert [each.version for each in found] == [(3, 11), (3, 14)]
    assert found[0].path == str(here / "python3.11")
    assert passed_over.keys() == {"python3.12", str(here / "python3.13")}
    assert passed_over["python3.12"] == "there is no such command"
    assert "/no/Python.h is missing" in passed_over[str(here / "python3.13")]

    named = [str(here / "python3.14")]
    only, passed_over = release_wheel.find_interpreters(named)
    assert [each.path for each in only] == named
    assert passed_over == {}


def test_without_any_python_each_is_explained(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    old = fake_python(tmp_path, "python3", version=[3, 9])
    monkeypatch.setattr(release_wheel.sys, "executable", str(old))
    with pytest.raises(ReleaseError) as refused:
        release_wheel.find_interpreters([])
    text = str(refused.value)
    for version in ("3.11", "3.12", "3.13", "3.14"):
        assert f"python{version}: there is no such command" in text
    assert f"{old}: it is 3.9" in text
    assert "--python PATH" in text


def test_one_that_is_named_has_to_do(tmp_path):
    """It is not passed over: the user would miss a wheel."""
    good = fake_python(tmp_path, "good")
    old = fake_python(tmp_path, "old", version=[3, 10])
    for name, reason in ((str(old), "it is 3.10"), ("no-python", "no such command")):
        with pytest.raises(ReleaseError, match=rf"--python {name}: .*{reason}"):
            release_wheel.find_interpreters([str(good), name])


def test_two_that_are_named_for_one_version_are_refused(tmp_path):
    """The second is not passed over either."""
    (one, other) = (str(fake_python(tmp_path, name)) for name in ("one", "other"))
    with pytest.raises(ReleaseError, match=rf"{other}: it is Python 3\.12, as .*{one}"):
        release_wheel.find_interpreters([one, other])
    third = str(fake_python(tmp_path, "third", version=[3, 13]))
    found, _ = release_wheel.find_interpreters([third, one])
    assert [each.path for each in found] == [one, third]


# --- what is released ---------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A git checkout with what the tool reads."""
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools>=77", "pybind11 >= 2.13"]\n'
        '[project]\nname = "x"\nversion = "1.2.0"\n'
    )
    (root / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n## 1.1.0\n")
    (root / ".gitignore").write_text("/ignored\n")
    (root / "requirements").mkdir()
    shutil.copy(bootstrap.REQUIREMENTS / "build.txt", root / "requirements")
    git(root, "init", "-q")
    commit(root)
    return root


def git(root: Path, *arguments: str) -> None:
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    options = (*who, "-c", "commit.gpgsign=false", *arguments)
    subprocess.run(["git", "-C", root, *options], check=True)


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "-q", "-m", "x", "--date=2026-01-02T03:04:05Z")


COMMIT = "0123456789abcdef"


@pytest.mark.parametrize(
    ("log", "changed", "version"),
    [
        ("## 1.2.0 (2026-01-02)\n\n## 1.1.0\n", False, "1.2.0"),
        ("## [1.2.0]\n", False, "1.2.0"),
        ("## 1.2.0\n", True, "1.2.0.dev0+g0123456789.dirty"),
        ("## Unreleased\n\n## 1.1.0\n", False, "1.2.0.dev0+g0123456789"),
        ("## Unreleased\n", True, "1.2.0.dev0+g0123456789.dirty"),
        ("## Unreleased\n\n## 1.2.0\n", False, "raise the version"),
        ("## Unreleased\n\n## 1.10.0\n", False, "above version 1.10.0"),
        ("## Unreleased\n\n## Older\n", False, "CHANGELOG.md has version Older"),
        ("## 1.3.0\n\n## 1.2.0\n", False, "1.2.0, CHANGELOG.md begins with 1.3.0"),
        ("", False, "no section"),
    ],
)
def test_the_version_is_that_of_the_changelog(checkout, log, changed, version):
    (checkout / "CHANGELOG.md").write_text(f"# Changelog\n\n{log}")
    if version.startswith("1.2.0") and "," not in version:
        assert release_wheel.wheel_version(checkout, COMMIT, changed) == version
    else:
        with pytest.raises(ReleaseError, match=re.escape(version)):
            release_wheel.wheel_version(checkout, COMMIT, changed)


@pytest.mark.parametrize("version", ["1.2.0.dev1", "1.2.0+x", "one"])
def test_a_version_that_is_none_is_refused(checkout, version):
    file = checkout / "pyproject.toml"
    file.write_text(file.read_text().replace("1.2.0", version))
    said = f"pyproject.toml has version {version}"
    with pytest.raises(ReleaseError, match=re.escape(said)):
        release_wheel.wheel_version(checkout, COMMIT, False)


def test_the_version_is_written_into_the_copy(checkout):
    release_wheel.set_version(checkout, "1.2.0.dev0+g1")
    file = checkout / "pyproject.toml"
    assert tomllib.loads(file.read_text())["project"]["version"] == "1.2.0.dev0+g1"
    for text in (
        file.read_text().replace("version =", "version="),
        file.read_text().replace("[project]", 'version = "1"\n[project]\n'),
    ):
        file.write_text(text)
        with pytest.raises(ReleaseError, match="one line `version"):
            release_wheel.set_version(checkout, "1.3.0")


def test_this_project_can_be_released(tmp_path):
    root = release_wheel.ROOT
    pins = bootstrap.pins("build.txt")
    version = release_wheel.wheel_version(root, COMMIT, False)
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev0\+g0123456789)?", version)
    shutil.copy(root / "pyproject.toml", tmp_path)
    release_wheel.set_version(tmp_path, "9.9.9")
    wanted = release_wheel.build_requirements(root)
    assert {*wanted} >= {f"pybind11=={pins['pybind11']}", f"cmake=={pins['cmake']}"}
    assert not [pin for pin in wanted if pin.startswith("libcst")], "not for the build"


def test_a_build_requirement_without_a_pin_is_refused(checkout):
    wanted = release_wheel.build_requirements(checkout)
    assert [pin.partition("==")[0] for pin in wanted] == ["setuptools", "pybind11"]
    project = checkout / "pyproject.toml"
    project.write_text(project.read_text().replace("pybind11 >=", "nobody-pins-it>="))
    with pytest.raises(ReleaseError, match=r"nobody-pins-it>= 2\.13.*does not pin it"):
        release_wheel.build_requirements(checkout)


def test_changes_are_refused_before_anything_is_built(checkout, monkeypatch, tmp_path):
    built: list[tuple[object, ...]] = []

    def release(*arguments: object) -> tuple[Path, list[Path]]:
        built.append(arguments)
        wheel = tmp_path / "x.whl"
        wheel.write_bytes(b"")
        return wheel, []

    monkeypatch.setattr(release_wheel, "release", release)
    named = [str(fake_python(tmp_path, "python"))]
    out = tmp_path / "dist"
    assert len(release_wheel.released(named, out, False, checkout)) == 1
    (_, _, _, epoch) = built.pop()
    wanted = subprocess.run(
        ["git", "-C", checkout, "show", "-s", "--format=%ct"],
        capture_output=True,
        text=True,
    ).stdout
    assert epoch == int(wanted)

    (checkout / "ignored").write_text("")
    release_wheel.released(named, out, False, checkout)
    (checkout / "new file").write_text("")
    with pytest.raises(ReleaseError, match=r"1 files.*new file.*--allow-dirty"):
        release_wheel.released(named, out, False, checkout)
    (checkout / "CHANGELOG.md").write_text("## 1.2.0\n")
    built.clear()
    with pytest.raises(ReleaseError, match="2 files"):
        release_wheel.released(named, out, False, checkout)
    assert not built
    release_wheel.released(named, out, True, checkout)
    assert len(built) == 1


def test_what_is_built_is_the_commit(checkout, monkeypatch, tmp_path, capsys):
    """Whatever git does not see, and whatever is saved while another Python builds."""
    log, script = checkout / "CHANGELOG.md", checkout / "run"
    script.write_text("as committed\n")
    script.chmod(0o700)
    commit(checkout)
    as_committed = log.read_text()
    git(checkout, "update-index", "--assume-unchanged", "CHANGELOG.md")
    log.write_text(f"{as_committed}an edit\n")
    assert release_wheel.changed_files(checkout) == []
    seen = []

    def release(python: object, sources: Path, *_: object) -> tuple[Path, list[Path]]:
        seen.append(
            {
                path.name: (path.read_text(), path.stat().st_mode & 0o777)
                for path in sources.iterdir()
                if path.is_file()
            }
        )
        script.write_text("saved meanwhile\n")
        return script, [tmp_path / "older.whl"]

    monkeypatch.setattr(release_wheel, "release", release)
    named = [
        str(fake_python(tmp_path, name, version=[3, minor]))
        for name, minor in (("one", 11), ("other", 12))
    ]
    head = subprocess.check_output(["git", "-C", checkout, "rev-parse", "HEAD"])
    release_wheel.released(named, tmp_path / "dist", False, checkout)
    version = f"1.2.0.dev0+g{head.decode()[:10]}"
    assert seen[0] == seen[1]
    assert seen[0].keys() == {".gitignore", "CHANGELOG.md", "pyproject.toml", "run"}
    assert seen[0]["CHANGELOG.md"] == (as_committed, 0o644)
    assert seen[0]["run"] == ("as committed\n", 0o755)
    assert f'version = "{version}"' in seen[0]["pyproject.toml"][0]
    assert 'version = "1.2.0"' in (checkout / "pyproject.toml").read_text()
    said = capsys.readouterr().out
    assert f"building {version} for Python 3.11" in said
    assert "in place of older.whl" in said and "not for a release" in said

    # with leave, the checkout as it was at the start, and it is called so
    release_wheel.released(named, tmp_path / "dist", True, checkout)
    assert seen[2] == seen[3]
    assert seen[2]["run"] == ("saved meanwhile\n", 0o755)
    assert f'version = "{version}.dirty"' in seen[2]["pyproject.toml"][0]


def test_where_nothing_can_be_written_nothing_is_built(checkout, monkeypatch, tmp_path):
    monkeypatch.setattr(release_wheel, "release", lambda *_: pytest.fail("it builds"))
    named = [str(fake_python(tmp_path, "python"))]
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ReleaseError, match=f"--output {output}: .*; name a folder"):
            release_wheel.released(named, output, False, checkout)


def test_only_a_checkout_is_released(tmp_path):
    with pytest.raises(ReleaseError, match=r"git rev-parse .* failed, .*:\nfatal: not"):
        release_wheel.released([], tmp_path, False, tmp_path)


def test_the_command_says_why_and_how(capsys):
    assert release_wheel.main(["--allow-dirty", "--python", "/no/python"]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("release_wheel: --python /no/python: there is no such")
    assert said.out == ""


def test_sources_are_what_git_has(checkout, tmp_path):
    """Not what a build has left, nor the permissions of this checkout."""
    (checkout / "ignored").mkdir()
    (checkout / "ignored" / "left.so").write_text("")
    (checkout / "new.py").write_text("")
    script = checkout / "run"
    script.write_text("")
    script.chmod(0o700)
    (checkout / "CHANGELOG.md").chmod(0o600)
    (checkout / "pyproject.toml").unlink()
    out = tmp_path / "sources"
    release_wheel.copy_sources(checkout, out)
    modes = {path.name: path.stat().st_mode & 0o777 for path in out.iterdir()}
    assert modes == {
        ".gitignore": 0o644,
        "CHANGELOG.md": 0o644,
        "new.py": 0o644,
        "requirements": out.stat().st_mode & 0o777,
        "run": 0o755,
    }


def test_the_build_does_not_see_this_shell(monkeypatch, tmp_path):
    theirs = {
        "CXXFLAGS": "-march=native",
        "LDFLAGS": "-lfoo",
        "CMAKE_GENERATOR": "x",
        "PYTHONPATH": "/x",
        "AUDITWHEEL_PLAT": "linux_x86_64",
        "DIST_EXTRA_CONFIG": "/x",
        "LD_RUN_PATH": "/x",
        "CPLUS_INCLUDE_PATH": "/x",
        "pybind11_ROOT": "/x",
        "PIP_CONSTRAINT": "/x",
        "PIP_TARGET": "/x",
        "CXX": "clang++",
        "HOME": "/home/x",
        "https_proxy": "http://x",
        "PIP_INDEX_URL": "https://x/simple",
        "REQUESTS_CA_BUNDLE": "/x",
    }
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    seen = release_wheel.environment(tmp_path, 5)
    kept = {name for name, value in theirs.items() if seen.get(name) == value}
    assert kept == {
        *("CXX", "HOME", "https_proxy", "PIP_INDEX_URL", "REQUESTS_CA_BUNDLE")
    }
    assert seen["SOURCE_DATE_EPOCH"] == "5"
    assert seen["CXXFLAGS"] == f"-ffile-prefix-map={tmp_path}=."
    monkeypatch.delenv("PATH")
    assert release_wheel.environment(tmp_path, 5)["PATH"] == os.defpath


# --- what is refused ----------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, bytes]:
    """Libraries by what they are linked to."""
    folder = tmp_path_factory.mktemp("compiled")
    compiler = shutil.which("gcc") or shutil.which("cc") or "g++"

    def library(name: str, *others: str, text: str = "") -> bytes:
        # by which auditwheel tells an extension module
        (folder / "source.c").write_text(
            f"int PyInit_pitched_copies(void) {{ return 0; }}\n{text}\n"
        )
        command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{name}"]
        options = ("-Wl,--no-as-needed", "-o", name, "source.c", *others)
        subprocess.run([*command, *options], cwd=folder, check=True)
        return (folder / name).read_bytes()

    drivers = ("libcuda.so.1", "libamdhip64.so.7", "libforeign.so.3")
    stand_ins = {name: library(name) for name in drivers}
    inside = "$ORIGIN/hipsim-cuda"  # where auditwheel finds the simulator
    path = f'const char *path = "{folder}/sources/x.cpp";'
    return {
        "nothing": library("nothing.so"),
        "the wheel's": library("own.so", "libcuda.so.1", f"-Wl,-rpath,{inside}"),
        "the simulator": stand_ins["libcuda.so.1"],
        "libcuda.so.1": library("cuda.so", "libcuda.so.1"),
        "libamdhip64.so.7": library("hip.so", "libamdhip64.so.7"),
        "libforeign.so.3": library("foreign.so", "libforeign.so.3"),
        "its path": library("path.so", text=path),
        "a folder": library("rpath.so", "-Wl,-rpath,/opt/theirs"),
        "folder": str(folder).encode(),
    }


def modules(**replaced: bytes) -> dict[str, bytes]:
    """What a wheel has compiled, one of them replaced."""
    return {
        f"{release_wheel.NATIVE}{name}.so": replaced.get(name, replaced["other"])
        for name in ("cumem_allocator", "pitched_copies")
    }


def test_what_is_linked_to_a_driver_is_refused(compiled):
    """auditwheel would not see it: the simulators in the wheel have the same names."""
    folder = Path(compiled["folder"].decode())
    other = compiled["nothing"]
    release_wheel.check_libraries(modules(other=other), folder)
    for driver in ("libcuda.so.1", "libamdhip64.so.7"):
        found = modules(other=other, pitched_copies=compiled[driver])
        with pytest.raises(ReleaseError, match=f"pitched_copies.* linked to {driver}"):
            release_wheel.check_libraries(found, folder)


def test_what_does_not_belong_into_a_wheel_is_refused(compiled):
    folder = Path(compiled["folder"].decode())
    found = modules(other=compiled["nothing"], cumem_allocator=compiled["its path"])
    with pytest.raises(ReleaseError, match=r"cumem_allocator.*holds the path of its"):
        release_wheel.check_libraries(found, folder)
    found = modules(other=compiled["nothing"], cumem_allocator=compiled["a folder"])
    with pytest.raises(ReleaseError, match=r"cumem_allocator.* in /opt/theirs, where"):
        release_wheel.check_libraries(found, folder)
    good = modules(other=compiled["nothing"])
    grafted = "vllm_rocm_memory.libs/libx.so"
    with pytest.raises(ReleaseError, match=f"{grafted} is not below"):
        release_wheel.check_libraries({**good, grafted: compiled["nothing"]}, folder)
    for lost in good:
        left = {name: data for name, data in good.items() if name != lost}
        with pytest.raises(ReleaseError, match=f"has no {Path(lost).name[:8]}"):
            release_wheel.check_libraries(left, folder)


def write_wheel(folder: Path, library: bytes, **more: bytes) -> Path:
    """As pip leaves it, with this library and those by their names."""
    info = "vllm_rocm_memory-1.0.dist-info"
    files = {
        f"{release_wheel.NATIVE}pitched_copies.so": library,
        **{f"{release_wheel.NATIVE}{name}": data for name, data in more.items()},
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: x\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\n"
        b"Root-Is-Purelib: false\nTag: cp311-cp311-linux_x86_64\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in files).encode()
    path = folder / "vllm_rocm_memory-1.0-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def test_a_foreign_library_is_refused(compiled, tmp_path):
    variables = release_wheel.environment(tmp_path, 0)
    wheel = write_wheel(tmp_path, compiled["libforeign.so.3"])
    with pytest.raises(ReleaseError, match=r"linked to libforeign\.so\.3.*load it at"):
        release_wheel.audit(wheel, variables)
    wheel.write_bytes(b"no zip")
    with pytest.raises(ReleaseError, match="no answer on vllm_rocm_memory-1"):
        release_wheel.audit(wheel, variables)
    wheel = write_wheel(tmp_path, b"no library")
    with pytest.raises(ReleaseError, match=r"does not look like a platform wheel"):
        release_wheel.audit(wheel, variables)


def test_what_auditwheel_brings_along_is_refused(compiled, tmp_path, monkeypatch):
    before = write_wheel(tmp_path, compiled["nothing"])
    out = tmp_path / "repaired"
    out.mkdir()

    def repaired(content: bytes, *more: str) -> None:
        changed = write_wheel(out, content)
        with zipfile.ZipFile(changed, "a") as archive:
            for name in more:
                archive.writestr(name, compiled["nothing"])

    def repair() -> Path:
        return release_wheel.repair(before, "manylinux_2_35_x86_64", out, {})

    monkeypatch.setattr(
        release_wheel, "run", lambda *_, **__: repaired(compiled["nothing"])
    )
    assert repair().parent == out
    grafted = "x.libs/libcuda.so.1"
    monkeypatch.setattr(
        release_wheel, "run", lambda *_, **__: repaired(compiled["nothing"], grafted)
    )
    with pytest.raises(ReleaseError, match=f"auditwheel put {grafted} into"):
        repair()
    monkeypatch.setattr(
        release_wheel, "run", lambda *_, **__: repaired(compiled["its path"])
    )
    with pytest.raises(ReleaseError, match=r"auditwheel altered .*pitched_copies"):
        repair()


@pytest.mark.parametrize(
    ("bad", "refusal"),
    [
        ("libforeign.so.3", r"linked to libforeign\.so\.3, which is not on every"),
        ("the wheel's", r"linked to libcuda\.so\.1: a driver is found at run time"),
        ("its path", "holds the path of its build"),
        ("a folder", "look for libraries in /opt/theirs"),
        (None, None),
    ],
)
def test_a_wheel_that_is_refused_is_not_placed(
    compiled, tmp_path, monkeypatch, bad, refusal
):
    def build(python: object, sources: object, folder: Path, epoch: object) -> Path:
        good = compiled["nothing"]
        library = compiled[bad] if bad else good
        if bad == "its path":
            library = good + str(folder).encode()
        simulator = {"hipsim-cuda/libcuda.so.1": compiled["the simulator"]}
        return write_wheel(folder, library, **{"cumem_allocator.so": good}, **simulator)

    monkeypatch.setattr(release_wheel, "build", build)
    python = Interpreter(sys.executable, (3, 11))
    out = tmp_path / "dist"
    out.mkdir()
    older, other, released = (
        out / f"vllm_rocm_memory-{version}-{tag}-{tag}-manylinux_2_28_x86_64.whl"
        for version, tag in (
            ("0.9.dev0+g0123456789", "cp311"),
            ("0.9.dev0+g0123456789", "cp312"),
            ("0.8", "cp311"),
        )
    )
    foreign = out / "somebody's-1.0-cp311-cp311-linux_x86_64.whl"
    before = {older, other, released, foreign}
    for path in before:
        path.write_bytes(b"")
    if bad:
        with pytest.raises(ReleaseError, match=refusal):
            release_wheel.release(python, tmp_path, out, 0)
        assert {*out.iterdir()} == before
    else:
        wheel, removed = release_wheel.release(python, tmp_path, out, 0)
        assert "manylinux_2_" in wheel.name
        assert removed == [older], "pip would have two to choose from"
        assert {*out.iterdir()} == before - {older} | {wheel}


def test_a_failing_build_shows_its_end():
    script = "print('first'); print('the cause'); raise SystemExit(3)"
    with pytest.raises(ReleaseError, match=r"the cause\n`.*` failed"):
        release_wheel.run([sys.executable, "-c", script])
    with pytest.raises(ReleaseError, match=r"`/no/patchelf -x` does not run: No such"):
        release_wheel.run(["/no/patchelf", "-x"])


def test_a_build_that_hangs_is_ended_with_what_it_started(monkeypatch, tmp_path):
    monkeypatch.setattr(release_wheel, "BUILD_DEADLINE_S", 2)
    file = tmp_path / "pid"
    started = time.monotonic()
    with pytest.raises(ReleaseError, match=r"^`sh -c .*` took more than 2 s"):
        release_wheel.run(["sh", "-c", f"sleep 60 & echo $! > {file}; wait"])
    assert time.monotonic() - started < 30
    sleeper = int(file.read_text())
    gone = time.monotonic() + 10
    while psutil.pid_exists(sleeper) and time.monotonic() < gone:
        if psutil.Process(sleeper).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.05)
    else:
        assert not psutil.pid_exists(sleeper)


def test_what_the_system_refuses_is_no_traceback(monkeypatch, capsys):
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "some/file")

    monkeypatch.setattr(release_wheel, "changed_files", refuse)
    assert release_wheel.main([]) == 1
    assert "release_wheel: [Errno 13] Permission denied: 'some/file'" in (
        capsys.readouterr().err
    )
