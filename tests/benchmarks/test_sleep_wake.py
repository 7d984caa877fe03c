# SPDX-License-Identifier: Apache-2.0
"""The benchmark of sleep and wake: all of it but a GPU's speed."""

from __future__ import annotations

import copy
import gc
import json
import mmap
import multiprocessing
import os
import struct
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import reporting
import sleep_wake as bench
import torch
import vllm

from vllm_rocm_memory import serve
from vllm_rocm_memory.sim import hipsim

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sleep_wake.py"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
Entry = bench.Entry


# --- What is allocated


def test_a_mix_has_counts_sizes_and_tags() -> None:
    assert bench.parse_mix("340x72MiB,32x2GiB:kv_cache,1.5KiB:cudagraph,7B") == (
        Entry(340, 72 * MIB, "weights"),
        Entry(32, 2 * GIB, "kv_cache"),
        Entry(1, 1536, "cudagraph"),
        Entry(1, 7, "weights"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is no entry of a mix: COUNTxSIZE or COUNTxSIZE:TAG"),
        ("4x72MiB,", "'' is no entry of a mix"),
        ("72MB", "'72MB' is no size: a number and one of B, KiB, MiB, GiB"),
        ("72", "'72' is no size"),
        ("4x", "'4x' is no size"),
        ("-4x1MiB", "'-4x1MiB' is no entry of a mix"),
        ("0x1MiB", "'0x1MiB' has no allocation"),
        ("4x0MiB", "'0MiB' is not a whole number of bytes"),
        ("1.0001KiB", "is not a whole number of bytes"),
        ("1MiB:kv", "the tag 'kv'; vLLM's are weights, kv_cache, runtime, cudagraph"),
        ("1MiB:", "the tag ''"),
        ("4 x 1MiB", "'4 x 1MiB' is no entry of a mix"),
    ],
)
def test_a_mix_that_is_none_says_why(text, message) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        bench.parse_mix(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("size", [64 * GIB, 33, 32, 5, 1])
def test_a_kv_cache_is_all_there(size) -> None:
    (entry,) = bench.kv_cache_mix(size)
    assert entry.tag == "kv_cache" and entry.pieces <= 32
    assert 0 <= entry.pieces * entry.num_bytes - size < entry.pieces


def checkpoint(folder: Path, shards: int = 2) -> dict[str, int]:
    """Writes a model as its hub has it; returns the bytes of its tensors."""
    from safetensors.torch import save_file

    tensors = {
        "embed": torch.zeros(100, 8, dtype=torch.bfloat16),
        "norm": torch.zeros(8),
        "scale": torch.zeros((), dtype=torch.float8_e4m3fn),
        "none": torch.zeros(0),
        "a.q": torch.zeros(8, 8, dtype=torch.float16),
        "a.k": torch.zeros(8, 8, dtype=torch.float16),
    }
    names = list(tensors)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number}.safetensors" if shards > 1 else "model.safetensors"
        part = names[number::shards]
        save_file({n: tensors[n] for n in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    if shards > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": weight_map,
        }
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps(index))
    return sizes


def counted(mix: Any) -> dict[int, int]:
    assert {entry.tag for entry in mix} == {"weights"}
    return {entry.num_bytes: entry.pieces for entry in mix}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("named", ["folder", "file"])
def test_a_models_tensors_come_from_its_headers(named, shards, tmp_path) -> None:
    sizes = checkpoint(tmp_path, shards)
    file = "model.safetensors" if shards == 1 else "model.safetensors.index.json"
    path = tmp_path if named == "folder" else tmp_path / file
    for shard in tmp_path.glob("*.safetensors"):
        length = struct.unpack("<Q", shard.read_bytes()[:8])[0]
        with shard.open("r+b") as opened:
            opened.truncate(8 + length)
    assert sizes["a.q"] == sizes["a.k"] == 128
    assert counted(bench.model_mix(path)) == {1600: 1, 32: 1, 1: 1, 128: 2}


def test_an_index_without_its_shards_is_not_enough(tmp_path) -> None:
    checkpoint(tmp_path, shards=3)
    for number in (0, 2):
        (tmp_path / f"model-{number}.safetensors").unlink()
    with pytest.raises(bench.BenchmarkError) as caught:
        bench.model_mix(tmp_path)
    text = str(caught.value)
    assert "names model-0.safetensors, model-2.safetensors, which" in text
    assert "total size and no tensor's: the shards are needed" in text


@pytest.mark.parametrize(
    ("file", "contents", "message"),
    [
        ("model.safetensors", b"", "is no safetensors file: JSONDecodeError"),
        ("model.safetensors", b"\x09" + bytes(7) + b"{}", "2 of 9 bytes of the header"),
        ("model.safetensors", b"\xff" * 16, "a header of 18446744073709551615 bytes"),
        ("model.safetensors", b"\x02" + bytes(7) + b"{}", "has no tensors"),
        (
            "model.safetensors",
            b"\x20" + bytes(7) + b'{"w": {"data_offsets": [9, 1]}}  ',
            "w lies from 9 to 1",
        ),
        ("model.safetensors.index.json", b"{}", "is no safetensors index: KeyError"),
        ("model.safetensors.index.json", b"[", "is no safetensors index: JSON"),
        ("config.json", b"{}", "has neither model.safetensors.index.json nor model.s"),
    ],
)
def test_a_damaged_model_is_named(file, contents, message, tmp_path, capsys) -> None:
    (tmp_path / file).write_bytes(contents)
    with pytest.raises(SystemExit) as caught:
        bench.main(["--model", str(tmp_path)])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert message in error and str(tmp_path) in error


def test_a_path_that_is_no_model_is_named(tmp_path, capsys) -> None:
    for path, message in ((tmp_path / "x.bin", "is no model"),):
        with pytest.raises(SystemExit):
            bench.main(["--model", str(path)])
        assert message in capsys.readouterr().err
    with pytest.raises(bench.BenchmarkError, match="No such file"):
        bench.model_mix(tmp_path / "x.safetensors")


# --- Options


