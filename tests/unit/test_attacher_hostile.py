"""Clients that hang whoever looks at them, name others by the thousand, or are no longer whose they were."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Sequence

import pytest

from mpsd import procs
from mpsd.core import events as ev
from mpsd.errors import StoreError
from mpsd.lease import lease_name
from mpsd.leasestore import LeaseStore
from mpsd.looks import OF_ONE
from mpsd.model import ClientId, ProcessFacts, ProcessInstance
from tests.support.descriptors import open_descriptors
from tests.unit.test_attacher import ROLES, Desk, at_a_desk


def test_a_process_that_is_nobodys_own_by_the_time_of_the_kill_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(desk: Desk) -> None:
        child = await asyncio.create_subprocess_exec("/bin/cat", stdin=asyncio.subprocess.PIPE)
        process = procs.facts(child.pid).instance
        desk.attacher.notice("d1", child.pid)
        pin = desk.attacher.pinned(process)
        assert pin is not None
        me = os.getuid()
        monkeypatch.setattr(procs, "users", lambda p: procs.Users(0, 12345, 0))
        desk.attacher.kill(process, 12345)
        (told,) = [e for e in desk.said if isinstance(e, ev.KillRefused)]
        assert told.process == process and "effective 12345" in told.reason
        monkeypatch.undo()
        desk.attacher.kill(process, me + 1)
        assert len([e for e in desk.said if isinstance(e, ev.KillRefused)]) == 2
        assert pin.alive()
        desk.attacher.kill(process, me)
        assert await child.wait() == -signal.SIGKILL
        desk.attacher.kill(process, me)

    at_a_desk(play)


def test_a_pid_that_is_named_thousands_of_times_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[int] = []
    real = procs.facts

    def counting(pid: int, command: str | None = None) -> ProcessFacts:
        described.append(pid)
        return real(pid, command)

    async def play(desk: Desk) -> None:
        monkeypatch.setattr(procs, "facts", counting)
        for _ in range(4000):
            desk.attacher.notice("d1", desk.process.pid)
        await desk.attacher.noticed()
        # More than one: the first may have been told before the last was named.
        assert len(described) <= 2
        told = len(described)
        desk.attacher.notice("d1", desk.process.pid, listed=True)
        await desk.attacher.noticed()
        assert len(described) == told + 1
        desk.known.add(("d1", desk.process, True))
        for listed in (False, True):
            desk.attacher.notice("d1", desk.process.pid, listed=listed)
        await desk.attacher.noticed()
        assert len(described) == told + 1
        desk.attacher.notice("d2", desk.process.pid)
        await desk.attacher.noticed()
        assert len(described) == told + 2

    at_a_desk(play)


def test_hung_looks_at_one_users_clients_fail_and_hold_up_no_other_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mpsd.attacher.LOOK_DEADLINE_S", 0.05)
    before = set(open_descriptors())

    async def play(desk: Desk) -> None:
        desk.uvm.go_on.clear()
        for space in range(OF_ONE + 1):
            desk.attacher.notice("d1", desk.process.pid)
            desk.attacher.attach("d1", desk.process, space)
        await desk.told(ev.AttachFailed, OF_ONE + 1)
        reasons = [e.reason for e in desk.said if isinstance(e, ev.AttachFailed)]
        assert sum("it has not ended" in r for r in reasons) == OF_ONE
        assert sum("others of its user" in r for r in reasons) == 1
        # Another user's, as far as the pool is concerned.
        monkeypatch.setattr(procs, "users", lambda process: procs.Users(7, 7, 7))
        child = await asyncio.create_subprocess_exec("/bin/cat", stdin=asyncio.subprocess.PIPE)
        desk.attacher.notice("d1", child.pid)
        await desk.attacher.noticed()
        other = [e.facts.instance for e in desk.said if isinstance(e, ev.ClientNoticed)][-1]
        hung, desk.uvm.go_on = desk.uvm.go_on, threading.Event()
        desk.uvm.go_on.set()
        desk.attacher.attach("d1", other, 0)
        await desk.told(ev.ClientAttached)
        assert desk.attached()[0].process == other
        # What comes too late is closed.
        hung.set()
        while len(desk.uvm.spaces) < OF_ONE + 1:
            await asyncio.sleep(0.001)
        for space in desk.uvm.spaces:
            space.closing.set()
        child.kill()
        await child.wait()
        await desk.told(ev.ClientDied)
        while not all(s.tracker.closed for s in desk.uvm.spaces[1:]):
            await asyncio.sleep(0.001)

    at_a_desk(play)
    assert set(open_descriptors()) <= before


def test_a_program_that_cannot_be_looked_at_hides_no_other_clients_exec(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free, looked = threading.Event(), threading.Event()
    real = procs.exec_identity

    async def play(desk: Desk) -> None:
        child = await asyncio.create_subprocess_exec("/bin/cat", stdin=asyncio.subprocess.PIPE)
        process = procs.facts(child.pid).instance

        def hangs(instance: ProcessInstance) -> procs.ExecIdentity:
            if instance == desk.process:
                looked.set()
                assert free.wait(10)
                return real(instance)
            return procs.ExecIdentity(1, 2, 3, len(seen))

        seen: list[int] = []
        monkeypatch.setattr(procs, "exec_identity", hangs)
        desk.attacher.notice("d1", desk.process.pid)
        desk.attacher.notice("d1", process.pid)
        await desk.attacher.noticed()
        while desk.attacher._pins[process].identity is None:
            await asyncio.sleep(0.001)
        assert looked.wait(10)
        seen.append(1)
        desk.attacher.check_identities()
        await desk.told(ev.ClientLeft)
        seen.append(1)
        for _ in range(1000):
            desk.attacher.check_identities(process.pid)
        await desk.told(ev.ClientLeft, 2)
        free.set()
        child.kill()
        await child.wait()

    at_a_desk(play)


def test_a_lease_for_which_no_descriptor_was_left_is_stored_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpsd.shelf.RETRY_S", 0.001)
    tried: list[str] = []
    real = LeaseStore.put

    def full(
        front: LeaseStore, name: str, fds: Sequence[int], owner: int | None = None
    ) -> asyncio.Future[None]:
        tried.append(name)
        if len(tried) < 3:
            raise StoreError("Too many open files")
        assert owner == os.getuid()
        return real(front, name, fds, owner)

    monkeypatch.setattr(LeaseStore, "put", full)

    async def play(desk: Desk) -> None:
        await desk.joined()
        assert desk.attached()[0].unstored == (0,)
        await desk.told(ev.LeaseStored)
        assert desk.store.names == {lease_name(desk.client, ROLES)}
        # One that was given up in the meantime is not stored any more.
        tried.clear()
        desk.uvm.spaces[0].closing.set()
        desk.attacher.release(desk.client)
        desk.attacher.attach("d1", desk.process, 1)
        await desk.told(ev.ClientAttached, 2)
        desk.uvm.spaces[1].closing.set()
        desk.attacher.release(ClientId("d1", desk.process, 1))
        await desk.attacher.settled()
        assert len(tried) <= 2

    at_a_desk(play)
