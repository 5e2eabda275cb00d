"""The newest fault of a domain, a slot and a GPU, from the records of a journal."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mpsd.api import lastfaults
from mpsd.api.lastfaults import LastFaults, fault_view, offender_of
from mpsd.base.model import ProcessInstance

OFFENDER = {"pid": 7, "start_ticks": 70, "uid": 0, "user": "root", "command": "bad"}


def record(number: int, domain: str | None = "d1", slot: str | None = "s1", **changes: Any) -> dict[str, Any]:
    whole = {
        "id": number,
        "revision": 1,
        "time": "2026-11-29T12:00:00.000+00:00",
        "domain": domain,
        "slot": slot,
        "gpus": ["GPU-a"],
        "class": "sm-trap",
        "offender": OFFENDER,
        "confidence": "certain",
        "suspects": [],
        "hit": None,
    }
    return whole | changes


def number(found: Any) -> int | None:
    return None if found is None else int(found["id"])


def test_a_slot_keeps_the_fault_of_a_domain_that_has_gone() -> None:
    faults = LastFaults([record(1), record(2, "d2"), record(3, "d9", "s2")])
    assert number(faults.of_slot("s1", ["d3"], ["GPU-a"])) == 2
    assert [number(faults.of_domain(name)) for name in ("d1", "d2", "d3")] == [1, 2, None]
    assert number(faults.of_slot("s3", [], ["GPU-a"])) is None


def test_a_record_of_an_earlier_release_is_found_by_its_domain() -> None:
    old = {key: value for key, value in record(1).items() if key != "slot"}
    faults = LastFaults([old])
    assert number(faults.of_slot("s1", ["d1", "d2"], ["GPU-a"])) == 1
    assert number(faults.of_slot("s1", ["d2"], ["GPU-a"])) is None


def test_a_device_fault_is_that_of_every_slot_of_its_gpu() -> None:
    lost = record(4, None, None, **{"class": "device-bus"})
    outside = record(5, None, None, **{"class": "unattributed-xid"})
    faults = LastFaults([record(3), lost, outside])
    assert number(faults.of_slot("s1", ["d1"], ["GPU-a"])) == 4
    assert number(faults.of_slot("s1", ["d1"], ["GPU-b"])) == 3
    assert number(faults.of_slot("s7", [], ["GPU-b", "GPU-a"])) == 4


def test_a_guard_hit_took_no_domain() -> None:
    faults = LastFaults([record(1), record(2, hit={"outcome": "evicted"})])
    assert number(faults.of_domain("d1")) == 2 and number(faults.that_took("d1")) == 1


def test_the_order_of_records_is_no_matter_and_a_revision_replaces_the_record() -> None:
    records = [record(n, f"d{n % 3}", f"s{n % 2}") for n in range(1, 30)]
    random.Random(1).shuffle(records)
    faults = LastFaults(records)
    assert [number(faults.of_slot(f"s{n}", [], [])) for n in range(2)] == [28, 29]
    assert [number(faults.of_domain(f"d{n}")) for n in range(3)] == [27, 28, 29]
    faults.note(record(29, "d2", "s1", revision=2, confidence="likely"))
    found = faults.of_domain("d2")
    assert found is not None and found["confidence"] == "likely"


def test_the_index_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lastfaults, "KEPT", 6)
    faults = LastFaults(record(n, f"d{n}") for n in range(1, 10))
    assert number(faults.of_domain("d1")) is None
    assert number(faults.of_domain("d9")) == number(faults.of_slot("s1", [], [])) == 9


@pytest.mark.parametrize(
    ("changes", "runs", "outcome"),
    [
        ({}, True, "runs"),
        ({}, False, "ended"),
        ({"hit": {"outcome": "evicted"}}, False, "evicted"),
        ({"hit": {"outcome": "being evicted"}}, True, "being evicted"),
        # mpsd was killed before it wrote the end of the eviction.
        ({"hit": {"outcome": "being evicted"}}, False, "ended"),
        ({"hit": {"outcome": "absorbed"}}, True, "absorbed"),
        ({"offender": None}, False, ""),
        # The kernel log names a process without its start time: it may be another one.
        ({"offender": OFFENDER | {"start_ticks": None}}, False, ""),
    ],
)
def test_the_outcome_for_the_offender(changes: dict[str, Any], runs: bool, outcome: str) -> None:
    at = 1795953610.0
    row = fault_view(record(4, **changes), at, runs=runs)
    assert (row["outcome"], row["age_s"]) == (outcome, 10.0)
    # The wall clock may have been set back since.
    assert fault_view(record(4, **changes), at - 60, runs=runs)["age_s"] == 0.0


def test_the_offender_is_a_process_with_its_start_time() -> None:
    assert offender_of(record(1)) == ProcessInstance(7, 70)
    assert offender_of(record(1, offender=None)) is None
    assert offender_of(record(1, offender=OFFENDER | {"start_ticks": None})) is None
