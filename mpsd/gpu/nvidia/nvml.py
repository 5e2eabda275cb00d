"""NVML as gpu.base.DeviceManager, through the official binding (package nvidia-ml-py, module pynvml).

The binding loads libnvidia-ml.so.1, never CUDA. Memory is in bytes. An Xid event has a GPU and a number, but
no process (NVML reference, nvmlEventData_t).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from mpsd.base.errors import GpuError, NotFoundError, UnsupportedError
from mpsd.base.model import ComputeMode, Gpu, GpuProcess, NvmlXid

WAIT_MS = 1000
_NO_DRIVER = "install the NVIDIA driver and load its modules (nvidia-smi must work)"
# Remedies for NVML return values (nvml.h).
_REMEDIES = {
    4: "run as root, or give this user the device nodes",
    9: _NO_DRIVER,
    12: "install the driver's libnvidia-ml.so.1, or mount it into the container",
    15: "the GPU fell off the bus: reset it or reboot the machine",
    16: "reset the GPU (nvidia-smi --gpu-reset) or reboot the machine",
    18: "reboot: the library and the loaded module differ after a driver upgrade",
}
_NOT_SUPPORTED = frozenset({3, 9, 12, 13, 18})


def _binding() -> ModuleType:
    try:
        import pynvml
    except ImportError as error:
        raise UnsupportedError(
            "the Python binding of NVML is missing", remedy="pip install nvidia-ml-py"
        ) from error
    return pynvml  # type: ignore[no-any-return]


def pci_address(bus_id: str) -> str:
    """Convert NVML's dddddddd:bb:dd.f to dddd:bb:dd.f in lower case."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


class Nvml:
    """gpu.base.DeviceManager. Raises UnsupportedError without driver or library."""

    def __init__(self, binding: ModuleType | None = None) -> None:
        """Start NVML. `binding` replaces pynvml in tests."""
        self._nvml: Any = binding or _binding()
        self._sources: list[NvmlXids] = []
        with self._errors("start NVML"):
            self._nvml.nvmlInit()

    def gpus(self) -> list[Gpu]:
        with self._errors("list GPUs"):
            return [self._gpu(index) for index in range(self._nvml.nvmlDeviceGetCount())]

    def driver_version(self) -> str:
        with self._errors("read the driver version"):
            return _text(self._nvml.nvmlSystemGetDriverVersion())

    def compute_mode(self, gpu_uuid: str) -> ComputeMode:
        with self._errors(f"read the compute mode of {gpu_uuid}"):
            mode = self._nvml.nvmlDeviceGetComputeMode(self._handle(gpu_uuid))
        if mode == self._nvml.NVML_COMPUTEMODE_PROHIBITED:
            return ComputeMode.PROHIBITED
        # Exclusive thread, of old drivers, is at least as strict as exclusive process.
        return (
            ComputeMode.DEFAULT
            if mode == self._nvml.NVML_COMPUTEMODE_DEFAULT
            else ComputeMode.EXCLUSIVE_PROCESS
        )

    def minor_number(self, gpu_uuid: str) -> int:
        """Return N of the GPU's /dev/nvidiaN."""
        with self._errors(f"read the device number of {gpu_uuid}"):
            return int(self._nvml.nvmlDeviceGetMinorNumber(self._handle(gpu_uuid)))

    def addressing_mode(self, gpu_uuid: str) -> str:
        """Return the GPU's access to host memory: "none", "hmm", "ats", or "unknown" to this NVML."""
        try:
            with self._errors(f"read the addressing mode of {gpu_uuid}"):
                mode = self._nvml.nvmlDeviceGetAddressingMode(self._handle(gpu_uuid))
        except UnsupportedError:
            return "unknown"
        return {0: "none", 1: "hmm", 2: "ats"}.get(mode, "unknown")

    def memory_used(self, gpu_uuid: str) -> int:
        with self._errors(f"read the memory of {gpu_uuid}"):
            return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle(gpu_uuid)).used)

    def processes(self, gpu_uuid: str) -> list[GpuProcess]:
        """Return processes with a compute context: MPS servers, MPS clients and processes outside MPS."""
        with self._errors(f"list the processes of {gpu_uuid}"):
            handle = self._handle(gpu_uuid)
            direct = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            clients = self._nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)
        found: dict[int, GpuProcess] = {}
        for mps, rows in ((False, direct), (True, clients)):
            for row in rows:
                known = found.get(row.pid)
                memory = row.usedGpuMemory
                if memory is None and known:
                    memory = known.memory_bytes
                found[row.pid] = GpuProcess(int(row.pid), memory, mps)
        return [found[pid] for pid in sorted(found)]

    def watch_xids(self) -> NvmlXids:
        """Watch critical Xids of all GPUs from now on. Raises UnsupportedError if no GPU reports events."""
        with self._errors("watch Xids"):
            events = self._nvml.nvmlEventSetCreate()
            watched = 0
            for index in range(self._nvml.nvmlDeviceGetCount()):
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                kind = self._nvml.nvmlEventTypeXidCriticalError
                if self._nvml.nvmlDeviceGetSupportedEventTypes(handle) & kind:
                    self._nvml.nvmlDeviceRegisterEvents(handle, kind, events)
                    watched += 1
            if not watched:
                self._nvml.nvmlEventSetFree(events)
                raise UnsupportedError(
                    "no GPU reports Xids to NVML", remedy="none needed: mpsd reads the kernel log"
                )
        source = NvmlXids(self._nvml, events)
        self._sources.append(source)
        return source

    def close(self) -> None:
        """Stop the sources and NVML. Takes up to a second, while a source's wait times out."""
        for source in self._sources:
            source.close()
        for source in self._sources:
            source.join(2 * WAIT_MS / 1000)
        self._sources.clear()
        with self._errors("stop NVML"):
            self._nvml.nvmlShutdown()

    def _gpu(self, index: int) -> Gpu:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        return Gpu(
            index=index,
            uuid=_text(self._nvml.nvmlDeviceGetUUID(handle)),
            name=_text(self._nvml.nvmlDeviceGetName(handle)),
            pci=pci_address(_text(self._nvml.nvmlDeviceGetPciInfo(handle).busId)),
            memory_bytes=int(self._nvml.nvmlDeviceGetMemoryInfo(handle).total),
        )

    def _handle(self, gpu_uuid: str) -> Any:
        try:
            return self._nvml.nvmlDeviceGetHandleByUUID(gpu_uuid)
        except self._nvml.NVMLError as error:
            if error.value in (2, 6):
                raise NotFoundError(
                    f"there is no GPU {gpu_uuid}", remedy="mpsd-ctl status lists them"
                ) from error
            raise

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except self._nvml.NVMLError as error:
            raise _translated(doing, error) from error


