"""Domains on demand: the server and the standby domain start with the first client of a slot."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mpsd.base.errors import NotReadyError
from mpsd.gpu.simulated import paths
from tests.attacks.test_failed_start import FAILING_SERVER, WORDS, replace_server
from tests.support.site import OTHER_UID, Program, Site, Status, until

ON_DEMAND = {"domains.start": ""}
SHORT = {**ON_DEMAND, "domains.idle_s": "0.5"}
"""A slot is idle after half a second without a client."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root serves other users")


@pytest.fixture
def site() -> Iterator[Site]:
    with Site(**ON_DEMAND) as made:
        yield made.start()


def row(status: Status, role: str = "active") -> Mapping[str, Any]:
    found: Mapping[str, Any] = next((d for d in status["domains"] if d["role"] == role), {})
    return found


def kinds(status: Status) -> list[str]:
    return sorted(f"{d['role']} {d['state']}" for d in status["domains"])


def alone(status: Status) -> bool:
    """Return whether one control daemon serves the slot, without a server."""
    return kinds(status) == ["active active"] and row(status)["server_pid"] is None


def in_use(status: Status) -> bool:
    """Return whether the slot has a server and a warm standby domain with another one."""
    found = [row(status, role) for role in ("active", "spare")]
    states = [domain.get("state") for domain in found]
    return states == ["active", "warm"] and all(domain["server_pid"] for domain in found)


def servers(site: Site) -> int:
    return len(site.processes(paths.SERVER_NAME))


def test_the_environment_costs_one_control_daemon(site: Site) -> None:
    environ = site.client_environ()
    assert alone(site.status()) and servers(site) == 0
    assert len(site.processes(paths.CONTROL_NAME)) == 1
    used = site.memory_used()
    site.client_environ()
    assert alone(site.status()) and site.memory_used() == used
    program = site.program(environ=environ)
    assert program.do("dev.on_mps") == {"result": True}
    site.attached(program)
    site.until(in_use, "the first client has brought a standby domain")


def test_a_first_client_is_leased_and_its_fault_takes_the_standby_domain(site: Site) -> None:
    offender, other = site.join(), site.join()
    before = site.until(in_use, "a standby domain")
    offender.fault("trap")
    record = site.until_fault("sm-trap")
    assert {p["pid"] for p in record["suspects"]} == {offender.pid, other.pid}
    assert row(site.status())["id"] == row(before, "spare")["id"]
    assert site.join().do("dev.on_mps") == {"result": True}


def test_a_fault_before_the_standby_domain_is_there_is_followed_by_a_domain_with_a_server(site: Site) -> None:
    program = site.join()
    first = row(site.status())["id"]
    program.fault("trap")
    site.until(lambda s: row(s)["id"] != first and row(s)["state"] == "active", "another domain serves")
    site.until(in_use, "it has a server and a standby domain")


def test_an_idle_slot_keeps_one_control_daemon_and_its_path() -> None:
    with Site(**SHORT) as site:
        site.start()
        control = Path(site.client_environ()["CUDA_MPS_PIPE_DIRECTORY"], "control")

        def rests(status: Status) -> bool:
            assert control.exists()
            return alone(status)

        for _ in range(2):
            program = site.join()
            used = site.until(in_use, "a standby domain")
            program.finish()
            status = site.until(rests, "one control daemon is left")
            assert row(status)["id"] != row(used)["id"]
            assert servers(site) == 0 and site.memory_used() == 0
        assert status["counters"]["slots_idle"] == 2
        assert not any(condition["degrades"] for condition in status["conditions"])


def test_a_slot_with_a_client_is_not_idle() -> None:
    with Site(**SHORT) as site:
        site.start()
        worker, program = site.join("work"), site.join()
        used = site.until(in_use, "a standby domain")
        program.finish()
        first = row(used)["id"]
        # Another user's slot comes and goes meanwhile.
        path = site.client_environ()
        assert path["CUDA_MPS_PIPE_DIRECTORY"]
        site.until(lambda s: s["uptime_s"] > used["uptime_s"] + 2, "several idle times have passed")
        assert in_use(site.status()) and row(site.status())["id"] == first
        assert worker.finish()["rounds"] > 0
        site.until(alone, "the slot is idle after its last client")


def test_programs_that_come_and_go_at_all_times_run_on_mps() -> None:
    """The path leads to a living control daemon at every moment, also while an idle slot is changed."""
    with Site(**{**ON_DEMAND, "domains.idle_s": "0.1"}) as site:
        site.start()
        environ = site.client_environ()
        for _ in range(12):
            program = Program("obey", environ)
            site.programs.append(program)
            assert program.hear().get("pid") == program.pid
            assert program.do("dev.on_mps") == {"result": True}
            program.finish()
        site.until(alone, "the slot is idle")


