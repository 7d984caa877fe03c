# SPDX-License-Identifier: Apache-2.0
"""The compiled module in processes of their own: at their end, and on CUDA."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from vllm_rocm_memory.sim import hipsim

from .native.program import DEADLINE, ROOT, output_of, run_program

PAGE = 4096
MIB = 1 << 20

# --- host access (R10) -------------------------------------------------------------

READ = """
start(hipsim)
ptr = malloc(1 << 20)
cumem.suspend([ptr])
cumem.python_create_and_map(*handles[ptr])
cumem.restore([], [(ptr, 1 << 20)])
print("mapped", flush=True)
print(ctypes.c_ubyte.from_address(ptr).value)  # as Tensor.item() does
ctypes.c_ubyte.from_address(ptr).value = 3
"""


@pytest.mark.parametrize("profile", ["7.2.3", "7.13", "7.16"])
def test_host_reads_woken_memory(profile: str) -> None:
    assert output_of(READ, HIPSIM_PROFILE=profile) == ["mapped", "0"]


def test_host_reads_fault_where_hip_has_no_host_access() -> None:
    """Which is what makes the test before this one mean something."""
    done = run_program(READ, HIPSIM_PROFILE="7.1")
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "mapped\n")


# --- the end of a process ----------------------------------------------------------

KEEP_DEVICE = """
import atexit, time
atexit.unregister(hipsim.load().hipsim_abandon)  # the device works on after Python
"""


def test_memory_is_freed_when_python_has_ended() -> None:
    done = run_program("""
start(hipsim)
mapped, asleep, kept = malloc(1 << 20), malloc(1 << 20), malloc(1 << 20)
cumem.suspend([asleep])

class Tensor:
    \"""Frees two ranges; what it needs of other modules it has.\"""

    def __init__(self):
        self.free, self.ptrs = _library.my_free, (mapped, asleep)
        self.ranges, self.write = cumem.ranges, os.write

    def __del__(self):
        for ptr in self.ptrs:
            self.free(ptr, 1 << 20, 0, None)
        self.write(1, f"{len(self.ranges())} left".encode())

def never(ptr):
    os.write(1, b"Python was asked at its end, ")

cumem.init_module(print, never)
sys.tensor = Tensor()  # what sys has goes last
sys.arena = cumem.HostArena(1 << 20)
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 left", "")


def test_memory_freed_after_python_is_waited_for() -> None:
    """Nobody else does so then."""
    done = run_program("""
start(hipsim)
ptr = malloc(1 << 20)

class Tensor:
    def __init__(self):
        self.free, self.ptr = _library.my_free, ptr

    def __del__(self):
        self.free(self.ptr, 1 << 20, 0, None)

sys.tensor = Tensor()  # what sys has goes last
hipsim.fail("hipDeviceSynchronize", 1, 999)
""")
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert "hipDeviceSynchronize failed: hipErrorUnknown (999)" in line


@pytest.mark.parametrize("by", ["module", "caller", "callback"])
def test_thread_in_the_module_when_python_ends(by: str) -> None:
    """Python 3.11 ends such a thread by unwinding, which no destructor may see."""
    printed = output_of(
        KEEP_DEVICE
        + """
import threading
start(hipsim)
ptr = malloc(1 << 20)
arena = cumem.HostArena(1 << 20)
locked = ctypes.PyDLL(cumem.__file__)
begun = threading.Event()

class End:
    \"""Keeps Python at its end until the thread has asked for its lock.\"""

    def __init__(self):
        self.sleep, self.write = time.sleep, os.write

    def __del__(self):
        self.sleep(0.6)
        self.write(1, b"ended")

def slow(*_):
    begun.set()
    time.sleep(0.2)

def in_thread():
    if by == "callback":
        cumem.init_module(print, slow)
        locked.my_free(ctypes.c_void_p(ptr), 1 << 20, 0, None)
    begun.set()
    if by == "module":
        cumem.back_up([(ptr, 1 << 20, arena.address)])
    # the callback answers at once, and the device is slow
    locked.my_free(ctypes.c_void_p(ptr), 1 << 20, 0, None)

hipsim.configure(copy_latency_us=300_000, fill_latency_us=300_000)
hipsim.check(hipsim.load().hipMemsetAsync(ptr, 7, 4096, None), "hipMemsetAsync")
"""
        + f"by = {by!r}"
        + """
threading.Thread(target=in_thread, daemon=True).start()
begun.wait(10)
time.sleep(0.05)
sys.end = End()
"""
    )
    assert printed == ["ended"]


