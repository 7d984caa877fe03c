# SPDX-License-Identifier: Apache-2.0
"""The story, step by step. What a step claims, it has checked."""

import collections
import json
import signal
import subprocess
import threading
from typing import Any

from vllm_rocm_memory.demo.engine import Completion, DemoError, Engine, Memory, Metrics
from vllm_rocm_memory.demo.view import Step, View, findings, readable
from vllm_rocm_memory.doctor.machine import RUNTIME_TIMEOUT_S, SERVING_TIMEOUT_S
from vllm_rocm_memory.serve import Plan, Server, wait_until_ready

# Longer than its own limits, after which it tells what was slow.
_DOCTOR_SECONDS = RUNTIME_TIMEOUT_S + SERVING_TIMEOUT_S + 30
_DOCTOR_END_SECONDS = 10
_TOKENS = 16
_SENTENCE = " The keeper counts twice and writes down where each crate went."
_PROMPT = "The harbour wakes before the town does." + 40 * _SENTENCE
_COPIES = "vllm:simple_kv_offload_copies_total"
_COPIED = "vllm:simple_kv_offload_copied_bytes_total"
_LOADED = "vllm:simple_kv_offload_load_blocks_total"
_HITS = "vllm:prefix_cache_hits_total"


class Story:
    """Tells it on a server that was just started.

    Args:
        plan: What was started.
        server: It runs.
        view: Shows the steps.
    """

    def __init__(self, plan: Plan, server: Server, view: View) -> None:
        self._plan = plan
        self._server = server
        self._view = view
        self._engine = Engine(server, plan.port)

    def tell(self) -> None:
        """From a server that starts to the doctor.

        Raises:
            DemoError: Something did not hold.
            ServeError: The server did not start.
        """
        with self._view.step("Start vllm serve") as step:
            wait_until_ready(self._server, self._plan.port, threading.Event())
            step.say_start_of(self._server.copy_engine())
        with self._view.step("Complete a prompt") as step:
            first = self._engine.complete(_PROMPT, _TOKENS)
            step.say(f"{first.prompt_tokens} tokens -> {json.dumps(first.text)}")
        with self._view.step("Report what holds memory while it is awake") as step:
            awake = self._engine.memory()
            self._view.measured(awake)
            step.say(f"{readable(awake.used)} of device memory are in use")
        with self._view.step("Sleep: POST /sleep?level=1") as step:
            self._sleep(step, awake)
        with self._view.step("Report what holds memory while it sleeps") as step:
            step.show(self._view.bars())
        with self._view.step("Wake: POST /wake_up") as step:
            self._wake(step)
        with self._view.step("Complete the same prompt") as step:
            again = self._engine.complete(_PROMPT, _TOKENS)
            self._expect(again, first, "after the wake")
            step.say("the same answer as before the sleep")
        self._offload_and_reload()
        with self._view.step("Doctor: vllm-rocm-memory doctor") as step:
            checks = examine(self._plan)
            step.show(findings(checks, self._view.unicode))
            states = collections.Counter(check["state"] for check in checks)
            step.say(", ".join(f"{n} {state}" for state, n in states.items()))

    @staticmethod
    def _expect(answer: Completion, right: Completion, when: str) -> None:
        if answer.text != right.text:
            raise DemoError(
                f"the answer {when} is {json.dumps(answer.text)}, and was "
                f"{json.dumps(right.text)}"
            )

    def _sleep(self, step: Step, before: Memory) -> None:
        self._engine.sleep()
        memory, freed = self._engine.memory(), self._engine.freed()
        self._view.measured(memory)
        # Not by what is in use: another process may have taken what the sleep freed.
        if memory.mapped >= before.mapped or not any(freed.device.values()):
            raise DemoError(
                f"the sleep freed nothing: {before.mapped} bytes that it takes were on "
                f"the device before it, and {memory.mapped} are after it"
            )
        tags = ", ".join(f"{tag} {readable(n)}" for tag, n in freed.device.items() if n)
        total = readable(sum(freed.device.values()))
        step.say(f"freed {total}: {tags}")
        step.say(f"kept on the host for the wake: {readable(freed.backup)}")

    def _wake(self, step: Step) -> None:
        self._engine.wake()
        memory = self._engine.memory()
        self._view.measured(memory)
        if memory.asleep:
            raise DemoError(f"{memory.asleep} bytes are still asleep after the wake")
        step.say(f"{readable(memory.used)} of device memory are in use again")

    def _offload_and_reload(self) -> None:
        with self._view.step("Offload: other prompts take its place") as step:
            on_device = self._engine.complete(_PROMPT, _TOKENS)
            before = self._engine.metrics()
            asked = self._evict()
            stored = self._engine.metrics()
            if not (what := _copies(before, stored, "store")):
                raise DemoError(f"{asked} prompts were asked, and no block was stored")
            step.say(f"{asked} others fill the KV cache; to the host: {what}")
        with self._view.step("Reload: ask the first prompt again") as step:
            answer = self._engine.complete(_PROMPT, _TOKENS)
            loaded = self._engine.metrics_after(_LOADED, stored.total(_LOADED) + 1)
            blocks = loaded.total(_LOADED) - stored.total(_LOADED)
            if not blocks or loaded.total(_HITS) != stored.total(_HITS):
                raise DemoError(
                    f"the prompt's blocks were to come from the host: {blocks} did, "
                    f"and {loaded.total(_HITS) - stored.total(_HITS)} of its tokens "
                    "were still on the device"
                )
            what = _copies(stored, loaded, "load")
            step.say(f"{blocks} of its blocks came from the host: {what}")
            self._expect(answer, on_device, "with blocks from the host")
            step.say("the same answer as with its blocks on the device")

    def _evict(self) -> int:
        """Asks prompts that need the whole KV cache, and says how many."""
        body = 100 * _SENTENCE
        first = self._engine.complete(f"crate 0:{body}", 1)
        count = self._engine.prompts_to_fill(first.prompt_tokens)
        for number in range(1, count):
            self._engine.complete(f"crate {number}:{body}", 1)
        return count


