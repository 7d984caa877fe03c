# SPDX-License-Identifier: Apache-2.0
import ctypes
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_rocm_memory.sim import hipsim

ROOT = Path(__file__).parents[2]
DEADLINE = 60  # seconds, for whatever a process is waited for
PAGE = 4096

# What test_native_threads.py of the device allocator, test_contract.py and
# test_engine.py build, minutes of the compiler's; in the order in which they run.
BUILD = """
import contract_programs, native_tests
def build(*programs):
    for sanitizer in native_tests.SANITIZERS:
        native_tests.build(sanitizer, programs)
build(native_tests.HOST_MEMORY)
contract_programs.build()
build("hipsim_engine_test", "hipsim_fuzz_replay")
"""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Builds beside the tests of other folders, which leave a core idle at times.

    Whoever needs the programs waits for this build, and says what it has to say.
    """
    files = {item.path.name for item in session.items}
    alone = {item.path.parent.name for item in session.items} == {"hipsim"}
    wanted = {"test_native_threads.py", "test_contract.py", "test_engine.py"}
    if session.config.option.collectonly or alone or not wanted <= files:
        return
    folders = [str(ROOT / "tools"), str(Path(__file__).parent)]
    build = subprocess.Popen(
        ["nice", sys.executable, "-c", BUILD],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    session.config.add_cleanup(build.wait)


# What a program in a process of its own begins with.
PRELUDE = """
import ctypes, os, signal, sys
import numpy as np
from vllm_rocm_memory.sim import hipsim

PAGE = 4096

def make(name, *arguments):
    handle = ctypes.c_void_p()
    hipsim.check(getattr(hipsim.load(), name)(ctypes.byref(handle), *arguments), name)
    return handle

def call(name, *arguments):
    hipsim.check(getattr(hipsim.load(), name)(*arguments), name)

def set_access(address, size, type, flags=hipsim.ACCESS_READ_WRITE):
    access = hipsim.MemAccessDesc(hipsim.MemLocation(type, 0), flags)
    call("hipMemSetAccess", address, size, ctypes.byref(access), 1)

def create(size=PAGE):
    location = hipsim.MemLocation(hipsim.LOCATION_DEVICE, 0)
    properties = hipsim.MemAllocationProp(hipsim.ALLOCATION_PINNED, 0, location)
    return make("hipMemCreate", size, ctypes.byref(properties), 0)

def virtual(size=PAGE):
    address = make("hipMemAddressReserve", size, 0, None, 0)
    call("hipMemMap", address, size, 0, create(size), 0)
    set_access(address, size, hipsim.LOCATION_DEVICE)
    return address

def export(address):
    handle = hipsim.IpcMemHandle()
    call("hipIpcGetMemHandle", ctypes.byref(handle), address)
    print(bytes(handle).hex(), flush=True)

def round_trip(seed):
    lib = hipsim.load()
    data = np.random.default_rng(seed).integers(0, 256, 1 << 20, np.uint8)
    back = np.zeros_like(data)
    device, stream = make("hipMalloc", data.size), make("hipStreamCreate")
    lib.hipMemcpyAsync(device, data.ctypes.data, data.size, 1, stream)
    lib.hipMemcpyAsync(back.ctypes.data, device, data.size, 2, stream)
    assert lib.hipStreamSynchronize(stream) == 0
    assert np.array_equal(data, back)
    assert lib.hipFree(device) == 0 and lib.hipStreamDestroy(stream) == 0

