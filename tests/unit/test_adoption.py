"""Adoption of kept leases: which client is alive and which has exited, with a scripted attacher."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpsd.base.errors import AmbiguousError, DeadlineError, GpuError
from mpsd.base.model import ClientId, ProcessInstance
from mpsd.clients.lease import RetainedLease, lease_name
from mpsd.config.layout import Layout
from mpsd.core import events as ev
from mpsd.core.failover import reports as mev
from mpsd.core.failover.participants import FailoverRecord, Outcome, ParticipantOutcome
from mpsd.core.state import DomainState, Policy, State
from mpsd.daemon import adoption
from mpsd.daemon.adoption import Adoption
from mpsd.mps import pipedir
from mpsd.os import processes as procs
from tests.support.core import World


class Parts:
    """Stand-in for domains, attacher, store and orphans.

    `before_exec`: clients kept of an earlier program. `missed`: called in place of a description that
    fails.
    """

    def __init__(self, *clients: ClientId) -> None:
        self.retained: dict[ClientId, RetainedLease] = {}
        self.stored = {lease_name(c, ("mm",)): [-1] for c in clients}
        self.before_exec: set[ClientId] = set()
        self.noticed_pids: list[tuple[str, int]] = []
        self.noticed_as: dict[tuple[str, int], bool] = {}
        self.restored: list[ClientId] = []
        self.missed = lambda: None
        self.dropped: list[str] = []
        self.held: list[tuple[str, str | None]] = []

    def fetch_all(self) -> dict[str, list[int]]:
        return self.stored

    def drop(self, name: str) -> None:
        self.dropped.append(name)

    def hold(self, name: str, fds: list[int], domain: str | None, processes: list[procs.Pinned]) -> None:
        self.held.append((name, domain))
        for fd in fds:
            os.close(fd)
        for process in processes:
            process.close()

    def names(self) -> list[str]:
        return ["d1", "d2"]

    async def listed_clients(self, domain: str, deadline_s: float) -> list[int]:
        return []

    def inherit(self, kept: dict[ClientId, RetainedLease]) -> None:
        self.retained.update(kept)

    def notice(self, domain: str, pid: int, *, listed: bool = False) -> None:
        self.noticed_pids.append((domain, pid))
        self.noticed_as[domain, pid] = listed

    async def noticed(self) -> None:
        self.missed()

    def is_present(self, client: ClientId) -> bool:
        return client not in self.before_exec

    def restore(self, client: ClientId) -> bool:
        del self.retained[client]
        self.restored.append(client)
        return True


def adopted(base: Path, part: Any) -> list[ev.Event]:
    posted: list[ev.Event] = []
    layout = Layout(base / "r", base / "l", base / "s")
    (layout.run_dir / "d").mkdir(parents=True)
    taking = Adoption(layout, part, part, part, part, posted.append)
    taking.run(None)
    asyncio.run(taking.join_living())
    return posted


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def me() -> ProcessInstance:
    return procs.facts(os.getpid()).instance


def spaces(events: list[ev.Event]) -> list[tuple[str, tuple[int, ...]]]:
    return [(e.domain, e.spaces) for e in events if isinstance(e, ev.LeaseRestored)]


def test_a_living_client_joins_again_with_all_that_was_kept_of_it(tmp_path: Path) -> None:
    parts = Parts(*(ClientId("d1", me(), n) for n in range(2)))
    assert not adopted(tmp_path, parts)
    assert parts.noticed_pids == [("d1", os.getpid())] and len(parts.retained) == 2


def test_what_was_kept_of_a_program_before_an_exec_is_a_dead_clients(tmp_path: Path) -> None:
    before, now, other = (
        ClientId("d1", me(), 0),
        ClientId("d1", me(), 1),
        ClientId("d2", me(), 0),
    )
    parts = Parts(before, now, other)
    parts.before_exec = {before, other}
    assert spaces(adopted(tmp_path, parts)) == [("d1", (0,)), ("d2", (0,))]
    assert parts.restored == [before, other] and set(parts.retained) == {now}
    assert parts.noticed_pids == [("d1", os.getpid())]


def fds(count: int) -> list[int]:
    return [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(count)]


def test_sets_of_earlier_forms_are_leases_and_what_is_not_understood_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        adoption,
        "pin_domain",
        lambda path: [procs.Pinned.open(os.getpid())] if path.endswith("d1") else [],
    )
    exited = ProcessInstance(os.getpid(), 1)
    parts = Parts()
    first = f"lease.d1.{exited.pid}.1"
    parts.stored = {
        f"{first}.0": fds(4),
        f"{first}.1.mm+va": fds(2),
        f"{first}.2.mm+va": fds(2),
        f"{first}.2.mm+va+guard": fds(3),
        f"{first}.3.a.later.form": fds(1),
        "lease.d7.what": fds(1),
        "something": fds(1),
    }
    assert spaces(adopted(tmp_path, parts)) == [("d1", (0, 1, 2))]
    assert parts.held == [(f"{first}.3.a.later.form", "d1"), ("something", None)]
    assert sorted(parts.dropped) == [f"{first}.2.mm+va", "lease.d7.what"]


def test_the_dead_are_restored(tmp_path: Path) -> None:
    client = ClientId("d1", ProcessInstance(os.getpid(), 1), 0)
    parts = Parts(client)
    assert spaces(adopted(tmp_path, parts)) == [("d1", (0,))]
    assert not parts.noticed_pids and not parts.retained


def test_who_dies_before_it_is_described_keeps_its_lease(
    tmp_path: Path, child: subprocess.Popen[bytes]
) -> None:
    client = ClientId("d1", procs.facts(child.pid).instance, 0)
    parts = Parts(client, ClientId("d1", me(), 0))

    def dies() -> None:
        child.kill()
        child.wait()

    parts.missed = dies
    assert spaces(adopted(tmp_path, parts)) == [("d1", (0,))]
    assert parts.restored == [client]
    # A living client's set that is not claimed stays here; it is released later.
    assert [c.process for c in parts.retained] == [me()]


class Unasked(Parts):
    """Parts with one domain that cannot be asked for its clients."""

    def names(self) -> list[str]:
        return ["d1"]

    async def listed_clients(self, domain: str, deadline_s: float) -> list[int]:
        raise DeadlineError("no answer")


@pytest.mark.parametrize("row", [{"listed": True}, {}, {"listed": False}])
def test_a_recorded_client_is_as_listed_as_it_was(tmp_path: Path, row: dict[str, bool]) -> None:
    """A list proves a client of another user; without it mpsd would turn that client away."""
    parts, layout = Unasked(), Layout(tmp_path / "r", tmp_path / "l", tmp_path / "s")
    (layout.run_dir / "d").mkdir(parents=True)
    part: Any = parts
    taking = Adoption(layout, part, part, part, part, lambda event: None)
    taking.rows = [{"domain": "d1", "pid": me().pid, "start_ticks": me().start_ticks, **row}]
    asyncio.run(taking.join_living())
    assert parts.noticed_as == {("d1", os.getpid()): row.get("listed", True)}


def test_a_server_that_does_not_answer_delays_no_other_list(tmp_path: Path) -> None:
    parts = Parts()
    part: Any = parts
    taking = Adoption(Layout(tmp_path, tmp_path, tmp_path), part, part, part, part, lambda event: None)

    async def scenario() -> None:
        asked, answers = list[str](), {name: asyncio.Event() for name in parts.names()}

        async def listed_clients(domain: str, deadline_s: float) -> list[int]:
            asked.append(domain)
            await answers[domain].wait()
            return []

        part.listed_clients = listed_clients
        joining = asyncio.create_task(taking.join_living())
        async with asyncio.timeout(20):
            while asked != parts.names():
                await asyncio.sleep(0.001)
            for answer in answers.values():
                answer.set()
            await joining

    asyncio.run(scenario())


class Halfway(Parts):
    """Parts that also stands in for the hosts. `adopts`: the process that is a control daemon of mpsd."""

    def __init__(self) -> None:
        super().__init__()
        self.adopts: ProcessInstance | None = None
        self.adopt_fails: set[str] = set()
        self.server: ProcessInstance | None = None
        self.headless: list[ProcessInstance | None] = []

    def names(self) -> list[str]:
        return []

    def adopt(
        self, name: str, gpus: tuple[str, ...], uid: int | None, control: ProcessInstance
    ) -> ProcessInstance | None:
        if control != self.adopts or name in self.adopt_fails:
            raise AmbiguousError("it is no control daemon")
        return self.server

    def adopt_headless(self, name: str, gpus: tuple[str, ...], server: ProcessInstance | None) -> bool:
        self.headless.append(server)
        return False

    def ask(self, name: str) -> None:
        pass


def taken(
    base: Path,
    parts: Halfway,
    state: str,
    control: list[int] | None,
    server: list[int] | None = None,
    *,
    leads: bool = False,
    **more: object,
) -> tuple[Adoption, list[ev.Event]]:
    """Take over domain d4. `leads`: the slot's path leads to it. `more`: further keys of its row."""
    posted: list[ev.Event] = []
    layout = Layout(base / "r", base / "l", base / "s")
    layout.pipe_dir("d4").mkdir(parents=True)
    if leads:
        layout.slot_path("all").parent.mkdir()
        layout.slot_path("all").symlink_to(layout.pipe_dir("d4"))
    part: Any = parts
    taking = Adoption(layout, part, part, part, part, posted.append)
    slot = {"id": "all", "gpus": ["G"], "uid": None, "exclusive": False, "active": None, "spare": "d4"}
    row = {"id": "d4", "slot": "all", "state": state, "control": control, "server": server, **more}
    taking.run({"slots": [slot], "domains": [row], "clients": []})
    asyncio.run(taking.join_living())
    return taking, [e for e in posted if isinstance(e, ev.DomainAdopted | ev.ServerDied)]


