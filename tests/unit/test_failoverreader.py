"""Fail-over records read back from the journal: what is written is read, and what is malformed is skipped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from mpsd.base.model import ExceptionOwner, SnapshotBudget
from mpsd.core.draft import FAILOVERS_KEPT, FAILOVERS_MOST
from mpsd.core.failover.participants import FailoverRecord, Outcome, ParticipantOutcome
from mpsd.records.failoverreader import failover_of, restorable
from mpsd.records.recordtext import failover_json
from tests.support.core import process

ZERO = 1_790_000_000.0


def record(number: int = 1, outcome: Outcome = Outcome.MOVED, at: float = 50.25) -> FailoverRecord:
    entries = (
        ParticipantOutcome(process(10), 1000, "python a.py", outcome, told_ms=0.0),
        ParticipantOutcome(
            process(11),
            1001,
            "",
            Outcome.NOT_TOLD,
            "the client is not connected",
            True,
            0.5,
            1.0,
            2.0,
            3.5,
            4.0,
            5.0,
            6,
            7,
            ExceptionOwner.NO_SIGN,
            SnapshotBudget.MEMORY,
        ),
    )
    return FailoverRecord(number, at, "gpu0", "d1", "d2", 2, "fault", False, 4, 1.25, None, entries, 3)


def row(of: FailoverRecord) -> dict[str, Any]:
    return failover_json(of, ZERO, 7.5)


@pytest.mark.parametrize(
    "written",
    [
        *(record(outcome=outcome) for outcome in Outcome),
        replace(record(), to=None, generation=0, fault=None, fates=()),
    ],
)
def test_what_is_written_is_read(written: FailoverRecord) -> None:
    found = failover_of(row(written), ZERO)
    assert found.at == pytest.approx(written.at, abs=0.001)
    assert replace(found, at=written.at) == written


def test_a_record_of_a_release_without_turns_is_read() -> None:
    written = row(record())
    for entry in written["clients"]:
        for name in ("whose", "left", "turn_ms", "done_ms"):
            del entry[name]
    found = failover_of(written, ZERO)
    assert [f.whose for f in found.fates] == [ExceptionOwner.UNKNOWN] * 2 and found.fates[1].first_ms == 3.5


def client(changes: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    def change(found: dict[str, Any]) -> None:
        found["clients"][0].update(changes)

    return change


MALFORMED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no clients": lambda r: r.pop("clients"),
    "clients of another type": lambda r: r.update(clients={"pid": 1}),
    "a time without a meaning": lambda r: r.update(time="yesterday"),
    "a time of another type": lambda r: r.update(time=7),
    "a target without its number": lambda r: r.update(generation=0),
    "a truth as a number": lambda r: r.update(revision=True),
    "a number as a truth": lambda r: r.update(planned=0),
    "an unknown outcome": client({"outcome": "vanished"}),
    "an unknown owner": client({"whose": "both"}),
    "an unknown budget": client({"left": "patience"}),
    "a negative pid": client({"pid": -1}),
    "text for a time": client({"told_ms": "soon"}),
    "a client without a start time": client({"start_ticks": None}),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_row_is_skipped_with_a_log_line_and_the_others_are_read(name: str) -> None:
    bad = row(record(1, Outcome.TOLD))
    MALFORMED[name](bad)
    with capture_logs() as logs:
        found = restorable([bad, row(record(2, Outcome.TOLD))], ZERO, 100.0)
    assert [r.id for r in found] == [2]
    assert [(entry["event"], entry["id"]) for entry in logs] == [("cannot restore a fail-over record", 1)]


def test_nothing_of_an_earlier_boot_and_nothing_of_the_future_is_taken_over() -> None:
    rows = [row(record(1, Outcome.TOLD, at=-5.0)), row(record(2, Outcome.TOLD, at=200.0))]
    assert restorable(rows, ZERO, 100.0) == []


def test_the_newest_records_are_taken_over_and_of_earlier_ones_those_that_wait_for_an_answer() -> None:
    rows = [row(record(number, Outcome.TOLD if number == 3 else Outcome.MOVED)) for number in range(1, 41)]
    found = [r.id for r in restorable(rows, ZERO, 100.0)]
    assert found == [3, *range(41 - FAILOVERS_KEPT, 41)]
    many = [row(record(number, Outcome.TOLD)) for number in range(1, FAILOVERS_MOST + 50)]
    assert len(restorable(many, ZERO, 100.0)) == FAILOVERS_MOST
