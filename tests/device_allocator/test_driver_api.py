# SPDX-License-Identifier: Apache-2.0
"""The driver table: what it declares, and which driver a process gets.

The declarations are compared with those of the simulators, which tests/hipsim compares
with the vendors', and with the vendors' own where their headers are found.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vllm_rocm_memory.sim import cudasim, hipsim

from ..hipsim.test_abi_layout import CUDA_HEADERS, HIP_HEADERS, Vendor
from .native.module import module_path

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
DEADLINE = 60  # seconds, for whatever a process is waited for


# --- declarations ------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """What driver_abi.h declares of a vendor, and how the vendor calls it."""

    namespace: str
    macros: tuple[str, str]
    structs: dict[str, str]
    constants: dict[str, str]
    vendor: Vendor

    def text(self) -> str:
        """The part of driver_abi.h that is about the vendor."""
        text = (CSRC / "gpu" / "driver_abi.h").read_text()
        found = re.search(
            rf"namespace gpu::{self.namespace} \{{(.*)\}}  // namespace gpu::"
            rf"{self.namespace}",
            text,
            re.S,
        )
        assert found
        return found[1]

    def fields(self) -> Iterator[tuple[str, str]]:
        """Each struct and field; a field of a nested struct with its path."""
        for name, body in re.findall(
            r"^struct (\w+) \{\n(.*?)^\};", self.text(), re.M | re.S
        ):
            for inner, path in re.findall(r"struct \{(.*?)\} (\w+);", body, re.S):
                for field in re.findall(r"(\w+)(?:\[\d+\])?;", inner):
                    yield name, f"{path}.{field}"
            outside = re.sub(r"struct \{.*?\}", "struct", body, flags=re.S)
            for field in re.findall(r"(\w+)(?:\[\d+\])?;", outside):
                yield name, field


HIP = Table(
    "hip",
    ("GPU_HIP_FUNCTIONS", "GPU_HIP_OPTIONAL_FUNCTIONS"),
    {
        "MemLocation": "hipMemLocation",
        "MemAllocationProp": "hipMemAllocationProp",
        "MemAccessDesc": "hipMemAccessDesc",
        "Position": "hipPos",
        "Extent": "hipExtent",
        "PitchedPointer": "hipPitchedPtr",
        "Copy3D": "hipMemcpy3DParms",
    },
    {
        "kSuccess": "hipSuccess",
        "kNotSupported": "hipErrorNotSupported",
        "kHostToDevice": "hipMemcpyHostToDevice",
        "kDeviceToHost": "hipMemcpyDeviceToHost",
        "kByAddress": "hipMemcpyDefault",
        "kAllocationPinned": "hipMemAllocationTypePinned",
        "kLocationDevice": "hipMemLocationTypeDevice",
        "kLocationHost": "hipMemLocationTypeHost",
        "kAccessReadWrite": "hipMemAccessFlagsProtReadWrite",
        "kGranularityMinimum": "hipMemAllocationGranularityMinimum",
        "kVirtualMemorySupported": (
            "hipDeviceAttributeVirtualMemoryManagementSupported"
        ),
        "kStreamNonBlocking": "hipStreamNonBlocking",
        "kHostRegisterPortable": "hipHostRegisterPortable",
        "kHostMallocPortable": "hipHostMallocPortable",
    },
    HIP_HEADERS,
)
CUDA = Table(
    "cuda",
    ("GPU_CUDA_FUNCTIONS", "GPU_CUDA_OPTIONAL_FUNCTIONS"),
    {
        "MemLocation": "CUmemLocation",
        "MemAllocationProp": "CUmemAllocationProp",
        "MemAccessDesc": "CUmemAccessDesc",
        "Copy2D": "CUDA_MEMCPY2D",
        "Copy3D": "CUDA_MEMCPY3D",
    },
    {
        "kSuccess": "CUDA_SUCCESS",
        "kNotPermitted": "CUDA_ERROR_NOT_PERMITTED",
        "kNotSupported": "CUDA_ERROR_NOT_SUPPORTED",
        "kAllocationPinned": "CU_MEM_ALLOCATION_TYPE_PINNED",
        "kLocationDevice": "CU_MEM_LOCATION_TYPE_DEVICE",
        "kHandlePosixFile": "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
        "kHandleFabric": "CU_MEM_HANDLE_TYPE_FABRIC",
        "kAccessReadWrite": "CU_MEM_ACCESS_FLAGS_PROT_READWRITE",
        "kGranularityMinimum": "CU_MEM_ALLOC_GRANULARITY_MINIMUM",
        "kVirtualMemorySupported": (
            "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"
        ),
        "kRdmaSupported": (
            "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"
        ),
        "kFabricSupported": "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED",
        "kStreamNonBlocking": "CU_STREAM_NON_BLOCKING",
        "kHostRegisterPortable": "CU_MEMHOSTREGISTER_PORTABLE",
        "kHostAllocPortable": "CU_MEMHOSTALLOC_PORTABLE",
        "kByAddress": "CU_MEMORYTYPE_UNIFIED",
    },
    CUDA_HEADERS,
)
each_table = pytest.mark.parametrize("table", (HIP, CUDA), ids=lambda t: t.namespace)

# Two declarations of a function fit when a call through one reaches the other: the same
# sizes in the same registers. Opaque pointers and void* are alike, enums and integers.
COMPARE = """
#include <cstring>
#include <type_traits>
template <typename T, typename = void> struct is_complete : std::false_type {};
template <typename T> struct is_complete<T, std::void_t<decltype(sizeof(T))>>
    : std::bool_constant<!std::is_function_v<T>> {};
