"""A DeviceManager with one GPU, for tests that only need the processes on it."""

from __future__ import annotations

from collections.abc import Sequence

from mpsd.base.errors import UnsupportedError
from mpsd.base.model import ComputeMode, Gpu, GpuProcess
from mpsd.gpu.base import XidSource

GPU = Gpu(0, "GPU-1", "Some GPU", "0000:01:00.0", 1 << 30)


class OneGpu:
    """A GPU with these processes on it, and nothing else."""

    def __init__(self, *processes: GpuProcess) -> None:
        self.on_it = processes

    def gpus(self) -> Sequence[Gpu]:
        return [GPU]

    def processes(self, gpu_uuid: str) -> Sequence[GpuProcess]:
        return self.on_it

    def driver_version(self) -> str:
        return "0"

    def compute_mode(self, gpu_uuid: str) -> ComputeMode:
        return ComputeMode.DEFAULT

    def memory_used(self, gpu_uuid: str) -> int:
        return 0

    def watch_xids(self) -> XidSource:
        raise UnsupportedError("this GPU reports no Xids")

    def close(self) -> None: ...
