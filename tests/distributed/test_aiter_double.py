# SPDX-License-Identifier: Apache-2.0
"""The doubles of AITER's all-reduce: between two processes, and as classes.

Functions whose first parameter is a Rank run in both processes.
"""

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from vllm_rocm_memory import serve
from vllm_rocm_memory.sim import hipsim
from vllm_rocm_memory.sim.torch_memory_pool import device_memory

from . import peer_memory
from .aiter_double import Method, Surface, install, make_class, surface_of, surfaces
from .fused_kernels import FP8
from .ranks import Rank, RankFailed, Ranks, simulated_device

HERE = __name__
on_device = simulated_device("7.16", stale_memory="poisoned")
MAX_SIZE = 1 << 20
PAGE = 4096
WIDTH = 64
REFUSED = "hipIpcGetMemHandle failed: hipErrorInvalidValue (1)"

# One method for each kernel, and the shapes that a flag has.
SMALL = Surface(
    releases=("0.1.0",),
    constructor=f"(group, device, max_size={MAX_SIZE})",
    input_buffer="_pool",
    methods={
        method.name: method
        for method in (
            Method(
                "all_reduce",
                "(inp, *, out=None, registered_input=False)",
                kernel="all_reduce",
                flag="registered_input",
            ),
            Method(
                "reduce_scatter",
                "(inp, out, dim=0, *, registered=False)",
                kernel="reduce_scatter",
                flag="registered",
            ),
            Method(
                "all_gather_reg",
                "(inp, out=None, dim=0)",
                kernel="all_gather",
                registered=True,
            ),
            Method(
                "all_gather_unreg",
                "(inp, out=None, dim=0)",
                kernel="all_gather",
                registered=False,
            ),
            Method(
                "fused_rms",
                "(inp, res_inp, *, w, eps, out_hidden_dim=0, gemma_norm=False, "
                "post_per_token_quant=False, emit_bf16=False, registered=False)",
                kernel="fused_rms",
                flag="registered",
            ),
            Method(
                "group_quant",
                "(inp, res_inp, *, w, eps, group_size=128, registered=False)",
                kernel="fused_rms_group_quant",
                flag="registered",
            ),
            Method(
                "mxfp4",
                "(inp, res_inp, *, w, eps, emit_bf16=False, registered=False)",
                kernel="fused_rms_mxfp4",
                flag="registered",
            ),
            Method(
                "qknorm",
                "(qkv_in, q_w, k_w, eps, registered=False)",
                kernel="qknorm",
                flag="registered",
            ),
            Method(
                "qknorm_rope",
                "(qkv_in, q_w, k_w, cos_sin_cache, position_ids, head_dim, rotary_dim, "
                "eps, registered=False)",
                kernel="qknorm_rope",
                flag="registered",
            ),
            Method(
                "custom_all_reduce",
                "(input)",
                calls=("all_reduce",),
                arguments={"inp": "input"},
                capturing="true",
                warm_up="zeros",
            ),
            Method(
                "custom_all_gather",
                "(inp, dim=0)",
                calls=("all_gather_reg", "all_gather_unreg"),
                arguments={"inp": "inp", "dim": "dim"},
                capturing="false",
                warm_up="real",
            ),
            Method("register_input_buffer", "(inp)"),
            Method("register_graph_buffers", "()"),
            Method("capture", "()"),
            Method("close", "()"),
        )
    },
    class_attributes={},
    registers_output=False,
    made_up=True,
)


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    if not serve.is_cpu_build():
        pytest.skip("a process with a GPU's own driver does not use the simulator's")
    with Ranks(2) as ranks:
        yield ranks


@contextlib.contextmanager
def opened(rank: Rank, surface: Surface = SMALL) -> Iterator[Any]:
    """An instance on this rank."""
    instance = make_class(surface)(rank.group, "cpu", max_size=MAX_SIZE)
    try:
        yield instance
    finally:
        instance.close()


