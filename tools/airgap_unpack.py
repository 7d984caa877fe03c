# SPDX-License-Identifier: Apache-2.0
"""Put a bundle of wheels together on a host without network, as PREFIX/venv.

It lies beside the archives as unpack.py; standard library only. Archives may arrive
in several trips: each call keeps those that are there, and the one that finds the
last of them goes on. What an earlier call did is checked and not done again. A folder
that has anything under a name of ours, and not our mark, is left as it is.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import csv
import dataclasses
import errno
import fcntl
import hashlib
import io
import json
import lzma
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NoReturn

SCHEMA = 1
ARCHIVE = "wheelhouse.tar.xz"
CHUNK = 1 << 20
MISSING_ARCHIVES = 2
MARK = ".airgap"
"""What is made below PREFIX, once it has the mark."""

PROBE = """
import json, os, platform, sys, sysconfig
names = getattr(os, "confstr_names", {})
libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in names else None
library = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
library |= {os.path.join(p, "lib-dynload") for p in library}
library |= {sysconfig.get_config_var("DESTSHARED")}
print(json.dumps({
    "python": "%d.%d" % sys.version_info[:2],
    "implementation": sys.implementation.name,
    "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    "libc": libc or "",
    "machine": platform.machine(),
    "prefix": sys.prefix,
    "packages": [
        p for p in dict.fromkeys(sys.path) if os.path.isdir(p) and p not in library
    ],
}))
"""

# pip has what packaging offers, where that is not installed
COMPARE = """
import json, sys
from importlib import metadata
try:
    from packaging.version import Version
except ImportError:
    try:
        from pip._vendor.packaging.version import Version
    except ImportError:
        Version = str
lacking = []
for name, wanted in json.load(sys.stdin).items():
    try:
        have = metadata.version(name)
    except metadata.PackageNotFoundError:
        lacking.append(f"{name} is absent")
        continue
    try:
        right = wanted is None or Version(have) == Version(wanted)
    except (TypeError, ValueError):
        right = have == wanted
    if not right:
        lacking.append(f"{name} is {have} and not {wanted}")
print(json.dumps(lacking))
"""


class BundleError(Exception):
    """Something that the user can mend; the text says what and how."""


def say(text: str) -> None:
    print(text, flush=True)


def sha256_of(file: Path) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Where to write what the file is to hold; it has that all at once, or never."""
    partial = file.with_name(file.name + ".partial")
    yield partial
    partial.replace(file)


def write(file: Path, data: bytes) -> None:
    with replacing(file) as partial:
        partial.write_bytes(data)


# --- archives -----------------------------------------------------------------------


