# SPDX-License-Identifier: Apache-2.0
"""Edits change what they name and nothing else."""

import ast
import io
import itertools
import subprocess
import sys
import textwrap
import tokenize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rocm_memory.series import SeriesError
from vllm_rocm_memory.series.edits import add_base, edit, register

MODULE = '''\
"""Docstring."""

import os

from vllm.alpha import one
from vllm.gamma import (
    Three,
    three,
)


class Box:
    def  open( self ):   # odd spacing
        """Opens."""
        key = make_key( 'a', size = 1 )  # a key
        # Before the loop.
        for each in [key]:
            turn(each); count = 1
        return key

    def shut(self):
        return None


async def main():
    if os.name:
        await go("x")
'''


def run(**options) -> str:
    return edit(MODULE.encode(), **options).decode()


def changed_lines(after: str, before: str = MODULE) -> tuple[list[str], list[str]]:
    """Lines that went and lines that came, in order."""
    old, new = before.splitlines(), after.splitlines()
    gone = [line for line in old if line not in new]
    return gone, [line for line in new if line not in old]


def test_replace_matches_structure_not_spelling():
    after = run(
        function="Box.open",
        operation="replace",
        anchor='(make_key("a", size=1))',
        text="make_key('b')",
    )
    assert changed_lines(after) == (
        ["        key = make_key( 'a', size = 1 )  # a key"],
        ["        key = make_key('b')  # a key"],
    )


def test_insert_before_goes_above_the_comments_of_its_anchor():
    after = run(
        function="Box.open",
        operation="insert-before",
        anchor="for each in [key]:\n    turn(each)\n    count = 1",
        text="# Mine.\nfirst()\nif key:\n    second()",
    )
    expected = """\
        key = make_key( 'a', size = 1 )  # a key
        # Mine.
        first()
        if key:
            second()
        # Before the loop.
        for each in [key]:
"""
    assert expected in after


def test_insert_after():
    after = run(
        function="Box.open",
        operation="insert-after",
        anchor="key = make_key('a', size=1)",
        text="check(key)",
    )
    assert "# a key\n        check(key)\n        # Before the loop." in after


def test_insert_at_start_leaves_the_docstring_first():
    after = run(function="Box.open", operation="insert-at-start", text="begin()")
    assert '"""Opens."""\n        begin()\n        key =' in after
    after = run(function="Box.shut", operation="insert-at-start", text="begin()")
    assert "def shut(self):\n        begin()\n        return None" in after


def test_insert_at_end():
    after = run(function="main", operation="insert-at-end", text="end()")
    assert after == f"{MODULE}    end()\n"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"function": "Box.gone"}, "function Box.gone is defined 0 times, not once"),
        ({"function": "open"}, "function open is defined 0 times"),
        ({"anchor": "make_lock()"}, "'make_lock()' is in Box.open 0 times, not once"),
        ({"anchor": "'x'"}, "is in Box.open 0 times"),
        (
            {"operation": "insert-at-end", "anchor": None},
            "Box.open ends with return or raise",
        ),
        (
            {"operation": "insert-at-start", "anchor": None, "text": "a()\n# lost"},
            "the comment after the last statement",
        ),
    ],
)
def test_what_does_not_fit_is_refused(options, sentence):
    options = {
        "function": "Box.open",
        "operation": "replace",
        "anchor": "make_key('a', size=1)",
        "text": "b()",
        **options,
    }
    with pytest.raises(SeriesError) as error:
        run(**options)
    assert sentence in str(error.value)


def test_an_ambiguous_anchor_or_function_is_refused():
    twice = b"def f():\n    g(1)\n    g( 1 )\n"
    with pytest.raises(SeriesError, match="in f 2 times"):
        edit(twice, function="f", operation="replace", anchor="g(1)", text="h()")
    twice = b"if x:\n    def f(): ...\nelse:\n    def f(): ...\n"
    with pytest.raises(SeriesError, match="f is defined 2 times"):
        edit(twice, function="f", operation="replace", anchor="g(1)", text="h()")
    one_line = b"def f(): return 1\n"
    with pytest.raises(SeriesError, match="f has its body on the line of its def"):
        edit(one_line, function="f", operation="insert-at-start", text="h()")


