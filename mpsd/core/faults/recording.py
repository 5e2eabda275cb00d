"""Writing fault records: each revision once, with advice for the operator."""

from __future__ import annotations

from dataclasses import replace

from mpsd.base.model import Confidence
from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, Record
from mpsd.core.faults import attribution as at
from mpsd.core.faults import losses, taxonomy
from mpsd.core.faults.records import Evidence, FaultRecord, LoggedProcess, Party
from mpsd.core.state import State

REVISION = "fault-revision"
REVISION_S = 0.5
"""Delay [s] of a revision that only adds an Xid or the outcome of a move: several come together."""


def write(draft: Draft, record: FaultRecord) -> None:
    """Write the record with its losses, its domain's count of refused clients, and current advice."""
    domain = draft.state.domains.get(record.domain) if record.domain else None
    refused = domain.refused if domain else record.refused
    record = replace(losses.settle(draft.state, record), refused=refused, due=False)
    record = draft.put_fault(replace(record, action=_action(draft, record)))
    draft.emit(Record(record))


def _action(draft: Draft, record: FaultRecord) -> str:
    notes = losses.remedy(draft.state, record), losses.departures(draft.state, record)
    told = [_next_steps(draft, record), *filter(None, notes)]
    return ". ".join(told) + ("." if len(told) > 1 else "")


def _next_steps(draft: Draft, record: FaultRecord) -> str:
    named = record.offender is not None
    advice = taxonomy.advice(record.fault_class, lost=bool(record.victims), named=named)
    domain = draft.state.domains.get(record.domain) if record.domain else None
    slot = draft.state.slots.get(domain.slot) if domain else None
    if domain is None or slot is None:
        return advice
    if slot.active not in (domain.id, None):
        return f"new clients go to domain {slot.active}; {advice}"
    return f"mpsd is starting a fresh domain; {advice}" if not slot.exclusive else advice


def revise(draft: Draft, old: FaultRecord, new: FaultRecord) -> None:
    """Write a new revision if a field that readers act on has changed.

    A further Xid is written a little later. Any other sign is only kept.
    """
    new = losses.settle(draft.state, new)
    told = ("fault_class", "offender", "logged", "confidence", "lies_there", "suspects", "victims")
    if any(getattr(old, name) != getattr(new, name) for name in told):
        write(draft, replace(new, revision=new.revision + 1))
    elif any(e.xid is not None for e in new.evidence if e not in old.evidence) or old.moved != new.moved:
        write_later(draft, new)
    else:
        draft.put_fault(new)


def join(draft: Draft, record: FaultRecord, *signs: Evidence) -> None:
    """Add signs that say nothing more about the class of the fault."""
    revise(draft, record, at.add_evidence(record, *signs))


def write_later(draft: Draft, record: FaultRecord) -> None:
    """Write a new revision soon, together with what is added to the record until then."""
    if not record.due:
        draft.emit(ArmTimer(REVISION, str(record.id), REVISION_S))
    draft.put_fault(replace(record, due=True))


def on_revision(draft: Draft, subject: str) -> None:
    """Write the revision that is due."""
    record = next((r for r in draft.state.open_faults if str(r.id) == subject), None)
    if record is not None and record.due:
        write(draft, replace(record, revision=record.revision + 1))


def follow_moves(draft: Draft, before: State) -> None:
    """Revise the open records whose clients have reported on their moves."""
    now = draft.state
    if now.failovers is before.failovers and now.members is before.members:
        return
    for record in now.open_faults:
        settled = losses.settle(now, record)
        if (settled.victims, settled.moved) != (record.victims, record.moved):
            write_later(draft, settled)


def may_change(state: State, record: FaultRecord, now: float) -> bool:
    """Return whether signs or reports of programs may still change the record."""
    late = now - record.last_sign <= at.join_window_s(state)
    waiting = (s for s in state.strays if s.gpu in record.gpus)
    near = any(abs(s.evidence.at - record.last_sign) <= at.join_window_s(state) for s in waiting)
    return record.due or late or near or at.is_open(state, record, now) or losses.is_open(state, record)


def deviceless(
    draft: Draft,
    fault_class: str,
    gpu: str | None,
    signs: tuple[Evidence, ...],
    *,
    offender: Party | None = None,
    logged: LoggedProcess | None = None,
    confidence: Confidence = Confidence.UNKNOWN,
) -> None:
    """Write a record that belongs to a GPU and to no domain."""
    number = draft.state.next_fault
    draft.state = replace(draft.state, next_fault=number + 1)
    draft.count("faults")
    gpus = (gpu,) if gpu else ()
    record = FaultRecord(number, draft.now, None, gpus, fault_class, offender, confidence, logged=logged)
    write(draft, at.add_evidence(replace(record, revision=1), *signs))
