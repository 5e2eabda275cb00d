"""Names of users, for showing. A directory service can take long to answer, so nobody waits for it.

The user database (nsswitch.conf(5)) is asked in a thread of its own; who asks waits a moment, which is
enough for /etc/passwd, and is told the number until the name has come.
"""

from __future__ import annotations

import pwd
import threading
from collections.abc import Callable

WAIT_S = 0.05
_KEPT = 4096


def _look_up(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OSError):
        return str(uid)


class UserNames:
    """`of` is for one thread. A name that comes slowly is waited for once, then shown as its number."""

    def __init__(self, look_up: Callable[[int], str] = _look_up, wait_s: float = WAIT_S) -> None:
        self._look_up = look_up
        self._wait_s = wait_s
        self._names: dict[int, str] = {}
        self._asked: dict[int, threading.Event] = {}

    def of(self, uid: int) -> str:
        """The name of a user; the number as text where there is none, or not yet."""
        name = self._names.get(uid)
        if name is None and uid not in self._asked:
            if len(self._asked) >= _KEPT:
                self._names, self._asked = {}, {}
            answered = self._asked[uid] = threading.Event()
            # Not a pool: one question that hangs for good must not hold up the others or the exit.
            threading.Thread(target=self._ask, args=(uid, self._names, answered), daemon=True).start()
            answered.wait(self._wait_s)
            name = self._names.get(uid)
        return str(uid) if name is None else name

    def _ask(self, uid: int, names: dict[int, str], answered: threading.Event) -> None:
        names[uid] = self._look_up(uid)
        answered.set()


_names = UserNames()


def user_name(uid: int) -> str:
    """The name of a user, or the number as text."""
    return _names.of(uid)
