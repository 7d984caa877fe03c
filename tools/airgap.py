# SPDX-License-Identifier: Apache-2.0
"""Bundle the wheels that a GPU host without network needs; see docs/airgap.md.

Note [From requirements to archives]
uv resolves for the host's Python and platform. What the host has is a preference
there and no constraint: a version of the host's that will do is chosen and stays
out of the bundle, and one that will not do is superseded by a wheel. What is excluded
or said to be the host's is not resolved at all, whatever version anybody asks for. A
version with a local part, such as 0.33.0+rocm700, is a build that no index has: where
the requirements themselves allow it, it counts as the host's, dependencies included.

The manifest lists what stayed out because the host has it, and unpack.py looks for it
there. What is excluded is looked for nowhere: it is to be done without.

The wheels travel as one tar, compressed and cut into archives. A wheel that has to
lose members, because it is larger than what can be carried, is written anew: stored,
so that xz and not deflate compresses its members, and with a RECORD that lists what
it still has. Every other wheel is the index's to the byte.

Note [Checked, not remembered]
Whatever lies in OUT from an earlier call counts only if its sha256 is right. Files
come into being under another name. The tar is compressed in blocks, each a stream of
its own, and a block's result is kept by the sha256 of its content: a call after a kill
or with one more wheel compresses what is new. A resolution is kept as long as its
settings are the same. At the end the archives are read as the host will read them.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import csv
import dataclasses
import fcntl
import fnmatch
import functools
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlparse
from urllib.request import url2pathname

import requests
import truststore
import uv
from airgap_unpack import (
    ARCHIVE,
    SCHEMA,
    BundleError,
    entry_of,
    members,
    record_of,
    replacing,
    say,
    sha256_of,
    write,
)
from fetch_sdist import pip_settings as read_pip_settings
from packaging.markers import Environment, default_environment
from packaging.metadata import parse_email
from packaging.pylock import Pylock, PylockSelectError, PylockValidationError
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pypi_simple import PYPI_SIMPLE_ENDPOINT
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

TOOLS = Path(__file__).resolve().parent
CONFIG = TOOLS.parent / "requirements" / "airgap.toml"
UNPACK = TOOLS / "airgap_unpack.py"

BLOCK = 32 << 20  # one xz stream: enough for its dictionary, and work for every core
PRESET = 6
CHUNK = 1 << 20
UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9}

# the glibc that a name of before PEP 600 stands for
OLDER_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
# the oldest glibc that a manylinux platform may name, by machine
OLDEST = {"x86_64": 5, "aarch64": 17}
# those that uv can resolve for; it is told the nearest older one
UV_GLIBC = (17, 28, *range(31, 41))
# of uv's variables, those that have no say in what it resolves to
UV_NEUTRAL = ("UV_CACHE_DIR", "UV_HTTP_TIMEOUT")


class PackError(Exception):
    """Something that the user can mend; the text says what and how."""


# --- settings -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LeaveOut:
    """Members of a wheel that stay behind."""

    package: str
    pattern: str


@dataclasses.dataclass(frozen=True)
class StandIn:
    """A file that takes the place of a wheel's member, or adds one."""

    package: str
    member: str
    file: Path


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to pack, for which host."""

    python: str
    platform: str
    limit: int
    files: tuple[Path, ...]
    single: tuple[str, ...]
    present: Mapping[str, Version]
    exclude: tuple[str, ...]
    from_host: tuple[str, ...]
    leave_out: tuple[LeaveOut, ...]
    stand_in: tuple[StandIn, ...]
    index: tuple[str, ...]

    @property
    def glibc(self) -> int:
        """The n of glibc 2.n."""
        return int(self.platform.split("_")[2])

    @property
    def machine(self) -> str:
        return self.platform.split("_", 3)[3]

    def platforms(self) -> list[str]:
        """The platform and every older one of its machine, the newest first."""
        names = []
        for minor in range(self.glibc, OLDEST[self.machine] - 1, -1):
            names.append(f"manylinux_2_{minor}_{self.machine}")
            if minor in OLDER_NAMES:
                names.append(f"{OLDER_NAMES[minor]}_{self.machine}")
        return [*names, f"linux_{self.machine}"]

    def tags(self) -> list[Tag]:
        major, minor = (int(part) for part in self.python.split("."))
        interpreter = f"cp{major}{minor}"
        return [
            *cpython_tags((major, minor), [interpreter], self.platforms()),
            *compatible_tags((major, minor), interpreter, self.platforms()),
        ]

    def requirements(self) -> list[str]:
        """Every requirement that was asked for, as it was written."""
        return [*self.single, *(line for f in self.files for line in lines_of(f))]

    def own_builds(self) -> dict[str, Version]:
        """Versions of the host's with a local part, less those that will not do."""
        found = {name: v for name, v in self.present.items() if v.local}
        for name, specifier in self.direct():
            if name in found and not specifier.contains(found[name], prereleases=True):
                del found[name]
        return found

    def direct(self) -> Iterator[tuple[str, SpecifierSet]]:
        """The requirements' own packages; a file may have options besides."""
        for line in self.requirements():
            with contextlib.suppress(InvalidRequirement):
                requirement = Requirement(line)
                yield canonicalize_name(requirement.name), requirement.specifier

    def unresolved(self) -> list[str]:
        """Names that are not resolved, whatever version anybody asks for."""
        return sorted({*self.exclude, *self.from_host, *self.own_builds()})

    def environment(self) -> Environment:
        """The host, as markers see it."""
        host = default_environment()
        host["python_version"] = self.python
        host["python_full_version"] = f"{self.python}.0"
        host["platform_machine"] = self.machine
        return host