def test_process_that_leaves_everything_behind_ends_well() -> None:
    printed = output_of("""
start(hipsim)
ptrs = [malloc(1 << 20) for _ in range(3)]
cumem.suspend(ptrs[:1])
arena = cumem.HostArena(1 << 20)
view = memoryview(arena)
print(len(cumem.ranges()))
""")
    assert printed == ["3"]


def test_malloc_without_callbacks_is_refused() -> None:
    done = run_program("""
hipsim.load()
ptr = malloc(1 << 20)
""")
    assert done.returncode == -signal.SIGABRT  # ctypes does not catch what is thrown
    assert "init_module was not called" in done.stderr


# --- the CUDA column ---------------------------------------------------------------

CUDA = """
PIECE = 2 << 20

class Flags(ctypes.Structure):
    _fields_ = cudasim.MemAllocationFlags._fields_

def properties(ptr):
    slot = handles[ptr][3]
    handle = ctypes.c_uint64.from_address(slot).value
    found = cudasim.MemAllocationProp()
    call = "cuMemGetAllocationPropertiesFromHandle"
    function = getattr(cudasim.load(), call)
    cudasim.check(function(ctypes.byref(found), handle), call)
    rdma = found.allocFlags.gpuDirectRDMACapable
    return found.requestedHandleTypes, rdma, found.location.id

def calls(name):
    return cudasim.stats().calls[name]

start(cudasim)
"""


def test_cuda_has_one_chunk_and_one_slot() -> None:
    printed = output_of(
        CUDA
        + """
ptr = malloc(3 * PIECE + 1)
device, size, address, slot = handles[ptr]
print(device, size == 4 * PIECE, address == ptr, cumem.chunks(ptr) == [size])
print(ctypes.c_uint64.from_address(slot).value != 0)
cumem.suspend([ptr])
print(ctypes.c_uint64.from_address(slot).value, cumem.is_mapped(ptr))
for wrong in ([(slot, size)], "slot", None, -1):
    try:
        cumem.python_create_and_map(device, size, ptr, wrong)
    except TypeError as error:
        print("TypeError")
try:
    cumem.python_create_and_map(device, size, ptr, slot + 8)
except ValueError as error:
    print("ValueError")
cumem.python_create_and_map(device, size, ptr, slot)
print(cumem.is_mapped(ptr))
free(ptr)
cudasim.assert_clean()
""",
        VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE="2",
    )
    assert printed == [
        "0 True True True",
        "True",
        "0 False",
        *["TypeError"] * 4,
        "ValueError",
        "True",
    ]


def test_cuda_asks_for_rdma_and_falls_back_from_fabric_handles_once() -> None:
    printed = output_of(
        CUDA
        + """
first, second = malloc(PIECE), malloc(PIECE)
print(properties(first), properties(second), calls("cuMemCreate"))
other = malloc(PIECE, device=1)  # each device is asked by itself
print(properties(other), calls("cuMemCreate"))
for ptr in (first, second, other):
    free(ptr)
cudasim.assert_clean()
"""
    )
    # 1: a file descriptor of POSIX
    assert printed == ["(1, 1, 0) (1, 1, 0) 3", "(1, 1, 1) 5"]


