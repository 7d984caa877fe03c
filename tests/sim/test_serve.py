# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_rocm_memory.serve` starts, answers what it prints and stops."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from vllm_rocm_memory import serve
from vllm_rocm_memory.sim import hipsim

from .. import documented_commands

SERVE = [sys.executable, "-m", "vllm_rocm_memory.serve"]
READY_SECONDS = 150
ROOT = Path(__file__).parents[2]
COMMANDS = ROOT / "tests" / "setup" / "docs_commands.toml"
PORT_IN_DOCUMENTS = "8000"


def environment_for(model: Path, folder: Path) -> dict[str, str]:
    """This process's, without choices, and with the demo model made already."""
    cached = folder / "vllm-rocm-memory" / "demo-model"
    shutil.copytree(model, cached)
    chosen = (
        "ARGS",
        "MODEL",
        "PORT",
        "HIPSIM_PROFILE",
        "VLLM_KV_OFFLOAD_COPY_ENGINE",
        "VLLM_SERVER_DEV_MODE",
        "MAKEFLAGS",
        "MAKELEVEL",
    )
    kept = {name: value for name, value in os.environ.items() if name not in chosen}
    return {**kept, "XDG_CACHE_HOME": str(folder)}


@pytest.fixture
def environment(cpu_build, demo_model, tmp_path) -> dict[str, str]:
    return environment_for(demo_model, tmp_path)


class Running:
    """`serve` in the background, with what it has printed so far."""

    def __init__(self, environment: dict[str, str], command: Sequence[str]) -> None:
        self.environment = environment
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while text not in self.output:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, sign: int) -> int:
        self.process.send_signal(sign)
        return self._ended()

    def press_ctrl_c(self) -> int:
        """What a terminal sends reaches `make` too."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self._ended()

    def _ended(self) -> int:
        code = self.process.wait(60)
        self._reader.join(10)
        return code

    def kill(self) -> None:
        """Whatever the test left."""
        if self.process.poll() is None:
            left = self.children()
            self.process.kill()
            for process in left:
                process.kill()
        self._reader.join(10)


class Documented(Running):
    """`make serve` as the documents have it, and their other commands for it."""

    def __init__(self, environment: dict[str, str]) -> None:
        entries = tomllib.loads(COMMANDS.read_text())["served"]
        self.make, *self.entries = entries
        self._port = str(serve.find_port(None))
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        # The width that `report` prints for.
        chosen = {**environment, "PATH": path, "COLUMNS": "160"}
        command = self._with_port(self.make["command"])
        super().__init__(chosen, ["sh", "-c", f"exec env {command}"])

    def _with_port(self, command: str) -> str:
        return command.strip().replace(PORT_IN_DOCUMENTS, self._port)

    def check(self, entry: dict[str, Any]) -> str:
        """What the entry's command says, which is as the entry has it."""
        command = self._with_port(entry.get("command", entry["line"]))
        code, output = self.run(command)
        documented_commands.check(entry, code, output)
        return output

    def run(self, command: str) -> tuple[int, str]:
        """The exit code and the output of a command in the checkout."""
        if command.startswith("curl") and shutil.which("curl") is None:
            return 0, ask(command)
        return documented_commands.run(command, ROOT, self.environment, seconds=120)

    def printed(self) -> list[str]:
        """The commands that it prints."""
        listed = self.output.partition("Try:\n")[2].partition("Ctrl-C")[0]
        return [line.strip() for line in listed.splitlines()]


class Begun:
    """What the tests would otherwise wait for.

    Attributes:
        documented: The server of the first tests.
        refused: One with an option that vLLM refuses.
    """

    def __init__(self, model: Path, folder: Path) -> None:
        self.documented = Documented(environment_for(model, folder / "documented"))
        transfer = {
            "kv_connector": "SimpleCPUOffloadConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"copy_engine": "warp"},
        }
        command = [*SERVE, "--kv-transfer-config", json.dumps(transfer)]
        self.refused = Running(environment_for(model, folder / "refused"), command)

    def kill(self) -> None:
        self.documented.kill()
        self.refused.kill()


begin = Begun


