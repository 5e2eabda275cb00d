"""What an answer shows of other users' processes."""

from __future__ import annotations

from typing import Any

from mpsd.listener import Peer
from mpsd.ops import HIDDEN, shown_to

ANSWER: dict[str, Any] = {
    "clients": [{"uid": 7, "command": "mine --token a"}, {"uid": 8, "command": "theirs --token b"}],
    "gpus": [{"not_on_mps": [{"pid": 3, "uid": 0, "command": "root's"}]}],
    "offender": None,
}


def test_a_user_sees_no_command_line_of_others() -> None:
    seen = shown_to(Peer(7, 7, 1, frozenset({7}), admin=False), ANSWER)
    assert [row["command"] for row in seen["clients"]] == ["mine --token a", HIDDEN]
    assert seen["gpus"][0]["not_on_mps"][0]["command"] == HIDDEN
    assert ANSWER["clients"][1]["command"] == "theirs --token b"


def test_an_administrator_sees_all() -> None:
    assert shown_to(Peer(7, 7, 1, frozenset(), admin=True), ANSWER) == ANSWER
