# SPDX-License-Identifier: Apache-2.0
"""The doctor around its checks: crashes, children, arguments, what is printed."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from vllm_rocm_memory import cli
from vllm_rocm_memory.doctor import children, run
from vllm_rocm_memory.doctor.checks import CHECKS, Check, base
from vllm_rocm_memory.doctor.finding import Finding, State
from vllm_rocm_memory.doctor.machine import Machine, _probe_import, ask
from vllm_rocm_memory.doctor.render import show
from vllm_rocm_memory.series import verification
from vllm_rocm_memory.series.bases import UnknownBaseError
from vllm_rocm_memory.series.target import Target
from vllm_rocm_memory.sizes import readable

from .conftest import answers

REPOSITORY = Path(__file__).parents[2]
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class Scripted(Check):
    """A check that does what the test wants."""

    does: Callable[[], Finding] = lambda: Finding(State.SUCCESS, "fine")

    def run(self, machine: Machine) -> Finding:
        return self.does()


def scripted(state: State, summary: str = "it is", *details: str) -> Scripted:
    remedy = "do this" if state in (State.PARTIAL, State.MISSING) else None
    finding = Finding(state, summary, details, remedy)
    return Scripted(state.replace(" ", "-"), f"All {state}", lambda: finding)


def raising(error: BaseException) -> Scripted:
    def fall() -> Finding:
        raise error

    return Scripted("fallen", "Fallen", fall)


@pytest.fixture
def checks(monkeypatch):
    def replace(*made: Check) -> None:
        monkeypatch.setattr(run, "CHECKS", made)

    return replace


# --- findings and crashes -------------------------------------------------------------


@pytest.mark.parametrize("state", [State.PARTIAL, State.MISSING])
def test_what_is_not_well_has_a_remedy(state) -> None:
    with pytest.raises(ValueError, match=f"{state} without a remedy: no"):
        Finding(state, "no")


@pytest.mark.parametrize(
    ("error", "summary"),
    [
        (RuntimeError("two\nlines"), "RuntimeError: two lines"),
        (SystemExit("no GPU"), "SystemExit: no GPU"),
        (AssertionError(), "AssertionError: without a message"),
    ],
)
def test_a_crash_is_a_finding_and_the_others_go_on(machine, error, summary) -> None:
    made = [raising(error), scripted(State.SUCCESS)]
    crashed, after = (result.finding for result in run.diagnose(machine(), made))
    assert (crashed.state, crashed.summary) == (State.CRASHED, summary)
    assert crashed.details[0].startswith(f"{__file__}:")
    assert crashed.details[0].endswith(" in fall")
    assert crashed.remedy and "Report it" in crashed.remedy
    assert after.state is State.SUCCESS


def test_a_check_that_cannot_be_imported_crashes_alone(machine) -> None:
    finding = run.examine(Check("no-such-check", "None"), machine())
    assert finding.state is State.CRASHED
    assert "checks.no_such_check" in finding.summary


def test_ctrl_c_ends_the_run(doctor, checks) -> None:
    checks(raising(KeyboardInterrupt()), scripted(State.SUCCESS))
    answer = doctor()
    assert answer.code == 130
    assert answer.error == "vllm-rocm-memory: interrupted\n"


def test_every_check_has_a_module_of_its_name() -> None:
    folder = Path(run.__file__).parent / "checks"
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert {check.name.replace("-", "_") for check in CHECKS} == modules
    assert len({check.title for check in CHECKS}) == len(CHECKS)


# --- what is printed ------------------------------------------------------------------


@pytest.mark.parametrize("state", State)
def test_exit_codes(doctor, checks, state) -> None:
    checks(scripted(State.SUCCESS), scripted(state))
    code = 1 if state in (State.MISSING, State.CRASHED) else 0
    for words in ([], ["--json"]):
        answer = doctor(*words)
        assert (answer.code, answer.error) == (code, "")
    assert answer.json["ok"] is (code == 0)


def test_json(doctor, checks, small) -> None:
    checks(scripted(State.PARTIAL, "a [red]b", "c"), scripted(State.SUCCESS))
    answer = doctor("--json", "--target", str(small.root)).json
    assert answer == {
        "target": f"{small.root}/vllm",
        "ok": True,
        "checks": [
            {
                "name": "partial",
                "title": "All partial",
                "state": "partial",
                "summary": "a [red]b",
                "details": ["c"],
                "remedy": "do this",
            },
            {
                "name": "success",
                "title": "All success",
                "state": "success",
                "summary": "it is",
                "details": [],
                "remedy": None,
            },
        ],
    }


def test_text_in_a_pipe_is_plain_and_has_whole_lines(
    doctor, checks, small, monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    long = "a [red]value[/red] " + "that is long " * 20
    checks(*(scripted(state, long, "detail " * 20) for state in State))
    lines = doctor("--target", str(small.root)).output.splitlines()
    assert lines[0] == f"{small.root}/vllm"
    assert lines[1] == f"[✓] All success: {long}"
    assert lines[2] == "    " + "detail " * 20
    assert lines[3] == f"[!] All partial: {long}"
    assert lines[5] == "    → do this"
    assert lines[-1] == (
        "5 checks: 1 success, 1 partial, 1 missing, 1 not available, 1 crashed."
    )
    assert "\x1b" not in "".join(lines)


def test_ascii_where_there_is_nothing_else(machine) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    made = [scripted(state) for state in State]
    show(machine(), made, Console(file=stream))
    stream.seek(0)
    text = stream.read()
    for sign in ("[ok] ", "[!] ", "[X] ", "[-] ", "[crash] ", "    -> do this"):
        assert sign in text


def test_what_has_no_letter_in_the_encoding_is_printed_all_the_same(
    doctor, checks, monkeypatch
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    checks(scripted(State.SUCCESS, "mod\N{LATIN SMALL LETTER E WITH GRAVE}le"))
    assert doctor().code == 0
    stream.seek(0)
    assert "[ok] All success: mod\\xe8le\n1 check: 1 success.\n" in stream.read()


def _reader_gone():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.parametrize("words", [[], ["--json"]])
@pytest.mark.parametrize(
    ("output", "code", "error"),
    [
        (_reader_gone, 0, ""),
        (
            lambda: Path("/dev/full").open("w"),  # noqa: SIM115
            2,
            "vllm-rocm-memory: error: standard output: No space left on device\n",
        ),
        (lambda: None, 1, ""),
    ],
    ids=["reader gone", "full", "closed"],
)
def test_the_output_may_go_nowhere(
    doctor, checks, monkeypatch, words, output, code, error
) -> None:
    checks(scripted(State.MISSING))
    stream = output()
    monkeypatch.setattr(sys, "stdout", stream)
    answer = doctor(*words)
    assert (answer.code, answer.error) == (code, error)
    if stream is not None:
        stream.close()


@pytest.mark.parametrize("width", [40, 60, 200])
def test_no_line_of_a_terminal_ends_within_a_command(machine, width) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, color_system=None)
    long = "`vllm-rocm-memory apply --allow-unknown-base --target '/opt/a b/lib/vllm'`"
    remedy = (
        f"Install vLLM 0.32.0 or 0.33.0, or run `pip  check` and {long}, which fits"
    )
    finding = Finding(State.MISSING, "it is [red]not[/red] there", remedy=remedy)
    show(machine(), [Scripted("a", "A", lambda: finding)], console)
    shown = stream.getvalue()
    lines = shown[shown.index("\u2192") :].splitlines()[:-1]
    assert sum(long in line for line in lines) == 1
    assert sum("`pip  check`" in line for line in lines) == 1
    assert " ".join(line.strip() for line in lines) == f"\u2192 {remedy}"
    assert all(len(line) <= width for line in lines if long not in line)
    assert all(line.startswith("    ") for line in lines[1:])


def test_a_terminal_shows_which_check_runs_and_wraps_lines(machine) -> None:
    stream = io.StringIO()
    console = Console(
        file=stream,
        force_terminal=True,
        width=40,
        color_system=None,
        legacy_windows=False,
    )
    made = [scripted(State.PARTIAL, "word " * 20, "detail " * 20)]
    show(machine(), made, console)
    text = stream.getvalue()
    assert "All partial ..." in text
    _, *lines = text.splitlines()
    details = [line for line in lines if "detail" in line]
    assert len(details) > 1
    assert all(line.startswith("    detail") for line in details)
    assert all(len(line.rstrip()) <= 40 for line in details)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (3 << 29, "1.5 GiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_bytes_for_people(num_bytes, text) -> None:
    assert readable(num_bytes) == text


# --- arguments ------------------------------------------------------------------------


@pytest.fixture
def given_to_vllm(monkeypatch):
    """Which of the command's words are taken for those of `vllm serve`."""
    seen = []

    def note(machine, checks):
        seen.append(machine)
        return ()

    def call(words):
        monkeypatch.setattr(run, "diagnose", note)
        monkeypatch.setattr(run, "Machine", partial(Machine, **answers()))
        with pytest.raises(SystemExit) as ended:
            cli.main(["doctor", "--json", *words])
        assert ended.value.code == 0
        return seen.pop()

    return call


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("", ""),
        ("MODEL --enable-sleep-mode", "MODEL --enable-sleep-mode"),
        ("--enable-sleep-mode MODEL -tp 2", "--enable-sleep-mode MODEL -tp 2"),
        ("vllm serve MODEL -O.mode=3", "MODEL -O.mode=3"),
        ("-- vllm serve MODEL", "MODEL"),
        ("/opt/bin/vllm serve MODEL", "MODEL"),
        ("-- MODEL --json", "MODEL --json"),
        ("MODEL --jso --target-layers 3", "MODEL --jso --target-layers 3"),
        ("MODEL --max -1 --seed=-3", "MODEL --max -1 --seed=-3"),
        ("serve MODEL --seed 3", "MODEL --seed 3"),
        ("./serve --seed 3", "./serve --seed 3"),
        ("vllm bench serve", "vllm bench serve"),
        ("python3.12 -m vllm.entrypoints.cli.main serve MODEL", "MODEL"),
        ("/v/bin/python -m vllm.entrypoints.openai.api_server --model M", "--model M"),
        ("A=1 -- B=2 vllm serve MODEL C=3", "MODEL C=3"),
        ("exec env A=1 B=2 vllm serve MODEL", "MODEL"),
    ],
)
def test_words_for_vllm(given_to_vllm, words, given) -> None:
    assert given_to_vllm(words.split()).serve_arguments == tuple(given.split())


