# SPDX-License-Identifier: Apache-2.0
"""AITER's CustomAllreduce as each release has it, over hipsim.

AITER needs an AMD GPU and differs from release to release in what a capture registers
with the other ranks. What a caller can see of that, the methods with their signatures
and which of them register what, is a table (`aiter_surfaces.toml`, with its sources);
the classes made of it here register with HIP's own calls (`peer_memory`), and their
kernels read the other ranks' memory (`fused_kernels`). No line of AITER is in them.

Note [What a method of the double does]
An *inner* method launches a kernel, with its input registered or copied, as its flag or
its name says. An *outer* one calls an inner one of `self`, so that a subclass can come
between: registered while the stream captures where the table says so, copied otherwise,
and between `capture()` and the capture itself only with results of the right shape. The
rest is written out below by name. An export that fails raises, where AITER's compiled
code ends the process.
"""

import contextlib
import functools
import importlib.machinery
import importlib.metadata
import inspect
import json
import sys
import tempfile
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from vllm_rocm_memory.sim import hipsim

from .fused_kernels import KERNELS, Given, Launch, Tensors
from .peer_memory import PeerMemory, bytes_at, export_memory, node

TABLE = Path(__file__).with_name("aiter_surfaces.toml")

_MODULE = "aiter.dist.device_communicators.custom_all_reduce"
_OUTPUT_FLAG = "registered_output"  # of all_reduce, before 0.1.12
_ALIGNMENT = 16  # bytes, that an input has a multiple of


@dataclass(frozen=True)
class Method:
    """One method, as the table has it.

    Attributes:
        signature: Without `self`.
        kernel: What an inner method launches.
        flag: Its parameter that says whether the input is registered.
        registered: The same for a method without a flag.
        calls: The inner method that an outer one calls; with two, the first registers.
        arguments: Of the inner method, by name: parameters of the outer one or values.
        capturing: What is registered in a capture: "option" (as the instance was made),
            "true" or "false".
        warm_up: What comes back inside `capture()` before the capture: "zeros", "empty"
            or "real" results.
    """

    name: str
    signature: str
    kernel: str = ""
    flag: str = ""
    registered: bool | None = None
    calls: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    capturing: str = ""
    warm_up: str = ""

    @classmethod
    def read(cls, name: str, entry: Mapping[str, Any]) -> "Method":
        calls = entry.get("calls", ())
        values = {
            **entry,
            "calls": (calls,) if isinstance(calls, str) else tuple(calls),
        }
        return cls(name, **values)


@dataclass(frozen=True)
class Surface:
    """What a caller can see of CustomAllreduce in some releases.

    Attributes:
        releases: Of AITER.
        constructor: Its signature without `self`.
        input_buffer: The attribute that holds the registered input buffer.
        methods: By name.
        class_attributes: Others that vLLM reads.
        registers_output: Whether a registered all-reduce registers its output as well.
        made_up: It is of no release.
    """

    releases: tuple[str, ...]
    constructor: str
    input_buffer: str
    methods: Mapping[str, Method]
    class_attributes: Mapping[str, Any]
    registers_output: bool
    made_up: bool

    @property
    def version(self) -> str:
        """Of the distribution that `install` shows."""
        return "99.0" if self.made_up else self.releases[-1]

    def __str__(self) -> str:
        return "-".join(dict.fromkeys((self.releases[0], self.releases[-1])))


@functools.cache
def surfaces(table: Path = TABLE) -> tuple[Surface, ...]:
    """Every distinct surface, oldest first."""
    made: dict[str, Surface] = {}
    methods: dict[str, dict[str, dict[str, Any]]] = {}
    for entry in tomllib.loads(table.read_text())["surface"]:
        # Like another one, with what is given here on top.
        all_given = dict(methods[entry["like"]]) if "like" in entry else {}
        for name, given in entry.get("methods", {}).items():
            all_given[name] = {**all_given.get(name, {}), **given}
        surface = Surface(
            releases=tuple(entry["releases"]),
            constructor=entry["constructor"],
            input_buffer=entry["input_buffer"],
            methods={name: Method.read(name, each) for name, each in all_given.items()},
            class_attributes=entry.get("class_attributes", {}),
            registers_output=entry.get("registers_output", False),
            made_up=entry.get("made_up", False),
        )
        methods |= dict.fromkeys(surface.releases, all_given)
        made |= dict.fromkeys(surface.releases, surface)
    return tuple({id(each): each for each in made.values()}.values())


def surface_of(release: str) -> Surface:
    """The surface of one release of the table."""
    return next(each for each in surfaces() if release in each.releases)


# --- the package ----------------------------------------------------------------------


