"""Faults under a running daemon: records, switch to the standby domain, full disks, exclusive mode."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

import mpsd_client
from faultinject.rig.logdisk import SmallDisk
from mpsd.os import procfs
from tests.support.site import DEADLINE_S, Program, Site, until


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as started:
        yield started.start()


def active(status: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(d for d in status["domains"] if d["role"] == "active")
    return found


def settled(site: Site) -> Mapping[str, Any]:
    return site.until(
        lambda s: sorted(d["state"] for d in s["domains"]) == ["active", "warm"], "one active, one warm"
    )


def test_a_fault_names_its_offender_and_the_spare_takes_over(site: Site) -> None:
    victim, offender = site.join(), site.join()
    site.until(lambda s: all("listed" in c["proof"] for c in s["clients"]), "the server lists both")
    before = settled(site)
    old, spare = active(before), next(d for d in before["domains"] if d["role"] == "spare")
    path = Path(site.client_environ()["CUDA_MPS_PIPE_DIRECTORY"])
    with mpsd_client.connect(site.socket) as connection:
        stream = connection.subscribe()
        offender.fault()
        end = time.monotonic() + DEADLINE_S
        event: dict[str, Any] = {}
        while event.get("kind") != "fault":
            event = dict(stream.next(end))
        # Once the record is published, the path already leads to the standby domain.
        assert os.path.basename(os.readlink(path)) == spare["id"]
    assert event["class"] == "mmu-invalid-address"
    assert (event["offender"]["pid"], event["confidence"]) == (offender.pid, "certain")
    assert event["victims"] == [victim.pid]
    assert event["address"].startswith("0x")
    newcomer = site.join()
    assert newcomer.do("dev.alloc(16) > 0") == {"result": True}
    faulted = next(d for d in site.status()["domains"] if d["id"] == old["id"])
    assert (faulted["role"], faulted["last_fault"]) == ("old", event["id"])
    assert victim.do("dev.synchronize()")["error"] == 700
    # The old domain ends once its victims have exited.
    for program in (victim, offender):
        program.finish()
    status = settled(site)
    assert old["id"] not in {d["id"] for d in status["domains"]}
    assert active(status)["id"] == spare["id"]
    assert newcomer.do("dev.alloc(16) > 0") == {"result": True}
    assert not (site.run_dir / "d" / old["id"]).exists()


def test_fault_records_survive_a_restart(site: Site) -> None:
    offender = site.join()
    offender.fault("null")
    first = site.until_fault("mmu-null")
    offender.close()
    settled(site)
    site.kill()
    site.start()
    assert [r["id"] for r in site.faults()] == [first["id"]]
    assert site.faults()[0]["offender"] == first["offender"]
    # Record numbers continue.
    second = site.join()
    second.fault()
    assert site.until_fault("mmu-invalid-address")["id"] > first["id"]
    assert [r["id"] for r in site.ask(lambda c: c.faults(since_id=first["id"]))] == [
        site.until_fault("mmu-invalid-address")["id"]
    ]


def test_who_comes_to_a_faulted_domain_is_counted_once(site: Site) -> None:
    offender, victim = site.join(), site.join()
    settled(site)
    old = active(site.status())["id"]
    # Connect straight to the domain, not by the stable path: like a program that read it just before the
    # switch.
    late = site.environ() | {"CUDA_MPS_PIPE_DIRECTORY": str(site.run_dir / "d" / old)}
    offender.fault()
    site.until(lambda s: [d for d in s["domains"] if d["state"] == "faulted"], "faulted")
    site.until(
        lambda s: [d for d in s["domains"] if d["id"] == old and d["server_state"] == "FAULT"], "FAULT"
    )
    refused = Program("obey", late)
    site.programs.append(refused)
    assert refused.hear() == {"error": 807}
    refused.wait()
    status = site.until(
        lambda s: [d for d in s["domains"] if d["id"] == old and d["refused_807"]], "it is counted"
    )
    assert next(d for d in status["domains"] if d["id"] == old)["refused_807"] == 1
    assert status["counters"]["clients_refused"] == 1
    del victim


def test_the_death_of_a_server_is_recorded_and_replaced(site: Site) -> None:
    client = site.join()
    old = active(settled(site))
    psutil.Process(old["server_pid"]).kill()
    record = site.until_fault("server-death")
    assert record["domain"] == old["id"]
    assert client.do("dev.synchronize()")["error"] == 806
    client.close()
    assert active(settled(site))["server_pid"] != old["server_pid"]
    assert site.join().do("dev.alloc(16) > 0") == {"result": True}


def test_the_death_of_a_control_daemon_is_recorded_and_replaced(site: Site) -> None:
    client = site.join()
    old = active(settled(site))
    psutil.Process(old["control_pid"]).kill()
    record = site.until_fault("control-death")
    assert record["domain"] == old["id"]
    client.close()
    assert active(settled(site))["id"] != old["id"]
    assert [r["class"] for r in site.faults()] == ["control-death"]
    assert site.join().do("dev.on_mps") == {"result": True}


def test_a_device_xid_gives_a_device_record_and_moves_nobody(site: Site) -> None:
    worker = site.join("work")
    before = settled(site)
    site.node(op="inject", fault="xid", number=74)
    record = site.until_fault("device-bus")
    assert record["gpus"] == [before["gpus"][0]["uuid"]]
    assert (record["domain"], record["offender"]) == (None, None)
    assert [d["id"] for d in settled(site)["domains"]] == [d["id"] for d in before["domains"]]
    assert worker.finish()["rounds"] > 0
    assert len(site.faults()) == 1


def test_a_gpu_that_falls_off_the_bus_is_nobodys_fault() -> None:
    with Site() as site:
        site.start()
        client = site.join()
        settled(site)
        site.node(op="inject", fault="xid", number=79)
        assert "error" in client.do("dev.synchronize()")
        client.finish()
        settled(site)
        records = site.faults()
        assert {r["class"] for r in records} == {"device-bus"}
        assert [(r["offender"], r["suspects"]) for r in records] == [(None, [])] * len(records)


def outside_mps(site: Site) -> Program:
    environ = site.environ() | {"MPSD_SIM_DIR": str(site.node_dir), "CUDA_MPS_PIPE_DIRECTORY": "/nowhere"}
    program = site.program(environ=environ)
    assert program.do("dev.on_mps") == {"result": False}
    return program


def test_a_fault_of_a_process_outside_mps_names_it_and_moves_nobody(site: Site) -> None:
    worker = site.join("work")
    before = settled(site)
    outside = outside_mps(site)
    outside.fault()
    record = site.until_fault("unattributed-xid")
    assert (record["domain"], record["confidence"]) == (None, "likely")
    assert record["offender"]["pid"] == outside.pid
    assert record["offender"]["start_ticks"] == procfs.start_ticks(outside.pid)
    assert (record["victims"], record["moved"]) == ([], [])
    assert [d["id"] for d in settled(site)["domains"]] == [d["id"] for d in before["domains"]]
    assert worker.finish()["rounds"] > 0
    assert [r["class"] for r in site.faults()] == ["unattributed-xid"]


def test_a_process_outside_that_has_exited_is_named_by_the_kernel_log(site: Site) -> None:
    outside = outside_mps(site)
    outside.close()
    site.node(op="inject", fault="xid", number=43, pid=outside.pid, name="python")
    record = site.until_fault("unattributed-xid")
    assert (record["offender"]["pid"], record["offender"]["command"]) == (outside.pid, "python")
    assert (record["offender"]["start_ticks"], record["confidence"]) == (None, "likely")


def test_settings_made_by_hand_reach_the_next_domain_and_the_next_daemon(site: Site) -> None:
    offender = site.join()
    first = active(settled(site))
    # A log line alone sets nothing, nor does a command that the control daemon refuses.
    with (site.log_dir / first["id"] / "control.log").open("a") as log:
        log.write("[2026-01-01 00:00:00.000 Control 1] Cmd: set_default_active_thread_percentage 7\n")
    site.control(first["id"], "set_default_active_thread_percentage 4000")
    site.until(lambda s: s["counters"].get("settings_rejected") == 2, "both are rejected")
    site.control(first["id"], "set_default_active_thread_percentage 40")
    shown = "active_thread_percentage (user 0) 40"
    site.until(lambda s: shown in s["gpus"][0]["limits"], "the setting is known to mpsd")
    assert not any("percentage 7" in text for text in site.status()["gpus"][0]["limits"])
    spare = next(d for d in site.status()["domains"] if d["role"] == "spare")["id"]
    site.kill()
    site.start()
    assert shown in site.status()["gpus"][0]["limits"]
    site.attached(offender)
    offender.fault()
    offender.close()
    status = settled(site)
    fresh = next(d for d in status["domains"] if d["role"] == "spare")["id"]
    assert fresh not in (first["id"], spare)
    assert site.control(fresh, "get_default_active_thread_percentage") == "40.0"


def test_configured_limits_are_given_to_every_domain() -> None:
    with Site(limits__active_thread_percentage="25.0") as site:
        site.start()
        site.client_environ()
        for domain in settled(site)["domains"]:
            assert site.control(domain["id"], "get_default_active_thread_percentage") == "25.0"
        assert "active_thread_percentage 25" in site.status()["gpus"][0]["limits"]


def test_the_default_path_is_served_on_request() -> None:
    with Site(domains__serve_default_path="true") as site:
        default = site.base / "default"
        site.write_config(domains__default_path=f'"{default}"')
        site.start()
        until(default.is_symlink, "the default path is there")
        until(lambda: (default / "control").exists(), "it leads to a running domain")
        # A job without any setting of mpsd: libcuda uses its default pipe directory.
        client = site.program(environ=site.environ() | {"CUDA_MPS_PIPE_DIRECTORY": str(default)})
        row = site.attached(client)["clients"][0]
        domain = next(d for d in site.status()["domains"] if d["id"] == row["domain"])
        assert (domain["uid"], row["state"]) == (None, "attached")
        settled(site)
        client.fault()
        site.until_fault("mmu-invalid-address")
        again = site.program(environ=site.environ() | {"CUDA_MPS_PIPE_DIRECTORY": str(default)})
        assert again.do("dev.alloc(16) > 0") == {"result": True}


def test_a_default_path_of_somebody_else_is_left_alone() -> None:
    with Site(domains__serve_default_path="true") as site:
        default = site.base / "default"
        default.mkdir()
        (default / "control").write_text("another's")
        site.write_config(domains__default_path=f'"{default}"')
        site.start()
        status = site.until(
            lambda s: any(str(default) in p for p in s["problems"]), "it says so among the problems"
        )
        assert "not empty" in " ".join(status["problems"])
        assert (default / "control").read_text() == "another's"


def test_exclusive_mode_has_no_spare_and_recovers_in_place() -> None:
    with Site() as site:
        site.start()
        site.node(op="inject", fault="mode", mode="exclusive-process")
        victim, offender = site.join(), site.join()
        status = site.status()
        assert status["gpus"][0]["compute_mode"] == "exclusive-process"
        assert "EXCLUSIVE_PROCESS" in " ".join(status["gpus"][0]["limits"])
        assert [d["role"] for d in status["domains"]] == ["active"]
        old = active(status)
        offender.fault()
        site.until_fault("mmu-invalid-address")
        site.until(lambda s: active(s)["state"] == "faulted", "it is faulted, and nothing replaces it")
        for program in (victim, offender):
            program.finish()
        status = site.until(lambda s: active(s)["state"] == "active", "it recovered")
        assert active(status)["id"] == old["id"]
        assert len(status["domains"]) == 1
        assert site.join().do("dev.alloc(16) > 0") == {"result": True}


def test_exclusive_mode_empties_a_faulted_domain_at_its_deadline() -> None:
    with Site(domains__exclusive_drain_s="0.3") as site:
        site.start()
        site.node(op="inject", fault="mode", mode="exclusive-process")
        victim, offender = site.join(), site.join()
        offender.fault()
        # Neither client exits by itself, and no other client can work before both have exited.
        assert victim.wait() == -signal.SIGKILL
        assert offender.wait() == -signal.SIGKILL
        site.until(lambda s: active(s)["state"] == "active", "it recovered")
        assert site.join().do("dev.alloc(16) > 0") == {"result": True}


def test_victims_are_killed_only_where_that_is_configured() -> None:
    with Site(domains__kill_victims_after_s="0.2") as site:
        site.start()
        victim, offender = site.join(), site.join()
        settled(site)
        offender.fault()
        assert victim.wait() == -signal.SIGKILL
        settled(site)


def test_victims_that_stay_are_reported_and_left_alone() -> None:
    with Site(domains__laggard_report_s="0.2") as site:
        site.start()
        victim, offender = site.join(), site.join()
        settled(site)
        with mpsd_client.connect(site.socket) as connection:
            stream = connection.subscribe()
            offender.fault()
            end = time.monotonic() + DEADLINE_S
            event: dict[str, Any] = {}
            while event.get("kind") != "victims-stay":
                event = dict(stream.next(end))
        assert victim.pid in event["pids"]
        assert victim.do("1 + 1") == {"result": 2}


def journal_problem(status: Mapping[str, Any]) -> str:
    return " ".join(p for p in status["problems"] if "journal" in p)


def test_a_full_disk_costs_records_on_disk_and_nothing_else() -> None:
    with Site() as site:
        disk = SmallDisk(site.base / "small")
        if not disk.mounted:
            pytest.skip("no tmpfs can be mounted here")
        try:
            site.log_dir, site.state_dir = disk.path / "l", disk.path / "s"
            site.write_config()
            site.start()
            worker = site.join("work")
            settled(site)
            # The journal's last block may have space for a record or two.
            while not journal_problem(site.status()):
                disk.fill()
                offender = site.join()
                count = len(site.faults())
                offender.fault()
                until(lambda count=count: len(site.faults()) > count, "it is recorded")  # type: ignore[misc]
                assert site.faults()[-1]["offender"]["pid"] == offender.pid
                offender.close()
            records = [r["id"] for r in site.faults() if r["domain"]]
            text = journal_problem(site.status())
            assert "No space left on device" in text
            assert "in memory only" in text
            site.until(lambda s: f"{site.log_dir} is full" in " ".join(s["problems"]), "the logs, too")
            newcomer = site.join()
            assert newcomer.do("dev.alloc(16) > 0") == {"result": True}
            # With free space again mpsd writes the records kept in memory and clears the problem.
            disk.free()
            site.until(lambda s: not journal_problem(s), "it is written")
            for program in (worker, newcomer):
                program.close()
            site.kill()
            site.start()
            # With several faults at a time, an Xid that could belong to any of them has a record of its own.
            assert [r["id"] for r in site.faults() if r["domain"]] == records
            assert site.terminate() == 0
        finally:
            left = site.close()
            disk.close()
        assert not left
