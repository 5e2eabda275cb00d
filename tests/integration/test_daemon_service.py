"""A running daemon under a service manager: readiness, watchdog, and its stored descriptors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.manager import Manager
from tests.support.site import Site, until


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as made:
        yield made


@pytest.fixture
def manager(site: Site) -> Iterator[Manager]:
    with Manager(site.base, store_max=512) as made:
        yield made


def start(site: Site, manager: Manager, **environ: str) -> None:
    """Start the daemon as a service and wait until it reports readiness."""
    manager.start(site.command(), site.environ() | environ)
    manager.wait_for("READY", "1")


def test_ready_comes_when_requests_are_answered_and_stopping_at_the_end(site: Site, manager: Manager) -> None:
    manager.start(site.command(), site.environ())
    assert "1 GPU" in manager.wait_for("READY", "1")["STATUS"]
    assert manager.process is not None
    assert site.status()["pid"] == manager.process.pid
    manager.process.terminate()
    manager.wait_for("STOPPING", "1")
    assert manager.process.wait(20) == 0


def test_the_watchdog_is_fed_twice_in_its_interval(site: Site, manager: Manager) -> None:
    start(site, manager, WATCHDOG_USEC="200000")
    for _ in range(3):
        manager.wait_for("WATCHDOG", "1")


def test_leases_are_in_the_managers_store_and_come_back_from_it(site: Site, manager: Manager) -> None:
    start(site, manager)
    worker, client = site.join("work"), site.join()
    assert site.keeper() is None
    stored = manager.names()
    for pid in (worker.pid, client.pid):
        assert [n for n in stored if n.startswith("lease.") and f".{pid}." in n]
    client.occupy()
    manager.kill()
    client.die()
    # Now only the manager holds the descriptors that keep the exited client's kernel harmless.
    assert site.node(op="work", pid=client.pid)["busy"] == 1
    start(site, manager)
    site.attached(worker)
    site.until(lambda s: [d for d in s["dead"] if d["pid"] == client.pid], "its lease came back")
    site.end_work(client)
    site.gone(client)
    until(lambda: not any(f".{client.pid}." in n for n in manager.names()), "it is out of the store")
    assert worker.finish()["rounds"] > 0
    site.gone(worker)
    until(lambda: not manager.names(), "the store is empty")
    assert not site.faults()


def test_a_manager_without_a_store_leaves_it_to_the_keeper(site: Site) -> None:
    with Manager(site.base, tells=False) as manager:
        start(site, manager)
        client = site.join()
        assert site.keeper() is not None
        assert not manager.names()
        assert "lease" in site.status()["clients"][0]["protections"]
        client.finish()


def test_what_a_keeper_held_moves_to_the_manager(site: Site, manager: Manager) -> None:
    site.start()
    client = site.join()
    site.kill()
    start(site, manager)
    status = site.attached(client)
    assert "lease" in status["clients"][0]["protections"]
    assert any(f".{client.pid}." in n for n in manager.names())
    until(lambda: site.keeper() is None, "the keeper has ended")
    assert client.do("dev.alloc(16) > 0") == {"result": True}


def test_a_full_store_is_told_of_and_clients_are_served_all_the_same(site: Site) -> None:
    # Space for one lease: its three open files, and the list of them.
    with Manager(site.base, store_max=5) as manager:
        start(site, manager)
        clients = [site.join() for _ in range(3)]
        rows = {c["pid"]: c for c in site.attached(*clients)["clients"]}
        problems = [rows[c.pid]["problem"] for c in clients]
        assert problems[0] == ""
        assert "not in the descriptor store" in problems[-1]
        assert all("lease" in rows[c.pid]["protections"] for c in clients)
        assert any("2 lease(s) are not in the descriptor store" in p for p in site.status()["problems"])
        # With free space again, a waiting lease is stored.
        clients[0].finish()
        site.gone(clients[0])
        site.until(lambda s: sum(not c["problem"] for c in s["clients"]) == 1, "another one is stored")
