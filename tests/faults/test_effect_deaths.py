"""mpsd dies before effect N after a fault, beside programs that fail over: the run, the verdicts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest

from faultinject.__main__ import main
from faultinject.campaigns import check, sweep
from faultinject.campaigns.outages import effects
from faultinject.campaigns.outages.effects import LAST_WORDS, Death, complaints, last_words, sweep_of_kind
from faultinject.rig.libraries import Libraries
from faultinject.rig.node import Node, open_simulated_node
from mpsd.base.errors import NotReadyError
from tests.support.libcudas import session_libraries
from tests.support.long import of

pytestmark = pytest.mark.timeout(300)
EFFECTS = of([1, 2, 3, 5, 8, 13, 21, 34], [2])
"""The second is between the messages that tell the programs to move."""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    opened = open_simulated_node(tmp_path)
    yield opened
    opened.close()


@pytest.mark.parametrize("kind", ["trap", "store"])
def test_no_protected_program_notices_whenever_mpsd_dies(
    node: Node, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    # As a real driver does, the stand-in lets a program see that a trap is not its own.
    libraries = replace(session_libraries(tmp_path_factory).for_harness(), looks=True)
    found = sweep_of_kind(node, libraries, kind, lambda _: list(EFFECTS), 34, lambda _: None, sampled=True)
    assert found.leftovers == []
    assert [(d.effect, d.died, d.faulted, d.complaints) for d in found.deaths] == [
        (effect, True, 1, []) for effect in EFFECTS
    ]
    assert {d.before for d in found.deaths if d.effect == 2} == {"Move"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, []),
        ({"faulted": 0}, ["the fault had no effect"]),
        ({"told": 2, "faulted": 0}, ["2 programs met an error"]),
        ({"lost": 1, "errors": ["server-0 is lost"]}, ["lost: server-0 is lost"]),
        ({"wrong": 1, "innocent": 1}, ["1 programs saw wrong results", "1 innocent programs were named"]),
        ({"unsettled": 1}, ["1 fail-over records lack the outcome of a program"]),
        (
            {"problem": "30 s after the fault mpsd still has the domain d1"},
            ["30 s after the fault mpsd still"],
        ),
    ],
)
def test_a_death_is_judged_by_the_protected_programs(changes: dict[str, Any], says: list[str]) -> None:
    found = complaints(Death("trap", **{"faulted": 1, "effect": 3, "died": True, **changes}))
    assert len(found) == len(says)
    assert all(text.startswith(start) for text, start in zip(found, says, strict=True))


def test_the_effect_that_was_not_performed_is_in_the_last_lines_of_the_log() -> None:
    log = [json.dumps({"event": LAST_WORDS, "effect": name}) for name in ("Move", "Record")]
    assert last_words("\n".join(['ut off", "effect": 1}', *log, "no JSON", "[1]"])) == "Record"
    assert last_words("Killed") == ""


def row(**changes: Any) -> dict[str, Any]:
    found = {"effect": 3, "died": True, "verdict": "valid", "complaints": [], "fault": "store"}
    return {**found, "before": "Move", **changes}


def report(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    head = {"schema": 1, "device": "SIMULATED", "driver": "580.159.04", "revision": "unknown"}
    more = {"date": "2026-11-30T14:00:00+00:00", "command": "mpsd-faultinject sweep --failover"}
    return {**head, **more, "leftovers": [], "sweep": list(rows), **changes}


def test_a_report_shows_the_fault_and_the_effect(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(report(row(), row(effect=60, died=False, before=""))))
    assert check.verdict_lines(path)[0] == [
        "sweep store, effect 3: valid",
        "sweep store, effect 60: valid",
    ]
    text = check.render(path)
    assert "| store | 3 | yes | Move | valid |" in text and "| store | 60 | no | - | valid |" in text


def test_a_report_of_the_first_form_has_no_fault(tmp_path: Path) -> None:
    path, old = tmp_path / "sweep.json", row()
    for name in ("fault", "before"):
        old.pop(name)
    whole = report(old)
    whole.pop("leftovers")
    path.write_text(json.dumps(whole))
    assert check.verdict_lines(path) == (["sweep effect 3: valid"], True)
    assert "| 3 | yes | valid |" in check.render(path)


@pytest.mark.parametrize(
    ("whole", "says"),
    [
        (report(row(complaints=["2 programs met an error"])), "invalid: 2 programs met an error"),
        (report(row(), leftovers=["process 7 (python)"]), "sweep processes left behind: invalid: process 7"),
    ],
)
def test_a_report_is_judged_by_its_figures(whole: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(whole))
    lines, are_valid = check.verdict_lines(path)
    assert not are_valid and any(says in line for line in lines)


def test_an_outcome_of_the_sweep_is_the_worst_complaint() -> None:
    def verdict(**changes: Any) -> str:
        return sweep.outcome_of(Death("trap", **changes)).verdict.value

    assert verdict(faulted=1) == "valid"
    assert verdict(faulted=0, complaints=["the fault had no effect"]) == "unknown"
    assert verdict(faulted=1, complaints=["1 programs met an error"]) == "invalid"
    assert verdict(problem="no rig", complaints=["no rig"]) == "invalid"


class Late(effects.EffectDeaths):
    """mpsd dies when the fault is over, before the reports are collected."""

    def __init__(self, *, ends: bool) -> None:
        self._launched_for, self._next, self._counts, self._servers = 60, 0, False, []
        self._rig: Any = SimpleNamespace(mpsd=SimpleNamespace(ended=ends), spawn=lambda *_: self.offender)
        self._bystander: Any = SimpleNamespace(stall=lambda: None)
        self.offender = MagicMock()
        self.offender.wait.return_value = SimpleNamespace(what="gone")
        self.calls: list[str] = []
        self._tell = lambda _: None

    def _replace_lost(self) -> None: ...
    def _wait_until_ready(self, servers: Any) -> None: ...
    def _reset_reports(self) -> None: ...
    def _active_domain(self) -> str:
        return "d1"

    def _arm(self) -> int:
        return 0

    def _follow(self, death: Death, offender: Any, faulting: str) -> None:
        self.calls.append("follow")
        death.died = len(self.calls) > 1

    def _collect_death(self, death: Death, at: float, before: int) -> None:
        self.calls.append("collect")
        if not death.died:
            raise NotReadyError("no daemon answers")


@pytest.mark.parametrize(("ends", "says"), [(True, []), (False, ["no daemon answers"])])
def test_mpsd_may_die_of_a_late_effect(ends: bool, says: list[str]) -> None:
    """Without its death there is no reason why it should not answer."""
    course = Late(ends=ends)
    found = course.death("store", 60, 61)
    assert (found.died, found.complaints) == (ends, says)
    assert course.calls == ["follow", "collect"] * (2 if ends else 1)


PROBLEM = "the domain stays"


class Course:
    """Stands for the programs of one rig. mpsd performs five effects; `bad`: those with a problem."""

    bad: ClassVar[tuple[int, ...]] = ()
    tried: ClassVar[list[tuple[int, int, int]]]
    ended: ClassVar[list[int]]
    rigs: ClassVar[int] = 0

    def __init__(self, *_: object) -> None:
        type(self).rigs += 1

    def start(self) -> None: ...

    def death(self, kind: str, effect: int, following: int) -> Death:
        self.tried.append((self.rigs, effect, following))
        death = Death(kind, effect=effect, died=effect <= 5, effects=5, descriptors=20)
        death.problem = PROBLEM if effect in self.bad else ""
        death.complaints = [death.problem] if death.problem else []
        return death

    def end(self) -> str:
        self.ended.append(self.rigs)
        return ""


@pytest.fixture
def course(monkeypatch: pytest.MonkeyPatch) -> type[Course]:
    class Fresh(Course):
        tried: ClassVar[list[tuple[int, int, int]]] = []
        ended: ClassVar[list[int]] = []

    monkeypatch.setattr(effects, "EffectDeaths", Fresh)
    monkeypatch.setattr(effects, "Rig", lambda *_, **__: nullcontext(SimpleNamespace(leftovers=[])))
    return Fresh


def tried(
    node: Node, chosen: Callable[[int], list[int]], last: int = 0, *, sampled: bool = False
) -> effects.Sweep:
    libraries = Libraries(Path("proxy"), Path("standin"))
    return sweep_of_kind(node, libraries, "trap", chosen, last, lambda _: None, sampled=sampled)


def test_every_effect_is_tried_until_mpsd_survives_its_n(node: Node, course: type[Course]) -> None:
    """Runs differ by a few effects: this one has more than the first fault made."""
    found = tried(node, lambda last: list(range(1, last - 1)))
    assert [death.effect for death in found.deaths] == [1, 2, 3, 4, 5, 6]
    assert [death.died for death in found.deaths] == [True] * 5 + [False]
    assert (found.effects, found.leftovers) == (5, [])
    # mpsd is started for the next death while the programs stay.
    assert course.tried[1:] == [(1, 1, 2), (1, 2, 3), (1, 3, 4), (1, 4, 5), (1, 5, 6), (1, 6, 7)]
    assert course.ended == [1]


def test_after_a_problem_the_next_effect_is_tried_beside_fresh_programs(
    node: Node, course: type[Course]
) -> None:
    course.bad = (2,)
    found = tried(node, lambda _: [1, 2, 4], last=5, sampled=True)
    assert [(death.effect, bool(death.complaints)) for death in found.deaths] == [
        (1, False),
        (2, True),
        (4, False),
    ]
    assert [rig for rig, _, _ in course.tried] == [1, 1, 2] and course.ended == [2]


def test_without_a_good_first_fault_no_death_is_tried(node: Node, course: type[Course]) -> None:
    course.bad = (effects.NEVER,)
    found = tried(node, lambda last: list(range(1, last + 1)))
    assert [(death.effect, death.complaints) for death in found.deaths] == [(effects.NEVER, [PROBLEM])]


def test_the_command_reports_the_deaths_at_both_kinds_of_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(node: Node, libraries: Libraries, kind: str, *_: object, **__: object) -> effects.Sweep:
        assert libraries.looks
        return effects.Sweep(60, [Death(kind, effect=2, died=True, before="Move", faulted=1)])

    monkeypatch.setattr(sweep, "sweep_of_kind", found)
    monkeypatch.setattr(sweep, "find_libraries", lambda *_: Libraries(Path("proxy"), Path("standin")))
    path = tmp_path / "report.json"
    assert main(["sweep", "--failover", "--sample", "1", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "--sample 1 --failover" in out and "2 deaths tried, 0 not survived" in out
    assert check.verdict_lines(path) == (
        ["sweep trap, effect 2: valid", "sweep store, effect 2: valid"],
        True,
    )
