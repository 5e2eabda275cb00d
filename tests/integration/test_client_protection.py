"""The protection of each client in status, under a running daemon on the simulated GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mpsd.api.protectionview import LOST_PROXY, PLAIN
from mpsd_client.joining.plan import make_plan
from tests.support.site import OTHER_UID, Program, Site

SETTINGS = {"protect": '"failover"', "failover__driver": '"/bin/true"'}


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site(**SETTINGS) as started:
        yield started.start()


def protected(status: Mapping[str, Any], program: Program) -> list[tuple[str, str]]:
    rows = [c["protected"] for c in status["clients"] if c["pid"] == program.pid]
    return [(row["level"], row["why"]) for row in rows]


def until_protected(site: Site, program: Program, level: str, why: str) -> Mapping[str, Any]:
    def holds(status: Mapping[str, Any]) -> bool:
        return set(protected(status, program)) == {(level, why)}

    return site.until(
        holds, f"client {program.pid} is {level} ({why}); now {protected(site.status(), program)}"
    )


@pytest.mark.parametrize("protect", ["failover", "guard", "observe"])
def test_a_program_of_mpsd_run_without_the_proxy_is_told_from_one_without_mpsd_run(
    site: Site, tmp_path: Path, protect: str
) -> None:
    (tmp_path / "libcuda.so.1").touch()
    environ = site.environ() | {"MPSD_LIBCUDA_DIR": str(tmp_path), "MPSD_REAL_LIBCUDA": "/bin/true"}
    plan = make_plan(environ, socket_path=site.socket, protect=protect)
    # The simulated GPU needs no libcuda, as a program does that was linked with DT_RPATH.
    under, plain = site.program(environ=plan.applied(environ)), site.join()
    why = "started at level observe" if protect == "observe" else LOST_PROXY
    until_protected(site, under, "observe", why)
    until_protected(site, plain, "observe", PLAIN)
    site.empty()


def test_a_client_is_called_protected_while_it_would_fail_over(site: Site) -> None:
    program = site.join()
    until_protected(site, program, "observe", PLAIN)
    door = str(site.run_dir / "failover.sock")
    assert program.do(f"failover({door!r}, 'exact')")["result"][0] == "WELCOME"
    until_protected(site, program, "guard", "its standby context is in preparation")
    assert program.do("fo.prepare()")["result"][0] == "STANDBY"
    # The program's READY may arrive before the log names its standby context.
    status = site.until(lambda s: protected(s, program) == [("failover", "")] * 2, "both contexts have it")
    costs = {c["protected"]["cost_bytes"] for c in status["clients"] if c["pid"] == program.pid}
    assert costs == {4096}
    hidden = site.ask(lambda client: client.status(), OTHER_UID)["clients"]
    assert {(c["protected"]["level"], c["protected"]["why"]) for c in hidden} == {("failover", "")}
    program.do("fo.say('UNREADY', generation=fo.generation, text='the snapshot needs 14 GiB')")
    until_protected(site, program, "guard", "the snapshot needs 14 GiB")
    hidden = site.ask(lambda client: client.status(), OTHER_UID)["clients"]
    assert not any("14 GiB" in c["protected"]["why"] for c in hidden)
    site.empty()


def test_a_client_whose_work_is_lost_has_no_protection() -> None:
    with Site(domains__spare="false") as alone:
        alone.start()
        offender, victim = alone.join(), alone.join()
        until_protected(alone, victim, "observe", "")
        offender.fault()
        until_protected(alone, victim, "none", "its GPU work is lost with its domain; restart it")