def _translated(doing: str, error: Any) -> GpuError:
    kind = UnsupportedError if error.value in _NOT_SUPPORTED else GpuError
    remedy = _REMEDIES.get(error.value, "check the driver with nvidia-smi")
    return kind(f"cannot {doing}: {error}", remedy=remedy, status=int(error.value))


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


class NvmlXids:
    """gpu.base.XidSource: a thread that sleeps in NVML, and an eventfd that wakes the loop.

    `failure` is the last error of NVML while waiting; the thread continues after a pause.
    """

    def __init__(self, binding: Any, events: Any) -> None:
        self._nvml = binding
        self._events = events
        self._found: list[NvmlXid] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="nvml-xids", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._fd

    def drain(self) -> list[NvmlXid]:
        with self._lock:
            if self._fd >= 0:
                try:
                    os.eventfd_read(self._fd)
                except BlockingIOError:
                    pass
            found, self._found = self._found, []
        return found

    def close(self) -> None:
        """Stop the thread at the end of its present wait, without waiting for it."""
        self._closing.set()
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._wait()
            except self._nvml.NVMLError as error:
                # A lost GPU must neither end the watch over the other GPUs nor make the thread spin.
                self.failure = str(error)
                self._closing.wait(WAIT_MS / 1000)
        try:
            self._nvml.nvmlEventSetFree(self._events)
        except self._nvml.NVMLError as error:
            self.failure = str(error)

    def _wait(self) -> None:
        try:
            data = self._nvml.nvmlEventSetWait_v2(self._events, WAIT_MS)
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_TIMEOUT:
                return
            raise
        if data.eventType != self._nvml.nvmlEventTypeXidCriticalError:
            return
        xid = NvmlXid(_text(self._nvml.nvmlDeviceGetUUID(data.device)), int(data.eventData))
        with self._lock:
            if self._fd >= 0:
                self._found.append(xid)
                os.eventfd_write(self._fd, 1)
