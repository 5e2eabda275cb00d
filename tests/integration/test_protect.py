"""mpsd-ctl protect PID guard: the fail-over of one program is switched off while it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from mpsd.base.conditions import Code
from mpsd.base.errors import MpsdError
from mpsd.ctl import failovertext
from mpsd.ctl.statustext import status as status_text
from mpsd.ctl.style import Style
from tests.integration.test_client_protection import until_protected
from tests.integration.test_daemon_failover import SETTINGS, failovers, said, socket_of, until_outcome
from tests.integration.test_failover_budgets import row
from tests.support.conditioning import rows_of
from tests.support.site import DEADLINE_S, OTHER_UID, Program, Site

BY_HAND = "switched off by hand"
MODES = pytest.mark.parametrize("mode", ["exact", "keep"])
Done = subprocess.CompletedProcess[str]


@pytest.fixture
def site() -> Iterator[Site]:
    with Site(**SETTINGS) as started:
        yield started.start()


def participant(site: Site, mode: str = "exact") -> Program:
    program = site.join()
    assert said(program, f"failover({socket_of(site)!r}, {mode!r})")[0] == "WELCOME"
    assert said(program, "fo.values[1]") == 3, "the daemon knows LEAVES after GUARD"
    assert said(program, "fo.prepare()")[0] == "STANDBY"
    site.until(lambda s: row(s, program)["failover"]["standing"] == "ready", "it is ready")
    return program


def ctl(site: Site, *arguments: str) -> Done:
    return subprocess.run(
        [sys.executable, "-m", "mpsd.ctl", *arguments],
        env={**site.environ(), "MPSD_SOCKET": site.socket, "NO_COLOR": "1"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def protect(site: Site, program: Program, *more: str) -> Done:
    done = ctl(site, "protect", str(program.pid), "guard", *more)
    assert "Traceback" not in done.stderr
    return done


def is_told(program: Program) -> None:
    assert said(program, "fo.hear()")[0] == "GUARD"
    heard = said(program, "fo.hear()")
    assert (heard[0], heard[3]) == ("STAND_DOWN", BY_HAND)
    said(program, "fo.drop()")
    said(program, f"fo.say('LEAVES', values=(3,), text={BY_HAND!r})")


@MODES
def test_a_running_program_is_taken_out_of_fail_over(site: Site, mode: str) -> None:
    program, offender = participant(site, mode), site.join()
    done = protect(site, program, "--reason", "it must not pause")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"switched off the fail-over of process {program.pid}: it stays at guard\n")
    is_told(program)
    until_protected(site, program, "guard", BY_HAND)
    status = site.status()
    assert row(status, program)["failover"]["left"] == "by_hand"
    assert f"guard ({BY_HAND})" in "\n".join(status_text(status, Style()))
    shown = "\n".join(status_text(status, Style(), verbose=True))
    assert f"pid {program.pid} not protected, mode {mode}" in shown and "budget" not in shown
    assert not rows_of(status, Code.SNAPSHOT_BUDGET)
    (line,) = [line for line in site.said("audit") if line["action"] == "protect"]
    assert (line["outcome"], line["pid"], line["by"]) == ("guard", program.pid, "peer")
    assert (line["reason"], line["uid"]) == ("it must not pause", os.geteuid())
    events = [json.loads(text) for text in ctl(site, "events", "--since", "0", "--json").stdout.splitlines()]
    (event,) = [e for e in events if e["kind"] == "failover-left"]
    assert (event["pid"], event["reason"]) == (program.pid, BY_HAND)
    # Another fault moves nothing, and the records say why.
    assert said(program, "dev.launch('spin'), dev.synchronize()") == [None, None]
    offender.fault()
    (client,) = until_outcome(site, {program.pid: "not told"})["clients"]
    assert client["left"] == "by_hand"
    assert BY_HAND in "\n".join(failovertext.records(failovers(site)))
    assert "1 switched off by hand" in site.until_fault("mmu-invalid-address")["action"]


@MODES
def test_it_lasts_over_restarts_of_mpsd_and_is_told_again(site: Site, mode: str) -> None:
    program = participant(site, mode)
    assert protect(site, program).returncode == 0
    site.kill()
    site.start()
    site.attached(program)
    until_protected(site, program, "guard", BY_HAND)
    assert said(program, f"fo.hello({mode!r})")[0] == "WELCOME"
    assert said(program, "fo.hear()")[0] == "GUARD"
    until_protected(site, program, "guard", BY_HAND)
    # The state file was lost: the program itself says that it has left.
    site.kill()
    (site.run_dir / "state.json").unlink()
    site.start()
    assert said(program, f"fo.hello({mode!r})")[0] == "WELCOME"
    said(program, f"fo.say('LEAVES', values=(3,), text={BY_HAND!r})")
    site.until(lambda s: s["counters"].get("failover_switched_off"), "it is known")


def test_a_dry_run_changes_nothing(site: Site) -> None:
    program = participant(site)
    done = protect(site, program, "--dry-run")
    assert done.returncode == 0 and done.stdout.startswith("would switch off")
    answer = json.loads(protect(site, program, "--dry-run", "--json").stdout)
    assert (answer["pid"], answer["level"], answer["dry_run"]) == (program.pid, "guard", True)
    assert answer["steps"] and site.until(lambda s: row(s, program)["failover"]["left"] is None, "as it was")
    assert not [line for line in site.said("audit") if line["action"] == "protect"]


def test_errors_name_the_thing_and_the_remedy(site: Site) -> None:
    program, plain = participant(site), site.join()
    site.attached(plain)
    nobody = ctl(site, "protect", "2", "guard")
    assert nobody.returncode == 1 and "process 2 is not a client of any domain" in nobody.stderr
    none = protect(site, plain)
    assert none.returncode == 2 and "takes no part in fail-over" in none.stderr
    other = ctl(site, "protect", str(program.pid), "failover")
    assert other.returncode == 2 and "guard" in other.stderr
    reused = protect(site, program, "--start-ticks", "1")
    assert reused.returncode == 13 and "the pid was used again" in reused.stderr
    assert protect(site, program).returncode == 0
    again = protect(site, program)
    assert again.returncode == 2 and f"is already at guard ({BY_HAND})" in again.stderr
    assert "restart it" in again.stderr


def test_a_proxy_of_an_earlier_release_is_told_nothing(site: Site) -> None:
    program = participant(site)
    said(program, "setattr(fo, 'switches', False)")
    assert said(program, "fo.hello('exact')")[0] == "WELCOME"
    site.until(lambda s: row(s, program)["failover"]["standing"] != "not connected", "it is connected")
    done = protect(site, program)
    assert done.returncode == 1 and "does not know this command" in done.stderr
    assert "mpsd-run --protect guard" in done.stderr
    assert said(program, "fo.prepare()")[0] == "STANDBY"
    site.until(lambda s: row(s, program)["failover"]["standing"] == "ready", "it still takes part")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")
def test_users_switch_off_their_own_programs_alone(site: Site) -> None:
    program = participant(site)

    def ask(uid: int | None) -> Mapping[str, Any]:
        return site.ask(lambda c: c.protect(program.pid, "guard"), uid)

    with pytest.raises(MpsdError) as refused:
        ask(OTHER_UID)
    assert refused.value.code == "not-found" and "not a client of yours" in refused.value.message
    assert [line["operation"] for line in site.said("audit") if line["action"] == "right"] == ["protect"]
    own = site.program(uid=OTHER_UID)
    assert said(own, f"failover({socket_of(site)!r}, 'keep')")[0] == "WELCOME"
    site.until(lambda s: row(s, own)["failover"], "it takes part")
    answer = site.ask(lambda c: c.protect(own.pid, "guard"), OTHER_UID)
    assert answer["level"] == "guard"
    until_protected(site, own, "guard", BY_HAND)
    assert row(site.status(), program)["failover"]["left"] is None
