# SPDX-License-Identifier: Apache-2.0
"""Running the steps of patches over the original files, in memory."""

from collections.abc import Callable, Iterable

from vllm_rocm_memory.series import SeriesError
from vllm_rocm_memory.series.definition import (
    Add,
    AddBase,
    AddBuilt,
    Edit,
    Patch,
    Register,
    Replace,
    Series,
    Step,
)


def results(
    series: Series,
    patches: Iterable[Patch],
    original: Callable[[str], bytes | None],
) -> dict[str, bytes]:
    """The files that `patches` touch, by path, as they leave them.

    A file that no step has anything to do in is among them, unchanged: that this is so
    depends on its content as much as a change does.

    Args:
        series: where our files come from.
        patches: run in this order, each on what the ones before it left.
        original: upstream's content of a path, None where there is no such file.

    Raises:
        SeriesError: a step does not fit the originals.
    """
    files: dict[str, bytes] = {}
    for patch in patches:
        for step in patch.steps:
            before = files[step.file] if step.file in files else original(step.file)
            try:
                files[step.file] = _run(series, step, before)
            except (SeriesError, SyntaxError) as error:
                raise SeriesError(
                    f"patch {patch.name} does not fit {step.file}: {error}"
                ) from error
    return files


def _run(series: Series, step: Step, before: bytes | None) -> bytes:
    if isinstance(step, Add | AddBuilt):
        if before is not None:
            raise SeriesError("the file to add exists already")
        return series.content(step)
    if before is None:
        raise SeriesError("there is no such file")
    if isinstance(step, Replace):
        return series.content(step)
    after = _edited(step, before)
    compile(after, step.file, "exec", dont_inherit=True)
    return after


def _edited(step: Edit | AddBase | Register, before: bytes) -> bytes:
    # libcst takes longer to load than everything that status does.
    from vllm_rocm_memory.series import edits

    if isinstance(step, Edit):
        return edits.edit(
            before,
            function=step.function,
            operation=step.operation,
            text=step.text,
            anchor=step.anchor,
            imports=step.imports,
            unless=step.unless,
        )
    if isinstance(step, AddBase):
        return edits.add_base(
            before, class_name=step.class_name, base=step.base, imports=step.imports
        )
    return edits.register(
        before,
        key=step.key,
        mapping=step.mapping,
        value=step.value,
        set_name=step.set,
        comment=step.comment,
    )
