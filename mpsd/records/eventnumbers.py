"""Numbers of events: unique across all runs of the daemon, so that events of an earlier run are recognised.

Numbers are reserved on disk in blocks before they are used: a daemon that is killed leaves a gap, no more. A
daemon that ends in order leaves none.
"""

from __future__ import annotations

from pathlib import Path

from mpsd.base.errors import MpsdError
from mpsd.records.statefile import StateFile, set_aside

KIND, LEVEL = "mpsd-events", 1
BLOCK = 1000
# Far above what can be reached, and below what a message carries.
MOST = 1 << 52


class EventNumbers:
    """The counter. `first`: the first number of this run.

    `problem`: why a later run may use the same numbers again. `file`: the reservation, for a retry after a
    failed write.
    """

    def __init__(self, directory: Path) -> None:
        self.file = StateFile(directory / "events.json", KIND, LEVEL)
        self._reported = ""
        self.last = self._reserved = self._load()
        self.first = self.last + 1
        self._reserve()

    @property
    def problem(self) -> str:
        return self.file.problem or self._reported

    def next(self) -> int:
        self.last += 1
        if self.last > self._reserved:
            self._reserve()
        return self.last

    def close(self) -> None:
        """Return the numbers that this run has reserved and not used. Call `next` no more."""
        self._reserved = self.last
        self.file.save({"reserved": self._reserved})

    def _load(self) -> int:
        try:
            saved = self.file.load()
        except MpsdError as error:
            self._reported = f"event numbers begin at 1 again: {error}"
            try:
                set_aside(self.file.path, "newer")
            except OSError:
                pass  # The overwrite fails too then, and is reported.
            return 0
        reserved = saved.get("reserved") if saved is not None else 0
        self._reported = self.file.problem or ""
        return reserved if isinstance(reserved, int) and 0 <= reserved < MOST else 0

    def _reserve(self) -> None:
        self._reserved += BLOCK
        self.file.save({"reserved": self._reserved})
