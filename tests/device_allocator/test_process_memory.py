# SPDX-License-Identifier: Apache-2.0
"""What the drivers count for this process, from trees of files and doubles of NVML."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from vllm.device_allocator import process_memory
from vllm.device_allocator.process_memory import (
    HOST_PID_NAMESPACE,
    PciAddress,
    UnknownProcessMemory,
    kfd_bytes,
    nvml_bytes,
    process_bytes,
)
from vllm.device_allocator.sleep_report import device_memory

GIB = 1 << 30
GPU = PciAddress(domain=1, bus=0xC1, device=3)
OTHER = PciAddress(domain=0, bus=0xC1, device=3)


def location(address: PciAddress, part: int = 0) -> int:
    """As pci_dev_id() in Linux, with the number of a part above it (kfd_topology.c)."""
    return part << 28 | address.bus << 8 | address.device << 3


# --- amdkfd ---------------------------------------------------------------------------


class Kfd:
    """What amdkfd shows of a machine with these GPUs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._folder = root / "sys/class/kfd/kfd"
        self._nodes = 0
        self.add_node(None, 0)  # the CPUs

    def add_node(self, address: PciAddress | None, gpu: int, part: int = 0) -> Path:
        node = self._folder / f"topology/nodes/{self._nodes}"
        self._nodes += 1
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(f"{gpu}\n")
        at = address or PciAddress(0, 0, 0)
        (node / "properties").write_text(
            f"cpu_cores_count 0\nlocation_id {location(at, part)}\n"
            f"domain {at.domain}\nmax_engine_clk_ccompute 3700\n"
        )
        return node

    def add_process(self, text: str, gpu: int, pid: int | None = None) -> None:
        folder = self._folder / f"proc/{pid or os.getpid()}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"vram_{gpu}").write_text(text)


@pytest.fixture
def kfd(tmp_path: Path) -> Kfd:
    return Kfd(tmp_path)


def test_the_kernel_counts(kfd: Kfd) -> None:
    kfd.add_node(OTHER, 111)
    kfd.add_node(GPU, 222)
    for gpu in (111, 222):
        kfd.add_process(f"{gpu * GIB}\n", gpu)
        kfd.add_process("5\n", gpu, pid=1)
    assert kfd_bytes(GPU, kfd.root) == 222 * GIB
    assert kfd_bytes(OTHER, kfd.root) == 111 * GIB


def test_nodes_that_the_container_may_not_read(kfd: Kfd) -> None:
    """Their files are there, and refuse (kfd_devcgroup_check_permission)."""
    hidden = kfd.add_node(OTHER, 111)
    (hidden / "properties").unlink()
    (hidden / "properties").mkdir()
    broken = kfd.add_node(OTHER, 333)
    (broken / "gpu_id").write_text("")
    kfd.add_node(GPU, 222)
    kfd.add_process("7\n", 222)
    assert kfd_bytes(GPU, kfd.root) == 7
    with pytest.raises(UnknownProcessMemory, match=r"has no GPU at 0000:c1:03\.0"):
        kfd_bytes(OTHER, kfd.root)


def test_a_machine_without_kfd(tmp_path: Path) -> None:
    with pytest.raises(UnknownProcessMemory, match=r"has no GPU at 0001:c1:03\.0"):
        kfd_bytes(GPU, tmp_path)


def test_a_partitioned_gpu_of_amd(kfd: Kfd) -> None:
    for part in range(8):
        kfd.add_node(GPU, 200 + part, part)
        kfd.add_process("1\n", 200 + part)
    with pytest.raises(UnknownProcessMemory, match="partitioned, and 8 parts share"):
        kfd_bytes(GPU, kfd.root)


@pytest.mark.parametrize("text", [None, "", "many\n"])
def test_no_figure_of_the_kernel_s(kfd: Kfd, text: str | None) -> None:
    kfd.add_node(GPU, 222)
    if text is not None:
        kfd.add_process(text, 222)
    with pytest.raises(UnknownProcessMemory, match=r"proc/\d+/vram_222 cannot be read"):
        kfd_bytes(GPU, kfd.root)


# --- NVML -----------------------------------------------------------------------------


class NVMLError(Exception):
    """pynvml's."""


def process(pid: int, used: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


class Nvml:
    """pynvml, of a machine with one GPU.

    Attributes:
        fails: The function that does, and for the others None.
        open: How often it was initialized and not shut down.
    """

    NVMLError = NVMLError

    def __init__(self, *processes: SimpleNamespace, mig: int | None = 0) -> None:
        self.fails: str | None = None
        self.open = 0
        self._processes = processes
        self._mig = mig

    def _call(self, name: str) -> None:
        if self.fails == name:
            raise NVMLError(f"{name} failed")

    def nvmlInit(self) -> None:
        self._call("nvmlInit")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> str:
        self._call("nvmlDeviceGetHandleByPciBusId")
        assert bus_id == "0001:c1:03.0"
        return "the GPU"

    def nvmlDeviceGetMigMode(self, gpu: str) -> list[int]:
        if self._mig is None:
            raise NVMLError("Not Supported")
        return [self._mig, 0]

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: str) -> list[Any]:
        self._call("nvmlDeviceGetComputeRunningProcesses")
        assert self.open and gpu == "the GPU"
        return list(self._processes)


