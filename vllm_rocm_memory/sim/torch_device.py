# SPDX-License-Identifier: Apache-2.0
"""PyTorch's streams, events and device memory, over the HIP simulator.

Note [A device whose kernels are host code]
PyTorch's CPU build has the classes of `torch.cuda` but nothing behind them. What is
here stands in for them on hipsim: streams and events are the simulator's, and what is
queued on a stream runs on the stream's own thread, later than the call. Kernels are
different: they are PyTorch's CPU kernels, they run in the calling thread and are done
when they return. The current stream is therefore the NULL stream unless
`torch.cuda.stream` says otherwise, and an event recorded on it waits for nothing
unless something else was queued there. Entering `torch.cuda.stream` waits for the
stream, since a kernel called inside it comes after what the stream already holds.

Nothing in this module needs vLLM.
"""

import contextlib
import ctypes
import importlib
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from vllm_rocm_memory.sim import hipsim

_EVENT_BLOCKING_SYNC = 1  # hip_runtime_api.h

_current = threading.local()


def _call(function: str, *arguments: object) -> None:
    hipsim.check(getattr(hipsim.load(), function)(*arguments), function)


def _is_ready(function: str, handle: ctypes.c_void_p) -> bool:
    error = getattr(hipsim.load(), function)(handle)
    if error != hipsim.NOT_READY:
        hipsim.check(error, function)
    return bool(error == hipsim.SUCCESS)


def _destroy_with(owner: object, function: str, handle: ctypes.c_void_p) -> None:
    # Not at the exit of the interpreter: other threads may still use the handle then,
    # and it ends with the process.
    destroy = getattr(hipsim.load(), function)
    weakref.finalize(owner, destroy, handle).atexit = False


class Event:
    """`torch.Event` and `torch.cuda.Event`: one event of the simulator.

    An event that was never recorded is complete, as in CUDA and HIP.
    """

    def __init__(
        self,
        device: object = None,
        *,
        enable_timing: bool = False,
        blocking: bool = False,
    ) -> None:
        flags = 0 if enable_timing else hipsim.EVENT_DISABLE_TIMING
        flags |= _EVENT_BLOCKING_SYNC if blocking else 0
        self._handle = ctypes.c_void_p()
        _call("hipEventCreateWithFlags", ctypes.byref(self._handle), flags)
        _destroy_with(self, "hipEventDestroy", self._handle)

    def record(self, stream: "Stream | None" = None) -> None:
        _call("hipEventRecord", self._handle, (stream or current_stream())._handle)

    def wait(self, stream: "Stream | None" = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return _is_ready("hipEventQuery", self._handle)

    def synchronize(self) -> None:
        _call("hipEventSynchronize", self._handle)


class Stream:
    """`torch.cuda.Stream`: one non-blocking stream of the simulator.

    Args:
        device: Accepted and not looked at; each process has one device.
        priority: Between the two ends of `priority_range()`.
    """

    device = torch.device("cpu")

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self._handle = ctypes.c_void_p()
        _call(
            "hipStreamCreateWithPriority",
            ctypes.byref(self._handle),
            hipsim.STREAM_NON_BLOCKING,
            priority,
        )
        _destroy_with(self, "hipStreamDestroy", self._handle)

    @classmethod
    def null(cls) -> "Stream":
        """The stream that exists without having been made."""
        stream = cls.__new__(cls)
        stream._handle = ctypes.c_void_p()
        return stream

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The lowest and the highest priority; higher priorities are lower numbers."""
        least, greatest = ctypes.c_int(), ctypes.c_int()
        _call(
            "hipDeviceGetStreamPriorityRange",
            ctypes.byref(least),
            ctypes.byref(greatest),
        )
        return least.value, greatest.value

    @property
    def cuda_stream(self) -> int:
        """The handle as a number, 0 for the NULL stream."""
        return self._handle.value or 0

    def wait_event(self, event: Event) -> None:
        _call("hipStreamWaitEvent", self._handle, event._handle, 0)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return _is_ready("hipStreamQuery", self._handle)

    def synchronize(self) -> None:
        _call("hipStreamSynchronize", self._handle)

    def __repr__(self) -> str:
        return f"<hipsim stream {self.cuda_stream:#x}>"


def current_stream(device: object = None) -> Stream:
    """The stream that this thread has entered, else the NULL stream."""
    return getattr(_current, "stream", None) or Stream.null()


@contextlib.contextmanager
def stream(entered: Stream | None) -> Iterator[None]:
    """`torch.cuda.stream`: makes a stream current; None changes nothing."""
    if entered is None:
        yield
        return
    entered.synchronize()
    outer = current_stream()
    _current.stream = entered
    try:
        yield
    finally:
        _current.stream = outer


def synchronize(device: object = None) -> None:
    """Waits for everything that is queued on the device."""
    _call("hipDeviceSynchronize")


def _accelerator_synchronize(device: object = None) -> None:
    # Dynamo has a table of functions, in which torch.cuda.synchronize and this one
    # need an entry each.
    synchronize(device)


def get_memory_info(device: object = None) -> tuple[int, int]:
    """Free and total bytes of the simulated device."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _call("hipMemGetInfo", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


class CudartError:
    """What a call of `torch.cuda.cudart()` returns; 0 is success."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __str__(self) -> str:
        return str(hipsim.load().hipGetErrorName(self.value).decode())


class Cudart:
    """`torch.cuda.cudart()`: the calls that register host memory."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> CudartError:
        return CudartError(hipsim.load().hipHostRegister(address, size, flags))

    def cudaHostUnregister(self, address: int) -> CudartError:
        return CudartError(hipsim.load().hipHostUnregister(address))


def device_memory() -> AbstractContextManager[None]:
    """Within it, the CPU tensors that this thread allocates lie in device memory.

    Raises:
        RuntimeError: The extension is not built.
        torch.OutOfMemoryError: By an allocation that the device has no room for.
    """
    try:
        native = importlib.import_module("vllm_rocm_memory._native.device_memory")
    except ImportError as error:
        raise RuntimeError(
            f"the extension device_memory cannot be loaded ({error}): run `make setup`"
        ) from error
    library = hipsim.load()
    addresses = (
        ctypes.cast(function, ctypes.c_void_p).value
        for function in (library.hipMalloc, library.hipFree)
    )
    scope: AbstractContextManager[None] = native.Scope(native.HipMalloc(*addresses))
    return scope


def install() -> Callable[[], None]:
    """Puts this module in place of PyTorch's own; returns what takes it back."""
    replacements: list[tuple[Any, str, object]] = [
        (torch, "Event", Event),
        (torch.cuda, "Event", Event),
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "current_stream", current_stream),
        (torch.cuda, "stream", stream),
        (torch.cuda, "synchronize", synchronize),
        (torch.cuda, "cudart", Cudart),
        (torch.accelerator, "synchronize", _accelerator_synchronize),
        (torch.accelerator, "get_memory_info", get_memory_info),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)

    def uninstall() -> None:
        for owner, name, original in originals:
            setattr(owner, name, original)

    return uninstall
