"""Messages to bytes and back; any other input raises only ProtocolError."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mpsd.wire import codec
from mpsd.wire.messages import (
    MAX_ANSWER_BYTES,
    MAX_DEADLINE_MS,
    MAX_ID,
    MAX_REQUEST_BYTES,
    OPERATIONS,
    Answer,
    Argument,
    ErrorReply,
    EventMessage,
    Kind,
    Operation,
    ProtocolError,
    Reply,
    Request,
)

# JSON takes any text but half surrogate pairs.
TEXT = st.characters(exclude_categories=["Cs"])
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(TEXT),
    lambda below: (
        st.lists(below, max_size=4) | st.dictionaries(st.text("abc", max_size=3), below, max_size=4)
    ),
    max_leaves=12,
)
OBJECT = st.dictionaries(st.text("abcxyz", max_size=5), JSON, max_size=5)
ID = st.integers(1, MAX_ID)
WORDS = st.text(TEXT, max_size=20)


def values(argument: Argument) -> st.SearchStrategy[Any]:
    match argument.kind:
        case Kind.FLAG:
            return st.booleans()
        case Kind.INTEGER:
            return st.integers(argument.low, argument.high)
        case Kind.TEXT:
            return st.text(TEXT, min_size=argument.low, max_size=argument.high)


def arguments(operation: Operation) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {a.name: values(a) for a in operation.arguments if a.required},
        optional={a.name: values(a) for a in operation.arguments if not a.required},
    )


REQUESTS = st.sampled_from(sorted(OPERATIONS)).flatmap(
    lambda name: st.builds(
        Request, ID, st.just(name), arguments(OPERATIONS[name]), st.integers(1, MAX_DEADLINE_MS)
    )
)
ANSWERS: st.SearchStrategy[Answer] = st.one_of(
    st.builds(Reply, ID, OBJECT),
    st.builds(ErrorReply, st.none() | ID, WORDS, WORDS, WORDS),
    st.builds(EventMessage, st.integers(0, MAX_ID), OBJECT, st.integers(0, MAX_ID)),
)


def envelope(**fields: object) -> bytes:
    return json.dumps({"v": 1, **fields}).encode()


def request(**changes: object) -> bytes:
    fields: dict[str, object] = {"type": "request", "id": 7, "op": "kill", "args": {"pid": 4711}}
    return envelope(**(fields | {"deadline_ms": 1000} | changes))


@given(REQUESTS)
def test_requests_survive_the_wire(message: Request) -> None:
    assert codec.decode_request(codec.encode(message)) == message


@given(ANSWERS)
def test_answers_survive_the_wire(message: Answer) -> None:
    assert codec.decode_answer(codec.encode(message)) == message


@given(st.binary(max_size=200))
@example(b"")
@example(b"\xff\xfe{}")
@example(b"[" * 15_000)
@example(b'{"a":' * 3000)
@example(b"1" * 16_000)
@example(b'"\\ud800"')
def test_garbage_is_a_protocol_error(payload: bytes) -> None:
    for decode in (codec.decode_request, codec.decode_answer):
        with pytest.raises(ProtocolError):
            decode(payload)


@given(st.one_of(REQUESTS, ANSWERS), st.data())
def test_damaged_messages_give_a_message_or_a_protocol_error(
    message: Request | Answer, data: st.DataObject
) -> None:
    payload = bytearray(codec.encode(message))
    at = data.draw(st.integers(0, len(payload)))
    cut = data.draw(st.integers(0, 4))
    payload[at : at + cut] = data.draw(st.binary(max_size=4))
    for decode in (codec.decode_request, codec.decode_answer):
        try:
            decode(bytes(payload))
        except ProtocolError:
            pass


@given(JSON)
def test_any_json_is_a_message_or_a_protocol_error(value: object) -> None:
    for fields in (
        {"type": value},
        {"type": "request", "id": value},
        {"type": "reply", "id": 1, "result": value},
    ):
        for decode in (codec.decode_request, codec.decode_answer):
            try:
                decode(envelope(**fields))
            except ProtocolError:
                pass


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (b"x" * (MAX_REQUEST_BYTES + 1), "exceeds the limit of"),
        (b"\xc3", "not UTF-8 at byte 0"),
        (b"nope", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"v":1,"v":1}', "appears twice"),
        (b'{"v":NaN}', "NaN is not JSON"),
        (b'{"v":-Infinity}', "-Infinity is not JSON"),
        (b'{"v":1e999}', "beyond double precision"),
        (b'{"v":99999999999999999999}', "more than 64 bits"),
        (b'{"v":' + b"9" * 5000 + b"}", "more than 64 bits"),
        (b'{"v":' + b"[" * 40 + b"]" * 40 + b"}", "nested more than 16 deep"),
        (b'{"v":"\\udc80"}', "half a surrogate pair"),
        (b'{"\\udc80":1}', "half a surrogate pair"),
        (b'{"v":2,"type":"request"}', "protocol version 2, this side 1"),
        (b'{"v":true,"type":"request"}', "protocol version True"),
        (b'{"v":1}', "must have a type"),
        (request(id=0), "id must be an integer"),
        (request(id=2**60), "id must be an integer"),
        (request(id="7"), "id must be an integer"),
        (request(id=True), "id must be an integer"),
        (request(type="reply"), "does not send messages of type 'reply'"),
        (request(more=1), "unknown: 'more'"),
        (envelope(type="request", id=7), "missing: args, deadline_ms, op"),
        (request(op="reboot"), "unknown operation 'reboot'"),
        (request(op=["kill"]), "op must be text"),
        (request(args=[]), "args must be an object"),
        (request(args={}), "kill needs the argument 'pid'"),
        (request(args={"pid": 4711, "signal": 9}), "kill has no argument 'signal'"),
        (request(op="status", args={"x" * 100: 9}), "status has no argument 'xxxx"),
        (request(args={"pid": "4711"}), "must be of type integer"),
        (request(args={"pid": True}), "must be of type integer"),
        (request(args={"pid": 4711.0}), "must be of type integer"),
        (request(args={"pid": 1}), "must be 2 to"),
        (request(args={"pid": 0}), "must be 2 to"),
        (request(args={"pid": -1}), "must be 2 to"),
        (request(args={"pid": 4711, "dry_run": 1}), "must be of type flag"),
        (request(args={"pid": 4711, "reason": "x" * 501}), "0 to 500 characters, not 501"),
        (request(deadline_ms=0), "deadline_ms must be"),
        (request(deadline_ms=MAX_DEADLINE_MS + 1), "deadline_ms must be"),
    ],
)
def test_what_is_wrong_with_a_request_is_said(payload: bytes, said: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        codec.decode_request(payload)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (envelope(type="request"), "a daemon does not send messages of type 'request'"),
        (envelope(type="reply", id=1, result=[]), "result must be an object"),
        (envelope(type="reply", id=1), "missing: result"),
        (envelope(type="error", id="x", code="c", message="m", remedy=""), "id must be"),
        (envelope(type="error", id=None, code=1, message="m", remedy=""), "code must be text"),
        (envelope(type="event", seq=-1, event={}, lost=0), "seq must be"),
        (b" " * (MAX_ANSWER_BYTES + 1), "exceeds the limit of"),
    ],
)
def test_what_is_wrong_with_an_answer_is_said(payload: bytes, said: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        codec.decode_answer(payload)
    assert said in caught.value.message


def test_an_error_names_the_request_where_it_could_be_read() -> None:
    with pytest.raises(ProtocolError) as caught:
        codec.decode_request(request(op="reboot"))
    assert caught.value.request_id == 7
    with pytest.raises(ProtocolError) as caught:
        codec.decode_request(b"{}")
    assert caught.value.request_id is None


@pytest.mark.parametrize(
    "result", [{"a": float("nan")}, {"a": object()}, {"a": "x" * MAX_ANSWER_BYTES}, {(1, 2): "key"}]
)
def test_results_that_cannot_be_said(result: dict[str, object]) -> None:
    with pytest.raises(ProtocolError) as caught:
        codec.encode(Reply(3, result))
    assert caught.value.request_id == 3
    with pytest.raises(ProtocolError) as caught:
        codec.encode(EventMessage(3, result))
    assert caught.value.request_id is None


def test_undecodable_names_and_read_only_views_are_sent() -> None:
    result = MappingProxyType({"command": "a\udcffb", "more": MappingProxyType({"x": (1, 2)})})
    answer = codec.decode_answer(codec.encode(Reply(1, result)))
    assert answer == Reply(1, {"command": "a?b", "more": {"x": [1, 2]}})


def test_the_table_can_be_asked_within_the_limits() -> None:
    for operation in OPERATIONS.values():
        longest: dict[str, int | str | bool] = {}
        for a in operation.arguments:
            longest[a.name] = "\0" * min(a.high, 500) if a.kind is Kind.TEXT else a.high
            if a.kind is Kind.FLAG:
                longest[a.name] = True
        message = Request(MAX_ID, operation.name, longest, MAX_DEADLINE_MS)
        assert codec.decode_request(codec.encode(message)) == message
        assert operation.summary
        assert message.operation is operation
        assert 0 < operation.deadline_s * 1e3 <= MAX_DEADLINE_MS
