"""Fail-over of a user's programs in private domains: the standby domain is as closed as the first."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mpsd.os import acl
from tests.support.site import OTHER_UID, Program, Site, as_user, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")
THIRD_UID = 65533
SETTINGS = {"protect": '"failover"', "failover__driver": '"/bin/true"'}


@pytest.fixture
def site() -> Iterator[Site]:
    with Site(**SETTINGS) as started:
        yield started.start()


def said(program: Program, expression: str) -> Any:
    answer = program.do(expression)
    assert "result" in answer, answer
    return answer["result"]


def ready(site: Site, uid: int) -> Program:
    """Start a participant of a user that has reported its standby context."""
    program = site.join(uid=uid)
    assert said(program, f"failover({str(site.run_dir / 'failover.sock')!r}, 'keep')")[0] == "WELCOME"
    assert said(program, "fo.prepare()")[0] == "STANDBY"
    return program


def programs(status: Mapping[str, Any]) -> dict[int, str]:
    return {p["pid"]: p["standing"] for slot in status["slots"] for p in slot["programs"]}


def test_programs_of_a_user_move_between_its_private_domains(site: Site) -> None:
    survivor, offender = ready(site, OTHER_UID), ready(site, OTHER_UID)
    pids = {survivor.pid, offender.pid}
    before = site.until(
        lambda s: {pid for pid, standing in programs(s).items() if standing == "ready"} == pids, "both ready"
    )
    domains = {d["id"]: d for d in before["domains"]}
    assert {d["role"]: (d["uid"], d["private"]) for d in domains.values()} == {
        "active": (OTHER_UID, True),
        "spare": (OTHER_UID, True),
    }
    directories = [str(site.run_dir / "d" / name) for name in domains]
    assert all(acl.is_only_for(directory, OTHER_UID) for directory in directories)
    # A program of another user beside them, in its own private domain.
    bystander = site.join(uid=THIRD_UID)
    offender.fault()
    assert said(survivor, "fo.move()")[0] == "MOVE"
    assert said(survivor, "dev.on_mps") and said(survivor, "dev.alloc(16) > 0")
    said(survivor, "dev.synchronize()")

    def moved() -> bool:
        records = site.ask(lambda c: c.failovers(), uid=OTHER_UID)
        outcomes = {c["pid"]: c["outcome"] for record in records for c in record["clients"]}
        return outcomes == {survivor.pid: "moved", offender.pid: "not told"}

    until(moved, "its own user sees the move")
    assert said(bystander, "dev.alloc(16) > 0")
    path = Path(site.client_environ(OTHER_UID)["CUDA_MPS_PIPE_DIRECTORY"])
    after = os.readlink(path)
    assert after in directories and os.path.basename(after) != before["slots"][0]["active"]
    with as_user(THIRD_UID), pytest.raises(PermissionError):
        os.listdir(path)
    # Later programs of the user join where the survivor is.
    later = site.join(uid=OTHER_UID)
    assert said(later, "dev.on_mps")
