"""Fail-over in the daemon outside core: the socket, the driver files, and the views for `status` and
`doctor`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from mpsd.base.errors import ConfigError, MpsdError
from mpsd.base.model import FailoverMode
from mpsd.base.protection import Obstacle, ProtectionLevel
from mpsd.config.layout import Layout
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.failover import driverfiles
from mpsd.failover.driverfiles import DriverFiles, DriverFilesState
from mpsd.failover.messages import (
    HEARS_BUDGETS,
    HEARS_EXPOSED,
    LOOKED_ALL,
    PATH_ROOM,
    SHORT_KNOWN,
    SWITCH_KNOWN,
    Kind,
    Message,
)
from mpsd.gpu.base import Check
from mpsd.mps.reachability import with_rights
from mpsd.os.tasks import Tasks
from mpsd.peers.failoverserver import FailoverConnection, FailoverServer
from mpsd.peers.server import Server, Surroundings

log = structlog.get_logger("mpsd.failover")

CHECK_EVERY_S = 10.0
DRIVER_FILES_REMEDY = (
    "set [failover] driver to the real libcuda.so.1, and copies to a folder that holds three and that each "
    "user can execute from"
)


class FailoverService:
    """Fail-over services of the daemon. If not enabled, it offers nothing and removes an earlier daemon's
    driver files."""

    def __init__(
        self,
        layout: Layout,
        post: Callable[[ev.Event], None],
        *,
        enabled: bool,
        lazy: bool = False,
        driver: str = "",
        copies: str = "",
        simulated: bool = False,
        surroundings: Surroundings | None = None,
    ) -> None:
        """`lazy`: as programs are told. `driver`, `copies`: as configured; empty: the defaults."""
        self.enabled = enabled
        self.copied = DriverFilesState()
        self.problem: Obstacle | None = None
        self._checked = asyncio.Event()
        self._lazy = lazy
        self._layout = layout
        self._post = post
        self._server = FailoverServer(layout.failover_socket, post, surroundings=surroundings)
        folders = driverfiles.candidates(copies, layout.run_dir, os.geteuid(), os.environ)
        # Other users join root's mpsd alone.
        open_like = layout.run_dir if os.geteuid() == 0 else None
        self._copies = DriverFiles(folders, driver, open_like, simulated=simulated)
        # On the simulated GPU programs need no driver.
        self._expects_files = not simulated or bool(driver)
        self._tasks = Tasks(post)

    @property
    def server(self) -> Server[FailoverConnection]:
        return self._server.server

    @property
    def offered_at(self) -> str:
        """Return the path of the socket for programs; empty while there is none."""
        return self._server.offered_at

    def start(self) -> None:
        """Start the services. Never raises: an obstacle says so if fail-over cannot be offered."""
        if not self.enabled:
            self._copies.remove()
            return
        try:
            # With the final zero.
            if 1 + len(os.fsencode(self._layout.pipe_dir("d" + "9" * 9))) > PATH_ROOM:
                raise ConfigError("the path of run_dir is too long", remedy="choose a shorter one")
            self._server.start()
        except MpsdError as error:
            self.problem = Obstacle(ProtectionLevel.GUARD, "fail-over", error.message, error.remedy)
            return
        self._tasks.spawn(self._watch())

    async def _watch(self) -> None:
        """Keep the driver files current. The driver may be replaced at any time."""
        while True:
            found = await asyncio.to_thread(self._copies.ensure)
            if found != self.copied:
                tell = log.warning if found.problem and self._expects_files else log.info
                tell("driver files", **_noted(found))
            self.copied = found
            self._post(ev.DriverFilesSeen(found.problem_text))
            self._checked.set()
            await asyncio.sleep(CHECK_EVERY_S)

    async def checked(self, deadline_s: float) -> None:
        """Wait until the driver files were checked once, or until the deadline."""
        if self.enabled and self.problem is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._checked.wait(), deadline_s)

    async def close(self) -> None:
        self._server.close()
        await self._tasks.cancel()

    def obstacles(self) -> list[Obstacle]:
        """Return what keeps programs from failing over now; empty too where fail-over is not enabled."""
        if not self.enabled:
            return []
        if self.problem is not None:
            return [self.problem]
        name, guard = "driver files", ProtectionLevel.GUARD
        if self.copied.problem:
            return [Obstacle(guard, name, self.copied.problem, self.copied.remedy)]
        if self.copied.bytes:
            return []
        return [Obstacle(guard, name, "mpsd is copying the driver", "wait some seconds", passing=True)]

    def obstacles_of_users(self) -> list[Obstacle]:
        """Return what keeps programs of other users than root from failing over now."""
        if not self.copied.closed:
            return []
        closed = self.copied.closed
        why = f"ordinary users cannot load the driver files: {closed} is closed to them"
        remedy = f"run chmod o+x {closed}, or {driverfiles.REMEDY}"
        return [Obstacle(ProtectionLevel.GUARD, "driver files for users", why, remedy)]

    def check(self) -> Check:
        """Return the result for `doctor`. Tries a copy as a user without rights: call it in a thread."""
        name = "driver copies"
        if not self.enabled:
            return Check(name, None, "not needed below the protection level failover")
        if not self.copied.bytes:
            return Check(name, None, self.copied.problem or "mpsd is copying the driver", self.copied.remedy)
        copy = Path(self.copied.folder, driverfiles.NAMES[0])
        look = partial(driverfiles.loading_obstacle, copy)
        if why := with_rights(None, look) if self._copies.serves_all else look():
            finding = f"users cannot load the driver's copy {copy}: {why}"
            return Check(name, False, finding, driverfiles.REMEDY)
        finding = f"copied from {self.copied.source} to {self.copied.folder}"
        passed = "".join(f"; not used: {each}" for each in self.copied.passed_over)
        return Check(name, True, finding + passed)

    def shown(self) -> Mapping[str, Any]:
        """Return the state of fail-over on this machine, for `status`."""
        return {
            "enabled": self.enabled,
            "socket": self.offered_at,
            "copies": str(self._copies.folder) if self.copied.bytes else "",
            "copies_bytes": self.copied.bytes,
            "driver": self.copied.source,
            "problem": self.problem.why if self.problem is not None else self.copied.problem_text,
        }

    def counters(self) -> dict[str, int]:
        return {f"failover_{name}": count for name, count in self._server.counters.items()}

    # -- effects -----------------------------------------------------------------------------------------

    def welcome(self, effect: fx.Welcome) -> None:
        knows = int(effect.mode is not FailoverMode.OFF)
        known = knows * (SHORT_KNOWN | (SWITCH_KNOWN if effect.switches else 0))
        hears = HEARS_BUDGETS | HEARS_EXPOSED if effect.time_budget is not None else 0
        values = (int(self._lazy), known, knows * LOOKED_ALL, knows, hears, effect.time_budget or 0)
        self._server.tell(effect.process, Message(Kind.WELCOME, effect.mode, values=values))

    def offer(self, effect: fx.OfferStandby) -> None:
        path, folder = self._layout.pipe_dir(effect.domain), self._copies.folder
        self._server.tell(effect.process, offer_of(effect.generation, path, folder))

    def stand_down(self, effect: fx.StandDown) -> None:
        values = (int(effect.final),)
        message = Message(Kind.STAND_DOWN, generation=effect.generation, values=values, text=effect.why)
        self._server.tell(effect.process, message)

    def move(self, effect: fx.Move) -> None:
        self._server.tell(effect.process, order_of(effect))

    def fenced(self, effect: fx.Fenced) -> None:
        self._server.tell(effect.process, Message(Kind.FENCED, generation=effect.generation))

    def have_turn(self, effect: fx.GrantTurn) -> None:
        self._server.tell(effect.process, Message(Kind.TURN, generation=effect.generation))

    def give(self, effect: fx.RequestMemory) -> None:
        self._server.tell(effect.process, Message(Kind.GIVE, values=(int(effect.spared),)))

    def have_memory(self, effect: fx.GrantMemory) -> None:
        self._server.tell(effect.process, Message(Kind.ROOM, values=(effect.bytes, effect.number)))

    def limit_snapshots(self, effect: fx.LimitSnapshots) -> None:
        self._server.tell(effect.process, Message(Kind.LIMIT, values=(effect.bytes, effect.answers)))

    def switch_off(self, effect: fx.SwitchOff) -> None:
        self._server.tell(effect.process, Message(Kind.GUARD))


def order_of(effect: fx.Move) -> Message:
    """Return the MOVE of this effect."""
    said = (effect.planned, effect.again, not effect.exception_logged, effect.may_go_on, effect.hurries)
    return Message(Kind.MOVE, generation=effect.generation, values=tuple(map(int, said)), text=effect.why)


def offer_of(generation: int, pipe_dir: Path, copies: Path) -> Message:
    return Message(Kind.STANDBY, generation=generation, path=str(pipe_dir), text=str(copies))


def _noted(found: DriverFilesState) -> dict[str, Any]:
    """Return what a log line says of the driver files: the fields that are not empty."""
    fields = {
        "source": found.source,
        "folder": found.folder,
        "bytes": found.bytes,
        "problem": found.problem_text,
        "passed_over": list(found.passed_over),
    }
    return {name: value for name, value in fields.items() if value}
