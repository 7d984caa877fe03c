# SPDX-License-Identifier: Apache-2.0
"""make test-gpu: what it runs, how a file may end, and what it says of the rest."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import bootstrap
import gpu_tests
import partitions
import pytest
import torch
from gpu_tests import GpuTestsError, Surroundings
from partitions import Machine

ONE_GPU = Surroundings(
    Machine("2.11.0+cu130", "13.0", None, 1),
    ("NVIDIA H200",),
    driver="nvidia 580.159.04",
    vllm="0.33.0",
    python="3.12.3",
    series="series: 5 of 5 patches applied",
)
NO_GPU = dataclasses.replace(
    ONE_GPU, machine=Machine("2.13.0+cpu", None, None, 0), names=(), driver=""
)
AMD = Machine("2.11.0+rocm7.2", None, "7.2.1", 2)
BOTH = ("ROCm", "CUDA")

PARTITIONS = """
cpu = ["test_none.py", "test_both.py"]
gpu = {gpu}
gpu-2 = ["test_two.py"]
rocm-only = ["sub/test_amd.py"]
[also]
gpu = ["test_both.py"]
[shared]
gpu = {shared}
"""
# begins and ends at times that the tests read
TIMED = """
import json, pathlib, time
began = time.monotonic()
def test_is_timed():
    {text}
    span = [began, time.monotonic()]
    pathlib.Path(__file__).with_suffix(".span").write_text(json.dumps(span))
"""
MEETS = """
import os, pathlib, time
def test_meets():
    pathlib.Path(__file__).with_suffix(".here").touch()
    deadline = time.monotonic() + float(os.environ["PATIENCE"])
    while not pathlib.Path(__file__).with_name("{other}.here").exists():
        assert time.monotonic() < deadline, "nobody came"
        time.sleep(0.02)
"""
# in a session of its own and by another title, as engines are
LEAVES = """
import os, pathlib, signal, subprocess, sys, time
CHILD = "import setproctitle, time; setproctitle.setproctitle('x' * 9999)\\n"
CHILD += "print(flush=True); time.sleep(600)"
def test_before():
    pass
def test_leaves():
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout.readline()
    pathlib.Path(__file__).with_name("pid").write_text(str(process.pid))
"""
# a torch whose one GPU does not answer
BROKEN_GPU = """
from types import SimpleNamespace
__version__ = "2.11.0"
version = SimpleNamespace(cuda="13.0", hip=None)
_C = SimpleNamespace(_cuda_getDeviceCount=lambda: 1)
def get_device_name(gpu):
    raise RuntimeError("no answer")
cuda = SimpleNamespace(is_available=lambda: True, get_device_name=get_device_name)
"""
FILES = {
    "test_none.py": "def test_never():\n    raise SystemExit('is no GPU test')\n",
    "test_both.py": "def test_both():\n    pass\n",
    "test_two.py": "def test_a():\n    assert 0\ndef test_b():\n    assert 0\n",
    "sub/test_amd.py": "def test_amd():\n    assert 0\n",
    "test_mixed.py": (
        "import pytest\n"
        "def test_passes():\n    print('not shown')\n"
        "def test_fails():\n    assert 1 == 2, 'the cause'\n"
        "def test_skips():\n    pytest.skip('needs [thing]')\n"
        "@pytest.fixture\n"
        "def broken():\n    yield\n    raise RuntimeError('at its end')\n"
        "def test_breaks(broken):\n    pass\n"
        "def test_does_both(broken):\n    assert 0\n"
    ),
    "test_skipped.py": (
        "import pytest\npytest.skip('needs [thing]', allow_module_level=True)\n"
    ),
    "test_wrong.py": "import nothing_of_this_name\n",
    "test_empty.py": "",
    "test_crash.py": (
        "import os, signal\n"
        "def test_before():\n    pass\n"
        "def test_crash():\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    ),
    "test_hang.py": LEAVES + "    time.sleep(600)\n",
    "test_leaves.py": LEAVES,
    "test_dies.py": LEAVES + "    os.kill(os.getpid(), signal.SIGSEGV)\n",
    "test_ended.py": (
        "import os, signal, time\n"
        "def test_before():\n    pass\n"
        "def test_is_ended():\n"
        "    os.kill(os.getppid(), signal.SIGTERM)\n"
        "    time.sleep(600)\n"
    ),
}


@pytest.fixture
def tests(tmp_path, monkeypatch) -> Path:
    """A folder of tests of its own, with partitions that `partition` writes."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a second each
    folder = tmp_path / "tests"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def partition(folder: Path, *gpu: str, shared: Sequence[str] = ()) -> None:
    text = PARTITIONS.format(gpu=[*gpu], shared=[*shared])
    (folder / "partitions.toml").write_text(text)