@pytest.fixture
def documented(begun: Begun) -> Documented:
    """Ready."""
    begun.documented.wait_for("Ctrl-C stops the server.")
    return begun.documented


@pytest.fixture
def start(environment) -> Iterator:
    running: list[Running] = []

    def start(*arguments: str, **variables: str) -> Running:
        command = [*SERVE, *arguments]
        running.append(Running({**environment, **variables}, command))
        return running[-1]

    yield start
    for each in running:
        each.kill()


def ask(command: str) -> str:
    """What a curl would answer, where there is none, by a reading of its arguments."""
    match shlex.split(command):
        case ["curl", "-s", url]:
            request = urllib.request.Request(url)
        case ["curl", "-s", "-X", method, url]:
            request = urllib.request.Request(url, method=method)
        case ["curl", "-s", url, "-H", header, "-d", body]:
            name, _, value = header.partition(": ")
            request = urllib.request.Request(url, body.encode(), {name: value})
        case words:
            raise AssertionError(f"not a command that this test can read: {words}")
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read().decode()


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=10)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def test_it_answers_what_it_prints(documented):
    assert all(word in documented.output for word in documented.make["says"])
    started = "^Starting on the simulator of HIP 7.15:"
    assert re.search(started, documented.output, re.MULTILINE)
    assert re.search(r"^ +\d+ s  ", documented.output, re.MULTILINE), "progress"
    engine = r"^KV copy engine: rect .*hipMemcpy2DAsync, 1 rectangle"
    assert re.search(engine, documented.output, re.MULTILINE)

    *commands, doctor = documented.printed()
    said = [documented.run(command) for command in commands]
    assert [code for code, _ in said] == [0] * len(commands), said
    completion, chat, metrics, before, asleep, report, awake = [out for _, out in said]
    assert re.search(r"^ *weights +[1-9]", report, re.MULTILINE), "freed by the sleep"
    assert json.loads(completion)["choices"][0]["text"].strip()
    assert json.loads(chat)["choices"][0]["message"]["content"].strip()
    assert re.search(r'^vllm:simple_kv_offload_info\{backend="cpu"', metrics, re.M)
    assert re.search(r"^vllm:external_prefix_cache_queries_total\{", metrics, re.M)

    assert json.loads(before) == {"is_sleeping": False}
    assert json.loads(asleep) == {"status": "sleeping", "level": 1}
    assert json.loads(awake)["status"] == "awake"
    _, again = documented.run(commands[0])
    assert json.loads(again)["choices"] == json.loads(completion)["choices"]

    code, found = documented.run(doctor)
    assert code in (0, 1), "the machine may be without something"
    assert "HIP 7.15" in found and "Graph pool: active" in found


def test_a_newcomers_commands_work_on_it(documented):
    completions = {}
    for entry in documented.entries:
        output = documented.check(entry)
        if "/v1/completions" in entry["line"]:
            completions[entry["line"]] = json.loads(output)["choices"]
    assert completions
    for line, choices in completions.items():  # after the wake
        output = documented.check({"line": line, "says": []})
        assert json.loads(output)["choices"] == choices


def test_ctrl_c_stops_it(documented):
    processes = documented.children()
    assert len(processes) >= 4, "serve, API server, engine and worker"
    documented.press_ctrl_c()
    assert "\nStopping ...\n" in documented.output
    assert documented.output.endswith("\nStopped.\n")
    assert "Traceback" not in documented.output
    assert gone(processes)


