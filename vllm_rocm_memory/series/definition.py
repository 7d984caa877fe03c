# SPDX-License-Identifier: Apache-2.0
"""What a series is: `series.toml`, read and checked."""

import ast
import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path, PurePosixPath
from typing import Any

from vllm_rocm_memory.series import SeriesError

DEFINITION = Path(__file__).with_name("series.toml")
# Where the build puts compiled modules: setup.py's CMakeBuild.
NATIVE = Path(__file__).parents[1] / "_native"
# The import system tries it before .abi3.so, so that a module of ours wins over one
# of upstream's beside it.
EXTENSION_SUFFIX = EXTENSION_SUFFIXES[0]
# Above this many edited functions and classes a file is easier to own than to edit.
MAX_EDITED_PLACES = 3


@dataclass(frozen=True)
class Add:
    """A file that upstream does not have."""

    file: str


@dataclass(frozen=True)
class AddBuilt:
    """A compiled module that upstream does not have under this file name.

    Attributes:
        module: its path in the target without a suffix, such as ``vllm/name``.
        sources: where its source lies in the project.
    """

    module: str
    sources: tuple[str, ...]

    @property
    def file(self) -> str:
        """Its path in the target, for the Python that runs us."""
        return f"{self.module}{EXTENSION_SUFFIX}"


@dataclass(frozen=True)
class Replace:
    """A file of upstream's that we own whole."""

    file: str


@dataclass(frozen=True)
class Edit:
    """One change inside one function; see `edits.edit`."""

    file: str
    function: str
    operation: str
    text: str
    anchor: str | None = None
    imports: tuple[str, ...] = ()
    unless: str | None = None


@dataclass(frozen=True)
class AddBase:
    """One more base of one class; see `edits.add_base`.

    Written as an edit too, with ``class`` for the function.
    """

    file: str
    class_name: str
    base: str
    imports: tuple[str, ...] = ()


@dataclass(frozen=True)
class Register:
    """An entry in a module-level mapping, a set inside a function, or both.

    Attributes:
        mapping: name of the mapping; gets ``key: value``.
        set: ``function.variable`` of the set; gets ``key``.
        comment: stands above the entry of the mapping, without ``#``.
    """

    file: str
    key: str
    mapping: str | None = None
    value: str | None = None
    set: str | None = None
    comment: str | None = None


Step = Add | AddBuilt | Replace | Edit | AddBase | Register


@dataclass(frozen=True)
class Evidence:
    """A name whose presence in a file tells that upstream has our patch."""

    file: str
    defines: str


@dataclass(frozen=True)
class Patch:
    name: str
    title: str
    why: str
    how: str
    upstream: tuple[str, ...]
    drop_when: str
    upstream_has: tuple[Evidence, ...]
    steps: tuple[Step, ...]
    # Patches before this one whose files it uses.
    needs: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """The files that the steps touch, each once, in order."""
        return tuple(dict.fromkeys(step.file for step in self.steps))

    @property
    def built(self) -> tuple[AddBuilt, ...]:
        """The compiled modules that it adds."""
        return tuple(step for step in self.steps if isinstance(step, AddBuilt))


