"""Reports judged again by their own figures, one line per verdict; the revision that they carry."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faultinject.__main__ import main
from faultinject.campaigns import check
from faultinject.evidence import revision

REPORTS = sorted((Path(__file__).parents[1] / "data" / "reports" / "kinds").glob("*.json"))


def test_there_is_a_report_of_every_kind() -> None:
    assert {check.read(path)[0].name for path in REPORTS} == {kind.name for kind in check.KINDS}


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: str(path.stem))
def test_a_report_is_judged_again(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["check", str(path)])
    lines = capsys.readouterr().out.splitlines()
    assert status == 0 and lines and all(": valid" in line for line in lines)


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: str(path.stem))
def test_a_rendered_report_says_how_it_was_made(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", str(path)]) == 0
    text, data = capsys.readouterr().out, json.loads(path.read_text())
    assert f"{data['date']}, revision unknown:\n\n    {data['command']}\n" in text
    assert text.endswith(f"SHA-256 of the raw report: `{hashlib.sha256(path.read_bytes()).hexdigest()}`\n")


def _wrong(data: Any) -> None:
    data["runs"][1]["wrong_results"] = 1


def _named(data: Any) -> None:
    next(run for run in data["runs"] if run["mode"] == "mpsd")["named"] = "wrong"


def _found(data: Any) -> None:
    data["runs"][0]["findings"] = [{"law": "results right", "verdict": "unknown", "text": "silent"}]


def _complains(data: Any) -> None:
    data["sweep"][0]["complaints"] = ["results right: wrong results in survivor-0"]


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("matrix", _wrong, "invalid: wrong results in 1 survivors"),
        ("matrix", _named, "invalid: a client that did nothing was named"),
        ("matrix", _found, "unknown: results right: silent"),
        ("sweep", _complains, "invalid: results right: wrong results in survivor-0"),
    ],
)
def test_a_verdict_comes_from_the_figures_and_not_from_what_the_file_says(
    name: str,
    change: Callable[[Any], None],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = json.loads(next(path for path in REPORTS if path.stem == name).read_text())
    change(data)
    (tmp_path / "report.json").write_text(json.dumps(data))
    assert main(["check", str(tmp_path / "report.json")]) == 1
    assert says in capsys.readouterr().out


def test_a_survivor_that_is_lost_where_the_registry_says_that_it_lives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = next(path for path in REPORTS if path.stem == "matrix")
    data = json.loads(path.read_text())
    run = next(run for run in data["runs"] if run["mode"] == "mpsd")
    run.update(kind="sigkill_running", variant="", lost=1)
    (tmp_path / "report.json").write_text(json.dumps(data))
    assert main(["check", str(tmp_path / "report.json")]) == 1
    assert "sigkill_running (mpsd): invalid: lost 1 of 3 survivors" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot read"),
        ("no JSON", "is not JSON"),
        ("[1]", "is no report of mpsd-faultinject (a JSON list)"),
        ('{"kind": "weather"}', "is no report of mpsd-faultinject (its kind is 'weather')"),
        ('{"kind": "failover", "schema": 1}', "report.device is missing"),
        ('{"sweep": []}', "report.schema is missing"),
        ('{"figures": [], "stream": {}}', "report.schema is missing"),
        ('{"kernel": "6", "rows": [], "runs": []}', "report.schema is missing"),
    ],
)
def test_a_bad_file_is_one_line_and_the_others_are_judged(
    text: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.json"
    if text is not None:
        bad.write_text(text)
    assert main(["check", str(bad), *map(str, REPORTS)]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("mpsd-faultinject: ") and len(told.err.splitlines()) == 1
    assert says in told.err and "failover.json: failover trap: valid" in told.out


def _git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=x", "-c", "user.email=x@y")
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


def test_the_revision_is_that_of_the_tree_or_the_one_passed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert revision.of_tree(tmp_path) == "unknown"
    (tmp_path / "file").write_text("1")
    _git(tmp_path, "init")
    assert revision.of_tree(tmp_path) == "unknown"
    _git(tmp_path, "add", "file")
    _git(tmp_path, "commit", "-m", "one")
    clean = revision.of_tree(tmp_path)
    assert clean.isalnum() and len(clean) >= 7
    (tmp_path / "file").write_text("2")
    assert revision.of_tree(tmp_path) == f"{clean}-dirty"
    monkeypatch.setenv("MPSD_REVISION", "abc1234")
    assert revision.current() == "abc1234"
    with revision.override("def5678"):
        assert revision.current() == "def5678"
    with revision.override(None):
        assert revision.current() == "abc1234"
