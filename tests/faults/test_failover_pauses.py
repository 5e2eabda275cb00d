"""Moves of each program beside an offender under the proxy and a client that takes no part."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from faultinject.campaigns import check
from faultinject.campaigns.failover import pauses, records, reports
from faultinject.campaigns.failover.command import run
from faultinject.rig.libraries import Libraries
from tests.support.libcudas import session_libraries
from tests.support.long import of

pytestmark = pytest.mark.timeout(300)
FAULTS = of(5, 2)


@pytest.fixture
def arguments(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> argparse.Namespace:
    monkeypatch.setattr(Libraries, "server_options", ("--kernel-ms", "8"))
    libraries = session_libraries(tmp_path_factory).for_harness()
    args = argparse.Namespace(backend="simulated", mode="exact", out=None, works=[], together=False)
    args.offender, args.unproxied, args.reads = "carried", True, None
    args.libcuda, args.driver = libraries.proxy, libraries.driver
    args.kinds, args.faults, args.deadline = ["trap", "store"], FAULTS, 100.0
    return args


def test_each_innocent_program_moves_once_beside_a_client_that_takes_no_part(
    arguments: argparse.Namespace, tmp_path: Path
) -> None:
    """A client that cannot deny the trap is in the domain, so the offender replays in a trial domain."""
    found = run(arguments, lambda _: None)
    for kind, faults in found["faults"].items():
        assert [fault["problem"] for fault in faults] == [""] * FAULTS
        assert [fault["unproxied"] for fault in faults] == [True] * FAULTS
        # On a slow machine the offender may be too late to say that the trap is its own.
        claimed = [fault for fault in faults if kind == "store" or claims_trap(fault)]
        assert claimed
        assert [p["moves"] for fault in claimed for p in fault["programs"]] == [1] * (3 * len(claimed))
        assert [p["trial"] for fault in claimed for p in fault["programs"]] == [None] * (3 * len(claimed))
        assert all((fault["trial"] is not None) is (kind == "trap") for fault in claimed)
        assert all(fault["named"] for fault in claimed)
        assert (reports.judge(claimed), found["leftovers"]) == ("valid", [])
    path = tmp_path / "failover.json"
    path.write_text(json.dumps(found))
    assert check.verdict_lines(path)[1]
    text = check.render(path)
    assert (
        f"| trap | server 2 | {FAULTS} | 1 | " in text and f"| trap | the offender | {FAULTS} | - | " in text
    )
    assert f"trap: named {FAULTS} of {FAULTS}" in text and "; 1 to 1 moves of every other program" in text
    assert "--offender carried --unproxied " in found["command"]


def claims_trap(fault: dict[str, Any]) -> bool:
    """Return whether the offender's own report says that it has raised the trap."""
    clients = {client["pid"]: client for client in fault["record"]["clients"]}
    return bool(clients[fault["carried"]]["whose"] == "first")


def entry(pid: int, told: float | None = 0.0, done: float | None = None) -> dict[str, Any]:
    return {"pid": pid, "told_ms": told, "done_ms": done}


def record(number: int, ms: int, trigger: str, *clients: dict[str, Any], **changes: Any) -> dict[str, Any]:
    time = f"2026-11-30T14:00:00.{ms:03}+00:00"
    found = {"id": number, "time": time, "domain": f"d{number}", "to": f"d{number + 1}", "planned": False}
    return {**found, "trigger": trigger, "clients": list(clients), **changes}


FAULT = record(1, 100, "fault", entry(7), entry(8), entry(9, told=None))
TRIAL = record(2, 150, "trial", entry(8, done=60.0), domain="d2", to="d3")
OVER = record(3, 900, "trial over", entry(8), planned=True, domain="d3", to="d2")


def test_moves_because_of_a_fault_are_counted_for_each_program() -> None:
    moves = [records.moves([FAULT, TRIAL, OVER], pid) for pid in (7, 8, 9)]
    assert moves == [1, 2, 0]


@pytest.mark.parametrize(
    ("found", "ms"),
    [
        ([FAULT], None),
        ([FAULT, TRIAL, OVER], [110.0, 60.0]),
        ([FAULT, {**TRIAL, "clients": [entry(8)]}], None),
        (
            [FAULT, {**TRIAL, "clients": [entry(8)]}, record(3, 190, "fault", entry(8), domain="d3")],
            [90.0, 40.0],
        ),
    ],
    ids=["no trial", "clean replay", "no end", "second fault"],
)
def test_the_pause_in_a_trial_domain_ends_with_its_replay_or_its_fault(
    found: list[dict[str, Any]], ms: list[float] | None
) -> None:
    assert records.trial_ms(found, 8) == ms
    assert records.trial_ms(found, 7) is None


def fault(*programs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    found = {"record": FAULT, "later": [TRIAL, OVER], "carried": 8, "bystander": 20.0, "trial": [90.0, 40.0]}
    return {**found, "programs": list(programs), "unproxied": True, **changes}


def program(moves: int = 1, **changes: Any) -> dict[str, Any]:
    return {"stall": 45.0, "usual": 5.0, "suspect": True, "moves": moves, "trial": None, **changes}


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (fault(program(), program()), ""),
        (fault(program(), program(2)), "invalid: an innocent program moved 2 times for one fault"),
        (fault(program(2, trial=[300.0, 80.0])), ""),
        (fault(program(), unproxied=False), "unknown: the client without the proxy was not lost"),
        (fault(program(2), unproxied=None), ""),
        (fault(program(), unproxied=False, record={**FAULT, "planned": True}), ""),
        (fault(program(), unproxied=False, record=None), ""),
    ],
)
def test_a_second_move_of_an_innocent_program_is_not_valid(found: dict[str, Any], says: str) -> None:
    assert pauses.problem(found) == says


def test_a_table_has_a_row_for_each_program_and_the_offender() -> None:
    later = fault(program(2, trial=[300.0, 80.0], stall=75.0), program(), trial=None)
    finished: dict[str, Any] = {
        "works": ["generate", "mixed"],
        "faults": {"trap": [fault(program(), program()), later]},
    }
    assert pauses.table(finished)[1:] == [
        ["trap", "generate", "2", "1 to 2", "2", "1", "35.00 / 50.00", "300.00 / 300.00", "80.00 / 80.00"],
        ["trap", "mixed", "2", "1", "2", "0", "20.00 / 20.00", "-", "-"],
        ["trap", "the offender", "2", "-", "-", "1", "-", "90.00 / 90.00", "40.00 / 40.00"],
    ]
    assert pauses.moves_of_innocents(finished["faults"]["trap"][:1]) == [1]


def test_a_report_without_moves_of_programs_has_no_such_table() -> None:
    old = {"stall": 40.0, "suspect": True}
    finished: dict[str, Any] = {
        "works": [],
        "faults": {"trap": [{"record": FAULT, "bystander": 20.0, "programs": [old]}]},
    }
    assert pauses.table(finished) == [pauses.HEAD] and list(pauses.lines(finished)) == []
