"""The demo's part on fail-over: what it shows, and what it says where that cannot be had."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from faultinject import demo
from faultinject.failover import reports
from mpsd.errors import UnsupportedError

KEPT = next((Path(reports.__file__).parent.parent / "reports").glob("*-moves.json"))


def _shows(monkeypatch: pytest.MonkeyPatch, found: dict[str, Any]) -> bool:
    monkeypatch.setattr(demo.failover, "few", lambda *_: found)
    return demo.carried_over("simulated")


def test_what_happened_to_the_programs_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(KEPT.read_text())
    assert _shows(monkeypatch, found)
    lines = capsys.readouterr().out.splitlines()
    trap = next(line.split() for line in lines if line.startswith("trap "))
    assert trap[:4] == ["trap", "20", "0", "0"] and trap[-1] == "valid"
    assert any(line.split()[:4] == ["kind", "faults", "lost", "told"] for line in lines)


def test_a_program_that_was_lost_fails_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    found = copy.deepcopy(json.loads(KEPT.read_text()))
    found["faults"]["trap"][0]["programs"][0]["alive"] = False
    assert not _shows(monkeypatch, found)


def test_without_a_compiler_the_demo_says_what_it_does_not_show(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def few(*_: object) -> dict[str, Any]:
        raise UnsupportedError("there is no gcc", remedy="apt-get install gcc")

    monkeypatch.setattr(demo.failover, "few", few)
    assert demo.carried_over("simulated")
    assert "fail-over is not shown: there is no gcc" in capsys.readouterr().out
