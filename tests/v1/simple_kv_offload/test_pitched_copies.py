# SPDX-License-Identifier: Apache-2.0
"""Rectangles as the compiled module queues them, on both vendors' drivers.

A process has one driver. This file runs in the tests' process over HIP, and once more
over CUDA in a process of its own, which has nothing but this file, the simulator and
the module: no vLLM, no PyTorch and no conftest.
"""

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from vllm_rocm_memory import serve
from vllm_rocm_memory.sim import hipsim

from ...device_allocator.native.module import load_module, module_path
from ...device_allocator.simulated_gpu import (
    IS_HIP,
    PROFILES,
    name_of,
    simulator,
    use_device,
)

ROOT = Path(__file__).parents[3]
DEADLINE = 60  # seconds, for whatever a process or a thread is waited for
NAME = "pitched_copies"
PLANE = name_of("hipMemcpy2DAsync", "cuMemcpy2DAsync_v2")
BOX = name_of("hipMemcpy3DAsync", "cuMemcpy3DAsync_v2")
INVALID_VALUE = 1
INVALID_CONTEXT = 201
ARENA = 1 << 16
GIB = 1 << 30

on_hip = pytest.mark.skipif(not IS_HIP, reason="HIP's column has it")
on_cuda = pytest.mark.skipif(IS_HIP, reason="the CUDA column has it")


class Rectangle(NamedTuple):
    """A row of the table."""

    target: int
    source: int
    width: int
    rows: int
    target_pitch: int
    source_pitch: int
    target_lines: int = 1
    source_lines: int = 1


class Memory(NamedTuple):
    """Bytes of one kind at one address."""

    address: int
    size: int


class Gpu:
    """Device 0: its memory, host memory that it knows, and a stream."""

    def __init__(self) -> None:
        self.lib = simulator.load()
        self.stream = self.make(
            name_of("hipStreamCreateWithFlags", "cuStreamCreate"), ctypes.c_void_p, 1
        )
        self._left: list[tuple[str, int]] = [
            (name_of("hipStreamDestroy", "cuStreamDestroy_v2"), self.stream)
        ]
        self._arrays: list[np.ndarray] = []

    def call(self, hip: str, cuda: str, *arguments: Any) -> None:
        name = name_of(hip, cuda)
        simulator.check(getattr(self.lib, name)(*arguments), name)

    def make(self, name: str, kind: type[Any], *arguments: Any) -> int:
        made = kind()
        simulator.check(getattr(self.lib, name)(ctypes.byref(made), *arguments), name)
        return made.value or 0

    def device(self, size: int) -> Memory:
        kind = ctypes.c_void_p if IS_HIP else ctypes.c_ulonglong
        address = self.make(name_of("hipMalloc", "cuMemAlloc_v2"), kind, size)
        self._left.append((name_of("hipFree", "cuMemFree_v2"), address))
        return Memory(address, size)

    def pageable(self, size: int) -> Memory:
        array = np.zeros(size, np.uint8)
        self._arrays.append(array)
        return Memory(array.ctypes.data, size)

    def pinned(self, size: int) -> Memory:
        memory = self.pageable(size)
        self.call("hipHostRegister", "cuMemHostRegister_v2", memory.address, size, 0)
        self._left.append(
            (name_of("hipHostUnregister", "cuMemHostUnregister"), memory.address)
        )
        return memory

    def _copy(self, to: int, source: int, size: int) -> None:
        kind = (hipsim.DEFAULT_KIND,) if IS_HIP else ()
        self.call("hipMemcpy", "cuMemcpy", to, source, size, *kind)

    def write(self, memory: Memory, data: np.ndarray) -> None:
        self._copy(memory.address, data.ctypes.data, data.size)

    def read(self, memory: Memory) -> np.ndarray:
        data = np.empty(memory.size, np.uint8)
        self._copy(data.ctypes.data, memory.address, data.size)
        return data

    def wait(self) -> None:
        self.call("hipStreamSynchronize", "cuStreamSynchronize", self.stream)

    def calls(self) -> tuple[int, int]:
        """Planes and boxes that the driver was asked for."""
        calls = simulator.stats().calls
        return calls[PLANE], calls[BOX]

    def close(self) -> None:
        simulator.reset()
        use_device()
        for name, handle in reversed(self._left):
            getattr(self.lib, name)(handle)
        if IS_HIP:
            self.lib.hipGetLastError()


