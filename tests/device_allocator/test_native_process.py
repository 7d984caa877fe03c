# SPDX-License-Identifier: Apache-2.0
"""The compiled module in processes of their own: at their end, and on CUDA."""

import os
import signal
import subprocess
import tempfile
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
    """Also by threads that have no device yet."""
    printed = output_of(
        CUDA
        + """
arena = cumem.HostArena(2 * PIECE, PIECE)
ptr = malloc(2 * PIECE, device=1)
cumem.back_up([(ptr, 2 * PIECE, arena.address)])
print(arena.registration_error, cudasim.stats().registered_bytes == 2 * PIECE)
print(cudasim.stats().staged_copies, calls("cuDevicePrimaryCtxRetain"))
other = malloc(PIECE)
cumem.restore([(other, PIECE, arena.address)], [])
print(cudasim.stats().staged_copies)
print(arena.release(0, PIECE), cudasim.stats().registered_bytes)
del arena
print(cudasim.stats().registered_bytes)
"""
    )
    assert printed == ["None True", "0 1", "0", f"{2 * MIB} {2 * MIB}", "0"]


def test_cuda_copies_what_is_side_by_side_at_once() -> None:
    printed = output_of(
        CUDA
        + """
arena = cumem.HostArena(8 * PIECE, 4 * PIECE)
ptr = malloc(4 * PIECE)

def copies(*parts):
    return [(ptr + at, size, arena.address + to) for at, size, to in parts]

def count(*parts, **options):
    before = calls("cuMemcpyDtoHAsync_v2"), calls("cuMemcpyHtoDAsync_v2")
    cumem.back_up(copies(*parts), **options)
    cumem.restore(copies(*parts), [], **options)
    print(calls("cuMemcpyDtoHAsync_v2") - before[0], end="")
    print("", calls("cuMemcpyHtoDAsync_v2") - before[1])

pages = [(at, 4096, at) for at in range(0, 8 * 4096, 4096)]
count(*pages)
count(*pages[:3], *pages[4:])  # a gap on both sides
count(*reversed(pages))
count((0, 4096, 0), (4096, 4096, 8192))  # a gap on the host
count((0, 4096, 0), (8192, 4096, 4096))  # a gap on the device
count((0, PIECE, 3 * PIECE), (PIECE, PIECE, 4 * PIECE))  # the end of a piece
count(*pages, window=3 * 4096)
"""
    )
    assert printed == ["1 1", "2 2", "8 8", "2 2", "2 2", "2 2", "3 3"]


def test_cuda_copies_across_ranges() -> None:
    printed = output_of(
        CUDA
        + """
ranges = sorted(malloc(PIECE) for _ in range(8))
pairs = [(a, b) for a, b in zip(ranges, ranges[1:]) if a + PIECE == b]
first, second = pairs[0]
arena = cumem.HostArena(2 * PIECE)
copies = [(first, PIECE, arena.address), (second, PIECE, arena.address + PIECE)]
text = os.urandom(2 * PIECE)
memoryview(arena)[:] = text
cumem.restore(copies, [])
memoryview(arena)[:] = bytes(2 * PIECE)
cumem.back_up(copies)
print(bytes(arena) == text, calls("cuMemcpyDtoHAsync_v2"))
"""
    )
    assert printed == ["True 1"]


def test_cuda_takes_the_detour_too() -> None:
    printed = output_of(
        CUDA
        + """
cudasim.configure(max_registration_bytes=1)
arena = cumem.HostArena(2 * PIECE, PIECE)
ptr = malloc(2 * PIECE, device=1)
text = os.urandom(2 * PIECE)
memoryview(arena)[:] = text
cumem.restore([(ptr, 2 * PIECE, arena.address)], [])
memoryview(arena)[:] = bytes(2 * PIECE)
cumem.back_up([(ptr, 2 * PIECE, arena.address)])
print(bytes(arena) == text, arena.registration_error.split(";")[0])
print(cudasim.stats().staged_copies, calls("cuMemHostAlloc"), calls("cuMemFreeHost"))
del arena
free(ptr)
cudasim.assert_clean()
"""
    )
    assert printed == [
        "True cuMemHostRegister_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory",
        "0 4 4",
    ]


# --- what HIP was seen to do and the simulator does not ----------------------------