template <typename A, typename B> constexpr bool fits() {
  if constexpr (std::is_pointer_v<A> || std::is_pointer_v<B>) {
    if constexpr (std::is_pointer_v<A> && std::is_pointer_v<B>) {
      using P = std::remove_pointer_t<A>;
      using Q = std::remove_pointer_t<B>;
      if (std::is_const_v<P> != std::is_const_v<Q>) return false;
      if constexpr (std::is_void_v<P> || std::is_void_v<Q>) return true;
      else if constexpr (is_complete<P>::value && is_complete<Q>::value)
        return sizeof(P) == sizeof(Q);
      else return true;
    }
    return false;
  } else if constexpr (std::is_void_v<A> || std::is_void_v<B>) {
    return std::is_void_v<A> && std::is_void_v<B>;
  } else {
    return sizeof(A) == sizeof(B) && !std::is_class_v<A> && !std::is_class_v<B>;
  }
}
template <typename A, typename B> struct fit : std::false_type {};
template <typename R, typename... A, typename S, typename... B>
struct fit<R(A...), S(B...)> {
  static constexpr bool all() {
    if constexpr (sizeof...(A) != sizeof...(B)) return false;
    else return (fits<R, S>() && ... && fits<A, B>());
  }
  static constexpr bool value = all();
};
"""


def comparison(table: Table, include: str) -> str:
    """A program that compiles only when the declarations fit."""
    lines = [f'#include {include}\n#include "gpu/driver_abi.h"\n', COMPARE]
    ours = f"gpu::{table.namespace}"
    for struct, theirs in table.structs.items():
        lines.append(f"static_assert(sizeof({ours}::{struct}) == sizeof({theirs}));")
        lines.append(f"static_assert(alignof({ours}::{struct}) == alignof({theirs}));")
    for struct, field in table.fields():
        theirs = table.structs[struct]
        if field.endswith(".reserved"):
            continue
        lines.append(
            f"static_assert(offsetof({ours}::{struct}, {field}) == "
            f"offsetof({theirs}, {field}));"
        )
    for constant, theirs in table.constants.items():
        lines.append(f"static_assert({ours}::{constant} == (long long)({theirs}));")
    # A header that renames a function means another one than dlsym() finds.
    lines.append(f"""
