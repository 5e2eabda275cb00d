"""Pins, leases and trackers over a UVM driver that does as the test says; the client is this process.

Long because the fakes of driver, work and store stand here, where their every step is the test's.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from mpsd import procs
from mpsd.attacher import Attacher
from mpsd.core import events as ev
from mpsd.errors import GpuError, NotFoundError, StoreError
from mpsd.gpu.base import AddressSpace
from mpsd.lease import Kept, lease_name, parse_lease_name, stored_lease
from mpsd.leasestore import LeaseStore
from mpsd.model import (
    Access,
    ClientId,
    ProcessFacts,
    ProcessInstance,
    TrackerBatch,
    UvmEvent,
    UvmFaultType,
    UvmReason,
)
from mpsd.workwatch import WorkWatch
from tests.support.descriptors import open_descriptors

ROLES = ("mm", "va", "guard")
EVENT = UvmEvent(True, UvmFaultType.INVALID_PTE, Access.WRITE, UvmReason.INVALID_ADDRESS, 0x7F0000000000, 1)


class FakeTracker:
    def __init__(self) -> None:
        self.batches: list[TrackerBatch] = []
        self.closed = False
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def tell(self, batch: TrackerBatch) -> None:
        self.batches.append(batch)
        os.write(self._writer, b"!")

    def fileno(self) -> int:
        return self._reader

    def drain(self) -> TrackerBatch:
        os.read(self._reader, 1)
        return self.batches.pop(0)

    def close(self) -> None:
        self.closed = True
        os.close(self._reader)
        os.close(self._writer)


@dataclass
class FakeSpace:
    """`closing`: set by the test when the close, which takes long, may end."""

    tracker: FakeTracker = field(default_factory=FakeTracker)
    closing: threading.Event = field(default_factory=threading.Event)
    fds: Mapping[str, int] = field(default_factory=lambda: {"mm": 0, "va": 0})
    closed: bool = False

    def track(self) -> FakeTracker:
        return self.tracker

    def map_sparse(self, base: int, length: int, gpu_uuid: str) -> None: ...

    def unmap_sparse(self, base: int, length: int) -> None: ...

    def close(self) -> None:
        assert self.closing.wait(10)
        self.closed = True


class FakeUvm:
    """`opened` and `go_on`: set when a look has begun, and by the test when it may end."""

    def __init__(self) -> None:
        self.spaces: list[FakeSpace] = []
        self.opened, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def open(self, process: ProcessInstance, pidfd: int) -> Sequence[AddressSpace]:
        os.fstat(pidfd)
        self.opened.set()
        go_on = self.go_on
        assert go_on.wait(10)
        self.spaces.append(FakeSpace())
        return [self.spaces[-1]]

    def adopt(self, fds: Mapping[str, int]) -> AddressSpace:
        if "va" not in fds:
            raise GpuError("no address space")
        for fd in fds.values():
            os.close(fd)
        self.spaces.append(FakeSpace())
        return self.spaces[-1]


class FakeStore:
    """Names only. As the real ones it refuses a name that it has. `answers`: cleared, it hangs."""

    kind = "fake"

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.answers = threading.Event()
        self.answers.set()

    def put(self, name: str, fds: Sequence[int]) -> None:
        assert self.answers.wait(10)
        if name in self.names:
            raise StoreError(f"{name} is taken")
        self.names.add(name)

    def remove(self, name: str) -> None:
        self.names.remove(name)

    def fetch_all(self) -> dict[str, list[int]]:
        return {}

    def fileno(self) -> int:
        return -1

    def revive(self) -> None: ...

    def close(self) -> None: ...


class NoWork:
    def open(self, process: ProcessInstance, pidfd: int) -> NoView:
        return NoView()

    def adopt(self, process: ProcessInstance, fds: Mapping[str, int]) -> NoView:
        return NoView()


class NoView:
    fds: Mapping[str, int] = {}

    located = True

    def refresh(self) -> None: ...

    def pending(self) -> str:
        return ""

    def close(self) -> None: ...


class Desk:
    """An attacher and everything that it said."""

    def __init__(self) -> None:
        self.said: list[ev.Event] = []
        self.uvm, self.store = FakeUvm(), FakeStore()
        self.work = WorkWatch(NoWork(), 0.01, self.said.append)
        self.front = LeaseStore(self.store)
        self.known: set[tuple[str, ProcessInstance, bool]] = set()
        self.attacher = Attacher(
            self.uvm,
            self.work,
            self.front,
            self.said.append,
            lambda *who: bool({who, (*who[:2], True)} & self.known),
        )
        self.process = procs.facts(os.getpid()).instance
        self.client = ClientId("d1", self.process, 0)

    def join(self) -> None:
        self.attacher.notice("d1", self.process.pid)
        self.attacher.attach("d1", self.process, 0)

    async def joined(self, clients: int = 1) -> None:
        """Joined, and told so."""
        self.join()
        await self.told(ev.ClientAttached, clients)

    async def told(self, kind: type[ev.Event], count: int = 1) -> None:
        while len([e for e in self.said if isinstance(e, kind)]) < count:
            await asyncio.sleep(0.001)

    def attached(self) -> list[ev.ClientAttached]:
        return [e for e in self.said if isinstance(e, ev.ClientAttached)]

    def dropped(self) -> int:
        return sum(e.counters.get("events_dropped", 0) for e in self.said if isinstance(e, ev.Counted))

    async def end(self) -> None:
        self.uvm.go_on.set()
        self.store.answers.set()
        for space in self.uvm.spaces:
            space.closing.set()
        await self.attacher.settled()
        self.attacher.close()
        await self.work.close()
        await self.front.close(10, end=False)


def at_a_desk(play: Callable[[Desk], object]) -> None:
    async def run() -> None:
        desk = Desk()
        try:
            async with asyncio.timeout(10):
                result = play(desk)
                if asyncio.iscoroutine(result):
                    await result
        finally:
            await desk.end()

    asyncio.run(run())


def test_names_of_leases_are_read_back_and_others_are_not_ours() -> None:
    client = ClientId("d12", ProcessInstance(77, 1234), 3)
    assert parse_lease_name(lease_name(client, ("mm", "va"))) == (client, ("mm", "va"))
    for other in ("lease.d1.7.8", "lease.d1.x.8.0.va", "socket", "vault.d1.7.8.0.va", ""):
        assert parse_lease_name(other) is None


def test_sets_of_earlier_forms_are_read() -> None:
    client = ClientId("d12", ProcessInstance(77, 1234), 3)
    first = "lease.d12.77.1234.3"
    assert stored_lease(first, 2) == (client, ("mm", "va"))
    assert stored_lease(first, 4) == (client, ("mm", "va", "areas", "mem"))
    assert stored_lease(f"{first}.va+mm", 2) == (client, ("va", "mm"))
    for strange, count in ((first, 3), (f"{first}.mm+va", 3), (f"{first}.mm+mm", 2), (f"{first}.va.x", 1)):
        assert stored_lease(strange, count) is None


def test_a_living_clients_set_of_an_earlier_form_is_stored_anew() -> None:
    async def play(desk: Desk) -> None:
        old = f"lease.d1.{desk.process.pid}.{desk.process.start_ticks}.0"
        fds = {role: os.memfd_create(role, os.MFD_CLOEXEC) for role in ("mm", "va")}
        desk.store.names.add(old)
        desk.front._held.add(old)
        desk.attacher.inherit({desk.client: Kept(old, fds)})
        await desk.joined()
        while old in desk.store.names:
            await asyncio.sleep(0.001)
        assert desk.store.names == {lease_name(desk.client, ROLES)}

    at_a_desk(play)


def test_events_that_the_driver_dropped_are_counted_once() -> None:
    async def play(desk: Desk) -> None:
        await desk.joined()
        tracker = desk.uvm.spaces[0].tracker
        # The driver counts from the beginning of the tracker.
        for batch in (TrackerBatch((EVENT,), 0), TrackerBatch((), 5), TrackerBatch((EVENT,), 7)):
            tracker.tell(batch)
        while tracker.batches:
            await asyncio.sleep(0)
        assert desk.dropped() == 7
        assert [e.event for e in desk.said if isinstance(e, ev.UvmFatal)] == [EVENT, EVENT]

    at_a_desk(play)


def test_only_fatal_events_are_told_and_not_without_end() -> None:
    async def play(desk: Desk) -> None:
        await desk.joined()
        serviced = UvmEvent(
            False, UvmFaultType.INVALID_PTE, Access.READ, UvmReason.UNKNOWN, 0x7F0000000000, 1
        )
        tracker = desk.uvm.spaces[0].tracker
        tracker.tell(TrackerBatch((serviced, *[EVENT] * 1000), 0))
        while tracker.batches:
            await asyncio.sleep(0)
        told = len([e for e in desk.said if isinstance(e, ev.UvmFatal)])
        assert 1 <= told <= 64
        assert desk.dropped() == 1000 - told

    at_a_desk(play)


def test_a_process_that_cannot_be_described_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(desk: Desk) -> None:
        def gone(pid: int, command: str = "") -> ProcessFacts:
            raise NotFoundError(f"process {pid} has gone")

        monkeypatch.setattr(procs, "facts", gone)
        desk.attacher.notice("d1", desk.process.pid)
        assert desk.attacher.pinned(desk.process) is not None
        await desk.attacher.noticed()
        assert desk.attacher.pinned(desk.process) is None
        assert desk.said == [ev.Counted({"clients_missed": 1})]

    at_a_desk(play)


def test_a_death_is_told_also_when_its_attaching_has_just_ended() -> None:
    async def play(desk: Desk) -> None:
        await desk.joined()
        pin = desk.attacher._pins[desk.process]

        async def ends() -> None:
            return

        task = desk.attacher._tasks.spawn(ends())
        pin.attaching[task] = pin.life
        task.add_done_callback(lambda done: pin.attaching.pop(done, None))
        desk.attacher._died(desk.process)
        await desk.told(ev.ClientDied)

    at_a_desk(play)


def test_a_lease_is_stored_before_the_client_counts_as_attached() -> None:
    async def play(desk: Desk) -> None:
        await desk.joined()
        assert desk.store.names == {lease_name(desk.client, ROLES)}
        (told,) = desk.attached()
        assert (told.tracked, told.problem, told.unstored) == (True, "", ())

    at_a_desk(play)


def test_after_an_exec_the_new_lease_waits_until_the_old_name_is_free() -> None:
    async def play(desk: Desk) -> None:
        await desk.joined()
        desk.attacher.release(desk.client)
        desk.attacher.attach("d1", desk.process, 0)
        await asyncio.sleep(0.01)
        assert len(desk.attached()) == 1
        desk.uvm.spaces[0].closing.set()
        while len(desk.attached()) < 2:
            await asyncio.sleep(0.001)
        assert not desk.attached()[1].unstored
        # The old one's removal did not take the new one's descriptors out of the store.
        await desk.attacher.settled()
        assert desk.store.names == {lease_name(desk.client, ROLES)}

    at_a_desk(play)


def test_who_had_a_lease_is_known_until_it_is_closed() -> None:
    async def play(desk: Desk) -> None:
        await desk.joined()
        desk.attacher.release(desk.client)
        desk.attacher.forget(desk.process)
        assert dict(desk.attacher.ending) == {desk.client: os.getuid()}
        desk.uvm.spaces[0].closing.set()
        while desk.attacher.ending:
            await asyncio.sleep(0.001)

    at_a_desk(play)


def test_whose_the_lease_was_of_one_that_died_while_no_daemon_was_there_is_known() -> None:
    async def play(desk: Desk) -> None:
        fds = {role: os.memfd_create(role, os.MFD_CLOEXEC) for role in ("mm", "va")}
        desk.attacher.inherit({desk.client: Kept(lease_name(desk.client, fds), fds)})
        assert desk.attacher.restore(desk.client)
        desk.attacher.release(desk.client, uid=7)
        assert dict(desk.attacher.ending) == {desk.client: 7}

    at_a_desk(play)


def test_a_store_that_hangs_delays_neither_the_loop_nor_the_client_for_long() -> None:
    async def play(desk: Desk) -> None:
        desk.store.answers.clear()
        await desk.joined()
        assert desk.attached()[0].unstored == (0,)
        assert not desk.store.names
        desk.store.answers.set()
        await desk.told(ev.LeaseStored)
        assert desk.store.names == {lease_name(desk.client, ROLES)}

    at_a_desk(play)


def test_a_lease_given_up_before_it_was_stored_leaves_nothing_in_the_store() -> None:
    async def play(desk: Desk) -> None:
        desk.store.answers.clear()
        await desk.joined()
        desk.uvm.spaces[0].closing.set()
        desk.attacher.release(desk.client)
        desk.store.answers.set()
        await desk.attacher.settled()
        await desk.front.close(10, end=False)
        assert not desk.store.names

    at_a_desk(play)


def test_a_stored_set_that_is_no_lease_is_told_and_the_others_are_restored() -> None:
    before = open_descriptors()

    def kept(client: ClientId, *roles: str) -> Kept:
        fds = {role: os.memfd_create(role, os.MFD_CLOEXEC) for role in roles}
        return Kept(lease_name(client, roles), fds)

    async def play(desk: Desk) -> None:
        ids = [ClientId("d1", desk.process, n) for n in range(4)]
        sets = [kept(ids[0], "mm", "areas"), kept(ids[1], "mm", "guard"), kept(ids[2], *ROLES)]
        # Whatever lies under the role of the notes.
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.close(writer)
        sets.append(Kept(lease_name(ids[3], ("va", "guard")), {**kept(ids[3], "va").fds, "guard": reader}))
        desk.attacher.inherit(dict(zip(ids, sets, strict=True)))
        assert [desk.attacher.restore(i) for i in ids] == [False, False, True, False]
        assert list(desk.attacher.leases) == [ids[2]]
        desk.uvm.spaces[0].tracker.close()
        assert [e for e in desk.said if isinstance(e, ev.Counted)] == [
            ev.Counted({"leases_malformed": 1})
        ] * 3

    at_a_desk(play)
    assert set(open_descriptors()) <= set(before)


def test_a_command_line_that_cannot_be_read_in_time_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end = threading.Event()
    real = procs.facts

    def slow(pid: int, command: str | None = None) -> ProcessFacts:
        assert command is not None or may_end.wait(10)
        return real(pid, command)

    monkeypatch.setattr("mpsd.attacher.FACTS_DEADLINE_S", 0.01)

    async def play(desk: Desk) -> None:
        monkeypatch.setattr(procs, "facts", slow)
        desk.attacher.notice("d1", desk.process.pid)
        await desk.told(ev.ClientNoticed)
        (told,) = [e for e in desk.said if isinstance(e, ev.ClientNoticed)]
        assert told.facts.command == "[not readable in time]"
        assert told.facts.instance == desk.process
        may_end.set()

    at_a_desk(play)


def test_a_process_that_is_forgotten_while_it_is_looked_at_leaves_no_lease() -> None:
    async def play(desk: Desk) -> None:
        desk.uvm.go_on.clear()
        desk.join()
        while not desk.uvm.opened.is_set():
            await asyncio.sleep(0.001)
        desk.attacher.forget(desk.process)
        desk.uvm.go_on.set()
        while not desk.uvm.spaces:
            await asyncio.sleep(0.001)
        desk.uvm.spaces[0].closing.set()
        await desk.attacher.settled()
        assert not desk.attached()
        assert not desk.attacher.leases
        assert not desk.store.names

    at_a_desk(play)


def test_a_client_that_dies_while_it_is_leased_is_attached_first_and_dead_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A machine may stand still for longer than the attacher waits for a look.
    monkeypatch.setattr("mpsd.attacher.SETTLE_S", 60.0)

    async def play(desk: Desk) -> None:
        child = await asyncio.create_subprocess_exec("/bin/cat", stdin=asyncio.subprocess.PIPE)
        process = procs.facts(child.pid).instance
        desk.uvm.go_on.clear()
        desk.attacher.notice("d1", child.pid)
        desk.attacher.attach("d1", process, 0)
        while not desk.uvm.opened.is_set():
            await asyncio.sleep(0.001)
        child.kill()
        await child.wait()
        assert not [e for e in desk.said if isinstance(e, ev.ClientDied)]
        desk.uvm.go_on.set()
        await desk.told(ev.ClientDied)
        said = [type(e) for e in desk.said if isinstance(e, ev.ClientAttached | ev.ClientDied)]
        assert said == [ev.ClientAttached, ev.ClientDied]

    at_a_desk(play)
