"""Every stray access that a guard zone absorbs, by a program of the stand-in driver under the proxy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from faultinject import kinds
from faultinject.faults import REGISTRY, Fault, Hit
from faultinject.matrix import Matrix, Plan
from faultinject.stage import Options
from tests.support.libcudas import Libraries, session_libraries
from tests.support.long import LONG

# The stand-in driver has no grids: what fills the GPU is a kernel over more words; one kind of it is enough,
# as it is of one that lasts.
ZONES = [f for f in REGISTRY if f.kind in kinds.ZONE]
if not LONG:
    ZONES = [f for f in ZONES if f.variant == "one" or f.kind in ("zone_past_end", "zone_freeze")]

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc: the libcuda proxy cannot be built here"),
]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    return session_libraries(tmp_path_factory)


@pytest.mark.parametrize("fault", ZONES, ids=lambda f: f.name)
def test_a_stray_access_is_absorbed_and_what_is_to_become_of_its_offender_does(
    fault: Fault, libraries: Libraries, tmp_path: Path
) -> None:
    named = {"libcuda": libraries.proxy, "driver": libraries.standin}
    entry = Matrix(Plan("simulated", (), (), Options(seed=3, survivors=1), **named)).one(
        fault, "mpsd", "simulated", tmp_path
    )
    if entry["not_run"]:
        pytest.skip(entry["not_run"])
    assert entry["verdict"] == "valid", entry["findings"]
    assert (entry["lost"], entry["wrong_results"]) == (0, 0)
    told = (entry["fault_class"], entry["named"], entry["confidence"])
    assert told == ((None, None, None) if fault.hit is Hit.SILENT else ("guard-hit", "right", "certain"))
    ends = fault.hit in (Hit.EVICTED, Hit.FROZEN)
    assert (entry["evict_ms"] is not None, entry["gone_ms"] is not None) == (ends, ends)
