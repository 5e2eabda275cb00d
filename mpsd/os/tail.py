"""Lines of a growing file, followed through every way such a file changes under its reader.

The file may be absent at first, be renamed and created again, be deleted, be truncated in place (also when it
has grown past the old length since), and start with a hole (a writer without O_APPEND after a truncation). No
line is lost or repeated. A line counts once its newline has been written.

A file that is renamed and created again may keep its writer. If the writer is known, its descriptor says
which file to follow, and the path is used only while there is no writer.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from collections.abc import Callable

from mpsd.os import inotify, procfs

CHUNK = 1 << 16
LINE_LIMIT = 1 << 16
HISTORY = 8 << 20
DRAIN_LIMIT = 256 << 10
_TAIL = 64
_NAMES = inotify.CREATE | inotify.MOVED_TO | inotify.MOVED_FROM | inotify.DELETE


class FileTail:
    """A pollable source of complete lines of `path`; the directory of the file must exist.

    With `from_start` it reads the existing lines, at most the last `history` bytes; otherwise only lines
    appended from now on. Lines come without their newline, as UTF-8 with other bytes escaped, cut at
    `line_limit` bytes; `lines_cut` counts the cut ones. `writer` returns a path to the descriptor of the
    file's writer, such as /proc/PID/fd/1, or None. `problem`: why the present file cannot be read,
    or is not the one that its writer holds. Raises MpsdError when the directory cannot be watched.
    """

    def __init__(
        self,
        path: str,
        *,
        from_start: bool = True,
        history: int = HISTORY,
        line_limit: int = LINE_LIMIT,
        writer: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.path = path
        self.lines_cut = 0
        self.bytes_read = 0
        self.waiting = False
        self.problem = ""
        self._line_limit = line_limit
        self._writer = writer
        self._fd = -1
        self._offset = 0
        self._tail = b""
        self._partial = bytearray()
        self._cutting = False
        self._watch = inotify.DirectoryWatch(os.path.dirname(path) or ".", _NAMES)
        self._more = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.epoll()
        self._poll.register(self._watch.fileno(), select.EPOLLIN)
        self._poll.register(self._more, select.EPOLLIN)
        self._open(skip_to=history if from_start else 0)
        if from_start:
            os.eventfd_write(self._more, 1)

    def fileno(self) -> int:
        return self._poll.fileno()

    def drain(self, limit: int | None = None) -> list[str]:
        """Return complete lines since the last call, of up to `limit` bytes (DRAIN_LIMIT).

        It stays readable, and `waiting` is true, while more wait.
        """
        self._watch.drain()
        try:
            os.eventfd_read(self._more)
        except BlockingIOError:
            pass
        lines: list[str] = []
        budget = DRAIN_LIMIT if limit is None else limit
        self.waiting = False
        while budget > 0:
            got = self._read(lines, min(CHUNK, budget))
            budget -= got
            # Only a file that is read to its end is closed in favour of its successor.
            if not got and not self._reopened():
                return lines
        self.waiting = True
        os.eventfd_write(self._more, 1)
        return lines

    def backlog(self) -> int:
        """Return the bytes that wait to be read, holes excluded."""
        if self._fd < 0:
            return 0
        if self._rewritten():
            self._restart()
        info = os.fstat(self._fd)
        return max(0, min(info.st_size - self._offset, info.st_blocks * 512))

    def skip(self, keep: int) -> int:
        """Skip to the last `keep` bytes of the file. Return how many bytes were skipped."""
        end = os.fstat(self._fd).st_size - keep
        skipped = end - self._offset
        if skipped <= 0:
            return 0
        self._partial.clear()
        self._seek(end)
        return skipped

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
        """Open the file at its start, or `skip_to` bytes before its end. Return False if that is impossible.

        The file before is closed only then.
        """
        target = self._target()[0]
        try:
            fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        except OSError as error:
            of = "" if target == self.path else f", now in {target}"
            self.problem = f"cannot read {self.path}{of}: {error.strerror}; fix its permissions"
            return False
        self._close_file()
        self._restart()
        self._fd, self.problem = fd, ""
        self._watch.follow(fd)
        size = os.fstat(self._fd).st_size
        if skip_to is not None and size > skip_to:
            self._seek(size - skip_to)
        return True

    def _seek(self, offset: int) -> None:
        # The offset falls into a line of which the start was not seen, so that line is left out.
        self._cutting = offset > 0 and os.pread(self._fd, 1, offset - 1) != b"\n"
        self._offset = offset
        self._remember()

    def _restart(self) -> None:
        self._offset = 0
        self._tail = b""
        self._partial.clear()
        self._cutting = False

    def _remember(self) -> None:
        """Keep the bytes before the offset: if they differ later, the file was rewritten."""
        start = max(0, self._offset - _TAIL)
        self._tail = os.pread(self._fd, self._offset - start, start)

    def _rewritten(self) -> bool:
        if os.fstat(self._fd).st_size < self._offset:
            return True
        return os.pread(self._fd, len(self._tail), self._offset - len(self._tail)) != self._tail

    def _target(self) -> tuple[str, os.stat_result | None]:
        """Return a path to the file to follow, and its identity; None if it is absent."""
        for path in (self._writer(), self.path):
            try:
                found = os.stat(path) if path is not None else None
            except OSError:
                # The writer has ended, or mpsd may not inspect it.
                continue
            if path is not None and found is not None and (path == self.path or stat.S_ISREG(found.st_mode)):
                return path, found
        return self.path, None

    def _reopened(self) -> bool:
        """Follow the writer, or the path, to another file, if there is one."""
        there = self._target()[1]
        if there is None:
            return False
        if self._fd >= 0 and os.path.samestat(os.fstat(self._fd), there):
            self.problem = ""
            return False
        return self._open()

    def _read(self, lines: list[str], size: int) -> int:
        if self._fd < 0:
            return 0
        if self._rewritten():
            self._restart()
        self._skip_hole()
        data = os.pread(self._fd, size, self._offset)
        if data:
            self.bytes_read += len(data)
            self._offset += len(data)
            self._remember()
            self._split(data, lines)
        return len(data)

    def _skip_hole(self) -> None:
        # Take the size first: data appended after the search for data has not been searched.
        size = os.fstat(self._fd).st_size
        try:
            start = os.lseek(self._fd, self._offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                return
            # Only a hole up to the end, or no hole at all at the end.
            start = size
        if start > self._offset:
            self._offset = start
            self._remember()

    def _split(self, data: bytes, lines: list[str]) -> None:
        *whole, rest = data.split(b"\n")
        for part in whole:
            self._append(part)
            if self._partial or not self._cutting:
                # An escaped byte takes four characters.
                lines.append(procfs.text_of(bytes(self._partial))[: self._line_limit])
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
