# SPDX-License-Identifier: Apache-2.0
"""The benchmark of copies beside decode: all of it but the GPU's own work."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import itertools
import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kv_copy_interference as bench
import numpy as np
import pytest
import reporting
import torch
from vllm.platforms import hip_runtime
from vllm.v1.simple_kv_offload import cuda_mem_ops, host_cache
from vllm.v1.simple_kv_offload.copy_engine import CopyEngine

from vllm_rocm_memory.sim import hipsim, torch_device

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kv_copy_interference.py"

# Mean and p99 of the slowdown in percent, GB/s: by engine and direction.
FIGURES = {
    "rect": {"load": (2.4, 3.6, 49.1), "store": (0.4, 1.3, 48.2)},
    "batch": {"load": (8.0, 45.0, 10.2), "store": (-0.2, 0.9, 25.4)},
    "batch-flag": {"load": (7.8, 44.0, 10.4), "store": (0.25, 1.0, 25.9)},
    "kernel": {"load": (2500.0, 2900.0, 43.0), "store": (900.0, 1100.0, 42.4)},
}


def loaded_case(engine: str, direction: str, batch_size: int, blocks: int) -> Any:
    mean, p99, bandwidth = FIGURES[engine][direction]
    if (batch_size, blocks) != (16, 128):
        # The case that is drawn is the one with the highest p99.
        p99, bandwidth = p99 - 0.1, 5.0
    return {
        "engine": engine,
        "batch_size": batch_size,
        "direction": direction,
        "blocks": blocks,
        "bandwidth_gb_per_s": bandwidth,
        "transfers_count": 24,
        "window_s": 0.5,
        "short": "",
        "decode_alone_before": bench.summarize_ms([0.4, 0.5]),
        "decode_alone_after": bench.summarize_ms([0.4, 0.6]),
        "drift_percent": 0.3,
        "decode": bench.summarize_ms([0.5, 0.6]),
        "slowdown": {
            "median_percent": mean / 2,
            "mean_percent": mean,
            "p99_percent": p99,
            "slow_replays_percent": 1.5,
        },
    }


def recorded() -> dict[str, Any]:
    cases = list(itertools.product(("load", "store"), (32, 128)))
    engine = {
        "status": "measured",
        "reason": "",
        "description": "as described",
        "round_trip": {
            "blocks": 64,
            "regions": 131,
            "regions_differing": 0,
            "regions_overwritten": 0,
        },
        "submission": [
            {"direction": direction, "blocks": blocks} | bench.summarize_ms([0.93])
            for direction, blocks in cases
        ],
        "alone": [
            {
                "direction": direction,
                "blocks": blocks,
                "bandwidth_gb_per_s": 50.5,
                "transfers_count": 10,
                "window_s": 0.1,
            }
            for direction, blocks in cases
        ],
    }
    settings = bench.Settings()
    return {
        "benchmark": "kv_copy_interference",
        "schema_version": 2,
        "command": "python benchmarks/kv_copy_interference.py --json result.json",
        "started_at": "2026-11-30T00:00:00+00:00",
        "machine": {
            "gpu": "NVIDIA H200",
            "driver": "nvidia 580.159.04",
            "runtime": "CUDA 13.0",
            "torch": "2.11.0",
            "vllm": "0.33.0",
            "series": "0.1.0",
        },
        "settings": bench.asdict(settings)
        | {"block_bytes": settings.block_bytes, "layout": bench.LAYOUT},
        "engines": {name: copy.deepcopy(engine) for name in FIGURES},
        "loaded": [
            loaded_case(name, direction, batch_size, blocks)
            for name in FIGURES
            for batch_size in (64, 16)
            for direction, blocks in cases
        ],
        "ended_early": "",
        "duration_s": 100.0,
    }


@pytest.fixture
def result_file(tmp_path) -> Path:
    path = tmp_path / "result.json"
    reporting.save(recorded(), path)
    return path


# --- Statistics


def test_statistics_are_those_of_the_samples() -> None:
    samples = [random.Random(1).uniform(0.3, 0.9) for _ in range(401)]
    summary = bench.summarize_ms(samples)
    assert summary["samples_count"] == 401
    assert summary["median_ms"] == pytest.approx(np.median(samples))
    assert summary["mean_ms"] == pytest.approx(np.mean(samples))
    assert summary["p99_ms"] == pytest.approx(np.percentile(samples, 99))
    assert (summary["min_ms"], summary["max_ms"]) == (min(samples), max(samples))


@pytest.mark.parametrize("count", [1, 2, 100])
def test_a_percentile_of_few_samples_exists(count) -> None:
    samples = [float(n) for n in range(count)]
    for percent in (0, 50, 99, 100):
        assert bench.percentile(samples, percent) == pytest.approx(
            np.percentile(samples, percent)
        )


def test_slowdown_is_against_the_median_alone() -> None:
    samples = [0.4] * 80 + [0.44] * 10 + [0.8] * 10
    slower = bench.slowdown(samples, alone_ms=0.4)
    assert slower["median_percent"] == pytest.approx(0)
    assert slower["mean_percent"] == pytest.approx(11)
    assert slower["p99_percent"] == pytest.approx(100)
    assert slower["slow_replays_percent"] == 10


def test_transfers_at_the_edges_count_in_part() -> None:
    spans = [(0.0, 2.0), (2.0, 3.0), (3.0, 7.0), (8.0, 9.0)]
    assert bench.transfers_within(spans, 1.0, 4.0) == pytest.approx(0.5 + 1 + 0.25)
    assert bench.transfers_within([], 0.0, 1.0) == 0
    assert bench.transfers_within([(0.5, 0.5)], 0.0, 1.0) == 0
    assert bench.whole_transfers(spans, 1.0, 7.0) == 2


def test_a_case_that_ended_early_says_what_it_lacks() -> None:
    settings = bench.Settings()
    assert settings.shortfall(400, 10) == ""
    assert settings.shortfall(180, 9) == "180 of 400 replays, 9 of 10 transfers in 5 s"
    assert settings.shortfall(400, 9) == "9 of 10 transfers in 5 s"


# --- Options


def settings_of(*words: str) -> Any:
    parser = bench.make_parser()
    return bench.settings_from(parser.parse_args(words), parser)


def test_defaults_are_the_seeds_cases() -> None:
    settings = settings_of()
    assert settings.block_bytes == (71 * 16 + 60 * 32) * 1024
    assert (settings.blocks, settings.batch_sizes) == ((32, 128), (16, 64))
    assert settings.cpu_blocks * settings.block_bytes < 6.5 * 1024**3


def test_quick_measures_less_and_keeps_what_is_given() -> None:
    quick, full = settings_of("--quick"), settings_of()
    assert quick.replays < full.replays
    assert len(quick.batch_sizes) < len(full.batch_sizes)
    assert settings_of("--quick", "--replays", "7").replays == 7


def test_equal_layers_stay_and_equal_cases_do_not() -> None:
    settings = settings_of(
        *("--layers", "4", "4", "--pages", "16", "32", "--blocks", "8", "8")
    )
    assert settings.layers == (4, 4)
    assert settings.blocks == (8,)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--engines warp", "invalid choice: 'warp'"),
        ("--blocks 0", "0 is not a positive number"),
        ("--replays many", "invalid positive value: 'many'"),
        ("--layers 4 --pages 16 32", "--layers has 1 numbers and --pages 2"),
        ("--blocks 65 --gpu-blocks 64", "a transfer of 65 blocks does not fit"),
        ("--blocks 65 --cpu-blocks 64", "a transfer of 65 blocks does not fit"),
        ("--gpu-blocks 1 --blocks 1", "at least 2 GPU blocks"),
        ("--json /nowhere/a.json", "there is no folder /nowhere"),
        ("--png /nowhere/a.png", "there is no folder /nowhere"),
        ("--json /tmp", "/tmp is a folder"),
        ("--kernel-programs 0", "0 is not a positive number"),
        ("--from-json a.json --json b.json", "--from-json measures nothing"),
    ],
)
def test_wrong_options_are_refused(words, message, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main(words.split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu_it_says_what_works(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as caught:
        bench.main(["--quick"])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs an AMD or NVIDIA GPU" in line and "--from-json FILE" in line


def test_a_vllm_without_the_series_is_refused(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "vllm.v1.simple_kv_offload.host_cache", None)
    with pytest.raises(SystemExit):
        bench.main([])
    assert "vllm-rocm-memory apply" in capsys.readouterr().err


# --- Results


def test_a_result_survives_its_file(result_file) -> None:
    result, report = bench.load(result_file)
    assert report == bench.report_of(result)
    assert result == json.loads(json.dumps(recorded()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a result of this benchmark"),
        ('{"benchmark": "other", "schema_version": 1}', "is not a result of this"),
        (
            '{"benchmark": "kv_copy_interference", "schema_version": 1}',
            "has schema version 1, and this benchmark reads 2",
        ),
        (
            '{"benchmark": "kv_copy_interference", "schema_version": 2, "loaded": []}',
            "is damaged: KeyError",
        ),
    ],
)
def test_a_file_that_is_no_result_is_refused(tmp_path, text, message, capsys) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(SystemExit):
        bench.main(["--from-json", str(path)])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage",
    [
        lambda result: result["loaded"][0].pop("slowdown"),
        lambda result: result["loaded"][0].pop("transfers_count"),
        lambda result: result["engines"]["rect"].pop("round_trip"),
        lambda result: result["settings"].pop("depth"),
        lambda result: result["settings"].pop("block_bytes"),
        lambda result: result["machine"].pop("gpu"),
        lambda result: result.update(engines=[]),
        lambda result: result.pop("ended_early"),
    ],
)
def test_a_result_that_lacks_something_is_damaged(damage, tmp_path) -> None:
    result = recorded()
    damage(result)
    path = tmp_path / "result.json"
    reporting.save(result, path)
    with pytest.raises(bench.BenchmarkError, match="is damaged"):
        bench.load(path)


@pytest.fixture
def measuring(monkeypatch) -> list[Any]:
    """A measurement that answers the recorded result; counts how often it ran."""
    ran: list[Any] = []

    def measure(settings: Any, command: str, quick: bool, keep: Any) -> Any:
        result = recorded()
        ran.append(settings)
        keep({"so far": 1})
        return result

    monkeypatch.setattr(bench, "require_gpu", lambda: None)
    monkeypatch.setattr(bench, "measure", measure)
    return ran


def test_a_result_is_shown_before_it_is_written(measuring, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main(["--json", "/dev/full"])
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert "Decode slowdown" in captured.out and "No space left" in captured.err
    assert len(measuring) == 1


@pytest.mark.parametrize(
    ("name", "missing", "message"),
    [
        ("out.txt", "", "no format has the suffix '.txt'"),
        ("out", "", "no format has the suffix ''"),
        ("out.png", "matplotlib.figure", "needs matplotlib"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused_before_measuring(
    name, missing, message, measuring, tmp_path, monkeypatch, capsys
) -> None:
    pytest.importorskip("matplotlib")
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as caught:
        bench.main(["--png", str(tmp_path / name)])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
    assert not measuring


def test_what_savefig_refuses_is_one_error(measuring, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")

    def refuse(path: Path) -> None:
        raise ValueError("too large")

    monkeypatch.setattr(bench, "draw", lambda result: SimpleNamespace(savefig=refuse))
    with pytest.raises(SystemExit) as caught:
        bench.main(["--png", str(tmp_path / "out.png")])
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert "too large" in captured.err and "Decode slowdown" in captured.out


def test_a_file_that_is_absent_is_named(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--from-json", str(tmp_path / "none.json")])
    assert "none.json: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("rich", [True, False])
def test_the_tables_have_every_case(rich, result_file, monkeypatch, capsys) -> None:
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    assert bench.main(["--from-json", str(result_file)]) == 0
    out = capsys.readouterr().out
    for text in ("+1.2 (+2.4, +3.6)", "49.1 GB/s", "+1250 (+2500, +2900)"):
        assert text in out
    for text in ("24 transfers", "drift +0.3", "2 transfers in flight, alone as"):
        assert text in out
    for text in (
        "host: block after block",
        "0 of 131",
        "load 128: 0.93",
        "store 32: 50.5",
        "NVIDIA H200",
    ):
        assert text in out


def test_an_engine_that_did_not_run_has_a_reason(result_file, capsys) -> None:
    result = recorded()
    result["engines"]["kernel"] = {
        "status": "skipped",
        "reason": "no Triton",
        "description": "",
    }
    result["loaded"] = [c for c in result["loaded"] if c["engine"] != "kernel"]
    reporting.save(result, result_file)
    assert bench.main(["--from-json", str(result_file)]) == 0
    assert "skipped: no Triton" in capsys.readouterr().out


@pytest.mark.parametrize(
    "fault",
    [
        {"status": "failed", "reason": "RuntimeError: refused"},
        {
            "round_trip": {
                "blocks": 64,
                "regions": 131,
                "regions_differing": 2,
                "regions_overwritten": 0,
            }
        },
        {
            "round_trip": {
                "blocks": 64,
                "regions": 131,
                "regions_differing": 0,
                "regions_overwritten": 2,
            }
        },
    ],
)
def test_a_failure_or_a_wrong_byte_is_the_exit_status(fault, result_file) -> None:
    result = recorded()
    result["engines"]["batch"] |= fault
    reporting.save(result, result_file)
    assert bench.main(["--from-json", str(result_file)]) == 1
    table = bench.interference_table(result)
    column = table.headers.index("batch")
    assert {row[column] for row in table.rows} < {"failed", "wrong bytes"}
    assert "batch" not in {mark.engine for mark in bench.marks_of(result)}
    assert "rect" in {mark.engine for mark in bench.marks_of(result)}


def test_nothing_measured_or_an_early_end_is_a_failure(result_file) -> None:
    result = recorded()
    result["ended_early"] = "rect: a transfer did not end"
    assert not bench.succeeded(result)
    assert "ENDED EARLY: rect" in bench.machine_text(result)
    result = recorded()
    for entry in result["engines"].values():
        entry.update(status="skipped", reason="no")
    reporting.save(result, result_file)
    assert bench.main(["--from-json", str(result_file)]) == 1
    with pytest.raises(bench.BenchmarkError, match="nothing to draw"):
        bench.draw(result)


def test_a_case_that_ended_early_is_marked() -> None:
    pytest.importorskip("matplotlib")
    result = recorded()
    for case in result["loaded"]:
        if case["engine"] == "kernel":
            case["short"] = "180 of 400 replays in 5 s"
    rows = bench.interference_table(result).rows
    assert all("short: 180 of 400" in row[-1] for row in rows)
    assert not any("short" in cell for row in rows for cell in row[:-1])
    figure = bench.draw(result)
    for panel in figure.axes:
        for engine, label in labels_of(panel).items():
            assert ("*" in label.get_text()) == (engine == "kernel")
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert "*: ended early" in texts and "kernel: 32 programs" in texts


# --- The picture


def labels_of(panel: Any) -> dict[str, Any]:
    return {text.get_gid().removesuffix(" label"): text for text in panel.texts}


def test_the_picture_has_a_point_an_engine_and_direction(result_file, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "result.png"
    assert bench.main(["--from-json", str(result_file), "--png", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")

    for panel, direction in zip(
        bench.draw(recorded()).axes, ("load", "store"), strict=True
    ):
        points = {line.get_gid(): line for line in panel.lines}
        for engine, figures in FIGURES.items():
            mean, p99, bandwidth = figures[direction]
            for name, value in (("mean", mean), ("p99", p99)):
                (point,) = points[f"{engine} {name}"].get_xydata()
                assert tuple(point) == (bandwidth, value)
            assert labels_of(panel)[engine].get_text().startswith(engine)


@pytest.mark.parametrize("same_place", [False, True])
def test_no_text_lies_on_other_text_or_on_a_point(same_place) -> None:
    pytest.importorskip("matplotlib")
    result = recorded()
    if same_place:
        for case in result["loaded"]:
            case["slowdown"] = result["loaded"][0]["slowdown"]
            case["bandwidth_gb_per_s"] = 40.0
    figure = bench.draw(result)
    figure.canvas.draw()
    outer = figure.bbox
    for panel in figure.axes:
        texts = [*panel.texts, *figure.texts, panel.title, panel.xaxis.label]
        texts += figure.legends[0].get_texts()
        left, right = panel.get_xlim()
        ticks = zip(panel.get_xticks(), panel.get_xticklabels(), strict=True)
        texts += [text for tick, text in ticks if left <= tick <= right]
        boxes = [text.get_window_extent() for text in texts]
        for one, other in itertools.combinations(boxes, 2):
            assert not one.overlaps(other)
        for box in [*boxes, panel.yaxis.label.get_window_extent()]:
            assert outer.x0 <= box.x0 and box.x1 <= outer.x1
            assert outer.y0 <= box.y0 and box.y1 <= outer.y1
        for text in panel.texts:
            box = text.get_window_extent()
            for line in panel.lines:
                for place in panel.transData.transform(line.get_xydata()):
                    assert not box.contains(*place)


def test_without_matplotlib_the_rest_is_done(result_file, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    picture = result_file.with_suffix(".png")
    with pytest.raises(SystemExit):
        bench.main(["--from-json", str(result_file), "--png", str(picture)])
    captured = capsys.readouterr()
    assert "0 of 131" in captured.out
    assert "needs matplotlib" in captured.err


# --- What ran


KERNELS = (
    '"Kind","Agent_Id","Queue_Id","Stream_Id","Thread_Id","Dispatch_Id","Kernel_Id",'
    '"Kernel_Name","Correlation_Id","Start_Timestamp","End_Timestamp"\n'
)
COPIES = (
    '"Kind","Direction","Stream_Id","Source_Agent_Id","Destination_Agent_Id",'
    '"Correlation_Id","Start_Timestamp","End_Timestamp"\n'
)
COPY_IN = '"MEMORY_COPY","MEMORY_COPY_HOST_TO_DEVICE",1,0,2,952,10,20\n'
# Releases before the prefix came.
COPY_OUT = '"MEMORY_COPY","DEVICE_TO_HOST",1,2,0,953,30,40\n'
BLIT = '"KERNEL_DISPATCH",2,1,1,7,1,11,"__amd_rocclr_copyBufferRectAligned.kd",1,1,2\n'
OTHER = '"KERNEL_DISPATCH",2,1,1,7,1,11,"void fill<float>(float*, int)",1,1,2\n'

FAKE_PROFILER = """#!{python}
import pathlib, sys
words = sys.argv[1:]
pathlib.Path({log!r}).write_text("\\n".join(words))
folder = pathlib.Path(words[words.index("-d") + 1], "host")
folder.mkdir(parents=True)
for name, text in {traces!r}.items():
    (folder / name).write_text(text)
