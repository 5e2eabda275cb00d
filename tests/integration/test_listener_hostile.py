"""Hostile, greedy, silent and broken peers over real sockets do not harm the listener."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mpsd_client
from mpsd.peers import Limits
from mpsd.wire import codec
from mpsd.wire.messages import MAX_REQUEST_BYTES, ErrorReply, Reply, Request
from mpsd_client import transport
from tests.support.descriptors import open_descriptors
from tests.support.listening import DEADLINE_S, RawClient, RunningListener, frame, resident_bytes
from tests.support.vaulting import kernel_refuses_descriptors


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket path, short enough for sun_path."""
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


def test_answers_wait_for_a_peer_that_does_not_read(path: Path) -> None:
    with RunningListener(path) as running, mpsd_client.connect(str(path)) as good:
        before = resident_bytes()
        with RawClient(path) as greedy:
            for number in range(1, 11):
                greedy.send(codec.encode(Request(number, "faults", {"limit": 1000}, 60_000)))
            # One answer of 1 MiB waits to be read; no second request is answered meanwhile.
            for _ in range(3):
                assert good.version()["op"] == "version"
            assert sum(request.op == "faults" for _, request in running.seen) == 1
            assert resident_bytes() - before < 20 << 20
            answers = [codec.decode_answer(greedy.receive()) for _ in range(10)]
            assert [answer.id for answer in answers if isinstance(answer, Reply)] == list(range(1, 11))


def test_a_flood_of_small_answers_that_are_not_read_stops_the_reading(path: Path) -> None:
    with RunningListener(path, Limits(rate=1e9, burst=1e9)) as running, RawClient(path) as greedy:
        greedy.socket.setblocking(False)
        number, end, unsent = 0, time.monotonic() + DEADLINE_S, b""
        while not any(c.full for c in list(running.listener.server.connections)):
            assert time.monotonic() < end
            if not unsent:
                number += 1
                unsent = frame(codec.encode(Request(number, "version", {}, 60_000)))
            try:
                unsent = unsent[greedy.socket.send(unsent) :]
            except BlockingIOError:
                time.sleep(0.001)
        with mpsd_client.connect(str(path)) as good:
            seen = len(running.seen)
            assert good.version()["op"] == "version"
        assert len(running.seen) == seen + 1


def test_a_peer_that_never_reads_is_closed(path: Path) -> None:
    with RunningListener(path, Limits(stalled_s=0.05)) as running, RawClient(path) as greedy:
        greedy.send(codec.encode(Request(1, "faults", {"limit": 1000}, 60_000)))
        counters = running.listener.server.counters
        end = time.monotonic() + DEADLINE_S
        while not counters["closed_does_not_read"]:
            assert time.monotonic() < end
            time.sleep(0.005)
        greedy.until_closed()


def test_kept_events_of_a_deaf_subscriber_cost_little(path: Path) -> None:
    history = [(n, frozenset[int](), {"n": n, "text": "x" * 50_000}) for n in range(1, 1001)]
    with RunningListener(path, history=history), mpsd_client.connect(str(path)) as good:
        before = resident_bytes()
        with RawClient(path) as deaf:
            deaf.send(codec.encode(Request(1, "subscribe", {"since_id": 0}, 60_000)))
            assert isinstance(codec.decode_answer(deaf.receive()), Reply)
            assert good.version()["op"] == "version"
            assert resident_bytes() - before < 15 << 20


def test_descriptors_on_the_control_socket_end_the_connection(path: Path) -> None:
    with RunningListener(path) as running, RawClient(path) as bad:
        if kernel_refuses_descriptors():
            with pytest.raises(PermissionError):
                socket.send_fds(bad.socket, [b"x"], [0] * 200)
            return
        socket.send_fds(bad.socket, [b"x"], [0] * 200)
        bad.until_closed()
        assert running.listener.server.counters["closed_descriptors"] == 1


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


def test_a_client_waits_while_the_queue_of_the_daemon_is_full(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as first:
        busy.bind(str(path))
        busy.listen(0)
        first.connect(str(path))
        with pytest.raises(mpsd_client.NotRunningError, match="unavailable"):
            transport._connect(str(path), 0.01)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(transport._connect, str(path), DEADLINE_S)
            with pytest.raises(TimeoutError):
                waiting.result(0.05)
            accepted = [busy.accept()[0] for _ in range(2)]
            waiting.result(DEADLINE_S).close()
        for one in accepted:
            one.close()


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
        # The listener forgets every closed connection and closes its descriptors.
        end = time.monotonic() + DEADLINE_S
        while True:
            connections, now_open = list(running.listener.server.connections), open_descriptors()
            if len(connections) == 1 and len(now_open) <= len(before):
                break
            left = {fd: target for fd, target in now_open.items() if before.get(fd) != target}
            said = [(c.standing, c.open, c.credentials) for c in connections]
            assert time.monotonic() < end, f"connections {said}, descriptors {left}"
            good.version()
