"""When a client's kernels have ended: asked of the GPU process, which knows.

Simulated only: on a real node the same is read from the client's semaphores.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mpsd.errors import GpuError
from mpsd.gpu.simulated.adapters import NodeLink
from mpsd.model import ProcessInstance


class SimulatedWork:
    """WorkInspector over a simulated node."""

    def __init__(self, link: NodeLink) -> None:
        self._link = link

    def open(self, process: ProcessInstance, pidfd: int) -> SimulatedWorkView:
        return SimulatedWorkView(self, process)

    def adopt(self, process: ProcessInstance, fds: Mapping[str, int]) -> SimulatedWorkView:
        return SimulatedWorkView(self, process)

    def is_present(self, process: ProcessInstance, fds: Mapping[str, int]) -> bool:
        return True

    def busy(self, pid: int) -> int:
        """Contexts of a dead process that still have kernels to run. Raises GpuError."""
        return int(self._link.ask({"op": "work", "pid": pid})[0]["busy"])

    def running(self, pid: int) -> int:
        """Contexts of a living process that have kernels to run. Raises GpuError."""
        return int(self._link.ask({"op": "work", "pid": pid})[0]["running"])


class SimulatedWorkView:
    """WorkView of one process; it needs no descriptors."""

    def __init__(self, inspector: SimulatedWork, process: ProcessInstance) -> None:
        self._inspector = inspector
        self._process = process

    @property
    def fds(self) -> Mapping[str, int]:
        return MappingProxyType({})

    @property
    def located(self) -> bool:
        """The simulated GPU itself knows."""
        return True

    def refresh(self) -> None:
        return

    def pending(self) -> str | None:
        busy = self._inspector.busy(self._process.pid)
        return f"{busy} context(s) with kernels to run" if busy else ""

    def quiet(self) -> bool:
        try:
            return self._inspector.running(self._process.pid) == 0
        except GpuError:
            return False

    def close(self) -> None:
        return