def test_variables_of_the_command_count(given_to_vllm, monkeypatch) -> None:
    monkeypatch.setenv("OURS", "stays")
    monkeypatch.setenv("HIPSIM_PROFILE", "7.1")
    words = ("HIPSIM_PROFILE=7.16", "V_LLM1=a=b c", "vllm", "serve", "M", "X=1")
    machine = given_to_vllm(words)
    assert machine.environment["HIPSIM_PROFILE"] == "7.16"
    assert machine.environment["V_LLM1"] == "a=b c"
    assert machine.environment["OURS"] == "stays"
    assert "X" not in machine.environment


@pytest.mark.parametrize("seconds", ["0", "-1", "many", "1e9", "nan"])
def test_a_limit_that_is_none_is_refused(seconds, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", f"--probe-timeout={seconds}"])
    assert ended.value.code == 2
    assert "--probe-timeout" in capsys.readouterr().err


def test_words_with_spaces_stay_whole(given_to_vllm) -> None:
    config = '{"kv_connector": "SimpleCPUOffloadConnector"}'
    words = ("M", "--kv-transfer-config", config)
    assert given_to_vllm(words).serve_arguments == words


def test_a_target_that_is_none_is_refused(capsys, tmp_path) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--target", str(tmp_path / "none")])
    assert ended.value.code == 2
    assert "none does not exist" in capsys.readouterr().err


def test_help_names_states_and_exit_codes(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for state in State:
        assert f"\n  {state}  " in text
    assert "Exit code: 0" in text


def test_other_commands_take_no_other_words(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["status", "--enable-sleep-mode"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --enable-sleep-mode" in capsys.readouterr().err


def test_a_python_without_vllm(tmp_path) -> None:
    process = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _BARE, str(REPOSITORY)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    answer = json.loads(process.stdout)
    states = {each["name"]: each["state"] for each in answer["checks"]}
    assert (process.returncode, answer["target"], answer["ok"]) == (1, None, False)
    assert states["base"] == "missing"
    assert "crashed" not in states.values(), answer


# Without site-packages there is our package and the checkout's vllm/, no vLLM.
_BARE = """
import sys
sys.path.append(sys.argv[1])
from vllm_rocm_memory.cli import main
main(["doctor", "--json"])
"""


# --- children -------------------------------------------------------------------------


@pytest.fixture
def child(tmp_path, machine):
    """What `ask` makes of a program; it may leave files in the folder `here`."""

    def call(program: str, timeout_s: float = 30.0, **attributes):
        (tmp_path / "probe_double.py").write_text(program)
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "HERE": str(tmp_path)}
        made = machine(environment=environment, **attributes)
        return ask(made, "probe_double", ("one", "two words"), timeout_s)

    return call


def test_the_answer_is_the_last_object_that_was_printed(child) -> None:
    program = """
import json, sys
print(json.dumps({"early": 1}))
print(json.dumps(sys.argv[1:]))
print(json.dumps({"words": sys.argv[1:]}))
print("a library says goodbye")
print(3)
raise SystemExit(1)
"""
    assert child(program) == {"words": ["one", "two words"]}


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("print('x')", "ended with exit code 0 and no answer: it printed no error"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "was ended by SIGSEGV",
        ),
        ("import os; os.kill(os.getpid(), 40)", "was ended by signal 40"),
        (
            "import sys; print('a\\nb\\n\\nc\\nd', file=sys.stderr); sys.exit(3)",
            "ended with exit code 3 and no answer: b | c | d",
        ),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("raise SystemExit('cannot')", "exit code 1 and no answer: cannot"),
    ],
)
def test_a_child_without_an_answer(child, program, sentence) -> None:
    answer = child(program)
    assert isinstance(answer, str)
    assert answer.startswith("probe_double ")
    assert sentence in answer


HANGS = """
import os, pathlib, subprocess, sys, time
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
here = pathlib.Path(os.environ["HERE"])
(here / "probe").write_text(str(os.getpid()))
(here / "pid").write_text(str(inner.pid))
print(os.environ.get("SAYS", ""), flush=True)
print("waiting for the driver", file=sys.stderr, flush=True)
"""


def is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return "State:\tZ" not in status


def assert_gone(tmp_path: Path, name: str = "pid") -> None:
    pid = int((tmp_path / name).read_text())
    deadline = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < deadline, "the child's child lives on"
        time.sleep(0.05)


def test_a_child_that_hangs_is_ended_with_what_it_started(child, tmp_path) -> None:
    answer = child(f"{HANGS}\ntime.sleep(600)", timeout_s=1.0)
    assert answer == "probe_double gave no answer in 1 s: waiting for the driver"
    assert_gone(tmp_path)


def test_an_answer_counts_though_the_child_does_not_end(
    child, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("SAYS", '{"found": true}')
    # Its own child holds the pipes.
    assert child(HANGS, timeout_s=2.0) == {"found": True}
    assert_gone(tmp_path)


def test_what_left_the_session_of_a_child_holds_nobody_up(child, tmp_path) -> None:
    program = HANGS.replace('time.sleep(600)"]', 'time.sleep(600)"], ' + _AWAY)
    begun = time.monotonic()
    answer = child(f"{program}\ntime.sleep(600)", timeout_s=1.0)
    try:
        assert answer == "probe_double gave no answer in 1 s: waiting for the driver"
        assert time.monotonic() - begun < 5
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


_AWAY = "start_new_session=True"


def test_a_child_that_cannot_be_killed_is_left_behind(
    child, tmp_path, monkeypatch
) -> None:
    """As where it waits in a driver."""
    killed = []
    monkeypatch.setattr(children.os, "killpg", lambda group, _: killed.append(group))
    monkeypatch.setattr(children, "_KILLED_WITHIN_S", 0.1)
    answer = child(f"{HANGS}\ntime.sleep(600)", timeout_s=1.0)
    monkeypatch.undo()
    try:
        assert answer == "probe_double gave no answer in 1 s: waiting for the driver"
    finally:
        [group] = killed
        os.killpg(group, signal.SIGKILL)
        os.waitpid(group, 0)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
        (signal.SIGKILL, -9),
    ],
)
def test_no_child_outlives_the_doctor(tmp_path, number, code) -> None:
    (tmp_path / "probe_double.py").write_text(f"{HANGS}\ntime.sleep(600)")
    # A shell that starts this in the background has it ignore Ctrl-C.
    program = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from vllm_rocm_memory import cli