def lines_of(file: Path) -> list[str]:
    """The requirements of a file and of the files that it includes."""
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PackError(
            f"--requirements {file}: cannot be read ({error}); name a file of "
            "requirements"
        ) from None
    found = []
    for line in (row.partition(" #")[0].strip() for row in text.splitlines()):
        include = re.match(r"(-r|--requirement|-c|--constraint)[ =]*(.+)", line)
        if include:
            found += lines_of(file.parent / include[2].strip())
        elif line and not line.startswith("#"):
            found.append(line)
    return found


def parse_python(value: str) -> str:
    match = re.fullmatch(r"3\.(\d+)", value)
    if match is None or int(match[1]) < 11:
        raise PackError(
            f"--python {value}: give the host's Python as 3.11 or newer, such as 3.12"
        )
    return value


def parse_platform(value: str) -> str:
    match = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", value)
    if match is None or match[2] not in OLDEST or int(match[1]) < OLDEST[match[2]]:
        raise PackError(
            f"--platform {value}: give the host's glibc and machine, such as "
            "manylinux_2_39_x86_64 (`ldd --version` and `uname -m` tell); known "
            f"machines are {', '.join(OLDEST)}"
        )
    return value


def parse_size(value: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value)
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise PackError(f"--limit {value}: give a size such as 60MiB")
    return int(float(match[1]) * unit)


def parse_single(value: str) -> str:
    try:
        Requirement(value)
    except InvalidRequirement as error:
        raise PackError(
            f"--requirement {value}: {error}; give a name and a version, such as "
            "vllm==0.33.0"
        ) from None
    return value


