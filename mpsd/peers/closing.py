"""Closing of descriptors and connections off the event loop.

A close(2) can wait forever, for a file system or for a lingering connection. So a few daemon threads close
what peers sent, and connections with unread messages in them. They run one close at a time per user, so a
user that blocks a close delays only its own closes. `uid`: the owner of the peer's account.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence

THREADS = 4
OF_ONE = 256
"""Closes of one user that may wait, where the daemon has many descriptors."""


class Closers:
    """Threads that close for `THREADS` users at once. All threads start here, so that close() cannot fail
    later."""

    def __init__(self, name: str = "close") -> None:
        self._changed = threading.Condition()
        self._waiting: dict[int, deque[tuple[tuple[int, ...], Callable[[], None] | None]]] = {}
        self._busy: set[int] = set()
        self._pending = Counter[int]()
        self._ending = False
        for number in range(THREADS):
            threading.Thread(target=self._serve, daemon=True, name=f"{name}-{number + 1}").start()

    def close(self, uid: int, fds: Sequence[int], then: Callable[[], None] | None = None) -> None:
        """Close the descriptors, which this call takes over; then call `then`, in a thread."""
        if not fds:
            return
        with self._changed:
            self._waiting.setdefault(uid, deque()).append((tuple(fds), then))
            self._pending[uid] += len(fds)
            self._changed.notify()

    def pending(self, uid: int) -> int:
        """Return how many descriptors of a user are not closed yet."""
        return self._pending.get(uid, 0)

    def end(self) -> None:
        """Let the threads end once all descriptors are closed."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def _next(self) -> int | None:
        return next((uid for uid in self._waiting if uid not in self._busy), None)

    def _serve(self) -> None:
        """Close descriptors until the end. Runs in a thread."""
        while True:
            with self._changed:
                while (uid := self._next()) is None:
                    if self._ending and not self._waiting:
                        return
                    self._changed.wait()
                # Reinsert the user's queue at the end, so that users take turns.
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
                pass  # The descriptor is closed anyway: only the file's last write failed.
        with self._changed:
            self._busy.discard(uid)
            self._pending[uid] -= len(fds)
            if not self._pending[uid]:
                del self._pending[uid]
            self._changed.notify_all()
        if then is not None:
            then()