@dataclass(frozen=True)
class Series:
    """The ordered patches, the folder with our files, and the known bases.

    Attributes:
        files: the folder that holds our ``vllm/``.
        bases: version -> path -> sha256 of upstream's file.
        native: the folder that holds our compiled modules.
    """

    patches: tuple[Patch, ...]
    files: Path
    bases: Mapping[str, Mapping[str, str]]
    native: Path = NATIVE

    @cached_property
    def _added(self) -> frozenset[str]:
        return frozenset(
            step.file
            for patch in self.patches
            for step in patch.steps
            if isinstance(step, Add | AddBuilt)
        )

    def upstream_files(self, patch: Patch) -> tuple[str, ...]:
        """Files of upstream's that `patch` touches: they identify its base."""
        return tuple(file for file in patch.files if file not in self._added)

    def content(self, step: Add | AddBuilt | Replace) -> bytes:
        """Our content of an added or replaced file.

        Raises:
            SeriesError: a compiled module was not built for this Python.
        """
        if not isinstance(step, AddBuilt):
            return (self.files / step.file).read_bytes()
        built = self.native / PurePosixPath(step.file).name
        try:
            return built.read_bytes()
        except FileNotFoundError as error:
            raise SeriesError(
                f"{built} was not built: run `make setup` in a checkout, or install "
                "vllm-rocm-memory again with the Python that runs vLLM"
            ) from error

    def fingerprint(self, patch: Patch) -> str:
        """Changes whenever what `patch` does to a given base changes."""
        digest = hashlib.sha256(repr(patch.steps).encode())
        for step in patch.steps:
            if isinstance(step, Add | AddBuilt | Replace):
                digest.update(hashlib.sha256(self.content(step)).digest())
        return digest.hexdigest()

    def select(self, names: Iterable[str]) -> tuple[Patch, ...]:
        """The patches of these names in series order; all of them for no name."""
        asked = set(names)
        unknown = sorted(asked - {patch.name for patch in self.patches})
        if unknown:
            raise SeriesError(
                f"--only {unknown[0]}: no such patch; the series has "
                f"{', '.join(patch.name for patch in self.patches)}"
            )
        return tuple(p for p in self.patches if not asked or p.name in asked)


def files_folder() -> Path:
    """The folder that holds the series' ``vllm/``: package data or the checkout."""
    data = DEFINITION.with_name("files")
    checkout = DEFINITION.parents[2]
    if (data / "vllm").is_dir():
        return data
    # site-packages has a vllm/ beside us too: the target, not the series.
    if (checkout / "pyproject.toml").is_file() and (checkout / "vllm").is_dir():
        return checkout
    raise SeriesError(
        f"the files of the series are neither in {data} nor in a checkout of the "
        "project: reinstall vllm-rocm-memory"
    )


def load(
    definition: Path = DEFINITION, files: Path | None = None, native: Path = NATIVE
) -> Series:
    """Read and check a series.

    Args:
        definition: the ``series.toml``; ``bases.json`` lies beside it.
        files: the folder that holds our ``vllm/``; found if not given.
        native: the folder that holds our compiled modules.

    Raises:
        SeriesError: naming every patch and field that is wrong.
    """
    files = files_folder() if files is None else files
    try:
        entries = tomllib.loads(definition.read_text())
        bases = json.loads(definition.with_name("bases.json").read_text())
    except (OSError, ValueError) as error:
        raise SeriesError(f"{definition} cannot be read: {error}") from error
    problems = list(_problems(entries, files))
    if problems:
        raise SeriesError(f"{definition.name}: {'; '.join(problems)}")
    patches = tuple(_patch(entry) for entry in entries["patch"])
    return Series(patches, files, bases, native)


def _patch(entry: dict[str, Any]) -> Patch:
    return Patch(
        name=entry["name"],
        title=entry["title"],
        why=entry["why"].strip(),
        how=entry["how"].strip(),
        upstream=tuple(entry["upstream"]),
        drop_when=entry["drop-when"].strip(),
        upstream_has=tuple(Evidence(**item) for item in entry["upstream-has"]),
        steps=tuple(_step(dict(item)) for item in entry["step"]),
        needs=tuple(entry.get("needs", ())),
    )


def _step(item: dict[str, Any]) -> Step:
    kind: Callable[..., Step] = _KINDS[item.pop("kind")]
    if "imports" in item:
        item["imports"] = tuple(item["imports"])
    if "built" in item:
        return AddBuilt(item["built"], tuple(item["sources"]))
    if "class" in item:
        imports = item.get("imports", ())
        return AddBase(item["file"], item["class"], item["text"], imports)
    return kind(**item)


