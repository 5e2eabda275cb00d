"""`mpsd-faultinject failover`: the options, the run, the table."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from faultinject import kinds, report
from faultinject.failover.rounds import PARTS, SETTINGS, Rounds, data
from faultinject.failover.works import WorkRounds
from faultinject.history import History
from faultinject.matrix import tell_stderr
from faultinject.node import open_node
from faultinject.proxy.library import Libraries, find_libraries
from faultinject.proxy.work import NAMES
from faultinject.rig import Rig
from mpsd.core.members import MISSING
from mpsd.errors import MpsdError, UsageError

KINDS = ("trap", "misaligned", "shared_window", "stack_overflow", "store", "pbdma", "server_death")


def judge(faults: Sequence[Mapping[str, Any]]) -> str:
    """valid, or what was seen that must not be."""
    for fault in faults:
        if fault["problem"]:
            return f"invalid: {fault['problem'][:300]}"
        for program in fault["programs"]:
            if not program["alive"]:
                return "invalid: a program was lost"
            if program["wrong"]:
                return "invalid: a program saw a wrong result, or memory that had changed"
            if len(program["told"]) > 1:
                return f"invalid: a program met more than one error: {program['told']}"
        if sum(bool(p["told"]) for p in fault["programs"]) > _missing(fault):
            return "invalid: a program met an error where nothing of its was missing"
    return "valid"


def _missing(fault: Mapping[str, Any]) -> int:
    """Programs of which mpsd knows that what they had in flight may be missing."""
    return sum(fate["why"].startswith(MISSING) for fate in fault["record"]["clients"])


def row(kind: str, faults: Sequence[Mapping[str, Any]]) -> list[str]:
    """kind, faults, lost, told, times in ms (median / worst), verdict."""
    programs = [p for fault in faults for p in fault["programs"]]
    fates = [fate for fault in faults if fault["record"] for fate in fault["record"]["clients"]]
    return [
        kind,
        str(len(faults)),
        str(sum(not p["alive"] for p in programs)),
        str(sum(bool(p["told"]) for p in programs)),
        _spread([p["stall"] for p in programs]),
        _spread([fault["record"]["decision_ms"] for fault in faults if fault["record"]]),
        *(_spread([fate.get(name) for fate in fates]) for name in ("held_ms", "fence_ms", "first_ms")),
        judge(faults),
    ]


HEAD = ["kind", "faults", "lost", "told", "longest step", "decided", "held", "fence", "goes on", "verdict"]


def _spread(values: Sequence[float | None]) -> str:
    known = sorted(v for v in values if v is not None)
    return f"{median(known):.2f} / {known[-1]:.2f}" if known else "-"


def main_settings(libraries: Libraries, mode: str = "exact") -> dict[str, str]:
    """Of the daemon in these runs."""
    settings = {**SETTINGS, "failover.mode": f'"{mode}"'}
    if libraries.driver:
        settings["failover.driver"] = f'"{libraries.driver / "libcuda.so.1"}"'
    return settings


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All kinds, each in a rig of its own. Raises MpsdError where the rig itself cannot be had."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    found: dict[str, Any] = {}
    left: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mpsd-fi-") as base:
        libraries = find_libraries(args.backend, args.libcuda, args.driver, Path(base))
        node = open_node(args.backend, Path(base))
        try:
            settings = main_settings(libraries, args.mode)
            for kind in args.kinds:
                with (
                    History() as history,
                    Rig(
                        node, "mpsd", history, settings=settings, logs_to=args.out and args.out / kind
                    ) as rig,
                ):
                    try:
                        found[kind] = _one_kind(args, rig, libraries, kind)
                    except MpsdError as error:
                        found.setdefault(kind, [_broken(kind, f"{error}; mpsd: {rig.mpsd.tail()[-300:]}")])
                left += rig.left
        finally:
            node.close()
    words = ["mpsd-faultinject", "failover", "--backend", args.backend]
    words += ["--works", ",".join(args.works)] if args.works else []
    words += ["--mode", args.mode, "--kinds", ",".join(args.kinds), "--faults", str(args.faults)]
    return {
        "schema": 1,
        "kind": "failover",
        "device": node.device,
        "driver": node.driver,
        "backend": args.backend,
        "mode": args.mode,
        "works": list(args.works),
        "date": date,
        "command": shlex.join(words),
        "leftovers": left,
        "faults": found,
    }


def _one_kind(args: argparse.Namespace, rig: Rig, libraries: Libraries, kind: str) -> list[dict[str, Any]]:
    """Raises MpsdError for what is missing; what goes wrong is in the faults."""
    if not args.works:
        rounds = Rounds(rig, libraries, tell_stderr)
        rounds.start()
        faults = rounds.run(kind, args.faults, args.deadline)
        rounds.end()
        return data(faults)
    works = WorkRounds(rig, libraries, tell_stderr, args.works)
    works.start()
    faults = works.run(kind, args.faults, args.deadline)
    works.end()
    works.compare(faults)
    return data(faults)


def _broken(kind: str, problem: str) -> dict[str, Any]:
    return {"kind": kind, "problem": problem, "offender_code": None, "programs": [], "record": None}


def table(finished: Mapping[str, Any]) -> list[list[str]]:
    return [HEAD, *(row(kind, faults) for kind, faults in finished["faults"].items())]


def _who(works: Sequence[str]) -> str:
    if not works:
        return "Three servers keep memory in the vault and check every result."
    return f"Programs ({', '.join(works)}), whose results are compared with those of a run without faults."


def markdown(finished: Mapping[str, Any]) -> str:
    rows = table(finished)
    lines = [
        f"# Fail-over: {finished['device']}, driver {finished['driver']}",
        "",
        f"{finished['date']}; again: `{finished['command']}`",
        "",
        f"{_who(finished['works'])} A neighbour faults again and again, and they go on in a second",
        "domain each time. Times in ms, median / worst: the longest step of a program around the fault;",
        "from mpsd's first sign to its decision; from the word to a program until its calls were held, its",
        "old context could write no more, and it went on. `told`: how often a program met one error, which",
        "said that what it had in flight may be lost: in the mode `keep` always, and in the mode `exact`",
        "where it cannot be done again.",
        "",
        "| " + " | ".join(rows[0]) + " |",
        "| " + " | ".join("---" for _ in rows[0]) + " |",
        *("| " + " | ".join(line) + " |" for line in rows[1:]),
        "",
        "Left behind: " + ("; ".join(finished["leftovers"]) or "nothing") + ".",
    ]
    return "\n".join(lines) + "\n"


def passed(finished: Mapping[str, Any]) -> bool:
    return not finished["leftovers"] and all(
        judge(faults) == "valid" for faults in finished["faults"].values()
    )


def _go(args: argparse.Namespace) -> int:
    known = (*kinds.GPU_KINDS, *PARTS)
    for kind in args.kinds:
        if kind not in known:
            raise UsageError(f"there is no kind {kind!r} for fail-over", remedy=f"of: {', '.join(known)}")
    for work in args.works:
        if work not in NAMES:
            raise UsageError(f"there is no work {work!r}", remedy=f"of: {', '.join(NAMES)}")
    finished = run(args)
    print(
        f"{finished['device']}, driver {finished['driver']}, {finished['date']}; again: {finished['command']}"
    )
    print(report.aligned(table(finished)))
    report.deliver(finished, "moves", args.json, args.markdown, markdown(finished), tell_stderr)
    return 0 if passed(finished) else 1


def add_parser(commands: Any, types: Any) -> None:
    """The subcommand's options. `types` has the harness's readers of names, numbers and seconds."""
    parser = commands.add_parser("failover", help="faults that nothing isolates, beside programs that go on")
    parser.add_argument("--backend", choices=types.backends, default="simulated", help="(default: simulated)")
    types.common(parser)
    parser.add_argument("--kinds", type=types.names, default=list(KINDS), help=f"of: {', '.join(KINDS)}, ...")
    parser.add_argument("--mode", choices=("exact", "keep"), default="exact", help="(default: exact)")
    parser.add_argument(
        "--works",
        type=types.names,
        default=[],
        help=f"programs in place of servers, whose results are compared: {', '.join(NAMES)}",
    )
    parser.add_argument("--faults", type=types.number(1, 1000), default=3, help="of each kind (default: 3)")
    parser.add_argument("--deadline", type=types.seconds, default=120.0, help="seconds for each kind")
    parser.add_argument(
        "--libcuda", type=Path, metavar="DIR", help="the folder with the proxy's libcuda.so.1"
    )
    parser.add_argument("--driver", type=Path, metavar="DIR", help="the stand-in's, for the simulated GPU")
    parser.add_argument("--out", type=Path, help="keep the logs of each kind here")
    parser.set_defaults(go=_go)
