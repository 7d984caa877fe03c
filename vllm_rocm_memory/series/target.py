# SPDX-License-Identifier: Apache-2.0
"""The vLLM tree that the series is laid over, and what we keep inside it."""

import ast
import fcntl
import importlib.util
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

from vllm_rocm_memory.series import SeriesError, record
from vllm_rocm_memory.series.transaction import Transaction, digest, read

# The name starts with a dot, so it is no package; nothing in it ends in .py, so no
# tool compiles or lints it.
FOLDER = "vllm/.rocm_memory_series"
JOURNAL = f"{FOLDER}/journal.json"
# A checkout is the other kind of target: git should not offer our folder.
IGNORE = f"{FOLDER}/.gitignore"
_FORMAT = 1
# An apply that verifies by import holds the lock for as long as torch takes to load.
LOCK_WAIT_S = 60.0


@dataclass(frozen=True)
class AppliedPatch:
    """What the journal says of a patch.

    Attributes:
        fingerprint: `Series.fingerprint` when it was applied.
        base: the version recognised, None for an unknown base.
        files: the paths that it touched.
    """

    fingerprint: str
    base: str | None
    files: tuple[str, ...]


@dataclass(frozen=True)
class AppliedFile:
    """sha256 of a file before and after; None for an added file's before."""

    original: str | None
    applied: str


@dataclass(frozen=True)
class Journal:
    """What is applied to a target.

    Attributes:
        records: RECORD path -> sha256 of its original.
        not_verified: why the result could not be verified by import, if so.
        not_importable: module -> error, of those that do not import here with or
            without the series, where others do.
    """

    patches: Mapping[str, AppliedPatch] = field(default_factory=dict)
    files: Mapping[str, AppliedFile] = field(default_factory=dict)
    records: Mapping[str, str] = field(default_factory=dict)
    not_verified: str | None = None
    not_importable: Mapping[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=1)
        return f"{text}\n".encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Journal":
        fields = json.loads(content)
        if fields.pop("format") != _FORMAT:
            raise ValueError("it was written by another version of vllm-rocm-memory")
        return cls(
            patches={
                name: AppliedPatch(**{**patch, "files": tuple(patch["files"])})
                for name, patch in fields["patches"].items()
            },
            files={path: AppliedFile(**file) for path, file in fields["files"].items()},
            records=fields["records"],
            not_verified=fields["not_verified"],
            # Journals of the first release have no such field.
            not_importable=fields.get("not_importable", {}),
        )


@dataclass(frozen=True)
class Drift:
    """A file that somebody changed after the series was applied; None: no file."""

    path: str
    original: str | None
    applied: str | None
    found: str | None

    @property
    def sentence(self) -> str:
        if self.found == self.original:
            return (
                f"{self.path} has its original content again (sha256 {self.found}, "
                f"applied {self.applied}): apply or revert makes the target whole"
            )
        return (
            f"{self.path} was changed after the series was applied (sha256 "
            f"{self.found or 'of no file'}, applied {self.applied}): undo that change "
            "or reinstall vLLM, then run again"
        )


def original_path(sha256: str) -> str:
    """Where the original with this sum is kept."""
    return f"{FOLDER}/originals/{sha256}"


