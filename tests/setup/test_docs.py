# SPDX-License-Identifier: Apache-2.0
"""The documents: links, the site, and names that the sources have too."""

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import docs_hooks
import pytest
import yaml
from mkdocs.exceptions import PluginError
from vllm.device_allocator.sleep_report import (
    DeviceMemory,
    FreedMemory,
    HostMemory,
    SleepReport,
)

from vllm_rocm_memory import report
from vllm_rocm_memory.doctor.checks import CHECKS
from vllm_rocm_memory.doctor.finding import Finding, State
from vllm_rocm_memory.doctor.machine import Machine
from vllm_rocm_memory.doctor.run import Result, to_json

ROOT = Path(__file__).parents[2]
FENCED = re.compile(r"^( *)(```|~~~).*?^ *\2", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"\]\(\s*<?([^()\s<>]+)>?[^()]*\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def documents() -> list[str]:
    """Those that git has; without a repository, those outside hidden folders."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0:
        return [n for n in listed.stdout.split("\0") if n and (ROOT / n).exists()]
    folders = [path for path in ROOT.iterdir() if path.is_dir()]
    found = [*ROOT.glob("*.md")]
    for folder in folders:
        if not folder.name.startswith(".") and folder.name not in ("build", "dist"):
            found += folder.rglob("*.md")
    return [path.relative_to(ROOT).as_posix() for path in found]


def prose(document: Path) -> str:
    return FENCED.sub("", document.read_text())


def links(document: Path) -> set[str]:
    text = CODE.sub("``", prose(document))
    return {first or second for first, second in LINK.findall(text)}


def anchors(document: Path) -> set[str]:
    """Its headings, as GitHub makes anchors of them."""
    found: set[str] = set()
    for heading in HEADING.findall(prose(document)):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
        again = 0
        while (name := f"{anchor}-{again}" if again else anchor) in found:
            again += 1
        found.add(name)
    return found


def broken(document: Path) -> list[str]:
    """Its relative links to files and to headings that are not there."""
    wrong = []
    for link in sorted(links(document)):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        is_there = target.exists() and (
            not anchor or (target.suffix == ".md" and anchor in anchors(target))
        )
        if not is_there:
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("name", documents())
def test_relative_links_lead_somewhere(name):
    assert broken(ROOT / name) == []


def test_the_documents_are_found():
    assert {"README.md", "docs/ci.md", "docs/gpu_tests.md"} <= {*documents()}
    assert "docs/hipsim.md" in links(ROOT / "README.md")


def test_broken_links_are_found(tmp_path):
    (tmp_path / "other.md").write_text("# One `two`, three\n## Again\n## Again\n")
    (tmp_path / "a.txt").touch()
    (tmp_path / "page.md").write_text(
        "[a](a.txt) ![b](nowhere.png) [over\nlines](other.md#one-two-three)\n"
        "[c](other.md#again-1) [d](other.md#again-2) [e](#here) [f](#there)\n"
        "[g](https://example.org/x) [h](a.txt#line) `[i](code.md)` [`j`](gone.md)\n"
        '[k](gone.txt "title")\n'
        "# Here\n"
        "```\n[l](fenced.md)\n# there\n```\n"
        "[m]: gone.rst\n"
    )
    assert broken(tmp_path / "page.md") == [
        *("#there", "a.txt#line", "gone.md", "gone.rst", "gone.txt", "nowhere.png"),
        "other.md#again-2",
    ]


# --- the site -------------------------------------------------------------------------


class Addresses(HTMLParser):
    """What a page links to, and what a browser fetches for it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.fetched: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "a" and (link := values.get("href")):
            self.links.add(link)
        if tag in ("img", "script") and (source := values.get("src")):
            self.fetched.add(source)
        if tag == "link" and values.get("rel") in ("stylesheet", "icon"):
            self.fetched.add(values["href"] or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    built = subprocess.run(
        command,
        cwd=ROOT,
        env={"PATH": "/nowhere", "NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = built.stdout + built.stderr
    assert built.returncode == 0, said
    assert all(line.startswith("INFO ") for line in said.splitlines()), said
    return folder


def pages(site: Path) -> Iterator[tuple[Path, Addresses]]:
    for path in site.rglob("*.html"):
        if path.name != "404.html":
            yield path, Addresses(path)


def test_the_site_is_built_strictly_and_without_a_warning(site):
    assert settings()["strict"] is True
    assert (site / "index.html").exists()


class Names(yaml.SafeLoader):
    """YAML whose Python names stay as they are written."""


Names.add_multi_constructor("tag:yaml.org,2002:python/", lambda _, suffix, node: suffix)


def settings() -> dict[str, object]:
    found: dict[str, object] = yaml.load((ROOT / "mkdocs.yml").read_text(), Names)
    return found


def test_the_navigation_has_every_page():
    def leaves(part: object) -> Iterator[str]:
        if isinstance(part, str):
            yield part
        else:
            for each in part.values() if isinstance(part, dict) else part:
                yield from leaves(each)

    listed = [*leaves(settings()["nav"])]
    found = {path.relative_to(ROOT / "docs").as_posix() for path in DOCS}
    assert {*listed} == found and len(listed) == len(found)


def test_links_of_the_site_lead_somewhere(site):
    wrong = []
    for page, addresses in pages(site):
        for link in addresses.links | addresses.fetched:
            path = link.partition("#")[0]
            local = path and not re.match(r"[a-z][a-z0-9+.-]*:", path)
            if local and not (page.parent / path).exists():
                wrong.append(f"{page.relative_to(site)}: {link}")
    assert wrong == []


def test_pages_fetch_nothing_from_elsewhere(site):
    fetched = {each for _, addresses in pages(site) for each in addresses.fetched}
    assert fetched
    assert [each for each in fetched if re.match(r"(https?:)?//", each)] == []
    # what the theme fetches a program for
    for page, _ in pages(site):
        assert 'class="mermaid"' not in page.read_text()


def test_files_of_the_repository_are_on_the_site(site):
    log = "benchmarks/results/h200-sleep-wake"
    for name in (f"{log}.txt", f"{log}.png", "requirements/airgap.toml"):
        (copy,) = (site / "repository").glob(f"{name}*")
        assert copy.read_bytes() == (ROOT / name).read_bytes()
    assert (site / "repository" / "docker" / "index.html").exists()
    sleep = Addresses(site / "sleep.html")
    assert "operations.html#metrics" in sleep.links
    assert "repository/docker/index.html" in Addresses(site / "index.html").links


def texts_of_diagrams() -> list[str]:
    return [
        diagram[1] for path in DOCS for diagram in docs_hooks.diagrams(path.read_text())
    ]


def test_each_diagram_has_the_picture_of_its_text_and_no_other_is_there(site):
    names = {docs_hooks.picture(text) for text in texts_of_diagrams()}
    folder = ROOT / "docs" / docs_hooks.PICTURES
    drawn = {path.name for path in folder.iterdir()}
    assert drawn == names, "run python tools/diagrams.py"
    assert len(names) >= 7
    shown = {Path(each).name for _, page in pages(site) for each in page.fetched}
    assert names <= shown


def test_pictures_have_the_words_of_their_diagram():
    for text in texts_of_diagrams():
        path = ROOT / "docs" / docs_hooks.PICTURES / docs_hooks.picture(text)
        picture = path.read_text()
        said = " ".join("".join(ElementTree.fromstring(picture).itertext()).split())
        labels = re.findall(r"accTitle: (.+)|\[([^\[\]()*]+)\]", text)
        words = {w for pair in labels for label in pair for w in label.split()}
        assert words and [word for word in words if word not in said] == []
        # nothing of it is fetched, and nothing is run
        foreign = r"<script|@import|(href|src)=.https?:|url\(.?http"
        assert not re.search(foreign, picture)


def test_a_diagram_that_was_changed_stops_the_build(tmp_path):
    text = "flowchart LR\n  accTitle: A title\n  a --> b\n"
    page = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"))
    config = SimpleNamespace(docs_dir=str(tmp_path))
    place = tmp_path / docs_hooks.PICTURES / docs_hooks.picture(text)

    def shown(drawing: str) -> str:
        markdown = f"before\n```mermaid\n{drawing}```\nafter\n"
        return docs_hooks.on_page_markdown(markdown, page=page, config=config, files=[])

    with pytest.raises(PluginError, match="python tools/diagrams"):
        shown(text)
    place.parent.mkdir()
    place.touch()
    assert shown(text) == f"before\n![A title](diagrams/{place.name})\nafter\n"
    with pytest.raises(PluginError):
        shown(text.replace("b", "c"))


def test_links_within_code_are_left_alone():
    text = (
        "[a](../a.txt) `[b](../b.txt)` [`c`](../c.txt#d) [e](https://e.org) [f](#f)\n"
        '```\n[g](../g.txt)\n```\n![h](../h.png "title")\n'
    )
    assert [link[1] for link in docs_hooks.relative_links(text)] == [
        *("../a.txt", "../c.txt", "../h.png")
    ]


# --- figures --------------------------------------------------------------------------


def table_below(text: str, title: str) -> list[str]:
    table = re.search(r"(?:^\|.*\n)+", text.partition(f"## {title}\n")[2], re.MULTILINE)
    assert table is not None
    return table[0].splitlines()[2:]


def test_the_readme_says_of_runs_what_the_results_say():
    title = "What was run where"
    readme = (ROOT / "README.md").read_text()
    results = (ROOT / "docs" / "results.md").read_text()
    rows = {line.replace("](../", "](") for line in table_below(results, title)}
    for line in table_below(readme, title):
        assert line.replace("docs/ci.md", "ci.md") in rows
    columns = re.compile(r"^\| (.+?) \| (.+?) \| (.+?) \|$")
    figure = re.compile(r"[+\d.]+(?: to [+\d.]+)? (?:ms|s|GB/s|GiB|%)(?!\w)")
    measured = {
        row[1]: row[2:]
        for line in results.splitlines()
        if (row := [*columns.split(line)[:4]]) and len(row) == 4
    }
    shown = 0
    for line in table_below(readme, "What was measured"):
        match = columns.match(line)
        assert match is not None
        there = measured[match[1].partition(",")[0]]
        for mine, theirs in zip(match.groups()[1:], there, strict=True):
            figures = figure.findall(mine)
            shown += len(figures)
            assert figures and [f for f in figures if f not in theirs] == [], line
    assert shown >= 12


def test_first_sleeps_are_those_of_the_log():
    """One figure from the log by its way into the table; others were read by people."""
    log = (ROOT / "benchmarks" / "results" / "h200-sleep-wake.txt").read_text()
    first = re.findall(r"cycle 0 sleep ([\d.]+)s", log)
    row = table_below((ROOT / "docs" / "results.md").read_text(), "Sleep and wake")[0]
    upstream, ours = (float(each) for each in re.findall(r"([\d.]+) s,", row))
    assert (upstream, ours) == (round(float(first[0]), 1), round(float(first[1]), 2))


STORY = ROOT / "vllm_rocm_memory" / "demo" / "story.py"


def steps_of_the_story() -> list[str]:
    """Titles in the order in which `Story.tell` comes to them."""
    methods = {
        node.name: node
        for node in ast.walk(ast.parse(STORY.read_text()))
        if isinstance(node, ast.FunctionDef)
    }

    def titles(node: ast.AST) -> Iterator[str]:
        match node:
            case ast.Call(
                func=ast.Attribute(attr="step"), args=[ast.Constant(value=str(title))]
            ):
                yield title
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                yield from titles(methods[name]) if name in methods else ()
        for child in ast.iter_child_nodes(node):
            yield from titles(child)

    of_the_end = titles(ast.parse(STORY.with_name("__main__.py").read_text()))
    return [*titles(methods["tell"]), *of_the_end]


def test_the_recording_is_of_the_demonstration():
    """Its steps are the story's in their order, and what they say is the story's."""
    readme = (ROOT / "README.md").read_text()
    (recording,) = re.findall(r"^```text\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    match = re.search(r"\nEverything held, after (\d+) s\.$", recording.rstrip())
    assert match is not None and int(match[1]) < 120
    steps = re.findall(r"^✓ (.+?) \([\d.]+ s\)$", recording, re.MULTILINE)
    assert len(steps) >= 10
    assert steps == steps_of_the_story()
    said = [
        pattern_of(text) for text in texts_of(STORY) if len(text.replace("\0", "")) >= 8
    ]
    others = (
        *(r"✓ .+ \([\d.]+ s\)", r"[\w' ]+ ━* +[\d.]+ \w+ of [\d.]+ \w+"),
        *(r"in use, together +[\d.]+ \w+", r"KV copy engine: rect \(.+"),
        *(rf"[✓!✗-]  (?:{'|'.join(check.name for check in CHECKS)}) +.+",),
        *(r"\.\.\. and \d+ more", r"[\d\w, ]+ (?:success|not available)"),
    )
    for line in recording.partition("\n\n")[2].rpartition("\n\n")[0].splitlines():
        text = line.strip()
        assert any(re.fullmatch(each, text) for each in (*said, *others)), line


# --- names ----------------------------------------------------------------------------

DOCS = sorted((ROOT / "docs").glob("*.md"))
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
SOURCES = [
    path
    for folder in ("vllm", "vllm_rocm_memory", "csrc")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".cpp", ".h", ".toml") and "_native" not in path.parts
]
# of vLLM, which the documents name beside ours
UPSTREAM_METRICS = {
    "vllm:sleep_mode_operation_duration_seconds",
    "vllm:simple_kv_offload_load_blocks_total",
}
_METRIC = re.compile(r"vllm:(?:sleep_mode|simple_kv_offload)_\w+")


@cache
def sources() -> str:
    return "\n".join(path.read_text() for path in SOURCES)


def metrics_of_the_series() -> set[str]:
    """Those that vllm/ names; prometheus_client adds _total where it is left out."""
    names = set()
    for path in (ROOT / "vllm").rglob("*.py"):
        names |= {*_METRIC.findall(path.read_text())}
    return {name for name in names if not name.endswith("_")}


def test_metrics_are_those_of_the_series():
    documented = {*_METRIC.findall(OPERATIONS)} - UPSTREAM_METRICS
    named = metrics_of_the_series()
    assert {name.removesuffix("_total") for name in documented} == {
        name.removesuffix("_total") for name in named
    }
    elsewhere = {
        name
        for path in (*DOCS, ROOT / "README.md")
        for name in _METRIC.findall(path.read_text())
    }
    assert elsewhere <= documented | UPSTREAM_METRICS


def test_every_variable_of_the_series_is_documented():
    series = ROOT / "vllm_rocm_memory" / "series" / "series.toml"
    steps = [s for p in tomllib.loads(series.read_text())["patch"] for s in p["step"]]
    registered = {
        step["key"]
        for step in steps
        if step["kind"] == "register" and step.get("mapping") == "environment_variables"
    }
    assert registered >= {"VLLM_KV_OFFLOAD_COPY_ENGINE", "VLLM_SLEEP_HOST_MEMORY"}
    table = OPERATIONS.partition("## Commands")[0]
    for name in (*registered, "VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE"):
        assert f"| `{name}` |" in table


def test_variables_in_the_documents_exist():
    named = {*re.findall(r"\bVLLM_[A-Z_]+[A-Z]\b", OPERATIONS)}
    upstream = {
        *("VLLM_SERVER_DEV_MODE", "VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS"),
        *("VLLM_ROCM_USE_AITER_CUSTOM_AR", "VLLM_USE_RUST_FRONTEND"),
    }
    assert [name for name in named - upstream if name not in sources()] == []


def rows(title: str) -> list[list[str]]:
    """The cells of the first table below a heading of operations.md."""
    _, found, rest = OPERATIONS.partition(f"# {title}\n")
    assert found, title
    table = re.search(r"(?:^\|.*\n)+", rest, re.MULTILINE)
    assert table is not None
    lines = table[0].splitlines()[2:]
    return [[cell.strip() for cell in line[1:-1].split(" | ")] for line in lines]


def test_the_doctors_checks_and_states_are_documented():
    section = OPERATIONS.partition("## The doctor")[2].partition("\n## ")[0]
    tables = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    first = [
        [line.split("|")[1].strip() for line in each.splitlines()[2:]]
        for each in tables
    ]
    states, checks, keys, wrong = first
    results = [Result(CHECKS[0], Finding(State.SUCCESS, "as it should be"))]
    answer = to_json(Machine(target=None), results)
    (check,) = answer["checks"]
    named = re.findall(r"`(\w+)`", " ".join(keys))
    assert named == [*answer, *check]
    render = ROOT / "vllm_rocm_memory" / "doctor" / "render.py"
    signs = re.findall(r'State\.[A-Z_]+: \("(.+?)", ', render.read_text())
    assert states == [
        f"{state}, `{sign}`" for state, sign in zip(State, signs, strict=True)
    ]
    assert checks == [f"`{check.name}`" for check in CHECKS]
    assert len(wrong) == 12
    for _, check, remedy in rows("Twelve wrong set-ups"):
        assert check in checks and remedy


def fields_of(source: str) -> dict[str, set[str]]:
    """The annotated names of each class of a file of the series."""
    tree = ast.parse((ROOT / "vllm" / source).read_text())
    return {
        each.name: {
            line.target.id
            for line in each.body
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        }
        for each in tree.body
        if isinstance(each, ast.ClassDef)
    }


def test_the_fields_of_the_report_are_documented():
    classes = fields_of("device_allocator/sleep_report.py")
    section = (ROOT / "docs" / "sleep.md").read_text().partition("### Its fields")[2]
    tables = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)[:4]
    names = [
        {
            name
            for line in each.splitlines()[2:]
            for name in re.findall(r"`(\w+)`", line.split(" | ")[0])
        }
        for each in tables
    ]
    rank, last_sleep, device, host = names
    assert last_sleep == classes["SleepReport"]
    assert device == classes["DeviceMemory"]
    assert host == classes["HostMemory"]
    assert all(f"`{name}`" in tables[1] for name in classes["FreedMemory"])
    answers = (ROOT / "vllm" / "v1" / "worker" / "sleep_reports.py").read_text()
    assert all(f'"{name}"' in answers for name in rank)
    assert {"schema_version", "last_sleep", "now", "unavailable"} <= rank


def test_the_samples_of_the_report_are_what_is_printed(monkeypatch, capsys):
    """With their figures, and to the letter."""
    mib = 1 << 20
    asleep = {"weights": 6 * mib, "kv_cache": 64 * mib, "cudagraph": 2 * mib}
    freed = {
        tag: FreedMemory(size, 0 if tag == "kv_cache" else size)
        for tag, size in asleep.items()
    }
    held = DeviceMemory(
        device=0,
        total_bytes=8192 * mib,
        used_bytes=29 * mib // 10,
        tags=dict.fromkeys(asleep, 0),
        torch_bytes=0,
        graph_pool_bytes=0,
        other_pools_bytes=0,
        rest_bytes=29 * mib // 10,
        others_bytes=0,
        others_unknown=None,
        torch_cached_bytes=0,
        asleep=asleep,
    )
    host = HostMemory(8 * mib, 8 * mib, 0, 8 * mib, 8 * mib)
    first, log = re.findall(
        r"^```text\n(.*?)^```", (ROOT / "docs" / "sleep.md").read_text(), re.M | re.S
    )
    at = re.search(r"(\S+ \S+)$", first.splitlines()[0])
    assert at is not None
    last = SleepReport(
        started_at=datetime.fromisoformat(at[0]).timestamp(),
        seconds=0.02,
        freed=freed,
        torch_cache_freed_bytes=0,
        held=held,
        host=host,
    )
    assert last.table() == log.rstrip()
    rank = {
        **{"schema_version": 1, "rank": 0, "hostname": "vm", "sleeps": 1},
        **{"data_parallel_rank": 0, "data_parallel_size": 1},
        "last_sleep": last.to_dict(),
        "now": {"device": held.to_dict(), "host": host.to_dict()},
    }
    monkeypatch.setattr(report, "fetch", lambda *_: report.Report(1, [rank]))
    assert report.run(argparse.Namespace(url="", json=False)) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "\n".join(printed).rstrip() == first.rstrip()


def text_of(node: ast.AST) -> str:
    """What an expression says, with a NUL in the place of each value."""
    match node:
        case ast.JoinedStr(values=parts):
            return "".join(map(text_of, parts))
        case ast.Constant(value=str(text)):
            return re.sub(r"%[.\d]*[sdrfxg]|%#x", "\0", text)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left) + text_of(right)
    return "\0"


def texts_of(path: Path) -> list[str]:
    """The texts of a source, each as a whole."""
    if path.suffix == ".py":
        kinds = (ast.JoinedStr, ast.Constant, ast.BinOp)
        nodes = ast.walk(ast.parse(path.read_text()))
        return [text_of(node) for node in nodes if isinstance(node, kinds)]
    if path.suffix == ".cpp":
        values = re.sub(r'"\s*\+\s*[^";{}]*?\+\s*"', "\0", path.read_text())
        strings = re.sub(r'"\s*\+?\s*"', "", values)
        found = re.findall(r'"((?:[^"\\]|\\.)*)"', strings)
        return [each.replace('\\"', '"') for each in found]
    return []


@cache
def texts_of_the_sources() -> list[str]:
    return [text for path in SOURCES for text in texts_of(path) if len(text) > 5]


def pattern_of(text: str) -> str:
    """What may be printed of a text that has values."""
    return ".*".join(map(re.escape, text.split("\0")))


MESSAGES = (
    *("At start", "KV copies", "Sleep and wake"),
    *("The report", "The series", "make serve", "make demo"),
)
# Said by two texts: one function hands a name or a reason to another.
OF_TWO_TEXTS = (
    "--sleep-mode-offload-cudagraph has no effect: ...",
    "cumem allocator is not supported on current platform: ...",
    "VLLM_SLEEP_HOST_MEMORY is ..., which is neither 'keep' ...",
    'VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE="..." is not a number ...',
    "VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS must be a whole number, ...",
    "sleep changed nothing: ... the backup takes ... more bytes (...) of host memory "
    "and ... (...) are available: ...",
    "wake_up failed on ... of ... ranks: .... The same call wakes the ranks that are "
    "left",
    "discard failed on ... of ... ranks: .... kv_cache ...",
    "/metrics has no ..., which every vLLM has there that keeps statistics: ...",
)


# Put together piece by piece, in the order in which a source has the pieces.
OF_MANY_TEXTS = {
    "hipMemCreate failed: ... (...): ...; ... bytes (...) on device ..., of which ... "
    "are free": "csrc/gpu/driver_api.cpp"
}


def quoted(title: str) -> list[str]:
    """The messages below a heading."""
    return [
        message
        for cells in rows(title)
        for message in re.findall(r"`([^`]+)`", cells[0])
    ]


def is_said(message: str) -> bool:
    """Whether one text has all that `...` leaves of it, in that order."""
    parts = [part.strip() for part in message.split("...")]
    return any(_has_in_order(text, parts) for text in texts_of_the_sources())


def _has_in_order(text: str, parts: list[str]) -> bool:
    at = 0
    for part in parts:
        if (found := text.find(part, at)) < 0:
            return False
        at = found + len(part)
    return True


@pytest.mark.parametrize("title", MESSAGES)
def test_messages_are_those_of_the_sources(title):
    messages = quoted(title)
    assert len(messages) >= 5
    for message in messages:
        if source := OF_MANY_TEXTS.get(message):
            words = re.findall(r"\b[a-z]+\b", message.replace("bytes (", "("))
            said = "\n".join(texts_of(ROOT / source))
            assert re.search(r"\b.*\b".join(words), said, re.DOTALL), message
        else:
            assert is_said(message) or is_said_by_two(message), message


def is_said_by_two(message: str) -> bool:
    """Whether one text has it up to some point and another the rest."""
    if message not in OF_TWO_TEXTS:
        return False

    def is_begun(text: str) -> bool:
        name, _, rest = text.partition(" ")
        return is_said(text) or (rest != "" and is_said(name) and is_said(rest))

    cuts = [cut.start() for cut in re.finditer(r"(?<=\w)(?=\W)|\.\.\.", message)]
    return any(
        is_begun(message[:cut]) and is_said(message[cut:].strip(' :.,;()="'))
        for cut in cuts
    )


def test_messages_of_two_texts_are_few_and_quoted():
    assert {*OF_TWO_TEXTS} <= {m for title in MESSAGES for m in quoted(title)}
    assert not any(map(is_said, OF_TWO_TEXTS))


# What nobody but a programmer who calls these modules can cause.
OF_PROGRAMMERS = (
    "a host cache of ",
    "cache, which has ",
    "KV blocks have ",
    "KV caches to copy between differ",
    "KV cache region ",
    "its blocks end at byte ",
    "bytes between layers are no multiple of ",
    "source blocks cannot go to ",
    "This worker's KV caches are registered already",
    "has no attribute ",
)


def texts_that_are_told() -> Iterator[tuple[str, str]]:
    """What files of the series raise, or log as a warning or worse."""
    for path in sorted((ROOT / "vllm").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Raise(exc=ast.Call(args=[said, *_])):
                    yield path.name, text_of(said)
                case ast.Call(
                    func=ast.Attribute(
                        attr="warning" | "warning_once" | "error" | "exception"
                    ),
                    args=[said, *_],
                ):
                    yield path.name, text_of(said)


def test_every_message_of_the_series_has_a_row():
    aiter = (ROOT / "docs" / "aiter.md").read_text()
    quoted = " ".join((OPERATIONS + aiter).split())
    told = 0
    without = []
    for name, text in texts_that_are_told():
        parts = [part.strip(" ().:,;='\"") for part in text.split("\0")]
        parts = [part for part in parts if len(part) > 12]
        if parts and not any(each in text for each in OF_PROGRAMMERS):
            told += 1
            if not any(part[:20] in quoted for part in parts):
                without.append((name, text))
    assert told > 40
    assert without == []
