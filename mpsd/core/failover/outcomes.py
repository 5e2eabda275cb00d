"""Outcomes of moves in the records of fail-over, revised as more is known."""

from __future__ import annotations

from dataclasses import replace

from mpsd.base.model import ProcessInstance
from mpsd.core.draft import Draft
from mpsd.core.effects import RecordFailover
from mpsd.core.failover.participants import FailoverRecord, Outcome, Standing
from mpsd.core.state import Client, State

FINAL = frozenset({Outcome.MOVED, Outcome.STAYED, Outcome.ENDED})
LEFT = (Outcome.TOLD, Outcome.MOVED, Outcome.SILENT)


def revise(draft: Draft, record: FailoverRecord, process: ProcessInstance, **changes: object) -> None:
    """Write a new revision of a record with changes to the entry of one program."""
    entries = tuple(
        replace(f, **changes) if f.process == process else f  # type: ignore[arg-type]
        for f in record.fates
    )
    if entries != record.fates:
        rewrite(draft, replace(record, fates=entries))


def rewrite(draft: Draft, record: FailoverRecord) -> None:
    """Write a record as its next revision."""
    draft.emit(RecordFailover(draft.put_failover(replace(record, revision=record.revision + 1))))


def last_of(state: State, process: ProcessInstance) -> FailoverRecord | None:
    """Return the newest record that contains this program."""
    return next(
        (r for r in reversed(state.failovers) if any(f.process == process for f in r.fates)),
        None,
    )


def latest_of(state: State, process: ProcessInstance) -> FailoverRecord | None:
    """Return the newest record that contains this program, if it still waits for the program's report."""
    record = last_of(state, process)
    final = record is None or any(f.process == process and f.outcome in FINAL for f in record.fates)
    return None if final else record


def unreported_of(state: State, process: ProcessInstance) -> FailoverRecord | None:
    """Return the newest record that contains this program, if the program has not reported its move.

    A program that has moved without mpsd says so by its HELLO, and its report may follow.
    """
    record = last_of(state, process)
    entries = record.fates if record is not None else ()
    arrived = any(f.process == process and f.outcome is Outcome.MOVED and f.held_ms is None for f in entries)
    return record if arrived else latest_of(state, process)


def is_moving(state: State, process: ProcessInstance) -> bool:
    """Return whether the process was told to move and its time to answer is not over."""
    record = latest_of(state, process)
    entries = record.fates if record is not None else ()
    return any(f.process == process and f.outcome is Outcome.TOLD for f in entries)


def is_coming(state: State, client: Client) -> bool:
    """Return whether this context belongs to a process that was told to move there and may still answer."""
    process = client.id.process
    participant = state.members.get(process)
    moving = participant is not None and participant.standing is Standing.MOVING
    is_there = participant is not None and client.id.domain == f"d{participant.generation}"
    return moving and is_there and is_moving(state, process)


def set_time(draft: Draft, process: ProcessInstance, name: str, **changes: object) -> None:
    """Set field `name` of the program's newest entry to now, in ms since the program was told to move."""
    record = last_of(draft.state, process)
    if record is None:
        return
    entry = next(f for f in record.fates if f.process == process)
    told_at = record.at + (entry.told_ms or 0.0) / 1e3
    revise(draft, record, process, **{name: round((draft.now - told_at) * 1e3, 3)}, **changes)


def was_moved_out_of(state: State, domain: str) -> bool:
    """Return whether a program has moved out of this domain."""
    entries = (f for record in state.failovers if record.domain == domain for f in record.fates)
    return any(f.outcome is Outcome.MOVED for f in entries)


def recently_left_domain(state: State, pid: int, now: float) -> str | None:
    """Return the domain that a program with this pid has just been told to leave, because of a fault.

    A late sign that names the pid belongs to that domain, not to the new one. A planned move leaves a healthy
    domain, so no sign can belong to it.
    """
    for record in reversed(state.failovers):
        if now - record.at > state.policy.evidence_window_s:
            return None
        if not record.planned and any(f.process.pid == pid and f.outcome in LEFT for f in record.fates):
            return record.domain
    return None


def was_told_to_leave(state: State, domain: str | None, process: ProcessInstance, when: float) -> bool:
    """Return whether this program had been told by `when` to move out of the domain (None: out of any).

    A program told to leave a healthy domain ends its work there first, so a fault there is then its own.
    """
    return any(
        f.process == process
        and f.outcome in LEFT
        and not (record.planned and (domain is not None or f.outcome is Outcome.SILENT))
        and record.at + (f.told_ms or 0.0) / 1e3 <= when
        for record in state.failovers
        if domain in (None, record.domain)
        for f in record.fates
    )
