"""Many requests of one user: answered in turn, with other users' in between, and without repeated work."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mpsd.api.operations import STATUS_CACHE_S, Operations, drain_requests
from mpsd.core.engine import decide
from mpsd.core.state import State
from mpsd.peers import Peer
from mpsd.wire.messages import Request

USER = Peer(7, 7, 1, frozenset({7}), admin=False)
OTHER = Peer(8, 8, 1, frozenset({8}), admin=False)
ROOT = Peer(0, 0, 1, frozenset({0}), admin=True)


class Records(list[dict[str, Any]]):
    """A journal that notes which user reads it when."""

    def __init__(self, asked: list[str]) -> None:
        self.asked = asked

    def records(self) -> list[dict[str, Any]]:
        self.asked.append("faults")
        return []


class Setup:
    """Operations of a daemon that consists of a clock, a state and a journal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[int] = []
        self.time = 100.0
        self.daemon = SimpleNamespace(
            now=lambda: self.time,
            runtime=SimpleNamespace(state=State()),
            bulletin=SimpleNamespace(journal=Records([])),
        )
        monkeypatch.setattr(Operations, "_fresh_status", self.fresh)
        self.operations = Operations(self.daemon)  # type: ignore[arg-type]

    async def fresh(self, peer: Peer) -> dict[str, Any]:
        self.made.append(peer.uid)
        return {"for": peer.uid}

    async def ask(self, peer: Peer, op: str = "status") -> Any:
        return await self.operations.handle(peer, Request(1, op, {}, 1000))


def test_a_heap_of_questions_is_answered_from_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(monkeypatch)

    async def run() -> None:
        answers = await asyncio.gather(*(setup.ask(peer) for peer in (USER, OTHER) * 10))
        assert [a["for"] for a in answers] == [7, 8] * 10
        assert sorted(setup.made) == [7, 8]
        # Each request of an administrator reads the state again.
        await asyncio.gather(*(setup.ask(ROOT) for _ in range(3)))
        assert setup.made.count(0) == 3

    asyncio.run(run())


def test_holders_are_told_to_those_whose_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(monkeypatch)
    rows = [{"pid": uid + 100, "start_ticks": 1, "uid": uid, "blind": False} for uid in (7, 8)]
    nobodys = {"pid": 109, "start_ticks": 1, "uid": None, "blind": None}
    setup.daemon.holders = lambda: [*rows, nobodys]

    async def run() -> None:
        assert (await setup.ask(USER, "holders"))["holders"] == rows[:1]
        assert (await setup.ask(OTHER, "holders"))["holders"] == rows[1:]
        assert (await setup.ask(ROOT, "holders"))["holders"] == [*rows, nobodys]

    asyncio.run(run())


def test_no_answer_is_older_than_the_state_or_than_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(monkeypatch)

    async def run() -> None:
        await setup.ask(USER)
        setup.daemon.runtime.state = State()
        await setup.ask(USER)
        assert setup.made == [7, 7]
        setup.time += 2 * STATUS_CACHE_S
        await setup.ask(USER)
        assert setup.made == [7, 7, 7]

    asyncio.run(run())


def test_others_come_between_the_questions_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(monkeypatch)

    async def run() -> None:
        order: list[str] = []

        async def told(peer: Peer, name: str) -> None:
            await setup.ask(peer, "faults")
            order.append(name)

        await asyncio.gather(
            *(told(USER, "flood") for _ in range(20)), told(OTHER, "other"), told(ROOT, "root")
        )
        assert order.index("root") == 0 and order.index("other") <= 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("drained", "gpus", "on", "remain"),
    [
        (set(), [], True, {"*"}),
        (set(), ["a"], True, {"a"}),
        ({"a"}, ["a"], False, set()),
        ({"a", "b"}, [], False, set()),
        # The drain of every GPU ends for the named one alone.
        ({"*"}, ["a"], False, {"b"}),
        ({"*", "a"}, ["a", "b"], False, set()),
        ({"*"}, [], False, set()),
    ],
)
def test_what_stays_drained(drained: set[str], gpus: list[str], on: bool, remain: set[str]) -> None:
    left = frozenset(drained)
    for event in drain_requests(left, gpus, ["a", "b"], on=on):
        left = decide(State(drained=left), event, 0.0).state.drained
    assert left == remain
