# SPDX-License-Identifier: Apache-2.0
"""Takes the place of vllm/vllm_flash_attn/__init__.py where its kernels stay behind.

vLLM's own refuses to be imported without them, and its CUDA platform imports it
whatever the attention backend. The module below it loads, and answers that no version
is supported, so an engine runs with --attention-backend TRITON_ATTN.
"""

from vllm.vllm_flash_attn.flash_attn_interface import (
    compile_flash_attn_varlen_func_from_specs,
    fa_version_unsupported_reason,
    flash_attn_varlen_func,
    get_scheduler_metadata,
    is_fa_version_supported,
)

__all__ = [
    "compile_flash_attn_varlen_func_from_specs",
    "fa_version_unsupported_reason",
    "flash_attn_varlen_func",
    "get_scheduler_metadata",
    "is_fa_version_supported",
]
