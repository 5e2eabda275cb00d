"""The daemon's part of fail-over that is not decided by core: the door, the copies, the journal, `status`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.failover.copies import Copied, Copies
from mpsd.failover.door import Door
from mpsd.failover.wire import PATH_ROOM, TEXT_ROOM, Kind, Message
from mpsd.gpu.base import Check
from mpsd.layout import Layout
from mpsd.model import FailoverMode
from mpsd.tasks import Tasks

log = structlog.get_logger("mpsd.failover")

LOOK_EVERY_S = 10.0


class FailoverDesk:
    """Not enabled: nothing is offered, nothing is copied, and an earlier daemon's copies go."""

    def __init__(
        self,
        layout: Layout,
        post: Callable[[ev.Event], None],
        *,
        enabled: bool,
        lazy: bool = False,
        driver: str = "",
        copies: str = "",
    ) -> None:
        """`lazy`: what programs are told; `driver`, `copies`: as configured; empty for the usual ones."""
        self.enabled = enabled
        self.copied = Copied()
        self.problem = ""
        self._lazy = lazy
        self._layout = layout
        self._post = post
        self._door = Door(layout.failover_socket, post)
        self._copies = Copies(Path(copies) if copies else layout.copies_dir, driver)
        self._tasks = Tasks(post)

    @property
    def offered_at(self) -> str:
        """The path of the socket for programs; empty while there is none."""
        return self._door.offered_at

    def start(self) -> None:
        """Never raises: what cannot be offered is a problem that `status` shows."""
        if not self.enabled:
            self._copies.remove()
            return
        # With the final zero of each.
        room = max(1 + len(os.fsencode(self._layout.pipe_dir("d" + "9" * 9))) - PATH_ROOM, 0)
        room += max(1 + len(os.fsencode(self._copies.folder)) - TEXT_ROOM, 0)
        try:
            if room:
                raise OSError(0, "run_dir, or failover.copies, is too long for its messages")
            self._door.start()
        except OSError as error:
            self.problem = f"fail-over is not offered: {error.strerror or error}"
            return
        self._tasks.spawn(self._watch())

    async def _watch(self) -> None:
        """The driver may be replaced at any time."""
        while True:
            found = await asyncio.to_thread(self._copies.ensure)
            if found != self.copied:
                tell = log.warning if found.problem else log.info
                tell("copies of the driver", source=found.source, bytes=found.bytes, problem=found.problem)
            self.copied = found
            self._post(ev.CopiesSeen(found.problem))
            await asyncio.sleep(LOOK_EVERY_S)

    async def close(self) -> None:
        self._door.close()
        await self._tasks.cancel()

    def check(self) -> Check:
        """For `doctor`."""
        if not self.enabled:
            return Check("fail-over", None, "off ([failover] enabled)")
        if problems := self.problems():
            remedy = (
                "[failover] driver names the real libcuda.so.1, copies a folder with room for three of it"
            )
            return Check("fail-over", False, "; ".join(problems), remedy)
        if not self.copied.bytes:
            return Check("fail-over", None, "the driver is being copied")
        return Check("fail-over", True, f"offered, with copies of {self.copied.source}")

    def problems(self) -> list[str]:
        found = [self.problem] if self.problem else []
        return found + ([f"no fail-over: {self.copied.problem}"] if self.copied.problem else [])

    def shown(self) -> Mapping[str, Any]:
        """Of the machine, for `status`."""
        return {
            "enabled": self.enabled,
            "socket": self.offered_at,
            "copies": str(self._copies.folder) if self.copied.bytes else "",
            "copies_bytes": self.copied.bytes,
            "driver": self.copied.source,
            "problem": self.problem or self.copied.problem,
        }

    def counters(self) -> dict[str, int]:
        return {f"failover_{name}": count for name, count in self._door.counters.items()}

    # -- effects -----------------------------------------------------------------------------------------

    def welcome(self, effect: fx.Welcome) -> None:
        knows = int(effect.mode is not FailoverMode.OFF)
        values = (int(self._lazy), knows, knows, knows)
        self._door.tell(effect.process, Message(Kind.WELCOME, effect.mode, values=values))

    def offer(self, effect: fx.OfferStandby) -> None:
        path, folder = self._layout.pipe_dir(effect.domain), self._copies.folder
        self._door.tell(effect.process, offer_of(effect.generation, path, folder))

    def stand_down(self, effect: fx.StandDown) -> None:
        values = (int(effect.final),)
        message = Message(Kind.STAND_DOWN, generation=effect.generation, values=values, text=effect.why)
        self._door.tell(effect.process, message)

    def move(self, effect: fx.Move) -> None:
        values = (int(effect.planned), int(effect.again))
        message = Message(Kind.MOVE, generation=effect.generation, values=values, text=effect.why)
        self._door.tell(effect.process, message)

    def fenced(self, effect: fx.Fenced) -> None:
        self._door.tell(effect.process, Message(Kind.FENCED, generation=effect.generation))

    def have_turn(self, effect: fx.HaveTurn) -> None:
        self._door.tell(effect.process, Message(Kind.TURN, generation=effect.generation))

    def give(self, effect: fx.GiveMemory) -> None:
        self._door.tell(effect.process, Message(Kind.GIVE, values=(int(effect.spared),)))

    def have_memory(self, effect: fx.HaveMemory) -> None:
        self._door.tell(effect.process, Message(Kind.ROOM, values=(effect.bytes, effect.number)))


def offer_of(generation: int, pipe_dir: Path, copies: Path) -> Message:
    return Message(Kind.STANDBY, generation=generation, path=str(pipe_dir), text=str(copies))
