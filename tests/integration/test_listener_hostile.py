"""What nobody can do to the listener: hostile, greedy, silent and broken peers over real sockets."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mpsd_client
from mpsd.listener import Limits
from mpsd.wire import codec
from mpsd.wire.messages import MAX_REQUEST_BYTES, ErrorReply, Reply, Request
from tests.support.descriptors import open_descriptors
from tests.support.listening import DEADLINE_S, RawClient, RunningListener, frame, resident_bytes


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket's path, short enough."""
    with tempfile.TemporaryDirectory(prefix="mpsd-test-") as where:
        yield Path(where) / "mpsd.sock"


def test_only_so_much_may_be_asked_at_once(path: Path) -> None:
    limits = Limits(pending_per_connection=2, pending=3)
    with RunningListener(path, limits) as running, RawClient(path) as one, RawClient(path) as two:
        for client, ids in ((one, (1, 2, 3)), (two, (1, 2))):
            for request_id in ids:
                client.send(codec.encode(Request(request_id, "doctor", {}, 60_000)))
            said = codec.decode_answer(client.receive())
            assert isinstance(said, ErrorReply) and (said.id, said.code) == (ids[-1], "busy")
        running.let_go()
        assert {codec.decode_answer(one.receive()).__class__ for _ in range(2)} == {Reply}


def test_a_user_may_hold_only_so_many_connections(path: Path) -> None:
    with RunningListener(path, Limits(connections=3)):
        held = [RawClient(path) for _ in range(3)]
        with pytest.raises(mpsd_client.NotRunningError, match="lost"):
            mpsd_client.connect(str(path))
        held.pop().socket.close()
        end = time.monotonic() + DEADLINE_S
        while True:
            try:
                with mpsd_client.connect(str(path)) as client:
                    client.version()
                break
            except mpsd_client.NotRunningError:
                assert time.monotonic() < end
        for raw in held:
            raw.socket.close()


def test_whoever_does_not_shake_hands_is_let_go(path: Path) -> None:
    with RunningListener(path, Limits(handshake_s=0.05)), RawClient(path, handshake=False) as silent:
        silent.until_closed()


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param(b"GET / HTTP/1.0\r\n\r\n", id="another protocol"),
        pytest.param(frame(b"x" * (MAX_REQUEST_BYTES + 1)), id="a frame over the limit"),
        pytest.param(b"\x02" + b"\xff" * 8, id="a frame of 2**64 bytes"),
        pytest.param(frame(b"{}", flags=1), id="several frames"),
        pytest.param(b"\x04\x05READY", id="a broken command"),
        pytest.param(frame(b"{}") * 50, id="broken requests without end"),
    ],
)
def test_who_does_not_speak_the_protocol_is_let_go(path: Path, hostile: bytes) -> None:
    with RunningListener(path), mpsd_client.connect(str(path)) as good:
        with RawClient(path, handshake=hostile[:1] != b"G") as bad:
            bad.socket.sendall(hostile)
            bad.until_closed()
        assert good.version()["op"] == "version"


def test_a_broken_request_is_answered(path: Path) -> None:
    with RunningListener(path), RawClient(path) as client:
        client.send(b'{"v":2}')
        said = codec.decode_answer(client.receive())
        assert isinstance(said, ErrorReply) and said.code == "protocol" and said.id is None


def test_who_does_not_read_its_answers_costs_little(path: Path) -> None:
    ask = codec.encode(Request(1, "faults", {"limit": 1000}, 10_000))
    with RunningListener(path), mpsd_client.connect(str(path)) as good:
        before = resident_bytes()
        with RawClient(path) as greedy:
            greedy.socket.settimeout(0.2)
            try:
                for _ in range(3000):
                    greedy.send(ask)
            except (TimeoutError, ConnectionError):
                pass
            assert good.version()["op"] == "version"
            assert resident_bytes() - before < 150 << 20


def test_an_endless_message_of_many_frames_costs_nothing(path: Path) -> None:
    with RunningListener(path), mpsd_client.connect(str(path)) as good:
        before = resident_bytes()
        with RawClient(path) as bad:
            try:
                for _ in range(2000):
                    bad.socket.sendall(frame(b"x" * 10_000, flags=1))
            except ConnectionError:
                pass
            assert good.version()["op"] == "version"
        assert resident_bytes() - before < 10 << 20


def test_garbage_of_any_kind_leaves_the_daemon_alone(path: Path) -> None:
    pieces = (
        st.binary(max_size=300) | st.binary(max_size=100).map(frame) | st.just(frame(b'{"v":1,"type":"re'))
    )

    with RunningListener(path) as running, mpsd_client.connect(str(path)) as good:
        good.version()
        before = open_descriptors()

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(pieces, max_size=6), st.booleans())
        def attack(chunks: list[bytes], handshake: bool) -> None:
            try:
                with RawClient(path, handshake=handshake) as bad:
                    for chunk in chunks:
                        bad.socket.sendall(chunk)
            except ConnectionError:
                pass
            assert good.version()["op"] == "version"

        attack()
        # Every connection that has gone is forgotten, and its descriptors are closed.
        end = time.monotonic() + DEADLINE_S
        while True:
            connections, now_open = list(running.listener._connections.values()), open_descriptors()
            if len(connections) == 1 and len(now_open) <= len(before):
                break
            left = {fd: target for fd, target in now_open.items() if before.get(fd) != target}
            said = [(c.open, c.session.closed, c.credentials) for c in connections]
            assert time.monotonic() < end, f"connections {said}, descriptors {left}"
            good.version()
