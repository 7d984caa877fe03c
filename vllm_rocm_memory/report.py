# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a server tell of their memory, over HTTP: `report`."""

import argparse
import http.client
import json
import os
import re
import sys
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

KNOWN_SCHEMA = 1
REFUSED = 2

_METHOD = "sleep_report"
_METRIC = "vllm:sleep_mode_asleep_bytes"
# What every vLLM tells that keeps statistics.
_STATISTIC = "vllm:num_requests_running"
_ENGINE = re.compile(r'\bengine="(\d+)"')
_KEY = "VLLM_API_KEY"
# A rank answers in milliseconds, but not before a sleep that is under way.
_ANSWER_SECONDS = 60.0
# What reading one raises that has other keys, kinds of values or times.
_UNREADABLE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    TypeError,
    ValueError,
)
_MIB = 1 << 20
_QUOTED = 300

_APPLY = "run `vllm-rocm-memory apply` for it and start the server again"
_POOLS = {
    "torch_bytes": "PyTorch's default pool",
    "graph_pool_bytes": "CUDA graphs' pool",
    "other_pools_bytes": "PyTorch's other pools",
}
_REST = "rest of the process"
_OTHERS = "others and the driver"
_HOST = {
    "held_bytes": "held",
    "backup_bytes": "backups",
    "spare_bytes": "spare, for the next sleep",
    "registered_bytes": "registered, of all",
    "huge_page_bytes": "in huge pages, of all",
}
_SECTIONS = ("device", "not in that sum", "host")
_SEVERAL = (
    "These are the ranks of one data-parallel engine, for which alone "
    "/collective_rpc answers; /metrics has sleep mode's bytes of all of the server's."
)


Figures = Mapping[str, int]


class ReportError(Exception):
    """No report, and what the user can do about that."""


