"""What mpsd costs and how quick it is: attach, record, eviction, stalls, memory, idle CPU, events a second.

Every figure is measured here, on processes of their own; goals are the project's, for real hardware.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from faultinject import report, stream
from faultinject.faults import by_name
from faultinject.history import History, clock
from faultinject.matrix import Matrix, Plan, tell_stderr
from faultinject.node import Node, open_node
from faultinject.rig import Rig
from faultinject.stage import Options

RECORDS, EVICTIONS = 5, 5
SETTLE_S = 2.0
EVENTS_S = 5.0


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity: how often it was measured, its median and worst, and the goal for the worst."""

    name: str
    unit: str
    samples: tuple[float, ...]
    goal: str = ""

    def row(self) -> list[str]:
        if not self.samples:
            return [self.name, "0", "-", "-", self.unit, self.goal]
        median = statistics.median(self.samples)
        return [
            self.name,
            str(len(self.samples)),
            f"{median:.2f}",
            f"{max(self.samples):.2f}",
            self.unit,
            self.goal,
        ]

    def data(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "samples": list(self.samples),
            "median": statistics.median(self.samples) if self.samples else None,
            "worst": max(self.samples, default=None),
            "goal": self.goal,
        }


def _collected(runs: Sequence[Mapping[str, Any]], key: str) -> tuple[float, ...]:
    return tuple(float(r[key]) for r in runs if r[key] is not None)


def faults_figures(backend: str, node: Node | str, seed: int, base: Path) -> list[Figure]:
    """Latencies of records and evictions, from whole runs of the matrix."""
    figures = []
    plan = Plan(backend, (), ("mpsd",), Options(seed=seed))
    matrix = Matrix(plan)

    def repeat(name: str, times: int) -> list[dict[str, Any]]:
        runs = []
        for i in range(times):
            matrix.plan = replace(plan, options=Options(seed=seed + i))
            runs.append(matrix.one(by_name(name), "mpsd", node, base))
            tell_stderr(f"{name} {i + 1}/{times}: {runs[-1]['verdict']}")
        return runs

    stores = repeat("store", RECORDS)
    figures.append(Figure("event to record", "ms", _collected(stores, "record_ms"), "5"))
    figures.append(Figure("misdeed to record's arrival", "ms", _collected(stores, "fire_to_record_ms")))
    figures.append(Figure("record to fresh server", "ms", _collected(stores, "fresh_ms"), "300"))
    figures.append(Figure("spawn to first kernel, after a fault", "ms", _collected(stores, "new_client_ms")))
    for variant, goal in (("free", "5"), ("fill", "eviction + 5")):
        runs = repeat(f"endless@{variant}", EVICTIONS)
        figures.append(Figure(f"eviction ({variant})", "ms", _collected(runs, "evict_ms"), "20"))
        figures.append(Figure(f"to the offender's death ({variant})", "ms", _collected(runs, "gone_ms")))
        figures.append(
            Figure(f"longest survivor stall ({variant})", "ms", _collected(runs, "stall_ms"), goal)
        )
    return figures


def daemon_figures(node: Node | str, clients: int, idle_s: float) -> list[Figure]:
    """Memory, idle CPU and attach times with this many idle clients."""
    with History() as history, Rig(node, "mpsd", history) as rig:
        attach: tuple[float, ...] = ()
        if clients:
            idlers = rig.spawn("idlers", "idlers", "--clients", str(clients))
            members = idlers.must("ready", timeout=120.0).data["members"]
            attach = _attach_times(rig, members)
            # A server takes only so many: what is measured is what was there.
            clients = len(members)
        time.sleep(SETTLE_S)
        daemon = psutil.Process(rig.mpsd.pid)
        before, began = daemon.cpu_times(), clock()
        time.sleep(idle_s)
        after, ended = daemon.cpu_times(), clock()
        used = (after.user - before.user) + (after.system - before.system)
        rss = daemon.memory_info().rss / (1 << 20)
    with_clients = f"with {clients} clients"
    figures = [
        Figure(f"daemon RSS {with_clients}", "MiB", (rss,), "60"),
        Figure(f"idle CPU {with_clients}", "% of a core", (100 * used / (ended - began),), "0.5"),
    ]
    return figures + ([Figure(f"attach {with_clients}", "ms", attach, "20")] if attach else [])


