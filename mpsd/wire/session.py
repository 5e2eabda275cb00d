"""The order of messages on one connection, for both sides, without a socket.

A connection keeps requests that wait for an answer, and at most one subscription. The table below has the
subscription's transitions; any other transition is refused.

    NONE --asked--> ASKED --granted--> LIVE        (ASKED --refused--> NONE)
    events may come in LIVE only; any state --closed--> CLOSED, which is final

The caller passes the time (seconds of any monotonic clock) and whole frames.
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

# Number of expired request ids that are kept, to drop their late answers.
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
    """State that both ends keep: the subscription."""

    def __init__(self) -> None:
        self.subscription = Subscription.NONE

    @property
    def closed(self) -> bool:
        return self.subscription is Subscription.CLOSED

    def close(self) -> None:
        """Refuse further messages: the connection has ended."""
        self._step(Step.CLOSE)

    def _step(self, step: Step, request_id: int | None = None) -> None:
        follows = TABLE.get((self.subscription, step))
        if follows is None:
            raise ProtocolError(
                f"a subscription cannot be {step} while it is {self.subscription}", request_id=request_id
            )
        self.subscription = follows


class ClientSession(_Side):
    """The client's end."""

    def __init__(self) -> None:
        super().__init__()
        self._next_id = 1
        self._waiting: dict[int, tuple[str, float]] = {}
        self._expired: dict[int, str] = {}

    def request(
        self, op: str, args: Mapping[str, object], now: float, deadline_s: float | None = None
    ) -> tuple[int, bytes]:
        """Return the id and the frame of a new request.

        Raise ProtocolError if the table of operations does not allow it.
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
        """Return the answer in a frame; None if the deadline of its request has passed.

        Raise ProtocolError for an answer without a request, and for an event without a subscription.
        """
        answer = codec.decode_answer(frame)
        if self.closed:
            raise ProtocolError("an answer arrived on a closed connection")
        if isinstance(answer, EventMessage):
            if self.subscription is not Subscription.LIVE:
                raise ProtocolError("an event arrived without a subscription")
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
            raise ProtocolError(f"an answer arrived for request {request_id}, which does not wait for one")
        if op == SUBSCRIBE:
            self._step(Step.GRANT if isinstance(answer, Reply) else Step.REFUSE)
        return None if late else answer

    def expire(self, now: float) -> tuple[int, ...]:
        """Expire requests past their deadline and return their ids. Their answers will be dropped."""
        late = tuple(key for key, (_, deadline) in self._waiting.items() if deadline <= now)
        for request_id in late:
            self._expired[request_id] = self._waiting.pop(request_id)[0]
        while len(self._expired) > _EXPIRED_KEPT:
            del self._expired[next(iter(self._expired))]
        return late

    def next_deadline(self) -> float | None:
        return min((deadline for _, deadline in self._waiting.values()), default=None)


class ServerSession(_Side):
    """The daemon's end."""

    def __init__(self, max_pending: int) -> None:
        super().__init__()
        self._max_pending = max_pending
        self._pending: dict[int, tuple[str, float]] = {}

    @property
    def pending(self) -> int:
        return len(self._pending)

    def receive(self, frame: bytes, now: float) -> Request | ErrorReply:
        """Return a request to perform, or the error to send back at once. Never raise."""
        try:
            return self._admit(codec.decode_request(frame), now)
        except ProtocolError as error:
            return ErrorReply(error.request_id, error.code, error.message, error.remedy)

    def _admit(self, request: Request, now: float) -> Request | ErrorReply:
        if self.closed:
            raise ProtocolError("the connection is closed", request_id=request.id)
        if request.id in self._pending:
            # The error has no id: the first request with this id still waits for its answer.
            raise ProtocolError(f"request id {request.id} is already in use")
        if len(self._pending) >= self._max_pending:
            return ErrorReply(
                request.id,
                "busy",
                f"{len(self._pending)} requests of this connection are in progress",
                "wait for an answer before the next request",
            )
        if request.op == SUBSCRIBE:
            self._step(Step.ASK, request.id)
        self._pending[request.id] = (request.op, now + request.deadline_ms / 1e3)
        return request

    def reply(self, request_id: int, result: Mapping[str, object]) -> bytes:
        """Return the frame of an answer.

        Raise ProtocolError for a result that cannot be encoded; the request then waits for error().
        """
        frame = codec.encode(Reply(request_id, result))
        self._finish(request_id, Step.GRANT)
        return frame

    def error(self, request_id: int, code: str, message: str, remedy: str = "") -> bytes:
        frame = codec.encode(ErrorReply(request_id, code, message, remedy))
        self._finish(request_id, Step.REFUSE)
        return frame

    def _finish(self, request_id: int, step: Step) -> None:
        if request_id not in self._pending:
            raise ProtocolError(f"request {request_id} was already answered")
        op, _ = self._pending.pop(request_id)
        if op == SUBSCRIBE:
            self._step(step)

    def waits(self, request_id: int) -> bool:
        """Return whether a request waits for its answer."""
        return request_id in self._pending and not self.closed

    def event(self, seq: int, event: Mapping[str, object], lost: int = 0) -> bytes:
        """Return the frame of an event. Raise ProtocolError without a live subscription."""
        if self.subscription is not Subscription.LIVE:
            raise ProtocolError("this connection has no subscription")
        return codec.encode(EventMessage(seq, event, lost))
