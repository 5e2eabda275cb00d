"""A real mpsd on a simulated driver with the patched nvidia-uvm: a memory fault ends its client alone."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from mpsd.base.model import IsolationMode
from mpsd.ctl.statustext import status as status_text
from mpsd.ctl.style import Style
from mpsd.gpu.simulated.kernelmodule import SimulatedIsolation
from mpsd.gpu.simulated.node import NodeConfig
from tests.support.site import Program, Site, until

KINDS = {"store": "mmu-invalid-address", "load": "mmu-invalid-address", "null": "mmu-null"}


@pytest.fixture(scope="module")
def isolated() -> Iterator[Site]:
    with Site(simulated__isolation="true") as started:
        yield started.start()


@pytest.fixture
def patient() -> Iterator[Site]:
    """A site with a kernel module that waits for mpsd longer than any start of mpsd takes."""
    with Site(simulated__isolation="true") as started:
        started.node_dir.mkdir()
        NodeConfig(isolation=True, isolation_deadline_s=60.0).save(str(started.node_dir))
        yield started.start()


@pytest.fixture
def site(isolated: Site) -> Site:
    return isolated


def finished(site: Site, client: Program) -> Mapping[str, Any]:
    """Return the newest record of the client once it shows that mpsd evicted the client."""

    def look() -> Mapping[str, Any] | None:
        own = [f for f in site.faults() if f["offender"] and f["offender"]["pid"] == client.pid]
        ended = [f for f in own if f["hit"] and f["hit"]["outcome"] == "evicted"]
        return ended[-1] if ended else None

    return until(look, f"{client.pid} is evicted") or {}


@pytest.mark.parametrize("kind", KINDS)
def test_a_memory_fault_ends_its_client_alone_and_is_told(site: Site, kind: str) -> None:
    survivor, client = site.join("work"), site.join()
    (row,) = (c for c in site.status()["clients"] if c["pid"] == client.pid)
    client.order(f"dev.launch({kind!r})")
    client.wait()
    record = finished(site, client)
    assert (record["class"], record["confidence"], record["victims"]) == (KINDS[kind], "certain", [])
    assert (record["hit"]["zone"], record["hit"]["alone"]) == ("sink", True)
    assert record["evidence"][0]["source"] == "kernel-part"
    assert record["summary"].endswith("; no other client was affected")
    assert {d["id"]: d["state"] for d in site.status()["domains"]}[row["domain"]] == "active"
    assert survivor.finish()["rounds"] > 0


def test_what_the_kernel_part_does_not_sink_is_one_record_with_all_its_signs(site: Site) -> None:
    client, before = site.join(), {f["id"] for f in site.faults()}
    client.order("dev.launch('read_only', address=dev.map_read_only(4))")

    def look() -> Mapping[str, Any] | None:
        own = [f for f in site.faults() if f["class"] == "mmu-permission" and f["offender"]]
        return own[-1] if own else None

    record = until(look, "a record of the fault")
    assert record is not None and record["offender"]["pid"] == client.pid
    client.die()
    sources = {sign["source"] for sign in record["evidence"]}
    assert sources & {"kernel-part", "uvm"}, "whichever came first is in it at once"

    def over() -> bool:
        return {d["id"]: d["state"] for d in site.status()["domains"]}.get(record["domain"]) != "faulted"

    until(over, "the domain is empty and well, or gone")
    assert not site.status()["counters"].get("kernel_records_of_others")
    told = {f["id"] for f in site.faults() if f["domain"] in (record["domain"], None)}
    assert told - before == {record["id"]}


def test_status_and_doctor_say_that_it_is_on_and_no_silent_guard_is_laid(site: Site) -> None:
    shown = site.status()
    assert shown["kernel_isolation"] | {"driver": ""} == {
        "mode": "isolate",
        "wanted": "isolate",
        "driver": "",
        "deadline_ms": 2000,
        "why_not": "",
    }
    assert not any("outer guard" in text for text in shown["problems"])
    driver = shown["kernel_isolation"]["driver"]
    said = f"kernel isolation: on (driver {driver}, mode isolate)"
    assert said in status_text(shown, Style())
    (found,) = (c for c in site.ask(lambda c: c.doctor()) if c["name"] == "kernel isolation")
    assert found["ok"] is True and f"kernel isolation: {found['finding']}" == said


def test_a_mode_that_somebody_else_has_set_is_said_at_once(site: Site) -> None:
    door = SimulatedIsolation(str(site.node_dir))
    try:
        door.set_mode(IsolationMode.REPORT)
        shown = site.status()
        assert shown["kernel_isolation"]["mode"] == "report"
        assert any("kernel isolation: the mode is report, but" in text for text in shown["problems"])
        (found,) = (c for c in site.ask(lambda c: c.doctor()) if c["name"] == "kernel isolation")
        assert found["ok"] is False and "restart mpsd" in found["remedy"]
    finally:
        door.set_mode(IsolationMode.ISOLATE)
        door.close()
    assert not any("kernel isolation" in text for text in site.status()["problems"])


def test_an_mpsd_that_was_dead_puts_out_what_was_sunk_meanwhile(patient: Site) -> None:
    site = patient
    survivor, client = site.join("work"), site.join()
    site.kill()
    client.order("dev.launch('store')")
    site.start()
    client.wait()
    record = finished(site, client)
    assert record["evidence"][0]["source"] == "kernel-part"
    assert survivor.finish()["rounds"] > 0


def test_without_mpsd_the_kernel_part_ends_it_at_its_deadline(site: Site) -> None:
    survivor, client = site.join("work"), site.join()
    site.kill()
    client.order("dev.launch('store')")
    assert client.wait() == -signal.SIGKILL
    site.start()
    assert survivor.finish()["rounds"] > 0