@pytest.mark.parametrize(
    ("line", "came"),
    [
        ("from vllm.alpha import One", ["from vllm.alpha import One, one"]),
        ("from vllm.beta import two", ["from vllm.beta import two"]),
        ("from vllm.aaa import zero", ["from vllm.aaa import zero"]),
        ("from vllm.zeta import six", ["from vllm.zeta import six"]),
        (
            "from vllm.gamma import THREE",
            ["from vllm.gamma import THREE, Three, three"],
        ),
        ("from vllm.alpha import one", []),
        ("from torch import nn", ["from torch import nn"]),
    ],
)
def test_imports_go_where_isort_puts_them(line, came):
    after = run(
        function="Box.shut",
        operation="insert-at-start",
        text="begin()",
        imports=[line],
    )
    assert changed_lines(after)[1] == [*came, "        begin()"]
    names = [node.module for node in ast.parse(after).body if hasattr(node, "module")]
    ours = [name for name in names if name.startswith("vllm")]
    assert ours == sorted(set(ours))
    assert "import os\n\nfrom vllm.a" in after, "the groups stay apart"


def test_an_import_that_gets_too_long_is_wrapped():
    long = "a_very_long_name_for_something_that_is_imported_here"
    source = f"from vllm.alpha import {long}\n\n\ndef f():\n    pass\n"
    after = edit(
        source.encode(),
        function="f",
        operation="insert-at-start",
        text="g()",
        imports=["from vllm.alpha import another_name"],
    ).decode()
    assert after.startswith(
        f"from vllm.alpha import (\n    {long},\n    another_name,\n)\n"
    )


def test_a_commented_import_is_left_alone():
    source = "from vllm.a import (\n    b,  # why\n)\n\n\ndef f():\n    pass\n"
    after = edit(
        source.encode(),
        function="f",
        operation="insert-at-start",
        text="g()",
        imports=["from vllm.a import c"],
    ).decode()
    assert after.startswith(
        "from vllm.a import (\n    b,  # why\n)\nfrom vllm.a import c"
    )


def test_an_expression_is_not_torn_by_its_surroundings():
    source = b"def f():\n    return 2 * (g(\n        1 +  # why\n        x\n    ))\n"
    options = {"function": "f", "operation": "replace"}
    after = edit(source, anchor="g(1 + x)", text="h(3)", **options)
    assert after == b"def f():\n    return 2 * h(3)\n"
    after = edit(source, anchor="1 + x", text="3", **options)
    assert after == b"def f():\n    return 2 * (g(\n        3\n    ))\n"
    with pytest.raises(SeriesError, match="'a \\+ b' needs parentheses in f"):
        edit(source, anchor="g(1 + x)", text="a + b", **options)
    after = edit(source, anchor="g(1 + x)", text="(a + b)", **options)
    assert after == b"def f():\n    return 2 * (a + b)\n"


def test_the_branch_of_an_elif_is_no_statement():
    source = b"def f():\n    if a:\n        b()\n    elif c:\n        d()\n"
    options = {"function": "f", "operation": "insert-before", "text": "e()"}
    with pytest.raises(SeriesError, match="0 times"):
        edit(source, anchor="if c:\n    d()", **options)
    after = edit(source, anchor="d()", **options)
    assert after == source.replace(b"d()", b"e()\n        d()")


def test_a_module_without_imports_has_no_place_for_one():
    with pytest.raises(SeriesError, match="imports nothing"):
        edit(
            b"def f():\n    pass\n",
            function="f",
            operation="insert-at-start",
            text="g()",
            imports=["from a import b"],
        )


@pytest.mark.parametrize(
    ("unless", "held"),
    [
        ("make_key('a', size=1)", True),
        ('(make_key("a",size = 1))', True),
        ("turn(each)", True),
        ("[key]", True),
        ("make_key('a')", False),
        # Other functions hold these.
        ("None", False),
        ("go('x')", False),
    ],
)
def test_a_function_that_holds_it_already_is_left_alone(unless, held):
    options = {
        "function": "Box.open",
        "operation": "insert-before",
        "anchor": "return key",
        "text": "turn(key)",
        "imports": ["from vllm.beta import two"],
    }
    wanted = MODULE if held else run(**options)
    assert run(**options, unless=unless) == wanted
    assert wanted == MODULE or "two" in wanted


def test_nothing_is_asked_of_a_function_that_needs_no_change():
    gone = {"operation": "replace", "anchor": "gone()", "text": "x"}
    assert run(function="Box.shut", unless="None", **gone) == MODULE
    with pytest.raises(SeriesError, match=r"function Box\.gone is defined 0 times"):
        run(function="Box.gone", unless="None", **gone)


