"""Fail-over plan: which standby domain a participant is offered, and which participants move after a fault.

The standby domain is the slot's second domain. One decision takes a domain out of service, leads the slot's
path to the standby domain, and tells the ready participants to move. A report of a program affects that
program alone: an error that it reports moves no other program.

An offender that is named with certainty does not move. If no offender is named, all participants are told to
move, the offender too, and its replay faults the next domain. So participants in mode exact replay by what
they know of the fault (serialreplay.py), and suspects replay alone in a trial domain (trial.py). In mode keep
nothing is replayed, and the limit on moves per minute ends such a series.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mpsd.base.model import ClientId, Confidence, ExceptionOwner, FailoverMode, ProcessInstance, ReplayMode
from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, Fenced, Move, OfferStandby, RecordFailover, StandDown
from mpsd.core.failover import budgets, queries, serialreplay, suspects
from mpsd.core.failover.outcomes import LEFT, latest_of, revise, rewrite
from mpsd.core.failover.participants import (
    NOT_CONNECTED,
    OFFERED,
    FailoverRecord,
    Outcome,
    Participant,
    ParticipantOutcome,
    Standing,
    Turn,
)
from mpsd.core.faults import attribution as at
from mpsd.core.faults import taxonomy
from mpsd.core.faults.records import Evidence, FaultRecord, Party, Source
from mpsd.core.killing import kill_by_policy
from mpsd.core.lifecycle import DomainTrigger
from mpsd.core.state import Client, ClientState, Domain, DomainState, Slot, State

MINUTE_S = 60.0
CAUSED_FAULT = "the client caused the fault"
FAULTED_AGAIN = "the replay of its work faulted again"
EVICT_OFFENDER, EVICT_OFFENDER_S = "failover-put-out", 2.0
"""Name of the timer that evicts a named offender, and its delay [s]. The others have moved by then: the
kernel ends a process under locks of the driver that they need."""


def participants_of(state: State, slot: Slot) -> list[Participant]:
    """Return the connected participants in the slot's active domain, and in its full domains.

    Participants that exceed a budget need no standby domain.
    """
    full = {d.id for d in state.domains.values() if d.slot == slot.id and d.state is DomainState.FULL}
    able = (m for m in state.members.values() if m.connected and m.excess is None)
    return [m for m in able if m.home in {slot.active, *full} - {None}]


def linger(draft: Draft, slot: str) -> None:
    """Retire the slot's standby domain after a while if no participant would move and none is kept
    permanently."""
    if not draft.state.policy.spare and not participants_of(draft.state, draft.state.slots[slot]):
        draft.emit(ArmTimer("standby-linger", slot, draft.state.policy.standby_linger_s))


def target_of(state: State, participant: Participant) -> Domain | None:
    """Return the domain to which this participant can move: the standby, or the next one if its own has
    faulted.

    While a full domain waits for the next standby, its participants keep their contexts in the active domain,
    which was their standby domain before.
    """
    home = state.domains.get(participant.home or "")
    if home is None or not participant.connected:
        return None
    if suspects.waits_for_trial(state, participant):
        return suspects.trial_of(state, participant.process)
    target = next_domain(state, home)
    if target is None and home.state is DomainState.FULL:
        active = state.domains.get(state.slots[home.slot].active or "")
        if active is not None and active.generation == participant.generation:
            return active if active.state is DomainState.ACTIVE else None
    return target


def next_domain(state: State, home: Domain) -> Domain | None:
    """Return the domain to which the participants of this domain can move."""
    slot = state.slots[home.slot]
    # A fault in a full domain makes the standby domain active: see domains.leave().
    to_standby = slot.active == home.id or home.state is DomainState.FULL
    found = state.domains.get((slot.spare if to_standby else slot.active) or "")
    usable = DomainState.WARM if to_standby else DomainState.ACTIVE
    return found if found is not None and found.state is usable and found.generation else None


def find_home(state: State, process: ProcessInstance, generation: int = 0) -> str | None:
    """Return the domain in which the work of a process not seen before runs; None if it is no client yet.

    `generation`: of the standby domain in which it lives, as it reports. A process in its first context lives
    in the domain that it joined first; every standby domain has a higher number.
    """
    here = {c.id.domain for c in state.spaces_of(process) if c.living and state.is_member(c)}
    if f"d{generation}" in here:
        return f"d{generation}"
    return min(here, key=lambda name: (state.domains[name].generation, name), default=None)


def refresh(draft: Draft, process: ProcessInstance) -> None:
    """Offer this participant the present standby domain, or withdraw an offer that is void."""
    participant = draft.state.members.get(process)
    if participant is None or participant.standing in (Standing.MOVING, Standing.LEFT_BEHIND):
        return
    if participant.home not in draft.state.domains:
        participant = draft.put_participant(replace(participant, home=find_home(draft.state, process)))
    budgets.grant_first(draft, process)
    participant = draft.state.members[process]
    target = target_of(draft.state, participant)
    if participant.standing in OFFERED and (target is None or target.generation != participant.generation):
        participant = withdraw_offer(draft, participant, "the standby domain has ended")
    if target is None:
        return
    may = participant.standing is Standing.WAITING
    if may and _may_be_offered(draft.state, participant, target, draft.now):
        _offer(draft, participant, target)
    elif participant.standing is Standing.READY and draft.state.has_lost(participant):
        _move_late(draft, participant, target)
    elif _is_beside_endless_work(draft.state, participant) and not reason_not_to_move(
        draft, participant, target
    ):
        poisoned = draft.state.domains[participant.home or ""]
        _record(draft, poisoned, DomainTrigger.POISON.value, True, [participant], [], "", late=True)
        if poisoned.last_fault is not None:
            link(draft, poisoned.id, poisoned.last_fault)


def _offer(draft: Draft, participant: Participant, target: Domain) -> None:
    """Offer the standby domain, unless a GPU has too many standby contexts.

    A context in a trial domain takes no place among them.
    """
    full = budgets.full_gpu(draft.state, participant) if target.trial is None else None
    if full:
        _cap(draft, participant, full)
        return
    offered = replace(participant, standing=Standing.OFFERED, generation=target.generation, reason="")
    # A participant that has lost its context moves at once, and then waits for a place as before.
    placed = participant.placed or not (draft.state.has_lost(participant) or target.trial is not None)
    draft.put_participant(replace(offered, ready_ms=None, bytes=0, capped=None, placed=placed))
    draft.emit(OfferStandby(participant.process, target.generation, target.id))
    if placed:
        subject = f"{participant.process} {target.generation}"
        draft.emit(ArmTimer(budgets.PLACE, subject, budgets.PLACE_S))


def _cap(draft: Draft, participant: Participant, gpu: str) -> None:
    """Let a participant wait for a standby context on this GPU."""
    why = f"its GPU {budgets.full(draft.state)}"
    draft.put_participant(replace(participant, capped=gpu, placed=False, reason=why))


def offer_free_places(draft: Draft, before: State) -> None:
    """Offer standby contexts that have become possible to participants that wait for one, in their order."""
    if draft.state.members is before.members and draft.state.clients is before.clients:
        return
    waiting = [m for m in draft.state.members.values() if m.capped is not None]
    most = draft.state.policy.standby_contexts
    for gpu in sorted({m.capped for m in waiting if m.capped is not None}):
        if len(budgets.standbys_on(draft.state, gpu)) < most:
            for participant in (m for m in waiting if m.capped == gpu):
                refresh(draft, participant.process)


def refresh_all(draft: Draft, slot: str | None = None) -> None:
    for participant in tuple(draft.state.members.values()):
        home = draft.state.domains.get(participant.home or "")
        if slot is None or home is None or home.slot == slot:
            refresh(draft, participant.process)


def _may_be_offered(state: State, participant: Participant, target: Domain, now: float) -> bool:
    """Return whether this participant can be offered a standby domain now.

    Not if it exceeds a budget. Not before its first context has a lease, because the lease tells that context
    from the standby context. Not while it has work to replay in its home: a program that makes a standby
    context does not answer for over a second. Not the standby domain that is to become a trial domain.
    """
    home = [c for c in state.spaces_of(participant.process) if c.id.domain == participant.home and c.living]
    settled = [c for c in home if c.state in (ClientState.ATTACHED, ClientState.UNPROTECTED)]
    domain = state.domains.get(participant.home or "")
    is_tried = domain is not None and domain.trial == participant.process and not state.has_lost(participant)
    if is_tried and not suspects.may_join(state, participant, now):
        return False
    if state.slots[target.slot].spare == target.id and suspects.is_reserved(state, target.slot):
        return False
    if domain is not None and not state.policy.gpus_without_failover.isdisjoint(domain.gpus):
        return False
    if participant.excess is not None:
        return False
    is_heard = participant.turn is Turn.NONE or target.trial is not None or state.has_lost(participant)
    return is_heard and bool(settled) and not state.copies_problem and not state.stopping


def _is_beside_endless_work(state: State, participant: Participant) -> bool:
    """Return whether its domain is poisoned and this participant was not told to leave it before.

    A participant that was told and stayed is not told again: its calls are held while mpsd waits for its
    work.
    """
    return (
        state.domains[participant.home or ""].state is DomainState.POISONED
        and participant.asked != participant.home
    )


def withdraw_offer(draft: Draft, participant: Participant, why: str) -> Participant:
    """Withdraw the offer of a standby domain."""
    if participant.connected:
        draft.emit(StandDown(participant.process, participant.generation, why))
    return draft.put_participant(replace(participant, standing=Standing.WAITING, generation=0, reason=""))


def leave_behind(draft: Draft, participant: Participant, why: str) -> None:
    """Offer this participant no further standby domain while it lives in its present domain."""
    if participant.connected:
        draft.emit(StandDown(participant.process, participant.generation, why, final=True))
    left_behind = replace(
        participant, standing=Standing.LEFT_BEHIND, generation=0, reason=why, turn=Turn.NONE
    )
    draft.put_participant(replace(left_behind, capped=None, placed=False))


def reason_not_to_move(draft: Draft, participant: Participant, target: Domain | None) -> str:
    """Return why this participant cannot be told to move to `target`; empty if it can."""
    limit = draft.state.policy.moves_per_minute
    recent = [t for t in participant.told if draft.now - t < MINUTE_S]
    if participant.excess is not None:
        return f"the client had left fail-over ({participant.excess.why})"
    if not participant.connected:
        return NOT_CONNECTED
    if target is None:
        return "no standby domain was available"
    if participant.capped is not None and target.trial is None:
        return participant.reason
    if participant.standing is not Standing.READY or participant.generation != target.generation:
        return f"the standby context was not ready: {participant.reason or participant.standing.value}"
    home = draft.state.domains.get(participant.home or "")
    is_trial = participant.process in (target.trial, home.trial if home is not None else None)
    if len(recent) >= limit and not is_trial:
        return f"the client was moved {len(recent)} times within a minute (failover.per_minute = {limit})"
    return ""


def replay_mode(domain: Domain, faults: Iterable[FaultRecord], sure: Iterable[ProcessInstance]) -> ReplayMode:
    """Return how work in flight in this domain may be replayed.

    With the move if no client's work was at fault, or if the offender is known. Otherwise the work of each
    suspect may fault again, so suspects replay one after the other.
    """
    work_faults = [f for f in faults if f.fault_class not in taxonomy.DEATHS]
    no_client_at_fault = domain.state is not DomainState.FAULTED and not work_faults
    return ReplayMode.AGAIN if no_client_at_fault or list(sure) else ReplayMode.IN_TURN


def _tell(
    draft: Draft,
    participant: Participant,
    why: str,
    *,
    planned: bool = False,
    again: ReplayMode = ReplayMode.LOST,
    exception_logged: bool = True,
    hurries: bool = False,
) -> None:
    is_suspect = suspects.is_suspect(participant) and participant.turn is Turn.WAITS
    if is_suspect and again in (ReplayMode.AGAIN, ReplayMode.AT_ONCE):
        # Another fault came before its replay, which may still fault.
        again = ReplayMode.IN_TURN
    again = again if participant.mode is FailoverMode.EXACT else ReplayMode.LOST
    # On a guess it is told to wait for its turn, too: it looks for the fault in its own code first.
    said = ReplayMode.IN_TURN if again is ReplayMode.AT_ONCE else again
    # A denial then suffices for it to replay (serialreplay.py).
    doubtful = participant.suspected or participant.doubts or participant.turn is not Turn.NONE
    may_go_on = said is ReplayMode.IN_TURN and not doubtful
    order = Move(participant.process, participant.generation, why, planned, said, exception_logged, may_go_on)
    draft.emit(replace(order, hurries=hurries and may_go_on))
    told = tuple(t for t in participant.told if draft.now - t < MINUTE_S)
    if why not in (suspects.TRIAL_MOVE, suspects.JOIN_MOVE):
        told = (*told, draft.now)
    guessed = draft.now if again is ReplayMode.AT_ONCE else participant.guessed
    owed = again in (ReplayMode.IN_TURN, ReplayMode.AT_ONCE)
    moving = replace(participant, standing=Standing.MOVING, told=told, among=False, new_s=None)
    asked = participant.home if planned else participant.asked
    draft.put_participant(
        replace(
            moving,
            again=again,
            guessed=guessed,
            owed=owed,
            whose=ExceptionOwner.UNKNOWN,
            goes_on=False,
            named=False,
            asked=asked,
            suspected=participant.suspected or is_suspect,
            untried=False,
            runs_on=False,
        )
    )
    draft.count("failover_moves")


def fence(draft: Draft, home: Domain) -> None:
    """Tell moving participants that this faulted domain writes no more, so that they need not find out
    themselves."""
    for participant in draft.state.members.values():
        moving = (
            participant.home == home.id
            and participant.standing is Standing.MOVING
            and not _is_planned(draft, participant)
        )
        if moving and participant.connected and participant.fences:
            draft.emit(Fenced(participant.process, participant.generation))
            draft.count("failover_fences")


def _is_planned(draft: Draft, participant: Participant) -> bool:
    record = latest_of(draft.state, participant.process)
    return record is not None and record.planned


def _move_late(draft: Draft, participant: Participant, target: Domain) -> None:
    """Move a participant that became ready after its domain faulted; the standby of then is active now."""
    home = draft.state.domains[participant.home or ""]
    faults = at.open_for(draft.state, home.id, draft.now)
    refusal = (
        CAUSED_FAULT
        if participant.process in culprits(faults)
        else reason_not_to_move(draft, participant, target)
    )
    if refusal:
        leave_behind(draft, participant, refusal)
        return
    for record in reversed(draft.state.failovers):
        if record.domain == participant.home and any(f.process == participant.process for f in record.fates):
            sure = [*culprits(faults), *(f.process for f in record.fates if f.why == FAULTED_AGAIN)]
            _tell(draft, participant, "its domain faulted", again=replay_mode(home, faults, sure))
            told_ms = round((draft.now - record.at) * 1e3, 3)
            revise(draft, record, participant.process, outcome=Outcome.TOLD, why="", told_ms=told_ms)
            draft.emit(ArmTimer("failover-wait", str(record.id), draft.state.policy.move_wait_s))
            return
    # The participant connected after the fault, or the daemon started after it.
    _record(
        draft,
        home,
        "its domain faulted before the client connected",
        False,
        [participant],
        faults,
        "",
        late=True,
    )


def culprits(faults: Iterable[FaultRecord]) -> list[ProcessInstance]:
    """Return the offenders that are named for certain. Only these are kept from moving."""
    return [r.offender.id.process for r in faults if r.offender and r.confidence is Confidence.CERTAIN]


def domain_left(draft: Draft, name: str, trigger: str, planned: bool = False) -> None:
    """Record a fail-over for a domain that went out of service, and tell its participants to move."""
    if draft.state.policy.failover is FailoverMode.OFF:
        return
    domain = draft.state.domains[name]
    if planned or domain.is_dead:
        faults = at.open_for(draft.state, name, draft.now)
        device = at.device_fault(draft.state, domain, draft.now)
        concerned = [m for m in draft.state.members.values() if m.home == name]
        concerned = [m for m in concerned if m.standing not in (Standing.MOVING, Standing.LEFT_BEHIND)]
        if concerned:
            device_failure = "the GPU itself failed" if device is not None else ""
            _record(draft, domain, trigger, planned, concerned, faults, device_failure)
    refresh_all(draft, domain.slot)


def _record(
    draft: Draft,
    domain: Domain,
    trigger: str,
    planned: bool,
    concerned: list[Participant],
    faults: list[FaultRecord],
    device_failure: str,
    *,
    late: bool = False,
    trial: Domain | None = None,
) -> None:
    """Decide for each participant, tell those that move, and write the record.

    `late`: other participants were told before or have not connected yet, so it is not known which will
    replay. `trial`: the trial domain to which its suspect moves.
    """
    # A dead server, a failed device or a known offender says nothing about the participants that replay.
    by_work = domain.state is DomainState.FAULTED and not device_failure and not culprits(faults)
    first = _first_sign(draft, faults)
    repeated = suspects.named_by_trial(draft.state, domain, draft.now, first) if by_work else []
    sure = [*culprits(faults), *repeated]
    # A likely offender is not certain, so it is told with the others.
    suspected = {p.id.process for r in faults for p in (*r.suspects, *([r.offender] if r.offender else []))}
    suspected -= set(sure)
    target = trial or next_domain(draft.state, domain)
    refusals: dict[ProcessInstance, str] = {}
    for participant in sorted(concerned, key=lambda m: (m.process.pid, m.process.start_ticks)):
        refusal = CAUSED_FAULT if participant.process in sure else device_failure
        refusal = FAULTED_AGAIN if participant.process in repeated else refusal
        refusals[participant.process] = refusal or reason_not_to_move(
            draft, participant, target_of(draft.state, participant)
        )
    told = [process for process, refusal in refusals.items() if not refusal]
    again = ReplayMode.IN_TURN if trial is not None else replay_mode(domain, faults, sure)
    here = suspects.processes_with_work(draft.state, domain, draft.now)
    if (
        again is ReplayMode.IN_TURN
        and not late
        and serialreplay.may_replay_together(draft.state, domain, here, draft.now)
    ):
        again = ReplayMode.AT_ONCE
    hurries = again is ReplayMode.AT_ONCE and serialreplay.has_youngest_ended(draft.state, domain, here)
    if domain.is_dead:
        serialreplay.end_all_turns(draft, domain)
    # After a trap there is no such line. After other SM exceptions it was seen to come before the server's.
    logged = late or at.may_have_logged_exception(draft.state, domain.gpus, first)
    entries = []
    for process, refusal in refusals.items():
        participant = draft.state.members[process]
        if not refusal:
            _tell(
                draft,
                participant,
                trigger,
                planned=planned,
                again=again,
                exception_logged=logged,
                hurries=hurries,
            )
        elif (
            participant.process in sure
            or device_failure
            or (participant.standing is Standing.READY and not planned)
        ):
            leave_behind(draft, participant, refusal)
        entries.append(_entry(draft.state, participant, refusal, participant.process in suspected))
    all_known = not (late or suspects.may_lack_work(draft.state, domain))
    if all_known and again is ReplayMode.IN_TURN and any(is_sm_exception(f) for f in faults):
        serialreplay.note_among(draft, here, told)
    if all_known and again in (ReplayMode.IN_TURN, ReplayMode.AT_ONCE):
        queries.note_others(draft, domain, here, told)
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
        tuple(entries),
    )
    draft.put_failover(record)
    draft.emit(RecordFailover(record))
    draft.count("failovers")
    if any(f.outcome is Outcome.TOLD for f in entries):
        draft.emit(ArmTimer("failover-wait", str(number), draft.state.policy.move_wait_s))
        _evict_offenders(draft, sure, target)


def move_for_trial(draft: Draft, participant: Participant, trial: Domain) -> None:
    """Tell a suspect to move to its trial domain and to replay there."""
    home = draft.state.domains[participant.home or ""]
    _record(draft, home, suspects.TRIAL_MOVE, False, [participant], [], "", late=True, trial=trial)


def join_others(draft: Draft, participant: Participant, active: Domain) -> None:
    """Tell a cleared suspect to move to the slot's active domain, once its work there ends."""
    home = draft.state.domains[participant.home or ""]
    _record(draft, home, suspects.JOIN_MOVE, True, [participant], [], "", late=True)


