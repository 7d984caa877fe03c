# SPDX-License-Identifier: Apache-2.0
"""The command line: exit codes, sentences, JSON."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_rocm_memory import cli

pytestmark = pytest.mark.usefixtures("unverified")

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def command(small, monkeypatch, capsys):
    """Run a command on the small target; returns its exit code, stdout and stderr."""
    monkeypatch.setattr(cli, "load", lambda: small.series)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object, target: Path | None = None):
        where = ["--target", str(target or small.root)]
        with pytest.raises(SystemExit) as ended:
            cli.main([*map(str, arguments), *where])
        return (ended.value.code, *capsys.readouterr())

    return run


def refused(result, sentence: str) -> None:
    code, output, error = result
    assert (code, output) == (2, "")
    assert error.count("\n") == 1
    assert re.search(sentence, error), error


def test_status_exit_codes(command):
    code, output, _ = command("status")
    assert code == 1
    assert re.search(r"first +│ not applied │ base 1\.0", output)
    assert command("apply", "--only", "first")[0] == 0
    assert command("status")[0] == 1
    assert command("status", "--only", "first")[0] == 0
    assert command("apply")[0] == 0
    code, output, _ = command("status")
    assert code == 0
    assert re.search(r"second +│ applied +│", output)


def test_status_as_json(command, small):
    code, output, _ = command("status", "--json", "--only", "second")
    assert json.loads(output) == {
        "target": str(small.root / "vllm"),
        "ok": False,
        "patches": [
            {
                "name": "second",
                "title": "Say goodbye later",
                "state": "not applied",
                "reason": "base 1.0",
            }
        ],
    }
    command("apply")
    code, output, _ = command("status", "--json")
    assert code == 0
    answer = json.loads(output)
    assert answer["ok"]
    assert [patch["state"] for patch in answer["patches"]] == ["applied"] * 2


def test_apply_and_revert_say_what_they_do(command, small):
    code, output, error = command("apply", "--dry-run")
    assert (code, error) == (0, "")
    assert "would change vllm/pkg/extra.py\n" in output
    assert output.endswith(f"{small.root}/vllm would have first, second\n")
    code, output, error = command("apply")
    assert "changed vllm/pkg/extra.py\n" in output
    assert output.endswith(f"{small.root}/vllm has first, second\n")
    code, output, error = command("revert", "--json")
    answer = json.loads(output)
    assert (answer["patches"], answer["verified"]) == ([], True)
    assert "vllm/pkg/extra.py" in answer["changed"]


def test_not_verified_is_a_warning(command, monkeypatch):
    monkeypatch.setattr(
        "vllm_rocm_memory.series.verification.import_failures",
        lambda target, modules: dict.fromkeys(modules, "no torch"),
    )
    code, output, error = command("apply")
    assert (code, error) == (0, "warning: not verified by import: no torch\n")
    code, output, _ = command("apply", "--json")
    answer = json.loads(output)
    assert (answer["verified"], answer["reason"]) == (False, "no torch")


def test_what_does_not_import_here_is_a_warning(command, monkeypatch):
    monkeypatch.setattr(
        "vllm_rocm_memory.series.verification.import_failures",
        lambda target, modules: {m: "no ray" for m in modules if m == "vllm.envs"},
    )
    sentence = "vllm.envs does not import here: no ray"
    assert command("apply")[::2] == (0, f"warning: not verified: {sentence}\n")
    code, output, error = command("apply", "--json")
    answer = json.loads(output)
    assert (code, answer["verified"], answer["reason"], error) == (0, True, None, "")
    assert answer["not_importable"] == {"vllm.envs": "no ray"}
    code, output, _ = command("status", "--json")
    first, second = (patch["reason"] for patch in json.loads(output)["patches"])
    assert (code, first, second) == (0, "base 1.0", f"base 1.0; {sentence}")


def test_upstream_has_it_leaves_nothing_to_do(command, small):
    user = small.root / "vllm" / "pkg" / "user.py"
    user.write_text(f"{user.read_text()}\n    def wait(self):\n        pass\n")
    code, output, _ = command("apply", "--only", "second")
    assert code == 0
    assert "second: upstream already has it (found User.wait in" in output
    assert command("status", "--only", "second")[0] == 0


def test_diff_is_plain(command):
    code, output, error = command("diff")
    assert (code, error) == (0, "")
    first = "diff --git a/vllm/envs.py b/vllm/envs.py\n--- a/vllm/envs.py\n+++ b"
    assert output.startswith(first)


def test_diff_does_not_depend_on_the_locale(command, small):
    owned = small.series.files / "vllm" / "pkg" / "owned.py"
    owned.write_text('def shout(word):\n    return word + "\u2014\x0c"\n')
    process = subprocess.run(
        [sys.executable, "-c", _DIFF, str(small.definition), str(small.root)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=60,
    )
    assert process.returncode == 0, process.stderr
    assert '+    return word + "\u2014\x0c"\n'.encode() in process.stdout


def test_diff_into_a_closed_pipe_is_quiet(command, small):
    late = small.series.files / "vllm" / "new" / "deep" / "late.py"
    late.write_text("LATE = True\n" * 100_000)
    arguments = f"{small.definition} {small.root}"
    process = subprocess.run(
        f"{sys.executable} -c '{_DIFF}' {arguments} | head -1",
        shell=True,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.stdout == "diff --git a/vllm/envs.py b/vllm/envs.py\n"
    assert process.stderr == ""


_DIFF = """
import sys
from pathlib import Path
from vllm_rocm_memory import cli
from vllm_rocm_memory.series.definition import load
definition = Path(sys.argv[1])
cli.load = lambda: load(definition, definition.with_name("files"))
cli.main(["diff", "--target", sys.argv[2]])
"""


def test_ctrl_c_is_no_traceback(command, small, snapshot, monkeypatch):
    def stop(target, modules):
        raise KeyboardInterrupt

    monkeypatch.setattr("vllm_rocm_memory.series.verification.import_failures", stop)
    before = snapshot(small.root)
    assert command("apply") == (130, "", "vllm-rocm-memory: interrupted\n")
    assert snapshot(small.root) == before


CASES = {
    "does not exist": (lambda root: root / "none", "none does not exist$"),
    "not vLLM": (lambda root: root / "vllm" / "pkg", "is not vLLM: neither a folder"),
}


@pytest.mark.parametrize("name", ["status", "apply", "revert", "diff"])
@pytest.mark.parametrize("case", CASES)
def test_a_target_that_is_none(command, small, snapshot, name, case):
    make, sentence = CASES[case]
    before = snapshot(small.root)
    refused(command(name, target=make(small.root)), sentence)
    assert snapshot(small.root) == before


def test_a_drifted_target(command, small, snapshot):
    command("apply")
    (small.root / "vllm" / "pkg" / "user.py").write_text("mine = 1\n")
    before = snapshot(small.root)
    sentence = "user.py was changed after the series was applied .* or reinstall vLLM"
    refused(command("apply"), sentence)
    refused(command("revert"), sentence)
    code, output, _ = command("status", "--json")
    assert code == 1
    assert json.loads(output)["patches"][0]["state"] == "drifted"
    assert snapshot(small.root) == before


def test_an_unknown_base(command, small, snapshot):
    user = small.root / "vllm" / "pkg" / "user.py"
    user.write_text(f"{user.read_text()}# another\n")
    before = snapshot(small.root)
    for name in ("apply", "diff"):
        refused(command(name), r"user\.py has sha256 \w{64}, expected \w{64} \(1\.0\)")
    assert command("status")[0] == 1
    assert snapshot(small.root) == before
    assert command("apply", "--allow-unknown-base")[0] == 0


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_target_that_cannot_be_written(command, small, snapshot, faults, code):
    before = snapshot(small.root)
    faults.at, faults.dead = 1, True
    faults.error = lambda: OSError(code, os.strerror(code), str(small.root))
    refused(command("apply"), f"{small.root} cannot be changed .{os.strerror(code)}")
    assert snapshot(small.root) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_a_target_without_permission(command, small, snapshot):
    before = snapshot(small.root)
    package = small.root / "vllm" / "pkg"
    package.chmod(0o555)
    try:
        refused(command("apply"), "cannot be changed .Permission denied")
        assert snapshot(small.root) == before
    finally:
        package.chmod(0o755)


def read_only_bind_works() -> bool:
    unshare = shutil.which("unshare")
    return (
        bool(unshare)
        and not subprocess.run(
            [str(unshare), "--mount", "true"], capture_output=True
        ).returncode
    )


@pytest.mark.skipif(not read_only_bind_works(), reason="needs a mount of its own")
@pytest.mark.parametrize("part", ["vllm", "vllm/pkg"])
def test_a_target_on_a_read_only_mount(small, snapshot, part):
    before = snapshot(small.root)
    script = f"""
