"""Status as text, line by line: widths, numbers of clients, faulted, unreachable and drained domains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mpsd.ctl.statustext import status
from mpsd.ctl.style import Style
from tests.support.statusviews import (
    CLIENT,
    DOMAIN,
    EXITED,
    GIB,
    GPU,
    STANDBY,
    Row,
    client,
    fault,
    three_clients,
    view,
)

ROOT = Path(__file__).resolve().parents[2]
SERVERS = [
    client(
        5000 + i, "guard", "snapshot needs 14 GiB", memory_bytes=GIB, command="python serve.py --port 8000"
    )
    for i in range(57)
]
SECOND = STANDBY | {"role": "active", "state": "active", "clients": 1}
REMOVED = "the control socket of d1 was removed"
UNREACHABLE = {
    "code": "domain-unreachable",
    "subject": "d1",
    "text": f"domain d1 of root with 3 clients cannot be reached: {REMOVED}",
    "remedy": "restart its clients when they may stop",
    "degrades": True,
}
VIEWS: dict[str, Row] = {
    "three clients": view(),
    "no clients": view(
        clients=[],
        domains=[DOMAIN | {"clients": 0, "last_fault": None}, STANDBY],
        slots=[{"id": "a-u0", "fault": None}],
    ),
    "sixty clients": view(clients=[*three_clients(), *SERVERS], domains=[DOMAIN | {"clients": 60}, STANDBY]),
    "faulted": view(
        domains=[DOMAIN | {"state": "faulted", "role": "old", "clients": 1, "fault": fault()}, SECOND],
        clients=[client(4702, "none", "domain d1 faulted", lost=True), client(4710, domain="d2")],
    ),
    "unreachable": view(
        domains=[DOMAIN | {"state": "retired", "role": "old", "problem": REMOVED}, SECOND | {"clients": 0}],
        conditions=[UNREACHABLE],
        problems=[UNREACHABLE["text"]],
    ),
    "drained": view(draining=True, drained_gpus=["GPU-a"]),
}


def lines(name: str, **style: Any) -> list[str]:
    return status(VIEWS[name], Style(**style))


GOLDEN = {
    ("three clients", 60): """\
mpsd 0.1.0, pid 1, up 5s

GPU 0  NVIDIA H200  12.4 of 140 GiB     protection: failover
DOMAIN  USER  STATE    CLIENTS  STANDBY  LAST FAULT
d1      root  serving  3        ready    #4 sm-trap, 3 min…

