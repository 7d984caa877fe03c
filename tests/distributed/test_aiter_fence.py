# SPDX-License-Identifier: Apache-2.0
"""What the capture fence makes of a class, and what vLLM's wrapper makes of that."""

import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.distributed.device_communicators import (
    aiter_capture_fence,
    aiter_custom_all_reduce,
)
from vllm.distributed.device_communicators.aiter_capture_fence import fence
from vllm.distributed.device_communicators.aiter_custom_all_reduce import (
    AiterCustomAllreduce,
)

from .aiter_double import show

MODULE = "vllm.distributed.device_communicators.aiter_custom_all_reduce"


class Base:
    """Takes methods whose words are about registering, in every shape there is."""

    defers_capture_registration = True
    _SUPPORTED_WORLD_SIZES: ClassVar = [2]

    def __init__(
        self, group, device, max_size=1 << 10, enable_register_for_capturing=True
    ):
        self.group, self.device = group, device
        self.enable_register_for_capturing = enable_register_for_capturing
        self.max_size = max_size
        self.disabled = False
        self.memory = torch.zeros(max_size, dtype=torch.uint8)
        self._pool = {
            "input": SimpleNamespace(
                data_ptr=self.memory.data_ptr(), max_size=max_size, tensor=self.memory
            )
        }
        self.calls: list[tuple[str, Any]] = []

    def all_reduce(self, inp, *, out=None, use_new=True, registered_input=False):
        self.calls.append(("all_reduce", registered_input))
        return out

    def fused(self, inp, weight, eps: float, registered: bool = False, stage=1):
        self.calls.append(("fused", registered))
        return weight, eps, stage

    def custom_fused(self, inp):
        """As AITER's own: registered while capturing, whatever the option says."""
        return self.fused(inp, "weight", 0.5, registered=True)

    def all_gather_reg(self, inp, out=None, dim=0):
        self.calls.append(("all_gather_reg", True))

    def all_gather_unreg(self, inp, dim=0, out=None):
        self.calls.append(("all_gather_unreg", False))
        return out, dim

    def register_input_buffer(self, inp):
        self.calls.append(("register_input_buffer", inp))

    def register_graph_buffers(self):
        self.calls.append(("register_graph_buffers", None))

    @contextmanager
    def capture(self):
        self.calls.append(("capture", "begins"))
        yield


class Later(Base):
    """A release that adds methods."""

    def default_true(self, inp, is_registered: bool = True):
        self.calls.append(("default_true", is_registered))

    def optional(self, inp, registered: "bool | None" = None):
        self.calls.append(("optional", registered))

    def undecided(self, inp, registered):
        self.calls.append(("undecided", registered))

    def number(self, inp, registered: int = 0):
        self.calls.append(("number", registered))

    def register_buffer(self, tensor):
        self.calls.append(("register_buffer", tensor))

    def of_output(self, inp, out, registered_output=False):
        self.calls.append(("of_output", registered_output))

    def two(self, inp, registered_input=False, *, registered_output=False):
        self.calls.append(("two", (registered_input, registered_output)))

    def broadcast_reg(self, inp):
        self.calls.append(("broadcast_reg", True))

    def _private(self, inp, registered=False):
        self.calls.append(("_private", registered))

    # None of these can register.
    def should_custom_ar(self, inp):
        return True

    def find(self, inp, registered_buffer: torch.Tensor):
        return registered_buffer

    def name_it(self, inp, registered_as="name"):
        return registered_as

    def take_out(self, inp, unregistered=False):
        return unregistered

    def set_registered(self, registered):
        return registered

    def nothing_reg(self):
        return True

    @staticmethod
    def plan(registered=False):
        return registered

    @property
    def registered(self):
        return "property"


FENCED = ("all_gather_reg", "all_reduce", "fused", "register_input_buffer")
LATER = (
    "_private",
    "broadcast_reg",
    "default_true",
    "number",
    "of_output",
    "optional",
    "register_buffer",
    "two",
    "undecided",
)


