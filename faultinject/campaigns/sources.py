"""`mpsd-faultinject sources`: the time from a server's log line about a fault to mpsd's decision.

In a private domain the line decides. In a domain of all users it only makes mpsd ask the control daemon, so
the decision takes one question more.
"""

from __future__ import annotations

import argparse
import math
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import mpsd_client
from faultinject.evidence import files, schema, tables
from faultinject.evidence.files import tell_stderr
from faultinject.registry import kinds
from faultinject.registry.history import History, clock
from faultinject.rig.node import open_node
from faultinject.rig.rig import Rig
from mpsd.base.errors import DeadlineError, MpsdError, UsageError

KIND, SCHEMA_VERSION = "sources", 1
KINDS = ("trap", "misaligned")
MODES: Mapping[str, Mapping[str, str]] = {
    "private": {"domains.private": "true"},
    "shared": {"domains.mode": '"shared"'},
}
FATAL = re.compile(r"^\[([-0-9]{10} [:.0-9]{12}) .*fatal GPU error", re.MULTILINE)
"""Every line of the stock server about a fault, and its local time."""
UP_S, DECIDED_S = 60.0, 20.0
HEAD = ["mode", "kind", "faults", "p50", "p99", "worst", "verdict"]

SCHEMA: Mapping[str, tuple[type, ...]] = {
    **schema.ENVELOPE,
    "decisions": (dict,),  # mode: list of Decision
}


@dataclass(slots=True)
class Decision:
    """One fault. `decided_ms`: from the log line, with the resolution of its time stamp [1 ms]."""

    kind: str
    problem: str = ""
    decided_ms: float | None = None


def line_at(path: Path, offset: int) -> float | None:
    """Return the time [s since the epoch] of the first line after `offset` that reports a fault."""
    with path.open("rb") as file:
        file.seek(offset)
        found = re.search(FATAL, file.read().decode(errors="replace"))
    return datetime.fromisoformat(found[1]).timestamp() if found is not None else None


def decide_once(rig: Rig, name: str, kind: str) -> float:
    """Inject a fault and return the time [ms] from the log line to the decision. Raises MpsdError."""
    service = rig.mpsd
    if service.until_standby(UP_S) is None:
        raise DeadlineError(f"no standby domain was warm within {UP_S:.0f} s")
    offender = rig.spawn(name, "offender", kind)
    offender.require("ready", timeout=UP_S)
    active = service.active()
    if active is None:
        raise DeadlineError("no domain is active")
    path = rig.base / "l" / str(active["id"]) / "control.log"
    with service.client() as client:
        events = client.subscribe()
        offset = path.stat().st_size
        offender.tell("go")
        at = _left_at(events, str(active["id"]), clock() + DECIDED_S)
    offender.end()
    # The server may write the line after a decision by another sign.
    end = clock() + DECIDED_S
    while (said := line_at(path, offset)) is None and clock() < end:
        time.sleep(0.01)
    if said is None:
        raise DeadlineError(f"{path.name} has no line about the fault")
    return round((at - said) * 1e3, 3)


def _left_at(events: mpsd_client.EventStream, domain: str, end: float) -> float:
    """Return when the domain was taken out of service [s since the epoch]. Raises DeadlineError."""
    while True:
        event = events.next(end)
        if event["kind"] == "domain-left" and event["domain"] == domain:
            return float(event["at"])


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run each mode in a rig of its own. Raises MpsdError if the rig cannot be set up."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    found: dict[str, list[dict[str, Any]]] = {}
    leftovers: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mpsd-fi-") as base:
        node = open_node(args.backend, Path(base))
        try:
            for mode in args.modes:
                logs = args.out and args.out / mode
                with (
                    History() as history,
                    Rig(node, "mpsd", history, settings=MODES[mode], logs_to=logs) as rig,
                ):
                    rows = [d for kind in args.kinds for d in _repeat(rig, mode, kind, args)]
                found[mode] = [asdict(decision) for decision in rows]
                leftovers += rig.leftovers
        finally:
            node.close()
    words = ["mpsd-faultinject", "sources", "--backend", args.backend, "--modes", ",".join(args.modes)]
    words += ["--kinds", ",".join(args.kinds), "--faults", str(args.faults)]
    return {
        **schema.envelope(KIND, SCHEMA_VERSION, (node.device, node.driver), args.backend, date, words),
        "leftovers": leftovers,
        "decisions": found,
    }


