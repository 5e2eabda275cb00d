"""Records of fail-over across a restart of mpsd.

The next daemon takes the newest records of its predecessor over, under their numbers. A program that moved
without a daemon says so only by the generation in its HELLO: the record of that move, or a new record, says
that the program has moved.
"""

from __future__ import annotations

from dataclasses import replace

from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, RecordFailover
from mpsd.core.failover import reports as mev
from mpsd.core.failover.outcomes import FINAL, revise, rewrite
from mpsd.core.failover.participants import (
    NOT_CONNECTED,
    FailoverRecord,
    Outcome,
    Participant,
    ParticipantOutcome,
)

UNSEEN = "moved without mpsd"
"""Trigger of the record of a move that no daemon saw."""
_WITHOUT_DAEMON = "the client moved without mpsd"
_OPEN = (Outcome.TOLD, Outcome.SILENT)


def on_restored(draft: Draft, event: mev.FailoverRestored) -> None:
    """Take over a record of an earlier daemon."""
    record = event.record
    if any(r.id == record.id for r in draft.state.failovers):
        draft.count("adoptions_ignored")
        return
    draft.state = replace(draft.state, next_failover=max(draft.state.next_failover, record.id + 1))
    draft.put_failover(record)
    fates = tuple(
        replace(f, outcome=Outcome.ENDED) if f.process in event.gone and f.outcome in _OPEN else f
        for f in record.fates
    )
    if fates != record.fates:
        rewrite(draft, replace(record, fates=fates))


def arm_waits(draft: Draft) -> None:
    """Wait for the answers of programs that the earlier daemon told to move."""
    for record in draft.state.failovers:
        if any(f.outcome is Outcome.TOLD for f in record.fates):
            draft.emit(ArmTimer("failover-wait", str(record.id), draft.state.policy.move_wait_s))


def note_arrival(draft: Draft, event: mev.MemberCame, before: Participant | None) -> None:
    """Record that a program has moved, if its HELLO says so and no report of the move has come.

    `before`: the participant as it was known before its HELLO.
    """
    participant = draft.state.members[event.process]
    if not event.generation or participant.home != f"d{event.generation}":
        return
    for record in reversed(draft.state.failovers):
        entry = next((f for f in record.fates if f.process == event.process), None)
        if entry is None or record.generation != event.generation:
            continue
        if entry.outcome not in FINAL:
            # An offender was not told for another reason, which the record keeps.
            refused = _WITHOUT_DAEMON if entry.why == NOT_CONNECTED else entry.why
            why = refused if entry.outcome is Outcome.NOT_TOLD else ""
            revise(draft, record, event.process, outcome=Outcome.MOVED, why=why)
        return
    # Only the first HELLO to this daemon: a program cannot fill the journal.
    if before is not None and not before.heard and before.home not in (None, participant.home):
        _record(draft, participant, before.home or "")


def _record(draft: Draft, participant: Participant, left: str) -> None:
    """Write a record of a move that no daemon saw, or add the program to that of an earlier arrival."""
    facts = next((c.facts for c in draft.state.spaces_of(participant.process)), None)
    command = facts.command if facts is not None else ""
    entry = ParticipantOutcome(participant.process, participant.uid, command, Outcome.MOVED)
    for record in reversed(draft.state.failovers):
        if (record.trigger, record.domain, record.to) == (UNSEEN, left, participant.home):
            rewrite(draft, replace(record, fates=(*record.fates, entry)))
            return
    here = draft.state.domains[participant.home or ""]
    former = draft.state.domains.get(left)
    number = draft.state.next_failover
    draft.state = replace(draft.state, next_failover=number + 1)
    record = FailoverRecord(
        number,
        draft.now,
        here.slot,
        left,
        here.id,
        here.generation,
        UNSEEN,
        False,
        former.last_fault if former is not None else None,
        0.0,
        None,
        (entry,),
    )
    draft.put_failover(record)
    draft.emit(RecordFailover(record))
    draft.count("failovers")
