"""The end of an exited client's kernels, as the simulated GPU process reports it.

Simulated only: on a real node mpsd reads the exited client's semaphores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from mpsd.base.model import ProcessInstance
from mpsd.gpu.simulated.adapters import NodeLink


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
        """Return the number of an exited process's contexts with kernels to run. Raises GpuError."""
        return int(self._link.ask({"op": "work", "pid": pid})[0]["busy"])

    def launched(self, pid: int) -> bool | None:
        """Return whether a process has launched a kernel; None from a GPU process that does not know."""
        found = self._link.ask({"op": "work", "pid": pid})[0].get("launched")
        return None if found is None else bool(found)


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
        """Always True: the simulated GPU itself knows."""
        return True

    @property
    def settled(self) -> bool:
        return True

    def refresh(self) -> None:
        return

    def leave_out(self, spans: Sequence[tuple[int, int]]) -> None:
        """Do nothing: the simulated GPU knows which contexts exist."""
        return

    def pending(self) -> str | None:
        busy = self._inspector.busy(self._process.pid)
        return f"{busy} context(s) with kernels to run" if busy else ""

    def launched(self) -> bool | None:
        return self._inspector.launched(self._process.pid)

    def close(self) -> None:
        return
