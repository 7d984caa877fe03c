# SPDX-License-Identifier: Apache-2.0
"""The compiled modules as they were built, without vLLM."""

import importlib.util
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType

import vllm_rocm_memory

NAME = "cumem_allocator"


def module_path(name: str = NAME) -> Path:
    """The built library."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    path = Path(vllm_rocm_memory.__file__).parent / "_native" / f"{name}{suffix}"
    assert path.is_file(), f"{path} is not built: run `make setup`"
    return path


@cache
def load_module(name: str = NAME) -> ModuleType:
    """The module, loaded once in a process."""
    spec = importlib.util.spec_from_file_location(name, module_path(name))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