print("said on the way", file=sys.stderr)
sys.exit({code})
"""


@pytest.fixture
def profiler(tmp_path, monkeypatch) -> Callable[..., list[str]]:
    """Put a rocprofv3 on the path that writes given files and ends with a code."""

    def install(traces: dict[str, str], code: int = 0) -> Path:
        log = tmp_path / "words"
        script = tmp_path / "rocprofv3"
        script.write_text(
            FAKE_PROFILER.format(
                python=sys.executable, log=str(log), traces=traces, code=code
            )
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        return log

    return install


def traces_of(copies: str, kernels: str) -> dict[str, str]:
    return {
        "77_memory_copy_trace.csv": COPIES + copies,
        "77_kernel_trace.csv": KERNELS + kernels,
    }


@pytest.mark.parametrize(
    ("engine", "copies", "kernels", "ran"),
    [
        ("rect", (COPY_IN + COPY_OUT) * 256, OTHER, "copy engine"),
        ("rect", (COPY_IN + COPY_OUT) * 255, OTHER, "unknown"),
        ("rect", COPY_IN * 512, OTHER, "unknown"),
        ("rect", "", BLIT + OTHER, "kernel"),
        ("batch", COPY_IN, BLIT, "partly kernels"),
        ("batch", "", OTHER, "unknown"),
        # What the kernel engine uploads before is no copy of blocks.
        ("kernel", COPY_IN * 2, BLIT.replace("__amd_rocclr_", "copy_pages"), "kernel"),
    ],
    ids=["engine", "few", "one way", "blit", "partly", "neither", "triton"],
)
def test_the_profile_says_what_moved_the_blocks(
    engine, copies, kernels, ran, profiler
) -> None:
    log = profiler(traces_of(copies, kernels))
    result = bench.profile_engine(engine, bench.Settings())
    assert result["ran"] == ran
    assert result["copy_kernels"].get("__amd_rocclr_copyBufferRectAligned.kd", 0) == (
        kernels.count("__amd_rocclr_copyBuffer")
    )
    assert result["other_kernels"] == kernels.count("fill<float>")
    assert result["memory_copies"].get("HOST_TO_DEVICE", 0) == copies.count(COPY_IN)
    assert result["memory_copies"].get("DEVICE_TO_HOST", 0) == copies.count(COPY_OUT)

    words = log.read_text().splitlines()
    options, command = words[: words.index("--")], words[words.index("--") + 1 :]
    assert {"--kernel-trace", "--memory-copy-trace"} <= set(options)
    assert options[options.index("--output-format") + 1] == "csv"
    assert command[:2] == [sys.executable, str(SCRIPT)]
    args = bench.make_parser().parse_args(command[2:])
    settings = bench.settings_from(args, bench.make_parser())
    assert args.copy_only == engine
    # The rows of a rectangle lie as far apart as in what is measured.
    assert (settings.layers, settings.page_kib) == ((71, 60), (16, 32))
    assert settings.gpu_blocks == bench.Settings().gpu_blocks
    assert (settings.blocks, settings.cpu_blocks) == ((32,), 64)


def test_few_blocks_are_profiled_whole(profiler) -> None:
    log = profiler({})
    bench.profile_engine("rect", SMALL)
    words = log.read_text().splitlines()
    parser = bench.make_parser()
    args = parser.parse_args(words[words.index("--") + 3 :])
    settings = bench.settings_from(args, parser)
    assert (settings.blocks, settings.gpu_blocks, settings.cpu_blocks) == (
        (16,),
        16,
        20,
    )
    assert bench.fewest_records(settings) == 16 * bench.PROFILE_ROUNDS


def test_without_sdma_the_records_say_nothing(profiler, monkeypatch) -> None:
    profiler(traces_of((COPY_IN + COPY_OUT) * 256, OTHER))
    monkeypatch.setenv("HSA_ENABLE_SDMA", "0")
    result = bench.profile_engine("rect", bench.Settings())
    assert result["ran"] == "unknown" and "HSA_ENABLE_SDMA=0" in result["reason"]


def test_a_profiler_that_is_late_ends_with_what_it_started(tmp_path) -> None:
    child = tmp_path / "child"
    # What is started holds the pipes open, as a profiled process does.
    command = f"sleep 60 & echo $! > {child}; wait"
    begin = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        bench.run_bounded(["/bin/sh", "-c", command], 0.3)
    assert time.monotonic() - begin < 10
    state = Path("/proc", child.read_text().strip(), "stat")
    deadline = time.monotonic() + 5
    while state.exists() and ") Z " not in state.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("traces", "code", "reason"),
    [
        ({}, 0, "wrote no trace"),
        ({}, 3, "ended with 3: said on the way"),
        ({"1_kernel_trace.csv": "Name,Calls\na,1\n"}, 0, "has no column Kernel_Name"),
        ({"1_memory_copy_trace.csv": ""}, 0, "has no column Direction"),
    ],
)
def test_an_odd_profile_is_a_reason_not_an_error(
    traces, code, reason, profiler
) -> None:
    profiler(traces, code)
    result = bench.profile_engine("rect", bench.Settings())
    assert result["ran"] == "unknown"
    assert reason in result["reason"]


def test_no_profiler_and_a_slow_one_are_reasons(profiler, monkeypatch) -> None:
    profiler({})
    monkeypatch.setattr(bench, "PROFILE_TIMEOUT_S", 0.001)
    assert "took more than" in bench.profile_engine("rect", bench.Settings())["reason"]
    monkeypatch.setenv("PATH", "/nowhere")
    result = bench.profile_engine("rect", bench.Settings())
    assert result == {"ran": "unknown", "reason": "rocprofv3 is not on the path"}


# --- The measurements, with copies by the host


SMALL = bench.Settings(
    layers=(2, 1),
    page_kib=(1, 2),
    gpu_blocks=16,
    cpu_blocks=20,
    blocks=(2, 4),
    batch_sizes=(16,),
    replays=5,
    transfers=4,
    case_s=5.0,
    submissions=3,
)


class DoneEvent:
    def query(self) -> bool:
        return True


class HostCopier:
    """Copies at once; ``skip`` names a region and direction to leave out."""

    description = "the host"

    def __init__(self, caches: Any, skip: tuple[str, str] | None = None) -> None:
        self.caches, self.skip = caches, skip
        self.prepared: list[Any] = []

    def prepare(self, transfers: Any) -> None:
        self.prepared += transfers

    def copy(self, direction: str, transfer: Any) -> None:
        assert transfer in self.prepared
        for name in self.caches.gpu:
            gpu, cpu = self.caches.gpu[name], self.caches.cpu[name]
            if (direction, name) == self.skip:
                continue
            if direction == "load":
                gpu[transfer.gpu] = cpu[transfer.cpu]
            else:
                cpu[transfer.cpu] = gpu[transfer.gpu]


@pytest.fixture
def caches(monkeypatch) -> Iterator[Any]:
    # Waking a pool of threads for a page takes longer than copying it.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    pages = {"layer.0": 1024, "layer.1": 1024, "layer.2": 2048}
    yield SimpleNamespace(
        gpu={n: torch.zeros((16, p), dtype=torch.uint8) for n, p in pages.items()},
        cpu={n: torch.zeros((20, p), dtype=torch.uint8) for n, p in pages.items()},
        stream=SimpleNamespace(record_event=DoneEvent),
        make_host=lambda engine: None,
    )
    torch.set_num_threads(threads)


KEPT = {"regions_overwritten": 0}


def benchmark_of(caches: Any, skip: tuple[str, str] | None = None) -> Any:
    return bench.EngineBenchmark("rect", SMALL, caches, HostCopier(caches, skip))


def test_a_round_trip_sees_every_region(caches) -> None:
    trip = benchmark_of(caches).round_trip()
    assert trip == {"blocks": 8, "regions": 3, "regions_differing": 0} | KEPT


@pytest.mark.parametrize("skip", [("load", "layer.1"), ("store", "layer.2")])
def test_a_round_trip_sees_what_was_not_copied(caches, skip) -> None:
    # What an engine before moved to the same places must not pass for this one's.
    benchmark_of(caches).round_trip()
    assert benchmark_of(caches, skip).round_trip()["regions_differing"] == 1


@pytest.mark.parametrize("side", ["gpu", "cpu"])
def test_a_round_trip_sees_what_should_not_have_been_written(caches, side) -> None:
    engine = benchmark_of(caches)
    copier = engine._copier
    plain_copy = copier.copy

    def copy_and_more(direction: str, transfer: Any) -> None:
        plain_copy(direction, transfer)
        if direction == "load":
            there = {"gpu": transfer.gpu, "cpu": transfer.cpu}[side]
            page = getattr(caches, side)["layer.1"]
            page[next(n for n in range(len(page)) if n not in there)][0] += 1

    copier.copy = copy_and_more
    trip = engine.round_trip()
    assert (trip["regions_differing"], trip["regions_overwritten"]) == (0, 1)


def test_submission_and_bandwidth_cover_every_case(caches) -> None:
    engine = benchmark_of(caches)
    cases = list(itertools.product(("load", "store"), (2, 4)))
    submission, alone = engine.submission(), engine.alone()
    assert [(c["direction"], c["blocks"]) for c in submission] == cases
    assert [(c["direction"], c["blocks"]) for c in alone] == cases
    assert all(case["samples_count"] == SMALL.submissions for case in submission)
    assert all(case["bandwidth_gb_per_s"] > 0 for case in alone)
    assert all(case["transfers_count"] >= SMALL.transfers for case in alone)


def is_copying() -> bool:
    """Whether the thread of the copies lives; other tests' threads may come and go."""
    return any(thread.name == "kv-copies" for thread in threading.enumerate())


