"""Hostile clients: they hang probes, name thousands of processes, or have changed their user."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Sequence

import pytest

from mpsd.base.errors import StoreError
from mpsd.base.model import ClientId, ProcessFacts, ProcessInstance
from mpsd.clients.lease import lease_name
from mpsd.core import events as ev
from mpsd.fdstore.queue import LeaseStore
from mpsd.os import processes
from mpsd.os.descriptors import Charge
from mpsd.os.probes import PROBES_PER_USER
from tests.support.descriptors import open_descriptors
from tests.unit.test_attach import ROLES, Setup, with_setup


def test_a_process_that_is_nobodys_own_by_the_time_of_the_kill_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(setup: Setup) -> None:
        child = await asyncio.create_subprocess_exec("/bin/cat", stdin=asyncio.subprocess.PIPE)
        process = processes.facts(child.pid).instance
        setup.attacher.notice("d1", child.pid)
        pin = setup.attacher.pinned(process)
        assert pin is not None
        me = os.getuid()
        monkeypatch.setattr(processes, "users", lambda p: processes.Users(0, 12345, 0))
        assert setup.attacher.kill(process, 12345).startswith("withheld: ")
        (told,) = [e for e in setup.said if isinstance(e, ev.KillRefused)]
        assert told.process == process and "effective 12345" in told.reason
        monkeypatch.undo()
        setup.attacher.kill(process, me + 1)
        assert len([e for e in setup.said if isinstance(e, ev.KillRefused)]) == 2
        assert pin.alive()
        assert setup.attacher.kill(process, me) == "sent"
        assert await child.wait() == -signal.SIGKILL
        assert setup.attacher.kill(process, me) == "ended before"

    with_setup(play)


def test_a_pid_that_is_named_thousands_of_times_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[int] = []
    real = processes.facts

    def counting(pid: int, command: str | None = None) -> ProcessFacts:
        described.append(pid)
        return real(pid, command)

    async def play(setup: Setup) -> None:
        monkeypatch.setattr(processes, "facts", counting)
        for _ in range(4000):
            setup.attacher.notice("d1", setup.process.pid)
        await setup.attacher.noticed()
        # Up to two: the first may be described before the last was named.
        assert len(described) <= 2
        told = len(described)
        setup.attacher.notice("d1", setup.process.pid, listed=True)
        await setup.attacher.noticed()
        assert len(described) == told + 1
        setup.known.add(("d1", setup.process, True))
        for listed in (False, True):
            setup.attacher.notice("d1", setup.process.pid, listed=listed)
        await setup.attacher.noticed()
        assert len(described) == told + 1
        setup.attacher.notice("d2", setup.process.pid)
        await setup.attacher.noticed()
        assert len(described) == told + 2

    with_setup(play)


def test_hung_looks_at_one_users_clients_fail_and_hold_up_no_other_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mpsd.clients.attach.PROBE_DEADLINE_S", 0.05)
    before = set(open_descriptors())

    async def play(setup: Setup) -> None:
        setup.uvm.go_on.clear()
        for space in range(PROBES_PER_USER + 1):
            setup.attacher.notice("d1", setup.process.pid)
            setup.attacher.attach("d1", setup.process, space)
        await setup.told(ev.AttachFailed, PROBES_PER_USER + 1)
        reasons = [e.reason for e in setup.said if isinstance(e, ev.AttachFailed)]
        begun = sum("it has not ended" in r for r in reasons)
        assert 1 <= begun <= PROBES_PER_USER
        assert sum("probes for the same user" in r for r in reasons) == PROBES_PER_USER + 1 - begun
        # The pool sees a client of another user.
        monkeypatch.setattr(processes, "users", lambda process: processes.Users(7, 7, 7))
        child = await asyncio.create_subprocess_exec("/bin/cat", stdin=asyncio.subprocess.PIPE)
        setup.attacher.notice("d1", child.pid)
        await setup.attacher.noticed()
        other = [e.facts.instance for e in setup.said if isinstance(e, ev.ClientNoticed)][-1]
        hung, setup.uvm.go_on = setup.uvm.go_on, threading.Event()
        setup.uvm.go_on.set()
        setup.attacher.attach("d1", other, 0)
        await setup.told(ev.ClientAttached)
        assert setup.attached()[0].process == other
        # A space that arrives after the deadline is closed.
        hung.set()
        while len(setup.uvm.spaces) < begun + 1:
            await asyncio.sleep(0.001)
        for space in setup.uvm.spaces:
            space.closing.set()
        child.kill()
        await child.wait()
        await setup.told(ev.ClientDied)
        while not all(s.tracker.closed for s in setup.uvm.spaces[1:]):
            await asyncio.sleep(0.001)

    with_setup(play)
    assert set(open_descriptors()) <= before


def test_a_program_that_cannot_be_looked_at_hides_no_other_clients_exec(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free, looked = threading.Event(), threading.Event()
    real = processes.exec_identity

    async def play(setup: Setup) -> None:
        child = await asyncio.create_subprocess_exec("/bin/cat", stdin=asyncio.subprocess.PIPE)
        process = processes.facts(child.pid).instance

        def hangs(instance: ProcessInstance) -> processes.ExecIdentity:
            if instance == setup.process:
                looked.set()
                assert free.wait(10)
                return real(instance)
            return processes.ExecIdentity(1, 2, 3, len(seen))

        seen: list[int] = []
        monkeypatch.setattr(processes, "exec_identity", hangs)
        setup.attacher.notice("d1", setup.process.pid)
        setup.attacher.notice("d1", process.pid)
        await setup.attacher.noticed()
        while setup.attacher.pins._pins[process].identity is None:
            await asyncio.sleep(0.001)
        assert looked.wait(10)
        seen.append(1)
        setup.attacher.check_identities()
        await setup.told(ev.ClientLeft)
        seen.append(1)
        for _ in range(1000):
            setup.attacher.check_identities(process.pid)
        await setup.told(ev.ClientLeft, 2)
        free.set()
        child.kill()
        await child.wait()

    with_setup(play)


def test_a_lease_for_which_no_descriptor_was_left_is_stored_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpsd.clients.leasestorage.RETRY_S", 0.001)
    tried: list[str] = []
    real = LeaseStore.put

    def full(
        front: LeaseStore,
        name: str,
        fds: Sequence[int],
        owner: int | None = None,
        charge: Charge | None = None,
    ) -> asyncio.Future[None]:
        tried.append(name)
        if len(tried) < 3:
            raise StoreError("Too many open files")
        assert owner == os.getuid()
        return real(front, name, fds, owner, charge)

    monkeypatch.setattr(LeaseStore, "put", full)

    async def play(setup: Setup) -> None:
        await setup.joined()
        assert setup.attached()[0].unstored == (0,)
        await setup.told(ev.LeaseStored)
        assert setup.store.names == {lease_name(setup.client, ROLES)}
        # A lease that was released in the meantime is not stored any more.
        tried.clear()
        setup.uvm.spaces[0].closing.set()
        setup.attacher.release(setup.client)
        setup.attacher.attach("d1", setup.process, 1)
        await setup.told(ev.ClientAttached, 2)
        setup.uvm.spaces[1].closing.set()
        setup.attacher.release(ClientId("d1", setup.process, 1))
        await setup.attacher.attachments_done()
        assert len(tried) <= 2

    with_setup(play)
