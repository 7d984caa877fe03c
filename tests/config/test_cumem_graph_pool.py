# SPDX-License-Identifier: Apache-2.0
"""When captures go to the cuMem pool, and what is said when they do not."""

from __future__ import annotations

import os
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.config.cumem_graph_pool as policy
import vllm.platforms
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.config.cumem_graph_pool import (
    OPTION,
    CumemGraphPool,
    cumem_graph_pool,
    log_inactive_graph_pool,
)
from vllm.v1.worker import gpu_worker


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the policy warns of, formatted."""
    said: list[str] = []
    monkeypatch.setattr(
        policy.logger, "warning_once", lambda text, *args: said.append(text % args)
    )
    return said


@pytest.fixture(autouse=True)
def _a_platform_with_cumem(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_platform(monkeypatch, has_cumem=True)


def _set_platform(monkeypatch: pytest.MonkeyPatch, *, has_cumem: bool) -> None:
    platform = vllm.platforms.current_platform
    monkeypatch.setattr(
        type(platform), "is_cumem_allocator_available", lambda self: has_cumem
    )


def _config(
    mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE, **changes: Any
) -> Any:
    model = {
        "sleep_mode_offload_cudagraph": True,
        "enable_sleep_mode": True,
        "sleep_mode_backend": "cumem",
        "enforce_eager": False,
        **changes,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**model),
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
    )


@pytest.mark.parametrize(
    "mode", [mode for mode in CUDAGraphMode if mode != CUDAGraphMode.NONE]
)
def test_every_mode_with_graphs_uses_the_pool(mode: CUDAGraphMode) -> None:
    assert cumem_graph_pool(_config(mode)) == CumemGraphPool(asked=True)
    assert cumem_graph_pool(_config(mode)).active


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (_config(enable_sleep_mode=False), ["--enable-sleep-mode"]),
        (
            _config(sleep_mode_backend="cuda_checkpoint"),
            ["backend cuda_checkpoint", "--sleep-mode-backend", "cumem"],
        ),
        (_config(CUDAGraphMode.NONE, enforce_eager=True), ["--enforce-eager"]),
        (_config(CUDAGraphMode.NONE), ["-cc.cudagraph_mode"]),
    ],
)
def test_an_option_without_effect_says_why_and_what_to_do(
    config: Any, words: list[str], warnings: list[str]
) -> None:
    pool = cumem_graph_pool(config)
    assert pool.asked and not pool.active
    log_inactive_graph_pool(config)
    [warning] = warnings
    assert warning == f"{OPTION} has no effect: {pool.obstacle}"
    for word in words:
        assert word in warning


def test_the_reason_for_a_missing_allocator_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _set_platform(monkeypatch, has_cumem=False)
    monkeypatch.setattr(
        "vllm.device_allocator.cumem.unavailable_reason", lambda: "no driver; load it"
    )
    obstacle = cumem_graph_pool(_config()).obstacle
    assert obstacle == "the cuMem allocator is not available; no driver; load it."


def test_a_worker_says_only_what_is_new(warnings: list[str]) -> None:
    config = _config(enable_sleep_mode=False)
    log_inactive_graph_pool(config)
    sent = pickle.loads(pickle.dumps(config))
    log_inactive_graph_pool(sent)
    assert len(warnings) == 1
    # As by a model runner whose attention backend supports no graphs.
    config = pickle.loads(pickle.dumps(_config()))
    log_inactive_graph_pool(config)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    log_inactive_graph_pool(config)
    log_inactive_graph_pool(config)
    assert len(warnings) == 2 and "cudagraph_mode" in warnings[1]


def test_what_was_said_travels_with_a_configuration(
    monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    monkeypatch.setattr(
        policy, "cumem_graph_pool", lambda _: CumemGraphPool(True, "a reason.")
    )
    config = VllmConfig()
    assert warnings == [f"{OPTION} has no effect: a reason."]
    log_inactive_graph_pool(pickle.loads(pickle.dumps(config)))
    assert len(warnings) == 1


def test_a_worker_asks_before_it_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(gpu_worker, "log_inactive_graph_pool", asked.append)
    worker = object.__new__(gpu_worker.Worker)
    worker.vllm_config = "the configuration"
    with pytest.raises(AttributeError):  # it has nothing else to warm up with
        worker.compile_or_warm_up_model()
    assert asked == ["the configuration"]


@pytest.mark.parametrize(
    "config",
    [
        _config(),
        _config(sleep_mode_offload_cudagraph=False, enable_sleep_mode=False),
        SimpleNamespace(model_config=None),
    ],
    ids=["active", "not asked", "no model"],
)
def test_nothing_is_said_without_need(config: Any, warnings: list[str]) -> None:
    log_inactive_graph_pool(config)
    assert warnings == []


def _configured(model: Any, mode: CUDAGraphMode) -> VllmConfig:
    config = VllmConfig()
    config.compilation_config.cudagraph_mode = mode
    object.__setattr__(config, "model_config", model)
    return config


def test_vllm_asks_the_policy() -> None:
    on, off = _config(), _config(enable_sleep_mode=False)
    assert _configured(on.model_config, CUDAGraphMode.FULL).use_cumem_cudagraph_pool
    assert not _configured(on.model_config, CUDAGraphMode.NONE).use_cumem_cudagraph_pool
    assert not _configured(
        off.model_config, CUDAGraphMode.FULL
    ).use_cumem_cudagraph_pool


@pytest.mark.parametrize("given", [None, "0", "1"])
@pytest.mark.parametrize("active", [True, False])
def test_nccl_graph_register_stays_as_vllm_sets_it(
    monkeypatch: pytest.MonkeyPatch, given: str | None, active: bool
) -> None:
    monkeypatch.setattr(
        "vllm.config.vllm.cumem_graph_pool", lambda _: CumemGraphPool(asked=active)
    )
    if given is None:
        monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    else:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", given)
    VllmConfig()
    expected = "0" if active and given is None else given
    assert os.environ.get("NCCL_GRAPH_REGISTER") == expected
