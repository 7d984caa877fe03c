# SPDX-License-Identifier: Apache-2.0
"""What the checks look at."""

import os
import shlex
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from vllm_rocm_memory.doctor.children import Child
from vllm_rocm_memory.doctor.source import import_file
from vllm_rocm_memory.series import SeriesError
from vllm_rocm_memory.series.definition import Series, load
from vllm_rocm_memory.series.target import Target

if TYPE_CHECKING:
    from vllm_rocm_memory.doctor.facts import RuntimeFacts, ServingFacts

NO_ARGUMENTS = "no arguments of `vllm serve` were given"
RUNTIME_PROBE = "vllm_rocm_memory.doctor.runtime_probe"
SERVING_PROBE = "vllm_rocm_memory.doctor.serving_probe"
IMPORT_PROBE = "vllm_rocm_memory.doctor.import_probe"
RUNTIME_TIMEOUT_S = 120.0
SERVING_TIMEOUT_S = 120.0
_Facts = TypeVar("_Facts")
_Answer = Callable[[], dict[str, Any] | str]


def _probe_runtime(machine: "Machine") -> "Callable[[], RuntimeFacts | str]":
    from vllm_rocm_memory.doctor.facts import RuntimeFacts

    wait = start(machine, RUNTIME_PROBE, (), machine.timeout_s or RUNTIME_TIMEOUT_S)
    return lambda: _facts(RuntimeFacts.from_json, wait())


def _probe_serving(machine: "Machine") -> "Callable[[], ServingFacts | str]":
    from vllm_rocm_memory.doctor.facts import ServingFacts

    if not machine.serve_arguments:
        return lambda: NO_ARGUMENTS
    arguments = machine.serve_arguments
    wait = start(
        machine, SERVING_PROBE, arguments, machine.timeout_s or SERVING_TIMEOUT_S
    )
    return lambda: _facts(ServingFacts.from_json, wait())


def _probe_import(machine: "Machine") -> Callable[[], str | None]:
    if machine.target is None or machine.foreign:
        return lambda: None
    wait = start(machine, IMPORT_PROBE, (), machine.timeout_s or RUNTIME_TIMEOUT_S)

    def problem() -> str | None:
        answer = wait()
        return answer if isinstance(answer, str) else answer["problem"]

    return problem


@dataclass(frozen=True)
class Machine:
    """A machine, a vLLM on it, and how it is going to be served.

    As a context it has its probes start at once, side by side, and ends them.

    Attributes:
        root: where ``proc`` and ``sys`` are.
        environment: the variables that a server would be started with.
        target: the vLLM; None where there is none.
        series: what `target` should have.
        serve_arguments: those of ``vllm serve``, without these two words.
        timeout_s: how long a probe may take; None for the usual limits.
        probe_runtime: begins to ask a process of its own what the GPU's runtime can
            do; what it returns waits for the answer.
        probe_serving: the same of what vLLM makes of `serve_arguments`.
        probe_import: the same of why ``import vllm`` fails, None where it works.
    """

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    target: Target | None = None
    series: Series = field(default_factory=load)
    serve_arguments: tuple[str, ...] = ()
    timeout_s: float | None = None
    probe_runtime: "Callable[[Machine], Callable[[], RuntimeFacts | str]]" = (
        _probe_runtime
    )
    probe_serving: "Callable[[Machine], Callable[[], ServingFacts | str]]" = (
        _probe_serving
    )
    probe_import: "Callable[[Machine], Callable[[], str | None]]" = _probe_import
    children: list[Child] = field(default_factory=list, init=False, repr=False)

    def __enter__(self) -> Self:
        # Each is begun where it is first looked up.
        _ = self._serving, self._runtime, self._import
        return self

    def __exit__(self, *exception: object) -> None:
        for child in self.children:
            child.end()

    @cached_property
    def _runtime(self) -> "Callable[[], RuntimeFacts | str]":
        return self.probe_runtime(self)

    @cached_property
    def _serving(self) -> "Callable[[], ServingFacts | str]":
        return self.probe_serving(self)

    @cached_property
    def _import(self) -> Callable[[], str | None]:
        return self.probe_import(self)

    @cached_property
    def runtime(self) -> "RuntimeFacts | str":
        """The runtime's facts, or why there are none."""
        return self._runtime()

    @cached_property
    def serving(self) -> "ServingFacts | str":
        """The facts of the server that would start, or why there are none."""
        return self._serving()

    @cached_property
    def import_problem(self) -> str | None:
        """Why the target cannot be imported; None where it can, or was not asked."""
        return self._import()

    @property
    def foreign(self) -> str | None:
        """Why no process can be asked about the target; None where one can."""
        ours = f"python{sys.version_info.major}.{sys.version_info.minor}"
        if self.target is None or self.target.python in (None, ours):
            return None
        return (
            f"{self.target.root} belongs to {self.target.python}, and this is "
            f"{ours}: run vllm-rocm-memory with that Python"
        )

    def read(self, path: str) -> str | None:
        """The text of a file below `root`, None where it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace")
        except OSError:
            return None

    def series_module(self, path: str) -> ModuleType:
        """A file of the series, such as ``vllm/platforms/hip_runtime.py``, imported.

        It is the series' own, so that the target needs to be neither patched nor
        whole. The file must not import vLLM.
        """
        return import_file(self.series.files / path)

    def command(self, words: str) -> str:
        """How ``vllm-rocm-memory`` is to be called for this target."""
        if self.target is None or _is_default(self.target):
            return f"vllm-rocm-memory {words}"
        where = shlex.quote(str(self.target.package))
        return f"vllm-rocm-memory {words} --target {where}"

    def python(self, statement: str) -> str:
        """How Python is to be called so that this target is its vLLM."""
        command = f"{sys.executable} -P -c {shlex.quote(statement)}"
        if self.target is None or _is_default(self.target):
            return command
        return f"PYTHONPATH={shlex.quote(str(self.target.root))} {command}"


def _is_default(target: Target) -> bool:
    try:
        return Target.find().root.samefile(target.root)
    except (SeriesError, OSError):
        return False


def ask(
    machine: Machine, module: str, arguments: Sequence[str], timeout_s: float
) -> dict[str, Any] | str:
    """Run `module` in a process of its own, which a driver may hang or crash.

    Returns:
        The JSON object in the last line that holds one, or why there is none.
    """
    return start(machine, module, arguments, timeout_s)()


def start(
    machine: Machine, module: str, arguments: Sequence[str], timeout_s: float
) -> _Answer:
    """Begin what `ask` does; the result waits for the answer, once."""
    if reason := machine.foreign:
        return lambda: reason
    try:
        child = Child(module, arguments, _child_environment(machine), timeout_s)
    except OSError as error:
        sentence = f"{module} cannot be started: {error}"
        return lambda: sentence
    machine.children.append(child)
    return child.answer


def _child_environment(machine: Machine) -> dict[str, str]:
    """The environment in which the target is the vLLM, and we are found."""
    environment = dict(machine.environment)
    wanted = [machine.target.root] if machine.target else []
    wanted.append(Path(__file__).parents[2])
    # These are found anyway, and would come before the standard library.
    own = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    paths = [str(path) for path in wanted if str(path) not in own]
    if paths:
        paths += [path for path in [environment.get("PYTHONPATH")] if path]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def _facts(
    from_json: Callable[[dict[str, Any]], _Facts], answer: dict[str, Any] | str
) -> _Facts | str:
    if isinstance(answer, str):
        return answer
    try:
        return from_json(answer)
    except (KeyError, TypeError, ValueError) as error:
        return f"its answer is not understood ({type(error).__name__}: {error})"
