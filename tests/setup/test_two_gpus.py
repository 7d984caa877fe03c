# SPDX-License-Identifier: Apache-2.0
"""make two-gpus: what it runs on how many GPUs, and what its log keeps."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import gpu_tests
import psutil
import pytest
import sleep_wake
import two_gpus
from gpu_tests import Surroundings
from partitions import Machine
from two_gpus import Part, Trip, TwoGpusError

TWO = Surroundings(
    Machine("2.11.0+cu130", "13.0", None, 2),
    ("NVIDIA H200", "NVIDIA H200"),
    driver="nvidia 580.159.04",
    vllm="0.33.0",
    python="3.12.3",
    series="series: 6 of 6 patches applied",
)
ONE = dataclasses.replace(
    TWO, machine=dataclasses.replace(TWO.machine, gpus=1), names=TWO.names[:1]
)
NONE = dataclasses.replace(
    TWO, machine=dataclasses.replace(TWO.machine, gpus=0), names=()
)
AMD = dataclasses.replace(
    TWO, machine=Machine("2.11.0+rocm7.2", None, "7.2.1", 2), names=("MI300X",) * 2
)
# Writes a file for people, says something, and does the rest of its arguments.
CHILD = """
import os, pathlib, signal, sys, time
print("a child speaks", flush=True)
pathlib.Path(sys.argv[1]).write_text(f"figures of\\nthe part, in {sys.argv[1]}\\n")
exec(sys.argv[2])
"""


def part(folder: Path, title: str, does: str = "", wrong: str = "") -> Part:
    report = folder / f"{title}.txt"
    command = [sys.executable, "-c", CHILD, str(report), does]
    words = {folder: "OUT", folder / "out": "DIR"}
    shown, figures = f"python {title}.py", folder / f"{title}.json"
    return Part(title, shown, command, report, (figures,), words, lambda: wrong)


def make_tree(folder: Path) -> Path:
    """One that vLLM could be imported from."""
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").touch()
    return folder


@pytest.fixture
def trees(tmp_path, monkeypatch) -> Path:
    """A vLLM as released behind the one that is imported, as on a GPU machine."""
    site = make_tree(tmp_path / "site")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(sys, "path", [*sys.path[1:], str(site)])
    return site


# --- What is run ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "ranks", "shares"), [(1, 1, True), (2, 2, False), (8, 2, False)]
)
def test_the_commands_are_what_their_programs_take(tmp_path, gpus, ranks, shares):
    upstream, patched = (make_tree(tmp_path / n) for n in ("upstream", "patched"))
    extra = ["--cycles", "5", "--pause", "0.5"]
    tests, measured = two_gpus.make_parts(gpus, tmp_path, upstream, patched, extra)

    assert tests.command[:2] == [sys.executable, "tools/gpu_tests.py"]
    options = gpu_tests.make_parser().parse_args(tests.command[2:])
    assert (options.partition, options.share_gpu) == (["gpu-2"], shares)
    assert tests.report == options.output / gpu_tests.REPORT

    assert measured.command[:2] == [sys.executable, "benchmarks/sleep_wake.py"]
    options = sleep_wake.make_parser().parse_args(measured.command[2:])
    assert (options.ranks, options.cycles, options.pause) == (ranks, 5, 0.5)
    named = {"upstream": str(upstream), "patched": str(patched)}
    assert sleep_wake.trees_from(options, sleep_wake.make_parser()) == named
    assert measured.report == options.output / f"{sleep_wake.BENCHMARK}.txt"

    assert ("share a GPU" in tests.title) == shares
    for each in (tests, measured):
        assert str(tmp_path) not in each.shown, "nothing of this machine"
    assert "--cycles 5" in measured.shown


@pytest.mark.parametrize(
    ("has_series", "wrong"),
    [
        ({"upstream": False, "patched": True}, ""),
        ({"upstream": True, "patched": True}, "upstream has the series"),
        ({"upstream": False, "patched": False}, "patched has no series"),
        ({"upstream": None, "patched": True}, "upstream was not measured"),
        ({"upstream": False}, "patched was not measured"),
        ({}, "upstream was not measured"),
    ],
)
def test_trees_are_what_they_are_named(tmp_path, has_series, wrong):
    path = tmp_path / "result.json"
    runs = [
        {"tree": name} | ({} if has is None else {"has_series": has})
        for name, has in has_series.items()
    ]
    path.write_text(json.dumps({"runs": runs}))
    assert wrong in two_gpus.check_trees(path)
    assert bool(wrong) == bool(two_gpus.check_trees(path))


@pytest.mark.parametrize("text", [None, '{"runs": [', "{}", "[]", '{"runs": [{}]}'])
def test_a_result_that_cannot_be_read_is_named(tmp_path, text):
    path = tmp_path / "result.json"
    if text is not None:
        path.write_text(text)
    assert two_gpus.check_trees(path).startswith("result.json cannot be read: ")


def test_the_machines_own_vllm_is_upstream(trees):
    upstream, patched = two_gpus.find_trees(None)
    assert upstream == trees
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.origin is not None
    assert patched == Path(found.origin).parents[1] != upstream


def test_another_upstream_may_be_named(trees, tmp_path):
    other = tmp_path / "other"
    with pytest.raises(TwoGpusError, match=re.escape(f"--upstream {other}: there is")):
        two_gpus.find_trees(other)
    make_tree(other)
    assert two_gpus.find_trees(other)[0] == other


def test_without_another_vllm_one_has_to_be_named():
    with pytest.raises(TwoGpusError, match="has the only vLLM on the path; name a"):
        two_gpus.find_trees(None)


# --- What is kept ---------------------------------------------------------------------


def test_each_part_is_run_and_logged(tmp_path, capsys):
    parts = [
        part(tmp_path, "fails", "sys.exit(3)"),
        part(tmp_path, "dies", "os.kill(os.getpid(), signal.SIGKILL)"),
        part(tmp_path, "lies", wrong="the tree named upstream has the series"),
        part(tmp_path, "passes"),
    ]
    trip = Trip(TWO, tmp_path, parts, topology="GPU0 NV18", began=datetime.now(UTC))
    trip.run()
    assert trip.status == 1
    assert [each.wrong for each in parts] == [
        "exit status 3",
        "killed by SIGKILL",
        "the tree named upstream has the series",
        "",
    ]
    assert capsys.readouterr().out.count("a child speaks") == 4
    log = (tmp_path / two_gpus.LOG).read_text()
    assert "2 x NVIDIA H200, nvidia 580.159.04" in log
    assert "Not run on AMD hardware." in log and "GPU0 NV18" in log
    assert re.search(r"1\. fails\n   python fails\.py\n   exit status 3 in \d+ s", log)
    assert re.search(r"4\. passes\n   python passes\.py\n   passed in \d+ s\n\n", log)
    for name in ("fails", "dies", "lies", "passes"):
        assert f"   figures of\n   the part, in OUT/{name}.txt\n" in log
    assert str(tmp_path) not in log, "nothing of this machine"
    assert "a child speaks" in (tmp_path / "part-1.log").read_text()


def test_all_that_passes_passes(tmp_path):
    trip = Trip(TWO, tmp_path, [part(tmp_path, "passes")])
    assert trip.status == 1, "not run"
    trip.run()
    assert trip.status == 0


def test_amd_hardware_is_not_denied(tmp_path):
    assert "2 x MI300X" in str(Trip(AMD, tmp_path, []))
    assert "AMD hardware" not in str(Trip(AMD, tmp_path, []))


# Tells the run to end as a terminal does, its whole group, and then takes its time: it
# says more than a pipe holds, and only then has its figures.
ENDS = """
told = []
signal.signal(signal.SIGINT, lambda *_: told.append(1))
os.killpg(os.getpgid(os.getppid()), signal.{number})
while not told: time.sleep(0.01)
print("x" * 200_000, flush=True)
pathlib.Path(sys.argv[1]).write_text(f"told to end {{len(told)}} time(s)")
"""


@pytest.mark.parametrize("told", [1, 2])
def test_a_part_that_does_not_end_is_killed(tmp_path, monkeypatch, told):
    """With its group, and not before it was told as often as this process was."""
    monkeypatch.setattr(two_gpus, "GRACE_S", 2.0)
    waits = (
        "import subprocess\n"
        "beside = subprocess.Popen(['sleep', '600'])\n"
        "pathlib.Path(sys.argv[1]).write_text(str(beside.pid))\n"
        "told = []\n"
        "signal.signal(signal.SIGINT, lambda *_: (told.append(1), print('told')))\n"
        f"for n in range({told}):\n"
        "    os.kill(os.getppid(), signal.SIGINT)\n"
        "    while len(told) <= n: time.sleep(0.01)\n"
        "sys.stdout.flush(); time.sleep(600)\n"
    )
    stays = part(tmp_path, "stays", waits)
    with pytest.raises(KeyboardInterrupt):
        stays.run(tmp_path / "log")
    assert stays.wrong == "interrupted" and stays.seconds < 10
    assert (tmp_path / "log").read_text().count("told\n") == told
    with contextlib.suppress(psutil.NoSuchProcess):
        beside = psutil.Process(int(stays.report.read_text()))
        assert beside.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_told_to_end_it_keeps_what_there_is(tmp_path, number):
    """And the part that runs is told once, and has the time to write what it has."""
    parts = [
        part(tmp_path, "passes"),
        part(tmp_path, "waits", ENDS.format(number=number)),
        part(tmp_path, "never"),
    ]
    program = (
        "import pickle, sys, two_gpus\n"
        "surroundings, parts = pickle.load(sys.stdin.buffer)\n"
        "two_gpus.make_parts = lambda *_: [two_gpus.Part(*each) for each in parts]\n"
        "two_gpus.find_trees = lambda upstream: (None, None)\n"
        "two_gpus.check_benchmark = lambda command: None\n"
        "sys.exit(two_gpus.main(['--output', sys.argv[1]], surroundings))\n"
    )
    plain = [(each.title, each.shown, each.command, each.report) for each in parts]
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        input=pickle.dumps((TWO, plain)),
        capture_output=True,
        timeout=60,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert ended.returncode == 1, ended.stderr.decode()
    assert ended.stderr.decode().strip() == "make two-gpus: interrupted"
    log = (tmp_path / two_gpus.LOG).read_text()
    assert re.search(r"1\. passes\n.*\n   passed in", log)
    assert re.search(r"2\. waits\n.*\n   interrupted in", log)
    assert "told to end 1 time(s)" in log
    assert re.search(r"3\. never\n.*\n   not run\n", log)
    assert (tmp_path / "part-2.log").stat().st_size > 200_000


def test_the_log_is_there_from_the_start(tmp_path):
    seen = tmp_path / "seen"
    log = tmp_path / two_gpus.LOG
    copies = f"import shutil; shutil.copy({str(log)!r}, {str(seen)!r})"
    later = part(tmp_path, "later")
    Trip(ONE, tmp_path, [part(tmp_path, "looks", copies), later]).run()
    assert "looks\n   python looks.py\n   did not end\n" in seen.read_text()
    assert "later\n   python later.py\n   not run\n" in seen.read_text()
    assert "The single-GPU half of the run" in seen.read_text()


def test_nothing_of_an_earlier_run_is_kept(tmp_path):
    first = Trip(TWO, tmp_path, [part(tmp_path, "a"), part(tmp_path, "b")])
    first.run()
    (tmp_path / "b.json").touch()
    sees = "print([path.name for path in pathlib.Path(sys.argv[1]).parent.iterdir()])"
    second = Trip(TWO, tmp_path, [part(tmp_path, "a", sees), part(tmp_path, "b")])
    second.run()
    there = (tmp_path / "part-1.log").read_text().splitlines()[-1]
    assert "'a.txt'" in there, "it has written that"
    assert not any(name in there for name in ("b.txt", "b.json", "part-2.log"))


def test_a_part_that_cannot_begin_costs_itself(tmp_path):
    wrong = part(tmp_path, "wrong")
    wrong.command = ["/nowhere/python"]
    trip = Trip(TWO, tmp_path, [wrong, part(tmp_path, "passes")])
    trip.run()
    assert "/nowhere/python" in wrong.wrong
    assert trip.parts[1].wrong == ""


def test_a_log_that_is_not_whole_is_not_passed_over(tmp_path):
    """And the part goes on to its end."""
    full = part(tmp_path, "speaks", "print('x' * 200_000)")
    full.run(Path("/dev/full"))
    assert full.status == 0
    assert full.wrong.startswith("/dev/full is not whole: [Errno 28] No space left")


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ("nvidia-smi", "echo GPU0 NV18 GPU1"),
        ("nvidia-smi", r"printf '\033[4mGPU0\033[0m NV18'"),
        ("rocm-smi", "echo GPU0 XGMI GPU1"),
        ("nvidia-smi", "exit 9"),
        (None, ""),
    ],
)
def test_links_are_told_where_the_driver_does(tmp_path, monkeypatch, tool, said):
    monkeypatch.setenv("PATH", f"{tmp_path}")
    if tool is not None:
        (tmp_path / tool).write_text(f"#!/bin/sh\n{said}\n")
        (tmp_path / tool).chmod(0o755)
    told = two_gpus.topology()
    if said.startswith(("echo", "printf")):
        command, _, links = told.partition("\n")
        assert command.split()[0] == tool
        assert links in ("GPU0 NV18 GPU1", "GPU0 XGMI GPU1", "GPU0 NV18")
    else:
        assert told == ""


# --- The command ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("surroundings", "words", "message"),
    [
        (NONE, (), "no GPU: PyTorch 2.11.0+cu130 sees none"),
        (TWO, ("--upstream", "/nowhere"), "--upstream /nowhere: there is no vllm/"),
        (TWO, ("--", "--ranks", "4"), "--ranks behind -- is decided here"),
        (TWO, ("--", "--ranks=4"), "--ranks=4 behind -- is decided here"),
        (TWO, ("--", "--trees", "a=b"), "--trees behind -- is decided here"),
        (TWO, ("--", "--rank", "1"), "unrecognized arguments: --rank 1"),
        (TWO, ("--", "--simul"), "unrecognized arguments: --simul"),
        (TWO, ("--", "--cycles", "x"), "argument --cycles: invalid positive value"),
        (TWO, ("--", "--model", "/nowhere"), "/nowhere is no model"),
    ],
)
def test_wrong_words_are_named(trees, tmp_path, capsys, surroundings, words, message):
    """Before anything is run."""
    output = tmp_path / "out"
    try:
        status = two_gpus.main(["--output", str(output), *words], surroundings)
    except SystemExit as error:
        status = int(str(error.code))
    assert status in (1, 2)
    said = capsys.readouterr().err
    assert message in said and "make two-gpus: " in said
    assert not output.exists()


@pytest.mark.usefixtures("trees")
def test_a_folder_that_cannot_be_made_is_named(tmp_path, capsys):
    (tmp_path / "file").touch()
    output = str(tmp_path / "file" / "out")
    assert two_gpus.main(["--output", output], TWO) == 1
    assert f"--output {output}: " in capsys.readouterr().err


@pytest.mark.usefixtures("trees")
@pytest.mark.parametrize(("surroundings", "half"), [(ONE, True), (TWO, False)])
def test_the_end_says_what_came_of_it(
    tmp_path, capsys, monkeypatch, surroundings, half
):
    parts = [part(tmp_path, "passes"), part(tmp_path, "fails", "sys.exit(1)")]
    monkeypatch.setattr(two_gpus, "make_parts", lambda *_: parts)
    monkeypatch.setattr(two_gpus, "check_benchmark", lambda _: None)
    before = signal.getsignal(signal.SIGTERM)
    assert two_gpus.main(["--output", str(tmp_path)], surroundings) == 1
    assert signal.getsignal(signal.SIGTERM) is before
    said = capsys.readouterr().out
    assert re.search(r"│ passes\s+│ passed\s+│\s+\d+ │", said)
    assert re.search(r"│ fails\s+│ exit status 1\s+│\s+\d+ │", said)
    assert ("With two GPUs visible this is the whole" in said) == half
    assert str(tmp_path / two_gpus.LOG) in said
