"""The daemon is expendable: domains and clients outlive it, and the next daemon adopts them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import pytest

import mpsd_client
from mpsd.base import debug
from mpsd.base.conditions import Code
from mpsd.base.model import GuardClass
from mpsd.clients.guardplan import plan
from mpsd.daemon import adoption
from mpsd.mps import pipedir
from mpsd.os import acl, procfs
from mpsd.records.statefile import StateFile
from tests.support.conditioning import rows_of
from tests.support.site import Site, alive, until


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as started:
        yield started.start()


def parts(status: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the processes of each running domain."""
    return {
        d["id"]: (d["control_pid"], d["server_pid"])
        for d in status["domains"]
        if d["state"] in ("active", "warm")
    }


def settled(site: Site) -> Mapping[str, Any]:
    """Wait until one domain is active, one standby domain is warm, and no other domain exists."""
    return site.until(
        lambda s: sorted(d["state"] for d in s["domains"]) == ["active", "warm"], "one active, one warm"
    )


def test_sigterm_leaves_everything_running_and_the_next_daemon_adopts_it(site: Site) -> None:
    worker, other = site.join("work"), site.join()
    before = settled(site)
    ages = {row["pid"]: row["age_s"] for row in before["clients"]}
    up = {row["control_pid"]: row["uptime_s"] for row in before["domains"]}
    environ = site.client_environ()
    assert site.terminate() == 0
    for pids in parts(before).values():
        assert all(alive(pid) for pid in pids)
    # A client that joins while no daemon runs is served, too, and found later.
    between = site.program(environ=environ)
    assert between.do("dev.on_mps") == {"result": True}
    site.start()
    status = site.attached(worker, other, between)
    assert parts(status) == parts(before)
    assert all(row["age_s"] > ages.get(row["pid"], 0) for row in status["clients"])
    assert all(row["uptime_s"] > up[row["control_pid"]] for row in status["domains"])
    assert settled(site)["counters"]["leases_held"] == 3
    assert site.client_environ() == environ
    assert other.do("dev.alloc(16) > 0") == {"result": True}
    # Each client worked all the time, and ends without an error.
    assert worker.finish()["rounds"] > 0
    assert not site.faults()


def test_kill_9_with_living_clients(site: Site) -> None:
    worker, other = site.join("work"), site.join()
    before = settled(site)
    for _ in range(2):
        site.kill()
        site.start()
        status = site.attached(worker, other)
        assert parts(status) == parts(before)
    row = next(c for c in status["clients"] if c["pid"] == other.pid)
    assert {"lease", "tracker"} <= set(row["protections"])
    assert not row["problem"]
    # The client is protected as before: its death in mid-kernel harms no other client.
    other.busy(0.4)
    other.die()
    site.gone(other)
    assert worker.finish()["rounds"] > 0
    assert not site.faults()


def test_kill_9_with_a_dead_clients_kernel_running(site: Site) -> None:
    worker, client = site.join("work"), site.join()
    settled(site)
    used = site.memory_used()
    client.do("dev.alloc(1 << 20)")
    client.occupy()
    site.kill()
    client.die()
    # No daemon runs: the keeper alone holds the descriptors that keep the exited client's kernel harmless.
    assert site.memory_used() > used
    assert site.node(op="work", pid=client.pid)["busy"] == 1
    site.start()
    held = site.until(lambda s: s["dead"], "it is held")
    assert [(d["pid"], d["state"]) for d in held["dead"]] == [(client.pid, "lingering")]
    assert held["dead"][0]["command"].endswith("obey")
    with mpsd_client.connect(site.socket) as asking:
        assert {row["pid"] for row in asking.holders()} >= {worker.pid, client.pid}
        site.end_work(client)
        site.gone(client)
        until(lambda: [row["pid"] for row in asking.holders()] == [worker.pid], "nothing of it is there")
    assert site.node(op="work", pid=client.pid)["busy"] == 0
    until(lambda: site.memory_used() < used, "its memory is back")
    assert worker.finish()["rounds"] > 0
    assert not site.faults()


