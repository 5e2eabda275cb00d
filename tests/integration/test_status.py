"""Status of a running daemon around a fault: lost clients, the last fault, one event line, and privacy."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from mpsd.ctl.__main__ import main
from mpsd.ctl.statustext import status as status_text
from mpsd.ctl.style import Style
from tests.support.site import OTHER_UID, Site

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user")


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as started:
        yield started.start()


def slot_fault(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the last fault of the only slot, without its age; empty if it has none."""
    (slot,) = status["slots"]
    return {key: value for key, value in (slot["fault"] or {}).items() if key != "age_s"}


def settled(site: Site) -> Mapping[str, Any]:
    return site.until(
        lambda s: sorted(d["state"] for d in s["domains"]) == ["active", "warm"], "one active, one warm"
    )


def row(status: Mapping[str, Any], domain: str) -> str:
    (line,) = (line for line in status_text(status, Style()) if line.startswith(f"{domain} "))
    return line


def test_clients_of_a_faulted_domain_are_lost_and_the_last_fault_survives_a_restart(site: Site) -> None:
    victim, offender = site.join(), site.join()
    site.until(lambda s: all("listed" in c["proof"] for c in s["clients"]), "the server lists both")
    before = settled(site)
    assert [c["lost"] for c in before["clients"]] == [False, False] and not slot_fault(before)
    old = next(d["id"] for d in before["domains"] if d["role"] == "active")
    new = next(d["id"] for d in before["domains"] if d["role"] == "spare")
    offender.fault()
    record = site.until_fault("mmu-invalid-address")
    status = site.until(lambda s: all(c["lost"] for c in s["clients"]), "both clients are lost")
    newcomer = site.join()
    first = slot_fault(status)
    assert (first["id"], first["class"], first["domain"]) == (record["id"], "mmu-invalid-address", old)
    assert (first["offender"]["pid"], first["outcome"]) == (offender.pid, "runs")
    text = (
        rf"root +faulted +2 +- +#{record['id']} mmu-invalid-address, \d+ s ago, pid {offender.pid} still runs"
    )
    assert re.search(text, row(status, old))

    site.kill()
    site.start()
    site.attached(newcomer)
    status = site.until(lambda s: len([c for c in s["clients"] if c["lost"]]) == 2, "both are lost still")
    assert slot_fault(status) == first
    rows = {d["id"]: (d["last_fault"], (d["fault"] or {}).get("id")) for d in status["domains"]}
    assert rows[old] == (record["id"], record["id"]) and rows[new] == (None, None)
    assert re.search(text, row(status, old))
    assert {c["pid"]: c["lost"] for c in status["clients"]}[newcomer.pid] is False

    # The slot keeps its last fault when the domain has gone.
    for program in (victim, offender):
        program.finish()
    status = settled(site)
    assert slot_fault(status) == first | {"outcome": "ended"}
    assert re.search(
        rf"#{record['id']} mmu-invalid-address in {old}, \S+ \S+ ago, pid {offender.pid} ended$",
        row(status, new),
    )


def test_one_fault_is_one_event_line(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.join()
    offender = site.join()
    settled(site)
    offender.fault("trap")
    site.until(lambda s: slot_fault(s), "the fault is recorded")
    offender.close()
    site.gone(offender)
    assert main(["--socket", site.socket, "events"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.split()[2].startswith("fault")]
    assert len(lines) == 1 and lines[0].split()[2:4] == ["fault", f"#{site.faults()[0]['id']}"]


@root_only
def test_a_user_does_not_learn_the_faults_of_others(site: Site) -> None:
    offender = site.join()
    settled(site)
    offender.fault()
    record = site.until_fault("mmu-invalid-address")
    status = site.ask(lambda c: c.status(), uid=OTHER_UID)
    assert not slot_fault(status)
    (old,) = (d for d in status["domains"] if d["last_fault"] == record["id"])
    assert old["fault"] is None
    assert row(status, old["id"]).endswith(f"  #{record['id']}")
