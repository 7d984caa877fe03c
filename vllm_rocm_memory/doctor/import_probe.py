# SPDX-License-Identifier: Apache-2.0
"""Prints whether vLLM can be imported, as one line of JSON.

    python -m vllm_rocm_memory.doctor.import_probe

A program of its own, because an import may end its process.
"""

import importlib

from vllm_rocm_memory.doctor import probe


def find() -> str | None:
    """Why ``import vllm`` fails; None where it works."""
    try:
        importlib.import_module("vllm")
    except BaseException as error:  # also SystemExit
        words = " ".join(str(error).split())
        return f"{type(error).__name__}: {words}"
    return None


def main() -> None:
    probe.tell({"problem": find()})
    probe.end()


if __name__ == "__main__":
    main()