DOUBLE = """
double = ctypes.CDLL(os.environ["HIP_DOUBLE"])
for function, kind in {
    "misalign_reservations": ctypes.c_size_t,
    "reserve_only": ctypes.c_void_p,
    "fail_silently": ctypes.c_int,
    "reuse_addresses": ctypes.c_int,
    "place_devices": ctypes.c_char_p,
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


# --- where a device is -------------------------------------------------------------


def test_node_of_a_device_that_is_not_on_the_bus() -> None:
    """The simulators' devices, and those that are not."""
    printed = output_of("""
hipsim.load()
print(cumem.numa_node(0), cumem.numa_node(8), cumem.numa_node(-1))
hipsim.fail("hipDeviceGetPCIBusId", 1, 999)
print(cumem.numa_node(0), hipsim.load().hipPeekAtLastError())
""")
    assert printed == ["None None None", "None 0"]
    assert output_of("cudasim.load(); print(cumem.numa_node(0))") == ["None"]


@pytest.mark.parametrize(
    ("text", "node"), [("1\n", "1"), ("-1\n", "None"), ("", "None"), ("x", "None")]
)
def test_node_is_what_the_kernel_says_of_the_bus(
    hip_double: str, text: str, node: str
) -> None:
    if not Path("/sys/bus/pci/devices").is_dir():
        pytest.skip("this machine has no PCI bus")
    with tempfile.TemporaryDirectory(prefix="pci", dir="/tmp") as folder:
        device = Path(folder) / "0000:c1:00.0"
        device.mkdir()
        (device / "numa_node").write_text(text)
        # from /sys/bus/pci/devices up to the root; and digits as CUDA has them
        bus_id = f"../../../..{folder}/0000:C1:00.0"
        printed = output_of(
            DOUBLE
            + f"double.place_devices({bus_id.encode()!r}); print(cumem.numa_node(0))",
            HIP_DOUBLE=hip_double,
        )
    assert printed == [node]


def test_driver_may_lack_what_can_be_done_without(tmp_path: Path) -> None:
    """No node is known then, and the driver copies what it does not lock."""
    image = hipsim.library_path().read_bytes()
    for name in (b"hipDeviceGetPCIBusId", b"hipHostMalloc"):
        assert b"\0" + name + b"\0" in image
        image = image.replace(b"\0" + name + b"\0", b"\0" + name[:-1] + b"_\0")
    library = tmp_path / "libamdhip64.so.7"
    library.write_bytes(image)
    printed = output_of(
        """
lacking = ctypes.CDLL(os.environ["LACKING"])
cumem.init_module(lambda handle: handles.update({handle[2]: handle}), handles.pop)
print(cumem.driver().path == lacking._name, cumem.numa_node(0))
lacking.hipsim_set_switch(b"max_registration_bytes", ctypes.c_int64(1))
ptr = malloc(1 << 20)
arena = cumem.HostArena(1 << 20)
text = os.urandom(1 << 20)
memoryview(arena)[:] = text
cumem.restore([(ptr, 1 << 20, arena.address)], [])
memoryview(arena)[:] = bytes(1 << 20)
cumem.back_up([(ptr, 1 << 20, arena.address)])
print(bytes(arena) == text, arena.registered)
""",
        LACKING=os.fspath(library),
    )
    assert printed == ["True None", "True 0"]


# --- what a kernel may not have ----------------------------------------------------

LIBC = """
libc = ctypes.CDLL(os.environ["LD_PRELOAD"])
start(hipsim)
PAGE, PIECES = 4096, 6
SIZE = PIECES * PAGE
ptr = malloc(SIZE)
arena = cumem.HostArena(SIZE, PAGE)
text = os.urandom(SIZE)
source = ctypes.create_string_buffer(text, SIZE)
cumem.restore([(ptr, SIZE, ctypes.addressof(source))], [])
copies = [(ptr, SIZE, arena.address)]
"""


