# SPDX-License-Identifier: Apache-2.0
"""The simulator's contract, against the HIP runtime that PyTorch uses here.

Not run on AMD hardware so far. A case that fails is a finding about the source that it
names, or about the simulator.
"""

from __future__ import annotations

import pytest
import torch

from .contract_runs import Contract, contract, mapped_library

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def runtime() -> Contract:
    torch.cuda.init()
    return contract("HIP", mapped_library(r"libamdhip64[^/]*\.so[.\d]*"))


def test_the_runtime_keeps_the_contract(
    runtime: Contract, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print(f"\n{runtime.tell()}")
    runtime.assert_kept()


def test_what_is_left_out_says_why(runtime: Contract) -> None:
    for name, (outcome, why) in runtime.outcomes.items():
        assert outcome != "SKIP" or why, name
