"""Programs survive faults that nothing isolates, under a whole mpsd, on the simulated GPU."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from faultinject.campaigns.failover import reports
from faultinject.campaigns.failover.command import main_settings, run
from faultinject.campaigns.failover.outcomes import Fault, data
from faultinject.campaigns.failover.programrounds import ProgramRounds
from faultinject.campaigns.failover.reports import judge
from faultinject.campaigns.failover.rounds import NOT_RECORDED, Offenders, Rounds
from faultinject.evidence import files
from faultinject.registry.history import History, clock
from faultinject.rig.libraries import Libraries
from faultinject.rig.node import Node, open_simulated_node
from faultinject.rig.rig import Rig
from faultinject.rig.worker import Worker
from mpsd.exporter import metrics
from tests.support.libcudas import session_libraries
from tests.support.long import only_long

pytestmark = pytest.mark.timeout(300)
DEADLINE_S = 90.0
FAULTS = 2
"""Faults of one kind in succession: one move there and one move back."""


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the blocks of steps at a fault. Programs compute less often, so they need less of a core."""
    monkeypatch.setattr("faultinject.campaigns.failover.programrounds.BLOCK_S", 0.4)
    monkeypatch.setattr(Libraries, "server_options", ("--kernel-ms", "8"))


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    return session_libraries(tmp_path_factory).for_harness()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    opened = open_simulated_node(tmp_path)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    "kind",
    ["store", "trap", "server_death", "drain", "endless"]
    + [pytest.param(kind, marks=only_long) for kind in ("misaligned", "pbdma")],
)
def test_no_program_is_lost(node: Node, libraries: Libraries, kind: str) -> None:
    with History() as history, Rig(node, "mpsd", history, settings=main_settings(libraries)) as rig:
        rounds = Rounds(rig, libraries, lambda _: None)
        rounds.start()
        found = data(rounds.run(kind, FAULTS, DEADLINE_S))
        assert rounds.end() == ""
    assert rig.leftovers == []
    assert [len(found), judge(found)] == [FAULTS, "valid"]
    assert all(fate["outcome"] == "moved" for fault in found for fate in fault["record"]["clients"])
    # The work in flight was replayed, so no program saw an error.
    assert [p["told"] for fault in found for p in fault["programs"]] == [[]] * (3 * FAULTS)


@pytest.mark.parametrize(("kind", "moves"), [("trap", 3), ("store", 1)])
def test_an_offender_that_is_carried_over_is_named_by_its_own_work(
    node: Node, libraries: Libraries, kind: str, moves: int
) -> None:
    """After a trap it alone moves on, into a trial domain, which its replay faults."""
    with History() as history, Rig(node, "mpsd", history, settings=main_settings(libraries)) as rig:
        rounds = Rounds(rig, libraries, lambda _: None, Offenders(proxied=True))
        rounds.start()
        found = data(rounds.run(kind, FAULTS, DEADLINE_S))
        rounds.end()
    assert rig.leftovers == []
    assert [len(found), judge(found)] == [FAULTS, "valid"]
    assert [(fault["named"], 1 + len(fault["later"]), fault["offender_code"]) for fault in found] == [
        (True, moves, 719 if kind == "trap" else 700)
    ] * FAULTS
    assert [p["told"] for fault in found for p in fault["programs"]] == [[]] * (3 * FAULTS)


def test_an_offender_that_was_there_first_replays_alone_for_what_it_launched_is_new(
    node: Node, libraries: Libraries
) -> None:
    """The other participants fail over once."""
    earlier = [("trap", number) for number in range(FAULTS)]
    with History() as history, Rig(node, "mpsd", history, settings=main_settings(libraries)) as rig:
        rounds = Rounds(rig, libraries, lambda _: None, Offenders(True, earlier))
        rounds.start()
        found = data(rounds.run("trap", FAULTS, DEADLINE_S))
        rounds.end()
    assert rig.leftovers == []
    assert [len(found), judge(found), *(fault["named"] for fault in found)] == [FAULTS, "valid", True, True]
    others = 0
    for fault in found:
        offender = next(f["offender"]["pid"] for f in fault["faults"] if f["offender"])
        turns = {fate["pid"]: fate["turn_ms"] for fate in fault["record"]["clients"] if fate["turn_ms"]}
        assert offender not in turns
        assert [{c["pid"] for c in record["clients"]} for record in fault["later"]] == [{offender}] * 2
        others += len(turns)
    # A participant without work in flight takes no turn.
    assert others


class Harmless(Rounds):
    """The offender's wait ends with this code, and no fault follows."""

    code = 0

    def _trigger(self, fault: Fault, server: int | None, offender: Worker | None) -> float:
        fault.offender_code = self.code
        return clock()