def settings_of(*words: str) -> Any:
    parser = bench.make_parser()
    return bench.settings_from(parser.parse_args(words), parser)


def test_defaults_are_the_yardsticks_mix() -> None:
    settings = settings_of()
    assert settings.num_bytes == 340 * 72 * MIB + 64 * GIB
    assert settings.wakes == settings.tags == ("weights", "kv_cache")
    assert (settings.level, settings.cycles, settings.ranks) == (1, 3, 1)
    assert settings.describe_mix() == "340 x 72 MiB weights, 32 x 2 GiB kv_cache"


def test_ranks_divide_a_model_and_nothing_else(tmp_path) -> None:
    checkpoint(tmp_path)
    ranks = ("--ranks", "2")
    settings = settings_of("--model", str(tmp_path), *ranks, "--kv-cache", "32B")
    assert counted(settings.mix[:-1]) == {800: 1, 16: 1, 1: 1, 64: 2}
    assert settings.mix[-1] == Entry(32, 1, "kv_cache")
    assert "divided by 2, --kv-cache" in settings.source
    assert settings_of("--sizes", "3x3B", *ranks).mix == (Entry(3, 3, "weights"),)


def test_many_sizes_are_told_by_the_largest() -> None:
    mix = tuple(Entry(1, 2**n * KIB, "weights") for n in range(9))
    settings = bench.Settings((*mix, Entry(1000, MIB, "kv_cache")))
    assert settings.describe_mix(2) == (
        "1000 x 1 MiB kv_cache, 1 x 256 KiB weights and 8 more sizes"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--sizes 4x72", "'72' is no size"),
        ("--sizes 1MiB --model /tmp", "not allowed with argument"),
        ("--sizes 1MiB:kv_cache --kv-cache 1MiB", "both have a KV cache"),
        ("--kv-cache much", "'much' is no size"),
        ("--level 3", "invalid choice: 3"),
        ("--ranks 0", "0 is not a positive number"),
        ("--pause -1", "-1 is not from 0 to 60 seconds"),
        ("--pause nan", "nan is not from 0 to 60 seconds"),
        ("--pause long", "invalid pause value: 'long'"),
        ("--host-memory drop", "invalid choice: 'drop'"),
        ("--trees upstream", "'upstream' is not NAME=DIR"),
        ("--trees upstream=", "'upstream=' is not NAME=DIR"),
        ("--trees a=/tmp", "/tmp has no vllm/__init__.py"),
        ("--from-json /nowhere.json", "/nowhere.json: No such file"),
        ("--output /proc/x", "/proc/x"),
    ],
)
def test_wrong_options_are_refused(words, message, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main(words.split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def make_tree(folder: Path, text: str = "") -> Path:
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text(text)
    return folder


def test_two_trees_of_one_name_are_refused(tmp_path, capsys) -> None:
    tree = f"a={make_tree(tmp_path)}"
    with pytest.raises(SystemExit):
        bench.main(["--trees", tree, tree])
    assert "two of --trees have the same name" in capsys.readouterr().err


# --- Results

WEIGHTS, CACHE = 24 * GIB, 64 * GIB
RIGHT = {
    "compared": 340,
    "differing": 0,
    "read": 32,
    "not_zero": 0,
    "examples": [],
}


def recorded_step(cycle: int, name: str, seconds: float, resident: float) -> Any:
    return {
        "cycle": cycle,
        "step": name,
        "duration_s": seconds,
        "moved_bytes": 0 if name == "wake kv_cache" else WEIGHTS,
        "changed_bytes": CACHE if name == "wake kv_cache" else WEIGHTS,
        "resident_bytes": int(resident * GIB),
        "peak_bytes": int((resident + 0.24) * GIB),
        "peak_is_of_this_step": True,
        "available_bytes": int((90 - resident) * GIB),
        "contents": None if name == "sleep" else dict(RIGHT),
    }


def recorded_run(name: str, first: float, later: float, held: float) -> Any:
    steps = []
    for cycle in range(2):
        for step, seconds in (
            ("sleep", later if cycle else first),
            ("wake weights", later),
            ("wake kv_cache", 0.07),
            ("sleep", later + 0.1),
            ("wake everything", later + 0.2),
        ):
            steps.append(recorded_step(cycle, step, seconds, 1 + held))
    return {
        "tree": name,
        "status": "measured",
        "reason": "",
        "folder": f"/trees/{name}",
        "vllm": "0.33.0",
        "has_series": name == "patched",
        "link": {
            "num_bytes": GIB,
            "reason": "",
            "to_host_gb_per_s": 55.0,
            "to_device_gb_per_s": 55.5,
        },
        "allocations": {"weights": {"count": 340, "num_bytes": WEIGHTS}},
        "before": {
            "resident_bytes": GIB,
            "available_bytes": 89 * GIB,
            "garbage_collection_s": 0.111,
        },
        "steps": steps,
        "trim": None
        if name == "upstream"
        else {"given_back_bytes": WEIGHTS, "resident_bytes": int(1.25 * GIB)},
    }


def recorded() -> dict[str, Any]:
    return {
        "benchmark": "sleep_wake",
        "schema_version": 1,
        "command": "python benchmarks/sleep_wake.py --output out",
        "started_at": "2026-11-30T00:00:00+00:00",
        "simulated": False,
        "machine": {
            "gpu": "NVIDIA H200",
            "driver": "nvidia 580.159.04",
            "runtime": "CUDA 13.0",
            "cpu_cores": 16,
            "host_memory_bytes": 128 * GIB,
            "numa_nodes": 1,
            "huge_pages": "always [madvise] never",
            "locked_memory_limit_bytes": None,
            "python": "3.12.3",
            "torch": "2.11.0",
        },
        "settings": {
            "mix": [],
            "mix_in_words": "340 x 72 MiB weights, 32 x 2 GiB kv_cache",
            "source": "the default",
            "level": 1,
            "cycles": 2,
            "ranks": 1,
            "pause_s": 0.0,
            "host_memory": "not set",
        },
        "runs": [
            recorded_run("upstream", 32.2, 0.86, 42.48),
            recorded_run("patched", 0.90, 0.48, 24.0),
        ],
        "duration_s": 100.0,
    }


@pytest.fixture
def result_file(tmp_path) -> Path:
    path = tmp_path / "result.json"
    reporting.save(recorded(), path)
    return path


def column_of(table: Any, name: str) -> dict[str, str]:
    place = table.headers.index(name)
    return {row[0]: row[place] for row in table.rows}


def test_a_result_survives_its_file(result_file) -> None:
    result, report = bench.load(result_file)
    assert report == bench.report_of(result)
    assert result == json.loads(json.dumps(recorded()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a result of this benchmark"),
        (
            '{"benchmark": "sleep_wake", "schema_version": 0}',
            "has schema version 0, and this benchmark reads 1",
        ),
        ('{"benchmark": "sleep_wake", "schema_version": 1}', "is damaged: KeyError"),
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
        lambda result: result.pop("simulated"),
        lambda result: result.update(runs=3),
        lambda result: result["machine"].pop("cpu_cores"),
        lambda result: result["settings"].pop("host_memory"),
        lambda result: result["runs"][0].pop("allocations"),
        lambda result: result["runs"][0].pop("link"),
        lambda result: result["runs"][0]["steps"][1].pop("duration_s"),
        lambda result: result["runs"][0]["steps"][1]["contents"].pop("differing"),
        lambda result: result["runs"][0]["before"].update(resident_bytes="1"),
    ],
)
def test_a_result_that_lacks_something_is_damaged(damage, tmp_path) -> None:
    result = recorded()
    damage(result)
    path = tmp_path / "result.json"
    reporting.save(result, path)
    with pytest.raises(bench.BenchmarkError, match="is damaged"):
        bench.load(path)


def test_the_figures_are_those_of_the_steps() -> None:
    table = column_of(bench.speed_table(recorded()), "patched")
    assert table == {
        "link, one registered buffer": "out 55.0 GB/s, in 55.5 GB/s",
        "first sleep": "0.900 s\n28.6 GB/s, 52 % of the link\n24 GiB copied",
        "later sleeps": (
            "0.580 s (0.480 to 0.580)\n44.4 GB/s, 81 % of the link\n24 GiB copied"
        ),
        "wake weights": (
            "0.480 s (0.480 to 0.480)\n53.7 GB/s, 97 % of the link\n24 GiB copied"
        ),
        "wake kv_cache": "0.070 s (0.070 to 0.070)\n64 GiB, nothing copied",
        "wake everything": (
            "0.680 s (0.680 to 0.680)\n37.9 GB/s, 68 % of the link\n24 GiB copied"
        ),
    }


def test_host_memory_is_told_beyond_the_start() -> None:
    table = bench.memory_table(recorded())
    upstream, patched = column_of(table, "upstream"), column_of(table, "patched")
    assert patched == {
        "allocated": "340 of weights, 24 GiB",
        "backup": "24 GiB",
        "contents": "right in 6 wakes: up to 340 allocations compared, 32 others read",
        "before the first sleep": "1 GiB",
        "asleep": "+24 GiB (1.00 x)",
        "peak": "+24.24 GiB (1.01 x)",
        "after the last wake": "+24 GiB (1.00 x)",
        "after trim_host_memory": "+256 MiB (0.01 x), 24 GiB given back",
        "fall of MemAvailable, asleep": "+24 GiB (1.00 x)",
        "gc.collect() alone": "0.111 s",
    }
    assert upstream["asleep"] == "+42.48 GiB (1.77 x)"
    assert upstream["after trim_host_memory"] == "-"


def test_a_peak_that_is_not_of_a_step_is_marked() -> None:
    result = recorded()
    result["runs"][0]["steps"][3]["peak_is_of_this_step"] = False
    table = bench.memory_table(result)
    assert column_of(table, "upstream")["peak"].endswith("since the process began")
    assert column_of(table, "patched")["peak"].endswith("x)")


@pytest.mark.parametrize("rich", [True, False])
def test_the_tables_have_every_tree(rich, result_file, monkeypatch, capsys) -> None:
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    assert bench.main(["--from-json", str(result_file)]) == 0
    out = capsys.readouterr().out
    for text in (
        "1 x NVIDIA H200, nvidia 580.159.04, CUDA 13.0",
        "16 CPU cores, 128 GiB of host memory",
        "lockable memory unlimited",
        "upstream: vLLM 0.33.0 without the series",
        "patched: vLLM 0.33.0 with the series",
        "340 x 72 MiB weights, 32 x 2 GiB kv_cache (the default)",
        "level 1, 2 cycles; VLLM_SLEEP_HOST_MEMORY not set",
        "28.6 GB/s, 52 % of the link",
        "32.200 s",
        "+42.48 GiB (1.77 x)",
    ):
        assert text in out
    assert "simulated" not in out


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"differing": 2}, "2 allocations differ after the wake (a word)"),
        ({"not_zero": 1}, "1 allocations woke without zeroes (a word)"),
    ],
)
def test_wrong_contents_are_no_figures(wrong, text, result_file, capsys) -> None:
    result = recorded()
    result["runs"][1]["steps"][6]["contents"] |= wrong | {"examples": ["a word"]}
    reporting.save(result, result_file)
    assert bench.main(["--from-json", str(result_file)]) == 1
    assert bench.figures_of(result)["patched"] == {}
    speed = bench.speed_table(result)
    assert column_of(speed, "patched")["first sleep"] == "-"
    assert column_of(speed, "patched")["failed"] == "wrong contents"
    assert column_of(speed, "upstream")["first sleep"].startswith("32.200 s")
    memory = column_of(bench.memory_table(result), "patched")
    assert memory["contents"] == f"WRONG: {text}"


