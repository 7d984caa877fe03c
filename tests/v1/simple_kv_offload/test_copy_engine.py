# SPDX-License-Identifier: Apache-2.0
"""Who chooses the copy engine, and what a wrong word is answered."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import vllm.envs as envs
from pydantic import ValidationError
from vllm.config import KVTransferConfig
from vllm.v1.simple_kv_offload.copy_backend import DmaCopyBackend
from vllm.v1.simple_kv_offload.copy_engine import (
    CONNECTOR,
    OPTION,
    VARIABLE,
    CopyEngine,
    check_copy_engine,
    resolve_copy_engine,
)


@pytest.fixture(autouse=True)
def _no_choice_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def _transfer(connector: str = CONNECTOR, **extra: object) -> SimpleNamespace:
    return SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra)


def _config(**extra: object) -> SimpleNamespace:
    return SimpleNamespace(kv_transfer_config=_transfer(**extra))


@pytest.mark.parametrize(
    ("config", "variable", "expected"),
    [
        (None, None, (CopyEngine.AUTO, "default")),
        (SimpleNamespace(kv_transfer_config=None), None, (CopyEngine.AUTO, "default")),
        (_config(), None, (CopyEngine.AUTO, "default")),
        (_config(copy_engine=None), None, (CopyEngine.AUTO, "default")),
        (None, "batch", (CopyEngine.BATCH, VARIABLE)),
        (_config(), "batch", (CopyEngine.BATCH, VARIABLE)),
        (_config(copy_engine="batch"), None, (CopyEngine.BATCH, OPTION)),
        (_config(copy_engine="auto"), "batch", (CopyEngine.AUTO, OPTION)),
        (None, "rect", (CopyEngine.RECT, VARIABLE)),
        (_config(copy_engine="rect"), "batch", (CopyEngine.RECT, OPTION)),
    ],
)
def test_the_option_wins_over_the_variable(monkeypatch, config, variable, expected):
    if variable is not None:
        monkeypatch.setenv(VARIABLE, variable)
    assert resolve_copy_engine(config) == expected


@pytest.mark.parametrize("word", ["rectangle", "Batch", "", 3, True, ["batch"]])
def test_a_wrong_option_is_refused(word):
    with pytest.raises(ValueError) as refused:
        resolve_copy_engine(_config(copy_engine=word))
    text = str(refused.value)
    assert text.startswith(f"kv_connector_extra_config.copy_engine is {word!r},")
    assert "'auto', 'rect' or 'batch'" in text
    assert "leave it out" in text


@pytest.mark.parametrize("word", ["sdma", "BATCH", ""])
def test_a_wrong_variable_is_refused(monkeypatch, word):
    monkeypatch.setenv(VARIABLE, word)
    with pytest.raises(ValueError) as refused:
        resolve_copy_engine(None)
    text = str(refused.value)
    assert text.startswith(f"VLLM_KV_OFFLOAD_COPY_ENGINE is {word!r},")
    assert "'auto', 'rect' or 'batch'" in text
    assert "unset it" in text


def test_the_variable_is_known_to_vllm(monkeypatch):
    assert VARIABLE in envs.environment_variables
    assert envs.VLLM_KV_OFFLOAD_COPY_ENGINE is None
    before = envs.compile_factors()
    monkeypatch.setenv(VARIABLE, "batch")
    assert envs.VLLM_KV_OFFLOAD_COPY_ENGINE == "batch"
    assert envs.compile_factors() == before


def test_the_variable_offers_the_engines_that_exist(monkeypatch):
    for engine in CopyEngine:
        monkeypatch.setenv(VARIABLE, engine.value)
        assert engine.value == envs.VLLM_KV_OFFLOAD_COPY_ENGINE


def _vllm_config(**fields: object) -> KVTransferConfig:
    return KVTransferConfig(kv_role="kv_both", **fields)


def test_a_wrong_option_is_refused_while_arguments_are_parsed():
    with pytest.raises(ValidationError, match=r"copy_engine is 'blit'"):
        _vllm_config(
            kv_connector=CONNECTOR, kv_connector_extra_config={"copy_engine": "blit"}
        )


def test_a_wrong_variable_is_refused_while_arguments_are_parsed(monkeypatch):
    monkeypatch.setenv(VARIABLE, "blit")
    with pytest.raises(ValidationError, match=r"COPY_ENGINE is 'blit'"):
        _vllm_config(kv_connector=CONNECTOR)


def test_a_wrong_option_of_a_child_is_refused_while_arguments_are_parsed():
    child = {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"copy_engine": "blit"},
    }
    other = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    with pytest.raises(ValidationError, match=r"copy_engine is 'blit'"):
        _vllm_config(
            kv_connector="MultiConnector",
            kv_connector_extra_config={"connectors": [other, child]},
        )


@pytest.mark.parametrize("engine", CopyEngine)
def test_a_child_may_choose_every_engine(engine):
    """MultiConnector makes a configuration of its own for each child."""
    options = {"copy_engine": engine.value}
    child = {"kv_connector": CONNECTOR, "kv_connector_extra_config": options}
    child |= {"kv_role": "kv_both"}
    extra = {"connectors": [child]}
    _vllm_config(kv_connector="MultiConnector", kv_connector_extra_config=extra)
    config = SimpleNamespace(kv_transfer_config=KVTransferConfig(**child))
    assert resolve_copy_engine(config) == (engine, OPTION)


def test_a_child_of_a_child_is_checked(monkeypatch):
    ours = {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_connector_extra_config": {"copy_engine": "blit"},
    }
    inner = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [ours]},
    }
    with pytest.raises(ValidationError, match=r"copy_engine is 'blit'"):
        _vllm_config(
            kv_connector="MultiConnector",
            kv_connector_extra_config={"connectors": [inner]},
        )


def test_the_connector_that_an_option_brings_is_checked(monkeypatch):
    """--kv-offloading-size names the connector after the configuration is made."""
    monkeypatch.setenv("VLLM_USE_SIMPLE_KV_OFFLOAD", "1")
    monkeypatch.setenv(VARIABLE, "blit")
    with pytest.raises(ValidationError, match="VLLM_KV_OFFLOAD_COPY_ENGINE is 'blit'"):
        KVTransferConfig()


def test_a_number_of_copies_that_is_none_is_refused_early(monkeypatch):
    monkeypatch.setenv("VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS", "lots")
    with pytest.raises(ValidationError, match=r"must be a whole number.*'lots'"):
        KVTransferConfig(kv_connector="SimpleCPUOffloadConnector", kv_role="kv_both")


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_connector": "NixlConnector"},
        {
            "kv_connector": "MultiConnector",
            "kv_connector_extra_config": {
                "connectors": [
                    {
                        "kv_connector": "NixlConnector",
                        "kv_connector_extra_config": {"copy_engine": "theirs"},
                    }
                ]
            },
        },
        {
            "kv_connector": "OtherConnector",
            "kv_connector_extra_config": {"copy_engine": "theirs"},
        },
    ],
)
def test_other_connectors_keep_the_key_and_see_no_check(monkeypatch, fields):
    monkeypatch.setenv(VARIABLE, "blit")
    _vllm_config(**fields)


def test_both_places_are_checked_even_where_one_wins(monkeypatch):
    monkeypatch.setenv(VARIABLE, "blit")
    with pytest.raises(ValueError, match="VLLM_KV_OFFLOAD_COPY_ENGINE is 'blit'"):
        check_copy_engine(_transfer(copy_engine="batch"))


def test_the_backend_refuses_a_wrong_option_at_construction():
    with pytest.raises(ValueError, match="copy_engine is 'blit'"):
        DmaCopyBackend(_config(copy_engine="blit"))


def test_the_check_imports_neither_torch_nor_numpy():
    """It runs for every KVTransferConfig; with ``vllm`` itself stubbed out."""
    code = """
import importlib.util, sys, types
from pathlib import Path
sys.modules["vllm"] = types.ModuleType("vllm")
sys.modules["vllm.envs"] = types.ModuleType("vllm.envs")
sys.modules["vllm"].envs = sys.modules["vllm.envs"]
spec = importlib.util.spec_from_file_location("copy_engine", sys.argv[1])
spec.loader.exec_module(importlib.util.module_from_spec(spec))
print(sorted({"torch", "numpy"} & set(sys.modules)))
"""
    path = sys.modules[CopyEngine.__module__].__file__
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"
