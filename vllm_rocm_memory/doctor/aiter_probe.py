# SPDX-License-Identifier: Apache-2.0
"""What the fence would do to an AITER, told from its source.

Importing AITER may compile kernels and want a GPU. So nothing of it is run: a class
with the signatures of its own is made, and the series' fence is put around that.

    python -m vllm_rocm_memory.doctor.aiter_probe SOURCE FENCE

prints one line of JSON: ``{"fenced": [names]}`` or ``{"refusal": sentence}``.
"""

import ast
import sys
from pathlib import Path
from typing import Any

from vllm_rocm_memory.doctor import probe
from vllm_rocm_memory.doctor.source import import_file

CLASS = "CustomAllreduce"
_NOT_CALLED_ON_INSTANCES = {"staticmethod", "classmethod", "property"}


def surface(source: str) -> type:
    """A class whose methods take what those of AITER's take, and do nothing.

    Raises:
        LookupError: there is no such class in `source`.
    """
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == CLASS:
            node.bases, node.keywords, node.decorator_list = [], [], []
            node.body = [*map(_bare, filter(_is_method, node.body)), ast.Pass()]
            break
    else:
        raise LookupError(f"it has no class {CLASS}")
    module = ast.fix_missing_locations(ast.Module([node], []))
    names: dict[str, Any] = {}
    exec(compile(module, CLASS, "exec"), names)
    made: type = names[CLASS]
    return made


def _is_method(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and not any(
        isinstance(each, ast.Name) and each.id in _NOT_CALLED_ON_INSTANCES
        for each in node.decorator_list
    )


def _bare(node: ast.stmt) -> ast.stmt:
    assert isinstance(node, ast.FunctionDef)
    node.decorator_list, node.returns, node.body = [], None, [ast.Pass()]
    arguments = node.args
    for each in ast.walk(arguments):
        if isinstance(each, ast.arg):
            each.annotation = None
    arguments.defaults = [_literal(each) for each in arguments.defaults]
    arguments.kw_defaults = [each and _literal(each) for each in arguments.kw_defaults]
    return node


def _literal(default: ast.expr) -> ast.expr:
    # Which other values there are makes no difference to the fence.
    return default if isinstance(default, ast.Constant) else ast.Constant(...)


def main() -> None:
    source, fence_file = map(Path, sys.argv[1:])
    try:
        allreduce = surface(source.read_text())
    except (LookupError, SyntaxError) as error:
        raise SystemExit(f"{source}: {error}") from error
    answer: dict[str, Any]
    try:
        answer = {"fenced": import_file(fence_file).fence(allreduce).fenced_methods}
    except RuntimeError as error:
        answer = {"refusal": str(error)}
    probe.tell(answer)


if __name__ == "__main__":
    main()
