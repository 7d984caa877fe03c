# SPDX-License-Identifier: Apache-2.0
"""The simulator follows the model of HIP, and would be seen to leave it."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from vllm_rocm_memory.sim import hipsim

from . import model
from .model import RELEASES, Answer, Error, Hip, Release, Work
from .sequences import MakeModel, differ, explain, replay

SEEDS = range(1000)
SEEDS_PER_TEST = 50


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    hipsim.reset()
    yield
    hipsim.reset(hipsim.PROFILES[-1])
    hipsim.assert_clean()


def test_every_release_has_a_model() -> None:
    assert tuple(RELEASES) == hipsim.PROFILES


@pytest.mark.parametrize("first", SEEDS[::SEEDS_PER_TEST])
def test_the_simulator_follows_the_model(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        calls, difference = differ(seed)
        if difference:
            pytest.fail(explain(seed, calls, difference), pytrace=False)


# --- wrong models --------------------------------------------------------------------


def find_difference(make: MakeModel) -> int:
    """The first seed whose sequence tells the model from the simulator."""
    for seed in SEEDS:
        if differ(seed, make)[1]:
            return seed
    pytest.fail("no sequence notices")


WRONG_RELEASES = {
    "batch_is_a_loop": (True, False),
    "attributes_are_refused": (True, False),
    "flags_count": (True, False),
    "blit_batch_limit": (8193, 100),
    "map_failure_is_silent": (True, False),
    "retain_takes_reference": (True, False),
    "host_access": (True, False),
    "unmap_keeps_memory": (True, False),
    "invalid_streams_stay": (True, False),
    "recommended_granularity": (1 << 20,),
    "legacy_work_breaks_captures": (True, False),
    "map_error": (Error.NOT_FOUND,),
}


def test_every_difference_between_releases_has_a_wrong_value() -> None:
    assert set(WRONG_RELEASES) == {field.name for field in fields(Release)}


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in WRONG_RELEASES.items() for value in values],
)
def test_a_wrong_release_is_noticed(field: str, value: Any) -> None:
    def make(release: Release, total: int, arena: int, host: bytes) -> Hip:
        return Hip(replace(release, **{field: value}), total, arena, host)

    find_difference(make)


@pytest.mark.parametrize(
    "error",
    set(Error) - {Error.SUCCESS, Error.NOT_READY, Error.ILLEGAL_ADDRESS},
)
def test_an_error_that_is_not_expected_is_noticed(error: Error) -> None:
    class Lenient(Hip):
        def call(self, name: str, *arguments: object) -> Answer:
            answer = super().call(name, *arguments)
            return Answer() if error in answer.errors else answer

    find_difference(Lenient)


@pytest.mark.parametrize(
    "function",
    [
        "hipMemset",
        "hipMemsetAsync",
        "hipMemcpy",
        "hipMemcpyAsync",
        "hipMemcpy2D",
        "hipMemcpy2DAsync",
        "hipMemcpy3D",
        "hipMemcpy3DAsync",
        "hipMemcpyBatchAsync",
        "hipGraphLaunch",
    ],
)
def test_bytes_that_are_not_moved_are_noticed(function: str) -> None:
    class Lazy(Hip):
        now = ""

        def call(self, name: str, *arguments: object) -> Answer:
            self.now = name
            return super().call(name, *arguments)

        def _run(self, work: Work) -> None:
            if self.now != function:
                super()._run(work)

    find_difference(Lazy)


@pytest.mark.parametrize(
    ("constant", "value"),
    [("PAGE", 2048), ("PAGE", 8192), ("KERNEL_ARGUMENTS", 0), ("BIGGEST_BLIT", 0)],
)
def test_a_wrong_number_is_noticed(
    monkeypatch: pytest.MonkeyPatch, constant: str, value: int
) -> None:
    monkeypatch.setattr(model, constant, value)
    find_difference(Hip)


def test_an_explanation_has_no_call_too_many() -> None:
    class Short(Hip):
        def hipMemAddressFree(self, pointer: int, size: int) -> Answer:
            answer = super().hipMemAddressFree(pointer, size)
            assert answer.errors == (Error.SUCCESS,)
            return Answer((Error.NOT_FOUND,))

    seed = find_difference(Short)
    calls, difference = differ(seed, Short)
    first, second, *listed = explain(seed, calls, difference, Short).splitlines()
    assert first == f"seed {seed}, HIP {hipsim.profile()}: {difference}"
    assert "hipMemAddressFree" in second
    assert [line.split("= ")[1].split("(")[0] for line in listed] == [
        "hipMemAddressReserve",
        "hipMemAddressFree",
    ]
    assert not replay(seed, [])
