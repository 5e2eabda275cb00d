"""Requests to a server are answered through faults, under a whole mpsd, on the simulated GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from faultinject.__main__ import main
from faultinject.failover.command import main_settings
from faultinject.history import History
from faultinject.node import open_simulated_node
from faultinject.proxy.library import Libraries, find_libraries
from faultinject.rig import Rig
from faultinject.serving import toy
from faultinject.serving.batch import WAVE, wave
from faultinject.serving.rounds import Serving

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    return find_libraries("simulated", None, None, tmp_path_factory.mktemp("libcuda"))


def test_all_is_answered_moved_and_restarted_and_the_report_is_read_again(
    libraries: Libraries, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    options = ["--libcuda", str(libraries.proxy), "--driver", str(libraries.driver), "--json", str(path)]
    assert main(["serving", "--kinds", "trap,store", "--faults", "1", *options]) == 0
    found = json.loads(path.read_text())
    assert {mode: [f["kind"] for f in faults] for mode, faults in found["served"].items()} == {
        mode: ["trap", "store"] for mode in ("moved", "restarted")
    }
    assert found["undisturbed"]["requests"] == 2 * WAVE
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


def test_wrong_answers_are_seen(libraries: Libraries, tmp_path: Path) -> None:
    """The right tokens are known from arithmetic here, and those of one request are said to be others."""
    answers = {each.number: toy.answer(each.prompt, each.tokens) for each in wave(1, 0)}
    answers[3] = [token + 1 for token in answers[3]]
    node = open_simulated_node(tmp_path)
    try:
        with History() as history, Rig(node, "mpsd", history, settings=main_settings(libraries)) as rig:
            serving = Serving(rig, libraries, lambda _: None, "restarted", 1, answers)
            serving.start()
            faults = serving.serve("server_death", 1, 90.0)
            serving.end()
    finally:
        node.close()
    assert [len(faults), faults[0].problem, faults[0].lost] == [1, "", 0]
    assert faults[0].wrong >= len(answers[3])
    assert rig.left == []
