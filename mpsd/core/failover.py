"""Fail-over: which standby a program is offered, and who is told to move when a domain is lost.

A standby is the slot's spare, so the one decision that takes a domain out of service lets the path lead to
the standby and tells the programs that are ready in it. Words of a program count for itself alone: an error
that it reports moves nobody, and so does nothing else that it may say.

Who is named for certain is not carried over. Where nobody is named, everybody is a suspect and everybody is
told: the offender too, and what it does again costs the next domain. So suspects in mode exact do their work
again one at a time (turns.py), and the one with which the next domain is lost is the offender. Where the
offender is likely to be none of them, those who are ready do so at once. In mode keep
nothing is done again, and the bound on moves ends such a series.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mpsd.core import attribution as at
from mpsd.core import taxonomy, turns
from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, Fenced, Move, OfferStandby, RecordFailover, StandDown
from mpsd.core.fates import LEFT, latest_of, revise, rewrite
from mpsd.core.killing import kill_by_policy
from mpsd.core.lifecycle import DomainTrigger
from mpsd.core.records import Evidence, FaultRecord, Source
from mpsd.core.standby import OFFERED, FailoverRecord, Fate, Member, Outcome, Standing, Turn
from mpsd.core.state import Client, ClientState, Domain, DomainState, Slot, State
from mpsd.model import Again, Confidence, FailoverMode, ProcessInstance, Whose

MINUTE_S = 60.0
MADE_IT = "it made the fault"
FAULTED_AGAIN = "what it did again faulted again"
PUT_OUT, PUT_OUT_S = "failover-put-out", 2.0
"""When the others have gone: the kernel takes a process apart under locks of the driver's that they need."""


def willing(state: State, slot: Slot) -> list[Member]:
    """The programs that would move away from the slot's active domain."""
    return [m for m in state.members.values() if m.connected and m.home is not None and m.home == slot.active]


def linger(draft: Draft, slot: str) -> None:
    """Where nobody would move, a standby that is not kept in any case ends in a while."""
    if not draft.state.policy.spare and not willing(draft.state, draft.state.slots[slot]):
        draft.emit(ArmTimer("standby-linger", slot, draft.state.policy.standby_linger_s))


def target_of(state: State, member: Member) -> Domain | None:
    """Where this program could go on: the standby, or, where its own domain has been left, the next one."""
    home = state.domains.get(member.home or "")
    return next_of(state, home) if home is not None and member.connected else None


def next_of(state: State, home: Domain) -> Domain | None:
    """Where the programs of this domain can go on."""
    slot = state.slots[home.slot]
    at_active = slot.active == home.id
    found = state.domains.get((slot.spare if at_active else slot.active) or "")
    usable = DomainState.WARM if at_active else DomainState.ACTIVE
    return found if found is not None and found.state is usable and found.generation else None


def find_home(state: State, process: ProcessInstance, generation: int = 0) -> str | None:
    """Where the work of a process runs that has not been seen before; None: it is no client yet.

    `generation`: of the standby in which it lives, by its own word. In its first context it is where it came
    first, and any standby is of a later number.
    """
    here = {c.id.domain for c in state.spaces_of(process) if c.living}
    if f"d{generation}" in here:
        return f"d{generation}"
    return min(here, key=lambda name: (state.domains[name].generation, name), default=None)


def refresh(draft: Draft, process: ProcessInstance) -> None:
    """Offer this program what there is for it now, and take back what is none any more."""
    member = draft.state.members.get(process)
    if member is None or member.standing in (Standing.MOVING, Standing.LEFT_BEHIND):
        return
    if member.home not in draft.state.domains:
        member = draft.put_member(replace(member, home=find_home(draft.state, process)))
    target = target_of(draft.state, member)
    if member.standing in OFFERED and (target is None or target.generation != member.generation):
        member = _take_back(draft, member, "this standby has ended")
    if target is None:
        return
    if member.standing is Standing.WAITING and _may_be_offered(draft.state, member, draft.now):
        offered = replace(member, standing=Standing.OFFERED, generation=target.generation, reason="")
        draft.put_member(replace(offered, ready_ms=None, bytes=0))
        draft.emit(OfferStandby(process, target.generation, target.id))
    elif member.standing is Standing.READY and draft.state.has_lost(member):
        _move_late(draft, member, target)
    elif _is_beside_endless_work(draft.state, member) and not why_not(draft, member, target):
        poisoned = draft.state.domains[member.home or ""]
        _record(draft, poisoned, DomainTrigger.POISON.value, True, [member], [], "", late=True)
        if poisoned.last_fault is not None:
            link(draft, poisoned.id, poisoned.last_fault)


