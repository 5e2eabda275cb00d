"""mpsd dies before effect N, on the simulated GPU, until no effect is left; every N with MPSD_TEST_LONG."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from faultinject.campaigns.sweep import (
    Outcome,
    SweepPlan,
    effects_to_try,
    run_one,
)
from faultinject.registry.verdicts import Verdict
from tests.support.long import of

SEED = 11
STEP = of(1, 12)
"""Every N takes minutes; without MPSD_TEST_LONG only every twelfth is tried."""
BLOCK = 4 * STEP
BLOCKS = max(30 // STEP, 4)
"""More effects than mpsd performs for the script: the last blocks find no effect left."""


@dataclass
class Progress:
    """Results of the blocks so far. `over`: mpsd did not reach some N any more."""

    deaths: int = 0
    over: bool = False


@pytest.fixture(scope="module")
def progress() -> Progress:
    return Progress()


def complaints(outcomes: Sequence[Outcome]) -> dict[int, list[str]]:
    return {
        o.effect: [f"{f.law}: {f.text}" for f in o.findings if f.verdict is not Verdict.VALID]
        for o in outcomes
        if o.verdict is not Verdict.VALID
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(1, BLOCK * BLOCKS, BLOCK))
def test_nothing_else_dies_whenever_mpsd_does(first: int, progress: Progress, tmp_path: Path) -> None:
    if progress.over:
        pytest.skip("mpsd performs fewer effects in the whole script")
    plan = SweepPlan("simulated", seed=SEED, survivors=1, out=tmp_path)
    with ThreadPoolExecutor(max_workers=min(4, len(os.sched_getaffinity(0)))) as pool:
        outcomes = list(pool.map(lambda n: run_one(plan, n, "simulated"), range(first, first + BLOCK, STEP)))
    assert not complaints(outcomes)
    progress.deaths += sum(o.died for o in outcomes)
    progress.over = not any(o.died for o in outcomes)


@pytest.mark.slow
def test_no_effect_was_left(progress: Progress) -> None:
    if not progress.deaths:
        pytest.skip("the sweep itself was not chosen")
    assert progress.over
    assert progress.deaths * STEP > 20


def test_a_sample_is_drawn_by_the_seed() -> None:
    plan = SweepPlan("nvidia", seed=4, sample=20)
    first = effects_to_try(plan, 100)
    assert first == effects_to_try(plan, 100)
    assert len(set(first)) == 20 and set(first) <= set(range(1, 101))
    assert effects_to_try(SweepPlan("nvidia"), 3) == [1, 2, 3]
