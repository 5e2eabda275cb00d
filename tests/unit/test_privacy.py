"""Answers and events hide details of other users' processes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from mpsd.api.privacy import HIDDEN, owners, visible_to
from mpsd.api.usernames import user_name
from mpsd.base.model import ClientId
from mpsd.core.faults.records import (
    Evidence,
    FaultRecord,
    LoggedProcess,
    MovedClient,
    Party,
    Source,
)
from mpsd.peers import Peer
from mpsd.records.recordtext import record_json
from tests.support.core import GPU, facts

ANSWER: dict[str, Any] = {
    "clients": [
        {"pid": 1, "uid": 7, "command": "mine --token a", "problem": "process 1 is not readable"},
        {"pid": 2, "uid": 8, "command": "theirs --token b", "problem": "process 2 is not readable"},
    ],
    "gpus": [{"not_on_mps": [{"pid": 3, "uid": 0, "command": "root's"}]}],
    "offender": None,
}


def user(uid: int) -> Peer:
    return Peer(uid, uid, 1, frozenset({uid}), admin=False)


def party(pid: int, uid: int) -> Party:
    found = facts(pid, uid=uid)
    return Party(ClientId("d1", found.instance), found)


def record(*, offender: Party | None = None, suspects: tuple[Party, ...] = (), text: str) -> dict[str, Any]:
    sign = Evidence(Source.KERNEL_LOG, 0.0, text)
    victims = (party(703, 7), party(803, 8))
    found = FaultRecord(
        1, 0.0, "d1", (GPU,), "sm-trap", offender, suspects=suspects, victims=victims, evidence=(sign,)
    )
    return record_json(found, 0.0, None)


def test_a_user_sees_that_others_are_there_but_not_who() -> None:
    seen = visible_to(user(7), ANSWER)
    assert seen["clients"][0] == ANSWER["clients"][0]
    theirs = seen["clients"][1]
    assert theirs == {"pid": None, "uid": None, "command": HIDDEN, "problem": "[...]"}
    assert seen["gpus"][0]["not_on_mps"] == [{"pid": None, "uid": None, "command": HIDDEN}]
    assert ANSWER["clients"][1]["command"] == "theirs --token b"


def test_an_administrator_sees_all() -> None:
    assert visible_to(Peer(7, 7, 1, frozenset(), admin=True), ANSWER) == ANSWER


XID = "NVRM: Xid (PCI:0000:01:00): 13, pid=801, name=a, b, Graphics Exception"


@pytest.mark.parametrize("text", [XID, "Client {PID: 801, Context ID: 1} met a fault", "801@99 died"])
def test_a_record_of_a_shared_domain_names_to_each_user_its_own_clients_alone(text: str) -> None:
    full = record(suspects=(party(701, 7), party(801, 8)), text=text)
    assert owners(full) == {7, 8}
    seen = visible_to(user(7), full)
    assert [p["pid"] for p in seen["suspects"]] == [701, None]
    assert (seen["victims"], seen["victim_uids"], seen["victims_hidden"]) == ([703], [7], 1)
    said = json.dumps(seen)
    for secret in ("801", "803", "program80", "pid=", "name="):
        assert secret not in said
    assert "program701" in said


def test_the_victim_of_anothers_fault_is_told_and_not_by_whom() -> None:
    full = record(offender=party(801, 8), text=XID)
    seen = visible_to(user(7), full)
    assert seen["offender"]["pid"] is None and seen["offender"]["command"] == HIDDEN
    assert seen["victims"] == [703]


def test_a_record_of_ones_own_is_whole() -> None:
    full = record(offender=party(701, 7), text=XID)
    full |= {"victims": [703], "victim_uids": [7]}
    assert visible_to(user(7), full) == full | {"victims_hidden": 0}


def test_a_user_sees_its_own_moved_clients_and_the_pauses_of_the_others() -> None:
    moved = (MovedClient(party(701, 7), 41.5), MovedClient(party(801, 8), None, "missing: program80's copy"))
    found = FaultRecord(1, 0.0, "d1", (GPU,), "sm-trap", moved=moved)
    full = record_json(found, 0.0, None)
    assert full["victims"] == [] and owners(full) == {7, 8}
    assert full["moved"][0] == {
        "pid": 701,
        "start_ticks": 1,
        "uid": 7,
        "user": user_name(7),
        "command": "program701",
        "pause_ms": 41.5,
        "why": "",
    }
    own, other = visible_to(user(7), full)["moved"]
    assert own == full["moved"][0]
    assert (other["pid"], other["pause_ms"], other["command"], other["why"]) == (None, None, HIDDEN, "")
    assert "80" not in json.dumps([own, other])


def test_two_contexts_of_a_moved_client_are_one_entry() -> None:
    twice = (MovedClient(party(701, 7), 41.5), MovedClient(replace(party(701, 7)), 41.5))
    found = FaultRecord(1, 0.0, "d1", (GPU,), "sm-trap", moved=twice)
    assert [m["pid"] for m in record_json(found, 0.0, None)["moved"]] == [701]


def test_a_process_that_only_the_kernel_log_names_is_for_administrators() -> None:
    text = "NVRM: Xid (PCI:0000:01:00): 43, pid=4242, name=python, Ch 00000008"
    sign = Evidence(Source.KERNEL_LOG, 0.0, text)
    found = FaultRecord(1, 0.0, None, (GPU,), "unattributed-xid", logged=LoggedProcess(4242, "python"))
    full = record_json(replace(found, evidence=(sign,)), 0.0, None)
    assert full["offender"] == {
        "pid": 4242,
        "start_ticks": None,
        "uid": None,
        "user": None,
        "command": "python",
    }
    assert owners(full) == frozenset()
    said = json.dumps(visible_to(user(7), full))
    assert "4242" not in said and "python" not in said


def test_a_record_of_an_earlier_release_has_no_moved_clients() -> None:
    full = record(offender=party(701, 7), text=XID)
    del full["moved"]
    assert owners(full) == {7, 8}
    assert visible_to(user(7), full)["victims"] == [703]
