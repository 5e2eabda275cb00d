"""Probes of processes, in threads: each has a deadline, and each user has few at a time.

Reading the files of a process can hang without end: a file server is down, or the process's mappings are
locked. The pool abandons such a probe at its deadline and tells the caller. The threads are daemon threads:
one that hangs delays neither the other probes nor the exit.

A probe counts as hanging after OVERDUE_S or at its deadline. From then on it takes no place of other users. A
user has HANGING_PER_USER hanging probes at most, except those that began together. That number is small for a
user whose probes have not yet ended in time, and it grows with each probe that does. At the limit on hanging
probes of all users, new users wait. Users with earlier probes that ended in time have a reserve, which
includes every user with a leased client. Nothing but its own quota stops root.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

import structlog

from mpsd.base.errors import DeadlineError, GpuError, MpsdError

log = structlog.get_logger("mpsd.probes")

T = TypeVar("T")
PROBES_PER_USER = 8
FIRST_PROBES = 2
"""Probes at a time of a user without a probe that ended in time; each one that does adds one."""
HANGING_PER_USER = 2
MAX_PROBES = 128
MAX_HANGING = 256
"""Hanging probes of all users beyond which new users wait."""
RESERVE = 64
"""Probes, hanging or not, beyond both limits for users with earlier probes that ended in time."""
OVERDUE_S = 0.5
_ROOT = (0, None)
"""Quota keys of root, and of probes that belong to no user."""
_USERS_KEPT = 4096


@dataclass(slots=True, eq=False)
class _Probe:
    """One probe. Any: the type of its result, which only its caller knows."""

    key: Hashable
    work: Callable[[], Any]
    release_late: Callable[[Any], None] | None
    not_begun: Callable[[], None] | None
    begin: Callable[[], None] | None
    ended_late: Callable[[], None] | None
    answer: asyncio.Future[Any]
    begun: bool = False
    taken: bool = False
    # The timer that finds the probe overdue; None once it hangs or has ended.
    overdue: asyncio.TimerHandle | None = None
    hanging: bool = False
    # Guarded by the pool's lock, because the loop may be closed when a result arrives. The thread delivers a
    # result and the loop abandons the probe: the second of the two releases the result.
    abandoned: bool = False
    result: tuple[Any] | None = None


class ProbePool:
    """A pool of threads that grows on demand. It lives on the event loop. Its limits: see the constants."""

    def __init__(
        self,
        name: str,
        *,
        most: int = MAX_PROBES,
        per_key: int = PROBES_PER_USER,
        hanging_per_key: int = HANGING_PER_USER,
        most_hanging: int = MAX_HANGING,
    ) -> None:
        self._name = name
        self._most, self._per_key = most, per_key
        self._hanging_per_key, self._most_hanging = min(hanging_per_key, per_key), most_hanging
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Hashable, deque[_Probe]] = {}
        self._running = Counter[Hashable]()
        self._hanging = Counter[Hashable]()
        # By key: how many probes have ended in time since the last one that hung.
        self._in_time: dict[Hashable, int] = {}
        self._under_way = self._threads = 0
        self._jobs: SimpleQueue[_Probe | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False

    async def run(
        self,
        key: Hashable,
        work: Callable[[], T],
        deadline_s: float | None = None,
        *,
        release_late: Callable[[T], None] | None = None,
        not_begun: Callable[[], None] | None = None,
        begin: Callable[[], None] | None = None,
        ended_late: Callable[[], None] | None = None,
    ) -> T:
        """Run `work` in a thread and return its result, or raise its error. `key`: the owner of the quota.

        A thread calls `release_late` with a result that arrives after the caller stopped waiting, even if the
        loop is closed. `not_begun` is called for a probe that was abandoned before it began. The loop calls
        `begin` right before the start; an MpsdError there ends the probe, which then has not begun. The loop
        calls `ended_late` when an abandoned probe that had begun has ended.
        Raises DeadlineError.
        """
        probe = _Probe(key, work, release_late, not_begun, begin, ended_late, self._loop.create_future())
        self._waiting.setdefault(key, deque()).append(probe)
        self._begin()
        try:
            done, _ = await asyncio.wait({probe.answer}, timeout=deadline_s)
            if not done:
                why = "it has not ended" if probe.begun else self._obstacle(key)
                self._hangs(probe)
                raise DeadlineError(f"the probe of a process was abandoned after {deadline_s:g} s: {why}")
            probe.taken = True
            result: T = probe.answer.result()
            return result
        finally:
            if not probe.taken:
                self._abandon(probe)

    def _begin(self) -> None:
        """Start as many waiting probes as the limits allow, round robin over users."""
        if self._closed:
            for probe in [probe for queue in self._waiting.values() for probe in queue]:
                self._abandon(probe)
            return
        for key in tuple(self._waiting):
            queue = self._waiting.pop(key)
            while queue and not self._obstacle(key):
                self._start(queue.popleft())
            if queue:
                self._waiting[key] = queue

    def _obstacle(self, key: Hashable) -> str:
        """Return why no probe of this key may begin now; empty if one may."""
        running, hanging = self._running[key], self._hanging[key]
        first = self._per_key if key in _ROOT else FIRST_PROBES + self._in_time.get(key, 0)
        allowed = min(self._per_key, first)
        if hanging >= self._hanging_per_key or running >= allowed:
            return f"{running} probes for the same user hang"
        if key in _ROOT:
            return ""
        reserve = RESERVE if key in self._in_time else 0
        all_hanging = self._hanging.total()
        if self._under_way - all_hanging >= self._most + reserve:
            return f"{self._under_way} probes are under way"
        if all_hanging >= self._most_hanging + reserve:
            return f"{all_hanging} probes for all users hang"
        return ""

    def _hangs(self, probe: _Probe) -> None:
        """Count a probe as hanging: it takes no place of other users any more."""
        if probe.overdue is not None:
            probe.overdue.cancel()
            probe.overdue = None
            probe.hanging = True
            self._hanging[probe.key] += 1
            if probe.key in self._in_time:
                self._in_time[probe.key] = 0
            self._begin()

    def _may_begin(self, probe: _Probe) -> bool:
        if probe.begin is None:
            return True
        try:
            probe.begin()
        except MpsdError as error:
            probe.answer.set_exception(error)
            if probe.not_begun is not None:
                probe.not_begun()
            return False
        return True

    def _start(self, probe: _Probe) -> None:
        if not self._may_begin(probe):
            return
        probe.begun = True
        probe.overdue = self._loop.call_later(OVERDUE_S, self._hangs, probe)
        self._running[probe.key] += 1
        self._under_way += 1
        if self._under_way > self._threads:
            name = f"{self._name}-{self._threads + 1}"
            try:
                threading.Thread(target=self._serve, name=name, daemon=True).start()
            except RuntimeError as error:
                # No more threads for this user (RLIMIT_NPROC, cgroup): the probe fails, the others continue.
                if probe.not_begun is not None:
                    probe.not_begun()
                self._loop.call_soon(
                    self._ended, probe, None, GpuError(f"cannot start a thread for a probe: {error}")
                )
                return
            self._threads += 1
        self._jobs.put(probe)

    def _serve(self) -> None:
        """Serve probes. Runs in a thread."""
        while (probe := self._jobs.get()) is not None:
            result, error = None, None
            try:
                result = probe.work()
            except BaseException as raised:
                error = raised
            with self._lock:
                late = probe.abandoned
                probe.result = None if error is not None else (result,)
            # Before the slot is free for another probe: releasing a result can take as long as the probe did.
            if late:
                self._release_late(probe)
            try:
                self._loop.call_soon_threadsafe(self._ended, probe, result, error)
            except RuntimeError:
                # The loop is closed: no caller is waiting.
                if not late and self._abandon_first(probe):
                    self._release_late(probe)
            # Release the references now, not when the next probe comes.
            del probe, result, error

    def _ended(self, probe: _Probe, result: Any, error: BaseException | None) -> None:
        if probe.abandoned and probe.ended_late is not None:
            probe.ended_late()
        self._running[probe.key] -= 1
        self._under_way -= 1
        if not self._running[probe.key]:
            del self._running[probe.key]
        self._count_end(probe)
        if probe.answer.cancelled():
            pass
        elif error is not None:
            probe.answer.set_exception(error)
        else:
            probe.answer.set_result(result)
        self._begin()

    def _count_end(self, probe: _Probe) -> None:
        if probe.overdue is not None:
            probe.overdue.cancel()
            probe.overdue = None
            # The key comes last now: at the limit, the user without probes for longest is forgotten.
            self._in_time[probe.key] = min(self._in_time.pop(probe.key, 0) + 1, self._per_key)
            if len(self._in_time) > _USERS_KEPT:
                self._in_time.pop(next(iter(self._in_time)))
        elif probe.hanging:
            self._hanging[probe.key] -= 1
            if not self._hanging[probe.key]:
                del self._hanging[probe.key]

    def _abandon_first(self, probe: _Probe) -> bool:
        """Abandon a probe. Returns True for the first caller only; the later caller releases the result."""
        with self._lock:
            first, probe.abandoned = not probe.abandoned, True
            return first

    @staticmethod
    def _release_late(probe: _Probe) -> None:
        """Release a late result. Runs in a thread."""
        if probe.result is None or probe.release_late is None:
            return
        try:
            probe.release_late(*probe.result)
        except Exception as error:
            log.warning("cannot release the late result of a probe", reason=repr(error))

    def _abandon(self, probe: _Probe) -> None:
        if not self._abandon_first(probe):
            return
        if probe.result is not None:
            # Rare: the result arrived in the same loop iteration in which its waiter was cancelled.
            threading.Thread(target=self._release_late, args=(probe,), daemon=True).start()
        if probe.answer.done():
            probe.answer.exception()  # Retrieve the exception, so that asyncio does not log it.
            if probe.begun and probe.ended_late is not None:
                probe.ended_late()
            return
        probe.answer.cancel()
        if not probe.begun:
            queue = self._waiting[probe.key]
            queue.remove(probe)
            if not queue:
                del self._waiting[probe.key]
            if probe.not_begun is not None:
                probe.not_begun()

    def close(self) -> None:
        """Begin no more probes. Idle threads end now, busy threads when their probes have ended."""
        self._closed = True
        self._begin()
        for _ in range(self._threads):
            self._jobs.put(None)
