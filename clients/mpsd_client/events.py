"""Event callbacks: faults, evictions and ends of clients, delivered in a thread of their own.

An ordinary user receives events of its own clients and domains, faults that concern a client of its own, and,
without a name, the ends of other users' clients in a domain that it shares. Root and users in mpsd's group
receive all events.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from mpsd_client._protocol import errors
from mpsd_client.client import Client, EventStream, connect

log = logging.getLogger("mpsd_client.events")

FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 5.0
DAEMON_LOST, DAEMON_BACK = "daemon-lost", "daemon-back"


@dataclass(frozen=True, slots=True)
class Event:
    """One event of the daemon or of the watcher.

    `kind`: "fault", "client-evicting", "client-ended", "neighbour-ended", "domain-left", "domain-active" and
    further kinds of the daemon; "lost" if this reader was too slow for some events; "daemon-lost" and
    "daemon-back" of the watcher (events between these two are not delivered).
    `at`: Unix time [s]. `pid`: the client's, in the daemon's PID namespace. `data`: the daemon's message.
    """

    kind: str
    at: float
    domain: str | None = None
    pid: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mine(self) -> bool:
        """Whether the event names this process: as offender, victim, or client that fails over.

        Always False inside a PID namespace of its own.
        """
        moved = (row["pid"] for row in self.data.get("moved", ()))
        return os.getpid() in (self.pid, *self.data.get("victims", ()), *moved)

    def __str__(self) -> str:
        """Return a sentence for people."""
        who = "this process" if self.pid == os.getpid() else f"client {self.pid}"
        match self.kind:
            case "fault":
                named = f"by {who}" if self.pid else "by an unknown client"
                text = f"{self.data.get('title', 'a fault')} {named} ({self.data.get('confidence')})"
                return f"domain {self.domain} faulted: {text}"
            case "client-evicting":
                return f"{who} is being evicted from domain {self.domain}: {self.data.get('reason')}"
            case "client-ended":
                return f"domain {self.domain} lost a client: {who}"
            case "neighbour-ended":
                return f"domain {self.domain} lost a client: another user's"
            case "domain-left":
                why = f"{self.data.get('state')}, {self.data.get('why')}"
                return f"domain {self.domain} takes no new clients: {why}"
            case "lost":
                return f"{self.data.get('count')} events were missed"
            case "daemon-lost":
                return f"mpsd does not answer: {self.data.get('reason')}"
            case "daemon-back":
                return "mpsd answers again"
        what = f"{self.kind} of domain {self.domain}" if self.domain else self.kind
        return f"{what}: {who}" if self.pid else what


Callback = Callable[[Event], object]


def on_event(
    callback: Callback, *, kinds: Collection[str] | None = None, socket_path: str | None = None
) -> Watcher:
    """Call `callback(event)` for each event from now on, in a thread of its own, until close().

    `kinds`: deliver only these values of Event.kind. An exception of the callback is logged to the logger
    "mpsd_client.events" and does not stop the watcher. If the daemon restarts, the watcher connects again and
    reports "daemon-back". Raises NotRunningError, DeniedError, DeadlineError or ProtocolError if no daemon
    answers now.
    """
    return Watcher(callback, kinds, socket_path, required=True)


class Watcher:
    """A thread that delivers events, created by on_event() and session().on_event(). A context manager.

    `required`: raise if no daemon answers now, instead of trying to connect until close().
    """

    def __init__(
        self, callback: Callback, kinds: Collection[str] | None, socket_path: str | None, *, required: bool
    ) -> None:
        self._callback = callback
        self._kinds = None if kinds is None else frozenset(kinds)
        self._socket_path = socket_path
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._stream: EventStream | None = None
        self._pid = os.getpid()
        if required:
            self._connect()
        self._thread = threading.Thread(target=self._watch, name="mpsd-events", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        """Whether the watcher has a connection to a daemon at this moment."""
        return self._stream is not None

    def close(self) -> None:
        """Stop delivery: no callback starts after this returns, unless a callback calls close(). Idempotent.

        Does nothing in a forked child, which has no watcher thread and must not end its parent's
        connection."""
        if os.getpid() != self._pid:
            return
        self._closing.set()
        with self._lock:
            if self._stream is not None:
                self._stream.interrupt()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self) -> None:
        client = connect(self._socket_path)
        try:
            stream = client.subscribe()
        except BaseException:
            client.close()
            raise
        with self._lock:
            self._client, self._stream = client, stream
            if self._closing.is_set():
                stream.interrupt()

    def _disconnect(self) -> None:
        with self._lock:
            client, self._client, self._stream = self._client, None, None
            if client is not None:
                client.close()

    def _watch(self) -> None:
        pause_s, was_there = FIRST_PAUSE_S, self._stream is not None
        while not self._closing.is_set():
            try:
                if self._stream is None:
                    self._connect()
                    if was_there:
                        self._tell(Event(DAEMON_BACK, time.time()))
                was_there, pause_s = True, FIRST_PAUSE_S
                self._listen()
            except errors.MpsdError as error:
                reported = self._stream is not None
                self._disconnect()
                if reported and not self._closing.is_set():
                    self._tell(Event(DAEMON_LOST, time.time(), data={"reason": error.message}))
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
        self._disconnect()

    def _listen(self) -> None:
        assert self._stream is not None
        for message in self._stream:
            self._tell(_event(message))
            if self._closing.is_set():
                return

    def _tell(self, event: Event) -> None:
        if self._closing.is_set() or (self._kinds is not None and event.kind not in self._kinds):
            return
        try:
            self._callback(event)
        except Exception:
            log.exception("a callback failed at: %s", event)


def _event(message: Mapping[str, Any]) -> Event:
    offender = message.get("offender")
    pid = message.get("pid") if offender is None else offender.get("pid")
    return Event(
        str(message["kind"]), float(message.get("at", time.time())), message.get("domain"), pid, message
    )
