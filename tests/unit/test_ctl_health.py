"""The exit status of `mpsd-ctl status`."""

from __future__ import annotations

from typing import Any

import pytest

from mpsd.base.conditions import Code, Condition
from mpsd.ctl.health import health

DOMAIN = {"id": "d1", "role": "active", "state": "active", "clients": 2}
CLIENT = {"state": "attached"}
UNREACHABLE = [Condition(Code.DOMAIN_UNREACHABLE, "d1", "/srv is closed").view()]


def view(conditions: Any = (), domain: Any = (), client: Any = ()) -> dict[str, Any]:
    rows = {"domains": [DOMAIN | dict(domain)], "clients": [CLIENT | dict(client)]}
    return rows | {"conditions": list(conditions)}


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (view(), 0),
        (view([Condition(Code.GUARD_SILENT, "low").view()]), 0),
        (view([Condition(Code.GPU_DRAINED, "GPU-a").view()]), 0),
        (view([Condition(Code.GPU_LOST, "GPU-a", "Xid 79").view()]), 10),
        (view([Condition(Code.CLIENTS_LOST, "d0", count=2).view()]), 10),
        (view(domain={"state": "faulted"}), 11),
        (view(domain={"state": "poisoned"}), 10),
        (view(domain={"state": "faulted", "role": "old"}), 0),
        (view(client={"state": "unprotected"}), 10),
        (view(UNREACHABLE), 11),
        (view(UNREACHABLE, domain={"state": "retired"}), 11),
        (view(UNREACHABLE, domain={"clients": 0}), 10),
        (view(UNREACHABLE, domain={"role": "spare"}), 10),
    ],
)
def test_exit_status_of_a_status(shown: dict[str, Any], expected: int) -> None:
    assert health(shown) == expected


@pytest.mark.parametrize(
    ("problems", "expected"),
    [([], 0), (["outer guard is silent: low"], 0), (["the kernel log is not readable"], 10)],
)
def test_a_daemon_of_an_earlier_release_sends_texts_alone(problems: list[str], expected: int) -> None:
    shown = view() | {"problems": problems}
    del shown["conditions"]
    assert health(shown) == expected
