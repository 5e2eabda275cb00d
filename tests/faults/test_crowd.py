"""Many clients of one user, and traps beside them: the run on the simulated GPU, the verdicts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from faultinject.__main__ import main
from faultinject.campaigns import check
from faultinject.campaigns.crowd import command
from tests.support.libcudas import session_libraries

pytestmark = pytest.mark.timeout(300)


def test_a_crowd_grows_and_no_protected_client_is_lost(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    libraries = session_libraries(tmp_path_factory).for_harness()
    args = argparse.Namespace(backend="simulated", clients=[1, 3], traps=1, deadline=120.0, out=None)
    args.libcuda, args.driver = libraries.proxy, libraries.driver
    partial: list[dict[str, Any]] = []
    found = command.run(args, partial.append)
    assert command.passed(found), command.verdicts(found)
    assert [len(made["rows"]) for made in partial] == [1, 2]
    assert not command.passed(partial[-1])
    traps = [trap for row in found["rows"] for trap in row["traps"]]
    assert [(t["failover"], t["standby"], t["moved"], t["lost"], t["domains"]) for t in traps] == [
        (1, 1, 1, 0, 1),
        (3, 3, 3, 0, 1),
    ]
    path = tmp_path / "crowd.json"
    path.write_text(json.dumps(found))
    lines, are_valid = check.verdict_lines(path)
    assert are_valid and len(lines) == 3
    assert "| 3 | 3 | 0 | 0 | 3 | 1 | 1 |" in check.render(path)


def row(clients: int = 100, **changes: Any) -> dict[str, Any]:
    trap = {"stall": 90.0, "failover": 12, "guard": clients - 12, "other": 0, "standby": 12, "domains": 3}
    trap |= {"lost": 36, "lost_protected": 0, "wrong": 0, "moved": 12, "reasons": {"the cap": 88}}
    return {"clients": clients, "traps": [{**trap, **changes}], "refused": 2, "problem": ""}


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (row(), "valid"),
        (row(lost_protected=1), "invalid: 1 clients were lost that status called protected"),
        (row(failover=13, guard=87), "invalid: status called 13 clients protected by fail-over, not 12"),
        (row(guard=80, other=8), "invalid: 8 clients had less than guard"),
        (row(wrong=1), "invalid: 1 clients saw wrong results"),
        ({**row(), "problem": "the deadline has passed"}, "invalid: the deadline has passed"),
        ({**row(), "traps": []}, "invalid: nothing was run"),
    ],
)
def test_a_row_is_judged_by_what_status_said(made: dict[str, Any], says: str) -> None:
    assert command.judge(made).startswith(says)


@pytest.mark.parametrize("clients", ["0,3", "3,1"])
def test_the_crowd_only_grows(clients: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crowd", "--clients", clients]) == 2
    assert "--clients needs rising numbers from 1 on" in capsys.readouterr().err
