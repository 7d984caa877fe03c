# SPDX-License-Identifier: Apache-2.0
"""What CI would run, held against the tests, the tree and the schemas.

There are two forms: `pipeline.yaml` is this repository's own, `test_areas/` with
`test-amd.yaml` is vLLM's. A step has the same label in both.
"""

import ast
import copy
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import check_jsonschema
import jsonschema
import pytest
import yaml
from partitions import Partitions

from vllm_rocm_memory.series.definition import AddBuilt, load

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
FOLDER = ROOT / ".buildkite"
SERIES = load()
PARTITIONS = Partitions.read(TESTS)

SCHEMAS = {
    "pipeline.yaml": "pipeline.schema.json",
    "test-amd.yaml": "test_amd.schema.json",
    "test_areas/basic_correctness.yaml": "test_area.schema.json",
    "test_areas/rocm_memory.yaml": "test_area.schema.json",
}
BUILDKITE = (
    Path(check_jsonschema.__file__).parent / "builtin_schemas/vendor/buildkite.json"
)
PREPARE = ". .buildkite/prepare.sh"
# A pool of the two forms -> how many GPUs it has.
GPUS = {
    **dict.fromkeys(("cpu", "cpu-small", "cpu-medium"), 0),
    **dict.fromkeys(("h200_18gb", "h200_35gb", "h200"), 1),
    **dict.fromkeys(("mi300_1", "mi355_1", "mi355_dpx"), 1),
    **dict.fromkeys(("mi300_2", "mi355_2"), 2),
    **dict.fromkeys(("mi300_4", "mi355_4"), 4),
    "mi355_8": 8,
}
# The file that pipeline.yaml does not run: it needs NVIDIA's driver, and there is no
# such queue.
NOT_ON_AMD = {"gpu/test_cuda_contract.py"}
# What would let a build pass without a step, or with one that failed.
ESCAPES = {
    "allow_dependency_failure",
    "branches",
    "if",
    "if_changed",
    "no_plugin",
    "optional",
    "skip",
    "soft_fail",
}


def read(file: str) -> Any:
    return yaml.safe_load((FOLDER / file).read_text())


@dataclass(frozen=True)
class Step:
    """A step on one pool, whichever form it is from.

    Attributes:
        commands: Without the line that prepares.
        dependencies: What starts it, in vLLM's form.
    """

    label: str
    key: str
    pool: str
    gpus: int
    minutes: int
    commands: tuple[str, ...]
    dependencies: tuple[str, ...] = ()

    @property
    def on_amd(self) -> bool:
        return self.pool.startswith("mi")

    def can_run(self, partition: str) -> bool:
        return {
            "cpu": self.gpus == 0,
            "gpu": self.gpus >= 1,
            "gpu-2": self.gpus >= 2,
            "rocm-only": self.on_amd and self.gpus >= 1,
        }[partition]

    @property
    def files(self) -> set[str]:
        """The test files that its commands collect, relative to `tests/`."""
        return {file for command in self.commands for file in collected(command)}


def named(command: str) -> tuple[list[str], str | None]:
    """The paths that a command names, and the partition that it keeps to.

    Raises:
        ValueError: It does more than that, so that this file has to learn it.
    """
    words = iter(shlex.split(command))
    if next(words) != "pytest":
        raise ValueError(f"{command!r} is no call of pytest")
    paths, partition = [], None
    for word in words:
        if word == "-m":
            partition = next(words)
            if partition not in PARTITIONS.files:
                raise ValueError(f"{command!r}: {partition!r} is no partition")
        elif word not in ("-v", "-s"):
            paths.append(word)
    if any(path.startswith("-") or "::" in path for path in paths) or not paths:
        raise ValueError(f"{command!r}: only files, folders, -v, -s and -m are read")
    return paths, partition


def collected(command: str) -> set[str]:
    if command.startswith("export "):
        return set()
    paths, partition = named(command)
    files: set[str] = set()
    for path in paths:
        found = [TESTS / path] if path.endswith(".py") else (TESTS / path).rglob("*.py")
        files |= {
            file.relative_to(TESTS).as_posix()
            for file in found
            if file.name.startswith("test_")
        }
    return {f for f in files if partition is None or PARTITIONS.of(f) == partition}