def test_kill_9_after_the_death_and_before_its_end(site: Site) -> None:
    worker, client = site.join("work"), site.join()
    client.occupy()
    client.die()
    site.until(lambda s: s["dead"], "it is held")
    site.kill()
    site.start()
    site.end_work(client)
    assert site.gone(client)["counters"]["leases_held"] == 1
    assert worker.finish()["rounds"] > 0
    assert not site.faults()


def test_kill_9_in_the_middle_of_an_eviction(site: Site) -> None:
    worker, client = site.join("work"), site.join()
    client.do("dev.launch('forever')")
    control = psutil.Process(settled(site)["domains"][0]["control_pid"])
    # The control daemon does not answer, so the eviction is under way until it does.
    control.suspend()
    with pytest.raises(mpsd_client.DeadlineError):
        site.ask(lambda c: c.kill(client.pid, timeout=0.05))
    states = {c["pid"]: c["state"] for c in site.status()["clients"]}
    assert states[client.pid] == "terminating"
    site.kill()
    control.resume()
    site.start()
    site.attached(worker, client)
    assert site.ask(lambda c: c.kill(client.pid))["outcome"] == "evicted"
    assert client.wait() == -signal.SIGKILL
    site.gone(client)
    assert worker.finish()["rounds"] > 0
    assert not [f for f in site.faults() if f["class"] != "hang"]


def test_a_keeper_that_dies_is_replaced_with_everything_in_it(site: Site) -> None:
    worker, client = site.join("work"), site.join()
    first = site.keeper()
    assert first is not None
    first.kill()
    until(lambda: site.said("the descriptor store was replaced"), "another keeper")
    assert site.keeper() not in (None, first)
    client.do("dev.launch('forever')")
    # The lease in the new keeper protects as the one in the old keeper did.
    site.kill()
    client.die()
    site.start()
    site.until(lambda s: [d for d in s["dead"] if d["pid"] == client.pid], "its lease was kept")
    assert site.node(op="work", pid=client.pid)["busy"] == 1
    assert worker.finish()["rounds"] > 0
    assert not site.faults()


def test_a_keeper_that_hangs_holds_up_nobody_and_what_is_late_is_shown(site: Site) -> None:
    keeper = site.keeper()
    assert keeper is not None
    keeper.suspend()
    client = site.join()
    text = "the lease is not in the descriptor store, and ends with mpsd"
    assert problem_of(site.status(), client.pid) == text
    keeper.resume()
    site.until(lambda s: not problem_of(s, client.pid), "it has been stored")
    client.do("dev.launch('forever')")
    site.kill()
    client.die()
    site.start()
    site.until(lambda s: [d for d in s["dead"] if d["pid"] == client.pid], "its lease was kept")


def guarded(status: Mapping[str, Any], pid: int) -> list[str]:
    shown = next(c["protections"] for c in status["clients"] if c["pid"] == pid)
    return [text for text in shown if text.startswith("guard")]


def test_the_guard_of_a_killed_daemon_is_taken_over(site: Site) -> None:
    client = site.join()
    # The daemon is killed while it lays the guard ranges, or after the last.
    site.until(lambda s: guarded(s, client.pid), "it is guarded")
    site.kill()
    assert client.do("dev.launch('guard_low') or dev.synchronize()") == {"result": None}
    site.start()
    site.attached(client)
    size = sum(r.length for r in plan(procfs.maps(client.pid), {GuardClass.LOW}, 1024))
    whole = [f"guard:low {size >> 20} MiB (silent)"]
    status = site.until(lambda s: guarded(s, client.pid) == whole, "it is guarded again")
    assert "guard_refused" not in status["counters"]
    assert client.do("dev.launch('guard_low') or dev.synchronize()") == {"result": None}


