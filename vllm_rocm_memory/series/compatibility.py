# SPDX-License-Identifier: Apache-2.0
"""Does a module that we replace still give the rest of vLLM what it imports?"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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
    """Names that the tree takes from a replaced module and that it lacks.

    Sees ``from module import name``, absolute and relative, and attributes of a
    module that was imported by name. What is looked up by a computed name is not seen.

    Args:
        root: holds the tree's ``vllm/``.
        results: our content by path; stands for what is on disk.
        replaced: path of the replaced module.
    """
    module = module_name(replaced)
    last = module.rpartition(".")[2].encode()
    exported = _exported(ast.parse(results[replaced]))
    paths = {path.relative_to(root).as_posix() for path in root.glob("vllm/**/*.py")}
    missing = []
    for path in sorted({*paths, *results} - {replaced}):
        content = results[path] if path in results else (root / path).read_bytes()
        # Parsing all of vLLM takes most of a minute.
        if last not in content:
            continue
        for name in sorted(set(_taken(ast.parse(content), path, module))):
            if name not in exported:
                missing.append(MissingName(path, module, name))
    return missing


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
