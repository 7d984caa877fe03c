# SPDX-License-Identifier: Apache-2.0
"""PyTorch's streams and events, over the HIP simulator.

See Note [A device whose kernels are host code] in `torch_device`.
"""

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Iterator

import torch

from vllm_rocm_memory.sim import hipsim

_EVENT_BLOCKING_SYNC = 1  # hip_runtime_api.h
_CAPTURE_ACTIVE = 1  # hipStreamCaptureStatusActive
_CAPTURE_RELAXED = 2  # hipStreamCaptureModeRelaxed

_current = threading.local()


def call(function: str, *arguments: object) -> None:
    """Calls HIP.

    Raises:
        hipsim.HipError: The call failed. The thread's last error is cleared, so that
            nobody else's call gets the blame.
    """
    library = hipsim.load()
    error = getattr(library, function)(*arguments)
    if error != hipsim.SUCCESS:
        library.hipGetLastError()
        raise hipsim.HipError(function, error)


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
        call("hipEventCreateWithFlags", ctypes.byref(self._handle), flags)
        _destroy_with(self, "hipEventDestroy", self._handle)

    def record(self, stream: "Stream | None" = None) -> None:
        call("hipEventRecord", self._handle, (stream or current_stream())._handle)

    def wait(self, stream: "Stream | None" = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return _is_ready("hipEventQuery", self._handle)

    def synchronize(self) -> None:
        call("hipEventSynchronize", self._handle)


class Stream:
    """`torch.cuda.Stream`: one non-blocking stream of the simulator.

    Two objects are equal when they mean the same stream.

    Args:
        device: Accepted and not looked at; each process has one device.
        priority: Between the two ends of `priority_range()`.
    """

    device = torch.device("cpu")

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self._handle = ctypes.c_void_p()
        call(
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
        call(
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
        call("hipStreamWaitEvent", self._handle, event._handle, 0)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return _is_ready("hipStreamQuery", self._handle)

    def synchronize(self) -> None:
        call("hipStreamSynchronize", self._handle)

    def is_capturing(self) -> bool:
        """Whether what is called on the stream is recorded, and nothing broke that."""
        if not self.cuda_stream:
            return False  # nor may it be asked while other streams capture
        status = ctypes.c_uint()
        call("hipStreamIsCapturing", self._handle, ctypes.byref(status))
        return status.value == _CAPTURE_ACTIVE

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.cuda_stream == other.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)

    def __repr__(self) -> str:
        return f"<hipsim stream {self.cuda_stream:#x}>"


def current_stream(device: object = None) -> Stream:
    """The stream that this thread has entered, else the NULL stream."""
    return getattr(_current, "stream", None) or Stream.null()


def default_stream(device: object = None) -> Stream:
    """The NULL stream."""
    return Stream.null()


def wait_for_kernel(queued_on: Stream) -> None:
    """Waits until a kernel that is launched on the stream would run.

    A GPU does that by itself, so that this wait is none of the program's: it breaks no
    capture. A stream that captures holds nothing.
    """
    if queued_on.is_capturing():
        return
    mode = ctypes.c_uint(_CAPTURE_RELAXED)
    call("hipThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        queued_on.synchronize()
    finally:
        call("hipThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def set_stream(entered: Stream | None) -> None:
    """Makes a stream current in this thread; None changes nothing."""
    if entered is None:
        return
    wait_for_kernel(entered)
    _current.stream = entered


@contextlib.contextmanager
def stream(entered: Stream | None) -> Iterator[None]:
    """`torch.cuda.stream`: makes a stream current; None changes nothing."""
    if entered is None:
        yield
        return
    outer = current_stream()
    set_stream(entered)
    try:
        yield
    finally:
        _current.stream = outer
