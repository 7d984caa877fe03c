# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_rocm_memory.demo` tells its story, and says what did not hold."""

import contextlib
import io
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from vllm_rocm_memory.demo import __main__ as demo
from vllm_rocm_memory.demo.engine import Freed, Memory, Metrics
from vllm_rocm_memory.demo.view import View, findings, make_console, readable

from .test_serve import environment_for

DEMO = [sys.executable, "-m", "vllm_rocm_memory.demo"]
TOLD = [sys.executable, str(Path(__file__).with_name("told_story.py"))]
STORY_SECONDS = 120
MIB = 1 << 20


class Told:
    """The demo on the simulator, on a pipe."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            DEMO,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def output(self) -> str:
        return self.process.communicate(timeout=STORY_SECONDS)[0]

    def kill(self) -> None:
        if self.process.poll() is None:
            left = psutil.Process(self.process.pid).children(recursive=True)
            for process in [psutil.Process(self.process.pid), *left]:
                process.kill()
        self.process.communicate()


def begin(model: Path, folder: Path) -> Told:
    """What the first test reads; another model than its own would have to be there."""
    chosen = {"MODEL": "no/such-model", "VLLM_API_KEY": "a key", "FORCE_COLOR": "1"}
    return Told({**environment_for(model, folder), **chosen})


def steps(output: str) -> dict[str, str]:
    """What each step has brought, by its title."""
    found = re.split(r"^[\u2713\u2717] (.*) \(\d+\.\d s\)\n", output, flags=re.M)
    return dict(zip(found[1::2], found[2::2], strict=True))


def test_the_story_is_told_to_its_end(begun):
    output = begun.output()
    assert begun.process.returncode == 0, output
    assert "\x1b" not in output and "\r" not in output
    assert max(map(len, output.splitlines())) <= 80
    assert "\u2717" not in output and "behaviour, not speed" in output
    brought = steps(output)

    assert "KV copy engine: rect" in brought["Start vllm serve"]
    sleep = brought["Sleep: POST /sleep?level=1"]
    assert re.search(r"freed [1-9]\S* MiB: .*weights [1-9]\S* MiB", sleep)
    assert re.search(r"kv_cache 64\.0 MiB", sleep)
    assert re.search(r"kept on the host .*: [1-9]\S* MiB", sleep)
    asleep = brought["Report what holds memory while it sleeps"]
    assert re.search(r"^ +kv_cache +0 B of 64\.0 MiB$", asleep, re.M)
    assert re.search(r"^ +weights +0 B of [1-9]\S* MiB$", asleep, re.M)

    assert re.search(r'[1-9]\d+ tokens -> ".+"', brought["Complete a prompt"])
    assert "the same answer" in brought["Complete the same prompt"]
    offload = brought["Offload: other prompts take its place"]
    assert re.search(r"MiB, copies by rect: [1-9]", offload)
    reload = brought["Reload: ask the first prompt again"]
    assert re.search(r"[1-9]\d* of its blocks .*MiB, copies by rect: [1-9]", reload)
    assert "the same answer" in reload
    doctor = brought["Doctor: vllm-rocm-memory doctor"]
    for name in ("base", "series", "copy-flags", "memlock", "graph-pool"):
        assert re.search(rf"^ +\S  {name} +\S", doctor, re.M), name
    assert re.search(r"^ +\u2713  series +applied", doctor, re.M)
    assert re.search(r"^ +\u2713  graph-pool +active", doctor, re.M)
    assert re.search(r"^ +\d+ success", doctor, re.M)

    (seconds,) = re.findall(r"^Everything held, after (\d+) s\.$", output, re.M)
    assert int(seconds) < STORY_SECONDS


@pytest.fixture(scope="module")
def whole_story() -> str:
    return tell(0)


def tell(code: int, fault: str | None = None, **variables: str) -> str:
    """What the demo says with doubles that have this fault, when it ends so."""
    chosen = {"STORY_FAULT": fault} if fault else {}
    process = subprocess.run(
        TOLD,
        env={**os.environ, **chosen, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert process.returncode == code, process.stdout
    assert "Traceback" not in process.stdout.partition("demo: doctor")[0]
    return process.stdout


FAULTS = {
    "start": ("Start vllm serve", "ValueError: no such model"),
    "report": (
        "while it is awake",
        r"sleep_mode_asleep_bytes.*`vllm-rocm-memory apply`",
    ),
    "version": ("while it is awake", "schema version 2"),
    "unavailable": ("while it is awake", r"rank 0 has no .*: .*--enable-sleep-mode"),
    "dies": ("Sleep", r"/sleep.*exit code 3.*RuntimeError: the cause"),
    "refused": ("Sleep", r"/sleep\S+ was answered with HTTP 500: no sleep today"),
    "nothing": ("Sleep", "the sleep freed nothing"),
    "unkept": ("Sleep", "kept no report of its sleep"),
    "asleep": ("Wake", "1 bytes are still asleep"),
    "answer": ("Complete the same", 'the answer after the wake is " another", and was'),
    "stores": ("Offload", "no block was stored"),
    "computed": ("Reload", r"to come from the host: 0 did, and 0 of"),
    "kept": ("Reload", r"to come from the host: 0 did, and [1-9]\d* of"),
    "reload": ("Reload", 'the answer with blocks from the host is " another"'),
    "doctor": ("Doctor", r"doctor ended with exit code 1: .*no doctor today"),
    "check": ("Doctor", "doctor: graph-pool: the summary of graph-pool"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_hold_ends_it_and_is_named(fault):
    step, what = FAULTS[fault]
    output = tell(1, fault)
    (failed,) = re.findall(r"^\u2717 (.*)", output, re.M)
    assert step in failed
    assert re.search(f"^demo: .*{what}", output, re.M | re.S)
    assert "\u2713 Stop the server" in output
    assert "Everything held" not in output


def test_without_a_fault_the_doubles_tell_the_whole_story(whole_story):
    """So that it is the fault that the tests above see."""
    assert len(steps(whole_story)) == 11
    assert "Everything held" in whole_story


def test_what_another_process_takes_meanwhile_is_no_fault():
    asleep = steps(tell(0, "crowded"))["Report what holds memory while it sleeps"]
    assert re.search(r"in use, together +200\.0 MiB", asleep)


def test_a_doctor_that_does_not_end_is_ended_with_its_children(tmp_path):
    child = tmp_path / "child"
    output = tell(1, "slow", STORY_CHILD=str(child))
    assert "demo: doctor has not ended in 1 s" in output
    assert not psutil.pid_exists(int(child.read_text()))


def test_a_terminal_of_ascii_gets_ascii(whole_story):
    output = tell(0, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert output.isascii()
    assert len(output.splitlines()) == len(whole_story.splitlines())


@pytest.fixture
def hanging() -> Iterator[subprocess.Popen[str]]:
    """The demo in a sleep that does not end."""
    process = subprocess.Popen(
        TOLD,
        env={**os.environ, "STORY_FAULT": "hangs"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    while "while it is awake" not in process.stdout.readline():
        assert process.poll() is None
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize(
    ("sign", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
def test_a_signal_stops_the_server(hanging, sign, code):
    servers = psutil.Process(hanging.pid).children(recursive=True)
    assert servers
    hanging.send_signal(sign)
    output, _ = hanging.communicate(timeout=30)
    assert hanging.returncode == code
    assert f"demo: ended by {sign.name}" in output
    assert "\u2713 Stop the server" in output
    assert "Traceback" not in output
    _, alive = psutil.wait_procs(servers, timeout=5)
    assert not alive


def test_a_reader_that_ends_does_not_leave_the_server(hanging):
    servers = psutil.Process(hanging.pid).children(recursive=True)
    hanging.stdout.close()
    hanging.send_signal(signal.SIGINT)
    hanging.wait(30)
    _, alive = psutil.wait_procs(servers, timeout=5)
    assert not alive


def on_a_terminal(
    variables: dict[str, str], interrupt_at: bytes | None = None
) -> tuple[int, str]:
    """The exit code, and all that a terminal of 80 columns was sent."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        TOLD,
        env={**os.environ, "COLUMNS": "80", "LINES": "24", "CI": "", **variables},
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    sent = bytearray()
    # EIO is what reading says when nobody has the terminal open any more.
    with contextlib.suppress(OSError):
        while part := os.read(leader, 4096):
            sent += part
            if interrupt_at and interrupt_at in sent:
                process.send_signal(signal.SIGINT)
                interrupt_at = None
    os.close(leader)
    return process.wait(30), sent.decode()


