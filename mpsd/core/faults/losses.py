"""Losses of a fault: which clients lost their GPU work, which fail over instead, what would have saved them.

A client that was told to fail over is no victim unless it stays, gives no answer, or ends before its answer.
Its pause is known once it reports that its calls go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from mpsd.base.model import FailoverMode, ProcessInstance, SnapshotBudget
from mpsd.base.protection import ProtectionLevel
from mpsd.core.failover.participants import FailoverRecord, Outcome, ParticipantOutcome, Turn
from mpsd.core.faults import taxonomy
from mpsd.core.faults.records import FaultRecord, MovedClient, Party
from mpsd.core.state import State

_Entry = tuple[FailoverRecord, ParticipantOutcome]
_LEFT_FOR: Mapping[SnapshotBudget, str] = {
    SnapshotBudget.MEMORY: "for the memory budget",
    SnapshotBudget.TIME: "for the time budget",
    SnapshotBudget.BY_HAND: "switched off by hand",
}
_GOES = frozenset({Outcome.TOLD, Outcome.MOVED})


def settle(state: State, record: FaultRecord) -> FaultRecord:
    """Return the record with each client of its domain under `victims` or under `moved`, as far as known."""
    entries = _entries(state, record)
    offender = record.offender.id.process if record.offender else None
    known = {m.party.id.process: m for m in record.moved}
    parties = (*record.victims, *(m.party for m in record.moved), *_movers(state, record, entries))
    moved: dict[ProcessInstance, MovedClient] = {}
    lost: dict[Party, None] = {}
    for party in parties:
        process, entry = party.id.process, entries.get(party.id.process)
        if process == offender:
            continue
        if entry is None and process in known:
            moved[process] = known[process]
        elif entry is not None and entry[1].outcome in _GOES:
            moved[process] = _moved(state, party, entry, known.get(process))
        elif record.fault_class not in taxonomy.HARMLESS:
            lost[party] = None
    ordered = sorted(moved.values(), key=lambda m: m.party.id)
    return replace(record, victims=tuple(p for p in lost if p.id.process not in moved), moved=tuple(ordered))


def _entries(state: State, record: FaultRecord) -> Mapping[ProcessInstance, _Entry]:
    """Return the newest entry of each program in the fail-overs out of the record's domain."""
    here = (r for r in state.failovers if r.domain == record.domain)
    return {fate.process: (r, fate) for r in here for fate in r.fates}


def _movers(
    state: State, record: FaultRecord, entries: Mapping[ProcessInstance, _Entry]
) -> tuple[Party, ...]:
    """Return the programs that move for a fault without victims: they leave a domain that did not fault."""
    if record.fault_class not in taxonomy.HARMLESS:
        return ()
    movers = {p for p, (r, _) in entries.items() if r.fault == record.id}
    clients = (c for c in state.clients.values() if c.id.process in movers and c.id.domain == record.domain)
    return tuple(Party(c.id, c.facts) for c in sorted(clients, key=lambda c: c.id))


def _moved(state: State, party: Party, entry: _Entry, known: MovedClient | None) -> MovedClient:
    failover, fate = entry
    participant = state.members.get(fate.process)
    waits = participant is None or participant.turn is not Turn.NONE
    goes_on = fate.done_ms if fate.done_ms is not None or waits else fate.first_ms
    pause = known.pause_ms if known is not None else None
    if goes_on is not None and fate.outcome is Outcome.MOVED:
        pause = round(failover.decision_ms + (fate.told_ms or 0.0) + goes_on, 3)
    return MovedClient(party, pause, fate.why if fate.outcome is Outcome.MOVED else "")


def is_open(state: State, record: FaultRecord) -> bool:
    """Return whether a client of the record may still report its pause."""
    entries = _entries(state, record)
    waiting = {m.party.id.process for m in record.moved if m.pause_ms is None}
    return any(process in entries and process in state.members for process in waiting)


def remedy(state: State, record: FaultRecord) -> str:
    """Return how a higher protection level would have saved victims; empty if none would.

    Victims that are participants have that level already.
    """
    level = taxonomy.CLASSES[record.fault_class].level
    lost = {v.id.process for v in record.victims} - {*state.members, *_entries(state, record)}
    if level is None or not lost or _is_exclusive(state, record):
        return ""
    clients = "this client" if len(lost) == 1 else f"these {len(lost)} clients"
    reach = state.policy.reach.rank
    offender = record.offender
    unguarded = offender is not None and offender.id.process not in state.members
    if level is ProtectionLevel.GUARD and unguarded and reach >= level.rank:
        return (
            f'With protect = "guard" and its program under mpsd-run, the offender would have harmed no other '
            f"client: {clients} would have lost nothing"
        )
    if reach < ProtectionLevel.FAILOVER.rank:
        return ""
    setting = (
        'With protect = "failover" and mpsd-run' if _is_off(state) else "Under mpsd-run at level failover"
    )
    return f"{setting}, {clients} could have moved"


def departures(state: State, record: FaultRecord) -> str:
    """Return how many victims had left fail-over before the fault, and for which budget; empty if none."""
    entries = _entries(state, record)
    counts: Counter[SnapshotBudget] = Counter()
    for process in {v.id.process for v in record.victims}:
        participant, entry = state.members.get(process), entries.get(process)
        budget = entry[1].left if entry is not None else None
        if entry is None and participant is not None and participant.excess is not None:
            budget = participant.excess.budget
        if budget is not None:
            counts[budget] += 1
    parts = " and ".join(f"{counts[budget]} {text}" for budget, text in _LEFT_FOR.items() if counts[budget])
    return f"Lost clients that had left fail-over before: {parts} (mpsd-ctl failovers)" if parts else ""


def _is_off(state: State) -> bool:
    return state.policy.failover is FailoverMode.OFF


def _is_exclusive(state: State, record: FaultRecord) -> bool:
    """Return whether the domain's slot admits one server only, so that no client can fail over."""
    domain = state.domains.get(record.domain or "")
    slot = state.slots.get(domain.slot) if domain is not None else None
    return slot is not None and slot.exclusive
