"""Small looks at many processes, in one thread for all of them: a thread for each costs more than the look.

One that hangs is left out, and those behind it are looked at in another thread; it takes part again once it
has come back. Of one user only a few may hang before all that are his are left out. What is still to be done
is in lists: keys that are hashed anew at each step would cost as much as small looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from mpsd.errors import DeadlineError
from mpsd.looks import MOST, Looks

K = TypeVar("K")
T = TypeVar("T")
PATIENCE_S = 0.5
HANG_OF_ONE = 4


@dataclass(slots=True, eq=False)
class _Look(Generic[K, T]):
    key: K
    uid: int
    work: Callable[[], T]


class _Batch(Generic[K, T]):
    """Looks in turn, until told to stop; `back` is told, in the thread, when an awaited one has ended."""

    def __init__(self, looks: Iterable[_Look[K, T]], back: Callable[[K], None]) -> None:
        self._unbegun = deque(looks)
        self._back = back
        self._found: list[tuple[K, T]] = []
        self._current: _Look[K, T] | None = None
        self._awaited = False
        self._stopped = False
        self._turn = threading.Lock()

    def run(self) -> list[tuple[K, T]]:
        """In a thread. OSError ends a look alone."""
        try:
            while (look := self._next()) is not None:
                with contextlib.suppress(OSError):
                    result = look.work()
                    with self._turn:
                        self._found.append((look.key, result))
        finally:
            # Whatever a look raised, it is not under way any more.
            self.stop()
            self._next()
        return self._found

    def _next(self) -> _Look[K, T] | None:
        with self._turn:
            ended, self._awaited = self._current if self._awaited else None, False
            self._current = self._unbegun.popleft() if self._unbegun and not self._stopped else None
            begun = self._current
        if ended is not None:
            self._back(ended.key)
        return begun

    def leave_out(self, key: K) -> bool:
        """Do not begin it any more. Whether it is under way: `back` is told then."""
        with self._turn:
            self._unbegun = deque(look for look in self._unbegun if look.key != key)
            under_way = self._current is not None and self._current.key == key
            self._awaited |= under_way
            return under_way

    def stop(self) -> tuple[_Look[K, T] | None, list[tuple[K, T]], Collection[_Look[K, T]]]:
        """Begin nothing more: the one under way, if any; what was found; what was not begun."""
        with self._turn:
            self._stopped = True
            self._awaited = self._current is not None
            return self._current, list(self._found), self._unbegun


class Sweep(Generic[K, T]):
    """For one loop. `name` is that of its threads."""

    def __init__(self, name: str, patience_s: float = PATIENCE_S) -> None:
        self._looks = Looks(name, of_one=MOST)
        self._patience_s = patience_s
        self._hung: dict[K, int] = {}
        self._batch: _Batch[K, T] | None = None
        self._awaited: dict[K, asyncio.Event] = {}
        self._busy = False
        self._loop = asyncio.get_running_loop()

    async def run(self, looks: Mapping[K, tuple[int, Callable[[], T]]]) -> dict[K, T]:
        """What each look returned, but for those that hang or raised OSError; each comes with a uid.

        Nothing while another run is under way.
        """
        if self._busy:
            return {}
        self._busy = True
        try:
            return await self._run(looks)
        finally:
            self._busy = False

    async def _run(self, looks: Mapping[K, tuple[int, Callable[[], T]]]) -> dict[K, T]:
        found: dict[K, T] = {}
        left: Collection[_Look[K, T]] = [_Look(key, uid, work) for key, (uid, work) in looks.items()]
        if self._hung:
            left = [look for look in left if look.key not in self._hung]
        while left := self._allowed(left):
            batch = self._batch = _Batch(left, self._ended)
            try:
                return found | dict(await self._looks.run(None, batch.run, self._patience_s))
            except DeadlineError:
                pass
            finally:
                hung, done, left = batch.stop()
                if hung is not None:
                    self._hung[hung.key] = hung.uid
                self._batch = None
            found.update(done)
            if hung is None:
                # Every thread hangs: nothing more can be looked at in this run.
                return found
        return found

    def _allowed(self, left: Collection[_Look[K, T]]) -> Collection[_Look[K, T]]:
        if not self._hung:
            return left
        shares = Counter(self._hung.values())
        return [look for look in left if shares[look.uid] < HANG_OF_ONE]

    def _ended(self, key: K) -> None:
        """In a thread: a look that hung, or was waited for, has come back."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._came_back, key)

    def _came_back(self, key: K) -> None:
        self._hung.pop(key, None)
        if (event := self._awaited.pop(key, None)) is not None:
            event.set()

    def leave_out(self, key: K) -> bool:
        """Do not begin a look at it in the run that is under way. Whether one is under way."""
        begun = self._batch is not None and self._batch.leave_out(key)
        return begun or key in self._hung

    async def back(self, key: K) -> bool:
        """Leave it out, and wait until the look at it is back, however long it hangs; False without one."""
        under_way = self.leave_out(key)
        if under_way:
            await self._awaited.setdefault(key, asyncio.Event()).wait()
        return under_way

    def close(self) -> None:
        """Begin nothing more."""
        self._looks.close()
