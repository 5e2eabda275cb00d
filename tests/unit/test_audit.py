"""The audit log: fields of a line, and how many lines refusals cause."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from mpsd.base import audit
from mpsd.base.model import Requester


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as found:
        yield found


def requester(uid: int = 7) -> Requester:
    return Requester(uid, 8, 9, "/user.slice")


def test_a_line_names_its_requester_and_marks_claims(lines: list[Any]) -> None:
    audit.record("kill", "sent", requester(), pid=3, fault=None, proof=(), reason="asked", uid=0)
    audit.record("freeze", "sent", pid=3)
    first, second = lines
    assert first == {
        "event": "audit",
        "logger": "mpsd.audit",
        "log_level": "warning",
        "action": "kill",
        "outcome": "sent",
        "by": "peer",
        "peer_uid": 7,
        "peer_gid": 8,
        "claimed_pid": 9,
        "claimed_cgroup": "/user.slice",
        "pid": 3,
        "uid": 0,
        "reason": "asked",
    }
    assert second["by"] == "policy" and "peer_uid" not in second


def test_refusals_cause_one_line_a_minute_for_each_user_and_operation(lines: list[Any]) -> None:
    now, asked = [0.0], []
    refusals = audit.Refusals(lambda: now[0])

    def seen() -> Requester:
        asked.append(now[0])
        return requester()

    for _ in range(100):
        refusals.refuse(7, "drain", seen, "no")
    refusals.refuse(7, "kill", seen, "no")
    refusals.refuse(8, "drain", seen, "no")
    assert [(line["operation"], line.get("suppressed")) for line in lines] == [
        ("drain", None),
        ("kill", None),
        ("drain", None),
    ]
    assert len(asked) == 3, "only a line needs the requester"
    lines.clear()
    now[0] = audit.REFUSALS_S
    refusals.refuse(7, "drain", seen, "no")
    refusals.flush()
    (line,) = lines
    assert (line["peer_uid"], line["operation"], line["suppressed"]) == (7, "drain", 99)
    lines.clear()
    now[0] += audit.REFUSALS_S
    refusals.flush()
    assert [line["suppressed"] for line in lines] == [1]
    now[0] += audit.REFUSALS_S
    refusals.flush()
    refusals.refuse(7, "drain", seen, "no")
    assert len(lines) == 2 and "suppressed" not in lines[1]


def test_many_users_cause_a_bounded_number_of_lines(lines: list[Any]) -> None:
    now = [0.0]
    refusals = audit.Refusals(lambda: now[0])
    for uid in range(10_000):
        refusals.refuse(uid, "drain", requester, "no")
    assert len(lines) == audit.REFUSALS_KEPT + 1
    lines.clear()
    now[0] = audit.REFUSALS_S
    refusals.flush()
    (line,) = lines
    assert line["suppressed"] == 10_000 - audit.REFUSALS_KEPT - 1