@pytest.mark.parametrize("mig", [0, None])
def test_nvml_counts(mig: int | None) -> None:
    nvml = Nvml(process(1, 5), process(os.getpid(), 7 * GIB), mig=mig)
    assert nvml_bytes(GPU, nvml) == 7 * GIB
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("nvml", "reason"),
    [
        (Nvml(), "has no figure for process"),
        (Nvml(process(1, 5)), "has no figure for process .* under MPS"),
        (Nvml(process(os.getpid(), None)), "has no figure for process"),
        (Nvml(process(os.getpid(), 5), mig=1), r"partitioned \(MIG\)"),
    ],
    ids=["nobody", "others", "not told", "MIG"],
)
def test_no_figure_of_nvml_s(nvml: Nvml, reason: str) -> None:
    with pytest.raises(UnknownProcessMemory, match=reason):
        nvml_bytes(GPU, nvml)
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("nvmlInit", "NVML cannot be used: nvmlInit failed"),
        ("nvmlDeviceGetHandleByPciBusId", "does not list .*0001:c1:03.0: nvmlDev"),
        ("nvmlDeviceGetComputeRunningProcesses", "does not list the processes"),
    ],
)
def test_nvml_fails(call: str, reason: str) -> None:
    nvml = Nvml(process(os.getpid(), 5))
    nvml.fails = call
    with pytest.raises(UnknownProcessMemory, match=reason):
        nvml_bytes(GPU, nvml)
    assert nvml.open == 0


# --- Which of them --------------------------------------------------------------------


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes PyTorch one that is built for a vendor, and its device 2 `GPU`."""

    def properties(device: int) -> SimpleNamespace:
        assert device == 2
        return SimpleNamespace(
            pci_domain_id=GPU.domain, pci_bus_id=GPU.bus, pci_device_id=GPU.device
        )

    def set_vendor(vendor: str) -> None:
        for each in ("hip", "cuda"):
            version = "7.1" if each == vendor else None
            monkeypatch.setattr(torch.version, each, version)
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)

    return set_vendor


@pytest.fixture
def on_the_host(tmp_path: Path) -> Path:
    """A root in which this process is in the host's namespace of process ids."""
    return in_namespace(tmp_path, HOST_PID_NAMESPACE)


def in_namespace(root: Path, namespace: str) -> Path:
    folder = root / "proc/self/ns"
    folder.mkdir(parents=True)
    (folder / "pid").symlink_to(namespace)
    return root


def test_amd(build: Callable[[str], None], on_the_host: Path) -> None:
    build("hip")
    kfd = Kfd(on_the_host)
    kfd.add_node(GPU, 222)
    kfd.add_process("12345\n", 222)
    assert process_bytes(2, on_the_host) == 12345


def test_nvidia(
    build: Callable[[str], None], on_the_host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.third_party

    build("cuda")
    nvml = Nvml(process(os.getpid(), 67))
    monkeypatch.setattr(vllm.third_party, "pynvml", nvml, raising=False)
    assert process_bytes(2, on_the_host) == 67


def test_no_vendor(build: Callable[[str], None], on_the_host: Path) -> None:
    build("none")
    with pytest.raises(UnknownProcessMemory, match="built for no GPU"):
        process_bytes(2, on_the_host)


def test_a_container(build: Callable[[str], None], tmp_path: Path) -> None:
    build("hip")
    root = in_namespace(tmp_path, "pid:[4026532281]")
    with pytest.raises(UnknownProcessMemory, match=r"--pid=host \(Docker\) or hostPID"):
        process_bytes(2, root)


def test_no_namespaces(build: Callable[[str], None], tmp_path: Path) -> None:
    build("hip")
    with pytest.raises(UnknownProcessMemory, match="namespace of process ids is not"):
        process_bytes(2, tmp_path)


def test_a_pytorch_that_does_not_tell_where_the_device_is(
    build: Callable[[str], None], on_the_host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("hip")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="X")
    )
    with pytest.raises(UnknownProcessMemory, match="does not tell the device's PCI"):
        process_bytes(2, on_the_host)


def test_the_host_s_namespace_is_this_one_s_or_not() -> None:
    """The link of a real kernel has the form that is looked for."""
    link = str(Path("/proc/self/ns/pid").readlink())
    assert link.partition("[")[0] == HOST_PID_NAMESPACE.partition("[")[0] == "pid:"


# --- In an account --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UnknownProcessMemory("it is silent"), "it is silent"),
        (OSError("it is broken"), "OSError: it is broken"),
    ],
)
def test_a_reason_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def unknown(device: int) -> NoReturn:
        raise error

    monkeypatch.setattr(process_memory, "process_bytes", unknown)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (3, 10))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda **options: [])
    memory = device_memory(0, lambda: ({"weights": 2}, {}), frozenset)
    assert (memory.others_bytes, memory.others_unknown) == (None, reason)
    assert (memory.rest_bytes, memory.used_bytes) == (5, 7)
