"""mpsd-exporter: what `mpsd-ctl status` and `failovers` show, for Prometheus, from a process of its own.

It asks the daemon when it is scraped, over the daemon's socket, so it sees what its user may see. It
listens on a Unix socket or on a port of this machine, never beyond. Needs prometheus-client
(`pip install prometheus-client`).
Names and types follow https://prometheus.io/docs/practices/naming/.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from socketserver import UnixStreamServer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import mpsd_client
from mpsd import output
from mpsd.errors import MpsdError, UnsupportedError, UsageError
from mpsd.text import degrading

try:
    from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
except ImportError:
    INSTALLED = False
else:
    INSTALLED = True

BUCKETS_S = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
STEPS = {
    "told_ms": "told",
    "held_ms": "held",
    "fence_ms": "fence",
    "first_ms": "first_call",
    "turn_ms": "turn",
    "done_ms": "done_again",
}
KEPT = 1000
"""Fail-overs that are asked for at each scrape."""
HELD = frozenset({"leases_held", "vault_bytes", "vault_held", "vault_dead_bytes", "vault_dead_held"})
"""What of the daemon's counters goes down again."""

Answers = tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]


def ask(path: str | None, timeout_s: float = 5.0) -> Answers:
    """status and the records of fail-overs. Raises MpsdError."""
    with mpsd_client.connect(path, timeout_s) as client:
        return client.status(), client.failovers(limit=KEPT)


class Collector:
    """Metric families from the daemon's answers, asked anew for each scrape."""

    def __init__(self, answers: Callable[[], Answers]) -> None:
        self._answers = answers

    def collect(self) -> Iterator[Any]:
        try:
            status, failovers = self._answers()
        except MpsdError:
            yield GaugeMetricFamily("mpsd_up", "Whether the daemon answers.", 0)
            return
        yield GaugeMetricFamily("mpsd_up", "Whether the daemon answers.", 1)
        yield from _state(status)
        yield from _slots(status.get("slots", ()))
        yield from _failovers(failovers)


def _count(name: str, text: str, label: str, values: Iterable[str]) -> Any:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, many in sorted(Counter(values).items()):
        family.add_metric([value], many)
    return family


def _state(status: Mapping[str, Any]) -> Iterator[Any]:
    yield _count("mpsd_domains", "Fault domains by state.", "state", (d["state"] for d in status["domains"]))
    yield _count("mpsd_clients", "Clients by state.", "state", (c["state"] for c in status["clients"]))
    isolating = status.get("kernel_isolation", {}).get("mode") == "isolate"
    text = "Whether memory faults stay with their clients, by the kernel part."
    yield GaugeMetricFamily("mpsd_kernel_isolation", text, int(isolating))
    text = "Capability losses shown in status, which make it degraded."
    yield GaugeMetricFamily("mpsd_problems", text, len(degrading(status["problems"])))
    # What the daemon counts since its start; a name says what.
    events = CounterMetricFamily("mpsd_events", "The daemon's own counters, by name.", labels=["name"])
    held = GaugeMetricFamily("mpsd_held", "What the daemon holds now, by name.", labels=["name"])
    for name, value in sorted(status["counters"].items()):
        (held if name in HELD else events).add_metric([name], value)
    yield from (events, held)