@contextlib.contextmanager
def install(surface: Surface) -> Iterator[type]:
    """Shows an `aiter` of that surface to imports and to importlib.metadata.

    Another one that is installed or imported is hidden meanwhile.

    Yields:
        Its CustomAllreduce.
    """
    with show(make_class(surface), surface.version) as made:
        yield made


@contextlib.contextmanager
def show(made: type, version: str) -> Iterator[type]:
    """As `install`, with a class that is there already."""
    hidden = {name: sys.modules.pop(name) for name in _modules_of_aiter()}
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, f"amd_aiter-{version}.dist-info")
        record.mkdir()
        record.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.1\nName: amd-aiter\nVersion: {version}\n"
        )
        sys.path.insert(0, folder)
        try:
            _show_modules(made)
            yield made
        finally:
            sys.path.remove(folder)
            for name in _modules_of_aiter():
                del sys.modules[name]
            sys.modules.update(hidden)


def _modules_of_aiter() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "aiter"]


def _show_modules(made: type) -> None:
    names = _MODULE.split(".")
    parent: types.ModuleType | None = None
    for depth in range(1, len(names) + 1):
        name = ".".join(names[:depth])
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module
        if parent is not None:
            setattr(parent, names[depth - 1], module)
        parent = module
    parent.CustomAllreduce = made  # type: ignore[union-attr]


# --- the class ------------------------------------------------------------------------


def make_class(surface: Surface) -> type:
    """CustomAllreduce of that surface.

    Its instances have, beside what the surface says:
        launches: A list of `Launched`, of every launch so far.
        memory: The PeerMemory.

    Raises:
        ValueError: The surface names something that the double does not know.
    """
    members: dict[str, Any] = dict(surface.class_attributes)
    members["_surface"] = surface
    members["__module__"] = _MODULE
    members["__init__"] = _function("__init__", surface.constructor, _construct)
    members["__del__"] = _close
    for method in surface.methods.values():
        members[method.name] = _function(
            method.name, method.signature, _body_of(surface, method)
        )
    return type("CustomAllreduce", (), members)


class Launched(NamedTuple):
    """A launch: by which method, and whether its input was to be registered."""

    method: str
    registered: bool


Body = Callable[..., Any]


def _function(name: str, signature: str, body: Body) -> Callable[..., Any]:
    """A function of that signature, which calls `body(self, **parameters)`."""
    parameters, _, returns = signature.strip().removeprefix("(").rpartition(")")
    scope: dict[str, Any] = {
        **vars(typing),
        "torch": torch,
        "dist": dist,
        "_body": body,
    }
    exec(
        "from __future__ import annotations\n"
        f"def {name}(self, {parameters}){returns}:\n"
        "    parameters = dict(locals())\n"
        "    return _body(parameters.pop('self'), **parameters)",
        scope,
    )
    made: Callable[..., Any] = scope[name]
    return made


def _body_of(surface: Surface, method: Method) -> Body:
    if method.name in _OTHERS:
        return _OTHERS[method.name]
    if method.kernel:
        if method.kernel not in KERNELS:
            raise ValueError(f"{method.name}: there is no kernel {method.kernel!r}")
        return functools.partial(_launch, method=method)
    if method.calls:
        return functools.partial(_pass_on, method=method)
    raise ValueError(f"the double does not know what {method.name} of {surface} does")


def _construct(
    self: Any,
    *,
    group: dist.ProcessGroup,
    device: int | str | torch.device,
    max_size: int,
    enable_register_for_capturing: bool | None = None,
    **others: Any,
) -> None:
    self.disabled = True
    self._IS_CAPTURING = False
    self.launches = []
    self.group = group
    self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
    self.device = torch.device(f"cuda:{device}" if isinstance(device, int) else device)
    self.max_size = max_size
    self.fully_connected = True
    if enable_register_for_capturing is not None:
        self.enable_register_for_capturing = enable_register_for_capturing
        self._wants_registration = enable_register_for_capturing
    self.memory = PeerMemory(group, max_size)
    buffer = _Buffer(self.memory.input_address, max_size)
    if self._surface.input_buffer == "_pool":
        self._pool = {"input": buffer}
    else:
        setattr(self, self._surface.input_buffer, buffer.tensor)
    if self._surface.input_buffer != "_pool" and hasattr(self, "_wants_registration"):
        # Of 0.1.11 alone.
        output = self.memory.new_buffer(max_size)
        self.memory.register_output(output)
        self.output_buffer = bytes_at(output, max_size)
    self.disabled = False


class _Buffer(NamedTuple):
    data_ptr: int
    max_size: int

    @property
    def tensor(self) -> torch.Tensor:
        return bytes_at(self.data_ptr, self.max_size)


# --- methods that launch and methods that call them -----------------------------------