def mps(base: Path, name: str = "nvidia-cuda-mps-control") -> subprocess.Popen[bytes]:
    """Start a process of this name in the domain's directory."""
    where = {"CUDA_MPS_PIPE_DIRECTORY": str(base / "r" / "d" / "d4")}
    return subprocess.Popen([f"/usr/bin/{name}", "60"], executable=shutil.which("sleep"), env=where)


@pytest.mark.parametrize("state", ["starting", "warm"])
def test_a_control_daemon_that_no_file_names_is_found_by_its_environment(tmp_path: Path, state: str) -> None:
    """mpsd was killed before it wrote the pid file: the daemon is adopted, and retired if it never served."""
    with mps(tmp_path) as process:
        parts = Halfway()
        parts.adopts = procs.facts(process.pid).instance
        _, (event,) = taken(tmp_path, parts, state, None)
        process.kill()
    assert event.control == parts.adopts and not parts.headless
    assert event.state.value == ("retired" if state == "starting" else "warm")


@pytest.mark.parametrize("now", [None, ProcessInstance(78, 2)], ids=["none", "another"])
@pytest.mark.parametrize("state", ["active", "warm", "faulted"])
def test_a_server_that_died_while_nobody_looked_is_told_of(
    tmp_path: Path, state: str, now: ProcessInstance | None
) -> None:
    parts = Halfway()
    parts.adopts, parts.server = ProcessInstance(70, 1), now
    _, (event, *died) = taken(tmp_path, parts, state, [70, 1], [77, 1])
    assert isinstance(event, ev.DomainAdopted)
    if state == "faulted":
        assert (event.server, died) == (now, [])
    else:
        before = ProcessInstance(77, 1)
        assert (event.server, died) == (before, [ev.ServerDied("d4", before)])


