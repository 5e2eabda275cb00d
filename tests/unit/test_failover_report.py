"""Reports of fail-overs: reports of real runs keep their figures, and unsound reports are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faultinject.__main__ import main
from faultinject.campaigns import takeover
from faultinject.campaigns.failover import reports
from faultinject.evidence import files
from mpsd.base.errors import UsageError

DATA = Path(__file__).parents[1] / "data/reports"
FIGURES: dict[str, list[str]] = json.loads((DATA / "figures.json").read_text())
SERVERS = DATA / "failover-servers.json"


@pytest.mark.parametrize("name", ["failover-servers", "failover-offender", "failover-planned"])
def test_a_report_of_a_real_run_keeps_its_figures(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Cut from reports of an H200: early, with participating offenders, and of planned moves."""
    path = DATA / f"{name}.json"
    assert main(["render", str(path)]) == 0
    _, _, *rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert rows == FIGURES[name]
    assert main(["check", str(path)]) == 0
    assert "valid" in capsys.readouterr().out


def load(path: Path) -> dict[str, Any] | None:
    return reports.load(files.read(path), path)


def _lost(data: Any) -> None:
    data["faults"]["trap"][0]["programs"][0]["alive"] = False


def _wrong(data: Any) -> None:
    data["faults"]["trap"][0]["programs"][0]["wrong"] = 1


def _told_for_nothing(data: Any) -> None:
    data["faults"]["trap"][0]["programs"][0]["told"] = [719]


def _blamed(data: Any) -> None:
    fault = data["faults"]["trap"][0]
    fault["faults"] = [{"offender": {"pid": fault["record"]["clients"][-1]["pid"]}, "evidence": []}]


def _left(data: Any) -> None:
    data["leftovers"].append("a process")


