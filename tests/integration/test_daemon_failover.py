"""Fail-over under a running daemon, on the simulated GPU: messages, stable path, records."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from mpsd.base.conditions import Code
from mpsd.base.model import ExceptionOwner, ReplayMode
from mpsd.ctl import failovertext
from mpsd.ctl.statustext import status as status_text
from mpsd.ctl.style import Style
from mpsd_client.joining.plan import make_plan
from tests.support.conditioning import rows_of
from tests.support.site import OTHER_UID, Program, Site, until

ANOTHER = "another program needed its memory"
SETTINGS = {"protect": '"failover"', "failover__driver": '"/bin/true"'}


@pytest.fixture
def site() -> Iterator[Site]:
    with Site(**SETTINGS) as started:
        yield started.start()


def socket_of(site: Site) -> str:
    return str(site.run_dir / "failover.sock")


def said(program: Program, expression: str) -> Any:
    answer = program.do(expression)
    assert "result" in answer, answer
    return answer["result"]


def hello(site: Site, program: Program, mode: str = "keep") -> None:
    assert said(program, f"failover({socket_of(site)!r}, {mode!r})")[0] == "WELCOME"


def ready(site: Site, mode: str = "keep") -> Program:
    """Start a participant that has reported its standby context."""
    program = site.join()
    hello(site, program, mode)
    assert said(program, "fo.prepare()")[0] == "STANDBY"
    return program


def slot(status: Mapping[str, Any]) -> Mapping[str, Any]:
    (found,) = status["slots"]
    assert isinstance(found, Mapping)
    return found


def standings(status: Mapping[str, Any]) -> dict[int, str]:
    return {m["pid"]: m["standing"] for m in slot(status)["programs"]}


def all_ready(site: Site, *programs: Program) -> Mapping[str, Any]:
    wanted = {p.pid for p in programs}
    return site.until(
        lambda s: wanted <= {pid for pid, standing in standings(s).items() if standing == "ready"},
        f"{sorted(wanted)} are ready",
    )


def pauses(site: Site, number: int) -> dict[int, float]:
    """Return the pause of each moved client of this record; empty while one is not known."""
    moved = next(r["moved"] for r in site.faults() if r["id"] == number)
    found = {row["pid"]: row["pause_ms"] for row in moved}
    return {} if None in found.values() else found


def doctors(site: Site, name: str = "protection") -> Mapping[str, Any]:
    (check,) = (c for c in site.ask(lambda c: c.doctor()) if c["name"] == name)
    return check


def active(status: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(d for d in status["domains"] if d["role"] == "active")
    return found


def path_of(site: Site) -> str:
    return os.path.basename(os.readlink(site.client_environ()["CUDA_MPS_PIPE_DIRECTORY"]))


def failovers(site: Site) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = site.ask(lambda c: c.failovers())
    return found


def outcomes(record: Mapping[str, Any]) -> dict[int, str]:
    return {c["pid"]: c["outcome"] for c in record["clients"]}


def until_outcome(site: Site, wanted: Mapping[int, str], number: int = -1) -> Mapping[str, Any]:
    def look() -> Mapping[str, Any] | None:
        records = failovers(site)
        return records[number] if records and outcomes(records[number]) == wanted else None

    found = until(look, f"outcomes {wanted}; last {[outcomes(r) for r in failovers(site)]}")
    assert found is not None
    return found


def test_survivors_move_and_the_offender_is_named_and_not_told(site: Site) -> None:
    first, second, offender = ready(site), ready(site), ready(site)
    before = all_ready(site, first, second, offender)
    old, generation = active(before)["id"], slot(before)["generation"]
    assert slot(before)["survivable"] == 1
    offender.fault()
    for survivor in (first, second):
        assert said(survivor, "fo.move()")[:2] == ["MOVE", generation]
        assert said(survivor, "dev.alloc(16) > 0")
        said(survivor, "dev.synchronize()")
    record = until_outcome(site, {first.pid: "moved", second.pid: "moved", offender.pid: "not told"})
    told = next(c for c in record["clients"] if c["pid"] == first.pid)
    assert (
        told["held_ms"],
        told["fence_ms"],
        told["first_ms"],
        told["restored_bytes"],
        told["replayed"],
    ) == (
        1.0,
        2.0,
        3.0,
        64,
        5,
    )
    blamed = site.until_fault("mmu-invalid-address")
    assert (record["fault"], record["domain"], record["generation"]) == (blamed["id"], old, generation)
    assert (blamed["offender"]["pid"], blamed["confidence"]) == (offender.pid, "certain")
    assert blamed["victims"] == []
    paused = until(lambda: pauses(site, blamed["id"]), "both pauses are in the record")
    assert sorted(paused) == sorted([first.pid, second.pid]) and min(paused.values()) >= 3.0
    assert path_of(site) == f"d{generation}" == record["to"]
    # The offender's standby context was in the domain that the others now use.
    assert offender.wait() < 0
    after = site.until(lambda s: slot(s)["generation"] > generation, "the next standby")
    assert active(after)["id"] == record["to"]
    for survivor in (first, second):
        assert said(survivor, "fo.prepare()")[1] == slot(after)["generation"]
    status = site.until(
        lambda s: old not in {d["id"] for d in s["domains"]}, "the old domain has ended, its programs live on"
    )
    assert {c["pid"] for c in status["clients"]} == {first.pid, second.pid}


def test_where_nobody_is_named_all_are_told_as_suspects(site: Site) -> None:
    first, second = ready(site), ready(site)
    all_ready(site, first, second)
    second.fault("trap")
    for program in (first, second):
        said(program, "fo.move()")
    record = until_outcome(site, {first.pid: "moved", second.pid: "moved"})
    assert all(c["suspect"] for c in record["clients"])


def test_one_in_whose_code_an_exception_was_is_named_and_ended(site: Site) -> None:
    """The program reports that the code is its own; mpsd acts once all participants have reported."""
    site.kill()
    site.write_config(failover__mode='"exact"')
    site.start()
    first, second, offender = (ready(site, "exact") for _ in range(3))
    status = all_ready(site, first, second, offender)
    offender.fault("misaligned")
    for program, whose in (
        (offender, ExceptionOwner.OWN),
        (first, ExceptionOwner.OTHERS),
        (second, ExceptionOwner.OTHERS),
    ):
        said(program, f"fo.move({whose.value})")
        # The driver logged the exception, and a denial suffices to go on.
        assert said(program, "fo.values[:4]") == [0, ReplayMode.IN_TURN, 0, 1]
    assert offender.wait() == -signal.SIGKILL
    record = until_outcome(site, dict.fromkeys((first.pid, second.pid, offender.pid), "moved"))
    assert {c["pid"]: c["whose"] for c in record["clients"]} == {
        first.pid: "others",
        second.pid: "others",
        offender.pid: "own",
    }
    assert "found the faulting instruction in its own code" in "\n".join(failovertext.records([record]))
    blamed = site.until_fault("sm-misaligned")
    assert (blamed["offender"]["pid"], blamed["confidence"]) == (offender.pid, "likely")
    assert blamed["victims"] == []
    assert sorted(row["pid"] for row in blamed["moved"]) == sorted([first.pid, second.pid])
    # The offender's lease in the next domain goes with it, and the others get their next standby there.
    site.until(
        lambda s: {c["pid"] for c in s["clients"]} == {first.pid, second.pid}, "the offender is forgotten"
    )
    for survivor in (first, second):
        assert said(survivor, "fo.prepare()")[1] > slot(status)["generation"]
        assert said(survivor, "dev.alloc(16) > 0")


def test_a_suspect_replays_in_a_trial_domain_and_comes_back(site: Site) -> None:
    """A client that takes no part in fail-over cannot deny the fault, so the report names nobody."""
    site.kill()
    site.write_config(failover__mode='"exact"')
    site.start()
    suspect, other = (ready(site, "exact") for _ in range(2))
    stranger = site.join()
    stranger.do("dev.alloc(16)")
    all_ready(site, suspect, other)
    stranger.fault("misaligned")
    here = said(other, f"fo.move({ExceptionOwner.OTHERS.value})")[1]
    assert said(suspect, f"fo.move({ExceptionOwner.OWN.value})")[1] == here
    # It waits, and gets a context in a domain to which the path never leads.
    trial = said(suspect, "fo.prepare()")[1]
    assert trial > here and active(site.status())["id"] == f"d{here}"
    assert said(suspect, f"fo.move({ExceptionOwner.OWN.value})")[1] == trial
    assert said(suspect, "fo.hear()")[:2] == ["TURN", trial]
    said(suspect, f"fo.say('DONE', generation={trial})")
    # Meanwhile the other program has its next standby domain, and after a while the suspect comes back.
    assert said(other, "fo.prepare()")[1] > trial
    assert said(suspect, "fo.prepare()")[1] == here
    said(suspect, "fo.move()")
    assert said(suspect, "dev.alloc(16) > 0")
    site.until(lambda s: f"d{trial}" not in [d["id"] for d in s["domains"]], "the trial domain has ended")
    assert site.until_fault("sm-misaligned")["offender"] is None


def test_a_server_that_dies_is_left_and_a_standby_that_dies_is_replaced(site: Site) -> None:
    program = ready(site)
    status = all_ready(site, program)
    generation = slot(status)["generation"]
    spare = next(d for d in status["domains"] if d["id"] == f"d{generation}")
    psutil.Process(spare["server_pid"]).kill()
    assert said(program, "fo.hear()")[:2] == ["STAND_DOWN", generation]
    said(program, "fo.drop()")
    heard = said(program, "fo.prepare()")
    assert heard[1] > generation
    status = all_ready(site, program)
    # The domain had no client with work in it.
    assert not site.faults() and not failovers(site)
    psutil.Process(active(status)["server_pid"]).kill()
    assert said(program, "fo.move()")[1] == heard[1]
    record = until_outcome(site, {program.pid: "moved"})
    assert record["fault"] == site.until_fault("server-death")["id"]
    assert said(program, "dev.alloc(16) > 0")


def test_who_is_not_ready_in_time_is_told_when_it_is(site: Site) -> None:
    late, offender = site.join(), ready(site)
    hello(site, late)
    said(late, "fo.prepare(ready=False)")
    all_ready(site, offender)
    offender.fault()
    until_outcome(site, {late.pid: "not told", offender.pid: "not told"})
    said(late, "fo.ready()")
    said(late, "fo.move()")
    until_outcome(site, {late.pid: "moved", offender.pid: "not told"})


def test_who_stays_and_who_says_nothing_are_recorded(site: Site) -> None:
    site.kill()
    site.write_config(failover__answer_s="0.2")
    site.start()
    stays, silent, offender = ready(site), ready(site), ready(site)
    all_ready(site, stays, silent, offender)
    offender.fault()
    said(stays, "fo.stay('graphs cannot be carried over')")
    record = until_outcome(site, {stays.pid: "stayed", silent.pid: "silent", offender.pid: "not told"})
    assert (
        next(c for c in record["clients"] if c["pid"] == stays.pid)["why"] == "graphs cannot be carried over"
    )
    assert said(stays, "fo.hear()")[0] == "STAND_DOWN"
    # A late answer is recorded, too.
    said(silent, "fo.move()")
    until_outcome(site, {stays.pid: "stayed", silent.pid: "moved", offender.pid: "not told"})


def test_words_of_a_program_move_nobody_else(site: Site) -> None:
    honest, liar = ready(site), ready(site)
    before = all_ready(site, honest, liar)
    for words in (
        "fo.say('OWN_ERROR', values=(719,))",
        "fo.say('OPAQUE', text='cuGraphInstantiate')",
        "fo.say('MOVED', generation=1)",
        "fo.say('STAYED', generation=77, text='never told')",
    ):
        said(liar, words)
    status = site.until(
        lambda s: [m for m in slot(s)["programs"] if m["opaque"] == ["cuGraphInstantiate"]], "it is shown"
    )
    assert active(status)["id"] == active(before)["id"] and not failovers(site)
    assert standings(status)[honest.pid] == "ready"
    assert status["counters"]["failover_own_errors"] == 1


def test_moves_are_bounded(site: Site) -> None:
    site.kill()
    site.write_config(failover__per_minute="1")
    site.start()
    program, first = ready(site), site.join()
    all_ready(site, program)
    first.fault()
    said(program, "fo.move()")
    said(program, "fo.prepare()")
    all_ready(site, program)
    second = site.join()
    second.fault()
    record = until_outcome(site, {program.pid: "not told"})
    assert "per_minute = 1" in record["clients"][0]["why"]
    status = site.status()
    assert standings(status) == {program.pid: "left behind"}
    assert "per_minute" in slot(status)["programs"][0]["reason"]


def test_a_daemon_that_is_killed_is_none_the_worse_for_it(site: Site) -> None:
    moved, fresh = ready(site), ready(site)
    all_ready(site, moved, fresh)
    site.join().fault()
    for program in (moved, fresh):
        said(program, "fo.move()")
    for program in (moved, fresh):
        said(program, "fo.prepare()")
    before = all_ready(site, moved, fresh)
    site.kill()
    site.start()
    for program in (moved, fresh):
        assert said(program, "fo.hear()")[0] == "gone"
        assert said(program, f"fo.hello(generation={int(active(before)['id'][1:])})")[0] == "WELCOME"
        assert said(program, "fo.prepare()")[1] == slot(before)["generation"]
    after = all_ready(site, moved, fresh)
    assert active(after)["id"] == active(before)["id"]
    offender = site.join()
    offender.fault()
    for program in (moved, fresh):
        said(program, "fo.move()")
        assert said(program, "dev.alloc(16) > 0")
    assert path_of(site) == f"d{slot(before)['generation']}"
    until_outcome(site, {moved.pid: "moved", fresh.pid: "moved"})


def test_a_fault_while_no_daemon_runs_is_failed_over_by_the_next(site: Site) -> None:
    program, offender = ready(site), site.join()
    before = all_ready(site, program)
    site.kill()
    offender.fault()
    site.start()
    # It reports where it was: in its first context.
    assert said(program, "fo.hello()")[0] == "WELCOME"
    assert said(program, "fo.prepare()")[1] == slot(before)["generation"]
    said(program, "fo.move()")
    assert said(program, "dev.alloc(16) > 0")
    until_outcome(site, {program.pid: "moved"})


def test_as_many_programs_at_once_as_a_server_takes() -> None:
    """59 participants, and the program that faults."""
    many = {"limits__clients": "1024", "failover__standby_contexts": "64"}
    with Site(**SETTINGS, failover__answer_s="30", **many) as site:
        site.start()
        programs = [site.program() for _ in range(59)]
        site.attached(*programs)
        for program in programs:
            program.order(f"failover({socket_of(site)!r})")
        for program in programs:
            assert program.hear()["result"][0] == "WELCOME"
            program.order("fo.prepare()")
        for program in programs:
            assert program.hear()["result"][0] == "STANDBY"
        all_ready(site, *programs)
        site.join().fault()
        for program in programs:
            program.order("fo.move()")
        for program in programs:
            assert program.hear()["result"][0] == "MOVE"
        until_outcome(site, {p.pid: "moved" for p in programs})
        for program in programs:
            program.order("dev.alloc(16) > 0")
        assert all(program.hear() == {"result": True} for program in programs)


def test_drain_moves_programs_live(site: Site) -> None:
    program = ready(site)
    before = all_ready(site, program)
    site.ask(lambda c: c.drain())
    assert said(program, "fo.move()")[1] == slot(before)["generation"]
    record = until_outcome(site, {program.pid: "moved"})
    assert record["planned"] and record["fault"] is None
    assert not site.faults()
    site.until(lambda s: active(before)["id"] not in {d["id"] for d in s["domains"]}, "the old one has ended")


@pytest.mark.parametrize("lazy", ["true", "false"])
def test_programs_are_told_whether_standbys_are_lazy(lazy: str) -> None:
    with Site(**SETTINGS, failover__lazy=lazy) as site:
        program = site.start().join()
        hello(site, program)
        assert said(program, "fo.values[0]") == (lazy == "true")


def test_exclusive_mode_has_none_and_says_what_to_change(site: Site) -> None:
    site.node(op="inject", fault="mode", mode="exclusive-process")
    program = site.join()
    hello(site, program)
    status = site.until(lambda s: slot(s)["programs"], "it is known")
    assert (slot(status)["survivable"], slot(status)["standby"]) == (0, None)
    assert "EXCLUSIVE_PROCESS" in slot(status)["why_none"] and "nvidia-smi -c 0" in slot(status)["why_none"]


def lowered(status: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return status if rows_of(status, Code.PROTECTION_LOWERED) else None


def test_without_copies_there_is_no_standby_and_it_is_said() -> None:
    with Site(**(SETTINGS | {"failover__driver": '"/nowhere/libcuda.so.1"'})) as site:
        site.start()
        program = site.join()
        hello(site, program)
        status = site.until(lambda s: slot(s)["programs"], "it is known")
        assert "/nowhere/libcuda.so.1" in slot(status)["why_none"]
        (row,) = rows_of(site.until(lowered, "the level is lower"), Code.PROTECTION_LOWERED)
        assert "/nowhere/libcuda.so.1" in row["text"]
        assert not (Path(site.run_dir) / "copies").exists()
        check = doctors(site)
        assert check["ok"] is False and "/nowhere/libcuda.so.1" in check["finding"] and check["remedy"]


def test_the_copies_are_files_of_their_own(site: Site) -> None:
    status = site.until(lambda s: s["failover"]["copies_bytes"], "copied")
    folder = Path(status["failover"]["copies"])
    files = [folder / "libcuda-0.so.1", folder / "libcuda-1.so.1"]
    source = os.stat("/bin/true")
    found = [os.lstat(f) for f in files]
    assert len({source.st_ino, *(f.st_ino for f in found)}) == 3
    assert all(f.read_bytes() == Path("/bin/true").read_bytes() for f in files)
    assert {f.st_mode & 0o7777 for f in found} == {0o644}
    assert os.stat(folder).st_mode & 0o7777 == 0o755
    assert doctors(site)["ok"] is True


def test_a_folder_that_users_cannot_enter_is_passed_over() -> None:
    if os.geteuid() != 0:
        pytest.skip("other users join root's mpsd alone")
    with Site(**SETTINGS) as site:
        closed = site.base / "closed"
        closed.mkdir(mode=0o750)
        site.write_config(failover__copies=f'"{closed}/copies"')
        site.start()
        status = site.until(lambda s: s["failover"]["copies_bytes"], "copied")
        assert status["failover"]["copies"] == str(site.run_dir / "copies")
        check = doctors(site, "driver copies")
        assert check["ok"] is True and f"{closed} is closed to other users" in check["finding"]
        # Doctor tries a copy as a user without rights.
        (site.run_dir / "copies" / "libcuda-0.so.1").chmod(0o600)
        check = doctors(site, "driver copies")
        assert check["ok"] is False and "Permission denied" in check["finding"] and check["remedy"]


def test_two_contexts_of_a_process_are_leased_and_tracked_once_each(site: Site) -> None:
    program = ready(site)
    status = site.until(
        lambda s: len([c for c in s["clients"] if c["state"] == "attached"]) == 2,
        "both contexts are attached",
    )
    rows = sorted(status["clients"], key=lambda c: str(c["domain"]))
    assert [(c["pid"], c["space"], c["failover"]["here"]) for c in rows] == [
        (program.pid, 0, True),
        (program.pid, 0, False),
    ]
    assert all("tracker" in c["protections"] and "lease" in c["protections"] for c in rows)
    assert status["counters"]["leases_held"] == 2
    counts = {d["id"]: (d["clients"], d["idle_contexts"]) for d in status["domains"]}
    assert counts == {rows[0]["domain"]: (1, 0), rows[1]["domain"]: (0, 1)}
    # After the program is killed mpsd holds both leases until its work has ended, then releases them.
    program.die()
    site.gone(program)
    site.until(lambda s: s["counters"]["leases_held"] == 0 and not slot(s)["programs"], "nothing is held")


def test_what_an_operator_reads(site: Site) -> None:
    program, other = ready(site), site.join()
    before = all_ready(site, program)
    text = "\n".join(status_text(before, Style(), verbose=True))
    for part in (": protected; ", f"standby domain {slot(before)['standby']} warm", "protected programs 1/1"):
        assert part in text
    assert "driver files" in text and "standby contexts 1" in text
    other.fault()
    said(program, "fo.move()")
    record = until_outcome(site, {program.pid: "moved"})
    text = "\n".join(failovertext.records([record]))
    assert f"pid {program.pid}" in text and "calls held 1.000 ms, fence 2.000 ms" in text
    assert f"fault #{record['fault']}" in text and "after the driver's timestamp" in text
    assert failovertext.records([]) == ["no fail-overs"]


def test_what_was_recorded_is_told_when_failover_is_off(site: Site) -> None:
    program, other = ready(site), site.join()
    all_ready(site, program)
    other.fault()
    said(program, "fo.move()")
    until_outcome(site, {program.pid: "moved"})
    records = list(failovers(site))
    program.die()
    site.gone(program)
    assert site.terminate() == 0
    site.write_config(protect='"guard"')
    site.start()
    assert list(failovers(site)) == records


def test_another_user_s_programs_are_not_told_of(site: Site) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to be somebody else")
    program, other = ready(site), site.join()
    all_ready(site, program)
    other.fault()
    said(program, "fo.move()")
    until_outcome(site, {program.pid: "moved"})
    assert site.ask(lambda c: c.failovers(), OTHER_UID) == []
    said(program, "fo.say('OPAQUE', text='cuSecret')")
    until(lambda: slot(site.status())["programs"][0]["opaque"] == ["cuSecret"], "it is known")
    (row,) = slot(site.ask(lambda c: c.status(), OTHER_UID))["programs"]
    assert (row["pid"], row["uid"], row["opaque"]) == (None, None, [])


def test_programs_under_mpsd_run_are_told_of_the_socket(site: Site, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(b"")
    environ = {"MPSD_REAL_LIBCUDA": "/bin/true"}
    plan = make_plan(environ, socket_path=site.socket, library=str(tmp_path))
    assert plan.variables["MPSD_FAILOVER_SOCKET"] == socket_of(site)
    site.kill()
    site.write_config(protect='"guard"')
    site.start()
    plan = make_plan(environ, socket_path=site.socket, library=str(tmp_path))
    assert "MPSD_FAILOVER_SOCKET" not in plan.variables
    assert not (site.run_dir / "copies").exists()
    program = site.join()
    assert "1 can be" not in "\n".join(status_text(site.status(), Style(), verbose=True))
    assert said(program, "dev.on_mps")


def test_where_no_spare_is_kept_the_willing_have_one_for_as_long_as_they_are_there() -> None:
    with Site(**SETTINGS, domains__spare="false", failover__linger_s="0.1") as site:
        site.start()
        assert len(site.status()["domains"]) <= 1
        program = ready(site)
        status = all_ready(site, program)
        assert len(status["domains"]) == 2
        program.close()
        site.until(lambda s: len(s["domains"]) == 1, "the standby is given up")
        site.join().fault()
        site.until(lambda s: active(s)["id"] == "d3" and active(s)["state"] == "active", "a fresh one serves")


def test_a_program_that_has_run_out_is_given_what_another_one_has_for_a_fail_over(site: Site) -> None:
    needy, giver = ready(site), ready(site)
    all_ready(site, needy, giver)
    said(needy, "fo.say('SHORT', values=(4096, 1, 7))")
    for spared, given in ((0, 0), (1, 4096)):
        assert said(giver, "fo.hear()")[0] == "GIVE" and said(giver, "fo.values")[0] == spared
        if given:
            said(giver, f"fo.say('UNREADY', generation=fo.generation, values=(1,), text={ANOTHER!r})")
        said(giver, f"fo.say('GAVE', values=({given}, {spared}))")
    assert said(needy, "fo.hear()")[0] == "ROOM" and said(needy, "fo.values")[:2] == [4096, 7]
    status = site.until(lambda s: standings(s)[giver.pid] == "not ready", "the giver is not ready")
    (shown,) = (p for p in slot(status)["programs"] if p["pid"] == giver.pid)
    assert (shown["reason"], shown["standby_bytes"]) == (ANOTHER, 0)
    assert ANOTHER in "\n".join(status_text(status, Style(), verbose=True))


def test_who_gives_what_there_is_not_is_let_go(site: Site) -> None:
    program = ready(site)
    said(program, "fo.say('GAVE', values=(1, 2))")
    assert said(program, "fo.hear()")[0] == "gone"


def test_a_gpu_that_a_program_fills_which_cannot_ask_takes_a_standby(site: Site) -> None:
    giver, silent = ready(site), site.join()
    all_ready(site, giver)
    gpu = site.status()["gpus"][0]
    free = gpu["memory_total_bytes"] - gpu["memory_used_bytes"]
    said(silent, f"dev.alloc({(free - (64 << 20)) // 4})")
    assert said(giver, "fo.hear()")[0] == "GIVE" and said(giver, "fo.values")[0] == 1
    said(giver, f"fo.say('UNREADY', generation=fo.generation, values=(1,), text={ANOTHER!r})")
    said(giver, "fo.say('GAVE', values=(4096, 1))")
    status = site.until(lambda s: standings(s)[giver.pid] == "not ready", "the giver is not ready")
    assert status["counters"]["failover_standbys_yielded"] == 1
