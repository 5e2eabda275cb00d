"""One fault of each kind beside programs without a configuration: a simulated run, the verdicts."""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from faultinject.campaigns import check
from faultinject.campaigns.defaults import command, reports
from faultinject.campaigns.defaults.rounds import MAX_LIVES, DefaultRounds
from faultinject.registry.history import History
from faultinject.registry.kinds import AUTO
from faultinject.rig.libraries import Libraries
from faultinject.rig.node import Node, open_simulated_node, without_settings
from faultinject.rig.rig import Rig
from faultinject.rig.worker import Worker
from mpsd.base.errors import UsageError
from mpsd.base.protection import ProtectSetting
from tests.support.libcudas import session_libraries
from tests.support.long import of

pytestmark = pytest.mark.timeout(300)
DEADLINE_S = 60.0
PROGRAMS = ["calls", "bindings"] if importlib.util.find_spec("cuda") else ["calls"]


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("faultinject.campaigns.defaults.rounds.BLOCK_S", 0.4)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    return session_libraries(tmp_path_factory).for_harness()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    opened = open_simulated_node(tmp_path)
    yield opened
    opened.close()


def test_no_program_is_lost_that_status_called_protected(libraries: Libraries, tmp_path: Path) -> None:
    kinds = of(["store", "trap", "server_death", "zone_past_end"], ["trap", "zone_past_end"])
    args = argparse.Namespace(
        backend="simulated", programs=PROGRAMS, kinds=kinds, deadline=DEADLINE_S, out=None, faults=1
    )
    args.protect = ProtectSetting.AUTO
    args.libcuda, args.driver = libraries.proxy, libraries.driver
    partial: list[dict[str, Any]] = []
    found = command.Run(args, partial.append).run()
    assert reports.passed(found), [verdict for _, verdict in reports.verdicts(found)]
    assert [len(made["faults"]) for made in partial] == list(range(1, len(kinds) + 1))
    assert not reports.passed(partial[-1])
    assert found["level"] == "failover" and "protect" not in found["settings"]
    fates = {
        fault["kind"]: [(p["called"], p["fate"]) for p in fault["programs"]] for fault in found["faults"]
    }
    assert fates["trap"] == [("failover", "moved")] * len(PROGRAMS)
    assert fates["zone_past_end"] == [("failover", "kept")] * len(PROGRAMS)
    path = tmp_path / "defaults.json"
    path.write_text(json.dumps(found))
    lines, are_valid = check.verdict_lines(path)
    assert are_valid and len(lines) == len(kinds) + 1
    assert "| calls | mpsd-run | failover |" in check.render(path)


def test_a_program_that_was_lost_starts_again_and_is_compared_from_its_start(
    node: Node, libraries: Libraries
) -> None:
    with History() as history, Rig(without_settings(node), AUTO, history, libraries=libraries) as rig:
        rounds = DefaultRounds(rig, libraries, lambda _: None, ["calls"])
        rounds.record_reference(2)
        rounds.start()
        first = rounds.inject("server_death", DEADLINE_S)
        program = rounds.programs[0]
        _kill(program.worker)
        unexplained = rounds.inject("trap", DEADLINE_S)
        program.lost = True
        second = rounds.inject("trap", DEADLINE_S)
        _kill(program.worker)
        program.lost, program.lives = True, MAX_LIVES
        last = rounds.inject("store", DEADLINE_S)
        assert rounds.end() == ""
    assert rig.leftovers == []
    assert unexplained.problem.startswith("between two faults calls-life-1 is lost")
    assert [fault.problem for fault in (first, second, last)] == ["", "", ""]
    fates = [fault.programs[0].fate for fault in (first, second, last)]
    assert fates == ["moved", "moved", "not running"]


def test_mode_auto_takes_the_level_that_a_run_asks_for(node: Node, libraries: Libraries) -> None:
    guard = {"protect": '"guard"'}
    with (
        History() as history,
        Rig(without_settings(node), AUTO, history, settings=guard, libraries=libraries) as rig,
    ):
        assert "protect" in rig.mpsd.setting_names()
        assert rig.mpsd.status()["protection"]["level"] == "guard"


def _kill(worker: Worker) -> None:
    worker.signal(signal.SIGKILL)
    worker.require("gone", timeout=DEADLINE_S)


def program(**changes: Any) -> dict[str, Any]:
    found = {"program": "calls", "called": "failover", "why": "", "fate": "moved", "pause": 40.0}
    return {**found, "idle": False, "error": "", **changes}


def fault(kind: str = "trap", *programs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    found = {"kind": kind, "problem": "", "offender_code": 719, "programs": list(programs or [program()])}
    found |= {"gpu_stall": 20.0, "moves": 1, "classes": ["sm-trap"], "innocent": []}
    return {**found, **changes}


def report(*faults: dict[str, Any], level: str = "failover") -> dict[str, Any]:
    return {"faults": list(faults), "level": level, "problem": "", "leftovers": []}


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (fault(), "valid"),
        (fault("trap", program(fate="lost")), "invalid: calls was lost, and status had called it protected"),
        (fault("trap", program(fate="lost", called="guard")), "valid"),
        (
            fault("zone_null", program(fate="lost", called="guard")),
            "invalid: calls was lost to an access that",
        ),
        (fault("zone_distant", program(fate="lost", called="guard")), "valid"),
        (fault("trap", program(fate="wrong results", called="guard")), "invalid: calls has other results"),
        (fault(innocent=["calls"]), "invalid: mpsd named calls, which is innocent"),
        (fault(problem="a fail-over did not end"), "invalid: a fail-over did not end"),
    ],
)
def test_a_verdict_comes_from_what_status_said_before(made: dict[str, Any], says: str) -> None:
    assert reports.judge(made, "failover").startswith(says)


def test_a_run_without_a_protected_program_proves_nothing() -> None:
    guarded = fault("trap", program(called="guard", fate="lost"))
    assert dict(reports.verdicts(report(guarded, level="guard")))["the run"].startswith("unknown")
    assert not reports.passed(report(guarded, level="guard"))
    assert reports.passed(report(guarded, fault()))


def test_programs_without_work_are_counted() -> None:
    told = reports.summary(report(fault("trap", program(), program(idle=True))))
    assert "protected by fail-over 2 times; 0 of these were lost. 1 times the program had no work" in told


def test_faults_without_effect_are_few() -> None:
    silent = fault(offender_code=0, moves=0, classes=[])
    assert reports.passed(report(silent, fault(), fault(), fault()))
    assert (
        "2 of 4 faults had no effect"
        in dict(reports.verdicts(report(silent, silent, fault(), fault())))["the run"]
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kinds": ["zone_freeze"]}, "there is no kind 'zone_freeze'"),
        ({"kinds": ["trap", "trap"]}, "a kind is named twice"),
        ({"programs": ["mixed"]}, "there is no program 'mixed'"),
    ],
)
def test_a_wrong_name_is_refused_with_those_that_exist(changes: dict[str, Any], says: str) -> None:
    args = argparse.Namespace(**{"backend": "simulated", "kinds": ["trap"], "programs": ["calls"], **changes})
    with pytest.raises(UsageError, match=says):
        command.check_names(args)