def test_a_tree_that_failed_costs_only_itself(result_file, capsys) -> None:
    result = recorded()
    result["runs"][0] |= {
        "status": "failed",
        "reason": "RuntimeError: out of memory",
        "steps": result["runs"][0]["steps"][:1],
        "trim": None,
    }
    result["runs"].append(
        {
            "tree": "absent",
            "status": "failed",
            "reason": "no module",
            **dict.fromkeys(("link", "allocations", "before", "trim")),
            "steps": [],
        }
    )
    reporting.save(result, result_file)
    assert bench.main(["--from-json", str(result_file)]) == 1
    out = capsys.readouterr().out
    assert "RuntimeError: out of" in out and "no module" in out
    table = bench.speed_table(result)
    assert column_of(table, "upstream")["first sleep"].startswith("32.200 s")
    assert column_of(table, "upstream")["later sleeps"] == "-"
    assert column_of(table, "absent")["link, one registered buffer"] == "-"


def test_a_link_that_is_unknown_has_a_reason() -> None:
    pytest.importorskip("matplotlib")
    result = recorded()
    for run in result["runs"]:
        run["link"] |= {
            "reason": "out of memory",
            "to_host_gb_per_s": None,
            "to_device_gb_per_s": None,
        }
    table = column_of(bench.speed_table(result), "patched")
    assert table["link, one registered buffer"] == "unknown: out of memory"
    assert table["first sleep"] == "0.900 s\n28.6 GB/s\n24 GiB copied"
    rates = bench.draw(result).axes[0]
    assert not [line for line in rates.lines if line.get_gid() == "link"]