namespace {ours} {{
#define TEXT(name) #name
#define EXPANDED(name) TEXT(name)
#define CHECK(name, result, arguments) \\
  static_assert(std::string_view(#name) == EXPANDED(name), #name); \\
  static_assert(fit<result arguments, decltype(::name)>::value, #name);
{table.macros[0]}(CHECK)
{table.macros[1]}(CHECK)
}}
int main() {{}}
""")
    return "#include <cstddef>\n#include <string_view>\n" + "\n".join(lines)


def compile_program(source: str, folder: Path, *flags: str) -> str:
    """What the compiler says; nothing when all is well."""
    path = folder / "program.cpp"
    path.write_text(source)
    command = ["g++", "-std=c++17", "-w", "-fsyntax-only", *flags, f"-I{CSRC}", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode == 0) == (done.stderr == "")
    return done.stderr


def simulators_header(table: Table) -> tuple[str, str]:
    return f'"bridge/{table.namespace}_api.h"', f"-I{CSRC / 'hipsim'}"


FIELDS = {
    "hip": {
        "MemAllocationProp": 8,
        "Position": 3,
        "Extent": 3,
        "PitchedPointer": 4,
        "Copy3D": 8,
    },
    "cuda": {"MemAllocationProp": 9, "Copy2D": 16, "Copy3D": 25},
}


@each_table
def test_every_declaration_is_compared(table: Table) -> None:
    text = table.text()
    assert set(re.findall(r"^constexpr \w+ (\w+) =", text, re.M)) == set(
        table.constants
    )
    assert set(re.findall(r"^struct (\w+) ", text, re.M)) == set(table.structs)
    counts = {
        name: sum(struct == name for struct, _ in table.fields())
        for name in table.structs
    }
    assert counts == {"MemLocation": 2, "MemAccessDesc": 2} | FIELDS[table.namespace]


@each_table
def test_declarations_fit_the_simulators(table: Table, tmp_path: Path) -> None:
    include, flag = simulators_header(table)
    assert compile_program(comparison(table, include), tmp_path, flag) == ""


@each_table
def test_declarations_fit_the_vendors(table: Table, tmp_path: Path) -> None:
    folder = table.vendor.include_dir()
    source = comparison(table, f"<{table.vendor.header}>")
    flags = (f"-isystem{folder}", *table.vendor.flags)
    assert compile_program(source, tmp_path, *flags) == ""


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("hipMemUnmap", "(void*, size_t)", "(void*, int)"),
        ("hipMemUnmap", "(void*, size_t)", "(void*)"),
        ("hipMemUnmap", "(void*, size_t)", "(size_t, size_t)"),
        ("hipGetErrorName", "(Error)", "(const char*)"),
        ("hipGetDevice", "(int*)", "(const int*)"),
        ("hipDeviceGetPCIBusId", "(char*, int, int)", "(char*, size_t, int)"),
    ],
)
def test_wrong_signature_is_seen(
    name: str, right: str, wrong: str, tmp_path: Path
) -> None:
    text = (CSRC / "gpu" / "driver_abi.h").read_text()
    declared = re.search(rf"X\({name}, [\w *]+, ({re.escape(right)})\)", text)
    assert declared
    tampered = text[: declared.start(1)] + wrong + text[declared.end(1) :]
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "driver_abi.h").write_text(tampered)
    include, flag = simulators_header(HIP)
    source = comparison(HIP, include)
    assert name in compile_program(source, tmp_path, f"-I{tmp_path}", flag)


# --- which driver a process gets ---------------------------------------------------

PRELUDE = """
import ctypes, os, shutil, sys
from pathlib import Path
from vllm_rocm_memory.sim import cudasim, hipsim
from tests.device_allocator.native.module import load_module
cumem = load_module()
"""


@pytest.fixture
def run() -> Callable[..., str]:
    """Runs a program in a process of its own; what it prints."""

    def run(text: str, **environment: str) -> str:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("HIPSIM_") and name != "LD_LIBRARY_PATH"
        }
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + text],
            env={**kept, **environment},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture
def empty_library(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a library with a name and nothing in it."""

    def make(name: str) -> Path:
        path = tmp_path / name
        source = tmp_path / "empty.cpp"
        source.write_text('extern "C" int nothing_at_all() { return 0; }\n')
        command = ["g++", "-shared", "-fPIC", source, "-o", path]
        subprocess.run(command, check=True, timeout=DEADLINE)
        return path

    return make


def has_libcuda() -> bool:
    probe = "import ctypes; ctypes.CDLL('libcuda.so.1')"
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, timeout=DEADLINE
    )
    return done.returncode == 0


def test_without_a_driver_the_module_imports_and_says_so(run: Any) -> None:
    if has_libcuda():
        pytest.skip("this machine has a CUDA driver")
    printed = run("""
try:
    cumem.driver()
except cumem.DriverNotFoundError as error:
    print(isinstance(error, RuntimeError), error)
print(cumem.ranges(), cumem.chunk_setting()[0])
arena = cumem.HostArena(5)
memoryview(arena)[:] = b"hello"
print(bytes(arena), arena.prepared, arena.release(0, 5), arena.registration_error)
del arena
try:
    cumem.numa_node(0)
except cumem.DriverNotFoundError:
    print("no node")
""")
    error, settings, arena, node = printed.splitlines()
    assert error.startswith("True this process has no GPU driver: libamdhip64 is not")
    assert settings == f"[] {256 << 20}"
    assert (arena, node) == ("b'hello' 0 0 None", "no node")


def test_driver_that_is_loaded_later_is_found(run: Any) -> None:
    if has_libcuda():
        pytest.skip("this machine has a CUDA driver")
    printed = run("""
try:
    cumem.driver()
except cumem.DriverNotFoundError:
    print("none")
hipsim.load()
print(cumem.driver().vendor)
""")
    assert printed.split() == ["none", "hip"]


def test_hip_is_asked_for_what_it_is(run: Any) -> None:
    printed = run("""
hipsim.load()
hipsim.reset("7.2.3")
driver = cumem.driver()
print(driver.vendor, driver.version, driver.path)
print(driver.frees_memory_with_address, driver.maps_for_host)
print(driver.supports_virtual_memory(7))
try:
    driver.supports_virtual_memory(8)
except cumem.DriverError as error:
    print(error.call, error.error_number, error.device)
""")
    first, *others = printed.splitlines()
    assert first == f"hip 70200000 {hipsim.library_path()}"
    assert others == ["True True", "True", "hipDeviceGetAttribute 101 8"]


@pytest.mark.parametrize(
    ("release", "frees_with_address", "for_host"),
    [
        ("7.1", True, False),
        ("7.2.3", True, True),  # rocm-systems#1620: host access
        ("7.12", True, True),
        ("7.13", False, True),  # rocm-systems#4363: memory comes back at unmap
        ("7.16", False, True),
    ],
)
def test_releases_of_hip(
    release: str, frees_with_address: bool, for_host: bool, run: Any
) -> None:
    printed = run(
        """
hipsim.load()
driver = cumem.driver()
print(driver.frees_memory_with_address, driver.maps_for_host)
""",
        HIPSIM_PROFILE=release,
    )
    assert printed.split() == [str(frees_with_address), str(for_host)]


def test_hip_that_does_not_tell_its_version_is_taken_for_an_old_one(run: Any) -> None:
    printed = run("""
hipsim.load()
for call in range(4):
    hipsim.fail("hipRuntimeGetVersion", call + 1, 999)
driver = cumem.driver()
print(driver.frees_memory_with_address, driver.maps_for_host)  # two tries each
print(driver.version, driver.frees_memory_with_address)
for call in range(2):
    hipsim.fail("hipRuntimeGetVersion", call + 1, 999)
print(driver.version)  # what it was
""")
    assert printed.split() == ["True", "False", "71626361", "False", "71626361"]


def test_cuda_is_asked_for_what_it_is(run: Any) -> None:
    printed = run("""
cudasim.load()
driver = cumem.driver()
print(driver.vendor, driver.version, driver.path)
print(driver.frees_memory_with_address, driver.maps_for_host)
print(cudasim.stats().calls["cuInit"])  # which a process that forks must not call
print(driver.supports_virtual_memory(0), cudasim.stats().calls["cuInit"])
try:
    driver.supports_virtual_memory(8)
except cumem.DriverError as error:
    print(error.call, error.error_name, error.device)
""")
    first, *others = printed.splitlines()
    assert first == f"cuda 13000 {cudasim.library_path()}"
    assert others == [
        "False False",
        "0",
        "True 1",
        "cuDeviceGet CUDA_ERROR_INVALID_DEVICE 8",
    ]


def test_cuda_is_opened_by_name_when_nothing_is_loaded(run: Any) -> None:
    printed = run(
        "print(cumem.driver().path)",
        LD_LIBRARY_PATH=os.fspath(cudasim.library_path().parent),
    )
    assert printed.strip() == os.fspath(cudasim.library_path())


def test_hip_is_never_opened_by_name(run: Any) -> None:
    if has_libcuda():
        pytest.skip("this machine has a CUDA driver")
    printed = run(
        """
try:
    cumem.driver()
except cumem.DriverNotFoundError:
    print("none")
""",
        LD_LIBRARY_PATH=os.fspath(hipsim.library_path().parent),
    )
    assert printed.strip() == "none"


@pytest.mark.parametrize(
    ("torch_has", "expected"),
    [
        ((), "hip"),
        (("libc10_hip.so",), "hip"),
        (("libc10_cuda.so",), "cuda"),
        (("libc10_cuda.so", "libc10_hip.so"), "hip"),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value) or "none",
)
def test_where_both_are_loaded_torch_decides(
    torch_has: Sequence[str], expected: str, run: Any, empty_library: Any
) -> None:
    printed = run(
        """
cudasim.load()
hipsim.load()
for path in filter(None, os.environ["LIBRARIES"].split(":")):
    ctypes.CDLL(path)
print(cumem.driver().vendor)
""",
        LIBRARIES=":".join(os.fspath(empty_library(name)) for name in torch_has),
    )
    assert printed.split() == [expected]


def test_hip_under_another_file_name_is_found(run: Any, tmp_path: Path) -> None:
    """As auditwheel renames what it puts into a wheel."""
    renamed = tmp_path / "libamdhip64-0f1e2d3c.so.7.2.70203"
    shutil.copy(hipsim.library_path(), renamed)
    printed = run(
        'ctypes.CDLL(os.environ["RENAMED"]); print(cumem.driver().path)',
        RENAMED=os.fspath(renamed),
    )
    assert printed.strip() == os.fspath(renamed)


def test_driver_without_the_functions_is_refused(run: Any, empty_library: Any) -> None:
    printed = run(
        """
ctypes.CDLL(os.environ["OLD"])
try:
    cumem.driver()
except cumem.DriverNotFoundError as error:
    print(error)
""",
        OLD=os.fspath(empty_library("libamdhip64.so.4")),
    )
    assert "too old or broken" in printed
    assert "hipRuntimeGetVersion" in printed


def test_needs_only_the_systems_libraries() -> None:
    command = ["readelf", "-dW", module_path()]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    needed = re.findall(r"NEEDED.*\[(.*?)\.so", text)
    allowed = {"libstdc++", "libgcc_s", "libc", "libm", "libdl", "libpthread"}
    assert set(needed) <= allowed | {"ld-linux-x86-64", "ld-linux-aarch64"}