def test_kernel_that_cannot_populate(libc_double: str) -> None:
    """Linux before 5.14: pages are touched one by one, and keep what they hold."""
    printed = output_of(
        LIBC
        + """
from tests.device_allocator.native.cumem import memory_of
memoryview(arena)[: 2 * PAGE] = bytes([7]) * (2 * PAGE)
libc.refuse_populate(22, 1, 1000)  # EINVAL
expected = bytearray([7]) * (2 * PAGE)
expected[PAGE + 5] = text[0]
cumem.back_up([(ptr, 1, arena.address + at) for at in (PAGE + 5, 4 * PAGE)])
print(arena.prepared // PAGE, arena.registered // PAGE, libc.count_populates())
print(memory_of(arena.address) // PAGE, bytes(arena)[: 2 * PAGE] == expected)
wide = cumem.HostArena(SIZE, SIZE)
before = memory_of(wide.address)
cumem.back_up([(ptr, 1, wide.address)])
print((memory_of(wide.address) - before) // PAGE)
cumem.back_up(copies)
print(bytes(arena) == text)
""",
        LD_PRELOAD=libc_double,
    )
    assert printed == ["2 2 2", "3 True", "6", "True"]


THP_POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")

HUGE = """
from tests.device_allocator.native.cumem import memory_of
start(hipsim)
MIB = 1 << 20
HUGE = 2 * MIB
ptr = malloc(9 * MIB)
"""


@pytest.mark.parametrize("are_had", [True, False])
def test_huge_pages_are_counted(are_had: bool) -> None:
    """What has none is taken in small pages, to the last one."""
    *printed, huge = output_of(
        HUGE
        + """
SIZE = 9 * MIB
arena = cumem.HostArena(SIZE, 4 * MIB)
PR_SET_THP_DISABLE = 41
if os.environ["WITHOUT"]:
    assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
cumem.back_up([(ptr, SIZE, arena.address)])
print(arena.prepared == memory_of(arena.address) == SIZE)
huge = arena.huge
print(huge == memory_of(arena.address, "AnonHugePages"))
arena.release(0, 4 * MIB)
print(arena.huge == memory_of(arena.address, "AnonHugePages"))
print(memory_of(arena.address) // MIB)
print(huge // MIB)
""",
        WITHOUT="" if are_had else "yes",
    )
    assert printed == ["True", "True", "True", "5"]
    if not are_had:
        assert huge == "0"
    elif huge == "0":
        pytest.skip("this machine has no huge page to give")


def test_page_of_zeros_is_no_memory() -> None:
    """Reading maps it, and a kernel that splits it says that all of it is there."""
    printed = output_of(
        HUGE
        + """
import mmap
libc = ctypes.CDLL(None)
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
arena = cumem.HostArena(8 * MIB, 4 * MIB)
for start in range(arena.address, arena.address + 4 * MIB, HUGE):
    assert ctypes.c_ubyte.from_address(start).value == 0
    # makes small pages of it
    for access in (mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE):
        assert libc.mprotect(start, HUGE // 2, access) == 0
print(memory_of(arena.address))
cumem.back_up([(ptr, 8 * MIB, arena.address)])
print(arena.prepared == memory_of(arena.address) == 8 * MIB)
print(arena.huge <= memory_of(arena.address, "AnonHugePages"))
"""
    )
    assert printed == ["0", "True", "True"]


def test_memory_is_written_to_before_it_is_read() -> None:
    """Each huge page takes one fault then, and is no page of zeros first."""
    faults, huge, count = output_of(
        HUGE
        + """
import resource
SIZE = 128 * MIB
arena = cumem.HostArena(SIZE, SIZE)
small = cumem.HostArena(MIB)
cumem.back_up([(ptr, 1, small.address)])  # what a transfer takes beside it
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
cumem.back_up([(ptr, 1, arena.address)])
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(arena.huge // HUGE)
print(SIZE // HUGE)
"""
    )
    if huge != count:
        pytest.skip("this machine has too few huge pages")
    assert int(faults) < int(count) + int(count) // 2


