# SPDX-License-Identifier: Apache-2.0
"""How processes begin, divide and end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_rocm_memory.sim import hipsim

ROOT = Path(__file__).parents[2]

PRELUDE = """
import ctypes, os, sys
import numpy as np
from vllm_rocm_memory.sim import hipsim

def make(name, *arguments):
    handle = ctypes.c_void_p()
    hipsim.check(getattr(hipsim.load(), name)(ctypes.byref(handle), *arguments), name)
    return handle

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


def start(program: str, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + program],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(program: str, **environment: str) -> str:
    process = start(program, **environment)
    try:
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return output


def test_environment_chooses_profile_and_memory() -> None:
    program = """
free, total = ctypes.c_size_t(), ctypes.c_size_t()
hipsim.load().hipMemGetInfo(ctypes.byref(free), ctypes.byref(total))
print(hipsim.profile(), total.value)
"""
    environment = {"HIPSIM_PROFILE": "7.2.3", "HIPSIM_VRAM_BYTES": str(3 << 20)}
    assert run(program, **environment).split() == ["7.2.3", str(3 << 20)]
    assert run(program, HIPSIM_PROFILE="", HIPSIM_VRAM_BYTES="").split() == [
        hipsim.PROFILES[-1],
        str(8 << 30),
    ]


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("HIPSIM_PROFILE", "7.14", "one of 7.2.3 7.15 7.16"),
        ("HIPSIM_VRAM_BYTES", "8G", "a number of bytes"),
        ("HIPSIM_VRAM_BYTES", "-1", "a number of bytes"),
        ("HIPSIM_VRAM_BYTES", "4096", "from 1 MiB"),
    ],
)
def test_a_wrong_environment_is_refused(name: str, value: str, remedy: str) -> None:
    program = """
try:
    hipsim.load()
except ValueError as error:
    print(error)
lib = ctypes.CDLL(str(hipsim.library_path()))
count = ctypes.c_int()
print(lib.hipGetDeviceCount(ctypes.byref(count)), count.value)
"""
    message, device = run(program, **{name: value}).splitlines()
    assert name in message
    assert f"'{value}'" in message
    assert remedy in message
    assert device == "100 0"


@pytest.mark.parametrize(
    ("environment", "engine"),
    [
        ({}, "sdma"),
        ({"GPU_FORCE_BLIT_COPY_SIZE": "64"}, "blit"),
        ({"HSA_ENABLE_SDMA": "0"}, "blit"),
        ({"HSA_ENABLE_SDMA": "1", "GPU_FORCE_BLIT_COPY_SIZE": "0"}, "sdma"),
    ],
)
def test_rocms_own_variables_choose_engines(
    environment: dict[str, str], engine: str
) -> None:
    program = """
device, host = make("hipMalloc", 65536), make("hipHostMalloc", 65536, 0)
hipsim.load().hipMemcpy(device, host, 65536, 1)
print(*(key[0] for key, count in hipsim.stats().copies.items() if count.copies))
"""
    assert run(program, **environment).split() == [engine]


def test_two_processes_have_a_device_each() -> None:
    program = """
print("ready", flush=True)
sys.stdin.readline()
device = make("hipMalloc", 4 << 20)
assert hipsim.load().hipMalloc(ctypes.byref(ctypes.c_void_p()), 1) == 2
hipsim.load().hipFree(device)
for seed in range(20):
    round_trip(seed)
hipsim.assert_clean()
"""
    processes = [start(program, HIPSIM_VRAM_BYTES=str(4 << 20)) for _ in range(2)]
    try:
        for process in processes:
            _, errors = process.communicate("go\n", timeout=60)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()


def test_a_process_ends_with_copies_queued_and_running() -> None:
    run("""
lib = hipsim.load()
data = np.zeros(64 << 20, np.uint8)
device = make("hipMalloc", data.nbytes)
lib.hipHostRegister(data.ctypes.data, data.nbytes, 0)
for _ in range(4):
    stream = make("hipStreamCreateWithFlags", 1)
    for _ in range(50):
        lib.hipMemcpyAsync(device, data.ctypes.data, data.nbytes, 1, stream)
    hipsim.configure(copy_latency_us=3_600_000_000)
    lib.hipMemcpyAsync(device, data.ctypes.data, data.nbytes, 1, stream)
    hipsim.configure(copy_latency_us=0)
assert lib.hipStreamQuery(stream) == 600
""")


EXIT_WHILE_COPYING = """
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

constexpr size_t kBytes = 32 << 20;

// Gone before the process is.
struct Source {
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ~Source() {
    munmap(memory, kBytes);
    usleep(200000);
  }
} source;

int main(int, char** arguments) {
  void* hip = dlopen(arguments[1], RTLD_NOW);
  auto allocate = (int (*)(void**, size_t))dlsym(hip, "hipMalloc");
  auto pin = (int (*)(void*, size_t, unsigned))dlsym(hip, "hipHostRegister");
  auto copy = (int (*)(void*, void*, size_t, int, void*))dlsym(hip, "hipMemcpyAsync");
  void* device = nullptr;
  if (allocate(&device, kBytes) != 0 || pin(source.memory, kBytes, 0) != 0) return 1;
  for (int i = 0; i < 200; ++i) {
    if (copy(device, source.memory, kBytes, 1, nullptr) != 0) return 2;
  }
  return 0;
}
"""