def test_a_server_that_lives_on_is_taken_over(tmp_path: Path) -> None:
    parts = Halfway()
    parts.adopts, parts.server = ProcessInstance(70, 1), ProcessInstance(77, 1)
    _, (event,) = taken(tmp_path, parts, "active", [70, 1], [77, 1])
    assert isinstance(event, ev.DomainAdopted) and event.server == parts.server


class Silent(Halfway):
    """A server that lists nothing in time. `asked`: the domains of all questions, with their deadlines."""

    def __init__(self) -> None:
        super().__init__()
        self.adopts, self.server = ProcessInstance(70, 1), ProcessInstance(77, 1)
        self.asked: list[tuple[str, float | None]] = []

    def names(self) -> list[str]:
        return ["d4"]

    def ask(self, name: str) -> None:
        self.asked.append((name, None))

    async def listed_clients(self, domain: str, deadline_s: float) -> list[int]:
        self.asked.append((domain, deadline_s))
        raise DeadlineError("the control daemon answers nothing")


def test_a_server_that_lists_nothing_is_waited_for_only_briefly(tmp_path: Path) -> None:
    parts = Silent()
    taking, _ = taken(tmp_path, parts, "active", [70, 1], [77, 1])
    assert parts.asked == [("d4", None), ("d4", adoption.LIST_S)] and taking.unlisted == {"d4"}
    # Programs that hear nothing move by themselves after 3 s (rescue_ms).
    assert adoption.LIST_S <= 1


