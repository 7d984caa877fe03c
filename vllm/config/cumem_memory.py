# SPDX-License-Identifier: Apache-2.0
"""Options of memory that sleep mode and KV connectors depend on, checked at start."""

import os
from typing import TYPE_CHECKING

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

CHUNK_VARIABLE = "VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE"


def check_fixed_kv_memory(vllm_config: "VllmConfig") -> None:
    """Refuse a KV connector beside expandable segments without the cuMem allocator.

    Connectors register KV cache memory, and PyTorch may move the pages of an
    expandable segment under it. The cuMem pool keeps expandable segments off.

    Raises:
        ValueError: Any of the variables that PyTorch reads asks for expandable
            segments.

    """
    from vllm.device_allocator.alloc_conf import (
        ALLOC_CONF_ENV_VARS,
        alloc_conf_from_env,
        expandable_segments_enabled_from_env,
    )

    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return
    model_config = vllm_config.model_config
    if model_config is not None and model_config.enable_cumem_allocator:
        return
    if not expandable_segments_enabled_from_env():
        return
    conf = alloc_conf_from_env()
    name = next(name for name in ALLOC_CONF_ENV_VARS if os.environ.get(name) == conf)
    raise ValueError(
        f"{name}={conf} cannot be used with the KV connector {transfer.kv_connector}: "
        "PyTorch may map other pages under KV cache memory that the connector has "
        "registered. Take expandable_segments out of it, or add "
        "--enable-cumem-allocator (--enable-sleep-mode does that by itself), which "
        "keeps the KV cache out of expandable segments."
    )


def no_cumem_allocator() -> str:
    """Why the allocator that was asked for cannot be had, and what to do."""
    from vllm.device_allocator.cumem import unavailable_reason

    text = "cumem allocator is not supported on current platform"
    reason = unavailable_reason()
    return f"{text}." if reason is None else f"{text}: {reason}."


def check_host_memory_policy(vllm_config: "VllmConfig") -> None:
    """Refuse a VLLM_SLEEP_HOST_MEMORY that is no policy, where it is going to count.

    Raises:
        ValueError: Names the variable, its value and the remedy.

    """
    from vllm.device_allocator.host_backups import host_memory_policy

    model_config = vllm_config.model_config
    if model_config is not None and model_config.enable_cumem_allocator:
        host_memory_policy()


def settle_chunk_size(vllm_config: "VllmConfig") -> None:
    """Make every reader of VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE read the same number.

    The allocator reads it as C does, prefix by prefix and in any base, while
    ``vllm.envs`` wants a plain decimal number and raises otherwise. The value in
    use is written back for this process and its children.
    """
    value = os.environ.get(CHUNK_VARIABLE)
    model_config = vllm_config.model_config
    if value is None or model_config is None or not model_config.enable_cumem_allocator:
        return
    try:
        from vllm.cumem_allocator import chunk_setting
    except ImportError:
        return  # ModelConfig refuses the allocator where it cannot be loaded
    chunk_bytes, problem = chunk_setting()
    if problem is not None:
        logger.warning_once("%s", problem)
    os.environ[CHUNK_VARIABLE] = str(chunk_bytes >> 20)