_KINDS: dict[str, Callable[..., Step]] = {
    "add": Add,
    "replace": Replace,
    "edit": Edit,
    "register": Register,
}
_PATCH_FIELDS = {
    "name": str,
    "title": str,
    "why": str,
    "how": str,
    "upstream": list,
    "drop-when": str,
    "upstream-has": list,
    "step": list,
}
_REQUIRED: dict[str, dict[str, type]] = {
    "add": {},
    "replace": {"file": str},
    "edit": {"file": str, "operation": str, "text": str},
    "register": {"file": str, "key": str},
}
_OPTIONAL: dict[str, dict[str, type]] = {
    "add": {"file": str, "built": str, "sources": list},
    "replace": {},
    "edit": {
        "function": str,
        "class": str,
        "anchor": str,
        "imports": list,
        "unless": str,
    },
    "register": {"mapping": str, "value": str, "set": str, "comment": str},
}
ANCHORED = ("replace", "insert-before", "insert-after")
OPERATIONS = (*ANCHORED, "insert-at-start", "insert-at-end", "add-base")


def _problems(entries: dict[str, Any], files: Path) -> Iterator[str]:
    patches = entries.get("patch")
    if set(entries) != {"patch"} or not isinstance(patches, list) or not patches:
        yield "the file must hold [[patch]] tables and nothing else"
        return
    names: set[str] = set()
    places: dict[str, set[str]] = {}
    for number, entry in enumerate(patches, 1):
        name = entry.get("name") or f"number {number}"
        problems = list(_patch_problems(entry, files, places))
        needs = entry.get("needs", ())
        problems += [
            f"field 'needs' holds {needed!r}, which is no patch before it"
            for needed in (needs if isinstance(needs, list) else ())
            if needed not in list(names)
        ]
        if name in names:
            problems.append("field 'name' is used twice")
        names.add(name)
        yield from (f"patch {name}: {problem}" for problem in problems)
    for file, edited in places.items():
        if len(edited) > MAX_EDITED_PLACES:
            yield (
                f"{len(edited)} places of {file} are edited "
                f"({', '.join(sorted(edited))}): replace it instead"
            )


def _patch_problems(
    entry: dict[str, Any], files: Path, places: dict[str, set[str]]
) -> Iterator[str]:
    wrong = list(_field_problems(entry, _PATCH_FIELDS, {"needs": list}))
    if wrong:
        yield from wrong
        return
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", entry["name"]):
        yield "field 'name' is not lower-case words with hyphens"
    if "\n" in entry["title"]:
        yield "field 'title' has more than one line"
    if entry["title"].startswith("["):
        yield "field 'title' starts with a bracket, which git am drops"
    for link in entry["upstream"]:
        if not isinstance(link, str) or not link.startswith("https://"):
            yield f"field 'upstream' holds {link!r}, not an https link"
    for item in entry["upstream-has"]:
        fields = {"file": str, "defines": str}
        for problem in _field_problems(item, fields, {}):
            yield f"field 'upstream-has': {problem}"
    owned: set[str] = set()
    for number, step in enumerate(entry["step"], 1):
        for problem in _step_problems(step, files, owned):
            yield f"step {number}: {problem}"
        if step.get("kind") == "edit":
            place = step.get("function") or f"class {step.get('class')}"
            places.setdefault(str(step.get("file")), set()).add(str(place))


def _step_problems(step: dict[str, Any], files: Path, owned: set[str]) -> Iterator[str]:
    kind = step.get("kind")
    if kind not in _KINDS:
        yield f"field 'kind' is {kind!r}, not one of {', '.join(_KINDS)}"
        return
    fields = {key: value for key, value in step.items() if key != "kind"}
    wrong = list(_field_problems(fields, _REQUIRED[kind], _OPTIONAL[kind]))
    if wrong:
        yield from wrong
        return
    if kind == "add" and "file" not in step:
        yield from _built_problems(step, owned)
        return
    if "built" in step or "sources" in step:
        yield "fields 'built' and 'sources' take the place of field 'file'"
        return
    file = step["file"]
    path = PurePosixPath(file)
    if path.parts[0] != "vllm" or ".." in path.parts or path.suffix != ".py":
        yield f"field 'file' is {file!r}, not a Python file below vllm/"
    elif kind in ("add", "replace") and not (files / file).is_file():
        yield f"field 'file' names {file}, which is not in {files}"
    if file in owned:
        yield f"{file} is added or replaced already: change our file instead"
    if kind in ("add", "replace"):
        owned.add(file)
    elif kind == "edit":
        yield from _edit_problems(step)
    else:
        yield from _register_problems(step)


