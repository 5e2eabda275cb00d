"""The listener: connections, requests and answers, and events for subscribers.

Any local user may connect. Rights are checked in-band, so that a refusal is a clear "denied" and not a hang.
Peers are identified by the kernel's credentials, of the connection and of each piece of data.

mpsd.wire.zmtp speaks the ROUTER's half of ZMTP, so any DEALER can talk to this socket. There is no libzmq in
the daemon: it aborts its process when accept(2) finds no free descriptor, and cannot bound its connections.

No peer can block the daemon: sending never waits, every request has a deadline, and all data kept for a peer
is bounded (Limits, MAX_UNSENT).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from mpsd.base.logs import Repeated
from mpsd.peers.connection import Connection, Frame
from mpsd.peers.credentials import Credentials, Peer
from mpsd.peers.quotas import Account
from mpsd.peers.receive import Budgets, Refused, receive
from mpsd.peers.requests import Handler, Outcome, Requests
from mpsd.peers.server import DoorLimits, Server, Surroundings
from mpsd.wire import codec
from mpsd.wire.messages import SUBSCRIBE, ErrorReply, EventMessage, Gap, ProtocolError, Request

log = structlog.get_logger("mpsd.peers")

Shown = Callable[[Peer, Mapping[str, object]], Mapping[str, object]]
Kept = tuple[int, Collection[int], Mapping[str, object]]
History = Callable[[int], Iterable[Kept]]

_READ_BYTES = 8 << 10
_BATCH = 8
"""Requests of one connection that are begun in one turn of the loop."""
_SLOWED_S = 0.1
_M_MMAP_THRESHOLD = -3
_CHUNK_BYTES = 64 << 10
_HANDED_ON = ErrorReply(
    None, "denied", "this connection belongs to another user", "connect again as the user that asks"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of peers. `connections` count per user, and so do `pending` (requests being served) of one of
    its accounts; all accounts of a user together may have twice as many.

    `rate`: requests per second of one user over all connections; `burst`: at once. Beyond these, requests are
    not read for a while. `stalled_s`: time within which a peer reads its answers.
    """

    connections: int = 32
    all_connections: int = 512
    reserve: int = 32
    pending_per_connection: int = 16
    pending: int = 64
    queued_events: int = 1024
    offences: int = 20
    handshake_s: float = 5.0
    rate: float = 500.0
    burst: float = 1000.0
    stalled_s: float = 30.0