@pytest.fixture(scope="module")
def submit() -> Callable[..., Any]:
    """The module's function, on the simulator."""
    if not serve.is_cpu_build():
        pytest.skip("a process with a GPU's own driver does not use the simulator's")
    simulator.load()
    function: Callable[..., Any] = load_module(NAME).submit
    return function


@pytest.fixture(params=PROFILES)
def profile(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def gpu(submit: Any, request: pytest.FixtureRequest) -> Iterator[Gpu]:
    """In each release where a test asks for `profile`, else in the newest."""
    each = "profile" in request.fixturenames
    simulator.reset(request.getfixturevalue("profile") if each else PROFILES[-1])
    use_device()
    gpu = Gpu()
    yield gpu
    gpu.close()
    simulator.assert_clean()


def table(*rectangles: Rectangle) -> np.ndarray:
    return np.array(rectangles, np.uint64).reshape(-1, 8)


def noise(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def expected(
    target: np.ndarray, source: np.ndarray, rectangles: Sequence[Rectangle]
) -> np.ndarray:
    """What is in the target afterwards, the addresses being offsets."""
    data = target.copy()
    for each in rectangles:
        for row in range(each.rows):
            to = each.target + row * each.target_pitch * each.target_lines
            start = each.source + row * each.source_pitch * each.source_lines
            data[to : to + each.width] = source[start : start + each.width]
    return data


def at(target: Memory, source: Memory, each: Rectangle) -> Rectangle:
    """A rectangle whose addresses are offsets into two memories."""
    return each._replace(
        target=target.address + each.target, source=source.address + each.source
    )


def memories(gpu: Gpu, direction: str) -> tuple[Memory, Memory]:
    """Target and source of a direction."""
    return {
        "load": lambda: (gpu.device(ARENA), gpu.pinned(ARENA)),
        "store": lambda: (gpu.pinned(ARENA), gpu.device(ARENA)),
        "within": lambda: (gpu.device(ARENA), gpu.device(ARENA)),
    }[direction]()


# --- copies ------------------------------------------------------------------------

SHAPES = {
    "block": Rectangle(4096, 512, 64, 8, 4096, 64),
    "dense": Rectangle(0, 64, 256, 4, 256, 256),
    "odd": Rectangle(7, 11, 13, 5, 101, 17),
    "one row": Rectangle(128, 0, 4096, 1, 4096, 4096),
    "whole": Rectangle(0, 0, ARENA, 1, ARENA, ARENA),
    "wide target": Rectangle(256, 0, 64, 7, 64, 96, 128, 1),
    "wide source": Rectangle(0, 32, 64, 9, 64, 256, 1, 24),
    "both wide": Rectangle(64, 128, 32, 6, 64, 128, 33, 17),
}


@pytest.mark.parametrize("direction", ["load", "store", "within"])
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_arrive(submit: Any, gpu: Gpu, shape: str, direction: str) -> None:
    target, source = memories(gpu, direction)
    before, data = noise(ARENA, 1), noise(ARENA, 2)
    gpu.write(target, before)
    gpu.write(source, data)
    each = SHAPES[shape]
    assert submit(table(at(target, source, each)), gpu.stream) is None
    gpu.wait()
    is_plane = (each.target_lines, each.source_lines) == (1, 1)
    assert gpu.calls() == ((1, 0) if is_plane else (0, 1))
    assert np.array_equal(gpu.read(target), expected(before, data, [each]))
    assert np.array_equal(gpu.read(source), data)


@pytest.mark.usefixtures("profile")
def test_a_table_is_copied_in_its_order(submit: Any, gpu: Gpu) -> None:
    """Later rectangles lie over earlier ones here."""
    random = np.random.default_rng(3)
    rectangles = []
    for _ in range(40):
        width, rows = (int(n) for n in random.integers(1, (80, 9)))
        pitches = [width + int(n) for n in random.integers(0, 100, 2)]
        lines = [int(n) for n in random.choice((1, 1, 1, 2, 5), 2)]
        rectangles.append(
            Rectangle(
                *map(int, random.integers(0, 2048, 2)), width, rows, *pitches, *lines
            )
        )
    target, source = memories(gpu, "load")
    before, data = noise(ARENA, 4), noise(ARENA, 5)
    gpu.write(target, before)
    gpu.write(source, data)
    copies = table(*(at(target, source, each) for each in rectangles))
    assert submit(copies, gpu.stream) is None
    gpu.wait()
    planes = sum(each[-2:] == (1, 1) for each in rectangles)
    assert 0 < planes < 40
    assert gpu.calls() == (planes, 40 - planes)
    assert np.array_equal(gpu.read(target), expected(before, data, rectangles))
    reverse = expected(before, data, rectangles[::-1])
    assert not np.array_equal(gpu.read(target), reverse)


@pytest.mark.usefixtures("profile")
def test_rows_3_gib_apart(submit: Any, gpu: Gpu) -> None:
    """Further than a plane's are documented to be, which CUDA's driver takes, too."""
    width, lines = 256, 3 * GIB // 1024
    device = gpu.device(3 * GIB + width)
    host = gpu.pinned(2 * width)
    data = noise(host.size)
    gpu.write(host, data)
    plane = Rectangle(device.address, host.address, width, 2, 3 * GIB, width)
    box = plane._replace(target_pitch=1024, target_lines=lines)
    if IS_HIP:
        assert submit(table(plane), gpu.stream) == (0, INVALID_VALUE, PLANE)
    there = [Memory(device.address + row * 3 * GIB, width) for row in range(2)]
    for each in (box,) if IS_HIP else (plane, box):
        for row in there:
            gpu.write(row, np.zeros(width, np.uint8))
        assert submit(table(each), gpu.stream) is None
        gpu.wait()
        assert np.array_equal(np.concatenate([*map(gpu.read, there)]), data)
    back = gpu.pinned(2 * width)
    store = Rectangle(back.address, device.address, width, 2, width, 1024, 1, lines)
    assert submit(table(store), gpu.stream) is None
    gpu.wait()
    assert np.array_equal(gpu.read(back), data)


def test_null_stream(submit: Any, gpu: Gpu) -> None:
    target, source = memories(gpu, "load")
    data = noise(ARENA)
    gpu.write(source, data)
    whole = at(target, source, SHAPES["whole"])
    assert submit(table=table(whole), stream=0) is None
    gpu.call("hipDeviceSynchronize", "cuCtxSynchronize")
    assert np.array_equal(gpu.read(target), data)


def test_nothing_to_copy(submit: Any, gpu: Gpu) -> None:
    assert submit(table(), gpu.stream) is None
    assert submit(np.empty((0, 8), np.uint64).T.T, gpu.stream) is None
    assert gpu.calls() == (0, 0)


# --- failures ----------------------------------------------------------------------


def queue_of(gpu: Gpu, boxes: bool) -> tuple[np.ndarray, Memory, list[Rectangle]]:
    """Six copies to places of their own, as planes or as boxes."""
    target, source = memories(gpu, "load")
    gpu.write(source, noise(ARENA))
    lines = (2, 1) if boxes else (1, 1)
    each = [Rectangle(4096 * i, 512 * i, 64, 4, 128, 64, *lines) for i in range(6)]
    return table(*(at(target, source, one) for one in each)), target, each


@pytest.mark.usefixtures("profile")
@pytest.mark.parametrize("boxes", [False, True], ids=["planes", "boxes"])
def test_each_failure_is_named_and_keeps_what_came_before(
    submit: Any, gpu: Gpu, boxes: bool
) -> None:
    copies, target, rectangles = queue_of(gpu, boxes)
    call = BOX if boxes else PLANE
    data, before = noise(ARENA), noise(ARENA, 1)
    for index in range(len(rectangles)):
        gpu.write(target, before)
        simulator.reset()
        simulator.fail(call, index + 1, 700 + index)
        assert submit(copies, gpu.stream) == (index, 700 + index, call)
        assert sum(gpu.calls()) == index + 1, "nothing behind it was tried"
        gpu.wait()
        arrived = expected(before, data, rectangles[:index])
        assert np.array_equal(gpu.read(target), arrived)


@pytest.mark.parametrize("lines", [1, 2])
def test_copy_that_the_driver_refuses(submit: Any, gpu: Gpu, lines: int) -> None:
    copies, target, rectangles = queue_of(gpu, lines > 1)
    copies[3, 4] = copies[3, 2] - 1  # a pitch below the width
    gpu.write(target, np.zeros(ARENA, np.uint8))
    refused = submit(copies, gpu.stream)
    assert refused is not None
    index, error, call = refused
    assert (index, call) == (3, BOX if lines > 1 else PLANE)
    assert error > 0
    gpu.wait()
    arrived = expected(np.zeros(ARENA, np.uint8), noise(ARENA), rectangles[:3])
    assert np.array_equal(gpu.read(target), arrived)


@on_hip
@pytest.mark.usefixtures("profile")
@pytest.mark.parametrize("boxes", [False, True], ids=["planes", "boxes"])
def test_a_failure_is_not_left_for_the_threads_next_call(
    submit: Any, gpu: Gpu, boxes: bool
) -> None:
    """PyTorch takes the last error for that of a kernel it has just launched."""
    copies, _, _ = queue_of(gpu, boxes)
    copies[2, 4] = 1
    assert gpu.lib.hipMemcpy2DAsync(*map(int, copies[2, [0, 4, 1, 5, 2, 3]]), 4, 0)
    assert gpu.lib.hipGetLastError() != 0, "HIP keeps it"
    submitted = submit(copies, gpu.stream)
    assert submitted is not None
    assert submitted[0] == 2
    assert gpu.lib.hipPeekAtLastError() == 0
    gpu.wait()


# --- tables ------------------------------------------------------------------------

ONE = np.arange(16, dtype=np.uint64).reshape(2, 8)


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (ONE.astype(np.int64), "of uint64, not of format 'l'"),
        (ONE.astype(np.float64), "of uint64, not of format 'd'"),
        (ONE.astype(np.uint32), "of uint64, not of format 'I'"),
        (ONE.astype(">u8"), "of uint64, not of format '>Q'"),
        (ONE.tobytes(), "of uint64, not of format 'B'"),
        (ONE[0], r"of shape \[n, 8\], not \[8\]"),
        (ONE[:, :7], r"of shape \[n, 8\], not \[2, 7\]"),
        (np.zeros((0, 9), np.uint64), r"of shape \[n, 8\], not \[0, 9\]"),
        (ONE[None], r"of shape \[n, 8\], not \[1, 2, 8\]"),
        (np.array(1, np.uint64), r"of shape \[n, 8\], not \[\]"),
        (np.asfortranarray(ONE), "C-contiguous"),
        (np.zeros((4, 8), np.uint64)[::2], "C-contiguous"),
        (np.zeros((2, 16), np.uint64)[:, ::2], "C-contiguous"),
        (np.zeros((1, 16), np.uint64)[:, ::2], "C-contiguous"),
        (np.zeros((2, 16), np.uint64)[:, :8], "C-contiguous"),
        (ONE[::-1], "C-contiguous"),
        (np.broadcast_to(ONE[0], (2, 8)), "C-contiguous"),
    ],
)
def test_what_is_no_table_is_refused(
    submit: Any, gpu: Gpu, bad: Any, what: str
) -> None:
    with pytest.raises(ValueError, match=f"^the table of rectangles must be {what}$"):
        submit(bad, gpu.stream)
    assert gpu.calls() == (0, 0)


