# SPDX-License-Identifier: Apache-2.0
"""Our declarations of HIP and CUDA against abi/*.toml, and those against the vendors'.

The vendors' headers are used where they are found; no test needs a GPU.
"""

import ctypes
import os
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

SOURCES = Path(__file__).parents[2] / "csrc" / "hipsim"
DATA = Path(__file__).parent / "abi"

Build = Callable[..., Path]
Facts = dict[str, int]


@dataclass(frozen=True)
class Abi:
    """What is declared in bridge/`name`_abi.h and bridge/`name`_api.h, and its data."""

    name: str

    @cached_property
    def data(self) -> dict[str, Any]:
        return tomllib.loads((DATA / f"{self.name}.toml").read_text())

    def include(self, kind: str) -> str:
        return f'#include "bridge/{self.name}_{kind}.h"\n'

    def text(self, kind: str) -> str:
        """The header without its comments and directives other than definitions."""
        text = (SOURCES / "bridge" / f"{self.name}_{kind}.h").read_text()
        return re.sub(r"//.*|#(?!define).*|#define HIPSIM_EXPORT.*", "", text)

    @cached_property
    def prototypes(self) -> dict[str, str]:
        """Each function's declaration, without linkage."""
        declarations = re.findall(r"HIPSIM_EXPORT\s([^;]*;)", self.text("api"))
        return {
            re.findall(r"\w+(?=\()", each)[0]: " ".join(each.split())
            for each in declarations
        }

    def constants(self) -> Facts:
        """Every constant's value, enumerators and others."""
        values = dict(self.data["constants"]["values"])
        for enum in self.data["enums"].values():
            values |= enum["values"]
        return values

    def since(self) -> dict[str, tuple[int, int]]:
        """The constants that older headers lack, and the release that has them."""
        marks: dict[str, str] = {}
        for enum in self.data["enums"].values():
            marks |= enum.get("since", {})
        return {name: version(release) for name, release in marks.items()}

    def facts(self, release: tuple[int, int] | None = None) -> Facts:
        """C++ expressions and their values: what a header of `release` must yield."""
        facts = {f"sizeof({name})": size for name, size in self.data["types"].items()}
        for name, enum in self.data["enums"].items():
            facts[f"sizeof({name})"] = enum["size"]
        for name, struct in self.data["structs"].items():
            facts[f"sizeof({name})"] = struct["size"]
            facts[f"alignof({name})"] = struct["align"]
            for path, offset in struct["offsets"].items():
                facts[f"offsetof({name}, {path})"] = offset
        since = self.since()
        for name, value in self.constants().items():
            if release is None or since.get(name, release) <= release:
                facts[name] = value
        return facts


def version(release: str) -> tuple[int, int]:
    major, minor = release.split(".")
    return int(major), int(minor)


ABIS = (Abi("hip"), Abi("cuda"))
HIP, CUDA = ABIS
each_abi = pytest.mark.parametrize("abi", ABIS, ids=lambda abi: abi.name)


# --- the vendors' headers ----------------------------------------------------------


@dataclass(frozen=True)
class Vendor:
    """Where the headers of an ABI may be, and what it takes to use them."""

    abi: Abi
    header: str
    version_header: str
    version_pattern: str
    oldest: tuple[int, int]
    variable: str
    package: str
    package_folder: str
    installed: str
    flags: tuple[str, ...] = ()

    def release(self, folder: Path) -> tuple[int, int]:
        found = re.search(
            self.version_pattern, (folder / self.version_header).read_text()
        )
        assert found, f"{folder / self.version_header} has no version"
        return int(found[1]), int(found[2])

    def places(self) -> Iterator[Path]:
        with suppress(PackageNotFoundError):
            package = distribution(self.package)
            yield Path(str(package.locate_file(self.package_folder)))
        yield Path(self.installed)

    def include_dir(self) -> Path:
        """The folder of the headers; skips the test when there are none."""
        if chosen := os.environ.get(self.variable):
            assert self.release(Path(chosen)) >= self.oldest
            return Path(chosen)
        for folder in self.places():
            if (folder / self.header).exists() and self.release(folder) >= self.oldest:
                return folder
        oldest = ".".join(map(str, self.oldest))
        pytest.skip(
            f"no {self.header} of {oldest} or newer in ${self.variable}, "
            f"the package {self.package} or {self.installed}"
        )


