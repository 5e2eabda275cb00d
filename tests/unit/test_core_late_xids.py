"""One fault is one record, whatever the order and the delay of its Xids, and whatever ends meanwhile."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpsd.base.model import ServerState
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.faults.attribution import LATE_XID_S
from mpsd.core.state import DomainState, Policy
from tests.support.core import (
    GPU,
    MISALIGNED,
    OUT_OF_RANGE,
    REGISTER,
    World,
    facts,
    mmu_text,
    process,
    server_of,
)
from tests.unit.test_core_faults import ADDRESS, three_clients

CLIENTS = {"d1": (10, 11, 12), "d3": (20, 21)}
BEFORE_S, AFTER_S = 0.1, 0.4
"""Time [s] of a sign of a fault from its first one, as measured (13, 31 and 43 come up to 0.4 s late)."""


Sign = Callable[[], object]
Draw = Callable[..., Any]


class Clock:
    """A world in which timers fire. Actions run in order of their time."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._due: list[tuple[float, int, Sign]] = []
        self._numbers = count()
        self._seen = len(world.effects)
        self._began = world.now

    def at(self, seconds: float, action: Sign) -> None:
        heapq.heappush(self._due, (self._began + seconds, next(self._numbers), action))

    def run(self, until_s: float) -> None:
        while self._due and self._due[0][0] <= self._began + until_s:
            self.world.now, _, action = heapq.heappop(self._due)
            action()
            for effect in self.world.effects[self._seen :]:
                self._hear(effect)
            self._seen = len(self.world.effects)

    def _hear(self, effect: fx.Effect) -> None:
        match effect:
            case fx.ArmTimer(kind=kind, subject=subject, delay_s=delay):
                self.at(self.world.now - self._began + delay, lambda: self.world.timer(kind, subject))
            case fx.StopDomain(domain=name):
                self.at(self.world.now - self._began + 0.01, lambda: self.world.stopped(name))
            case fx.StartDomain(domain=name):
                self.at(self.world.now - self._began + 0.01, lambda: self.world.started(name))
            case fx.Identify(gpu=gpu, logged=logged):
                # NVML and /proc know nothing of the process any more.
                self.world.do(ev.ProcessIdentified(gpu, logged, None, None))
            case _:
                pass


def two_domains(window_s: float) -> World:
    world = World(Policy(evidence_window_s=window_s)).ready()
    world.join(*CLIENTS["d1"])
    world.want("gpu0.uid2000", uid=2000)
    world.started("d3")
    world.started("d4")
    for pid in CLIENTS["d3"]:
        world.do(ev.ClientNoticed("d3", facts(pid, uid=2000)))
        world.do(ev.ClientAttached("d3", process(pid), 1, tracked=True))
    return world


def mmu_signs(world: World, name: str, named: int) -> list[Sign]:
    """Return the signs of an MMU fault after that of the tracker. The line names any client of the domain."""
    return [
        lambda: world.kernel(31, mmu_text(ADDRESS), pid=named, name="program"),
        lambda: world.nvml(31),
        lambda: world.server_state(name, ServerState.FAULT),
    ]


def sm_signs(world: World, name: str) -> list[Sign]:
    return [
        lambda: world.kernel(13, OUT_OF_RANGE if name == "d1" else MISALIGNED),
        lambda: world.kernel(13, f"{REGISTER} of {name}"),
        lambda: world.nvml(13),
        lambda: world.nvml(13),
        lambda: world.kernel(43, "Ch 00000008", pid=server_of(name).pid, name="nvidia-cuda-mps"),
        lambda: world.nvml(43),
        lambda: world.server_state(name, ServerState.FAULT),
    ]


def schedule(clock: Clock, name: str, draw: Draw) -> None:
    """Let a domain fault, its signs come in any order and its clients end at any time."""
    world, at_s = clock.world, draw(st.floats(0.1, 0.6))
    signs, earliest = sm_signs(world, name), -BEFORE_S
    if draw(st.booleans()):
        # The tracker's event comes within a millisecond, and every other sign of an MMU fault after it.
        clock.at(at_s, lambda: world.fault(CLIENTS[name][0], domain=name))
        signs, earliest = mmu_signs(world, name, draw(st.sampled_from(CLIENTS[name]))), 0.0
    for sign in signs:
        clock.at(at_s + draw(st.floats(earliest, AFTER_S)), sign)
    for pid in CLIENTS[name]:
        end = draw(st.none() | st.floats(0.0, AFTER_S))
        if end is not None:
            clock.at(at_s + end, partial(world.die, pid))
            clock.at(at_s + end, partial(world.work_ended, pid))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), window_s=st.sampled_from((0.05, 2.0)))
def test_one_fault_is_one_record(data: st.DataObject, window_s: float) -> None:
    clock = Clock(two_domains(window_s))
    faulted = data.draw(st.sampled_from((["d1"], ["d3"], ["d1", "d3"])))
    for name in faulted:
        schedule(clock, name, data.draw)
    clock.run(20)
    records = clock.world.records().values()
    assert sorted(r.domain or "" for r in records) == faulted, [r.fault_class for r in records]
    assert not clock.world.state.strays


@pytest.mark.parametrize("late_s", [0.0, 0.4])
def test_an_xid_of_two_possible_faults_joins_the_nearer_one_and_changes_no_class(late_s: float) -> None:
    """A domain fails over, and the replay of its work faults the next domain at once."""
    world = three_clients()
    world.server_state("d1", ServerState.FAULT)
    world.join(20, domain="d2")
    world.wait(0.3).server_state("d2", ServerState.FAULT)
    world.wait(late_s).kernel(13, MISALIGNED)
    world.nvml(13)
    assert len(world.state.strays) == 2
    world.wait(2).timer("strays", GPU)
    first, second = world.state.open_faults
    assert [len(r.evidence) for r in (first, second)] == [1, 3]
    assert second.fault_class == "sm-exception" and not world.state.strays
    world.timer("fault-revision", 2)
    assert (world.record().id, world.record().revision) == (2, 2)
    assert len(world.record().evidence) == 3


def test_a_late_xid_is_in_the_journal_once_and_many_come_together() -> None:
    world = three_clients()
    world.fault(11)
    world.wait(0.142).nvml(31)
    (timer,) = (t for t in world.made(fx.ArmTimer) if t.kind == "fault-revision")
    assert timer.subject == "1"
    world.kernel(31, mmu_text(ADDRESS), pid=10)
    assert not world.made(fx.ArmTimer) and not world.made(fx.Record)
    world.timer("fault-revision", 1)
    assert world.record().revision == 2
    assert [e.xid for e in world.record().evidence] == [None, 31, 31]
    world.timer("fault-revision", 1)
    world.timer("fault-revision", 99)
    assert not world.made(fx.Record)


def test_an_xid_joins_a_record_that_has_closed() -> None:
    world = World(Policy(evidence_window_s=0.05)).ready(exclusive=True)
    world.join(10)
    world.server_state("d1", ServerState.FAULT)
    world.die(10)
    world.server_state("d1", ServerState.ACTIVE)
    assert world.domain("d1").state is DomainState.ACTIVE
    world.wait(0.4).kernel(13, MISALIGNED)
    world.wait(LATE_XID_S).timer("strays", GPU)
    world.timer("fault-revision", 1)
    assert list(world.records()) == [1]
    assert [e.xid for e in world.record().evidence] == [None, 13]
    # Much later it is another fault.
    world.wait(30).kernel(13, MISALIGNED)
    world.wait(LATE_XID_S).timer("strays", GPU)
    assert world.record().fault_class == "unattributed-xid"
