# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine on the simulator: KV blocks go to the host and come back the same."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ENGINE = Path(__file__).with_name("offload_engine.py")
BLOCK = 32
LAYERS = 4
BLIT_BYTES = 16 * 1024  # GPU_FORCE_BLIT_COPY_SIZE
DEVICE_BLOCKS = 40
HOST_BYTES = 64 << 20
SECONDS = 150


@dataclass
class Run:
    """One engine's report, and how many bytes one page of one layer has."""

    profile: str
    ranks: int
    engine: str
    report: dict[str, Any]

    @property
    def page(self) -> int:
        return int(self.report["block bytes"]) // LAYERS

    def tokens(self, phase: str) -> list[list[int]]:
        return [answer["tokens"] for answer in self.report[phase]]

    def logprobs(self, phase: str) -> list[Any]:
        return [answer["logprobs"] for answer in self.report[phase]]

    def states(self, when: str) -> list[dict[str, Any]]:
        ranks = self.report[when]["ranks"]
        assert len(ranks) == self.ranks
        return list(ranks)

    def copied(self, rank: int, engine: str, direction: str) -> tuple[int, int]:
        """Copies and bytes, up to the end."""
        copies, size = self.states("end")[rank]["copies"][f"{engine} {direction}"]
        return copies, size


# A page of one layer is in bfloat16 as large as the largest copy that goes to the blit
# kernel by itself, or half of that.
CASES = (("7.15", "bfloat16", 1, "batch"), ("7.16", "bfloat16", 2, "auto"))


class OffloadEngines:
    """An engine for each case, all at once."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._folder = folder
        self._engines = {case: self._start(model, *case) for case in CASES}

    def _files(self, profile: str) -> tuple[Path, Path]:
        return self._folder / f"{profile}.json", self._folder / f"{profile}.log"

    def _start(
        self, model: Path, profile: str, dtype: str, ranks: int, engine: str
    ) -> subprocess.Popen[bytes]:
        result, log = self._files(profile)
        environment = {
            **os.environ,
            "HIPSIM_PROFILE": profile,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions to the ranks
        }
        with log.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, ENGINE, model, result, dtype, str(ranks), engine],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def report(self, case: tuple[str, str, int, str]) -> dict[str, Any]:
        result, log = self._files(case[0])
        code = self._engines[case].wait(SECONDS)
        assert code == 0, log.read_text(errors="replace")[-6000:]
        report: dict[str, Any] = json.loads(result.read_text())
        return report

    def kill(self) -> None:
        for engine in self._engines.values():
            if engine.poll() is None:
                os.killpg(engine.pid, signal.SIGKILL)
            engine.wait()


begin = OffloadEngines


@pytest.fixture(
    scope="module",
    params=CASES,
    ids=lambda case: f"{case[0]}-{case[1]}-tp{case[2]}-{case[3]}",
)
def run(request, begun) -> Run:
    profile, _, ranks, engine = request.param
    return Run(profile, ranks, engine, begun.report(request.param))


def test_the_answers_tell_the_prompts_apart(run):
    assert len(set(map(tuple, run.tokens("on device")))) == len(run.report["on device"])
    assert run.tokens("computed") == run.tokens("on device")


def test_blocks_that_come_back_give_the_same_answers(run):
    for on_device, loaded in zip(
        run.report["on device"], run.report["loaded"], strict=True
    ):
        # The same part of the prompt was not computed, so both took the same steps.
        whole_blocks = (on_device["prompt"] - 1) // BLOCK * BLOCK
        assert on_device["cached"] == loaded["cached"] == whole_blocks
    assert run.tokens("loaded") == run.tokens("on device")
    assert run.logprobs("loaded") == run.logprobs("on device")


def test_the_blocks_did_come_from_the_host(run):
    before, after = run.report["before loads"], run.report["after loads"]
    tokens = sum(answer["cached"] for answer in run.report["loaded"])
    name = "vllm:external_prefix_cache_hits"
    assert after["hits"][name] - before["hits"].get(name, 0) == tokens
    on_device = "vllm:prefix_cache_hits"
    assert after["hits"][on_device] == before["hits"][on_device]
    for rank in range(run.ranks):
        then, now = (
            sum(
                size
                for key, (_, size) in run.states(when)[rank]["copies"].items()
                if key.endswith("h2d")
            )
            for when in ("before loads", "after loads")
        )
        assert then == 0
        assert now == tokens // BLOCK * run.report["block bytes"]


def test_corrupted_blocks_change_the_answers(run):
    """The control: answers do depend on the bytes that come back."""
    pairs = zip(run.tokens("corrupted"), run.tokens("on device"), strict=True)
    assert all(corrupted != good for corrupted, good in pairs)
    assert [answer["cached"] for answer in run.report["corrupted"]] == [
        answer["cached"] for answer in run.report["loaded"]
    ]


def test_the_cache_alone_is_device_memory_and_the_host_tier_is_registered(run):
    for state in run.states("start"):
        assert state["profile"] == run.profile
        assert state["device bytes"] == DEVICE_BLOCKS * run.report["block bytes"]
        assert state["registered bytes"] == HOST_BYTES // run.ranks
    for state in run.states("end"):
        assert (state["staged"], state["faults"]) == (0, 0)
        assert (state["batches"] > 0) == (run.engine == "batch")


def test_the_copy_engine_and_the_release_decide_what_copies(run):
    for rank in range(run.ranks):
        for direction in ("h2d", "d2h"):
            sdma, sdma_bytes = run.copied(rank, "sdma", direction)
            blit, blit_bytes = run.copied(rank, "blit", direction)
            if run.engine == "auto":
                # A rectangle for each block, whatever the release and the page.
                assert sdma > 0 and sdma_bytes == sdma * run.report["block bytes"]
            else:
                # Pages of adjacent blocks are joined, and are too large for a kernel.
                assert run.page <= BLIT_BYTES
                assert blit > 0 and blit_bytes == blit * run.page
                assert sdma > 0 and sdma_bytes >= 2 * sdma * run.page
            assert blit == 0 or (run.engine, run.profile) == ("batch", "7.15")
        for engine, direction in (("host", "h2d"), ("host", "d2h"), ("blit", "d2d")):
            assert run.copied(rank, engine, direction) == (0, 0)
        copies = sum(run.copied(rank, "sdma", way)[0] for way in ("h2d", "d2h"))
        packets = run.states("end")[rank]["packets"]
        assert packets == (copies if run.engine == "auto" else 0)
