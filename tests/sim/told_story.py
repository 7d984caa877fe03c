# SPDX-License-Identifier: Apache-2.0
"""Runs the demo with the double of `vllm serve` and of the doctor.

python told_story.py
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_rocm_memory import serve
from vllm_rocm_memory.demo import __main__ as demo
from vllm_rocm_memory.demo import engine, story, view

DOUBLE = [sys.executable, str(Path(__file__).with_name("story_server.py"))]


class DoublePlan(serve.Plan):
    @property
    def command(self) -> list[str]:
        return [*DOUBLE, "serve", f"--port={self.port}"]

    @property
    def doctor(self) -> list[str]:
        return [*DOUBLE, "doctor"]


def make_plan(environment: Mapping[str, str], extra: Sequence[str]) -> DoublePlan:
    port = serve.find_port(None)
    return DoublePlan("a double", port, "demo", extra, environment)


if __name__ == "__main__":
    demo.make_plan = make_plan
    engine._METRICS_SECONDS = view._SEEN_SECONDS = 0.2
    # Nothing waits for the end of a server that answers, so this is never seen.
    engine._EXIT_SECONDS = 3600.0
    if os.environ.get("STORY_FAULT") == "slow":
        story._DOCTOR_SECONDS = 1.0
    sys.exit(demo.main())
