"""Budgets of mode exact under a running daemon, on the simulated GPU: limits, costs, standby contexts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from mpsd.api.protectionview import READS
from mpsd.base.conditions import Code
from mpsd.core.failover.budgets import FIRST_SHARE, POOL_SHARE
from mpsd.core.state import TIME_BUDGET
from mpsd.ctl import failovertext
from mpsd.ctl.statustext import status as status_text
from mpsd.ctl.style import Style
from mpsd.failover.messages import HEARS_BUDGETS, HEARS_EXPOSED
from tests.integration.test_client_protection import until_protected
from tests.integration.test_daemon_failover import SETTINGS, failovers, said, socket_of, until_outcome
from tests.support.conditioning import rows_of
from tests.support.site import Program, Site

AUTO = {**SETTINGS, "protect": '"auto"'}
MIB = 1 << 20
TOO_LARGE = f"'LEAVES', values=(2, {700 * MIB}, {300 * MIB}), text='one step saves 700 MiB'"
TOO_SLOW = "'LEAVES', values=(1, 58, 100, 30, 1), text='saving adds 58 % to an epoch'"
LARGE, SLOW = "needs 700 MiB, has 300", "saving would slow it by 58 %, the budget is 3 %"


@pytest.fixture
def site() -> Iterator[Site]:
    with Site(**AUTO) as started:
        yield started.start()


def joined(site: Site) -> Program:
    """Start a participant in mode exact that keeps the budgets and has read its first limit."""
    program = site.join()
    hello = said(program, f"failover({socket_of(site)!r}, 'exact', True)")
    assert hello[:3] == ["WELCOME", 0, "exact"]
    assert said(program, "fo.values")[4:] == [HEARS_BUDGETS | HEARS_EXPOSED, TIME_BUDGET]
    return program


def ready(site: Site) -> Program:
    program = joined(site)
    assert said(program, "fo.prepare()")[0] == "STANDBY"
    until_protected(site, program, "failover", "")
    return program


def test_the_operator_who_asks_for_failover_sets_no_limit_of_time() -> None:
    with Site(**SETTINGS) as started:
        program = started.start().join()
        said(program, f"failover({socket_of(started)!r}, 'exact', True)")
        assert said(program, "fo.values")[4:] == [HEARS_BUDGETS | HEARS_EXPOSED, 0]


def pool(site: Site) -> int:
    return int(site.status()["gpus"][0]["memory_total_bytes"]) // POOL_SHARE


def row(status: Mapping[str, Any], program: Program) -> Mapping[str, Any]:
    return next(c for c in status["clients"] if c["pid"] == program.pid and c["failover"]["here"])


def wants(program: Program, held: int, wanted: int) -> int:
    said(program, f"fo.say('HOLDS', values=({held}, {wanted}))")
    limit = said(program, "fo.limit()")
    assert isinstance(limit, int)
    return limit


def test_a_program_with_work_that_cannot_be_rolled_back_is_shown_at_guard(site: Site) -> None:
    program = ready(site)
    said(program, "fo.say('EXPOSED', values=(1,), text='a wait for memory')")
    until_protected(site, program, "guard", "its work in flight cannot be rolled back: a wait for memory")
    said(program, "fo.say('EXPOSED')")
    until_protected(site, program, "failover", "")


def test_limits_are_granted_moved_and_given_again_after_a_restart(site: Site) -> None:
    whole = pool(site)
    first, second = joined(site), joined(site)
    assert [said(p, "fo.limit()") for p in (first, second)] == [whole // FIRST_SHARE] * 2
    assert wants(first, 0, whole // 2) == whole // 2
    said(first, f"fo.say('HOLDS', values=({whole // 4},))")
    site.until(lambda s: row(s, first)["failover"]["snapshot_bytes"] == whole // 4, "it holds a quarter")
    assert wants(second, 0, whole // 2 + MIB) == whole // 2 + MIB
    assert said(first, "fo.limit()") == whole // 2 - MIB
    # A raise leaves a first limit for the next participant.
    reserve = whole // FIRST_SHARE
    rest = whole - whole // 4 - reserve
    assert wants(second, 0, whole) == rest and said(first, "fo.limit()") == whole // 4 + reserve
    assert wants(second, 0, whole) == rest, "the same limit refuses"
    site.kill()
    site.start()
    for program, limit in ((second, rest), (first, whole // 4 + reserve)):
        assert said(program, "fo.hello('exact')")[0] == "WELCOME"
        assert said(program, "fo.limit()") == limit
    said(first, "fo.say('HOLDS', values=(4096,))")
    assert wants(second, 0, whole) == whole - 4096 - reserve


def test_costs_are_shown(site: Site) -> None:
    program = ready(site)
    said(program, f"fo.say('HOLDS', values=({2 * MIB},))")
    said(program, "fo.say('COST', values=(1048576, 12, 1000))")
    status = site.until(lambda s: row(s, program)["protected"]["cost_share"] is not None, "the cost is known")
    assert row(status, program)["protected"]["cost_bytes"] == 2 * MIB + 4096
    shown = row(status, program)["failover"]
    assert (shown["saved_bytes"], shown["saving_share"]) == (MIB, 0.012)
    lines = status_text(status, Style(), verbose=True)
    assert any("  2 MiB, 1.2 %  " in line for line in lines)
    assert any("snapshots 2 MiB of " in line for line in lines)


def test_a_program_that_left_stays_at_guard_over_a_restart_and_a_fault(site: Site) -> None:
    large, slow, offender = ready(site), ready(site), site.join()
    said(large, f"fo.say({TOO_LARGE})")
    said(slow, f"fo.say({TOO_SLOW})")
    for program in (large, slow):
        assert said(program, "fo.hear()")[0] == "STAND_DOWN"
        said(program, "fo.drop()")
    site.until(lambda s: rows_of(s, Code.SNAPSHOT_BUDGET), "both have left")
    site.kill()
    site.start()
    site.attached(large, slow, offender)
    until_left(site, large, slow)
    for program in (large, slow):
        assert said(program, "fo.hello('exact')")[0] == "WELCOME"
    status = until_left(site, large, slow)
    (condition,) = rows_of(status, Code.SNAPSHOT_BUDGET)
    assert "(memory: 1, time: 1)" in condition["text"] and not condition["degrades"]
    assert [c["ok"] for c in site.ask(lambda c: c.doctor()) if c["name"] == Code.SNAPSHOT_BUDGET] == [None]
    detail = "\n".join(status_text(status, Style(), verbose=True))
    assert READS in detail and "not protected (left fail-over, time budget)" in detail
    offender.fault()
    record = until_outcome(site, {large.pid: "not told", slow.pid: "not told"})
    assert {c["left"] for c in record["clients"]} == {"memory", "time"}
    text = "\n".join(failovertext.records(failovers(site)))
    assert LARGE in text and SLOW in text
    fault = site.until_fault("mmu-invalid-address")
    assert {large.pid, slow.pid} <= set(fault["victims"])
    assert "1 for the memory budget and 1 for the time budget" in fault["action"]


def until_left(site: Site, large: Program, slow: Program) -> Mapping[str, Any]:
    """Wait until both are at guard, for the budget of each."""
    wanted = [("guard", f"snapshot budget: {LARGE}"), ("guard", SLOW)]

    def levels(status: Mapping[str, Any]) -> list[tuple[str, str]]:
        shown = [row(status, program)["protected"] for program in (large, slow)]
        return [(view["level"], view["why"]) for view in shown]

    return site.until(lambda s: levels(s) == wanted, "both are at guard")


def test_a_gpu_has_no_more_standby_contexts_than_configured() -> None:
    with Site(**AUTO, failover__standby_contexts="1") as site:
        site.start()
        first, second = ready(site), joined(site)
        status = until_protected(site, second, "guard", "GPU 0 already has its limit of 1 standby context")
        (condition,) = rows_of(status, Code.STANDBY_CAP)
        assert condition["text"].startswith("1 client(s) wait for fail-over: GPU-")
        offered = site.ask(lambda c: c.call("env"))["protection"]
        assert (offered["level"], offered["why"]) == (
            "guard",
            "GPU 0 already has its limit of 1 standby context",
        )
        first.close()
        assert said(second, "fo.prepare()")[0] == "STANDBY"
        until_protected(site, second, "failover", "")
        assert not rows_of(site.status(), Code.STANDBY_CAP)


def test_doctor_and_status_say_that_the_stall_is_not_measured(site: Site) -> None:
    ready(site)
    (check,) = (c for c in site.ask(lambda c: c.doctor()) if c["name"] == "stall of GPU 0")
    finding = "not measured at an SM exception, with 1 client context(s) and 1 standby context(s)"
    assert check["finding"] == finding
    assert site.status()["gpus"][0]["sm_exception_stall_ms"] is None
