"""Closes what strangers sent, and their connections with what is queued in them: never on the loop.

A close can wait for a file system or for a lingering connection, for ever. A few daemon threads do it, one
at a time for each user: who makes them wait waits behind himself.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence

THREADS = 4
OF_ONE = 256


class Closers:
    """`THREADS` users' closes at once; the threads begin here and never later, so `close` cannot fail."""

    def __init__(self, name: str = "vault-stranger") -> None:
        self._changed = threading.Condition()
        self._waiting: dict[int, deque[tuple[tuple[int, ...], Callable[[], None] | None]]] = {}
        self._busy: set[int] = set()
        self._pending = Counter[int]()
        self._ending = False
        for number in range(THREADS):
            threading.Thread(target=self._serve, daemon=True, name=f"{name}-{number + 1}").start()

    def close(self, uid: int, fds: Sequence[int], then: Callable[[], None] | None = None) -> None:
        """Owns the descriptors; `then` is called, in a thread, when they are closed."""
        if not fds:
            return
        with self._changed:
            self._waiting.setdefault(uid, deque()).append((tuple(fds), then))
            self._pending[uid] += len(fds)
            self._changed.notify()

    def pending(self, uid: int) -> int:
        """Descriptors of a user that are not closed yet."""
        return self._pending.get(uid, 0)

    def full(self, uid: int) -> bool:
        """Nothing more is to be taken from this user."""
        return self.pending(uid) >= OF_ONE

    def end(self) -> None:
        """The threads end when nothing is left to close."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def _next(self) -> int | None:
        return next((uid for uid in self._waiting if uid not in self._busy), None)

    def _serve(self) -> None:
        """In a thread."""
        while True:
            with self._changed:
                while (uid := self._next()) is None:
                    if self._ending and not self._waiting:
                        return
                    self._changed.wait()
                # Taken out and put back last: users in turn.
                queue = self._waiting.pop(uid)
                fds, then = queue.popleft()
                if queue:
                    self._waiting[uid] = queue
                self._busy.add(uid)
            self._close_all(uid, fds, then)

    def _close_all(self, uid: int, fds: Sequence[int], then: Callable[[], None] | None) -> None:
        for fd in fds:
            try:
                os.close(fd)
            except OSError:
                pass  # It is closed all the same: what fails is the file's last write.
        with self._changed:
            self._busy.discard(uid)
            self._pending[uid] -= len(fds)
            if not self._pending[uid]:
                del self._pending[uid]
            self._changed.notify_all()
        if then is not None:
            then()
