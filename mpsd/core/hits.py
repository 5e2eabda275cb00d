"""Handlers for guard hits: what is done with a client whose stray access a guard zone absorbed, or a sink of
the kernel part (core/sinks.py).

The offender is certain: the event came on the tracker of its own address space, with an address in a zone
that its own process laid. What the policy wants is done before anything is written down, and the rest of
the story (what lay there, how it ended) comes as revisions of the record.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpsd.core import attribution as at
from mpsd.core import events as ev
from mpsd.core import hitrecords, proof, taxonomy, victims
from mpsd.core.clients import begin_eviction
from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, Describe, Freeze, LookAtFrozen
from mpsd.core.records import Evidence, FaultRecord, HitFacts, HitOutcome, Source
from mpsd.core.state import POLICY, Client, ClientState, Eviction
from mpsd.model import Access, Confidence, LiesThere, Liveness, ProcessInstance, ZonePolicy, ZoneRole

FAULT_CLASS = "guard-hit"
THAW_S = 1.0
_GOING = (ClientState.TERMINATING, ClientState.KILLING)
SPACES_COUNTED = 16


def policy_of(draft: Draft, client: Client) -> ZonePolicy:
    return client.zone_policy or draft.state.policy.zone_policy


@dataclass(frozen=True, slots=True)
class Stray:
    """An access that was absorbed: what is to be done with its client, and how its record calls it. `space`:
    for one that the kernel part sank, where, and how many it has counted there."""

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
    absorbed(draft, client, Stray(event, policy, FAULT_CLASS, sign, "a guard zone was hit"))


def absorbed(draft: Draft, client: Client, stray: Stray) -> HitOutcome:
    """Do what is to be done with this client, and record it; what that came to."""
    event, policy = stray.hit, stray.policy
    outcome, why = _act(draft, client, stray) if client.living else (HitOutcome.ENDED, "")
    process = client.id.process
    # Of the dead too: their kernels run on, and what they did is told a moment later.
    record = record_of(draft, client, event.role)
    if record is not None:
        _once_more(draft, _counted(record, stray), event, policy, outcome, why)
    elif hitrecords.of(draft.state, process, draft.now, living=client.living) is None and hitrecords.silent(
        draft.state, process, draft.now
    ):
        # Its record had to make room for others': counted, and no more.
        draft.count("guard_hits_untold", event.count)
    else:
        spaces = () if stray.space is None else (stray.space,)
        facts = HitFacts(event.role, policy, draft.now, outcome, event.count, why=why, spaces=spaces)
        _begin(draft, client, stray, facts)
    if client.living:
        hitrecords.tally(draft, process, event.count, recorded=record is None)
    return outcome


def record_of(draft: Draft, client: Client, role: ZoneRole) -> FaultRecord | None:
    """The record that this belongs to. What was sunk is no hit of a zone, after which a program may go on."""
    found = hitrecords.of(draft.state, client.id.process, draft.now, living=client.living)
    of_zone = found is not None and found.hit is not None and found.hit.role is not ZoneRole.SINK
    return None if of_zone and role is ZoneRole.SINK else found


def _counted(record: FaultRecord, stray: Stray) -> FaultRecord:
    if stray.space is None or record.hit is None:
        return record
    others = tuple(s for s in record.hit.spaces if s[0] != stray.space[0])
    spaces = (*others, stray.space)[-SPACES_COUNTED:]
    return replace(record, hit=replace(record.hit, spaces=spaces))


def _once_more(
    draft: Draft, record: FaultRecord, event: ev.GuardHit, policy: ZonePolicy, outcome: HitOutcome, why: str
) -> None:
    assert record.hit is not None
    before = record.hit
    facts = replace(before, count=before.count + event.count, last=draft.now)
    if outcome in (before.outcome, HitOutcome.ENDED):
        hitrecords.tell_later(draft, replace(record, hit=facts))
    else:
        # The policy was changed meanwhile, or what stood in its way has gone.
        hitrecords.write(draft, replace(record, hit=replace(facts, policy=policy, outcome=outcome, why=why)))


def _begin(draft: Draft, client: Client, stray: Stray, facts: HitFacts) -> None:
    number, event, seen = draft.state.next_fault, stray.hit, stray.hit.event
    draft.state = replace(draft.state, next_fault=number + 1)
    draft.count("guard_hit_records")
    null = event.role is ZoneRole.NULL_PAGE or seen.address < taxonomy.NULL_PAGE_BYTES
    record = FaultRecord(
        number,
        draft.now,
        client.id.domain,
        draft.state.domains[client.id.domain].gpus,
        stray.fault_class,
        offender=at.party(client),
        confidence=Confidence.CERTAIN,
        address=seen.address,
        access=seen.access,
        fault_type=at.fault_type_name(seen),
        lies_there=LiesThere.NULL_PAGE if null else None,
        source_ns=seen.timestamp_ns,
        evidence=(stray.sign,),
        hit=facts,
    )
    if facts.outcome is HitOutcome.ENDED:
        record = replace(record, hit=replace(facts, alone=hitrecords.alone(draft, record)))
    draft.emit(Describe(number, client.id.process, seen.address, event.role))
    hitrecords.write(draft, record)


# -- what is done ----------------------------------------------------------------------------------------


def _act(draft: Draft, client: Client, stray: Stray) -> tuple[HitOutcome, str]:
    """Do what the policy wants; what that comes to, and why it is less than that."""
    policy, event = stray.policy, stray.hit
    process = client.id.process
    living = [c for c in draft.state.spaces_of(process) if c.living]
    if any(c.state in _GOING and not _was_refused(c, policy) for c in living):
        return HitOutcome.EVICTING, ""
    if event.role is ZoneRole.SINK and not all(c.leased for c in living):
        # Of what dies without a lease the work faults as nobody's, which ends everybody.
        return HitOutcome.WITHHELD, "no lease is held of it: the kernel part kills it, and holds what runs"
    if policy is ZonePolicy.ABSORB:
        frozen = any(c.frozen is not None for c in living)
        return (HitOutcome.FROZEN if frozen else HitOutcome.ABSORBED), ""
    believed = [c for c in living if proof.proven(draft.state.domains[c.id.domain], c, asked=False)]
    if not believed:
        draft.count("guard_hits_unproven")
        return HitOutcome.WITHHELD, "it is another user's in this user's domain: only who asks may end it"
    # In a lost domain there is nothing to inspect, and who is stopped there would stay for ever.
    lost = any(victims.work_is_lost(draft.state.domains[c.id.domain]) for c in living)
    if policy is ZonePolicy.EVICT or lost:
        eviction = Eviction(POLICY, stray.reason, draft.now)
        begin_eviction(draft, believed, eviction, event.liveness, idle=event.idle)
        return HitOutcome.EVICTING, ""
    _freeze(draft, believed[0], event.liveness)
    return HitOutcome.FROZEN, ""


def _was_refused(client: Client, policy: ZonePolicy) -> bool:
    """Whether SIGKILL came to nothing, so that nobody is putting it out. (To stop it then is no way out.)"""
    refused = client.eviction is not None and client.eviction.killed is None
    return policy is ZonePolicy.EVICT and client.state is ClientState.KILLING and refused


def _freeze(draft: Draft, client: Client, liveness: Liveness) -> None:
    """Stop it, unless it is stopped; `liveness` may have been read before an earlier signal arrived."""
    since = client.frozen
    goes_on = liveness is Liveness.RUNNING and since is not None and draft.now - since > THAW_S / 2
    if since is not None and not goes_on:
        return
    _set_frozen(draft, client.id.process, draft.now)
    owner = proof.owner_needed(draft.state.domains[client.id.domain], client, asked=False)
    draft.count("clients_frozen")
    draft.emit(Freeze(client.id, owner))
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
    """Somebody let it go on (kill -CONT): it is a client like any other again."""
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
    """It goes on; what mpsd cannot prove its user's own, it does not stop."""
    clients = _frozen(draft, str(event.process))
    _set_frozen(draft, event.process, None)
    for client in clients:
        if client.living:
            facts = replace(client.facts, borrowed=True)
            draft.put_client(replace(client, facts=facts, frozen=None))
    draft.count("freezes_refused")
    _not_frozen(draft, event.process, HitOutcome.WITHHELD, event.reason)


def _not_frozen(draft: Draft, process: ProcessInstance, outcome: HitOutcome, why: str) -> None:
    record = hitrecords.of(draft.state, process, draft.now)
    if record is not None and record.hit is not None and record.hit.outcome is HitOutcome.FROZEN:
        hitrecords.write(draft, replace(record, hit=replace(record.hit, outcome=outcome, why=why)))


# -- what comes later ------------------------------------------------------------------------------------


def on_described(draft: Draft, event: ev.HitDescribed) -> None:
    record = hitrecords.find(draft.state, event.fault)
    if record is None or record.hit is None or (event.nearby is None and event.kernel is None):
        return
    facts = replace(record.hit, nearby=event.nearby, kernel=event.kernel)
    hitrecords.write(draft, replace(record, hit=facts))


def on_tell(draft: Draft, subject: str) -> None:
    if subject.isdecimal():
        hitrecords.told(draft, int(subject))


def on_policy_set(draft: Draft, event: ev.ZonePolicySet) -> None:
    """Holds from the next hit on; a client that is stopped stays so."""
    for client in tuple(draft.state.spaces_of(event.process)):
        if client.living:
            draft.put_client(replace(client, zone_policy=event.policy))
