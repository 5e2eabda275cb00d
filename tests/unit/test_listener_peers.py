"""The peer of a connection: the kernel's credentials, groups, and what they allow."""

from __future__ import annotations

import os
import socket

import pytest

from mpsd.peers import Peer
from mpsd.peers.connection import Connection
from mpsd.peers.credentials import CACHE_S, Credentials, Rights
from mpsd.peers.quotas import Account
from mpsd.peers.receive import Refused

NOBODY = 65534


def test_who_is_an_administrator(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    groups = [NOBODY, 0]
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: [gid, *groups])
    rights = Rights("root", own_uid=1234, clock=lambda: now)
    root, own, other = Credentials(0, 0, 1), Credentials(1234, 5, 1), Credentials(1, 1, 1)
    for credentials in (root, own):
        known = rights.known(credentials)
        assert known is not None and known.admin
    assert rights.known(other) is None
    assert rights.peer(other).admin and rights.peer(other).groups >= {0, 1, NOBODY}
    groups.clear()
    assert rights.peer(other).admin, "known for a while"
    now = CACHE_S + 1
    assert not rights.peer(other).admin
    assert not Rights("root", own_uid=1234).peer(Credentials(4_000_000, 77, 1)).admin
    assert not Rights("no-such-group", own_uid=1234).peer(Credentials(4_000_000, 77, 1)).admin


def test_who_may_see_what() -> None:
    admin = Peer(5, 5, 1, frozenset(), True)
    user = Peer(5, 5, 1, frozenset(), False)
    assert admin.may_see(()) and admin.may_see({7})
    assert user.may_see({5, 7}) and not user.may_see({7}) and not user.may_see(())


USER, ELSE, SETUID = Credentials(1000, 1000, 50), Credentials(1001, 1001, 60), Credentials(0, 0, 50)


@pytest.mark.parametrize(
    ("senders", "good"),
    [
        pytest.param([USER, USER], 2, id="the process that connected"),
        pytest.param([Credentials(1000, 5, 51), USER], 2, id="a child of the same user"),
        pytest.param([ELSE], 0, id="another user from the start"),
        pytest.param([USER, ELSE], 1, id="another user later"),
        pytest.param([SETUID, SETUID, USER], 2, id="one real uid of a set-user-ID program"),
        pytest.param([Credentials(1001, 5, 0)], 0, id="another user of another pid namespace"),
        pytest.param([None], 0, id="unknown"),
    ],
)
def test_a_connection_stays_with_its_user(senders: list[Credentials | None], good: int) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        connection = Connection(sock, USER, Account(1000, 1000), 1, 1)
        for sender in senders[:good]:
            connection.check_sender(sender)
        for sender in senders[good:]:
            with pytest.raises(Refused, match="sender"):
                connection.check_sender(sender)
