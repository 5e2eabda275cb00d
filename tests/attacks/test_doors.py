"""Attacks on the three sockets of mpsd: full doors, answers that are not read, log floods, removed files."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import mpsd_client
from mpsd.base.conditions import Code
from mpsd.os import procfs
from mpsd.records.journal import Journal
from mpsd.vault.messages import Kind, Message, Status, pack
from mpsd.wire import codec
from mpsd.wire.messages import Request
from tests.support.conditioning import rows_of
from tests.support.doors import DOORS, FLOODS, VICTIM_UID, control_latency, flooding, held, served
from tests.support.listening import RawClient, frame
from tests.support.site import OTHER_UID, ROOT, Site, as_user, until
from tests.support.vaulting import VaultClient, lingering

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be other users")

GROUP, GROUP_ID = "daemon", 1
GOOD = dict.fromkeys(DOORS, "served")
MIB = 1 << 20


@pytest.fixture
def site() -> Iterator[Site]:
    """A daemon with all three doors. Members of GROUP are administrators."""
    with Site(protect='"failover"', group=f'"{GROUP}"') as made:
        yield made


LIMITED = (
    "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0})); "
    "sys.argv = sys.argv[2:]; runpy.run_module('mpsd', run_name='__main__', alter_sys=True)"
)
"""Runs mpsd, whose arguments follow as for `python -m mpsd`, with so many open files."""


def counters(site: Site) -> dict[str, int]:
    return dict(site.status()["counters"])


@pytest.mark.parametrize("full", [tuple(DOORS), ("mpsd.sock", "vault.sock")], ids=["all", "two"])
def test_one_user_at_the_doors_of_a_daemon_with_few_descriptors(site: Site, full: Sequence[str]) -> None:
    """S4: a user opens connections until the daemon has no descriptor left; it lives and serves everyone.

    The user may have the part of a door at which it holds nothing.
    """
    site.launch(python=["-c", LIMITED.format(256)])
    site.wait_ready()
    with contextlib.ExitStack() as stack:
        for door in full:
            stack.enter_context(held(site.run_dir / door, DOORS[door], [OTHER_UID], 300))
        # The door without a holder first: a newcomer at another one makes the holder give up descriptors.
        for uid in (VICTIM_UID, 0):
            for door in reversed(DOORS):
                assert served(site, uid, doors=[door]) == {door: "served"}
        assert len(os.listdir(f"/proc/{site.pid}/fd")) < 256
    site.until(lambda s: s["counters"].get("control_closed_connections"), "connections were refused")


def test_descriptors_that_are_slow_to_close_close_no_door(site: Site) -> None:
    """S4: a user sends descriptors that block in their last close, and then fills the vault's door."""
    site.launch(python=["-c", LIMITED.format(256)])
    site.wait_ready()
    before = counters(site)["descriptors_left"]
    vault = site.run_dir / "vault.sock"
    put = pack(Message(Kind.PUT, number=1, size=4096, address=1))
    with contextlib.ExitStack() as stack:
        with as_user(OTHER_UID):
            clients = [stack.enter_context(VaultClient(vault)) for _ in range(12)]
        # Thus the daemon closes each descriptor last, and not this test.
        with site.stopped():
            for client in clients:
                slow, end = lingering()
                stack.enter_context(end)
                client.send(put, [slow])
                os.close(slow)
        site.until(lambda s: s["counters"].get("vault_slowed"), "the daemon reads this user no more")
        read = len(select.select([client.socket for client in clients], [], [], 0)[0])
        assert read < len(clients), "the user is not read any more"
        assert before - counters(site)["descriptors_left"] > read > 0, "the budget has each of them"
        stack.enter_context(held(vault, DOORS["vault.sock"], [OTHER_UID], 300))
        assert len(os.listdir(f"/proc/{site.pid}/fd")) < 256 - 64
        assert served(site, 0) == GOOD
        assert served(site, VICTIM_UID) == GOOD


