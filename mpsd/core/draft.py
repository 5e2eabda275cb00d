"""A decision under construction: a state that is replaced step by step, and the effects so far.

Handlers change a Draft; `engine.decide` returns the finished state. A draft does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from mpsd.base.model import ClientId, ProcessInstance
from mpsd.core.effects import Effect, Publish
from mpsd.core.failover.participants import FailoverRecord, Outcome, Participant
from mpsd.core.faults.records import FaultRecord
from mpsd.core.state import Client, Departed, Domain, EndedDomain, Slot, State

K = TypeVar("K", str, ClientId, ProcessInstance)
V = TypeVar("V")

DEPARTED_KEPT = 256
ENDED_KEPT = 16
OPEN_FAULTS_KEPT = 64
FAILOVERS_KEPT, FAILOVERS_MOST = 16, 256


class Draft:
    """`state` is a complete State at any time, although not the final one. `now`: monotonic seconds."""

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
        """Return the users with living clients in a domain."""
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

    def put_lost_gpu(self, gpu: str, why: str) -> None:
        """Note that a GPU does not work any more. The first reason stays."""
        if gpu not in self.state.lost_gpus:
            self.state = replace(self.state, lost_gpus=_with(self.state.lost_gpus, gpu, why))

    def drop_domain(self, name: str) -> None:
        """Remove a domain, and remember its MPS processes for signs that come late."""
        domain = self.state.domains[name]
        processes = (domain.control, domain.server, domain.former_server)
        entry = EndedDomain(name, frozenset(p.pid for p in processes if p is not None), self.now)
        self.state = replace(self.state, ended=(*self.state.ended, entry)[-ENDED_KEPT:])
        self.state = replace(self.state, domains=_without(self.state.domains, name))

    def put_client(self, client: Client) -> Client:
        self.state = replace(self.state, clients=_with(self.state.clients, client.id, client))
        return client

    def drop_client(self, client: Client) -> None:
        """Remove a client, and remember for a while that its process was a client."""
        waited = client.waited or client.unused or self.state.is_standby_context(client)
        member = self.state.is_member(client)
        entry = Departed(client.id, client.facts, self.now, client.leased, waited, member, client.absent)
        departed = (*self.state.departed, entry)[-DEPARTED_KEPT:]
        self.remove_client(client)
        self.state = replace(self.state, departed=departed)

    def remove_client(self, client: Client) -> None:
        """Remove a client that was none: only a log line named its process."""
        self.state = replace(self.state, clients=_without(self.state.clients, client.id))

    def put_fault(self, record: FaultRecord) -> FaultRecord:
        others = tuple(r for r in self.state.open_faults if r.id != record.id)
        retained = tuple(sorted((*others, record), key=lambda r: r.id))[-OPEN_FAULTS_KEPT:]
        self.state = replace(self.state, open_faults=retained)
        return record

    def put_participant(self, participant: Participant) -> Participant:
        before = self.state.members.get(participant.process)
        if before is None or before.persistent_fields != participant.persistent_fields:
            self.state = replace(self.state, homes_changed=self.state.homes_changed + 1)
        self.state = replace(self.state, members=_with(self.state.members, participant.process, participant))
        return participant

    def drop_participant(self, process: ProcessInstance) -> None:
        members, changed = _without(self.state.members, process), self.state.homes_changed + 1
        self.state = replace(self.state, members=members, homes_changed=changed)

    def put_failover(self, record: FailoverRecord) -> FailoverRecord:
        others = tuple(r for r in self.state.failovers if r.id != record.id)
        ordered = sorted((*others, record), key=lambda r: r.id)[-FAILOVERS_MOST:]
        old = ordered[:-FAILOVERS_KEPT]
        retained = (*(r for r in old if self._is_wanted(r)), *ordered[-FAILOVERS_KEPT:])
        self.state = replace(self.state, failovers=retained)
        return record

    def _is_wanted(self, record: FailoverRecord) -> bool:
        """Return whether a participant's report or a late sign may still change this record."""
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