def test_cuda_falls_back_for_a_refusal_alone() -> None:
    printed = output_of(
        CUDA
        + """
def try_to(function, *arguments):
    try:
        function(*arguments)
    except cumem.DriverError as error:
        return error.call, error.error_number

ptr = malloc(PIECE)
cumem.suspend([ptr])
handle = handles[ptr]
for error in (2, 999, 800, 801):
    cudasim.fail("cuMemCreate", 1, error)
    print(try_to(cumem.python_create_and_map, *handle), cumem.is_mapped(ptr))
# an attribute that is not told is one that the device does not have
cudasim.fail("cuDeviceGetAttribute", 1, 1)
cumem.python_create_and_map(*handle)
print(properties(ptr))
"""
    )
    assert printed == [
        "('cuMemCreate', 2) False",
        "('cuMemCreate', 999) False",
        "('cuMemCreate', 800) False",  # of a device that is known to refuse fabric
        "('cuMemCreate', 801) False",
        "(1, 0, 0)",
    ]


def test_cuda_addresses_are_kept_while_something_may_be_mapped_there() -> None:
    """That CUDA would refuse to free them is not established."""
    printed = output_of(
        CUDA
        + """
ptr = malloc(PIECE)
cudasim.fail("cuMemUnmap", 1, 999)
try:
    cumem.free(ptr)
except cumem.DriverError as error:
    print(error.call, calls("cuMemAddressFree"), cudasim.stats().mappings)
print(cumem.release_pending(), calls("cuMemAddressFree"))
cudasim.assert_clean()
"""
    )
    assert printed == ["cuMemUnmap 0 1", "0 1"]


@pytest.mark.parametrize("refusal", [800, 801])
def test_cuda_falls_back_at_the_first_refusal(refusal: int) -> None:
    printed = output_of(
        CUDA
        + f"""
cudasim.fail("cuMemCreate", 1, {refusal})
ptr = malloc(PIECE)
print(properties(ptr), calls("cuMemCreate"))
"""
    )
    assert printed == ["(1, 1, 0) 2"]


def test_cuda_out_of_memory_is_no_refusal() -> None:
    done = run_program(
        CUDA
        + """
cudasim.fail("cuMemCreate", 1, 2)
print(malloc(PIECE), calls("cuMemCreate"))
cudasim.assert_clean()
"""
    )
    assert (done.returncode, done.stdout) == (0, "None 1\n")
    assert "CUDA_ERROR_OUT_OF_MEMORY (2)" in done.stderr


def test_cuda_context_is_put_back() -> None:
    printed = output_of(
        CUDA
        + """
import threading
lib = cudasim.load()
cudasim.check(lib.cuInit(0), "cuInit")

def current():
    context = ctypes.c_void_p()
    cudasim.check(lib.cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
    return context.value

def work():
    ptr = malloc(PIECE)
    cumem.suspend([ptr])
    cumem.python_create_and_map(*handles[ptr])
    cumem.restore([], [(ptr, PIECE)])
    arena = cumem.HostArena(PIECE)
    cumem.back_up([(ptr, PIECE, arena.address)])
    assert arena.registration_error is None
    assert bytes(memoryview(arena)[:9]) == bytes(9)
    del arena
    free(ptr)

work()
print(current())
context = ctypes.c_void_p()
lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), 3)
lib.cuCtxSetCurrent(context)
work()
print(current() == context.value, calls("cuDevicePrimaryCtxRetain"))
cudasim.assert_clean()
"""
    )
    # one of the test's, one of the module's
    assert printed == ["None", "True 2"]


def test_cuda_arena_is_registered_for_every_device() -> None:
    """Also from a thread that has no device yet."""
    printed = output_of(
        CUDA
        + """
arena = cumem.HostArena(PIECE)
print(arena.registration_error, cudasim.stats().registered_bytes == PIECE)
ptr = malloc(PIECE, device=1)
cumem.back_up([(ptr, PIECE, arena.address)])
print(cudasim.stats().staged_copies)
del arena
print(cudasim.stats().registered_bytes)
"""
    )
    assert printed == ["None True", "0", "0"]


# --- what HIP was seen to do and the simulator does not ----------------------------

DOUBLE = """
double = ctypes.CDLL(os.environ["HIP_DOUBLE"])
for function, kind in {
    "misalign_reservations": ctypes.c_size_t,
    "reserve_only": ctypes.c_void_p,
    "fail_silently": ctypes.c_int,
    "reuse_addresses": ctypes.c_int,
}.items():
    getattr(double, function).argtypes = (kind,)
start(hipsim)
"""


