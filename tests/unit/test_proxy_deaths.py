"""The verdict on programs that were killed with memory in the vault."""

from __future__ import annotations

from typing import Any

import pytest

from faultinject.campaigns.proxy.deaths import (
    Batch,
    Deaths,
    judge,
    verdict,
)
from faultinject.registry.verdicts import Verdict

FINE = {"done": True, "steps": 100, "wrong": 0}


def seen(*batches: Batch, **changes: Any) -> dict[str, Any]:
    found = Deaths(8, list(batches) or [Batch(4, 4, 0.1), Batch(4, 3, 0.2)])
    found.survivors = {"survivor-plain": FINE, "survivor-proxied": FINE}
    found.held_at_end = 0
    return found.data() | changes


def test_deaths_that_leave_nothing_are_valid() -> None:
    assert verdict(judge(seen())) is Verdict.VALID


@pytest.mark.parametrize(
    ("facts", "expected", "text"),
    [
        (seen(Batch(4, 4, 0.1), Batch(4, 4, None, "3 pieces in the vault")), "invalid", "batch 2: 3 pieces"),
        (seen(held_at_end=1), "invalid", "1 segments in the vault at the end"),
        (seen(Batch(8, 0, 0.1)), "invalid", "none of them had memory"),
        (seen(Batch(8, 7, 0.1, early=["victim-2: 805"])), "invalid", "batch 1: victim-2: 805"),
        (seen(Batch(8, 7, 0.1, early=[f"v{i}" for i in range(5)])), "invalid", "v2; and 2 more"),
        (seen(faults=["fault 1: the server ended"]), "invalid", "the server ended"),
        (seen(Batch(8, 3, 0.1)), "unknown", "only 3 of 8 had memory"),
        (seen(Batch(4, 4, 0.1)), "unknown", "only 4 of 8 were killed"),
        (seen(failure="no domain"), "unknown", "no domain"),
        (seen(survivors={"s": {**FINE, "wrong": 1}}), "invalid", "'wrong': 1"),
        (seen(survivors={"s": {**FINE, "done": False}}), "invalid", "'done': False"),
        (seen(survivors={}), "unknown", "there was no survivor"),
    ],
)
def test_what_is_left_harmed_or_not_shown_is_said(facts: dict[str, Any], expected: str, text: str) -> None:
    findings = judge(facts)
    assert verdict(findings).value == expected
    assert any(text in f.text for f in findings)
