"""Programs under mpsd-standby continue in another process, under a whole mpsd, on the simulated GPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from faultinject.__main__ import main
from faultinject.campaigns import takeover
from faultinject.evidence import files
from mpsd.base.errors import UsageError
from tests.support.libcudas import session_libraries
from tests.support.waiting import BUILD_S

pytestmark = pytest.mark.timeout(BUILD_S)


def test_counts_go_on_warm_and_cold_and_the_report_is_read_again(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    libraries = session_libraries(tmp_path_factory)
    named = ["--libcuda", str(libraries.proxy), "--driver", str(libraries.standin)]
    options = [*named, "--kinds", "misaligned", "--faults", "2", "--json", str(path)]
    assert main(["takeover", *options]) == 0
    found = json.loads(path.read_text())
    assert {mode: [f["kind"] for f in faults] for mode, faults in found["takeovers"].items()} == {
        mode: ["misaligned", "misaligned"] for mode in ("warm", "cold")
    }
    for faults in found["takeovers"].values():
        assert all(0 < f["heard"] <= f["ended"] <= f["settled"] for f in faults), faults
        # The earlier of the two lets the next process continue.
        free = [f["settled"] if f["left"] is None else min(f["left"], f["settled"]) for f in faults]
        assert all(first <= f["after"] for f, first in zip(faults, free, strict=True)), faults
    assert not found["leftovers"]
    capsys.readouterr()
    assert main(["check", str(path)]) == 0
    assert main(["render", str(path)]) == 0
    said = capsys.readouterr().out
    assert "Simulated: these times are no GPU's" in said and "| cold | misaligned | 2 |" in said


def test_what_was_said_at_an_earlier_fault_is_none_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(kind: str, at: float, **more: float) -> str:
        return json.dumps({"kind": kind, "text": "", "at": at, **more})

    before = [said("lost", 100.0), said("settled", 100.05, ms=20.0, ended_ms=10.0), "{what a program prints}"]
    rig = SimpleNamespace(error_text=lambda program, most: "\n".join(before))
    takeovers = takeover.Takeovers(cast(Any, rig), cast(Any, SimpleNamespace(driver=None)), "warm")
    monkeypatch.setattr(takeovers, "_program", None, raising=False)

    def stages() -> list[float | None]:
        one = takeover.Takeover("trap")
        takeovers._fill_in_stages(one, 200.0, 0.0)
        return [one.heard, one.left, one.ended, one.settled]

    assert stages() == [None, None, None, None]
    # The process ended by itself before the fault of its domain was known.
    before.append(said("settled", 200.5, ms=250.0, ended_ms=0.0))
    assert stages() == [None, None, 250.0, 500.0]
    before[-1:] = [said("lost", 200.125), said("settled", 200.5, ms=375.0, ended_ms=125.0)]
    assert stages() == [125.0, None, 250.0, 500.0]
    before.append(said("left", 200.25, ms=125.0))
    assert stages() == [125.0, 250.0, 250.0, 500.0]


def fault(**changes: object) -> dict[str, object]:
    stages = {"heard": 1.0, "ended": 2.0, "settled": 3.0}
    found = {"kind": "trap", "problem": "", **stages, "after": 100.0, "stall": 50.0, "lost": 0, "wrong": 0}
    return {**found, **changes}


@pytest.mark.parametrize(
    ("faults", "timed", "verdict"),
    [
        ([fault(), fault(lost=1), fault(after=130.9)], True, "valid"),
        ([fault(after=140.0)], True, "invalid: 90 ms beyond the stall"),
        ([fault(after=140.0)], False, "valid"),
        ([fault(lost=2)], False, "invalid: counts"),
        ([fault(wrong=1)], False, "invalid: counts"),
        ([fault(), fault(problem="silent", after=None)], False, "invalid: silent"),
    ],
)
def test_what_is_no_good_is_said(faults: list[dict[str, object]], timed: bool, verdict: str) -> None:
    assert takeover.judge("warm", faults, timed=timed).startswith(verdict)


def test_another_report_is_not_read_as_one(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("{}")
    assert takeover.load(files.read(path), path) is None
    path.write_text(json.dumps({"kind": takeover.KIND, "schema": 1}))
    with pytest.raises(UsageError, match="no report of this program"):
        takeover.load(files.read(path), path)


def test_kinds_that_are_not_there_are_named() -> None:
    assert main(["takeover", "--kinds", "bolt"]) == 2
    assert main(["takeover", "--modes", "tepid"]) == 2