class Joined(io.RawIOBase):
    """Files one after the other, as one that can be read."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = list(files)
        self._current: IO[bytes] | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._current is None:
                if not self._files:
                    return 0
                self._current = self._files.pop(0).open("rb", buffering=0)
            data = self._current.read(len(buffer))
            if data:
                buffer[: len(data)] = data
                return len(data)
            self._current.close()
            self._current = None

    def close(self) -> None:
        if self._current is not None:
            self._current.close()
        super().close()


def members(archives: Sequence[Path]) -> Iterator[tuple[str, io.BufferedReader]]:
    """Name and contents of each wheel in the archives, to be read in this order."""
    with (
        io.BufferedReader(Joined(archives), CHUNK) as joined,
        lzma.LZMAFile(joined) as data,
        tarfile.open(fileobj=data, mode="r|") as tar,
    ):
        for member in tar:
            source = tar.extractfile(member)
            if not isinstance(source, io.BufferedReader):
                raise BundleError(f"{member.name} in the archives is not a file")
            yield member.name, source


@dataclasses.dataclass(frozen=True)
class Entry:
    """A file that the manifest lists."""

    name: str
    bytes: int
    sha256: str

    def is_at(self, file: Path) -> bool:
        return (
            file.is_file()
            and file.stat().st_size == self.bytes
            and sha256_of(file) == self.sha256
        )


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What the bundle is made of, and the host that it is for."""

    python: str
    platform: str
    archives: tuple[Entry, ...]
    wheels: tuple[Entry, ...]
    installed: int  # bytes of all members of the wheels
    host: Mapping[str, str | None]  # what the host brings, with the version if known
    sha256: str

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest in the folder, once this program is known to be of the bundle.

        Raises:
            BundleError: it is absent or damaged, or of another version.
        """
        file = folder / "manifest.json"
        remedy = "copy it from the bundle again"
        try:
            text = file.read_bytes()
            data = json.loads(text)
            schema = data["schema"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BundleError(f"{file}: {error!r}; {remedy}") from None
        if schema != SCHEMA:
            raise BundleError(
                f"{file}: its schema is {schema!r} and this program reads {SCHEMA}; "
                "take both from one bundle"
            )
        try:
            script = entry_of(data["unpack"])
            manifest = cls(
                python=data["python"],
                platform=data["platform"],
                archives=tuple(entry_of(row) for row in data["archives"]),
                wheels=tuple(entry_of(row) for row in data["wheels"]),
                installed=sum(row["installed"] for row in data["wheels"]),
                host=dict(data["host"].items()),
                sha256=hashlib.sha256(text).hexdigest(),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BundleError(f"{file}: damaged ({error!r}); {remedy}") from None
        program = folder / script.name
        if not script.is_at(program):
            have = sha256_of(program) if program.is_file() else "absent"
            raise BundleError(
                f"{program}: sha256 is {have}, and the manifest says {script.sha256}; "
                "take both from one bundle"
            )
        return manifest


def entry_of(row: Mapping[str, Any]) -> Entry:
    name = str(row["name"])
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not a file's name")
    return Entry(name, int(row["bytes"]), str(row["sha256"]))


def keep_archives(manifest: Manifest, source: Path, folder: Path) -> list[str]:
    """Copy what arrived to the folder; the names of those that did not.

    Raises:
        BundleError: one that arrived is damaged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = {archive.name for archive in manifest.archives}
    for old in folder.glob(f"{ARCHIVE}.*"):
        if old.name not in names:
            old.unlink()  # of an earlier bundle, or of a call that was killed
    missing = []
    for archive in manifest.archives:
        kept, arrived = folder / archive.name, source / archive.name
        if archive.is_at(kept):
            continue
        if not arrived.is_file():
            missing.append(archive.name)
            continue
        have = sha256_of(arrived)
        if have != archive.sha256:
            raise BundleError(
                f"{arrived} is damaged: sha256 is {have}, and the manifest says "
                f"{archive.sha256}; copy this archive from the bundle again, with the "
                "manifest beside it there"
            )
        with replacing(kept) as partial:
            shutil.copyfile(arrived, partial)
    return missing


def fill_wheelhouse(manifest: Manifest, archives: Path, wheelhouse: Path) -> None:
    """Have every wheel in the wheelhouse, and no other.

    Raises:
        BundleError: the archives do not hold what the manifest says.
    """
    wheelhouse.mkdir(parents=True, exist_ok=True)
    wanted = {wheel.name: wheel for wheel in manifest.wheels}
    files = [archives / archive.name for archive in manifest.archives]
    remedy = f"remove {archives} and unpack the whole bundle again"
    try:
        for name, source in members(files):
            wheel = wanted.pop(name, None)
            if wheel is None:
                raise BundleError(f"{name} is not in the manifest; {remedy}")
            with replacing(wheelhouse / name) as partial:
                with partial.open("wb") as out:
                    shutil.copyfileobj(source, out, CHUNK)
                have = sha256_of(partial)
                if have != wheel.sha256:
                    partial.unlink()
                    raise BundleError(
                        f"{name}: sha256 is {have}, and the manifest says "
                        f"{wheel.sha256}; {remedy}"
                    )
    except (lzma.LZMAError, tarfile.TarError, EOFError) as error:
        raise BundleError(f"the archives cannot be read ({error}); {remedy}") from None
    if wanted:
        raise BundleError(f"the archives lack {', '.join(wanted)}; {remedy}")
    names = {wheel.name for wheel in manifest.wheels}
    for file in (*wheelhouse.glob("*.whl"), *wheelhouse.glob("*.partial")):
        if file.name not in names:
            file.unlink()