def test_a_step_does_what_the_one_before_it_did_not():
    """Each looks at what the others left."""
    options = {"function": "Box.shut", "operation": "insert-at-start"}
    once = run(text="begin()", unless="begin()", **options)
    assert once != MODULE
    again = {"text": "begin()", "unless": "begin()", **options}
    assert edit(once.encode(), **again) == once.encode()


def based(source: str, name: str = "A", base: str = "New", **options) -> str:
    return add_base(source.encode(), class_name=name, base=base, **options).decode()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("class A(B):", "class A(New, B):"),
        ("class  A ( B,C , ) : ...", "class  A ( New, B,C , ) : ..."),
        ("class A(B, metaclass=M):", "class A(New, B, metaclass=M):"),
        ("class A(metaclass=M):", "class A(New, metaclass=M):"),
        ("class A(*bases, **options):", "class A(New, *bases, **options):"),
        ("class A((B)): ...", "class A(New, (B)): ..."),
        # Its value is not it.
        ("class A(*New, k=New):", "class A(New, *New, k=New):"),
        ("class A(new.New, B[New]):", "class A(New, new.New, B[New]):"),
        ("class A[T](B[T]):", "class A[T](New, B[T]):"),
        # No list yet.
        ("class A:", "class A(New):"),
        ("class A[T]:", "class A[T](New):"),
        ("class A():", "class A(New):"),
        # Wrapped, one a line, with and without comments.
        ("class A(\n    B,\n):", "class A(\n    New,\n    B,\n):"),
        ("class A(\n  B,\n  k=M\n):", "class A(\n  New,\n  B,\n  k=M\n):"),
        (
            "class A(  # x\n    # First.\n    B,  # b\n    C,\n    # End\n):",
            "class A(  # x\n    New,\n    # First.\n    B,  # b\n    C,\n    # End\n):",
        ),
        (
            "class A(\n    # Why.\n    B\n):",
            "class A(\n    New,\n    # Why.\n    B,\n):",
        ),
        ("class A(\n    B  # b\n):", "class A(\n    New,\n    B,  # b\n):"),
        # Wrapped, but in one line.
        ("class A(\n    B, k=M\n):", "class A(\n    New, B, k=M\n):"),
        ("class A(  # why\n    B\n):", "class A(  # why\n    New, B\n):"),
        # In nobody's style.
        ("class A(B,\n        C):", "class A(New, B,\n        C):"),
        (
            f"class A({'L' * 70}, B,):",
            f"class A(\n    New,\n    {'L' * 70},\n    B,\n):",
        ),
        (
            f"class A({'L' * 75},\n    B): ...",
            f"class A(\n    New,\n    {'L' * 75},\n    B,\n): ...",
        ),
    ],
)
def test_a_base_comes_first(before, after):
    body = "\n    pass  # here\n" if before[-1] == ":" else "\n"
    assert based(f"x = 1\n\n\n{before}{body}y = 2\n") == (
        f"x = 1\n\n\n{after}{body}y = 2\n"
    )


def test_a_base_of_an_inner_class():
    source = "class Z:\n    if x:\n        @d  # d\n        class A(\n            B,\n"
    source += "        ):\n            y = 1\n\n\nclass A(C):\n    pass\n"
    after = based(source, "Z.A", "a.New")
    assert after == source.replace("    B,\n", "    a.New,\n            B,\n")
    assert based(source) == source.replace("(C)", "(New, C)")


def test_a_base_brings_its_import():
    source = MODULE.replace("class Box:", "class Box(One):")
    after = based(source, "Box", "Two", imports=["from vllm.beta import Two"])
    assert changed_lines(after, source) == (
        ["class Box(One):"],
        ["from vllm.beta import Two", "class Box(Two, One):"],
    )


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("class B(A): ...", "class A is defined 0 times, not once"),
        ("def A(B): ...", "class A is defined 0 times"),
        ("class B:\n    class A(C): ...", "class A is defined 0 times"),
        ("class A(B): ...\nclass A(C): ...", "class A is defined 2 times"),
        (
            "try:\n    class A(B): ...\nexcept E:\n    class A(C): ...",
            "class A is defined 2 times",
        ),
        ("class A(  # why\n): ...", "class A has no list of bases, and no room for"),
        (f"class A[{'T' * 80}]: ...", "class A has no list of bases, and no room for"),
        ("class A(B, New): ...", "class A has the base New already"),
        ("class A(\n    (New),  # why\n): ...", "class A has the base New already"),
        ("class A(B: ...", "it does not parse"),
    ],
)
def test_a_base_that_does_not_fit_is_refused(source, sentence):
    with pytest.raises(SeriesError) as error:
        based(f"{source}\n")
    assert sentence in str(error.value)


