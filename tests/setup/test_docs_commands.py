# SPDX-License-Identifier: Apache-2.0
"""Every command in the documents is exercised: docs_commands.toml says how.

Commands are the lines of shell fences, and inline code that begins with one of
`PROGRAMS`. Those of a served engine are run by `sim/test_serve.py`.
"""

import argparse
import ast
import importlib
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from vllm_rocm_memory import serve

from .. import documented_commands

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
TABLE = Path(__file__).with_name("docs_commands.toml")
DOCUMENTS = (
    *("README.md", "CONTRIBUTING.md", "docker/README.md"),
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
)
PROGRAMS = ("make", "vllm-rocm-memory", "curl", "python", "python3", "pip", "docker")
SHELL = ("", "bash", "shell", "console")

Command = dict[str, Any]

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_ASSIGNMENT = re.compile(r"^(?:[A-Z_]+=\S* )+")


def fences(document: str, languages: tuple[str, ...]) -> list[str]:
    text = (ROOT / document).read_text()
    return [
        textwrap.dedent(fence[3])
        for fence in _FENCE.finditer(text)
        if fence[2] in languages
    ]


def lines_of(block: str) -> list[str]:
    """Its commands: continued and quoted lines are one, comments are none."""
    found, pending = [], ""
    for line in block.splitlines():
        pending = f"{pending} {line.strip()}".strip()
        if pending.endswith("\\"):
            pending = pending[:-1].rstrip()
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quotation that goes on
            continue
        if words:
            found.append(_without_comment(pending).removeprefix(".venv/bin/"))
        pending = ""
    assert not pending, f"unfinished: {pending}"
    return found


def _without_comment(line: str) -> str:
    match = re.match(r"""((?:'[^']*'|"[^"]*"|\\.|[^'"\\])*?)(?:(?:^| +)#|$)""", line)
    assert match is not None
    return " ".join(match[1].split())


def inline_commands(document: str) -> Iterator[str]:
    prose = _FENCE.sub("", (ROOT / document).read_text())
    for code in _INLINE.finditer(prose):
        text = " ".join(code[2].split())
        program = _ASSIGNMENT.sub("", text).split(" ")[0]
        # a name alone is that of the program, and make's also a command
        if program in PROGRAMS and (program != text or text == "make"):
            yield text


@cache
def commands_in_documents() -> dict[str, str]:
    """Each with a document that has it."""
    found: dict[str, str] = {}
    for document in DOCUMENTS:
        for block in fences(document, SHELL):
            for line in lines_of(block):
                found.setdefault(line, document)
        for line in inline_commands(document):
            found.setdefault(line, document)
    return found


@cache
def table() -> dict[str, list[Command]]:
    return tomllib.loads(TABLE.read_text())


def is_elsewhere(line: str) -> bool:
    return any(
        line in entry.get("lines", ()) or line.split()[0] in entry.get("programs", ())
        for entry in table()["elsewhere"]
    )


def lines_in_table() -> list[str]:
    entries = [entry for kind in table().values() for entry in kind]
    return [
        *(entry["line"].strip() for entry in entries if "line" in entry),
        *(line for entry in entries for line in entry.get("also", ())),
        *(line for entry in entries for line in entry.get("lines", ())),
    ]


def test_every_command_is_in_the_table_and_no_other():
    found = commands_in_documents()
    listed = lines_in_table()
    missing = {
        line: where
        for line, where in found.items()
        if line not in listed and not is_elsewhere(line)
    }
    assert missing == {}, "say in docs_commands.toml how they are exercised"
    assert [line for line in listed if line not in found] == [], "in no document"
    assert len(listed) == len({*listed}), "twice in docs_commands.toml"


def test_what_is_not_run_says_why():
    for entry in [*table()["parsed"], *table()["elsewhere"]]:
        assert len(entry["why"].split()) >= 3


# --- commands that another test runs --------------------------------------------------


@cache
def parts_of(file: str) -> dict[str, ast.stmt]:
    """The functions, classes and constants of a test file, by name."""
    parts: dict[str, ast.stmt] = {}
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            parts[node.name] = node
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            for name in ast.walk(target):
                if isinstance(name, ast.Name):
                    parts[name.id] = node
    return parts


@cache
def words_of(file: str, test: str) -> str:
    """The texts and names of a test, its fixtures, helpers and constants."""
    parts = parts_of(file)
    words: list[str] = []
    seen, waiting = set(), [test]
    while waiting:
        if (name := waiting.pop()) in seen or name not in parts:
            continue
        seen.add(name)
        for node in ast.walk(parts[name]):
            match node:
                case ast.Name(id=used) | ast.arg(arg=used):
                    # the fixture of what a file's `begin` has started
                    waiting.append("begin" if used == "begun" else used)
                case ast.Constant(value=str(text)):
                    words.append(text)
                case ast.Attribute(attr=text):
                    words.append(text)
    return "\n".join(words)


