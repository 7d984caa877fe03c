# SPDX-License-Identifier: Apache-2.0
"""The compiled module on the simulator of HIP, without vLLM."""

import ctypes
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile

import vllm_rocm_memory
from vllm_rocm_memory.sim import hipsim

from .native.cumem import (
    BYTES,
    CHUNK,
    MIB,
    OUT_OF_MEMORY,
    PAGE,
    UNKNOWN,
    VARIABLE,
    Cumem,
    address_of,
    on_the_simulator,
)
from .simulated_gpu import IS_HIP, OutOfMemory, pattern

pytestmark = pytest.mark.skipif(not IS_HIP, reason="this process simulates CUDA")


@pytest.fixture
def cumem(trampoline: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cumem]:
    monkeypatch.setenv(VARIABLE, str(CHUNK // MIB))
    with on_the_simulator(trampoline) as cumem:
        yield cumem


def free_bytes(device: int = 0) -> int:
    lib = hipsim.load()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    hipsim.check(lib.hipSetDevice(device), "hipSetDevice")
    hipsim.check(lib.hipMemGetInfo(ctypes.byref(free), ctypes.byref(total)), "info")
    return free.value


def current_device() -> int:
    device = ctypes.c_int(-1)
    hipsim.check(hipsim.load().hipGetDevice(ctypes.byref(device)), "hipGetDevice")
    return device.value


# --- errors ------------------------------------------------------------------------


def test_errors_say_what_failed_and_what_there_is(cumem: Cumem) -> None:
    ptr = cumem.malloc()
    cumem.module.suspend([ptr])
    hipsim.fail("hipMemCreate", 2, OUT_OF_MEMORY)
    with pytest.raises(cumem.module.OutOfMemoryError) as caught:
        cumem.map(ptr)
    error = caught.value
    assert isinstance(error, cumem.module.DriverError)
    assert isinstance(error, RuntimeError)
    assert (error.call, error.error_name, error.error_number) == (
        "hipMemCreate",
        "hipErrorOutOfMemory",
        OUT_OF_MEMORY,
    )
    assert (error.device, error.size) == (0, CHUNK)
    assert error.total == 8 << 30
    # at the moment of the failure, the first chunk included
    assert error.free == error.total - CHUNK
    assert re.fullmatch(
        r"hipMemCreate failed: hipErrorOutOfMemory \(2\): out of memory; "
        r"2097152 bytes \(2\.0 MiB\) on device 0, of which 8\.0 GiB of 8\.0 GiB are "
        r"free",
        str(error),
    )


def test_failure_to_ask_for_free_memory_hides_nothing(cumem: Cumem) -> None:
    ptr = cumem.malloc()
    cumem.module.suspend([ptr])
    hipsim.fail("hipMemCreate", 1, OUT_OF_MEMORY)
    hipsim.fail("hipMemGetInfo", 1, UNKNOWN)
    with pytest.raises(cumem.module.OutOfMemoryError, match="hipMemCreate") as caught:
        cumem.map(ptr)
    assert (caught.value.free, caught.value.total) == (None, None)
    assert caught.value.size == CHUNK
    assert "free" not in str(caught.value)


def test_other_errors_are_not_out_of_memory(cumem: Cumem) -> None:
    ptr = cumem.malloc()
    hipsim.fail("hipDeviceSynchronize", 1, UNKNOWN)
    with pytest.raises(cumem.module.DriverError) as caught:
        cumem.module.suspend([ptr])
    assert not isinstance(caught.value, cumem.module.OutOfMemoryError)
    assert (caught.value.call, caught.value.size) == ("hipDeviceSynchronize", None)
    assert "hipErrorUnknown (999): unknown error; device 0, of" in str(caught.value)
    assert cumem.module.is_mapped(ptr)


@pytest.mark.parametrize("call", ["hipMemCreate", "hipMemMap", "hipMemSetAccess"])
def test_nobody_else_gets_the_blame(cumem: Cumem, call: str) -> None:
    """R1 and R9: HIP keeps a thread's last error until somebody asks for it."""
    ptr = cumem.malloc()
    cumem.module.suspend([ptr])
    hipsim.fail(call, 1, UNKNOWN)
    with pytest.raises(cumem.module.DriverError, match=call):
        cumem.map(ptr)
    assert hipsim.load().hipPeekAtLastError() == 0
    cumem.map(ptr)
    arena = cumem.module.HostArena(PAGE)
    hipsim.fail("hipHostRegister", 1, OUT_OF_MEMORY)
    hipsim.fail("hipHostMalloc", 1, OUT_OF_MEMORY)
    cumem.module.back_up([(ptr, PAGE, arena.address)], threads=1)
    assert arena.registration_error
    assert hipsim.load().hipPeekAtLastError() == 0


# --- my_malloc and my_free ---------------------------------------------------------


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_out_of_memory_is_null_and_one_line(
    cumem: Cumem, failing: int, capfd: pytest.CaptureFixture[str]
) -> None:
    hipsim.fail("hipMemCreate", failing, OUT_OF_MEMORY)
    with pytest.raises(OutOfMemory):
        cumem.malloc()
    hipsim.assert_clean()
    assert cumem.module.ranges() == [] and cumem.handles == {}
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"cumem: no memory for an allocation of {BYTES} bytes: hip")
    assert "(2.0 MiB) on device 0" in line or "(4.0 KiB) on device 0" in line


def test_more_than_the_device_has_is_out_of_memory(cumem: Cumem) -> None:
    hipsim.configure(stale_memory="clean")  # it takes its time to poison
    before = free_bytes()
    with pytest.raises(OutOfMemory):
        cumem.malloc(9 << 30)
    assert free_bytes() == before
    hipsim.assert_clean()


CALLS_OF_MALLOC = (
    "hipGetDevice",
    "hipMemGetAllocationGranularity",
    "hipMemCreate",
    "hipMemMap",
    "hipMemSetAccess",
)


@pytest.mark.parametrize("call", CALLS_OF_MALLOC)
def test_other_errors_of_malloc_are_thrown(
    cumem: Cumem, call: str, capfd: pytest.CaptureFixture[str]
) -> None:
    hipsim.fail(call, 1, UNKNOWN)
    with pytest.raises(RuntimeError, match=rf"^cumem: allocating .*: {call} failed"):
        cumem.malloc()
    hipsim.assert_clean()
    assert cumem.module.ranges() == [] and cumem.handles == {}
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("size", [0, -1])
def test_no_bytes_are_refused(cumem: Cumem, size: int) -> None:
    with pytest.raises(RuntimeError, match=f"cannot allocate {size} bytes"):
        cumem.malloc(size)


def test_device_that_does_not_exist(cumem: Cumem) -> None:
    with pytest.raises(RuntimeError, match=r"hipSetDevice failed: .* \(101\)"):
        cumem.malloc(device=8)
    hipsim.assert_clean()


def test_callback_that_raises_leaves_nothing(
    cumem: Cumem, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(handle: Any) -> None:
        raise ZeroDivisionError(f"no place for {handle[1]} bytes")

    cumem.module.init_module(refuse, cumem.free_callback)
    with pytest.raises(
        RuntimeError, match=f"raised ZeroDivisionError: no place for {BYTES} bytes$"
    ):
        cumem.malloc()
    hipsim.assert_clean()
    assert cumem.module.ranges() == []


def test_callback_finds_a_range_that_is_mapped(cumem: Cumem) -> None:
    found = []

    def look(handle: Any) -> None:
        ptr = handle[2]
        found.append((cumem.module.is_mapped(ptr), cumem.module.ranges() == [ptr]))

    cumem.module.init_module(look, cumem.free_callback)
    cumem.malloc()
    assert found == [(True, True)]


def test_handle_says_where_the_drivers_handles_are(cumem: Cumem) -> None:
    ptr = cumem.malloc()
    device, size, address, slots = cumem.handles[ptr]
    assert (device, size, address) == (0, BYTES, ptr)
    assert [each for _, each in slots] == [CHUNK, CHUNK, PAGE]
    assert cumem.module.chunks(ptr) == [CHUNK, CHUNK, PAGE]
    retained = ctypes.c_void_p()
    for index, held in enumerate(cumem.slots(ptr)):
        hipsim.check(
            hipsim.load().hipMemRetainAllocationHandle(
                ctypes.byref(retained), ptr + index * CHUNK
            ),
            "hipMemRetainAllocationHandle",
        )
        assert retained.value == held
        hipsim.check(hipsim.load().hipMemRelease(retained), "hipMemRelease")
    cumem.module.suspend([ptr])
    assert cumem.slots(ptr) == [0, 0, 0]
    cumem.map(ptr)
    assert 0 not in cumem.slots(ptr)


def test_size_is_rounded_up_to_the_granularity(cumem: Cumem) -> None:
    ptr = cumem.malloc(PAGE + 1)
    assert cumem.handles[ptr][1] == 2 * PAGE
    assert free_bytes() == (8 << 30) - 2 * PAGE


def test_callbacks_are_kept_alive(cumem: Cumem) -> None:
    seen: list[int] = []
    cumem.module.init_module(
        lambda handle: seen.append(handle[2]), lambda ptr: seen.remove(ptr) or "free"
    )
    ptr = cumem.malloc()
    assert seen == [ptr]
    cumem.torch.free(ptr, BYTES)
    assert seen == [] == cumem.module.ranges()


@pytest.mark.parametrize("arguments", [(None, print), (print, 1), (print,), ()])
def test_init_module_wants_two_callables(cumem: Cumem, arguments: Any) -> None:
    with pytest.raises(TypeError):
        cumem.module.init_module(*arguments)
    cumem.torch.free(cumem.malloc(), BYTES)  # with those that were there before
    assert cumem.module.ranges() == []


def test_free_callback_may_keep_the_range(
    cumem: Cumem, capfd: pytest.CaptureFixture[str]
) -> None:
    ptr = cumem.filled(1)
    cumem.answer = lambda ptr: None
    cumem.torch.free(ptr, BYTES)
    assert cumem.module.ranges() == [ptr] and cumem.holds(ptr, 1)
    assert capfd.readouterr().err == ""
    cumem.module.free(ptr)
    hipsim.assert_clean()


def test_free_callback_that_raises_is_told_and_the_range_kept(
    cumem: Cumem, capfd: pytest.CaptureFixture[str]
) -> None:
    ptr = cumem.malloc()
    cumem.answer = lambda ptr: 1 // 0
    cumem.torch.free(ptr, BYTES)
    assert cumem.module.ranges() == [ptr] and cumem.module.is_mapped(ptr)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"cumem: freeing {BYTES} bytes at {ptr:#x} failed")
    assert "the range is kept" in line and "ZeroDivisionError" in line


def test_exception_in_flight_survives_my_free(
    cumem: Cumem, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """PyTorch frees tensors while Python unwinds."""
    source = Path(__file__).parent / "native" / "raising_caller.cpp"
    caller = tmp_path / "raising_caller.so"
    command = ["g++", "-shared", "-fPIC", source, "-o", caller]
    subprocess.run(command, check=True, timeout=60)
    free = ctypes.cast(ctypes.CDLL(cumem.module.__file__).my_free, ctypes.c_void_p)
    ptr = cumem.malloc()
    with pytest.raises(KeyError, match="in flight"):  # which ctypes finds set
        ctypes.PyDLL(os.fspath(caller)).free_while_raising(free, ctypes.c_void_p(ptr))
    assert cumem.module.ranges() == []
    assert capfd.readouterr().err == ""


def test_free_of_what_is_no_range_is_told(
    cumem: Cumem, capfd: pytest.CaptureFixture[str]
) -> None:
    cumem.torch.free(0x1234000, BYTES)
    assert "0x1234000 is not the address of a live range" in capfd.readouterr().err
    with pytest.raises(ValueError, match="0x1234000 is not"):
        cumem.module.free(0x1234000)


CALLS_OF_FREE = ("hipMemUnmap", "hipMemRelease", "hipMemAddressFree")


@pytest.mark.parametrize("retry", ["release_pending", "suspend", "malloc", "free"])
@pytest.mark.parametrize("call", CALLS_OF_FREE)
def test_what_was_not_freed_is_freed_later(
    cumem: Cumem, call: str, retry: str, capfd: pytest.CaptureFixture[str]
) -> None:
    ptr, other = cumem.malloc(), cumem.malloc(PAGE)
    hipsim.fail(call, 1, UNKNOWN)
    cumem.torch.free(ptr, BYTES)
    (line,) = capfd.readouterr().err.splitlines()
    assert f"{call} failed: hipErrorUnknown" in line
    assert cumem.module.ranges() == [other]
    with pytest.raises(AssertionError, match="still live"):
        hipsim.assert_clean()
    if retry == "malloc":
        cumem.torch.free(cumem.malloc(PAGE), PAGE)
    elif retry == "free":
        cumem.torch.free(other, PAGE)
    else:
        argument = ([other],) if retry == "suspend" else ()
        getattr(cumem.module, retry)(*argument)
    assert hipsim.stats().reservations == (0 if retry == "free" else 1)
    assert cumem.module.release_pending() == 0


def test_nothing_is_freed_under_running_work(cumem: Cumem) -> None:
    hipsim.configure(fill_latency_us=100_000)
    ptr, asleep = cumem.malloc(), cumem.malloc()
    cumem.module.suspend([asleep])
    hipsim.check(hipsim.load().hipMemsetAsync(ptr, 7, PAGE, None), "hipMemsetAsync")
    before = hipsim.stats().calls["hipDeviceSynchronize"]
    cumem.torch.free(ptr, BYTES)
    stats = hipsim.stats()
    assert (stats.fills, stats.memory_faults) == (1, 0)
    assert stats.calls["hipDeviceSynchronize"] == before + 1
    cumem.module.free(asleep)  # which nothing can be using
    assert hipsim.stats().calls["hipDeviceSynchronize"] == before + 1


def test_range_that_cannot_be_waited_for_is_freed_later(cumem: Cumem) -> None:
    ptr = cumem.malloc()
    hipsim.fail("hipDeviceSynchronize", 1, UNKNOWN)
    with pytest.raises(cumem.module.DriverError, match="hipDeviceSynchronize"):
        cumem.module.free(ptr)
    assert cumem.module.ranges() == []
    before = hipsim.stats()
    assert before.handle_bytes == BYTES
    cumem.module.free(cumem.malloc(PAGE))  # waits for itself alone
    after = hipsim.stats()
    assert after.handle_bytes == BYTES
    assert after.calls["hipDeviceSynchronize"] == (
        before.calls["hipDeviceSynchronize"] + 1
    )
    assert cumem.module.release_pending() == 0
    hipsim.assert_clean()


def test_allocation_that_is_undone_waits_for_nothing(cumem: Cumem) -> None:
    """A graph may be captured, which a wait for the device would spoil."""
    cumem.module.init_module(lambda handle: 1 // 0, cumem.free_callback)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        cumem.malloc()
    assert hipsim.stats().calls["hipDeviceSynchronize"] == 0
    hipsim.assert_clean()


def test_release_pending_counts(cumem: Cumem) -> None:
    first, second = cumem.malloc(), cumem.malloc()
    for nth in range(1, 5):
        hipsim.fail("hipMemAddressFree", nth, UNKNOWN)
    with pytest.raises(cumem.module.DriverError, match="hipMemAddressFree"):
        cumem.module.free(first)
    with pytest.raises(cumem.module.DriverError, match="hipMemAddressFree"):
        cumem.module.free(second)  # the first's second try fails, too
    assert cumem.module.release_pending() == 1  # one fails again, the other is freed
    assert cumem.module.release_pending() == 0
    with pytest.raises(ValueError):
        cumem.module.free(first)


# --- chunks ------------------------------------------------------------------------

DEFAULT = 256 * MIB


@pytest.mark.parametrize(
    ("value", "expected", "problem"),
    [
        (None, DEFAULT, None),
        ("64", 64 * MIB, None),
        ("0x40", 64 * MIB, None),
        ("0100", 64 * MIB, None),  # octal
        (" 64", 64 * MIB, None),
        ("+64", 64 * MIB, None),
        ("64MB", 64 * MIB, 'ends in "MB", which is ignored; using 64 MiB'),
        ("64 ", 64 * MIB, 'ends in " ", which is ignored; using 64 MiB'),
        ("0", DEFAULT, "is no size of a chunk; using 256 MiB"),
        ("", DEFAULT, "is not a number; using 256 MiB"),
        ("large", DEFAULT, "is not a number; using 256 MiB"),
        ("-1", DEFAULT, "is too large; using 256 MiB"),
        (str(2**44), DEFAULT, "is too large; using 256 MiB"),
        (str(2**44 - 1), 2**64 - MIB, None),
        ("9" * 30, DEFAULT, "is too large; using 256 MiB"),
        ("m\udce9ga", DEFAULT, "is not a number; using 256 MiB"),
    ],
)
def test_chunk_setting(
    cumem: Cumem,
    monkeypatch: pytest.MonkeyPatch,
    value: str | None,
    expected: int,
    problem: str | None,
) -> None:
    if value is None:
        monkeypatch.delenv(VARIABLE)
    else:
        monkeypatch.setenv(VARIABLE, value)
    remedy = "Set it to a number of MiB, such as 256, or leave it unset."
    sentence = f'{VARIABLE}="{value}" {problem}. {remedy}' if problem else None
    assert cumem.module.chunk_setting() == (expected, sentence)


@pytest.mark.parametrize(
    ("value", "size", "chunks"),
    [
        ("2", 2 * MIB, [2 * MIB]),
        ("2", 2 * MIB + 1, [2 * MIB, PAGE]),
        ("4", 9 * MIB, [4 * MIB, 4 * MIB, MIB]),
        ("64", 5 * MIB, [5 * MIB]),
        (str(2**44 - 1), 5 * MIB, [5 * MIB]),
        ("0", 257 * MIB, [256 * MIB, MIB]),
    ],
)
def test_chunks_of_a_range(
    cumem: Cumem,
    monkeypatch: pytest.MonkeyPatch,
    value: str,
    size: int,
    chunks: list[int],
) -> None:
    monkeypatch.setenv(VARIABLE, value)  # read with each allocation
    assert cumem.module.chunks(cumem.malloc(size)) == chunks


# --- handles that are not those of a range -----------------------------------------


def test_wrong_arguments_are_type_errors(cumem: Cumem) -> None:
    device, size, ptr, slots = cumem.handles[cumem.malloc()]
    for function in (
        cumem.module.python_create_and_map,
        cumem.module.python_unmap_and_release,
    ):
        for arguments in (
            (device, size, ptr),
            (device, size, ptr, slots, 1),
            ("0", size, ptr, slots),
            (device, size, -1, slots),
            (device, size, ptr, slots[0][0]),
            (device, size, ptr, None),
            (device, size, ptr, [slots[0][0]]),
            (device, size, ptr, [(slots[0][0],)]),
            (device, size, ptr, [("a", "b")]),
        ):
            with pytest.raises(TypeError):
                function(*arguments)
    assert cumem.module.is_mapped(ptr)


def test_wrong_handles_are_value_errors(cumem: Cumem) -> None:
    device, size, ptr, slots = cumem.handles[cumem.malloc()]
    other = cumem.handles[cumem.malloc()][3]
    for function in (
        cumem.module.python_create_and_map,
        cumem.module.python_unmap_and_release,
    ):
        for arguments in (
            (1, size, ptr, slots),
            (device, size - PAGE, ptr, slots),
            (device, size, ptr + PAGE, slots),
            (device, size, 0, slots),
            (device, size, ptr, []),
            (device, size, ptr, slots[:-1]),
            (device, size, ptr, other),
        ):
            with pytest.raises(ValueError, match="range"):
                function(*arguments)
    assert cumem.module.is_mapped(ptr)


def test_mapped_range_is_not_mapped_again(cumem: Cumem) -> None:
    ptr = cumem.filled(1)
    with pytest.raises(RuntimeError, match=f"{ptr:#x} is already mapped"):
        cumem.map(ptr)
    assert cumem.holds(ptr, 1)


def test_addresses_of_no_range(cumem: Cumem) -> None:
    for function in (cumem.module.is_mapped, cumem.module.chunks, cumem.module.free):
        with pytest.raises(ValueError, match="0x1000 is not the address of a live"):
            function(PAGE)
    ptr = cumem.filled(1)
    with pytest.raises(ValueError):
        cumem.module.suspend([ptr, PAGE])
    assert cumem.holds(ptr, 1)


# --- suspend and map ---------------------------------------------------------------


@pytest.mark.parametrize("profile", hipsim.PROFILES)
def test_memory_goes_and_the_addresses_stay(cumem: Cumem, profile: str) -> None:
    """R2: up to 7.12 memory is the device's only when its addresses are freed."""
    hipsim.reset(profile)
    ptr, other = cumem.malloc(), cumem.filled(2)
    before = free_bytes()
    cumem.module.python_unmap_and_release(*cumem.handles[ptr])
    assert free_bytes() == before + BYTES
    assert cumem.module.ranges() == sorted([ptr, other])
    assert not cumem.module.is_mapped(ptr)
    cumem.module.suspend([ptr])  # nothing more to do
    assert cumem.holds(other, 2)
    hint = hipsim.stats().calls["hipMemAddressReserve"]
    cumem.map(ptr)
    assert hipsim.stats().calls["hipMemAddressReserve"] == hint
    assert cumem.module.is_mapped(ptr) and free_bytes() == before
    cumem.gpu.write(ptr, pattern(1, BYTES))
    assert cumem.holds(ptr, 1)


def test_nothing_is_unmapped_under_running_work(cumem: Cumem) -> None:
    hipsim.configure(fill_latency_us=100_000)
    ptr = cumem.malloc()
    hipsim.check(hipsim.load().hipMemsetAsync(ptr, 7, PAGE, None), "hipMemsetAsync")
    cumem.module.suspend([ptr])
    stats = hipsim.stats()
    assert (stats.fills, stats.memory_faults) == (1, 0)


def test_each_device_is_waited_for_once(cumem: Cumem) -> None:
    ptrs = [cumem.malloc(device=device) for device in (0, 1, 0, 1)]
    before = hipsim.stats().calls["hipDeviceSynchronize"]
    cumem.module.suspend([*ptrs, *ptrs])
    assert hipsim.stats().calls["hipDeviceSynchronize"] == before + 2
    assert [cumem.module.is_mapped(ptr) for ptr in ptrs] == [False] * 4


@pytest.mark.parametrize("profile", ["7.1", "7.2.3", "7.16"])
@pytest.mark.parametrize("failing", range(1, 10))
def test_unmap_that_fails_leaves_all_as_it_was(
    cumem: Cumem, failing: int, profile: str
) -> None:
    hipsim.reset(profile)
    ptrs = sorted(cumem.filled(number) for number in range(3))
    contents = [cumem.gpu.read(ptr) for ptr in ptrs]
    slots = [cumem.slots(ptr) for ptr in ptrs]
    hipsim.fail("hipMemUnmap", failing, UNKNOWN)
    with pytest.raises(cumem.module.DriverError, match="hipMemUnmap"):
        cumem.module.suspend(ptrs)
    assert all(map(cumem.module.is_mapped, ptrs))
    assert [cumem.slots(ptr) for ptr in ptrs] == slots
    for ptr, content in zip(ptrs, contents, strict=True):
        assert np.array_equal(cumem.gpu.read(ptr), content)
    cumem.module.suspend(ptrs)
    assert hipsim.stats().handles == 0


def test_roll_back_that_fails_costs_one_range_and_says_so(cumem: Cumem) -> None:
    ptrs = sorted(cumem.filled(number) for number in range(3))
    contents = [cumem.gpu.read(ptr) for ptr in ptrs]
    hipsim.fail("hipMemUnmap", 8, UNKNOWN)  # of the last range
    hipsim.fail("hipMemMap", 2, OUT_OF_MEMORY)  # of the range before it
    with pytest.raises(cumem.module.DriverError, match="hipMemUnmap"):
        cumem.module.suspend(ptrs)
    assert [cumem.module.is_mapped(ptr) for ptr in ptrs] == [True, False, True]
    for index in (0, 2):
        assert np.array_equal(cumem.gpu.read(ptrs[index]), contents[index])
    assert cumem.slots(ptrs[1]) == [0, 0, 0]
    assert hipsim.stats().handle_bytes == 2 * BYTES
    cumem.map(ptrs[1])


@pytest.mark.parametrize(
    ("call", "profile"),
    [
        ("hipMemRelease", "7.2.3"),
        ("hipMemRelease", "7.16"),
        ("hipMemAddressFree", "7.2.3"),
    ],
)
def test_what_was_not_released_is_released_later(
    cumem: Cumem, call: str, profile: str
) -> None:
    hipsim.reset(profile)
    before = free_bytes()
    ptrs = [cumem.malloc() for _ in range(3)]
    hipsim.fail(call, 2, UNKNOWN)
    with pytest.raises(cumem.module.DriverError, match=call):
        cumem.module.suspend(ptrs)
    assert not any(map(cumem.module.is_mapped, ptrs))
    assert free_bytes() < before
    assert cumem.module.release_pending() == 0
    assert free_bytes() == before
    for ptr in ptrs:
        cumem.map(ptr)


@pytest.mark.parametrize("profile", ["7.1", "7.2.3", "7.16"])
@pytest.mark.parametrize("call", ["hipMemCreate", "hipMemMap"])
@pytest.mark.parametrize("failing", [1, 2, 3])
def test_map_that_fails_leaves_nothing(
    cumem: Cumem, call: str, failing: int, profile: str
) -> None:
    hipsim.reset(profile)
    ptr = cumem.malloc()
    cumem.module.suspend([ptr])
    before = free_bytes()
    hipsim.fail(call, failing, OUT_OF_MEMORY)
    with pytest.raises(cumem.module.OutOfMemoryError, match=call):
        cumem.map(ptr)
    stats = hipsim.stats()
    assert (stats.handles, stats.mappings, stats.reservations) == (0, 0, 1)
    assert free_bytes() == before and cumem.slots(ptr) == [0, 0, 0]
    cumem.map(ptr)
    assert free_bytes() == before - BYTES


def test_failing_roll_back_of_a_map_is_finished_later(cumem: Cumem) -> None:
    ptr = cumem.malloc()
    cumem.module.suspend([ptr])
    hipsim.fail("hipMemSetAccess", 1, UNKNOWN)
    hipsim.fail("hipMemUnmap", 2, UNKNOWN)
    hipsim.fail("hipMemRelease", 1, UNKNOWN)
    with pytest.raises(cumem.module.DriverError, match="hipMemSetAccess"):
        cumem.map(ptr)
    assert not cumem.module.is_mapped(ptr)
    assert (hipsim.stats().handles, hipsim.stats().mappings) == (1, 1)
    cumem.map(ptr)
    assert hipsim.stats().handle_bytes == BYTES


# --- addresses ---------------------------------------------------------------------


@pytest.mark.parametrize("profile", ["7.1", "7.2.3"])
def test_address_that_was_taken_is_told_loudly(cumem: Cumem, profile: str) -> None:
    hipsim.reset(profile)
    ptr, other = cumem.malloc(), cumem.filled(2)
    hipsim.configure(ignore_address_hints=True)
    taken = f"address {ptr:#x} of a sleeping allocation of {BYTES} bytes .* was taken"
    with pytest.raises(RuntimeError, match=taken):
        cumem.module.suspend([ptr])
    assert not cumem.module.is_mapped(ptr) and cumem.holds(other, 2)
    assert hipsim.stats().reservations == 1  # what came instead was given back
    for again in (lambda: cumem.map(ptr), lambda: cumem.module.suspend([ptr])):
        with pytest.raises(RuntimeError, match=taken):
            again()
    assert cumem.module.release_pending() == 1
    hipsim.configure(ignore_address_hints=False)
    cumem.map(ptr)
    cumem.gpu.write(ptr, pattern(1, BYTES))
    assert cumem.holds(ptr, 1) and cumem.holds(other, 2)


def test_range_without_its_address_can_be_freed(cumem: Cumem) -> None:
    hipsim.reset("7.2.3")
    ptr = cumem.malloc()
    hipsim.configure(ignore_address_hints=True)
    with pytest.raises(RuntimeError, match="was taken"):
        cumem.module.suspend([ptr])
    cumem.torch.free(ptr, BYTES)
    assert cumem.module.ranges() == []
    hipsim.assert_clean()


def test_reservation_in_the_wrong_place_is_given_back_later(cumem: Cumem) -> None:
    hipsim.reset("7.2.3")
    ptr = cumem.malloc()
    hipsim.configure(ignore_address_hints=True)
    hipsim.fail("hipMemAddressFree", 2, UNKNOWN)  # of what came instead
    with pytest.raises(RuntimeError, match="was taken"):
        cumem.module.suspend([ptr])
    assert hipsim.stats().reservations == 1
    hipsim.configure(ignore_address_hints=False)
    cumem.map(ptr)
    assert hipsim.stats().reservations == 1


def test_reservation_that_fails_is_had_later(cumem: Cumem) -> None:
    hipsim.reset("7.2.3")
    ptr = cumem.malloc()
    hipsim.fail("hipMemAddressReserve", 1, OUT_OF_MEMORY)
    hipsim.fail("hipMemAddressReserve", 2, OUT_OF_MEMORY)
    with pytest.raises(cumem.module.OutOfMemoryError, match="hipMemAddressReserve"):
        cumem.module.suspend([ptr])
    assert hipsim.stats().reservations == 0
    cumem.map(ptr)
    assert cumem.module.is_mapped(ptr)


def test_alignment_that_is_refused_is_left_to_the_driver(cumem: Cumem) -> None:
    hipsim.fail("hipMemAddressReserve", 1, OUT_OF_MEMORY)
    assert cumem.malloc() % PAGE == 0
    assert hipsim.stats().calls["hipMemAddressReserve"] == 2
    hipsim.fail("hipMemAddressReserve", 1, UNKNOWN)
    hipsim.fail("hipMemAddressReserve", 2, UNKNOWN)
    with pytest.raises(RuntimeError, match="hipMemAddressReserve failed"):
        cumem.malloc()
    assert hipsim.stats().reservations == 1


# --- transfers ---------------------------------------------------------------------


def test_backup_and_restore(cumem: Cumem) -> None:
    ptrs = [cumem.filled(0, BYTES), cumem.filled(1, PAGE), cumem.filled(2, 3 * CHUNK)]
    sizes = [BYTES, PAGE, 3 * CHUNK]
    arena = cumem.module.HostArena(sum(sizes))
    starts = np.cumsum([0, *sizes[:-1]])
    copies = [
        (ptr, size, arena.address + int(start))
        for ptr, size, start in zip(ptrs, sizes, starts, strict=True)
    ]
    cumem.module.back_up(copies)
    kept = np.frombuffer(arena, np.uint8)
    expected = [pattern(number, size) for number, size in enumerate(sizes)]
    assert np.array_equal(kept, np.concatenate(expected))
    cumem.module.suspend(ptrs)
    for ptr in ptrs:
        cumem.map(ptr)
    cumem.module.restore(copies[:2], [(ptrs[2], sizes[2])])
    assert cumem.holds(ptrs[0], 0, sizes[0]) and cumem.holds(ptrs[1], 1, sizes[1])
    assert not cumem.gpu.read(ptrs[2]).any()
    assert hipsim.stats().streams == 0
    del kept, arena


def test_no_copy_and_no_fill_crosses_a_chunk(cumem: Cumem) -> None:
    ptr = cumem.filled(1)
    arena = cumem.module.HostArena(BYTES)
    before = hipsim.stats()
    cumem.module.back_up([(ptr + 100, BYTES - 200, arena.address)])
    cumem.module.restore([], [(ptr + 100, 2 * CHUNK - 100)])
    after = hipsim.stats()
    calls = {name: after.calls[name] - before.calls[name] for name in after.calls}
    assert calls["hipMemcpyAsync"] == 3
    assert calls["hipMemsetAsync"] == 2
    expected = pattern(1, BYTES).copy()
    kept = np.frombuffer(arena, np.uint8)
    assert np.array_equal(kept[: BYTES - 200], expected[100:-100])
    expected[100 : 2 * CHUNK] = 0
    assert np.array_equal(cumem.gpu.read(ptr), expected)
    del kept, arena


def test_transfers_follow_what_others_have_queued(cumem: Cumem) -> None:
    """A fill on the legacy stream has no order with a stream that does not block."""
    ptr = cumem.malloc()
    data = pattern(3, BYTES).copy()
    hipsim.configure(fill_latency_us=100_000)
    hipsim.check(hipsim.load().hipMemsetAsync(ptr, 9, PAGE, None), "hipMemsetAsync")
    cumem.module.restore([(ptr, BYTES, address_of(data))], [])
    assert cumem.holds(ptr, 3)
    hipsim.check(hipsim.load().hipMemsetAsync(ptr, 9, PAGE, None), "hipMemsetAsync")
    cumem.module.back_up([(ptr, BYTES, address_of(data))])
    assert (data[:PAGE] == 9).all()


@pytest.mark.parametrize(
    "call",
    [
        "hipGetDevice",
        "hipDeviceSynchronize",
        "hipStreamCreateWithFlags",
        "hipMemcpyAsync",
        "hipStreamSynchronize",
    ],
)
def test_transfer_that_fails_is_over(cumem: Cumem, call: str) -> None:
    ptr = cumem.filled(1)
    data = np.zeros(BYTES, np.uint8)
    hipsim.configure(copy_latency_us=30_000)
    hipsim.fail(call, 3 if call == "hipMemcpyAsync" else 1, UNKNOWN)
    with pytest.raises(cumem.module.DriverError, match=call):
        cumem.module.back_up([(ptr, BYTES, address_of(data))])
    stats = hipsim.stats()
    moved = sum(count.copies for count in stats.copies.values())
    assert stats.streams == 0
    if call == "hipMemcpyAsync":  # one was queued on each stream
        assert stats.calls["hipStreamSynchronize"] == 2
    time.sleep(0.1)
    assert sum(count.copies for count in hipsim.stats().copies.values()) == moved
    cumem.module.back_up([(ptr, BYTES, address_of(data))])
    assert np.array_equal(data, pattern(1, BYTES))


def test_stream_that_is_not_destroyed_is_destroyed_later(
    cumem: Cumem, capfd: pytest.CaptureFixture[str]
) -> None:
    ptr = cumem.malloc()
    hipsim.fail("hipStreamDestroy", 1, UNKNOWN)
    cumem.module.restore([], [(ptr, BYTES)])
    assert not cumem.gpu.read(ptr).any()
    assert "hipStreamDestroy failed with error 999" in capfd.readouterr().err
    assert hipsim.stats().streams == 1
    assert cumem.module.release_pending() == 0
    assert hipsim.stats().streams == 0


def test_transfers_of_what_is_not_there(cumem: Cumem) -> None:
    ptr = cumem.malloc()
    data = np.zeros(BYTES, np.uint8)
    host = address_of(data)
    for copy in ((ptr - 1, 1, host), (ptr, BYTES + 1, host), (ptr + BYTES, 1, host)):
        with pytest.raises(ValueError, match="not within a live range"):
            cumem.module.back_up([copy])
        with pytest.raises(ValueError, match="not within a live range"):
            cumem.module.restore([copy], [])
        with pytest.raises(ValueError, match="not within a live range"):
            cumem.module.restore([], [copy[:2]])
    cumem.module.suspend([ptr])
    with pytest.raises(RuntimeError, match=f"{ptr:#x} is not mapped"):
        cumem.module.back_up([(ptr, BYTES, host)])
    with pytest.raises(TypeError):
        cumem.module.back_up([(ptr, BYTES)])
    assert hipsim.stats().calls["hipMemcpyAsync"] == 0


# --- devices and threads -----------------------------------------------------------


def test_every_call_on_two_devices_fails_in_turn(cumem: Cumem) -> None:
    """From a third device, which is the thread's again afterwards."""
    lib, here = hipsim.load(), 2
    data = [pattern(number, BYTES).copy() for number in range(2)]
    kept = [np.zeros(BYTES, np.uint8) for _ in range(2)]
    ptrs: list[int] = []

    def copies(arrays: list[np.ndarray]) -> list[tuple[int, int, int]]:
        return [(p, BYTES, address_of(a)) for p, a in zip(ptrs, arrays, strict=True)]

    def fill() -> None:
        cumem.module.restore(copies(data), [])

    def check_contents() -> None:
        for device, ptr in enumerate(ptrs):
            lib.hipSetDevice(device)  # no other may read it
            assert cumem.holds(ptr, device)

    def wake() -> None:
        for ptr in ptrs:
            if not cumem.module.is_mapped(ptr):
                cumem.map(ptr)

    operations: dict[str, Callable[[], Any]] = {
        "restore": fill,
        "back_up": lambda: cumem.module.back_up(copies(kept)),
        "suspend": lambda: cumem.module.suspend(ptrs),
        "map": wake,
    }
    prepare: dict[str, Callable[[], Any]] = {"map": operations["suspend"]}
    # tried again: at the end of an operation, or at once
    harmless = {
        "hipMemAddressReserve",
        "hipRuntimeGetVersion",
        "hipSetDevice",
        "hipStreamDestroy",
    }
    injected = 0
    for name, operation in operations.items():
        ptrs[:] = [cumem.malloc(device=device) for device in (0, 1)]
        fill()
        prepare.get(name, lambda: None)()
        before = hipsim.stats().calls
        operation()
        after = hipsim.stats().calls
        made = {call: after[call] - before[call] for call in after}
        for call, count in made.items():
            for nth in range(1, count + 1):
                for ptr in cumem.module.ranges():
                    cumem.module.free(ptr)
                hipsim.reset("7.2.3")
                ptrs[:] = [cumem.malloc(device=device) for device in (0, 1)]
                fill()
                prepare.get(name, lambda: None)()
                lib.hipSetDevice(here)
                hipsim.fail(call, nth, UNKNOWN)
                told = ""
                try:
                    operation()
                except cumem.module.DriverError as error:
                    told = error.call
                injected += hipsim.stats().pending_faults == 0
                assert told == call or (told == "" and call in harmless), (name, call)
                assert current_device() == here, (name, call, nth)
                if name == "suspend" and told:
                    # all of them or none, and none has lost its bytes
                    mapped = [cumem.module.is_mapped(ptr) for ptr in ptrs]
                    assert mapped in ([True, True], [False, False]), (call, nth)
                    if mapped == [True, True]:
                        check_contents()
                        lib.hipSetDevice(here)
                operation()
                assert cumem.module.release_pending() == 0
                assert hipsim.stats().streams == 0
                wake()
                fill()
                check_contents()
    assert injected > 80


def test_python_runs_while_the_driver_works(cumem: Cumem) -> None:
    ptr = cumem.malloc()
    data = np.zeros(BYTES, np.uint8)
    hipsim.configure(copy_latency_us=100_000)
    started = threading.Event()

    def copy() -> None:
        started.set()
        cumem.module.back_up([(ptr, BYTES, address_of(data))])

    thread = threading.Thread(target=copy)
    thread.start()
    started.wait(10)
    turns = 0
    while thread.is_alive():
        turns += 1
        time.sleep(0.001)
    thread.join()
    assert turns > 20


class Running:
    """A call of the module in a thread of its own, which `let_go` lets end."""

    def __init__(self, call: str, function: Callable[..., Any], *arguments: Any):
        self.raised: list[Exception] = []
        self.thread = threading.Thread(target=self.run, args=(function, arguments))
        before = hipsim.stats().calls[call]
        self.thread.start()
        deadline = time.monotonic() + 10
        while hipsim.stats().calls[call] == before:
            assert time.monotonic() < deadline, f"{call} is not called"
            time.sleep(0.001)

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            function(*arguments)
        except Exception as error:
            self.raised.append(error)

    def is_running(self) -> bool:
        return self.thread.is_alive()

    def let_go(self) -> None:
        hipsim.configure(copy_latency_us=0, fill_latency_us=0)
        hipsim.reset()  # which makes nothing wait that has been queued

    def end(self) -> None:
        self.let_go()
        self.thread.join(30)
        assert not self.thread.is_alive()


FOR_EVER = 60_000_000  # microseconds, which no test waits


def start_slowly(cumem: Cumem, function: str, ptr: int, data: np.ndarray) -> Running:
    """Lets a function of the module wait for the device that has `ptr`."""
    lib, host = hipsim.load(), address_of(data)
    hipsim.configure(copy_latency_us=FOR_EVER, fill_latency_us=FOR_EVER)
    if function == "back_up":
        copies = [(ptr, BYTES, host)]
        return Running("hipMemcpyAsync", cumem.module.back_up, copies)
    if function == "restore":
        zeros = [(ptr, BYTES)]
        return Running("hipStreamSynchronize", cumem.module.restore, [], zeros)
    hipsim.check(lib.hipMemsetAsync(ptr, 7, PAGE, None), "hipMemsetAsync")
    argument = ptr if function == "free" else [ptr]
    return Running("hipDeviceSynchronize", getattr(cumem.module, function), argument)


@pytest.mark.parametrize("function", ["back_up", "restore", "suspend", "free"])
def test_other_ranges_do_not_wait(cumem: Cumem, function: str) -> None:
    """PyTorch has its allocator locked around my_malloc."""
    slow, asleep = cumem.malloc(), cumem.malloc()
    elsewhere = cumem.malloc(device=1)
    cumem.module.suspend([asleep])
    data = np.zeros(BYTES, np.uint8)
    running = start_slowly(cumem, function, slow, data)
    ptr = cumem.malloc()
    assert cumem.module.is_mapped(ptr)
    cumem.map(asleep)
    cumem.module.suspend([elsewhere])
    cumem.torch.free(elsewhere, BYTES)
    assert elsewhere not in cumem.module.ranges()
    cumem.module.chunks(ptr)
    assert running.is_running()
    running.end()
    assert running.raised == []


@pytest.mark.parametrize("other", ["suspend", "free", "is_mapped", "back_up"])
@pytest.mark.parametrize("function", ["back_up", "restore", "suspend"])
def test_the_same_range_is_waited_for(cumem: Cumem, function: str, other: str) -> None:
    """And no call of the driver is made of it meanwhile."""
    ptr = cumem.malloc()
    data = np.zeros(BYTES, np.uint8)
    running = start_slowly(cumem, function, ptr, data)
    before = hipsim.stats().calls
    argument = {"suspend": [ptr], "back_up": [(ptr, BYTES, address_of(data))]}
    second = threading.Thread(
        target=getattr(cumem.module, other), args=(argument.get(other, ptr),)
    )
    if (function, other) == ("suspend", "back_up"):  # which finds it asleep
        second = threading.Thread(target=cumem.module.free, args=(ptr,))
    second.start()
    second.join(0.05)
    assert second.is_alive() and running.is_running()
    assert hipsim.stats().calls == before
    running.end()
    second.join(30)
    assert not second.is_alive()
    assert running.raised == [] and hipsim.stats().memory_faults == 0


def test_range_that_is_freed_meanwhile_is_told(cumem: Cumem) -> None:
    ptr = cumem.malloc()
    data = np.zeros(BYTES, np.uint8)
    running = start_slowly(cumem, "back_up", ptr, data)
    raised: list[Exception] = []

    def free() -> None:
        try:
            cumem.module.free(ptr)
        except ValueError as error:
            raised.append(error)

    threads = [threading.Thread(target=free) for _ in range(3)]
    for thread in threads:
        thread.start()
    running.end()
    for thread in threads:
        thread.join(30)
    assert len(raised) == 2 and "not the address of a live" in str(raised[0])
    assert cumem.module.ranges() == []
    hipsim.assert_clean()


def test_callers_that_hold_pythons_lock(cumem: Cumem) -> None:
    """Another thread has to run before the module's own can go on."""
    library = ctypes.PyDLL(cumem.module.__file__)
    library.my_free.restype = None
    slow = cumem.malloc()
    data = np.zeros(BYTES, np.uint8)
    running = start_slowly(cumem, "back_up", slow, data)
    let_it_end = threading.Timer(0.05, running.let_go)
    let_it_end.start()
    library.my_free(ctypes.c_void_p(slow), BYTES, 0, None)  # waits for the copy
    assert cumem.module.ranges() == []
    let_it_end.join(30)
    running.end()


def run_in_threads(work: Callable[[int], None]) -> None:
    """Runs it in four threads at once, which are told which one they are."""
    threads = [threading.Thread(target=work, args=(each,)) for each in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_threads_work_on_the_same_ranges(cumem: Cumem) -> None:
    """Up to 7.12 addresses are given up and had again with every suspend."""
    hipsim.reset("7.2.3")
    ptrs = [cumem.malloc(3 * PAGE) for _ in range(4)]
    errors: list[BaseException] = []
    data = [np.zeros(4 * 3 * PAGE, np.uint8) for _ in range(4)]

    def work(number: int) -> None:
        chance = np.random.default_rng(number)
        host = address_of(data[number])
        for _ in range(60):
            some = [ptrs[i] for i in chance.permutation(4)[: chance.integers(1, 5)]]
            copies = [(p, 3 * PAGE, host + i * 3 * PAGE) for i, p in enumerate(some)]
            call = chance.choice(["suspend", "map", "back_up", "restore", "malloc"])
            try:
                if call == "suspend":
                    cumem.module.suspend(some)
                elif call == "map":
                    cumem.map(some[0])
                elif call == "back_up":
                    cumem.module.back_up(copies)
                elif call == "restore":
                    cumem.module.restore(copies, [])
                else:
                    cumem.module.free(cumem.torch.malloc(3 * PAGE))
            except RuntimeError as error:
                if "mapped" not in str(error):
                    errors.append(error)
            except BaseException as error:
                errors.append(error)

    run_in_threads(work)
    assert errors == [] and cumem.module.ranges() == sorted(ptrs)
    assert hipsim.stats().memory_faults == 0
    cumem.module.suspend(ptrs)
    assert hipsim.stats().handles == 0


@pytest.mark.parametrize("profile", ["7.2.3", hipsim.PROFILES[-1]])
def test_threads_allocate_and_free_at_once(cumem: Cumem, profile: str) -> None:
    hipsim.reset(profile)
    cumem.torch.mutex = threading.RLock()
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for round_ in range(20):
                size = PAGE * (1 + (number + round_) % 3)
                ptr = cumem.torch.malloc(size)
                cumem.module.suspend([ptr])
                cumem.map(ptr)
                cumem.torch.free(ptr, size)
        except BaseException as error:
            errors.append(error)

    run_in_threads(work)
    assert errors == [] and cumem.module.ranges() == []
    hipsim.assert_clean()


# --- what it is linked with ---------------------------------------------------------


@pytest.mark.parametrize("module", ["cumem_allocator", "pitched_copies"])
def test_no_streams_of_the_standard_library(module: str) -> None:
    """They take their locale from the process's first libstdc++.

    Some compilers link a copy of it into each module. It was seen to disagree with the
    one that PyTorch uses, and reading a number from a file ended the process.
    """
    native = Path(vllm_rocm_memory.__file__).parent / "_native"
    (path,) = native.glob(f"{module}.*.so")
    with path.open("rb") as file:
        symbols = ELFFile(file).get_section_by_name(".dynsym")
        names = [symbol.name for symbol in symbols.iter_symbols()]
    assert any("PyInit_" in name for name in names)
    streams = re.compile(r"St\d*(basic_)?[io]*f?(stream|ios)|NSi|NSo|locale|ios_base")
    assert [name for name in names if streams.search(name)] == []
