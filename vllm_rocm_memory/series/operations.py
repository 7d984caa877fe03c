# SPDX-License-Identifier: Apache-2.0
"""What the commands do: status, apply, revert, diff."""

import difflib
import enum
import io
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_rocm_memory.series import SeriesError, record, verification
from vllm_rocm_memory.series.bases import UnknownBaseError, recognise
from vllm_rocm_memory.series.compatibility import missing_names
from vllm_rocm_memory.series.definition import AddBuilt, Patch, Replace, Series
from vllm_rocm_memory.series.steps import results
from vllm_rocm_memory.series.target import (
    FOLDER,
    IGNORE,
    JOURNAL,
    AppliedFile,
    AppliedPatch,
    Journal,
    Target,
    module_name,
    original_path,
)
from vllm_rocm_memory.series.transaction import digest


class State(enum.StrEnum):
    APPLIED = "applied"
    NOT_APPLIED = "not applied"
    UPSTREAM_HAS_IT = "upstream already has it"
    DRIFTED = "drifted"
    UNKNOWN_BASE = "unknown base"


@dataclass(frozen=True)
class PatchStatus:
    """One row of `status`."""

    name: str
    title: str
    state: State
    reason: str

    @property
    def settled(self) -> bool:
        """Nothing is left to do: the patch is in the target, ours or upstream's."""
        return self.state in (State.APPLIED, State.UPSTREAM_HAS_IT)


@dataclass(frozen=True)
class Outcome:
    """What `apply` or `revert` did, or would do.

    Attributes:
        patches: the patches that the target has afterwards.
        skipped: patches that upstream already has, with the reason.
        changed: the paths below vllm/ that change.
        not_verified: why the result was not verified by import, if so.
        not_importable: module -> error, of those that do not import here with or
            without the series, where the others were verified.
    """

    patches: tuple[str, ...]
    skipped: Mapping[str, str]
    changed: tuple[str, ...]
    not_verified: str | None
    not_importable: Mapping[str, str]


def status(
    target: Target, series: Series, only: Iterable[str] = ()
) -> tuple[PatchStatus, ...]:
    """The state of each patch asked for; changes nothing."""
    patches = series.select(only)
    with target.locked(exclusive=False):
        if target.transaction.interrupted:
            reason = "a change was interrupted: apply completes it, revert undoes it"
            return tuple(
                PatchStatus(patch.name, patch.title, State.NOT_APPLIED, reason)
                for patch in patches
            )
        drifts = {drift.path: drift.sentence for drift in target.drift()}
        return tuple(
            PatchStatus(patch.name, patch.title, *_state(target, series, patch, drifts))
            for patch in patches
        )


def _state(
    target: Target, series: Series, patch: Patch, drifts: Mapping[str, str]
) -> tuple[State, str]:
    applied = target.journal.patches.get(patch.name)
    if applied:
        for path in (*applied.files, *target.journal.records):
            if path in drifts:
                return State.DRIFTED, drifts[path]
        require_python(target, patch)
        if applied.fingerprint != series.fingerprint(patch):
            return (
                State.NOT_APPLIED,
                "an older form of it is applied: apply renews it",
            )
        return State.APPLIED, _applied_reason(target, applied)
    held = skip_reason(target, patch)
    if held:
        return State.UPSTREAM_HAS_IT, held
    require_python(target, patch)
    try:
        return State.NOT_APPLIED, f"base {recognise(series, patch, target)}"
    except UnknownBaseError as error:
        return State.UNKNOWN_BASE, str(error)


def _applied_reason(target: Target, applied: AppliedPatch) -> str:
    base = f"base {applied.base}" if applied.base else "unknown base, allowed"
    if unverified := target.journal.not_verified:
        return f"{base}; not verified by import: {unverified}"
    modules = [module_name(path) for path in applied.files]
    failures = target.journal.not_importable
    sentences = [does_not_import(m, failures[m]) for m in modules if m in failures]
    return "; ".join([base, *sentences])


def does_not_import(module: str, error: str) -> str:
    return f"{module} does not import here: {error}"


def skip_reason(target: Target, patch: Patch) -> str | None:
    """Why `patch` is not needed here: upstream has all that tells of it."""
    for condition in patch.upstream_has:
        if not target.defines(condition.file, condition.defines):
            return None
    found = ", ".join(f"{c.defines} in {c.file}" for c in patch.upstream_has)
    return f"found {found}"


def apply(
    target: Target,
    series: Series,
    only: Iterable[str] = (),
    *,
    allow_unknown_base: bool = False,
    dry_run: bool = False,
) -> Outcome:
    """Add patches to those that the target has, and renew those.

    Raises:
        SeriesError: the target is as it was.
    """
    asked = series.select(only)
    with _changing(target, dry_run):
        skipped = {p.name: has for p in asked if (has := skip_reason(target, p))}
        wanted = tuple(
            patch
            for patch in series.patches
            if (patch in asked or patch.name in target.journal.patches)
            and not skip_reason(target, patch)
        )
        return _change_to(target, series, wanted, allow_unknown_base, dry_run, skipped)


