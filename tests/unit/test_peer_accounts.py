"""The account of a peer: subordinate ids, the cgroup, and the reserve's members."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpsd.os import processes, procfs
from mpsd.peers.accounts import Accounts
from mpsd.peers.credentials import Credentials, Rights, peer_credentials, peer_groups
from mpsd.peers.quotas import Account
from mpsd.peers.requests import Requests
from mpsd.wire.messages import ErrorReply, Request


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair(socket.AF_UNIX)
    with left, right:
        yield left, right


def accounts(tmp_path: Path, subuid: str) -> Accounts:
    (tmp_path / "subuid").write_text(subuid)
    (tmp_path / "passwd").write_text("root:x:0:0::/:\nalice:x:1000:1000::/:\nbob:x:1001:1001::/:\nodd\n")
    return Accounts(tmp_path / "subuid", tmp_path / "passwd")


def test_subordinate_ids_are_charged_to_their_user(tmp_path: Path) -> None:
    found = accounts(
        tmp_path,
        "alice:100000:65536\n1001:200000:10\nroot:300000:65536\nldap:400000:5\nbroken\nx:y:z\n"
        f"huge:{'9' * 5000}:1\n",
    )
    wanted = {1000: 1000, 99_999: 99_999, 100_000: 1000, 165_535: 1000, 165_536: 165_536}
    wanted |= {200_009: 1001, 200_010: 200_010, 0: 0}
    # Root is not charged for its ranges, and an unknown user's range is one account too.
    wanted |= {300_001: 300_000, 365_535: 300_000, 400_004: 400_000}
    assert {uid: found.owner(uid) for uid in wanted} == wanted


def test_ranges_are_read_again_when_they_change(tmp_path: Path) -> None:
    found = accounts(tmp_path, "")
    assert found.owner(100_001) == 100_001
    (tmp_path / "subuid").write_text("bob:100000:10\n")
    os.utime(tmp_path / "subuid", (1, 1))
    found.refresh()
    assert found.owner(100_001) == 1001
    (tmp_path / "subuid").unlink()
    found.refresh()
    assert found.owner(100_001) == 1001


def test_a_read_that_fails_is_tried_again(tmp_path: Path) -> None:
    accounts(tmp_path, "bob:100000:10\n")
    passwd = (tmp_path / "passwd").rename(tmp_path / "away")
    found = Accounts(tmp_path / "subuid", tmp_path / "passwd")
    assert found.owner(100_001) == 100_001
    passwd.rename(tmp_path / "passwd")
    found.refresh()
    assert found.owner(100_001) == 1001


def test_without_the_file_each_uid_is_its_own_user(tmp_path: Path) -> None:
    assert Accounts(tmp_path / "none", tmp_path / "none").owner(100_000) == 100_000


def test_the_account_has_the_cgroup_of_the_process(pair: tuple[socket.socket, socket.socket]) -> None:
    left, _ = pair
    found = Accounts().of(left, peer_credentials(left))
    assert found.uid == os.getuid()
    assert found.cgroup == processes.cgroup_name(procfs.cgroups(os.getpid()))
    assert Accounts().of(left, Credentials(os.getuid(), 0, 0)).cgroup == ""


def test_the_reserve_is_for_root_and_the_group_of_the_process(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    left, _ = pair
    assert peer_credentials(left) == Credentials(os.geteuid(), os.getegid(), os.getpid())
    assert set(os.getgroups()) <= peer_groups(left) | {os.getegid()}
    rights = Rights("root", own_uid=1234)
    stranger = Credentials(4_000_000, 77, 1)
    assert rights.privileged(Credentials(0, 5, 1), ())
    assert rights.privileged(stranger, {0}) and rights.privileged(Credentials(4_000_000, 0, 1), ())
    assert not rights.privileged(stranger, {5, 6})
    assert not Rights("no-such-group", own_uid=1234).privileged(stranger, ())


def test_requests_of_one_container_leave_room_for_those_of_its_user() -> None:
    """Requests that are being served count per account, and twice as many per user."""
    refused: list[tuple[int, str]] = []

    async def work() -> None:
        go_on = asyncio.Event()

        async def wait(*_: object) -> Mapping[str, object]:
            await go_on.wait()
            return {}

        def answer(connection: Any, request: Request, outcome: object, _: object) -> None:
            if isinstance(outcome, ErrorReply):
                refused.append((request.id, outcome.code))

        requests = Requests(wait, Rights("root"), answer, max_pending=2)
        numbers = itertools.count(1)

        def ask(*cgroups: str) -> None:
            for cgroup in cgroups:
                found: Any = SimpleNamespace(
                    account=Account(1000, 100_000, cgroup), credentials=Credentials(0, 0, 1)
                )
                requests.begin(found, Request(next(numbers), "doctor", {}, 60_000))

        ask("/a", "/a", "/a", "/b", "/b", "/b", "/c")
        assert refused == [(3, "busy"), (6, "busy"), (7, "busy")]
        go_on.set()
        while requests._pending:
            await asyncio.sleep(0)
        ask("/a")
        assert len(refused) == 3
        await requests.close()

    asyncio.run(asyncio.wait_for(work(), 20.0))