@cache
def own_steps() -> list[Step]:
    """The steps of pipeline.yaml that run tests."""
    return [
        Step(
            step["label"],
            step["key"],
            step["agents"]["queue"],
            GPUS[step["agents"]["queue"]],
            step["timeout_in_minutes"],
            tuple(step["commands"][1:]),
        )
        for step in read("pipeline.yaml")["steps"]
        if step["commands"][0] == PREPARE
    ]


@cache
def upstream_steps() -> list[Step]:
    """The steps of test_areas/, and as steps of their own their mirrors."""
    steps = []
    for file in SCHEMAS:
        for step in read(file)["steps"] if file.startswith("test_areas/") else ():
            for prefix, place in (
                ("", step),
                ("amd-", step.get("mirror", {}).get("amd")),
            ):
                if place is not None:
                    pool = place["device"]
                    steps.append(
                        Step(
                            place["label"],
                            prefix + step["key"],
                            pool,
                            place.get("num_devices") or GPUS[pool],
                            place["timeout_in_minutes"],
                            tuple(step["commands"]),
                            tuple(step["source_file_dependencies"]),
                        )
                    )
    return steps


@cache
def amd_steps() -> list[Step]:
    """The steps of test-amd.yaml, which have no keys."""
    return [
        Step(
            step["label"],
            "",
            step["agent_pool"],
            step.get("num_gpus", 1),
            step["timeout_in_minutes"],
            tuple(step["commands"]),
            tuple(step["source_file_dependencies"]),
        )
        for step in read("test-amd.yaml")["steps"]
    ]


FORMS = {
    "pipeline.yaml": own_steps,
    "test_areas": upstream_steps,
}


# --- the files ----------------------------------------------------------------------


def validator(schema: str) -> jsonschema.protocols.Validator:
    path = BUILDKITE if schema == BUILDKITE.name else FOLDER / "schema" / schema
    content = json.loads(path.read_text())
    kind = jsonschema.validators.validator_for(content)
    kind.check_schema(content)
    return kind(content)


def complaints(schema: str, content: Any) -> str:
    """One line for each, with those below an anyOf."""

    def lines(error: jsonschema.ValidationError) -> Iterator[str]:
        yield f"{error.json_path}: {error.message}"
        for below in error.context or ():
            yield from lines(below)

    errors = validator(schema).iter_errors(content)
    return "\n".join(line for error in errors for line in lines(error))


@pytest.mark.parametrize(
    ("file", "schema"), [*SCHEMAS.items(), ("pipeline.yaml", BUILDKITE.name)]
)
def test_files_are_valid(file, schema):
    assert complaints(schema, read(file)) == ""


def test_lint_validates_every_file():
    """By the same schemas; a new file without one is named here."""
    files = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.yaml")}
    assert files == set(SCHEMAS)
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    checked = set()
    for hook in config["repos"][0]["hooks"]:
        words = shlex.split(hook["entry"])
        if words[0] == ".venv/bin/check-jsonschema":
            option, schema = words[1:]
            if option == "--schemafile":
                schema = (ROOT / schema).relative_to(FOLDER / "schema").as_posix()
            else:
                assert (option, schema) == ("--builtin-schema", "vendor.buildkite")
                schema = BUILDKITE.name
            checked |= {
                (file, schema)
                for file in files
                if re.search(hook["files"], f".buildkite/{file}")
            }
    assert checked == {*SCHEMAS.items(), ("pipeline.yaml", BUILDKITE.name)}


@pytest.mark.parametrize("file", SCHEMAS)
def test_nothing_may_fail_or_be_left_out(file):
    def keys(content: Any) -> Iterator[str]:
        if isinstance(content, dict):
            yield from content
            content = list(content.values())
        if isinstance(content, list):
            for value in content:
                yield from keys(value)

    assert not ESCAPES & {*keys(read(file))}


# --- what the schemas refuse --------------------------------------------------------


def put(*path: Any) -> Callable[[Any], None]:
    """Set what the path but for its last entry names to the last."""
    *parents, key, value = path

    def change(content: Any) -> None:
        for name in parents:
            content = content[name]
        content[key] = value

    return change


def drop(*path: Any) -> Callable[[Any], None]:
    *parents, key = path

    def change(content: Any) -> None:
        for name in parents:
            content = content[name]
        del content[key]

    return change