def _first_sign(draft: Draft, faults: list[FaultRecord]) -> float:
    """Return when the first sign of the first fault came [monotonic s]; now, if there is none."""
    return min((r.evidence[0].at for r in faults[:1] if r.evidence), default=draft.now)


def is_sm_exception(fault: FaultRecord) -> bool:
    """Return whether this is a reported SM exception. A killed server is in state FAULT for its clients,
    too."""
    reported = any(e.source not in (Source.SERVER_STATE, Source.PROCESS) for e in fault.evidence)
    return reported and fault.fault_class.startswith("sm-")


def name_by_replay(draft: Draft, record: FaultRecord) -> FaultRecord:
    """Name the participant that replayed when its domain faulted again. Another client may have faulted as
    well."""
    if record.offender is not None or record.domain is None:
        return record
    first = _first_sign(draft, [record])
    repeated = suspects.named_by_trial(draft.state, draft.state.domains[record.domain], draft.now, first)
    for party in _parties_in(draft.state, record.domain, repeated)[:1]:
        victims = at.victims(draft.state, record.domain, party.id)
        known = replace(record, offender=party, confidence=Confidence.LIKELY, victims=victims)
        return at.add_evidence(known, Evidence(Source.PROCESS, draft.now, FAULTED_AGAIN))
    return record


