"""Short fixed-seed runs of every kind on the simulated GPU, judged by the laws that hold on hardware.

Each run has a node, a service and processes of its own and ends all of them. A missed deadline is a verdict
`unknown`, which fails. A kind's modes run side by side, but never beyond their test: between tests pytest
changes this process's environment, which programs that are starting then still read.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from faultinject.campaigns.matrix import Matrix, Plan
from faultinject.campaigns.matrixreport import RUN_SCHEMA
from faultinject.registry import kinds
from faultinject.registry.faults import REGISTRY, Fault, under_kernel_module
from faultinject.registry.kinds import KMOD, MODES
from faultinject.rig.stage import Options
from tests.support.long import LONG, of

SEED = 11
# All survivors fare alike, and each takes as much of a core as the rest of a run.
SURVIVORS = of(3, 1)
# The patched kernel module does not change the other kinds.
TOLD_KMOD = kinds.GPU_KINDS + kinds.CIRCUMSTANCE
# Each mode treats all faults of a class alike. Without mpsd the clients are lost; with the patched kernel
# module a memory fault ends its own client alone, and other faults are as without it.
SOME = {
    "stock": "store trap guard_low sigkill_running endless sigstop fork_using server_death control_death"
    " other_domain outside_mps churn",
    KMOD: "store read_only noncanonical trap guard_low guard_heap " + " ".join(kinds.CIRCUMSTANCE),
}
# mpsd treats each like one that is run: a store, a window, a trap, an absorbing guard, a sudden exit.
LIKE_OTHERS = (
    "load atomic null local_window breakpoint assert wild_call_low guard_file@on guard_heap@on "
    "guard_stack@on sigkill_running@fill segfault_running"
)
FAULTS = [fault for fault in REGISTRY if LONG or fault.name not in LIKE_OTHERS.split()]
DEADLINE_S = 90.0


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """The matrix that keeps, for all its runs, what they share."""
    out = tmp_path_factory.mktemp("matrix")
    return Matrix(
        Plan("simulated", (), (), Options(seed=SEED, survivors=SURVIVORS), deadline_s=DEADLINE_S, out=out)
    )


@pytest.mark.timeout(5 * DEADLINE_S)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_verdict(fault: Fault, matrix: Matrix, tmp_path: Path) -> None:
    every = (*MODES, KMOD) if fault.kind in TOLD_KMOD else MODES
    modes = [mode for mode in every if fault.runs_in(mode)]
    if not LONG:
        modes = [mode for mode in modes if fault.kind in SOME.get(mode, fault.kind).split()]
    with ThreadPoolExecutor(len(modes)) as pool:
        entries = list(pool.map(lambda mode: matrix.run_one(fault, mode, "simulated", tmp_path), modes))
    ran = [entry for entry in entries if not entry["not_run"]]
    for entry in ran:
        _judge(fault, entry)
    if len(ran) < len(entries):
        pytest.skip("; ".join(f"{e['mode']}: {e['not_run']}" for e in entries if e["not_run"]))


def _judge(fault: Fault, entry: dict[str, Any]) -> None:
    complaints = [f"{f['law']}: {f['verdict']}: {f['text']}" for f in entry["findings"]]
    assert entry["verdict"] == "valid", (complaints, entry["command"])
    assert entry.keys() == RUN_SCHEMA.keys()
    assert entry["wrong_results"] == 0
    judged = under_kernel_module(fault) if entry["mode"] == KMOD else fault
    if judged.survive[entry["mode"]]:
        assert entry["lost"] == 0