def is_left_in_order(sent: str) -> bool:
    """Whether the cursor, hidden meanwhile, is shown again."""
    return 0 < sent.count("\x1b[?25l") <= sent.count("\x1b[?25h")


def test_a_terminal_shows_what_goes_on_and_is_left_in_order():
    code, sent = on_a_terminal({"TERM": "xterm-256color"})
    assert code == 0
    assert is_left_in_order(sent)
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", sent)
    # The step under way, its bars and the server's last line are only seen live.
    assert re.search(r"[\u2800-\u28ff] Sleep: POST", shown)
    assert shown.count("in use, together") > 1
    assert "KV copy engine: rect (asked for: auto, by default): a double" in shown
    assert "\u2713 Doctor" in shown and "Everything held" in shown


def test_an_interrupted_terminal_is_left_in_order():
    variables = {"TERM": "xterm-256color", "STORY_FAULT": "hangs"}
    code, sent = on_a_terminal(variables, interrupt_at=b"falling asleep")
    assert code == 130
    assert is_left_in_order(sent)
    assert "demo: ended by SIGINT" in sent.splitlines()[-1]


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"CI": "true"}])
def test_where_nobody_watches_a_terminal_gets_plain_lines(variables):
    code, sent = on_a_terminal({"TERM": "xterm-256color", **variables})
    assert code == 0
    assert "\x1b" not in sent
    assert "Everything held" in sent


