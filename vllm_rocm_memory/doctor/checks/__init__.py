# SPDX-License-Identifier: Apache-2.0
"""The checks, in the order in which they run.

The module of a check has its name, with underscores, and a function
``run(machine: Machine) -> Finding``. It is imported when the check runs, so that one
which cannot be imported costs no other.
"""

from dataclasses import dataclass
from importlib import import_module

from vllm_rocm_memory.doctor.finding import Finding
from vllm_rocm_memory.doctor.machine import Machine


@dataclass(frozen=True)
class Check:
    """One question.

    Attributes:
        name: in lower case, words joined by ``-``.
        title: for people.
    """

    name: str
    title: str

    def run(self, machine: Machine) -> Finding:
        module = import_module(f"{__name__}.{self.name.replace('-', '_')}")
        finding: Finding = module.run(machine)
        return finding


CHECKS = (
    Check("base", "Base"),
    Check("series", "Patches of the series"),
    Check("hip-runtime", "GPU runtime"),
    Check("copy-flags", "Flags of batched copies"),
    Check("copy-engines", "Copies on copy engines"),
    Check("large-bar", "Host access to device memory"),
    Check("driver", "GPU driver"),
    Check("virtual-memory", "Virtual memory management"),
    Check("expandable-segments", "Expandable segments"),
    Check("aiter", "AITER"),
    Check("nccl-graph-register", "NCCL_GRAPH_REGISTER"),
    Check("memlock", "Locked memory"),
    Check("host-memory", "Host memory"),
    Check("huge-pages", "Huge pages"),
    Check("graph-pool", "Graph pool"),
)
