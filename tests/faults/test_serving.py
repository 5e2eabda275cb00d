"""A server answers requests through faults, under a whole mpsd, on the simulated GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from faultinject.__main__ import main
from faultinject.campaigns.failover.command import main_settings
from faultinject.campaigns.serving import reports
from faultinject.campaigns.serving.rounds import Serving
from faultinject.programs.llm import toy
from faultinject.programs.llm.batch import WAVE, wave
from faultinject.registry.history import History
from faultinject.rig.libraries import Libraries
from faultinject.rig.node import open_simulated_node
from faultinject.rig.rig import Rig
from tests.support.libcudas import session_libraries

pytestmark = pytest.mark.timeout(300)
DEADLINE_S = 90.0


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    return session_libraries(tmp_path_factory).for_harness()


def test_all_is_answered_moved_and_restarted_and_the_report_is_read_again(
    libraries: Libraries, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    options = ["--libcuda", str(libraries.proxy), "--driver", str(libraries.driver), "--json", str(path)]
    assert main(["serving", "--kinds", "store", "--faults", "1", *options]) == 0
    found = json.loads(path.read_text())
    assert {mode: [f["kind"] for f in faults] for mode, faults in found["served"].items()} == {
        mode: ["store"] for mode in ("moved", "restarted")
    }
    assert found["undisturbed"]["requests"] == WAVE
    for each in found["served"]["moved"]:
        assert each["in_flight"] > 0 and each["completed"] == each["in_flight"] + each["waiting"]
        assert each["longest"] > 0 and [each["again"], each["twice"], each["told"]] == [None, 0, 0]
        assert [fate["outcome"] for fate in each["record"]["clients"]] == ["moved"]
    for each in found["served"]["restarted"]:
        assert each["starts"] > 0 and each["twice"] > 0
        assert 0 < each["ended"] < each["again"]
    assert not found["leftovers"]
    capsys.readouterr()
    assert main(["check", str(path)]) == 0
    assert main(["render", str(path)]) == 0
    said = capsys.readouterr().out
    assert "these times are no GPU's" in said and "| restarted | store | 1 |" in said


def answers(waves: int) -> dict[int, list[int]]:
    """Return the right tokens of each request, by arithmetic."""
    asked = [each for number in range(waves) for each in wave(1, number)]
    return {each.number: toy.expected_tokens(each.prompt, each.tokens) for each in asked}


@contextmanager
def rigged(libraries: Libraries, base: Path, failover: str) -> Iterator[Rig]:
    node = open_simulated_node(base)
    try:
        settings = main_settings(libraries, failover)
        with History() as history, Rig(node, "mpsd", history, settings=settings) as rig:
            yield rig
        assert rig.leftovers == []
    finally:
        node.close()


def test_wrong_answers_are_seen(libraries: Libraries, tmp_path: Path) -> None:
    """One request has other tokens than the expected ones."""
    right = answers(1)
    right[3] = [token + 1 for token in right[3]]
    with rigged(libraries, tmp_path, "exact") as rig:
        serving = Serving(rig, libraries, lambda _: None, "restarted", 1, right)
        serving.start()
        faults = serving.serve("server_death", 1, DEADLINE_S)
        serving.end()
    assert [len(faults), faults[0].problem, faults[0].lost] == [1, "", 0]
    assert faults[0].wrong >= len(right[3])


def test_a_server_that_is_told_of_an_error_is_lost_and_that_is_said(
    libraries: Libraries, tmp_path: Path
) -> None:
    """In mode keep a server is lost if a fault finds its work in flight, which one of several faults does."""
    most = 6
    with rigged(libraries, tmp_path, "keep") as rig:
        serving = Serving(rig, libraries, lambda _: None, "moved", 1, answers(most))
        serving.start()
        faults = serving.serve("trap", most, DEADLINE_S)
        serving.end()
    assert "the server ended (CUDA error 719" in faults[-1].problem
    assert faults[-1].told == 1 and faults[-1].lost > 0
    assert reports.judge("moved", [asdict(fault) for fault in faults]).startswith("invalid")
