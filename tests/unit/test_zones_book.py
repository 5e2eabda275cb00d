"""Grants of guard zones, and which event is a hit."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.base.errors import GpuError
from mpsd.base.model import Access, ProcessInstance, UvmEvent, UvmFaultType, UvmReason, ZoneRole
from mpsd.os import procfs
from mpsd.zones import layout
from mpsd.zones.grants import LEAST, SHARE, UNIT, Grant, Grants, ZoneLimits
from mpsd.zones.ledger import ZoneMap
from mpsd.zones.ledgers import RETURN_S, Hit, Zones
from tests.support.guardzones import LedgerWriter

BASE, MIB, GIB = 0x1000_0000_0000, 1 << 20, 1 << 30
ME = ProcessInstance(os.getpid(), procfs.start_ticks(os.getpid()))
LIMITS = ZoneLimits(64 * GIB, 16 * GIB, 100)


def fault(address: int, access: Access = Access.WRITE, *, fatal: bool = False, at: int = 1) -> UvmEvent:
    return UvmEvent(fatal, UvmFaultType.INVALID_PTE, access, UvmReason.UNKNOWN, address, at)


class Stand:
    """One client with one zone at BASE."""

    def __init__(self) -> None:
        self.zones = Zones(LIMITS)
        self.writer = LedgerWriter()
        self.lay(0, BASE)
        assert self.zones.join(ME, 0, ("GPU-0",), os.dup(self.writer.fd)) is not None

    def lay(self, row: int, start: int, kind: int = layout.Kind.MANAGED) -> None:
        self.writer.zone(row, kind, layout.Role.GUARD, start, start + MIB)

    def hits(self, *events: UvmEvent) -> Hit | None:
        return self.zones.hits(ME, events)

    def close(self) -> None:
        self.zones.close()
        self.writer.close()


def run(test: Callable[[Stand], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        stand = Stand()
        try:
            await test(stand)
        finally:
            stand.close()

    asyncio.run(whole())


def test_only_serviced_accesses_in_a_zone_of_its_own_are_hits() -> None:
    async def test(stand: Stand) -> None:
        hit = stand.hits(fault(BASE - 1), fault(BASE + 5), fault(BASE + MIB - 1), fault(BASE + MIB))
        assert hit is not None
        assert (hit.event.address, hit.role, hit.count) == (BASE + 5, ZoneRole.GUARD, 2)
        assert stand.hits(fault(BASE, Access.PREFETCH)) is None
        assert stand.hits(fault(BASE, fatal=True)) is None
        assert stand.zones.hits(ProcessInstance(1, 1), [fault(BASE)]) is None

    run(test)


def test_a_zone_that_has_gone_is_none_however_fresh_the_list() -> None:
    async def test(stand: Stand) -> None:
        assert stand.hits(fault(BASE)) is not None
        stand.lay(0, 0, layout.Kind.NONE)
        assert stand.hits(fault(BASE)) is None

    run(test)


def test_what_came_before_the_zone_was_laid_is_none_and_what_came_right_after_is_one() -> None:
    async def test(stand: Stand) -> None:
        own = BASE + 4 * MIB
        assert stand.hits(fault(BASE)) is not None
        assert stand.hits(fault(own)) is None
        stand.lay(1, own)
        await asyncio.sleep(0.05)
        assert stand.hits(fault(BASE)) == Hit(fault(BASE), ZoneRole.GUARD, 1)
        assert stand.zones.counters["events_of_own_memory"] == 1
        stand.lay(2, own + 2 * MIB)
        assert stand.hits(fault(own + 2 * MIB)) is not None

    run(test)


def test_what_the_driver_dated_before_a_zone_was_born_met_what_lay_there_before() -> None:
    async def test(stand: Stand) -> None:
        own = BASE + 4 * MIB
        stand.writer.zone(1, layout.Kind.MANAGED, layout.Role.GUARD, own, own + MIB, born=1000)
        assert stand.hits(fault(own, at=999)) is None
        assert stand.zones.counters["events_of_own_memory"] == 1
        assert stand.hits(fault(own, at=998), fault(own + 5, at=1000)) == Hit(
            fault(own + 5, at=1000), ZoneRole.GUARD, 1
        )
        # Another zone in the same place.
        stand.writer.zone(1, layout.Kind.MANAGED, layout.Role.GUARD, own, own + MIB, born=2000)
        assert stand.hits(fault(own, at=1999)) is None

    run(test)


def test_a_flood_looks_into_the_ledger_only_where_it_has_changed() -> None:
    async def test(stand: Stand) -> None:
        ledger, probes = stand.zones._entries[ME].ledger, 0
        zones = ledger.zones

        def counted(rows: bytes) -> ZoneMap:
            nonlocal probes
            probes += 1
            return zones(rows)

        ledger.zones = counted  # type: ignore[method-assign]
        for number in range(500):
            assert stand.hits(fault(BASE + (number + 10) * MIB)) is None
        stand.lay(1, BASE + 4 * MIB)
        assert stand.hits(fault(BASE + 4 * MIB)) is not None
        assert probes == 2

    run(test)


def test_the_ledger_of_the_dead_stays_a_moment_and_what_was_granted_does_not() -> None:
    async def test(stand: Stand) -> None:
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        process = ProcessInstance(child.pid, procfs.start_ticks(child.pid))
        assert stand.zones.join(process, 0, ("GPU-0",), os.dup(stand.writer.fd)) is not None
        child.kill()
        child.communicate(timeout=90)
        stand.zones.leave(process)
        assert stand.zones.grants.of(process) is None
        assert stand.zones.hits(process, [fault(BASE)]) is not None
        # Another program in a living process may have memory of its own there.
        stand.zones.leave(ME)
        assert stand.hits(fault(BASE)) is None

    run(test)


def test_what_lies_there_is_read_though_the_client_is_forgotten() -> None:
    async def test(stand: Stand) -> None:
        stand.writer.note(0, BASE - MIB, MIB, order=3, born=1)
        stand.writer.launched("wild")
        looking = stand.zones.describe(ME, BASE, ZoneRole.GUARD)
        stand.zones.leave(ME)
        found = await looking
        assert found.nearby is not None and found.nearby.order == 3
        assert found.kernel == "wild"
        again = await stand.zones.describe(ME, BASE, ZoneRole.GUARD)
        assert (again.nearby, again.kernel) == (None, None)

    run(test)


def test_what_is_no_ledger_is_not_taken() -> None:
    async def test(stand: Stand) -> None:
        null = os.open("/dev/null", os.O_RDONLY)
        with pytest.raises(GpuError):
            stand.zones.join(ProcessInstance(1, 1), 0, ("GPU-0",), null)
        os.close(null)
        assert stand.hits(fault(BASE)) is not None

    run(test)


# -- grants ----------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(st.integers(1, 30), st.booleans(), st.sampled_from((0, GIB, 1 << 50))), max_size=60
)


@given(STEPS)
def test_caps_hold_whoever_comes_and_goes(steps: list[tuple[int, bool, int]]) -> None:
    grants = Grants(LIMITS)
    for pid, comes, laid in steps:
        process = ProcessInstance(pid, 1)
        if comes:
            before = grants.of(process)
            given_now = grants.give(process, ("GPU-0",), laid)
            assert before in (None, given_now)
            assert given_now is not None
            assert given_now.bytes == 0 or LEAST <= given_now.bytes <= LIMITS.client_bytes
        else:
            grants.take_back(process)
        assert 0 <= grants.given_on("GPU-0") <= LIMITS.gpu_bytes
    for pid in range(1, 31):
        grants.take_back(ProcessInstance(pid, 1))
    assert grants.given_on("GPU-0") == 0


def test_who_comes_late_gets_some_though_many_came_before() -> None:
    grants = Grants(ZoneLimits())
    given_out = [grants.give(ProcessInstance(pid, 1), ("GPU-0",), 0) for pid in range(1, 101)]
    assert all(grant is not None and grant.bytes >= LEAST for grant in given_out)
    elsewhere = grants.give(ProcessInstance(1000, 1), ("GPU-1",), 0)
    assert elsewhere == given_out[0]


def test_who_was_there_before_keeps_his_and_liars_leave_half_to_the_others() -> None:
    grants = Grants(LIMITS)
    kept = grants.give(ProcessInstance(1, 1), ("GPU-0",), 7 * GIB)
    assert kept is not None and kept.bytes == 7 * GIB
    grants = Grants(ZoneLimits())
    for pid in (1, 2):
        lied = grants.give(ProcessInstance(pid, 1), ("GPU-0",), 1 << 57)
        assert lied is not None and lied.bytes == ZoneLimits().client_bytes
    assert grants.given_on("GPU-0") == ZoneLimits().gpu_bytes // 2
    for pid in range(3, 65):
        grant = grants.give(ProcessInstance(pid, 1), ("GPU-0",), (pid % 2) << 57)
        assert grant is not None and LEAST <= grant.bytes <= ZoneLimits().gpu_bytes // 32


def test_what_was_laid_is_believed_of_who_was_there_before_this_daemon_and_for_a_while() -> None:
    async def granted(process: ProcessInstance, up_s: float, far: int = 0) -> int:
        now, writer = 100.0, LedgerWriter()
        zones = Zones(LIMITS, clock=lambda: now)
        writer.head("managed_bytes", 1 << 57)
        writer.head("far_bytes", far)
        now += up_s
        grant = zones.join(process, 0, ("GPU-0",), os.dup(writer.fd))
        zones.close()
        writer.close()
        assert grant is not None
        return grant.bytes

    long_ago, just_now = ProcessInstance(ME.pid, 1), ProcessInstance(ME.pid, 1 << 40)
    assert asyncio.run(granted(long_ago, 1)) == LIMITS.client_bytes
    share = LIMITS.gpu_bytes // SHARE // UNIT * UNIT
    assert asyncio.run(granted(long_ago, RETURN_S)) == share
    assert asyncio.run(granted(just_now, 1)) == share
    # A far zone gives way to any client.
    assert asyncio.run(granted(long_ago, 1, 1 << 57)) == share


def test_who_comes_when_too_little_is_left_gets_ranges_that_only_absorb() -> None:
    grants = Grants(ZoneLimits(LEAST, GIB, 10))
    assert grants.give(ProcessInstance(5, 1), ("GPU-0",), 0) == Grant(LEAST, 10)
    grant = grants.give(ME, ("GPU-0",), 0)
    assert grant is not None and (grant.bytes, grant.zones) == (0, 10)


def test_no_zones_at_all_is_a_choice() -> None:
    for limits in (ZoneLimits(0, GIB, 10), ZoneLimits(GIB, 0, 10), ZoneLimits(GIB, GIB, 0)):
        assert Grants(limits).give(ME, ("GPU-0",), 0) is None
    assert Grants(LIMITS).give(ME, (), 0) is None
