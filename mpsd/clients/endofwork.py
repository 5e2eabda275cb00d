"""The end of GPU work of exited clients: watched from the death of a client on.

The unit of watching is a program run, from one exec of the process to the next: its work ends separately from
that of the next program.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from mpsd.base.errors import GpuError
from mpsd.base.model import ClientId, ProcessInstance
from mpsd.core import events as ev
from mpsd.gpu.base import WorkInspector, WorkView
from mpsd.os.descriptors import Charge
from mpsd.os.probes import ProbePool
from mpsd.os.sweeps import Sweep
from mpsd.os.tasks import Tasks

log = structlog.get_logger("mpsd.endofwork")

SLOWEST_S = 0.25
# A client is leased before it has a context; its driver creates the mappings in the second after that.
YOUNG_S = 2.0
YOUNG_STEP_S = 0.02
# A client without a context may create one and launch at any time. Work unseen by its death is unknown.
EMPTY_STEP_S = 0.05
SETTLE_TRIES = 5
"""The number of further probes, YOUNG_STEP_S apart, of a client whose mappings have changed."""
CLOSE_S = 5.0
MAX_SPANS = 64
"""The number of address ranges of one process that are left out."""
MAX_EARLY_PROCESSES = 64
"""The number of processes with such ranges that are not followed yet, as after a restart."""
# A probe that hangs continues after the sweep abandons it: nothing is lost, and the rest wait less.
PATIENCE_S = 0.1
NOT_RECORDED = "cannot record the semaphores of a client"


@dataclass(slots=True, eq=False)
class _ProgramRun:
    """One program run of a process, its view, and its clients (address spaces) in one domain.

    `probe`: an awaited probe of the running process, under way or done. `watch`: the task after the death.
    `report_due`: a caller waits for the result of a probe that begins after it was set. `replaced`: the
    process has replaced that program since. `charge`: the descriptors of the view.
    """

    view: WorkView
    clients: set[ClientId]
    probe: asyncio.Task[None] | None = None
    watch: asyncio.Task[None] | None = None
    report_due: bool = False
    replaced: bool = False
    charge: Charge | None = None


class WorkWatch:
    """A view for each program run of each client. The longer the work lasts, the rarer the probes."""

    def __init__(self, inspector: WorkInspector, interval_s: float, post: Callable[[ev.Event], None]) -> None:
        self._inspector = inspector
        self._interval_s = interval_s
        self._post = post
        self._runs: dict[ClientId, _ProgramRun] = {}
        self._tasks = Tasks(post)
        self._pending: dict[ClientId, str] = {}
        self._spans: dict[ProcessInstance, list[tuple[int, int]]] = {}
        self._probes = ProbePool("work", per_key=1)
        self._sweep: Sweep[_ProgramRun, Exception | None] = Sweep("areas", PATIENCE_S)

    def open_view(self, process: ProcessInstance, pidfd: int) -> WorkView:
        """Open the view of a living client, from any thread; then `follow` it. Raises GpuError."""
        return self._inspector.open(process, pidfd)

    def is_present(self, process: ProcessInstance, fds: Mapping[str, int]) -> bool:
        """Return whether kept descriptors belong to the program that a living process runs now."""
        return self._inspector.is_present(process, fds)

    def follow(
        self, clients: Sequence[ClientId], view: WorkView, charge: Charge | None = None
    ) -> Mapping[str, int]:
        """Follow a living process with these clients; return the descriptors to store with each lease.

        `charge`: the descriptors of the view, released when the view is closed.
        """
        self._tasks.spawn(self._follow_young(self._put(clients, view, charge)))
        return view.fds

    async def _follow_young(self, run: _ProgramRun) -> None:
        young = time.monotonic() + YOUNG_S
        while run.clients and run.watch is None:
            grown = time.monotonic() >= young
            if grown and run.view.located:
                return
            await self._probe(run)
            await asyncio.sleep(EMPTY_STEP_S if grown else YOUNG_STEP_S)

    def adopt(self, client: ClientId, fds: Mapping[str, int], charge: Charge | None = None) -> None:
        """Take over a view from the descriptor store; this object owns `fds` and `charge` from now on."""
        try:
            view = self._inspector.adopt(client.process, fds)
        except (GpuError, OSError, ValueError) as error:
            log.warning(
                "mpsd cannot see the end of a client's GPU work", client=str(client), reason=str(error)
            )
            for fd in fds.values():
                os.close(fd)
            if charge is not None:
                charge.release()
            return
        self._put([client], view, charge)

    def _put(self, clients: Sequence[ClientId], view: WorkView, charge: Charge | None) -> _ProgramRun:
        run = _ProgramRun(view, set(clients), charge=charge)
        for process in {client.process for client in clients}:
            self._begin_run(process)
        for client in clients:
            self.forget(client)
            self._runs[client] = run
            if remaining := self._spans.get(client.process):
                view.leave_out(remaining)
        return run

    def _begin_run(self, process: ProcessInstance) -> None:
        """Begin a program run. If earlier runs have ended it was an exec, and its pages are new ones."""
        ended = [x for c, x in self._runs.items() if c.process == process and x.watch is not None]
        for run in ended:
            run.replaced = True
        if ended:
            self._spans.pop(process, None)

    def leave_out(self, process: ProcessInstance, *, anew: bool, start: int, end: int) -> None:
        """Leave out the address range [start, end) of a context that the process has left.

        Semaphores there no longer tell of its work. `anew`: forget the earlier ranges. Ranges of a process
        that is not followed yet are kept for later.
        """
        runs = [run for client, run in self._runs.items() if client.process == process]
        views = {run.view for run in runs if not run.replaced}
        remaining = [] if anew else self._spans.get(process, [])
        if len(remaining) == MAX_SPANS:
            return
        if not views and process not in self._spans:
            self._limit_early_processes()
        self._spans[process] = remaining + [(start, end)] * (start < end)
        for view in views:
            view.leave_out(self._spans[process])

    def _limit_early_processes(self) -> None:
        """Make space for one more process that is not followed: the oldest of them goes."""
        followed = {client.process for client in self._runs}
        early = [process for process in self._spans if process not in followed]
        for process in early[: max(0, len(early) + 1 - MAX_EARLY_PROCESSES)]:
            del self._spans[process]

    def fds(self, client: ClientId) -> Mapping[str, int]:
        """Return the descriptors to store with a lease; none for a client that is not followed."""
        run = self._runs.get(client)
        return {} if run is None else run.view.fds

    def refresh(self, leased: Collection[ClientId]) -> None:
        """Probe the living clients again, all in one thread, except those with a probe under way."""
        runs = dict.fromkeys(run for c in leased if (run := self._runs.get(c)) is not None)
        self._tasks.spawn(self._refresh_all(runs))

    async def _refresh_all(self, runs: Collection[_ProgramRun]) -> None:
        # Each has a quota of its own: hanging probes must not block other clients of the same user.
        probes = {run: (id(run), partial(_refresh, run.view)) for run in runs if self._may_be_swept(run)}
        try:
            found = await self._sweep.run(probes)
        except GpuError as error:
            log.warning(NOT_RECORDED, reason=str(error))
            return
        for run in found:
            if not run.view.settled:
                self._tasks.spawn(self._settle(run))
        if bugs := [error for error in found.values() if error is not None]:
            raise ExceptionGroup("probes of living clients failed", bugs)

    async def _settle(self, run: _ProgramRun) -> None:
        """Probe again soon: a client that exits before two probes agree would keep its lease."""
        for _ in range(SETTLE_TRIES):
            await asyncio.sleep(YOUNG_STEP_S)
            if not run.clients or run.watch is not None or run.view.settled:
                return
            await self._probe(run)

    @staticmethod
    def _may_be_swept(run: _ProgramRun) -> bool:
        return bool(run.clients) and run.watch is None and (run.probe is None or run.probe.done())

    async def _probe(self, run: _ProgramRun) -> None:
        """Wait for the current probe of a program run, or start one; ignore queued probes of a sweep."""
        if run.probe is None or run.probe.done():
            run.probe = self._tasks.spawn(self._refresh_alone(run))
        await asyncio.wait({run.probe})

    async def _refresh_alone(self, run: _ProgramRun) -> None:
        """Probe alone in a thread: a process that changes its mappings all the time delays the probe."""
        if await self._sweep.wait_for_return(run):
            return
        try:
            await self._probes.run(id(run), run.view.refresh)
        except (OSError, GpuError) as error:
            log.warning(NOT_RECORDED, reason=str(error))

    def all_pending(self) -> Mapping[ProcessInstance, str]:
        """Return the work that each exited client still has on the GPU, for `status`."""
        found: dict[ProcessInstance, list[str]] = {}
        for client, text in self._pending.items():
            texts = found.setdefault(client.process, [])
            if text not in texts:
                texts.append(text)
        return {process: "; ".join(texts) for process, texts in found.items()}

    def watch(self, client: ClientId) -> None:
        """Probe until the work of the program run has ended, then report that for all its clients."""
        run = self._runs.get(client)
        if run is None:
            self._tasks.spawn(self._report_unseen({client}))
        elif run.watch is None:
            self._sweep.leave_out(run)
            run.watch = self._tasks.spawn(self._watch(run))

    def confirm(self, client: ClientId) -> None:
        """Post WorkRuns if the next probe of the exited client finds work; its watch reports the end."""
        run = self._runs.get(client)
        if run is None:
            self._tasks.spawn(self._report_unseen({client}))
        else:
            run.report_due = True

    def check_use(self, client: ClientId) -> bool:
        """Post NeverLaunched if this client has launched nothing. Return False if it is not followed."""
        run = self._runs.get(client)
        if run is not None:
            self._tasks.spawn(self._check_use(client, run))
        return run is not None

    async def _check_use(self, client: ClientId, run: _ProgramRun) -> None:
        while run.probe is not None and not run.probe.done():
            await asyncio.wait({run.probe})
        if client in run.clients and run.watch is None and not run.replaced:
            run.probe = self._tasks.spawn(self._report_unused(client, run))

    async def _report_unused(self, client: ClientId, run: _ProgramRun) -> None:
        """Look whether a client has launched work, in a thread as other probes."""
        try:
            launched = await self._probes.run(id(run), run.view.launched)
        except (OSError, GpuError) as error:
            log.warning(NOT_RECORDED, client=str(client), reason=str(error))
            return
        if launched is False:
            self._post(ev.NeverLaunched(client))

    async def _report_unseen(self, clients: Collection[ClientId]) -> None:
        """Report that there is no sign of the end: the lease stays until the domain has no living client."""
        for client in sorted(clients):
            self._pending[client] = "not visible on this machine"
            self._post(ev.WorkNotVisible(client))

    async def _watch(self, run: _ProgramRun) -> None:
        began = time.monotonic()
        report_due = run.report_due
        while (remaining := await self._remaining_work(run)) is not None:
            if not remaining:
                for client in sorted(run.clients):
                    self._pending.pop(client, None)
                    self._post(ev.WorkEnded(client, "its semaphores have been released"))
                return
            self._pending.update(dict.fromkeys(run.clients, remaining))
            if report_due:
                run.report_due = False
                self._post(ev.WorkRuns(tuple(sorted(run.clients)), remaining))
            await asyncio.sleep(min(max(self._interval_s, (time.monotonic() - began) / 20), SLOWEST_S))
            report_due = run.report_due
        await self._report_unseen(run.clients)

    async def _remaining_work(self, run: _ProgramRun) -> str | None:
        try:
            return await asyncio.to_thread(run.view.pending)
        except (OSError, GpuError) as error:
            client = min(run.clients, default=None)
            log.warning("cannot see the GPU work of an exited client", client=str(client), reason=str(error))
            return None

    def forget(self, client: ClientId) -> None:
        """Forget a client after its lease was released. The view closes with the last client of its run."""
        self._pending.pop(client, None)
        run = self._runs.pop(client, None)
        if run is None:
            return
        run.clients.discard(client)
        if not run.clients:
            self._tasks.spawn(self._close(run))
        if all(other.process != client.process for other in self._runs):
            self._spans.pop(client.process, None)

    async def _close(self, run: _ProgramRun) -> None:
        """Close the view once no probe is under way in a thread."""
        if run.watch is not None:
            run.watch.cancel()
        if under_way := {t for t in (run.watch, run.probe) if t is not None}:
            await asyncio.wait(under_way)
        await self._sweep.wait_for_return(run)
        await asyncio.to_thread(run.view.close)
        if run.charge is not None:
            run.charge.release()

    async def close(self) -> None:
        for client in tuple(self._runs):
            self.forget(client)
        await self._tasks.ended(CLOSE_S)
        self._probes.close()
        self._sweep.close()


def _refresh(view: WorkView) -> Exception | None:
    """Probe in the thread of the sweep. Returns unexpected errors, so that they end no other probe."""
    try:
        view.refresh()
    except (OSError, GpuError) as error:
        log.warning(NOT_RECORDED, reason=str(error))
    except Exception as error:
        return error
    return None
