"""`mpsd-faultinject outages`: options, run, verdicts, table."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from faultinject.campaigns.failover.command import main_settings
from faultinject.campaigns.outages.course import BURST, KINDS, RESTARTS_S, Outages, Outcome
from faultinject.evidence import files, schema, tables
from faultinject.evidence.files import tell_stderr
from faultinject.registry.history import History, clock
from faultinject.rig.libraries import find_libraries
from faultinject.rig.node import open_node
from faultinject.rig.rig import Rig
from mpsd.base.errors import MpsdError

KIND, SCHEMA_VERSION = "outages", 1
DEATHS, BURSTS = 40, 4
ENDED_EARLY = "the run ended before all faults"
SCHEMA: Mapping[str, tuple[type, ...]] = {
    **schema.ENVELOPE,
    "outages": (list,),  # of Outcome
    "bursts": (list,),  # of Outcome
    "problem": (str,),  # what ended the run early
}


def run(args: argparse.Namespace, deliver_partial: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run all deaths of mpsd, then all bursts, in one rig. `deliver_partial` gets a whole report after each.

    Raises MpsdError if the rig cannot be set up.
    """
    date, leftovers, problem = datetime.now(UTC).isoformat(timespec="seconds"), list[str](), ""
    found: dict[str, list[dict[str, Any]]] = {"outages": [], "bursts": []}
    words = ["mpsd-faultinject", "outages", "--backend", args.backend]
    words += ["--deaths", str(args.deaths), "--bursts", str(args.bursts)]

    def report() -> dict[str, Any]:
        device = (node.device, node.driver)
        head = schema.envelope(KIND, SCHEMA_VERSION, device, args.backend, date, words)
        rows = {name: list(of_kind) for name, of_kind in found.items()}
        return {**head, "leftovers": list(leftovers), **rows, "problem": problem}

    with tempfile.TemporaryDirectory(prefix="mpsd-fi-") as base:
        # The stand-in asks for the cause of a lost context, as a real driver does: programs can deny a fault.
        libraries = replace(find_libraries(args.backend, args.libcuda, args.driver, Path(base)), looks=True)
        node = open_node(args.backend, Path(base))
        try:
            settings = main_settings(libraries)
            with History() as history, Rig(node, "mpsd", history, settings=settings, logs_to=args.out) as rig:
                outages = Outages(rig, libraries, tell_stderr, clock() + args.deadline)
                try:
                    outages.start()
                    for name, count, act in (
                        ("outages", args.deaths, outages.outage),
                        ("bursts", args.bursts, outages.burst),
                    ):
                        for number in range(count):
                            found[name].append(asdict(act(number)))
                            deliver_partial({**report(), "problem": ENDED_EARLY})
                    problem = outages.end()
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
    for name in ("outages", "bursts"):
        for number, row in enumerate(data[name]):
            yield from schema.missing_fields(row, Outcome, f"report.{name}[{number}]")


def judge(row: Mapping[str, Any]) -> str:
    """Return valid, or invalid with the first reason."""
    if row["problem"]:
        return f"invalid: {row['problem'][:300]}"
    if row["lost"]:
        return f"invalid: {row['lost']} protected programs were lost: {row['errors'][0][:200]}"
    if row["told"]:
        return f"invalid: {row['told']} programs met an error"
    if row["wrong"]:
        return f"invalid: {row['wrong']} programs saw wrong results"
    if row["innocent"]:
        return f"invalid: mpsd named {row['innocent']} innocent programs"
    if not row["faulted"]:
        return "unknown: the fault had no effect"
    is_single = row["killed_s"] is None and row["faults"] == 1
    return "unknown: of the burst one fault had an effect" if is_single else "valid"


def verdicts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the verdict on each fault and on the run, computed from the figures."""
    found = [(f"death {number + 1}", judge(row)) for number, row in enumerate(report["outages"])]
    found += [(f"burst {number + 1}", judge(row)) for number, row in enumerate(report["bursts"])]
    problem = report["problem"] or ("" if found else "nothing was run")
    return [*found, ("the run", f"invalid: {problem[:300]}" if problem else "valid")]


def passed(report: Mapping[str, Any]) -> bool:
    return tables.passed(report, [verdict for _, verdict in verdicts(report)])


HEAD = ["faults", "kind", "mpsd away, s", "times", "valid", "lost", "met an error", "wrong", "innocent named"]
HEAD += ["pause, ms"]


def table(report: Mapping[str, Any]) -> list[list[str]]:
    """Return a row for each kind of fault and time without mpsd."""
    rows = [HEAD]
    for outcomes in (report["outages"], report["bursts"]):
        for kind in KINDS:
            for away in (None, *RESTARTS_S):
                here = [row for row in outcomes if (row["kind"], row["away_s"]) == (kind, away)]
                rows += [_row(kind, away, here)] if here else []
    return rows


def _row(kind: str, away: float | None, here: Sequence[Mapping[str, Any]]) -> list[str]:
    faults = sorted({row["faults"] for row in here})
    cells = [f"{faults[0]}-{faults[-1]}" if len(faults) > 1 else str(faults[0]), kind]
    cells += ["-" if away is None else str(away), str(len(here))]
    cells.append(str(sum(judge(row) == "valid" for row in here)))
    cells += [str(sum(row[name] for row in here)) for name in ("lost", "told", "wrong", "innocent")]
    return [*cells, tables.spread([row["pause"] for row in here if row["pause"] is not None])]


def markdown(report: Mapping[str, Any]) -> str:
    bad = [(name, verdict) for name, verdict in verdicts(report) if verdict != "valid"]
    lines = [
        f"# Faults around a death of mpsd, and bursts: {report['device']}, driver {report['driver']}",
        "",
        tables.provenance(report),
        "",
        "Three programs are protected by fail-over. mpsd is killed at a random moment, at most 0.3 s before",
        f"or after the order to fault, and starts again. A burst: {BURST} clients fault, one soon after the",
        "other, each in the domain that is active by then. `pause`: the longest step, median / worst.",
        "",
        tables.markdown_table(table(report)),
        "",
        *(f"{name}: {verdict}.\n" for name, verdict in bad),
        tables.left_behind(report),
    ]
    return "\n".join(lines) + "\n"


def _run_command(args: argparse.Namespace) -> int:
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
    parser = commands.add_parser("outages", help="faults around a death of mpsd, and bursts of faults")
    types.proxied_runs(parser, "run", deadline=400.0, limited="all faults")
    deaths, bursts = f"of mpsd (default: {DEATHS})", f"of {BURST} faults (default: {BURSTS})"
    parser.add_argument("--deaths", type=types.number(0, 1000), default=DEATHS, help=deaths)
    parser.add_argument("--bursts", type=types.number(0, 100), default=BURSTS, help=bursts)
    parser.set_defaults(go=_run_command)
