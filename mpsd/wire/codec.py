"""The codec: messages to bytes and back. Any input yields a message or a ProtocolError.

Fields, all required, no other fields allowed:

    {"v": 1, "type": "request", "id": 7, "op": "kill", "args": {"pid": 4711}, "deadline_ms": 20000}
    {"v": 1, "type": "reply", "id": 7, "result": {...}}
    {"v": 1, "type": "error", "id": 7 or null, "code": "denied", "message": "...", "remedy": "..."}
    {"v": 1, "type": "event", "seq": 12, "event": {...}, "lost": 0}

JSON is checked strictly: UTF-8, no duplicate keys, no NaN or infinity, 64-bit integers, limited depth.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import NoReturn

from .messages import (
    MAX_ANSWER_BYTES,
    MAX_DEADLINE_MS,
    MAX_ID,
    MAX_REQUEST_BYTES,
    OPERATIONS,
    PROTOCOL_VERSION,
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

# Status nests four deep, a fault record three; the parser's own limit is far higher.
MAX_DEPTH = 16
_INTEGERS = range(-(2**63), 2**64)
# Digits of the longest 64-bit integer with its sign; longer text is not converted.
_INTEGER_DIGITS = 20
_SHOWN = 40

_Object = dict[str, object]


def encode(message: Request | Answer) -> bytes:
    """Return the frame of a message. Raise ProtocolError if it is too large or not representable in JSON."""
    largest = MAX_REQUEST_BYTES if isinstance(message, Request) else MAX_ANSWER_BYTES
    try:
        text = json.dumps(
            {"v": PROTOCOL_VERSION, **_fields(message)},
            ensure_ascii=False,
            allow_nan=False,
            separators=(",", ":"),
            default=_plain,
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(
            f"the message is not representable in JSON: {error}", request_id=_id_of(message)
        ) from None
    # Names from /proc may hold undecodable bytes as lone surrogates, which UTF-8 does not allow.
    payload = text.encode("utf-8", "replace")
    if len(payload) > largest:
        raise ProtocolError(
            f"a message of {len(payload)} bytes exceeds the limit of {largest}",
            remedy="ask for fewer records",
            request_id=_id_of(message),
        )
    return payload


def decode_request(payload: bytes) -> Request:
    """Return a client's request. Raise ProtocolError, with the request's id if it could be read."""
    fields = _envelope(payload, MAX_REQUEST_BYTES)
    request_id = _ranged(fields, "id", 1, MAX_ID)
    try:
        return _request(fields, request_id)
    except ProtocolError as error:
        error.request_id = request_id
        raise


def decode_answer(payload: bytes) -> Answer:
    """Return a daemon's answer. Raise ProtocolError."""
    fields = _envelope(payload, MAX_ANSWER_BYTES)
    match fields["type"]:
        case "reply":
            _only(fields, "id", "result")
            return Reply(_ranged(fields, "id", 1, MAX_ID), _mapping(fields, "result"))
        case "error":
            _only(fields, "id", "code", "message", "remedy")
            request_id = None if fields["id"] is None else _ranged(fields, "id", 1, MAX_ID)
            return ErrorReply(
                request_id, _text(fields, "code"), _text(fields, "message"), _text(fields, "remedy")
            )
        case "event":
            _only(fields, "seq", "event", "lost")
            lost = _ranged(fields, "lost", 0, MAX_ID)
            return EventMessage(_ranged(fields, "seq", 0, MAX_ID), _mapping(fields, "event"), lost)
        case other:
            raise ProtocolError(f"a daemon does not send messages of type {_shown(other)}")


def check_arguments(operation: Operation, args: Mapping[str, object]) -> dict[str, int | str | bool]:
    """Return the arguments of a request, checked against the table. Raise ProtocolError."""
    checked: dict[str, int | str | bool] = {}
    for name, value in args.items():
        argument = operation.argument(name)
        if argument is None:
            known = ", ".join(a.name for a in operation.arguments) or "none"
            raise ProtocolError(
                f"{operation.name} has no argument {_shown(name)}", remedy=f"its arguments: {known}"
            )
        checked[name] = _argument(operation, argument, value)
    for argument in operation.arguments:
        if argument.required and argument.name not in checked:
            raise ProtocolError(f"{operation.name} needs the argument {argument.name!r}")
    return checked


def _argument(operation: Operation, argument: Argument, value: object) -> int | str | bool:
    what = f"argument {argument.name!r} of {operation.name}"
    # Compare the exact type: bool is a subclass of int.
    if type(value) is not argument.kind.value:
        raise ProtocolError(f"{what} must be of type {argument.kind.name.lower()}, not {_shown(value)}")
    if isinstance(value, str):
        if not argument.low <= len(value) <= argument.high:
            raise ProtocolError(
                f"{what} must have {argument.low} to {argument.high} characters, not {len(value)}"
            )
        return value
    assert isinstance(value, int)
    if argument.kind is Kind.INTEGER and not argument.low <= value <= argument.high:
        raise ProtocolError(f"{what} must be {argument.low} to {argument.high}, not {value}")
    return value


