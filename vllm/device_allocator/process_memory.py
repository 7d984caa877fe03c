# SPDX-License-Identifier: Apache-2.0
"""How much of a device's memory this process has, by the driver's own account.

Both drivers count by the process ids of the host, so in another namespace of process
ids, which is what a container gets, their figures are those of somebody else.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

HOST_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO, 0xEFFFFFFC, in Linux's include/linux/proc_ns.h."""


class UnknownProcessMemory(RuntimeError):
    """The driver does not tell; the text is the reason."""


class PciAddress(NamedTuple):
    """Where a GPU is; it is at function 0."""

    domain: int
    bus: int
    device: int

    def __str__(self) -> str:
        return f"{self.domain:04x}:{self.bus:02x}:{self.device:02x}.0"


def process_bytes(device: int, root: Path = Path("/")) -> int:
    """Bytes of a device's memory that the driver counts for this process.

    Args:
        device: Its index in this process.
        root: Where ``proc`` and ``sys`` are.

    Raises:
        UnknownProcessMemory: The driver does not tell.

    """
    if not (torch.version.hip or torch.version.cuda):
        raise UnknownProcessMemory("this PyTorch is built for no GPU")
    _check_pid_namespace(root)
    address = _pci_address(device)
    if torch.version.hip:
        return kfd_bytes(address, root)
    from vllm.third_party import pynvml

    return nvml_bytes(address, pynvml)


def kfd_bytes(address: PciAddress, root: Path = Path("/")) -> int:
    """What AMD's kernel driver counts, from its files in sysfs.

    That is what the process has made, and not what it has opened of another's.
    ``proc/<pid>/vram_<gpu id>`` is in kfd_process.c of Linux's amdkfd,
    ``topology/nodes/*/properties`` in its kfd_topology.c.

    Raises:
        UnknownProcessMemory: A file is not there, or the GPU is partitioned: its parts
            have one address, and a figure each.

    """
    kfd = root / "sys/class/kfd/kfd"
    ids = [gpu for at, gpu in _kfd_gpus(kfd / "topology/nodes") if at == address]
    if not ids:
        raise UnknownProcessMemory(f"{kfd}/topology/nodes has no GPU at {address}")
    if len(ids) > 1:
        raise UnknownProcessMemory(
            f"the GPU at {address} is partitioned, and {len(ids)} parts share its "
            "address"
        )
    file = kfd / f"proc/{os.getpid()}/vram_{ids[0]}"
    try:
        return int(file.read_text())
    except (OSError, ValueError) as error:
        raise UnknownProcessMemory(f"{file} cannot be read: {error}") from None


def _kfd_gpus(nodes: Path) -> Iterator[tuple[PciAddress, int]]:
    for node in sorted(nodes.glob("*")):
        try:
            gpu = int((node / "gpu_id").read_text())
            properties = _properties(node / "properties")
            location, domain = properties["location_id"], properties["domain"]
        except (OSError, ValueError, KeyError):
            continue  # no GPU of this container
        if gpu:  # 0 is a CPU's
            yield PciAddress(domain, location >> 8 & 0xFF, location >> 3 & 0x1F), gpu


def _properties(file: Path) -> Mapping[str, int]:
    pairs = (line.split() for line in file.read_text().splitlines())
    return {name: int(value) for name, value in pairs}


def nvml_bytes(address: PciAddress, nvml: Any) -> int:
    """What NVIDIA's driver counts, by NVML.

    Args:
        address: The GPU's.
        nvml: The module ``pynvml``, or one like it.

    Raises:
        UnknownProcessMemory: NVML does not tell, or the GPU is partitioned (MIG): it
            lists the processes of the whole GPU.

    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise UnknownProcessMemory(f"NVML cannot be used: {error}") from None
    try:
        gpu = nvml.nvmlDeviceGetHandleByPciBusId(str(address))
        if _is_mig(gpu, nvml):
            raise UnknownProcessMemory(
                f"the GPU at {address} is partitioned (MIG), and NVML tells of the "
                "whole GPU"
            )
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
    except nvml.NVMLError as error:
        raise UnknownProcessMemory(
            f"NVML does not list the processes of the GPU at {address}: {error}"
        ) from None
    finally:
        nvml.nvmlShutdown()
    for process in processes:
        if process.pid == os.getpid() and process.usedGpuMemory is not None:
            return int(process.usedGpuMemory)
    raise UnknownProcessMemory(
        f"NVML has no figure for process {os.getpid()} on the GPU at {address}; under "
        "MPS it lists the MPS server instead"
    )


def _is_mig(gpu: Any, nvml: Any) -> bool:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(gpu)
    except nvml.NVMLError:
        return False  # a GPU that cannot be partitioned
    return bool(current)


def _check_pid_namespace(root: Path) -> None:
    try:
        namespace = str((root / "proc/self/ns/pid").readlink())
    except OSError as error:
        raise UnknownProcessMemory(
            f"the namespace of process ids is not known: {error}"
        ) from None
    if namespace != HOST_PID_NAMESPACE:
        raise UnknownProcessMemory(
            "the driver counts by the host's process ids, which this container does "
            "not see; --pid=host (Docker) or hostPID (Kubernetes) shows them"
        )


def _pci_address(device: int) -> PciAddress:
    found: Any = torch.cuda.get_device_properties(device)
    try:
        return PciAddress(found.pci_domain_id, found.pci_bus_id, found.pci_device_id)
    except AttributeError:
        raise UnknownProcessMemory(
            "this PyTorch does not tell the device's PCI address"
        ) from None
