# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` on the simulator in processes of its own, and what a client sees of it.

The device has room for a few prompts, so that they evict one another and come back from
the host, which has room for all. Every wait has a bound.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from vllm_rocm_memory import serve

BLOCK = 32
READY_SECONDS = 150.0
ANSWER_SECONDS = 30.0
IDLE_SECONDS = 15.0
# Keys and values of 4 layers, 2 heads, 64 elements, in float32.
BLOCK_BYTES = 2 * 4 * 2 * 64 * 4 * BLOCK
DEVICE_BLOCKS = 16  # one of which is the null block
HOST_BYTES = 1024 * BLOCK_BYTES
EXTENSION = "copy_faults.CopyFaults"

# Weights, a KV cache that is most of what a rank uses, and graphs, on a device so small
# that 1 % of it is less than any of them but the graphs; what nobody cleans is 0xFF.
SLEEPING: dict[str, Any] = {
    "arguments": [
        "--enable-sleep-mode",
        "--sleep-mode-offload-cudagraph",
        f"--kv-cache-memory-bytes={64 << 20}",
    ],
    "graphs": True,
    "extension": "sleep_faults.SleepFaults",
    "variables": {
        "HIPSIM_SWITCHES": "stale_memory=poisoned",
        "HIPSIM_VRAM_BYTES": str(512 << 20),
    },
}

Sample = tuple[str, frozenset[tuple[str, str]]]

# Each takes six of the 15 blocks that the device has: the first has gone when the last
# has been asked.
KNOWN_WORDS = ("amber", "drift", "zinc", "Cedar and")

