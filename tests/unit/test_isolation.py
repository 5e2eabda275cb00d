"""Kernel isolation in the daemon: which records reach core, and the report when the module is lost."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from mpsd.base.conditions import Code, Condition
from mpsd.base.errors import GpuError
from mpsd.base.model import (
    Access,
    IsolationMode,
    KernelAction,
    KernelFault,
    ProcessInstance,
    UvmEvent,
    UvmFaultType,
    UvmReason,
)
from mpsd.clients.isolation import DEADLINES_LEFT, EARLY_KEPT, KernelIsolation
from mpsd.core import events as ev
from mpsd.gpu.base import IsolationState, NoIsolation
from tests.support.conditioning import texts

ME = ProcessInstance(os.getpid(), 1)
FRESH_S = 5.0
DEADLINE_MS = 2000


def fault(action: KernelAction = KernelAction.SUNK, seq: int = 1, age_s: float = 0.0) -> KernelFault:
    stamp = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW) - int(age_s * 1e9)
    event = UvmEvent(
        True, UvmFaultType.INVALID_PTE, Access.WRITE, UvmReason.INVALID_ADDRESS, 0x7F0000001000, stamp
    )
    return KernelFault(seq, action, 7, ME, event, "graphics", "", 1, "GPU-0")


@dataclass
class Door:
    """A fake isolation device: readable while there are `records`, or while it is `broken`."""

    records: list[KernelFault] = field(default_factory=list)
    mode: IsolationMode = IsolationMode.REPORT
    broken: str = ""
    closed: bool = False
    acknowledged: list[int] = field(default_factory=list)
    ends: tuple[int, int] = field(default_factory=os.pipe)

    def say(self, *records: KernelFault) -> None:
        self.records += records
        os.write(self.ends[1], b"x")

    def fileno(self) -> int:
        return self.ends[0]

    def state(self) -> IsolationState:
        return IsolationState(self.mode, "550.163.01", DEADLINE_MS, 1, 0)

    def set_mode(self, mode: IsolationMode) -> None:
        if self.broken:
            raise GpuError(self.broken)
        self.mode = mode

    def drain(self) -> Sequence[KernelFault]:
        if self.broken:
            raise GpuError(self.broken)
        os.read(self.ends[0], 64)
        found, self.records = self.records, []
        return found

    def acknowledge(self, space: int) -> bool:
        self.acknowledged.append(space)
        return True

    def kill(self, space: int) -> bool:
        return False

    def close(self) -> None:
        self.closed = True
        for end in self.ends:
            os.close(end)


class Place:
    """A KernelIsolation on a loop, what it posted, and whether its clients are leased."""

    def __init__(
        self, door: Door | None, wanted: IsolationMode = IsolationMode.ISOLATE, *, known: bool = True
    ) -> None:
        self.posted: list[ev.Event] = []
        self.leased = True
        self.door = door
        self.isolation = KernelIsolation(
            door,
            NoIsolation("the stock one", known=known),
            wanted,
            self.posted.append,
            lambda process, addresses: [False] * len(addresses),
            lambda process: False,
            lambda process: self.leased,
            FRESH_S,
        )

    async def heard(self, many: int) -> list[KernelFault]:
        """Return the records that reached core, once there are this many."""
        async with asyncio.timeout(10):
            while len(self.seen) < many:
                await asyncio.sleep(0)
        return self.seen

    @property
    def seen(self) -> list[KernelFault]:
        return [e.fault for e in self.posted if isinstance(e, ev.KernelFaultSeen)]

    @property
    def counted(self) -> dict[str, int]:
        return {k: n for e in self.posted if isinstance(e, ev.Counted) for k, n in e.counters.items()}


def run(test: Callable[[Door, Place], object]) -> None:
    """Run the test on a loop, with a device that is closed after it."""

    async def begin() -> None:
        door = Door()
        place = Place(door)
        place.isolation.start()
        try:
            await test(door, place)  # type: ignore[misc]
        finally:
            place.isolation.close()
            assert door.closed

    asyncio.run(begin())


def test_what_is_wanted_is_set_and_shown() -> None:
    door = Door()
    isolation = Place(door).isolation
    assert isolation.on and door.mode is IsolationMode.ISOLATE and not isolation.conditions()
    assert isolation.shown()["mode"] == "isolate" and isolation.check().ok
    isolation = Place(door, IsolationMode.REPORT).isolation
    assert (
        not isolation.on
        and isolation.check().ok is None
        and isolation.check().finding.startswith("off (driver 550")
    )
    door.close()


def test_where_it_was_never_there_that_is_no_problem() -> None:
    isolation = Place(None).isolation
    assert not isolation.on and not isolation.conditions() and isolation.shown()["why_not"] == "the stock one"
    assert isolation.check().ok is None and "off: the stock one" in isolation.check().finding
    isolation.start()
    isolation.acknowledge(1)
    isolation.close()
    # A module that may be loaded and is not usable is a problem: it kills at its own deadline.
    isolation = Place(None, known=False).isolation
    assert isolation.conditions() == [Condition(Code.KERNEL_ISOLATION, detail="the stock one")]
    assert isolation.check().ok is None and isolation.check().finding == "unknown: the stock one"


def test_a_module_that_takes_no_mode_is_a_problem() -> None:
    door = Door(broken="no")
    isolation = Place(door).isolation
    assert not isolation.on and isolation.conditions() == [Condition(Code.KERNEL_ISOLATION, detail="no")]
    door.close()


def test_records_reach_core_and_what_was_missed_is_counted() -> None:
    async def test(door: Door, place: Place) -> None:
        door.say(fault(seq=1), fault(seq=5))
        assert [f.seq for f in await place.heard(2)] == [1, 5]
        assert place.counted == {"kernel_records_missed": 3}

    run(test)


@pytest.mark.parametrize("action", [KernelAction.REPORTED, KernelAction.REFUSED, KernelAction.ORPHAN])
def test_an_old_fault_that_the_driver_answered_is_not_told_again(action: KernelAction) -> None:
    async def test(door: Door, place: Place) -> None:
        old = fault(action, 1, FRESH_S + 1)
        door.say(old, fault(KernelAction.SUNK, 2, FRESH_S + 1), fault(action, 3))
        assert [f.seq for f in await place.heard(2)] == [2, 3]
        assert place.counted == {"kernel_records_old": 1}

    run(test)


def test_who_lives_long_after_the_last_deadline_is_another_program_by_now() -> None:
    """The module has killed the condemned client; this pid now runs another program in another space."""

    async def test(door: Door, place: Place) -> None:
        over = DEADLINES_LEFT * DEADLINE_MS / 1e3
        door.say(fault(seq=1, age_s=over + 1), fault(seq=2, age_s=over - 1))
        assert [f.seq for f in await place.heard(1)] == [2]
        assert place.counted == {"kernel_records_old": 1}

    run(test)


def test_who_is_leased_after_the_deadline_is_not_told_of_once_more() -> None:
    async def test(door: Door, place: Place) -> None:
        place.leased = False
        door.say(fault(age_s=DEADLINE_MS / 1e3 + 1))
        await place.heard(1)
        place.leased = True
        place.isolation.attached(ME)
        assert len(place.seen) == 1

    run(test)


def test_nothing_is_asked_of_a_door_that_is_closed() -> None:
    """Evictions continue while mpsd ends: nothing would follow an acknowledgement then."""

    async def test(door: Door, place: Place) -> None:
        place.leased = False
        door.say(fault())
        await place.heard(1)
        place.isolation.close()
        place.leased = True
        place.isolation.attached(ME)
        place.isolation.acknowledge(7)
        assert door.acknowledged == [] and place.isolation.check().ok is None

    run(test)


@pytest.mark.parametrize("leased", [True, False])
def test_whoever_was_not_leased_yet_is_told_of_once_more(leased: bool) -> None:
    async def test(door: Door, place: Place) -> None:
        place.leased = leased
        door.say(fault())
        await place.heard(1)
        place.leased = True
        place.isolation.attached(ME)
        place.isolation.attached(ME)
        assert len(place.seen) == (1 if leased else 2)

    run(test)


def test_those_who_are_remembered_are_bounded() -> None:
    async def test(door: Door, place: Place) -> None:
        place.leased = False
        many = [
            replace(fault(seq=n), process=ProcessInstance(os.getpid(), n)) for n in range(1, EARLY_KEPT + 2)
        ]
        door.say(*many)
        await place.heard(len(many))
        for record in many:
            assert record.process is not None
            place.isolation.attached(record.process)
        assert len(place.seen) == len(many) + EARLY_KEPT

    run(test)


def test_a_lost_module_is_said_and_not_read_for_ever() -> None:
    async def test(door: Door, place: Place) -> None:
        door.broken = "gone"
        door.say()
        async with asyncio.timeout(10):
            while place.isolation.on:
                await asyncio.sleep(0)
        said = "lost: gone; the module kills the clients it condemns at its own deadline"
        assert texts(place.isolation.conditions()) == [f"kernel isolation: {said}"]
        assert place.isolation.shown()["mode"] is None and place.isolation.shown()["why_not"] == said
        found = place.isolation.check()
        assert (found.ok, found.finding) == (False, said)

    run(test)


def test_a_mode_that_somebody_else_has_set_is_shown_and_a_problem() -> None:
    async def test(door: Door, place: Place) -> None:
        door.mode = IsolationMode.OFF
        # The check of each second does not ask the module.
        assert not place.isolation.conditions(refresh=False) and place.isolation.on
        assert place.isolation.shown()["mode"] == "off" and not place.isolation.on
        assert place.isolation.conditions(refresh=False)
        assert texts(place.isolation.conditions()) == [
            "kernel isolation: the mode is off, but mpsd is configured for isolate"
        ]
        found = place.isolation.check()
        assert found.ok is False and found.finding.startswith("off (driver 550")
        door.mode = IsolationMode.ISOLATE
        assert not place.isolation.conditions() and place.isolation.check().ok and place.isolation.on

    run(test)
