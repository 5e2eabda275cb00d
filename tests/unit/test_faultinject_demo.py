"""The demo: its table and its closing sentence from a recorded run, and its runs without a proxy."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from faultinject.campaigns import demo, demotable, matrixreport
from faultinject.campaigns.matrix import Matrix, Plan
from faultinject.registry.kinds import AUTO, MODES
from faultinject.rig.libraries import Libraries
from mpsd.base.errors import UnsupportedError

KEPT = Path(__file__).parents[1] / "data/reports/demo.json"
COLUMNS = (*MODES, AUTO)


@pytest.fixture
def runs() -> list[dict[str, Any]]:
    report = json.loads(KEPT.read_text())
    assert matrixreport.validate(report) == []
    return list(report["runs"])


def run_of(runs: list[dict[str, Any]], kind: str, mode: str) -> dict[str, Any]:
    return next(run for run in runs if run["kind"] == kind and run["mode"] == mode)


def test_each_kind_has_a_row_with_what_was_lost_in_each_column(runs: list[dict[str, Any]]) -> None:
    head, *body = demotable.rows(runs, COLUMNS)
    assert head == ["fault", "stock", "observe", "named", "class", "auto", "named", "class"]
    rows = {row[0]: row[1:] for row in body}
    mmu, lost, kept = "mmu-invalid-address", "3 of 3", "0 of 3"
    assert rows["store"] == [lost, lost, "yes", mmu, kept, "yes", mmu]
    assert rows["trap"] == [lost, lost, "no", "sm-trap", kept, "no", "sm-trap"]
    assert rows["assert"] == [kept, kept, "-", "-", kept, "-", "-"]
    assert rows["zone_past_end@one"] == [lost, lost, "yes", "mmu-use-after-unmap", kept, "yes", "guard-hit"]
    assert rows["mpsd_death"] == ["-", kept, "-", "-", kept, "-", "-"]


def test_the_sentence_counts_the_faults_of_all_columns(runs: list[dict[str, Any]]) -> None:
    said = demotable.sentence(runs, COLUMNS)
    assert said == (
        "Of 3 clients beside each of 5 faults, stock MPS lost 12, mpsd at observe 9, mpsd by default 0."
    )
    run_of(runs, "trap", AUTO)["lost"] = 2
    assert demotable.sentence(runs, COLUMNS).endswith("mpsd at observe 9, mpsd by default 2.")
    run_of(runs, "trap", AUTO)["lost"] = None
    said = demotable.sentence(runs, COLUMNS)
    assert said == (
        "Of 3 clients beside each of 4 faults, stock MPS lost 9, mpsd at observe 6, mpsd by default 0."
    )
    without_proxy = [run for run in runs if run["mode"] != AUTO and not run["kind"].startswith("zone")]
    said = demotable.sentence(without_proxy, MODES)
    assert said == "Of 3 clients beside each of 4 faults, stock MPS lost 9, mpsd at observe 6."
    assert demotable.sentence([], COLUMNS) == "No fault ran in every column."


def test_empty_cells_are_explained(runs: list[dict[str, Any]]) -> None:
    found = [line for line in demotable.notes(runs, COLUMNS) if line.startswith("-: ")]
    assert found == ["-: mpsd_death in column stock: there is no mpsd under stock MPS."]
    for kind in ("store", "trap"):
        run_of(runs, kind, "stock").update(not_run="no room", lost=None, verdict=None)
    assert "-: store, trap in column stock: no room." in demotable.notes(runs, COLUMNS)
    run_of(runs, "assert", AUTO)["lost"] = None
    found = demotable.notes(runs, COLUMNS)
    assert "-: assert in column auto: the run failed, see below." in found


def test_the_level_of_the_column_auto_is_the_one_that_the_clients_had(runs: list[dict[str, Any]]) -> None:
    assert "level was failover." in " ".join(demotable.notes(runs, COLUMNS))
    for run in runs:
        if run["mode"] == AUTO:
            run["notes"] = {"level": "observe"}
    assert "level was observe." in " ".join(demotable.notes(runs, COLUMNS))
    assert "mpsd-run" not in " ".join(demotable.notes(runs, MODES))


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Let the demo take its runs from the recorded report; the dictionary is that report."""
    report = json.loads(KEPT.read_text())

    class Recorded:
        def __init__(self, plan: Plan) -> None:
            self._modes = plan.modes

        def run(self, base: Path) -> dict[str, Any]:
            return {**report, "runs": [run for run in report["runs"] if run["mode"] in self._modes]}

    monkeypatch.setattr(demo, "Matrix", Recorded)
    yield report


