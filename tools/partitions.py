# SPDX-License-Identifier: Apache-2.0
"""Which machine a test file needs (`partitions.toml`), and whether this one will do.

Read by `tests/conftest.py` and by `gpu_tests.py`, which so give the same reasons.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FILE = "partitions.toml"
NAMES = ("cpu", "gpu", "gpu-2", "rocm-only")
SHARE_GPU_VARIABLE = "GPU_TESTS_SHARE_GPU"


class PartitionsError(Exception):
    """The file does not say what it has to; the text says where and why."""


@dataclass(frozen=True)
class Machine:
    """What PyTorch sees here.

    Attributes:
        torch: PyTorch's version.
        cuda: The version of CUDA that it is built for, or None.
        hip: The version of HIP that it is built for, or None.
        gpus: How many GPUs are visible.
        ranks_share_gpu: There is one, and the ranks of `gpu-2` are to share it.
    """

    torch: str
    cuda: str | None
    hip: str | None
    gpus: int
    ranks_share_gpu: bool = False

    @classmethod
    def seen_by_torch(cls) -> Machine:
        """Import torch, and ask it what it can say without a context on a GPU."""
        import torch

        gpus = 0
        if torch.cuda.is_available():
            # The runtime's count. Until its first use torch.cuda.device_count() is that
            # of amdsmi or NVML, which also count what this process cannot open.
            gpus = torch._C._cuda_getDeviceCount()
        shared = gpus == 1 and os.environ.get(SHARE_GPU_VARIABLE) == "1"
        return cls(
            torch.__version__, torch.version.cuda, torch.version.hip, gpus, shared
        )

    @property
    def build(self) -> str:
        """What PyTorch is built for."""
        if self.hip is not None:
            return f"HIP {self.hip}"
        return f"CUDA {self.cuda}" if self.cuda is not None else "the CPU"

    def lacks(self, partition: str) -> str | None:
        """Why a file of that partition cannot run here, or None."""
        none = f"PyTorch {self.torch} sees none"
        if partition == "gpu" and not self.gpus:
            return f"needs a GPU: {none}"
        if partition == "gpu-2" and self.gpus < 2 and not self.ranks_share_gpu:
            one = "1 is visible, which its ranks share with --share-gpu"
            return f"needs 2 GPUs: {one if self.gpus else none}"
        if partition == "rocm-only" and self.hip is None:
            return f"needs ROCm: PyTorch {self.torch} is built for {self.build}"
        if partition == "rocm-only" and not self.gpus:
            return f"needs an AMD GPU: {none}"
        return None


@dataclass(frozen=True)
class Partitions:
    """The files of each partition, relative to the folder of tests.

    Attributes:
        files: By partition, as the file has them: the quick ones first.
        also_gpu: Those of `cpu` that use a GPU where PyTorch is built for one.
        shared_gpu: Those of `gpu` and `also_gpu` that may run side by side on one GPU,
            the longest first.
    """

    files: Mapping[str, tuple[str, ...]]
    also_gpu: tuple[str, ...]
    shared_gpu: tuple[str, ...]

    @classmethod
    def read(cls, tests: Path) -> Partitions:
        """Read the file in the folder of tests.

        Raises:
            PartitionsError: There is none, or it is not as described above.
        """
        path = tests / FILE
        try:
            data = tomllib.loads(path.read_text())
        except OSError as error:
            raise PartitionsError(
                f"{path}: {error.strerror}; it has to say which machine each test "
                "file needs"
            ) from error
        except tomllib.TOMLDecodeError as error:
            raise PartitionsError(f"{path} is not TOML: {error}") from error
        also, shared = data.pop("also", {}), data.pop("shared", {})
        tables = {"also": also, "shared": shared}
        named = {f"{table}.{name}" for table in tables for name in tables[table]}
        if unknown := sorted({*data, *named} - {*NAMES, "also.gpu", "shared.gpu"}):
            raise PartitionsError(
                f"{path}: {', '.join(unknown)}: no such partition; there are "
                f"{', '.join(NAMES)}, also.gpu and shared.gpu"
            )
        partitions = cls(
            {name: tuple(data.get(name, ())) for name in NAMES},
            tuple(also.get("gpu", ())),
            tuple(shared.get("gpu", ())),
        )
        partitions._check(path)
        return partitions

    def _check(self, path: Path) -> None:
        listed = [file for files in self.files.values() for file in files]
        for files in (listed, self.shared_gpu):
            if twice := sorted({file for file in files if files.count(file) > 1}):
                raise PartitionsError(f"{path}: {', '.join(twice)}: listed twice")
        if strange := sorted({*self.also_gpu} - {*self.files["cpu"]}):
            raise PartitionsError(
                f"{path}: {', '.join(strange)}: in also.gpu and not in cpu"
            )
        on_one = {*self.files["gpu"], *self.also_gpu}
        if strange := sorted({*self.shared_gpu} - on_one):
            raise PartitionsError(
                f"{path}: {', '.join(strange)}: in shared.gpu, and neither in gpu nor "
                "in also.gpu"
            )

    def of(self, file: str) -> str | None:
        """The partition of a file, or None."""
        for name, files in self.files.items():
            if file in files:
                return name
        return None
