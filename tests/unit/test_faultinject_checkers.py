"""The laws: each row is one possible observation and the verdict that it must get."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faultinject.registry import kinds
from faultinject.registry.checkers import check, verdict
from faultinject.registry.faults import REGISTRY, Fault, by_name
from faultinject.registry.observation import (
    NewcomerSeen,
    Observation,
    RecordSeen,
    SurvivorSeen,
)
from faultinject.registry.verdicts import Finding, Verdict, merge

OFFENDER, INNOCENT = (100, 5), (101, 6)


def survivor(pid: int = 101, **changes: Any) -> SurvivorSeen:
    living = SurvivorSeen(
        name=f"survivor-{pid}",
        pid=pid,
        ready=True,
        done=True,
        error=None,
        error_at=None,
        wrong=0,
        steps=50,
        longest=((10.0, 10.002),),
    )
    return replace(living, **changes)


def lost(pid: int = 101) -> SurvivorSeen:
    return survivor(pid, done=False, error=700, error_at=10.15)


def party(who: tuple[int, int]) -> dict[str, int]:
    return {"pid": who[0], "start_ticks": who[1]}


def record(fault_class: str, offender: tuple[int, int] | None = OFFENDER, **more: Any) -> RecordSeen:
    data = {
        "id": 1,
        "revision": 0,
        "class": fault_class,
        "offender": party(offender) if offender else None,
        "confidence": "certain" if offender else "unknown",
        "suspects": [],
        "record_ms": 1.0,
    }
    return RecordSeen(10.001, data | more)


def accusing(fault_class: str, who: tuple[int, int]) -> dict[str, Any]:
    return {"records": (record(fault_class, who),)}


def newcomer(**changes: Any) -> NewcomerSeen:
    return replace(NewcomerSeen("newcomer-0", 10.01, 10.3, (), True), **changes)


def seen(**changes: Any) -> Observation:
    """A run in mode mpsd in which nothing went wrong and no client was to be named."""
    base = Observation(
        mode="mpsd",
        survivors=tuple(survivor(pid) for pid in (101, 102, 103)),
        offenders=(OFFENDER,),
        ready_expected=3,
        fired_at=10.0,
        newcomers=(newcomer(),),
        counters={},
        leftovers=(),
    )
    return replace(base, **changes)


def stray_store(**changes: Any) -> Observation:
    """An unmapped store as it should be: clients lost, offender certain, fresh server."""
    usual = {
        "survivors": tuple(lost(pid) for pid in (101, 102, 103)),
        "records": (record("mmu-invalid-address"),),
        "fresh_ms": 30.0,
    }
    return seen(**(usual | changes))


def judge(fault: Fault, what: Observation, *, bars: bool = False) -> dict[str, Verdict]:
    return {f.law: f.verdict for f in check(fault, what, bars=bars)}


def test_stray_store_as_it_should_be_is_valid() -> None:
    assert verdict(check(by_name("store"), stray_store(), bars=True)) is Verdict.VALID


@pytest.mark.parametrize(
    ("kind", "what", "law", "expected"),
    [
        ("store", {"records": ()}, "recorded", Verdict.INVALID),
        ("store", {"records": (record("mmu-null"),)}, "class right", Verdict.INVALID),
        ("store", {"records": (record("mmu-invalid-address", INNOCENT),)}, "no innocent named", "invalid"),
        (
            "store",
            {"records": (record("mmu-invalid-address", (100, 4)),)},
            "no innocent named",
            Verdict.INVALID,
        ),
        ("store", {"records": (record("mmu-invalid-address", None),)}, "offender named", Verdict.INVALID),
        (
            "store",
            {"records": (record("mmu-invalid-address", confidence="likely"),)},
            "offender named",
            Verdict.INVALID,
        ),
        ("store", {"fresh_ms": None}, "fresh server", Verdict.INVALID),
        ("store", {"newcomers": (newcomer(refused=(807,)),)}, "newcomers served", Verdict.INVALID),
        ("store", {"newcomers": (newcomer(refused=(807,), spawned=9.9),)}, "newcomers served", "valid"),
        ("store", {"newcomers": (newcomer(first_kernel=None),)}, "newcomers served", Verdict.INVALID),
        ("store", {"newcomers": (newcomer(on_mps=False),)}, "newcomers served", Verdict.INVALID),
        ("store", {"fired_at": None}, "fault happened", Verdict.UNKNOWN),
        ("store", {"leftovers": ("process 7",)}, "nothing left", Verdict.INVALID),
        ("store", {"leftovers": None}, "nothing left", Verdict.UNKNOWN),
        ("store", {"failure": "the rig broke"}, "rig worked", Verdict.UNKNOWN),
        ("store", {"survivors": (survivor(wrong=1),)}, "results right", Verdict.INVALID),
        ("store", {"survivors": (lost(),)}, "rig worked", Verdict.UNKNOWN),
    ],
)
def test_what_goes_wrong_with_a_stray_store(
    kind: str, what: dict[str, Any], law: str, expected: Verdict
) -> None:
    assert judge(by_name(kind), stray_store(**what))[law] == expected


@pytest.mark.parametrize(
    ("kind", "what", "law", "expected"),
    [
        ("sigkill_running", {"survivors": (lost(),) * 3}, "survivors live", Verdict.INVALID),
        ("sigkill_running", {}, "survivors live", Verdict.VALID),
        ("sigkill_running@endless", {"poisoned": False}, "poison told", Verdict.INVALID),
        ("sigkill_running@endless", {"poisoned": True}, "poison told", Verdict.VALID),
        ("clean_exit", {"memory_back_ms": None}, "memory returned", Verdict.INVALID),
        ("clean_exit", {"records": (record("hang"),)}, "class right", Verdict.INVALID),
        ("other_domain", {"moved": True}, "domain stays", Verdict.INVALID),
        (
            "other_domain",
            {"records": (record("unattributed-xid", INNOCENT),)},
            "no innocent named",
            "invalid",
        ),
        ("server_death", {"records": (record("server-death"),)}, "no innocent named", Verdict.INVALID),
        ("mpsd_death", {"readopted": False}, "readopted", Verdict.INVALID),
        ("endless@free", {"evict_asked": 10.1, "evicted_at": None}, "eviction done", Verdict.INVALID),
        ("endless@free", {"evict_asked": 10.1, "evicted_at": 10.0}, "eviction done", Verdict.UNKNOWN),
        ("pid_reuse", {"innocent_alive": False}, "other process unharmed", Verdict.INVALID),
        ("pid_reuse", {"innocent_alive": True}, "other process unharmed", Verdict.INVALID),
        (
            "pid_reuse",
            {"innocent_alive": True, "answers": ({"op": "kill", "ok": False},)},
            "other process unharmed",
            Verdict.VALID,
        ),
        ("churn", {"crowd": {"wrong": 1, "failed": 0}}, "crowd right", Verdict.INVALID),
        ("churn", {"crowd": None}, "crowd right", Verdict.UNKNOWN),
        ("guard_low", {"guard_on": True, "survivors": (lost(),) * 3}, "survivors live", Verdict.INVALID),
        (
            "guard_low",
            {"guard_on": True, "records": (record("mmu-invalid-address"),)},
            "no innocent named",
            "invalid",
        ),
        ("guard_low", {"guard_on": False}, "recorded", Verdict.INVALID),
        ("guard_low@on", {"guard_on": False}, "guard laid", Verdict.INVALID),
        ("guard_low@on", {"guard_on": True, "survivors": (lost(),) * 3}, "survivors live", Verdict.INVALID),
        ("store", {"counters": {"internal_errors": 1}}, "daemon sound", Verdict.INVALID),
        ("store", {"counters": None}, "daemon sound", Verdict.UNKNOWN),
    ],
)
def test_what_goes_wrong_elsewhere(kind: str, what: dict[str, Any], law: str, expected: Verdict) -> None:
    assert judge(by_name(kind), seen(**what))[law] == expected


def test_where_the_rig_failed_only_what_was_seen_counts() -> None:
    failed = stray_store(failure="the rig broke", records=(), fresh_ms=None)
    assert verdict(check(by_name("store"), failed, bars=True)) is Verdict.UNKNOWN
    accused = stray_store(failure="the rig broke", **accusing("mmu-invalid-address", INNOCENT))
    assert verdict(check(by_name("store"), accused, bars=True)) is Verdict.INVALID


def test_suspects_without_the_offender_mislead() -> None:
    wrong = record("sm-trap", None, suspects=[party(INNOCENT)])
    right = record("sm-trap", None, suspects=[party(INNOCENT), party(OFFENDER)])
    assert judge(by_name("trap"), stray_store(records=(wrong,)))["suspects include offender"] == "invalid"
    assert judge(by_name("trap"), stray_store(records=(right,)))["suspects include offender"] == "valid"


def test_stock_that_loses_nobody_where_it_is_known_to_says_unknown() -> None:
    assert judge(by_name("store"), seen(mode="stock"))["survivors live"] is Verdict.UNKNOWN
    assert (
        judge(by_name("assert"), seen(mode="stock", survivors=(lost(),) * 3))["survivors live"] == "invalid"
    )


def test_time_laws_bind_only_with_bars() -> None:
    late = stray_store(records=(record("mmu-invalid-address", record_ms=50.0),))
    assert "record in time" not in judge(by_name("store"), late)
    assert judge(by_name("store"), late, bars=True)["record in time"] is Verdict.INVALID


def test_stall_is_counted_from_the_request_and_may_last_as_long_as_the_eviction() -> None:
    answer = {"op": "kill", "ok": True, "result": {"evict_ms": 10.0, "gone_ms": 30.0}}
    evicted = {"evict_asked": 10.1, "evicted_at": 10.13, "answers": (answer,)}
    stalled = survivor(longest=((10.0, 10.114),))
    full = seen(survivors=(stalled,) * 3, **evicted)
    assert full.stall_ms == pytest.approx(14.0)
    assert (full.evict_ms, full.gone_ms) == (10.0, pytest.approx(30.0))
    assert judge(by_name("endless@fill"), full, bars=True)["stall bounded"] is Verdict.VALID
    assert judge(by_name("endless@free"), full, bars=True)["stall bounded"] is Verdict.INVALID


def test_a_law_that_throws_says_unknown() -> None:
    def broken(fault: Fault, what: Observation) -> None:
        raise ZeroDivisionError

    (finding,) = check(by_name("store"), seen(), bars=False, laws=(broken,))
    assert finding.verdict is Verdict.UNKNOWN
    assert "failed" in finding.text


@given(st.lists(st.sampled_from(Verdict)))
def test_merging_is_the_worst_of_all(verdicts: list[Verdict]) -> None:
    merged = merge(verdicts)
    if Verdict.INVALID in verdicts:
        assert merged is Verdict.INVALID
    elif Verdict.UNKNOWN in verdicts or not verdicts:
        assert merged is Verdict.UNKNOWN
    else:
        assert merged is Verdict.VALID
    assert merge(reversed(verdicts)) is merged


@given(
    st.sampled_from(REGISTRY),
    st.sampled_from(("stock", "mpsd")),
    st.lists(st.sampled_from((survivor(), lost(), survivor(wrong=2))), min_size=3, max_size=3),
    st.lists(
        st.builds(
            record,
            st.sampled_from(("mmu-null", "hang", "sm-trap")),
            st.sampled_from((None, OFFENDER, INNOCENT)),
        ),
        max_size=2,
    ),
)
def test_an_innocent_named_or_a_wrong_result_is_never_valid(
    fault: Fault, mode: str, survivors: list[SurvivorSeen], records: list[RecordSeen]
) -> None:
    what = seen(mode=mode, survivors=tuple(survivors), records=tuple(records))
    findings = check(fault, what, bars=True)
    assert all(isinstance(f, Finding) for f in findings)
    bad = any(s.wrong for s in survivors)
    bad |= mode == "mpsd" and any(r.offender == INNOCENT for r in records)
    bad |= bool(fault.survive.get(mode)) and any(s.lost for s in survivors)
    if bad:
        assert verdict(findings) is Verdict.INVALID


SECOND = (102, 7)


def sunk(who: tuple[int, int] = OFFENDER, outcome: str = "evicted", **hit: Any) -> RecordSeen:
    told = {"zone": "sink", "outcome": outcome, "outcome_ms": 9.0, "alone": True} | hit
    return record("mmu-invalid-address", who, hit=told)


def seen_in_kmod(*records: RecordSeen, offenders: tuple[tuple[int, int], ...] = (OFFENDER,)) -> Verdict:
    seen = Observation(
        mode=kinds.KMOD,
        survivors=(survivor(),),
        offenders=offenders,
        ready_expected=1,
        fired_at=10.0,
        records=records,
        evicted_at=10.02,
        counters={},
        leftovers=(),
    )
    return verdict(check(by_name("store"), seen, bars=True))


def test_what_was_sunk_is_one_record_for_each_offender_and_his_end() -> None:
    assert seen_in_kmod(sunk()) is Verdict.VALID
    assert seen_in_kmod(sunk(), sunk(SECOND), offenders=(OFFENDER, SECOND)) is Verdict.VALID


@pytest.mark.parametrize(
    "records",
    [
        (),
        (record("mmu-invalid-address"),),
        (sunk(zone="guard"),),
        (sunk(SECOND),),
        (sunk(outcome="ended"),),
        (sunk(alone=False),),
        (sunk(), sunk()),
        (sunk(), record("death-in-flight")),
    ],
)
def test_anything_else_after_a_fault_that_should_be_sunk_is_invalid(records: tuple[RecordSeen, ...]) -> None:
    assert seen_in_kmod(*records) is Verdict.INVALID


def test_a_survivor_that_is_lost_or_an_offender_that_lives_on_is_invalid() -> None:
    seen = Observation(
        mode=kinds.KMOD, survivors=(survivor(),), offenders=(OFFENDER,), records=(sunk(),), fired_at=10.0
    )
    seen = replace(seen, counters={}, leftovers=(), ready_expected=1)
    assert verdict(check(by_name("store"), seen, bars=True)) is Verdict.INVALID
    seen = replace(seen, evicted_at=10.02, survivors=(lost(),))
    assert verdict(check(by_name("store"), seen, bars=True)) is Verdict.INVALID
