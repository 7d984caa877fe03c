# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs over CPU tensors: what is recorded, what breaks it, what it keeps."""

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)

from vllm_rocm_memory.sim import hipsim, torch_device, torch_memory_pool
from vllm_rocm_memory.sim.torch_graph import (
    CUDAGraph,
    graph,
    is_current_stream_capturing,
    weak_ref_tensor,
)
from vllm_rocm_memory.sim.torch_memory_pool import (
    MemPool,
    empty_cache,
    graph_pool_handle,
    memory_snapshot,
    use_mem_pool,
)
from vllm_rocm_memory.sim.torch_stream import Stream, stream

DEADLINE = 30  # seconds, for whatever is waited for
KERNEL_ARGUMENTS = 128 << 10  # what an executable graph holds of the device


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """A capture and its graph leave nothing behind, of the device and in the thread."""

    def live() -> tuple[int, ...]:
        now = hipsim.stats()
        handles = now.streams, now.captures, now.graphs, now.executables
        return *handles, now.device_bytes, len(memory_snapshot())

    hipsim.reset()
    before = live()
    yield
    hipsim.reset()
    assert _get_current_dispatch_mode_stack() == []
    assert torch_memory_pool.pool_of(torch.ones(1000).data_ptr()) is None
    empty_cache()
    if live() != before:
        gc.collect()
        empty_cache()
    assert live() == before
    hipsim.load().hipGetLastError()


def operations(captured: CUDAGraph) -> list[str]:
    """What a graph has recorded."""
    assert captured._executable
    return [str(each.function) for each in captured._executable.operations]


def capture(
    body: Callable[[], object], pool: tuple[int, int] | None = None
) -> tuple[CUDAGraph, object]:
    captured = CUDAGraph()
    with graph(captured, pool=pool):
        result = body()
    return captured, result


# --- what is replayed -----------------------------------------------------------------


def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    hidden = torch.nn.functional.linear(x, weight).relu()
    left, right = hidden.chunk(2, dim=-1)
    left *= 2  # in place, through a view
    out = torch.empty_like(right)
    torch.mul(left, right, out=out)
    return torch.cat([out.t().contiguous(), right.t()], dim=0).softmax(-1)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_replay_computes_what_the_code_would(mode):
    with mode():
        x, weight = torch.randn(6, 16), torch.nn.Parameter(torch.randn(8, 16))
        captured, result = capture(lambda: layer(x, weight))
        assert torch.equal(result, layer(x, weight)), "kernels run in the capture too"
        address = result.data_ptr()
    for _ in range(3):
        with mode():
            x.normal_()
            weight.normal_()
        captured.replay()
        with mode():
            assert torch.equal(result, layer(x, weight))
        assert result.data_ptr() == address


def test_a_replay_changes_what_the_operations_change():
    x, total = torch.ones(4), torch.zeros(4)

    def body() -> torch.Tensor:
        total.add_(x)
        total[1:3] += 10
        return total * 2

    captured, result = capture(body)
    assert total.tolist() == [1, 11, 11, 1]
    x.fill_(5)
    captured.replay()
    assert total.tolist() == [6, 26, 26, 6]
    assert result.tolist() == [12, 52, 52, 12]
    captured.replay()
    assert result.tolist() == [22, 82, 82, 22]


def test_operations_have_the_tensors_as_they_were():
    x = torch.arange(6.0).view(2, 3)

    def body() -> torch.Tensor:
        scratch = x + 1
        scratch.t_()
        first = scratch[0].clone()
        scratch.t_()
        return first.sum() + scratch[0].sum()

    captured, result = capture(body)
    assert "aten.t_.default" not in operations(captured)
    for _ in range(2):
        x.add_(1)
        captured.replay()
        assert torch.equal(result, body())


def test_memory_that_nothing_fills_stays_as_it_is():
    x = torch.ones(4)
    kept: list[torch.Tensor] = []

    def body() -> torch.Tensor:
        kept.extend((torch.empty(4), torch.empty_like(x), x.new_empty(4)))
        return x + 1

    captured, _ = capture(body)
    assert operations(captured) == ["aten.add.Tensor"]
    for tensor in kept:
        tensor.fill_(7)
    captured.replay()
    for tensor in kept:
        assert tensor.tolist() == [7] * 4, "a GPU has no kernel that would touch it"


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    library = torch.library.Library("graph_test", "FRAGMENT")
    yield library
    library._destroy()


