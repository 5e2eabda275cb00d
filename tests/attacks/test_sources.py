"""Attacks on the sources of decisions: forged log lines, and programs in another user's domain."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

from mpsd.gpu.simulated import packets
from tests.attacks.test_descriptors import launch
from tests.support.site import OTHER_UID, Program, Site, Status, alive, as_user, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be several users")

THIRD_UID = 65533
FATAL = "Server is handling a fatal GPU error."
STRANGERS = 6


def write(site: Site, domain: str, *texts: str) -> None:
    """Write lines to a domain's log as its server does, which runs as the domain's user."""
    server = next(d["server_pid"] for d in site.status()["domains"] if d["id"] == domain)
    with (site.log_dir / domain / "control.log").open("a") as log:
        log.writelines(f"[2026-01-01 00:00:00.000 Server {server}] {text}\n" for text in texts)


def accuse(victim: int) -> Sequence[str]:
    """Return lines that name a process as a client, as an offender, and its domain as faulted."""
    return (
        f"NEW CLIENT {victim} from user {OTHER_UID}: Server already exists",
        f"Client {{PID: {victim}, Context ID: 1}} encountered a fatal GPU error.",
        FATAL,
        f"Client {{PID: {victim}, Context ID: 1}} on the error-trigging process {victim} to be torn down",
        f"Failed to accept client {{PID: {victim}, Context ID: 0}} with status 807",
    )


def domain_of(status: Status, program: Program) -> str:
    return next(str(c["domain"]) for c in status["clients"] if c["pid"] == program.pid)


def serving(status: Status) -> dict[str, tuple[str, str]]:
    """Return role and state of each domain."""
    return {d["id"]: (d["role"], d["state"]) for d in status["domains"]}


def settled(site: Site, slots: int) -> Status:
    """Wait until each slot has an active domain and a standby domain."""
    wanted = sorted([("active", "active"), ("spare", "warm")] * slots)
    return site.until(lambda s: sorted(serving(s).values()) == wanted, "all domains are up")


def pinned(site: Site) -> set[int]:
    """Return the pids that the daemon holds pidfds of."""
    found = set()
    for name in os.listdir(f"/proc/{site.pid}/fdinfo"):
        try:
            with open(f"/proc/{site.pid}/fdinfo/{name}") as file:
                found |= {int(line.split()[1]) for line in file if line.startswith("Pid:")}
        except FileNotFoundError:
            continue
    return found


def test_the_log_of_a_private_domain_reaches_its_user_alone(site: Site) -> None:
    """S1: a user's server writes that it faulted, and that a client of root is the one at fault."""
    site.write_config(domains__private="true", domains__kill_victims_after_s="0.2")
    site.start()
    victim, own = site.join("work"), site.join(uid=OTHER_UID)
    status = settled(site, 2)
    theirs, mine = domain_of(status, own), domain_of(status, victim)
    claim, *rest = accuse(victim.pid)
    write(site, theirs, claim)
    # Its line comes after the forged one.
    site.join(uid=OTHER_UID)
    assert [c["domain"] for c in site.status()["clients"] if c["pid"] == victim.pid] == [mine]
    write(site, theirs, claim, *rest)
    # Its own domain is its own to lose, and so are its own clients.
    site.until(lambda s: own.pid not in {c["pid"] for c in s["clients"]}, "its own victim is killed")
    status = site.status()
    assert alive(victim.pid) and serving(status)[mine] == ("active", "active")
    assert [c["domain"] for c in status["clients"] if c["pid"] == victim.pid] == [mine]
    assert not any(victim.pid in pids(record) for record in site.faults())
    assert victim.finish()["rounds"] > 0


def pids(record: Any) -> set[int]:
    parties = [record["offender"], *record["suspects"], *record["victims"]]
    return {p if isinstance(p, int) else p["pid"] for p in parties if p is not None}


def test_a_private_log_pins_no_process_of_another_user(site: Site) -> None:
    """S1: lines NEW CLIENT with the pid of a process of root, which is no client, pin nothing."""
    site.write_config(domains__private="true")
    site.start()
    own = site.join(uid=OTHER_UID)
    domain = domain_of(settled(site, 1), own)
    write(site, domain, f"NEW CLIENT {os.getpid()} from user {OTHER_UID}: Server already exists")
    # Its line comes after the forged one.
    second = site.join(uid=OTHER_UID)
    assert {c["pid"] for c in site.status()["clients"]} == {own.pid, second.pid}
    assert os.getpid() not in pinned(site) and {own.pid, second.pid} <= pinned(site)
    assert site.status()["counters"]["notices_foreign"] == 1


def join_shared(site: Site, uid: int) -> Program:
    """Start a program that computes in the domain of all users."""
    program = site.program("work", uid, site.client_environ(uid, shared=True))
    assert program.hear() == {"working": True}
    site.attached(program)
    return program


