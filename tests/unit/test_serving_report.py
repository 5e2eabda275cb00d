"""Requests around a fault in a serving report, the verdicts, and files that are not such a report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from faultinject.__main__ import main
from faultinject.campaigns.serving import reports
from faultinject.campaigns.serving.answers import (
    REPEAT_OFFSET,
    Served,
    Token,
    fill_figures,
    group_by_request,
    renumbered,
)
from faultinject.evidence import files
from faultinject.programs.llm.batch import Request
from mpsd.base.errors import UsageError

RIGHT = {0: [10, 11, 12], 1: [20, 21, 22], 2: [30, 31]}
ASKED = [Request(number, (1, 2), len(tokens)) for number, tokens in RIGHT.items()]


def load(path: Path) -> dict[str, Any] | None:
    return reports.load(files.read(path), path)


def served(*said: tuple[int, float, int, int], asked: list[Request] = ASKED, at: float = 2.5) -> Served:
    """Build the result from (life, when, number, token)."""
    one = Served("trap")
    fill_figures(one, group_by_request(asked, [Token(*each) for each in said]), RIGHT, at)
    return one


def test_a_server_that_goes_on() -> None:
    one = served(
        *((0, t, 0, 10 + t) for t in range(3)),
        *((0, 1.0, 1, 20), (0, 2.0, 1, 21), (0, 7.0, 1, 22)),
        *((0, 7.0, 2, 30), (0, 8.5, 2, 31)),
    )
    # Before the fault the first request was complete, the second had two tokens, the third none.
    assert [one.in_flight, one.waiting, one.completed, one.lost] == [1, 1, 2, 0]
    assert [one.wrong, one.twice, one.median, one.longest, one.again] == [0, 0, 1000.0, 5000.0, None]


def test_a_server_that_is_started_anew() -> None:
    one = served(
        *((0, 1.0, 0, 10), (0, 2.0, 0, 11), (0, 2.0, 1, 20)),
        *((1, 10.0, 0, 10), (1, 11.0, 0, 11), (1, 12.0, 0, 12), (1, 10.5, 1, 20), (1, 11.5, 1, 21)),
        *((2, 20.0, 1, 20), (2, 21.0, 1, 21), (2, 22.0, 1, 22), (2, 20.0, 2, 30), (2, 20.5, 2, 31)),
    )
    assert [one.in_flight, one.waiting, one.completed, one.lost, one.wrong] == [2, 1, 3, 0, 0]
    # Two tokens of the first request; two of the second, and two more of it in the third process.
    assert one.twice == 2 + 1 + 2
    # The wait for the third token of the second request counts from the first arrival of its second token.
    assert [one.longest, one.again] == [10500.0, 7500.0]


def test_what_is_missing_wrong_or_too_much() -> None:
    one = served((0, 1.0, 0, 10), (0, 3.0, 0, 99), (0, 1.0, 2, 30), (0, 2.0, 2, 31), (0, 3.0, 2, 31))
    assert [one.in_flight, one.waiting, one.completed, one.lost, one.wrong] == [2, 1, 0, 3, 2]


def test_nothing_was_heard() -> None:
    one = served()
    assert [one.in_flight, one.waiting, one.lost, one.median, one.longest] == [0, 3, 3, None, None]


def test_requests_that_are_asked_for_once_more() -> None:
    more = renumbered(ASKED[2:], 2)
    assert [each.number for each in more] == [2 + 2 * REPEAT_OFFSET]
    one = served((0, 3.0, 2 + 2 * REPEAT_OFFSET, 30), (0, 4.0, 2 + 2 * REPEAT_OFFSET, 31), asked=more)
    assert [one.completed, one.wrong] == [1, 0]


def fault(mode: str = "moved", **changes: object) -> dict[str, Any]:
    more = {"starts": 1, "told": 1, "twice": 9, "ended": 5.0, "again": 6.0} if mode == "restarted" else {}
    whole = Served("trap", in_flight=8, waiting=2, completed=10, median=5.0, longest=50.0, stall=30.0)
    return {**asdict(whole), **more, **changes}


@pytest.mark.parametrize(
    ("mode", "faults", "verdict"),
    [
        ("moved", [fault(), fault(longest=1e6)], "valid"),
        ("restarted", [fault("restarted")], "valid"),
        ("moved", [], "invalid: there was no fault"),
        ("moved", [fault(), fault(lost=1)], "invalid: requests were not answered"),
        ("moved", [fault(wrong=1)], "invalid: tokens differ"),
        ("moved", [fault(told=1)], "invalid: the server got an error"),
        ("moved", [fault(starts=1)], "invalid: the server got an error, or was restarted"),
        ("moved", [fault(in_flight=0)], "invalid: no request was in flight"),
        ("moved", [fault(problem="silent", in_flight=0)], "invalid: silent"),
        ("restarted", [fault("restarted", wrong=1)], "invalid: tokens differ"),
        ("restarted", [fault("restarted", lost=1)], "invalid: requests were not answered"),
        ("restarted", [fault("restarted", starts=0)], "invalid: the server was not restarted"),
    ],
)
def test_what_is_no_good_is_said(mode: str, faults: list[dict[str, Any]], verdict: str) -> None:
    assert reports.judge(mode, faults).startswith(verdict)


def whole() -> dict[str, Any]:
    texts = {
        "device": "SIMULATED",
        "driver": "1",
        "backend": "simulated",
        "date": "today",
        "command": "again",
    }
    return {
        **texts,
        "schema": 1,
        "kind": "serving",
        "seed": 1,
        "model": "a toy",
        "slots": 8,
        "leftovers": [],
        "undisturbed": {"requests": 64, "tokens": 2000, "median": 5.0, "longest": 9.0},
        "served": {mode: [fault(mode)] for mode in reports.MODES},
    }


def test_it_is_checked_and_rendered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(whole()))
    assert main(["check", str(path)]) == 0
    assert main(["render", str(path)]) == 0
    said = capsys.readouterr().out
    assert "these times are no GPU's" in said and "| restarted | trap | 1 | 8 | 10 | 0 |" in said
    path.write_text(json.dumps({**whole(), "backend": "nvidia"}))
    assert main(["render", str(path)]) == 0
    assert "no GPU's" not in capsys.readouterr().out
    path.write_text(json.dumps({**whole(), "leftovers": ["a process"]}))
    assert main(["check", str(path)]) == 1


def _lacks(data: Any) -> None:
    del data["served"]["moved"][0]["twice"]


def _of_tomorrow(data: Any) -> None:
    data["schema"] = 2


def _other_mode(data: Any) -> None:
    data["served"]["frozen"] = []


def _no_object(data: Any) -> None:
    data["served"]["moved"][0] = 7


def _nothing_to_compare(data: Any) -> None:
    data["undisturbed"] = {}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_lacks, "moved[0].twice is missing"),
        (_of_tomorrow, "schema is 2"),
        (_other_mode, "frozen"),
        (_no_object, "moved[0] is no object"),
        (_nothing_to_compare, "undisturbed.requests is missing"),
    ],
)
def test_another_form_is_refused(change: Callable[[Any], None], says: str, tmp_path: Path) -> None:
    data = whole()
    change(data)
    (tmp_path / "report.json").write_text(json.dumps(data))
    with pytest.raises(UsageError, match="is no report of this program") as refused:
        load(tmp_path / "report.json")
    assert says in str(refused.value)
    (tmp_path / "other.json").write_text('{"kind": "proxy"}')
    assert load(tmp_path / "other.json") is None


@pytest.mark.parametrize(
    "options",
    [["--kinds", "bolt"], ["--kinds", "drain"], ["--modes", "alone"], ["--kinds", "trap,trap"]],
)
def test_what_cannot_be_asked_for_is_said(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serving", *options]) == 2
    assert "Traceback" not in capsys.readouterr().err
