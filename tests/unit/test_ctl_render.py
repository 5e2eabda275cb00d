"""Faults, events, checks and fail-overs as text: facts that an operator must find in them."""

from __future__ import annotations

from typing import Any

import pytest

from mpsd.core.failover.restart import UNSEEN
from mpsd.ctl import eventtext, failovertext, render
from mpsd.ctl.statustext import status
from mpsd.ctl.style import Style, age, ago, size
from tests.support.statusviews import CLIENT, DOMAIN, GPU, view

OUTSIDE = {"pid": 9, "command": "rogue", "user": "eve", "memory_bytes": 1 << 20}


@pytest.mark.parametrize(
    ("mode", "driver", "line"),
    [
        ("isolate", "550.1", "on (driver 550.1, mode isolate)"),
        ("report", "550.1", "off (driver 550.1, mode report)"),
        (None, None, "off (why)"),
        (None, "550.1", "not known (why)"),
    ],
)
def test_whether_the_kernel_isolates_is_one_line(mode: str | None, driver: str | None, line: str) -> None:
    """Without contact to the module its mode is unknown: the module keeps working without mpsd."""
    shown = {"mode": mode, "driver": driver, "why_not": "why"}
    lines = status(view() | {"kernel_isolation": shown}, Style(), verbose=True)
    assert f"kernel isolation: {line}" in lines
    brief = status(view() | {"kernel_isolation": shown}, Style())
    assert (f"kernel isolation: {line}" in brief) == (driver is not None)


@pytest.mark.parametrize(
    ("domain", "opened"),
    [
        ({"private": False}, True),
        ({"private": True}, False),
        # Without a control daemon, and from a daemon of an earlier release.
        ({"private": None}, False),
        ({}, False),
        ({"private": False, "user": None, "uid": None}, False),
    ],
)
def test_an_open_domain_of_a_user_is_called_open(domain: dict[str, Any], opened: bool) -> None:
    old = {key: value for key, value in DOMAIN.items() if key != "private"}
    lines = status(view(domains=[old | domain]), Style())
    assert ("  d1: open to all users" in lines) == opened


def test_a_process_outside_mps_has_a_row_and_its_reason_is_a_line() -> None:
    told = "uid 7 may not enter /run/mpsd/d/d1, to which /run/mpsd/s/x\x1b[2J leads"
    outside = [OUTSIDE | {"reason": reason} for reason in (told, "")]
    lines = status(view(gpus=[GPU | {"not_on_mps": outside}]), Style())
    assert lines[-4:-2] == ["NOT ON MPS  USER  GPU MEM  COMMAND", "9           eve   1 MiB    rogue"]
    assert lines[-1] == "  pid 9 is not on MPS: " + told.replace("\x1b", "\\x1b")


def test_memory_kept_from_exited_clients_is_shown() -> None:
    counters = {"vault_dead_held": 2, "vault_dead_bytes": 3 << 20}
    lines = status(view(counters=counters, clients=[]), Style())
    assert "vault: 2 segments, 3 MiB kept from exited clients (mpsd-ctl vault list)" in lines
    assert not any("vault" in line for line in status(view(clients=[]), Style()))


def test_status_escapes_names_and_counts_refused_clients() -> None:
    client = CLIENT | {"command": "python train.py\x1b[2J\u202eevil"}
    text = "\n".join(
        status(view(backend="simulated", clients=[client], domains=[DOMAIN | {"refused_807": 2}]), Style())
    )
    assert "simulated GPU" in text and "  d1: refused 2 new clients (error 807)" in text
    assert "\x1b" not in text and "\u202e" not in text and "evil" in text


def test_a_limit_and_an_unusual_compute_mode_are_below_the_gpu() -> None:
    gpu = GPU | {"limits": ["active_thread_percentage 25"], "compute_mode": "exclusive_process"}
    lines = status(view(gpus=[gpu]), Style())
    assert lines[3:5] == ["  compute mode exclusive_process", "  limit: active_thread_percentage 25"]
    assert not any("compute mode" in line for line in status(view(), Style()))


def test_a_gpu_without_a_domain_says_how_to_start_one() -> None:
    assert "  no domain yet: mpsd-run or mpsd-ctl env starts one" in status(view(domains=[]), Style())


def test_zones_are_shown_and_usual_values_are_omitted() -> None:
    zones = {"managed": 12, "sparse": 0, "uncovered": 3, "far_bytes": 0}
    for changes, said in (
        ({}, "zones 12 managed/3 uncovered"),
        ({"far_bytes": 15 << 29}, "uncovered/7.5 GiB far"),
    ):
        client = CLIENT | {"guard_zones": zones | changes}
        text = "\n".join(status(view(clients=[client]), Style(), verbose=True))
        assert said in text and ("far" in text) is bool(changes)