def test_the_simulators_result_has_no_speed(result_file, tmp_path, capsys) -> None:
    result = recorded() | {"simulated": True}
    reporting.save(result, result_file)
    assert bench.main(["--from-json", str(result_file)]) == 0
    out = capsys.readouterr().out
    assert "this shows behaviour, never speed" in out
    assert "GB/s" not in out and " s " not in out and "MemAvailable" not in out
    assert "24 GiB copied, 3 times" in out
    with pytest.raises(bench.BenchmarkError, match="no picture of a simulated GPU"):
        bench.draw(result)


# --- The picture


def heights(panel: Any) -> dict[str, list[float]]:
    return {
        bars.get_label(): [round(bar.get_height(), 3) for bar in bars]
        for bars in panel.containers
    }


def test_the_picture_shows_the_figures() -> None:
    pytest.importorskip("matplotlib")
    result = recorded()
    picture = bench.draw(result)
    rates, seconds, memory = picture.axes
    labels = [label.get_text() for label in rates.get_xticklabels()]
    assert " ".join(labels).replace("\n", " ") == (
        "first sleep later sleeps wake weights wake everything"
    )
    shown, figures = heights(rates), bench.figures_of(result)
    for name in ("upstream", "patched"):
        copied = [label for label in bench.FIGURES if label != "wake kv_cache"]
        expected = [round(figures[name][label].rate, 3) for label in copied]
        assert shown[name] == expected
    assert heights(seconds) == {"upstream": [0.07], "patched": [0.07]}
    assert heights(memory)["patched"] == [1.0, 1.01, 1.0]
    (link,) = [line for line in rates.lines if line.get_gid() == "link"]
    assert link.get_ydata()[0] == pytest.approx(55.25)
    assert rates.get_ylim()[1] > 55.25
    title, subtitle = bench.picture_texts(result)
    assert "NVIDIA H200" in title and "340 x 72 MiB weights" in subtitle


def test_texts_of_the_picture_do_not_overlap() -> None:
    pytest.importorskip("matplotlib")
    result = recorded()
    result["settings"]["mix_in_words"] = "340 x 72.27 MiB weights, " * 20
    picture = bench.draw(result)
    picture.canvas.draw()
    renderer = picture.canvas.get_renderer()
    for panel in picture.axes:
        boxes = [text.get_window_extent(renderer) for text in panel.texts]
        for number, box in enumerate(boxes):
            assert not box.count_overlaps(boxes[number + 1 :])
            assert box.y1 <= panel.bbox.y1
    boxes = [text.get_window_extent(renderer) for text in picture.texts]
    boxes += [panel.title.get_window_extent(renderer) for panel in picture.axes]
    boxes += [panel._left_title.get_window_extent(renderer) for panel in picture.axes]
    drawn = [box for box in boxes if box.width]
    assert len(drawn) == 5
    for number, box in enumerate(drawn):
        assert not box.count_overlaps(drawn[number + 1 :])
        assert box.x1 <= picture.bbox.x1


def test_a_tree_without_figures_leaves_its_place_empty() -> None:
    pytest.importorskip("matplotlib")
    result = recorded()
    result["runs"][0] |= {"steps": [], "before": None, "link": None}
    picture = bench.draw(result)
    assert [heights(panel)["upstream"] for panel in picture.axes] == [[], [], []]
    result["runs"][1]["steps"] = []
    with pytest.raises(bench.BenchmarkError, match="nothing to draw"):
        bench.draw(result)


# --- The command


@pytest.fixture
def measuring(monkeypatch) -> list[Any]:
    """Runs of trees that answer the recorded result; has what each was asked."""
    asked: list[Any] = []

    class Run:
        machine = recorded()["machine"]

        def __init__(self, name: str, folder: str | None, settings: Any) -> None:
            self.name = name
            asked.append((name, folder, settings))

        def measure(self) -> None:
            if self.name == "fails":
                raise bench.RunFailed("RuntimeError: refused")
            if self.name == "refused":
                raise bench.BenchmarkError("the mix does not fit")

        def result(self) -> Any:
            run = recorded_run("patched", 0.9, 0.48, 24.0)
            for key in ("tree", "status", "reason"):
                del run[key]
            return run

    monkeypatch.setattr(bench, "TreeRun", Run)
    return asked


def test_output_has_the_result_the_table_and_the_picture(
    measuring, tmp_path, capsys
) -> None:
    pytest.importorskip("matplotlib")
    out, tree = tmp_path / "deep" / "out", make_tree(tmp_path / "tree")
    words = ["--output", str(out), "--trees", f"b={tree}", f"a={tree}"]
    assert bench.main(words) == 0
    assert {path.name for path in out.iterdir()} == {
        "sleep_wake.json",
        "sleep_wake.txt",
        "sleep_wake.png",
    }
    result, report = bench.load(out / "sleep_wake.json")
    assert [run["tree"] for run in result["runs"]] == ["b", "a"]
    assert result["command"].endswith(f"a={tree}")
    text = (out / "sleep_wake.txt").read_text()
    assert text == str(report) and "28.6 GB/s, 52 % of the link" in text
    png = (out / "sleep_wake.png").read_bytes()
    assert png.startswith(b"\x89PNG")