@pytest.mark.parametrize("code", [0, 719])
def test_a_fault_of_which_nothing_comes_is_told_from_one_that_nobody_saw(
    node: Node, libraries: Libraries, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("faultinject.campaigns.failover.rounds.MOVED_S", 0.3)
    with History() as history, Rig(node, "mpsd", history, settings=main_settings(libraries)) as rig:
        rounds = Harmless(rig, libraries, lambda _: None)
        rounds.code = code
        rounds.start()
        found = rounds.run("shared_window", FAULTS, DEADLINE_S)
        rounds.end()
    if code == 0:
        assert [(f.nothing, f.problem, f.bystander is not None) for f in found] == [(True, "", True)] * FAULTS
        assert judge(data(found)) == f"invalid: {FAULTS} of {FAULTS} faults had no effect"
    else:
        assert [(f.nothing, f.problem) for f in found] == [(False, NOT_RECORDED)]


@pytest.mark.parametrize(
    ("kind", "work"),
    [
        ("store", "bindings_graphs"),
        ("trap", "bindings_copies"),
        pytest.param("misaligned", "bindings_nodes", marks=only_long),
        ("trap", "bindings_segments"),
    ],
)
def test_programs_compute_what_they_would_have_without_faults(
    node: Node, libraries: Libraries, kind: str, work: str
) -> None:
    works = ("calls", work) if importlib.util.find_spec("cuda") else ("calls",)
    with History() as history, Rig(node, "mpsd", history, settings=main_settings(libraries)) as rig:
        rounds = ProgramRounds(rig, libraries, lambda _: None, works)
        rounds.start()
        faults = rounds.run(kind, FAULTS, DEADLINE_S)
        rounds.end()
        same = rounds.compare(faults)
    assert (len(faults), same, judge(data(faults))) == (FAULTS, dict.fromkeys(works, True), "valid")


def test_what_was_in_flight_may_be_lost_in_mode_keep(node: Node, libraries: Libraries) -> None:
    settings = main_settings(libraries, "keep")
    with History() as history, Rig(node, "mpsd", history, settings=settings) as rig:
        rounds = Rounds(rig, libraries, lambda _: None)
        rounds.start()
        found = data(rounds.run("trap", FAULTS, DEADLINE_S))
        rounds.end()
    assert [len(found), judge(found)] == [FAULTS, "valid"]


@pytest.mark.parametrize(
    ("together", "works"),
    [pytest.param(False, [], marks=only_long), (True, []), (True, ["calls"])],
    ids=["apart", "servers", "programs"],
)
def test_a_report_of_what_is_done_is_there_before_the_end(
    libraries: Libraries, tmp_path: Path, together: bool, works: list[str]
) -> None:
    found: list[dict[str, Any]] = []
    args = argparse.Namespace(
        backend="simulated", mode="exact", out=None, works=works, offender="plain", together=together
    )
    args.libcuda, args.driver, args.reads = libraries.proxy, libraries.driver, None
    args.unproxied = False
    args.kinds, args.faults, args.deadline = ["server_death", "drain"], 1, DEADLINE_S
    whole = run(args, found.append)
    assert [list(made["faults"]) for made in (*found, whole)] == [["server_death"], ["server_death", "drain"]]
    for number, made in enumerate((*found, whole)):
        path = tmp_path / f"{number}.json"
        files.save(made, path)
        assert reports.load(files.read(path), path) == made
        # The programs' results are compared at the end, with the whole report.
        is_early = number == 0 and together and works
        problems = [fault["problem"] for faults in made["faults"].values() for fault in faults]
        assert reports.passed(made) is not bool(is_early), problems
        assert f"--kinds {','.join(made['faults'])} " in made["command"]


def test_the_exporter_tells_of_it(node: Node, libraries: Libraries) -> None:
    with History() as history, Rig(node, "mpsd", history, settings=main_settings(libraries)) as rig:
        rounds = Rounds(rig, libraries, lambda _: None)
        rounds.start()
        assert judge(data(rounds.run("drain", 1, DEADLINE_S))) == "valid"
        registry = metrics.CollectorRegistry(auto_describe=False)
        registry.register(metrics.Collector(lambda: metrics.query_daemon(str(rig.mpsd.socket))))
        told = metrics.generate_latest(registry).decode()
        rounds.end()
    assert "mpsd_up 1.0" in told
    assert 'mpsd_failover_programs_told_total{outcome="moved"} 3.0' in told
    assert 'mpsd_failover_seconds_count{step="fence"} 3.0' in told