def revert(
    target: Target,
    series: Series,
    only: Iterable[str] = (),
    *,
    dry_run: bool = False,
) -> Outcome:
    """Take patches away; without `only` the target is upstream's to the byte.

    Raises:
        SeriesError: the target is as it was.
    """
    gone = series.select(only)
    with _changing(target, dry_run):
        kept = tuple(
            patch
            for patch in series.patches
            if patch.name in target.journal.patches and patch not in gone
        )
        return _change_to(target, series, kept, True, dry_run, {})


def diff(
    target: Target,
    series: Series,
    only: Iterable[str] = (),
    *,
    allow_unknown_base: bool = False,
) -> str:
    """A unified diff, original to what is applied, or to what would be.

    What is applied is what is on disk, so that a change of somebody else's shows.
    """
    names = tuple(only)
    patches = series.select(names)
    with target.locked(exclusive=False):
        target.require_settled()
        if target.journal.patches and not names:
            after = {path: target.read(path) for path in target.journal.files}
        else:
            patches = tuple(p for p in patches if not skip_reason(target, p))
            for patch in patches:
                require_python(target, patch)
            require_bases(target, series, patches, allow_unknown_base)
            after = {**results(series, patches, target.original)}
        return "".join(
            line
            for path in sorted(after)
            for line in _unified(path, target.original(path), after[path])
        )


def _lines(content: bytes | None) -> list[str]:
    # str.splitlines also splits at form feeds, which git does not.
    return io.StringIO((content or b"").decode(), newline="\n").readlines()


def _is_binary(content: bytes | None) -> bool:
    # Git's own sign; what is no UTF-8 cannot be shown as lines here either.
    try:
        return "\0" in (content or b"").decode()
    except UnicodeDecodeError:
        return True


def _unified(path: str, before: bytes | None, after: bytes | None) -> Iterator[str]:
    if before == after:
        return
    # An empty file has no line to show: git's header tells of it.
    yield f"diff --git a/{path} b/{path}\n"
    if before is None:
        yield "new file mode 100644\n"
    old = "/dev/null" if before is None else f"a/{path}"
    new = "/dev/null" if after is None else f"b/{path}"
    if _is_binary(before) or _is_binary(after):
        yield f"Binary files {old} and {new} differ\n"
        return
    lines = difflib.unified_diff(
        _lines(before),
        _lines(after),
        old,
        new,
    )
    for line in lines:
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


@contextmanager
def _changing(target: Target, dry_run: bool) -> Iterator[None]:
    """Hold the target, settled and intact, and turn system errors into sentences."""
    try:
        with target.locked(exclusive=not dry_run):
            if dry_run:
                target.require_settled()
            else:
                target.transaction.recover()
            target.require_intact()
            yield
    except OSError as error:
        left = (
            "the next apply or revert undoes what was begun"
            if target.transaction.interrupted
            else "the target is left as it was"
        )
        path = error.filename2 or error.filename or target.package
        raise SeriesError(
            f"{path} cannot be changed ({error.strerror or error}): {left}"
        ) from error


def _require_needed(target: Target, series: Series, patches: Iterable[Patch]) -> None:
    """Refuse patches without those whose files they use.

    Raises:
        SeriesError: naming both. A needed patch that upstream has brings no files.
    """
    there: set[str] = set()
    for patch in patches:
        there.add(patch.name)
        for needed in series.select(patch.needs) if patch.needs else ():
            if needed.name in there:
                continue
            uses = f"patch {patch.name} uses files of patch {needed.name}"
            if held := skip_reason(target, needed):
                raise SeriesError(
                    f"{uses}, which upstream has ({held}): this series does not fit "
                    "this vLLM; take a newer one, or choose other patches with --only"
                )
            raise SeriesError(f"{uses}: give --only for both of them, or for none")


def require_python(target: Target, patch: Patch) -> None:
    """Refuse a compiled module where another Python would look for it in vain.

    Raises:
        SeriesError: naming both Pythons. Most checkouts are of no Python at all.
    """
    # lib/pythonX.Y of a CPython, with a "t" behind it for a free-threaded one.
    ours = Path(sysconfig.get_path("stdlib")).name
    if patch.built and target.python not in (None, ours):
        raise SeriesError(
            f"patch {patch.name} brings {patch.built[0].file}, compiled for {ours}, "
            f"and {target.root} belongs to {target.python}: install vllm-rocm-memory "
            "with that Python and run it from there"
        )


