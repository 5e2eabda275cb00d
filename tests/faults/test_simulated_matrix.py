"""Short fixed-seed runs of every kind on the simulated GPU, judged by the laws that hold on hardware.

Each run has a node, a service and processes of its own and ends all of them; a deadline that is missed
is a verdict `unknown`, which fails.
"""

from __future__ import annotations

import pytest

from faultinject.faults import REGISTRY, Fault
from faultinject.kinds import MODES
from faultinject.report import RUN_SCHEMA
from tests.faults.conftest import DEADLINE_S, Entries

PAIRS = [pytest.param(f, m, id=f"{f.name}-{m}") for f in REGISTRY for m in MODES if m in f.modes]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("fault", "mode"), PAIRS)
def test_verdict(fault: Fault, mode: str, entries: Entries) -> None:
    entry = entries[fault.name, mode].result(timeout=5 * DEADLINE_S)
    if entry["not_run"]:
        pytest.skip(entry["not_run"])
    complaints = [f"{f['law']}: {f['verdict']}: {f['text']}" for f in entry["findings"]]
    assert entry["verdict"] == "valid", (complaints, entry["command"])
    assert entry.keys() == RUN_SCHEMA.keys()
    assert entry["wrong_results"] == 0
    if fault.survive[mode]:
        assert entry["lost"] == 0
