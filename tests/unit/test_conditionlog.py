"""A condition begins once and ends once, in the log and as an event."""

from __future__ import annotations

import structlog

from mpsd.base.conditions import Code, Condition
from mpsd.records.conditionlog import ConditionLog

LOST_3, LOST_4 = (Condition(Code.CLIENTS_LOST, "d1", count=n) for n in (3, 4))
OTHER = Condition(Code.CLIENTS_LOST, "d2", count=1)
SILENT = Condition(Code.GUARD_SILENT, "low")


def test_each_condition_is_told_when_it_begins_and_when_it_ends() -> None:
    """Another count or cause is no other condition; another subject is."""
    told: list[tuple[Condition, bool]] = []
    found = ConditionLog(lambda condition, begins: told.append((condition, begins)))
    with structlog.testing.capture_logs() as logged:
        for seen in ([], [LOST_3, SILENT], [LOST_4, SILENT, OTHER], [OTHER], []):
            found.look(seen)
    assert told == [
        (LOST_3, True),
        (SILENT, True),
        (OTHER, True),
        (LOST_4, False),
        (SILENT, False),
        (OTHER, False),
    ]
    assert [(entry["event"], entry["code"], entry["log_level"]) for entry in logged] == [
        ("degraded", "clients-lost", "warning"),
        ("condition", "guard-silent", "info"),
        ("degraded", "clients-lost", "warning"),
        ("no longer degraded", "clients-lost", "info"),
        ("condition ended", "guard-silent", "info"),
        ("no longer degraded", "clients-lost", "info"),
    ]
    assert all(entry["reason"] and entry["remedy"] for entry in logged)


def test_two_conditions_of_one_subject_are_told_as_one() -> None:
    told: list[Condition] = []
    ConditionLog(lambda condition, _: told.append(condition)).look([LOST_3, LOST_4])
    assert told == [LOST_3]
