"""One connection of the listener: its protocol states and what still has to be sent to it. No socket.

Answers are never dropped: a peer that does not read them is let go when too much has piled up. Events
are: a subscriber that falls behind misses what does not fit its queue, and is told once how many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from mpsd.listener.peers import Credentials, Peer
from mpsd.listener.stream import Grip
from mpsd.wire import codec, zmtp
from mpsd.wire.messages import (
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    ErrorReply,
    EventMessage,
    ProtocolError,
    Request,
)
from mpsd.wire.session import ServerSession, Subscription

_CHUNK = 64 << 10
_MAX_UNSENT = 2 * MAX_ANSWER_BYTES


@dataclass(slots=True)
class _Queued:
    seq: int
    frame: bytes


class Connection:
    def __init__(
        self,
        routing_id: bytes,
        credentials: Credentials,
        grip: Grip,
        max_pending: int,
        max_queued: int,
    ) -> None:
        self.routing_id = routing_id
        self.credentials = credentials
        self.grip = grip
        self.peer: Peer | None = None
        self.session = ServerSession(max_pending)
        self.offences = 0
        self._zmtp = zmtp.Connection(zmtp.ROUTER, MAX_REQUEST_BYTES)
        self._max_queued = max_queued
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._events: deque[_Queued] = deque()
        self._lost = 0
        self._lost_seq = 0

    @property
    def open(self) -> bool:
        """Whether the handshake is done."""
        return self._zmtp.phase is zmtp.Phase.OPEN

    @property
    def subscribed(self) -> bool:
        return self.session.subscription is Subscription.LIVE

    @property
    def overfull(self) -> bool:
        return self._unsent_bytes > _MAX_UNSENT

    def receive(self, data: bytes, now: float) -> list[Request]:
        """The requests in these bytes; what cannot be one is answered here. Raises ProtocolError when
        the peer does not even speak ZMTP: then the connection is of no more use."""
        found: list[Request] = []
        for frame in self._zmtp.receive(data):
            said = self.session.receive(frame, now)
            if isinstance(said, Request):
                found.append(said)
            else:
                self.offences += said.code == ProtocolError.code
                self._send(codec.encode(said))
        return found

    def reply(self, request_id: int, result: Mapping[str, object]) -> None:
        """Raises ProtocolError when the result cannot be said."""
        if self.session.waits(request_id):
            self._send(self.session.reply(request_id, result))

    def refuse(self, answer: ErrorReply) -> None:
        if answer.id is not None and self.session.waits(answer.id):
            self._send(self.session.error(answer.id, answer.code, answer.message, answer.remedy))

    def publish(self, seq: int, frame: bytes) -> None:
        """Queue an event's frame, or count it as lost while the subscriber has not caught up."""
        if self._lost or len(self._events) >= self._max_queued:
            self._lost += 1
            self._lost_seq = seq
        else:
            self._events.append(_Queued(seq, frame))

    def next_chunk(self) -> bytes:
        """The next bytes to send, empty when there are none. They stay queued until sent() is called."""
        if not self._unsent:
            self._add(self._zmtp.to_send())
        if not self._unsent:
            self._take_events()
        return self._unsent[0] if self._unsent else b""

    def sent(self) -> None:
        """The chunk has been handed to the socket."""
        self._unsent_bytes -= len(self._unsent.popleft())

    def close(self) -> None:
        self.session.close()
        self._unsent.clear()
        self._events.clear()

    def _take_events(self) -> None:
        size = 0
        while self._events and size < _CHUNK:
            queued = self._events.popleft()
            self._zmtp.send(queued.frame)
            size += len(queued.frame)
        if not self._events and self._lost:
            self._zmtp.send(codec.encode(EventMessage(self._lost_seq, {}, self._lost)))
            self._lost = 0
        self._add(self._zmtp.to_send())

    def _send(self, frame: bytes) -> None:
        if self.open:
            self._zmtp.send(frame)
            self._add(self._zmtp.to_send())

    def _add(self, data: bytes) -> None:
        if data:
            self._unsent.append(data)
            self._unsent_bytes += len(data)
