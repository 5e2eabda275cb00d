"""State rows of revision 50d9fcb (tests/data/upgrade/state.json), read into a state and written again.

The recorded processes have exited, so most rows restore nothing as they are. Here the first client is a
living process, this one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from mpsd.base.model import ClientId, FailoverMode, ProcessFacts, ProcessInstance, SnapshotBudget, ZonePolicy
from mpsd.config.layout import Layout
from mpsd.core import events as ev
from mpsd.core.failover.participants import SWITCHED_OFF, Excess, SnapshotLimit, Standing
from mpsd.core.state import Policy, State
from mpsd.daemon import adoption
from mpsd.daemon.adoption import Adoption
from mpsd.os import processes as procs
from tests.support.core import World
from tests.support.upgradefixtures import state as recorded_state
from tests.support.upgradescene import keys_of
from tests.unit.test_adoption import Parts
from tests.unit.test_core_trial import trying

REASON = "its replay failed"
ME = [os.getpid(), procs.facts(os.getpid()).instance.start_ticks]


def recorded() -> dict[str, Any]:
    """Return the recorded state with one living client: a participant with a policy for guard hits."""
    saved = recorded_state()
    client, member, policy = saved["clients"][0], saved["members"][0], saved["zone_policies"][0]
    assert member["process"] == [client["pid"], client["start_ticks"]]
    client["pid"], client["start_ticks"] = ME
    member["process"] = policy["process"] = ME
    return saved


class Recorded(Parts):
    """Stand-in for the parts of a daemon. All recorded domains live on, and the store has all leases."""

    def __init__(self, saved: dict[str, Any], world: World) -> None:
        rows = saved["clients"]
        super().__init__(
            *(ClientId(r["domain"], ProcessInstance(r["pid"], r["start_ticks"])) for r in rows),
        )
        self.domains = {row["id"]: row for row in saved["domains"]}
        self.living = facts_of(rows[0])
        self.world = world
        self.missed = self.attach

    def names(self) -> list[str]:
        return list(self.domains)

    def adopt(
        self, name: str, gpus: tuple[str, ...], uid: int | None, control: ProcessInstance
    ) -> ProcessInstance:
        assert control == ProcessInstance(*self.domains[name]["control"])
        return ProcessInstance(*self.domains[name]["server"])

    def ask(self, name: str) -> None:
        pass

    def attach(self) -> None:
        assert self.noticed_pids == [("d2", os.getpid())]
        self.world.do(ev.ClientNoticed("d2", self.living, listed=True))
        self.world.do(ev.ClientAttached("d2", self.living.instance, 1, tracked=True, apart=True))


def facts_of(row: dict[str, Any]) -> ProcessFacts:
    instance = ProcessInstance(row["pid"], row["start_ticks"])
    texts = (row["command"], row["exe"], row["cgroup"])
    return ProcessFacts(instance, row["ppid"], row["uid"], row["gid"], *texts)


def restored(
    base: Path,
    saved: dict[str, Any],
    seen: Callable[[ev.Event], object] = bool,
    memory: Mapping[str, int] = MappingProxyType({}),
) -> State:
    """Return the state that a daemon has of these rows once it knows their living clients.

    `seen` is called with each event that the reader posts. `memory`: of each GPU [bytes].
    """
    world = World(Policy(failover=FailoverMode.KEEP, gpu_memory=memory))
    layout = Layout(base / "r", base / "l", base / "s")
    (slot,) = saved["slots"]
    for name in (row["id"] for row in saved["domains"]):
        layout.pipe_dir(name).mkdir(parents=True)
    layout.slot_path(slot["id"]).parent.mkdir()
    layout.slot_path(slot["id"]).symlink_to(layout.pipe_dir(slot["active"]))
    parts: Any = Recorded(saved, world)
    taking = Adoption(layout, parts, parts, parts, parts, lambda event: (seen(event), world.do(event)))
    taking.run(saved)
    asyncio.run(taking.join_living())
    return world.state


def written(state: State, saved: dict[str, Any]) -> dict[str, Any]:
    found = adoption.to_file(state, {})
    # Limits have another form now; tests/integration/test_upgrade.py reads the old one.
    assert found.pop("limits") == {} and found.pop("settings") == {}
    saved.pop("settings", None)
    found["clients"].sort(key=lambda row: [r["pid"] for r in saved["clients"]].index(row["pid"]))
    return found


def test_recorded_rows_are_written_again_as_they_were_read(tmp_path: Path) -> None:
    saved = recorded()
    found = written(restored(tmp_path, saved), saved)
    # Later versions add these keys.
    assert all(row.pop("listed") is True for row in found["clients"])
    assert not any((row.pop("full"), row.pop("trial")) != (False, None) for row in found["domains"])
    added = ("account", "joined", "second")
    assert [[row.pop(key) for key in added] for row in found["slots"]] == [[None, True, None]]
    assert found.pop("lost_gpus") == {}
    assert [(row.pop("limit"), row.pop("excess")) for row in found["members"]] == [(None, None)]
    assert keys_of(found) == keys_of(saved)
    # The other participant has exited, and the slot was used just now.
    assert saved.pop("members")[:1] == found.pop("members")
    assert saved["slots"][0].pop("used") and found["slots"][0].pop("used")
    assert found == saved


def test_the_time_of_last_use_is_read(tmp_path: Path) -> None:
    saved, events = recorded(), list[ev.Event]()
    restored(tmp_path, saved, events.append)
    (wanted,) = (event for event in events if isinstance(event, ev.SlotWanted))
    assert wanted.used == saved["slots"][0]["used"] is not None


def test_budgets_of_a_participant_are_read_and_written(tmp_path: Path) -> None:
    saved = recorded()
    gpus = frozenset(saved["slots"][0]["gpus"])
    excess = {"budget": 1, "needs": 580, "has": 30, "listable": True}
    saved["members"][0] |= {"limit": {"bytes": 4096, "gpus": sorted(gpus)}, "excess": excess}
    state = restored(tmp_path, saved, memory=dict.fromkeys(gpus, 1 << 30))
    assert the_member(state).limit == SnapshotLimit(4096, gpus)
    assert the_member(state).excess == Excess(SnapshotBudget.TIME, 580, 30, True)
    assert written(state, saved)["members"] == saved["members"][:1]


def test_that_a_participant_was_switched_off_is_written_so_that_an_earlier_mpsd_reads_the_row(
    tmp_path: Path,
) -> None:
    saved = recorded()
    more = {"limit": None, "excess": None, "switched_off": True}
    saved["members"][0] |= more
    state = restored(tmp_path, saved)
    assert the_member(state).excess == SWITCHED_OFF
    (row,) = written(state, saved)["members"]
    assert {key: row[key] for key in more} == more


def test_a_trial_domain_is_read(tmp_path: Path) -> None:
    saved, events = recorded(), list[ev.Event]()
    saved["domains"][0]["trial"] = ME
    restored(tmp_path, saved, events.append)
    adopted = {e.domain: e.trial for e in events if isinstance(e, ev.DomainAdopted)}
    assert adopted == {"d2": ProcessInstance(*ME), "d3": None}


def test_a_trial_domain_is_written() -> None:
    rows = {row["id"]: row["trial"] for row in adoption.to_file(trying().state, {})["domains"]}
    assert (rows["d2"], rows["d3"]) == (None, [10, 1])


def test_budgets_that_make_no_sense_leave_the_participant_out(tmp_path: Path) -> None:
    saved = recorded()
    saved["members"][0]["excess"] = {"budget": 3}
    assert not restored(tmp_path, saved).members


def the_member(state: State) -> Any:
    return state.members[ProcessInstance(*ME)]


def the_client(state: State) -> Any:
    return state.clients[ClientId("d2", ProcessInstance(*ME))]


# For each key: its rows, a value other than the recorded one, and whether a state has it.
READ: dict[str, tuple[Callable[[dict[str, Any]], Any], Any, Callable[[State], Any]]] = {
    "home": (lambda s: s["members"][0], "d3", lambda state: the_member(state).home == "d3"),
    "uid": (lambda s: s["members"][0], 4711, lambda state: the_member(state).uid == 4711),
    "mode": (
        lambda s: s["members"][0],
        "exact",
        lambda state: the_member(state).mode is FailoverMode.EXACT,
    ),
    "left_behind": (
        lambda s: s["members"][0],
        REASON,
        lambda state: (
            (the_member(state).standing, the_member(state).reason) == (Standing.LEFT_BEHIND, REASON)
        ),
    ),
    "policy": (
        lambda s: s["zone_policies"][0],
        "freeze",
        lambda state: the_client(state).zone_policy is ZonePolicy.FREEZE,
    ),
    "frozen": (lambda s: s["zone_policies"][0], True, lambda state: the_client(state).frozen is not None),
    "bereft": (
        lambda s: s["domains"][0],
        [ME],
        lambda state: state.domains["d2"].bereft == {ProcessInstance(*ME)},
    ),
    "members": (lambda s: s, [], lambda state: not state.members),
    "zone_policies": (lambda s: s, [], lambda state: the_client(state).zone_policy is None),
}


@pytest.mark.parametrize("key", READ)
def test_each_key_is_read_and_written(tmp_path: Path, key: str) -> None:
    """A reader that looks for another name restores the recorded value or none, and stays silent."""
    rows, value, has_it = READ[key]
    saved = recorded()
    assert not has_it(restored(tmp_path / "recorded", saved))
    assert rows(saved)[key] != value
    rows(saved)[key] = value
    state = restored(tmp_path / "changed", saved)
    assert has_it(state)
    assert rows(written(state, saved))[key] == value
