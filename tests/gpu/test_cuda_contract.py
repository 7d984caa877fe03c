# SPDX-License-Identifier: Apache-2.0
"""The contract with CUDA's driver, against the driver that PyTorch uses here."""

from __future__ import annotations

import pytest
import torch

from .contract_runs import Contract, contract, mapped_library

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        torch.version.hip is not None,
        reason="the driver is ROCm's here: test_hip_contract.py",
    ),
]


@pytest.fixture(scope="module")
def driver() -> Contract:
    torch.cuda.init()
    return contract("LIBCUDA", mapped_library(r"libcuda\.so[.\d]*"))


def test_the_driver_keeps_the_contract(
    driver: Contract, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print(f"\n{driver.tell()}")
    driver.assert_kept()


def test_what_is_left_out_says_why(driver: Contract) -> None:
    for name, (outcome, why) in driver.outcomes.items():
        assert outcome != "SKIP" or why, name
