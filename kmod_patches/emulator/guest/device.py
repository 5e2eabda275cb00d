"""/dev/nvidia-uvm-mpsd through the daemon's own reader of it."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from emulator.guest.check import CheckError, expect
from mpsd.gpu.nvidia import kernel_abi as abi

WAIT_S = 60.0
READ_BYTES = abi.RECORD.size * abi.RING_RECORDS
PARAMETERS = Path("/sys/module/nvidia_uvm/parameters")
MODE_PARAMETER = PARAMETERS / "uvm_mpsd_mode"


def present() -> bool:
    """Return whether this nvidia-uvm is patched."""
    return os.path.exists(abi.DEVICE)


def set_deadline(milliseconds: int) -> None:
    """Set the time that a condemned client may stay before the first step."""
    (PARAMETERS / "uvm_mpsd_deadline_ms").write_text(str(milliseconds))


class Adapter(Protocol):
    """The daemon's use of an open device. Requests raise OSError."""

    def fileno(self) -> int: ...
    def close(self) -> None: ...
    def read(self) -> Iterable[abi.KernelRecord]: ...
    def query(self) -> abi.KernelState: ...
    def set_mode(self, mode: abi.Mode) -> None: ...
    def acknowledge(self, space: int) -> None: ...


class Plain:
    """An adapter of only the calls, with the daemon's description of their bytes."""

    def __init__(self) -> None:
        self._fd = os.open(abi.DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)

    def read(self) -> list[abi.KernelRecord]:
        """Return the present records."""
        try:
            return list(abi.decode_records(os.read(self._fd, READ_BYTES)))
        except BlockingIOError:
            return []

    def query(self) -> abi.KernelState:
        buffer = bytearray(abi.QUERY.size)
        fcntl.ioctl(self._fd, abi.IOC_QUERY, buffer, True)
        return abi.decode_query(buffer)

    def set_mode(self, mode: abi.Mode) -> None:
        fcntl.ioctl(self._fd, abi.IOC_SET_MODE, abi.encode_set_mode(mode))

    def acknowledge(self, space: int) -> None:
        fcntl.ioctl(self._fd, abi.IOC_ACKNOWLEDGE, abi.encode_target(space))


def open_adapter() -> Adapter:
    """Open the adapter that all checks use."""
    return Plain()


class Device:
    """The device as checks use it. Reads from the oldest record that the module keeps."""

    def __init__(self, adapter: Adapter | None = None) -> None:
        self._adapter = adapter or open_adapter()
        self.close = self._adapter.close
        self.query = self._adapter.query
        self.set_mode = self._adapter.set_mode
        self.acknowledge = self._adapter.acknowledge

    def ask(self, request: int, argument: bytes) -> int:
        """Make an ioctl and return its error number, or 0; also for requests that no adapter makes."""
        try:
            fcntl.ioctl(self._adapter.fileno(), request, argument)
        except OSError as error:
            return error.errno or -1
        return 0

    def read(self) -> list[abi.KernelRecord]:
        """Return the present records."""
        return list(self._adapter.read())

    def skip(self) -> None:
        """Skip all records so far."""
        while self.read():
            pass

    def until(self, what: str, wanted: Callable[[abi.KernelRecord], bool]) -> list[abi.KernelRecord]:
        """Return all records up to a wanted one, reading as the device becomes readable. Raises
        CheckError."""
        found: list[abi.KernelRecord] = []
        poller = select.poll()
        poller.register(self._adapter.fileno(), select.POLLIN)
        deadline = time.monotonic() + WAIT_S
        while not any(map(wanted, found)):
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise CheckError(f"{what}: no such record; seen {[record.action.name for record in found]}")
            found += self.read()
        return found


def answers() -> str:
    """Version, sizes and the driver's name; a module that has seen nothing has no records."""
    device = Device()
    state = device.query()
    device.close()
    seen = (state.abi_version, state.record_size, state.ring_records, state.written)
    expect("answer", seen, (abi.ABI_VERSION, abi.RECORD.size, abi.RING_RECORDS, 0))
    expect("driver", state.driver, Path("/sys/module/nvidia/version").read_text().strip())
    expect("mode", state.mode, abi.Mode.REPORT)
    return f"driver {state.driver}"


def modes() -> str:
    """Each mode can be set and shows in the module's parameter; an invalid mode cannot be set."""
    device = Device()
    for mode in (abi.Mode.ISOLATE, abi.Mode.OFF, abi.Mode.REPORT):
        device.set_mode(mode)
        expect("mode", device.query().mode, mode)
        expect("parameter", int(MODE_PARAMETER.read_text()), mode.value)
    expect("mode 3", device.ask(abi.IOC_SET_MODE, abi.SET_MODE.pack(3, 0)), errno.EINVAL)
    expect("reserved", device.ask(abi.IOC_SET_MODE, abi.SET_MODE.pack(1, 1)), errno.EINVAL)
    expect("mode", device.query().mode, abi.Mode.REPORT)
    device.close()
    return "off, report, isolate"


def nothing_to_tell() -> str:
    """A non-blocking reader gets EAGAIN, and a missing client cannot be evicted."""
    device = Device()
    expect("records", device.read(), [])
    for request in (abi.IOC_ACKNOWLEDGE, abi.IOC_KILL, abi.IOC_RELEASE):
        expect("unknown space", device.ask(request, abi.encode_target(1 << 40)), errno.ENOENT)
    device.close()
    return "ENOENT"