def _request(fields: _Object, request_id: int) -> Request:
    if fields["type"] != "request":
        raise ProtocolError(f"a client does not send messages of type {_shown(fields['type'])}")
    _only(fields, "id", "op", "args", "deadline_ms")
    name = _text(fields, "op")
    operation = OPERATIONS.get(name)
    if operation is None:
        raise ProtocolError(f"unknown operation {_shown(name)}", remedy=f"one of: {', '.join(OPERATIONS)}")
    args = check_arguments(operation, _mapping(fields, "args"))
    return Request(request_id, name, args, _ranged(fields, "deadline_ms", 1, MAX_DEADLINE_MS))


def _fields(message: Request | Answer) -> _Object:
    match message:
        case Request(request_id, op, args, deadline_ms):
            return {"type": "request", "id": request_id, "op": op, "args": args, "deadline_ms": deadline_ms}
        case Reply(request_id, result):
            return {"type": "reply", "id": request_id, "result": result}
        case ErrorReply(answered, code, text, remedy):
            return {"type": "error", "id": answered, "code": code, "message": text, "remedy": remedy}
        case EventMessage(seq, event, lost):
            return {"type": "event", "seq": seq, "event": event, "lost": lost}


def _id_of(message: Request | Answer) -> int | None:
    return None if isinstance(message, EventMessage) else message.id


def _plain(value: object) -> object:
    """Return a read-only mapping as a dict, which the JSON encoder accepts."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value of type {type(value).__name__}")


def _envelope(payload: bytes, largest: int) -> _Object:
    if len(payload) > largest:
        raise ProtocolError(f"a message of {len(payload)} bytes exceeds the limit of {largest}")
    value = _parse(payload)
    if not isinstance(value, dict):
        raise ProtocolError("a message must be a JSON object")
    _check_tree(value)
    version = value.get("v")
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the peer speaks protocol version {_shown(version)}, this side {PROTOCOL_VERSION}",
            remedy="use a client and a daemon of the same release",
        )
    if not isinstance(value.get("type"), str):
        raise ProtocolError("a message must have a type")
    return value


def _parse(payload: bytes) -> object:
    try:
        value: object = json.loads(
            payload.decode("utf-8"),
            object_pairs_hook=_once,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_constant,
        )
    except UnicodeDecodeError as error:
        raise ProtocolError(f"the message is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise ProtocolError("the message is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ProtocolError(f"the message is not JSON: {error.msg} at character {error.pos}") from None
    return value


def _once(pairs: list[tuple[str, object]]) -> _Object:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ProtocolError(f"a key appears twice in {_shown(keys)}")
    return found


def _integer(text: str) -> int:
    if len(text) > _INTEGER_DIGITS or int(text) not in _INTEGERS:
        raise ProtocolError("the message has an integer of more than 64 bits")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ProtocolError("the message has a number beyond double precision")
    return value


def _constant(text: str) -> NoReturn:
    raise ProtocolError(f"{text} is not JSON")


def _check_tree(root: _Object) -> None:
    """Check depth and text: JSON can escape half a surrogate pair, which UTF-8 cannot encode."""
    level: list[object] = [root]
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for value in level:
            if isinstance(value, dict):
                below.extend(value)
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
            elif isinstance(value, str):
                _check_text(value)
        if not below:
            return
        level = below
    raise ProtocolError(f"the message is nested more than {MAX_DEPTH} deep")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ProtocolError("the message has text with half a surrogate pair") from None


def _only(fields: _Object, *names: str) -> None:
    expected = {"v", "type", *names}
    if fields.keys() != expected:
        missing = ", ".join(sorted(expected - fields.keys()))
        extra = ", ".join(_shown(key) for key in sorted(fields.keys() - expected)[:4])
        raise ProtocolError(
            f"the message has wrong fields (missing: {missing or 'none'}; unknown: {extra or 'none'})"
        )


def _ranged(fields: _Object, name: str, low: int, high: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not low <= value <= high:
        raise ProtocolError(f"{name} must be an integer of {low} to {high}, not {_shown(value)}")
    return value


def _text(fields: _Object, name: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        raise ProtocolError(f"{name} must be text, not {_shown(value)}")
    return value


def _mapping(fields: _Object, name: str) -> _Object:
    value = fields[name]
    if not isinstance(value, dict):
        raise ProtocolError(f"{name} must be an object, not {_shown(value)}")
    return value


def _shown(value: object) -> str:
    """Return a short, printable quotation of a peer's value."""
    text = ascii(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
