# SPDX-License-Identifier: Apache-2.0
"""A worker extension of vLLM: what sleep does to device memory, and faults in it."""

import time
from collections import Counter
from typing import Any

from copy_faults import CopyFaults
from vllm.device_allocator.cumem import CuMemAllocator

from vllm_rocm_memory.sim import hipsim, torch_device


class SleepFaults(CopyFaults):
    """What `/collective_rpc` reaches on each worker."""

    def device_memory(self) -> dict[str, Any]:
        """Bytes of the device, and of sleep's allocations by tag, mapped and asleep."""
        free, total = torch_device.get_memory_info()
        mapped: Counter[str] = Counter()
        asleep: Counter[str] = Counter()
        for data in CuMemAllocator.get_instance().pointer_to_data.values():
            (asleep if data.is_asleep else mapped)[data.tag] += data.handle[1]
        now = hipsim.stats()
        return {
            "free": free,
            "total": total,
            "mapped": dict(mapped),
            "asleep": dict(asleep),
            "handle bytes": now.handle_bytes,
            "executable graphs": now.executables,
            "graph launches": now.calls["hipGraphLaunch"],
            "memory faults": now.memory_faults,
        }

    def fail_call(
        self,
        call: str,
        nth: int = 1,
        error: int = 2,
        rank: int | None = None,
        times: int = 1,
    ) -> None:
        """Each nth of the next calls of a HIP function fails, so many of them.

        On one rank or on all.
        """
        if rank in (None, self.rank):
            for count in range(1, times + 1):
                hipsim.fail(call, count * nth, error)

    def slow_steps(self, seconds: float) -> None:
        """Each step of the model takes that much longer."""
        runner = self.model_runner
        vars(runner).pop("execute_model", None)
        if seconds > 0:
            execute_model = runner.execute_model

            def execute_slowly(*arguments: Any, **named: Any) -> Any:
                time.sleep(seconds)
                return execute_model(*arguments, **named)

            runner.execute_model = execute_slowly

    def start_over(self) -> None:
        """No fault and no latency; what the server's environment has set stays."""
        super().start_over()
        self.slow_steps(0)
        hipsim.reset()
        self._copy_rig().before.clear()
