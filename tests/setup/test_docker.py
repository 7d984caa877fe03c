# SPDX-License-Identifier: Apache-2.0
"""The Dockerfiles fit the checkout, and what they call works and refuses as it says.

Nothing here needs Docker: install.sh runs in a virtual environment with a copy of the
installed vLLM, the simulator is its HIP runtime, and no compiler is on its path.
"""

import ctypes
import fnmatch
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import venv
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from vllm_rocm_memory.series import operations
from vllm_rocm_memory.series.definition import load
from vllm_rocm_memory.series.target import Target
from vllm_rocm_memory.sim import hipsim

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
COMMIT = "25e14349f2606a6b95c4ccd45eb92a1835646cf2"

_spec = importlib.util.spec_from_file_location("checks", DOCKER / "checks.py")
assert _spec is not None and _spec.loader is not None
checks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(checks)


# the Dockerfiles


@dataclass
class Stage:
    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [text for name, text in self.steps if name == instruction]


def stages(name: str) -> tuple[dict[str, str], list[Stage]]:
    """The arguments before the first FROM, and the stages."""
    text = re.sub(r"^\s*#.*\n", "", (DOCKER / name).read_text(), flags=re.MULTILINE)
    found: list[Stage] = []
    before: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        instruction, _, rest = line.strip().partition(" ")
        if instruction == "FROM":
            base, _, stage = rest.partition(" AS ")
            found.append(Stage(base, stage))
        elif instruction == "ARG" and not found:
            before |= arguments([rest])
        elif instruction:
            found[-1].steps.append((instruction, rest))
    return before, found


def arguments(texts: list[str]) -> dict[str, str]:
    pairs = [word.partition("=") for text in texts for word in shlex.split(text)]
    return {name: value for name, _, value in pairs}


def mounts(stage: Stage) -> list[dict[str, str]]:
    found = re.findall(r"--mount=(\S+)", " ".join(stage.all("RUN")))
    return [dict(part.split("=", 1) for part in mount.split(",")) for mount in found]


def sources(stage: Stage) -> list[str]:
    """What a stage takes from the build context."""
    copied = [shlex.split(text) for text in stage.all("COPY")]
    named = [w for words in copied if "--from" not in words[0] for w in words[:-1]]
    bound = [
        m["source"] for m in mounts(stage) if m["type"] == "bind" and "source" in m
    ]
    return [*named, *bound]


def in_context(path: Path) -> bool:
    """What .dockerignore says of a file: the last rule for it or a folder above it."""
    relative = path.relative_to(ROOT)
    names = [relative.as_posix(), *(p.as_posix() for p in relative.parents[:-1])]
    ignored = False
    for rule in (ROOT / ".dockerignore").read_text().split("\n"):
        if not rule or rule.startswith("#"):
            continue
        pattern = rule.removeprefix("!")
        if pattern.startswith("**/"):
            parts = relative.parts
            matches = any(fnmatch.fnmatch(part, pattern[3:]) for part in parts)
        else:
            depth = pattern.count("/")
            matches = any(
                name.count("/") == depth and fnmatch.fnmatch(name, pattern)
                for name in names
            )
        if matches:
            ignored = not rule.startswith("!")
    return not ignored


ALLOWANCES = {"ALLOW_UNKNOWN_BASE", "ALLOW_UNKNOWN_RUNTIME"}
FILES = ("Dockerfile.rocm", "Dockerfile.rocm_base")


@pytest.mark.parametrize("name", FILES)
def test_what_is_taken_from_the_checkout_is_there(name):
    _, found = stages(name)
    taken = [source for stage in found for source in sources(stage)]
    assert taken
    for source in taken:
        path = ROOT / source
        files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
        assert any(map(in_context, files)), source
        for file in files:
            kind = file.suffix in (".py", ".cpp", ".h", ".txt", ".toml", ".sh", ".json")
            assert not kind or in_context(file), file
    names = {stage.name for stage in found}
    assert {m["from"] for s in found for m in mounts(s) if "from" in m} <= names


