"""The protection of each client in status: the level that it has now, and why it has no more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from mpsd.api.failoverview import participant_view
from mpsd.api.privacy import HIDDEN, visible_to
from mpsd.api.protectionview import LOST_PROXY, PLAIN, READS, Knowledge, client_view
from mpsd.base.model import FailoverMode, ServerState, SnapshotBudget
from mpsd.base.protection import Protection, ProtectionLevel
from mpsd.clients.starts import Start
from mpsd.core import events as ev
from mpsd.core.failover import reports as mev
from mpsd.core.failover.participants import Excess, SavingCost
from mpsd.core.state import Policy
from mpsd.peers import Peer
from tests.support.core import GPU, UID, World, facts, process

OBSERVE, GUARD, FAILOVER = ProtectionLevel
NODE = Protection(FAILOVER)
EXACT = FailoverMode.EXACT
ZONES = {"managed": 4, "sparse": 0, "uncovered": 0}
PID, COST = 10, 1 << 20


class Programs(World):
    """A world with d1 active, d2 its standby domain, and one client that has joined d1."""

    def __init__(self, policy: Policy | None = None) -> None:
        super().__init__(policy or Policy(failover=EXACT))
        self.ready()
        self.do(ev.DriverFilesSeen(""))
        self.attach("d1")

    def attach(self, domain: str) -> None:
        self.do(ev.ClientNoticed(domain, facts(PID)))
        self.do(ev.ClientAttached(domain, process(PID), 1, tracked=True, apart=True))

    def hello(self, mode: FailoverMode = EXACT) -> None:
        self.do(mev.MemberCame(process(PID), UID, mode, budgets=True))

    def is_ready(self) -> None:
        self.attach("d2")
        self.do(mev.MemberReady(process(PID), 2, 5_000_000, COST))

    def view(
        self,
        *,
        domain: str = "d1",
        node: Protection = NODE,
        vault: bool = True,
        zones: Mapping[str, Any] | None = ZONES,
        start: Start | None = None,
    ) -> tuple[str, str, int | None]:
        known = Knowledge(node, vault, zones, start)
        found = client_view(self.state, self.client(domain, PID), known, self.now)
        return found["level"], found["why"], found["cost_bytes"]

    def row(self) -> Mapping[str, Any]:
        known = Knowledge(NODE, True, ZONES, None, {GPU: 3})
        return client_view(self.state, self.client("d1", PID), known, self.now)


def protected(policy: Policy | None = None) -> Programs:
    world = Programs(policy)
    world.hello()
    world.is_ready()
    return world


def test_a_client_that_would_fail_over_has_the_nodes_level() -> None:
    world = protected()
    assert world.view() == ("failover", "", COST)
    assert world.view(domain="d2") == ("failover", "", COST), "its standby context has the same level"
    assert world.view(node=Protection(GUARD, "unproven")) == ("guard", "", COST)
    assert world.view(node=Protection(OBSERVE, "unproven")) == ("observe", "", COST)


@pytest.mark.parametrize(
    ("start", "why"),
    [
        (None, "mpsd's libcuda is not connected"),
        (Start(None, proxy=False), PLAIN),
        (Start(OBSERVE, proxy=False), "started at level observe"),
        (Start(GUARD, proxy=False), LOST_PROXY),
        (Start(FAILOVER, proxy=False), LOST_PROXY),
        (Start(FAILOVER, proxy=True), "mpsd's libcuda has not connected yet"),
        (Start(None, proxy=True), "mpsd's libcuda has not connected yet"),
    ],
)
def test_a_client_without_the_proxy_is_observed(start: Start | None, why: str) -> None:
    world = Programs()
    assert world.view(vault=False, zones=None, start=start) == ("observe", why, 0)
    node = Protection(OBSERVE, "unproven")
    assert world.view(vault=False, zones=None, start=start, node=node) == ("observe", "", 0)


def test_a_client_with_guard_zones_alone_is_guarded() -> None:
    world = Programs()
    assert world.view() == ("guard", "it takes no part in fail-over", 0)
    assert world.view(start=Start(GUARD, proxy=True)) == ("guard", "started at level guard", 0)
    assert world.view(node=Protection(GUARD, "unproven")) == ("guard", "", 0)
    unlaid = {"managed": 0, "sparse": 0, "uncovered": 3}
    for zones in (None, unlaid):
        assert world.view(zones=zones) == ("observe", "its guard zones are not laid", 0)
    assert world.view(zones={**unlaid, "sparse": 1})[0] == "guard"


def test_each_obstacle_of_fail_over_is_named() -> None:
    world = Programs()
    world.hello()
    assert world.view() == ("guard", "its standby context is in preparation", 0)
    world.do(mev.MemberUnready(process(PID), 2, "the snapshot needs 14 GiB"))
    assert world.view() == ("guard", "the snapshot needs 14 GiB", 0)
    world = protected()
    world.do(mev.MemberOpaque(process(PID), "cuTexRefCreate"))
    level, why, _ = world.view()
    assert level == "guard" and "cuTexRefCreate" in why
    world = protected()
    world.do(mev.MemberLeft(process(PID)))
    assert world.view() == ("guard", "its connection for fail-over has ended", None)
    keep = Programs(Policy(failover=FailoverMode.KEEP))
    keep.hello()
    keep.is_ready()
    assert keep.view() == ("guard", "its fail-over mode is keep, which loses work in flight", COST)
    alone = Programs(Policy(failover=EXACT, spare=False))
    alone.hello()
    assert alone.view()[:2] == ("guard", "its standby domain is starting")
    single = World(Policy(failover=EXACT))
    single.ready(exclusive=True)
    single.join(PID)
    single.do(mev.MemberCame(process(PID), UID, EXACT))
    known = Knowledge(NODE, True, ZONES, None)
    assert "EXCLUSIVE_PROCESS" in client_view(single.state, single.client("d1", PID), known, 0.0)["why"]


def test_a_client_that_moved_too_often_would_not_move_again() -> None:
    world = protected()
    participant = world.state.members[process(PID)]
    often = replace(participant, told=(world.now - 1, world.now - 2, world.now - 3))
    world.state = replace(world.state, members={process(PID): often})
    assert world.view()[:2] == ("guard", "it moved 3 times within a minute")
    world.wait(60)
    assert world.view()[0] == "failover"


def test_a_client_that_has_lost_its_work_or_is_not_held_has_no_protection() -> None:
    world = Programs()
    world.server_state("d1", ServerState.FAULT)
    world.fault(PID)
    assert world.view() == ("none", "its GPU work is lost with its domain; restart it", 0)
    assert world.view(node=Protection(OBSERVE, "unproven"))[0] == "none"
    early = World()
    early.ready()
    early.do(ev.ClientNoticed("d1", facts(PID)))
    known = Knowledge(NODE, False, None, None)
    found = client_view(early.state, early.client("d1", PID), known, early.now)
    assert (found["level"], found["why"]) == ("none", "mpsd does not hold its GPU memory yet")
    early.do(ev.AttachFailed("d1", process(PID), "no rights"))
    found = client_view(early.state, early.client("d1", PID), known, early.now)
    assert (found["level"], found["why"]) == ("none", "mpsd could not hold its GPU memory")
    evicted = Programs()
    evicted.evict(PID)
    assert evicted.view()[:2] == ("none", "mpsd evicts it")


def test_a_client_that_is_moving_has_not_lost_its_work() -> None:
    world = protected()
    world.server_state("d1", ServerState.FAULT)
    level, why, _ = world.view()
    assert (level, why) == ("guard", "it is moving to another domain")


def test_other_users_do_not_see_why() -> None:
    row = {"pid": 1, "uid": 8, "command": "x", "protected": {"level": "guard", "why": "w", "cost_bytes": 0}}
    other = Peer(7, 7, 1, frozenset({7}), admin=False)
    assert visible_to(other, row)["protected"] == {"level": "guard", "why": HIDDEN, "cost_bytes": 0}
    full = {**row, "protected": {"level": "failover", "why": "", "cost_bytes": 0}}
    assert visible_to(other, full)["protected"]["why"] == ""
    own = Peer(8, 8, 1, frozenset({8}), admin=False)
    assert visible_to(own, row)["protected"]["why"] == "w"


def test_a_client_beyond_a_budget_has_the_reason_and_what_may_bring_it_back() -> None:
    world = protected()
    excess = Excess(SnapshotBudget.TIME, 580, 30, True)
    world.do(mev.MemberHolds(process(PID), 5 * COST))
    world.do(mev.MemberExceeds(process(PID), excess))
    why = "saving would slow it by 58 %, the budget is 3 %"
    assert world.view() == ("guard", why, 5 * COST)
    assert world.row()["remedy"] == READS
    shown = participant_view(world.state.members[process(PID)])
    assert (shown["left"], shown["list_may_help"], shown["reason"]) == ("time", True, why)
    world.do(mev.MemberLeft(process(PID)))
    assert world.view()[:2] == ("guard", why), "it has left whether it is connected or not"
    world.do(mev.MemberExceeds(process(PID), replace(excess, listable=False)))
    assert world.row()["remedy"] == ""


def test_a_client_with_work_that_cannot_be_rolled_back_is_not_protected_for_as_long() -> None:
    world = protected()
    world.do(mev.MemberExposed(process(PID), "a wait for memory"))
    assert world.view()[:2] == ("guard", "its work in flight cannot be rolled back: a wait for memory")
    # A new connection says it again.
    world.do(mev.MemberExposed(process(PID), None))
    assert world.view()[0] == "failover"
    world.do(mev.MemberExposed(process(PID + 7), "no participant"))
    assert process(PID + 7) not in world.state.members


def test_what_protection_costs_is_memory_and_time() -> None:
    world = protected(Policy(failover=EXACT, gpu_memory={GPU: 1 << 37}))
    assert world.row()["cost_share"] is None
    world.do(mev.MemberHolds(process(PID), 3 * COST))
    world.do(mev.MemberCost(process(PID), SavingCost(2 * COST, 12, 1000)))
    assert (world.row()["cost_bytes"], world.row()["cost_share"]) == (4 * COST, 0.012)
    shown = participant_view(world.state.members[process(PID)])
    assert (shown["snapshot_bytes"], shown["snapshot_limit_bytes"]) == (3 * COST, 1 << 30)
    assert (shown["saved_bytes"], shown["saving_share"], shown["left"]) == (2 * COST, 0.012, None)


def test_a_client_without_a_standby_context_for_their_number_says_so() -> None:
    world = Programs(Policy(failover=EXACT, standby_contexts=1))
    world.do(ev.ClientNoticed("d1", facts(PID + 1)))
    world.do(ev.ClientAttached("d1", process(PID + 1), 1, tracked=True, apart=True))
    world.do(mev.MemberCame(process(PID + 1), UID, EXACT))
    world.hello()
    assert (world.row()["level"], world.row()["why"]) == (
        "guard",
        "GPU 3 already has its limit of 1 standby context",
    )
    world.die(PID + 1)
    assert world.row()["why"] == "its standby context is in preparation"
