# SPDX-License-Identifier: Apache-2.0
"""`vllm-rocm-memory report` tells what a server's ranks hold, or why it cannot."""

import argparse
import copy
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from vllm.device_allocator.sleep_report import (
    DeviceMemory,
    FreedMemory,
    HostMemory,
    SleepReport,
)

from vllm_rocm_memory import report

from .served_engine import SLEEPING, ServedEngine
from .test_sleep import good, sleep_1

SERVER = SLEEPING
MIB = 1 << 20
METRICS = 'vllm:sleep_mode_asleep_bytes{engine="0",rank="0"} 0.0\n'
DEVICE: dict[str, Any] = {
    "device": 3,
    "total_bytes": 512 * MIB,
    "used_bytes": 100 * MIB,
    "tags": {"cudagraph": 7 * MIB},
    "torch_bytes": 40 * MIB,
    "graph_pool_bytes": 0,
    "other_pools_bytes": 3 * MIB,
    "rest_bytes": 20 * MIB,
    "others_bytes": 30 * MIB,
    "others_unknown": None,
    "torch_cached_bytes": 11 * MIB,
    "asleep": {"weights": 64 * MIB, "kv_cache": 128 * MIB},
}
HOST = {
    "held_bytes": 70 * MIB,
    "backup_bytes": 64 * MIB,
    "spare_bytes": 6 * MIB,
    "registered_bytes": 69 * MIB,
    "huge_page_bytes": 68 * MIB,
}
AWAKE = {
    **DEVICE,
    "used_bytes": 293 * MIB,
    "tags": {"weights": 64 * MIB, "kv_cache": 128 * MIB, "cudagraph": 7 * MIB},
    "torch_bytes": 41 * MIB,
    "asleep": {},
}
RANK: dict[str, Any] = {
    "schema_version": 1,
    "rank": 0,
    "data_parallel_rank": 0,
    "data_parallel_size": 1,
    "hostname": "node[1]",
    "sleeps": 3,
    "last_sleep": {
        "started_at": 1800000000.5,
        "seconds": 1.25,
        "freed": {
            "weights": {"device_bytes": 64 * MIB, "backup_bytes": 64 * MIB},
            "kv_cache": {"device_bytes": 128 * MIB, "backup_bytes": 0},
        },
        "torch_cache_freed_bytes": 5 * MIB,
        "held": DEVICE,
        "host": HOST,
    },
    "now": {"device": AWAKE, "host": HOST},
}


@dataclass
class Stub:
    """A server that answers what it is told to.

    Attributes:
        answers: Status and body by method and path.
        requests: What it was asked: method, path, body and key.
    """

    answers: dict[str, tuple[int, str]] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def tell(self, *ranks: dict[str, Any], prefix: str = "") -> None:
        """Be a vLLM with the series whose ranks answer this."""
        self.answers[f"GET {prefix}/metrics"] = (200, METRICS)
        body = json.dumps({"results": ranks})
        self.answers[f"POST {prefix}/collective_rpc"] = (200, body)


@pytest.fixture
def stub() -> Iterator[Stub]:
    stub = Stub()
    with serving(stub):
        yield stub


class serving:
    """A stub that is served, until the end of the block."""

    def __init__(self, stub: Stub, encrypted_by: ssl.SSLContext | None = None) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = f"{self.command} {self.path}"
                sent = self.rfile.read(int(self.headers["Content-Length"] or 0))
                key = self.headers["Authorization"]
                stub.requests.append((asked, sent.decode(), key))
                status, body = stub.answers.get(asked, (404, "Not Found"))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        stub.port = self.server.server_port
        if encrypted_by is not None:
            self.server.socket = encrypted_by.wrap_socket(
                self.server.socket, server_side=True
            )
        # How often it looks whether it is to end, in seconds.
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    return report.run(parser.parse_args(arguments))


