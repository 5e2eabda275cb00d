"""Journals of fault records and of fail-overs: append-only files of checked lines, bounded in size.

Journals are kept over restarts. Each line is `crc32 length json`; the first one is a head with the level and
the last id. A cut or damaged line is skipped and the rest read, so a death at any byte costs at most the
record being written. A record of the same id and a higher revision replaces the older one.

When the file exceeds its bounds, the newest records are written to a new file, which is renamed over the old
one. When it cannot be written (full disk), the records stay in memory and are written later. The daemon never
dies of its journal, and `problem` says what is wrong.

Lines are not flushed one by one. They survive the death of mpsd; a loss of power may cost the lines since the
last `sync`.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mpsd.base.errors import StoreError
from mpsd.records.statefile import check_level, replace_file, set_aside, sync_file, write_all

NAME = "faults.journal"
FAILOVERS = "failovers.journal"
KIND = "mpsd fault journal"
LEVEL = 1


class Journal:
    """A journal. `records()` returns the newest `max_records`, oldest first, on disk or not."""

    def __init__(self, directory: str | Path, max_records: int, max_bytes: int, name: str = NAME) -> None:
        self.path = Path(directory) / name
        self.problem: str | None = None
        self.last_id = 0
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._records: dict[int, dict[str, Any]] = {}
        self._waiting: dict[int, bytes] = {}
        self._fd = -1
        self._loaded = False
        self._unflushed = False
        self._size = 0
        self._lines = 0

    @classmethod
    def open(
        cls, directory: str | Path, max_records: int = 1000, max_bytes: int = 16 << 20, name: str = NAME
    ) -> Journal:
        """Read the present file. Never raises for the state of the disk: see `problem`.

        A journal of a newer mpsd is renamed to NAME.newer, untouched, and a new one begun.
        """
        journal = cls(directory, max_records, max_bytes, name)
        try:
            journal._prepare()
        except OSError as error:
            journal._failed(error)
        return journal

    def records(self) -> list[dict[str, Any]]:
        return [dict(record) for _, record in sorted(self._records.items())]

    @property
    def waiting(self) -> int:
        """Return the number of records that are in memory only."""
        return len(self._waiting)

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record, or a higher revision of one; anything older is ignored.

        `record` holds `id` (from 1 up), `revision`, and values that JSON can express.
        """
        line = encode(record)
        if not self._remember(json.loads(line.split(b" ", 2)[2])):
            return
        self._waiting[record["id"]] = line
        self.retry()

    def retry(self) -> bool:
        """Write the waiting records; return True when none waits any more."""
        if not self._waiting and self._fd >= 0:
            return True
        try:
            if self._fd < 0:
                self._prepare()
            self._write(b"".join(self._waiting.values()), len(self._waiting))
        except OSError as error:
            self._failed(error)
            return False
        self._waiting.clear()
        self._unflushed = True
        self.problem = None
        return True

    def sync(self) -> None:
        """Flush the writes since the last call to disk, from any thread; see `problem`."""
        if not self._unflushed:
            return
        self._unflushed = False
        try:
            sync_file(self.path)
        except OSError as error:
            self._failed(error)

    def close(self) -> None:
        self.retry()
        self.sync()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _failed(self, error: OSError) -> None:
        self.problem = (
            f"cannot write {self.path}: {error.strerror}; {self.waiting} records are in memory only"
        )

    def _remember(self, record: dict[str, Any]) -> bool:
        """Take a record in; False when the same or a newer revision is known, or the id is too old."""
        number = record["id"]
        known = self._records.get(number)
        if known is not None and known.get("revision", 0) >= record.get("revision", 0):
            return False
        self._records[number] = record
        self.last_id = max(self.last_id, number)
        while len(self._records) > self._max_records:
            oldest = min(self._records)
            del self._records[oldest]
            self._waiting.pop(oldest, None)
        return number in self._records

    def _read(self) -> None:
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return
        lines = list(decode(content))
        try:
            for head in lines[:1]:
                if head is not None and "level" in head:
                    check_level(self.path, head, KIND, LEVEL)
                    self.last_id = int(head.get("last_id", 0))
        except StoreError as error:
            self.problem = f"{error}; kept as {set_aside(self.path, 'newer')}"
            return
        for record in lines:
            if record is not None and isinstance(record.get("id"), int):
                self._remember(record)
        damaged = sum(record is None for record in lines)
        if damaged:
            lines_are = "line is" if damaged == 1 else "lines are"
            self.problem = (
                f"{self.path}: {damaged} {lines_are} damaged and skipped; all other lines are read: "
                "move the file away to begin a new one"
            )

    def _prepare(self) -> None:
        """Read or create the file and open it for appending, with its end at the end of a line."""
        if not self._loaded:
            self._read()
            self._loaded = True
        if not self.path.exists():
            self._rewrite()
            return
        self._open()
        with open(self.path, "rb") as file:
            content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.ftruncate(self._fd, whole)
        self._size = whole
        self._lines = content.count(b"\n")
        if whole == 0 or self._overflows(0, 0):
            self._rewrite()

    def _open(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)

    def _overflows(self, size: int, lines: int) -> bool:
        return self._size + size > self._max_bytes or self._lines + lines > 2 * self._max_records + 1

    def _write(self, text: bytes, lines: int) -> None:
        if self._overflows(len(text), lines):
            self._rewrite()
            return
        try:
            write_all(self._fd, text)
        except OSError:
            # A short write leaves half a line; shrinking works on a full disk, too.
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(text)
        self._lines += lines

    def _rewrite(self) -> None:
        """Write the file again, newest records first, waiting ones included, up to 3/4 of its bound.

        The bound is below the limit so that the next rewrite is not due at once.
        """
        head = encode({"kind": KIND, "level": LEVEL, "last_id": self.last_id})
        capacity = self._max_bytes * 3 // 4 - len(head)
        retained: list[bytes] = []
        for _, record in sorted(self._records.items(), reverse=True):
            line = encode(record)
            if len(line) > capacity:
                continue
            retained.append(line)
            capacity -= len(line)
        content = head + b"".join(reversed(retained))
        replace_file(self.path, content)
        self._open()
        self._size = len(content)
        self._lines = 1 + len(retained)


def encode(record: Mapping[str, Any]) -> bytes:
    body = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %d %s\n" % (zlib.crc32(body), len(body), body)


def decode(content: bytes) -> Iterator[dict[str, Any] | None]:
    """Yield each whole line as its record; None for a damaged one.

    The text after the last newline is a cut line and is left out.
    """
    for line in content.split(b"\n")[:-1]:
        crc, _, rest = line.partition(b" ")
        length, _, body = rest.partition(b" ")
        try:
            if int(length) != len(body) or int(crc, 16) != zlib.crc32(body):
                raise ValueError
            record = json.loads(body)
        except ValueError:
            yield None
            continue
        yield record if isinstance(record, dict) else None
