# SPDX-License-Identifier: Apache-2.0
"""The series as patch files for `git am`, generated from a target."""

import os
import subprocess
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from vllm_rocm_memory.series import SeriesError
from vllm_rocm_memory.series.definition import Patch, Series
from vllm_rocm_memory.series.operations import require_bases, skip_reason
from vllm_rocm_memory.series.steps import results
from vllm_rocm_memory.series.target import Target

# Who sends the patches where git does not know the user.
_SENDER = {"user.name": "vllm-rocm-memory", "user.email": "vllm-rocm-memory@localhost"}


def export(
    target: Target,
    series: Series,
    folder: Path,
    only: Iterable[str] = (),
    *,
    allow_unknown_base: bool = False,
) -> list[Path]:
    """Write one file a patch into `folder`, in the order in which they apply.

    Compiled modules are left out; the text of their patch says where the source lies.

    They apply to the vLLM that `target` was before the series: git compares the
    touched files only. A patch that has nothing to do there gets no file: `git am`
    would stop at it.

    Raises:
        SeriesError: git is not there, `folder` holds patches already or cannot be
            written, or the series does not fit the target.
    """
    patches = series.select(only)
    if any(folder.glob("*.patch")):
        raise SeriesError(f"{folder} holds patch files already: name an empty folder")
    with target.locked(exclusive=False):
        target.require_settled()
        patches = tuple(p for p in patches if not skip_reason(target, p))
        require_bases(target, series, patches, allow_unknown_base)
        texts = tuple(
            replace(p, steps=tuple(s for s in p.steps if s not in p.built))
            for p in patches
        )
        stages = list(_stages(series, texts, target))
        originals = {path: target.original(path) for each in stages for path in each}
    with tempfile.TemporaryDirectory() as scratch:
        git = _Repository(Path(scratch))
        tree = {p: c for p, c in originals.items() if c is not None}
        git.commit(tree, "base")
        count = 0
        for patch, files in zip(patches, stages, strict=True):
            before, tree = tree, {**tree, **files}
            if tree != before:
                git.commit(files, _message(patch))
                count += 1
        return git.format(count, folder)


def _stages(
    series: Series, patches: Iterable[Patch], target: Target
) -> Iterator[dict[str, bytes]]:
    """What each patch makes of what the ones before it left."""
    files: dict[str, bytes] = {}

    def there(path: str) -> bytes | None:
        return files[path] if path in files else target.original(path)

    for patch in patches:
        stage = results(series, [patch], there)
        files |= stage
        yield stage


def _message(patch: Patch) -> str:
    links = "".join(f"Link: {link}\n" for link in patch.upstream)
    paragraphs = [patch.title, *_filled(patch.why), *_filled(patch.how)]
    for step in patch.built:
        paragraphs += _filled(
            f"This patch does not carry the compiled module {step.module}, which the "
            f"project vllm-rocm-memory builds from its {', '.join(step.sources)}."
        )
    paragraphs += _filled(f"Not needed any more when {patch.drop_when}")
    return "\n\n".join([*paragraphs, links])


def _filled(text: str) -> list[str]:
    """Paragraphs wrapped as git's log is; indented or listed ones stay as they are."""
    return [
        part if part.startswith((" ", "-", "*")) else textwrap.fill(part, 72)
        for part in text.strip().split("\n\n")
    ]


class _Repository:
    """A scratch repository that turns file contents into patch files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # A hook's GIT_DIR would lead elsewhere.
        self.environment = {
            key: value for key, value in os.environ.items() if key[:4] != "GIT_"
        }
        sender = {key: self._setting(key) or value for key, value in _SENDER.items()}
        # The user's hooks, signing and line endings have no say in the result.
        self.environment["GIT_CONFIG_GLOBAL"] = os.devnull
        self.environment["GIT_CONFIG_NOSYSTEM"] = "1"
        self._run("init", "--quiet")
        for key, value in sender.items():
            self._run("config", key, value)

    def commit(self, files: Mapping[str, bytes], message: str) -> None:
        for path, content in files.items():
            file = self.folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        self._run("add", "--force", "--all")
        # The base is empty where every patch only adds files.
        self._run("commit", "--quiet", "--allow-empty", "--file=-", text=message)

    def format(self, count: int, folder: Path) -> list[Path]:
        output = self._run(
            "format-patch",
            "--no-signature",
            "--zero-commit",
            f"--output-directory={folder.absolute()}",
            f"-{count}",
        )
        return [Path(line) for line in output.splitlines()]

    def _setting(self, key: str) -> str:
        return self._git("config", "--get", key).stdout.strip()

    def _run(self, *arguments: str, text: str = "") -> str:
        process = self._git(*arguments, text=text)
        if process.returncode != 0:
            raise SeriesError(f"git {arguments[0]} failed: {process.stderr.strip()}")
        return process.stdout

    def _git(self, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                ["git", *arguments],
                cwd=self.folder,
                env=self.environment,
                input=text,
                capture_output=True,
                text=True,
            )
        except FileNotFoundError as error:
            raise SeriesError("export needs git: put it on the path") from error