def test_arguments_of_other_types_are_refused(submit: Any, gpu: Gpu) -> None:
    for arguments in (ONE.tolist(), gpu.stream), (None, 0), (ONE, -1), (ONE, "s"):
        with pytest.raises(TypeError):
            submit(*arguments)
    assert gpu.calls() == (0, 0)


def test_part_of_a_table_and_one_that_cannot_be_written(submit: Any, gpu: Gpu) -> None:
    copies, target, rectangles = queue_of(gpu, False)
    before = noise(ARENA, 1)
    gpu.write(target, before)
    copies.flags.writeable = False
    assert submit(copies[2:4], gpu.stream) is None
    assert submit(copies[5:], gpu.stream) is None
    gpu.wait()
    chosen = [*rectangles[2:4], rectangles[5]]
    assert np.array_equal(gpu.read(target), expected(before, noise(ARENA), chosen))


# --- threads -----------------------------------------------------------------------


def in_thread(work: Callable[[], Any]) -> Any:
    """What `work` returns in a thread that no driver has seen before."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(work()), daemon=True)
    thread.start()
    thread.join(DEADLINE)
    (answer,) = answers
    return answer


@pytest.mark.parametrize("lines", [1, 2])
def test_other_threads_run_while_the_driver_is_waited_for(
    submit: Any, gpu: Gpu, lines: int
) -> None:
    """A copy to pageable memory is waited for in the call."""
    source, target = gpu.device(ARENA), gpu.pageable(ARENA)
    each = Rectangle(target.address, source.address, 64, 4, 64, 128, 1, lines)
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.002):
            ticks.append(time.perf_counter())

    simulator.configure(copy_latency_us=50_000)
    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    begin = time.perf_counter()
    assert submit(table(each, each, each), gpu.stream) is None
    end = time.perf_counter()
    stop.set()
    thread.join(DEADLINE)
    assert end - begin >= 0.15
    assert any(begin + 0.02 < tick < end - 0.02 for tick in ticks)


def test_several_threads_at_once(submit: Any, gpu: Gpu) -> None:
    target, source = memories(gpu, "load")
    data = noise(ARENA)
    gpu.write(source, data)
    share = ARENA // 4

    def work(number: int) -> None:
        each = [
            Rectangle(
                number * share + 1024 * i, number * share + 1024 * i, 256, 4, 256, 256
            )
            for i in range(share // 1024)
        ]
        copies = table(*(at(target, source, one) for one in each))
        answers.append(submit(copies, gpu.stream))

    answers: list[Any] = []
    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert answers == [None] * 4
    gpu.wait()
    assert np.array_equal(gpu.read(target), data)


@on_cuda
def test_no_context_is_made_current(submit: Any, gpu: Gpu) -> None:
    """The null stream is that of the current context, and there is none to guess."""
    target, source = memories(gpu, "load")
    data = noise(ARENA)
    gpu.write(source, data)
    whole = table(at(target, source, SHAPES["whole"]))

    def work() -> tuple[Any, Any, int | None]:
        context = ctypes.c_void_p()
        answers = submit(whole, 0), submit(whole, gpu.stream)
        gpu.call("", "cuCtxGetCurrent", ctypes.byref(context))
        return *answers, context.value

    assert in_thread(work) == ((0, INVALID_CONTEXT, PLANE), None, None)
    assert simulator.stats().calls["cuDevicePrimaryCtxRetain"] == 0
    gpu.wait()
    assert np.array_equal(gpu.read(target), data)


@on_hip
def test_no_device_is_made_current(submit: Any, gpu: Gpu) -> None:
    target, source = memories(gpu, "load")
    data = noise(ARENA)
    gpu.write(source, data)
    whole = table(at(target, source, SHAPES["whole"]))

    def work() -> tuple[Any, int]:
        device = ctypes.c_int()
        gpu.call("hipSetDevice", "", 1)
        answer = submit(whole, gpu.stream)
        gpu.call("hipGetDevice", "", ctypes.byref(device))
        return answer, device.value

    assert in_thread(work) == (None, 1)
    gpu.wait()
    assert np.array_equal(gpu.read(target), data)


# --- processes ---------------------------------------------------------------------

PRELUDE = """
import atexit, ctypes, os, sys, threading, time
import numpy as np
from vllm_rocm_memory.sim import hipsim
from tests.device_allocator.native.module import load_module
submit = load_module("pitched_copies").submit
"""


def output_of(text: str) -> list[str]:
    """The lines that a program prints, which must end well and complain of nothing."""
    unwanted = ("HIPSIM_", "LD_LIBRARY_PATH")
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + text],
        env={k: v for k, v in os.environ.items() if not k.startswith(unwanted)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout.splitlines()


@on_hip
def test_without_a_driver() -> None:
    """A table is enough to ask, though nothing is in it."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("this machine has a CUDA driver")
    printed = output_of("""
for table in np.zeros((0, 8), np.uint64), np.zeros((1, 8), np.uint64), np.zeros(8):
    try:
        submit(table, 0)
    except (RuntimeError, ValueError) as error:
        print(type(error).__name__, error)
hipsim.load()
print(submit(np.zeros((0, 8), np.uint64), 0))
""")
    assert [line.split(":")[0] for line in printed[:2]] == [
        "RuntimeError this process has no GPU driver"
    ] * 2
    assert printed[2].startswith("ValueError the table of rectangles must be of uint64")
    assert printed[3] == "None"


