"""`mpsd-faultinject crowd`: options, run, verdicts, table."""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from faultinject.campaigns.crowd.course import STANDBY_CONTEXTS, Crowd, Row, Trap
from faultinject.campaigns.failover.command import main_settings
from faultinject.campaigns.failover.rounds import STANDBY_ON_DEMAND
from faultinject.evidence import files, schema, tables
from faultinject.evidence.files import tell_stderr
from faultinject.registry.history import History, clock
from faultinject.rig.libraries import find_libraries
from faultinject.rig.node import open_node
from faultinject.rig.rig import Rig
from mpsd.base.errors import MpsdError, UsageError

KIND, SCHEMA_VERSION = "crowd", 1
CLIENTS = [1, 12, 48, 100]
TRAPS = 3
ENDED_EARLY = "the run ended before all rows"
SCHEMA: Mapping[str, tuple[type, ...]] = {
    **schema.ENVELOPE,
    "rows": (list,),  # of Row
    "problem": (str,),  # what ended the run early
}


def run(args: argparse.Namespace, deliver_partial: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run all rows in one rig. `deliver_partial` gets a whole report after each.

    Raises MpsdError if the rig cannot be set up.
    """
    date, found = datetime.now(UTC).isoformat(timespec="seconds"), list[dict[str, Any]]()
    leftovers, problem = list[str](), ""
    words = ["mpsd-faultinject", "crowd", "--backend", args.backend]
    words += ["--clients", ",".join(map(str, args.clients)), "--traps", str(args.traps)]

    def report() -> dict[str, Any]:
        device = (node.device, node.driver)
        head = schema.envelope(KIND, SCHEMA_VERSION, device, args.backend, date, words)
        return {**head, "leftovers": list(leftovers), "rows": list(found), "problem": problem}

    with tempfile.TemporaryDirectory(prefix="mpsd-fi-") as base:
        libraries = find_libraries(args.backend, args.libcuda, args.driver, Path(base))
        node = open_node(args.backend, Path(base))
        try:
            settings = main_settings(libraries) | STANDBY_ON_DEMAND
            with History() as history, Rig(node, "mpsd", history, settings=settings, logs_to=args.out) as rig:
                crowd = Crowd(rig, libraries, tell_stderr, clock() + args.deadline)
                try:
                    crowd.start()
                    for clients in args.clients:
                        found.append(asdict(crowd.row(clients, args.traps)))
                        deliver_partial({**report(), "problem": ENDED_EARLY})
                    problem = crowd.end()
                except MpsdError as error:
                    problem = f"{error}; mpsd: {rig.mpsd.tail()[-300:]}"
            leftovers += rig.leftovers
        finally:
            node.close()
    return report()


def load(data: Any, path: Path) -> dict[str, Any] | None:
    """Return the report that a file's JSON is; None for anything else. Raises UsageError."""
    return files.load_of_kind(data, KIND, path, _problems)


def _problems(data: Mapping[str, Any]) -> Iterator[str]:
    yield from schema.report_violations(SCHEMA, SCHEMA_VERSION, data)
    for number, row in enumerate(data["rows"]):
        yield from schema.missing_fields(row, Row, f"report.rows[{number}]")
        for place, trap in enumerate(row["traps"]):
            yield from schema.missing_fields(trap, Trap, f"report.rows[{number}].traps[{place}]")


def judge(row: Mapping[str, Any]) -> str:
    """Return valid, or invalid with the first reason."""
    if row["problem"]:
        return f"invalid: {row['problem'][:300]}"
    if not row["traps"]:
        return "invalid: nothing was run"
    wanted = min(row["clients"], STANDBY_CONTEXTS)
    for trap in row["traps"]:
        if trap["lost_protected"]:
            return f"invalid: {trap['lost_protected']} clients were lost that status called protected"
        if trap["wrong"]:
            return f"invalid: {trap['wrong']} clients saw wrong results"
        if trap["failover"] != wanted:
            return f"invalid: status called {trap['failover']} clients protected by fail-over, not {wanted}"
        if trap["other"]:
            return f"invalid: {trap['other']} clients had less than guard"
    return "valid"


def verdicts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the verdict on each row, and on the run, computed from the figures."""
    problem = report["problem"] or ("" if report["rows"] else "nothing was run")
    found = [(f"{row['clients']} clients", judge(row)) for row in report["rows"]]
    return [*found, ("the run", f"invalid: {problem[:300]}" if problem else "valid")]


def passed(report: Mapping[str, Any]) -> bool:
    return tables.passed(report, [verdict for _, verdict in verdicts(report)])


HEAD = ["clients", "called failover", "guard", "other", "standby contexts", "domains", "traps", "GPU stall"]
HEAD += ["moved", "lost", "lost of protected", "refused", "verdict"]


def table(report: Mapping[str, Any]) -> list[list[str]]:
    return [HEAD, *(_cells(row) for row in report["rows"])]


def _cells(row: Mapping[str, Any]) -> list[str]:
    traps = row["traps"]

    def over(name: str) -> str:
        values = sorted({trap[name] for trap in traps})
        return "-" if not values else str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}"

    counts = [over(name) for name in ("failover", "guard", "other", "standby", "domains")]
    stall = tables.spread([trap["stall"] for trap in traps])
    sums = [str(sum(trap[name] for trap in traps)) for name in ("moved", "lost", "lost_protected")]
    return [str(row["clients"]), *counts, str(len(traps)), stall, *sums, str(row["refused"]), judge(row)]


def _reasons(row: Mapping[str, Any]) -> str:
    """Return why clients had no fail-over, over all traps of a row, the most frequent reason first."""
    found: Counter[str] = Counter()
    for trap in row["traps"]:
        found.update(trap["reasons"])
    return "; ".join(f"{why} ({count})" for why, count in found.most_common(5)) or "none"


def markdown(report: Mapping[str, Any]) -> str:
    lines = [
        f"# A crowd of clients: {report['device']}, driver {report['driver']}",
        "",
        tables.provenance(report),
        "",
        "All clients belong to one user and start with mpsd-run. At most "
        f"{STANDBY_CONTEXTS} have a standby context;",
        "the others have guard zones. A client without the proxy raises a trap in the domain of the",
        "fail-over participants. The trap ends the clients of that domain that have no standby context;",
        "they start again.",
        "",
        tables.markdown_table(table(report)),
        "",
        "- `GPU stall`: the longest step of a program in another domain, in ms, median / worst",
        "- `called failover`, `guard`, `other`: clients by their level in status right before the trap",
        "- `domains`: in which the clients were; a full domain is followed by another",
        "- `moved`, `lost`: clients, summed over the traps",
        "- `lost of protected`: lost clients that status had called protected by fail-over",
        "- `refused`: starts that a full server refused; they were repeated",
        "",
        *(f"Without fail-over beside {row['clients']} clients: {_reasons(row)}.\n" for row in report["rows"]),
        *(f"{name}: {verdict}.\n" for name, verdict in verdicts(report) if verdict != "valid"),
        tables.left_behind(report),
    ]
    return "\n".join(lines) + "\n"


def _run_command(args: argparse.Namespace) -> int:
    if 0 in args.clients or args.clients != sorted(args.clients):
        raise UsageError("--clients needs rising numbers from 1 on", remedy="for example 1,12,48,100")

    def deliver(report: dict[str, Any]) -> None:
        files.deliver(report, KIND, args.json, args.markdown, markdown(report))

    finished = run(args, deliver)
    print(tables.heading(finished))
    print(tables.aligned(table(finished)))
    for name, verdict in verdicts(finished):
        if verdict != "valid":
            print(f"{name}: {verdict}")
    deliver(finished)
    return 0 if passed(finished) else 1


def add_parser(commands: Any, types: Any) -> None:
    """Add the options of the subcommand. `types`: the readers of names, numbers and seconds."""
    parser = commands.add_parser("crowd", help="the GPU's stall at a trap, beside many clients of one user")
    types.proxied_runs(parser, "run", deadline=200.0, limited="all rows")
    default = ",".join(map(str, CLIENTS))
    parser.add_argument("--clients", type=types.counts, default=CLIENTS, help=f"(default: {default})")
    parser.add_argument(
        "--traps", type=types.number(1, 100), default=TRAPS, help=f"of each row (default: {TRAPS})"
    )
    parser.set_defaults(go=_run_command)