def labelled(file: str, label: str) -> int:
    (number,) = (
        number
        for number, step in enumerate(read(file)["steps"])
        if step["label"].endswith(label)
    )
    return number


AREA = "test_areas/rocm_memory.yaml"
MIRROR = ("steps", 0, "mirror", "amd")
DIRECT = ("steps", labelled(AREA, "(MI300) ROCm Memory KV Offload"))
TP_2 = ("steps", labelled(AREA, "(H100) ROCm Memory TP 2"))
ON_CPU = ("steps", labelled(AREA, "(CPU) ROCm Memory Series"))
AMD_TP_2 = ("steps", labelled("test-amd.yaml", "(MI300) ROCm Memory TP 2"))
AMD_LAST = ("steps", labelled("test-amd.yaml", "(MI355 DPX) ROCm Memory Driver"))
OWN_CPU = ("steps", labelled("pipeline.yaml", "(CPU) ROCm Memory Series"))
OWN_GPU = ("steps", labelled("pipeline.yaml", "(MI300) ROCm Memory TP 2"))
PLUGIN = (*OWN_GPU, "plugins", 0)
OWN_DOCKER = (*PLUGIN, "docker#v5.13.0")
GROUPS, MI355 = "additional-groups", ["${MI355_RENDER_GID?}"]

