"""`mpsd-faultinject attacks`: the attempts of a second user on a node with mpsd, and floods."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from faultinject.campaigns.attacks.course import Attempt, Course, Flood
from faultinject.campaigns.attacks.scene import SETTINGS, Scene
from faultinject.evidence import files, schema, tables
from faultinject.evidence.files import tell_stderr
from faultinject.registry.history import History
from faultinject.rig.node import open_node
from faultinject.rig.rig import Rig
from mpsd.base.errors import UsageError

KIND, SCHEMA_VERSION = "attacks", 1
P99_MS, RSS_MB = 50.0, 10.0
"""Limits of a flood: the victim's requests, and what stays of mpsd's memory."""
SCHEMA: Mapping[str, tuple[type, ...]] = {
    **schema.ENVELOPE,
    "attempts": (list,),
    "floods": (list,),
    "problems": (list,),  # what the victim's programs suffered
}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run all parts in one rig. Raises MpsdError if the rig cannot be set up, or a part cannot end."""
    if os.geteuid() != 0:
        raise UsageError("attacks needs two other users", remedy="run it as root")
    date = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="mpsd-fi-") as base:
        os.chmod(base, 0o755)
        node = open_node(args.backend, Path(base))
        try:
            with History() as history, Rig(node, "mpsd", history, settings=SETTINGS, logs_to=args.out) as rig:
                course = Course(Scene(rig))
                course.start()
                attempts = course.attempts()
                tell_stderr(f"{len(attempts)} attempts")
                floods = course.floods(args.seconds)
                tell_stderr(f"{len(floods)} floods")
                course.end_programs()
            leftovers = rig.leftovers
        finally:
            node.close()
    words = ["mpsd-faultinject", "attacks", "--backend", args.backend]
    words += ["--seconds", f"{args.seconds:g}"]
    return {
        **schema.envelope(KIND, SCHEMA_VERSION, (node.device, node.driver), args.backend, date, words),
        "leftovers": leftovers,
        "attempts": [asdict(row) for row in attempts],
        "floods": [asdict(row) for row in floods],
        "problems": course.problems,
    }


def load(data: Any, path: Path) -> dict[str, Any] | None:
    """Return the report that a file's JSON is; None for anything else. Raises UsageError."""
    return files.load_of_kind(data, KIND, path, _problems)


def _problems(data: Mapping[str, Any]) -> Iterator[str]:
    yield from schema.report_violations(SCHEMA, SCHEMA_VERSION, data)
    for name, kind in (("attempts", Attempt), ("floods", Flood)):
        for row in data[name]:
            yield from schema.missing_fields(row, kind, f"report.{name}")


def _flood_verdict(row: Mapping[str, Any], *, timed: bool) -> str:
    grown = row["after"] - row["before"]
    if grown > RSS_MB:
        return f"invalid: mpsd keeps {grown:.0f} MB"
    if timed and row["p99"] > P99_MS:
        return f"invalid: p99 {row['p99']:.0f} ms"
    return "valid"


def verdicts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the verdict on each attempt and flood, and on the victim's programs, from the figures."""
    timed = report["backend"] != "simulated"
    found = []
    for row in report["attempts"]:
        problem = Attempt(**row).problem
        found.append((row["name"], f"invalid: {problem}" if problem else "valid"))
    found += [(f"flood: {row['name']}", _flood_verdict(row, timed=timed)) for row in report["floods"]]
    problems = "; ".join(report["problems"])
    found.append(("the victim's programs", f"invalid: {problems}" if problems else "valid"))
    return found


def passed(report: Mapping[str, Any]) -> bool:
    return tables.passed(report, [verdict for _, verdict in verdicts(report)])


def attempt_table(report: Mapping[str, Any]) -> list[list[str]]:
    rows = [["attempt of the second user", "outcome", "decisions"]]
    rows += [[row["name"], row["outcome"], row["decided"] or "none"] for row in report["attempts"]]
    return rows


def flood_table(report: Mapping[str, Any]) -> list[list[str]]:
    rows = [["flood", "acts", "requests", "p50", "p99", "worst", "RSS before", "after"]]
    for row in report["floods"]:
        times = [f"{row[name]:.1f}" for name in ("p50", "p99", "worst", "before", "after")]
        rows.append([row["name"], str(row["count"]), str(row["requests"]), *times])
    return rows


def markdown(report: Mapping[str, Any]) -> str:
    lines = [
        f"# Attacks of a second user: {report['device']}, driver {report['driver']}",
        "",
        tables.provenance(report),
        "",
        "Two users; mpsd runs as root. The victim has two programs in its own domain and one in the shared",
        "domain. `decisions`: faults, evictions, moves or changed roles of domains after the attempt.",
        "",
        tables.markdown_table(attempt_table(report)),
        "",
        "The victim asks for the state, one connection after the other, while the second user floods mpsd.",
        "Times in ms; resident memory of mpsd in MB.",
        "",
        tables.markdown_table(flood_table(report)),
        "",
        "The victim's programs: " + ("; ".join(report["problems"]) or "none lost, no wrong result") + ".",
        "",
        tables.left_behind(report),
    ]
    return "\n".join(lines) + "\n"


def _run_command(args: argparse.Namespace) -> int:
    report = run(args)
    print(tables.heading(report))
    for rows in (attempt_table(report), flood_table(report)):
        print(tables.aligned(rows) + "\n")
    for name, verdict in verdicts(report):
        if verdict != "valid":
            print(f"{name}: {verdict}")
    files.deliver(report, KIND, args.json, args.markdown, markdown(report), tell_stderr)
    return 0 if passed(report) else 1


def add_parser(commands: Any, types: Any) -> None:
    """Add the options of the subcommand. `types`: the readers of names, numbers and seconds."""
    parser = commands.add_parser("attacks", help="a second user attacks mpsd and a first user's programs")
    parser.add_argument(
        "--backend", choices=types.backends, default="simulated", help="the GPU (default: simulated)"
    )
    types.common(parser)
    parser.add_argument("--seconds", type=types.seconds, default=3.0, help="of each flood (default: 3)")
    parser.add_argument("--out", type=Path, help="keep the logs here")
    parser.set_defaults(go=_run_command)
