# SPDX-License-Identifier: Apache-2.0
"""Copies of KV blocks between device memory and a file.

Note [Staged copies]
Neither a device nor the disk reaches the other, so each block passes through a
*staging slot*, pinned host memory in which it looks as it does in the file: the
pages of all regions, one after the other, in the order in which the host tier has
them, so that they are rectangles here too. One read or write moves a block, however
many regions there are and whatever their alignment.

The disk works on one slot while the device works on the next. What keeps them
apart is the slot's event, which marks the end of its last DMA. A store waits for
it before it writes the slot to the file. A load waits for it before it reads the
next block into the slot; the last DMAs of a load are still under way when its
function returns, and the load's ticket is what waits for them. A copy that fails
between two blocks leaves DMAs behind, for which the copy thread waits before the
ticket ends, so that the next copy finds all slots free.

Each direction has a thread, a stream and slots of its own, so that loads, for
which requests wait, never wait for stores.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.logger import init_logger
from vllm.v1.simple_kv_offload.copy_backend import (
    BlockCopy,
    check_block_ids,
    describe_engine,
    level_for,
    params_for,
)
from vllm.v1.simple_kv_offload.copy_engine import CopyEngine, resolve_copy_engine
from vllm.v1.simple_kv_offload.copy_thread import (
    SHUTDOWN_SECONDS,
    CopyThread,
    CopyTicket,
)
from vllm.v1.simple_kv_offload.cuda_mem_ops import (
    BatchMemcpyParams,
    copy_blocks,
    num_blocks,
    pin_tensor,
    unpin_tensor,
)
from vllm.v1.simple_kv_offload.host_cache import block_layout

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

# O_DIRECT takes memory, offsets and lengths in multiples of the disk's logical
# block, which is 512 or 4096 bytes.
ALIGNMENT = 4096

# Of the time for a shutdown; the rest is for the running copy, once it is
# cancelled, to notice at its next block.
_DRAINING_SHARE = 0.8

_LESS_ROOM = "set disk_capacity_bytes in kv_connector_extra_config to what it has"
_OTHER_PLACE = (
    "Set disk_path in kv_connector_extra_config to a file in a folder that this "
    "process may write."
)
_NOT_DIRECT = (
    "The file system may not support O_DIRECT: set use_page_cache to true in "
    "kv_connector_extra_config, or disk_path to a file on a local disk."
)
_OTHER_DISK = (
    "The disk failed: see the kernel's log, and set disk_path in "
    "kv_connector_extra_config to a file on another one."
)
_REMEDIES = {
    errno.ENOSPC: (
        "The file is sparse, and the file system has no room left for it: free "
        f"some, or {_LESS_ROOM}."
    ),
    errno.EDQUOT: (
        f"The file is sparse, and the quota is used up: raise it, or {_LESS_ROOM}."
    ),
    errno.EFBIG: (
        "Files of this size are not allowed: raise the limit (ulimit -f) or set "
        "disk_capacity_bytes in kv_connector_extra_config to less than it."
    ),
    errno.EIO: _OTHER_DISK,
    # What the block layer makes of a medium error.
    errno.ENODATA: _OTHER_DISK,
    errno.EACCES: _OTHER_PLACE,
    errno.EEXIST: _OTHER_PLACE,
    errno.EISDIR: _OTHER_PLACE,
    errno.ENAMETOOLONG: _OTHER_PLACE,
    errno.ENOTDIR: _OTHER_PLACE,
    errno.EPERM: _OTHER_PLACE,
    errno.EROFS: _OTHER_PLACE,
}


class DiskError(OSError):
    """The file of the KV blocks could not be made, read or written.

    Attributes:
        errno: Why; EIO where the kernel gave no reason.
        path: Of the file.
        slot: Which of its slots; None for the file as a whole.

    """

    path: str
    slot: int | None


class _Slot(NamedTuple):
    """Host memory for one block."""

    number: int
    memory: memoryview
    dma: torch.cuda.Event


class _Staging:
    """The slots of one direction, in one registration.

    Args:
        gpu_caches: Tensors of shape [blocks, bytes] by region name.
        num_slots: How many blocks are under way at a time.
        block_bytes: Of a block in the file, at least the sum of its pages.

    Attributes:
        caches: The slots as [num_slots, bytes] tensors by region name.

    Raises:
        RuntimeError: The memory cannot be registered.
        ValueError: The pages are larger than the block.

    """

    def __init__(
        self, gpu_caches: dict[str, torch.Tensor], num_slots: int, block_bytes: int
    ) -> None:
        pages = {name: cache[0].nbytes for name, cache in gpu_caches.items()}
        if sum(pages.values()) > block_bytes:
            raise ValueError(
                f"KV blocks have {sum(pages.values())} bytes in {len(pages)} regions, "
                f"and {block_bytes} in the file"
            )
        stride = -(-block_bytes // ALIGNMENT) * ALIGNMENT
        # Begins at a page of memory, as torch's own tensors do not.
        memory = mmap.mmap(
            -1, num_slots * stride, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        bytes_of = memoryview(memory)
        # The disk's thread must not spin while it waits for compute.
        self.slots = [
            _Slot(
                number,
                bytes_of[number * stride : number * stride + block_bytes],
                torch.cuda.Event(blocking=True),
            )
            for number in range(num_slots)
        ]
        self._memory = torch.frombuffer(memory, dtype=torch.uint8).view(-1, stride)
        offsets = block_layout(gpu_caches).offsets
        slices, start = {}, 0
        # The file has no room for what the host tier puts between pages.
        for name in sorted(pages, key=offsets.__getitem__):
            slices[name] = self._memory[:, start : start + pages[name]]
            start += pages[name]
        self.caches = {name: slices[name] for name in pages}
        try:
            pin_tensor(self._memory)
        except RuntimeError as error:
            raise RuntimeError(
                f"The {num_slots} staging slots (disk_buffer_slots in "
                f"kv_connector_extra_config) cannot be registered: {error}"
            ) from error

    def release(self) -> None:
        """Unregister the memory. Nothing may be using it."""
        unpin_tensor(self._memory)
        self.slots.clear()


class _SlotFile:
    """A file with room for ``num_slots`` blocks of ``block_bytes``.

    What is in it may tell what users wrote: nobody else can open it, and its name
    goes with the backend.

    Raises:
        DiskError: The file cannot be made.

    """

    def __init__(
        self, path: str, num_slots: int, block_bytes: int, use_page_cache: bool
    ) -> None:
        self.path = path
        self._block_bytes = block_bytes
        self._direct = not use_page_cache
        size = num_slots * block_bytes
        with contextlib.ExitStack() as undo:
            try:
                self._fd = self._open(undo)
                os.ftruncate(self._fd, size)
                room = os.fstatvfs(self._fd)
            except OSError as error:
                what = f"The KV file {path} of {size} bytes cannot be made"
                raise self._error(what, error.errno or errno.EIO) from error
            undo.pop_all()
        if room.f_bavail * room.f_frsize < size:
            logger.warning(
                "The KV file %s may grow to %.2f GiB, and its file system has %.2f GiB "
                "left. Stores fail once that is used up: %s.",
                path,
                size / 2**30,
                room.f_bavail * room.f_frsize / 2**30,
                _LESS_ROOM,
            )

    def _open(self, undo: contextlib.ExitStack) -> int:
        Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        # An old file may be open elsewhere, or readable for others: not that one.
        Path(self.path).unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        flags |= os.O_DIRECT if self._direct else 0
        try:
            fd = os.open(self.path, flags, 0o600)
        except OSError as error:
            if error.errno == errno.EINVAL:
                # Linux makes the file before it finds that O_DIRECT is unsupported.
                Path(self.path).unlink(missing_ok=True)
            raise
        undo.callback(self.close)
        return fd

    def write(self, slot: int, memory: memoryview, block: int) -> None:
        """Write ``block`` from memory to a slot, whole.

        Raises:
            DiskError: Part of it may be written.

        """
        what = f"KV store of block {block} to slot {slot} of {self.path}"
        self._move(os.pwritev, "pwritev", what, slot, memory)

    def read(self, slot: int, memory: memoryview, block: int) -> None:
        """Read a slot into memory, whole, for ``block``.

        Raises:
            DiskError: Part of it may be read.

        """
        what = f"KV load of slot {slot} of {self.path} to block {block}"
        self._move(os.preadv, "preadv", what, slot, memory)

    def _move(
        self,
        call: Callable[[int, list[memoryview], int], int],
        name: str,
        what: str,
        slot: int,
        memory: memoryview,
    ) -> None:
        start, done = slot * self._block_bytes, 0
        while done < len(memory):
            try:
                # The kernel may move less than it was asked to; the next call says
                # why, or goes on.
                moved = call(self._fd, [memory[done:]], start + done)
            except OSError as error:
                what = f"{what}: {name} failed after {done} of {len(memory)} bytes"
                raise self._error(what, error.errno or errno.EIO, slot) from error
            if moved == 0:
                what = f"{what}: {name} moved {done} of {len(memory)} bytes and no more"
                cut = "Something may have made the file shorter."
                raise self._error(what, errno.EIO, slot, cut)
            done += moved

    def _error(
        self, what: str, number: int, slot: int | None = None, remedy: str | None = None
    ) -> DiskError:
        if remedy is None:
            remedy = _REMEDIES.get(number, "")
            if number == errno.EINVAL and self._direct:
                remedy = _NOT_DIRECT
        name = errno.errorcode.get(number, "unknown error")
        reason = f"{name} ({number}), {os.strerror(number)}"
        error = DiskError(f"{what}: {reason}. {remedy}".strip())
        error.errno, error.path, error.slot = number, self.path, slot
        return error

    def unlink(self) -> None:
        """Remove the name, unless it has become another file's."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._fd), os.lstat(self.path)):
                Path(self.path).unlink()

    def close(self) -> None:
        """Remove the file. No thread may be using it."""
        self.unlink()
        os.close(self._fd)
        # Whatever comes later must not reach a file that got the same number.
        self._fd = -1


