"""Programs that fail over and end: the run on the simulated GPU, the verdicts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from faultinject.campaigns import check
from faultinject.campaigns.ends import command
from tests.support.libcudas import session_libraries

pytestmark = pytest.mark.timeout(300)


def test_programs_that_failed_over_leave_nothing_behind(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    libraries = session_libraries(tmp_path_factory).for_harness()
    args = argparse.Namespace(backend="simulated", sizes=[1, 4], moves=2, long=11, deadline=200.0, out=None)
    args.libcuda, args.driver = libraries.proxy, libraries.driver
    partial: list[dict[str, Any]] = []
    found = command.run(args, partial.append)
    (ended,), (long,) = found["ended"], found["long"]
    assert (ended["moves"], ended["lost"], ended["wrong"], ended["problem"]) == (2, 0, 0, "")
    # The time in which memory comes back is judged on a GPU alone.
    assert ended["back_s"] is not None
    assert command.judge_long(long) == "valid"
    assert [len(made["long"]) for made in partial] == [0]
    path = tmp_path / "ends.json"
    path.write_text(json.dumps(found))
    assert len(check.verdict_lines(path)[0]) == 3
    assert "| 1, 4 | 2 |" in check.render(path)


def ended(**changes: Any) -> dict[str, Any]:
    row = {"mib": [1024], "moves": 4, "before": 900.0, "left": 0.0, "back_s": 0.4, "lost": 0, "wrong": 0}
    return {**row, "problem": "", **changes}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (ended(), "valid"),
        (ended(back_s=1.4), "invalid: the memory was back after 1.4 s"),
        (ended(back_s=None, left=10240.0), "invalid: 10240 MiB stayed in use"),
        (ended(lost=1), "invalid: 1 programs were lost"),
        (ended(wrong=2), "invalid: 2 programs saw wrong results"),
        (ended(moves=0), "invalid: at no fault all programs failed over"),
        (ended(problem="no fail-over"), "invalid: no fail-over"),
    ],
)
def test_ends_are_judged_by_what_stayed(row: dict[str, Any], says: str) -> None:
    assert command.judge_ended(row) == says


def long(count: int = 50, **last: Any) -> dict[str, Any]:
    first = {"moves": 1, "used": 2000.0, "descriptors": 60, "threads": 5, "daemon_descriptors": 80}
    first["domains"] = 3
    samples = [{**first, "moves": number + 1} for number in range(count)]
    samples[-1] |= last
    return {"moves": count, "samples": samples, "lost": 0, "wrong": 0, "problem": ""}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (long(), "valid"),
        (long(descriptors=62), "valid"),
        (long(descriptors=63), "invalid: descriptors grew by 3 after the first 10 fail-overs"),
        (long(used=2100.0), "invalid: used grew by 100 after the first 10 fail-overs"),
        (long(10), "invalid: 10 fail-overs say nothing of growth"),
        # A further domain takes descriptors and memory.
        (long(domains=4, daemon_descriptors=91, used=2300.0), "valid"),
        (long(11, domains=4), "invalid: after 10 fail-overs mpsd always had more domains than before"),
    ],
)
def test_a_long_life_is_judged_by_what_grew(row: dict[str, Any], says: str) -> None:
    assert command.judge_long(row) == says
