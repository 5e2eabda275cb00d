"""`mpsd-faultinject ends`: options, run, verdicts, table."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from faultinject.campaigns.ends.course import Ended, Ends, Long, Sample
from faultinject.campaigns.failover.command import main_settings
from faultinject.campaigns.failover.rounds import STANDBY_ON_DEMAND
from faultinject.evidence import files, schema, tables
from faultinject.evidence.files import tell_stderr
from faultinject.registry.history import History, clock
from faultinject.rig.libraries import find_libraries
from faultinject.rig.node import open_node
from faultinject.rig.rig import Rig
from mpsd.base.errors import MpsdError

KIND, SCHEMA_VERSION = "ends", 1
SIZES = {"nvidia": [1024, 5120, 10240, 20480], "simulated": [1, 5, 10, 20]}
MOVES, LONG_MOVES = 4, 50
OFTEN = {"domains.start_retry_max_s": "1.0"}
"""The faults of a run come more often than a slot may start domains without growing pauses."""
BACK_S = 1.0
"""The memory of programs that ended is to be back after that."""
SETTLED = 10
"""Fail-overs after which a process has what it keeps."""
MOST_MORE = {"used": 64.0, "descriptors": 2, "threads": 2, "daemon_descriptors": 4}
"""What may be left at the last fail-over beyond the most of the first ones: standby contexts come and go."""
ENDED_EARLY = "the run ended before all rows"
SCHEMA: Mapping[str, tuple[type, ...]] = {
    **schema.ENVELOPE,
    "ended": (list,),  # of Ended
    "long": (list,),  # of Long
    "problem": (str,),  # what ended the run early
}


def run(args: argparse.Namespace, deliver_partial: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run both rows in one rig. `deliver_partial` gets a whole report after the first.

    Raises MpsdError if the rig cannot be set up.
    """
    date, leftovers, problem = datetime.now(UTC).isoformat(timespec="seconds"), list[str](), ""
    found: dict[str, list[dict[str, Any]]] = {"ended": [], "long": []}
    sizes = args.sizes or SIZES[args.backend]
    words = ["mpsd-faultinject", "ends", "--backend", args.backend, "--sizes", ",".join(map(str, sizes))]
    words += ["--moves", str(args.moves), "--long", str(args.long)]

    def report() -> dict[str, Any]:
        device = (node.device, node.driver)
        head = schema.envelope(KIND, SCHEMA_VERSION, device, args.backend, date, words)
        rows = {name: list(of_kind) for name, of_kind in found.items()}
        return {**head, "leftovers": list(leftovers), **rows, "problem": problem}

    with tempfile.TemporaryDirectory(prefix="mpsd-fi-") as base:
        libraries = find_libraries(args.backend, args.libcuda, args.driver, Path(base))
        node = open_node(args.backend, Path(base))
        try:
            settings = main_settings(libraries) | STANDBY_ON_DEMAND | OFTEN
            with History() as history, Rig(node, "mpsd", history, settings=settings, logs_to=args.out) as rig:
                ends = Ends(rig, libraries, tell_stderr, clock() + args.deadline)
                try:
                    ends.start()
                    found["ended"].append(asdict(ends.ended(sizes, args.moves)))
                    deliver_partial({**report(), "problem": ENDED_EARLY})
                    found["long"].append(asdict(ends.long(args.long)))
                    problem = ends.end()
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
    for number, row in enumerate(data["ended"]):
        yield from schema.missing_fields(row, Ended, f"report.ended[{number}]")
    for number, row in enumerate(data["long"]):
        yield from schema.missing_fields(row, Long, f"report.long[{number}]")
        for place, sample in enumerate(row["samples"]):
            yield from schema.missing_fields(sample, Sample, f"report.long[{number}].samples[{place}]")


def _lives(row: Mapping[str, Any]) -> str:
    """Return what went wrong with the programs themselves; empty for nothing."""
    if row["problem"]:
        return f"invalid: {row['problem'][:300]}"
    if row["lost"]:
        return f"invalid: {row['lost']} programs were lost"
    return f"invalid: {row['wrong']} programs saw wrong results" if row["wrong"] else ""


def judge_ended(row: Mapping[str, Any]) -> str:
    """Return valid, or invalid with the first reason."""
    if found := _lives(row):
        return found
    if not row["moves"]:
        return "invalid: at no fault all programs failed over"
    if row["back_s"] is None:
        return f"invalid: {row['left']:.0f} MiB stayed in use"
    if row["back_s"] > BACK_S:
        return f"invalid: the memory was back after {row['back_s']:.1f} s"
    return "valid"


