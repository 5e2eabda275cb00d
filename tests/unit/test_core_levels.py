"""Users and GPUs below the level failover: their programs are offered no standby context."""

from __future__ import annotations

from dataclasses import replace

from mpsd.api.failoverview import slot_rows
from mpsd.base.model import FailoverMode
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.failover import reports as mev
from mpsd.core.state import Policy
from tests.support.core import GPU, UID, World, process

EXACT, OFF = FailoverMode.EXACT, FailoverMode.OFF
ON = Policy(failover=EXACT, linger_limit_s=30.0)


def world_of(policy: Policy) -> World:
    world = World(policy)
    world.ready()
    world.do(ev.DriverFilesSeen(""))
    return world


def welcome(world: World, pid: int, uid: int) -> list[FailoverMode]:
    world.do(mev.MemberCame(process(pid), uid, EXACT, 0))
    return [effect.mode for effect in world.made(fx.Welcome)]


def test_a_program_of_a_user_below_fail_over_is_no_participant() -> None:
    world = world_of(replace(ON, users_without_failover=frozenset({UID})))
    world.join(10)
    assert welcome(world, 10, UID) == [OFF]
    assert process(10) not in world.state.members and not world.ever(fx.OfferStandby)
    assert welcome(world, 11, UID + 1) == [EXACT]


def test_a_participant_that_was_known_before_its_user_was_lowered_is_none_any_more() -> None:
    world = world_of(replace(ON, users_without_failover=frozenset({UID})))
    world.do(mev.MemberRestored(process(10), UID, EXACT, "d1"))
    world.do(mev.MemberRestored(process(11), UID + 1, EXACT, "d1"))
    assert set(world.state.members) == {process(11)}


def test_nothing_is_offered_on_a_gpu_below_fail_over() -> None:
    world = world_of(replace(ON, gpus_without_failover=frozenset({GPU})))
    world.join(10)
    assert welcome(world, 10, UID) == [OFF]
    # A program may say HELLO before mpsd knows its GPU.
    assert welcome(world, 11, UID) == [EXACT]
    world.join(11)
    assert not world.ever(fx.OfferStandby)
    (row,) = slot_rows(world.state, world.now)
    assert row["survivable"] == 0 and "protection level of this GPU" in row["why_none"]
    other = world_of(replace(ON, gpus_without_failover=frozenset({f"{GPU}-other"})))
    other.join(10)
    welcome(other, 10, UID)
    assert [offer.domain for offer in other.ever(fx.OfferStandby)] == ["d2"]