def test_the_builder_has_all_that_a_wheel_is_made_of():
    _, found = stages("Dockerfile.rocm")
    (builder,) = [stage for stage in found if stage.name == "builder"]
    taken = {source.rstrip("/") for source in sources(builder)}
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    text = (ROOT / "CMakeLists.txt").read_text()
    compiled = re.findall(r"^add_subdirectory\(([^/)]+)", text, flags=re.MULTILINE)
    build = {"CMakeLists.txt", "pyproject.toml", "setup.py", *compiled}
    packed = {project["readme"], *project["license-files"], "vllm", "vllm_rocm_memory"}
    assert taken == build | packed
    assert "csrc" in compiled
    # a release wheel replaces the stage that has the builder's
    final = [m["target"] for m in mounts(found[-1]) if m.get("from") == "wheel"]
    assert final and f"install.sh {final[0]}" in " ".join(found[-1].all("RUN"))


@pytest.mark.parametrize("name", FILES)
def test_a_base_has_a_tag_and_takes_a_digest(name):
    before, found = stages(name)
    assert before["BASE_DIGEST"] == "", "a digest is the builder's to give"
    assert "latest" not in " ".join([*before.values(), *(s.base for s in found)])
    own = {stage.name for stage in found}
    bases = {stage.base for stage in found} - own - {"scratch"}
    (base,) = bases
    assert re.fullmatch(
        r"\$\{BASE_IMAGE\}:\$\{(VLLM_VERSION|BASE_TAG)\}"
        r"\$\{BASE_DIGEST:\+@\$\{BASE_DIGEST\}\}",
        base,
    )
    last = found[-1]
    declared = arguments(last.all("ARG"))
    used = set(re.findall(r"\$\{(\w+)", " ".join(last.all("LABEL") + last.all("RUN"))))
    # An argument is a variable of the step too, which is how install.sh has these.
    allowances = {name for name in declared if name.startswith("ALLOW_")}
    assert allowances == (ALLOWANCES if name == "Dockerfile.rocm" else set())
    assert used == set(declared) - allowances, "empty where it is not declared"
    assert declared["REQUIRE_DIGEST"] == "0"


def test_the_image_is_labelled_with_what_it_has():
    before, found = stages("Dockerfile.rocm")
    final = found[-1]
    declared = arguments(final.all("ARG"))
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert declared["SERIES_VERSION"] == tomllib.load(file)["project"]["version"]
    patches = [patch.name for patch in load().patches]
    assert declared["SERIES_PATCHES"].split() == patches
    major, minor = map(int, declared["HIP_RUNTIME"].split("."))
    assert (major, minor) in checks.known_runtimes()
    assert before["VLLM_VERSION"].removeprefix("v") in load().bases

    labels = arguments(final.all("LABEL"))
    image = "org.opencontainers.image."
    assert labels[f"{image}base.name"] == "${BASE_IMAGE}:${VLLM_VERSION}"
    assert labels[f"{image}base.digest"] == "${BASE_DIGEST}"
    assert labels[f"{image}source"] == "${SOURCE}"
    assert labels[f"{image}revision"] == "${REVISION}"
    # each label that could be wrong is handed to the step that proves it
    run = " ".join(final.all("RUN"))
    for label, proof in (
        (f"{image}version", 'EXPECTED_VERSION="{}"'),
        ("vllm-rocm-memory.hip-runtime", 'EXPECTED_HIP_RUNTIME="{}"'),
        ("vllm-rocm-memory.patches", 'EXPECTED_PATCHES="{}"'),
        (
            f"{image}base.digest",
            'check_pinned.sh "${{BASE_IMAGE}}:${{VLLM_VERSION}}" "{}"',
        ),
    ):
        assert proof.format(labels[label]) in " ".join(run.split()), label


def test_the_image_runs_as_the_base_does_and_not_as_root():
    _, found = stages("Dockerfile.rocm")
    final = found[-1]
    assert final.base == "base", "the builder's layers stay behind"
    assert final.all("ENTRYPOINT") == ['["vllm", "serve"]']
    kinds = [name for name, _ in final.steps]
    (user,) = final.all("USER")
    assert user == "2000:0"
    assert "RUN" not in kinds[kinds.index("USER") :]
    (added,) = [run for run in final.all("RUN") if "useradd" in run]
    assert "--uid 2000 --gid 0 --groups video" in added
    home = arguments(final.all("ENV"))["HOME"]
    assert final.all("WORKDIR") == [home] and f"chown -R 2000:0 {home}" in added
    (check,) = final.all("HEALTHCHECK")
    asks = json.loads(check.partition(" CMD ")[2])[-1]
    assert asks.endswith('"$HEALTH_URL"')
    assert "curl --noproxy '*' " in asks, "Docker hands its client's proxy on"
    opened = [run for run in final.all("RUN") if run.endswith("docker/open_aiter.sh")]
    assert opened, "by root, as everything before USER"