def judge_long(row: Mapping[str, Any]) -> str:
    """Return valid, or invalid with the first reason.

    A further domain takes memory and descriptors. So the last sample with no more domains than one of the
    first is compared.
    """
    if found := _lives(row):
        return found
    first, later = row["samples"][:SETTLED], row["samples"][SETTLED:]
    if not later:
        return f"invalid: {len(row['samples'])} fail-overs say nothing of growth"
    most_domains = max(sample.get("domains", 0) for sample in first)
    last = next((s for s in reversed(later) if s.get("domains", 0) <= most_domains), None)
    if last is None:
        return f"invalid: after {SETTLED} fail-overs mpsd always had more domains than before"
    for name, most in MOST_MORE.items():
        grown = last[name] - max(sample[name] for sample in first)
        if grown > most:
            return f"invalid: {name} grew by {grown:.0f} after the first {SETTLED} fail-overs"
    return "valid"


def verdicts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the verdict on each row, and on the run, computed from the figures."""
    found = [("programs that ended", judge_ended(row)) for row in report["ended"]]
    found += [("a long life", judge_long(row)) for row in report["long"]]
    problem = report["problem"] or ("" if found else "nothing was run")
    return [*found, ("the run", f"invalid: {problem[:300]}" if problem else "valid")]


def passed(report: Mapping[str, Any]) -> bool:
    return tables.passed(report, [verdict for _, verdict in verdicts(report)])


def ended_table(report: Mapping[str, Any]) -> list[list[str]]:
    rows = [
        ["programs, MiB", "fail-overs", "before, MiB", "left, MiB", "back, s", "lost", "wrong", "verdict"]
    ]
    for row in report["ended"]:
        back = "-" if row["back_s"] is None else f"{row['back_s']:.3f}"
        cells = [", ".join(map(str, row["mib"])), str(row["moves"]), f"{row['before']:.0f}"]
        cells += [f"{row['left']:.0f}", back, str(row["lost"]), str(row["wrong"])]
        rows.append([*cells, judge_ended(row)])
    return rows


def long_table(report: Mapping[str, Any]) -> list[list[str]]:
    """Return the first sample, that after SETTLED fail-overs, and the last one."""
    rows = [["fail-overs", "used, MiB", "descriptors", "threads", "descriptors of mpsd", "verdict"]]
    for row in report["long"]:
        samples = row["samples"]
        chosen = {s["moves"]: s for s in (*samples[:1], *samples[SETTLED - 1 : SETTLED], *samples[-1:])}
        for sample in chosen.values():
            cells = [str(sample["moves"]), f"{sample['used']:.0f}", str(sample["descriptors"])]
            cells += [str(sample["threads"]), str(sample["daemon_descriptors"])]
            rows.append([*cells, judge_long(row) if sample is samples[-1] else ""])
    return rows


def markdown(report: Mapping[str, Any]) -> str:
    lines = [
        f"# Ends of programs that failed over: {report['device']}, driver {report['driver']}",
        "",
        tables.provenance(report),
        "",
        "Programs under mpsd-run fail over at traps of a client without the proxy, then end. `back`: from",
        "the end of the last one until the GPU has as much free memory as before they started.",
        "",
        tables.markdown_table(ended_table(report)),
        "",
        "One program that fails over again and again:",
        "",
        tables.markdown_table(long_table(report)),
        "",
        *(f"{name}: {verdict}.\n" for name, verdict in verdicts(report) if verdict != "valid"),
        tables.left_behind(report),
    ]
    return "\n".join(lines) + "\n"


def _run_command(args: argparse.Namespace) -> int:
    def deliver(report: dict[str, Any]) -> None:
        files.deliver(report, KIND, args.json, args.markdown, markdown(report))

    finished = run(args, deliver)
    print(tables.heading(finished))
    print(tables.aligned(ended_table(finished)) + "\n")
    print(tables.aligned(long_table(finished)))
    for name, verdict in verdicts(finished):
        if verdict != "valid":
            print(f"{name}: {verdict}")
    deliver(finished)
    return 0 if passed(finished) else 1


def add_parser(commands: Any, types: Any) -> None:
    """Add the options of the subcommand. `types`: the readers of names, numbers and seconds."""
    parser = commands.add_parser("ends", help="leftovers of programs that failed over")
    types.proxied_runs(parser, "run", deadline=240.0, limited="both rows")
    sizes = "of the programs that end [MiB] (default: by the backend)"
    parser.add_argument("--sizes", type=types.sizes, default=[], help=sizes)
    moves = f"fail-overs of these (default: {MOVES})"
    parser.add_argument("--moves", type=types.number(1, 100), default=MOVES, help=moves)
    long = f"fail-overs of one program (default: {LONG_MOVES})"
    parser.add_argument("--long", type=types.number(1, 1000), default=LONG_MOVES, help=long)
    parser.set_defaults(go=_run_command)