class Listener:
    """A server of requests, by `handler`, and a publisher of events.

    `handler(peer, request)` returns the result. If it raises MpsdError, that becomes the error reply. It is
    called for every operation except "subscribe". Arguments are checked against the table before, and so is
    Right.ADMIN. The handler itself checks that the client belongs to the peer.

    `history(since)` returns the kept events with greater numbers (number, owners, event), for subscribers
    that ask for them. `gap(since)` returns why those are incomplete. `shown(peer, event)` returns the part of
    an event that this peer may see.
    """

    def __init__(
        self,
        endpoint_path: str | os.PathLike[str],
        handler: Handler,
        group: str = "mpsd",
        *,
        history: History | None = None,
        gap: Callable[[int], Gap] = lambda _: Gap.NONE,
        shown: Shown = lambda _, event: event,
        limits: Limits | None = None,
        surroundings: Surroundings | None = None,
    ) -> None:
        self.path = Path(endpoint_path)
        self._handler = handler
        self._history = history
        self._gap = gap
        self._shown = shown
        self._limits = chosen = limits or Limits()
        self._log = Repeated(log)
        around = surroundings or Surroundings.of(group)
        self._requests = Requests(self._handle, around.rights, self._answer, chosen.pending)
        self._budgets = Budgets(chosen.rate, chosen.burst)
        self.server = Server(
            self.path,
            socket.SOCK_STREAM,
            "control",
            DoorLimits(chosen.connections, chosen.all_connections, chosen.reserve, chosen.handshake_s),
            around,
            self._make,
            self._opened,
            Connection.close,
        )

    async def start(self) -> None:
        """Bind the socket and start serving.

        Raises ConfigError for a path that cannot be bound, AlreadyRunningError if a daemon listens there.
        """
        self._loop = asyncio.get_running_loop()
        _return_large_buffers()
        self.server.start()

    def publish(self, event: Mapping[str, object], owners: Collection[int], seq: int) -> None:
        """Queue an event for subscribers that may see it: administrators and these users. Never waits."""
        frames: dict[int | None, bytes | None] = {}
        for connection in list(self.server.connections):
            peer = connection.peer
            if not connection.subscribed or peer is None or not peer.may_see(owners):
                continue
            viewer = None if peer.admin else peer.uid
            if viewer not in frames:
                frames[viewer] = self._event_frame(self._shown(peer, event), seq)
            if (frame := frames[viewer]) is not None:
                connection.publish(seq, frame)
                self._flush(connection)

    async def close(self) -> None:
        """Stop serving: abandon requests, and remove the socket's file if it is still this one."""
        self.server.close()
        await self._requests.close()

    # Connections

    def _make(self, sock: socket.socket, credentials: Credentials, account: Account) -> Connection:
        limits = self._limits
        return Connection(sock, credentials, account, limits.pending_per_connection, limits.queued_events)

    def _opened(self, connection: Connection) -> None:
        self._flush(connection)
        self.server.watch(connection, self._read)

    def _read(self, connection: Connection) -> None:
        """Read what one process has sent. The loop serves other connections before the next piece."""
        try:
            received = receive(connection.socket, _READ_BYTES)
            if not received.data:
                self.server.end(connection)
                return
            connection.check_sender(received.sender)
            connection.feed(received.data)
            self._take_requests(connection)
        except BlockingIOError:
            pass
        except Refused as error:
            if str(error) == "sender":
                connection.tell(_HANDED_ON)
                self._flush(connection)
            self.server.end(connection, str(error))
        except OSError:
            self.server.end(connection)

    def _take_requests(self, connection: Connection) -> None:
        """Begin the requests in the input. If some are left, nothing more is read until they are begun."""
        connection.later = None
        try:
            delay_s = self._begin_some(connection)
        except ProtocolError as error:
            self.server.end(connection, "protocol", error.message)
            return
        except Exception as error:
            # An error of one connection, in the daemon or the peer, must not end the service.
            self._log.error("connection dropped", error=repr(error), exc_info=True)
            self.server.end(connection, "internal")
            return
        if delay_s is None:
            self.server.watch(connection, self._read)
        else:
            self.server.unwatch(connection)
        self._flush(connection)
        if delay_s is not None and connection.open and connection.stalled is None:
            connection.later = self._loop.call_later(delay_s, self._take_requests, connection)

    def _begin_some(self, connection: Connection) -> float | None:
        """Begin a few requests. Return when to begin the next ones [s]; None: more input is needed."""
        for _ in range(_BATCH):
            if not self._budgets.allows(connection.account) and not connection.privileged:
                self.server.counters["slowed"] += 1
                return _SLOWED_S
            request = connection.next_request(self._loop.time())
            if connection.offences > self._limits.offences:
                self.server.end(connection, "broken_requests")
                return None
            if request is None:
                return 0.0 if connection.full else None
            self._budgets.charge(connection.account)
            self._requests.begin(connection, request)
        return 0.0

    # Sending

    def _flush(self, connection: Connection) -> None:
        """Send what can be sent now, and the rest when the peer has read."""
        if not connection.open:
            return
        try:
            while chunk := connection.next_chunk():
                connection.sent(connection.socket.send(chunk, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL))
        except BlockingIOError:
            self.server.watch_writing(connection, self._flush)
        except OSError:
            self.server.end(connection)
            return
        else:
            self.server.unwatch_writing(connection)
        self._note_full(connection)

    def _note_full(self, connection: Connection) -> None:
        if connection.full and connection.stalled is None:
            self.server.unwatch(connection)
            end = partial(self.server.end, connection, "does_not_read")
            connection.stalled = self._loop.call_later(self._limits.stalled_s, end)
        elif not connection.full and connection.stalled is not None:
            connection.stalled.cancel()
            connection.stalled = None
            if connection.later is None:
                connection.later = self._loop.call_soon(self._take_requests, connection)

    # Requests

    async def _handle(self, peer: Peer, request: Request) -> Mapping[str, object]:
        # _answer settles a subscription together with sending its reply.
        return {} if request.op == SUBSCRIBE else await self._handler(peer, request)

    def _answer(self, connection: Connection, request: Request, outcome: Outcome, peer: Peer | None) -> None:
        if isinstance(outcome, ErrorReply):
            connection.refuse(outcome)
        elif request.op == SUBSCRIBE and peer is not None:
            self._subscribe(connection, peer, request)
        else:
            self._reply(connection, request, outcome)
        self._flush(connection)

    def _reply(self, connection: Connection, request: Request, result: Mapping[str, object]) -> None:
        try:
            connection.reply(request.id, result)
        except ProtocolError as error:
            self._log.error("result cannot be sent", request.op, op=request.op, error=error.message)
            connection.refuse(ErrorReply(request.id, "internal", error.message, error.remedy))

    def _subscribe(self, connection: Connection, peer: Peer, request: Request) -> None:
        """Send the reply, then the kept events that were asked for.

        Nothing is awaited between reading those events and subscribing, so no event is missed or sent twice.
        """
        if not connection.session.waits(request.id):
            return
        since = request.args.get("since_id")
        gap = self._gap(since) if isinstance(since, int) else Gap.NONE
        # A number that was never used is unknown: send all kept events.
        retained = self._retained_for(peer, 0 if gap is Gap.NEVER else since)
        connection.peer = peer
        connection.reply(request.id, {"kept": len(retained)} | ({"gap": gap.value} if gap else {}))
        for seq, frame in retained:
            connection.publish(seq, frame)

    def _retained_for(self, peer: Peer, since: object) -> list[tuple[int, Frame]]:
        """Return the kept events; their frames are made when they are sent, so waiting ones cost little."""
        if not isinstance(since, int) or self._history is None:
            return []
        seen = [(seq, event) for seq, owners, event in self._history(since) if peer.may_see(owners)]
        return [
            (seq, partial(self._kept_frame, peer, event, seq))
            for seq, event in seen[-self._limits.queued_events :]
        ]

    def _kept_frame(self, peer: Peer, event: Mapping[str, object], seq: int) -> bytes | None:
        try:
            return self._event_frame(self._shown(peer, event), seq)
        except Exception as error:
            # A bug in the view of one event must not end the connection, or stop its other events.
            self._log.error("event cannot be shown", seq=seq, error=repr(error), exc_info=True)
            return None

    def _event_frame(self, event: Mapping[str, object], seq: int) -> bytes | None:
        try:
            return codec.encode(EventMessage(seq, event))
        except ProtocolError as error:
            self._log.error("event cannot be sent", seq=seq, error=error.message)
            return None


def _return_large_buffers() -> None:
    """Let the C library return large buffers to the kernel when they are freed, as it does at first.

    By default it raises its limit with each large buffer that is freed (mallopt(3)). The memory of answers
    would then stay with the daemon for good.
    """
    with contextlib.suppress(OSError, AttributeError):  # Another C library.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _CHUNK_BYTES)
