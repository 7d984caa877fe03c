# SPDX-License-Identifier: Apache-2.0
"""A bundle holds what the host lacks, survives what a journey does to it, and runs.

The wheels are made here; no package index is asked.
"""

import ast
import base64
import contextlib
import csv
import dataclasses
import errno
import hashlib
import http.server
import io
import json
import lzma
import os
import platform
import random
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import airgap
import airgap_unpack
import bootstrap
import fetch_sdist
import pytest
import requests
from airgap_unpack import sha256_of
from hypothesis import given, settings
from hypothesis import strategies as st

PYTHON = f"3.{sys.version_info.minor}"
MACHINE = platform.machine()
GLIBC = platform.libc_ver()[1].split(".")[1]
PLATFORM = f"manylinux_2_{GLIBC}_{MACHINE}"
OLD = f"manylinux_2_17_{MACHINE}"
LIMIT = "64KiB"


def digest_of(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return "sha256=" + digest.rstrip(b"=").decode()


def make_wheel(folder, name, version, files=(), requires=(), tag="py3-none-any"):
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {line}\n" for line in requires)
    members = {
        f"{name}/__init__.py": f"VERSION = {version!r}\n".encode(),
        **dict(files),
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": (
            f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n"
        ).encode(),
    }
    rows = [f"{path},{digest_of(data)},{len(data)}" for path, data in members.items()]
    members[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    target = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, data in members.items():
            wheel.writestr(path, data)
    return target


def noise(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Path:
    """`engine` needs `layer` and a `kernels` that exists nowhere."""
    folder = tmp_path_factory.mktemp("index")
    members = {
        "engine/ops.so": noise(100_000, 1),
        "engine/attention/kernel.so": noise(300_000, 2),
        "engine/attention/__init__.py": b"raise ImportError('no kernels')\n",
        "engine/data/table.json": b"{}" * 1000,
    }
    requires = ["layer>=1.0", "kernels==9"]
    make_wheel(folder, "engine", "1.0", members, requires, f"cp38-abi3-{OLD}")
    make_wheel(folder, "layer", "0.5")
    make_wheel(folder, "layer", "1.0")
    make_wheel(folder, "layer", "2.0", {"layer/large.bin": noise(150_000, 3)})
    make_wheel(folder, "extra", "1.0", {"extra/large.bin": noise(20_000, 4)})
    return folder


@pytest.fixture
def configured(index, tmp_path):
    """Writes a configuration; changes of it are given by name."""
    (tmp_path / "stand_in.py").write_text("STANDS_IN = True\n")
    (tmp_path / "wanted.txt").write_text("# what is wanted\nengine==1.0\n")

    def write(**changes) -> str:
        config = {
            "python": PYTHON,
            "platform": PLATFORM,
            "limit": LIMIT,
            "requirements": ["wanted.txt"],
            "exclude": ["kernels"],
            "leave-out": ["engine:engine/attention/*.so"],
            "stand-in": ["engine:engine/attention/__init__.py=stand_in.py"],
            "index": [str(index)],
        } | {name.replace("_", "-"): value for name, value in changes.items()}
        file = tmp_path / "airgap.toml"
        lines = [f"{name} = {json.dumps(value)}\n" for name, value in config.items()]
        file.write_text("".join(lines))
        return str(file)

    return write


def pack(out: Path, config: str, *options: str) -> dict:
    code = airgap.main(["pack", str(out), f"--config={config}", *options])
    assert code == 0
    return json.loads((out / "manifest.json").read_text())


def refused(capsys, out: Path, config: str, *options: str) -> str:
    assert airgap.main(["pack", str(out), f"--config={config}", *options]) == 1
    return capsys.readouterr().err


def packed(manifest: dict) -> set[str]:
    return {"-".join(wheel["name"].split("-")[:2]) for wheel in manifest["wheels"]}


def carried(out: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()}


def carry(out: Path, to: Path, *archives: str) -> Path:
    to.mkdir(exist_ok=True)
    for name in ("manifest.json", "unpack.py", *archives):
        shutil.copy(out / name, to)
    return to


def run_unpack(folder: Path, prefix: Path, *options: str):
    return subprocess.run(
        [sys.executable, str(folder / "unpack.py"), str(prefix), *options],
        capture_output=True,
        text=True,
    )


@pytest.fixture
def bundle(configured, tmp_path) -> Path:
    pack(tmp_path / "bundle", configured())
    return tmp_path / "bundle"


def test_a_bundle_travels_in_trips_and_runs(bundle, tmp_path):
    manifest = json.loads((bundle / "manifest.json").read_text())
    first, *rest = (archive["name"] for archive in manifest["archives"])
    assert len(rest) >= 2  # a wheel larger than an archive is cut
    prefix = tmp_path / "on the host"

    trip = run_unpack(carry(bundle, tmp_path / "trip-1", first), prefix)
    assert trip.returncode == 2, trip.stderr
    assert f"1 of {len(rest) + 1} archives; missing: {', '.join(rest)};" in trip.stdout
    assert not (prefix / "venv").exists()

    trip = run_unpack(carry(bundle, tmp_path / "trip-2", *rest), prefix)
    assert trip.returncode == 0, trip.stderr
    assert f". '{prefix}/env' && make test-gpu" in trip.stdout
    made = (prefix / "venv" / "bundle.json").stat().st_mtime_ns

    # everything by way of the file that a shell sources
    program = (
        "import json, engine, engine.attention, layer, packaging; print(json.dumps("
        "[engine.VERSION, engine.attention.STANDS_IN, layer.VERSION, "
        "packaging.__file__]))"
    )
    shell = '. "$0/env" && "$PYTHON" -c "$1" && exec "$PYTHON" -m pip download -q '
    result = subprocess.run(
        ["sh", "-c", shell + '--no-deps -d "$0/fetched" layer', str(prefix), program],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "PIP_CONFIG_FILE": os.devnull},
    )
    assert result.returncode == 0, result.stderr
    *values, of_the_host = json.loads(result.stdout)
    assert values == ["1.0", True, "2.0"]
    assert not of_the_host.startswith(str(prefix))
    assert [p.name.split("-")[0] for p in (prefix / "fetched").iterdir()] == ["layer"]

    # twice is once, with no archive beside it any more
    again = run_unpack(carry(bundle, tmp_path / "trip-3"), prefix)
    assert again.returncode == 0, again.stderr
    assert "installing" not in again.stdout
    assert (prefix / "venv" / "bundle.json").stat().st_mtime_ns == made

    # and what was damaged since is seen
    read = airgap_unpack.Manifest.read(bundle)
    host = airgap_unpack.inspect(sys.executable, read, prefix)
    whole = partial(
        airgap_unpack.is_made, read, host, prefix / "wheelhouse", prefix / "venv"
    )
    assert whole()
    site = airgap_unpack.site_packages(prefix / "venv")
    for name in ("layer/large.bin", "layer-2.0.dist-info/RECORD"):
        right = (site / name).read_bytes()
        for wrong in (right[:10], right[:-1] + b"#", b""):
            (site / name).write_bytes(wrong)
            assert not whole(), (name, len(wrong))
        (site / name).write_bytes(right)
    assert whole()


def test_a_damaged_archive_is_named_with_both_sums(bundle, tmp_path):
    archives = [p.name for p in bundle.glob("wheelhouse*")]
    folder = carry(bundle, tmp_path / "trip", *archives)
    victim = folder / sorted(archives)[1]
    data = bytearray(victim.read_bytes())
    data[1000] ^= 1
    victim.write_bytes(data)
    result = run_unpack(folder, tmp_path / "prefix")
    assert result.returncode == 1
    assert f"{victim} is damaged" in result.stderr
    for right in (bundle / victim.name, victim):
        assert hashlib.sha256(right.read_bytes()).hexdigest() in result.stderr
    # a copy that was kept and is damaged since is not counted
    kept = tmp_path / "prefix" / "archives" / sorted(archives)[0]
    kept.write_bytes(b"short")
    result = run_unpack(carry(bundle, tmp_path / "none"), tmp_path / "prefix")
    assert result.returncode == 2
    assert result.stdout.startswith(f"0 of {len(archives)} archives; missing: ")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"python": "3.99"}, ["--python", f"this is Python {PYTHON}", "for 3.99"]),
        (
            {"platform": f"manylinux_2_999_{MACHINE}"},
            [f"glibc 2.{GLIBC}", f"the bundle is for manylinux_2_999_{MACHINE}"],
        ),
        ({"platform": "manylinux_2_17_sparc"}, [f"on {MACHINE}", "2_17_sparc"]),
        ({"schema": 7}, ["its schema is 7", "take both from one bundle"]),
        (
            {"archives": [{"name": "../x", "bytes": 1, "sha256": ""}]},
            ["damaged", "../x"],
        ),
        (
            {"unpack": {"name": "unpack.py", "bytes": 1, "sha256": "f00"}},
            ["unpack.py", "f00", "take both from one bundle"],
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_host_that_the_bundle_is_not_for(changes, words, bundle, tmp_path, capsys):
    folder = carry(bundle, tmp_path / "trip")
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(airgap_unpack.BundleError) as caught:
        airgap_unpack.unpack(folder, tmp_path / "prefix", sys.executable)
    assert all(word in str(caught.value) for word in words), caught.value
    assert not (tmp_path / "prefix").exists()


@pytest.mark.parametrize("short", [1, 0])
def test_a_disk_that_is_too_small(short, bundle, tmp_path, monkeypatch):
    manifest = json.loads((bundle / "manifest.json").read_text())
    needed = sum(archive["bytes"] for archive in manifest["archives"])
    needed += sum(wheel["bytes"] + wheel["installed"] for wheel in manifest["wheels"])
    usage = shutil.disk_usage(tmp_path)._replace(free=needed - short)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    prefix = tmp_path / "prefix"
    monkeypatch.setattr(airgap_unpack, "fill", lambda *arguments: 0)
    if short:
        with pytest.raises(airgap_unpack.BundleError, match="MiB are free; make room"):
            airgap_unpack.unpack(bundle, prefix, sys.executable)
    else:
        airgap_unpack.unpack(bundle, prefix, sys.executable)
    assert prefix.exists() == (not short)


@pytest.mark.parametrize("name", ["archives", "wheelhouse", "venv", "env", "src"])
def test_folders_of_somebody_else_stay(name, bundle, tmp_path):
    prefix = tmp_path / "project"
    own = prefix / name / "own"
    own.mkdir(parents=True)
    with pytest.raises(airgap_unpack.BundleError, match=rf"{prefix}: its {name} came"):
        airgap_unpack.unpack(bundle, prefix, sys.executable)
    assert list(prefix.rglob("*")) == [prefix / name, own]


def test_a_prefix_that_is_a_file(bundle, tmp_path):
    (tmp_path / "prefix").write_text("")
    with pytest.raises(airgap_unpack.BundleError, match="is not a folder; name anoth"):
        airgap_unpack.unpack(bundle, tmp_path / "prefix", sys.executable)


def test_one_prefix_is_filled_by_one_call(bundle, tmp_path):
    prefix = tmp_path / "prefix"
    prefix.mkdir()
    with (prefix / airgap_unpack.MARK).open("w") as held:
        airgap.fcntl.flock(held, airgap.fcntl.LOCK_SH)
        with pytest.raises(airgap_unpack.BundleError, match="another call unpacks"):
            airgap_unpack.unpack(bundle, prefix, sys.executable)
    assert list(prefix.iterdir()) == [prefix / airgap_unpack.MARK]


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ({"layer": None}, "this host lacks: layer is absent; "),
        ({"pytest": "0.1"}, f"lacks: pytest is {pytest.__version__} and not 0.1; "),
        ({"pytest": f"{pytest.__version__}.0", "packaging": None}, None),
    ],
)
def test_what_the_bundle_leaves_to_the_host(host, words, bundle, tmp_path, monkeypatch):
    folder = carry(bundle, tmp_path / "trip")
    manifest = json.loads((folder / "manifest.json").read_text()) | {"host": host}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(airgap_unpack, "fill", lambda *arguments: 0)
    if words is None:
        assert airgap_unpack.unpack(folder, tmp_path / "prefix", sys.executable) == 0
        return
    with pytest.raises(airgap_unpack.BundleError) as caught:
        airgap_unpack.unpack(folder, tmp_path / "prefix", sys.executable)
    assert words in str(caught.value)
    assert "--present of this host" in str(caught.value)
    assert not (tmp_path / "prefix").exists()