PID   USER  PROTECTED       GPU MEM  COST     COMMAND
4702  root  failover        8.2 GiB  1.6 GiB  python train.…
4710  root  guard (snapsh…  52 GiB   0        python serve.…
4720  root  no (started w…  1.1 GiB  0        ./legacy""",
    ("three clients", 80): """\
mpsd 0.1.0, pid 1, up 5s

GPU 0  NVIDIA H200  12.4 of 140 GiB                       protection: failover
DOMAIN  USER  STATE    CLIENTS  STANDBY  LAST FAULT
d1      root  serving  3        ready    #4 sm-trap, 3 min ago, pid 4711 evicted

PID   USER  PROTECTED                      GPU MEM  COST     COMMAND
4702  root  failover                       8.2 GiB  1.6 GiB  python train.py
4710  root  guard (snapshot needs 14 GiB)  52 GiB   0        python serve.py
4720  root  no (started without mpsd-run)  1.1 GiB  0        ./legacy""",
    ("three clients", 0): """\
mpsd 0.1.0, pid 1, up 5s

GPU 0  NVIDIA H200  12.4 of 140 GiB                       protection: failover
DOMAIN  USER  STATE    CLIENTS  STANDBY  LAST FAULT
d1      root  serving  3        ready    #4 sm-trap, 3 min ago, pid 4711 evicted

PID   USER  PROTECTED                      GPU MEM  COST     COMMAND
4702  root  failover                       8.2 GiB  1.6 GiB  python train.py
4710  root  guard (snapshot needs 14 GiB)  52 GiB   0        python serve.py
4720  root  no (started without mpsd-run)  1.1 GiB  0        ./legacy""",
    ("no clients", 60): """\
mpsd 0.1.0, pid 1, up 5s

GPU 0  NVIDIA H200  12.4 of 140 GiB     protection: failover
DOMAIN  USER  STATE    CLIENTS  STANDBY  LAST FAULT
d1      root  serving  0        ready    -

no clients""",
    ("no clients", 80): """\
mpsd 0.1.0, pid 1, up 5s

GPU 0  NVIDIA H200  12.4 of 140 GiB                       protection: failover
DOMAIN  USER  STATE    CLIENTS  STANDBY  LAST FAULT
d1      root  serving  0        ready    -

no clients""",
    ("no clients", 0): """\
mpsd 0.1.0, pid 1, up 5s

GPU 0  NVIDIA H200  12.4 of 140 GiB                       protection: failover
DOMAIN  USER  STATE    CLIENTS  STANDBY  LAST FAULT
d1      root  serving  0        ready    -

no clients""",
    ("sixty clients", 60): """\
mpsd 0.1.0, pid 1, up 5s

GPU 0  NVIDIA H200  12.4 of 140 GiB     protection: failover
DOMAIN  USER  STATE    CLIENTS  STANDBY  LAST FAULT
d1      root  serving  60       ready    #4 sm-trap, 3 min…

PID         USER  PROTECTED    GPU MEM  COST     COMMAND
4702        root  failover     8.2 GiB  1.6 GiB  python tra…
4710        root  guard (sna…  52 GiB   0        python ser…
4720        root  no (starte…  1.1 GiB  0        ./legacy
57 clients  root  guard (sna…  57 GiB   0        python ser…
  equal clients share a row; mpsd-ctl status --all lists
    each one""",
    ("sixty clients", 80): """\
mpsd 0.1.0, pid 1, up 5s

GPU 0  NVIDIA H200  12.4 of 140 GiB                       protection: failover
DOMAIN  USER  STATE    CLIENTS  STANDBY  LAST FAULT
d1      root  serving  60       ready    #4 sm-trap, 3 min ago, pid 4711 evicted

PID         USER  PROTECTED              GPU MEM  COST     COMMAND
4702        root  failover               8.2 GiB  1.6 GiB  python train.py
4710        root  guard (snapshot need…  52 GiB   0        python serve.py
4720        root  no (started without…   1.1 GiB  0        ./legacy
57 clients  root  guard (snapshot need…  57 GiB   0        python serve.py --po…
  equal clients share a row; mpsd-ctl status --all lists each one""",
    ("sixty clients", 0): """\
mpsd 0.1.0, pid 1, up 5s

GPU 0  NVIDIA H200  12.4 of 140 GiB                       protection: failover
DOMAIN  USER  STATE    CLIENTS  STANDBY  LAST FAULT
d1      root  serving  60       ready    #4 sm-trap, 3 min ago, pid 4711 evicted

PID         USER  PROTECTED                      GPU MEM  COST     COMMAND
4702        root  failover                       8.2 GiB  1.6 GiB  python train.py
4710        root  guard (snapshot needs 14 GiB)  52 GiB   0        python serve.py
4720        root  no (started without mpsd-run)  1.1 GiB  0        ./legacy
57 clients  root  guard (snapshot needs 14 GiB)  57 GiB   0        python serve.py --port 8000
  equal clients share a row; mpsd-ctl status --all lists each one""",
    ("faulted", 60): """\
mpsd 0.1.0, pid 1, up 5s

GPU 0  NVIDIA H200  12.4 of 140 GiB     protection: failover
DOMAIN  USER  STATE    CLIENTS  STANDBY  LAST FAULT
d1      root  faulted  1        -        #4 sm-trap, 3 min…
d2      root  serving  1        none     #4 sm-trap in d1,…

PID   USER  DOMAIN  PROTECTED     GPU MEM  COST  COMMAND
4702  root  d1      lost (resta…  8.2 GiB  0     python tra…
4710  root  d2      failover      8.2 GiB  0     python tra…""",
    ("faulted", 80): """\
mpsd 0.1.0, pid 1, up 5s

GPU 0  NVIDIA H200  12.4 of 140 GiB                       protection: failover
DOMAIN  USER  STATE    CLIENTS  STANDBY  LAST FAULT
d1      root  faulted  1        -        #4 sm-trap, 3 min ago, pid 4711 evicted
d2      root  serving  1        none     #4 sm-trap in d1, 3 min ago, pid 4711…

PID   USER  DOMAIN  PROTECTED          GPU MEM  COST  COMMAND
4702  root  d1      lost (restart it)  8.2 GiB  0     python train.py
4710  root  d2      failover           8.2 GiB  0     python train.py""",
    ("faulted", 0): """\
mpsd 0.1.0, pid 1, up 5s

GPU 0  NVIDIA H200  12.4 of 140 GiB                       protection: failover
DOMAIN  USER  STATE    CLIENTS  STANDBY  LAST FAULT
d1      root  faulted  1        -        #4 sm-trap, 3 min ago, pid 4711 evicted
d2      root  serving  1        none     #4 sm-trap in d1, 3 min ago, pid 4711 evicted

PID   USER  DOMAIN  PROTECTED          GPU MEM  COST  COMMAND
4702  root  d1      lost (restart it)  8.2 GiB  0     python train.py
4710  root  d2      failover           8.2 GiB  0     python train.py""",
    ("unreachable", 60): """\
mpsd 0.1.0, pid 1, up 5s
degraded: domain d1 of root with 3 clients cannot be
  reached: the control socket of d1 was removed
  remedy: restart its clients when they may stop

GPU 0  NVIDIA H200  12.4 of 140 GiB     protection: failover
DOMAIN  USER  STATE        CLIENTS  STANDBY  LAST FAULT
d1      root  unreachable  3        -        #4
d2      root  serving      0        none     #4 sm-trap in…

PID   USER  PROTECTED       GPU MEM  COST     COMMAND
4702  root  failover        8.2 GiB  1.6 GiB  python train.…
4710  root  guard (snapsh…  52 GiB   0        python serve.…
4720  root  no (started w…  1.1 GiB  0        ./legacy""",
    ("unreachable", 80): """\
mpsd 0.1.0, pid 1, up 5s
degraded: domain d1 of root with 3 clients cannot be reached: the control socket
  of d1 was removed
  remedy: restart its clients when they may stop

GPU 0  NVIDIA H200  12.4 of 140 GiB                       protection: failover
DOMAIN  USER  STATE        CLIENTS  STANDBY  LAST FAULT
d1      root  unreachable  3        -        #4
d2      root  serving      0        none     #4 sm-trap in d1, 3 min ago, pid 4…

PID   USER  PROTECTED                      GPU MEM  COST     COMMAND
4702  root  failover                       8.2 GiB  1.6 GiB  python train.py
4710  root  guard (snapshot needs 14 GiB)  52 GiB   0        python serve.py
4720  root  no (started without mpsd-run)  1.1 GiB  0        ./legacy""",
    ("unreachable", 0): """\
mpsd 0.1.0, pid 1, up 5s
degraded: domain d1 of root with 3 clients cannot be reached: the control socket of d1 was removed
  remedy: restart its clients when they may stop

GPU 0  NVIDIA H200  12.4 of 140 GiB                       protection: failover
DOMAIN  USER  STATE        CLIENTS  STANDBY  LAST FAULT
d1      root  unreachable  3        -        #4
d2      root  serving      0        none     #4 sm-trap in d1, 3 min ago, pid 4711 evicted

PID   USER  PROTECTED                      GPU MEM  COST     COMMAND
4702  root  failover                       8.2 GiB  1.6 GiB  python train.py
4710  root  guard (snapshot needs 14 GiB)  52 GiB   0        python serve.py
4720  root  no (started without mpsd-run)  1.1 GiB  0        ./legacy""",
    ("drained", 60): """\
mpsd 0.1.0, pid 1, up 5s
drained: GPU 0

GPU 0  NVIDIA H200  12.4 of 140 GiB     protection: failover
DOMAIN  USER  STATE    CLIENTS  STANDBY  LAST FAULT
d1      root  drained  3        ready    #4 sm-trap, 3 min…

PID   USER  PROTECTED       GPU MEM  COST     COMMAND
4702  root  failover        8.2 GiB  1.6 GiB  python train.…
4710  root  guard (snapsh…  52 GiB   0        python serve.…
4720  root  no (started w…  1.1 GiB  0        ./legacy""",
    ("drained", 80): """\
mpsd 0.1.0, pid 1, up 5s
drained: GPU 0

GPU 0  NVIDIA H200  12.4 of 140 GiB                       protection: failover
DOMAIN  USER  STATE    CLIENTS  STANDBY  LAST FAULT
d1      root  drained  3        ready    #4 sm-trap, 3 min ago, pid 4711 evicted

PID   USER  PROTECTED                      GPU MEM  COST     COMMAND
4702  root  failover                       8.2 GiB  1.6 GiB  python train.py
4710  root  guard (snapshot needs 14 GiB)  52 GiB   0        python serve.py
4720  root  no (started without mpsd-run)  1.1 GiB  0        ./legacy""",
    ("drained", 0): """\
mpsd 0.1.0, pid 1, up 5s
drained: GPU 0

GPU 0  NVIDIA H200  12.4 of 140 GiB                       protection: failover
DOMAIN  USER  STATE    CLIENTS  STANDBY  LAST FAULT
d1      root  drained  3        ready    #4 sm-trap, 3 min ago, pid 4711 evicted

PID   USER  PROTECTED                      GPU MEM  COST     COMMAND
4702  root  failover                       8.2 GiB  1.6 GiB  python train.py
4710  root  guard (snapshot needs 14 GiB)  52 GiB   0        python serve.py
4720  root  no (started without mpsd-run)  1.1 GiB  0        ./legacy""",
}


@pytest.mark.parametrize(("name", "width"), GOLDEN)
def test_status_line_by_line(name: str, width: int) -> None:
    assert "\n".join(lines(name, width=width)) == GOLDEN[name, width]


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("width", [20, 40, 60, 61, 79, 80, 100, 200])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_no_line_is_wider_than_the_terminal(name: str, width: int, ascii_only: bool) -> None:
    """A line that lost text has a mark. ASCII terminals get one that they can show."""
    mark = "..." if ascii_only else "…"
    whole = " ".join(" ".join(lines(name)).split())
    for line in lines(name, width=width, ascii_only=ascii_only):
        assert len(line) <= width
        assert line.isascii() or not ascii_only
        assert mark in line or " ".join(line.split()) in whole


def test_sixty_clients_fit_a_screen() -> None:
    assert len(lines("sixty clients", width=80)) <= 24
    every = status(VIEWS["sixty clients"], Style(width=80), every=True)
    assert sum("python serve.py" in line for line in every) == 58
    assert not any("share a row" in line for line in every)


def test_nothing_is_cut_in_a_pipe() -> None:
    command = "python " + "x" * 900
    (row,) = [line for line in status(view(clients=[client(5, command=command)]), Style()) if "xxx" in line]
    assert row.endswith(command)


def test_wide_characters_are_counted_as_the_terminal_shows_them() -> None:
    shown = status(view(clients=[client(5, command="訓練" * 40)]), Style(width=60))
    (row,) = [line for line in shown if "訓練" in line]
    wide = sum(2 if c in "訓練" else 1 for c in row)
    assert row.endswith("…") and 58 <= wide <= 60


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"protected": {"level": "failover", "why": "", "cost_bytes": 0}}, "failover"),
        ({"protected": {"level": "guard", "why": "", "cost_bytes": 0}}, "guard"),
        ({"protected": {"level": "guard", "why": "needs 14 GiB", "cost_bytes": 0}}, "guard (needs 14 GiB)"),
        ({"protected": {"level": "observe", "why": "", "cost_bytes": 0}}, "observe"),
        ({"protected": {"level": "observe", "why": "no proxy", "cost_bytes": None}}, "no (no proxy)"),
        ({"protected": {"level": "none", "why": "no lease", "cost_bytes": None}}, "no (no lease)"),
        (
            {"protected": {"level": "none", "why": "d1 faulted", "cost_bytes": 0}, "lost": True},
            "lost (restart it)",
        ),
        ({"state": "terminating"}, "being evicted"),
    ],
)
def test_the_cell_protected(changes: Row, text: str) -> None:
    shown = status(view(clients=[CLIENT | changes]), Style())
    assert shown[-1].startswith(f"4702  root  {text}  ")


def test_an_earlier_daemon_does_not_say_whether_a_client_is_protected() -> None:
    old = {key: value for key, value in CLIENT.items() if key not in ("protected", "lost")}
    whole = view(clients=[old], gpus=[{k: v for k, v in GPU.items() if k != "protection"}])
    for key in ("conditions", "slots"):
        del whole[key]
    shown = status(whole, Style())
    assert shown[-1] == "4702  root  -          8.2 GiB  -     python train.py"
    assert "GPU 0  NVIDIA H200  12.4 of 140 GiB" in shown
    assert any(line.split() == ["d1", "root", "serving", "3", "ready", "#4"] for line in shown)


def test_why_the_level_is_not_higher_is_below_the_gpu() -> None:
    protection = {"level": "observe", "why": "driver 999 is not proven", "remedy": 'set protect = "failover"'}
    shown = status(view(gpus=[GPU | {"protection": protection}]), Style(width=60))
    at = next(number for number, line in enumerate(shown) if line.endswith("protection: observe"))
    assert shown[at + 1 : at + 3] == [
        '  driver 999 is not proven; set protect = "failover"',
        "DOMAIN  USER  STATE    CLIENTS  STANDBY  LAST FAULT",
    ]


def test_a_condition_is_shown_once_and_a_problem_without_one_too() -> None:
    silent = {"code": "x", "text": "outer guard is silent", "remedy": "use mpsd-run", "degrades": False}
    texts = [UNREACHABLE["text"], silent["text"], "a journal is damaged"]
    shown = status(view(conditions=[UNREACHABLE, silent], problems=texts), Style())
    assert shown[1:5] == [
        f"degraded: {UNREACHABLE['text']}",
        "  remedy: restart its clients when they may stop",
        "note: outer guard is silent",
        "note: a journal is damaged",
    ]
    assert "  remedy: use mpsd-run" in status(view(conditions=[silent]), Style(), verbose=True)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "#4 sm-trap, 3 min ago, pid 4711 evicted"),
        ({"outcome": "runs"}, "#4 sm-trap, 3 min ago, pid 4711 still runs"),
        ({"outcome": "ended", "confidence": "likely"}, "#4 sm-trap, 3 min ago, likely pid 4711 ended"),
        ({"offender": None, "suspects": 1}, "#4 sm-trap, 3 min ago, 1 suspect"),
        ({"offender": None, "suspects": 3}, "#4 sm-trap, 3 min ago, 3 suspects"),
        ({"offender": None}, "#4 sm-trap, 3 min ago, offender not known"),
        ({"domain": "d9", "age_s": 90000.0}, "#4 sm-trap in d9, 1 day ago, pid 4711 evicted"),
        ({"domain": None, "age_s": 7300.0}, "#4 sm-trap, 2 h ago, pid 4711 evicted"),
        ({"age_s": 4.2}, "#4 sm-trap, 4 s ago, pid 4711 evicted"),
    ],
)
def test_the_cell_last_fault(changes: Row, text: str) -> None:
    shown = status(view(slots=[{"id": "a-u0", "fault": fault(**changes)}]), Style())
    (row,) = [line for line in shown if line.startswith("d1 ")]
    assert row.endswith(f"  ready    {text}")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "serving"),
        ({"server_pid": None, "clients": 0}, "idle"),
        ({"server_pid": None, "clients": 1}, "serving"),
        ({"state": "starting", "role": "spare"}, "starting"),
        ({"state": "headless", "role": "old"}, "unreachable"),
        ({"state": "retired", "role": "old"}, "ending"),
        ({"state": "poisoned", "role": "old"}, "poisoned"),
        ({"state": "failed", "role": "old"}, "failed"),
    ],
)
def test_the_state_of_a_domain_is_one_word(changes: Row, word: str) -> None:
    (row,) = [line for line in status(view(domains=[DOMAIN | changes]), Style()) if line.startswith("d1 ")]
    assert row.split()[2] == word


def test_a_domain_is_unreachable_as_soon_as_a_condition_says_so() -> None:
    shown = status(view(conditions=[UNREACHABLE]), Style())
    assert [line.split()[2] for line in shown if line.startswith("d1 ")] == ["unreachable"]


def test_an_exited_client_has_one_row_for_all_its_contexts() -> None:
    dead = [EXITED | {"pending": f"semaphore at {n}", "domain": d} for n, d in enumerate(("d1", "d2", "d2"))]
    shown = status(view(dead=[*dead, EXITED | {"pid": 4713}]), Style())
    rows = [line for line in shown if line.startswith("471") and "lingering" in line]
    assert [row.split()[:3] for row in rows] == [["4712", "root", "d1,d2"], ["4713", "root", "d1"]]
    assert rows[0].endswith("semaphore at 0; semaphore at 1; semaphore at 2")


def test_a_program_has_one_row_for_all_its_contexts() -> None:
    """Standby contexts are its cost. `verbose` lists them; another user's programs cannot be told apart."""
    here, there = {"failover": {"here": True}}, {"failover": {"here": False}}
    contexts = [CLIENT | there | {"domain": "d2"}, CLIENT | here, CLIENT | here]
    hidden = CLIENT | {"pid": None, "command": "[another user's]"}
    whole = view(clients=[*contexts, hidden, hidden, hidden | there])
    shown = status(whole, Style())
    rows = [line for line in shown if "train.py" in line or line.endswith("another user's]")]
    assert [row.split()[0] for row in rows] == ["4702", "-", "-"]
    details = [line for line in status(whole, Style(), verbose=True) if line.startswith("pid 4702: ")]
    assert [detail.split(", ")[1] for detail in details] == ["attached", "attached", "standby"]


def test_verbose_adds_processes_mechanisms_and_standby_domains() -> None:
    text = "\n".join(status(view(), Style(), verbose=True))
    for part in (
        "  GPU-a, compute mode default",
        "d1: in use, control 10, server 11, up 1h01m, clients 3/48; a fault reaches all clients",
        "d2      root  ready",
        "pid 4702: d1, attached, 1m01s, protected: failover, guard:low 8052 MiB (silent), lease, tracker",
        "protected: guard (snapshot needs 14 GiB)",
    ):
        assert part in text
        assert part not in "\n".join(status(view(), Style()))


def test_problems_of_clients_are_below_the_table_once() -> None:
    troubled = [client(5000 + i, problem="no descriptor left") for i in range(8)]
    shown = status(view(clients=[*troubled, client(4, problem="no lease")]), Style())
    assert shown[-2:] == [
        "  pid 5000, 5001, 5002, 5003, 5004, 5005 and 2 more: no descriptor left",
        "  pid 4: no lease",
    ]


def test_colour_and_headers_are_choices() -> None:
    shown = "\n".join(status(view(), Style(colour=True)))
    assert "\x1b[32mserving" in shown and "\x1b[32mfailover" in shown and "\x1b[33mno (started" in shown
    assert "\x1b" not in "\n".join(lines("three clients"))
    bare = status(view(), Style(), headers=False)
    assert not [line for line in bare if line.startswith(("mpsd", "DOMAIN", "PID"))]
    assert len(bare) == len(lines("three clients")) - 3


def _sample(page: str) -> list[str]:
    """Return the sample of a status in a page, from the line of its GPU to the end of its block."""
    return re.findall(r"^GPU 0  .*?(?=^```)", (ROOT / page).read_text(), re.M | re.S)[0].splitlines()


def test_the_sample_of_the_readme_is_what_status_prints() -> None:
    hit = fault(id=1, age_s=7.0, offender=fault()["offender"] | {"pid": 31202}, **{"class": "guard-hit"})
    jobs = [client(pid, memory_bytes=128 << 20, command="python train.py") for pid in (31161, 31162)]
    gpu = {"name": "Simulated GPU", "memory_used_bytes": int(0.4 * GIB), "memory_total_bytes": 16 * GIB}
    shown = status(
        view(
            gpus=[GPU | gpu],
            domains=[DOMAIN | {"clients": 2}, STANDBY],
            slots=[{"id": "a-u0", "fault": hit}],
            clients=jobs,
        ),
        Style(),
    )
    assert _sample("README.md") == shown[2:]


def test_the_sample_of_the_page_status_is_what_status_prints() -> None:
    lost = client(4700, "none", "d1", memory_bytes=int(1.1 * GIB), command="./legacy", lost=True)
    train = client(4702, cost=614 << 20, domain="d2")
    train = train | {"protected": train["protected"] | {"cost_share": 0.012}}
    evaluation = client(
        4710, "guard", "snapshot budget: needs 14 GiB, has 8", memory_bytes=5 * GIB, domain="d2"
    )
    served = {"memory_bytes": 47 * GIB // 48, "command": "python serve.py", "domain": "d2"}
    servers = [client(5000 + i, "observe", "started without mpsd-run", **served) for i in range(48)]
    shown = status(
        view(
            gpus=[GPU | {"memory_used_bytes": 62 * GIB}],
            domains=[
                DOMAIN | {"state": "faulted", "role": "old", "clients": 1, "fault": fault()},
                SECOND | {"clients": 50},
                STANDBY | {"id": "d3"},
            ],
            clients=[lost, train, evaluation | {"command": "python eval.py"}, *servers],
        ),
        Style(),
    )
    assert _sample("mpsd/docs/status.md") == shown[2:-1]


def test_costs_are_memory_and_the_time_of_the_slowest_client_of_a_row() -> None:
    def costs(*shares: float | None) -> str:
        clients = [
            CLIENT
            | {"pid": 5000 + number}
            | {"protected": CLIENT["protected"] | {"cost_share": share, "cost_bytes": GIB, "remedy": ""}}
            for number, share in enumerate(shares)
        ]
        return status(view(clients=clients), Style())[7]

    assert "  1 GiB, 1.2 %  python" in costs(0.012)
    assert "  1 GiB  python" in costs(None)
    assert "  4 GiB, 2.9 %  python" in costs(0.001, None, 0.029, 0.02)


def test_the_detail_of_a_client_has_its_snapshots_and_what_may_bring_it_back() -> None:
    told = {"snapshot_bytes": GIB // 2, "snapshot_limit_bytes": 2 * GIB, "here": True}
    why = {"level": "guard", "why": "saving would slow it", "cost_bytes": 0, "remedy": "use a list"}
    shown = status(view(clients=[CLIENT | {"failover": told, "protected": why}]), Style(), verbose=True)
    assert any("snapshots 512 MiB of 2 GiB" in line and line.endswith("use a list") for line in shown)
