"""A LimitKeeper with stand-ins for the control daemons that answer as several releases do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from mpsd.base.errors import ControlError, DeadlineError
from mpsd.base.model import Gpu, ProcessInstance
from mpsd.config.schema import Limits
from mpsd.limits.book import LimitBook, Owner
from mpsd.limits.keeper import LimitKeeper, Surroundings
from mpsd.os.quietperiod import QuietPeriod

DEADLINE_S = 60.0
OWNER = Owner(("GPU-a",), 7)


class StandIn:
    """A control daemon. `reads`: what a `set` command makes of its last word, None to refuse it.

    `slow_s`: time that a command about server 100 takes. `deadlines`: those of all commands.
    """

    def __init__(
        self,
        gpus: tuple[str, ...] = ("GPU-a",),
        reads: Callable[[str, str], str | None] = lambda _, value: value,
    ) -> None:
        self.gpus, self.reads = gpus, reads
        self.values = {"default_active_thread_percentage": "100.0", "default_client_priority": "0"}
        self.server = 0
        self.living = True
        self.silent = 0
        self.slow_s = 0.0
        self.deadlines: list[tuple[str, float]] = []
        self.said: list[str] = []
        self.fails: str = ""
        self.before: Callable[[str], object] = bool

    def alive(self) -> bool:
        return self.living

    def server_instances(self) -> tuple[ProcessInstance, ...]:
        return (ProcessInstance(self.server, 1),) if self.server else ()

    def start_server(self, pid: int = 100) -> None:
        self.server = pid
        for subject in [s for s in self.values if s.startswith("default_")]:
            kind, *device = subject.removeprefix("default_").split()
            self.values[" ".join([kind, str(pid), *device])] = self.values[subject]

    async def command(self, text: str, deadline_s: float) -> str:
        await asyncio.sleep(0)
        if self.fails:
            raise ControlError(self.fails)
        self.deadlines.append((text, deadline_s))
        if deadline_s < self.slow_s and " 100" in text:
            raise DeadlineError(f"no answer within {deadline_s:g} s")
        self.before(text)
        self.said.append(text)
        verb, _, rest = text.partition("_")
        if verb == "get":
            if self.silent:
                self.silent -= 1
                return ""
            return self.values.get(rest, "")
        subject, _, value = rest.rpartition(" ")
        return self.set(subject, value)

    def set(self, subject: str, value: str) -> str:
        """Do what a front end says, as `default_client_priority`, `1`."""
        taken = self.reads(subject, value)
        if taken is None:
            return f"Invalid arguments for set_{subject.split()[0]}"
        self.values.pop(subject, None)
        self.values[subject] = f"{float(taken):.1f}" if "percentage" in subject else taken
        return ""

    def wrote(self) -> list[str]:
        return [text for text in self.said if text.startswith("set_")]


class Scene:
    """A keeper with its surroundings. `saved`: the state files that it has written."""

    def __init__(self, limits: Limits | None = None, saved: Any = None) -> None:
        self.book = LimitBook(limits or Limits(), (Gpu(0, "GPU-a", "", "", 1), Gpu(1, "GPU-b", "", "", 1)))
        self.serving: set[str] = set()
        self.saved: list[Any] = []
        self.rejected = 0
        self.tasks: set[asyncio.Task[None]] = set()
        around = Surroundings(self.serving.__contains__, self._save, self._reject, self._spawn)
        self.keeper = LimitKeeper(self.book, around, QuietPeriod())
        if saved is not None:
            self.keeper.restore(saved)

    def _save(self) -> None:
        self.saved.append(self.keeper.to_file())

    def _reject(self) -> None:
        self.rejected += 1

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)

    async def settled(self) -> None:
        while self.tasks:
            task = self.tasks.pop()
            await task

    async def start(self, name: str, control: StandIn, owner: Owner = OWNER) -> StandIn:
        """Start a domain as mpsd.mps.domains does."""
        await self.keeper.give(name, owner, control)
        control.start_server()
        self.serving.add(name)
        await self.keeper.confirm(name)
        # The new state of the domain is written, with its limits.
        self._save()
        return control

    async def by_hand(self, name: str, control: StandIn, subject: str, value: str) -> None:
        """Say a limit to a control daemon, which reports the command in its log."""
        control.set(subject, value)
        self.keeper.said(name, f"set_{subject} {value}")
        await self.settled()


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await scene()

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
