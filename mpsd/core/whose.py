"""Whose code the exception was in from which a domain was lost, as the programs that move say.

An SM keeps where the warp was that had an exception, and programs that were clients of the lost server may
read it: each says whether that is code of its own (LOOKED, mpsd/failover/README.md). It is a claim of each
about itself. When everybody who was told to move has been heard, and one alone says that it was in its own
code, that one made the fault: it is named, and does not do its work again, and all others do theirs at once.
Where several say so (they were forked from one, so their code lies at the same addresses), or nothing is
kept, turns.py goes by what was said.
"""

from __future__ import annotations

from dataclasses import replace

from mpsd.core import attribution as at
from mpsd.core import failover, fates, turns, writing
from mpsd.core import memberevents as mev
from mpsd.core.draft import Draft
from mpsd.core.records import Evidence, FaultRecord, Source
from mpsd.core.standby import FailoverRecord, Outcome, Standing
from mpsd.core.state import State
from mpsd.model import Confidence, ProcessInstance, Whose

IN_ITS_CODE = "the exception was in its own code, by its own word, and no other program says so of itself"


def on_looked(draft: Draft, event: mev.MemberLooked) -> None:
    member = draft.state.members.get(event.process)
    if member is None or member.standing is not Standing.MOVING or member.generation != event.generation:
        draft.count("failover_words_ignored")
        return
    draft.put_member(replace(member, whose=event.whose))


def settle(draft: Draft, process: ProcessInstance) -> ProcessInstance | None:
    """This program has moved, or will not. Name who made the fault if that is known by now; who does not stay
    for it is answered."""
    record = fates.last_of(draft.state, process)
    if record is None or any(f.outcome is Outcome.TOLD for f in record.fates):
        return None
    claims = _claims(draft.state, record)
    fault = _unnamed(draft, record)
    # Of those who were there then: who has moved may be a client of that domain no more.
    there = (p for p in fault.suspects if p.id.process in claims) if fault is not None else iter(())
    party = next(there, None) if len(claims) == 1 else None
    if party is None or fault is None:
        return None
    offender = party.id.process
    known = replace(
        fault,
        offender=party,
        confidence=Confidence.LIKELY,
        suspects=(),
        victims=tuple(v for v in fault.victims if v.id.process != offender),
    )
    sign = Evidence(Source.PROCESS, draft.now, IN_ITS_CODE)
    writing.revise(draft, fault, at.add_evidence(known, sign))
    draft.count("failover_named_by_code")
    failover.named(draft, record.domain, offender)
    if not draft.state.policy.evict_offender:
        return None
    for fate in record.fates:
        # It is none of the others, so nobody waits for anybody.
        member = draft.state.members.get(fate.process)
        if member is not None:
            draft.put_member(replace(member, among=False, named=member.process == offender))
    turns.over(draft, offender)
    turns.all_at_once(draft, record.to)
    return offender


def _claims(state: State, record: FailoverRecord) -> list[ProcessInstance]:
    """Who says that it was its own code."""
    members = (state.members.get(f.process) for f in record.fates)
    return [m.process for m in members if m is not None and m.whose is Whose.OWN]


def _unnamed(draft: Draft, record: FailoverRecord) -> FaultRecord | None:
    faults = at.open_for(draft.state, record.domain, draft.now)
    return next((f for f in faults if f.offender is None and failover.is_a_kernels(f)), None)
