"""mpsd.gpu.base.Isolation over a simulated node that has the kernel part."""

from __future__ import annotations

import socket

from mpsd.errors import GpuError, UnsupportedError
from mpsd.gpu.base import IsolationState
from mpsd.gpu.simulated import packets, semantics
from mpsd.gpu.simulated.adapters import NodeLink, drained
from mpsd.model import (
    Access,
    IsolationMode,
    KernelAction,
    KernelFault,
    ProcessInstance,
    UvmEvent,
    UvmFaultType,
    UvmReason,
)

_NONE = {
    semantics.NOT_SUPPORTED: "the simulated driver has no kernel part",
    semantics.NOT_PERMITTED: "the kernel part of this simulated node is another user's",
}


def _as_fault(record: packets.Message) -> KernelFault:
    fault_type, access, reason, address = record["event"]
    return KernelFault(
        seq=record["seq"],
        action=KernelAction(record["action"]),
        space=record["space"],
        process=ProcessInstance(record["pid"], record["start_ticks"]),
        event=UvmEvent(
            True, UvmFaultType(fault_type), Access(access), UvmReason(reason), address, record["time_ns"]
        ),
        engine=record["engine"],
        why=record["why"],
        faults=record["faults"],
        gpu_uuid=record["gpu"],
        sink_bytes=record["sink"],
        acknowledged=record["acknowledged"],
    )


class SimulatedIsolation:
    """One open file of the kernel part: a connection for records, and one for requests."""

    def __init__(self, directory: str) -> None:
        """Raises UnsupportedError where the node has no kernel part."""
        self._link = NodeLink(directory)
        try:
            self.state()
        except GpuError as error:
            self._link.close()
            why = _NONE.get(error.status)
            raise error if why is None else UnsupportedError(why) from None
        self._records: socket.socket | None = self._link.watch("isolation")

    def fileno(self) -> int:
        return self._open().fileno()

    def state(self) -> IsolationState:
        """Raises GpuError."""
        said, _ = self._link.ask({"op": "isolation"})
        return IsolationState(
            IsolationMode(said["mode"]),
            str(said["driver"]),
            int(said["deadline_ms"]),
            int(said["loaded_ns"]),
            int(said["written"]),
        )

    def set_mode(self, mode: IsolationMode) -> None:
        """Raises GpuError."""
        self._link.ask({"op": "isolation_mode", "mode": mode.value})

    def drain(self) -> list[KernelFault]:
        """Records since the last call. Raises GpuError when the GPU process is gone."""
        told = drained(self._open(), "the simulated GPU that kept records is gone")
        return [_as_fault(message) for message in told]

    def acknowledge(self, space: int) -> bool:
        """Raises GpuError."""
        return bool(self._link.ask({"op": "acknowledge", "space": space})[0]["done"])

    def kill(self, space: int) -> bool:
        """Raises GpuError."""
        return bool(self._link.ask({"op": "kill_now", "space": space})[0]["done"])

    def close(self) -> None:
        """Takes acknowledgements back. Idempotent."""
        records, self._records = self._records, None
        if records is not None:
            records.close()
        self._link.close()

    def _open(self) -> socket.socket:
        if self._records is None:
            raise GpuError("the door of the kernel part was closed")
        return self._records
