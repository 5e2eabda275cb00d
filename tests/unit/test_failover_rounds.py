"""Which results a fail-over campaign counts as fail-overs, and which not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from faultinject.campaigns.failover.outcomes import Fault
from faultinject.campaigns.failover.rounds import NOT_RECORDED, Rounds
from mpsd.base.errors import DeadlineError


def rounds(monkeypatch: pytest.MonkeyPatch, *records: dict[str, Any]) -> Rounds:
    monkeypatch.setattr("faultinject.campaigns.failover.rounds.MOVED_S", 0.03)
    monkeypatch.setattr("faultinject.campaigns.failover.rounds.QUIET_S", 0.01)
    made = Rounds.__new__(Rounds)
    made._seen_failovers = 3
    client = SimpleNamespace(failovers=lambda: records)
    made._rig = SimpleNamespace(mpsd=SimpleNamespace(ask=lambda call: call(client)))  # type: ignore[assignment]
    return made


def record(number: int, outcome: str) -> dict[str, Any]:
    return {"id": number, "clients": [{"pid": 1, "uid": 0, "outcome": outcome}]}


def test_one_that_ended_is_told_without_whose_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rounds(monkeypatch, record(3, "moving"), record(4, "moved"))._await_record(0.0)
    assert found == {"id": 4, "clients": [{"pid": 1, "outcome": "moved"}]}


def test_one_that_does_not_end_is_not_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeadlineError, match="did not end"):
        rounds(monkeypatch, record(4, "moving"))._poll_record(0.0)


def test_none_is_a_failure_unless_the_offender_succeeded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = rounds(monkeypatch, record(3, "moved"))
    assert made._poll_record(0.0) is None
    with pytest.raises(DeadlineError, match="no fail-over"):
        made._await_record(0.0)
    said = SimpleNamespace(first_message=lambda what: SimpleNamespace(data={"code": 719}))
    with pytest.raises(DeadlineError, match=NOT_RECORDED):
        made._check_wait_succeeded(Fault("trap"), said)  # type: ignore[arg-type]
    assert made._check_wait_succeeded(Fault("trap", offender_code=0), None)
