# SPDX-License-Identifier: Apache-2.0
"""The set-up trusts nothing: what is missing or damaged is found, and only that."""

import dataclasses
import fcntl
import os
import shutil
import subprocess
import sys
import time
import venv
import zipfile
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
    monkeypatch.setattr(bootstrap, "gpus_of_machine", lambda: ("ROCm",))
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
    paths = bootstrap.site_packages() / "machine.pth"
    written = paths.read_text()
    paths.write_text(f"{gpu_machine}\n")
    assert not setup.holds("venv")
    paths.write_text(written)
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

    # the copy comes before the machine's own vLLM, the checkout before a release of
    # it that the machine has, the machine's torch is seen and so is what it has
    # installed in place, and neither torch nor its vLLM was written to
    (gpu_machine / "vllm_rocm_memory").mkdir()
    (gpu_machine / "vllm_rocm_memory" / "__init__.py").write_text("")
    in_place = gpu_machine.with_name("a checkout")
    in_place.mkdir()
    (in_place / "in_place.py").write_text("")
    (gpu_machine / "in_place.pth").write_text(f"{in_place}\n")
    script = (
        "import vllm, torch, vllm_rocm_memory, in_place\n"
        "for module in (vllm, torch, vllm_rocm_memory, in_place):\n"
        "    print(module.__file__)\n"
    )
    python = bootstrap.VENV / "bin" / "python"
    lines = subprocess.run(
        [python, "-c", script], capture_output=True, text=True, check=True, cwd="/"
    ).stdout.splitlines()
    site = bootstrap.site_packages()
    assert lines == [
        str(site / "vllm" / "__init__.py"),
        str(gpu_machine / "torch" / "__init__.py"),
        str(bootstrap.ROOT / "vllm_rocm_memory" / "__init__.py"),
        str(in_place / "in_place.py"),
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


OFFLINE = """
import sys
from pathlib import Path
import bootstrap

target, requirements = map(Path, sys.argv[1:])
bootstrap.gpus_of_machine = lambda: ("ROCm",)
bootstrap.VENV, bootstrap.PYTHON = target, target / "bin" / "python"
bootstrap.REQUIREMENTS = requirements
machine = bootstrap.machine_vllm()
assert machine is not None

def setup(purpose):
    return bootstrap.Setup(machine, target / "setup.json", purpose)

setup("serve").make("venv")
setup("serve").make("machine")
assert setup("serve").holds("machine")
for purpose in ("serve", "test-gpu"):
    assert not setup(purpose).holds("tools")
    setup(purpose).make("tools")
    assert setup(purpose).holds("tools")
    there = bootstrap.site_packages().glob("tool_*.dist-info")
    print(purpose, *sorted(path.name for path in there))
assert setup("serve").holds("tools")
print("all lacks", *bootstrap.missing(setup("all").tools(), machine))
"""


def add_wheel(folder: Path, name: str, version: str) -> None:
    metadata = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": "",
        f"{metadata}/METADATA": (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        ),
        f"{metadata}/WHEEL": (
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    files[f"{metadata}/RECORD"] = "".join(f"{path},,\n" for path in files)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


def test_without_an_index_a_purpose_takes_what_it_needs_and_no_more(
    gpu_machine, tmp_path
):
    """As on a GPU host without network: vLLM in an environment of its own that sees
    the machine's torch, and a folder of wheels."""
    outer, wheels, requirements = (tmp_path / n for n in ("outer", "wheels", "pins"))
    venv.create(outer, with_pip=False)
    (site,) = outer.glob("lib/python3.*/site-packages")
    for name in ("vllm", "vllm-0.33.0.dist-info"):
        shutil.move(gpu_machine / name, site)
    (site / "host.pth").write_text(f"{gpu_machine}\n")
    # the host has one of the tools, at another version
    add_distribution(gpu_machine, "tool_a", "0.9")
    wheels.mkdir()
    add_wheel(wheels, "tool_a", "1.0")
    add_wheel(wheels, "tool_b", "2.0")
    requirements.mkdir()
    for name, pin in (("build", "a==1.0"), ("gpu-tests", "b==2.0"), ("dev", "c==3.0")):
        (requirements / f"{name}.txt").write_text(f"# a comment\ntool-{pin}\n")

    done = subprocess.run(
        [outer / "bin" / "python", "-c", OFFLINE, tmp_path / "inner", requirements],
        cwd=Path(bootstrap.__file__).parent,
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line[0] != " "] == [
        "serve tool_a-1.0.dist-info",
        "test-gpu tool_a-1.0.dist-info tool_b-2.0.dist-info",
        "all lacks tool-c==3.0",
    ]
    assert (gpu_machine / "tool_a-0.9.dist-info").exists()


@pytest.mark.parametrize(
    ("command", "purpose"),
    [("serve", "serve"), ("test-gpu", "test-gpu"), ("test", "all"), ("lint", "all")],
)
def test_each_command_sets_up_what_it_needs(command, purpose, monkeypatch):
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    make = ["make", "--dry-run", command, f"PYTHON={sys.executable}"]
    said = subprocess.check_output(make, cwd=bootstrap.ROOT, text=True)
    assert f'"{sys.executable}" tools/bootstrap.py --for {purpose}\n' in said

    checked = []
    monkeypatch.setattr(bootstrap, "check_tools", lambda: None)
    monkeypatch.setattr(bootstrap, "machine_vllm", lambda: None)
    monkeypatch.setattr(
        bootstrap.Setup, "lacking", lambda self: checked.append(self.purpose) or []
    )
    assert bootstrap.main(["--check", "--for", purpose]) == 0
    assert bootstrap.main(["--check"]) == 0
    assert checked == [purpose, "all"]


def test_each_tool_is_for_one_purpose():
    files = bootstrap.GROUPS["all"]
    assert set(bootstrap.GROUPS["serve"]) < set(bootstrap.GROUPS["test-gpu"])
    assert set(bootstrap.GROUPS["test-gpu"]) < set(files)
    names = [name for file in files for name in bootstrap.pins(file)]
    assert len(names) == len(set(names))
    there = {path.name for path in bootstrap.REQUIREMENTS.glob("*.txt")}
    assert {*files, "engine.txt", "engine-torch.txt"} <= there


@pytest.mark.parametrize(
    ("gpus", "torch_version"),
    [
        ((), "hip = '7.2.1'\n"),  # a GPU build without a GPU
        (("CUDA",), "hip = '7.2.1'\n"),  # a GPU of the other kind
        (("ROCm",), "cuda = None\nhip = None\n"),  # a CPU build beside a GPU
    ],
)
def test_other_machines_get_the_cpu_build(
    gpu_machine, monkeypatch, gpus, torch_version
):
    monkeypatch.setattr(bootstrap, "gpus_of_machine", lambda: gpus)
    (gpu_machine / "torch" / "version.py").write_text(torch_version)
    assert bootstrap.machine_vllm() is None


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ((), ()),
        (("kfd",), ("ROCm",)),
        (("nvidia0",), ("CUDA",)),
        (("nvidiactl",), ("CUDA",)),
        (("kfd", "nvidia0"), ("ROCm", "CUDA")),
    ],
)
def test_the_gpus_of_a_machine(monkeypatch, names, found):
    there = {f"/dev/{name}" for name in names}
    monkeypatch.setattr(Path, "exists", lambda path: str(path) in there)
    assert bootstrap.gpus_of_machine() == found


