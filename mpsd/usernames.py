"""Names of users, for showing. A directory service can take long to answer, so nobody waits for it.

The user database (nsswitch.conf(5)) is asked in threads; until it has answered, the number is shown. So that
a name is there when it is wanted, it is asked for as soon as its user is heard of (`foresee`).
"""

from __future__ import annotations

import pwd
import threading
from collections.abc import Callable
from queue import SimpleQueue

# Questions that hang for good hold up one each: names of others are then numbers for longer.
THREADS = 4
_KEPT = 4096


def _look_up(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OSError):
        return str(uid)


class UserNames:
    """`of` and `foresee` are for one thread, and never wait."""

    def __init__(self, look_up: Callable[[int], str] = _look_up, threads: int = THREADS) -> None:
        self._look_up = look_up
        self._names: dict[int, str] = {}
        self._asked: set[int] = set()
        self._questions: SimpleQueue[int] = SimpleQueue()
        self._unstarted = threads

    def of(self, uid: int) -> str:
        """The name of a user; the number as text where there is none, or not yet."""
        self.foresee(uid)
        return self._names.get(uid, str(uid))

    def foresee(self, uid: int) -> None:
        """Ask for a name that will be wanted."""
        if uid in self._asked:
            return
        if len(self._asked) >= _KEPT:
            self._names, self._asked = {}, set()
        self._asked.add(uid)
        self._questions.put(uid)
        if self._unstarted:
            self._unstarted -= 1
            # Daemon threads: one that hangs must not hold up the exit.
            threading.Thread(target=self._serve, name="user-names", daemon=True).start()

    def _serve(self) -> None:
        while True:
            uid = self._questions.get()
            self._names[uid] = self._look_up(uid)


_names = UserNames()


def user_name(uid: int) -> str:
    """The name of a user, or the number as text."""
    return _names.of(uid)


def foresee(uid: int) -> None:
    """Ask for the name of a user who has just been heard of."""
    _names.foresee(uid)