def parse_name(value: str, option: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", value):
        raise PackError(f"--{option} {value}: give the name of a package")
    return canonicalize_name(value)


def parse_present(value: str, folder: Path) -> dict[str, Version]:
    remedy = "give the output of `pip list --format=freeze` on the host"
    try:
        rows = (folder / value).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PackError(
            f"--present {value}: cannot be read ({error}); {remedy}"
        ) from None
    found: dict[str, Version] = {}
    skipped = []
    for row in rows:
        line = row.strip()
        if not line or line.startswith("#"):
            continue
        name, equals, version = line.partition("==")
        if not equals:
            raise PackError(
                f"--present {value}: {line!r} is not NAME==VERSION; {remedy}"
            )
        try:
            found[canonicalize_name(name.strip())] = Version(
                version.lstrip("=").strip()
            )
        except InvalidVersion:
            skipped.append(line)
    if skipped:
        say(
            f"--present {value}: {', '.join(skipped)} can meet no requirement: "
            "no such version can be compared"
        )
    return found


def parse_leave_out(value: str) -> LeaveOut:
    package, colon, pattern = value.partition(":")
    if not (package and colon and pattern):
        raise PackError(
            f"--leave-out {value}: give PACKAGE:GLOB, such as 'vllm:vllm/vllm-rs'"
        )
    return LeaveOut(canonicalize_name(package), pattern)


def parse_stand_in(value: str, folder: Path) -> StandIn:
    package, colon, rest = value.partition(":")
    member, equals, file = rest.partition("=")
    form = "give PACKAGE:MEMBER=FILE"
    if not (package and colon and member and equals and file):
        raise PackError(f"--stand-in {value}: {form}")
    if PurePosixPath(member).is_absolute() or ".." in PurePosixPath(member).parts:
        raise PackError(
            f"--stand-in {value}: {member} is not a path in a wheel; {form}"
        )
    path = folder / file
    if not path.is_file():
        raise PackError(f"--stand-in {value}: there is no file {path}; {form}")
    return StandIn(canonicalize_name(package), member, path)


def parse_index(value: str, folder: Path) -> str:
    if urlparse(value).scheme in ("http", "https", "file"):
        return value
    path = (folder / value).resolve()
    if not path.is_dir():
        raise PackError(
            f"--index {value}: give the URL of a package index or a folder of wheels"
        )
    return str(path)


SCALARS = {"python": "3.12", "platform": "manylinux_2_39_x86_64", "limit": "60MiB"}
LISTS = (
    "requirements",
    "requirement",
    "present",
    "exclude",
    "from-host",
    "leave-out",
    "stand-in",
    "index",
)


def read_config(file: Path) -> dict[str, Any]:
    try:
        config = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PackError(f"--config {file}: {error}; name a TOML file") from None
    for name, value in config.items():
        if name in SCALARS:
            right, form = isinstance(value, str), "a string"
        elif name in LISTS:
            right = isinstance(value, list) and all(isinstance(v, str) for v in value)
            form = "a list of strings"
        else:
            known = ", ".join([*SCALARS, *LISTS])
            raise PackError(f"--config {file}: unknown name {name!r}; known: {known}")
        if not right:
            raise PackError(f"--config {file}: {name} = {value!r} is not {form}")
    return config


def settings_of(options: argparse.Namespace) -> Settings:
    """The configuration, and over it the command line.

    A list on the command line takes the place of the configuration's; the two ways
    to give requirements count as one list.
    """
    config = read_config(options.config)
    given = {name: getattr(options, name.replace("-", "_")) for name in SCALARS}
    lists = {name: getattr(options, name.replace("-", "_")) for name in LISTS}
    if lists["requirements"] or lists["requirement"]:
        config |= {"requirements": [], "requirement": []}

    def scalar(name: str) -> str:
        return str(given[name] or config.get(name, SCALARS[name]))

    def values(name: str) -> list[tuple[str, Path]]:
        """Each with the folder that a relative path in it starts from."""
        if lists[name]:
            return [(value, Path.cwd()) for value in lists[name]]
        return [(value, options.config.parent) for value in config.get(name, ())]

    def names(name: str) -> tuple[str, ...]:
        return tuple(sorted({parse_name(value, name) for value, _ in values(name)}))

    present: dict[str, Version] = {}
    for value, folder in values("present"):
        present |= parse_present(value, folder)
    settings = Settings(
        python=parse_python(scalar("python")),
        platform=parse_platform(scalar("platform")),
        limit=parse_size(scalar("limit")),
        files=tuple((folder / v).resolve() for v, folder in values("requirements")),
        single=tuple(parse_single(value) for value, _ in values("requirement")),
        present=present,
        exclude=names("exclude"),
        from_host=names("from-host"),
        leave_out=tuple(parse_leave_out(value) for value, _ in values("leave-out")),
        stand_in=tuple(parse_stand_in(v, folder) for v, folder in values("stand-in")),
        index=tuple(parse_index(value, folder) for value, folder in values("index")),
    )
    if not settings.requirements():
        raise PackError(
            "nothing to pack: name requirements with -r FILE or --requirement NAME==V, "
            f"or in {options.config}"
        )
    return settings


# --- resolving ----------------------------------------------------------------------

pip_settings = functools.cache(read_pip_settings)


@dataclasses.dataclass(frozen=True)
class Wheel:
    """A wheel of the index."""

    package: str
    name: str  # of the file
    sha256: str
    url: str


def indexes_of(settings: Settings) -> tuple[list[str], list[str]]:
    """URLs of package indexes and places of links: `--index`, or what pip is told."""
    if settings.index:
        urls = [value for value in settings.index if urlparse(value).scheme]
        return urls, [value for value in settings.index if value not in urls]
    pip = pip_settings()
    links = pip.get("find-links", "").split()
    if pip.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        return [], links
    urls = [
        pip.get("index-url", PYPI_SIMPLE_ENDPOINT),
        *pip.get("extra-index-url", "").split(),
    ]
    return urls, links


def sources_of(settings: Settings) -> list[str]:
    """uv's options for where packages come from."""
    urls, links = indexes_of(settings)
    options = [f"--find-links={link}" for link in links]
    if not urls:
        return ["--no-index", *options]
    # uv asks the default index last. pip takes the newest version wherever it is.
    options += [f"--index={url}" for url in urls[:-1]]
    return [
        *options,
        f"--default-index={urls[-1]}",
        "--index-strategy=unsafe-best-match",
    ]


def run_uv(settings: Settings, *arguments: str) -> None:
    """`uv pip compile` for the host.

    Raises:
        PackError: with uv's own account, where there is no solution.
    """
    glibc = max(n for n in UV_GLIBC if n <= max(settings.glibc, UV_GLIBC[0]))
    command = [
        uv.find_uv_bin(),
        "pip",
        "compile",
        "--quiet",
        "--no-header",
        "--no-annotate",
        "--no-config",
        "--no-python-downloads",
        "--system-certs",
        "--only-binary=:all:",
        f"--python={sys.executable}",
        f"--python-version={settings.python}",
        f"--python-platform={settings.machine}-manylinux_2_{glibc}",
        *sources_of(settings),
        *arguments,
    ]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("UV_") or name in UV_NEUTRAL
    }
    if "cert" in (pip := pip_settings()):
        environment.setdefault("SSL_CERT_FILE", pip["cert"])
    result = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode != 0:
        raise PackError(
            f"uv finds no solution for Python {settings.python} on "
            f"{settings.platform}:\n{result.stdout.strip()}\n"
            "change the requirements, leave a package to the host with --from-host or "
            "out with --exclude, or name another source with --index"
        )


