"""Attacks on mpsd-exporter: connections that ask for nothing."""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

from tests.support.site import DEADLINE_S, OTHER_UID, Site, as_user, until

IDLE = 40
"""More connections than the exporter serves at a time."""


def connected(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(DEADLINE_S)
    try:
        made.connect(path)
    except OSError:
        made.close()
        raise
    return made


@contextlib.contextmanager
def exporter(site: Site) -> Iterator[str]:
    """Run an exporter on a Unix socket that every user may connect to; yield its path."""
    path = site.base / "metrics.sock"
    command = [sys.executable, "-m", "mpsd.exporter", "--socket", site.socket, "--listen", f"unix:{path}"]
    with contextlib.ExitStack() as stack:
        process = subprocess.Popen(command, env=site.environ(), cwd="/")
        stack.callback(process.wait, DEADLINE_S)
        stack.callback(process.kill)

        def listens() -> socket.socket | None:
            with contextlib.suppress(OSError):
                return connected(str(path))
            return None

        until(listens, "the exporter listens").close()
        path.chmod(0o666)
        yield str(path)


def begin_scrape(path: str, stack: contextlib.ExitStack) -> http.client.HTTPConnection:
    scrape = http.client.HTTPConnection("localhost", timeout=DEADLINE_S)
    scrape.sock = stack.enter_context(connected(path))
    scrape.request("GET", "/metrics")
    return scrape


def test_idle_connections_do_not_stop_the_exporter(site: Site) -> None:
    """S9: a stranger's idle connections leave the scrapes of other users unharmed."""
    site.start()
    with exporter(site) as path, contextlib.ExitStack() as stack:
        with as_user(OTHER_UID):
            for number in range(IDLE):
                idle = stack.enter_context(connected(path))
                with contextlib.suppress(OSError):
                    # Half of them have begun a request.
                    idle.sendall(b"GET /metrics HTTP/1.1\r\nX: " * (number % 2))
        assert "mpsd_up 1.0" in begin_scrape(path, stack).getresponse().read().decode()


def test_scrapes_of_one_user_that_wait_for_the_daemon_leave_another_user_a_place(site: Site) -> None:
    """S9: while mpsd does not answer, a stranger's complete requests wait; no connection displaces them."""
    site.start()
    with exporter(site) as path, contextlib.ExitStack() as stack:
        os.kill(site.pid, signal.SIGSTOP)
        stack.callback(os.kill, site.pid, signal.SIGCONT)
        with as_user(OTHER_UID):
            for _ in range(IDLE):
                waits = stack.enter_context(connected(path))
                with contextlib.suppress(OSError):
                    waits.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
                # Until the exporter refuses one: then every connection before it is waiting.
                if select.select([waits], [], [], 0.1)[0]:
                    break
        scrape = begin_scrape(path, stack)
        os.kill(site.pid, signal.SIGCONT)
        assert "mpsd_up" in scrape.getresponse().read().decode()
