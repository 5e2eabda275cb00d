"""Several users of one daemon: own or shared domains, and no rights over other users' clients."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

import pytest

import mpsd_client
from tests.support.site import DEADLINE_S, OTHER_UID, Site, as_user, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")
THIRD_UID = 65533


def test_each_user_has_a_path_and_a_domain_of_its_own(site: Site) -> None:
    ours, theirs = site.join(), site.join(uid=OTHER_UID)
    paths = {site.client_environ(uid)["CUDA_MPS_PIPE_DIRECTORY"] for uid in (None, OTHER_UID)}
    assert len(paths) == 2
    status = site.status()
    rows = {c["pid"]: c for c in status["clients"]}
    domains = {d["id"]: d for d in status["domains"]}
    assert rows[theirs.pid]["uid"] == OTHER_UID
    assert rows[theirs.pid]["domain"] != rows[ours.pid]["domain"]
    assert domains[rows[theirs.pid]["domain"]]["uid"] == OTHER_UID
    assert domains[rows[ours.pid]["domain"]]["uid"] == 0
    assert {"lease", "tracker"} <= set(rows[theirs.pid]["protections"])
    # Both clients work at the same time.
    assert ours.do("dev.alloc(16) > 0") == theirs.do("dev.alloc(16) > 0") == {"result": True}


def test_a_fault_of_one_user_does_not_reach_another(site: Site) -> None:
    survivor, offender = site.join("work"), site.join(uid=OTHER_UID)
    offender.do("dev.launch('store')")
    assert offender.do("dev.synchronize()")["error"] == 700
    record = site.until_fault("mmu-invalid-address")
    assert (record["offender"]["pid"], record["offender"]["uid"]) == (offender.pid, OTHER_UID)
    assert record["victims"] == []
    assert survivor.finish()["rounds"] > 0
    # A user sees only the records of its own clients.
    own = site.ask(lambda c: c.faults(), uid=OTHER_UID)
    assert [r["id"] for r in own] == [record["id"]]
    assert site.ask(lambda c: c.faults(), uid=THIRD_UID) == []


def test_users_evict_their_own_clients_and_no_others(site: Site) -> None:
    ours, theirs = site.join(), site.join(uid=OTHER_UID)
    with pytest.raises(mpsd_client.NotFoundError, match="not a client of yours"):
        site.ask(lambda c: c.kill(ours.pid), uid=OTHER_UID)
    with pytest.raises(mpsd_client.NotFoundError, match="not a client of yours"):
        site.ask(lambda c: c.kill(theirs.pid, dry_run=True), uid=THIRD_UID)
    assert ours.do("1 + 1") == {"result": 2}
    assert site.ask(lambda c: c.kill(theirs.pid), uid=OTHER_UID)["outcome"] == "evicted"
    # Root may evict any client.
    again = site.join(uid=OTHER_UID)
    assert site.ask(lambda c: c.kill(again.pid))["outcome"] == "evicted"


@pytest.mark.parametrize("asked", [{}, {"dry_run": True}, {"start_ticks": 1}])
def test_whether_a_process_of_others_is_a_client_is_not_told(site: Site, asked: dict[str, Any]) -> None:
    client = site.join()

    def answer(pid: int, uid: int | None) -> tuple[type[Exception], str]:
        with pytest.raises(mpsd_client.MpsdError) as told:
            site.ask(lambda c: c.kill(pid, **asked), uid=uid)
        return type(told.value), str(told.value).replace(str(pid), "PID")

    # A client of another user, another user's process that is no client, and an unused pid.
    answers = {answer(pid, OTHER_UID) for pid in (client.pid, site.pid, 2**22)}
    assert len(answers) == 1, answers
    # A user that may see all clients gets the reason.
    assert "not a client of any domain" in answer(site.pid, None)[1]
    if "start_ticks" in asked:
        assert "used again" in answer(client.pid, None)[1]
    client.finish()


@pytest.mark.parametrize("operation", ["drain", "undrain"])
def test_only_administrators_drain(site: Site, operation: str) -> None:
    with pytest.raises(mpsd_client.DeniedError, match=f"user {OTHER_UID} may not {operation}"):
        site.ask(lambda c: c.call(operation), uid=OTHER_UID)
    assert not site.status()["draining"]


def test_a_user_sees_the_events_of_its_own_clients_alone(site: Site) -> None:
    with as_user(OTHER_UID):
        user = mpsd_client.connect(site.socket)
        theirs = user.subscribe()
    with user, mpsd_client.connect(site.socket) as root:
        everything = root.subscribe()
        foreign, own = site.join(), site.join(uid=OTHER_UID)
        assert attached(everything, own.pid) == [foreign.pid, own.pid]
        assert attached(theirs, own.pid) == [own.pid]


def attached(stream: mpsd_client.EventStream, last: int) -> list[int]:
    """Return the pids of the stream's client-attached events, up to this one."""
    end, found = time.monotonic() + DEADLINE_S, list[int]()
    while last not in found:
        event = stream.next(end)
        found += [event["pid"]] if event["kind"] == "client-attached" else []
    return found


