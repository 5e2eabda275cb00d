"""One connection's conversation, both sides, without a socket: which message may come when.

A connection has two things that last: requests that wait for their answer, and at most one
subscription. The subscription's states and moves are the table below; what is not in it is refused.

    NONE --asked--> ASKED --granted--> LIVE        (ASKED --refused--> NONE)
    events may come in LIVE only; any state --closed--> CLOSED, which nothing leaves

Time is handed in (seconds of any monotonic clock), bytes are whole frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from . import codec
from .messages import (
    MAX_DEADLINE_MS,
    OPERATIONS,
    SUBSCRIBE,
    Answer,
    ErrorReply,
    EventMessage,
    ProtocolError,
    Reply,
    Request,
)

# Answers that come after their deadline are dropped; older ids than this many are no longer known.
_EXPIRED_KEPT = 256


class Subscription(StrEnum):
    NONE = "none"
    ASKED = "asked"
    LIVE = "live"
    CLOSED = "closed"


class Step(StrEnum):
    ASK = "asked"
    GRANT = "granted"
    REFUSE = "refused"
    CLOSE = "closed"


_N, _A, _L, _C = Subscription
TABLE: Mapping[tuple[Subscription, Step], Subscription] = {
    (_N, Step.ASK): _A,
    (_A, Step.GRANT): _L,
    (_A, Step.REFUSE): _N,
    (_N, Step.CLOSE): _C,
    (_A, Step.CLOSE): _C,
    (_L, Step.CLOSE): _C,
    (_C, Step.CLOSE): _C,
}


class _Side:
    """What both ends keep: the subscription's state."""

    def __init__(self) -> None:
        self.subscription = Subscription.NONE

    @property
    def closed(self) -> bool:
        return self.subscription is Subscription.CLOSED

    def close(self) -> None:
        """No more messages: the connection is gone."""
        self._step(Step.CLOSE)

    def _step(self, step: Step, request_id: int | None = None) -> None:
        follows = TABLE.get((self.subscription, step))
        if follows is None:
            raise ProtocolError(
                f"a subscription cannot be {step} while it is {self.subscription}", request_id=request_id
            )
        self.subscription = follows


class ClientSession(_Side):
    """The asking end."""

    def __init__(self) -> None:
        super().__init__()
        self._next_id = 1
        self._waiting: dict[int, tuple[str, float]] = {}
        self._expired: dict[int, str] = {}

    def request(
        self, op: str, args: Mapping[str, object], now: float, deadline_s: float | None = None
    ) -> tuple[int, bytes]:
        """The id and the frame of a new request.

        Raises ProtocolError for what the table of operations does not allow, before anything is sent.
        """
        operation = OPERATIONS.get(op)
        if operation is None:
            raise ProtocolError(f"unknown operation {op!r}", remedy=f"one of: {', '.join(OPERATIONS)}")
        if self.closed:
            raise ProtocolError("the connection is closed")
        checked = codec.check_arguments(operation, args)
        seconds = operation.deadline_s if deadline_s is None else deadline_s
        deadline_ms = min(max(1, round(seconds * 1e3)), MAX_DEADLINE_MS)
        request_id = self._next_id
        frame = codec.encode(Request(request_id, op, checked, deadline_ms))
        if op == SUBSCRIBE:
            self._step(Step.ASK, request_id)
        self._next_id += 1
        self._waiting[request_id] = (op, now + deadline_ms / 1e3)
        return request_id, frame

    def receive(self, frame: bytes) -> Answer | None:
        """The answer in a frame; None for one whose deadline had passed.

        Raises ProtocolError for an answer to nothing that was asked, and an event without a subscription.
        """
        answer = codec.decode_answer(frame)
        if self.closed:
            raise ProtocolError("an answer on a closed connection")
        if isinstance(answer, EventMessage):
            if self.subscription is not Subscription.LIVE:
                raise ProtocolError("an event that nobody subscribed to")
            return answer
        if answer.id is None:
            return answer
        return self._settle(answer, answer.id)

    def _settle(self, answer: Reply | ErrorReply, request_id: int) -> Answer | None:
        if request_id in self._waiting:
            op, late = self._waiting.pop(request_id)[0], False
        elif request_id in self._expired:
            op, late = self._expired.pop(request_id), True
        else:
            raise ProtocolError(f"an answer to request {request_id}, which is not waiting for one")
        if op == SUBSCRIBE:
            self._step(Step.GRANT if isinstance(answer, Reply) else Step.REFUSE)
        return None if late else answer

    def expire(self, now: float) -> tuple[int, ...]:
        """The requests whose deadline has passed; their answers will be dropped."""
        late = tuple(key for key, (_, deadline) in self._waiting.items() if deadline <= now)
        for request_id in late:
            self._expired[request_id] = self._waiting.pop(request_id)[0]
        while len(self._expired) > _EXPIRED_KEPT:
            del self._expired[next(iter(self._expired))]
        return late

    def next_deadline(self) -> float | None:
        return min((deadline for _, deadline in self._waiting.values()), default=None)


class ServerSession(_Side):
    """The answering end."""

    def __init__(self, max_pending: int) -> None:
        super().__init__()
        self._max_pending = max_pending
        self._pending: dict[int, tuple[str, float]] = {}

    @property
    def pending(self) -> int:
        return len(self._pending)

    def receive(self, frame: bytes, now: float) -> Request | ErrorReply:
        """A request to carry out, or the error to send back at once. Never raises."""
        try:
            return self._admit(codec.decode_request(frame), now)
        except ProtocolError as error:
            return ErrorReply(error.request_id, error.code, error.message, error.remedy)

    def _admit(self, request: Request, now: float) -> Request | ErrorReply:
        if self.closed:
            raise ProtocolError("the connection is closed", request_id=request.id)
        if request.id in self._pending:
            # Answered without an id: the request that owns the id still waits for its own answer.
            raise ProtocolError(f"request {request.id} is already being worked on")
        if len(self._pending) >= self._max_pending:
            return ErrorReply(
                request.id,
                "busy",
                f"{len(self._pending)} requests of this connection are being worked on",
                "wait for an answer before asking more",
            )
        if request.op == SUBSCRIBE:
            self._step(Step.ASK, request.id)
        self._pending[request.id] = (request.op, now + request.deadline_ms / 1e3)
        return request

    def reply(self, request_id: int, result: Mapping[str, object]) -> bytes:
        """The frame of an answer. Raises ProtocolError for a result that cannot be said; then the
        request still waits, for error()."""
        frame = codec.encode(Reply(request_id, result))
        self._finish(request_id, Step.GRANT)
        return frame

    def error(self, request_id: int, code: str, message: str, remedy: str = "") -> bytes:
        frame = codec.encode(ErrorReply(request_id, code, message, remedy))
        self._finish(request_id, Step.REFUSE)
        return frame

    def _finish(self, request_id: int, step: Step) -> None:
        if request_id not in self._pending:
            raise ProtocolError(f"request {request_id} was answered before")
        op, _ = self._pending.pop(request_id)
        if op == SUBSCRIBE:
            self._step(step)

    def waits(self, request_id: int) -> bool:
        """Whether a request still has no answer."""
        return request_id in self._pending and not self.closed

    def event(self, seq: int, event: Mapping[str, object], lost: int = 0) -> bytes:
        """The frame of an event. Raises ProtocolError without a live subscription."""
        if self.subscription is not Subscription.LIVE:
            raise ProtocolError("nobody subscribed on this connection")
        return codec.encode(EventMessage(seq, event, lost))
