# SPDX-License-Identifier: Apache-2.0
"""AITER's custom all-reduce as vLLM's communicators use it."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed import ProcessGroup
from vllm.distributed.device_communicators.aiter_capture_fence import (
    OPTION,
    aiter_version,
    fence,
)
from vllm.logger import init_logger

logger = init_logger(__name__)

# When AITER's fused_allreduce_rmsnorm runs as one stage (ROCm/aiter,
# csrc/include/custom_all_reduce.cuh): rows, 16-byte packs in a row, and fewer bytes
# than this, by the largest number of ranks that it holds for. Two ranks have no limit.
_ONE_STAGE_ROWS = 80
_ONE_STAGE_PACKS = 1024
_PACK_BYTES = 16
_ONE_STAGE_BYTES = {4: 256 << 10, 8: 128 << 10}


class AiterCustomAllreduce:
    """One instance of AITER's CustomAllreduce, for plain and fused collectives.

    With `register_graph_buffers=False` it is behind the fence of
    Note [AITER capture fence].
    """

    MAX_SIZE: int = 128 << 20
    """Bytes of the IPC buffer for inputs, unless the constructor is told another."""

    @classmethod
    def effective_max_size(cls) -> int:
        """Bytes of the largest input that AITER's `should_custom_ar` takes."""
        return cls.MAX_SIZE // 2

    def __init__(
        self,
        group: ProcessGroup,
        device: int | str | torch.device,
        max_size: int | None = None,
        *,
        register_graph_buffers: bool = True,
    ) -> None:
        """Exchange the IPC buffers of the group's ranks.

        Args:
            group: On one host, with a CPU backend.
            device: Of this rank.
            max_size: Bytes of the buffer for inputs; `MAX_SIZE` by default.
            register_graph_buffers: Whether captured inputs are registered for IPC.
                Otherwise they are copied, which memory of the cuMem pool needs.

        Raises:
            RuntimeError: Inputs are to be copied, and AITER is older than 0.1.11 or
                does not show how it is told to.

        """
        from aiter.dist.device_communicators import custom_all_reduce

        kind = custom_all_reduce.CustomAllreduce
        max_size = self.MAX_SIZE if max_size is None else max_size
        options: dict[str, Any] = {"max_size": max_size}
        if not register_graph_buffers:
            kind = fence(kind)
            options[OPTION] = False
        self._impl = kind(group, device, **options)
        self._register_graph_buffers = register_graph_buffers
        if self.fenced_methods and not self.disabled:
            logger.info_once(
                "AITER %s registers no captured memory for IPC, because it may sleep "
                "(--sleep-mode-offload-cudagraph). Fenced: %s",
                aiter_version(),
                ", ".join(self.fenced_methods),
            )

    @property
    def aiter_ca(self) -> Any:
        """The instance of AITER's class, or of the fenced subclass."""
        return self._impl

    @property
    def fenced_methods(self) -> tuple[str, ...]:
        """AITER's methods that could register a tensor, and do not.

        They copy it, or refuse it where they cannot. Worked out from the AITER that is
        installed; empty if graphs do not sleep.
        """
        return getattr(type(self._impl), "fenced_methods", ())

    @property
    def disabled(self) -> bool:
        """Whether AITER does not serve this group, for its number of ranks or hosts."""
        return bool(self._impl.disabled)

    @property
    def registers_graph_buffers(self) -> bool:
        """Whether a capture registers its inputs if expandable segments are off then.

        AITER looks at that when a capture begins from 0.1.26 on, and says so by
        `defers_capture_registration`. It never registers on gfx1250.
        """
        if not self._register_graph_buffers or self.disabled:
            return False
        if not getattr(type(self._impl), "defers_capture_registration", False):
            return False
        from vllm.platforms.rocm import on_gfx1250

        return not on_gfx1250()

    def should_custom_ar(self, inp: torch.Tensor) -> bool:
        """Whether AITER reduces this input, by its size and layout."""
        return bool(self._impl.should_custom_ar(inp))

    def should_custom_ag(self, inp: torch.Tensor) -> bool:
        """Whether AITER gathers this input."""
        return bool(self._impl.should_custom_ag(inp))

    def should_custom_rs(self, inp: torch.Tensor, dim: int) -> bool:
        """Whether AITER reduces this input and scatters it along `dim`."""
        return bool(self._impl.should_custom_rs(inp, dim))

    def custom_all_reduce(self, inp: torch.Tensor) -> torch.Tensor | None:
        """The sum over the ranks, like `inp`; None if AITER does not take it."""
        total: torch.Tensor | None = self._impl.custom_all_reduce(inp)
        return total

    def custom_all_gather(self, inp: torch.Tensor, dim: int = 0) -> torch.Tensor | None:
        """The ranks' inputs, one after another along `dim`."""
        gathered: torch.Tensor | None = self._impl.custom_all_gather(inp, dim=dim)
        return gathered

    def custom_reduce_scatter(
        self, inp: torch.Tensor, out: torch.Tensor, dim: int = 0
    ) -> torch.Tensor | None:
        """Write this rank's part of the sum, cut along `dim`, to `out`."""
        part: torch.Tensor | None = self._impl.custom_reduce_scatter(inp, out, dim=dim)
        return part

    def use_1stage_fused_ar_rms(self, inp: torch.Tensor) -> bool:
        """Whether the fused all-reduce and RMSNorm runs as AITER's one-stage kernel.

        In two stages it is slower than an all-reduce and an RMSNorm, so that a caller
        who has those should take them. The answer depends on the shape and dtype of
        `inp`, the number of ranks and their links alone, and so holds for a capture.
        """
        width = inp.shape[-1]
        if inp.numel() > _ONE_STAGE_ROWS * width:
            return False
        if inp.dtype not in (torch.float16, torch.bfloat16):
            return False
        row_bytes = width * inp.element_size()
        if row_bytes % _PACK_BYTES or row_bytes // _PACK_BYTES > _ONE_STAGE_PACKS:
            return False
        ranks = self._impl.world_size
        if ranks == 2:
            return True
        limits = [most for upto, most in _ONE_STAGE_BYTES.items() if ranks <= upto]
        if not limits or not self._impl.fully_connected:
            return False
        return inp.numel() * inp.element_size() < limits[0]

    def capture(self) -> AbstractContextManager[None]:
        """Surround captures, after which AITER registers what they recorded."""
        context: AbstractContextManager[None] = self._impl.capture()
        return context

    def close(self) -> None:
        """Give the IPC buffers up."""
        self._impl.close()

    @property
    def supports_dynamic_hidden_dim(self) -> bool:
        """Whether the fused kernels take any width.

        Releases before 0.1.12 do nothing for others than 512, 1024, 2048 and 4096
        (ROCm/aiter, csrc/include/custom_all_reduce.cuh); they have no `_pool`.
        """
        return hasattr(self._impl, "_pool")

    @staticmethod
    def build_supports_per_group_quant() -> bool:
        """Whether the installed AITER fuses a quantisation by groups (ROCm/aiter#2823).

        It does from 0.1.14 on.
        """
        from aiter.dist.device_communicators import custom_all_reduce

        return hasattr(
            custom_all_reduce.CustomAllreduce, "fused_ar_rms_per_group_quant"
        )

    @property
    def supports_per_group_quant(self) -> bool:
        """As `build_supports_per_group_quant`."""
        return self.build_supports_per_group_quant()
