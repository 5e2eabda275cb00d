"""`mpsd-faultinject failover`: the options, the run, the table."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from faultinject import kinds, report
from faultinject.failover import reports
from faultinject.failover.outcomes import data
from faultinject.failover.rounds import ONLY_WANTED, PARTS, SETTINGS, Offenders, Rounds
from faultinject.failover.works import Calm, WorkRounds
from faultinject.history import History
from faultinject.matrix import tell_stderr
from faultinject.node import Node, open_node
from faultinject.proxy.library import Libraries, add_reads, find_libraries
from faultinject.proxy.work import HIDDEN, NAMES
from faultinject.rig import Rig
from mpsd.errors import MpsdError, UsageError

KINDS = ("trap", "misaligned", "shared_window", "stack_overflow", "store", "pbdma", "server_death")
WORKS = tuple(name for name in NAMES if name not in HIDDEN)
OFFENDERS = ("plain", "carried", "oldest", "known")
EARLIER = ("oldest", "known")
MOST_EARLIER = 12
"""Each of these offenders has two contexts on the GPU until its fault."""
NOT_COMPARED = "it ended before results were compared with those of a run without faults"


def main_settings(libraries: Libraries, mode: str = "exact") -> dict[str, str]:
    """Of the daemon in these runs."""
    return {**SETTINGS, **libraries.failover_settings(), "failover.mode": f'"{mode}"'}


def run(args: argparse.Namespace, so_far: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """All kinds, each in a rig of its own, or with `--together` all beside the same programs. `so_far` is
    given a whole report of those that are done, after each but the last: who ends this before its end has
    lost one kind. Raises MpsdError where the rig itself cannot be had."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    found: dict[str, Any] = {}
    left: list[str] = []
    calm = Calm()

    def report_it() -> None:
        so_far(_report(args, node, date, left, found))

    with tempfile.TemporaryDirectory(prefix="mpsd-fi-") as base:
        libraries = find_libraries(args.backend, args.libcuda, args.driver, Path(base), args.reads)
        node = open_node(args.backend, Path(base))
        try:
            settings = main_settings(libraries, args.mode) | ONLY_WANTED
            for some in _groups(args):
                logs = args.out and args.out / some[0]
                with History() as history, Rig(node, "mpsd", history, settings=settings, logs_to=logs) as rig:
                    try:
                        _some_kinds(args, rig, libraries, some, calm, found, report_it)
                    except MpsdError as error:
                        problem = f"{error}; mpsd: {rig.mpsd.tail()[-300:]}"
                        kind = next((kind for kind in some if kind not in found), some[-1])
                        found.setdefault(kind, []).append(_broken(kind, problem))
                left += rig.left
                if some[-1] != args.kinds[-1]:
                    report_it()
        finally:
            node.close()
    return _report(args, node, date, left, found)


def few(backend: str, kinds: Sequence[str], faults: int, deadline_s: float) -> dict[str, Any]:
    """The report of so many faults of each kind beside three servers, all else by default.

    Raises MpsdError."""
    args = argparse.Namespace(backend=backend, kinds=list(kinds), faults=faults, deadline=deadline_s)
    args.mode, args.offender, args.works, args.together = "exact", OFFENDERS[0], [], False
    args.libcuda = args.driver = args.out = args.reads = None
    return run(args, lambda _: None)


def _report(
    args: argparse.Namespace, node: Node, date: str, left: list[str], found: dict[str, Any]
) -> dict[str, Any]:
    words = ["mpsd-faultinject", "failover", "--backend", args.backend]
    words += ["--works", ",".join(args.works)] if args.works else []
    words += ["--offender", args.offender] if args.offender != OFFENDERS[0] else []
    words += ["--together"] if args.together else []
    words += ["--reads", args.reads.name] if args.reads else []
    words += ["--mode", args.mode, "--kinds", ",".join(found), "--faults", str(args.faults)]
    return {
        "schema": reports.SCHEMA_VERSION,
        "kind": reports.KIND,
        "device": node.device,
        "driver": node.driver,
        "backend": args.backend,
        "mode": args.mode,
        "works": list(args.works),
        "offender": args.offender,
        "together": args.together,
        "date": date,
        "command": shlex.join(words),
        "leftovers": list(left),
        "faults": dict(found),
    }


