"""A domain and the budget of descriptors."""

from __future__ import annotations

import asyncio
from pathlib import Path

from mpsd.config.layout import Layout
from mpsd.config.schema import Limits
from mpsd.core import events as ev
from mpsd.limits.book import LimitBook
from mpsd.mps.domains import Callbacks, RunningDomains
from mpsd.os.descriptors import DescriptorBudget, Purpose
from mpsd.os.quietperiod import QuietPeriod


def start(tmp_path: Path, binary: str, budget: DescriptorBudget) -> list[ev.Event]:
    """Start a domain with this control binary; return the events."""
    posted: list[ev.Event] = []
    layout = Layout(tmp_path / "r", tmp_path / "l", tmp_path / "s")
    for directory in (layout.run_dir, layout.log_dir, layout.state_dir):
        directory.mkdir()

    async def run() -> None:
        unused = [lambda *_: None] * 4
        callbacks = Callbacks(posted.append, *unused, lambda _: False, lambda _: asyncio.sleep(0), bool)
        domains = RunningDomains(
            binary,
            {},
            layout,
            LimitBook(Limits(), ()),
            callbacks,
            QuietPeriod(),
            start_deadline_s=5.0,
            budget=budget,
        )
        domains.start("d1", ("GPU-0",), 0)
        await domains.idle()
        await domains.close()

    asyncio.run(asyncio.wait_for(run(), 20.0))
    return posted


def test_a_domain_without_descriptors_does_not_start_and_says_why(tmp_path: Path) -> None:
    (failed,) = start(tmp_path, "true", DescriptorBudget(7, reserve=0))
    assert isinstance(failed, ev.DomainStartFailed)
    assert "no descriptor left for a domain (raise LimitNOFILE=" in failed.reason


def test_a_domain_that_fails_to_start_leaves_the_budget_whole(tmp_path: Path) -> None:
    budget = DescriptorBudget(8, reserve=0)
    (failed,) = start(tmp_path, "/bin/false", budget)
    assert isinstance(failed, ev.DomainStartFailed) and "descriptor" not in failed.reason
    assert budget.left == 8 and not budget.taken(Purpose.DOMAIN)