def test_without_matplotlib_the_result_is_written_all_the_same(
    measuring, tmp_path, monkeypatch, capsys
) -> None:
    out = tmp_path / "out"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert bench.main(["--output", str(out)]) == 0
    captured = capsys.readouterr()
    assert "--from-json FILE --output DIR" in captured.err
    assert "28.6 GB/s" in captured.out
    file = out / "sleep_wake.json"
    assert file.exists() and not (out / "sleep_wake.png").exists()
    with pytest.raises(SystemExit) as caught:
        bench.main(["--from-json", str(file), "--output", str(out)])
    assert caught.value.code == 2
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert bench.main(["--from-json", str(file), "--output", str(out)]) == 0
    assert (out / "sleep_wake.png").exists()


def test_a_failure_is_kept_and_the_next_tree_runs(measuring, tmp_path, capsys) -> None:
    tree = make_tree(tmp_path / "tree")
    words = ["--trees", f"fails={tree}", f"goes={tree}", "--output", str(tmp_path)]
    assert bench.main(words) == 1
    result = json.loads((tmp_path / "sleep_wake.json").read_text())
    assert [run["status"] for run in result["runs"]] == ["failed", "measured"]
    assert result["runs"][0]["reason"] == "RuntimeError: refused"
    assert len(measuring) == 2


def test_a_machine_that_cannot_be_measured_ends_the_run(
    measuring, tmp_path, capsys
) -> None:
    tree = make_tree(tmp_path / "tree")
    with pytest.raises(SystemExit) as caught:
        bench.main(["--trees", f"refused={tree}", f"next={tree}"])
    assert caught.value.code == 2
    assert "error: the mix does not fit" in capsys.readouterr().err
    assert len(measuring) == 1


def test_a_later_refusal_costs_only_its_tree(measuring, tmp_path, capsys) -> None:
    tree = make_tree(tmp_path / "tree")
    trees = (f"{name}={tree}" for name in ("before", "refused", "after"))
    assert bench.main(["--trees", *trees, "--output", str(tmp_path)]) == 1
    result, report = bench.load(tmp_path / "sleep_wake.json")
    assert [(run["tree"], run["reason"]) for run in result["runs"]] == [
        ("before", ""),
        ("refused", "the mix does not fit"),
        ("after", ""),
    ]
    failed = column_of(report.tables[0], "refused")["failed"]
    assert failed == "the mix does not fit"


def test_a_disk_that_is_full_does_not_end_the_run(
    measuring, tmp_path, monkeypatch, capsys
) -> None:
    tree, full = make_tree(tmp_path / "tree"), [True]
    save = reporting.save

    def refuse_once(result: Any, path: Path) -> None:
        if full.pop() if full else False:
            raise OSError(28, "No space left on device")
        save(result, path)

    monkeypatch.setattr(reporting, "save", refuse_once)
    words = ["--trees", f"a={tree}", f"b={tree}", "--output", str(tmp_path)]
    assert bench.main(words) == 0
    assert f"{tmp_path}: No space left on device\n" in capsys.readouterr().err
    result, _ = bench.load(tmp_path / "sleep_wake.json")
    assert len(result["runs"]) == 2


# --- What a rank measures, on the simulated GPU

# Two of these tensors fill a segment of 2 MiB, so three of them are two allocations.
MIX = (
    Entry(3, 900 * KIB, "weights"),
    Entry(3, 900 * KIB, "kv_cache"),
    Entry(1, MIB, "cudagraph"),
)
STEPS = ["sleep", "wake weights", "wake kv_cache", "sleep", "wake everything"]


@pytest.fixture(scope="module")
def quick_calls() -> Iterator[None]:
    """The allocator collects garbage in each sleep, and much is there by now."""
    gc.collect()
    gc.freeze()
    # Sums of a MiB wait longer for a second thread than they take.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    gc.unfreeze()


@pytest.fixture
def simulated(quick_calls, monkeypatch, request) -> Any:
    """An allocator on the simulator, without the names that the series adds."""
    if not serve.is_cpu_build():
        pytest.skip("a process with a GPU's own driver does not use the simulator's")
    monkeypatch.setattr(bench, "CHUNK_WORDS", MIB // 8)
    return request.getfixturevalue("simulated_allocator")


class Upstreams:
    """What upstream's allocator has, of ours."""

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator
        self.pointer_to_data = allocator.pointer_to_data
        self.use_memory_pool = allocator.use_memory_pool
        self.release_pools = allocator.release_pools
        self.after_wake = lambda: None

    def sleep(self, offload_tags: Any = None) -> None:
        self._allocator.sleep(offload_tags)

    def wake_up(self, tags: Any = None) -> None:
        self._allocator.wake_up(tags)
        self.after_wake()


@pytest.fixture
def benchmark_of(simulated) -> Iterator[Any]:
    """Makes the benchmark of a rank, with its memory allocated."""
    made = []

    def make(allocator: Any = simulated, **settings: Any) -> Any:
        defaults = {"mix": MIX, "cycles": 1, "simulate": True}
        rank = bench.RankBenchmark(
            allocator,
            bench.SimulatedGpu(install=False),
            bench.Settings(**(defaults | settings)),
            meet=lambda: None,
        )
        made.append(rank)
        rank.made = rank.allocate()
        return rank

    yield make
    for rank in made:
        rank.free()


def test_a_cycle_moves_what_is_kept(benchmark_of) -> None:
    rank = benchmark_of(cycles=2)
    assert rank.made == {
        tag: {"count": count, "num_bytes": count * 2 * MIB}
        for tag, count in (("weights", 2), ("kv_cache", 2), ("cudagraph", 1))
    }
    steps = list(rank.steps())
    assert [step["step"] for step in steps] == STEPS * 2
    assert [step["cycle"] for step in steps] == [0] * 5 + [1] * 5
    kept, all_of_it = 6 * MIB, 10 * MIB
    assert [step["moved_bytes"] for step in steps[:5]] == [kept, kept, 0, kept, kept]
    assert [step["changed_bytes"] for step in steps[:5]] == [
        *(all_of_it, kept, 4 * MIB),
        *(all_of_it, all_of_it),
    ]
    seen = [
        (contents["compared"], contents["read"])
        for step in steps
        if (contents := step["contents"])
    ]
    assert seen == [(3, 0), (3, 2), (3, 2)] * 2
    assert not any(bench.wrong_contents(step["contents"]) for step in steps)
    for step in steps:
        assert 0 < step["duration_s"] < 60
        assert 0 < step["resident_bytes"] <= step["peak_bytes"] + MIB


def test_level_2_drops_the_weights(benchmark_of) -> None:
    steps = list(benchmark_of(level=2).steps())
    kept = 2 * MIB
    assert [step["moved_bytes"] for step in steps] == [kept, kept, 0, kept, kept]
    contents = steps[-1]["contents"]
    assert (contents["compared"], contents["read"]) == (1, 4)
    assert not bench.wrong_contents(contents)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (MIX[0], [step for step in STEPS if "kv" not in step]),
        (MIX[1], [step for step in STEPS if "weights" not in step]),
        (MIX[2], ["sleep", "wake everything"]),
    ],
)
def test_what_is_not_there_is_not_woken(entry, expected, benchmark_of) -> None:
    steps = list(benchmark_of(mix=(entry,)).steps())
    assert [step["step"] for step in steps] == expected
    assert all(step["changed_bytes"] for step in steps)


