"""`mpsd-faultinject failover`: options, run, table."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from faultinject.campaigns.failover import pauses, reports
from faultinject.campaigns.failover.outcomes import data
from faultinject.campaigns.failover.programrounds import ProgramRounds, Reference
from faultinject.campaigns.failover.rounds import (
    PARTS,
    SETTINGS,
    STANDBY_ON_DEMAND,
    Offenders,
    Rounds,
)
from faultinject.evidence import files, revision, tables
from faultinject.evidence.files import tell_stderr
from faultinject.programs.workloads import HIDDEN, NAMES
from faultinject.registry import kinds
from faultinject.registry.history import History
from faultinject.rig.libraries import Libraries, add_reads, find_libraries
from faultinject.rig.node import Node, open_node
from faultinject.rig.rig import Rig
from mpsd.base.errors import MpsdError, UsageError

KINDS = ("trap", "misaligned", "shared_window", "stack_overflow", "store", "pbdma", "server_death")
WORKS = tuple(name for name in NAMES if name not in HIDDEN)
OFFENDERS = ("plain", "carried", "oldest", "known")
EARLIER = ("oldest", "known")
MAX_EARLIER = 12
"""Each of these offenders has two contexts on the GPU until its fault."""
NOT_COMPARED = "it ended before results were compared with those of a run without faults"


def main_settings(libraries: Libraries, mode: str = "exact") -> dict[str, str]:
    """Return the settings of the daemon in these runs."""
    return {**SETTINGS, **libraries.failover_settings(), "failover.mode": f'"{mode}"'}


def run(args: argparse.Namespace, deliver_partial: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run all kinds, each in a rig of its own, or with --together all beside the same programs.

    `deliver_partial` gets a whole report of the finished kinds after each but the last, so that a run that is
    cut short loses one kind. Raises MpsdError if the rig cannot be set up.
    """
    date = datetime.now(UTC).isoformat(timespec="seconds")
    found: dict[str, Any] = {}
    leftovers: list[str] = []
    reference = Reference()

    def report_it() -> None:
        deliver_partial(_report(args, node, date, leftovers, found))

    with tempfile.TemporaryDirectory(prefix="mpsd-fi-") as base:
        libraries = find_libraries(args.backend, args.libcuda, args.driver, Path(base), args.reads)
        libraries = replace(libraries, looks=args.unproxied)
        node = open_node(args.backend, Path(base))
        try:
            settings = main_settings(libraries, args.mode) | STANDBY_ON_DEMAND
            for group in _kinds_per_rig(args):
                logs = args.out and args.out / group[0]
                with History() as history, Rig(node, "mpsd", history, settings=settings, logs_to=logs) as rig:
                    try:
                        _run_kinds(args, rig, libraries, group, reference, found, report_it)
                    except MpsdError as error:
                        problem = f"{error}; mpsd: {rig.mpsd.tail()[-300:]}"
                        kind = next((kind for kind in group if kind not in found), group[-1])
                        found.setdefault(kind, []).append(_failed_fault(kind, problem))
                leftovers += rig.leftovers
                if group[-1] != args.kinds[-1]:
                    report_it()
        finally:
            node.close()
    return _report(args, node, date, leftovers, found)


def _report(
    args: argparse.Namespace, node: Node, date: str, leftovers: list[str], found: dict[str, Any]
) -> dict[str, Any]:
    words = ["mpsd-faultinject", "failover", "--backend", args.backend]
    words += ["--works", ",".join(args.works)] if args.works else []
    words += ["--offender", args.offender] if args.offender != OFFENDERS[0] else []
    words += ["--unproxied"] if args.unproxied else []
    words += ["--together"] if args.together else []
    words += ["--reads", args.reads.name] if args.reads else []
    words += ["--mode", args.mode, "--kinds", ",".join(found), "--faults", str(args.faults)]
    return {
        "schema": reports.SCHEMA_VERSION,
        "kind": reports.KIND,
        "device": node.device,
        "driver": node.driver,
        "backend": args.backend,
        "revision": revision.current(),
        "mode": args.mode,
        "works": list(args.works),
        "offender": args.offender,
        "together": args.together,
        "unproxied": args.unproxied,
        "date": date,
        "command": shlex.join(words),
        "leftovers": list(leftovers),
        "faults": dict(found),
    }


def _kinds_per_rig(args: argparse.Namespace) -> list[list[str]]:
    """Return the kinds of fault that come beside the same programs."""
    return [args.kinds] if args.together else [[kind] for kind in args.kinds]


