"""When the state file is written: once for all that a turn of the loop changes, or before it is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mpsd.calm import Calm
from mpsd.statefile import StateFile


class Saving:
    """For the thread of one event loop. `contents`: what there is to be written now."""

    def __init__(self, file: StateFile, contents: Callable[[], Mapping[str, object]], calm: Calm) -> None:
        self.file, self._contents, self._calm = file, contents, calm
        self._changed = False

    def soon(self) -> None:
        """There is something new. Programs that move do not wait for it."""
        if not self._changed:
            self._changed = True
            self._calm.afterwards(self.pending)

    def shown(self) -> None:
        """Before it is shown: so that the next daemon knows of it, however soon this one is killed.

        But for a calm, in which it is shown all the same.
        """
        if not self._calm.left_s():
            self.pending()

    def pending(self) -> str:
        """Write what is new: before an answer says that something is done for good.

        Why it is not done for good, empty when it is.
        """
        if self._changed:
            self.now()
        return self.file.problem or ""

    def now(self) -> None:
        self._changed = False
        self.file.save(self._contents())