REFUSED = [
    (AREA, drop("group"), r"\$: 'group' is a required"),
    (AREA, drop("depends_on"), r"\$: 'depends_on' is a required"),
    (AREA, put("owner", "me"), r"\$: .*'owner' was unexpected"),
    (AREA, put("steps", []), r"\$\.steps: "),
    (AREA, drop("steps", 0, "key"), r"steps\[0\]: 'key' is a required"),
    (AREA, put("steps", 0, "key", "CuMem"), r"steps\[0\]\.key: 'CuMem' does not"),
    (AREA, drop("steps", 0, "commands"), r"'commands' is a required"),
    (AREA, put("steps", 0, "commands", []), r"commands: \[\] should be non-empty"),
    (AREA, put("steps", 0, "commands", 1, "pytest 'gpu'"), r"commands\[1\]: "),
    (AREA, drop("steps", 0, "timeout_in_minutes"), r"'timeout_in_minutes' is a req"),
    (AREA, put("steps", 0, "timeout_in_minutes", 181), r"181 is greater than"),
    (AREA, put("steps", 0, "timeout_in_minutes", "60"), r"'60' is not of type"),
    (AREA, put("steps", 0, "soft_fail", True), r"'soft_fail' was unexpected"),
    (AREA, put("steps", 0, "optional", True), r"'optional' was unexpected"),
    (AREA, put("steps", 0, "device", "mi500_1"), r"'mi500_1' is not one of"),
    (AREA, put("steps", 0, "label", "CuMem"), r"label: 'CuMem' does not match"),
    (AREA, put("steps", 0, "dind", False), r"False schema does not allow False"),
    (AREA, put("steps", 0, "source_file_dependencies", ["/etc"]), r"'/etc' does not"),
    (AREA, put("steps", 0, "source_file_dependencies", []), r"should be non-empty"),
    (AREA, put("steps", 0, "depends_on", ["build"]), r"'build' is not one of"),
    (AREA, drop("steps", 0, "mirror"), r"'mirror' is a required"),
    (AREA, put("steps", 0, "mirror", {}), r"mirror: 'amd' is a required"),
    (AREA, put(*MIRROR, "soft_fail", True), r"amd: .*'soft_fail' was unexpected"),
    (AREA, put(*MIRROR, "commands", ["true"]), r"amd: .*'commands' was unexpected"),
    (AREA, put(*MIRROR, "dind", True), r"amd\.dind: False was expected"),
    (AREA, put(*MIRROR, "device", "h100"), r"amd\.device: 'h100' is not one of"),
    (AREA, put(*MIRROR, "device", "mi300_1"), r"amd\.label: .*MI300"),
    (AREA, put(*MIRROR, "depends_on", ["image-build"]), r"amd\.depends_on: .*contain"),
    (AREA, drop(*MIRROR, "depends_on"), r"amd: 'depends_on' is a required"),
    (AREA, drop(*MIRROR, "timeout_in_minutes"), r"amd: 'timeout_in_minutes' is a"),
    (AREA, drop(*TP_2, "mirror", "amd", "num_devices"), r"amd: 'num_devices' is a"),
    (AREA, put(*TP_2, "mirror", "amd", "num_devices", 4), r"num_devices: 2 was exp"),
    (AREA, drop(*DIRECT, "dind"), r"\]: 'dind' is a required"),
    (AREA, drop(*DIRECT, "depends_on"), r"\]: 'depends_on' is a required"),
    (AREA, put(*DIRECT, "num_devices", 2), r"num_devices: 1 was expected"),
    (AREA, put(*DIRECT, "mirror", {"amd": {}}), r"False schema does not allow \{'amd'"),
    (AREA, put(*ON_CPU, "depends_on", ["image-build"]), r"depends_on: .*contain"),
    (AREA, put(*ON_CPU, "mirror", {"amd": {}}), r"False schema does not allow \{'amd'"),
    ("test-amd.yaml", put("steps", 0, "optional", True), r"'optional' was unexpected"),
    ("test-amd.yaml", put("steps", 0, "soft_fail", True), r"'soft_fail' was unexp"),
    ("test-amd.yaml", put("steps", 0, "agent_pool", "mi400_1"), r"'mi400_1' is not"),
    ("test-amd.yaml", put("steps", 0, "agent_pool", "mi355_dpx"), r"contain"),
    ("test-amd.yaml", put("steps", 0, "mirror_hardwares", ["amdmi300"]), r"not one of"),
    ("test-amd.yaml", put("steps", 0, "dind", True), r"dind: False was expected"),
    ("test-amd.yaml", put("steps", 0, "working_dir", "/"), r"working_dir: "),
    ("test-amd.yaml", drop("steps", 0, "timeout_in_minutes"), r"is a required"),
    ("test-amd.yaml", drop(*AMD_TP_2, "num_gpus"), r"'num_gpus' is a required"),
    ("test-amd.yaml", put(*AMD_LAST, "num_gpus", 2), r"num_gpus: 1 was expected"),
    ("test-amd.yaml", put(*AMD_LAST, "label", ":amd: (MI355) X"), r"MI355 DPX"),
    ("pipeline.yaml", put(*OWN_CPU, "soft_fail", True), r"'soft_fail' was unexpected"),
    ("pipeline.yaml", put(*OWN_CPU, "skip", "flaky"), r"'skip' was unexpected"),
    ("pipeline.yaml", put(*OWN_CPU, "agents", "queue", "gpu"), r"'gpu' is not one of"),
    ("pipeline.yaml", drop(*OWN_CPU, "depends_on"), r"'depends_on' is a required"),
    ("pipeline.yaml", drop(*OWN_CPU, "artifact_paths"), r"'artifact_paths' is a req"),
    ("pipeline.yaml", put(*OWN_CPU, "commands", 0, "true"), r"commands\[0\]: "),
    ("pipeline.yaml", put(*OWN_CPU, "retry", {"automatic": True}), r"retry: "),
    ("pipeline.yaml", drop(*OWN_GPU, "env"), r"'env' is a required"),
    ("pipeline.yaml", put(*OWN_GPU, "env", "EXPECTED_GPUS", "1"), r"'2' was expected"),
    ("pipeline.yaml", drop(*OWN_CPU, "env"), r"'env' is a required"),
    ("pipeline.yaml", put(*OWN_CPU, "env", "EXPECTED_GPUS", "1"), r"'0' was expected"),
    ("pipeline.yaml", put(*OWN_DOCKER, GROUPS, MI355), r"MI300_RENDER_GID.* was exp"),
    ("pipeline.yaml", put(*OWN_DOCKER, GROUPS, ["44"]), r"\['44'\] is not one of"),
    ("pipeline.yaml", put(*OWN_CPU, "plugins", []), r"False schema does not allow"),
    ("pipeline.yaml", drop(*OWN_GPU, "plugins"), r"'plugins' is a required"),
    ("pipeline.yaml", put(*OWN_GPU, "depends_on", ["lint"]), r"depends_on: .*contain"),
    ("pipeline.yaml", put(*PLUGIN, {"docker": {}}), r"'docker' does not match any"),
    ("pipeline.yaml", put(*PLUGIN, {"docker#v5.13.0": {}}), r"'devices' is a requi"),
]


