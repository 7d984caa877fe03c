# SPDX-License-Identifier: Apache-2.0
"""How processes begin, divide and end."""

import ctypes
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_rocm_memory.sim import hipsim

PAGE = 4096
Run = Callable[..., str]
Start = Callable[..., Any]


def test_environment_chooses_profile_and_memory(run: Run) -> None:
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
        ("HIPSIM_PROFILE", "7.14", f"one of {' '.join(hipsim.PROFILES)}"),
        ("HIPSIM_PROFILE", "cuda-13.0", f"one of {' '.join(hipsim.PROFILES)}"),
        ("HIPSIM_VRAM_BYTES", "8G", "a number of bytes"),
        ("HIPSIM_VRAM_BYTES", "-1", "a number of bytes"),
        ("HIPSIM_VRAM_BYTES", "4096", "from 1 MiB"),
        ("HIPSIM_HOST_READS", "yes", "'fault' or 'allow'"),
        ("HIPSIM_SWITCHES", "slow=1", "these names: corrupt_loads copy_latency_us"),
        ("HIPSIM_SWITCHES", "host_reads=allow", "these names: corrupt_loads"),
        ("HIPSIM_SWITCHES", "corrupt_loads=1,,fill_latency_us=1", "with commas"),
        ("HIPSIM_SWITCHES", "corrupt_loads", "corrupt_loads is '0' or '1'"),
        ("HIPSIM_SWITCHES", "corrupt_loads=2", "corrupt_loads is '0' or '1'"),
        ("HIPSIM_SWITCHES", "stale_memory=1", "is 'clean' or 'as_left' or 'poisoned'"),
        ("HIPSIM_SWITCHES", "copy_latency_us=-1", "a number from 0 to 3600000000"),
        ("HIPSIM_SWITCHES", "fill_latency_us=3600000001", "from 0 to 3600000000"),
    ],
)
def test_a_wrong_environment_is_refused(
    run: Run, name: str, value: str, remedy: str
) -> None:
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


def test_two_processes_have_a_device_each(start: Start) -> None:
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
    programs = [start(program, HIPSIM_VRAM_BYTES=str(4 << 20)) for _ in range(2)]
    for each in programs:
        assert each.receive() == "ready"
    for each in programs:
        each.send("go")
    for each in programs:
        each.finish()


def test_no_page_of_one_process_reaches_another(start: Start) -> None:
    """Not while the first lives, nor after: what a process left is its own to see."""
    program = """
def whole_device():
    device = make("hipMalloc", 4 << 20)
    pages = ctypes.string_at(device, 4 << 20)
    hipsim.check(hipsim.load().hipMemset(device, 0x5A, 4 << 20), "hipMemset")
    hipsim.check(hipsim.load().hipDeviceSynchronize(), "hipDeviceSynchronize")
    hipsim.load().hipFree(device)
    return sorted(set(pages))

for _ in range(2):
    print(*whole_device(), flush=True)
    sys.stdin.readline()
"""
    left = {
        "HIPSIM_VRAM_BYTES": str(4 << 20),
        "HIPSIM_SWITCHES": "stale_memory=as_left",
    }
    first = start(program, **left)
    assert first.receive() == "0"
    second = start(program, **left)
    assert second.receive() == "0"
    first.send("go")
    assert first.receive() == str(0x5A), "the control: it sees its own"
    first.send("end")
    assert first.wait()[0] == 0
    second.send("go")
    assert second.receive() == str(0x5A)
    assert start(program, **left).receive() == "0"


def test_a_process_ends_with_copies_queued_and_running(run: Run) -> None:
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


def test_calls_succeed_while_the_interpreter_goes_down(run: Run) -> None:
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


def test_a_child_of_an_idle_parent_has_a_device_of_its_own(run: Run) -> None:
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


def test_a_child_shares_no_memory_with_a_parent_that_has_freed_its_own(
    run: Run,
) -> None:
    """Its device is its own even after the parent's has been allocated from."""
    run("""
device = make("hipMalloc", PAGE)
assert hipsim.load().hipFree(device) == 0
child = os.fork()
ours = make("hipMalloc", PAGE)
bytes_of = np.full(PAGE, 1 if child else 2, np.uint8)
np.frombuffer((ctypes.c_char * PAGE).from_address(ours.value), np.uint8)[:] = bytes_of
if child:
    assert join(child) == 0
seen = (ctypes.c_char * PAGE).from_address(ours.value).raw
assert seen == bytes_of.tobytes()
assert hipsim.load().hipFree(ours) == 0
""")


@pytest.mark.parametrize(
    "use",
    [
        'make("hipStreamCreate")',
        'make("hipEventCreate")',
        'make("hipMalloc", 100)',
        'make("hipHostMalloc", 100, 0)',
        'make("hipMemAddressReserve", PAGE, 0, None, 0)',
        "create()",
        "virtual()",
        "hipsim.load().hipStreamSynchronize(None)",
    ],
)
def test_a_child_of_a_parent_with_a_device_is_refused(run: Run, use: str) -> None:
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


@pytest.mark.parametrize("memory", ['make("hipMalloc", PAGE)', "virtual()"])
def test_a_child_does_not_reach_its_parents_device_memory(
    run: Run, memory: str
) -> None:
    program = """
child = os.fork()
if child == 0:
    ctypes.memset(device, 1, 4096)
    os._exit(0)
assert join(child) == -signal.SIGSEGV
assert ctypes.string_at(device, 4096) == bytes(4096)
"""
    run(f"device = {memory}\n{program}", HIPSIM_HOST_READS="allow")