def test_the_same_base_is_found_however_it_is_written():
    with pytest.raises(SeriesError, match=r"has the base Of\[int\] already"):
        based("class A(Of[ int ]): ...\n", base="Of[int]")


def formatted(sources: list[str]) -> list[str]:
    """As ruff writes them, all in one call."""
    rule = "\n\n\nRULE = 1\n\n\n"
    process = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--isolated", "-"],
        input=rule.join(sources),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [f"{each.strip()}\n" for each in process.stdout.split(rule.strip())]


_LISTS = (
    *("B{}", "B{}, C", "B{}, metaclass=M", "metaclass=M{}", "B[C, D{}], E"),
    *("*B{}, **k", "(B{}), C", "B{},", "  # why\nB{}\n", "\n# own\nB{}\n"),
    "\nB{}  # side\n",
)
_ENDS = ("", "  # note", "  # noqa: E501", "  # type: ignore[misc]", "  # fmt: off")


def _lengths(*lines: str) -> set[int]:
    """Letters for the braces with which a line is one short of 88 to two above."""
    free = (90 - len(line) + more for line in lines for more in (-1, 0, 1, 2))
    return {0, *(length for length in free if length > 0)}


def test_a_longer_list_of_bases_is_wrapped_as_ruff_would():
    sources = []
    for bases, end in itertools.product(_LISTS, _ENDS):
        for head, colon, body in (
            ("", f":{end}", "\n    x = 1"),
            ("", ": ...", end),
            ("if x:\n    ", ": ...", end),
        ):
            indent = head[6:]
            whole = f"{indent}class A(Newer, {bases}){colon}"
            inside = f"{indent}    Newer, {bases}"
            for length in _lengths(whole, whole.removesuffix(end), inside):
                listed = bases.format("b" * length)
                sources.append(f"{head}class A({listed}){colon}{body}\n")
    before = formatted(sources)
    assert len(before) == len(sources)
    after = [based(each, base="Newer") for each in before]
    assert formatted(after) == after
    for layout in ("class A(Newer, ", "\n    Newer, ", "\n    Newer,\n"):
        assert sum(layout in each for each in after) > 100


MAPPING = """\
table: dict[str, object] = {
    # First.
    "A": 1,  # a
    "B": lambda: (
        2
    ),  # b
    # The end.
}


def factors():
    ignored: set[str] = {
        "A",
        # More to come.
    }
    return ignored
"""


def test_register_in_both():
    after = register(
        MAPPING.encode(),
        key="C",
        mapping="table",
        value="lambda: 3",
        set_name="factors.ignored",
        comment="Third.\nReally.",
    ).decode()
    expected = MAPPING.replace(
        "    # The end.",
        '    # Third.\n    # Really.\n    "C": lambda: 3,\n    # The end.',
    ).replace("        # More", '        "C",\n        # More')
    assert after == expected


@pytest.mark.parametrize(
    ("source", "options", "sentence"),
    [
        (MAPPING, {"mapping": "chair"}, "chair is assigned a dict display 0 times"),
        (MAPPING, {"key": "B"}, 'table holds "B" already'),
        ("table = {}\n", {}, "table is not written one entry a line"),
        ("table = {'a': 1}\n", {}, "table is not written one entry a line"),
        (MAPPING, {"mapping": None, "set_name": "factors.x"}, "a set display 0 times"),
        (MAPPING, {"mapping": None, "set_name": "gone.x"}, "gone is defined 0 times"),
    ],
)
def test_register_refuses(source, options, sentence):
    options = {"key": "C", "mapping": "table", "value": "3", **options}
    with pytest.raises(SeriesError, match=sentence):
        register(source.encode(), **options)


# Modules with all that may come between: odd spacing, comments, nesting, strings.
_SPACE = st.sampled_from(["", " ", "  ", "\t"])
_COMMENT = st.sampled_from(["", "  # note", "  #\u00e9"])
_EXPRESSION = st.one_of(
    st.sampled_from(["0", "'s'", '"d"', "f'{x}'", "[ 1,2 ]", "{'k' : 1}", "not_it( )"]),
    st.builds("call({}{},{} k = 2){}".format, _SPACE, st.just("y"), _SPACE, _SPACE),
)