@dataclass(frozen=True)
class Report:
    """What a server answers.

    Attributes:
        engines: How many the server has; the ranks are those of one.
        ranks: What each answers to ``sleep_report``.
    """

    engines: int
    ranks: list[dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``run`` reads."""
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="of a server with VLLM_SERVER_DEV_MODE=1, with its path prefix if it has "
        f"one (default: %(default)s); {_KEY} is its key, where it wants one",
    )
    parser.add_argument(
        "--json", action="store_true", help="print what the ranks answer, as JSON"
    )


def run(args: argparse.Namespace) -> int:
    """Print the report of a server, or say why there is none.

    Returns:
        0, or 2 without a report: no answer, or no rank that has an account.
    """
    try:
        report = fetch(args.url, os.environ.get(_KEY))
        shown = [] if args.json else _shown(args.url, report)
    except ReportError as error:
        print(f"vllm-rocm-memory report: error: {error}", file=sys.stderr)
        return REFUSED
    if args.json:
        answer = {"url": args.url, "engines": report.engines, "results": report.ranks}
        print(json.dumps(answer, indent=2))
    else:
        _print(shown)
    return 0 if any("unavailable" not in rank for rank in report.ranks) else REFUSED


def fetch(url: str, key: str | None = None) -> Report:
    """Ask a server.

    Args:
        url: Of the server.
        key: Sent as its bearer token.

    Raises:
        ReportError: There is no answer, or none that this release can read.
    """
    server = _Server(url, key)
    # First, and not by asking the workers: a method that several ranks do not have
    # leaves their answers in the executor's queues, for the next call to find.
    metrics = server.answer("GET", "/metrics")
    if _METRIC not in metrics:
        raise ReportError(f"{server.url}/metrics has no {_without(metrics)}")
    engines = {*_ENGINE.findall(metrics)}
    body = server.answer("POST", "/collective_rpc", {"method": _METHOD})
    return Report(max(1, len(engines)), _ranks(server.url, body))


def _without(metrics: str) -> str:
    """What is missing in a server's metrics, and why it may be."""
    if _STATISTIC not in metrics:
        return (
            f"{_STATISTIC}, which every vLLM has there that keeps statistics: start "
            "the server without --disable-log-stats, if --url is that of a vLLM"
        )
    return (
        f"{_METRIC}. Either that vLLM is without the patch sleep-report: {_APPLY}. Or "
        "VLLM_USE_RUST_FRONTEND=1 has replaced its API server, which then has no such "
        "metrics: unset that. Or it has several API servers and no sleep mode: add "
        "--enable-sleep-mode"
    )


def _ranks(url: str, body: str) -> list[dict[str, Any]]:
    try:
        ranks: list[dict[str, Any]] = json.loads(body)["results"]
        versions = {rank["schema_version"] for rank in ranks}
    except (ValueError, KeyError, TypeError):
        versions = set()
    if not versions:
        raise ReportError(
            f"{url}/collective_rpc answers something that is no report: {_quoted(body)}"
        )
    if unknown := versions - {KNOWN_SCHEMA}:
        raise ReportError(
            f"the report of {url} has schema version "
            f"{_quoted(', '.join(map(str, unknown)))}, "
            f"and this vllm-rocm-memory reads version {KNOWN_SCHEMA}: use the one "
            "that was applied to the server's vLLM"
        )
    return ranks


class _Server:
    """An HTTP server, asked without proxies, and without following it elsewhere."""

    def __init__(self, url: str, key: str | None) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            self._port = parts.port
        except ValueError as error:
            raise ReportError(f"--url {url}: {error}; give http://HOST:PORT") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ReportError(f"--url {url} is no address: give http://HOST:PORT")
        if parts.query or parts.fragment or parts.username:
            raise ReportError(
                f"--url {url}: leave out all but http://HOST:PORT and a path prefix; "
                f"a key goes into {_KEY}"
            )
        self.url = url.rstrip("/")
        self._host = parts.hostname
        self._prefix = parts.path.rstrip("/")
        self._is_encrypted = parts.scheme == "https"
        self._key = key

    def answer(self, method: str, path: str, content: object = None) -> str:
        """The body that is answered with status 200."""
        try:
            status, body = self._ask(method, self._prefix + path, content)
        except TimeoutError:
            raise ReportError(
                f"{self.url} has not answered within {_ANSWER_SECONDS:g} s: it may "
                "be busy with a sleep or a wake; its log says"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            why = _quoted(str(error)) or type(error).__name__
            raise ReportError(
                f"no answer from --url {self.url} ({why}): is the server up, and is "
                "that its address?"
            ) from None
        if status != 200:
            raise ReportError(self._refusal(status, path, body))
        return body

    def _ask(self, method: str, path: str, content: object) -> tuple[int, str]:
        kind = (
            http.client.HTTPSConnection
            if self._is_encrypted
            else http.client.HTTPConnection
        )
        connection = kind(self._host, self._port, timeout=_ANSWER_SECONDS)
        headers = {"Content-Type": "application/json"} if content else {}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            sent = json.dumps(content) if content else None
            connection.request(method, path, sent, headers)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        finally:
            connection.close()

    def _refusal(self, status: int, path: str, body: str) -> str:
        asked = f"{self.url}{path} answers {status}"
        if status == 404 and path == "/metrics":
            return (
                f"{asked}: there is no vLLM at --url {self.url}, or it has a prefix "
                "that is missing here"
            )
        if status == 404:
            return (
                f"{asked}: vLLM has that in its development mode only. Start the "
                "server with VLLM_SERVER_DEV_MODE=1, where only you can reach it"
            )
        if status in (401, 403):
            what = "does not hold" if self._key else "has to hold"
            return f"{asked}: {_KEY} {what} a key that the server takes"
        if _METHOD in body and re.search("not implemented|no attribute", body):
            return (
                f"{asked}: a worker of the server has no {_METHOD}. On each of its "
                f"nodes, {_APPLY}"
            )
        return f"{asked}: {_quoted(body)}"


def _quoted(body: str) -> str:
    text = _printable(" ".join(body.split()))
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}..."


def _printable(value: Any) -> Any:
    """The same, with nothing in its texts that a terminal would obey."""
    if isinstance(value, str):
        return "".join(each if each.isprintable() else "?" for each in value)
    if isinstance(value, Mapping):
        return {_printable(key): _printable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [*map(_printable, value)]
    return value


def _shown(url: str, report: Report) -> "list[str | Table]":
    """What is printed of it.

    Raises:
        ReportError: What a rank tells is not what a rank would.
    """
    try:
        return [*_parts(Report(report.engines, _printable(report.ranks)))]
    except _UNREADABLE as error:
        raise ReportError(
            f"{url}/collective_rpc answers something that is no report: "
            f"{type(error).__name__}: {_quoted(str(error))}"
        ) from None


def _parts(report: Report) -> "Iterator[str | Table]":
    for rank in report.ranks:
        name = f"rank {rank['rank']} on {rank['hostname']}"
        if "unavailable" in rank:
            yield f"{name}: {rank['unavailable']}\n"
            continue
        device = rank["now"]["device"]
        yield f"{name}, device {device['device']}: {_told(rank)}"
        yield _table(rank["last_sleep"], rank["now"])
        if why := device["others_unknown"]:
            yield f"Others on the device are not told apart: {why}"
        yield ""
    if _is_of_several(report):
        yield _SEVERAL


def _print(shown: "list[str | Table]") -> None:
    # Loading rich takes longer than the rest.
    from vllm_rocm_memory.doctor.render import Output

    console = Output(markup=False)
    for each in shown:
        is_whole = isinstance(each, str) and not console.is_terminal
        console.print(each, soft_wrap=is_whole)


def _told(rank: Mapping[str, Any]) -> str:
    last = rank["last_sleep"]
    if last is None and rank["sleeps"]:
        return "it has no account of its last sleep"
    if last is None:
        return "it has not slept yet"
    begun = datetime.fromtimestamp(last["started_at"])
    number, seconds = rank["sleeps"], last["seconds"]
    return f"sleep {number} took {seconds:.2f} s, at {begun:%Y-%m-%d %H:%M:%S}"


def _is_of_several(report: Report) -> bool:
    """Whether there are other engines, as far as server and workers know."""
    return report.engines > 1 or any(
        (rank["data_parallel_rank"] or 0) > 0 or (rank["data_parallel_size"] or 1) > 1
        for rank in report.ranks
    )


def _table(last: Mapping[str, Any] | None, now: Mapping[str, Any]) -> "Table":
    from rich import box
    from rich.table import Table

    # What each column has by section and label, and what it has of the rest.
    columns: dict[str, tuple[Sequence[Figures], int | None]] = {}
    if last is not None:
        columns["freed"] = (_freed(last), None)
        columns["backed up"] = (_backed_up(last), None)
        columns["held then"] = (_held(last["held"], last["host"]), 0)
    columns["held now"] = (_held(now["device"], now["host"]), 0)
    table = Table("MiB", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in columns:
        table.add_column(heading, justify="right")
    for index, title in enumerate(_SECTIONS):
        parts = [(sections[index], absent) for sections, absent in columns.values()]
        table.add_row(title)
        # What was freed comes last: it has a pool, and all tags come before the pools.
        in_order = [*parts[1:], *parts[:1]]
        for label in dict.fromkeys(label for part, _ in in_order for label in part):
            figures = [part.get(label, absent) for part, absent in parts]
            if any(figures):
                table.add_row(f"  {label}", *map(_mib, figures))
        table.add_section()
    return table


def _freed(last: Mapping[str, Any]) -> Sequence[Figures]:
    freed = {tag: each["device_bytes"] for tag, each in last["freed"].items()}
    cache = {_POOLS["torch_bytes"]: last["torch_cache_freed_bytes"]}
    return freed | cache, {}, {}


def _backed_up(last: Mapping[str, Any]) -> Sequence[Figures]:
    return {tag: each["backup_bytes"] for tag, each in last["freed"].items()}, {}, {}


def _held(device: Mapping[str, Any], host: Mapping[str, Any]) -> Sequence[Figures]:
    used = f"used, of {_mib(device['total_bytes'])}"
    cached = {"cached in the default pool": device["torch_cached_bytes"]}
    asleep = {f"asleep: {tag}": size for tag, size in device["asleep"].items()}
    return (
        shares(device) | {used: device["used_bytes"]},
        cached | asleep,
        {label: host[key] for key, label in _HOST.items()},
    )


def shares(device: Mapping[str, Any]) -> dict[str, int]:
    """The parts that add up to a device's used memory.

    Args:
        device: A ``DeviceMemory`` as a worker tells it.

    Returns:
        Bytes of each part, by tag or by the label of what holds them.
    """
    parts = dict(device["tags"])
    parts |= {label: device[key] for key, label in _POOLS.items()}
    if device["others_bytes"] is None:
        return {**parts, f"{_REST}, others": device["rest_bytes"]}
    return {**parts, _REST: device["rest_bytes"], _OTHERS: device["others_bytes"]}


def _mib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / _MIB:,.1f}"
