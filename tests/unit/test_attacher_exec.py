"""Lives of one process: what was taken for a program that was replaced never stands for the next one."""

from __future__ import annotations

import asyncio

from tests.unit.test_attacher import Desk, at_a_desk


def test_a_look_that_was_under_way_when_the_program_was_replaced_gives_no_client() -> None:
    async def play(desk: Desk) -> None:
        desk.uvm.go_on.clear()
        desk.join()
        await asyncio.to_thread(desk.uvm.opened.wait, 10)
        pin = desk.attacher._pins[desk.process]
        pin.life += 1
        desk.attacher.attach("d1", desk.process, 1)
        desk.uvm.go_on.set()
        for space in range(2):
            while len(desk.uvm.spaces) <= space:
                await asyncio.sleep(0)
            desk.uvm.spaces[space].closing.set()
        while not desk.attached():
            await asyncio.sleep(0)
        assert [told.space for told in desk.attached()] == [1]
        assert [client.space for client in desk.attacher.leases] == [1]
        assert (desk.uvm.spaces[0].closed, desk.uvm.spaces[1].closed) == (True, False)

    at_a_desk(play)


def test_a_lease_that_is_given_up_is_nobodys_while_others_still_use_its_descriptors() -> None:
    async def play(desk: Desk) -> None:
        await desk.joined()
        used = asyncio.Event()

        async def free() -> None:
            await used.wait()

        desk.attacher.release(desk.client, free())
        assert not desk.attacher.leases
        desk.attacher.attach("d1", desk.process, 0)
        desk.uvm.spaces[0].closing.set()
        await asyncio.sleep(0)
        assert not desk.uvm.spaces[0].closed and len(desk.attached()) == 1
        used.set()
        while len(desk.attached()) < 2:
            await asyncio.sleep(0)
        # The first was closed, the second is held.
        assert (desk.uvm.spaces[0].closed, desk.uvm.spaces[1].closed) == (True, False)
        assert desk.attacher.leases[desk.client].space is desk.uvm.spaces[1]

    at_a_desk(play)


def test_releasing_what_is_not_held_still_waits_for_nobody() -> None:
    async def play(desk: Desk) -> None:
        freed = asyncio.Event()

        async def free() -> None:
            freed.set()

        desk.attacher.release(desk.client, free())
        await freed.wait()

    at_a_desk(play)