def test_a_plan_that_cannot_be_is_explained(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demo", "--", "--port", "1"])
    assert demo.main() == 1
    assert capsys.readouterr().err.startswith("demo: --port cannot be passed on")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("file", "environment", "live"),
    [
        (Terminal(), {"TERM": "xterm"}, True),
        (Terminal(), {"TERM": "xterm", "CI": "true"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (Terminal(), {}, False),
        (io.StringIO(), {"TERM": "xterm", "FORCE_COLOR": "1"}, False),
    ],
)
def test_only_a_terminal_that_somebody_watches_is_live(file, environment, live):
    console = make_console(file, environment)
    assert console.is_terminal is live
    assert live or console.width == 80


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (MIB, "1.0 MiB"),
        (1536 * MIB, "1.5 GiB"),
        (3 << 40, "3072.0 GiB"),
    ],
)
def test_bytes_are_shown_in_the_unit_that_suits_them(size, text):
    assert readable(size) == text


def shown(renderable: Any, width: int = 80) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=False).print(renderable)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_bars_are_as_long_as_the_memory_is_large():
    view = View(make_console(io.StringIO(), {}), lambda: "")
    assert "".join(shown(view.bars())) == "", "nothing is measured yet"
    view.measured(Memory({"weights": 5 * MIB, "kv_cache": 20 * MIB}, 40 * MIB, 0, 0))
    view.measured(Memory({"weights": 5 * MIB, "kv_cache": 5 * MIB}, 19 * MIB, 0, 0))
    weights, cache, used = shown(view.bars())
    assert weights.count("\u2501") == cache.count("\u2501") == 5
    assert weights.endswith("5.0 MiB of 5.0 MiB")
    assert cache.endswith("5.0 MiB of 20.0 MiB")
    assert used.split()[-2:] == ["19.0", "MiB"]
    half_way = shown(view.bars(0.5))[1]
    assert 5 < half_way.count("\u2501") < 20
    assert half_way.endswith("5.0 MiB of 20.0 MiB"), "figures are never made up"


def test_findings_keep_their_names_and_states_whole():
    checks = [
        {"name": "base", "state": "success", "summary": "s" * 100, "remedy": None},
        {"name": "graph-pool", "state": "missing", "summary": "m", "remedy": "do it"},
        {"name": "memlock", "state": "partial", "summary": "p", "remedy": "raise it"},
    ]
    base, pool, remedy, memlock = shown(findings(checks), width=60)
    assert base.startswith("\u2713  base        sss") and base.endswith("\u2026")
    assert pool == "\u2717  graph-pool  m"
    assert remedy.strip() == "do it"
    assert memlock == "!  memlock     p"
    assert shown(findings(checks[:1], unicode=False))[0].startswith("ok  base")


def device(**figures: Any) -> dict[str, Any]:
    parts = {"torch_bytes": 1, "graph_pool_bytes": 2, "other_pools_bytes": 3}
    rest = {"rest_bytes": 4, "others_bytes": 5, "asleep": {"weights": 6}}
    return {"tags": {"weights": 7}, "used_bytes": 22, **parts, **rest, **figures}


def test_the_memory_of_ranks_is_one_sum():
    memory = Memory.of([device(), device(others_bytes=None, used_bytes=17)])
    assert memory.used == sum(memory.parts.values()) == 39
    assert memory.parts["weights"] == 14
    assert memory.mapped == 14
    assert memory.asleep == 12


def test_what_ranks_have_freed_is_one_sum():
    tags = {"weights": {"device_bytes": 3, "backup_bytes": 2}}
    more = {"kv_cache": {"device_bytes": 5, "backup_bytes": 0}}
    freed = Freed.of([{"freed": tags}, {"freed": {**tags, **more}}])
    assert freed == Freed({"weights": 6, "kv_cache": 5}, 4)


def test_metrics_are_summed_over_the_labels_that_are_not_asked():
    metrics = Metrics('a_total{b="1",c="1"} 2\na_total{b="2",c="1"} 3\nd 4\n')
    assert metrics.total("a_total") == 5
    assert metrics.total("a_total", b="2") == 3
    assert metrics.total("a_total", b="3") == metrics.total("e") == 0
    assert metrics.labels("a_total") == {"b": "1", "c": "1"}
