"""What became of programs that were told to move: the records of fail-over, revised as more is known."""

from __future__ import annotations

from dataclasses import replace

from mpsd.core.draft import Draft
from mpsd.core.effects import RecordFailover
from mpsd.core.standby import FailoverRecord, Outcome, Standing
from mpsd.core.state import Client, State
from mpsd.model import ProcessInstance

FINAL = frozenset({Outcome.MOVED, Outcome.STAYED, Outcome.ENDED})
LEFT = (Outcome.TOLD, Outcome.MOVED, Outcome.SILENT)


def revise(draft: Draft, record: FailoverRecord, process: ProcessInstance, **changes: object) -> None:
    """Write a new revision of a record with what became of one program."""
    fates = tuple(
        replace(f, **changes) if f.process == process else f  # type: ignore[arg-type]
        for f in record.fates
    )
    if fates != record.fates:
        rewrite(draft, replace(record, fates=fates))


def rewrite(draft: Draft, record: FailoverRecord) -> None:
    """Write it as its next revision."""
    draft.emit(RecordFailover(draft.put_failover(replace(record, revision=record.revision + 1))))


def last_of(state: State, process: ProcessInstance) -> FailoverRecord | None:
    """The newest record with this program in it."""
    return next(
        (r for r in reversed(state.failovers) if any(f.process == process for f in r.fates)),
        None,
    )


def latest_of(state: State, process: ProcessInstance) -> FailoverRecord | None:
    """The same, if it still waits for a word of this program."""
    record = last_of(state, process)
    final = record is None or any(f.process == process and f.outcome in FINAL for f in record.fates)
    return None if final else record


def is_moving(state: State, process: ProcessInstance) -> bool:
    """It was told to move, and its time to answer is not over."""
    record = latest_of(state, process)
    fates = record.fates if record is not None else ()
    return any(f.process == process and f.outcome is Outcome.TOLD for f in fates)


def comes(state: State, client: Client) -> bool:
    """Its process was told to move there, and its time to say that it has is not over."""
    process = client.id.process
    member = state.members.get(process)
    moving = member is not None and member.standing is Standing.MOVING
    there = member is not None and client.id.domain == f"d{member.generation}"
    return moving and there and is_moving(state, process)


def timed(draft: Draft, process: ProcessInstance, name: str, **changes: object) -> None:
    """Note that this step of its move is now: ms since it was told, as `name` of its newest record."""
    record = last_of(draft.state, process)
    if record is None:
        return
    fate = next(f for f in record.fates if f.process == process)
    told = record.at + (fate.told_ms or 0.0) / 1e3
    revise(draft, record, process, **{name: round((draft.now - told) * 1e3, 3)}, **changes)


def was_left(state: State, domain: str) -> bool:
    """Whether a program has moved out of it."""
    fates = (f for record in state.failovers if record.domain == domain for f in record.fates)
    return any(f.outcome is Outcome.MOVED for f in fates)


def left_lately(state: State, pid: int, now: float) -> str | None:
    """The domain that a program with this pid has just been told to leave.

    A late sign that names the pid is of that one, not of where it has gone. A domain that was well when it
    was to be left has none.
    """
    for record in reversed(state.failovers):
        if now - record.at > state.policy.evidence_window_s:
            return None
        if not record.planned and any(f.process.pid == pid and f.outcome in LEFT for f in record.fates):
            return record.domain
    return None


def was_told(state: State, domain: str | None, process: ProcessInstance, when: float) -> bool:
    """Whether this program had been told to move out of that domain (None: of any) by then.

    Who was to leave a domain that is well ends its work there first: what faults there then is its own doing.
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