def test_a_broken_law_is_printed_and_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, stubbed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    libraries = Libraries(Path("/proxy"), Path("/standin"))
    monkeypatch.setattr(demo, "find_libraries", lambda *_: libraries)
    assert demo.demo("simulated") == 0
    sound = capsys.readouterr().out
    assert ": invalid: " not in sound and sound.rstrip().endswith("mpsd by default 0.")
    run = run_of(copy.deepcopy(stubbed)["runs"], "trap", AUTO)
    finding = {"law": "survivors live", "verdict": "invalid", "text": "lost survivor-0 (error 719)"}
    stubbed["runs"].append({**run, "lost": 1, "verdict": "invalid", "findings": [finding]})
    assert demo.demo("simulated") == 1
    broken = "trap in column auto: invalid: survivors live: lost survivor-0 (error 719)"
    assert broken in capsys.readouterr().out


def test_the_runs_of_all_columns_are_counted_together(
    monkeypatch: pytest.MonkeyPatch, stubbed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    plans: list[Plan] = []
    recorded = demo.Matrix
    monkeypatch.setattr(demo, "find_libraries", lambda *_: Libraries(Path("/proxy"), Path("/standin")))
    monkeypatch.setattr(demo, "Matrix", lambda plan: plans.append(plan) or recorded(plan))
    demo.demo("simulated")
    first, second = (len(plan.pairs()) for plan in plans)
    assert f"{first + second} runs on the simulated GPU" in capsys.readouterr().err
    assert [(plan.before, plan.total) for plan in plans] == [(0, first + second), (first, first + second)]
    said: list[str] = []
    matrix = Matrix(replace(plans[1], tell=said.append))
    entry = {"kind": "trap", "variant": "", "mode": AUTO, "not_run": "no room", "verdict": None}
    monkeypatch.setattr(matrix, "run_one", lambda *_: entry)
    matrix._run_and_report(plans[1].faults[0], AUTO, "simulated", Path("/"))
    assert said[0].startswith(f"[{first + 1}/{first + second}] ")


def test_without_a_compiler_the_demo_says_what_it_does_not_show(
    monkeypatch: pytest.MonkeyPatch, stubbed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def none(*_: object) -> Libraries:
        raise UnsupportedError("there is no gcc", remedy="apt-get install gcc")

    monkeypatch.setattr(demo, "find_libraries", none)
    assert demo.demo("simulated") == 0
    out = capsys.readouterr().out
    assert "The column auto and guard zones are not shown: there is no gcc" in out
    assert "mpsd by default" not in out and "named  class  auto" not in out


def test_zone_kinds_run_without_the_proxy_beside_stock_mps_and_with_it_by_default() -> None:
    libraries = Libraries(Path("/proxy"), Path("/standin"))
    first, auto = demo._plans("simulated", 1, libraries)
    zones = [fault for fault in first.faults if fault.kind.startswith("zone_")]
    assert zones and all(fault.bare for fault in zones) and tuple(first.modes) == MODES
    assert {(f.name, m) for f, m in first.pairs() if f in zones} == {
        (f.name, m) for f in zones for m in MODES
    }
    assert [f.name for f, _ in auto.pairs()] == list(demo.SHOWN) and list(auto.modes) == [AUTO]
    (alone,) = demo._plans("simulated", 1, None)
    assert not any(fault.kind.startswith("zone_") for fault in alone.faults)