def test_a_program_without_python_ends_with_copies_queued(tmp_path: Path) -> None:
    source, program = tmp_path / "exit.cpp", tmp_path / "exit"
    source.write_text(EXIT_WHILE_COPYING)
    build = ["g++", "-std=c++17", str(source), "-o", str(program), "-ldl"]
    subprocess.run(build, check=True, timeout=120)
    subprocess.run([program, hipsim.library_path()], check=True, timeout=60)


def test_calls_succeed_while_the_interpreter_goes_down() -> None:
    output = run("""
import atexit, weakref
# Runs after the handler that load() registers, as what it registered before would.
def late():
    lib = hipsim.load()
    codes = [lib.hipMemset(device, 1, 100), lib.hipDeviceSynchronize(),
             lib.hipFree(device), lib.hipStreamDestroy(stream)]
    print(codes, flush=True)
atexit.register(late)
lib = hipsim.load()
device, stream = make("hipMalloc", 100), make("hipStreamCreate")
hipsim.configure(copy_latency_us=3_600_000_000)
lib.hipMemsetAsync(device, 1, 100, stream)
""")
    assert output.strip() == "[0, 0, 0, 0]"


def test_a_child_of_an_idle_parent_has_a_device_of_its_own() -> None:
    run("""
hipsim.reset("7.15")
count = ctypes.c_int()
hipsim.load().hipGetDeviceCount(ctypes.byref(count))
child = os.fork()
assert hipsim.profile() == "7.15"
round_trip(child != 0)
hipsim.assert_clean()
if child:
    assert join(child) == 0
""")


@pytest.mark.parametrize(
    "use",
    [
        'make("hipStreamCreate")',
        'make("hipEventCreate")',
        'make("hipMalloc", 100)',
        'make("hipHostMalloc", 100, 0)',
        "hipsim.load().hipStreamSynchronize(None)",
    ],
)
def test_a_child_of_a_parent_with_a_device_is_refused(use: str) -> None:
    run(f"""
{use}
child = os.fork()
if child == 0:
    lib = hipsim.load()
    version = ctypes.c_int()
    for call, *arguments in (
        ["hipMalloc", ctypes.byref(ctypes.c_void_p()), 100],
        ["hipStreamCreate", ctypes.byref(ctypes.c_void_p())],
        ["hipStreamSynchronize", None],
        ["hipDeviceSynchronize"],
        ["hipRuntimeGetVersion", ctypes.byref(version)],
    ):
        assert getattr(lib, call)(*arguments) == 3, call
    assert hipsim.stats().calls["hipMalloc"] <= 1
    sys.exit(0)
assert join(child) == 0
round_trip(1)
""")


def test_a_child_does_not_reach_its_parents_device_memory() -> None:
    run("""
import signal
device = make("hipMalloc", 4096)
child = os.fork()
if child == 0:
    ctypes.memset(device, 1, 4096)
    os._exit(0)
assert join(child) == -signal.SIGSEGV
assert ctypes.string_at(device, 4096) == bytes(4096)
""")


def test_forking_amid_copies_hangs_nobody() -> None:
    run("""
import threading
lib = hipsim.load()
stop = threading.Event()
def work(seed):
    while not stop.is_set():
        round_trip(seed)
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
for thread in threads:
    thread.start()
make("hipStreamCreate")
for _ in range(20):
    child = os.fork()
    if child == 0:
        code = lib.hipMalloc(ctypes.byref(ctypes.c_void_p()), 100)
        lib.hipsim_abandon()
        os._exit(0 if code == 3 else 1)
    assert join(child) == 0
stop.set()
for thread in threads:
    thread.join()
""")


def test_a_child_may_reset_what_its_parent_had_queued() -> None:
    run("""
hipsim.configure(copy_latency_us=300_000)
device, stream = make("hipMalloc", 4096), make("hipStreamCreate")
hipsim.load().hipMemsetAsync(device, 1, 4096, stream)
child = os.fork()
if child == 0:
    hipsim.reset()
    os._exit(0)
assert join(child) == 0
assert hipsim.load().hipStreamSynchronize(stream) == 0
assert ctypes.string_at(device, 4096) == bytes([1]) * 4096
""")


def test_stream_threads_take_no_signals() -> None:
    output = run("""
before = set(os.listdir("/proc/self/task"))
stream, device = make("hipStreamCreate"), make("hipMalloc", 1)
hipsim.load().hipMemsetAsync(device, 0, 1, stream)
hipsim.load().hipStreamSynchronize(stream)  # the thread has begun
(thread,) = set(os.listdir("/proc/self/task")) - before
with open(f"/proc/self/task/{thread}/status") as status:
    print(*(line.split()[1] for line in status if line.startswith("SigBlk")))
with open("/proc/self/status") as status:
    print(*(line.split()[1] for line in status if line.startswith("SigBlk")))
""")
    of_stream, of_main = (int(mask, 16) for mask in output.split())
    interrupt_and_terminate = 1 << (2 - 1) | 1 << (15 - 1)
    assert of_stream & interrupt_and_terminate == interrupt_and_terminate
    assert of_main & interrupt_and_terminate == 0
