"""mpsd-exporter: the data of `mpsd-ctl status` and `mpsd-ctl failovers` as Prometheus metrics.

A separate process. It asks the daemon over the daemon's socket, at most once a second, so it sees only data
that its user may see. It listens on a Unix socket or on a loopback port. It needs prometheus-client
(`pip install prometheus-client`). Names and types follow https://prometheus.io/docs/practices/naming/.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from wsgiref.simple_server import WSGIServer

import mpsd_client
from mpsd.base import output
from mpsd.base.conditions import Code, degrading_texts
from mpsd.base.errors import MpsdError, UnsupportedError
from mpsd.exporter.server import listen

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
MAX_RECORDS = 1000
"""Number of fail-over records that each query asks for."""
KEPT_S = 1.0
"""Time [s] for which scrapes get the same answers."""
GAUGE_COUNTERS = frozenset(
    {"leases_held", "vault_bytes", "vault_held", "vault_dead_bytes", "vault_dead_held"}
)
"""Counters of the daemon that are gauges: they can fall."""

Answers = tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]


def query_daemon(path: str | None, timeout_s: float = 5.0) -> Answers:
    """Return the daemon's status and its last fail-over records. Raise MpsdError."""
    with mpsd_client.connect(path, timeout_s) as client:
        return client.status(), client.failovers(limit=MAX_RECORDS)


class Cached:
    """Keep the daemon's answers, or its error, for KEPT_S: a flood of scrapes costs one query per second.

    Threads that call it during a query wait for the result of that query.
    """

    def __init__(self, answers: Callable[[], Answers], clock: Callable[[], float] = time.monotonic) -> None:
        self._answers, self._clock = answers, clock
        self._lock = threading.Lock()
        self._until = float("-inf")
        self._found: Answers | MpsdError | None = None

    def __call__(self) -> Answers:
        with self._lock:
            if self._found is None or self._clock() >= self._until:
                try:
                    self._found = self._answers()
                except MpsdError as error:
                    self._found = error
                self._until = self._clock() + KEPT_S
            found = self._found
        if isinstance(found, MpsdError):
            raise found.with_traceback(None)
        return found


class Collector:
    """Metric families from the daemon's answers."""

    def __init__(self, answers: Callable[[], Answers]) -> None:
        self._answers = answers

    def collect(self) -> Iterator[Any]:
        try:
            status, failovers = self._answers()
        except MpsdError:
            yield GaugeMetricFamily("mpsd_up", "1 if the daemon answers, else 0.", 0)
            return
        yield GaugeMetricFamily("mpsd_up", "1 if the daemon answers, else 0.", 1)
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
    text = "1 if the patched kernel module isolates memory faults, else 0."
    yield GaugeMetricFamily("mpsd_kernel_isolation", text, int(isolating))
    text = "Conditions that make the status degraded."
    yield GaugeMetricFamily("mpsd_problems", text, len(degrading_texts(status)))
    if "conditions" in status:
        yield _conditions(status["conditions"])
    # Counters since the start of the daemon.
    events = CounterMetricFamily("mpsd_events", "Counters of the daemon, by name.", labels=["name"])
    held = GaugeMetricFamily(
        "mpsd_held", "Leases and vault memory that the daemon holds now, by name.", labels=["name"]
    )
    for name, value in sorted(status["counters"].items()):
        (held if name in GAUGE_COUNTERS else events).add_metric([name], value)
    yield from (events, held)


def _conditions(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Return a family with every code of the list: an alert needs no code to be absent."""
    text = "1 if a condition with this code holds, else 0 (mpsd-ctl conditions)."
    family = GaugeMetricFamily("mpsd_condition", text, labels=["code"])
    present = {str(row["code"]) for row in rows}
    for code in sorted({code.value for code in Code} | present):
        family.add_metric([code], int(code in present))
    return family


def _slots(slots: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    possible = GaugeMetricFamily(
        "mpsd_failovers_survivable",
        "1 if programs of the slot are protected by fail-over now, else 0.",
        labels=["slot"],
    )
    memory = GaugeMetricFamily(
        "mpsd_standby_bytes", "GPU memory of standby contexts, as programs report it.", labels=["slot"]
    )
    programs = GaugeMetricFamily(
        "mpsd_failover_programs", "Fail-over participants by standing.", labels=["slot", "standing"]
    )
    for slot in slots:
        possible.add_metric([slot["id"]], slot["survivable"])
        memory.add_metric([slot["id"]], sum(p["standby_bytes"] for p in slot["programs"]))
        for standing, many in sorted(Counter(p["standing"] for p in slot["programs"]).items()):
            programs.add_metric([slot["id"], standing], many)
    yield from (possible, memory, programs)


def _failovers(records: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    # Record numbers continue over restarts, so the highest number is the total.
    total = max((record["id"] for record in records), default=0)
    yield CounterMetricFamily("mpsd_failovers", "Fail-overs since the journal began.", total)
    fates = [fate for record in records for fate in record["clients"]]
    outcomes = CounterMetricFamily(
        "mpsd_failover_programs_told",
        f"Outcomes of programs in the last {MAX_RECORDS} fail-overs.",
        labels=["outcome"],
    )
    for outcome, many in sorted(Counter(fate["outcome"] for fate in fates).items()):
        outcomes.add_metric([outcome], many)
    yield outcomes
    times = HistogramMetricFamily(
        "mpsd_failover_seconds",
        "Time from the first sign to the decision, and from the order to move to each step of a move.",
        labels=["step"],
    )
    steps = {"decision": [r["decision_ms"] for r in records]}
    # Records that an earlier version wrote have fewer steps.
    steps |= {step: [fate.get(key) for fate in fates] for key, step in STEPS.items()}
    for step, values in steps.items():
        seconds = [value / 1e3 for value in values if value is not None]
        buckets = [(str(bound), sum(s <= bound for s in seconds)) for bound in BUCKETS_S]
        times.add_metric([step], [*buckets, ("+Inf", len(seconds))], sum(seconds))
    yield times
    for key, name, text in (
        ("restored_bytes", "mpsd_failover_restored_bytes", "Bytes that programs restored."),
        ("replayed", "mpsd_failover_replayed_launches", "Launches that programs replayed."),
    ):
        yield CounterMetricFamily(name, text, sum(fate[key] for fate in fates))


def serve(registry: Any, where: str) -> WSGIServer:
    """Return a server at unix:PATH or [127.0.0.1:]PORT, not yet running. Raise UsageError."""
    return listen(make_wsgi_app(registry), where)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mpsd-exporter", description=__doc__.splitlines()[0])
    parser.add_argument("--socket", help="the daemon's socket (default: MPSD_SOCKET, else as mpsd-ctl)")
    where = "unix:PATH, or a port on 127.0.0.1 (usually 9469); without --listen, print the metrics once"
    parser.add_argument("--listen", metavar="WHERE", help=where)
    options = parser.parse_args(argv)
    try:
        if not INSTALLED:
            name = "prometheus-client"
            raise UnsupportedError(f"{name} is not installed", remedy=f"pip install {name}")
        registry = CollectorRegistry(auto_describe=False)
        registry.register(Collector(Cached(lambda: query_daemon(options.socket))))
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