@pytest.mark.parametrize("users", [16, 500])
def test_many_users_at_all_doors(site: Site, users: int) -> None:
    """S5: a user with many uids fills each door; root, a member of the group and a newcomer are served."""
    site.start()
    uids = range(200_000, 200_000 + users)
    each = 64 if users < 100 else 2
    with contextlib.ExitStack() as stack:
        with as_user(OTHER_UID):
            innocent = stack.enter_context(VaultClient(site.run_dir / "vault.sock"))
        for door, kind in DOORS.items():
            stack.enter_context(held(site.run_dir / door, kind, uids, each))
        assert served(site, VICTIM_UID) == GOOD
        assert served(site, VICTIM_UID - 1, [GROUP_ID]) == GOOD
        assert served(site, 0) == GOOD
        # A greeted connection of a user that holds only this one is not displaced.
        assert innocent.put(1).status == Status.OK


def past_faults(site: Site, count: int) -> None:
    """Give the daemon records of faults, which OTHER_UID may read: an answer of about 1 KiB each."""
    recorded = ROOT / "tests" / "data" / "upgrade" / "faults.journal"
    (site.base / "recorded").mkdir()
    shutil.copy(recorded, site.base / "recorded")
    source = Journal.open(site.base / "recorded", 1000, 64 * MIB)
    first = source.records()[0]
    source.close()
    site.state_dir.mkdir(exist_ok=True)
    journal = Journal.open(site.state_dir, 1000, 64 * MIB)
    for number in range(1, count + 1):
        journal.append(first | {"id": number, "victims": [1], "victim_uids": [OTHER_UID]})
    journal.close()


def test_answers_that_are_not_read_cost_little(site: Site) -> None:
    """S6: a user asks and never reads; the daemon stops reading the requests, and memory comes back."""
    past_faults(site, 250)
    site.start()
    for _ in range(20):
        site.ask(lambda client: client.faults(limit=250), OTHER_UID)
    before = procfs.resident_bytes(site.pid)
    numbers = itertools.count(2)
    with contextlib.ExitStack() as stack:
        with as_user(OTHER_UID):
            deaf = [stack.enter_context(RawClient(Path(site.socket))) for _ in range(32)]
        ask = frame(codec.encode(Request(1, "faults", {"limit": 250}, 600_000)))
        for client in deaf:
            client.socket.sendall(ask)
            client.socket.setblocking(False)
        until(
            lambda: len(select.select([client.socket for client in deaf], [], [], 0)[0]) == 32,
            "all have an answer to read",
        )
        unsent = dict.fromkeys(deaf, b"")
        progress = time.monotonic()

        def flood() -> bool:
            nonlocal progress
            for client, data in unsent.items():
                data = data or frame(codec.encode(Request(next(numbers), "faults", {"limit": 250}, 600_000)))
                try:
                    unsent[client] = data[client.socket.send(data) :]
                    progress = time.monotonic()
                except BlockingIOError:
                    unsent[client] = data
            return time.monotonic() - progress > 0.5

        until(flood, "no request of a deaf peer is read any more", 15.0)
        grown = procfs.resident_bytes(site.pid) - before
        assert grown < 40 * MIB
        assert served(site, VICTIM_UID)["mpsd.sock"] == "served"

    site.until(lambda s: procfs.resident_bytes(site.pid) - before < 10 * MIB, "the memory comes back")
    print(f"{len(deaf)} deaf peers cost {grown >> 20} MiB")


