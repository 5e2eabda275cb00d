"""A process that runs out of descriptors, and log lines that name any process."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from mpsd.mps.domains import DESCRIPTORS as DOMAIN
from mpsd.os.descriptors import RESERVE
from tests.support.doors import served
from tests.support.site import OTHER_UID, Program, Site, Status, as_user, until

PRELUDE = """
import resource, runpy, sys
from mpsd.clients import attach
from mpsd.daemon import periodic
from mpsd.os import descriptors
descriptors.LEAST = min(descriptors.LEAST, {limit})
resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
attach.ATTACH_DEADLINE_S, periodic.LIST_EVERY = {deadline}, 1
sys.argv = sys.argv[2:]
runpy.run_module("mpsd", run_name="__main__", alter_sys=True)
"""
"""Runs mpsd with fewer descriptors, and with a shorter deadline for processes that no server lists."""
SCALED = 1024 - 60 * 5
"""Stands for a limit of 1,024: a simulated client takes 8 descriptors, a client of the real driver 13."""
FEW = 150
"""A limit at which less than 12 clients get a pin."""
FOREIGN_UID = 64999
FLOOD = 1100


def launch(site: Site, limit: int = 1 << 14, deadline_s: float = 60.0) -> None:
    site.write_config(protect='"guard"')
    site.launch(python=("-c", PRELUDE.format(limit=limit, deadline=deadline_s)))
    site.wait_ready()


def crowd(site: Site, count: int) -> list[Program]:
    """Start so many clients at once, and wait until mpsd shows each of them with or without a lease."""
    environ = site.client_environ()
    started = [Program("obey", environ) for _ in range(count)]
    site.programs += started
    for program in started:
        assert program.hear().get("pid") == program.pid
    pids = {p.pid for p in started}
    site.until(lambda s: pids <= {*leased(s), *unleased(s)}, "mpsd shows every client")
    return started


def leased(status: Status) -> list[int]:
    return [c["pid"] for c in status["clients"] if c["state"] == "attached"]


def unleased(status: Status) -> list[int]:
    """Return the pids of clients without a lease for want of descriptors; nothing else may be the reason."""
    found = [c for c in status["clients"] if c["state"] == "unprotected"]
    assert all(c["problem"].startswith("no descriptor left: raise LimitNOFILE=") for c in found), found
    return [c["pid"] for c in found]


def shown(status: Status) -> set[int]:
    return {row["pid"] for row in (*status["clients"], *status["dead"])}


def pinned(site: Site) -> set[int]:
    """Return the pids that mpsd holds by pidfd."""
    found = set()
    for info in Path(f"/proc/{site.pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):
            fields = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
            found.add(int(fields.get("Pid", "-1")))
    return found


def write_as_server(site: Site, domain: str, *pids: int) -> None:
    """Append lines to the log of a domain, as its server would for its user."""
    lines = (
        f"[2026-11-29 12:00:00.000 Control  1] NEW CLIENT {pid} from user 0: Server already exists\n"
        for pid in pids
    )
    with (site.log_dir / domain / "control.log").open("a") as log:
        log.writelines(lines)


@contextlib.contextmanager
def sleeper(uid: int) -> Iterator[int]:
    """A process of a user that is no client."""
    with subprocess.Popen(["sleep", "60"], user=uid, group=uid, extra_groups=[], cwd="/") as process:
        try:
            yield process.pid
        finally:
            process.kill()


def open_now(site: Site) -> int:
    return len(os.listdir(f"/proc/{site.pid}/fd"))


def faults_and_kills_work(site: Site, evicted: Program) -> None:
    """Root evicts a client; a client of another user joins, in new domains, and faults."""
    answer = site.ask(lambda client: client.kill(evicted.pid, reason="to make space"))
    assert answer["outcome"] == "evicted", answer
    evicted.wait()
    offender = site.program(uid=OTHER_UID)
    offender.fault()
    record = site.until_fault("mmu-invalid-address")
    assert record["offender"]["pid"] == offender.pid
    assert str(offender.pid) in (site.state_dir / "faults.journal").read_text()


def whole(site: Site) -> None:
    """End every client. All that they had must be back in the budget; the domains keep theirs."""

    def is_whole(status: Status) -> bool:
        taken = {name: status["counters"][f"descriptors_{name}"] for name in ("clients", "leases", "domains")}
        return taken == {"clients": 0, "leases": 0, "domains": DOMAIN * len(status["domains"])}

    site.empty()
    site.until(is_whole, "the budget is whole")


@contextlib.contextmanager
def flood(path: Path, uid: int) -> Iterator[int]:
    """Open connections as one user until the door or this process refuses; yield their number."""
    with contextlib.ExitStack() as opened:
        count = 0
        with contextlib.suppress(OSError), as_user(uid):
            while count < FLOOD:
                count += 1
                connection = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                connection.setblocking(False)
                connection.connect(str(path))
        yield count


def test_with_256_descriptors_clients_beyond_the_budget_are_shown_and_leased_later(site: Site) -> None:
    """S4: at a limit of 256 mpsd runs on, no client is lost, and each one is shown, leased or unleased.

    The limit less the daemon's own descriptors, the reserves and two domains leaves space for the leases of
    about 10 simulated clients. Of 12 clients the last ones may have none already.
    """
    launch(site, 256)
    programs = crowd(site, 12)
    first = site.until(lambda s: len(leased(s)) >= 9, "the budget allows as many leases")
    programs += crowd(site, 18)

    def all_told(status: Status) -> bool:
        waits = f"{len(unleased(status))} client(s) have no lease: no descriptor left"
        return any(text.startswith(waits) for text in status["problems"])

    status = site.until(all_told, "the number of clients without a lease is told")
    assert sorted([*leased(status), *unleased(status)]) == sorted(p.pid for p in programs)
    assert set(leased(first)) <= set(leased(status)), "no lease is lost for a later client"
    assert all(p.process.poll() is None for p in programs) and not not_shown(status)
    failures = status["counters"]["attach_failures"]
    # A client of the first ones may have got its lease after a failure.
    assert len(unleased(status)) <= failures <= len(programs)
    # Clients that exit make space for clients that wait.
    waiting = set(unleased(status))
    for program in programs:
        if program.pid not in waiting:
            program.die()
    site.until(lambda s: len(leased(s)) >= 9 and waiting >= set(leased(s)), "waiting clients are leased")
    assert site.status()["counters"]["attach_failures"] == failures, "counted once for each client"
    assert all(p.process.poll() is None for p in programs if p.pid in waiting)
    whole(site)


def test_clients_beyond_the_budget_of_pins_are_counted_and_shown_later(site: Site) -> None:
    """S4: a limit at which some clients get no pin. Their number is reported, and space later shows them.

    The limit leaves descriptors for fewer pins than clients. A client that gets a pin is shown, leased or
    not. The other ones are the number in `problems`.
    """
    launch(site, FEW)
    environ = site.client_environ()
    programs = [Program("obey", environ) for _ in range(12)]
    site.programs += programs
    for program in programs:
        assert program.hear().get("pid") == program.pid
    pids = {p.pid for p in programs}
    status = site.until(
        lambda s: len(pids & shown(s)) + not_shown(s) == len(pids), "mpsd counts every client"
    )
    count = not_shown(status)
    assert 0 < count < len(pids)
    assert not shown(status) - pids and {*leased(status), *unleased(status)} == shown(status)
    # A list that the server made before a client came lets that client count twice. Below, a client that has
    # exited may count, too.
    assert count <= status["counters"]["clients_missed"] <= len(pids)
    # Clients that exit make space, for a lease or for pins.
    seen = [p for p in programs if p.pid in shown(status)]
    for program in seen:
        program.die()
    living = {p.pid for p in programs if p not in seen}
    site.until(lambda s: living <= shown(s) and not not_shown(s), "mpsd shows each of them")
    assert all(p.process.poll() is None for p in programs if p.pid in living)


def not_shown(status: Status) -> int:
    """Return the number of clients that have no pin, as `problems` says."""
    found = [text.split() for text in status["problems"] if "client(s) are not shown" in text]
    return int(found[0][0]) if found else 0


def test_the_next_mpsd_counts_what_it_takes_over(site: Site) -> None:
    """S4: mpsd is killed at its limit. The next one loses no client and opens no more than it may."""
    launch(site, 256)
    programs = crowd(site, 15)
    before = site.status()
    site.kill()
    # One client exits meanwhile, with or without a lease.
    programs[0].die()
    launch(site, 256)
    living = {p.pid for p in programs[1:]}
    after = site.until(lambda s: living <= {*leased(s), *unleased(s)}, "every client is shown again")
    assert len(leased(after)) >= len(leased(before)) - 1
    assert open_now(site) < 256 - 32, "the reserve is whole"
    whole(site)


def test_the_next_mpsd_serves_everyone_where_clients_took_the_whole_budget(site: Site) -> None:
    """S4: mpsd is killed while clients have all of its descriptors. The next one adopts them first."""
    launch(site, 256)
    # Leases leave a few descriptors for pins, and pins leave a few for domains.
    crowd(site, 30)
    environ = site.client_environ()
    site.programs += [Program("obey", environ) for _ in range(30)]
    site.until(lambda s: s["counters"]["descriptors_left"] <= 16, "the budget is used up")
    site.kill()
    site.launch(python=("-c", PRELUDE.format(limit=256, deadline=60.0)))

    def opened() -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:
            return made.connect_ex(str(site.run_dir / "vault.sock")) == 0

    until(opened, "the doors are open")
    for uid in (0, OTHER_UID):
        found = served(site, uid, doors=["mpsd.sock", "vault.sock"])
        assert found == {"mpsd.sock": "served", "vault.sock": "served"}
    assert open_now(site) < 256 - 32, "the reserve is whole"


def test_a_flood_of_connections_costs_no_client_its_lease_nor_mpsd_its_life(site: Site) -> None:
    """S4: with 1,024 descriptors and 60 clients, one user opens connections without end."""
    launch(site, SCALED)
    programs = crowd(site, 30)
    with flood(site.run_dir / "vault.sock", OTHER_UID) as count:
        assert count > 64
        programs += crowd(site, 30)
        status = site.status()
        assert {p.pid for p in programs} == {*leased(status), *unleased(status)}
        assert open_now(site) <= SCALED - RESERVE, "the reserve is whole"
        faults_and_kills_work(site, programs[0])
    assert all(p.process.poll() is None for p in programs[1:])


def test_processes_that_only_a_log_names_are_not_pinned_or_released_soon(site: Site) -> None:
    """S10: a server writes NEW CLIENT lines with the pids of init, of its user, and of another user."""
    launch(site, deadline_s=1.0)
    client = site.join(uid=OTHER_UID)
    domain = next(c["domain"] for c in site.status()["clients"] if c["pid"] == client.pid)
    with sleeper(OTHER_UID) as own, sleeper(FOREIGN_UID) as foreign:
        write_as_server(site, domain, 1, own, foreign)
        site.until(lambda s: own in shown(s), "the lines are read")
        assert not {1, foreign} & (shown(site.status()) | pinned(site))
        site.until(lambda s: own not in shown(s), "a process that no list names is forgotten")
        until(lambda: own not in pinned(site), "and is not pinned any more")
    counters = site.status()["counters"]
    assert counters["notices_foreign"] == 2 and counters["clients_never_listed"] == 1
    assert client.pid in leased(site.status()) and client.process.poll() is None


def test_a_client_of_a_foreign_uid_that_the_server_lists_is_leased(site: Site) -> None:
    """S10: the other way round, a program in a user namespace or with a setuid bit is a client."""
    site.write_config(domains__private="false")
    launch(site)
    environ = site.client_environ()
    stranger = Program("obey", environ, FOREIGN_UID)
    site.programs.append(stranger)
    assert stranger.hear().get("pid") == stranger.pid
    site.attached(stranger)
    assert site.status()["counters"]["notices_foreign"] >= 1
