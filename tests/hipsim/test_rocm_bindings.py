# SPDX-License-Identifier: Apache-2.0
"""AMD's own Python bindings of HIP, which know nothing of the simulator, drive it.

They open `libamdhip64.so`, without a version, wherever ROCm is or else where the
dynamic loader finds it. So each program has a folder with a library of that name on
LD_LIBRARY_PATH, and no ROCm.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_rocm_memory.sim import hipsim

pytest.importorskip(
    "rocm.bindings.hip",
    reason="the package rocm-bindings-hip is not installed (x86_64 Linux: "
    "pip install rocm-bindings-hip==10.0.0.0.1.2)",
)

# The bindings were generated from HIP 7.15.
PROFILES = ("7.2.3", "7.15", "7.16")
each_profile = pytest.mark.parametrize("name", PROFILES)

BEGIN = """
sys.modules["rocm_sdk"] = None  # a ROCm of pip's would be found first
from rocm.bindings import cyhip, hip

SIZE = 2 * PAGE
KIND = hip.hipMemcpyKind.hipMemcpyDefault

def check(result):
    error, *values = result
    if error != hip.hipError_t.hipSuccess:
        raise RuntimeError(error.name)
    return values[0] if values else None

def expect(error, result):
    assert result[0] == getattr(hip.hipError_t, error), result

def stream():
    return check(hip.hipStreamCreateWithFlags(hip.hipStreamNonBlocking))

def bytes_from(seed):
    return np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)

properties = hip.hipMemAllocationProp()
properties.type = hip.hipMemAllocationType.hipMemAllocationTypePinned
properties.location.type = hip.hipMemLocationType.hipMemLocationTypeDevice
properties.location.id = 0

def set_access(address):
    access = hip.hipMemAccessDesc()
    access.location.type = hip.hipMemLocationType.hipMemLocationTypeDevice
    access.location.id = 0
    access.flags = hip.hipMemAccessFlags.hipMemAccessFlagsProtReadWrite
    check(hip.hipMemSetAccess(address, SIZE, access, 1))

def reserve_and_map():
    address = check(hip.hipMemAddressReserve(SIZE, 0, None, 0))
    handle = check(hip.hipMemCreate(SIZE, properties, 0))
    check(hip.hipMemMap(address, SIZE, 0, handle, 0))
    check(hip.hipMemRelease(handle))
    return address

def virtual_memory():
    address = reserve_and_map()
    set_access(address)
    return address

def free(address):
    check(hip.hipMemUnmap(address, SIZE))
    check(hip.hipMemAddressFree(address, SIZE))
"""


@pytest.fixture
def start_bound(start: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Starts a program for the bindings, whose HIP runtime is the simulator."""
    folder = tmp_path / "lib-of-hip"
    folder.mkdir()
    (folder / "libamdhip64.so").symlink_to(hipsim.library_path())
    paths = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]

    def start_bound(text: str, profile: str) -> Any:
        return start(
            BEGIN + text,
            HIPSIM_PROFILE=profile,
            LD_LIBRARY_PATH=os.pathsep.join(paths),
            ROCM_PATH=str(tmp_path / "no-rocm"),
        )

    return start_bound


@pytest.fixture
def run_bound(start_bound: Callable[..., Any]) -> Callable[..., str]:
    def run_bound(text: str, profile: str) -> str:
        output: str = start_bound(text, profile).finish()
        return output

    return run_bound


@each_profile
def test_they_open_the_simulator(run_bound: Callable[..., str], name: str) -> None:
    told = run_bound(
        """
print(check(hip.hipRuntimeGetVersion()), check(hip.hipGetDeviceCount()))
with open("/proc/self/maps") as maps:
    print(*{line.split()[-1] for line in maps if "libamdhip64" in line})
print(hipsim.profile(), hipsim.stats().calls["hipRuntimeGetVersion"])
""",
        name,
    )
    version = {"7.2.3": 70_200_000, "7.15": 71_526_333, "7.16": 71_626_361}[name]
    path = hipsim.library_path()
    assert told.splitlines() == [f"{version} 8", str(path), f"{name} 1"]


@each_profile
def test_every_function_is_found(run_bound: Callable[..., str], name: str) -> None:
    told = run_bound(
        "print(*(each for each in hipsim.PROTOTYPES if not hip.has_symbol(each)))", name
    )
    assert told.split() == []


