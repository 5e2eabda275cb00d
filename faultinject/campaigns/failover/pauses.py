"""Moves and pauses of each program, where a report has them: of innocent ones and of the offender."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from faultinject.evidence import tables

HEAD = [
    "kind",
    "program",
    "faults",
    "moves",
    "suspect",
    "trials",
    "beyond the stall, ms",
    "in trial, ms",
    "alone, ms",
]
MEANINGS = (
    "`moves`: how often mpsd told it to move because of one fault. `suspect`: at how many faults mpsd could",
    "not tell it from the offender. `trials`: at how many it replayed in a trial domain. `beyond the stall`:",
    "its longest step, beyond the bystander's and a usual step of its own. `in trial`: from the fault until",
    "its replay in the trial domain was over; `alone`: from the order to move there. Times: median / worst.",
)
OFFENDER = "the offender"
MOST_MOVES = 1
"""Of an innocent program that does not replay in a trial domain, for one fault."""

_spread = partial(tables.spread, places=2)


def problem(fault: Mapping[str, Any]) -> str:
    """Return what is wrong at a fault beside a client without the proxy; empty for nothing."""
    if fault.get("unproxied") is None or not fault["record"] or fault["record"]["planned"]:
        return ""
    if not fault["unproxied"]:
        return "unknown: the client without the proxy was not lost"
    most = max(
        (moves for program in fault["programs"] if (moves := _moves_without_trial(program))), default=0
    )
    return f"invalid: an innocent program moved {most} times for one fault" if most > MOST_MOVES else ""


def _moves_without_trial(program: Mapping[str, Any]) -> int:
    """Return the moves but the one into a trial domain."""
    return (program.get("moves") or 0) - (program.get("trial") is not None)


def excess(fault: Mapping[str, Any], program: Mapping[str, Any]) -> float | None:
    """Return how far the longest step of a program exceeded a usual step and the GPU stall [ms]."""
    stall, bystander = program["stall"], fault.get("bystander")
    if stall is None or bystander is None:
        return None
    return float(stall - (program.get("usual") or 0.0) - bystander)


def moves_of_innocents(faults: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the moves of each program at each fault, from the records; those of the offender are left out.

    Programs that are in no record did not move.
    """
    found = []
    for fault in faults:
        known = [fault["record"], *fault.get("later", ())] if fault["record"] else []
        told = [
            outcome["pid"]
            for record in known
            if not record["planned"]
            for outcome in record["clients"]
            if outcome["told_ms"] is not None and outcome["pid"] != fault.get("carried")
        ]
        found += [told.count(pid) for pid in dict.fromkeys(told)]
    return found


def table(finished: Mapping[str, Any]) -> list[list[str]]:
    """Return a row for each kind and program; the head alone where the report has no moves of programs."""
    rows = [HEAD]
    for kind, faults in finished["faults"].items():
        counted = [fault for fault in faults if any(p.get("moves") is not None for p in fault["programs"])]
        for place, name in enumerate(_names(finished, counted)):
            here = [(f, f["programs"][place]) for f in counted if place < len(f["programs"])]
            rows.append(_row(kind, name, here))
        if any(fault.get("carried") is not None for fault in counted):
            rows.append(_offender_row(kind, counted))
    return rows


def _names(finished: Mapping[str, Any], faults: Sequence[Mapping[str, Any]]) -> list[str]:
    most = max((len(fault["programs"]) for fault in faults), default=0)
    return list(finished["works"] or (f"server {place}" for place in range(most))) if most else []


def _row(kind: str, name: str, here: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[str]:
    trials = [program["trial"] for _, program in here if program.get("trial") is not None]
    moves = sorted({program["moves"] for _, program in here if program.get("moves") is not None})
    suspect = sum(bool(program.get("suspect")) for _, program in here)
    beyond = [excess(fault, program) for fault, program in here]
    cells = [kind, name, str(len(here)), _range(moves), str(suspect), str(len(trials))]
    return [*cells, _spread(beyond), *_spreads(trials)]


def _offender_row(kind: str, faults: Sequence[Mapping[str, Any]]) -> list[str]:
    trials = [fault["trial"] for fault in faults if fault.get("trial") is not None]
    return [kind, OFFENDER, str(len(faults)), "-", "-", str(len(trials)), "-", *_spreads(trials)]


def _spreads(trials: Sequence[Sequence[float]]) -> list[str]:
    return [_spread([trial[place] for trial in trials]) for place in range(2)]


def _range(counts: Sequence[int]) -> str:
    if not counts:
        return "-"
    return f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])


def lines(finished: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a page."""
    rows = table(finished)
    if len(rows) > 1:
        yield from (tables.markdown_table(rows), "", *MEANINGS, "")
