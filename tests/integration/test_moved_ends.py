"""Ends of programs that have moved several times, and of faulted domains with clients that do nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import pytest

from mpsd.ctl.statustext import status as status_text
from mpsd.ctl.style import Style
from tests.integration.test_daemon_failover import (
    SETTINGS,
    active,
    all_ready,
    hello,
    ready,
    said,
)
from tests.support.site import DEADLINE_S, Program, Site, Status

GIB = 1 << 30
MOVES = 4
FORK = "os.fork() or [os.close(1), __import__('signal').pause()]"


@pytest.fixture
def site() -> Iterator[Site]:
    with Site(**SETTINGS, failover__per_minute="100") as started:
        yield started.start()


def used(status: Status) -> int:
    (gpu,) = status["gpus"]
    return int(gpu["memory_used_bytes"])


def states(status: Status) -> dict[str, str]:
    return {d["id"]: d["state"] for d in status["domains"]}


def faults_and_moves(site: Site, program: Program) -> None:
    """Let another client fault, and the program move."""
    offender = site.join()
    offender.fault()
    said(program, "fo.move()")
    offender.die()
    assert said(program, "dev.launch('spin'), dev.synchronize()") == [None, None]
    said(program, "fo.prepare()")
    all_ready(site, program)


def idles(site: Site) -> Program:
    """Start a client with a context that launches nothing, as a worker of a compiler does."""
    worker = site.join()
    site.attached(worker)
    return worker


def test_a_program_that_moved_gives_everything_back_at_its_end(site: Site) -> None:
    first, workers = site.join(), list[Program]()
    before = used(site.until(lambda s: set(states(s).values()) == {"active", "warm"}, "both domains run"))
    first.die()
    program = ready(site)
    all_ready(site, program)
    for _ in range(MOVES):
        workers.append(idles(site))
        said(program, f"dev.alloc({GIB // 4})")
        faults_and_moves(site, program)
    stays = site.join()
    # The workers live on, and the domains in which they were end.
    status = site.until(lambda s: set(states(s).values()) == {"active", "warm"}, "the faulted domains ended")
    assert status["counters"]["victims_without_work"] == MOVES
    assert {c["pid"] for c in status["clients"]} == {program.pid, stays.pid}
    assert all(worker.process.poll() is None for worker in workers)
    assert "lost" not in {c["state"] for c in status["clients"]} and not status["dead"]
    for worker in workers:
        worker.die()
    program.finish()
    site.until(lambda s: not s["dead"] and used(s) <= before, "its memory is back")
    assert site.status()["counters"]["leases_held"] == 1


def test_a_client_that_had_work_keeps_its_faulted_domain(site: Site) -> None:
    program, worker = ready(site), idles(site)
    all_ready(site, program)
    assert said(worker, "dev.launch('spin'), dev.synchronize()") == [None, None]
    other = idles(site)
    faults_and_moves(site, program)
    status = site.until(lambda s: s["counters"].get("victims_without_work"), "the idle client is known")
    assert {c["pid"] for c in status["clients"] if c["lost"]} == {worker.pid, other.pid}
    assert [(d["state"], d["clients"]) for d in status["domains"] if d["id"] == "d1"] == [("faulted", 1)]
    worker.die()
    site.until(lambda s: "d1" not in states(s), "the domain has ended")
    assert other.process.poll() is None


def test_an_exited_client_of_several_domains_is_one_row(site: Site) -> None:
    """It left healthy domains, which live on with other clients, and its last kernel runs on."""
    program, others = ready(site), []
    all_ready(site, program)
    for _ in range(2):
        others.append(site.join())
        site.ask(lambda c: c.drain())
        said(program, "fo.move()")
        site.ask(lambda c: c.undrain())
        said(program, "fo.prepare()")
        all_ready(site, program)
    others.append(site.join())
    home = active(site.status())["id"]
    program.occupy()
    program.die()
    status = site.until(lambda s: s["dead"] and s["dead"][0]["pending"], "its work is seen")
    (row,) = status["dead"]
    assert (row["pid"], row["domain"], row["state"]) == (program.pid, home, "lingering")
    assert set(row["domains"]) >= {"d1", "d2", home} and row["pending"] and not row["blind"]
    held = {d["id"]: d["held_gpu_bytes"] for d in status["domains"]}
    assert held == {name: row["held_gpu_bytes"] if name == home else 0 for name in held}
    assert text(status).count(str(program.pid)) == 1
    site.node(op="inject", fault="end", pid=program.pid)
    site.until(lambda s: not s["dead"], "its leases are released in all domains")
    assert {"d1", "d2", home} <= states(site.status()).keys()


def text(status: Mapping[str, Any]) -> str:
    return "\n".join(status_text(status, Style()))


def test_a_forked_child_with_the_descriptors_holds_neither_lease_nor_domain(site: Site) -> None:
    program = site.join()
    hello(site, program)
    said(program, "fo.prepare()")
    child = psutil.Process(said(program, FORK))
    try:
        all_ready(site, program)
        faults_and_moves(site, program)
        site.until(lambda s: "d1" not in states(s), "the domain that it left has ended")
        program.die()
        site.until(lambda s: not s["dead"] and not s["clients"], "its leases are released")
        assert child.is_running()
    finally:
        child.kill()
        child.wait(DEADLINE_S)
