# SPDX-License-Identifier: Apache-2.0
"""Files of the series as modules, whether or not the target has them."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def import_file(file: Path) -> ModuleType:
    """Run a file as a module of its own, which nobody else can import.

    Raises:
        ImportError: it is no Python file.
    """
    spec = spec_from_file_location(f"_doctor_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be imported")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
