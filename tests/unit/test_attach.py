"""Pins, leases and trackers over a scripted UVM driver; the client is this process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from mpsd.base.errors import GpuError, NotFoundError, NotReadyError, StoreError
from mpsd.base.model import (
    Access,
    ClientId,
    ProcessFacts,
    ProcessInstance,
    TrackerBatch,
    UvmEvent,
    UvmFaultType,
    UvmReason,
)
from mpsd.clients.attach import Attacher
from mpsd.clients.endofwork import WorkWatch
from mpsd.clients.lease import RetainedLease, lease_name, parse_lease_name, stored_lease
from mpsd.core import events as ev
from mpsd.fdstore.queue import LeaseStore
from mpsd.gpu.base import AddressSpace
from mpsd.os import processes
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
    """`closing`: set by the test when the slow close may end."""

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
    """`opened`: set when a probe has begun. `go_on`: set by the test when the probe may end."""

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
    """Store of names only. It refuses a name that it has, as real stores do. `answers`: cleared, it hangs."""

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

    located = settled = True

    def refresh(self) -> None: ...

    def pending(self) -> str:
        return ""

    def launched(self) -> bool | None:
        return None

    def close(self) -> None: ...


class Setup:
    """An attacher and every event that it posted."""

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
        self.process = processes.facts(os.getpid()).instance
        self.client = ClientId("d1", self.process, 0)

    def join(self) -> None:
        self.attacher.notice("d1", self.process.pid)
        self.attacher.attach("d1", self.process, 0)

    async def joined(self, clients: int = 1) -> None:
        """Join and wait for the ClientAttached events."""
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
        await self.attacher.attachments_done()
        self.attacher.close()
        await self.work.close()
        await self.front.close(10, end=False)


def with_setup(play: Callable[[Setup], object]) -> None:
    async def run() -> None:
        setup = Setup()
        try:
            async with asyncio.timeout(10):
                result = play(setup)
                if asyncio.iscoroutine(result):
                    await result
        finally:
            await setup.end()

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
    async def play(setup: Setup) -> None:
        old = f"lease.d1.{setup.process.pid}.{setup.process.start_ticks}.0"
        fds = {role: os.memfd_create(role, os.MFD_CLOEXEC) for role in ("mm", "va")}
        setup.store.names.add(old)
        setup.front._held.add(old)
        setup.attacher.inherit({setup.client: RetainedLease(old, fds)})
        await setup.joined()
        while old in setup.store.names:
            await asyncio.sleep(0.001)
        assert setup.store.names == {lease_name(setup.client, ROLES)}

    with_setup(play)


def test_events_that_the_driver_dropped_are_counted_once() -> None:
    async def play(setup: Setup) -> None:
        await setup.joined()
        tracker = setup.uvm.spaces[0].tracker
        # The driver counts from the creation of the tracker.
        for batch in (TrackerBatch((EVENT,), 0), TrackerBatch((), 5), TrackerBatch((EVENT,), 7)):
            tracker.tell(batch)
        while tracker.batches:
            await asyncio.sleep(0)
        assert setup.dropped() == 7
        assert [e.event for e in setup.said if isinstance(e, ev.UvmFatal)] == [EVENT, EVENT]

    with_setup(play)


def test_only_fatal_events_are_told_and_not_without_end() -> None:
    async def play(setup: Setup) -> None:
        await setup.joined()
        serviced = UvmEvent(
            False, UvmFaultType.INVALID_PTE, Access.READ, UvmReason.UNKNOWN, 0x7F0000000000, 1
        )
        tracker = setup.uvm.spaces[0].tracker
        tracker.tell(TrackerBatch((serviced, *[EVENT] * 1000), 0))
        while tracker.batches:
            await asyncio.sleep(0)
        told = len([e for e in setup.said if isinstance(e, ev.UvmFatal)])
        assert 1 <= told <= 64
        assert setup.dropped() == 1000 - told

    with_setup(play)


def test_a_process_that_cannot_be_described_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(setup: Setup) -> None:
        def gone(pid: int, command: str = "") -> ProcessFacts:
            raise NotFoundError(f"process {pid} has gone")

        monkeypatch.setattr(processes, "facts", gone)
        setup.attacher.notice("d1", setup.process.pid)
        assert setup.attacher.pinned(setup.process) is not None
        await setup.attacher.noticed()
        assert setup.attacher.pinned(setup.process) is None
        assert setup.said == [ev.Counted({"clients_missed": 1})]

    with_setup(play)


def test_a_death_is_told_also_when_its_attaching_has_just_ended() -> None:
    async def play(setup: Setup) -> None:
        await setup.joined()
        pin = setup.attacher.pins._pins[setup.process]

        async def ends() -> None:
            return

        task = setup.attacher._tasks.spawn(ends())
        pin.attaching[task] = pin.exec_count
        task.add_done_callback(lambda done: pin.attaching.pop(done, None))
        setup.attacher.pins._exited(setup.process)
        await setup.told(ev.ClientDied)

    with_setup(play)


def test_a_lease_is_stored_before_the_client_counts_as_attached() -> None:
    async def play(setup: Setup) -> None:
        await setup.joined()
        assert setup.store.names == {lease_name(setup.client, ROLES)}
        (told,) = setup.attached()
        assert (told.tracked, told.problem, told.unstored) == (True, "", ())

    with_setup(play)


def test_after_an_exec_the_new_lease_waits_until_the_old_name_is_free() -> None:
    async def play(setup: Setup) -> None:
        await setup.joined()
        setup.attacher.release(setup.client)
        setup.attacher.attach("d1", setup.process, 0)
        await asyncio.sleep(0.01)
        assert len(setup.attached()) == 1
        setup.uvm.spaces[0].closing.set()
        while len(setup.attached()) < 2:
            await asyncio.sleep(0.001)
        assert not setup.attached()[1].unstored
        # Removing the old lease did not remove the new lease's descriptors from the store.
        await setup.attacher.attachments_done()
        assert setup.store.names == {lease_name(setup.client, ROLES)}

    with_setup(play)


def test_who_had_a_lease_is_known_until_it_is_closed() -> None:
    async def play(setup: Setup) -> None:
        await setup.joined()
        setup.attacher.release(setup.client)
        setup.attacher.forget(setup.process)
        assert dict(setup.attacher.ending) == {setup.client: os.getuid()}
        setup.uvm.spaces[0].closing.set()
        while setup.attacher.ending:
            await asyncio.sleep(0.001)

    with_setup(play)


def test_whose_the_lease_was_of_one_that_died_while_no_daemon_was_there_is_known() -> None:
    async def play(setup: Setup) -> None:
        fds = {role: os.memfd_create(role, os.MFD_CLOEXEC) for role in ("mm", "va")}
        setup.attacher.inherit({setup.client: RetainedLease(lease_name(setup.client, fds), fds)})
        assert setup.attacher.restore(setup.client)
        setup.attacher.release(setup.client, uid=7)
        assert dict(setup.attacher.ending) == {setup.client: 7}

    with_setup(play)


def test_a_store_that_hangs_delays_neither_the_loop_nor_the_client_for_long() -> None:
    async def play(setup: Setup) -> None:
        setup.store.answers.clear()
        await setup.joined()
        assert setup.attached()[0].unstored == (0,)
        assert not setup.store.names
        setup.store.answers.set()
        await setup.told(ev.LeaseStored)
        assert setup.store.names == {lease_name(setup.client, ROLES)}

    with_setup(play)


def test_a_lease_given_up_before_it_was_stored_leaves_nothing_in_the_store() -> None:
    async def play(setup: Setup) -> None:
        setup.store.answers.clear()
        await setup.joined()
        setup.uvm.spaces[0].closing.set()
        setup.attacher.release(setup.client)
        setup.store.answers.set()
        await setup.attacher.attachments_done()
        await setup.front.close(10, end=False)
        assert not setup.store.names

    with_setup(play)


def test_a_stored_set_that_is_no_lease_is_told_and_the_others_are_restored() -> None:
    before = open_descriptors()

    def kept(client: ClientId, *roles: str) -> RetainedLease:
        fds = {role: os.memfd_create(role, os.MFD_CLOEXEC) for role in roles}
        return RetainedLease(lease_name(client, roles), fds)

    async def play(setup: Setup) -> None:
        ids = [ClientId("d1", setup.process, n) for n in range(4)]
        sets = [kept(ids[0], "mm", "areas"), kept(ids[1], "mm", "guard"), kept(ids[2], *ROLES)]
        # Another kind of descriptor in the role of the guard notes.
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.close(writer)
        sets.append(
            RetainedLease(lease_name(ids[3], ("va", "guard")), {**kept(ids[3], "va").fds, "guard": reader})
        )
        setup.attacher.inherit(dict(zip(ids, sets, strict=True)))
        assert [setup.attacher.restore(i) for i in ids] == [False, False, True, False]
        assert list(setup.attacher.leases) == [ids[2]]
        setup.uvm.spaces[0].tracker.close()
        assert [e for e in setup.said if isinstance(e, ev.Counted)] == [
            ev.Counted({"leases_malformed": 1})
        ] * 3

    with_setup(play)
    assert set(open_descriptors()) <= set(before)


def test_a_command_line_that_cannot_be_read_in_time_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end = threading.Event()
    real = processes.facts

    def slow(pid: int, command: str | None = None) -> ProcessFacts:
        assert command is not None or may_end.wait(10)
        return real(pid, command)

    monkeypatch.setattr("mpsd.clients.pins.FACTS_DEADLINE_S", 0.01)

    async def play(setup: Setup) -> None:
        monkeypatch.setattr(processes, "facts", slow)
        setup.attacher.notice("d1", setup.process.pid)
        await setup.told(ev.ClientNoticed)
        (told,) = [e for e in setup.said if isinstance(e, ev.ClientNoticed)]
        assert told.facts.command == "[not readable in time]"
        assert told.facts.instance == setup.process
        may_end.set()

    with_setup(play)


def test_a_process_that_is_forgotten_while_it_is_looked_at_leaves_no_lease() -> None:
    async def play(setup: Setup) -> None:
        setup.uvm.go_on.clear()
        setup.join()
        while not setup.uvm.opened.is_set():
            await asyncio.sleep(0.001)
        setup.attacher.forget(setup.process)
        setup.uvm.go_on.set()
        while not setup.uvm.spaces:
            await asyncio.sleep(0.001)
        setup.uvm.spaces[0].closing.set()
        await setup.attacher.attachments_done()
        assert not setup.attached()
        assert not setup.attacher.leases
        assert not setup.store.names

    with_setup(play)


def test_a_client_that_dies_while_it_is_leased_is_attached_first_and_dead_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A machine may stall for longer than the attacher waits for a probe.
    monkeypatch.setattr("mpsd.clients.attach.SETTLE_S", 60.0)

    async def play(setup: Setup) -> None:
        child = await asyncio.create_subprocess_exec("/bin/cat", stdin=asyncio.subprocess.PIPE)
        process = processes.facts(child.pid).instance
        setup.uvm.go_on.clear()
        setup.attacher.notice("d1", child.pid)
        setup.attacher.attach("d1", process, 0)
        while not setup.uvm.opened.is_set():
            await asyncio.sleep(0.001)
        child.kill()
        await child.wait()
        assert not [e for e in setup.said if isinstance(e, ev.ClientDied)]
        setup.uvm.go_on.set()
        await setup.told(ev.ClientDied)
        said = [type(e) for e in setup.said if isinstance(e, ev.ClientAttached | ev.ClientDied)]
        assert said == [ev.ClientAttached, ev.ClientDied]

    with_setup(play)


@pytest.mark.parametrize("has_space", [False, True])
def test_a_client_without_an_address_space_has_launched_nothing(has_space: bool) -> None:
    async def play(setup: Setup) -> None:
        setup.attacher.notice("d1", setup.process.pid)
        await setup.told(ev.ClientNoticed)
        if not has_space:
            setup.uvm.open = lambda process, pidfd: _raise(NotReadyError("no context"))  # type: ignore[method-assign]
        setup.attacher.check_use(setup.client)
        if has_space:
            await asyncio.to_thread(setup.uvm.opened.wait, 10)
            while not setup.uvm.spaces:
                await asyncio.sleep(0.001)
            setup.uvm.spaces[0].closing.set()
            while not setup.uvm.spaces[0].closed:
                await asyncio.sleep(0.001)
        else:
            await setup.told(ev.NeverLaunched)
        assert [e for e in setup.said if isinstance(e, ev.NeverLaunched)] == (
            [] if has_space else [ev.NeverLaunched(setup.client)]
        )

    with_setup(play)


def _raise(error: Exception) -> Sequence[AddressSpace]:
    raise error
