"""Fault callbacks: what happens to this user's clients and domains, told by a thread of its own.

An ordinary user is told of its own clients and domains, of faults that concern a client of its own, and,
without a name, of other users' clients that end in a domain which it shares. Root and the group hear of all.
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
    """One thing that happened. `kind` is the daemon's word: "fault", "client-evicting", "client-ended",
    "neighbour-ended", "domain-left", "domain-active" and others, or "lost" (events that this reader was too
    slow for), or the watcher's own: "daemon-lost", "daemon-back" (what happened between is not told).

    `at`: calendar seconds. `pid`: the client's, in the daemon's counting. `data`: all that the daemon said.
    """

    kind: str
    at: float
    domain: str | None = None
    pid: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mine(self) -> bool:
        """Whether it names this process. In a container that counts processes anew it never does."""
        victims = self.data.get("victims", ())
        return os.getpid() in (self.pid, *victims)

    def __str__(self) -> str:
        """A sentence for people."""
        who = "this process" if self.pid == os.getpid() else f"client {self.pid}"
        match self.kind:
            case "fault":
                named = f"by {who}" if self.pid else "by nobody known"
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
                return f"domain {self.domain} takes no new clients any more: {why}"
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

    `kinds`: only these, by Event.kind. An exception of the callback is logged ("mpsd_client.events") and
    ends nothing. The daemon may be restarted meanwhile: the watcher finds it again and says so.
    Raises NotRunningError, DeniedError, DeadlineError, ProtocolError where no daemon answers now.
    """
    return Watcher(callback, kinds, socket_path, required=True)


class Watcher:
    """Made by on_event() and session().on_event(). As a context, it is closed at the end.

    `required`: raise where no daemon answers now, instead of looking for one until close().
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
        """Whether a daemon is listened to at this moment."""
        return self._stream is not None

    def close(self) -> None:
        """No callback is begun after this, unless it is called from one. Idempotent. Does nothing in a forked
        child, which has no thread that listens, and whose parent's connection is not its own to end."""
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
                told = self._stream is not None
                self._disconnect()
                if told and not self._closing.is_set():
                    self._tell(Event(DAEMON_LOST, time.time(), data={"reason": error.message}))
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
        self._disconnect()

    def _listen(self) -> None:
        assert self._stream is not None
        for said in self._stream:
            self._tell(_event(said))
            if self._closing.is_set():
                return

    def _tell(self, event: Event) -> None:
        if self._closing.is_set() or (self._kinds is not None and event.kind not in self._kinds):
            return
        try:
            self._callback(event)
        except Exception:
            log.exception("a callback failed at: %s", event)


def _event(said: Mapping[str, Any]) -> Event:
    offender = said.get("offender")
    pid = said.get("pid") if offender is None else offender.get("pid")
    return Event(str(said["kind"]), float(said.get("at", time.time())), said.get("domain"), pid, said)
