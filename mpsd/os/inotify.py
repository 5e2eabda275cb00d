"""inotify(7) by ctypes: one watch on one directory, enough to follow a file through its renames."""

from __future__ import annotations

import ctypes
import os
import struct

from mpsd.base.errors import MpsdError, UnsupportedError

MODIFY = 0x2
ATTRIB = 0x4
MOVED_FROM = 0x40
MOVED_TO = 0x80
CREATE = 0x100
DELETE = 0x200
DELETE_SELF = 0x400
ONLYDIR = 0x01000000

_HEADER = struct.Struct("iIII")
_libc = ctypes.CDLL(None, use_errno=True)


class DirectoryWatch:
    """A watch on a directory. Readable means: entries changed, call drain().

    Raises MpsdError when the directory cannot be watched, UnsupportedError when the machine's limit of
    inotify instances is reached.
    """

    def __init__(self, directory: str, mask: int) -> None:
        self._file_watch = -1
        self._fd = int(_libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
        if self._fd < 0:
            raise UnsupportedError(
                f"cannot create an inotify instance for {directory}: {os.strerror(ctypes.get_errno())}",
                remedy="raise the sysctl fs.inotify.max_user_instances",
                status=ctypes.get_errno(),
            )
        if _libc.inotify_add_watch(self._fd, os.fsencode(directory), mask | ONLYDIR) < 0:
            reason = os.strerror(ctypes.get_errno())
            self.close()
            raise MpsdError(
                f"cannot watch directory {directory}: {reason}", remedy="create it, or fix its permissions"
            )

    def fileno(self) -> int:
        return self._fd

    def follow(self, fd: int) -> None:
        """Watch this open file for new data, wherever its name is, instead of the file before.

        Without a free watch nothing is reported: the caller looks now and then as well.
        """
        path = os.fsencode(f"/proc/self/fd/{fd}")
        watch = int(_libc.inotify_add_watch(self._fd, path, MODIFY))
        if self._file_watch not in (-1, watch):
            _libc.inotify_rm_watch(self._fd, self._file_watch)
        self._file_watch = watch

    def drain(self) -> set[str]:
        """Return the names of the entries that changed since the last call."""
        names: set[str] = set()
        while True:
            try:
                data = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                return names
            names.update(_names(data))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _names(data: bytes) -> set[str]:
    names: set[str] = set()
    offset = 0
    while offset < len(data):
        *_, length = _HEADER.unpack_from(data, offset)
        offset += _HEADER.size
        names.add(os.fsdecode(data[offset : offset + length].rstrip(b"\0")))
        offset += length
    return names
