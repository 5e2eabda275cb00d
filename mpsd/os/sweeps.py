"""Sweeps: short probes of many processes in one thread, since one thread each costs more than the probe.

A probe that hangs is left out, and another thread continues with the probes behind it. The process takes part
again once its probe has returned. When a few probes of one user hang, the sweep leaves out all processes of
that user. Users whose probes hung before come last, so that they delay their own probes alone. The pending
work is in lists: hashing the keys at each step would cost as much as short probes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from mpsd.base.errors import DeadlineError
from mpsd.os.probes import HANGING_PER_USER, MAX_HANGING, RESERVE, ProbePool

K = TypeVar("K")
T = TypeVar("T")
PATIENCE_S = 0.5
_SUSPECTS_KEPT = 4096


@dataclass(slots=True, eq=False)
class _SweepProbe(Generic[K, T]):
    key: K
    uid: int
    work: Callable[[], T]


class _Batch(Generic[K, T]):
    """Probes one after the other, until stopped. The thread calls `ended` when an awaited probe has ended."""

    def __init__(self, probes: Iterable[_SweepProbe[K, T]], ended: Callable[[K], None]) -> None:
        self._not_begun = deque(probes)
        self._ended = ended
        self._found: list[tuple[K, T]] = []
        self._current: _SweepProbe[K, T] | None = None
        self._awaited = False
        self._stopped = False
        self._turn = threading.Lock()

    def run(self) -> list[tuple[K, T]]:
        """Run the probes. Runs in a thread. An OSError ends only its own probe."""
        try:
            while (probe := self._next()) is not None:
                with contextlib.suppress(OSError):
                    result = probe.work()
                    with self._turn:
                        self._found.append((probe.key, result))
        finally:
            # Also after an unexpected error: the current probe is not under way any more.
            self.stop()
            self._next()
        return self._found

    def _next(self) -> _SweepProbe[K, T] | None:
        with self._turn:
            ended, self._awaited = self._current if self._awaited else None, False
            self._current = self._not_begun.popleft() if self._not_begun and not self._stopped else None
            begun = self._current
        if ended is not None:
            self._ended(ended.key)
        return begun

    def leave_out(self, key: K) -> bool:
        """Do not begin this probe. Returns True if it is under way; `ended` is called when it ends."""
        with self._turn:
            self._not_begun = deque(probe for probe in self._not_begun if probe.key != key)
            under_way = self._current is not None and self._current.key == key
            self._awaited |= under_way
            return under_way

    def stop(self) -> tuple[_SweepProbe[K, T] | None, list[tuple[K, T]], Collection[_SweepProbe[K, T]]]:
        """Begin no more probes; return the current one if any, the results, and the probes not begun."""
        with self._turn:
            self._stopped = True
            self._awaited = self._current is not None
            return self._current, list(self._found), self._not_begun


class Sweep(Generic[K, T]):
    """Sweeps of one event loop. `name` is the name of its threads."""

    def __init__(self, name: str, patience_s: float = PATIENCE_S) -> None:
        most = MAX_HANGING + RESERVE
        self._probes = ProbePool(name, per_key=most, hanging_per_key=most)
        self._patience_s = patience_s
        self._hung: dict[K, int] = {}
        # Users with a probe that hung, and users with one that ended in time beside hanging ones.
        self._suspects: dict[int, None] = {}
        self._in_time: set[int] = set()
        self._batch: _Batch[K, T] | None = None
        self._awaited: dict[K, asyncio.Event] = {}
        self._busy = False
        self._loop = asyncio.get_running_loop()

    async def run(self, probes: Mapping[K, tuple[int, Callable[[], T]]]) -> dict[K, T]:
        """Run the probes, each with the uid of its process; return the results by key.

        Probes that hang or raise OSError are missing. Returns nothing while another run is under way.
        """
        if self._busy:
            return {}
        self._busy = True
        try:
            found = await self._run(probes)
            if self._suspects:
                self._in_time.update(uid for key, (uid, _) in probes.items() if key in found)
            return found
        finally:
            self._busy = False

    async def _run(self, probes: Mapping[K, tuple[int, Callable[[], T]]]) -> dict[K, T]:
        found: dict[K, T] = {}
        remaining: Collection[_SweepProbe[K, T]] = [
            _SweepProbe(key, uid, work) for key, (uid, work) in probes.items()
        ]
        if self._suspects:
            remaining = [probe for probe in remaining if probe.key not in self._hung]
            remaining.sort(key=lambda probe: (probe.uid in self._suspects, probe.uid not in self._in_time))
        while remaining := self._allowed(remaining):
            batch = self._batch = _Batch(remaining, self._ended)
            try:
                return found | dict(await self._probes.run(None, batch.run, self._patience_s))
            except DeadlineError:
                pass
            finally:
                hung, done, remaining = batch.stop()
                if hung is not None:
                    self._note_hang(hung)
                self._batch = None
            found.update(done)
            if hung is None:
                # Every thread hangs: this run cannot make further probes.
                return found
        return found

    def _allowed(self, remaining: Collection[_SweepProbe[K, T]]) -> Collection[_SweepProbe[K, T]]:
        if not self._hung:
            return remaining
        shares = Counter(self._hung.values())
        full = len(self._hung) >= MAX_HANGING
        return [
            probe
            for probe in remaining
            if shares[probe.uid] < HANGING_PER_USER
            and (not full or probe.uid == 0 or probe.uid in self._in_time)
        ]

    def _note_hang(self, hung: _SweepProbe[K, T]) -> None:
        self._hung[hung.key] = hung.uid
        if len(self._suspects) >= _SUSPECTS_KEPT:
            self._suspects.clear()
        self._suspects[hung.uid] = None
        if len(self._in_time) >= _SUSPECTS_KEPT:
            self._in_time.clear()

    def _ended(self, key: K) -> None:
        """Report that an awaited or hanging probe has returned. Runs in a thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._probe_returned, key)

    def _probe_returned(self, key: K) -> None:
        self._hung.pop(key, None)
        if (event := self._awaited.pop(key, None)) is not None:
            event.set()

    def leave_out(self, key: K) -> bool:
        """Do not begin a probe of this key in the current run. Returns whether one is under way."""
        begun = self._batch is not None and self._batch.leave_out(key)
        return begun or key in self._hung

    async def wait_for_return(self, key: K) -> bool:
        """Leave a key out and wait until its probe has returned, without a limit; False if there is none."""
        under_way = self.leave_out(key)
        if under_way:
            await self._awaited.setdefault(key, asyncio.Event()).wait()
        return under_way

    def close(self) -> None:
        """Begin no more probes."""
        self._probes.close()
