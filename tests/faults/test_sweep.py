"""mpsd dies before effect N, on the simulated GPU, for every N until no effect is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from faultinject.sweep import SweepPlan, effects_to_try, run
from faultinject.verdict import Verdict


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_else_dies_whenever_mpsd_does(tmp_path: Path) -> None:
    plan = SweepPlan("simulated", seed=11, jobs=min(4, os.cpu_count() or 1), out=tmp_path)
    outcomes = run(plan, "simulated")
    bad = {
        o.effect: [f"{f.law}: {f.text}" for f in o.findings if f.verdict is not Verdict.VALID]
        for o in outcomes
        if o.verdict is not Verdict.VALID
    }
    assert not bad
    died = [o.effect for o in outcomes if o.died]
    assert len(died) > 20
    assert not outcomes[-1].died


def test_a_sample_is_drawn_by_the_seed() -> None:
    plan = SweepPlan("nvidia", seed=4, sample=20)
    first = effects_to_try(plan, 100)
    assert first == effects_to_try(plan, 100)
    assert len(set(first)) == 20 and set(first) <= set(range(1, 101))
    assert effects_to_try(SweepPlan("nvidia"), 3) == [1, 2, 3]