class FakeDecode:
    """Replays that take longer beside a copy, and longer each time alone."""

    def __init__(self, replay_s: float = 0.0) -> None:
        self.alone_ms = iter([0.4, *[0.3, 0.5] * 4])
        self.replay_s = replay_s

    def replays_ms(self, batch_size: int, enough: Callable[[int], bool]) -> Any:
        value = 0.5 if is_copying() else next(self.alone_ms)
        for count in itertools.count(1):
            time.sleep(self.replay_s)
            if enough(count):
                break
        return [value] * count


def test_decode_is_timed_alone_before_and_after_the_copies(caches) -> None:
    cases = list(benchmark_of(caches).loaded(FakeDecode()))
    assert len(cases) == 4
    for case in cases:
        assert case["decode_alone_before"]["median_ms"] == 0.3
        assert case["decode_alone_after"]["median_ms"] == 0.5
        assert case["drift_percent"] == pytest.approx(200 / 3)
        assert case["slowdown"]["median_percent"] == pytest.approx(25)
        assert case["bandwidth_gb_per_s"] > 0
        # Replays go on until there are enough transfers.
        assert case["transfers_count"] >= SMALL.transfers
        assert case["decode"]["samples_count"] >= SMALL.replays
        assert case["short"] == ""
    assert not is_copying()


