"""Faults around a death of mpsd, and bursts of faults: the run on the simulated GPU, the verdicts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from faultinject.campaigns import check
from faultinject.campaigns.outages import command
from tests.support.libcudas import session_libraries

pytestmark = pytest.mark.timeout(300)


def test_no_protected_program_is_lost_while_mpsd_is_dead_or_faults_come_in_a_burst(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """By the seed, mpsd is killed before the first fault."""
    libraries = session_libraries(tmp_path_factory).for_harness()
    args = argparse.Namespace(backend="simulated", deaths=1, bursts=1, deadline=200.0, out=None)
    args.libcuda, args.driver = libraries.proxy, libraries.driver
    partial: list[dict[str, Any]] = []
    found = command.run(args, partial.append)
    (death,), (burst,) = found["outages"], found["bursts"]
    assert death["killed_s"] < 0 and death["faults"] == 1
    assert command.judge(death) == "valid"
    # On a slow machine all clients of a burst may join one domain.
    assert burst["faults"] >= 1 and (burst["lost"], burst["wrong"], burst["innocent"]) == (0, 0, 0)
    assert [len(made["bursts"]) for made in partial] == [0, 1]
    path = tmp_path / "outages.json"
    path.write_text(json.dumps(found))
    assert len(check.verdict_lines(path)[0]) == 3 and "| trap | 0.2 | 1 | 1 |" in check.render(path)


def outcome(**changes: Any) -> dict[str, Any]:
    row = {
        "kind": "trap",
        "killed_s": 0.1,
        "away_s": 0.2,
        "faulted": 1,
        "faults": 1,
        "told": 0,
        "lost": 0,
        "wrong": 0,
        "innocent": 0,
    }
    return {**row, "pause": 40.0, "problem": "", "errors": [], **changes}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (outcome(), "valid"),
        (
            outcome(lost=2, errors=["gone"]),
            "invalid: 2 protected programs were lost: gone",
        ),
        (outcome(told=1), "invalid: 1 programs met an error"),
        (outcome(wrong=1), "invalid: 1 programs saw wrong results"),
        (outcome(innocent=1), "invalid: mpsd named 1 innocent programs"),
        (outcome(faulted=0), "unknown: the fault had no effect"),
        (outcome(killed_s=None, faults=1), "unknown: of the burst one fault had an effect"),
        (outcome(problem="no answer"), "invalid: no answer"),
    ],
)
def test_a_fault_is_judged_by_the_protected_programs(row: dict[str, Any], says: str) -> None:
    assert command.judge(row) == says


def test_rows_are_grouped_by_kind_and_time_without_mpsd() -> None:
    outages = [outcome(), outcome(pause=60.0), outcome(kind="store", away_s=1.0, lost=1, errors=["gone"])]
    bursts = [outcome(killed_s=None, away_s=None, faulted=5, faults=5)]
    rows = command.table({"outages": outages, "bursts": bursts})
    assert [row[:5] for row in rows[1:]] == [
        ["1", "trap", "0.2", "2", "2"],
        ["1", "store", "1.0", "1", "0"],
        ["5", "trap", "-", "1", "1"],
    ]
    assert rows[1][-1] == "50.0 / 60.0" and rows[2][5] == "1"


def test_a_run_without_a_fault_is_not_valid() -> None:
    report = {"outages": [], "bursts": [], "problem": ""}
    assert command.verdicts(report) == [("the run", "invalid: nothing was run")]
