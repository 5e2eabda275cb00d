"""Clients of a running daemon: every kind of exit, evictions, memory of exited clients. One daemon."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import pytest

import mpsd_client
from tests.support.site import DEADLINE_S, Program, Site, alive, until

GIB_WORDS = (1 << 30) // 4


def kill(site: Site, pid: int, **more: Any) -> Mapping[str, Any]:
    return site.ask(lambda c: c.kill(pid, **more))


def rows(status: Mapping[str, Any], pid: int, of: str = "clients") -> Sequence[Mapping[str, Any]]:
    return [row for row in status[of] if row["pid"] == pid]


def used_by_domains(site: Site) -> int:
    """Return the GPU memory in use [bytes] with a standby domain ready."""
    site.client_environ()
    site.until(lambda s: [d for d in s["domains"] if d["role"] == "spare" and d["state"] == "warm"], "spare")
    return site.memory_used()


def test_a_clean_exit_gives_all_memory_back(site: Site) -> None:
    before = used_by_domains(site)
    client = site.join()
    assert "result" in client.do(f"dev.alloc({GIB_WORDS})")
    assert site.memory_used() >= before + (1 << 30)
    client.finish()
    until(lambda: site.memory_used() <= before, "its memory is back")
    assert site.gone(client)["counters"]["leases_held"] == 0
    # Only the lease could keep the memory: the next client can allocate nearly all of it.
    following = site.join()
    assert "result" in following.do(f"dev.alloc({12 * GIB_WORDS})")


def test_an_idle_death_gives_all_memory_back(site: Site) -> None:
    before = used_by_domains(site)
    client = site.join()
    client.do(f"dev.alloc({GIB_WORDS})")
    client.die()
    until(lambda: site.memory_used() <= before, "its memory is back")
    site.gone(client)


def test_a_death_in_flight_is_held_until_its_kernel_has_ended(site: Site) -> None:
    survivor = site.join("work")
    client = site.join()
    client.occupy()
    client.die()
    held = site.until(lambda s: rows(s, client.pid, "dead"), "it lingers")
    row = rows(held, client.pid, "dead")[0]
    assert row["state"] == "lingering"
    assert row["held_gpu_bytes"] is None or row["held_gpu_bytes"] > 0
    assert held["domains"][0]["state"] == "active"
    site.end_work(client)
    site.gone(client)
    assert survivor.finish()["rounds"] > 0
    assert not [f for f in site.faults() if f["class"] == "death-in-flight"]


@pytest.mark.parametrize("how", ["os._exit(3)", "os.kill(os.getpid(), 11)", "os.abort()"])
def test_every_sudden_end_in_mid_kernel_harms_nobody(site: Site, how: str) -> None:
    survivor, client = site.join("work"), site.join()
    client.busy(0.3)
    client.order(how)
    client.wait()
    site.gone(client)
    assert survivor.finish()["rounds"] > 0


def test_evicting_a_client_with_an_endless_kernel_harms_nobody(site: Site) -> None:
    survivor, client = site.join("work"), site.join()
    client.do("dev.launch('forever')")
    answer = kill(site, client.pid, reason="it hangs")
    assert answer["outcome"] == "evicted"
    assert answer["evict_ms"] > 0
    assert any("terminate_client: done" in step for step in answer["steps"])
    assert client.wait() == -signal.SIGKILL
    site.gone(client)
    assert survivor.finish()["rounds"] > 0


def test_a_stopped_client_is_never_asked_but_killed(site: Site) -> None:
    survivor, client = site.join("work"), site.join()
    client.busy(0.3)
    client.signal(signal.SIGSTOP)
    until(lambda: psutil.Process(client.pid).status() == psutil.STATUS_STOPPED, "it is stopped")
    answer = kill(site, client.pid)
    assert answer["outcome"] == "evicted"
    assert "stopped" in answer["steps"][0]
    assert "SIGKILL under the lease" in answer["steps"][0]
    assert not any("terminate_client: done" in step for step in answer["steps"])
    assert client.wait() == -signal.SIGKILL
    assert survivor.finish()["rounds"] > 0


def test_a_dry_run_says_what_it_would_do_and_does_nothing(site: Site) -> None:
    client = site.join()
    answer = kill(site, client.pid, dry_run=True)
    assert answer["outcome"] == "dry-run"
    assert any("terminate_client" in step for step in answer["steps"])
    assert client.do("1 + 1") == {"result": 2}


def test_only_clients_are_killed(site: Site) -> None:
    domain = site.until(lambda s: s["domains"], "a domain")["domains"][0]
    for pid in (os.getpid(), site.pid, domain["control_pid"], domain["server_pid"]):
        with pytest.raises(mpsd_client.NotFoundError, match=f"process {pid} is not a client"):
            kill(site, pid)
    assert alive(domain["server_pid"])


def test_a_pid_that_was_used_again_is_not_killed(site: Site) -> None:
    client = site.join()
    row = rows(site.status(), client.pid)[0]
    with pytest.raises(mpsd_client.AmbiguousError, match="used again"):
        kill(site, client.pid, start_ticks=row["start_ticks"] - 1)
    assert client.do("1 + 1") == {"result": 2}
    assert kill(site, client.pid, start_ticks=row["start_ticks"])["outcome"] == "evicted"


def test_a_forked_child_is_no_client(site: Site) -> None:
    client = site.join()
    child = client.do("os.fork() or os.execvp('sleep', ['sleep', '60'])")["result"]
    try:
        status = site.until(lambda s: rows(s, client.pid), "the parent")
        assert not rows(status, child)
        with pytest.raises(mpsd_client.NotFoundError):
            kill(site, child)
        assert client.do("dev.alloc(16) > 0") == {"result": True}
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_client_whose_child_lives_on_is_released_by_its_own_death(site: Site) -> None:
    before = used_by_domains(site)
    client = site.join()
    client.do(f"dev.alloc({GIB_WORDS})")
    child = client.do("os.fork() or os.execvp('sleep', ['sleep', '60'])")["result"]
    try:
        client.die()
        site.gone(client)
        until(lambda: site.memory_used() <= before, "its memory is back")
        assert alive(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_exec_ends_a_client_and_the_new_program_joins_anew(site: Site) -> None:
    client = site.join()
    client.do(f"dev.alloc({GIB_WORDS})")
    events: list[Mapping[str, Any]] = []
    with mpsd_client.connect(site.socket) as connection:
        stream = connection.subscribe()
        client.order("os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])")
        assert client.hear()["pid"] == client.pid
        while not events or events[-1]["kind"] != "client-attached":
            events.append(stream.next(time.monotonic() + DEADLINE_S))
    left = next(e for e in events if e["kind"] == "client-left")
    assert (left["pid"], left["how"]) == (client.pid, "exec")
    status = site.until(
        lambda s: not s["dead"] and [c for c in rows(s, client.pid) if c["state"] == "attached"],
        "the new program is attached, the old lease gone",
    )
    assert status["counters"]["leases_held"] == 1
    assert "lease" in rows(status, client.pid)[0]["protections"]
    assert not rows(status, client.pid)[0]["problem"]
    assert client.do("dev.alloc(16) > 0") == {"result": True}


def test_drain_refuses_newcomers_and_undrain_takes_them_again(site: Site) -> None:
    client = site.join()
    gpu = site.status()["gpus"][0]["uuid"]
    preview = site.ask(lambda c: c.drain(dry_run=True))
    assert preview["clients"] == [client.pid]
    assert not site.status()["draining"]
    assert site.ask(lambda c: c.drain("0"))["gpus"] == [gpu]
    status = site.status()
    assert status["draining"]
    assert status["drained_gpus"] == [gpu]
    with pytest.raises(mpsd_client.MpsdError, match="drained"):
        site.client_environ()
    # The running client keeps its domain.
    assert client.do("dev.alloc(16) > 0") == {"result": True}
    site.ask(lambda c: c.undrain("0"))
    assert not site.status()["draining"]
    assert site.join().do("dev.alloc(16) > 0") == {"result": True}


def test_many_clients_come_and_go(site: Site) -> None:
    programs: list[Program] = []
    environ = site.client_environ()
    for _ in range(12):
        programs.append(site.program(environ=environ))
    status = site.attached(*programs)
    assert status["domains"][0]["clients"] == 12
    for number, program in enumerate(programs):
        if number % 2:
            program.die()
        else:
            program.finish()
    done = site.until(lambda s: not s["clients"] and not s["dead"], "all are gone")
    assert done["counters"]["leases_held"] == 0
    assert done["domains"][0]["clients"] == 0


def test_an_endless_kernel_of_a_dead_client_poisons_its_domain() -> None:
    with Site(lease__linger_limit_s="0.3") as site:
        site.start()
        survivor = site.join("work")
        client = site.join()
        client.do("dev.launch('forever')")
        client.die()
        record = site.until_fault("hang")
        assert record["offender"]["pid"] == client.pid
        # Only "likely": kernels of the other client may have delayed this one.
        assert record["confidence"] == "likely"

        def left(status: Mapping[str, Any]) -> list[Any]:
            # mpsd retires the domain once another domain can take its place.
            return [d for d in status["domains"] if (d["state"], d["role"]) == ("poisoned", "old")]

        old = site.until(left, "poisoned and left")
        row = left(old)[0]
        assert "runs on" in row["reach"]
        assert rows(old, client.pid, "dead")[0]["state"] == "held"
        # New clients join another domain; the surviving client works on.
        newcomer = site.join()
        assert rows(site.status(), newcomer.pid)[0]["domain"] != row["id"]
        assert survivor.finish()["rounds"] > 0
        # mpsd releases the lease once no client is left in the domain, and then ends the domain.
        site.until(lambda s: row["id"] not in {d["id"] for d in s["domains"]}, "the old domain is gone")
        site.gone(client)
        assert newcomer.do("dev.alloc(16) > 0") == {"result": True}