def resolve(settings: Settings, work: Path) -> tuple[list[Wheel], dict[str, str]]:
    """The wheels that the host lacks, and the versions that will do of what it has."""
    key = fingerprint(
        settings.python,
        settings.platform,
        *settings.requirements(),
        *(f"{name}=={version}" for name, version in sorted(settings.present.items())),
        *settings.unresolved(),
        *sources_of(settings),
    )
    lock = work / f"pylock.{key[:16]}.toml"
    if not lock.exists():
        met: dict[str, str] = {}
        lacking = []
        for pin in pins_of(settings, work):
            name = canonicalize_name(pin.name)
            version = settings.present.get(name)
            if version is not None and pin.specifier.contains(
                version, prereleases=True
            ):
                met[name] = str(version)
            else:
                lacking.append(pin)
        if not lacking:
            raise PackError(
                f"--present: the host has all of {', '.join(settings.requirements())} "
                "already, and needs no bundle"
            )
        wanted = work / "wanted.in"
        wanted.write_text("".join(f"{pin}\n" for pin in lacking))
        partial = work / "pylock.partial.toml"
        partial.unlink(missing_ok=True)
        run_uv(
            settings, str(wanted), "--no-deps", "--format=pylock.toml", f"-o{partial}"
        )
        with partial.open("a") as out:
            out.write("\n[tool.airgap.host]\n")
            out.writelines(f'{name} = "{version}"\n' for name, version in met.items())
        partial.replace(lock)
    try:
        read = Pylock.from_dict(tomllib.loads(lock.read_text()))
        return chosen(read, settings), dict((read.tool or {})["airgap"]["host"])
    except (tomllib.TOMLDecodeError, PylockValidationError, KeyError) as error:
        raise PackError(f"{lock}: {error!r}; remove it, and pack again") from None


