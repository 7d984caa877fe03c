# SPDX-License-Identifier: Apache-2.0
"""Which engine copies KV blocks between device and host: the user's choice.

Imports neither torch nor numpy: the choice is checked while arguments are
parsed, long before a device exists.
"""

import os
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import vllm.envs as envs

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

CONNECTOR = "SimpleCPUOffloadConnector"
OPTION = "kv_connector_extra_config.copy_engine"
VARIABLE = "VLLM_KV_OFFLOAD_COPY_ENGINE"
MAX_COPIES_VARIABLE = "VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS"


class CopyEngine(StrEnum):
    """How KV blocks are copied.

    AUTO takes the fastest engine that the layout of the caches allows. RECT is a
    pitched copy, ``hipMemcpy2DAsync`` or ``cuMemcpy2DAsync``, for each block and
    page size; BATCH is one ``hipMemcpyBatchAsync`` or ``cuMemcpyBatchAsync`` for
    many pages.
    """

    AUTO = "auto"
    RECT = "rect"
    BATCH = "batch"


def resolve_copy_engine(
    vllm_config: "VllmConfig | None",
) -> tuple[CopyEngine, str]:
    """Return the engine the user asked for, and where the word came from.

    ``kv_connector_extra_config.copy_engine`` wins over
    ``VLLM_KV_OFFLOAD_COPY_ENGINE``; without either it is AUTO, by default.

    Raises:
        ValueError: The word that counts is none of the engines.

    """
    transfer = None if vllm_config is None else vllm_config.kv_transfer_config
    if transfer is not None:
        engine = _from_option(transfer.kv_connector_extra_config)
        if engine is not None:
            return engine, OPTION
    engine = _from_variable()
    if engine is not None:
        return engine, VARIABLE
    return CopyEngine.AUTO, "default"


def chosen_max_copies() -> int:
    """Return the most copies for one call by the user's word; 0 without one.

    Raises:
        ValueError: ``VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS`` is no number.

    """
    try:
        return max(0, envs.VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS)
    except ValueError as error:
        raise ValueError(
            f"{MAX_COPIES_VARIABLE} must be a whole number, the most copies for one "
            f"call; unset it or set 0 for the default ({error})"
        ) from None


def check_copy_engine(kv_transfer_config: "KVTransferConfig") -> None:
    """Refuse a copy engine that does not exist, and a variable that is wrong.

    Looks at the connector of this series alone, also where it is a child of
    MultiConnector: another connector may use the same key for itself.

    Raises:
        ValueError: Names the option or variable, its value and the remedy.

    """
    ours = list(
        _options_of_ours(
            kv_transfer_config.kv_connector,
            kv_transfer_config.kv_connector_extra_config,
        )
    )
    for options in ours:
        _from_option(options)
    if ours:
        _from_variable()
        chosen_max_copies()


def _options_of_ours(
    connector: str | None, extra: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    if connector == "MultiConnector":
        for child in extra.get("connectors") or []:
            options = child.get("kv_connector_extra_config") or {}
            yield from _options_of_ours(child.get("kv_connector"), options)
    # --kv-offloading-size makes the configuration first and names its connector later.
    elif connector == CONNECTOR or (
        connector is None and envs.VLLM_USE_SIMPLE_KV_OFFLOAD
    ):
        yield extra


def _from_option(extra: dict[str, Any]) -> CopyEngine | None:
    word = extra.get("copy_engine")
    return None if word is None else _parse(OPTION, word, "leave it out")


def _from_variable() -> CopyEngine | None:
    try:
        word = envs.VLLM_KV_OFFLOAD_COPY_ENGINE
    except ValueError:
        # vLLM refuses a wrong word itself, without a remedy.
        word = os.environ.get(VARIABLE)
    return None if word is None else _parse(VARIABLE, word, "unset it")


def _parse(name: str, word: Any, remedy: str) -> CopyEngine:
    try:
        return CopyEngine(word)
    except ValueError:
        *others, last = (repr(engine.value) for engine in CopyEngine)
        allowed = f"{', '.join(others)} or {last}"
        raise ValueError(
            f"{name} is {word!r}, but no such copy engine exists: "
            f"set it to {allowed}, or {remedy} for the default, "
            f"{CopyEngine.AUTO.value!r}."
        ) from None