def run(tests: Path, *words: str, surroundings: Surroundings = ONE_GPU) -> int:
    return gpu_tests.main(["--tests", str(tests), *words], surroundings)


def row(text: str, file: str) -> list[str]:
    """The cells of a file's row in the table."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"│ {file} "))
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def since_it_began(tests, monkeypatch) -> None:
    """A file's time counts from when the one that leaves a process has done so."""
    has_ended = gpu_tests._has_ended

    def has_ended_after_it_began(*words):
        while not (tests / "pid").exists():
            time.sleep(0.02)
        return has_ended(*words)

    monkeypatch.setattr(gpu_tests, "_has_ended", has_ended_after_it_began)


def assert_ended(pid: int) -> None:
    deadline = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


def test_a_file_that_cannot_be_run_costs_itself_alone(tests, monkeypatch, capsys):
    partition(tests, "test_crash.py")
    run_file = gpu_tests.run_file

    def refused(file, *words, **more):
        if file.path == "test_crash.py":
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return run_file(file, *words, **more)

    monkeypatch.setattr(gpu_tests, "run_file", refused)
    assert run(tests) == 1
    out = capsys.readouterr().out
    assert row(out, "test_crash.py")[:4] == ["gpu", "0", "1", "0"]
    assert row(out, "test_both.py")[:4] == ["gpu (also cpu)", "1", "0", "0"]
    assert "test_crash.py: was not run: [Errno 11] Resource temporarily" in out


def test_every_file_has_its_row_and_every_failure_its_cause(tests, tmp_path, capsys):
    files = ("mixed", "skipped", "wrong", "empty", "crash")
    partition(tests, *(f"test_{name}.py" for name in files))
    output = tmp_path / "made" / "output"
    assert run(tests, "--output", str(output)) == 1
    out = capsys.readouterr().out

    # what pytest says is shown as it comes, and the report follows
    assert out.index("test_mixed.py::test_fails FAILED") < out.index("│ test_mixed.py")
    report = out[out.index("│ test_mixed.py") :]
    # a fixture that fails at its end is a failure beside that of its test
    assert row(report, "test_mixed.py")[:4] == ["gpu", "1", "4", "1"]
    assert row(report, "test_skipped.py")[:4] == ["gpu", "0", "0", "1"]
    assert row(report, "test_wrong.py")[:4] == ["gpu", "0", "1", "0"]
    assert row(report, "test_empty.py")[:4] == ["gpu", "0", "1", "0"]
    assert row(report, "test_crash.py")[:4] == ["gpu", "0", "1", "0"]
    assert row(report, "test_both.py")[:4] == ["gpu (also cpu)", "1", "0", "0"]
    assert row(report, "test_two.py") == ["gpu-2", "0", "0", "2", "-"]
    assert row(report, "sub/test_amd.py") == ["rocm-only", "0", "0", "1", "-"]
    assert "test_none.py" not in out
    for line in (
        "test_mixed.py::test_fails: AssertionError: the cause",
        "test_mixed.py::test_breaks: ",
        "test_wrong.py: collection failure: ModuleNotFoundError: No module named",
        "test_empty.py: no test was collected",
        "test_crash.py: killed by SIGKILL",
    ):
        assert f"  {line}" in report
    assert "2 x needs [thing] (test_mixed.py, test_skipped.py)" in report
    lacks = "needs 2 GPUs: 1 is visible, which its ranks share with --share-gpu"
    assert f"2 x {lacks} (test_two.py)" in report
    amd = "1 x needs ROCm: PyTorch 2.11.0+cu130 is built for CUDA 13.0"
    assert f"{amd} (sub/test_amd.py)" in report
    assert (
        "1 x NVIDIA H200, nvidia 580.159.04, torch 2.11.0+cu130 for CUDA 13.0, "
        "vLLM 0.33.0, Python 3.12.3, series: 5 of 5 patches applied\n"
        "2 passed, 7 failed, 5 skipped in "
    ) in report

    kept = {path.name for path in output.iterdir()}
    assert {"test_mixed.xml", "test_mixed.log", "test_crash.log"} < kept
    assert len(list(ElementTree.parse(output / "test_mixed.xml").iter("testcase"))) == 6
    assert "the cause" in (output / "test_mixed.log").read_text()
    kept_report = (output / "report.txt").read_text()
    assert kept_report.startswith("┏") and "2 passed, 7 failed" in kept_report
    assert "FAILED" not in kept_report