def refresh_all(draft: Draft, slot: str | None = None) -> None:
    for member in tuple(draft.state.members.values()):
        home = draft.state.domains.get(member.home or "")
        if slot is None or home is None or home.slot == slot:
            refresh(draft, member.process)


def _may_be_offered(state: State, member: Member, now: float) -> bool:
    """Not before its first context is leased: what it has then is told from what it makes now. Nor while it
    has work to do again: who makes a standby hears nothing for a second and more."""
    home = [c for c in state.spaces_of(member.process) if c.id.domain == member.home and c.living]
    settled = [c for c in home if c.state in (ClientState.ATTACHED, ClientState.UNPROTECTED)]
    domain = state.domains.get(member.home or "")
    is_late = domain is not None and turns.is_late(domain, member.process, now)
    is_heard = (member.turn is Turn.NONE and not is_late) or state.has_lost(member)
    return is_heard and bool(settled) and not state.copies_problem and not state.stopping


def _is_beside_endless_work(state: State, member: Member) -> bool:
    """Whether its domain is poisoned, and it was not ready then. Who was told to leave it, and stayed, is not
    told again: its calls are held while its work is waited for."""
    return state.domains[member.home or ""].state is DomainState.POISONED and member.asked != member.home


def _take_back(draft: Draft, member: Member, why: str) -> Member:
    if member.connected:
        draft.emit(StandDown(member.process, member.generation, why))
    return draft.put_member(replace(member, standing=Standing.WAITING, generation=0, reason=""))


def leave_behind(draft: Draft, member: Member, why: str) -> None:
    """It is told no more of any standby for as long as it lives where it does."""
    if member.connected:
        draft.emit(StandDown(member.process, member.generation, why, final=True))
    gone = replace(member, standing=Standing.LEFT_BEHIND, generation=0, reason=why, turn=Turn.NONE)
    draft.put_member(gone)


def why_not(draft: Draft, member: Member, target: Domain | None) -> str:
    """Why this program cannot be told to go on in `target`; empty when it can."""
    limit = draft.state.policy.moves_per_minute
    recent = [t for t in member.told if draft.now - t < MINUTE_S]
    if not member.connected:
        return "it is not connected"
    if target is None:
        return "there was no standby"
    if member.standing is not Standing.READY or member.generation != target.generation:
        return f"it was not ready: {member.reason or member.standing.value}"
    if len(recent) >= limit:
        return f"it was moved {len(recent)} times within a minute (failover.per_minute = {limit})"
    return ""


def may_go_again(domain: Domain, faults: Iterable[FaultRecord], sure: Iterable[ProcessInstance]) -> Again:
    """How what was in flight there may be done again: with the move, where nobody's work was at fault or it
    is known whose. What a suspect had in flight may fault again, so then it is one after the other."""
    at_work = [f for f in faults if f.fault_class not in taxonomy.DEATHS]
    nobodys = domain.state is not DomainState.FAULTED and not at_work
    return Again.AGAIN if nobodys or list(sure) else Again.IN_TURN


def _tell(
    draft: Draft, member: Member, why: str, *, planned: bool = False, again: Again = Again.LOST
) -> None:
    again = again if member.mode is FailoverMode.EXACT else Again.LOST
    draft.emit(Move(member.process, member.generation, why, planned, again))
    told = (*(t for t in member.told if draft.now - t < MINUTE_S), draft.now)
    guessed = draft.now if again is Again.AT_ONCE else member.guessed
    owed = again in (Again.IN_TURN, Again.AT_ONCE)
    moving = replace(member, standing=Standing.MOVING, told=told, among=False, new_s=None)
    asked = member.home if planned else member.asked
    draft.put_member(
        replace(
            moving, again=again, guessed=guessed, owed=owed, whose=Whose.UNKNOWN, named=False, asked=asked
        )
    )
    draft.count("failover_moves")


def fence(draft: Draft, home: Domain) -> None:
    """Nothing in this domain, which was lost, writes any more: who moves away need not find out by itself."""
    for member in draft.state.members.values():
        moving = (
            member.home == home.id and member.standing is Standing.MOVING and not _is_planned(draft, member)
        )
        if moving and member.connected and member.fences:
            draft.emit(Fenced(member.process, member.generation))
            draft.count("failover_fences")


