# SPDX-License-Identifier: Apache-2.0
"""The HIP runtime of this process: which library it is, its version, its errors.

Note [Which libamdhip64]
A stream belongs to the runtime that made it, so a call must go to the library
that torch already uses; a second copy, opened by name, would not know torch's
streams. The loader's search path says nothing about that: wheels bundle the
library under their own directory, and the unversioned name exists only where
the devel package is. ``get_runtime`` therefore asks the process first
(``/proc/self/maps``, each candidate confirmed with ``RTLD_NOLOAD``) and opens a
library by name only when none is mapped.

HIP numbers its runtime apart from the ROCm release: ROCm 10.0 ships HIP 7.15
and ROCm 10.1 ships HIP 7.16. Every gate in the series compares HIP versions.
"""

import ctypes
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

from vllm.logger import init_logger

logger = init_logger(__name__)

HIP_SUCCESS = 0
HIP_ERROR_NOT_SUPPORTED = 801

AMDGPU_VERSION_FILE = Path("/sys/module/amdgpu/version")

_SONAMES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so")
_LIBRARY = re.compile(r"libamdhip64[^/]*\.so[.\d]*")
_MAPS = Path("/proc/self/maps")

# hipMemcpyBatchAsync from HIP 7.1 to 7.15 (hip_runtime_api.h), and
# cuMemcpyBatchAsync as of CUDA 12.8.
BATCH_MEMCPY_ARGUMENTS: tuple[type, ...] = (
    ctypes.c_void_p,  # dsts
    ctypes.c_void_p,  # srcs
    ctypes.c_void_p,  # sizes
    ctypes.c_size_t,  # count
    ctypes.c_void_p,  # attrs
    ctypes.c_void_p,  # attrsIdxs: one entry for each of numAttrs
    ctypes.c_size_t,  # numAttrs
    ctypes.c_void_p,  # failIdx: not NULL, which HIP refuses before 7.12
    ctypes.c_void_p,  # stream
)

_SIGNATURES: dict[str, tuple[type, tuple[type, ...]]] = {
    "hipRuntimeGetVersion": (ctypes.c_int, (ctypes.POINTER(ctypes.c_int),)),
    "hipGetErrorName": (ctypes.c_char_p, (ctypes.c_int,)),
    "hipGetLastError": (ctypes.c_int, ()),
    "hipMemcpyBatchAsync": (ctypes.c_int, BATCH_MEMCPY_ARGUMENTS),
}

_runtime: ctypes.CDLL | None = None
_lock = threading.Lock()


def get_runtime(load: Callable[[], ctypes.CDLL]) -> ctypes.CDLL:
    """Return the process's HIP runtime, with argument types set.

    Args:
        load: Opens the library when the process has none mapped. Whatever it
            raises is passed on, and nothing is remembered.

    """
    global _runtime
    with _lock:
        if _runtime is None:
            lib = _mapped_runtime() or load()
            _declare(lib)
            _runtime = lib
        return _runtime


def runtime_version(lib: ctypes.CDLL) -> int:
    """Return ``hipRuntimeGetVersion``, or 0 when the runtime does not say.

    The number is major * 10_000_000 + minor * 100_000 + patch.
    """
    version = ctypes.c_int(0)
    try:
        status = lib.hipRuntimeGetVersion(ctypes.byref(version))
    except AttributeError:
        return 0
    return version.value if status == HIP_SUCCESS else 0


def major_minor(version: int) -> tuple[int, int]:
    """Return (major, minor) of a HIP version number; (0, 0) for 0, unknown."""
    return version // 10_000_000, version // 100_000 % 100


def at_least(version: int, major: int, minor: int) -> bool:
    """Is this HIP version at least ``major.minor``? An unknown one never is."""
    return major_minor(version) >= (major, minor)


def format_version(version: int) -> str:
    """Return ``7.16.26361`` for 71_626_361, and ``unknown`` for 0."""
    if version == 0:
        return "unknown"
    major, minor = major_minor(version)
    return f"{major}.{minor}.{version % 100_000}"


def driver_version(path: Path = AMDGPU_VERSION_FILE) -> tuple[int, ...] | None:
    """Return the amdgpu driver's version as numbers, so that versions compare.

    Only the out-of-tree driver publishes one, with three parts or with four
    (``6.19.14.31400000``). None where the file is absent, empty or not a
    version.
    """
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    parts = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, parts[0].split("."))) if parts else None


def error_name(lib: ctypes.CDLL, error: int) -> str:
    """Return the name of a HIP error, such as ``hipErrorNotSupported``."""
    try:
        name = lib.hipGetErrorName(error)
    except AttributeError:
        name = None
    return name.decode() if name else "unknown error"


def _declare(lib: ctypes.CDLL) -> None:
    for name, (restype, argtypes) in _SIGNATURES.items():
        function = getattr(lib, name, None)
        if function is not None:
            function.restype, function.argtypes = restype, argtypes


def _mapped_runtime() -> ctypes.CDLL | None:
    found: dict[int, tuple[str, ctypes.CDLL]] = {}
    for path in _mapped_paths(_MAPS):
        lib = _open_if_loaded(path)
        if lib is not None:
            found.setdefault(lib._handle, (path, lib))
    if not found:
        return None
    chosen = _first_loaded(set(found)) or next(iter(found))
    path, lib = found[chosen]
    if len(found) > 1:
        others = [other for handle, (other, _) in found.items() if handle != chosen]
        logger.warning(
            "This process has %d HIP runtimes loaded: using %s, which came first, "
            "and not %s. If copies fail with an invalid handle, make torch and "
            "everything else load the same libamdhip64.",
            len(found),
            path,
            ", ".join(others),
        )
    return lib


def _mapped_paths(maps: Path) -> list[str]:
    try:
        lines = maps.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    # address, permissions, offset, device, inode, path; only the path may
    # contain spaces.
    paths = [line.split(maxsplit=5)[5] for line in lines if line.count("/")]
    return [p for p in dict.fromkeys(paths) if _LIBRARY.fullmatch(Path(p).name)]


def _first_loaded(handles: set[int]) -> int | None:
    # The map is ordered by address. Asked for a bare soname, the dynamic
    # loader answers with the library it loaded first, which is torch's.
    for soname in _SONAMES:
        lib = _open_if_loaded(soname)
        if lib is not None and lib._handle in handles:
            return lib._handle
    return None


def _open_if_loaded(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
    except OSError:
        return None