@on_hip
def test_thread_in_the_call_when_python_ends() -> None:
    """Python 3.11 ends such a thread by unwinding, which no destructor may see."""
    printed = output_of("""
atexit.unregister(hipsim.load().hipsim_abandon)  # the device works on after Python
device = ctypes.c_void_p()
hipsim.check(hipsim.load().hipMalloc(ctypes.byref(device), 4096), "hipMalloc")
host = np.zeros(4096, np.uint8)  # pageable: it is waited for
table = np.array([[host.ctypes.data, device.value, 64, 4, 64, 64, 1, 1]], np.uint64)

class End:
    \"""Keeps Python at its end until the thread has asked for its lock.\"""

    def __init__(self):
        self.sleep, self.write = time.sleep, os.write
        self.kept = host, table

    def __del__(self):
        self.sleep(0.6)
        self.write(1, b"ended")

hipsim.configure(copy_latency_us=300_000)
threading.Thread(target=lambda: submit(table, 0), daemon=True).start()
time.sleep(0.05)
sys.end = End()  # what sys has goes last
""")
    assert printed == ["ended"]


@on_hip
def test_needs_only_the_systems_libraries() -> None:
    command = ["readelf", "-dW", module_path(NAME)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    needed = {
        line.split("[")[1].split(".so")[0]
        for line in text.splitlines()
        if "NEEDED" in line
    }
    assert needed <= {
        "libstdc++",
        "libgcc_s",
        "libc",
        "libm",
        "libdl",
        "ld-linux-x86-64",
        "ld-linux-aarch64",
    }


@on_hip
def test_on_cuda(submit: Any) -> None:
    """All of the above that is about both, in a process with the other driver."""
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", __file__]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        env={
            **os.environ,
            "CUMEM_TEST_VENDOR": "cuda",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # which take two seconds
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
