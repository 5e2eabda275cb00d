"""Xids of the kernel log, from /dev/kmsg or from a file in its record format.

A record is `PRIORITY,SEQUENCE,MICROSECONDS,FLAGS;TEXT` and may continue in lines that start with a space
(kernel documentation, ABI/testing/dev-kmsg). The driver prints `NVRM: Xid (PCI:dddd:bb:dd): NUMBER, pid=PID,
name=NAME, TEXT`. The pid and the name are present only when the driver has a channel. Under MPS the pid of
Xid 31 is often that of another client.
"""

from __future__ import annotations

import errno
import os
import re
import stat

from mpsd.base.errors import GpuError, UnsupportedError
from mpsd.base.model import KernelXid
from mpsd.os.procfs import text_of
from mpsd.os.tail import FileTail

DEVICE = "/dev/kmsg"
RECORD_LIMIT = 8192
RECORDS_PER_DRAIN = 4096
_FACILITY_SHIFT = 3

# A process chooses its name, of at most 15 bytes (TASK_COMM_LEN): it may hold commas, and ", Ch " as well.
_XID = re.compile(
    r"NVRM: Xid \(PCI:(?P<pci>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)[^)]{0,64}+\): "
    r"(?P<xid>[0-9]{1,9})(?![0-9])(?:, pid='?(?:<unknown>|(?P<pid>[0-9]{1,7})(?![0-9]))'?)?"
    r"(?:, name=(?P<name>.{0,15}(?=, Ch [0-9a-fA-F])|[^,]*+))?(?:, (?P<text>.*+))?",
    re.DOTALL,
)
_FIELDS = re.compile(r"([0-9]{1,9}),[^,;]*+,([0-9]{1,18}),")
_ESCAPE = re.compile(r"\\x([0-9a-fA-F]{2})")


def pci_address(text: str) -> str:
    """Return a PCI address in the form of model.Gpu: dddd:bb:dd.f in lower case; a missing function is 0."""
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}{'' if '.' in rest else '.0'}"


def parse_record(record: str, *, kernel_only: bool = False) -> KernelXid | None:
    """Return the Xid in a record, None if it holds none.

    `kernel_only`: ignore records that programs wrote to /dev/kmsg.
    """
    head, separator, message = record.partition(";")
    fields = _FIELDS.match(head)
    if not separator or fields is None:
        return None
    if kernel_only and int(fields[1]) >> _FACILITY_SHIFT:
        return None
    text = _ESCAPE.sub(lambda m: chr(int(m[1], 16)), message.split("\n", 1)[0])
    found = _XID.match(text)
    if not found:
        return None
    return KernelXid(
        pci=pci_address(found["pci"]),
        xid=int(found["xid"]),
        pid=int(found["pid"]) if found["pid"] else None,
        name="" if found["name"] in (None, "<unknown>") else found["name"],
        text=text,
        timestamp_us=int(fields[2]),
    )


class KernelRing:
    """gpu.base.KernelLog on the kernel's ring buffer. `overruns` counts the times records were lost."""

    def __init__(self, path: str = DEVICE) -> None:
        self.overruns = 0
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise UnsupportedError(
                f"cannot read the kernel log {path}: {error.strerror}",
                remedy="run as root (CAP_SYSLOG), and give a container /dev/kmsg",
                status=error.errno or 0,
            ) from error
        os.lseek(self._fd, 0, os.SEEK_END)

    def fileno(self) -> int:
        return self._fd

    def drain(self) -> list[KernelXid]:
        """Return the Xids since the last call. Reads at most 4096 records, then the descriptor stays
        readable.
        """
        found: list[KernelXid] = []
        for _ in range(RECORDS_PER_DRAIN):
            try:
                record = os.read(self._fd, RECORD_LIMIT)
            except BlockingIOError:
                break
            except OSError as error:
                # The kernel overwrote the oldest records before this read: the next read continues after the
                # gap.
                if error.errno == errno.EPIPE:
                    self.overruns += 1
                    continue
                raise GpuError(
                    f"cannot read the kernel log: {error.strerror}", status=error.errno or 0
                ) from error
            # Any program with write access to /dev/kmsg can claim an Xid; the kernel marks such records.
            if xid := parse_record(text_of(record), kernel_only=True):
                found.append(xid)
        return found

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class KernelFile:
    """gpu.base.KernelLog on an ordinary file that records are appended to. The file may be created later."""

    overruns = 0

    def __init__(self, path: str) -> None:
        self._tail = FileTail(path, from_start=False, line_limit=RECORD_LIMIT)
        if self._tail.problem:
            self._tail.close()
            raise UnsupportedError(self._tail.problem)

    def fileno(self) -> int:
        return self._tail.fileno()

    def drain(self) -> list[KernelXid]:
        """Return the Xids since the last call. Raises GpuError when the file cannot be read any more."""
        found = [xid for line in self._tail.drain() if (xid := parse_record(line))]
        if self._tail.problem and not found:
            raise GpuError(self._tail.problem)
        return found

    def close(self) -> None:
        self._tail.close()


def open_kernel_log(path: str = DEVICE) -> KernelRing | KernelFile:
    """Open the kernel log at `path`: the device, or a file. Raises UnsupportedError, MpsdError."""
    try:
        device = stat.S_ISCHR(os.stat(path).st_mode)
    except OSError:
        device = path == DEVICE
    return KernelRing(path) if device else KernelFile(path)