def bare_venv(folder: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True
    )
    return airgap_unpack.site_packages(folder)


def test_what_the_environment_does_not_see_of_the_host(bundle, tmp_path, monkeypatch):
    folder = carry(bundle, tmp_path / "trip", *(p.name for p in bundle.glob("wheel*")))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["host"] = {"pytest": None}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    prefix = tmp_path / "prefix"
    monkeypatch.setattr(airgap_unpack, "make_venv", lambda *a: bare_venv(a[-1]))
    with pytest.raises(airgap_unpack.BundleError, match=f"{prefix}/venv lacks: pytest"):
        airgap_unpack.unpack(folder, prefix, sys.executable)
    assert not (prefix / "env").exists()


def test_packages_that_the_host_has_in_place(bundle, tmp_path, monkeypatch):
    """As `pip install --editable` leaves them: by a path, or by an import hook."""
    site = bare_venv(tmp_path / "host")
    source = tmp_path / "it's a source"
    source.mkdir()
    (source / "by_path.py").write_text("")
    (site / "in_place.pth").write_text(f"{source}\nimport finder\n")
    (site / "finder.py").write_text(
        "import sys, types\nsys.modules['by_hook'] = types.ModuleType('by_hook')\n"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(elsewhere))
    python = str(tmp_path / "host" / "bin" / "python")
    manifest = airgap_unpack.Manifest.read(bundle)
    host = airgap_unpack.inspect(python, manifest, tmp_path / "prefix")
    assert host.packages == (str(site), str(source))  # no library, nothing of a shell's
    monkeypatch.delenv("PYTHONPATH")
    venv = tmp_path / "venv"
    (bare_venv(venv) / "host.pth").write_text(host.paths())
    subprocess.run(
        [venv / "bin" / "python", "-c", "import by_path, by_hook"], check=True
    )