def record(**changes: Any) -> dict[str, Any]:
    offender = {"pid": 5, "start_ticks": 1, "uid": 0, "user": "root", "command": "bad\n"}
    whole: dict[str, Any] = {
        "id": 7,
        "time": "2026-01-01T00:00:00+00:00",
        "domain": "d1",
        "class": "mmu-null",
        "title": "access through a null pointer",
        "offender": offender,
        "confidence": "certain",
        "suspects": [],
        "address": "0x10",
        "access": "write",
        "fault_type": "invalid pte",
        "lies_there": "null page",
        "evidence": [{"source": "uvm", "at_ms": 0.0, "text": "write at 0x10"}],
        "victims": [6, 8],
        "refused_807": 1,
        "action": "fix it",
    }
    return whole | changes


def test_a_fault_names_its_offender_or_its_suspects() -> None:
    text = "\n".join(render.fault(record(), Style()))
    assert "pid 5 (root, bad\\n), certain" in text and "write at 0x10 (invalid pte, null page)" in text
    unknown = record(offender=None, confidence="unknown", suspects=[record()["offender"]], address=None)
    assert "unknown; suspects: pid 5" in "\n".join(render.fault(unknown, Style()))
    assert "offender  not known" in "\n".join(render.fault(record(offender=None), Style()))


def test_a_fault_separates_lost_clients_from_moved_ones() -> None:
    row = {
        "pid": 9,
        "start_ticks": 1,
        "uid": 0,
        "user": "root",
        "command": "train",
        "pause_ms": 41.4,
        "why": "",
    }
    late = row | {"pid": 10, "pause_ms": None}
    short = row | {"pid": 11, "why": "work in flight may be missing: a\ncopy"}
    text = render.fault(record(moved=[row, late, short]), Style())
    assert "  lost      6, 8" in text
    assert [line for line in text if line.startswith("  moved")] == [
        "  moved     pid 9 (root, train), paused 41 ms",
        "  moved     pid 10 (root, train), it has not reported its pause",
        "  moved     pid 11 (root, train), paused 41 ms; work in flight may be missing: a\\ncopy",
    ]
    # A record of an earlier release has no such key.
    assert not any(line.startswith("  moved") for line in render.fault(record(), Style()))


def test_a_process_named_by_the_kernel_log_is_shown_as_such() -> None:
    logged = {"pid": 4242, "start_ticks": None, "uid": None, "user": None, "command": "python"}
    text = render.fault(record(offender=logged, confidence="likely", domain=None), Style())
    assert "  offender  pid 4242 (python, as the kernel log names it), likely" in text


def test_events_are_one_line_each() -> None:
    ended = {"seq": 4, "kind": "client-ended", "at": 1.0, "pid": 9}
    assert eventtext.event(ended) == "4 1970-01-01T00:00:01.000+00:00 client-ended pid=9"
    drained = {"seq": 4, "kind": "drain", "at": 1.0, "gpus": ["GPU-a", "GPU-b"]}
    assert eventtext.event(drained) == "4 1970-01-01T00:00:01.000+00:00 drain gpus=GPU-a,GPU-b"
    assert eventtext.event({"seq": 5, "kind": "lost", "count": 2}) == "5 lost count=2"


def test_a_fault_has_one_event_line_and_another_only_if_a_revision_says_more() -> None:
    known = eventtext.Records()
    unknown = record(offender=None, confidence="unknown", suspects=[record()["offender"]])
    revisions = [unknown, unknown | {"refused_807": 5}, record(), record() | {"revision": 4}]
    events = [{"seq": 3 + n, "kind": "fault", **revision} for n, revision in enumerate(revisions)]
    assert [known.line(seen) for seen in events] == [
        "3 fault #7 mmu-null in d1: 1 suspect, unknown",
        None,
        "5 fault-revised #7 mmu-null in d1: pid 5 (root, bad\\n), certain",
        None,
    ]
    assert known.line(events[0] | {"id": 8, "domain": None}) == (
        "3 fault #8 mmu-null in the device: 1 suspect, unknown"
    )
    assert known.line({"seq": 9, "kind": "lost", "count": 2}) == "9 lost count=2"
    assert known.line(events[0] | {"id": 9, "at": 1.5}).startswith(
        "3 1970-01-01T00:00:01.500+00:00 fault #9 "
    )


def test_the_kept_events_have_the_newest_revision_of_each_fault() -> None:
    faults = [{"seq": n, "kind": "fault", "id": number} for n, number in enumerate((1, 2, 1))]
    moves = [{"seq": 5 + n, "kind": "failover", "id": 1} for n in range(2)]
    others = [{"seq": 3, "kind": "drain"}, {"seq": 4, "kind": "drain"}]
    assert eventtext.newest([*faults, *others, *moves]) == [faults[1], faults[2], *others, moves[1]]


