"""Fail-over records of an earlier daemon, read back from the rows of the journal (recordtext.failover_json).

A row that is malformed is skipped with a log line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, TypeVar

import structlog

from mpsd.base.model import ExceptionOwner, ProcessInstance, SnapshotBudget
from mpsd.core.draft import FAILOVERS_KEPT, FAILOVERS_MOST
from mpsd.core.failover.participants import FailoverRecord, Outcome, ParticipantOutcome

log = structlog.get_logger("mpsd.records")

T = TypeVar("T")
_TIMES = ("told_ms", "held_ms", "fence_ms", "first_ms", "turn_ms", "done_ms")


def restorable(rows: Iterable[Mapping[str, Any]], wall_at_zero: float, now: float) -> list[FailoverRecord]:
    """Return the records that the next daemon takes over, oldest first.

    These are the newest ones of this boot, and earlier ones with a program that was told to move and has not
    answered. `rows`: oldest first. `wall_at_zero`: calendar seconds at monotonic zero. `now`: monotonic
    seconds.
    """
    listed = list(rows)[-FAILOVERS_MOST:]
    newest = listed[-FAILOVERS_KEPT:]
    found = []
    for row in listed:
        try:
            record = failover_of(row, wall_at_zero)
        except (ValueError, TypeError, KeyError) as error:
            log.warning("cannot restore a fail-over record", id=row.get("id"), reason=repr(error))
            continue
        is_open = any(f.outcome is Outcome.TOLD for f in record.fates)
        # The processes of an earlier boot have ended. The calendar may have been set back since.
        if 0 <= record.at <= now and (is_open or row in newest):
            found.append(record)
    return found


def failover_of(row: Mapping[str, Any], wall_at_zero: float) -> FailoverRecord:
    """Return the record of a row. Raises ValueError, TypeError or KeyError for a malformed row."""
    to, generation = _optional(row["to"], str), _number(row["generation"])
    if (to is None) != (generation == 0):
        raise ValueError(f"a move to {to}, generation {generation}")
    return FailoverRecord(
        _number(row["id"]),
        datetime.fromisoformat(_of(row["time"], str)).timestamp() - wall_at_zero,
        _of(row["slot"], str),
        _of(row["domain"], str),
        to,
        generation,
        _of(row["trigger"], str),
        _of(row["planned"], bool),
        _optional(row["fault"], int),
        float(_of(row["decision_ms"], int | float)),
        None,
        tuple(_fate(client) for client in _of(row["clients"], list)),
        _number(row["revision"]),
    )


def _fate(row: Mapping[str, Any]) -> ParticipantOutcome:
    # Records of earlier releases lack the findings and the times of turns.
    times = {name: _ms(row.get(name)) for name in _TIMES}
    left = _optional(row.get("left"), str)
    return ParticipantOutcome(
        ProcessInstance(_number(row["pid"]), _number(row["start_ticks"])),
        _number(row["uid"]),
        _of(row["command"], str),
        Outcome(row["outcome"]),
        _of(row["why"], str),
        _of(row["suspect"], bool),
        **times,
        restored_bytes=_number(row["restored_bytes"]),
        replayed=_number(row["replayed"]),
        whose=ExceptionOwner[_of(row.get("whose", "unknown"), str).upper()],
        left=SnapshotBudget[left.upper()] if left is not None else None,
    )


def _of(value: Any, kind: type[T] | Any) -> T | Any:
    """Return the value if it is of this type. True and False are no numbers."""
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise TypeError(f"{value!r} is no {getattr(kind, '__name__', kind)}")
    return value


def _optional(value: Any, kind: type[T]) -> T | None:
    found: T | None = None if value is None else _of(value, kind)
    return found


def _number(value: Any) -> int:
    number = int(_of(value, int))
    if number < 0:
        raise ValueError(f"{number} is negative")
    return number


def _ms(value: Any) -> float | None:
    return None if value is None else float(_of(value, int | float))