def rows(text: str) -> dict[str, list[str]]:
    """Figures of a printed table by their label."""
    split = [line.split("  ") for line in text.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in split]
    return {line[0]: line[1:] for line in cells if len(line) > 1}


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said by a report that is none."""
    assert run(*arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("vllm-rocm-memory report: error: ")
    assert said.err.count("\n") == 1
    return said.err


# ---- what is told ----


def test_parts_are_told_by_what_holds_them(stub, capsys):
    stub.tell(RANK)
    assert run(f"--url={stub.url}") == 0
    text = capsys.readouterr().out
    (begun,) = re.findall(
        r"rank 0 on node\[1\], device 3: sleep 3 took 1\.25 s, at (.*)\n", text
    )
    assert datetime.fromisoformat(begun).timestamp() == 1800000000
    told = rows(text)
    assert told == {
        "MiB": ["freed", "backed up", "held then", "held now"],
        "weights": ["64.0", "64.0", "0.0", "64.0"],
        "kv_cache": ["128.0", "0.0", "0.0", "128.0"],
        "cudagraph": ["7.0", "7.0"],
        "PyTorch's default pool": ["5.0", "40.0", "41.0"],
        "PyTorch's other pools": ["3.0", "3.0"],
        "rest of the process": ["20.0", "20.0"],
        "others and the driver": ["30.0", "30.0"],
        "used, of 512.0": ["100.0", "293.0"],
        "cached in the default pool": ["11.0", "11.0"],
        "asleep: weights": ["64.0", "0.0"],
        "asleep: kv_cache": ["128.0", "0.0"],
        "held": ["70.0", "70.0"],
        "backups": ["64.0", "64.0"],
        "spare, for the next sleep": ["6.0", "6.0"],
        "registered, of all": ["69.0", "69.0"],
        "in huge pages, of all": ["68.0", "68.0"],
    }
    assert list(told)[1:5] == [
        "weights",
        "kv_cache",
        "cudagraph",
        "PyTorch's default pool",
    ]
    assert max(map(len, text.splitlines())) <= 80
    assert "data-parallel" not in text


def test_without_a_sleep_there_is_what_is_held_now(stub, capsys):
    stub.tell({**RANK, "sleeps": 0, "last_sleep": None})
    assert run(f"--url={stub.url}") == 0
    text = capsys.readouterr().out
    assert "device 3: it has not slept yet" in text
    told = rows(text)
    assert told["weights"] == ["64.0"]
    assert told["used, of 512.0"] == ["293.0"]
    assert told["held"] == ["70.0"]


def test_a_last_sleep_without_an_account_is_told_of(stub, capsys):
    stub.tell({**RANK, "last_sleep": None})
    assert run(f"--url={stub.url}") == 0
    text = capsys.readouterr().out
    assert "device 3: it has no account of its last sleep" in text
    assert rows(text)["weights"] == ["64.0"]


@pytest.mark.parametrize("others", [30 * MIB, None])
def test_the_log_calls_all_as_the_report_does(stub, capsys, others):
    device = {**DEVICE, "graph_pool_bytes": MIB, "others_bytes": others}
    last = {**RANK["last_sleep"], "held": device}
    stub.tell({**RANK, "last_sleep": last, "now": {"device": device, "host": HOST}})
    assert run(f"--url={stub.url}") == 0
    told = {*rows(capsys.readouterr().out)} - {"MiB", "held", "used, of 512.0"}
    of_classes = {
        "freed": {tag: FreedMemory(**each) for tag, each in last["freed"].items()},
        "held": DeviceMemory(**device),
        "host": HostMemory(**HOST),
    }
    logged = SleepReport(**{**last, **of_classes}).table()
    names = {*re.findall(r"^ {4}(\S.*?) +[\d.,]+ \w*B\b", logged, re.MULTILINE)}
    assert names == told | {"PyTorch's cache"}


def test_others_that_are_not_told_apart_are_with_the_rest_and_the_reason_is_told(
    stub, capsys
):
    rank = copy.deepcopy(RANK)
    for device in (rank["last_sleep"]["held"], rank["now"]["device"]):
        device["rest_bytes"] += device["others_bytes"]
        device |= {"others_bytes": None, "others_unknown": "it is a container"}
    stub.tell(rank)
    assert run(f"--url={stub.url}") == 0
    text = capsys.readouterr().out
    assert rows(text)["rest of the process, others"] == ["50.0", "50.0"]
    assert "others and the driver" not in text
    assert "not told apart: it is a container" in text


def test_a_rank_without_an_account_says_why_and_the_others_tell_theirs(stub, capsys):
    identity = {key: RANK[key] for key in list(RANK)[:5]}
    stub.tell({**identity, "unavailable": "no cuMem; add it"}, {**RANK, "rank": 1})
    assert run(f"--url={stub.url}") == 0
    text = capsys.readouterr().out
    assert "rank 0 on node[1]: no cuMem; add it" in text
    assert "rank 1 on node[1], device 3" in text


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_where_no_rank_has_an_account_there_is_no_report(stub, capsys, more):
    identity = {key: RANK[key] for key in list(RANK)[:5]}
    stub.tell(*({**identity, "rank": n, "unavailable": "no cuMem"} for n in range(2)))
    assert run(f"--url={stub.url}", *more) == 2
    said = capsys.readouterr()
    assert said.out.count("no cuMem") == 2 and not said.err


def test_a_worker_that_does_not_know_who_it_is_says_why(stub, capsys):
    nobody = dict.fromkeys(list(RANK)[1:5])
    nobody["schema_version"] = 1
    stub.tell({**nobody, "unavailable": "no rank"}, {**RANK, **nobody})
    assert run(f"--url={stub.url}") == 0
    text = capsys.readouterr().out
    assert "no rank\n" in text and rows(text)["held"] == ["70.0", "70.0"]


@pytest.mark.parametrize("sign", ["\x1b]0;owned\x07", "\x9b31m", "\r", "\u202e"])
def test_a_terminal_obeys_nothing_that_a_server_tells(stub, capsys, sign):
    device = {
        **{**DEVICE, "tags": {f"t{sign}": MIB}, "device": sign},
        "others_unknown": sign,
    }
    mine = {"last_sleep": None, "now": {"device": device, "host": HOST}}
    stub.tell(
        {**RANK, "hostname": f"h{sign}", **mine},
        {**RANK, "unavailable": f"u{sign}"},
    )
    assert run(f"--url={stub.url}") == 0
    assert sign not in capsys.readouterr().out
    stub.tell({**RANK, "schema_version": sign})
    assert sign not in refusal(capsys, f"--url={stub.url}")
    stub.answers["POST /collective_rpc"] = (500, f"died: {sign}!")
    assert sign not in refusal(capsys, f"--url={stub.url}")


@pytest.mark.parametrize(("engines", "rank", "size"), [(2, 0, 1), (1, 3, 1), (1, 0, 2)])
def test_one_of_several_engines_is_said_to_be_that(stub, capsys, engines, rank, size):
    stub.tell({**RANK, "data_parallel_rank": rank, "data_parallel_size": size})
    more = "".join(f'vllm:x{{engine="{index}"}} 0.0\n' for index in range(engines))
    stub.answers["GET /metrics"] = (200, METRICS + more)
    assert run(f"--url={stub.url}") == 0
    assert "the ranks of one data-parallel engine" in capsys.readouterr().out


def test_json_is_what_the_ranks_answer(stub, capsys):
    stub.tell(RANK, {**RANK, "rank": 1})
    assert run(f"--url={stub.url}", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "url": stub.url,
        "engines": 1,
        "results": [RANK, {**RANK, "rank": 1}],
    }


def test_a_prefix_of_the_path_is_kept(stub, capsys):
    stub.tell(RANK, prefix="/gpu/7")
    for url in (f"{stub.url}/gpu/7", f"{stub.url}/gpu/7/"):
        assert run(f"--url={url}") == 0
    assert "rank 0" in capsys.readouterr().out


@pytest.mark.parametrize(("key", "sent"), [("k", "Bearer k"), ("", None)])
def test_the_key_of_the_environment_is_sent(stub, monkeypatch, key, sent):
    monkeypatch.setenv("VLLM_API_KEY", key)
    stub.tell(RANK)
    assert run(f"--url={stub.url}") == 0
    assert stub.requests == [
        ("GET /metrics", "", sent),
        ("POST /collective_rpc", '{"method": "sleep_report"}', sent),
    ]


def test_the_command_needs_no_vllm(stub):
    stub.tell(RANK)
    code = f"""