def test_forked_process_has_no_arena() -> None:
    """And leaves alone what has come to its addresses there."""
    printed = output_of(
        """
import mmap
from tests.device_allocator.native.cumem import memory_of
start(hipsim)
SIZE = 4 << 20
ptr = malloc(SIZE)
arena = cumem.HostArena(SIZE)
cumem.back_up([(ptr, SIZE, arena.address)])
address = arena.address
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
size_and_flags = (ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
libc.mmap.argtypes = (ctypes.c_void_p, *size_and_flags)

def in_child():
    global arena
    try:
        memory_of(address)
    except AssertionError:
        print("not mapped")
    MAP_FIXED_NOREPLACE = 0x100000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
    access = mmap.PROT_READ | mmap.PROT_WRITE
    assert libc.mmap(address, SIZE, access, flags, -1, 0) == address
    ctypes.memset(address, 7, SIZE)
    del arena
    print(memory_of(address) == SIZE, ctypes.string_at(address, SIZE).count(7) == SIZE)
    sys.stdout.flush()
    sys.stderr.flush()

child = os.fork()
if child == 0:
    try:
        in_child()
    finally:
        os._exit(0)
assert os.waitpid(child, 0) == (child, 0)
print(arena.registered == hipsim.stats().registered_bytes == SIZE)
cumem.back_up([(ptr, SIZE, address)])
print(memory_of(address) == SIZE)
"""
    )
    assert printed == ["not mapped", "True True", "True", "True"]


@pytest.mark.parametrize("nth", [1, 3, 5])
@pytest.mark.parametrize("threads", [1, 3])
def test_machine_without_memory(libc_double: str, nth: int, threads: int) -> None:
    """What was newly taken is given back, and nothing else is."""
    printed = output_of(
        LIBC
        + f"""
threads = {threads}
hipsim.fail("hipHostRegister", 1, 2)  # and is tried again by the next transfer
cumem.back_up([(ptr, PAGE, arena.address)])
libc.refuse_populate(12, {nth}, 1)  # ENOMEM; the first page is there already
try:
    cumem.back_up(copies, threads=threads)
except MemoryError as error:
    print(error)
print(arena.prepared == arena.registered == hipsim.stats().registered_bytes == PAGE)
print(bytes(arena)[:PAGE] == text[:PAGE])
print(hipsim.stats().streams)
cumem.back_up(copies, threads=threads)
print(bytes(arena) == text, arena.registered == SIZE)
""",
        LD_PRELOAD=libc_double,
    )
    told, *printed = printed
    assert printed == ["True", "True", "0", "True True"]
    if threads == 1:
        kib = 4 * (nth - 1)
        had = f"{kib << 10} bytes ({kib}.0 KiB)"
        assert told == (
            f"the machine has no memory left: {had} of the 20480 bytes (20.0 KiB) "
            "that a backup takes were had, and are given back. Free host memory, raise "
            "the container's limit, or sleep at level 2, which backs nothing up"
        )


def test_memory_that_another_transfer_has_written_to_stays(libc_double: str) -> None:
    printed = output_of(
        LIBC
        + """
import threading, time
other = malloc(PAGE)
cumem.restore([(other, PAGE, ctypes.addressof(source) + PAGE)], [])
told = []

def back_up():
    try:
        cumem.back_up(copies, threads=1)
    except MemoryError as error:
        told.append(str(error))

libc.refuse_populate(12, 4, 1)  # ENOMEM
libc.hold_populate(4)
thread = threading.Thread(target=back_up)
thread.start()
deadline = time.monotonic() + 30
# what it copies to that piece would come after the other's otherwise
while bytes(arena)[2 * PAGE : 3 * PAGE] != text[2 * PAGE : 3 * PAGE]:
    assert time.monotonic() < deadline
    time.sleep(0.001)
cumem.back_up([(other, PAGE, arena.address + 2 * PAGE)])
libc.hold_populate(0)
thread.join(30)
print(told[0].split(" that")[0])
print(arena.prepared // PAGE, arena.missing(2 * PAGE, PAGE))
print(bytes(arena)[2 * PAGE : 3 * PAGE] == text[PAGE : 2 * PAGE])
""",
        LD_PRELOAD=libc_double,
    )
    assert printed == [
        "the machine has no memory left: 8192 bytes (8.0 KiB) of the "
        "24576 bytes (24.0 KiB)",
        "1 0",
        "True",
    ]


def test_piece_that_cannot_be_had_leaves_nothing(libc_double: str) -> None:
    """Of what was touched before the machine had no more."""
    printed = output_of(
        LIBC
        + """
from tests.device_allocator.native.cumem import memory_of
PR_SET_THP_DISABLE = 41
assert libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
large = cumem.HostArena(4 << 20, 4 << 20)
libc.refuse_populate(12, 1, 1)  # ENOMEM, for all but a page of each stretch
try:
    cumem.back_up([(ptr, 1, large.address)])
except MemoryError as error:
    print(str(error).split(" that")[0])
print(large.prepared, memory_of(large.address))
""",
        LD_PRELOAD=libc_double,
    )
    text = "0 bytes (0.0 KiB) of the 4194304 bytes (4.0 MiB)"
    assert printed == [f"the machine has no memory left: {text}", "0 0"]


