"""Handlers for guard hits: stray accesses absorbed by a guard zone, or by the kernel module (absorbed.py).

The offender is certain: the event came on the tracker of its own address space, with an address in a zone
that its own process laid. The policy is carried out before the record is written. Later facts, such as the
nearby allocation and the outcome, arrive as revisions of the record.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpsd.base.model import Access, AddressKind, Confidence, Liveness, ProcessInstance, ZonePolicy, ZoneRole
from mpsd.core import events as ev
from mpsd.core import proof, victims
from mpsd.core.clients import begin_eviction
from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, Describe, Freeze, LookAtFrozen
from mpsd.core.faults import attribution as at
from mpsd.core.faults import hitrecords, taxonomy
from mpsd.core.faults.records import Evidence, FaultRecord, HitFacts, HitOutcome, Source
from mpsd.core.killing import grounds_of
from mpsd.core.state import POLICY, Client, ClientState, Eviction

FAULT_CLASS = "guard-hit"
THAW_S = 1.0
_GOING = (ClientState.TERMINATING, ClientState.KILLING)
SPACES_COUNTED = 16


def policy_of(draft: Draft, client: Client) -> ZonePolicy:
    return client.zone_policy or draft.state.policy.zone_policy


@dataclass(frozen=True, slots=True)
class AbsorbedAccess:
    """An absorbed access: the policy for its client, and the class and the sign for its record.

    `space`: for an access absorbed by the kernel module, its address space and the count of faults there.
    """

    hit: ev.GuardHit
    policy: ZonePolicy
    fault_class: str
    sign: Evidence
    reason: str
    space: tuple[int, int] | None = None


def on_guard_hit(draft: Draft, event: ev.GuardHit) -> None:
    client, seen = draft.state.clients.get(event.client), event.event
    if client is None or seen.fatal or seen.access is Access.PREFETCH:
        draft.count("guard_hits_of_nobody")
        return
    draft.count("guard_hits", event.count)
    text = f"{seen.access.value} at {seen.address:#x}, serviced, in a guard zone of its own ({event.role})"
    sign = Evidence(Source.UVM, draft.now, text)
    policy = policy_of(draft, client)
    absorbed(draft, client, AbsorbedAccess(event, policy, FAULT_CLASS, sign, "a guard zone was hit"))


def absorbed(draft: Draft, client: Client, access: AbsorbedAccess) -> HitOutcome:
    """Carry out the policy for this client, record the hit, and return the outcome."""
    event, policy = access.hit, access.policy
    outcome, why = _act(draft, client, access) if client.living else (HitOutcome.ENDED, "")
    process = client.id.process
    # Exited clients too: their kernels run on, and their accesses are reported a moment later.
    record = record_of(draft, client, event.role)
    if record is not None:
        _repeat(draft, _counted(record, access), event, policy, outcome, why)
    elif _is_untold(draft, client):
        # Its record was dropped for newer ones: only count.
        draft.count("guard_hits_untold", event.count)
    else:
        spaces = () if access.space is None else (access.space,)
        facts = HitFacts(event.role, policy, draft.now, outcome, event.count, why=why, spaces=spaces)
        _begin(draft, client, access, facts)
    if client.living:
        hitrecords.count_accesses(draft, process, event.count, recorded=record is None)
    return outcome


def _is_untold(draft: Draft, client: Client) -> bool:
    """Return whether hits of this client get no further record."""
    process = client.id.process
    found = hitrecords.open_record(draft.state, process, draft.now, living=client.living)
    return found is None and hitrecords.is_suppressed(draft.state, process, draft.now)


def record_of(draft: Draft, client: Client, role: ZoneRole) -> FaultRecord | None:
    """Return the record that this hit belongs to.

    A hit of the kernel module never joins one of a guard zone, after which a program may continue.
    """
    found = hitrecords.open_record(draft.state, client.id.process, draft.now, living=client.living)
    of_zone = found is not None and found.hit is not None and found.hit.role is not ZoneRole.SINK
    return None if of_zone and role is ZoneRole.SINK else found


def _counted(record: FaultRecord, access: AbsorbedAccess) -> FaultRecord:
    if access.space is None or record.hit is None:
        return record
    others = tuple(s for s in record.hit.spaces if s[0] != access.space[0])
    spaces = (*others, access.space)[-SPACES_COUNTED:]
    return replace(record, hit=replace(record.hit, spaces=spaces))


def _repeat(
    draft: Draft, record: FaultRecord, event: ev.GuardHit, policy: ZonePolicy, outcome: HitOutcome, why: str
) -> None:
    assert record.hit is not None
    before = record.hit
    facts = replace(before, count=before.count + event.count, last=draft.now)
    if outcome in (before.outcome, HitOutcome.ENDED):
        hitrecords.write_count_later(draft, replace(record, hit=facts))
    else:
        # The policy has changed, or its obstacle has gone.
        hitrecords.write(draft, replace(record, hit=replace(facts, policy=policy, outcome=outcome, why=why)))


def _begin(draft: Draft, client: Client, access: AbsorbedAccess, facts: HitFacts) -> None:
    number, event, seen = draft.state.next_fault, access.hit, access.hit.event
    draft.state = replace(draft.state, next_fault=number + 1)
    draft.count("guard_hit_records")
    null = event.role is ZoneRole.NULL_PAGE or seen.address < taxonomy.NULL_PAGE_BYTES
    record = FaultRecord(
        number,
        draft.now,
        client.id.domain,
        draft.state.domains[client.id.domain].gpus,
        access.fault_class,
        offender=at.party(client),
        confidence=Confidence.CERTAIN,
        address=seen.address,
        access=seen.access,
        fault_type=at.fault_type_name(seen),
        lies_there=AddressKind.NULL_PAGE if null else None,
        source_ns=seen.timestamp_ns,
        evidence=(access.sign,),
        hit=facts,
    )
    if facts.outcome is HitOutcome.ENDED:
        record = replace(record, hit=replace(facts, alone=hitrecords.is_domain_unharmed(draft, record)))
    draft.emit(Describe(number, client.id.process, seen.address, event.role))
    hitrecords.write(draft, record)


# -- reactions -------------------------------------------------------------------------------------------


def _act(draft: Draft, client: Client, access: AbsorbedAccess) -> tuple[HitOutcome, str]:
    """Carry out the policy. Return the outcome, and the reason if the outcome is less than the policy."""
    policy, event = access.policy, access.hit
    process = client.id.process
    living = [c for c in draft.state.spaces_of(process) if c.living]
    if any(c.state in _GOING and not _was_refused(c, policy) for c in living):
        return HitOutcome.EVICTING, ""
    if event.role is ZoneRole.SINK and not all(c.leased for c in living):
        # Work of a client that dies without a lease faults without an owner, which ends all clients.
        return HitOutcome.WITHHELD, "mpsd has no lease of it: the kernel module kills it and holds its work"
    if policy is ZonePolicy.ABSORB:
        frozen = any(c.frozen is not None for c in living)
        return (HitOutcome.FROZEN if frozen else HitOutcome.ABSORBED), ""
    believed = [c for c in living if proof.proven(draft.state.domains[c.id.domain], c, asked=False)]
    if not believed:
        draft.count("guard_hits_unproven")
        return HitOutcome.WITHHELD, "another user owns the process: only mpsd-ctl kill may end it"
    # A faulted domain has nothing to inspect, and a client that is stopped there would stay forever.
    lost = any(victims.work_is_lost(draft.state.domains[c.id.domain]) for c in living)
    if policy is ZonePolicy.EVICT or lost:
        fault, fault_class = _number(draft, client, event), access.fault_class
        eviction = Eviction(POLICY, access.reason, draft.now, fault=fault, fault_class=fault_class)
        begin_eviction(draft, believed, eviction, event.liveness, idle=event.idle)
        return HitOutcome.EVICTING, ""
    cause = Eviction(
        POLICY,
        access.reason,
        draft.now,
        fault=_number(draft, client, event),
        fault_class=access.fault_class,
    )
    _freeze(draft, believed[0], event.liveness, cause)
    return HitOutcome.FROZEN, ""


def _number(draft: Draft, client: Client, event: ev.GuardHit) -> int | None:
    """Return the number of the record that this hit has or will get; None if it gets none."""
    record = record_of(draft, client, event.role)
    if record is not None:
        return record.id
    return None if _is_untold(draft, client) else draft.state.next_fault


def _was_refused(client: Client, policy: ZonePolicy) -> bool:
    """Return whether its SIGKILL was refused, so that no eviction is under way.

    Only with policy EVICT: stopping such a client instead would not help.
    """
    refused = client.eviction is not None and client.eviction.killed is None
    return policy is ZonePolicy.EVICT and client.state is ClientState.KILLING and refused


def _freeze(draft: Draft, client: Client, liveness: Liveness, cause: Eviction) -> None:
    """Stop the client unless it is stopped.

    `liveness` may have been read before an earlier signal arrived. `cause`: for the audit log.
    """
    since = client.frozen
    goes_on = liveness is Liveness.RUNNING and since is not None and draft.now - since > THAW_S / 2
    if since is not None and not goes_on:
        return
    _set_frozen(draft, client.id.process, draft.now)
    owner = proof.owner_needed(draft.state.domains[client.id.domain], client, asked=False)
    draft.count("clients_frozen")
    draft.emit(Freeze(client.id, owner, grounds_of(draft, client, cause)))
    _watch_for_thaw(draft, client.id.process)
    draft.publish("client-frozen", client.facts.uid, domain=client.id.domain, pid=client.id.process.pid)


def _set_frozen(draft: Draft, process: ProcessInstance, since: float | None) -> list[Client]:
    living = [c for c in draft.state.spaces_of(process) if c.living]
    return [draft.put_client(replace(c, frozen=since)) for c in living]


def _watch_for_thaw(draft: Draft, process: ProcessInstance) -> None:
    draft.emit(ArmTimer("thaw", str(process), THAW_S))


def _frozen(draft: Draft, process: str) -> list[Client]:
    return [c for c in draft.state.clients.values() if str(c.id.process) == process and c.frozen is not None]


def on_thaw_timer(draft: Draft, subject: str) -> None:
    for client in _frozen(draft, subject)[:1]:
        draft.emit(LookAtFrozen(client.id.process))


def on_liveness_seen(draft: Draft, event: ev.LivenessSeen) -> None:
    """Treat a client that was continued (kill -CONT) as an ordinary client again."""
    clients = _frozen(draft, str(event.process))
    if not clients:
        return
    if event.liveness is not Liveness.RUNNING:
        _watch_for_thaw(draft, event.process)
        return
    _set_frozen(draft, event.process, None)
    _not_frozen(draft, event.process, HitOutcome.ABSORBED, "")
    first = clients[0]
    draft.publish("client-thawed", first.facts.uid, domain=first.id.domain, pid=event.process.pid)


def on_freeze_restored(draft: Draft, event: ev.FreezeRestored) -> None:
    if any(c.state in _GOING for c in draft.state.spaces_of(event.process)):
        return
    frozen = _set_frozen(draft, event.process, draft.now)
    if frozen:
        _watch_for_thaw(draft, event.process)
        for name in sorted({c.id.domain for c in frozen}):
            victims.kill_frozen(draft, name)


def on_freeze_refused(draft: Draft, event: ev.FreezeRefused) -> None:
    """Leave the client running: mpsd does not stop a process that another user may own."""
    clients = _frozen(draft, str(event.process))
    _set_frozen(draft, event.process, None)
    for client in clients:
        if client.living:
            facts = replace(client.facts, borrowed=True)
            draft.put_client(replace(client, facts=facts, frozen=None))
    draft.count("freezes_refused")
    _not_frozen(draft, event.process, HitOutcome.WITHHELD, event.reason)


def _not_frozen(draft: Draft, process: ProcessInstance, outcome: HitOutcome, why: str) -> None:
    record = hitrecords.open_record(draft.state, process, draft.now)
    if record is not None and record.hit is not None and record.hit.outcome is HitOutcome.FROZEN:
        hitrecords.write(draft, replace(record, hit=replace(record.hit, outcome=outcome, why=why)))


# -- later facts -----------------------------------------------------------------------------------------


def on_described(draft: Draft, event: ev.HitDescribed) -> None:
    record = hitrecords.find(draft.state, event.fault)
    if record is None or record.hit is None or (event.nearby is None and event.kernel is None):
        return
    facts = replace(record.hit, nearby=event.nearby, kernel=event.kernel)
    hitrecords.write(draft, replace(record, hit=facts))


def on_tell(draft: Draft, subject: str) -> None:
    if subject.isdecimal():
        hitrecords.write_count(draft, int(subject))


def on_policy_set(draft: Draft, event: ev.ZonePolicySet) -> None:
    """Set the policy from the next hit on. A stopped client stays stopped."""
    for client in tuple(draft.state.spaces_of(event.process)):
        if client.living:
            draft.put_client(replace(client, zone_policy=event.policy))
