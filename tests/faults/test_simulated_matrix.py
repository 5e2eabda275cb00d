"""Short fixed-seed runs of every kind on the simulated GPU, judged by the laws that hold on hardware.

Each run has a node, a service and processes of its own and ends all of them; a deadline that is missed
is a verdict `unknown`, which fails.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from faultinject.faults import REGISTRY, Fault
from faultinject.kinds import MODES
from faultinject.matrix import Matrix, Plan
from faultinject.report import RUN_SCHEMA
from faultinject.stage import Options

PAIRS = [pytest.param(f, m, id=f"{f.name}-{m}") for f in REGISTRY for m in MODES if m in f.modes]


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("fault", "mode"), PAIRS)
def test_verdict(fault: Fault, mode: str, tmp_path: Path) -> None:
    plan = Plan("simulated", (fault,), (mode,), Options(seed=11), deadline_s=90.0, out=tmp_path)
    entry = Matrix(plan).one(fault, mode, "simulated", tmp_path)
    if entry["not_run"]:
        pytest.skip(entry["not_run"])
    complaints = [f"{f['law']}: {f['verdict']}: {f['text']}" for f in entry["findings"]]
    assert entry["verdict"] == "valid", (complaints, entry["command"])
    assert entry.keys() == RUN_SCHEMA.keys()
    if fault.survive[mode]:
        assert entry["lost"] == 0
    assert entry["wrong_results"] == 0
