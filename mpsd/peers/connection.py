"""Protocol state of one connection of the control socket, and its unsent data. Does no socket I/O.

Answers are never dropped. While more than MAX_UNSENT bytes wait to be read, the connection is `full`: no
request of it is read, taken from its input or answered. Events are dropped: a subscriber that falls behind
misses the events that do not fit its queue, and is told their number once.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mpsd.peers.credentials import Credentials, Peer
from mpsd.peers.quotas import Account, Standing
from mpsd.peers.receive import Refused
from mpsd.peers.server import Accepted
from mpsd.wire import codec, zmtp
from mpsd.wire.messages import MAX_REQUEST_BYTES, ErrorReply, EventMessage, ProtocolError, Request
from mpsd.wire.session import ServerSession, Subscription

_CHUNK = 64 << 10
MAX_UNSENT = 256 << 10

Frame = bytes | Callable[[], bytes | None]
"""The frame of an event, or a call that makes it when it is sent; None: the event cannot be sent."""


@dataclass(slots=True)
class _Queued:
    seq: int
    frame: Frame


class Connection(Accepted):
    """`turn`: held by the request that is being answered, among those with large answers.

    `later`: the call that handles the rest of the input. `stalled`: ends the connection if it stays full.
    """

    def __init__(
        self,
        sock: socket.socket,
        credentials: Credentials,
        account: Account,
        max_pending: int,
        max_queued: int,
    ) -> None:
        super().__init__(sock, credentials, account)
        self.peer: Peer | None = None
        self.session = ServerSession(max_pending)
        self.offences = 0
        self.turn = asyncio.Lock()
        self.later: asyncio.Handle | None = None
        self.stalled: asyncio.TimerHandle | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._sender: int | None = None
        self._zmtp = zmtp.Connection(zmtp.ROUTER, MAX_REQUEST_BYTES)
        self._max_queued = max_queued
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._events: deque[_Queued] = deque()
        self._lost = 0
        self._lost_seq = 0
        self._add(self._zmtp.to_send())

    @property
    def subscribed(self) -> bool:
        return self.session.subscription is Subscription.LIVE

    @property
    def full(self) -> bool:
        return self._unsent_bytes > MAX_UNSENT

    async def drained(self) -> None:
        """Wait until the connection is not full."""
        await self._room.wait()

    def check_sender(self, sender: Credentials | None) -> None:
        """Raise Refused if the data comes from another user than the one that connected.

        The kernel states the effective uid of the process that connected, but the real uid of a sender. They
        differ in a program with set-user-ID. So the first data may come from the same process or the same
        uid, and all later data must come from the uid of the first.
        """
        if sender is None:
            raise Refused("sender")
        if self._sender is None:
            same_process = 0 < sender.pid == self.credentials.pid
            if not same_process and sender.uid != self.uid:
                raise Refused("sender")
            self._sender = sender.uid
        elif sender.uid != self._sender:
            raise Refused("sender")

    def feed(self, data: bytes) -> None:
        self._zmtp.feed(data)

    def next_request(self, now: float) -> Request | None:
        """Return the next request of the input; answer what cannot be a request. None: read more first.

        Raises ProtocolError if the peer does not speak ZMTP; the connection is then useless.
        """
        found: Request | None = None
        while found is None and not self.full and (frame := self._zmtp.next_frame()) is not None:
            message = self.session.receive(frame, now)
            if isinstance(message, Request):
                found = message
            else:
                self.offences += message.code == ProtocolError.code
                self.tell(message)
        self._add(self._zmtp.to_send())
        self._use()
        return found

    def reply(self, request_id: int, result: Mapping[str, object]) -> None:
        """Queue the result of a request. Raises ProtocolError if the result cannot be encoded."""
        if self.session.waits(request_id):
            self._send(self.session.reply(request_id, result))
            self._use()

    def refuse(self, answer: ErrorReply) -> None:
        if answer.id is not None and self.session.waits(answer.id):
            self._send(self.session.error(answer.id, answer.code, answer.message, answer.remedy))
            self._use()

    def tell(self, error: ErrorReply) -> None:
        """Queue an error that answers no pending request."""
        self._send(codec.encode(error))

    def publish(self, seq: int, frame: Frame) -> None:
        """Queue an event's frame, or count it as lost while the subscriber lags behind."""
        if self._lost or len(self._events) >= self._max_queued:
            self._lost += 1
            self._lost_seq = seq
        else:
            self._events.append(_Queued(seq, frame))

    def next_chunk(self) -> memoryview:
        """Return the next bytes to send, empty if there are none. They stay queued until sent() is called."""
        if not self._unsent:
            self._take_events()
        return self._unsent[0] if self._unsent else memoryview(b"")

    def sent(self, size: int) -> None:
        """Drop so many bytes, which the socket took, of the chunk."""
        self._unsent_bytes -= size
        if size == len(self._unsent[0]):
            self._unsent.popleft()
        else:
            self._unsent[0] = self._unsent[0][size:]
        if not self.full:
            self._room.set()

    def close(self) -> None:
        self.session.close()
        self._unsent.clear()
        self._unsent_bytes = 0
        self._events.clear()
        self._room.set()
        for handle in (self.later, self.stalled):
            if handle is not None:
                handle.cancel()

    def _use(self) -> None:
        """Note the use that the peer makes of this connection."""
        if self._zmtp.phase is zmtp.Phase.OPEN:
            working = self.session.pending or self.subscribed
            self.standing = Standing.WORKING if working else Standing.IDLE

    def _take_events(self) -> None:
        size = 0
        while self._events and size < _CHUNK:
            queued = self._events.popleft()
            frame = queued.frame if isinstance(queued.frame, bytes) else queued.frame()
            if frame is not None:
                self._zmtp.send(frame)
                size += len(frame)
        if not self._events and self._lost:
            self._zmtp.send(codec.encode(EventMessage(self._lost_seq, {}, self._lost)))
            self._lost = 0
        self._add(self._zmtp.to_send())

    def _send(self, frame: bytes) -> None:
        if self._zmtp.phase is zmtp.Phase.OPEN:
            self._zmtp.send(frame)
            self._add(self._zmtp.to_send())

    def _add(self, data: bytes) -> None:
        if data and not self.session.closed:
            self._unsent.append(memoryview(data))
            self._unsent_bytes += len(data)
            if self.full:
                self._room.clear()
