"""Records of guard hits: one per offending client and period, revised as more is known, at a bounded rate.

Guard hits are kept apart from faults: they share no signs with other faults, and take no domain out of
service.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from mpsd.base.model import ProcessInstance
from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, Record
from mpsd.core.faults import attribution as at
from mpsd.core.faults import taxonomy
from mpsd.core.faults.records import FaultRecord, HitFacts, HitOutcome
from mpsd.core.state import POLICY, AccessCount, DomainState, State

HITS_KEPT = 64
# A further hit of the same client within this time [s] raises the count of its record.
QUIET_S = 60.0
# Shortest time [s] between two revisions that differ in the count alone; it grows with the record's age.
TELL_S = 1.0
_DONE = (HitOutcome.EVICTED, HitOutcome.ENDED)


def find(state: State, number: int) -> FaultRecord | None:
    return next((r for r in state.hits if r.id == number), None)


def open_record(
    state: State, process: ProcessInstance, now: float, *, living: bool = True
) -> FaultRecord | None:
    """Return the record that another hit of this process belongs to.

    `living` false: also a record with a final outcome.
    """
    own = (r for r in reversed(state.hits) if _offender(r) == process)
    fitting = (r for r in own if not living or _facts(r).outcome not in _DONE)
    return next((r for r in fitting if _is_retained(state, r, now)), None)


def _offender(record: FaultRecord) -> ProcessInstance | None:
    return record.offender.id.process if record.offender else None


def _facts(record: FaultRecord) -> HitFacts:
    assert record.hit is not None
    return record.hit


def put(draft: Draft, record: FaultRecord) -> FaultRecord:
    """Keep the record for later revisions, written or not."""
    others = [r for r in draft.state.hits if r.id != record.id]
    while len(others) >= HITS_KEPT:
        others.remove(_least_needed(others))
    draft.state = replace(draft.state, hits=tuple(sorted((*others, record), key=lambda r: r.id)))
    return record


def _least_needed(records: Sequence[FaultRecord]) -> FaultRecord:
    """Return the record to drop first.

    Finished records go before unfinished ones, then those of the user with most records, then the oldest.
    """
    of_user = Counter(_user(r) for r in records)
    return max(records, key=lambda r: (_facts(r).outcome in _DONE, of_user[_user(r)], -r.id))


def _user(record: FaultRecord) -> int | None:
    return record.offender.facts.uid if record.offender else None


def write(draft: Draft, record: FaultRecord) -> None:
    facts = _facts(record)
    record = replace(
        record,
        revision=record.revision + 1,
        hit=replace(facts, told=facts.count),
        action=_action(record),
    )
    draft.emit(Record(put(draft, record)))


def _action(record: FaultRecord) -> str:
    assert record.offender is not None
    pid, outcome = record.offender.id.process.pid, _facts(record).outcome
    if outcome is HitOutcome.FROZEN:
        return f"inspect it (gdb, cuda-gdb), then mpsd-ctl kill {pid}, or kill -CONT {pid} to continue it"
    if outcome in (HitOutcome.ABSORBED, HitOutcome.WITHHELD):
        return f"its results are wrong: evict it with mpsd-ctl kill {pid}; {_advice(record)}"
    return _advice(record)


def _advice(record: FaultRecord) -> str:
    return taxonomy.CLASSES[record.fault_class].action


def write_count_later(draft: Draft, record: FaultRecord) -> None:
    """Write a new count later. The interval between such revisions grows with the age of the record."""
    facts = _facts(record)
    if facts.telling:
        put(draft, record)
        return
    put(draft, replace(record, hit=replace(facts, telling=True)))
    draft.emit(ArmTimer("hits", str(record.id), max(TELL_S, draft.now - record.at)))


def write_count(draft: Draft, number: int) -> None:
    record = find(draft.state, number)
    if record is None:
        return
    facts = _facts(record)
    record = replace(record, hit=replace(facts, telling=False))
    if facts.count != facts.told:
        write(draft, record)
    else:
        put(draft, record)


def count_accesses(draft: Draft, process: ProcessInstance, by: int, *, recorded: bool) -> None:
    before = draft.state.tallies.get(process, AccessCount(0, draft.now))
    after = AccessCount(before.count + by, draft.now if recorded else before.recorded)
    draft.state = replace(draft.state, tallies=MappingProxyType({**draft.state.tallies, process: after}))


def is_suppressed(state: State, process: ProcessInstance, now: float) -> bool:
    """Return whether a hit is only counted, because its record was recently dropped for newer ones."""
    known = state.tallies.get(process)
    return known is not None and now - known.recorded < QUIET_S


def ended(draft: Draft, process: ProcessInstance) -> None:
    """Record the end of a process in its hits: the outcome, and whether its domain was unharmed."""
    evictions = [c.eviction for c in draft.state.spaces_of(process) if c.eviction is not None]
    tallies = {p: t for p, t in draft.state.tallies.items() if p != process}
    draft.state = replace(draft.state, tallies=MappingProxyType(tallies))
    for record in draft.state.hits:
        facts = _facts(record)
        if _offender(record) != process or facts.outcome in _DONE:
            continue
        sent = [e.killed for e in evictions if e.killed is not None]
        put_out = facts.outcome is HitOutcome.EVICTING or any(e.requester != POLICY for e in evictions)
        outcome = HitOutcome.EVICTED if put_out and evictions else HitOutcome.ENDED
        until = sent[0] if sent and outcome is HitOutcome.EVICTED else draft.now
        facts = replace(
            facts,
            outcome=outcome,
            outcome_s=max(0.0, until - record.at),
            alone=is_domain_unharmed(draft, record),
        )
        write(draft, replace(record, hit=facts))


def is_domain_unharmed(draft: Draft, record: FaultRecord) -> bool:
    """Return whether its domain has had no fault since the hit."""
    assert record.domain is not None
    domain = draft.state.domains.get(record.domain)
    sound = domain is not None and domain.state not in (DomainState.FAULTED, DomainState.HEADLESS)
    return sound and not any(r.at >= record.at for r in at.open_for(draft.state, record.domain, draft.now))


def forget_old(draft: Draft) -> None:
    """Drop records that cannot be revised any more."""
    retained = tuple(r for r in draft.state.hits if _is_retained(draft.state, r, draft.now))
    if len(retained) != len(draft.state.hits):
        draft.state = replace(draft.state, hits=retained)


def _is_retained(state: State, record: FaultRecord, now: float) -> bool:
    facts, process = _facts(record), _offender(record)
    assert process is not None
    lives = any(c.living for c in state.spaces_of(process))
    waits = lives and facts.outcome in (HitOutcome.EVICTING, HitOutcome.FROZEN)
    return waits or now - facts.last <= QUIET_S
