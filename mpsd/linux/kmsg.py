"""Xids of the kernel log, from /dev/kmsg or from a file in its record format.

A record is `PRIORITY,SEQUENCE,MICROSECONDS,FLAGS;TEXT` and may go on in lines that start with a
space (kernel documentation, ABI/testing/dev-kmsg). The driver prints
`NVRM: Xid (PCI:dddd:bb:dd): NUMBER, pid=PID, name=NAME, TEXT`, the pid and name only when it has a
channel; under MPS the pid of Xid 31 is often that of another client.
"""

from __future__ import annotations

import errno
import os
import re
import stat

from mpsd.errors import GpuError, UnsupportedError
from mpsd.linux.procfs import text_of
from mpsd.linux.tail import FileTail
from mpsd.model import KernelXid

DEVICE = "/dev/kmsg"
RECORD_LIMIT = 8192
RECORDS_PER_DRAIN = 4096
_FACILITY_SHIFT = 3

_XID = re.compile(
    r"NVRM: Xid \(PCI:(?P<pci>[0-9a-fA-F]+:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)[^)]*\): (?P<xid>\d+)"
    r"(?:, pid='?(?:<unknown>|(?P<pid>\d+))'?)?(?:, name=(?P<name>[^,]*))?(?:, (?P<text>.*))?",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\x([0-9a-fA-F]{2})")


def pci_address(text: str) -> str:
    """An address as model.Gpu has it: dddd:bb:dd.f in lower case, function 0 where none is given."""
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}{'' if '.' in rest else '.0'}"


def parse_record(record: str, *, kernel_only: bool = False) -> KernelXid | None:
    """The Xid in a record, None if it holds none. `kernel_only`: not what programs wrote to /dev/kmsg."""
    head, separator, message = record.partition(";")
    fields = head.split(",")
    if not separator or len(fields) < 4 or not (fields[0].isdecimal() and fields[2].isdecimal()):
        return None
    if kernel_only and int(fields[0]) >> _FACILITY_SHIFT:
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
        """Xids since the last call; at most 4096 records at a time, then it stays readable."""
        found: list[KernelXid] = []
        for _ in range(RECORDS_PER_DRAIN):
            try:
                record = os.read(self._fd, RECORD_LIMIT)
            except BlockingIOError:
                break
            except OSError as error:
                # The oldest records were overwritten before we came: the next read goes on after the gap.
                if error.errno == errno.EPIPE:
                    self.overruns += 1
                    continue
                raise GpuError(f"the kernel log failed: {error.strerror}", status=error.errno or 0) from error
            # Who may write to /dev/kmsg can claim any Xid; the kernel marks what came that way.
            if xid := parse_record(text_of(record), kernel_only=True):
                found.append(xid)
        return found

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class KernelFile:
    """gpu.base.KernelLog on an ordinary file that records are appended to. The file may come later."""

    overruns = 0

    def __init__(self, path: str) -> None:
        self._tail = FileTail(path, from_start=False, line_limit=RECORD_LIMIT)

    def fileno(self) -> int:
        return self._tail.fileno()

    def drain(self) -> list[KernelXid]:
        return [xid for line in self._tail.drain() if (xid := parse_record(line))]

    def close(self) -> None:
        self._tail.close()


def open_kernel_log(path: str = DEVICE) -> KernelRing | KernelFile:
    """The kernel log at `path`: the device, or a file. Raises UnsupportedError, MpsdError."""
    try:
        device = stat.S_ISCHR(os.stat(path).st_mode)
    except OSError:
        device = path == DEVICE
    return KernelRing(path) if device else KernelFile(path)