def test_a_case_ends_in_time(caches) -> None:
    engine = benchmark_of(caches)
    engine.settings = bench.replace(SMALL, replays=10**6, case_s=0.02)
    plain = FakeDecode(replay_s=0.001)
    beside = plain.replays_ms

    def replays_ms(batch_size: int, enough: Callable[[int], bool]) -> Any:
        if is_copying():
            return beside(batch_size, enough)
        return [0.4]

    case = next(engine.loaded(SimpleNamespace(replays_ms=replays_ms)))
    assert 0.02 < case["window_s"] < 2
    assert case["short"].startswith(f"{case['decode']['samples_count']} of 1000000")


def test_replays_are_queued_ahead_so_far_and_no_further(monkeypatch) -> None:
    queued, reached = [0], [0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.number = -1

        def record(self) -> None:
            self.number = queued[0]

        def query(self) -> bool:
            reached[0] = max(reached[0], self.number)
            return True

        def elapsed_time(self, other: Any) -> float:
            return float(other.number - self.number)

    def replay() -> None:
        queued[0] += 1
        assert queued[0] - reached[0] <= bench.REPLAYS_AHEAD

    monkeypatch.setattr(torch.cuda, "Event", Event)
    decode = object.__new__(bench.Decode)
    decode._graphs = {16: (SimpleNamespace(replay=replay), None)}
    assert decode.replays_ms(16, lambda count: count >= 100) == [1.0] * 100
    assert reached[0] == 100


def loop_of(submit: Any, depth: int = 2) -> Any:
    return bench.CopyLoop(submit, [bench.Transfer([0], [0])], depth)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_so_many_transfers_are_in_flight(depth) -> None:
    in_flight, most = [0], [0]

    def submit(transfer: Any) -> Callable[[], None]:
        in_flight[0] += 1
        most[0] = max(most[0], in_flight[0])

        def wait() -> None:
            time.sleep(0.001)
            in_flight[0] -= 1

        return wait

    with loop_of(submit, depth) as loop:
        time.sleep(0.01)
    assert most[0] == depth and in_flight[0] == 0
    for (_, end), (begin, _) in itertools.pairwise(loop.spans):
        assert end <= begin


@pytest.mark.parametrize("good", [0, 3])
def test_a_copy_that_fails_beside_decode_is_raised(caches, good) -> None:
    count = itertools.count()

    def refuse(transfer: Any) -> Callable[[], None]:
        if next(count) >= good:
            raise RuntimeError("refused")
        return lambda: None

    with pytest.raises(RuntimeError, match="refused"), loop_of(refuse) as loop:
        deadline = time.monotonic() + 5
        while not loop.failed:
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.fixture
def impatient(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(bench, "PATIENCE_S", 0.02)
    yield
    bench.Hang.happened.clear()


def test_a_copy_that_hangs_stops_the_thread(impatient) -> None:
    release = threading.Event()
    submitted = [0]

    def submit(transfer: Any) -> Callable[[], None]:
        submitted[0] += 1
        return lambda: release.wait(5) and None

    loop = loop_of(submit)
    with pytest.raises(bench.Hang, match=r"did not end within 0\.02 s"), loop:
        pass
    assert bench.Hang.happened.is_set()
    release.set()
    loop._thread.join(5)
    assert not loop._thread.is_alive()
    assert submitted[0] == 2


def test_an_event_that_never_comes_is_a_hang(impatient) -> None:
    with pytest.raises(bench.Hang, match="did not get on"):
        bench.wait_for(SimpleNamespace(query=lambda: False))


@pytest.mark.parametrize("hang", [True, False])
def test_after_a_hang_the_process_ends_without_the_gpu(hang, monkeypatch) -> None:
    ended: list[str] = []

    def end(code: int) -> None:
        ended.append(f"at once with {code}")
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", end)
    if hang:
        monkeypatch.setattr(bench.Hang.happened, "is_set", lambda: True)
    with pytest.raises(SystemExit):
        bench.leave(1)
    assert ended == (["at once with 1"] if hang else [])


def test_transfers_are_random_within_the_caches_and_repeatable() -> None:
    first = bench.random_transfers(SMALL, 4, seed=1)
    again = bench.random_transfers(SMALL, 4, seed=1)
    assert [(t.gpu, t.cpu) for t in first] == [(t.gpu, t.cpu) for t in again]
    assert len({tuple(t.gpu) for t in first}) > 1
    for transfer in first:
        assert len(set(transfer.gpu)) == len(set(transfer.cpu)) == 4
        assert max(transfer.gpu) < 16 and max(transfer.cpu) < 20


# --- Engines


@pytest.fixture
def built(monkeypatch) -> Iterator[SimpleNamespace]:
    """``build_params`` without a runtime: what it was asked for, what it answers."""
    state = SimpleNamespace(
        rocm=True, num_attrs=1, answer=None, note="", asked=[], copied=[]
    )

    def build_params(src, dst, stream, order=3, *, direction, engine):
        state.asked.append((direction, engine, order))
        attrs = cuda_mem_ops._CUmemcpyAttributes(srcAccessOrder=order, flags=0x77)
        return cuda_mem_ops.BatchMemcpyParams(
            *(np.zeros(1, np.uint64),) * 3,
            num_layers=1,
            attrs=attrs,
            attrs_idx=cuda_mem_ops.ctypes.c_size_t(0),
            num_attrs=state.num_attrs,
            fail_idx=cuda_mem_ops.ctypes.c_size_t(0),
            stream_handle=0,
            direction=direction,
            engine=state.answer or engine,
            note=state.note,
        )

    monkeypatch.setattr(cuda_mem_ops, "build_params", build_params)
    monkeypatch.setattr(
        cuda_mem_ops, "copy_blocks", lambda *args: state.copied.append(args)
    )
    monkeypatch.setattr(cuda_mem_ops, "_batch_memcpy", (None, 1))
    monkeypatch.setattr(
        "vllm.platforms.current_platform",
        SimpleNamespace(is_rocm=lambda: state.rocm),
    )
    yield state


def copier_of(engine: str) -> Any:
    return bench.MemcpyCopier(engine, SimpleNamespace(cpu={}, gpu={}, stream=None))


@pytest.mark.parametrize(
    ("engine", "rocm", "flags"),
    [
        ("batch", True, 0),
        ("batch", False, 0),
        ("batch-flag", True, 0x100),
        ("batch-flag", False, 1),
    ],
)
def test_batches_go_with_the_flags_of_the_case(engine, rocm, flags, built) -> None:
    built.rocm = rocm
    copier = copier_of(engine)
    transfer = bench.Transfer([1, 2], [3, 4])
    copier.copy("load", transfer)
    copier.copy("store", transfer)
    (load, store) = built.copied
    assert load[:2] == ([3, 4], [1, 2]) and store[:2] == ([1, 2], [3, 4])
    assert [args[2].attrs.flags for args in built.copied] == [flags, flags]
    assert [args[2].attrs.srcAccessOrder for args in built.copied] == [3, 1]
    assert [engine for _, engine, _ in built.asked] == [CopyEngine.BATCH] * 2
    assert f"flags {flags:#x}, numAttrs 1" in copier.description


def test_a_flag_that_reaches_no_runtime_is_not_measured(built, monkeypatch) -> None:
    built.num_attrs = 0
    with pytest.raises(bench.EngineUnavailable, match="no flag reaches it"):
        copier_of("batch-flag")
    assert "numAttrs 0" in copier_of("batch").description

    built.num_attrs = 1
    copier = copier_of("batch-flag")
    monkeypatch.setattr(cuda_mem_ops, "_batch_memcpy", (None, 0))
    with pytest.raises(bench.EngineUnavailable, match="no flag reaches it"):
        copier.copy("load", bench.Transfer([1], [2]))


def test_a_layout_without_rectangles_has_no_rect(built) -> None:
    built.answer, built.note = CopyEngine.BATCH, "no two layers lie at one distance"
    with pytest.raises(bench.EngineUnavailable, match="no two layers"):
        copier_of("rect")
    built.answer = None
    assert "no two layers" in copier_of("rect").description
    assert built.asked[0][1] is CopyEngine.RECT


def replay_until_enough(batch_size: int, enough: Callable[[int], bool]) -> list[float]:
    for count in itertools.count(1):
        if enough(count):
            break
        time.sleep(0.0001)
    return [0.4] * count


@pytest.fixture
def measured_here(monkeypatch, caches) -> Callable[[Any], tuple[Any, list[Any]]]:
    """Measure with a function's engines; return the result, and what was kept."""

    def run(make_copier: Any) -> tuple[Any, list[Any]]:
        kept: list[Any] = []
        monkeypatch.setattr(bench, "make_copier", make_copier)
        result = bench.measure(
            SMALL, "command", True, lambda r: kept.append(json.loads(json.dumps(r)))
        )
        return result, kept

    monkeypatch.setattr(bench, "Caches", lambda settings: caches)
    monkeypatch.setattr(bench, "describe_machine", lambda: {"gpu": "none"})
    monkeypatch.setattr(
        bench, "Decode", lambda: SimpleNamespace(replays_ms=replay_until_enough)
    )
    monkeypatch.setattr(torch.version, "hip", "7.16")
    return run


def statuses(result: Any) -> dict[str, str]:
    return {name: entry["status"] for name, entry in result["engines"].items()}


def test_an_engine_that_breaks_costs_only_itself(measured_here) -> None:
    def make_copier(engine: str, caches: Any, settings: Any) -> Any:
        if engine == "kernel":
            raise bench.EngineUnavailable("no Triton")
        if engine == "batch":
            raise TypeError("broken")
        return HostCopier(caches)

    result, kept = measured_here(make_copier)
    assert statuses(result) == {
        "rect": "measured",
        "batch": "failed",
        "batch-flag": "measured",
        "kernel": "skipped",
    }
    assert result["engines"]["batch"]["reason"] == "TypeError: broken"
    assert result["engines"]["rect"]["profile"]["reason"] == "not profiled with --quick"
    assert {case["engine"] for case in result["loaded"]} == {"rect", "batch-flag"}
    # Each engine's figures are kept when it is done.
    assert [len(so_far["engines"]) for so_far in kept] == [1, 2, 3, 4]
    assert kept[-1] == json.loads(json.dumps(result))


def test_an_engine_with_wrong_bytes_is_not_measured(measured_here) -> None:
    def make_copier(engine: str, caches: Any, settings: Any) -> Any:
        skip = ("load", "layer.1") if engine == "batch" else None
        return HostCopier(caches, skip)

    result, _ = measured_here(make_copier)
    assert statuses(result)["batch"] == "failed"
    assert "1 of 3 regions differ" in result["engines"]["batch"]["reason"]
    assert {case["engine"] for case in result["loaded"]} == (
        set(bench.ENGINES) - {"batch"}
    )


def test_a_hang_ends_the_run_with_what_there_is(measured_here, impatient) -> None:
    def make_copier(engine: str, caches: Any, settings: Any) -> Any:
        if engine == "batch":
            raise bench.Hang("the GPU did not get on")
        return HostCopier(caches)

    result, kept = measured_here(make_copier)
    assert statuses(result) == {
        "rect": "measured",
        "batch": "failed",
        "batch-flag": "skipped",
        "kernel": "skipped",
    }
    assert "did not get on" in result["ended_early"]
    assert kept[-1]["ended_early"] == result["ended_early"]
    assert len([c for c in result["loaded"] if c["engine"] == "rect"]) == 4


def test_a_gpu_that_an_engine_broke_ends_the_run(measured_here, caches) -> None:
    def broken() -> Any:
        raise RuntimeError("illegal address")

    def make_copier(engine: str, caches: Any, settings: Any) -> Any:
        if engine == "batch":
            caches.stream.record_event = broken
            raise TypeError("broken")
        return HostCopier(caches)

    result, _ = measured_here(make_copier)
    assert statuses(result)["batch-flag"] == "skipped"
    assert result["ended_early"] == "after batch the GPU is lost: illegal address"
    assert not bench.succeeded(result)


@pytest.fixture
def on_the_host(monkeypatch) -> None:
    """Caches without a GPU."""
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda shape, dtype, device: empty(shape, dtype=dtype)
    )
    monkeypatch.setattr(
        torch.cuda,
        "Stream",
        type(
            "Stream",
            (),
            {
                "priority_range": staticmethod(lambda: (0, -1)),
                "__init__": lambda self, priority: None,
            },
        ),
    )
    monkeypatch.setattr(bench, "require_gpu", lambda: None)
    monkeypatch.setattr(bench, "describe_machine", lambda: {"gpu": "none"})


def test_caches_that_do_not_fit_are_one_error(on_the_host, monkeypatch, capsys) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise RuntimeError("the host has 1 GiB")

    monkeypatch.setattr(host_cache, "allocate_host_cache", refuse)
    few = ["--gpu-blocks", "4", "--blocks", "2"]
    with pytest.raises(SystemExit) as caught:
        bench.main(few)
    assert caught.value.code == 2
    assert "the host has 1 GiB (fewer: --cpu-blocks)" in capsys.readouterr().err

    def out_of_memory(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("1 GiB is free")

    monkeypatch.setattr(torch, "empty", out_of_memory)
    with pytest.raises(SystemExit):
        bench.main(few)
    assert "KV cache does not fit: 1 GiB is free" in capsys.readouterr().err

    def fault(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(torch, "empty", fault)
    with pytest.raises(RuntimeError, match="no kernel image"):
        bench.main(few)


def test_the_host_cache_is_laid_out_for_the_engine(on_the_host, monkeypatch) -> None:
    asked: list[bool] = []

    def allocate(gpu: Any, blocks: int, *, pin_memory: bool, block_after_block: bool):
        assert pin_memory and blocks == SMALL.cpu_blocks
        # The host may not hold two.
        assert not caches.cpu
        asked.append(block_after_block)
        return {"layer.0": torch.zeros(1)}

    monkeypatch.setattr(host_cache, "allocate_host_cache", allocate)
    caches = bench.Caches(SMALL)
    for engine in bench.ENGINES:
        caches.make_host(engine)
        assert caches.cpu
    assert asked == [True, False, True]


def test_every_statistic_says_its_unit(caches) -> None:
    engine = benchmark_of(caches)
    cases: list[Any] = [*engine.submission(), *engine.alone()]
    cases += engine.loaded(FakeDecode())
    cases += [bench.slowdown([1.0], 1.0), bench.summarize_ms([1.0])]
    names = {key for case in cases for key, value in case.items()}
    plain = {"direction", "blocks", "engine", "batch_size", "short", "slowdown"}
    for name in names - plain - {"decode", "decode_alone_before", "decode_alone_after"}:
        assert name.endswith(("_ms", "_s", "_percent", "_count", "_gb_per_s"))


def test_a_result_names_the_machine_and_what_was_measured(monkeypatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=1 << 37)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    machine = bench.describe_machine()
    assert (machine["gpu"], machine["runtime"]) == ("NVIDIA H200", "CUDA 13.0")
    assert machine["torch"] == torch.__version__
    assert len(machine["series_files_sha256"]) == 64
    assert machine["driver"].startswith("nvidia ")


@pytest.mark.parametrize(
    "name", ["platforms/hip_runtime.py", "offload/pitched_copies.so", "offload/a.py"]
)
def test_the_digest_knows_every_file_of_the_copy_path(
    name, tmp_path, monkeypatch
) -> None:
    files = {
        "platforms/hip_runtime.py": "1",
        "offload/pitched_copies.so": "2",
        "offload/a.py": "3",
        "offload/cuda_mem_ops.py": "4",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(
        hip_runtime, "__file__", str(tmp_path / "platforms/hip_runtime.py")
    )
    monkeypatch.setattr(
        cuda_mem_ops, "__file__", str(tmp_path / "offload/cuda_mem_ops.py")
    )
    before = bench._series_digest()
    assert before == bench._series_digest()
    (tmp_path / name).write_text("5")
    assert bench._series_digest() != before


# --- The series' copies, on the simulated device


@pytest.fixture
def simulated(monkeypatch) -> Iterator[Any]:
    """Caches of the simulator's HIP 7.16, on a layout with two page sizes."""
    rocm = SimpleNamespace(is_rocm=lambda: True)
    monkeypatch.setattr("vllm.platforms.current_platform", rocm)
    monkeypatch.setattr(cuda_mem_ops, "current_platform", rocm)
    monkeypatch.setattr(cuda_mem_ops, "_batch_memcpy", None)
    monkeypatch.setattr(cuda_mem_ops, "_max_batch_descriptors", None)
    monkeypatch.setattr(hip_runtime, "_runtime", None)
    hip = hipsim.load()
    hipsim.reset("7.16")
    uninstall = torch_device.install()
    gpu, addresses = {}, []
    for layers, kib in zip(SMALL.layers, SMALL.page_kib, strict=True):
        shape = (layers, SMALL.gpu_blocks, kib * 1024)
        address = ctypes.c_void_p()
        size = math.prod(shape)
        assert hip.hipMalloc(ctypes.byref(address), size) == 0
        assert address.value is not None
        addresses.append(address.value)
        memory = (ctypes.c_uint8 * size).from_address(address.value)
        for layer in torch.frombuffer(memory, dtype=torch.uint8).view(shape):
            gpu[f"layer.{len(gpu)}"] = layer
    caches = SimpleNamespace(
        gpu=gpu,
        cpu=host_cache.allocate_host_cache(gpu, SMALL.cpu_blocks),
        stream=torch.cuda.Stream(),
    )
    yield caches
    torch.cuda.synchronize()
    del caches.cpu, caches.stream
    for address in addresses:
        assert hip.hipFree(address) == 0
    uninstall()
    hipsim.assert_clean()


@pytest.mark.parametrize(
    ("engine", "moved_by"),
    [("rect", "sdma"), ("batch", "blit"), ("batch-flag", "sdma")],
)
def test_the_series_engines_move_every_byte(engine, moved_by, simulated) -> None:
    copier = bench.MemcpyCopier(engine, simulated)
    trip = bench.EngineBenchmark(engine, SMALL, simulated, copier).round_trip()
    assert trip == {"blocks": 8, "regions": 3, "regions_differing": 0} | KEPT
    stats = hipsim.stats()
    moved = {place: count.bytes for place, count in stats.copies.items() if count.bytes}
    expected = trip["blocks"] * SMALL.block_bytes
    assert moved == {(moved_by, "h2d"): expected, (moved_by, "d2h"): expected}
    # The one region of its page size has no neighbour to be a rectangle with.
    assert stats.pitched_copies == (2 * trip["blocks"] if engine == "rect" else 0)


def test_each_engine_has_the_only_host_cache(simulated, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    simulated.cpu.clear()
    gc.collect()
    caches = object.__new__(bench.Caches)
    caches._cpu_blocks, caches._block_after_block = SMALL.cpu_blocks, None
    caches.gpu, caches.cpu, caches.stream = simulated.gpu, {}, simulated.stream
    result: Any = {"engines": {}, "loaded": []}
    decode = SimpleNamespace(replays_ms=replay_until_enough)
    for engine in ("rect", "batch", "batch-flag"):
        entry = result["engines"][engine] = {"status": "measured"}
        bench.measure_engine(engine, SMALL, caches, decode, result)
        assert not bench.why_invalid(entry)
        assert len(host_cache.registration_ends()) == 1
        assert caches.cpu["layer.0"].is_contiguous() == (engine != "rect")
    assert len(result["loaded"]) == 3 * 4
    assert all(case["transfers_count"] >= SMALL.transfers for case in result["loaded"])


class FakeLanguage:
    """What the kernel uses of triton.language, for one program at a time."""

    int64 = 8

    class Pointer:
        def __init__(self, address: Any) -> None:
            self.address = address

        def __add__(self, words: Any) -> FakeLanguage.Pointer:
            return FakeLanguage.Pointer(self.address + words * 8)

    class Number(int):
        def to(self, kind: Any) -> Any:
            return kind(int(self))

        def __add__(self, other: Any) -> Any:
            return FakeLanguage.Number(int(self) + int(other))

    def __init__(self) -> None:
        self.program, self.grid = (0,), (1,)

    def program_id(self, axis: int) -> int:
        return self.program[axis]

    def num_programs(self, axis: int) -> int:
        return self.grid[axis]

    def pointer_type(self, word: int) -> Any:
        assert word == 8
        return self.Pointer

    def arange(self, first: int, last: int) -> Any:
        return np.arange(first, last)

    def load(self, place: Any, mask: Any = None) -> Any:
        if mask is None:
            return self.Number(ctypes.c_int64.from_address(int(place.address)).value)
        return [
            ctypes.c_int64.from_address(int(address)).value if valid else None
            for address, valid in zip(place.address, mask, strict=True)
        ]

    def store(self, place: Any, values: Any, mask: Any) -> None:
        for address, value, valid in zip(place.address, values, mask, strict=True):
            if valid:
                ctypes.c_int64.from_address(int(address)).value = value


@pytest.fixture
def triton(monkeypatch) -> list[tuple[int]]:
    """A Triton that runs a kernel's programs one after the other, on the host.

    Returns the grids of its launches.
    """
    language = FakeLanguage()
    grids: list[tuple[int]] = []

    class Kernel:
        def __init__(self, function: Callable[..., None]) -> None:
            self.function = function

        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            def launch(*arguments: Any, STEP: int) -> None:
                tensors, numbers = arguments[:7], arguments[7:]
                assert all(tensor.is_contiguous() for tensor in tensors)
                language.grid = grid
                grids.append(grid)
                for program in itertools.product(*map(range, grid)):
                    language.program = program
                    places = [language.Pointer(t.data_ptr()) for t in tensors]
                    self.function(*places, *numbers, STEP=STEP)

            return launch

    FakeLanguage.constexpr = int  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(jit=Kernel))
    monkeypatch.setitem(sys.modules, "triton.language", language)
    return grids


@pytest.mark.parametrize("programs", [1, 7, 1000])
def test_the_kernel_moves_every_byte_between_strided_caches(
    programs, caches, triton, monkeypatch
) -> None:
    monkeypatch.setattr(
        "vllm.platforms.current_platform", SimpleNamespace(is_rocm=lambda: False)
    )
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(bench.KernelCopier, "STEP", 48)
    whole = torch.zeros((20, 4096 + 64), dtype=torch.uint8)
    caches.cpu = dict(
        zip(caches.gpu, whole[:, :4096].split([1024, 1024, 2048], dim=1), strict=True)
    )
    copier = bench.KernelCopier(caches, programs)
    trip = bench.EngineBenchmark("kernel", SMALL, caches, copier).round_trip()
    assert trip == {"blocks": 8, "regions": 3, "regions_differing": 0} | KEPT
    assert not whole[:, 4096:].any()
    assert f"at most {programs} programs" in copier.description
    # 8 blocks of 3 pages.
    assert triton == [(min(programs, 24),)] * 2


def test_without_triton_there_is_no_kernel(monkeypatch, caches) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(bench.EngineUnavailable, match="Triton cannot be imported"):
        bench.KernelCopier(caches, 32)
