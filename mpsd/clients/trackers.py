"""The event queues of all clients on the loop: fatal faults for core, and hits of guard zones.

A program that uses managed memory causes thousands of serviced faults a second. A queue with only serviced
faults is read at most every few milliseconds. Events that the driver drops meanwhile are counted and shown;
they are never a hit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from mpsd.base.errors import GpuError
from mpsd.base.model import ClientId, ProcessInstance, UvmEvent
from mpsd.core import events as ev
from mpsd.gpu.base import Tracker
from mpsd.os import processes
from mpsd.zones.ledgers import Hit, Zones

log = structlog.get_logger("mpsd.trackers")

EVENTS_PER_DRAIN = 64
DRAIN_PAUSE_S = 0.002
SETTLES_S = 0.001
"""By this time, a program that waits for its kernels has usually learnt of the end of the faulting one."""


@dataclass(slots=True, eq=False)
class _Queue:
    """The event queue of one client. `serviced`: it reports serviced faults, too.

    `dropped`: the driver's last count of dropped events.
    """

    client: ClientId
    tracker: Tracker
    serviced: bool = False
    dropped: int = 0
    rest: asyncio.TimerHandle | None = None
    lost: bool = False


def _holds_nothing(process: ProcessInstance, addresses: Sequence[int]) -> Sequence[bool]:
    """The answer without a vault."""
    return [False] * len(addresses)


class Trackers:
    """All queues. Lives on the event loop. `zones`: None if no client can have any.

    `holds`: whether the vault has memory of this process at each of these addresses.
    """

    def __init__(
        self,
        post: Callable[[ev.Event], None],
        zones: Zones | None = None,
        holds: Callable[[ProcessInstance, Sequence[int]], Sequence[bool]] = _holds_nothing,
    ) -> None:
        self._post = post
        self._zones = zones
        self._holds = holds
        self._loop = asyncio.get_running_loop()
        self._queues: dict[ClientId, _Queue] = {}

    def add(self, client: ClientId, tracker: Tracker) -> None:
        """Read this queue from now on."""
        queue = self._queues[client] = _Queue(client, tracker)
        self._loop.add_reader(tracker.fileno(), self._drain, queue)
        if self._zones is not None and self._zones.knows(client.process):
            self.report(client.process)

    def remove(self, client: ClientId) -> None:
        """Stop reading a queue; call it before the tracker is closed. Idempotent."""
        queue = self._queues.pop(client, None)
        if queue is None:
            return
        if queue.rest is not None:
            queue.rest.cancel()
        elif not queue.lost:
            self._loop.remove_reader(queue.tracker.fileno())

    def report(self, process: ProcessInstance) -> bool:
        """Let the queues of this process report serviced faults, too. Returns False if none of them does."""
        own = [q for q in self._queues.values() if q.client.process == process and not q.lost]
        for queue in own:
            if queue.serviced:
                continue
            try:
                queue.tracker.report_serviced()
                queue.serviced = True
            except (GpuError, OSError) as error:
                log.error("cannot enable reports of guard zones", client=str(queue.client), reason=str(error))
                self._post(ev.Counted({"zones_unreported": 1}))
        return any(q.serviced for q in own)

    def _drain(self, queue: _Queue) -> None:
        try:
            batch = queue.tracker.drain()
        except GpuError as error:
            # The descriptor would stay readable without end.
            self._loop.remove_reader(queue.tracker.fileno())
            queue.lost = True
            log.error(
                "cannot see the faults of a client any more", client=str(queue.client), reason=str(error)
            )
            self._post(ev.Counted({"trackers_lost": 1}))
            return
        hit = self._zones.hits(queue.client.process, batch.events) if self._zones is not None else None
        if hit is not None:
            self._hit(queue.client, hit)
        self._fatal(queue, [e for e in batch.events if e.fatal])
        if batch.dropped > queue.dropped:
            self._post(ev.Counted({"events_dropped": batch.dropped - queue.dropped}))
            queue.dropped = batch.dropped
        if batch.events and not any(e.fatal for e in batch.events) and queue.client in self._queues:
            self._rest(queue)

    def _fatal(self, queue: _Queue, fatal: list[UvmEvent]) -> None:
        handled = fatal[:EVENTS_PER_DRAIN]
        held = self._holds(queue.client.process, [event.address for event in handled]) if handled else ()
        for event, own in zip(handled, held, strict=True):
            age_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW) - event.timestamp_ns
            self._post(ev.UvmFatal(queue.client, event, own, max(0.0, age_ns / 1e9)))
        if len(fatal) > EVENTS_PER_DRAIN:
            self._post(ev.Counted({"events_dropped": len(fatal) - EVENTS_PER_DRAIN}))

    def _rest(self, queue: _Queue) -> None:
        self._loop.remove_reader(queue.tracker.fileno())
        queue.rest = self._loop.call_later(DRAIN_PAUSE_S, self._continue, queue)

    def _continue(self, queue: _Queue) -> None:
        queue.rest = None
        self._loop.add_reader(queue.tracker.fileno(), self._drain, queue)

    def _hit(self, client: ClientId, hit: Hit) -> None:
        if self._is_idle(client):
            self._tell(client, hit)
        else:
            self._loop.call_later(SETTLES_S, self._tell, client, hit)

    def _is_idle(self, client: ClientId) -> bool:
        return self._zones is not None and self._zones.idle(client.process)

    def _tell(self, client: ClientId, hit: Hit) -> None:
        liveness, idle = processes.liveness(client.process), self._is_idle(client)
        self._post(ev.GuardHit(client, hit.event, hit.role, hit.count, liveness, idle))
