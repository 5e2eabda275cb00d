"""Writing fault records: each revision once, with what an operator should do now."""

from __future__ import annotations

from dataclasses import replace

from mpsd.core import attribution as at
from mpsd.core import taxonomy
from mpsd.core.draft import Draft
from mpsd.core.effects import Record
from mpsd.core.records import Evidence, FaultRecord


def write(draft: Draft, record: FaultRecord) -> None:
    domain = draft.state.domains.get(record.domain) if record.domain else None
    refused = domain.refused if domain else record.refused
    record = draft.put_fault(replace(record, refused=refused, action=_action(draft, record)))
    draft.emit(Record(record))


def _action(draft: Draft, record: FaultRecord) -> str:
    advice = taxonomy.CLASSES[record.fault_class].action
    domain = draft.state.domains.get(record.domain) if record.domain else None
    slot = draft.state.slots.get(domain.slot) if domain else None
    if domain is None or slot is None:
        return advice
    if slot.active not in (domain.id, None):
        return f"new clients go to domain {slot.active}; {advice}"
    return f"a fresh domain is being started; {advice}" if not slot.exclusive else advice


def revise(draft: Draft, old: FaultRecord, new: FaultRecord) -> None:
    """Write a new revision where something a reader cares about has changed; else just remember."""
    told = ("fault_class", "offender", "confidence", "lies_there", "suspects", "victims")
    if any(getattr(old, name) != getattr(new, name) for name in told):
        write(draft, replace(new, revision=new.revision + 1))
    else:
        draft.put_fault(new)


def deviceless(draft: Draft, fault_class: str, gpu: str | None, signs: tuple[Evidence, ...]) -> None:
    """A record that belongs to a GPU and to no domain."""
    number = draft.state.next_fault
    draft.state = replace(draft.state, next_fault=number + 1)
    draft.count("faults")
    gpus = (gpu,) if gpu else ()
    record = FaultRecord(number, draft.now, None, gpus, fault_class, revision=1)
    write(draft, at.add_evidence(record, *signs))
