"""Effects that the performer carries out itself: it passes most effects on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from mpsd.base.model import ClientId, ProcessInstance, Requester
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.failover.participants import FailoverRecord
from mpsd.core.failover.reports import ClientQueried
from mpsd.daemon.performer import Adapters, Performer
from mpsd.gpu.nvidia import smqueries
from mpsd.mps import servercalls
from mpsd.os.quietperiod import QUIET_S, QuietPeriod
from mpsd.records.bulletin import Moment
from tests.support.core import process, server_of

DEADLINE_S = 20.0


class Bulletin:
    def __init__(self) -> None:
        self.written: list[tuple[int, int]] = []
        self.moments: list[Moment] = []
        self.grew = asyncio.Event()
        self.broken = 0

    def failover(self, record: FailoverRecord, moment: Moment) -> None:
        if record.id == self.broken:
            raise ValueError("what JSON cannot say")
        self.written.append((record.id, record.revision))
        self.moments.append(moment)
        self.grew.set()


def performer(
    bulletin: Bulletin,
    quiet_period: QuietPeriod | None = None,
    told: list[fx.Move] | None = None,
    posted: list[ev.Event] | None = None,
    attacher: object = None,
    post: Callable[[ev.Event], None] | None = None,
) -> Performer:
    others: dict[str, Any] = dict.fromkeys(Adapters.__dataclass_fields__)
    others["attacher"] = attacher
    others["post"] = posted.append if posted is not None else post
    words = ("welcome", "offer", "stand_down", "fenced", "have_turn", "give", "have_memory")
    service = SimpleNamespace(**dict.fromkeys(words, None), limit_snapshots=None, switch_off=None)
    service.move = told.append if told is not None else None
    domains = SimpleNamespace(quiet_period=quiet_period or QuietPeriod())
    adapters: Any = SimpleNamespace(
        **others | {"bulletin": bulletin, "failover": service, "domains": domains}
    )
    return Performer(cast("Adapters", adapters))


@pytest.mark.parametrize("found", ["d2", None])
def test_the_server_that_is_at_a_fault_is_told_if_one_is(
    found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = {name: server_of(name) for name in ("d1", "d2")}
    posted: list[ev.Event] = []
    ended = asyncio.Event()

    async def find(asked: Mapping[str, ProcessInstance]) -> str | None:
        assert asked == servers
        ended.set()
        return found

    async def run() -> None:
        made = performer(Bulletin(), posted=posted)
        made.perform(fx.WatchServers("GPU-0", servers))
        await ended.wait()
        await made.close()

    monkeypatch.setattr(servercalls, "find", find)
    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
    assert posted == ([ev.ServerAtFault("d2", servers["d2"], "GPU-0")] if found else [])


class Holds:
    """Stands for the held queries: sees a query of each client at once, in another thread."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def hold(self, domain: str, clients: Collection[ProcessInstance], seen: smqueries.Seen) -> None:
        self.calls.append(f"hold {domain}")
        for client in clients:
            threading.Thread(target=seen, args=(client,)).start()

    def release(self, domain: str) -> None:
        self.calls.append(f"release {domain}")

    def close(self) -> None:
        self.calls.append("close")


def test_a_client_whose_query_is_seen_is_told_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    client, holds = server_of("d1"), Holds()
    posted: asyncio.Queue[ev.Event] = asyncio.Queue()
    monkeypatch.setattr("mpsd.daemon.performer.HeldQueries", lambda: holds)

    async def run() -> ev.Event:
        made = performer(Bulletin(), post=posted.put_nowait)
        made.perform(fx.HoldQueries("d1", frozenset({client})))
        seen = await posted.get()
        made.perform(fx.ReleaseQueries("d1"))
        await made.close()
        return seen

    assert asyncio.run(asyncio.wait_for(run(), DEADLINE_S)) == ClientQueried("d1", client)
    assert posted.empty() and holds.calls == ["hold d1", "release d1", "close"]


def revision(number: int, of: int = 1) -> fx.RecordFailover:
    record: Any = SimpleNamespace(id=of, revision=number)
    return fx.RecordFailover(cast("FailoverRecord", record))


def test_a_record_is_written_at_once_and_of_its_revisions_the_newest_in_a_moment() -> None:
    asyncio.run(writes_the_newest())