@each_profile
def test_virtual_memory(run_bound: Callable[..., str], name: str) -> None:
    run_bound(
        """
least = hip.hipMemAllocationGranularity_flags.hipMemAllocationGranularityMinimum
assert check(hip.hipMemGetAllocationGranularity(properties, least)) == PAGE
address, data, back = reserve_and_map(), bytes_from(1), np.zeros(SIZE, np.uint8)
expect("hipErrorUnknown", hip.hipMemcpy(address, data, SIZE, KIND))
set_access(address)
assert check(hip.hipMemGetAccess(properties.location, address)) == 3

check(hip.hipMemcpy(address, data, SIZE, KIND))
queue = stream()
check(hip.hipMemcpyAsync(back, address, SIZE, KIND, queue))
check(hip.hipStreamSynchronize(queue))
assert np.array_equal(back, data)

expect("hipErrorInvalidValue", hip.hipMemUnmap(address, PAGE))
expect("hipErrorUnknown", hip.hipMemAddressFree(address, SIZE))
free(address)
expect("hipErrorInvalidValue", hip.hipMemcpy(address, data, SIZE, KIND))
check(hip.hipStreamDestroy(queue))
hipsim.assert_clean()
""",
        name,
    )


@each_profile
def test_capture_and_replay(run_bound: Callable[..., str], name: str) -> None:
    run_bound(
        """
address, queue = virtual_memory(), stream()
data, back = bytes_from(1), np.zeros(SIZE, np.uint8)
for array in (data, back):
    check(hip.hipHostRegister(array, SIZE, 0))
check(hip.hipMemcpy(address, data, SIZE, KIND))
check(hip.hipStreamBeginCapture(queue, hip.hipStreamCaptureMode(0)))
active = hip.hipStreamCaptureStatus.hipStreamCaptureStatusActive
assert check(hip.hipStreamIsCapturing(queue)) == active
check(hip.hipMemsetAsync(address, 7, PAGE, queue))
check(hip.hipMemcpyAsync(back, address, SIZE, KIND, queue))
graph = check(hip.hipStreamEndCapture(queue))
assert not back.any()
executable = check(hip.hipGraphInstantiate(graph, 0))
for seed in (2, 3):
    data[:] = bytes_from(seed)
    check(hip.hipMemcpy(address, data, SIZE, KIND))
    check(hip.hipGraphLaunch(executable, queue))
    check(hip.hipStreamSynchronize(queue))
    assert (back[:PAGE] == 7).all()
    assert np.array_equal(back[PAGE:], data[PAGE:])

check(hip.hipStreamBeginCapture(queue, hip.hipStreamCaptureMode(0)))
expect("hipErrorStreamCaptureImplicit", hip.hipMemset(address, 0, PAGE))
expect("hipErrorStreamCaptureInvalidated", hip.hipMemsetAsync(address, 0, 1, queue))
expect("hipErrorStreamCaptureInvalidated", hip.hipStreamEndCapture(queue))

check(hip.hipGraphExecDestroy(executable))
check(hip.hipGraphDestroy(graph))
check(hip.hipStreamDestroy(queue))
for array in (data, back):
    check(hip.hipHostUnregister(array))
free(address)
hipsim.assert_clean()
""",
        name,
    )


@each_profile
def test_memory_of_another_process(start_bound: Callable[..., Any], name: str) -> None:
    exporter = start_bound(
        """
device, data = check(hip.hipMalloc(SIZE)), bytes_from(1)
check(hip.hipMemcpy(device, data, SIZE, KIND))
handle = check(hip.hipIpcGetMemHandle(int(device) + PAGE))
print(ctypes.string_at(int(handle), handle.c_sizeof()).hex(), flush=True)
sys.stdin.readline()
check(hip.hipMemcpy(data, device, SIZE, KIND))
print(*data[PAGE:PAGE + 3], flush=True)

virtual = virtual_memory()
error, handle = hip.hipIpcGetMemHandle(virtual)
print(error.name)
print(ctypes.string_at(int(handle), handle.c_sizeof()).hex(), flush=True)
sys.stdin.readline()
""",
        name,
    )
    importer = start_bound(
        """
def receive():
    handle = hip.hipIpcMemHandle_t()
    ctypes.memmove(int(handle), bytes.fromhex(sys.stdin.readline()), 64)
    return handle, hip.hipIpcMemLazyEnablePeerAccess
device = check(hip.hipIpcOpenMemHandle(*receive()))
back = np.zeros(PAGE, np.uint8)
check(hip.hipMemcpy(back, device, PAGE, KIND))
assert np.array_equal(back, bytes_from(1)[PAGE:])
check(hip.hipMemset(device, 9, 2))
check(hip.hipDeviceSynchronize())
check(hip.hipIpcCloseMemHandle(device))
print("closed", flush=True)
print(hip.hipIpcOpenMemHandle(*receive())[0].name)
hipsim.assert_clean()
""",
        name,
    )
    importer.send(exporter.receive())
    assert importer.receive() == "closed"
    exporter.send("go")
    first, second, third = exporter.receive().split()
    assert (first, second) == ("9", "9")
    assert third != "9"
    # A handle for virtual memory is refused, or as good as garbage.
    given = name == "7.2.3"
    assert exporter.receive() == ("hipSuccess" if given else "hipErrorInvalidValue")
    handle = exporter.receive()
    importer.send(handle if given else "ff" * 64)
    assert importer.finish().strip() == "hipErrorInvalidDevicePointer"
    exporter.send("go")
    exporter.finish()


