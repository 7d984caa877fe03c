# SPDX-License-Identifier: Apache-2.0
"""`series.toml` says all that it must, and nothing that is not so."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_rocm_memory.series import SeriesError, definition
from vllm_rocm_memory.series.definition import (
    MAX_EDITED_PLACES,
    Add,
    AddBase,
    Edit,
    Replace,
    load,
)

REPOSITORY = Path(__file__).parents[2]


def test_the_series_of_the_project_is_well_formed():
    series = load()
    names = [patch.name for patch in series.patches]
    assert names == [
        *("kv-copy-engine", "kv-transfer-failures"),
        *("cumem-sleep", "cumem-graph-pool"),
        *("sleep-report", "aiter-capture-fence"),
    ]
    assert series.files == REPOSITORY


def test_every_file_of_ours_is_in_a_step():
    series = load()
    owned = {
        step.file
        for patch in series.patches
        for step in patch.steps
        if isinstance(step, Add | Replace)
    }
    present = {
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / "vllm").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert present == owned


def test_the_sources_of_compiled_modules_are_there():
    built = [step for patch in load().patches for step in patch.built]
    assert [step.module for step in built] == [
        "vllm/v1/simple_kv_offload/pitched_copies",
        "vllm/cumem_allocator",
    ]
    for source in (path for step in built for path in step.sources):
        assert (REPOSITORY / source).exists()


def test_our_vllm_does_not_shadow_the_installed_one():
    assert not (REPOSITORY / "vllm" / "__init__.py").exists()


def without(text: str, field: str) -> str:
    """The first patch loses a field."""
    return re.sub(rf"^{field} = .*\n", "", text, count=1, flags=re.MULTILINE)


REQUIRED = ("title", "why", "how", "upstream", "drop-when", "upstream-has")


@pytest.mark.parametrize("field", REQUIRED)
def test_a_patch_lacks_nothing(small, field):
    text = small.definition.read_text()
    small.definition.write_text(without(text, field))
    with pytest.raises(SeriesError) as error:
        load(small.definition, small.series.files)
    assert str(error.value) == f"series.toml: patch first: field '{field}' is missing"


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('why = "Nobody', 'why = " " #', "patch first: field 'why' is empty"),
        ('why = "Nobody hears it."', "why = 1", "first: field 'why' is not a str"),
        ('why = "Nobody', 'y = 1\nwhy = "Nobody', "first: unknown field 'y'"),
        ('name = "first"', 'name = "First!"', "First!: field 'name' is not lower-case"),
        ('name = "first"', "", "patch number 1: field 'name' is missing"),
        ('name = "second"', 'name = "first"', "first: field 'name' is used twice"),
        ('title = "Shout', 'title = "[ROCm] Shout', "starts with a bracket"),
        ('title = "Shout louder"', 'title = "a\\nb"', "has more than one line"),
        ("https://github", "github", "holds 'github.com/vllm-project/vllm', not an"),
        ("defines", "names", "'upstream-has': unknown field 'names'"),
        ("pkg/extra.py", "pkg/none.py", "step 1: field 'file' names vllm/pkg/none.py"),
        ("vllm/pkg/extra.py", "setup.py", "'setup.py', not a Python file below vllm/"),
        ("vllm/pkg/extra", "vllm/../extra", "not a Python file below vllm/"),
        ('kind = "add"', 'kind = "copy"', "step 1: field 'kind' is 'copy', not one"),
        ('kind = "add"\n', "", "step 1: field 'kind' is None, not one of add, replace"),
        ('"vllm/pkg/owned.py"\n', '"vllm/pkg/extra.py"\n', "is added or replaced alr"),
        ('function = "User.greet"\n', "", "step 3: needs field 'function' or 'class'"),
        ('function = "User.greet"', 'function = ""', "field 'function' is empty"),
        (
            'function = "User.greet"',
            'function = "User.greet"\nclass = "User"',
            "step 3: fields 'function' and 'class' exclude each other",
        ),
        ('function = "U', 'class = "U', "'operation': replace goes with field 'functi"),
        ('operation = "replace"', 'operation = "add-base"', "goes with field 'class'"),
        ('operation = "replace"', 'operation = "drop"', "'drop', not one of replace"),
        ('operation = "replace"', 'operation = "insert-at-end"', "takes no anchor"),
        ('anchor = "shout(name)"\n', "", "step 3: field 'anchor': replace needs an"),
        ('anchor = "shout(name)"', 'anchor = "name"', "'anchor' is a bare name"),
        ('anchor = "shout(name)"', 'anchor = "a = 1"', "'anchor' does not parse as an"),
        ('anchor = "s', 'unless = "a = 1"\nanchor = "s', "'unless' does not parse as"),
        ('anchor = "s', 'unless = "s"\nanchor = "s', "'unless' is a bare name"),
        ('anchor = "s', 'unless = ""\nanchor = "s', "field 'unless' is empty"),
        ('anchor = "r', 'unless = "(x"\nanchor = "r', "'unless' does not parse as an"),
        ('anchor = "r', 'unless = "x"\nanchor = "r', "'unless' is a bare name"),
        ('kind = "add"\n', 'kind = "add"\nunless = "f()"\n', "unknown field 'unless'"),
        ('text = "word', 'text = "(', "field 'text' does not parse as statements"),
        ('["from vllm.pkg.extra import check"]', '["import x"]', "holds 'import x'"),
        ('["from vllm.pkg.extra import check"]', "[]", "field 'imports' is empty"),
        ('value = "lambda: 2"\n', "", "fields 'mapping' and 'value' go together"),
        ('value = "lambda: 2"', 'value = "a; b"', "'value' does not parse as an"),
        (
            'mapping = "environment_variables"\nvalue = "lambda: 2"\n',
            "",
            "field 'comment' needs field 'mapping'",
        ),
        ('"compile_factors.ignored_factors"', '"ignored"', "not 'function.variable'"),
        ("[[patch]]", "x = 1\n[[patch]]", "[[patch]] tables and nothing else"),
        ("[[patch]]", "[[patch", "cannot be read"),
    ],
)
def test_what_is_wrong_is_named(small, old, new, sentence):
    text = small.definition.read_text()
    assert old in text
    small.definition.write_text(text.replace(old, new, 1))
    with pytest.raises(SeriesError) as error:
        load(small.definition, small.series.files)
    assert sentence in str(error.value)


@pytest.mark.parametrize("value", ['"first"', "3", '[["first"]]', "[]"])
def test_what_a_patch_needs_is_a_list_of_names(small, value):
    name = 'name = "second"\n'
    text = small.definition.read_text().replace(name, f"{name}needs = {value}\n")
    small.definition.write_text(text)
    with pytest.raises(SeriesError, match="patch second: field 'needs'"):
        load(small.definition, small.series.files)


@pytest.mark.parametrize("needed", ["second", "third"])
def test_a_patch_needs_only_what_comes_before_it(small, needed):
    name = 'name = "second"\n'
    text = small.definition.read_text().replace(name, f'{name}needs = ["{needed}"]\n')
    small.definition.write_text(text)
    words = f"patch second: field 'needs' holds '{needed}', which is no patch before"
    with pytest.raises(SeriesError, match=words):
        load(small.definition, small.series.files)


def test_a_register_step_needs_a_place(small):
    text = small.definition.read_text()
    step = text[text.index('mapping = "env') :]
    small.definition.write_text(text.replace(step, ""))
    with pytest.raises(SeriesError, match="needs field 'mapping' or 'set'"):
        load(small.definition, small.series.files)


CLASS_STEP = """
[[patch.step]]
kind = "edit"
file = "vllm/pkg/other.py"
class = "Other"
operation = "add-base"
text = "Of[int]"
imports = ["from vllm.pkg.extra import Of"]
"""
FUNCTION_STEP = """
[[patch.step]]
kind = "edit"
file = "vllm/pkg/other.py"
function = "Other"
operation = "insert-at-start"
text = "x()"
unless = "y()"
"""


def test_an_edit_of_a_class_or_of_a_function(small):
    text = small.definition.read_text()
    small.definition.write_text(text + CLASS_STEP + FUNCTION_STEP)
    _, second = load(small.definition, small.series.files).patches
    assert second.steps[-2:] == (
        AddBase(
            "vllm/pkg/other.py", "Other", "Of[int]", ("from vllm.pkg.extra import Of",)
        ),
        Edit("vllm/pkg/other.py", "Other", "insert-at-start", "x()", None, (), "y()"),
    )


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('class = "Other"\n', "", "step 6: needs field 'function' or 'class'"),
        ('"Other"', '""', "field 'class' is empty"),
        ('"Other"', "[]", "field 'class' is not a str"),
        ('"add-base"', '"insert-at-end"', "insert-at-end goes with field 'function'"),
        ('"add-base"', '"add"', "field 'operation' is 'add', not one of replace, ins"),
        ("text", 'anchor = "A()"\ntext', "field 'anchor': add-base takes no anchor"),
        ("text", 'unless = "a()"\ntext', "'unless' goes with field 'function'"),
        ('"Of[int]"', '"pass"', "field 'text' does not parse as an expression"),
        ('"Of[int]"', '"*Of"', "field 'text' does not parse as an expression"),
        ('"Of[int]"', '"metaclass=M"', "field 'text' does not parse as an expressi"),
        ('"Of[int]"', '"A, B"', "field 'text' is a tuple, not one base"),
        ('"Of[int]"', '"A,"', "field 'text' is a tuple, not one base"),
        ('text = "Of[int]"\n', "", "step 6: field 'text' is missing"),
        ("import Of", "import Of, X", "'imports' holds 'from vllm.pkg.extra import O"),
    ],
)
def test_what_is_wrong_with_the_edit_of_a_class_is_named(small, old, new, sentence):
    assert old in CLASS_STEP
    text = small.definition.read_text() + CLASS_STEP.replace(old, new, 1)
    small.definition.write_text(text)
    with pytest.raises(SeriesError) as error:
        load(small.definition, small.series.files)
    assert sentence in str(error.value)
    assert "series.toml: patch second: step 6: " in str(error.value)


@pytest.mark.parametrize("step", [CLASS_STEP, FUNCTION_STEP])
def test_one_edited_place_too_many_asks_for_replacement(small, step):
    names = ["User.greet", "User.part", "f3", "f4", "f5"][:MAX_EDITED_PLACES]
    text = small.definition.read_text()
    for name in names[2:]:
        text += FUNCTION_STEP.replace("Other", name).replace("other", "user")
    small.definition.write_text(text)
    load(small.definition, small.series.files)
    small.definition.write_text(text + step.replace("other", "user"))
    with pytest.raises(SeriesError) as error:
        load(small.definition, small.series.files)
    places = sorted([*names, "class Other" if "class" in step else "Other"])
    assert str(error.value) == (
        f"series.toml: {MAX_EDITED_PLACES + 1} places of vllm/pkg/user.py are edited "
        f"({', '.join(places)}): replace it instead"
    )


def test_a_place_that_is_edited_twice_counts_once(small):
    text = small.definition.read_text()
    steps = (MAX_EDITED_PLACES + 1) * CLASS_STEP
    small.definition.write_text(text + steps)
    _, second = load(small.definition, small.series.files).patches
    assert len(second.steps) == 5 + MAX_EDITED_PLACES + 1


def test_an_expression_may_be_a_tuple_where_it_is_no_base(small):
    text = small.definition.read_text()
    small.definition.write_text(text.replace("shout(check(name))", "name, name"))
    assert load(small.definition, small.series.files).patches


def test_every_field_of_an_edit_is_in_the_fingerprint(small):
    def fingerprint(step: str) -> str:
        small.definition.write_text(text + step)
        series = load(small.definition, small.series.files)
        return series.fingerprint(series.patches[1])

    text = small.definition.read_text()
    forms = [
        *(CLASS_STEP, FUNCTION_STEP, FUNCTION_STEP.replace("y()", "z()")),
        *(CLASS_STEP.replace(old, "Another") for old in ("Other", "Of[int]")),
        CLASS_STEP.replace("import Of", "import One"),
    ]
    assert len({fingerprint(step) for step in ("", *forms)}) == len(forms) + 1


def test_the_fingerprint_follows_steps_and_files(small):
    first, second = small.series.patches
    before = small.series.fingerprint(first), small.series.fingerprint(second)
    owned = small.series.files / "vllm" / "pkg" / "owned.py"
    owned.write_text(f"{owned.read_text()}# more\n")
    text = small.definition.read_text()
    small.definition.write_text(text.replace("lambda: 2", "lambda: 3"))
    series = load(small.definition, small.series.files)
    after = tuple(series.fingerprint(patch) for patch in series.patches)
    assert after[0] != before[0]
    assert after[1] != before[1]


def test_files_come_from_the_package_when_it_carries_them(tmp_path, monkeypatch):
    installed = tmp_path / "site-packages" / "vllm_rocm_memory" / "series"
    (installed / "files" / "vllm").mkdir(parents=True)
    # Beside us lies the target, which must not be taken for the series.
    (tmp_path / "site-packages" / "vllm").mkdir()
    monkeypatch.setattr(definition, "DEFINITION", installed / "series.toml")
    assert definition.files_folder() == installed / "files"
    (installed / "files" / "vllm").rmdir()
    with pytest.raises(SeriesError, match="reinstall vllm-rocm-memory"):
        definition.files_folder()


def test_status_loads_nothing_heavy():
    # `make serve` asks for the status each time.
    code = (
        "import sys\n"
        "from vllm_rocm_memory import cli\n"
        "cli.make_parser(); cli.load()\n"
        "print([n for n in ('libcst', 'torch', 'vllm', 'rich') if n in sys.modules])"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert process.stdout == "[]\n"
