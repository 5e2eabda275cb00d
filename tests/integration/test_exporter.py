"""mpsd-exporter with a daemon on the simulated GPU: text, port, Unix socket, no daemon, bad addresses."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from mpsd.base.conditions import Code, Condition
from mpsd.base.errors import NotFoundError, UsageError
from mpsd.exporter import metrics
from mpsd.exporter import server as exporter_server

FATE = {
    "outcome": "moved",
    "told_ms": 0.0,
    "held_ms": 0.5,
    "fence_ms": 12.0,
    "first_ms": 13.0,
}
"""An entry of a journal that an earlier mpsd began."""
RECORD = {"id": 4, "decision_ms": 1.5, "clients": [{**FATE, "restored_bytes": 7, "replayed": 2}]}
PROGRAM = {"standing": "ready", "standby_bytes": 600}
STATUS: dict[str, Any] = {
    "domains": [{"state": "active"}, {"state": "warm"}],
    "clients": [{"state": "attached"}, {"state": "attached"}],
    "conditions": [Condition(Code.LOG_DISK_FULL, "/l").view(), Condition(Code.GUARD_SILENT, "low").view()],
    "kernel_isolation": {"mode": "isolate"},
    "counters": {"faults": 3, "vault_bytes": 4096},
    "slots": [{"id": "s", "survivable": 1, "programs": [PROGRAM, {**PROGRAM, "standing": "offered"}]}],
}


def registry(answers: Any) -> CollectorRegistry:
    made = CollectorRegistry(auto_describe=False)
    made.register(metrics.Collector(answers))
    return made


def values(text: str) -> dict[str, float]:
    return {
        sample.name + "".join(f",{v}" for _, v in sorted(sample.labels.items(), reverse=True)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@contextmanager
def served(made: CollectorRegistry, where: str) -> Iterator[Any]:
    server = metrics.serve(made, where)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(20)
        server.server_close()


def test_what_is_told() -> None:
    told = values(metrics.generate_latest(registry(lambda: (STATUS, [RECORD]))).decode())
    assert told["mpsd_up"] == 1
    assert told["mpsd_domains,active"] == told["mpsd_domains,warm"] == 1
    assert told["mpsd_clients,attached"] == 2
    assert told["mpsd_kernel_isolation"] == 1
    # As in status: an alert on this metric must clear.
    assert told["mpsd_problems"] == 1
    assert told["mpsd_condition,log-disk-full"] == told["mpsd_condition,guard-silent"] == 1
    assert sum(told[f"mpsd_condition,{code}"] for code in Code) == 2
    assert told["mpsd_events_total,faults"] == 3
    assert told["mpsd_held,vault_bytes"] == 4096 and "mpsd_events_total,vault_bytes" not in told
    assert told["mpsd_failovers_survivable,s"] == 1
    assert told["mpsd_standby_bytes,s"] == 1200
    assert told["mpsd_failover_programs,ready,s"] == told["mpsd_failover_programs,offered,s"] == 1
    assert told["mpsd_failovers_total"] == 4
    assert told["mpsd_failover_programs_told_total,moved"] == 1
    assert told["mpsd_failover_seconds_bucket,fence,0.01"] == 0
    assert told["mpsd_failover_seconds_bucket,fence,0.02"] == 1
    assert told["mpsd_failover_seconds_sum,decision"] == pytest.approx(0.0015)
    assert told["mpsd_failover_restored_bytes_total"] == 7
    assert told["mpsd_failover_replayed_launches_total"] == 2


def test_a_daemon_of_an_earlier_release_has_problems_alone() -> None:
    status = STATUS | {"problems": ["cannot write it", "outer guard is silent: low"]}
    del status["conditions"]
    told = values(metrics.generate_latest(registry(lambda: (status, []))).decode())
    assert told["mpsd_problems"] == 1
    assert not [name for name in told if name.startswith("mpsd_condition")]


def test_a_daemon_that_does_not_answer() -> None:
    def nobody() -> metrics.Answers:
        raise NotFoundError("there is no daemon")

    assert values(metrics.generate_latest(registry(nobody)).decode()) == {"mpsd_up": 0}


@pytest.mark.parametrize("kind", ["port", "unix"])
def test_it_is_served_here_and_nowhere_else(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.sock"
    with served(registry(lambda: (STATUS, [])), "0" if kind == "port" else f"unix:{path}") as server:
        if kind == "port":
            assert server.server_address[0] == "127.0.0.1"
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
        else:
            connection = http.client.HTTPConnection("localhost", timeout=20)
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.connect(str(path))
        connection.request("GET", "/metrics")
        assert values(connection.getresponse().read().decode())["mpsd_up"] == 1
        connection.close()
        if kind == "unix":
            with pytest.raises(UsageError, match="another process listens"):
                metrics.serve(registry(lambda: (STATUS, [])), f"unix:{path}")


@pytest.mark.parametrize("where", ["0.0.0.0:9000", "example.org:1", "x", "99999", "unix:/nonexistent/a/b"])
def test_places_that_are_none(where: str) -> None:
    with pytest.raises(UsageError, match="--listen"):
        metrics.serve(registry(lambda: (STATUS, [])), where)


def scrape(server: Any) -> dict[str, float]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return values(text)


def test_a_connection_without_a_request_is_closed_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter_server, "READ_S", 0.05)
    with served(registry(lambda: (STATUS, [])), "0") as server:
        for begun in (b"", b"GET /metrics HTTP/1.1\r\nA: "):
            with socket.create_connection(server.server_address, timeout=20) as idle:
                idle.sendall(begun)
                # The answer may be an error; then the connection ends.
                while idle.recv(4096):
                    pass


def test_a_request_without_an_end_is_refused() -> None:
    with served(registry(lambda: (STATUS, [])), "0") as server:
        greedy = socket.create_connection(server.server_address, timeout=20)
        with greedy, pytest.raises(ConnectionError):
            while True:
                greedy.sendall(b"GET /" + b"a" * 65536)
        assert scrape(server)["mpsd_up"] == 1


def test_an_answer_in_preparation_is_not_displaced_by_idle_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporter_server, "MAX_CONNECTIONS", 2)
    asked, answer = threading.Event(), threading.Event()

    def slow() -> metrics.Answers:
        asked.set()
        assert answer.wait(20)
        return STATUS, []

    with served(registry(slow), "0") as server:
        first = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
        first.request("GET", "/metrics")
        assert asked.wait(20)
        idle = [socket.create_connection(server.server_address, timeout=20) for _ in range(4)]
        # Each idle connection displaced the one before it; the last one stays.
        assert [connection.recv(1) for connection in idle[:-1]] == [b""] * 3
        answer.set()
        assert values(first.getresponse().read().decode())["mpsd_up"] == 1
        for connection in (*idle, first):
            connection.close()


def test_connections_that_do_not_read_their_answers_are_displaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter_server, "MAX_CONNECTIONS", 2)

    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        # The answer to /big exceeds the buffers of a socket.
        return [b"x" * (32 << 20 if environ["PATH_INFO"] == "/big" else 1)]

    monkeypatch.setattr(metrics, "make_wsgi_app", lambda made: app)
    with served(registry(lambda: (STATUS, [])), "0") as server, contextlib.ExitStack() as stack:
        for _ in range(2):
            deaf = stack.enter_context(socket.create_connection(server.server_address, timeout=20))
            deaf.sendall(b"GET /big HTTP/1.0\r\n\r\n")
            # Its answer has begun.
            assert deaf.recv(1, socket.MSG_PEEK)
        reader = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
        reader.request("GET", "/small")
        assert reader.getresponse().read() == b"x"
        reader.close()


def test_connections_that_ended_in_the_queue_cost_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue holds more of them than a flood makes while the server is busy; all are accepted at once."""
    count = min(500, int(Path("/proc/sys/net/core/somaxconn").read_text()) // 2)
    path, begun = tmp_path / "m.sock", []
    begin = exporter_server._Server.process_request_thread
    monkeypatch.setattr(
        exporter_server._Server,
        "process_request_thread",
        lambda self, *given: (begun.append(given), begin(self, *given)),
    )
    server = metrics.serve(registry(lambda: (STATUS, [])), f"unix:{path}")
    with contextlib.ExitStack() as stack:
        stack.callback(server.server_close)
        for _ in range(count):
            with socket.socket(socket.AF_UNIX) as made:
                made.setblocking(False)
                made.connect(str(path))
        scraper = http.client.HTTPConnection("localhost", timeout=20)
        scraper.sock = stack.enter_context(socket.socket(socket.AF_UNIX))
        scraper.sock.connect(str(path))
        scraper.request("GET", "/metrics")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        stack.callback(thread.join, 20)
        stack.callback(server.shutdown)
        assert values(scraper.getresponse().read().decode())["mpsd_up"] == 1
        assert len(begun) == 1


def test_a_flood_of_scrapes_costs_one_query_a_second() -> None:
    now, queries = [0.0], []

    def answers() -> metrics.Answers:
        queries.append(now[0])
        if len(queries) == 2:
            raise NotFoundError("there is no daemon")
        return STATUS, []

    cached = metrics.Cached(answers, lambda: now[0])
    for _ in range(100):
        assert cached()[0] is STATUS
    now[0] = metrics.KEPT_S
    for _ in range(100):
        with pytest.raises(NotFoundError):
            cached()
    now[0] = 2 * metrics.KEPT_S
    assert cached()[0] is STATUS
    assert queries == [0.0, 1.0, 2.0]


def test_the_command_without_a_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert metrics.main(["--socket", str(tmp_path / "none.sock")]) == 0
    assert values(capsys.readouterr().out) == {"mpsd_up": 0}
    assert metrics.main(["--listen", "0.0.0.0:1"]) == 2
    assert "not an address of this machine" in capsys.readouterr().err