def pins_of(settings: Settings, work: Path) -> list[Requirement]:
    """What the requirements resolve to, with the host's versions where they will do."""
    wanted, excluded, pins = (work / f"resolve.{end}" for end in ("in", "not", "out"))
    wanted.write_text(
        "".join(
            [
                *(f"{requirement}\n" for requirement in settings.single),
                *(f"-r {file}\n" for file in settings.files),
            ]
        )
    )
    excluded.write_text("".join(f"{name}\n" for name in settings.unresolved()))
    # uv prefers the versions that its output file has
    pins.write_text(
        "".join(f"{name}=={version}\n" for name, version in settings.present.items())
    )
    run_uv(settings, str(wanted), f"--excludes={excluded}", f"--output-file={pins}")
    lines = (line.strip() for line in pins.read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def chosen(lock: Pylock, settings: Settings) -> list[Wheel]:
    wheels = []
    try:
        for package, artifact in lock.select(
            environment=settings.environment(), tags=settings.tags()
        ):
            url = getattr(artifact, "url", None)
            digest = getattr(artifact, "hashes", {}).get("sha256")
            if url is None or digest is None or not url.split("#")[0].endswith(".whl"):
                raise PackError(
                    f"{package.name}: the index gives no wheel with a sha256; name "
                    "another source with --index, or leave it to the host with "
                    "--from-host"
                )
            name = Path(url2pathname(urlparse(url).path)).name
            wheels.append(Wheel(canonicalize_name(package.name), name, digest, url))
    except PylockSelectError as error:
        raise PackError(
            f"--platform {settings.platform}, --python {settings.python}: {error}; "
            "leave the package to the host with --from-host"
        ) from None
    return sorted(wheels, key=lambda wheel: wheel.name)


# --- downloading --------------------------------------------------------------------


def login_of(url: str, settings: Settings) -> tuple[str, str] | None:
    """User and password of the index on that URL's host, which uv leaves out of it."""
    wanted = urlparse(url)
    for index in map(urlparse, [u for places in indexes_of(settings) for u in places]):
        is_there = index[0] == wanted[0] and index.port == wanted.port
        if index.username and is_there and index.hostname == wanted.hostname:
            return unquote(index.username), unquote(index.password or "")
    return None


def download(wheels: Sequence[Wheel], settings: Settings, folder: Path) -> None:
    """Have every wheel in the folder, with the sha256 that the index gives."""
    truststore.inject_into_ssl()  # the system's certificates, as pip does
    folder.mkdir(exist_ok=True)
    session = requests.Session()
    session.verify = pip_settings().get("cert", True)
    session.mount("https://", HTTPAdapter(max_retries=Retry(5, backoff_factor=1)))

    def receive(wheel: Wheel, file: Path) -> None:
        with contextlib.ExitStack() as stack:
            url = urlparse(wheel.url)
            if url.scheme == "file":
                source = stack.enter_context(Path(url2pathname(url.path)).open("rb"))
                chunks = iter(lambda: source.read(CHUNK), b"")
            else:
                login = login_of(wheel.url, settings)
                answer = session.get(wheel.url, auth=login, stream=True, timeout=60)
                stack.callback(answer.close)
                if answer.status_code in (401, 403):
                    raise PackError(
                        f"{wheel.url}: the index answers {answer.status_code} to "
                        f"{f'user {login[0]}' if login else 'a call without a user'}; "
                        "give a user that may read it and the password, as in --index "
                        "https://USER:PASSWORD@HOST/simple or in pip's index-url"
                    )
                answer.raise_for_status()
                chunks = answer.iter_content(CHUNK)
            out = stack.enter_context(file.open("wb"))
            for chunk in chunks:
                out.write(chunk)

    def fetch(wheel: Wheel) -> None:
        target = folder / wheel.name
        if target.exists() and sha256_of(target) == wheel.sha256:
            return
        with replacing(target) as partial:
            receive(wheel, partial)
            have = sha256_of(partial)
            if have != wheel.sha256:
                partial.unlink()
                raise PackError(
                    f"{wheel.url}: sha256 is {have}, and the index says "
                    f"{wheel.sha256}; pack again, and if it stays so, name another "
                    "source with --index"
                )

    with ThreadPoolExecutor(4) as threads:
        try:
            list(threads.map(fetch, wheels))
        except (OSError, requests.RequestException) as error:
            threads.shutdown(cancel_futures=True)
            raise PackError(
                f"a wheel cannot be fetched: {error}; what arrived is kept, so pack "
                "again once the index is in reach"
            ) from None


# --- wheels that lose members -------------------------------------------------------


@contextlib.contextmanager
def opened(wheel: Path) -> Iterator[tuple[zipfile.ZipFile, str]]:
    """A wheel, and the name of its RECORD.

    Raises:
        PackError: it is not a wheel that can be read.
    """
    try:
        with zipfile.ZipFile(wheel) as source:
            yield source, record_of(wheel.name, source.namelist())
    except (BundleError, zipfile.BadZipFile) as error:
        raise PackError(
            f"{wheel} is broken, though it is as the index has it: {error}; name "
            "another source with --index, or leave the package out with --exclude"
        ) from None


def slimmed(
    wheel: Path, leave_out: Sequence[str], stand_in: Mapping[str, Path], folder: Path
) -> Path:
    """The wheel without those members, with its RECORD rewritten to match.

    The files of dist-info always stay.

    Raises:
        PackError: a pattern matches nothing, or would leave a part of dist-info.
    """
    folder.mkdir(exist_ok=True)
    target = folder / wheel.name
    with opened(wheel) as (source, record), replacing(target) as partial:
        names = [i.filename for i in source.infolist() if not i.is_dir()]
        left: set[str] = set()
        for pattern in leave_out:
            matched = set(fnmatch.filter(names, pattern))
            if not matched:
                raise PackError(
                    f"--leave-out: {pattern!r} matches no member of {wheel.name}; "
                    f"`python -m zipfile -l` on that wheel lists them"
                )
            left |= matched
        dist_info = record.removesuffix("RECORD")
        if any(name.startswith(dist_info) for name in (*left, *stand_in)):
            raise PackError(
                f"--leave-out, --stand-in: {dist_info} of {wheel.name} describes the "
                "wheel and stays as it is; name other members"
            )
        changed = left | stand_in.keys()
        rows = csv.reader(io.StringIO(source.read(record).decode()))
        kept = [row for row in rows if row[0] not in changed]
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as out:
            for info in source.infolist():
                if info.is_dir() or info.filename in (*changed, record):
                    continue
                stored = entry(info.filename)
                stored.external_attr = info.external_attr
                stored.file_size = info.file_size  # zip64 from 2 GiB on
                with source.open(info) as a, out.open(stored, "w") as b:
                    shutil.copyfileobj(a, b, CHUNK)
            for member, file in stand_in.items():
                data = file.read_bytes()
                out.writestr(entry(member), data)
                digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
                value = digest.rstrip(b"=").decode()
                kept.insert(0, [member, f"sha256={value}", str(len(data))])
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(kept)
            out.writestr(entry(record), text.getvalue())
    return target


def entry(name: str) -> zipfile.ZipInfo:
    """A zip entry of no date, so that the same members make the same wheel."""
    info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    info.external_attr = 0o100644 << 16
    return info


def check_changes(wheels: Sequence[Wheel], settings: Settings) -> None:
    """Say which changes are of packages that the host has.

    Raises:
        PackError: a change is of a package that nobody asks for.
    """
    packages = {wheel.package for wheel in wheels}
    of_host = {*settings.unresolved(), *settings.present} - packages
    changes: tuple[LeaveOut | StandIn, ...] = (*settings.leave_out, *settings.stand_in)
    for change in changes:
        if change.package not in packages | of_host:
            option = "leave-out" if isinstance(change, LeaveOut) else "stand-in"
            raise PackError(
                f"--{option}: {change.package} is not packed; packed are "
                f"{', '.join(sorted(packages))}"
            )
    for package in sorted({change.package for change in changes} & of_host):
        say(
            f"{package} is not packed: what is left out or stands in there is passed by"
        )


def repack(wheels: Sequence[Wheel], settings: Settings, work: Path) -> list[Path]:
    """The files to pack, as they come from the index or slimmed."""
    files = []
    for wheel in wheels:
        file = work / "downloads" / wheel.name
        patterns = [c.pattern for c in settings.leave_out if c.package == wheel.package]
        stand_in = {
            c.member: c.file for c in settings.stand_in if c.package == wheel.package
        }
        if patterns or stand_in:
            file = slimmed(file, patterns, stand_in, work / "repacked")
        files.append(file)
    return files


# --- archives -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Block:
    """A piece of the tar: bytes around a range of a file."""

    before: bytes = b""
    file: Path | None = None
    offset: int = 0
    length: int = 0
    after: bytes = b""

    def read(self) -> bytes:
        data = b""
        if self.file is not None:
            with self.file.open("rb") as source:
                source.seek(self.offset)
                data = source.read(self.length)
        return self.before + data + self.after


def blocks_of(files: Sequence[Path]) -> Iterator[Block]:
    """The tar of the files; a block ends where a file does."""
    for file in files:
        info = tarfile.TarInfo(file.name)
        info.size = file.stat().st_size
        header = info.tobuf(tarfile.PAX_FORMAT)
        padding = b"\0" * (-info.size % tarfile.BLOCKSIZE)
        for offset in range(0, info.size, BLOCK):
            length = min(BLOCK, info.size - offset)
            is_last = offset + length == info.size
            yield Block(
                header if offset == 0 else b"",
                file,
                offset,
                length,
                padding if is_last else b"",
            )
    yield Block(before=b"\0" * 2 * tarfile.BLOCKSIZE)


def compress(files: Sequence[Path], folder: Path) -> list[Path]:
    """The tar of the files as xz streams, one a file, in order."""
    folder.mkdir(exist_ok=True)

    def stream(block: Block) -> Path:
        data = block.read()
        target = folder / f"{hashlib.sha256(data).hexdigest()}.{PRESET}.xz"
        if not target.exists():
            write(target, lzma.compress(data, preset=PRESET))
        return target

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(stream, blocks_of(files)))


