# SPDX-License-Identifier: Apache-2.0
"""PyTorch's CUDA graphs, over CPU tensors and the HIP simulator.

Note [Graphs whose kernels are host code]
A capture is a capture of the simulator, on the stream that is current: what breaks one
on ROCm breaks it here, and its end raises. Kernels do not pass through the stream, so
the operations that PyTorch dispatches in the capturing thread are recorded beside it,
custom ones too, each as one operation with whatever it does inside. They run while
they are captured, unlike a GPU's. A replay runs them again, in order, on the memory
that they had: results are copied to where the captured results lay.

As in a graph of HIP, nothing that lies in the capture's pool is kept alive by the
graph: a block that is freed during the capture serves the operations after it, another
graph of the pool overwrites it, and a replay while the pool is asleep faults. Tensors
outside of the pool are kept alive, because a kernel that writes into freed host memory
would damage the process and not only its own results.

Not recorded: what code does without PyTorch's dispatcher (numpy, `tolist`, kernels that
Inductor compiled for the CPU), and what Python does with values. `item` of a tensor in
the pool waits for the stream, and so breaks the capture as on ROCm. Random
operations draw new numbers in each replay, from the generator of the CPU. Copies and
fills that the stream recorded are replayed if there are no operations; with both, it is
not known which came first, and the capture's end raises.
"""

import contextlib
import ctypes
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from vllm_rocm_memory.sim import hipsim, torch_stream
from vllm_rocm_memory.sim.torch_memory_pool import (
    CapturePool,
    PoolId,
    capture_pool_handle,
    empty_cache,
    host_memory,
    pool_of,
)
from vllm_rocm_memory.sim.torch_stream import (
    Stream,
    call,
    current_stream,
    wait_for_kernel,
)

# hipStreamCaptureMode.
_MODES = {"global": 0, "thread_local": 1, "relaxed": 2}

_aten = torch.ops.aten

# A GPU has no kernel for these, so that a replay leaves their memory as it is.
_UNINITIALIZED = frozenset(
    {
        _aten.empty,
        _aten.empty_like,
        _aten.empty_permuted,
        _aten.empty_strided,
        _aten.new_empty,
        _aten.new_empty_strided,
    }
)


_Operands = tuple[tuple[Any, ...], dict[str, Any]]


class _Operation(NamedTuple):
    function: Callable[..., Any]
    operands: _Operands
    results: list[Any]

    def run(self) -> None:
        args, kwargs = self.operands
        results = tree_leaves(self.function(*args, **kwargs))
        for captured, result in zip(self.results, results, strict=True):
            if not isinstance(captured, torch.Tensor):
                continue
            if captured.shape != result.shape:
                raise RuntimeError(
                    f"{self.function} was captured with a result of "
                    f"{tuple(captured.shape)}, and replayed with {tuple(result.shape)}"
                )
            if captured.data_ptr() != result.data_ptr():
                captured.copy_(result)


def weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same memory that does not own it, as vLLM's custom op makes.

    Tensors that lie in no pool are returned as they are.
    """
    if _pool_of(tensor) is None or tensor.is_conj() or tensor.is_neg():
        return tensor
    storage = tensor.untyped_storage()
    buffer = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    borrowed = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(
        borrowed, tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def _pool_of(tensor: torch.Tensor) -> PoolId | None:
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return None
    return pool_of(tensor.untyped_storage().data_ptr())


class _Recorder(TorchDispatchMode):
    """Hands what its thread dispatches to the capture that is going on.

    A capture may end, and another one begin, inside of an operation (breakable
    graphs): PyTorch has taken the mode off its stack meanwhile, so that it stays there
    until a capture ends outside of any operation.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capture: _Capture | None = None
        self._running = 0

    def begin(self, capture: "_Capture") -> None:
        if self.capture is not None:
            raise RuntimeError("this thread is capturing another graph already")
        self.capture = capture
        if not self._running and self not in _get_current_dispatch_mode_stack():
            self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        self.capture = None
        self.leave()

    def leave(self) -> None:
        """Takes the mode off PyTorch's stack, if it may go."""
        if (
            self.capture is None
            and not self._running
            and _get_current_dispatch_mode() is self
        ):
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        capture = self.capture
        if capture is None:
            return function(*args, **kwargs)
        operands = capture.before(function, args, kwargs)
        self._running += 1
        try:
            result = function(*args, **kwargs)
        finally:
            self._running -= 1
        # An operation that broke the capture is its caller's, who repeats it.
        if self.capture is capture:
            capture.after(function, operands, result)
        return result


