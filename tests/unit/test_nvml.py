"""The NVML adapter over a binding that answers as pynvml does."""

from __future__ import annotations

import os
import queue
import select
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from mpsd.base.errors import GpuError, NotFoundError, UnsupportedError
from mpsd.base.model import ComputeMode, Gpu, GpuProcess, NvmlXid
from mpsd.gpu.nvidia.nvml import Nvml


class NvmlFailure(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"value {value}")
        self.value = value


class Binding:
    """The part of pynvml that is used, for two GPUs. `failing` maps a function to the value it raises."""

    NVMLError = NvmlFailure
    NVML_ERROR_TIMEOUT = 10
    NVML_COMPUTEMODE_DEFAULT = 0
    NVML_COMPUTEMODE_PROHIBITED = 2
    nvmlEventTypeXidCriticalError = 8

    def __init__(self) -> None:
        self.failing: dict[str, int] = {}
        self.mode = 0
        self.events: queue.Queue[tuple[int, int, int] | int] = queue.Queue()
        self.freed = 0
        self.down = False

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "failing"):
            raise NvmlFailure(self.failing[name])
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None:
        self.down = True

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid not in ("GPU-0", "GPU-1"):
            raise NvmlFailure(6)
        return int(uuid[-1])

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA X"

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"00000000:9{handle}:0A.0")

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=1000, used=100 + handle)

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159.04"

    def nvmlDeviceGetComputeMode(self, handle: int) -> int:
        return self.mode

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=30, usedGpuMemory=5), SimpleNamespace(pid=20, usedGpuMemory=7)]

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=20, usedGpuMemory=None), SimpleNamespace(pid=10, usedGpuMemory=None)]

    def nvmlDeviceGetMinorNumber(self, handle: int) -> int:
        return handle + 3

    def nvmlDeviceGetAddressingMode(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetSupportedEventTypes(self, handle: int) -> int:
        return 8 | 1

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: int, kind: int, events: str) -> None: ...

    def nvmlEventSetFree(self, events: str) -> None:
        self.freed += 1

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> SimpleNamespace:
        item = self.events.get()
        if isinstance(item, int):
            raise NvmlFailure(item)
        device, kind, number = item
        return SimpleNamespace(device=device, eventType=kind, eventData=number)


@pytest.fixture
def binding() -> Binding:
    return Binding()


def manager(binding: Binding) -> Nvml:
    return Nvml(cast(ModuleType, binding))


def test_gpus_modes_and_memory(binding: Binding) -> None:
    nvml = manager(binding)
    assert nvml.gpus()[1] == Gpu(1, "GPU-1", "NVIDIA X", "0000:91:0a.0", 1000)
    assert nvml.driver_version() == "580.159.04"
    assert nvml.memory_used("GPU-1") == 101
    modes = []
    for binding.mode in range(4):
        modes.append(nvml.compute_mode("GPU-0"))
    assert modes == [
        ComputeMode.DEFAULT,
        ComputeMode.EXCLUSIVE_PROCESS,
        ComputeMode.PROHIBITED,
        ComputeMode.EXCLUSIVE_PROCESS,
    ]
    assert nvml.minor_number("GPU-1") == 4
    assert [nvml.addressing_mode(uuid) for uuid in ("GPU-0", "GPU-1")] == ["none", "hmm"]
    binding.failing["nvmlDeviceGetAddressingMode"] = 3
    assert nvml.addressing_mode("GPU-0") == "unknown"
    nvml.close()
    assert binding.down


def test_processes_of_both_lists_make_one(binding: Binding) -> None:
    assert manager(binding).processes("GPU-0") == [
        GpuProcess(10, None, True),
        GpuProcess(20, 7, True),
        GpuProcess(30, 5, False),
    ]


def test_errors_say_what_to_do(binding: Binding) -> None:
    nvml = manager(binding)
    with pytest.raises(NotFoundError, match="no GPU GPU-7"):
        nvml.compute_mode("GPU-7")
    binding.failing["nvmlDeviceGetMemoryInfo"] = 15
    with pytest.raises(GpuError, match="fell off the bus") as caught:
        nvml.memory_used("GPU-0")
    assert caught.value.status == 15
    binding.failing["nvmlInit"] = 12
    with pytest.raises(UnsupportedError, match="libnvidia-ml"):
        manager(binding)


def test_a_missing_binding_is_a_missing_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UnsupportedError, match="nvidia-ml-py"):
        Nvml()


def test_xids_wake_the_loop_and_errors_do_not_end_the_watch(
    binding: Binding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpsd.gpu.nvidia.nvml.WAIT_MS", 1)
    nvml = manager(binding)
    source = nvml.watch_xids()
    assert not os.get_inheritable(source.fileno())
    binding.events.put(10)
    binding.events.put((0, 1, 99))
    binding.events.put(15)
    binding.events.put((1, 8, 31))
    assert select.select([source], [], [], 20)[0]
    assert source.drain() == [NvmlXid("GPU-1", 31)]
    assert source.drain() == []
    assert not select.select([source], [], [], 0)[0]
    assert source.failure == "value 15"
    source.close()
    binding.events.put((1, 8, 31))
    source.join(20)
    assert source.drain() == []
    assert binding.freed == 1
    nvml.close()


def test_no_gpu_with_events_is_said(binding: Binding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Binding, "nvmlDeviceGetSupportedEventTypes", lambda self, handle: 1)
    with pytest.raises(UnsupportedError, match="Xids"):
        manager(binding).watch_xids()
    assert binding.freed == 1