class _Way(NamedTuple):
    """What the copies of one direction have for themselves."""

    thread: CopyThread
    stream: torch.cuda.Stream
    params: BatchMemcpyParams
    slots: list[_Slot]  # staging
    src_blocks: int
    dst_blocks: int


class DiskBackend:
    """Loads and stores KV blocks from and to a file, without the caller waiting.

    Args:
        vllm_config: Where the user may have chosen a copy engine, for the way between
            the device and the staging slots.

    Attributes:
        copy_engine: How blocks are copied, a label of the metrics.

    Raises:
        ValueError: The chosen engine does not exist.

    """

    def __init__(self, vllm_config: VllmConfig | None = None) -> None:
        self._asked_for = resolve_copy_engine(vllm_config)
        self.copy_engine = "disk"
        self._file: _SlotFile | None = None
        self._store_way: _Way | None = None
        self._load_way: _Way | None = None
        self._cancelled = threading.Event()
        self._resources = contextlib.ExitStack()

    def init(
        self,
        gpu_caches: dict[str, torch.Tensor],
        device: torch.device,
        load_stream: torch.cuda.Stream,
        store_stream: torch.cuda.Stream,
        disk_path: str,
        num_disk_slots: int,
        total_block_bytes: int,
        num_buffer_slots: int = 2,
        use_page_cache: bool = False,
    ) -> None:
        """Make the file and the staging slots, and start the threads.

        Whatever fails here leaves nothing of it.

        Args:
            gpu_caches: Tensors of shape [blocks, bytes] by region name.
            device: Of the GPU caches.
            load_stream: Where copies to the GPU are queued.
            store_stream: Where copies from the GPU are queued.
            disk_path: Of the file, which is made anew.
            num_disk_slots: Blocks for which the file has room.
            total_block_bytes: Of a block in all regions.
            num_buffer_slots: Staging slots in each direction; two let the disk and
                the device work at the same time.
            use_page_cache: Go through the kernel's page cache, not O_DIRECT.

        Raises:
            AssertionError: O_DIRECT cannot move blocks of this size.
            OSError: The file cannot be made.
            RuntimeError: There is no batch copy, host memory cannot be registered,
                or a thread cannot start.
            ValueError: The blocks have more bytes than ``total_block_bytes``, or
                there are no staging slots.

        """
        assert use_page_cache or total_block_bytes % ALIGNMENT == 0, (
            f"total_block_bytes={total_block_bytes} is not aligned to {ALIGNMENT}, as "
            "O_DIRECT needs it: set use_page_cache to true in kv_connector_extra_config"
        )
        if num_buffer_slots < 1:
            raise ValueError(f"disk_buffer_slots is {num_buffer_slots}: at least 1")
        gpu_blocks = num_blocks(gpu_caches)
        with contextlib.ExitStack() as undo:
            file = _SlotFile(
                disk_path, num_disk_slots, total_block_bytes, use_page_cache
            )
            undo.callback(file.close)

            def make_way(
                direction: str,
                stream: torch.cuda.Stream,
                src: int,
                dst: int,
                engine: CopyEngine,
            ) -> _Way:
                staging = _Staging(gpu_caches, num_buffer_slots, total_block_bytes)
                undo.callback(staging.release)
                params = params_for(
                    direction,
                    _named_for_staging(gpu_caches),
                    _named_for_staging(staging.caches),
                    stream,
                    engine,
                )
                thread = CopyThread(f"kv-disk-{direction}", device, keeps=(gpu_caches,))
                return _Way(thread, stream, params, staging.slots, src, dst)

            engine, _ = self._asked_for
            store = make_way("store", store_stream, gpu_blocks, num_disk_slots, engine)
            # One choice for both directions: the log names one engine.
            engine = store.params.engine
            load = make_way("load", load_stream, num_disk_slots, gpu_blocks, engine)
            logger.log(
                level_for(store.params, self._asked_for),
                "KV copy engine: disk: %s, %d slots of %d bytes (%.2f GiB), %s, by way "
                "of %d staging slots in each direction and %s",
                disk_path,
                num_disk_slots,
                total_block_bytes,
                num_disk_slots * total_block_bytes / 2**30,
                "page cache" if use_page_cache else "O_DIRECT",
                num_buffer_slots,
                describe_engine(store.params, self._asked_for),
            )
            for way in (store, load):
                undo.callback(_end, way.thread)
                way.thread.start()
            self._resources = undo.pop_all()
        self._file, self._store_way, self._load_way = file, store, load

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, CopyTicket]],
        wait_event: torch.Event | None = None,
    ) -> None:
        """Queue a copy and append its ticket to ``events_list`` at once.

        Errors of the copy are the ticket's. The copy waits for ``wait_event`` on
        its own stream. Stores and loads are not ordered with each other.

        Args:
            src_blocks: Blocks of the GPU caches for a store, else slots of the file.
            dst_blocks: The other side, one for each of them.
            is_store: Which way.
            event_idx: Stored beside the ticket.
            events_list: Takes the ticket.
            wait_event: What the copy comes after; None for nothing.

        """
        way = self._store_way if is_store else self._load_way
        assert way is not None, "init() comes first"
        blocks = BlockCopy("store" if is_store else "load", src_blocks, dst_blocks)
        copy = self._store if is_store else self._load

        def run() -> None:
            check_block_ids("source", src_blocks, way.src_blocks)
            check_block_ids("destination", dst_blocks, way.dst_blocks)
            pairs = list(zip(src_blocks, dst_blocks, strict=True))
            if wait_event is not None:
                way.stream.wait_event(wait_event)
            copy(way, pairs)

        ticket = way.thread.submit(blocks, way.stream, run)
        events_list.append((event_idx, ticket))

    def _store(self, way: _Way, pairs: list[tuple[int, int]]) -> None:
        staged: deque[tuple[_Slot, int, int]] = deque()
        free = cycle(way.slots)
        for block, disk_slot in pairs:
            if len(staged) == len(way.slots):
                self._write(*staged.popleft())
            slot = next(free)
            copy_blocks([block], [slot.number], way.params)
            slot.dma.record(way.stream)
            staged.append((slot, block, disk_slot))
        while staged:
            self._write(*staged.popleft())

    def _write(self, slot: _Slot, block: int, disk_slot: int) -> None:
        assert self._file is not None
        self._check_cancelled()
        slot.dma.synchronize()
        self._file.write(disk_slot, slot.memory, block)

    def _load(self, way: _Way, pairs: list[tuple[int, int]]) -> None:
        assert self._file is not None
        free = cycle(way.slots)
        for disk_slot, block in pairs:
            self._check_cancelled()
            slot = next(free)
            slot.dma.synchronize()
            self._file.read(disk_slot, slot.memory, block)
            copy_blocks([slot.number], [block], way.params)
            slot.dma.record(way.stream)

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise RuntimeError("cancelled by a shutdown")

    def shutdown(self) -> bool:
        """Finish what is queued, or cancel what five seconds do not suffice for.

        Returns:
            Whether everything has ended, so that nothing uses the caches. Until
            then the staging slots stay registered and the file open; another call
            tries again.

        """
        file, store, load = self._file, self._store_way, self._load_way
        if file is None or store is None or load is None:
            return True
        threads, start = (load.thread, store.thread), time.monotonic()
        for thread in threads:
            thread.close()
        draining = start + _DRAINING_SHARE * SHUTDOWN_SECONDS
        if not _all_ended(threads, draining):
            self._cancelled.set()
            if not _all_ended(threads, start + SHUTDOWN_SECONDS):
                file.unlink()
                logger.warning(
                    "A KV copy from or to %s does not end: the file stays open.",
                    file.path,
                )
                return False
        self._resources.close()
        return True


def _named_for_staging(caches: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # Errors name the blocks of one copy, and here one of the two is no disk slot.
    return {f"{name} (staging)": cache for name, cache in caches.items()}


def _all_ended(threads: tuple[CopyThread, ...], deadline: float) -> bool:
    # Each is asked: a thread that is late has its copies cancelled.
    ended = [thread.join(deadline) for thread in threads]
    return all(ended)


def _end(thread: CopyThread) -> None:
    thread.close()
    thread.join(time.monotonic() + SHUTDOWN_SECONDS)