@pytest.mark.parametrize(("file", "change", "complaint"), REFUSED)
def test_schemas_refuse(file, change, complaint):
    # copied through JSON, where what an alias repeats is changed once
    content = json.loads(json.dumps(read(file)))
    before = copy.deepcopy(content)
    change(content)
    assert content != before
    assert re.search(complaint, complaints(SCHEMAS[file], content))


def test_buildkites_schema_refuses_too():
    content = read("pipeline.yaml")
    content["steps"][0]["timeout_in_minutes"] = "soon"
    assert "'soon' is not of type 'integer'" in complaints(BUILDKITE.name, content)


# --- keys and what comes before what ------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_keys_and_labels_are_unique(form):
    steps = FORMS[form]()
    assert len({step.key for step in steps}) == len(steps)
    assert len({step.label for step in steps}) == len(steps)


def test_steps_depend_on_steps_before_them():
    before: set[str] = set()
    for step in read("pipeline.yaml")["steps"]:
        assert {*step["depends_on"]} <= before, step["key"]
        assert step["key"] not in before
        before.add(step["key"])


# --- what is run --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "not_run"), [("pipeline.yaml", NOT_ON_AMD), ("test_areas", set())]
)
def test_every_test_file_is_run_where_it_can_run(form, not_run):
    runs = {
        file
        for step in FORMS[form]()
        for file in step.files
        if step.can_run(PARTITIONS.of(file) or "none")
        and not (step.on_amd and file in NOT_ON_AMD)
    }
    wanted = {(path.relative_to(TESTS).as_posix()) for path in TESTS.rglob("test_*.py")}
    assert wanted - runs == not_run


def test_files_that_amd_skips_do_so_by_their_own_mark():
    """A second one would be run by no step of pipeline.yaml, and nobody would know."""
    on_gpus = {*PARTITIONS.also_gpu, *PARTITIONS.files["gpu"]}
    skipped = {
        file
        for file in {*on_gpus, *PARTITIONS.files["gpu-2"]}
        for statement in ast.parse((TESTS / file).read_text()).body
        if re.match(r"pytestmark\b|(if .*\s*)?pytest.skip\(", ast.unparse(statement))
        and "torch.version.hip is not None" in ast.unparse(statement)
    }
    assert skipped == NOT_ON_AMD


@pytest.mark.parametrize("form", FORMS)
def test_files_that_start_engines_have_a_process_each(form):
    for step in FORMS[form]():
        for command in step.commands:
            files = {PARTITIONS.of(file) for file in collected(command)}
            assert files <= {"cpu"} or len(collected(command)) == 1, command


def test_a_command_that_is_not_understood_is_refused():
    for command in (
        "python -m pytest gpu",
        "pytest -v",
        "pytest -k sleep gpu",
        "pytest -m slow gpu",
        "pytest gpu/test_cumem.py::test_x",
    ):
        with pytest.raises(ValueError, match=re.escape(repr(command))):
            named(command)


def test_both_forms_run_the_same():
    """The same commands on the same pools, in the same time, by the same names."""
    upstream = {
        (step.label, step.key, step.gpus, step.minutes, step.commands)
        for step in upstream_steps()
        if not step.label.startswith(":nvidia:")
    }
    own = {
        (step.label, step.key, step.gpus, step.minutes, step.commands)
        for step in own_steps()
    }
    assert own == upstream
    pools = {step.label: step.pool for step in own_steps() if step.on_amd}
    assert pools == {step.label: step.pool for step in upstream_steps() if step.on_amd}


def test_amd_pipeline_runs_the_mirrors():
    def rows(steps: list[Step]) -> list[tuple[Any, ...]]:
        return sorted(
            (s.label, s.pool, s.gpus, s.minutes, s.commands, s.dependencies)
            for s in steps
            if s.on_amd
        )

    assert rows(amd_steps()) == rows(upstream_steps())


def test_pools_have_what_was_asked_for():
    """cuMem on MI355, sleep on MI300, offload and the runtime on both, TP 2."""
    pools: dict[str, set[str]] = {}
    for step in own_steps():
        for file in step.files if step.on_amd else ():
            pools.setdefault(file, set()).add(step.pool)
    both = {"mi300_1", "mi355_dpx"}
    for file, wanted in {
        "basic_correctness/memory/cumem/test_cumem_pools.py": {"mi355_dpx"},
        "basic_correctness/memory/sleep_mode/test_sleep_graphs.py": {"mi300_1"},
        "gpu/test_cumem.py": {"mi355_dpx"},
        "gpu/test_sleep_engine.py": {"mi300_1"},
        "gpu/test_kv_offload.py": both,
        "gpu/test_offload_engine.py": both,
        "gpu/test_hip_contract.py": both,
        "gpu/test_all_reduce.py": {"mi300_2"},
    }.items():
        assert pools[file] == wanted, file


