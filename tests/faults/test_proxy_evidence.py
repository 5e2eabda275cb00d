"""The evidence for the proxy, made on the stand-in driver: pairs of programs, exits, a suite of tests."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from faultinject.__main__ import main
from faultinject.campaigns.proxy import reports
from faultinject.programs.workloads import MAPPED, ON_SIMULATED
from tests.support.libcudas import Libraries, session_libraries

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc: the libcuda proxy cannot be built here"),
]


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten blocks and let servers compute less often: no verdict here depends on the length of a step."""
    monkeypatch.setattr("faultinject.campaigns.proxy.pairs.BLOCK_S", 0.05)
    monkeypatch.setattr("faultinject.rig.libraries.Libraries.server_options", ("--kernel-ms", "20"))


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    return session_libraries(tmp_path_factory)


def evidence(libraries: Libraries, target: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Run the command. Return its exit status and report."""
    named = ("--libcuda", str(libraries.proxy), "--driver", str(libraries.standin))
    status = main(["proxy", "--backend", "simulated", *named, "--json", str(target), *options])
    return status, json.loads(target.read_text())


def test_programs_in_pairs_compute_the_same_and_are_vaulted(libraries: Libraries, tmp_path: Path) -> None:
    target, text = tmp_path / "report.json", tmp_path / "report.md"
    status, data = evidence(libraries, target, "--pairs", "1", "--markdown", str(text))
    assert status == 0, reports.complaints(data)
    assert data["leftovers"] == []
    ran = [e for e in data["programs"] if not e["not_run"]]
    assert {(e["program"], e["mode"]) for e in ran} >= {("calls", "forward"), ("calls", "vault")}
    assert {e["program"] for e in data["programs"]} == set(ON_SIMULATED)
    for entry in ran:
        assert entry["plain"]["digest"] == entry["proxied"]["digest"] != ""
        assert len(entry["proxied"]["blocks"]) == 1
        assert entry["proxied"]["stats"]["state"] == "active"
        is_vaulted = entry["mode"] == "vault" and entry["program"] not in MAPPED
        assert bool(entry["proxied"]["stats"]["vault_taken"]) == is_vaulted
    assert "| calls | vault | same |" in text.read_text()
    assert "no real GPU" in text.read_text()


def test_all_processes_of_a_program_run_on_the_same_cores_when_asked(
    libraries: Libraries, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--programs", "calls", "--modes", "vault", "--pairs", "1", "--cores")
    status, data = evidence(libraries, tmp_path / "report.json", *asked, "1")
    assert status == 0, reports.complaints(data)
    (entry,) = data["programs"]
    assert [entry[side]["cores"] for side in ("plain", "again", "proxied")] == [1, 1, 1]
    assert "--cores 1" in data["command"]
    assert main(["proxy", "--backend", "simulated", *asked, "1024"]) == 2
    assert "--cores 1024: only" in capsys.readouterr().err


def test_programs_that_could_fail_over_compute_the_same(libraries: Libraries, tmp_path: Path) -> None:
    asked = ("--programs", "calls", "--modes", "vault,guard,keep,exact", "--pairs", "1")
    status, data = evidence(libraries, tmp_path / "report.json", *asked)
    assert status == 0, reports.complaints(data)
    found = {e["mode"]: e["proxied"]["failover"] for e in data["programs"]}
    assert found["vault"] is None
    guarded = {e["mode"] for e in data["programs"] if e["proxied"]["stats"]["host_guard"]}
    assert guarded == {"guard"}
    for mode in ("keep", "exact"):
        assert (found[mode]["mode"], found[mode]["standing"], found[mode]["opaque"]) == (mode, "ready", [])


def test_what_programs_write_is_validated(libraries: Libraries, tmp_path: Path) -> None:
    target, text = tmp_path / "report.json", tmp_path / "report.md"
    asked = [
        "--programs",
        "calls,bindings_hidden",
        "--modes",
        "validate",
        "--pairs",
        "1",
        "--pairs-most",
        "1",
    ]
    status, data = evidence(libraries, target, *asked, "--markdown", str(text))
    assert status == 0, reports.complaints(data)
    calls, hidden = sorted(data["programs"], key=lambda entry: entry["program"] == "bindings_hidden")
    found = hidden["proxied"]["stats"]["validation"]
    steps = found["strays"]
    assert steps > 0 and (found["variables"], found["first"]) == (steps, "follow")
    seen = calls["proxied"]["stats"]["validation"]
    assert seen["operations"] > 100
    assert [seen[name] for name in ("unsure", "strays", "variables", "unread", "first")] == [0, 0, 0, 0, ""]
    assert f"Validation of calls: {seen['operations']} operations" in text.read_text()


def test_what_validation_has_seen_read_another_run_heeds(libraries: Libraries, tmp_path: Path) -> None:
    listed = tmp_path / "reads"
    asked = ["--programs", "bindings_weights", "--pairs", "1", "--reads", str(listed)]
    status, data = evidence(libraries, tmp_path / "validated.json", *asked, "--modes", "validate")
    assert status == 0, reports.complaints(data)
    assert data["command"].endswith("--reads reads")
    assert "weigh" in listed.read_text()
    before = listed.read_bytes()
    status, data = evidence(libraries, tmp_path / "exact.json", *asked, "--modes", "exact")
    assert status == 0, reports.complaints(data)
    (entry,) = data["programs"]
    assert entry["plain"]["digest"] == entry["proxied"]["digest"] != ""
    assert listed.read_bytes() == before


def test_a_report_is_judged_again_from_its_own_numbers(
    libraries: Libraries, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "report.json"
    asked = ("--programs", "calls", "--modes", "vault", "--pairs", "1")
    status, data = evidence(libraries, target, *asked)
    assert status == 0, reports.complaints(data)
    assert main(["check", str(target)]) == 0
    assert main(["render", str(target)]) == 0
    data["programs"][0]["proxied"]["digest"] = "another"
    target.write_text(json.dumps(data))
    capsys.readouterr()
    assert main(["check", str(target)]) == 1
    assert "results differ" in capsys.readouterr().out


def test_killed_programs_leave_nothing(libraries: Libraries, tmp_path: Path) -> None:
    asked = ("--programs", "none", "--deaths", "10", "--at-once", "5")
    status, data = evidence(libraries, tmp_path / "report.json", *asked)
    assert status == 0, reports.complaints(data)
    killed = data["deaths"]
    assert sum(b["deaths"] for b in killed["batches"]) == 10
    assert sum(b["vaulted"] for b in killed["batches"]) >= 5
    assert killed["held_at_end"] == 0


def test_memory_ends_where_it_ends_without_the_proxy(libraries: Libraries, tmp_path: Path) -> None:
    target, text = tmp_path / "report.json", tmp_path / "report.md"
    asked = ("--programs", "none", "--memory-end", "--markdown", str(text))
    status, data = evidence(libraries, target, *asked)
    assert status == 0, reports.complaints(data)
    assert set(data["memory_end"]["sides"]) == {"plain", "forward", "vault"}
    assert "All GPU memory: valid: plain " in text.read_text()
    for share, law in ((0.989, "as much memory"), (0.991, None)):
        sides = data["memory_end"]["sides"]
        sides["vault"]["had"] = int(share * sides["plain"]["had"])
        findings = reports.judged(data)["memory_end"]["findings"]
        assert [f["law"] for f in findings] == ([law] if law else [])


def test_memory_for_a_failover_gives_way_and_comes_back(
    libraries: Libraries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # mpsd offers a standby context again after 30 s. Polling status all that time would take half a core.
    monkeypatch.setattr("faultinject.rig.service.POLL_S", 0.2)
    target, text = tmp_path / "report.json", tmp_path / "report.md"
    asked = ("--programs", "none", "--crowded", "--markdown", str(text))
    status, data = evidence(libraries, target, *asked)
    assert status == 0, reports.complaints(data)
    assert "All GPU memory beside standby contexts: valid: beside programs in mode off " in text.read_text()
    off, exact = (data["crowded"]["sides"][side] for side in ("off", "exact"))
    for changed, law in (
        ({"had": int(0.989 * off["had"])}, "as much memory"),
        ({"had": int(0.991 * off["had"])}, None),
        ({"wrong": [0, 1, 0]}, "others were unharmed"),
        ({"lost": 1}, "others were unharmed"),
        ({"full": exact["before"]}, "others released"),
        ({"again_s": None}, "standbys came back"),
    ):
        data["crowded"]["sides"]["exact"] = exact | changed
        findings = reports.judged(data)["crowded"]["findings"]
        assert [f["law"] for f in findings] == ([law] if law else [])


SUITE = """
import ctypes, os, unittest
from pathlib import Path

class Steady(unittest.TestCase):
    def test_passes(self): self.assertEqual(ctypes.CDLL("libcuda.so.1").cuInit(0), 0)
    def test_fails(self): self.fail("always")
    @unittest.skip("always")
    def test_skipped(self): pass

class Others(unittest.TestCase):
    def test_sees_the_proxy(self):
        ctypes.CDLL("libcuda.so.1")
        self.assertNotIn("mpsd-libcuda", Path("/proc/self/maps").read_text())
"""


def suite(libraries: Libraries, place: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Sequence[Any]:
    """A small package of tests in the place of numba-cuda's."""
    package = place / "small_suite"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "test_small.py").write_text(SUITE)
    monkeypatch.setenv("PYTHONPATH", str(place))
    # The suite has workers of its own, where these tests run in several processes, too.
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.syspath_prepend(str(place))
    asked = ("--programs", "none", "--numba", "--numba-suite", "small_suite", "--numba-jobs", "1")
    try:
        return evidence(libraries, place / "report.json", *asked, *options)
    finally:
        sys.modules.pop("small_suite", None)


def test_a_suite_with_a_test_that_changes_is_invalid(
    libraries: Libraries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, data = suite(libraries, tmp_path, monkeypatch)
    found = data["numba"]
    assert (status, found["verdict"]) == (1, "invalid"), found
    (changed,) = found["differing"]
    assert changed.endswith("::Others::test_sees_the_proxy")
    # Once with all other tests, and twice alone.
    assert found["differing"][changed] == {"plain": ["passed"] * 3, "proxied": ["failed"] * 3}
    assert sorted(found["plain"]["outcomes"].values()) == ["failed", "passed", "passed", "skipped"]


def test_a_suite_whose_outcomes_stay_is_valid(
    libraries: Libraries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, data = suite(libraries, tmp_path, monkeypatch, "--numba-filter", "Steady")
    assert (status, data["numba"]["verdict"]) == (0, "valid"), data["numba"]
    assert sorted(data["numba"]["proxied"]["outcomes"].values()) == ["failed", "passed", "skipped"]