def test_memory_that_the_kernel_keeps_is_not_given_back(libc_double: str) -> None:
    done = run_program(
        LIBC
        + """
cumem.back_up(copies)
libc.refuse_drop(22)
print(arena.release(0, SIZE), arena.prepared == SIZE, arena.registered)
libc.refuse_drop(0)
cumem.back_up(copies)
print(bytes(arena) == text, arena.registered == SIZE)
print(arena.release(0, SIZE) == SIZE)
""",
        LD_PRELOAD=libc_double,
    )
    assert done.stdout.splitlines() == ["0 True 0", "True True", "True"]
    assert done.stderr == (
        "cumem: madvise failed: Invalid argument; 24576 bytes (24.0 KiB) of host "
        "memory that were to be given back stay taken\n"
    )


HELD = """
import threading, time
told = []

def back_up():
    try:
        cumem.back_up(copies, threads=1, window=PAGE)
    except cumem.DriverError as error:
        told.append(error.call)

def wait_for(count):
    deadline = time.monotonic() + 30
    while hipsim.stats().calls["hipMemcpyAsync"] < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)

hipsim.reset()
thread = threading.Thread(target=back_up)
"""


def test_copies_begin_before_all_pieces_are_ready(libc_double: str) -> None:
    printed = output_of(
        LIBC
        + HELD
        + """
libc.hold_populate(4)
thread.start()
wait_for(3)
print(arena.prepared // PAGE, arena.missing(0, SIZE) // PAGE)
time.sleep(0.05)
print(hipsim.stats().calls["hipMemcpyAsync"], thread.is_alive())
libc.hold_populate(0)
thread.join(30)
print(bytes(arena) == text)
""",
        LD_PRELOAD=libc_double,
    )
    assert printed == ["3 3", "3 True", "True"]


def test_transfer_that_fails_prepares_no_more(libc_double: str) -> None:
    """And waits for what is being prepared."""
    printed = output_of(
        LIBC
        + HELD
        + """
hipsim.configure(copy_latency_us=5_000)
copies[:0] = [(ptr, PAGE, arena.address)] * 1000  # a while, one by one
libc.hold_populate(3)
thread.start()
deadline = time.monotonic() + 30
while libc.count_populates() < 3:
    assert time.monotonic() < deadline
    time.sleep(0.001)
hipsim.fail("hipMemcpyAsync", 1, 999)
while hipsim.stats().pending_faults:
    assert time.monotonic() < deadline
    time.sleep(0.001)
time.sleep(0.1)
print(thread.is_alive(), arena.prepared // PAGE)
libc.hold_populate(0)
thread.join(30)
print(told, libc.count_populates(), arena.prepared // PAGE, arena.registered // PAGE)
""",
        LD_PRELOAD=libc_double,
    )
    assert printed == ["True 2", "['hipMemcpyAsync'] 3 3 3"]


@pytest.mark.parametrize("allowed", [0, 1, 2])
@pytest.mark.parametrize("locked", [True, False], ids=["direct", "ring"])
def test_machine_without_threads(libc_double: str, allowed: int, locked: bool) -> None:
    """Those that can be started do all of the work, and without any the caller does."""
    printed = output_of(
        LIBC
        + f"""
hipsim.configure(max_registration_bytes=0 if {locked} else 1)
libc.allow_threads({allowed})
cumem.back_up(copies, threads=3)
print(bytes(arena) == text, arena.prepared == SIZE, arena.registered)
memoryview(source).cast("B")[:] = bytes(SIZE)
cumem.restore([(ptr, SIZE, ctypes.addressof(source))], [])
cumem.restore(copies, [])
cumem.back_up([(ptr, SIZE, ctypes.addressof(source))])
print(source.raw == text)
libc.allow_threads(-1)
print(hipsim.stats().streams, hipsim.stats().host_allocations)
""",
        LD_PRELOAD=libc_double,
    )
    assert printed == [f"True True {6 * PAGE if locked else 0}", "True", "0 0"]