def test_the_guard_of_a_killed_daemon_goes_where_it_is_not_wanted_any_more(site: Site) -> None:
    client = site.join()
    site.until(lambda s: guarded(s, client.pid), "it is guarded")
    site.kill()
    site.write_config(guard__low="false")
    site.start()
    site.attached(client)
    until(lambda: client.do("dev.launch('guard_low') or dev.synchronize()").get("error"), "it is bare")
    assert not guarded(site.status(), client.pid)


def problem_of(status: Mapping[str, Any], pid: int) -> str:
    return str(next(c["problem"] for c in status["clients"] if c["pid"] == pid))


def test_a_daemon_that_held_nothing_leaves_no_process_behind() -> None:
    with Site() as site:
        site.start()
        assert site.keeper() is not None
        assert site.terminate() == 0
        until(lambda: site.keeper() is None, "the keeper has ended")


def test_domains_that_died_meanwhile_are_replaced(site: Site) -> None:
    environ = site.client_environ()
    old = settled(site)
    site.kill()
    for control, _ in parts(old).values():
        psutil.Process(control).kill()
    until(lambda: not any(alive(p) for pair in parts(old).values() for p in pair), "both are dead")
    site.start()
    new = settled(site)
    assert not set(parts(new)) & set(parts(old))
    assert site.client_environ() == environ
    assert site.join().do("dev.on_mps") == {"result": True}


def test_a_client_that_left_meanwhile_is_not_shown(site: Site) -> None:
    client = site.join()
    site.kill()
    client.finish()
    site.start()
    status = site.gone(client)
    assert status["counters"]["leases_held"] == 0


def test_a_drain_outlives_the_daemon(site: Site) -> None:
    site.ask(lambda c: c.drain())
    site.kill()
    site.start()
    assert site.status()["draining"]
    site.ask(lambda c: c.undrain())
    site.kill()
    site.start()
    assert not site.status()["draining"]


def test_with_a_damaged_state_file_nothing_is_ended_and_new_clients_are_served(site: Site) -> None:
    worker = site.join("work")
    old = settled(site)
    site.kill()
    state = site.run_dir / "state.json"
    state.write_bytes(state.read_bytes()[:-20] + b"x" * 20)
    site.start()
    assert (site.run_dir / "state.json.damaged").exists()
    status = site.attached(worker)
    (home,) = {c["domain"] for c in status["clients"]}
    (row,) = [d for d in status["domains"] if d["id"] == home]
    assert (row["state"], row["control_pid"], row["server_pid"]) == ("retired", *parts(old)[home])
    newcomer = site.join()
    assert newcomer.do("dev.on_mps") == {"result": True}
    assert worker.finish()["rounds"] > 0
    site.until(lambda s: not {d["id"] for d in s["domains"]} & set(parts(old)), "the old domains have ended")


def test_with_a_lost_state_file_the_dead_of_a_living_domain_keep_their_leases(site: Site) -> None:
    """The domain's identity is not proven: its directory admits another user than its server's."""
    worker, client, other = site.join("work"), site.join(), site.join()
    old = settled(site)
    client.occupy()
    site.kill()
    client.die()
    (site.run_dir / "state.json").unlink()
    for name in parts(old):
        acl.only_for(str(site.run_dir / "d" / name), 4711)
    site.start()
    rows = rows_of(site.status(), Code.DOMAIN_UNSUPERVISED)
    text = " ".join(row["text"] for row in rows)
    assert all("echo quit |" in row["remedy"] and row["subject"] in row["remedy"] for row in rows)
    for name, (control, _) in parts(old).items():
        assert f"domain {name} of an earlier mpsd is not supervised any more: process {control} " in text
    (dead,) = site.status()["dead"]
    assert (dead["pid"], dead["state"]) == (client.pid, "held")
    assert "not supervised" in dead["pending"]
    assert site.node(op="work", pid=client.pid)["busy"] == 1
    # The work of the exited client ends, and its lease with it. Living clients keep theirs, in the next mpsd
    # too.
    site.end_work(client)
    site.gone(client)
    other.do("dev.launch('forever')")
    other.die()
    site.until(lambda s: [d["pid"] for d in s["dead"]] == [other.pid], "a death is seen here too")
    site.kill()
    (site.run_dir / "state.json").unlink(missing_ok=True)
    site.start()
    assert [d["pid"] for d in site.status()["dead"]] == [other.pid]
    assert worker.finish()["rounds"] > 0


