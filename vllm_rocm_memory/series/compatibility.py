# SPDX-License-Identifier: Apache-2.0
"""Does a module that we replace still give the rest of vLLM what it imports?"""

import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from vllm_rocm_memory.series import SeriesError
from vllm_rocm_memory.series.target import module_name


@dataclass(frozen=True)
class MissingName:
    """`importer` takes `name` from `module`, which does not have it."""

    importer: str
    module: str
    name: str


def missing_names(
    root: Path, results: Mapping[str, bytes], replaced: str
) -> list[MissingName]:
    """Names that the tree takes from a module of ours and that it lacks.

    Sees ``from module import name``, absolute and relative, and attributes of a
    module that was imported by name. What is looked up by a computed name is not seen.

    Args:
        root: holds the tree's ``vllm/``.
        results: our content by path; stands for what is on disk.
        replaced: path of our module, which is of this Python if it is compiled.

    Raises:
        SeriesError: a compiled module does not load.
    """
    module = module_name(replaced)
    last = module.rpartition(".")[2].encode()
    if replaced.endswith(".py"):
        exported = _exported(ast.parse(results[replaced]))
    else:
        exported = _loaded(replaced, results[replaced])
    paths = {path.relative_to(root).as_posix() for path in root.glob("vllm/**/*.py")}
    missing = []
    ours = {path for path in results if path.endswith(".py")}
    for path in sorted({*paths, *ours} - {replaced}):
        content = results[path] if path in results else (root / path).read_bytes()
        # Parsing all of vLLM takes most of a minute.
        if last not in content:
            continue
        for name in sorted(set(_taken(ast.parse(content), path, module))):
            if name not in exported:
                missing.append(MissingName(path, module, name))
    return missing


_SCRIPT = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location(*sys.argv[1:])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(json.dumps(dir(module)))
"""
LOAD_TIMEOUT_S = 60


def _loaded(path: str, content: bytes) -> set[str]:
    """Every name of a compiled module, which only a process that loads it can tell."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, PurePosixPath(path).name)
        file.write_bytes(content)
        command = [sys.executable, "-c", _SCRIPT, module_name(path), str(file)]
        try:
            process = subprocess.run(
                command,
                cwd=folder,
                capture_output=True,
                stdin=subprocess.DEVNULL,
                text=True,
                timeout=LOAD_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise SeriesError(f"{path} does not load in {LOAD_TIMEOUT_S} s") from error
    if process.returncode != 0:
        last = process.stderr.strip().rpartition("\n")[2]
        raise SeriesError(f"{path} does not load: {last}")
    return set(json.loads(process.stdout))


def _exported(tree: ast.Module) -> set[str]:
    """Every name that the module binds at its top level, whatever the branch."""
    names: set[str] = set()
    left: list[ast.AST] = list(tree.body)
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(a.asname or a.name).partition(".")[0] for a in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        if not isinstance(node, ast.Lambda):
            left.extend(ast.iter_child_nodes(node))
    return names


def _taken(tree: ast.Module, path: str, module: str) -> Iterator[str]:
    aliases = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == module:
                    aliases.add(alias.asname or alias.name)
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(node, path)
            for alias in node.names:
                if source == module:
                    yield alias.name
                elif f"{source}.{alias.name}" == module:
                    aliases.add(alias.asname or alias.name)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Store):
            continue
        if ast.unparse(node.value) in aliases:
            yield node.attr


def _absolute(node: ast.ImportFrom, path: str) -> str:
    if not node.level:
        return node.module or ""
    package = list(Path(path).parent.parts)
    above = package[: len(package) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])
