# SPDX-License-Identifier: Apache-2.0
"""RECORD lines are renewed and added; the others stay to the byte."""

import pytest

from vllm_rocm_memory.series import record

# sha256 of b"new" in RECORD's spelling, from `openssl dgst -sha256 -binary | base64`.
NEW = "EVB6Di9eadXfpApiob17buV-a82FxnybhDGzb_8hxDc"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_entered(end):
    lines = ["vllm/a.py,sha256=old,1", '"vllm/b,c.py",sha256=x,2', "x/RECORD,,"]
    before = (end.join(lines) + end).encode()
    after = record.entered(before, {"vllm/z.py": b"new", "vllm/a.py": b"new"})
    lines[0] = f"vllm/a.py,sha256={NEW},3"
    lines.append(f"vllm/z.py,sha256={NEW},3")
    assert after == (end.join(lines) + end).encode()


def test_a_last_line_without_an_end_gets_one():
    after = record.entered(b"vllm/a.py,,", {"b": b"new"})
    assert after == f"vllm/a.py,,\nb,sha256={NEW},3\n".encode()


def test_the_order_of_the_files_does_not_matter():
    files = {"b": b"1", "a": b"2", "c": b"3"}
    backwards = dict(reversed(files.items()))
    assert record.entered(b"", files) == record.entered(b"", backwards)


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        (b"vllm/__init__.py,sha256=x,0\n", True),
        (b"\nvllm/__init__.py,,", True),
        (b"other/vllm/__init__.py,,\n", False),
        (b"", False),
    ],
)
def test_lists(text, listed):
    assert record.lists(text, "vllm/__init__.py") is listed
