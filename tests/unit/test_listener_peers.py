"""Who is asking: the kernel's credentials, groups, and what they allow."""

from __future__ import annotations

import os

import pytest

from mpsd.listener import Peer
from mpsd.listener.peers import CACHE_S, Credentials, Rights, parse_address

NOBODY = 65534


def test_addresses_of_peers() -> None:
    assert parse_address("localhost:1000:100:4711") == Credentials(1000, 100, 4711)
    for bad in ("", "None", "localhost", "127.0.0.1:5555", "localhost:a:1:2", "localhost:-1:1:2"):
        assert parse_address(bad) is None


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
