# SPDX-License-Identifier: Apache-2.0
"""Whether sleep mode offloads the memory of captured CUDA graphs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

OPTION = "--sleep-mode-offload-cudagraph"
# Of a configuration: the obstacle that was logged.
_TOLD = "_told_graph_pool_obstacle"


@dataclass(frozen=True)
class CumemGraphPool:
    """The answer for one configuration.

    Attributes:
        asked: The user gave `--sleep-mode-offload-cudagraph`.
        obstacle: Why the option has no effect and what to do, as one sentence;
            None where nothing is in the way.

    """

    asked: bool
    obstacle: str | None = None

    @property
    def active(self) -> bool:
        """Captures allocate from the cuMem pool tagged ``cudagraph``."""
        return self.asked and self.obstacle is None


def cumem_graph_pool(vllm_config: "VllmConfig") -> CumemGraphPool:
    """Decide whether CUDA graphs are captured into a pool that sleep offloads.

    The policy is the same on CUDA and ROCm.
    """
    model_config = vllm_config.model_config
    if model_config is None or not model_config.sleep_mode_offload_cudagraph:
        return CumemGraphPool(asked=False)
    return CumemGraphPool(asked=True, obstacle=_obstacle(vllm_config))


def log_inactive_graph_pool(vllm_config: "VllmConfig") -> None:
    """Say once, at start, why an option that was given does nothing.

    Asked when the configuration is made, and again by the workers, who may have
    found out that the model supports no graphs. What was said before travels with
    the configuration, and is not said again.
    """
    pool = cumem_graph_pool(vllm_config)
    told = vars(vllm_config).get(_TOLD)
    if not pool.asked or pool.active or pool.obstacle == told:
        return
    logger.warning_once("%s has no effect: %s", OPTION, pool.obstacle)
    vars(vllm_config)[_TOLD] = pool.obstacle


def _obstacle(vllm_config: "VllmConfig") -> str | None:
    from vllm.config.compilation import CUDAGraphMode
    from vllm.device_allocator.cumem import unavailable_reason
    from vllm.platforms import current_platform

    model_config = vllm_config.model_config
    if not model_config.enable_sleep_mode:
        return "sleep mode is off; add --enable-sleep-mode."
    if (backend := model_config.sleep_mode_backend) != "cumem":
        return (
            f"the sleep mode backend {backend} has no graph pool; leave "
            "--sleep-mode-backend out (vLLM 0.33 has that option), or set it to cumem."
        )
    if vllm_config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE:
        cause = (
            "--enforce-eager turns CUDA graphs off; leave it out"
            if model_config.enforce_eager
            else "cudagraph_mode is NONE, by -cc.cudagraph_mode or because this model "
            "or attention backend supports no other; set one that it supports"
        )
        return f"{cause}."
    if not current_platform.is_cumem_allocator_available():
        return f"the cuMem allocator is not available; {unavailable_reason()}."
    return None