def _attach_times(rig: Rig, members: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """For each client: from having its context, on its own clock, to being attached (0: before)."""
    context_at = {m["pid"]: float(m["context_at"]) for m in members}

    def attached(status: Mapping[str, Any]) -> bool:
        return context_at.keys() <= {c["pid"] for c in status["clients"] if c["state"] == "attached"}

    rig.mpsd.until(attached, 30.0)
    status, now = rig.mpsd.status(), clock()
    times = []
    for client in status["clients"]:
        if client["pid"] in context_at and client["attach_ms"] is not None:
            at = now - client["noticed_s"] + client["attach_ms"] / 1e3
            times.append(round(max(0.0, at - context_at[client["pid"]]) * 1e3, 3))
    return tuple(times)


def stream_figures(node: Node | str, seed: int, plan: stream.Plan) -> tuple[list[Figure], dict[str, Any]]:
    """Events a second at rising rates, and what they were found by."""
    with History() as history, Rig(node, "mpsd", history) as rig:
        found = stream.measure(rig, seed, plan, tell_stderr)
    steps = found["steps"]
    best = () if found["sustained"] is None else (found["sustained"],)
    lags = tuple(s["lag_ms"] for s in steps if s["sustained"])
    lost = [s["dropped"] + (s["missing"] or 0) + s["unheard"] for s in steps if not s["sustained"]]
    return [
        Figure("events sustained, none lost", "a second", best),
        Figure("subscriber behind, while sustained", "ms", lags),
        Figure("events lost at the first rate above", "events", tuple(map(float, lost))),
    ], found


def event_figures(node: Node | str, seed: int) -> list[Figure]:
    """How much the daemon gets through: requests on one connection, and effects under churn."""
    with History() as history, Rig(node, "mpsd", history) as rig:
        with rig.mpsd.client() as client:
            began, requests = clock(), 0
            while clock() - began < EVENTS_S:
                client.version()
                requests += 1
            per_second = requests / (clock() - began)
        crowd = rig.spawn("crowd", "crowd", "--clients", "20", "--seed", str(seed), "--pause-ms", "0")
        crowd.must("ready", timeout=60.0)
        before, began = rig.mpsd.status()["counters"]["effects_performed"], clock()
        time.sleep(EVENTS_S)
        effects = rig.mpsd.status()["counters"]["effects_performed"] - before
        rate = effects / (clock() - began)
        crowd.tell("stop")
        done = crowd.must("done", "gone", timeout=60.0)
    clients = done.data.get("left", 0) / (done.t - began)
    return [
        Figure("requests answered, one connection", "a second", (per_second,)),
        Figure("effects performed under churn", "a second", (rate,)),
        Figure("clients that came and went", "a second", (clients,)),
    ]


def bench(
    backend: str,
    clients: Sequence[int],
    idle_s: float,
    seed: int,
    json_path: Path | None,
    md_path: Path | None,
    rates: stream.Plan,
) -> int:
    """Measure everything with progress; table, JSON, Markdown. Raises MpsdError."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="mpsd-fi-") as base:
        shared = open_node(backend, Path(base))
        node: Node | str = shared if shared.shared else backend
        try:
            figures = []
            for count in clients:
                tell_stderr(f"daemon with {count} idle clients, {idle_s:g} s")
                figures += daemon_figures(node, count, idle_s)
            tell_stderr("events")
            figures += event_figures(node, seed)
            events, found = stream_figures(node, seed, rates)
            figures += events
            figures += faults_figures(backend, node, seed, Path(base))
        finally:
            shared.close()
    rows = [["figure", "n", "median", "worst", "unit", "goal (real hardware)"], *(f.row() for f in figures)]
    counts = ",".join(map(str, clients))
    command = (
        f"mpsd-faultinject bench --backend {backend} --clients {counts} --idle-s {idle_s:g}"
        f" --hold-s {rates.hold_s:g} --seed {seed}"
    )
    finished = {
        "schema": 1,
        "device": shared.device,
        "driver": shared.driver,
        "backend": backend,
        "date": date,
        "command": command,
        "figures": [f.data() for f in figures],
        "stream": found,
    }
    _write(finished, rows, json_path, md_path)
    print(f"{shared.device}, driver {shared.driver}, {date}; again: {command}")
    print(report.aligned(rows))
    print(f"\nEvents at rising rates: {_stream_head(found)}")
    print(report.aligned(stream.table(found)))
    return 0


def _stream_head(found: Mapping[str, Any]) -> str:
    if found["sustained"] is None:
        return f"{found['what']}; no rate was sustained{': ' + found['reason'] if found['reason'] else ''}"
    return f"{found['what']}; limited by: {found['limited_by']}"


def _write(
    finished: Mapping[str, Any], rows: Sequence[Sequence[str]], json_path: Path | None, md_path: Path | None
) -> None:
    head = f"# {finished['device']}, driver {finished['driver']}: bench\n\n{finished['date']}:\n\n"
    text = f"{head}    {finished['command']}\n\n{report.markdown_table(rows)}\n"
    text += f"\nEvents at rising rates: {_stream_head(finished['stream'])}\n\n"
    text += f"{report.markdown_table(stream.table(finished['stream']))}\n"
    report.deliver(finished, "bench", json_path, md_path, text)