HIP_HEADERS = Vendor(
    abi=HIP,
    header="hip/hip_runtime_api.h",
    version_header="hip/hip_version.h",
    version_pattern=r"HIP_VERSION_MAJOR (\d+)\s+#define HIP_VERSION_MINOR (\d+)",
    oldest=(7, 1),
    variable="HIP_INCLUDE_DIR",
    package="triton",
    package_folder="triton/backends/amd/include",
    installed="/opt/rocm/include",
    flags=("-D__HIP_PLATFORM_AMD__",),
)
CUDA_HEADERS = Vendor(
    abi=CUDA,
    header="cuda.h",
    version_header="cuda.h",
    version_pattern=r"#define CUDA_VERSION (\d+)(\d\d)\d\b",
    oldest=(13, 0),
    variable="CUDA_INCLUDE_DIR",
    package="nvidia-cuda-runtime",
    package_folder="nvidia/cu13/include",
    installed="/usr/local/cuda/include",
)
each_vendor = pytest.mark.parametrize(
    "vendor", (HIP_HEADERS, CUDA_HEADERS), ids=lambda vendor: vendor.abi.name
)


# --- programs ----------------------------------------------------------------------


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Compiles a program; a compiler's error is the test's failure."""

    def build(source: str, *flags: str) -> Path:
        path = tmp_path / "program.cpp"
        path.write_text(source)
        command = ["g++", "-std=c++17", "-w", f"-I{SOURCES}", *flags, str(path)]
        result = subprocess.run(
            [*command, "-o", str(tmp_path / "program")],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stderr
        return tmp_path / "program"

    return build


def measure(build: Build, prologue: str, facts: Facts, *flags: str) -> Facts:
    """The value that each expression has after `prologue`."""
    # the cast takes enumerators and handles too
    lines = "\n".join(
        f'  std::printf("%s = %lld\\n", "{each}", (long long)({each}));'
        for each in facts
    )
    source = f"""
#include <cstddef>
#include <cstdint>
#include <cstdio>
{prologue}
int main() {{
{lines}
}}
"""
    program = build(source, *flags)
    output = subprocess.run(
        [program], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    pairs = (line.rsplit(" = ", 1) for line in output.splitlines())
    return {what: int(value) for what, value in pairs}


def differences(data: Facts, measured: Facts) -> list[str]:
    return [
        f"{what}: the data says {value}, the header {measured[what]}"
        for what, value in data.items()
        if measured[what] != value
    ]


def declare_again(
    build: Build, first: str, names: Iterable[str], second: Iterable[str], *flags: str
) -> None:
    """Compiles `first` and then the declarations `second`, which have no linkage.

    Two C functions of one name must have one type, so the compiler compares them.
    Each of `names` must be declared by `first` already.
    """
    known = "\n".join(f"using ::{name};" for name in names)
    again = "\n".join(f'extern "C" {declaration}' for declaration in second)
    source = f"{first}\nnamespace known {{\n{known}\n}}\n{again}\n"
    build(source, *flags, "-fsyntax-only")


# --- our declarations --------------------------------------------------------------


def fields(body: str) -> Iterator[str]:
    """The fields of a struct's text: anonymous members' as if they were its own."""
    body = re.sub(r"\[\w+\]", "", body)
    nested = r"(?:struct|union)\s*\{([^{}]*)\}\s*(\w*)\s*;"
    for inner, name in re.findall(nested, body):
        if name:
            yield name
        for each in fields(inner):
            yield f"{name}.{each}" if name else each
    for declaration in re.findall(r"([^;{}]+);", re.sub(nested, "", body)):
        first, *more = declaration.split(",")
        yield re.findall(r"\w+", first)[-1]
        yield from (each.strip() for each in more)


@dataclass
class Declared:
    """The names in a header of ours."""

    enums: dict[str, set[str]] = field(default_factory=dict)
    structs: dict[str, set[str]] = field(default_factory=dict)
    types: set[str] = field(default_factory=set)
    constants: set[str] = field(default_factory=set)


def parse(text: str) -> Declared:
    declared = Declared()
    for name, body in re.findall(r"^enum (\w+) : \w+ \{(.*?)^\};", text, re.M | re.S):
        declared.enums[name] = set(re.findall(r"(\w+) = ", body))
    for name, body in re.findall(r"^struct (\w+) \{(.*?)^\};", text, re.M | re.S):
        declared.structs[name] = set(fields(body))
    declared.types = set(re.findall(r"^using (\w+) = ", text, re.M))
    declared.constants = set(
        re.findall(r"^(?:constexpr \w+|#define) (\w+)", text, re.M)
    )
    return declared


def test_parser_sees_every_kind_of_declaration() -> None:
    text = """