def _parties_in(state: State, domain: str, processes: Iterable[ProcessInstance]) -> list[Party]:
    """Return living participants that replayed in this domain, as clients of it.

    The domain may fault before mpsd knows a new context there. Then the process is known by its other
    contexts.
    """
    found = []
    for process in processes:
        here = [c for c in state.living_of(domain) if c.id.process == process]
        others = [c for c in state.spaces_of(process) if c.living and c.id.domain != domain]
        found += [at.party(c) for c in here] or [
            Party(ClientId(domain, process), c.facts) for c in others[:1]
        ]
    return found


def _entry(state: State, participant: Participant, refusal: str, suspect: bool) -> ParticipantOutcome:
    facts = next((c.facts for c in state.spaces_of(participant.process)), None)
    outcome = Outcome.NOT_TOLD if refusal else Outcome.TOLD
    told_ms = None if refusal else 0.0
    command = facts.command if facts is not None else ""
    entry = ParticipantOutcome(
        participant.process, participant.uid, command, outcome, refusal, suspect, told_ms
    )
    return replace(entry, left=participant.excess.budget if participant.excess is not None else None)


def _evict_offenders(draft: Draft, sure: Iterable[ProcessInstance], target: Domain | None) -> None:
    """Arm the eviction of named offenders that have a context in the domain to which the others have just
    moved."""
    if target is None or not draft.state.policy.evict_offender:
        return
    for process in sure:
        if any(c.id.domain == target.id for c in draft.state.spaces_of(process)):
            draft.emit(ArmTimer(EVICT_OFFENDER, f"{process} {target.id}", EVICT_OFFENDER_S))


