"""The campaign of a second user: its verdicts, and the form of its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from faultinject.campaigns import check
from faultinject.campaigns.attacks import command, course
from mpsd.mps import log


def report(**changes: Any) -> dict[str, Any]:
    attempt = {"name": "list", "outcome": "refused: EACCES", "expected": "refused", "decided": ""}
    flood = {"name": "garbage", "count": 9, "requests": 100, "p50": 2.0, "p99": 4.0, "worst": 5.0}
    flood |= {"before": 37.0, "after": 38.0}
    return {
        "schema": 1,
        "kind": "attacks",
        "device": "NVIDIA H200",
        "driver": "580.159.04",
        "backend": "nvidia",
        "revision": "0123abc",
        "date": "2026-11-29T00:00:00+00:00",
        "command": "mpsd-faultinject attacks --backend nvidia",
        "leftovers": [],
        "attempts": [attempt | changes.get("attempt", {})],
        "floods": [flood | changes.get("flood", {})],
        "problems": changes.get("problems", []),
    }


def test_refused_attempts_and_harmless_floods_are_valid() -> None:
    assert {verdict for _, verdict in command.verdicts(report())} == {"valid"}
    assert command.passed(report())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attempt": {"outcome": "done"}}, "not refused"),
        ({"attempt": {"decided": "a fault was recorded"}}, "a fault was recorded"),
        ({"flood": {"p99": 51.0}}, "p99 51 ms"),
        ({"flood": {"after": 48.0}}, "keeps 11 MB"),
        ({"problems": ["own-1: error"]}, "own-1"),
    ],
)
def test_harm_is_invalid(changes: dict[str, Any], says: str) -> None:
    harmed = report(**changes)
    assert [verdict for _, verdict in command.verdicts(harmed) if says in verdict]
    assert not command.passed(harmed)


def test_forged_lines_read_as_the_lines_of_a_server() -> None:
    parser = log.LogParser()
    read = [parser.feed(line).event for line in (*course.fatal_lines(33), *course.client_lines([1, 33]))]
    clients = [log.NewClient(pid, 0, pending=False) for pid in (1, 33)]
    assert read == [log.ServerFatal(), log.BlamedClient(33, 1), *clients]


def test_times_of_a_simulated_node_are_not_judged() -> None:
    slow = report(flood={"p99": 80.0}) | {"backend": "simulated"}
    assert command.passed(slow)


def test_a_report_is_judged_and_rendered_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "attacks.json"
    path.write_text(json.dumps(report()))
    lines, are_valid = check.verdict_lines(path)
    assert are_valid and len(lines) == 3
    text = check.render(path)
    assert "| list | refused: EACCES | none |" in text and "| garbage | 9 | 100 |" in text
