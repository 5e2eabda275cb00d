"""The start of a domain's server: active, or ended with the server's own words.

The stock control daemon accepts start_server and answers nothing when that server then ends. It only writes
its log. A line there makes mpsd look for the server among the children of the control daemon, so a forged
line ends no start. The text of the error comes from the log.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from mpsd.base.errors import ControlError, MpsdError
from mpsd.base.model import ProcessInstance, ServerState
from mpsd.base.text import printable
from mpsd.mps import log as mpslog
from mpsd.mps.control import ControlDaemon

STATUS_PATIENCE_S = 0.25
_LOOK_AGAIN_S = 0.05
_ASK_S = 2.0
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


@dataclass(frozen=True, slots=True)
class FirstServerCallbacks:
    """Receivers of what became of a first server.

    `failed`: why it ended before it was ready, and the server, if it was seen. `late`: why it counts as
    failed although it runs. `died`: it ended after its control daemon had called it ready. `ask`: ask for its
    state, which is known to be final.
    """

    failed: Callable[[str, ProcessInstance | None], None]
    late: Callable[[str, ProcessInstance], None]
    died: Callable[[ProcessInstance], None]
    ask: Callable[[], None]


class FirstServer:
    """The start of a server that the control daemon makes for a first client, until the server is ACTIVE.

    `told`: a failure was reported. The control daemon may try again while the client waits; later failures
    are reported without a question to the control daemon.
    """

    def __init__(
        self,
        control: ControlDaemon,
        deadline_s: float,
        callbacks: FirstServerCallbacks,
        spawn: Callable[[Coroutine[None, None, None]], object],
    ) -> None:
        self._control, self._deadline_s, self._spawn = control, deadline_s, spawn
        self._callbacks = callbacks
        self._watch = StartWatch()
        self._timer: asyncio.TimerHandle | None = None
        self._ending = False
        self._ready: int | None = None
        self._closed = False
        self.told = False

    def feed(self, line: mpslog.LogLine, *, private: bool) -> None:
        """Take a line of the domain's log. Only that of a `private` domain tells of an unseen server."""
        self._watch.feed(line)
        match line.event:
            case mpslog.ServerStarted():
                if self._timer is None:
                    self._arm(self._present())
                return
            case mpslog.ServerReady(pid=pid):
                self._ready = pid
            case _:
                pass
        if private and self._watch.failed and not self._control.server_instances():
            self.ended(None)

    def _present(self) -> ProcessInstance | None:
        instances = self._control.server_instances()
        return instances[-1] if instances else None

    def ended(self, server: ProcessInstance | None) -> None:
        """Report that a server has ended before it was ACTIVE. `server`: None if it was not seen.

        A server that was ready may have had clients, although mpsd has not read its state yet.
        """
        self._disarm()
        if server is not None and server.pid == self._ready:
            self._watch = StartWatch()
            self._callbacks.died(server)
        elif not self._ending:
            self._ending = True
            self._spawn(self._obituary(server))

    async def _obituary(self, server: ProcessInstance | None) -> None:
        reason = await self._watch.words()
        self._watch, self._ending = StartWatch(), False
        if not self.told or server is not None:
            self.told = True
            self._callbacks.failed(reason, server)

    def _arm(self, server: ProcessInstance | None) -> None:
        """Give this server the whole deadline. None: it is not seen yet."""
        if not self._closed:
            self._timer = asyncio.get_running_loop().call_later(self._deadline_s, self._due, server)

    def _due(self, server: ProcessInstance | None) -> None:
        self._timer = None
        present = self._present()
        if present is None:
            return
        if present != server:
            self._arm(present)
        elif not self.told:
            self._spawn(self._decide(present))

    async def _decide(self, server: ProcessInstance) -> None:
        """Ask the control daemon, because an earlier question may have had no answer."""
        try:
            state = await self._control.server_state(server.pid, _ASK_S)
        except (MpsdError, OSError):
            # Without an answer the server may well be ACTIVE.
            state = None
        if self._closed or self.told or server != self._present():
            return
        if state is ServerState.INITIALIZING:
            self.told = True
            self._callbacks.late(f"server {server.pid} was not ACTIVE after {self._deadline_s:g} s", server)
            return
        if state is not None:
            self._callbacks.ask()
        if self._timer is None:
            self._arm(server)

    def close(self) -> None:
        """End the watch: the server has become ACTIVE or has faulted, or the domain is forgotten."""
        self._closed = True
        self._disarm()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
