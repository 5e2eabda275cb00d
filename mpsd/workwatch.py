"""Watching the dead: from the death of a client until its work on the GPU has ended.

What is watched is a life, from one exec to the next: its work ends apart from that of the next one.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from mpsd.core import events as ev
from mpsd.errors import GpuError
from mpsd.gpu.base import WorkInspector, WorkView
from mpsd.looks import Looks
from mpsd.model import ClientId, ProcessInstance
from mpsd.sweeps import Sweep
from mpsd.tasks import Tasks

log = structlog.get_logger("mpsd.workwatch")

SLOWEST_S = 0.25
# A client is leased before it has a context; what its driver maps comes in the second after.
YOUNG_S = 2.0
YOUNG_STEP_S = 0.02
# One without a context may get it, and launch, at any time: what was not seen by its death is not known.
EMPTY_STEP_S = 0.05
CLOSE_S = 5.0
MOST_LEFT = 64
"""Spans of one process that are left out."""
MOST_EARLY = 64
"""Processes that have said such spans and are not followed yet, as it may be after a restart."""
# A look that hangs goes on when the sweep gives it up: nothing is lost, and the others wait for less.
PATIENCE_S = 0.1
NOT_NOTED = "areas of a client are not noted"


@dataclass(slots=True, eq=False)
class _Life:
    """One life of a process, its view, and the clients (address spaces) that it has in one domain.

    `look`: one that somebody waits for, at the living, under way or done; `watch`: after the death;
    `overdue`: somebody waits to hear what a look finds that begins after it was set; `past`: the process has
    replaced that program since.
    """

    view: WorkView
    clients: set[ClientId]
    look: asyncio.Task[None] | None = None
    watch: asyncio.Task[None] | None = None
    overdue: bool = False
    past: bool = False


class WorkWatch:
    """A view for each life of each client; looks are spaced out the longer the work lasts."""

    def __init__(self, inspector: WorkInspector, interval_s: float, post: Callable[[ev.Event], None]) -> None:
        self._inspector = inspector
        self._interval_s = interval_s
        self._post = post
        self._lives: dict[ClientId, _Life] = {}
        self._tasks = Tasks(post)
        self._pending: dict[ClientId, str] = {}
        self._spans: dict[ProcessInstance, list[tuple[int, int]]] = {}
        self._looks = Looks("work", of_one=1)
        self._sweep: Sweep[_Life, Exception | None] = Sweep("areas", PATIENCE_S)

    def look(self, process: ProcessInstance, pidfd: int) -> WorkView:
        """A first look at a living client, from any thread; `follow` it then. Raises GpuError."""
        return self._inspector.open(process, pidfd)

    def is_present(self, process: ProcessInstance, fds: Mapping[str, int]) -> bool:
        """Whether kept descriptors are of the program that a living process runs now."""
        return self._inspector.is_present(process, fds)

    def follow(self, clients: Sequence[ClientId], view: WorkView) -> Mapping[str, int]:
        """Begin to follow a living process, these clients; the descriptors to store with each lease."""
        self._tasks.spawn(self._follow_young(self._put(clients, view)))
        return view.fds

    async def _follow_young(self, life: _Life) -> None:
        young = time.monotonic() + YOUNG_S
        while life.clients and life.watch is None:
            grown = time.monotonic() >= young
            if grown and life.view.located:
                return
            await self._look(life)
            await asyncio.sleep(EMPTY_STEP_S if grown else YOUNG_STEP_S)

    def adopt_or_tell(self, client: ClientId, fds: Mapping[str, int]) -> None:
        """Take over a view that the descriptor store kept; `fds` are ours from now on."""
        try:
            view = self._inspector.adopt(client.process, fds)
        except (GpuError, OSError, ValueError) as error:
            log.warning("the end of a client's work will not be seen", client=str(client), reason=str(error))
            for fd in fds.values():
                os.close(fd)
            return
        self._put([client], view)

    def _put(self, clients: Sequence[ClientId], view: WorkView) -> _Life:
        life = _Life(view, set(clients))
        for process in {client.process for client in clients}:
            self._part_with(process)
        for client in clients:
            self.forget(client)
            self._lives[client] = life
            if left := self._spans.get(client.process):
                view.leave_out(left)
        return life

    def _part_with(self, process: ProcessInstance) -> None:
        """A life of it begins: where earlier ones have ended it was an exec, and their pages are others."""
        ended = [x for c, x in self._lives.items() if c.process == process and x.watch is not None]
        for life in ended:
            life.past = True
        if ended:
            self._spans.pop(process, None)

    def leave_out(self, process: ProcessInstance, *, anew: bool, start: int, end: int) -> None:
        """Bytes [start, end) of its are a context's that it has left, whatever lies there says of its work;
        `anew`: and those from before no longer. One that is not followed yet will be."""
        lives = [life for client, life in self._lives.items() if client.process == process]
        views = {life.view for life in lives if not life.past}
        left = [] if anew else self._spans.get(process, [])
        if len(left) == MOST_LEFT:
            return
        if not views and process not in self._spans:
            self._make_room()
        self._spans[process] = left + [(start, end)] * (start < end)
        for view in views:
            view.leave_out(self._spans[process])

    def _make_room(self) -> None:
        """For one more that is not followed: of those the first that came goes."""
        followed = {client.process for client in self._lives}
        early = [process for process in self._spans if process not in followed]
        for process in early[: max(0, len(early) + 1 - MOST_EARLY)]:
            del self._spans[process]

    def fds(self, client: ClientId) -> Mapping[str, int]:
        """The descriptors to store with a lease; none for a client that is not followed."""
        life = self._lives.get(client)
        return {} if life is None else life.view.fds

    def refresh(self, leased: Collection[ClientId]) -> None:
        """Look at the living anew, all in one thread; not where that is still under way."""
        lives = dict.fromkeys(life for c in leased if (life := self._lives.get(c)) is not None)
        self._tasks.spawn(self._refresh_all(lives))

    async def _refresh_all(self, lives: Collection[_Life]) -> None:
        # Each has a share of its own: of one user too, those that hang keep out no other.
        looks = {life: (id(life), partial(_refresh, life.view)) for life in lives if self._may_be_swept(life)}
        try:
            found = await self._sweep.run(looks)
        except GpuError as error:
            log.warning(NOT_NOTED, reason=str(error))
            return
        if bugs := [error for error in found.values() if error is not None]:
            raise ExceptionGroup("looks at the living failed", bugs)

    @staticmethod
    def _may_be_swept(life: _Life) -> bool:
        return bool(life.clients) and life.watch is None and (life.look is None or life.look.done())

    async def _look(self, life: _Life) -> None:
        """The look that is under way, or one that begins now; none of a sweep that has not come to it."""
        if life.look is None or life.look.done():
            life.look = self._tasks.spawn(self._refresh_alone(life))
        await asyncio.wait({life.look})

    async def _refresh_alone(self, life: _Life) -> None:
        """In a thread: a process that changes its mappings all the time makes a look at them wait."""
        if await self._sweep.back(life):
            return
        try:
            await self._looks.run(id(life), life.view.refresh)
        except (OSError, GpuError) as error:
            log.warning(NOT_NOTED, reason=str(error))

    def all_pending(self) -> Mapping[ProcessInstance, str]:
        """What each dead client still has on the GPU, for `status`."""
        found: dict[ProcessInstance, list[str]] = {}
        for client, text in self._pending.items():
            texts = found.setdefault(client.process, [])
            if text not in texts:
                texts.append(text)
        return {process: "; ".join(texts) for process, texts in found.items()}

    def watch(self, client: ClientId) -> None:
        """Look until the work of the client's life has ended, then say so of all clients it was."""
        life = self._lives.get(client)
        if life is None:
            self._tasks.spawn(self._tell_unseen({client}))
        elif life.watch is None:
            self._sweep.leave_out(life)
            life.watch = self._tasks.spawn(self._watch(life))

    def confirm(self, client: ClientId) -> None:
        """Say WorkRuns if the next look at the dead still finds work; its end is said by its watch."""
        life = self._lives.get(client)
        if life is None:
            self._tasks.spawn(self._tell_unseen({client}))
        else:
            life.overdue = True

    async def _tell_unseen(self, clients: Collection[ClientId]) -> None:
        """No sign to go by: the lease stays until the domain has no living client."""
        for client in sorted(clients):
            self._pending[client] = "not visible on this machine"
            self._post(ev.WorkNotVisible(client))

    async def _watch(self, life: _Life) -> None:
        began = time.monotonic()
        overdue = life.overdue
        while (left := await self._left(life)) is not None:
            if not left:
                for client in sorted(life.clients):
                    self._pending.pop(client, None)
                    self._post(ev.WorkEnded(client, "its semaphores have been released"))
                return
            self._pending.update(dict.fromkeys(life.clients, left))
            if overdue:
                life.overdue = False
                self._post(ev.WorkRuns(tuple(sorted(life.clients)), left))
            await asyncio.sleep(min(max(self._interval_s, (time.monotonic() - began) / 20), SLOWEST_S))
            overdue = life.overdue
        await self._tell_unseen(life.clients)

    async def _left(self, life: _Life) -> str | None:
        try:
            return await asyncio.to_thread(life.view.pending)
        except (OSError, GpuError) as error:
            client = min(life.clients, default=None)
            log.warning("work of a dead client cannot be seen", client=str(client), reason=str(error))
            return None

    def forget(self, client: ClientId) -> None:
        """A client whose lease is given up. The view goes with the last client of its life."""
        self._pending.pop(client, None)
        life = self._lives.pop(client, None)
        if life is None:
            return
        life.clients.discard(client)
        if not life.clients:
            self._tasks.spawn(self._close(life))
        if all(other.process != client.process for other in self._lives):
            self._spans.pop(client.process, None)

    async def _close(self, life: _Life) -> None:
        """A look may be under way in a thread: the view is closed after it."""
        if life.watch is not None:
            life.watch.cancel()
        if under_way := {t for t in (life.watch, life.look) if t is not None}:
            await asyncio.wait(under_way)
        await self._sweep.back(life)
        await asyncio.to_thread(life.view.close)

    async def close(self) -> None:
        for client in tuple(self._lives):
            self.forget(client)
        await self._tasks.ended(CLOSE_S)
        self._looks.close()
        self._sweep.close()


def _refresh(view: WorkView) -> Exception | None:
    """In the thread of all. What is no error of its process is given back: it ends no other look."""
    try:
        view.refresh()
    except (OSError, GpuError) as error:
        log.warning(NOT_NOTED, reason=str(error))
    except Exception as error:
        return error
    return None