enum e : int {
  one = 1,
};
using t = struct s*;
constexpr unsigned c = 2;
#define m (3)
struct s {
  t a, b;
  union {
    int c;
    char d[4];
  };
  struct {
    e f;
  } g;
  const void* h;
};
"""
    assert parse(text) == Declared(
        enums={"e": {"one"}},
        structs={"s": {"a", "b", "c", "d", "g", "g.f", "h"}},
        types={"t"},
        constants={"c", "m"},
    )


@each_abi
def test_data_has_what_the_header_declares(abi: Abi) -> None:
    declared = parse(abi.text("abi"))
    data = abi.data
    assert declared.enums == {
        name: set(enum["values"]) for name, enum in data["enums"].items()
    }
    assert declared.structs == {
        name: set(struct["offsets"]) for name, struct in data["structs"].items()
    }
    assert declared.types == set(data["types"])
    assert declared.constants == set(data["constants"]["values"])


@each_abi
def test_parser_misses_no_declaration(abi: Abi) -> None:
    text = abi.text("abi")
    left = re.sub(r"^(enum|struct) \w+ .*?^\};", "", text, flags=re.M | re.S)
    left = re.sub(r"^using [^;]*;|^constexpr [^;]*;|^#define .*", "", left, flags=re.M)
    left = re.sub(r"static_assert\([^;]*\);", "", left)
    assert left.split() == []


@each_abi
def test_every_prototype_is_seen(abi: Abi) -> None:
    assert len(abi.prototypes) == abi.text("api").count("HIPSIM_EXPORT") > 60
    leftovers = re.sub(r"HIPSIM_EXPORT\s[^;]*;", "", abi.text("api"))
    assert leftovers.split() == []


@each_abi
def test_our_header_is_as_the_data_says(abi: Abi, build: Build) -> None:
    facts = abi.facts()
    assert differences(facts, measure(build, abi.include("abi"), facts)) == []


@each_abi
def test_wrong_data_is_named(abi: Abi, build: Build) -> None:
    location = {"hip": "hipMemLocation", "cuda": "CUmemLocation"}[abi.name]
    success = {"hip": "hipSuccess", "cuda": "CUDA_SUCCESS"}[abi.name]
    wrong = {f"sizeof({location})": 12, f"offsetof({location}, id)": 8, success: 5}
    assert abi.facts().keys() > wrong.keys()
    assert differences(wrong, measure(build, abi.include("abi"), wrong)) == [
        f"sizeof({location}): the data says 12, the header 8",
        f"offsetof({location}, id): the data says 8, the header 4",
        f"{success}: the data says 5, the header 0",
    ]


# --- the vendors' declarations -----------------------------------------------------


@each_vendor
def test_vendors_header_is_as_the_data_says(vendor: Vendor, build: Build) -> None:
    folder = vendor.include_dir()
    facts = vendor.abi.facts(vendor.release(folder))
    prologue = f"#include <{vendor.header}>"
    flags = (f"-isystem{folder}", *vendor.flags)
    assert differences(facts, measure(build, prologue, facts, *flags)) == []


@each_vendor
def test_data_names_the_right_header(vendor: Vendor) -> None:
    folder = vendor.include_dir()
    data = vendor.abi.data
    for name, group in (data["enums"] | data["structs"]).items():
        text = (folder / group["header"]).read_text()
        assert re.search(rf"\b{name}(_v\d)?;", text), f"{name} in {group['header']}"
    text = (folder / data["constants"]["header"]).read_text()
    defined = set(re.findall(r"^#define (\w+)", text, re.M))
    assert data["constants"]["values"].keys() <= defined


@each_vendor
def test_vendors_header_declares_our_prototypes(vendor: Vendor, build: Build) -> None:
    folder = vendor.include_dir()
    older = vendor.abi.data["prototypes"]["not_in_header"]
    assert vendor.abi.prototypes.keys() > set(older)
    prototypes = {n: p for n, p in vendor.abi.prototypes.items() if n not in older}
    declare_again(
        build,
        f"#include <{vendor.header}>",
        prototypes.keys(),
        prototypes.values(),
        f"-isystem{folder}",
        *vendor.flags,
    )


def test_older_symbols_of_cuda_are_meant() -> None:
    """cuda.h calls a newer symbol by the older one's name; we have few older ones."""
    text = (CUDA_HEADERS.include_dir() / CUDA_HEADERS.header).read_text()
    renamed = re.findall(r"#define (cu\w+) +(?:__CUDA_API_PT\w+\()?\w+_v\d\b", text)
    older = set(CUDA.data["prototypes"]["older_symbols"])
    assert CUDA.prototypes.keys() & set(renamed) == older


