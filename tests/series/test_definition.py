# SPDX-License-Identifier: Apache-2.0
"""`series.toml` says all that it must, and nothing that is not so."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_rocm_memory.series import SeriesError, definition
from vllm_rocm_memory.series.definition import Add, Replace, load

REPOSITORY = Path(__file__).parents[2]


def test_the_series_of_the_project_is_well_formed():
    series = load()
    assert [patch.name for patch in series.patches] == ["kv-copy-engine"]
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
        ('function = "User.greet"\n', "", "step 3: field 'function' is missing"),
        ('operation = "replace"', 'operation = "drop"', "'drop', not one of replace"),
        ('operation = "replace"', 'operation = "insert-at-end"', "takes no anchor"),
        ('anchor = "shout(name)"\n', "", "step 3: field 'anchor': replace needs an"),
        ('anchor = "shout(name)"', 'anchor = "name"', "'anchor' is a bare name"),
        ('anchor = "shout(name)"', 'anchor = "a = 1"', "'anchor' does not parse as an"),
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


def test_a_register_step_needs_a_place(small):
    text = small.definition.read_text()
    step = text[text.index('mapping = "env') :]
    small.definition.write_text(text.replace(step, ""))
    with pytest.raises(SeriesError, match="needs field 'mapping' or 'set'"):
        load(small.definition, small.series.files)


def test_a_third_edited_function_asks_for_replacement(small):
    step = '[[patch.step]]\nkind = "edit"\nfile = "vllm/pkg/user.py"\n'
    step += 'function = "User.third"\noperation = "insert-at-start"\ntext = "x()"\n'
    text = small.definition.read_text()
    small.definition.write_text(text + step)
    with pytest.raises(SeriesError) as error:
        load(small.definition, small.series.files)
    assert "3 functions of vllm/pkg/user.py are edited" in str(error.value)
    assert "replace it instead" in str(error.value)


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