import sys
sys.modules["vllm"] = None
from vllm_rocm_memory import cli
cli.main(["report", "--url={stub.url}"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "rank 0 on node[1]" in done.stdout


def test_a_reader_who_has_seen_enough_is_no_error(stub):
    stub.tell(*({**RANK, "rank": rank} for rank in range(8)))
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "vllm_rocm_memory.cli", "report"]
    done = subprocess.run(
        [*command, f"--url={stub.url}"], stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


# ---- what is refused ----


def test_a_vllm_without_the_series_is_asked_nothing(stub, capsys):
    """A method that several ranks lack would break their next collective call."""
    stub.tell(RANK)
    metrics = 'vllm:num_requests_running{engine="0"} 0.0\n'
    stub.answers["GET /metrics"] = (200, metrics)
    said = refusal(capsys, f"--url={stub.url}")
    assert "has no vllm:sleep_mode_asleep_bytes" in said
    assert "vllm-rocm-memory apply" in said
    assert "VLLM_USE_RUST_FRONTEND=1" in said
    assert "--enable-sleep-mode" in said
    assert "--disable-log-stats" not in said
    assert [asked for asked, *_ in stub.requests] == ["GET /metrics"]


@pytest.mark.parametrize(
    "metrics",
    ["", 'vllm:sleep_mode_operation_duration_seconds_count{operation="sleep"} 1.0\n'],
)
def test_a_server_without_statistics_is_asked_nothing(stub, capsys, metrics):
    stub.tell(RANK)
    stub.answers["GET /metrics"] = (200, metrics)
    said = refusal(capsys, f"--url={stub.url}")
    assert "--disable-log-stats" in said
    assert "apply" not in said and "--enable-sleep-mode" not in said
    assert [asked for asked, *_ in stub.requests] == ["GET /metrics"]


def test_metrics_without_values_are_of_a_server_that_can_be_asked(stub, capsys):
    stub.tell(RANK)
    metrics = "# TYPE vllm:sleep_mode_asleep_bytes gauge\n"
    stub.answers["GET /metrics"] = (200, metrics)
    assert run(f"--url={stub.url}") == 0


def test_a_worker_without_the_series_is_told_of(stub, capsys):
    stub.tell(RANK)
    body = "Call failed: Method 'sleep_report' is not implemented."
    stub.answers["POST /collective_rpc"] = (500, body)
    said = refusal(capsys, f"--url={stub.url}")
    assert "no sleep_report" in said and "vllm-rocm-memory apply" in said


def test_a_server_that_is_not_in_development_mode_is_told_of(stub, capsys):
    stub.tell(RANK)
    del stub.answers["POST /collective_rpc"]
    said = refusal(capsys, f"--url={stub.url}")
    assert "/collective_rpc answers 404" in said
    assert "VLLM_SERVER_DEV_MODE=1" in said


def test_a_server_that_is_no_vllm_is_told_of(stub, capsys):
    said = refusal(capsys, f"--url={stub.url}/v2/")
    assert f"{stub.url}/v2/metrics answers 404" in said and "prefix" in said


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize(("key", "what"), [("wrong", "does not hold"), ("", "has to")])
def test_a_key_that_is_missing_or_wrong_is_told_of(
    stub, capsys, monkeypatch, status, key, what
):
    monkeypatch.setenv("VLLM_API_KEY", key)
    stub.answers["GET /metrics"] = (status, "")
    said = refusal(capsys, f"--url={stub.url}")
    assert f"VLLM_API_KEY {what}" in said


def test_any_other_answer_is_quoted(stub, capsys):
    stub.tell(RANK)
    stub.answers["POST /collective_rpc"] = (500, "Engine\ndied" + "." * 1000)
    said = refusal(capsys, f"--url={stub.url}")
    assert "answers 500: Engine died..." in said
    assert len(said) < 500


@pytest.mark.parametrize(
    "body",
    ["<html>", "[]", "{}", '{"results": 1}', '{"results": []}', '{"results": [null]}'],
)
def test_an_answer_that_is_no_report_is_quoted(stub, capsys, body):
    stub.tell(RANK)
    stub.answers["POST /collective_rpc"] = (200, body)
    said = refusal(capsys, f"--url={stub.url}")
    assert f"no report: {body}" in said


@pytest.mark.parametrize(
    "rank",
    [
        {"schema_version": 1},
        {**RANK, "now": None},
        {**RANK, "now": {"device": {**DEVICE, "tags": 7}, "host": HOST}},
        {**RANK, "now": {"device": {**DEVICE, "used_bytes": "x"}, "host": HOST}},
        {**RANK, "last_sleep": {**RANK["last_sleep"], "started_at": 1e300}},
        {**RANK, "last_sleep": {**RANK["last_sleep"], "seconds": "x"}},
        {**RANK, "data_parallel_rank": "x"},
    ],
)
def test_a_rank_that_tells_something_else_is_no_report(stub, capsys, rank):
    stub.tell(RANK, rank)
    said = refusal(capsys, f"--url={stub.url}")
    assert "/collective_rpc answers something that is no report: " in said


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_report_of_another_schema_is_not_read(stub, capsys, more):
    stub.tell({**RANK, "schema_version": 2})
    said = refusal(capsys, f"--url={stub.url}", *more)
    assert "schema version 2" in said and "reads version 1" in said


def test_a_server_that_is_not_there_is_told_of(capsys):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        said = refusal(capsys, f"--url={url}")
    assert f"no answer from --url {url}" in said and "Connection refused" in said


def test_a_server_that_does_not_answer_is_told_of(capsys, monkeypatch):
    monkeypatch.setattr(report, "_ANSWER_SECONDS", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        said = refusal(capsys, f"--url=http://127.0.0.1:{silent.getsockname()[1]}")
    assert "has not answered within 0.1 s" in said


def test_a_server_that_speaks_another_protocol_is_told_of(capsys):
    def greet(listener: socket.socket) -> None:
        client, _ = listener.accept()
        with client:
            client.recv(4096)
            client.sendall(b"220 mail\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        greeter = threading.Thread(target=greet, args=(listener,))
        greeter.start()
        said = refusal(capsys, f"--url=http://127.0.0.1:{listener.getsockname()[1]}")
        greeter.join()
    assert "no answer from" in said and "220 mail" in said


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("localhost:8000", "give http://HOST:PORT"),
        ("ftp://localhost", "give http://HOST:PORT"),
        ("http://", "give http://HOST:PORT"),
        ("http://localhost:http", "give http://HOST:PORT"),
        ("http://localhost:99999", "give http://HOST:PORT"),
        ("http://user:secret@localhost", "VLLM_API_KEY"),
        ("http://localhost?key=secret", "VLLM_API_KEY"),
    ],
)
def test_a_url_that_is_no_servers_is_refused(capsys, url, why):
    said = refusal(capsys, f"--url={url}")
    assert f"--url {url}" in said and why in said


# ---- encrypted ----


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A key and a certificate of the loopback address, signed by itself."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("certificate")
    key, signed = folder / "key.pem", folder / "signed.pem"
    request = "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=stub"
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [openssl, *request.split(), *names, "-keyout", key, "-out", signed],
        check=True,
        capture_output=True,
    )
    return key, signed


def test_https_is_spoken_with_a_server_whose_certificate_is_trusted(
    certificate, capsys, monkeypatch
):
    key, signed = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(signed, key)
    stub = Stub()
    stub.tell(RANK)
    with serving(stub, encrypted_by=context):
        url = f"--url=https://127.0.0.1:{stub.port}"
        assert "certificate verify failed" in refusal(capsys, url)
        monkeypatch.setenv("SSL_CERT_FILE", str(signed))
        assert run(url) == 0
    assert "rank 0" in capsys.readouterr().out


# ---- a served engine ----


def reported(engine: ServedEngine, capsys: pytest.CaptureFixture[str]) -> Any:
    assert run(f"--url=http://127.0.0.1:{engine.port}", "--json") == 0
    return json.loads(capsys.readouterr().out)["results"]


def test_a_served_engine_reports_before_a_sleep_in_it_and_after(engine, capsys):
    url = f"--url=http://127.0.0.1:{engine.port}"
    (before,) = reported(engine, capsys)
    begun = time.time()
    good(engine.sleep(1))
    (asleep,) = reported(engine, capsys)
    assert asleep["sleeps"] == before["sleeps"] + 1
    assert begun <= asleep["last_sleep"]["started_at"] <= time.time()
    assert run(url) == 0
    told = rows(capsys.readouterr().out)
    last = asleep["last_sleep"]
    assert set(last["freed"]) == {"weights", "kv_cache", "cudagraph"}
    for tag, freed in last["freed"].items():
        assert told[tag][:2] == [
            f"{freed[key] / MIB:,.1f}" for key in ("device_bytes", "backup_bytes")
        ]
        assert freed["device_bytes"] == before["now"]["device"]["tags"][tag]
    (memory,) = engine.device_memory()
    assert asleep["now"]["device"]["asleep"] == memory["asleep"]
    good(engine.wake())
    (awake,) = reported(engine, capsys)
    assert awake["last_sleep"] == last
    assert awake["now"]["device"]["tags"] == before["now"]["device"]["tags"]
    assert run(url) == 0
    told = rows(capsys.readouterr().out)
    assert told["asleep: weights"][1] == "0.0"
    sleep_1(engine)
