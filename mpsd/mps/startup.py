"""The start of a domain's server: active, or ended with the server's own words.

The stock control daemon accepts start_server and answers nothing when that server then ends. It only writes
its log. A line there makes mpsd look for the server among the children of the control daemon, so a forged
line ends no start. The text of the error comes from the log.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine

from mpsd.base.errors import ControlError
from mpsd.base.model import ProcessInstance
from mpsd.base.text import printable
from mpsd.mps import log as mpslog
from mpsd.mps.control import ControlDaemon

STATUS_PATIENCE_S = 0.25
_LOOK_AGAIN_S = 0.05
_WORDS = 300


class ServerEndedError(ControlError):
    """The server of a domain ended while it started."""


class StartWatch:
    """The signs in a domain's log of how the start of its server goes.

    `begun`: pid of the server that the control daemon says it starts, None before.
    """

    def __init__(self) -> None:
        self.begun: int | None = None
        self._sign = asyncio.Event()
        self._failed = False
        self._ended: mpslog.ServerExited | None = None
        self._words = ""
        self._last: tuple[int | None, str] = None, ""

    def feed(self, line: mpslog.LogLine) -> None:
        match line.event:
            case mpslog.ServerStarted(pid=pid):
                self.begun = pid
                return
            case mpslog.StartFailed():
                self._words = line.text
                self._failed = True
            case mpslog.ServerExited() as ended:
                self._ended = ended
            case _:
                self._last = line.writer, line.text
                return
        self._sign.set()

    @property
    def failed(self) -> bool:
        """Return whether a line says that the begun server has ended."""
        return self._ended is not None and self._ended.pid == self.begun

    async def words(self) -> str:
        """Return why the server ended, once its control daemon has logged its exit status."""
        await self._until_status()
        return self._obituary()

    async def until_active(self, control: ControlDaemon, deadline_s: float) -> None:
        """Wait until the server, which was asked for, is active.

        Raises ServerEndedError as soon as it has ended, DeadlineError.
        """
        active = asyncio.ensure_future(control.wait_active(deadline_s))
        try:
            while not active.done():
                sign = asyncio.ensure_future(self._sign.wait())
                # After the first sign the server may take a moment to end.
                pause = _LOOK_AGAIN_S if self._failed else None
                await asyncio.wait({active, sign}, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                sign.cancel()
                told = self._sign.is_set() or self._failed
                self._sign.clear()
                if told and not active.done() and not control.server_instances():
                    await self._until_status()
                    raise ServerEndedError(self._obituary(), remedy="see mpsd-ctl doctor and control.log")
            await active
        finally:
            active.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await active

    async def _until_status(self) -> None:
        """Wait for the line with the exit status, which the control daemon writes last."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STATUS_PATIENCE_S):
                while self._ended is None:
                    await self._sign.wait()
                    self._sign.clear()

    def _obituary(self) -> str:
        ended = self._ended
        if ended is None:
            why = self._words or "it gave no reason"
            return f"the server ended: {printable(why, _WORDS)}"
        words = self._words or (self._last[1] if self._last[0] == ended.pid else "")
        text = f"server {ended.pid} ended with status {ended.status}"
        return f"{text}: {printable(words, _WORDS)}" if words else text


class FirstServer:
    """The start of a server that the control daemon makes for a first client, until the server is ACTIVE.

    `told`: a failure was reported. The control daemon may try again while the client waits; later failures
    are reported without a question to the control daemon.
    """

    def __init__(
        self,
        control: ControlDaemon,
        deadline_s: float,
        tell: Callable[[str, ProcessInstance | None], None],
        spawn: Callable[[Coroutine[None, None, None]], object],
    ) -> None:
        """`tell`: receives why a server did not become ACTIVE, and the server, if it was seen."""
        self._control, self._deadline_s, self._tell, self._spawn = control, deadline_s, tell, spawn
        self._watch = StartWatch()
        self._timer: asyncio.TimerHandle | None = None
        self._ending = False
        self.told = False

    def feed(self, line: mpslog.LogLine, *, private: bool) -> None:
        """Take a line of the domain's log. Only that of a `private` domain tells of an unseen server."""
        self._watch.feed(line)
        if isinstance(line.event, mpslog.ServerStarted):
            instances = self._control.server_instances()
            if instances and self._timer is None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(self._deadline_s, self._late, instances[-1])
        elif private and self._watch.failed and not self._control.server_instances():
            self.ended(None)

    def ended(self, server: ProcessInstance | None) -> None:
        """Report that a server has ended before it was ACTIVE. `server`: None if it was not seen."""
        self.close()
        if not self._ending:
            self._ending = True
            self._spawn(self._obituary(server))

    async def _obituary(self, server: ProcessInstance | None) -> None:
        reason = await self._watch.words()
        self._watch, self._ending = StartWatch(), False
        if not self.told or server is not None:
            self.told = True
            self._tell(reason, server)

    def _late(self, server: ProcessInstance) -> None:
        self._timer = None
        if server in self._control.server_instances() and not self.told:
            self.told = True
            self._tell(f"server {server.pid} was not ACTIVE after {self._deadline_s:g} s", server)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
