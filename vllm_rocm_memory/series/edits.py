# SPDX-License-Identifier: Apache-2.0
"""Anchored edits of a syntax tree that keep upstream's formatting and comments."""

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from vllm_rocm_memory.series import SeriesError

# Where upstream's formatter wraps a line.
LINE_LENGTH = 88
# A comment of this kind does not count towards the length of its line.
_PRAGMA = re.compile(
    r"\s*((?i:noqa)|nosec|"
    r"(flake8|fmt|isort|pylint|pyrefly|pyright|ruff|ty|type|yapf):)"
)

_Node = TypeVar("_Node", bound=cst.CSTNode)
_Definition = TypeVar("_Definition", cst.FunctionDef, cst.ClassDef)
_Replacement = cst.CSTNode | cst.FlattenSentinel[cst.CSTNode]


def edit(
    source: bytes,
    *,
    function: str,
    operation: str,
    text: str,
    anchor: str | None = None,
    imports: Sequence[str] = (),
    unless: str | None = None,
) -> bytes:
    """Change one function of a module.

    Args:
        source: the module.
        function: qualified name, such as ``Class.method``; defined exactly once.
        operation: ``replace`` (the anchor expression by an expression),
            ``insert-before`` or ``insert-after`` (statements beside the anchor
            statement), ``insert-at-start`` (after the docstring), ``insert-at-end``.
        text: the expression or the statements, indented from column 0.
        anchor: an expression or a statement; found exactly once in the function.
            Spacing, comments, quotes and redundant parentheses do not matter.
        imports: ``from module import name`` lines that the module needs.
        unless: an expression, compared as anchors are. A function that holds it
            needs no change: the module is returned as it is.

    Raises:
        SeriesError: the function or the anchor is not there exactly once, or the
            text would not mean there what it says.
    """
    module = _parse(source)
    node = _function(module, function)
    if unless is not None and _expressions(node, unless):
        return source
    config = module.config_for_parsing
    if operation == "replace":
        assert anchor is not None
        old = _only(_expressions(node, anchor), anchor, function)
        module = _swap(module, old, cst.parse_expression(text, config))
        # An operator beside the anchor may bind tighter than those of the text.
        if not _expressions(_function(_parse(module.bytes), function), text):
            raise SeriesError(f"{text!r} needs parentheses in {function}")
    elif anchor is not None:
        old = _only(_lines(node, anchor), anchor, function)
        new = _statements(text, config)
        both = [*new, old] if operation == "insert-before" else [old, *new]
        module = _swap(module, old, cst.FlattenSentinel(both))
    else:
        new = _statements(text, config)
        module = _swap(module, node.body, _extended(node, function, operation, new))
    for line in imports:
        module = _import(module, line)
    return module.bytes


def add_base(
    source: bytes, *, class_name: str, base: str, imports: Sequence[str] = ()
) -> bytes:
    """Put a base before all others of a class, so that its methods win over theirs.

    Args:
        source: the module.
        class_name: qualified name; defined exactly once.
        base: the expression of the new base.
        imports: ``from module import name`` lines that the module needs.

    Raises:
        SeriesError: the class is not there exactly once, has the base already, or has
            neither a list of bases nor room for one in its line.
    """
    module = _parse(source)
    node = _defined(module, class_name, cst.ClassDef, "class")
    bases = [_structure(_code(each.value)) for each in node.bases if not each.star]
    if _structure(base) in bases:
        raise SeriesError(f"class {class_name} has the base {base} already")
    value = cst.parse_expression(base, module.config_for_parsing)
    if node.bases or node.keywords:
        module = _with_first_base(module, node, value)
    else:
        module = _with_only_base(module, node, class_name, value)
    for line in imports:
        module = _import(module, line)
    return module.bytes


def register(
    source: bytes,
    *,
    key: str,
    mapping: str | None = None,
    value: str | None = None,
    set_name: str | None = None,
    comment: str | None = None,
) -> bytes:
    """Append `key` to a mapping of the module, a set inside a function, or both.

    Args:
        source: the module.
        key: the new string.
        mapping: name of a mapping at module level.
        value: source of the mapping's value for `key`.
        set_name: ``function.variable`` of a set.
        comment: stands above the mapping's entry.

    Raises:
        SeriesError: the collection is not there exactly once, is not written one
            entry a line, or holds the key already.
    """
    module = _parse(source)
    name = cst.SimpleString(f'"{key}"')
    if mapping is not None:
        assert value is not None
        entry = cst.DictElement(name, cst.parse_expression(value))
        module = _append(module, module, mapping, cst.Dict, entry, comment)
    if set_name is not None:
        function, _, variable = set_name.rpartition(".")
        node = _function(module, function)
        module = _append(module, node, variable, cst.Set, cst.Element(name), None)
    return module.bytes


