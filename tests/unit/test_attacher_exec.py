"""Successive programs of one process: state of a replaced program never counts for the next program."""

from __future__ import annotations

import asyncio

from tests.unit.test_attach import Setup, with_setup


def test_a_look_that_was_under_way_when_the_program_was_replaced_gives_no_client() -> None:
    async def play(setup: Setup) -> None:
        setup.uvm.go_on.clear()
        setup.join()
        await asyncio.to_thread(setup.uvm.opened.wait, 10)
        pin = setup.attacher.pins._pins[setup.process]
        pin.exec_count += 1
        setup.attacher.attach("d1", setup.process, 1)
        setup.uvm.go_on.set()
        for space in range(2):
            while len(setup.uvm.spaces) <= space:
                await asyncio.sleep(0)
            setup.uvm.spaces[space].closing.set()
        while not setup.attached():
            await asyncio.sleep(0)
        assert [told.space for told in setup.attached()] == [1]
        assert [client.space for client in setup.attacher.leases] == [1]
        assert (setup.uvm.spaces[0].closed, setup.uvm.spaces[1].closed) == (True, False)

    with_setup(play)


def test_a_lease_that_is_given_up_is_nobodys_while_others_still_use_its_descriptors() -> None:
    async def play(setup: Setup) -> None:
        await setup.joined()
        used = asyncio.Event()

        async def free() -> None:
            await used.wait()

        setup.attacher.release(setup.client, free())
        assert not setup.attacher.leases
        setup.attacher.attach("d1", setup.process, 0)
        setup.uvm.spaces[0].closing.set()
        await asyncio.sleep(0)
        assert not setup.uvm.spaces[0].closed and len(setup.attached()) == 1
        used.set()
        while len(setup.attached()) < 2:
            await asyncio.sleep(0)
        # The first space was closed, the second is held.
        assert (setup.uvm.spaces[0].closed, setup.uvm.spaces[1].closed) == (True, False)
        assert setup.attacher.leases[setup.client].space is setup.uvm.spaces[1]

    with_setup(play)


def test_releasing_what_is_not_held_still_waits_for_nobody() -> None:
    async def play(setup: Setup) -> None:
        freed = asyncio.Event()

        async def free() -> None:
            freed.set()

        setup.attacher.release(setup.client, free())
        await freed.wait()

    with_setup(play)
