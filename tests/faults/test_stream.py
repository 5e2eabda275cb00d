"""Rising rates: their limit, the report of losses, and the simulated GPU's events from end to end."""

from __future__ import annotations

import pytest

from faultinject.campaigns import eventrates
from faultinject.campaigns.bench import stream_figures

pytestmark = pytest.mark.timeout(300)


class Lossy:
    """A source with a queue that drops whatever exceeds `room` in one offer."""

    unit = "events"

    def __init__(self, room: int, *, counted: bool) -> None:
        self._room, self._counted = room, counted
        self._made = self._taken = self._dropped = 0

    def offer(self, count: int) -> None:
        self._made += count
        fits = min(count, self._room)
        self._taken += fits
        self._dropped += count - fits if self._counted else 0

    def totals(self) -> tuple[int | None, int, int]:
        return self._made, self._taken, self._dropped


class Punctual(eventrates.Subscriber):
    """A subscriber that receives every event at once."""

    def __init__(self) -> None:
        self.lags: list[float] = []
        self.unheard = 0
        self.problem = ""

    def wait_for_new_event(self) -> None:
        self.lags.append(0.001)


def silent(line: str) -> None:
    pass


def test_what_a_queue_turned_away_ends_the_climb_and_is_counted() -> None:
    plan = eventrates.Plan(first=50, factor=100, steps=3, hold_s=0.1)
    steps = eventrates.raise_rate(Lossy(0, counted=True), Punctual(), plan, silent)
    assert len(steps) == 1
    assert steps[0].dropped > 0
    assert steps[0].missing == 0
    assert eventrates.sustained(steps) is None


def test_what_nobody_counted_is_missing() -> None:
    (step,) = eventrates.raise_rate(
        Lossy(0, counted=False), Punctual(), eventrates.Plan(first=100, steps=1, hold_s=0.1), silent
    )
    assert step.missing and not step.dropped
    assert not step.sustained


def test_a_rate_that_loses_nothing_is_sustained() -> None:
    fine = eventrates.Step(100, 100, 99, 0, 0, 0, lag_ms=5, late_ms=0)
    unknown = eventrates.Step(200, 200, 199, 0, None, 0, lag_ms=5, late_ms=0)
    assert fine.sustained and unknown.sustained
    assert eventrates.sustained([fine, unknown]) == 199
    (step,) = eventrates.raise_rate(
        Lossy(1 << 20, counted=True), Punctual(), eventrates.Plan(first=100, steps=1, hold_s=0.1), silent
    )
    assert step.taken > 0 and not (step.dropped or step.missing or step.unheard)


def test_a_subscriber_that_lags_is_not_kept_up_to_date() -> None:
    over = eventrates.LAG_LIMIT_S * 1e3 + 1
    behind = eventrates.Step(100, 100, 100, 0, 0, 0, lag_ms=over, late_ms=1)
    piled_up = eventrates.Step(100, 100, 100, 0, 0, 0, lag_ms=1, late_ms=over)
    assert not behind.sustained and not piled_up.sustained
    assert eventrates.sustained([behind, piled_up]) is None


def test_events_of_the_simulated_gpu_reach_the_daemons_core() -> None:
    figures, found = stream_figures("simulated", 1, eventrates.Plan(first=50, steps=2, hold_s=0.2, clients=2))
    assert found["reason"] == ""
    assert found["steps"]
    assert {"asked", "taken", "dropped", "missing", "unheard", "lag_ms"} <= found["steps"][0].keys()
    assert found["steps"][0]["taken"] > 0
    assert len(figures) == 3
    head, *rows = eventrates.table(found)
    assert len(rows) == len(found["steps"]) and all(len(row) == len(head) for row in rows)
