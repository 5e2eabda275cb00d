"""Small looks at many processes, in one thread for all of them: a thread for each costs more than the look.

One that hangs is left out, and those behind it are looked at in another thread; it takes part again once it
has come back. Of one user only a few may hang before all that are his are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Generic, TypeVar

from mpsd.errors import DeadlineError
from mpsd.looks import MOST, Looks

K = TypeVar("K")
T = TypeVar("T")
PATIENCE_S = 0.5
HANG_OF_ONE = 4


class _Batch(Generic[K, T]):
    """Looks in turn, until told to stop; `back` is told, in the thread, when an awaited one has ended."""

    def __init__(self, looks: Mapping[K, Callable[[], T]], back: Callable[[K], None]) -> None:
        self._unbegun = dict(looks)
        self._back = back
        self._found: dict[K, T] = {}
        self._current: list[K] = []
        self._awaited = False
        self._stopped = False
        self._turn = threading.Lock()

    def run(self) -> dict[K, T]:
        """In a thread. OSError ends a look alone."""
        try:
            while (look := self._next()) is not None:
                key, work = look
                with contextlib.suppress(OSError):
                    result = work()
                    with self._turn:
                        self._found[key] = result
        finally:
            # Whatever a look raised, it is not under way any more.
            self.stop()
            self._next()
        return self._found

    def _next(self) -> tuple[K, Callable[[], T]] | None:
        with self._turn:
            ended, self._awaited = self._current if self._awaited else [], False
            self._current = [] if self._stopped else list(islice(self._unbegun, 1))
            begun = [(key, self._unbegun.pop(key)) for key in self._current]
        for key in ended:
            self._back(key)
        return begun[0] if begun else None

    def leave_out(self, key: K) -> bool:
        """Do not begin it any more. Whether it is under way: `back` is told then."""
        with self._turn:
            self._unbegun.pop(key, None)
            under_way = key in self._current
            self._awaited |= under_way
            return under_way

    def stop(self) -> tuple[list[K], dict[K, T], dict[K, Callable[[], T]]]:
        """Begin nothing more: the one under way, if any; what was found; what was not begun."""
        with self._turn:
            self._stopped = True
            self._awaited = bool(self._current)
            return self._current, dict(self._found), self._unbegun


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
        left = {key: work for key, (_, work) in looks.items() if key not in self._hung}
        while left := self._allowed(left, looks):
            batch = self._batch = _Batch(left, self._ended)
            try:
                return found | await self._looks.run(None, batch.run, self._patience_s)
            except DeadlineError:
                pass
            finally:
                hung, done, left = batch.stop()
                self._hung.update((key, looks[key][0]) for key in hung)
                self._batch = None
            found |= done
            if not hung:
                # Every thread hangs: nothing more can be looked at in this run.
                return found
        return found

    def _allowed(
        self, left: dict[K, Callable[[], T]], looks: Mapping[K, tuple[int, Callable[[], T]]]
    ) -> dict[K, Callable[[], T]]:
        shares = Counter(self._hung.values())
        return {key: work for key, work in left.items() if shares[looks[key][0]] < HANG_OF_ONE}

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
