"""Times of writing the state file: once for all changes of a loop iteration, or before they are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mpsd.os.quietperiod import QuietPeriod
from mpsd.records.statefile import StateFile


class StateSaver:
    """Writes the state file, for the thread of one event loop. `contents` returns the present state."""

    def __init__(
        self, file: StateFile, contents: Callable[[], Mapping[str, object]], quiet_period: QuietPeriod
    ) -> None:
        self.file, self._contents, self._quiet_period = file, contents, quiet_period
        self._changed = False

    def soon(self) -> None:
        """Write after this loop iteration. Clients that fail over do not wait for it."""
        if not self._changed:
            self._changed = True
            self._quiet_period.afterwards(self.pending)

    def shown(self) -> None:
        """Write before a state is shown, so that the next daemon knows it even if this one is killed at once.

        During a quiet period, the state is shown without the write.
        """
        if not self._quiet_period.remaining_s():
            self.pending()

    def pending(self) -> str:
        """Write a pending state, before an answer says that something is permanent.

        Returns why it is not permanent, empty when it is.
        """
        if self._changed:
            self.now()
        return self.file.problem or ""

    def now(self) -> None:
        self._changed = False
        self.file.save(self._contents())