def test_the_base_is_labelled_with_the_commit_that_is_checked():
    _, found = stages("Dockerfile.rocm_base")
    (final,) = found
    assert arguments(final.all("ARG"))["ROCM_RUNTIME_COMMIT"] == COMMIT
    labels = arguments(final.all("LABEL"))
    label = labels["vllm-rocm-memory.rocm-runtime-commit"]
    (run,) = final.all("RUN")
    assert run.endswith(f'check_runtime_commit.sh /app/versions.txt "{label}"')


# what they call


def call(script: str, *words: object) -> tuple[int, str]:
    command = [str(DOCKER / script), *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return result.returncode, result.stdout + result.stderr


def test_the_runtime_of_the_expected_commit(tmp_path):
    versions = tmp_path / "versions.txt"
    record = "ROCM_SYSTEMS_REPO: here\nROCM_RUNTIME_COMMIT: {}\nTRITON_VERSION: 3\n"
    versions.write_text(record.format(COMMIT))
    assert call("check_runtime_commit.sh", versions, COMMIT) == (
        0,
        f"ROCm runtime commit {COMMIT}\n",
    )
    other = "f" * 40
    versions.write_text(record.format(other))
    code, said = call("check_runtime_commit.sh", versions, COMMIT)
    assert code == 1 and f"commit {other}, and {COMMIT} is expected" in said


@pytest.mark.parametrize(
    ("content", "commit", "said"),
    [
        (None, COMMIT, "the base has no "),
        ("TORCH_VERSION: 2\n", COMMIT, "has no line ROCM_RUNTIME_COMMIT"),
        (f"ROCM_RUNTIME_COMMIT: {COMMIT}\n", COMMIT[:10], "is not a whole commit"),
        (f"ROCM_RUNTIME_COMMIT: {COMMIT}\n", "", "is not a whole commit"),
    ],
)
def test_a_base_whose_runtime_is_not_told(tmp_path, content, commit, said):
    versions = tmp_path / "versions.txt"
    if content is not None:
        versions.write_text(content)
    code, output = call("check_runtime_commit.sh", versions, commit)
    assert code == 1 and said in output


@pytest.mark.parametrize(
    ("digest", "required", "code", "said"),
    [
        (f"sha256:{'a' * 64}", "1", 0, f"base image i:t, pinned to sha256:{'a' * 64}"),
        ("", "0", 0, "warning: the base image is not pinned: i:t"),
        ("", "1", 1, "i:t has no digest and REQUIRE_DIGEST=1"),
        ("a" * 64, "0", 1, "is no digest"),
        (f"sha256:{'a' * 63}", "0", 1, "is no digest"),
        ("", "yes", 1, "REQUIRE_DIGEST=yes is neither 0 nor 1"),
    ],
)
def test_a_base_is_pinned_or_said_not_to_be(digest, required, code, said):
    found, output = call("check_pinned.sh", "i:t", digest, required)
    assert found == code and said in output


def test_the_known_runtimes_are_those_that_are_simulated():
    with checks.KNOWN.open("rb") as file:
        entries = tomllib.load(file)["runtime"]
    present, simulated = hipsim.profile(), {}
    for name in hipsim.PROFILES:
        hipsim.reset(name)
        version = ctypes.c_int()
        assert hipsim.load().hipRuntimeGetVersion(version) == hipsim.SUCCESS
        major, minor = version.value // 10_000_000, version.value // 100_000 % 100
        simulated[name] = f"{major}.{minor}"
    hipsim.reset(present)
    assert {entry["profile"]: entry["hip"] for entry in entries} == simulated


ALLOWED = {"ALLOW_UNKNOWN_RUNTIME": "1"}


@pytest.mark.parametrize(
    ("found", "environment", "said"),
    [
        ((7, 1), {}, None),
        ((7, 16), {"EXPECTED_HIP_RUNTIME": "7.16"}, None),
        ((7, 17), {}, "is newer than any known: the newest known is 7.16"),
        ((8, 0), {}, "is newer than any known: the newest known is 7.16"),
        ((7, 14), {}, "is none of the known: 7.1, 7.2, 7.12, 7.13, 7.15, 7.16"),
        ((6, 4), {}, "is none of the known"),
        ((0, 0), {}, "does not tell its version; known are 7.1"),
        ((7, 17), ALLOWED, None),
        ((0, 0), ALLOWED, None),
        ((7, 15), {"EXPECTED_HIP_RUNTIME": "7.16"}, "--build-arg HIP_RUNTIME=7.15"),
        ((7, 17), {**ALLOWED, "EXPECTED_HIP_RUNTIME": "7.16"}, "HIP_RUNTIME=7.17"),
        ((0, 0), {**ALLOWED, "EXPECTED_HIP_RUNTIME": "7.16"}, "HIP_RUNTIME=unknown"),
    ],
)
def test_runtimes(found, environment, said, capsys):
    if said is None:
        checks.require_known(found, "v (lib)", environment)
        assert ("warning: the HIP runtime v (lib)" in capsys.readouterr().err) == (
            environment == ALLOWED
        )
    else:
        with pytest.raises(checks.Refusal, match=re.escape(said)) as refused:
            checks.require_known(found, "v (lib)", environment)
        assert "v (lib)" in str(refused.value)


OUTCOME = {
    "target": "/site/vllm",
    "patches": ["one", "two"],
    "verified": True,
    "reason": None,
    "not_importable": {"vllm.needs_ray": "ModuleNotFoundError: ray"},
}


@pytest.mark.parametrize(
    ("outcome", "environment", "said"),
    [
        ({}, {}, None),
        ({}, {"EXPECTED_PATCHES": "one two", "EXPECTED_VERSION": "0.1.0"}, None),
        ({"verified": False, "reason": "no torch"}, {}, "no module of /site/vllm"),
        ({"patches": ["one"]}, {"EXPECTED_PATCHES": "one two"}, "SERIES_PATCHES='one'"),
        ({}, {"EXPECTED_VERSION": "9"}, "--build-arg SERIES_VERSION=0.1.0"),
    ],
)
def test_outcomes(outcome, environment, said, monkeypatch, capsys):
    monkeypatch.setattr(checks.importlib.metadata, "version", lambda name: "0.1.0")
    if said is None:
        checks.check_outcome({**OUTCOME, **outcome}, environment)
        assert "vllm.needs_ray does not import here" in capsys.readouterr().err
    else:
        with pytest.raises(checks.Refusal, match=re.escape(said)):
            checks.check_outcome({**OUTCOME, **outcome}, environment)


# install.sh


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    """A wheel made of what the builder stage copies, and the compiled modules."""
    context = tmp_path_factory.mktemp("context")
    _, found = stages("Dockerfile.rocm")
    (builder,) = [stage for stage in found if stage.name == "builder"]
    for source in map(ROOT.joinpath, sources(builder)):
        files = source.rglob("*") if source.is_dir() else [source]
        for file in filter(in_context, filter(Path.is_file, files)):
            copy = context / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    built, out = context / "built", context / "dist"
    native = built / "vllm_rocm_memory" / "_native"
    native.mkdir(parents=True)
    for name in ("cumem_allocator", "pitched_copies"):
        (module,) = (ROOT / "vllm_rocm_memory" / "_native").glob(f"{name}.*.so")
        shutil.copy(module, native)
    (context / "settings.cfg").write_text(f"[build]\nbuild_lib = {built}\n")
    for words in (["build_py"], ["bdist_wheel", "--skip-build", f"--dist-dir={out}"]):
        subprocess.run(
            [sys.executable, "setup.py", "-q", *words],
            cwd=context,
            env={**os.environ, "DIST_EXTRA_CONFIG": str(context / "settings.cfg")},
            check=True,
            timeout=120,
        )
    return out


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    """The Python of the installed vLLM, and its metadata, as upstream has them."""
    root = tmp_path_factory.mktemp("pristine")
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    installed = Target.find(Path(spec.origin).parent)

    def rest(folder: str, names: list[str]) -> set[str]:
        keep = (".py", ".pyc") if ".rocm_memory_series" not in folder else ("",)
        inside = Path(folder)
        return {n for n in names if (inside / n).is_file() and not n.endswith(keep)}

    shutil.copytree(installed.package, root / "vllm", ignore=rest)
    for record in installed.records:
        folder = installed.root / Path(record).parent
        shutil.copytree(folder, root / folder.name)
    operations.revert(Target.find(root), load())
    return root


def tools(folder: Path) -> Path:
    """A path for commands that has no compiler, nor anything else that builds."""
    path = folder / "bin"
    path.mkdir()
    for name in ("bash", "chgrp", "chmod", "dirname", "env", "find", "mktemp", "rm"):
        (path / name).symlink_to(str(shutil.which(name)))
    return path


def run(command: list[object], settings: dict[str, str]) -> tuple[int, str]:
    result = subprocess.run(
        [str(word) for word in command],
        env={"PIP_NO_INDEX": "1", **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    return result.returncode, result.stdout


class Environment:
    """A virtual environment with a vLLM, whose other packages are those of this one."""

    def __init__(self, folder: Path, pristine: Path, wheels: Path) -> None:
        venv.create(folder / "venv", with_pip=False)
        self.python = folder / "venv" / "bin" / "python"
        (self.site,) = folder.glob("venv/lib/python*/site-packages")
        # Links: `apply` puts new files in the place of old ones.
        shutil.copytree(pristine, self.site, copy_function=os.link, dirs_exist_ok=True)
        packages = [
            p for p in sys.path if p.endswith(("site-packages", "dist-packages"))
        ]
        (self.site / "others.pth").write_text("\n".join([*packages, ""]))
        # Where a module does not import, everything is imported a second time.
        ray = "def method(**options):\n    return lambda function: function\n"
        (self.site / "ray.py").write_text(ray)
        self.settings = {
            "PATH": str(tools(folder)),
            "PYTHON": str(self.python),
            "LD_LIBRARY_PATH": str(hipsim.library_path().parent),
            "HIPSIM_PROFILE": "7.16",
        }
        self.wheels = wheels

    def install(self) -> tuple[int, str]:
        return run([DOCKER / "install.sh", self.wheels], self.settings)

    @property
    def has_package(self) -> bool:
        return (self.site / "vllm_rocm_memory").exists()

    def states(self) -> set[str]:
        rows = operations.status(Target.find(self.site), load())
        return {str(row.state) for row in rows}


@pytest.fixture
def environment(tmp_path, pristine, wheels) -> Environment:
    if "rocm" in (torch := importlib.metadata.version("torch")):
        pytest.skip(
            f"PyTorch {torch} loads a HIP runtime of its own, not the simulator"
        )
    return Environment(tmp_path, pristine, wheels)


def test_installs_without_a_compiler(environment, wheels):
    for compiler in ("g++", "gcc", "c++", "cc", "clang", "cmake", "ninja", "make"):
        assert shutil.which(compiler, path=environment.settings["PATH"]) is None
    # another build of the same version, which this one has to replace
    (wheel,) = wheels.iterdir()
    shutil.unpack_archive(wheel, environment.site, "zip")
    (environment.site / "vllm_rocm_memory" / "serve.py").unlink()
    environment.settings |= {
        "EXPECTED_HIP_RUNTIME": "7.16",
        "EXPECTED_PATCHES": " ".join(patch.name for patch in load().patches),
        "EXPECTED_VERSION": importlib.metadata.version("vllm-rocm-memory"),
    }
    code, said = environment.install()
    assert code == 0, said
    assert f"HIP runtime 7.16.26361 ({hipsim.library_path()})" in said
    assert environment.states() == {"applied"}
    assert (environment.site / "vllm_rocm_memory" / "serve.py").exists()


def test_refuses_a_vllm_that_it_does_not_know(environment):
    path = "vllm/v1/worker/gpu_worker.py"
    known = (environment.site / path).read_bytes()
    changed = known + b"# changed\n"
    (environment.site / path).unlink()
    (environment.site / path).write_bytes(changed)
    code, said = environment.install()
    assert code == 1, said
    assert path in said
    for content in (known, changed):
        assert hashlib.sha256(content).hexdigest() in said
    assert "ALLOW_UNKNOWN_BASE=1" in said
    assert "applied" not in environment.states()
    assert not environment.has_package


def test_refuses_an_environment_without_a_runtime(environment):
    settings = {
        **environment.settings,
        "PYTHONPATH": str(ROOT),
        "LD_LIBRARY_PATH": "",
    }
    code, said = run([environment.python, DOCKER / "checks.py", "runtime"], settings)
    assert code == 1, said
    assert "no HIP runtime: PyTorch" in said and "libamdhip64.so.7" in said


@pytest.mark.parametrize(
    ("words", "settings", "said"),
    [
        (["/nowhere"], {}, "/nowhere does not exist"),
        (["."], {"ALLOW_UNKNOWN_BASE": "yes"}, "ALLOW_UNKNOWN_BASE=yes is neither"),
        (["."], {"ALLOW_UNKNOWN_RUNTIME": "2"}, "ALLOW_UNKNOWN_RUNTIME=2 is neither"),
        ([], {}, "one argument is needed"),
        (["one", "two"], {}, "one argument is needed"),
        (["."], {"PYTHON": "/no/python"}, "PYTHON=/no/python is not there"),
        ([DOCKER], {}, "has 0 wheels of vllm-rocm-memory for cp"),
        ([DOCKER / "install.sh"], {}, "has no pip"),
    ],
)
def test_refuses_words_that_it_cannot_use(tmp_path, words, settings, said):
    venv.create(tmp_path / "bare", with_pip=False)
    python = str(tmp_path / "bare" / "bin" / "python")
    known = {"PATH": str(tools(tmp_path)), "PYTHON": python, **settings}
    code, output = run([DOCKER / "install.sh", *words], known)
    assert code == 1 and said in output, output


STEPS = (
    f"-P {DOCKER}/checks.py runtime",
    "-P -m vllm_rocm_memory.cli apply --dry-run",
    "--force-reinstall",
    "-P -m vllm_rocm_memory.cli apply --json",
    f"-P {DOCKER}/checks.py outcome",
    "-P -m vllm_rocm_memory.cli status",
)


def steps(folder: Path, failing: str, **settings: str) -> tuple[int, str, list[str]]:
    """Run install.sh with a Python that does nothing but fail in one step.

    Returns:
        Its code, its words, and those of its calls that are steps.
    """
    python, calls = folder / "python", folder / "calls"
    python.write_text(
        f'#!/usr/bin/env bash\necho "$*" >> {calls}\n[[ "$*" != *"{failing}"* ]]\n'
    )
    python.chmod(0o755)
    code, said = run(
        [DOCKER / "install.sh", DOCKER / "install.sh"],
        {"PATH": str(tools(folder)), "PYTHON": str(python), **settings},
    )
    lines = calls.read_text().splitlines()
    return code, said, [line for line in lines if any(step in line for step in STEPS)]


@pytest.mark.parametrize("allowed", ["0", "1"])
def test_an_allowance_reaches_apply(tmp_path, allowed):
    code, said, taken = steps(tmp_path, "nothing", ALLOW_UNKNOWN_BASE=allowed)
    assert code == 0, said
    option = " --allow-unknown-base" if allowed == "1" else ""
    assert [line.removesuffix(option) for line in taken if "apply" in line] == [
        STEPS[1],
        STEPS[3],
    ]
    assert all(line.endswith(option) for line in taken if "apply" in line)


@pytest.mark.parametrize("number", range(len(STEPS)))
def test_no_step_is_taken_after_one_that_failed(tmp_path, number):
    """What can refuse a runtime or a vLLM comes before what installs."""
    code, _, taken = steps(tmp_path, STEPS[number])
    assert code == 1
    assert len(taken) == number + 1
    assert all(step in line for step, line in zip(STEPS, taken, strict=False))


def test_folders_of_aiter_are_opened(tmp_path):
    kernels = tmp_path / "aiter" / "jit" / "build"
    kernels.mkdir(parents=True)
    (tmp_path / "aiter" / "__init__.py").write_text("raise ImportError('no GPU')\n")
    library = kernels / "module.so"
    folders = (tmp_path / "aiter", kernels.parent, kernels)
    library.touch()
    for path in (*folders, library):
        path.chmod(0o755)
    known = {"PATH": str(tools(tmp_path)), "PYTHON": sys.executable}
    script = [DOCKER / "open_aiter.sh"]
    code, said = run(script, {**known, "PYTHONPATH": str(tmp_path)})
    assert code == 0, said
    modes = [path.stat().st_mode & 0o777 for path in (*folders, library)]
    assert modes == [0o755, 0o775, 0o775, 0o755]


def test_without_aiter_nothing_is_opened(tmp_path):
    (tmp_path / "aiter").mkdir()
    known = {"PATH": str(tools(tmp_path)), "PYTHON": sys.executable}
    script = [DOCKER / "open_aiter.sh"]
    code, said = run(script, {**known, "PYTHONPATH": str(tmp_path)})
    assert code == 0 and "has no folder jit" in said, said
    if importlib.util.find_spec("aiter") is None:
        assert run(script, known) == (0, "")