def test_a_pause_is_between_a_sleep_and_the_wake_after_it(
    benchmark_of, simulated, monkeypatch
) -> None:
    happened: list[Any] = []
    for name in ("sleep", "wake_up"):
        original = getattr(simulated, name)

        def call(
            *args: Any, name: str = name, original: Any = original, **options: Any
        ):
            happened.append(name)
            return original(*args, **options)

        monkeypatch.setattr(simulated, name, call)
    rank = benchmark_of(pause_s=0.5)
    monkeypatch.setattr(bench.time, "sleep", happened.append)
    list(rank.steps())
    assert happened == ["sleep", 0.5, "wake_up", "wake_up", "sleep", 0.5, "wake_up"]
    assert settings_of("--pause", "0.5").pause_s == 0.5


def test_a_pause_is_told() -> None:
    result = recorded()
    assert "0.5 s" not in str(bench.report_of(result))
    result["settings"]["pause_s"] = 0.5
    assert "2 cycles, wakes 0.5 s after the sleep" in bench.machine_text(result)
    assert "; 0.5 s from each sleep to the wake" in bench.speed_table(result).title
    assert "Wakes 0.5 s after the sleep" in bench.picture_texts(result)[1].replace(
        "\n", " "
    )


def test_a_peak_is_that_of_a_step(benchmark_of) -> None:
    if not bench.reset_peak():
        pytest.skip("this kernel's peak does not begin anew")
    steps, size = benchmark_of().steps(), 128 * MIB
    torch.ones(size, dtype=torch.uint8)
    before = bench.peak_bytes()
    step = next(steps)
    assert step["peak_is_of_this_step"]
    assert step["peak_bytes"] < before - size // 2


def test_upstreams_allocator_is_measured_without_a_trim(
    benchmark_of, simulated
) -> None:
    rank = benchmark_of(Upstreams(simulated), mix=MIX[:1])
    steps = list(rank.steps())
    assert steps[-1]["contents"]["compared"] == 2
    assert rank.trim() is None


def test_the_series_trims(benchmark_of) -> None:
    rank = benchmark_of()
    list(rank.steps())
    before = hipsim.stats().registered_bytes
    trimmed = rank.trim()
    assert before >= 6 * MIB and hipsim.stats().registered_bytes == 0
    assert trimmed["given_back_bytes"] == before


