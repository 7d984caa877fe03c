# SPDX-License-Identifier: Apache-2.0
"""A configuration of vLLM's changes the environment, for the processes it starts."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def environment_is_put_back() -> Iterator[None]:
    """LD_PRELOAD above all: a program with a sanitizer does not start with it."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
