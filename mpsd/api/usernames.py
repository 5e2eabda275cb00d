"""Names of users, for display, without waiting for the user database.

A directory service can take long to answer, so threads ask the user database (nsswitch.conf(5)). Until it
has answered, the uid is shown. `prefetch` asks as soon as a user appears, so that the name is known in time.
"""

from __future__ import annotations

import pwd
import threading
from collections.abc import Callable
from queue import SimpleQueue

# A lookup that hangs blocks one thread.
THREADS = 4
_KEPT = 4096


def _look_up(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OSError):
        return str(uid)


class UserNames:
    """Names of users by uid. Call `of` and `prefetch` from one thread; they never wait."""

    def __init__(self, look_up: Callable[[int], str] = _look_up, threads: int = THREADS) -> None:
        self._look_up = look_up
        self._names: dict[int, str] = {}
        self._asked: set[int] = set()
        self._questions: SimpleQueue[int] = SimpleQueue()
        self._unstarted = threads

    def of(self, uid: int) -> str:
        """Return the name of a user; the uid as text if there is no name, or not yet."""
        self.prefetch(uid)
        return self._names.get(uid, str(uid))

    def prefetch(self, uid: int) -> None:
        """Ask for a name in advance."""
        if uid in self._asked:
            return
        if len(self._asked) >= _KEPT:
            self._names, self._asked = {}, set()
        self._asked.add(uid)
        self._questions.put(uid)
        if self._unstarted:
            self._unstarted -= 1
            # Daemon threads, because a lookup that hangs must not delay the exit.
            threading.Thread(target=self._serve, name="user-names", daemon=True).start()

    def _serve(self) -> None:
        while True:
            uid = self._questions.get()
            self._names[uid] = self._look_up(uid)


_names = UserNames()


def user_name(uid: int) -> str:
    """Return the name of a user, or the uid as text."""
    return _names.of(uid)


def prefetch(uid: int) -> None:
    """Ask for a user's name in advance."""
    _names.prefetch(uid)