@pytest.mark.parametrize(
    ("file", "wrong", "counts"),
    [
        ("test_hang.py", "did not end within 0.3 s (--timeout)", ["1", "1", "0"]),
        ("test_dies.py", "killed by SIGSEGV", ["0", "1", "0"]),
        ("test_leaves.py", "", ["2", "0", "0"]),
    ],
)
@pytest.mark.usefixtures("since_it_began")
def test_what_a_file_has_left_running_is_ended(tests, capsys, file, wrong, counts):
    """And one that hangs has said by then what has passed."""
    partition(tests, file)
    timeout = "0.3" if file == "test_hang.py" else "60"
    assert run(tests, "--timeout", timeout, file) == bool(wrong)
    out = capsys.readouterr().out
    assert row(out, file)[1:4] == counts
    assert f"  {file}: {wrong}" in out or not wrong
    assert not is_running(int((tests / "pid").read_text()))


def test_what_does_not_end_is_named(tests, capsys, monkeypatch):
    """As a process in the driver may; another file's are let be."""
    partition(tests, "test_leaves.py")
    monkeypatch.setattr(gpu_tests, "GRACE_S", 0.2)
    with subprocess.Popen(
        ["sleep", "600"], env={**os.environ, gpu_tests.MARK: "another"}
    ) as other:
        try:
            with monkeypatch.context() as patch:
                patch.setattr(os, "kill", lambda number, signal: None)
                assert run(tests, "test_leaves.py") == 1
            out = capsys.readouterr().out
            pid = int((tests / "pid").read_text())
            wrong = f"SIGKILL does not end its processes {pid}, which may keep"
            assert f"  test_leaves.py: {wrong}" in out
            assert is_running(pid) and is_running(other.pid)
            os.kill(pid, signal.SIGKILL)
        finally:
            other.kill()


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_ended_from_outside_it_reports_what_it_has(tests, capsys, handler):
    """SIGTERM as a job's limit sends it; a shell's job in the background has no SIGINT.

    The process that is ended is this one.
    """
    partition(tests, "test_ended.py", "test_mixed.py")
    before = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGINT, handler)
    try:
        assert run(tests, "test_ended.py", "test_mixed.py") == 1
        assert signal.getsignal(signal.SIGINT) == handler
    finally:
        signal.signal(signal.SIGINT, before[1])
    assert signal.getsignal(signal.SIGTERM) == before[0]
    out = capsys.readouterr().out
    assert row(out, "test_ended.py")[1] == "1"
    assert "  test_ended.py: interrupted" in out
    assert "not run:\n  test_mixed.py" in out


# --- Several at the same time --------------------------------------------------------


@pytest.fixture
def meeting(tests) -> Path:
    """Two files that wait for each other."""
    for name, other in (("left", "right"), ("right", "left")):
        (tests / f"test_{name}.py").write_text(MEETS.format(other=f"test_{other}"))
    return tests


def test_files_that_share_a_gpu_run_side_by_side(meeting, capsys, monkeypatch):
    monkeypatch.setenv("PATIENCE", "20")
    files = "test_left.py", "test_right.py"
    partition(meeting, *files, shared=files)
    assert run(meeting, "--jobs", "2", *files) == 0
    out = capsys.readouterr().out
    assert out.index("1/2 test_left.py (gpu) has started") < out.index("has ended")
    assert out.index("2/2 test_right.py (gpu) has started") < out.index("has ended")
    # each in one piece: no begin of one before the end of the other
    pieces = re.findall(r"session starts|(?<== )1 passed", out)
    assert pieces == ["session starts", "1 passed"] * 2
    assert out.index("│ test_left.py") < out.index("│ test_right.py")
    assert "2 passed, 0 failed, 0 skipped in" in out


@pytest.mark.parametrize(("jobs", "shared"), [("1", True), ("2", False)])
def test_others_run_one_by_one(meeting, capsys, monkeypatch, jobs, shared):
    """Those not listed as well as all of them where one job was asked for."""
    monkeypatch.setenv("PATIENCE", "0.1")
    files = "test_left.py", "test_right.py"
    partition(meeting, *files, shared=files if shared else ())
    assert run(meeting, "--jobs", jobs, *files) == 1
    out = capsys.readouterr().out
    assert "test_left.py::test_meets: AssertionError: nobody came" in out
    assert row(out, "test_right.py")[1:3] == ["1", "0"]


