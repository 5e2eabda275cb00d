"""NVML's reports, for the samplers."""

from __future__ import annotations

import threading
from typing import Any

import pynvml

from faultinject.campaigns.measure.rig import now


class Nvml:
    """GPU 0 through NVML. Methods return plain comparable values."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        self.handle: Any = pynvml.nvmlDeviceGetHandleByIndex(0)

    def text(self, name: str, *arguments: Any) -> str:
        value = getattr(pynvml, name)(*arguments)
        return value.decode() if isinstance(value, bytes) else str(value)

    @property
    def uuid(self) -> str:
        return self.text("nvmlDeviceGetUUID", self.handle)

    def arch(self) -> str:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(self.handle)
        return f"sm_{major}{minor}"

    def used_mib(self) -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(self.handle).used) >> 20

    def processes(self) -> list[list[int | None]]:
        found = pynvml.nvmlDeviceGetComputeRunningProcesses(self.handle)
        return sorted([p.pid, p.usedGpuMemory] for p in found)

    def mps_processes(self) -> list[list[int | None]]:
        found = pynvml.nvmlDeviceGetMPSComputeRunningProcesses(self.handle)
        return sorted([p.pid, p.usedGpuMemory] for p in found)

    def utilization(self) -> list[list[int]]:
        """Return [pid, SM utilisation, timestamp in us] per process sample."""
        found = pynvml.nvmlDeviceGetProcessUtilization(self.handle, 0)
        return sorted([s.pid, s.smUtil, s.timeStamp] for s in found)

    def gpu_busy(self) -> int:
        return int(pynvml.nvmlDeviceGetUtilizationRates(self.handle).gpu)


class Occupancy:
    """Whole-GPU SM figures between two calls, from the GPM counters (Hopper and later)."""

    def __init__(self, nvml: Nvml) -> None:
        self._handle = nvml.handle
        self._old: Any = pynvml.nvmlGpmSampleAlloc()
        self._new: Any = pynvml.nvmlGpmSampleAlloc()
        pynvml.nvmlGpmSampleGet(self._handle, self._old)

    def __call__(self) -> list[float]:
        """Return [graphics utilisation, SM utilisation, SM occupancy] in percent since the last call."""
        pynvml.nvmlGpmSampleGet(self._handle, self._new)
        get = pynvml.c_nvmlGpmMetricsGet_t()
        get.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        get.numMetrics = 3
        get.sample1, get.sample2 = self._old, self._new
        for index in range(3):
            get.metrics[index].metricId = index + 1
        pynvml.nvmlGpmMetricsGet(get)
        self._old, self._new = self._new, self._old
        return [round(get.metrics[index].value, 2) for index in range(3)]


class Xids:
    """Critical Xids as NVML reports them, with their time of arrival."""

    def __init__(self, nvml: Nvml) -> None:
        self.seen: list[tuple[float, int]] = []
        self._events = pynvml.nvmlEventSetCreate()
        pynvml.nvmlDeviceRegisterEvents(nvml.handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 100)
            except pynvml.NVMLError:
                continue
            self.seen.append((now(), int(event.eventData)))

    def since(self, moment: float) -> list[tuple[float, int]]:
        return [(t, xid) for t, xid in self.seen if t >= moment]

    def close(self) -> None:
        self._stop.set()
        self._thread.join(2)
        pynvml.nvmlEventSetFree(self._events)
