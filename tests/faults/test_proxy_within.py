"""Rounds within proxied processes, on the stand-in driver: blocks of both kinds, and the same results."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from faultinject.__main__ import main
from faultinject.campaigns.proxy import reports
from faultinject.programs.pairing.rounds import BLOCKS
from tests.support.libcudas import Libraries, session_libraries

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc: the libcuda proxy cannot be built here"),
]
ROUNDS = 3


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    return session_libraries(tmp_path_factory)


def test_calls_past_the_proxy_and_through_it_compute_the_same(
    libraries: Libraries, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, text = tmp_path / "report.json", tmp_path / "report.md"
    named = ("--libcuda", str(libraries.proxy), "--driver", str(libraries.standin))
    asked = ("--programs", "calls", "--modes", "forward,vault,keep,exact", "--within", "--pairs", str(ROUNDS))
    files = ("--json", str(target), "--markdown", str(text))
    status = main(["proxy", "--backend", "simulated", *named, *asked, *files])
    data = json.loads(target.read_text())
    assert status == 0, reports.complaints(data)
    assert data["leftovers"] == [] and "--within" in data["command"].split()
    functions = {}
    for entry in data["programs"]:
        # The digest covers all steps: runs without the proxy have done as many.
        assert entry["plain"]["digest"] == entry["again"]["digest"] == entry["proxied"]["digest"] != ""
        assert [len(entry["within"][name]) for name in BLOCKS] == [ROUNDS] * 3
        assert all(seconds > 0 for name in BLOCKS for seconds in entry["within"][name])
        assert entry["proxied"]["blocks"] == entry["within"]["through"]
        assert len(entry["plain"]["blocks"]) == len(entry["again"]["blocks"]) == ROUNDS
        assert set(entry["figures"]) >= {"within_ratio", "within_noise"}
        functions[entry["mode"]] = entry["within"]["functions"]
    assert functions["forward"] == 0 < functions["vault"] < functions["keep"] == functions["exact"]
    for mode in ("keep", "exact"):
        (standing,) = [e["proxied"]["failover"] for e in data["programs"] if e["mode"] == mode]
        assert (standing["standing"], standing["opaque"], standing["unsure"]) == ("ready", [], [])
    assert "noise within" in text.read_text()
    capsys.readouterr()
    assert main(["check", str(target)]) == 0
    capsys.readouterr()
    assert main(["render", str(target)]) == 0
    assert capsys.readouterr().out == text.read_text()


def test_a_program_without_a_configuration_is_timed_under_a_daemon_of_its_own(
    libraries: Libraries, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "report.json"
    named = ("--libcuda", str(libraries.proxy), "--driver", str(libraries.standin))
    asked = ("--programs", "calls", "--within", "--pairs", str(ROUNDS), "--json", str(target))
    status = main(["proxy", "--backend", "simulated", "--modes", "auto", *named, *asked])
    (entry,) = json.loads(target.read_text())["programs"]
    assert status == 0, entry["findings"]
    assert entry["proxied"]["failover"]["level"] == "failover"
    assert entry["plain"]["digest"] == entry["proxied"]["digest"] != ""
    assert "calls: status called it failover; a step took" in capsys.readouterr().out
    assert main(["proxy", "--backend", "simulated", "--modes", "auto,exact", *named]) == 2
    assert "run mode auto by itself" in capsys.readouterr().err