@pytest.mark.parametrize("word", [0, MIB // 8 - 1, MIB // 8, -1])
def test_every_kept_allocation_is_compared(word, benchmark_of, simulated) -> None:
    allocator = Upstreams(simulated)
    rank = benchmark_of(allocator)
    for ptr, data in list(allocator.pointer_to_data.items()):
        words = rank._words(ptr, data)
        before = words[word].item()
        # One bit: the lowest of the first word, and the highest of the others.
        words[word] = before ^ (-(1 << 63) if word else 1)
        contents = rank.check_contents(set())
        kept = data.tag != "kv_cache"
        assert contents.differing == int(kept)
        if kept:
            (example,) = contents.examples
            assert f"{bench.readable(data.handle[1])} {data.tag} at {ptr:#x}" in example
            words[word] = before
    assert not bench.wrong_contents(bench.asdict(rank.check_contents(set())))


def test_words_that_changed_places_are_found(benchmark_of, simulated) -> None:
    rank = benchmark_of()
    ptr, data = next(iter(simulated.pointer_to_data.items()))
    words = rank._words(ptr, data)
    words[:512], words[512:1024] = words[512:1024].clone(), words[:512].clone()
    assert rank.check_contents(set()).differing == 1


def test_loads_that_are_wrong_are_found(benchmark_of) -> None:
    steps = benchmark_of().steps()
    next(steps)
    hipsim.configure(corrupt_loads=True)
    contents = next(steps)["contents"]
    assert contents["differing"] == contents["compared"] == 3
    assert len(contents["examples"]) == 3


def test_pages_that_are_not_zero_are_found(benchmark_of, simulated) -> None:
    allocator = Upstreams(simulated)
    rank = benchmark_of(allocator)

    def leave_a_word() -> None:
        for ptr, data in allocator.pointer_to_data.items():
            if data.tag == "kv_cache" and not data.is_asleep:
                rank._words(ptr, data)[-1] = 1

    allocator.after_wake = leave_a_word
    steps = list(rank.steps())
    assert steps[1]["contents"]["not_zero"] == 0
    assert steps[2]["contents"]["not_zero"] == 2
    # CUDA says nothing of such pages.
    rank._device.is_hip = False
    assert [s["contents"]["not_zero"] for s in rank.steps() if s["contents"]] == [0] * 3


def test_pages_that_a_wake_did_not_clear_are_found(benchmark_of, simulated) -> None:
    """What one wake left zero is not zero for the next."""
    rank = benchmark_of()
    steps = rank.steps()
    assert [next(steps)["step"] for _ in range(3)] == STEPS[:3]
    woken = {
        ptr for ptr, data in simulated.pointer_to_data.items() if data.tag == "kv_cache"
    }
    contents = rank.check_contents(woken)
    assert (contents.read, contents.not_zero) == (2, 2)


def test_memory_that_two_allocations_share_is_found(benchmark_of, simulated) -> None:
    rank = benchmark_of()
    places = {data.tag: ptr for ptr, data in simulated.pointer_to_data.items()}
    cache, kept = places["kv_cache"], places["weights"]
    true_words = rank._device.words
    rank._device.words = lambda ptr, size: true_words(
        kept if ptr == cache else ptr, size
    )
    contents = rank.check_contents({cache})
    assert (contents.read, contents.differing) == (1, 1)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("sleep", lambda data: {"is_asleep": False}, "is awake after sleep"),
        ("wake_up", lambda data: {"is_asleep": True}, "sleeps after wake weights"),
    ],
)
def test_a_state_that_was_not_asked_for_ends_the_run(
    name, change, message, benchmark_of, simulated, monkeypatch
) -> None:
    rank = benchmark_of()
    original = getattr(simulated, name)
    changed = []

    def then_change(*args: Any, **options: Any) -> None:
        original(*args, **options)
        for data in simulated.pointer_to_data.values():
            if data.tag == "weights":
                changed.append((data, data.is_asleep))
                for field, value in change(data).items():
                    setattr(data, field, value)
                return

    monkeypatch.setattr(simulated, name, then_change)
    with pytest.raises(RuntimeError, match=f"weights at 0x.* {message}"):
        list(rank.steps())
    for data, asleep in changed:
        data.is_asleep = asleep


def test_a_mix_that_does_not_fit_is_refused(benchmark_of, monkeypatch) -> None:
    text = "the mix needs 6.27 MiB a GPU, and 6 MiB of 1 GiB are free"
    memory = (6 * MIB, GIB)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: memory)
    with pytest.raises(bench.BenchmarkError, match=text):
        benchmark_of()
    monkeypatch.undo()


def test_memory_that_is_refused_is_a_mix_that_does_not_fit(benchmark_of) -> None:
    for nth in (2, 3):
        hipsim.fail("hipMemCreate", nth, 2)
    with pytest.raises(bench.BenchmarkError, match=r"needs 6\.27 MiB a GPU"):
        benchmark_of()


def test_the_link_is_one_registered_buffer(simulated) -> None:
    met = []

    def meet() -> None:
        met.append(hipsim.stats().registered_bytes)

    device = bench.SimulatedGpu(install=False)
    link = bench.measure_link(device, 4 * MIB, meet)
    assert met == [4 * MIB] * 2 * bench.LINK_COPIES
    assert link["num_bytes"] == 4 * MIB and link["reason"] == ""
    assert link["to_host_gb_per_s"] > 0 and link["to_device_gb_per_s"] > 0
    assert hipsim.stats().registered_bytes == 0
    hipsim.fail("hipHostRegister", 1, 2)
    met.clear()
    link = bench.measure_link(device, 4 * MIB, meet)
    assert link["reason"].startswith("4 MiB of host memory cannot be registered")
    assert link["to_host_gb_per_s"] is link["to_device_gb_per_s"] is None
    assert met == [0] * 2 * bench.LINK_COPIES


