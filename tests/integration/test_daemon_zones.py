"""Guard zones under a real daemon on a simulated GPU: mpsd names hits and evicts only their clients."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from mpsd.base.errors import DeniedError, NotFoundError, UsageError
from mpsd.gpu.simulated.machine.memory import GRANULE
from tests.support.site import OTHER_UID, Program, Site, until

KIB = 1 << 10
MIB = 1 << 20
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")


@pytest.fixture(scope="module")
def served() -> Iterator[Site]:
    with Site(protect='"guard"') as started:
        yield started.start()


def zoned(site: Site, uid: int | None = None) -> tuple[Program, int]:
    """Return a client with an allocation of 1 MiB that has a guard zone behind it, and the address."""
    client = site.join(uid=uid)
    assert client.do(f"guard({str(site.run_dir / 'vault.sock')!r})")["result"] > 0
    return client, int(client.do(f"zoned.alloc({MIB // 4})")["result"])


def stray(client: Program, address: int, kernel: str = "store") -> None:
    client.order(f"zoned.launch({kernel!r}, {address})")


def record_of(site: Site, client: Program) -> Mapping[str, Any]:
    """Return the newest record that names the client for a guard hit, once mpsd has read its ledger."""

    def look() -> Mapping[str, Any] | None:
        hits = [f for f in site.faults() if f["class"] == "guard-hit" and f["offender"]["pid"] == client.pid]
        described = [f for f in hits if f["hit"]["allocation"] is not None]
        return described[-1] if described else None

    return until(look, f"a guard hit of {client.pid}") or {}


def finished(site: Site, client: Program, outcome: str) -> Mapping[str, Any]:
    def look() -> Mapping[str, Any] | None:
        found = record_of(site, client)
        return found if found["hit"]["outcome"] == outcome else None

    return until(look, f"{client.pid} is {outcome}") or {}


def row(site: Site, client: Program) -> Mapping[str, Any]:
    return next(c for c in site.status()["clients"] if c["pid"] == client.pid)


def policy(site: Site, client: Program, wanted: str, uid: int | None = None) -> Mapping[str, Any]:
    return site.ask(lambda c: c.zone_policy(client.pid, wanted), uid)


@pytest.mark.parametrize("kernel", ["store", "load", "atomic"])
def test_a_stray_access_into_a_zone_is_named_and_its_client_evicted(site: Site, kernel: str) -> None:
    survivor, (client, address) = site.join("work"), zoned(site)
    stray(client, address + MIB + 8 * KIB, kernel)
    client.wait()
    record = finished(site, client, "evicted")
    assert (record["offender"]["pid"], record["confidence"], record["victims"]) == (client.pid, "certain", [])
    assert int(record["address"], 16) == address + MIB + 8 * KIB
    found, hit = record["hit"]["allocation"], record["hit"]
    assert (found["relation"], found["offset"], found["bytes"]) == ("past", 8 * KIB, MIB)
    assert (found["order"], found["freed_s"], hit["zone"], hit["policy"]) == (1, None, "guard", "evict")
    assert (hit["kernel"], hit["alone"]) == (kernel, True)
    verb = {"store": "wrote", "load": "read", "atomic": "made an atomic access"}[kernel]
    said = f"pid {client.pid} {verb} 8 KiB past the end of a 1 MiB allocation made "
    assert record["summary"].startswith(said)
    assert record["summary"].endswith("; no other client was affected")
    site.gone(client)
    domain = site.status()["domains"][0]
    assert domain["state"] == "active"
    # The hit is the last fault of the domain, but did not take it.
    assert (domain["fault"]["id"], domain["fault"]["outcome"]) == (record["id"], "evicted")
    assert domain["last_fault"] is None
    assert survivor.finish()["rounds"] > 0


def test_a_ledger_outlives_its_connection_and_ends_with_its_process(site: Site) -> None:
    client, address = zoned(site)
    assert client.do("zoned.channel.close()") == {"result": None}
    until(lambda: row(site, client)["guard_zones"], "its zones are known")
    stray(client, address + MIB)
    client.wait()
    finished(site, client, "evicted")
    again, _ = zoned(site)
    assert again.do("zoned.channel.close()") == {"result": None}
    again.order("os.execv('/bin/sleep', ['sleep', '60'])")
    site.gone(again)
    assert site.join() is not None


def test_use_after_free_is_told_with_how_long_ago_that_was(site: Site) -> None:
    client, address = zoned(site)
    assert client.do(f"zoned.free({address})") == {"result": None}
    stray(client, address + 64 * KIB)
    client.wait()
    found = finished(site, client, "evicted")["hit"]["allocation"]
    assert (found["relation"], found["offset"], found["bytes"]) == ("inside", 64 * KIB, MIB)
    assert 0 <= found["freed_s"] <= found["age_s"]


def test_status_shows_zones_and_what_was_granted_goes_back(site: Site) -> None:
    client, _ = zoned(site)
    shown = row(site, client)
    zones = shown["guard_zones"]
    assert (zones["managed"], zones["managed_bytes"], zones["sparse"]) == (1, GRANULE, 0)
    assert (zones["far"], zones["far_bytes"]) == (0, 0)
    assert zones["granted_bytes"] >= GRANULE and zones["granted_zones"] == 4096
    assert (shown["guard_hits"], shown["zone_policy"], shown["frozen"]) == (0, "evict", False)
    stranger = site.join()
    assert row(site, stranger)["guard_zones"] is None
    client.die()
    site.gone(client)
    again, _ = zoned(site)
    assert row(site, again)["guard_zones"]["granted_bytes"] == zones["granted_bytes"]


def test_absorb_reports_once_and_lets_it_go_on(site: Site) -> None:
    client, address = zoned(site)
    assert policy(site, client, "absorb")["policy"] == "absorb"
    assert client.do(f"zoned.launch('store', {address + MIB})") == {"result": None}
    assert client.do("zoned.synchronize()") == {"result": None}
    assert record_of(site, client)["hit"]["outcome"] == "absorbed"
    # A range that the client frees and lays again faults again.
    for _ in range(3):
        again = f"dev.take_managed({address + MIB}, {GRANULE}) or dev.lay_managed({address + MIB}, {GRANULE})"
        assert client.do(again) == {"result": None}
        assert client.do(f"zoned.launch('store', {address + MIB}) or zoned.synchronize()") == {"result": None}
    site.until(lambda s: [c for c in s["clients"] if c["guard_hits"] == 4], "four hits are counted")
    until(lambda: record_of(site, client)["hit"]["count"] == 4, "the record says so")
    hits = [f for f in site.faults() if f["class"] == "guard-hit" and f["offender"]["pid"] == client.pid]
    assert len(hits) == 1
    client.finish()
    assert finished(site, client, "ended")["hit"]["alone"]


def test_a_frozen_client_is_never_asked_to_leave(site: Site) -> None:
    survivor, (client, address) = site.join("work"), zoned(site)
    policy(site, client, "freeze")
    stray(client, address + MIB)
    site.until(lambda s: [c for c in s["clients"] if c["pid"] == client.pid and c["frozen"]], "it is frozen")
    record = record_of(site, client)
    assert record["hit"]["outcome"] == "frozen"
    assert f"kill -CONT {client.pid}" in record["action"]
    answer = site.ask(lambda c: c.kill(client.pid))
    assert answer["outcome"] == "evicted"
    assert not any("terminate_client: done" in step for step in answer["steps"])
    assert client.wait() == -signal.SIGKILL
    assert finished(site, client, "evicted")["hit"]["policy"] == "freeze"
    assert survivor.finish()["rounds"] > 0


def test_a_frozen_client_that_is_continued_is_one_like_any_other(site: Site) -> None:
    client, address = zoned(site)
    policy(site, client, "freeze")
    stray(client, address + MIB)
    site.until(lambda s: [c for c in s["clients"] if c["pid"] == client.pid and c["frozen"]], "it is frozen")
    client.signal(signal.SIGCONT)
    site.until(
        lambda s: not [c for c in s["clients"] if c["pid"] == client.pid and c["frozen"]], "it goes on"
    )
    assert client.hear() == {"result": None}
    assert client.do("zoned.synchronize()") == {"result": None}


def test_prefetches_and_the_program_s_own_managed_memory_are_no_hits(site: Site) -> None:
    client, address = zoned(site)
    own = 0x7E00_0000_0000
    assert client.do(f"dev.lay_managed({own}, {64 * MIB})") == {"result": None}
    assert client.do(f"zoned.launch('prefetch', {address + MIB})") == {"result": None}
    for start in range(own, own + 48 * MIB, 16 * MIB):
        flood = f"[dev.launch('store', address={start} + n * {GRANULE}) for n in range(256)] and None"
        assert client.do(flood) == {"result": None}
        assert client.do("dev.synchronize()") == {"result": None}
    site.until(lambda s: s["counters"].get("zone_events_of_own_memory", 0) >= 100, "they were looked at")
    assert row(site, client)["guard_hits"] == 0
    assert not [f for f in site.faults() if f["offender"] and f["offender"]["pid"] == client.pid]
    # A hit among them is recorded, in a zone laid a moment ago.
    start, zone = own + 48 * MIB, own - MIB
    client.do(f"[dev.launch('load', address={start} + n * {GRANULE}) for n in range(64)] and None")
    client.do(f"zoned.lay({zone}, {MIB})")
    stray(client, zone + 2 * GRANULE)
    client.wait()
    assert finished(site, client, "evicted")["hit"]["count"] >= 1


def test_a_policy_is_an_administrator_s_and_of_a_client(site: Site) -> None:
    client, _ = zoned(site)
    with pytest.raises(UsageError, match="evict, absorb, freeze"):
        policy(site, client, "forgive")
    with pytest.raises(NotFoundError):
        site.ask(lambda c: c.zone_policy(os.getpid(), "absorb"))


def test_what_is_no_ledger_ends_the_connection(site: Site) -> None:
    client = site.join()
    word = "__import__('tests.support.vaulting', fromlist=['x'])"
    path = str(site.run_dir / "vault.sock")
    send = "(lambda v, c: (c.send(v.pack(v.Message(v.Kind.LEDGER)), [v.memory()]), c.is_closed()))"
    answer = client.do(f"({send})({word}, {word}.VaultClient({path!r}))[1]")
    assert answer == {"result": True}
    assert site.status()["counters"]["vault_closed_not_ledger"] == 1


@root_only
def test_a_user_sets_no_policy(site: Site) -> None:
    client = site.join(uid=OTHER_UID)
    with pytest.raises(DeniedError):
        policy(site, client, "absorb", uid=OTHER_UID)


def test_who_is_no_client_gets_no_zones(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.guardzones import GuardedDevice

    device: Any = None
    outsider = GuardedDevice(device, str(site.run_dir / "vault.sock"))
    assert outsider.granted == 0
    assert outsider.channel is not None
    outsider.channel.close()
    outsider.ledger.close()


def test_ctl_says_it_all(site: Site) -> None:
    import subprocess
    import sys

    def ctl(*words: str) -> str:
        command = [sys.executable, "-m", "mpsd.ctl", "--socket", site.socket, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=site.environ())
        return done.stdout + done.stderr

    client, address = zoned(site)
    assert ctl("policy", str(client.pid), "freeze") == f"guard hits of process {client.pid}: freeze\n"
    assert "zones 1 managed" in ctl("status", "-v")
    stray(client, address + MIB)
    site.until(lambda s: [c for c in s["clients"] if c["pid"] == client.pid and c["frozen"]], "it is frozen")
    shown = ctl("status")
    assert f"mpsd-ctl kill {client.pid}, or kill -CONT {client.pid}" in shown
    assert "1 guard hit" in ctl("status", "-v")
    record_of(site, client)
    assert f"pid {client.pid} wrote within 4 KiB past the end of a 1 MiB allocation made" in ctl("faults")


@pytest.fixture
def own() -> Iterator[Site]:
    """A daemon for a test that kills it."""
    with Site(protect='"guard"', guard__zone_policy='"absorb"') as started:
        yield started.start()


def test_the_next_daemon_gets_the_ledger_again_and_knows_policy_frozen_and_records(own: Site) -> None:
    frozen, address = zoned(own)
    evicted, other = zoned(own)
    policy(own, frozen, "freeze")
    policy(own, evicted, "evict")
    stray(frozen, address + MIB)
    own.until(lambda s: [c for c in s["clients"] if c["pid"] == frozen.pid and c["frozen"]], "it is frozen")
    before = record_of(own, frozen)
    own.kill()
    own.start()
    own.attached(frozen, evicted)
    shown = {c["pid"]: (c["zone_policy"], c["frozen"]) for c in own.status()["clients"]}
    assert shown == {frozen.pid: ("freeze", True), evicted.pid: ("evict", False)}
    assert record_of(own, frozen) == before
    # Until the client has connected again, no daemon hears of the accesses that its zones absorb.
    assert row(own, evicted)["guard_zones"] is None
    assert evicted.do(f"zoned.connect({str(own.run_dir / 'vault.sock')!r}) > 0") == {"result": True}
    stray(evicted, other + MIB)
    evicted.wait()
    assert finished(own, evicted, "evicted")["id"] > before["id"]
    answer = own.ask(lambda c: c.kill(frozen.pid))
    assert not any("terminate_client: done" in step for step in answer["steps"])
    own.empty()
