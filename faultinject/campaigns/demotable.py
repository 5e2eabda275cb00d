"""The table of the demo, its notes and its closing sentence, all from the runs."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from faultinject.campaigns.matrixreport import cell
from faultinject.registry.kinds import AUTO

Runs = Sequence[Mapping[str, Any]]
WIDTH = 110
COLUMNS = {"stock": "stock", "mpsd": "observe", AUTO: "auto"}
_SPOKEN = {"stock": "stock MPS", "mpsd": "mpsd at observe", AUTO: "mpsd by default"}
_NAMED = {"right": "yes", "unknown": "no", "wrong": "wrong"}


def _by_kind(runs: Runs) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Return the run of each kind in each mode."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for run in runs:
        found.setdefault(cell(run, "kind"), {})[run["mode"]] = run
    return found


def rows(runs: Runs, modes: Sequence[str]) -> list[list[str]]:
    """Return one row for each kind: lost clients in each mode, offender and class where mpsd runs."""
    head = ["fault"]
    for mode in modes:
        head += [COLUMNS[mode]] if mode == "stock" else [COLUMNS[mode], "named", "class"]
    body = [[kind, *_cells(by_mode, modes)] for kind, by_mode in _by_kind(runs).items()]
    return [head, *body]


def _cells(by_mode: Mapping[str, Mapping[str, Any]], modes: Sequence[str]) -> list[str]:
    cells: list[str] = []
    for mode in modes:
        run = by_mode.get(mode)
        if mode == "stock":
            cells.append(cell(run, "lost") if run else "-")
        elif run is None:
            cells += ["-"] * 3
        else:
            cells += [cell(run, "lost"), _NAMED.get(run["named"], "-"), cell(run, "fault_class")]
    return cells


def notes(runs: Runs, modes: Sequence[str]) -> list[str]:
    """Return what the columns mean, and one line for each reason why cells are empty."""
    about = [
        "Clients that got an error, or died of another client's fault, of all clients beside it. "
        "named: whether mpsd's record names the offender. class: as recorded.",
        "stock: stock MPS. observe: mpsd at level observe.",
    ]
    if AUTO in modes:
        levels = sorted({run["notes"]["level"] for run in runs if "level" in run["notes"]})
        about[1] += (
            " auto: mpsd without a configuration of the level, and the clients under mpsd-run. "
            f"Their level was {' or '.join(levels) or 'not known'}."
        )
    return [line for text in about for line in textwrap.wrap(text, WIDTH)] + _gaps(runs, modes)


def _gaps(runs: Runs, modes: Sequence[str]) -> list[str]:
    kinds_by_reason: dict[str, list[str]] = {}
    for kind, by_mode in _by_kind(runs).items():
        for mode in modes:
            run = by_mode.get(mode)
            if run is not None and run["lost"] is not None:
                continue
            why = "not part of this column" if run is None else run["not_run"] or "the run failed, see below"
            if run is None and mode == "stock":
                why = "there is no mpsd under stock MPS"
            kinds_by_reason.setdefault(f"{COLUMNS[mode]}: {why}", []).append(kind)
    return [f"-: {', '.join(found)} in column {reason}." for reason, found in kinds_by_reason.items()]


def complaints(runs: Runs) -> list[str]:
    """Return one line for each law that a run broke, or that could not be judged."""
    return [
        f"{cell(run, 'kind')} in column {COLUMNS[run['mode']]}: {found['verdict']}: "
        f"{found['law']}: {found['text']}"
        for run in runs
        for found in run["findings"]
    ]


def sentence(runs: Runs, modes: Sequence[str]) -> str:
    """Return how many clients were lost in each mode, over the faults that ran in all of them."""
    whole = [
        by_mode
        for by_mode in _by_kind(runs).values()
        if all(mode in by_mode and by_mode[mode]["lost"] is not None for mode in modes)
    ]
    if not whole:
        return "No fault ran in every column."
    clients = sorted({run["survivors"] for by_mode in whole for run in by_mode.values()})
    lost = {mode: sum(by_mode[mode]["lost"] for by_mode in whole) for mode in modes}
    first, *others = modes
    counts = [f"{_SPOKEN[first]} lost {lost[first]}", *(f"{_SPOKEN[m]} {lost[m]}" for m in others)]
    beside = f"Of {' or '.join(map(str, clients))} clients beside each of {len(whole)} faults"
    return f"{beside}, {', '.join(counts)}."