from vllm_rocm_memory.doctor import machine
machine.RUNTIME_PROBE, machine.IMPORT_PROBE = "probe_double", "this"
cli.main(["doctor"])
"""
    paths = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": paths, "HERE": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(timeout=30) == code
    assert_gone(tmp_path, "probe")
    if number is signal.SIGKILL:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    else:
        assert_gone(tmp_path)


def test_a_target_of_another_python_is_not_asked(child, small, tmp_path) -> None:
    site = tmp_path / "lib/python3.99/site-packages"
    site.parent.mkdir(parents=True)
    small.root.rename(site)
    answer = child("print({})", target=Target.find(site))
    assert answer == (
        f"{site} belongs to python3.99, and this is {PYTHON}: run vllm-rocm-memory "
        "with that Python"
    )


def test_the_target_is_the_vllm_that_a_child_imports(child, small) -> None:
    program = "import json, vllm; print(json.dumps({'file': vllm.__file__}))"
    answer = child(program, target=small.target)
    assert answer == {"file": f"{small.root}/vllm/__init__.py"}


@pytest.mark.parametrize("place", ["PYTHONPATH", "folder"])
def test_the_probes_are_those_of_this_package(
    machine, small, tmp_path, monkeypatch, place
) -> None:
    decoy = tmp_path / "decoy"
    package = decoy / "vllm_rocm_memory/doctor"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "probe.py").write_text('print(\'{"problem": "the decoy"}\')')
    environment = {"PYTHONPATH": str(decoy)} if place == "PYTHONPATH" else {}
    monkeypatch.chdir(decoy)
    made = machine(
        environment=environment, target=small.target, probe_import=_probe_import
    )
    assert made.import_problem is None


def test_a_python_that_cannot_be_started_is_a_reason(child, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    answer = child("")
    assert "probe_double cannot be started: " in answer


def test_facts_of_another_kind_are_a_reason(tmp_path, monkeypatch) -> None:
    from vllm_rocm_memory.doctor import machine as module

    (tmp_path / "probe_double.py").write_text("print('{\"colour\": 1}')")
    for name in ("RUNTIME_PROBE", "SERVING_PROBE"):
        monkeypatch.setattr(module, name, "probe_double")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    made = Machine(environment=environment, serve_arguments=("MODEL",))
    with made:
        assert len(made.children) == 2
        found = (made.runtime, made.serving)
    for facts in found:
        assert isinstance(facts, str)
        assert "is not understood (TypeError" in facts
    assert Machine().serving == module.NO_ARGUMENTS


# --- a vLLM that does not import ------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "import no_such_library",
            "ModuleNotFoundError: No module named 'no_such_library'",
        ),
        ("raise SystemExit('not on this machine')", "SystemExit: not on this machine"),
        ("import os; os.kill(os.getpid(), 11)", "was ended by SIGSEGV"),
    ],
)
def test_a_vllm_that_cannot_be_imported_is_missing(doctor, small, text, words) -> None:
    small.apply()
    small.write("vllm/__init__.py", text)
    where = ["--target", str(small.root)]
    answer = doctor("--json", *where, probe_import=_probe_import)
    found = answer.check("base")
    assert (answer.code, found["state"]) == (1, "missing")
    assert "cannot be imported: " in found["summary"] and words in found["summary"]
    command = found["remedy"].split("`")[1]
    assert subprocess.run(["sh", "-c", command], stderr=subprocess.DEVNULL).returncode
    small.write("vllm/__init__.py", "")
    assert subprocess.run(["sh", "-c", command]).returncode == 0


def test_a_vllm_of_another_python_is_not_imported(machine, small, tmp_path) -> None:
    site = tmp_path / "lib/python3.99/site-packages"
    site.parent.mkdir(parents=True)
    small.root.rename(site)
    made = machine(target=Target.find(site), probe_import=_probe_import)
    assert made.import_problem is None and made.children == []


def test_modules_that_do_not_import_are_told(doctor, small, monkeypatch) -> None:
    monkeypatch.setattr(
        verification,
        "import_failures",
        lambda target, modules: {m: "no ray" for m in modules if m == "vllm.owned"},
    )
    small.apply()
    found = doctor("--json", "--target", str(small.root)).check("series")
    assert found["state"] == "success"
    assert found["details"] == ["vllm.owned does not import here: no ray"]


def test_an_unknown_base_names_some_files_a_line_each(
    doctor, small, monkeypatch
) -> None:
    strange = "; ".join(f"vllm/{n}.py has sha256 {n}" for n in range(7))

    def refuse(series, patch, target):
        raise UnknownBaseError(strange)

    monkeypatch.setattr(base, "recognise", refuse)
    found = doctor("--json", "--target", str(small.root)).check("base")
    assert found["state"] == "missing"
    assert found["details"][0] == "vllm/0.py has sha256 0"
    assert found["details"][4:] == ["vllm/4.py has sha256 4", "and 2 more"]