def require_bases(
    target: Target, series: Series, patches: tuple[Patch, ...], allow_unknown: bool
) -> dict[str, str | None]:
    """The base of each patch, None for one that is unknown and allowed to be.

    Raises:
        SeriesError: a base is unknown, or a patch lacks another that it needs. A patch
            that was allowed to be on an unknown base needs no further leave.
    """
    _require_needed(target, series, patches)
    bases: dict[str, str | None] = {}
    for patch in patches:
        try:
            bases[patch.name] = recognise(series, patch, target)
        except UnknownBaseError as error:
            applied = target.journal.patches.get(patch.name)
            allowed_before = applied is not None and applied.base is None
            if not allow_unknown and not allowed_before:
                raise SeriesError(
                    f"unknown base for {patch.name}: {error}; --allow-unknown-base "
                    "applies it if every edit and every import still fits"
                ) from error
            bases[patch.name] = None
    return bases


def _change_to(
    target: Target,
    series: Series,
    patches: tuple[Patch, ...],
    allow_unknown_base: bool,
    dry_run: bool,
    skipped: Mapping[str, str],
) -> Outcome:
    """Leave the target with exactly `patches`."""
    for patch in patches:
        require_python(target, patch)
    bases = require_bases(target, series, patches, allow_unknown_base)
    files = results(series, patches, target.original)
    if None in bases.values():
        # An importer of a module of ours may be new, whichever file is unknown.
        for patch in patches:
            _require_compatible(target, patch, files)
    journal = Journal(
        patches={
            patch.name: AppliedPatch(
                series.fingerprint(patch), bases[patch.name], patch.files
            )
            for patch in patches
        },
        files={
            path: AppliedFile(digest(target.original(path)), str(digest(content)))
            for path, content in files.items()
        },
        records={
            path: str(digest(target.original(path)))
            for path in target.records
            if patches
        },
        not_verified=target.journal.not_verified if patches else None,
        not_importable=target.journal.not_importable if patches else {},
    )
    change = _change(target, journal, files)
    if change and not dry_run:
        journal = _carry_out(target, journal, files)
    return Outcome(
        patches=tuple(patch.name for patch in patches),
        skipped=skipped,
        changed=tuple(
            path
            for path in change
            if path.startswith("vllm/") and not path.startswith(f"{FOLDER}/")
        ),
        not_verified=journal.not_verified,
        not_importable=journal.not_importable,
    )


def _require_compatible(
    target: Target, patch: Patch, files: Mapping[str, bytes]
) -> None:
    for step in patch.steps:
        if isinstance(step, AddBuilt | Replace):
            for lost in missing_names(target.root, files, step.file):
                raise SeriesError(
                    f"patch {patch.name} does not fit this vLLM: {lost.importer} takes "
                    f"{lost.name} from {lost.module}, which ours does not have"
                )


def _change(
    target: Target, journal: Journal, files: Mapping[str, bytes]
) -> dict[str, bytes | None]:
    """The paths whose content differs from what `journal` asks for."""
    after: dict[str, bytes | None] = dict.fromkeys(target.kept())
    after |= {path: target.original(path) for path in target.journal.files}
    ours: dict[str, bytes] = {}
    if journal.patches:
        originals = [
            original
            for path in (*files, *journal.records)
            if (original := target.original(path)) is not None
        ]
        ours = {original_path(str(digest(each))): each for each in originals}
        ours |= {IGNORE: b"*\n", JOURNAL: journal.to_bytes()}
    after |= {**ours, **files}
    for path in {*journal.records, *target.journal.records}:
        original = target.original(path)
        if original is not None:
            listed = {**files, **ours} if journal.patches else {}
            after[path] = record.entered(original, listed)
    change = {path: new for path, new in after.items() if new != target.read(path)}
    for path in change:
        if (target.root / path).is_symlink():
            raise SeriesError(
                f"{target.root / path} is a symbolic link: install vLLM with its files "
                "copied instead (uv: --link-mode copy)"
            )
    return change


def _carry_out(target: Target, journal: Journal, files: Mapping[str, bytes]) -> Journal:
    """Install the change, verify it, make it final; returns the journal it leaves."""
    # What stays upstream's imports as before, or does not.
    changed = [p for p, file in journal.files.items() if file.applied != file.original]
    modules = [module_name(path) for path in changed]
    existed = [module_name(path) for path in changed if target.read(path) is not None]
    transaction = target.transaction
    verified = replace(journal, not_verified=None, not_importable={})
    transaction.install(_change(target, verified, files))
    try:
        after = verification.import_failures(target, modules) if modules else {}
    except BaseException:
        transaction.undo()
        raise
    if not after:
        transaction.commit()
        return verified
    transaction.undo()
    before = verification.import_failures(target, existed)
    for module, error in verification.blame(after, before, existed).items():
        raise SeriesError(
            f"the result does not import ({module}: {error}), which is not so without "
            "it: the target is left as it was"
        )
    if len(after) == len(modules):
        partly = replace(verified, not_verified=next(iter(after.values())))
    else:
        partly = replace(verified, not_importable=after)
    transaction.install(_change(target, partly, files))
    transaction.commit()
    return partly
