"""The control device of a patched nvidia-uvm: records out, requests in."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Mapping

from mpsd.base.errors import GpuError, MpsdError, UnsupportedError
from mpsd.base.model import IsolationMode, KernelAction, KernelFault, ProcessInstance, UvmEvent
from mpsd.gpu.base import IsolationState, NoIsolation
from mpsd.gpu.nvidia import kernel_abi as abi

MODULE = "/sys/module/nvidia_uvm"
# Several records per read; one moment has few.
_READ_BYTES = 64 * 1024
_MODES: Mapping[abi.Mode, IsolationMode] = {
    abi.Mode.OFF: IsolationMode.OFF,
    abi.Mode.REPORT: IsolationMode.REPORT,
    abi.Mode.ISOLATE: IsolationMode.ISOLATE,
}
_NUMBERS = {mode: number for number, mode in _MODES.items()}
_ACTIONS: Mapping[abi.Action, KernelAction] = {
    abi.Action.REPORTED: KernelAction.REPORTED,
    abi.Action.SUNK: KernelAction.SUNK,
    abi.Action.SUNK_BEFORE: KernelAction.SUNK,
    abi.Action.REFUSED: KernelAction.REFUSED,
    abi.Action.KILL: KernelAction.KILL,
    abi.Action.STOP: KernelAction.STOP,
    abi.Action.GIVE_UP: KernelAction.GIVE_UP,
    abi.Action.ORPHAN: KernelAction.ORPHAN,
}
_GONE = (errno.ENOENT, errno.EALREADY, errno.EPERM)


def enum_text(name: str) -> str:
    return name.lower().replace("_", " ")


def as_fault(record: abi.KernelRecord) -> KernelFault:
    """Convert a record to the daemon's terms."""
    process = ProcessInstance(record.pid, record.start_ticks) if record.pid is not None else None
    event = UvmEvent(True, record.fault_type, record.access, record.reason, record.address, record.time_ns)
    return KernelFault(
        seq=record.seq,
        action=_ACTIONS.get(record.action, KernelAction.UNKNOWN),
        space=record.space,
        process=process,
        event=event,
        engine=enum_text(record.engine.name),
        why=enum_text(record.why.name) if record.why is not abi.Why.NONE else "",
        faults=record.faults,
        gpu_uuid=record.gpu_uuid,
        sink_bytes=record.sink[1] if record.sink is not None else 0,
        acknowledged=record.acknowledged,
    )


class ForbiddenError(UnsupportedError):
    """The patched module is loaded, but its state is unknown and it cannot be used."""


def _mode_of(module: str) -> str | None:
    """Return the mode of a loaded patched module, from its parameter (0, 1, 2)."""
    try:
        with open(f"{module}/parameters/uvm_mpsd_mode", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def absence(error: MpsdError) -> NoIsolation:
    """Convert an error of NvidiaIsolation. A module that cannot be opened or understood is loaded."""
    known = isinstance(error, UnsupportedError) and not isinstance(error, ForbiddenError)
    return NoIsolation(error.message, error.remedy, known)


class NvidiaIsolation:
    """mpsd.gpu.base.Isolation over /dev/nvidia-uvm-mpsd."""

    def __init__(self, path: str = abi.DEVICE, module: str = MODULE) -> None:
        """Open the device.

        Raises UnsupportedError without the patched module, ForbiddenError if its device is missing here or
        cannot be opened, RecordError if it has another interface version."""
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            if not os.path.isdir(module):
                raise UnsupportedError("nvidia-uvm is not loaded", remedy="load nvidia-uvm") from None
            if (mode := _mode_of(module)) is not None:
                raise ForbiddenError(
                    f"the loaded nvidia-uvm is patched (mode {mode}), but {path} is missing",
                    remedy="pass the device to the container; on the host, see dmesg for the reason",
                ) from None
            raise UnsupportedError(
                "the loaded nvidia-uvm is the stock module", remedy="kmod_patches/mpsd-kmod install"
            ) from None
        except PermissionError as error:
            raise ForbiddenError(
                f"cannot open {path}: {error.strerror}", remedy="run with CAP_SYS_ADMIN"
            ) from error
        except OSError as error:
            raise UnsupportedError(f"cannot open {path}: {error.strerror}") from error
        try:
            self.state()
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        return self._fd

    def state(self) -> IsolationState:
        """Return the module's state. Raises GpuError."""
        answer = bytearray(abi.QUERY.size)
        self._ask(abi.IOC_QUERY, answer)
        said = abi.decode_query(answer)
        if said.mode not in _MODES:
            raise abi.RecordError("the kernel module is in a mode that this mpsd does not know")
        return IsolationState(_MODES[said.mode], said.driver, said.deadline_ms, said.loaded_ns, said.written)

    def set_mode(self, mode: IsolationMode) -> None:
        """Set the module's mode. Raises GpuError."""
        self._ask(abi.IOC_SET_MODE, abi.encode_set_mode(_NUMBERS[mode]))

    def drain(self) -> list[KernelFault]:
        """Return the records since the last call. Raises GpuError."""
        found: list[KernelFault] = []
        # Read at most as many as the module keeps, so that a fault storm does not block the loop.
        while len(found) < abi.RING_RECORDS:
            try:
                raw = os.read(self._open(), _READ_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                raise GpuError(
                    f"cannot read records of the kernel module: {error.strerror}", status=error.errno or 0
                ) from error
            if not raw:
                raise GpuError("cannot read records of the kernel module: its device has ended")
            found += [as_fault(record) for record in abi.decode_records(raw)]
        return found

    def acknowledge(self, space: int) -> bool:
        """Acknowledge a record. Raises GpuError."""
        return self._tell(abi.IOC_ACKNOWLEDGE, space)

    def kill(self, space: int) -> bool:
        """Have the module kill a client. Raises GpuError."""
        return self._tell(abi.IOC_KILL, space)

    def close(self) -> None:
        """Withdraw acknowledgements and close. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _tell(self, request: int, space: int) -> bool:
        try:
            self._ask(request, abi.encode_target(space))
        except GpuError as error:
            if error.status in _GONE:
                return False
            raise
        return True

    def _ask(self, request: int, argument: bytes | bytearray) -> None:
        try:
            fcntl.ioctl(self._open(), request, argument)
        except OSError as error:
            raise GpuError(f"the kernel module refused: {error.strerror}", status=error.errno or 0) from error

    def _open(self) -> int:
        fd = self._fd
        if fd < 0:
            raise GpuError("the kernel module's device was closed")
        return fd
