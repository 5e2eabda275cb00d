"""Whose kept leases are a living client's and whose a dead one's; the attacher does as the test says."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpsd import adoption, procs
from mpsd.adoption import Adoption
from mpsd.core import events as ev
from mpsd.errors import AmbiguousError
from mpsd.layout import Layout
from mpsd.lease import Kept, lease_name
from mpsd.model import ClientId, ProcessInstance


class Parts:
    """Stands for hosts, attacher, store and orphans. `before_exec`: kept of an earlier program.

    `missed`: called in the place of a description that fails.
    """

    def __init__(self, *clients: ClientId) -> None:
        self.kept: dict[ClientId, Kept] = {}
        self.stored = {lease_name(c, ("mm",)): [-1] for c in clients}
        self.before_exec: set[ClientId] = set()
        self.noticed_pids: list[tuple[str, int]] = []
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

    async def listed_clients(self, domain: str) -> list[int]:
        return []

    def inherit(self, kept: dict[ClientId, Kept]) -> None:
        self.kept.update(kept)

    def notice(self, domain: str, pid: int, *, listed: bool = False) -> None:
        self.noticed_pids.append((domain, pid))

    async def noticed(self) -> None:
        self.missed()

    def is_present(self, client: ClientId) -> bool:
        return client not in self.before_exec

    def restore(self, client: ClientId) -> bool:
        del self.kept[client]
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
    assert parts.noticed_pids == [("d1", os.getpid())] and len(parts.kept) == 2


def test_what_was_kept_of_a_program_before_an_exec_is_a_dead_clients(tmp_path: Path) -> None:
    before, now, other = (
        ClientId("d1", me(), 0),
        ClientId("d1", me(), 1),
        ClientId("d2", me(), 0),
    )
    parts = Parts(before, now, other)
    parts.before_exec = {before, other}
    assert spaces(adopted(tmp_path, parts)) == [("d1", (0,)), ("d2", (0,))]
    assert parts.restored == [before, other] and set(parts.kept) == {now}
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
    dead = ProcessInstance(os.getpid(), 1)
    parts = Parts()
    first = f"lease.d1.{dead.pid}.1"
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
    assert not parts.noticed_pids and not parts.kept


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
    # What nobody claims of the living is given up later.
    assert [c.process for c in parts.kept] == [me()]


class Halfway(Parts):
    """Hosts too: `adopts` says which process is a control daemon of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.adopts: ProcessInstance | None = None
        self.server: ProcessInstance | None = None
        self.headless: list[ProcessInstance | None] = []

    def names(self) -> list[str]:
        return []

    def adopt(
        self, name: str, gpus: tuple[str, ...], uid: int | None, control: ProcessInstance
    ) -> ProcessInstance | None:
        if control != self.adopts:
            raise AmbiguousError("it is no control daemon")
        return self.server

    def adopt_headless(self, name: str, gpus: tuple[str, ...], server: ProcessInstance | None) -> bool:
        self.headless.append(server)
        return False

    def ask(self, name: str) -> None:
        pass


def taken(
    base: Path, parts: Halfway, state: str, control: list[int] | None, server: list[int] | None = None
) -> tuple[Adoption, list[ev.Event]]:
    posted: list[ev.Event] = []
    layout = Layout(base / "r", base / "l", base / "s")
    layout.pipe_dir("d4").mkdir(parents=True)
    part: Any = parts
    taking = Adoption(layout, part, part, part, part, posted.append)
    slot = {"id": "all", "gpus": ["G"], "uid": None, "exclusive": False, "active": None, "spare": "d4"}
    row = {"id": "d4", "slot": "all", "state": state, "control": control, "server": server}
    taking.run({"slots": [slot], "domains": [row], "clients": []})
    asyncio.run(taking.join_living())
    return taking, [e for e in posted if isinstance(e, ev.DomainAdopted | ev.ServerDied)]


def mps(base: Path, name: str = "nvidia-cuda-mps-control") -> subprocess.Popen[bytes]:
    """A process of this name that was started in the domain's directory."""
    where = {"CUDA_MPS_PIPE_DIRECTORY": str(base / "r" / "d" / "d4")}
    return subprocess.Popen([f"/usr/bin/{name}", "60"], executable=shutil.which("sleep"), env=where)


@pytest.mark.parametrize("state", ["starting", "warm"])
def test_a_control_daemon_that_no_file_names_is_found_by_its_environment(tmp_path: Path, state: str) -> None:
    """mpsd was killed between its start and its pid file: it is taken over, and ended if it served nobody."""
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


def test_the_directory_of_what_lives_and_is_not_understood_stays(tmp_path: Path) -> None:
    with mps(tmp_path) as process:
        taking, events = taken(tmp_path, Halfway(), "active", [process.pid, 1])
        process.kill()
    assert not events and str(process.pid) in taking.unknown[0]
    assert taking.layout.pipe_dir("d4").is_dir()


def test_the_directory_of_what_has_ended_goes(tmp_path: Path) -> None:
    """Whoever else was told of it by its name, a client, does not keep it."""
    parts = Halfway()
    with mps(tmp_path, "python3") as client:
        taking, events = taken(tmp_path, parts, "active", None)
        client.kill()
    assert not events and parts.headless == [None]
    assert not taking.unknown and not taking.layout.pipe_dir("d4").exists()
