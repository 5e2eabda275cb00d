"""Reports of fail-overs: those that are kept, and what is wrong with others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faultinject import takeover
from faultinject.__main__ import main
from faultinject.failover import reports
from mpsd.errors import UsageError

KEPT = sorted((Path(reports.__file__).parent.parent / "reports").glob("*-moves*.json"))


def test_some_are_kept() -> None:
    assert KEPT


@pytest.mark.parametrize("path", KEPT, ids=lambda path: str(path.stem))
def test_what_is_kept_says_what_its_table_says(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", str(path)]) == 0
    assert capsys.readouterr().out == path.with_suffix(".md").read_text()
    assert main(["check", str(path)]) == 0
    assert "valid" in capsys.readouterr().out


def _lost(data: Any) -> None:
    data["faults"]["trap"][0]["programs"][0]["alive"] = False


def _wrong(data: Any) -> None:
    data["faults"]["trap"][0]["programs"][0]["wrong"] = 1


def _told_for_nothing(data: Any) -> None:
    data["faults"]["trap"][0]["programs"][0]["told"] = [719]


def _left(data: Any) -> None:
    data["leftovers"].append("a process")


@pytest.mark.parametrize("change", [_lost, _wrong, _told_for_nothing, _left])
def test_what_must_not_be_is_not_valid(
    change: Callable[[Any], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(KEPT[0].read_text())
    change(data)
    (tmp_path / "report.json").write_text(json.dumps(data))
    assert main(["check", str(tmp_path / "report.json")]) == 1
    assert ("invalid" in capsys.readouterr().out) == (change is not _left)


def _without_steps(data: Any) -> None:
    del data["faults"]["trap"][0]["programs"][0]["steps"]


def _of_tomorrow(data: Any) -> None:
    data["schema"] = 2


def _with_more(data: Any) -> None:
    data["host"] = "somewhere"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_without_steps, "trap[0].programs[0].steps is missing"),
        (_of_tomorrow, "schema is 2"),
        (_with_more, "host"),
    ],
)
def test_another_form_is_refused(change: Callable[[Any], None], says: str, tmp_path: Path) -> None:
    data = json.loads(KEPT[0].read_text())
    change(data)
    (tmp_path / "report.json").write_text(json.dumps(data))
    with pytest.raises(UsageError, match="is no report of this program") as refused:
        reports.load(tmp_path / "report.json")
    assert says in str(refused.value)


def test_what_is_no_such_report(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"kind": "proxy"}')
    (tmp_path / "text.json").write_text("not JSON")
    assert reports.load(tmp_path / "other.json") is None
    assert reports.load(tmp_path / "text.json") is None
    with pytest.raises(UsageError, match="cannot read"):
        reports.load(tmp_path / "absent.json")


def test_suspects_may_be_later_than_the_cleared() -> None:
    def fault(bystander: float | None, *programs: tuple[float, bool | None]) -> dict[str, Any]:
        rows = [{"stall": stall, "suspect": suspect} for stall, suspect in programs]
        return {"bystander": bystander, "programs": rows}

    cleared, suspects = fault(20.0, (24.0, False), (26.0, False)), fault(20.0, (119.0, True), (24.0, None))
    assert reports.beyond([cleared, suspects], suspect=False) == [4.0, 6.0]
    assert reports.beyond([cleared, suspects], suspect=True) == [99.0]
    assert reports.in_time([cleared, suspects]) == "yes"
    assert reports.in_time([cleared, fault(20.0, (121.0, True))]) == "no"
    assert reports.in_time([fault(20.0, (26.0, False))]) == "no"
    assert reports.in_time([fault(None, (26.0, False))]) == "-"


def test_a_report_of_nothing_has_not_passed() -> None:
    assert not reports.passed({"leftovers": [], "faults": {}})
    assert not reports.passed({"leftovers": [], "faults": {"trap": []}})
    assert not takeover.passed({"leftovers": [], "backend": "simulated", "takeovers": {"warm": []}})


def test_descriptors_that_grow_with_each_fault_are_a_failure() -> None:
    def faults(*counts: tuple[int, int]) -> list[dict[str, Any]]:
        record: dict[str, Any] = {"clients": []}
        return [{"problem": "", "programs": [], "record": record, "descriptors": one} for one in counts]

    calm = [(43, 20), (87, 25), *[(93, 25)] * 6]
    assert reports.judge(faults(*calm)) == "valid"
    assert reports.judge(faults(*((43 + 60 * n, 20) for n in range(8)))).startswith(
        "invalid: mpsd opened more"
    )
    assert "a program opened" in reports.judge(faults(*((43, 10 + 7 * n) for n in range(8))))
    assert "a program opened" in reports.judge(faults(*((43, 400 + n) for n in range(8))))
    with_threads = [{**fault, "threads": 20 + n} for n, fault in enumerate(faults(*calm))]
    assert reports.judge(with_threads).startswith("invalid: a program has more and more threads")
    assert reports.judge([{**fault, "threads": 20} for fault in with_threads]) == "valid"


def test_faults_of_which_nothing_came_are_told_and_few() -> None:
    def faults(*nothing: bool) -> list[dict[str, Any]]:
        moved: dict[str, Any] = {"clients": []}
        return [
            {"problem": "", "programs": [], "record": None if n else moved, "nothing": n} for n in nothing
        ]

    assert reports.judge(faults(True, False, False, False)) == "valid"
    assert reports.judge(faults(True, True, False)) == "invalid: nothing came of 2 of 3 faults"
    met = faults(True, False, False, False)
    met[0]["programs"] = [{"alive": True, "wrong": 0, "told": [719]}]
    assert "met an error" in reports.judge(met)
    kinds = {"shared_window": faults(True, False), "trap": faults(False)}
    assert list(reports._harmless(kinds)) == [
        "shared_window: nothing came of 1 of them: the offender's own wait succeeded.",
        "",
    ]


def test_what_is_opened_more_with_each_fault_is_told() -> None:
    def fault(**kinds: int) -> dict[str, Any]:
        return {"kinds": kinds}

    faults = [fault(socket=9 * n, pipe=4, file=n // 4) for n in range(8)]
    assert reports.grown(faults) == {"socket": 9}
    assert reports.grown([*faults[:4], {"kinds": None}]) == {}
    assert list(reports._growth({"trap": faults, "store": faults[:2]})) == [
        "trap: the program that has most descriptors opens more with each fault: 9 of socket.",
        "",
    ]
