"""mpsd-exporter beside a daemon on the simulated GPU: text, port, Unix socket, no daemon, bad places."""

from __future__ import annotations

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

from mpsd import exporter
from mpsd.errors import NotFoundError, UsageError
from mpsd.text import SILENT_GUARD

FATE = {
    "outcome": "moved",
    "told_ms": 0.0,
    "held_ms": 0.5,
    "fence_ms": 12.0,
    "first_ms": 13.0,
}
"""As a journal has it that an earlier mpsd began."""
RECORD = {"id": 4, "decision_ms": 1.5, "clients": [{**FATE, "restored_bytes": 7, "replayed": 2}]}
PROGRAM = {"standing": "ready", "standby_bytes": 600}
STATUS: dict[str, Any] = {
    "domains": [{"state": "active"}, {"state": "warm"}],
    "clients": [{"state": "attached"}, {"state": "attached"}],
    "problems": ["cannot write it", f"{SILENT_GUARD}: low"],
    "kernel_isolation": {"mode": "isolate"},
    "counters": {"faults": 3, "vault_bytes": 4096},
    "slots": [{"id": "s", "survivable": 1, "programs": [PROGRAM, {**PROGRAM, "standing": "offered"}]}],
}


def registry(answers: Any) -> CollectorRegistry:
    made = CollectorRegistry(auto_describe=False)
    made.register(exporter.Collector(answers))
    return made


def values(text: str) -> dict[str, float]:
    return {
        sample.name + "".join(f",{v}" for _, v in sorted(sample.labels.items(), reverse=True)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@contextmanager
def served(made: CollectorRegistry, where: str) -> Iterator[Any]:
    server = exporter.serve(made, where)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(20)
        server.server_close()


def test_what_is_told() -> None:
    told = values(exporter.generate_latest(registry(lambda: (STATUS, [RECORD]))).decode())
    assert told["mpsd_up"] == 1
    assert told["mpsd_domains,active"] == told["mpsd_domains,warm"] == 1
    assert told["mpsd_clients,attached"] == 2
    assert told["mpsd_kernel_isolation"] == 1
    # As status says it: an alert on this is to clear.
    assert told["mpsd_problems"] == 1
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


def test_a_daemon_that_does_not_answer() -> None:
    def nobody() -> exporter.Answers:
        raise NotFoundError("there is no daemon")

    assert values(exporter.generate_latest(registry(nobody)).decode()) == {"mpsd_up": 0}


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
            with pytest.raises(UsageError, match="somebody listens"):
                exporter.serve(registry(lambda: (STATUS, [])), f"unix:{path}")


@pytest.mark.parametrize("where", ["0.0.0.0:9000", "example.org:1", "x", "99999", "unix:/nonexistent/a/b"])
def test_places_that_are_none(where: str) -> None:
    with pytest.raises(UsageError, match="--listen"):
        exporter.serve(registry(lambda: (STATUS, [])), where)


def test_the_command_without_a_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exporter.main(["--socket", str(tmp_path / "none.sock")]) == 0
    assert values(capsys.readouterr().out) == {"mpsd_up": 0}
    assert exporter.main(["--listen", "0.0.0.0:1"]) == 2
    assert "not of this machine" in capsys.readouterr().err
