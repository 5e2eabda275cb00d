"""mpsd.gpu.base.Isolation over a simulated node with the kernel module."""

from __future__ import annotations

import socket

from mpsd.base.errors import GpuError, UnsupportedError
from mpsd.base.model import (
    Access,
    IsolationMode,
    KernelAction,
    KernelFault,
    ProcessInstance,
    UvmEvent,
    UvmFaultType,
    UvmReason,
)
from mpsd.gpu.base import IsolationState
from mpsd.gpu.simulated import packets
from mpsd.gpu.simulated.adapters import NodeLink, drained
from mpsd.gpu.simulated.machine import semantics

_NONE = {
    semantics.NOT_SUPPORTED: "the simulated driver has no kernel module",
    semantics.NOT_PERMITTED: "the kernel module of this simulated node belongs to another user",
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
    """One open file of the kernel module: a connection for records, and one for requests."""

    def __init__(self, directory: str) -> None:
        """Connect. Raises UnsupportedError without a kernel module."""
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
        """Return the module's state. Raises GpuError."""
        said, _ = self._link.ask({"op": "isolation"})
        return IsolationState(
            IsolationMode(said["mode"]),
            str(said["driver"]),
            int(said["deadline_ms"]),
            int(said["loaded_ns"]),
            int(said["written"]),
        )

    def set_mode(self, mode: IsolationMode) -> None:
        """Set the module's mode. Raises GpuError."""
        self._link.ask({"op": "isolation_mode", "mode": mode.value})

    def drain(self) -> list[KernelFault]:
        """Return records since the last call. Raises GpuError if the GPU process has ended."""
        told = drained(self._open(), "the simulated GPU that kept records has ended")
        return [_as_fault(message) for message in told]

    def acknowledge(self, space: int) -> bool:
        """Acknowledge a record. Raises GpuError."""
        return bool(self._link.ask({"op": "acknowledge", "space": space})[0]["done"])

    def kill(self, space: int) -> bool:
        """Have the module kill a client. Raises GpuError."""
        return bool(self._link.ask({"op": "kill_now", "space": space})[0]["done"])

    def close(self) -> None:
        """Withdraw acknowledgements and close. Idempotent."""
        records, self._records = self._records, None
        if records is not None:
            records.close()
        self._link.close()

    def _open(self) -> socket.socket:
        if self._records is None:
            raise GpuError("the kernel module's device was closed")
        return self._records
