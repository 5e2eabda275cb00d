"""Kinds of fault that guard zones absorb: their addresses, the expected record, when they are skipped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from faultinject.campaigns.matrix import Matrix, Plan, missing_requirement
from faultinject.programs.injection.overrun import (
    DISTANT,
    DISTANT_BEFORE,
    DISTANT_SPAN,
    FAR,
    FAR_SPAN,
    SIZE,
    SPAN,
    WORD,
    take_aim,
)
from faultinject.registry import kinds
from faultinject.registry.checkers import check, verdict
from faultinject.registry.faults import REGISTRY, Need, by_name
from faultinject.registry.observation import Observation, RecordSeen, SurvivorSeen
from faultinject.registry.verdicts import Verdict
from mpsd_client.driver import LIBRARY_NAME

OFFENDER = (100, 5)
TARGET = 0x7000_0000_0000
AIM = {"address": hex(TARGET), "bytes": SIZE, "relation": "past"}
HIT = {
    "outcome": "evicted",
    "outcome_ms": 9.0,
    "allocation": {"relation": "past", "offset": 0, "address": hex(TARGET), "bytes": SIZE},
}
ZONES = {"managed": 4, "null_page": True}
FAR_ZONES = {**ZONES, "far_bytes": 7 << 30}


class Freed:
    """A device of which only the freed allocation matters."""

    def __init__(self) -> None:
        self.freed: list[int] = []

    def free(self, address: int) -> None:
        self.freed.append(address)


def survivor(stall_ms: float) -> SurvivorSeen:
    step = (10.0, 10.0 + stall_ms / 1e3)
    return SurvivorSeen("survivor-0", 101, True, True, None, None, 0, 50, (step,))


def seen(stall_ms: float = 2.0, **changes: Any) -> Observation:
    """A hit as it should be: absorbed, reported, its offender evicted."""
    record = {
        "id": 1,
        "class": "guard-hit",
        "offender": {"pid": OFFENDER[0], "start_ticks": OFFENDER[1]},
        "confidence": "certain",
        "record_ms": 1.0,
        "hit": changes.pop("hit", HIT),
    }
    base = Observation(
        mode="mpsd",
        survivors=(survivor(stall_ms),),
        offenders=(OFFENDER,),
        ready_expected=1,
        fired_at=10.0,
        evicted_at=10.02,
        records=(RecordSeen(10.001, record),),
        zones=ZONES,
        aim=AIM,
        counters={},
        leftovers=(),
    )
    return replace(base, **changes)


def complaints(kind: str, what: Observation) -> dict[str, Verdict]:
    findings = check(by_name(kind), what, bars=True)
    return {f.law: f.verdict for f in findings if f.verdict is not Verdict.VALID}


def test_a_hit_as_it_should_be_is_valid() -> None:
    for kind in ("zone_past_end@one", "zone_past_end@grid"):
        assert verdict(check(by_name(kind), seen(), bars=True)) is Verdict.VALID
    assert (seen().evict_ms, seen().gone_ms) == (9.0, pytest.approx(20.0))


@pytest.mark.parametrize(
    ("what", "law"),
    [
        (seen(zones=None), "zones laid"),
        (seen(zones={"managed": 0, "sparse": 4}), "zones laid"),
        (seen(hit=None), "allocation right"),
        (seen(hit={**HIT, "allocation": None}), "allocation right"),
        (
            seen(hit={**HIT, "allocation": {**HIT["allocation"], "address": "0x1000"}}),
            "allocation right",
        ),
        (
            seen(hit={**HIT, "allocation": {**HIT["allocation"], "relation": "before"}}),
            "allocation right",
        ),
        (seen(hit={**HIT, "outcome": "absorbed"}), "hit evicted"),
        (seen(evicted_at=None), "hit evicted"),
        (seen(hit={**HIT, "outcome_ms": 15.5}), "evicted in time"),
        (seen(stall_ms=5.5), "stall bounded"),
        (seen(moved=True), "domain stays"),
        (seen(survivors=(replace(survivor(1.0), done=False, error=700),)), "survivors live"),
    ],
)
def test_what_must_not_be_with_a_hit(what: Observation, law: str) -> None:
    assert complaints("zone_past_end@one", what).get(law) is Verdict.INVALID


def test_where_the_gpu_is_full_a_stall_may_last_as_long_as_the_eviction() -> None:
    assert complaints("zone_past_end@grid", seen(stall_ms=13.5)) == {}
    assert complaints("zone_past_end@grid", seen(stall_ms=14.5)) == {"stall bounded": Verdict.INVALID}


def test_a_null_pointer_misses_no_allocation_but_needs_its_page_covered() -> None:
    null = seen(hit={**HIT, "allocation": None}, aim={"address": "", "bytes": SIZE, "relation": ""})
    assert complaints("zone_null@one", null) == {}
    bare = replace(null, zones={**ZONES, "null_page": False})
    assert complaints("zone_null@one", bare) == {"zones laid": Verdict.INVALID}


ABSORBED = {**HIT, "outcome": "absorbed", "outcome_ms": None}
KILLED = {
    "op": "kill",
    "ok": True,
    "result": {"steps": ["mpsd has stopped the client", "gone"], "evict_ms": 0.1},
}
ASKED = {**KILLED, "result": {"steps": ["terminate_client: done after 3 ms"], "evict_ms": 3.0}}
STOPPED = {"told": True, "stopped": True}
LIVED = {"steps": 32, "wrong": 0}


def absorbed(**changes: Any) -> Observation:
    return seen(**{"hit": ABSORBED, "continued": LIVED, "evicted_at": None, **changes})


def frozen(**changes: Any) -> Observation:
    return seen(**{"frozen": STOPPED, "answers": (KILLED,), **changes})


def unheard(**changes: Any) -> Observation:
    return absorbed(**{"records": (), "zones": {"sparse": 4, "managed": 0}, **changes})


def full(**changes: Any) -> Observation:
    return seen(**{"free_when_full": 1 << 20, "filler": {"wrong": 0}, **changes})


@pytest.mark.parametrize(
    ("kind", "good", "bad", "law"),
    [
        ("zone_absorb@one", absorbed(), absorbed(continued=None), "hit absorbed"),
        ("zone_absorb@one", absorbed(), absorbed(continued={"steps": 32, "wrong": 1}), "hit absorbed"),
        ("zone_absorb@one", absorbed(), absorbed(evicted_at=10.1), "hit absorbed"),
        ("zone_absorb@one", absorbed(), absorbed(hit=HIT), "hit absorbed"),
        ("zone_absorb@one", absorbed(), absorbed(records=absorbed().records * 2), "hit absorbed"),
        ("zone_freeze@one", frozen(), frozen(frozen=None), "frozen then killed"),
        ("zone_freeze@one", frozen(), frozen(frozen={**STOPPED, "stopped": False}), "frozen then killed"),
        ("zone_freeze@one", frozen(), frozen(answers=(ASKED,)), "frozen then killed"),
        ("zone_freeze@one", frozen(), frozen(evicted_at=None), "hit evicted"),
        ("zone_restart@one", seen(readopted=True), seen(readopted=False), "readopted"),
        ("zone_sparse@one", unheard(), unheard(zones={"managed": 4, "sparse": 0}), "zones laid"),
        ("zone_sparse@one", unheard(), absorbed(zones={"sparse": 4}), "recorded"),
        ("zone_host@one", unheard(), unheard(zones={"managed": 4, "sparse": 0}), "zones laid"),
        ("zone_host@one", unheard(), unheard(continued=None), "hit absorbed"),
        ("zone_past_end@full", full(), full(filler={"code": 700, "text": ""}), "gpu was full"),
        ("zone_past_end@full", full(), full(filler={"wrong": 2}), "gpu was full"),
    ],
)
def test_what_else_may_become_of_an_offender(
    kind: str, good: Observation, bad: Observation, law: str
) -> None:
    assert complaints(kind, good) == {}
    assert complaints(kind, bad).get(law) is Verdict.INVALID


def test_a_gpu_that_was_not_full_proves_nothing() -> None:
    assert complaints("zone_past_end@full", full(free_when_full=8 << 20)) == {"gpu was full": Verdict.UNKNOWN}


@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize("kind", [k for k in kinds.ZONE if k not in ("zone_null", "zone_distant_before")])
def test_each_kind_strays_beside_its_allocation_or_into_it_once_freed(kind: str, wild: bool) -> None:
    device = Freed()
    aim = take_aim(device, kind, TARGET, full_grid=wild)
    spans = {"zone_far": FAR_SPAN, "zone_distant": DISTANT_SPAN}
    assert aim.span == (spans.get(kind, SPAN) if wild else WORD)
    past, before = aim.address - (TARGET + SIZE), TARGET - (aim.address + aim.span)
    assert aim.record_fields()["address"] == hex(TARGET)
    match aim.relation:
        case "past":
            assert past == {"zone_far": FAR, "zone_distant": DISTANT}.get(kind, 0)
        case "before":
            assert before == 0
        case "inside":
            assert (aim.address, device.freed) == (TARGET, [TARGET])
    assert bool(device.freed) == (kind == "zone_use_after_free")


def test_far_below_the_first_allocation_is_nearest_whichever_that_is() -> None:
    aim = take_aim(Freed(), "zone_distant_before", TARGET, full_grid=False)
    assert (aim.address, aim.relation) == (TARGET - DISTANT_BEFORE, "before")
    told = {**HIT["allocation"], "address": "0x1000", "bytes": 512}
    as_told = {"aim": aim.record_fields(), "zones": FAR_ZONES}
    before = seen(hit={**HIT, "allocation": {**told, "relation": "before"}}, **as_told)
    assert complaints("zone_distant_before@one", before) == {}
    past = seen(hit={**HIT, "allocation": told}, **as_told)
    assert complaints("zone_distant_before@one", past) == {"allocation right": Verdict.INVALID}


def test_a_grid_far_away_has_a_bound_of_its_own() -> None:
    late = {"hit": {**HIT, "outcome_ms": 900.0}, "zones": FAR_ZONES, "stall_ms": 902.0}
    assert complaints("zone_distant@grid", seen(**late)) == {}
    assert complaints("zone_distant@one", seen(**late))["evicted in time"] is Verdict.INVALID
    late["hit"] = {**HIT, "outcome_ms": 1001.0}
    assert complaints("zone_distant@grid", seen(**late)) == {"evicted in time": Verdict.INVALID}
    assert complaints("zone_distant@grid", seen()) == {"zones laid": Verdict.INVALID}


def test_zone_kinds_are_not_run_without_a_proxy_and_say_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MPSD_LIBCUDA_DIR", str(tmp_path / "nowhere"))
    zone = [f for f in REGISTRY if Need.PROXY in f.needs]
    assert {f.kind for f in zone} == set(kinds.ZONE)
    for fault in zone:
        entry = Matrix(Plan("simulated", (), ())).run_one(fault, "mpsd", "simulated", tmp_path)
        assert (entry["verdict"], "--libcuda DIR" in entry["not_run"]) == (None, True)


def test_a_folder_without_a_library_is_named(tmp_path: Path) -> None:
    plan = Plan("simulated", (), (), libcuda=tmp_path)
    entry = Matrix(plan).run_one(by_name("zone_far@one"), "mpsd", "simulated", tmp_path)
    assert str(tmp_path) in entry["not_run"] and LIBRARY_NAME in entry["not_run"]
    assert entry["command"].endswith("--libcuda DIR")


def test_a_null_pointer_needs_the_right_to_map_its_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("faultinject.campaigns.matrix.may_map_null", lambda: False)
    assert "address 0" in str(missing_requirement(by_name("zone_null@one"), "mpsd", tmp_path))
    assert missing_requirement(by_name("zone_far@one"), "mpsd", tmp_path) is None
