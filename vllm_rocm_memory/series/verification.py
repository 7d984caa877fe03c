# SPDX-License-Identifier: Apache-2.0
"""Importing the touched modules in a fresh process."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_rocm_memory.series.target import Target

# Loading torch from a cold disk is the slowest part.
TIMEOUT_S = 300

_SCRIPT = """
import importlib, json, os, sys
root, *modules = sys.argv[1:]
sys.path.insert(0, root)
failures = {}
for name in modules:
    try:
        importlib.import_module(name)
        origin = sys.modules["vllm"].__file__
        if not os.path.samefile(origin, os.path.join(root, "vllm", "__init__.py")):
            raise ImportError(f"vllm was imported from {origin}")
    except BaseException as error:
        failures[name] = f"{type(error).__name__}: {error}".splitlines()[0]
sys.stdout.flush()
print("\\n" + json.dumps(failures), flush=True)
os._exit(0)
"""


def import_failures(target: Target, modules: Sequence[str]) -> dict[str, str]:
    """Import `modules` from `target` in a fresh process.

    Returns:
        module -> the error, for those that do not import. Where the process died or
        took too long, every module failed.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        # The simulator's platform plugin is not what is verified here.
        if name != "HIPSIM_PROFILE"
    }
    # No bytecode: it would stay behind in a target that is rolled back.
    command = [_interpreter(target.root), "-B", "-c", _SCRIPT, str(target.root)]
    try:
        process = subprocess.run(
            [*command, *modules],
            env={**environment, "PYTHONSAFEPATH": "1"},
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return dict.fromkeys(modules, f"no import within {TIMEOUT_S} s")
    try:
        # vLLM's log may go to stdout too.
        failures: dict[str, str] = json.loads(process.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = process.stderr.strip().rpartition("\n")[2]
        error = f"the interpreter ended with code {process.returncode}: {last}"
        return dict.fromkeys(modules, error)
    return failures


def blame(
    after: Mapping[str, str], before: Mapping[str, str], existed: Sequence[str]
) -> dict[str, str]:
    """The failures that the change brought, rather than found.

    A module that imported before, or that is new and fails in a way in which nothing
    failed before, is the change's fault. The rest does not import here anyway: the
    target is for another machine.

    Args:
        after: the failures with the change.
        before: the failures without it.
        existed: the modules that were there without it.
    """
    return {
        module: error
        for module, error in after.items()
        if (module not in before if module in existed else error not in before.values())
    }


def _interpreter(root: Path) -> str:
    """The Python whose site-packages `root` is, else the one that runs us."""
    # PREFIX/lib/pythonX.Y/site-packages
    if len(root.parents) > 2:
        prefix = root.parents[2]
        own = prefix / "bin" / root.parent.name
        if own.is_file() and prefix.resolve() != Path(sys.prefix).resolve():
            return str(own)
    return sys.executable
