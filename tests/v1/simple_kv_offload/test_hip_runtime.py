# SPDX-License-Identifier: Apache-2.0
"""Finding the process's HIP runtime, and reading versions and errors."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
from vllm.platforms import hip_runtime

from vllm_rocm_memory.sim import hipsim

MAPS = """\
55e0-55e1 r--p 00000000 00:00 0                    [heap]
7f00-7f01 r--p 00000000 fd:01 11                   /opt/lib/libamdhip64.so.7.2.60200
7f01-7f02 r-xp 00001000 fd:01 11                   /opt/lib/libamdhip64.so.7.2.60200
7f02-7f03 r--p 00000000 fd:01 12                   /a b/lib/libamdhip64-4d3c.so
7f03-7f04 r--p 00000000 fd:01 13                   /opt/lib/libamdhip64.so.7.bak
7f04-7f05 r--p 00000000 fd:01 14                   /opt/lib/libamdhip64_static.a
7f05-7f06 rw-p 00000000 00:00 0
7f06-7f07 r--p 00000000 fd:01 15                   /opt/lib/libhsa-runtime64.so.1
"""


def _never() -> ctypes.CDLL:
    raise AssertionError("the runtime is mapped; nothing is to be opened by name")


def _python(code: str, *args: str) -> str:
    """What a fresh process prints: one that has no HIP runtime yet, and no vLLM."""
    preamble = """
    import ctypes, importlib.util, logging, sys, types
    logger = sys.modules["vllm.logger"] = types.ModuleType("vllm.logger")
    logger.init_logger = logging.getLogger
    sys.modules["vllm"] = types.ModuleType("vllm")
    spec = importlib.util.spec_from_file_location("hip_runtime", sys.argv.pop(1))
    hip_runtime = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hip_runtime)
    def never():
        raise AssertionError("nothing is to be opened by name")
    """
    program = textwrap.dedent(preamble) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", program, str(hip_runtime.__file__), *args],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_mapped_libraries_are_recognised_by_name(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text(MAPS)
    assert hip_runtime._mapped_paths(maps) == [
        "/opt/lib/libamdhip64.so.7.2.60200",
        "/a b/lib/libamdhip64-4d3c.so",
    ]
    assert hip_runtime._mapped_paths(tmp_path / "absent") == []


def test_the_mapped_instance_is_used_and_declared():
    loaded = hipsim.load()
    found = hip_runtime.get_runtime(_never)
    assert found._handle == loaded._handle
    assert len(found.hipMemcpyBatchAsync.argtypes) == 9
    assert found.hipMemcpyBatchAsync.argtypes[3] is ctypes.c_size_t
    assert found.hipGetErrorName.restype is ctypes.c_char_p
    assert hip_runtime.get_runtime(_never) is found


def test_without_a_mapped_instance_the_loader_is_asked_once(monkeypatch):
    monkeypatch.setattr(hip_runtime, "_mapped_runtime", lambda: None)
    made = []

    def load() -> SimpleNamespace:
        made.append(SimpleNamespace(hipGetErrorName=SimpleNamespace()))
        return made[-1]

    first = hip_runtime.get_runtime(load)
    assert hip_runtime.get_runtime(load) is first is made[0]
    assert len(made) == 1
    assert first.hipGetErrorName.restype is ctypes.c_char_p


def test_a_loader_that_fails_is_asked_again(monkeypatch):
    monkeypatch.setattr(hip_runtime, "_mapped_runtime", lambda: None)

    def fail() -> ctypes.CDLL:
        raise OSError("no HIP here")

    for _ in range(2):
        with pytest.raises(OSError, match="no HIP here"):
            hip_runtime.get_runtime(fail)
    runtime = SimpleNamespace()
    assert hip_runtime.get_runtime(lambda: runtime) is runtime


def test_a_library_under_any_directory_is_found(tmp_path):
    library = tmp_path / "a wheel's" / "libamdhip64-0123abcd.so.7"
    library.parent.mkdir()
    shutil.copy(hipsim.library_path(), library)
    code = """
    loaded = ctypes.CDLL(sys.argv[1])
    print(hip_runtime.get_runtime(never)._handle == loaded._handle)
    """
    assert _python(code, str(library)).split()[-1] == "True"


def test_a_file_that_is_mapped_but_not_loaded_is_no_runtime(tmp_path):
    code = """
    import mmap
    with open(sys.argv[1], "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert hip_runtime._mapped_paths(hip_runtime._MAPS) == [sys.argv[1]]
    print(hip_runtime.get_runtime(lambda: "opened by name"))
    """
    assert "opened by name" in _python(code, str(hipsim.library_path()))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_runtimes_the_first_loaded_is_used_and_both_are_named(tmp_path, order):
    libraries = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        libraries.append(tmp_path / name / "libamdhip64.so.7")
        # dlopen tells files apart by inode.
        shutil.copy(hipsim.library_path(), libraries[-1])
    first, second = (str(libraries[i]) for i in order)
    code = """
    first, second = map(ctypes.CDLL, sys.argv[1:])
    assert first._handle != second._handle
    print(hip_runtime.get_runtime(never)._handle == first._handle)
    """
    output = _python(code, first, second)
    assert "True" in output
    assert "2 HIP runtimes" in output
    assert f"using {first}" in output
    assert f"not {second}" in output


# ----- versions


@pytest.mark.parametrize(
    ("version", "numbers", "text"),
    [
        (0, (0, 0), "unknown"),
        (70_125_424, (7, 1), "7.1.25424"),
        (70_200_000, (7, 2), "7.2.0"),
        (71_626_361, (7, 16), "7.16.26361"),
        (100_100_000, (10, 1), "10.1.0"),
    ],
)
def test_version_numbers(version, numbers, text):
    assert hip_runtime.major_minor(version) == numbers
    assert hip_runtime.format_version(version) == text


@pytest.mark.parametrize(
    ("version", "expected"),
    [(0, False), (71_599_999, False), (71_600_000, True), (80_000_000, True)],
)
def test_gates(version, expected):
    assert hip_runtime.at_least(version, 7, 16) is expected


@pytest.mark.parametrize(
    ("profile", "numbers"), [("7.2.3", (7, 2)), ("7.15", (7, 15)), ("7.16", (7, 16))]
)
def test_the_version_of_the_runtime(profile, numbers):
    hipsim.reset(profile)
    version = hip_runtime.runtime_version(hip_runtime.get_runtime(_never))
    assert hip_runtime.major_minor(version) == numbers


def test_a_version_that_cannot_be_read_is_unknown():
    runtime = hip_runtime.get_runtime(_never)
    hipsim.reset()
    hipsim.fail("hipRuntimeGetVersion", 1, 100)
    assert hip_runtime.runtime_version(runtime) == 0
    assert hip_runtime.runtime_version(SimpleNamespace()) == 0


@pytest.mark.parametrize(
    ("content", "version"),
    [
        ("6.10.5\n", (6, 10, 5)),
        ("6.16.6\n", (6, 16, 6)),
        ("6.19.14.31400000\n", (6, 19, 14, 31_400_000)),
        ("6.14.14-rc1\n", (6, 14, 14)),
        ("", None),
        ("\n", None),
        ("in-tree\n", None),
        (None, None),
    ],
)
def test_driver_version(tmp_path, content, version):
    path = tmp_path / "version"
    if content is not None:
        path.write_text(content)
    assert hip_runtime.driver_version(path) == version


def test_driver_versions_compare_as_numbers():
    assert (6, 10, 5) < (6, 14) < (6, 14, 14) < (6, 19, 14, 31_400_000)


# ----- errors


def test_errors_have_a_name():
    runtime = hip_runtime.get_runtime(_never)
    assert hip_runtime.error_name(runtime, 801) == "hipErrorNotSupported"


def test_a_runtime_without_error_names_still_gives_a_text():
    assert hip_runtime.error_name(SimpleNamespace(), 801) == "unknown error"
    runtime = SimpleNamespace(hipGetErrorName=lambda error: None)
    assert hip_runtime.error_name(runtime, 801) == "unknown error"
