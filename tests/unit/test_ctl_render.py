"""Status, faults and events as text: what an operator must be able to read off them."""

from __future__ import annotations

from typing import Any

import pytest

from mpsd.ctl import failovertext, render
from mpsd.ctl.render import Style

GPU = {
    "index": 0,
    "uuid": "GPU-a",
    "name": "NVIDIA H200",
    "memory_used_bytes": 3 << 30,
    "memory_total_bytes": 140 << 30,
    "compute_mode": "default",
    "not_on_mps": [{"pid": 9, "command": "rogue", "user": "eve", "memory_bytes": 1 << 20}],
    "limits": ["active_thread_percentage 25"],
}
DOMAIN = {
    "id": "d1",
    "gpus": ["GPU-a"],
    "uid": 1000,
    "user": "ann",
    "role": "active",
    "state": "active",
    "control_pid": 10,
    "server_pid": 11,
    "uptime_s": 3700.0,
    "clients": 1,
    "clients_limit": 48,
    "last_fault": 3,
    "refused_807": 2,
    "problem": "",
    "reach": "a fault here takes the clients of user ann on one GPU",
}
CLIENT = {
    "domain": "d1",
    "pid": 4711,
    "user": "ann",
    "state": "attached",
    "memory_bytes": 2 << 30,
    "age_s": 61.0,
    "protections": ["guard:low 8052 MiB (silent)", "lease", "tracker"],
    "command": "python train.py\x1b[2J\u202eevil",
    "problem": "",
}
DEAD = {
    "pid": 4712,
    "user": "ann",
    "domain": "d1",
    "state": "lingering",
    "held_gpu_bytes": None,
    "held_host_bytes": None,
    "since_s": 1.5,
    "command": "python",
    "pending": "kernel 0x203037f34",
}


def view(**changes: Any) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "version": "0.1.0",
        "backend": "simulated",
        "pid": 1,
        "uptime_s": 5.0,
        "draining": False,
        "drained_gpus": [],
        "problems": [],
        "gpus": [GPU],
        "domains": [DOMAIN],
        "clients": [CLIENT],
        "dead": [DEAD],
    }
    return whole | changes


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
    """Of a kernel part that is lost it is not known: it goes on by itself."""
    shown = {"mode": mode, "driver": driver, "why_not": "why"}
    lines = render.status(view() | {"kernel_isolation": shown}, Style())
    assert f"kernel isolation: {line}" in lines


def test_a_program_has_one_row_for_all_its_contexts_of_a_kind() -> None:
    """Not where one has a problem; and who is somebody else's is not known to be one."""
    left = {"failover": {"here": False}}
    mine = [
        CLIENT,
        {**CLIENT, "age_s": 3.0},
        {**CLIENT, **left},
        {**CLIENT, **left, "protections": ["spare"]},
    ]
    mine.append({**CLIENT, "protections": [], "problem": "no lease"})
    hidden = {**CLIENT, "pid": None, "command": "?"}
    text = render.status(view(clients=[*mine, hidden, hidden], dead=[]), Style())
    rows = [line for line in text if "train.py" in line or "?" in line.split()[-1:]]
    assert [("4711" in row, "waiting" in row, "no lease" in row) for row in rows] == [
        (True, False, False),
        (True, True, False),
        (True, False, True),
        (False, False, False),
        (False, False, False),
    ]


def test_what_the_vault_keeps_of_the_dead_is_shown() -> None:
    counters = {"vault_dead_held": 2, "vault_dead_bytes": 3 << 20}
    text = render.status(view(counters=counters, clients=[], dead=[]), Style())
    assert "the vault keeps 2 pieces, 3 MiB, of the dead: mpsd-ctl vault list" in text
    assert not any("vault" in line for line in render.status(view(clients=[], dead=[]), Style()))


def test_status_shows_everything_and_escapes_names() -> None:
    text = "\n".join(render.status(view(), Style()))
    for expected in (
        "simulated GPU",
        "3.0 GiB of 140.0 GiB",
        "d1 active active, ann, control 10, server 11, up 1h01m, clients 1/48, last fault #3, 2 refused",
        "guard:low 8052 MiB (silent), lease, tracker",
        "kernel 0x203037f34",
        "NOT ON MPS",
        "rogue",
    ):
        assert expected in text
    assert "\x1b" not in text and "\u202e" not in text