@st.composite
def _lines(draw, depth: int = 0) -> list[str]:
    lines = []
    for _ in range(draw(st.integers(1, 3))):
        if depth < 2 and draw(st.booleans()):
            head = draw(st.sampled_from(["if x:", "for i in y :", "def inner( a ):"]))
            lines.append(head + draw(_COMMENT))
            lines += [f"  {line}" for line in draw(_lines(depth=depth + 1))]
        else:
            space = draw(_SPACE)
            lines.append(f"v{space}={space}{draw(_EXPRESSION)}{draw(_COMMENT)}")
        if draw(st.booleans()):
            lines.append(draw(st.sampled_from(["", "# between"])))
    return lines


@st.composite
def _module(draw) -> str:
    body = draw(_lines())
    body.insert(draw(st.sampled_from([0, len(body)])), f"z = ANCHOR({draw(_SPACE)}1 )")
    body = ["\n".join(body)]
    other = "\n".join(draw(_lines()))
    inside = textwrap.indent("\n".join(body), "    ")
    return f"{other}\ndef target():{draw(_COMMENT)}\n{inside}\n{other}\n"


def _tokens(source: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.string for token in tokens]


@settings(deadline=None)
@given(_module())
def test_replace_changes_no_other_byte(source):
    after = edit(
        source.encode(),
        function="target",
        operation="replace",
        anchor="ANCHOR(1)",
        text="OURS(2)",
    ).decode()
    before, rest = source.split("ANCHOR(", 1)
    assert after == f"{before}OURS(2){rest.partition(')')[2]}"


@settings(deadline=None)
@given(_module(), st.sampled_from(["before", "after", "start"]))
def test_insert_adds_its_tokens_and_no_others(source, where):
    anchor = None if where == "start" else "z = ANCHOR(1)"
    operation = "insert-at-start" if where == "start" else f"insert-{where}"
    after = edit(
        source.encode(),
        function="target",
        operation=operation,
        anchor=anchor,
        text="MINE()",
    ).decode()
    ours = ["MINE", "(", ")", "\n"]
    tokens = _tokens(after)
    start = tokens.index("MINE")
    assert tokens[start : start + 4] == ours
    left = tokens[:start] + tokens[start + 4 :]
    # Indentation tokens may stand on the other side of the inserted line.
    assert [t for t in left if t.strip()] == [t for t in _tokens(source) if t.strip()]
    mine = [line for line in after.splitlines() if line.strip() != "MINE()"]
    assert mine == source.splitlines()


_BREAK = st.sampled_from(["", " ", "\n", "  # why\n", "\n      # own\n  "])
_BASE = st.sampled_from(["B", "a.B", "B[C, D]", "B[\n  C\n]", "( B )", "f(x, k = 1)"])


@st.composite
def _class(draw) -> str:
    """A class with its list of bases in any style, or in none."""
    bases = draw(st.lists(_BASE, max_size=3))
    bases += draw(st.sampled_from([["L" * 30], ["L" * 75], ["*more"], ["k = M"]]))
    bases += draw(st.sampled_from([[], ["n = 1"], ["**options"]]))
    comma = draw(st.sampled_from(["", ","]))
    inside = ",".join(f"{draw(_BREAK)}{base}{draw(_BREAK)}" for base in bases)
    inside += comma + draw(_BREAK)
    return f"z = 1  # z\nclass A({inside}):{draw(_COMMENT)}\n  y = 1\n"


def _comments(source: str) -> list[str]:
    return [token for token in _tokens(source) if token.startswith("#")]


@settings(deadline=None)
@given(_class())
def test_a_base_changes_nothing_else(source):
    after = based(source)
    tree = ast.parse(after)
    assert ast.unparse(tree.body[1].bases.pop(0)) == "New"
    assert ast.dump(tree) == ast.dump(ast.parse(source))
    assert _comments(after) == _comments(source)


_ITEM = st.tuples(st.sampled_from(["", "# c\n    "]), _COMMENT)


@settings(deadline=None)
@given(st.lists(_ITEM, min_size=1, max_size=4), st.sampled_from(["", "    # end\n"]))
def test_register_adds_one_line(items, end):
    entries = "".join(
        f'    {above}"K{number}": {number},{beside}\n'
        for number, (above, beside) in enumerate(items)
    )
    source = f"x = 1\ntable = {{\n{entries}{end}}}\ny = [ 2 ]\n"
    after = register(source.encode(), key="NEW", mapping="table", value="f( 1 )")
    lines = after.decode().splitlines()
    assert lines.count('    "NEW": f( 1 ),') == 1
    lines.remove('    "NEW": f( 1 ),')
    assert lines == source.splitlines()
    keys = ast.parse(after).body[1].value.keys
    assert [key.value for key in keys] == [*(f"K{n}" for n in range(len(items))), "NEW"]