def test_a_file_that_measures_has_nothing_beside_it(tests, capsys):
    alone = "test_both.py", "test_two.py", "sub/test_amd.py"
    shared = "test_long.py", "test_short.py"
    for file in (*alone, *shared):
        text = f"time.sleep({0.8 if file == 'test_long.py' else 0.2})"
        (tests / file).write_text(TIMED.format(text=text))
    partition(tests, *reversed(shared), shared=shared)
    two_gpus = dataclasses.replace(ONE_GPU, machine=AMD)
    assert run(tests, "--jobs", "3", surroundings=two_gpus) == 0
    out = capsys.readouterr().out
    assert "1/5 test_long.py (gpu) has started" in out
    spans = {
        file: json.loads((tests / file).with_suffix(".span").read_text())
        for file in (*alone, *shared)
    }
    assert max(spans[file][0] for file in shared) < min(spans[f][1] for f in shared)
    for file in alone:
        for other in {*spans} - {file}:
            ends, begins = min(spans[file][1], spans[other][1]), spans[file][0]
            assert ends < max(begins, spans[other][0]), f"{other} beside {file}"


@pytest.mark.usefixtures("since_it_began")
def test_one_fails_and_one_hangs(tests, capsys):
    files = "test_hang.py", "test_mixed.py"
    partition(tests, *files, shared=files)
    words = "--jobs", "2", "--timeout", "2", *files, "test_both.py"
    assert run(tests, *words) == 1
    out = capsys.readouterr().out
    assert "  test_hang.py: did not end within 2 s (--timeout)" in out
    assert row(out, "test_mixed.py")[:4] == ["gpu", "1", "4", "1"]
    assert row(out, "test_both.py")[1] == "1"
    assert_ended(int((tests / "pid").read_text()))


def test_told_to_end_it_ends_all_that_run(tests, capsys):
    """The second signal does not wait for one that heeds none."""
    (tests / "test_tells.py").write_text(
        "import os, pathlib, signal, time\n"
        "def test_before():\n    pass\n"
        "def test_tells():\n"
        "    signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "    while not pathlib.Path(__file__).with_name('pid').exists():\n"
        "        time.sleep(0.02)\n"
        "    os.kill(os.getppid(), signal.SIGINT)\n"
        "    time.sleep(0.5)\n"
        "    os.kill(os.getppid(), signal.SIGTERM)\n"
        "    time.sleep(600)\n"
    )
    shared = "test_hang.py", "test_tells.py", "test_mixed.py"
    partition(tests, *shared, shared=shared)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    try:
        assert run(tests, "--jobs", "2", *shared, "test_both.py") == 1
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < gpu_tests.GRACE_S
    out = capsys.readouterr().out
    for file in shared[:2]:
        assert f"  {file}: interrupted" in out
    assert "not run:\n  test_mixed.py\n  test_both.py\n" in out
    assert_ended(int((tests / "pid").read_text()))


def test_an_earlier_runs_report_is_not_kept(tests, tmp_path, capsys, monkeypatch):
    """This run is ended before it has one, and runs another file."""
    partition(tests, "test_mixed.py", "test_crash.py")
    output = tmp_path / "output"
    assert run(tests, "--output", str(output), "test_mixed.py") == 1
    (output / "notes.txt").touch()
    before = {path.name for path in output.iterdir()}
    assert before == {"test_mixed.log", "test_mixed.xml", "report.txt", "notes.txt"}
    assert run(tests, "--output", str(output), "--list") == 0
    assert {path.name for path in output.iterdir()} == before

    def ended(*words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_tests, "run", ended)
    with pytest.raises(KeyboardInterrupt):
        run(tests, "--output", str(output), "test_crash.py")
    assert {path.name for path in output.iterdir()} == {"notes.txt"}