@each_abi
@pytest.mark.parametrize("wrong", ["int bytes", "size_t bytes, int more"])
def test_wrong_prototype_is_refused(abi: Abi, wrong: str, build: Build) -> None:
    name = {"hip": "hipMemUnmap", "cuda": "cuMemUnmap"}[abi.name]
    right = abi.prototypes[name]
    declare_again(build, abi.include("api"), [name], [right])
    with pytest.raises(AssertionError, match=f"conflicting declaration .*{name}"):
        tampered = right.replace("size_t bytes", wrong)
        declare_again(build, abi.include("api"), [name], [tampered])


@each_abi
def test_undeclared_function_is_refused(abi: Abi, build: Build) -> None:
    with pytest.raises(AssertionError, match="MemUnmapAll"):
        declare_again(build, abi.include("api"), ["MemUnmapAll"], [])


# --- HIP 7.15, by AMD's Python bindings --------------------------------------------


@pytest.fixture
def bindings() -> Any:
    """rocm.bindings.hip; importing it loads no HIP runtime."""
    return pytest.importorskip(
        "rocm.bindings.hip",
        reason="the package rocm-bindings-hip (HIP 7.15) is not installed",
        exc_type=ImportError,
    )


def bound_constants(bindings: Any) -> Iterator[tuple[str, int]]:
    for enum in HIP.data["enums"]:
        for name, member in getattr(bindings, enum).__members__.items():
            yield name, int(member.value)
    for name in HIP.data["constants"]["values"]:
        if hasattr(bindings, name):
            yield name, int(getattr(bindings, name))


