"""What an answer or an event shows of other users' processes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mpsd.core.records import Evidence, FaultRecord, Party, Source
from mpsd.listener import Peer
from mpsd.model import ClientId
from mpsd.privacy import HIDDEN, owners, shown_to
from mpsd.recordtext import record_json
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
    seen = shown_to(user(7), ANSWER)
    assert seen["clients"][0] == ANSWER["clients"][0]
    theirs = seen["clients"][1]
    assert theirs == {"pid": None, "uid": None, "command": HIDDEN, "problem": "[...]"}
    assert seen["gpus"][0]["not_on_mps"] == [{"pid": None, "uid": None, "command": HIDDEN}]
    assert ANSWER["clients"][1]["command"] == "theirs --token b"


def test_an_administrator_sees_all() -> None:
    assert shown_to(Peer(7, 7, 1, frozenset(), admin=True), ANSWER) == ANSWER


XID = "NVRM: Xid (PCI:0000:01:00): 13, pid=801, name=a, b, Graphics Exception"


@pytest.mark.parametrize("text", [XID, "Client {PID: 801, Context ID: 1} met a fault", "801@99 died"])
def test_a_record_of_a_shared_domain_names_to_each_user_its_own_clients_alone(text: str) -> None:
    full = record(suspects=(party(701, 7), party(801, 8)), text=text)
    assert owners(full) == {7, 8}
    seen = shown_to(user(7), full)
    assert [p["pid"] for p in seen["suspects"]] == [701, None]
    assert (seen["victims"], seen["victim_uids"], seen["victims_hidden"]) == ([703], [7], 1)
    said = json.dumps(seen)
    for secret in ("801", "803", "program80", "pid=", "name="):
        assert secret not in said
    assert "program701" in said


def test_the_victim_of_anothers_fault_is_told_and_not_by_whom() -> None:
    full = record(offender=party(801, 8), text=XID)
    seen = shown_to(user(7), full)
    assert seen["offender"]["pid"] is None and seen["offender"]["command"] == HIDDEN
    assert seen["victims"] == [703]


def test_a_record_of_ones_own_is_whole() -> None:
    full = record(offender=party(701, 7), text=XID)
    full |= {"victims": [703], "victim_uids": [7]}
    assert shown_to(user(7), full) == full | {"victims_hidden": 0}