def _is_planned(draft: Draft, member: Member) -> bool:
    record = latest_of(draft.state, member.process)
    return record is not None and record.planned


def _move_late(draft: Draft, member: Member, target: Domain) -> None:
    """It became ready after its domain was lost: the standby of then is the domain of now."""
    home = draft.state.domains[member.home or ""]
    faults = at.open_for(draft.state, home.id, draft.now)
    refusal = MADE_IT if member.process in culprits(faults) else why_not(draft, member, target)
    if refusal:
        leave_behind(draft, member, refusal)
        return
    for record in reversed(draft.state.failovers):
        if record.domain == member.home and any(f.process == member.process for f in record.fates):
            sure = [*culprits(faults), *(f.process for f in record.fates if f.why == FAULTED_AGAIN)]
            _tell(draft, member, "its domain is lost", again=may_go_again(home, faults, sure))
            told_ms = round((draft.now - record.at) * 1e3, 3)
            revise(draft, record, member.process, outcome=Outcome.TOLD, why="", told_ms=told_ms)
            draft.emit(ArmTimer("failover-wait", str(record.id), draft.state.policy.move_wait_s))
            return
    # It came after the loss, or the daemon did.
    _record(draft, home, "its domain was lost before it came", False, [member], faults, "", late=True)


def culprits(faults: Iterable[FaultRecord]) -> list[ProcessInstance]:
    """Who is named for certain: nobody else is kept from moving."""
    return [r.offender.id.process for r in faults if r.offender and r.confidence is Confidence.CERTAIN]


def domain_left(draft: Draft, name: str, trigger: str, planned: bool = False) -> None:
    """A domain has gone out of service, and its slot leads to the next one where there is one."""
    if draft.state.policy.failover is FailoverMode.OFF:
        return
    domain = draft.state.domains[name]
    if planned or domain.is_dead:
        faults = at.open_for(draft.state, name, draft.now)
        device = at.device_fault(draft.state, domain, draft.now)
        concerned = [m for m in draft.state.members.values() if m.home == name]
        concerned = [m for m in concerned if m.standing not in (Standing.MOVING, Standing.LEFT_BEHIND)]
        if concerned:
            dead = "the device itself failed" if device is not None else ""
            _record(draft, domain, trigger, planned, concerned, faults, dead)
    refresh_all(draft, domain.slot)


def _record(
    draft: Draft,
    domain: Domain,
    trigger: str,
    planned: bool,
    concerned: list[Member],
    faults: list[FaultRecord],
    dead: str,
    *,
    late: bool = False,
) -> None:
    """`late`: others have been told already, or have not come yet: nobody knows who will do what again."""
    # Whose server died, which device failed, or who else is known says nothing of who does its work again.
    by_work = domain.state is DomainState.FAULTED and not dead and not culprits(faults)
    first = _first_sign(draft, faults)
    repeated = turns.repeaters(draft.state, domain, draft.now, first) if by_work else []
    sure = [*culprits(faults), *repeated]
    # Likely is not certain: it is told with the others.
    suspects = {p.id.process for r in faults for p in (*r.suspects, *([r.offender] if r.offender else []))}
    suspects -= set(sure)
    target = next_of(draft.state, domain)
    refusals = {}
    for member in sorted(concerned, key=lambda m: (m.process.pid, m.process.start_ticks)):
        refusal = MADE_IT if member.process in sure else dead
        refusal = FAULTED_AGAIN if member.process in repeated else refusal
        refusals[member] = refusal or why_not(draft, member, target_of(draft.state, member))
    told = [member for member, refusal in refusals.items() if not refusal]
    again = may_go_again(domain, faults, sure)
    here = turns.at_work(draft, domain)
    if again is Again.IN_TURN and not late and turns.may_be_at_once(draft.state, domain, here, draft.now):
        again = Again.AT_ONCE
    if domain.is_dead:
        turns.lost(draft, domain)
    fates = []
    for member, refusal in refusals.items():
        if not refusal:
            _tell(draft, member, trigger, planned=planned, again=again)
        elif member.process in sure or dead or (member.standing is Standing.READY and not planned):
            leave_behind(draft, member, refusal)
        fates.append(_fate(draft.state, member, refusal, member.process in suspects))
    if again is Again.IN_TURN and any(is_a_kernels(f) for f in faults):
        turns.note_among(draft, here, [m.process for m in told])
    number = draft.state.next_failover
    draft.state = replace(draft.state, next_failover=number + 1)
    record = FailoverRecord(
        number,
        draft.now,
        domain.slot,
        domain.id,
        target.id if target is not None else None,
        target.generation if target is not None else 0,
        trigger,
        planned,
        faults[0].id if faults else None,
        round((draft.now - first) * 1e3, 3),
        faults[0].source_ns if faults else None,
        tuple(fates),
    )
    draft.put_failover(record)
    draft.emit(RecordFailover(record))
    draft.count("failovers")
    if any(f.outcome is Outcome.TOLD for f in fates):
        draft.emit(ArmTimer("failover-wait", str(number), draft.state.policy.move_wait_s))
        _put_out(draft, sure, target)