# --- the host -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Host:
    """The interpreter that the wheels are for."""

    python: str
    packages: tuple[str, ...]  # the folders of its own packages

    def paths(self) -> str:
        """A .pth file of them, which heeds the .pth files that they have.

        A package that is installed in place, such as a PyTorch of one's own, is
        found through one.
        """
        return "".join(f"import site; site.addsitedir({p!r})\n" for p in self.packages)


def inspect(python: str, manifest: Manifest, prefix: Path) -> Host:
    """Look at the interpreter.

    Raises:
        BundleError: the bundle is not for it.
    """
    # what PYTHONPATH adds is the shell's, and not the interpreter's
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    try:
        result = subprocess.run(
            [python, "-c", PROBE],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        found = json.loads(result.stdout)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise BundleError(
            f"--python {python}: cannot be run ({error}); name a Python "
            f"{manifest.python} of this host"
        ) from None
    if Path(found["prefix"]).resolve() == (prefix / "venv").resolve():
        raise BundleError(
            f"--python {python}: belongs to the environment that is to be made; name "
            "the host's own Python"
        )
    version, implementation = found["python"], found["implementation"]
    if implementation != "cpython" or found["free_threaded"]:
        raise BundleError(
            f"--python {python}: the wheels are for CPython with its lock, and this is "
            f"{implementation}{' without' if found['free_threaded'] else ''}; name "
            "another interpreter"
        )
    if version != manifest.python:
        raise BundleError(
            f"--python {python}: this is Python {version}, and the bundle is for "
            f"{manifest.python}; name a Python {manifest.python} of this host, or pack "
            f"with --python {version}"
        )
    match = re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", manifest.platform)
    libc = re.fullmatch(r"glibc (\d+)\.(\d+).*", found["libc"])
    if (
        match is None
        or libc is None
        or (int(libc[1]), int(libc[2])) < (int(match[1]), int(match[2]))
        or found["machine"] != match[3]
    ):
        raise BundleError(
            f"this host has {found['libc'] or 'no glibc'} on {found['machine']}, and "
            f"the bundle is for {manifest.platform}; pack with a --platform that this "
            "host has"
        )
    return Host(python, tuple(found["packages"]))


def check_host(manifest: Manifest, python: str, where: str) -> None:
    """Look for what the bundle leaves to the host.

    Raises:
        BundleError: something is absent, or not of the version that was promised.
    """
    result = subprocess.run(
        [python, "-P", "-c", COMPARE],
        input=json.dumps(manifest.host),
        capture_output=True,
        text=True,
    )
    if result.returncode != 0:
        raise BundleError(
            f"{python} cannot list its packages:\n{result.stderr.strip()}\nmend it, or "
            "name another interpreter with --python"
        )
    lacking = json.loads(result.stdout)
    if lacking:
        raise BundleError(
            f"the bundle counts on packages that {where} lacks: {', '.join(lacking)}; "
            "install them for the host's Python, name the Python that has them with "
            "--python, or pack with --present of this host"
        )


def check_prefix(prefix: Path) -> None:
    """Raise where a folder is not ours to fill, before anything is written."""
    if prefix.exists() and not prefix.is_dir():
        raise BundleError(f"PREFIX {prefix}: is not a folder; name another")
    if (prefix / MARK).is_file() or not prefix.is_dir():
        return
    taken = sorted(path.name for path in prefix.iterdir())
    if taken:
        more = ", ..." if len(taken) > 3 else ""
        raise BundleError(
            f"PREFIX {prefix}: its {', '.join(taken[:3])}{more} came from no bundle; "
            "name an empty or a new folder"
        )


def check_room(manifest: Manifest, prefix: Path, archives: Path) -> None:
    """Raise before anything is written where it will not fit."""
    needed = sum(a.bytes for a in manifest.archives if not (archives / a.name).exists())
    wheelhouse = prefix / "wheelhouse"
    needed += sum(
        w.bytes for w in manifest.wheels if not (wheelhouse / w.name).exists()
    )
    if not (prefix / "venv" / "bundle.json").exists():
        needed += manifest.installed
    there = next(p for p in (prefix, *prefix.parents) if p.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise BundleError(
            f"PREFIX {prefix}: {needed / 2**20:.0f} MiB are needed and "
            f"{free / 2**20:.0f} MiB are free; make room, or name another PREFIX"
        )


# --- the environment ----------------------------------------------------------------


def site_packages(venv: Path) -> Path:
    (folder,) = venv.glob("lib/python3.*/site-packages")
    return folder


def record_of(wheel: str, names: Iterable[str]) -> str:
    """The member that lists the others.

    Raises:
        BundleError: there is none, or more than one.
    """
    records = [n for n in names if re.fullmatch(r"[^/]+\.dist-info/RECORD", n)]
    if len(records) != 1:
        raise BundleError(f"{wheel} has {len(records)} RECORDs in place of one")
    return records[0]


def is_installed(wheel: Path, site: Path) -> bool:
    """Whether every file that its RECORD lists is in place, with its sha256."""
    with zipfile.ZipFile(wheel) as members:
        record = record_of(wheel.name, members.namelist())
        shipped = members.read(record).decode()
    # what lies in NAME.data/ goes elsewhere, and may be rewritten there
    expected = {
        (path, digest)
        for path, digest, _ in csv.reader(shipped.splitlines())
        if ".data/" not in path and path != record
    }
    try:
        with (site / record).open(newline="") as text:
            rows = [(path, digest) for path, digest, _ in csv.reader(text)]
        return expected <= set(rows) and all(
            is_recorded(site / path, digest) for path, digest in rows if digest
        )
    except (OSError, ValueError):
        return False


def is_recorded(file: Path, digest: str) -> bool:
    algorithm, _, value = digest.partition("=")
    with file.open("rb") as source:
        have = hashlib.file_digest(source, algorithm).digest()
    return base64.urlsafe_b64encode(have).rstrip(b"=").decode() == value


def mark_of(manifest: Manifest, host: Host) -> str:
    return json.dumps([manifest.sha256, host.python, host.packages])


def is_made(manifest: Manifest, host: Host, wheelhouse: Path, venv: Path) -> bool:
    try:
        if (venv / "bundle.json").read_text() != mark_of(manifest, host):
            return False
        site = site_packages(venv)
        if (site / "host.pth").read_text() != host.paths():
            return False
    except (OSError, ValueError):
        return False
    if not (venv / "bin" / "python").exists():
        return False
    wheels = (wheelhouse / wheel.name for wheel in manifest.wheels)
    with ThreadPoolExecutor() as threads:
        return all(threads.map(lambda wheel: is_installed(wheel, site), wheels))


def make_venv(manifest: Manifest, host: Host, wheelhouse: Path, venv: Path) -> None:
    """An environment of these wheels above the host's own packages."""
    if venv.exists():
        shutil.rmtree(venv)
    run(
        [host.python, "-m", "venv", str(venv)],
        f"--python {host.python} cannot make a virtual environment; install its venv "
        "module (Debian: python3-venv), or name another interpreter",
    )
    # --system-site-packages would show the base interpreter's, where the host's
    # Python is itself a virtual environment
    (site_packages(venv) / "host.pth").write_text(host.paths())
    run(
        [
            *(str(venv / "bin" / "python"), "-m", "pip", "--isolated", "install"),
            *("--quiet", "--no-index", "--no-deps", "--ignore-installed"),
            *("--no-warn-script-location", "--disable-pip-version-check"),
            *(f"--find-links={wheelhouse}",),
            *(str(wheelhouse / wheel.name) for wheel in manifest.wheels),
        ],
        f"the wheels cannot be installed in {venv}",
    )
    write(venv / "bundle.json", mark_of(manifest, host).encode())


def run(command: list[str], failure: str) -> None:
    result = subprocess.run(
        command,
        # a host's configuration of pip may name an index or constraints
        env={**os.environ, "PIP_CONFIG_FILE": os.devnull},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # what outlives a killed call keeps the lock for as long as it writes
        close_fds=False,
    )
    if result.returncode != 0:
        raise BundleError(f"{result.stdout.strip()}\n{failure}")


def write_env(prefix: Path) -> None:
    """The file that a shell sources before `make`."""
    values = {
        "PIP_NO_INDEX": "1",
        # a URL: pip splits this value at spaces
        "PIP_FIND_LINKS": (prefix / "wheelhouse").as_uri(),
        "PYTHON": str(prefix / "venv" / "bin" / "python"),
    }
    lines = (f"export {name}={shlex.quote(v)}\n" for name, v in values.items())
    write(prefix / "env", "".join(lines).encode())


# --- the command --------------------------------------------------------------------


def unpack(source: Path, prefix: Path, python: str) -> int:
    manifest = Manifest.read(source)
    host = inspect(python, manifest, prefix)
    check_host(manifest, python, "this host")
    check_prefix(prefix)
    check_room(manifest, prefix, prefix / "archives")
    prefix.mkdir(parents=True, exist_ok=True)
    with (prefix / MARK).open("a") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BundleError(
                f"PREFIX {prefix}: another call unpacks there; wait for it, or name "
                "another folder"
            ) from None
        os.set_inheritable(held.fileno(), True)
        return fill(manifest, host, source, prefix)


def fill(manifest: Manifest, host: Host, source: Path, prefix: Path) -> int:
    archives, wheelhouse = prefix / "archives", prefix / "wheelhouse"
    venv, env = prefix / "venv", prefix / "env"
    env.unlink(missing_ok=True)  # none beside what is not whole
    if not all(wheel.is_at(wheelhouse / wheel.name) for wheel in manifest.wheels):
        missing = keep_archives(manifest, source, archives)
        total = len(manifest.archives)
        if missing:
            say(
                f"{total - len(missing)} of {total} archives; missing: "
                f"{', '.join(missing)}; bring them, with manifest.json and unpack.py, "
                "and run this again"
            )
            return MISSING_ARCHIVES
        say(f"{total} of {total} archives; unpacking {len(manifest.wheels)} wheels")
        fill_wheelhouse(manifest, archives, wheelhouse)
    if not is_made(manifest, host, wheelhouse, venv):
        say(f"installing {len(manifest.wheels)} wheels in {venv}")
        make_venv(manifest, host, wheelhouse, venv)
    check_host(manifest, str(venv / "bin" / "python"), str(venv))
    write_env(prefix)
    say(
        "done; next, in the project's folder:\n"
        f"  . {shlex.quote(str(env))} && make test-gpu"
    )
    return 0


class Parser(argparse.ArgumentParser):
    """Exits 1 on a wrong option: 2 says that archives are missing."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(1, f"unpack: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    if sys.version_info < (3, 11):  # noqa: UP036  (whatever the host calls python3)
        print(
            f"unpack: this is Python {sys.version.split()[0]}; run it with Python 3.11 "
            "or newer",
            file=sys.stderr,
        )
        return 1
    parser = Parser(
        description="Unpack a bundle of wheels; exits 2 while archives are missing.",
        allow_abbrev=False,
    )
    parser.add_argument("prefix", metavar="PREFIX", type=Path, help="folder to fill")
    parser.add_argument(
        "--python",
        default=sys.executable,
        help="the host's Python that has PyTorch (default: the one that runs this)",
    )
    options = parser.parse_args(arguments)
    source = Path(__file__).resolve().parent
    try:
        return unpack(source, options.prefix.absolute(), options.python)
    except BundleError as error:
        print(f"unpack: {error}", file=sys.stderr)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        print(
            f"unpack: PREFIX {options.prefix}: {error}; "
            f"{'make room there' if is_full else 'see to that'} or name another "
            "PREFIX, and run this again",
            file=sys.stderr,
        )
    return 1


if __name__ == "__main__":
    sys.exit(main())
