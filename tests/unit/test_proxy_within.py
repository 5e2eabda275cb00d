"""Rounds within a process: which steps count, the verdict on their ratios, and the report of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from faultinject.__main__ import main, parser
from faultinject.campaigns.proxy import entries, reports
from faultinject.campaigns.proxy.command import Plan
from faultinject.campaigns.proxy.judge import (
    ERRORS,
    STEP_BAR,
    TRAINING_BAR,
    WITHIN_LEAST,
    Pair,
    Side,
    Within,
    check,
    standard_error,
)
from faultinject.campaigns.proxy.pairs import Rounds
from faultinject.evidence import files
from faultinject.programs import paired
from faultinject.programs.pairing.rounds import (
    BEATS_EACH,
    BLOCKS,
    MIN_BEATS,
    Shape,
    beat_blocks,
    block_order,
    counted_times,
    round_times,
    shape,
)
from faultinject.registry.verdicts import Verdict
from mpsd.base.errors import UsageError

ROUNDS = 27


def within(median: float, spread: float = 0.0, noise: float = 1.0, rounds: int = ROUNDS) -> Within:
    """Return ratios alternately `spread` above and below the median, and bypass blocks `noise` apart."""
    past = tuple(0.01 * 1.01**number for number in range(rounds))
    again = tuple(seconds * noise for seconds in past)
    ratios = [median + spread * (number // len(BLOCKS) % 3 - 1) for number in range(rounds)]
    through = tuple((a + b) / 2 * by for a, b, by in zip(past, again, ratios, strict=True))
    return Within(past, through, again, functions=9)


# Between the processes everything is as slow and noisy as possible: the verdict does not use it.
PLAIN = Side("abc", None, (0.01,) * 9)
AGAIN = Side("abc", None, (0.02,) * 9)
VAULT = {"vault_bytes": 0, "vault_taken": 1, "vault_refused": 0, "vault_lost": 0}
PROXIED = Side("abc", None, (0.05,) * 9, {"state": "active", "reason": "", **VAULT})
PAIR = Pair("forward", PLAIN, AGAIN, PROXIED)


def said(found: Within, **changes: Any) -> tuple[Verdict, str]:
    findings = check(replace(PAIR, within=found, **changes), bars=True)
    (step,) = [one for one in findings if one.law == "step time same"]
    return step.verdict, step.text


def test_a_round_within_is_judged_in_place_of_those_between_processes() -> None:
    assert said(within(1.002)) == (
        Verdict.VALID,
        "through the proxy a step took 1.0020 of the time past it, known to 0.0000",
    )
    assert said(within(1.02))[0] is Verdict.INVALID
    assert said(within(0.8))[0] is Verdict.VALID
    (between,) = [one for one in check(PAIR, bars=True) if one.law == "step time same"]
    assert between.verdict is Verdict.UNKNOWN


def test_mode_auto_has_the_budget_of_saving_as_its_bar() -> None:
    auto = {"mode": "auto", "step_bar": entries.step_bar("auto", "compiled")}
    assert said(within(1.02, noise=1.008), **auto)[0] is Verdict.VALID
    assert said(within(1.06), **auto)[0] is Verdict.INVALID
    assert said(within(1.0, noise=1.02), **auto)[0] is Verdict.UNKNOWN


def test_the_line_of_mode_auto_has_protection_and_interval() -> None:
    found = within(1.01, 0.004)
    shown = {"level": "guard", "why": "snapshot budget: needs 14 GiB, has 8", "cost_bytes": 0}
    ratio, error = found.ratio(), found.error()
    assert ratio is not None and error is not None
    figures = {"within_ratio": asdict(ratio), "within_error": error}
    entry = {"program": "mixed", "proxied": {"failover": shown}, "figures": figures}
    line = reports.default_line(entry)
    assert line.startswith(f"mixed: status called it guard ({shown['why']}); a step took 1.0100 of the time")
    assert f"{1.01 - error:.4f} to {1.01 + error:.4f}" in line and "the limit is 1.03" in line
    assert reports.default_line({**entry, "figures": {}}).endswith("has 8).")


def test_a_trainings_bar_is_a_trainings_within_a_process_too() -> None:
    assert said(within(1.03))[0] is Verdict.INVALID
    assert said(within(1.03), step_bar=TRAINING_BAR)[0] is Verdict.VALID
    assert said(within(1.06), step_bar=TRAINING_BAR)[0] is Verdict.INVALID


@pytest.mark.parametrize("beyond", [-1, 1])
def test_a_bar_nearer_than_twice_the_error_of_the_median_leaves_it_unknown(beyond: int) -> None:
    spread = 0.01
    found = within(1.0, spread).ratio()
    assert found is not None
    doubt = ERRORS * standard_error(found, ROUNDS)
    assert 0.001 < doubt < STEP_BAR
    near, far = (1 + STEP_BAR + beyond * by * doubt for by in (0.9, 1.1))
    verdict, text = said(within(near, spread))
    assert verdict is Verdict.UNKNOWN and text.endswith(f"known to {doubt:.4f}: too close to 1.01")
    assert said(within(far, spread))[0] is (Verdict.INVALID if beyond > 0 else Verdict.VALID)


def test_what_two_blocks_past_the_proxy_differ_by_is_doubt_and_too_much_of_it_is_no_measurement() -> None:
    assert said(within(1.007, noise=1.002))[0] is Verdict.VALID
    assert said(within(1.007, noise=1.004))[0] is Verdict.UNKNOWN
    assert said(within(1.007, noise=0.996))[0] is Verdict.UNKNOWN
    # Such blocks do not make the proxy slow either.
    for noise in (0.99, 1.006):
        verdict, text = said(within(1.2, noise=noise))
        assert verdict is Verdict.UNKNOWN and text.startswith("past the proxy one block took ")


def test_few_rounds_and_functions_that_are_the_drivers_own_say_nothing() -> None:
    few = within(1.0, rounds=WITHIN_LEAST - 1)
    assert said(few) == (Verdict.UNKNOWN, f"fewer than {WITHIN_LEAST} rounds were timed within the process")
    assert said(within(1.0, rounds=WITHIN_LEAST))[0] is Verdict.VALID
    none = replace(within(1.0), functions=0)
    # In pass-through the proxy has no functions of its own there.
    assert said(none)[0] is Verdict.VALID
    verdict, text = said(none, mode="vault")
    assert verdict is Verdict.UNKNOWN and text.startswith("no function that went past")


def test_where_calls_cannot_go_past_the_proxy_that_is_no_fault_of_its() -> None:
    why = "calls can go past the proxy on x86-64 and aarch64, not on riscv64"
    found = Within((), (), (), functions=0, cannot=why)
    assert said(found) == (Verdict.UNKNOWN, why)


@pytest.mark.parametrize("rounds", [WITHIN_LEAST + 1, 60])
@pytest.mark.parametrize("first", [0.97, 1.02])
def test_what_the_first_block_of_a_round_takes_more_is_nobodys(first: float, rounds: int) -> None:
    """Each block comes first in turn; a plain median of all ratios would be that of the other two orders."""
    times: dict[str, list[float]] = {name: [] for name in BLOCKS}
    for number in range(rounds):
        blocks = block_order(number)
        for name in BLOCKS:
            own = 1.02 if name == "through" else 1.0
            times[name].append(0.01 * own * (first if name == blocks[0] else 1.0))
    found = Within(*map(tuple, (times["past"], times["through"], times["again"])), functions=9)
    ratio, noise = found.ratio(), found.noise()
    assert ratio is not None and noise is not None
    assert ratio.median == pytest.approx(1.02, abs=5e-4) and noise.median == pytest.approx(1.0, abs=5e-4)
    assert said(found)[0] is Verdict.INVALID


def test_time_within_is_not_asked_of_a_program_whose_steps_are_not_its_own() -> None:
    pair = replace(PAIR, within=within(2.0), untimed="it waits for others")
    assert [one.law for one in check(pair, bars=True) if one.law == "step time same"] == []


def test_a_ratio_is_to_the_mean_of_both_blocks_past_the_proxy() -> None:
    found = Within((1.0,) * 9, (1.1,) * 9, (1.2,) * 9, functions=1)
    ratio, noise = found.ratio(), found.noise()
    assert ratio is not None and noise is not None
    assert [ratio.median, noise.median] == pytest.approx([1.0, 1.2])


def test_rounds_are_enough_when_both_medians_are_known_to_a_quarter_of_the_bar() -> None:
    assert within(1.2).is_settled()
    assert not within(1.2, rounds=WITHIN_LEAST - 1).is_settled()
    assert not within(1.0, spread=0.01).is_settled()
    assert within(1.0, spread=0.01, rounds=600).is_settled()
    # This holds for the bypass blocks too: they alternate by 2 %, either way.
    past = (1.0, 1.02) * 6
    uneven = Within(past, (1.01,) * 12, past[::-1], functions=1)
    ratio = uneven.ratio()
    assert ratio is not None and ratio.low == ratio.high == pytest.approx(1.0)
    assert not uneven.is_settled()


@pytest.mark.parametrize(
    ("step_s", "beats", "exchanges", "found"),
    [
        # Warm steps are a tenth of the counted steps, and at least one.
        (0.001, 0, False, Shape(10, 100)),
        (0.02, 0, False, Shape(1, 5)),
        (3.0, 0, False, Shape(1, 1)),
        (0.0, 0, False, Shape(200, 2000)),
        # A step with enough beats has rounds of beats, if calls can switch between proxy and driver within
        # it.
        (0.2, MIN_BEATS, True, Shape(0, 1, MIN_BEATS // 6)),
        (0.2, 31, True, Shape(0, 1, 5)),
        (0.05, 31, False, Shape(1, 2)),
        (0.05, MIN_BEATS - 1, True, Shape(1, 2)),
    ],
)
def test_which_steps_of_a_block_count(step_s: float, beats: float, exchanges: bool, found: Shape) -> None:
    assert shape(step_s, beats, 2000, exchanges=exchanges) == found
    assert found.steps_per_round == (1 if found.rounds else 3 * (found.warm + found.steps))


def test_no_block_is_always_the_first() -> None:
    rounds = [block_order(number) for number in range(6)]
    assert rounds[:3] == rounds[3:]
    assert all(sorted(one) == sorted(BLOCKS) for one in rounds)
    for place in range(3):
        assert {one[place] for one in rounds} == set(BLOCKS)


def test_the_last_beat_of_a_block_counts_and_rounds_go_on_from_step_to_step() -> None:
    assert BEATS_EACH == 2
    assert beat_blocks(1, 2) == [
        *("through", "through", "again", "again", "past", "past"),
        *("again", "again", "past", "past", "through", "through"),
    ]
    assert (
        beat_blocks(0, 4)[:6] == beat_blocks(3, 1) == ["past", "past", "through", "through", "again", "again"]
    )
    found = counted_times(
        beat_blocks(1, 2), [9.0, 1.0, 9.0, 2.0, 9.0, 3.0, 9.0, 4.0, 9.0, 5.0, 9.0, 6.0, 7.0]
    )
    assert found == {"past": [3.0, 5.0], "through": [1.0, 6.0], "again": [2.0, 4.0]}
    # An incomplete round does not count.
    assert counted_times(beat_blocks(1, 2), [9.0, 1.0, 9.0, 2.0, 9.0, 3.0, 9.0, 4.0]) == {
        "past": [3.0],
        "through": [1.0],
        "again": [2.0],
    }


def test_a_round_of_steps_counts_with_their_medians() -> None:
    blocks = {name: {"times": [1.0, 5.0, 2.0], "cpu": 0.5} for name in BLOCKS}
    blocks["through"] = {"times": [3.0], "cpu": 0.7}
    assert round_times({"blocks": blocks}) == (
        {"past": [2.0], "through": [3.0], "again": [2.0]},
        {"past": [0.5], "through": [0.7], "again": [0.5]},
    )
    beats = {name: [0.1, 0.2] for name in BLOCKS}
    assert round_times({"times": beats, "cpu": beats}) == (beats, beats)


class Way:
    """A fake switch between the proxy and the driver."""

    is_past = False

    def switch(self, *, past: bool) -> None:
        self.is_past = past

    def differing(self) -> int:
        return 0 if self.is_past else 7

    def settle(self) -> None: ...


class Steps:
    """A workload that notes per step whether its calls bypassed the proxy, and returns that as a beat."""

    def __init__(self, way: Way) -> None:
        self.way = way
        self.seen: list[bool] = []
        self.beats: list[float] = []

    def step(self) -> None:
        self.seen.append(self.way.is_past)
        self.beats.append(float(self.way.is_past))

    def results(self) -> Iterator[bytes]:
        yield b""

    def close(self) -> None: ...


def test_a_round_does_each_block_the_way_it_is_named_and_leaves_calls_with_the_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    way = Way()
    monkeypatch.setattr("faultinject.programs.pairing.bypass.find_bypass", lambda: way)
    work = Steps(way)
    rounds = paired.Rounds(work)
    blocks = rounds.run({"blocks": block_order(1), "warm": 1, "steps": 2})
    assert block_order(1) == ("through", "again", "past")
    assert work.seen == [False] * 3 + [True] * 6
    assert {name: found["beats"] for name, found in blocks.items()} == {
        "through": [0.0] * 2,
        "again": [1.0] * 2,
        "past": [1.0] * 2,
    }
    assert {len(found["times"]) for found in blocks.values()} == {2}
    assert all(found["cpu"] >= 0 for found in blocks.values())
    assert (way.is_past, rounds.functions, work.beats) == (False, 7, [])


class Beats(Steps):
    """Steps of thirteen beats, each of which tells whether its calls bypassed the proxy."""

    act: Callable[[], None] | None = None

    def come_between(self, settle: Callable[[], None], act: Callable[[], None]) -> None:
        assert settle == self.way.settle
        self.act = act

    def leave(self) -> None:
        self.act = None

    def step(self) -> None:
        for number in range(14):
            if number:
                super().step()
            if self.act:
                self.act()


def test_a_step_with_rounds_of_beats_leads_calls_another_way_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    way = Way()
    monkeypatch.setattr("faultinject.programs.pairing.bypass.find_bypass", lambda: way)
    work = Beats(way)
    rounds = paired.Rounds(work)
    found = rounds.run_beats({"first": 1, "rounds": 2})
    assert work.seen == [name != "through" for name in beat_blocks(1, 2)] + [False]
    assert found["times"] == {"past": [1.0] * 2, "through": [0.0] * 2, "again": [1.0] * 2}
    assert {len(spent) for spent in found["cpu"].values()} == {2}
    assert (way.is_past, work.act, work.beats) == (False, None, [])


def entry(found: Within | None, mode: str = "keep") -> dict[str, Any]:
    def data(side: Side) -> dict[str, Any]:
        return {
            "digest": side.digest,
            "memory": None,
            "blocks": list(side.blocks),
            "stats": side.stats,
            "failure": "",
            "failover": {"mode": mode, "standing": "ready", "reason": "", "opaque": [], "unsure": []},
        }

    inside: Mapping[str, Any] = (
        {"within": {**{name: list(getattr(found, name)) for name in BLOCKS}, "functions": 9, "cannot": ""}}
        if found
        else {}
    )
    sides = {"plain": data(PLAIN), "again": data(AGAIN), "proxied": data(PROXIED)}
    facts = {"unit": "tokens", "per_step": 4, "untimed": "", "beat": "", "not_run": None}
    return {"program": "generate", "mode": mode, **facts, **sides, **inside}


def report(*programs: Mapping[str, Any]) -> dict[str, Any]:
    head = {"schema": reports.SCHEMA_VERSION, "kind": reports.KIND, "device": "GPU", "driver": "580"}
    head |= {"backend": "nvidia", "date": "2026-01-01T00:00:00+00:00", "command": "c", "leftovers": []}
    parts = dict.fromkeys(("numba", "deaths", "memory_end", "crowded"))
    return reports.judged({**head, "seed": 1, "bars": 1, "programs": list(programs), **parts})


def test_a_report_has_columns_for_what_was_timed_within_and_is_judged_by_that() -> None:
    found = report(
        entry(within(1.004, 0.001)), entry(None, "exact"), {**entry(None), "not_run": "it is gone"}
    )
    timed, untimed, _ = found["programs"]
    assert (timed["verdict"], untimed["verdict"]) == ("valid", "unknown")
    assert timed["figures"]["within_ratio"]["median"] == pytest.approx(1.004)
    assert timed["figures"]["within_noise"]["median"] == 1.0
    # Columns of rounds between processes are unchanged.
    assert timed["figures"]["step_ratio"]["median"] == pytest.approx(5.0)
    assert "within_ratio" not in untimed["figures"]
    header, *rows = reports.table(found["programs"])
    assert [len(row) for row in rows] == [len(header)] * 3
    at = header.index("within")
    assert header[at : at + 3] == ["within", "half of rounds", "noise within"]
    assert [row[at : at + 3] for row in rows] == [["1.0040", "1.0030-1.0050", "1.0000"], ["-"] * 3, ["-"] * 3]
    text = reports.markdown(found)
    assert "within: step time with calls through the proxy to that with calls past it" in text
    assert "step time x 1.0040" in entries.progress(timed, 1.0)


def test_what_processors_worked_is_told_where_it_was_looked_at_and_judged_nowhere() -> None:
    costly = {"past": [0.01] * ROUNDS, "again": [0.03] * ROUNDS, "through": [0.05] * ROUNDS}
    timed = entry(within(1.0))
    timed["within"]["cpu"] = costly
    found = report(timed, entry(within(1.0)))
    looked_at, other = found["programs"]
    assert (looked_at["verdict"], other["verdict"]) == ("valid", "valid")
    assert looked_at["figures"]["within_cpu"]["median"] == pytest.approx(2.5)
    assert "within_cpu" not in other["figures"]
    header, *rows = reports.table(found["programs"])
    assert [row[header.index("CPU within")] for row in rows] == ["2.500", "-"]
    assert "of all threads of the process" in reports.markdown(found)
    assert "CPU within" not in reports.table([other])[0]


def test_a_report_says_of_which_programs_a_block_is_a_beat() -> None:
    timed = entry(within(1.0))
    assert "is one of these times" not in reports.markdown(report(timed))
    timed["within"]["beats"] = True
    assert "Within the process of generate a block is one of these times" in reports.markdown(report(timed))


def test_a_report_without_such_rounds_does_not_speak_of_them() -> None:
    found = report(entry(None))
    assert "within" not in reports.markdown(found)
    assert "within" not in reports.table(found["programs"])[0]


DATA = Path(__file__).parents[1] / "data/reports"
FIGURES: dict[str, list[str]] = json.loads((DATA / "figures.json").read_text())


def figures(data: Mapping[str, Any]) -> list[str]:
    """Return the rows of its table, then the numbers and the verdict of each line about another part."""
    rows = reports.table(data["programs"])[1:] if data["programs"] else []
    numbers = (re.findall(r"\d[\d.]*\b|valid|invalid|unknown", line) for line in reports.part_lines(data))
    return [" | ".join(row) for row in rows] + [" ".join(found) for found in numbers]


@pytest.mark.parametrize(
    "name", [f"proxy-{part}" for part in ("within", "validate", "deaths", "memory-end", "crowded", "numba")]
)
def test_a_report_of_a_real_run_keeps_its_figures(name: str) -> None:
    """Reports of an H200; the report of numba is cut."""
    path = DATA / f"{name}.json"
    data = reports.load(files.read(path), path)
    assert data is not None
    found = reports.judged(data)
    assert figures(found) == FIGURES[name]
    text = reports.markdown(found)
    assert all(f"| {row} |" in text for row in FIGURES[name] if " | " in row)
    assert all(line in text for line in reports.part_lines(found))


@pytest.mark.parametrize("is_within", [False, True])
def test_the_command_line_of_a_report_repeats_it(is_within: bool) -> None:
    plan = Plan("nvidia", ["generate"], ["keep"], Rounds(9, 60, is_within), 1, 0, 8, None, 120.0)
    words = plan.command().split()
    assert ("--within" in words) == is_within
    asked = parser().parse_args(words[1:])
    assert asked.within is is_within


def test_validation_is_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["proxy", "--backend", "simulated", "--modes", "keep,validate", "--within"])
        == UsageError.exit_code
    )
    assert "--within times steps" in capsys.readouterr().err
