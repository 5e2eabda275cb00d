"""One decision in the making: a state that is replaced piece by piece, and the effects so far.

Handlers take a Draft; `engine.decide` hands out the finished state. Nothing here knows the world.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from mpsd.core.effects import Effect, Publish
from mpsd.core.records import FaultRecord
from mpsd.core.standby import FailoverRecord, Member, Outcome
from mpsd.core.state import Client, Departed, Domain, Slot, State
from mpsd.model import ClientId, ProcessInstance

K = TypeVar("K", str, ClientId, ProcessInstance)
V = TypeVar("V")

DEPARTED_KEPT = 256
OPEN_FAULTS_KEPT = 64
FAILOVERS_KEPT, FAILOVERS_MOST = 16, 256


class Draft:
    """`state` always is a whole, if unfinished, State; `now` is monotonic seconds."""

    def __init__(self, state: State, now: float) -> None:
        self.state = state
        self.now = now
        self.effects: list[Effect] = []

    def emit(self, *effects: Effect) -> None:
        self.effects.extend(effects)

    def publish(
        self, kind: str, owner: int | None = None, others: frozenset[int] = frozenset(), **data: object
    ) -> None:
        self.emit(Publish(kind, owner, MappingProxyType(data), others))

    def users_of(self, domain: str) -> frozenset[int]:
        """The users who have living clients in a domain."""
        return frozenset(c.facts.uid for c in self.state.living_of(domain))

    def count(self, name: str, by: int = 1) -> None:
        self.state = self.state.counted(name, by)

    def put_slot(self, slot: Slot) -> Slot:
        self.state = replace(self.state, slots=_with(self.state.slots, slot.id, slot))
        return slot

    def drop_slot(self, name: str) -> None:
        self.state = replace(self.state, slots=_without(self.state.slots, name))

    def put_domain(self, domain: Domain) -> Domain:
        self.state = replace(self.state, domains=_with(self.state.domains, domain.id, domain))
        return domain

    def drop_domain(self, name: str) -> None:
        self.state = replace(self.state, domains=_without(self.state.domains, name))

    def put_client(self, client: Client) -> Client:
        self.state = replace(self.state, clients=_with(self.state.clients, client.id, client))
        return client

    def drop_client(self, client: Client) -> None:
        """Forget a client, but remember for a while that its process was one."""
        waited = client.waited or self.state.is_in_waiting(client)
        entry = Departed(client.id, client.facts, self.now, client.leased, waited)
        departed = (*self.state.departed, entry)[-DEPARTED_KEPT:]
        clients = _without(self.state.clients, client.id)
        self.state = replace(self.state, clients=clients, departed=departed)

    def put_fault(self, record: FaultRecord) -> FaultRecord:
        others = tuple(r for r in self.state.open_faults if r.id != record.id)
        kept = tuple(sorted((*others, record), key=lambda r: r.id))[-OPEN_FAULTS_KEPT:]
        self.state = replace(self.state, open_faults=kept)
        return record

    def put_member(self, member: Member) -> Member:
        before = self.state.members.get(member.process)
        if before is None or before.lasting != member.lasting:
            self.state = replace(self.state, homes_changed=self.state.homes_changed + 1)
        self.state = replace(self.state, members=_with(self.state.members, member.process, member))
        return member

    def drop_member(self, process: ProcessInstance) -> None:
        members, changed = _without(self.state.members, process), self.state.homes_changed + 1
        self.state = replace(self.state, members=members, homes_changed=changed)

    def put_failover(self, record: FailoverRecord) -> FailoverRecord:
        others = tuple(r for r in self.state.failovers if r.id != record.id)
        ordered = sorted((*others, record), key=lambda r: r.id)[-FAILOVERS_MOST:]
        old = ordered[:-FAILOVERS_KEPT]
        kept = (*(r for r in old if self._is_wanted(r)), *ordered[-FAILOVERS_KEPT:])
        self.state = replace(self.state, failovers=kept)
        return record

    def _is_wanted(self, record: FailoverRecord) -> bool:
        """Somebody's word is still to come, or a late sign of what it tells of."""
        waits = any(f.outcome is Outcome.TOLD for f in record.fates)
        return waits or self.now - record.at <= self.state.policy.evidence_window_s

    def fault(self, number: int | None) -> FaultRecord | None:
        return next((r for r in self.state.open_faults if r.id == number), None)


def _with(table: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    changed = dict(table)
    changed[key] = value
    return MappingProxyType(changed)


def _without(table: Mapping[K, V], key: K) -> Mapping[K, V]:
    return MappingProxyType({k: v for k, v in table.items() if k != key})
