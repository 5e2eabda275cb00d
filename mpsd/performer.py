"""Carries out effects: one method for each kind, called by the runtime in the order core gave them.

Nothing here waits: what takes time becomes a task that ends in an event.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from mpsd import procs, serverwatch
from mpsd.attacher import Attacher
from mpsd.bulletin import Bulletin, Moment
from mpsd.calm import Aside
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.standby import FailoverRecord
from mpsd.failover.desk import FailoverDesk
from mpsd.guard import Guards
from mpsd.host import Hosts
from mpsd.isolation import IsolationDesk
from mpsd.layout import Layout
from mpsd.model import LiesThere
from mpsd.tasks import Tasks
from mpsd.workwatch import WorkWatch
from mpsd.zones.book import Description, Zones

log = structlog.get_logger("mpsd.performer")

INSPECT_DEADLINE_S = 1.0
# Programs that move say several things within milliseconds, and who waits for a turn waits for the loop.
REVISIONS_S = 0.05
# A lease is not closed while the thread of its guard hangs.
CLOSE_S = 2.0


@dataclass(slots=True)
class Hands:
    """Everything an effect may touch."""

    hosts: Hosts
    attacher: Attacher
    guards: Guards
    work: WorkWatch
    zones: Zones
    layout: Layout
    bulletin: Bulletin
    failover: FailoverDesk
    isolation: IsolationDesk
    post: Callable[[ev.Event], None]


class Performer:
    def __init__(self, hands: Hands) -> None:
        self._hands = hands
        self._loop = asyncio.get_running_loop()
        self._timers: dict[tuple[str, str], asyncio.TimerHandle] = {}
        self._tasks = Tasks(hands.post)
        self._aside = Aside(hands.hosts.calm, self._untold)
        self._revised: dict[int, tuple[FailoverRecord, Moment]] = {}
        self._writing: asyncio.TimerHandle | None = None
        self._closed = False
        # Keyed by type; Any stands for the pairing of each key with its method's argument.
        self._methods: Mapping[type, Callable[[Any], None]] = {
            fx.StartDomain: lambda e: hands.hosts.start(e.domain, e.gpus, e.uid),
            fx.StopDomain: lambda e: hands.hosts.stop(e.domain, e.deadline_s),
            fx.SwitchPath: lambda e: hands.layout.switch(e.slot, e.domain),
            fx.DropPath: lambda e: hands.layout.drop(e.slot),
            fx.AskServer: lambda e: hands.hosts.ask(e.domain),
            fx.Attach: lambda e: hands.attacher.attach(e.domain, e.process, e.space),
            fx.Terminate: self._terminate,
            fx.Kill: self._kill,
            fx.ProbeWork: lambda e: hands.work.watch(e.client),
            fx.ConfirmWork: lambda e: hands.work.confirm(e.client),
            fx.ReleaseLease: self._release,
            fx.Forget: self._forget,
            fx.Inspect: self._inspect,
            fx.WatchServers: self._watch_servers,
            fx.Describe: self._describe,
            fx.Acknowledge: lambda e: hands.isolation.acknowledge(e.space),
            fx.Freeze: self._freeze,
            fx.LookAtFrozen: self._look_at_frozen,
            fx.Record: self._record,
            fx.Welcome: hands.failover.welcome,
            fx.OfferStandby: hands.failover.offer,
            fx.StandDown: hands.failover.stand_down,
            fx.Move: self._move,
            fx.Fenced: hands.failover.fenced,
            fx.HaveTurn: hands.failover.have_turn,
            fx.GiveMemory: hands.failover.give,
            fx.HaveMemory: hands.failover.have_memory,
            fx.LeaveOut: lambda e: hands.work.leave_out(e.process, anew=e.anew, start=e.start, end=e.end),
            fx.RecordFailover: self._record_failover,
            fx.Publish: self._publish,
            fx.Answer: lambda e: hands.bulletin.answer(e.request, e.ok, e.data),
            fx.ArmTimer: self._arm,
        }

    def perform(self, effect: fx.Effect) -> None:
        self._methods[type(effect)](effect)

    def _terminate(self, effect: fx.Terminate) -> None:
        self._hands.guards.abandon(effect.process)
        self._hands.hosts.terminate(effect.domain, effect.server, effect.process, effect.deadline_s)

    def _kill(self, effect: fx.Kill) -> None:
        process = effect.client.process
        log.info("SIGKILL", pid=process.pid, domain=effect.client.domain, why=effect.why)
        self._hands.attacher.kill(process, effect.owner)

    def _release(self, effect: fx.ReleaseLease) -> None:
        # The guard's thread uses the lease's descriptors: they are closed when it is done with them.
        self._hands.attacher.release(effect.client, self._hands.guards.remove(effect.client), effect.uid)

    def _forget(self, effect: fx.Forget) -> None:
        self._hands.attacher.forget(effect.process)

    def _inspect(self, effect: fx.Inspect) -> None:
        self._tasks.spawn(self._look_up(effect))

    async def _look_up(self, effect: fx.Inspect) -> None:
        found = LiesThere.UNKNOWN
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(INSPECT_DEADLINE_S):
                found = await asyncio.to_thread(procs.where, effect.address, effect.process)
        self._hands.post(ev.Inspected(effect.fault, found))

    def _watch_servers(self, effect: fx.WatchServers) -> None:
        self._tasks.spawn(self._find_server(effect))

    async def _find_server(self, effect: fx.WatchServers) -> None:
        domain = await serverwatch.find(effect.servers)
        if domain is not None:
            self._hands.post(ev.ServerAtFault(domain, effect.servers[domain], effect.gpu))

    def _describe(self, effect: fx.Describe) -> None:
        # Its ledger is taken hold of now: the client may be gone in a moment.
        looking = self._hands.zones.describe(effect.process, effect.address, effect.role)
        self._tasks.spawn(self._described(effect, looking))

    async def _described(self, effect: fx.Describe, looking: Coroutine[Any, Any, Description]) -> None:
        found = await looking
        self._hands.post(ev.HitDescribed(effect.fault, found.nearby, found.kernel))

    def _freeze(self, effect: fx.Freeze) -> None:
        process = effect.client.process
        log.info("SIGSTOP", pid=process.pid, domain=effect.client.domain, why="a guard zone was hit")
        self._hands.attacher.freeze(process, effect.owner)

    def _look_at_frozen(self, effect: fx.LookAtFrozen) -> None:
        self._hands.post(ev.LivenessSeen(effect.process, procs.liveness(effect.process)))

    def _publish(self, effect: fx.Publish) -> None:
        owners = effect.others | (set() if effect.owner is None else {effect.owner})
        moment = Moment.now()
        self._aside.do(lambda: self._hands.bulletin.publish(effect.kind, owners, effect.data, moment))

    def _record(self, effect: fx.Record) -> None:
        moment = Moment.now()
        self._aside.do(lambda: self._hands.bulletin.record(effect.record, moment))

    def _move(self, effect: fx.Move) -> None:
        self._hands.hosts.calm.begin()
        self._hands.failover.move(effect)

    def _record_failover(self, effect: fx.RecordFailover) -> None:
        """A new record, and of its revisions the newest one, in a moment."""
        record, moment = effect.record, Moment.now()
        if record.revision == 1 or self._closed:
            self._aside.do(lambda: self._hands.bulletin.failover(record, moment))
            return
        self._revised[record.id] = record, moment
        if self._writing is None:
            self._writing = self._loop.call_later(REVISIONS_S, self._write_revisions)

    def _write_revisions(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
        self._writing = None
        revised, self._revised = self._revised, {}
        for record, moment in revised.values():
            self._aside.do(partial(self._hands.bulletin.failover, record, moment))

    def tell(self) -> None:
        """All that waits to be told, now: while there is somebody to hear it."""
        self._write_revisions()
        self._aside.tell()

    def _untold(self, error: Exception) -> None:
        """As of any effect: what comes after it is told all the same."""
        log.error("not told, or not written", error=repr(error), exc_info=error)
        self._hands.post(ev.Counted({"effects_failed": 1}))

    def _arm(self, effect: fx.ArmTimer) -> None:
        key = (effect.kind, effect.subject)
        if key in self._timers:
            self._timers.pop(key).cancel()
        self._timers[key] = self._loop.call_later(effect.delay_s, self._fire, key)

    def _fire(self, key: tuple[str, str]) -> None:
        self._timers.pop(key, None)
        self._hands.post(ev.TimerFired(*key))

    async def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        # What is still said is written at once.
        self._closed = True
        self._write_revisions()
        self._aside.close()
        await self._tasks.ended(CLOSE_S)