def test_a_control_daemon_that_was_told_to_quit_is_asked_nothing(tmp_path: Path) -> None:
    """It answers no command before its clients have ended."""
    parts = Silent()
    taking, (event,) = taken(tmp_path, parts, "stopping", [70, 1], [77, 1])
    assert event.state is DomainState.RETIRED and not parts.asked and not taking.unlisted


def test_records_of_fail_over_come_before_members_and_say_which_programs_have_ended(tmp_path: Path) -> None:
    posted: list[ev.Event] = []
    part: Any = Parts()
    layout = Layout(tmp_path / "r", tmp_path / "l", tmp_path / "s")
    (layout.run_dir / "d").mkdir(parents=True)
    here, ended = me(), ProcessInstance(me().pid, 1)
    entries = tuple(
        ParticipantOutcome(process, 0, "", outcome)
        for process, outcome in (
            (here, Outcome.TOLD),
            (ended, Outcome.TOLD),
            (ProcessInstance(ended.pid, 2), Outcome.MOVED),
        )
    )
    record = FailoverRecord(3, 1.0, "all", "d1", "d2", 2, "fault", False, None, 0.0, None, entries)
    taking = Adoption(layout, part, part, part, part, posted.append, failovers=[record])
    member = {"process": [here.pid, here.start_ticks], "uid": 0, "mode": "keep", "home": "d1"}
    taking.run({"slots": [], "domains": [], "clients": [], "members": [{**member, "left_behind": ""}]})
    restored, came = posted
    assert restored == mev.FailoverRestored(record, frozenset({ended}))
    assert isinstance(came, mev.MemberRestored) and came.process == here


EARLIER = ("starting", "warm", "active", "faulted", "poisoned", "retired", "headless", "stopping", "failed")
"""States of a domain that a daemon without full domains reads."""


def test_an_earlier_daemon_reads_the_state_of_a_full_domain() -> None:
    world = World(Policy(clients_per_domain=1)).ready()
    world.join(10)
    assert world.domain("d1").state is DomainState.FULL
    rows = {row["id"]: row for row in adoption.to_file(world.state, {})["domains"]}
    assert {row["state"] for row in rows.values()} <= set(EARLIER)
    assert rows["d1"]["state"] == "retired" and rows["d1"]["full"] and not rows["d2"]["full"]


@pytest.mark.parametrize(
    ("state", "full", "leads", "found"),
    [
        ("retired", True, False, "full"),
        ("retired", True, True, "active"),
        ("retired", False, False, "retired"),
        ("full", False, False, "full"),
        ("faulted", True, False, "faulted"),
    ],
)
def test_a_full_domain_is_read_as_it_was(
    tmp_path: Path, state: str, full: bool, leads: bool, found: str
) -> None:
    parts = Halfway()
    parts.adopts, parts.server = ProcessInstance(70, 1), ProcessInstance(77, 1)
    _, (event,) = taken(tmp_path, parts, state, [70, 1], [77, 1], leads=leads, full=full)
    assert isinstance(event, ev.DomainAdopted) and event.state.value == found