_recorders = threading.local()


def _recorder() -> _Recorder:
    if not hasattr(_recorders, "mine"):
        _recorders.mine = _Recorder()
    mine: _Recorder = _recorders.mine
    return mine


class _Capture:
    """A capture that is going on, and what it has recorded."""

    def __init__(self, pool: PoolId, on: Stream) -> None:
        self.pool = CapturePool(pool)
        self.stream = on
        self.operations: list[_Operation] = []

    def before(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Operands:
        """The operands as they are before the operation, which may change them.

        Raises:
            hipsim.HipError: The operation reads a value that a GPU would not have
                computed yet.
        """
        if (
            _packet(function) is _aten._local_scalar_dense
            and _pool_of(args[0]) == self.pool.id
        ):
            self.stream.synchronize()
        return self._keep(args), self._keep(kwargs)

    def after(self, function: Any, operands: _Operands, result: Any) -> None:
        """Records the operation, unless a replay has nothing to do."""
        if _packet(function) in _UNINITIALIZED or _is_view(function, operands, result):
            return
        results = tree_leaves(self._keep(result))
        self.operations.append(_Operation(function, operands, results))

    def _keep(self, value: Any) -> Any:
        """Tensors as they look now, without owning what lies in the pool."""
        return tree_map_only(torch.Tensor, self._keep_tensor, value)

    def _keep_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            if _pool_of(tensor) == self.pool.id:
                return weak_ref_tensor(tensor)
            return tensor.detach()


def _packet(function: Any) -> Any:
    return getattr(function, "overloadpacket", None)


def _is_view(function: Any, operands: _Operands, result: Any) -> bool:
    """Whether the operation made no more than another look at its operands' memory."""
    if getattr(function, "namespace", None) != "aten":
        return False
    if torch.Tag.inplace_view in function.tags:
        return True
    results = tree_leaves(result)
    if function._schema.is_mutable or not results:
        return False
    known = {_storage(operand) for operand in tree_leaves(operands)} - {None}
    return all(_storage(each) in known for each in results)


def _storage(value: Any) -> int | None:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return value.untyped_storage().data_ptr()


class _Executable:
    """What is replayed; its pool stays in use until `destroy`."""

    def __init__(self, pool: CapturePool, operations: list[_Operation]) -> None:
        self.pool = pool
        self.operations = operations
        self.handle = ctypes.c_void_p()

    def instantiate(self, graph: ctypes.c_void_p) -> None:
        nodes = ctypes.c_size_t()
        call("hipGraphGetNodes", graph, None, ctypes.byref(nodes))
        if nodes.value and self.operations:
            raise RuntimeError(
                f"the capture has {len(self.operations)} operations of PyTorch and "
                f"{nodes.value} copies or fills of the stream, and the simulator does "
                "not know their order"
            )
        call("hipGraphInstantiate", ctypes.byref(self.handle), graph, None, None, 0)

    def destroy(self) -> None:
        call("hipGraphExecDestroy", self.handle)
        self.operations.clear()
        self.pool.release()


def _destroy_lost(executable: _Executable) -> None:
    executable.destroy()
    # PyTorch's destructor does so on ROCm; a capture that goes on does not survive it.
    hipsim.load().hipDeviceSynchronize()


class CUDAGraph:
    """`torch.cuda.CUDAGraph`: what one thread captured on one stream."""

    def __init__(self) -> None:
        self._capture: _Capture | None = None
        self._executable: _Executable | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    def capture_begin(
        self, pool: PoolId | None = None, capture_error_mode: str = "global"
    ) -> None:
        """Begins a capture on the current stream, which is not the NULL stream.

        Args:
            pool: Of a MemPool, of another graph, or a name; None makes one.
            capture_error_mode: "global", "thread_local" or "relaxed".

        Raises:
            RuntimeError: A capture is not possible here and now.
        """
        if self._executable or self._capture:
            raise RuntimeError("this CUDAGraph owns a capture already; make another")
        if capture_error_mode not in _MODES:
            raise RuntimeError(
                f"capture_error_mode is {capture_error_mode!r}; it must be "
                f"{' or '.join(_MODES)}"
            )
        on = current_stream()
        if not on.cuda_stream:
            raise RuntimeError("graphs must be captured on a non-default stream")
        if pool is None or pool == (0, 0):
            pool = capture_pool_handle()
        capture = _Capture(pool, on)
        with contextlib.ExitStack() as undo:
            capture.pool.begin()
            undo.callback(capture.pool.release)
            undo.callback(capture.pool.end)
            _recorder().begin(capture)
            undo.callback(_recorder().end)
            call("hipStreamBeginCapture", on._handle, _MODES[capture_error_mode])
            undo.pop_all()
        self._capture = capture

    def capture_end(self) -> None:
        """Ends the capture, in the thread and on the stream that began it.

        Raises:
            RuntimeError: Something broke the capture, and the graph is empty as
                before; or there is no room for what the executable graph holds.
        """
        capture = self._capture
        if capture is None:
            raise RuntimeError("capture_end() called before capture_begin()")
        if _recorder().capture is not capture:
            raise RuntimeError("a capture ends in the thread that began it")
        if current_stream() != capture.stream:
            raise RuntimeError("a capture ends on the stream that it began on")
        self._capture = None
        _recorder().end()
        capture.pool.end()
        executable = _Executable(capture.pool, capture.operations)
        graph = ctypes.c_void_p()
        with contextlib.ExitStack() as undo:
            undo.callback(capture.pool.release)
            call("hipStreamEndCapture", capture.stream._handle, ctypes.byref(graph))
            try:
                executable.instantiate(graph)
            finally:
                call("hipGraphDestroy", graph)
            undo.pop_all()
        self._executable = executable
        self._finalizer = weakref.finalize(self, _destroy_lost, executable)
        self._finalizer.atexit = False

    def replay(self) -> None:
        """Runs the graph after what the current stream holds already.

        Raises:
            RuntimeError: There is no graph, or an operation fails.
        """
        executable = self._owned("replay")
        on = current_stream()
        wait_for_kernel(on)
        _recorder().leave()
        # What an operation needs beside its results is not the graph's.
        with torch.inference_mode(), host_memory():
            for operation in executable.operations:
                operation.run()
        call("hipGraphLaunch", executable.handle, on._handle)

    def reset(self) -> None:
        """Gives the graph up; its pool may go."""
        if self._finalizer is not None:
            self._finalizer.detach()
        executable, self._executable = self._executable, None
        if executable is not None:
            executable.destroy()

    def pool(self) -> PoolId:
        """The pool that the graph was captured into, for another graph to share."""
        return self._owned("pool").pool.id

    def _owned(self, what: str) -> _Executable:
        if self._executable is None:
            raise RuntimeError(f"{what}() without a preceding successful capture")
        return self._executable


@contextlib.contextmanager
def graph(
    cuda_graph: CUDAGraph,
    pool: PoolId | None = None,
    stream: Stream | None = None,
    capture_error_mode: str = "global",
) -> Iterator[None]:
    """`torch.cuda.graph`: captures what its thread does, on a stream or a new one.

    Raises:
        RuntimeError: As `CUDAGraph.capture_begin` and `capture_end`.
    """
    call("hipDeviceSynchronize")
    if torch.compiler.config.force_cudagraph_gc:
        gc.collect()
    empty_cache()
    with torch_stream.stream(stream or Stream()):
        cuda_graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        finally:
            cuda_graph.capture_end()


def is_current_stream_capturing() -> bool:
    """`torch.cuda.is_current_stream_capturing`."""
    return current_stream().is_capturing()
