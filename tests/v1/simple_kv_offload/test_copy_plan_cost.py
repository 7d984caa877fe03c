# SPDX-License-Identifier: Apache-2.0
"""What a plan costs the thread that submits copies: 128 blocks of 131 regions.

The bound is some hundred times what it takes, for busy machines; one Python call a page
would break it.
"""

from __future__ import annotations

import timeit

import numpy as np
import pytest
from vllm.v1.simple_kv_offload.copy_plan import (
    CUDA_LIMITS,
    NO_CUTS,
    SDMA_LIMITS,
    CopyPlan,
    Region,
)

DEVICE, HOST = 1 << 40, 1 << 44
PAGES = [16 << 10] * 71 + [32 << 10] * 60
DEVICE_BLOCKS, HOST_BLOCKS = 16384, 131072
BLOCKS = 128
MOST_SECONDS = 0.02

# Of host memory in pieces of 64 GiB, and of device memory in chunks of 1 GiB.
REGISTRATION_ENDS = np.arange(
    HOST, HOST + sum(PAGES) * HOST_BLOCKS, 64 << 30, dtype=np.uint64
)
CHUNK_ENDS = np.arange(
    DEVICE, DEVICE + sum(PAGES) * DEVICE_BLOCKS, 1 << 30, dtype=np.uint64
)


def _regions() -> list[Region]:
    """Layer after layer on the device, block after block on the host."""
    return [
        Region(
            f"layer.{i}",
            DEVICE + DEVICE_BLOCKS * sum(PAGES[:i]),
            HOST + sum(PAGES[:i]),
            page,
            sum(PAGES),
            page,
        )
        for i, page in enumerate(PAGES)
    ]


@pytest.mark.parametrize(
    ("limits", "cuts", "fewest", "most"),
    [
        pytest.param(CUDA_LIMITS, NO_CUTS, 2, 2, id="CUDA"),
        pytest.param(CUDA_LIMITS, REGISTRATION_ENDS, 2, 2, id="CUDA-registrations"),
        pytest.param(SDMA_LIMITS, REGISTRATION_ENDS, 2, 2, id="SDMA-registrations"),
        # A chunk holds four pages of the smaller layers, and two of the others.
        pytest.param(SDMA_LIMITS, CHUNK_ENDS, 45, 52, id="SDMA-chunks"),
        pytest.param(None, CHUNK_ENDS, 131, 131, id="pages-chunks"),
    ],
)
def test_planning_a_large_model_takes_little_time(limits, cuts, fewest, most):
    plan = CopyPlan(_regions(), cuts, limits=limits)
    scattered = np.random.default_rng(0).permutation(4096)[:BLOCKS].tolist()
    blocks = scattered, scattered[::-1]

    copies = plan.copies(*blocks)
    a_block = (len(copies.rectangles) + len(copies.pages)) / BLOCKS
    assert fewest <= a_block <= most
    assert copies.rectangles.num_bytes + copies.pages.num_bytes == BLOCKS * sum(PAGES)

    seconds = timeit.repeat(lambda: plan.copies(*blocks), number=1, repeat=100)
    assert min(seconds) < MOST_SECONDS