def on_evict_offender(draft: Draft, subject: str) -> None:
    """Evict an offender. `subject`: the process and the domain that it has to leave."""
    process, _, domain = subject.rpartition(" ")
    _kill_in_domain(draft, [c for c in draft.state.clients_of(domain) if str(c.id.process) == process])


def _kill_in_domain(draft: Draft, clients: Iterable[Client]) -> None:
    """Kill a process with contexts in one domain (`clients`).

    The server there may not list it yet. The domain that it comes from does.
    """
    for client in [c for c in clients if c.living][:1]:
        spaces = [client, *(c for c in draft.state.spaces_of(client.id.process) if c.living)]
        grounds = next((c for c in spaces if draft.state.is_member(c)), client)
        why = "the client caused the fault from which other clients fail over"
        kill_by_policy(draft, grounds, why, fault=True)


def named(draft: Draft, domain: str, process: ProcessInstance) -> None:
    """Record an offender that a late sign names after it was told to move with the others, and evict it."""
    for record in reversed(draft.state.failovers):
        if record.domain == domain and any(f.process == process and f.outcome in LEFT for f in record.fates):
            revise(
                draft, record, process, why=f"{CAUSED_FAULT}, which was known only after it was told to move"
            )
            if draft.state.policy.evict_offender:
                # At once: its work runs in the domain to which the others have moved.
                there = [c for c in draft.state.spaces_of(process) if c.id.domain == record.to]
                _kill_in_domain(draft, there)
            return


def forget_absent(draft: Draft) -> None:
    """Drop participants of an earlier daemon that are no longer clients."""
    for participant in tuple(draft.state.members.values()):
        if not participant.connected and not any(
            c.living for c in draft.state.spaces_of(participant.process)
        ):
            draft.drop_participant(participant.process)


def link(draft: Draft, domain: str, fault: int) -> None:
    """Enter the number of a fault record that was made after the record of its fail-over."""
    for record in reversed(draft.state.failovers):
        if record.domain == domain and record.fault is None and record.at == draft.now:
            rewrite(draft, replace(record, fault=fault))
            return
