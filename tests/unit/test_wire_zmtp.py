"""Bytes of ZMTP: a handshake between both ends, split anywhere; any other input raises ProtocolError."""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mpsd.wire.messages import ProtocolError
from mpsd.wire.zmtp import DEALER, ROUTER, Connection, Phase

LIMIT = 1000
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


def command(name: bytes, content: bytes = b"") -> bytes:
    body = bytes([len(name)]) + name + content
    return bytes([4, len(body)]) + body


def metadata(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


READY = command(b"READY", metadata(b"Socket-Type", b"ROUTER"))


def opened() -> Connection:
    connection = Connection(DEALER, LIMIT)
    assert connection.receive(GREETING + READY) == []
    connection.to_send()
    return connection


def shake_hands(piece: int = 10_000) -> tuple[Connection, Connection]:
    ends = Connection(DEALER, LIMIT), Connection(ROUTER, LIMIT)
    for _ in range(3):
        for mine, other in (ends, ends[::-1]):
            data = mine.to_send()
            for at in range(0, len(data), piece):
                assert other.receive(data[at : at + piece]) == []
    assert {end.phase for end in ends} == {Phase.OPEN}
    return ends


@given(st.lists(st.binary(max_size=LIMIT), max_size=5), st.integers(1, 300))
def test_frames_arrive_whole_and_in_order(frames: list[bytes], piece: int) -> None:
    client, server = shake_hands(piece)
    for frame in frames:
        client.send(frame)
    data = client.to_send()
    found = [f for at in range(0, len(data), piece) for f in server.receive(data[at : at + piece])]
    assert found == frames
    assert client.to_send() == b""


@pytest.mark.parametrize("size", [0, 255, 256, LIMIT])
def test_short_and_long_frames(size: int) -> None:
    client, server = shake_hands()
    client.send(b"x" * size)
    assert server.receive(client.to_send()) == [b"x" * size]


def test_frames_may_come_with_the_handshake() -> None:
    connection = Connection(DEALER, LIMIT)
    assert connection.receive(GREETING + READY + b"\x00\x02hi") == [b"hi"]


def test_the_metadata_of_libzmq_is_read() -> None:
    connection = Connection(DEALER, LIMIT)
    both = metadata(b"SOCKET-type", b"ROUTER") + metadata(b"Identity", b"")
    connection.receive(GREETING + command(b"READY", both))
    assert connection.phase is Phase.OPEN


def test_a_ping_is_answered_with_its_context() -> None:
    connection = opened()
    connection.receive(command(b"PING", b"\x00\x0acontext") + command(b"PONG"))
    assert connection.to_send() == command(b"PONG", b"context")


def test_nothing_is_sent_before_the_handshake() -> None:
    with pytest.raises(ProtocolError, match="greeting"):
        Connection(DEALER, LIMIT).send(b"x")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"HTTP/1.1 400", "does not speak ZMTP"),
        (b"\xff" + bytes(8) + b"\x00", "does not speak ZMTP"),
        (GREETING[:10] + b"\x01", "speaks ZMTP 1"),
        (GREETING.replace(b"NULL\0", b"CURVE"), "security mechanism"),
        (GREETING + b"\x00\x02hi", "before the handshake"),
        (GREETING + command(b"READY", metadata(b"Socket-Type", b"PUB")), "is a b'PUB' socket"),
        (GREETING + command(b"READY"), "is a b'' socket"),
        (GREETING + command(b"READY", b"\x0bSocket"), "incomplete metadata"),
        (GREETING + command(b"READY", metadata(b"a", b"b")[:-1]), "incomplete metadata"),
        (GREETING + command(b"ERROR", b"\x06nobody"), "refused the connection: 'nobody'"),
        (GREETING + command(b"ERROR"), "no reason given"),
        (GREETING + command(b"PING"), "unexpected command b'PING'"),
        (GREETING + b"\x04\x00", "unexpected command b''"),
        (GREETING + READY + READY, "unexpected command b'READY'"),
        (GREETING + READY + b"\x01\x01x", "several frames"),
        (GREETING + READY + b"\x08\x01x", "flags 0x8"),
        (GREETING + READY + b"\x02" + struct.pack(">Q", LIMIT + 1), "exceeds the limit of 1000"),
        (GREETING + READY + b"\x02" + b"\xff" * 8, "exceeds the limit of 1000"),
        (GREETING + READY + b"\x06" + struct.pack(">Q", 5000), "exceeds the limit of 1024"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, said: str) -> None:
    connection = Connection(DEALER, LIMIT)
    with pytest.raises(ProtocolError) as caught:
        connection.receive(data)
    assert said in caught.value.message
    assert connection.phase is Phase.BROKEN
    with pytest.raises(ProtocolError, match="broken"):
        connection.receive(b"")


def test_a_large_frame_waits_until_it_is_whole() -> None:
    connection = opened()
    head = b"\x02" + struct.pack(">Q", LIMIT)
    assert connection.receive(head[:4]) == []
    assert connection.receive(head[4:] + b"x" * (LIMIT - 1)) == []
    assert connection.receive(b"x") == [b"x" * LIMIT]


@given(st.lists(st.binary(max_size=200), max_size=8), st.sampled_from([b"", GREETING, GREETING + READY]))
@example([b"\x04\x05\xff123"], GREETING)
def test_hostile_bytes_give_frames_or_a_protocol_error(chunks: list[bytes], start: bytes) -> None:
    connection = Connection(DEALER, LIMIT)
    connection.receive(start)
    try:
        for chunk in chunks:
            assert all(len(frame) <= LIMIT for frame in connection.receive(chunk))
            connection.to_send()
    except ProtocolError:
        assert connection.phase is Phase.BROKEN