def make(kind: type = Base) -> Any:
    return fence(kind)(None, "cpu", enable_register_for_capturing=False)


@pytest.fixture
def allreduce() -> Any:
    return make(Later)


@pytest.fixture
def inp() -> torch.Tensor:
    return torch.ones(16)


@pytest.fixture
def aiter() -> Iterator[Callable[[type], None]]:
    """Installs a class as AITER's, of version 0.1.7."""
    with ExitStack() as shown:

        def install(kind: type) -> None:
            shown.enter_context(show(kind, "0.1.7"))

        install(Base)
        yield install


def inside(allreduce: Any, start: int = 0, count: int = 4) -> torch.Tensor:
    """A tensor in AITER's own buffer."""
    memory: torch.Tensor = allreduce.memory
    return memory[start : start + 4 * count].view(torch.float32)


@pytest.mark.parametrize(
    ("kind", "methods"), [(Base, FENCED), (Later, tuple(sorted(FENCED + LATER)))]
)
def test_the_methods_are_found_by_their_signatures(kind, methods):
    assert fence(kind).fenced_methods == methods


def test_a_caller_that_says_registered_is_not_believed(allreduce, inp):
    allreduce.all_reduce(inp, registered_input=True)
    allreduce.fused(inp, "weight", 0.5, True)
    allreduce.fused(inp=inp, weight="weight", eps=0.5, registered=True)
    allreduce.custom_fused(inp)
    allreduce.default_true(inp)
    allreduce.optional(inp, True)
    allreduce.optional(inp)
    allreduce.undecided(inp, True)
    allreduce.number(inp, 1)
    allreduce.of_output(inp, inp, registered_output=True)
    allreduce.two(inp, True, registered_output=True)
    allreduce._private(inp, 1)
    *values, (_, two), (_, private) = allreduce.calls
    assert [value for _, value in values] == [False] * 10
    assert two == (False, False) and private is False