def lacks(line: str, entry: Command, test: str) -> list[str]:
    """Words of a line that a test does not use: those of its entry, and all options."""
    options = re.findall(r"(?<=\s)--[a-z][\w-]*", line)
    said = words_of(entry["test"].partition("::")[0], test)
    run = "".join((ROOT / path).read_text() for path in entry.get("runs", ()))
    return [
        *(word for word in entry["words"] if word not in said),
        *(option for option in options if option not in said + run),
    ]


def lines_tested() -> list[tuple[str, Command]]:
    return [(line, entry) for entry in table()["tested"] for line in entry["lines"]]


@pytest.mark.parametrize(("line", "entry"), lines_tested())
def test_the_test_that_is_named_uses_its_words(line, entry):
    file, _, test = entry["test"].partition("::")
    assert test.startswith("test_") and test in parts_of(file)
    assert entry["words"] and lacks(line, entry, test) == []


def test_tests_that_do_not_run_a_command_are_told_apart():
    others = refused = 0
    for line, entry in lines_tested():
        file, _, test = entry["test"].partition("::")
        for other in parts_of(file):
            if other.startswith("test_") and other != test:
                others += 1
                refused += bool(lacks(line, entry, other))
    assert others > 100 and refused > 0.9 * others, (refused, others)


def is_make(line: str) -> bool:
    return _ASSIGNMENT.sub("", line).split()[0] == "make"


# --- commands that are read by their program ------------------------------------------


class Read(Exception):
    """A program has read its arguments: its work would begin here."""


def run_by(line: str) -> list[str]:
    """The program of a line and its arguments: for make, what it would run."""
    if is_make(line):
        said = subprocess.check_output(
            ["sh", "-c", line.replace("make ", "make --dry-run ", 1)],
            cwd=ROOT,
            env=environment(),
            text=True,
        )
        line = said.splitlines()[-1]
    words = shlex.split(line.removeprefix("exec "))
    program = next(i for i, word in enumerate(words) if word.endswith("python"))
    return words[program + 1 :]


def read_by_pytest(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("-k", default="")
    parser.add_argument("paths", nargs="+", type=Path)
    chosen = parser.parse_args(arguments)
    files = [file for path in chosen.paths for file in (ROOT / path).rglob("test_*.py")]
    tests = re.findall(r"^def (test_\w+)", "".join(map(Path.read_text, files)), re.M)
    assert [name for name in tests if chosen.k in name]


def planned(arguments: list[str], variables: dict[str, str]) -> None:
    """The arguments of `vllm serve` have the user's model and options."""
    extra = arguments[1:] if arguments[:1] == ["--"] else arguments
    # A model that is named is not written.
    variables = variables or {"MODEL": "some/model"}
    plan = serve.make_plan({**os.environ, **variables}, extra)
    assert extra == [] or plan.arguments[-len(extra) :] == extra
    assert all(name in plan.command for name in variables.values())


@pytest.mark.parametrize("line", [x for e in table()["parsed"] for x in e["lines"]])
def test_its_words_are_read_by_the_program(line, monkeypatch, tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    program, *arguments = run_by(line.replace("DIR", str(tmp_path)))
    if program == "-m" and arguments[0] == "pytest":
        return read_by_pytest(arguments[1:])
    if program == "-m" and arguments[0] == "vllm_rocm_memory.serve":
        return planned(arguments[1:], dict(re.findall(r"\b(MODEL)=(\S+)", line)))
    read = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, args: object = None) -> object:
        raise Read(read(parser, args))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    with pytest.raises(Read):
        importlib.import_module(Path(program).stem).main()
    named = [word for word in arguments if word.startswith("requirements/")]
    assert all((ROOT / name).is_file() for name in named)
    return None


# --- commands of CI -------------------------------------------------------------------


@pytest.mark.parametrize("line", [line for e in table()["ci"] for line in e["lines"]])
def test_ci_runs_it(line):
    steps = (ROOT / ".ci" / "run").read_text().splitlines()
    wanted = shlex.split(line)

    def has(step: str) -> bool:
        words = shlex.split(step, comments=True)
        return words[:2] == wanted[:2] and all(
            any(word.startswith(each) for word in words) for each in wanted[2:]
        )

    assert any(map(has, steps))


# --- commands for Docker --------------------------------------------------------------


def docker_builds() -> list[list[str]]:
    lines = [
        line for line in commands_in_documents() if line.startswith("docker build ")
    ]
    return [shlex.split(line) for line in lines]


def test_docker_builds_name_what_is_there():
    assert len(docker_builds()) >= 5
    for words in docker_builds():
        name = words[words.index("-f") + 1]
        if "vllm-openai" in words:  # a build in vLLM's own checkout
            continue
        dockerfile = (ROOT / name).read_text()
        for option, value in itertools.pairwise(words):
            if option == "--build-arg":
                argument = value.partition("=")[0]
                assert re.search(rf"^ARG {argument}\b", dockerfile, re.M), value
            if option == "--build-context" and value.startswith("wheelhouse"):
                assert "wheelhouse" in dockerfile
            if option == "--secret":
                assert "id=pip_conf" in value and "id=pip_conf" in dockerfile


# --- commands that are run here -------------------------------------------------------


def environment(**variables: str) -> dict[str, str]:
    """This process's, without what its user has chosen."""
    chosen = ("MODEL", "PORT", "ARGS", "HIPSIM_PROFILE", "MAKEFLAGS", "MAKELEVEL")
    kept = {name: value for name, value in os.environ.items() if name not in chosen}
    return {**kept, "COLUMNS": "160", **variables}


def with_programs() -> dict[str, str]:
    """The path on which pip and vllm-rocm-memory are those of this environment."""
    return {"PATH": os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)])}


