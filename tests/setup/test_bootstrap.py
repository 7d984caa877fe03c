# SPDX-License-Identifier: Apache-2.0
"""The set-up trusts nothing: what is missing or damaged is found, and only that."""

import fcntl
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

import bootstrap
import pytest

SERIES_MODULES = (
    "cumem_allocator.cpython-311.so",
    "v1/simple_kv_offload/pitched_copies.cpython-311.so",
)
"""What the series adds to a vLLM that its user has applied it to."""


@pytest.fixture
def environment(tmp_path, monkeypatch) -> Path:
    """An empty virtual environment in place of the checkout's own; site-packages."""
    target = tmp_path / ".venv"
    venv.create(target, with_pip=False)
    monkeypatch.setattr(bootstrap, "VENV", target)
    monkeypatch.setattr(bootstrap, "PYTHON", target / "bin" / "python")
    return bootstrap.site_packages()


def add_distribution(site: Path, name: str, version: str) -> Path:
    """A package of one module; returns the module."""
    module = site / f"{name.lower()}.py"
    module.write_text("VALUE = 1\n")
    dist_info = site / f"{name}-{version}.dist-info"
    dist_info.mkdir()
    (dist_info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (dist_info / "RECORD").write_text(
        f"{module.name},sha256=x,{module.stat().st_size}\n"
        f"{dist_info.name}/METADATA,,\n{dist_info.name}/RECORD,,\n"
        f"__pycache__/{module.stem}.cpython-311.pyc,,\n"  # pip lists these; not needed
    )
    return module


WANTED = {"some-name": "1.0", "other": "2.0"}


def test_what_is_whole_is_not_missing(environment):
    add_distribution(environment, "Some_Name", "1.0")
    add_distribution(environment, "other", "2.0+cpu")  # a local version satisfies a pin
    assert bootstrap.missing(WANTED) == []


def test_a_file_that_grew_is_not_damaged(environment):
    """Some machines add their own certificates to a package's."""
    add_distribution(environment, "other", "2.0")
    module = add_distribution(environment, "some_name", "1.0")
    module.write_text(module.read_text() + "MORE = 1\n")
    assert bootstrap.missing(WANTED) == []


@pytest.mark.parametrize("damage", ["gone", "short", "no record", "version", "absent"])
def test_damage_is_missing(environment, damage):
    add_distribution(environment, "other", "2.0")
    version = "0.9" if damage == "version" else "1.0"
    module = add_distribution(environment, "some_name", version)
    if damage == "gone":
        module.unlink()
    elif damage == "short":
        module.write_text("VALUE =")
    elif damage == "no record":
        (environment / "some_name-1.0.dist-info" / "RECORD").unlink()
    elif damage == "absent":
        WANTED_HERE = {**WANTED, "third": "3.0"}
        assert bootstrap.missing(WANTED_HERE) == ["third==3.0"]
        return
    assert bootstrap.missing(WANTED) == ["some-name==1.0"]


@pytest.fixture
def gpu_machine(tmp_path, monkeypatch) -> Path:
    """A machine whose interpreter has vLLM on a ROCm torch; its site-packages."""
    site = tmp_path / "machine"
    for name in ("torch", "vllm"):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text("")
    (site / "torch" / "version.py").write_text(
        "cuda: Optional[str] = None\nhip: Optional[str] = '7.2.1'\n"
    )
    (site / "vllm" / "_C.abi3.so").write_bytes(b"binary")
    for module in SERIES_MODULES:
        (site / "vllm" / module).parent.mkdir(parents=True, exist_ok=True)
        (site / "vllm" / module).write_bytes(b"ours")
    dist_info = site / "vllm-0.33.0.dist-info"
    dist_info.mkdir()
    (dist_info / "METADATA").write_text("Name: vllm\nVersion: 0.33.0\n")
    (dist_info / "RECORD").write_text(
        f"vllm/__init__.py,,\n{dist_info.name}/METADATA,,\n"
    )
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(bootstrap, "gpu_of_machine", lambda: "ROCm")
    for name in ("torch", "vllm"):
        # what this test's own interpreter has imported must not answer for the machine
        monkeypatch.delitem(sys.modules, name, raising=False)
    return site


def test_a_machine_with_its_own_vllm_keeps_it(gpu_machine, environment):
    machine = bootstrap.machine_vllm()
    assert machine is not None
    assert (machine.version, machine.gpu) == ("0.33.0", "ROCm")
    setup = bootstrap.Setup(machine)
    assert [step for step, _ in setup.steps()] == [
        *("venv", "machine", "tools", "build", "series")
    ]

    setup = bootstrap.Setup(machine, marks=bootstrap.VENV / "setup.json")
    setup.make("venv")
    assert setup.holds("venv")
    assert not setup.holds("machine")
    setup.make("machine")
    assert setup.holds("machine")

    # a copy that lost a file, or is older than the machine's, is made again
    (bootstrap.site_packages() / "vllm" / "__init__.py").unlink()
    assert not setup.holds("machine")
    setup.make("machine")
    (gpu_machine / "vllm" / "core.py").write_text("# built again\n")
    assert not setup.holds("machine")
    setup.make("machine")
    assert setup.holds("machine")

    # another torch asks for another build of the extension, in the same .venv
    built_from = setup.build_sources()
    (gpu_machine / "torch" / "version.py").write_text("hip = '7.2.2'\n")
    newer = bootstrap.Setup(bootstrap.machine_vllm(), marks=setup.marks)
    assert newer.holds("venv")
    assert newer.build_sources() != built_from

    # what the machine has at the pinned version is not wanted again; a damaged one in
    # .venv hides it
    add_distribution(gpu_machine, "some_name", "1.0")
    assert bootstrap.missing(WANTED, machine) == ["other==2.0"]
    module = add_distribution(bootstrap.site_packages(), "some_name", "1.0")
    module.unlink()
    assert bootstrap.missing(WANTED, machine) == ["some-name==1.0", "other==2.0"]

    # the copy comes before the machine's own vLLM, its torch is seen, and neither
    # the machine's torch nor its vLLM was written to
    script = "import vllm, torch; print(vllm.__file__); print(torch.__file__)"
    python = bootstrap.VENV / "bin" / "python"
    lines = subprocess.run(
        [python, "-c", script], capture_output=True, text=True, check=True, cwd="/"
    ).stdout.splitlines()
    site = bootstrap.site_packages()
    assert lines == [
        str(site / "vllm" / "__init__.py"),
        str(gpu_machine / "torch" / "__init__.py"),
    ]
    assert (site / "vllm" / "_C.abi3.so").resolve() == gpu_machine / "vllm/_C.abi3.so"
    # the series refuses to replace a symbolic link
    for module in SERIES_MODULES:
        ours = site / "vllm" / module
        assert not ours.is_symlink() and ours.read_bytes() == b"ours"
    assert not (site / "torch").exists()
    assert not (site / "vllm" / "__init__.py").samefile(
        gpu_machine / "vllm" / "__init__.py"
    )


@pytest.mark.parametrize(
    ("gpu", "torch_version"),
    [
        (None, "hip = '7.2.1'\n"),  # a GPU build without a GPU
        ("CUDA", "hip = '7.2.1'\n"),  # a GPU of the other kind
        ("ROCm", "cuda = None\nhip = None\n"),  # a CPU build beside a GPU
    ],
)
def test_other_machines_get_the_cpu_build(gpu_machine, monkeypatch, gpu, torch_version):
    monkeypatch.setattr(bootstrap, "gpu_of_machine", lambda: gpu)
    (gpu_machine / "torch" / "version.py").write_text(torch_version)
    assert bootstrap.machine_vllm() is None


def test_a_machine_vllm_that_is_no_wheel_is_explained(gpu_machine):
    (gpu_machine / "vllm-0.33.0.dist-info" / "RECORD").write_text(
        "vllm/__init__.py,,\n"
    )
    with pytest.raises(bootstrap.SetupError, match="install it with pip"):
        bootstrap.machine_vllm()


@pytest.mark.parametrize("gone", ["lib", "bin/python", "site-packages/pip"])
def test_a_broken_venv_is_made_again(environment, tmp_path, gone):
    setup = bootstrap.Setup(None, marks=bootstrap.VENV / "setup.json")
    setup.make("venv")
    assert setup.holds("venv")
    (lost,) = bootstrap.VENV.glob(f"lib/python3.*/{gone}" if "pip" in gone else gone)
    shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    assert not setup.holds("venv")


def test_what_outlives_a_killed_set_up_keeps_the_lock(tmp_path, environment):
    """Else the next set-up would write into the same .venv beside it."""
    lock = tmp_path / "lock"
    script = (
        "import fcntl, os, sys, bootstrap\n"
        f"bootstrap.VENV = bootstrap.Path({str(bootstrap.VENV)!r})\n"
        f"held = open({str(lock)!r}, 'w')\n"
        "os.set_inheritable(held.fileno(), True)\n"
        "fcntl.flock(held, fcntl.LOCK_EX)\n"
        "bootstrap.run([sys.executable, '-c', 'import time; time.sleep(3)'])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=Path(bootstrap.__file__).parent
    )
    deadline = time.monotonic() + 30
    while not (bootstrap.VENV / "setup.log").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    process.kill()
    process.wait(10)
    with lock.open("w") as mine:
        with pytest.raises(BlockingIOError):
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(mine, fcntl.LOCK_EX)  # and lets it go at its end


def test_a_gpu_without_a_vllm_is_explained():
    text = bootstrap.describe(None, "ROCm")
    assert "simulator" in text and "ROCm GPU" in text and "PYTHON=" in text


@pytest.mark.parametrize(
    "words",
    ["No matching distribution found for torch", "ResolutionImpossible: for help"],
)
def test_torch_falls_back_from_source_to_source(monkeypatch, capsys, words):
    """CPU build where pip looks, then PyTorch's index, then what PyPI has."""
    asked: list[list[str]] = []

    def no_cpu_build(wanted, *options):
        asked.append([*wanted, *options])
        if "+cpu" in wanted[0]:
            raise bootstrap.SetupError(f"ERROR: {words}")

    monkeypatch.setattr(bootstrap, "install", no_cpu_build)
    bootstrap.install_torch("2.13.0")
    assert [command[0] for command in asked] == [
        *("torch==2.13.0+cpu", "torch==2.13.0+cpu", "torch==2.13.0")
    ]
    assert bootstrap.TORCH_CPU_INDEX in asked[1]
    assert "CUDA build" in capsys.readouterr().out


def test_another_failure_is_not_taken_for_a_missing_build(monkeypatch):
    def no_space(wanted, *options):
        raise bootstrap.SetupError("ERROR: No space left on device")

    monkeypatch.setattr(bootstrap, "install", no_space)
    with pytest.raises(bootstrap.SetupError, match="No space left"):
        bootstrap.install_torch("2.13.0")


def test_a_failing_command_shows_its_end_and_its_log(environment):
    script = "print('first'); raise SystemExit('the cause')"
    with pytest.raises(bootstrap.SetupError, match=r"the cause(.|\n)*setup\.log"):
        bootstrap.run([sys.executable, "-c", script])
    assert "first" in (bootstrap.VENV / "setup.log").read_text()


def test_checking_a_whole_environment_is_quick():
    """On the checkout's own environment, which is whole while the tests run."""
    assert Path(sys.prefix) == bootstrap.VENV, "run the tests with make test"
    made_with = bootstrap.Setup(None).marked("python")
    started = time.monotonic()
    result = subprocess.run(
        [made_with, bootstrap.__file__, "--check"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    seconds = time.monotonic() - started
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert seconds < 3


def test_the_environment_does_not_remake_itself(capsys):
    """Its own interpreter would be removed from under the running set-up."""
    assert bootstrap.main([]) == 1
    assert "make setup" in capsys.readouterr().err
