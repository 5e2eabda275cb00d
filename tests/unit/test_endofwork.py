"""Watching the work of exited clients: each life of a process has its own watch; views are closed once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

import pytest

from mpsd.base.errors import UnsupportedError
from mpsd.base.model import ClientId, ProcessInstance
from mpsd.clients import endofwork
from mpsd.clients.endofwork import WorkWatch
from mpsd.core import events as ev

PROCESS = ProcessInstance(10, 1)
FIRST, SECOND, THIRD = (ClientId("d1", PROCESS, space) for space in (0, 1, 2))
A_KERNEL = "a kernel"


class View:
    """`left`: pending work. `go_on`: cleared, a look at a living process hangs. `error`: raised by it.
    `pause`: cleared, a look at a dead process hangs, after it has read.
    """

    fds: Mapping[str, int] = {}

    def __init__(self) -> None:
        self.closed = self.refreshed = self.inside = 0
        self.closed_inside = self.twice_at_a_time = False
        self.left: str | None = ""
        self.left_out: list[tuple[int, int]] | None = None
        self.located = self.settled = True
        self.looks = 0
        self.used: bool | None = False
        self.error: Exception | None = None
        self.threads: set[str] = set()
        self.go_on = threading.Event()
        self.go_on.set()
        self.pausing, self.pause = threading.Event(), threading.Event()
        self.pause.set()

    def refresh(self) -> None:
        self.twice_at_a_time |= bool(self.inside)
        self.inside += 1
        self.refreshed += 1
        self.threads.add(threading.current_thread().name)
        assert self.go_on.wait(10)
        self.inside -= 1
        if self.error is not None:
            raise self.error

    def leave_out(self, spans: Sequence[tuple[int, int]]) -> None:
        self.left_out = list(spans)

    def pending(self) -> str | None:
        self.looks += 1
        assert not self.closed
        left = self.left
        if not self.pause.is_set():
            self.pausing.set()
            assert self.pause.wait(10)
        return left

    def launched(self) -> bool | None:
        self.refresh()
        return self.used

    def close(self) -> None:
        self.closed_inside |= bool(self.inside)
        self.closed += 1


class Setup:
    """A watch, its views in the order of their opening, and every event that it posted."""

    def __init__(self) -> None:
        self.views: list[View] = []
        self.told: list[ev.Event] = []
        self.watch = WorkWatch(self, 0.001, self.told.append)

    def open(self, process: ProcessInstance, pidfd: int) -> View:
        self.views.append(View())
        return self.views[-1]

    def adopt(self, process: ProcessInstance, fds: Mapping[str, int]) -> View:
        return self.open(process, -1)

    def is_present(self, process: ProcessInstance, fds: Mapping[str, int]) -> bool:
        return True

    def follow(self, *clients: ClientId) -> View:
        self.watch.follow(clients, self.watch.open_view(PROCESS, -1))
        return self.views[-1]

    async def swept(self, clients: Collection[ClientId], view: View) -> None:
        """Wait until a sweep of these clients that began after this call has looked at one of them."""
        seen = view.refreshed
        await until(lambda: self.watch.refresh(clients) or view.refreshed > seen)

    def ended(self) -> list[ClientId]:
        assert all(isinstance(event, ev.WorkEnded) for event in self.told)
        return [event.client for event in self.told if isinstance(event, ev.WorkEnded)]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


def with_setup(play: Callable[[Setup], Coroutine[Any, Any, None]]) -> Setup:
    """Run the test; all views are closed once afterwards."""

    async def run() -> Setup:
        setup = Setup()
        try:
            await play(setup)
        finally:
            for view in setup.views:
                view.go_on.set()
                view.pause.set()
            await setup.watch.close()
        return setup

    setup = asyncio.run(run())
    assert [view.closed for view in setup.views] == [1] * len(setup.views)
    assert not any(view.closed_inside or view.twice_at_a_time for view in setup.views)
    return setup


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> None:
    """No client is probed for being young, and no sweep abandons a probe."""
    monkeypatch.setattr(endofwork, "YOUNG_S", 0.0)
    monkeypatch.setattr(endofwork, "PATIENCE_S", 10.0)


def test_what_still_runs_is_said_once_and_only_after_a_look_that_began_when_it_was_asked() -> None:
    async def play(setup: Setup) -> None:
        view = setup.follow(FIRST, SECOND)
        view.left = A_KERNEL
        setup.watch.watch(FIRST)
        await until(lambda: view.looks > 2)
        assert not setup.told
        view.pause.clear()
        await until(view.pausing.is_set)
        setup.watch.confirm(FIRST)
        setup.watch.confirm(SECOND)
        seen = view.looks
        view.pause.set()
        await until(lambda: view.looks > seen)
        await until(lambda: setup.told)
        seen = view.looks
        await until(lambda: view.looks > seen + 2)
        assert setup.told == [ev.WorkRuns((FIRST, SECOND), A_KERNEL)]
        assert view.looks > 4

    with_setup(play)


def test_what_ended_while_nobody_could_look_is_accused_of_nothing() -> None:
    async def play(setup: Setup) -> None:
        view = setup.follow(FIRST)
        view.left = A_KERNEL
        setup.watch.watch(FIRST)
        view.pause.clear()
        await until(view.pausing.is_set)
        setup.watch.confirm(FIRST)
        view.left = ""
        view.pause.set()
        await until(lambda: setup.told)
        assert setup.ended() == [FIRST]
        setup.watch.confirm(THIRD)
        await until(lambda: len(setup.told) > 1)
        assert setup.told[1] == ev.WorkNotVisible(THIRD)

    with_setup(play)


def test_each_life_of_a_process_is_watched_to_its_own_end() -> None:
    async def play(setup: Setup) -> None:
        first = setup.follow(FIRST)
        first.left = A_KERNEL
        setup.watch.watch(FIRST)
        await until(lambda: first.looks)
        second = setup.follow(SECOND)
        second.left = A_KERNEL
        setup.watch.watch(SECOND)
        await until(lambda: second.looks)
        assert setup.watch.all_pending() == {PROCESS: A_KERNEL}
        first.left = ""
        await until(lambda: setup.told)
        probes = second.looks
        await until(lambda: second.looks > probes + 1)
        assert setup.ended() == [FIRST]
        assert setup.watch.all_pending() == {PROCESS: A_KERNEL}
        setup.watch.forget(FIRST)
        await until(lambda: first.closed)
        assert not second.closed
        second.left = ""
        await until(lambda: len(setup.told) == 2)
        assert setup.ended() == [FIRST, SECOND]

    with_setup(play)


def test_the_next_life_may_end_before_the_first() -> None:
    async def play(setup: Setup) -> None:
        setup.follow(FIRST).left = A_KERNEL
        setup.follow(SECOND)
        for client in (FIRST, SECOND):
            setup.watch.watch(client)
        await until(lambda: setup.told)
        assert setup.ended() == [SECOND]

    with_setup(play)


def test_two_address_spaces_of_one_life_share_its_view_and_end_together() -> None:
    async def play(setup: Setup) -> None:
        view = setup.follow(FIRST, SECOND)
        for client in (FIRST, SECOND):
            setup.watch.watch(client)
        await until(lambda: len(setup.told) == 2)
        assert setup.ended() == [FIRST, SECOND] and len(setup.views) == 1
        setup.watch.forget(FIRST)
        assert not view.closed
        setup.watch.forget(SECOND)
        await until(lambda: view.closed)

    with_setup(play)


def test_two_domains_of_one_process_are_told_of_one_by_one() -> None:
    async def play(setup: Setup) -> None:
        other = ClientId("d2", PROCESS)
        for client in (FIRST, other):
            setup.watch.adopt(client, {})
        setup.watch.watch(other)
        await until(lambda: setup.told)
        assert setup.ended() == [other]
        setup.watch.watch(FIRST)
        await until(lambda: len(setup.told) == 2)
        assert setup.ended() == [other, FIRST]

    with_setup(play)


def test_what_a_process_has_left_is_left_out_by_all_views_of_it_until_nobody_follows_it() -> None:
    other = ClientId("d2", PROCESS)

    async def play(setup: Setup) -> None:
        stranger = ProcessInstance(11, 1)
        first = setup.follow(FIRST)
        setup.watch.leave_out(stranger, anew=True, start=1, end=2)
        assert first.left_out is None
        setup.watch.leave_out(PROCESS, anew=True, start=4, end=8)
        setup.watch.leave_out(PROCESS, anew=False, start=12, end=16)
        # The process's next context, in another domain.
        second = setup.follow(other)
        assert first.left_out == second.left_out == [(4, 8), (12, 16)]
        setup.watch.leave_out(PROCESS, anew=True, start=0, end=0)
        assert first.left_out == second.left_out == []
        for number in range(2 * endofwork.MAX_SPANS):
            setup.watch.leave_out(PROCESS, anew=False, start=number, end=number + 1)
        assert first.left_out is not None and len(first.left_out) == endofwork.MAX_SPANS
        setup.watch.forget(FIRST)
        assert setup.follow(SECOND).left_out
        for client in (SECOND, other):
            setup.watch.forget(client)
        assert setup.follow(FIRST).left_out is None

    with_setup(play)


@pytest.mark.parametrize("strangers", [0, endofwork.MAX_EARLY_PROCESSES - 1, endofwork.MAX_EARLY_PROCESSES])
def test_what_it_has_left_is_known_before_it_is_followed(strangers: int) -> None:
    """The number of such processes is bounded, because any process can send this."""

    async def play(setup: Setup) -> None:
        setup.watch.leave_out(PROCESS, anew=True, start=1, end=2)
        setup.watch.leave_out(PROCESS, anew=False, start=4, end=8)
        for pid in range(100, 100 + strangers):
            setup.watch.leave_out(ProcessInstance(pid, 1), anew=True, start=1, end=2)
        known = [(1, 2), (4, 8)] if strangers < endofwork.MAX_EARLY_PROCESSES else None
        assert setup.follow(FIRST).left_out == known

    with_setup(play)


@pytest.mark.parametrize("who", ["the one before", "the next one"])
def test_after_an_exec_pages_are_those_of_another_program(who: str) -> None:
    """Spans of one program do not apply to the next program at the same addresses."""

    async def play(setup: Setup) -> None:
        first = setup.follow(FIRST)
        first.left = A_KERNEL
        if who == "the one before":
            setup.watch.leave_out(PROCESS, anew=True, start=4, end=8)
        setup.watch.watch(FIRST)
        await until(lambda: first.looks)
        second = setup.follow(SECOND)
        if who == "the next one":
            setup.watch.leave_out(PROCESS, anew=True, start=4, end=8)
        spans = [(4, 8)]
        wanted = (spans, None) if who == "the one before" else (None, spans)
        assert (first.left_out, second.left_out) == wanted
        first.left = ""
        await until(lambda: setup.told)

    with_setup(play)


def test_what_cannot_be_seen_is_said_of_that_life() -> None:
    async def play(setup: Setup) -> None:
        setup.follow(FIRST).left = None
        for client in (FIRST, SECOND):
            setup.watch.watch(client)
        await until(lambda: len(setup.told) == 2)
        assert set(setup.told) == {ev.WorkNotVisible(FIRST), ev.WorkNotVisible(SECOND)}

    with_setup(play)


def test_a_view_that_is_given_up_while_it_is_watched_is_closed() -> None:
    async def play(setup: Setup) -> None:
        view = setup.follow(FIRST)
        view.left = A_KERNEL
        setup.watch.watch(FIRST)
        await until(lambda: view.looks)
        # The next life gets the same number after the first one's lease was released.
        setup.follow(FIRST)
        await until(lambda: view.closed)
        assert not setup.told

    with_setup(play)


def test_a_look_that_hangs_holds_up_no_other_and_is_not_begun_twice() -> None:
    async def play(setup: Setup) -> None:
        hung, other = setup.follow(FIRST), setup.follow(SECOND)
        hung.go_on.clear()
        await until(lambda: hung.refreshed and other.refreshed)
        seen = other.refreshed
        for _ in range(3):
            setup.watch.refresh([FIRST, SECOND])
            await until(lambda seen=seen: other.refreshed > seen)  # type: ignore[misc]
            seen = other.refreshed
        assert hung.refreshed == 1
        setup.watch.forget(FIRST)
        setup.watch.refresh([FIRST, SECOND])
        assert not hung.closed, "a look is under way"

    with_setup(play)


@pytest.mark.usefixtures("grown")
def test_the_living_are_looked_at_in_one_thread() -> None:
    async def play(setup: Setup) -> None:
        first, second = setup.follow(FIRST), setup.follow(SECOND)
        setup.watch.refresh([FIRST, SECOND])
        await until(lambda: second.refreshed)
        assert len(first.threads | second.threads) == 1

    with_setup(play)


def test_a_view_that_hangs_in_a_sweep_keeps_out_no_other_and_is_closed_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endofwork, "YOUNG_S", 0.0)

    async def play(setup: Setup) -> None:
        hung, other = setup.follow(FIRST), setup.follow(SECOND)
        hung.go_on.clear()
        setup.watch.refresh([FIRST, SECOND])
        await until(lambda: hung.refreshed and other.refreshed)
        await setup.swept([FIRST, SECOND], other)
        setup.watch.forget(FIRST)
        setup.watch.forget(SECOND)
        await until(lambda: other.closed)
        assert (hung.refreshed, hung.closed) == (1, 0)
        hung.go_on.set()
        await until(lambda: hung.closed)

    with_setup(play)


@pytest.mark.usefixtures("grown")
def test_a_view_is_not_closed_while_a_sweep_is_at_it_nor_begun_when_it_is_given_up() -> None:
    async def play(setup: Setup) -> None:
        under_way, behind, other = setup.follow(FIRST), setup.follow(SECOND), setup.follow(THIRD)
        under_way.go_on.clear()
        setup.watch.refresh([FIRST, SECOND, THIRD])
        await until(lambda: under_way.refreshed)
        setup.watch.forget(FIRST)
        setup.watch.forget(SECOND)
        await until(lambda: behind.closed)
        assert not under_way.closed
        under_way.go_on.set()
        await until(lambda: under_way.closed and other.refreshed)
        assert not behind.refreshed

    with_setup(play)


@pytest.mark.usefixtures("grown")
def test_the_dead_are_not_looked_at_as_living_by_a_sweep_that_was_begun_before() -> None:
    async def play(setup: Setup) -> None:
        first, exited = setup.follow(FIRST), setup.follow(SECOND)
        first.go_on.clear()
        setup.watch.refresh([FIRST, SECOND])
        await until(lambda: first.refreshed)
        exited.left = A_KERNEL
        setup.watch.watch(SECOND)
        await until(lambda: exited.looks)
        first.go_on.set()
        await setup.swept([SECOND, FIRST], first)
        assert not exited.refreshed

    with_setup(play)


@pytest.mark.usefixtures("grown")
def test_a_look_that_somebody_waits_for_does_not_wait_for_a_sweep_that_has_not_come_to_it() -> None:
    async def play(setup: Setup) -> None:
        first, second = setup.follow(FIRST), setup.follow(SECOND)
        lives = setup.watch._runs
        first.go_on.clear()
        setup.watch.refresh([FIRST, SECOND])
        await until(lambda: first.refreshed)
        await setup.watch._probe(lives[SECOND])
        under_way = asyncio.create_task(setup.watch._probe(lives[FIRST]))
        await setup.watch._probe(lives[SECOND])
        assert (second.refreshed, under_way.done()) == (2, False)
        first.go_on.set()
        await under_way
        assert first.refreshed == 1
        await setup.swept([FIRST], first)
        assert second.refreshed == 2

    with_setup(play)


@pytest.mark.usefixtures("grown")
def test_a_sweep_leaves_out_whom_somebody_is_looking_at() -> None:
    async def play(setup: Setup) -> None:
        first, second = setup.follow(FIRST), setup.follow(SECOND)
        first.go_on.clear()
        alone = asyncio.create_task(setup.watch._probe(setup.watch._runs[FIRST]))
        await until(lambda: first.refreshed)
        await setup.swept([FIRST, SECOND], second)
        assert first.refreshed == 1
        first.go_on.set()
        await alone
        await setup.swept([FIRST, SECOND], first)

    with_setup(play)


@pytest.mark.usefixtures("grown")
@pytest.mark.parametrize(
    ("error", "bugs"), [(OSError("gone"), 0), (UnsupportedError("not here"), 0), (ValueError("a bug"), 1)]
)
def test_an_error_of_one_view_is_told_and_ends_no_other_look(
    monkeypatch: pytest.MonkeyPatch, error: Exception, bugs: int
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(endofwork.log, "warning", lambda text, reason: warned.append(reason))

    async def play(setup: Setup) -> None:
        failing, other = setup.follow(FIRST), setup.follow(SECOND)
        failing.error = error
        setup.watch.refresh([FIRST, SECOND])
        await until(lambda: not setup.watch._tasks.running())
        assert (failing.refreshed, other.refreshed) == (1, 1)
        assert warned == ([] if bugs else [str(error)])
        assert setup.told == [ev.Counted({"internal_errors": 1})] * bugs

    with_setup(play)


def test_one_without_a_context_is_looked_at_until_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endofwork, "YOUNG_S", 0.0)
    monkeypatch.setattr(endofwork, "EMPTY_STEP_S", 0.001)

    async def run() -> None:
        setup = Setup()
        grown = setup.follow(FIRST)
        empty = setup.open(PROCESS, -1)
        empty.located = False
        setup.watch.follow([SECOND], empty)
        await until(lambda: empty.refreshed >= 3)
        assert grown.refreshed == 0
        empty.located = True
        await until(lambda: not setup.watch._tasks.running())
        await setup.watch.close()

    asyncio.run(run())


@pytest.mark.usefixtures("grown")
@pytest.mark.parametrize(("used", "told"), [(False, [FIRST]), (True, []), (None, [])])
def test_a_client_that_has_launched_nothing_is_reported(used: bool | None, told: list[ClientId]) -> None:
    async def play(setup: Setup) -> None:
        view = setup.follow(FIRST)
        view.used = used
        assert setup.watch.check_use(FIRST) and not setup.watch.check_use(THIRD)
        await until(lambda: view.refreshed == 1)
        await setup.watch.close()
        assert setup.told == [ev.NeverLaunched(client) for client in told]

    with_setup(play)


@pytest.mark.usefixtures("grown")
def test_looks_for_launches_come_one_after_the_other_and_end_before_the_view() -> None:
    async def play(setup: Setup) -> None:
        view = setup.follow(FIRST)
        view.go_on.clear()
        setup.watch.check_use(FIRST)
        await until(lambda: view.inside)
        setup.watch.check_use(FIRST)
        setup.watch.forget(FIRST)
        assert not view.closed
        view.go_on.set()
        await until(lambda: view.closed)
        assert view.refreshed == 1

    with_setup(play)


@pytest.mark.usefixtures("grown")
def test_a_client_with_changed_mappings_is_probed_again_until_two_probes_agree() -> None:
    """It may exit before the next sweep, and be reaped before it is looked at."""

    async def play(setup: Setup) -> None:
        view = setup.follow(FIRST)
        view.settled = False
        setup.watch.refresh([FIRST])
        # One look is that of the sweep.
        await until(lambda: view.refreshed == 1 + endofwork.SETTLE_TRIES)
        view.settled = True
        setup.watch.forget(FIRST)
        await until(lambda: view.closed)

    with_setup(play)
