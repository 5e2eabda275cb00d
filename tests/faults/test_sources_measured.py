"""The time from a log line to the decision is measured under a whole mpsd, on the simulated GPU."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from faultinject.__main__ import main
from faultinject.campaigns import sources
from faultinject.evidence import files
from mpsd.base.errors import UsageError

pytestmark = pytest.mark.timeout(300)


def test_both_kinds_of_domain_decide_and_the_report_is_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    assert main(["sources", "--kinds", "trap", "--faults", "2", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert {mode: [d["kind"] for d in rows] for mode, rows in found["decisions"].items()} == {
        "private": ["trap", "trap"],
        "shared": ["trap", "trap"],
    }
    assert not found["leftovers"]
    capsys.readouterr()
    assert main(["check", str(path)]) == 0
    assert main(["render", str(path)]) == 0
    assert "| shared | trap | 2 |" in capsys.readouterr().out


def test_the_first_line_about_a_fault_gives_the_time(tmp_path: Path) -> None:
    log = tmp_path / "control.log"
    before = "[2026-01-01 00:00:01.000 Server 7] Server is handling a fatal GPU error.\n"
    log.write_text(before)
    assert sources.line_at(log, len(before)) is None
    with log.open("a") as file:
        file.write("[2026-01-01 00:00:02.000 Server 7] Server has started\n")
        file.write("[2026-01-01 00:00:03.250 Server 7] Server is handling a fatal GPU error.\n")
    assert sources.line_at(log, len(before)) == datetime(2026, 1, 1, 0, 0, 3, 250_000).timestamp()


def test_figures_and_verdicts_come_from_the_report() -> None:
    rows = [{"kind": "trap", "problem": "", "decided_ms": float(n)} for n in range(1, 21)]
    failed = [{"kind": "trap", "problem": "no line", "decided_ms": None}]
    table = sources.table({"decisions": {"private": rows, "shared": failed}})
    assert table[1:] == [
        ["private", "trap", "20", "10.5", "20.0", "20.0", "valid"],
        ["shared", "trap", "1", "-", "-", "-", "invalid: no line"],
    ]


def test_a_report_of_another_form_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"kind": "bench", "schema": 1}))
    assert sources.load(files.read(path), path) is None
    path.write_text(json.dumps({"kind": sources.KIND, "schema": 1}))
    with pytest.raises(UsageError):
        sources.load(files.read(path), path)
    assert main(["sources", "--modes", "open"]) == 2
    assert main(["sources", "--kinds", "bolt"]) == 2
