"""Offender by program counter: which participant's code contains the instruction that raised an exception.

An SM keeps the program counter of a warp that raised an exception. Clients of the faulted server may read it,
and each participant reports whether that address is in its own code (mpsd/docs/proxy-offender.md). A trap
leaves no address; its author has its error as no other program has it, which each participant reports, too.
Each report is a program's claim about itself. The offender is named if all clients of the domain were told to
move, all have reported, exactly one claims the exception, and all others deny it. The offender then does not
replay, and all others replay at once.

A client that takes no part, for instance because it has no proxy, denies a trap by its driver's SM queries: a
trap's author makes none, any other client makes many (queries.py).

If a report is missing because the search took too long, or if several programs claim the exception (forked
programs have their code at the same addresses), that is no proof: programs that claim it are suspects, and
replay in a trial domain (suspects.py).
"""

from __future__ import annotations

from dataclasses import replace

from mpsd.base.model import Confidence, ExceptionOwner, ProcessInstance, ReplayMode
from mpsd.core.draft import Draft
from mpsd.core.failover import outcomes, plan, queries, serialreplay, suspects
from mpsd.core.failover import reports as mev
from mpsd.core.failover.participants import FailoverRecord, Outcome, ParticipantOutcome, Standing, Turn
from mpsd.core.faults import attribution as at
from mpsd.core.faults import recording
from mpsd.core.faults.records import Evidence, FaultRecord, Source
from mpsd.core.state import State

IN_ITS_CODE = "the exception was in its own code"
HAD_ITS_ERROR = "its context had the error of a trap before it looked at the GPU"
_PROOF = {
    ExceptionOwner.OWN: f"{IN_ITS_CODE}, by its own report, and all others deny it",
    ExceptionOwner.FIRST: f"{HAD_ITS_ERROR}, by its own report, and all others deny it",
}
_DENIAL = {ExceptionOwner.OWN: ExceptionOwner.OTHERS, ExceptionOwner.FIRST: ExceptionOwner.NO_SIGN}
"""What all others must have found where one participant claims the exception."""


def on_found_code(draft: Draft, event: mev.MemberFoundCode) -> None:
    """Store the finding of a participant that is moving and will wait for its turn."""
    participant = draft.state.members.get(event.process)
    record = outcomes.latest_of(draft.state, event.process)
    moves = (
        participant is not None
        and participant.standing is Standing.MOVING
        and participant.again in (ReplayMode.IN_TURN, ReplayMode.AT_ONCE)
    )
    to = draft.state.domains.get(f"d{event.generation}")
    is_trial = to is not None and to.trial == event.process
    moves = moves and participant is not None and participant.generation == event.generation
    if participant is None or record is None or not moves or is_trial:
        # Into its trial domain it moves from a domain that has not faulted.
        draft.count("failover_words_ignored")
        return
    goes_on = event.goes_on and event.whose in suspects.DENIALS
    draft.put_participant(replace(participant, whose=event.whose, goes_on=goes_on))
    outcomes.revise(draft, record, event.process, whose=event.whose)


def on_queried(draft: Draft, event: mev.ClientQueried) -> None:
    """Note that a client denies the trap of its domain, and name the offender if it was the last one to."""
    domain = draft.state.domains.get(event.domain)
    remaining = (domain.without_denial if domain is not None else None) or frozenset()
    watched = domain is not None and queries.may_be_watched(draft.state, domain, event.process)
    if domain is None or event.process not in remaining or not watched:
        draft.count("failover_words_ignored")
        return
    draft.put_domain(replace(domain, without_denial=remaining - {event.process}))
    waits = (m for m in draft.state.members.values() if m.turn is Turn.WAITS)
    for participant in [m for m in waits if m.whose in suspects.CLAIMS]:
        record = outcomes.last_of(draft.state, participant.process)
        if record is not None and record.domain == event.domain:
            settle(draft, participant.process)


def settle(draft: Draft, process: ProcessInstance) -> None:
    """Name the offender if the reports allow it, now that this program has moved and waits for its turn."""
    record = outcomes.last_of(draft.state, process)
    told = [f for f in record.fates if f.outcome is not Outcome.NOT_TOLD] if record is not None else []
    claims = [f for f in told if f.whose in suspects.CLAIMS]
    participant = draft.state.members.get(claims[0].process) if len(claims) == 1 else None
    if record is None or participant is None or not all(_denies(f, claims[0]) for f in told):
        return
    fault = _unnamed(draft, record)
    is_first = claims[0].whose is ExceptionOwner.FIRST
    if fault is None or (is_first and at.may_have_logged_exception(draft.state, fault.gpus, record.at)):
        # Only a trap's author has its error like that, and after a trap there is no such line in the log.
        return
    # `among`: every client of the domain was told to move. A participant that had its turn is cleared.
    others_deny = is_first and _others_deny(draft.state, record, fault)
    all_deny = participant.among or others_deny
    if not (all_deny and participant.turn is Turn.WAITS and participant.home == record.to):
        return
    # Search the suspects of then: a program that has moved may no longer be a client of that domain.
    party = next((p for p in fault.suspects if p.id.process == participant.process), None)
    if party is None:
        return
    offender = participant.process
    known = replace(
        fault,
        offender=party,
        confidence=Confidence.LIKELY,
        suspects=(),
        victims=tuple(v for v in fault.victims if v.id.process != offender),
    )
    sign = Evidence(Source.PROCESS, draft.now, _PROOF[claims[0].whose])
    recording.revise(draft, fault, at.add_evidence(known, sign))
    draft.count("failover_named_by_code")
    plan.named(draft, record.domain, offender)
    if not draft.state.policy.evict_offender:
        return
    for entry in record.fates:
        # The offender is known, so no other participant waits for a turn.
        other = draft.state.members.get(entry.process)
        if other is not None:
            draft.put_participant(replace(other, among=False, named=other.process == offender))
    serialreplay.end_turn(draft, offender)
    serialreplay.replay_together(draft, record.to)


def _others_deny(state: State, record: FailoverRecord, fault: FaultRecord) -> bool:
    """Return whether this fault is a trap, and all clients that take no part in this fail-over denied it.

    They did not if a further participant was told to move later.
    """
    domain = state.domains.get(record.domain)
    of_fault = (r for r in state.failovers if r.domain == record.domain and r.fault is not None)
    is_only = all(r.id == record.id for r in of_fault)
    is_trap = fault.fault_class == "sm-trap"
    return is_only and is_trap and domain is not None and domain.without_denial == frozenset()


def _denies(entry: ParticipantOutcome, claim: ParticipantOutcome) -> bool:
    denies = entry.outcome is Outcome.MOVED and entry.whose is _DENIAL[claim.whose]
    return denies or entry.process == claim.process


def _unnamed(draft: Draft, record: FailoverRecord) -> FaultRecord | None:
    faults = at.open_for(draft.state, record.domain, draft.now)
    return next((f for f in faults if f.offender is None and plan.is_sm_exception(f)), None)
