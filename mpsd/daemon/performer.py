"""Execution of effects: one method per kind, called by the runtime in the order of core's list.

Nothing here waits: a slow effect becomes a task that ends in an event.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import structlog

from mpsd.base import audit
from mpsd.base.model import AddressKind, ClientId, GpuProcess, ProcessInstance
from mpsd.clients.attach import Attacher
from mpsd.clients.endofwork import WorkWatch
from mpsd.clients.guard import Guards
from mpsd.clients.identify import identify
from mpsd.clients.isolation import KernelIsolation
from mpsd.config.layout import Layout
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.failover.participants import FailoverRecord
from mpsd.core.failover.reports import ClientQueried
from mpsd.daemon.failover import FailoverService
from mpsd.gpu.nvidia.smqueries import HeldQueries
from mpsd.mps import servercalls
from mpsd.mps.domains import RunningDomains
from mpsd.os import processes
from mpsd.os.quietperiod import DeferredCalls
from mpsd.os.tasks import Tasks
from mpsd.records.bulletin import Bulletin, Moment
from mpsd.zones.ledgers import Description, Zones

log = structlog.get_logger("mpsd.performer")

INSPECT_DEADLINE_S = 1.0
# Delay [s] of a record's revisions. A moving program reports several times within milliseconds, and a
# participant that waits for its turn waits for the event loop.
REVISIONS_S = 0.05
# Time limit [s] for tasks at the end. A lease stays open while the thread of its guard hangs.
CLOSE_S = 2.0


@dataclass(slots=True)
class Adapters:
    """The adapters that effects use."""

    domains: RunningDomains
    attacher: Attacher
    guards: Guards
    work: WorkWatch
    zones: Zones
    layout: Layout
    bulletin: Bulletin
    failover: FailoverService
    isolation: KernelIsolation
    post: Callable[[ev.Event], None]
    gpu_processes: Callable[[str], Sequence[GpuProcess]]


class Performer:
    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self._loop = asyncio.get_running_loop()
        self._timers: dict[tuple[str, str], asyncio.TimerHandle] = {}
        self._tasks = Tasks(adapters.post)
        self._deferred = DeferredCalls(adapters.domains.quiet_period, self._tell_failed)
        self._revised: dict[int, tuple[FailoverRecord, Moment]] = {}
        self._writing: asyncio.TimerHandle | None = None
        self._held = HeldQueries()
        self._closed = False
        # Keyed by type. Any stands for the effect type that belongs to each key.
        self._methods: Mapping[type, Callable[[Any], None]] = {
            fx.StartDomain: lambda e: adapters.domains.start(e.domain, e.gpus, e.uid, server=e.server),
            fx.StopDomain: lambda e: adapters.domains.stop(e.domain, e.deadline_s),
            fx.SwitchPath: lambda e: adapters.layout.switch(e.slot, e.domain),
            fx.DropPath: lambda e: adapters.layout.drop(e.slot),
            fx.AskServer: lambda e: adapters.domains.ask(e.domain, clients=e.clients, patient=e.patient),
            fx.Attach: lambda e: adapters.attacher.attach(e.domain, e.process, e.space),
            fx.AuditEviction: lambda e: _audit("evict", e.client, e.outcome, e.grounds),
            fx.Terminate: self._terminate,
            fx.Kill: self._kill,
            fx.ProbeWork: lambda e: adapters.work.watch(e.client),
            fx.ConfirmWork: lambda e: adapters.work.confirm(e.client),
            fx.ProbeUse: lambda e: adapters.attacher.check_use(e.client),
            fx.ReleaseLease: self._release,
            fx.Forget: self._forget,
            fx.Inspect: self._inspect,
            fx.Identify: self._identify,
            fx.WatchServers: self._watch_servers,
            fx.HoldQueries: self._hold_queries,
            fx.ReleaseQueries: lambda e: self._held.release(e.domain),
            fx.Describe: self._describe,
            fx.Acknowledge: lambda e: adapters.isolation.acknowledge(e.space),
            fx.Freeze: self._freeze,
            fx.LookAtFrozen: self._look_at_frozen,
            fx.Record: self._record,
            fx.Welcome: adapters.failover.welcome,
            fx.OfferStandby: adapters.failover.offer,
            fx.StandDown: adapters.failover.stand_down,
            fx.Move: self._move,
            fx.Fenced: adapters.failover.fenced,
            fx.GrantTurn: adapters.failover.have_turn,
            fx.RequestMemory: adapters.failover.give,
            fx.GrantMemory: adapters.failover.have_memory,
            fx.LimitSnapshots: adapters.failover.limit_snapshots,
            fx.SwitchOff: adapters.failover.switch_off,
            fx.ExcludeWork: lambda e: adapters.work.leave_out(
                e.process, anew=e.anew, start=e.start, end=e.end
            ),
            fx.RecordFailover: self._record_failover,
            fx.Publish: self._publish,
            fx.Answer: lambda e: adapters.bulletin.answer(e.request, e.ok, e.data),
            fx.ArmTimer: self._arm,
        }

    def perform(self, effect: fx.Effect) -> None:
        self._methods[type(effect)](effect)

    def _terminate(self, effect: fx.Terminate) -> None:
        self._adapters.guards.abandon(effect.process)
        self._adapters.domains.terminate(effect.domain, effect.server, effect.process, effect.deadline_s)

    def _kill(self, effect: fx.Kill) -> None:
        outcome = self._adapters.attacher.kill(effect.client.process, effect.owner)
        _audit("kill", effect.client, outcome, effect.grounds)

    def _release(self, effect: fx.ReleaseLease) -> None:
        # The guard's thread uses the lease's descriptors, so they are closed after it.
        self._adapters.attacher.release(
            effect.client, self._adapters.guards.remove(effect.client), effect.uid
        )

    def _forget(self, effect: fx.Forget) -> None:
        self._adapters.attacher.forget(effect.process)

    def _inspect(self, effect: fx.Inspect) -> None:
        self._tasks.spawn(self._look_up(effect))

    async def _look_up(self, effect: fx.Inspect) -> None:
        found = AddressKind.UNKNOWN
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(INSPECT_DEADLINE_S):
                found = await asyncio.to_thread(processes.mapping_at, effect.address, effect.process)
        self._adapters.post(ev.Inspected(effect.fault, found))

    def _identify(self, effect: fx.Identify) -> None:
        self._tasks.spawn(self._identified(effect))

    async def _identified(self, effect: fx.Identify) -> None:
        self._adapters.post(await identify(effect, self._adapters.gpu_processes))

    def _watch_servers(self, effect: fx.WatchServers) -> None:
        self._tasks.spawn(self._find_server(effect))

    async def _find_server(self, effect: fx.WatchServers) -> None:
        domain = await servercalls.find(effect.servers)
        if domain is not None:
            self._adapters.post(ev.ServerAtFault(domain, effect.servers[domain], effect.gpu))

    def _hold_queries(self, effect: fx.HoldQueries) -> None:
        def seen(client: ProcessInstance) -> None:
            queried = ClientQueried(effect.domain, client)
            with contextlib.suppress(RuntimeError):  # The loop has ended.
                self._loop.call_soon_threadsafe(self._adapters.post, queried)

        self._held.hold(effect.domain, effect.clients, seen)

    def _describe(self, effect: fx.Describe) -> None:
        # Take the client's ledger now: the client may exit at any moment.
        lookup = self._adapters.zones.describe(effect.process, effect.address, effect.role)
        self._tasks.spawn(self._described(effect, lookup))

    async def _described(self, effect: fx.Describe, lookup: Coroutine[Any, Any, Description]) -> None:
        found = await lookup
        self._adapters.post(ev.HitDescribed(effect.fault, found.nearby, found.kernel))

    def _freeze(self, effect: fx.Freeze) -> None:
        outcome = self._adapters.attacher.freeze(effect.client.process, effect.owner)
        _audit("freeze", effect.client, outcome, effect.grounds)

    def _look_at_frozen(self, effect: fx.LookAtFrozen) -> None:
        self._adapters.post(ev.LivenessSeen(effect.process, processes.liveness(effect.process)))

    def _publish(self, effect: fx.Publish) -> None:
        owners = effect.others | (set() if effect.owner is None else {effect.owner})
        moment = Moment.now()
        self._deferred.do(lambda: self._adapters.bulletin.publish(effect.kind, owners, effect.data, moment))

    def _record(self, effect: fx.Record) -> None:
        moment = Moment.now()
        self._deferred.do(lambda: self._adapters.bulletin.record(effect.record, moment))

    def _move(self, effect: fx.Move) -> None:
        self._adapters.domains.quiet_period.begin()
        self._adapters.failover.move(effect)

    def _record_failover(self, effect: fx.RecordFailover) -> None:
        """Write a new record at once, and of its revisions the newest one after REVISIONS_S."""
        record, moment = effect.record, Moment.now()
        if record.revision == 1 or self._closed:
            self._deferred.do(lambda: self._adapters.bulletin.failover(record, moment))
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
            self._deferred.do(partial(self._adapters.bulletin.failover, record, moment))

    def tell(self) -> None:
        """Write and publish all queued records now, while there are still subscribers."""
        self._write_revisions()
        self._deferred.tell()

    def _tell_failed(self, error: Exception) -> None:
        """Count a publication that failed, as any effect that fails. Later ones are still made."""
        log.error("a record or event was not written or published", error=repr(error), exc_info=error)
        self._adapters.post(ev.Counted({"effects_failed": 1}))

    def _arm(self, effect: fx.ArmTimer) -> None:
        key = (effect.kind, effect.subject)
        if key in self._timers:
            self._timers.pop(key).cancel()
        self._timers[key] = self._loop.call_later(effect.delay_s, self._fire, key)

    def _fire(self, key: tuple[str, str]) -> None:
        self._timers.pop(key, None)
        self._adapters.post(ev.TimerFired(*key))

    async def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._held.close()
        # From now on revisions are written at once.
        self._closed = True
        self._write_revisions()
        self._deferred.close()
        await self._tasks.ended(CLOSE_S)


def _audit(action: str, client: ClientId, outcome: str, grounds: fx.Grounds | None) -> None:
    """Write the line of the audit log about an act of force on a client."""
    process = client.process
    evidence = {} if grounds is None else {f.name: getattr(grounds, f.name) for f in fields(grounds)}
    requester = evidence.pop("requester", None)
    audit.record(
        action,
        outcome,
        requester,
        pid=process.pid,
        start_ticks=process.start_ticks,
        domain=client.domain,
        **evidence,
    )
