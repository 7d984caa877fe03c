# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks have in common."""

from __future__ import annotations

import json
import sys

import pytest
import reporting

TABLE = reporting.Table("Figures", ["", "a"], [["x", "1\n2"], ["longer", ""]])


def report_of(result):
    return reporting.Report(result["text"], [TABLE])


def test_a_result_replaces_the_one_before_when_it_is_whole(tmp_path) -> None:
    path = tmp_path / "result.json"
    reporting.save({"n": 1}, path)
    with pytest.raises(TypeError):
        reporting.save({"n": object()}, path)
    assert json.loads(path.read_text()) == {"n": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_result_goes_where_a_link_points(tmp_path) -> None:
    path, link = tmp_path / "result.json", tmp_path / "link.json"
    link.symlink_to(path)
    reporting.save({"n": 1}, link)
    assert link.is_symlink() and json.loads(path.read_text()) == {"n": 1}


def test_a_report_is_made_once_where_a_result_is_read(tmp_path) -> None:
    path, made = tmp_path / "result.json", []

    def counted(result):
        made.append(result)
        return report_of(result)

    result = {"benchmark": "b", "schema_version": 1, "text": "machine"}
    reporting.save(result, path)
    assert reporting.load(path, "b", 1, counted) == (result, report_of(result))
    assert made == [result]
    with pytest.raises(reporting.BenchmarkError, match="not a result of this"):
        reporting.load(path, "c", 1, counted)
    with pytest.raises(reporting.BenchmarkError, match=r"version 1, and .* reads 2"):
        reporting.load(path, "b", 2, counted)
    del result["text"]
    reporting.save(result, path)
    with pytest.raises(reporting.BenchmarkError, match="damaged: KeyError: 'text'"):
        reporting.load(path, "b", 1, counted)


def test_a_table_without_rich_has_columns(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    report = report_of({"text": "machine"})
    reporting.show(report)
    assert capsys.readouterr().out == str(report)
    assert str(report).splitlines() == [
        *("machine", "", "Figures"),
        *("        a", "x       1", "        2", "longer"),
    ]


def test_the_command_is_that_of_this_run(monkeypatch) -> None:
    line = reporting.command_line("/any/where/x.py", ["--output", "a b"])
    assert line == "python benchmarks/x.py --output 'a b'"
    monkeypatch.setattr("sys.argv", ["x.py", "--quick"])
    assert reporting.command_line("x.py", None) == "python benchmarks/x.py --quick"


def test_the_drivers_version_comes_from_the_file_or_the_tool(
    tmp_path, monkeypatch
) -> None:
    path = tmp_path / "version"
    path.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release\n"
    )
    assert reporting.nvidia_driver(path) == "nvidia 580.159.04"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert reporting.nvidia_driver(tmp_path / "none") == "nvidia unknown"
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 570.10\n")
    tool.chmod(0o755)
    assert reporting.nvidia_driver(tmp_path / "none") == "nvidia 570.10"


def test_amdgpu_has_a_version_of_its_own_or_linuxs(tmp_path, monkeypatch) -> None:
    path = tmp_path / "version"
    monkeypatch.setattr(reporting.platform, "release", lambda: "6.8.0")
    assert reporting.amdgpu_driver(path) == "amdgpu of Linux 6.8.0"
    path.write_text("\n")
    assert reporting.amdgpu_driver(path) == "amdgpu of Linux 6.8.0"
    path.write_text("6.19.14.31400000\n")
    assert reporting.amdgpu_driver(path) == "amdgpu 6.19.14.31400000"