class Target:
    """A folder that holds the package ``vllm``: site-packages or a checkout.

    Args:
        root: that folder. Every path of ours is relative to it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.package = root / "vllm"
        self.transaction = Transaction(
            root, root / FOLDER, like=self.package / "__init__.py"
        )

    @classmethod
    def find(cls, path: Path | None = None) -> "Target":
        """The target at `path`, or the vLLM that this interpreter would import.

        Args:
            path: a folder that holds ``vllm/``, or the package folder itself.

        Raises:
            SeriesError: there is no vLLM.
        """
        if path is None:
            spec = importlib.util.find_spec("vllm")
            if spec is None or spec.origin is None:
                raise SeriesError(
                    "this Python has no vLLM installed: name one with --target"
                )
            return cls(Path(spec.origin).parents[1])
        path = path.absolute()
        if not path.exists():
            raise SeriesError(f"--target {path} does not exist")
        for root in (path, path.parent):
            package = root / "vllm"
            if path in (root, package) and _is_vllm(package):
                return cls(root)
        raise SeriesError(
            f"--target {path} is not vLLM: neither a folder that holds the package "
            "vllm nor the package itself"
        )

    def read(self, path: str) -> bytes | None:
        return read(self.root / path)

    def original(self, path: str) -> bytes | None:
        """Upstream's content of `path`, whether or not the series is applied.

        Raises:
            SeriesError: the kept original is damaged.
        """
        file = self.journal.files.get(path)
        sha256 = file.original if file else self.journal.records.get(path)
        if file and sha256 is None:
            return None
        if sha256 is None:
            return self.read(path)
        kept = self.read(original_path(sha256))
        if digest(kept) != sha256:
            raise SeriesError(
                f"the original of {path} kept in {self.root / FOLDER} is missing or "
                "damaged: reinstall vLLM"
            )
        return kept

    @property
    def python(self) -> str | None:
        """Whose site-packages it is, such as ``python3.11``, where its path tells."""
        name = self.root.parent.name
        return name if re.fullmatch(r"(python|pypy)\d+\.\d+t?", name) else None

    @cached_property
    def journal(self) -> Journal:
        content = self.read(JOURNAL)
        if content is None:
            return Journal()
        try:
            return Journal.from_bytes(content)
        except (ValueError, KeyError, TypeError) as error:
            raise SeriesError(
                f"{self.root / JOURNAL} cannot be used ({error}): reinstall vLLM"
            ) from error

    @cached_property
    def records(self) -> tuple[str, ...]:
        """RECORDs that list the package; none for a checkout or editable install."""
        found = []
        for folder in sorted(self.root.glob("*.dist-info")):
            path = f"{folder.name}/RECORD"
            if record.lists(self.read(path) or b"", "vllm/__init__.py"):
                found.append(path)
        return tuple(found)

    def drift(self) -> tuple[Drift, ...]:
        """Files that are not as the series left them."""
        drifts = [
            Drift(path, file.original, file.applied, digest(self.read(path)))
            for path, file in self.journal.files.items()
        ]
        if all(drift.found == drift.applied for drift in drifts):
            # Its lines carry sums of the files, so it is right only if they are.
            drifts = [
                Drift(
                    path,
                    original,
                    digest(self.record_with(path, self._entered())),
                    digest(self.read(path)),
                )
                for path, original in self.journal.records.items()
            ]
        return tuple(drift for drift in drifts if drift.found != drift.applied)

    def require_intact(self) -> None:
        """Refuse to go on where a change of somebody else's would be lost."""
        for drift in self.drift():
            if drift.found != drift.original:
                raise SeriesError(drift.sentence)

    def kept(self) -> list[str]:
        """The files of our own folder, but for those of a pending change."""
        return [
            path.relative_to(self.root).as_posix()
            for path in sorted((self.root / FOLDER).rglob("*"))
            if path.is_file() and self.transaction.pending not in path.parents
        ]

    def _entered(self) -> dict[str, bytes]:
        """What the series made in our own folder, and so entered in RECORD."""
        sums = [file.original for file in self.journal.files.values()]
        originals = {
            original_path(s) for s in (*sums, *self.journal.records.values()) if s
        }
        return {
            path: content
            for path in (JOURNAL, IGNORE, *originals)
            if (content := self.read(path)) is not None
        }

    def record_with(self, path: str, files: Mapping[str, bytes]) -> bytes:
        """The original RECORD `path` with lines for `files` and the applied files."""
        applied = {name: self.read(name) or b"" for name in self.journal.files}
        return record.entered(self.original(path) or b"", {**applied, **files})

    def defines(self, path: str, name: str) -> bool:
        """Whether upstream's `path` defines `name`, such as ``Class.method``."""
        body: list[ast.stmt] = []
        content = self.original(path)
        if content and name.rpartition(".")[2].encode() in content:
            body = ast.parse(content).body
        *outer, last = name.split(".")
        for part in outer:
            body = [
                inner
                for node in body
                if isinstance(node, ast.ClassDef) and node.name == part
                for inner in node.body
            ]
        return any(last in _names(node) for node in body)

    @contextmanager
    def locked(self, *, exclusive: bool) -> Iterator[None]:
        """Keep other processes of ours from changing the target meanwhile.

        Raises:
            SeriesError: another one holds it for longer than `LOCK_WAIT_S`.
        """
        handle = os.open(self.package, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _lock(handle, exclusive, self.package)
            self.__dict__.pop("journal", None)
            yield
        finally:
            self.__dict__.pop("journal", None)
            os.close(handle)

    def require_settled(self) -> None:
        if self.transaction.interrupted:
            raise SeriesError(
                f"a change of {self.root} was interrupted: run vllm-rocm-memory apply "
                "to complete it or revert to undo it"
            )


def module_name(path: str) -> str:
    """``vllm/a/b.py`` or ``vllm/a/b.cpython-311.so`` -> ``vllm.a.b``."""
    *package, name = PurePosixPath(path).parts
    last = name.partition(".")[0]
    return ".".join(package if last == "__init__" else [*package, last])


def _is_vllm(package: Path) -> bool:
    return all((package / name).is_file() for name in ("__init__.py", "envs.py"))


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {target.id for target in targets if isinstance(target, ast.Name)}
    return set()


def _lock(handle: int, exclusive: bool, package: Path) -> None:
    mode = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(handle, mode)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise SeriesError(
                    f"another vllm-rocm-memory process is changing {package}: run "
                    "again when it has finished"
                ) from None
            time.sleep(0.05)
