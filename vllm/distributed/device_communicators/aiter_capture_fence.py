# SPDX-License-Identifier: Apache-2.0
"""AITER's CustomAllreduce, kept from registering what a graph capture hands it.

Note [AITER capture fence]
Peers of a collective that was captured as registered read its input where it lies, and
the end of `capture()` exports an IPC handle of it. Memory of the cuMem graph pool has
none: `hipIpcGetMemHandle` refuses virtual memory, or returns what no peer can open. An
unregistered collective copies its input into the IPC buffer that AITER exchanged at
construction, which a capture records like any copy.

AITER's option `enable_register_for_capturing` chooses between the two, but which of its
methods ask it depends on the release, and a caller may say "registered" as well. So the
fence stands where all of them pass: in the methods that are told whether their input is
registered. They are known by their signatures, so that methods of a later release are
covered; they are overridden in a subclass, so that AITER's calls on itself are covered
and what vLLM reads of the type stays.

An input inside of AITER's own buffer is registered already, and may stay so. But from
0.1.12 on a registered all-reduce registers its output, too, which a capture allocates
from the graph pool. The input is then cloned, because a copy within the buffer would
overlap, and copied like any other.
"""

import importlib.metadata
import inspect
import re
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch

Method = Callable[..., Any]

# The constructor takes it from this release of ROCm/aiter on.
OPTION, OPTION_SINCE = "enable_register_for_capturing", "0.1.11"

# Parameters that say whether a tensor is registered: registered, registered_input, ...
_FLAG = re.compile(r"(\w+_)?registered(_inp|_input|_(?P<output>out|output))?")
# What parameters for results are called.
_OUTPUTS = {"out", "output"}

_REMEDY = (
    "set VLLM_ROCM_USE_AITER_CUSTOM_AR=0 for vLLM's own all-reduce, or leave "
    "--sleep-mode-offload-cudagraph out"
)


def aiter_version() -> str:
    """The version of the installed amd-aiter, "of unknown version" without metadata.

    For messages only: the version of a build from source does not order releases.
    """
    try:
        return importlib.metadata.version("amd-aiter")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def fence(allreduce: type) -> type:
    """Make a subclass of AITER's class that registers no tensor of its callers'.

    Args:
        allreduce: `CustomAllreduce` of any release.

    Returns:
        A class to construct with `enable_register_for_capturing=False`. Its attribute
        `fenced_methods` names the methods that could register.

    Raises:
        RuntimeError: The release is older than 0.1.11, or its methods do not show how
            they are told to copy.

    """
    methods = dict(_methods(allreduce))
    fenced = {}
    for name, method in methods.items():
        if (override := _override(name, method, methods)) is not None:
            fenced[name] = override
    if not _takes_option(allreduce) or "all_reduce" not in fenced:
        raise RuntimeError(
            "--sleep-mode-offload-cudagraph needs AITER's custom all-reduce to copy "
            "what graphs capture, because memory that sleeps cannot be registered for "
            f"IPC. AITER can from {OPTION_SINCE} on, and the installed one is "
            f"{aiter_version()}: install a newer amd-aiter, {_REMEDY}."
        )
    namespace = {**fenced, "fenced_methods": tuple(fenced)}
    return type(f"Fenced{allreduce.__name__}", (allreduce,), namespace)


def _takes_option(allreduce: type) -> bool:
    parameters = inspect.signature(allreduce).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    return OPTION in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _methods(allreduce: type) -> Iterator[tuple[str, Method]]:
    """The functions that are called on instances, by name, in alphabetical order."""
    for name in dir(allreduce):
        method = inspect.getattr_static(allreduce, name)
        if inspect.isfunction(method) and not name.startswith("__"):
            yield name, method


def _override(name: str, method: Method, methods: dict[str, Method]) -> Method | None:
    """What takes the method's place; None if it cannot register anything."""
    first, *others = _parameters(method).values() or (None,)
    if first is None:
        return None
    if re.fullmatch(r"register_(\w+_)?buffer", name):
        return _without_cumem(name, method)
    flags = [parameter.name for parameter in others if _is_flag(parameter)]
    for flag in flags:
        method = _unregistered(name, method, flag)
    if name.endswith("_reg"):
        return _unregistered_twin(name, method, methods)
    return method if flags else None


def _parameters(method: Method) -> dict[str, inspect.Parameter]:
    """Those after `self`, by name."""
    return dict(list(inspect.signature(method).parameters.items())[1:])


def _is_flag(parameter: inspect.Parameter) -> bool:
    return _FLAG.fullmatch(parameter.name) is not None and parameter.default in (
        inspect.Parameter.empty,
        None,
        False,
        True,
    )