@pytest.fixture(scope="module")
def hip_double(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The compiled double; what it does not have is found in what it needs."""
    library = tmp_path_factory.mktemp("double") / "libamdhip64-double.so.7"
    csrc = ROOT / "csrc"
    source = Path(__file__).parent / "native" / "hip_double.cpp"
    simulator = hipsim.library_path()
    command = ["g++", "-std=c++17", "-shared", "-fPIC", f"-I{csrc}", source]
    linker = f"-Wl,--no-as-needed,-rpath,{simulator.parent}"
    command += [linker, simulator, "-o", library]
    subprocess.run(command, check=True, timeout=DEADLINE)
    return os.fspath(library)


def test_address_that_is_not_aligned_is_refused(hip_double: str) -> None:
    """R2: an alignment may be refused, and what comes without one be of no use."""
    done = run_program(
        DOUBLE
        + """
double.misalign_reservations(1 << 16)
malloc(1 << 20)
""",
        HIP_DOUBLE=hip_double,
    )
    assert done.returncode == -signal.SIGABRT  # ctypes does not catch what is thrown
    assert "hipMemAddressReserve returned 0x" in done.stderr
    assert "which is not aligned to 65536 bytes" in done.stderr


def test_address_of_a_sleeping_range_is_given_to_nobody(hip_double: str) -> None:
    done = run_program(
        DOUBLE
        + """
ptr = malloc(1 << 20)
double.reserve_only(ptr + 4096)
try:
    cumem.suspend([ptr])
except cumem.OutOfMemoryError as error:
    print(error.call, cumem.is_mapped(ptr), hipsim.stats().reservations, flush=True)
malloc(1 << 20)
""",
        HIP_DOUBLE=hip_double,
        HIPSIM_PROFILE="7.2.3",
    )
    assert done.stdout == "hipMemAddressReserve False 0\n"
    assert done.returncode == -signal.SIGABRT
    assert "which a sleeping allocation will come back to" in done.stderr


def test_address_of_a_range_that_falls_asleep_is_given_to_nobody(
    hip_double: str,
) -> None:
    """Up to HIP 7.12 it is free for a moment, in which other threads allocate."""
    assert output_of(
        DOUBLE
        + """
import threading
ptr = malloc(1 << 20)
asleep = threading.Event()

def allocate():
    while not asleep.is_set():
        cumem.free(malloc(1 << 20))

threads = [threading.Thread(target=allocate) for _ in range(2)]
double.reuse_addresses(1)
for thread in threads:
    thread.start()
for _ in range(20):
    cumem.suspend([ptr])
    cumem.python_create_and_map(*handles[ptr])
asleep.set()
for thread in threads:
    thread.join()
print(cumem.is_mapped(ptr))
""",
        HIP_DOUBLE=hip_double,
        HIPSIM_PROFILE="7.2.3",
    ) == ["True"]


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_mapping_that_silently_fails_is_found_and_undone(
    hip_double: str, nth: int
) -> None:
    """As HIP 7.1's may."""
    assert output_of(
        DOUBLE
        + f"""
ptr = malloc(5 << 20)
cumem.suspend([ptr])
double.fail_silently({nth})
try:
    cumem.python_create_and_map(*handles[ptr])
except cumem.DriverError as error:
    print(error.call, error.error_number)
stats = hipsim.stats()
print(cumem.is_mapped(ptr), stats.handles, stats.mappings, stats.reservations)
cumem.python_create_and_map(*handles[ptr])
cumem.restore([], [(ptr, 5 << 20)])
print(cumem.is_mapped(ptr), hipsim.stats().mappings)
free(ptr)
hipsim.assert_clean()
""",
        HIP_DOUBLE=hip_double,
        HIPSIM_PROFILE="7.1",
        VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE="2",
    ) == ["hipMemSetAccess 1", "False 0 0 1", "True 3"]