@pytest.mark.parametrize(
    ("torch_version", "gpu"), [("cuda = '13.0'\n", "CUDA"), ("hip = '7.2'\n", "ROCm")]
)
def test_of_two_kinds_of_gpu_torch_decides(
    gpu_machine, monkeypatch, torch_version, gpu
):
    """As with an NVIDIA card beside the graphics of an AMD processor."""
    monkeypatch.setattr(bootstrap, "gpus_of_machine", lambda: ("ROCm", "CUDA"))
    (gpu_machine / "torch" / "version.py").write_text(torch_version)
    machine = bootstrap.machine_vllm()
    assert machine is not None and machine.gpu == gpu


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
    text = bootstrap.describe(None, ["ROCm"])
    assert "simulator" in text and "a ROCm GPU" in text and "PYTHON=" in text
    assert "a ROCm or CUDA torch" in bootstrap.describe(None, ["ROCm", "CUDA"])
    assert "GPU" not in bootstrap.describe(None, [])


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


def test_programs_of_the_machines_packages_are_found(gpu_machine, environment):
    """ninja at the pinned version, say, of an interpreter that PYTHON= has named."""
    machine = bootstrap.machine_vllm()
    site, dist = (
        str(gpu_machine / "env" / folder)
        for folder in ("lib/python3.11/site-packages", "lib/python3/dist-packages")
    )
    machine = dataclasses.replace(machine, site=(site, "/nowhere/lib/a/b", dist))
    (gpu_machine / "env" / "bin").mkdir(parents=True)
    assert set(machine.scripts()) == {str(gpu_machine / "env" / "bin")}
    program = gpu_machine / "env" / "bin" / "only-there"
    program.write_text("#!/bin/sh\necho found it\n")
    program.chmod(0o755)
    bootstrap.run(["sh", "-c", "only-there"], machine.scripts())
    assert "\nfound it\n" in (bootstrap.VENV / "setup.log").read_text()


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
