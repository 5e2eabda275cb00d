"""Every stray access that a guard zone absorbs, by a program of the stand-in driver under the proxy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from faultinject.campaigns.matrix import Matrix, Plan
from faultinject.registry import kinds
from faultinject.registry.defaults import without_proxy
from faultinject.registry.faults import REGISTRY, Fault, Hit, by_name
from faultinject.rig.stage import Options
from tests.support.libcudas import Libraries, session_libraries
from tests.support.long import LONG

# The stand-in driver has no grids: a kernel over more words fills the GPU. One kind of each is enough, of
# that kernel and of the one that lasts.
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
    entry = Matrix(Plan("simulated", (), (), Options(seed=3, survivors=1), **named)).run_one(
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


@pytest.mark.parametrize("name", ["trap", "zone_past_end@one", "sigkill_running@endless"])
def test_by_default_no_client_under_mpsd_run_is_lost(name: str, libraries: Libraries, tmp_path: Path) -> None:
    named = {"libcuda": libraries.proxy, "driver": libraries.standin}
    matrix = Matrix(Plan("simulated", (), (), Options(seed=3, survivors=1, newcomers=False), **named))
    entry = matrix.run_one(by_name(name), kinds.AUTO, "simulated", tmp_path)
    assert entry["verdict"] == "valid", entry["findings"]
    assert (entry["lost"], entry["notes"]["level"]) == (0, "failover")


@pytest.mark.parametrize("mode", kinds.MODES)
def test_the_same_access_without_the_proxy_ends_the_other_clients(
    mode: str, libraries: Libraries, tmp_path: Path
) -> None:
    named = {"libcuda": libraries.proxy, "driver": libraries.standin}
    matrix = Matrix(Plan("simulated", (), (), Options(seed=3, survivors=1, newcomers=False), **named))
    entry = matrix.run_one(without_proxy(by_name("zone_past_end@one")), mode, "simulated", tmp_path)
    assert entry["verdict"] == "valid", entry["findings"]
    assert entry["lost"] == 1