def _parse(source: bytes) -> cst.Module:
    try:
        return cst.parse_module(source)
    except (cst.ParserSyntaxError, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0]
        raise SeriesError(f"it does not parse: {reason}") from error


def _function(module: cst.Module, name: str) -> cst.FunctionDef:
    return _defined(module, name, cst.FunctionDef, "function")


def _defined(
    module: cst.Module, name: str, kind: type[_Definition], word: str
) -> _Definition:
    found = [
        node
        for path, node in _definitions(module, ())
        if ".".join(path) == name and isinstance(node, kind)
    ]
    if len(found) != 1:
        raise SeriesError(f"{word} {name} is defined {len(found)} times, not once")
    return found[0]


def _definitions(
    node: cst.CSTNode, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], cst.FunctionDef | cst.ClassDef]]:
    for child in node.children:
        if isinstance(child, cst.ClassDef | cst.FunctionDef):
            inner = (*path, child.name.value)
            yield inner, child
            yield from _definitions(child, inner)
        # No statement, and so no definition, stands inside these.
        elif not isinstance(child, cst.BaseExpression | cst.BaseSmallStatement):
            yield from _definitions(child, path)


def _descendants(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    for child in node.children:
        yield child
        yield from _descendants(child)


def _code(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def _structure(expression: str) -> str:
    # Its own parentheses may be further out, and a comment may end it.
    return ast.dump(ast.parse(f"({expression}\n)", mode="eval"))


def _expressions(node: cst.FunctionDef, code: str) -> list[cst.CSTNode]:
    kind, wanted = type(cst.parse_expression(code)), _structure(code)
    return [
        child
        for child in _descendants(node.body)
        if isinstance(child, kind) and _structure(_code(child)) == wanted
    ]


def _lines(node: cst.FunctionDef, code: str) -> list[cst.CSTNode]:
    kind, wanted = type(cst.parse_statement(code)), ast.dump(ast.parse(code))
    return [
        line
        for block in (node.body, *_descendants(node.body))
        if isinstance(block, cst.IndentedBlock)
        for line in block.body
        if isinstance(line, kind) and ast.dump(ast.parse(_code(line))) == wanted
    ]


def _only(found: list[cst.CSTNode], anchor: str, function: str) -> cst.CSTNode:
    if len(found) != 1:
        raise SeriesError(
            f"anchor {anchor!r} is in {function} {len(found)} times, not once"
        )
    return found[0]


class _Swap(cst.CSTTransformer):
    def __init__(
        self, old: cst.CSTNode, new: _Replacement, around: Sequence[cst.CSTNode]
    ) -> None:
        self.old, self.new = old, new
        self.around = {id(node) for node in around}

    def on_visit(self, node: cst.CSTNode) -> bool:
        # What is not visited is not copied, and copying takes most of an edit's time.
        return id(node) in self.around

    def on_leave(self, original: cst.CSTNode, updated: cst.CSTNode) -> Any:
        return self.new if original is self.old else updated


def _swap(module: cst.Module, old: cst.CSTNode, new: _Replacement) -> cst.Module:
    return module.visit(_Swap(old, new, _around(module, old)))


def _around(outer: cst.CSTNode, node: cst.CSTNode) -> list[cst.CSTNode]:
    """`outer` and what it holds that holds `node`; nothing where it does not."""
    children = outer.children
    if any(child is node for child in children):
        return [outer]
    for child in children:
        if found := _around(child, node):
            return [outer, *found]
    return []


def _statements(
    text: str, config: cst.PartialParserConfig
) -> Sequence[cst.BaseStatement]:
    parsed = cst.parse_module(text, config)
    if parsed.footer:
        raise SeriesError(f"the comment after the last statement of {text!r} is lost")
    first, *rest = parsed.body
    # What stands above the first statement is the header of a module.
    above = (*parsed.header, *getattr(first, "leading_lines", ()))
    return [first.with_changes(leading_lines=above), *rest]


def _extended(
    node: cst.FunctionDef,
    function: str,
    operation: str,
    new: Sequence[cst.BaseStatement],
) -> cst.IndentedBlock:
    if not isinstance(node.body, cst.IndentedBlock):
        raise SeriesError(f"{function} has its body on the line of its def")
    body = list(node.body.body)
    if operation == "insert-at-start":
        first = int(node.get_docstring(clean=False) is not None)
        return node.body.with_changes(body=[*body[:first], *new, *body[first:]])
    last = body[-1]
    if isinstance(last, cst.SimpleStatementLine) and isinstance(
        last.body[-1], cst.Return | cst.Raise
    ):
        raise SeriesError(f"{function} ends with return or raise: insert before it")
    return node.body.with_changes(body=[*body, *new])


def _with_first_base(
    module: cst.Module, node: cst.ClassDef, value: cst.BaseExpression
) -> cst.Module:
    """Insert a base so that a list as upstream's formatter left it is one again."""
    left = cst.ensure_type(node.lpar, cst.LeftParen)
    right = cst.ensure_type(node.rpar, cst.RightParen)
    opening, closing = left.whitespace_after, right.whitespace_before
    old, indent = [*node.bases, *node.keywords], module.default_indent
    one_line = "\n" not in "".join(map(_code, old))
    comments = "#" in _code(left).partition("\n")[2] + _code(right)
    if not _breaks(opening) or (one_line and not comments):
        new = cst.Arg(
            value, comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        )
        layouts = [(opening, closing)]
        if one_line and not isinstance(old[-1].comma, cst.Comma):
            layouts.append((_broken(opening, indent), _broken(closing, "")))
        for start, end in layouts:
            changed = _with_list(module, node, start, [new, *old], end)
            if _fits(changed, new):
                return changed
    # One a line. The comment beside the parenthesis stays there, those above the first
    # argument stay above it.
    line = _broken(opening, indent)
    below = line.with_changes(first_line=cst.TrailingWhitespace())
    new = cst.Arg(value, comma=cst.Comma(whitespace_after=below))
    *front, last = old
    first = front[0].comma if _breaks(opening) and front else None
    if not (isinstance(first, cst.Comma) and _breaks(first.whitespace_after)):
        front = [_ended(each, indent) for each in front]
        last, closing = _ended(last, "", closing), cst.SimpleWhitespace("")
    opening = line.with_changes(empty_lines=())
    return _with_list(module, node, opening, [new, *front, last], closing)


def _with_only_base(
    module: cst.Module, node: cst.ClassDef, name: str, value: cst.BaseExpression
) -> cst.Module:
    new = cst.Arg(value)
    changed = _with_list(
        module, node, cst.SimpleWhitespace(""), [new], cst.SimpleWhitespace("")
    )
    is_commented = isinstance(node.lpar, cst.LeftParen) and "#" in _code(node.lpar)
    if is_commented or not _fits(changed, new):
        raise SeriesError(f"class {name} has no list of bases, and no room for one")
    return changed


def _with_list(
    module: cst.Module,
    node: cst.ClassDef,
    opening: cst.BaseParenthesizableWhitespace,
    arguments: Sequence[cst.Arg],
    closing: cst.BaseParenthesizableWhitespace,
) -> cst.Module:
    bases = len(node.bases) + 1
    changed = node.with_changes(
        lpar=cst.LeftParen(opening),
        bases=arguments[:bases],
        keywords=arguments[bases:],
        rpar=cst.RightParen(closing),
    )
    return _swap(module, node, changed)


def _breaks(space: cst.BaseParenthesizableWhitespace) -> bool:
    return isinstance(space, cst.ParenthesizedWhitespace)


def _broken(
    space: cst.BaseParenthesizableWhitespace, indent: str
) -> cst.ParenthesizedWhitespace:
    if isinstance(space, cst.ParenthesizedWhitespace):
        return space
    return cst.ParenthesizedWhitespace(
        indent=True, last_line=cst.SimpleWhitespace(indent)
    )


def _ended(
    argument: cst.Arg,
    indent: str,
    closing: cst.BaseParenthesizableWhitespace | None = None,
) -> cst.Arg:
    """The argument with a comma and a line break behind it."""
    comma = argument.comma
    if not isinstance(comma, cst.Comma):
        comma = cst.Comma(whitespace_after=closing or cst.SimpleWhitespace(""))
    below = _broken(comma.whitespace_after, indent)
    return argument.with_changes(comma=comma.with_changes(whitespace_after=below))


def _fits(module: cst.Module, node: cst.CSTNode) -> bool:
    """Whether the line on which `node` begins is not too long."""
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    number = wrapper.resolve(PositionProvider)[node].start.line
    line = module.code.split("\n")[number - 1].rstrip()
    code, _, comment = line.partition("#")
    return len(code.rstrip() if _PRAGMA.match(comment) else line) <= LINE_LENGTH


def _append(
    module: cst.Module,
    scope: cst.Module | cst.FunctionDef,
    variable: str,
    kind: type[cst.Dict] | type[cst.Set],
    entry: cst.DictElement | cst.Element,
    comment: str | None,
) -> cst.Module:
    collection = _collection(scope, variable, kind)
    elements: list[Any] = list(collection.elements)
    opening = collection.lbrace.whitespace_after
    closing = collection.rbrace.whitespace_before
    if (
        not elements
        or not isinstance(elements[-1].comma, cst.Comma)
        or not isinstance(opening, cst.ParenthesizedWhitespace)
        or not isinstance(closing, cst.ParenthesizedWhitespace)
    ):
        raise SeriesError(f"{variable} is not written one entry a line")
    key = _key(entry)
    if _structure(key) in (_structure(_key(element)) for element in elements):
        raise SeriesError(f"{variable} holds {key} already")
    comments = [
        cst.EmptyLine(whitespace=opening.last_line, comment=cst.Comment(f"# {line}"))
        for line in (comment or "").strip().splitlines()
    ]
    # What follows the last entry up to the brace is split: the rest of its line stays
    # with it, the comments above the brace stay above the brace.
    elements[-1] = elements[-1].with_changes(
        comma=elements[-1].comma.with_changes(
            whitespace_after=opening.with_changes(
                first_line=closing.first_line, empty_lines=comments
            )
        )
    )
    changed = collection.with_changes(
        elements=[*elements, entry.with_changes(comma=cst.Comma())],
        rbrace=cst.RightCurlyBrace(
            closing.with_changes(first_line=cst.TrailingWhitespace())
        ),
    )
    return _swap(module, collection, changed)


def _key(element: cst.BaseElement | cst.BaseDictElement) -> str:
    return _code(element.key if isinstance(element, cst.DictElement) else element.value)


def _collection(
    scope: cst.Module | cst.FunctionDef, variable: str, kind: type[_Node]
) -> _Node:
    body = scope.body if isinstance(scope, cst.Module) else scope.body.body
    found = [
        small.value
        for line in body
        if isinstance(line, cst.SimpleStatementLine)
        for small in line.body
        if _assigned_name(small) == variable
        and isinstance(small, cst.Assign | cst.AnnAssign)
        and isinstance(small.value, kind)
    ]
    if len(found) != 1:
        raise SeriesError(
            f"{variable} is assigned a {kind.__name__.lower()} display "
            f"{len(found)} times, not once"
        )
    return cast(_Node, found[0])


def _assigned_name(small: cst.CSTNode) -> str | None:
    if isinstance(small, cst.AnnAssign):
        target: cst.CSTNode = small.target
    elif isinstance(small, cst.Assign) and len(small.targets) == 1:
        target = small.targets[0].target
    else:
        return None
    return target.value if isinstance(target, cst.Name) else None


def _import(module: cst.Module, line: str) -> cst.Module:
    """Add one ``from module import name`` where isort would put it."""
    wanted = ast.parse(line).body[0]
    assert isinstance(wanted, ast.ImportFrom) and wanted.module
    found = [
        (index, statement, ast.parse(_code(statement)).body[0])
        for index, statement in enumerate(module.body)
        if isinstance(statement, cst.SimpleStatementLine)
        and isinstance(statement.body[0], cst.Import | cst.ImportFrom)
    ]
    if not found:
        raise SeriesError("the module imports nothing: there is no place for an import")
    place = found[-1][0] + 1
    package = wanted.module.partition(".")[0]
    siblings = [
        (index, statement, here)
        for index, statement, here in found
        if isinstance(here, ast.ImportFrom)
        and not here.level
        and str(here.module).partition(".")[0] == package
    ]
    for index, statement, here in siblings:
        if here.module == wanted.module and _mergeable(statement, here):
            return _merged(module, statement, here, wanted.names[0].name)
        place = index + (str(here.module) <= wanted.module)
        if place == index:
            break
    new = cst.parse_statement(line)
    body = [*module.body]
    # The blank line above a group stays above it.
    if siblings and place == siblings[0][0]:
        new = new.with_changes(leading_lines=body[place].leading_lines)
        body[place] = body[place].with_changes(leading_lines=())
    return module.with_changes(body=[*body[:place], new, *body[place:]])


def _mergeable(statement: cst.SimpleStatementLine, here: ast.ImportFrom) -> bool:
    return here.names[0].name != "*" and "#" not in _code(statement.body[0])


def _merged(
    module: cst.Module,
    statement: cst.SimpleStatementLine,
    here: ast.ImportFrom,
    name: str,
) -> cst.Module:
    names = [ast.unparse(alias) for alias in here.names]
    if name in names:
        return module
    names = sorted([*names, name], key=_isort_key)
    code = f"from {here.module} import {', '.join(names)}"
    if len(code) > LINE_LENGTH:
        listed = "".join(f"    {each},\n" for each in names)
        code = f"from {here.module} import (\n{listed})"
    merged = cst.ensure_type(cst.parse_statement(code), cst.SimpleStatementLine)
    return _swap(module, statement, statement.with_changes(body=merged.body))


def _isort_key(name: str) -> tuple[int, str]:
    """isort's order by type: constants, classes, then the rest."""
    if len(name) > 1 and name.isupper():
        return 0, name
    return (1 if name[0].isupper() else 2), name