_library = torch.library.Library("aiter_double", "FRAGMENT")


def _define(kernel: str) -> None:
    _library.define(
        f"{kernel}(int node, int[] slots, Tensor input, Tensor[] operands, "
        "Tensor(a!)[] results, bool copies, str options) -> ()"
    )
    _library.impl(kernel, functools.partial(_run, kernel), "CPU")


def _run(
    kernel: str,
    number: int,
    slots: list[int],
    data: torch.Tensor,
    operands: list[torch.Tensor],
    results: list[torch.Tensor],
    copies: bool,
    options: str,
) -> None:
    memory = node(number)
    chosen = json.loads(options)
    _, compute = KERNELS[kernel]

    def values(rank: int, sources: Tensors, given: Sequence[torch.Tensor]) -> Tensors:
        return compute(rank, sources, given, chosen)[: len(results)]

    if copies:
        memory.copy_in(data)
    memory.run(
        f"{kernel} of {tuple(data.shape)} {data.dtype} with {options}",
        slots,
        data,
        operands,
        results,
        values,
    )


for _kernel in KERNELS:
    _define(_kernel)


def _launch(self: Any, *, method: Method, **given: Any) -> Any:
    data = next(iter(given.values()))
    registered = bool(given[method.flag] if method.flag else method.registered)
    self.launches.append(Launched(method.name, registered))
    launch = KERNELS[method.kernel][0](self.world_size, data, given)
    _launch_kernel(self, method.kernel, data, launch, registered, given)
    return launch.returned


def _launch_kernel(
    self: Any,
    kernel: str,
    data: torch.Tensor,
    launch: Launch,
    registered: bool,
    given: Given,
) -> None:
    memory: PeerMemory = self.memory
    if registered and not data.is_contiguous():
        raise RuntimeError("a registered input is contiguous")
    slots = [memory.slot(data.data_ptr() if registered else memory.input_address)]
    output_too = self._surface.registers_output and registered
    if kernel == "all_reduce" and given.get(_OUTPUT_FLAG, output_too):
        slots.append(memory.output_slot(launch.results[0].data_ptr()))
    operation = getattr(torch.ops.aiter_double, kernel)
    operation(
        memory.number,
        slots,
        data,
        launch.operands,
        launch.results,
        not registered,
        json.dumps(launch.options),
    )


def _pass_on(self: Any, *, method: Method, **given: Any) -> Any:
    inner = self._surface.methods[method.calls[-1]]
    arguments = _arguments_of(method, given)
    data = next(iter(given.values()))
    if self.disabled or not _takes(self, method, inner.kernel, data, given):
        return None
    registered = False
    if self._IS_CAPTURING:
        if torch.cuda.is_current_stream_capturing():
            registered = _registers(self, method, data)
        elif method.warm_up != "real":
            return _warm_up(self, method, inner, arguments)
    return _call_inner(self, method, arguments, registered)


def _arguments_of(method: Method, given: Given) -> dict[str, Any]:
    return {
        name: given.get(value, value) if isinstance(value, str) else value
        for name, value in method.arguments.items()
    }


def _takes(
    self: Any, method: Method, kernel: str, data: torch.Tensor, given: Given
) -> bool:
    if kernel in ("all_gather", "qknorm", "qknorm_rope"):
        return True  # whoever calls has asked
    if kernel == "reduce_scatter":
        return _should_scatter(self, inp=data, dim=given.get("dim", 0))
    if "packed_input" in method.name:
        return _fits(self, inp=data)
    return _should_reduce(self, inp=data)


def _registers(self: Any, method: Method, data: torch.Tensor) -> bool:
    if method.capturing != "option":
        return method.capturing == "true"
    registers = bool(self.enable_register_for_capturing)
    if registers and _defers(self):
        # Before that release the error comes at the end of `capture()`.
        try:
            export_memory(data.data_ptr())
        except hipsim.HipError as error:
            raise RuntimeError(f"an input cannot be registered: {error}") from error
    return registers


def _defers(self: Any) -> bool:
    """Whether it decides as a capture begins what that registers, as from 0.1.26."""
    return bool(getattr(type(self), "defers_capture_registration", False))


def _warm_up(
    self: Any, method: Method, inner: Method, arguments: dict[str, Any]
) -> Any:
    parameters = inspect.signature(getattr(type(self), inner.name)).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    data = next(iter(arguments.values()))
    given = defaults | arguments
    launch = KERNELS[inner.kernel][0](self.world_size, data, given)
    if method.warm_up == "zeros":
        for result in launch.results:
            result.zero_()
    return launch.returned