def cut(chunks: Iterable[bytes], limit: int) -> Iterator[tuple[int, bytes]]:
    """The chunks in pieces, each with the number of the archive that it goes to.

    Archives are numbered from 0, and each but the last has exactly `limit` bytes.
    """
    number, room = 0, limit
    for chunk in chunks:
        rest = memoryview(chunk)
        while rest:
            if not room:
                number, room = number + 1, limit
            piece, rest = rest[:room], rest[room:]
            room -= len(piece)
            yield number, bytes(piece)


def chunks_of(files: Iterable[Path]) -> Iterator[bytes]:
    for file in files:
        with file.open("rb") as source:
            yield from iter(lambda: source.read(CHUNK), b"")


def archives_of(streams: Sequence[Path], limit: int) -> list[dict[str, Any]]:
    """What the manifest says of each archive.

    Raises:
        PackError: there would be more than their names can count.
    """
    total = sum(stream.stat().st_size for stream in streams)
    if total > 999 * limit:
        raise PackError(
            f"--limit {limit}: {total} bytes would make more than 999 archives; give "
            "a larger limit"
        )
    found: list[dict[str, Any]] = []
    digests = []
    for number, piece in cut(chunks_of(streams), limit):
        if number == len(found):
            found.append({"name": f"{ARCHIVE}.{number + 1:03d}", "bytes": 0})
            digests.append(hashlib.sha256())
        found[number]["bytes"] += len(piece)
        digests[number].update(piece)
    return [
        archive | {"sha256": digest.hexdigest()}
        for archive, digest in zip(found, digests, strict=True)
    ]