def test_leases_of_an_unknown_domain_go_with_its_processes(site: Site) -> None:
    client = site.join()
    old = parts(settled(site))
    client.do("dev.launch('forever')")
    site.kill()
    client.die()
    (site.run_dir / "state.json").unlink()
    site.start()
    assert [d["pid"] for d in site.status()["dead"]] == [client.pid]
    for pair in old.values():
        for pid in pair:
            # A server ends by itself after its control daemon.
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
    site.until(lambda s: not s["dead"] and not s["counters"]["leases_held"], "it is given up")


def fault_and_death(site: Site, effect: int) -> None:
    """Fault a domain while the daemon dies before its Nth effect, or after the record if that comes first."""
    site.start(**debug.variable(die_before_effect=effect))
    process = site.process
    assert process is not None
    try:
        site.client_environ()
        site.join("work")
        offender = site.join()
        offender.order("dev.launch('store') or dev.synchronize()")
        offender.hear()
        until(lambda: process.poll() is not None or faulted(site), "it died, or the fault is recorded")
    except mpsd_client.MpsdError:
        until(lambda: process.poll() is not None, "it died")
    # The effects that remain may reach the Nth at any later moment.
    site.abandon()


def faulted(site: Site) -> bool:
    try:
        return bool(site.faults()) and any(d["role"] == "active" for d in site.status()["domains"])
    except mpsd_client.MpsdError:
        return False


@pytest.mark.parametrize("effect", [7, 9, 10, 11, 12, 13, 14])
def test_a_death_between_a_fault_and_the_switch(effect: int) -> None:
    with Site() as site:
        fault_and_death(site, effect)
        site.start()
        for program in site.programs:
            program.close()
        status = settled(site)
        active = next(d for d in status["domains"] if d["role"] == "active")
        assert active["server_state"] == "ACTIVE"
        # The stable path exists and leads to the active domain.
        path = site.client_environ()["CUDA_MPS_PIPE_DIRECTORY"]
        assert os.path.basename(os.readlink(path)) == active["id"]
        newcomer = site.join()
        assert newcomer.do("dev.alloc(16) > 0") == {"result": True}
        assert status["counters"].get("internal_errors", 0) == 0
        assert status["counters"].get("effects_failed", 0) == 0


def test_killed_between_the_start_of_a_control_daemon_and_its_pid_file(site: Site) -> None:
    """The state file says that the domain is starting, and no pid file names its control daemon."""
    worker = site.join("work")
    before = settled(site)
    spare = next(d for d in before["domains"] if d["state"] == "warm")
    site.kill()
    file = StateFile(site.run_dir / "state.json", adoption.KIND, adoption.LEVEL)
    saved = file.load()
    assert saved is not None
    row = next(d for d in saved["domains"] if d["id"] == spare["id"])
    row.update(state="starting", control=None, server=None)
    assert file.save(saved)
    (site.run_dir / "d" / spare["id"] / pipedir.PID_FILE).unlink()
    site.start()
    until(lambda: not alive(spare["control_pid"]) and not alive(spare["server_pid"]), "it is ended")
    after = site.until(
        lambda s: {d["state"] for d in s["domains"] if d["id"] != spare["id"]} == {"active", "warm"},
        "another spare",
    )
    assert not (site.run_dir / "d" / spare["id"]).exists()
    assert not any(spare["id"] in problem for problem in after["problems"])
    assert worker.finish()["rounds"] > 0
