"""Which message is allowed when, on both ends of a connection."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.wire import codec
from mpsd.wire.messages import (
    MAX_DEADLINE_MS,
    ErrorReply,
    EventMessage,
    ProtocolError,
    Reply,
    Request,
)
from mpsd.wire.session import TABLE, ClientSession, ServerSession, Step, Subscription


def ask(client: ClientSession, op: str = "version", now: float = 0.0, deadline_s: float = 1.0) -> int:
    return client.request(op, {}, now, deadline_s)[0]


def admitted(server: ServerSession, request_id: int, op: str = "version") -> Request:
    said = server.receive(codec.encode(Request(request_id, op)), 0.0)
    assert isinstance(said, Request)
    return said


def test_a_conversation() -> None:
    client, server = ClientSession(), ServerSession(max_pending=4)
    first, frame = client.request("kill", {"pid": 10}, 0.0)
    second, other = client.request("status", {}, 0.0)
    assert (first, second) == (1, 2)
    assert server.receive(frame, 0.0) == Request(1, "kill", {"pid": 10}, 20_000)
    assert server.receive(other, 0.0) == Request(2, "status", {}, 5000)
    assert server.pending == 2
    assert client.receive(server.reply(2, {"a": 1})) == Reply(2, {"a": 1})
    assert client.receive(server.error(1, "denied", "no", "ask")) == ErrorReply(1, "denied", "no", "ask")
    assert server.pending == 0 and client.next_deadline() is None


def test_a_subscription() -> None:
    client, server = ClientSession(), ServerSession(max_pending=4)
    request_id, frame = client.request("subscribe", {"since_id": 0}, 0.0)
    with pytest.raises(ProtocolError, match="has no subscription"):
        server.event(1, {})
    server.receive(frame, 0.0)
    assert client.receive(server.reply(request_id, {})) == Reply(1, {})
    assert client.receive(server.event(3, {"kind": "x"})) == EventMessage(3, {"kind": "x"})
    assert client.receive(server.event(9, {}, 4)) == EventMessage(9, {}, 4)
    with pytest.raises(ProtocolError, match="while it is live"):
        ask(client, "subscribe")
    again = server.receive(codec.encode(Request(8, "subscribe")), 0.0)
    assert isinstance(again, ErrorReply) and again.id == 8 and again.code == "protocol"


def test_a_refused_subscription_may_be_asked_again() -> None:
    client, server = ClientSession(), ServerSession(max_pending=4)
    request_id, frame = client.request("subscribe", {}, 0.0)
    server.receive(frame, 0.0)
    client.receive(server.error(request_id, "busy", "later"))
    assert client.subscription is server.subscription is Subscription.NONE
    assert ask(client, "subscribe") == 2


@pytest.mark.parametrize("start", Subscription)
@pytest.mark.parametrize("step", Step)
def test_what_is_not_in_the_table_is_refused(start: Subscription, step: Step) -> None:
    session = ServerSession(1)
    session.subscription = start
    follows = TABLE.get((start, step))
    if follows is None:
        with pytest.raises(ProtocolError):
            session._step(step)
    else:
        session._step(step)
    assert session.subscription is (follows or start)


def test_the_client_asks_only_what_is_in_the_table() -> None:
    client = ClientSession()
    for op, args in (("reboot", {}), ("kill", {}), ("kill", {"pid": "x"})):
        with pytest.raises(ProtocolError):
            client.request(op, args, 0.0)
    assert client.next_deadline() is None


def test_deadlines_are_the_operations_unless_given() -> None:
    client = ClientSession()
    client.request("status", {}, 100.0)
    assert client.next_deadline() == 105.0
    client.request("status", {}, 100.0, 2.5)
    assert client.next_deadline() == 102.5
    _, frame = client.request("status", {}, 100.0, 1e9)
    assert codec.decode_request(frame).deadline_ms == MAX_DEADLINE_MS
    _, frame = client.request("status", {}, 100.0, -1.0)
    assert codec.decode_request(frame).deadline_ms == 1


def test_an_answer_after_its_deadline_is_dropped_once() -> None:
    client = ClientSession()
    request_id = ask(client, "version", now=0.0, deadline_s=1.0)
    assert client.expire(0.5) == ()
    assert client.expire(1.0) == (request_id,)
    frame = codec.encode(Reply(request_id, {}))
    assert client.receive(frame) is None
    with pytest.raises(ProtocolError, match="does not wait"):
        client.receive(frame)


def test_a_late_grant_still_makes_events_legal() -> None:
    client = ClientSession()
    request_id = ask(client, "subscribe")
    client.expire(2.0)
    assert client.receive(codec.encode(Reply(request_id, {}))) is None
    assert isinstance(client.receive(codec.encode(EventMessage(1, {}))), EventMessage)


def test_expired_requests_are_forgotten_in_the_end() -> None:
    client = ClientSession()
    for _ in range(300):
        ask(client)
    client.expire(2.0)
    assert client.receive(codec.encode(Reply(300, {}))) is None
    with pytest.raises(ProtocolError):
        client.receive(codec.encode(Reply(1, {})))


@pytest.mark.parametrize("answer", [Reply(1, {}), ErrorReply(5, "x", "y"), EventMessage(1, {})])
def test_what_nobody_asked_for_is_refused(answer: Reply | ErrorReply | EventMessage) -> None:
    with pytest.raises(ProtocolError):
        ClientSession().receive(codec.encode(answer))


def test_an_error_without_id_is_handed_on() -> None:
    error = ErrorReply(None, "protocol", "what?")
    assert ClientSession().receive(codec.encode(error)) == error


def test_nothing_goes_over_a_closed_connection() -> None:
    client, server = ClientSession(), ServerSession(1)
    request_id = ask(client)
    admitted(server, 1)
    for side in (client, server):
        side.close()
        side.close()
        assert side.closed
    with pytest.raises(ProtocolError):
        client.receive(codec.encode(Reply(request_id, {})))
    with pytest.raises(ProtocolError):
        ask(client)
    assert isinstance(server.receive(codec.encode(Request(2, "version")), 0.0), ErrorReply)
    assert not server.waits(1)


def test_an_id_that_is_in_use_does_not_spoil_its_owner() -> None:
    server = ServerSession(max_pending=4)
    admitted(server, 1)
    said = server.receive(codec.encode(Request(1, "status")), 0.0)
    assert isinstance(said, ErrorReply) and said.id is None
    assert server.waits(1)
    server.reply(1, {})
    with pytest.raises(ProtocolError, match="already answered"):
        server.reply(1, {})


def test_too_many_requests_at_once() -> None:
    server = ServerSession(max_pending=1)
    admitted(server, 1)
    said = server.receive(codec.encode(Request(2, "version")), 0.0)
    assert isinstance(said, ErrorReply) and (said.id, said.code) == (2, "busy")
    server.reply(1, {})
    admitted(server, 2)


def test_a_result_that_cannot_be_said_leaves_the_request_waiting() -> None:
    server = ServerSession(max_pending=1)
    admitted(server, 1)
    with pytest.raises(ProtocolError):
        server.reply(1, {"x": object()})
    assert server.waits(1)
    server.error(1, "internal", "x")


@given(
    st.lists(
        st.binary(max_size=60) | st.builds(lambda i: codec.encode(Request(i, "subscribe")), st.integers(1, 5))
    )
)
def test_a_server_session_answers_anything(frames: list[bytes]) -> None:
    server = ServerSession(max_pending=3)
    for frame in frames:
        said = server.receive(frame, 0.0)
        assert isinstance(said, Request | ErrorReply)
    assert server.pending <= 3


@given(
    st.lists(
        st.binary(max_size=60)
        | st.sampled_from([codec.encode(Reply(1, {})), codec.encode(EventMessage(1, {}))])
    )
)
def test_a_client_session_raises_protocol_errors_only(frames: list[bytes]) -> None:
    client = ClientSession()
    ask(client, "subscribe")
    for frame in frames:
        try:
            client.receive(frame)
        except ProtocolError:
            pass