def test_a_signal_during_the_start_stops_it_too(start):
    """SIGHUP is what a terminal that is closed leaves behind."""
    servers = {s: start() for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for sign, server in servers.items():
        server.wait_for("Starting on")
        server.wait_for(" s  ")
        processes = server.children()
        assert processes
        assert server.stop(sign) == 0, sign
        assert server.output.endswith("Stopped.\n")
        assert gone(processes)


def test_what_threads_say_at_the_same_time_is_on_lines_of_its_own():
    script = (
        "import threading; from vllm_rocm_memory.serve import say\n"
        "def talk(): [say('word') for _ in range(500)]\n"
        "threads = [threading.Thread(target=talk) for _ in range(4)]\n"
        "[each.start() for each in threads]"
    )
    command = [sys.executable, "-u", "-c", script]
    assert subprocess.check_output(command) == 2000 * b"word\n"


def test_a_reader_that_ends_does_not_block_the_server():
    """As in `make serve | head`: what the server says must still be taken from it."""
    script = (
        "import sys; from vllm_rocm_memory.serve import say\n"
        "for _ in range(300): say('x' * 1000)\n"
        "sys.stderr.write('went on')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b"went on"
    process.stderr.close()
    assert process.wait(30) == 0


def test_a_wrong_copy_engine_is_refused_with_the_allowed_ones(begun):
    server = begun.refused
    assert server.process.wait(READY_SECONDS) == 1
    server.kill()
    assert "kv_connector_extra_config.copy_engine is 'warp'" in server.output
    assert "'auto', 'rect' or 'batch'" in server.output
    assert "ended by itself (exit code 2)" in server.output


def test_an_unknown_profile_is_refused_with_the_allowed_ones(start):
    server = start(HIPSIM_PROFILE="6.0")
    assert server.process.wait(READY_SECONDS) == 1
    server.kill()
    line = server.lines[-1]
    assert line.startswith("serve: ")
    assert "HIPSIM_PROFILE" in line and "6.0" in line
    assert all(profile in line for profile in hipsim.PROFILES)


def plan(environment: dict[str, str], *extra: str) -> serve.Plan:
    return serve.make_plan(environment, extra)


def test_an_option_of_the_user_replaces_ours(environment):
    ours = plan(environment)
    assert "--max-num-seqs=4" in ours.arguments
    assert {"--enable-sleep-mode", "--sleep-mode-offload-cudagraph"} < {*ours.arguments}
    assert "--enforce-eager" not in ours.arguments
    assert ours.environment["HIPSIM_PROFILE"] == "7.16"
    theirs = plan(environment, "--max-num-seqs", "9", "--kv-transfer-config={}")
    assert "--max-num-seqs=4" not in theirs.arguments
    options = [word.partition("=")[0] for word in theirs.arguments]
    assert options.count("--kv-transfer-config") == 1


def test_the_environment_chooses(environment):
    environment |= {"MODEL": "some/model", "HIPSIM_PROFILE": "7.15"}
    chosen = plan({**environment, "VLLM_TARGET_DEVICE": "cpu"})
    assert chosen.command[-len(chosen.arguments) - 1] == "some/model"
    assert not any("served-model-name" in word for word in chosen.arguments)
    assert chosen.environment["HIPSIM_PROFILE"] == "7.15"
    offline = "HF_HUB_OFFLINE"
    assert chosen.environment.get(offline) == environment.get(offline), "hub names"
    assert "VLLM_TARGET_DEVICE" not in chosen.environment, "it hides the simulator"
    assert f"--kv-cache-memory-bytes={1 << 30}" in chosen.arguments, "not the demo's"
    assert f'"cpu_bytes_to_use": {4 << 30}' in " ".join(chosen.arguments)


@pytest.mark.parametrize("value", ["http", "-1", "65536", "99999999999999999999"])
def test_what_is_no_port_is_refused(value):
    with pytest.raises(serve.ServeError, match=f"PORT={value} is no port"):
        serve.find_port(value)


def test_a_port_in_use_is_refused_and_a_free_one_found(environment):
    with socket.socket() as other:
        other.bind((serve.HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(serve.ServeError, match=f"PORT={port} .* in use"):
            plan({**environment, "PORT": str(port)})
        assert plan(environment).port not in (0, port)
    assert serve.find_port(str(port)) == port


@pytest.mark.parametrize("extra", [["--port", "1"], ["--port=1"], ["--host=::"]])
def test_the_address_is_not_an_option(environment, extra):
    with pytest.raises(serve.ServeError, match=f"{extra[0][:6]} cannot be passed on"):
        plan(environment, *extra)


def test_a_model_that_cannot_be_written_is_explained(environment, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(serve.ServeError, match="XDG_CACHE_HOME"):
        plan({**environment, "XDG_CACHE_HOME": str(blocked)})


def test_a_gpu_build_without_a_gpu_is_explained(monkeypatch, environment):
    monkeypatch.setattr(serve, "is_cpu_build", lambda: False)
    with pytest.raises(serve.ServeError, match=r"no GPU can be used.*simulator"):
        plan(environment)


def test_a_gpu_build_on_a_gpu_takes_the_gpu(monkeypatch, environment):
    monkeypatch.setattr(serve, "is_cpu_build", lambda: False)
    monkeypatch.setattr(serve, "_gpu_name", lambda: "a GPU")
    demo = plan(environment)
    assert demo.device == "a GPU"
    assert {"--enable-sleep-mode", "--sleep-mode-offload-cudagraph"} < {*demo.arguments}
    assert demo.environment["VLLM_SERVER_DEV_MODE"] == "1", "for /sleep"
    assert "HIPSIM_PROFILE" not in demo.environment
    assert not any(word.startswith("--dtype") for word in demo.arguments)
    own = plan({**environment, "MODEL": "some/model"})
    assert not any(word.startswith("--kv-cache-memory") for word in own.arguments)


def test_curl_commands_survive_a_shell():
    body = json.dumps({"prompt": 'it\'s "quoted" & $HOME'})
    words = shlex.split(serve.Call(80, "/v1/completions", body).curl())
    assert words[-1] == body
    words = shlex.split(serve.Call(80, "/sleep?level=1&mode=wait", "").curl())
    assert words[2:] == [
        "-X",
        "POST",
        f"http://{serve.HOST}:80/sleep?level=1&mode=wait",
    ]


def test_the_doctor_is_printed_as_a_shell_takes_it(monkeypatch, environment):
    """With the server's environment, and from the folder where it was printed."""
    later = {**environment, "VLLM_TARGET_DEVICE": "cpu"}
    asked = {**later, "HIPSIM_PROFILE": "7.15", "VLLM_NO_USAGE_STATS": "1"}
    chosen = plan(asked, "--served-model-name", "it's me")
    assert Path(chosen.doctor[0]).name == "vllm-rocm-memory"
    echo = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    monkeypatch.setattr(serve, "tool", lambda: [sys.executable, "-c", echo])
    command = ["sh", "-c", chosen.pasted_doctor(asked)]
    said = subprocess.check_output(command, env=later, text=True)
    arguments, variables = json.loads(said)
    assert arguments == ["doctor", chosen.model, *chosen.arguments]
    given_by_shells = {"PWD", "OLDPWD", "SHLVL", "_"}
    assert {
        name: value for name, value in variables.items() if name not in given_by_shells
    } == {
        name: value
        for name, value in chosen.environment.items()
        if name not in given_by_shells
    }


def test_the_tool_is_named_as_short_as_the_folder_allows(monkeypatch, tmp_path):
    script = tmp_path / "bin" / "vllm-rocm-memory"
    monkeypatch.setattr(sys, "executable", str(script.with_name("python")))
    assert serve.tool()[1:] == ["-m", "vllm_rocm_memory.cli"], "no script there"
    script.parent.mkdir()
    script.touch()
    assert serve.tool() == [str(script)]
    monkeypatch.chdir(tmp_path)
    assert serve.tool() == ["bin/vllm-rocm-memory"]


def test_the_cause_of_a_death_is_told_before_the_last_lines(environment, monkeypatch):
    script = (
        "print('(Engine) ERROR RuntimeError: the cause'); print('noise\\n' * 100); "
        "print('RuntimeError: the cause'); print('(API) RuntimeError: so it ended'); "
        "raise SystemExit('the end')"
    )
    dying = serve.Plan("a device", 1, "model", [], environment)
    monkeypatch.setattr(
        serve.Plan, "command", property(lambda _: [sys.executable, "-u", "-c", script])
    )
    server = serve.Server(dying)
    deadline = time.monotonic() + 30
    while server.exit_code() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    text = server.epitaph()
    server.stop()
    summary, causes, last = re.split("\n(?:Errors in all it|It) said.*:\n", text)
    assert summary == "the server ended by itself (exit code 1)."
    assert causes.splitlines() == [
        "RuntimeError: the cause",
        "RuntimeError: so it ended",
    ]
    assert last.endswith(
        "noise\n\nRuntimeError: the cause\n(API) RuntimeError: so it ended\nthe end"
    )
    assert len(last.splitlines()) < 10
