# SPDX-License-Identifier: Apache-2.0
"""The same over the CUDA driver's functions, in a process that has these."""

import re

import pytest

from .conftest import CudaColumn
from .simulated_gpu import IS_HIP, injected

DEADLINE = 240  # seconds


@pytest.mark.skipif(not IS_HIP, reason="this is that process")
def test_on_cuda(cuda_column: CudaColumn | None) -> None:
    if cuda_column is None:
        pytest.skip("a process with a GPU's own driver does not use the simulator's")
    code = cuda_column.process.wait(DEADLINE)
    said = cuda_column.output.read_text()
    assert code == 0, said
    counts = re.findall(r"\b(cuda-[\d.]+): (\d+)", said)
    assert counts
    for release, count in counts:
        injected[release] += int(count)