def join(child):
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)
"""


@dataclass
class Gpu:
    """Makes things on the simulated GPU; what is left of them goes with the test."""

    lib: ctypes.CDLL
    left: list[Callable[[], object]] = field(default_factory=list)
    arrays: list[np.ndarray] = field(default_factory=list)

    def call(self, name: str, *arguments: Any) -> None:
        hipsim.check(getattr(self.lib, name)(*arguments), name)

    def make(self, name: str, *arguments: Any) -> int:
        """Calls a function whose first argument takes what it makes."""
        handle = ctypes.c_void_p()
        self.call(name, ctypes.byref(handle), *arguments)
        return handle.value or 0

    def defer(self, name: str, *arguments: Any) -> None:
        """A call for the end of the test, whatever it returns then."""
        self.left.append(partial(getattr(self.lib, name), *arguments))

    def malloc(self, size: int) -> int:
        pointer = self.make("hipMalloc", size)
        self.defer("hipFree", pointer)
        return pointer

    def stream(self, flags: int = hipsim.STREAM_NON_BLOCKING) -> int:
        stream = self.make("hipStreamCreateWithFlags", flags)
        self.defer("hipStreamDestroy", stream)
        return stream

    def event(self, flags: int = 0) -> int:
        event = self.make("hipEventCreateWithFlags", flags)
        self.defer("hipEventDestroy", event)
        return event

    def pageable(self, size: int, seed: int | None = None) -> np.ndarray:
        random = np.random.default_rng(seed)
        array = (
            np.zeros(size, np.uint8)
            if seed is None
            else random.integers(0, 256, size, np.uint8)
        )
        self.arrays.append(array)
        return array

    def pinned(self, size: int, seed: int | None = None) -> np.ndarray:
        """A registered array: random bytes, or zeroes without a seed."""
        array = self.pageable(size, seed)
        self.call("hipHostRegister", array.ctypes.data, size, 0)
        self.defer("hipHostUnregister", array.ctypes.data)
        return array

    def reserve(self, size: int, hint: int = 0) -> int:
        address = self.make("hipMemAddressReserve", size, 0, hint, 0)
        self.defer("hipMemAddressFree", address, size)
        return address

    def create(self, size: int) -> int:
        location = hipsim.MemLocation(hipsim.LOCATION_DEVICE, 0)
        properties = hipsim.MemAllocationProp(hipsim.ALLOCATION_PINNED, 0, location)
        handle = self.make("hipMemCreate", size, ctypes.byref(properties), 0)
        self.defer("hipMemRelease", handle)
        return handle

    def map(self, address: int, size: int, handle: int) -> None:
        self.call("hipMemMap", address, size, 0, handle, 0)
        self.defer("hipMemUnmap", address, size)

    def set_access(
        self,
        address: int,
        size: int,
        flags: int = hipsim.ACCESS_READ_WRITE,
        location: int = hipsim.LOCATION_DEVICE,
    ) -> None:
        access = hipsim.MemAccessDesc(hipsim.MemLocation(location, 0), flags)
        self.call("hipMemSetAccess", address, size, ctypes.byref(access), 1)

    def virtual(self, *sizes: int) -> int:
        """A reservation with one mapping a size, which device 0 may read and write."""
        address = mapped = self.reserve(sum(sizes))
        for size in sizes:
            self.map(mapped, size, self.create(size))
            mapped += size
        self.set_access(address, sum(sizes))
        return address

    def graph(self, *calls: Sequence[Any]) -> int:
        """What is captured of calls, the last argument of which is the stream."""
        stream = self.stream()
        self.call("hipStreamBeginCapture", stream, 0)
        for name, *arguments in calls:
            self.call(name, *arguments, stream)
        graph = ctypes.c_void_p()
        self.call("hipStreamEndCapture", stream, ctypes.byref(graph))
        self.defer("hipGraphDestroy", graph.value)
        self.call("hipStreamDestroy", stream)
        return graph.value or 0

    def executable(self, graph: int) -> int:
        executable = self.make("hipGraphInstantiate", graph, None, None, 0)
        self.defer("hipGraphExecDestroy", executable)
        return executable

    def open(self, handle: hipsim.IpcMemHandle) -> int:
        pointer = self.make("hipIpcOpenMemHandle", handle, 1)
        self.defer("hipIpcCloseMemHandle", pointer)
        return pointer

    def box(
        self,
        to: tuple[int, int, int],
        source: tuple[int, int, int],
        extent: tuple[int, int, int],
        kind: int = hipsim.DEFAULT_KIND,
    ) -> ctypes.Array[ctypes.c_size_t]:
        """hipMemcpy3DParms.

        Args:
            to: Address, bytes from row to row, and rows from slice to slice.
            source: The same.
            extent: Bytes of a row, rows of a slice, slices.
            kind: hipMemcpyKind.
        """

        def side(address: int, pitch: int, rows: int) -> tuple[int, ...]:
            no_array, at_start, width = 0, (0, 0, 0), extent[0]
            return no_array, *at_start, address, pitch, width, rows

        words = (*side(*source), *side(*to), *extent, kind)
        return (ctypes.c_size_t * len(words))(*words)

    def memory_info(self) -> tuple[int, int]:
        """Free and all bytes of the current device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("hipMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def load(self, pointer: int, data: np.ndarray) -> None:
        self.call(
            "hipMemcpy", pointer, data.ctypes.data, data.size, hipsim.HOST_TO_DEVICE
        )

    def read(self, pointer: int, size: int) -> np.ndarray:
        data = np.empty(size, np.uint8)
        kind = hipsim.DEVICE_TO_HOST
        self.call("hipMemcpy", data.ctypes.data, pointer, size, kind)
        return data

    def batch(
        self,
        destinations: Sequence[int] | np.ndarray,
        sources: Sequence[int] | np.ndarray,
        sizes: Sequence[int] | np.ndarray,
        stream: int | None = None,
        attributes: Sequence[Any] = (),
        fail_index: bool = True,
        count: int | None = None,
    ) -> tuple[int, int]:
        """hipMemcpyBatchAsync; its result, and the failing index it wrote.

        The index is -1 when it wrote none. Each of `attributes` has `first_copy`,
        `order` and `flags`.
        """
        arrays = [np.asarray(a, np.uint64) for a in (destinations, sources, sizes)]
        sets = (hipsim.MemcpyAttributes * len(attributes))()
        for entry, each in zip(sets, attributes, strict=True):
            entry.srcAccessOrder = each.order
            entry.flags = each.flags
        firsts = np.array([each.first_copy for each in attributes], np.uint64)
        index = ctypes.c_int64(-7)
        error = self.lib.hipMemcpyBatchAsync(
            *(array.ctypes.data for array in arrays),
            len(arrays[0]) if count is None else count,
            ctypes.addressof(sets) if attributes else None,
            firsts.ctypes.data if attributes else None,
            len(attributes),
            ctypes.byref(index) if fail_index else None,
            stream,
        )
        written = ctypes.c_uint64(index.value).value
        return error, -1 if index.value == -7 else written

    def close(self) -> None:
        hipsim.reset()
        self.lib.hipSetDevice(0)
        for drop in reversed(self.left):
            drop()
        self.lib.hipGetLastError()


class Program:
    """A Python process with a simulator of its own."""

    def __init__(self, text: str, **environment: str) -> None:
        ours = ("HIPSIM_", "GPU_FORCE_BLIT_", "HSA_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        path = os.pathsep.join([str(ROOT), kept.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + text],
            env={**kept, "PYTHONPATH": path, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )

    def send(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{line}\n".encode())

    def receive(self) -> str:
        """The next line that it prints."""
        assert self._process.stdout
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], DEADLINE)
            assert ready, f"nothing more after {line!r}"
            byte = self._process.stdout.read(1)
            assert byte, self.kill()
            line += byte
        return line.decode().strip()

    def wait(self) -> tuple[int, str, str]:
        """Its exit status, and what it prints until then."""
        try:
            output, errors = self._process.communicate(timeout=DEADLINE)
        finally:
            self._process.kill()
        return self._process.returncode, output.decode(), errors.decode()

    def finish(self) -> str:
        """What it prints until it ends, which must be well."""
        status, output, errors = self.wait()
        assert status == 0, errors
        return output

    def kill(self) -> str:
        """Ends it at once; what it said of errors."""
        if self._process.returncode is not None:
            return ""
        self._process.kill()
        return self._process.communicate(timeout=DEADLINE)[1].decode()


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    """A simulator with nothing on it, and nothing left on it afterwards."""
    hipsim.reset(hipsim.PROFILES[-1])
    gpu = Gpu(hipsim.load())
    gpu.lib.hipGetLastError()
    yield gpu
    gpu.close()
    hipsim.assert_clean()


@pytest.fixture(params=hipsim.PROFILES)
def profile(gpu: Gpu, request: pytest.FixtureRequest) -> str:
    """Each profile in turn."""
    name: str = request.param
    hipsim.reset(name)
    return name


@pytest.fixture
def start() -> Iterator[Callable[..., Program]]:
    """Starts programs, with variables of the environment as keywords."""
    programs: list[Program] = []

    def start(text: str, **environment: str) -> Program:
        programs.append(Program(text, **environment))
        return programs[-1]

    yield start
    for program in programs:
        program.kill()


@pytest.fixture
def run(start: Callable[..., Program]) -> Callable[..., str]:
    """Runs a program to its end, and returns what it printed."""

    def run(text: str, **environment: str) -> str:
        return start(text, **environment).finish()

    return run


@pytest.fixture
def export(
    start: Callable[..., Program],
) -> Callable[[str], tuple[Program, hipsim.IpcMemHandle]]:
    """Starts a program that calls `export`, and receives the handle."""

    def export(text: str) -> tuple[Program, hipsim.IpcMemHandle]:
        program = start(text)
        told = bytes.fromhex(program.receive())
        return program, hipsim.IpcMemHandle.from_buffer_copy(told)

    return export