BATCH = """
# The bindings' Python function takes neither destinations nor sizes. Their C function,
# which it calls, is what other extension modules import.
capsule = cyhip.__pyx_capi__["hipMemcpyBatchAsync"]
api = ctypes.pythonapi
api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = (
    ctypes.c_char_p, [ctypes.py_object])
api.PyCapsule_GetPointer.restype, api.PyCapsule_GetPointer.argtypes = (
    ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p])
pointer = api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule))
P, N = ctypes.c_void_p, ctypes.c_size_t
batch = ctypes.CFUNCTYPE(ctypes.c_int, P, P, P, N, P, P, N, P, P)(pointer)

count, queue = 5, stream()
address, data = virtual_memory(), bytes_from(1)
check(hip.hipHostRegister(data, SIZE, 0))
steps = np.arange(count, dtype=np.uint64) * np.uint64(100)
sources = steps + np.uint64(data.ctypes.data)
targets = steps[::-1] + np.uint64(int(address))
sizes = np.full(count, 100, np.uint64)
failed = N(0)

def copy(attributes, *firsts):
    firsts = np.array(firsts, np.uint64)
    error = batch(
        targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, count,
        int(attributes) if attributes else None, firsts.ctypes.data, len(firsts),
        ctypes.byref(failed), int(queue))
    check(hip.hipStreamSynchronize(queue))
    return hip.hipError_t(error)

def copied():
    back = np.zeros(SIZE, np.uint8)
    check(hip.hipMemcpy(back, address, SIZE, KIND))
    rows = back[:500].reshape(count, 100)[::-1]
    return np.array_equal(rows, data[:500].reshape(count, 100))

attributes = hip.hipMemcpyAttributes.allocate(2)
second = hip.hipMemcpyAttributes.fromObj(int(attributes) + attributes.c_sizeof())
for each in (attributes, second):
    each.srcAccessOrder = hip.hipMemcpySrcAccessOrder.hipMemcpySrcAccessOrderStream
second.flags = int(hip.hipMemcpyFlags.hipMemcpyFlagExtPreferCE)
"""


@pytest.mark.parametrize("name", ["7.15", "7.16"])
def test_a_batch_with_attributes(run_bound: Callable[..., str], name: str) -> None:
    run_bound(
        BATCH
        + """
assert copy(attributes, 0, 2) == hip.hipError_t.hipSuccess
assert failed.value == 2**64 - 1
assert copied()
stats = hipsim.stats()
assert (stats.batch_calls, stats.batch_copies) == (1, count)
assert stats.copies["blit", "h2d"].copies == 2
assert stats.copies["sdma", "h2d"].copies == 3

assert copy(attributes, 1, 2) == hip.hipError_t.hipErrorInvalidValue
sizes[3] = 0
assert copy(None) == hip.hipError_t.hipErrorInvalidValue
assert failed.value == 3
""",
        name,
    )


def test_a_release_that_refuses_attributes(run_bound: Callable[..., str]) -> None:
    run_bound(
        BATCH
        + """
refused = "hipErrorNotSupported"
assert copy(attributes, 0, 2).name == refused
assert not copied()
expect(refused, hip.hipMemcpyBatchAsync([int(sources[0])], 1, attributes, 1, queue))
expect(refused, hip.hipGetLastError())
assert copy(None) == hip.hipError_t.hipSuccess
assert copied()
sizes[3] = 0
assert copy(None) == hip.hipError_t.hipErrorInvalidValue
assert failed.value == 3
""",
        "7.2.3",
    )


@each_profile
def test_errors(run_bound: Callable[..., str], name: str) -> None:
    told = run_bound(
        """
error, pointer = hip.hipMalloc(1 << 50)
assert pointer is None
print(error.name, error.value)
print(hip.hipGetErrorName(error)[-1], "|", hip.hipGetErrorString(error)[-1])
print(hip.hipPeekAtLastError()[0].name, hip.hipGetLastError()[0].name)
print(hip.hipGetLastError()[0].name)
hipsim.fail("hipMalloc", 1, 719)
print(hip.hipMalloc(8)[0].name)
""",
        name,
    )
    assert told.splitlines() == [
        "hipErrorOutOfMemory 2",
        "hipErrorOutOfMemory | out of memory",
        "hipErrorOutOfMemory hipErrorOutOfMemory",
        "hipSuccess",
        "hipErrorLaunchFailure",
    ]
