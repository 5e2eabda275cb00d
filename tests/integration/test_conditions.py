"""One condition, the same in status, doctor, events, metrics, exit status and log, with a running daemon."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

import mpsd_client
from mpsd.base.conditions import KINDS, Code
from mpsd.base.errors import RefusedError
from mpsd.ctl.__main__ import main
from mpsd.exporter import metrics
from tests.support.conditioning import rows_of
from tests.support.site import OTHER_UID, Site, Status, until


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as started:
        yield started.start()


def exit_status(site: Site, *arguments: str) -> int:
    return main(["--socket", site.socket, *arguments])


def changes(site: Site, code: Code, uid: int | None = None) -> list[str]:
    """Return the events of a condition that a user sees, in order."""

    def listed(client: mpsd_client.Client) -> list[Mapping[str, Any]]:
        stream = client.subscribe(0)
        return [next(stream) for _ in range(stream.kept)]

    return [e["change"] for e in site.ask(listed, uid) if e["kind"] == "condition" and e["code"] == code]


def metric(site: Site, code: Code) -> float:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics.Collector(lambda: metrics.query_daemon(site.socket)))
    generate_latest(registry)
    found = registry.get_sample_value("mpsd_condition", {"code": code})
    assert found is not None
    return found


def until_holds(site: Site, code: Code) -> Status:
    return site.until(lambda s: rows_of(s, code), f"{code} holds")


def until_over(site: Site, code: Code) -> Status:
    return site.until(lambda s: not rows_of(s, code), f"{code} is over")


def test_clients_that_lost_their_work_are_told_everywhere(site: Site) -> None:
    """N2: two clients of a domain that faulted run on without their GPU work."""
    victims = [site.join(), site.join()]
    site.until(lambda s: {"active", "warm"} == {d["state"] for d in s["domains"]}, "a standby domain")
    assert exit_status(site, "status") == 0 and metric(site, Code.CLIENTS_LOST) == 0
    offender = site.join()
    offender.fault()
    site.until_fault("mmu-invalid-address")
    offender.die()
    status = site.until(
        lambda s: any("2 client(s)" in row["text"] for row in rows_of(s, Code.CLIENTS_LOST)), "both are lost"
    )
    (row,) = rows_of(status, Code.CLIENTS_LOST)
    assert row["subject"] == "d1" and row["degrades"] and "restart these clients" in row["remedy"]
    assert row["text"] in status["problems"]
    assert exit_status(site, "status") == 10 and exit_status(site, "doctor") == 10
    assert metric(site, Code.CLIENTS_LOST) == 1
    (check,) = [c for c in site.ask(lambda c: c.doctor()) if c["name"] == Code.CLIENTS_LOST]
    assert (check["ok"], check["finding"], check["remedy"]) == (False, row["text"], row["remedy"])
    until(lambda: changes(site, Code.CLIENTS_LOST) == ["begins"], "the event that it begins")
    for victim in victims:
        victim.finish()
    until_over(site, Code.CLIENTS_LOST)
    assert exit_status(site, "status") == 0
    until(lambda: changes(site, Code.CLIENTS_LOST) == ["begins", "ends"], "the event that it ends")
    logged = [line["code"] for line in site.said("degraded")]
    assert logged.count("clients-lost") == 1
    assert [line["code"] for line in site.said("no longer degraded")].count("clients-lost") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be other users")
def test_a_user_sees_the_events_of_its_own_domain_alone(site: Site) -> None:
    theirs = site.join(uid=OTHER_UID)
    site.join(uid=OTHER_UID).fault()
    until(lambda: changes(site, Code.CLIENTS_LOST, OTHER_UID), "its own domain's event")
    assert changes(site, Code.CLIENTS_LOST, OTHER_UID + 1) == []
    theirs.finish()


def test_a_lost_gpu_takes_no_new_clients_until_a_restart_finds_it_answering(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """N3: Xid 79."""
    site.client_environ()
    site.node(op="inject", fault="xid", number=79)
    status = until_holds(site, Code.GPU_LOST)
    (row,) = rows_of(status, Code.GPU_LOST)
    assert row["subject"] == status["gpus"][0]["uuid"] and "Xid 79" in row["text"]
    # 11 until another domain has taken over.
    assert exit_status(site, "status") in (10, 11) and exit_status(site, "doctor") == 10
    assert metric(site, Code.GPU_LOST) == 1
    # The bare request is that of a client of an earlier release, which knows no refusal in a result.
    for asked in (
        lambda c: c.call("env"),
        lambda c: c.env(),
        lambda c: c.env("0"),
        lambda c: c.env(standby=True),
    ):
        with pytest.raises(RefusedError) as refused:
            site.ask(asked)
        assert (refused.value.message, refused.value.remedy) == (row["text"], row["remedy"])
    capsys.readouterr()
    assert exit_status(site, "env") == 69
    shown = capsys.readouterr()
    assert shown.out == "false\n" and row["text"] in shown.err and row["remedy"] in shown.err
    # A daemon that ends without a word knows it too; the simulated GPU answers, as after a reset.
    site.kill()
    site.start()
    until_over(site, Code.GPU_LOST)
    assert exit_status(site, "env") == 0
    site.until(lambda s: not [row for row in s["conditions"] if row["degrades"]], "nothing degrades")


def test_a_gpu_that_takes_clients_is_preferred() -> None:
    with Site(simulated__gpus="2") as site:
        site.start()
        gpus = [gpu["uuid"] for gpu in site.status()["gpus"]]
        for drained, other in (gpus, gpus[::-1]):
            site.ask(lambda c, gpu=drained: c.drain(gpu))
            assert site.ask(lambda c: c.call("env"))["gpus"] == [other]
            with pytest.raises(RefusedError, match=f"{drained} is drained"):
                site.ask(lambda c, gpu=drained: c.call("env", {"gpu": gpu}))
            site.ask(lambda c, gpu=drained: c.undrain(gpu))


def test_an_active_domain_in_fault_is_said_with_its_clients() -> None:
    """Exit status 11: in compute mode EXCLUSIVE_PROCESS no other domain takes over while a victim lives."""
    # mpsd does not end the victim meanwhile.
    with Site(domains__exclusive_drain_s="600") as site:
        site.start()
        site.node(op="inject", fault="mode", mode="exclusive-process")
        victim, offender = site.join(), site.join()
        offender.fault()
        status = until_holds(site, Code.DOMAIN_FAULTED)
        offender.die()
        assert exit_status(site, "status") == 11
        assert rows_of(status, Code.DOMAIN_FAULTED)[0]["text"] in status["problems"]
        victim.finish()
        until_over(site, Code.DOMAIN_FAULTED)


def test_a_socket_of_another_daemon_leaves_vault_and_failover_off() -> None:
    with Site(protect='"failover"') as site, contextlib.ExitStack() as foreign:
        site.run_dir.mkdir(mode=0o755)
        for name in ("vault.sock", "failover.sock"):
            other = foreign.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            other.bind(str(site.run_dir / name))
            other.listen()
        site.start()
        (row,) = rows_of(until_holds(site, Code.PROTECTION_LOWERED), Code.PROTECTION_LOWERED)
        assert "observe instead of failover" in row["text"] and "a daemon answers on" in row["text"]
        named = {check["name"] for check in site.ask(lambda client: client.doctor()) if check["ok"] is False}
        assert {"vault", "fail-over"} <= named


def test_every_condition_of_a_status_is_one_of_the_list(site: Site) -> None:
    for row in site.status()["conditions"]:
        kind = KINDS[Code(row["code"])]
        assert row["degrades"] is kind.degrades and row["text"] and row["remedy"]