def _call_inner(
    self: Any, method: Method, arguments: dict[str, Any], registered: bool
) -> Any:
    name = method.calls[0] if registered else method.calls[-1]
    inner = self._surface.methods[name]
    function = getattr(self, name)
    parameters = inspect.signature(function).parameters
    if inner.flag:
        arguments[inner.flag] = registered
    if _OUTPUT_FLAG in parameters:
        arguments[_OUTPUT_FLAG] = registered
    positional = []
    # As callers write it: in order as far as that goes, and always the flag by name.
    for parameter in parameters.values():
        if (
            parameter.kind is parameter.KEYWORD_ONLY
            or parameter.name not in arguments
            or (parameter.name == inner.flag and not self._surface.made_up)
        ):
            break
        positional.append(arguments.pop(parameter.name))
    return function(*positional, **arguments)


# --- the rest of the class ------------------------------------------------------------


def _fits(self: Any, *, inp: torch.Tensor, prefill_support: bool = False) -> bool:
    limit = self.max_size // 2 if prefill_support else self.max_size
    return not self.disabled and inp.nbytes % _ALIGNMENT == 0 and inp.nbytes <= limit


def _should_reduce(
    self: Any, *, inp: torch.Tensor, prefill_support: bool = False
) -> bool:
    fits = _fits(self, inp=inp, prefill_support=prefill_support)
    return fits and inp.is_contiguous()


def _should_gather(self: Any, *, inp: torch.Tensor) -> bool:
    limit = self.max_size // (2 * self.world_size)
    return _should_reduce(self, inp=inp) and inp.nbytes <= limit


def _should_scatter(self: Any, *, inp: torch.Tensor, dim: int) -> bool:
    inside = -inp.dim() <= dim < inp.dim()
    return (
        _should_reduce(self, inp=inp)
        and inside
        and inp.shape[dim] % self.world_size == 0
    )


@contextlib.contextmanager
def _capture(self: Any) -> Iterator[None]:
    before = getattr(self, "enable_register_for_capturing", None)
    if _defers(self):
        self.enable_register_for_capturing = self._wants_registration
    self._IS_CAPTURING = True
    failed = True
    try:
        yield
        failed = False
    finally:
        self._IS_CAPTURING = False
        if _defers(self):
            self.enable_register_for_capturing = before
        if not self.disabled and not (failed and _defers(self)):
            self.register_graph_buffers()


def _capture_method(self: Any) -> AbstractContextManager[None]:
    return _capture(self)


def _register_graph_buffers(self: Any) -> None:
    self.memory.register_captured()


def _register_buffer(self: Any, **given: Any) -> None:
    (tensor,) = given.values()
    self.memory.register(tensor.data_ptr())


def _register_output(self: Any, **given: Any) -> None:
    (tensor,) = given.values()
    self.memory.register_output(tensor.data_ptr())


def _moe_buffer(
    self: Any, *, num_tokens: int, hidden_dim: int, dtype: torch.dtype
) -> torch.Tensor | None:
    size = num_tokens * hidden_dim * dtype.itemsize
    if self.disabled or size % _ALIGNMENT or size > self.max_size:
        return None
    buffer = bytes_at(self.memory.input_address, size)
    return buffer.view(dtype).view(num_tokens, hidden_dim)


def _moe_all_reduce(
    self: Any, *, moe_out: torch.Tensor, out: torch.Tensor | None = None
) -> Any:
    # Whether the stream captures or not: the input is the registered buffer itself.
    flag = self._surface.methods["all_reduce"].flag
    return self.all_reduce(moe_out, out=out, **{flag: True})


def _custom_moe_all_reduce(
    self: Any, *, moe_out: torch.Tensor, out: torch.Tensor | None = None
) -> Any:
    if not _fits(self, inp=moe_out):
        return None
    if self._IS_CAPTURING and not torch.cuda.is_current_stream_capturing():
        return torch.zeros_like(moe_out) if out is None else out.zero_()
    return self.fused_moe_out_all_reduce(moe_out, out=out)


def _close(self: Any) -> None:
    self.disabled = True
    if hasattr(self, "memory"):
        self.memory.close()


_OTHERS: Mapping[str, Body] = {
    "should_custom_ar": _should_reduce,
    "should_custom_ar_bytes": _fits,
    "should_custom_ag": _should_gather,
    "should_custom_rs": _should_scatter,
    "capture": _capture_method,
    "close": _close,
    "register_graph_buffers": _register_graph_buffers,
    "register_buffer": _register_buffer,
    "register_input_buffer": _register_buffer,
    "register_output_buffer": _register_output,
    "moe_out_registered_buffer": _moe_buffer,
    "fused_moe_out_all_reduce": _moe_all_reduce,
    "custom_fused_moe_out_all_reduce": _custom_moe_all_reduce,
}