_BODY = " The keeper counts twice and writes down where each crate went." * 10
_SAMPLE = re.compile(r"(vllm:\w+)\{(.*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ERROR = re.compile(r"\b\w*(Error|Exception|Exit): \S")
_OF_THE_ENGINE = frozenset({("engine", "0"), ("model_name", "demo")})
_COPY_PREFIX = "vllm:simple_kv_offload_"
_WHEN_IDLE = {
    "vllm:num_requests_running": 0,
    "vllm:num_requests_waiting": 0,
    "vllm:kv_cache_usage_perc": 0,
    "vllm:simple_kv_offload_pending_store_blocks": 0,
    # The pool's null block.
    "vllm:simple_kv_offload_used_blocks": 1,
}


@dataclass(frozen=True)
class Answer:
    """What became of a completion.

    Attributes:
        status: Of HTTP.
        tokens: Those of the answer; empty without one.
        cached: How many tokens of the prompt were not computed.
        prompt: How many there are.
        body: The answer whole.
    """

    status: int
    tokens: tuple[str, ...]
    cached: int
    prompt: int
    body: str

    @property
    def ok(self) -> bool:
        return self.status == 200

    @property
    def whole_blocks(self) -> int:
        """Tokens of the prompt that need not be computed again."""
        return (self.prompt - 1) // BLOCK * BLOCK


def prompt(first_words: str) -> str:
    """Some 180 tokens, which are five blocks and a part of one."""
    return first_words + _BODY


_numbers = itertools.count(100)


def fresh_prompts() -> Iterator[str]:
    """Prompts that nobody has asked yet, on whichever server."""
    return (prompt(f"{number} crates:") for number in _numbers)


class ServedEngine:
    """A server that listens on a free port of the loopback device.

    Args:
        model: The demo model.
        log: The file that takes what the server says.
        arguments: More of `vllm serve`.
        ranks: Of tensor parallelism.
        transfer: More of `--kv-transfer-config`.
        graphs: Whether steps are captured, in pieces and whole, and replayed.
        extension: Of the workers.
        variables: More of the environment.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        arguments: Sequence[str] = (),
        ranks: int = 1,
        transfer: dict[str, Any] | None = None,
        graphs: bool = False,
        extension: str = EXTENSION,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.port = serve.find_port(None)
        self.log = log
        transfer = {
            "kv_connector": "SimpleCPUOffloadConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": HOST_BYTES},
            **(transfer or {}),
        }
        extra: dict[str, Any] = transfer["kv_connector_extra_config"]
        # Labels of the metrics.
        self.copy_engines = ("disk",) if "disk_path" in extra else ("rect", "batch")
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
            f"--host={serve.HOST}",
            f"--port={self.port}",
            "--served-model-name=demo",
            "--dtype=float32",
            *([] if graphs else ["--enforce-eager"]),
            "--max-model-len=384",
            "--max-num-seqs=4",
            f"--block-size={BLOCK}",
            f"--kv-cache-memory-bytes={DEVICE_BLOCKS * BLOCK_BYTES // ranks}",
            f"--tensor-parallel-size={ranks}",
            f"--kv-transfer-config={json.dumps(transfer)}",
            f"--worker-extension-cls={extension}",
            "--enable-prompt-tokens-details",
            *arguments,
        ]
        here = os.fspath(Path(__file__).parent)
        inherited = os.environ.get("PYTHONPATH")
        environment = {
            **os.environ,
            "PYTHONPATH": f"{here}{os.pathsep}{inherited}" if inherited else here,
            "HIPSIM_PROFILE": "7.16",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_USE_BREAKABLE_CUDAGRAPH": "1" if graphs else "0",
            **(variables or {}),
        }
        # vLLM asks no platform plugin where this names the CPU.
        environment.pop("VLLM_TARGET_DEVICE", None)
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._family: list[psutil.Process] = []

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        try:
            while not self.is_healthy():
                assert self.process.poll() is None, self.last_words()
                assert time.monotonic() < deadline, self.last_words()
                time.sleep(0.2)
            self.family()
        except BaseException:
            self.kill()
            raise

    def family(self) -> list[psutil.Process]:
        """The server's process and all below it."""
        server = psutil.Process(self.process.pid)
        self._family = [server, *server.children(recursive=True)]
        return self._family

    def kill(self) -> None:
        if self.process.poll() is None:
            self.family()
        for process in self._family:
            if process.is_running():
                process.kill()
        self.process.wait(ANSWER_SECONDS)

    def stop(self, sign: signal.Signals, seconds: float) -> int:
        """The exit code that the server ends with, within that many seconds."""
        self.family()
        self.process.send_signal(sign)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.last_words()) from None

    def left(self) -> list[psutil.Process]:
        """Processes of a server that has ended, which have not."""
        _, alive = psutil.wait_procs(self._family, timeout=5)
        return [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def last_words(self) -> str:
        """The end of what it said, after the errors in all of it."""
        said = self.said()
        errors = dict.fromkeys(filter(_ERROR.search, said.splitlines()))
        return "\n".join([*errors, "...", said[-4000:]])

    def call(
        self, path: str, body: object = None, timeout: float = ANSWER_SECONDS
    ) -> tuple[int, str]:
        """Status and body of a GET, or of a POST where there is a body."""
        request = urllib.request.Request(
            f"http://{serve.HOST}:{self.port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def is_healthy(self) -> bool:
        try:
            return self.call("/health", timeout=5)[0] == 200
        except OSError:
            return False

    def ask(
        self, prompt: str, tokens: int = 4, seconds: float = ANSWER_SECONDS
    ) -> Answer:
        status, body = self.call(
            "/v1/completions",
            {
                "model": "demo",
                "prompt": prompt,
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": 0,
            },
            seconds,
        )
        if status != 200:
            return Answer(status, (), 0, 0, body)
        content = json.loads(body)
        (choice,) = content["choices"]
        usage = content["usage"]
        return Answer(
            status,
            tuple(choice["logprobs"]["tokens"]),
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["prompt_tokens"],
            body,
        )

    def ask_together(
        self, prompts: Sequence[str], tokens: int = 4, arrival_seconds: float = 0.3
    ) -> list[Answer]:
        """The answers of prompts that are scheduled in one step, where they fit.

        Args:
            prompts: Asked by a client each.
            tokens: Of each answer.
            arrival_seconds: How long they may take to the scheduler, which tells nobody
                of them before it goes on.
        """
        with ThreadPoolExecutor(len(prompts)) as pool:
            with self.paused():
                asked = [pool.submit(self.ask, each, tokens) for each in prompts]
                time.sleep(arrival_seconds)
            return [each.result(2 * ANSWER_SECONDS) for each in asked]

    def check_recomputed_then_loaded(self, each: str, right: Answer) -> None:
        """The host does not have the prompt's blocks, and gets them now."""
        for cached in (0, right.whole_blocks):
            self.forget_device()
            again = self.ask(each)
            assert again.ok, again.body
            assert (again.tokens, again.cached) == (right.tokens, cached)

    def forget_device(self) -> None:
        """Evicts all from the device that no request holds."""
        deadline = time.monotonic() + IDLE_SECONDS
        while not json.loads(self.call("/reset_prefix_cache", {})[1])["success"]:
            assert time.monotonic() < deadline, "blocks of the device stay in use"
            time.sleep(0.02)

    def rpc(self, method: str, **arguments: Any) -> list[Any]:
        """What each rank's extension answers."""
        status, body = self.call(
            "/collective_rpc", {"method": method, "kwargs": arguments}
        )
        assert status == 200, body
        return list(json.loads(body)["results"]) if body else []

    def sleep(self, level: int = 1, mode: str = "abort") -> tuple[int, str]:
        """Status and body of the answer."""
        return self.call(f"/sleep?level={level}&mode={mode}", {})

    def wake(self, *tags: str) -> tuple[int, str]:
        """Status and body of the answer; without tags everything wakes."""
        wanted = "&".join(f"tags={tag}" for tag in tags)
        return self.call(f"/wake_up?{wanted}", {})

    def is_sleeping(self) -> bool:
        return bool(json.loads(self.call("/is_sleeping")[1])["is_sleeping"])

    def device_memory(self) -> list[dict[str, Any]]:
        """What each rank's device holds."""
        return self.rpc("device_memory")

    def copy_states(self) -> list[dict[str, Any]]:
        """What each rank has seen of its copies since it last started over."""
        return self.rpc("copy_state")

    def metrics(self) -> dict[Sample, float]:
        """Values at /metrics by name and labels, without those of model and engine."""
        values: dict[Sample, float] = {}
        for line in self.call("/metrics")[1].splitlines():
            if found := _SAMPLE.fullmatch(line):
                name, labels, value = found.groups()
                left = frozenset(_LABEL.findall(labels)) - _OF_THE_ENGINE
                values[name, left] = float(value)
        return values

    def total(self, name: str) -> float:
        """The sum of a metric over all its labels."""
        return sum(value for (each, _), value in self.metrics().items() if each == name)

    def copy_counters(self) -> dict[tuple[str, str], float]:
        """What the counters of copies say, by what they count and direction."""
        counters: Counter[tuple[str, str]] = Counter()
        for (name, labels), value in self.metrics().items():
            if not name.startswith(_COPY_PREFIX) or not name.endswith("_total"):
                continue
            what = name.removeprefix(_COPY_PREFIX).removesuffix("_total")
            for way, engine in itertools.product(("load", "store"), self.copy_engines):
                if labels == {("direction", way), ("copy_engine", engine)}:
                    counters[what, way] += value
        return dict(counters)

    def wait_for_counters(
        self, before: Mapping[tuple[str, str], float]
    ) -> dict[tuple[str, str], float]:
        """By how much each counter of copies has moved, once all copies have ended."""
        self.check_idle()
        now = self.copy_counters()
        assert before.keys() <= now.keys()
        moved = {key: value - before.get(key, 0) for key, value in now.items()}
        return {key: value for key, value in moved.items() if value}

    def check_idle(self) -> None:
        """No request, no copy and no block is left in use."""
        deadline = time.monotonic() + IDLE_SECONDS
        while (left := self._busy()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, f"still in use: {left}\n{self.last_words()}"
        assert self.is_healthy()

    def _busy(self) -> dict[str, float]:
        # What is shown is as of the last step, so there must be one.
        assert self.ask("A", tokens=1).ok
        gauges = {name: value for (name, _), value in self.metrics().items()}
        return {
            name: gauges[name] - idle
            for name, idle in _WHEN_IDLE.items()
            if gauges[name] != idle
        }

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Requests that come within it are scheduled in one step after it."""
        assert self.call("/pause?mode=keep&clear_cache=false", {})[0] == 200
        try:
            yield
        finally:
            assert self.call("/resume", {})[0] == 200


class KnownPrompts:
    """Prompts that are on the host, asked in turn, and what they are answered."""

    def __init__(self, engine: ServedEngine) -> None:
        self.engine = engine
        self.answers = {each: engine.ask(each) for each in map(prompt, KNOWN_WORDS)}
        different = {answer.tokens for answer in self.answers.values()}
        assert len(different) == len(self.answers)
        self._turn = itertools.cycle(self.answers)

    def __iter__(self) -> Iterator[str]:
        return iter(self.answers)

    def __len__(self) -> int:
        return len(self.answers)

    def ask(self) -> tuple[Answer, Answer]:
        """The answer of the next one, which is not on the device, and the right one."""
        each = next(self._turn)
        return self.engine.ask(each), self.answers[each]

    def check(self) -> None:
        """The next one is loaded, and right."""
        answer, right = self.ask()
        assert answer.ok, answer.body
        assert answer.cached == right.whole_blocks
        assert answer.tokens == right.tokens

    def ask_two_in_one_step(self, failing: int) -> list[tuple[Answer, Answer]]:
        """Two answers and the right ones.

        Args:
            failing: Which of the two loads fails, 0 or 1, in the order of their start.
        """
        pair = list(self.answers)[:2]
        for arrival_seconds in (0.3, 1.0, 3.0):
            self.engine.rpc("start_over")
            self.engine.forget_device()
            self.engine.rpc("fail_copies", way="load", skip=failing)
            answers = self.engine.ask_together(pair, arrival_seconds=arrival_seconds)
            (state,) = self.engine.copy_states()
            assert state["failed"] == {"load": 1}
            if state["most loads in a step"] == 2:
                self.engine.forget_device()
                return [(answers[n], self.answers[each]) for n, each in enumerate(pair)]
        raise AssertionError("the requests never came in one step")
