"""Outcomes of a test suite that ran without and with the proxy: read, compared, judged."""

from __future__ import annotations

import json
from typing import Any

import pytest

from faultinject.campaigns.proxy import deaths
from faultinject.campaigns.proxy.numba_plugin import in_shard
from faultinject.campaigns.proxy.numba_suite import (
    Options,
    classify_repeated,
    combine,
    differing,
    judge,
    reasons,
    under_way,
)

PROXY = {"proxy": True, "stats": {"state": "active", "reason": ""}}
NONE = {"proxy": False, "stats": None}


def line(test: str, when: str, outcome: str = "passed", *, xfail: bool = False) -> str:
    return json.dumps({"test": test, "when": when, "outcome": outcome, "xfail": xfail})


def whole(test: str, call: str = "passed", *, xfail: bool = False) -> list[str]:
    return [line(test, "setup"), line(test, "call", call, xfail=xfail), line(test, "teardown")]


def test_a_test_has_the_outcome_of_its_worst_part() -> None:
    lines = [
        *whole("passes"),
        *whole("fails", "failed"),
        line("skipped", "setup", "skipped"),
        line("skipped", "teardown"),
        line("no setup", "setup", "failed"),
        line("no setup", "teardown"),
        *whole("dirty")[:2],
        line("dirty", "teardown", "failed"),
        *whole("expected", "skipped", xfail=True),
        *whole("unexpected", "passed", xfail=True),
        line("broken.py", "collect", "failed"),
        line("took its process with it", "???", "failed"),
        *whole("cut off")[:2],
        json.dumps({"process": 7, **PROXY}),
        '{"test": "torn',
    ]
    outcomes, processes = combine(lines)
    assert outcomes == {
        "passes": "passed",
        "fails": "failed",
        "skipped": "skipped",
        "no setup": "error",
        "dirty": "error",
        "expected": "xfailed",
        "unexpected": "xpassed",
        "broken.py": "not collected",
        "took its process with it": "crashed",
    }
    assert processes == [{"process": 7, **PROXY}]


def test_what_was_set_up_and_not_torn_down_was_under_way() -> None:
    lines = [*whole("over"), *whole("hangs")[:1], *whole("ends")[:2], line("broken.py", "collect", "failed")]
    lines += [line("took its process with it", "setup"), line("took its process with it", "???", "failed")]
    assert under_way([*lines, json.dumps({"process": 7, **NONE}), '{"test": "torn']) == ["ends", "hangs"]


def test_a_part_that_fails_is_not_mended_by_one_that_passes() -> None:
    # Subtests report under the name of their test, each with a call of its own.
    lines = [line("t", "setup"), line("t", "call", "failed"), line("t", "call"), line("t", "teardown")]
    assert combine(lines)[0] == {"t": "failed"}


def test_only_tests_of_both_sides_can_differ() -> None:
    assert differing({"a": "passed", "b": "failed"}, {"b": "passed", "c": "passed"}) == ["b"]


@pytest.mark.parametrize(
    ("plain", "proxied", "means"),
    [
        (["passed"] * 3, ["failed"] * 3, "changed"),
        (["passed"] * 3, ["failed", "crashed", "failed"], "changed"),
        (["passed", "failed", "passed"], ["failed", "failed", "failed"], "unsteady"),
        (["passed"] * 3, ["failed", "passed", "passed"], "doubtful"),
    ],
)
def test_repeated_outcomes_tell_a_change_from_an_unsteady_test(
    plain: list[str], proxied: list[str], means: str
) -> None:
    assert classify_repeated(plain, proxied) == means


def seen(**changes: Any) -> dict[str, Any]:
    outcomes = {"a": "passed", "b": "failed", "c": "skipped"}
    side = {"outcomes": outcomes, "failure": "", "took_s": 1.0}
    plain = side | {"processes": [NONE]} | changes.pop("plain", {})
    proxied = side | {"processes": [PROXY, NONE]} | changes.pop("proxied", {})
    return {"not_run": None, "plain": plain, "proxied": proxied, "differing": {}} | changes


CHANGED = {"plain": ["passed"] * 3, "proxied": ["failed"] * 3}
UNSTEADY = {"plain": ["passed", "failed", "passed"], "proxied": ["failed"] * 3}
DOUBTFUL = {"plain": ["passed"] * 3, "proxied": ["failed", "passed", "passed"]}


@pytest.mark.parametrize(
    ("facts", "expected", "text"),
    [
        (seen(), "valid", ""),
        (seen(differing={"a": UNSTEADY}), "valid", ""),
        (seen(differing={"a": CHANGED}), "invalid", "a (passed/passed/passed without, failed/failed/failed"),
        (seen(differing={"a": DOUBTFUL}), "unknown", "with the proxy alone: a"),
        (seen(proxied={"processes": [NONE]}), "invalid", "no process of the suite had the proxy"),
        (
            seen(proxied={"processes": [{"proxy": True, "stats": {"state": "aside", "reason": "why"}}]}),
            "invalid",
            "passes calls through: why",
        ),
        (seen(plain={"processes": [PROXY]}), "invalid", "to run without the proxy had it"),
        (seen(proxied={"outcomes": {"a": "passed"}}), "invalid", "2 tests ran on one side only"),
        (
            seen(plain={"failure": "it was not over"}),
            "unknown",
            "plain: it was not over; 3 tests ran in both",
        ),
        (
            seen(plain={"outcomes": {"b": "failed"}}, proxied={"outcomes": {"b": "failed"}}),
            "unknown",
            "no test passed",
        ),
    ],
)
def test_a_verdict_on_a_suite(facts: dict[str, Any], expected: str, text: str) -> None:
    findings = judge(facts)
    assert deaths.verdict(findings).value == expected
    assert any(text in f.text for f in findings)


def test_shards_share_all_classes_out_and_keep_each_together() -> None:
    tests = [f"m.py::Class{c}::test_{t}" for c in range(40) for t in range(3)]
    shards = [{test for test in tests if in_shard(test, f"{i}/4")} for i in range(1, 5)]
    assert sorted(test for shard in shards for test in shard) == sorted(tests)
    for c in range(40):
        together = {i for i, s in enumerate(shards) for t in range(3) if f"m.py::Class{c}::test_{t}" in s}
        assert len(together) == 1
    assert all(shards)


def test_the_options_are_in_the_command_that_repeats_it() -> None:
    words = Options(match="ipc or array", shard="2/3", jobs=4).words()
    assert words == [
        *("--numba", "--numba-jobs", "4", "--numba-deadline", "540"),
        *("--numba-filter", "ipc or array", "--numba-shard", "2/3"),
    ]


def test_the_commonest_reasons_of_failures_are_told() -> None:
    lines = ['{"test": "a", "why": "no GPU"}', '{"test": "b", "why": "no GPU"}', '{"test": "c", "why": ""}']
    assert reasons([*lines, "{", '{"test": "d", "why": "1 != 2"}']) == {"no GPU": 2, "1 != 2": 1}