def _slots(slots: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    possible = GaugeMetricFamily(
        "mpsd_failovers_survivable", "Fail-overs that could be survived now.", labels=["slot"]
    )
    memory = GaugeMetricFamily(
        "mpsd_standby_bytes", "GPU memory of standby contexts, by the programs' own word.", labels=["slot"]
    )
    programs = GaugeMetricFamily(
        "mpsd_failover_programs", "Willing programs, by how they stand.", labels=["slot", "standing"]
    )
    for slot in slots:
        possible.add_metric([slot["id"]], slot["survivable"])
        memory.add_metric([slot["id"]], sum(p["standby_bytes"] for p in slot["programs"]))
        for standing, many in sorted(Counter(p["standing"] for p in slot["programs"]).items()):
            programs.add_metric([slot["id"], standing], many)
    yield from (possible, memory, programs)


def _failovers(records: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    # Their numbers go on over restarts, so the last one is how many there were.
    total = max((record["id"] for record in records), default=0)
    yield CounterMetricFamily("mpsd_failovers", "Domains that were left.", total)
    fates = [fate for record in records for fate in record["clients"]]
    outcomes = CounterMetricFamily(
        "mpsd_failover_programs_told",
        f"What became of programs (last {KEPT} fail-overs).",
        labels=["outcome"],
    )
    for outcome, many in sorted(Counter(fate["outcome"] for fate in fates).items()):
        outcomes.add_metric([outcome], many)
    yield outcomes
    times = HistogramMetricFamily(
        "mpsd_failover_seconds",
        "From the first sign to the decision; from the word to a program until each step of its move.",
        labels=["step"],
    )
    steps = {"decision": [r["decision_ms"] for r in records]}
    # Records of an earlier mpsd, in the same journal, know fewer steps.
    steps |= {step: [fate.get(key) for fate in fates] for key, step in STEPS.items()}
    for step, values in steps.items():
        seconds = [value / 1e3 for value in values if value is not None]
        buckets = [(str(bound), sum(s <= bound for s in seconds)) for bound in BUCKETS_S]
        times.add_metric([step], [*buckets, ("+Inf", len(seconds))], sum(seconds))
    yield times
    for key, name, text in (
        ("restored_bytes", "mpsd_failover_restored_bytes", "Bytes that programs restored."),
        ("replayed", "mpsd_failover_replayed_launches", "Launches that programs did again."),
    ):
        yield CounterMetricFamily(name, text, sum(fate[key] for fate in fates))


class _UnixServer(WSGIServer):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        # As http.server, but for the name of a host that there is none of.
        UnixStreamServer.server_bind(self)
        self.server_name, self.server_port = "localhost", 0
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        # A peer on a Unix socket has no address, and the handler wants one.
        return super().get_request()[0], ("local", 0)


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def serve(registry: Any, where: str) -> WSGIServer:
    """A server at unix:PATH or [127.0.0.1:]PORT, not yet running. Raises UsageError."""
    app = make_wsgi_app(registry)
    try:
        if where.startswith("unix:"):
            path = where.removeprefix("unix:")
            with suppress(ConnectionRefusedError, FileNotFoundError), socket.socket(socket.AF_UNIX) as other:
                other.connect(path)
                raise UsageError(
                    f"{path}: somebody listens there", remedy="is mpsd-exporter running already?"
                )
            with suppress(FileNotFoundError):
                os.unlink(path)
            server: WSGIServer = _UnixServer(path, _Quiet)  # type: ignore[arg-type]
            server.set_app(app)
            return server
        host, _, port = where.rpartition(":")
        if host not in ("", "127.0.0.1", "localhost") or not port.isdecimal():
            raise UsageError(f"--listen {where}: not of this machine", remedy="unix:PATH, or a port")
        return make_server("127.0.0.1", int(port), app, handler_class=_Quiet)
    except (OSError, OverflowError) as error:
        raise UsageError(f"--listen {where}: {error}", remedy="choose another place") from error


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mpsd-exporter", description=__doc__.splitlines()[0])
    parser.add_argument("--socket", help="the daemon's socket (default: MPSD_SOCKET, or the usual place)")
    where = "unix:PATH, or a port on 127.0.0.1 (usual: 9469); without it what there is now is printed once"
    parser.add_argument("--listen", metavar="WHERE", help=where)
    options = parser.parse_args(argv)
    try:
        if not INSTALLED:
            name = "prometheus-client"
            raise UnsupportedError(f"{name} is not installed", remedy=f"pip install {name}")
        registry = CollectorRegistry(auto_describe=False)
        registry.register(Collector(lambda: ask(options.socket)))
        if not options.listen:
            return output.put(generate_latest(registry).decode(), "mpsd-exporter")
        with serve(registry, options.listen) as server:
            server.serve_forever()
    except MpsdError as error:
        print(f"mpsd-exporter: {error}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, BrokenPipeError):
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
