"""The demo: one fault of each class beside three clients that check their results.

Each fault is injected under stock MPS, under mpsd at level observe, and under mpsd without a configured
level, with the clients under mpsd-run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from faultinject.campaigns import demotable
from faultinject.campaigns.matrix import Matrix, Plan, passed
from faultinject.evidence import tables
from faultinject.evidence.files import tell_stderr
from faultinject.registry.defaults import without_proxy
from faultinject.registry.faults import Fault, by_name
from faultinject.registry.kinds import AUTO, MODES
from faultinject.rig import consent
from faultinject.rig.libraries import Libraries, find_libraries
from faultinject.rig.stage import Options
from mpsd.base.errors import UnsupportedError

SHOWN = (
    "store",
    "null",
    "use_after_unmap",
    "read_only",
    "wild_call",
    "pbdma",
    "trap",
    "stack_overflow",
    "assert",
    "guard_low",
    "zone_past_end@one",
    "zone_use_after_free@one",
    "sigkill_running",
    "sigkill_running@endless",
    "endless@free",
    "sigkill_idle",
    "server_death",
    "control_death",
    "mpsd_death",
    "outside_mps",
)
"""One kind for each class of fault, and kinds that harm no client."""

MOST_JOBS = 4


def demo(backend: str, *, jobs: int = 0, yes: bool = False) -> int:
    """Run the demo, print its table and return the exit status. Raises MpsdError.

    `yes`: use a real GPU even if it is in use.
    """
    if backend != "simulated":
        consent.require_on_gpu(yes=yes, tell=tell_stderr)
    # A run waits for part of its time.
    jobs = jobs or min(MOST_JOBS, 1 + (os.cpu_count() or 1))
    with tempfile.TemporaryDirectory(prefix="mpsd-fi-") as base:
        libraries, why_none = _libraries(backend, Path(base))
        plans = _plans(backend, jobs, libraries)
        which = "the simulated GPU" if backend == "simulated" else "this machine's GPU"
        count = sum(len(plan.pairs()) for plan in plans)
        for i, plan in enumerate(plans):
            plan.before, plan.total = sum(len(earlier.pairs()) for earlier in plans[:i]), count
        tell_stderr(f"{count} runs on {which}: in each, 3 clients compute and check every result,")
        tell_stderr("and one fault is injected. This takes some minutes.")
        reports = [Matrix(plan).run(Path(base)) for plan in plans]
    _show(reports, why_none)
    return 0 if all(map(passed, reports)) else 1


def _libraries(backend: str, base: Path) -> tuple[Libraries | None, str]:
    """Return the proxy and its driver, or why there is none."""
    try:
        return find_libraries(backend, None, None, base / "libraries"), ""
    except UnsupportedError as error:
        return None, str(error)


def _plans(backend: str, jobs: int, libraries: Libraries | None) -> list[Plan]:
    """Return the runs of the first two columns, and those of the third if there is a proxy."""
    options = Options(newcomers=False)
    faults = [by_name(name) for name in SHOWN]
    if libraries is None:
        return [Plan(backend, [f for f in faults if not f.zoned], MODES, options, jobs=jobs)]
    plain = [without_proxy(fault) if fault.zoned else fault for fault in faults]
    columns: Sequence[tuple[Sequence[Fault], Sequence[str]]] = ((plain, MODES), (faults, (AUTO,)))
    return [
        Plan(backend, chosen, modes, options, jobs=jobs, libcuda=libraries.proxy, driver=libraries.driver)
        for chosen, modes in columns
    ]


def _show(reports: Sequence[dict[str, Any]], why_none: str) -> None:
    runs = [run for report in reports for run in report["runs"]]
    modes = MODES if why_none else (*MODES, AUTO)
    first = reports[0]
    print(f"\n{first['device']}, driver {first['driver']}, revision {first['revision']}\n")
    print(tables.aligned(demotable.rows(runs, modes)))
    print()
    for line in (*demotable.notes(runs, modes), *demotable.complaints(runs)):
        print(line)
    if why_none:
        print(f"The column auto and guard zones are not shown: {why_none}")
    print(f"\n{demotable.sentence(runs, modes)}")
