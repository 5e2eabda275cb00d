"""One fault of each class beside three clients that check their results: stock MPS, then mpsd; then programs
under mpsd-run, which are moved away from faults that nothing isolates."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from faultinject import consent, report
from faultinject.failover import command as failover
from faultinject.failover import reports as failover_reports
from faultinject.faults import by_name
from faultinject.kinds import MODES
from faultinject.matrix import Matrix, Plan, passed, tell_stderr
from mpsd.errors import UnsupportedError

SHOWN = (
    "store",
    "null",
    "use_after_unmap",
    "read_only",
    "wild_call",
    "pbdma",
    "noncanonical",
    "misaligned",
    "trap",
    "stack_overflow",
    "assert",
    "guard_low",
    "sigkill_running",
    "sigkill_running@endless",
    "endless@free",
    "sigkill_idle",
    "server_death",
    "control_death",
    "mpsd_death",
    "outside_mps",
)
"""For each class of fault one way to cause it, and what harms nobody or must not."""

MOST_JOBS = 4

MOVED = ("trap", "stack_overflow", "server_death")
MOVED_TIMES = 2
MOVED_DEADLINE_S = 120.0
MOVED_COLUMNS = ("kind", "faults", "lost", "told", "longest step", "GPU's", "verdict")


def demo(backend: str, *, jobs: int = 0, yes: bool = False) -> int:
    """Run it with progress, print the matrix; the exit status. Raises MpsdError.

    `yes`: a real GPU may be used, whoever is on it.
    """
    if backend != "simulated":
        _may_use_gpu(yes=yes)
    jobs = jobs or min(MOST_JOBS, os.cpu_count() or 1)
    plan = Plan(backend, [by_name(n) for n in SHOWN], MODES, jobs=jobs)
    which = "the simulated GPU" if backend == "simulated" else "this machine's GPU"
    tell_stderr(f"{len(plan.pairs())} runs on {which}: in each 3 clients compute and check every result,")
    tell_stderr("and one fault is injected, under stock MPS and under mpsd.")
    with tempfile.TemporaryDirectory(prefix="mpsd-fi-") as base:
        finished = Matrix(plan).run(Path(base))
    print(f"\n{finished['device']}, driver {finished['driver']}; again: {finished['command']}\n")
    print(report.aligned(side_by_side(finished["runs"])))
    print(
        "\nlost: clients that got an error or died of somebody else's fault; named: the offender, by the"
        "\nkernel log (stock) or mpsd's record; record: driver's event to mpsd's record; new client: spawn"
        "\nto first kernel of a client started after the fault. All times in ms, `-`: not measured."
    )
    return 0 if passed(finished) and carried_over(backend) else 1


def carried_over(backend: str) -> bool:
    """Show fail-over; False where it is not as it must be. Raises MpsdError."""
    tell_stderr("")
    tell_stderr("now three programs under mpsd-run, beside a neighbour whose faults nothing isolates:")
    try:
        finished = failover.few(backend, MOVED, MOVED_TIMES, MOVED_DEADLINE_S)
    except UnsupportedError as error:
        print(f"\nfail-over is not shown: {error}")
        return True
    print(f"\n{report.heading(finished)}\n")
    print(report.aligned(moved(finished)))
    print(
        "\nlost: programs under mpsd-run that did not go on; told: errors that they got. The longest step"
        "\naround the fault, and for how long the GPU itself stood still: ms, median / worst."
    )
    return failover_reports.passed(finished)


def moved(finished: Mapping[str, Any]) -> list[list[str]]:
    """What a newcomer wants to know of the table of fail-over."""
    head, *rows = failover_reports.table(finished)
    chosen = [head.index(name) for name in MOVED_COLUMNS]
    return [[row[i] for i in chosen] for row in (head, *rows)]


def _may_use_gpu(*, yes: bool) -> None:
    from mpsd.gpu.nvidia.nvml import Nvml

    try:
        nvml = Nvml()
    except UnsupportedError as error:
        raise UnsupportedError(error.message, remedy=consent.SPARED) from error
    try:
        consent.require(nvml, yes=yes, ask=consent.at_terminal(), tell=tell_stderr)
    finally:
        nvml.close()


def side_by_side(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """One row a fault: what stock MPS did, what mpsd did."""
    head = ["fault", "stock: lost", "named", "new client", "mpsd: lost", "named", "class"]
    rows = [[*head, "record", "evict", "new client", "verdict"]]
    for name in dict.fromkeys(report.cell(r, "kind") for r in runs):
        mine = {r["mode"]: r for r in runs if report.cell(r, "kind") == name}
        rows.append([name, *_stock(mine.get("stock")), *_mpsd(mine.get("mpsd"))])
    return rows


def _stock(run: Mapping[str, Any] | None) -> list[str]:
    if run is None:
        return ["-"] * 3
    return [report.cell(run, key) for key in ("lost", "named", "new_client_ms")]


def _mpsd(run: Mapping[str, Any] | None) -> list[str]:
    if run is None:
        return ["-"] * 7
    keys = ("lost", "named", "fault_class", "record_ms", "evict_ms", "new_client_ms", "verdict")
    cells = [report.cell(run, key) for key in keys]
    if run["confidence"] and run["named"] == "right":
        cells[1] += f", {run['confidence']}"
    return cells
