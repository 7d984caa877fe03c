# SPDX-License-Identifier: Apache-2.0
"""Changing several files as one, with an undo log.

Note [Undo log]
`install` first copies every file it is going to change into `pending/` and then
writes `pending/undo.json`, which says for each path what was there and what will be.
From that moment until the file is removed again the change counts as not made: `undo`,
called by the failing process itself or by the next one, puts everything back. Removing
`undo.json` is the one atomic step that makes the change final. Content reaches its
path by rename only, so at each path there is always either the old or the new content.
A pending folder without `undo.json` is rubbish.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from vllm_rocm_memory.series import SeriesError

Change = Mapping[str, bytes | None]


def digest(content: bytes | None) -> str | None:
    return None if content is None else hashlib.sha256(content).hexdigest()


def read(path: Path) -> bytes | None:
    """The content of `path`, None where there is no file."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


class Transaction:
    """One change of files below `root`.

    Args:
        root: what the paths of a change are relative to.
        folder: a folder below `root` for our own use; removed when it is left empty.
        like: an existing file whose mode and owner new files get.
    """

    def __init__(self, root: Path, folder: Path, like: Path) -> None:
        self.root = root
        self.folder = folder
        self.like = like
        self.pending = folder / "pending"
        self.log = self.pending / "undo.json"

    @property
    def interrupted(self) -> bool:
        """A change was begun and neither finished nor undone."""
        return self.log.exists()

    def install(self, change: Change) -> None:
        """Make the change; it is final after `commit`.

        Any failure puts everything back before it is raised.
        """
        try:
            self._save(change)
            for name, content in change.items():
                self._put(self.root / name, content)
        except BaseException:
            self.recover()
            raise

    def commit(self) -> None:
        """Make the installed change final; a failure undoes it first."""
        try:
            self.log.unlink()
        except BaseException:
            self.recover()
            raise
        # It is final now: what cannot be cleared is rubbish for the next run.
        with suppress(OSError):
            self._clear()

    def undo(self) -> None:
        """Put back what was there before the change.

        Raises:
            SeriesError: a file holds neither its old nor its new content.
        """
        log = json.loads(self.log.read_bytes())
        for name, entry in log.items():
            found = digest(read(self.root / name))
            if found not in (entry["before"], entry["after"]):
                raise SeriesError(
                    f"a change of {self.root} was interrupted and {name} was changed "
                    f"since (sha256 {found}, expected {entry['before']} or "
                    f"{entry['after']}): undo that change, or, if vLLM was installed "
                    f"anew since, remove {self.folder}"
                )
        for name, entry in reversed(log.items()):
            self._put_back(self.root / name, entry)
        self.log.unlink()
        self._clear()

    def recover(self) -> None:
        """Undo an interrupted change, if there is one, and clear its remains."""
        if self.interrupted:
            self.undo()
        else:
            self._clear()

    def _save(self, change: Change) -> None:
        self._make_folder(self.pending)
        log = {}
        for number, (name, content) in enumerate(change.items()):
            path = self.root / name
            before = read(path)
            copy = self.pending / f"{number}.before"
            if before is not None:
                self._write(copy, before, like=path)
            log[name] = {
                "before": digest(before),
                "after": digest(content),
                "copy": copy.name,
            }
        draft = self.log.with_suffix(".new")
        self._write(draft, json.dumps(log).encode(), like=self.like)
        _sync(self.pending)
        draft.replace(self.log)
        _sync(self.pending)

    def _put(self, path: Path, content: bytes | None) -> None:
        if content is None:
            self._remove(path)
            return
        self._make_folder(path.parent)
        draft = self.pending / "file.new"
        self._write(draft, content, like=path if path.exists() else self.like)
        draft.replace(path)
        _sync(path.parent)
        _forget_bytecode(path)

    def _put_back(self, path: Path, entry: Mapping[str, str | None]) -> None:
        if entry["before"] is None:
            self._remove(path)
            return
        if digest(read(path)) != entry["before"]:
            self._make_folder(path.parent)
            (self.pending / str(entry["copy"])).replace(path)
            _sync(path.parent)
        _forget_bytecode(path)

    def _remove(self, path: Path) -> None:
        if path.exists():
            path.unlink()
            _sync(path.parent)
        _forget_bytecode(path)
        for parent in path.parents:
            if parent == self.root or (parent.is_dir() and any(parent.iterdir())):
                break
            if parent.is_dir():
                parent.rmdir()
                _sync(parent.parent)

    def _clear(self) -> None:
        if self.pending.is_dir():
            _sync(self.pending)
            for left in self.pending.iterdir():
                left.unlink()
            self.pending.rmdir()
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()
            _sync(self.folder.parent)

    def _make_folder(self, path: Path) -> None:
        if path.is_dir():
            return
        self._make_folder(path.parent)
        path.mkdir()
        _own_like(path, path.parent)
        _sync(path.parent)

    def _write(self, path: Path, content: bytes, like: Path) -> None:
        """Write `path` to disk with the mode and owner of `like`."""
        mode = like.stat().st_mode & 0o7777
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        try:
            os.fchmod(handle, mode)
            left = memoryview(content)
            while left:
                left = left[os.write(handle, left) :]
            os.fsync(handle)
        finally:
            os.close(handle)
        _own_like(path, like)


def _own_like(path: Path, like: Path) -> None:
    mine, wanted = path.stat(), like.stat()
    differs = (mine.st_uid, mine.st_gid) != (wanted.st_uid, wanted.st_gid)
    # Only root can give files away; for anyone else the new file is their own.
    if differs and os.geteuid() == 0:
        os.chown(path, wanted.st_uid, wanted.st_gid)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _forget_bytecode(path: Path) -> None:
    """Remove the compiled forms of a module.

    Python compares size and seconds of the source only, and not even those for
    bytecode that was compiled as unchecked.
    """
    cache = path.parent / "__pycache__"
    if path.suffix != ".py" or not cache.is_dir():
        return
    for compiled in cache.glob(f"{path.stem}.*.pyc"):
        compiled.unlink()
    if not any(cache.iterdir()):
        cache.rmdir()