def test_the_words_of_a_server_that_fails_for_its_first_client_reach_the_next_user(site: Site) -> None:
    environ = site.client_environ()
    before = replace_server(site, FAILING_SERVER)
    refused = Program("obey", environ)
    site.programs.append(refused)
    refused.hear()
    site.until(lambda s: any(WORDS in p for p in s["problems"]), "status names the reason")
    with pytest.raises(NotReadyError, match=WORDS):
        site.client_environ()
    assert site.said("the server did not start")
    refused.die()
    replace_server(site, before)
    site.until(lambda s: row(s).get("server_pid"), "the mended server is started")
    assert site.join().do("dev.on_mps") == {"result": True}
    site.until(lambda s: not any(WORDS in p for p in s["problems"]), "the reason is gone")


def test_a_domain_without_a_server_is_adopted(site: Site) -> None:
    environ = site.client_environ()
    control = row(site.status())["control_pid"]
    site.kill()
    site.start()
    assert alone(site.status()) and row(site.status())["control_pid"] == control
    site.kill()
    program = site.program(environ=environ)
    site.start()
    status = site.attached(program)
    assert row(status)["control_pid"] == control
    site.until(in_use, "the adopted domain has a standby domain")


def test_an_idle_slot_is_noticed_after_a_restart() -> None:
    with Site(**SHORT) as site:
        site.start()
        program = site.join()
        site.until(in_use, "a standby domain")
        site.kill()
        program.finish()
        site.start()
        site.until(alone, "one control daemon is left")


def test_limits_reach_a_server_before_its_first_client() -> None:
    with Site(**ON_DEMAND, limits__active_thread_percentage="40") as site:
        site.start()
        environ = site.client_environ()
        domain = row(site.status())["id"]
        assert site.control(domain, "get_default_active_thread_percentage") == "40.0"
        site.attached(site.program(environ=environ))
        server = row(site.until(in_use, "a standby domain"))["server_pid"]
        assert site.control(domain, f"get_active_thread_percentage {server}") == "40.0"


def test_a_limit_set_by_hand_on_an_idle_slot_is_kept() -> None:
    with Site(**SHORT) as site:
        site.start()
        site.client_environ()
        site.control(row(site.status())["id"], "set_default_active_thread_percentage 50")
        site.until(lambda s: row(s)["limits"].get("active_thread_percentage") == 50, "mpsd has learnt it")
        program = site.join()
        status = site.until(in_use, "a standby domain")
        for role in ("active", "spare"):
            domain, server = row(status, role)["id"], row(status, role)["server_pid"]
            assert site.control(domain, f"get_active_thread_percentage {server}") == "50.0"
        program.finish()
        status = site.until(alone, "the slot is idle")
        assert site.control(row(status)["id"], "get_default_active_thread_percentage") == "50.0"


@needs_root
def test_each_user_costs_a_control_daemon_until_it_has_a_client(site: Site) -> None:
    for uid in (None, OTHER_UID):
        site.client_environ(uid)
    status = site.status()
    assert kinds(status) == ["active active"] * 2 and servers(site) == 0
    site.attached(site.program(uid=OTHER_UID))
    status = site.until(lambda s: len(s["domains"]) == 3, "a standby domain of that user alone")
    assert {d["uid"] for d in status["domains"] if d["role"] == "spare"} == {OTHER_UID}


def test_the_shared_domain_starts_its_server_for_any_user(site: Site) -> None:
    environ = site.client_environ(shared=True)
    assert alone(site.status())
    assert until(lambda: site.program(environ=environ), "a client").do("dev.on_mps") == {"result": True}


@pytest.mark.parametrize("private", ["true", "false"])
def test_a_client_that_waits_for_a_slow_server_is_a_client(private: str) -> None:
    with Site(**ON_DEMAND, domains__private=private, limits__active_thread_percentage="40") as site:
        site.start()
        environ = site.client_environ()
        gate, real = site.base / "gate", site.base / "bin" / paths.SERVER_NAME
        os.mkfifo(gate)
        real.parent.mkdir()
        before = replace_server(site, f'#!/bin/sh\nread -r go < {gate}\nexec {real} "$@"\n')
        real.write_text(before)
        real.chmod(0o755)
        program = Program("obey", environ)
        site.programs.append(program)
        waiting = site.until(lambda s: s["clients"] and row(s)["server_pid"], "a client waits for a server")
        assert waiting["clients"][0]["pid"] == program.pid
        assert kinds(waiting) == ["active active"] and row(waiting)["server_state"] != "ACTIVE"
        # Several lists are due meanwhile.
        began = waiting["uptime_s"]
        site.until(lambda s: s["uptime_s"] > began + 2 and s["clients"], "mpsd still knows the client")
        replace_server(site, before)
        gate.write_text("go\n")
        assert program.hear()["pid"] == program.pid
        site.attached(program)
        status = site.until(in_use, "a standby domain")
        assert status["counters"].get("clients_never_listed", 0) == 0 and not site.faults()
        assert row(status)["limits"]["active_thread_percentage"] == 40