def test_zones_are_shown_with_what_is_not_usual_with_them() -> None:
    zones = {"managed": 12, "sparse": 0, "uncovered": 3, "far_bytes": 0}
    for changes, said in (
        ({}, "zones 12 managed/3 uncovered"),
        ({"far_bytes": 15 << 29}, "uncovered/7.5 GiB far"),
    ):
        client = CLIENT | {"guard_zones": zones | changes}
        text = "\n".join(render.status(view() | {"clients": [client]}, Style()))
        assert said in text and ("far" in text) is bool(changes)


def test_colour_is_a_choice_and_headers_can_be_left_out() -> None:
    assert "\x1b[32mactive" in "\n".join(render.status(view(), Style(colour=True)))
    assert "PROTECTIONS" not in "\n".join(render.status(view(), Style(), headers=False))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0),
        ({"problems": ["outer guard is silent: low"]}, 0),
        ({"problems": ["the kernel log is not readable"]}, 10),
        ({"domains": [DOMAIN | {"state": "faulted"}]}, 11),
        ({"domains": [DOMAIN | {"state": "poisoned"}]}, 10),
        ({"domains": [DOMAIN | {"state": "faulted", "role": "old"}]}, 0),
        ({"clients": [CLIENT | {"state": "unprotected"}]}, 10),
    ],
)
def test_exit_status_of_a_status(changes: dict[str, Any], expected: int) -> None:
    assert render.health(view(**changes)) == expected


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


def test_a_fault_names_its_offender_or_says_who_could_have_been_it() -> None:
    text = "\n".join(render.fault(record(), Style()))
    assert "pid 5 (root, bad\\n), certain" in text and "write at 0x10 (invalid pte, null page)" in text
    unknown = record(offender=None, confidence="unknown", suspects=[record()["offender"]], address=None)
    assert "unknown; suspects: pid 5" in "\n".join(render.fault(unknown, Style()))
    assert "none named" in "\n".join(render.fault(record(offender=None), Style()))


def test_events_are_one_line_each() -> None:
    assert render.event({"seq": 3, "kind": "fault", **record()}).startswith(
        "3 fault #7 mmu-null in d1: pid 5"
    )
    assert render.event({"seq": 4, "kind": "client-ended", "at": 1.0, "pid": 9}) == "4 client-ended pid=9"
    drained = {"seq": 4, "kind": "drain", "at": 1.0, "gpus": ["GPU-a", "GPU-b"]}
    assert render.event(drained) == "4 drain gpus=GPU-a,GPU-b"
    assert render.event({"seq": 5, "kind": "lost", "count": 2}) == "5 lost count=2"


def test_checks_carry_their_remedy_only_where_it_is_needed() -> None:
    rows = [
        {"name": "driver", "ok": True, "finding": "580", "remedy": "none"},
        {"name": "yama", "ok": False, "finding": "scope 3", "remedy": "lower it"},
    ]
    lines = render.checks(rows, Style())
    assert lines == ["ok  driver: 580", "NO  yama: scope 3", "      remedy: lower it"]


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "-"), (512, "512 B"), (1 << 20, "1 MiB"), (3 << 30, "3.0 GiB")]
)
def test_sizes(value: int | None, shown: str) -> None:
    assert render.size(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(None, "-"), (5.4, "5s"), (65, "1m05s"), (3700, "1h01m"), (90000, "1d01h")]
)
def test_ages(seconds: float | None, shown: str) -> None:
    assert render.age(seconds) == shown


def test_a_fail_over_that_an_earlier_mpsd_wrote_down_can_be_read() -> None:
    fate = {"pid": 7, "outcome": "moved", "command": "serve", "suspect": True, "why": ""}
    fate |= {"held_ms": 1.0, "fence_ms": 2.0, "first_ms": 3.0, "restored_bytes": 4, "replayed": 5}
    times = {"decision_ms": 0.1, "sent_ms": None, "time": "then", "trigger": "fault", "planned": False}
    row = {"id": 1, "domain": "d1", "to": "d2", "generation": 2, "fault": 3, **times, "clients": [fate]}
    assert failovertext.record(row)[-1].endswith("5 launches done again")
    new = {**fate, "turn_ms": 6.0, "done_ms": 8.0}
    assert (
        "its turn came after 6.000 ms, and was over after 8.000"
        in failovertext.record({**row, "clients": [new]})[-1]
    )
    planned = {**row, "planned": True}
    assert failovertext.record({**planned, "trigger": "drain"})[0].endswith("planned, fault #3")
    assert "does not end there, fault #3" in failovertext.record({**planned, "trigger": "poison"})[0]
    (found,) = failovertext.record({**row, "clients": [{**fate, "whose": "own"}]})[2:]
    assert "a suspect, found that the exception was in its own code: held" in found