def test_a_fail_over_has_one_event_line_with_its_outcomes() -> None:
    told = {"seq": 3, "kind": "failover", "id": 1, "domain": "d1", "to": "d2", "trigger": "fault", "fault": 7}
    told["clients"] = [{"outcome": "told"}, {"outcome": "told"}]
    moved = told | {"seq": 4, "clients": [{"outcome": "stayed"}, {"outcome": "moved"}]}
    planned = told | {"seq": 6, "id": 2, "to": None, "fault": None, "trigger": "drain", "clients": []}
    known = eventtext.Records()
    assert [known.line(seen) for seen in (told, told | {"revision": 2}, moved, planned)] == [
        "3 failover #1 from d1 to d2, fault #7: 2 told",
        None,
        "4 failover-revised #1 from d1 to d2, fault #7: 1 moved, 1 stayed",
        "6 failover #2 from d1 to no domain, drain: no program",
    ]


def test_a_client_that_moved_is_named_with_its_pause() -> None:
    serve = {"pid": 6, "user": "ann", "command": "serve", "pause_ms": 12.4, "why": ""}
    moved = [serve, serve | {"pid": None}, serve | {"pause_ms": None, "why": "its last epoch is lost"}]
    lines = [line for line in render.fault(record(moved=moved), Style()) if "moved" in line]
    assert lines == [
        "  moved     pid 6 (ann, serve), paused 12 ms",
        "  moved     another user's client, paused 12 ms",
        "  moved     pid 6 (ann, serve), it has not reported its pause; its last epoch is lost",
    ]
    assert not any("moved" in line for line in render.fault(record(), Style()))
    assert "  lost      6, 8" in render.fault(record(), Style())


def test_checks_carry_their_remedy_only_where_it_is_needed() -> None:
    rows = [
        {"name": "driver", "ok": True, "finding": "580", "remedy": "none"},
        {"name": "yama", "ok": False, "finding": "scope 3", "remedy": "lower it"},
    ]
    lines = render.checks(rows, Style())
    assert lines == ["ok  driver: 580", "NO  yama: scope 3", "      remedy: lower it"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (512, "512 B"), (1 << 20, "1 MiB"), (3 << 30, "3 GiB"), (0, "0"), (29 << 28, "7.2 GiB")],
)
def test_sizes(value: int | None, shown: str) -> None:
    assert size(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(None, "-"), (5.4, "5s"), (65, "1m05s"), (3700, "1h01m"), (90000, "1d01h")]
)
def test_ages(seconds: float | None, shown: str) -> None:
    assert age(seconds) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (-3.0, "0 s ago"),
        (59.9, "59 s ago"),
        (60, "1 min ago"),
        (7199, "1 h ago"),
        (86400, "1 day ago"),
        (200000, "2 days ago"),
    ],
)
def test_times_in_the_past(seconds: float, shown: str) -> None:
    assert ago(seconds) == shown


def test_a_fail_over_record_of_an_earlier_version_can_be_read() -> None:
    entry = {"pid": 7, "outcome": "moved", "command": "serve", "suspect": True, "why": ""}
    entry |= {"held_ms": 1.0, "fence_ms": 2.0, "first_ms": 3.0, "restored_bytes": 4, "replayed": 5}
    times = {"decision_ms": 0.1, "sent_ms": None, "time": "then", "trigger": "fault", "planned": False}
    row = {"id": 1, "domain": "d1", "to": "d2", "generation": 2, "fault": 3, **times, "clients": [entry]}
    assert failovertext.record(row)[-1].endswith("5 launches replayed")
    new = {**entry, "turn_ms": 6.0, "done_ms": 8.0}
    assert (
        "its turn began after 6.000 ms; its replay ended after 8.000 ms"
        in failovertext.record({**row, "clients": [new]})[-1]
    )
    planned = {**row, "planned": True}
    assert failovertext.record({**planned, "trigger": "drain"})[0].endswith("planned, fault #3")
    assert "does not end in it, fault #3" in failovertext.record({**planned, "trigger": "poison"})[0]
    (found,) = failovertext.record({**row, "clients": [{**entry, "whose": "own"}]})[2:]
    assert "a suspect, found the faulting instruction in its own code: calls held" in found
    unseen = {**row, "trigger": UNSEEN, "clients": [{**entry, "held_ms": None}]}
    head, only = failovertext.record(unseen)
    assert (
        "to d2 (generation 2), while mpsd did not run" in head
        and only == "  moved     pid 7 (serve), a suspect"
    )
