# SPDX-License-Identifier: Apache-2.0
"""Whether the host reaches device memory, which PyTorch reads scalars through."""

from pathlib import Path

from vllm_rocm_memory.doctor.device import is_before, known_device, rocm
from vllm_rocm_memory.doctor.facts import HIP
from vllm_rocm_memory.doctor.finding import Finding, State
from vllm_rocm_memory.doctor.machine import Machine
from vllm_rocm_memory.sizes import readable

# rocm-systems#1620: a mapping may be opened to the host.
_HOST_ACCESS = (7, 2)
_TOTAL, _VISIBLE = "mem_info_vram_total", "mem_info_vis_vram_total"


def run(machine: Machine) -> Finding:
    facts = known_device(machine)
    if isinstance(facts, Finding):
        return facts
    if facts.vendor != HIP:
        return Finding(
            State.NOT_AVAILABLE,
            "PyTorch's CUDA build does not read device memory from the host",
        )
    # Of cards that are no devices of the runtime too, so only where it does not tell.
    cards = () if facts.large_bar else _small_cards(machine.root)
    if facts.large_bar is False or cards:
        return Finding(
            State.PARTIAL,
            "no large BAR: the host reaches a part of the device's memory only",
            cards,
            'Turn on "Above 4G decoding" and "Resizable BAR" in the firmware of the '
            "host; in a virtual machine, give the guest the whole BAR",
        )
    if is_before(facts, _HOST_ACCESS):
        return Finding(
            State.MISSING if _sleeps(machine) else State.PARTIAL,
            f"large BAR, and {facts.product} opens no mapping to the host: "
            "Tensor.item() and the like on sleep mode's memory end the process",
            remedy=f"Install {rocm(_HOST_ACCESS)} or later, or serve without "
            "--enable-sleep-mode",
        )
    if facts.large_bar is None:
        return Finding(
            State.NOT_AVAILABLE, f"{facts.product} does not say whether it has one"
        )
    return Finding(
        State.SUCCESS,
        f"large BAR, and {facts.product} opens sleep mode's memory to the host",
    )


def _sleeps(machine: Machine) -> bool:
    """Sleep mode is asked for in the arguments."""
    serving = machine.serving
    return not isinstance(serving, str) and serving.enable_sleep_mode


def _small_cards(root: Path) -> tuple[str, ...]:
    """A sentence for each card of amdgpu whose memory is not all visible."""
    told = []
    for total_file in sorted(root.glob(f"sys/class/drm/card*/device/{_TOTAL}")):
        try:
            total = int(total_file.read_text())
            visible = int(total_file.with_name(_VISIBLE).read_text())
        except (OSError, ValueError):
            continue
        if visible < total:
            card = total_file.parts[-3]
            told.append(f"{card}: {readable(visible)} of {readable(total)} are visible")
    return tuple(told)
