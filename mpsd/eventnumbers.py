"""Numbers of events: none is given twice over all lives of the daemon, so that one of an earlier life is
known for what it is.

They are reserved on disk in blocks before they are given: a daemon that is killed leaves a gap, no more.
"""

from __future__ import annotations

from pathlib import Path

from mpsd.errors import MpsdError
from mpsd.statefile import StateFile, set_aside

KIND, LEVEL = "mpsd-events", 1
BLOCK = 1000
# Far above what can be reached, and below what a message carries.
MOST = 1 << 52


class EventNumbers:
    """`first`: of this life. `problem`: why a later life may give the same numbers again. `file`: where they
    are reserved, to be written again where that failed.
    """

    def __init__(self, directory: Path) -> None:
        self.file = StateFile(directory / "events.json", KIND, LEVEL)
        self._told = ""
        self.last = self._reserved = self._load()
        self.first = self.last + 1
        self._reserve()

    @property
    def problem(self) -> str:
        return self.file.problem or self._told

    def next(self) -> int:
        self.last += 1
        if self.last > self._reserved:
            self._reserve()
        return self.last

    def _load(self) -> int:
        try:
            saved = self.file.load()
        except MpsdError as error:
            self._told = f"events are numbered from 1 again: {error}"
            try:
                set_aside(self.file.path, "newer")
            except OSError:
                pass  # To be written over fails too then, and is told.
            return 0
        reserved = saved.get("reserved") if saved is not None else 0
        self._told = self.file.problem or ""
        return reserved if isinstance(reserved, int) and 0 <= reserved < MOST else 0

    def _reserve(self) -> None:
        self._reserved += BLOCK
        self.file.save({"reserved": self._reserved})
