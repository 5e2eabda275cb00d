"""Fault callbacks: a program receives the events of its domain, as administrator and as ordinary user."""

from __future__ import annotations

import errno
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable

import pytest

import mpsd_client
from mpsd_client import Event
from tests.support.site import DEADLINE_S, OTHER_UID, Site, as_user, until

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")


class Heard:
    """A callback that can be waited for."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Event] = queue.Queue()
        self.all: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.all.append(event)
        self._queue.put(event)

    def until(self, holds: Callable[[Event], bool]) -> Event:
        while True:
            event = self._queue.get(timeout=DEADLINE_S)
            if holds(event):
                return event

    def kind(self, kind: str) -> Event:
        return self.until(lambda event: event.kind == kind)


def test_an_eviction_is_announced_before_the_end(site: Site) -> None:
    heard = Heard()
    with mpsd_client.on_event(heard, socket_path=site.socket) as watcher:
        assert watcher.connected
        evicted, neighbour = site.join(), site.join()
        site.ask(lambda client: client.kill(evicted.pid, reason="to be told"))
        announced = heard.kind("client-evicting")
        assert (announced.pid, announced.data["reason"]) == (evicted.pid, "to be told")
        assert str(announced) == (
            f"client {evicted.pid} is being evicted from domain {announced.domain}: to be told"
        )
        ended = heard.kind("client-ended")
        assert (ended.pid, ended.domain, ended.mine) == (evicted.pid, announced.domain, False)
        assert str(ended) == f"domain {ended.domain} lost a client: client {evicted.pid}"
        assert neighbour.do("dev.alloc(16) > 0") == {"result": True}
    count = len(heard.all)
    neighbour.die()
    site.until(lambda s: neighbour.pid not in {c["pid"] for c in s["clients"]}, "its end is noticed")
    assert len(heard.all) == count


def test_a_fault_is_told_with_its_offender_and_its_end_of_service(site: Site) -> None:
    heard, victims = Heard(), Heard()
    offender, victim = site.join(), site.join()
    with (
        mpsd_client.on_event(heard, socket_path=site.socket),
        mpsd_client.on_event(victims, kinds=["domain-left"], socket_path=site.socket),
    ):
        offender.do("dev.launch('store')")
        fault = heard.until(lambda e: e.kind == "fault" and e.pid is not None)
        assert (fault.pid, victim.pid in fault.data["victims"]) == (offender.pid, True)
        assert str(fault).startswith(f"domain {fault.domain} faulted: ")
        left = victims.kind("domain-left")
        assert left.domain == fault.domain and "takes no new clients" in str(left)
        assert {e.kind for e in victims.all} == {"domain-left"}


def test_a_callback_that_fails_ends_nothing(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    heard, failed = Heard(), threading.Event()

    def fails(event: Event) -> None:
        heard(event)
        if not failed.is_set():
            failed.set()
            raise RuntimeError("on purpose")

    with (
        caplog.at_level(logging.ERROR, "mpsd_client.events"),
        mpsd_client.on_event(fails, socket_path=site.socket, kinds={"client-ended"}),
    ):
        for _ in range(2):
            program = site.join()
            program.die()
            assert heard.kind("client-ended").pid == program.pid
    assert ["on purpose" in str(r.exc_info) for r in caplog.records] == [True]


def test_a_callback_may_close_its_watcher(site: Site) -> None:
    closed = threading.Event()

    def close(event: Event) -> None:
        watcher.close()
        closed.set()

    watcher = mpsd_client.on_event(close, socket_path=site.socket, kinds={"client-ended"})
    site.join().die()
    assert closed.wait(DEADLINE_S)
    watcher.close()


def test_the_next_daemon_is_found(site: Site) -> None:
    heard = Heard()
    with mpsd_client.on_event(heard, socket_path=site.socket):
        program = site.join()
        site.kill()
        assert "mpsd does not answer" in str(heard.kind("daemon-lost"))
        site.start()
        heard.kind("daemon-back")
        program.die()
        assert heard.kind("client-ended").pid == program.pid


def test_a_forked_child_that_closes_it_takes_nothing_from_its_parent(site: Site) -> None:
    heard = Heard()
    with mpsd_client.on_event(heard, socket_path=site.socket) as watcher:
        child = os.fork()
        if not child:
            try:
                watcher.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0) == (child, 0)
        program = site.join()
        program.die()
        assert heard.kind("client-ended").pid == program.pid
        assert "daemon-lost" not in {event.kind for event in heard.all}


def test_the_next_daemon_is_found_though_no_file_could_be_opened_meanwhile(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, refused = Heard(), threading.Event()

    def full(*_: object) -> socket.socket:
        refused.set()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with mpsd_client.on_event(heard, socket_path=site.socket):
        site.kill()
        monkeypatch.setattr("mpsd_client.transport.socket.socket", full)
        heard.kind("daemon-lost")
        assert refused.wait(DEADLINE_S)
        monkeypatch.undo()
        site.start()
        heard.kind("daemon-back")


def test_without_a_daemon(site: Site) -> None:
    site.kill()
    heard = Heard()
    with pytest.raises(mpsd_client.NotRunningError):
        mpsd_client.on_event(heard, socket_path=site.socket)
    with mpsd_client.session(site.socket) as session:
        watcher = session.on_event(heard)
        assert not watcher.connected
        site.start()
        until(lambda: watcher.connected, "it found the daemon")
        program = site.join()
        program.die()
        assert heard.kind("client-ended").pid == program.pid
        # Finding the first daemon is no "daemon-back": no daemon was lost before it.
        assert "daemon-back" not in {event.kind for event in heard.all}


@root_only
def test_another_user_in_a_shared_domain_hears_that_somebody_ended_and_not_who(site: Site) -> None:
    heard = Heard()
    ours = site.program(environ=site.client_environ(shared=True))
    theirs = site.program(uid=OTHER_UID, environ=site.client_environ(shared=True))
    site.attached(ours, theirs)
    with as_user(OTHER_UID):
        watcher = mpsd_client.on_event(heard, socket_path=site.socket)
    with watcher:
        other = site.program(environ=site.client_environ(shared=True))
        site.attached(other)
        other.die()
        told = heard.kind("neighbour-ended")
        assert (told.pid, set(told.data)) == (None, {"seq", "kind", "at", "domain"})
        assert str(told) == f"domain {told.domain} lost a client: another user's"
        # The program receives the end of its domain and the events of its own faults.
        ours.do("dev.launch('store')")
        assert heard.kind("domain-left").domain == told.domain
        assert not [e for e in heard.all if e.pid in (ours.pid, other.pid)]
