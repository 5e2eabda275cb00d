"""Looks at processes, in threads: each has a deadline, and of one user only a few are under way at a time.

What is read of a process can hang for good: its files lie on a dead file server, its mappings are locked.
Such a look is given up, and whoever waits for it is told; its thread goes on, and counts as its user's until
it ends. The threads are daemon threads: one that hangs holds up neither the others nor the exit.
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

from mpsd.errors import DeadlineError, GpuError

log = structlog.get_logger("mpsd.looks")

T = TypeVar("T")
OF_ONE = 8
MOST = 128


@dataclass(slots=True, eq=False)
class _Look:
    """Any: what the look returns, which only its caller knows."""

    key: Hashable
    work: Callable[[], Any]
    late: Callable[[Any], None] | None
    unbegun: Callable[[], None] | None
    answer: asyncio.Future[Any]
    begun: bool = False
    taken: bool = False
    # Under the lock of Looks, for the loop may turn no more when a result comes: of its thread, which brings
    # a result, and the loop, which gives it up, whoever comes second lets go of it.
    given_up: bool = False
    came: tuple[Any] | None = None


class Looks:
    """A pool of threads that grows as far as it must. Lives on the event loop."""

    def __init__(self, name: str, *, most: int = MOST, of_one: int = OF_ONE) -> None:
        self._name = name
        self._most, self._of_one = most, of_one
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Hashable, deque[_Look]] = {}
        self._running = Counter[Hashable]()
        self._under_way = self._threads = 0
        self._jobs: SimpleQueue[_Look | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False

    async def run(
        self,
        key: Hashable,
        work: Callable[[], T],
        deadline_s: float | None = None,
        *,
        late: Callable[[T], None] | None = None,
        unbegun: Callable[[], None] | None = None,
    ) -> T:
        """What `work` returns or raises, in a thread; `key`: whose share of the threads it takes.

        `late` is given, in a thread, a result that nobody waits for any more, whether or not the loop still
        turns; `unbegun` is called when it was given up before it began. Raises DeadlineError.
        """
        look = _Look(key, work, late, unbegun, self._loop.create_future())
        self._waiting.setdefault(key, deque()).append(look)
        self._begin()
        try:
            done, _ = await asyncio.wait({look.answer}, timeout=deadline_s)
            if not done:
                why = "it has not ended" if look.begun else f"{self._running[key]} others of its user hang"
                raise DeadlineError(f"the look at it was given up after {deadline_s:g} s: {why}")
            look.taken = True
            result: T = look.answer.result()
            return result
        finally:
            if not look.taken:
                self._give_up(look)

    def _begin(self) -> None:
        """Start what may start, users in turn."""
        if self._closed:
            for look in [look for queue in self._waiting.values() for look in queue]:
                self._give_up(look)
            return
        for key in tuple(self._waiting):
            queue = self._waiting.pop(key)
            while queue and self._running[key] < self._of_one and self._under_way < self._most:
                self._start(queue.popleft())
            if queue:
                self._waiting[key] = queue

    def _start(self, look: _Look) -> None:
        look.begun = True
        self._running[look.key] += 1
        self._under_way += 1
        if self._under_way > self._threads:
            name = f"{self._name}-{self._threads + 1}"
            try:
                threading.Thread(target=self._serve, name=name, daemon=True).start()
            except RuntimeError as error:
                # No more threads for this user (RLIMIT_NPROC, cgroup): the look fails, the others go on.
                self._loop.call_soon(self._ended, look, None, GpuError(f"no thread to look with: {error}"))
                return
            self._threads += 1
        self._jobs.put(look)

    def _serve(self) -> None:
        """In a thread."""
        while (look := self._jobs.get()) is not None:
            result, error = None, None
            try:
                result = look.work()
            except BaseException as raised:
                error = raised
            with self._lock:
                late = look.given_up
                look.came = None if error is not None else (result,)
            # Before its place is another look's: to let go can take as long as the look did.
            if late:
                self._let_go(look)
            try:
                self._loop.call_soon_threadsafe(self._ended, look, result, error)
            except RuntimeError:
                # The loop is closed: nobody waits for anything any more.
                if not late and self._is_given_up(look):
                    self._let_go(look)
            # Not held until the next look comes.
            del look, result, error

    def _ended(self, look: _Look, result: Any, error: BaseException | None) -> None:
        self._running[look.key] -= 1
        self._under_way -= 1
        if not self._running[look.key]:
            del self._running[look.key]
        if look.answer.cancelled():
            pass
        elif error is not None:
            look.answer.set_exception(error)
        else:
            look.answer.set_result(result)
        self._begin()

    def _is_given_up(self, look: _Look) -> bool:
        """Whether it is by this call, which has to let go of what has come."""
        with self._lock:
            first, look.given_up = not look.given_up, True
            return first

    @staticmethod
    def _let_go(look: _Look) -> None:
        """In a thread."""
        if look.came is None or look.late is None:
            return
        try:
            look.late(*look.came)
        except Exception as error:
            log.warning("what a look brought too late is not let go of", reason=repr(error))

    def _give_up(self, look: _Look) -> None:
        if not self._is_given_up(look):
            return
        if look.came is not None:
            # Rare: it came in the turn of the loop in which its waiter was cancelled.
            threading.Thread(target=self._let_go, args=(look,), daemon=True).start()
        if look.answer.done():
            look.answer.exception()  # Nobody waits for it: not an error that was never looked at.
            return
        look.answer.cancel()
        if not look.begun:
            queue = self._waiting[look.key]
            queue.remove(look)
            if not queue:
                del self._waiting[look.key]
            if look.unbegun is not None:
                look.unbegun()

    def close(self) -> None:
        """Begin nothing more; threads that are idle end, and so do the others when their looks have."""
        self._closed = True
        self._begin()
        for _ in range(self._threads):
            self._jobs.put(None)
