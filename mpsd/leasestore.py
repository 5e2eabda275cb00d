"""The daemon's way to its descriptor store: nothing done there is waited for on the event loop.

A store that does not answer takes seconds to say so. Everything asked of it is done in one thread, in
order: what failed is tried again, at growing intervals, until it succeeds or is not wanted any more. A
name that is being removed is free before it is used again. No user's leases take more than a share of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import IntEnum

import structlog

from mpsd.errors import StoreError
from mpsd.fdstore import DescriptorStore
from mpsd.keeperstore import KeeperStore

log = structlog.get_logger("mpsd.leasestore")

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


class _Kind(IntEnum):
    """What is done first when several could be done: a removal makes room for what is put."""

    REVIVE = 0
    REMOVE = 1
    PUT = 2
    CLOSE = 3


@dataclass(slots=True, eq=False)
class _Job:
    """`fds` are duplicates of its own; `due` is monotonic seconds; `problem` is why it failed last.

    `owner`: the user whose share it takes, None for nobody's. `over`: it waits until that has room.
    """

    kind: _Kind
    name: str = ""
    fds: Sequence[int] = ()
    held: asyncio.Future[None] | None = None
    due: float = 0.0
    pause_s: float = field(default_factory=lambda: FIRST_PAUSE_S)
    problem: str = ""
    dropped: bool = False
    owner: int | None = None
    over: bool = False


class LeaseStore:
    """Owns a DescriptorStore. Lives on the event loop; only its own thread touches the store."""

    def __init__(self, store: DescriptorStore, share: int | None = None) -> None:
        """`share`: so many descriptors of one user at most."""
        self._store = store
        self._share = share
        self._taken = Counter[int]()
        self._charged: dict[str, tuple[int, int]] = {}
        self._fetched: dict[str, int] = {}
        self._eye_problem = ""
        self._watching_again: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "descriptor-store")
        self._jobs: list[_Job] = []
        self._held: set[str] = set()
        self._running: _Job | None = None
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._eye = self._watched = -1
        self._watch()
        self._worker = self._loop.create_task(self._serve())

    def fetch_all(self) -> dict[str, list[int]]:
        """Everything held for an earlier daemon, once, before anything is put. Raises StoreError."""
        found = self._store.fetch_all()
        self._held.update(found)
        self._fetched = {name: len(fds) for name, fds in found.items()}
        return found

    def belongs(self, name: str, owner: int) -> None:
        """Say whose share something takes that was held for an earlier daemon."""
        if name in self._held and name in self._fetched:
            self._charge(name, owner, self._fetched.pop(name))

    def put(self, name: str, fds: Sequence[int], owner: int | None = None) -> asyncio.Future[None]:
        """Hold duplicates; the future is done when they are held, cancelled when they were dropped first.

        What is more than its owner's share waits until others of his are dropped.
        Raises StoreError when this process has no descriptor left for the duplicates.
        """
        copies: list[int] = []
        try:
            copies.extend(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in fds)
        except OSError as error:
            _close(copies)
            raise StoreError(f"{name} is not stored: {error.strerror}") from error
        held: asyncio.Future[None] = self._loop.create_future()
        self._add(_Job(_Kind.PUT, name, copies, held, owner=owner))
        return held

    def drop(self, name: str, gone: asyncio.Future[None] | None = None) -> None:
        """Hold the name no longer, whether it has been stored yet or not.

        `gone` is done once the store has let go of it, cancelled where this ends first.
        """
        for job in self._puts(name):
            self._jobs.remove(job)
            self._cancel(job)
            # The last close of an address space takes long.
            self._add(_Job(_Kind.CLOSE, fds=job.fds))
            if job.problem:
                # A put that was not confirmed may have left something all the same.
                self._held.add(name)
        if self._running is not None and self._running.kind is _Kind.PUT and self._running.name == name:
            self._running.dropped = True
            self._cancel(self._running)
            # What is being stored is removed after that.
            self._running.held, gone = gone, None
        if name in self._held:
            self._held.discard(name)
            self._add(_Job(_Kind.REMOVE, name, held=gone))
        elif gone is not None and not gone.done():
            gone.set_result(None)

    def holds(self, name: str) -> bool:
        """Whether the store has it now: a store that died has nothing until it is replaced."""
        waiting = [*self._jobs, *([self._running] if self._running else [])]
        return name in self._held and not any(j.kind is _Kind.REVIVE for j in waiting)

    def problems(self) -> list[str]:
        """What is not as it should be, for `status`."""
        found = [f"leases end with mpsd: {j.problem}" for j in self._failed(_Kind.REVIVE)]
        for kind, text in (
            (_Kind.PUT, "lease(s) are not in the descriptor store and end with mpsd"),
            (_Kind.REMOVE, "lease(s) that were given up are still in the descriptor store"),
        ):
            failed = list(self._failed(kind))
            if failed:
                found.append(f"{len(failed)} {text}: {failed[-1].problem}")
        if over := sum(j.over for j in self._jobs):
            found.append(
                f"{over} lease(s) are more than their user's share of the descriptor store ({self._share} "
                "descriptors) and end with mpsd"
            )
        if self._eye_problem:
            found.append(f"the end of the descriptor store is not seen: {self._eye_problem}")
        return found

    async def close(self, deadline_s: float, *, end: bool) -> None:
        """Do what is left within the deadline, then let go of the store; `end`: of its keeper too."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        self._worker.cancel()
        await asyncio.gather(self._worker, return_exceptions=True)
        self._unwatch()
        if self._watching_again is not None:
            self._watching_again.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)
        for job in self._jobs:
            self._cancel(job)
            _close(job.fds)
        if self._running is not None:
            # Its thread still uses the store's descriptors: they end with this process.
            log.error("the descriptor store does not answer", left=len(self._jobs) + 1)
        elif end and isinstance(self._store, KeeperStore):
            self._store.end()
        else:
            self._store.close()

    def _add(self, job: _Job) -> None:
        self._jobs.append(job)
        self._idle.clear()
        self._wake.set()

    def _puts(self, name: str) -> list[_Job]:
        return [j for j in self._jobs if j.kind is _Kind.PUT and j.name == name]

    def _failed(self, kind: _Kind) -> Iterator[_Job]:
        waiting = [*self._jobs, *([self._running] if self._running else [])]
        return (j for j in waiting if j.kind is kind and j.problem)

    def _cancel(self, job: _Job) -> None:
        if job.held is not None:
            job.held.cancel()

    async def _serve(self) -> None:
        while True:
            self._wake.clear()
            removing = {j.name for j in self._jobs if j.kind is _Kind.REMOVE}
            for job in self._jobs:
                job.over = self._is_over(job)
            puts = _Kind.PUT
            ready = [j for j in self._jobs if j.kind is not puts or not (j.over or j.name in removing)]
            now = time.monotonic()
            due = [j for j in ready if j.due <= now]
            if due:
                await self._do(min(due, key=lambda j: j.kind))
                continue
            if not ready:
                # What waits for its user's share waits for as long as it takes.
                self._idle.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(j.due for j in ready) - now if ready else None):
                    await self._wake.wait()

    def _is_over(self, job: _Job) -> bool:
        if job.kind is not _Kind.PUT or job.owner is None or self._share is None:
            return False
        return self._taken[job.owner] + len(job.fds) > self._share

    def _charge(self, name: str, owner: int, count: int) -> None:
        self._charged[name] = owner, count
        self._taken[owner] += count

    def _discharge(self, name: str) -> None:
        if name in self._charged:
            owner, count = self._charged.pop(name)
            self._taken[owner] -= count

    async def _do(self, job: _Job) -> None:
        self._jobs.remove(job)
        self._running = job
        if job.kind is _Kind.PUT and job.owner is not None:
            self._charge(job.name, job.owner, len(job.fds))
        problem = await self._loop.run_in_executor(self._thread, self._attempt, job)
        self._running = None
        self._watch()
        if (job.kind is _Kind.PUT and problem) or (job.kind is _Kind.REMOVE and not problem):
            self._discharge(job.name)
        if problem:
            self._again(job, problem)
        elif job.kind is _Kind.PUT:
            self._stored(job)
        elif job.kind is _Kind.REMOVE:
            if job.held is not None and not job.held.done():
                job.held.set_result(None)
            # There may be room now for what did not fit.
            for waiting in self._jobs:
                waiting.due = 0.0

    def _attempt(self, job: _Job) -> str:
        """In the thread: why it failed, empty when it did not."""
        try:
            match job.kind:
                case _Kind.REVIVE:
                    self._store.revive()
                case _Kind.REMOVE:
                    self._store.remove(job.name)
                case _Kind.PUT:
                    self._store.put(job.name, job.fds)
                    _close(job.fds)
                case _Kind.CLOSE:
                    _close(job.fds)
        except (StoreError, OSError) as error:
            return str(error)
        except Exception as error:
            # A bug of ours must not end the only thread that stores leases.
            return repr(error)
        return ""

    def _stored(self, job: _Job) -> None:
        if job.dropped:
            self._add(_Job(_Kind.REMOVE, job.name, held=job.held))
            return
        self._held.add(job.name)
        if job.held is not None and not job.held.done():
            job.held.set_result(None)

    def _again(self, job: _Job, problem: str) -> None:
        if problem != job.problem:
            log.warning("descriptor store", doing=job.kind.name.lower(), name=job.name, reason=problem)
        job.problem = problem
        if job.dropped:
            self._add(_Job(_Kind.CLOSE, fds=job.fds))
            self._add(_Job(_Kind.REMOVE, job.name, held=job.held))
            return
        job.due = time.monotonic() + job.pause_s
        job.pause_s = min(2 * job.pause_s, LONGEST_PAUSE_S)
        self._add(job)

    def _watch(self) -> None:
        """See the death of the store as it is now. A duplicate: the thread closes the original."""
        number = self._store.fileno()
        if number == self._watched:
            return
        if self._watched >= 0:
            log.info("the descriptor store was replaced")
        self._unwatch()
        self._watched = number
        if number >= 0:
            try:
                self._eye = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
            except OSError as error:
                # No descriptor is left just now. Leases are stored all the same.
                self._eye_problem = error.strerror or str(error)
                self._watched = -1
                if self._watching_again is None:
                    self._watching_again = self._loop.call_later(FIRST_PAUSE_S, self._watch_again)
                return
            self._loop.add_reader(self._eye, self._died)
        self._eye_problem = ""

    def _watch_again(self) -> None:
        self._watching_again = None
        self._watch()

    def _unwatch(self) -> None:
        if self._eye >= 0:
            self._loop.remove_reader(self._eye)
            os.close(self._eye)
            self._eye = -1

    def _died(self) -> None:
        """Put everything into a new store before anything else can die."""
        self._unwatch()
        log.error("the descriptor store died; it is being replaced")
        self._add(_Job(_Kind.REVIVE))


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