@pytest.mark.parametrize("option", ["--pyton=python3", "--python"])
def test_only_missing_archives_exit_2(option, bundle, tmp_path):
    result = run_unpack(bundle, tmp_path / "prefix", option)
    assert result.returncode == 1
    assert option.split("=")[0] in result.stderr


class Killed(BaseException):
    """Nothing handles it, so that what was being written stays as it was."""


def killed_at_each_rename(monkeypatch):
    """Calls to make: each is killed one rename later than the one before it."""
    rename = Path.replace
    for budget in range(60):
        left = budget

        def replace(self, target):
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return rename(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", replace)
            yield budget
    pytest.fail("never came to an end")


def is_consistent(out: Path) -> bool:
    """Whether a manifest, where there is one, is that of the files beside it."""
    if not (out / "manifest.json").exists():
        return True
    manifest = json.loads((out / "manifest.json").read_text())
    return all(
        hashlib.sha256((out / entry["name"]).read_bytes()).hexdigest()
        == entry["sha256"]
        for entry in (*manifest["archives"], manifest["unpack"])
    )


@pytest.mark.parametrize("earlier", [None, "40KiB", "1MiB"])
def test_a_pack_that_is_killed_goes_on(earlier, configured, tmp_path, monkeypatch):
    config = configured()
    whole, out = tmp_path / "whole", tmp_path / "out"
    pack(whole, config)
    if earlier:
        pack(out, config, f"--limit={earlier}")
    for _ in killed_at_each_rename(monkeypatch):
        try:
            pack(out, config)
            break
        except Killed:
            assert is_consistent(out)
    assert carried(out) == carried(whole)


def test_an_unpack_that_is_killed_goes_on(bundle, tmp_path, monkeypatch):
    manifest = airgap_unpack.Manifest.read(bundle)
    archives, wheelhouse = tmp_path / "archives", tmp_path / "wheelhouse"
    for budget in killed_at_each_rename(monkeypatch):
        try:
            assert not airgap_unpack.keep_archives(manifest, bundle, archives)
            airgap_unpack.fill_wheelhouse(manifest, archives, wheelhouse)
            break
        except Killed:
            assert budget <= len(manifest.archives) + len(manifest.wheels)
    for folder, entries in (
        (archives, manifest.archives),
        (wheelhouse, manifest.wheels),
    ):
        assert {p.name for p in folder.iterdir()} == {e.name for e in entries}
        assert all(entry.is_at(folder / entry.name) for entry in entries)


def test_an_environment_that_is_half_made_is_made_anew(bundle, tmp_path, monkeypatch):
    """Killed between, and amid, the commands that make it, over one that was whole."""
    prefix = tmp_path / "prefix"
    venv, env = prefix / "venv", prefix / "env"
    installed = []

    def run(command, failure):
        step = tmp_path / "step"
        if "venv" in command:
            bare_venv(venv)
        for wheel in (Path(word) for word in command if word.endswith(".whl")):
            step.write_text("")
            step.replace(step)  # where it may be killed
            with zipfile.ZipFile(wheel) as members:
                members.extractall(airgap_unpack.site_packages(venv))
            installed.append(wheel.name)
        step.write_text("")
        step.replace(step)

    monkeypatch.setattr(airgap_unpack, "run", run)
    monkeypatch.setattr(airgap_unpack, "check_host", lambda *arguments: None)
    manifest = airgap_unpack.Manifest.read(bundle)
    host = airgap_unpack.inspect(sys.executable, manifest, prefix)
    unpack = partial(airgap_unpack.fill, manifest, host, bundle, prefix)
    assert unpack() == 0
    wheels, kills = len(installed), 0
    for _ in killed_at_each_rename(monkeypatch):
        installed.clear()
        (venv / "bin" / "python").unlink(missing_ok=True)
        try:
            assert unpack() == 0
            break
        except Killed:
            kills += 1
            assert not env.exists()
            assert len(installed) == wheels or not (venv / "bundle.json").exists()
    assert kills == wheels + 4
    assert env.exists()
    assert len(installed) == wheels
    assert unpack() == 0
    assert len(installed) == wheels  # whole, and left as it is


def test_a_pack_run_again_writes_nothing(bundle, configured, monkeypatch):
    before = {p: p.stat().st_mtime_ns for p in bundle.iterdir() if p.is_file()}
    downloads = bundle / "work" / "downloads"
    fetched = {p: p.stat().st_mtime_ns for p in downloads.iterdir()}
    monkeypatch.setattr(airgap, "run_uv", None)  # nor resolves
    monkeypatch.setattr(lzma, "compress", None)  # nor compresses
    monkeypatch.setattr(airgap, "check", None)
    pack(bundle, configured())
    after = {p: p.stat().st_mtime_ns for p in bundle.iterdir() if p.is_file()}
    assert after == before
    assert {p: p.stat().st_mtime_ns for p in downloads.iterdir()} == fetched


@pytest.mark.parametrize("name", ["wheelhouse.tar.xz.002", "unpack.py", "engine"])
def test_a_pack_run_again_mends_what_is_damaged(name, bundle, configured):
    before = carried(bundle)
    if name == "engine":
        (file,) = (bundle / "work" / "downloads").glob("engine-*.whl")
    else:
        file = bundle / name
    right = file.read_bytes()
    file.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    pack(bundle, configured())
    assert carried(bundle) == before
    assert file.read_bytes() == right


def test_a_damaged_stream_of_an_earlier_call_is_found(bundle, configured, capsys):
    """It would be found on the host only, if the archives were not read here."""
    streams = sorted((bundle / "work" / "streams").iterdir(), key=os.path.getsize)
    wrong = bytearray(streams[-1].read_bytes())
    wrong[len(wrong) // 2] ^= 1
    streams[-1].write_bytes(wrong)
    assert "pack again" in refused(capsys, bundle, configured(limit="1MiB"))
    assert not (bundle / "manifest.json").exists()
    pack(bundle, configured(limit="1MiB"))


def test_a_changed_setting_rebuilds_what_it_must(bundle, configured, monkeypatch):
    compress = lzma.compress
    blocks = []
    monkeypatch.setattr(
        lzma,
        "compress",
        lambda data, **how: blocks.append(data) or compress(data, **how),
    )
    stream = b"".join(p.read_bytes() for p in sorted(bundle.glob("wheelhouse*")))
    manifest = pack(bundle, configured(), "--limit=100KiB")
    assert not blocks
    archives = sorted(bundle.glob("wheelhouse*"))
    assert [p.name for p in archives] == [a["name"] for a in manifest["archives"]]
    assert all(p.stat().st_size == 100 << 10 for p in archives[:-1])
    assert b"".join(p.read_bytes() for p in archives) == stream

    wanted = ["engine==1.0", "extra"]
    manifest = pack(bundle, configured(requirements=[], requirement=wanted))
    assert packed(manifest) == {"engine-1.0", "layer-2.0", "extra-1.0"}
    assert len(blocks) == 1
    assert manifest["requirements"] == wanted

    pack(bundle, configured(), "--limit=1MiB")
    assert [p.name for p in bundle.glob("wheelhouse*")] == ["wheelhouse.tar.xz.001"]

    pack(bundle, configured(exclude=["kernels", "layer"]))
    for folder in ("downloads", "repacked"):  # nor is anything kept of earlier ones
        (wheel,) = (bundle / "work" / folder).iterdir()
        assert wheel.name.startswith("engine-1.0-")


def test_left_out_members(bundle, index, tmp_path):
    (old,) = index.glob("engine-*.whl")
    new = bundle / "work" / "repacked" / old.name
    with zipfile.ZipFile(old) as a, zipfile.ZipFile(new) as b:
        gone = {"engine/attention/kernel.so"}
        assert set(b.namelist()) == set(a.namelist()) - gone
        record = "engine-1.0.dist-info/RECORD"
        rows = list(csv.reader(io.StringIO(b.read(record).decode())))
        assert sorted(row[0] for row in rows) == sorted(b.namelist())
        for path, digest, size in rows:
            if path != record:
                assert (digest, int(size)) == (
                    digest_of(b.read(path)),
                    len(b.read(path)),
                )
        stands_in = "engine/attention/__init__.py"
        assert b.read(stands_in) == b"STANDS_IN = True\n"
        for name in set(b.namelist()) - {record, stands_in}:
            assert b.read(name) == a.read(name)
        # so that xz has the members and not what deflate made of them
        assert {i.compress_type for i in b.infolist()} == {zipfile.ZIP_STORED}
    manifest = json.loads((bundle / "manifest.json").read_text())
    sums = {wheel["name"]: wheel["sha256"] for wheel in manifest["wheels"]}
    assert sums[new.name] == hashlib.sha256(new.read_bytes()).hexdigest()
    (layer,) = index.glob("layer-2.0*.whl")  # as the index has it
    assert sums[layer.name] == hashlib.sha256(layer.read_bytes()).hexdigest()


def test_members_of_more_than_2_gib(configured, tmp_path, monkeypatch):
    """By the limit from which on zip has other fields."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 90_000)
    pack(tmp_path / "out", configured())


@pytest.mark.parametrize("names", [[], ["a", "b"], None])
def test_wheels_that_are_broken_where_they_come_from(names, tmp_path):
    wheel = tmp_path / "broken-1.0-py3-none-any.whl"
    wheel.write_bytes(b"no zip")
    if names is not None:
        with zipfile.ZipFile(wheel, "w") as members:
            for name in names:
                members.writestr(f"{name}-1.0.dist-info/RECORD", "")
    with pytest.raises(airgap.PackError, match="is broken, though it is as the index"):
        airgap.slimmed(wheel, ["*"], {}, tmp_path / "repacked")
    with pytest.raises(airgap.PackError, match=r"broken-1\.0.* with --exclude"):
        airgap.installed_bytes(wheel)


def test_archives_are_one_tar(bundle):
    """Also without unpack.py: cat wheelhouse.tar.xz.* | tar xJ."""
    data = b"".join(p.read_bytes() for p in sorted(bundle.glob("wheelhouse*")))
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:xz") as tar:
        names = [name.rsplit("-", 3)[0] for name in tar.getnames()]
    assert names == ["engine-1.0", "layer-2.0"]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("layer==1.0", {"engine-1.0"}),  # will do, though there is a newer one
        ("layer==0.5", {"engine-1.0", "layer-2.0"}),  # will not do
        ("Layer==1.0\nengine==1.0+cu130\nunheard-of==3", None),  # has all of it
        ("# nothing\n\nunheard-of==3", {"engine-1.0", "layer-2.0"}),
    ],
)
def test_what_the_host_has_stays_out(host, expected, configured, tmp_path, capsys):
    (tmp_path / "host.txt").write_text(host)
    config = configured(leave_out=[], stand_in=[])
    option = f"--present={tmp_path / 'host.txt'}"
    if expected is None:
        error = refused(capsys, tmp_path / "out", config, option)
        assert "--present: the host has all of engine==1.0 already" in error
    else:
        manifest = pack(tmp_path / "out", config, option)
        assert packed(manifest) == expected
        is_used = "layer-2.0" not in expected
        assert manifest["host"] == ({"layer": "1.0"} if is_used else {})


@pytest.mark.parametrize(
    ("host", "expected", "promised"),
    [
        # with what it asks for, and with the changes to it passed by
        ("engine==1.0+rocm7", {"extra-1.0"}, {"engine": "1.0+rocm7"}),
        ("engine==1.0", {"extra-1.0", "layer-2.0"}, {"engine": "1.0"}),
        ("engine==0.9+rocm7", {"engine-1.0", "extra-1.0", "layer-2.0"}, {}),
        # whatever another package asks for, but not whatever there is
        (
            "layer==0.5+rocm7\nextra==0.1+cpu\nother==1+local",
            {"engine-1.0", "extra-1.0"},
            {"layer": "0.5+rocm7"},
        ),
    ],
)
def test_builds_of_the_host(host, expected, promised, configured, tmp_path, capsys):
    (tmp_path / "host.txt").write_text(host)
    config = configured(requirements=[], requirement=["engine==1.0", "extra>=1"])
    option = f"--present={tmp_path / 'host.txt'}"
    manifest = pack(tmp_path / "out", config, option)
    assert packed(manifest) == expected
    assert manifest["host"] == promised
    passed_by = "engine is not packed: what is left out or stands in" in (
        capsys.readouterr().out
    )
    assert passed_by == ("engine" in promised)


def test_packages_from_the_host(configured, tmp_path):
    out = tmp_path / "out"
    manifest = pack(out, configured(from_host=["layer", "unheard-of"]))
    assert packed(manifest) == {"engine-1.0"}
    assert manifest["host"] == {"layer": None, "unheard-of": None}
    assert manifest["excluded"] == ["kernels"]  # and is not counted on


def test_versions_that_are_not_pythons(configured, tmp_path, capsys):
    """Of packages of the system, in what pip lists."""
    (tmp_path / "host.txt").write_text("gpg===1.10.0-unknown\nlayer===1.0\nx==1 b\n")
    config = configured(present=["host.txt"])
    assert packed(pack(tmp_path / "out", config)) == {"engine-1.0"}
    assert "gpg===1.10.0-unknown, x==1 b can meet no" in capsys.readouterr().out


def test_variables_of_uv_have_no_say(configured, tmp_path, monkeypatch):
    (tmp_path / "older.txt").write_text("layer<2")
    monkeypatch.setenv("UV_CONSTRAINT", str(tmp_path / "older.txt"))
    monkeypatch.setenv("UV_NO_BINARY", "1")
    assert packed(pack(tmp_path / "out", configured())) == {"engine-1.0", "layer-2.0"}


def test_excluded_packages_are_not_resolved(configured, tmp_path, capsys):
    out = tmp_path / "out"
    config = configured()
    manifest = pack(out, config, "--exclude=kernels", "--exclude=Layer")
    assert packed(manifest) == {"engine-1.0"}
    assert manifest["excluded"] == ["kernels", "layer"]
    error = refused(capsys, out, config, "--exclude=layer")
    assert "kernels" in error
    assert "--exclude" in error


def test_wheels_are_for_the_host_and_not_for_this_machine(tmp_path, capsys):
    folder = tmp_path / "index"
    folder.mkdir()
    for tag in ("cp312-cp312-manylinux_2_28", "cp312-cp312-manylinux_2_34"):
        make_wheel(folder, "ops", "1.0", tag=f"{tag}_x86_64")
    make_wheel(folder, "ops", "1.0", tag="cp313-cp313-manylinux_2_28_x86_64")
    make_wheel(folder, "ops", "2.0", tag="cp312-cp312-manylinux_2_39_x86_64")
    make_wheel(folder, "ops", "3.0", tag="cp312-cp312-manylinux_2_28_aarch64")
    make_wheel(folder, "old", "1.0", tag="cp312-cp312-manylinux_2_16_x86_64")
    (tmp_path / "empty.toml").write_text("")

    def ops_for(python: str, host: str) -> str:
        out = tmp_path / f"{python}-{host}"
        manifest = pack(
            out,
            str(tmp_path / "empty.toml"),
            *("--requirement=ops", f"--index={folder}"),
            *(f"--python={python}", f"--platform={host}"),
        )
        (wheel,) = manifest["wheels"]
        return wheel["name"].removeprefix("ops-").removesuffix(".whl")

    assert ops_for("3.12", "manylinux_2_31_x86_64") == (
        "1.0-cp312-cp312-manylinux_2_28_x86_64"
    )
    assert ops_for("3.12", "manylinux_2_35_x86_64") == (
        "1.0-cp312-cp312-manylinux_2_34_x86_64"
    )
    assert ops_for("3.12", "manylinux_2_40_x86_64").startswith("2.0-")
    assert ops_for("3.12", "manylinux_2_99_x86_64").startswith("2.0-")
    assert ops_for("3.12", "manylinux_2_30_x86_64").startswith("1.0-")
    assert ops_for("3.13", "manylinux_2_39_x86_64").startswith("1.0-cp313-")
    assert ops_for("3.12", "manylinux_2_28_aarch64").startswith("3.0-")
    # older than any that uv knows of
    host = "--platform=manylinux_2_12_x86_64"
    options = ("--requirement=old", f"--index={folder}", host)
    error = refused(capsys, tmp_path / "old", str(tmp_path / "empty.toml"), *options)
    assert "--platform manylinux_2_12_x86_64" in error


@contextlib.contextmanager
def served(folder: Path, login: str | None = None):
    """The wheels of a folder as a package index on loopback."""
    pages = folder / "simple"
    for name in ("extra", "layer"):
        links = "".join(
            f'<a href="../../{p.name}#sha256={sha256_of(p)}">{p.name}</a>'
            for p in folder.glob(f"{name}-*.whl")
        )
        (pages / name).mkdir(parents=True)
        (pages / name / "index.html").write_text(f"<html><body>{links}</body></html>")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def send_head(self):
            right = (
                f"Basic {base64.b64encode(login.encode()).decode()}" if login else None
            )
            if self.headers["Authorization"] == right:
                return super().send_head()
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="wheels"')
            self.end_headers()
            return None

        def log_message(self, *arguments):
            pass

    handler = partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/simple"
        finally:
            server.shutdown()
            thread.join()


def test_wheels_that_an_index_serves(index, tmp_path, capsys):
    folder = tmp_path / "served"
    folder.mkdir()
    for wheel in (*index.glob("extra-*.whl"), *index.glob("layer-2.0*.whl")):
        shutil.copy(wheel, folder)
    (tmp_path / "empty.toml").write_text("")
    config = str(tmp_path / "empty.toml")
    with served(folder) as url:
        options = ("--requirement=extra", "--requirement=layer", f"--index={url}")
        assert packed(pack(tmp_path / "out", config, *options)) == {
            "extra-1.0",
            "layer-2.0",
        }
        # the index says one thing and sends another
        downloads = tmp_path / "out" / "work" / "downloads"
        (extra,) = downloads.glob("extra-*.whl")
        extra.unlink()
        served_wheel = folder / extra.name
        with served_wheel.open("ab") as wheel:
            wheel.write(b"more")
        error = refused(capsys, tmp_path / "out", config, *options)
        assert hashlib.sha256(served_wheel.read_bytes()).hexdigest() in error
        assert "name another source with --index" in error
        served_wheel.unlink()
        error = refused(capsys, tmp_path / "out", config, *options)
        assert "cannot be fetched: 404" in error
    assert [p.name for p in downloads.iterdir()] == ["layer-2.0-py3-none-any.whl"]


def settings_for(index: str) -> airgap.Settings:
    return airgap.settings_of(
        airgap.parser().parse_args(["pack", "out", f"--index={index}"])
    )


def test_an_index_that_asks_who_calls(index, tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    (wheel,) = index.glob("extra-*.whl")
    shutil.copy(wheel, folder)
    (tmp_path / "empty.toml").write_text("")
    with served(folder, "user:s@cret") as url:
        known = url.replace("//", "//user:s%40cret@")
        manifest = pack(
            tmp_path / "out",
            str(tmp_path / "empty.toml"),
            *("--requirement=extra", f"--index={known}"),
        )
        assert packed(manifest) == {"extra-1.0"}
        for file in (tmp_path / "out").rglob("*"):
            assert file.is_dir() or b"cret" not in file.read_bytes()
        # the pages are one thing, the wheels may be another
        place = url.removesuffix("/simple") + f"/{wheel.name}"
        wanted = airgap.Wheel("extra", wheel.name, sha256_of(wheel), place)
        for who, words in (
            (url, "401 to a call without a user; give a user"),
            (url.replace("//", "//user:wrong@"), "answers 401 to user user; give"),
        ):
            with pytest.raises(airgap.PackError, match=words) as caught:
                airgap.download([wanted], settings_for(who), tmp_path / "new")
            assert "wrong" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "login"),
    [
        ("https://host:8443/files/a.whl", ("us/er", "p:w")),
        ("http://host:8443/files/a.whl", None),
        ("https://host/files/a.whl", None),
        ("https://other:8443/a.whl", None),
    ],
)
def test_a_password_is_for_its_host(url, login):
    index = settings_for("https://us%2Fer:p%3Aw@host:8443/simple")
    assert airgap.login_of(url, index) == login


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--python=2.7"], ["--python 2.7", "such as 3.12"]),
        (["--python=3.12.1"], ["--python 3.12.1"]),
        (["--platform=linux_x86_64"], ["--platform linux_x86_64", "ldd --version"]),
        (["--platform=manylinux_2_4_x86_64"], ["--platform manylinux_2_4_x86_64"]),
        (["--platform=manylinux_2_28_sparc"], ["known machines are x86_64, aarch64"]),
        (["--limit=0"], ["--limit 0", "such as 60MiB"]),
        (["--limit=much"], ["--limit much"]),
        (["--limit=100"], ["--limit 100:", "more than 999 archives"]),
        (["--requirement=a b"], ["--requirement a b", "such as vllm==0.33.0"]),
        (["--requirements=none.txt"], ["--requirements", "none.txt"]),
        (["--present=none.txt"], ["--present none.txt", "pip list --format=freeze"]),
        (["--exclude=nvidia-*"], ["--exclude nvidia-*"]),
        (["--from-host=torch==2"], ["--from-host torch==2"]),
        (["--leave-out=engine"], ["--leave-out engine", "PACKAGE:GLOB"]),
        (["--leave-out=engine:*.dll"], ["'*.dll' matches no member of engine-1.0"]),
        (["--leave-out=engine:*"], ["engine-1.0.dist-info/", "describes the wheel"]),
        (
            ["--leave-out=other:*"],
            ["--leave-out: other is not packed", "engine, layer"],
        ),
        (["--stand-in=engine:a.py"], ["--stand-in engine:a.py", "MEMBER=FILE"]),
        (["--stand-in=engine:a.py=none.py"], ["there is no file", "none.py"]),
        (["--stand-in=engine:../a.py=README.md"], ["../a.py is not a path in a wheel"]),
        (["--stand-in=other:a.py=README.md"], ["--stand-in: other is not packed"]),
        (["--index=none"], ["--index none", "a folder of wheels"]),
        (["--requirement=absent==1"], ["absent", "--index"]),
    ],
    ids=lambda value: value[0] if value[0].startswith("--") else "",
)
def test_wrong_settings(options, words, configured, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(bootstrap.ROOT)
    error = refused(capsys, tmp_path / "out", configured(), *options)
    assert all(word in error for word in words), error
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("python = 3.12", ["python = 3.12 is not a string"]),
        ("exclude = 'torch'", ["exclude = 'torch' is not a list of strings"]),
        ("excludes = []", ["unknown name 'excludes'", "exclude, from-host"]),
        ("python", ["name a TOML file"]),
        ("", ["nothing to pack", "--requirement NAME==V"]),
        (
            "requirement = ['a']\npresent = ['host.txt']",
            ["'torch' is not NAME==VERSION"],
        ),
    ],
)
def test_wrong_configurations(text, words, tmp_path, capsys):
    (tmp_path / "host.txt").write_text("six==1\ntorch\n")
    file = tmp_path / "airgap.toml"
    file.write_text(text)
    error = refused(capsys, tmp_path / "out", str(file))
    assert all(word in error for word in words), error


def test_a_full_disk(configured, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(airgap, "write_archives", Mock(side_effect=full))
        error = refused(capsys, out, configured())
    assert f"OUT {out}: [Errno 28] No space left on device; make room" in error
    pack(out, configured())


def test_one_folder_is_packed_by_one_call(bundle, configured, capsys):
    with (bundle / "work" / "lock").open() as held:
        airgap.fcntl.flock(held, airgap.fcntl.LOCK_EX)
        assert "another call packs there" in refused(capsys, bundle, configured())


@settings(deadline=None)
@given(
    st.lists(st.binary(max_size=50), max_size=20),
    st.integers(min_value=1, max_value=60),
)
def test_cut_archives_join_to_what_was_cut(chunks, limit):
    archives: dict[int, bytes] = {}
    for number, piece in airgap.cut(chunks, limit):
        assert piece
        archives[number] = archives.get(number, b"") + piece
    assert b"".join(archives.values()) == b"".join(chunks)
    assert list(archives) == list(range(len(archives)))
    assert all(len(archive) == limit for archive in list(archives.values())[:-1])
    assert all(len(archive) <= limit for archive in archives.values())


@settings(deadline=None, max_examples=50)
@given(st.lists(st.binary(max_size=50), max_size=9), st.integers(1, 60))
def test_archives_are_read_as_one_file(tmp_path_factory, contents, size):
    folder = tmp_path_factory.getbasetemp() / "joined"
    folder.mkdir(exist_ok=True)
    files = []
    for number, data in enumerate(contents):
        files.append(folder / str(number))
        files[-1].write_bytes(data)
    with io.BufferedReader(airgap_unpack.Joined(files), size) as joined:
        assert joined.read() == b"".join(contents)


def settings_in(config: str) -> airgap.Settings:
    options = airgap.parser().parse_args(["pack", "out", f"--config={config}"])
    return airgap.settings_of(options)


def default_settings() -> airgap.Settings:
    return airgap.settings_of(airgap.parser().parse_args(["pack", "out"]))


@pytest.mark.parametrize("name", ["airgap.toml", "airgap-rocm.toml"])
def test_the_configurations_of_the_project(name):
    found = settings_in(str(bootstrap.REQUIREMENTS / name))
    assert found.limit <= 60 << 20
    wanted = {line.lower() for line in found.requirements()}
    for file in ("build.txt", "gpu-tests.txt"):
        for package, version in bootstrap.pins(file).items():
            assert f"{package}=={version}" in wanted
    # the host's PyTorch is used, whatever vLLM asks for
    assert "torch" in found.from_host
    assert not set(found.from_host) & set(found.exclude)
    # a vLLM for ROCm is of the host
    is_packed = any(line.startswith("vllm==") for line in wanted)
    assert is_packed == ("vllm" not in found.from_host) == (name == "airgap.toml")


def test_the_stand_in_offers_what_vllm_does():
    """The names of vLLM's own module, all found in the module below it."""
    default = default_settings()
    (vllm,) = (s for name, s in default.direct() if name == "vllm")
    (stand_in,) = default.stand_in
    assert dataclasses.astuple(stand_in)[:2] == (
        "vllm",
        "vllm/vllm_flash_attn/__init__.py",
    )
    try:
        source = fetch_sdist.unpack(str(vllm).removeprefix("=="))
    except requests.ConnectionError:
        if os.environ.get("CI"):
            raise
        pytest.skip("no package index is in reach")
    folder = source / "vllm" / "vllm_flash_attn"

    def names_of(file: Path) -> set[str]:
        for node in ast.parse(file.read_text()).body:
            match node:
                case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                    return set(ast.literal_eval(value))
        raise AssertionError(f"{file} has no __all__")

    imported = {
        alias.name
        for node in ast.parse(stand_in.file.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == names_of(stand_in.file) == names_of(folder / "__init__.py")
    below = ast.parse((folder / "flash_attn_interface.py").read_text()).body
    assert imported <= {getattr(node, "name", None) for node in below}
