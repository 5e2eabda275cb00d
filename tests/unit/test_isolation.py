"""The desk of the kernel part: what of its records reaches core, and what is said when it is lost."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from mpsd.core import events as ev
from mpsd.errors import GpuError
from mpsd.gpu.base import IsolationState, NoIsolation
from mpsd.isolation import DEADLINES_LEFT, EARLY_KEPT, IsolationDesk
from mpsd.model import (
    Access,
    IsolationMode,
    KernelAction,
    KernelFault,
    ProcessInstance,
    UvmEvent,
    UvmFaultType,
    UvmReason,
)

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
    """A kernel part of the test's own: readable while `records` are there, or while it is `broken`."""

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
    """A desk on a loop, what it posted, and whether its clients are leased."""

    def __init__(
        self, door: Door | None, wanted: IsolationMode = IsolationMode.ISOLATE, *, known: bool = True
    ) -> None:
        self.posted: list[ev.Event] = []
        self.leased = True
        self.door = door
        self.desk = IsolationDesk(
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
        """The records that core heard of, once they are so many."""
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
    """The test on a loop, with a door that is closed after it."""

    async def begin() -> None:
        door = Door()
        place = Place(door)
        place.desk.start()
        try:
            await test(door, place)  # type: ignore[misc]
        finally:
            place.desk.close()
            assert door.closed

    asyncio.run(begin())


def test_what_is_wanted_is_set_and_shown() -> None:
    door = Door()
    desk = Place(door).desk
    assert desk.on and door.mode is IsolationMode.ISOLATE and not desk.problems()
    assert desk.shown()["mode"] == "isolate" and desk.check().ok
    desk = Place(door, IsolationMode.REPORT).desk
    assert not desk.on and desk.check().ok is None and desk.check().finding.startswith("off (driver 550")
    door.close()


def test_where_it_was_never_there_that_is_no_problem() -> None:
    desk = Place(None).desk
    assert not desk.on and not desk.problems() and desk.shown()["why_not"] == "the stock one"
    assert desk.check().ok is None and "off: the stock one" in desk.check().finding
    desk.start()
    desk.acknowledge(1)
    desk.close()
    # One that may be loaded and cannot be worked with is a problem: it kills at its own deadline.
    desk = Place(None, known=False).desk
    assert desk.problems() == ["kernel isolation: the stock one"]
    assert desk.check().ok is None and desk.check().finding == "not known: the stock one"


def test_a_module_that_takes_no_mode_is_a_problem() -> None:
    door = Door(broken="no")
    desk = Place(door).desk
    assert not desk.on and desk.problems() == ["kernel isolation: no"]
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
    """The module kills whom it condemned; this pid has replaced its program, and the space has ended."""

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
        place.desk.attached(ME)
        assert len(place.seen) == 1

    run(test)


def test_nothing_is_asked_of_a_door_that_is_closed() -> None:
    """Evictions go on while mpsd ends: an acknowledgement then would be given by nobody."""

    async def test(door: Door, place: Place) -> None:
        place.leased = False
        door.say(fault())
        await place.heard(1)
        place.desk.close()
        place.leased = True
        place.desk.attached(ME)
        place.desk.acknowledge(7)
        assert door.acknowledged == [] and place.desk.check().ok is None

    run(test)


@pytest.mark.parametrize("leased", [True, False])
def test_whoever_was_not_leased_yet_is_told_of_once_more(leased: bool) -> None:
    async def test(door: Door, place: Place) -> None:
        place.leased = leased
        door.say(fault())
        await place.heard(1)
        place.leased = True
        place.desk.attached(ME)
        place.desk.attached(ME)
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
            place.desk.attached(record.process)
        assert len(place.seen) == len(many) + EARLY_KEPT

    run(test)


def test_a_lost_module_is_said_and_not_read_for_ever() -> None:
    async def test(door: Door, place: Place) -> None:
        door.broken = "gone"
        door.say()
        async with asyncio.timeout(10):
            while place.desk.on:
                await asyncio.sleep(0)
        said = "lost: gone; whom it sinks it kills at its own deadline"
        assert place.desk.problems() == [f"kernel isolation: {said}"]
        assert place.desk.shown()["mode"] is None and place.desk.shown()["why_not"] == said
        found = place.desk.check()
        assert (found.ok, found.finding) == (False, said)

    run(test)


def test_a_mode_that_somebody_else_has_set_is_shown_and_a_problem() -> None:
    async def test(door: Door, place: Place) -> None:
        door.mode = IsolationMode.OFF
        # Who looks once a second does not ask for it.
        assert not place.desk.problems(look=False) and place.desk.on
        assert place.desk.shown()["mode"] == "off" and not place.desk.on
        assert place.desk.problems(look=False)
        assert place.desk.problems() == [
            "kernel isolation: mode off was set, and not by mpsd, which wants isolate"
        ]
        found = place.desk.check()
        assert found.ok is False and found.finding.startswith("off (driver 550")
        door.mode = IsolationMode.ISOLATE
        assert not place.desk.problems() and place.desk.check().ok and place.desk.on

    run(test)
