"""When mpsd looks at a GPU for free memory, and what it does then."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mpsd.base.conditions import Code, Condition
from mpsd.base.errors import GpuError
from mpsd.base.model import Gpu
from mpsd.core import events as ev
from mpsd.core.failover import reports as mev
from mpsd.daemon import freememory
from mpsd.daemon.freememory import FreeMemory
from tests.support.core import GPU, process
from tests.unit.test_core_failover import Site
from tests.unit.test_core_memory_requests import ANOTHER, MIB, crowd, silent

TOTAL = 1000 * MIB


class Devices:
    """`used`: bytes of the GPU in use, or the error to raise; `looks` counts the calls."""

    def __init__(self, used: int | Exception) -> None:
        self.used, self.looks = used, 0

    def memory_used(self, gpu_uuid: str) -> int:
        assert gpu_uuid == GPU
        self.looks += 1
        if isinstance(self.used, Exception):
            raise self.used
        return self.used


def look(world: Site, devices: Any, limit: int = 20 * MIB) -> list[Condition]:
    """Run one look, with its consequences. Return the conditions that it found."""
    gpu = Gpu(0, GPU, "a GPU", "0000:01:00.0", TOTAL)
    memory = FreeMemory(
        devices, [gpu], limit, lambda: world.state, lambda event: answer(world, devices, event)
    )

    async def scenario() -> None:
        memory.check_all()
        memory.check_all()
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))
        memory.close()

    asyncio.run(scenario())
    return memory.conditions()


def answer(world: Site, devices: Devices, event: ev.Event) -> None:
    """Let the first client of a request release what it has."""
    assert event == ev.GpuFull(GPU)
    world.do(event)
    for effect in world.last:
        process = getattr(effect, "process", None)
        if process is not None:
            assert not isinstance(devices.used, Exception)
            devices.used -= world.state.members[process].bytes
            world.do(mev.MemberUnready(process, 2, ANOTHER, for_memory=True))
            return


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freememory, "STEP_S", 0.0)


def yielded(world: Site) -> int:
    return world.state.counters.get("failover_standbys_yielded", 0)


def test_nobody_asks_the_driver_where_all_can_ask_for_themselves() -> None:
    world, devices = crowd(10, 11), Devices(TOTAL)
    look(world, devices)
    assert (devices.looks, yielded(world)) == (0, 0)


@pytest.mark.parametrize(("left", "gone"), [(30, 0), (20, 0), (19, 1), (10, 1), (8, 2), (0, 2)])
def test_standbys_go_until_enough_is_free(left: int, gone: int) -> None:
    """The standby contexts hold 11 and 10 MiB and go in that order; 20 MiB are to be free."""
    world = crowd(10, 11)
    silent(world)
    look(world, Devices(TOTAL - left * MIB))
    assert yielded(world) == gone


@pytest.mark.parametrize(("limit", "gone"), [(0, 0), (1, 0), (6, 1), (25, 1), (1 << 20, 1)])
def test_no_more_than_a_fortieth_is_kept_free(limit: int, gone: int) -> None:
    world = crowd(100)
    silent(world)
    look(world, Devices(TOTAL - 5 * MIB), limit * MIB)
    assert yielded(world) == gone
    world = crowd(100)
    silent(world)
    look(world, Devices(TOTAL - 25 * MIB), limit * MIB)
    assert yielded(world) == 0


def test_what_the_driver_does_not_say_costs_nobody_anything() -> None:
    world, devices = crowd(10), Devices(GpuError("NVML is gone"))
    silent(world)
    assert look(world, devices) == [Condition(Code.MEMORY_NOT_READ, GPU, "NVML is gone")]
    assert (devices.looks, yielded(world)) == (1, 0)
    assert process(10) in world.state.members