def test_a_flood_of_refusals_makes_few_log_lines(site: Site) -> None:
    """S7: refused connections and garbage are logged once of a kind, and counted."""
    site.start()
    lines = site.log.read_bytes().count(b"\n")
    names = ("control_closed_", "vault_closed_", "failover_closed_")

    def counted() -> bool:
        found = counters(site)
        return all(sum(n for key, n in found.items() if key.startswith(name)) > 200 for name in names)

    with contextlib.ExitStack() as stack:
        for door, kind in DOORS.items():
            connections = stack.enter_context(held(site.run_dir / door, kind, [OTHER_UID], 320))
            for number, connection in enumerate(connections):
                with contextlib.suppress(OSError):
                    connection.send(b"garbage" if number % 2 else b"\xff" * 4000)
        until(counted, "every refusal is counted")
    assert site.log.read_bytes().count(b"\n") - lines < 30


def test_requests_of_a_user_make_few_log_lines(site: Site) -> None:
    """S7: a user with one client asks to kill it 300 times, as a dry run."""
    site.start()
    client = site.join(uid=OTHER_UID)
    lines = site.log.read_bytes().count(b"\n")

    def flood(asking: mpsd_client.Client) -> None:
        for _ in range(300):
            asking.call("kill", {"pid": client.pid, "dry_run": True})

    site.ask(flood, OTHER_UID)
    assert site.log.read_bytes().count(b"\n") - lines < 10
    assert [line["dry_run"] for line in (said["args"] for said in site.said("answered"))] == [True]
    assert not site.said("done")
    # A real act is done, and audited.
    site.ask(lambda c: c.kill(client.pid), OTHER_UID)
    assert [said["op"] for said in site.said("done")] == ["kill"]
    assert [said["action"] for said in site.said("audit")] == ["evict", "kill"]


def test_removed_sockets_are_made_again(site: Site) -> None:
    """S12: a cleaner of /tmp removes the sockets; they are made again with their modes, and work."""
    before = os.umask(0o077)
    try:
        site.start()
    finally:
        os.umask(before)
    for door in DOORS:
        (site.run_dir / door).unlink()
    until(lambda: all((site.run_dir / door).exists() for door in DOORS), "all sockets are there again")

    def modes() -> set[int]:
        return {(site.run_dir / door).stat().st_mode & 0o777 for door in DOORS}

    until(lambda: modes() == {0o666}, "all users may connect")
    assert served(site, 0) == GOOD


def test_a_socket_of_another_daemon_is_never_taken(site: Site) -> None:
    """S12: a living daemon's socket at the path stays; status names the problem."""
    site.start()
    client = site.ask(lambda c: c.version())
    assert client
    path = site.run_dir / "vault.sock"
    path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as foreign:
        foreign.bind(str(path))
        foreign.listen()
        inode = path.stat().st_ino
        site.until(lambda s: rows_of(s, Code.SOCKET_REMOVED), "the condition is shown")
        # A socket that is made again shows that mpsd has looked at all of them again.
        other = site.run_dir / "failover.sock"
        other.unlink()
        until(other.exists, "the removed socket is there again")
        assert path.stat().st_ino == inode
    path.unlink(missing_ok=True)
    site.until(lambda s: not rows_of(s, Code.SOCKET_REMOVED), "the socket is the daemon's again")


def test_a_connection_that_was_handed_to_another_user_is_refused(site: Site) -> None:
    """S15: a process of another user sends on root's connection."""
    site.start()
    with RawClient(Path(site.socket)) as client:
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                os.setgid(OTHER_UID)
                os.setuid(OTHER_UID)
                client.send(codec.encode(Request(1, "drain", {}, 5000)))
            os._exit(0)
        os.waitpid(child, 0)
        answer = codec.decode_answer(client.receive())
        assert getattr(answer, "code", "") == "denied"
        client.until_closed()
    assert counters(site)["control_closed_sender"] == 1


def test_a_victim_is_answered_beside_each_flood(site: Site) -> None:
    """S5: `status` calls of a user are answered while another user floods the control socket."""
    site.start()
    for kind in FLOODS:
        with flooding(site, kind):
            beside = control_latency(site, 0.3)
        print(f"{kind}: {beside}")
        assert beside.calls > 0 and beside.p99 < 0.5
