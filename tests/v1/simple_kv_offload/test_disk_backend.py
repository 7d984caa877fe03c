# SPDX-License-Identifier: Apache-2.0
"""Copies to a file and back: the simulator's streams, and the kernel's own files."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.simple_kv_offload import copy_thread, disk_backend
from vllm.v1.simple_kv_offload.copy_errors import BatchCopyError
from vllm.v1.simple_kv_offload.copy_thread import CopyTicket
from vllm.v1.simple_kv_offload.cuda_mem_ops import (
    CU_MEMCPY_SRC_ACCESS_ORDER_ANY,
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
)
from vllm.v1.simple_kv_offload.disk_backend import DiskBackend, DiskError

from vllm_rocm_memory.sim import hipsim, torch_device

from .tickets import PATIENCE, let_go, logged, logged_error, until

BLOCKS, SLOTS = 12, 16
# Two regions whose pages O_DIRECT would not take one by one, and one whose pages are
# apart: 4096 bytes of pages, 8192 of the block.
PAGES = {"a": (1536, 1536), "b": (2000, 2000), "c": (560, 4656)}
BLOCK_BYTES = 8192
CPU = torch.device("cpu")
ILLEGAL_ADDRESS = 700


@pytest.fixture
def profile() -> str:
    """One release: what differs between them is below the backend."""
    return "7.16"


def takes_direct_io(folder: Path) -> bool:
    path = folder / "probe"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError as error:
        assert error.errno == errno.EINVAL
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


class Offload:
    """A backend between regions of the device and a file.

    Args:
        pages: Bytes of a page, and from one page to the next, by region name.
    """

    def __init__(
        self,
        device,
        path: Path,
        pages: dict[str, tuple[int, int]] = PAGES,
        blocks: int = BLOCKS,
        engine: str | None = None,
    ) -> None:
        self.path = path
        self.whole = {
            name: device.device_tensor(blocks * stride).view(blocks, stride)
            for name, (_, stride) in pages.items()
        }
        self.gpu = {
            name: self.whole[name][:, :page] for name, (page, _) in pages.items()
        }
        self.load_stream, self.store_stream = (torch_device.Stream() for _ in "ab")
        extra = {} if engine is None else {"copy_engine": engine}
        transfer = SimpleNamespace(kv_connector_extra_config=extra)
        self.backend = DiskBackend(SimpleNamespace(kv_transfer_config=transfer))
        self.tickets: list[tuple[int, CopyTicket]] = []

    def start(
        self,
        slots: int = SLOTS,
        block_bytes: int = BLOCK_BYTES,
        buffers: int = 2,
        use_page_cache: bool = True,
    ) -> Offload:
        if not use_page_cache and not takes_direct_io(self.path.parent):
            pytest.skip(f"no O_DIRECT in {self.path.parent}: open gives EINVAL")
        self.backend.init(
            self.gpu,
            CPU,
            self.load_stream,
            self.store_stream,
            str(self.path),
            slots,
            block_bytes,
            buffers,
            use_page_cache,
        )
        return self

    def close(self) -> None:
        until(self.backend.shutdown)
        for _, ticket in self.tickets:
            let_go(ticket)
        vars(self).clear()  # streams and events go with the last reference

    def store(self, src: list[int], dst: list[int], wait_event=None) -> CopyTicket:
        return self._launch(src, dst, True, wait_event)

    def load(self, src: list[int], dst: list[int], wait_event=None) -> CopyTicket:
        return self._launch(src, dst, False, wait_event)

    def _launch(self, src, dst, is_store, wait_event) -> CopyTicket:
        index = len(self.tickets)
        self.backend.launch_copy(src, dst, is_store, index, self.tickets, wait_event)
        assert self.tickets[-1][0] == index, "the ticket must be there at once"
        return self.tickets[-1][1]

    def fill(self, seed: int = 0) -> None:
        """Other bytes in each block, page and call."""
        generator = torch.Generator().manual_seed(seed)
        for region in self.gpu.values():
            region.copy_(torch.randint(256, region.shape, generator=generator))

    def block(self, number: int) -> bytes:
        return b"".join(bytes(region[number].numpy()) for region in self.gpu.values())

    def blocks(self) -> list[bytes]:
        return [self.block(i) for i in range(len(next(iter(self.gpu.values()))))]

    def slot(self, number: int, block_bytes: int = BLOCK_BYTES) -> bytes:
        """What the file holds, without what fills up the slot."""
        size = sum(region.shape[1] for region in self.gpu.values())
        with self.path.open("rb") as file:
            file.seek(number * block_bytes)
            return file.read(size)

    def round_trip(self, seed: int) -> None:
        """All blocks to the file and back, each to another place."""
        self.fill(seed)
        before = self.blocks()
        count = len(before)
        self.store(list(range(count)), list(range(count))).synchronize()
        for region in self.gpu.values():
            region.zero_()
        self.load(list(range(count)), list(range(count))[::-1]).synchronize()
        assert self.blocks() == before[::-1]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv.rank_0"


@pytest.fixture
def idle(device, path) -> Iterator[Offload]:
    """A backend before its ``init``."""
    offload = Offload(device, path)
    offload.fill()
    yield offload
    offload.close()


@pytest.fixture
def offload(idle) -> Offload:
    return idle.start()


class Kernel:
    """``os.pwritev`` and ``os.preadv``, which fail and fall short when told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self._planned: dict[str, tuple[int, int, int]] = {}
        self._real = {"pwritev": os.pwritev, "preadv": os.preadv}

    def fail(self, call: str, nth: int, number: int) -> None:
        """Let the nth call from now on fail with this error."""
        self._planned[call] = (nth, number, 0)

    def cut(self, call: str, nth: int, most: int) -> None:
        """Let the nth call from now on move that many bytes at most."""
        self._planned[call] = (nth, 0, most)

    def call(self, name: str, fd: int, buffers: list[memoryview], start: int) -> int:
        (buffer,) = buffers
        self.calls.append((name, start, len(buffer)))
        nth, number, most = self._planned.pop(name, (0, 0, 0))
        if nth > 1:
            self._planned[name] = (nth - 1, number, most)
        elif nth == 1 and number:
            raise OSError(number, os.strerror(number))
        elif nth == 1:
            return self._real[name](fd, [buffer[:most]], start) if most else 0
        return self._real[name](fd, buffers, start)


