"""The daemon's queue to its descriptor store: the event loop never waits for the store.

A store that does not answer takes seconds to fail. One thread carries out all requests in order. A failed
request is tried again, at growing intervals, until it succeeds or is cancelled. A name under removal becomes
free before it is used again. No user's leases take more than a share of the store.
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

from mpsd.base.conditions import Code, Condition
from mpsd.base.errors import StoreError
from mpsd.fdstore.keeperstore import KeeperStore
from mpsd.fdstore.store import DescriptorStore
from mpsd.os.descriptors import Charge, DescriptorBudget, Purpose

log = structlog.get_logger("mpsd.leasestore")

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


class _Kind(IntEnum):
    """Kinds of requests, by priority: a removal frees space for what is put."""

    REVIVE = 0
    REMOVE = 1
    PUT = 2
    CLOSE = 3


@dataclass(slots=True, eq=False)
class _Job:
    """One request. `fds` are its own duplicates; `due` is monotonic seconds; `problem`: the last failure.

    `owner`: the user charged for it, None for none. `over`: it waits for space in that share. `charge`: the
    descriptors that are closed once the request is done.
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
    charge: Charge | None = None


class LeaseStore:
    """Owns a DescriptorStore. Lives on the event loop; only its own thread touches the store."""

    def __init__(
        self, store: DescriptorStore, share: int | None = None, budget: DescriptorBudget | None = None
    ) -> None:
        """`share`: the maximum of descriptors of one user."""
        self._store = store
        self._budget = budget or DescriptorBudget.unlimited()
        self._charges: dict[str, Charge] = {}
        self._share = share
        self._taken = Counter[int]()
        self._charged: dict[str, tuple[int, int]] = {}
        self._fetched: dict[str, int] = {}
        self._watch_problem = ""
        self._watch_retry: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "descriptor-store")
        self._jobs: list[_Job] = []
        self._held: set[str] = set()
        self._running: _Job | None = None
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._watched_fd = self._watched = -1
        self._watch()
        if isinstance(store, KeeperStore) and store.silence:
            log.error("the descriptor store does not answer; mpsd starts without it", reason=store.silence)
            self._add(_Job(_Kind.REVIVE, problem=store.silence))
        self._worker = self._loop.create_task(self._serve())

    def fetch_all(self) -> dict[str, list[int]]:
        """Return everything held for an earlier daemon, once, before anything is put. Raises StoreError."""
        found = self._store.fetch_all()
        self._held.update(found)
        self._fetched = {name: len(fds) for name, fds in found.items()}
        # The store has duplicates of its own.
        for name, fds in found.items():
            self._charges[name] = self._budget.charge_open(Purpose.LEASE, len(fds))
        return found

    def belongs(self, name: str, owner: int) -> None:
        """Charge a set that was held for an earlier daemon to its owner's share."""
        if name in self._held and name in self._fetched:
            self._charge(name, owner, self._fetched.pop(name))

    def put(
        self, name: str, fds: Sequence[int], owner: int | None = None, charge: Charge | None = None
    ) -> asyncio.Future[None]:
        """Hold duplicates. The future is done when they are held, cancelled if they were dropped first.

        Descriptors beyond the owner's share wait until other leases of that owner are dropped. `charge`: the
        duplicates in the budget; they are released here after `drop`. Raises StoreError when this process has
        no descriptor left for the duplicates; the caller keeps `charge` then.
        """
        copies: list[int] = []
        try:
            copies.extend(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in fds)
        except OSError as error:
            _close(copies)
            raise StoreError(f"cannot store {name}: {error.strerror}") from error
        held: asyncio.Future[None] = self._loop.create_future()
        self._add(_Job(_Kind.PUT, name, copies, held, owner=owner, charge=charge))
        return held

    def drop(self, name: str, released: asyncio.Future[None] | None = None) -> None:
        """Drop a name, whether it has been stored yet or not.

        `released` is done once the store has released it, cancelled if this queue ends first.
        """
        for job in self._puts(name):
            self._jobs.remove(job)
            self._cancel(job)
            # The last close of an address space takes long.
            self._add(_Job(_Kind.CLOSE, fds=job.fds, charge=job.charge))
            if job.problem:
                # A put that was not confirmed may still have left descriptors in the store.
                self._held.add(name)
        if self._running is not None and self._running.kind is _Kind.PUT and self._running.name == name:
            self._running.dropped = True
            self._cancel(self._running)
            # The set that is being stored is removed after that.
            self._running.held, released = released, None
        if name in self._held:
            self._held.discard(name)
            self._add(_Job(_Kind.REMOVE, name, held=released, charge=self._charges.pop(name, None)))
        elif released is not None and not released.done():
            released.set_result(None)

    def holds(self, name: str) -> bool:
        """Return whether the store has the name now: a dead store has nothing until it is replaced."""
        waiting = [*self._jobs, *([self._running] if self._running else [])]
        return name in self._held and not any(j.kind is _Kind.REVIVE for j in waiting)

    def conditions(self) -> list[Condition]:
        """Return a condition for each way in which leases would end with mpsd, or stay."""
        found = [Condition(Code.STORE_LOST, detail=j.problem) for j in self._failed(_Kind.REVIVE)]
        if failed := list(self._failed(_Kind.PUT)):
            found.append(Condition(Code.LEASES_NOT_STORED, detail=failed[-1].problem, count=len(failed)))
        if failed := list(self._failed(_Kind.REMOVE)):
            found.append(Condition(Code.LEASES_LEFT_STORED, detail=failed[-1].problem, count=len(failed)))
        if over := sum(j.over for j in self._jobs):
            found.append(Condition(Code.LEASES_OVER_SHARE, detail=str(self._share), count=over))
        if self._watch_problem:
            found.append(Condition(Code.STORE_NOT_WATCHED, detail=self._watch_problem))
        return found

    async def close(self, deadline_s: float, *, end: bool) -> None:
        """Finish the queue within the deadline, then close the store; `end`: end its keeper, too."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        self._worker.cancel()
        await asyncio.gather(self._worker, return_exceptions=True)
        self._unwatch()
        if self._watch_retry is not None:
            self._watch_retry.cancel()
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
                await self._run_job(min(due, key=lambda j: j.kind))
                continue
            if not ready:
                # Requests beyond a user's share wait without a limit.
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

    async def _run_job(self, job: _Job) -> None:
        self._jobs.remove(job)
        self._running = job
        if job.kind is _Kind.PUT and job.owner is not None:
            self._charge(job.name, job.owner, len(job.fds))
        problem = await self._loop.run_in_executor(self._thread, self._attempt, job)
        self._running = None
        self._watch()
        if (job.kind is _Kind.PUT and problem) or (job.kind is _Kind.REMOVE and not problem):
            self._discharge(job.name)
        if job.kind in (_Kind.CLOSE, _Kind.REMOVE) and not problem and job.charge is not None:
            job.charge.release()
        if problem:
            self._again(job, problem)
        elif job.kind is _Kind.PUT:
            self._stored(job)
        elif job.kind is _Kind.REMOVE:
            if job.held is not None and not job.held.done():
                job.held.set_result(None)
            # There may be space now for what did not fit.
            for waiting in self._jobs:
                waiting.due = 0.0

    def _attempt(self, job: _Job) -> str:
        """Try a request in the thread; return the error, empty on success."""
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
            # A bug of mpsd must not end the only thread that stores leases.
            return repr(error)
        return ""

    def _stored(self, job: _Job) -> None:
        if job.dropped:
            self._add(_Job(_Kind.REMOVE, job.name, held=job.held, charge=job.charge))
            return
        self._held.add(job.name)
        if job.charge is not None:
            self._charges[job.name] = job.charge
        if job.held is not None and not job.held.done():
            job.held.set_result(None)

    def _again(self, job: _Job, problem: str) -> None:
        if problem != job.problem:
            log.warning(
                "a request to the descriptor store failed",
                doing=job.kind.name.lower(),
                name=job.name,
                reason=problem,
            )
        job.problem = problem
        if job.dropped:
            self._add(_Job(_Kind.CLOSE, fds=job.fds, charge=job.charge))
            self._add(_Job(_Kind.REMOVE, job.name, held=job.held))
            return
        job.due = time.monotonic() + job.pause_s
        job.pause_s = min(2 * job.pause_s, LONGEST_PAUSE_S)
        self._add(job)

    def _watch(self) -> None:
        """Watch for the death of the present store, by a duplicate: the thread closes the original."""
        number = self._store.fileno()
        if number == self._watched:
            return
        if self._watched >= 0:
            log.info("the descriptor store was replaced")
        self._unwatch()
        self._watched = number
        if number >= 0:
            try:
                self._watched_fd = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
            except OSError as error:
                # No descriptor is left just now. Leases are stored nevertheless.
                self._watch_problem = error.strerror or str(error)
                self._watched = -1
                if self._watch_retry is None:
                    self._watch_retry = self._loop.call_later(FIRST_PAUSE_S, self._watch_again)
                return
            self._loop.add_reader(self._watched_fd, self._worker_died)
        self._watch_problem = ""

    def _watch_again(self) -> None:
        self._watch_retry = None
        self._watch()

    def _unwatch(self) -> None:
        if self._watched_fd >= 0:
            self._loop.remove_reader(self._watched_fd)
            os.close(self._watched_fd)
            self._watched_fd = -1

    def _worker_died(self) -> None:
        """Put everything into a new store before anything else can die."""
        self._unwatch()
        log.error("the descriptor store died; it is being replaced")
        self._add(_Job(_Kind.REVIVE))


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
