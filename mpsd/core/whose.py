"""Whose code the exception was in from which a domain was lost, as the programs that move say.

An SM keeps where the warp was that had an exception, and programs that were clients of the lost server may
read it: each says whether that is code of its own (LOOKED, mpsd/failover/README.md). It is a claim of each
about itself. Where all clients of the domain were told to move and all have said so, one alone that it was
in its own code and all others that it was in somebody else's, that one made the fault: it is named, and does
not do its work again, and all others do theirs at once. Where somebody says nothing (its look took too
long), or several say that it was theirs (they were forked from one, so their code lies at the same
addresses), turns.py goes by what was said.
"""

from __future__ import annotations

from dataclasses import replace

from mpsd.core import attribution as at
from mpsd.core import failover, fates, turns, writing
from mpsd.core import memberevents as mev
from mpsd.core.draft import Draft
from mpsd.core.records import Evidence, FaultRecord, Source
from mpsd.core.standby import FailoverRecord, Fate, Outcome, Standing, Turn
from mpsd.model import Again, Confidence, ProcessInstance, Whose

IN_ITS_CODE = "the exception was in its own code"


def on_looked(draft: Draft, event: mev.MemberLooked) -> None:
    member = draft.state.members.get(event.process)
    record = fates.latest_of(draft.state, event.process)
    moves = member is not None and member.standing is Standing.MOVING and member.again is Again.IN_TURN
    if member is None or record is None or not moves or member.generation != event.generation:
        draft.count("failover_words_ignored")
        return
    draft.put_member(replace(member, whose=event.whose))
    fates.revise(draft, record, event.process, whose=event.whose)


def settle(draft: Draft, process: ProcessInstance) -> None:
    """This program has moved, and waits for its turn where it has to. Name who made the fault if that is
    known now."""
    record = fates.last_of(draft.state, process)
    told = [f for f in record.fates if f.outcome is not Outcome.NOT_TOLD] if record is not None else []
    claims = [f.process for f in told if f.whose is Whose.OWN]
    member = draft.state.members.get(claims[0]) if len(claims) == 1 else None
    if record is None or member is None or not all(_denies(f, member.process) for f in told):
        return
    # Nobody who is not told was there (`among`), and who has had its turn has been cleared by that.
    if not (member.among and member.turn is Turn.WAITS and member.home == record.to):
        return
    fault = _unnamed(draft, record)
    # Of those who were there then: who has moved may be a client of that domain no more.
    there = (p for p in fault.suspects if p.id.process == member.process) if fault is not None else iter(())
    party = next(there, None)
    if party is None or fault is None:
        return
    offender = member.process
    known = replace(
        fault,
        offender=party,
        confidence=Confidence.LIKELY,
        suspects=(),
        victims=tuple(v for v in fault.victims if v.id.process != offender),
    )
    sign = Evidence(Source.PROCESS, draft.now, f"{IN_ITS_CODE}, by its own word, and in no other's by theirs")
    writing.revise(draft, fault, at.add_evidence(known, sign))
    draft.count("failover_named_by_code")
    failover.named(draft, record.domain, offender)
    if not draft.state.policy.evict_offender:
        return
    for fate in record.fates:
        # It is none of the others, so nobody waits for anybody.
        other = draft.state.members.get(fate.process)
        if other is not None:
            draft.put_member(replace(other, among=False, named=other.process == offender))
    turns.over(draft, offender)
    turns.all_at_once(draft, record.to)


def _denies(fate: Fate, offender: ProcessInstance) -> bool:
    return fate.process == offender or (fate.outcome is Outcome.MOVED and fate.whose is Whose.OTHERS)


def _unnamed(draft: Draft, record: FailoverRecord) -> FaultRecord | None:
    faults = at.open_for(draft.state, record.domain, draft.now)
    return next((f for f in faults if f.offender is None and failover.is_a_kernels(f)), None)