def test_a_peak_begins_anew() -> None:
    if not bench.reset_peak():
        pytest.skip("this kernel's peak does not begin anew")
    resident, size = bench.resident_bytes(), 64 * MIB
    assert bench.peak_bytes() < resident + size // 2
    # Mapped and unmapped here: a heap may have room that is resident already.
    with mmap.mmap(-1, size) as memory:
        memory[:: mmap.PAGESIZE] = bytes(size // mmap.PAGESIZE)
        assert bench.resident_bytes() > resident + size // 2
    assert bench.resident_bytes() < resident + size // 2 < bench.peak_bytes()
    assert bench.reset_peak()
    assert bench.peak_bytes() < resident + size // 2


def test_without_a_gpu_it_says_what_works(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(bench.BenchmarkError) as caught:
        bench.Gpu(0, 1)
    for text in ("needs an AMD or NVIDIA GPU", "--simulate", "--from-json FILE"):
        assert text in str(caught.value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(bench.BenchmarkError, match="2 ranks need as many GPUs"):
        bench.Gpu(0, 2)


def test_without_the_simulator_it_says_what_is_missing(monkeypatch) -> None:
    def missing() -> None:
        raise FileNotFoundError("libamdhip64.so.7 is not built: run `make setup`")

    monkeypatch.setattr(hipsim, "load", missing)
    with pytest.raises(bench.BenchmarkError, match="is not built: run `make setup`"):
        bench.SimulatedGpu()
    monkeypatch.setitem(sys.modules, "vllm_rocm_memory.sim", None)
    with pytest.raises(bench.BenchmarkError, match="which vllm-rocm-memory has"):
        bench.SimulatedGpu()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(bench.BenchmarkError, match="needs torch's CPU build"):
        bench.SimulatedGpu()


def test_another_trees_vllm_is_refused(tmp_path) -> None:
    tree = make_tree(tmp_path)
    with pytest.raises(RuntimeError, match=f"rather than {tree}"):
        bench.find_vllm(str(tree))


def test_a_tree_may_be_made_of_links(tmp_path, monkeypatch) -> None:
    tree, other = make_tree(tmp_path / "tree"), tmp_path / "other"
    other.mkdir()
    (tree / "vllm" / "__init__.py").rename(other / "__init__.py")
    (tree / "vllm" / "__init__.py").symlink_to(other / "__init__.py")
    found = SimpleNamespace(__file__=str(tree / "vllm" / "__init__.py"))
    monkeypatch.setitem(sys.modules, "vllm", found)
    assert bench.find_vllm(str(tree))["folder"] == str(tree)


# --- Ranks


def test_a_step_of_several_ranks_is_the_slowest() -> None:
    fast, slow = (recorded_step(0, "wake weights", s, 2) for s in (0.5, 0.7))
    slow |= {"peak_bytes": 5, "peak_is_of_this_step": False, "available_bytes": 1}
    slow["contents"] |= {"differing": 1, "examples": ["here"]}
    step = bench.joined([fast, slow])
    assert step["duration_s"] == 0.7
    assert step["moved_bytes"] == 2 * WEIGHTS
    assert step["resident_bytes"] == 4 * GIB
    assert step["peak_bytes"] == fast["peak_bytes"] + 5
    assert not step["peak_is_of_this_step"]
    assert step["available_bytes"] == fast["available_bytes"]
    assert step["contents"]["compared"] == 680
    assert step["contents"]["differing"] == 1
    assert step["contents"]["examples"] == ["here"]


def test_progress_has_the_time_and_what_is_wrong() -> None:
    step = recorded_step(1, "wake weights", 0.5, 2)
    text = "cycle 2: wake weights 0.500 s, 24 GiB copied"
    assert bench.describe_step(step, simulated=False) == text
    step["contents"] |= {"differing": 1, "examples": ["here"]}
    assert bench.describe_step(step, simulated=False) == (
        f"{text}; 1 allocations differ after the wake (here)"
    )


def test_the_links_of_several_ranks_are_one() -> None:
    def link(rate: float | None, reason: str = "") -> Any:
        return {
            "num_bytes": 10**9,
            "to_host_gb_per_s": rate,
            "to_device_gb_per_s": rate and rate / 2,
            "reason": reason,
        }

    joined = bench.joined([link(50), link(25)])
    assert (joined["num_bytes"], joined["reason"]) == (2 * 10**9, "")
    assert joined["to_host_gb_per_s"] == pytest.approx(50)
    assert joined["to_device_gb_per_s"] == pytest.approx(25)
    joined = bench.joined([link(50), link(None, "refused")])
    assert (joined["reason"], joined["to_host_gb_per_s"]) == ("refused", None)


def test_what_ranks_have_said_is_kept_as_far_as_all_came() -> None:
    run = bench.TreeRun("patched", None, bench.Settings(MIX, ranks=2))
    step = recorded_step(0, "sleep", 0.5, 2)
    run._parts[0] = {"step": [step, copy.deepcopy(step)], "machine": [{"gpu": "H200"}]}
    run._parts[1] = {"step": [step]}
    assert len(run.steps()) == 1 and run.machine == {"gpu": "H200"}
    result = run.result()
    assert (result["before"], result["trim"], result["link"]) == (None, None, None)
    run._parts[0]["trim"], run._parts[1]["trim"] = [None], [None]
    assert run.result()["trim"] is None
    trimmed = {"given_back_bytes": 7, "resident_bytes": GIB}
    run._parts[0]["trim"], run._parts[1]["trim"] = [trimmed], [trimmed]
    assert run.result()["trim"] == {"given_back_bytes": 14, "resident_bytes": 2 * GIB}
    made = {"weights": {"count": 3, "num_bytes": GIB}}
    run._parts[0]["allocations"] = run._parts[1]["allocations"] = [made]
    assert run.result()["allocations"]["weights"] == {"count": 6, "num_bytes": 2 * GIB}


def test_what_fails_when_all_is_measured_costs_nothing(monkeypatch, capsys) -> None:
    class Held:
        def free(self) -> None:
            raise RuntimeError("still in use")

    # Only a forked process has what is replaced here.
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: fork)
    monkeypatch.setattr(bench, "measure_rank", lambda *arguments: Held())
    bench.TreeRun("tree", None, bench.Settings(MIX)).measure()
    error = capsys.readouterr().err
    assert "tree: the process of rank 0 did not end well: exit code 1" in error


def test_two_ranks_of_three_trees(tmp_path) -> None:
    """A tree whose process dies, one that cannot be imported, and this one."""
    if not serve.is_cpu_build():
        pytest.skip("a process with a GPU's own driver does not use the simulator's")
    dies = make_tree(tmp_path / "dies", "import os; os.kill(os.getpid(), 9)")
    fails = make_tree(tmp_path / "fails", "raise RuntimeError('no such driver')")
    here = Path(vllm.__file__).parents[1]
    run = subprocess.run(
        [
            *(sys.executable, str(SCRIPT), "--simulate", "--cycles", "1"),
            *("--sizes", "3x900KiB,2B", "--kv-cache", "2MiB", "--ranks", "2"),
            *("--trees", f"dies={dies}", f"fails={fails}", f"here={here}"),
            *("--host-memory", "release", "--output", str(tmp_path)),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 1, run.stderr
    result, _ = bench.load(tmp_path / "sleep_wake.json")
    dead, failed, measured = result["runs"]
    assert "died, exit code -9" in dead["reason"]
    assert "RuntimeError: no such driver" in failed["reason"]
    assert measured["status"] == "measured" and measured["has_series"]
    assert measured["folder"] == str(here)
    assert measured["allocations"]["weights"]["count"] == 2 * 2
    assert [step["step"] for step in measured["steps"]] == STEPS
    assert measured["steps"][-1]["contents"]["compared"] == 2 * 2
    # The last wake has given it back already, by the policy that was asked for.
    assert measured["trim"]["given_back_bytes"] == 0
    assert result["settings"]["host_memory"] == "release"
    assert result["machine"]["runtime"].startswith("simulator of HIP")
    assert "this shows behaviour, never speed" in run.stdout
    assert "GB/s" not in run.stdout
    assert "here: cycle 1: wake weights, 8 MiB copied\n" in run.stderr
    # What vLLM says is beside the tables, and not in them.
    assert "INFO" not in run.stdout
    assert "no sleep_wake.png: there is no picture" in run.stderr
