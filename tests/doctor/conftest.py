# SPDX-License-Identifier: Apache-2.0
"""Machines to look at: files below a folder, a small vLLM, facts that are given."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from vllm_rocm_memory import cli
from vllm_rocm_memory.doctor import run
from vllm_rocm_memory.doctor.facts import RuntimeFacts, ServingFacts
from vllm_rocm_memory.doctor.machine import NO_ARGUMENTS, Machine
from vllm_rocm_memory.series import operations, verification
from vllm_rocm_memory.series.bases import measure
from vllm_rocm_memory.series.definition import Series, load
from vllm_rocm_memory.series.target import Target

Write = Callable[[str, str], Path]
MakeMachine = Callable[..., Machine]

SERIES = """
[[patch]]
name = "louder"
title = "Shout louder"
why = "Nobody hears it."
how = "An exclamation mark."
upstream = ["https://github.com/vllm-project/vllm"]
drop-when = "upstream shouts."
upstream-has = [{ file = "vllm/owned.py", defines = "shout_louder" }]

[[patch.step]]
kind = "replace"
file = "vllm/owned.py"

[[patch]]
name = "extra"
title = "Say more"
why = "It is too short."
how = "Another file."
upstream = ["https://github.com/vllm-project/vllm"]
drop-when = "upstream says more."
upstream-has = [{ file = "vllm/owned.py", defines = "say_more" }]

[[patch.step]]
kind = "add"
file = "vllm/extra.py"
"""

VLLM = {
    "vllm/__init__.py": "",
    "vllm/envs.py": "",
    "vllm/_version.py": "__version__ = version = '0.32.0'\n",
    "vllm/owned.py": "def shout(word):\n    return word.upper()\n",
}

OURS = {
    "vllm/owned.py": "def shout(word):\n    return word.upper() + '!'\n",
    "vllm/extra.py": "EXTRA = True\n",
}


# What the checks themselves take from the series.
TAKEN = (
    "vllm/device_allocator/host_capacity.py",
    "vllm/distributed/device_communicators/aiter_capture_fence.py",
)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file of the machine, such as ``proc/self/limits``."""

    def write(path: str, text: str) -> Path:
        file = tmp_path / "root" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    return write


@pytest.fixture
def machine(tmp_path: Path) -> MakeMachine:
    """A machine of which nothing is known but what the test says.

    `serving` and `runtime` are the facts, or why there are none; `import_problem` is
    why the target cannot be imported.
    """

    def make(
        serving: ServingFacts | str = NO_ARGUMENTS,
        runtime: RuntimeFacts | str = "nobody asked",
        import_problem: str | None = None,
        **attributes: Any,
    ) -> Machine:
        defaults: dict[str, Any] = {"root": tmp_path / "root", "environment": {}}
        given = answers(serving, runtime, import_problem)
        return Machine(**{**defaults, **given, **attributes})

    return make


def answers(
    serving: ServingFacts | str = NO_ARGUMENTS,
    runtime: RuntimeFacts | str = "nobody asked",
    import_problem: str | None = None,
) -> dict[str, Any]:
    """Probes that have these answers, as a machine takes them."""
    return {
        "probe_runtime": lambda machine: lambda: runtime,
        "probe_serving": lambda machine: lambda: serving,
        "probe_import": lambda machine: lambda: import_problem,
    }


@dataclass
class SmallVllm:
    """A small vLLM, and a series of two patches that knows it as 0.32.0."""

    root: Path
    series: Series

    @property
    def target(self) -> Target:
        return Target.find(self.root)

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def apply(self, *only: str, allow_unknown_base: bool = False) -> None:
        operations.apply(
            self.target, self.series, only, allow_unknown_base=allow_unknown_base
        )


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallVllm:
    monkeypatch.setattr(verification, "import_failures", lambda target, modules: {})
    folder = tmp_path / "series"
    ours = load().files
    taken = {path: (ours / path).read_text() for path in TAKEN}
    trees = ((tmp_path / "site", VLLM), (folder / "files", {**OURS, **taken}))
    for root, files in trees:
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
    (folder / "series.toml").write_text(SERIES)
    (folder / "bases.json").write_text("{}")
    made = load(folder / "series.toml", folder / "files")
    root = tmp_path / "site"
    bases = {"0.32.0": measure(made, Target.find(root)), "0.33.0": {}}
    return SmallVllm(root, replace(made, bases=bases))


@dataclass
class Answer:
    """What the command said and how it ended."""

    code: int
    output: str
    error: str

    @property
    def json(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.output)
        return answer

    def check(self, name: str) -> dict[str, Any]:
        (check,) = (each for each in self.json["checks"] if each["name"] == name)
        return check


@pytest.fixture
def doctor(
    small: SmallVllm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., Answer]:
    """Call the command as users do, on a machine of which the test says all."""
    monkeypatch.setattr(cli, "load", lambda: small.series)

    def call(
        *words: str,
        serving: ServingFacts | str = NO_ARGUMENTS,
        runtime: RuntimeFacts | str = "nobody asked",
        import_problem: str | None = None,
        **attributes: Any,
    ) -> Answer:
        probes = answers(serving, runtime, import_problem)

        def made(**given: Any) -> Machine:
            root = tmp_path / "root"
            return Machine(**{**given, "root": root, **probes, **attributes})

        monkeypatch.setattr(run, "Machine", made)
        with pytest.raises(SystemExit) as ended:
            cli.main(["doctor", *words])
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Answer(ended.value.code, captured.out, captured.err)

    return call
