"""Which domains are checked each second, and what core and status learn."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from mpsd.base.conditions import Code, Condition
from mpsd.core import events as ev
from mpsd.core.state import DomainState
from mpsd.daemon.pathchecks import PathChecks
from mpsd.mps.pathhealth import Path, Trouble
from tests.support.core import SLOT, UID, World

GONE = Trouble("the control socket of d1 was removed", "", dead=True)


class Hosts:
    """Running domains with these troubles, by domain. `ending`: control daemons that are about to end."""

    def __init__(self) -> None:
        self.paths = self
        self.troubles: dict[str, Trouble] = {}
        self.ending: set[str] = set()
        self.asked: list[Path] = []
        self.problem = ""

    async def check(self, paths: Sequence[Path]) -> list[Trouble | None]:
        self.asked = list(paths)
        return [self.troubles.get(path.domain) for path in paths]

    def serves(self, domain: str) -> bool:
        return domain not in self.ending


def checked(world: World, hosts: Hosts) -> PathChecks:
    part: Any = hosts
    checks = PathChecks(part, lambda: world.state, world.do)
    asyncio.run(checks.check_all())
    return checks


def test_standby_domains_are_checked_first_and_by_their_own_directory() -> None:
    hosts, world = Hosts(), World().ready()
    assert checked(world, hosts).conditions() == []
    assert hosts.asked == [Path("d2", UID, UID, None), Path("d1", UID, UID, SLOT)]


def test_if_both_are_cut_off_the_slot_does_not_move_to_the_standby_domain() -> None:
    hosts, world = Hosts(), World().ready()
    world.join(10)
    hosts.troubles = {"d1": GONE, "d2": GONE}
    checks = checked(world, hosts)
    assert world.path() == "d1" and world.domain("d3").state is DomainState.STARTING
    assert world.domain("d1").state is DomainState.RETIRED
    assert Condition(Code.DOMAIN_UNREACHABLE, "d1", GONE.text, 1) in checks.conditions()


def test_a_domain_that_was_replaced_serves_its_clients_to_their_end() -> None:
    hosts, world = Hosts(), World().ready()
    world.join(10)
    hosts.troubles = {"d1": GONE}
    checks = checked(world, hosts)
    assert world.path() == "d2"
    assert checks.conditions() == [Condition(Code.DOMAIN_CUT_OFF, "d1", GONE.text)]


def test_a_failed_start_is_not_told_as_a_path_that_broke() -> None:
    hosts, world = Hosts(), World().ready()
    world.do(ev.DomainUnreachable("d2", "gone"))
    world.do(ev.DomainStartFailed("d3", "no memory"))
    assert world.domain("d3").state is DomainState.STOPPING
    assert checked(world, hosts).conditions() == []


def test_the_end_of_a_control_daemon_is_another_event() -> None:
    """It closes its sockets before its process has ended."""
    hosts, world = Hosts(), World().ready()
    hosts.troubles, hosts.ending = {"d1": GONE}, {"d1"}
    checked(world, hosts)
    assert world.domain("d1").state is DomainState.ACTIVE


def test_what_no_other_domain_would_mend_is_shown_and_nothing_is_retired() -> None:
    hosts, world = Hosts(), World().ready()
    hosts.troubles = {"d1": Trouble("/srv is closed to its user", "run chmod o+x /srv")}
    found = checked(world, hosts).conditions()
    assert found == [Condition(Code.DOMAIN_UNREACHABLE, "d1", "/srv is closed to its user")]
    assert world.domain("d1").state is DomainState.ACTIVE


def test_nothing_is_checked_while_domains_are_adopted_or_stopped() -> None:
    hosts, world = Hosts(), World().ready()
    hosts.troubles = {"d1": GONE}
    world.do(ev.StopRequested())
    checked(world, hosts)
    assert not hosts.asked


def test_a_path_that_moves_during_the_check_is_checked_again() -> None:
    hosts, world = Hosts(), World().ready()
    part: Any = hosts
    checks = PathChecks(part, lambda: world.state, world.do)

    async def moves(paths: Sequence[Path]) -> list[Trouble | None]:
        world.do(ev.DomainUnreachable("d1", "gone"))
        return [None]

    assert asyncio.run(checks.hand_out(SLOT, UID)) is None
    part.check = moves
    found = asyncio.run(checks.hand_out(SLOT, UID))
    assert found is not None and not found.seen


def test_paths_that_are_not_tried_as_their_users_are_a_condition() -> None:
    hosts, world = Hosts(), World().ready()
    hosts.problem = "setfsuid is not permitted"
    assert checked(world, hosts).conditions() == [
        Condition(Code.PATHS_NOT_TRIED, detail="setfsuid is not permitted")
    ]