def _first_sign(draft: Draft, faults: list[FaultRecord]) -> float:
    """When that of the first of these came; now, where there is none."""
    return min((r.evidence[0].at for r in faults[:1] if r.evidence), default=draft.now)


def is_a_kernels(fault: FaultRecord) -> bool:
    """An exception that somebody has reported: a server that was killed is in FAULT for its clients, too."""
    said = any(e.source not in (Source.SERVER_STATE, Source.PROCESS) for e in fault.evidence)
    return said and fault.fault_class.startswith("sm-")


def by_turn(draft: Draft, record: FaultRecord) -> FaultRecord:
    """Name who did its work again when that faulted: another one's could have in the same moment."""
    if record.offender is not None or record.domain is None:
        return record
    first = _first_sign(draft, [record])
    repeated = turns.repeaters(draft.state, draft.state.domains[record.domain], draft.now, first)
    here = [c for c in draft.state.living_of(record.domain) if c.id.process in repeated]
    for client in here[:1]:
        victims = at.victims(draft.state, record.domain, client.id)
        known = replace(record, offender=at.party(client), confidence=Confidence.LIKELY, victims=victims)
        return at.add_evidence(known, Evidence(Source.PROCESS, draft.now, FAULTED_AGAIN))
    return record


def _fate(state: State, member: Member, refusal: str, suspect: bool) -> Fate:
    facts = next((c.facts for c in state.spaces_of(member.process)), None)
    outcome = Outcome.NOT_TOLD if refusal else Outcome.TOLD
    told_ms = None if refusal else 0.0
    command = facts.command if facts is not None else ""
    return Fate(member.process, member.uid, command, outcome, refusal, suspect, told_ms)


def _put_out(draft: Draft, sure: Iterable[ProcessInstance], target: Domain | None) -> None:
    """A named offender with a context in the domain where the others have just gone does not stay there."""
    if target is None or not draft.state.policy.evict_offender:
        return
    for process in sure:
        if any(c.id.domain == target.id for c in draft.state.spaces_of(process)):
            draft.emit(ArmTimer(PUT_OUT, f"{process} {target.id}", PUT_OUT_S))


def on_put_out(draft: Draft, subject: str) -> None:
    """`subject`: the process and the domain in which it does not stay."""
    process, _, domain = subject.rpartition(" ")
    _end_there(draft, [c for c in draft.state.clients_of(domain) if str(c.id.process) == process])


def _end_there(draft: Draft, clients: Iterable[Client]) -> None:
    """`clients`: of one process, in one domain."""
    for client in [c for c in clients if c.living][:1]:
        kill_by_policy(draft, client, "it made the fault from which the others fail over")


def named(draft: Draft, domain: str, process: ProcessInstance) -> None:
    """A sign that came after the others were told: this process made the fault, and was told with them."""
    for record in reversed(draft.state.failovers):
        if record.domain == domain and any(f.process == process and f.outcome in LEFT for f in record.fates):
            revise(draft, record, process, why="it made the fault, which was known after it was told")
            if draft.state.policy.evict_offender:
                # At once: it works where the others have gone.
                there = [c for c in draft.state.spaces_of(process) if c.id.domain == record.to]
                _end_there(draft, there)
            return


def forget_absent(draft: Draft) -> None:
    """Members of an earlier daemon whose processes are no clients any more."""
    for member in tuple(draft.state.members.values()):
        if not member.connected and not any(c.living for c in draft.state.spaces_of(member.process)):
            draft.drop_member(member.process)


def link(draft: Draft, domain: str, fault: int) -> None:
    """The record of the fault was made after that of the fail-over."""
    for record in reversed(draft.state.failovers):
        if record.domain == domain and record.fault is None and record.at == draft.now:
            rewrite(draft, replace(record, fault=fault))
            return
