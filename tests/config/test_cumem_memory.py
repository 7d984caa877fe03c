# SPDX-License-Identifier: Apache-2.0
"""Options of memory that sleep mode and KV connectors depend on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.collect_env
import vllm.config.cumem_memory as cumem_memory
import vllm.envs as envs
from vllm.config import KVTransferConfig, ModelConfig, VllmConfig
from vllm.config.cumem_memory import (
    CHUNK_VARIABLE,
    check_host_memory_policy,
    settle_chunk_size,
)
from vllm.device_allocator.alloc_conf import ALLOC_CONF_ENV_VARS
from vllm.device_allocator.host_backups import POLICY_VARIABLE, HostMemoryPolicy

EXPANDABLE = "max_split_size_mb:512,expandable_segments:True"


@pytest.fixture(autouse=True)
def _nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ALLOC_CONF_ENV_VARS, CHUNK_VARIABLE, POLICY_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def _connector() -> KVTransferConfig:
    return KVTransferConfig(kv_connector="SimpleCPUOffloadConnector", kv_role="kv_both")


@pytest.mark.parametrize("name", ALLOC_CONF_ENV_VARS)
def test_expandable_segments_beside_a_connector_are_refused_under_every_name(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, EXPANDABLE)
    with pytest.raises(ValueError, match=f"{name}={EXPANDABLE}") as raised:
        VllmConfig(kv_transfer_config=_connector())
    assert "SimpleCPUOffloadConnector" in str(raised.value)
    assert "--enable-cumem-allocator" in str(raised.value)


@pytest.mark.parametrize("conf", ["expandable_segments:False", "max_split_size_mb:64"])
def test_other_options_are_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, conf: str
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", conf)
    VllmConfig(kv_transfer_config=_connector())


def test_expandable_segments_without_a_connector_are_no_obstacle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", EXPANDABLE)
    VllmConfig()


def test_the_cumem_allocator_makes_them_no_obstacle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", EXPANDABLE)
    config = SimpleNamespace(
        kv_transfer_config=_connector(),
        model_config=SimpleNamespace(enable_cumem_allocator=True),
    )
    cumem_memory.check_fixed_kv_memory(config)  # type: ignore[arg-type]
    config.model_config.enable_cumem_allocator = False
    with pytest.raises(ValueError, match="PYTORCH_ALLOC_CONF"):
        cumem_memory.check_fixed_kv_memory(config)  # type: ignore[arg-type]


def test_a_missing_allocator_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "vllm.device_allocator.cumem.unavailable_reason", lambda: "no driver; load it"
    )
    config = {"model_type": "opt", "architectures": ["OPTForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"current platform: no driver; load it\."):
        ModelConfig(str(tmp_path), enable_cumem_allocator=True)


@pytest.mark.parametrize("name", ALLOC_CONF_ENV_VARS)
def test_collect_env_reports_every_name(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, EXPANDABLE)
    assert vllm.collect_env.get_cachingallocator_config() == EXPANDABLE


def test_collect_env_reports_an_unset_option_as_empty() -> None:
    assert vllm.collect_env.get_cachingallocator_config() == ""


def _with_allocator(enabled: bool = True) -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(enable_cumem_allocator=enabled))


@pytest.mark.parametrize(
    ("value", "mib", "warns"),
    [
        ("64", 64, False),
        ("0x40", 64, False),
        ("0", 256, True),
        ("many", 256, True),
        ("64MB", 64, True),
        (str(1 << 60), 256, True),
    ],
)
def test_every_reader_of_the_chunk_size_reads_the_same(
    monkeypatch: pytest.MonkeyPatch, value: str, mib: int, warns: bool
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        cumem_memory.logger, "warning_once", lambda text, *a: said.append(text % a)
    )
    monkeypatch.setenv(CHUNK_VARIABLE, value)
    settle_chunk_size(_with_allocator())
    assert os.environ[CHUNK_VARIABLE] == str(mib)
    assert mib == envs.VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE
    assert len(said) == warns
    for text in said:
        assert CHUNK_VARIABLE in text and value in text


@pytest.mark.parametrize(
    "config", [_with_allocator(enabled=False), SimpleNamespace(model_config=None)]
)
def test_a_chunk_size_that_nobody_uses_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, config: Any
) -> None:
    monkeypatch.setenv(CHUNK_VARIABLE, "many")
    settle_chunk_size(config)
    assert os.environ[CHUNK_VARIABLE] == "many"


def test_an_unset_chunk_size_stays_unset() -> None:
    settle_chunk_size(_with_allocator())
    assert CHUNK_VARIABLE not in os.environ


def test_a_policy_that_does_not_exist_is_refused_where_it_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(POLICY_VARIABLE, "drop")
    with pytest.raises(ValueError, match=f"{POLICY_VARIABLE} is 'drop'.*'release'"):
        check_host_memory_policy(_with_allocator())
    check_host_memory_policy(_with_allocator(enabled=False))
    check_host_memory_policy(SimpleNamespace(model_config=None))  # type: ignore[arg-type]
    for word in ("release", ""):
        monkeypatch.setenv(POLICY_VARIABLE, word)
        check_host_memory_policy(_with_allocator())


def test_the_policy_is_known_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert envs.VLLM_SLEEP_HOST_MEMORY == "keep"
    before = envs.compile_factors()
    # vLLM reads every variable at start, and also where none sleeps
    for word in (*HostMemoryPolicy, "KEEP", ""):
        monkeypatch.setenv(POLICY_VARIABLE, word)
        assert word == envs.VLLM_SLEEP_HOST_MEMORY
    assert envs.compile_factors() == before


def test_the_configuration_looks_at_both() -> None:
    script = (
        "import os, vllm.config.vllm as v\n"
        "v.settle_chunk_size = lambda config: print('settled', type(config).__name__)\n"
        "v.check_host_memory_policy = lambda config: print('checked', type(config))\n"
        "v.VllmConfig()\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
    )
    assert "settled VllmConfig" in process.stdout, process.stderr
    assert "checked <class 'vllm.config.vllm.VllmConfig'>" in process.stdout