def write_archives(
    streams: Sequence[Path],
    archives: Sequence[Mapping[str, Any]],
    limit: int,
    out: Path,
) -> int:
    """Write those that are not there, or not right.

    Returns:
        How many were written.
    """
    wrong = [
        n
        for n, entry in enumerate(map(entry_of, archives))
        if not entry.is_at(out / entry.name)
    ]
    current, target = -1, None
    with contextlib.ExitStack() as stack:
        for number, piece in cut(chunks_of(streams), limit):
            if number != current:
                current = number
                stack.close()
                name = archives[number]["name"]
                target = None
                if number in wrong:
                    target = stack.enter_context((out / f"{name}.partial").open("wb"))
            if target is not None:
                target.write(piece)
    for number in wrong:
        name = archives[number]["name"]
        (out / f"{name}.partial").replace(out / name)
    return len(wrong)


# --- the bundle ---------------------------------------------------------------------


def fingerprint(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def described(file: Path) -> dict[str, Any]:
    return {
        "name": file.name,
        "bytes": file.stat().st_size,
        "sha256": sha256_of(file),
    }


def installed_bytes(wheel: Path) -> int:
    with opened(wheel) as (members, _):
        return sum(info.file_size for info in members.infolist())


def required_by(wheel: Path, settings: Settings) -> set[str]:
    """The packages that a wheel asks for on that host, extras aside."""
    with opened(wheel) as (members, record):
        metadata = members.read(record.removesuffix("RECORD") + "METADATA")
    host = {name: str(value) for name, value in settings.environment().items()}
    found: set[str] = set()
    for line in parse_email(metadata)[0].get("requires_dist", ()):
        wanted = Requirement(line)
        if wanted.marker is None or wanted.marker.evaluate(host | {"extra": ""}):
            found.add(canonicalize_name(wanted.name))
    return found


def host_of(
    settings: Settings, files: Sequence[Path], met: Mapping[str, str]
) -> dict[str, str | None]:
    """What the host has to bring, with the version where that was counted on."""
    wanted = {name for name, _ in settings.direct()}
    builds = settings.own_builds()
    if builds:
        wanted = wanted.union(*(required_by(file, settings) for file in files))
    found: dict[str, str | None] = dict(met)
    found |= {name: str(builds[name]) for name in builds.keys() & wanted}
    found |= dict.fromkeys(settings.from_host)
    return {
        name: version
        for name, version in sorted(found.items())
        if name not in settings.exclude
    }


def manifest_of(
    settings: Settings,
    files: Sequence[Path],
    archives: Sequence[Mapping[str, Any]],
    met: Mapping[str, str],
) -> dict[str, Any]:
    wheels = [described(file) | {"installed": installed_bytes(file)} for file in files]
    script = described(UNPACK) | {"name": "unpack.py"}
    return {
        "schema": SCHEMA,
        "python": settings.python,
        "platform": settings.platform,
        "requirements": settings.requirements(),
        "host": host_of(settings, files, met),
        "excluded": list(settings.exclude),
        "left_out": [f"{c.package}:{c.pattern}" for c in settings.leave_out],
        "stand_ins": [f"{c.package}:{c.member}" for c in settings.stand_in],
        "archives": list(archives),
        "unpack": script,
        "wheels": wheels,
    }


def check(archives: Sequence[Path], wheels: Iterable[Mapping[str, Any]]) -> None:
    """Read the archives as the host does.

    Raises:
        BundleError: a wheel in them is not what the manifest says.
    """
    wanted = {wheel["name"]: wheel["sha256"] for wheel in wheels}
    for name, source in members(archives):
        digest = hashlib.file_digest(source, "sha256").hexdigest()
        if wanted.pop(name, None) != digest:
            raise BundleError(
                f"{name} in the archives is not the wheel that was packed"
            )
    if wanted:
        raise BundleError(f"the archives lack {', '.join(wanted)}")


def pack(settings: Settings, out: Path) -> dict[str, Any]:
    """Make the bundle in `out`, or what of it is missing; its manifest."""
    work = out / "work"
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PackError(f"OUT {out}: {error}; name a folder to write to") from None
    with (work / "lock").open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PackError(
                f"OUT {out}: another call packs there; wait for it, or name another "
                "folder"
            ) from None
        say(f"resolving for Python {settings.python} on {settings.platform}")
        wheels, met = resolve(settings, work)
        check_changes(wheels, settings)
        say(f"fetching {len(wheels)} wheels that the host lacks")
        download(wheels, settings, work / "downloads")
        files = repack(wheels, settings, work)
        say(f"compressing {sum(f.stat().st_size for f in files) / 2**20:.1f} MiB")
        streams = compress(files, work / "streams")
        archives = archives_of(streams, settings.limit)
        manifest = manifest_of(settings, files, archives, met)
        text = json.dumps(manifest, indent=1).encode() + b"\n"
        target = out / "manifest.json"
        is_same = target.exists() and target.read_bytes() == text
        if not is_same:
            target.unlink(missing_ok=True)  # never one beside archives of another
        written = write_archives(streams, archives, settings.limit, out)
        names = {archive["name"] for archive in archives}
        for file in out.glob(f"{ARCHIVE}.*"):
            if file.name not in names:
                file.unlink()
        script = out / "unpack.py"
        if not entry_of(manifest["unpack"]).is_at(script):
            write(script, UNPACK.read_bytes())
        if written or not is_same:
            say("reading the archives as the host will")
            try:
                check(
                    [out / archive["name"] for archive in archives], manifest["wheels"]
                )
            except (BundleError, lzma.LZMAError, tarfile.TarError, EOFError) as error:
                shutil.rmtree(work / "streams")
                raise PackError(
                    f"{error}; the compressed blocks of an earlier call were damaged "
                    "and are removed now: pack again"
                ) from None
            write(target, text)
        needed = {*streams, *files, *(work / "downloads" / w.name for w in wheels)}
        for folder in ("downloads", "repacked", "streams"):
            for old in set((work / folder).glob("*")) - needed:
                old.unlink()
    return manifest


def report(manifest: Mapping[str, Any], out: Path) -> None:
    total = sum(archive["bytes"] for archive in manifest["archives"])
    for archive in manifest["archives"]:
        say(f"  {archive['name']}  {archive['bytes'] / 2**20:6.1f} MiB")
    say(
        f"{out}: {len(manifest['wheels'])} wheels in {len(manifest['archives'])} "
        f"archives, {total / 2**20:.1f} MiB\n"
        "Carry manifest.json, unpack.py and the archives to the host, in as many trips "
        "as it takes, and run there each time:\n"
        "  python3 unpack.py PREFIX"
    )


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        description="Bundle wheels for a host without network; see docs/airgap.md.",
        allow_abbrev=False,
    )
    commands = top.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "pack",
        allow_abbrev=False,
        help="make the bundle, or what of it is missing",
        description="Make the bundle in OUT, or what of it is missing. Each option is "
        "also a name in the configuration; the command line wins.",
    )
    add = command.add_argument
    add("out", metavar="OUT", type=Path, help="folder of the bundle")
    add(
        "--config",
        type=Path,
        default=CONFIG,
        metavar="FILE",
        help="TOML file of settings (default: requirements/airgap.toml)",
    )
    add("--python", metavar="X.Y", help="Python of the host, such as 3.12")
    add(
        "--platform",
        metavar="TAG",
        help="newest manylinux platform of the host, such as manylinux_2_39_x86_64; "
        "older ones of the machine are included",
    )
    add("--limit", metavar="SIZE", help="most that an archive may have, such as 60MiB")

    def add_list(*names: str, metavar: str, help: str) -> None:
        add(*names, action="append", default=[], metavar=metavar, help=help)

    add_list("-r", "--requirements", metavar="FILE", help="a file of requirements")
    add_list("--requirement", metavar="NAME==V", help="a single requirement")
    add_list(
        "--present",
        metavar="FILE",
        help="what the host has (`pip list --format=freeze`) and uses where it will do",
    )
    add_list(
        "--from-host",
        metavar="NAME",
        help="a package that is the host's own, of whatever version",
    )
    add_list("--exclude", metavar="NAME", help="a package that is done without")
    add_list(
        "--leave-out",
        metavar="PACKAGE:GLOB",
        help="members of a package's wheel that stay behind",
    )
    add_list(
        "--stand-in",
        metavar="PACKAGE:MEMBER=FILE",
        help="a file in the place of a member of a package's wheel",
    )
    add_list(
        "--index",
        metavar="URL|FOLDER",
        help="package index or folder of wheels (default: what pip is configured with)",
    )
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        report(pack(settings_of(options), options.out), options.out)
    except PackError as error:
        print(f"airgap: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"airgap: OUT {options.out}: {error}; make room there or name another "
            "folder, and pack again: what is there is kept",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