@pytest.fixture
def graph_pool(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """A tensor whose first half is memory of the cuMem graph pool."""
    tensor = torch.ones(32)
    data = SimpleNamespace(tag="cudagraph", handle=(0, 64, tensor.data_ptr(), 0))
    known = SimpleNamespace(pointer_to_data={tensor.data_ptr(): data})
    monkeypatch.setattr(CuMemAllocator, "get_instance", lambda: known)
    return tensor


def test_what_is_said_of_aiters_own_buffer_holds(allreduce, graph_pool):
    whole = allreduce.memory
    for tensor in (inside(allreduce), inside(allreduce, 1008), whole):
        allreduce.custom_fused(tensor)
        allreduce.broadcast_reg(tensor)
        allreduce.all_gather_reg(tensor, out=torch.ones(4))
    assert [value for _, value in allreduce.calls] == [True] * 9
    allreduce.optional(inside(allreduce))
    assert allreduce.calls[-1] == ("optional", None)
    # An output that lies in the buffer for inputs says nothing of outputs.
    allreduce.of_output(inside(allreduce), inside(allreduce), registered_output=True)
    assert allreduce.calls[-1] == ("of_output", False)


@pytest.mark.parametrize("place", [0, 16], ids=["at its start", "inside"])
def test_an_output_that_sleeps_is_not_registered_with_the_input(graph_pool, place):
    """AITER's all-reduce registers both, and makes the output where none is given.

    What is then copied to the buffer's start is a clone: the input would overlap.
    """

    class Reading(Base):
        def all_reduce(self, inp, *, out=None, registered_input=False):
            reads_own = inp.data_ptr() == own.data_ptr()
            self.calls.append((registered_input, reads_own, inp.tolist()))

        def all_gather_unreg(self, inp, dim=0, out=None):
            self.all_reduce(inp)

    allreduce = make(Reading)
    own, after, beside = inside(allreduce, place), graph_pool[16:], torch.ones(4)
    own.copy_(torch.arange(4))
    for call in (
        lambda: allreduce.all_reduce(own, registered_input=True),
        lambda: allreduce.all_reduce(inp=own, out=None, registered_input=True),
        lambda: allreduce.all_reduce(own, out=graph_pool[8:], registered_input=True),
        lambda: allreduce.all_gather_reg(own),
    ):
        call()
        assert allreduce.calls.pop() == (False, False, [0, 1, 2, 3])
    for out in (beside, after):
        allreduce.all_reduce(own, out=out, registered_input=True)
        assert allreduce.calls.pop() == (True, True, [0, 1, 2, 3])


def test_the_buffer_before_0_1_12(allreduce, inp):
    allreduce.input_buffer = torch.zeros(8)
    allreduce.custom_fused(inside(allreduce))
    assert allreduce.calls.pop() == ("fused", True), (
        "the pool counts where there is one"
    )
    allreduce.input_buffer = allreduce.memory
    del allreduce._pool
    allreduce.custom_fused(inside(allreduce))
    allreduce.custom_fused(inp)
    assert allreduce.calls == [("fused", True), ("fused", False)]


@pytest.mark.parametrize("offset", [-1, 1])
def test_a_tensor_that_ends_outside_of_the_buffer_is_copied(allreduce, offset):
    start, size = allreduce.memory.data_ptr(), allreduce.max_size
    beside = SimpleNamespace(data_ptr=lambda: start + offset, nbytes=size)
    allreduce.fused(beside, "weight", 0.5, registered=True)
    assert allreduce.calls == [("fused", False)]


def test_what_is_not_said_stays_as_it_was(allreduce, inp):
    allreduce.all_reduce(inp, out="out", use_new=False)
    assert allreduce.fused(inp, "weight", stage=2, eps=0.5) == ("weight", 0.5, 2)
    assert allreduce.calls == [("all_reduce", False), ("fused", False)]


@given(
    says=st.sampled_from([None, False, True]),
    by_position=st.integers(0, 5),
    own=st.booleans(),
)
def test_a_call_keeps_its_arguments_in_every_form(says, by_position, own):
    """Each argument by position or by name, as the method alone would take them."""
    allreduce = make()
    tensor = inside(allreduce) if own else torch.ones(4)
    given_arguments = {"inp": tensor, "weight": "weight", "eps": 0.5}
    if says is not None:
        given_arguments |= {"registered": says, "stage": 2}
    listed = list(given_arguments.items())
    positional = [value for _, value in listed[:by_position]]
    assert allreduce.fused(*positional, **dict(listed[by_position:])) == (
        "weight",
        0.5,
        1 if says is None else 2,
    )
    assert allreduce.calls == [("fused", bool(says) and own)]


def test_a_wrong_call_is_the_methods_own_error(allreduce, inp):
    for call in (
        lambda: allreduce.all_reduce(registered_input=True),
        lambda: allreduce.fused(inp, registered=True),
        lambda: allreduce.all_gather_reg(),
        lambda: allreduce.all_gather_reg(inp, unknown=1),
        lambda: allreduce.register_input_buffer(),
    ):
        with pytest.raises(TypeError, match="argument"):
            call()


def test_a_registered_gather_hands_over_to_the_other(allreduce, inp):
    """With its own defaults."""

    class Other(Base):
        def all_gather_unreg(self, inp, dim=-1, out="another"):
            return out, dim

    assert make(Other).all_gather_reg(inp) == (None, 0)
    assert allreduce.all_gather_reg(inp, "out", 1) == ("out", 1)
    assert allreduce.all_gather_reg(inp, dim=2) == (None, 2)
    assert allreduce.all_gather_reg(out="out", inp=inp) == ("out", 0)
    assert {name for name, _ in allreduce.calls} == {"all_gather_unreg"}


def test_without_the_other_it_is_refused(allreduce, inp):
    with pytest.raises(RuntimeError, match="no broadcast_unreg that copies it"):
        allreduce.broadcast_reg(inp)

    class Odd(Base):
        def scatter_reg(self, inp, order):
            raise AssertionError

        def scatter_unreg(self, inp):
            raise AssertionError

    with pytest.raises(RuntimeError, match="scatter_reg"):
        make(Odd).scatter_reg(inp, 1)


def test_an_input_that_does_not_fit_is_refused(allreduce):
    big = torch.ones(257)
    for call in (
        lambda: allreduce.all_reduce(big, registered_input=True),
        lambda: allreduce.all_gather_reg(big),
    ):
        with pytest.raises(ValueError, match=r"1028 bytes.* of 1024: .*set VLLM_"):
            call()
    allreduce.all_reduce(big)  # AITER's own matter
    assert allreduce.calls == [("all_reduce", False)]


def test_memory_that_sleeps_is_not_registered_by_hand(allreduce, graph_pool):
    for call in (
        lambda: allreduce.register_input_buffer(graph_pool),
        lambda: allreduce.register_buffer(graph_pool[:1]),
        lambda: allreduce.register_input_buffer(inp=graph_pool[15:]),
    ):
        with pytest.raises(RuntimeError, match=r"register_.*buffer.*'cudagraph'"):
            call()
    allreduce.register_input_buffer(graph_pool[16:])
    allreduce.register_graph_buffers()
    assert [name for name, _ in allreduce.calls] == [
        "register_input_buffer",
        "register_graph_buffers",
    ]


def test_the_type_stays_what_vllm_and_aiter_read_of_it(allreduce):
    kind = type(allreduce)
    assert isinstance(allreduce, Later) and kind.__name__ == "FencedLater"
    with allreduce.capture():
        assert allreduce.calls.pop() == ("capture", "begins")
    assert kind.defers_capture_registration is True
    assert kind._SUPPORTED_WORLD_SIZES is Base._SUPPORTED_WORLD_SIZES
    assert inspect.signature(kind) == inspect.signature(Later)
    for name in kind.fenced_methods:
        fenced, own = getattr(kind, name), getattr(Later, name)
        assert inspect.signature(fenced) == inspect.signature(own)
        assert fenced is not own and fenced.__name__ == name
    assert allreduce.registered == "property" and kind.plan(True) is True
    assert allreduce.find(None, "buffer") == "buffer"
    assert allreduce.set_registered(True) and allreduce.nothing_reg()
    assert allreduce.take_out(None, True) is True
    assert Later.fused.__qualname__ == "Base.fused", "AITER's own class is untouched"


# vLLM's wrapper


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the wrapper logs."""
    said: list[str] = []
    monkeypatch.setattr(
        aiter_custom_all_reduce.logger,
        "info_once",
        lambda text, *args: said.append(text % args),
    )
    return said


def test_with_the_fence_down_nothing_changes(aiter, lines):
    wrapper = AiterCustomAllreduce("group", "cpu")
    assert type(wrapper.aiter_ca) is Base
    assert wrapper.aiter_ca.enable_register_for_capturing is True
    assert wrapper.fenced_methods == () and lines == []


def test_with_the_fence_up(aiter, lines):
    wrapper = AiterCustomAllreduce("group", "cpu", register_graph_buffers=False)
    assert isinstance(wrapper.aiter_ca, Base)
    assert wrapper.aiter_ca.enable_register_for_capturing is False
    assert wrapper.fenced_methods == FENCED
    [line] = lines
    assert line.startswith("AITER 0.1.7 ") and ", ".join(FENCED) in line


def test_a_group_that_does_without_aiter_says_nothing_of_it(aiter, lines):
    class Disabled(Base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.disabled = True

    aiter(Disabled)
    wrapper = AiterCustomAllreduce("group", "cpu", register_graph_buffers=False)
    assert wrapper.disabled and lines == []


@pytest.mark.parametrize(("given", "size"), [({}, 128 << 20), ({"max_size": 256}, 256)])
@pytest.mark.parametrize("register", [True, False])
def test_the_buffer_has_the_size_that_is_asked_for(aiter, given, size, register):
    wrapper = AiterCustomAllreduce("g", "d", **given, register_graph_buffers=register)
    impl = wrapper.aiter_ca
    assert (impl.group, impl.device, impl.max_size) == ("g", "d", size)


class Old:
    """Before 0.1.11."""

    def __init__(self, group, device, max_size=1):
        self.disabled = False

    def fused_ar_rms(self, inp, registered=False):
        pass


class Opaque(Base):
    """Its methods do not show what they take."""

    def all_reduce(self, *args, **kwargs):
        raise AssertionError


@pytest.mark.parametrize("kind", [Old, Opaque])
def test_an_aiter_that_cannot_copy_is_refused_at_start(aiter, lines, kind):
    aiter(kind)
    with pytest.raises(RuntimeError) as caught:
        AiterCustomAllreduce("group", "cpu", register_graph_buffers=False)
    for word in (
        "--sleep-mode-offload-cudagraph",
        "0.1.11",
        "the installed one is 0.1.7",
        "amd-aiter",
        "VLLM_ROCM_USE_AITER_CUSTOM_AR=0",
    ):
        assert word in str(caught.value)
    assert type(AiterCustomAllreduce("group", "cpu").aiter_ca) is kind


def test_a_constructor_that_hands_its_options_on_is_taken(aiter, lines):
    class Fork(Base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    aiter(Fork)
    wrapper = AiterCustomAllreduce("group", "cpu", register_graph_buffers=False)
    assert wrapper.aiter_ca.enable_register_for_capturing is False


def test_the_version_is_the_distributions(monkeypatch, aiter):
    assert aiter_capture_fence.aiter_version() == "0.1.7"

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert aiter_capture_fence.aiter_version() == "of unknown version"


@pytest.mark.parametrize(
    ("register", "disabled", "defers", "gfx1250", "expected"),
    [
        (True, False, True, False, True),
        (False, False, True, False, False),
        (True, True, True, False, False),
        (True, False, False, False, False),
        (True, False, None, False, False),
        (True, False, True, True, False),
    ],
)
def test_whether_captures_register(
    aiter, monkeypatch, register, disabled, defers, gfx1250, expected
):
    """Where it cannot matter, ROCm's platform is not asked: it may not import."""
    platform = ModuleType("vllm.platforms.rocm")
    if register and not disabled and defers:
        platform.on_gfx1250 = lambda: gfx1250
    monkeypatch.setitem(sys.modules, "vllm.platforms.rocm", platform)
    if defers is None:
        monkeypatch.delattr(Base, "defers_capture_registration")
    else:
        monkeypatch.setattr(Base, "defers_capture_registration", defers)
    wrapper = AiterCustomAllreduce("group", "cpu", register_graph_buffers=register)
    wrapper.aiter_ca.disabled = disabled
    assert wrapper.registers_graph_buffers is expected


def test_the_rest_is_handed_to_aiter(aiter):
    class Recording(Base):
        def __getattr__(self, name):
            if name.startswith("_"):
                raise AttributeError(name)
            return lambda *args, **kwargs: (name, args, kwargs)

    aiter(Recording)
    wrapper = AiterCustomAllreduce("group", "cpu")
    assert wrapper.custom_all_reduce("i") == ("custom_all_reduce", ("i",), {})
    assert wrapper.custom_all_gather("i", 1) == (
        "custom_all_gather",
        ("i",),
        {"dim": 1},
    )
    assert wrapper.custom_reduce_scatter("i", "o", 1) == (
        "custom_reduce_scatter",
        ("i", "o"),
        {"dim": 1},
    )
    impl = wrapper.aiter_ca
    for name, args in (
        ("should_custom_ar", ("i",)),
        ("should_custom_ag", ("i",)),
        ("should_custom_rs", ("i", 1)),
    ):
        answers = {args: True}
        setattr(impl, name, lambda *given, known=answers: known.get(given, False))
        assert getattr(wrapper, name)(*args) is True
        answers.clear()
        assert getattr(wrapper, name)(*args) is False
    closed = []
    impl.close = lambda: closed.append(True)
    wrapper.close()
    assert closed == [True]
    with wrapper.capture():
        assert impl.calls == [("capture", "begins")]


def test_what_the_installed_aiter_supports(aiter):
    wrapper = AiterCustomAllreduce("group", "cpu")
    assert wrapper.supports_dynamic_hidden_dim
    assert not wrapper.supports_per_group_quant
    del wrapper.aiter_ca._pool
    assert not wrapper.supports_dynamic_hidden_dim

    class Quantising(Base):
        def fused_ar_rms_per_group_quant(self):
            pass

    aiter(Quantising)
    assert AiterCustomAllreduce.build_supports_per_group_quant()
    assert wrapper.supports_per_group_quant


# The same as upstream's


@pytest.fixture(scope="module", params=["0.32.0", "0.33.0"])
def upstream(
    request: pytest.FixtureRequest, released_tree: Callable[[str], Path]
) -> type:
    """The class that the series replaces."""
    name = MODULE.removeprefix("vllm.").replace(".", "/") + ".py"
    spec = importlib.util.spec_from_file_location(
        "upstreams_wrapper", released_tree(request.param) / name
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kind: type = module.AiterCustomAllreduce
    return kind


def public(kind: type) -> Iterator[str]:
    return (name for name in vars(kind) if not name.startswith("_"))


def test_the_surface_is_upstreams(upstream):
    for name in public(upstream):
        theirs = inspect.getattr_static(upstream, name)
        ours = inspect.getattr_static(AiterCustomAllreduce, name)
        assert type(ours) is type(theirs), name
        if callable(theirs) or isinstance(theirs, classmethod | staticmethod):
            parameters = [
                [(p.name, p.kind, p.default) for p in signature.parameters.values()]
                for signature in (
                    inspect.signature(getattr(upstream, name)),
                    inspect.signature(getattr(AiterCustomAllreduce, name)),
                )
            ]
            assert parameters[0] == parameters[1], name
    assert upstream.MAX_SIZE == AiterCustomAllreduce.MAX_SIZE
    assert upstream.effective_max_size() == AiterCustomAllreduce.effective_max_size()
    assert len(list(public(upstream))) > 15


SIZES = st.one_of(
    st.integers(1, 90), st.sampled_from([79, 80, 81]), st.integers(1, 1 << 14)
)


@given(
    rows=SIZES,
    width=st.one_of(
        st.integers(1, 64).map(lambda n: 8 * n),
        st.sampled_from([7, 100, 4096, 8184, 8192, 8200, 4096 * 4, 1024]),
    ),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    ranks=st.sampled_from([2, 3, 4, 6, 8, 16]),
    connected=st.booleans(),
)
@example(rows=80, width=8192, dtype=torch.float16, ranks=2, connected=True)
@example(rows=16, width=8192, dtype=torch.float16, ranks=4, connected=True)
@example(rows=8, width=8192, dtype=torch.bfloat16, ranks=8, connected=True)
@example(rows=8, width=8184, dtype=torch.bfloat16, ranks=8, connected=True)
def test_one_stage_is_chosen_as_upstream_does(
    upstream, rows, width, dtype, ranks, connected
):
    answers = []
    for kind in (upstream, AiterCustomAllreduce):
        wrapper = object.__new__(kind)
        wrapper._impl = SimpleNamespace(world_size=ranks, fully_connected=connected)
        inp = torch.empty((rows, width), dtype=dtype, device="meta")
        answers.append(wrapper.use_1stage_fused_ar_rms(inp))
    assert answers[0] is answers[1]


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_one_stage_is_chosen_within_a_compiled_model(ranks):
    """Whatever the number of tokens is, without a break in the graph."""
    wrapper = object.__new__(AiterCustomAllreduce)
    wrapper._impl = SimpleNamespace(world_size=ranks, fully_connected=True)

    def step(inp: torch.Tensor) -> torch.Tensor:
        return inp + 1 if wrapper.use_1stage_fused_ar_rms(inp) else inp

    compiled = torch.compile(step, backend="eager", fullgraph=True, dynamic=True)
    for tokens in (3, 5, 100):
        inp = torch.ones(tokens, 4096, dtype=torch.bfloat16)
        assert torch.equal(compiled(inp), step(inp))
