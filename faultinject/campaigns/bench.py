"""The cost and speed of mpsd: attach, record, eviction, stalls, memory, idle CPU, events per second.

Every figure is measured here, on processes of their own. The goals are for real hardware.
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

from faultinject.campaigns import eventrates
from faultinject.campaigns.matrix import Matrix, Plan
from faultinject.evidence import files, revision, schema, tables
from faultinject.evidence.files import tell_stderr
from faultinject.registry.faults import by_name
from faultinject.registry.history import History, clock
from faultinject.rig.node import Node, open_node
from faultinject.rig.rig import Rig
from faultinject.rig.stage import Options
from mpsd.base.errors import UsageError

RECORDS, EVICTIONS = 5, 5
SETTLE_S = 2.0
EVENTS_S = 5.0

SCHEMA: Mapping[str, tuple[type, ...]] = {
    "schema": (int,),
    "device": (str,),
    "driver": (str,),
    "backend": (str,),
    "revision": (str,),  # of the code (evidence.revision)
    "date": (str,),  # ISO 8601, UTC
    "command": (str,),
    "figures": (list,),  # of Figure.data()
    "stream": (dict,),  # events at rising rates (eventrates)
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity: how often it was measured, its median and worst, and the goal for the worst."""

    name: str
    unit: str
    samples: tuple[float, ...]
    goal: str = ""

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
    """Return latencies of records and evictions, from whole runs of the matrix."""
    figures = []
    plan = Plan(backend, (), ("mpsd",), Options(seed=seed))
    matrix = Matrix(plan)

    def repeat(name: str, times: int) -> list[dict[str, Any]]:
        runs = []
        for i in range(times):
            matrix.plan = replace(plan, options=Options(seed=seed + i))
            runs.append(matrix.run_one(by_name(name), "mpsd", node, base))
            tell_stderr(f"{name} {i + 1}/{times}: {runs[-1]['verdict']}")
        return runs

    stores = repeat("store", RECORDS)
    figures.append(Figure("event to record", "ms", _collected(stores, "record_ms"), "5"))
    figures.append(
        Figure("fault to the arrival of its record", "ms", _collected(stores, "fire_to_record_ms"))
    )
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
    """Return memory, idle CPU and attach times with this many idle clients."""
    with History() as history, Rig(node, "mpsd", history) as rig:
        attach: tuple[float, ...] = ()
        if clients:
            idlers = rig.spawn("idlers", "idlers", "--clients", str(clients))
            members = idlers.require("ready", timeout=120.0).data["members"]
            attach = _attach_times(rig, members)
            # A server takes only so many clients: the figure says how many there were.
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
    """Return the times from each client's context, on its own clock, to its attachment (0: before)."""
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


def stream_figures(node: Node | str, seed: int, plan: eventrates.Plan) -> tuple[list[Figure], dict[str, Any]]:
    """Return events per second at rising rates, and how they were found."""
    with History() as history, Rig(node, "mpsd", history) as rig:
        found = eventrates.measure(rig, seed, plan, tell_stderr)
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
    """Return the throughput of the daemon: requests on one connection, and effects under churn."""
    with History() as history, Rig(node, "mpsd", history) as rig:
        with rig.mpsd.client() as client:
            began, requests = clock(), 0
            while clock() - began < EVENTS_S:
                client.version()
                requests += 1
            per_second = requests / (clock() - began)
        crowd = rig.spawn("crowd", "crowd", "--clients", "20", "--seed", str(seed), "--pause-ms", "0")
        crowd.require("ready", timeout=60.0)
        before, began = rig.mpsd.status()["counters"]["effects_performed"], clock()
        time.sleep(EVENTS_S)
        effects = rig.mpsd.status()["counters"]["effects_performed"] - before
        rate = effects / (clock() - began)
        crowd.tell("stop")
        done = crowd.require("done", "gone", timeout=60.0)
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
    rates: eventrates.Plan,
) -> int:
    """Measure every figure with progress, and write table, JSON and Markdown. Raises MpsdError."""
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
    counts = ",".join(map(str, clients))
    command = (
        f"mpsd-faultinject bench --backend {backend} --clients {counts} --idle-s {idle_s:g}"
        f" --hold-s {rates.hold_s:g} --seed {seed}"
    )
    finished: dict[str, Any] = {
        "schema": 1,
        "device": shared.device,
        "driver": shared.driver,
        "backend": backend,
        "revision": revision.current(),
        "date": date,
        "command": command,
        "figures": [f.data() for f in figures],
        "stream": found,
    }
    files.deliver(finished, "bench", json_path, md_path, markdown(finished))
    print(tables.heading(finished))
    print(tables.aligned(_rows(finished["figures"])))
    print(f"\nEvents at rising rates: {_stream_head(found)}")
    print(tables.aligned(eventrates.table(found)))
    return 0


def _stream_head(found: Mapping[str, Any]) -> str:
    if found["sustained"] is None:
        return f"{found['what']}; no rate was sustained{': ' + found['reason'] if found['reason'] else ''}"
    return f"{found['what']}; limited by: {found['limited_by']}"


def _row(figure: Mapping[str, Any]) -> list[str]:
    known = figure["samples"]
    values = [f"{figure[name]:.2f}" if known else "-" for name in ("median", "worst")]
    return [figure["name"], str(len(known)), *values, figure["unit"], figure["goal"]]


def _rows(figures: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [["figure", "n", "median", "worst", "unit", "goal (real hardware)"], *map(_row, figures)]


def markdown(finished: Mapping[str, Any]) -> str:
    head = f"# {finished['device']}, driver {finished['driver']}: bench\n\n{tables.provenance(finished)}\n\n"
    text = f"{head}{tables.markdown_table(_rows(finished['figures']))}\n"
    text += f"\nEvents at rising rates: {_stream_head(finished['stream'])}\n\n"
    return text + f"{tables.markdown_table(eventrates.table(finished['stream']))}\n"


def load(data: Any, path: Path) -> dict[str, Any] | None:
    """Return the report that a file's JSON is; None for anything else. Raises UsageError."""
    if not isinstance(data, dict) or not {"figures", "stream"} <= data.keys():
        return None
    whole = {"revision": revision.UNKNOWN, **data}
    problems = schema.violations(SCHEMA, whole, "report")
    if problems:
        raise UsageError(f"{path} is no report of this program: {problems[0]}")
    return whole
