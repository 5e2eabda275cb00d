"""The logs of the stock binaries: followed line by line and kept bounded.

The stock binary appends to an open descriptor, so a log cannot be rotated by a rename. mpsd removes the head
of the file instead, once it has read it. No line is lost to the writer, which keeps appending meanwhile.
"""

from __future__ import annotations

import ctypes
import os

from mpsd.os.tail import FileTail

_COLLAPSE = 0x08
_PUNCH = 0x02 | 0x01
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.fallocate.restype = ctypes.c_int


def _is_open(path: str, fd: int) -> bool:
    """Return whether the path leads to this open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except OSError:
        return False


class LogFollower(FileTail):
    """A Source: readable means drain() has lines. See FileTail for the changes of a file that it follows."""

    def trim(self, limit: int, keep: int) -> bool:
        """If the log occupies more than `limit` bytes on disk, drop the part that has been read.

        The last `keep` bytes dropped are left in `path`.1. Lines not yet drained stay. Returns whether
        something was dropped. Raises OSError when the directory cannot be written.
        """
        if self._fd < 0 or self._rewritten() or self._occupied() <= limit:
            return False
        # The kept start of a long line is not needed again.
        read = self._offset if self._cutting else self._offset - len(self._partial)
        cut = read - read % os.fstat(self._fd).st_blksize
        if cut == 0:
            return False
        boundary = self._line_start_after(cut, read)
        self._keep(boundary, keep)
        writable = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._drop(writable, cut, boundary)
        finally:
            os.close(writable)
        self._remember()
        return True

    def _occupied(self) -> int:
        info = os.fstat(self._fd)
        return min(info.st_size, info.st_blocks * 512)

    def _line_start_after(self, cut: int, read: int) -> int:
        found = os.pread(self._fd, min(read - cut, self._line_limit), cut).find(b"\n")
        return cut + found + 1

    def _keep(self, end: int, keep: int) -> None:
        if _is_open(f"{self.path}.1", self._fd):
            # Renamed to this name, the log keeps its writer: it must not lose its name.
            return
        start = max(0, end - keep)
        # A reader must never see the old log half written.
        draft = f"{self.path}.1.new"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
        with os.fdopen(fd, "wb") as out:
            out.write(os.pread(self._fd, end - start, start).lstrip(b"\0"))
        os.replace(draft, f"{self.path}.1")

    def _drop(self, writable: int, cut: int, boundary: int) -> None:
        """Remove [0, cut); the rest of the line that spans the cut becomes blank."""
        os.pwrite(writable, b" " * (boundary - cut - 1), cut)
        if _libc.fallocate(writable, _COLLAPSE, 0, cut) == 0:
            self._offset -= cut
        # Some file systems cannot move data to the front. A hole there also frees the disk space.
        elif _libc.fallocate(writable, _PUNCH, 0, cut) != 0 and os.fstat(writable).st_size == self._offset:
            os.ftruncate(writable, 0)
            self._restart()