@pytest.mark.parametrize("exclusive", [False, True], ids=["default", "exclusive"])
def test_no_line_in_a_shared_log_decides_anything(site: Site, exclusive: bool) -> None:
    """S1: a line of any local user kills no client, takes no standby domain and names nobody."""
    site.write_config(domains__kill_victims_after_s="0.2", domains__exclusive_drain_s="0.2")
    site.start()
    if exclusive:
        site.node(op="inject", fault="mode", mode="exclusive-process")
    victim, bystander = join_shared(site, OTHER_UID), join_shared(site, THIRD_UID)
    site.until(lambda s: all("listed" in c["proof"] for c in s["clients"]), "the server lists both")
    before = site.status() if exclusive else settled(site, 1)
    domain = domain_of(before, victim)
    for _ in range(20):
        write(site, domain, *accuse(victim.pid), *accuse(os.getpid()))
    assert serving(site.status()) == serving(before)
    # Another program comes, works and leaves: its line comes after the forged ones, and it takes longer
    # than any time limit of the configuration.
    assert join_shared(site, THIRD_UID).finish()["rounds"] > 0
    after = site.status()
    assert after["counters"]["log_faults_asked"] == 80
    assert serving(after) == serving(before)
    assert [d["path"] for d in after["domains"]] == [d["path"] for d in before["domains"]]
    assert site.faults() == [] and alive(victim.pid) and alive(bystander.pid)
    assert victim.finish()["rounds"] > 0 and bystander.finish()["rounds"] > 0


def test_a_program_outside_mps_that_a_line_names_is_no_client_for_good_and_no_offender(site: Site) -> None:
    """S1: a stranger names its own program, which runs outside MPS, in the shared log, and lets it fault."""
    launch(site, deadline_s=1.0)
    environ = site.client_environ(OTHER_UID, shared=True)
    offender, victim = site.program(uid=OTHER_UID, environ=environ), join_shared(site, THIRD_UID)
    site.until(lambda s: sum("listed" in c["proof"] for c in s["clients"]) == 2, "the server lists both")
    before = settled(site, 1)
    domain = domain_of(before, victim)
    outside = {"MPSD_SIM_DIR": str(site.node_dir), "CUDA_MPS_PIPE_DIRECTORY": "/nowhere"}
    stranger = site.program(uid=THIRD_UID, environ=site.environ() | outside)
    write(site, domain, f"NEW CLIENT {stranger.pid} from user {THIRD_UID}: Server already exists")
    site.attached(stranger)
    stranger.fault()
    site.until(lambda s: s["counters"].get("faults_unconfirmed"), "its fault is read")
    assert serving(site.status()) == serving(before) and not faults_of(site, domain)
    offender.fault("trap")
    until(lambda: faults_of(site, domain), "a record")
    site.until(lambda s: stranger.pid not in {c["pid"] for c in s["clients"]}, "it is no client any more")
    assert alive(stranger.pid) and stranger.pid not in pinned(site)
    (record,) = faults_of(site, domain)
    assert stranger.pid not in pids(record)


def faults_of(site: Site, domain: str) -> Sequence[Any]:
    return [r for r in site.faults() if r["domain"] == domain]


def test_a_true_fault_of_a_shared_domain_is_still_decided(site: Site) -> None:
    """S1: what the control daemon answers decides: the standby domain takes over, the record is written."""
    site.write_config(domains__mode='"shared"')
    site.start()
    settled(site, 1)
    offender, victim = site.join(uid=OTHER_UID), site.join(uid=THIRD_UID)
    domain = domain_of(site.status(), victim)
    offender.fault("trap")
    record = until(lambda: next(iter(site.faults()), None), "a record")
    assert record is not None and record["domain"] == domain
    site.until(lambda s: serving(s).get(domain, ("", ""))[0] != "active", "the path leads elsewhere")


def test_a_command_with_a_newline_writes_no_line(site: Site) -> None:
    """S1: a stranger's command on the control socket, with a line of the log behind a newline."""
    site.write_config(domains__private="false")
    site.start()
    own = site.join()
    before = settled(site, 1)
    domain = domain_of(before, own)
    line = f"[2026-01-01 00:00:00.000 Server 1] {FATAL}"
    for uid in (OTHER_UID, None):
        with as_user(uid), packets.connect(str(site.run_dir / "d" / domain / "control")) as sock:
            sock.send(f"ui dance\n{line}".encode())
            assert sock.recv(4096)
    assert "fatal" not in (site.log_dir / domain / "control.log").read_text()
    assert site.control(domain, "get_server_list")
    assert serving(site.status()) == serving(before)


def test_strangers_in_an_idle_domain_cost_its_user_no_domain(site: Site) -> None:
    """S8: each program of another user makes the control daemon change its server."""
    site.write_config(domains__private="false")
    site.start()
    path = site.client_environ(OTHER_UID)
    before = serving(settled(site, 1))
    for turn in range(STRANGERS):
        stranger = site.program(uid=(THIRD_UID, 0)[turn % 2], environ=site.environ() | path)
        stranger.close()
        assert serving(site.status()).keys() == before.keys()
    stranger = site.program(uid=THIRD_UID, environ=site.environ() | path)
    site.until(
        lambda s: any(f"runs for user {THIRD_UID}" in d["problem"] for d in s["domains"]), "status says so"
    )
    stranger.close()
    mine = site.join(uid=OTHER_UID)
    assert mine.do("dev.alloc(16) > 0") == {"result": True}
    after = site.until(lambda s: not any(d["problem"] for d in s["domains"]), "it is the user's again")
    assert serving(after) == before