def _earlier_offenders(args: argparse.Namespace, group: Sequence[str]) -> list[tuple[str, int]]:
    """Return the offenders of these kinds that start before the programs."""
    if args.offender not in EARLIER:
        return []
    return [(kind, number) for kind in group if kind not in PARTS for number in range(args.faults)]


def _run_kinds(
    args: argparse.Namespace,
    rig: Rig,
    libraries: Libraries,
    group: Sequence[str],
    reference: Reference,
    found: dict[str, Any],
    deliver_finished_kinds: Callable[[], None],
) -> None:
    """Inject the faults of these kinds, one after another beside the same programs, into `found`.

    It reports between two kinds. Until results are compared, the last fault has a problem that says so.
    Raises MpsdError for a missing requirement; failures are recorded in the faults.
    """
    has_long_fault = any(kind in kinds.HANG for kind in group)
    offenders = Offenders(
        args.offender != OFFENDERS[0],
        _earlier_offenders(args, group),
        args.offender == "known",
        has_long_fault,
        args.unproxied,
    )
    works = (
        ProgramRounds(rig, libraries, tell_stderr, args.works, offenders, reference) if args.works else None
    )
    rounds = works or Rounds(rig, libraries, tell_stderr, offenders)
    rounds.start()
    for kind in group:
        faults = rounds.run(kind, args.faults, args.deadline)
        found[kind] = data(faults)
        if kind == group[-1] or any(fault.problem for fault in faults):
            break
        if works:
            found[kind][-1]["problem"] = NOT_COMPARED
        deliver_finished_kinds()
        found[kind] = data(faults)
    blame = rounds.end()
    if works:
        works.compare(faults)
    faults[-1].problem = faults[-1].problem or blame
    found[kind] = data(faults)


def _failed_fault(kind: str, problem: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "problem": problem,
        "offender_code": None,
        "programs": [],
        "record": None,
        "faults": [],
    }


def _run_command(args: argparse.Namespace) -> int:
    known = (*kinds.GPU_KINDS, *kinds.HANG, *PARTS)
    for kind in args.kinds:
        if kind not in known:
            raise UsageError(f"there is no kind {kind!r} for fail-over", remedy=f"of: {', '.join(known)}")
    for work in args.works:
        if work not in WORKS:
            raise UsageError(f"there is no work {work!r}", remedy=f"of: {', '.join(WORKS)}")

    first = max(len(_earlier_offenders(args, group)) for group in _kinds_per_rig(args))
    if first > MAX_EARLIER:
        raise UsageError(
            f"--offender {args.offender} starts {first} offenders before the programs",
            remedy=f"fewer --faults, or not --together: {MAX_EARLIER} at most",
        )

    def deliver(report: dict[str, Any]) -> None:
        files.deliver(report, "moves", args.json, args.markdown, reports.markdown(report), tell_stderr)

    finished = run(args, deliver)
    print(tables.heading(finished))
    print(tables.aligned(reports.table(finished)))
    print(reports.legend())
    if len(of_programs := pauses.table(finished)) > 1:
        print(tables.aligned(of_programs))
    deliver(finished)
    return 0 if reports.passed(finished) else 1


def add_parser(commands: Any, types: Any) -> None:
    """Add the options of the subcommand. `types`: the readers of names, numbers and seconds."""
    parser = commands.add_parser(
        "failover", help="faults that mpsd cannot isolate, beside programs that fail over"
    )
    types.fault_runs(parser, "kind")
    parser.add_argument("--kinds", type=types.names, default=list(KINDS), help=f"of: {', '.join(KINDS)}, ...")
    parser.add_argument("--mode", choices=("exact", "keep"), default="exact", help="(default: exact)")
    parser.add_argument(
        "--works",
        type=types.names,
        default=[],
        help=f"unmodified programs in place of servers, whose results are compared: {', '.join(WORKS)}",
    )
    parser.add_argument(
        "--offender",
        choices=OFFENDERS,
        default=OFFENDERS[0],
        help="without the proxy (default: plain), or under mpsd-run as its neighbours: started after them "
        "(carried), before them (oldest), or before them with kernels that are known (known)",
    )
    parser.add_argument(
        "--unproxied",
        action="store_true",
        help="at each fault, one more client of the domain runs without the proxy and is lost",
    )
    parser.add_argument(
        "--together",
        action="store_true",
        help="all kinds beside the same programs, each after the one before",
    )
    add_reads(parser)
    parser.set_defaults(go=_run_command)