def test_a_log_that_cannot_be_written_ends_the_others(
    tests, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(gpu_tests, "_clear", lambda *_: None)
    shared = "test_hang.py", "test_mixed.py"
    partition(tests, *shared, shared=shared)
    (tmp_path / "output" / "test_mixed.xml").mkdir(parents=True)
    words = "--jobs", "2", "--output", str(tmp_path / "output"), *shared
    assert run(tests, *words) == 1
    assert f"--output {tmp_path}/output: " in capsys.readouterr().err
    if (tests / "pid").exists():
        assert_ended(int((tests / "pid").read_text()))


def test_a_log_that_is_not_whole_is_a_failure(tests, tmp_path, capsys, monkeypatch):
    """And the file runs to its end all the same."""
    monkeypatch.setattr(gpu_tests, "_clear", lambda *_: None)
    partition(tests)
    output = tmp_path / "output"
    output.mkdir()
    (output / "test_both.log").symlink_to("/dev/full")
    assert run(tests, "--output", str(output), "test_both.py") == 1
    out = capsys.readouterr().out
    assert f"  test_both.py: {output}/test_both.log is not whole: [Errno 28] No" in out
    assert "1 passed, 1 failed, 0 skipped" in out


# --- What it takes and says ----------------------------------------------------------


def test_what_is_chosen_is_run_with_pytests_options(tests, capsys, monkeypatch):
    partition(tests, "test_mixed.py", "test_crash.py")
    monkeypatch.chdir(tests.parent)
    assert run(tests, "tests/test_mixed.py", "--", "-k", "passes or skips") == 0
    out = capsys.readouterr().out
    assert row(out, "test_mixed.py")[:4] == ["gpu", "1", "0", "1"]
    assert "1 passed, 0 failed, 1 skipped" in out
    # nothing has passed, and nothing has failed
    assert run(tests, "test_mixed.py", "--", "-k", "skips") == 1
    assert "nothing has passed" in capsys.readouterr().out


def test_a_file_that_is_left_out_has_to_be_collected_all_the_same(tests, capsys):
    partition(tests)
    (tests / "test_two.py").write_text("import nothing_of_this_name\n")
    assert run(tests, "test_both.py", "test_two.py") == 1
    out = capsys.readouterr().out
    assert "cannot be collected" in out and "nothing_of_this_name" in out
    assert "1 passed, 1 failed, 0 skipped" in out


def test_the_list_runs_nothing(tests, capsys):
    partition(tests, "test_crash.py")
    assert run(tests, "--list") == 0
    out = capsys.readouterr().out
    assert row(out, "test_crash.py") == ["gpu", "runs"]
    assert row(out, "test_two.py")[0] == "gpu-2"
    assert row(out, "test_two.py")[1].startswith("needs 2 GPUs: 1 is visible, which")
    assert run(tests, "--list", "--partition", "rocm-only") == 0
    out = capsys.readouterr().out
    assert "sub/test_amd.py" in out and "test_crash.py" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--partition", "gpu-3"], "'gpu-3' (choose from 'gpu', 'gpu-2', 'rocm-only')"),
        (["--jobs", "0"], "--jobs: '0' is not a number of files, which is 1 or more"),
        (["--jobs", "all"], "'all' is not a number of files"),
        (["--timeout", "0"], "0 is not a positive number of seconds"),
        (["test_mised.py"], "test_mised.py: no such test file in"),
        (["test_none.py"], "test_none.py uses no GPU: make test ARGS=tests/test_none"),
        (["--partition", "gpu-2", "test_mixed.py"], "no file is left by --partition"),
        (["--output", "/dev/null/x"], "--output /dev/null/x: "),
        (["--tests", "/nowhere"], "/nowhere/partitions.toml: No such file"),
    ],
)
def test_wrong_words_are_named(tests, capsys, words, message):
    partition(tests, "test_mixed.py")
    try:
        status = run(tests, *words)
    except SystemExit as error:
        status = int(str(error.code))
    assert status in (1, 2)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("present", "machine", "visible", "message"),
    [
        ((), NO_GPU.machine, None, "neither /dev/kfd (ROCm) nor /dev/nvidia0"),
        (("ROCm",), NO_GPU.machine, None, "there is a ROCm GPU, and this PyTorch is"),
        (
            BOTH,
            NO_GPU.machine,
            None,
            "vLLM on a ROCm or CUDA torch: make test-gpu",
        ),
        (("CUDA",), AMD, None, "PYTHON=/path/to/python"),
        (("ROCm",), AMD, "", "unset what hides it, CUDA_VISIBLE_DEVICES=''"),
        (("ROCm",), AMD, None, "groups video and render"),
        (BOTH, ONE_GPU.machine, None, "there is a CUDA GPU, whose driver"),
    ],
)
def test_without_a_gpu_it_says_what_to_do(
    tests, capsys, monkeypatch, present, machine, visible, message
):
    partition(tests, "test_mixed.py")
    monkeypatch.setattr(bootstrap, "gpus_of_machine", lambda: present)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    surroundings = dataclasses.replace(
        NO_GPU, machine=dataclasses.replace(machine, gpus=0)
    )
    assert run(tests, surroundings=surroundings) == 1
    captured = capsys.readouterr()
    assert message in captured.err and "sees none" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(("gpus", "shared"), [(0, False), (1, True), (2, False)])