def _copies(before: Metrics, after: Metrics, direction: str) -> str:
    """What was copied meanwhile; empty where nothing was."""

    def made(name: str, engine: str) -> int:
        labels = {"direction": direction, "copy_engine": engine}
        return after.total(name, **labels) - before.total(name, **labels)

    parts = [
        f"{readable(made(_COPIED, engine))}, copies by {engine}: {copies}"
        for engine in ("rect", "batch", "disk")
        if (copies := made(_COPIES, engine))
    ]
    return "; ".join(parts)


def examine(plan: Plan) -> list[dict[str, Any]]:
    """What the doctor says of this machine and the server's own arguments.

    Raises:
        DemoError: It did not answer, or one of its checks crashed.
    """
    code, output, errors = _ask_doctor(plan)
    try:
        checks: list[dict[str, Any]] = json.loads(output)["checks"]
    except (ValueError, KeyError):
        said = "\n".join(errors.splitlines()[-5:])
        raise DemoError(f"doctor ended with exit code {code}: {said}") from None
    crashed = [check for check in checks if check["state"] == "crashed"]
    if crashed:
        raise DemoError(
            "\n".join(f"doctor: {each['name']}: {each['summary']}" for each in crashed)
        )
    return checks


def _ask_doctor(plan: Plan) -> tuple[int, str, str]:
    """Its exit code, what it said, and its errors."""
    with subprocess.Popen(
        [*plan.doctor, "--json"],
        env=plan.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        try:
            output, errors = process.communicate(timeout=_DOCTOR_SECONDS)
        except subprocess.TimeoutExpired:
            raise DemoError(
                f"doctor has not ended in {_DOCTOR_SECONDS:.0f} s"
            ) from None
        finally:
            _end(process)
        return process.returncode, output, errors


def _end(doctor: "subprocess.Popen[str]") -> None:
    """Ends it as Ctrl-C does, so that it ends its own children."""
    if doctor.poll() is None:
        doctor.send_signal(signal.SIGINT)
        try:
            doctor.communicate(timeout=_DOCTOR_END_SECONDS)
        except subprocess.TimeoutExpired:
            doctor.kill()