def test_forking_amid_copies_hangs_nobody(run: Run) -> None:
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


def test_a_child_may_reset_what_its_parent_had_queued(run: Run) -> None:
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


def test_stream_threads_take_no_signals(run: Run) -> None:
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


# --- the host and virtual memory ---------------------------------------------------

READ = "print(ctypes.string_at(address, 1))"
WRITE = "ctypes.memset(address, 7, 1)"
GRANT = "set_access(address, PAGE, hipsim.LOCATION_HOST{})\n"
READ_ONLY = GRANT.format(", 1")


@pytest.mark.parametrize(
    ("reads", "program", "touches"),
    [
        ("", READ, False),
        ("fault", READ, False),
        ("fault", GRANT.format("") + WRITE, True),
        ("fault", READ_ONLY + READ, True),
        ("fault", READ_ONLY + WRITE, False),
        ("allow", READ, True),
        ("allow", WRITE, True),
        ("fault", 'address = make("hipMalloc", PAGE); ' + WRITE, True),
    ],
)
def test_the_host_touches_virtual_memory_only_where_it_may(
    start: Start, reads: str, program: str, touches: bool
) -> None:
    text = f"address = virtual(); print('mapped', flush=True)\n{program}"
    status, output, errors = start(text, HIPSIM_HOST_READS=reads).wait()
    assert output.startswith("mapped"), errors
    assert status == (0 if touches else -signal.SIGSEGV), errors


# --- memory of another process -----------------------------------------------------

EXPORT = """
device = make("hipMalloc", 3 * PAGE)
data = np.repeat(np.arange(1, 4, dtype=np.uint8), PAGE)
call("hipMemcpy", device, data.ctypes.data, data.size, 1)
export(device.value + PAGE)
"""
ASK = """
for line in sys.stdin:
    print(ctypes.string_at(device.value + int(line), 1)[0], flush=True)
"""


def test_processes_share_what_one_exports(gpu: Any, export: Any) -> None:
    program, handle = export(EXPORT + ASK)
    pointer = gpu.open(handle)
    assert (gpu.read(pointer, PAGE) == 2).all()
    assert (gpu.read(pointer - PAGE, PAGE) == 1).all()
    gpu.call("hipMemset", pointer + 5, 9, 1)
    gpu.call("hipDeviceSynchronize")
    program.send(str(PAGE + 5))
    assert program.receive() == "9"
    assert gpu.lib.hipMemset(pointer, 0, 2 * PAGE + 1) == 1
    stats = hipsim.stats()
    assert (stats.imports, stats.imported_bytes) == (1, 3 * PAGE)
    assert stats.device_bytes == 0
    gpu.call("hipIpcCloseMemHandle", pointer)
    assert gpu.lib.hipMemset(pointer, 0, 1) == 1
    program.send("0")
    assert program.receive() == "1"


def test_an_importer_outlives_the_exporter(gpu: Any, export: Any) -> None:
    program, handle = export(EXPORT + ASK)
    pointer, host = gpu.open(handle), gpu.pinned(PAGE)
    stream = gpu.stream()
    hipsim.configure(copy_latency_us=200_000)
    gpu.call("hipMemcpyAsync", host.ctypes.data, pointer, PAGE, 2, stream)
    program.kill()
    gpu.call("hipStreamSynchronize", stream)
    assert (host == 2).all()
    hipsim.configure(copy_latency_us=0)
    gpu.load(pointer, gpu.pinned(PAGE, seed=1))
    assert np.array_equal(gpu.read(pointer, PAGE), gpu.arrays[-1])
    # What is open can be opened again; nobody else can any more.
    again = gpu.open(handle)
    assert again == pointer
    for _ in range(2):
        gpu.call("hipIpcCloseMemHandle", pointer)
    assert open_error(gpu, handle) == 17


def open_error(gpu: Any, handle: hipsim.IpcMemHandle) -> int:
    out = ctypes.c_void_p()
    error: int = gpu.lib.hipIpcOpenMemHandle(ctypes.byref(out), handle, 1)
    assert out.value is None
    return error


def test_a_handle_ends_with_the_memory(gpu: Any, export: Any) -> None:
    program, first = export(
        EXPORT
        + """
sys.stdin.readline()
call("hipFree", device)
print("free", flush=True)
sys.stdin.readline()
export(make("hipMalloc", 3 * PAGE))
sys.stdin.readline()
"""
    )
    program.send("go")
    assert program.receive() == "free"
    assert open_error(gpu, first) == 17
    assert hipsim.stats().ipc_failed_imports == 1
    # Nor does it lead to memory that is exported later.
    program.send("go")
    told = bytes.fromhex(program.receive())
    assert open_error(gpu, first) == 17
    gpu.open(hipsim.IpcMemHandle.from_buffer_copy(told))


@pytest.mark.parametrize("name", hipsim.PROFILES)
def test_virtual_memory_is_not_exported(start: Start, gpu: Any, name: str) -> None:
    program = start(
        """
address, handle = virtual(), hipsim.IpcMemHandle()
error = hipsim.load().hipIpcGetMemHandle(ctypes.byref(handle), address)
print(error, bytes(handle).hex(), flush=True)
sys.stdin.readline()
""",
        HIPSIM_PROFILE=name,
    )
    error, told = program.receive().split()
    if hipsim.PROFILES.index(name) >= hipsim.PROFILES.index("7.13"):
        assert error == "1"
        return
    assert error == "0"
    handle = hipsim.IpcMemHandle.from_buffer_copy(bytes.fromhex(told))
    assert open_error(gpu, handle) == 17