async def writes_the_newest() -> None:
    bulletin = Bulletin()
    does = performer(bulletin)
    for effect in (revision(1), revision(2), revision(1, of=2), revision(3), revision(2, of=2)):
        does.perform(effect)
    assert bulletin.written == [(1, 1), (2, 1)]
    bulletin.grew.clear()
    await asyncio.wait_for(bulletin.grew.wait(), DEADLINE_S)
    assert bulletin.written[2:] == [(1, 3), (2, 2)]
    does.perform(revision(4))
    await does.close()
    assert bulletin.written[4:] == [(1, 4)]


def test_what_is_not_written_yet_is_written_at_the_end() -> None:
    asyncio.run(ends_at_once())


async def ends_at_once() -> None:
    bulletin = Bulletin()
    does = performer(bulletin)
    does.perform(revision(2))
    await does.close()
    assert bulletin.written == [(1, 2)]


def test_after_a_word_to_move_what_takes_the_loops_time_waits_a_moment() -> None:
    asyncio.run(keeps_calm())


async def keeps_calm() -> None:
    quiet_period, told, bulletin = QuietPeriod(lambda: 7.0), list[fx.Move](), Bulletin()
    does = performer(bulletin, quiet_period, told)
    move = fx.Move(process(7), 2, "a fault")
    assert quiet_period.remaining_s() == 0
    does.perform(move)
    assert told == [move] and quiet_period.remaining_s() == pytest.approx(QUIET_S)
    # Records are not written meanwhile either; each has the moment of its decision.
    before = Moment.now()
    does.perform(revision(1))
    assert bulletin.written == []
    after = Moment.now()
    # They are written before a reader can learn of them.
    does.tell()
    assert bulletin.written == [(1, 1)]
    await does.close()
    assert before.at <= bulletin.moments[0].at <= after.at
    assert before.raw_ns <= bulletin.moments[0].raw_ns <= after.raw_ns


def test_a_record_that_cannot_be_written_is_counted_and_holds_up_no_other() -> None:
    asyncio.run(writes_the_others())


async def writes_the_others() -> None:
    bulletin, posted = Bulletin(), list[ev.Event]()
    bulletin.broken = 1
    does = performer(bulletin, posted=posted)
    for effect in (revision(2), revision(2, of=2)):
        does.perform(effect)
    await does.close()
    assert bulletin.written == [(2, 2)]
    assert posted == [ev.Counted({"effects_failed": 1})]
    # A record after the end is written at once: there are no later rounds.
    does.perform(revision(3, of=2))
    assert bulletin.written == [(2, 2), (2, 3)]


def test_each_act_of_force_is_one_line_of_the_audit_log() -> None:
    asyncio.run(audits_acts())


async def audits_acts() -> None:
    acted: list[str] = []

    def act(process: ProcessInstance, owner: int | None) -> str:
        acted.append(str(process))
        return f"outcome {len(acted)}"

    client, requester = ClientId("d1", process(10)), Requester(0, 0, 77, "/system.slice")
    policy = fx.Grounds(1000, "a guard zone was hit", ("own",), None, 4, "guard-hit")
    does = performer(Bulletin(), attacher=SimpleNamespace(kill=act, freeze=act))
    with capture_logs() as lines:
        does.perform(fx.AuditEviction(client, "begun", policy))
        does.perform(fx.Freeze(client, 1000, policy))
        does.perform(fx.Kill(client, "asked", None, fx.Grounds(1000, "asked", ("leased",), requester)))
    await does.close()
    assert [(line["action"], line["outcome"], line["by"]) for line in lines] == [
        ("evict", "begun", "policy"),
        ("freeze", "outcome 1", "policy"),
        ("kill", "outcome 2", "peer"),
    ]
    common = {"logger": "mpsd.audit", "domain": "d1", "pid": 10, "start_ticks": 1, "uid": 1000}
    assert all(common.items() <= line.items() for line in lines)
    evict, freeze, kill = lines
    assert evict["fault"] == freeze["fault"] == 4 and evict["fault_class"] == "guard-hit"
    assert kill["claimed_cgroup"] == "/system.slice" and "fault" not in kill