def test_the_directory_of_what_lives_and_is_not_understood_stays(tmp_path: Path) -> None:
    with mps(tmp_path) as process:
        taking, events = taken(tmp_path, Halfway(), "active", [process.pid, 1])
        process.kill()
    assert not events and f"process {process.pid} serves it" in taking.unknown[0].text
    assert taking.layout.pipe_dir("d4").is_dir()


def test_the_directory_of_what_has_ended_goes(tmp_path: Path) -> None:
    """A process of another name with the same environment, a client, does not keep the directory."""
    parts = Halfway()
    with mps(tmp_path, "python3") as client:
        taking, events = taken(tmp_path, parts, "active", None)
        client.kill()
    assert not events and parts.headless == [None]
    assert not taking.unknown and not taking.layout.pipe_dir("d4").exists()


@pytest.fixture
def living(monkeypatch: pytest.MonkeyPatch) -> Halfway:
    """Parts with two living domains d5 and d6 of one user that no row names."""
    parts = Halfway()
    parts.adopts = ProcessInstance(70, 1)
    owner = pipedir.Ownership(pipedir.Owner.LIVE, 70)
    monkeypatch.setattr(adoption.pipedir, "ownership", lambda _: owner)
    monkeypatch.setattr(adoption.unrecorded, "identify", lambda *_: (("GPU-a",), 100001))
    monkeypatch.setattr(Adoption, "_living", lambda *_, **__: [parts.adopts])
    return parts


def unrecorded_with(base: Path, parts: Halfway, slots: list[dict[str, Any]]) -> State:
    world = World()
    layout = Layout(base / "r", base / "l", base / "s")
    for name in ("d5", "d6"):
        layout.pipe_dir(name).mkdir(parents=True)
    part: Any = parts
    Adoption(layout, part, part, part, part, world.do, gpus=["GPU-a"]).run(
        {"slots": slots, "domains": [], "clients": []}
    )
    return world.state


def test_a_domain_without_a_row_leaves_the_account_and_last_use_of_its_slot(
    tmp_path: Path, living: Halfway
) -> None:
    row = {"id": "s", "gpus": ["GPU-a"], "uid": 100001, "exclusive": False, "active": None, "spare": None}
    state = unrecorded_with(tmp_path, living, [{**row, "account": 1000, "used": 7.0, "joined": False}])
    (slot,) = state.slots.values()
    assert (slot.account, slot.accountable, slot.used, slot.joined) == (1000, 1000, 7.0, False)
    assert {d.slot for d in state.domains.values()} == {"s"} and set(state.domains) == {"d5", "d6"}


def test_domains_without_a_row_and_slot_share_a_new_slot(tmp_path: Path, living: Halfway) -> None:
    living.adopt_fails = {"d5"}
    state = unrecorded_with(tmp_path, living, [])
    (slot,) = state.slots.values()
    assert slot.uid == 100001 and set(state.domains) == {"d6"}


class Devices:
    """NVML of a machine on which some GPUs do not answer, or answer late."""

    def __init__(self, lost: set[str], slow: threading.Event | None = None) -> None:
        self.lost, self.slow = lost, slow

    def memory_used(self, gpu: str) -> int:
        if self.slow is not None:
            self.slow.wait()
        if gpu in self.lost:
            raise GpuError("GPU is lost")
        return 0


def test_a_lost_gpu_that_answers_after_the_restart_is_lost_no_more() -> None:
    devices: Any = Devices({"GPU-1"})
    saved = {"GPU-0": "Xid 79: a", "GPU-1": "Xid 79: b"}
    assert asyncio.run(adoption.still_lost(devices, saved)) == {"GPU-1": "Xid 79: b"}


def test_a_lost_gpu_that_never_answers_stays_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption, "ANSWER_S", 0.01)
    slow = threading.Event()
    devices: Any = Devices(set(), slow)

    async def look() -> dict[str, str]:
        try:
            return await adoption.still_lost(devices, {"GPU-0": "Xid 119: a"})
        finally:
            slow.set()

    assert asyncio.run(look()) == {"GPU-0": "Xid 119: a"}
