"""Logs of domains under attack: lines that cost time, lines that are lost, floods, and logs that go quiet.

A line is written as the server of a user writes it: into the file that the control daemon's output goes to.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mpsd_client
from mpsd.base.conditions import Code
from tests.support.conditioning import rows_of
from tests.support.site import OTHER_UID, Program, Site, until

PRELUDE = """
import runpy, sys
from mpsd.daemon import periodic
periodic.LIST_EVERY = 1 << 30
sys.argv = sys.argv[2:]
runpy.run_module("mpsd", run_name="__main__", alter_sys=True)
"""
"""Runs mpsd without its regular lists of clients: lists of a log that may hide clients remain."""
PREFIX = b"[2026-11-29 10:00:00.000 Server  4711] "


def domain_of(site: Site, program: Program) -> Mapping[str, Any]:
    status = site.status()
    name = next(c["domain"] for c in status["clients"] if c["pid"] == program.pid)
    found: Mapping[str, Any] = next(d for d in status["domains"] if d["id"] == name)
    return found


def log_of(site: Site, domain: str) -> Path:
    return site.log_dir / domain / "control.log"


def write(path: Path, data: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(data)


def start(site: Site) -> None:
    """Start a daemon that finds a client only by its line, or because its log may hide clients."""
    site.launch(python=("-c", PRELUDE))
    site.wait_ready()


def counter(site: Site, name: str) -> int:
    return int(site.status()["counters"][name])


def test_lines_that_defeat_a_backtracking_pattern_delay_nothing(site: Site) -> None:
    """S2: a prefix with 65,000 blanks, and `clients ` 8,000 times, in the log of one user's domain."""
    start(site)
    owner = site.join(uid=OTHER_UID)
    path = log_of(site, domain_of(site, owner)["id"])
    blanks = b"[2026-11-29 10:00:00.000 " + b"S" + b" " * 65_000 + b"x] y\n"
    words = PREFIX + b"clients " * 8_000 + b"\n"
    clients = PREFIX + b"client {PID: 1, Context ID: 1} " * 2_000 + b"Receive\n"
    write(path, (blanks + words + clients) * 4)
    began = time.monotonic()
    site.status()
    site.join()
    assert time.monotonic() - began < 15
    until(lambda: counter(site, "log_lines_cut") >= 12, "the lines were cut")
    # The real lines around them count.
    site.join(uid=OTHER_UID)


def test_a_huge_number_costs_its_line_only(site: Site) -> None:
    """S3: numbers of thousands of digits, or out of bounds, beside the line of a real client."""
    start(site)
    first = site.join()
    path = log_of(site, domain_of(site, first)["id"])
    before = counter(site, "log_lines_unparsed")
    numbers = [b"9" * 900, b"9" * 4_400, b"4194305", b"99999999999999999999", b"-1"]
    for number in numbers:
        write(path, PREFIX + b"NEW CLIENT " + number + b" from user 0: Server already exists\n")
        write(path, PREFIX + b"Client {PID: " + number + b", Context ID: " + number + b"} exit\n")
    site.join()
    until(
        lambda: counter(site, "log_lines_unparsed") - before >= 2 * len(numbers) - 2, "the lines are counted"
    )
    assert counter(site, "log_lines_failed") == 0


def test_a_flood_of_one_log_delays_no_other(site: Site) -> None:
    """S7: 200,000 lines in one domain: the client of another domain is noticed, and requests are answered."""
    start(site)
    flooder, path = flooded(site)
    site.join()
    began, slowest, status = time.monotonic(), 0.0, site.status()
    while time.monotonic() - began < 2:
        asked = time.monotonic()
        status = site.status()
        slowest = max(slowest, time.monotonic() - asked)
    assert slowest < 5
    assert status["counters"]["log_bytes_skipped"] > 0
    # The flooded domain itself: its next client is found, by its line or by the list.
    late = site.join(uid=OTHER_UID)
    assert domain_of(site, late)["id"] == path.parent.name
    site.until(lambda s: not any("flooded" in p for p in s["problems"]), "the flood is over")
    assert flooder.do("1 + 1") == {"result": 2}


