"""Paths to domains that stop working while the processes of the domain live."""

from __future__ import annotations

import os
from typing import Any

import pytest

from mpsd.daemon.adoption import KIND, LEVEL
from mpsd.records.statefile import StateFile
from tests.support.site import OTHER_UID, Site, Status, alive, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root serves other users")


def domain_of(status: Status, state: str) -> str | None:
    return next((d["id"] for d in status["domains"] if d["state"] == state), None)


def settled(site: Site) -> Status:
    """Wait for an active domain with a standby domain."""
    return site.until(lambda s: domain_of(s, "active") and domain_of(s, "warm"), "a standby domain")


def checks(site: Site) -> dict[str, dict[str, Any]]:
    return {row["name"]: dict(row) for row in site.ask(lambda c: c.doctor())}


def test_a_removed_socket_moves_the_slot_and_harms_no_client(site: Site) -> None:
    """Case 03: new clients run on MPS in the standby domain; connected clients live on.

    A standby domain without its socket is replaced first: the slot never moves to an unseen domain.
    """
    site.start()
    old = site.join("work", OTHER_UID)
    before = settled(site)
    active, cut_off = str(domain_of(before, "active")), str(domain_of(before, "warm"))
    (site.run_dir / "d" / cut_off / "control").unlink()
    after = site.until(lambda s: domain_of(s, "warm") not in (None, cut_off), "another standby domain")
    assert domain_of(after, "active") == active
    standby = domain_of(after, "warm")
    (site.run_dir / "d" / active / "control").unlink()
    status = site.until(lambda s: domain_of(s, "active") == standby, "the standby domain is active")
    assert {d["id"]: d["state"] for d in status["domains"]}[active] == "retired"
    wanted = f"the control socket of {active} was removed"
    assert any(wanted in problem for problem in status["problems"]), status["problems"]
    assert any(wanted in row["finding"] and row["ok"] is False for row in checks(site).values())
    new = site.join(uid=OTHER_UID)
    assert new.do("dev.on_mps") == {"result": True}
    rows = {c["pid"]: c["domain"] for c in site.status()["clients"]}
    assert rows[new.pid] == standby and rows[old.pid] == active
    assert not site.faults()
    # The next mpsd cannot ask that domain for its clients, and ends none of them.
    site.kill()
    site.start()
    assert {c["pid"]: c["domain"] for c in site.attached(old, new)["clients"]} == rows
    assert old.finish()["rounds"] > 0
    site.until(lambda s: active not in {d["id"] for d in s["domains"]}, "the cut-off domain has ended")
    assert not any(active in problem for problem in site.status()["problems"])


def test_a_client_of_root_survives_a_restart_without_the_socket(site: Site) -> None:
    """Case 03: root may enter a private domain; the state file proves the client that no list names."""
    site.start()
    guest = site.program("work", environ=site.client_environ(OTHER_UID))
    assert guest.hear() == {"working": True}
    domain = next(c["domain"] for c in site.attached(guest)["clients"] if c["pid"] == guest.pid)
    site.until(lambda s: "listed" in s["clients"][0]["proof"], "its server has listed it")
    site.kill()
    (site.run_dir / "d" / domain / "control").unlink()
    site.start()
    status = site.attached(guest)
    assert {c["pid"]: c["domain"] for c in status["clients"]} == {guest.pid: domain}
    assert "listed" in status["clients"][0]["proof"]
    assert guest.finish()["rounds"] > 0


def test_the_umask_of_mpsd_does_not_keep_users_outside(site: Site) -> None:
    """Case 10: with umask 077 clients of another user run on MPS, and mpsd's own files stay closed."""
    before = os.umask(0o077)
    try:
        site.start()
    finally:
        os.umask(before)
    run = site.run_dir
    assert {p.stat().st_mode & 0o777 for p in (run, run / "d", run / "s")} == {0o755}
    client = site.join(uid=OTHER_UID)
    assert client.do("dev.on_mps") == {"result": True}
    assert all(row["ok"] is not False for name, row in checks(site).items() if name.startswith("way to"))
    closed = [run / "state.json", *site.log_dir.rglob("*.log"), *site.state_dir.rglob("*.jsonl")]
    assert len(closed) > 1
    for path in closed:
        assert not path.stat().st_mode & 0o007 or not path.parent.stat().st_mode & 0o007, path


def test_a_closed_way_is_opened_again(site: Site) -> None:
    """Case 10: permissions that another program took away are restored, and no domain is lost."""
    site.start()
    environ = site.environ() | site.client_environ(OTHER_UID)
    active = domain_of(settled(site), "active")
    (link,) = (site.run_dir / "s").iterdir()
    # A private directory shows the mask of its ACL in place of the group's rights.
    ways = ((site.run_dir / "d", 0o755), (link.parent, 0o755), (site.run_dir / "d" / str(active), 0o750))
    for path, mode in ways:
        path.chmod(0o700)
        until(lambda path=path, mode=mode: path.stat().st_mode & 0o777 == mode, f"{path} is open again")
        until(lambda path=path: str(path) in {m["at"] for m in site.said("a path was mended")}, "a log line")
    link.unlink()
    until(link.exists, "the link is made again")
    client = site.program(uid=OTHER_UID, environ=environ)
    site.attached(client)
    assert client.do("dev.on_mps") == {"result": True}
    assert domain_of(site.status(), "active") == active and not site.faults()


def forget_row(site: Site, domain: str) -> None:
    """Remove a domain from the state file, as a disk that was full at the wrong moment does."""
    file = StateFile(site.run_dir / "state.json", KIND, LEVEL)
    saved = file.load()
    assert saved is not None
    saved["domains"] = [row for row in saved["domains"] if row["id"] != domain]
    for slot in saved["slots"]:
        slot["active"] = None if slot["active"] == domain else slot["active"]
    assert file.save(saved)


def test_a_domain_without_a_row_serves_its_clients_to_their_end(site: Site) -> None:
    """S12: its identity is proven by its processes, so mpsd adopts it, and ends it once it is empty."""
    site.start()
    client = site.join("work", OTHER_UID)
    before = settled(site)
    lost = str(domain_of(before, "active"))
    (row,) = [d for d in before["domains"] if d["id"] == lost]
    site.kill()
    forget_row(site, lost)
    site.start()
    status = site.attached(client)
    (now,) = [d for d in status["domains"] if d["id"] == lost]
    assert (now["state"], now["uid"]) == ("retired", OTHER_UID)
    assert now["private"] is True
    assert (now["control_pid"], now["server_pid"]) == (row["control_pid"], row["server_pid"])
    assert [c["domain"] for c in status["clients"]] == [lost] and not site.faults()
    new = site.join(uid=OTHER_UID)
    assert new.do("dev.on_mps") == {"result": True}
    assert client.finish()["rounds"] > 0
    site.until(lambda s: lost not in {d["id"] for d in s["domains"]}, "the old domain has ended")
    assert not alive(row["control_pid"]) and not (site.run_dir / "d" / lost).exists()
