"""The verdict on programs without and with the proxy, from the numbers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from faultinject.campaigns.proxy.judge import (
    MEMORY_BAR,
    MIN_BEATS,
    STEP_BAR,
    Pair,
    Side,
    are_settled,
    block_time,
    check,
    ratio,
    verdict,
)
from faultinject.registry.verdicts import Verdict

ACTIVE: Mapping[str, Any] = {
    "state": "active",
    "reason": "",
    "vault_taken": 7,
    "vault_refused": 0,
    "vault_lost": 0,
    "vault_bytes": 1 << 20,
}
GIB = 1 << 30
BLOCKS = (0.010, 0.0101, 0.0099, 0.010, 0.0100)
PLAIN = Side("abc", GIB, BLOCKS)
PROXIED = Side("abc", GIB, BLOCKS, ACTIVE)
PAIR = Pair("vault", PLAIN, PLAIN, PROXIED)


def slower(side: Side, factor: float) -> Side:
    return replace(side, blocks=tuple(b * factor for b in side.blocks))


def said(pair: Pair, *, bars: bool = True) -> tuple[Verdict, list[str]]:
    """Return the verdict, and the laws that were not valid."""
    findings = check(pair, bars=bars)
    return verdict(findings), [f.law for f in findings if f.verdict is not Verdict.VALID]


def test_a_guard_that_covers_nothing_is_no_guard() -> None:
    guarded = replace(PROXIED, stats={**ACTIVE, "host_guard": 1 << 20})
    assert said(replace(PAIR, mode="guard", proxied=guarded)) == (Verdict.VALID, [])
    bare = replace(PROXIED, stats={**ACTIVE, "host_guard": 0})
    assert said(replace(PAIR, mode="guard", proxied=bare)) == (Verdict.INVALID, ["host memory was guarded"])


def test_the_vault_may_have_nothing_of_a_program_that_maps_its_memory_itself() -> None:
    pair = replace(PAIR, proxied=replace(PROXIED, stats={**ACTIVE, "vault_taken": 0}))
    assert said(replace(pair, mapped=True)) == (Verdict.VALID, [])
    lost = replace(PROXIED, stats={**ACTIVE, "vault_lost": 1})
    assert said(replace(PAIR, proxied=lost, mapped=True)) == (Verdict.INVALID, ["memory was vaulted"])


SEEN = {"operations": 900, "unsure": 3, "strays": 0, "variables": 0, "unread": 0, "first": ""}


@pytest.mark.parametrize(
    ("seen", "said_of_it"),
    [
        ({}, (Verdict.VALID, [])),
        ({"operations": 0}, (Verdict.INVALID, ["writes are covered"])),
        ({"strays": 1, "first": "follow"}, (Verdict.INVALID, ["writes are covered"])),
        ({"variables": 1, "first": "count: n"}, (Verdict.INVALID, ["writes are covered"])),
        ({"unread": 1}, (Verdict.UNKNOWN, ["writes are covered"])),
    ],
)
def test_what_validation_has_seen_is_judged(
    seen: Mapping[str, Any], said_of_it: tuple[Verdict, list[str]]
) -> None:
    stats = {**ACTIVE, "validation": {**SEEN, **seen}}
    # This holds however long it took, and whatever memory it needed.
    slow = replace(slower(PROXIED, 50), memory=GIB * 2, stats=stats)
    assert said(replace(PAIR, mode="validate", proxied=slow)) == said_of_it


def test_validation_that_ended_before_the_program_is_no_validation() -> None:
    stats = {**ACTIVE, "validation": SEEN}
    for opaque, expected in (([], Verdict.VALID), (["cuMemAllocManaged"], Verdict.INVALID)):
        standing = {"mode": "exact", "standing": "ready", "reason": "", "opaque": opaque, "unsure": []}
        ended = replace(PROXIED, stats=stats, failover=standing)
        assert said(replace(PAIR, mode="validate", proxied=ended))[0] is expected


@pytest.mark.parametrize(("strays", "variables"), [(0, 0), (0, 2), (2, 0), (2, 2)])
def test_validation_has_to_find_both_writes_of_a_program_that_hides_them(strays: int, variables: int) -> None:
    stats = {**ACTIVE, "validation": {**SEEN, "strays": strays, "variables": variables}}
    pair = replace(PAIR, mode="validate", proxied=replace(PROXIED, stats=stats), hidden=True)
    blind = not (strays and variables)
    assert said(pair) == ((Verdict.INVALID, ["writes are covered"]) if blind else (Verdict.VALID, []))


def test_a_pair_that_is_the_same_is_valid() -> None:
    assert said(PAIR) == (Verdict.VALID, [])


@pytest.mark.parametrize(
    ("proxied", "law"),
    [
        pytest.param(replace(PROXIED, digest="abd"), "results same", id="a changed digest"),
        pytest.param(slower(PROXIED, 1.015), "step time same", id="1.5 % slower"),
        pytest.param(replace(PROXIED, memory=GIB * 103 // 100), "memory same", id="3 % more memory"),
        pytest.param(
            replace(PROXIED, stats={**ACTIVE, "state": "aside", "reason": "another libcuda"}),
            "was proxied",
            id="a proxy that stepped aside",
        ),
        pytest.param(replace(PROXIED, stats=None), "was proxied", id="no proxy"),
        pytest.param(
            replace(PROXIED, stats={**ACTIVE, "vault_taken": 0}),
            "memory was vaulted",
            id="nothing in the vault",
        ),
        pytest.param(
            replace(PROXIED, stats={**ACTIVE, "vault_lost": 1}), "memory was vaulted", id="a piece was lost"
        ),
        pytest.param(Side(failure="it ended with status 1"), "came to an end", id="it ended"),
    ],
)
def test_what_the_proxy_must_not_do_is_invalid(proxied: Side, law: str) -> None:
    assert said(replace(PAIR, proxied=proxied)) == (Verdict.INVALID, [law])


def test_the_bounds_themselves_are_allowed_and_faster_is_no_fault() -> None:
    near = replace(slower(PROXIED, 1 + STEP_BAR * 0.99), memory=int(GIB * (1 + MEMORY_BAR * 0.99)))
    assert said(replace(PAIR, proxied=near)) == (Verdict.VALID, [])
    less = replace(slower(PROXIED, 0.8), memory=GIB // 2)
    assert said(replace(PAIR, proxied=less)) == (Verdict.VALID, [])


def test_noise_above_a_bound_leaves_it_unknown() -> None:
    for again, law in (
        (slower(PLAIN, 1.02), "step time same"),
        (replace(PLAIN, memory=GIB * 103 // 100), "memory same"),
    ):
        assert said(replace(PAIR, again=again)) == (Verdict.UNKNOWN, [law])
        # The noise does not make the proxy slow either.
        slow = replace(slower(PROXIED, 1.03), memory=GIB * 104 // 100)
        assert law not in [
            f.law
            for f in check(replace(PAIR, again=again, proxied=slow), bars=True)
            if f.verdict == "invalid"
        ]


def test_a_program_that_is_not_reproducible_or_fails_by_itself_proves_nothing() -> None:
    assert said(replace(PAIR, again=replace(PLAIN, digest="xyz"))) == (Verdict.UNKNOWN, ["results same"])
    broken = replace(PAIR, plain=Side(failure="no memory"))
    assert said(broken) == (Verdict.UNKNOWN, ["came to an end"])


def test_forwarding_needs_no_vault() -> None:
    idle = replace(PROXIED, stats={**ACTIVE, "vault_taken": 0, "vault_bytes": 0})
    assert said(replace(PAIR, mode="forward", proxied=idle)) == (Verdict.VALID, [])


def test_time_is_not_asked_where_it_is_no_bound_or_not_the_programs_own() -> None:
    slow = replace(PAIR, proxied=replace(slower(PROXIED, 2.0), memory=2 * GIB))
    assert said(slow, bars=False) == (Verdict.VALID, [])
    assert said(replace(slow, untimed="it waits for others")) == (Verdict.INVALID, ["memory same"])


def test_too_few_rounds_are_unknown() -> None:
    few = replace(PAIR, proxied=replace(PROXIED, blocks=BLOCKS[:2]))
    assert said(few) == (Verdict.UNKNOWN, ["step time same"])


def test_a_block_counts_with_its_beats_that_nothing_has_disturbed() -> None:
    quiet = [0.005] * MIN_BEATS
    assert block_time([0.16, 0.3, 0.2], []) == 0.2
    assert block_time([0.16], quiet[1:]) == 0.16
    assert block_time([0.16], quiet) == 0.005
    # This holds however long the other beats took.
    assert block_time([0.16], [*quiet, *[0.05] * 100]) == 0.005
    assert block_time([0.16], [*quiet, *[0.05] * 1000]) == 0.05


def test_a_ratio_is_of_the_same_round() -> None:
    # The machine gets slower all the time, but ratios of neighbours in time do not show it.
    plain = tuple(0.010 * 1.1**i for i in range(8))
    found = ratio(tuple(b * 1.002 for b in plain), plain)
    assert found is not None
    assert found.low == found.median == found.high == pytest.approx(1.002)


READY: Mapping[str, Any] = {"mode": "exact", "standing": "ready", "reason": "", "opaque": [], "unsure": []}


@pytest.mark.parametrize(
    ("failover", "bar", "found"),
    [
        (READY, 0.05, []),
        (READY, STEP_BAR, ["step time same"]),
        (None, 0.05, ["could fail over"]),
        ({**READY, "standing": "opaque", "opaque": ["cuIpcOpenMemHandle"]}, 0.05, ["could fail over"]),
        ({**READY, "mode": "keep"}, 0.05, ["could fail over"]),
    ],
)
def test_a_program_with_a_standby_may_take_more_memory_and_must_be_ready(
    failover: Mapping[str, Any] | None, bar: float, found: list[str]
) -> None:
    proxied = replace(slower(PROXIED, 1.03), memory=2 * GIB, failover=failover)
    assert said(Pair("exact", PLAIN, PLAIN, proxied, step_bar=bar))[1] == found


def test_rounds_are_enough_when_the_median_can_be_off_by_a_quarter_of_the_bar() -> None:
    steady = [1.0, 1.001] * 4
    spread = [1.0, 1.05] * 4
    assert are_settled([1.0] * 8, [steady, steady])
    assert not are_settled([1.0] * 8, [steady, spread])
    assert are_settled([1.0] * 1024, [spread * 128])
    assert not are_settled([1.0] * 2, [[1.0, 1.0]])