def flooded(site: Site) -> tuple[Program, Path]:
    flooder = site.join(uid=OTHER_UID)
    path = log_of(site, domain_of(site, flooder)["id"])
    line = PREFIX + b"NEW CLIENT 4194300 from user 0: Server already exists\n"
    write(path, line * 200_000)
    site.until(lambda s: any("flooded" in p for p in s["problems"]), "the flood is shown")
    return flooder, path


def rotate(path: Path) -> None:
    """Rename the log and create it again: logrotate's default, `create`."""
    path.rename(path.with_name("control.log.1"))
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640))


def test_a_log_renamed_and_made_anew_is_followed_with_its_writer(site: Site) -> None:
    """Case 02: the next client is listed at once, and the fault after it names the offender."""
    start(site)
    innocent = site.join()
    path = log_of(site, domain_of(site, innocent)["id"])
    rotate(path)
    offender = site.join()
    # Another directory, from which the watch of the log's directory reports nothing.
    path.with_name("control.log.1").rename(site.base / "old.log")
    # So does the next daemon.
    restarted(site)
    site.until(lambda s: find(s, path.parent.name)["log"] == "works", "the log has shown a line")
    site.join()
    offender.fault("store")
    record = site.until_fault("mmu-invalid-address")
    assert record["offender"]["pid"] == offender.pid
    assert not rows_of(site.status(), Code.LOG_QUIET) + rows_of(site.status(), Code.LOG_FLOODED)
    assert path.read_bytes() == b""


def silence(site: Site, domain: Mapping[str, Any]) -> None:
    """Let every later write of the domain's processes into a file fail, and so into the log."""
    size = os.stat(f"/proc/{domain['control_pid']}/fd/1").st_size
    for pid in (domain["control_pid"], domain["server_pid"]):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, size))


def restarted(site: Site) -> None:
    """Start another daemon, which lists the clients of a log without any line each second."""
    site.kill()
    start(site)


def test_a_quiet_log_is_shown_and_its_empty_domain_replaced(site: Site) -> None:
    """S1: on the H200 one line of any user in the FIFO `log` silences the log for good."""
    start(site)
    first = site.join()
    quiet = domain_of(site, first)
    silence(site, quiet)
    restarted(site)
    second = site.join()
    site.until(
        lambda s: any(f"log of domain {quiet['id']} is quiet" in p for p in s["problems"]), "it is shown"
    )
    assert [e["domain"] for e in events(site, "domain-log-quiet")] == [quiet["id"]]
    assert domain_of(site, site.join())["id"] == quiet["id"]
    site.empty()
    site.until(lambda s: quiet["id"] not in {d["id"] for d in s["domains"]}, "the quiet domain is replaced")
    new = domain_of(site, site.join())
    assert new["id"] != quiet["id"] and new["log"] == "works"
    assert not rows_of(site.status(), Code.LOG_QUIET) + rows_of(site.status(), Code.LOG_FLOODED)
    assert second.pid != first.pid


def events(site: Site, kind: str) -> list[Mapping[str, Any]]:
    """Return the stored events of this kind."""
    with mpsd_client.connect(site.socket) as client:
        stream = client.subscribe(0)
        stored = [next(stream) for _ in range(stream.kept)]
    return [event for event in stored if event["kind"] == kind]


def test_no_innocent_is_named_while_the_log_may_hide_clients(site: Site) -> None:
    """Case 02, second half: the offender has no line, and the innocent client is the only one known."""
    start(site)
    innocent = site.join()
    domain = domain_of(site, innocent)
    silence(site, domain)
    restarted(site)
    site.until(lambda s: find(s, domain["id"]).get("log") != "works", "the log has shown no line")
    offender = site.program()
    offender.fault("trap")
    record = site.until_fault("sm-trap")
    assert record["offender"] is None or record["offender"]["pid"] != innocent.pid
    assert record["confidence"] != "likely"


def find(status: Mapping[str, Any], domain: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(d for d in status["domains"] if d["id"] == domain)
    return found
