"""A domain that faulted while no daemon ran is faulted for the next daemon too: its programs fail over."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from tests.integration.test_daemon_failover import SETTINGS, active, all_ready, ready, said
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
