"""Lines of a file that others append to, through every way such a file changes under its reader.

The file may be absent at first, be renamed and made anew, be deleted, be truncated in place (also
when it has grown past the old length since), and start with a hole (a writer without O_APPEND
after a truncation). No line is lost or repeated; a line counts once its newline is there.
"""

from __future__ import annotations

import errno
import os
import select

from mpsd.errors import MpsdError
from mpsd.linux import inotify, procfs

CHUNK = 1 << 16
LINE_LIMIT = 1 << 16
HISTORY = 8 << 20
DRAIN_LIMIT = 256 << 10
_TAIL = 64
_EVENTS = inotify.MODIFY | inotify.CREATE | inotify.MOVED_TO | inotify.MOVED_FROM | inotify.DELETE


class FileTail:
    """A pollable source of complete lines of `path`, whose directory must exist.

    `from_start` reads what is there already, at most its last `history` bytes; otherwise only
    what is appended from now on. Lines come without their newline, as UTF-8 with other bytes
    escaped, cut at `line_limit` bytes; `lines_cut` counts the cut ones.
    Raises MpsdError when the directory cannot be watched.
    """

    def __init__(
        self, path: str, *, from_start: bool = True, history: int = HISTORY, line_limit: int = LINE_LIMIT
    ) -> None:
        self.path = path
        self.lines_cut = 0
        self._line_limit = line_limit
        self._fd = -1
        self._offset = 0
        self._tail = b""
        self._partial = bytearray()
        self._cutting = False
        self._watch = inotify.DirectoryWatch(os.path.dirname(path) or ".", _EVENTS)
        self._more = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.epoll()
        self._poll.register(self._watch.fileno(), select.EPOLLIN)
        self._poll.register(self._more, select.EPOLLIN)
        self._open(skip_to=history if from_start else 0)
        if from_start:
            os.eventfd_write(self._more, 1)

    def fileno(self) -> int:
        return self._poll.fileno()

    def drain(self) -> list[str]:
        """Complete lines since the last call, up to DRAIN_LIMIT bytes; readable while there are more."""
        self._watch.drain()
        try:
            os.eventfd_read(self._more)
        except BlockingIOError:
            pass
        lines: list[str] = []
        budget = DRAIN_LIMIT
        while budget > 0:
            got = self._read(lines)
            budget -= got
            # Only a file read to its end is given up for its successor.
            if not got and not self._reopened():
                return lines
        os.eventfd_write(self._more, 1)
        return lines

    def close(self) -> None:
        self._close_file()
        if not self._poll.closed:
            self._poll.close()
            self._watch.close()
            os.close(self._more)

    def _close_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self, skip_to: int | None = None) -> bool:
        """Open the file at its start, or `skip_to` bytes before its end. False while it is absent."""
        self._close_file()
        self._restart()
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise MpsdError(f"cannot read {self.path}: {error.strerror}", remedy="fix its rights") from error
        size = os.fstat(self._fd).st_size
        if skip_to is not None and size > skip_to:
            self._seek(size - skip_to)
        return True

    def _seek(self, offset: int) -> None:
        # The line that the offset falls into was not seen from its start, so it is left out.
        self._cutting = offset > 0 and os.pread(self._fd, 1, offset - 1) != b"\n"
        self._offset = offset
        self._remember()

    def _restart(self) -> None:
        self._offset = 0
        self._tail = b""
        self._partial.clear()
        self._cutting = False

    def _remember(self) -> None:
        """Keep the bytes before the offset: a file in which they differ was rewritten."""
        start = max(0, self._offset - _TAIL)
        self._tail = os.pread(self._fd, self._offset - start, start)

    def _rewritten(self) -> bool:
        if os.fstat(self._fd).st_size < self._offset:
            return True
        return os.pread(self._fd, len(self._tail), self._offset - len(self._tail)) != self._tail

    def _reopened(self) -> bool:
        """Follow the path to a new file, if there is one."""
        try:
            there = os.stat(self.path)
        except OSError:
            return False
        if self._fd >= 0:
            here = os.fstat(self._fd)
            if (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino):
                return False
        return self._open()

    def _read(self, lines: list[str]) -> int:
        if self._fd < 0:
            return 0
        if self._rewritten():
            self._restart()
        self._skip_hole()
        data = os.pread(self._fd, CHUNK, self._offset)
        if data:
            self._offset += len(data)
            self._remember()
            self._split(data, lines)
        return len(data)

    def _skip_hole(self) -> None:
        # Taken first: what is appended after the search for data has not been searched.
        size = os.fstat(self._fd).st_size
        try:
            start = os.lseek(self._fd, self._offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                return
            # Nothing but a hole up to the end, or no hole at all at the end.
            start = size
        if start > self._offset:
            self._offset = start
            self._remember()

    def _split(self, data: bytes, lines: list[str]) -> None:
        *whole, rest = data.split(b"\n")
        for part in whole:
            self._append(part)
            if self._partial or not self._cutting:
                lines.append(procfs.text_of(bytes(self._partial)))
            self._cutting = False
            self._partial.clear()
        self._append(rest)

    def _append(self, part: bytes) -> None:
        if self._cutting:
            return
        # A hole that shares its block with data reads as zeros before a line.
        self._partial += part if self._partial else part.lstrip(b"\0")
        if len(self._partial) > self._line_limit:
            del self._partial[self._line_limit :]
            self._cutting = True
            self.lines_cut += 1