def test_gpus_of_the_cpu_partition_are_used():
    """What uses a GPU where there is one runs on one, in both forms."""
    for steps in FORMS.values():
        on_gpus = {file for step in steps() if step.gpus for file in step.files}
        assert {*PARTITIONS.also_gpu} <= on_gpus


# --- paths --------------------------------------------------------------------------


def covers(dependency: str, path: str) -> bool:
    return f"{path}/".startswith(f"{dependency.removesuffix('/')}/")


@pytest.mark.parametrize("step", [*upstream_steps(), *amd_steps()], ids=str)
def test_paths_exist(step):
    """In this tree, or in vLLM's as a file that the series edits."""
    edited = {file for patch in SERIES.patches for file in patch.files}
    for path in step.dependencies:
        here = ROOT / path
        assert here.is_dir() if path.endswith("/") else here.is_file() or path in edited
    for command in step.commands:
        for path in [] if command.startswith("export ") else named(command)[0]:
            assert (TESTS / path).exists(), command


@pytest.mark.parametrize("step", upstream_steps(), ids=str)
def test_a_changed_test_starts_its_step(step):
    for file in {*step.files, "conftest.py", "partitions.toml"}:
        assert any(covers(path, f"tests/{file}") for path in step.dependencies), file


def test_a_changed_file_of_the_series_starts_a_gpu():
    started = [path for step in amd_steps() for path in step.dependencies]
    for patch in SERIES.patches:
        for step in patch.steps:
            ours = step.sources if isinstance(step, AddBuilt) else (step.file,)
            for file in ours:
                if (ROOT / file).exists():
                    assert any(covers(path, file) for path in started), file


def test_artifacts_lie_where_git_does_not_look():
    """What a step leaves there is no change of the checkout."""
    ignored = (ROOT / ".gitignore").read_text().split()
    for step in read("pipeline.yaml")["steps"]:
        for pattern in step.get("artifact_paths", ()):
            assert f"/{pattern.split('/')[0]}/" in ignored


def test_the_image_that_is_built_is_the_one_that_is_run():
    steps = {step["key"]: step for step in read("pipeline.yaml")["steps"]}
    build, push = map(shlex.split, steps["image-build-amd"]["commands"])
    image = build[build.index("--tag") + 1]
    assert push == ["docker", "push", image]
    run = {p["image"] for s in steps.values() for p in _dockers(s)}
    assert run == {image}
    dockerfile = ROOT / build[build.index("--file") + 1]
    stage = build[build.index("--target") + 1]
    assert re.search(rf"(?im)^FROM .+ AS {stage}$", dockerfile.read_text())
    assert build[-1] == "."


def _dockers(step: Any) -> list[Any]:
    return [value for plugin in step.get("plugins", ()) for value in plugin.values()]


def test_targets_of_make_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    called = [
        command.split()[1]
        for step in read("pipeline.yaml")["steps"]
        for command in step["commands"]
        if command.startswith("make ")
    ]
    assert called and {*called} <= {*targets}


# --- prepare.sh ---------------------------------------------------------------------


# The driver counts eight GPUs, whatever the runtime may open.
TORCH = """
__version__ = "2.13.0"
class version:
    cuda, hip = {cuda!r}, {hip!r}
class cuda:
    is_available = lambda: {gpus} > 0
    device_count = lambda: 8
class _C:
    _cuda_getDeviceCount = lambda: {gpus}
"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout with prepare.sh, and a set-up and a pytest that do next to nothing."""
    (tmp_path / ".buildkite").mkdir()
    (tmp_path / "tests").mkdir()
    script = tmp_path / ".buildkite" / "prepare.sh"
    script.write_text((FOLDER / "prepare.sh").read_text())
    (tmp_path / "Makefile").write_text(
        "setup setup-test-gpu:\n\ttest ! -e broken\n\techo $@ > made\n"
        "\tmkdir -p .venv/bin\n\tcp python .venv/bin\n"
    )
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "partitions.py", tmp_path / "tools")
    (tmp_path / "torch.py").write_text(TORCH.format(cuda=None, hip="7.2", gpus=1))
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -m ] || exec {sys.executable} "$@"\n'
        'echo "$PWD $*"\necho x > "${3#--junitxml=}"\nexit "$4"\n'
    )
    python.chmod(0o755)
    return tmp_path