mount --bind {small.root}/{part} {small.root}/{part}
mount -o remount,ro,bind {small.root}/{part}
exec {sys.executable} -c "
from pathlib import Path
from vllm_rocm_memory import cli
from vllm_rocm_memory.series.definition import load
definition = Path('{small.definition}')
cli.load = lambda: load(definition, definition.with_name('files'))
cli.main(['apply', '--target', '{small.root}'])"
"""
    process = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", script],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    refused((process.returncode, process.stdout, process.stderr), "cannot be changed")
    assert snapshot(small.root) == before


def reader_gone():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.parametrize("words", [["status"], ["status", "--json"], ["diff"]])
@pytest.mark.parametrize(
    ("make", "code", "error"),
    [
        (reader_gone, 0, ""),
        (
            lambda: Path("/dev/full").open("w"),  # noqa: SIM115
            2,
            "vllm-rocm-memory: error: standard output: No space left on device\n",
        ),
        # As `>&-` leaves it.
        (lambda: None, None, ""),
    ],
    ids=["reader gone", "full", "closed"],
)
def test_the_output_may_go_nowhere(command, monkeypatch, words, make, code, error):
    output = make()
    monkeypatch.setattr(sys, "stdout", output)
    expected = {"status": 1, "diff": 0}[words[0]] if code is None else code
    assert command(*words) == (expected, "", error)
    if output is not None:
        output.close()


def test_an_error_without_a_file_is_the_targets(command, monkeypatch):
    def fail(series, patch, target):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("vllm_rocm_memory.series.operations.recognise", fail)
    refused(command("status"), "error: the target: Input/output error")


def test_a_wrong_patch_name(command):
    refused(command("status", "--only", "third"), "--only third: no such patch")


def test_a_wrong_word_is_refused_by_argparse(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["aply"])
    assert ended.value.code == 2
    assert "invalid choice: 'aply'" in capsys.readouterr().err


def test_report_is_a_command(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", "--url", "nowhere"])
    assert ended.value.code == 2
    assert "--url nowhere is no address" in capsys.readouterr().err


def test_no_vllm_at_all(tmp_path):
    process = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _BARE, str(REPOSITORY)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    refused(
        (process.returncode, process.stdout, process.stderr),
        "this Python has no vLLM installed: name one with --target",
    )


# Without site-packages there is our package and the checkout's vllm/, no vLLM.
_BARE = """
import sys
sys.path.append(sys.argv[1])
from vllm_rocm_memory.cli import main
main(["status"])
"""