def shell(command: str, folder: Path, **variables: str) -> tuple[int, str]:
    return documented_commands.run(
        command, folder, environment(**variables), seconds=240
    )


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    clean = tmp_path_factory.mktemp("clean")
    shutil.copy(ROOT / "Makefile", clean)
    for made in ("build", ".venv"):
        (clean / made).mkdir()
    scratch = tmp_path_factory.mktemp("scratch")
    return {"checkout": ROOT, "clean": clean, "scratch": scratch}


def sample(document: str) -> list[str]:
    """Lines of output that it shows first, as far as `...` and without counts."""
    lines = fences(document, ("text",))[0].splitlines()
    return [line.partition(" ...")[0] for line in lines if "checks: " not in line]


def runs(place: str) -> list[Command]:
    return [entry for entry in table()["run"] if entry["place"] == place]


def test_every_place_is_one():
    places = {entry["place"] for entry in table()["run"]}
    assert places == {"checkout", "clean", "scratch"}


@pytest.mark.parametrize(
    "entry",
    [*runs("checkout"), *runs("clean"), *runs("scratch")],
    ids=lambda entry: entry["line"],
)
def test_it_runs(entry, places):
    folder, command = places[entry["place"]], entry.get("command", entry["line"])
    variables = {} if is_make(command) else with_programs()
    code, output = shell(command, folder, **variables)
    documented_commands.check(entry, code, output)
    if "sample" in entry:
        for line in sample(entry["sample"]):
            assert line in output
    if entry["place"] == "clean":
        assert [path.name for path in folder.iterdir()] == ["Makefile"]


# --- Python in the documents ----------------------------------------------------------


def python_blocks() -> list[tuple[str, str]]:
    return [(name, block) for name in DOCUMENTS for block in fences(name, ("python",))]


@pytest.mark.parametrize(("document", "block"), python_blocks(), ids=lambda t: t[:16])
def test_python_compiles(document, block):
    compile(block, document, "exec")


def test_the_simulators_example_runs(tmp_path):
    """With calls where the example has dots: what it asks of the simulator happens."""
    (example,) = fences("docs/hipsim.md", ("python",))
    before, dots, after = example.partition("...\n")
    assert dots
    work = """\
import ctypes
SIZE = 1 << 20
device, host = ctypes.c_void_p(), ctypes.c_void_p()
assert hip.hipMalloc(ctypes.byref(device), SIZE) == 0
assert hip.hipHostMalloc(ctypes.byref(host), SIZE, 0) == 0
assert hip.hipMemcpy(device, host, SIZE, 1) == 0
"""
    end = """\
assert hip.hipFree(device) == 0 and hip.hipHostFree(host) == 0
"""
    copies, clean = after.split("hipsim.assert_clean()")
    program = [before, work, f"print({copies.split('#')[0].strip()}.bytes)", end]
    program.append(f"hipsim.assert_clean(){clean}")
    script = tmp_path / "example.py"
    script.write_text("\n".join(program))
    code, output = shell(f"{shlex.quote(sys.executable)} example.py", tmp_path)
    assert (code, output) == (0, f"{1 << 20}\n")


def test_fences_are_split_into_commands():
    block = (
        "make a   # why\n\n# all of it\nmake b ARGS='x # y'\n"
        "docker build \\\n    --arg 1 .\nbash -c 'one\ntwo'\n"
    )
    assert lines_of(block) == [
        *("make a", "make b ARGS='x # y'", "docker build --arg 1 ."),
        "bash -c 'one two'",
    ]
