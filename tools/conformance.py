# SPDX-License-Identifier: Apache-2.0
"""Run vLLM's own KV offload tests, unchanged, on a tree with the series applied.

The tests come from the source distribution of vLLM 0.33.0, laid out in
`.cache/conformance` where nothing else can be imported in the tree's place. The
same tests run once on the unpatched tree: the patched one passes when every
test has the same outcome there and none fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import fetch_sdist

VERSION = "0.33.0"
FOLDER = "tests/v1/simple_kv_offload"
WORK = fetch_sdist.CACHE.parent / "conformance"

# The tests name a model of the hub, of which they read the config alone; a local
# folder of that name with the values of the smallest OPT serves them.
OPT_125M = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "torch_dtype": "float16",
}

# loaded by pytest with -p: without it a wrong tree would pass unnoticed
GUARD = """
from pathlib import Path

import vllm


def pytest_sessionstart(session):
    expected = Path(__file__).parent / "vllm"
    assert Path(vllm.__file__).parent == expected, (vllm.__file__, expected)
"""


def lay_out(name: str) -> Path:
    """A folder to run in: the tests, the config, and `site` with a fresh vllm."""
    source = fetch_sdist.unpack(VERSION)
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    model = folder / "facebook" / "opt-125m"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(OPT_125M))
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    skip_global_cleanup: of upstream's conftest\n"
    )
    shutil.copytree(source / "tests", folder / "tests")
    shutil.copytree(source / "vllm", folder / "site" / "vllm")
    (folder / "site" / "conformance_guard.py").write_text(GUARD)
    return folder


def run(folder: Path, arguments: list[str]) -> dict[str, str]:
    """Outcome by test: passed, skipped or failed."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", FOLDER, "-p", "conformance_guard"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(folder / "site"), str(folder))),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    environment.pop("HIPSIM_PROFILE", None)
    subprocess.run(
        [*command, "-q", f"--junit-xml={report}", *arguments],
        cwd=folder,
        env=environment,
        timeout=1200,
    )
    if not report.exists():
        sys.exit("pytest ended without a report; its output is above")
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        failed = kinds & {"failure", "error"}
        outcome = "failed" if failed else "skipped" if "skipped" in kinds else "passed"
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    _, arguments = parser.parse_known_args()  # the rest is pytest's

    unpatched = WORK / "unpatched.json"
    if arguments or not unpatched.exists():
        print(f"vLLM {VERSION}, unpatched:", flush=True)
        before = run(lay_out("unpatched"), arguments)
        if not arguments:
            unpatched.write_text(json.dumps(before))
    else:
        before = json.loads(unpatched.read_text())

    print(f"vLLM {VERSION}, with the series applied:", flush=True)
    folder = lay_out("patched")
    series = Path(sys.executable).with_name("vllm-rocm-memory")
    subprocess.run([series, "apply", "--target", folder / "site"], check=True)
    after = run(folder, arguments)

    differ = {t for t in before.keys() | after.keys() if before.get(t) != after.get(t)}
    for test in sorted(differ):
        print(f"{test}: {before.get(test)} unpatched, {after.get(test)} patched")
    for name, outcomes in (("unpatched", before), ("patched", after)):
        count = Counter(outcomes.values())
        print(f"{name}: {count['passed']} passed, {count['skipped']} skipped", end="")
        print(f", {count['failed']} failed")
    return 1 if differ or "failed" in after.values() or not after else 0


if __name__ == "__main__":
    sys.exit(main())
