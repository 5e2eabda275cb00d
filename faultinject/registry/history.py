"""The history of a run: requests, observations and their times, one JSON object a line.

Every verdict comes from a history alone, so a stored history can be judged again
(`mpsd-faultinject check FILE`). `t` is CLOCK_MONOTONIC in seconds, which all processes of a run share.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from mpsd.base.errors import UsageError

clock = time.monotonic


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry. `who`: rig, mpsd, gpu or the name of a program; `what`: the kind of entry."""

    t: float
    who: str
    what: str
    data: Mapping[str, Any]

    def line(self) -> str:
        return json.dumps({"t": round(self.t, 6), "who": self.who, "what": self.what, **self.data})


class History:
    """Entries in the order in which the rig learned of them. Safe for use by several threads."""

    def __init__(self, path: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._entries: list[Entry] = []
        self._file: IO[str] | None = path.open("w", encoding="utf-8") if path else None

    def add(self, who: str, what: str, *, t: float | None = None, **data: Any) -> Entry:
        """Append an entry dated `t`, or now."""
        entry = Entry(clock() if t is None else t, who, what, data)
        with self._lock:
            self._entries.append(entry)
            if self._file:
                self._file.write(entry.line() + "\n")
                self._file.flush()
        return entry

    def __iter__(self) -> Iterator[Entry]:
        with self._lock:
            return iter(tuple(self._entries))

    def all(self, what: str, who: str | None = None) -> tuple[Entry, ...]:
        return tuple(e for e in self if e.what == what and who in (None, e.who))

    def first(self, what: str, who: str | None = None) -> Entry | None:
        return next(iter(self.all(what, who)), None)

    def last(self, what: str, who: str | None = None) -> Entry | None:
        return next(reversed(self.all(what, who)), None)

    def close(self) -> None:
        with self._lock:
            if self._file:
                self._file.close()
            self._file = None

    def __enter__(self) -> History:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load(path: Path) -> History:
    """Read a stored history. Raises UsageError naming the file and line that cannot be read."""
    history = History()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"cannot read the history {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is no history: it is not text", remedy="give a .jsonl file that a run wrote"
        ) from error
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
            history.add(data.pop("who"), data.pop("what"), t=data.pop("t"), **data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{path}:{number} is no line of a history", remedy="give a .jsonl file that a run wrote"
            ) from error
    return history