def test_a_custom_operation_is_one_operation(library):
    scale = [1.0]
    library.define("scale(Tensor x, Tensor(a!) out) -> ()")
    library.define("scaled(Tensor x) -> Tensor")

    def write(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_((x + 0) * scale[0])

    library.impl("scale", write, "CPU")
    library.impl("scaled", lambda x: (x + 0) * scale[0], "CPU")
    x = torch.ones(4)

    def body() -> torch.Tensor:
        out = torch.empty(4)
        torch.ops.graph_test.scale(x, out)
        return out + torch.ops.graph_test.scaled(x)

    captured, result = capture(body)
    assert operations(captured) == [
        "graph_test.scale.default",
        "graph_test.scaled.default",
        "aten.add.Tensor",
    ]
    scale[0] = 3.0  # as attention metadata are found when the operation runs
    captured.replay()
    assert result.tolist() == [6.0] * 4


@pytest.mark.parametrize("dispatched", [True, False])
def test_a_capture_may_be_broken_for_a_call(library, dispatched):
    """As vLLM's breakable graphs do, also inside of a custom operation."""
    x, scale = torch.ones(4), [1.0]
    pool, segments = graph_pool_handle(), []

    def begin() -> None:
        segments.append(CUDAGraph())
        segments[-1].capture_begin(pool=pool)

    def eager(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * scale[0])

    def broken(x: torch.Tensor, out: torch.Tensor) -> None:
        segments[-1].capture_end()
        assert not is_current_stream_capturing()
        eager(x, out)
        segments.append(lambda: eager(x, out))
        begin()

    library.define("broken(Tensor x, Tensor(a!) out) -> ()")
    library.impl("broken", broken, "CPU")
    call = torch.ops.graph_test.broken if dispatched else broken
    with stream(Stream()):
        begin()
        hidden = x * 2
        for _ in range(2):
            out = torch.empty(4)
            call(hidden, out)
            hidden = hidden + out
        segments[-1].capture_end()
    assert hidden.tolist() == [8.0] * 4
    assert [operations(each) for each in segments[::2]] == [
        ["aten.mul.Tensor"],
        ["aten.add.Tensor"],
        ["aten.add.Tensor"],
    ]
    scale[0] = 3.0
    for each in segments:
        each.replay() if isinstance(each, CUDAGraph) else each()
    assert hidden.tolist() == [32.0] * 4
    segments.clear()  # PyTorch keeps what a library implements


def test_a_break_that_ends_the_last_capture_leaves_no_mode_in_the_way(library):
    x, graphs = torch.ones(4), [CUDAGraph()]
    library.define("stop(Tensor x) -> ()")
    library.impl("stop", lambda x: graphs[0].capture_end(), "CPU")
    with stream(Stream()):
        graphs[0].capture_begin()
        result = x + 1
        torch.ops.graph_test.stop(x)
        result.add_(x)  # not captured
    assert operations(graphs[0]) == ["aten.add.Tensor"]
    graphs.pop().replay()
    assert result.tolist() == [2.0] * 4
    assert _get_current_dispatch_mode_stack() == []


def test_a_capture_may_begin_under_a_mode_and_end_after_it():
    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            Count.seen += 1
            return function(*args, **(kwargs or {}))

    x = torch.ones(4)
    with Count():
        captured, result = capture(lambda: x + 1)
    assert Count.seen > 0 and operations(captured) == ["aten.add.Tensor"]
    x.fill_(2)
    captured.replay()
    assert result.tolist() == [3.0] * 4


def test_a_function_for_the_compiler_is_captured_as_its_operations():
    compiled = torch.compile(lambda x: (x + 1) * 2, backend="eager")
    x = torch.ones(4)
    captured, result = capture(lambda: compiled(x))
    assert operations(captured) == ["aten.add.Tensor", "aten.mul.Tensor"]
    x.fill_(2)
    captured.replay()
    assert result.tolist() == [6.0] * 4


def test_only_the_thread_that_captures_is_recorded():
    x = torch.ones(4)

    def body() -> torch.Tensor:
        thread = threading.Thread(target=lambda: x.add_(1))
        thread.start()
        thread.join(DEADLINE)
        return x * 2

    captured, result = capture(body)
    assert operations(captured) == ["aten.mul.Tensor"]
    captured.replay()
    assert result.tolist() == [4.0] * 4


def test_a_result_of_another_size_is_refused():
    x = torch.tensor([1, 0, 1])
    captured, _ = capture(x.nonzero)
    x.fill_(1)
    with pytest.raises(RuntimeError, match=r"result of \(2, 1\).*with \(3, 1\)"):
        captured.replay()


# --- copies and fills of the stream ---------------------------------------------------


def test_what_the_stream_recorded_is_replayed():
    with torch_device.device_memory():
        source, destination = torch.ones(1000), torch.zeros(1000)
    captured, on = CUDAGraph(), Stream()
    with graph(captured, stream=on):
        error = hipsim.load().hipMemcpyAsync(
            destination.data_ptr(),
            source.data_ptr(),
            source.nbytes,
            hipsim.DEFAULT_KIND,
            on.cuda_stream,
        )
        assert error == hipsim.SUCCESS
    assert not destination.any(), "recorded, and not done"
    with stream(on):
        captured.replay()
    on.synchronize()
    assert torch.equal(destination, source)


def test_an_unknown_order_is_refused():
    with torch_device.device_memory():
        x = torch.ones(1000)
    on = Stream()
    with (
        pytest.raises(RuntimeError, match=r"1 operations.*1 copies or fills"),
        graph(CUDAGraph(), stream=on),
    ):
        x + 1
        hipsim.load().hipMemsetAsync(x.data_ptr(), 0, x.nbytes, on.cuda_stream)


def test_a_replay_comes_after_what_the_stream_holds():
    with torch_device.device_memory():
        x = torch.zeros(1000)
    host = torch.ones(1000)
    register = torch_device.Cudart()
    assert register.cudaHostRegister(host.data_ptr(), host.nbytes, 0).value == 0
    captured, result = capture(lambda: x + 1)
    hipsim.configure(copy_latency_us=50_000)
    with stream(Stream()):
        on = torch_device.current_stream()
        hipsim.load().hipMemcpyAsync(
            x.data_ptr(), host.data_ptr(), host.nbytes, 4, on.cuda_stream
        )
        captured.replay()
    assert (result == 2).all()
    assert register.cudaHostUnregister(host.data_ptr()).value == 0


# --- memory ---------------------------------------------------------------------------


def allocated(pool: tuple[int, int]) -> int:
    return sum(each["allocated_size"] for each in memory_snapshot(pool))


def test_a_capture_allocates_from_a_pool_of_its_own():
    before = hipsim.stats().device_bytes
    x = torch.ones(1000)
    captured, result = capture(lambda: x + 1)
    assert torch_memory_pool.pool_of(result.data_ptr()) == captured.pool()
    assert captured.pool()[1] == 0
    assert hipsim.stats().device_bytes - before == 2 << 20
    del result
    empty_cache()
    assert len(memory_snapshot(captured.pool())) == 1, "the graph may be replayed"
    pool = captured.pool()
    captured.reset()
    empty_cache()
    assert memory_snapshot(pool) == []


def test_a_capture_allocates_from_the_pool_that_it_is_given():
    pool = MemPool()
    with use_mem_pool(pool):
        inputs = [torch.ones(1000)]
    captured, result = capture(lambda: inputs[0] + 1, pool.id)
    assert captured.pool() == pool.id and pool.use_count() == 2
    assert torch_memory_pool.pool_of(result.data_ptr()) == pool.id
    inputs[0].fill_(4)
    captured.replay()
    assert (result == 5).all()
    inputs.clear()
    del result
    pool_id = pool.id
    del pool
    assert len(memory_snapshot(pool_id)) == 1, "the graph keeps it"
    del captured
    empty_cache()
    assert memory_snapshot(pool_id) == []


def test_graphs_share_a_pool_by_its_name():
    x, pool = torch.ones(1000), graph_pool_handle()
    first, before = capture(lambda: x + 1, pool)
    address = before.data_ptr()
    del before
    second, after = capture(lambda: x + 2, pool)
    assert after.data_ptr() == address, "what the first graph left is used again"
    first.replay()
    assert (after == 2).all(), "and overwritten by it"
    second.replay()
    assert (after == 3).all()
    third, _ = capture(lambda: x + 3, first.pool())
    assert first.pool() == second.pool() == third.pool() == pool


def test_a_graph_has_no_more_memory_than_its_code_needs():
    pool = graph_pool_handle()
    x = torch.ones(25_000)

    def body() -> torch.Tensor:
        hidden = x
        for _ in range(50):
            hidden = hidden + 1
        return hidden

    captured, result = capture(body, pool)
    assert allocated(pool) == 100_352 and len(memory_snapshot(pool)) == 1
    x.fill_(2)
    captured.replay()
    assert (result == 52).all()


def test_tensors_outside_of_the_pool_live_as_long_as_the_graph():
    inputs = [torch.ones(1000)]
    captured, result = capture(lambda: inputs[0].add_(1) * 2)
    address = inputs.pop().data_ptr()
    other = [torch.zeros(1000) for _ in range(20)]
    assert address not in [each.data_ptr() for each in other]
    captured.replay()
    assert (result == 6).all() and not any(each.any() for each in other)


def test_tensors_of_another_pool_live_as_long_as_the_graph():
    other = MemPool()
    with use_mem_pool(other):
        inputs = [torch.ones(1000)]
    captured, result = capture(lambda: inputs[0] + 1)
    inputs.clear()
    assert allocated(other.id) == 4096
    captured.replay()
    assert (result == 2).all()
    captured.reset()
    assert allocated(other.id) == 0


def test_a_capture_may_end_within_a_scope_that_began_in_it():
    x, graphs = torch.ones(1000), [CUDAGraph(), CUDAGraph()]
    with stream(Stream()):
        graphs[0].capture_begin()
        with torch_device.host_memory():
            first = x + 1
            graphs[0].capture_end()
            graphs[1].capture_begin()
            second = first + 1
        third = second + 1
        graphs[1].capture_end()
    pools = [torch_memory_pool.pool_of(y.data_ptr()) for y in (first, second, third)]
    # The innermost scope counts, and a capture is one.
    assert pools == [None, graphs[1].pool(), graphs[1].pool()]
    x.fill_(5)
    for each in graphs:
        each.replay()
    assert (third == 8).all()


def test_a_replay_allocates_nothing_of_the_device():
    x = torch.ones(1000)
    captured, result = capture(lambda: (x + 1) * 2)
    hipsim.fail("hipMalloc", 1, 2)
    pool = MemPool()
    with torch_device.device_memory(), use_mem_pool(pool):
        captured.replay()
    assert pool.snapshot() == [] and hipsim.stats().pending_faults == 1
    assert (result == 4).all()


def test_an_executable_graph_holds_its_arguments():
    free = torch_device.get_memory_info()[0]
    captured, _ = capture(lambda: None)
    assert free - torch_device.get_memory_info()[0] == KERNEL_ARGUMENTS
    captured.reset()
    assert torch_device.get_memory_info()[0] == free


def test_a_weak_reference_does_not_own_its_memory():
    pool = MemPool()
    with use_mem_pool(pool):
        tensor = torch.arange(24.0).view(2, 3, 4)
    weak = weak_ref_tensor(tensor[:, 1:].transpose(0, 2))
    assert torch.equal(weak, tensor[:, 1:].transpose(0, 2))
    tensor.add_(1)
    assert torch.equal(weak, tensor[:, 1:].transpose(0, 2)), "the same memory"
    del tensor
    assert allocated(pool.id) == 0
    host = torch.ones(3)
    assert weak_ref_tensor(host) is host


def test_segments_of_a_capture_break_none():
    """Allocation is relaxed while it captures, as PyTorch's is."""
    x = torch.ones(10)

    def body() -> torch.Tensor:
        with torch_device.device_memory():
            return x + torch.ones(1)

    captured, result = capture(body)
    assert hipsim.stats().calls["hipMalloc"] >= 2
    captured.replay()
    assert (result == 2).all()


# --- what breaks a capture ------------------------------------------------------------


BREAKS = {
    "a blocking fill": lambda x: hipsim.load().hipMemset(x.data_ptr(), 0, 4),
    "a blocking copy": lambda x: hipsim.load().hipMemcpy(
        x.data_ptr(), x.data_ptr(), 4, hipsim.DEFAULT_KIND
    ),
    "a wait for the device": lambda x: hipsim.load().hipDeviceSynchronize(),
    "a wait for the stream": lambda x: torch_device.current_stream().synchronize(),
    "an allocation": lambda x: hipsim.load().hipMalloc(
        ctypes.byref(ctypes.c_void_p()), 4096
    ),
    "a value that is read": lambda x: (x + 1).sum().item(),
    "a decision": lambda x: bool((x + 1).any()),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_capture_raises_and_leaves_nothing(what):
    x = torch.ones(4)
    captured = CUDAGraph()
    with pytest.raises(hipsim.HipError) as caught, graph(captured):
        y = x + 1
        BREAKS[what](y)
    assert caught.value.name == "hipErrorStreamCaptureInvalidated"
    assert hipsim.load().hipPeekAtLastError() == hipsim.SUCCESS
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        captured.replay()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        captured.pool()
    again, result = capture(lambda: x + 2)
    x.fill_(3)
    again.replay()
    assert result.tolist() == [5.0] * 4


def test_a_relaxed_capture_allows_allocations():
    x, pointer = torch.ones(4), ctypes.c_void_p()
    captured = CUDAGraph()
    with graph(captured, capture_error_mode="relaxed"):
        y = x + 1
        assert hipsim.load().hipMalloc(ctypes.byref(pointer), 4096) == hipsim.SUCCESS
    assert hipsim.load().hipFree(pointer) == hipsim.SUCCESS
    captured.replay()
    assert (y == 2).all()


@pytest.mark.parametrize("mode, breaks", [("global", True), ("thread_local", False)])
def test_another_threads_allocation_breaks_global_captures(mode, breaks):
    x, problems = torch.ones(4), []

    def allocate() -> None:
        pointer = ctypes.c_void_p()
        if hipsim.load().hipMalloc(ctypes.byref(pointer), 4096) == hipsim.SUCCESS:
            hipsim.load().hipFree(pointer)

    try:
        with graph(CUDAGraph(), capture_error_mode=mode):
            thread = threading.Thread(target=allocate)
            thread.start()
            thread.join(DEADLINE)
            x + 1
    except hipsim.HipError as error:
        problems.append(error.name)
    assert problems == (["hipErrorStreamCaptureInvalidated"] if breaks else [])


def test_a_graph_that_goes_breaks_a_capture():
    """PyTorch's destructor waits for the device on ROCm; `reset` does not."""
    graphs = [capture(lambda: torch.ones(4))[0] for _ in range(2)]
    with graph(CUDAGraph()):
        graphs.pop().reset()
        torch.ones(4)
    with (
        pytest.raises(RuntimeError, match="hipErrorStreamCaptureInvalidated"),
        graph(CUDAGraph()),
    ):
        graphs.clear()


def test_entering_a_stream_breaks_no_capture():
    x = torch.ones(4)

    def body() -> torch.Tensor:
        with stream(Stream()):
            return x + 1

    captured, result = capture(body)
    captured.replay()
    assert (result == 2).all()


def test_streams_that_join_the_capture_may_be_entered():
    x, side = torch.ones(4), Stream()

    def body() -> torch.Tensor:
        main = torch_device.current_stream()
        side.wait_stream(main)
        with stream(side):
            assert is_current_stream_capturing()
            y = x + 1
        main.wait_stream(side)
        return y

    captured, result = capture(body)
    captured.replay()
    assert (result == 2).all()

    with torch_device.device_memory():
        filled = torch.ones(4)
    with (
        pytest.raises(RuntimeError, match="hipErrorStreamCaptureUnjoined"),
        graph(CUDAGraph()),
    ):
        side.wait_stream(torch_device.current_stream())
        hipsim.load().hipMemsetAsync(filled.data_ptr(), 0, 16, side.cuda_stream)


# --- where a capture may begin and end ------------------------------------------------


def test_a_capture_needs_a_stream_of_its_own():
    with pytest.raises(RuntimeError, match="non-default stream"):
        CUDAGraph().capture_begin()


def test_the_error_mode_has_three_names():
    with (
        pytest.raises(RuntimeError, match=r"'strict'; .* global or thread_local"),
        graph(CUDAGraph(), capture_error_mode="strict"),
    ):
        pass


def test_a_graph_is_captured_once():
    captured, _ = capture(lambda: torch.ones(4))
    with pytest.raises(RuntimeError, match="owns a capture already"), graph(captured):
        pass
    captured.replay()


def test_a_thread_captures_one_graph_at_a_time():
    with stream(Stream()):
        outer, inner = CUDAGraph(), CUDAGraph()
        outer.capture_begin()
        y = torch.ones(4) + 1
        with stream(Stream()), pytest.raises(RuntimeError, match="another graph"):
            inner.capture_begin()
        y += 1
        outer.capture_end()
    assert operations(outer)[-1] == "aten.add_.Tensor"


def test_a_pool_takes_one_capture_at_a_time():
    pool = MemPool()
    with (
        use_mem_pool(pool),
        stream(Stream()),
        pytest.raises(RuntimeError, match="being allocated to already"),
    ):
        CUDAGraph().capture_begin(pool=pool.id)
    assert pool.use_count() == 1


def test_a_capture_ends_where_it_began():
    captured, on = CUDAGraph(), Stream()
    with pytest.raises(RuntimeError, match="before capture_begin"):
        captured.capture_end()
    with stream(on):
        captured.capture_begin()
        y = torch.ones(4) + 1
    with pytest.raises(RuntimeError, match="the stream that it began on"):
        captured.capture_end()
    problems: list[str] = []

    def end() -> None:
        with stream(on):
            try:
                captured.capture_end()
            except RuntimeError as error:
                problems.append(str(error))

    thread = threading.Thread(target=end)
    thread.start()
    thread.join(DEADLINE)
    assert problems == ["a capture ends in the thread that began it"]
    with stream(on):
        captured.capture_end()
    captured.replay()
    assert (y == 2).all()


def test_a_body_that_raises_ends_the_capture():
    captured = CUDAGraph()
    with pytest.raises(KeyError), graph(captured):
        raise KeyError
    assert not is_current_stream_capturing()
    captured.replay()  # of nothing


@pytest.mark.parametrize("call", ["hipStreamBeginCapture", "hipGraphInstantiate"])
def test_a_call_that_fails_leaves_nothing(call):
    x, pool = torch.ones(4), MemPool()
    hipsim.fail(call, 1, 2)
    with pytest.raises(RuntimeError, match=f"{call}.*hipErrorOutOfMemory"):
        capture(lambda: x + 1, pool.id)
    assert pool.use_count() == 1 and hipsim.load().hipPeekAtLastError() == 0
    captured, result = capture(lambda: x + 1, pool.id)
    captured.replay()
    assert (result == 2).all()


def test_it_is_known_whether_the_stream_captures():
    assert not is_current_stream_capturing()
    with stream(Stream()):
        assert not is_current_stream_capturing()
        captured = CUDAGraph()
        captured.capture_begin()
        assert is_current_stream_capturing()
        with stream(Stream()):
            assert not is_current_stream_capturing()
        captured.capture_end()
        assert not is_current_stream_capturing()


def test_a_reset_graph_is_none():
    captured, _ = capture(lambda: torch.ones(4))
    captured.reset()
    captured.reset()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        captured.replay()
    with graph(captured):
        y = torch.zeros(4) + 1
    captured.replay()
    assert (y == 1).all()
    captured.reset()
    del captured
    assert hipsim.stats().calls["hipGraphExecDestroy"] == 2, "once a capture"


@pytest.mark.parametrize("profile", hipsim.PROFILES)
def test_every_release_captures_and_replays(profile):
    hipsim.reset(profile)
    try:
        x = torch.ones(4)
        captured, result = capture(lambda: x * 2)
        x.fill_(3)
        captured.replay()
        assert result.tolist() == [6.0] * 4
    finally:
        hipsim.reset(hipsim.PROFILES[-1])
