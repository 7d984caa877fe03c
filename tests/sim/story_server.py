# SPDX-License-Identifier: Apache-2.0
"""Stands in for `vllm serve` and for the doctor where the demo is to go wrong.

    python story_server.py serve --port=N
    python story_server.py doctor

It answers what the demo asks as vLLM does, but for what the variable STORY_FAULT names:

    answer     the answer after the wake is another
    reload     the answer with blocks from the host is another
    computed   the first prompt's blocks are never loaded
    kept       its blocks never leave the device
    stores     no block goes to the host
    nothing    the sleep frees nothing
    crowded    another process takes more than it frees (which is no fault)
    refused    the sleep is answered with an error
    asleep     the wake leaves some of it asleep
    report     it is a vLLM that makes no report
    unavailable, unkept, version    its content is not what it should be
    dies       the server ends in the sleep
    start      the server ends before it is ready
    hangs      the sleep is never answered
    doctor     the doctor ends with a traceback
    slow       it never ends, nor does its child, whose id it puts into STORY_CHILD
    check      one of its checks has crashed
"""

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MIB = 1 << 20
FAULT = os.environ.get("STORY_FAULT")
AWAKE = {"weights": 4 * MIB, "kv_cache": 64 * MIB, "cudagraph": 2 * MIB}
REST = 20 * MIB
# Of the device, with blocks of 16 tokens; a prompt has 1,000 tokens.
BLOCKS = 256


class Device:
    """What a client can see change."""

    def __init__(self) -> None:
        self.asleep = False
        self.cycles = 0
        self.asked: list[str] = []
        self.loads = 0
        self.hits = 0

    def complete(self, prompt: str) -> str:
        seen = self.asked.count(prompt)
        evicted = len({*self.asked}) > 1
        self.asked.append(prompt)
        if (seen == 2 and not evicted) or FAULT == "kept":
            self.hits += seen
        elif evicted and seen and FAULT != "computed":
            self.loads += 1
        wrong = (FAULT == "answer" and seen == 1) or (FAULT == "reload" and seen == 3)
        return " another" if wrong else " isil st"

    def report(self) -> dict[str, Any]:
        tags = dict(AWAKE)
        if self.asleep and FAULT != "nothing":
            tags = dict.fromkeys(AWAKE, 0)
        asleep = {tag: size - tags[tag] for tag, size in AWAKE.items()}
        if FAULT == "asleep" and self.cycles:
            asleep["weights"] = 1
        freed = {tag: {"device_bytes": asleep[tag], "backup_bytes": 0} for tag in AWAKE}
        freed["weights"]["backup_bytes"] = asleep["weights"]
        rest = 10 * REST if self.asleep and FAULT == "crowded" else REST
        device = {
            "device": 0,
            "total_bytes": 1024 * MIB,
            "used_bytes": sum(tags.values()) + rest,
            "tags": tags,
            "torch_bytes": 0,
            "graph_pool_bytes": 0,
            "other_pools_bytes": 0,
            "rest_bytes": rest,
            "others_bytes": None,
            "others_unknown": "a double",
            "torch_cached_bytes": 0,
            "asleep": asleep,
        }
        last = {"seconds": 0.1, "freed": freed, "torch_cache_freed_bytes": 0}
        version = 2 if FAULT == "version" else 1
        report = {"schema_version": version, "rank": 0, "data_parallel_size": 1}
        if FAULT == "unavailable":
            return {**report, "unavailable": "sleep mode is off: --enable-sleep-mode"}
        kept = self.asleep and FAULT != "unkept"
        now = {"device": device, "host": {}}
        return {**report, "last_sleep": last if kept else None, "now": now}

    def metrics(self) -> str:
        stores = 0 if FAULT == "stores" else len(self.asked)
        info = f'num_gpu_blocks="{BLOCKS}",block_size="16"'
        samples = [
            f"vllm:cache_config_info{{{info}}} 1.0",
            "vllm:num_requests_running 0.0",
            f"vllm:prefix_cache_hits_total {self.hits}",
            f"vllm:simple_kv_offload_load_blocks_total {5 * self.loads}",
        ]
        if FAULT != "report":
            samples.append("vllm:sleep_mode_asleep_bytes 0")
        for direction, count in (("store", stores), ("load", self.loads)):
            labels = f'{{copy_engine="rect",direction="{direction}"}}'
            copied = f"vllm:simple_kv_offload_copied_bytes_total{labels} {count * MIB}"
            copies = f"vllm:simple_kv_offload_copies_total{labels} {count}"
            samples += [copied, copies]
        return "\n".join(samples) + "\n"


class Handler(BaseHTTPRequestHandler):
    device = Device()

    def log_message(self, *_: object) -> None:
        """It would be the server's last line."""

    def _answer(self, content: Any, status: int = 200) -> None:
        body = content if isinstance(content, str) else json.dumps(content)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        answers = {
            "/health": "",
            "/v1/models": {"data": [{"id": "demo"}]},
            "/metrics": self.device.metrics(),
        }
        self._answer(answers[self.path])

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        match self.path:
            case "/v1/completions":
                text = self.device.complete(json.loads(content)["prompt"])
                choices = [{"text": text}]
                self._answer({"choices": choices, "usage": {"prompt_tokens": 1000}})
            case "/sleep?level=1":
                self._sleep()
            case "/wake_up":
                self.device.asleep = False
                self.device.cycles += 1
                self._answer({})
            case "/collective_rpc":
                self._answer({"results": [self.device.report()]})
            case path:
                self._answer(f"no {path}", 404)

    def _sleep(self) -> None:
        if FAULT == "dies":
            print("RuntimeError: the cause", flush=True)
            os._exit(3)
        if FAULT == "refused":
            self._answer("no sleep today", 500)
            return
        if FAULT == "hangs":
            print("falling asleep", flush=True)
            time.sleep(60)
        self.device.asleep = True
        self._answer({})


def serve(port: int) -> None:
    if FAULT == "start":
        sys.exit("ValueError: no such model")
    print("KV copy engine: rect (asked for: auto, by default): a double", flush=True)
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def doctor() -> None:
    if FAULT == "doctor":
        raise RuntimeError("no doctor today")
    if FAULT == "slow":
        wait_for_a_child()
    states = {"base": "success", "memlock": "partial", "graph-pool": "success"}
    if FAULT == "check":
        states["graph-pool"] = "crashed"
    checks = [
        {"name": name, "state": state, "summary": f"the summary of {name} " + 80 * "x"}
        for name, state in states.items()
    ]
    print(json.dumps({"checks": checks}))


def wait_for_a_child() -> None:
    """As the doctor waits for a program in a group of its own."""
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    child = subprocess.Popen(sleep, stdout=subprocess.DEVNULL, start_new_session=True)
    Path(os.environ["STORY_CHILD"]).write_text(str(child.pid))
    try:
        child.wait()
    finally:
        child.kill()
        child.wait()


if __name__ == "__main__":
    if sys.argv[1] == "doctor":
        doctor()
    else:
        (port,) = [word[7:] for word in sys.argv if word.startswith("--port=")]
        serve(int(port))
