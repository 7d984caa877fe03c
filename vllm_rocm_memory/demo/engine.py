# SPDX-License-Identifier: Apache-2.0
"""What the story asks of the served engine, and what it reads there."""

import http
import http.client
import json
import math
import time
from dataclasses import dataclass
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

from vllm_rocm_memory import report
from vllm_rocm_memory.serve import HOST, Call, Server

_EXIT_SECONDS = 5.0
_METRICS_SECONDS = 3.0
_POLL_SECONDS = 0.1


class DemoError(Exception):
    """Something in the story did not hold; the text says what."""


@dataclass(frozen=True)
class Completion:
    """A greedy answer, and how many tokens its prompt had."""

    text: str
    prompt_tokens: int


@dataclass(frozen=True)
class Memory:
    """The devices' memory at one moment, all ranks together.

    Attributes:
        parts: Bytes by what holds them; they sum to `used`.
        used: Bytes in use on the devices.
        mapped: Bytes of them that a sleep takes.
        asleep: Bytes that a wake would map again.
    """

    parts: dict[str, int]
    used: int
    mapped: int
    asleep: int

    @classmethod
    def of(cls, devices: list[dict[str, Any]]) -> Self:
        parts: dict[str, int] = {}
        for device in devices:
            for name, size in report.shares(device).items():
                parts[name] = parts.get(name, 0) + size
        used = sum(device["used_bytes"] for device in devices)
        mapped = sum(sum(device["tags"].values()) for device in devices)
        asleep = sum(sum(device["asleep"].values()) for device in devices)
        return cls(parts, used, mapped, asleep)


@dataclass(frozen=True)
class Freed:
    """What the last sleep took from the devices, by tag, and how much has a backup."""

    device: dict[str, int]
    backup: int

    @classmethod
    def of(cls, sleeps: list[dict[str, Any]]) -> Self:
        device: dict[str, int] = {}
        backup = 0
        for sleep in sleeps:
            for tag, freed in sleep["freed"].items():
                device[tag] = device.get(tag, 0) + freed["device_bytes"]
                backup += freed["backup_bytes"]
        return cls(device, backup)


class Metrics:
    """One reading of /metrics."""

    def __init__(self, text: str) -> None:
        self._samples = [
            sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]

    def total(self, name: str, **labels: str) -> int:
        """The sum over all samples of that name which have these labels."""
        return int(
            sum(
                sample.value
                for sample in self._samples
                if sample.name == name and labels.items() <= sample.labels.items()
            )
        )

    def labels(self, name: str) -> dict[str, str]:
        """The labels of the one sample of that name.

        Raises:
            DemoError: There is none.
        """
        for sample in self._samples:
            if sample.name == name:
                return dict(sample.labels)
        raise DemoError(f"/metrics has no {name}")


class Engine:
    """The served engine, seen by a client.

    Every method raises `DemoError` where the engine does not answer as it should.
    """

    def __init__(self, server: Server, port: int) -> None:
        self._server = server
        self._port = port

    def _ask(self, path: str, body: str | None = None) -> bytes:
        try:
            status, content = Call(self._port, path, body).response()
        except (OSError, http.client.HTTPException) as error:
            what = f"{path} was not answered ({type(error).__name__}: {error})"
        else:
            if status == http.HTTPStatus.OK:
                return content
            said = content.decode(errors="replace")[:500]
            what = f"{path} was answered with HTTP {status}: {said}"
        raise DemoError("\n".join([what, *self._end()]))

    def _end(self) -> list[str]:
        """How the server ended, where it was its end that left a question open."""
        health = Call(self._port, "/health")
        deadline = time.monotonic() + _EXIT_SECONDS
        while health.answer() is None and time.monotonic() < deadline:
            if self._server.exit_code() is not None:
                return [self._server.epitaph()]
            time.sleep(_POLL_SECONDS)
        return []

    def complete(self, prompt: str, tokens: int) -> Completion:
        model = json.loads(self._ask("/v1/models"))["data"][0]["id"]
        fields = {"model": model, "prompt": prompt, "max_tokens": tokens}
        body = json.dumps({**fields, "temperature": 0})
        answer = json.loads(self._ask("/v1/completions", body))
        prompt_tokens = answer["usage"]["prompt_tokens"]
        return Completion(answer["choices"][0]["text"], prompt_tokens)

    def sleep(self) -> None:
        self._ask("/sleep?level=1", "")

    def wake(self) -> None:
        self._ask("/wake_up", "")

    def _reports(self) -> list[dict[str, Any]]:
        try:
            ranks = report.fetch(f"http://{HOST}:{self._port}").ranks
        except report.ReportError as error:
            raise DemoError("\n".join([str(error), *self._end()])) from None
        for rank in ranks:
            if why := rank.get("unavailable"):
                raise DemoError(f"rank {rank['rank']} has no report: {why}")
        return ranks

    def memory(self) -> Memory:
        return Memory.of([rank["now"]["device"] for rank in self._reports()])

    def freed(self) -> Freed:
        sleeps = [rank["last_sleep"] for rank in self._reports()]
        if None in sleeps:
            raise DemoError("a rank kept no report of its sleep: its log says why")
        return Freed.of(sleeps)

    def metrics(self) -> Metrics:
        return Metrics(self._ask("/metrics").decode())

    def metrics_after(self, name: str, least: int, **labels: str) -> Metrics:
        """The metrics once that one is `least`, or when it has not come in time."""
        deadline = time.monotonic() + _METRICS_SECONDS
        while (metrics := self.metrics()).total(name, **labels) < least:
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        return metrics

    def prompts_to_fill(self, prompt_tokens: int) -> int:
        """How many such prompts the KV cache of all engines cannot hold at once."""
        cache = self.metrics().labels("vllm:cache_config_info")
        tokens = int(cache["num_gpu_blocks"]) * int(cache["block_size"])
        return math.ceil(tokens / prompt_tokens) + 1