def _unregistered(name: str, method: Method, flag: str) -> Method:
    """The method with a flag that counts for AITER's own buffer alone."""
    parameters = _parameters(method)
    default = parameters[flag].default
    position = list(parameters).index(flag)
    by_name_only = parameters[flag].kind is inspect.Parameter.KEYWORD_ONLY
    match = _FLAG.fullmatch(flag)
    of_output = match is not None and match["output"] is not None
    prepare = _copied(name, method)

    @wraps(method)
    def fenced(self: Any, *args: Any, **kwargs: Any) -> Any:
        by_position = not by_name_only and position < len(args)
        says = args[position] if by_position else kwargs.get(flag, default)
        # With None the method decides.
        if not says and says is not None:
            return method(self, *args, **kwargs)
        if not of_output:
            if (prepared := prepare(self, args, kwargs)) is None:
                return method(self, *args, **kwargs)
            args, kwargs = prepared
        if by_position:
            args = (*args[:position], False, *args[position + 1 :])
        else:
            kwargs = {**kwargs, flag: False}
        return method(self, *args, **kwargs)

    return fenced


def _unregistered_twin(name: str, method: Method, methods: dict[str, Method]) -> Method:
    """`X_reg`, which hands over to `X_unreg`."""
    signature = inspect.signature(method)
    prepare = _copied(name, method)
    twin = name.removesuffix("reg") + "unreg"
    has_twin = twin in methods and (
        _parameters(method).keys() <= _parameters(methods[twin]).keys()
    )

    @wraps(method)
    def fenced(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (prepared := prepare(self, args, kwargs)) is None:
            return method(self, *args, **kwargs)
        if not has_twin:
            raise RuntimeError(
                f"{name} of AITER {aiter_version()} registers its input for IPC, and "
                f"there is no {twin} that copies it: {_REMEDY}."
            )
        bound = signature.bind(self, *prepared[0], **prepared[1])
        bound.apply_defaults()
        _, *given = bound.arguments.items()
        return getattr(self, twin)(**dict(given))

    return fenced


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _copied(
    name: str, method: Method
) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], _Arguments | None]:
    """What a call is made with to copy its input, the first parameter.

    None if it may stay registered. Raises a ValueError if it fits in no way.
    """
    signature = inspect.signature(method)
    first = next(iter(_parameters(method)))
    outputs = _OUTPUTS & signature.parameters.keys()

    def prepare(
        self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Arguments | None:
        given = signature.bind(self, *args, **kwargs).arguments
        tensor = given[first]
        start, size = _own_buffer(self)
        if tensor.nbytes > size:
            raise ValueError(
                f"AITER's {name} was given {tensor.nbytes} bytes, and with "
                "--sleep-mode-offload-cudagraph it copies them into its IPC buffer of "
                f"{size}: the caller must not hand over more. Until it does not, "
                f"{_REMEDY}."
            )
        if not start <= tensor.data_ptr() <= start + size - tensor.nbytes:
            return args, kwargs
        if all(_is_outside_pools(given.get(output)) for output in outputs):
            return None
        if args:
            return (tensor.clone(), *args[1:]), kwargs
        return args, {**kwargs, first: tensor.clone()}

    return prepare


def _own_buffer(allreduce: Any) -> tuple[int, int]:
    """Address and bytes of the buffer for inputs that the ranks have exchanged."""
    if hasattr(allreduce, "_pool"):
        buffer = allreduce._pool["input"]
        return buffer.data_ptr, buffer.max_size
    buffer = allreduce.input_buffer  # before 0.1.12
    return buffer.data_ptr(), buffer.nbytes


def _is_outside_pools(output: torch.Tensor | None) -> bool:
    """Whether an output was given, and can be registered."""
    return output is not None and _pool_of(output) is None


def _pool_of(tensor: torch.Tensor) -> str | None:
    """The tag of the cuMem memory that a tensor lies in."""
    from vllm.device_allocator.cumem import CuMemAllocator

    pointer = tensor.data_ptr()
    for start, data in list(CuMemAllocator.get_instance().pointer_to_data.items()):
        if start <= pointer < start + data.handle[1]:
            return data.tag
    return None


def _without_cumem(name: str, method: Method) -> Method:
    """The method, by which a caller registers a tensor, for other memory only."""
    signature = inspect.signature(method)
    first = next(iter(_parameters(method)))

    @wraps(method)
    def fenced(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = signature.bind(self, *args, **kwargs).arguments[first]
        if (pool := _pool_of(tensor)) is not None:
            raise RuntimeError(
                f"AITER's {name} was given memory of sleep mode's pool {pool!r}, which "
                "cannot be registered for IPC: hand over a tensor from outside of it, "
                f"{_REMEDY}."
            )
        return method(self, *args, **kwargs)

    return fenced