@pytest.fixture
def kernel(monkeypatch) -> Kernel:
    kernel = Kernel()
    for name in ("pwritev", "preadv"):
        monkeypatch.setattr(
            os, name, lambda *arguments, name=name: kernel.call(name, *arguments)
        )
    return kernel


class Gate:
    """Stops a call of the kernel until ``release`` is set."""

    def __init__(self, monkeypatch, call: str) -> None:
        self.entered, self.release = threading.Event(), threading.Event()
        real = getattr(os, call)

        def held(*arguments: object) -> int:
            self.entered.set()
            assert self.release.wait(PATIENCE)
            return real(*arguments)

        monkeypatch.setattr(os, call, held)


@pytest.fixture
def gate(request, monkeypatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch, getattr(request, "param", "pwritev"))
    yield gate
    gate.release.set()


def descriptors(path: Path) -> list[int]:
    """This process's descriptors of the file, also of one whose name is gone."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(link.readlink()).removesuffix(" (deleted)") == str(path):
                found.append(int(link.name))
    return found


def assert_nothing_is_left(path: Path) -> None:
    assert descriptors(path) == []
    assert not path.exists()
    assert hipsim.stats().registered_ranges == 0
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("kv-disk")]


def everything(count: int = BLOCKS) -> list[int]:
    return list(range(count))


# ----- copies that work


@pytest.mark.parametrize("use_page_cache", [True, False])
@pytest.mark.parametrize("buffers", [1, 2, 5])
def test_blocks_go_to_the_file_and_come_back(idle, use_page_cache, buffers):
    offload = idle.start(buffers=buffers, use_page_cache=use_page_cache)
    gaps = offload.whole["c"][:, 560:]
    gaps.fill_(7)
    slots = [5, 15, 0, 9, 3, 12, 7, 1, 14, 10, 2, 8]
    before = offload.blocks()
    stored = offload.store(everything(), slots)
    stored.synchronize()
    assert [offload.slot(i) for i in slots] == before
    assert not any(offload.slot(4))
    for region in offload.gpu.values():
        region.zero_()
    loaded = offload.load(slots[::-1], everything())
    until(loaded.query)
    assert offload.blocks() == before[::-1]
    assert stored.error is loaded.error is None
    assert bool((gaps == 7).all())


def test_more_regions_than_one_call_takes(device, path, kernel):
    """Linux has a limit of 1024 buffers in one call."""
    pages = {f"layer.{i}": (64, 64) for i in range(1100)}
    offload = Offload(device, path, pages, blocks=3).start(block_bytes=73728)
    offload.round_trip(1)
    assert kernel.calls[:3] == [("pwritev", i * 73728, 73728) for i in range(3)]
    offload.close()


def test_stores_read_in_stream_order_and_loads_at_any_time(offload):
    store, load = offload.backend._store_way, offload.backend._load_way
    assert store.params.attrs.srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    assert load.params.attrs.srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_ANY
    assert store.params.stream_handle == offload.store_stream.cuda_stream
    assert load.params.stream_handle == offload.load_stream.cuda_stream


def test_a_destination_that_is_named_twice_gets_the_last_source(offload):
    before = offload.blocks()
    offload.store([3, 4, 5], [1, 1, 0]).synchronize()
    assert offload.slot(1) == before[4]
    offload.load([1, 0, 0, 1], [8, 7, 8, 7]).synchronize()
    assert offload.block(7) == before[4]
    assert offload.block(8) == before[5]


def test_a_copy_of_no_blocks_is_done(offload):
    for ticket in (offload.store([], []), offload.load([], [])):
        ticket.synchronize()


def test_the_backend_names_its_engine_for_the_metrics():
    assert DiskBackend().copy_engine == "disk"


def test_the_start_is_logged_in_one_line(idle, path, vllm_log):
    idle.start(buffers=3)
    (line,) = [line for line in logged(vllm_log, "INFO") if "KV copy engine" in line]
    for part in (
        "disk",
        str(path),
        "16 slots of 8192 bytes",
        "page cache",
        "3 staging",
    ):
        assert part in line
    assert "flags 0x100" in line


# ----- rectangles


class Layers(Offload):
    """Layers in one allocation, as vLLM has them, named from the last to the first."""

    def __init__(self, device, path: Path, engine: str | None = None) -> None:
        super().__init__(device, path, {}, engine=engine)
        memory = device.device_tensor(BLOCKS * BLOCK_BYTES)
        self.gpu, start = {}, 0
        for name in "hgfedcba":
            page = 1536 if name > "d" else 512
            end = start + BLOCKS * page
            self.gpu[name] = memory[start:end].view(-1, page)
            start = end
        self.gpu = {name: self.gpu[name] for name in sorted(self.gpu)}


@pytest.mark.parametrize("engine", [None, "rect", "batch"])
def test_a_block_is_a_rectangle_a_page_size_in_its_slot(device, path, vllm_log, engine):
    offload = Layers(device, path, engine).start()
    offload.round_trip(5)
    stats = hipsim.stats()
    copies = 0 if engine == "batch" else 2 * BLOCKS
    assert stats.calls["hipMemcpy2DAsync"] == stats.pitched_copies == 2 * copies
    assert stats.pitched_bytes == copies * BLOCK_BYTES
    assert bool(stats.calls["hipMemcpyBatchAsync"]) == (engine == "batch")
    # The file has a block's pages in the order of device memory.
    last = 3
    pages = [bytes(offload.gpu[name][BLOCKS - 1 - last].numpy()) for name in "hgfedcba"]
    assert offload.slot(last) == b"".join(pages)
    (line,) = [line for line in logged(vllm_log, "INFO") if "KV copy engine" in line]
    assert line.startswith(f"KV copy engine: disk: {path}, ")
    who = "kv_connector_extra_config.copy_engine" if engine else "default"
    used = "batch" if engine == "batch" else "rect"
    asked = engine or "auto"
    assert f"in each direction and {used} (asked for: {asked}, by {who}): " in line
    assert offload.backend.copy_engine == "disk"
    offload.close()


def test_rectangles_that_were_asked_for_in_vain_are_a_warning(device, path, vllm_log):
    offload = Offload(device, path, engine="rect").start()
    (line,) = [line for line in logged(vllm_log, "WARNING") if "copy engine" in line]
    assert "and batch (asked for: rect, by kv_connector_extra_config" in line
    assert "0 % of a block's bytes lie in rectangles" in line
    offload.round_trip(6)
    assert hipsim.stats().pitched_copies == 0
    offload.close()


def test_a_wrong_engine_is_refused():
    transfer = SimpleNamespace(kv_connector_extra_config={"copy_engine": "blit"})
    with pytest.raises(ValueError, match="copy_engine is 'blit'"):
        DiskBackend(SimpleNamespace(kv_transfer_config=transfer))


@pytest.mark.parametrize("is_store", [True, False])
def test_a_rectangle_that_fails_is_named_with_its_staging_slot(
    device, path, vllm_log, is_store
):
    offload = Layers(device, path).start()
    hipsim.fail("hipMemcpy2DAsync", 4, ILLEGAL_ADDRESS)
    copy = offload.store if is_store else offload.load
    failed = copy(*(([7, 8, 9], [1, 2, 3]) if is_store else ([1, 2, 3], [7, 8, 9])))
    until(failed.query)
    assert isinstance(failed.error, BatchCopyError)
    assert failed.error.site is not None
    names = [region.name for region in failed.error.site.regions]
    assert "".join(name.removesuffix(" (staging)") for name in names) in (
        "hgfe",
        "dcba",
    )
    # The second block of three, and a staging slot on the other side.
    direction, blocks = ("store", "8 to 1") if is_store else ("load", "1 to 8")
    assert (
        f"KV {direction}: hipMemcpy2DAsync returned hipErrorIllegalAddress (700) for "
        f"rectangle 1 of 2, regions {', '.join(map(repr, names))}, block "
    ) in str(failed.error)
    assert str(failed.error).endswith(f"block {blocks}")
    offload.round_trip(7)
    offload.close()


# ----- order


def test_a_slot_is_written_when_its_dma_has_ended_and_not_before(offload):
    assert _wrong_slots(offload) == 0


def test_the_event_is_what_a_write_waits_for(offload, monkeypatch):
    """The control for the test above."""
    monkeypatch.setattr(torch_device.Event, "synchronize", lambda event: None)
    assert _wrong_slots(offload) > 0


def _wrong_slots(offload: Offload) -> int:
    hipsim.configure(copy_latency_us=10_000)
    before = offload.blocks()
    ticket = offload.store(everything(), everything())
    until(ticket.query)
    assert ticket.error is None
    return sum(offload.slot(i) != before[i] for i in everything())


def test_a_slot_is_read_into_when_its_dma_has_ended_and_not_before(offload):
    assert _wrong_blocks(offload) == 0


def test_the_event_is_what_a_read_waits_for(offload, monkeypatch):
    """The control for the test above."""
    offload.store(everything(), everything()).synchronize()
    monkeypatch.setattr(torch_device.Event, "synchronize", lambda event: None)
    assert _wrong_blocks(offload) > 0


def _wrong_blocks(offload: Offload) -> int:
    """Two loads, of which the second one finds the slots of the first one in use."""
    offload.fill(3)
    before = offload.blocks()
    until(offload.store(everything(), everything()).query)
    hipsim.configure(copy_latency_us=10_000)
    tickets = [
        offload.load([0, 1, 2, 3, 4], [11, 10, 9, 8, 7]),
        offload.load([5, 6], [6, 5]),
    ]
    for ticket in tickets:
        until(ticket.query)
        assert ticket.error is None
    return sum(offload.block(11 - i) != before[i] for i in range(7))


def test_a_load_is_done_when_the_stream_says_so(offload):
    before = offload.blocks()
    offload.store([1], [1]).synchronize()
    hipsim.configure(copy_latency_us=300_000)
    start = time.monotonic()
    ticket = offload.load([1], [4])
    assert not ticket.query()
    until(ticket.query)
    assert time.monotonic() - start >= 0.3
    assert offload.block(4) == before[1]


def test_a_store_waits_for_its_event(offload):
    assert _corrupt_rounds(offload, 100, late_us=2000, with_event=True) == 0


def test_a_store_without_the_event_comes_too_early(offload):
    """The control for the test above."""
    assert _corrupt_rounds(offload, 3, late_us=100_000, with_event=False) > 0


def _corrupt_rounds(
    offload: Offload, rounds: int, late_us: int, with_event: bool
) -> int:
    """Write a page late on another stream and store it; count wrong slots."""
    hip = hipsim.load()
    compute, done = torch_device.Stream(), torch_device.Event()
    page, corrupt = offload.gpu["a"][4], 0
    for i in range(rounds):
        value = i % 200 + 1
        hipsim.configure(fill_latency_us=late_us)
        address, stream = page.data_ptr(), compute.cuda_stream
        assert hip.hipMemsetAsync(address, value, len(page), stream) == 0
        done.record(compute)
        offload.store([4], [4], done if with_event else None).synchronize()
        corrupt += offload.slot(4)[: len(page)] != bytes([value]) * len(page)
        compute.synchronize()
    return corrupt


def test_a_load_waits_for_its_event(offload):
    offload.store([0], [0]).synchronize()
    expected = offload.block(0)
    compute, done, page = torch_device.Stream(), torch_device.Event(), offload.gpu["a"]
    hipsim.configure(fill_latency_us=200_000)
    address, stream = page[4].data_ptr(), compute.cuda_stream
    assert hipsim.load().hipMemsetAsync(address, 9, page.shape[1], stream) == 0
    done.record(compute)
    offload.load([0], [4], done).synchronize()
    compute.synchronize()
    assert offload.block(4) == expected


def test_the_device_works_on_the_next_block_of_a_store(offload, monkeypatch):
    steps: list[str] = []
    _note(monkeypatch, disk_backend, "copy_blocks", steps, lambda src, *_: src[0])
    _note(monkeypatch, os, "pwritev", steps, lambda fd, _, at: at // BLOCK_BYTES)
    offload.store([0, 1, 2, 3], [0, 1, 2, 3]).synchronize()
    assert steps == [
        *("copy_blocks 0", "copy_blocks 1", "pwritev 0", "copy_blocks 2"),
        *("pwritev 1", "copy_blocks 3", "pwritev 2", "pwritev 3"),
    ]


def test_the_device_works_on_the_block_before_of_a_load(offload, monkeypatch):
    offload.store([0, 1, 2], [0, 1, 2]).synchronize()
    hipsim.configure(copy_latency_us=50_000)
    steps: list[str] = []
    busy = lambda *_: "free" if offload.load_stream.query() else "busy"  # noqa: E731
    _note(monkeypatch, os, "preadv", steps, busy)
    offload.load([0, 1, 2], [0, 1, 2]).synchronize()
    # Two slots: the third read follows the first copy, and the second one still runs.
    assert steps == ["preadv free", "preadv busy", "preadv busy"]


def _note(monkeypatch, owner, name: str, steps: list[str], what) -> None:
    real = getattr(owner, name)

    def noted(*arguments):
        steps.append(f"{name} {what(*arguments)}")
        return real(*arguments)

    monkeypatch.setattr(owner, name, noted)


def test_loads_do_not_wait_for_stores(offload, monkeypatch):
    offload.store([0], [0]).synchronize()
    before = offload.block(0)
    gate = Gate(monkeypatch, "pwritev")
    try:
        stores = [offload.store([i], [i]) for i in range(1, 5)]
        assert gate.entered.wait(PATIENCE)
        loaded = offload.load([0], [7])
        until(loaded.query)
        assert offload.block(7) == before
        assert not any(store.query() for store in stores)
    finally:
        gate.release.set()
    stores[-1].synchronize()


def test_a_ticket_waits_for_a_copy_that_the_thread_has_not_reached(offload, gate):
    offload.store([0], [0])
    queued, before = offload.store([7], [3]), offload.block(7)
    assert gate.entered.wait(PATIENCE)
    assert not queued.query()
    threading.Timer(0.2, gate.release.set).start()
    queued.wait()
    assert offload.slot(3) == before


def test_copies_both_ways_at_once(offload):
    hipsim.configure(copy_latency_us=300)
    before = offload.blocks()
    for i in range(6):
        offload.store([i], [i]).synchronize()
    tickets = []
    for _ in range(30):
        tickets.append(offload.store([0, 1, 2], [10, 11, 12]))
        tickets.append(offload.load([3, 4, 5], [9, 10, 11]))
    for ticket in tickets:
        ticket.synchronize()
    assert [offload.slot(i) for i in (10, 11, 12)] == before[:3]
    assert [offload.block(i) for i in (9, 10, 11)] == before[3:6]


# ----- failures


HIP_CALLS = {
    "hipMemcpyBatchAsync": 4,
    "hipEventSynchronize": 4,
    "hipStreamWaitEvent": 1,
    # Of the four blocks, and the ticket's.
    "hipEventRecord": 5,
    "hipEventCreateWithFlags": 1,
}


@pytest.mark.parametrize("is_store", [True, False])
@pytest.mark.parametrize("call", HIP_CALLS)
def test_a_failing_hip_call_fails_its_copy_alone(offload, vllm_log, call, is_store):
    event = torch_device.Event()
    event.record(torch_device.Stream())
    offload.round_trip(0)
    hipsim.configure(copy_latency_us=200)
    launch = offload.store if is_store else offload.load
    for nth in range(1, HIP_CALLS[call] + 1):
        vllm_log.clear()
        hipsim.fail(call, nth, ILLEGAL_ADDRESS)
        failed = launch([1, 2, 3, 8], [4, 5, 6, 9], event)
        until(failed.query)
        assert "hipErrorIllegalAddress (700)" in str(failed.error)
        direction = "store" if is_store else "load"
        line = logged_error(vllm_log).getMessage()
        assert line.startswith(f"KV {direction} of blocks 1-3, 8 to 4-6, 9 failed: ")
        offload.round_trip(nth)


def test_a_failing_batch_copy_says_that_one_block_is_a_staging_slot(offload):
    hipsim.fail("hipMemcpyBatchAsync", 2, ILLEGAL_ADDRESS)
    failed = offload.store([3, 4], [6, 7])
    until(failed.query)
    assert "KV store: hipMemcpyBatchAsync returned" in str(failed.error)
    assert "'a (staging)'" in str(failed.error)


def test_an_error_that_shows_up_later_is_the_tickets_too(offload, vllm_log):
    offload.round_trip(1)
    ticket = offload.load([0, 1], [4, 5])
    until(ticket._settled.is_set)
    hipsim.fail("hipEventQuery", 1, ILLEGAL_ADDRESS)
    until(ticket.query)
    assert f"KV load of blocks 0-1 to 4-5 failed: {ticket.error}" in vllm_log.text
    offload.round_trip(2)


IO_ERRORS = {
    errno.ENOSPC: ("ENOSPC (28), No space left on device", "disk_capacity_bytes"),
    errno.EDQUOT: ("EDQUOT (122), Disk quota exceeded", "quota"),
    errno.EFBIG: ("EFBIG (27), File too large", "ulimit -f"),
    errno.EIO: ("EIO (5), Input/output error", "disk_path"),
    errno.ESTALE: ("ESTALE (116), Stale file handle", ""),
}


@pytest.mark.parametrize("nth", [1, 2, 4])
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_failing_io_call_fails_its_copy_alone(
    offload, kernel, path, vllm_log, call, nth
):
    for number in IO_ERRORS:
        vllm_log.clear()
        _fail_an_io_call(offload, kernel, path, vllm_log, call, number, nth)
        offload.round_trip(number)


def _fail_an_io_call(
    offload: Offload, kernel: Kernel, path: Path, vllm_log, call: str, number, nth
) -> None:
    is_store = call == "pwritev"
    kernel.fail(call, nth, number)
    launch = offload.store if is_store else offload.load
    src, dst = [1, 2, 3, 8], [4, 5, 6, 9]
    failed = launch(src, dst)
    until(failed.query)
    assert isinstance(failed.error, DiskError)
    block, slot = (src, dst) if is_store else (dst, src)
    assert failed.error.errno == number
    assert failed.error.path == str(path)
    assert failed.error.slot == slot[nth - 1]
    reason, remedy = IO_ERRORS[number]
    which = (
        f"KV store of block {block[nth - 1]} to slot {slot[nth - 1]} of {path}"
        if is_store
        else f"KV load of slot {slot[nth - 1]} of {path} to block {block[nth - 1]}"
    )
    after = f"{which}: {call} failed after 0 of 8192 bytes: {reason}. "
    assert str(failed.error).startswith(after.strip())
    assert remedy in str(failed.error)
    direction = "store" if is_store else "load"
    what = f"KV {direction} of blocks 1-3, 8 to 4-6, 9"
    assert logged_error(vllm_log).getMessage() == f"{what} failed: {failed.error}"


def test_direct_io_that_is_refused_has_a_remedy(idle, kernel):
    offload = idle.start(use_page_cache=False)
    kernel.fail("pwritev", 1, errno.EINVAL)
    failed = offload.store([0], [0])
    until(failed.query)
    assert "EINVAL (22)" in str(failed.error)
    assert "use_page_cache" in str(failed.error)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_failed_copy_ends_only_when_its_slots_are_free(offload, kernel, call):
    """The device still works on the other slot when the disk fails."""
    offload.round_trip(1)
    hipsim.configure(copy_latency_us=150_000)
    kernel.fail(call, 1 if call == "pwritev" else 2, errno.EIO)
    store = call == "pwritev"
    ticket = (offload.store if store else offload.load)([0, 1, 2], [3, 4, 5])
    until(ticket.query)
    assert isinstance(ticket.error, DiskError)
    stream = offload.store_stream if store else offload.load_stream
    assert stream.query()
    if not store:
        assert offload.block(3) == offload.slot(0)
    hipsim.configure(copy_latency_us=0)
    offload.round_trip(2)


@pytest.mark.parametrize("most", [1, 4096, 8191])
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_short_call_is_continued(offload, kernel, call, most):
    kernel.cut(call, 3, most)
    offload.round_trip(1)
    start = 2 * BLOCK_BYTES
    calls = [each for each in kernel.calls if each[0] == call]
    assert calls[2:4] == [
        (call, start, BLOCK_BYTES),
        (call, start + most, BLOCK_BYTES - most),
    ]


def test_a_short_call_is_continued_without_the_page_cache(idle, kernel):
    offload = idle.start(use_page_cache=False)
    kernel.cut("pwritev", 3, 4096)
    kernel.cut("preadv", 5, 4096)
    offload.round_trip(1)
    assert ("pwritev", 2 * BLOCK_BYTES + 4096, 4096) in kernel.calls
    assert ("preadv", 4 * BLOCK_BYTES + 4096, 4096) in kernel.calls


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_call_that_moves_nothing_is_an_error(offload, kernel, call):
    kernel.cut(call, 1, 0)
    failed = (offload.store if call == "pwritev" else offload.load)([1], [2])
    until(failed.query)
    assert isinstance(failed.error, DiskError)
    assert failed.error.errno == errno.EIO
    assert f"{call} moved 0 of 8192 bytes and no more" in str(failed.error)
    offload.round_trip(1)


def test_a_file_that_has_become_shorter_is_an_error(offload, path):
    offload.store([0, 1], [0, 1]).synchronize()
    os.truncate(path, BLOCK_BYTES + 100)
    offload.load([0], [5]).synchronize()
    failed = offload.load([1], [6])
    until(failed.query)
    assert isinstance(failed.error, DiskError)
    assert "preadv moved 100 of 8192 bytes and no more" in str(failed.error)
    assert "made the file shorter" in str(failed.error)


def test_a_full_disk_fails_stores_and_no_loads(offload, path):
    """The errors are the kernel's own: /dev/full has never any room."""
    offload.store([0], [0]).synchronize()
    before = offload.block(0)
    (fd,) = descriptors(path)
    kept, full = os.dup(fd), os.open("/dev/full", os.O_RDWR)
    os.dup2(full, fd)
    for i in range(5):
        failed = offload.store([1, 2], [3, 4])
        until(failed.query)
        assert isinstance(failed.error, DiskError)
        assert failed.error.errno == errno.ENOSPC, i
        assert "disk_capacity_bytes" in str(failed.error)
    os.dup2(kept, fd)
    os.close(kept)
    os.close(full)
    offload.load([0], [7]).synchronize()
    assert offload.block(7) == before
    offload.round_trip(1)