@pytest.mark.parametrize("change", [_lost, _wrong, _told_for_nothing, _blamed, _left])
def test_what_must_not_be_is_not_valid(
    change: Callable[[Any], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(SERVERS.read_text())
    change(data)
    (tmp_path / "report.json").write_text(json.dumps(data))
    assert main(["check", str(tmp_path / "report.json")]) == 1
    assert "invalid" in capsys.readouterr().out


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
    data = json.loads(SERVERS.read_text())
    change(data)
    (tmp_path / "report.json").write_text(json.dumps(data))
    with pytest.raises(UsageError, match="is no report of this program") as refused:
        load(tmp_path / "report.json")
    assert says in str(refused.value)


def test_what_is_no_such_report(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"kind": "proxy"}')
    (tmp_path / "text.json").write_text("not JSON")
    assert load(tmp_path / "other.json") is None
    with pytest.raises(UsageError, match="is not JSON"):
        load(tmp_path / "text.json")
    with pytest.raises(UsageError, match="cannot read"):
        load(tmp_path / "absent.json")


def test_what_a_step_took_beyond_the_gpus_stall_is_told_by_suspicion() -> None:
    def fault(*programs: tuple[float, bool | None]) -> dict[str, Any]:
        rows = [{"stall": stall, "suspect": suspect} for stall, suspect in programs]
        return {"bystander": 20.0, "programs": rows}

    faults = [fault((24.0, False), (26.0, False)), fault((119.0, True), (24.0, None))]
    assert reports.excess_over_stall(faults, suspect=False) == [4.0, 6.0]
    assert reports.excess_over_stall(faults, suspect=True) == [99.0]


def _moved(suspect: bool, first_ms: float, turn_ms: float | None = None, outcome: str = "moved") -> Any:
    return {"pid": 7, "suspect": suspect, "first_ms": first_ms, "turn_ms": turn_ms, "outcome": outcome}


def _fault(
    kind: str, word: float | None, bystander: float | None, *entries: Any, **more: Any
) -> dict[str, Any]:
    record = {"clients": list(entries)}
    return {"kind": kind, "word": word, "bystander": bystander, "record": record, "faults": [], **more}


def test_suspects_may_resume_later_than_the_cleared() -> None:
    cleared = _fault(
        "store", 1.0, 20.0, _moved(False, 22.0), _moved(False, 24.0), _moved(False, 90.0, None, "no")
    )
    suspects = _fault("trap", 30.0, 31.0, _moved(True, 4.0, 100.0), _moved(True, 5.0))
    assert reports.resumed([cleared, suspects], suspect=False) == [23.0, 25.0]
    assert reports.resumed([cleared, suspects], suspect=True) == [130.0, 35.0]
    assert reports.resumed([cleared, suspects], suspect=True, over_the_gpus=True) == [99.0, 4.0]
    assert reports.in_time([cleared, suspects]) == "yes"
    assert reports.in_time([cleared, _fault("trap", 30.0, 31.0, _moved(True, 4.0, 102.0))]) == "no"
    assert reports.in_time([_fault("store", 1.0, 20.0, _moved(False, 24.1))]) == "no"
    assert reports.in_time([_fault("store", 1.0, None, _moved(False, 26.0))]) == "-"
    assert reports.in_time([_fault("store", None, 20.0, _moved(False, 26.0))]) == "-"
    assert reports.in_time([_fault("store", 1.0, 20.0) | {"record": None}]) == "-"


def test_who_was_late_is_counted() -> None:
    faults = [
        _fault("trap", 30.0, 31.0, _moved(False, 5.9), _moved(False, 6.1), _moved(True, 4.0, 101.1)),
        _fault("trap", 30.0, 31.0, _moved(False, 7.0), _moved(True, 4.0, 100.9)),
    ]
    assert [reports.late(faults, suspect=suspect) for suspect in (False, True)] == ["2 of 3", "1 of 2"]
    assert reports.late(faults[:0], suspect=False) == "-"


def test_a_planned_move_is_not_late_for_programs_work_on_before_it() -> None:
    fault = _fault("endless", 2200.0, 5.0, _moved(False, 3.0))
    assert reports.late([fault], suspect=False) == "1 of 1"
    planned = fault | {"record": fault["record"] | {"planned": True}}
    assert reports.resumed([planned], suspect=False) == [] and reports.in_time([planned]) == "-"


def test_an_offender_that_was_carried_over_is_no_survivor() -> None:
    named = {"offender": {"pid": 8}}
    entries = [_moved(True, 4.0, 50.0), _moved(True, 4.0, 1300.0) | {"pid": 8}]
    fault = _fault("trap", 30.0, 31.0, *entries, faults=[{"offender": None}, named])
    assert reports.resumed([fault], suspect=True) == [80.0]
    assert reports.resumed([fault | {"faults": []}], suspect=True) == [80.0, 1330.0]
    assert reports.resumed([fault | {"faults": [], "carried": 8}], suspect=True) == [80.0]


@pytest.mark.parametrize(
    ("kind", "delay", "after"), [("pbdma", None, 3.0), ("pbdma", 0.0, 53.0), ("trap", None, 53.0)]
)
def test_what_the_offender_waits_for_is_not_the_survivors(
    kind: str, delay: float | None, after: float
) -> None:
    """Early reports lack this figure."""
    more = {} if delay is None else {"delay": delay}
    assert reports.resumed([_fault(kind, 51.0, 4.0, _moved(False, 2.0), **more)], suspect=False) == [after]


def test_a_report_of_nothing_has_not_passed() -> None:
    assert not reports.passed({"leftovers": [], "faults": {}})
    assert not reports.passed({"leftovers": [], "faults": {"trap": []}})
    assert not takeover.passed({"leftovers": [], "backend": "simulated", "takeovers": {"warm": []}})


def test_descriptors_that_grow_with_each_fault_are_a_failure() -> None:
    def faults(*counts: tuple[int, int]) -> list[dict[str, Any]]:
        record: dict[str, Any] = {"clients": []}
        fault = {"problem": "", "programs": [], "record": record, "faults": []}
        return [fault | {"descriptors": one} for one in counts]

    quiet_period = [(43, 20), (87, 25), *[(93, 25)] * 6]
    assert reports.judge(faults(*quiet_period)) == "valid"
    assert reports.judge(faults(*((43 + 60 * n, 20) for n in range(8)))).startswith(
        "invalid: mpsd opened more"
    )
    assert "a program opened" in reports.judge(faults(*((43, 10 + 7 * n) for n in range(8))))
    assert "a program opened" in reports.judge(faults(*((43, 400 + n) for n in range(8))))
    with_threads = [{**fault, "threads": 20 + n} for n, fault in enumerate(faults(*quiet_period))]
    assert reports.judge(with_threads).startswith("invalid: a program has more threads with each fault")
    assert reports.judge([{**fault, "threads": 20} for fault in with_threads]) == "valid"


def test_faults_of_which_nothing_came_are_told_and_few() -> None:
    def faults(*nothing: bool) -> list[dict[str, Any]]:
        moved: dict[str, Any] = {"clients": []}
        fault = {"problem": "", "programs": [], "faults": []}
        return [fault | {"record": None if n else moved, "nothing": n} for n in nothing]

    assert reports.judge(faults(True, False, False, False)) == "valid"
    assert reports.judge(faults(True, True, False)) == "invalid: 2 of 3 faults had no effect"
    met = faults(True, False, False, False)
    met[0]["programs"] = [{"alive": True, "wrong": 0, "told": [719]}]
    assert "got an error" in reports.judge(met)
    kinds = {"shared_window": faults(True, False), "trap": faults(False)}
    assert list(reports._without_effect_lines(kinds)) == [
        "shared_window: 1 faults had no effect: the offender's own wait succeeded.",
        "",
    ]


def test_what_is_opened_more_with_each_fault_is_told() -> None:
    def fault(**kinds: int) -> dict[str, Any]:
        return {"kinds": kinds}

    faults = [fault(socket=9 * n, pipe=4, file=n // 4) for n in range(8)]
    assert reports.descriptor_growth(faults) == {"socket": 9}
    assert reports.descriptor_growth([*faults[:4], {"kinds": None}]) == {}
    assert list(reports._growth_lines({"trap": faults, "store": faults[:2]})) == [
        "trap: the program with most descriptors opens more with each fault: 9 of socket.",
        "",
    ]
