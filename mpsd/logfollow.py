"""The logs of the stock binaries: followed line by line and kept bounded.

The stock binary appends for ever with its descriptor open, so a log cannot be rotated by rename.
Its head is taken away instead, once it has been read: no line can be lost to the writer, which
goes on appending meanwhile.
"""

from __future__ import annotations

import ctypes
import os

from mpsd.linux.tail import FileTail

_COLLAPSE = 0x08
_PUNCH = 0x02 | 0x01
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.fallocate.restype = ctypes.c_int


class LogFollower(FileTail):
    """A Source: readable means drain() has lines. See FileTail for what it survives."""

    def trim(self, limit: int, keep: int) -> bool:
        """If the log occupies more than `limit` bytes on disk, drop what was read of it.

        The last `keep` bytes dropped are left in `path`.1. Lines not yet drained stay. Returns
        whether something was dropped. Raises OSError when the directory cannot be written.
        """
        if self._fd < 0 or self._cutting or self._rewritten() or self._occupied() <= limit:
            return False
        read = self._offset - len(self._partial)
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
        start = max(0, end - keep)
        # The old log must never be shown half written.
        draft = f"{self.path}.1.new"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
        with os.fdopen(fd, "wb") as out:
            out.write(os.pread(self._fd, end - start, start).lstrip(b"\0"))
        os.replace(draft, f"{self.path}.1")

    def _drop(self, writable: int, cut: int, boundary: int) -> None:
        """Remove [0, cut); what is left of the line that spans it becomes blank."""
        os.pwrite(writable, b" " * (boundary - cut - 1), cut)
        if _libc.fallocate(writable, _COLLAPSE, 0, cut) == 0:
            self._offset -= cut
        # Some file systems cannot move data to the front. A hole there also gives the space back.
        elif _libc.fallocate(writable, _PUNCH, 0, cut) != 0 and os.fstat(writable).st_size == self._offset:
            os.ftruncate(writable, 0)
            self._restart()