def _groups(args: argparse.Namespace) -> list[list[str]]:
    """The kinds whose faults come beside the same programs."""
    return [args.kinds] if args.together else [[kind] for kind in args.kinds]


def _earlier(args: argparse.Namespace, some: Sequence[str]) -> list[tuple[str, int]]:
    """The offenders of these kinds that are started before the programs."""
    if args.offender not in EARLIER:
        return []
    return [(kind, number) for kind in some if kind not in PARTS for number in range(args.faults)]


def _some_kinds(
    args: argparse.Namespace,
    rig: Rig,
    libraries: Libraries,
    some: Sequence[str],
    calm: Calm,
    found: dict[str, Any],
    report_it: Callable[[], None],
) -> None:
    """Puts the faults of these kinds, one after another beside the same programs, into `found`; reported
    between two of them. Until results are compared the last fault has a problem that says so.

    Raises MpsdError for what is missing; what goes wrong is in the faults."""
    lasts = any(kind in kinds.HANG for kind in some)
    offenders = Offenders(
        args.offender != OFFENDERS[0], _earlier(args, some), args.offender == "known", lasts
    )
    works = WorkRounds(rig, libraries, tell_stderr, args.works, offenders, calm) if args.works else None
    rounds = works or Rounds(rig, libraries, tell_stderr, offenders)
    rounds.start()
    for kind in some:
        faults = rounds.run(kind, args.faults, args.deadline)
        found[kind] = data(faults)
        if kind == some[-1] or any(fault.problem for fault in faults):
            break
        if works:
            found[kind][-1]["problem"] = NOT_COMPARED
        report_it()
        found[kind] = data(faults)
    blames = rounds.end()
    if works:
        works.compare(faults)
    faults[-1].problem = faults[-1].problem or blames
    found[kind] = data(faults)


def _broken(kind: str, problem: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "problem": problem,
        "offender_code": None,
        "programs": [],
        "record": None,
        "faults": [],
    }


def _go(args: argparse.Namespace) -> int:
    known = (*kinds.GPU_KINDS, *kinds.HANG, *PARTS)
    for kind in args.kinds:
        if kind not in known:
            raise UsageError(f"there is no kind {kind!r} for fail-over", remedy=f"of: {', '.join(known)}")
    for work in args.works:
        if work not in WORKS:
            raise UsageError(f"there is no work {work!r}", remedy=f"of: {', '.join(WORKS)}")

    first = max(len(_earlier(args, some)) for some in _groups(args))
    if first > MOST_EARLIER:
        raise UsageError(
            f"--offender {args.offender} starts {first} offenders before the programs",
            remedy=f"fewer --faults, or not --together: {MOST_EARLIER} at most",
        )

    def deliver(made: dict[str, Any]) -> None:
        report.deliver(made, "moves", args.json, args.markdown, reports.markdown(made), tell_stderr)

    finished = run(args, deliver)
    print(report.heading(finished))
    print(report.aligned(reports.table(finished)))
    print(reports.legend())
    deliver(finished)
    return 0 if reports.passed(finished) else 1


def add_parser(commands: Any, types: Any) -> None:
    """The subcommand's options. `types` has the harness's readers of names, numbers and seconds."""
    parser = commands.add_parser("failover", help="faults that nothing isolates, beside programs that go on")
    types.fault_runs(parser, "kind")
    parser.add_argument("--kinds", type=types.names, default=list(KINDS), help=f"of: {', '.join(KINDS)}, ...")
    parser.add_argument("--mode", choices=("exact", "keep"), default="exact", help="(default: exact)")
    parser.add_argument(
        "--works",
        type=types.names,
        default=[],
        help=f"programs in place of servers, whose results are compared: {', '.join(WORKS)}",
    )
    parser.add_argument(
        "--offender",
        choices=OFFENDERS,
        default=OFFENDERS[0],
        help="a program like any other of the node (default: plain); or under mpsd-run as its neighbours "
        "are, and started after them (carried), or before (oldest), with what they launch known (known)",
    )
    parser.add_argument(
        "--together",
        action="store_true",
        help="all kinds beside the same programs, each after the one before",
    )
    add_reads(parser)
    parser.set_defaults(go=_go)