def _repeat(rig: Rig, mode: str, kind: str, args: argparse.Namespace) -> Iterator[Decision]:
    """Inject as many faults as fit into the deadline, up to the first problem."""
    end = clock() + args.deadline
    for number in range(args.faults):
        decision = Decision(kind)
        try:
            if clock() > end:
                raise DeadlineError(f"the deadline passed after {number} of {args.faults}")
            decision.decided_ms = decide_once(rig, f"offender-{mode}-{kind}-{number}", kind)
        except MpsdError as error:
            decision.problem = str(error)
        tell_stderr(f"{mode} {kind} {number + 1}/{args.faults}: {decision.problem or decision.decided_ms}")
        yield decision
        if decision.problem:
            return


def load(data: Any, path: Path) -> dict[str, Any] | None:
    """Return the report that a file's JSON is; None for anything else. Raises UsageError."""
    return files.load_of_kind(data, KIND, path, _problems)


def _problems(data: Mapping[str, Any]) -> Iterator[str]:
    yield from schema.report_violations(SCHEMA, SCHEMA_VERSION, data)
    for mode, rows in data["decisions"].items():
        if mode not in MODES or not isinstance(rows, list):
            yield f"report.decisions.{mode} is no list of decisions of a known mode"
            continue
        for row in rows:
            yield from schema.missing_fields(row, Decision, f"report.decisions.{mode}")


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile of at least one value."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def table(finished: Mapping[str, Any]) -> list[list[str]]:
    rows = [HEAD]
    for mode, decisions in finished["decisions"].items():
        for kind in dict.fromkeys(d["kind"] for d in decisions):
            here = [d for d in decisions if d["kind"] == kind]
            times = [d["decided_ms"] for d in here if d["decided_ms"] is not None]
            problem = next((d["problem"] for d in here if d["problem"]), "")
            figures = (median(times), percentile(times, 0.99), max(times)) if times else ()
            shown = [f"{figure:.1f}" for figure in figures] or ["-"] * 3
            verdict = f"invalid: {problem[:300]}" if problem else "valid"
            rows.append([mode, kind, str(len(here)), *shown, verdict])
    return rows


def verdicts(finished: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the verdict on each mode and kind, computed from the figures."""
    return [(f"{row[0]} {row[1]}", row[-1]) for row in table(finished)[1:]]


def passed(finished: Mapping[str, Any]) -> bool:
    return tables.passed(finished, [verdict for _, verdict in verdicts(finished)])


def markdown(finished: Mapping[str, Any]) -> str:
    lines = [
        f"# From log line to decision: {finished['device']}, driver {finished['driver']}",
        "",
        tables.provenance(finished),
        "",
        "Times in ms from the server's line about an SM exception until mpsd took the domain out of service.",
        "private: the line decides. shared: the line only asks, and the control daemon's answer decides.",
        "A negative time: another sign came before the line. The line's time stamp has whole milliseconds.",
        ""
        if finished["backend"] != "simulated"
        else "Simulated: these times are no GPU's, and do not count.",
        "",
        tables.markdown_table(table(finished)),
        "",
        tables.left_behind(finished),
    ]
    return "\n".join(lines) + "\n"


def _run_command(args: argparse.Namespace) -> int:
    for value, known in ((args.kinds, kinds.GPU_KINDS), (args.modes, tuple(MODES))):
        if wrong := next((name for name in value if name not in known), None):
            raise UsageError(f"there is no {wrong!r} here", remedy=f"of: {', '.join(known)}")
    finished = run(args)
    print(tables.heading(finished))
    print(tables.aligned(table(finished)))
    files.deliver(finished, KIND, args.json, args.markdown, markdown(finished), tell_stderr)
    return 0 if passed(finished) else 1


def add_parser(commands: Any, types: Any) -> None:
    """Add the options of the subcommand. `types`: the readers of names, numbers and seconds."""
    parser = commands.add_parser("sources", help="time from a log line about a fault to the decision")
    types.fault_runs(parser, "mode", libcuda="not used")
    parser.add_argument("--kinds", type=types.names, default=list(KINDS), help=f"default: {', '.join(KINDS)}")
    parser.add_argument("--modes", type=types.names, default=list(MODES), help="default: private,shared")
    parser.set_defaults(go=_run_command)