def values(rank: int, rows: int = 4, width: int = WIDTH) -> torch.Tensor:
    """Of one rank, the same wherever they are asked for."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(rows, width, generator=generator)


def copied(data: torch.Tensor) -> torch.Tensor:
    with device_memory():
        return data.clone()


@contextlib.contextmanager
def virtual_memory(data: torch.Tensor) -> Iterator[torch.Tensor]:
    """A copy in memory that hipMemCreate made, as sleep mode's is."""
    library = hipsim.load()
    location = hipsim.MemLocation(hipsim.LOCATION_DEVICE, 0)
    properties = hipsim.MemAllocationProp(hipsim.ALLOCATION_PINNED, 0, location)
    access = hipsim.MemAccessDesc(location, hipsim.ACCESS_READ_WRITE)
    size = -(-data.nbytes // PAGE) * PAGE
    address, handle = ctypes.c_void_p(), ctypes.c_void_p()
    for name, *arguments in (
        ("hipMemAddressReserve", ctypes.byref(address), size, 0, None, 0),
        ("hipMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), 0),
    ):
        hipsim.check(getattr(library, name)(*arguments), name)
    for name, *arguments in (
        ("hipMemMap", address, size, 0, handle, 0),
        ("hipMemSetAccess", address, size, ctypes.byref(access), 1),
    ):
        hipsim.check(getattr(library, name)(*arguments), name)
    assert address.value is not None
    copy = peer_memory.bytes_at(address.value, data.nbytes)
    copy = copy.view(data.dtype).view(data.shape)
    yield copy.copy_(data)
    hipsim.check(library.hipMemUnmap(address, size), "hipMemUnmap")
    hipsim.check(library.hipMemRelease(handle), "hipMemRelease")
    hipsim.check(library.hipMemAddressFree(address, size), "hipMemAddressFree")


def error_of(function: Any, *arguments: Any, **named: Any) -> str:
    try:
        function(*arguments, **named)
    except RuntimeError as error:
        return str(error)
    return "no error"


# --- kernels --------------------------------------------------------------------------


@on_device
def reduce_gather_and_scatter(rank: Rank) -> dict[str, torch.Tensor]:
    mine = values(rank.rank)
    with opened(rank) as ca:
        part = torch.empty(4, WIDTH // 2)
        ca.reduce_scatter(mine, part, dim=1)
        return {
            "sum": ca.custom_all_reduce(mine),
            "whole numbers": ca.all_reduce(torch.full((8,), 1 << 40) + rank.rank),
            "part": part,
            "rows": ca.custom_all_gather(mine),
            "columns": ca.custom_all_gather(mine, dim=-1),
        }


def test_ranks_reduce_gather_and_scatter(pair):
    both = values(0), values(1)
    for rank, result in enumerate(pair.run(f"{HERE}:reduce_gather_and_scatter")):
        assert torch.equal(result["sum"], both[0] + both[1])
        assert (result["whole numbers"] == (2 << 40) + 1).all()
        assert torch.equal(result["part"], (both[0] + both[1]).chunk(2, 1)[rank])
        assert torch.equal(result["rows"], torch.cat(both))
        assert torch.equal(result["columns"], torch.cat(both, 1))


EPS = 1e-5


@on_device
def norm_after_the_sum(rank: Rank) -> dict[str, Any]:
    mine, residual = values(rank.rank), values(2)
    weight = values(3, rows=1)[0]
    with opened(rank) as ca:

        def norm(**options: Any) -> Any:
            return ca.fused_rms(mine, residual, w=weight, eps=EPS, **options)

        return {
            "plain": norm(),
            "gemma": norm(gemma_norm=True),
            "padded": norm(out_hidden_dim=2 * WIDTH),
            "per token": norm(post_per_token_quant=True, emit_bf16=True),
            "per group": ca.group_quant(
                mine, residual, w=weight, eps=EPS, group_size=16
            ),
            "mxfp4": ca.mxfp4(mine, residual, w=weight, eps=EPS, emit_bf16=True),
        }


def test_a_norm_follows_the_sum(pair):
    total, weight = values(0) + values(1) + values(2), values(3, rows=1)[0]
    normed = torch.nn.functional.rms_norm(total, (WIDTH,), weight, EPS)
    for result in pair.run(f"{HERE}:norm_after_the_sum"):
        out, residual = result["plain"]
        torch.testing.assert_close(residual, total)
        torch.testing.assert_close(out, normed)
        gemma = torch.nn.functional.rms_norm(total, (WIDTH,), weight + 1, EPS)
        torch.testing.assert_close(result["gemma"][0], gemma)
        padded, _ = result["padded"]
        torch.testing.assert_close(padded[:, :WIDTH], normed)
        assert padded.shape[1] == 2 * WIDTH and not padded[:, WIDTH:].any()
        for name, group in (("per token", WIDTH), ("per group", 16)):
            quantised, residual, scale, *_ = result[name]
            assert quantised.dtype == FP8 and scale.shape == (4, WIDTH // group)
            back = quantised.float() * scale.repeat_interleave(group, 1)
            torch.testing.assert_close(back, normed, rtol=0.07, atol=0.01)
            torch.testing.assert_close(residual, total)
        torch.testing.assert_close(result["per token"][3], normed)
        assert len(result["per group"]) == 3
        packed, _, exponent, mirror = result["mxfp4"]
        torch.testing.assert_close(
            unpack(packed, exponent), normed, rtol=0.26, atol=0.3
        )
        torch.testing.assert_close(mirror, normed)


def unpack(packed: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    signed = magnitudes[codes % 8] * torch.where(codes < 8, 1, -1)
    return signed * torch.exp2(exponent.float() - 127).repeat_interleave(32, 1)


@on_device
def norm_queries_and_keys(rank: Rank) -> dict[str, Any]:
    qkv = values(rank.rank, width=48)
    weights = torch.ones(16), torch.full((16,), 2.0)
    angles = torch.arange(8.0)[:, None] * torch.tensor([1.0, 0.1])
    cache = torch.cat((angles.cos(), angles.sin()), 1)
    places = torch.tensor([0, 1, 2, 7])
    with opened(rank) as ca:
        return {
            "normed": ca.qknorm(qkv, *weights, EPS),
            "turned": ca.qknorm_rope(qkv, *weights, cache, places, 8, 4, EPS),
        }


def test_queries_and_keys_have_the_norm_of_all_ranks(pair):
    all_qkv = [values(rank, width=48) for rank in range(2)]
    queries = torch.cat([qkv[:, :16] for qkv in all_qkv], 1)
    keys = torch.cat([qkv[:, 16:32] for qkv in all_qkv], 1)
    normed = [
        torch.nn.functional.rms_norm(each, (32,), None, EPS) for each in (queries, keys)
    ]
    for rank, result in enumerate(pair.run(f"{HERE}:norm_queries_and_keys")):
        query, key, value = result["normed"]
        torch.testing.assert_close(query, normed[0].chunk(2, 1)[rank])
        torch.testing.assert_close(key, 2 * normed[1].chunk(2, 1)[rank])
        assert torch.equal(value, all_qkv[rank][:, 32:])
        turned = result["turned"][0]
        torch.testing.assert_close(turned[0], query[0], msg="position 0 turns nothing")
        first, third = query[1, 0], query[1, 2]
        angle = torch.tensor(1.0)
        torch.testing.assert_close(
            turned[1, 0], first * angle.cos() - third * angle.sin()
        )
        torch.testing.assert_close(
            turned[1, 2], third * angle.cos() + first * angle.sin()
        )
        assert torch.equal(turned[:, 4:8], query[:, 4:8]), (
            "beyond the rotary dimensions"
        )
        assert torch.equal(result["turned"][2], value)


# --- what is registered, and what is not ----------------------------------------------


@on_device
def reduce_registered_memory(rank: Rank) -> dict[str, Any]:
    with opened(rank) as ca:
        data = copied(values(rank.rank))
        unknown = error_of(ca.all_reduce, data, registered_input=True)
        ca.register_input_buffer(data)
        data.add_(1)
        rank.barrier()
        total = ca.all_reduce(data, registered_input=True)
        buffer = ca._pool["input"]
        return {
            "unknown": unknown,
            "inside": error_of(ca.all_reduce, data[1:], registered_input=True),
            "total": total,
            "buffer": bytes(buffer.tensor[:16].tolist()),
            "large": error_of(ca.all_reduce, torch.zeros(MAX_SIZE)),
            "host": error_of(ca.register_input_buffer, torch.zeros(4)),
            "launches": ca.launches,
            "exports": (len(ca.memory.exported), hipsim.stats().ipc_exports),
        }


def test_a_registered_input_is_read_where_it_is(pair):
    for result in pair.run(f"{HERE}:reduce_registered_memory"):
        assert "is not registered" in result["unknown"]
        assert "is not registered" in result["inside"], "known by its exact address"
        assert torch.equal(result["total"], (values(0) + 1) + (values(1) + 1))
        assert result["buffer"] == b"\xff" * 16, "nothing was copied"
        assert f"too small for an input of {4 * MAX_SIZE}" in result["large"]
        assert "hipMemGetAddressRange failed" in result["host"]
        assert [registered for _, registered in result["launches"]] == [True] * 3 + [
            False
        ]
        assert result["exports"] == (3, 3), "signals, input buffer, and what was asked"


@on_device
def reduce_the_input_buffer(rank: Rank) -> torch.Tensor:
    with opened(rank) as first:
        pass
    with opened(rank) as second:
        del first
        data = values(rank.rank)
        buffer = second._pool["input"].tensor[: data.nbytes].view(data.dtype)
        inside = buffer.view(data.shape).copy_(data)
        rank.barrier()
        return second.all_reduce(inside)


def test_what_is_in_the_input_buffer_is_not_copied_there(pair):
    """Nor does an instance that is deleted late take another one's memory with it."""
    for total in pair.run(f"{HERE}:reduce_the_input_buffer"):
        assert torch.equal(total, values(0) + values(1))


def export_virtual_memory(rank: Rank, profile: str, who: tuple[int, ...]) -> Any:
    @simulated_device(profile)
    def export() -> tuple[str, int, int]:
        data = values(rank.rank)
        with opened(rank) as ca, virtual_memory(data) as virtual:
            given = virtual if rank.rank in who else copied(data)
            error = error_of(ca.register_input_buffer, given)
            now = hipsim.stats()
            return error, now.ipc_virtual_exports, now.ipc_failed_imports

    return export()


def test_virtual_memory_is_not_exported(pair):
    for result in pair.run(f"{HERE}:export_virtual_memory", "7.16", (0, 1)):
        error, exports, _ = result
        assert REFUSED in error and exports == 1


def test_all_ranks_hear_of_an_export_that_fails(pair):
    first, second = pair.run(f"{HERE}:export_virtual_memory", "7.16", (0,))
    assert first[0].startswith("hipIpcGetMemHandle failed")
    assert second[0].startswith(
        "rank 0 could not export its memory: hipIpcGetMemHandle"
    )


def test_an_older_runtime_exports_what_nobody_can_open(pair):
    first, second = pair.run(f"{HERE}:export_virtual_memory", "7.2.3", (0,))
    error, exports, failed = first
    assert "rank 1 could not open what the others exported" in error
    assert (exports, failed) == (1, 0)
    error, exports, failed = second
    assert error.startswith("hipIpcOpenMemHandle failed: ")
    assert (exports, failed) == (0, 1)


# --- captures -------------------------------------------------------------------------


@on_device
def replay_a_capture(rank: Rank) -> dict[str, Any]:
    with opened(rank) as ca:
        data = copied(values(rank.rank))
        warm, graph = None, torch.cuda.CUDAGraph()
        with ca.capture():
            warm = ca.custom_all_reduce(data)
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                doubled = data * 2
                total = ca.custom_all_reduce(doubled)
                both = ca.custom_all_gather(total)
                whole = both + 1
            before = total.clone()
            early = error_of(graph.replay)
        results = []
        for step in range(5):
            data.copy_(values(rank.rank) * step)
            graph.replay()
            results.append((total.clone(), whole.clone()))
        outcome = {
            "warm-up": warm,
            "while captured": before,
            "before the exchange": early,
            "results": results,
            "launches": ca.launches,
            "exported": ca.memory.exported[2:] == [doubled.data_ptr()],
        }
        ca.close()
        outcome["closed"] = error_of(graph.replay)
        graph.reset()
        return outcome


def test_a_replay_reads_what_the_other_rank_has_then(pair):
    for result in pair.run(f"{HERE}:replay_a_capture"):
        assert not result["warm-up"].any()
        right = 2 * values(0) + 2 * values(1)
        assert not torch.allclose(result["while captured"], right), "kernels do not run"
        assert "captured and never exchanged" in result["before the exchange"]
        for step, (total, whole) in enumerate(result["results"]):
            expected = 2 * step * values(0) + 2 * step * values(1)
            torch.testing.assert_close(total, expected)
            assert torch.equal(whole, torch.cat((total, total)) + 1)
        assert result["launches"] == [("all_reduce", True), ("all_gather_unreg", False)]
        assert result["exported"], (
            "the input that was captured as registered, and no more"
        )
        assert "was closed" in result["closed"]


@on_device
def capture_virtual_memory(rank: Rank, release: str) -> tuple[str, str, int]:
    surface = surface_of(release)
    with opened(rank, surface) as ca, virtual_memory(values(rank.rank)) as data:
        graph = torch.cuda.CUDAGraph()
        in_capture = ""

        def capture() -> None:
            nonlocal in_capture
            with ca.capture(), torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                in_capture = error_of(ca.custom_all_reduce, data)

        error = error_of(capture)
        graph.reset()
        return in_capture, error, hipsim.stats().ipc_virtual_exports


def test_a_capture_of_virtual_memory_fails_as_it_ends(pair):
    results = pair.run(f"{HERE}:capture_virtual_memory", "0.1.20")
    for in_capture, error, exports in results:
        assert in_capture == "no error" and REFUSED in error and exports == 1


def test_later_releases_fail_at_the_call(pair):
    results = pair.run(f"{HERE}:capture_virtual_memory", "0.1.26")
    for in_capture, error, exports in results:
        assert REFUSED in in_capture and error == "no error" and exports == 1


@on_device
def capture_outputs(rank: Rank) -> dict[str, bool]:
    with opened(rank, replace(SMALL, registers_output=True)) as ca:
        graph = torch.cuda.CUDAGraph()
        data = copied(values(rank.rank))
        with ca.capture(), torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            total = ca.custom_all_reduce(data)
            other = ca.all_reduce(data)
        exported = ca.memory.exported
        outcome = {
            "registered": exported[2:] == [data.data_ptr(), total.data_ptr()],
            "copied": other.data_ptr() in exported,
        }
        graph.reset()
        return outcome


def test_releases_that_register_outputs_do_so_with_the_inputs(pair):
    for outcome in pair.run(f"{HERE}:capture_outputs"):
        assert outcome == {"registered": True, "copied": False}


# --- ranks that do not agree ----------------------------------------------------------


@on_device
def disagree(rank: Rank) -> tuple[str, str]:
    with opened(rank) as ca:
        sizes = torch.zeros(8 * (rank.rank + 1))
        mismatch, alone = error_of(ca.all_reduce, sizes), ""
        if rank.rank == 0:
            with mock.patch.object(peer_memory, "BARRIER_TIMEOUT", 0.1):
                alone = error_of(ca.all_reduce, sizes)
        rank.barrier()
        return mismatch, alone


def test_kernels_that_do_not_meet_say_so(pair):
    (mismatch, alone), (other, _) = pair.run(f"{HERE}:disagree")
    assert "rank 1 launched another kernel than rank 0" in mismatch
    assert "rank 0 launched another kernel than rank 1" in other
    assert "rank 1 did not come to all_reduce" in alone


# --- classes and the package ----------------------------------------------------------


@pytest.mark.parametrize("surface", surfaces(), ids=str)
def test_a_class_looks_as_the_table_says(surface):
    made = make_class(surface)

    def names(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    for name, method in surface.methods.items():
        told = inspect.signature(getattr(made, name))
        without_self = told.replace(parameters=list(told.parameters.values())[1:])
        assert str(without_self) == _written(method.signature), name
    assert names(made)[:3] == ["group", "device", "max_size"]
    for name, value in surface.class_attributes.items():
        assert getattr(made, name) == value


def _written(signature: str) -> str:
    """As Python shows it."""
    scope: dict[str, Any] = {}
    exec(f"from __future__ import annotations\ndef f{signature}: pass", scope)
    return str(inspect.signature(scope["f"]))


def test_a_method_that_the_double_does_not_know_is_refused():
    method = Method("reticulate", "(inp)")
    with pytest.raises(ValueError, match="does not know what reticulate"):
        make_class(replace(SMALL, methods={"reticulate": method}))


def test_the_package_is_there_for_a_while(monkeypatch):
    another = ModuleType("aiter")
    monkeypatch.setitem(sys.modules, "aiter", another)
    before, installed = list(sys.path), version_or_none()
    with install(SMALL) as made:
        module = importlib.import_module(
            "aiter.dist.device_communicators.custom_all_reduce"
        )
        assert module.CustomAllreduce is made
        assert importlib.util.find_spec("aiter") is not None
        assert sys.modules["aiter"] is not another
        assert importlib.metadata.version("amd-aiter") == SMALL.version
    assert sys.modules["aiter"] is another and sys.path == before
    assert "aiter.dist" not in sys.modules
    assert version_or_none() == installed


def version_or_none() -> str | None:
    try:
        return importlib.metadata.version("amd-aiter")
    except importlib.metadata.PackageNotFoundError:
        return None


# --- the processes --------------------------------------------------------------------


def go_wrong(rank: Rank, how: tuple[str, str]) -> int:
    match how[rank.rank]:
        case "raise":
            raise ValueError("of this rank alone")
        case "hang":
            time.sleep(60)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def test_a_failure_names_its_rank_and_the_next_run_has_others():
    with Ranks(2) as ranks:
        ranks.run(f"{HERE}:go_wrong", ("", ""))  # imports this module
        with pytest.raises(RankFailed) as caught:
            ranks.run(f"{HERE}:go_wrong", ("raise", "hang"), timeout=3)
        assert "ValueError: of this rank alone" in caught.value.failures[0]
        assert "did not return" in caught.value.failures[1]
        assert "in go_wrong" in caught.value.failures[1], "where it is"
        processes = ranks.run(f"{HERE}:go_wrong", ("", ""))
        with pytest.raises(RankFailed) as caught:
            ranks.run(f"{HERE}:go_wrong", ("", "die"))
        assert list(caught.value.failures) == [1]
        assert "SIGKILL" in caught.value.failures[1]
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