def run(
    checkout: Path, *commands: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """As the agent does: one shell, with -e, over all lines."""
    return subprocess.run(
        ["bash", "-e", "-c", "\n".join(commands)],
        cwd=checkout,
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": "/nowhere",
            "BUILDKITE_STEP_KEY": "some-step",
            "EXPECTED_GPUS": "0",
            "TMPDIR": str(checkout),
            "PYTHONPATH": str(checkout),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_every_command_of_a_step_runs_and_reports(checkout):
    (checkout / "build" / "reports").mkdir(parents=True)
    (checkout / "build" / "reports" / "of-another-build.xml").touch()
    result = run(checkout, PREPARE, "pytest 0 a", "pytest 1 b", "pytest 0 c")
    assert result.returncode == 1
    lines = [line for line in result.stdout.splitlines() if "junitxml" in line]
    assert [line.split()[-1] for line in lines] == ["a", "b", "c"]
    assert {line.split()[0] for line in lines} == {str(checkout / "tests")}
    (reports,) = {
        pattern
        for step in read("pipeline.yaml")["steps"]
        if step["commands"][0] == PREPARE
        for pattern in step["artifact_paths"]
    }
    assert sorted(path.name for path in checkout.glob(reports)) == [
        f"some-step-{number}.xml" for number in (1, 2, 3)
    ]


def test_a_step_succeeds_when_all_of_it_did(checkout):
    result = run(checkout, PREPARE, "pytest 0 a", 'test -w "$HOME"', "echo $USER")
    assert (result.returncode, result.stdout.split()[-1]) == (0, "ci")


@pytest.mark.parametrize("command", ["pytest 5 a", "(exit 5)"])
def test_a_step_ends_as_what_failed(checkout, command):
    assert run(checkout, PREPARE, command).returncode == 5


def test_nothing_runs_after_a_set_up_that_failed(checkout):
    (checkout / "broken").touch()
    result = run(checkout, PREPARE, "pytest 0 a")
    assert result.returncode != 0
    assert "junitxml" not in result.stdout


@pytest.mark.parametrize(("gpus", "target"), [("0", "setup"), ("1", "setup-test-gpu")])
def test_a_step_is_set_up_for_what_it_runs(checkout, gpus, target):
    run(checkout, PREPARE, "pytest 0 a", EXPECTED_GPUS=gpus)
    assert (checkout / "made").read_text() == f"{target}\n"


@pytest.mark.parametrize("gpus", ["", "all", "-1"])
def test_a_step_says_how_many_gpus_it_needs(checkout, gpus):
    result = run(checkout, PREPARE, "pytest 0 a", EXPECTED_GPUS=gpus)
    assert result.returncode == 1
    assert f"EXPECTED_GPUS={gpus} is no number of GPUs" in result.stderr
    assert result.stdout == "" and not (checkout / "made").exists()


@pytest.mark.parametrize(
    ("built", "gpus", "lacks"),
    [
        ({"hip": "7.2"}, 2, None),
        ({"hip": "7.2"}, 1, "needs 2 GPUs: PyTorch 2.13.0 sees 1"),
        ({"hip": "7.2"}, 0, "needs an AMD GPU: PyTorch 2.13.0 sees none"),
        ({"cuda": "13.0"}, 2, "needs ROCm: PyTorch 2.13.0 is built for CUDA 13.0"),
    ],
)
def test_a_gpu_that_is_missing_fails_its_step(checkout, built, gpus, lacks):
    """Where PyTorch sees none every test is skipped, which would look like success."""
    built = {"cuda": None, "hip": None, **built}
    (checkout / "torch.py").write_text(TORCH.format(**built, gpus=gpus))
    result = run(checkout, PREPARE, "pytest 0 a", EXPECTED_GPUS="2")
    assert result.returncode == (1 if lacks else 0)
    assert ("junitxml" in result.stdout) == (not lacks)
    assert not lacks or f"this step {lacks}. docs/ci.md says" in result.stderr
