"""The loop of event, decide, perform: order, re-entry, and what a failing effect leaves behind."""

from __future__ import annotations

import pytest

from mpsd.base import debug
from mpsd.base.model import ProcessInstance
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.state import State
from mpsd.daemon.runtime import Runtime, effect_of_death

WANTED = ev.SlotWanted("s", ("GPU-a",), 0)
STARTED = ev.DomainStarted("d1", ProcessInstance(10, 1), ProcessInstance(11, 1))


def test_effects_of_one_event_are_done_before_the_next_event() -> None:
    order: list[str] = []

    def perform(effect: fx.Effect) -> None:
        order.append(type(effect).__name__)
        if isinstance(effect, fx.StartDomain) and effect.domain == "d1":
            runtime.post(STARTED)
            order.append("posted")

    runtime = Runtime(State(), perform, lambda before, after: None)
    runtime.post(WANTED)
    assert order[:3] == ["StartDomain", "posted", "SwitchPath"]
    assert runtime.performed == len(order) - 1


def test_a_failing_effect_is_counted_and_the_rest_is_done() -> None:
    done: list[fx.Effect] = []

    def perform(effect: fx.Effect) -> None:
        if isinstance(effect, fx.SwitchPath):
            raise OSError(28, "No space left on device")
        done.append(effect)

    runtime = Runtime(State(), perform, lambda before, after: None)
    runtime.post(WANTED)
    runtime.post(STARTED)
    assert runtime.state.counters["effects_failed"] == 1
    assert any(isinstance(e, fx.StartDomain) and e.domain == "d2" for e in done)


def test_state_changes_are_told_before_their_effects() -> None:
    seen: list[object] = []
    runtime = Runtime(State(), seen.append, lambda before, after: seen.append(after))
    runtime.post(WANTED)
    assert isinstance(seen[0], State) and isinstance(seen[1], fx.StartDomain)


def test_a_death_is_counted_from_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr("mpsd.daemon.runtime.os.kill", lambda pid, number: done.append(f"signal {number}"))
    runtime = Runtime(State(), lambda effect: done.append(type(effect).__name__), lambda before, after: None)
    runtime.post(WANTED)
    first = len(done)
    runtime.die_before(2)
    runtime.post(STARTED)
    assert done[first + 1] == "signal 9" and len(done) > first + 2
    assert "signal 9" not in done[:first] and done.count("signal 9") == 1


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"MPSD_DEBUG": "relay=off"}, None),
        ({"MPSD_DEBUG": "relay=off,die_before_effect=3"}, 3),
        ({"MPSD_DEBUG": "die_before_effect=soon"}, None),
        ({"MPSD_DEBUG": "die_before_effect"}, None),
    ],
)
def test_only_a_debug_field_dooms_a_daemon(environ: dict[str, str], expected: int | None) -> None:
    assert effect_of_death(environ) == expected


def test_a_death_after_the_signal_has_a_field_of_its_own() -> None:
    environ = {"MPSD_DEBUG": "die_after_signal=4"}
    assert effect_of_death(environ) is None
    assert effect_of_death(environ, debug.DIE_AFTER_SIGNAL) == 4
