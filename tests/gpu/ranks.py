# SPDX-License-Identifier: Apache-2.0
"""Who reduces among ranks, for the programs of several ranks and their tests."""

from typing import Any

import torch

RANKS = 2


def reducers(communicator: Any) -> list[Any]:
    """The custom all-reduces of a group, vLLM's or AITER's, that are in use."""
    names = ("ca_comm", "aiter_ar_comm")
    found = [getattr(communicator, name, None) for name in names]
    return [each for each in found if each is not None and not each.disabled]


def should_reduce() -> bool:
    """Whether vLLM's own custom all-reduce has no reason to be disabled here."""
    from vllm.platforms import current_platform

    gpus = torch.cuda.device_count()  # with one, the ranks share it
    reach = gpus < RANKS or torch.cuda.can_device_access_peer(0, 1)
    return bool(current_platform.use_custom_allreduce() and reach)


def register_captures(reducers: list[Any]) -> bool:
    """Whether one of them registers the memory of a capture."""
    return any(
        each.aiter_ca.enable_register_for_capturing
        if hasattr(each, "aiter_ca")
        else each._capture_registered
        for each in reducers
    )