@pytest.fixture
def file_limit() -> Iterator[Callable[[int], None]]:
    """Sets how large files may become; beyond it the kernel writes a part."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_is_not_allowed_to_grow(offload, file_limit):
    """The kernel writes a part, and says why only when it is called again."""
    before = offload.blocks()
    file_limit(2 * BLOCK_BYTES + 4096)
    offload.store([0, 1], [0, 1]).synchronize()
    failed = offload.store([2], [2])
    until(failed.query)
    file_limit(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    assert isinstance(failed.error, DiskError)
    assert "pwritev failed after 4096 of 8192 bytes: EFBIG (27)" in str(failed.error)
    assert [offload.slot(i) for i in (0, 1)] == before[:2]
    offload.round_trip(1)


@pytest.mark.parametrize(
    ("is_store", "src", "dst", "words"),
    [
        (True, [BLOCKS], [0], "block 12 is outside the source cache.* 12 blocks"),
        (True, [0, -1], [0, 1], "block -1 is outside the source cache"),
        (True, [3], [SLOTS], "block 16 is outside the destination cache.* 16"),
        (False, [SLOTS], [0], "block 16 is outside the source cache.* 16 blocks"),
        (False, [0, 1], [2, BLOCKS], "block 12 is outside the destination cache"),
    ],
)
def test_a_block_outside_its_cache_is_an_error_of_its_copy(
    offload, path, is_store, src, dst, words
):
    before = offload.blocks()
    ticket = (offload.store if is_store else offload.load)(src, dst)
    with pytest.raises(IndexError, match=words):
        ticket.synchronize()
    assert offload.blocks() == before
    assert path.stat().st_size == SLOTS * BLOCK_BYTES
    assert not any(path.read_bytes())
    offload.store([BLOCKS - 1], [SLOTS - 1]).synchronize()
    offload.load([SLOTS - 1], [0]).synchronize()
    assert offload.block(0) == before[BLOCKS - 1]


def test_lists_of_different_lengths_move_nothing(offload, path):
    ticket = offload.store([0, 1], [0])
    with pytest.raises(ValueError, match="zip"):
        ticket.synchronize()
    assert not any(path.read_bytes())
    offload.round_trip(1)


def test_any_error_leaves_the_threads_alive(offload, monkeypatch):
    class Odd(BaseException):
        pass

    def copy_blocks(*arguments: object) -> None:
        raise Odd("neither an Exception nor a HIP error")

    with monkeypatch.context() as patch:
        patch.setattr(disk_backend, "copy_blocks", copy_blocks)
        tickets = [offload.load([0], [0]), offload.store([0], [0])]
        for ticket in tickets:
            until(ticket.query)
            assert isinstance(ticket.error, Odd)
    offload.round_trip(1)


class Move(SimpleNamespace):
    """A copy of the property test.

    Attributes:
        is_store: Which way.
        pairs: Block of the device and slot of the file, each once.
        fault: A call, and at which of the copy's blocks it fails; or None.
        latency_us: Of the device's copies.
    """


FAULTS = ["hipMemcpyBatchAsync", "hipEventRecord", "hipEventSynchronize", "io", "short"]


@st.composite
def moves(draw) -> Move:
    blocks = draw(st.lists(st.integers(0, 5), unique=True, min_size=1, max_size=6))
    slots = draw(st.permutations(range(8)))[: len(blocks)]
    fault = draw(
        st.none() | st.tuples(st.sampled_from(FAULTS), st.integers(1, len(blocks)))
    )
    pairs = list(zip(blocks, slots, strict=True))
    return Move(
        is_store=draw(st.booleans()),
        pairs=pairs,
        fault=fault,
        latency_us=draw(st.sampled_from([0, 100, 700])),
    )


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(script=st.lists(moves(), max_size=12), buffers=st.integers(1, 3))
def test_what_a_slot_holds_is_what_was_stored_last(
    device, tmp_path, kernel, script, buffers
):
    """Failed copies have an error and touch their own blocks alone."""
    offload = Offload(device, tmp_path / "kv", {"a": (96, 96), "b": (32, 48)}, 6)
    offload.start(slots=8, block_bytes=144, buffers=buffers)
    try:
        _check_against_a_model(offload, kernel, script)
    finally:
        hipsim.configure(copy_latency_us=0)
        offload.close()


def _check_against_a_model(
    offload: Offload, kernel: Kernel, script: list[Move]
) -> None:
    offload.fill(len(script))
    # What blocks and slots hold, but for those that a failed copy was to write.
    blocks = dict(enumerate(offload.blocks()))
    slots = {slot: bytes(128) for slot in range(8)}
    for move in script:
        hipsim.configure(copy_latency_us=move.latency_us)
        name, nth = move.fault or (None, 0)
        if name == "io":
            kernel.fail("pwritev" if move.is_store else "preadv", nth, errno.EIO)
        elif name == "short":
            kernel.cut("pwritev" if move.is_store else "preadv", nth, 50)
        elif name is not None:
            hipsim.fail(name, nth, ILLEGAL_ADDRESS)
        block_ids, slot_ids = ([pair[side] for pair in move.pairs] for side in (0, 1))
        if move.is_store:
            ticket, source, target = offload.store(block_ids, slot_ids), blocks, slots
        else:
            ticket, source, target = offload.load(slot_ids, block_ids), slots, blocks
        until(ticket.query)
        assert (ticket.error is None) == (name in (None, "short"))
        for block, slot in move.pairs:
            here, there = (block, slot) if move.is_store else (slot, block)
            target.pop(there, None)
            if ticket.error is None and here in source:
                target[there] = source[here]
        assert {block: offload.block(block) for block in blocks} == blocks
        assert {slot: offload.slot(slot, 144) for slot in slots} == slots


# ----- the file


@pytest.mark.parametrize("use_page_cache", [True, False])
def test_the_file_is_for_nobody_else_and_goes_with_the_backend(
    idle, path, use_page_cache
):
    offload = idle.start(use_page_cache=use_page_cache)
    status = path.stat()
    assert stat.S_ISREG(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == SLOTS * BLOCK_BYTES
    (fd,) = descriptors(path)
    assert not os.get_inheritable(fd)
    assert hipsim.stats().registered_ranges == 2
    offload.round_trip(1)
    assert offload.backend.shutdown()
    assert_nothing_is_left(path)


def test_an_old_file_is_not_used_again(idle, path):
    path.write_bytes(b"old")
    path.chmod(0o644)
    with path.open("rb") as old:
        idle.start()
        idle.round_trip(1)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert old.read() == b"old"


def test_a_link_is_not_followed(idle, path):
    other = path.with_name("other")
    other.write_bytes(b"other")
    path.symlink_to(other)
    idle.start()
    idle.round_trip(1)
    assert not path.is_symlink()
    assert other.read_bytes() == b"other"


def test_a_link_that_is_made_meanwhile_is_not_followed(idle, path, monkeypatch):
    other = path.with_name("other")
    other.write_bytes(b"other")
    real = os.open

    def raced(name, flags, *mode):
        path.symlink_to(other)
        return real(name, flags, *mode)

    monkeypatch.setattr(os, "open", raced)
    with pytest.raises(DiskError, match="EEXIST"):
        idle.start()
    assert other.read_bytes() == b"other"


def test_anothers_file_of_the_same_name_stays(idle, path):
    """Two servers with the same disk_path: the second one has made it anew."""
    idle.start()
    path.unlink()
    path.write_bytes(b"another's")
    assert idle.backend.shutdown()
    assert path.read_bytes() == b"another's"
    assert descriptors(path) == []


def test_folders_are_made(device, tmp_path):
    path = tmp_path / "new" / "folder" / "kv"
    offload = Offload(device, path).start()
    offload.round_trip(1)
    offload.close()
    assert not path.exists()


def _room(monkeypatch, free: int) -> None:
    room = SimpleNamespace(f_bavail=free // 512, f_frsize=512)
    monkeypatch.setattr(os, "fstatvfs", lambda fd: room)


def test_a_disk_with_too_little_room_is_named_at_the_start(
    idle, path, monkeypatch, vllm_log
):
    _room(monkeypatch, SLOTS * BLOCK_BYTES - 512)
    idle.start()
    (line,) = logged(vllm_log, "WARNING")
    assert str(path) in line
    assert "disk_capacity_bytes in kv_connector_extra_config" in line
    idle.round_trip(1)


def test_a_disk_with_enough_room_is_not(idle, monkeypatch, vllm_log):
    _room(monkeypatch, SLOTS * BLOCK_BYTES)
    idle.start()
    assert logged(vllm_log, "WARNING") == []


# ----- starts that fail


@pytest.mark.parametrize(
    ("block_bytes", "use_page_cache"), [(3 * 512, False), (4096 + 512, False)]
)
def test_direct_io_needs_blocks_of_whole_pages(idle, path, block_bytes, use_page_cache):
    with pytest.raises(AssertionError, match=r"not aligned to 4096.*use_page_cache"):
        idle.backend.init(
            idle.gpu,
            CPU,
            idle.load_stream,
            idle.store_stream,
            str(path),
            SLOTS,
            block_bytes,
        )
    assert_nothing_is_left(path)


def test_the_page_cache_does_not(device, path):
    offload = Offload(device, path, {"a": (3 * 512, 3 * 512)}).start(block_bytes=1536)
    assert path.stat().st_size == SLOTS * 1536
    offload.round_trip(1)
    offload.close()


def test_a_file_system_without_direct_io_has_a_remedy(idle, path, monkeypatch):
    """As Linux does it: the file is made, and then it is an error."""
    real = os.open

    def no_direct(name, flags, *mode):
        fd = real(name, flags & ~os.O_DIRECT, *mode)
        if flags & os.O_DIRECT:
            os.close(fd)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return fd

    if not takes_direct_io(path.parent):
        pytest.skip("it is what the file system does by itself")
    monkeypatch.setattr(disk_backend.os, "open", no_direct)
    with pytest.raises(DiskError) as raised:
        idle.backend.init(
            idle.gpu,
            CPU,
            idle.load_stream,
            idle.store_stream,
            str(path),
            SLOTS,
            BLOCK_BYTES,
        )
    assert raised.value.errno == errno.EINVAL
    assert str(path) in str(raised.value)
    assert "use_page_cache to true in kv_connector_extra_config" in str(raised.value)
    assert_nothing_is_left(path)
    idle.start(use_page_cache=True).round_trip(1)


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("open", errno.EACCES),
        ("open", errno.EMFILE),
        ("ftruncate", errno.ENOSPC),
        ("fstatvfs", errno.EIO),
        ("unlink", errno.EROFS),
    ],
)
def test_a_file_that_cannot_be_made_is_an_error_of_init(
    idle, path, monkeypatch, call, number
):
    def fail(*arguments: object, **named: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(DiskError) as raised:
            idle.start()
    assert raised.value.errno == number
    assert f"The KV file {path} of {SLOTS * BLOCK_BYTES} bytes" in str(raised.value)
    assert errno.errorcode[number] in str(raised.value)
    assert_nothing_is_left(path)
    idle.start().round_trip(1)


def test_a_path_that_is_a_folder(idle, path):
    path.mkdir()
    with pytest.raises(DiskError, match="disk_path"):
        idle.start()
    path.rmdir()


def test_a_folder_that_is_a_file(device, tmp_path):
    (tmp_path / "file").write_bytes(b"file")
    offload = Offload(device, tmp_path / "file" / "kv")
    with pytest.raises(DiskError, match="disk_path"):
        offload.start()
    offload.close()


def test_a_file_that_would_be_too_large(idle, path, file_limit):
    file_limit(SLOTS * BLOCK_BYTES - 1)
    with pytest.raises(DiskError, match=r"EFBIG.*disk_capacity_bytes"):
        idle.start()
    assert_nothing_is_left(path)


@pytest.mark.parametrize("nth", [1, 2])
def test_memory_that_cannot_be_registered_is_an_error_of_init(idle, path, nth):
    hipsim.fail("hipHostRegister", nth, 2)
    with pytest.raises(RuntimeError, match=r"disk_buffer_slots.*cudaHostRegister fail"):
        idle.start()
    assert_nothing_is_left(path)
    idle.start().round_trip(1)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_an_event_that_cannot_be_made_is_an_error_of_init(idle, path, nth):
    hipsim.fail("hipEventCreateWithFlags", nth, 2)
    with pytest.raises(RuntimeError, match="hipErrorOutOfMemory"):
        idle.start()
    assert_nothing_is_left(path)
    idle.start().round_trip(1)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_thread_that_cannot_start_is_an_error_of_init(idle, path, monkeypatch, nth):
    real, starts = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        starts.append(thread)
        if len(starts) == nth:
            raise RuntimeError("can't start new thread")
        real(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            idle.start()
    assert_nothing_is_left(path)
    idle.start().round_trip(1)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_device_that_cannot_be_set_is_an_error_of_init(idle, path, monkeypatch, nth):
    calls: list[torch.device] = []

    def set_device(device: torch.device) -> None:
        calls.append(device)
        if len(calls) == nth:
            raise RuntimeError("invalid device ordinal")

    with monkeypatch.context() as patch:
        platform = SimpleNamespace(set_device=set_device)
        patch.setattr(copy_thread, "current_platform", platform)
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            idle.start()
    assert_nothing_is_left(path)
    idle.start().round_trip(1)


def test_blocks_that_have_more_pages_than_bytes_are_an_error_of_init(idle, path):
    with pytest.raises(ValueError, match="4096 bytes in 3 regions, and 4095 in the"):
        idle.start(block_bytes=4095)
    assert_nothing_is_left(path)


def test_host_memory_may_be_registered_by_others(device, path, monkeypatch):
    """Who replaces the two functions need not register anything."""
    module = "vllm.v1.simple_kv_offload.disk_backend"
    registered: list[int] = []
    monkeypatch.setattr(f"{module}.pin_tensor", lambda t: registered.append(t.nbytes))
    monkeypatch.setattr(f"{module}.unpin_tensor", lambda t: registered.pop())
    offload = Offload(device, path, {"a": (512, 512)}).start(block_bytes=512)
    assert path.stat().st_size == SLOTS * 512
    assert registered == [2 * 4096, 2 * 4096]
    assert hipsim.stats().registered_ranges == 0
    offload.close()
    assert registered == []


def test_no_staging_slots_are_an_error_of_init(idle, path):
    with pytest.raises(ValueError, match="disk_buffer_slots is 0"):
        idle.start(buffers=0)
    assert_nothing_is_left(path)


# ----- shutdown


def test_shutdown_gives_the_host_memory_back(offload):
    slots = [*offload.backend._store_way.slots, *offload.backend._load_way.slots]
    memory = [weakref.ref(slot.memory.obj) for slot in slots]
    del slots
    assert all(each() is not None for each in memory)
    assert offload.backend.shutdown()
    assert [each() for each in memory] == [None] * 4


def test_shutdown_finishes_what_is_queued(offload, path, tmp_path):
    hipsim.configure(copy_latency_us=10_000)
    before, kept = offload.blocks(), tmp_path / "kept"
    os.link(path, kept)
    stores = [offload.store([i], [i]) for i in range(8)]
    assert offload.backend.shutdown()
    assert all(ticket.query() and ticket.error is None for ticket in stores)
    content = kept.read_bytes()
    for i in range(8):
        assert content[i * BLOCK_BYTES :][:4096] == before[i]
    assert_nothing_is_left(path)


def test_shutdown_finishes_loads(offload, path):
    before = offload.blocks()
    offload.store([0, 1], [0, 1]).synchronize()
    hipsim.configure(copy_latency_us=100_000)
    load = offload.load([0, 1], [7, 8])
    assert offload.backend.shutdown()
    assert load.query() is True
    assert load.error is None
    assert [offload.block(7), offload.block(8)] == before[:2]


def test_a_long_copy_is_cancelled_between_two_blocks(
    offload, path, monkeypatch, vllm_log
):
    """The disk is slow, not stuck: nothing is left, and nothing is late."""
    monkeypatch.setattr(disk_backend, "SHUTDOWN_SECONDS", 1.0)
    real = {"pwritev": os.pwritev, "preadv": os.preadv}
    for name, call in real.items():
        monkeypatch.setattr(os, name, lambda *a, call=call: time.sleep(0.1) or call(*a))
    many = [i % BLOCKS for i in range(1000)]
    tickets = [
        *(offload.store(many, many), offload.load(many, many)),
        *(offload.store([1], [2]), offload.load([3], [4])),
    ]
    start = time.monotonic()
    assert offload.backend.shutdown()
    assert time.monotonic() - start < 1.5
    for ticket in tickets:
        assert ticket.query() is True
        assert "was cancelled by a shutdown" in str(ticket.error)
    assert_nothing_is_left(path)
    lines = logged(vllm_log, "WARNING")
    assert "KV store of blocks 1 to 2 was cancelled by a shutdown." in lines
    assert "KV load of blocks 3 to 4 was cancelled by a shutdown." in lines
    assert logged(vllm_log, "ERROR") == []


@pytest.mark.parametrize("gate", ["pwritev", "preadv"], indirect=True)
def test_a_disk_that_is_stuck_keeps_the_file_open(
    offload, path, gate, monkeypatch, request, vllm_log
):
    monkeypatch.setattr(disk_backend, "SHUTDOWN_SECONDS", 0.5)
    is_store = request.node.callspec.params["gate"] == "pwritev"
    stuck = (offload.store if is_store else offload.load)([0, 1, 2], [2, 3, 4])
    assert gate.entered.wait(PATIENCE)
    start = time.monotonic()
    assert not offload.backend.shutdown()
    assert time.monotonic() - start < 1.5
    assert stuck.query() is True
    assert "was cancelled by a shutdown" in str(stuck.error)
    # Its content is nobody's business any more, but its descriptor is in use.
    assert not path.exists()
    assert len(descriptors(path)) == 1
    assert hipsim.stats().registered_ranges == 2
    assert any(str(path) in line for line in logged(vllm_log, "WARNING"))
    gate.release.set()
    until(offload.backend.shutdown)
    assert_nothing_is_left(path)


def test_both_threads_share_the_time_for_a_shutdown(offload, monkeypatch):
    monkeypatch.setattr(disk_backend, "SHUTDOWN_SECONDS", 0.5)
    gates = [Gate(monkeypatch, "pwritev"), Gate(monkeypatch, "preadv")]
    try:
        stuck = [offload.store([0], [1]), offload.load([2], [3])]
        for gate in gates:
            assert gate.entered.wait(PATIENCE)
        start = time.monotonic()
        assert not offload.backend.shutdown()
        assert time.monotonic() - start < 1
        assert all(ticket.query() and ticket.error for ticket in stuck)
    finally:
        for gate in gates:
            gate.release.set()


def test_shutdown_twice_is_once(offload, path):
    offload.store([0], [0])
    assert offload.backend.shutdown()
    assert offload.backend.shutdown()
    assert_nothing_is_left(path)


@pytest.mark.parametrize("is_store", [True, False])
def test_a_copy_after_the_shutdown_fails_at_once(offload, is_store, vllm_log):
    offload.backend.shutdown()
    late = (offload.store if is_store else offload.load)([0], [1])
    assert late.query() is True
    with pytest.raises(RuntimeError, match="came after the shutdown"):
        late.synchronize()
    assert f"of blocks 0 to 1 failed: {late.error}" in vllm_log.text


def test_shutdown_before_init_does_nothing():
    assert DiskBackend().shutdown()