def test_bindings_have_the_values_of_the_data(bindings: Any) -> None:
    bound = dict(bound_constants(bindings))
    absent = set(HIP.data["bindings"]["absent"])
    expected = {n: v for n, v in HIP.constants().items() if n not in absent}
    assert expected.keys() <= bound.keys()
    assert [
        f"{name}: the data says {value}, the bindings {bound[name]}"
        for name, value in expected.items()
        if (bound[name] - value) % 2**32 != 0
    ] == []


def test_bindings_have_the_sizes_of_the_data(bindings: Any) -> None:
    sizes = {n: s["size"] for n, s in HIP.data["structs"].items()}
    bound = {name: getattr(bindings, name)().c_sizeof() for name in sizes}
    assert bound == sizes


def test_bindings_declare_our_prototypes(bindings: Any, build: Build) -> None:
    text = Path(bindings.__file__).with_name("cyhip.pxd").read_text()
    found = re.findall(r"^cdef ([\w *]*?\b(\w+)\(.*\)) (?:except|noexcept)", text, re.M)
    theirs = {name: f"{each};" for each, name in found if name in HIP.prototypes}
    assert theirs.keys() == HIP.prototypes.keys()
    first = HIP.include("api") + "using hipIpcMemHandle_st = hipIpcMemHandle_t;"
    declare_again(build, first, theirs.keys(), theirs.values())


# --- errors ------------------------------------------------------------------------


@pytest.fixture
def errors(build: Build, request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The functions that describe the errors of the ABI, alone in a library."""
    source = SOURCES / "bridge" / f"{request.param}_errors.cpp"
    lib = ctypes.CDLL(str(build(f'#include "{source}"\n', "-shared", "-fPIC")))
    if request.param == "hip":
        lib.hipGetErrorName.restype = ctypes.c_char_p
        lib.hipGetErrorString.restype = ctypes.c_char_p
    return lib


hip_errors = pytest.mark.parametrize("errors", ["hip"], indirect=True)
cuda_errors = pytest.mark.parametrize("errors", ["cuda"], indirect=True)


def ask_cuda(errors: ctypes.CDLL, function: str, number: int) -> tuple[int, Any]:
    text = ctypes.c_char_p(b"untouched")
    return getattr(errors, function)(number, ctypes.byref(text)), text.value


@hip_errors
def test_every_hip_error_has_a_name_and_a_text(errors: ctypes.CDLL) -> None:
    for name, number in HIP.data["enums"]["hipError_t"]["values"].items():
        assert errors.hipGetErrorName(number).decode() == name
        text = errors.hipGetErrorString(number).decode()
        assert (text == "unknown error") == (name == "hipErrorUnknown"), name


@cuda_errors
def test_every_cuda_error_has_a_name_and_a_text(errors: ctypes.CDLL) -> None:
    for name, number in CUDA.data["enums"]["CUresult"]["values"].items():
        assert ask_cuda(errors, "cuGetErrorName", number) == (0, name.encode())
        result, text = ask_cuda(errors, "cuGetErrorString", number)
        assert result == 0
        assert (text == b"unknown error") == (name == "CUDA_ERROR_UNKNOWN"), name


@cuda_errors
@pytest.mark.parametrize("function", ["cuGetErrorName", "cuGetErrorString"])
def test_unknown_cuda_error_has_no_text(errors: ctypes.CDLL, function: str) -> None:
    assert ask_cuda(errors, function, 123456) == (1, None)
    assert getattr(errors, function)(0, None) == 1


@cuda_errors
def test_cuda_texts_are_those_of_cudas_runtime(errors: ctypes.CDLL) -> None:
    library = CUDA_HEADERS.include_dir().parent / "lib" / "libcudart.so.13"
    if not library.exists():
        pytest.skip(f"no {library.name} beside the headers")
    cudart = ctypes.CDLL(str(library))
    cudart.cudaGetErrorString.restype = ctypes.c_char_p
    for number in CUDA.data["enums"]["CUresult"]["values"].values():
        text = cudart.cudaGetErrorString(number)
        assert ask_cuda(errors, "cuGetErrorString", number) == (0, text)
