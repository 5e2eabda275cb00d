"""The listener: connections that come and go, what they ask, events for those who subscribed.

Any local user may connect; rights are checked in-band, so that the answer is a clear "denied" and not
a hang. Peers are known by the kernel's credentials, which libzmq hands over with every message.

The pyzmq socket is of type STREAM, with the ROUTER's half of ZMTP spoken by mpsd.wire.zmtp: any DEALER
can talk to it. libzmq's own ROUTER collects a message of endlessly many frames without limit (measured:
350 MB in a second from one unprivileged peer, kept after it had gone), says nothing about connections
that come and go, and cannot close one. STREAM bounds what it takes in and tells who comes and goes.

Nothing that a peer does or fails to do blocks the daemon: sending never waits, every request has a
deadline, everything that is kept for a peer is bounded (Limits).
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
import zmq

from mpsd.listener.connection import Connection
from mpsd.listener.peers import Peer, Rights, log_fields, parse_address
from mpsd.listener.requests import Handler, Outcome, Requests
from mpsd.listener.stream import GoneError, Stream
from mpsd.wire import codec
from mpsd.wire.messages import SUBSCRIBE, ErrorReply, EventMessage, Gap, ProtocolError, Request

log = structlog.get_logger("mpsd.listener")

Shown = Callable[[Peer, Mapping[str, object]], Mapping[str, object]]
Kept = tuple[int, Collection[int], Mapping[str, object]]
History = Callable[[int], Iterable[Kept]]

_FIRST_RETRY_S = 0.002
_LAST_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Limits:
    """What peers may take. `connections` and `pending` (requests under way) count per user."""

    connections: int = 32
    all_connections: int = 512
    pending_per_connection: int = 16
    pending: int = 64
    queued_events: int = 1024
    offences: int = 20
    handshake_s: float = 5.0


class Listener:
    """Serves requests with `handler` and publishes events.

    `handler(peer, request)` returns the result; an MpsdError it raises becomes the error reply. It is
    called for every operation but "subscribe", with arguments checked against the table and, for
    operations that need Right.ADMIN, only for administrators; whose client something is, it checks
    itself. `history(since)` gives the kept events (number, owners, event) with greater numbers, for
    subscribers that ask for them; `gap(since)` why those are not all. `shown(peer, event)`: what of an event
    this peer is to see.
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
    ) -> None:
        self.path = Path(endpoint_path)
        self._handler = handler
        self._history = history
        self._gap = gap
        self._shown = shown
        self._limits = limits or Limits()
        self._requests = Requests(self._handle, Rights(group), self._answer, self._limits.pending)
        self._connections: dict[bytes, Connection] = {}
        self._per_user: Counter[int] = Counter()
        self._retries: dict[bytes, asyncio.TimerHandle] = {}
        # Gone before they could be looked at; their end is still to be told.
        self._stillborn: set[bytes] = set()
        self._stream: Stream | None = None
        self._receiver: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bind and begin to serve.

        Raises ConfigError for a path that cannot be bound, AlreadyRunningError when one listens there.
        """
        self._stream = Stream(self.path)
        self._receiver = asyncio.create_task(self._receive(self._stream))

    def publish(self, event: Mapping[str, object], owners: Collection[int], seq: int) -> None:
        """Push an event to subscribers that may see it: administrators and these users. Never waits."""
        frames: dict[int | None, bytes | None] = {}
        for connection in list(self._connections.values()):
            peer = connection.peer
            if not connection.subscribed or peer is None or not peer.may_see(owners):
                continue
            viewer = None if peer.admin else peer.uid
            if viewer not in frames:
                frames[viewer] = _event_frame(self._shown(peer, event), seq)
            if (frame := frames[viewer]) is not None:
                connection.publish(seq, frame)
                self._flush(connection)

    async def close(self) -> None:
        """Stop serving: what is under way is abandoned, the socket's file goes if it is still ours."""
        stream, self._stream = self._stream, None
        if stream is None or self._receiver is None:
            return
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        await self._requests.close()
        for connection in list(self._connections.values()):
            self._forget(connection)
        await stream.close()

    # Connections

    async def _receive(self, stream: Stream) -> None:
        while True:
            routing_id, data = await stream.receive()
            try:
                self._take(stream, routing_id, data)
            except Exception as error:
                # One connection's trouble, ours or theirs, must not end the service for all.
                log.error("connection dropped", error=repr(error), exc_info=True)
                self._drop(routing_id)
            # A socket that always has something to read would never let the loop see anything else.
            await asyncio.sleep(0)

    def _take(self, stream: Stream, routing_id: bytes, data: zmq.Frame) -> None:
        connection = self._connections.get(routing_id)
        if len(data) > 0:
            if connection is not None and not connection.session.closed:
                self._hear(connection, data.bytes)
        elif connection is not None:
            self._forget(connection)
        elif routing_id in self._stillborn:
            self._stillborn.discard(routing_id)
        else:
            self._accept(stream, routing_id, data)

    def _accept(self, stream: Stream, routing_id: bytes, first: zmq.Frame) -> None:
        credentials = parse_address(str(first.get("Peer-Address")))
        grip = stream.grip(first, credentials) if credentials is not None else None
        if credentials is None or grip is None:
            self._stillborn.add(routing_id)
            return
        connection = Connection(
            routing_id, credentials, grip, self._limits.pending_per_connection, self._limits.queued_events
        )
        uid = credentials.uid
        crowded = len(self._connections) >= self._limits.all_connections and uid != 0
        self._connections[routing_id] = connection
        self._per_user[uid] += 1
        if crowded or self._per_user[uid] > self._limits.connections:
            log.warning("too many connections", **log_fields(credentials))
            self._drop(routing_id)
            return
        self._flush(connection)
        asyncio.get_running_loop().call_later(self._limits.handshake_s, self._expect_open, connection)

    def _expect_open(self, connection: Connection) -> None:
        if not connection.open and not connection.session.closed:
            self._drop(connection.routing_id)

    def _hear(self, connection: Connection, data: bytes) -> None:
        try:
            requests = connection.receive(data, asyncio.get_running_loop().time())
        except ProtocolError as error:
            log.info("not a client", error=error.message, **log_fields(connection.credentials))
            self._drop(connection.routing_id)
            return
        for request in requests:
            self._requests.begin(connection, request)
        self._flush(connection)
        if connection.offences > self._limits.offences:
            log.info("too many broken requests", **log_fields(connection.credentials))
            self._drop(connection.routing_id)

    def _drop(self, routing_id: bytes) -> None:
        """Close a connection from this side. It counts until it has gone indeed."""
        connection = self._connections.get(routing_id)
        if connection is not None:
            connection.close()
            self._stop_retrying(connection)
            connection.grip.end()

    def _forget(self, connection: Connection) -> None:
        connection.close()
        self._stop_retrying(connection)
        if self._connections.pop(connection.routing_id, None) is not None:
            connection.grip.release()
            uid = connection.credentials.uid
            self._per_user[uid] -= 1
            if not self._per_user[uid]:
                del self._per_user[uid]

    # Sending

    def _flush(self, connection: Connection, delay_s: float = _FIRST_RETRY_S) -> None:
        """Send what can be sent now; come back for the rest, less often the longer it takes."""
        if self._stream is None or connection.session.closed or connection.routing_id in self._retries:
            return
        try:
            while chunk := connection.next_chunk():
                if not self._stream.send(connection.routing_id, chunk):
                    break
                connection.sent()
                delay_s = _FIRST_RETRY_S
            else:
                return
        except GoneError:
            return  # The stream will say so.
        if connection.overfull:
            log.warning("does not read its answers", **log_fields(connection.credentials))
            self._drop(connection.routing_id)
            return
        again = partial(self._retry, connection, min(2 * delay_s, _LAST_RETRY_S))
        self._retries[connection.routing_id] = asyncio.get_running_loop().call_later(delay_s, again)

    def _retry(self, connection: Connection, delay_s: float) -> None:
        self._retries.pop(connection.routing_id, None)
        self._flush(connection, delay_s)

    def _stop_retrying(self, connection: Connection) -> None:
        timer = self._retries.pop(connection.routing_id, None)
        if timer is not None:
            timer.cancel()

    # Requests

    async def _handle(self, peer: Peer, request: Request) -> Mapping[str, object]:
        # What a subscriber is told is settled in _answer, in one go with the sending of it.
        return {} if request.op == SUBSCRIBE else await self._handler(peer, request)

    def _answer(self, connection: Connection, request: Request, outcome: Outcome, peer: Peer | None) -> None:
        if isinstance(outcome, ErrorReply):
            connection.refuse(outcome)
        elif request.op == SUBSCRIBE and peer is not None:
            self._subscribe(connection, peer, request)
        else:
            self._reply(connection, request, outcome)
        self._flush(connection)

    @staticmethod
    def _reply(connection: Connection, request: Request, result: Mapping[str, object]) -> None:
        try:
            connection.reply(request.id, result)
        except ProtocolError as error:
            log.error("result cannot be sent", op=request.op, error=error.message)
            connection.refuse(ErrorReply(request.id, "internal", error.message, error.remedy))

    def _subscribe(self, connection: Connection, peer: Peer, request: Request) -> None:
        """The reply, then the kept events that were asked for. Nothing is awaited between reading them
        and being subscribed, so no event is missed or told twice."""
        if not connection.session.waits(request.id):
            return
        since = request.args.get("since_id")
        gap = self._gap(since) if isinstance(since, int) else Gap.NONE
        # Of a number that was never given nothing is known: it gets all that there is.
        kept = self._kept_for(peer, 0 if gap is Gap.NEVER else since)
        connection.peer = peer
        connection.reply(request.id, {"kept": len(kept)} | ({"gap": gap.value} if gap else {}))
        for seq, frame in kept:
            connection.publish(seq, frame)

    def _kept_for(self, peer: Peer, since: object) -> list[tuple[int, bytes]]:
        if not isinstance(since, int) or self._history is None:
            return []
        seen = [(seq, event) for seq, owners, event in self._history(since) if peer.may_see(owners)]
        frames = (
            (seq, _event_frame(self._shown(peer, event), seq))
            for seq, event in seen[-self._limits.queued_events :]
        )
        return [(seq, frame) for seq, frame in frames if frame is not None]


def _event_frame(event: Mapping[str, object], seq: int) -> bytes | None:
    try:
        return codec.encode(EventMessage(seq, event))
    except ProtocolError as error:
        log.error("event cannot be sent", seq=seq, error=error.message)
        return None
