"""A domain that faulted while no daemon ran is faulted for the next daemon too: its programs fail over."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import pytest

from mpsd.daemon import adoption
from mpsd.gpu.simulated import paths
from tests.integration.test_daemon_failover import (
    SETTINGS,
    active,
    all_ready,
    failovers,
    ready,
    said,
    until_outcome,
)
from tests.support.site import Program, Site, alive, until


@pytest.fixture
def site() -> Iterator[Site]:
    with Site(**SETTINGS) as started:
        yield started.start()


def ends(*pids: int) -> None:
    for pid in pids:
        psutil.Process(pid).kill()
        until(lambda pid=pid: not alive(pid), "it has ended")


def goes_on(site: Site, program: Program) -> None:
    """The next daemon tells the program to move to the standby context that it had, and the program moves."""
    assert said(program, "fo.hello()")[0] == "WELCOME"
    said(program, "fo.prepare()")
    program.order("fo.move()")
    assert program.hear()["result"][0] == "MOVE"
    assert program.do("dev.alloc(16) > 0") == {"result": True}


def test_another_server_came_for_a_program_that_joined_meanwhile(site: Site) -> None:
    program = ready(site)
    home = active(all_ready(site, program))
    environ = site.client_environ()
    site.kill()
    ends(home["server_pid"])
    new = site.program(environ=environ)
    assert new.do("dev.alloc(16) > 0") == {"result": True}
    site.start()
    goes_on(site, program)
    assert new.do("dev.alloc(16) > 0") == {"result": True}


def test_all_of_the_domain_had_gone(site: Site) -> None:
    program = ready(site)
    home = active(all_ready(site, program))
    site.kill()
    ends(home["control_pid"], home["server_pid"])
    site.start()
    goes_on(site, program)
    site.until(lambda s: home["id"] not in [d["id"] for d in s["domains"]], "nothing is left of it")


def test_a_program_that_moved_while_no_daemon_ran_gets_a_trial_domain(site: Site) -> None:
    """It holds its work back, because it does not deny the fault."""
    site.kill()
    site.write_config(failover__mode='"exact"')
    site.start()
    program, offender = ready(site, "exact"), site.join()
    offender.do("dev.alloc(16)")
    all_ready(site, program)
    site.kill()
    offender.fault("trap")
    here = said(program, "fo.rescue()")
    site.start()
    assert said(program, f"fo.hello('exact', {here})")[0] == "WELCOME"
    said(program, f"fo.waits({here})")
    site.until(lambda s: active(s)["id"] == f"d{here}", "its domain is the active one")
    trial = said(program, "fo.prepare()")[1]
    assert trial > here
    assert said(program, "fo.move(1)")[1] == trial
    assert said(program, "fo.hear()")[:2] == ["TURN", trial]
    said(program, f"fo.say('DONE', generation={trial})")
    assert said(program, "dev.alloc(16) > 0")


def entry(record: Mapping[str, Any], program: Program) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(c for c in record["clients"] if c["pid"] == program.pid)
    return found


def test_a_program_told_to_move_by_a_daemon_that_died_has_moved_in_its_record(site: Site) -> None:
    program, offender = ready(site), site.join()
    all_ready(site, program)
    offender.fault()
    _, here, *_ = said(program, "fo.hear()")
    told = until_outcome(site, {program.pid: "told"})
    site.kill()
    assert said(program, "fo.rescue()") == here
    site.start()
    assert said(program, f"fo.hello('keep', {here})")[0] == "WELCOME"
    moved = until_outcome(site, {program.pid: "moved"})
    assert (moved["id"], moved["fault"], moved["sent_ms"]) == (told["id"], told["fault"], told["sent_ms"])
    assert moved["revision"] > told["revision"] and len(failovers(site)) == 1
    assert entry(moved, program)["held_ms"] is None


def test_a_program_told_to_move_by_a_daemon_that_died_has_ended_in_its_record(site: Site) -> None:
    program, offender = ready(site), site.join()
    all_ready(site, program)
    offender.fault()
    assert said(program, "fo.hear()")[0] == "MOVE"
    until_outcome(site, {program.pid: "told"})
    site.kill()
    program.die()
    site.start()
    until_outcome(site, {program.pid: "ended"})


def test_a_move_while_no_daemon_ran_is_recorded(site: Site) -> None:
    program, offender = ready(site), site.join()
    all_ready(site, program)
    site.kill()
    offender.fault("trap")
    here = said(program, "fo.rescue()")
    site.start()
    assert said(program, f"fo.hello('keep', {here})")[0] == "WELCOME"
    record = until_outcome(site, {program.pid: "moved"})
    assert (record["generation"], record["to"]) == (here, f"d{here}")


def test_a_control_daemon_that_was_told_to_quit_delays_no_program(site: Site) -> None:
    """It serves no other command before its clients have ended. The earlier daemon died after its command."""
    program = ready(site)
    home = active(all_ready(site, program))["id"]
    site.kill()
    binary = paths.launcher(str(site.node_dir), paths.CONTROL_NAME)
    environ = site.environ() | {"CUDA_MPS_PIPE_DIRECTORY": str(site.run_dir / "d" / home)}
    with subprocess.Popen([binary, "quit"], env=environ) as quitting:
        log = site.log_dir / home / "control.log"
        until(lambda: "Cmd:quit" in log.read_text(), "it was told to quit")
        site.start()
        assert said(program, "fo.hello()")[0] == "WELCOME"
        (line,) = (s for s in site.said("cannot list the clients of a domain") if s["domain"] == home)
        assert f"{adoption.LIST_S:g} s" in line["reason"] and quitting.poll() is None
        assert program.pid in {c["pid"] for c in site.status()["clients"] if c["domain"] == home}
        program.die()
        quitting.wait(60)
