# SPDX-License-Identifier: Apache-2.0
"""A replaced module must still give the rest of the tree what it imports."""

import pytest

from vllm_rocm_memory.series.compatibility import missing_names

OURS = """
import os.path
import numpy as np
from torch import nn, cuda as gpu
A = B = 1
C: int = 2
(D, [E, *F]) = G
if A:
    def late(): inner = 1
else:
    class Other: attribute = 1
try:
    H = 1
except ImportError as caught:
    I = 1
for J in []: pass
with A as K: pass
"""
EXPORTED = ["os", "np", "nn", "gpu", *"ABCDEF", "late", "Other", *"HIJK"]


def missing(write_tree, tmp_path, importer: str, path: str = "vllm/other/use.py"):
    root = write_tree(tmp_path, {path: importer, "vllm/pkg/owned.py": "old = 1\n"})
    results = {"vllm/pkg/owned.py": OURS.encode()}
    found = missing_names(root, results, "vllm/pkg/owned.py")
    assert all(lost.importer == path for lost in found)
    assert all(lost.module == "vllm.pkg.owned" for lost in found)
    return [lost.name for lost in found]


@pytest.mark.parametrize("name", EXPORTED)
def test_what_is_bound_at_the_top_is_there(write_tree, tmp_path, name):
    line = f"from vllm.pkg.owned import {name}\n"
    assert missing(write_tree, tmp_path, line) == []


@pytest.mark.parametrize("name", ["old", "inner", "attribute", "path", "torch", "x"])
def test_what_is_not_is_missing(write_tree, tmp_path, name):
    line = f"from vllm.pkg.owned import {name} as y, A\n"
    assert missing(write_tree, tmp_path, line) == [name]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import vllm.pkg.owned\nvllm.pkg.owned.old()\n", ["old"]),
        ("import vllm.pkg.owned as o\ndef f():\n    return o.old + o.A\n", ["old"]),
        ("from vllm.pkg import owned\nowned.old, owned.B\n", ["old"]),
        ("from vllm.pkg import owned as o\no.old = 1\n", []),
        ("from vllm.pkg import owned\nother.old\n", []),
        ("def f():\n    from vllm.pkg.owned import old\n", ["old"]),
        ("from ..pkg.owned import old\n", ["old"]),
        ("from ..pkg import owned\nowned.old\n", ["old"]),
        ("from .owned import old\n", []),
        ("from other.pkg.owned import old\n", []),
        ("from vllm.pkg.owned import *\n", ["*"]),
    ],
)
def test_ways_to_import(write_tree, tmp_path, text, names):
    assert missing(write_tree, tmp_path, text) == names


def test_a_relative_import_from_a_package(write_tree, tmp_path):
    text = "from .owned import old\n"
    assert missing(write_tree, tmp_path, text, "vllm/pkg/__init__.py") == ["old"]


def test_our_files_stand_for_those_on_disk(write_tree, tmp_path):
    root = write_tree(tmp_path, {"vllm/use.py": "from vllm.pkg.owned import old\n"})
    results = {
        "vllm/pkg/owned.py": b"A = 1\n",
        "vllm/use.py": b"from vllm.pkg.owned import A\n",
        "vllm/new.py": b"from vllm.pkg.owned import C\n",
    }
    found = missing_names(root, results, "vllm/pkg/owned.py")
    assert [(lost.importer, lost.name) for lost in found] == [("vllm/new.py", "C")]
