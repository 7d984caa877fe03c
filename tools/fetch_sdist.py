# SPDX-License-Identifier: Apache-2.0
"""Fetch a source distribution of vLLM into `.cache/`, once, with its digest checked.

pip can't do this: for a source distribution it also prepares the metadata, and
vLLM's needs a compiler toolchain for its device.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import requests
import truststore
from pypi_simple import PYPI_SIMPLE_ENDPOINT, PyPISimple

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "sdist"


def pip_settings() -> dict[str, str]:
    """What pip is configured to use, its environment before its files."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    settings: dict[str, str] = {}
    for section in ("global", ":env:"):
        lines = rf"^{section}\.(\S+)='(.+)'$"
        settings |= dict(re.findall(lines, listing, re.MULTILINE))
    return settings


def fetch(version: str) -> Path:
    """The tarball of `vllm==version`.

    Raises:
        LookupError: the package index has no source distribution of it.
    """
    target = CACHE / f"vllm-{version}.tar.gz"
    if target.exists():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    truststore.inject_into_ssl()  # the system's certificates, as pip does
    session = requests.Session()
    pip = pip_settings()
    session.verify = pip.get("cert", True)
    index = pip.get("index-url", PYPI_SIMPLE_ENDPOINT)
    with PyPISimple(index, session=session) as client:
        packages = client.get_project_page("vllm").packages
        for package in packages:
            if (package.package_type, package.version) == ("sdist", version):
                partial = target.with_suffix(f".{os.getpid()}")
                client.download_package(package, partial)  # verifies the sha256
                partial.replace(target)
                return target
    raise LookupError(f"the package index has no source distribution of vllm {version}")


def unpack(version: str) -> Path:
    """The unpacked tree of `vllm==version`, as released; not to be changed."""
    target = CACHE / f"vllm-{version}"
    if not target.exists():
        partial = CACHE / f"unpacking-{version}-{os.getpid()}"
        with tarfile.open(fetch(version)) as archive:
            # not in the oldest 3.11 releases
            filter_ = getattr(tarfile, "data_filter", lambda member, path: member)
            archive.extraction_filter = filter_
            archive.extractall(partial)
        try:
            (partial / target.name).rename(target)
        except OSError:
            if not target.exists():  # else another process was first
                raise
        shutil.rmtree(partial)
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", help="a version of vLLM, such as 0.33.0")
    parser.add_argument("--unpack", action="store_true", help="unpack it as well")
    options = parser.parse_args()
    try:
        print((unpack if options.unpack else fetch)(options.version))
    except (LookupError, requests.RequestException) as error:
        sys.exit(f"vllm {options.version} cannot be fetched: {error}")