def test_ranks_share_the_only_gpu(tests, capsys, monkeypatch, gpus, shared):
    """And each has its own where there are two; then there is nothing to be shared."""
    partition(tests, "test_mixed.py")
    monkeypatch.setenv("GPU_TESTS_SHARE_GPU", "")  # put back at the end
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: gpus, raising=False)

    def look() -> Surroundings:
        machine = Machine.seen_by_torch()
        return dataclasses.replace(ONE_GPU, machine=machine, names=("H200",) * gpus)

    monkeypatch.setattr(Surroundings, "look", look)
    words = ["--tests", str(tests), "--list"]
    assert gpu_tests.main(words) == 0
    assert "shared by the ranks" not in capsys.readouterr().out
    status = gpu_tests.main([*words, "--share-gpu"])
    said = capsys.readouterr()
    if gpus > 1:
        assert status == 1
        assert "--share-gpu: 2 GPUs are visible, one for each rank" in said.err
    else:
        assert status == 0
        assert ("1 x H200, shared by the ranks of gpu-2" in said.out) == shared
        assert (row(said.out, "test_two.py")[-1] == "runs") == shared


def test_it_looks_at_this_machine():
    seen = Surroundings.look()
    assert seen.machine == Machine.seen_by_torch()
    assert len(seen.names) == seen.machine.gpus
    assert seen.python and seen.vllm in str(seen)
    assert re.fullmatch(r"series: (\d+) of \1 patches applied", seen.series)


@pytest.mark.parametrize(
    ("torch", "remedy"),
    [
        ("raise OSError('libamdhip64.so: cannot open')", "make setup-test-gpu"),
        ("raise ImportError('no torch')", "make setup-test-gpu"),
        (BROKEN_GPU, "PyTorch is whole, and a GPU or its driver fails:"),
    ],
)
def test_the_remedy_is_for_what_is_wrong(tmp_path, monkeypatch, torch, remedy):
    (tmp_path / "torch.py").write_text(torch)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(GpuTestsError, match=re.escape(remedy)) as caught:
        Surroundings.look()
    assert ("setup-test-gpu" in str(caught.value)) == ("setup-test-gpu" in remedy)


def test_a_series_that_does_not_answer_is_said_to(monkeypatch):
    def ask(command: list[str], timeout: float) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(gpu_tests, "_ask", ask)
    assert gpu_tests._state_of_series() == "series: no answer within 180 s"


@pytest.mark.parametrize(("there", "counted"), [(True, 1), (False, 0)])
def test_gpus_are_those_of_the_runtime(monkeypatch, there, counted):
    """Where the driver has eight and this process may open one or none."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 1, raising=False)
    assert Machine.seen_by_torch().gpus == counted


@pytest.mark.parametrize(
    ("machine", "lacks"),
    [
        (
            NO_GPU.machine,
            {
                "gpu": "needs a GPU: PyTorch 2.13.0+cpu sees none",
                "gpu-2": "needs 2 GPUs: PyTorch 2.13.0+cpu sees none",
                "rocm-only": "needs ROCm: PyTorch 2.13.0+cpu is built for the CPU",
            },
        ),
        (
            ONE_GPU.machine,
            {
                "gpu-2": "needs 2 GPUs: 1 is visible, which its ranks share with "
                "--share-gpu",
                "rocm-only": "needs ROCm: PyTorch 2.11.0+cu130 is built for CUDA 13.0",
            },
        ),
        (
            dataclasses.replace(AMD, gpus=0),
            {
                "gpu": "needs a GPU: PyTorch 2.11.0+rocm7.2 sees none",
                "gpu-2": "needs 2 GPUs: PyTorch 2.11.0+rocm7.2 sees none",
                "rocm-only": "needs an AMD GPU: PyTorch 2.11.0+rocm7.2 sees none",
            },
        ),
        (
            dataclasses.replace(ONE_GPU.machine, ranks_share_gpu=True),
            {"rocm-only": "needs ROCm: PyTorch 2.11.0+cu130 is built for CUDA 13.0"},
        ),
        (AMD, {}),
    ],
)
def test_a_machine_lacks_what_a_partition_needs(machine, lacks):
    said = {name: machine.lacks(name) for name in partitions.NAMES}
    assert {name: reason for name, reason in said.items() if reason} == lacks