def test_shared_domains_serve_several_users_at_once() -> None:
    with Site(domains__mode='"shared"') as site:
        site.start()
        # The first client stays in its domain for the whole test: stock MPS would make the others wait for
        # its end.
        first = site.join("work")
        second, third = site.join(uid=OTHER_UID), site.join(uid=THIRD_UID)
        status = site.attached(first, second, third)
        assert len({c["domain"] for c in status["clients"]}) == 1
        domain = next(d for d in status["domains"] if d["role"] == "active")
        assert (domain["uid"], domain["user"], domain["clients"]) == (None, None, 3)
        assert "all users" in domain["reach"]
        for program in (second, third):
            assert program.do("dev.alloc(16) > 0") == {"result": True}
        # A user may evict its own client, but not another user's.
        with pytest.raises(mpsd_client.NotFoundError):
            site.ask(lambda c: c.kill(third.pid), uid=OTHER_UID)
        second.do("dev.launch('forever')")
        assert site.ask(lambda c: c.kill(second.pid), uid=OTHER_UID)["outcome"] == "evicted"
        assert third.do("dev.alloc(16) > 0") == {"result": True}
        assert first.finish()["rounds"] > 0


def test_a_user_can_ask_for_the_shared_domain(site: Site) -> None:
    shared = {site.client_environ(uid, shared=True)["CUDA_MPS_PIPE_DIRECTORY"] for uid in (None, OTHER_UID)}
    assert len(shared) == 1
    environ = site.environ() | {"CUDA_MPS_PIPE_DIRECTORY": shared.pop()}
    ours = site.program(environ=environ)
    theirs = site.program(uid=OTHER_UID, environ=environ)
    status = site.attached(ours, theirs)
    assert len({c["domain"] for c in status["clients"]}) == 1


def test_a_forged_log_line_gets_no_innocent_killed() -> None:
    with Site(domains__private="false") as site:
        site.start("--stop-domains")
        client = site.join(uid=OTHER_UID)
        (row,) = site.status()["clients"]
        assert {"own", "leased"} <= set(row["proof"])
        # A process of root that is no client, although a user's server can write any line into its domain's
        # log.
        innocent = subprocess.Popen(["sleep", "1000"], start_new_session=True, env={})
        try:
            with (site.log_dir / row["domain"] / "control.log").open("a") as log:
                log.write(f"[2026-01-01 00:00:00.000 Control 1] NEW CLIENT {innocent.pid} from user 0: x\n")
            status = site.until(
                lambda s: [c for c in s["clients"] if c["pid"] == innocent.pid], "the line is read"
            )
            assert next(c["proof"] for c in status["clients"] if c["pid"] == innocent.pid) == []
            with pytest.raises(mpsd_client.MpsdError, match="only a line in a log"):
                site.ask(lambda c: c.kill(innocent.pid))
            plan = site.ask(lambda c: c.kill(innocent.pid, dry_run=True))
            assert "nothing" in plan["steps"][0]
            assert site.process is not None
            site.process.terminate()
            client.wait()
            assert innocent.poll() is None
        finally:
            innocent.kill()
            innocent.wait(DEADLINE_S)
        assert site.terminate() == 0
        until(lambda: not site.processes("nvidia-cuda-mps"), "every domain has ended")


def test_a_fault_in_a_shared_domain_names_to_each_user_its_own_clients_alone() -> None:
    with Site(domains__mode='"shared"') as site:
        site.start()
        ours, theirs = site.join(uid=OTHER_UID), site.join(uid=THIRD_UID)
        site.until(lambda s: all("listed" in c["proof"] for c in s["clients"]), "the server lists both")
        with as_user(OTHER_UID):
            user = mpsd_client.connect(site.socket)
            stream = user.subscribe()
        with user:
            ours.do("dev.launch('trap')")
            site.until(lambda s: [d for d in s["domains"] if d["state"] == "faulted"], "it has faulted")
            end = time.monotonic() + DEADLINE_S
            while (event := stream.next(end))["kind"] != "fault":
                pass
        (full,) = site.faults()
        (told,) = site.ask(lambda c: c.faults(), uid=OTHER_UID)
        assert {p["pid"] for p in full["suspects"]} == {ours.pid, theirs.pid}
        for record in (event, told):
            assert {p["pid"] for p in record["suspects"]} == {ours.pid, None}
            assert str(theirs.pid) not in str(record)
            assert str(THIRD_UID) not in str(record)
        # Status hides them, too.
        rows = site.ask(lambda c: c.status(), uid=OTHER_UID)["clients"]
        assert {row["pid"] for row in rows} == {ours.pid, None}
        stranger = site.ask(lambda c: c.faults(), uid=1)
        assert stranger == []


def test_a_private_domain_is_closed_to_other_users() -> None:
    with Site() as site:
        site.start()
        theirs = site.join(uid=OTHER_UID)
        (row,) = site.status()["clients"]
        pipe = site.run_dir / "d" / row["domain"]
        assert theirs.do("dev.on_mps") == {"result": True}
        for uid, enters in ((OTHER_UID, True), (THIRD_UID, False)):
            with as_user(uid):
                assert os.access(pipe / "control", os.F_OK, effective_ids=True) == enters
        # Root's control daemon has every right that it needs.
        assert site.ask(lambda c: c.kill(theirs.pid))["outcome"] == "evicted"
        assert site.join(uid=OTHER_UID).do("1 + 1") == {"result": 2}