def _built_problems(step: dict[str, Any], owned: set[str]) -> Iterator[str]:
    if "built" not in step or "sources" not in step:
        yield "needs field 'file', or fields 'built' and 'sources'"
        return
    built = step["built"]
    parts = built.split("/")
    if parts[0] != "vllm" or len(parts) < 2 or not all(map(str.isidentifier, parts)):
        yield f"field 'built' is {built!r}, not a module below vllm/ without a suffix"
    for source in step["sources"]:
        if not re.fullmatch(r"csrc(/[\w-]+)+(\.cpp)?", str(source)):
            yield f"field 'sources' holds {source!r}, not a path below csrc/"
    if built in owned:
        yield f"{built} is added already"
    owned.add(built)


def _edit_problems(step: dict[str, Any]) -> Iterator[str]:
    operation = step["operation"]
    owner = "class" if operation == "add-base" else "function"
    if "function" not in step and "class" not in step:
        yield "needs field 'function' or 'class'"
    elif "function" in step and "class" in step:
        yield "fields 'function' and 'class' exclude each other"
    elif operation in OPERATIONS and owner not in step:
        yield f"field 'operation': {operation} goes with field {owner!r}"
    if operation not in OPERATIONS:
        yield (
            f"field 'operation' is {operation!r}, not one of {', '.join(OPERATIONS)}"
        )
    elif (operation in ANCHORED) != ("anchor" in step):
        need = "needs an" if operation in ANCHORED else "takes no"
        yield f"field 'anchor': {operation} {need} anchor"
    if "unless" in step and "class" in step:
        yield "field 'unless' goes with field 'function'"
    mode = "eval" if operation in ("replace", "add-base") else "exec"
    modes = {"anchor": mode, "text": mode, "unless": "eval"}
    for field in ("anchor", "unless"):
        if modes[field] == "eval" and step.get(field, "").isidentifier():
            yield (
                f"field {field!r} is a bare name, which is not an expression everywhere"
            )
    for field in (field for field in modes if field in step):
        if not _parses(step[field], modes[field]):
            what = "an expression" if modes[field] == "eval" else "statements"
            yield f"field {field!r} does not parse as {what}"
        elif operation == "add-base" and field == "text" and _is_tuple(step[field]):
            yield "field 'text' is a tuple, not one base"
    for line in step.get("imports", []):
        # One name an import keeps merging into upstream's lines simple.
        if not re.fullmatch(r"from [\w.]+ import \w+", str(line)):
            yield f"field 'imports' holds {line!r}, not 'from module import name'"


def _register_problems(step: dict[str, Any]) -> Iterator[str]:
    if ("mapping" in step) != ("value" in step):
        yield "fields 'mapping' and 'value' go together"
    elif "mapping" not in step and "set" not in step:
        yield "needs field 'mapping' or 'set'"
    if "value" in step and not _parses(step["value"], "eval"):
        yield "field 'value' does not parse as an expression"
    if "comment" in step and "mapping" not in step:
        yield "field 'comment' needs field 'mapping'"
    if "set" in step and not re.fullmatch(r"[\w.]+\.\w+", step["set"]):
        yield f"field 'set' is {step['set']!r}, not 'function.variable'"


def _field_problems(
    entry: Any, required: Mapping[str, type], optional: Mapping[str, type]
) -> Iterator[str]:
    if not isinstance(entry, dict):
        yield f"{entry!r} is not a table"
        return
    for field in entry:
        if field not in required and field not in optional:
            yield f"unknown field {field!r}"
    for field, kind in {**optional, **required}.items():
        if field not in entry:
            if field in required:
                yield f"field {field!r} is missing"
        elif not isinstance(entry[field], kind):
            yield f"field {field!r} is not a {kind.__name__}"
        elif not entry[field] or (kind is str and not entry[field].strip()):
            yield f"field {field!r} is empty"


def _is_tuple(text: str) -> bool:
    return isinstance(ast.parse(text, mode="eval").body, ast.Tuple)


def _parses(text: str, mode: str) -> bool:
    try:
        ast.parse(text, mode=mode)
    except SyntaxError:
        return False
    return True
